"""One time step of the lander: what b2World::Step of Box2D 2.3 (Catto) does for Gymnasium's task, in the same order.

Every array has the shape of the batch, and lists are Python tuples.
"""

from collections.abc import Sequence
from functools import partial
from math import pi
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.envs.box2d import (
    SETTLED,
    SLOP,
    THICKNESS,
    Contact,
    ContactConstraint,
    Edge,
    Impulses,
    Manifold,
    Pair,
    Pose,
    Velocity,
    between,
    collide,
    contact_constraint,
    dot,
    minus,
    moved,
    plus,
    pose_changed,
    solve_contact_position,
    solve_contact_velocity,
    solver_impulses,
    stored_contact,
    times,
    updated_contact,
    velocity_changed,
    warm_started,
)
from byzpg.envs.lander_bodies import (
    HINGE_LIMITS,
    HULL,
    LEG,
    LEG_SIDES,
    TIME_STEP,
    Body,
    Box,
    Ground,
    Hinge,
    HingeConstraint,
    Leg,
    apply_hinge_impulse,
    edges_below,
    hinge_at_start,
    hinge_constraint,
    solve_hinge_position,
    solve_hinge_velocity,
)
from byzpg.envs.loops import Loops, any_true, choose, computed_once
from byzpg.envs.time_of_impact import IMPACT_DISTANCE, impact, out_of_reach

GRAVITY = -10.0
# From b2Settings.h and b2World.
VELOCITY_ITERATIONS, POSITION_ITERATIONS, IMPACT_POSITION_ITERATIONS = 180, 60, 20
CORRECTION, IMPACT_CORRECTION = 0.2, 0.75
STILL_SPEED, STILL_SPIN, TIME_TO_SLEEP = 0.01, 2 / 180 * pi, 0.5
LARGEST_SUBSTEPS = 8
LAST_IMPACT = 1 - 1e-6
BOX_MARGIN = 0.1
# In flight, once the legs are spread, the solvers settle after this many rounds.
USUAL_VELOCITY_ITERATIONS, USUAL_POSITION_ITERATIONS = 6, 2
# On CPUs, the number of hulls or legs that hit the ground at once.
CHUNK = 16


# Contacts of a leg with the ground (b2ContactManager)


class GroundContacts(NamedTuple):
    """The contacts of a leg with the two edges next to it.

    The contact that touches comes first. If both touch, it is the newer one.
    """

    edges: tuple[Edge, Edge]
    manifolds: tuple[Manifold, Manifold]
    constraints: tuple[ContactConstraint, ContactConstraint]
    contacts: tuple[Contact, Contact]
    odd_first: Array
    ages: Pair
    grounded: Array


def nearby_edges(ground: Ground, leg: Leg) -> tuple[tuple[Edge, Edge], Pair]:
    """The two edges next to a leg, and their ages (see `Leg`)."""
    edges, even_right = edges_below(ground, leg.body.pose.position[0])
    near = computed_once(tuple(overlaps(leg.box, edge) for edge in edges))
    fresh = tuple(inside & (age == 0) for inside, age in zip(near, leg.ages, strict=True))
    later = even_right, ~even_right  # if both come near in the same step, the right one counts as the later one
    ages = tuple(
        jnp.where(
            near[i],
            jnp.where(
                fresh[i], jnp.where(fresh[1 - i] & ~later[i], 2.0, 1.0), jnp.where(fresh[1 - i], 2.0, leg.ages[i])
            ),
            0.0,
        )
        for i in (0, 1)
    )
    return edges, computed_once(ages)


