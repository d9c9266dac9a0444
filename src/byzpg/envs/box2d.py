"""The part of Box2D 2.3 (Catto) that a lander needs: polygons that collide with edges of the ground.

These are collision manifolds (b2CollideEdge) and contacts in both solvers (b2ContactSolver); `time_of_impact` has the
rest. Everything is elementwise: every array has the shape of the batch, and lists are Python tuples.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from byzpg.envs.loops import choose, computed_once

# From b2Settings.h. Each shape has a skin of 0.01, and shapes that touch overlap by about `SLOP`.
THICKNESS, SLOP = 0.02, 0.005
LARGEST_CORRECTION = 0.2
LARGEST_CONDITION = 1000.0
# Unlike Box2D, which always runs all its iterations, a solver stops after a round that changes less than this.
SETTLED, UNMOVED = 1e-6, 1e-6

Pair = tuple[Array, ...]  # x and y, or one value for each of two things
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


def rotated(rotation: Pair, a: Any) -> Pair:
    """`a` rotated by an angle, given as (sine, cosine)."""
    sine, cosine = rotation
    return cosine * a[0] - sine * a[1], sine * a[0] + cosine * a[1]


def rotated_back(rotation: Pair, a: Any) -> Pair:
    """The inverse of `rotated`."""
    sine, cosine = rotation
    return cosine * a[0] + sine * a[1], cosine * a[1] - sine * a[0]


def smallest(values: Sequence[Array], items: Sequence[Any] | None = None) -> tuple[Array, Any]:
    """The smallest of the values and its item; the first one if several are equal."""
    value, item = values[0], items[0] if items else None
    for i in range(1, len(values)):
        less = values[i] < value
        value, item = jnp.where(less, values[i], value), choose(less, items[i], item) if items else None
    return value, item


class Face(NamedTuple):
    """A face of a polygon, from its corner of the same number to the next corner."""

    number: int
    corner: Point
    normal: Point  # outward


class Shape:
    """A convex polygon of uniform density.

    Args:
        corners: The corners, counter-clockwise.
        density: The mass per area.
        friction: The coefficient of friction with the ground.
    """

    def __init__(self, corners: tuple[Point, ...], density: float, friction: float = 0.0) -> None:
        sides = tuple(zip(corners, corners[1:] + corners[:1], strict=True))
        areas = [(a[0] * b[1] - a[1] * b[0]) / 2 for a, b in sides]
        self.inverse_mass = 1 / (density * sum(areas))
        self.friction = friction
        self.centre: Point = tuple(
            sum(area * (a[i] + b[i]) / 3 for area, (a, b) in zip(areas, sides, strict=True)) / sum(areas)
            for i in range(2)
        )
        # From here on, coordinates are relative to the centre of mass.
        self.corners = tuple((x - self.centre[0], y - self.centre[1]) for x, y in corners)
        self.reach = max(sqrt(x * x + y * y) for x, y in self.corners)
        self.sides = tuple(zip(self.corners, self.corners[1:] + self.corners[:1], strict=True))
        self.inverse_inertia = 1 / sum(
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
        faces = tuple(map(Face, range(len(corners)), self.corners, self.normals))
        self.face_pairs = tuple(zip(faces, faces[1:] + faces[:1], strict=True))  # each face and the next one


class Pose(NamedTuple):
    position: Pair  # of the centre of mass
    angle: Array

    def rotation(self) -> Pair:
        return computed_once((jnp.sin(self.angle), jnp.cos(self.angle)))

    def point(self, local: Any) -> Pair:
        """Where a point in the body's frame is in the world."""
        return plus(self.position, rotated(self.rotation(), local))


class Velocity(NamedTuple):
    linear: Pair
    spin: Array

    def pushed(self, shape: Shape, impulse: Pair, twist: Array) -> "Velocity":
        """The velocity after a linear and an angular impulse."""
        return Velocity(
            plus(self.linear, times(shape.inverse_mass, impulse)), self.spin + twist * shape.inverse_inertia
        )


