"""One agent behind a network, as vectors out and vectors in: a peer among peers, or a server and its workers.

The method is `algorithms.Agent`'s; nothing here opens a socket. Random numbers have the addresses that `schedule` gives
them, under a key of each member's own: a member with the simulator's key draws what its simulated twin draws.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg.envs.host import HostTask
from byzpg.federation.agents import Agent, AgentState, Sampled
from byzpg.federation.algorithms import Federation, Received
from byzpg.federation.devices import QUICK_COMPILATION
from byzpg.federation.schedule import (
    Schedule,
    block_key,
    exchange_key,
    iteration_stream,
    play_stream,
    round_stream,
)
from byzpg.learning.host_segments import Venue
from byzpg.learning.rollouts import PlayAttacks
from byzpg.robust.attacks import Attack, Knowledge, MessageAttack
from byzpg.robust.exchange import attack_key, rule_key
from byzpg.robust.geometry import Cloud
from byzpg.robust.rules import Rule, apply_at_receiver


@dataclass(frozen=True)
class Outcome:
    """What a member saw when it combined the vectors of one round."""

    diameter: float  # of all that was received, also from attackers
    weights: np.ndarray | None  # [K], of each sender; None for rules without weights


class Peer:
    """The agent at one position of a federation without a server.

    Args:
        federation: The federation, the same at every peer.
        schedule: When it samples which batch, the same at every peer.
        index: The position of this agent, from 0.
        key_data: The key of its own random numbers, from `secret_key` or `seeded_key`.
        attack: An attack on play that it carries out on purpose.
        as_simulated: Round gradients as the simulator does, for runs that are compared with it. This costs twice the
            time: the products of a lone agent are rounded differently from those of a batch of agents.
        initial: θ_0 [d], the same at every peer; None to draw it from the schedule's seed.
    """

    def __init__(
        self,
        federation: Federation,
        schedule: Schedule,
        index: int,
        key_data: np.ndarray,
        *,
        attack: Attack | None = None,
        as_simulated: bool = False,
        initial: np.ndarray | None = None,
    ) -> None:
        self.index, self.agent = index, federation.agent
        self.num_members, self.num_byzantine = federation.num_agents, federation.num_byzantine
        self.aggregator, self.agreement = federation.aggregator, federation.agreement
        self.exchanges = self.agent.num_exchanges
        self.rounds = federation.rounds if federation.agrees else 0
        self._player = _Player(federation.agent, _key(key_data), as_simulated)
        self.dimension = self.agent.dimension
        first = (
            self.agent.initial_parameters(schedule.initial_key)
            if initial is None
            else jnp.asarray(initial, jnp.float32)
        )
        if first.shape != (self.dimension,):
            raise ValueError(
                f"the parameters to start from must have shape ({self.dimension},) for this policy, got {first.shape}."
            )
        self.plan = schedule.plan(first)
        # At the beginning of the iteration, and after the last message that was sent and the last step that was taken.
        self._state = self._advanced = self.agent.initial(first[None])
        self._memory = self._longer = self.agent.initial_memory(first[None])
        # The same of what the rule remembers of messages.
        self._nothing_received = self._received = self._heard = federation.nothing_received()
        self._batch: Any = None  # what the messages of this iteration are computed from
        self._attack = attack
        self.returns, self.steps, self.ended = np.zeros(0), 0, 0  # of the last batch: also episodes that ended
        self.outcome = Outcome(0.0, None)  # of the last round
        self.on_output: Callable[[np.ndarray], None] = lambda parameters: None  # told θ_T̂ when iteration T̂ begins

    @property
    def num_iterations(self) -> int:
        return self.plan.num_iterations

    @property
    def plan_digest(self) -> str:
        """A hash of the batch sizes of all iterations, which follow from the bits of θ_0 as this member drew it."""
        return sha256(self.plan.large.tobytes()).hexdigest()

    @property
    def parameters(self) -> np.ndarray:
        return np.asarray(self._state.parameters[0])

    def begin(self, iteration: int) -> np.ndarray:
        """Play, and return what the member sends first [d]: its estimate ṽ_t or, with momentum, m_t."""
        if iteration == self.plan.output_iteration:
            self.on_output(self.parameters)
        return self._played(iteration)

    def _played(self, iteration: int) -> np.ndarray:
        large = bool(self.plan.large[iteration])
        self._advanced, self._longer, self._heard = self._state, self._memory, self._received
        self._batch, sampled = self._player.sample(
            self._state, self._memory, self.index, iteration, large, self._attack
        )
        self.returns, self.steps = np.asarray(sampled.returns[0]), int(sampled.steps[0])
        self.ended = int(sampled.ended[0])
        return self._message(0)

    def _message(self, exchange: int) -> np.ndarray:
        self._longer, message = self._player.message(self._advanced, self._longer, self._batch, exchange)
        return np.asarray(message[0])

    def combine(self, iteration: int, phase: int, received: np.ndarray, present: np.ndarray) -> np.ndarray | None:
        """Combine the vectors of one round.

        Args:
            iteration: The iteration of training.
            phase: The number of the round in the iteration: exchanges of gradients come first, then agreement.
            received: The vectors [K, d], with the member's own in its place.
            present: Which of them have arrived [K].

        Returns:
            The vector [d] to send in the next round, or None after the last.
        """
        if phase < self.exchanges:
            combined, weights, diameter, _, self._heard = _aggregate(
                self.agent,
                self.aggregator,
                self.num_byzantine,
                received,
                present,
                self.index,
                self._round_key(iteration, phase),
                self._heard,
            )
            own, large = jnp.asarray(received[self.index])[None], bool(self.plan.large[iteration])
            self._advanced = _advance(self.agent, self._advanced, own, combined[None], large)
            vector = self._advanced.parameters
        else:
            assert self.agreement is not None
            key = rule_key(self._round_key(iteration, phase), self.index)
            combined, weights, diameter, *_ = _combine(
                self.agreement, self.num_byzantine, received, present, self.index, key
            )
            vector = combined[None]
        self.outcome = Outcome(float(diameter), None if weights is None else np.asarray(weights))
        if phase + 1 < self.exchanges:
            return self._message(phase + 1)
        if phase + 1 < self.exchanges + self.rounds:
            return np.asarray(vector[0])
        self._state = self._settled(vector) if self.rounds else self._advanced
        self._memory, self._received = self._longer, self._heard
        return None

    def _round_key(self, iteration: int, phase: int) -> Array:
        if phase < self.exchanges:
            return self._player.exchange_key(iteration, phase, self.num_members)
        return self._player.stream(iteration, round_stream(self.num_members, phase - self.exchanges + 1))

    def _settled(self, agreed: Array) -> AgentState:
        return _settle(self.agent, self._state.parameters, self._advanced, agreed)

    # The state as one vector. A checkpoint keeps the whole snapshot; members send one that fell behind the state, with
    # which a snapshot begins. What they keep to themselves is of no use to it.

    @property
    def state_dimension(self) -> int:
        return self.dimension * len(self._vectors())

    @property
    def snapshot_dimension(self) -> int:
        return self.state_dimension + -(-_num_bytes(self._memory) // 4)

    def _vectors(self) -> list[Array]:
        return [leaf for leaf in jax.tree.leaves(self._state) if leaf.shape == (1, self.dimension)]

    def snapshot(self) -> np.ndarray:
        """θ_t, θ_{t−1}, v̂_{t−1} and the optimizer's moments, one after the other, then the bytes of the memory.

        The memory need not be finite as numbers: it holds the states of environments and counts, too.
        """
        vectors = [np.asarray(leaf, np.float32).reshape(-1) for leaf in self._vectors()]
        return np.concatenate([*vectors, _as_numbers(self._memory)])

    def restore(self, iteration: int, snapshot: np.ndarray) -> None:
        state, memory = np.split(np.asarray(snapshot, np.float32), [self.state_dimension])
        self._state = self._advanced = self._restored(iteration, state)
        self._memory = self._longer = _from_bytes(_shapes_of_memory(self.agent), memory.tobytes())
        self._received = self._heard = self._nothing_received  # members and their places may have changed

    def _restored(self, iteration: int, vectors: np.ndarray) -> AgentState:
        """The state with other vectors; a whole number of an agent counts updates."""
        rows = iter(np.asarray(vectors, np.float32).reshape(-1, self.dimension))

        def of(leaf: Array) -> Array:
            if leaf.shape == (1, self.dimension):
                return jnp.asarray(next(rows)).reshape(leaf.shape)
            is_count = leaf.ndim == 1 and jnp.issubdtype(leaf.dtype, jnp.integer)
            return jnp.full_like(leaf, self.agent.updates_before(iteration)) if is_count else leaf

        return jax.tree.map(of, self._state)

    def adopt(self, iteration: int, states: Sequence[np.ndarray | None]) -> None:
        """Take over the state of the other members [K], combined part by part with the agreement rule.

        The member's own state is out of date, and some states are missing. The coordinate-wise median of the others,
        which attackers cannot move far, replaces them: some rules start from the receiver's own row, and all rules need
        K − f sound rows. The member's history begins anew from v̂_{t−1}, which the others have in common: its distance
        from the honest agents' mean is the error of an aggregate, and each further estimate of its own counts as ever.
        """
        rule, found = self.agreement or self.aggregator, [state for state in states if state is not None]
        median = np.median(np.stack(found), axis=0).astype(np.float32)
        rows = np.stack([median if state is None else state for state in states])
        present = np.ones(len(rows), bool)
        parts = rows.reshape(len(rows), -1, self.dimension)
        key = self._player.stream(iteration, round_stream(self.num_members, self.rounds + 1))  # no round uses it
        combined = [
            np.asarray(_combine(rule, self.num_byzantine, parts[:, part], present, self.index, key)[0])
            for part in range(parts.shape[1])
        ]
        # An attacker may have pushed a variance near 0 below 0. Clipping brings every entry back between honest ones.
        ordered = np.sort(np.stack(found), axis=0)
        low, high = ordered[self.num_byzantine], ordered[-self.num_byzantine - 1]
        state = np.clip(np.concatenate(combined), low, high)
        self._state = self._advanced = self._restored(iteration, state)
        self._memory = self.agent.recalled(self._state.direction, jnp.full(1, iteration, jnp.int32))
        self._received = self._nothing_received

    def false_messages(self, attack: Attack, iteration: int, phase: int, truth: np.ndarray) -> list[np.ndarray]:
        """What an attacker in this place sends to each member [K].

        Args:
            attack: The attack.
            iteration: The iteration of training.
            phase: As for `combine`.
            truth: The vector [d] that an honest member would send: all that the attacker knows.
        """
        vectors = jnp.full((self.num_members, self.dimension), jnp.nan).at[self.index].set(truth)
        key, gradients = self._round_key(iteration, phase), phase < self.exchanges
        parts = [
            _false_messages(attack, gradients, part, self.index, iteration, attack_key(block_key(key, block)))
            for block, part in enumerate(self.agent.parts(vectors) if gradients else [vectors])
        ]
        return list(np.concatenate([np.asarray(part) for part in parts], axis=1))

    def warm_up(self) -> None:
        """Compile everything, so that it costs nobody a round."""
        state, memory, received, returns = self._state, self._memory, self._received, self.returns
        all_present = np.ones(self.num_members, bool)
        sizes = {bool(large): iteration for iteration, large in reversed(list(enumerate(self.plan.large)))}
        vector = np.zeros(self.dimension, np.float32)
        for iteration in sizes.values():
            vector = self._played(iteration)
        for phase in range(min(self.exchanges, 2) + min(self.rounds, 1)):
            rows = np.broadcast_to(vector, (self.num_members, self.dimension))
            self.combine(0, phase if phase < 2 else self.exchanges, rows, all_present)
        if self.rounds:
            self._settled(jnp.asarray(vector)[None])
        if isinstance(self._attack, MessageAttack):
            for phase in (0, self.exchanges)[: 1 + bool(self.rounds)]:
                self.false_messages(self._attack, 0, phase, vector)
        self._state, self._advanced, self.returns = state, state, returns
        self._memory, self._longer = memory, memory
        self._received, self._heard = received, received
        self._player.venues.clear()  # its episodes are none of the member's


@dataclass(frozen=True)
class _Kept:
    """What a worker keeps of one agent between messages."""

    before: Any  # its memory before its last message
    memory: Any  # and with it
    last: tuple[int, int] | None = None  # the iteration and the exchange of that message
    # The last iteration, what its messages are computed from, and what the play was like.
    played: tuple[int, Any, Sampled] | None = None


class Worker:
    """The agent at one position beneath a trusted server: it keeps its random numbers and its memory.

    Args:
        federation: The federation, the same at the server.
        index: The position of this agent, from 0.
        key_data: As for `Peer`.
        attack: As for `Peer`.
        as_simulated: As for `Peer`.
    """

    def __init__(
        self,
        federation: Federation,
        index: int,
        key_data: np.ndarray,
        *,
        attack: Attack | None = None,
        as_simulated: bool = False,
    ) -> None:
        _check_served(federation.agent)
        self.federation, self.index, self.exchanges = federation, index, federation.agent.num_exchanges
        self._player, self._attack = _Player(federation.agent, _key(key_data), as_simulated), attack
        # By agent, as an attacker in a rehearsal computes the messages of others.
        self._kept: dict[int, _Kept] = {}

    @property
    def sampled(self) -> Sampled:
        """What the play of the last message's iteration was like."""
        played = self._kept[self.index].played
        assert played is not None
        return played[2]

    @property
    def memory(self) -> dict[str, np.ndarray]:
        """What to `recall` in another process, as the bytes of each agent; nothing if agents have no memory.

        Between two messages of one iteration, it holds what that iteration played.
        """
        trees = {
            index: kept.memory
            if kept.last is None or kept.last[1] + 1 == self.exchanges
            else (kept.memory, kept.played)
            for index, kept in self._kept.items()
        }
        found = {str(index): np.frombuffer(_as_bytes(tree), np.uint8) for index, tree in trees.items()}
        return {name: content for name, content in found.items() if content.size}

    def recall(self, memory: Mapping[str, np.ndarray]) -> None:
        """Continue from the memory of another process. A worker that cannot begins anew, as in iteration 0."""
        alone = _shapes_of_memory(self.federation.agent)
        self._kept = {}
        for name, content in memory.items():
            if content.size == _num_bytes(alone):
                kept, played = _from_bytes(alone, content.tobytes()), None
            else:
                shapes = alone, _shapes_of_play(self.federation.agent)
                kept, played = _from_bytes(shapes, content.tobytes())
                played = int(played[0]), *played[1:]
            self._kept[int(name)] = _Kept(kept, kept, None, played)

    def message(self, iteration: int, exchange: int, parameters: np.ndarray) -> np.ndarray:
        """The message [d] of one exchange at the server's θ [d], from what this agent played in the iteration.

        It plays at the first message of an iteration that it is asked for, which is the first of all unless it was
        away.
        """
        return np.asarray(self._message(self.index, iteration, exchange, parameters))[0]

    def false_message(
        self, attack: Attack, iteration: int, exchange: int, parameters: np.ndarray, attackers: Sequence[int]
    ) -> np.ndarray:
        """What an omniscient attacker in this place, one of `attackers`, sends to the server [d].

        It holds all agents' random numbers, and so computes itself what the others will send: for rehearsals alone.
        """
        federation, attackers = self.federation, sorted(attackers)
        agents = range(federation.num_agents)
        vectors = jnp.concatenate([self._message(index, iteration, exchange, parameters) for index in agents])
        key = self._player.exchange_key(iteration, exchange, len(agents))
        false = []
        for block, part in enumerate(federation.agent.parts(vectors)):
            knowledge = Knowledge(
                part,
                jnp.asarray(attackers),
                jnp.asarray(iteration),
                attack_key(block_key(key, block)),
                rule=federation.agent.rule_of_block(block, federation.aggregator),
                num_byzantine=federation.num_byzantine,
                block=block,
            )
            false.append(_false_gradients(attack, knowledge)[attackers.index(self.index)])
        return np.concatenate(false)

    def _message(self, index: int, iteration: int, exchange: int, parameters: np.ndarray) -> Array:
        held = jnp.asarray(np.asarray(parameters, np.float32)[None])
        state = AgentState(held, held, held, ())  # of all this, a large batch looks at θ alone
        kept = self._kept.get(index)
        if kept is None:
            kept = _Kept(*[self.federation.agent.initial_memory(held)] * 2)
        # A message that is computed again is remembered once.
        memory = kept.before if kept.last == (iteration, exchange) else kept.memory
        played = kept.played
        if played is None or played[0] != iteration:
            attack = self._attack if index == self.index else None
            played = iteration, *self._player.sample(state, memory, index, iteration, large=True, attack=attack)
        longer, message = self._player.message(state, memory, played[1], exchange)
        self._kept[index] = _Kept(memory, longer, (iteration, exchange), played)
        return message