def find_contacts(loops: Loops, ground: Ground, leg: Leg) -> GroundContacts:
    """Where a leg touches the ground (b2ContactManager::Collide)."""
    pose = leg.body.pose
    edges, ages = nearby_edges(ground, leg)
    manifolds = loops.map(lambda item: collide(LEG, *item), tuple((pose, edge) for edge in edges))
    odd_newer = ages[1] < ages[0]
    contacts = tuple(updated_contact(leg.contacts[i], manifolds[i], leg.grounded)[0] for i in (0, 1))
    flags = []
    for order in ((0, 1), (1, 0)):
        grounded = leg.grounded
        for i in order:
            grounded = updated_contact(leg.contacts[i], manifolds[i], grounded)[1]
        flags.append(grounded)
    even_touches, odd_touches = (manifold.keys[0] >= 0 for manifold in manifolds)
    odd_first = computed_once(odd_touches & (odd_newer | ~even_touches))
    edges, manifolds, contacts = choose(
        odd_first, (edges[::-1], manifolds[::-1], contacts[::-1]), (edges, manifolds, contacts)
    )
    constraints = loops.map(
        lambda item: contact_constraint(LEG, *item), tuple((manifold, pose) for manifold in manifolds)
    )
    return GroundContacts(
        edges,
        manifolds,
        constraints,
        contacts,
        odd_first=odd_first,
        ages=ages,
        grounded=jnp.where(odd_newer, flags[1], flags[0]),
    )


def overlaps(box: Box, edge: Edge) -> Array:
    """Whether a box overlaps the box around an edge."""
    margin = THICKNESS / 2 + BOX_MARGIN
    (left, low), (right, high) = box
    below, above = jnp.minimum(edge.start[1], edge.end[1]) - margin, jnp.maximum(edge.start[1], edge.end[1]) + margin
    return (left <= edge.end[0] + margin) & (right >= edge.start[0] - margin) & (low <= above) & (high >= below)


def updated_box(box: Box, start: Pose, end: Pose) -> Box:
    """The box of a leg that has moved: a new one, extended ahead, if the leg has left the old one (b2DynamicTree)."""
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
    kept = (box[0][0] <= low[0]) & (box[0][1] <= low[1]) & (high[0] <= box[1][0]) & (high[1] <= box[1][1])
    ahead = times(2.0, minus(end.position, start.position))
    new = (
        tuple(a - BOX_MARGIN + jnp.minimum(b, 0.0) for a, b in zip(low, ahead, strict=True)),
        tuple(a + BOX_MARGIN + jnp.maximum(b, 0.0) for a, b in zip(high, ahead, strict=True)),
    )
    return choose(kept, box, new)


# Impacts within a time step (b2World::SolveTOI)


class Sweep(NamedTuple):
    """The motion of a leg within a time step, from one impact to the next."""

    start: Pose
    end: Pose
    velocity: Velocity
    contacts: tuple[Contact, Contact]
    grounded: Array
    passed: Array  # the share of the time step before `start`
    counts: Pair  # the number of impacts, by contact
    enabled: tuple[Array, Array]  # by contact: whether it can have more impacts
    active: Array


class NextImpact(NamedTuple):
    """The next impact of a leg: when, and with which of its two edges."""

    share: Array  # of the way from the sweep's start to its end
    passed: Array  # the share of the time step before the impact
    with_second: Array
    active: Array


def resolve_impacts(loops: Loops, needed: Array, edges: tuple[Edge, Edge], sweep: Sweep) -> Sweep:
    """Move a leg from impact to impact, so that it does not pass into the ground. As in Box2D, its hinge is ignored."""

    def substep(sweep: Sweep) -> Sweep:
        found = next_impact(loops, edges, sweep)
        pose = computed_once(between(sweep.start, sweep.end, found.share))
        manifolds = loops.map(lambda item: collide(LEG, *item), tuple((pose, edge) for edge in edges))
        hits = found.active & ~found.with_second, found.active & found.with_second
        keys = jnp.where(found.with_second, manifolds[1].keys[0], manifolds[0].keys[0])
        solid = found.active & (keys >= 0)
        contacts, grounded = contacts_after_impact(sweep, manifolds, hits, solid)
        order = choose(found.with_second, manifolds[::-1], manifolds)
        start, velocity = solve_impact(loops, order, pose, sweep.velocity, solid)
        end = moved(start, velocity, (1 - found.passed) * TIME_STEP)
        return Sweep(
            start=choose(solid, start, sweep.start),
            end=choose(solid, end, sweep.end),
            velocity=choose(solid, velocity, sweep.velocity),
            contacts=contacts,
            grounded=grounded,
            passed=jnp.where(solid, found.passed, sweep.passed),
            counts=(sweep.counts[0] + hits[0], sweep.counts[1] + hits[1]),
            enabled=(
                jnp.where(found.active, solid | found.with_second, sweep.enabled[0]),
                jnp.where(found.active, solid | ~found.with_second, sweep.enabled[1]),
            ),
            active=found.active,
        )

    return lax.while_loop(lambda sweep: any_true(sweep.active), substep, sweep._replace(active=needed))


