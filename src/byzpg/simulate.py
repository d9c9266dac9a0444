"""Whole federations, many seeds at once, as one compiled program: it moves messages and holds no line of the method.

Federations whose agents play alike run side by side, whatever their size, rules and liars: the episodes of all are one
batch, so are the gradients of those that estimate alike, and the messages of each are its own. Iterations run in
blocks: `lax.scan` inside, progress, checkpoints and Ctrl-C between. The coin belongs to the driver: all seeds of a
simulation share one sequence, or every iteration would compute both batch sizes. On a host task episodes are played
between programs, and all the rest of an iteration is one program.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from byzpg.algorithms import Agent, AgentState, Federation, Sampled
from byzpg.cluster import AGENTS, BY_SEED, EVERYWHERE, Deal, layout, mesh_for, placed
from byzpg.coin import CommonCoin
from byzpg.envs.host import HostTask
from byzpg.exchange import Diagnostics, Phase, exchange
from byzpg.rollouts import Episodes, Liars
from byzpg.rules import Rule, clear_search_errors

# Addresses of random numbers: fold_in(seed's key, INITIAL) for θ_0, SCHEDULE for who lies; for the rest, fold_in(seed's
# key, ITERATIONS, iteration, stream), stream k being the play of agent k, and those from K on the rounds of messages.
INITIAL, SCHEDULE, ITERATIONS = range(3)

SKIP, SMALL, LARGE = range(3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SimulationState:
    """All that continues one federation; arrays of agents lead with [seed, holder]."""

    agents: AgentState
    output: Array  # θ_T̂ [seed, holder, d], once iteration T̂ has come
    iteration: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Keys:
    """Where random numbers come from, one key per seed."""

    schedule: Array
    iterations: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleMetrics:
    """What honest players sampled in one iteration, per seed."""

    return_mean: Array  # undiscounted training return
    return_std: Array  # over episodes
    environment_steps: Array  # taken by all players together
    largest_weight: Array  # max ω of whole episodes, before the cap; this and the next two are perfect in large batches
    effective_sample: Array  # (Σω)²/(BΣω²) after the cap, mean over players
    capped: Array  # fraction of ω above the cap


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExchangeMetrics:
    """What the exchange of gradients did, per seed, averaged over honest receivers; NaN where none took place."""

    aggregation_error: Array  # ‖v − honest mean of ṽ‖²
    honest_variance: Array  # of ṽ; aggregation_error over this is C_ra · α
    gradient_diameter: Array  # of honest ṽ
    honest_weight: Array  # weight that honest senders got; NaN for rules without weights
    byzantine_weight: Array

    @classmethod
    def none(cls, num_seeds: int) -> "ExchangeMetrics":
        return cls(*(jnp.full(num_seeds, jnp.nan) for _ in fields(cls)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics(SampleMetrics, ExchangeMetrics):
    """One value per seed and iteration."""

    diameter_before: Array  # of honest θ̃, before agreement; NaN where there is none
    diameter_after: Array


Federations = tuple[Federation, ...]
States = tuple[SimulationState, ...]  # one per federation, all at the same iteration


@dataclass(frozen=True)
class Simulation:
    """Federations whose agents play alike, each with the same seeds, side by side."""

    federations: Federations
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len({federation.agent.playing for federation in self.federations}) != 1:
            raise ValueError(
                "the agents of a simulation must have one task, policy, horizon and one pair of batch sizes: "
                "put federations of others into another simulation."
            )
        if self.on_host and len(self.federations) > 1:
            raise ValueError("a task on the host is played by one federation at a time: make a simulation of each.")

    def start(self) -> States:
        """The states before iteration 0: per seed one θ_0, common to all agents of all federations."""
        if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            raise ValueError("training runs in float32: turn JAX's 64-bit mode (jax_enable_x64) off.")
        return self.placed(_start(jnp.asarray(self.seeds), self.federations))

    def placed(self, states: States) -> States:
        """The states where `run` leaves them: from elsewhere, a second program would be compiled for the next block."""
        return placed(states, self._mesh())

    def coin(self) -> CommonCoin:
        """The coin of all seeds: that of the first one's θ_0."""
        first = _start(jnp.asarray(self.seeds), self.federations)[0]
        return CommonCoin.of(np.asarray(first.agents.parameters[0, 0]))

    def run(
        self, states: States, batches: Sequence[int] | np.ndarray, output_iteration: int
    ) -> tuple[States, tuple[Metrics, ...]]:
        """One iteration per entry of `batches`: LARGE, SMALL, or SKIP to fill up a block; metrics [seed, entry].

        The states handed in are consumed. One program is compiled per length of `batches`; on the host, one per size.
        """
        with clear_search_errors():
            seeds = jnp.asarray(self.seeds)
            keys = Keys(_keys(seeds, SCHEDULE), _keys(seeds, ITERATIONS))
            coins = (jnp.asarray(batches), jnp.asarray(output_iteration))
            run = _run_on_host if self.on_host else _run_block
            return jax.block_until_ready(run(states, keys, *coins, self.federations, self._mesh()))

    @property
    def on_host(self) -> bool:
        """Whether episodes are played outside JAX."""
        return isinstance(self.federations[0].agent.env, HostTask)

    def _mesh(self) -> Mesh:
        """On a host task only seeds are dealt to devices: episodes come from outside."""
        num_agents = 1 if self.on_host else max(federation.num_agents for federation in self.federations)
        return mesh_for(len(self.seeds), num_agents)