class Server:
    """The trusted server of Alg. 1: it holds θ, aggregates its workers' messages, and samples small batches alone.

    Args:
        federation: The federation, the same at the workers.
        schedule: When it samples which batch.
        key_data: As for `Peer`.
        as_simulated: As for `Peer`.
    """

    def __init__(
        self, federation: Federation, schedule: Schedule, key_data: np.ndarray, *, as_simulated: bool = False
    ) -> None:
        if not federation.centralized:
            raise ValueError("this algorithm has no server: use ByzPG, ByzPPO or another one with a server.")
        _check_served(federation.agent)
        self.agent, self.aggregator = federation.agent, federation.aggregator
        self.exchanges = self.agent.num_exchanges
        self.num_workers, self.num_byzantine = federation.num_agents, federation.num_byzantine
        self._player = _Player(federation.agent, _key(key_data), as_simulated)
        first = self.agent.initial_parameters(schedule.initial_key)
        self.plan = schedule.plan(first)
        self.dimension = len(first)
        self._state = self.agent.initial(first[None])
        self._received = federation.nothing_received()
        self.output = np.asarray(first)  # θ_T̂, once iteration T̂ has begun

    @property
    def num_iterations(self) -> int:
        return self.plan.num_iterations

    @property
    def parameters(self) -> np.ndarray:
        return np.asarray(self._state.parameters[0])

    def begin(self, iteration: int) -> bool:
        """Begin an iteration; return whether it samples a large batch, at the workers."""
        if iteration == self.plan.output_iteration:
            self.output = self.parameters
        return bool(self.plan.large[iteration])

    def combine(self, iteration: int, exchange: int, received: np.ndarray, present: np.ndarray) -> bool:
        """Step along the aggregate of the workers' messages [K, d] of an exchange; return whether there was a step.

        If fewer than K − f rows are usable, the parameters stay unchanged. The plain mean is no exception: with f = 0
        it needs all K rows, because the mean of some of the rows is another rule.
        """
        key = self._player.exchange_key(iteration, exchange, self.num_workers)
        combined, _, _, defined, self._received = _aggregate(
            self.agent, self.aggregator, self.num_byzantine, received, present, None, key, self._received
        )
        if not (defined and jnp.all(jnp.isfinite(combined))):
            return False
        self._state = _advance(self.agent, self._state, combined[None], combined[None], True)
        return True

    def sample(self, iteration: int) -> Sampled:
        """Step along the corrected gradient of a small batch of its own; return what its episodes were like.

        A server has no stream for play of its own: it uses agent 0's, as in the simulator.
        """
        batch, sampled = self._player.sample(self._state, None, 0, iteration, large=False)
        _, own = self._player.message(self._state, None, batch, 0)
        self._state = _advance(self.agent, self._state, own, own, False)
        return sampled


