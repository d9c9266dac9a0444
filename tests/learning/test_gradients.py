"""Gradient estimates: golden values, unbiasedness on a task that can be enumerated, and the variance of PAGE."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from tiers import slow_except

from byzpg.config import Config
from byzpg.envs.spaces import Discrete
from byzpg.learning.gradients import (
    GPOMDP,
    REINFORCE,
    Correction,
    DefensiveSampling,
    Estimator,
    Health,
    HessianVector,
    ImportanceWeights,
    SmallBatch,
    corrected_gradient,
    gradient,
    log_probabilities,
    weighted_scores,
)
from byzpg.learning.policies import CategoricalMLP, GaussianMLP, Numbers, Policy
from byzpg.learning.rollouts import Clock, Episodes, rollout
from byzpg.robust.components import Component, with_numbers, without_numbers

ESTIMATORS = [REINFORCE(), REINFORCE("leave-one-out"), GPOMDP(), GPOMDP("leave-one-out")]
TRACES = [GPOMDP(trace_decay=0.9), GPOMDP("leave-one-out", trace_decay=0.5)]
IMPORTANCE = [ImportanceWeights(mode, cap) for mode in ("trajectory", "per-decision") for cap in (None, 1.0, 2.5)]
FLOORED = [ImportanceWeights(mode, cap, 1e-3) for mode in ("trajectory", "per-decision") for cap in (None, 0.9)]
GATES: tuple[float | Literal["health"], ...] = (0.0, 1.0, 0.3, "health")


# Naive twins in float64, by the definitions


def naive_coefficients(estimator: Estimator, rewards: np.ndarray, discount: float, weights: np.ndarray) -> np.ndarray:
    """c [agent, episode, time]; `weights` [agent, episode, time] are those of the steps up to each time."""
    coefficients = np.zeros(rewards.shape)
    num_agents, num_episodes, horizon = rewards.shape
    for k in range(num_agents):
        for i in range(num_episodes):
            others = [j for j in range(num_episodes) if j != i]
            for t in range(horizon):
                for h in range(t if isinstance(estimator, GPOMDP) else 0, horizon):
                    baseline = 0.0
                    if estimator.baseline == "leave-one-out":
                        baseline = sum(discount**h * rewards[k, j, h] for j in others) / len(others)
                    weight = weights[k, i, -1]
                    if isinstance(estimator, GPOMDP):
                        weight = weights[k, i, h] * (estimator.trace_decay or 1) ** (h - t)
                    coefficients[k, i, t] += weight * (discount**h * rewards[k, i, h] - baseline)
    return coefficients


def naive_weights(importance: ImportanceWeights, log_ratios: np.ndarray, now: np.ndarray) -> np.ndarray:
    """ω [agent, episode, time], after the cap."""
    weights = np.zeros(log_ratios.shape)
    for (*episode, time), _ in np.ndenumerate(log_ratios):
        steps = slice(None) if importance.mode == "trajectory" else slice(time + 1)
        probability = np.prod(np.exp(now[*episode, steps]))
        weight = np.prod(np.exp(log_ratios[*episode, steps])) * probability / (probability + importance.floor)
        weights[*episode, time] = weight if importance.cap is None else min(weight, importance.cap)
    return weights


def naive_health(importance: ImportanceWeights, log_ratios: np.ndarray) -> list[list[float]]:
    """Per agent: largest ω before the cap, effective sample size after it, fraction above it, β of the gate."""
    health = []
    for of_agent in log_ratios:
        plain = [np.exp(np.sum(of_episode)) for of_episode in of_agent]
        cap = np.inf if importance.cap is None else importance.cap
        capped = [min(weight, cap) for weight in plain]
        size, mean = len(capped), sum(capped) / len(capped)
        sample = sum(capped) ** 2 / (size * sum(weight**2 for weight in capped))
        evenness = 1 if size == 1 else (sample - 1 / size) / (1 - 1 / size)
        share_above = sum(weight > cap for weight in plain) / size
        health.append([max(plain), sample, share_above, evenness * min(mean, 1 / mean)])
    return health


# Golden values


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Rewards and log-ratios [2 agents, 4 episodes, 9 steps], 0 after each episode's end."""
    rng = np.random.default_rng(0)
    alive = np.arange(9) < np.array([[9, 3, 1, 6], [2, 9, 9, 5]])[..., None]
    rewards, log_ratios = rng.normal(1, 2, alive.shape), rng.normal(0.1, 0.5, alive.shape)
    return np.where(alive, rewards, 0).astype(np.float32), np.where(alive, log_ratios, 0).astype(np.float32)


@jax.jit
def all_coefficients(rewards: Array, weights: Array) -> list[tuple[Array, Array]]:
    """The coefficients of every estimator, without weights and with them."""
    return [
        (each.coefficients(rewards, 0.9, None), each.coefficients(rewards, 0.9, weights))
        for each in ESTIMATORS + TRACES
    ]


def test_coefficients_are_the_naive_ones() -> None:
    rewards, log_ratios = examples()
    log_weights = np.cumsum(log_ratios, axis=2)
    found = all_coefficients(rewards, np.exp(log_weights))
    for estimator, (plain, weighted) in zip(ESTIMATORS + TRACES, found, strict=True):
        ones, weights = np.ones(rewards.shape), np.exp(log_weights.astype(np.float64))
        expected = naive_coefficients(estimator, rewards.astype(np.float64), 0.9, ones)
        np.testing.assert_allclose(plain, expected, rtol=1e-5, atol=1e-5, err_msg=str(estimator))
        expected = naive_coefficients(estimator, rewards.astype(np.float64), 0.9, weights)
        np.testing.assert_allclose(weighted, expected, rtol=1e-5, atol=1e-5, err_msg=str(estimator))