class Edge(NamedTuple):
    start: Pair
    end: Pair
    normal: Pair  # upwards


class Manifold(NamedTuple):
    """Where a polygon touches an edge: a reference face and up to two points, each in the frame of its own body."""

    on_body: Array  # true: the face is the polygon's and the points are the edge's; false: the other way round
    normal: Pair
    plane: Pair
    points: tuple[Pair, Pair]
    keys: Pair  # −1: no such point


class ContactConstraint(NamedTuple):
    """A contact in the form that the velocity solver needs. A point that does not exist has no mass."""

    normal: Pair
    normal_arms: Pair
    tangent_arms: Pair
    normal_masses: Pair
    tangent_masses: Pair
    compliance: tuple[Array, Array, Array]
    inverse_determinant: Array  # of the compliance
    both: Array  # whether the solver treats two points


class Impulses(NamedTuple):
    """The impulses at the two points of a contact."""

    normal: Pair
    tangent: Pair


class Contact(NamedTuple):
    """What is kept from step to step for a polygon and an edge: up to two points by key, and their impulses."""

    keys: Pair  # −1: no such point
    normal: Pair
    tangent: Pair


def clip_segment(
    points: tuple[Pair, Pair], keys: Pair, *, normal: Pair, offset: Array, new_key: Array
) -> tuple[tuple[Pair, Pair], Pair, Array]:
    """The part of a segment behind a line, the keys of its ends, and whether there is such a part."""
    first, second = (dot(normal, point) - offset for point in points)
    crossing = first * second < 0
    share = first / jnp.where(crossing, first - second, 1.0)
    cut = plus(points[0], times(share, minus(points[1], points[0])))
    behind = first <= 0
    new_points = choose(behind, points[0], points[1]), choose(crossing, cut, points[1])
    new_keys = jnp.where(behind, keys[0], keys[1]), jnp.where(crossing, new_key, keys[1])
    return new_points, new_keys, crossing | (behind & (second <= 0))


class _LocalEdge(NamedTuple):
    """An edge in the frame of a polygon."""

    start: Pair
    end: Pair
    facing: Pair  # the edge's normal on the side of the polygon's centre
    below: Array  # whether the polygon's centre is below the edge


def _in_frame(edge: Edge, pose: Pose, rotation: Pair) -> _LocalEdge:
    start, end = computed_once(
        tuple(rotated_back(rotation, minus(point, pose.position)) for point in (edge.start, edge.end))
    )
    upwards = computed_once(rotated_back(rotation, edge.normal))
    below = dot(upwards, start) >= 0
    return _LocalEdge(start, end, choose(below, times(-1.0, upwards), upwards), below)


def _least_overlap(shape: Shape, edge: _LocalEdge) -> tuple[Array, tuple[Any, Any]]:
    """How far the edge is behind the polygon's face that it is least behind; that face and the next one."""
    return computed_once(
        smallest(
            [
                dot(normal, corner) - jnp.minimum(dot(normal, edge.start), dot(normal, edge.end))
                for corner, normal in zip(shape.corners, shape.normals, strict=True)
            ],
            shape.face_pairs,
        )
    )


