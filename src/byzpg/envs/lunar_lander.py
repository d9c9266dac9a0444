"""LunarLander-v3 as array arithmetic: Gymnasium's lander, and of Box2D 2.3 (Catto) what moves it, step for step.

A hull with two legs on motorised hinges flies over ten ground edges. Every array has the batch's shape, and lists are
Python tuples. Most episodes are far above the ground most of the time: `easy` tells which, and `loops` how those that
need the solvers' many rounds get them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import pi, sqrt
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.envs.box2d import (
    IMPACT_DISTANCE,
    SETTLED,
    SLOP,
    THICKNESS,
    Contact,
    Edge,
    Impulses,
    Manifold,
    Pair,
    Patch,
    Pose,
    Shape,
    Velocity,
    between,
    collide,
    cross,
    differs,
    dot,
    impact,
    in_solver,
    minus,
    moved,
    out_of_reach,
    patch_of,
    plus,
    pushed_apart,
    remembered,
    renewed,
    shifted,
    times,
    turned,
    warmed,
    without_approach,
)
from byzpg.envs.loops import Loops, by_platform, choose, once, some, stacked, together
from byzpg.envs.spaces import Box, Discrete
from byzpg.robust.components import Component

# gymnasium.envs.box2d.lunar_lander, lengths in metres: pixels / 30.
TIME_STEP = 1 / 50
GRAVITY = -10.0
WIDTH, HEIGHT = 600 / 30, 400 / 30
PAD_HEIGHT = HEIGHT / 4
NUM_CORNERS = 11  # of the ground
SPACING = WIDTH / (NUM_CORNERS - 1)
LARGEST_FORCE = 1000.0  # of the push at the start
MAIN_POWER, SIDE_POWER = 13.0, 0.6
MAIN_DEPTH, SIDE_AWAY, SIDE_HEIGHT, SIDE_HEIGHT_ACROSS = 4 / 30, 12 / 30, 14 / 30, 17 / 30
LEG_AWAY, LEG_DOWN = 20 / 30, 18 / 30
LEG_SIDES = (-1.0, 1.0)
LEG_TILT = 0.05  # at the start; hinge angles count from there
HINGE_LIMITS = ((0.4 - LEG_TILT, 0.9 - LEG_TILT), (-0.9 + LEG_TILT, -0.4 + LEG_TILT))
MOTOR_SPEED = 0.3
LARGEST_MOTOR_IMPULSE = 40 * TIME_STEP
FRICTION = sqrt(0.1 * 0.2)  # of a leg on the ground

# b2Settings.h and b2World.
VELOCITY_ITERATIONS, POSITION_ITERATIONS, IMPACT_POSITION_ITERATIONS = 180, 60, 20
ANGULAR_SLOP = 2 / 180 * pi
CORRECTION, IMPACT_CORRECTION = 0.2, 0.75
LARGEST_ANGULAR_CORRECTION = 8 / 180 * pi
STILL_SPEED, STILL_SPIN, TIME_TO_SLEEP = 0.01, 2 / 180 * pi, 0.5
LARGEST_SUBSTEPS = 8
LAST_IMPACT = 1 - 1e-6
FENCE_ROOM = 0.1
# In flight few rounds do, once the legs are spread out.
USUAL_VELOCITY_ITERATIONS, USUAL_POSITION_ITERATIONS = 6, 2
# On CPUs, how many are seen to at once: of all, of those that need more rounds, and of those hitting the ground.
LARGE_CHUNK, CHUNK, SMALL_CHUNK = 256, 64, 16
# What is higher by this much, and by how far it moves in a step, is not met by the ground.
ROOM = 0.2


HULL = Shape(tuple((x / 30, y / 30) for x, y in ((17, -10), (17, 0), (14, 17), (-14, 17), (-17, 0), (-17, -10))), 5.0)
LEG = Shape(tuple((x * 2 / 30, y * 8 / 30) for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1))), 1.0, FRICTION)
MOTOR_MASS = 1 / (1 / HULL.inertia + 1 / LEG.inertia)


class Body(NamedTuple):
    pose: Pose
    velocity: Velocity
    rest: Array  # seconds for which it has been still


class Hinge(NamedTuple):
    """What is remembered of a hinge: impulses, and at which limit it was: 1 lower, −1 upper, 0 neither."""

    linear: Pair
    limit: Array
    motor: Array
    side: Array


class Leg(NamedTuple):
    body: Body
    hinge: Hinge
    contacts: tuple[Contact, Contact]  # with the even and the odd edge of the two next to the leg
    ages: Pair  # 0: that edge is not near; else more for the one that came near first
    fence: tuple[Pair, Pair]  # lower left and upper right of a box with room to move in: what it meets is near
    grounded: Array  # 1 or 0, as observed


class State(NamedTuple):
    """One float32 array per quantity, all of one shape: the batch."""

    hull: Body
    legs: tuple[Leg, Leg]
    ground: tuple[Array, ...]  # heights of the corners, 2 m apart
    shaping: Array
    ended: Array  # 1 or 0: an ended episode holds up no loop


class HingeMasses(NamedTuple):
    """A hinge as the velocity solver sees it: minors of its point's compliance and of all of it, and both determinants.

    It divides by these, since a quotient is what XLA on CPUs computes once and not anew for each use.
    """

    hull_arm: Pair
    leg_arm: Pair
    coupling: Pair
    point: tuple[Array, Array, Array]
    every: tuple[Array, ...]
    determinants: Pair


def corners_from(ground: tuple[Array, ...], first: Array, number: int) -> tuple[Array, ...]:
    """The heights of so many corners in a row, the first of which has this number."""
    heights = ground[:number]
    for i in range(1, NUM_CORNERS - number + 1):
        heights = choose(first == i, ground[i : i + number], heights)
    return heights


def edges_below(ground: tuple[Array, ...], x: Array) -> tuple[tuple[Edge, Edge], Array]:
    """The two edges that meet at the corner nearest to x, the even one first, and whether the even one is on the right.

    A body spans less than 2 m, so it reaches no other; an edge keeps its place for as long as it can be reached.
    """
    corner = jnp.clip(jnp.floor(x / SPACING + 0.5), 1, NUM_CORNERS - 2)
    heights = corners_from(ground, corner - 1, 3)
    corners = tuple(((corner + i) * SPACING, height) for i, height in zip((-1, 0, 1), heights, strict=True))

    def edge(start: Pair, end: Pair) -> Edge:
        rise = end[1] - start[1]
        length = jnp.sqrt(SPACING**2 + rise * rise)
        return Edge(start, end, (-rise / length, SPACING / length))

    left, right = edge(*corners[:2]), edge(*corners[1:])
    even_right = corner == 2 * jnp.floor(corner / 2)
    return (choose(even_right, right, left), choose(even_right, left, right)), even_right


def highest(ground: tuple[Array, ...], left: Array, right: Array) -> Array:
    """The greatest height of the ground between two places less than 4 m apart."""
    heights = []
    for x in (left, right):
        first = jnp.clip(jnp.floor(x / SPACING), 0, NUM_CORNERS - 2)
        pair = corners_from(ground, first, 2)
        share = jnp.clip(x / SPACING - first, 0.0, 1.0)
        heights.append((pair[0] + share * (pair[1] - pair[0]), pair, first))
    (at_left, (_, after_left), first), (at_right, (before_right, _), last) = heights
    corners = jnp.where(first < last, jnp.maximum(after_left, before_right), at_right)
    return jnp.maximum(jnp.maximum(at_left, at_right), corners)


# Hinges


def point_compliance(hull_arm: Pair, leg_arm: Pair) -> tuple[Array, Array, Array]:
    """How far a hinge's two points part per impulse: xx, xy, yy."""
    masses = 1 / HULL.mass + 1 / LEG.mass
    return (
        masses + hull_arm[1] * hull_arm[1] / HULL.inertia + leg_arm[1] * leg_arm[1] / LEG.inertia,
        -hull_arm[1] * hull_arm[0] / HULL.inertia - leg_arm[1] * leg_arm[0] / LEG.inertia,
        masses + hull_arm[0] * hull_arm[0] / HULL.inertia + leg_arm[0] * leg_arm[0] / LEG.inertia,
    )