def _check_served(agent: Agent) -> None:
    """Refuse agents that would lose their environments between two messages, which other processes may compute."""
    if agent.venue() is not None:
        raise ValueError(
            "the workers of a server cannot keep environments of a host task from one message to the next: use a task "
            "written in JAX, or ByzPG, which plays whole episodes."
        )


def secret_key() -> np.ndarray:
    """Key data that nobody else can guess."""
    return np.frombuffer(os.urandom(8), np.uint32)


def seeded_key(seed: int) -> np.ndarray:
    """The key data of the simulator with this seed."""
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


def _key(key_data: np.ndarray) -> Array:
    return jax.random.wrap_key_data(jnp.asarray(key_data, jnp.uint32))


@dataclass(frozen=True)
class _Player:
    """One agent's episodes and random numbers."""

    agent: Agent
    key: Array
    as_simulated: bool
    # Where it plays on a host task: by agent, as an attacker in a rehearsal plays for others, too.
    venues: dict[int, Venue | None] = field(default_factory=dict)

    def stream(self, iteration: int, stream: int) -> Array:
        return _stream_key(self.key, iteration, stream)

    def exchange_key(self, iteration: int, exchange: int, num_agents: int) -> Array:
        """The key of an exchange of gradients; all of them are parts of round 0."""
        return exchange_key(self.stream(iteration, round_stream(num_agents, 0)), exchange, self.agent.num_exchanges)

    def sample(
        self,
        state: AgentState,
        memory: Any,
        index: int,
        iteration: int,
        large: bool,
        attack: Attack | None = None,
    ) -> tuple[Any, Sampled]:
        """Play with the random numbers of agent `index`; return what its messages are computed from."""
        agent, keys = self.agent, self.stream(iteration, play_stream(index))[None]
        attack = attack if attack is not None and attack.poisons_play else None
        if isinstance(agent.env, HostTask):
            request = _request(agent, state, memory, keys, large)
            if index not in self.venues:
                self.venues[index] = agent.venue()
            experience = agent.play(request, keys, large, _on_play(attack), self.venues[index])
        else:
            request, experience = _play(agent, state, memory, keys, large, attack)
        return _digest(agent, large, self.as_simulated, state, request, experience, keys)

    def message(self, state: AgentState, memory: Any, batch: Any, exchange: int) -> tuple[Any, Array]:
        """The memory afterwards, and the message [1, d]."""
        return _message(self.agent, self.as_simulated, state, memory, batch, exchange)


