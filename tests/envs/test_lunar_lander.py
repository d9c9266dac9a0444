"""LunarLander against Gymnasium, step for step from the same first states, and properties of its step."""

from functools import cache, partial
from operator import itemgetter
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium_lander import RECORDED, Episode, draws, first_touch, outcome, recorded, replay

from byzpg import envs
from byzpg.envs.box2d import (
    THICKNESS,
    ContactConstraint,
    Edge,
    Impulses,
    Manifold,
    Pose,
    Shape,
    Velocity,
    collide,
    contact_constraint,
)
from byzpg.envs.kernels import in_kernel
from byzpg.envs.lander_bodies import HULL, LEG, Hinge, HingeConstraint, highest_ground, hinge_constraint
from byzpg.envs.lander_world import (
    LegMotion,
    Poses,
    PositionConstants,
    Velocities,
    VelocityConstants,
    position_round,
    velocity_round,
)
from byzpg.envs.loops import Loops, choose
from byzpg.envs.lunar_lander import FEW, LARGE_CHUNK, LunarLander, LunarLanderContinuous, State
from byzpg.envs.spaces import Box, Discrete
from byzpg.envs.time_of_impact import IMPACT_DISTANCE, impact, out_of_reach

BATCH = 75
LANDER = LunarLander()
STEP = jax.jit(LANDER.step)
# All tests use one batch size, since compiling takes longer than playing.
RESET = jax.jit(jax.vmap(LANDER.reset))
OBSERVE = jax.jit(LANDER.observe)


@cache
def both_played() -> dict[str, tuple[list[Episode], list[tuple[np.ndarray, np.ndarray]]]]:
    """Recorded episodes and our replays of them, by policy.

    One batch plays all, the longer episodes first: a step takes as long for few episodes as for many.
    """
    landings, flights = recorded("heuristic"), recorded("random")
    policies = ["heuristic"] * len(landings) + ["random"] * len(flights)
    ours = replay(STEP, LANDER, landings + flights, policies, BATCH)
    return {"heuristic": (landings, ours[: len(landings)]), "random": (flights, ours[len(landings) :])}


def played(policy: str) -> tuple[list[Episode], list[tuple[np.ndarray, np.ndarray]]]:
    return both_played()[policy]


def agreement(policy: str) -> tuple[float, float]:
    """The shares of episodes with the same outcome and with the same length."""
    pairs = list(zip(*played(policy), strict=True))
    same_outcome = [outcome(theirs.rewards) == outcome(rewards) for theirs, (_, rewards) in pairs]
    same_length = [theirs.length == len(rewards) for theirs, (_, rewards) in pairs]
    return float(np.mean(same_outcome)), float(np.mean(same_length))


@pytest.mark.slow
def test_flight_until_the_first_touch_is_gymnasiums() -> None:
    worst = []
    for theirs, (observations, rewards) in zip(*played("random"), strict=True):
        steps = min(first_touch(theirs.observations), theirs.length - 1, len(rewards) - 1)
        worst.append(np.abs(observations[: steps + 1, :6] - theirs.observations[: steps + 1, :6])[:-1].max())
        np.testing.assert_allclose(observations[0], theirs.observations[0], rtol=0, atol=2e-6)
        np.testing.assert_allclose(rewards[: steps - 1], theirs.rewards[: steps - 1], rtol=0, atol=0.02)
    assert max(worst) <= 1e-4
    assert np.median(worst) <= 2e-5


@pytest.mark.slow
def test_whole_episodes_at_random_are_gymnasiums() -> None:
    same_outcome, same_length = agreement("random")
    assert same_outcome >= 0.99
    assert same_length >= 0.97
    episodes, ours = played("random")
    returns = [theirs.rewards.sum() - rewards.sum() for theirs, (_, rewards) in zip(episodes, ours, strict=True)]
    assert np.median(np.abs(returns)) <= 0.01


@pytest.mark.slow
def test_landings_are_gymnasiums() -> None:
    """Gymnasium's controller sees our observations. Landing amplifies rounding errors, so some episodes differ."""
    same_outcome, same_length = agreement("heuristic")
    assert same_outcome >= 0.93
    assert same_length >= 0.75
    episodes, ours = played("heuristic")
    assert np.mean([outcome(rewards) == "landed" for _, rewards in ours]) >= 0.7
    means = [np.mean([theirs.rewards.sum() for theirs in episodes]), np.mean([rewards.sum() for _, rewards in ours])]
    assert abs(means[0] - means[1]) <= 3 * 100 / np.sqrt(len(episodes))