@partial(jax.jit, static_argnames="purpose")
def _keys(seeds: Array, purpose: int) -> Array:
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), purpose))(seeds)


@partial(jax.jit, static_argnames="federations")
def _start(seeds: Array, federations: Federations) -> States:
    initial = jax.vmap(federations[0].agent.policy.initial)(_keys(seeds, INITIAL))

    def of(federation: Federation) -> SimulationState:
        agents = _split(federation.agent.initial(jnp.repeat(initial, federation.num_holders, axis=0)), len(seeds))
        return SimulationState(agents, agents.parameters, jnp.zeros((), jnp.int32))

    return tuple(map(of, federations))


# Shorter compilation, on CPUs by the one and on GPUs by the other, for programs that then run about as fast. What the
# user sets in XLA_FLAGS takes precedence.
QUICK_COMPILATION = {
    option: value
    for option, value in {"xla_backend_optimization_level": 1, "xla_gpu_enable_triton_gemm": False}.items()
    if option not in os.environ.get("XLA_FLAGS", "")
}


@partial(jax.jit, static_argnames=("federations", "mesh"), donate_argnames="states", compiler_options=QUICK_COMPILATION)
def _run_block(
    states: States, keys: Keys, batches: Array, output_iteration: Array, federations: Federations, mesh: Mesh
) -> tuple[States, tuple[Metrics, ...]]:
    return jax.shard_map(
        partial(_iterate_block, federations, Deal(mesh.shape[AGENTS])),
        mesh=mesh,
        in_specs=(layout(states), BY_SEED, EVERYWHERE, EVERYWHERE),
        out_specs=(layout(states), BY_SEED),
        check_vma=False,
    )(states, keys, batches, output_iteration)


def _iterate_block(
    federations: Federations, deal: Deal, states: States, keys: Keys, batches: Array, output_iteration: Array
) -> tuple[States, tuple[Metrics, ...]]:
    """The iterations of one device's seeds and agents."""

    def iterate(states: States, batch: Array) -> tuple[States, tuple[Metrics, ...]]:
        states = _with_output(states, output_iteration)
        iteration = partial(_iteration, federations, deal, federations[0].agent.play)
        return lax.cond(batch == SKIP, _skip, iteration, states, keys, batch == LARGE)

    states, metrics = lax.scan(iterate, states, batches)
    return states, jax.tree.map(lambda values: values.T, metrics)


def _run_on_host(
    states: States, keys: Keys, batches: Array, output_iteration: Array, federations: Federations, mesh: Mesh
) -> tuple[States, tuple[Metrics, ...]]:
    """As `_run_block`, for one federation with episodes from outside JAX."""
    metrics = []
    for batch in batches.tolist():
        if batch == SKIP:
            metrics.append(_skip(states, keys, False)[1])
            continue
        large = batch == LARGE
        # One device: the policies of one time step are too little to be dealt out.
        players = jax.device_put(_players_now(states, keys, federations, large), mesh.devices.flat[0])
        liars = _liars(federations, [players])
        episodes = federations[0].agent.play(players.agents.parameters, players.keys, large, liars)
        states, entry = _run_iteration(states, keys, placed(episodes, mesh), output_iteration, federations, large, mesh)
        metrics.append(entry)
    return states, jax.tree.map(lambda *entries: np.stack(entries, axis=1), *metrics)


