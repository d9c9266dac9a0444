"""Environments that go on from one segment to the next."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from byzpg.envs import CartPole, Pendulum
from byzpg.learning.policies import CategoricalMLP, GaussianMLP
from byzpg.learning.segments import Environments, Segment, play_segment
from byzpg.robust.adaptive import BonusForAction
from byzpg.robust.attacks import RandomAction, RewardFlip

ENV = CartPole()
POLICY = CategoricalMLP(4, hidden=(8,))
NUM_AGENTS, NUM_ENVIRONMENTS, NUM_STEPS, HORIZON = 3, 4, 40, 25


def played(
    environments: Environments | None = None, seed: int = 0, **options: Any
) -> tuple[Environments, Segment, np.ndarray]:
    environments = environments or Environments.initial(ENV, NUM_AGENTS, NUM_ENVIRONMENTS)
    parameters = jax.vmap(POLICY.initial)(jax.random.split(jax.random.key(7), NUM_AGENTS))
    keys = jax.random.split(jax.random.key(seed), NUM_AGENTS)
    after, segment = play_segment(
        ENV, POLICY, parameters, environments, keys, num_steps=NUM_STEPS, horizon=HORIZON, **options
    )
    return after, segment, np.asarray(parameters)


@pytest.fixture(scope="module")
def two() -> list[tuple[Environments, Segment]]:
    """Two segments, one after the other."""
    first, segment, _ = played()
    second, following, _ = played(first, seed=1)
    return [(first, segment), (second, following)]


def test_every_environment_takes_every_step(two: list[tuple[Environments, Segment]]) -> None:
    for _, segment in two:
        assert segment.observations.shape == (NUM_AGENTS, NUM_ENVIRONMENTS, NUM_STEPS, 4)
        np.testing.assert_array_equal(segment.rewards, 1)  # CartPole pays 1 in every step of an episode


def test_episodes_go_on_across_segments_and_new_ones_start_fresh(two: list[tuple[Environments, Segment]]) -> None:
    seen, following, ended = (
        np.concatenate([np.asarray(getattr(segment, name)) for _, segment in two], axis=2)
        for name in ("observations", "following", "ended")
    )
    goes_on = ~ended[:, :, :-1]
    np.testing.assert_array_equal(seen[:, :, 1:][goes_on], following[:, :, :-1][goes_on])
    fresh = seen[:, :, 1:][~goes_on]
    assert np.all(np.abs(fresh) <= 0.05)
    assert len(np.unique(fresh, axis=0)) > 0.6 * len(fresh)  # two may start alike, but not many
    assert np.all(np.abs(seen[:, :, 0]) <= 0.05)


def test_steps_are_those_of_the_environment(two: list[tuple[Environments, Segment]]) -> None:
    _, segment = two[0]
    state = tuple(jnp.asarray(segment.observations[..., i]) for i in range(4))  # CartPole shows its state
    after, rewards, terminated = ENV.step(
        ENV.reset(jax.random.key(0))._replace(
            position=state[0], velocity=state[1], angle=state[2], angular_velocity=state[3]
        ),
        (segment.actions,),
        (),
    )
    np.testing.assert_allclose(np.stack(after, axis=-1), segment.following, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(terminated, segment.terminated)
    np.testing.assert_array_equal(rewards, segment.rewards)


def test_an_episode_ends_at_the_horizon_without_being_terminated(two: list[tuple[Environments, Segment]]) -> None:
    lengths, cut_off = [], 0
    for i, j in np.ndindex(NUM_AGENTS, NUM_ENVIRONMENTS):
        length = 0
        for _, segment in two:
            for t in range(NUM_STEPS):
                length += 1
                if segment.ended[i, j, t]:
                    assert segment.terminated[i, j, t] or length == HORIZON
                    cut_off += not segment.terminated[i, j, t]
                    lengths.append(length)
                    length = 0
                else:
                    assert length < HORIZON
                    assert not segment.terminated[i, j, t]
    assert cut_off > 0
    assert min(lengths) < HORIZON


def test_returns_are_those_of_the_last_episode_that_ended(two: list[tuple[Environments, Segment]]) -> None:
    after, _ = two[1]
    ended = np.concatenate([np.asarray(segment.ended) for _, segment in two], axis=2)
    np.testing.assert_array_equal(after.ended, np.sum(ended, axis=2))
    for i, j in np.ndindex(NUM_AGENTS, NUM_ENVIRONMENTS):
        ends = np.flatnonzero(ended[i, j])
        assert float(after.latest[i, j]) == (np.diff(ends, prepend=-1)[-1] if len(ends) else 2 * NUM_STEPS)
        assert int(after.elapsed[i, j]) == 2 * NUM_STEPS - 1 - ends[-1]


def test_before_the_first_episode_has_ended_its_return_so_far_counts() -> None:
    env, policy = Pendulum(), GaussianMLP(3, hidden=(4,), action_size=1)
    after, segment = play_segment(
        env,
        policy,
        policy.initial(jax.random.key(0))[None],
        Environments.initial(env, 1, 2),
        jax.random.split(jax.random.key(0), 1),
        num_steps=10,
        horizon=200,
    )
    np.testing.assert_allclose(after.latest, np.sum(segment.rewards, axis=2), rtol=1e-5)
    assert not np.any(segment.ended)


@pytest.mark.slow
def test_attacks_on_play_change_the_attackers_alone() -> None:
    mask = jnp.asarray([False, True, False])
    _, honest, _ = played()
    _, random, _ = played(attackers=[(RandomAction(), mask)])
    _, flipped, _ = played(attackers=[(RewardFlip(), mask)])
    np.testing.assert_array_equal(random.actions[::2], honest.actions[::2])
    assert np.any(np.asarray(random.actions[1]) != np.asarray(honest.actions[1]))
    np.testing.assert_array_equal(flipped.rewards[1], -np.asarray(honest.rewards[1]))
    np.testing.assert_array_equal(flipped.rewards[::2], honest.rewards[::2])
    np.testing.assert_array_equal(flipped.actions, honest.actions)
    _, paid, _ = played(attackers=[(BonusForAction(1, bonus=5.0), mask)])
    np.testing.assert_array_equal(paid.rewards - honest.rewards, 5.0 * (honest.actions == 1) * mask[:, None, None])


def test_log_probabilities_are_those_of_the_actions_that_were_taken() -> None:
    mask = jnp.asarray([False, True, False])
    _, segment, parameters = played(attackers=[(RandomAction(), mask)])
    for k in range(NUM_AGENTS):
        weights = POLICY.unflatten(jnp.asarray(parameters[k]))
        expected = POLICY.log_probability(weights, POLICY.outputs(weights, segment.observations[k]), segment.actions[k])
        np.testing.assert_allclose(segment.log_probabilities[k], expected, rtol=1e-5, atol=1e-6)