def hinge_arms(side: float, hull: Pose, leg: Pose) -> tuple[Pair, Pair]:
    """From the two centres of mass to the hinge."""
    hull_arm = turned(hull.rotation(), (-HULL.centre[0], -HULL.centre[1]))
    return hull_arm, turned(leg.rotation(), (side * LEG_AWAY, LEG_DOWN))


def hinge_masses(side: float, hull: Pose, leg: Pose) -> HingeMasses:
    hull_arm, leg_arm = hinge_arms(side, hull, leg)
    xx, xy, yy = point_compliance(hull_arm, leg_arm)
    xz = -hull_arm[1] / HULL.inertia - leg_arm[1] / LEG.inertia
    yz = hull_arm[0] / HULL.inertia + leg_arm[0] / LEG.inertia
    zz = 1 / MOTOR_MASS
    of_point = xx * yy - xy * xy
    minors = (yy * zz - yz * yz, xz * yz - xy * zz, xy * yz - yy * xz, xx * zz - xz * xz, xy * xz - xx * yz, of_point)
    of_all = xx * minors[0] + xy * minors[1] + xz * minors[2]
    return HingeMasses(hull_arm, leg_arm, (xz, yz), (yy, -xy, xx), minors, (of_point, of_all))


def hinge_side(limits: tuple[float, float], hull: Pose, leg: Pose) -> Array:
    """At which limit a hinge is: 1 the lower, −1 the upper, 0 neither."""
    angle = leg.angle - hull.angle
    return jnp.where(angle <= limits[0], 1.0, jnp.where(angle >= limits[1], -1.0, 0.0))


def pulled(
    masses: HingeMasses, hull: Velocity, leg: Velocity, impulse: Pair, twist: Array
) -> tuple[Velocity, Velocity]:
    """Hull and leg after what a hinge does to both."""
    on_hull = cross(masses.hull_arm, impulse) + twist
    hull = hull.pushed(HULL, times(-1.0, impulse), -on_hull)
    return hull, leg.pushed(LEG, impulse, cross(masses.leg_arm, impulse) + twist)


