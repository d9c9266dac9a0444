"""Tasks in JAX that are written for one episode: your own, and those of gymnax, Brax and MuJoCo's MJX.

They run inside the compiled program, as the built-in tasks do. gymnax and Brax are optional and imported on first use:
`gymnax:ID` is a task of gymnax, `brax:NAME` one of Brax with its own physics, and `mjx:NAME` the same with MJX's.
"""

import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from io import StringIO
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg._install import install
from byzpg.envs.spaces import Box, Discrete, Space, check_observations
from byzpg.robust.components import Component, address, nearest

# Libraries by the first part of a task's name: the module, what it is called, and the extra that installs it.
LIBRARIES = {
    "gymnax": ("gymnax", "gymnax", "gymnax"),
    "brax": ("brax.envs", "Brax", "brax"),
    "mjx": ("brax.envs", "Brax", "brax"),
}
BRAX_HORIZON = 1000  # the episode_length of brax.envs.create
RETURNED = {
    "begin": ("the state", "the observation"),
    "advance": ("the state", "the observation", "the reward", "whether the episode ended"),
}


class _Ongoing(NamedTuple):
    """One episode, as the rest of byzpg sees it."""

    state: tuple[Array, ...]  # the arrays of the task's state, without empty ones
    observation: Array  # [feature], float32


class JaxTask(Component):
    """A task in JAX, written for one episode. Derive from it to write your own, as a frozen dataclass.

    A subclass sets `observation_size`, `action_space` and `horizon`, and implements `begin` and `advance`. byzpg runs
    many episodes side by side (`vmap`), cuts episodes off at `horizon`, and clips the actions of Gaussian policies to
    the bounds of the `Box`.

    Attributes:
        observation_size: The number of features of an observation.
        action_space: `Discrete(n)`, whose actions are int32 scalars, or a `Box`, whose actions are vectors.
        horizon: The number of steps after which an episode is cut off.
        reward_threshold: The mean return at which the task counts as solved, if it has one.
    """

    observation_size: int
    action_space: Space
    horizon: int
    reward_threshold: float | None = None
    # One GPU kernel for a whole rollout is for elementwise steps, see `Environment`.
    has_loops = True
    noise_size = 2  # enough bits for the key of a step

    @property
    def name(self) -> str:
        return text_of(self)

    @abstractmethod
    def begin(self, key: Array) -> tuple[Any, Array]:
        """Draw the first state of an episode: any pytree of arrays of numbers, and the observation [feature]."""

    @abstractmethod
    def advance(self, state: Any, action: Array, key: Array) -> tuple[Any, Array, Array, Array | bool]:
        """Take a step.

        Args:
            state: The current state.
            action: A scalar of `Discrete`, or a vector of a `Box` within its bounds.
            key: A random key for this step.

        Returns:
            The next state, in the shapes and types of the current one; the observation [feature]; the reward; and
            whether the task itself ended the episode. Reaching the horizon is not such an end: agents with a critic
            then add the value of what would have followed.
        """

    def reset(self, key: Array) -> _Ongoing:
        state, observation = self.begin(key)
        return _Ongoing(jax.tree.map(_strict, _packed(state)), jnp.asarray(observation, jnp.float32))

    def observe(self, state: _Ongoing) -> tuple[Array, ...]:
        return tuple(state.observation[..., i] for i in range(self.observation_size))

    def step(
        self, state: _Ongoing, action: tuple[Array, ...], noise: tuple[Array, ...]
    ) -> tuple[_Ongoing, Array, Array]:
        space = self.action_space

        def step_one(before: _Ongoing, action: tuple[Array, ...], noise: tuple[Array, ...]) -> Any:
            taken = action[0]
            if isinstance(space, Box):
                taken = jnp.clip(jnp.stack(action), jnp.asarray(space.low), jnp.asarray(space.high))
            state, observation, reward, terminated = self.advance(_unpacked(self, before.state), taken, _key_of(noise))
            after = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), _packed(state), before.state)
            after = _Ongoing(after, jnp.asarray(observation, jnp.float32))
            return after, jnp.asarray(reward, jnp.float32), jnp.asarray(terminated, bool)

        for _ in noise[0].shape:
            step_one = jax.vmap(step_one)
        return step_one(state, action, noise)

    def checked(self) -> "JaxTask":
        """The same task, if its functions return what they should; they are traced, not run.

        Raises:
            ValueError: If not; the message names the task and what is wrong.
        """
        if not is_dataclass(self):
            raise ValueError(f"{type(self).__name__} must be a dataclass: write @dataclass(frozen=True) above it.")
        name = self.name
        try:
            hash(self)
        except TypeError as error:
            raise ValueError(
                f"{name} must be @dataclass(frozen=True), with options that are numbers, texts or tuples ({error})."
            ) from None
        for option, kind in {"observation_size": int, "action_space": Space, "horizon": int}.items():
            if not isinstance(getattr(self, option, None), kind):
                raise ValueError(f"{name}: {option} must be set, as byzpg.envs.JaxTask says.")
        space = self.action_space
        action = jnp.zeros((), jnp.int32) if isinstance(space, Discrete) else jnp.zeros(space.size)
        first, seen = self._traced("begin", jax.random.key(0))
        check_observations(name, seen.shape)
        if seen.shape != (self.observation_size,):
            raise ValueError(
                f"{name}: begin gives observations of shape {seen.shape}, but observation_size is "
                f"{self.observation_size}."
            )
        for leaf in jax.tree.leaves(first):
            if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
                raise ValueError(
                    f"{name}: a state must consist of arrays of numbers, got {leaf.dtype}: use the key that each step "
                    "is given instead of one in the state."
                )
        after, *others = self._traced("advance", first, action, jax.random.key(0))
        shapes = [each.shape for each in others]
        if shapes != [seen.shape, (), ()]:
            raise ValueError(
                f"{name}: advance must return the state, an observation of shape {seen.shape}, the reward and whether "
                f"the episode ended, both of shape (); after the state come {', '.join(map(str, shapes)) or 'none'}."
            )
        (leaves, before), (others, now) = jax.tree.flatten(first), jax.tree.flatten(after)
        if before != now or [leaf.shape for leaf in leaves] != [leaf.shape for leaf in others]:
            before, now = (jax.tree.map(lambda leaf: leaf.shape, each) for each in (first, after))
            raise ValueError(f"{name}: advance must return a state like that of begin: {before}; got {now}.")
        for old, new in zip(leaves, others, strict=True):
            # Otherwise, numbers would be rounded without a word.
            if jnp.promote_types(old.dtype, new.dtype) != old.dtype:
                raise ValueError(
                    f"{name}: begin gives a state with an array of {old.dtype} where that of advance is {new.dtype}: "
                    f"let begin give {new.dtype}."
                )
        return self

    def _traced(self, function: str, *arguments: Any) -> Any:
        try:
            found = jax.eval_shape(getattr(self, function), *arguments)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(f"{self.name}: {function} cannot be traced by JAX ({reason})") from error
        expected = RETURNED[function]
        is_right = isinstance(found, tuple) and len(found) == len(expected)
        if not is_right or not all(isinstance(each, jax.ShapeDtypeStruct) for each in found[1:]):
            raise ValueError(
                f"{self.name}: {function} must return {', '.join(expected)}, and all but the state must be arrays."
            )
        return found


