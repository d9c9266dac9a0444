"""Environments against Gymnasium, step for step from copied states."""

from collections.abc import Callable
from functools import cache
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from byzpg import envs
from byzpg.envs import cartpole
from byzpg.spaces import Box, Discrete

STEP = jax.jit(envs.make("CartPole-v1").step)


@cache
def reference() -> Any:
    return gymnasium.make("CartPole-v1")


def copy_to_gymnasium(state: np.ndarray) -> None:
    inner = reference().unwrapped
    inner.state, inner.steps_beyond_terminated = state.astype(np.float64), None


def copied(state: np.ndarray) -> cartpole.State:
    """The state [..., 4] of Gymnasium as ours, rounded to float32."""
    return cartpole.State(*(jnp.asarray(state[..., i], jnp.float32) for i in range(4)))


def step(state: cartpole.State, action: np.ndarray | int) -> tuple[cartpole.State, Any, Any]:
    return STEP(state, jnp.asarray(action), jnp.zeros((*state.position.shape, 0)))


def states() -> np.ndarray:
    """Thousands of states [n, 4] in float32: anywhere, and within a hair of every threshold."""
    rng = np.random.default_rng(0)
    anywhere = rng.uniform(-1, 1, (2000, 4)) * [3.0, 4.0, 0.4, 5.0]
    at_the_edge = rng.uniform(-1, 1, (2000, 4)) * [2.3, 4.0, 0.2, 5.0]
    for column, limit in ((0, cartpole.LARGEST_POSITION), (2, cartpole.LARGEST_ANGLE)):
        rows = slice(1000 * (column == 2), 1000 * (column == 2) + 1000)
        # Where the next position or angle, not this one, is `limit` give or take.
        landing = (
            rng.choice([-1, 1], 1000) * limit * (1 + rng.choice([-1, 1], 1000) * 10.0 ** rng.uniform(-6, -2, 1000))
        )
        at_the_edge[rows, column] = landing - cartpole.TIME_STEP * at_the_edge[rows, column + 1]
    return np.concatenate([anywhere, at_the_edge]).astype(np.float32)