def held_together(
    side: float, masses: HingeMasses, hinge: Hinge, hull: Velocity, leg: Velocity
) -> tuple[Hinge, Velocity, Velocity]:
    """One round of a hinge: its motor, then the point it holds and the limit it is at (b2RevoluteJoint)."""
    motor = hinge.motor - MOTOR_MASS * (leg.spin - hull.spin - side * MOTOR_SPEED)
    motor = once(jnp.clip(motor, -LARGEST_MOTOR_IMPULSE, LARGEST_MOTOR_IMPULSE))
    more = motor - hinge.motor
    hull_spin, leg_spin = hull.spin - more / HULL.inertia, leg.spin + more / LEG.inertia

    def at(velocity: Pair, spin: Array, arm: Pair) -> Pair:
        return velocity[0] - spin * arm[1], velocity[1] + spin * arm[0]

    x, y = minus(at(leg.linear, leg_spin, masses.leg_arm), at(hull.linear, hull_spin, masses.hull_arm))
    z = leg_spin - hull_spin
    xx, xy, xz, yy, yz, zz = masses.every
    of_point, of_all = masses.determinants
    limit = xz * x + yz * y + zz * z
    holds = hinge.side * (hinge.limit * of_all - limit) > 0
    x_free, y_free = x - hinge.limit * masses.coupling[0], y - hinge.limit * masses.coupling[1]
    xx_free, xy_free, yy_free = masses.point
    divisor = -jnp.where(holds, of_all, of_point)
    impulse = (
        jnp.where(holds, xx * x + xy * y + xz * z, xx_free * x_free + xy_free * y_free) / divisor,
        jnp.where(holds, xy * x + yy * y + yz * z, xy_free * x_free + yy_free * y_free) / divisor,
    )
    twist = jnp.where(holds, limit, hinge.limit * of_point) / divisor
    hull, leg = pulled(masses, Velocity(hull.linear, hull_spin), Velocity(leg.linear, leg_spin), impulse, twist)
    limit = jnp.where(holds, hinge.limit + twist, 0.0)
    return Hinge(plus(hinge.linear, impulse), limit, motor, hinge.side), hull, leg


def put_together(
    side: float, limits: tuple[float, float], at_limit: Array, hull: Pose, leg: Pose
) -> tuple[Pose, Pose, Array]:
    """One round of a hinge's position, and whether it was within the slop."""
    angle = leg.angle - hull.angle
    beyond = jnp.where(at_limit > 0, limits[0] - angle, jnp.where(at_limit < 0, angle - limits[1], 0.0))
    twist = MOTOR_MASS * at_limit * jnp.clip(beyond - ANGULAR_SLOP, 0.0, LARGEST_ANGULAR_CORRECTION)
    hull = Pose(hull.position, hull.angle - twist / HULL.inertia)
    leg = Pose(leg.position, leg.angle + twist / LEG.inertia)
    hull_arm, leg_arm = hinge_arms(side, hull, leg)
    x, y = minus(plus(leg.position, leg_arm), plus(hull.position, hull_arm))
    xx, xy, yy = point_compliance(hull_arm, leg_arm)
    divisor = xy * xy - xx * yy
    impulse = (yy * x - xy * y) / divisor, (xx * y - xy * x) / divisor
    hull = Pose(
        minus(hull.position, times(1 / HULL.mass, impulse)), hull.angle - cross(hull_arm, impulse) / HULL.inertia
    )
    leg = Pose(plus(leg.position, times(1 / LEG.mass, impulse)), leg.angle + cross(leg_arm, impulse) / LEG.inertia)
    return hull, leg, (x * x + y * y <= SLOP**2) & (beyond <= ANGULAR_SLOP)


# Time of impact


class Course(NamedTuple):
    """A leg within a time step, between two impacts."""

    start: Pose
    end: Pose
    velocity: Velocity
    contacts: tuple[Contact, Contact]
    grounded: Array
    passed: Array  # share of the time step before `start`
    counts: Pair  # of impacts, by contact
    enabled: tuple[Array, Array]
    run: Array


