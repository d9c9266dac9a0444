"""Whole federations, many seeds at once, as one compiled program: it moves messages and holds no line of the method.

Federations whose agents play alike run side by side, whatever their size, rules and attackers: the episodes of all are
one batch, and so are the gradients of agents that estimate alike; the messages of each federation are its own.
Iterations run in blocks: `lax.scan` inside; progress, checkpoints and Ctrl-C in between. The coin belongs to the
driver: an entry of a block has one batch size, because otherwise every iteration would compute both. Seeds whose coin
says otherwise wait: their state stays as it is.
On a host task, episodes are played between programs, and the rest of an iteration is one program.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache, partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from byzpg.envs.host import HostTask
from byzpg.federation import devices, traces
from byzpg.federation.agents import Agent, AgentState, Sampled
from byzpg.federation.algorithms import Federation, Received
from byzpg.federation.devices import BY_SEED, EVERYWHERE, QUICK_COMPILATION, ByAgent, ByCoordinate, layout, placed
from byzpg.federation.metrics import ExchangeMetrics, Metrics, SampleMetrics
from byzpg.federation.schedule import (
    ATTACKERS,
    INITIAL,
    ITERATIONS,
    block_key,
    exchange_key,
    play_stream,
    round_stream,
    stream_key,
)
from byzpg.learning.host_segments import Venue
from byzpg.learning.rollouts import PlayAttacks
from byzpg.robust.attacks import ByzantineSet, FixedSet, honest_mask
from byzpg.robust.components import with_numbers, without_numbers
from byzpg.robust.exchange import Diagnostics, Phase, Round, exchange_all, joined
from byzpg.robust.geometry import stored
from byzpg.robust.rules import clear_search_errors

# What an entry of a block of iterations is.
SKIP, SMALL, LARGE = range(3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SimulationState:
    """All that continues one federation; arrays of agents lead with [seed, holder]."""

    agents: AgentState
    memories: Any  # what agents keep to themselves, also those of a server [seed, agent, ...]
    received: Received  # what holders of parameters remember of all messages [seed, holder, ...]
    output: Array  # θ_T̂ [seed, holder, d], once iteration T̂ has come
    iteration: Array  # [seed]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Keys:
    """Where random numbers come from, one key per seed."""

    attackers: Array
    iterations: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Block:
    """The entries of one call."""

    batches: Array  # [entry]: LARGE, SMALL, or SKIP to fill up the block
    output_iteration: Array  # T̂ [seed]
    takes_part: Array | None  # [seed, entry]; None where all seeds take part in all entries


Federations = tuple[Federation, ...]
States = tuple[SimulationState, ...]  # one per federation, each seed at the same iteration in all of them


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
        seeds, (codes, _), mesh = jnp.asarray(self.seeds), _separated_numbers(self.federations), self._mesh()
        # States that need several devices are made there.
        return (
            _start_divided(seeds, codes, mesh)
            if devices.divides_coordinates(mesh)
            else placed(_start(seeds, codes), mesh, self._dimension)
        )

    def shapes(self) -> States:
        """The shapes and types of the states that `fetched` returns."""
        return jax.eval_shape(partial(_start, codes=_separated_numbers(self.federations)[0]), jnp.asarray(self.seeds))

    def placed(self, states: States) -> States:
        """The states on the devices where `run` leaves them; from others, the next block would be compiled again."""
        return placed(states, self._mesh(), self._dimension)

    def fetched(self, states: States) -> States:
        """The values of states on the devices, the inverse of `placed`; all processes must call this."""
        return devices.unfilled(devices.fetched(states), self._dimension)

    def initial_parameters(self) -> np.ndarray:
        """θ_0 [seed, d], from which the coin of each seed follows."""
        # The program that `start` runs, unless all states together need several devices.
        federations = self.federations[:1] if devices.divides_coordinates(self._mesh()) else self.federations
        first = _start(jnp.asarray(self.seeds), _separated_numbers(federations)[0])[0]
        return np.asarray(first.agents.parameters)[:, 0]

    def run(
        self,
        states: States,
        batches: Sequence[int] | np.ndarray,
        output_iteration: int | np.ndarray,
        *,
        takes_part: np.ndarray | None = None,
        only_large: bool = False,
        venue: Venue | None = None,
    ) -> tuple[States, tuple[Metrics, ...]]:
        """Run one iteration per entry of `batches`.

        Args:
            states: Where to begin; they are consumed.
            batches: LARGE, SMALL, or SKIP to fill up a block. One program is compiled per length of `batches`; on a
                host task, one per batch size.
            output_iteration: T̂, whose parameters are kept; one, or one per seed.
            takes_part: Which seeds take part in which entries [seed, entry]; the others stay as they are. Default: all.
            only_large: Whether no block of the run has a SMALL entry: a program without them compiles in half the time.
            venue: Where agents play on from one block to the next on a host task, from `venue()`. Default: a new one
                for this block, in which agents that play on begin new episodes.

        Returns:
            The states afterwards, and the values of metrics [seed, entry] of each federation, NaN where a seed took no
            part. All processes must call this.
        """
        if only_large and SMALL in batches:
            raise ValueError("only_large is for runs without small batches, and this block has one.")
        block = self._block(states, batches, output_iteration, takes_part)
        with clear_search_errors():
            if self.on_host:
                return jax.block_until_ready(_run_on_host(*block, venue=venue or self.venue()))
            arguments, static = block[:4], (*block[4:], only_large)
            program = traces.ready(_run_block, static, arguments, QUICK_COMPILATION)
            states, packed = jax.block_until_ready(program(*arguments))
        return states, tuple(Metrics(*np.moveaxis(each, 1, 0)) for each in devices.fetched(packed))

    def compiled(
        self,
        batches: Sequence[int] | np.ndarray,
        *,
        takes_part: np.ndarray | None = None,
        only_large: bool = False,
    ) -> jax.stages.Compiled:
        """The program of such blocks, which `run` then finds compiled on GPUs; not for host tasks."""
        return _run_block.lower(*self._block(self.start(), batches, 0, takes_part), only_large).compile()

    def _block(
        self,
        states: States,
        batches: Sequence[int] | np.ndarray,
        output_iteration: int | np.ndarray,
        takes_part: np.ndarray | None,
    ) -> tuple[Any, ...]:
        seeds, (codes, numbers) = jnp.asarray(self.seeds), _separated_numbers(self.federations)
        keys = Keys(_keys(seeds, ATTACKERS), _keys(seeds, ITERATIONS))
        # A type of its own: a whole number of Python has a weak one, and would be another program.
        outputs = jnp.broadcast_to(jnp.asarray(output_iteration, jnp.int32), len(self.seeds))
        block = _Block(jnp.asarray(batches), outputs, None if takes_part is None else jnp.asarray(takes_part))
        return states, keys, block, jnp.asarray(numbers), codes, self._mesh()

    def venue(self) -> Venue | None:
        """Where agents play on a host task that go on in their environments; None if no environment goes on."""
        return self.federations[0].agent.venue()

    @property
    def on_host(self) -> bool:
        """Whether episodes are played outside JAX."""
        return isinstance(self.federations[0].agent.env, HostTask)

    @property
    def _dimension(self) -> int:
        return self.federations[0].agent.dimension

    def _mesh(self) -> Mesh:
        """On a host task only seeds are divided among devices: episodes come from outside."""
        if self.on_host:
            return devices.mesh_for(len(self.seeds), 1)
        num_agents = [federation.num_agents for federation in self.federations]
        coordinates = sum(num_agents) * self._dimension
        return devices.mesh_for(len(self.seeds), max(num_agents), exchange_bytes=4 * len(self.seeds) * coordinates)


@jax.jit
def _keys(seeds: Array, purpose: int) -> Array:
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), purpose))(seeds)


@partial(jax.jit, static_argnames="codes")
def _start(seeds: Array, codes: Federations) -> States:
    agent = codes[0].agent
    initial = jax.vmap(agent.initial_parameters)(_keys(seeds, INITIAL))

    @cache  # federations that start alike start from the same arrays
    def of(agent: Agent, num_holders: int, num_agents: int) -> SimulationState:
        agents = _split(agent.initial(jnp.repeat(initial, num_holders, axis=0)), len(seeds))
        memories = _split(agent.initial_memory(jnp.repeat(initial, num_agents, axis=0)), len(seeds))
        return SimulationState(agents, memories, (), agents.parameters, jnp.zeros(len(seeds), jnp.int32))

    def received(code: Federation) -> Received:
        shape = len(seeds), code.num_holders
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*shape, *leaf.shape)), code.nothing_received())

    return tuple(replace(of(code.agent, code.num_holders, code.num_agents), received=received(code)) for code in codes)


@partial(jax.jit, static_argnames=("codes", "mesh"))
def _start_divided(seeds: Array, codes: Federations, mesh: Mesh) -> States:
    states = _start(seeds, codes)
    dimension = codes[0].agent.dimension
    by = devices.division(mesh, dimension)
    return by.kept(devices.filled(by.kept(states), mesh, dimension))


def _separated_numbers(federations: Federations) -> tuple[Federations, np.ndarray]:
    """The federations as code, and their numbers [federation, ...] as data; short lists of numbers are filled up."""
    codes, numbers = zip(*map(without_numbers, federations), strict=True)
    matrix = np.zeros((len(codes), max(map(len, numbers))), np.float32)
    for row, values in zip(matrix, numbers, strict=True):
        row[: len(values)] = values
    return codes, matrix


# Tables


@dataclass(frozen=True)
class _Kind:
    """Federations with the same code: they differ in numbers alone."""

    code: Federation
    members: tuple[int, ...]  # their indices in the simulation


@dataclass(frozen=True)
class _Table:
    """Federations whose agents are alike, each with all seeds: every one of these runs is a row of the same arrays.

    Rows are in the order of the kinds, then of the seeds, then of the members of a kind.
    """

    kinds: tuple[_Kind, ...]

    @property
    def code(self) -> Federation:
        """The first federation, whose agents are like all others'."""
        return self.kinds[0].code

    def rows(self, trees: Sequence[Any]) -> Any:
        """Join what the federations of the simulation have [seed, ...] into rows."""

        def of_kind(*leaves: Array) -> Array:
            return jnp.stack(leaves, axis=1).reshape(-1, *leaves[0].shape[1:]) if leaves[0].ndim else leaves[0]

        return joined([jax.tree.map(of_kind, *(trees[index] for index in kind.members)) for kind in self.kinds])

    def by_federation(self, rows: Any, num_seeds: int) -> dict[int, Any]:
        """The inverse of `rows`, by the index of the federation."""
        found: dict[int, Any] = {}
        for kind, part in zip(self.kinds, self.by_kind(rows, num_seeds), strict=True):
            every = len(kind.members)
            for index, first in zip(kind.members, range(every), strict=True):
                take = slice(first, None, every)
                found[index] = jax.tree.map(lambda leaf, take=take: leaf[take] if leaf.ndim else leaf, part)
        return found

    def by_kind(self, rows: Any, num_seeds: int) -> list[Any]:
        """The rows of each kind."""
        return _separated(rows, [num_seeds * len(kind.members) for kind in self.kinds])

    def with_numbers(self, numbers: Array, num_seeds: int) -> list[Federation]:
        """The federation of each kind, with its numbers [row of the kind]."""
        return [
            with_numbers(kind.code, jnp.tile(numbers[np.asarray(kind.members)], (num_seeds, 1)).T)
            for kind in self.kinds
        ]

    def of_seeds(self, values: Array) -> Array:
        """What every seed has [seed, ...], for each row."""
        return jnp.concatenate([jnp.repeat(values, len(kind.members), axis=0) for kind in self.kinds])

    def by_seed(self, rows: Array, num_seeds: int) -> Array:
        """The inverse of `of_seeds`."""
        every = len(self.kinds[0].members)
        return rows[: num_seeds * every : every]