def collide(shape: Shape, pose: Pose, edge: Edge) -> Manifold:
    """The manifold of a polygon and an edge without neighbours, which collides on both sides (b2CollideEdge)."""
    rotation = pose.rotation()
    local = _in_frame(edge, pose, rotation)
    facing, below = local.facing, local.below
    edge_separation = smallest([dot(facing, corner) for corner in shape.corners])[0] - dot(facing, local.start)
    overlap, (face, after) = _least_overlap(shape, local)
    # Hysteresis: the reference face is the edge, unless a face of the polygon clearly overlaps less.
    on_body = -overlap > 0.98 * edge_separation + 0.001
    _, (incident, beyond) = computed_once(smallest([dot(facing, normal) for normal in shape.normals], shape.face_pairs))

    # A key stands for a b2ContactID: 0… is a corner of the polygon, 8… or 16… a cut at an end of the edge, and
    # 32 × face… a point on a face of the polygon. Two keys are equal where Box2D's are.
    start_key, end_key = jnp.where(below, 8.0, 16.0), jnp.where(below, 16.0, 8.0)
    points = choose(on_body, (local.start, local.end), (incident.corner, beyond.corner))
    keys = choose(on_body, (32.0 * face.number, 32.0 * face.number), (incident.number + 0.0, beyond.number + 0.0))
    reference = choose(
        on_body,
        (face.corner, after.corner),
        choose(below, (local.start, local.end), (local.end, local.start)),
    )
    normal = choose(on_body, face.normal, facing)
    across = (normal[1], -normal[0])
    new_key = jnp.where(on_body, 33.0 * face.number, keys[0] + start_key)
    points, keys, first_part = clip_segment(
        points, keys, normal=across, offset=dot(across, reference[0]), new_key=new_key
    )
    points, keys = computed_once((points, keys))
    new_key = jnp.where(on_body, 32.0 * face.number + after.number, keys[0] - 8.0 * jnp.floor(keys[0] / 8.0) + end_key)
    across = times(-1.0, across)
    points, keys, second_part = clip_segment(
        points, keys, normal=across, offset=dot(across, reference[1]), new_key=new_key
    )
    points, keys = computed_once((points, keys))

    touching = (edge_separation <= THICKNESS) & (-overlap <= THICKNESS) & first_part & second_part
    first, second = (touching & (dot(normal, minus(point, reference[0])) <= THICKNESS) for point in points)
    in_world = tuple(plus(pose.position, rotated(rotation, point)) for point in points)
    points = choose(on_body, in_world, points)
    on_edge = choose(below, (times(-1.0, edge.normal), edge.start), (edge.normal, edge.end))
    normal, plane = choose(on_body, (face.normal, face.corner), on_edge)
    keys = (
        jnp.where(first, keys[0], jnp.where(second, keys[1], -1.0)),
        jnp.where(first & second, keys[1], -1.0),
    )
    return Manifold(on_body, *computed_once((normal, plane, (choose(first, points[0], points[1]), points[1]), keys)))


def world_manifold(manifold: Manifold, pose: Pose, point: Pair) -> tuple[Pair, Pair, Array]:
    """In world coordinates: the normal from the edge to the polygon, a point, and the separation there."""
    rotation = pose.rotation()
    normal = choose(manifold.on_body, rotated(rotation, manifold.normal), manifold.normal)
    plane = choose(manifold.on_body, plus(pose.position, rotated(rotation, manifold.plane)), manifold.plane)
    point = choose(manifold.on_body, point, plus(pose.position, rotated(rotation, point)))
    separation = dot(minus(point, plane), normal)
    return choose(manifold.on_body, times(-1.0, normal), normal), point, separation


