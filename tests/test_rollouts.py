"""Episodes: what is written where, when they end, whose noise they hear, and what attacks on play change."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from byzpg import envs
from byzpg.attacks import Attack, AvgZero, RandomAction, RandomReward, RewardFlip
from byzpg.components import Component
from byzpg.envs import Environment
from byzpg.policies import CategoricalMLP, GaussianMLP, Policy
from byzpg.rollouts import SPAN, Clock, Episodes, rollout
from byzpg.spaces import Box, Discrete

NUM_AGENTS, NUM_EPISODES = 6, 20


class Count(NamedTuple):
    step: Array
    last: Array
    heard: Array


@dataclass(frozen=True)
class Counting(Component):
    """Counts its steps, remembers the noise it hears, pays step + 1, and ends at a length drawn at reset."""

    shortest: int
    longest: int
    name = "Counting"
    observation_size = 4
    action_space = Discrete(3)
    horizon = 1000
    noise_size = 2

    def reset(self, key: Array) -> Count:
        last = self.shortest + jnp.floor(jax.random.uniform(key) * (self.longest + 1 - self.shortest))
        return Count(jnp.zeros(()), last, jnp.full(2, -1.0))

    def observe(self, state: Count) -> Array:
        return jnp.concatenate([jnp.stack([state.step, state.last], axis=-1), state.heard], axis=-1)

    def step(self, state: Count, action: Array, noise: Array) -> tuple[Count, Array, Array]:
        step = state.step + 1
        return Count(step, state.last, noise), step, step >= state.last


@dataclass(frozen=True)
class Drifting(Component):
    """A point in the plane that moves by the action."""

    name = "Drifting"
    observation_size = 2
    action_space = Box(2, (-3.0, 0.0), (1.0, 2.0))
    horizon = 7
    noise_size = 0

    def reset(self, key: Array) -> Array:
        return jax.random.normal(key, (2,))

    def observe(self, state: Array) -> Array:
        return state

    def step(self, state: Array, action: Array, noise: Array) -> tuple[Array, Array, Array]:
        moved = state + action
        return moved, -jnp.sum(jnp.square(state), axis=-1), jnp.zeros(state.shape[:-1], bool)


@dataclass(frozen=True)
class RandomActionRewardFlip(RandomAction, RewardFlip):
    """`act` of the one, `record` of the other."""


@dataclass(frozen=True)
class KeyedActionRandomReward(RandomReward):
    """`record` of RandomReward, and an `act` that uses its key."""

    def act(self, action: Array, uniform: Array, key: Array) -> Array:
        return jnp.floor(3 * jax.random.uniform(key, action.shape)).astype(jnp.int32)


# Prefers action 0 whatever it sees, so that random actions stand out.
PREFERRING = CategoricalMLP(4, (), num_actions=3)
PREFERENCE = np.tile(np.array([0.0] * 12 + [1.5, 0.0, 0.0], np.float32), (NUM_AGENTS, 1))
PROBABILITIES = np.exp([1.5, 0, 0]) / np.sum(np.exp([1.5, 0, 0]))
LIARS = np.array([False, True, False, False, True, False])


@partial(jax.jit, static_argnums=(0, 1), static_argnames=("num_episodes", "horizon", "attack"))
def play(env: Environment, policy: Policy, parameters: Any, keys: Array, **options: Any) -> Episodes:
    return rollout(env, policy, parameters, keys, **options)


def agent_keys(seed: int, num_agents: int = NUM_AGENTS) -> Array:
    return jax.random.split(jax.random.key(seed), num_agents)


def in_numpy(episodes: Episodes) -> Any:
    return jax.tree.map(np.asarray, episodes)


@cache
def counted(env: Counting, horizon: int, attack: Attack | None = None) -> Any:
    byzantine = None if attack is None else LIARS
    options = {"num_episodes": NUM_EPISODES, "horizon": horizon, "attack": attack, "byzantine": byzantine}
    return in_numpy(play(env, PREFERRING, PREFERENCE, agent_keys(0), **options))


MIXED = (Counting(1, 200), 101)  # two spans of 51 steps; half of the episodes are cut off
SHORT = (Counting(3, 3), 250)  # three spans of 84


def each(episodes: Any) -> Iterator[tuple[tuple[int, int], int]]:
    """The index and length of every episode."""
    for index in np.ndindex(episodes.lengths.shape):
        yield index, int(episodes.lengths[index])


# The clock


@pytest.mark.parametrize("horizon", [1, 7, 99, 100, 101, 199, 201, 250, 500, 997, 1000])
def test_spans_cover_the_horizon_and_waste_less_than_one_step_each(horizon: int) -> None:
    clock = Clock(horizon)
    assert clock.padded == clock.num_spans * clock.span
    assert horizon <= clock.padded < horizon + clock.num_spans
    assert clock.span <= SPAN
    assert clock.num_spans == int(np.ceil(horizon / SPAN))


# Lengths, and what is written


@pytest.mark.parametrize(("env", "horizon", "padded"), [(*MIXED, 102), (*SHORT, 252)])
def test_episodes_end_where_the_environment_or_the_horizon_says(env: Counting, horizon: int, padded: int) -> None:
    episodes = counted(env, horizon)
    assert episodes.observations.shape == (NUM_AGENTS, NUM_EPISODES, padded, 4)
    for name in ("actions", "rewards", "log_probabilities"):
        assert getattr(episodes, name).shape == (NUM_AGENTS, NUM_EPISODES, padded)
    assert episodes.lengths.dtype == episodes.actions.dtype == np.int32
    lasts = episodes.observations[:, :, 0, 1]
    assert env.shortest <= np.min(lasts) <= np.max(lasts) <= env.longest
    np.testing.assert_array_equal(episodes.lengths, np.minimum(lasts, horizon))
    assert episodes.steps == np.max(episodes.lengths)
    for index, length in each(episodes):
        time = np.arange(padded)
        np.testing.assert_array_equal(episodes.rewards[index], np.where(time < length, time + 1, 0))
        assert episodes.returns[index] == length * (length + 1) / 2
        np.testing.assert_array_equal(episodes.observations[index][:length, 0], time[:length])


def test_lengths_are_mixed_enough() -> None:
    lengths = counted(*MIXED).lengths
    assert 30 < np.sum(lengths == 101) < 90
    assert len(set(lengths.ravel())) > 30
    assert {1, 2, 50, 51, 52, 100} & set(lengths.ravel())


@pytest.mark.parametrize(("env", "horizon"), [MIXED, SHORT])
def test_nothing_is_written_past_the_longest_episode(env: Counting, horizon: int) -> None:
    episodes = counted(env, horizon)
    for name in ("observations", "actions", "rewards", "log_probabilities"):
        assert not np.any(getattr(episodes, name)[:, :, episodes.steps :]), name
    assert np.all(episodes.observations[:, :, : episodes.steps, 1] > 0)


def test_an_ended_episode_stays_where_it_ended() -> None:
    episodes = counted(*MIXED)
    for index, length in each(episodes):
        after = episodes.observations[index][length : episodes.steps]
        assert np.all(after[:, 0] == length)
        assert np.all(after == after[:1])


def test_recorded_log_probabilities_are_those_of_the_recorded_actions() -> None:
    episodes = counted(*MIXED)
    alive = np.arange(102) < episodes.lengths[..., None]
    expected = np.where(alive, np.log(PROBABILITIES)[episodes.actions], 0)
    np.testing.assert_allclose(episodes.log_probabilities, expected, rtol=1e-5)


# Noise


def uncorrelated(one: np.ndarray, other: np.ndarray, alive: np.ndarray | bool = True) -> bool:
    """Within 4.5 standard errors, over the places where `alive`."""
    alive = np.broadcast_to(alive, one.shape)
    return bool(abs(np.corrcoef(one[alive], other[alive])[0, 1]) < 4.5 / np.sqrt(np.sum(alive)))


def unlike_each_other(values: np.ndarray, alive: np.ndarray, span: int) -> bool:
    """No value [agent, episode, time] tells of the next step's, the next span's, the next agent's or episode's."""
    return (
        uncorrelated(values[:, :, 1:], values[:, :, :-1], alive[:, :, 1:])
        and uncorrelated(values[:, :, span:], values[:, :, :-span], alive[:, :, span:])
        and uncorrelated(values[1:], values[:-1], alive[1:] & alive[:-1])
        and uncorrelated(values[:, 1:], values[:, :-1], alive[:, 1:] & alive[:, :-1])
    )


def test_the_environment_hears_fresh_uniform_noise_that_is_not_the_policys() -> None:
    episodes = counted(*MIXED)
    alive = (np.arange(101) < episodes.lengths[..., None])[:, :, :-1]
    heard, actions = episodes.observations[:, :, 1:101, 2:], episodes.actions[:, :, :100]
    flat = heard[alive]
    assert np.all((flat >= 0) & (flat < 1))
    # Draws have 23 bits: of some 18,000, about 20 are found twice by chance; noise used twice would make thousands.
    assert len(np.unique(flat)) > flat.size - 80
    for column in flat.T:
        quantiles = np.quantile(column, [0.1, 0.5, 0.9])
        np.testing.assert_allclose(quantiles, [0.1, 0.5, 0.9], atol=4.5 * 0.5 / np.sqrt(len(column)))
    assert uncorrelated(heard[..., 0], heard[..., 1], alive)
    for i in range(2):
        assert uncorrelated(heard[..., i], actions, alive)
        assert unlike_each_other(heard[..., i], alive, span=51)


def test_actions_are_drawn_as_often_as_the_policy_says() -> None:
    episodes = counted(*MIXED)
    alive = np.arange(101) < episodes.lengths[..., None]
    actions = episodes.actions[:, :, :101]
    for part in (alive[:, :, :1], alive[:, :, :51], alive):
        chosen = actions[:, :, : part.shape[2]][part]
        frequencies = np.mean(chosen[:, None] == np.arange(3), axis=0)
        errors = (frequencies - PROBABILITIES) / np.sqrt(PROBABILITIES * (1 - PROBABILITIES) / len(chosen))
        assert np.max(np.abs(errors)) < 4.5
    assert unlike_each_other(actions, alive, span=51)


# CartPole

CARTPOLE = envs.make("CartPole-v1")
LINEAR = CategoricalMLP(4, (), num_actions=2)


def cartpole_parameters() -> np.ndarray:
    """Three agents that balance the pole ever better, and three that do not try."""
    balancing = np.zeros((4, 2), np.float32)
    balancing[:, 1] = [0.02, 0.05, 1, 0.3]
    scales = np.array([6, 12, 40, 0, 0, 0], np.float32)
    return np.concatenate([scales[:, None] * balancing.ravel(), np.zeros((6, 2), np.float32)], axis=1)


def play_cartpole(agents: slice, keys: Array) -> Any:
    options = {"num_episodes": NUM_EPISODES, "horizon": 250}
    return in_numpy(play(CARTPOLE, LINEAR, cartpole_parameters()[agents], keys[agents], **options))


@cache
def cartpole_episodes() -> Any:
    return play_cartpole(slice(None), agent_keys(1))


def test_gymnasium_goes_the_recorded_way() -> None:
    """Every recorded step again, from the recorded observation with the recorded action."""
    episodes = cartpole_episodes()
    reference: Any = gymnasium.make("CartPole-v1").unwrapped
    for index, length in each(episodes):
        for time in range(length):
            reference.state = episodes.observations[index][time].astype(np.float64)
            reference.steps_beyond_terminated = None
            _, _, terminated, _, _ = reference.step(int(episodes.actions[index][time]))
            if time + 1 < episodes.steps:
                following = episodes.observations[index][time + 1]
                np.testing.assert_allclose(following, reference.state, rtol=2e-6, atol=1e-6)
            assert terminated == (time + 1 == length) or time + 1 == 250
        np.testing.assert_array_equal(episodes.rewards[index], np.arange(252) < length)
        assert episodes.returns[index] == length
    lengths = episodes.lengths
    assert np.max(lengths) == episodes.steps == 250
    assert np.max(lengths[3:]) < 130
    assert len(set(lengths.ravel())) > 30


def test_cartpoles_recorded_log_probabilities_are_those_of_the_recorded_steps() -> None:
    episodes, parameters = cartpole_episodes(), cartpole_parameters().astype(np.float64)
    for agent, theta in enumerate(parameters):
        outputs = episodes.observations[agent] @ theta[:8].reshape(4, 2) + theta[8:]
        all_actions = outputs - np.log(np.sum(np.exp(outputs), axis=-1, keepdims=True))
        expected = np.take_along_axis(all_actions, episodes.actions[agent][..., None], axis=-1)[..., 0]
        alive = np.arange(252) < episodes.lengths[agent][:, None]
        np.testing.assert_allclose(episodes.log_probabilities[agent], np.where(alive, expected, 0), atol=2e-5)


def test_first_states_differ_between_agents_and_episodes() -> None:
    starts = cartpole_episodes().observations[:, :, 0].reshape(-1, 4)
    assert len(np.unique(starts, axis=0)) == len(starts)
    assert np.max(np.abs(starts)) <= 0.05


def test_an_agents_episodes_do_not_depend_on_the_other_agents() -> None:
    """To float tolerance: products of matrices may add in another order in a batch of another size."""
    together, alone = cartpole_episodes(), play_cartpole(slice(2, 4), agent_keys(1))
    longest = alone.steps
    for name in ("lengths", "returns"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(together, name)[2:4])
    for name in ("observations", "actions", "rewards", "log_probabilities"):
        expected = getattr(together, name)[2:4, :, :longest]
        np.testing.assert_allclose(getattr(alone, name)[:, :, :longest], expected, rtol=1e-5, atol=1e-5)


def test_keys_alone_decide_bit_for_bit() -> None:
    again = play_cartpole(slice(None), agent_keys(1))
    for field in fields(Episodes):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(cartpole_episodes(), field.name))
    keys = agent_keys(1)[jnp.asarray([0, 1, 2, 3, 4, 3])]  # the last agent plays with the fourth one's key
    shared = play_cartpole(slice(None), keys)
    for name in ("observations", "actions", "rewards", "log_probabilities", "lengths", "returns"):
        values = getattr(shared, name)
        np.testing.assert_array_equal(values[5], values[3])
        np.testing.assert_array_equal(values[:5], getattr(cartpole_episodes(), name)[:5])
    assert not np.any(shared.observations[4, :, 0] == shared.observations[3, :, 0])
    other = play_cartpole(slice(None), agent_keys(2))
    assert not np.any(other.observations[:, :, 0] == shared.observations[:, :, 0])


# Attacks on play


def same_but(poisoned: Any, plain: Any, changed: tuple[str, ...]) -> None:
    """Honest agents' episodes are bit for bit the same; liars' are, but for what is `changed`."""
    for field in fields(Episodes):
        one, other = getattr(poisoned, field.name), getattr(plain, field.name)
        if one.ndim:
            np.testing.assert_array_equal(one[~LIARS], other[~LIARS], err_msg=field.name)
        if field.name not in changed:
            np.testing.assert_array_equal(one, other, err_msg=field.name)


def chi_square(actions: np.ndarray) -> float:
    counts = np.bincount(actions.ravel(), minlength=3)
    return float(np.sum((counts - actions.size / 3) ** 2) / (actions.size / 3))


def test_random_actions_are_uniform_and_flipped_rewards_are_noted_but_returns_are_what_was_paid() -> None:
    plain, poisoned = counted(*MIXED), counted(*MIXED, RandomActionRewardFlip())
    same_but(poisoned, plain, ("actions", "log_probabilities", "rewards"))
    alive, actions = np.arange(102) < plain.lengths[..., None], poisoned.actions
    for agent in range(NUM_AGENTS):
        # Two degrees of freedom: above 20 once in 20,000.
        assert (chi_square(actions[agent][alive[agent]]) < 20) == LIARS[agent]
    assert unlike_each_other(actions[LIARS], alive[LIARS], span=51)
    assert uncorrelated(actions[LIARS], plain.actions[LIARS], alive[LIARS])
    # What the policy makes of the action taken, not of the one it chose.
    expected = np.where(alive, np.log(PROBABILITIES)[actions], 0)
    np.testing.assert_allclose(poisoned.log_probabilities, expected, rtol=1e-5)
    np.testing.assert_array_equal(poisoned.rewards[LIARS], -plain.rewards[LIARS])


def test_random_rewards_are_noted_and_both_hooks_hear_keys_of_their_own_at_every_step() -> None:
    plain, poisoned = counted(*MIXED), counted(*MIXED, KeyedActionRandomReward(scale=2.0))
    same_but(poisoned, plain, ("actions", "log_probabilities", "rewards"))
    alive = (np.arange(102) < plain.lengths[..., None])[LIARS]
    actions, rewards = poisoned.actions[LIARS], poisoned.rewards[LIARS]
    assert np.all(rewards[~alive] == 0)
    noted, size = rewards[alive], np.sum(alive)
    assert np.all(np.abs(noted) < 2)
    assert abs(np.mean(noted)) < 4.5 * 2 / np.sqrt(3 * size)
    # The fourth moment of a uniform draw is 9/5 of the squared variance.
    assert np.var(noted) == pytest.approx(4 / 3, rel=4.5 * np.sqrt(0.8 / size))
    assert chi_square(actions[alive]) < 20
    assert uncorrelated(actions, rewards, alive)
    for values in (actions, rewards):
        assert unlike_each_other(values, alive, span=51)


def test_without_liars_or_lies_in_play_it_is_the_same_program() -> None:
    def program(attack: Attack | None, byzantine: np.ndarray | None) -> str:
        played = partial(rollout, CARTPOLE, LINEAR, num_episodes=2, horizon=5, attack=attack)
        return str(jax.make_jaxpr(played)(cartpole_parameters(), agent_keys(0), byzantine=byzantine))

    plain = program(None, None)
    assert program(RandomAction(), None) == plain
    assert program(AvgZero(), LIARS).count("while") == plain.count("while")
    assert program(RandomAction(), LIARS) != plain


# Continuous actions


def test_continuous_actions_are_drawn_recorded_and_lied_about() -> None:
    policy = GaussianMLP(2, (), action_size=2)
    rng = np.random.default_rng(0)
    parameters = rng.normal(0, 0.3, (NUM_AGENTS, policy.dimension)).astype(np.float32)
    options = {"num_episodes": NUM_EPISODES, "horizon": 7, "attack": RandomAction(), "byzantine": LIARS}
    episodes = in_numpy(play(Drifting(), policy, parameters, agent_keys(5), **options))
    assert episodes.actions.shape == episodes.observations.shape == (NUM_AGENTS, NUM_EPISODES, 7, 2)
    assert episodes.actions.dtype == np.float32
    assert np.all(episodes.lengths == 7)
    moved = episodes.observations[:, :, :-1] + episodes.actions[:, :, :-1]
    np.testing.assert_allclose(episodes.observations[:, :, 1:], moved, rtol=1e-6, atol=1e-6)
    paid = -np.sum(episodes.observations**2, axis=-1)
    np.testing.assert_allclose(episodes.rewards, paid, rtol=1e-5)
    np.testing.assert_allclose(episodes.returns, np.sum(paid, axis=2), rtol=1e-5)
    matrices, biases = parameters[:, :4].reshape(-1, 1, 2, 2), parameters[:, None, None, 4:6]
    stds = np.exp(parameters[:, None, None, 6:])
    standardised = (episodes.actions - episodes.observations @ matrices - biases) / stds
    expected = -np.sum(standardised**2 / 2 + np.log(stds) + np.log(2 * np.pi) / 2, axis=-1)
    np.testing.assert_allclose(episodes.log_probabilities, expected, rtol=1e-4, atol=1e-4)
    honest = standardised[~LIARS].reshape(-1, 2)
    np.testing.assert_allclose(np.mean(honest, axis=0), 0, atol=4.5 / np.sqrt(len(honest)))
    np.testing.assert_allclose(np.cov(honest.T), np.eye(2), atol=4.5 * np.sqrt(2 / len(honest)))
    lies = episodes.actions[LIARS].reshape(-1, 2)
    assert np.all((lies >= [-3, 0]) & (lies < [1, 2]))
    widths = np.array([4, 2])
    np.testing.assert_allclose(np.mean(lies, axis=0), [-1, 1], atol=4.5 * widths.max() / np.sqrt(12 * len(lies)))
    np.testing.assert_allclose(np.std(lies, axis=0), widths / np.sqrt(12), rtol=4.5 * 0.45 / np.sqrt(len(lies)))
