"""The sets actions are taken from."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from byzpg.robust.components import check_count

LARGEST = float(jnp.finfo(jnp.float32).max)


@dataclass(frozen=True)
class Discrete:
    """The actions 0 to num_actions − 1, as int32 scalars."""

    num_actions: int

    def __post_init__(self) -> None:
        check_count(self, num_actions=self.num_actions)

    @property
    def size(self) -> int:
        """Numbers per action, and draws that a uniform action takes."""
        return 1

    def numbers(self, actions: Array) -> tuple[Array, ...]:
        """Actions [...] as one array per number."""
        return (actions,)

    def uniform(self, unit: Array) -> Array:
        """Uniform actions [...] from uniform draws [..., 1] in [0, 1)."""
        # Never num_actions itself: the largest draw below 1 times n rounds to below n, for every n.
        return jnp.floor(unit[..., 0] * self.num_actions).astype(jnp.int32)


@dataclass(frozen=True)
class Box:
    """Vectors of `size` numbers, number i between low[i] and high[i], which may be infinite."""

    size: int
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        check_count(self, size=self.size)
        ordered = all(low < high for low, high in zip(self.low, self.high, strict=False))
        if not ordered or not len(self.low) == len(self.high) == self.size:
            raise ValueError(f"Box: low and high must be {self.size} numbers each, low below high; got {self}.")

    @property
    def bounded(self) -> bool:
        """Whether there are uniform actions: in float32, every side has a length."""
        return all(high - low <= LARGEST for low, high in zip(self.low, self.high, strict=True))

    def numbers(self, actions: Array) -> tuple[Array, ...]:
        """Actions [..., size] as one array [...] per number."""
        return tuple(actions[..., i] for i in range(self.size))

    def uniform(self, unit: Array) -> Array:
        """Uniform actions [..., size] from uniform draws [..., size] in [0, 1)."""
        if not self.bounded:
            raise ValueError(f"there are no uniform actions without bounds; got {self}.")
        low, high = (jnp.asarray(limit, unit.dtype) for limit in (self.low, self.high))
        return low + unit * (high - low)


Space = Discrete | Box