def next_impact(loops: Loops, edges: tuple[Edge, Edge], sweep: Sweep) -> NextImpact:
    """When a leg touches either of its edges for the first time."""

    def share_until(item: Any) -> Array:
        edge, count, enabled, (start, end, active) = item
        needed = active & enabled & (count <= LARGEST_SUBSTEPS)
        hit, share = impact(LEG, start, end, edge, needed)
        return jnp.where(hit, share, 1.0)

    way = sweep.start, sweep.end, sweep.active
    first, second = loops.map(share_until, tuple(zip(edges, sweep.counts, sweep.enabled, (way, way), strict=True)))
    with_second = second < first
    share = jnp.minimum(first, second)
    passed = sweep.passed + (1 - sweep.passed) * share
    return NextImpact(share, passed, with_second, sweep.active & (passed < LAST_IMPACT))


def contacts_after_impact(
    sweep: Sweep, manifolds: tuple[Manifold, ...], hits: tuple[Array, Array], solid: Array
) -> tuple[tuple[Contact, Contact], Array]:
    """The contacts after an impact, and whether the leg is grounded.

    Box2D first updates the contact that was hit. It updates the other one only if the first one is solid.
    """
    contacts, grounded = list(sweep.contacts), sweep.grounded
    for due in (hits, (solid & hits[1], solid & hits[0])):
        for i in (0, 1):
            contact, flag = updated_contact(contacts[i], manifolds[i], grounded)
            contacts[i], grounded = choose(due[i], contact, contacts[i]), jnp.where(due[i], flag, grounded)
    return (contacts[0], contacts[1]), grounded


def solve_impact(
    loops: Loops, manifolds: tuple[Manifold, Manifold], pose: Pose, velocity: Velocity, needed: Array
) -> tuple[Pose, Velocity]:
    """Push a leg out of the ground at the moment of an impact, and stop its motion into the ground."""

    def push(manifolds: tuple[Manifold, Manifold], pose: Pose, active: Array) -> tuple[Pose, Array]:
        pushed, first = solve_contact_position(LEG, manifolds[0], pose, IMPACT_CORRECTION)
        pushed, second = solve_contact_position(LEG, manifolds[1], pushed, IMPACT_CORRECTION)
        return choose(active, pushed, pose), active & (jnp.minimum(first, second) < -1.5 * SLOP)

    def stop(
        constraints: tuple[ContactConstraint, ...], state: tuple[Any, Velocity], active: Array
    ) -> tuple[Any, Array]:
        (first, second), before = state
        first, after = solve_contact_velocity(LEG, constraints[0], first, before)
        second, after = solve_contact_velocity(LEG, constraints[1], second, after)
        return ((first, second), after), active & velocity_changed(before, after)

    pose, _ = loops.iterate(
        push,
        manifolds,
        pose,
        needed,
        most=IMPACT_POSITION_ITERATIONS,
        usual=USUAL_POSITION_ITERATIONS,
    )
    constraints = loops.map(
        lambda item: contact_constraint(LEG, *item), tuple((manifold, pose) for manifold in manifolds)
    )
    nothing = jnp.zeros_like(pose.angle), jnp.zeros_like(pose.angle)
    state = (Impulses(nothing, nothing),) * 2, velocity
    (_, velocity), _ = loops.iterate(
        stop,
        constraints,
        state,
        needed,
        most=VELOCITY_ITERATIONS,
        usual=USUAL_VELOCITY_ITERATIONS,
    )
    return pose, velocity


def hull_crashes(loops: Loops, ground: Ground, start: Pose, end: Pose, needed: Array) -> Array:
    """Whether the hull touches the ground on its way."""

    def crash(needed: Array, edge: Edge, start: Pose, end: Pose) -> Array:
        hit, share = impact(HULL, start, end, edge, needed)
        share = jnp.where(hit & (share < LAST_IMPACT), share, 0.0)
        return needed & (collide(HULL, between(start, end, share), edge).keys[0] >= 0)

    def on_edge(item: Any) -> Array:
        edge, start, end, needed = item
        needed = needed & ~out_of_reach(HULL, start, end, edge, THICKNESS)
        return loops.where_needed(needed, crash, (edge, start, end), needed & False, chunk=CHUNK)

    edges, _ = edges_below(ground, start.position[0])
    first, second = loops.map(on_edge, tuple((edge, start, end, needed) for edge in edges))
    return first | second


