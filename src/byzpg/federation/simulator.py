"""Whole federations, many seeds at once, as one compiled program: it moves messages and holds no line of the method.

Federations whose agents play alike run side by side, whatever their size, rules and attackers: the episodes of all are
one batch, and so are the gradients of agents that estimate alike; the messages of each federation are its own.
Iterations run in blocks: `lax.scan` inside; progress, checkpoints and Ctrl-C in between. The coin belongs to the
driver: all seeds of a simulation share one sequence, because otherwise every iteration would compute both batch sizes.
On a host task, episodes are played between programs, and the rest of an iteration is one program.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from byzpg.envs.host import HostTask
from byzpg.federation.algorithms import Agent, AgentState, Federation, Sampled
from byzpg.federation.devices import AGENTS, BY_SEED, EVERYWHERE, QUICK_COMPILATION, layout, mesh_for, placed
from byzpg.federation.metrics import ExchangeMetrics, Metrics, SampleMetrics
from byzpg.federation.schedule import ATTACKERS, INITIAL, ITERATIONS, play_stream, round_stream, stream_key
from byzpg.learning.rollouts import Episodes, PlayAttacks
from byzpg.robust.exchange import ONE_DEVICE, Diagnostics, Phase, Shards, exchange
from byzpg.robust.rules import Rule, clear_search_errors

# What an entry of a block of iterations is.
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

    attackers: Array
    iterations: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Block:
    """The iterations of one call."""

    batches: Array  # [iteration]: LARGE, SMALL, or SKIP to fill up the block
    output_iteration: Array  # T̂


Federations = tuple[Federation, ...]
States = tuple[SimulationState, ...]  # one per federation, all at the same iteration


@dataclass(frozen=True)
class Simulation:
    """Federations whose agents play alike, each with the same seeds, side by side."""

    federations: Federations
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len({federation.agent.shared for federation in self.federations}) != 1:
            raise ValueError(
                "the agents of a simulation must have the same task, policy, horizon, batch sizes, θ_0 and coin: "
                "put federations with others into another simulation."
            )
        if self.on_host and len(self.federations) > 1:
            raise ValueError("a host task is played by one federation at a time: make a simulation for each.")

    def start(self) -> States:
        """The states before iteration 0: θ_0 depends on the seed, and is the same for all agents."""
        if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            raise ValueError("training runs in float32: turn JAX's 64-bit mode (jax_enable_x64) off.")
        return self.placed(_start(jnp.asarray(self.seeds), self.federations))

    def placed(self, states: States) -> States:
        """The states on the devices where `run` leaves them; from others, the next block would be compiled again."""
        return placed(states, self._mesh())

    def initial_parameters(self) -> np.ndarray:
        """θ_0 [d] of the first seed: the coin that follows from it is common to all seeds."""
        first = _start(jnp.asarray(self.seeds), self.federations)[0]
        return np.asarray(first.agents.parameters[0, 0])

    def run(
        self,
        states: States,
        batches: Sequence[int] | np.ndarray,
        output_iteration: int,
        *,
        only_large: bool = False,
    ) -> tuple[States, tuple[Metrics, ...]]:
        """Run one iteration per entry of `batches`.

        Args:
            states: Where to begin; they are consumed.
            batches: LARGE, SMALL, or SKIP to fill up a block. One program is compiled per length of `batches`; on a
                host task, one per batch size.
            output_iteration: T̂, whose parameters are kept.
            only_large: Whether no block of the run has a SMALL entry: a program without them compiles in half the time.

        Returns:
            The states afterwards, and metrics [seed, entry] of each federation.
        """
        if only_large and SMALL in batches:
            raise ValueError("only_large is for runs without small batches, and this block has one.")
        with clear_search_errors():
            seeds = jnp.asarray(self.seeds)
            keys = Keys(_keys(seeds, ATTACKERS), _keys(seeds, ITERATIONS))
            run = _run_on_host if self.on_host else partial(_run_block, only_large=only_large)
            block = _Block(jnp.asarray(batches), jnp.asarray(output_iteration))
            return jax.block_until_ready(run(states, keys, block, self.federations, self._mesh()))

    @property
    def on_host(self) -> bool:
        """Whether episodes are played outside JAX."""
        return isinstance(self.federations[0].agent.env, HostTask)

    def _mesh(self) -> Mesh:
        """On a host task only seeds are divided among devices: episodes come from outside."""
        num_agents = 1 if self.on_host else max(federation.num_agents for federation in self.federations)
        return mesh_for(len(self.seeds), num_agents)


@partial(jax.jit, static_argnames="purpose")
def _keys(seeds: Array, purpose: int) -> Array:
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), purpose))(seeds)


@partial(jax.jit, static_argnames="federations")
def _start(seeds: Array, federations: Federations) -> States:
    keys = _keys(seeds, INITIAL)

    def of(federation: Federation) -> SimulationState:
        agent = federation.agent
        initial = jax.vmap(partial(agent.conventions.initial_parameters, agent.policy))(keys)
        agents = _split(agent.initial(jnp.repeat(initial, federation.num_holders, axis=0)), len(seeds))
        return SimulationState(agents, agents.parameters, jnp.zeros((), jnp.int32))

    return tuple(map(of, federations))


# Blocks of iterations


@partial(
    jax.jit,
    static_argnames=("federations", "mesh", "only_large"),
    donate_argnames="states",
    compiler_options=QUICK_COMPILATION,
)
def _run_block(
    states: States, keys: Keys, block: _Block, federations: Federations, mesh: Mesh, *, only_large: bool
) -> tuple[States, tuple[Metrics, ...]]:
    return jax.shard_map(
        partial(_iterate_block, federations, Shards(mesh.shape[AGENTS], AGENTS), only_large),
        mesh=mesh,
        in_specs=(layout(states), BY_SEED, EVERYWHERE),
        out_specs=(layout(states), BY_SEED),
        check_vma=False,
    )(states, keys, block)


def _iterate_block(
    federations: Federations, shards: Shards, only_large: bool, states: States, keys: Keys, block: _Block
) -> tuple[States, tuple[Metrics, ...]]:
    """The iterations of one device's seeds and agents."""

    def iterate(states: States, batch: Array) -> tuple[States, tuple[Metrics, ...]]:
        states = _with_output(states, block.output_iteration)
        large = True if only_large else batch == LARGE
        iteration = partial(_iteration, federations, shards, federations[0].agent.play, states, keys, large)
        return lax.cond(batch == SKIP, partial(_skip, states, keys), iteration)

    states, metrics = lax.scan(iterate, states, block.batches)
    return states, jax.tree.map(lambda values: values.T, metrics)