@lru_cache(maxsize=256)  # on a host task, it is asked outside compiled programs, in every iteration
def _tables(codes: Federations) -> tuple[_Table, ...]:
    kinds: dict[Federation, list[int]] = {}
    for index, code in enumerate(codes):
        kinds.setdefault(code, []).append(index)
    tables: dict[Any, list[_Kind]] = {}
    for code, members in kinds.items():
        rounds = code.rounds if code.agrees else 0
        alike = (code.agent, code.num_agents, code.centralized, code.remembered, rounds)
        tables.setdefault(alike, []).append(_Kind(code, tuple(members)))
    return tuple(_Table(tuple(each)) for each in tables.values())


# Blocks of iterations


@partial(
    jax.jit,
    static_argnames=("codes", "mesh", "only_large"),
    donate_argnames="states",
    compiler_options=QUICK_COMPILATION,
)
def _run_block(
    states: States, keys: Keys, block: _Block, numbers: Array, codes: Federations, mesh: Mesh, only_large: bool
) -> tuple[States, tuple[Array, ...]]:
    """The states afterwards, and all metrics [seed, metric, entry] of each federation."""
    dimension = codes[0].agent.dimension
    by = devices.division(mesh, dimension)
    iterate = partial(_iterate_block, _tables(codes), by, only_large)
    if isinstance(by, ByCoordinate):
        states, metrics = iterate(by.kept(devices.unfilled(states, dimension)), keys, block, numbers)
        return by.kept(devices.filled(states, mesh, dimension)), metrics
    block_division: Any = EVERYWHERE, BY_SEED, BY_SEED
    return jax.shard_map(
        iterate,
        mesh=mesh,
        in_specs=(layout(states, mesh, dimension), BY_SEED, _Block(*block_division), EVERYWHERE),
        out_specs=(layout(states, mesh, dimension), BY_SEED),
        check_vma=False,
    )(states, keys, block, numbers)