# The solvers (b2Island::Solve)


class LegMotion(NamedTuple):
    """What the velocity solver changes of a leg."""

    velocity: Velocity
    hinge: Hinge
    impulses: tuple[Impulses, ...]  # of its contacts; none in flight


class VelocityConstants(NamedTuple):
    """What the velocity solver reads, for each leg."""

    hinges: Sequence[HingeConstraint]
    contacts: Sequence[Sequence[ContactConstraint]]  # none in flight
    touching: Sequence[Sequence[Array]]  # whether any lander of the kernel's block has this contact


class Velocities(NamedTuple):
    """What the velocity solver changes."""

    hull: Velocity
    legs: tuple[LegMotion, LegMotion]


class PositionConstants(NamedTuple):
    """What the position solver reads, for each leg."""

    at_limit: Sequence[Array]  # `Hinge.side`
    manifolds: Sequence[Sequence[Manifold]]  # none in flight
    touching: Sequence[Sequence[Array]]  # as above


class Poses(NamedTuple):
    """What the position solver changes."""

    hull: Pose
    legs: tuple[Pose, Pose]
    solved: Array  # whether all errors were within the slop


def velocity_round(
    loops: Loops, constants: VelocityConstants, state: Velocities, active: Array
) -> tuple[Velocities, Array]:
    """One round of the velocity solver, and which lander needs another one.

    Box2D solves both hinges before the contacts. Here each leg's contacts follow its own hinge, which gives the same
    result, since they do not affect the other leg's hinge.
    """
    hull, legs, changes = state.hull, list(state.legs), active & False
    for i in (1, 0):
        before = state.legs[i]
        hinge, hull, velocity = solve_hinge_velocity(
            LEG_SIDES[i], constants.hinges[i], before.hinge, hull, before.velocity
        )
        impulses = list(before.impulses)
        for j, contact in enumerate(constants.contacts[i]):
            impulses[j], velocity = loops.if_any(
                constants.touching[i][j],
                partial(solve_contact_velocity, LEG, contact),
                (impulses[j], velocity),
            )
        legs[i] = LegMotion(velocity, hinge, tuple(impulses))
        changes = changes | velocity_changed(before.velocity, velocity)
        changes = changes | (jnp.abs(hinge.motor - before.hinge.motor) > SETTLED)
    solved, active_next = Velocities(hull, (legs[0], legs[1])), active & (changes | velocity_changed(state.hull, hull))
    # In a kernel, a lander that has settled must not depend on how long the others of its block go on.
    return choose(active, solved, state) if loops.in_kernel else solved, active_next


def position_round(loops: Loops, constants: PositionConstants, state: Poses, active: Array) -> tuple[Poses, Array]:
    """One round of the position solver, and which lander needs another one."""
    hull, legs, good = state.hull, list(state.legs), active
    for i in (0, 1):
        for j, manifold in enumerate(constants.manifolds[i]):
            legs[i], least = loops.if_any(
                constants.touching[i][j],
                lambda pose, _, manifold=manifold: solve_contact_position(LEG, manifold, pose, CORRECTION),
                (legs[i], jnp.zeros_like(legs[i].angle)),
            )
            good = good & (least >= -3 * SLOP)
    for i in (1, 0):
        hull, legs[i], within = solve_hinge_position(
            LEG_SIDES[i], HINGE_LIMITS[i], constants.at_limit[i], hull, legs[i]
        )
        good = good & within
    hull, legs = computed_once((hull, legs))
    # An angle often stays slightly outside its slop, too little for a correction to change it. The solver then stops
    # without having solved the step.
    moves = pose_changed(state.hull, hull) | pose_changed(state.legs[0], legs[0]) | pose_changed(state.legs[1], legs[1])
    hull, legs = choose(active, (hull, (legs[0], legs[1])), (state.hull, state.legs))
    return Poses(hull, legs, state.solved | good), active & ~good & moves