def impacts(loops: Loops, wanted: Array, edges: tuple[Edge, Edge], course: Course) -> Course:
    """Sub-steps from impact to impact of a leg that would else pass into the ground, the hinge left out (b2World)."""

    def substep(course: Course) -> Course:
        def meets(item):
            edge, count, enabled, (start, end, run) = item
            wanted = run & enabled & (count <= LARGEST_SUBSTEPS)
            hit, share = loops.looped(partial(impact, LEG), start, end, edge, wanted)
            return jnp.where(hit, share, 1.0)

        way = course.start, course.end, course.run
        first_share, second_share = together(
            meets, tuple(zip(edges, course.counts, course.enabled, (way, way), strict=True))
        )
        second = second_share < first_share
        share = jnp.minimum(first_share, second_share)
        passed = course.passed + (1 - course.passed) * share
        run = course.run & (passed < LAST_IMPACT)

        pose = once(between(course.start, course.end, share))
        manifolds = together(lambda item: collide(LEG, *item), tuple((pose, edge) for edge in edges))
        hits = run & ~second, run & second
        solid = run & (jnp.where(second, manifolds[1].keys[0], manifolds[0].keys[0]) >= 0)
        # What is hit is seen to first; the other contact only if that one is solid.
        contacts, grounded = list(course.contacts), course.grounded
        for due in (hits, (solid & hits[1], solid & hits[0])):
            for i in (0, 1):
                contact, flag = renewed(contacts[i], manifolds[i], grounded)
                contacts[i], grounded = choose(due[i], contact, contacts[i]), jnp.where(due[i], flag, grounded)

        order = choose(second, manifolds[::-1], manifolds)
        start, velocity = rebound(loops, order, pose, course.velocity, solid)
        end = moved(start, velocity, (1 - passed) * TIME_STEP)
        return Course(
            choose(solid, start, course.start),
            choose(solid, end, course.end),
            choose(solid, velocity, course.velocity),
            (contacts[0], contacts[1]),
            grounded,
            jnp.where(solid, passed, course.passed),
            (course.counts[0] + hits[0], course.counts[1] + hits[1]),
            (jnp.where(run, solid | second, course.enabled[0]), jnp.where(run, solid | ~second, course.enabled[1])),
            run,
        )

    return lax.while_loop(lambda course: some(course.run), substep, course._replace(run=wanted))


def rebound(
    loops: Loops, manifolds: tuple[Manifold, Manifold], pose: Pose, velocity: Velocity, wanted: Array
) -> tuple[Pose, Velocity]:
    """A leg at the moment of an impact: pushed out of the ground, then stopped by it."""

    def push(manifolds: tuple[Manifold, Manifold], pose: Pose, run: Array) -> tuple[Pose, Array]:
        pushed, first = pushed_apart(LEG, manifolds[0], pose, IMPACT_CORRECTION)
        pushed, second = pushed_apart(LEG, manifolds[1], pushed, IMPACT_CORRECTION)
        return choose(run, pushed, pose), run & (jnp.minimum(first, second) < -1.5 * SLOP)

    def stop(patches: tuple[Patch, ...], state: tuple[Any, Velocity], run: Array) -> tuple[Any, Array]:
        (first, second), before = state
        first, after = without_approach(LEG, patches[0], first, before)
        second, after = without_approach(LEG, patches[1], second, after)
        return ((first, second), after), run & differs(before, after)

    pose, _ = loops.rounds(
        push, IMPACT_POSITION_ITERATIONS, manifolds, pose, wanted, USUAL_POSITION_ITERATIONS, SMALL_CHUNK
    )
    patches = together(lambda item: patch_of(LEG, *item), tuple((manifold, pose) for manifold in manifolds))
    nothing = jnp.zeros_like(pose.angle), jnp.zeros_like(pose.angle)
    state = (Impulses(nothing, nothing),) * 2, velocity
    (_, velocity), _ = loops.rounds(
        stop, VELOCITY_ITERATIONS, patches, state, wanted, USUAL_VELOCITY_ITERATIONS, SMALL_CHUNK
    )
    return pose, velocity


# The step


class Footing(NamedTuple):
    """A leg and the two edges next to it; of its contacts first the one that touches, and of two the newest."""

    edges: tuple[Edge, Edge]
    manifolds: tuple[Manifold, Manifold]
    patches: tuple[Patch, Patch]
    contacts: tuple[Contact, Contact]
    odd_first: Array
    ages: Pair
    grounded: Array


def nearby(ground: tuple[Array, ...], leg: Leg) -> tuple[tuple[Edge, Edge], Pair]:
    """The two edges next to a leg, and how long each has been near."""
    edges, even_right = edges_below(ground, leg.body.pose.position[0])
    inside = tuple(meets_fence(leg.fence, edge) for edge in edges)
    fresh = tuple(within & (age == 0) for within, age in zip(inside, leg.ages, strict=True))
    later = even_right, ~even_right  # of two that come near at once, the right one
    ages = tuple(
        jnp.where(
            inside[i],
            jnp.where(
                fresh[i], jnp.where(fresh[1 - i] & ~later[i], 2.0, 1.0), jnp.where(fresh[1 - i], 2.0, leg.ages[i])
            ),
            0.0,
        )
        for i in (0, 1)
    )
    return edges, ages


