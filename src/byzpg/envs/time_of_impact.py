"""When a moving polygon touches an edge of the ground (b2TimeOfImpact of Box2D 2.3), elementwise as in `box2d`."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from byzpg.envs.box2d import (
    SLOP,
    Edge,
    Pair,
    Pose,
    Shape,
    between,
    dot,
    minus,
    plus,
    rotated,
    rotated_back,
    smallest,
    times,
)
from byzpg.envs.loops import any_true, choose, computed_once

# From b2Settings.h and b2TimeOfImpact.cpp. Two shapes at IMPACT_DISTANCE from each other count as touching.
IMPACT_DISTANCE, IMPACT_TOLERANCE = 0.005, 0.00125
LARGEST_ROOT_ITERATIONS, LARGEST_ADVANCES = 50, 20
# Pushes are numbered from 0. A limit of 16, where 16 is also a size of a layer, would delay the compilation of kernels:
# see `kernels.Apart`.
LAST_PUSH = 15

# What the closest points of a polygon and an edge are: two corners, a corner of the polygon and the edge's face, or an
# end of the edge and one of the polygon's faces.
CORNERS, EDGE_FACE, POLYGON_FACE = 0.0, 1.0, 2.0


class Axis(NamedTuple):
    """A direction from an edge to a polygon: opposite to the normal of one of the polygon's faces, or fixed."""

    on_body: Array
    normal: Pair
    anchor: Pair  # a corner of that face


def closest(shape: Shape, pose: Pose, edge: Edge) -> tuple[Array, Axis]:
    """The distance between a polygon and an edge, 0 if they overlap, and the axis along which it is measured."""
    rotation = pose.rotation()
    corners = computed_once(
        tuple(minus(plus(pose.position, rotated(rotation, corner)), edge.start) for corner in shape.corners)
    )
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
        axes.append((jnp.where(inside, EDGE_FACE, CORNERS), choose(inside, upright, gap), nowhere))
    ends = computed_once(tuple(rotated_back(rotation, minus(end, pose.position)) for end in (edge.start, edge.end)))
    for (corner, other), normal in zip(shape.sides, shape.normals, strict=True):
        side = other[0] - corner[0], other[1] - corner[1]
        distances = tuple(dot(minus(end, corner), normal) for end in ends)
        apart = apart | ((distances[0] > 0) & (distances[1] > 0))
        for end, distance in zip(ends, distances, strict=True):
            share = dot(minus(end, corner), side) / (side[0] * side[0] + side[1] * side[1])
            opposite = (share > 0) & (share < 1) & (distance > 0)
            squares.append(jnp.where(opposite, distance * distance, jnp.inf))
            axes.append((POLYGON_FACE, (-normal[0], -normal[1]), corner))
    square, (kind, normal, anchor) = computed_once(smallest(computed_once(squares), axes))
    distance = jnp.where(apart, jnp.sqrt(square), 0.0)
    length = jnp.where((kind == CORNERS) & apart, distance, 1.0)
    return distance, Axis(kind == POLYGON_FACE, (normal[0] / length, normal[1] / length), anchor)


def separation_along(axis: Axis, pose: Pose, witness: tuple[Pair, Pair]) -> Array:
    """The distance along an axis between two points, one of the edge and one of the polygon."""
    rotation = pose.rotation()
    normal = choose(axis.on_body, rotated(rotation, axis.normal), axis.normal)
    of_edge, of_polygon = witness
    return dot(minus(plus(pose.position, rotated(rotation, of_polygon)), of_edge), normal)


def deepest(shape: Shape, axis: Axis, pose: Pose, edge: Edge) -> tuple[Pair, Pair]:
    """The points of the edge and the polygon that overlap most along an axis."""
    rotation = pose.rotation()
    normal = choose(axis.on_body, rotated(rotation, axis.normal), axis.normal)
    local = rotated_back(rotation, normal)
    of_edge = choose(dot(edge.end, normal) > dot(edge.start, normal), edge.end, edge.start)
    _, corner = smallest(tuple(dot(corner, local) for corner in shape.corners), shape.corners)
    return of_edge, choose(axis.on_body, axis.anchor, corner)


class _Bracket(NamedTuple):
    """The search for the share of the way at which two points have the distance `IMPACT_DISTANCE` along an axis."""

    count: Any
    low: Array
    high: Array
    at_low: Array  # the distance at `low`
    at_high: Array
    root: Array
    searching: Array


class _Advance(NamedTuple):
    """One axis of conservative advancement."""

    count: Any
    first: Array  # until this share of the way, nothing touches
    last: Array
    hit: Array
    going: Array  # no result yet
    pushing: Array  # `last` can still be pushed back along this axis


class _Impact(NamedTuple):
    """Conservative advancement over all axes."""

    count: Any
    share: Array
    hit: Array
    going: Array


class _Way(NamedTuple):
    """The motion of a polygon during a step, and the edge that it may touch."""

    start: Pose
    end: Pose
    edge: Edge

    def at(self, share: Array) -> Pose:
        return between(self.start, self.end, share)