def updated_contact(contact: Contact, manifold: Manifold, grounded: Array) -> tuple[Contact, Array]:
    """A contact with the impulses of the points that still exist, and whether the polygon counts as grounded.

    As in Gymnasium, events decide the latter: the begin of a contact sets the flag, and the end of any contact clears
    it, even while another contact persists.
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


def contact_constraint(shape: Shape, manifold: Manifold, pose: Pose) -> ContactConstraint:
    """Prepare a contact for the velocity solver."""
    found = computed_once(tuple(world_manifold(manifold, pose, point) for point in manifold.points))
    normal = found[0][0]
    tangent = normal[1], -normal[0]
    first, second = (key >= 0 for key in manifold.keys)
    # Each point is moved along the reference face's normal to the middle between polygon and edge.
    arms = tuple(
        minus(plus(point, times(jnp.where(manifold.on_body, 0.5, -0.5) * separation, normal)), pose.position)
        for _, point, separation in found
    )
    normal_arms, tangent_arms = computed_once(
        tuple(tuple(cross(arm, direction) for arm in arms) for direction in (normal, tangent))
    )

    def compliance(a: Array, b: Array) -> Array:
        return shape.inverse_mass + a * b * shape.inverse_inertia

    one, other = normal_arms
    along_normal = compliance(one, one), compliance(one, other), compliance(other, other)
    determinant = along_normal[0] * along_normal[2] - along_normal[1] * along_normal[1]
    both = second & (along_normal[0] * along_normal[0] < LARGEST_CONDITION * determinant)
    present = first, both
    return ContactConstraint(
        normal,
        normal_arms,
        tangent_arms,
        tuple(jnp.where(here, 1 / compliance(arm, arm), 0.0) for here, arm in zip(present, normal_arms, strict=True)),
        tuple(jnp.where(here, 1 / compliance(arm, arm), 0.0) for here, arm in zip(present, tangent_arms, strict=True)),
        along_normal,
        1 / jnp.where(both, determinant, 1.0),
        both,
    )


def solver_impulses(constraint: ContactConstraint, contact: Contact) -> Impulses:
    """The impulses of the points that the velocity solver treats, from the previous step."""
    return Impulses(
        (contact.normal[0], jnp.where(constraint.both, contact.normal[1], 0.0)),
        (contact.tangent[0], jnp.where(constraint.both, contact.tangent[1], 0.0)),
    )


def stored_contact(constraint: ContactConstraint, contact: Contact, impulses: Impulses) -> Contact:
    """The contact with the solver's impulses; a point that the solver did not treat keeps its own."""
    return Contact(
        contact.keys,
        (impulses.normal[0], jnp.where(constraint.both, impulses.normal[1], contact.normal[1])),
        (impulses.tangent[0], jnp.where(constraint.both, impulses.tangent[1], contact.tangent[1])),
    )


def warm_started(shape: Shape, constraint: ContactConstraint, impulses: Impulses, velocity: Velocity) -> Velocity:
    """The velocity after applying the impulses of the previous step."""
    (a, b), (c, d) = impulses
    normal, tangent = constraint.normal, (constraint.normal[1], -constraint.normal[0])
    impulse = plus(times(a + b, normal), times(c + d, tangent))
    return velocity.pushed(shape, impulse, dot(constraint.normal_arms, (a, b)) + dot(constraint.tangent_arms, (c, d)))


def normal_impulses(constraint: ContactConstraint, old: Pair, away: Array, spin: Array) -> Pair:
    """The normal impulses that stop both points of a contact from approaching the edge.

    They solve a linear complementarity problem by cases: both points push, only the first pushes, only the second
    pushes, or none does.

    Args:
        constraint: The contact.
        old: The impulses of the previous round.
        away: The velocity along the normal.
        spin: The angular velocity.
    """
    (one, other), (old_one, old_other) = constraint.normal_arms, old
    k_one, k_mixed, k_other = constraint.compliance
    left_one = away + spin * one - (k_one * old_one + k_mixed * old_other)
    left_other = away + spin * other - (k_mixed * old_one + k_other * old_other)
    both = (
        (k_mixed * left_other - k_other * left_one) * constraint.inverse_determinant,
        (k_mixed * left_one - k_one * left_other) * constraint.inverse_determinant,
    )
    first, second = -left_one * constraint.normal_masses[0], -left_other * constraint.normal_masses[1]
    both_push = constraint.both & (both[0] >= 0) & (both[1] >= 0)
    first_pushes = (first >= 0) & (~constraint.both | (k_mixed * first + left_other >= 0))
    second_pushes = constraint.both & (second >= 0) & (k_mixed * second + left_one >= 0)
    none_push = (left_one >= 0) & (~constraint.both | (left_other >= 0))
    new_one = jnp.where(
        both_push,
        both[0],
        jnp.where(first_pushes, first, jnp.where(second_pushes | none_push, 0.0, old_one)),
    )
    new_other = jnp.where(
        both_push,
        both[1],
        jnp.where(first_pushes, 0.0, jnp.where(second_pushes, second, jnp.where(none_push, 0.0, old_other))),
    )
    return new_one, new_other


