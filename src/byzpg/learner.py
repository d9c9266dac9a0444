"""Agents outside the simulator, as vectors out and vectors in: a peer among peers, or a server and its workers.

The method is `algorithms.Agent`'s; nothing here knows a network. Random numbers have the addresses they have in
`simulate`, under a key of each one's own: whoever has the simulator's key draws what its simulated twin draws.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg.algorithms import Agent, AgentState, Sampled
from byzpg.attacks import Attack, Knowledge
from byzpg.clouds import Cloud
from byzpg.coin import CommonCoin
from byzpg.config import Settings
from byzpg.envs.host import HostTask
from byzpg.rollouts import Episodes, Liars
from byzpg.rules import Rule
from byzpg.simulate import INITIAL, ITERATIONS, QUICK_COMPILATION
from byzpg.training import Plan

ATTACK_STREAM, RULE_STREAM = 0, 1  # of a round's key, as in `exchange`


@dataclass(frozen=True)
class Outcome:
    """What a member made of one step."""

    diameter: float  # of all that was received, liars included
    weights: np.ndarray | None  # [K], what each sender got; None for rules without weights


class Learner:
    """The agent at one position of a federation."""

    def __init__(self, settings: Settings, index: int, key_data: np.ndarray, attack: Attack | None = None) -> None:
        federation = settings.federation()
        self.settings, self.index = settings, index
        self.agent, self.num_members, self.num_faulty = federation.agent, federation.num_agents, federation.num_declared
        self.aggregator, self.agreement = federation.aggregator, federation.agreement
        self.rounds = federation.rounds if federation.agrees else 0
        self._key = _key(key_data)
        first, self.plan = _beginning(settings)
        self.dimension = len(first)
        self._state = self.agent.initial(first[None])
        self._advanced = self._state
        self._attack = _on_play(attack)
        self.returns, self.steps = np.zeros(0), 0  # of the last batch of episodes
        self.outcome = Outcome(0.0, None)  # of the last step
        self.on_output: Callable[[np.ndarray], None] = lambda parameters: None  # told θ_T̂ when iteration T̂ begins

    @property
    def num_iterations(self) -> int:
        return len(self.plan.large)

    @property
    def plan_digest(self) -> str:
        """Of the batch sizes of all iterations: they follow from the bits of θ_0, which every member draws itself."""
        return sha256(self.plan.large.tobytes()).hexdigest()

    @property
    def parameters(self) -> np.ndarray:
        return np.asarray(self._state.parameters[0])

    def stream(self, iteration: int, stream: int) -> Array:
        return _stream(self._key, iteration, stream)

    def begin(self, iteration: int) -> np.ndarray:
        """The member's gradient estimate ṽ_t [d], from episodes of its own."""
        if iteration == self.plan.output_iteration:
            self.on_output(self.parameters)
        return self._gradient(iteration)

    def _gradient(self, iteration: int) -> np.ndarray:
        large, key = bool(self.plan.large[iteration]), self.stream(iteration, self.index)
        own, sampled = _sample(self.agent, self._state, key, large, self._attack)
        self.returns, self.steps = np.asarray(sampled.returns[0]), int(np.sum(sampled.lengths[0]))
        return np.asarray(own[0])

    def combine(self, iteration: int, phase: int, received: np.ndarray, present: np.ndarray) -> np.ndarray | None:
        """What follows from the vectors [K, d] of one step: the vector of the next, or None after the last.

        Phase 0 is the gradients', k the k-th round of agreement's.
        """
        rule = self.aggregator if phase == 0 else self.agreement
        assert rule is not None
        round_key = self.stream(iteration, self.num_members + phase)
        key = jax.random.fold_in(jax.random.fold_in(round_key, RULE_STREAM), self.index)
        combined, weights, diameter, _ = _apply(rule, self.num_faulty, received, present, self.index, key)
        self.outcome = Outcome(float(diameter), None if weights is None else np.asarray(weights))
        if phase == 0:
            own = jnp.asarray(received[self.index])[None]
            self._advanced = _advance(self.agent, self._state, own, combined[None])
            vector = self._advanced.parameters
        else:
            vector = combined[None]
        if phase < self.rounds:
            return np.asarray(vector[0])
        self._state = self._settled(vector) if self.rounds else self._advanced
        return None

    def _settled(self, agreed: Array) -> AgentState:
        return _settle(self.agent, self._state.parameters, self._advanced, agreed)

    # The state as a vector: what a checkpoint keeps, and what members tell one that fell behind.

    @property
    def state_dimension(self) -> int:
        return len(self.snapshot())

    def snapshot(self) -> np.ndarray:
        """θ_t, θ_{t−1}, v̂_{t−1} and the optimizer's moments, one after the other."""
        return np.concatenate([np.asarray(leaf, np.float32).reshape(-1) for leaf in _vectors(self._state)])

    def restore(self, iteration: int, snapshot: np.ndarray) -> None:
        rows = iter(np.asarray(snapshot, np.float32).reshape(-1, self.dimension))

        def restored(leaf: Array) -> Array:
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                return jnp.asarray(next(rows)).reshape(leaf.shape)
            return jnp.full_like(leaf, iteration)  # an optimizer's count of its steps

        self._state = self._advanced = jax.tree.map(restored, self._state)

    def adopt(self, iteration: int, states: Sequence[np.ndarray | None]) -> None:
        """Take over the state of others [K], combined part by part with the agreement rule.

        The own state is out of date, and some are missing. In their places stands the coordinate-wise median of the
        others, which liars cannot move far: for rules that start from the own row, and so that K − f rows are sound.
        """
        rule, found = self.agreement or self.aggregator, [state for state in states if state is not None]
        median = np.median(np.stack(found), axis=0).astype(np.float32)
        rows = np.stack([median if state is None else state for state in states])
        present = np.ones(len(rows), bool)
        parts = rows.reshape(len(rows), -1, self.dimension)
        key = self.stream(iteration, self.num_members + 1 + self.rounds)  # one that no round uses
        combined = [
            np.asarray(_apply(rule, self.num_faulty, parts[:, part], present, self.index, key)[0])
            for part in range(parts.shape[1])
        ]
        # A liar may have moved what was near 0 past it, where no variance can be: back between honest numbers.
        ordered = np.sort(np.stack(found), axis=0)
        low, high = ordered[self.num_faulty], ordered[-self.num_faulty - 1]
        self.restore(iteration, np.clip(np.concatenate(combined), low, high))

    def lies(self, attack: Attack, iteration: int, phase: int, truth: np.ndarray) -> list[np.ndarray]:
        """What an attacker in this place sends to each member [K] instead of `truth`; it knows its own vector alone."""
        vectors = jnp.full((self.num_members, self.dimension), jnp.nan).at[self.index].set(truth)
        key = jax.random.fold_in(self.stream(iteration, self.num_members + phase), ATTACK_STREAM)
        return list(np.asarray(_lies(attack, phase == 0, vectors, self.index, iteration, key)))

    def warm_up(self) -> None:
        """Compile everything, so that it costs nobody a round."""
        state, returns = self._state, self.returns
        everyone = np.ones(self.num_members, bool)
        sizes = {bool(large): iteration for iteration, large in reversed(list(enumerate(self.plan.large)))}
        vector = np.zeros(self.dimension, np.float32)
        for iteration in sizes.values():
            vector = self._gradient(iteration)
        for phase in range(min(2, 1 + self.rounds)):
            rows = np.broadcast_to(vector, (self.num_members, self.dimension))
            self.combine(0, phase, rows, everyone)
        if self.rounds:
            self._settled(jnp.asarray(vector)[None])
        self._state, self._advanced, self.returns = state, state, returns


