"""One agent behind a network, as vectors out and vectors in: a peer among peers, or a server and its workers.

The method is `algorithms.Agent`'s; nothing here opens a socket. Random numbers have the addresses that `schedule` gives
them, under a key of each member's own: a member with the simulator's key draws what its simulated twin draws.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg.envs.host import HostTask
from byzpg.federation.agents import Agent, AgentState, Sampled
from byzpg.federation.algorithms import Federation
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
from byzpg.robust.attacks import Attack, Knowledge
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
        self._advanced, self._longer = self._state, self._memory
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
            combined, weights, diameter = self._aggregated(iteration, phase, received, present)
            own, large = jnp.asarray(received[self.index])[None], bool(self.plan.large[iteration])
            self._advanced = _advance(self.agent, self._advanced, own, combined[None], large)
            vector = self._advanced.parameters
        else:
            assert self.agreement is not None
            key = rule_key(self._round_key(iteration, phase), self.index)
            combined, weights, diameter, _ = _combine(
                self.agreement, self.num_byzantine, received, present, self.index, key
            )
            vector = combined[None]
        self.outcome = Outcome(float(diameter), None if weights is None else np.asarray(weights))
        if phase + 1 < self.exchanges:
            return self._message(phase + 1)
        if phase + 1 < self.exchanges + self.rounds:
            return np.asarray(vector[0])
        self._state = self._settled(vector) if self.rounds else self._advanced
        self._memory = self._longer
        return None

    def _round_key(self, iteration: int, phase: int) -> Array:
        """The key of a round; all exchanges of gradients are parts of round 0."""
        number = max(0, phase - self.exchanges + 1)
        key = self._player.stream(iteration, round_stream(self.num_members, number))
        return key if number else exchange_key(key, phase, self.exchanges)

    def _aggregated(
        self, iteration: int, phase: int, received: np.ndarray, present: np.ndarray
    ) -> tuple[Array, Array | None, Array]:
        """The aggregate of gradients, their weights and their diameter; of several blocks, as in the simulator."""
        key, found = self._round_key(iteration, phase), []
        for block, part in enumerate(self.agent.parts(received)):
            of_block = rule_key(block_key(key, block), self.index)
            found.append(_combine(self.aggregator, self.num_byzantine, part, present, self.index, of_block))
        if len(found) == 1:
            return found[0][:3]
        parts, weights, diameters, _ = zip(*found, strict=True)
        mean = None if weights[0] is None else jnp.mean(jnp.stack(weights), axis=0)
        return jnp.concatenate(parts), mean, jnp.linalg.norm(jnp.stack(diameters))

    def _settled(self, agreed: Array) -> AgentState:
        return _settle(self.agent, self._state.parameters, self._advanced, agreed)

    # The state as one vector. A checkpoint keeps the whole snapshot; members send one that fell behind the state, with
    # which a snapshot begins. Their histories are of no use to it.

    @property
    def state_dimension(self) -> int:
        return self.dimension * len(self._vectors(self._state))

    @property
    def snapshot_dimension(self) -> int:
        return self.dimension * len(self._vectors((self._state, self._memory)))

    def _vectors(self, tree: Any) -> list[Any]:
        return [leaf for leaf in jax.tree.leaves(tree) if leaf.shape == (1, self.dimension)]

    def snapshot(self) -> np.ndarray:
        """θ_t, θ_{t−1}, v̂_{t−1}, the optimizer's moments and, with momentum, m_{t−1}, one after the other.

        Environments that go on from one iteration to the next are not in it: a member that restarts begins new
        episodes.
        """
        vectors = self._vectors((self._state, self._memory))
        return np.concatenate([np.asarray(leaf, np.float32).reshape(-1) for leaf in vectors])

    def restore(self, iteration: int, snapshot: np.ndarray) -> None:
        begun = self.agent.initial_memory(self._state.parameters)
        self._state, self._memory = self._restored((self._state, begun), iteration, snapshot)
        self._advanced, self._longer = self._state, self._memory

    def _restored(self, tree: Any, iteration: int, vectors: np.ndarray) -> Any:
        """The tree with other vectors; a whole number of an agent counts updates, and everything else stays."""
        rows = iter(np.asarray(vectors, np.float32).reshape(-1, self.dimension))

        def of(leaf: Array) -> Array:
            if leaf.shape == (1, self.dimension):
                return jnp.asarray(next(rows)).reshape(leaf.shape)
            is_count = leaf.ndim == 1 and jnp.issubdtype(leaf.dtype, jnp.integer)
            return jnp.full_like(leaf, iteration * self.agent.num_updates) if is_count else leaf

        return jax.tree.map(of, tree)

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
        self._state = self._advanced = self._restored(self._state, iteration, state)
        self._memory = self.agent.recalled(self._state.direction, jnp.full(1, iteration, jnp.int32))

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
        state, memory, returns = self._state, self._memory, self.returns
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
        self._state, self._advanced, self.returns = state, state, returns
        self._memory, self._longer = memory, memory


class Worker:
    """The agent at one position beneath a trusted server (Alg. 1): it keeps its random numbers and, with momentum, m_t.

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
        self.federation, self.index = federation, index
        self._player, self._attack = _Player(federation.agent, _key(key_data), as_simulated), attack
        self.returns = np.zeros(0)  # of the last batch of episodes
        # By agent, as an attacker in a rehearsal computes the messages of others: the iteration of its last batch, and
        # its memory before that batch and with it.
        self._memories: dict[int, tuple[int | None, Any, Any]] = {}

    @property
    def memory(self) -> dict[str, np.ndarray]:
        """What to `recall` in another process; nothing without momentum."""
        return {
            f"{leaf}-{index}": np.asarray(value)
            for index, (_, _, memory) in self._memories.items()
            for leaf, value in enumerate(jax.tree.leaves(memory))
        }

    def recall(self, memory: Mapping[str, np.ndarray]) -> None:
        """Continue from the memory of another process. A worker that cannot begins anew, as in iteration 0."""
        agent = self.federation.agent
        structure = jax.tree.structure(jax.eval_shape(agent.initial_memory, jnp.zeros((1, agent.dimension))))
        self._memories = {}
        for index in {int(name.partition("-")[2]) for name in memory}:
            leaves = [jnp.asarray(memory[f"{leaf}-{index}"]) for leaf in range(structure.num_leaves)]
            kept = jax.tree.unflatten(structure, leaves)
            self._memories[index] = None, kept, kept

    def gradient(self, iteration: int, parameters: np.ndarray) -> np.ndarray:
        """The message [d] at the server's θ [d], from a large batch of episodes of its own: ṽ or, with momentum, m."""
        message, sampled = self._sample(self.index, iteration, parameters)
        self.returns = np.asarray(sampled.returns)[0]
        return np.asarray(message)[0]

    def false_gradient(
        self, attack: Attack, iteration: int, parameters: np.ndarray, attackers: Sequence[int]
    ) -> np.ndarray:
        """What an omniscient attacker in this place, one of `attackers`, sends to the server [d].

        It holds all agents' random numbers, and so computes itself what the others will send: for rehearsals alone.
        """
        federation, attackers = self.federation, sorted(attackers)
        agents = range(federation.num_agents)
        vectors = jnp.concatenate([self._sample(index, iteration, parameters)[0] for index in agents])
        key = attack_key(self._player.stream(iteration, round_stream(len(agents), 0)))
        knowledge = Knowledge(
            vectors,
            jnp.asarray(attackers),
            jnp.asarray(iteration),
            key,
            rule=federation.aggregator,
            num_byzantine=federation.num_byzantine,
        )
        return np.asarray(_false_gradients(attack, knowledge)[attackers.index(self.index)])

    def _sample(self, index: int, iteration: int, parameters: np.ndarray) -> tuple[Array, Sampled]:
        held = jnp.asarray(np.asarray(parameters, np.float32)[None])
        state = AgentState(held, held, held, ())  # of all this, a large batch looks at θ alone
        attack = self._attack if index == self.index else None
        initial = self.federation.agent.initial_memory(held)
        last, before, longer = self._memories.get(index, (None, initial, initial))
        if iteration != last:  # a batch that is sampled again is remembered once
            before = longer
        batch, sampled = self._player.sample(state, before, index, iteration, large=True, attack=attack)
        longer, message = self._player.message(state, before, batch, 0)
        self._memories[index] = iteration, before, longer
        return message, sampled


