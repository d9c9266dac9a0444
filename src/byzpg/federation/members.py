"""One agent behind a network, as vectors out and vectors in: a peer among peers, or a server and its workers.

The method is `algorithms.Agent`'s; nothing here opens a socket. Random numbers have the addresses that `schedule` gives
them, under a key of each member's own: a member with the simulator's key draws what its simulated twin draws.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg.envs.host import HostTask
from byzpg.federation.algorithms import Agent, AgentState, Federation, History, Sampled
from byzpg.federation.devices import QUICK_COMPILATION
from byzpg.federation.schedule import Schedule, iteration_stream, play_stream, round_stream
from byzpg.learning.rollouts import Episodes, PlayAttacks
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
        self.rounds = federation.rounds if federation.agrees else 0
        self._player = _Player(federation.agent, _key(key_data), as_simulated)
        first = schedule.initial_parameters(self.agent.policy) if initial is None else jnp.asarray(initial, jnp.float32)
        if first.shape != (self.agent.policy.dimension,):
            raise ValueError(
                f"the parameters to start from must have shape ({self.agent.policy.dimension},) for this policy, "
                f"got {first.shape}."
            )
        self.plan = schedule.plan(first)
        self.dimension = len(first)
        self._state = self.agent.initial(first[None])
        self._advanced = self._state
        # The history at the beginning of the iteration, and with its estimate.
        self._history = self._longer = self.agent.initial_history(first[None])
        self._attack = attack
        self.returns, self.steps = np.zeros(0), 0  # of the last batch of episodes
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
        """Return what the member sends [d]: its estimate ṽ_t from episodes of its own or, with momentum, m_t."""
        if iteration == self.plan.output_iteration:
            self.on_output(self.parameters)
        return self._gradient(iteration)

    def _gradient(self, iteration: int) -> np.ndarray:
        large = bool(self.plan.large[iteration])
        own, sampled = self._player.sample(self._state, self.index, iteration, large, self._attack)
        self.returns, self.steps = np.asarray(sampled.returns[0]), int(np.sum(sampled.lengths[0]))
        self._longer, message = _remember(self.agent, self._history, own[:1])
        return np.asarray(message[0])

    def combine(self, iteration: int, phase: int, received: np.ndarray, present: np.ndarray) -> np.ndarray | None:
        """Combine the vectors of one round.

        Args:
            iteration: The iteration of training.
            phase: 0 for gradients, k for the k-th round of agreement.
            received: The vectors [K, d], with the member's own in its place.
            present: Which of them have arrived [K].

        Returns:
            The vector [d] to send in the next round, or None after the last.
        """
        rule = self.aggregator if phase == 0 else self.agreement
        assert rule is not None
        key = self._player.rule_key(iteration, round_stream(self.num_members, phase), self.index)
        combined, weights, diameter, _ = _combine(rule, self.num_byzantine, received, present, self.index, key)
        self.outcome = Outcome(float(diameter), None if weights is None else np.asarray(weights))
        if phase == 0:
            own = jnp.asarray(received[self.index])[None]
            large = bool(self.plan.large[iteration])
            self._advanced = _advance(self.agent, self._state, own, combined[None], large)
            vector = self._advanced.parameters
        else:
            vector = combined[None]
        if phase < self.rounds:
            return np.asarray(vector[0])
        self._state = self._settled(vector) if self.rounds else self._advanced
        self._history = self._longer
        return None

    def _settled(self, agreed: Array) -> AgentState:
        return _settle(self.agent, self._state.parameters, self._advanced, agreed)

    # The state as one vector. A checkpoint keeps the whole snapshot; members send one that fell behind the state, with
    # which a snapshot begins. Their histories are of no use to it.

    @property
    def state_dimension(self) -> int:
        return self.dimension * len(_vectors(self._state))

    @property
    def snapshot_dimension(self) -> int:
        return self.dimension * len(_vectors((self._state, self._history)))

    def snapshot(self) -> np.ndarray:
        """θ_t, θ_{t−1}, v̂_{t−1}, the optimizer's moments and, with momentum, m_{t−1}, one after the other."""
        vectors = _vectors((self._state, self._history))
        return np.concatenate([np.asarray(leaf, np.float32).reshape(-1) for leaf in vectors])

    def restore(self, iteration: int, snapshot: np.ndarray) -> None:
        state, self._history = _restored((self._state, self._history), iteration, snapshot, self.dimension)
        self._state = self._advanced = state

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
        self._state = self._advanced = _restored(self._state, iteration, state, self.dimension)
        self._history = self.agent.recalled(self._state.direction, jnp.full(1, iteration, jnp.int32))

    def false_messages(self, attack: Attack, iteration: int, phase: int, truth: np.ndarray) -> list[np.ndarray]:
        """What an attacker in this place sends to each member [K].

        Args:
            attack: The attack.
            iteration: The iteration of training.
            phase: As for `combine`.
            truth: The vector [d] that an honest member would send: all that the attacker knows.
        """
        vectors = jnp.full((self.num_members, self.dimension), jnp.nan).at[self.index].set(truth)
        key = attack_key(self._player.stream(iteration, round_stream(self.num_members, phase)))
        return list(np.asarray(_false_messages(attack, phase == 0, vectors, self.index, iteration, key)))

    def warm_up(self) -> None:
        """Compile everything, so that it costs nobody a round."""
        state, history, returns = self._state, self._history, self.returns
        all_present = np.ones(self.num_members, bool)
        sizes = {bool(large): iteration for iteration, large in reversed(list(enumerate(self.plan.large)))}
        vector = np.zeros(self.dimension, np.float32)
        for iteration in sizes.values():
            vector = self._gradient(iteration)
        for phase in range(min(2, 1 + self.rounds)):
            rows = np.broadcast_to(vector, (self.num_members, self.dimension))
            self.combine(0, phase, rows, all_present)
        if self.rounds:
            self._settled(jnp.asarray(vector)[None])
        self._state, self._advanced, self._history, self.returns = state, state, history, returns


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
        self.federation, self.index = federation, index
        self._player, self._attack = _Player(federation.agent, _key(key_data), as_simulated), attack
        self.returns = np.zeros(0)  # of the last batch of episodes
        # By agent, as an attacker in a rehearsal computes the messages of others: the iteration of its last batch, and
        # its history before that batch and with it.
        self._histories: dict[int, tuple[int | None, History | None, History | None]] = {}

    @property
    def memory(self) -> dict[str, np.ndarray]:
        """What to `recall` in another process; nothing without momentum."""
        return {
            f"{part}-{index}": np.asarray(value)
            for index, (_, _, history) in self._histories.items()
            if history is not None
            for part, value in vars(history).items()
        }

    def recall(self, memory: Mapping[str, np.ndarray]) -> None:
        """Continue from the memory of another process. A worker that cannot begins anew, as in iteration 0."""
        self._histories = {}
        for index in {int(name.partition("-")[2]) for name in memory}:
            history = History(jnp.asarray(memory[f"mean-{index}"]), jnp.asarray(memory[f"count-{index}"]))
            self._histories[index] = None, history, history

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
        own, sampled = self._player.sample(state, index, iteration, large=True, attack=attack)
        agent = self.federation.agent
        initial = agent.initial_history(held)
        last, before, longer = self._histories.get(index, (None, initial, initial))
        if iteration != last:  # a batch that is sampled again is remembered once
            before = longer
        longer, message = _remember(agent, before, own[:1])
        self._histories[index] = iteration, before, longer
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
        self.agent, self.aggregator = federation.agent, federation.aggregator
        self.num_workers, self.num_byzantine = federation.num_agents, federation.num_byzantine
        self._player = _Player(federation.agent, _key(key_data), as_simulated)
        first = schedule.initial_parameters(self.agent.policy)
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
        key = self._player.rule_key(iteration, round_stream(self.num_workers, 0), self.num_workers)
        combined, _, _, defined = _combine(self.aggregator, self.num_byzantine, received, present, None, key)
        if not (defined and jnp.all(jnp.isfinite(combined))):
            return False
        self._state = _advance(self.agent, self._state, combined[None], combined[None], True)
        return True

    def sample(self, iteration: int) -> np.ndarray:
        """Step along the corrected gradient of a small batch of its own; return the returns of its episodes [B].

        A server has no stream for play of its own: it uses agent 0's, as in the simulator.
        """
        own, sampled = self._player.sample(self._state, 0, iteration, large=False)
        self._state = _advance(self.agent, self._state, own[:1], own[:1], False)
        return np.asarray(sampled.returns[0])


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

    def stream(self, iteration: int, stream: int) -> Array:
        return _stream_key(self.key, iteration, stream)

    def rule_key(self, iteration: int, stream: int, receiver: int) -> Array:
        return rule_key(self.stream(iteration, stream), receiver)

    def sample(
        self, state: AgentState, index: int, iteration: int, large: bool, attack: Attack | None = None
    ) -> tuple[Array, Sampled]:
        """The estimate [1, d] of one agent from a batch of its own, with the random numbers of agent `index`."""
        agent, keys = self.agent, self.stream(iteration, play_stream(index))[None]
        attack = attack if attack is not None and attack.poisons_play else None
        if isinstance(agent.env, HostTask):
            points = _points(agent, state, keys, large)
            episodes = agent.play(points, keys, large, _on_play(attack))
        else:
            points, episodes = _play(agent, state, keys, large, attack)
        return _estimate(agent, large, self.as_simulated, state, points, episodes)


