"""Environments as pure functions of arrays, by name."""

from typing import Any, Protocol

from jax import Array

from byzpg.components import unknown
from byzpg.envs.cartpole import CartPole
from byzpg.envs.lunar_lander import LunarLander, LunarLanderContinuous
from byzpg.spaces import Space


class Environment(Protocol):
    """What a rollout needs of an environment. A state is any pytree of arrays; the batch is their shape.

    Episodes end where `step` says so; a rollout cuts them off at `horizon`.
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

    def reset(self, key: Array) -> Any:
        """The first state of one episode."""
        ...

    def observe(self, state: Any) -> Array:
        """What the agent sees [..., observation_size]."""
        ...

    def step(self, state: Any, action: Array, noise: Array) -> tuple[Any, Array, Array]:
        """The next state, the reward [...] and whether the episode ended there [...]; `noise` is [..., noise_size]."""
        ...


ENVIRONMENTS: dict[str, type[Environment]] = {
    member.name: member for member in (CartPole, LunarLander, LunarLanderContinuous)
}


def make(name: str) -> Environment:
    """The environment of that name."""
    if name not in ENVIRONMENTS:
        raise ValueError(unknown("environment", name, ENVIRONMENTS))
    return ENVIRONMENTS[name]()
