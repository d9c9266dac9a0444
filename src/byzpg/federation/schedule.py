"""The schedule of a run: which batch each iteration samples, and the addresses of all random numbers.

It belongs to the method, so the simulator, the members of a real federation and a Flower server share it: all of them
follow from θ_0, which every agent computes from the seed without a message.
"""

import hmac
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import count
from typing import Self

import jax
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


def exchange_key(key: Array, exchange: Array | int, num_exchanges: int) -> Array:
    """The key of one of several exchanges of gradients, under the key of their round."""
    return key if num_exchanges == 1 else jax.random.fold_in(jax.random.fold_in(key, 2), exchange)


def block_key(key: Array, block: int) -> Array:
    """The key of one block of a message, under the key of its exchange."""
    return jax.random.fold_in(jax.random.fold_in(key, 3), block) if block else key


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

    seed: int  # the first one
    length: int  # per agent, in trajectories or, for agents with a critic, in steps
    switch_probability: float  # p
    large_batch: int  # N, or the steps of an iteration
    small_batch: int  # B
    conventions: Conventions
    shared_coin: bool  # whether all seeds toss the first one's coin

    @property
    def initial_key(self) -> Array:
        """The key from which θ_0 of the first seed is drawn."""
        return jax.random.fold_in(jax.random.key(self.seed), INITIAL)

    @property
    def expected_iterations(self) -> float:
        """The number of iterations that a run has on average over coins."""
        mean = self.switch_probability * self.large_batch + (1 - self.switch_probability) * self.small_batch
        return self.length / mean

    def plan(self, initial_parameters: Vectors) -> "Plan":
        """The batch of every iteration, which follows from the bits of θ_0 [d]."""
        coin = CommonCoin.of(initial_parameters)
        tosses = self.conventions.tosses(coin, self.switch_probability)
        large, total = [], [0]
        while total[-1] < self.length:
            large.append(next(tosses))
            total.append(total[-1] + (self.large_batch if large[-1] else self.small_batch))
        return Plan(np.asarray(large), np.asarray(total[1:]), coin.output_iteration(len(large)))

    def timetable(self, initial_parameters: Vectors, extension: "Extension | None" = None) -> "Timetable":
        """When every seed carries out the iterations of its plan, which follows from its θ_0 [seed, d]."""
        first, *others = initial_parameters
        plan = self.plan(first)
        if self.shared_coin:
            plans = [plan] * len(initial_parameters)
        elif self.switch_probability == 1:  # the coin decides T̂ alone, and a long run has very many iterations
            outputs = (CommonCoin.of(each).output_iteration(plan.num_iterations) for each in others)
            plans = [plan, *(replace(plan, output_iteration=output) for output in outputs)]
        else:
            plans = [plan, *map(self.plan, others)]
        return Timetable.of(plans, self) if extension is None else Timetable.extended(plans, self, extension)


@dataclass(frozen=True)
class Plan:
    """Which batch every iteration samples: known before the first one, as the coin is common."""

    large: np.ndarray  # [iteration]
    progress: np.ndarray  # [iteration], running total per agent, in trajectories or steps
    output_iteration: int  # T̂

    @property
    def num_iterations(self) -> int:
        return len(self.large)


@dataclass(frozen=True, eq=False)
class Extension:
    """Where a finished run was extended to a new length."""

    begin: np.ndarray  # [seed], the iterations that were done
    output_iteration: np.ndarray  # [seed], T̂ of the finished run

    def output_of(self, seed: int, plan: "Plan") -> int:
        """T̂ of the extended run, which is uniform too: the new plan's, or if that is over, the finished run's."""
        new = plan.output_iteration
        return new if new >= self.begin[seed] else int(self.output_iteration[seed])