def _iterate_block(
    tables: tuple[_Table, ...],
    by: ByAgent | ByCoordinate,
    only_large: bool,
    states: States,
    keys: Keys,
    block: _Block,
    numbers: Array,
) -> tuple[States, tuple[Array, ...]]:
    """The iterations of a block."""

    def iterate(states: States, entry: tuple[Array, Array | None]) -> tuple[States, tuple[Array, ...]]:
        batch, takes_part = entry
        states = _with_output(tables, states, block.output_iteration)
        large = True if only_large else batch == LARGE

        def iteration() -> tuple[States, tuple[Metrics, ...]]:
            after = _iteration(tables, by, tables[0].code.agent.play, states, keys, numbers, large)
            return _where_taking_part(tables, takes_part, after, _skip(states))

        states, metrics = lax.cond(batch == SKIP, partial(_skip, states), iteration)
        # One array of each table: XLA would compile a kernel for every metric of every federation.
        return states, tuple(jnp.stack(jax.tree.leaves(each), axis=1) for each in metrics)

    rows = tuple(table.rows(states) for table in tables)
    takes_part = None if block.takes_part is None else block.takes_part.T
    rows, packed = lax.scan(iterate, rows, (block.batches, takes_part))
    return _by_federation(tables, len(keys.attackers), (rows, tuple(jnp.moveaxis(each, 0, 2) for each in packed)))


