"""The agent's own steps, against their definitions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from byzpg import Config
from byzpg.federation.algorithms import Agent

STEP = 0.05
KEY = jax.random.key(0)


def agent(**options: Any) -> Agent:
    tiny: dict[str, Any] = {"hidden": (3,), "step_size": STEP, "horizon": 10}
    return Config(**(tiny | options)).resolved().federation().agent


def draws(number: int, dimension: int) -> np.ndarray:
    """Directions [step, agent, d]."""
    return np.random.default_rng(0).normal(size=(number, 2, dimension)).astype(np.float32)


def test_sgd_goes_up_the_direction_and_keeps_the_parameters_from_before() -> None:
    learner = agent(optimizer="sgd")
    first = jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2))
    (direction,) = draws(1, first.shape[1])
    state = learner.advance(learner.initial(first), jnp.zeros_like(first), jnp.asarray(direction))
    np.testing.assert_allclose(state.parameters, first + STEP * direction, rtol=1e-6)
    np.testing.assert_array_equal(state.previous, first)
    np.testing.assert_array_equal(state.direction, direction)


@pytest.mark.parametrize("epsilon", [1e-8, 0.3])
def test_adam_is_adam_upwards_with_a_state_of_its_own_for_each_agent(epsilon: float) -> None:
    """Kingma & Ba 2015, β = (0.9, 0.999), in float64."""
    learner = agent(optimizer="adam", adam_epsilon=epsilon)
    first = jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2))
    state = learner.initial(first)
    expected, mean, square = np.asarray(first, float), 0.0, 0.0
    for step, direction in enumerate(draws(4, first.shape[1]), start=1):
        before = state.parameters
        state = learner.advance(state, jnp.zeros_like(first), jnp.asarray(direction))
        mean, square = 0.9 * mean + 0.1 * direction, 0.999 * square + 0.001 * np.square(direction, dtype=float)
        expected = expected + STEP * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + epsilon)
        np.testing.assert_array_equal(state.previous, before)
    np.testing.assert_allclose(state.parameters, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "stays"), [({}, False), ({"adam_epsilon": 1e-2}, True), ({"optimizer": "sgd"}, True)], ids=str
)
def test_rounding_moves_parameters_only_if_adam_rescales_it(options: dict[str, Any], stays: bool) -> None:
    """AvgZero makes the mean zero up to rounding, which is all that plain averaging then hands to the optimizer."""
    learner = agent(**options)
    first = jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2))
    (honest,) = np.random.default_rng(0).normal(size=(1, 10, first.shape[1])).astype(np.float32)
    attackers = -np.sum(honest, axis=0, dtype=np.float32) / np.float32(3)
    mean = np.mean(np.stack([*honest, *[attackers] * 3]), axis=0, dtype=np.float32)
    assert 0 < np.max(np.abs(mean)) < 1e-6
    state = learner.advance(learner.initial(first), jnp.zeros_like(first), jnp.broadcast_to(mean, first.shape))
    moved = np.max(np.abs(state.parameters - first))
    assert moved < 1e-4 * STEP if stays else moved > 0.5 * STEP


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_after_agreement_the_direction_is_the_realized_one_for_sgd_alone(optimizer: str) -> None:
    learner = agent(optimizer=optimizer)
    first = jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2))
    direction, agreed = map(jnp.asarray, draws(2, first.shape[1]))
    state = learner.settle(first, learner.advance(learner.initial(first), 2 * direction, direction), agreed)
    np.testing.assert_array_equal(state.parameters, agreed)
    np.testing.assert_array_equal(state.previous, first)
    expected = (agreed - first) / STEP if optimizer == "sgd" else direction
    np.testing.assert_array_equal(state.direction, expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_scripts_memory_makes_small_batches_repeat_the_agents_own_direction(optimizer: str) -> None:
    """Where agreement changes nothing, θ_{t−1} = θ_t: so ω = 1 and both gradients of the small batch cancel."""
    learner = agent(
        conventions="AuthorsScript(initialization=False, coin=False)",
        importance="ImportanceWeights()",
        optimizer=optimizer,
    )
    first = learner.initial(jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2)))
    own, aggregated = map(jnp.asarray, draws(2, first.parameters.shape[1]))
    state = learner.advance(first, own, aggregated)
    np.testing.assert_array_equal(state.previous, state.parameters)
    agreed = learner.settle(first.parameters, state, state.parameters + 1)
    np.testing.assert_array_equal(agreed.previous, state.parameters)
    np.testing.assert_array_equal(agreed.direction, own)
    keys = jax.random.split(KEY, 2)
    episodes = jax.jit(lambda state, keys: learner.play(state.parameters, keys, False))(state, keys)
    estimate, sampled = jax.jit(lambda state: learner.estimate(state, episodes, large=False))(state)
    np.testing.assert_allclose(estimate, own, atol=1e-4)
    np.testing.assert_allclose(sampled.health.largest, 1, rtol=1e-5)
