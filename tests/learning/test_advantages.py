"""Advantages and the objective of PPO, compared with naive twins in float64."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import slow_except

from byzpg.learning.advantages import PPO, Steps, generalized_advantages, normalized, objective, shortened
from byzpg.learning.policies import CategoricalMLP, CriticMLP, GaussianMLP

RNG = np.random.default_rng(0)
OPTIONS = PPO(clip=0.1, entropy=0.03, value=0.7)
# These steps are about 0.1 nats away from the policy that is said to have played them, or more.
OPTIONS_OF_KL = {
    "no limit": OPTIONS,
    "within": replace(OPTIONS, largest_kl=5.0),
    "beyond": replace(OPTIONS, largest_kl=0.01),
}
POLICIES = [
    CategoricalMLP(3, hidden=(5,), activation="tanh", num_actions=3),
    GaussianMLP(3, hidden=(5,), activation="tanh", action_size=2, initial_log_std=-0.3),
]


def naive_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    following: np.ndarray,
    terminated: np.ndarray,
    ended: np.ndarray,
    discount: float,
    decay: float,
) -> np.ndarray:
    """A_t as the sum over later steps of the same episode, one environment after the other."""
    advantages = np.zeros(rewards.shape)
    for i in range(rewards.shape[0]):
        for t in range(rewards.shape[1]):
            for h in range(t, rewards.shape[1]):
                after = 0.0 if terminated[i, h] else following[i, h]
                error = rewards[i, h] + discount * after - values[i, h]
                advantages[i, t] += (discount * decay) ** (h - t) * error
                if ended[i, h]:
                    break
    return advantages


def a_segment() -> dict[str, np.ndarray]:
    """Two environments: one ends by the task and by the horizon, the other does not end."""
    ended = np.zeros((2, 7), bool)
    ended[0, 2] = ended[0, 5] = True
    terminated = np.zeros((2, 7), bool)
    terminated[0, 2] = True
    arrays = {name: RNG.normal(size=(2, 7)) for name in ("rewards", "values", "following")}
    return arrays | {"terminated": terminated, "ended": ended}


@pytest.mark.parametrize(("discount", "decay"), [(0.9, 0.7), (1.0, 1.0), (0.95, 0.0)])
def test_advantages_are_sums_of_errors_within_an_episode(discount: float, decay: float) -> None:
    given = a_segment()
    expected = naive_advantages(**given, discount=discount, decay=decay)
    found = generalized_advantages(
        **{name: jnp.asarray(value) for name, value in given.items()}, discount=discount, gae_lambda=decay
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_episode_that_is_cut_off_has_a_value_afterwards_and_one_that_the_task_ended_has_none() -> None:
    """A mistake that is easy to make: it would teach agents that time limits are failures."""
    given = {name: jnp.asarray(value) for name, value in a_segment().items()}
    more = given | {"following": given["following"] + 1}
    before, after = (generalized_advantages(**each, discount=0.5, gae_lambda=0.0) for each in (given, more))
    expected = np.full((2, 7), 0.5)
    expected[0, 2] = 0
    np.testing.assert_allclose(after - before, expected, atol=1e-6)


def test_normalized_advantages_have_mean_0_and_deviation_1() -> None:
    values = normalized(jnp.asarray(RNG.normal(3, 7, size=400)))
    np.testing.assert_allclose([np.mean(values), np.std(values)], [0, 1], atol=1e-5)
    assert np.all(np.isfinite(normalized(jnp.ones(4))))


def naive_network(layers: list[tuple[np.ndarray, np.ndarray]], inputs: np.ndarray) -> np.ndarray:
    values = inputs
    for index, (matrix, bias) in enumerate(layers):
        values = values @ matrix + bias
        if index < len(layers) - 1:
            values = np.tanh(values)
    return values


def naive_objective(
    policy: CategoricalMLP | GaussianMLP, critic: CriticMLP, parameters: np.ndarray, steps: Steps, options: PPO
) -> float:
    """Step by step, in float64."""

    def layers(sizes: tuple[int, ...], values: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        found, start = [], 0
        for inputs, outputs in pairwise(sizes):
            matrix = values[start : start + inputs * outputs].reshape(inputs, outputs)
            start += inputs * outputs
            found.append((matrix, values[start : start + outputs]))
            start += outputs
        return found

    actor = layers(policy.layer_sizes, parameters[: policy.dimension])
    values = layers(critic.layer_sizes, parameters[policy.dimension :])
    log_std = parameters[policy.dimension - policy.num_outputs : policy.dimension]  # of a Gaussian
    total, divergence = 0.0, 0.0
    for i in range(len(steps.advantages)):
        seen, action = np.asarray(steps.observations[i], float), np.asarray(steps.actions[i], float)
        outputs = naive_network(actor, seen)
        if isinstance(policy, CategoricalMLP):
            shares = np.exp(outputs) / np.sum(np.exp(outputs))
            log_probability, entropy = np.log(shares[int(action)]), -np.sum(shares * np.log(shares))
        else:
            deviations = (action - outputs) / np.exp(log_std)
            log_probability = np.sum(-0.5 * deviations**2 - log_std - 0.5 * np.log(2 * np.pi))
            entropy = np.sum(log_std + 0.5 * np.log(2 * np.pi * np.e))
        ratio, advantage = np.exp(log_probability - float(steps.log_probabilities[i])), float(steps.advantages[i])
        clipped = min(max(ratio, 1 - options.clip), 1 + options.clip)
        error = naive_network(values, seen)[0] - float(steps.targets[i])
        total += min(ratio * advantage, clipped * advantage) + options.entropy * entropy
        total -= options.value * error**2 / 2
        divergence += ratio - 1 - np.log(ratio)
    number = len(steps.advantages)
    excess = 0.0 if options.largest_kl is None else max(divergence / number - options.largest_kl, 0.0)
    return total / number - 100 * excess


def some_steps(policy: CategoricalMLP | GaussianMLP, number: int) -> Steps:
    is_discrete = isinstance(policy, CategoricalMLP)
    actions = RNG.integers(0, 3, number) if is_discrete else RNG.normal(size=(number, 2))
    return Steps(
        observations=jnp.asarray(RNG.normal(size=(number, 3)), jnp.float32),
        actions=jnp.asarray(actions),
        log_probabilities=jnp.asarray(RNG.normal(-1.2 if is_discrete else -2.5, 0.2, number), jnp.float32),
        advantages=jnp.asarray(RNG.normal(size=number), jnp.float32),
        targets=jnp.asarray(RNG.normal(size=number), jnp.float32),
    )


@pytest.mark.parametrize("limit", slow_except(["beyond"], OPTIONS_OF_KL))
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_the_objective_and_its_gradient_are_those_of_a_naive_twin(
    policy: CategoricalMLP | GaussianMLP, limit: str
) -> None:
    options = OPTIONS_OF_KL[limit]
    critic = CriticMLP(3, (5,), "tanh")
    steps = some_steps(policy, 12)
    parameters = np.concatenate([np.asarray(each.initial(jax.random.key(1)), np.float64) for each in (policy, critic)])
    value, gradient = jax.value_and_grad(lambda at: objective(policy, critic, at, steps, options))(
        jnp.asarray(parameters, jnp.float32)
    )
    np.testing.assert_allclose(value, naive_objective(policy, critic, parameters, steps, options), rtol=1e-5, atol=1e-6)
    slopes = np.zeros(len(parameters))
    for i in range(len(parameters)):
        shift = np.zeros(len(parameters))
        shift[i] = 1e-6
        ends = [naive_objective(policy, critic, parameters + sign * shift, steps, options) for sign in (1, -1)]
        slopes[i] = (ends[0] - ends[1]) / 2e-6
    np.testing.assert_allclose(gradient, slopes, rtol=2e-4, atol=2e-5)


def test_nothing_is_gained_beyond_the_clip() -> None:
    """A step whose probability has already grown by more than ε does not pull it further."""
    policy, critic = POLICIES[0], CriticMLP(3, (5,), "tanh")
    parameters = jnp.concatenate([policy.initial(jax.random.key(1)), critic.initial(jax.random.key(2))])
    weights = policy.unflatten(parameters[: policy.dimension])
    steps = some_steps(policy, 1)
    now = policy.log_probability(weights, policy.outputs(weights, steps.observations), steps.actions)

    def slope(played: Any, advantage: float) -> float:
        given = Steps(steps.observations, steps.actions, played, jnp.full(1, advantage), steps.targets)
        options = PPO(clip=0.1, value=0.0)
        gradient = jax.grad(lambda at: objective(policy, critic, at, given, options))(parameters)
        return float(jnp.linalg.norm(gradient))

    assert slope(now - 0.2, 1.0) == 0  # r = e^0.2, above 1.1
    assert slope(now - 0.2, -1.0) > 0.01  # it has become more likely though it is bad: that is undone
    assert slope(now + 0.2, -1.0) == 0
    assert slope(now, 1.0) > 0.01


def test_a_vector_is_cut_to_a_norm_and_short_ones_stay() -> None:
    vector = jnp.asarray([3.0, 4.0])
    np.testing.assert_allclose(shortened(vector, 0.5), [0.3, 0.4], rtol=1e-6)
    np.testing.assert_allclose(shortened(vector, 7.0), vector, rtol=1e-6)
    np.testing.assert_array_equal(shortened(jnp.zeros(2), 1.0), [0, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minibatches": 3}, "PPO: minibatches must divide environments × segment = 512 steps, got 3."),
        ({"exchange_every": 3}, "PPO: exchange_every must divide epochs × minibatches = 16 updates, got 3."),
        ({"exchange_every": 32}, "PPO: exchange_every must divide epochs × minibatches = 16 updates, got 32."),
        ({"gae_lambda": 1.5}, r"PPO: gae_lambda must lie in \[0, 1\], got 1.5."),
        ({"clip": 0.0}, "PPO: clip must be positive, got 0.0."),
        ({"largest_kl": 0.0}, "PPO: largest_kl must be positive, got 0.0."),
        ({"largest_kl": np.inf}, "PPO: largest_kl must be a finite number, got inf."),
        ({"entropy": -0.1}, "PPO: entropy must not be negative, got -0.1."),
        ({"epochs": 0}, "PPO: epochs must be a positive whole number, got 0."),
    ],
)
def test_options_that_do_not_fit_are_one_clear_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        PPO(**options)