def _run_on_host(
    states: States, keys: Keys, block: _Block, federations: Federations, mesh: Mesh
) -> tuple[States, tuple[Metrics, ...]]:
    """As `_run_block`, for one federation with episodes from outside JAX."""
    metrics = []
    for batch in block.batches.tolist():
        if batch == SKIP:
            metrics.append(_skip(states, keys)[1])
            continue
        large = batch == LARGE
        # One device: the policies of one time step are too little work to divide.
        players = jax.device_put(_players_now(states, keys, federations, large), mesh.devices.flat[0])
        attacks = _attacks_on_play(federations, [players])
        episodes = federations[0].agent.play(players.agents.parameters, players.keys, large, attacks)
        states, entry = _run_iteration(
            states,
            keys,
            placed(episodes, mesh),
            block.output_iteration,
            federations=federations,
            large=large,
            mesh=mesh,
        )
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
    *,
    federations: Federations,
    large: bool,
    mesh: Mesh,
) -> tuple[States, tuple[Metrics, ...]]:
    """One iteration with the episodes given."""

    def iterate(
        states: States, keys: Keys, episodes: Episodes, output_iteration: Array
    ) -> tuple[States, tuple[Metrics, ...]]:
        states = _with_output(states, output_iteration)
        return _iteration(federations, ONE_DEVICE, lambda *_: episodes, states, keys, large)

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


def _skip(states: States, keys: Keys) -> tuple[States, tuple[Metrics, ...]]:
    blank = jnp.full(len(keys.attackers), jnp.nan)
    return states, tuple(Metrics(*(blank for _ in fields(Metrics))) for _ in states)