def _by_federation(tables: tuple[_Table, ...], num_seeds: int, rows: Any) -> Any:
    """From tuples of one tree per table to tuples of one tree per federation."""
    states, metrics = rows
    found: dict[int, Any] = {}
    for table, *trees in zip(tables, states, metrics, strict=True):
        found |= table.by_federation(tuple(trees), num_seeds)
    return tuple(zip(*(found[index] for index in range(len(found))), strict=True))


def _run_on_host(
    states: States,
    keys: Keys,
    block: _Block,
    numbers: Array,
    codes: Federations,
    mesh: Mesh,
    venue: Venue | None,
) -> tuple[States, tuple[Metrics, ...]]:
    """As `_run_block`, for one federation with episodes from outside JAX."""
    metrics = []
    for index, batch in enumerate(block.batches.tolist()):
        if batch == SKIP:
            metrics.append(_blank(len(keys.attackers)))
            continue
        large = batch == LARGE
        # One device: the policies of one time step are too little work to divide.
        now = _players_now(states, keys, numbers, codes=codes, large=large)
        players, request = jax.device_put(now, mesh.devices.flat[0])
        attacks = _attacks_on_play(_tables(codes), [players], len(keys.attackers))
        experience = codes[0].agent.play(request, _merge(players.keys), large, attacks, venue)
        states, (entry,) = _run_iteration(
            states,
            keys,
            placed(experience, mesh, codes[0].agent.dimension),
            block.output_iteration,
            None if block.takes_part is None else block.takes_part[:, index],
            numbers,
            codes=codes,
            large=large,
            mesh=mesh,
        )
        metrics.append(entry)
    return states, (jax.tree.map(lambda *entries: np.stack(entries, axis=1), *metrics),)


@partial(
    jax.jit,
    static_argnames=("codes", "large", "mesh"),
    donate_argnames="states",
    compiler_options=QUICK_COMPILATION,
)
def _run_iteration(
    states: States, keys: Keys, experience: Any, *others: Any, codes: Federations, large: bool, mesh: Mesh
) -> tuple[States, tuple[Metrics, ...]]:
    """`_iterate_with` on the devices of a mesh."""
    divided, played = (layout(tree, mesh, codes[0].agent.dimension) for tree in (states, experience))
    return jax.shard_map(
        partial(_iterate_with, _tables(codes), large),
        mesh=mesh,
        in_specs=(divided, BY_SEED, played, BY_SEED, BY_SEED, EVERYWHERE),
        out_specs=(divided, BY_SEED),
        check_vma=False,
    )(states, keys, experience, *others)


def _iterate_with(
    tables: tuple[_Table, ...],
    large: bool,
    states: States,
    keys: Keys,
    experience: Any,
    output_iteration: Array,
    takes_part: Array | None,
    numbers: Array,
) -> tuple[States, tuple[Metrics, ...]]:
    """One iteration with what was played given."""
    states = _with_output(tables, states, output_iteration)
    after = _iteration(tables, ByAgent(), lambda *_: experience, states, keys, numbers, large)
    return _where_taking_part(tables, takes_part, after, _skip(states))


def _with_output(tables: tuple[_Table, ...], states: States, output_iteration: Array) -> States:
    """The rows of each table, with the parameters of those at iteration T̂ [seed] as their output."""

    def of(table: _Table, state: SimulationState) -> SimulationState:
        arrived = state.iteration == table.of_seeds(output_iteration)
        return replace(state, output=_where(arrived, state.agents.parameters, state.output))

    return tuple(map(of, tables, states))


def _where_taking_part(tables: tuple[_Table, ...], takes_part: Array | None, after: Any, before: Any) -> Any:
    """Tuples of trees with rows, one tree per table: `after` where a seed takes part [seed], else `before`."""
    if takes_part is None:
        return after
    active = tuple(table.of_seeds(takes_part) for table in tables)
    return tuple(
        tuple(jax.tree.map(partial(_where, rows), yes, no) for rows, yes, no in zip(active, *pair, strict=True))
        for pair in zip(after, before, strict=True)
    )


def _where(rows: Array, yes: Array, no: Array) -> Array:
    """`yes` [row, ...] in some rows, `no` in the others."""
    return jnp.where(rows.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)


def _skip(states: States) -> tuple[States, tuple[Metrics, ...]]:
    return states, tuple(_blank(len(state.output)) for state in states)


def _blank(num_rows: int) -> Metrics:
    return Metrics(*(jnp.full(num_rows, jnp.nan) for _ in fields(Metrics)))


# One iteration


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draws:
    """What chance decides in one iteration of a table: who attacks, and the keys of play and messages."""

    attackers: tuple[Array, ...]  # [row of the kind, b], of each kind
    is_honest: Array  # [row, agent]
    play_keys: Array  # [row, agent]
    gradient_keys: Array  # [row]
    agreement_keys: Array  # [row, round]

    def honest_players(self, num_players: int) -> Array:
        """Which players are honest [row, player]. A lone player is: a server, with agent 0's keys, or a lone agent."""
        return self.is_honest if num_players > 1 else jnp.ones_like(self.is_honest[:, :1])