# Compiled once, whatever the numbers are.
_stream_key = jax.jit(iteration_stream)


@partial(jax.jit, static_argnames=("agent", "large"), compiler_options=QUICK_COMPILATION)
def _request(agent: Agent, state: AgentState, memory: Any, keys: Array, large: bool) -> Any:
    return agent.request(state, memory, keys, large)


@partial(jax.jit, static_argnames=("agent", "large", "attack"), compiler_options=QUICK_COMPILATION)
def _play(
    agent: Agent, state: AgentState, memory: Any, keys: Array, large: bool, attack: Attack | None
) -> tuple[Any, Any]:
    request = agent.request(state, memory, keys, large)
    return request, agent.play(request, keys, large, _on_play(attack))


def _on_play(attack: Attack | None) -> PlayAttacks:
    """The member itself, if it attacks its own play."""
    return [] if attack is None else [(attack, jnp.ones(1, bool))]


def _as_simulated(function: Callable[..., Any], as_simulated: bool, *arguments: Any) -> Any:
    """Apply the function to one agent; as in the simulator, in a batch of two, as products in batches are rounded."""
    if not as_simulated:
        return function(*arguments)
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]) if leaf.ndim else leaf, arguments)
    return jax.tree.map(lambda leaf: leaf[:1] if leaf.ndim else leaf, function(*twice))


