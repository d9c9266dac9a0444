"""Of Box2D 2.3 (Catto) what a lander needs: polygons that meet edges of the ground.

Manifolds (b2CollideEdge), contacts in both solvers (b2ContactSolver) and the time of impact (b2TimeOfImpact), all
elementwise: every array has the batch's shape, and lists are Python tuples.
"""

from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.envs.loops import choose, once, some

# b2Settings.h; shapes, each 0.01 thick, are kept touching by about `SLOP`.
THICKNESS, SLOP = 0.02, 0.005
LARGEST_CORRECTION = 0.2
LARGEST_CONDITION = 1000.0
IMPACT_DISTANCE, IMPACT_TOLERANCE = 0.005, 0.00125
# Ours: a round of the velocity solver that changes less is the last, and one of the position solver that moves less.
SETTLED, UNMOVED = 1e-6, 1e-6

Pair = tuple[Array, ...]  # x and y, or one of each of two
Point = tuple[float, ...]


def dot(a: Any, b: Any) -> Array:
    return a[0] * b[0] + a[1] * b[1]


def cross(a: Any, b: Any) -> Array:
    return a[0] * b[1] - a[1] * b[0]


def plus(a: Any, b: Any) -> Pair:
    return a[0] + b[0], a[1] + b[1]


def minus(a: Any, b: Any) -> Pair:
    return a[0] - b[0], a[1] - b[1]


def times(factor: Any, a: Any) -> Pair:
    return factor * a[0], factor * a[1]


def turned(rotation: Pair, a: Any) -> Pair:
    """`a` rotated by (sine, cosine)."""
    sine, cosine = rotation
    return cosine * a[0] - sine * a[1], sine * a[0] + cosine * a[1]


def turned_back(rotation: Pair, a: Any) -> Pair:
    sine, cosine = rotation
    return cosine * a[0] + sine * a[1], cosine * a[1] - sine * a[0]


def smallest(values: Sequence[Array], items: Sequence[Any] | None = None) -> tuple[Array, Any]:
    """The smallest of the values and its item; of equal ones the first."""
    value, item = values[0], items[0] if items else None
    for i in range(1, len(values)):
        less = values[i] < value
        value, item = jnp.where(less, values[i], value), choose(less, items[i], item) if items else None
    return value, item


class Shape:
    """A convex polygon of even density: corners counter-clockwise from its centre of mass."""

    def __init__(self, corners: tuple[Point, ...], density: float, friction: float = 0.0) -> None:
        sides = tuple(zip(corners, corners[1:] + corners[:1], strict=True))
        areas = [(a[0] * b[1] - a[1] * b[0]) / 2 for a, b in sides]
        self.mass = density * sum(areas)
        self.friction = friction
        self.centre: Point = tuple(
            sum(area * (a[i] + b[i]) / 3 for area, (a, b) in zip(areas, sides, strict=True)) / sum(areas)
            for i in range(2)
        )
        self.corners = tuple((x - self.centre[0], y - self.centre[1]) for x, y in corners)
        self.reach = max(sqrt(x * x + y * y) for x, y in self.corners)
        self.sides = tuple(zip(self.corners, self.corners[1:] + self.corners[:1], strict=True))
        self.inertia = sum(
            density
            * (a[0] * b[1] - a[1] * b[0])
            / 12
            * sum(p[i] * q[i] for p, q in ((a, a), (a, b), (b, b)) for i in (0, 1))
            for a, b in self.sides
        )
        lengths = [sqrt((b[0] - a[0]) ** 2 + (b[1] - a[1]) ** 2) for a, b in self.sides]
        self.normals = tuple(
            ((b[1] - a[1]) / length, (a[0] - b[0]) / length) for (a, b), length in zip(self.sides, lengths, strict=True)
        )


class Pose(NamedTuple):
    position: Pair  # of the centre of mass
    angle: Array

    def rotation(self) -> Pair:
        return jnp.sin(self.angle), jnp.cos(self.angle)

    def point(self, local: Any) -> Pair:
        return plus(self.position, turned(self.rotation(), local))


class Velocity(NamedTuple):
    linear: Pair
    spin: Array

    def pushed(self, shape: Shape, impulse: Pair, twist: Array) -> "Velocity":
        """After a linear and an angular impulse."""
        return Velocity(plus(self.linear, times(1 / shape.mass, impulse)), self.spin + twist / shape.inertia)


