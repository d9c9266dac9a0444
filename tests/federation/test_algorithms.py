"""The agent's own steps, against their definitions."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from byzpg import Config
from byzpg.federation.agents import Agent
from byzpg.robust.aggregators import TrimmedMean
from byzpg.robust.attacks import ALIE
from byzpg.robust.exchange import exchange

STEP = 0.05
KEY = jax.random.key(0)


def agent(**options: Any) -> Agent:
    tiny: dict[str, Any] = {"hidden": (3,), "step_size": STEP, "horizon": 10, "optimizer": "adam", "decay": 0.0}
    return Config(**(tiny | options)).resolved().federation().agent


def draws(number: int, dimension: int) -> np.ndarray:
    """Directions [step, agent, d]."""
    return np.random.default_rng(0).normal(size=(number, 2, dimension)).astype(np.float32)


def test_sgd_goes_up_the_direction_and_keeps_the_parameters_from_before() -> None:
    learner = agent(optimizer="sgd")
    first = jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2))
    (direction,) = draws(1, first.shape[1])
    state = learner.advance(learner.initial(first), jnp.zeros_like(first), jnp.asarray(direction), True)
    np.testing.assert_allclose(state.parameters, first + STEP * direction, rtol=1e-6)
    np.testing.assert_array_equal(state.previous, first)
    np.testing.assert_array_equal(state.direction, direction)


@pytest.mark.parametrize("epsilon", [1e-8, 0.3])
def test_adam_is_adam_upwards_with_a_state_of_its_own_for_each_agent(epsilon: float) -> None:
    """Kingma & Ba 2015, β = (0.9, 0.999), in float64."""
    learner = agent(optimizer="adam", adam_epsilon=epsilon, momentum=0.0)
    first = jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2))
    state = learner.initial(first)
    expected, mean, square = np.asarray(first, float), 0.0, 0.0
    for step, direction in enumerate(draws(4, first.shape[1]), start=1):
        before = state.parameters
        state = learner.advance(state, jnp.zeros_like(first), jnp.asarray(direction), True)
        mean, square = 0.9 * mean + 0.1 * direction, 0.999 * square + 0.001 * np.square(direction, dtype=float)
        expected = expected + STEP * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + epsilon)
        np.testing.assert_array_equal(state.previous, before)
    np.testing.assert_allclose(state.parameters, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "stays"),
    [({"adam_epsilon": 1e-8}, False), ({"adam_epsilon": 1e-2}, True), ({"optimizer": "sgd"}, True)],
    ids=str,
)
def test_rounding_moves_parameters_only_if_adam_rescales_it(options: dict[str, Any], stays: bool) -> None:
    """AvgZero makes the mean zero up to rounding, which is all that plain averaging then hands to the optimizer."""
    learner = agent(**options)
    first = jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2))
    (honest,) = np.random.default_rng(0).normal(size=(1, 10, first.shape[1])).astype(np.float32)
    attackers = -np.sum(honest, axis=0, dtype=np.float32) / np.float32(3)
    mean = np.mean(np.stack([*honest, *[attackers] * 3]), axis=0, dtype=np.float32)
    assert 0 < np.max(np.abs(mean)) < 1e-6
    state = learner.advance(learner.initial(first), jnp.zeros_like(first), jnp.broadcast_to(mean, first.shape), True)
    moved = np.max(np.abs(state.parameters - first))
    assert moved < 1e-4 * STEP if stays else moved > 0.5 * STEP


def test_normalized_steps_have_the_length_of_the_step_size() -> None:
    learner = agent(optimizer="normalized", momentum=0.0)
    first = jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2))
    (direction,) = draws(1, first.shape[1])
    state = learner.advance(learner.initial(first), jnp.zeros_like(first), jnp.asarray(direction), True)
    step = STEP * direction / np.linalg.norm(direction, axis=1, keepdims=True)
    np.testing.assert_allclose(state.parameters, first + step, rtol=1e-5, atol=1e-6)
    still = learner.advance(state, jnp.zeros_like(first), jnp.zeros_like(first), True)
    np.testing.assert_array_equal(still.parameters, state.parameters)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_decay_linearly_over_the_run(optimizer: str) -> None:
    """Twelve trajectories in batches of three are four updates; the step before the k-th has lost 0.8 (k − 1)/4."""
    options: dict[str, Any] = {"large_batch": 3, "small_batch": 3, "switch_probability": 1.0, "trajectories": 12}
    learner = agent(optimizer=optimizer, momentum=SHARE, decay=0.8, adam_epsilon=1e-8, **options)
    state = learner.initial(jnp.zeros((2, learner.dimension)))
    for number in range(5):
        before = state.parameters
        state = learner.advance(state, before, jnp.ones_like(before), True)
        expected = STEP * (1 - 0.8 * number / 4)
        np.testing.assert_allclose(state.parameters - before, np.full(before.shape, expected), rtol=1e-3)


def test_the_realized_direction_does_not_shrink_with_the_step() -> None:
    learner = agent(optimizer="sgd", momentum=0.0, decay=1.0, large_batch=3, small_batch=3, trajectories=12)
    state = learner.initial(jnp.zeros((2, learner.dimension)))
    for _ in range(5):
        before = state.parameters
        state = learner.advance(state, before, jnp.ones_like(before), True)
        state = learner.settle(before, state, state.parameters)
        np.testing.assert_array_equal(state.direction, np.ones(before.shape))


@pytest.mark.parametrize(("algorithm", "anchored"), [("SVRPG", True), ("PAGE-PG", False)])
def test_small_batches_of_svrpg_correct_the_last_large_batch(algorithm: str, anchored: bool) -> None:
    learner = agent(algorithm=algorithm, optimizer="sgd")
    first = learner.initial(jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2)))
    large, small = map(jnp.asarray, draws(2, first.parameters.shape[1]))
    at_large = learner.advance(first, large, large, True)
    at_small = learner.advance(at_large, small, small, False)
    np.testing.assert_array_equal(at_small.previous, first.parameters if anchored else at_large.parameters)
    np.testing.assert_array_equal(at_small.direction, large if anchored else small)


def test_transport_plays_ahead_of_the_parameters() -> None:
    learner = agent(momentum=0.75, transport=True, optimizer="sgd")
    first = learner.initial(jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2)))
    keys = jax.random.split(KEY, 2)
    np.testing.assert_array_equal(learner.request(first, None, keys, large=True)[:, 0], first.parameters)
    (direction,) = map(jnp.asarray, draws(1, first.parameters.shape[1]))
    state = learner.advance(first, direction, direction, True)
    ahead = state.parameters + 3 * (state.parameters - first.parameters)
    np.testing.assert_allclose(learner.request(state, None, keys, large=True)[:, 0], ahead, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(learner.request(state, None, keys, large=False)[:, 0], state.parameters)


def test_transport_keeps_a_history_from_lagging_behind_where_the_return_is_quadratic() -> None:
    """∇J(θ) = −θ: with it, the message is ∇J(θ_t); without it, one of earlier parameters."""

    def lag(transport: bool) -> float:
        learner = agent(momentum=0.75, transport=transport, optimizer="sgd")
        state = learner.initial(jnp.asarray(draws(1, learner.policy.dimension)[0]))
        history, message = learner.initial_history(state.parameters), state.parameters
        before = state
        for _ in range(60):
            points = learner.request(state, None, jax.random.split(KEY, 2), large=True)[:, 0]
            history, message = learner.remember(history, -points)
            before, state = state, learner.advance(state, message, message, True)
        return float(np.linalg.norm(message + before.parameters) / np.linalg.norm(before.parameters))

    assert lag(transport=True) < 0.02
    assert lag(transport=False) > 0.1


def test_half_of_a_defensive_batch_is_played_with_the_previous_parameters() -> None:
    """By agents whose policies can be told apart: one always moves left, one always right."""
    learner = agent(importance="DefensiveSampling", small_batch=4)
    zeros = jnp.zeros((2, learner.policy.dimension))
    left, right = zeros.at[:, -2].set(50.0), zeros.at[:, -1].set(50.0)  # the last layer's biases
    state = replace(learner.initial(left), previous=right)
    keys = jax.random.split(KEY, 2)
    episodes = learner.play(learner.request(state, None, keys, large=False), keys, large=False)
    assert episodes.lengths.shape == (2, 4)
    actions = np.asarray(episodes.actions)[:, :, 0]
    np.testing.assert_array_equal(actions, [[0, 0, 1, 1]] * 2)


# Momentum

SHARE = 0.7


def test_a_history_is_the_mean_of_the_agents_own_estimates_weighted_by_their_age() -> None:
    """m_t/(1 − β^t) = Σ_s (1 − β) β^(t−s) ṽ_s/(1 − β^t), in float64, whose weights add up to 1."""
    learner = agent(momentum=SHARE)
    estimates = draws(4, 6)
    history = learner.initial_history(jnp.zeros((2, 6)))
    for step, estimate in enumerate(estimates, start=1):
        history, message = learner.remember(history, jnp.asarray(estimate))
        weights = (1 - SHARE) * SHARE ** np.arange(step - 1.0, -1, -1) / (1 - SHARE**step)
        assert np.isclose(weights.sum(), 1)
        np.testing.assert_allclose(message, np.einsum("s,sad->ad", weights, estimates[:step]), rtol=1e-5, atol=1e-6)


def test_adam_at_the_agents_scales_messages_by_the_agents_own_squares_and_steps_by_the_step_size_alone() -> None:
    learner = agent(momentum=SHARE, optimizer="local-adam", adam_epsilon=1e-3)
    estimates = draws(4, learner.dimension) * np.logspace(-3, 2, learner.dimension, dtype=np.float32)
    state = learner.initial(jnp.zeros((2, learner.dimension)))
    history: Any = learner.initial_history(state.parameters)
    message, mean, square = state.parameters, 0.0, 0.0
    for step, estimate in enumerate(estimates.astype(float), start=1):
        history, message = learner.remember(history, jnp.asarray(estimate, jnp.float32))
        mean, square = SHARE * mean + (1 - SHARE) * estimate, 0.999 * square + 0.001 * estimate**2
        expected = mean / (1 - SHARE**step) / (np.sqrt(square / (1 - 0.999**step)) + 1e-3)
        np.testing.assert_allclose(message, expected, rtol=1e-3, atol=1e-5)
    moved = learner.advance(state, message, message, True).parameters
    np.testing.assert_allclose(moved, STEP * message, rtol=1e-6)
    spoiled = jnp.asarray(estimates[0]).at[0, 1].set(jnp.inf)
    kept: Any = learner.remember(history, spoiled)[0]
    np.testing.assert_array_equal(kept.squares[0], history.squares[0])
    assert np.any(np.asarray(kept.squares[1] != history.squares[1]))


def test_without_momentum_the_message_is_the_estimate() -> None:
    learner, estimate = agent(momentum=0.0), jnp.asarray(draws(1, 6)[0])
    assert learner.initial_history(estimate) is None
    assert learner.recalled(estimate, jnp.zeros(2, int)) is None
    history, message = learner.remember(None, estimate)
    assert history is None
    assert message is estimate


def test_an_estimate_that_is_not_finite_is_sent_and_forgotten() -> None:
    learner, estimates = agent(momentum=SHARE), draws(3, 6)
    spoiled = estimates.copy()
    spoiled[1, 0, 2] = np.nan
    history = learner.initial_history(jnp.zeros((2, 6)))
    messages = []
    for estimate in spoiled:
        history, message = learner.remember(history, jnp.asarray(estimate))
        messages.append(np.asarray(message))
    assert np.isnan(messages[1][0, 2])
    assert np.all(np.isfinite(messages[2]))
    # The first agent's history has two estimates now, the second one's three.
    np.testing.assert_allclose(
        messages[2][0], (SHARE * estimates[0, 0] + estimates[2, 0]) / (1 + SHARE), rtol=1e-5, atol=1e-6
    )


def test_a_history_that_was_lost_continues_from_a_direction() -> None:
    learner = agent(momentum=SHARE)
    direction, estimate = map(jnp.asarray, draws(2, 6))
    recalled = learner.recalled(direction, jnp.full(2, 5))
    assert recalled is not None
    history, message = learner.remember(recalled, estimate)
    weight = (1 - SHARE) / (1 - SHARE**6)
    np.testing.assert_allclose(message, (1 - weight) * direction + weight * estimate, rtol=1e-5, atol=1e-6)
    assert history is not None
    np.testing.assert_array_equal(history.count, 6)


def test_with_momentum_adam_has_no_first_moment() -> None:
    learner = agent(optimizer="adam", adam_epsilon=1e-8, momentum=SHARE)
    first = jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2))
    state, square, expected = learner.initial(first), 0.0, np.asarray(first, float)
    for step, direction in enumerate(draws(3, first.shape[1]), start=1):
        state = learner.advance(state, jnp.zeros_like(first), jnp.asarray(direction), True)
        square = 0.999 * square + 0.001 * np.square(direction, dtype=float)
        expected = expected + STEP * direction / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
    np.testing.assert_allclose(state.parameters, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("private", [True, False])
def test_attackers_cannot_hide_in_the_noise_of_agents_with_private_histories(private: bool) -> None:
    """ALIE shifts the aggregate by the spread between honest agents, in the same direction in every iteration.

    Private histories shrink that spread before the rule is applied. A history of aggregates, which all agents share,
    must fail: the same shift, iteration after iteration, becomes a shift of the whole history.
    """
    learner, num_agents, num_attackers, truth = agent(momentum=0.9), 13, 3, 1.0
    noise = np.random.default_rng(0).normal(size=(60, num_agents, 40))
    rule, attack = TrimmedMean(), ALIE(1.5)
    histories = learner.initial_history(jnp.zeros((num_agents, 40)))
    shared = learner.initial_history(jnp.zeros((1, 40)))
    found = []
    for iteration, each in enumerate(truth + noise):
        vectors = jnp.asarray(each, jnp.float32)
        if private:
            histories, vectors = learner.remember(histories, vectors)
        aggregated = exchange(
            rule,
            vectors,
            byzantine=tuple(range(num_agents - num_attackers, num_agents)),
            attack=attack,
            num_byzantine=num_attackers,
            key=jax.random.fold_in(KEY, iteration),
            at_server=True,
        )[0]
        if not private:
            shared, aggregated = learner.remember(shared, jnp.reshape(aggregated, (1, -1)))
        found.append(np.mean(aggregated) - truth)
    error = abs(np.mean(found[30:]))
    assert error < 0.15 if private else error > 0.3, error


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_after_agreement_the_direction_is_the_realized_one_for_sgd_alone(optimizer: str) -> None:
    learner = agent(optimizer=optimizer)
    first = jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2))
    direction, agreed = map(jnp.asarray, draws(2, first.shape[1]))
    state = learner.settle(first, learner.advance(learner.initial(first), 2 * direction, direction, True), agreed)
    np.testing.assert_array_equal(state.parameters, agreed)
    np.testing.assert_array_equal(state.previous, first)
    expected = (agreed - first) / STEP if optimizer == "sgd" else direction
    np.testing.assert_array_equal(state.direction, expected)


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_the_scripts_memory_makes_small_batches_repeat_the_agents_own_direction(optimizer: str) -> None:
    """Where agreement changes nothing, θ_{t−1} = θ_t: so ω = 1 and both gradients of the small batch cancel."""
    learner = agent(
        conventions="AuthorsScript(initialization=False, coin=False)",
        importance="ImportanceWeights()",
        optimizer=optimizer,
    )
    first = learner.initial(jax.vmap(learner.policy.initial)(jax.random.split(KEY, 2)))
    own, aggregated = map(jnp.asarray, draws(2, first.parameters.shape[1]))
    state = learner.advance(first, own, aggregated, True)
    np.testing.assert_array_equal(state.previous, state.parameters)
    agreed = learner.settle(first.parameters, state, state.parameters + 1)
    np.testing.assert_array_equal(agreed.previous, state.parameters)
    np.testing.assert_array_equal(agreed.direction, own)
    keys = jax.random.split(KEY, 2)
    points = learner.request(state, None, keys, large=False)
    episodes = jax.jit(lambda points, keys: learner.play(points, keys, False))(points, keys)
    estimate, sampled = jax.jit(lambda state: learner.digest(state, points, episodes, keys, large=False))(state)
    np.testing.assert_allclose(estimate, own, atol=1e-4)
    np.testing.assert_allclose(sampled.health.largest, 1, rtol=1e-5)