def found(ground: tuple[Array, ...], leg: Leg) -> Footing:
    """Where a leg stands (b2ContactManager::Collide)."""
    pose = leg.body.pose
    edges, ages = nearby(ground, leg)
    manifolds = together(lambda item: collide(LEG, *item), tuple((pose, edge) for edge in edges))
    odd_newer = ages[1] < ages[0]
    contacts = tuple(renewed(leg.contacts[i], manifolds[i], leg.grounded)[0] for i in (0, 1))
    flags = []
    for order in ((0, 1), (1, 0)):
        grounded = leg.grounded
        for i in order:
            grounded = renewed(leg.contacts[i], manifolds[i], grounded)[1]
        flags.append(grounded)
    even_touches, odd_touches = (manifold.keys[0] >= 0 for manifold in manifolds)
    odd_first = odd_touches & (odd_newer | ~even_touches)
    edges, manifolds, contacts = choose(
        odd_first, (edges[::-1], manifolds[::-1], contacts[::-1]), (edges, manifolds, contacts)
    )
    patches = together(lambda item: patch_of(LEG, *item), tuple((manifold, pose) for manifold in manifolds))
    return Footing(
        edges,
        manifolds,
        patches,
        contacts,
        odd_first,
        ages,
        jnp.where(odd_newer, flags[1], flags[0]),
    )


def meets_fence(fence: tuple[Pair, Pair], edge: Edge) -> Array:
    room = THICKNESS / 2 + FENCE_ROOM
    (left, low), (right, high) = fence
    below, above = jnp.minimum(edge.start[1], edge.end[1]) - room, jnp.maximum(edge.start[1], edge.end[1]) + room
    return (left <= edge.end[0] + room) & (right >= edge.start[0] - room) & (low <= above) & (high >= below)


def fenced(fence: tuple[Pair, Pair], start: Pose, end: Pose) -> tuple[Pair, Pair]:
    """The fence of a leg that has moved: a new one, ahead of it, if it does not keep within the old (b2DynamicTree)."""
    lows, highs = [], []
    for pose in (start, end):
        sine, cosine = (jnp.abs(each) for each in pose.rotation())
        half_width, half_height = LEG.corners[2]
        extent = (
            cosine * half_width + sine * half_height + THICKNESS / 2,
            sine * half_width + cosine * half_height + THICKNESS / 2,
        )
        lows.append(minus(pose.position, extent))
        highs.append(plus(pose.position, extent))
    low, high = (tuple(map(jnp.minimum, *lows)), tuple(map(jnp.maximum, *highs)))
    kept = (fence[0][0] <= low[0]) & (fence[0][1] <= low[1]) & (high[0] <= fence[1][0]) & (high[1] <= fence[1][1])
    ahead = times(2.0, minus(end.position, start.position))
    new = (
        tuple(a - FENCE_ROOM + jnp.minimum(b, 0.0) for a, b in zip(low, ahead, strict=True)),
        tuple(a + FENCE_ROOM + jnp.maximum(b, 0.0) for a, b in zip(high, ahead, strict=True)),
    )
    return choose(kept, fence, new)


class Moving(NamedTuple):
    """A leg as the velocity solver sees it."""

    velocity: Velocity
    hinge: Hinge
    impulses: tuple[Impulses, ...]


def velocity_round(
    constants: tuple[Sequence[HingeMasses], Sequence[Sequence[Patch]]],
    state: tuple[Velocity, tuple[Moving, Moving]],
    run: Array,
) -> tuple[tuple[Velocity, tuple[Moving, Moving]], Array]:
    """Box2D sees to both hinges first, then to the contacts; but a leg's contacts do not concern the other's hinge."""
    (masses, patches), (hull, legs) = constants, state
    new_legs, moves = list(legs), run & False
    for i in (1, 0):
        hinge, hull, velocity = held_together(LEG_SIDES[i], masses[i], legs[i].hinge, hull, legs[i].velocity)
        impulses = list(legs[i].impulses)
        for j, patch in enumerate(patches[i]):
            impulses[j], velocity = without_approach(LEG, patch, impulses[j], velocity)
        new_legs[i] = Moving(velocity, hinge, tuple(impulses))
        moves = moves | differs(legs[i].velocity, velocity) | (jnp.abs(hinge.motor - legs[i].hinge.motor) > SETTLED)
    return (hull, (new_legs[0], new_legs[1])), run & (moves | differs(state[0], hull))


def position_round(
    constants: tuple[Sequence[Array], Sequence[Sequence[Manifold]]],
    state: tuple[Pose, tuple[Pose, Pose], Array],
    run: Array,
) -> tuple[tuple[Pose, tuple[Pose, Pose], Array], Array]:
    """Of the state the last is whether the poses are good enough."""
    (sides, manifolds), (hull, legs, solved) = constants, state
    new_hull, new_legs, good = hull, list(legs), run
    for i in (0, 1):
        for manifold in manifolds[i]:
            new_legs[i], least = pushed_apart(LEG, manifold, new_legs[i], CORRECTION)
            good = good & (least >= -3 * SLOP)
    for i in (1, 0):
        new_hull, new_legs[i], okay = put_together(LEG_SIDES[i], HINGE_LIMITS[i], sides[i], new_hull, new_legs[i])
        good = good & okay
    new_hull, new_legs = once((new_hull, new_legs))
    # An angle often stays just past its slop, by less than a correction can change: not solved, but over.
    moves = shifted(hull, new_hull) | shifted(legs[0], new_legs[0]) | shifted(legs[1], new_legs[1])
    poses = choose(run, (new_hull, (new_legs[0], new_legs[1])), (hull, legs))
    return (*poses, solved | good), run & ~good & moves