def _vectors(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _restored(tree: Any, iteration: int, vectors: np.ndarray, dimension: int) -> Any:
    """The tree with other vectors; its whole numbers count iterations."""
    rows = iter(np.asarray(vectors, np.float32).reshape(-1, dimension))

    def of(leaf: Array) -> Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(next(rows)).reshape(leaf.shape)
        return jnp.full_like(leaf, iteration)

    return jax.tree.map(of, tree)


# Compiled once, whatever the numbers are.
_stream_key = jax.jit(iteration_stream)


@partial(jax.jit, static_argnames=("agent", "large"), compiler_options=QUICK_COMPILATION)
def _points(agent: Agent, state: AgentState, keys: Array, large: bool) -> Array:
    return agent.points(state, keys, large)


@partial(jax.jit, static_argnames=("agent", "large", "attack"), compiler_options=QUICK_COMPILATION)
def _play(agent: Agent, state: AgentState, keys: Array, large: bool, attack: Attack | None) -> tuple[Array, Episodes]:
    points = agent.points(state, keys, large)
    return points, agent.play(points, keys, large, _on_play(attack))


def _on_play(attack: Attack | None) -> PlayAttacks:
    """The member itself, if it attacks its own play."""
    return [] if attack is None else [(attack, jnp.ones(1, bool))]


@partial(jax.jit, static_argnames=("agent", "large", "as_simulated"), compiler_options=QUICK_COMPILATION)
def _estimate(
    agent: Agent, large: bool, as_simulated: bool, state: AgentState, points: Array, episodes: Episodes
) -> Any:
    if as_simulated:  # in a batch of two, whose products are rounded as those of any other batch
        state, points, episodes = jax.tree.map(
            lambda leaf: jnp.concatenate([leaf, leaf]) if leaf.ndim else leaf, (state, points, episodes)
        )
    return agent.estimate(state, points, episodes, large)


@partial(jax.jit, static_argnames="agent", compiler_options=QUICK_COMPILATION)
def _remember(agent: Agent, history: History | None, estimate: Array) -> tuple[History | None, Array]:
    return agent.remember(history, estimate)


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