class Worker:
    """The agent at one position beneath a trusted server (Alg. 1): it keeps nothing but its random numbers."""

    def __init__(self, settings: Settings, index: int, key_data: np.ndarray, attack: Attack | None = None) -> None:
        self.federation, self.index = settings.federation(), index
        self._key, self._attack = _key(key_data), _on_play(attack)
        self.returns = np.zeros(0)  # of the last batch of episodes

    def gradient(self, iteration: int, parameters: np.ndarray) -> np.ndarray:
        """ṽ [d] at the server's θ [d], from a large batch of episodes of its own."""
        estimate, sampled = self._sample(self.index, iteration, parameters)
        self.returns = np.asarray(sampled.returns)[0]
        return np.asarray(estimate)[0]

    def lie(self, attack: Attack, iteration: int, parameters: np.ndarray, liars: Sequence[int]) -> np.ndarray:
        """What an omniscient liar in this place sends to the server [d], one of `liars`.

        It has everybody's random numbers, and so works out itself what the others will send: for rehearsals alone.
        """
        everyone = range(self.federation.num_agents)
        vectors = jnp.concatenate([self._sample(index, iteration, parameters)[0][:1] for index in everyone])
        key = jax.random.fold_in(_stream(self._key, iteration, len(everyone)), ATTACK_STREAM)
        lies = _lies_at_server(
            attack,
            self.federation.aggregator,
            self.federation.num_declared,
            vectors,
            jnp.asarray(sorted(liars)),
            iteration,
            key,
        )
        return np.asarray(lies[sorted(liars).index(self.index)])

    def _sample(self, index: int, iteration: int, parameters: np.ndarray) -> tuple[Array, Sampled]:
        held = jnp.asarray(np.asarray(parameters, np.float32)[None])
        state = AgentState(held, held, held, ())  # of all this, a large batch looks at θ alone
        attack = self._attack if index == self.index else None
        return _sample(self.federation.agent, state, _stream(self._key, iteration, index), True, attack)