def text_of(task: Component) -> str:
    """The text module:Name(option=value) that makes a task, with the options that are not at their defaults."""
    options = [
        f"{option.name}={value!r}"
        for option in fields(task)  # pyright: ignore[reportArgumentType]
        if (value := getattr(task, option.name)) != option.default
    ]
    return address(type(task)) + (f"({', '.join(options)})" if options else "")


@cache
def _layout(task: JaxTask) -> tuple[Any, list[Any]]:
    """The structure of a task's state, and the shapes and types of its arrays."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(task.begin, jax.random.key(0))[0])
    return structure, leaves


def _packed(state: Any) -> tuple[Any, ...]:
    return tuple(leaf for leaf in jax.tree.leaves(state) if np.size(leaf))


def _unpacked(task: JaxTask, kept: tuple[Array, ...]) -> Any:
    structure, leaves = _layout(task)
    found = iter(kept)
    return jax.tree.unflatten(
        structure, [next(found) if leaf.size else jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    )


def _strict(leaf: Any) -> Array:
    """The leaf as an array whose type later operations keep."""
    return jnp.asarray(leaf, jnp.result_type(leaf))


def _key_of(noise: tuple[Array, ...]) -> Array:
    """A random key from two uniform draws in [0, 1), which have 23 random bits each."""
    first, second = (jnp.asarray(each * 2**23, jnp.uint32) for each in noise)
    return jax.random.fold_in(jax.random.key(first), second)


@cache
def describe(name: str) -> JaxTask:
    """Make a task of gymnax or Brax.

    Args:
        name: `gymnax:ID`, `brax:NAME` or `mjx:NAME`.

    Raises:
        ValueError: There is no such task, it does not work with byzpg, or the library is missing.
    """
    return (_gymnax_task(name) if name.startswith("gymnax:") else _brax_task(name)).checked()


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore that Brax is no longer developed further, and what MJX prints about packages that it can do without."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        yield


@cache
def _environment(name: str) -> Any:
    """The environment of a library, made once."""
    kind, _, task = name.partition(":")
    module, title, extra = LIBRARIES[kind]
    try:
        with _quiet():
            library = import_module(module)
    except ImportError as error:
        raise ValueError(f"this task needs {title}: {install(extra)} ({error}).") from None
    known = library.registered_envs if kind == "gymnax" else library._envs
    if task not in known:
        raise ValueError(f"{title} has no task {task!r}.{nearest(task, known)}")
    try:
        if kind == "gymnax":
            return library.make(task)[0]
        with _quiet():
            return library.get_environment(task, **({"backend": "mjx"} if kind == "mjx" else {}))
    except Exception as error:
        raise ValueError(f"{name} cannot be made ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class LibraryTask(JaxTask):
    """A task of a library; what it is like is computed before any program is traced."""

    address: str
    observation_size: int
    action_space: Space
    horizon: int

    @property
    def name(self) -> str:
        return self.address


class _Gymnax(LibraryTask):
    """A task of gymnax, with its default parameters."""

    def begin(self, key: Array) -> tuple[Any, Array]:
        env = _environment(self.address)
        observation, state = env.reset_env(jax.random.key_data(key), env.default_params)
        return state, observation

    def advance(self, state: Any, action: Array, key: Array) -> tuple[Any, Array, Array, Array]:
        env = _environment(self.address)
        # Not `step`, which starts new episodes. Its truncation is at our horizon.
        following = env.step_env(jax.random.key_data(key), state, action, env.default_params)
        observation, state, reward, terminated, _ = following
        return state, observation, jnp.reshape(reward, ()), jnp.reshape(terminated, ())


def _gymnax_task(name: str) -> _Gymnax:
    env = _environment(name)
    if not hasattr(env, "is_truncated"):
        raise ValueError("byzpg needs gymnax 1.0 or later, which tells termination from truncation.")
    actions = env.action_space(env.default_params)
    if hasattr(actions, "n"):
        space = Discrete(int(actions.n))
    else:
        if len(actions.shape) > 1:
            raise ValueError(f"{name} has actions of shape {actions.shape}, but byzpg only supports vectors.")
        size = actions.shape[0] if actions.shape else 1
        low, high = (np.broadcast_to(np.asarray(each, float), size) for each in (actions.low, actions.high))
        space = Box(size, tuple(low.tolist()), tuple(high.tolist()))
    shape = env.observation_space(env.default_params).shape
    check_observations(name, shape)
    return _Gymnax(name, shape[0], space, int(env.default_params.max_steps_in_episode))


class _Brax(LibraryTask):
    """A task of Brax, with its own physics or MJX's."""

    def begin(self, key: Array) -> tuple[Any, Array]:
        with _quiet():
            state = _environment(self.address).reset(jax.random.key_data(key))
        return state, state.obs

    def advance(self, state: Any, action: Array, key: Array) -> tuple[Any, Array, Array, Array]:
        # Brax's wrappers would reset episodes and cut them off; without them, `done` is termination.
        with _quiet():
            state = _environment(self.address).step(state, action)
        return state, state.obs, state.reward, state.done > 0


def _brax_task(name: str) -> _Brax:
    env = _environment(name)
    # Not env.observation_size, which plays a reset operation by operation and takes a minute.
    with _quiet():
        seen = jax.eval_shape(env.reset, jax.random.key_data(jax.random.key(0))).obs
    if not hasattr(seen, "shape"):
        raise ValueError(f"{name} has several kinds of observations, {', '.join(seen)}; byzpg only supports vectors.")
    check_observations(name, seen.shape)
    # Brax scales actions in [−1, 1] to the range of each actuator.
    space = Box(env.action_size, env.action_size * (-1.0,), env.action_size * (1.0,))
    return _Brax(name, seen.shape[0], space, BRAX_HORIZON)