def fired(hull: Body, main: Array, side: Array, direction: Array, noise: tuple[Array, ...]) -> Velocity:
    """The hull's velocity after the engines' impulses, which go astray a little."""
    sine, cosine = rotation = hull.pose.rotation()
    origin = turned(rotation, (-HULL.centre[0], -HULL.centre[1]))
    up, across = ((2 * draw - 1) / 30 for draw in noise)

    def engine(velocity: Velocity, along: Array, aside: Array, place: Pair, power: Array) -> Velocity:
        offset = sine * along - cosine * aside, -cosine * along - sine * aside
        impulse = times(-power, offset)
        return velocity.pushed(HULL, impulse, cross(plus(plus(origin, offset), place), impulse))

    nowhere = jnp.zeros_like(sine), jnp.zeros_like(sine)
    velocity = engine(hull.velocity, MAIN_DEPTH + 2 * up, across, nowhere, main * MAIN_POWER)
    # Gymnasium takes two different heights here, so that the lever depends on the hull's angle.
    place = -sine * SIDE_HEIGHT_ACROSS, cosine * SIDE_HEIGHT
    return engine(velocity, up, 3 * across + direction * SIDE_AWAY, place, side * SIDE_POWER)


def falling(velocity: Velocity) -> Velocity:
    x, y = velocity.linear
    return Velocity((x, y + TIME_STEP * GRAVITY), velocity.spin)


def rested(body: Body) -> Body:
    """The body with the time for which it has been still."""
    speed, spin = dot(body.velocity.linear, body.velocity.linear), jnp.abs(body.velocity.spin)
    still = (speed <= STILL_SPEED**2) & (spin <= STILL_SPIN)
    return Body(body.pose, body.velocity, jnp.where(still, body.rest + TIME_STEP, 0.0))


def hinged(limits: tuple[float, float], hull: Pose, leg: Leg) -> Hinge:
    """A hinge at the start of a step: at which limit it is, whose impulse counts only if it was there before."""
    side = hinge_side(limits, hull, leg.body.pose)
    limit = jnp.where((side == leg.hinge.side) & (side != 0), leg.hinge.limit, 0.0)
    return Hinge(leg.hinge.linear, limit, leg.hinge.motor, side)


def advanced(
    loops: Loops, hull: Body, legs: tuple[Leg, Leg], ground: tuple[Array, ...], going: Array, airborne: bool
) -> tuple[Body, tuple[Leg, Leg], Array, Array]:
    """Bodies one time step on (b2World::Step), whether the hull met the ground, and whether all fell asleep.

    Where it is known that all are `airborne`, nothing is compiled for the ground.
    """
    footings = () if airborne else together(partial(found, ground), legs)
    hull_velocity = falling(hull.velocity)
    masses, moving = [], []
    for i, leg in enumerate(legs):
        velocity, impulses = falling(leg.body.velocity), ()
        if footings:
            patches = footings[i].patches
            impulses = tuple(map(in_solver, patches, footings[i].contacts))
            for patch, kept in zip(patches, impulses, strict=True):
                velocity = warmed(LEG, patch, kept, velocity)
        masses.append(hinge_masses(LEG_SIDES[i], hull.pose, leg.body.pose))
        moving.append(Moving(velocity, hinged(HINGE_LIMITS[i], hull.pose, leg), impulses))
    for i in (1, 0):
        hinge = moving[i].hinge
        hull_velocity, velocity = pulled(
            masses[i], hull_velocity, moving[i].velocity, hinge.linear, hinge.motor + hinge.limit
        )
        moving[i] = moving[i]._replace(velocity=velocity)
    patches = tuple(footing.patches for footing in footings) or ((), ())
    manifolds = tuple(footing.manifolds for footing in footings) or ((), ())
    (hull_velocity, moving), _ = loops.rounds(
        velocity_round,
        VELOCITY_ITERATIONS,
        (tuple(masses), patches),
        (hull_velocity, (moving[0], moving[1])),
        going,
        USUAL_VELOCITY_ITERATIONS,
        CHUNK,
    )

    sides = tuple(leg.hinge.side for leg in moving)
    leg_poses = tuple(moved(leg.body.pose, move.velocity, TIME_STEP) for leg, move in zip(legs, moving, strict=True))
    state = moved(hull.pose, hull_velocity, TIME_STEP), (leg_poses[0], leg_poses[1]), going & False
    (hull_pose, leg_poses, solved), _ = loops.rounds(
        position_round,
        POSITION_ITERATIONS,
        (sides, manifolds),
        state,
        going,
        USUAL_POSITION_ITERATIONS,
        CHUNK,
    )
    new_hull = rested(Body(hull_pose, hull_velocity, hull.rest))
    bodies = tuple(
        rested(Body(pose, move.velocity, leg.body.rest))
        for pose, move, leg in zip(leg_poses, moving, legs, strict=True)
    )
    least = jnp.minimum(new_hull.rest, jnp.minimum(bodies[0].rest, bodies[1].rest))
    asleep = (least >= TIME_TO_SLEEP) & solved
    stopped = choose(asleep, jax.tree.map(jnp.zeros_like, hull_velocity), hull_velocity)
    new_hull = new_hull._replace(velocity=stopped)

    if airborne:
        ages = tuple(nearby(ground, leg)[1] for leg in legs)
        new_legs = tuple(
            Leg(body, move.hinge, leg.contacts, age, fenced(leg.fence, leg.body.pose, body.pose), leg.grounded)
            for leg, body, move, age in zip(legs, bodies, moving, ages, strict=True)
        )
        return new_hull, (new_legs[0], new_legs[1]), jnp.zeros_like(going), asleep

    awake = going & ~asleep
    crashed = crashes(loops, ground, hull.pose, new_hull.pose, awake)

    def prepared(item):
        leg, body, move, footing = item
        contacts = tuple(map(remembered, footing.patches, footing.contacts, move.impulses))
        zero, on = jnp.zeros_like(leg.grounded), leg.grounded >= 0
        poses = leg.body.pose, body.pose
        return Course(
            *poses, body.velocity, (contacts[0], contacts[1]), footing.grounded, zero, (zero, zero), (on, on), awake
        )

    items = tuple(zip(legs, bodies, moving, footings, strict=True))
    courses = stacked([prepared(item) for item in items])
    edges = stacked([footing.edges for footing in footings])
    clear = together(lambda edge: out_of_reach(LEG, courses.start, courses.end, edge, IMPACT_DISTANCE), edges)
    courses = loops.few(awake & ~(clear[0] & clear[1]), partial(impacts, loops), (edges, courses), courses, CHUNK)
    new_legs = []
    for i, (leg, body, move, footing) in enumerate(items):
        course = jax.tree.map(itemgetter(i), courses)
        contacts = choose(footing.odd_first, course.contacts[::-1], course.contacts)
        fence = fenced(leg.fence, leg.body.pose, body.pose)
        body = Body(course.end, course.velocity, body.rest)
        new_legs.append(Leg(body, move.hinge, contacts, footing.ages, fence, course.grounded))
    return new_hull, (new_legs[0], new_legs[1]), crashed, asleep