def _impact_root(way: _Way, axis: Axis, witness: tuple[Pair, Pair], bracket: _Bracket) -> Array:
    """Narrow a bracket by bisection and secant steps in turn."""

    def narrow(at: _Bracket) -> _Bracket:
        secant = at.low + (IMPACT_DISTANCE - at.at_low) * (at.high - at.low) / jnp.where(
            at.searching, at.at_high - at.at_low, 1.0
        )
        tried = jnp.where((at.count & 1) == 1, secant, 0.5 * (at.low + at.high))
        found = separation_along(axis, way.at(tried), witness)
        hit = at.searching & (jnp.abs(found - IMPACT_DISTANCE) < IMPACT_TOLERANCE)
        before = found > IMPACT_DISTANCE
        return _Bracket(
            count=at.count + 1,
            low=jnp.where(before, tried, at.low),
            high=jnp.where(before, at.high, tried),
            at_low=jnp.where(before, found, at.at_low),
            at_high=jnp.where(before, at.at_high, found),
            root=jnp.where(hit, tried, at.root),
            searching=at.searching & ~hit,
        )

    return lax.while_loop(
        lambda at: (at.count < LARGEST_ROOT_ITERATIONS) & any_true(at.searching), narrow, bracket
    ).root


def _push_back(shape: Shape, way: _Way, axis: Axis, at: _Advance) -> _Advance:
    """Move `last` back to where the points that overlap most at `last` touch."""
    near, far = IMPACT_DISTANCE - IMPACT_TOLERANCE, IMPACT_DISTANCE + IMPACT_TOLERANCE
    pose = way.at(at.last)
    witness = deepest(shape, axis, pose, way.edge)
    at_last = separation_along(axis, pose, witness)
    at_first = separation_along(axis, way.at(at.first), witness)
    reached = at.pushing & (at_last > near) & (at_last <= far)
    ahead = at.pushing & (at_last <= near)
    touching = ahead & (at_first >= near) & (at_first <= far)
    pushing = ahead & (at_first > far)
    root = _impact_root(
        way,
        axis,
        witness,
        _Bracket(0, at.first, at.last, at_low=at_first, at_high=at_last, root=at.last, searching=pushing),
    )
    return _Advance(
        count=at.count + 1,
        first=jnp.where(reached, at.last, at.first),
        last=jnp.where(pushing, root, at.last),
        hit=at.hit | touching,
        going=jnp.where(at.pushing, reached | pushing, at.going),
        pushing=pushing,
    )


def impact(shape: Shape, start: Pose, end: Pose, edge: Edge, needed: Array) -> tuple[Array, Array]:
    """Whether a polygon touches an edge on its way from `start` to `end`, and after which share of the way.

    This is conservative advancement along separating axes, in the order of b2TimeOfImpact.
    """
    way = _Way(start, end, edge)
    zero, one = jnp.zeros_like(start.angle), jnp.ones_like(start.angle)
    far = IMPACT_DISTANCE + IMPACT_TOLERANCE

    def advance(at: _Impact) -> _Impact:
        distance, axis = closest(shape, way.at(at.share), edge)
        touching = at.going & (distance > 0) & (distance < far)
        hit, going = at.hit | touching, at.going & (distance >= far)
        found = lax.while_loop(
            lambda at: (at.count <= LAST_PUSH) & any_true(at.pushing),
            partial(_push_back, shape, way, axis),
            _Advance(0, first=at.share, last=one, hit=hit, going=going, pushing=going),
        )
        return _Impact(at.count + 1, found.first, found.hit, found.going)

    found = lax.while_loop(
        lambda at: (at.count < LARGEST_ADVANCES) & any_true(at.going),
        advance,
        _Impact(0, share=zero, hit=zero > 0, going=needed),
    )
    return found.hit, found.share


def out_of_reach(shape: Shape, start: Pose, end: Pose, edge: Edge, distance: float) -> Array:
    """Whether a polygon certainly keeps a distance from an edge on its way, as it stays above it or to one side."""
    above, left, right = [], [], []
    for pose in (start, end):
        rotation = pose.rotation()
        centre = minus(pose.position, edge.start)
        normal = rotated_back(rotation, edge.normal)
        above.append(smallest([dot(normal, corner) for corner in shape.corners])[0] + dot(edge.normal, centre))
        across = [rotated(rotation, corner)[0] for corner in shape.corners]
        left.append(smallest(across)[0] + centre[0] - (edge.end[0] - edge.start[0]))
        right.append(smallest([-x for x in across])[0] - centre[0])
    # While the polygon turns, a corner deviates from the straight line between its two places by at most the last term.
    turn = end.angle - start.angle
    far = distance + SLOP / 2 + shape.reach * turn * turn / 8
    return (jnp.minimum(*above) > far) | (jnp.minimum(*left) > far) | (jnp.minimum(*right) > far)