class Edge(NamedTuple):
    start: Pair
    end: Pair
    normal: Pair  # upwards


class Manifold(NamedTuple):
    """Where a polygon meets an edge: a reference face and up to two points, each in the frame of its own body."""

    on_body: Array  # the face is the polygon's, the points are the edge's; else the other way round
    normal: Pair
    plane: Pair
    points: tuple[Pair, Pair]
    keys: Pair  # −1: no such point


class Patch(NamedTuple):
    """A contact as the velocity solver sees it; an absent point gives way to nothing."""

    normal: Pair
    normal_arms: Pair
    tangent_arms: Pair
    normal_resistance: Pair
    tangent_resistance: Pair
    stiffness: tuple[Array, Array, Array]
    determinant: Array
    both: Array


class Impulses(NamedTuple):
    """Of a contact's two points."""

    normal: Pair
    tangent: Pair


class Contact(NamedTuple):
    """What is remembered of a polygon on one edge: up to two points by key (−1: none), and their impulses."""

    keys: Pair
    normal: Pair
    tangent: Pair


class Axis(NamedTuple):
    """A direction from an edge to a polygon: against the outward normal of a face, or fixed in the world."""

    on_body: Array
    normal: Pair
    anchor: Pair  # a corner of that face


def clipped(
    points: tuple[Pair, Pair], keys: Pair, normal: Pair, offset: Array, new_key: Array
) -> tuple[tuple[Pair, Pair], Pair, Array]:
    """The part of a segment behind a line, and whether there is one."""
    first, second = (dot(normal, point) - offset for point in points)
    crossing = first * second < 0
    share = first / jnp.where(crossing, first - second, 1.0)
    cut = plus(points[0], times(share, minus(points[1], points[0])))
    behind = first <= 0
    new_points = choose(behind, points[0], points[1]), choose(crossing, cut, points[1])
    new_keys = jnp.where(behind, keys[0], keys[1]), jnp.where(crossing, new_key, keys[1])
    return new_points, new_keys, crossing | (behind & (second <= 0))


def collide(shape: Shape, pose: Pose, edge: Edge) -> Manifold:
    """The manifold of a polygon and an edge without neighbours, which collides on both sides (b2CollideEdge)."""
    rotation = pose.rotation()
    start, end = once(tuple(turned_back(rotation, minus(point, pose.position)) for point in (edge.start, edge.end)))
    upwards = once(turned_back(rotation, edge.normal))
    below = dot(upwards, start) >= 0
    facing = choose(below, times(-1.0, upwards), upwards)

    edge_separation = smallest([dot(facing, corner) for corner in shape.corners])[0] - dot(facing, start)
    faces = tuple(zip(range(len(shape.corners)), shape.corners, shape.normals, strict=True))
    sides = tuple(zip(faces, faces[1:] + faces[:1], strict=True))
    overlap, (face, after) = once(
        smallest(
            [
                dot(normal, corner) - jnp.minimum(dot(normal, start), dot(normal, end))
                for corner, normal in zip(shape.corners, shape.normals, strict=True)
            ],
            sides,
        )
    )
    # Hysteresis: the edge's face unless the polygon's is clearly the one of less overlap.
    on_body = -overlap > 0.98 * edge_separation + 0.001
    _, (incident, beyond) = once(smallest([dot(facing, normal) for normal in shape.normals], sides))

    # A point's key stands for its b2ContactID: a corner of the polygon 0…, a cut at an end of the edge 8… or 16…, a
    # point on a face of the polygon 32 × face…. Box2D's own coincide where these do.
    start_key, end_key = jnp.where(below, 8.0, 16.0), jnp.where(below, 16.0, 8.0)
    points = choose(on_body, (start, end), (incident[1], beyond[1]))
    keys = choose(on_body, (32.0 * face[0], 32.0 * face[0]), (incident[0] + 0.0, beyond[0] + 0.0))
    reference = choose(on_body, (face[1], after[1]), choose(below, (start, end), (end, start)))
    normal = choose(on_body, face[2], facing)
    across = (normal[1], -normal[0])
    new_key = jnp.where(on_body, 33.0 * face[0], keys[0] + start_key)
    points, keys, first_part = clipped(points, keys, across, dot(across, reference[0]), new_key)
    points, keys = once((points, keys))
    new_key = jnp.where(on_body, 32.0 * face[0] + after[0], keys[0] - 8.0 * jnp.floor(keys[0] / 8.0) + end_key)
    across = times(-1.0, across)
    points, keys, second_part = clipped(points, keys, across, dot(across, reference[1]), new_key)
    points, keys = once((points, keys))

    touching = (edge_separation <= THICKNESS) & (-overlap <= THICKNESS) & first_part & second_part
    first, second = (touching & (dot(normal, minus(point, reference[0])) <= THICKNESS) for point in points)
    outside = tuple(plus(pose.position, turned(rotation, point)) for point in points)
    points = choose(on_body, outside, points)
    on_edge = choose(below, (times(-1.0, edge.normal), edge.start), (edge.normal, edge.end))
    normal, plane = choose(on_body, (face[2], face[1]), on_edge)
    keys = (
        jnp.where(first, keys[0], jnp.where(second, keys[1], -1.0)),
        jnp.where(first & second, keys[1], -1.0),
    )
    return Manifold(on_body, *once((normal, plane, (choose(first, points[0], points[1]), points[1]), keys)))


