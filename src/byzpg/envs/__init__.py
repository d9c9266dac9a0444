"""Tasks by name: environments as pure functions of arrays, and those that live on the host."""

from typing import Any, Protocol

from jax import Array

from byzpg.envs import host
from byzpg.envs.cartpole import CartPole
from byzpg.envs.lunar_lander import LunarLander, LunarLanderContinuous
from byzpg.envs.pendulum import Pendulum
from byzpg.envs.spaces import Space
from byzpg.robust.components import unknown


class Environment(Protocol):
    """What a rollout needs of an environment, written elementwise: one array per number, the batch as their only shape.

    So one source runs as a plain program and inside a GPU kernel, where a block of episodes stays in registers. A state
    is any pytree of such arrays. Episodes end where `step` says so; a rollout cuts them off at `horizon`.
    """

    @property
    def name(self) -> str: ...

    @property
    def observation_size(self) -> int: ...

    @property
    def action_space(self) -> Space: ...

    @property
    def horizon(self) -> int:
        """The most steps an episode has."""
        ...

    @property
    def reward_threshold(self) -> float | None:
        """The mean return from which the task counts as solved."""
        ...

    @property
    def noise_size(self) -> int:
        """How many uniform draws in [0, 1) one step of the dynamics takes."""
        ...

    @property
    def has_loops(self) -> bool:
        """Whether a step holds loops of its own, so that a whole rollout is no kernel on GPUs."""
        ...

    def reset(self, key: Array) -> Any:
        """The first state of one episode."""
        ...

    def observe(self, state: Any) -> tuple[Array, ...]:
        """What the agent sees, one array per number."""
        ...

    def step(self, state: Any, action: tuple[Array, ...], noise: tuple[Array, ...]) -> tuple[Any, Array, Array]:
        """The next state, the reward and whether the episode ended there; of noise there are `noise_size` arrays."""
        ...


ENVIRONMENTS: dict[str, type[Environment]] = {
    member.name: member for member in (CartPole, LunarLander, LunarLanderContinuous, Pendulum)
}


Task = Environment | host.HostTask


def make(name: str) -> Task:
    """The task of that name; with a colon in it, one on the host."""
    if ":" in name:
        return host.describe(name)
    if name not in ENVIRONMENTS:
        if host.in_gymnasium(name):
            raise ValueError(f"{name} is a task of Gymnasium: write gymnasium:{name}.")
        raise ValueError(unknown("environment", name, ENVIRONMENTS))
    return ENVIRONMENTS[name]()
