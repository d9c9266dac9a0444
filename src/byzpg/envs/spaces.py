"""Action spaces: the sets from which actions are chosen; and which observations are supported."""

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
        """The number of numbers per action, and of draws that a uniform action takes."""
        return 1

    def numbers(self, actions: Array) -> tuple[Array, ...]:
        """Split actions [...] into one array per number."""
        return (actions,)

    def uniform(self, unit: Array) -> Array:
        """Turn uniform draws [..., 1] in [0, 1) into uniform actions [...]."""
        # The result is never num_actions: for every n, n times the largest float below 1 rounds to less than n.
        return jnp.floor(unit[..., 0] * self.num_actions).astype(jnp.int32)


@dataclass(frozen=True)
class Box:
    """Vectors of `size` numbers; number i is between low[i] and high[i], which may be infinite."""

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
        """Whether uniform actions exist: the length of every side is finite in float32."""
        return all(high - low <= LARGEST for low, high in zip(self.low, self.high, strict=True))

    def numbers(self, actions: Array) -> tuple[Array, ...]:
        """Split actions [..., size] into one array [...] per number."""
        return tuple(actions[..., i] for i in range(self.size))

    def uniform(self, unit: Array) -> Array:
        """Turn uniform draws [..., size] in [0, 1) into uniform actions [..., size]."""
        if not self.bounded:
            raise ValueError(f"uniform actions need a space with bounds, got {self}.")
        low, high = (jnp.asarray(limit, unit.dtype) for limit in (self.low, self.high))
        return low + unit * (high - low)


Space = Discrete | Box


def check_observations(name: str, shape: tuple[int, ...]) -> None:
    """Raise a ValueError if the observations of a task are not vectors, such as images."""
    if len(shape) > 1:
        raise ValueError(
            f"{name} has observations of shape {shape}, such as pixels, but byzpg only supports vectors: use a task "
            "with vectors, or one of your own that turns these observations into features."
        )
    if not shape or not shape[0]:
        raise ValueError(f"{name} has observations of shape {shape}, but byzpg only supports vectors of features.")
