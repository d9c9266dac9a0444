"""Acrobot-v1 in array arithmetic: Gymnasium's task, equal to it step for step as far as float32 allows."""

from dataclasses import dataclass
from math import pi
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from byzpg.envs.pendulum import without_turns
from byzpg.envs.spaces import Discrete
from byzpg.robust.components import Component

# The task of Sutton 1996, with the constants of gymnasium.envs.classic_control.acrobot; both links are alike.
GRAVITY = 9.8
MASS = 1.0
LENGTH = 1.0
TO_CENTER = 0.5  # from the joint of a link to its center of mass
INERTIA = 1.0
TIME_STEP = 0.2
LARGEST_SPEEDS = (4 * pi, 9 * pi)
LARGEST_START = 0.1  # of the absolute value of every quantity


class State(NamedTuple):
    """One float32 array per quantity, all of one shape: the batch."""

    angle: Array  # of the first link; 0 hangs down
    bend: Array  # the angle of the second link, relative to the first
    speed: Array
    bend_speed: Array


@dataclass(frozen=True)
class Acrobot(Component):
    """Swing the tip of two links above a line by a torque at the joint: reward −1 per step until it is there."""

    name = "Acrobot-v1"
    observation_size = 6
    action_space = Discrete(3)
    horizon = 500
    reward_threshold = -100.0
    noise_size = 0
    has_loops = False

    def reset(self, key: Array) -> State:
        """A first state: every quantity is uniform in ±0.1. For a batch, `vmap` over keys."""
        return State(*jax.random.uniform(key, (4,), jnp.float32, -LARGEST_START, LARGEST_START))

    def observe(self, state: State) -> tuple[Array, ...]:
        """What the agent sees: the cosine and sine of each angle, and the speeds."""
        angle, bend, speed, bend_speed = state
        return jnp.cos(angle), jnp.sin(angle), jnp.cos(bend), jnp.sin(bend), speed, bend_speed

    def step(self, state: State, action: tuple[Array, ...], noise: tuple[Array, ...]) -> tuple[State, Array, Array]:
        """The next state, the reward and whether the tip is high enough; `noise` is not used."""
        torque = action[0].astype(state.angle.dtype) - 1  # −1, 0 or 1

        def ahead(slope: State, time: float) -> State:
            return State(*(value + time * change for value, change in zip(state, slope, strict=True)))

        # One step of the classical Runge–Kutta method.
        first = _slope(state, torque)
        second = _slope(ahead(first, TIME_STEP / 2), torque)
        third = _slope(ahead(second, TIME_STEP / 2), torque)
        fourth = _slope(ahead(third, TIME_STEP), torque)
        mean = State(*((a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(first, second, third, fourth, strict=True)))
        moved = ahead(mean, TIME_STEP)
        fastest, fastest_bend = LARGEST_SPEEDS
        following = State(
            without_turns(moved.angle),
            without_turns(moved.bend),
            jnp.clip(moved.speed, -fastest, fastest),
            jnp.clip(moved.bend_speed, -fastest_bend, fastest_bend),
        )
        height = -jnp.cos(following.angle) - jnp.cos(following.angle + following.bend)
        is_there = height > LENGTH
        return following, jnp.where(is_there, 0.0, -1.0).astype(height.dtype), is_there


def _slope(state: State, torque: Array) -> State:
    """The derivative of the state by time, as in the book of Sutton & Barto rather than in the paper."""
    angle, bend, speed, bend_speed = state
    cosine, sine = jnp.cos(bend), jnp.sin(bend)
    coupling = MASS * LENGTH * TO_CENTER
    of_second = MASS * TO_CENTER**2 + INERTIA
    of_both = 2 * of_second + MASS * LENGTH**2 + 2 * coupling * cosine
    shared = of_second + coupling * cosine
    pull_on_second = MASS * TO_CENTER * GRAVITY * jnp.sin(angle + bend)
    pull = (
        -coupling * (jnp.square(bend_speed) + 2 * bend_speed * speed) * sine
        + (TO_CENTER + LENGTH) * MASS * GRAVITY * jnp.sin(angle)
        + pull_on_second
    )
    push = torque + shared / of_both * pull - coupling * jnp.square(speed) * sine - pull_on_second
    bend_acceleration = push / (of_second - jnp.square(shared) / of_both)
    return State(speed, bend_speed, -(shared * bend_acceleration + pull) / of_both, bend_acceleration)
