"""The lander's bodies and hinges, and the ground below them.

The lander is a hull with two legs on motorised hinges; the ground has ten edges. Every array has the shape of the
batch, and lists are Python tuples.
"""

from math import pi, sqrt
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from byzpg.envs.box2d import SLOP, Contact, Edge, Pair, Pose, Shape, Velocity, cross, minus, plus, rotated, times
from byzpg.envs.loops import choose, computed_once, quotients

# From gymnasium.envs.box2d.lunar_lander, with lengths in metres (pixels / 30).
TIME_STEP = 1 / 50
WIDTH = 600 / 30
NUM_CORNERS = 11  # of the ground
SPACING = WIDTH / (NUM_CORNERS - 1)
LEG_AWAY, LEG_DOWN = 20 / 30, 18 / 30
LEG_SIDES = (-1.0, 1.0)
LEG_TILT = 0.05  # at the start; hinge angles are relative to it
HINGE_LIMITS = ((0.4 - LEG_TILT, 0.9 - LEG_TILT), (-0.9 + LEG_TILT, -0.4 + LEG_TILT))
MOTOR_SPEED = 0.3
LARGEST_MOTOR_IMPULSE = 40 * TIME_STEP
FRICTION = sqrt(0.1 * 0.2)  # of a leg on the ground

# From b2Settings.h.
ANGULAR_SLOP = 2 / 180 * pi
LARGEST_ANGULAR_CORRECTION = 8 / 180 * pi

HULL = Shape(tuple((x / 30, y / 30) for x, y in ((17, -10), (17, 0), (14, 17), (-14, 17), (-17, 0), (-17, -10))), 5.0)
LEG = Shape(tuple((x * 2 / 30, y * 8 / 30) for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1))), 1.0, FRICTION)
MOTOR_MASS = 1 / (HULL.inverse_inertia + LEG.inverse_inertia)

Ground = tuple[Array, ...]  # the heights of the corners, which are 2 m apart
Box = tuple[Pair, Pair]  # lower left and upper right corner


class Body(NamedTuple):
    pose: Pose
    velocity: Velocity
    rest: Array  # seconds for which it has been still


class Hinge(NamedTuple):
    """What is kept of a hinge from step to step: its impulses, and the limit that it has reached."""

    linear: Pair
    limit: Array
    motor: Array
    side: Array  # 1: the lower limit, −1: the upper limit, 0: neither


class Leg(NamedTuple):
    body: Body
    hinge: Hinge
    contacts: tuple[Contact, Contact]  # with the even and the odd one of the two ground edges next to the leg
    ages: Pair  # by edge: 0 if it is not near; of two near edges, the one that came near first has the larger age
    box: Box  # around the leg, with a margin to move in (Box2D's fat AABB): edges that overlap it are near
    grounded: Array  # 1 or 0, as observed


# The ground


def heights_from(ground: Ground, first: Array, number: int) -> tuple[Array, ...]:
    """The heights of `number` neighbouring corners, starting with corner `first`."""
    heights = ground[:number]
    for i in range(1, NUM_CORNERS - number + 1):
        heights = choose(first == i, ground[i : i + number], heights)
    return heights


def edges_below(ground: Ground, x: Array) -> tuple[tuple[Edge, Edge], Array]:
    """The two edges that meet at the corner nearest to x, the even one first, and whether the even one is on the right.

    A body is less than 2 m wide, so it cannot touch other edges. The order by parity keeps an edge at its place for as
    long as a body can touch it.
    """
    corner = jnp.clip(jnp.floor(x / SPACING + 0.5), 1, NUM_CORNERS - 2)
    heights = heights_from(ground, corner - 1, 3)
    corners = tuple(((corner + i) * SPACING, height) for i, height in zip((-1, 0, 1), heights, strict=True))

    def edge(start: Pair, end: Pair) -> Edge:
        rise = end[1] - start[1]
        length = jnp.sqrt(SPACING**2 + rise * rise)
        return Edge(start, end, (-rise / length, SPACING / length))

    left, right = edge(*corners[:2]), edge(*corners[1:])
    even_right = corner == 2 * jnp.floor(corner / 2)
    return (choose(even_right, right, left), choose(even_right, left, right)), even_right