class Server:
    """The trusted server of Alg. 1: it holds θ, aggregates its workers' gradients, and samples small batches alone.

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
            raise ValueError("this algorithm has no server: use ByzPG, FedPG-BR or Fed-PAGE-PG.")
        _check_served(federation.agent)
        self.agent, self.aggregator = federation.agent, federation.aggregator
        self.num_workers, self.num_byzantine = federation.num_agents, federation.num_byzantine
        self._player = _Player(federation.agent, _key(key_data), as_simulated)
        first = self.agent.initial_parameters(schedule.initial_key)
        self.plan = schedule.plan(first)
        self.dimension = len(first)
        self._state = self.agent.initial(first[None])
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

    def combine(self, iteration: int, received: np.ndarray, present: np.ndarray) -> bool:
        """Step along the aggregate of the workers' gradients [K, d]; return whether there was a step.

        If fewer than K − f rows are usable, the parameters stay unchanged. The plain mean is no exception: with f = 0
        it needs all K rows, because the mean of some of the rows is another rule.
        """
        round_key = self._player.stream(iteration, round_stream(self.num_workers, 0))
        key = rule_key(round_key, self.num_workers)
        combined, _, _, defined = _combine(self.aggregator, self.num_byzantine, received, present, None, key)
        if not (defined and jnp.all(jnp.isfinite(combined))):
            return False
        self._state = _advance(self.agent, self._state, combined[None], combined[None], True)
        return True

    def sample(self, iteration: int) -> np.ndarray:
        """Step along the corrected gradient of a small batch of its own; return the returns of its episodes [B].

        A server has no stream for play of its own: it uses agent 0's, as in the simulator.
        """
        batch, sampled = self._player.sample(self._state, None, 0, iteration, large=False)
        _, own = self._player.message(self._state, None, batch, 0)
        self._state = _advance(self.agent, self._state, own, own, False)
        return np.asarray(sampled.returns[0])


def _check_served(agent: Agent) -> None:
    if len(agent.blocks) > 1 or agent.num_exchanges > 1:
        raise ValueError("a server and its workers have no critic yet beyond the simulator: use ByzPG.")


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
    rule: Rule, num_byzantine: int, received: Array, present: Array, own: Array | int | None, key: Array
) -> tuple[Array, Array | None, Array, Array]:
    """The result at one receiver, its weights, the diameter of what it received, and whether the result is defined."""
    own_row = None if own is None else jnp.asarray(own)
    cloud = Cloud.received(received, present, len(received) - num_byzantine, own_row)
    applied = apply_at_receiver(rule, cloud, num_byzantine=num_byzantine, key=key, with_weights=rule.has_weights)
    distances = jnp.where(jnp.isfinite(cloud.distances()), cloud.distances(), 0)
    return applied.result, applied.weights, jnp.sqrt(jnp.max(distances)), applied.defined


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