def test_first_states_are_gymnasiums() -> None:
    episodes = recorded("random")
    expected, observed = [each.first for each in episodes], [each.observations[0] for each in episodes]
    drawn = [draws(seed) for seed in range(BATCH)]
    heights, force = (np.stack([each[i] for each in drawn], axis=1).astype(np.float32) for i in (0, 1))
    noise = np.stack([each[2][0] for each in drawn], axis=1).astype(np.float32)
    ours = jax.jit(LANDER.first_state)(tuple(heights), tuple(force), tuple(noise))
    np.testing.assert_allclose(np.stack(OBSERVE(ours), axis=-1), observed, rtol=0, atol=2e-6)
    theirs: State = jax.tree.map(lambda *leaves: np.stack(leaves), *expected)
    np.testing.assert_allclose(ours.ground, theirs.ground, rtol=1e-6)
    for leg, other in zip(ours.legs, theirs.legs, strict=True):
        np.testing.assert_allclose(jax.tree.leaves(leg.body), jax.tree.leaves(other.body), rtol=1e-5, atol=3e-5)
        np.testing.assert_allclose(jax.tree.leaves(leg.hinge), jax.tree.leaves(other.hinge), rtol=1e-4, atol=1e-4)


def test_reset_is_gymnasiums_distribution() -> None:
    states = [RESET(jax.random.split(jax.random.key(i), BATCH)) for i in range(30)]
    assert all(leaf.dtype == jnp.float32 and leaf.shape == (BATCH,) for leaf in jax.tree.leaves(states[0]))
    seen = np.concatenate([np.stack(OBSERVE(state), axis=-1) for state in states])
    assert seen.shape == (30 * BATCH, LANDER.observation_size)
    # The push of ±1000 N lasts 1/50 s and accelerates hull and legs; columns 2 and 3 are the resulting velocity.
    with np.load(RECORDED) as arrays:
        theirs = arrays["starts"]
    for column in (2, 3):
        levels = [0.05, 0.25, 0.5, 0.75, 0.95]
        np.testing.assert_allclose(
            np.quantile(seen[:, column], levels), np.quantile(theirs[:, column], levels), atol=0.09
        )
    np.testing.assert_array_equal(seen[:, 6:], 0)
    ground = np.concatenate([np.asarray(state.ground) for state in states], axis=1)
    np.testing.assert_allclose(ground[4:7], 0.99 * 400 / 30 / 4, rtol=1e-6)
    np.testing.assert_allclose(ground[[0, 1, 2, 8, 9, 10]].mean(axis=1), 0.99 * 400 / 30 / 4, rtol=0.05)


@cache
def some_states(seed: int = 0) -> tuple[State, np.ndarray]:
    """States in flight and close to the ground, and random actions."""
    state = RESET(jax.random.split(jax.random.key(seed + 1), BATCH))
    rng = np.random.default_rng(seed)
    for _ in range(70):
        state, _, _ = STEP(state, (jnp.asarray(rng.integers(4, size=BATCH), jnp.int32),), halves((BATCH,)))
    return state, rng.integers(4, size=BATCH).astype(np.int32)