def _draws(tables: tuple[_Table, ...], iterations: Array, keys: Keys) -> list[Draws]:
    """The draws of each table at iterations [seed]. What tables have in common is drawn once."""

    def streams_of(table: _Table) -> list[int]:
        num_agents, num_rounds = table.code.num_agents, 1 + max(kind.code.rounds for kind in table.kinds)
        rounds = (round_stream(num_agents, number) for number in range(num_rounds))
        return [*map(play_stream, range(num_agents)), *rounds]

    streams = sorted({stream for table in tables for stream in streams_of(table)})
    fresh = jax.vmap(jax.vmap(stream_key, in_axes=(None, None, 0)), in_axes=(0, 0, None))(
        keys.iterations, iterations, jnp.asarray(streams)
    )

    @cache
    def attackers_of(draw: ByzantineSet, num_agents: int, num_attackers: int) -> tuple[Array, Array]:
        """The attackers of each seed [seed, b], and who is honest [seed, agent]."""
        attackers = jax.vmap(partial(draw, num_agents, num_attackers))(iterations, keys.attackers)
        return attackers, jax.vmap(partial(honest_mask, num_agents))(attackers)

    def of(table: _Table) -> Draws:
        num_agents = table.code.num_agents
        sets = [attackers_of(kind.code.byzantine_set, num_agents, kind.code.num_attackers) for kind in table.kinds]
        repeated = [
            jax.tree.map(partial(jnp.repeat, repeats=len(kind.members), axis=0), each)
            for kind, each in zip(table.kinds, sets, strict=True)
        ]
        places = np.searchsorted(streams, streams_of(table))
        theirs = table.of_seeds(fresh[:, places])  # [row, stream]
        play_keys, round_keys = theirs[:, :num_agents], theirs[:, num_agents:]
        return Draws(
            tuple(attackers for attackers, _ in repeated),
            jnp.concatenate([is_honest for _, is_honest in repeated]),
            play_keys,
            gradient_keys=round_keys[:, 0],
            agreement_keys=round_keys[:, 1:],
        )

    return list(map(of, tables))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Players:
    """The agents that play in an iteration; arrays lead with [row, player]."""

    agents: AgentState
    memories: Any
    keys: Array
    byzantine: Array


def _players(table: _Table, state: SimulationState, draws: Draws, large: bool) -> Players:
    num_players = table.code.num_players(large)
    # A server that samples alone has no memory: it sends nothing.
    memories = state.memories if large or not table.code.centralized else None
    byzantine = ~draws.honest_players(num_players)
    return Players(_with_players(state.agents, num_players), memories, draws.play_keys[:, :num_players], byzantine)


def _with_players(agents: AgentState, num_players: int) -> AgentState:
    """What the holders of parameters have [row, holder, ...], for each player: the server's, if there is one."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (leaf.shape[0], num_players, *leaf.shape[2:])), agents)


@partial(jax.jit, static_argnames=("codes", "large"))
def _players_now(states: States, keys: Keys, numbers: Array, *, codes: Federations, large: bool) -> tuple[Players, Any]:
    """The players of one federation, and what they request to play [row × player, ...]."""
    (table,), (state,) = tables, _ = _tables(codes), states
    (draws,) = _draws(tables, state.iteration, keys)
    this = _Iteration(table, table.with_numbers(numbers, len(keys.attackers)), ByAgent(), state, draws)
    players = _players(table, state, draws, large)
    merged, agent = _merge(players), _repeated(this.agent, table.code.num_players(large))
    return players, agent.request(merged.agents, merged.memories, merged.keys, large)


def _attacks_on_play(tables: tuple[_Table, ...], players: list[Players], num_seeds: int) -> PlayAttacks:
    """The attacks on play, each with the players of all tables [row × player] that carry it out."""
    parts = [
        (kind.code.attack, jnp.ravel(byzantine))
        for table, each in zip(tables, players, strict=True)
        for kind, byzantine in zip(table.kinds, table.by_kind(each.byzantine, num_seeds), strict=True)
    ]
    attacks = dict.fromkeys(attack for attack, _ in parts if attack.poisons_play)
    return [
        (attack, jnp.concatenate([byzantine & (each == attack) for each, byzantine in parts])) for attack in attacks
    ]


def _separated(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """The inverse of `joined`: the rows of each part, which has `sizes` rows."""
    if len(sizes) == 1:
        return [tree]
    ends = np.cumsum(sizes)[:-1]
    leaves, structure = jax.tree.flatten(tree)
    pieces = (jnp.split(leaf, ends) if leaf.ndim else [leaf] * len(sizes) for leaf in leaves)
    return [jax.tree.unflatten(structure, each) for each in zip(*pieces, strict=True)]


def _by_code(function: Callable[..., Any], agents: Sequence[Agent], of_tables: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Apply function(agent, *arguments) to each table's agents; agents with the same code are one batch."""
    groups: dict[Any, list[int]] = {}  # the tables of each code, by index; of some, only a server plays
    separated = [without_numbers(agent) for agent in agents]
    for index, (code, _) in enumerate(separated):
        groups.setdefault((code, jax.tree.structure(of_tables[index])), []).append(index)
    results: dict[int, Any] = {}
    for (code, _), members in groups.items():
        agent = with_numbers(code, joined([separated[index][1] for index in members]))
        found = function(agent, *joined([of_tables[index] for index in members]))
        sizes = [len(jax.tree.leaves(of_tables[index])[0]) for index in members]
        results |= zip(members, _separated(found, sizes), strict=True)
    return [results[index] for index in range(len(agents))]