def solve_contact_velocity(
    shape: Shape, constraint: ContactConstraint, impulses: Impulses, velocity: Velocity
) -> tuple[Impulses, Velocity]:
    """One round of the velocity solver: friction at each point, then both normal impulses at once (b2ContactSolver)."""
    normal, tangent = constraint.normal, (constraint.normal[1], -constraint.normal[0])
    along, away, spin = dot(velocity.linear, tangent), dot(velocity.linear, normal), velocity.spin
    friction = []
    for arm, mass, pressure, old in zip(
        constraint.tangent_arms, constraint.tangent_masses, impulses.normal, impulses.tangent, strict=True
    ):
        limit = shape.friction * pressure
        new = jnp.clip(old - (along + spin * arm) * mass, -limit, limit)
        along, spin = along + (new - old) * shape.inverse_mass, spin + (new - old) * arm * shape.inverse_inertia
        friction.append(new)
    rubbed = friction[0] - impulses.tangent[0] + friction[1] - impulses.tangent[1]

    (one, other), (old_one, old_other) = constraint.normal_arms, impulses.normal
    new_one, new_other = normal_impulses(constraint, impulses.normal, away, spin)
    more_one, more_other = new_one - old_one, new_other - old_other
    spin = spin + (one * more_one + other * more_other) * shape.inverse_inertia
    impulse = plus(times(more_one + more_other, normal), times(rubbed, tangent))
    linear = plus(velocity.linear, times(shape.inverse_mass, impulse))
    return Impulses((new_one, new_other), (friction[0], friction[1])), Velocity(linear, spin)


def solve_contact_position(shape: Shape, manifold: Manifold, pose: Pose, correction: float) -> tuple[Pose, Array]:
    """One round of the position solver at each point of a contact: the new pose, and the least separation found."""
    least = jnp.zeros_like(pose.angle)
    for key, point in zip(manifold.keys, manifold.points, strict=True):
        normal, spot, separation = world_manifold(manifold, pose, point)
        separation = computed_once(jnp.where(key >= 0, separation - THICKNESS, 0.0))
        least = jnp.minimum(least, separation)
        arm = cross(minus(spot, pose.position), normal)
        depth = jnp.clip(correction * (separation + SLOP), -LARGEST_CORRECTION, 0.0)
        impulse = -depth / (shape.inverse_mass + arm * arm * shape.inverse_inertia)
        pose = Pose(
            plus(pose.position, times(impulse * shape.inverse_mass, normal)),
            pose.angle + impulse * arm * shape.inverse_inertia,
        )
    return pose, least


def between(start: Pose, end: Pose, share: Array) -> Pose:
    """The pose after a share of the way from start to end."""
    return jax.tree.map(lambda a, b: (1 - share) * a + share * b, start, end)


def moved(pose: Pose, velocity: Velocity, time: Any) -> Pose:
    """The pose after moving at a velocity for a time."""
    return Pose(plus(pose.position, times(time, velocity.linear)), pose.angle + time * velocity.spin)


def velocity_changed(before: Velocity, after: Velocity) -> Array:
    """Whether a round of the velocity solver has changed more than `SETTLED`."""
    (x, y), spin = jax.tree.map(lambda a, b: jnp.abs(a - b) > SETTLED, before, after)
    return x | y | spin


def pose_changed(before: Pose, after: Pose) -> Array:
    """Whether a round of the position solver has changed more than `UNMOVED`."""
    (x, y), angle = jax.tree.map(lambda a, b: jnp.abs(a - b) > UNMOVED, before, after)
    return x | y | angle
