"""Pendulum-v1 in array arithmetic: Gymnasium's task, equal to it step for step as far as float32 allows."""

from dataclasses import dataclass
from math import pi
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from byzpg.envs.spaces import Box
from byzpg.robust.components import Component

# The constants of gymnasium.envs.classic_control.pendulum.
GRAVITY = 10.0
LARGEST_SPEED = 8.0
LARGEST_TORQUE = 2.0
TIME_STEP = 0.05
LARGEST_START = (pi, 1.0)  # of the absolute values of angle and speed


class State(NamedTuple):
    """One float32 array per quantity, all of one shape: the batch."""

    angle: Array  # 0 is upright
    speed: Array


@dataclass(frozen=True)
class Pendulum(Component):
    """Swing a pendulum up and hold it: reward −(angle² + 0.1 speed² + 0.001 torque²) in each of 200 steps."""

    name = "Pendulum-v1"
    observation_size = 3
    action_space = Box(1, (-LARGEST_TORQUE,), (LARGEST_TORQUE,))
    horizon = 200
    reward_threshold = None
    noise_size = 0
    has_loops = False

    def reset(self, key: Array) -> State:
        """A first state: the angle is uniform, the speed uniform in ±1. For a batch, `vmap` over keys."""
        units = jax.random.uniform(key, (2,), jnp.float32, -1, 1)
        return State(*(units * jnp.asarray(LARGEST_START)))

    def observe(self, state: State) -> tuple[Array, ...]:
        """What the agent sees: the cosine and sine of the angle, and the speed."""
        return jnp.cos(state.angle), jnp.sin(state.angle), state.speed

    def step(self, state: State, action: tuple[Array, ...], noise: tuple[Array, ...]) -> tuple[State, Array, Array]:
        """The next state, the reward, and False: episodes only end at the horizon. `noise` is not used."""
        torque = jnp.clip(action[0], -LARGEST_TORQUE, LARGEST_TORQUE)
        cost = jnp.square(without_turns(state.angle)) + 0.1 * jnp.square(state.speed) + 0.001 * jnp.square(torque)
        # The pendulum is a rod of length 1 and mass 1 that turns about its end.
        speed = state.speed + (3 * GRAVITY / 2 * jnp.sin(state.angle) + 3.0 * torque) * TIME_STEP
        speed = jnp.clip(speed, -LARGEST_SPEED, LARGEST_SPEED)
        following = State(state.angle + speed * TIME_STEP, speed)
        return following, -cost, jnp.zeros(cost.shape, bool)


def without_turns(angle: Array) -> Array:
    """The angle without full turns: within ±π."""
    turned = angle + pi
    return turned - 2 * pi * jnp.floor(turned / (2 * pi)) - pi
