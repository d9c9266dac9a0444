"""Whole federations, many seeds at once, as one compiled program: it moves messages and holds no line of the method.

Iterations run in blocks: `lax.scan` inside, progress, checkpoints and Ctrl-C between. The coin belongs to the driver:
all seeds of a simulation share one sequence, or every iteration would compute both batch sizes. On a host task episodes
are played between programs, and all the rest of an iteration is one program.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from byzpg.algorithms import AgentState, Federation, Sampled
from byzpg.attacks import Attack
from byzpg.coin import CommonCoin
from byzpg.envs.host import HostTask
from byzpg.exchange import Diagnostics, Phase, exchange
from byzpg.rollouts import Episodes
from byzpg.rules import Rule, clear_search_errors

# Addresses of random numbers: fold_in(seed's key, INITIAL) for θ_0, SCHEDULE for who lies; for the rest, fold_in(seed's
# key, ITERATIONS, iteration, stream), stream k being the play of agent k, and those from K on the rounds of messages.
INITIAL, SCHEDULE, ITERATIONS = range(3)

SKIP, SMALL, LARGE = range(3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SimulationState:
    """All that continues a simulation; arrays of agents lead with [seed, holder]."""

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


@dataclass(frozen=True)
class Simulation:
    """A federation run with several seeds side by side."""

    federation: Federation
    seeds: tuple[int, ...]

    def start(self) -> SimulationState:
        """The state before iteration 0: per seed one θ_0, common to all agents."""
        if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            raise ValueError("training runs in float32: turn JAX's 64-bit mode (jax_enable_x64) off.")
        return self.placed(_start(jnp.asarray(self.seeds), self.federation))

    def placed(self, state: SimulationState) -> SimulationState:
        """The state where `run` leaves it: from elsewhere, a second program would be compiled for the next block."""
        return _placed(state, self._mesh())

    def coin(self) -> CommonCoin:
        """The coin of all seeds: that of the first one's θ_0."""
        return CommonCoin.of(np.asarray(self.start().agents.parameters[0, 0]))

    def run(
        self, state: SimulationState, batches: Sequence[int] | np.ndarray, output_iteration: int
    ) -> tuple[SimulationState, Metrics]:
        """One iteration per entry of `batches`: LARGE, SMALL, or SKIP to fill up a block; metrics [seed, entry].

        The state handed in is consumed. One program is compiled per length of `batches`; on the host, one per size.
        """
        with clear_search_errors():
            seeds = jnp.asarray(self.seeds)
            keys = Keys(_keys(seeds, SCHEDULE), _keys(seeds, ITERATIONS))
            coins = (jnp.asarray(batches), jnp.asarray(output_iteration))
            run = _run_on_host if self.on_host else _run_block
            return jax.block_until_ready(run(state, keys, *coins, self.federation, self._mesh()))

    @property
    def on_host(self) -> bool:
        """Whether episodes are played outside JAX."""
        return isinstance(self.federation.agent.env, HostTask)

    def _mesh(self) -> Mesh:
        """Seeds need nothing of each other: they are dealt to as many devices as divide them evenly."""
        devices = jax.local_devices()
        num_devices = max(n for n in range(1, len(devices) + 1) if len(self.seeds) % n == 0)
        return Mesh(np.asarray(devices[:num_devices]), "seed")


@partial(jax.jit, static_argnames="purpose")
def _keys(seeds: Array, purpose: int) -> Array:
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), purpose))(seeds)


@partial(jax.jit, static_argnames="federation")
def _start(seeds: Array, federation: Federation) -> SimulationState:
    initial = jax.vmap(federation.agent.policy.initial)(_keys(seeds, INITIAL))
    agents = _split(federation.agent.initial(jnp.repeat(initial, federation.num_holders, axis=0)), len(seeds))
    return SimulationState(agents, agents.parameters, jnp.zeros((), jnp.int32))


# Shorter compilation, on CPUs by the one and on GPUs by the other, for programs that then run about as fast.
QUICK_COMPILATION = {
    "xla_backend_optimization_level": 1,
    "xla_gpu_enable_triton_gemm": False,
}