@partial(
    jax.jit,
    static_argnames=("federations", "large", "mesh"),
    donate_argnames="states",
    compiler_options=QUICK_COMPILATION,
)
def _run_iteration(
    states: States,
    keys: Keys,
    episodes: Episodes,
    output_iteration: Array,
    federations: Federations,
    large: bool,
    mesh: Mesh,
) -> tuple[States, tuple[Metrics, ...]]:
    """One iteration with the episodes given."""

    def iterate(
        states: States, keys: Keys, episodes: Episodes, output_iteration: Array
    ) -> tuple[States, tuple[Metrics, ...]]:
        states = _with_output(states, output_iteration)
        return _iteration(federations, Deal(), lambda *_: episodes, states, keys, large)

    return jax.shard_map(
        iterate,
        mesh=mesh,
        in_specs=(layout(states), BY_SEED, layout(episodes), EVERYWHERE),
        out_specs=(layout(states), BY_SEED),
        check_vma=False,
    )(states, keys, episodes, output_iteration)


def _with_output(states: States, output_iteration: Array) -> States:
    def of(state: SimulationState) -> SimulationState:
        arrived = jnp.equal(state.iteration, output_iteration)
        return replace(state, output=jnp.where(arrived, state.agents.parameters, state.output))

    return tuple(map(of, states))


def _skip(states: States, keys: Keys, large: Array | bool) -> tuple[States, tuple[Metrics, ...]]:
    blank = jnp.full(len(keys.schedule), jnp.nan)
    return states, tuple(Metrics(*(blank for _ in fields(Metrics))) for _ in states)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cast:
    """Who lies in an iteration, and everyone's random numbers."""

    liars: Array  # [seed, f]
    is_honest: Array  # [seed, agent]
    play_keys: Array  # [seed, agent]
    gradient_keys: Array  # [seed]
    round_keys: Array  # [seed, round]

    def honest_players(self, num_players: int) -> Array:
        """Of those who play [seed, player]. A lone one is honest: a server, with agent 0's numbers, or a lone agent."""
        return self.is_honest if num_players > 1 else jnp.ones_like(self.is_honest[:, :1])


def _cast(federation: Federation, iteration: Array, keys: Keys) -> Cast:
    everyone = federation.num_agents
    liars = jax.vmap(lambda key: federation.byzantine_set(everyone, federation.num_byzantine, iteration, key))(
        keys.schedule
    )
    is_honest = jax.vmap(lambda each: jnp.ones(everyone, bool).at[each].set(False))(liars)

    def streams(key: Array) -> Array:
        now = jax.random.fold_in(key, iteration)
        return jax.vmap(jax.random.fold_in, (None, 0))(now, jnp.arange(everyone + 1 + federation.rounds))

    fresh = jax.vmap(streams)(keys.iterations)
    return Cast(liars, is_honest, fresh[:, :everyone], fresh[:, everyone], fresh[:, everyone + 1 :])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Players:
    """Those who play in an iteration; arrays lead with [seed × player]."""

    agents: AgentState
    keys: Array
    byzantine: Array


def _players(federation: Federation, deal: Deal, state: SimulationState, cast: Cast, large: bool) -> Players:
    """Those of this device."""
    num_players = federation.num_players(large)
    agents = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (leaf.shape[0], num_players, *leaf.shape[2:])), state.agents
    )
    players = Players(agents, cast.play_keys[:, :num_players], ~cast.honest_players(num_players))
    return _merge(deal.part(players, axis=1))


@partial(jax.jit, static_argnames=("federations", "large"))
def _players_now(states: States, keys: Keys, federations: Federations, large: bool) -> Players:
    return _players(federations[0], Deal(), states[0], _cast(federations[0], states[0].iteration, keys), large)


def _liars(federations: Federations, players: list[Players]) -> Liars:
    """The attacks on play, each with the players of all federations [player] that commit it."""
    attacks = dict.fromkeys(federation.attack for federation in federations if federation.attack.poisons_play)
    pairs = list(zip(federations, players, strict=True))
    return [
        (attack, jnp.concatenate([each.byzantine & (federation.attack == attack) for federation, each in pairs]))
        for attack in attacks
    ]


