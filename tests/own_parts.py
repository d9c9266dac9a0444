"""Parts of a user's own, which tests name as own_parts:NAME."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg.learning.gradients import GPOMDP
from byzpg.robust import ByzantineSet, Knowledge, MessageAttack, WeightedAggregator, aggregator, attack
from byzpg.robust.agreement import MDA
from byzpg.robust.geometry import Cloud


@dataclass(frozen=True)
class Average(WeightedAggregator):
    """The mean of the rows."""

    size: int = 1

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return cloud.mean_of(cloud.usable)


@dataclass(frozen=True)
class Boost(MessageAttack):
    """A multiple of the truth."""

    factor: float = 3.0

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        return self.factor * knowledge.truth()


@dataclass(frozen=True)
class Agreed(MDA):
    """MDA under another name."""


@dataclass(frozen=True)
class FirstOnes(ByzantineSet):
    """The first agents attack."""

    def __call__(self, num_agents: int, num_attackers: int, iteration: Array | int, key: Array) -> Array:
        return jnp.arange(num_attackers)


@dataclass(frozen=True)
class Returns(GPOMDP):
    """GPOMDP under another name."""


@dataclass(frozen=True)
class Wide(WeightedAggregator):
    """Forgets the origin's coefficient."""

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return cloud.mean_of(cloud.usable)[:-1]


@dataclass(frozen=True)
class Short(MessageAttack):
    """Leaves out the axis of attackers."""

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        return knowledge.mean()


class NoSet:
    """No component."""


# Rules and attacks as functions


@aggregator
def trimmed(received, num_byzantine, extra: int = 0):
    """The trimmed mean."""
    cut = num_byzantine + extra
    return jnp.mean(jnp.sort(received, axis=0)[cut : len(received) - cut], axis=0)


@aggregator
def masked(received, num_byzantine, present):
    return jnp.sum(jnp.where(present[:, None], received, 0), axis=0) / jnp.sum(present)


@aggregator
def second(received, num_byzantine):
    return received[1]


@aggregator(max_byzantine=lambda num_agents: num_agents // 4)
def shaken(received, num_byzantine, key):
    return received[0] + jnp.asarray(key is not None, received.dtype)


@attack
def reversed_mean(honest, scale: float = 1.0):
    return -scale * jnp.mean(honest, axis=0)


@attack
def own_reversed(honest, own):
    return -own


@aggregator
def wrong_shape(received, num_byzantine):
    return jnp.mean(received)


@aggregator
def wrong_type(received, num_byzantine):
    return jnp.argmax(received, axis=0)


@aggregator
def not_a_number(received, num_byzantine):
    return jnp.log(-jnp.abs(received[0]))


@aggregator
def undefined_with_few(received, num_byzantine):
    return received[0] / (len(received) - 4)


@aggregator
def branches(received, num_byzantine):
    return received[0] if received[0, 0] > 0 else received[1]


@aggregator
def in_numpy(received, num_byzantine) -> Any:
    return np.median(received, axis=0)


@aggregator
def failing(received, num_byzantine):
    return received @ received


@aggregator
def nothing(received, num_byzantine) -> Any:
    return None


@attack
def wrong_message(honest):
    return honest[0, :2]


def undecorated(received, num_byzantine):
    return received[0]