@pytest.mark.parametrize("action", [0, 1])
def test_one_step_from_any_state_is_gymnasiums(action: int) -> None:
    before = states()
    after, reward, ended = step(copied(before), np.full(len(before), action))
    expected, expected_reward, expected_end = [], [], []
    for state in before:
        copy_to_gymnasium(state)
        _, paid, terminated, _, _ = reference().unwrapped.step(action)
        expected.append(reference().unwrapped.state)
        expected_reward.append(paid)
        expected_end.append(terminated)
    expected = np.array(expected)
    np.testing.assert_allclose(np.stack(after, axis=-1), expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(reward, expected_reward)
    to_limit = np.abs(np.abs(expected[:, [0, 2]]) - [cartpole.LARGEST_POSITION, cartpole.LARGEST_ANGLE])
    clear = np.all(to_limit > 1e-6, axis=1)
    assert np.mean(clear) > 0.9
    assert 0.2 < np.mean(expected_end) < 0.8
    np.testing.assert_array_equal(np.asarray(ended)[clear], np.array(expected_end)[clear])


def at_random(state: np.ndarray, rng: np.random.Generator) -> int:
    return int(rng.integers(2))


def balancing(state: np.ndarray, rng: np.random.Generator) -> int:
    position, velocity, angle, angular_velocity = state
    return int(angle + 0.3 * angular_velocity + 0.02 * position + 0.05 * velocity > 0)


@pytest.mark.parametrize(("policy", "full_length"), [(at_random, False), (balancing, True)])
def test_whole_episodes_are_gymnasiums(policy: Callable[..., int], full_length: bool) -> None:
    """Both run freely from a copied state, copied anew every 50 steps: errors grow like e^(4t), and t gets to 10 s."""
    rng = np.random.default_rng(1)
    for seed in range(4 if full_length else 30):
        reference().reset(seed=seed)
        state, steps, terminated, truncated = copied(reference().unwrapped.state), 0, False, False
        while not terminated and not truncated:
            if steps % 50 == 0:
                state = copied(reference().unwrapped.state)
            action = policy(reference().unwrapped.state, rng)
            _, expected_reward, terminated, truncated, _ = reference().step(action)
            state, reward, ended = step(state, action)
            steps += 1
            tolerance = 3e-7 * np.exp(4 * cartpole.TIME_STEP * (steps % 50 or 50))
            np.testing.assert_allclose(state, reference().unwrapped.state, rtol=0, atol=10 * tolerance)
            assert (float(reward), bool(ended)) == (expected_reward, terminated)
        assert truncated == full_length
        if full_length:
            assert steps == envs.make("CartPole-v1").horizon


def test_the_batch_is_the_shape_of_the_arrays_and_types_are_kept() -> None:
    before = states()[:6]
    action = np.array([0, 1, 0, 0, 1, 1])
    flat, _, _ = step(copied(before), action)
    shaped, reward, ended = step(copied(before.reshape(2, 3, 4)), action.reshape(2, 3))
    one, _, _ = step(copied(before[4]), action[4])
    assert reward.dtype == jnp.float32
    assert ended.dtype == bool
    assert reward.shape == ended.shape == (2, 3)
    for i in range(4):
        assert shaped[i].dtype == jnp.float32
        np.testing.assert_array_equal(shaped[i].reshape(6), flat[i])
        np.testing.assert_allclose(one[i], flat[i][4], rtol=1e-6, atol=1e-6)


def test_reset_is_gymnasiums_distribution_and_is_observed() -> None:
    environment = envs.make("CartPole-v1")
    keys = jax.random.split(jax.random.key(0), 4000)
    seen = np.asarray(environment.observe(jax.vmap(environment.reset)(keys)))
    assert seen.shape == (4000, environment.observation_size)
    assert seen.dtype == np.float32
    assert np.all(np.abs(seen) <= 0.05)
    # Per quantity the quantiles of a uniform draw, and no quantity tells of another.
    np.testing.assert_allclose(np.quantile(seen, [0.05, 0.5, 0.95], axis=0).T, [[-0.045, 0, 0.045]] * 4, atol=0.004)
    np.testing.assert_allclose(np.corrcoef(seen.T), np.eye(4), atol=0.08)
    reference().reset(seed=0)
    np.testing.assert_array_equal(
        environment.observe(copied(reference().unwrapped.state)), reference().reset(seed=0)[0]
    )


def test_sizes_are_gymnasiums() -> None:
    environment = envs.make("CartPole-v1")
    assert environment.action_space == Discrete(int(reference().action_space.n))
    assert (environment.observation_size,) == reference().observation_space.shape
    assert environment.horizon == reference().spec.max_episode_steps
    assert environment.noise_size == 0
    assert hash(environment) == hash(envs.make(environment.name))
    assert str(environment) == "CartPole()"


@pytest.mark.parametrize("name", envs.ENVIRONMENTS)
def test_made_by_name(name: str) -> None:
    assert envs.make(name).name == name


def test_an_unknown_name_is_one_clear_error() -> None:
    with pytest.raises(
        ValueError, match=r"no environment 'cart-pole'; known: CartPole-v1, .* Did you mean 'CartPole-v1'\?"
    ):
        envs.make("cart-pole")
    with pytest.raises(ValueError, match=r"no environment 'Go'; known: CartPole-v1, .*-v3\.$"):
        envs.make("Go")


# Action spaces


def test_uniform_discrete_actions() -> None:
    for count in (1, 2, 3, 7, 1023):
        space = Discrete(count)
        largest = np.nextafter(np.float32(1), np.float32(0))
        grid = np.append((np.arange(20 * count, dtype=np.float32) + 0.5) / (20 * count), largest)
        actions = np.asarray(space.uniform(jnp.asarray(grid)[:, None]))
        assert actions.dtype == np.int32
        assert actions.shape == grid.shape
        np.testing.assert_array_equal(np.bincount(actions[:-1], minlength=count), 20)
        assert actions[-1] == count - 1
        assert space.noise_size == 1


def test_uniform_box_actions() -> None:
    space = Box(2, low=(-1.0, 0.0), high=(1.0, 4.0))
    unit = jnp.asarray([[[0.0, 0.0], [0.5, 0.25]]])
    np.testing.assert_array_equal(space.uniform(unit), [[[-1.0, 0.0], [0.0, 1.0]]])
    assert space.uniform(unit).dtype == jnp.float32
    assert space.noise_size == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Discrete(0), "num_actions must be a positive whole number, got 0"),
        (lambda: Box(2, (0.0,), (1.0, 1.0)), "must be 2 finite numbers each"),
        (lambda: Box(1, (0.0,), (0.0,)), "low below high"),
        (lambda: Box(1, (0.0,), (float("inf"),)), "finite"),
    ],
)
def test_impossible_spaces(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