# Plays a batch: what is requested [player, ...], keys, whether it is large, and the attacks on play.
Play = Callable[[Any, Array, bool, PlayAttacks], Any]


def _iteration(
    tables: tuple[_Table, ...],
    by: ByAgent | ByCoordinate,
    play: Play,
    states: States,
    keys: Keys,
    numbers: Array,
    large: Array | bool,
) -> tuple[States, tuple[Metrics, ...]]:
    """One iteration of all rows of all tables."""
    num_seeds = len(keys.attackers)
    draws_of_tables = _draws(tables, tables[0].by_seed(states[0].iteration, num_seeds), keys)
    iterations = [
        _Iteration(table, table.with_numbers(numbers, num_seeds), by, state, draws)
        for table, state, draws in zip(tables, states, draws_of_tables, strict=True)
    ]

    at_servers = [each for each in iterations if each.table.code.centralized]
    others = [each for each in iterations if each not in at_servers]
    num_exchanges = tables[0].code.agent.num_exchanges
    both_sizes = not isinstance(large, bool)

    def agents_of(players: Sequence[Players]) -> list[Agent]:
        """The agents of each table, with numbers [row × player]."""
        return [
            _repeated(this.agent, len(each.keys) // this.num_rows)
            for this, each in zip(iterations, players, strict=True)
        ]

    def split(trees: Sequence[Any]) -> list[Any]:
        return [_split(tree, this.num_rows) for this, tree in zip(iterations, trees, strict=True)]

    def digests(batch_is_large: bool, players: list[Players]) -> list[tuple[Any, Sampled]]:
        """Let some players of each table play; return what their messages are computed from, and what it was like."""
        attacks = _attacks_on_play(tables, players, num_seeds)
        players = _merge(players)
        agents, sizes = agents_of(players), [len(each.keys) for each in players]
        requests = [
            agent.request(each.agents, each.memories, each.keys, batch_is_large)
            for agent, each in zip(agents, players, strict=True)
        ]
        experience = play(joined(requests), jnp.concatenate([each.keys for each in players]), batch_is_large, attacks)
        given = [
            (each.agents, request, played, each.keys)
            for each, request, played in zip(players, requests, _separated(experience, sizes), strict=True)
        ]
        return split(_by_code(lambda agent, *its: agent.digest(*its, batch_is_large), agents, given))

    def messages(exchange: Array | int, given: list[tuple[Players, Any]]) -> list[tuple[Array, Any]]:
        """The messages [row, player, d] of some players of each table, and their memories afterwards."""
        given = _merge(given)
        agents = agents_of([players for players, _ in given])
        arguments = [(players.agents, players.memories, batch) for players, batch in given]
        found = _by_code(lambda agent, *its: agent.message(*its, exchange), agents, arguments)
        return split([(message, memories) for memories, message in found])

    def first_messages(batch_is_large: bool, players: list[Players]) -> list[tuple[Array, Any]]:
        """As `messages`, of players that have not played yet; also what their play was like."""
        digested = digests(batch_is_large, players)
        given = [(each, batch) for each, (batch, _) in zip(players, digested, strict=True)]
        found = stored(messages(0, given))
        return [(sent, (kept, of)) for (sent, kept), (_, of) in zip(found, digested, strict=True)]

    def players_of(batch_is_large: bool) -> list[Players]:
        return [_players(each.table, each.state, each.draws, batch_is_large) for each in iterations]

    def estimated(batch_is_large: bool) -> list[_Gradients]:
        """What the players send; where the batch decides whether servers aggregate, also what they aggregate."""
        results = by.for_agents(partial(first_messages, batch_is_large), players_of(batch_is_large))
        found = [
            this.gradients(sent, kept, this.sample_metrics(sampled))
            for this, (sent, (kept, sampled)) in zip(iterations, results, strict=True)
        ]
        return _aggregated(iterations, found, at_servers, 0, by) if both_sizes and batch_is_large else found

    if num_exchanges == 1:
        found = _either(large, partial(estimated, True), partial(estimated, False))
        found = _aggregated(iterations, found, iterations if large is True else others, 0, by)
        advanced = [this.advance(gradients, large) for this, gradients in zip(iterations, found, strict=True)]
    else:  # all batches are large
        players = players_of(True)
        digested = by.for_agents(partial(digests, True), players)
        metrics = [this.sample_metrics(sampled) for this, (_, sampled) in zip(iterations, digested, strict=True)]

        def exchange(carry: list[tuple[AgentState, Any, Received]], number: Array) -> tuple[Any, list[ExchangeMetrics]]:
            given = [
                (replace(each, agents=_with_players(agents, each.keys.shape[1]), memories=memories), batch)
                for each, (agents, memories, _), (batch, _) in zip(players, carry, digested, strict=True)
            ]
            sent = by.for_agents(partial(messages, number), given)
            at = [
                replace(this, state=replace(this.state, agents=agents, received=received))
                for this, (agents, _, received) in zip(iterations, carry, strict=True)
            ]
            found = [
                this.gradients(message, memories, of)
                for this, (message, memories), of in zip(at, sent, metrics, strict=True)
            ]
            found = _aggregated(at, found, at, number, by)
            following = [
                (this.advance(gradients, True), gradients.memories, gradients.received)
                for this, gradients in zip(at, found, strict=True)
            ]
            return following, [each.exchanged for each in found]

        start = [(each.state.agents, each.state.memories, each.state.received) for each in iterations]
        ended, of_exchanges = lax.scan(exchange, start, jnp.arange(num_exchanges))
        advanced = [agents for agents, _, _ in ended]
        reports = jax.tree.map(partial(jnp.mean, axis=0), of_exchanges)
        found = [
            replace(this.gradients(agents.parameters, memories, of), received=received, exchanged=report)
            for this, (agents, memories, received), of, report in zip(iterations, ended, metrics, reports, strict=True)
        ]
    outcomes = [
        this.finish(gradients, agents) for this, gradients, agents in zip(iterations, found, advanced, strict=True)
    ]
    following, metrics = zip(*outcomes, strict=True)
    return following, metrics


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Gradients:
    """The gradients of a table's players, later those of its holders of parameters, and what is known of them."""

    memories: Any  # of all agents [row, agent, ...]
    own: Array  # what the players would send [row, player, d]
    aggregated: Array  # [row, holder, d]; `own` until there is an aggregate
    received: Received  # what the holders remember of all messages
    sampled: SampleMetrics
    exchanged: ExchangeMetrics


def _aggregated(
    iterations: Sequence["_Iteration"],
    gradients: list[_Gradients],
    where: Sequence["_Iteration"],
    exchange: Array | int,
    by: ByAgent | ByCoordinate,
) -> list[_Gradients]:
    """The gradients once they have been exchanged in some of the tables; all their rounds are carried out together."""
    where = [each for each in where if each.table.code.num_agents > 1]
    blocks = [
        each.gradient_rounds(this.own, exchange) if each in where else []
        for each, this in zip(iterations, gradients, strict=True)
    ]
    outcomes = iter(exchange_all([each for table in blocks for block in table for each in block], by.receivers))
    found = []
    for each, this, of_table in zip(iterations, gradients, blocks, strict=True):
        if of_table:
            parts, reports, kept = zip(*(joined([next(outcomes) for _ in block]) for block in of_table), strict=True)
            aggregated = by.kept(parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2))
            own = aggregated if each.table.code.centralized else this.own
            exchanged = _exchange_metrics(each.draws.is_honest, _of_blocks(reports))
            this = replace(this, own=own, aggregated=aggregated, received=by.kept(kept), exchanged=exchanged)
        found.append(this)
    return found