def meeting(manifold: Manifold, pose: Pose, point: Pair) -> tuple[Pair, Pair, Array]:
    """In the world: the normal from the edge to the polygon, the point, and the separation there."""
    rotation = pose.rotation()
    normal = choose(manifold.on_body, turned(rotation, manifold.normal), manifold.normal)
    plane = choose(manifold.on_body, plus(pose.position, turned(rotation, manifold.plane)), manifold.plane)
    point = choose(manifold.on_body, point, plus(pose.position, turned(rotation, point)))
    separation = dot(minus(point, plane), normal)
    return choose(manifold.on_body, times(-1.0, normal), normal), point, separation


def renewed(contact: Contact, manifold: Manifold, grounded: Array) -> tuple[Contact, Array]:
    """A contact with the impulses of the points that are still there, and whether the polygon counts as grounded.

    That is by events, as in Gymnasium: the end of one contact clears what another one has set.
    """

    def kept(impulses: Pair) -> Pair:
        old_first, old_second = contact.keys
        return tuple(
            jnp.where(key == old_first, impulses[0], jnp.where(key == old_second, impulses[1], 0.0))
            for key in manifold.keys
        )

    before, now = contact.keys[0] >= 0, manifold.keys[0] >= 0
    grounded = jnp.where(now & ~before, 1.0, jnp.where(before & ~now, 0.0, grounded))
    return Contact(manifold.keys, kept(contact.normal), kept(contact.tangent)), grounded


def patch_of(shape: Shape, manifold: Manifold, pose: Pose) -> Patch:
    """A contact prepared for the velocity solver."""
    spots = once(tuple(meeting(manifold, pose, point) for point in manifold.points))
    normal = spots[0][0]
    tangent = normal[1], -normal[0]
    first, second = (key >= 0 for key in manifold.keys)
    # On either side's face the point lies half the separation back along that face's normal.
    arms = tuple(
        minus(plus(point, times(jnp.where(manifold.on_body, 0.5, -0.5) * separation, normal)), pose.position)
        for _, point, separation in spots
    )
    normal_arms, tangent_arms = once(
        tuple(tuple(cross(arm, direction) for arm in arms) for direction in (normal, tangent))
    )

    def compliance(a: Array, b: Array) -> Array:
        return 1 / shape.mass + a * b / shape.inertia

    one, other = normal_arms
    stiffness = compliance(one, one), compliance(one, other), compliance(other, other)
    determinant = stiffness[0] * stiffness[2] - stiffness[1] * stiffness[1]
    both = second & (stiffness[0] * stiffness[0] < LARGEST_CONDITION * determinant)
    present = first, both
    return Patch(
        normal,
        normal_arms,
        tangent_arms,
        tuple(jnp.where(here, k, jnp.inf) for here, k in zip(present, (stiffness[0], stiffness[2]), strict=True)),
        tuple(jnp.where(here, compliance(arm, arm), jnp.inf) for here, arm in zip(present, tangent_arms, strict=True)),
        stiffness,
        jnp.where(both, determinant, 1.0),
        both,
    )