def test_every_agent_may_have_its_own_trace_decay() -> None:
    rewards, log_ratios = examples()
    code, numbers = without_numbers(GPOMDP(trace_decay=0.9))
    assert numbers == (0.9,)
    assert without_numbers(GPOMDP())[1] == (), "a plain sum needs no number"
    found = with_numbers(code, [jnp.array([0.9, 0.5])]).coefficients(jnp.asarray(rewards), 0.9, jnp.exp(log_ratios))
    for agent, decay in enumerate((0.9, 0.5)):
        alone = GPOMDP(trace_decay=decay).coefficients(jnp.asarray(rewards), 0.9, jnp.exp(log_ratios))
        np.testing.assert_allclose(found[agent], alone[agent], rtol=1e-6)


def chances(log_ratios: np.ndarray) -> np.ndarray:
    """Log-probabilities of the steps with these ratios; the longest episodes have a probability of about 1e-3."""
    return np.where(log_ratios == 0, 0, np.random.default_rng(1).uniform(-1.5, 0, log_ratios.shape)).astype(np.float32)


@jax.jit
def all_log_weights(log_ratios: Array, now: Array) -> list[tuple[Array, Health]]:
    return [importance.log_weights(log_ratios + now, now) for importance in IMPORTANCE + FLOORED]


def test_importance_weights_with_a_floor_are_the_naive_ones() -> None:
    _, log_ratios = examples()
    now = chances(log_ratios)
    found = all_log_weights(log_ratios, now)[len(IMPORTANCE) :]
    for importance, (log_weights, _) in zip(FLOORED, found, strict=True):
        expected = naive_weights(importance, log_ratios.astype(np.float64), now.astype(np.float64))
        np.testing.assert_allclose(np.exp(log_weights), expected, rtol=2e-5, err_msg=str(importance))
    certain = naive_weights(ImportanceWeights(), log_ratios.astype(np.float64), now.astype(np.float64))
    assert np.min(np.exp(found[0][0]) / certain) < 0.6  # the floor strongly reduces the weights of long episodes


def test_a_floor_may_be_smaller_than_float32_can_hold() -> None:
    """The probability of a long episode is smaller still."""
    importance, now = ImportanceWeights(floor=1e-60), jnp.full((1, 1, 500), -0.3)
    code, numbers = without_numbers(importance)
    log_weights, _ = with_numbers(code, [jnp.float32(number) for number in numbers]).log_weights(now, now)
    expected = 150 + np.log(1e-60)  # −log(1 + ε/p), p = exp(−150)
    np.testing.assert_allclose(log_weights[0, 0, -1], -np.logaddexp(0, expected), rtol=1e-4)


def test_importance_weights_and_their_health_are_the_naive_ones() -> None:
    _, log_ratios = examples()
    now = chances(log_ratios)
    for importance, (log_weights, health) in zip(IMPORTANCE, all_log_weights(log_ratios, now), strict=False):
        expected = naive_weights(importance, log_ratios.astype(np.float64), now)
        np.testing.assert_allclose(np.exp(log_weights), expected, rtol=1e-5, err_msg=str(importance))
        found = np.stack(jax.tree.leaves(health), axis=1)
        np.testing.assert_allclose(found, naive_health(importance, log_ratios.astype(np.float64)), rtol=1e-5)
        if importance.cap is not None:
            assert np.any(expected == importance.cap)
            assert np.any(found[:, 2] > 0)


def test_huge_log_ratios_do_not_overflow_under_a_cap() -> None:
    rewards, log_ratios = examples()
    log_ratios[0, 3] = 0
    log_ratios[0, :3, 0] = [500, -500, 500]
    log_ratios[1, :, 0] = -500
    now = np.zeros_like(log_ratios)
    for importance, (log_weights, health) in zip(IMPORTANCE, all_log_weights(log_ratios, now), strict=False):
        expected, cap = np.log(naive_weights(importance, log_ratios.astype(np.float64), now)), importance.cap
        np.testing.assert_allclose(log_weights, expected, rtol=1e-5, atol=1e-5, err_msg=str(importance))
        np.testing.assert_array_equal(health.largest, [np.inf, 0])
        np.testing.assert_allclose(health.capped, [0 if cap is None else 0.5, 0])
        sample = np.asarray(health.effective_sample)
        assert np.all((sample >= 0.249) & (sample <= 1))
        if cap is not None:
            assert np.all(np.isfinite(all_coefficients(rewards, jnp.exp(log_weights))))


def test_weights_of_one_have_perfect_health() -> None:
    perfect = Health.perfect(2)
    same = np.zeros((2, 4, 9), np.float32)
    for _, health in all_log_weights(same, same)[: len(IMPORTANCE)]:
        for one, other in zip(jax.tree.leaves(health), jax.tree.leaves(perfect), strict=True):
            np.testing.assert_array_equal(one, other)


def gate_of(*weights: float) -> float:
    """β of the gate "health" for these log ω of one agent's episodes."""
    before = jnp.asarray(weights, jnp.float32)[None, :, None]
    return float(ImportanceWeights().log_weights(before, jnp.zeros_like(before))[1].gate[0])


