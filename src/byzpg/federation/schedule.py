"""The schedule of a run: which batch each iteration samples, and the addresses of all random numbers.

It belongs to the method, so the simulator, the members of a real federation and a Flower server share it: all of them
follow from θ_0, which every agent computes from the seed without a message.
"""

import hmac
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg.learning.policies import Policy
from byzpg.robust.components import Component, Vectors, check_count

# Addresses of random numbers. Under the key of a seed: INITIAL for θ_0, ATTACKERS for who attacks, and for the rest
# ITERATIONS, the iteration and a stream. Stream k < K is the play of agent k; the streams from K on are rounds.
INITIAL, ATTACKERS, ITERATIONS = range(3)


def stream_key(iterations_key: Array, iteration: Array | int, stream: Array | int) -> Array:
    """The key of one stream in one iteration, under the key of all iterations."""
    return jax.random.fold_in(jax.random.fold_in(iterations_key, iteration), stream)


def iteration_stream(key: Array, iteration: Array | int, stream: Array | int) -> Array:
    """As `stream_key`, under the key of a seed (or of one member)."""
    return stream_key(jax.random.fold_in(key, ITERATIONS), iteration, stream)


def play_stream(agent: int) -> int:
    """The stream of an agent's episodes; a server plays with agent 0's."""
    return agent


def round_stream(num_agents: int, round_number: int) -> int:
    """The stream of a round of messages: round 0 carries gradients, the rounds from 1 on carry parameters."""
    return num_agents + round_number


# The common coin

# The hashed bytes are part of the protocol: to change them, change TAG.
TAG = b"byzpg common coin 1"


@dataclass(frozen=True)
class CommonCoin:
    """A coin that every agent tosses for itself, on the host and without a message; all agents get the same result.

    It is a pseudorandom function of a label and an iteration, keyed by θ_0, which all agents share; Byzantine agents
    can compute it as well: uniform(label, i) = HMAC-SHA256(key, label, i) / 2²⁵⁶, to 53 bits.
    """

    key: bytes

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise ValueError(f"CommonCoin: key must be 32 bytes, got {len(self.key)}.")

    @classmethod
    def of(cls, parameters: Vectors) -> Self:
        """The coin of θ_0 [d]: key = SHA-256(TAG, d, θ_0), d as 8 bytes, θ_0 as float32, both little-endian."""
        values = np.asarray(parameters)
        if values.ndim != 1:
            raise ValueError(f"CommonCoin: parameters must have one axis [d], got shape {values.shape}.")
        return cls(sha256(TAG + _eight_bytes(len(values)) + values.astype("<f4").tobytes()).digest())

    def uniform(self, label: str, index: int) -> float:
        """A number in [0, 1) that depends on the key, the label and the index, and on nothing else."""
        # The index has a fixed length, so no two pairs make one message.
        digest = hmac.digest(self.key, label.encode() + _eight_bytes(index), "sha256")
        return (int.from_bytes(digest[:8], "big") >> 11) / 2**53

    def is_large(self, iteration: int, switch_probability: float) -> bool:
        """Whether an iteration samples the large batch: the first one always, any other with probability p."""
        # If p = 1 there is nothing to toss for, and a long run has very many iterations.
        return iteration == 0 or switch_probability == 1 or self.uniform("large batch", iteration) < switch_probability

    def output_iteration(self, num_iterations: int) -> int:
        """The iteration T̂ whose parameters are the result: uniform in 0 to num_iterations − 1."""
        check_count(self, num_iterations=num_iterations)
        return int(self.uniform("output", num_iterations) * num_iterations)


def _eight_bytes(number: int) -> bytes:
    return number.to_bytes(8, "little")


# Conventions


class Conventions(Component):
    """What implementations of the paper do differently: θ_0, the coin, and what the PAGE correction refers to."""

    @property
    @abstractmethod
    def shared(self) -> tuple[str, str]:
        """Names of the ways to draw θ_0 and to toss the coin: federations of one simulation have them in common."""

    @property
    @abstractmethod
    def uses_realized_direction(self) -> bool:
        """Whether v̂_t becomes (θ_{t+1} − θ_t)/η after an agreement, where the step is plain SGD."""

    @abstractmethod
    def initial_parameters(self, policy: Policy, key: Array) -> Array:
        """θ_0 [d]."""

    @abstractmethod
    def tosses(self, coin: CommonCoin, switch_probability: float) -> Iterator[bool]:
        """Whether each iteration samples the large batch."""

    @abstractmethod
    def remembered(self, *, before: Array, moved: Array, own: Array, aggregated: Array) -> tuple[Array, Array]:
        """θ_{t−1} and v̂_{t−1} for the next iteration.

        Args:
            before: θ_t, the parameters before the step.
            moved: θ̃_{t+1}, the parameters after the agent's own step.
            own: ṽ_t, the agent's own gradient estimate.
            aggregated: v_t, the aggregated gradient.
        """


@dataclass(frozen=True)
class Paper(Conventions):
    """The paper's: θ_0 by the seed, the common coin, and a correction that refers to θ_t and v_t."""

    @property
    def shared(self) -> tuple[str, str]:
        return "seed", "common"

    @property
    def uses_realized_direction(self) -> bool:
        return True

    def initial_parameters(self, policy: Policy, key: Array) -> Array:
        return policy.initial(key)

    def tosses(self, coin: CommonCoin, switch_probability: float) -> Iterator[bool]:
        return (coin.is_large(iteration, switch_probability) for iteration in count())

    def remembered(self, *, before: Array, moved: Array, own: Array, aggregated: Array) -> tuple[Array, Array]:
        return before, aggregated


# The plan


@dataclass(frozen=True)
class Schedule:
    """How long agents train, and how often they sample a large batch."""

    seed: int  # the first one, whose θ_0 keys the coin
    trajectories: int  # per agent
    switch_probability: float  # p
    large_batch: int  # N
    small_batch: int  # B
    conventions: Conventions

    def initial_parameters(self, policy: Policy) -> Array:
        """θ_0 [d] of the first seed."""
        key = jax.random.fold_in(jax.random.key(self.seed), INITIAL)
        return jnp.asarray(self.conventions.initial_parameters(policy, key))

    def plan(self, initial_parameters: Vectors) -> "Plan":
        """The batch of every iteration, which follows from the bits of θ_0 [d]."""
        coin = CommonCoin.of(initial_parameters)
        tosses = self.conventions.tosses(coin, self.switch_probability)
        large, total = [], [0]
        while total[-1] < self.trajectories:
            large.append(next(tosses))
            total.append(total[-1] + (self.large_batch if large[-1] else self.small_batch))
        return Plan(np.asarray(large), np.asarray(total[1:]), coin.output_iteration(len(large)))


@dataclass(frozen=True)
class Plan:
    """Which batch every iteration samples: known before the first one, as the coin is common."""

    large: np.ndarray  # [iteration]
    trajectories: np.ndarray  # [iteration], running total per agent
    output_iteration: int  # T̂

    @property
    def num_iterations(self) -> int:
        return len(self.large)