# One iteration


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draws:
    """What chance decides in one iteration of a federation: who attacks, and the keys of play and messages."""

    attackers: Array  # [seed, b]
    is_honest: Array  # [seed, agent]
    play_keys: Array  # [seed, agent]
    gradient_keys: Array  # [seed]
    agreement_keys: Array  # [seed, round]

    def honest_players(self, num_players: int) -> Array:
        """Which players are honest [seed, player]. A lone player is: a server, with agent 0's keys, or a lone agent."""
        return self.is_honest if num_players > 1 else jnp.ones_like(self.is_honest[:, :1])


def _draws(federation: Federation, iteration: Array, keys: Keys) -> Draws:
    num_agents = federation.num_agents

    def attackers_of(key: Array) -> Array:
        return federation.byzantine_set(num_agents, federation.num_attackers, iteration, key)

    attackers = jax.vmap(attackers_of)(keys.attackers)
    is_honest = jax.vmap(lambda each: jnp.ones(num_agents, bool).at[each].set(False))(attackers)
    play = [play_stream(agent) for agent in range(num_agents)]
    rounds = [round_stream(num_agents, number) for number in range(1 + federation.rounds)]
    streams = jnp.asarray([*play, *rounds])
    # [seed, stream]
    fresh = jax.vmap(lambda key: jax.vmap(partial(stream_key, key, iteration))(streams))(keys.iterations)
    play_keys, round_keys = fresh[:, :num_agents], fresh[:, num_agents:]
    return Draws(attackers, is_honest, play_keys, gradient_keys=round_keys[:, 0], agreement_keys=round_keys[:, 1:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Players:
    """The agents that play in an iteration; arrays lead with [seed × player]."""

    agents: AgentState
    keys: Array
    byzantine: Array


def _players(federation: Federation, shards: Shards, state: SimulationState, draws: Draws, large: bool) -> Players:
    """The players of this device."""
    num_players = federation.num_players(large)
    agents = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (leaf.shape[0], num_players, *leaf.shape[2:])), state.agents
    )
    players = Players(agents, draws.play_keys[:, :num_players], ~draws.honest_players(num_players))
    return _merge(shards.part(players, axis=1))


@partial(jax.jit, static_argnames=("federations", "large"))
def _players_now(states: States, keys: Keys, federations: Federations, large: bool) -> Players:
    draws = _draws(federations[0], states[0].iteration, keys)
    return _players(federations[0], ONE_DEVICE, states[0], draws, large)


def _attacks_on_play(federations: Federations, players: list[Players]) -> PlayAttacks:
    """The attacks on play, each with the players of all federations [player] that carry it out."""
    attacks = dict.fromkeys(federation.attack for federation in federations if federation.attack.poisons_play)
    pairs = list(zip(federations, players, strict=True))
    return [
        (attack, jnp.concatenate([each.byzantine & (federation.attack == attack) for federation, each in pairs]))
        for attack in attacks
    ]


def _joined(parts: Sequence[Any]) -> Any:
    """The rows of several federations as one batch. A leaf without an axis is the same for all: the first is taken."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves) if leaves[0].ndim else leaves[0], *parts)


def _separated(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """The inverse of `_joined`: the rows of each federation, which has `sizes` rows."""
    ends = np.cumsum(sizes)[:-1]
    leaves, structure = jax.tree.flatten(tree)
    pieces = (jnp.split(leaf, ends) if leaf.ndim else [leaf] * len(sizes) for leaf in leaves)
    return [jax.tree.unflatten(structure, each) for each in zip(*pieces, strict=True)]


def _estimates(
    agents: Sequence[Agent], players: Sequence[Players], episodes: Episodes, large: bool
) -> list[tuple[Array, Sampled]]:
    """The estimates of each federation's players and what they sampled; equal agents estimate as one batch."""
    sizes = [len(each.keys) for each in players]
    groups: dict[Agent, list[int]] = {}  # the federations of each distinct agent, by index
    for index, agent in enumerate(agents):
        groups.setdefault(agent, []).append(index)
    if len(groups) == 1:  # all players, in their order: nothing to rearrange
        return _separated(agents[0].estimate(_joined(players).agents, episodes, large), sizes)
    played = _separated(episodes, sizes)
    results: dict[int, tuple[Array, Sampled]] = {}
    for agent, members in groups.items():
        states = _joined([players[index] for index in members]).agents
        found = agent.estimate(states, _joined([played[index] for index in members]), large)
        results |= zip(members, _separated(found, [sizes[index] for index in members]), strict=True)
    return [results[index] for index in range(len(agents))]