def _everyone(parts: list[Any]) -> Any:
    """The players of several federations in a row: leaves joined along their first axis, or, without one, the first."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves) if leaves[0].ndim else leaves[0], *parts)


def _of_each(players: list[Players], tree: Any) -> list[Any]:
    """The opposite of `_everyone`; leaves without an axis are everyone's."""
    ends = np.cumsum([len(each.keys) for each in players])[:-1]
    leaves, structure = jax.tree.flatten(tree)
    pieces = (jnp.split(leaf, ends) if leaf.ndim else [leaf] * len(players) for leaf in leaves)
    return [jax.tree.unflatten(structure, each) for each in zip(*pieces, strict=True)]


def _estimates(
    federations: Federations, players: list[Players], episodes: Episodes, large: bool
) -> list[tuple[Array, Sampled]]:
    """Of each federation, its players' estimates and what they sampled; agents that estimate alike do so at once."""
    alike: dict[Agent, list[int]] = {}
    for index, federation in enumerate(federations):
        alike.setdefault(federation.agent, []).append(index)
    played = _of_each(players, episodes) if len(alike) > 1 else []
    results: dict[int, tuple[Array, Sampled]] = {}
    for agent, members in alike.items():
        theirs = [players[index] for index in members]
        seen = _everyone([played[index] for index in members]) if played else episodes
        found = agent.estimate(_everyone(theirs).agents, seen, large)
        results |= zip(members, _of_each(theirs, found), strict=True)
    return [results[index] for index in range(len(federations))]


# Plays a batch: of parameters, keys, whether it is large, and who lies.
Play = Callable[[Array, Array, bool, Liars], Episodes]


def _iteration(
    federations: Federations, deal: Deal, play: Play, states: States, keys: Keys, large: Array | bool
) -> tuple[States, tuple[Metrics, ...]]:
    """One iteration of all federations and seeds."""
    num_seeds = len(keys.schedule)
    rounds = [
        _Round(federation, deal, state, _cast(federation, state.iteration, keys))
        for federation, state in zip(federations, states, strict=True)
    ]

    def estimated(batch_is_large: bool) -> list[tuple[Array, SampleMetrics, ExchangeMetrics]]:
        """Of each federation, what its holders of parameters estimate [seed, holder, d]: a server, by its workers."""
        players = [_players(each.federation, deal, each.state, each.cast, batch_is_large) for each in rounds]
        # Not whole players: optimizers of other federations may have other states.
        parameters, play_keys = _everyone([(each.agents.parameters, each.keys) for each in players])
        liars = _liars(federations, players)
        episodes = play(parameters, play_keys, batch_is_large, liars)
        results = _estimates(federations, players, episodes, batch_is_large)
        found = []
        for this, result in zip(rounds, results, strict=True):
            num_players = this.federation.num_players(batch_is_large)
            estimates, sampled = deal.whole(_split(result, num_seeds), num_players, axis=1)
            exchanged = ExchangeMetrics.none(num_seeds)
            if this.federation.centralized and batch_is_large:
                estimates, exchanged = this.aggregate(estimates)
            found.append((estimates, _sample_metrics(this.cast.honest_players(num_players), sampled), exchanged))
        return found

    found = _either(large, partial(estimated, True), partial(estimated, False))
    outcomes = [this.finish(*each) for this, each in zip(rounds, found, strict=True)]
    following, metrics = zip(*outcomes, strict=True)
    return following, metrics


