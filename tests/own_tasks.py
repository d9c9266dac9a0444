"""Tasks in JAX as users may write them, for tests: correct ones and broken ones."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from byzpg.envs import Box, Discrete, JaxTask

STEP = 0.25


@dataclass(frozen=True)
class Walk(JaxTask):
    """A walk in the plane that starts at random, goes where actions say, is paid its place, and ends on the left."""

    width: float = 1.0

    observation_size = 3
    action_space = Discrete(3)  # left, stay, right
    horizon = 12

    def begin(self, key: Array) -> tuple[Any, Array]:
        place = jax.random.uniform(key, (2,), minval=-self.width, maxval=self.width)
        state = {"place": place, "time": 0, "empty": jnp.zeros((0, 2))}
        return state, self._seen(state)

    def advance(self, state: Any, action: Array, key: Array) -> tuple[Any, Array, Array, Array]:
        place = state["place"] + jnp.stack([STEP * (action - 1), jnp.zeros(())])
        state = state | {"place": place, "time": state["time"] + 1}
        return state, self._seen(state), place[0], place[0] < -1

    def _seen(self, state: Any) -> Array:
        return jnp.append(state["place"], state["time"])


def walk() -> Walk:
    return Walk(0.5)


@dataclass(frozen=True)
class Wind(Walk):
    """A walk whose step is the action's number, clipped, and the wind's, drawn with the key of the step."""

    action_space = Box(1, (-1.0,), (1.0,))

    def advance(self, state: Any, action: Array, key: Array) -> tuple[Any, Array, Array, Array]:
        place = state["place"] + jnp.append(action, jax.random.uniform(key))
        state = state | {"place": place, "time": state["time"] + 1}
        return state, self._seen(state), action[0], False  # pyright: ignore[reportReturnType]


class Undecorated(JaxTask):
    observation_size = 3
    action_space = Discrete(3)
    horizon = 12


@dataclass(frozen=True)
class WithoutHorizon(JaxTask):
    observation_size = 3
    action_space = Discrete(3)


@dataclass(frozen=True)
class WrongSize(Walk):
    observation_size = 2


@dataclass(frozen=True)
class Pixels(Walk):
    def begin(self, key: Array) -> tuple[Any, Array]:
        return (), jnp.zeros((8, 8, 3))


@dataclass(frozen=True)
class Untraceable(Walk):
    def advance(self, state: Any, action: Array, key: Array) -> tuple[Any, Array, Array, Array]:
        return super().advance(state, 1 if action > 0 else action, key)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Forgetful(Walk):
    def advance(self, state: Any, action: Array, key: Array) -> tuple[Any, Array, Array, Array]:
        state, seen, reward, ended = super().advance(state, action, key)
        return state["place"], seen, reward, ended


@dataclass(frozen=True)
class ManyRewards(Walk):
    def advance(self, state: Any, action: Array, key: Array) -> tuple[Any, Array, Array, Array]:
        state, seen, _, ended = super().advance(state, action, key)
        return state, seen, state["place"], ended


@dataclass(frozen=True)
class WithKey(Walk):
    def begin(self, key: Array) -> tuple[Any, Array]:
        return key, jnp.zeros(3)


@dataclass(frozen=True)
class WholeNumbers(Walk):
    """Observations are whole numbers at first, as zeros often are."""

    def begin(self, key: Array) -> tuple[Any, Array]:
        return super().begin(key)[0], jnp.zeros(3, int)


@dataclass(frozen=True)
class Rounding(Walk):
    def begin(self, key: Array) -> tuple[Any, Array]:
        state, seen = super().begin(key)
        return state | {"place": jnp.zeros(2, int)}, seen


@dataclass(frozen=True)
class Unhashable(Walk):
    width: Any = None


def unhashable() -> Unhashable:
    return Unhashable([1.0])


@dataclass(frozen=True)
class OnlyState(Walk):
    def begin(self, key: Array) -> Any:
        return super().begin(key)[0]


@dataclass(frozen=True)
class Listing(Walk):
    def advance(self, state: Any, action: Array, key: Array) -> Any:
        state, seen, *others = super().advance(state, action, key)
        return state, list(seen), *others


@jax.tree_util.register_pytree_node_class
class Place:
    """A state without an equality of its own."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.values,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Place":
        return cls(*children)


@dataclass(frozen=True)
class WithPlace(Walk):
    def begin(self, key: Array) -> tuple[Any, Array]:
        state, seen = super().begin(key)
        return Place(state), seen

    def advance(self, state: Any, action: Array, key: Array) -> tuple[Any, Array, Array, Array]:
        state, seen, reward, ended = super().advance(state.values, action, key)
        return Place(state), seen, reward, ended
