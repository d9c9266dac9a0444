"""Tasks: environments written in JAX, and environments that run on the host."""

from functools import cache
from typing import Any, Protocol, runtime_checkable

from jax import Array

from byzpg import _parts
from byzpg.envs import host, jax_tasks
from byzpg.envs.acrobot import Acrobot
from byzpg.envs.aliased_states import AliasedStates
from byzpg.envs.cartpole import CartPole
from byzpg.envs.host import HostTask
from byzpg.envs.jax_tasks import JaxTask
from byzpg.envs.lunar_lander import LunarLander, LunarLanderContinuous
from byzpg.envs.pendulum import Pendulum
from byzpg.envs.spaces import Box, Discrete, Space
from byzpg.robust.components import Component, unknown

__all__ = [
    "ENVIRONMENTS",
    "Acrobot",
    "AliasedStates",
    "Box",
    "CartPole",
    "Discrete",
    "Enumerable",
    "Environment",
    "HostTask",
    "JaxTask",
    "LunarLander",
    "LunarLanderContinuous",
    "Pendulum",
    "Space",
    "Task",
    "built_in",
    "make",
    "name_of",
]


@runtime_checkable
class Environment(Protocol):
    """An environment written in JAX, as pure elementwise functions. `JaxTask` is the simpler way to write one.

    Every quantity is an array of its own, and the shape of these arrays is the batch. The same source therefore runs as
    a plain program and inside a GPU kernel, where a block of episodes stays in registers. A state is any pytree of such
    arrays. An episode ends when `step` says so; a rollout cuts it off at `horizon`.
    """

    @property
    def name(self) -> str: ...

    @property
    def observation_size(self) -> int:
        """The number of features of an observation."""
        ...

    @property
    def action_space(self) -> Space: ...

    @property
    def horizon(self) -> int:
        """The largest number of steps of an episode."""
        ...

    @property
    def reward_threshold(self) -> float | None:
        """The mean return at which the task counts as solved, if it has one."""
        ...

    @property
    def noise_size(self) -> int:
        """The number of uniform draws in [0, 1) that one step takes."""
        ...

    @property
    def has_loops(self) -> bool:
        """Whether a step contains loops.

        If so, a whole rollout fits into one GPU kernel only if there is a method `step_in_kernel`, which takes a step
        inside a kernel on a block of 16 or 32 episodes, some of which may be padding. See `LunarLander`.
        """
        ...

    def reset(self, key: Array) -> Any:
        """Draw the first state of one episode."""
        ...

    def observe(self, state: Any) -> tuple[Array, ...]:
        """What the agent sees: one array per feature."""
        ...

    def step(self, state: Any, action: tuple[Array, ...], noise: tuple[Array, ...]) -> tuple[Any, Array, Array]:
        """Take a step.

        Args:
            state: The current state.
            action: One array per number of an action.
            noise: `noise_size` arrays of uniform draws in [0, 1).

        Returns:
            The next state, the reward, and whether the episode ended.
        """
        ...


@runtime_checkable
class Enumerable(Protocol):
    """What an environment with few states offers in addition, so that J(θ) can be computed exactly."""

    def every_observation(self) -> Array:
        """What the agent sees in each state [state, feature]."""
        ...

    def expected_return(self, probabilities: Array, horizon: int, discount: Array | float) -> Array:
        """J = E Σ_h γ^h r_h, for the probability of every action in every state [state, action]."""
        ...


ENVIRONMENTS: dict[str, type[Environment]] = {
    member.name: member for member in (CartPole, LunarLander, LunarLanderContinuous, Pendulum, Acrobot, AliasedStates)
}


Task = Environment | HostTask


def built_in(name: str) -> Environment | None:
    """The task with a given name, or None if it is one on the host, which would have to be imported and built.

    Raises:
        ValueError: There is no such task.
    """
    if ":" in name:
        return None
    if name not in ENVIRONMENTS:
        raise ValueError(unknown("environment", name, ENVIRONMENTS))
    return ENVIRONMENTS[name]()


def make(name: str) -> Task:
    """Make the task with a given name.

    Args:
        name: A name in `ENVIRONMENTS`; `gymnax:ID`, `brax:NAME` or `mjx:NAME`, in JAX; `gymnasium:ID` or `envpool:ID`,
            on the host; or your own as `module:Name` or `module:Name(option=value)`, which makes a `JaxTask`, another
            `Environment`, or a `gymnasium.Env`.

    Raises:
        ValueError: There is no such task, or it does not work with byzpg.
    """
    if ":" not in name and name not in ENVIRONMENTS and host.in_gymnasium(name):
        raise ValueError(f"{name} is a task of Gymnasium: use the name gymnasium:{name}.")
    if name.partition(":")[0] in jax_tasks.LIBRARIES:
        return jax_tasks.describe(name)
    return built_in(name) or _own_or_on_host(name)


@cache
def _own_or_on_host(name: str) -> Task:
    made = host.describe(name)
    if isinstance(made, JaxTask):
        return made.checked()
    if not isinstance(made, Environment | HostTask):
        raise ValueError(
            f"{name} must make a gymnasium.Env or a byzpg.envs.JaxTask, got {type(made).__name__}: see the tutorial on "
            "tasks of your own."
        )
    return made


def name_of(task: object) -> str:
    """The name with which `make` makes a task again.

    Args:
        task: A name, a task in JAX, or a class or function that makes a task.

    Raises:
        ValueError: If a run could not be read back, because the task cannot be imported by a name.
    """
    if isinstance(task, str):
        return task
    if host.is_environment(task):
        raise ValueError(
            f"env must make environments, since every agent has several; got one, {task}: give the class or a function "
            "that makes it, or a name such as gymnasium:CartPole-v1."
        )
    if isinstance(task, Component) and isinstance(task, Environment):
        if type(task) in ENVIRONMENTS.values() or isinstance(task, jax_tasks.LibraryTask):
            return task.name
        owner, name = type(task), jax_tasks.text_of(task)
    elif callable(task):
        owner, name = task, f"{task.__module__}:{getattr(task, '__qualname__', '?')}"
    else:
        raise ValueError(f"env must be a name, a task in JAX, or a class or function that makes a task; got {task!r}.")
    where = owner.__module__, getattr(owner, "__qualname__", "<locals>")
    fix = "Move it to a module of its own, such as my_task.py, and import it from there."
    if where[0] == "__main__" or "<" in where[1]:
        raise ValueError(f"env = {task!r} has no name by which opening the run could find it again. {fix}")
    if (_parts.find(":".join(where)) is not owner) or (owner is not task and make(name) != task):
        raise ValueError(f"env = {task!r} could not be read back from its name {name}. {fix}")
    return name
