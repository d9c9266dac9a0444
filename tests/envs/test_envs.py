"""Environments against Gymnasium, step for step from copied states."""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from byzpg import envs
from byzpg.envs import acrobot, cartpole, pendulum
from byzpg.envs.spaces import Box, Discrete

STEP, SWING, TURN = (jax.jit(env.step) for env in (cartpole.CartPole(), pendulum.Pendulum(), acrobot.Acrobot()))


@cache
def reference() -> Any:
    return gymnasium.make("CartPole-v1")


def copy_to_gymnasium(state: np.ndarray) -> None:
    inner = reference().unwrapped
    inner.state, inner.steps_beyond_terminated = state.astype(np.float64), None


def copied(state: np.ndarray) -> cartpole.State:
    """Convert Gymnasium's state [..., 4] to ours, rounded to float32."""
    return cartpole.State(*(jnp.asarray(state[..., i], jnp.float32) for i in range(4)))


def step(state: cartpole.State, action: np.ndarray | int) -> tuple[cartpole.State, Any, Any]:
    return STEP(state, (jnp.asarray(action),), ())


def states() -> np.ndarray:
    """Thousands of states [n, 4] in float32: random ones, and ones very close to every threshold."""
    rng = np.random.default_rng(0)
    anywhere = rng.uniform(-1, 1, (2000, 4)) * [3.0, 4.0, 0.4, 5.0]
    at_the_edge = rng.uniform(-1, 1, (2000, 4)) * [2.3, 4.0, 0.2, 5.0]
    for column, limit in ((0, cartpole.LARGEST_POSITION), (2, cartpole.LARGEST_ANGLE)):
        rows = slice(1000 * (column == 2), 1000 * (column == 2) + 1000)
        # The next position or angle, not the current one, is close to `limit`.
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
    """Both run from a state that is copied again every 50 steps: errors grow like e^(4t), and t reaches 10 s."""
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
    environment = cartpole.CartPole()
    keys = jax.random.split(jax.random.key(0), 4000)
    seen = np.stack(environment.observe(jax.vmap(environment.reset)(keys)), axis=-1)
    assert seen.shape == (4000, environment.observation_size)
    assert seen.dtype == np.float32
    assert np.all(np.abs(seen) <= 0.05)
    # Every quantity has the quantiles of a uniform draw, and no two quantities are correlated.
    np.testing.assert_allclose(np.quantile(seen, [0.05, 0.5, 0.95], axis=0).T, [[-0.045, 0, 0.045]] * 4, atol=0.004)
    np.testing.assert_allclose(np.corrcoef(seen.T), np.eye(4), atol=0.08)
    reference().reset(seed=0)
    np.testing.assert_array_equal(
        environment.observe(copied(reference().unwrapped.state)), reference().reset(seed=0)[0]
    )


def test_sizes_are_gymnasiums() -> None:
    environment = cartpole.CartPole()
    assert environment.action_space == Discrete(int(reference().action_space.n))
    assert (environment.observation_size,) == reference().observation_space.shape
    assert environment.horizon == reference().spec.max_episode_steps
    assert environment.noise_size == 0
    assert hash(environment) == hash(envs.make(environment.name))
    assert str(environment) == "CartPole()"


def swung(angle: np.ndarray, speed: np.ndarray, torque: np.ndarray) -> tuple[pendulum.State, Any, Any]:
    state = pendulum.State(jnp.asarray(angle, jnp.float32), jnp.asarray(speed, jnp.float32))
    return SWING(state, (jnp.asarray(torque, jnp.float32),), ())