def crashes(loops: Loops, ground: tuple[Array, ...], start: Pose, end: Pose, wanted: Array) -> Array:
    """Whether the hull meets the ground on its way."""

    def crash(wanted: Array, edge: Edge, start: Pose, end: Pose) -> Array:
        hit, share = loops.looped(partial(impact, HULL), start, end, edge, wanted)
        share = jnp.where(hit & (share < LAST_IMPACT), share, 0.0)
        return wanted & (collide(HULL, between(start, end, share), edge).keys[0] >= 0)

    def on_edge(item: Any) -> Array:
        edge, start, end, wanted = item
        wanted = wanted & ~out_of_reach(HULL, start, end, edge, THICKNESS)
        return loops.few(wanted, crash, (edge, start, end), wanted & False, CHUNK)

    edges, _ = edges_below(ground, start.position[0])
    first, second = together(on_edge, tuple((edge, start, end, wanted) for edge in edges))
    return first | second


def seen(hull: Body, legs: tuple[Leg, Leg]) -> tuple[Array, ...]:
    """The observation: position and velocity relative to the pad, angle, spin, and which legs are grounded."""
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


def potential(observation: tuple[Array, ...]) -> Array:
    """What the reward of a step is the gain of."""
    x, y, x_speed, y_speed, angle, _, left, right = observation
    distance, speed = jnp.sqrt(x * x + y * y), jnp.sqrt(x_speed * x_speed + y_speed * y_speed)
    return -100 * distance - 100 * speed - 100 * jnp.abs(angle) + 10 * left + 10 * right