@dataclass(frozen=True)
class _Round:
    """One federation in one iteration: its messages, and what comes of them."""

    federation: Federation
    deal: Deal
    state: SimulationState
    cast: Cast

    def send(self, rule: Rule, phase: Phase, vectors: Array, message_keys: Array) -> tuple[Array, Diagnostics]:
        """One round of messages: results [seed, receiver, d]."""
        federation = self.federation

        def of_seed(vectors: Array, liars: Array, key: Array) -> tuple[Array, Diagnostics]:
            results, diagnostics = exchange(
                rule,
                vectors,
                byzantine=liars,
                attack=federation.attack,
                num_byzantine=federation.num_declared,
                phase=phase,
                iteration=self.state.iteration,
                key=key,
                at_server=federation.centralized,
                diagnose=True,
                deal=self.deal,
            )
            assert diagnostics is not None
            return results.reshape(federation.num_holders, -1), diagnostics

        return jax.vmap(of_seed)(vectors, self.cast.liars, message_keys)

    def aggregate(self, estimates: Array) -> tuple[Array, ExchangeMetrics]:
        if self.federation.num_agents == 1:
            return estimates, ExchangeMetrics.none(len(estimates))
        aggregated, report = self.send(self.federation.aggregator, "gradients", estimates, self.cast.gradient_keys)
        return aggregated, _exchange_metrics(self.cast.is_honest, report)

    def finish(self, own: Array, sampled: SampleMetrics, exchanged: ExchangeMetrics) -> tuple[SimulationState, Metrics]:
        """The rest of the iteration, once its holders of parameters have their estimates [seed, holder, d]."""
        federation, state, num_seeds = self.federation, self.state, len(own)
        aggregated = own
        if not federation.centralized:
            aggregated, exchanged = self.aggregate(own)
        before = state.agents.parameters
        advanced = federation.agent.advance(_merge(state.agents), _merge(own), _merge(aggregated))
        agents = _split(advanced, num_seeds)

        diameters = jnp.full((2, num_seeds), jnp.nan)
        if federation.agrees:
            assert federation.agreement is not None
            send_parameters = partial(self.send, federation.agreement, "parameters")

            def agree(parameters: Array, message_keys: Array) -> tuple[Array, tuple[Array, Array]]:
                agreed, report = send_parameters(parameters, message_keys)
                return agreed, (report.diameter_before, report.diameter_after)

            agreed, (first, last) = lax.scan(agree, agents.parameters, self.cast.round_keys.T)
            diameters = jnp.stack([first[0], last[-1]])
            agents = federation.agent.settle(before, agents, agreed)

        metrics = Metrics(**vars(sampled), **vars(exchanged), diameter_before=diameters[0], diameter_after=diameters[1])
        return SimulationState(agents, state.output, state.iteration + 1), metrics


def _either(condition: Array | bool, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """lax.cond, without the other branch where the condition is known beforehand."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    return lax.cond(condition, yes, no)


def _mean(is_honest: Array, values: Array) -> Array:
    """The mean [seed] over honest players of values [seed, player, ...]."""
    per_player = jnp.mean(values.reshape(*is_honest.shape, -1), axis=2)
    return jnp.sum(jnp.where(is_honest, per_player, 0), axis=1) / jnp.sum(is_honest, axis=1)


def _sample_metrics(is_honest: Array, sampled: Sampled) -> SampleMetrics:
    return_mean = _mean(is_honest, sampled.returns)
    return SampleMetrics(
        return_mean=return_mean,
        return_std=jnp.sqrt(_mean(is_honest, jnp.square(sampled.returns - return_mean[:, None, None]))),
        environment_steps=jnp.sum(sampled.lengths, axis=(1, 2)).astype(jnp.float32),
        largest_weight=jnp.max(jnp.where(is_honest, sampled.health.largest, 0), axis=1),
        effective_sample=_mean(is_honest, sampled.health.effective_sample),
        capped=_mean(is_honest, sampled.health.capped),
    )


def _exchange_metrics(is_honest: Array, report: Diagnostics) -> ExchangeMetrics:
    is_honest_receiver = is_honest if report.error.shape == is_honest.shape else jnp.ones_like(report.error, bool)
    honest_weight = byzantine_weight = jnp.full(len(is_honest), jnp.nan)
    if report.weights is not None:
        honest_weight, byzantine_weight = (
            _mean(is_honest_receiver, jnp.sum(jnp.where(senders[:, None], report.weights, 0), axis=2))
            for senders in (is_honest, ~is_honest)
        )
    return ExchangeMetrics(
        aggregation_error=_mean(is_honest_receiver, report.error),
        honest_variance=report.honest_variance,
        gradient_diameter=report.diameter_before,
        honest_weight=honest_weight,
        byzantine_weight=byzantine_weight,
    )


def _merge(tree):
    """[seed, agent, ...] → [seed × agent, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def _split(tree, num_seeds: int):
    """[seed × agent, ...] → [seed, agent, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(num_seeds, -1, *leaf.shape[1:]), tree)