def test_the_gate_opens_for_weights_of_one_and_closes_for_degenerate_ones() -> None:
    huge = 500.0  # e^500 overflows
    for ones in ([0.0], [0.0] * 4, [0.0] * 64):
        assert gate_of(*ones) == 1
    for closed in ([-huge] * 4, [huge] * 4, [huge, 0, 0, 0], [0, -huge, -huge, -huge], [huge], [-huge], [huge, -huge]):
        np.testing.assert_allclose(gate_of(*closed), 0, atol=1e-6, err_msg=str(closed))
    # float32 holds e^85 and e^−85, but e^85 times a return may overflow: the gate must be 0 and not only small.
    assert gate_of(85.0) == gate_of(*[85.0] * 4) == 0
    # Even weights whose mean is not 1, and uneven ones whose mean is 1: ω = 2 of 4 equal ones, one ω = B alone.
    np.testing.assert_allclose(gate_of(*[np.log(2.0)] * 4), 0.5, rtol=1e-6)
    np.testing.assert_allclose(gate_of(*[np.log(0.25)]), 0.25, rtol=1e-6)
    np.testing.assert_allclose(gate_of(np.log(4.0), -huge, -huge, -huge), 0, atol=1e-6)
    # Two of four weights are 2, the others 0: the mean is 1 and ESS = 1/2.
    np.testing.assert_allclose(gate_of(*np.log([2.0, 2.0]), -huge, -huge), (1 / 2 - 1 / 4) / (1 - 1 / 4), rtol=1e-5)


# Sums of scores over two spans of time

CLOCK = Clock(130)  # two spans
SCORED = [CategoricalMLP(3, (5,), "tanh", num_actions=3), GaussianMLP(2, (3,), "tanh", action_size=2)]


@cache
def played(policy: Policy) -> tuple[np.ndarray, np.ndarray, Any]:
    """Parameters, previous parameters [2 agents, d] and episodes of random steps, with values past their ends, too."""
    rng = np.random.default_rng(1)
    parameters = rng.normal(0, 0.5, (2, policy.dimension)).astype(np.float32)
    previous = parameters + rng.normal(0, 0.04, parameters.shape).astype(np.float32)
    lengths = np.array([[1, CLOCK.span, CLOCK.span + 1], [CLOCK.span - 1, 93, 12]], np.int32)
    alive = np.arange(CLOCK.padded) < lengths[..., None]
    observations = rng.normal(size=(*alive.shape, policy.observation_size)).astype(np.float32)
    if isinstance(policy, CategoricalMLP):
        actions = rng.integers(policy.num_actions, size=alive.shape).astype(np.int32)
    else:
        actions = rng.normal(size=(*alive.shape, policy.num_outputs)).astype(np.float32)
    rewards = np.where(alive, rng.normal(1, 1, alive.shape), 0).astype(np.float32)
    episodes = Episodes(*map(jnp.asarray, (observations, actions, rewards, rewards, lengths, lengths, np.max(lengths))))
    at_play, _ = naive_steps(policy, parameters, episodes)
    return parameters, previous, replace(episodes, log_probabilities=jnp.asarray(at_play, jnp.float32))


@partial(jax.jit, static_argnums=0)
def each_step(policy: Policy, parameters: Array, episodes: Episodes) -> tuple[Array, Array]:
    """log π [agent, episode, time] and ∇log π [agent, episode, time, d], one step at a time."""

    def log_probability(parameters: Array, observation: Array, action: Array) -> Array:
        weights = policy.unflatten(parameters)
        return policy.log_probability(weights, policy.outputs(weights, observation), action)

    over = jax.value_and_grad(log_probability)
    for axes in ((None, 0, 0), (None, 0, 0), (0, 0, 0)):
        over = jax.vmap(over, axes)
    return over(parameters, episodes.observations, episodes.actions)


def naive_steps(policy: Policy, parameters: np.ndarray, episodes: Any) -> tuple[np.ndarray, np.ndarray]:
    """log π and ∇log π of every step, 0 after the end."""
    values, scores = each_step(policy, jnp.asarray(parameters), episodes)
    alive = np.arange(CLOCK.padded) < np.asarray(episodes.lengths)[..., None]
    return np.where(alive, values, 0).astype(np.float64), np.where(alive[..., None], scores, 0).astype(np.float64)