@partial(jax.jit, static_argnames=("agent", "large", "as_simulated"), compiler_options=QUICK_COMPILATION)
def _digest(
    agent: Agent, large: bool, as_simulated: bool, state: AgentState, request: Any, experience: Any, keys: Array
) -> Any:
    return _as_simulated(partial(agent.digest, large=large), as_simulated, state, request, experience, keys)


@partial(jax.jit, static_argnames=("agent", "as_simulated"), compiler_options=QUICK_COMPILATION)
def _message(
    agent: Agent, as_simulated: bool, state: AgentState, memory: Any, batch: Any, exchange: Array | int
) -> Any:
    return _as_simulated(partial(agent.message, exchange=exchange), as_simulated, state, memory, batch)


@partial(jax.jit, static_argnames="agent", compiler_options=QUICK_COMPILATION)
def _advance(agent: Agent, state: AgentState, own: Array, aggregated: Array, large: Array | bool) -> AgentState:
    return agent.advance(state, own, aggregated, large)


@partial(jax.jit, static_argnames="agent", compiler_options=QUICK_COMPILATION)
def _settle(agent: Agent, before: Array, advanced: AgentState, agreed: Array) -> AgentState:
    return agent.settle(before, advanced, agreed)


@partial(jax.jit, static_argnames=("rule", "num_byzantine"), compiler_options=QUICK_COMPILATION)
def _combine(
    rule: Rule,
    num_byzantine: int,
    received: Array,
    present: Array,
    own: Array | int | None,
    key: Array,
    memory: Any = None,
) -> tuple[Array, Array | None, Array, Array, Any]:
    """The result at one receiver, its weights, the diameter of what it received, and whether the result is defined.

    Last comes the memory afterwards, of a rule that remembers.
    """
    own_row = None if own is None else jnp.asarray(own)
    cloud = Cloud.received(received, present, len(received) - num_byzantine, own_row)
    if memory is None:
        applied = apply_at_receiver(rule, cloud, num_byzantine=num_byzantine, key=key, with_weights=rule.has_weights)
    else:
        applied, memory = rule.recall(
            received, memory, present=present, own=own_row, num_byzantine=num_byzantine, key=key
        )
    distances = jnp.where(jnp.isfinite(cloud.distances()), cloud.distances(), 0)
    return applied.result, applied.weights, jnp.sqrt(jnp.max(distances)), applied.defined, memory