@partial(jax.jit, static_argnames=("federation", "mesh"), donate_argnames="state", compiler_options=QUICK_COMPILATION)
def _run_block(
    state: SimulationState, keys: Keys, batches: Array, output_iteration: Array, federation: Federation, mesh: Mesh
) -> tuple[SimulationState, Metrics]:
    by_seed, everywhere = PartitionSpec("seed"), PartitionSpec()
    return jax.shard_map(
        partial(_iterate_block, federation),
        mesh=mesh,
        in_specs=(_layout(state), by_seed, everywhere, everywhere),
        out_specs=(_layout(state), by_seed),
        check_vma=False,
    )(state, keys, batches, output_iteration)


def _layout(tree):
    """Which leaves are dealt to devices by seed: all that have seeds."""
    return jax.tree.map(lambda leaf: PartitionSpec("seed") if leaf.ndim else PartitionSpec(), tree)


def _placed(tree, mesh: Mesh):
    """The leaves on the devices that `_layout` gives them."""
    return jax.device_put(tree, jax.tree.map(partial(NamedSharding, mesh), _layout(tree)))


def _iterate_block(
    federation: Federation, state: SimulationState, keys: Keys, batches: Array, output_iteration: Array
) -> tuple[SimulationState, Metrics]:
    """The iterations of one device's seeds."""

    def iterate(state: SimulationState, batch: Array) -> tuple[SimulationState, Metrics]:
        state = _with_output(state, output_iteration)
        iteration = partial(_iteration, federation, federation.agent.play)
        return lax.cond(batch == SKIP, _skip, iteration, state, keys, batch == LARGE)

    state, metrics = lax.scan(iterate, state, batches)
    return state, jax.tree.map(lambda values: values.T, metrics)


def _run_on_host(
    state: SimulationState, keys: Keys, batches: Array, output_iteration: Array, federation: Federation, mesh: Mesh
) -> tuple[SimulationState, Metrics]:
    """As `_run_block`, with episodes from outside JAX."""
    metrics = []
    for batch in batches.tolist():
        if batch == SKIP:
            metrics.append(_skip(state, keys, False)[1])
            continue
        large = batch == LARGE
        # One device: the policies of one time step are too little to be dealt out.
        players = jax.device_put(_players_now(state, keys, federation, large), mesh.devices[0])
        episodes = federation.agent.play(
            players.agents.parameters, players.keys, large, federation.attack, players.byzantine
        )
        state, entry = _run_iteration(state, keys, _placed(episodes, mesh), output_iteration, federation, large, mesh)
        metrics.append(entry)
    return state, jax.tree.map(lambda *entries: np.stack(entries, axis=1), *metrics)


@partial(
    jax.jit,
    static_argnames=("federation", "large", "mesh"),
    donate_argnames="state",
    compiler_options=QUICK_COMPILATION,
)
def _run_iteration(
    state: SimulationState,
    keys: Keys,
    episodes: Episodes,
    output_iteration: Array,
    federation: Federation,
    large: bool,
    mesh: Mesh,
) -> tuple[SimulationState, Metrics]:
    """One iteration with the episodes given."""

    def iterate(
        state: SimulationState, keys: Keys, episodes: Episodes, output_iteration: Array
    ) -> tuple[SimulationState, Metrics]:
        return _iteration(federation, lambda *_: episodes, _with_output(state, output_iteration), keys, large)

    return jax.shard_map(
        iterate,
        mesh=mesh,
        in_specs=(_layout(state), PartitionSpec("seed"), _layout(episodes), PartitionSpec()),
        out_specs=(_layout(state), PartitionSpec("seed")),
        check_vma=False,
    )(state, keys, episodes, output_iteration)


def _with_output(state: SimulationState, output_iteration: Array) -> SimulationState:
    arrived = jnp.equal(state.iteration, output_iteration)
    return replace(state, output=jnp.where(arrived, state.agents.parameters, state.output))


def _skip(state: SimulationState, keys: Keys, large: Array | bool) -> tuple[SimulationState, Metrics]:
    blank = jnp.full(len(keys.schedule), jnp.nan)
    return state, Metrics(*(blank for _ in fields(Metrics)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cast:
    """Who lies in an iteration, and everyone's random numbers."""

    liars: Array  # [seed, f]
    is_honest: Array  # [seed, agent]
    play_keys: Array  # [seed, agent]
    gradient_keys: Array  # [seed]
    round_keys: Array  # [seed, round]


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


def _players(federation: Federation, state: SimulationState, cast: Cast, large: bool) -> Players:
    """A lone player is honest: a server, with agent 0's random numbers, or a lone agent."""
    num_players = federation.num_players(large)
    agents = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (leaf.shape[0], num_players, *leaf.shape[2:])), state.agents
    )
    liars = ~cast.is_honest if num_players > 1 else jnp.zeros_like(cast.is_honest[:, :1])
    return _merge(Players(agents, cast.play_keys[:, :num_players], liars))