# Plays a batch: parameters, keys, whether it is large, and the attacks on play.
Play = Callable[[Array, Array, bool, PlayAttacks], Episodes]


def _iteration(
    federations: Federations, shards: Shards, play: Play, states: States, keys: Keys, large: Array | bool
) -> tuple[States, tuple[Metrics, ...]]:
    """One iteration of all federations and seeds."""
    num_seeds = len(keys.attackers)
    iterations = [
        _Iteration(federation, shards, state, _draws(federation, state.iteration, keys))
        for federation, state in zip(federations, states, strict=True)
    ]

    def estimated(batch_is_large: bool) -> list[tuple[Array, SampleMetrics, ExchangeMetrics]]:
        """What the holders of parameters in each federation estimate [seed, holder, d]: a server, by its workers."""
        players = [_players(each.federation, shards, each.state, each.draws, batch_is_large) for each in iterations]
        # Not whole players: the optimizers of other federations may have other states.
        parameters, play_keys = _joined([(each.agents.parameters, each.keys) for each in players])
        episodes = play(parameters, play_keys, batch_is_large, _attacks_on_play(federations, players))
        agents = [federation.agent for federation in federations]
        results = _estimates(agents, players, episodes, batch_is_large)
        found = []
        for this, result in zip(iterations, results, strict=True):
            num_players = this.federation.num_players(batch_is_large)
            estimates, sampled = shards.whole(_split(result, num_seeds), num_players, axis=1)
            exchanged = ExchangeMetrics.none(num_seeds)
            if this.federation.centralized and batch_is_large:
                estimates, exchanged = this.aggregate(estimates)
            found.append((estimates, _sample_metrics(this.draws.honest_players(num_players), sampled), exchanged))
        return found

    found = _either(large, partial(estimated, True), partial(estimated, False))
    outcomes = [this.finish(*each) for this, each in zip(iterations, found, strict=True)]
    following, metrics = zip(*outcomes, strict=True)
    return following, metrics


@dataclass(frozen=True)
class _Iteration:
    """One federation in one iteration: its messages, and what follows from them."""

    federation: Federation
    shards: Shards
    state: SimulationState
    draws: Draws

    def send(self, rule: Rule, phase: Phase, vectors: Array, message_keys: Array) -> tuple[Array, Diagnostics]:
        """One round of messages: results [seed, receiver, d]."""
        federation = self.federation

        def of_seed(vectors: Array, attackers: Array, key: Array) -> tuple[Array, Diagnostics]:
            results, diagnostics = exchange(
                rule,
                vectors,
                byzantine=attackers,
                attack=federation.attack,
                num_byzantine=federation.num_byzantine,
                phase=phase,
                iteration=self.state.iteration,
                key=key,
                at_server=federation.centralized,
                diagnose=True,
                shards=self.shards,
            )
            assert diagnostics is not None
            return results.reshape(federation.num_holders, -1), diagnostics

        return jax.vmap(of_seed)(vectors, self.draws.attackers, message_keys)

    def aggregate(self, estimates: Array) -> tuple[Array, ExchangeMetrics]:
        if self.federation.num_agents == 1:
            return estimates, ExchangeMetrics.none(len(estimates))
        aggregated, report = self.send(self.federation.aggregator, "gradients", estimates, self.draws.gradient_keys)
        return aggregated, _exchange_metrics(self.draws.is_honest, report)

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

            agreed, (first, last) = lax.scan(agree, agents.parameters, self.draws.agreement_keys.T)
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