def in_solver(patch: Patch, contact: Contact) -> Impulses:
    """The impulses of the points that the velocity solver treats."""
    return Impulses(
        (contact.normal[0], jnp.where(patch.both, contact.normal[1], 0.0)),
        (contact.tangent[0], jnp.where(patch.both, contact.tangent[1], 0.0)),
    )


def remembered(patch: Patch, contact: Contact, impulses: Impulses) -> Contact:
    return Contact(
        contact.keys,
        (impulses.normal[0], jnp.where(patch.both, impulses.normal[1], contact.normal[1])),
        (impulses.tangent[0], jnp.where(patch.both, impulses.tangent[1], contact.tangent[1])),
    )


def warmed(shape: Shape, patch: Patch, impulses: Impulses, velocity: Velocity) -> Velocity:
    """After the impulses of the step before."""
    (a, b), (c, d) = impulses
    normal, tangent = patch.normal, (patch.normal[1], -patch.normal[0])
    impulse = plus(times(a + b, normal), times(c + d, tangent))
    return velocity.pushed(shape, impulse, dot(patch.normal_arms, (a, b)) + dot(patch.tangent_arms, (c, d)))


def without_approach(shape: Shape, patch: Patch, impulses: Impulses, velocity: Velocity) -> tuple[Impulses, Velocity]:
    """One round of a contact: friction point by point, then both normal impulses at once (b2ContactSolver)."""
    normal, tangent = patch.normal, (patch.normal[1], -patch.normal[0])
    along, away, spin = dot(velocity.linear, tangent), dot(velocity.linear, normal), velocity.spin
    friction = []
    for arm, resistance, pressed, old in zip(
        patch.tangent_arms, patch.tangent_resistance, impulses.normal, impulses.tangent, strict=True
    ):
        limit = shape.friction * pressed
        new = jnp.clip(old - (along + spin * arm) / resistance, -limit, limit)
        along, spin = along + (new - old) / shape.mass, spin + (new - old) * arm / shape.inertia
        friction.append(new)
    rubbed = friction[0] - impulses.tangent[0] + friction[1] - impulses.tangent[1]

    # A small linear complementarity problem, by cases: both points press, the first, the second, or none.
    (one, other), (old_one, old_other) = patch.normal_arms, impulses.normal
    k_one, k_mixed, k_other = patch.stiffness
    left_one = away + spin * one - (k_one * old_one + k_mixed * old_other)
    left_other = away + spin * other - (k_mixed * old_one + k_other * old_other)
    both = (
        (k_mixed * left_other - k_other * left_one) / patch.determinant,
        (k_mixed * left_one - k_one * left_other) / patch.determinant,
    )
    first, second = -left_one / patch.normal_resistance[0], -left_other / patch.normal_resistance[1]
    both_press = patch.both & (both[0] >= 0) & (both[1] >= 0)
    first_presses = (first >= 0) & (~patch.both | (k_mixed * first + left_other >= 0))
    second_presses = patch.both & (second >= 0) & (k_mixed * second + left_one >= 0)
    none_press = (left_one >= 0) & (~patch.both | (left_other >= 0))
    new_one = jnp.where(
        both_press,
        both[0],
        jnp.where(first_presses, first, jnp.where(second_presses | none_press, 0.0, old_one)),
    )
    new_other = jnp.where(
        both_press,
        both[1],
        jnp.where(first_presses, 0.0, jnp.where(second_presses, second, jnp.where(none_press, 0.0, old_other))),
    )
    more_one, more_other = new_one - old_one, new_other - old_other
    spin = spin + (one * more_one + other * more_other) / shape.inertia
    impulse = plus(times(more_one + more_other, normal), times(rubbed, tangent))
    linear = plus(velocity.linear, times(1 / shape.mass, impulse))
    return Impulses((new_one, new_other), (friction[0], friction[1])), Velocity(linear, spin)


def pushed_apart(shape: Shape, manifold: Manifold, pose: Pose, correction: float) -> tuple[Pose, Array]:
    """One round of a polygon's position against an edge, point by point, and the least separation found."""
    least = jnp.zeros_like(pose.angle)
    for key, point in zip(manifold.keys, manifold.points, strict=True):
        normal, spot, separation = meeting(manifold, pose, point)
        separation = once(jnp.where(key >= 0, separation - THICKNESS, 0.0))
        least = jnp.minimum(least, separation)
        arm = cross(minus(spot, pose.position), normal)
        depth = jnp.clip(correction * (separation + SLOP), -LARGEST_CORRECTION, 0.0)
        impulse = -depth / (1 / shape.mass + arm * arm / shape.inertia)
        pose = Pose(
            plus(pose.position, times(impulse / shape.mass, normal)), pose.angle + impulse * arm / shape.inertia
        )
    return pose, least