def test_one_step_of_the_pendulum_is_gymnasiums() -> None:
    """States include several full turns, speeds above the limit, and torques above the limit."""
    rng, inner = np.random.default_rng(2), cast(Any, gymnasium.make("Pendulum-v1").unwrapped)
    before = (rng.uniform(-1, 1, (2000, 3)) * [30.0, 9.0, 4.0]).astype(np.float32)
    after, reward, ended = swung(*before.T)
    expected, paid, seen = [], [], []
    for angle, speed, torque in before.astype(np.float64):
        inner.state = np.array([angle, speed])
        observation, cost, terminated, truncated, _ = inner.step(np.array([torque]))
        assert not terminated
        assert not truncated
        expected.append(inner.state)
        paid.append(cost)
        seen.append(observation)
    np.testing.assert_allclose(np.stack(after, axis=-1), expected, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(reward, paid, rtol=1e-5, atol=4e-5)  # many full turns cost float32 accuracy
    np.testing.assert_allclose(np.stack(pendulum.Pendulum().observe(after), axis=-1), seen, atol=4e-6)
    assert not np.any(ended)


def test_the_pendulum_starts_as_gymnasiums() -> None:
    environment = pendulum.Pendulum()
    start = jax.vmap(environment.reset)(jax.random.split(jax.random.key(0), 4000))
    for values, limit in zip(start, (np.pi, 1.0), strict=True):
        assert values.dtype == jnp.float32
        assert np.all(np.abs(values) <= limit)
        np.testing.assert_allclose(np.quantile(values, [0.05, 0.5, 0.95]) / limit, [-0.9, 0, 0.9], atol=0.06)
    assert abs(np.corrcoef(start)[0, 1]) < 0.08
    theirs = gymnasium.make("Pendulum-v1")
    assert isinstance(theirs.action_space, gymnasium.spaces.Box)
    low, high = (tuple(map(float, limit)) for limit in (theirs.action_space.low, theirs.action_space.high))
    assert environment.action_space == Box(1, low, high)
    assert theirs.observation_space.shape == (environment.observation_size,)
    assert theirs.spec is not None
    assert theirs.spec.max_episode_steps == environment.horizon


def turned(state: np.ndarray, action: np.ndarray | int, dtype: Any = np.float32) -> tuple[acrobot.State, Any, Any]:
    """A step of the acrobot from Gymnasium's state [..., 4]."""
    return TURN(acrobot.State(*(jnp.asarray(state[..., i], dtype) for i in range(4))), (np.asarray(action),), ())


def angle_between(ours: Any, theirs: np.ndarray) -> np.ndarray:
    """How far two states [..., 4] are apart; angles on both sides of ±π are close to each other."""
    apart = np.stack(ours, axis=-1) - theirs
    apart[..., :2] = (apart[..., :2] + np.pi) % (2 * np.pi) - np.pi
    return np.abs(apart)


def test_one_step_of_the_acrobot_is_gymnasiums() -> None:
    """States include every angle and speeds up to their limits, so that angles wrap and speeds are cut."""
    rng, inner = np.random.default_rng(3), cast(Any, gymnasium.make("Acrobot-v1").unwrapped)
    before = rng.uniform(-1, 1, (3000, 4)) * [np.pi, np.pi, 4 * np.pi, 9 * np.pi]
    before[1000:] *= [1, 1, 0.2, 0.1]  # as in play
    before, actions = before.astype(np.float32), rng.integers(3, size=3000)
    after, reward, ended = turned(before, actions)
    with jax.enable_x64(True):
        exact, *_ = turned(before, actions, np.float64)
    expected, paid, ends, seen = [], [], [], []
    for state, action in zip(before.astype(np.float64), actions, strict=True):
        inner.state = state
        observation, pay, terminated, _, _ = inner.step(action)
        expected.append(inner.state)
        paid.append(pay)
        ends.append(terminated)
        seen.append(observation)
    expected = np.array(expected)
    assert np.max(angle_between(exact, expected)) < 1e-8
    assert np.max(angle_between(after, expected)[1000:]) < 1e-4
    np.testing.assert_allclose(
        np.stack(acrobot.Acrobot().observe(after), axis=-1)[1000:], np.array(seen)[1000:], atol=1e-4
    )
    cut, limits = np.abs(np.stack(after, axis=-1)), [np.pi, np.pi, 4 * np.pi, 9 * np.pi]
    assert np.all(cut <= np.asarray(limits, np.float32) + 1e-6)
    assert np.all(np.any(cut[:, 2:] > np.asarray(limits[2:], np.float32) - 1e-6, axis=0)), "speeds at each limit"
    height = -np.cos(expected[:, 0]) - np.cos(expected[:, 0] + expected[:, 1])
    clear = (np.abs(height - 1) > 1e-3) & (np.arange(3000) >= 1000)
    assert 0.1 < np.mean(np.array(ends)[clear]) < 0.9
    np.testing.assert_array_equal(np.asarray(ended)[clear], np.array(ends)[clear])
    np.testing.assert_array_equal(np.asarray(reward)[clear], np.array(paid)[clear])


def pumping(state: np.ndarray, rng: np.random.Generator) -> int:
    """Push with the motion: energy grows until the tip is above the line."""
    return 2 if state[3] > 0 else 0


@pytest.mark.parametrize(
    ("policy", "arrives"),
    [
        pytest.param(lambda state, rng: int(rng.integers(3)), False, marks=pytest.mark.slow),
        (pumping, True),
    ],
)
def test_whole_episodes_of_the_acrobot_are_gymnasiums(policy: Callable[..., int], arrives: bool) -> None:
    """In float64 from the first state to the last; in float32 from a state that is copied again every 10 steps."""
    theirs, rng = cast(Any, gymnasium.make("Acrobot-v1")), np.random.default_rng(4)
    lengths = []
    for seed in range(6 if arrives else 2):
        theirs.reset(seed=seed)
        state = exact = np.asarray(theirs.unwrapped.state, np.float64)
        terminated = truncated = False
        steps = 0
        while not terminated and not truncated:
            if steps % 10 == 0:
                state = theirs.unwrapped.state
            action = policy(theirs.unwrapped.state, rng)
            _, paid, terminated, truncated, _ = theirs.step(action)
            steps += 1
            after, reward, ended = turned(state, action)
            with jax.enable_x64(True):
                exact_after, *_, exact_ended = turned(exact, action, np.float64)
            state, exact = np.stack(after, axis=-1), np.stack(exact_after, axis=-1)
            assert np.max(angle_between(exact_after, theirs.unwrapped.state)) < 1e-6
            assert np.max(angle_between(after, theirs.unwrapped.state)) < 1e-3
            assert (float(reward), bool(ended), bool(exact_ended)) == (paid, terminated, terminated)
        lengths.append(steps)
    assert (max(lengths) < envs.make("Acrobot-v1").horizon) == arrives
    assert arrives or set(lengths) == {500}


def test_the_acrobot_starts_as_gymnasiums_and_has_its_sizes() -> None:
    environment, theirs = acrobot.Acrobot(), gymnasium.make("Acrobot-v1")
    start = jax.vmap(environment.reset)(jax.random.split(jax.random.key(0), 4000))
    for values in start:
        assert values.dtype == jnp.float32
        assert np.all(np.abs(values) <= 0.1)
        np.testing.assert_allclose(np.quantile(values, [0.05, 0.5, 0.95]), [-0.09, 0, 0.09], atol=0.006)
    np.testing.assert_allclose(np.corrcoef(start), np.eye(4), atol=0.08)
    assert theirs.spec is not None
    assert isinstance(theirs.action_space, gymnasium.spaces.Discrete)
    assert environment.action_space == Discrete(int(theirs.action_space.n))
    assert (environment.observation_size,) == theirs.observation_space.shape
    assert (environment.horizon, environment.reward_threshold) == (
        theirs.spec.max_episode_steps,
        theirs.spec.reward_threshold,
    )


@pytest.mark.parametrize("name", envs.ENVIRONMENTS)
def test_made_by_name(name: str) -> None:
    assert envs.make(name).name == name


def test_an_unknown_name_is_one_clear_error() -> None:
    with pytest.raises(
        ValueError, match=r"no environment 'cart-pole'; known: CartPole-v1, .*\. Did you mean 'CartPole-v1'\?"
    ):
        envs.make("cart-pole")
    with pytest.raises(ValueError, match=r"no environment 'Go'; known: CartPole-v1, .*\.$"):
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
        assert space.size == 1


def test_uniform_box_actions() -> None:
    space = Box(2, low=(-1.0, 0.0), high=(1.0, 4.0))
    unit = jnp.asarray([[[0.0, 0.0], [0.5, 0.25]]])
    np.testing.assert_array_equal(space.uniform(unit), [[[-1.0, 0.0], [0.0, 1.0]]])
    assert space.uniform(unit).dtype == jnp.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Discrete(0), "num_actions must be a positive whole number, got 0"),
        (lambda: Box(2, (0.0,), (1.0, 1.0)), "must be 2 numbers each"),
        (lambda: Box(1, (0.0,), (0.0,)), "low below high"),
        (lambda: Box(1, (0.0,), (float("nan"),)), "low below high"),
        (lambda: Box(1, (0.0,), (float("inf"),)).uniform(jnp.zeros(1)), "uniform actions need a space with bounds"),
    ],
)
def test_impossible_spaces(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
