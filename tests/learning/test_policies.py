"""Policies against a naive float64 forward pass, and their draws and densities against exact ones."""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from byzpg.envs.spaces import Box, Discrete
from byzpg.learning.policies import ACTIVATIONS, CategoricalMLP, GaussianMLP, policy_for

POLICIES = [
    CategoricalMLP(3, (), "relu", False, num_actions=2),
    CategoricalMLP(4, (16, 16), "relu", False, num_actions=3),
    CategoricalMLP(2, (5,), "tanh", True, num_actions=4),
    CategoricalMLP(3, (4, 3), "elu", False, num_actions=2),
    CategoricalMLP(1, (6,), "silu", True, num_actions=2),
    GaussianMLP(3, (), "tanh", True, action_size=2, initial_log_std=-0.5),
    GaussianMLP(2, (7, 5), "elu", False, action_size=1),
    GaussianMLP(2, (4,), "silu", False, action_size=3, initial_log_std=0.3),
    GaussianMLP(1, (4, 4), "relu", True, action_size=2),
]
CATEGORICAL = [policy for policy in POLICIES if isinstance(policy, CategoricalMLP)]
GAUSSIAN = [policy for policy in POLICIES if isinstance(policy, GaussianMLP)]


# The naive twin, in float64


def naive_layers(policy: CategoricalMLP | GaussianMLP, parameters: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    sizes, layers, start = [policy.observation_size, *policy.hidden, policy.num_outputs], [], 0
    for inputs, outputs in pairwise(sizes):
        matrix = np.array(parameters[start : start + inputs * outputs], np.float64).reshape(inputs, outputs)
        bias = np.array(parameters[start + inputs * outputs : start + (inputs + 1) * outputs], np.float64)
        layers.append((matrix, bias))
        start += (inputs + 1) * outputs
    return layers


def naive_activation(name: str, x: float) -> float:
    if name == "relu":
        return max(x, 0.0)
    if name == "tanh":
        return np.tanh(x)
    if name == "elu":
        return x if x > 0 else np.exp(x) - 1
    return x / (1 + np.exp(-x))  # silu


def naive_outputs(policy: CategoricalMLP | GaussianMLP, parameters: np.ndarray, observation: np.ndarray) -> np.ndarray:
    *inner, (matrix, bias) = naive_layers(policy, parameters)
    values = observation.astype(np.float64)
    for weights, shifts in inner:
        values = np.array([naive_activation(policy.activation, x) for x in values @ weights + shifts])
    values = values @ matrix + bias
    return np.tanh(values) if policy.output_tanh else values


def naive_log_probability(
    policy: CategoricalMLP | GaussianMLP, parameters: np.ndarray, observation: np.ndarray, action: Any
) -> float:
    outputs = naive_outputs(policy, parameters, observation)
    if isinstance(policy, CategoricalMLP):
        return float(np.log(np.exp(outputs[action]) / np.sum(np.exp(outputs))))
    stds = np.exp(np.array(parameters[-policy.num_outputs :], np.float64))
    return sum(np.log(NormalDist(m, s).pdf(float(a))) for m, s, a in zip(outputs, stds, action, strict=True))


# The same quantities from byzpg, in one program per policy


class Evaluated(NamedTuple):
    parameters: np.ndarray  # [d]
    observations: np.ndarray  # [n, features]
    actions: np.ndarray  # [n, ...]
    outputs: np.ndarray  # [n, outputs]
    shaped_outputs: np.ndarray  # [2, n/2, outputs], of the observations in that shape
    log_probabilities: np.ndarray  # [n]
    scores: np.ndarray  # [n, d], their gradients
    modes: np.ndarray  # [n, ...]
    modes_log_probabilities: np.ndarray  # [n]
    drawn: np.ndarray  # [noise, n, ...], for an even grid of noise


GRID = (np.arange(20_000, dtype=np.float32) + 0.5) / 20_000


@cache
def evaluated(policy: CategoricalMLP | GaussianMLP) -> Evaluated:
    rng = np.random.default_rng(policy.dimension)
    parameters = rng.normal(0, 0.6, policy.dimension).astype(np.float32)
    observations = rng.normal(size=(12, policy.observation_size)).astype(np.float32)
    if isinstance(policy, CategoricalMLP):
        actions: np.ndarray = rng.integers(policy.num_actions, size=12).astype(np.int32)
    else:
        actions = rng.normal(size=(12, policy.num_outputs)).astype(np.float32)

    def log_probability(parameters: Array, observation: Array, action: Array) -> Array:
        weights = policy.unflatten(parameters)
        return policy.log_probability(weights, policy.outputs(weights, observation), action)

    @jax.jit
    def evaluate(parameters: Array, observations: Array, actions: Array, noise: Array) -> tuple[Array, ...]:
        weights = policy.unflatten(parameters)
        outputs = policy.outputs(weights, observations)
        modes = policy.mode(weights, outputs)
        return (
            outputs,
            policy.outputs(weights, observations.reshape(2, 6, -1)),
            policy.log_probability(weights, outputs, actions),
            jax.vmap(jax.grad(log_probability), (None, 0, 0))(parameters, observations, actions),
            modes,
            policy.log_probability(weights, outputs, modes),
            policy.draw(weights, outputs, noise),
        )

    noise = np.broadcast_to(GRID[:, None, None], (len(GRID), 1, policy.noise_size))
    found = evaluate(jnp.asarray(parameters), *map(jnp.asarray, (observations, actions, noise)))
    return Evaluated(parameters, observations, actions, *map(np.asarray, found))


def test_the_table_covers_every_choice() -> None:
    assert {policy.activation for policy in POLICIES if policy.hidden} == set(ACTIVATIONS)
    for family in (CATEGORICAL, GAUSSIAN):
        assert {policy.output_tanh for policy in family} == {False, True}
        assert {len(policy.hidden) for policy in family} == {0, 1, 2}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_outputs_and_log_probabilities_are_the_naive_ones(policy: CategoricalMLP | GaussianMLP) -> None:
    of = evaluated(policy)
    expected = [naive_outputs(policy, of.parameters, observation) for observation in of.observations]
    np.testing.assert_allclose(of.outputs, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of.shaped_outputs.reshape(of.outputs.shape), expected, rtol=1e-5, atol=1e-6)
    expected = [
        naive_log_probability(policy, of.parameters, observation, action)
        for observation, action in zip(of.observations, of.actions, strict=True)
    ]
    np.testing.assert_allclose(of.log_probabilities, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_scores_are_finite_differences(policy: CategoricalMLP | GaussianMLP) -> None:
    of, step = evaluated(policy), 1e-6
    for observation, action, score in zip(of.observations[:3], of.actions, of.scores, strict=False):
        for coordinate in range(policy.dimension):
            shift = step * (np.arange(policy.dimension) == coordinate)
            above = naive_log_probability(policy, of.parameters + shift, observation, action)
            below = naive_log_probability(policy, of.parameters - shift, observation, action)
            np.testing.assert_allclose(score[coordinate], (above - below) / (2 * step), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_no_action_is_likelier_than_the_mode(policy: CategoricalMLP | GaussianMLP) -> None:
    of = evaluated(policy)
    assert of.modes.shape == of.actions.shape
    assert of.modes.dtype == of.actions.dtype
    assert np.all(of.modes_log_probabilities >= of.log_probabilities)
    if isinstance(policy, CategoricalMLP):
        np.testing.assert_array_equal(of.modes, np.argmax(of.outputs, axis=1))
    else:
        np.testing.assert_array_equal(of.modes, of.outputs)


# Draws and densities


@pytest.mark.parametrize("policy", CATEGORICAL, ids=str)
def test_an_even_grid_of_noise_draws_actions_as_often_as_softmax_says(policy: CategoricalMLP) -> None:
    of = evaluated(policy)
    assert of.drawn.shape == (len(GRID), len(of.observations))
    assert of.drawn.dtype == np.int32
    frequencies = np.mean(of.drawn[..., None] == np.arange(policy.num_actions), axis=0)
    exponentials = np.exp(of.outputs.astype(np.float64))
    expected = exponentials / np.sum(exponentials, axis=1, keepdims=True)
    assert np.max(np.abs(expected - 1 / policy.num_actions)) > 0.05
    np.testing.assert_allclose(frequencies, expected, atol=1.1 / len(GRID))


@pytest.mark.parametrize("policy", GAUSSIAN, ids=str)
def test_an_even_grid_of_noise_draws_the_quantiles_of_a_normal(policy: GaussianMLP) -> None:
    of = evaluated(policy)
    quantiles = np.array([NormalDist().inv_cdf(float(noise)) for noise in GRID])
    stds = np.exp(of.parameters[-policy.action_size :].astype(np.float64))
    expected = of.outputs + quantiles[:, None, None] * stds
    np.testing.assert_allclose(of.drawn, expected, rtol=2e-5, atol=2e-5)


@jax.jit
def extremes(outputs: Array, noise: Array, actions: Array) -> tuple[Array, Array]:
    policy = CategoricalMLP(1, (), num_actions=3)
    return policy.draw((), outputs, noise), policy.log_probability((), outputs, actions)


def test_extreme_noise_and_outputs_draw_possible_actions() -> None:
    outputs = np.array([[500.0, -500.0, 0.0], [-500.0, 0.0, 500.0], [0.0, 0.0, 0.0]], np.float32)
    lowest, highest = np.zeros((3, 1), np.float32), np.full((3, 1), 1 - 2.0**-24, np.float32)
    drawn, log_probabilities = extremes(outputs, lowest, np.array([2, 2, 1]))
    np.testing.assert_array_equal(drawn, [0, 2, 0])
    np.testing.assert_allclose(log_probabilities, [-500, 0, -np.log(3)], rtol=1e-6)
    np.testing.assert_array_equal(extremes(outputs, highest, np.array([2, 2, 1]))[0], [0, 2, 2])


@jax.jit
def normals(mean: Array, log_std: Array, noise: Array, actions: Array) -> tuple[Array, Array]:
    policy, weights = GaussianMLP(1, (), action_size=2), ((), (log_std,))
    return policy.draw(weights, mean, noise), policy.log_probability(weights, mean, actions)


def test_normal_draws_have_the_moments_and_the_density_of_the_policy() -> None:
    mean, log_std = np.array([0.5, -2.0], np.float32), np.array([-1.0, 0.7], np.float32)
    noise = np.random.default_rng(0).random((100_000, 2), np.float32)
    noise[0] = 0  # a possible uniform draw, at which the inverse of the normal distribution is −∞
    axes = [m + np.exp(s) * np.linspace(-8, 8, 201) for m, s in zip(mean, log_std, strict=True)]
    actions = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).astype(np.float32)
    drawn, log_density = normals(mean, log_std, noise, actions)
    standardised: np.ndarray = (np.asarray(drawn, np.float64) - mean) / np.exp(log_std)
    assert np.all(np.isfinite(standardised))
    assert np.all(standardised[0] < NormalDist().inv_cdf(2.0**-23))
    # 4.5 standard errors: the k-th power's variance is E z^2k − (E z^k)².
    errors = 4.5 * np.sqrt(np.array([1, 2, 15, 96]) / len(noise))
    for power, expected, error in zip((1, 2, 3, 4), (0, 1, 0, 3), errors, strict=True):
        np.testing.assert_allclose(np.mean(standardised**power, axis=0), expected, atol=error)
    assert abs(np.corrcoef(standardised.T)[0, 1]) < 0.015
    cell = np.prod(np.ptp(axes, axis=1) / 200)
    np.testing.assert_allclose(np.sum(np.exp(log_density), dtype=np.float64) * cell, 1, rtol=1e-5)


@pytest.mark.parametrize(("num_actions", "largest"), [(2, 0.88), (4, 0.71)])
def test_tanh_on_the_outputs_caps_the_largest_probability_and_probabilities_add_up_to_one(
    num_actions: int, largest: float
) -> None:
    rng = np.random.default_rng(0)
    observations = jnp.asarray(rng.normal(size=(500, 3)), jnp.float32)

    @partial(jax.jit, static_argnums=0)
    def probabilities(policy: CategoricalMLP | GaussianMLP, parameters: Array) -> Array:
        weights = policy.unflatten(parameters)
        outputs = policy.outputs(weights, observations)
        return jnp.exp(policy.log_probability(weights, outputs, jnp.arange(num_actions)[:, None]))

    reached = {}
    for output_tanh in (True, False):
        policy = CategoricalMLP(3, (), "relu", output_tanh, num_actions=num_actions)
        found = probabilities(policy, jnp.asarray(rng.normal(0, 30, policy.dimension), jnp.float32))
        np.testing.assert_allclose(np.sum(found, axis=0), 1, rtol=1e-5)  # outputs of 100 have errors of 8e-6
        reached[output_tanh] = float(np.max(found))
    assert reached[True] == pytest.approx(np.e / (np.e + (num_actions - 1) / np.e), abs=1e-3)
    assert reached[True] == pytest.approx(largest, abs=0.005)
    assert reached[False] > 0.999


# The flat vector


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_parameters_are_consecutive(policy: CategoricalMLP | GaussianMLP) -> None:
    parameters: Any = np.arange(policy.dimension, dtype=np.float32)
    weights = policy.unflatten(parameters)
    np.testing.assert_array_equal(np.concatenate([np.ravel(part) for layer in weights for part in layer]), parameters)
    layers = naive_layers(policy, parameters)
    for (matrix, bias), (expected_matrix, expected_bias) in zip(weights[: len(layers)], layers, strict=True):
        np.testing.assert_array_equal(matrix, expected_matrix)
        np.testing.assert_array_equal(bias, expected_bias)


def test_dimensions_by_hand() -> None:
    assert CategoricalMLP(4, (16, 16), num_actions=2).dimension == 4 * 16 + 16 + 16 * 16 + 16 + 16 * 2 + 2
    assert CategoricalMLP(3, (), num_actions=2).dimension == 8
    assert GaussianMLP(3, (5,), action_size=2).dimension == 3 * 5 + 5 + 5 * 2 + 2 + 2


def test_initial_parameters_are_uniform_within_their_bounds() -> None:
    policy = GaussianMLP(25, (40, 40), action_size=9, initial_log_std=-1.25)
    draw = jax.jit(policy.initial)
    parameters = np.asarray(draw(jax.random.key(3)))
    assert parameters.shape == (policy.dimension,)
    assert parameters.dtype == np.float32
    layers = naive_layers(policy, parameters)
    scaled = []
    for matrix, bias in layers:
        scaled.append(matrix.ravel() * np.sqrt(len(matrix)))
        scaled.append(bias * np.sqrt(len(matrix)))
    for part in scaled:
        assert np.max(np.abs(part)) <= 1
        # The standard deviation of a quantile of n uniform draws is at most 1/√n.
        quantiles = np.quantile(part, [0.05, 0.25, 0.5, 0.75, 0.95])
        np.testing.assert_allclose(quantiles, [-0.9, -0.5, 0, 0.5, 0.9], atol=3 / np.sqrt(part.size))
    for i, part in enumerate(scaled):  # no part repeats the draws of another
        assert all(abs(part[0] - other[0]) > 1e-5 for other in scaled[:i])
    np.testing.assert_array_equal(parameters[-9:], -1.25)
    np.testing.assert_array_equal(draw(jax.random.key(3)), parameters)
    assert not np.any(np.asarray(draw(jax.random.key(4)))[:100] == parameters[:100])


# Policies by kind


def test_auto_chooses_the_policy_that_fits() -> None:
    box = Box(2, (-1.0, -1.0), (1.0, 1.0))
    network: dict[str, Any] = {"hidden": (8,), "activation": "tanh", "output_tanh": True}
    for kind in ("auto", "categorical"):
        assert policy_for(kind, 4, Discrete(3), **network) == CategoricalMLP(4, **network, num_actions=3)
    for kind in ("auto", "gaussian"):
        assert policy_for(kind, 4, box, **network) == GaussianMLP(4, **network, action_size=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: policy_for("categorical", 3, Box(1, (-1.0,), (1.0,))),
            r"categorical does not fit Box\(.*\): use policy = gaussian",
        ),
        (
            lambda: policy_for("gaussian", 3, Discrete(2)),
            r"gaussian does not fit Discrete\(.*\): use policy = categorical",
        ),
        (
            lambda: policy_for("beta", 3, Discrete(2)),
            "must be auto, categorical or gaussian; got 'beta'",
        ),
        (lambda: CategoricalMLP(3, (4, 0)), "hidden must be a positive whole number, got 0"),
        (lambda: CategoricalMLP(3, activation="gelu"), "activation must be one of relu, tanh, elu, silu; got 'gelu'"),
        (lambda: GaussianMLP(3, activation="gelu"), "activation must be one of"),
        (lambda: GaussianMLP(3, initial_log_std=float("-inf")), "initial_log_std must be a finite number"),
    ],
)
def test_impossible_policies(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