def halves(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    # With the type given, as another type would be compiled again.
    return jnp.full(shape, 0.5, jnp.float32), jnp.full(shape, 0.5, jnp.float32)


def test_an_ended_episode_stays_as_it_is() -> None:
    state, action = some_states()
    state = state._replace(ended=jnp.ones(BATCH))
    following, reward, ended = STEP(state, (jnp.asarray(action),), halves((BATCH,)))
    np.testing.assert_array_equal(reward, 0)
    assert np.all(ended)
    for leaf, before in zip(jax.tree.leaves(following), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(leaf, before)


ACROSS = ("concatenate", "gather", "scatter", "dot_general", "dynamic", "sort", "cumsum", "transpose", "iota", "slice")


def operations(jaxpr: Any, in_condition: bool = False) -> list[tuple[str, bool]]:
    """The names of all operations, including those in loops, and whether each belongs to a loop's condition."""
    found = []
    for equation in jaxpr.eqns:
        found.append((equation.primitive.name, in_condition))
        for name, value in equation.params.items():
            for each in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns"):
                    found += operations(inner, in_condition or name == "cond_jaxpr")
    return found


def arguments_of(function: Any) -> Any:
    """The arguments of a function, all arrays of one shape."""
    batch: Any = jax.ShapeDtypeStruct((5,), jnp.float32)
    mask: Any = jax.ShapeDtypeStruct((5,), bool)
    pair = batch, batch
    constraint = ContactConstraint(pair, pair, pair, pair, pair, (batch,) * 3, batch, mask)
    pose, velocity, hinge = Pose(pair, batch), Velocity(pair, batch), Hinge(pair, batch, batch, batch)
    manifold = Manifold(mask, pair, pair, (pair, pair), pair)
    joint = HingeConstraint(pair, pair, pair, (batch,) * 3, (batch,) * 6, pair)
    motion = LegMotion(velocity, hinge, (Impulses(pair, pair),) * 2)
    return {
        velocity_round: (
            VelocityConstants((joint, joint), ((constraint, constraint),) * 2, ((mask, mask),) * 2),
            Velocities(velocity, (motion, motion)),
        ),
        position_round: (
            PositionConstants(pair, ((manifold, manifold),) * 2, ((mask, mask),) * 2),
            Poses(pose, (pose, pose), mask),
        ),
        impact: (pose, pose, Edge(pair, pair, pair)),
    }[function]


@pytest.mark.parametrize("function", [velocity_round, position_round, impact], ids=lambda each: each.__name__)
def test_functions_in_kernels_are_elementwise_except_for_the_conditions_of_loops(function: Any) -> None:
    called = partial(function, LEG if function is impact else Loops(in_kernel=False))
    jaxpr = jax.make_jaxpr(called)(*arguments_of(function), jax.ShapeDtypeStruct((5,), bool))
    found = operations(jaxpr.jaxpr)
    names = {name for name, _ in found}
    assert {"mul", "select_n"} <= names
    assert not [name for name in names if any(part in name for part in ACROSS)]
    assert {in_condition for name, in_condition in found if "reduce" in name} <= {True}


def flush_legs(tilts: Any, velocity: Velocity) -> tuple[Any, Any]:
    """The solver's input if both legs lie flat on slopes of these tilts, mirrored, with motors at their limit."""
    rng: Any = np.random.default_rng(3)
    zero: Any = np.zeros_like(tilts)
    joints, constraints, motions = [], [], []
    hull = Pose((zero, zero), zero)
    for side, tilt in zip((-1.0, 1.0), (tilts, -tilts), strict=True):
        pose = Pose((zero - side * 0.7, zero - 0.9), tilt)
        normal = -np.sin(tilt), np.cos(tilt)
        bottom = pose.point((0.0, LEG.corners[0][1] - 0.015))
        points: Any = tuple((zero + x, zero + y) for x, y in LEG.corners[:2])
        manifold = Manifold(zero > 0, normal, bottom, points, (zero, zero + 1))
        joints.append(hinge_constraint(side, hull, pose))
        absent = manifold._replace(keys=(zero - 1,) * 2)
        constraints.append((contact_constraint(LEG, manifold, pose), contact_constraint(LEG, absent, pose)))
        drawn = tuple(rng.normal(size=(3, len(tilts))).astype(np.float32) * 0.1)
        hinge = Hinge((zero, zero), zero, zero + side * 0.8, zero + side)
        still = Impulses((zero, zero), (zero, zero))
        motions.append(LegMotion(Velocity(drawn[:2], drawn[2]), hinge, (still, still)))
    assert np.all(constraints[0][0].both)
    constants = VelocityConstants(tuple(joints), tuple(constraints), ((zero == 0, zero > 0),) * 2)
    constants_and_state = constants, Velocities(velocity, (motions[0], motions[1]))
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf, bool if leaf.dtype == bool else jnp.float32), constants_and_state
    )