def _of_blocks(reports: Sequence[Diagnostics]) -> Diagnostics:
    """What is known of whole vectors whose blocks were exchanged one by one.

    Squared distances add up. A diameter is at most the root of the sum, and weights are the mean over the blocks whose
    rules have some.
    """
    if len(reports) == 1:
        return reports[0]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports)
    return Diagnostics(
        error=jnp.sum(stacked.error, axis=0),
        honest_variance=jnp.sum(stacked.honest_variance, axis=0),
        diameter_before=jnp.linalg.norm(stacked.diameter_before, axis=0),
        diameter_after=jnp.linalg.norm(stacked.diameter_after, axis=0),
        weights=jnp.nanmean(stacked.weights, axis=0),
    )


@dataclass(frozen=True, eq=False)
class _Iteration:
    """The rows of one table in one iteration: their messages, and what follows from them."""

    table: _Table
    federations: list[Federation]  # of each kind, with numbers [row of the kind]
    by: ByAgent | ByCoordinate
    state: SimulationState
    draws: Draws

    @property
    def num_rows(self) -> int:
        return len(self.state.output)

    @property
    def agent(self) -> Agent:
        """The agents' code, with numbers [row]."""
        code = self.table.code.agent
        return with_numbers(code, joined([without_numbers(each.agent)[1] for each in self.federations]))

    def sample_metrics(self, sampled: Sampled) -> SampleMetrics:
        return _sample_metrics(self.draws.honest_players(sampled.steps.shape[1]), sampled)

    def gradients(self, sent: Array, memories: Any, metrics: SampleMetrics) -> _Gradients:
        """What the players send, before any message arrives. Without memories, what the agents have is as it was."""
        memories = self.state.memories if memories is None else self.by.kept(memories)
        return _Gradients(memories, sent, sent, self.state.received, metrics, ExchangeMetrics.none(self.num_rows))

    def gradient_rounds(self, vectors: Array, exchange: Array | int) -> list[list[Round]]:
        """The rounds of messages of each block and kind, for vectors [row, agent, d]."""
        agent = self.table.code.agent
        keys = jax.vmap(partial(exchange_key, exchange=exchange, num_exchanges=agent.num_exchanges))(
            self.draws.gradient_keys
        )
        return [
            self.rounds("gradients", part, jax.vmap(partial(block_key, block=block))(keys), block)
            for block, part in enumerate(agent.parts(vectors))
        ]

    def rounds(self, phase: Phase, vectors: Array, message_keys: Array, block: int = 0) -> list[Round]:
        """The rounds of messages of each kind, for vectors [row, agent, d] or a block of them."""
        rounds, begin = [], 0
        for federation, attackers in zip(self.federations, self.draws.attackers, strict=True):
            here = slice(begin, begin := begin + len(attackers))
            rule, memories = federation.agreement, None
            if phase == "gradients":
                rule = federation.agent.rule_of_block(block, federation.aggregator)
                memories = jax.tree.map(itemgetter(here), self.state.received[block])
            assert rule is not None
            rounds.append(
                Round.of(
                    rule,
                    federation.attack,
                    num_byzantine=federation.num_byzantine,
                    phase=phase,
                    at_server=federation.centralized,
                    block=block,
                    same_attackers=memories is not None and type(federation.byzantine_set) is FixedSet,
                    vectors=vectors[here],
                    byzantine=attackers,
                    keys=message_keys[here],
                    iteration=self.state.iteration[here],
                    memories=memories,
                )
            )
        return rounds

    def advance(self, gradients: _Gradients, large: Array | bool) -> AgentState:
        """The states of the holders of parameters [row, holder, ...] after a step."""
        agent = _repeated(self.agent, self.table.code.num_holders)
        before, own, aggregated = _merge((self.state.agents, gradients.own, gradients.aggregated))
        return self.by.kept(_split(agent.advance(before, own, aggregated, large), self.num_rows))

    def finish(self, gradients: _Gradients, advanced: AgentState) -> tuple[SimulationState, Metrics]:
        """The rest of the iteration, once all holders of parameters have taken their steps."""
        code, state, num_rows = self.table.code, self.state, self.num_rows
        agent = _repeated(self.agent, code.num_holders)
        before, agents = _merge((state.agents.parameters, advanced))

        diameters = jnp.full((2, num_rows), jnp.nan)
        if code.agrees:

            def agree(parameters: Array, message_keys: Array) -> tuple[Array, tuple[Array, Array]]:
                rounds = self.rounds("parameters", parameters, message_keys)
                agreed, report, _ = joined(exchange_all(rounds, self.by.receivers))
                return self.by.kept(agreed), (report.diameter_before, report.diameter_after)

            sent = _split(agents.parameters, num_rows)
            agreed, (first, last) = lax.scan(agree, sent, self.draws.agreement_keys.T)
            diameters = jnp.stack([first[0], last[-1]])
            agents = agent.settle(before, agents, _merge(agreed))

        exact = _split(agent.gradient_squared(before), num_rows)
        metrics = Metrics(
            **vars(gradients.sampled),
            **vars(gradients.exchanged),
            diameter_before=diameters[0],
            diameter_after=diameters[1],
            gradient_squared=_mean(self.draws.honest_players(code.num_holders), exact),
        )
        agents = self.by.kept(_split(agents, num_rows))
        following = SimulationState(agents, gradients.memories, gradients.received, state.output, state.iteration + 1)
        return following, metrics


