"""Tasks outside JAX, stepped on the host: any task of Gymnasium or EnvPool, and tasks that users write.

The name of a task says where it comes from: `gymnasium:ID`, `envpool:ID`, or `module:factory`, where the factory is a
function or a class whose call returns a `gymnasium.Env`. Gymnasium and EnvPool are optional and imported on first use.
"""

import atexit
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from math import inf
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from byzpg import _parts
from byzpg._install import install
from byzpg.envs.jax_tasks import LIBRARIES
from byzpg.envs.spaces import Box, Discrete, Space, check_observations
from byzpg.robust.components import Component, nearest

EXTRAS = {"gymnasium": "Gymnasium", "envpool": "EnvPool"}
NO_LIMIT = 2**31 - 1  # the limit that EnvPool gives to tasks without one


class Outcome(NamedTuple):
    """The outcome of one step in each of n environments."""

    observations: np.ndarray  # [n, feature]
    rewards: np.ndarray  # [n]
    terminated: np.ndarray  # [n], the task itself ended the episode
    truncated: np.ndarray  # [n], a limit, such as one of time, cut the episode off


class Stage(Protocol):
    """Environments that play episodes in step, one each at a time."""

    def reset(self, seeds: np.ndarray) -> np.ndarray:
        """Start episodes with these seeds, each below 2³¹; returns the first observations [episode, feature]."""
        ...

    def restart(self, episodes: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Start new episodes in place of the given ones, in ascending order; returns their first observations.

        EnvPool goes on with the random numbers of its environments, whatever the seeds are.
        """
        ...

    def step(self, episodes: np.ndarray, actions: np.ndarray) -> Outcome:
        """Step only the given episodes, in ascending order. Continuous actions are clipped to the task's bounds."""
        ...

    def picture(self) -> np.ndarray | None:
        """An image of the first episode, or None if the task cannot be rendered."""
        ...


@dataclass(frozen=True)
class HostTask(Component):
    """A task on the host: what all its environments have in common.

    Attributes:
        name: As in `describe`.
        observation_size: The number of features of an observation.
        action_space: The set of actions.
        horizon: The largest number of steps of an episode; None if the task sets no limit.
        reward_threshold: The mean return at which the task counts as solved, if it has one.
    """

    name: str
    observation_size: int
    action_space: Space
    horizon: int | None
    reward_threshold: float | None

    def checked(self, kind: str, values: np.ndarray) -> np.ndarray:
        """The same values if all are finite: a single NaN would spoil every gradient after it."""
        if not np.all(np.isfinite(values)):
            raise ValueError(
                f"{self.name} gave the {kind} {values[~np.isfinite(values)][0]}: every number must be finite. "
                "Fix the task, or wrap it so that such numbers are replaced."
            )
        return values

    @contextmanager
    def stage(self, num_episodes: int, drawn: bool = False) -> Iterator[Stage]:
        """Provide environments for a number of episodes.

        Environments of Gymnasium are kept for the next use, unless they are `drawn`.

        Args:
            num_episodes: The number of environments.
            drawn: Whether they can render images, if the task supports it.
        """
        if self.name.startswith("envpool:"):
            yield _Pool(self)
            return
        idle = [] if drawn else _idle.setdefault(self, [])
        environments, idle[:num_episodes] = idle[:num_episodes], []
        made = {id(each.unwrapped) for each in environments}
        try:
            while len(environments) < num_episodes:
                another = _environment(self.name, drawn)
                if id(another.unwrapped) in made:
                    raise ValueError(
                        f"{self.name} must make a new environment each time; it returned the same one again."
                    )
                environments.append(another)
                made.add(id(another.unwrapped))
                _check_alike(self, another)
            yield _Environments(self, environments)
        except BaseException:
            _close(environments)
            raise
        if drawn:
            _close(environments)
        else:
            idle[:0] = environments


# Environments of Gymnasium that are not in use.
_idle: dict[HostTask, list[Any]] = {}


def _close(environments: list[Any]) -> None:
    for environment in environments:
        environment.close()


atexit.register(lambda: [_close(environments) for environments in _idle.values()])


@cache
def describe(name: str) -> Any:
    """Look up a task.

    Args:
        name: `gymnasium:ID`, `envpool:ID`, `module:factory` or `module:factory(option=value)`.

    Returns:
        The task on the host or, if the factory makes no `gymnasium.Env`, whatever it makes.

    Raises:
        ValueError: There is no such task, or it does not work with byzpg.
    """
    kind, _, rest = name.partition(":")
    if kind == "envpool":
        return _pool_description(name, rest)
    made = _environment(name) if kind == "gymnasium" else _from_factory(name)
    if not is_environment(made):
        return made
    try:
        return _description(name, made)
    finally:
        made.close()


def is_environment(made: object) -> bool:
    """Whether something is an environment of Gymnasium, which may not even be installed."""
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and isinstance(made, gymnasium.Env)


def available() -> dict[str, str]:
    """Describe the kinds of tasks by the form of their names, and how to install those that are missing."""

    def missing(extra: str) -> str:
        return "" if find_spec(extra) else f"; not installed: {install(extra)}"

    return {
        "gymnasium:ID": f"Any task of Gymnasium whose observations are vectors{missing('gymnasium')}",
        "envpool:ID": f"Any task of EnvPool whose observations are vectors{missing('envpool')}",
        "gymnax:ID": f"Any task of gymnax whose observations are vectors, in JAX{missing('gymnax')}",
        "brax:NAME, mjx:NAME": f"Any task of Brax, in JAX, with its own physics or MJX's{missing('brax')}",
        "module:Name": "Your own task: a class or function that makes a gymnasium.Env or a byzpg.envs.JaxTask",
    }


def imported_module(name: str) -> str | None:
    """The module that is imported to make a task, unless it is a library's own.

    Gymnasium imports the module of `gymnasium:module:ID`, too.
    """
    module, colon, _ = name.removeprefix("gymnasium:").partition(":")
    return module if colon and module not in ("envpool", *LIBRARIES) else None


def in_gymnasium(name: str) -> bool:
    """Whether Gymnasium is installed and has a task of this id."""
    return find_spec("gymnasium") is not None and name in _extra("gymnasium").registry


def _extra(module: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError:
        raise ValueError(f"this task needs {EXTRAS[module]}: {install(module)}.") from None


def _described(
    name: str, observations: Any, actions: Any, horizon: int | None, reward_threshold: float | None
) -> HostTask:
    """The task with these spaces of Gymnasium, if byzpg supports them."""
    spaces = _extra("gymnasium").spaces
    if not isinstance(observations, spaces.Box):
        raise ValueError(
            f"{name} has observations {observations}, but byzpg only supports vectors: Box of shape (n,). A factory of "
            "your own can wrap the task in gymnasium.wrappers.FlattenObservation."
        )
    check_observations(name, observations.shape)
    if isinstance(actions, spaces.Discrete):
        space = Discrete(int(actions.n))
    elif isinstance(actions, spaces.Box) and len(actions.shape) == 1 and np.issubdtype(actions.dtype, np.floating):
        space = _box(actions)
    else:
        raise ValueError(
            f"{name} has actions {actions}, but byzpg only supports Discrete actions and vectors: Box of shape (n,)."
        )
    threshold = None if reward_threshold is None else float(reward_threshold)
    return HostTask(name, observations.shape[0], space, horizon, threshold)


def _box(actions: Any) -> Box:
    """Convert a Box of Gymnasium to ours.

    The largest number of a type stands for no bound. EnvPool also uses the smallest positive number for that.
    """
    kind = np.finfo(actions.dtype)
    low = tuple(-inf if each in (kind.tiny, kind.min) else float(each) for each in actions.low)
    high = tuple(inf if each == kind.max else float(each) for each in actions.high)
    return Box(len(low), low, high)


def _description(name: str, environment: Any) -> HostTask:
    """The task of an environment of Gymnasium."""
    spec, time_limit = environment.spec, "_max_episode_steps"
    limit = None if spec is None else spec.max_episode_steps
    if limit is None and environment.has_wrapper_attr(
        time_limit
    ):  # the limit of a TimeLimit wrapper around a task without a spec
        limit = environment.get_wrapper_attr(time_limit)
    threshold = None if spec is None else spec.reward_threshold
    return _described(name, environment.observation_space, environment.action_space, limit, threshold)


def _check_alike(task: HostTask, environment: Any) -> None:
    """Raise an error if another environment of a task differs from the first one."""
    found = _description(task.name, environment)
    if replace(found, horizon=task.horizon) != task:
        raise ValueError(
            f"{task.name} makes environments that differ: the first one has {task.observation_size} observations and "
            f"actions {task.action_space}, another one has {found.observation_size} and {found.action_space}."
        )


# Gymnasium, and tasks with its interface


def _environment(name: str, drawn: bool = False) -> Any:
    """Make an environment; with `drawn`, one that renders images, if the task supports it."""
    kind, _, rest = name.partition(":")
    if kind != "gymnasium":
        return _from_factory(name)
    gymnasium = _extra("gymnasium")
    _load_module(name)
    make = partial(gymnasium.make, rest, disable_env_checker=True)
    try:
        environment = make()
        if drawn and "rgb_array" in environment.metadata.get("render_modes", ()):
            environment.close()
            environment = make(render_mode="rgb_array")
        return environment
    except gymnasium.error.UnregisteredEnv:
        raise ValueError(f"Gymnasium has no task {rest!r}.{nearest(rest, gymnasium.registry)}") from None
    except Exception as error:
        _raise(f"{name} cannot be made", error)


def _load_module(name: str) -> None:
    """Import the module that a task needs, if it needs one."""
    if (module := imported_module(name)) is not None:
        kinds = " names of tasks are gymnasium:ID, envpool:ID, gymnax:ID, brax:NAME, mjx:NAME or module:Name."
        _parts.load(module, f"the task {name!r}", kinds + nearest(module, (*EXTRAS, *LIBRARIES)))


def _from_factory(name: str) -> Any:
    """What `module:factory(option=value)` makes."""
    _load_module(name)
    call = _parts.read_call(name)
    factory = _parts.find(call.address, name)
    if not callable(factory):
        raise ValueError(f"{name} must be a class or a function that makes an environment, got {factory!r}.")
    try:
        return factory(**call.options)
    except Exception as error:
        _raise(f"{name}: the factory failed", error)


def _raise(problem: str, error: Exception) -> NoReturn:
    """Report the error of a task as one ValueError."""
    raise ValueError(f"{problem} ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class _Environments:
    """One environment of Gymnasium per episode, stepped one after the other.

    An episode depends only on its seed, not on earlier episodes.
    """

    task: HostTask
    environments: list[Any]

    def reset(self, seeds: np.ndarray) -> np.ndarray:
        return self.restart(np.arange(len(self.environments)), seeds)

    def restart(self, episodes: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        observations = []
        for episode, seed in zip(episodes, seeds.tolist(), strict=True):
            environment = self.environments[episode]
            try:
                observation, _ = environment.reset(seed=seed)
            except Exception as error:
                _raise(f"{self.task.name}: reset(seed=...) failed", error)
            observations.append(self._checked(observation))
            _check_alike(self.task, environment)
        return np.stack(observations)

    def step(self, episodes: np.ndarray, actions: np.ndarray) -> Outcome:
        space = self.environments[0].action_space
        if isinstance(self.task.action_space, Discrete):
            actions = space.start + actions.astype(np.int64)
        else:
            actions = _clipped(self.task.action_space, actions, space.dtype)
        try:
            outcomes = [self.environments[each].step(action) for each, action in zip(episodes, actions, strict=True)]
            if any(len(outcome) == 4 for outcome in outcomes):
                raise ValueError(
                    "step returned 4 values, as in Gym before 0.26, and does not say which episodes were truncated; "
                    "return observation, reward, terminated, truncated, info"
                )
            observations, rewards, terminated, truncated, _ = zip(*outcomes, strict=True)
            numbers = np.asarray(rewards, np.float32).reshape(len(episodes))  # some tasks return arrays of size 1
        except Exception as error:
            _raise(f"{self.task.name}: step failed", error)
        return Outcome(
            np.stack([self._checked(each) for each in observations]),
            numbers,
            np.asarray(terminated, bool),
            np.asarray(truncated, bool),
        )

    def picture(self) -> np.ndarray | None:
        first = self.environments[0]
        return np.asarray(first.render()) if first.render_mode == "rgb_array" else None

    def _checked(self, observation: Any) -> np.ndarray:
        vector = np.asarray(observation, np.float32)
        if vector.shape != (self.task.observation_size,):
            raise ValueError(
                f"{self.task.name} gave an observation of shape {vector.shape}, but its space has the shape "
                f"({self.task.observation_size},)."
            )
        return vector


def _clipped(space: Box, actions: np.ndarray, dtype: Any) -> np.ndarray:
    # A diverged policy gives NaN, which some tasks cannot handle: the error would end the other episodes, too.
    return np.clip(np.nan_to_num(actions), space.low, space.high).astype(dtype)


# EnvPool


def _pool_description(name: str, task_id: str) -> HostTask:
    envpool = _extra("envpool")
    known: Sequence[str] = envpool.list_all_envs()
    if task_id not in known:
        raise ValueError(f"EnvPool has no task {task_id!r}.{nearest(task_id, known)}")
    with _without_warnings():
        try:
            spec = envpool.make_spec(task_id)
        except Exception as error:
            _raise(f"{name} cannot be made", error)
        spaces = (spec.gymnasium_observation_space, spec.gymnasium_action_space)
    if spec.config.max_num_players > 1:
        raise ValueError(f"{name} has {spec.config.max_num_players} players; byzpg only supports tasks with one.")
    limit = spec.config.max_episode_steps
    observations, actions = spaces
    if (size := sum(_sizes(observations).values())) > 0:
        observations = _extra("gymnasium").spaces.Box(-inf, inf, (size,))
    return _described(name, observations, actions, None if limit >= NO_LIMIT else limit, spec.reward_threshold)


def _sizes(observations: Any) -> dict[str, int]:
    """The sizes of the vectors that make up an observation, as in DeepMind Control; empty if it has other parts.

    What only a critic may see in training, the privileged state of MuJoCo Playground, is left out.
    """
    spaces = _extra("gymnasium").spaces
    if not isinstance(observations, spaces.Dict):
        return {}
    seen = {name: each for name, each in observations.spaces.items() if not name.startswith("privileged")}
    vectors = all(
        isinstance(each, spaces.Box) and len(each.shape) <= 1 and np.issubdtype(each.dtype, np.floating)
        for each in seen.values()
    )
    return {name: int(np.prod(each.shape)) for name, each in seen.items()} if vectors else {}


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore warnings: Gymnasium warns about the precision of EnvPool's spaces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Pool:
    """All episodes in one pool of C++ environments, stepped by threads.

    EnvPool seeds environments only when it makes them. Every batch of episodes that starts together therefore gets a
    new pool, so that an episode depends only on its seed, and a resumed run is bit-identical. Making a pool takes a few
    milliseconds; with MuJoCo, it takes two milliseconds per environment.
    """

    def __init__(self, task: HostTask) -> None:
        self.task = task
        self.pool: Any = None

    def reset(self, seeds: np.ndarray) -> np.ndarray:
        envpool, task_id = _extra("envpool"), self.task.name.partition(":")[2]
        with _without_warnings():
            self.pool = envpool.make(task_id, env_type="gymnasium", num_envs=len(seeds), seed=seeds.tolist())
            self.dtype = self.pool.action_space.dtype
            self.names = list(_sizes(self.pool.observation_space))
            observations, info = self.pool.reset()
        return self._features(observations)[np.argsort(info["env_id"])]

    def restart(self, episodes: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        observations, info = self.pool.reset(episodes.astype(np.int32))
        return self._features(observations)[np.argsort(info["env_id"])]

    def _features(self, observations: Any) -> np.ndarray:
        """The observations [episode, feature], whose vectors stand one after the other."""
        if self.names:
            vectors = [np.asarray(observations[name], np.float32) for name in self.names]
            observations = np.concatenate([each.reshape(len(each), -1) for each in vectors], axis=1)
        return np.asarray(observations, np.float32)

    def step(self, episodes: np.ndarray, actions: np.ndarray) -> Outcome:
        space = self.task.action_space
        actions = actions.astype(self.dtype) if isinstance(space, Discrete) else _clipped(space, actions, self.dtype)
        # A pool steps only the environments whose numbers it is given.
        observations, *outcome, info = self.pool.step(actions, episodes.astype(np.int32))
        order = np.argsort(info["env_id"])
        rewards, terminated, truncated = (np.asarray(each)[order] for each in outcome)
        return Outcome(self._features(observations)[order], rewards.astype(np.float32), terminated, truncated)

    def picture(self) -> None:
        return None
