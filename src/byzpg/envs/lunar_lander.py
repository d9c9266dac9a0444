"""LunarLander-v3 in array arithmetic: Gymnasium's task, equal to it step for step as far as float32 allows.

`lander_bodies` and `lander_world` have the physics. Most episodes are far above the ground most of the time:
`LunarLander.far_from_ground` finds them, and they take a cheaper step.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from byzpg.envs.box2d import Contact, Pair, Pose, Velocity, cross, plus, rotated, times
from byzpg.envs.kernels import in_kernel
from byzpg.envs.lander_bodies import (
    HULL,
    LEG,
    LEG_AWAY,
    LEG_DOWN,
    LEG_SIDES,
    LEG_TILT,
    NUM_CORNERS,
    TIME_STEP,
    WIDTH,
    Body,
    Ground,
    Hinge,
    Leg,
    highest_ground,
)
from byzpg.envs.lander_world import step_world
from byzpg.envs.loops import Loops, choose
from byzpg.envs.spaces import Box, Discrete
from byzpg.robust.components import Component, by_platform

# From gymnasium.envs.box2d.lunar_lander, with lengths in metres (pixels / 30).
HEIGHT = 400 / 30
PAD_HEIGHT = HEIGHT / 4
LARGEST_FORCE = 1000.0  # of the push at the start
MAIN_POWER, SIDE_POWER = 13.0, 0.6
MAIN_DEPTH, SIDE_AWAY, SIDE_HEIGHT, SIDE_HEIGHT_ACROSS = 4 / 30, 12 / 30, 14 / 30, 17 / 30
# On CPUs, the number of episodes in flight that take a step at once.
LARGE_CHUNK = 256
# A body that is higher than this plus the way it moves in a step cannot touch the ground.
ROOM = 0.2
# On CPUs, so few episodes in flight step faster one by one, as all those near the ground do.
FEW = 32
# On CPUs, so few of a chunk step faster one by one if the chunk's solvers have to continue only for them.
FEW_UNSETTLED = 16


class State(NamedTuple):
    """One float32 array per quantity, all of one shape: the batch."""

    hull: Body
    legs: tuple[Leg, Leg]
    ground: Ground
    shaping: Array
    ended: Array  # 1 or 0; loops do not wait for an episode that has ended


class Throttles(NamedTuple):
    """What the engines do in a step."""

    main: Array  # power of the main engine
    side: Array  # power of the side engine
    direction: Array  # which side engine: −1 left, 1 right


def fire_engines(hull: Body, throttles: Throttles, noise: tuple[Array, ...]) -> Velocity:
    """The hull's velocity after the impulses of the engines, whose direction is a little random."""
    sine, cosine = rotation = hull.pose.rotation()
    origin = rotated(rotation, (-HULL.centre[0], -HULL.centre[1]))
    up, across = ((2 * draw - 1) / 30 for draw in noise)

    def fire(velocity: Velocity, along: Array, aside: Array, place: Pair, power: Array) -> Velocity:
        offset = sine * along - cosine * aside, -cosine * along - sine * aside
        impulse = times(-power, offset)
        return velocity.pushed(HULL, impulse, cross(plus(plus(origin, offset), place), impulse))

    nowhere = jnp.zeros_like(sine), jnp.zeros_like(sine)
    velocity = fire(hull.velocity, MAIN_DEPTH + 2 * up, across, nowhere, throttles.main * MAIN_POWER)
    # Gymnasium uses two different heights here, so the lever depends on the hull's angle.
    place = -sine * SIDE_HEIGHT_ACROSS, cosine * SIDE_HEIGHT
    return fire(velocity, up, 3 * across + throttles.direction * SIDE_AWAY, place, throttles.side * SIDE_POWER)


def observation(hull: Body, legs: tuple[Leg, Leg]) -> tuple[Array, ...]:
    """Position and velocity relative to the pad, angle, spin, and which legs are grounded."""
    x, y = hull.pose.point((-HULL.centre[0], -HULL.centre[1]))
    velocity = hull.velocity.linear
    return (
        (x - WIDTH / 2) / (WIDTH / 2),
        (y - PAD_HEIGHT - LEG_DOWN) / (HEIGHT / 2),
        velocity[0] * (WIDTH / 2 * TIME_STEP),
        velocity[1] * (HEIGHT / 2 * TIME_STEP),
        hull.pose.angle,
        hull.velocity.spin * (20 * TIME_STEP),
        legs[0].grounded,
        legs[1].grounded,
    )