def naive_gradient(scores: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    gradients = np.zeros((scores.shape[0], scores.shape[-1]))
    for (agent, episode, time), coefficient in np.ndenumerate(coefficients):
        gradients[agent] += coefficient * scores[agent, episode, time] / scores.shape[1]
    return gradients


@partial(jax.jit, static_argnums=0)
def sums(policy: Policy, parameters: Array, episodes: Episodes, coefficients: Array) -> tuple[Array, Array]:
    summed = weighted_scores(policy, parameters, episodes, coefficients, CLOCK)
    return summed, log_probabilities(policy, parameters[0], episodes, CLOCK)


@pytest.mark.parametrize("policy", SCORED, ids=str)
def test_sums_of_scores_and_log_probabilities_are_those_of_single_steps(policy: Policy) -> None:
    *both, episodes = played(policy)
    # Coefficients past the ends are not 0, but they must not count.
    coefficients = np.random.default_rng(2).normal(size=(2, *episodes.rewards.shape)).astype(np.float32)
    summed, found = sums(policy, jnp.stack(both), episodes, coefficients)
    np.testing.assert_allclose(found, naive_steps(policy, both[0], episodes)[0], rtol=1e-5, atol=1e-5)
    for i, parameters in enumerate(both):
        _, scores = naive_steps(policy, parameters, episodes)
        np.testing.assert_allclose(summed[i], naive_gradient(scores, coefficients[i]), rtol=1e-4, atol=1e-4)


@partial(jax.jit, static_argnums=(0, 1, 2))
def all_gates(
    policy: Policy,
    estimator: Estimator,
    importance: ImportanceWeights,
    parameters: Array,
    previous: Array,
    direction: Array,
    episodes: Episodes,
) -> list[tuple[Array, Health]]:
    batch = SmallBatch(policy, parameters, previous, parameters[:, None], episodes, estimator, 0.98, CLOCK)
    return [corrected_gradient(batch, direction=direction, importance=importance, gate=gate) for gate in GATES]


CORRECTED = [
    (SCORED[0], GPOMDP("leave-one-out"), ImportanceWeights("per-decision", cap=1.02)),
    (SCORED[1], REINFORCE(), ImportanceWeights("trajectory")),
]


@pytest.mark.parametrize(("policy", "estimator", "importance"), CORRECTED)
def test_the_correction_is_the_naive_one_at_every_gate(
    policy: Policy, estimator: Estimator, importance: ImportanceWeights
) -> None:
    parameters, previous, episodes = played(policy)
    direction = np.random.default_rng(3).normal(size=parameters.shape).astype(np.float32)
    rewards = np.asarray(episodes.rewards, np.float64)
    at_play, scores = naive_steps(policy, parameters, episodes)
    before, scores_before = naive_steps(policy, previous, episodes)
    log_ratios = before - at_play
    weights = naive_weights(importance, log_ratios, at_play)
    health = naive_health(importance, log_ratios)
    here = naive_gradient(scores, naive_coefficients(estimator, rewards, 0.98, np.ones(rewards.shape)))
    there = naive_gradient(scores_before, naive_coefficients(estimator, rewards, 0.98, weights))
    assert np.linalg.norm(here - there) > 0.1 * np.linalg.norm(here)
    found = all_gates(policy, estimator, importance, parameters, previous, direction, episodes)
    for gate, (estimate, reported) in zip(GATES, found, strict=True):
        opened = np.array(health)[:, 3:] if gate == "health" else gate
        expected = here + opened * (direction - there)
        np.testing.assert_allclose(estimate, expected, rtol=1e-3, atol=1e-3, err_msg=str(gate))
        np.testing.assert_allclose(np.stack(jax.tree.leaves(reported), axis=1), health, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("policy", "estimator", "importance"), CORRECTED)
def test_a_correction_with_degenerate_weights_is_finite_if_capped_or_gated(
    policy: Policy, estimator: Estimator, importance: ImportanceWeights
) -> None:
    parameters, _, episodes = played(policy)
    # Under θ_{t−1}, one episode is e^500 times more likely and another one e^500 times less likely.
    shifted = replace(
        episodes, log_probabilities=episodes.log_probabilities.at[:, 0, 0].add(jnp.array([-500.0, 500.0]))
    )
    found = all_gates(policy, estimator, importance, parameters, parameters, np.zeros_like(parameters), shifted)
    plain = all_gates(policy, estimator, importance, parameters, parameters, np.zeros_like(parameters), episodes)
    np.testing.assert_array_equal(found[0][0], plain[0][0])
    for gate, (estimate, health) in zip(GATES, found, strict=True):
        np.testing.assert_array_equal(health.largest[0], np.inf)
        assert np.all(np.isfinite(health.effective_sample))
        assert np.all(np.isfinite(estimate[1]))
        if importance.cap is not None or gate == "health":
            assert np.all(np.isfinite(estimate))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: REINFORCE("mean"), "baseline must be one of none, leave-one-out; got 'mean'"),  # pyright: ignore
        (lambda: ImportanceWeights("step"), "mode must be one of trajectory, per-decision"),  # pyright: ignore
        (lambda: ImportanceWeights(cap=0.0), "cap must be positive, got 0.0"),
        (lambda: GPOMDP(trace_decay=0), r"trace_decay must lie in \(0, 1\], got 0"),
        (lambda: GPOMDP(trace_decay=1.5), "got 1.5"),
        (lambda: GPOMDP("leave-one-out").check(1), r"GPOMDP\(baseline='leave-one-out'\).* at least 2, got 1"),
    ],
)
def test_impossible_estimators(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_possible_batches_pass_the_check() -> None:
    GPOMDP("leave-one-out").check(2)
    GPOMDP().check(1)


# Unbiasedness, where all trajectories can be enumerated

DISCOUNT, HORIZON = 0.8, 3
MOVE = np.array([[0.2, 0.7], [0.4, 0.9]])  # [state, action]: how likely the next state is state 1
STOP = np.array([[0.7, 0.1], [0.1, 0.6]])  # how likely the episode ends
REWARD = np.array([[0.25, 2.0], [3.0, 0.25]])  # never 0: a control below recognises steps past the end by their reward


@dataclass(frozen=True)
class TwoStates(Component):
    """Two states and two actions, with random transitions and random ends."""

    name = "TwoStates"
    observation_size = 2
    action_space = Discrete(2)
    horizon = HORIZON
    reward_threshold = None
    noise_size = 2
    has_loops = False

    def reset(self, key: Array) -> Array:
        return (jax.random.uniform(key) < 0.5).astype(jnp.int32)

    def observe(self, state: Array) -> Numbers:
        return (state == 0).astype(jnp.float32), (state == 1).astype(jnp.float32)

    def step(self, state: Array, action: Numbers, noise: Numbers) -> tuple[Array, Array, Array]:
        def entry(table: np.ndarray) -> Array:
            first, second = (jnp.where(action[0] == 0, *map(float, row)) for row in table)
            return jnp.where(state == 0, first, second)

        move, stop, reward = map(entry, (MOVE, STOP, REWARD))
        return (noise[0] < move).astype(jnp.int32), reward, noise[1] < stop


POLICY = CategoricalMLP(2, (3,), "tanh", num_actions=2)
# π(0|s) is 0.67 and 0.66 under θ_t, 0.28 and 0.40 under θ_{t−1}.
PARAMETERS, STEP = np.random.default_rng(1).normal(0, [[0.5], [0.3]], (2, POLICY.dimension)).astype(np.float32)
PREVIOUS = PARAMETERS + STEP


def exact_return(parameters: np.ndarray) -> float:
    """J(θ) = E Σ_h γ^h r_h, over all trajectories, in float64."""
    inner, outer = parameters[:6].reshape(2, 3), parameters[9:15].reshape(3, 2)
    outputs = np.tanh(np.eye(2) @ inner + parameters[6:9]) @ outer + parameters[15:]
    policy = np.exp(outputs) / np.sum(np.exp(outputs), axis=1, keepdims=True)

    def onward(state: int, step: int) -> float:
        total = 0.0
        for action in range(2) if step < HORIZON else ():
            move, go_on = MOVE[state, action], 1 - STOP[state, action]
            following = (1 - move) * onward(0, step + 1) + move * onward(1, step + 1)
            total += policy[state, action] * (DISCOUNT**step * REWARD[state, action] + go_on * following)
        return total

    return (onward(0, 0) + onward(1, 0)) / 2


def exact_gradient(parameters: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """∇J(θ), by central differences in float64."""
    shifts = step * np.eye(len(parameters))
    above, below = ([exact_return(parameters + sign * shift) for shift in shifts] for sign in (1, -1))
    return (np.array(above) - np.array(below)) / (2 * step)


def exact_estimate(parameters: np.ndarray, decay: float) -> np.ndarray:
    """The mean of GPOMDP with a trace decay, over all trajectories: the masses of states, and their mean traces."""

    def log_policy(parameters: Array) -> Array:
        weights = POLICY.unflatten(parameters)
        return jax.nn.log_softmax(jax.vmap(partial(POLICY.outputs, weights))(jnp.eye(2)))

    at = jnp.asarray(parameters, jnp.float32)
    policy, scores = np.exp(log_policy(at)).astype(np.float64), np.asarray(jax.jacobian(log_policy)(at), np.float64)
    masses, traces, total = np.full(2, 0.5), np.zeros((2, len(parameters))), np.zeros(len(parameters))
    for step in range(HORIZON):
        # Of every state and action: its probability, and the trace where it happens.
        chances = masses[:, None] * policy
        grown = policy[..., None] * decay * traces[:, None] + chances[..., None] * scores
        total += np.sum(DISCOUNT**step * REWARD[..., None] * grown, axis=(0, 1))
        onward = (1 - STOP) * np.stack([1 - MOVE, MOVE])
        masses, traces = np.einsum("nsa,sa->n", onward, chances), np.einsum("nsa,sad->nd", onward, grown)
    return total


def test_the_mean_of_an_estimate_without_decay_is_the_gradient() -> None:
    exact = exact_gradient(PARAMETERS.astype(np.float64))
    np.testing.assert_allclose(exact_estimate(PARAMETERS, 1), exact, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class OwnMean(GPOMDP):
    """Biased: the mean it subtracts includes the episode itself."""

    def _centred(self, values: Array) -> Array:
        return values - jnp.mean(values, axis=1, keepdims=True)


@dataclass(frozen=True)
class StoppedBaseline(GPOMDP):
    """Biased: the baseline stops where the episode ends, and so depends on its actions."""

    baseline: Any = "leave-one-out"

    def _centred(self, values: Array) -> Array:
        return jnp.where(values == 0, 0, super()._centred(values))


@dataclass(frozen=True)
class DiscountedFromNow(GPOMDP):
    """Biased: every reward-to-go is discounted as if its step were the first one."""

    def coefficients(self, rewards: Array, discount: Any, weights: Array | None) -> Array:
        return super().coefficients(rewards, discount, weights) / discount ** jnp.arange(rewards.shape[2])


@dataclass(frozen=True)
class Unweighted(ImportanceWeights):
    """Biased: treats the episodes as if θ_{t−1} had played them."""

    def log_weights(self, before: Array, now: Array) -> tuple[Array, Health]:
        return super().log_weights(now, now)


@dataclass(frozen=True)
class Reversed(ImportanceWeights):
    """Biased: the ratio is inverted."""

    def log_weights(self, before: Array, now: Array) -> tuple[Array, Health]:
        return super().log_weights(now, before)


TRAJECTORY, PER_DECISION = ImportanceWeights("trajectory"), ImportanceWeights("per-decision")
UNBIASED = {str(estimator): (estimator, None) for estimator in ESTIMATORS} | {
    f"{estimator}, {importance}": (estimator, importance)
    for estimator in ESTIMATORS
    for importance in (TRAJECTORY, PER_DECISION)
    if isinstance(estimator, GPOMDP) or importance == TRAJECTORY
}
BIASED = {
    "own mean": (OwnMean(), None),
    "stopped baseline": (StoppedBaseline(), None),
    "discounted from now": (DiscountedFromNow(), None),
    "stopped baseline, weighted": (StoppedBaseline(), PER_DECISION),
    "capped": (GPOMDP(), ImportanceWeights("trajectory", cap=1.5)),
    "capped per decision": (GPOMDP(), ImportanceWeights("per-decision", cap=1.5)),
    "decaying trace": (GPOMDP(trace_decay=0.8), None),
    "unweighted": (GPOMDP(), Unweighted()),
    "inverted": (GPOMDP(), Reversed()),
}
BATCHES = (2, 4, 8, 16, 32)
SMALL_BATCH = 4
NUM_AGENTS, NUM_SAMPLES = 3125, 4  # together 100,000 small batches
NUM_GROUPS = 5000  # of a sample's small batches: gradients come one agent after the other, but of all groups at once


@jax.jit
def played_by(keys: Array) -> Episodes:
    """Episodes of many agents at θ_t, in batches of the largest size."""
    parameters = jnp.tile(PARAMETERS, (len(keys), 1))
    return rollout(TwoStates(), POLICY, parameters, keys, num_episodes=max(BATCHES), horizon=HORIZON)


@cache
def sample(seed: int) -> Any:
    """A sample of episodes; its size is always the same, so that one compiled program plays all."""
    return jax.tree.map(np.asarray, played_by(jax.random.split(jax.random.key(seed), NUM_AGENTS)))


def in_small_batches(episodes: Any) -> Any:
    """The same episodes as small batches of groups of more agents: all agents have the same policy."""

    def divided(values: np.ndarray) -> np.ndarray:
        return values.reshape(NUM_GROUPS, -1, SMALL_BATCH, *values.shape[2:]) if values.ndim else values

    return jax.tree.map(divided, episodes)


@dataclass(frozen=True)
class Chosen:
    """One of several estimators or importance weights, chosen by an array, so that all share one program."""

    of: list[Any]
    index: Array

    def coefficients(self, *given: Any) -> Array:
        return lax.switch(self.index, [lambda each=each: each.coefficients(*given) for each in self.of])

    def log_weights(self, *given: Any) -> tuple[Array, Health]:
        return lax.switch(self.index, [lambda each=each: each.log_weights(*given) for each in self.of])

    def terms(self, batch: SmallBatch) -> tuple[Array, Array, Health]:
        return ImportanceWeights.terms(self, batch)  # pyright: ignore[reportArgumentType]


# Other tests compile without optimization. This function runs longer than it compiles, so it is optimized.
@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})
def estimate_all(episodes: Episodes) -> dict[str, Array]:
    """The estimates [agent, d] of ∇J(θ_t), or with weights of ∇J(θ_{t−1}), from groups of episodes played at θ_t."""
    axes = jax.tree.map(lambda values: 0 if values.ndim else None, episodes)
    of_groups = jax.vmap(estimates_of_a_group, (axes,))(episodes)
    return {name: found.reshape(-1, POLICY.dimension) for name, found in of_groups.items()}


def estimates_of_a_group(episodes: Episodes) -> dict[str, Array]:
    clock, num_agents = Clock(HORIZON), len(episodes.lengths)
    parameters, previous = (jnp.tile(theta, (num_agents, 1)) for theta in (PARAMETERS, PREVIOUS))
    nothing = jnp.zeros_like(parameters)
    cases = UNBIASED | BIASED
    estimators = list(dict.fromkeys(estimator for estimator, _ in cases.values()))
    weighted = {name: pair for name, pair in cases.items() if pair[1] is not None}

    def plain(index: Array) -> Array:
        estimator: Any = Chosen(estimators, index)
        return gradient(POLICY, parameters, episodes, estimator, DISCOUNT, clock)

    def corrected(index: Array) -> Array:
        estimator: Any = Chosen([estimator for estimator, _ in weighted.values()], index)
        importance: Any = Chosen([importance for _, importance in weighted.values()], index)
        batch = SmallBatch(POLICY, parameters, previous, parameters[:, None], episodes, estimator, DISCOUNT, clock)
        return corrected_gradient(batch, direction=nothing, importance=importance, gate=1.0)[0]

    gradients = lax.map(plain, jnp.arange(len(estimators)))
    corrections = dict(zip(weighted, lax.map(corrected, jnp.arange(len(weighted))), strict=True))
    estimates = {name: gradients[estimators.index(estimator)] for name, (estimator, _) in cases.items()}
    return {name: estimates[name] - corrections.get(name, 0) for name in cases}


@cache
def estimates() -> dict[str, np.ndarray]:
    samples = [estimate_all(in_small_batches(sample(seed))) for seed in range(NUM_SAMPLES)]
    return {name: np.concatenate([each[name] for each in samples]) for name in UNBIASED | BIASED}


def bias_in_standard_errors(estimates: np.ndarray, exact: np.ndarray) -> float:
    """The largest over all coordinates, and along the exact gradient."""
    along = exact / np.linalg.norm(exact)
    errors = estimates.astype(np.float64) - exact
    errors = np.column_stack([errors, errors @ along])
    return float(np.max(np.abs(np.mean(errors, axis=0)) / (np.std(errors, axis=0) / np.sqrt(len(errors)))))


def truth(importance: ImportanceWeights | None) -> np.ndarray:
    return exact_gradient((PARAMETERS if importance is None else PREVIOUS).astype(np.float64))


@pytest.mark.parametrize("name", UNBIASED)
def test_estimators_are_unbiased(name: str) -> None:
    exact = truth(UNBIASED[name][1])
    assert bias_in_standard_errors(estimates()[name], exact) < 4.5
    # The test is sensitive: a bias of 2.5 % would be detected.
    assert bias_in_standard_errors(1.025 * estimates()[name], exact) > 4.5


@pytest.mark.parametrize("name", BIASED)
def test_biased_estimators_are_detected(name: str) -> None:
    assert bias_in_standard_errors(estimates()[name], truth(BIASED[name][1])) > 9


def test_baselines_and_weights_per_decision_lower_the_variance() -> None:
    def variance(*names: object) -> float:
        return float(np.sum(np.var(estimates()[", ".join(map(str, names))], axis=0)))

    assert variance(GPOMDP()) < variance(REINFORCE())
    assert variance(GPOMDP("leave-one-out")) < variance(GPOMDP())
    assert variance(REINFORCE("leave-one-out")) < variance(REINFORCE())
    assert variance(GPOMDP(), PER_DECISION) < variance(GPOMDP(), TRAJECTORY)


# Corrections without weights that can degenerate


@dataclass(frozen=True)
class PlayedNow(DefensiveSampling):
    """Biased: the whole batch is played with θ_t."""

    def points(self, parameters: Array, previous: Array, keys: Array) -> Array:
        return jnp.stack([parameters, parameters], axis=1)


@dataclass(frozen=True)
class AtTheEnd(HessianVector):
    """Biased: takes the Hessian at θ_t for the mean one on the way there."""

    def points(self, parameters: Array, previous: Array, keys: Array) -> Array:
        return parameters[:, None]


@dataclass(frozen=True)
class FixedEpisodes(HessianVector):
    """Biased: leaves out that the policy decides which episodes there are."""

    def terms(self, batch: SmallBatch) -> tuple[Array, Array, Health]:
        point, change = batch.played[:, 0], batch.parameters - batch.previous
        coefficients = batch.coefficients(None)[None]
        _, second = jax.jvp(lambda at: batch.scores(at[None], coefficients)[0], (point,), (change,))
        return second, jnp.zeros_like(second), Health.perfect(len(second))


@dataclass(frozen=True)
class DecayingTwice(HessianVector):
    """Biased: lets the scores decay along θ_t − θ_{t−1} as well, which tell how likely the episode is."""

    def terms(self, batch: SmallBatch) -> tuple[Array, Array, Health]:
        found, nothing, health = super().terms(batch)
        point, change = batch.played[:, 0], batch.parameters - batch.previous
        _, along = jax.jvp(batch.log_probabilities, (point,), (change,))
        times = np.arange(along.shape[2])
        decayed = np.where(times[:, None] >= times, 0.5 ** np.abs(times[:, None] - times), 0)
        missing = batch.coefficients(jnp.cumsum(along, axis=2) - along @ decayed.T)
        return found - batch.scores(point[None], missing[None])[0], nothing, health


TRACED = GPOMDP("leave-one-out", trace_decay=0.5)
UNBIASED_CHANGES = {
    f"{estimator}, {correction}": (estimator, correction)
    for estimator in (GPOMDP("leave-one-out"), REINFORCE())
    for correction in (DefensiveSampling(), DefensiveSampling("per-decision"), HessianVector())
    if isinstance(estimator, GPOMDP) or not correction.weighs_rewards
} | {
    f"{TRACED}, {correction}": (TRACED, correction)
    for correction in (DefensiveSampling("per-decision"), HessianVector())
}
BIASED_CHANGES: dict[str, tuple[Estimator, Correction]] = {
    "played with θ_t": (GPOMDP(), PlayedNow()),
    "Hessian at θ_t": (GPOMDP(), AtTheEnd()),
    "Hessian of fixed episodes": (GPOMDP(), FixedEpisodes()),
    "Hessian with both traces decaying": (TRACED, DecayingTwice()),
}
# The others are slow.
FIRST_CHANGES = (
    f"{GPOMDP('leave-one-out')}, {DefensiveSampling('per-decision')}",
    f"{TRACED}, {HessianVector()}",
    "Hessian of fixed episodes",
)


@partial(jax.jit, static_argnums=(0, 1))
def estimated_change(estimator: Estimator, correction: Correction, keys: Array) -> tuple[Array, Array]:
    """Estimates of ∇J(θ_t) − ∇J(θ_{t−1}) [agent, d] from small batches of many agents, and their largest weights."""
    agent = replace(
        Config(algorithm="PAGE-PG", gate=1.0, discount=DISCOUNT, horizon=HORIZON).resolved().federation().agent,
        env=TwoStates(),
        policy=POLICY,
        small_batch=SMALL_BATCH,
        estimator=estimator,
        importance=correction,
    )
    parameters, previous = (jnp.tile(theta, (len(keys), 1)) for theta in (PARAMETERS, PREVIOUS))
    state = replace(agent.initial(parameters), previous=previous)
    points = agent.request(state, None, keys, large=False)
    change, sampled = agent.digest(state, points, agent.play(points, keys, large=False), keys, large=False)
    return change, sampled.health.largest


def exact_change(estimator: Estimator) -> np.ndarray:
    decay = getattr(estimator, "trace_decay", None)
    now, before = (theta.astype(np.float64) for theta in (PARAMETERS, PREVIOUS))
    if decay is None:
        return exact_gradient(now) - exact_gradient(before)
    return exact_estimate(now, decay) - exact_estimate(before, decay)


# Each has a program of its own.
@pytest.mark.parametrize("name", slow_except(FIRST_CHANGES, UNBIASED_CHANGES))
def test_corrections_without_degenerate_weights_are_unbiased(name: str) -> None:
    found, largest = estimated_change(*UNBIASED_CHANGES[name], jax.random.split(jax.random.key(5), 20_000))
    exact = exact_change(UNBIASED_CHANGES[name][0])
    assert bias_in_standard_errors(np.asarray(found), exact) < 4.5
    assert bias_in_standard_errors(1.1 * np.asarray(found), exact) > 4.5
    assert np.max(largest) <= 2


@pytest.mark.parametrize("name", slow_except(FIRST_CHANGES, BIASED_CHANGES))
def test_biased_corrections_are_detected(name: str) -> None:
    found, _ = estimated_change(*BIASED_CHANGES[name], jax.random.split(jax.random.key(5), 20_000))
    assert bias_in_standard_errors(np.asarray(found), exact_change(BIASED_CHANGES[name][0])) > 6


def test_the_weights_of_defensive_sampling_are_the_naive_ones() -> None:
    policy, estimator = SCORED[0], GPOMDP("leave-one-out")
    parameters, previous, episodes = played(policy)
    now, scores = naive_steps(policy, parameters, episodes)
    before, scores_before = naive_steps(policy, previous, episodes)
    rewards = np.asarray(episodes.rewards, np.float64)
    chances = [np.exp(np.cumsum(each, axis=2)) for each in (now, before)]
    weights = [2 * each / (chances[0] + chances[1]) for each in chances]
    expected = [
        naive_gradient(of, naive_coefficients(estimator, rewards, 0.98, weight))
        for of, weight in zip((scores, scores_before), weights, strict=True)
    ]
    now, before = jnp.asarray(parameters), jnp.asarray(previous)
    batch = SmallBatch(policy, now, before, jnp.stack([now, before], axis=1), episodes, estimator, 0.98, CLOCK)
    *found, _ = jax.jit(lambda: DefensiveSampling("per-decision").terms(batch))()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


# The variance of PAGE


@jax.jit
def page(episodes: Episodes, previous: Array, direction: Array) -> tuple[list[Array], Array]:
    """PAGE estimates [agent, d] of every batch size, and those of the plain small batch of 4."""
    clock, num_agents = Clock(HORIZON), len(episodes.lengths)
    parameters, before, carried = (jnp.tile(vector, (num_agents, 1)) for vector in (PARAMETERS, previous, direction))

    def estimate(size: int, gate: float) -> Array:
        steps = episodes.steps
        some = replace(jax.tree.map(lambda values: values[:, :size] if values.ndim else values, episodes), steps=steps)
        batch = SmallBatch(POLICY, parameters, before, parameters[:, None], some, GPOMDP(), DISCOUNT, clock)
        return corrected_gradient(batch, direction=carried, importance=TRAJECTORY, gate=gate)[0]

    return [estimate(size, 1.0) for size in BATCHES], estimate(4, 0.0)


@cache
def squared_errors(distance: float) -> tuple[list[float], float]:
    """E‖ṽ − ∇J(θ_t)‖² of every batch size and of the plain batch, for ‖θ_t − θ_{t−1}‖ = distance and an exact v̂."""
    previous = PARAMETERS + np.float32(distance / np.linalg.norm(STEP)) * STEP
    direction = exact_gradient(previous.astype(np.float64)).astype(np.float32)
    found, plain = page(sample(0), previous, direction)
    exact = exact_gradient(PARAMETERS.astype(np.float64))

    def error(estimates: Array) -> float:
        return float(np.mean(np.sum(np.square(np.asarray(estimates, np.float64) - exact), axis=1)))

    return [error(estimates) for estimates in found], error(plain)


def slope(x: Any, y: Any) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


@pytest.mark.parametrize("distance", [pytest.param(0.1, marks=pytest.mark.slow), 1.0])
def test_pages_variance_falls_like_one_over_the_batch(distance: float) -> None:
    errors, _ = squared_errors(distance)
    assert slope(BATCHES, errors) == pytest.approx(-1, abs=0.05)


@pytest.mark.slow
def test_pages_variance_falls_like_the_squared_distance_and_a_plain_batchs_does_not() -> None:
    distances = (0.01, 0.02, 0.05, 0.1)
    errors = [squared_errors(distance) for distance in distances]
    for i in range(len(BATCHES)):
        assert slope(distances, [of_page[i] for of_page, _ in errors]) == pytest.approx(2, abs=0.1)
    assert slope(distances, [plain for _, plain in errors]) == pytest.approx(0, abs=1e-6)
    of_page, plain = errors[-1]
    assert of_page[BATCHES.index(4)] < 0.1 * plain