@pytest.mark.slow
def test_the_velocity_solver_runs_180_rounds_unless_nothing_moves() -> None:
    tilts: Any = np.linspace(-0.9, 0.9, 45).astype(np.float32)
    falling = Velocity((0.1 * tilts, 0 * tilts - 1), 0 * tilts)
    constants, state = flush_legs(tilts, falling)
    going, loops = jnp.ones(len(tilts), bool), Loops(in_kernel=False)

    @jax.jit
    def plain(state: Any) -> Any:
        return jax.lax.fori_loop(0, 180, lambda _, state: velocity_round(loops, constants, state, going)[0], state)

    expected = jax.tree.leaves(plain(state))
    for way in (loops, Loops(in_kernel=True)):

        def ours(constants: Any, state: Any, going: Any, way: Loops = way) -> Any:
            touching = tuple(tuple(map(way.any_of, each)) for each in constants.touching)
            constants = constants._replace(touching=touching)
            return way.iterate(partial(velocity_round, way), constants, state, going, most=180, usual=6)

        run = partial(in_kernel, ours, interpret=True) if way.in_kernel else jax.jit(ours)
        solved, _ = run(constants, state, going)
        for one, other in zip(jax.tree.leaves(solved), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-4, err_msg="kernel" if way.in_kernel else "chunks")


def test_the_highest_ground_is_that_of_dense_sampling() -> None:
    rng = np.random.default_rng(4)
    ground, left = rng.uniform(0, 6, (11, 400)), rng.uniform(-3, 21, 400)
    right = left + rng.uniform(0, 3.9, 400)
    shares = np.linspace(0, 1, 2000)
    dense = [
        np.interp(a + shares * (b - a), np.arange(11) * 2.0, heights).max()
        for a, b, heights in zip(left, right, ground.T, strict=True)
    ]
    found = np.asarray(jax.jit(highest_ground)(tuple(ground.astype(np.float32)), left, right))
    assert np.all(found >= np.array(dense) - 1e-4)
    inside = (left > 0) & (right < 20)
    np.testing.assert_allclose(found[inside], np.array(dense)[inside], atol=0.02)


@pytest.mark.parametrize("shape", [HULL, LEG], ids=["hull", "leg"])
def test_what_is_out_of_reach_is_not_hit(shape: Shape) -> None:
    rng, number = np.random.default_rng(5), 4000

    def drawn(low: float, high: float) -> Any:
        return rng.uniform(low, high, number).astype(np.float32)

    @jax.jit
    def measured(start: Pose, end: Pose, edge: Edge) -> Any:
        clear, slow = (out_of_reach(shape, start, end, edge, gap) for gap in (THICKNESS, IMPACT_DISTANCE))
        hit, _ = impact(shape, start, end, edge, clear == clear)
        return clear, slow, hit, collide(shape, start, edge).keys[0] >= 0

    rise: Any = drawn(-2, 2)
    zero: Any = np.zeros(number, np.float32)
    length = np.sqrt(4 + rise * rise)
    edge = Edge((zero, zero), (zero + 2, rise), (-rise / length, 2 / length))
    start = Pose((drawn(-1, 3), drawn(-0.5, 2.5)), drawn(-3, 3))
    end = Pose(
        (start.position[0] + drawn(-0.2, 0.2), start.position[1] + drawn(-0.3, 0.1)), start.angle + drawn(-1, 1) / 5
    )
    clear, slow, hit, touching = map(np.asarray, measured(start, end, edge))
    assert np.sum(hit) > 50
    assert np.mean(clear) > 0.3
    assert not np.any(clear & (hit | touching))
    assert not np.any(slow & hit)


def test_a_lander_whose_leg_touches_is_not_far_from_the_ground() -> None:
    state, _ = some_states()
    far = jax.jit(LANDER.far_from_ground)
    assert np.any(np.asarray(far(state)))
    left, right = state.legs
    contact = left.contacts[1]._replace(keys=(jnp.zeros(BATCH), left.contacts[1].keys[1]))
    touching = state._replace(legs=(left._replace(contacts=(left.contacts[0], contact)), right))
    assert not np.any(np.asarray(far(touching)))