# The time step (b2World::Step)


class Stepped(NamedTuple):
    """The lander after a time step."""

    hull: Body
    legs: tuple[Leg, Leg]
    crashed: Array  # the hull touched the ground
    asleep: Array  # all bodies came to rest
    finished: Array  # whether the solvers finished: see `Loops.may_leave`


def step_world(
    loops: Loops, hull: Body, legs: tuple[Leg, Leg], ground: Ground, active: Array, *, airborne: bool
) -> Stepped:
    """Advance the lander by one time step.

    Args:
        loops: How loops run.
        hull: The hull, after the impulses of the engines.
        legs: The legs.
        ground: The heights of the ground.
        active: Which landers of the batch need the step. The results of others are meaningless.
        airborne: Whether no lander can touch the ground in this step. Nothing is then compiled for contacts.
    """
    contacts = () if airborne else loops.map(partial(find_contacts, loops, ground), legs)
    constants, velocities = at_start(loops, hull, legs, contacts, active)
    velocities, unsettled = loops.iterate(
        partial(velocity_round, loops),
        constants,
        velocities,
        active,
        most=VELOCITY_ITERATIONS,
        usual=USUAL_VELOCITY_ITERATIONS,
    )
    poses, uncorrected = solve_positions(loops, hull, legs, contacts, velocities, active)
    finished = ~(unsettled | uncorrected)
    moved_hull = with_rest_time(Body(poses.hull, velocities.hull, hull.rest))
    bodies = tuple(
        with_rest_time(Body(pose, motion.velocity, leg.body.rest))
        for pose, motion, leg in zip(poses.legs, velocities.legs, legs, strict=True)
    )
    least = jnp.minimum(moved_hull.rest, jnp.minimum(bodies[0].rest, bodies[1].rest))
    asleep = (least >= TIME_TO_SLEEP) & poses.solved
    stopped = choose(asleep, jax.tree.map(jnp.zeros_like, velocities.hull), velocities.hull)
    moved_hull = moved_hull._replace(velocity=stopped)
    if airborne:
        moved_legs = legs_in_flight(ground, legs, bodies, velocities)
        return Stepped(moved_hull, moved_legs, jnp.zeros_like(active), asleep, finished)
    awake = active & ~asleep
    crashed = hull_crashes(loops, ground, hull.pose, moved_hull.pose, awake)
    moved_legs = legs_after_impacts(loops, legs, bodies, velocities, contacts, awake)
    return Stepped(moved_hull, moved_legs, crashed, asleep, finished)


def at_start(
    loops: Loops, hull: Body, legs: tuple[Leg, Leg], contacts: Sequence[GroundContacts], active: Array
) -> tuple[VelocityConstants, Velocities]:
    """What the velocity solver starts from: velocities after gravity and after the impulses of the previous step."""
    hull_velocity = with_gravity(hull.velocity)
    hinges, motions = [], []
    for i, leg in enumerate(legs):
        velocity, impulses = with_gravity(leg.body.velocity), ()
        if contacts:
            impulses = tuple(map(solver_impulses, contacts[i].constraints, contacts[i].contacts))
            for constraint, kept in zip(contacts[i].constraints, impulses, strict=True):
                velocity = warm_started(LEG, constraint, kept, velocity)
        hinges.append(hinge_constraint(LEG_SIDES[i], hull.pose, leg.body.pose))
        motions.append(LegMotion(velocity, hinge_at_start(HINGE_LIMITS[i], hull.pose, leg), impulses))
    for i in (1, 0):
        hinge = motions[i].hinge
        hull_velocity, velocity = apply_hinge_impulse(
            hinges[i], hull_velocity, motions[i].velocity, hinge.linear, hinge.motor + hinge.limit
        )
        motions[i] = motions[i]._replace(velocity=velocity)
    constraints = tuple(each.constraints for each in contacts) or ((), ())
    touching = tuple(tuple(loops.any_of(active & (one.normal_masses[0] > 0)) for one in each) for each in constraints)
    return VelocityConstants(tuple(hinges), constraints, touching), Velocities(hull_velocity, (motions[0], motions[1]))