class Server:
    """The trusted server of Alg. 1: it holds θ, combines its workers' gradients, and samples small batches alone."""

    def __init__(self, settings: Settings, key_data: np.ndarray) -> None:
        federation = settings.federation()
        if not federation.centralized:
            raise ValueError(f"algorithm {settings.algorithm} has no server: use ByzPG or Fed-PAGE-PG.")
        self.settings, self.agent = settings, federation.agent
        self.num_workers, self.num_faulty = federation.num_agents, federation.num_declared
        self.aggregator = federation.aggregator
        self._key = _key(key_data)
        first, self.plan = _beginning(settings)
        self.dimension = len(first)
        self._state = self.agent.initial(first[None])
        self.output = np.asarray(first)  # θ_T̂, once iteration T̂ has begun

    @property
    def num_iterations(self) -> int:
        return len(self.plan.large)

    @property
    def parameters(self) -> np.ndarray:
        return np.asarray(self._state.parameters[0])

    def begin(self, iteration: int) -> bool:
        """Whether the iteration samples a large batch, at the workers."""
        if iteration == self.plan.output_iteration:
            self.output = self.parameters
        return bool(self.plan.large[iteration])

    def combine(self, iteration: int, received: np.ndarray, present: np.ndarray) -> bool:
        """Step along the aggregate of the workers' gradients [K, d].

        With fewer than K − f usable rows there is none: θ stays as it is, and the answer is no. The plain mean is no
        exception: with f = 0 declared it needs all K, as one that leaves out what it does not like is not the mean.
        """
        round_key = _stream(self._key, iteration, self.num_workers)
        key = jax.random.fold_in(jax.random.fold_in(round_key, RULE_STREAM), self.num_workers)
        combined, _, _, defined = _apply(self.aggregator, self.num_faulty, received, present, None, key)
        if not (defined and jnp.all(jnp.isfinite(combined))):
            return False
        self._state = _advance(self.agent, self._state, combined[None], combined[None])
        return True

    def sample(self, iteration: int) -> np.ndarray:
        """Step along the corrected gradient of a small batch of its own; the returns of its episodes [B].

        A server has no random numbers for play of its own: it has those of agent 0, as in `simulate`.
        """
        own, sampled = _sample(self.agent, self._state, _stream(self._key, iteration, 0), False, None)
        self._state = _advance(self.agent, self._state, own[:1], own[:1])
        return np.asarray(sampled.returns[0])


def secret_key() -> np.ndarray:
    """Key data that nobody else can guess."""
    return np.frombuffer(os.urandom(8), np.uint32)


def seeded_key(seed: int) -> np.ndarray:
    """The key data of the simulator with this seed."""
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


def _key(key_data: np.ndarray) -> Array:
    return jax.random.wrap_key_data(jnp.asarray(key_data, jnp.uint32))


def _beginning(settings: Settings) -> tuple[Array, Plan]:
    """θ_0, and the batch sizes that follow from its bits."""
    policy = settings.federation().agent.policy
    first = policy.initial(jax.random.fold_in(jax.random.key(settings.seed), INITIAL))
    return first, Plan.of(settings, CommonCoin.of(np.asarray(first)))


