"""Tasks: environments written in JAX, and environments that run on the host."""

from typing import Any, Protocol, runtime_checkable

from jax import Array

from byzpg.envs import host, jax_tasks
from byzpg.envs.acrobot import Acrobot
from byzpg.envs.aliased_states import AliasedStates
from byzpg.envs.cartpole import CartPole
from byzpg.envs.host import HostTask
from byzpg.envs.jax_tasks import JaxTask
from byzpg.envs.lunar_lander import LunarLander, LunarLanderContinuous
from byzpg.envs.pendulum import Pendulum
from byzpg.envs.spaces import Box, Discrete, Space
from byzpg.robust.components import unknown

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
]


class Environment(Protocol):
    """An environment written in JAX, as pure elementwise functions.

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
        name: A name in `ENVIRONMENTS`, or the name of a task on the host: `gymnasium:ID`, `envpool:ID`, or
            `module:factory` for your own.

    Raises:
        ValueError: There is no such task, or it does not work with byzpg.
    """
    if ":" not in name and name not in ENVIRONMENTS and host.in_gymnasium(name):
        raise ValueError(f"{name} is a task of Gymnasium: use the name gymnasium:{name}.")
    if name.partition(":")[0] in jax_tasks.LIBRARIES:
        return jax_tasks.describe(name)
    return built_in(name) or host.describe(name)