def _aggregate(
    agent: Agent,
    rule: Rule,
    num_byzantine: int,
    received: np.ndarray,
    present: np.ndarray,
    own: int | None,
    key: Array,
    memories: Received,
) -> tuple[Array, Array | None, Array, Array, Received]:
    """As `_combine`, for gradients, whose blocks are aggregated each by itself, as in the simulator; None: a server."""
    receiver, found = len(received) if own is None else own, []
    for block, (part, past) in enumerate(zip(agent.parts(received), memories, strict=True)):
        of_block, of_receiver = agent.rule_of_block(block, rule), rule_key(block_key(key, block), receiver)
        found.append(_combine(of_block, num_byzantine, part, present, own, of_receiver, past))
    parts, weights, diameters, defined, kept = zip(*found, strict=True)
    if len(found) == 1:
        return *found[0][:-1], kept
    known = [each for each in weights if each is not None]
    mean = jnp.mean(jnp.stack(known), axis=0) if known else None
    diameter, all_defined = jnp.linalg.norm(jnp.stack(diameters)), jnp.all(jnp.stack(defined))
    return jnp.concatenate(parts), mean, diameter, all_defined, kept


@partial(jax.jit, static_argnames=("attack", "gradients"))
def _false_messages(
    attack: Attack, gradients: bool, vectors: Array, own: Array | int, iteration: Array | int, key: Array
) -> Array:
    knowledge = Knowledge(vectors, jnp.asarray([own]), jnp.asarray(iteration), key)
    receivers = jnp.arange(len(vectors))
    answers = attack.messages("gradients" if gradients else "parameters", knowledge, receivers)
    return jnp.broadcast_to(answers[:, 0], vectors.shape)