def highest_ground(ground: Ground, left: Array, right: Array) -> Array:
    """The greatest height of the ground between two places that are less than 4 m apart."""
    heights = []
    for x in (left, right):
        first = jnp.clip(jnp.floor(x / SPACING), 0, NUM_CORNERS - 2)
        pair = heights_from(ground, first, 2)
        share = jnp.clip(x / SPACING - first, 0.0, 1.0)
        heights.append((pair[0] + share * (pair[1] - pair[0]), pair, first))
    (at_left, (_, after_left), first), (at_right, (before_right, _), last) = heights
    corners = jnp.where(first < last, jnp.maximum(after_left, before_right), at_right)
    return jnp.maximum(jnp.maximum(at_left, at_right), corners)


# Hinges (b2RevoluteJoint)


class HingeConstraint(NamedTuple):
    """A hinge in the form that the velocity solver needs.

    The solver divides minors by determinants instead of multiplying with an inverse matrix: XLA on CPUs computes a
    quotient only once (see `computed_once`).
    """

    hull_arm: Pair
    leg_arm: Pair
    coupling: Pair  # compliance of the hinge's point to a twist
    point_minors: tuple[Array, Array, Array]  # of the compliance of the point alone
    minors: tuple[Array, ...]  # of the compliance of the point and the angle
    determinants: Pair  # of both


def point_compliance(hull_arm: Pair, leg_arm: Pair) -> tuple[Array, Array, Array]:
    """How far the two sides of a hinge move apart per impulse: xx, xy, yy."""
    masses = HULL.inverse_mass + LEG.inverse_mass
    return (
        masses + hull_arm[1] * hull_arm[1] * HULL.inverse_inertia + leg_arm[1] * leg_arm[1] * LEG.inverse_inertia,
        -hull_arm[1] * hull_arm[0] * HULL.inverse_inertia - leg_arm[1] * leg_arm[0] * LEG.inverse_inertia,
        masses + hull_arm[0] * hull_arm[0] * HULL.inverse_inertia + leg_arm[0] * leg_arm[0] * LEG.inverse_inertia,
    )


def hinge_arms(side: float, hull: Pose, leg: Pose) -> tuple[Pair, Pair]:
    """The vectors from both centres of mass to the hinge."""
    hull_arm = rotated(hull.rotation(), (-HULL.centre[0], -HULL.centre[1]))
    return hull_arm, rotated(leg.rotation(), (side * LEG_AWAY, LEG_DOWN))


def hinge_constraint(side: float, hull: Pose, leg: Pose) -> HingeConstraint:
    """Prepare a hinge for the velocity solver."""
    hull_arm, leg_arm = hinge_arms(side, hull, leg)
    xx, xy, yy = point_compliance(hull_arm, leg_arm)
    xz = -hull_arm[1] * HULL.inverse_inertia - leg_arm[1] * LEG.inverse_inertia
    yz = hull_arm[0] * HULL.inverse_inertia + leg_arm[0] * LEG.inverse_inertia
    zz = 1 / MOTOR_MASS
    of_point = xx * yy - xy * xy
    minors = (yy * zz - yz * yz, xz * yz - xy * zz, xy * yz - yy * xz, xx * zz - xz * xz, xy * xz - xx * yz, of_point)
    of_all = xx * minors[0] + xy * minors[1] + xz * minors[2]
    return HingeConstraint(hull_arm, leg_arm, (xz, yz), (yy, -xy, xx), minors, (of_point, of_all))


def hinge_at_start(limits: tuple[float, float], hull: Pose, leg: Leg) -> Hinge:
    """A hinge at the start of a step. The impulse of its limit only counts if it was at the same limit before."""
    angle = leg.body.pose.angle - hull.angle
    side = jnp.where(angle <= limits[0], 1.0, jnp.where(angle >= limits[1], -1.0, 0.0))
    limit = jnp.where((side == leg.hinge.side) & (side != 0), leg.hinge.limit, 0.0)
    return Hinge(leg.hinge.linear, limit, leg.hinge.motor, side)


