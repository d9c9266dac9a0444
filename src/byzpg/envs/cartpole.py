"""CartPole-v1 in array arithmetic: Gymnasium's task, equal to it step for step as far as float32 allows."""

from dataclasses import dataclass
from math import pi
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from byzpg.envs.spaces import Discrete
from byzpg.robust.components import Component

# The task of Barto, Sutton & Anderson 1983, with the constants of gymnasium.envs.classic_control.cartpole.
GRAVITY = 9.8
POLE_MASS = 0.1
TOTAL_MASS = 1.0 + POLE_MASS
HALF_LENGTH = 0.5  # of the pole
FORCE = 10.0
TIME_STEP = 0.02
LARGEST_POSITION = 2.4
LARGEST_ANGLE = 12 * 2 * pi / 360
LARGEST_START = 0.05  # of the absolute value of every quantity


class State(NamedTuple):
    """One float32 array per quantity, all of one shape: the batch."""

    position: Array
    velocity: Array
    angle: Array
    angular_velocity: Array


@dataclass(frozen=True)
class CartPole(Component):
    """Balance a pole on a cart: reward 1 per step until it leans more than 12° or the cart leaves ±2.4."""

    # Without annotations these are not fields; as ClassVars they would not match the properties of `Environment`.
    name = "CartPole-v1"
    observation_size = 4
    action_space = Discrete(2)
    horizon = 500
    reward_threshold = 475.0
    noise_size = 0
    has_loops = False

    def reset(self, key: Array) -> State:
        """A first state: every quantity is uniform in ±0.05. For a batch, `vmap` over keys."""
        return State(*jax.random.uniform(key, (4,), jnp.float32, -LARGEST_START, LARGEST_START))

    def observe(self, state: State) -> tuple[Array, ...]:
        """What the agent sees: the whole state."""
        return state

    def step(self, state: State, action: tuple[Array, ...], noise: tuple[Array, ...]) -> tuple[State, Array, Array]:
        """The next state, the reward and whether the episode ended; `noise` is not used."""
        position, velocity, angle, angular_velocity = state
        force = jnp.where(action[0] == 1, FORCE, -FORCE)
        cosine, sine = jnp.cos(angle), jnp.sin(angle)
        push = (force + POLE_MASS * HALF_LENGTH * jnp.square(angular_velocity) * sine) / TOTAL_MASS
        inertia = HALF_LENGTH * (4 / 3 - POLE_MASS * jnp.square(cosine) / TOTAL_MASS)
        angular_acceleration = (GRAVITY * sine - cosine * push) / inertia
        acceleration = push - POLE_MASS * HALF_LENGTH * angular_acceleration * cosine / TOTAL_MASS
        # Explicit Euler steps: positions change by the old velocities.
        following = State(
            position + TIME_STEP * velocity,
            velocity + TIME_STEP * acceleration,
            angle + TIME_STEP * angular_velocity,
            angular_velocity + TIME_STEP * angular_acceleration,
        )
        fallen = (jnp.abs(following.position) > LARGEST_POSITION) | (jnp.abs(following.angle) > LARGEST_ANGLE)
        return following, jnp.ones_like(position), fallen