def shaping_potential(observed: tuple[Array, ...]) -> Array:
    """The potential whose increase is part of each step's reward."""
    x, y, x_speed, y_speed, angle, _, left, right = observed
    distance, speed = jnp.sqrt(x * x + y * y), jnp.sqrt(x_speed * x_speed + y_speed * y_speed)
    return -100 * distance - 100 * speed - 100 * jnp.abs(angle) + 10 * left + 10 * right


@dataclass(frozen=True)
class LunarLander(Component):
    """Land softly between two flags: about 120 for the approach, +100 at rest, −100 for a crash, minus fuel."""

    # Without annotations these are not fields; as ClassVars they would not match the properties of `Environment`.
    name = "LunarLander-v3"
    observation_size = 8
    action_space = Discrete(4)
    horizon = 1000
    reward_threshold = 200.0
    noise_size = 2
    has_loops = True

    def reset(self, key: Array) -> State:
        """A first state over random ground, after a random push. For a batch, `vmap` over keys."""
        draws = tuple(jax.random.uniform(key, (NUM_CORNERS + 5,), jnp.float32))
        heights, push, noise = draws[: NUM_CORNERS + 1], draws[NUM_CORNERS + 1 : NUM_CORNERS + 3], draws[-2:]
        return self.first_state(
            tuple(height * HEIGHT / 2 for height in heights),
            tuple((2 * draw - 1) * LARGEST_FORCE for draw in push),
            noise,
        )

    def first_state(self, heights: tuple[Array, ...], force: tuple[Array, ...], noise: tuple[Array, ...]) -> State:
        """The first state, after one step without engines, as in Gymnasium.

        Args:
            heights: Twelve heights, from which the ground follows by smoothing.
            force: The push on the hull.
            noise: The draws of the step.
        """
        zero = jnp.zeros_like(force[0])
        heights = tuple(
            zero + PAD_HEIGHT if abs(i - NUM_CORNERS // 2) <= 2 else height for i, height in enumerate(heights)
        )
        # For the first corner, Gymnasium's smoothing wraps around to the last of the twelve heights.
        ground = tuple(0.33 * (heights[i - 1] + heights[i] + heights[i + 1]) for i in range(NUM_CORNERS))

        def body(x: float, y: float, angle: float, velocity: Pair) -> Body:
            return Body(Pose((zero + x, zero + y), zero + angle), Velocity(velocity, zero), zero)

        still = zero, zero
        contact = Contact((zero - 1, zero - 1), still, still)
        legs = tuple(
            Leg(
                body=body(WIDTH / 2 - side * LEG_AWAY, HEIGHT, side * LEG_TILT, still),
                hinge=Hinge(still, zero, zero, zero),
                contacts=(contact, contact),
                ages=still,
                box=(still, still),
                grounded=zero,
            )
            for side in LEG_SIDES
        )
        pushed = force[0] * (TIME_STEP * HULL.inverse_mass), force[1] * (TIME_STEP * HULL.inverse_mass)
        hull = body(WIDTH / 2 + HULL.centre[0], HEIGHT + HULL.centre[1], 0.0, pushed)
        state = State(hull, (legs[0], legs[1]), ground, shaping=zero, ended=zero)
        action = (zero,) * (2 if isinstance(self.action_space, Box) else 1)
        return self.advance(Loops(in_kernel=False), zero == 0, state, action, noise, airborne=True)[0]

    def throttles(self, action: tuple[Array, ...]) -> Throttles:
        (chosen,) = action
        return Throttles(
            main=jnp.where(chosen == 2, 1.0, 0.0),
            side=jnp.where((chosen == 1) | (chosen == 3), 1.0, 0.0),
            direction=jnp.where(chosen == 3, 1.0, -1.0),
        )

    def observe(self, state: State) -> tuple[Array, ...]:
        """What the agent sees: eight arrays."""
        return observation(state.hull, state.legs)

    def step(self, state: State, action: tuple[Array, ...], noise: tuple[Array, ...]) -> tuple[State, Array, Array]:
        """The next state, the reward and whether the episode ended; two draws of `noise` disturb the engines."""

        def in_chunks(state: State, *given: Any) -> tuple[State, Array, Array]:
            loops, active = Loops(in_kernel=False), state.ended == 0
            result, given = (state, jnp.zeros_like(state.shaping), ~active, active), (state, *given)
            if state.ended.size > FEW:
                high = self.far_from_ground(state)
                high &= jnp.sum(high) > FEW
                in_flight = partial(self.advance, Loops(in_kernel=False, may_leave=FEW_UNSETTLED), airborne=True)
                result = loops.where_needed(high, in_flight, given, result, chunk=LARGE_CHUNK)
                active &= ~(high & result[3])
            near_ground = partial(self.advance, loops, airborne=False)
            return loops.where_needed(active, near_ground, given, result, chunk=1)[:3]

        return by_platform(state, action, noise, cuda=partial(in_kernel, self.step_in_kernel), default=in_chunks)

    def step_in_kernel(
        self, state: State, action: tuple[Array, ...], noise: tuple[Array, ...]
    ) -> tuple[State, Array, Array]:
        """`step` for a block of episodes inside a GPU kernel."""
        return self.advance(Loops(in_kernel=True), state.ended == 0, state, action, noise, airborne=False)[:3]

    def far_from_ground(self, state: State) -> Array:
        """Which episodes go on and cannot touch the ground within a step."""
        high = state.ended == 0
        for body, shape in ((state.hull, HULL), *((leg.body, LEG) for leg in state.legs)):
            (x, y), (x_speed, y_speed) = body.pose.position, body.velocity.linear
            # The engines and the other bodies may change the speed by a few metres per second.
            wide, low = (shape.reach + ROOM + TIME_STEP * jnp.abs(speed) for speed in (x_speed, y_speed))
            high = high & (y - low > highest_ground(state.ground, x - wide, x + wide))
        for leg in state.legs:
            for contact in leg.contacts:
                high = high & (contact.keys[0] < 0)
        return high

    def advance(
        self,
        loops: Loops,
        active: Array,
        state: State,
        action: tuple[Array, ...],
        noise: tuple[Array, ...],
        *,
        airborne: bool,
    ) -> tuple[State, Array, Array, Array]:
        """Take a step with the `active` episodes and leave the others unchanged.

        With `airborne`, the step costs less, but no active episode may touch the ground in it. The last result says
        which episodes finished the step: see `Loops.may_leave`.
        """
        throttles = self.throttles(action)
        hull = Body(state.hull.pose, fire_engines(state.hull, throttles, noise), state.hull.rest)
        stepped = step_world(loops, hull, state.legs, state.ground, active, airborne=airborne)
        observed = observation(stepped.hull, stepped.legs)
        shaping = shaping_potential(observed)
        reward = shaping - state.shaping - 0.3 * throttles.main - 0.03 * throttles.side
        lost = stepped.crashed | (jnp.abs(observed[0]) >= 1)
        reward = jnp.where(stepped.asleep, 100.0, jnp.where(lost, -100.0, reward))
        ended = lost | stepped.asleep
        following = State(stepped.hull, stepped.legs, state.ground, shaping, jnp.where(ended, 1.0, 0.0))
        return choose(active, following, state), jnp.where(active, reward, 0.0), ended | ~active, stepped.finished


class LunarLanderContinuous(LunarLander):
    """LunarLander with two throttles: the main engine fires above 0, with 50–100 % power; a side engine beyond ±0.5."""

    name = "LunarLanderContinuous-v3"
    action_space = Box(2, (-1.0, -1.0), (1.0, 1.0))

    def throttles(self, action: tuple[Array, ...]) -> Throttles:
        main, side = (jnp.clip(each, -1.0, 1.0) for each in action)
        return Throttles(
            main=jnp.where(main > 0, 0.5 + 0.5 * main, 0.0),
            side=jnp.where(jnp.abs(side) > 0.5, jnp.abs(side), 0.0),
            direction=jnp.where(side > 0, 1.0, -1.0),
        )