def between(start: Pose, end: Pose, share: Array) -> Pose:
    return jax.tree.map(lambda a, b: (1 - share) * a + share * b, start, end)


def closest(shape: Shape, pose: Pose, edge: Edge) -> tuple[Array, Axis]:
    """The distance of a polygon and an edge, 0 if they overlap, and the axis along which it is."""
    rotation = pose.rotation()
    corners = once(tuple(minus(plus(pose.position, turned(rotation, corner)), edge.start) for corner in shape.corners))
    along = minus(edge.end, edge.start)
    heights = tuple(dot(corner, edge.normal) for corner in corners)
    above = smallest(heights)[0] > 0
    below = smallest(tuple(-height for height in heights))[0] > 0
    apart = above | below
    squares, axes = [], []
    nowhere = jnp.zeros_like(pose.angle), jnp.zeros_like(pose.angle)
    for corner in corners:
        share = dot(corner, along) / dot(along, along)
        inside = (share > 0) & (share < 1)
        gap = minus(corner, times(jnp.clip(share, 0.0, 1.0), along))
        squares.append(dot(gap, gap))
        upright = choose(above, edge.normal, times(-1.0, edge.normal))
        axes.append((jnp.where(inside, 1.0, 0.0), choose(inside, upright, gap), nowhere))
    ends = once(tuple(turned_back(rotation, minus(end, pose.position)) for end in (edge.start, edge.end)))
    for (corner, other), normal in zip(shape.sides, shape.normals, strict=True):
        side = other[0] - corner[0], other[1] - corner[1]
        distances = tuple(dot(minus(end, corner), normal) for end in ends)
        apart = apart | ((distances[0] > 0) & (distances[1] > 0))
        for end, distance in zip(ends, distances, strict=True):
            share = dot(minus(end, corner), side) / (side[0] * side[0] + side[1] * side[1])
            opposite = (share > 0) & (share < 1) & (distance > 0)
            squares.append(jnp.where(opposite, distance * distance, jnp.inf))
            axes.append((2.0, (-normal[0], -normal[1]), corner))
    square, (kind, normal, anchor) = once(smallest(once(squares), axes))
    distance = jnp.where(apart, jnp.sqrt(square), 0.0)
    length = jnp.where((kind == 0) & apart, distance, 1.0)
    return distance, Axis(kind == 2, (normal[0] / length, normal[1] / length), anchor)


def separation_along(axis: Axis, pose: Pose, witness: tuple[Pair, Pair]) -> Array:
    """How far two points, one of the edge and one of the polygon, are apart along an axis."""
    rotation = pose.rotation()
    normal = choose(axis.on_body, turned(rotation, axis.normal), axis.normal)
    of_edge, of_polygon = witness
    return dot(minus(plus(pose.position, turned(rotation, of_polygon)), of_edge), normal)


def deepest(shape: Shape, axis: Axis, pose: Pose, edge: Edge) -> tuple[Pair, Pair]:
    """The points of edge and polygon that are furthest into each other along an axis."""
    rotation = pose.rotation()
    normal = choose(axis.on_body, turned(rotation, axis.normal), axis.normal)
    local = turned_back(rotation, normal)
    of_edge = choose(dot(edge.end, normal) > dot(edge.start, normal), edge.end, edge.start)
    _, corner = smallest(tuple(dot(corner, local) for corner in shape.corners), shape.corners)
    return of_edge, choose(axis.on_body, axis.anchor, corner)