@partial(jax.jit, static_argnames="attack")
def _false_gradients(attack: Attack, knowledge: Knowledge) -> Array:
    """What each attacker sends to the server [b, d]."""
    return attack.messages("gradients", knowledge, jnp.asarray([knowledge.num_agents]))[0]


# What an agent keeps to itself, as bytes


@cache
def _shapes_of_memory(agent: Agent) -> Any:
    return jax.eval_shape(agent.initial_memory, jax.ShapeDtypeStruct((1, agent.dimension), jnp.float32))


@cache
def _shapes_of_play(agent: Agent) -> tuple[Any, Any, Any]:
    """The shapes of the number of an iteration and of what `_Player.sample` returns of a large batch."""

    def sample(held: Array, memory: Any) -> Any:
        state, keys = AgentState(held, held, held, ()), jax.random.split(jax.random.key(0), 1)
        request = agent.request(state, memory, keys, large=True)
        return 0, *agent.digest(state, request, agent.play(request, keys, large=True), keys, large=True)

    return jax.eval_shape(sample, jax.ShapeDtypeStruct((1, agent.dimension), jnp.float32), _shapes_of_memory(agent))


def _num_bytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _as_bytes(tree: Any) -> bytes:
    return b"".join(np.asarray(jnp.asarray(leaf)).tobytes() for leaf in jax.tree.leaves(tree))


def _as_numbers(tree: Any) -> np.ndarray:
    """The bytes of a tree, filled up and taken for float32."""
    content = _as_bytes(tree)
    return np.frombuffer(content + bytes(-len(content) % 4), np.float32)


def _from_bytes(shapes: Any, content: bytes) -> Any:
    """The inverse of `_as_bytes`; more bytes than needed are ignored."""
    leaves, structure = jax.tree.flatten(shapes)
    found, start = [], 0
    for leaf in leaves:
        found.append(jnp.asarray(np.frombuffer(content, leaf.dtype, leaf.size, start).reshape(leaf.shape)))
        start += leaf.size * leaf.dtype.itemsize
    return jax.tree.unflatten(structure, found)