def apply_hinge_impulse(
    constraint: HingeConstraint, hull: Velocity, leg: Velocity, impulse: Pair, twist: Array
) -> tuple[Velocity, Velocity]:
    """The velocities of hull and leg after an impulse and a twist at their hinge."""
    on_hull = cross(constraint.hull_arm, impulse) + twist
    hull = hull.pushed(HULL, times(-1.0, impulse), -on_hull)
    return hull, leg.pushed(LEG, impulse, cross(constraint.leg_arm, impulse) + twist)


def solve_hinge_velocity(
    side: float, constraint: HingeConstraint, hinge: Hinge, hull: Velocity, leg: Velocity
) -> tuple[Hinge, Velocity, Velocity]:
    """One round of the velocity solver: the hinge's motor, then its point and its limit."""
    motor = hinge.motor - MOTOR_MASS * (leg.spin - hull.spin - side * MOTOR_SPEED)
    motor = computed_once(jnp.clip(motor, -LARGEST_MOTOR_IMPULSE, LARGEST_MOTOR_IMPULSE))
    more = motor - hinge.motor
    hull_spin, leg_spin = hull.spin - more * HULL.inverse_inertia, leg.spin + more * LEG.inverse_inertia

    def at(velocity: Pair, spin: Array, arm: Pair) -> Pair:
        return velocity[0] - spin * arm[1], velocity[1] + spin * arm[0]

    x, y = minus(at(leg.linear, leg_spin, constraint.leg_arm), at(hull.linear, hull_spin, constraint.hull_arm))
    z = leg_spin - hull_spin
    xx, xy, xz, yy, yz, zz = constraint.minors
    of_point, of_all = constraint.determinants
    limit = xz * x + yz * y + zz * z
    holds = hinge.side * (hinge.limit * of_all - limit) > 0
    x_free, y_free = x - hinge.limit * constraint.coupling[0], y - hinge.limit * constraint.coupling[1]
    xx_free, xy_free, yy_free = constraint.point_minors
    along_x, along_y, twist = quotients(
        (
            jnp.where(holds, xx * x + xy * y + xz * z, xx_free * x_free + xy_free * y_free),
            jnp.where(holds, xy * x + yy * y + yz * z, xy_free * x_free + yy_free * y_free),
            jnp.where(holds, limit, hinge.limit * of_point),
        ),
        -jnp.where(holds, of_all, of_point),
    )
    impulse = along_x, along_y
    hull, leg = apply_hinge_impulse(
        constraint, Velocity(hull.linear, hull_spin), Velocity(leg.linear, leg_spin), impulse, twist
    )
    limit = jnp.where(holds, hinge.limit + twist, 0.0)
    return Hinge(plus(hinge.linear, impulse), limit, motor, hinge.side), hull, leg


def solve_hinge_position(
    side: float, limits: tuple[float, float], at_limit: Array, hull: Pose, leg: Pose
) -> tuple[Pose, Pose, Array]:
    """One round of the position solver: the poses of hull and leg, and whether their errors were within the slop."""
    angle = leg.angle - hull.angle
    beyond = jnp.where(at_limit > 0, limits[0] - angle, jnp.where(at_limit < 0, angle - limits[1], 0.0))
    twist = MOTOR_MASS * at_limit * jnp.clip(beyond - ANGULAR_SLOP, 0.0, LARGEST_ANGULAR_CORRECTION)
    hull = Pose(hull.position, hull.angle - twist * HULL.inverse_inertia)
    leg = Pose(leg.position, leg.angle + twist * LEG.inverse_inertia)
    hull_arm, leg_arm = hinge_arms(side, hull, leg)
    x, y = minus(plus(leg.position, leg_arm), plus(hull.position, hull_arm))
    xx, xy, yy = point_compliance(hull_arm, leg_arm)
    divisor = xy * xy - xx * yy
    impulse = (yy * x - xy * y) / divisor, (xx * y - xy * x) / divisor
    hull = Pose(
        minus(hull.position, times(HULL.inverse_mass, impulse)),
        hull.angle - cross(hull_arm, impulse) * HULL.inverse_inertia,
    )
    leg = Pose(
        plus(leg.position, times(LEG.inverse_mass, impulse)), leg.angle + cross(leg_arm, impulse) * LEG.inverse_inertia
    )
    return hull, leg, (x * x + y * y <= SLOP**2) & (beyond <= ANGULAR_SLOP)