def solve_positions(
    loops: Loops,
    hull: Body,
    legs: tuple[Leg, Leg],
    contacts: Sequence[GroundContacts],
    velocities: Velocities,
    active: Array,
) -> tuple[Poses, Array]:
    """Move all bodies by their new velocities, and correct their poses. Also returns which landers are unfinished."""
    manifolds = tuple(each.manifolds for each in contacts) or ((), ())
    touching = tuple(tuple(loops.any_of(active & (one.keys[0] >= 0)) for one in each) for each in manifolds)
    leg_poses = tuple(
        moved(leg.body.pose, motion.velocity, TIME_STEP) for leg, motion in zip(legs, velocities.legs, strict=True)
    )
    return loops.iterate(
        partial(position_round, loops),
        PositionConstants(tuple(motion.hinge.side for motion in velocities.legs), manifolds, touching),
        Poses(moved(hull.pose, velocities.hull, TIME_STEP), (leg_poses[0], leg_poses[1]), active & False),
        active,
        most=POSITION_ITERATIONS,
        usual=USUAL_POSITION_ITERATIONS,
    )


def legs_in_flight(
    ground: Ground, legs: tuple[Leg, Leg], bodies: Sequence[Body], velocities: Velocities
) -> tuple[Leg, Leg]:
    """The legs at the end of a step in which they do not touch the ground."""
    ages = tuple(nearby_edges(ground, leg)[1] for leg in legs)
    results = tuple(
        leg._replace(
            body=body,
            hinge=motion.hinge,
            ages=age,
            box=updated_box(leg.box, leg.body.pose, body.pose),
        )
        for leg, body, motion, age in zip(legs, bodies, velocities.legs, ages, strict=True)
    )
    return results[0], results[1]


def legs_after_impacts(
    loops: Loops,
    legs: tuple[Leg, Leg],
    bodies: Sequence[Body],
    velocities: Velocities,
    contacts: Sequence[GroundContacts],
    awake: Array,
) -> tuple[Leg, Leg]:
    """The legs at the end of a step, after their impacts on the ground."""

    def after_impacts(item: tuple[Leg, Body, LegMotion, GroundContacts, Array]) -> Leg:
        leg, body, motion, ground_contacts, awake = item
        sweep, edges = sweep_at_start(*item), ground_contacts.edges
        clear = loops.map(lambda edge: out_of_reach(LEG, sweep.start, sweep.end, edge, IMPACT_DISTANCE), edges)
        sweep = loops.where_needed(
            awake & ~(clear[0] & clear[1]), partial(resolve_impacts, loops), (edges, sweep), sweep, chunk=CHUNK
        )
        return Leg(
            contacts=choose(ground_contacts.odd_first, sweep.contacts[::-1], sweep.contacts),
            box=updated_box(leg.box, leg.body.pose, body.pose),
            body=Body(sweep.end, sweep.velocity, body.rest),
            hinge=motion.hinge,
            ages=ground_contacts.ages,
            grounded=sweep.grounded,
        )

    first, second = loops.map(
        after_impacts, tuple(zip(legs, bodies, velocities.legs, contacts, (awake, awake), strict=True))
    )
    return first, second


def sweep_at_start(leg: Leg, body: Body, motion: LegMotion, contacts: GroundContacts, awake: Array) -> Sweep:
    """The motion of a leg before its first impact."""
    kept = tuple(map(stored_contact, contacts.constraints, contacts.contacts, motion.impulses))
    zero, on = jnp.zeros_like(leg.grounded), leg.grounded >= 0
    return Sweep(
        start=leg.body.pose,
        end=body.pose,
        velocity=body.velocity,
        contacts=(kept[0], kept[1]),
        grounded=contacts.grounded,
        passed=zero,
        counts=(zero, zero),
        enabled=(on, on),
        active=awake,
    )


def with_gravity(velocity: Velocity) -> Velocity:
    x, y = velocity.linear
    return Velocity((x, y + TIME_STEP * GRAVITY), velocity.spin)


def with_rest_time(body: Body) -> Body:
    """Update the time for which a body has been still."""
    speed, spin = dot(body.velocity.linear, body.velocity.linear), jnp.abs(body.velocity.spin)
    still = (speed <= STILL_SPEED**2) & (spin <= STILL_SPIN)
    return Body(body.pose, body.velocity, jnp.where(still, body.rest + TIME_STEP, 0.0))