@pytest.mark.slow
def test_a_kernel_steps_as_a_plain_program_does() -> None:
    """The states are far above the ground, near it and touching it."""
    state, action = some_states()
    state = state._replace(ended=state.ended.at[:3].set(1.0))
    given = state, (jnp.asarray(action),), halves((BATCH,))
    plain, kernel = STEP(*given), in_kernel(LANDER.step_in_kernel, *given, interpret=True)
    np.testing.assert_array_equal(kernel[2], plain[2])
    np.testing.assert_allclose(kernel[1], plain[1], atol=1e-2)
    for one, other in zip(jax.tree.leaves(kernel[0]), jax.tree.leaves(plain[0]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-3)


@pytest.mark.slow
def test_its_step_can_be_lowered_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that a kernel does not support fail when it is lowered, which needs no GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    state = jax.eval_shape(jax.vmap(LANDER.reset), jax.random.split(jax.random.key(0), BATCH))
    given = state, (jax.ShapeDtypeStruct((BATCH,), jnp.int32),), (jax.ShapeDtypeStruct((BATCH,), jnp.float32),) * 2
    assert (
        "triton"
        in jax.jit(lambda *given: LANDER.step(*given)).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    )


@pytest.mark.slow
def test_landers_that_a_chunk_leaves_unsettled_step_one_by_one() -> None:
    """Most are in flight with spread legs. The legs of ten spread out, which takes the solver many more rounds."""
    noise, no_action = halves((BATCH,)), (jnp.zeros(BATCH, int),)
    fresh = state = RESET(jax.random.split(jax.random.key(1), BATCH))
    for _ in range(45):
        state, _, ended = STEP(state, no_action, noise)
        assert not np.any(ended)
    is_fresh = jnp.arange(BATCH) < 10
    state = choose(is_fresh, fresh, state)
    high = np.asarray(LANDER.far_from_ground(state))
    assert np.all(high[:10])
    assert np.sum(high) > FEW
    together, _, _ = STEP(state, no_action, noise)
    for first in range(0, BATCH, FEW):
        few = (jnp.arange(BATCH) >= first) & (jnp.arange(BATCH) < first + FEW)  # so few step one by one
        alone, _, _ = STEP(state._replace(ended=(~few).astype(jnp.float32)), no_action, noise)
        for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(one[few], other[few], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_large_batch_in_chunks_steps_as_small_batches_do() -> None:
    """The states are far above the ground, near it and touching it. Only the large batch is divided into chunks."""
    states, actions = zip(*(some_states(seed) for seed in range(5)), strict=True)
    state: State = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    state = state._replace(ended=state.ended.at[0, :7].set(1.0))
    shape = (5, BATCH)
    assert 5 * BATCH > LARGE_CHUNK
    high = np.asarray(LANDER.far_from_ground(state))
    assert 0 < high.sum() < high.size - 7
    following, reward, ended = STEP(state, (jnp.stack([jnp.asarray(each) for each in actions]),), halves(shape))
    assert reward.shape == ended.shape == shape
    assert ended.dtype == bool
    for i, action in enumerate(actions):
        alone, alone_reward, alone_ended = STEP(
            jax.tree.map(itemgetter(i), state), (jnp.asarray(action),), halves((BATCH,))
        )
        np.testing.assert_array_equal(ended[i], alone_ended)
        np.testing.assert_allclose(reward[i], alone_reward, atol=1e-2)
        for one, other in zip(jax.tree.leaves(following), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(one[i], other, rtol=1e-3, atol=2e-3)


def test_continuous_actions_are_gymnasiums() -> None:
    environment = LunarLanderContinuous()

    @jax.jit
    def step(state: State, *given: Any) -> Any:
        return environment.advance(Loops(in_kernel=False), state.ended == 0, state, *given, airborne=True)[:3]

    episodes = recorded("continuous")
    for theirs, (observations, rewards) in zip(
        episodes, replay(step, environment, episodes, ["random"] * len(episodes), 8, 40), strict=True
    ):
        assert first_touch(theirs.observations) >= 40
        np.testing.assert_allclose(observations[:, :6], theirs.observations[:41, :6], rtol=0, atol=1e-4)
        np.testing.assert_allclose(rewards, theirs.rewards[:40], rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("name", "space"),
    [("LunarLander-v3", Discrete(4)), ("LunarLanderContinuous-v3", Box(2, (-1.0, -1.0), (1.0, 1.0)))],
)
def test_sizes_are_gymnasiums(name: str, space: Discrete | Box) -> None:
    environment, theirs = envs.ENVIRONMENTS[name](), gymnasium.spec(name)
    assert environment.name == name
    assert environment.action_space == space
    assert environment.observation_size == 8
    assert environment.horizon == theirs.max_episode_steps
    assert environment.reward_threshold == theirs.reward_threshold
    assert environment.noise_size == 2