@partial(jax.jit, static_argnames=("federation", "large"))
def _players_now(state: SimulationState, keys: Keys, federation: Federation, large: bool) -> Players:
    return _players(federation, state, _cast(federation, state.iteration, keys), large)


# Plays a batch: of parameters, keys, whether it is large, attack, who lies.
Play = Callable[[Array, Array, bool, Attack, Array], Episodes]


def _iteration(
    federation: Federation, play: Play, state: SimulationState, keys: Keys, large: Array | bool
) -> tuple[SimulationState, Metrics]:
    """One iteration of all seeds."""
    num_seeds, agent = len(keys.schedule), federation.agent
    cast = _cast(federation, state.iteration, keys)

    def sample(batch_is_large: bool) -> tuple[Array, SampleMetrics]:
        """The players' estimates [seed, player, d]."""
        players = _players(federation, state, cast, batch_is_large)
        episodes = play(players.agents.parameters, players.keys, batch_is_large, federation.attack, players.byzantine)
        estimates, sampled = agent.estimate(players.agents, episodes, batch_is_large)
        honest = _split(~players.byzantine, num_seeds)
        return _split(estimates, num_seeds), _sample_metrics(honest, _split(sampled, num_seeds))

    def send(rule: Rule, phase: Phase, vectors: Array, message_keys: Array) -> tuple[Array, Diagnostics]:
        """One round of messages: results [seed, receiver, d]."""

        def of_seed(vectors: Array, liars: Array, key: Array) -> tuple[Array, Diagnostics]:
            results, diagnostics = exchange(
                rule,
                vectors,
                byzantine=liars,
                attack=federation.attack,
                num_byzantine=federation.num_byzantine,
                phase=phase,
                iteration=state.iteration,
                key=key,
                at_server=federation.centralized,
                diagnose=True,
            )
            assert diagnostics is not None
            return results.reshape(federation.num_holders, -1), diagnostics

        return jax.vmap(of_seed)(vectors, cast.liars, message_keys)

    def aggregate(estimates: Array) -> tuple[Array, ExchangeMetrics]:
        if federation.num_agents == 1:
            return estimates, ExchangeMetrics.none(num_seeds)
        aggregated, report = send(federation.aggregator, "gradients", estimates, cast.gradient_keys)
        return aggregated, _exchange_metrics(cast.is_honest, report)

    if federation.centralized:

        def by_workers() -> tuple[Array, SampleMetrics, ExchangeMetrics]:
            estimates, sampled = sample(True)
            aggregated, exchanged = aggregate(estimates)
            return aggregated, sampled, exchanged

        def by_server() -> tuple[Array, SampleMetrics, ExchangeMetrics]:
            return *sample(False), ExchangeMetrics.none(num_seeds)

        aggregated, sampled, exchanged = _either(large, by_workers, by_server)
        own = aggregated  # of the one that holds parameters
    else:
        own, sampled = _either(large, partial(sample, True), partial(sample, False))
        aggregated, exchanged = aggregate(own)

    before = state.agents.parameters
    agents = _split(agent.advance(_merge(state.agents), _merge(own), _merge(aggregated)), num_seeds)

    diameters = jnp.full((2, num_seeds), jnp.nan)
    if federation.agrees:
        assert federation.agreement is not None
        send_parameters = partial(send, federation.agreement, "parameters")

        def agree(parameters: Array, message_keys: Array) -> tuple[Array, tuple[Array, Array]]:
            agreed, report = send_parameters(parameters, message_keys)
            return agreed, (report.diameter_before, report.diameter_after)

        agreed, (first, last) = lax.scan(agree, agents.parameters, cast.round_keys.T)
        diameters = jnp.stack([first[0], last[-1]])
        agents = agent.settle(before, agents, agreed)

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