@dataclass(frozen=True)
class LunarLander(Component):
    """Come down softly between the flags: some 120 for the way, 100 more for rest, −100 for a crash, less fuel."""

    # Without annotations these are not fields; as ClassVars they would not match the properties of `Environment`.
    name = "LunarLander-v3"
    observation_size = 8
    action_space = Discrete(4)
    horizon = 1000
    reward_threshold = 200.0
    noise_size = 2
    has_loops = True

    def reset(self, key: Array) -> State:
        """A first state over new ground, pushed at random; for a batch, vmap over keys."""
        draws = tuple(jax.random.uniform(key, (NUM_CORNERS + 5,), jnp.float32))
        heights, push, noise = draws[: NUM_CORNERS + 1], draws[NUM_CORNERS + 1 : NUM_CORNERS + 3], draws[-2:]
        return self.first(
            tuple(height * HEIGHT / 2 for height in heights),
            tuple((2 * draw - 1) * LARGEST_FORCE for draw in push),
            noise,
        )

    def first(self, heights: tuple[Array, ...], force: tuple[Array, ...], noise: tuple[Array, ...]) -> State:
        """The first state over ground of these heights (12: Gymnasium smooths them round), pushed by a force."""
        zero = jnp.zeros_like(force[0])
        heights = tuple(
            zero + PAD_HEIGHT if abs(i - NUM_CORNERS // 2) <= 2 else height for i, height in enumerate(heights)
        )
        ground = tuple(0.33 * (heights[i - 1] + heights[i] + heights[i + 1]) for i in range(NUM_CORNERS))

        def body(x: float, y: float, angle: float, velocity: Pair) -> Body:
            return Body(Pose((zero + x, zero + y), zero + angle), Velocity(velocity, zero), zero)

        still = zero, zero
        contact = Contact((zero - 1, zero - 1), still, still)
        legs = tuple(
            Leg(
                body(WIDTH / 2 - side * LEG_AWAY, HEIGHT, side * LEG_TILT, still),
                Hinge(still, zero, zero, zero),
                (contact, contact),
                still,
                (still, still),
                zero,
            )
            for side in LEG_SIDES
        )
        pushed = force[0] * (TIME_STEP / HULL.mass), force[1] * (TIME_STEP / HULL.mass)
        hull = body(WIDTH / 2 + HULL.centre[0], HEIGHT + HULL.centre[1], 0.0, pushed)
        state = State(hull, (legs[0], legs[1]), ground, zero, zero)
        action = (zero,) * (2 if isinstance(self.action_space, Box) else 1)
        return self.following(Loops(in_kernels=False), True, zero == 0, state, action, noise)[0]

    def engines(self, action: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        """Power of the main engine, power of the side engines, and which of these: −1 left, 1 right."""
        (chosen,) = action
        return (
            jnp.where(chosen == 2, 1.0, 0.0),
            jnp.where((chosen == 1) | (chosen == 3), 1.0, 0.0),
            jnp.where(chosen == 3, 1.0, -1.0),
        )

    def observe(self, state: State) -> tuple[Array, ...]:
        """What the agent sees: eight arrays."""
        return seen(state.hull, state.legs)

    def step(self, state: State, action: tuple[Array, ...], noise: tuple[Array, ...]) -> tuple[State, Array, Array]:
        """The next state, the reward and whether the episode ended there; two draws of `noise` sway the engines."""

        def in_chunks(state: State, *given: Any) -> tuple[State, Array, Array]:
            loops, going = Loops(in_kernels=False), state.ended == 0
            if state.ended.size <= LARGE_CHUNK:
                return self.following(loops, False, going, state, *given)
            high, given = self.easy(state), (state, *given)
            result = state, jnp.zeros_like(state.shaping), ~going
            result = loops.few(high, partial(self.following, loops, True), given, result, LARGE_CHUNK)
            return loops.few(~high & going, partial(self.following, loops, False), given, result, LARGE_CHUNK)

        def in_kernels(state: State, *given: Any) -> tuple[State, Array, Array]:
            return self.following(Loops(in_kernels=True), False, state.ended == 0, state, *given)

        return by_platform(state, action, noise, cuda=in_kernels, default=in_chunks)

    def easy(self, state: State) -> Array:
        """Where nothing can meet the ground within a step."""
        high = state.ended == 0
        for body, shape in ((state.hull, HULL), *((leg.body, LEG) for leg in state.legs)):
            (x, y), (x_speed, y_speed) = body.pose.position, body.velocity.linear
            # The engines and the other bodies may change the speed by some metres a second.
            wide, low = (shape.reach + ROOM + TIME_STEP * jnp.abs(speed) for speed in (x_speed, y_speed))
            high = high & (y - low > highest(state.ground, x - wide, x + wide))
        for leg in state.legs:
            for contact in leg.contacts:
                high = high & (contact.keys[0] < 0)
        return high

    def following(
        self,
        loops: Loops,
        airborne: bool,
        going: Array,
        state: State,
        action: tuple[Array, ...],
        noise: tuple[Array, ...],
    ) -> tuple[State, Array, Array]:
        """The same, at less cost where it is known that all are `airborne`; nothing happens but to those `going`."""
        main, side, direction = self.engines(action)
        hull = Body(state.hull.pose, fired(state.hull, main, side, direction, noise), state.hull.rest)
        hull, legs, crashed, asleep = advanced(loops, hull, state.legs, state.ground, going, airborne)
        observation = seen(hull, legs)
        shaping = potential(observation)
        reward = shaping - state.shaping - 0.3 * main - 0.03 * side
        lost = crashed | (jnp.abs(observation[0]) >= 1)
        reward = jnp.where(asleep, 100.0, jnp.where(lost, -100.0, reward))
        ended = lost | asleep
        following = State(hull, legs, state.ground, shaping, jnp.where(ended, 1.0, 0.0))
        return choose(going, following, state), jnp.where(going, reward, 0.0), ended | ~going


class LunarLanderContinuous(LunarLander):
    """The same with two throttles: the main engine fires above 0, from half its power up; the side ones beyond ±0.5."""

    name = "LunarLanderContinuous-v3"
    action_space = Box(2, (-1.0, -1.0), (1.0, 1.0))

    def engines(self, action: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        main, side = (jnp.clip(each, -1.0, 1.0) for each in action)
        return (
            jnp.where(main > 0, 0.5 + 0.5 * main, 0.0),
            jnp.where(jnp.abs(side) > 0.5, jnp.abs(side), 0.0),
            jnp.where(side > 0, 1.0, -1.0),
        )