def _stream(key: Array, iteration: int, stream: int) -> Array:
    """As in `simulate`: stream k is the play of agent k, those from K on are the rounds of messages."""
    return _fold(key, jnp.asarray([ITERATIONS, iteration, stream]))


def _on_play(attack: Attack | None) -> Attack | None:
    return attack if attack is not None and attack.poisons_play else None


def _sample(agent: Agent, state: AgentState, key: Array, large: bool, attack: Attack | None) -> tuple[Array, Sampled]:
    """The estimate of one agent, from a batch of its own; twice, see `_estimate`."""
    if isinstance(agent.env, HostTask):
        episodes = agent.play(state.parameters, key[None], large, _liars(attack))
    else:
        episodes = _play(agent, state.parameters, key[None], large, attack)
    return _estimate(agent, large, state, episodes)


def _vectors(state: AgentState) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]


@jax.jit
def _fold(key: Array, address: Array) -> Array:
    return jax.lax.scan(lambda folded, each: (jax.random.fold_in(folded, each), None), key, address)[0]


@partial(jax.jit, static_argnames=("agent", "large", "attack"), compiler_options=QUICK_COMPILATION)
def _play(agent: Agent, parameters: Array, keys: Array, large: bool, attack: Attack | None) -> Episodes:
    return agent.play(parameters, keys, large, _liars(attack))


def _liars(attack: Attack | None) -> Liars:
    """The member itself, where it poisons its play."""
    return [] if attack is None else [(attack, jnp.ones(1, bool))]


@partial(jax.jit, static_argnames=("agent", "large"), compiler_options=QUICK_COMPILATION)
def _estimate(agent: Agent, large: bool, state: AgentState, episodes: Episodes) -> Any:
    # Done twice side by side: the products of a lone agent would be rounded otherwise than those of a simulated one,
    # one action in a million would differ, and from there on everything.
    both = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]) if leaf.ndim else leaf, (state, episodes))
    return agent.estimate(both[0], both[1], large)


@partial(jax.jit, static_argnames="agent", compiler_options=QUICK_COMPILATION)
def _advance(agent: Agent, state: AgentState, own: Array, aggregated: Array) -> AgentState:
    return agent.advance(state, own, aggregated)


@partial(jax.jit, static_argnames="agent", compiler_options=QUICK_COMPILATION)
def _settle(agent: Agent, before: Array, advanced: AgentState, agreed: Array) -> AgentState:
    return agent.settle(before, advanced, agreed)


@partial(jax.jit, static_argnames=("rule", "num_faulty"), compiler_options=QUICK_COMPILATION)
def _apply(
    rule: Rule, num_faulty: int, received: Array, present: Array, own: Array | int | None, key: Array
) -> tuple[Array, Array | None, Array, Array]:
    """The result at one receiver, its weights, the diameter of what it received, and whether enough was usable."""
    majority = len(received) - num_faulty
    cloud = Cloud.received(received, present, majority, None if own is None else jnp.asarray(own))
    distances = jnp.where(jnp.isfinite(cloud.distances()), cloud.distances(), 0)
    diameter, defined = jnp.sqrt(jnp.max(distances)), jnp.sum(cloud.usable) >= majority
    if rule.has_weights:
        coefficients = rule.coefficients(cloud, num_faulty, key)
        return cloud.combine(coefficients), coefficients[:-1], diameter, defined
    return rule.combine(cloud, num_faulty, key), None, diameter, defined


@partial(jax.jit, static_argnames=("attack", "gradients"))
def _lies(
    attack: Attack, gradients: bool, vectors: Array, own: Array | int, iteration: Array | int, key: Array
) -> Array:
    knowledge = Knowledge(vectors, jnp.asarray([own]), jnp.asarray(iteration), key)
    everyone = jnp.arange(len(vectors))
    answers = attack.messages("gradients" if gradients else "parameters", knowledge, everyone)
    return jnp.broadcast_to(answers[:, 0], vectors.shape)


@partial(jax.jit, static_argnames=("attack", "rule", "num_faulty"))
def _lies_at_server(
    attack: Attack,
    rule: Rule,
    num_faulty: int,
    vectors: Array,
    liars: Array,
    iteration: Array | int,
    key: Array,
) -> Array:
    knowledge = Knowledge(vectors, liars, jnp.asarray(iteration), key, rule, num_faulty)
    return attack.messages("gradients", knowledge, jnp.asarray([len(vectors)]))[0]
