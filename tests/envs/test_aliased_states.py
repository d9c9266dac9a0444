"""AliasedStates-v1 against its tables, and its exact return and gradient against all trajectories in float64."""

from itertools import pairwise, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from byzpg import envs
from byzpg.envs.aliased_states import NUM_ACTIONS, NUM_LOOKS, NUM_STATES, REWARDS, TRANSITIONS, AliasedStates
from byzpg.learning.gradients import exact_gradient
from byzpg.learning.policies import CategoricalMLP

TASK = AliasedStates()
HORIZON, DISCOUNT = 3, 0.8
POLICIES = [CategoricalMLP(NUM_LOOKS, hidden, "tanh", num_actions=NUM_ACTIONS) for hidden in ((), (3,))]


def naive_probabilities(policy: CategoricalMLP, parameters: np.ndarray) -> np.ndarray:
    """π(a|s) [state, action] in float64."""
    values, start = np.eye(NUM_LOOKS)[np.arange(NUM_STATES) % NUM_LOOKS], 0
    for layer, (inputs, outputs) in enumerate(pairwise(policy.layer_sizes)):
        matrix = parameters[start : start + inputs * outputs].reshape(inputs, outputs)
        bias = parameters[start + inputs * outputs :][:outputs]
        values, start = values @ matrix + bias, start + (inputs + 1) * outputs
        if layer < len(policy.hidden):
            values = np.tanh(values)
    return np.exp(values) / np.sum(np.exp(values), axis=1, keepdims=True)


def naive_return(policy: CategoricalMLP, parameters: np.ndarray) -> float:
    """J(θ), as a sum over every trajectory."""
    chosen, total = naive_probabilities(policy, parameters), 0.0
    for states in product(range(NUM_STATES), repeat=HORIZON):
        for actions in product(range(NUM_ACTIONS), repeat=HORIZON):
            chance, paid = 1 / NUM_STATES, 0.0
            for h, (state, action) in enumerate(zip(states, actions, strict=True)):
                chance *= chosen[state, action]
                if h + 1 < HORIZON:
                    chance *= TRANSITIONS[state, action, states[h + 1]]
                paid += DISCOUNT**h * REWARDS[state, action]
            total += chance * paid
    return total


@pytest.mark.parametrize("policy", [pytest.param(POLICIES[0], marks=pytest.mark.slow), *POLICIES[1:]], ids=str)
def test_the_exact_gradient_is_that_of_all_trajectories(policy: CategoricalMLP) -> None:
    parameters = np.random.default_rng(0).normal(size=(2, policy.dimension))
    found = exact_gradient(TASK, policy, jnp.asarray(parameters, jnp.float32), HORIZON, DISCOUNT)
    for theta, ours in zip(parameters.astype(np.float32).astype(float), found, strict=True):
        shifts = 1e-5 * np.eye(policy.dimension)
        naive = [(naive_return(policy, theta + s) - naive_return(policy, theta - s)) / 2e-5 for s in shifts]
        np.testing.assert_allclose(ours, naive, atol=2e-6)
        assert np.linalg.norm(naive) > 0.05


@pytest.mark.slow
def test_the_discount_may_differ_between_agents() -> None:
    policy = POLICIES[0]
    parameters = jnp.asarray(np.random.default_rng(1).normal(size=(1, policy.dimension)), jnp.float32)
    both = exact_gradient(TASK, policy, jnp.tile(parameters, (2, 1)), HORIZON, jnp.array([0.5, 0.9]))
    for discount, found in zip((0.5, 0.9), both, strict=True):
        alone = exact_gradient(TASK, policy, parameters, HORIZON, discount)[0]
        np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-7)


def test_steps_follow_the_tables() -> None:
    """With draws on an even grid, every next state comes as often as its probability says."""
    draws = (jnp.arange(400) + 0.5) / 400
    for state, action in product(range(NUM_STATES), range(NUM_ACTIONS)):
        where = jnp.full(400, state)
        following, reward, ended = TASK.step(where, (jnp.full(400, action),), (draws,))
        shares = np.bincount(np.asarray(following), minlength=NUM_STATES) / 400
        np.testing.assert_array_equal(shares, TRANSITIONS[state, action])
        np.testing.assert_array_equal(reward, np.full(400, REWARDS[state, action], np.float32))
        assert not np.any(ended)


def test_the_tables_are_probabilities_and_states_look_alike() -> None:
    np.testing.assert_array_equal(np.sum(TRANSITIONS, axis=2), 1)
    seen = np.asarray(TASK.every_observation())
    np.testing.assert_array_equal(seen[0], seen[2])
    assert not np.array_equal(seen[0], seen[1])
    starts = jax.vmap(TASK.reset)(jax.random.split(jax.random.key(0), 6000))
    np.testing.assert_allclose(np.bincount(np.asarray(starts)) / 6000, 1 / NUM_STATES, atol=0.02)


def test_only_this_task_is_enumerable() -> None:
    assert [name for name, task in envs.ENVIRONMENTS.items() if isinstance(task(), envs.Enumerable)] == [TASK.name]