def _repeated(agent: Agent, times: int) -> Agent:
    """Agents with the numbers of each row, repeated for each of `times` agents in it."""
    code, numbers = without_numbers(agent)
    return with_numbers(code, [jnp.repeat(number, times) for number in numbers])


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
        episodes=_mean(is_honest, sampled.ended),
        environment_steps=jnp.sum(sampled.steps, axis=1).astype(jnp.float32),
        largest_weight=jnp.max(jnp.where(is_honest, sampled.health.largest, 0), axis=1),
        effective_sample=_mean(is_honest, sampled.health.effective_sample),
        capped=_mean(is_honest, sampled.health.capped),
    )


def _exchange_metrics(is_honest: Array, report: Diagnostics) -> ExchangeMetrics:
    is_honest_receiver = is_honest if report.error.shape == is_honest.shape else jnp.ones_like(report.error, bool)
    honest_weight, byzantine_weight = (
        _mean(is_honest_receiver, jnp.sum(jnp.where(senders[:, None], report.weights, 0), axis=2))
        for senders in (is_honest, ~is_honest)
    )
    return ExchangeMetrics(
        aggregation_error=_mean(is_honest_receiver, report.error),
        honest_variance=report.honest_variance,
        gradient_diameter=report.diameter_before,
        honest_weight=honest_weight,
        byzantine_weight=jnp.where(jnp.isnan(honest_weight), jnp.nan, byzantine_weight),  # also without attackers
    )


def _merge(tree):
    """[seed, agent, ...] → [seed × agent, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def _split(tree, num_seeds: int):
    """[seed × agent, ...] → [seed, agent, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(num_seeds, -1, *leaf.shape[1:]), tree)