def impact(shape: Shape, start: Pose, end: Pose, edge: Edge, wanted: Array) -> tuple[Array, Array]:
    """Whether a polygon on its way from `start` to `end` comes to touch an edge, and after which share of the way.

    Conservative advancement along separating axes (b2TimeOfImpact), with its order of bisection and secant.
    """
    zero, one = jnp.zeros_like(start.angle), jnp.ones_like(start.angle)
    near, far = IMPACT_DISTANCE - IMPACT_TOLERANCE, IMPACT_DISTANCE + IMPACT_TOLERANCE

    def root(
        axis: Axis, witness: tuple[Pair, Pair], low: Array, high: Array, at_low: Array, at_high: Array, run: Array
    ):
        def narrow(carry):
            count, low, high, at_low, at_high, share, run = carry
            secant = low + (IMPACT_DISTANCE - at_low) * (high - low) / jnp.where(run, at_high - at_low, 1.0)
            tried = jnp.where((count & 1) == 1, secant, 0.5 * (low + high))
            found = separation_along(axis, between(start, end, tried), witness)
            hit = run & (jnp.abs(found - IMPACT_DISTANCE) < IMPACT_TOLERANCE)
            before = found > IMPACT_DISTANCE
            return (
                count + 1,
                jnp.where(before, tried, low),
                jnp.where(before, high, tried),
                jnp.where(before, found, at_low),
                jnp.where(before, at_high, found),
                jnp.where(hit, tried, share),
                run & ~hit,
            )

        carry = (0, low, high, at_low, at_high, high, run)
        return lax.while_loop(lambda carry: (carry[0] < 50) & some(carry[-1]), narrow, carry)[5]

    def push_back(axis: Axis, carry):
        count, first, last, hit, run, pushed = carry
        pose = between(start, end, last)
        witness = deepest(shape, axis, pose, edge)
        at_last = separation_along(axis, pose, witness)
        at_first = separation_along(axis, between(start, end, first), witness)
        reached = pushed & (at_last > near) & (at_last <= far)
        ahead = pushed & (at_last <= near)
        touching = ahead & (at_first >= near) & (at_first <= far)
        pushing = ahead & (at_first > far)
        found = root(axis, witness, first, last, at_first, at_last, pushing)
        return (
            count + 1,
            jnp.where(reached, last, first),
            jnp.where(pushing, found, last),
            hit | touching,
            jnp.where(pushed, reached | pushing, run),
            pushing,
        )

    def advance(carry):
        count, first, hit, run = carry
        distance, axis = closest(shape, between(start, end, first), edge)
        touching = run & (distance > 0) & (distance < far)
        hit, run = hit | touching, run & (distance >= far)
        _, first, _, hit, run, _ = lax.while_loop(
            lambda carry: (carry[0] < 16) & some(carry[-1]), partial(push_back, axis), (0, first, one, hit, run, run)
        )
        return count + 1, first, hit, run

    carry = (0, zero, zero > 0, wanted)
    _, share, hit, _ = lax.while_loop(lambda carry: (carry[0] < 20) & some(carry[-1]), advance, carry)
    return hit, share


def out_of_reach(shape: Shape, start: Pose, end: Pose, edge: Edge, distance: float) -> Array:
    """Whether it is plain that a polygon on its way keeps a distance to an edge: it stays above it, or to one side."""
    above, left, right = [], [], []
    for pose in (start, end):
        rotation = pose.rotation()
        centre = minus(pose.position, edge.start)
        normal = turned_back(rotation, edge.normal)
        above.append(smallest([dot(normal, corner) for corner in shape.corners])[0] + dot(edge.normal, centre))
        across = [turned(rotation, corner)[0] for corner in shape.corners]
        left.append(smallest(across)[0] + centre[0] - (edge.end[0] - edge.start[0]))
        right.append(smallest([-x for x in across])[0] - centre[0])
    # Between start and end, a corner that turns strays from the straight line by this much.
    turn = end.angle - start.angle
    far = distance + SLOP / 2 + shape.reach * turn * turn / 8
    return (jnp.minimum(*above) > far) | (jnp.minimum(*left) > far) | (jnp.minimum(*right) > far)


def moved(pose: Pose, velocity: Velocity, time: Any) -> Pose:
    return Pose(plus(pose.position, times(time, velocity.linear)), pose.angle + time * velocity.spin)


def differs(before: Velocity, after: Velocity) -> Array:
    """Whether a round of the velocity solver has still changed anything to speak of."""
    (x, y), spin = jax.tree.map(lambda a, b: jnp.abs(a - b) > SETTLED, before, after)
    return x | y | spin


def shifted(before: Pose, after: Pose) -> Array:
    (x, y), angle = jax.tree.map(lambda a, b: jnp.abs(a - b) > UNMOVED, before, after)
    return x | y | angle