@dataclass(frozen=True)
class Timetable:
    """When each of many seeds carries out the iterations of its own plan.

    Seeds are independent, so they need not be at the same iteration. All seeds compute the batch of an entry, large or
    small; those whose next batch is of the other size wait, and drop what they computed.
    """

    plans: tuple[Plan, ...]  # of each seed
    large: np.ndarray  # [entry]
    takes_part: np.ndarray  # [seed, entry]

    @classmethod
    def of(cls, plans: Sequence[Plan], schedule: Schedule) -> Self:
        """The cheapest timetable that waits for some number of seeds before it enters a large batch for them."""
        first, *others = plans
        if all(np.array_equal(first.large, each.large) for each in others):
            return cls(tuple(plans), first.large, np.ones((len(plans), first.num_iterations), bool))
        entries = (_entries(plans, share / len(plans)) for share in range(1, len(plans) + 1))
        found = [cls(tuple(plans), *each) for each in entries]
        return min(found, key=lambda each: each.trajectories_computed(schedule))

    @classmethod
    def extended(cls, plans: Sequence[Plan], schedule: Schedule, extension: Extension) -> Self:
        """First an entry for every iteration that is done, then the timetable of the others."""
        plans = [replace(plan, output_iteration=extension.output_of(seed, plan)) for seed, plan in enumerate(plans)]
        begin = extension.begin
        rests = [replace(plan, large=plan.large[done:]) for plan, done in zip(plans, begin, strict=True)]
        rest, over = cls.of(rests, schedule), np.arange(np.max(begin)) < begin[:, None]
        # The size of the batches that are over does not matter any more.
        large = np.concatenate([np.ones(over.shape[1], bool), rest.large])
        return cls(tuple(plans), large, np.concatenate([over, rest.takes_part], axis=1))

    def trajectories_computed(self, schedule: Schedule) -> int:
        """The trajectories that each agent of each seed samples, those it drops included."""
        num_large = int(np.sum(self.large))
        return num_large * schedule.large_batch + (self.num_entries - num_large) * schedule.small_batch

    @property
    def num_entries(self) -> int:
        return len(self.large)

    @property
    def in_step(self) -> bool:
        """Whether no seed ever waits, so that entries are iterations."""
        return bool(np.all(self.takes_part))

    @property
    def only_large(self) -> bool:
        """Whether there are no small batches."""
        return bool(np.all(self.large))

    @property
    def output_iterations(self) -> np.ndarray:
        """T̂ [seed]."""
        return np.asarray([plan.output_iteration for plan in self.plans])

    def iterations(self, num_entries: int) -> np.ndarray:
        """The iterations [seed] that are done after so many entries."""
        return np.sum(self.takes_part[:, :num_entries], axis=1)

    def by_iteration(self, values: np.ndarray) -> np.ndarray:
        """Values [seed, entry] as [seed, iteration]; NaN after the last iteration of a seed."""
        took_part = self.takes_part[:, : values.shape[1]]
        order = np.argsort(~took_part, axis=1, kind="stable")[:, : np.max(np.sum(took_part, axis=1))]
        return np.take_along_axis(np.where(took_part, values, np.nan), order, axis=1)


def _entries(plans: Sequence[Plan], share: float) -> tuple[np.ndarray, np.ndarray]:
    """The batch of every entry, large once this share of the unfinished seeds waits for one, and who takes part."""
    lengths = np.asarray([plan.num_iterations for plan in plans])
    tosses = np.zeros((len(plans), max(lengths) + 1), bool)
    for row, plan in zip(tosses, plans, strict=True):
        row[: plan.num_iterations] = plan.large
    seeds, done = np.arange(len(plans)), np.zeros(len(plans), int)
    large, takes_part = [], []
    while np.any(unfinished := done < lengths):
        waits_for_large = tosses[seeds, done] & unfinished
        large.append(bool(np.sum(waits_for_large) >= share * np.sum(unfinished)))
        takes_part.append(waits_for_large if large[-1] else unfinished & ~waits_for_large)
        done += takes_part[-1]
    return np.asarray(large), np.stack(takes_part, axis=1)
