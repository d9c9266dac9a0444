"""Rollouts: what is written where, when episodes end, which random numbers they use, and what attacks change."""

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
from tiers import slow_except

from byzpg.envs import Environment
from byzpg.envs.cartpole import CartPole
from byzpg.envs.spaces import Box, Discrete
from byzpg.learning import rollouts
from byzpg.learning.policies import CategoricalMLP, GaussianMLP, Numbers, Policy
from byzpg.learning.rollout_kernel import Agents, Setup
from byzpg.learning.rollouts import PIECES, SPAN, Clock, Episodes, rollout
from byzpg.robust.adaptive import BonusForAction
from byzpg.robust.attacks import Attack, RandomAction, RandomReward, RewardFlip
from byzpg.robust.components import Component

NUM_AGENTS, NUM_EPISODES = 6, 20


class Count(NamedTuple):
    step: Array
    last: Array
    first_noise: Array
    second_noise: Array


@dataclass(frozen=True)
class Counting(Component):
    """Counts its steps and stores its noise. The reward is step + 1, and the length of an episode is drawn at reset."""

    shortest: int
    longest: int
    name = "Counting"
    observation_size = 4
    action_space = Discrete(3)
    horizon = 1000
    reward_threshold = None
    noise_size = 2
    has_loops = False

    def reset(self, key: Array) -> Count:
        last = self.shortest + jnp.floor(jax.random.uniform(key) * (self.longest + 1 - self.shortest))
        return Count(jnp.zeros(()), last, jnp.full((), -1.0), jnp.full((), -1.0))

    def observe(self, state: Count) -> Numbers:
        return state

    def step(self, state: Count, action: Numbers, noise: Numbers) -> tuple[Count, Array, Array]:
        step = state.step + 1
        return Count(step, state.last, *noise), step, step >= state.last


@dataclass(frozen=True)
class Drifting(Component):
    """A point in the plane that moves by the action; its third coordinate is its noise."""

    name = "Drifting"
    observation_size = 3
    action_space = Box(2, (-3.0, 0.0), (1.0, 1.0))
    horizon = 7
    reward_threshold = None
    noise_size = 1
    has_loops = True

    def reset(self, key: Array) -> Numbers:
        return tuple(jax.random.normal(key, (3,)))

    def observe(self, state: Numbers) -> Numbers:
        return state

    def step(self, state: Numbers, action: Numbers, noise: Numbers) -> tuple[Numbers, Array, Array]:
        moved = (state[0] + action[0], state[1] + action[1], *noise)
        return moved, -sum(map(jnp.square, state), start=jnp.zeros(())), jnp.zeros(state[0].shape, bool)


@dataclass(frozen=True)
class RandomActionRewardFlip(RandomAction, RewardFlip):
    """Combines `act` of RandomAction with `record` of RewardFlip."""


@dataclass(frozen=True)
class KeyedActionRandomReward(RandomReward):
    """`record` of RandomReward, and an `act` that uses its key."""

    def act(self, action: Array, uniform: Array) -> Array:
        return (uniform + 1) % 3


# This policy prefers action 0 at every observation, so that random actions are easy to detect.
PREFERRING = CategoricalMLP(4, (), num_actions=3)
PREFERENCE = np.tile(np.array([0.0] * 12 + [1.5, 0.0, 0.0], np.float32), (NUM_AGENTS, 1))
PROBABILITIES = np.exp([1.5, 0, 0]) / np.sum(np.exp([1.5, 0, 0]))
ATTACKERS = np.array([False, True, False, False, True, False])


@partial(
    jax.jit,
    static_argnums=(0, 1),
    static_argnames=("num_episodes", "horizon", "attack"),
)
def play(env: Environment, policy: Policy, parameters: Any, keys: Array, **options: Any) -> Episodes:
    attack, byzantine = options.pop("attack", None), options.pop("byzantine", None)
    attackers = [] if attack is None else [(attack, byzantine)]
    return rollout(env, policy, parameters, keys, **options, attackers=attackers)


def agent_keys(seed: int, num_agents: int = NUM_AGENTS) -> Array:
    return jax.random.split(jax.random.key(seed), num_agents)


def in_numpy(episodes: Episodes) -> Any:
    return jax.tree.map(np.asarray, episodes)


@cache
def counted(env: Counting, horizon: int, attack: Attack | None = None) -> Any:
    options = {"num_episodes": NUM_EPISODES, "horizon": horizon, "attack": attack, "byzantine": ATTACKERS}
    return in_numpy(play(env, PREFERRING, PREFERENCE, agent_keys(0), **options))


MIXED = (Counting(1, 200), 101)  # half of the episodes are cut off, in the second span
SHORT = (Counting(3, 3), 250)


def each(episodes: Any) -> Iterator[tuple[tuple[int, int], int]]:
    """The index and length of every episode."""
    for index in np.ndindex(episodes.lengths.shape):
        yield index, int(episodes.lengths[index])


def living(episodes: Any) -> np.ndarray:
    """Which steps [agent, episode, time] are part of an episode."""
    return np.arange(episodes.rewards.shape[2]) < episodes.lengths[..., None]


# The clock


@pytest.mark.parametrize("horizon", [1, 7, 99, 100, 101, 199, 201, 250, 500, 997, 1000])
def test_pieces_make_up_spans_and_spans_the_horizon(horizon: int) -> None:
    clock = Clock(horizon)
    assert clock.num_spans == int(np.ceil(horizon / SPAN))
    assert clock.span == clock.piece * PIECES
    assert clock.padded == clock.num_spans * clock.span
    assert horizon <= clock.padded < horizon + clock.num_spans * PIECES


# Lengths, and what is written


@pytest.mark.parametrize(("env", "horizon"), [MIXED, SHORT])
def test_episodes_end_where_the_environment_or_the_horizon_says(env: Counting, horizon: int) -> None:
    episodes, padded = counted(env, horizon), Clock(horizon).padded
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


def test_nothing_is_written_past_the_piece_in_which_the_longest_episode_ends() -> None:
    episodes, clock = counted(*SHORT), Clock(SHORT[1])
    assert clock.num_spans > 1
    assert episodes.steps == 3 < clock.piece
    for name in ("observations", "actions", "rewards", "log_probabilities"):
        assert not np.any(getattr(episodes, name)[:, :, clock.piece :]), name
    assert np.all(episodes.observations[:, :, :3, 1] > 0)


def test_an_ended_episode_stays_where_it_ended() -> None:
    episodes = counted(*MIXED)
    for index, length in each(episodes):
        after = episodes.observations[index][length : episodes.steps]
        assert np.all(after[:, 0] == length)
        assert np.all(after == after[:1])


def test_recorded_log_probabilities_are_those_of_the_recorded_actions() -> None:
    episodes = counted(*MIXED)
    expected = np.where(living(episodes), np.log(PROBABILITIES)[episodes.actions], 0)
    np.testing.assert_allclose(episodes.log_probabilities, expected, rtol=1e-5)


# Noise


def uncorrelated(one: np.ndarray, other: np.ndarray, alive: np.ndarray | bool = True) -> bool:
    """Within 4.5 standard errors, over the places where `alive`."""
    alive = np.broadcast_to(alive, one.shape)
    return bool(abs(np.corrcoef(one[alive], other[alive])[0, 1]) < 4.5 / np.sqrt(np.sum(alive)))


def unlike_each_other(values: np.ndarray, alive: np.ndarray) -> bool:
    """Whether no value [agent, episode, time] correlates with a later one, another agent's or another episode's.

    Later means: by a step, a piece or a span.
    """
    clock = Clock(MIXED[1])
    return (
        all(
            uncorrelated(values[:, :, later:], values[:, :, :-later], alive[:, :, later:])
            for later in (1, clock.piece, clock.span)
        )
        and uncorrelated(values[1:], values[:-1], alive[1:] & alive[:-1])
        and uncorrelated(values[:, 1:], values[:, :-1], alive[:, 1:] & alive[:, :-1])
    )


def test_the_environment_gets_fresh_uniform_noise_that_is_not_the_policys() -> None:
    episodes = counted(*MIXED)
    alive = living(episodes)[:, :, :100]
    noise, actions = episodes.observations[:, :, 1:101, 2:], episodes.actions[:, :, :100]
    flat = noise[alive]
    assert np.all((flat >= 0) & (flat < 1))
    # Draws have 23 bits: of some 18,000, about 20 are found twice by chance; noise used twice would make thousands.
    assert len(np.unique(flat)) > flat.size - 80
    for column in flat.T:
        quantiles = np.quantile(column, [0.1, 0.5, 0.9])
        np.testing.assert_allclose(quantiles, [0.1, 0.5, 0.9], atol=4.5 * 0.5 / np.sqrt(len(column)))
    assert uncorrelated(noise[..., 0], noise[..., 1], alive)
    for i in range(2):
        assert uncorrelated(noise[..., i], actions, alive)
        assert unlike_each_other(noise[..., i], alive)


def test_actions_are_drawn_as_often_as_the_policy_says() -> None:
    episodes = counted(*MIXED)
    alive, actions = living(episodes), episodes.actions
    for part in (alive[:, :, :1], alive[:, :, :50], alive):
        chosen = actions[:, :, : part.shape[2]][part]
        frequencies = np.mean(chosen[:, None] == np.arange(3), axis=0)
        errors = (frequencies - PROBABILITIES) / np.sqrt(PROBABILITIES * (1 - PROBABILITIES) / len(chosen))
        assert np.max(np.abs(errors)) < 4.5
    assert unlike_each_other(actions, alive)


# CartPole

CARTPOLE = CartPole()
LINEAR = CategoricalMLP(4, (), num_actions=2)


def cartpole_parameters() -> np.ndarray:
    """Three agents that balance the pole, each better than the one before, and three that act at random."""
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


def test_gymnasium_repeats_every_recorded_step() -> None:
    """Each step starts from the recorded observation and takes the recorded action."""
    episodes = cartpole_episodes()
    reference: Any = gymnasium.make("CartPole-v1").unwrapped
    for index, length in each(episodes):
        observations, actions = episodes.observations[index].astype(np.float64), episodes.actions[index].tolist()
        states, ends = [], []
        for time in range(length):
            reference.state, reference.steps_beyond_terminated = observations[time], None
            _, _, terminated, _, _ = reference.step(actions[time])
            states.append(reference.state)
            ends.append(terminated)
        recorded = observations[1 : episodes.steps][:length]
        np.testing.assert_allclose(recorded, states[: len(recorded)], rtol=2e-6, atol=1e-6)
        assert not any(ends[:-1])
        assert ends[-1] or length == 250
        np.testing.assert_array_equal(episodes.rewards[index], np.arange(Clock(250).padded) < length)
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
        expected = np.where(living(episodes)[agent], expected, 0)
        np.testing.assert_allclose(episodes.log_probabilities[agent], expected, atol=2e-5)


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


def assert_same_except(poisoned: Any, plain: Any, changed: tuple[str, ...]) -> None:
    """All episodes are equal to the bit, except for the fields `changed` of the attackers' episodes."""
    for field in fields(Episodes):
        one, other = getattr(poisoned, field.name), getattr(plain, field.name)
        if one.ndim:
            np.testing.assert_array_equal(one[~ATTACKERS], other[~ATTACKERS], err_msg=field.name)
        if field.name not in changed:
            np.testing.assert_array_equal(one, other, err_msg=field.name)


def chi_square(actions: np.ndarray) -> float:
    counts = np.bincount(actions.ravel(), minlength=3)
    return float(np.sum((counts - actions.size / 3) ** 2) / (actions.size / 3))


def test_random_actions_are_uniform_and_flipped_rewards_are_recorded_but_returns_are_true() -> None:
    plain, poisoned = counted(*MIXED), counted(*MIXED, RandomActionRewardFlip())
    assert_same_except(poisoned, plain, ("actions", "log_probabilities", "rewards"))
    alive, actions = living(plain), poisoned.actions
    for agent in range(NUM_AGENTS):
        # Two degrees of freedom: above 20 once in 20,000.
        assert (chi_square(actions[agent][alive[agent]]) < 20) == ATTACKERS[agent]
    assert unlike_each_other(actions[ATTACKERS], alive[ATTACKERS])
    assert uncorrelated(actions[ATTACKERS], plain.actions[ATTACKERS], alive[ATTACKERS])
    # The log-probability belongs to the action taken, not to the one that the policy chose.
    expected = np.where(alive, np.log(PROBABILITIES)[actions], 0)
    np.testing.assert_allclose(poisoned.log_probabilities, expected, rtol=1e-5)
    np.testing.assert_array_equal(poisoned.rewards[ATTACKERS], -plain.rewards[ATTACKERS])
    paid = counted(*MIXED, BonusForAction(2, bonus=5.0))
    assert_same_except(paid, plain, ("rewards",))
    bonus = 5.0 * (alive & (plain.actions == 2))
    np.testing.assert_allclose(paid.rewards[ATTACKERS], (plain.rewards + bonus)[ATTACKERS], rtol=1e-6)


def test_random_rewards_are_recorded_and_both_hooks_get_draws_of_their_own_at_every_step() -> None:
    plain, poisoned = counted(*MIXED), counted(*MIXED, KeyedActionRandomReward(scale=2.0))
    assert_same_except(poisoned, plain, ("actions", "log_probabilities", "rewards"))
    alive = living(plain)[ATTACKERS]
    actions, rewards = poisoned.actions[ATTACKERS], poisoned.rewards[ATTACKERS]
    assert np.all(rewards[~alive] == 0)
    recorded, size = rewards[alive], np.sum(alive)
    assert np.all(np.abs(recorded) < 2)
    assert abs(np.mean(recorded)) < 4.5 * 2 / np.sqrt(3 * size)
    # The fourth moment of a uniform draw is 9/5 of the squared variance.
    assert np.var(recorded) == pytest.approx(4 / 3, rel=4.5 * np.sqrt(0.8 / size))
    assert chi_square(actions[alive]) < 20
    assert uncorrelated(actions, rewards, alive)
    for values in (actions, rewards):
        assert unlike_each_other(values, alive)


def test_attacks_on_play_do_not_affect_each_other() -> None:
    """Under two attacks, each agent plays as it does under its own attack alone, to the bit."""
    on_actions, on_rewards = ATTACKERS & (np.arange(NUM_AGENTS) < 2), ATTACKERS & (np.arange(NUM_AGENTS) >= 2)
    assert np.any(on_actions)
    assert np.any(on_rewards)
    env, horizon = MIXED
    attackers = [(RandomActionRewardFlip(), on_actions), (RandomReward(), on_rewards)]

    @jax.jit
    def play_both(keys: Array) -> Episodes:
        options = {"num_episodes": NUM_EPISODES, "horizon": horizon, "attackers": attackers}
        return rollout(env, PREFERRING, jnp.asarray(PREFERENCE), keys, **options)

    both = play_both(agent_keys(0))
    for attack, mask in attackers:
        alone = counted(env, horizon, attack)
        for field in fields(Episodes):
            if field.name != "steps":
                ours = np.asarray(getattr(both, field.name))
                np.testing.assert_array_equal(ours[mask | ~ATTACKERS], getattr(alone, field.name)[mask | ~ATTACKERS])


# Groups


class CountingInLoops(Counting):
    """Its state has arrays of three types, one of them with an axis of its own; numbers change in each step."""

    has_loops = True

    def _as_arrays(self, count: Count) -> Any:
        step, last, *noise = count
        state = {"first": noise[0], "second": noise[1][..., None], "step": step.astype(jnp.int32), "last": last}
        return {**state, "began": step > 0}

    def reset(self, key: Array) -> Any:
        return self._as_arrays(super().reset(key))

    def observe(self, state: Any) -> Count:
        return Count(state["step"].astype(float), state["last"], state["first"], state["second"][..., 0])

    def step(self, state: Any, action: Numbers, noise: Numbers) -> tuple[Any, Array, Array]:
        count, reward, terminated = super().step(self.observe(state), action, noise)
        return self._as_arrays(count), reward, terminated


@pytest.mark.parametrize("kind", slow_except([Counting], [Counting, CountingInLoops]))
@pytest.mark.parametrize("size", [8, pytest.param(48, marks=pytest.mark.slow)])
def test_episodes_in_groups_are_those_played_all_at_once(
    kind: type[Counting], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is multiplied, to the bit. Actions after the end of an episode do not matter."""
    env, horizon = kind(1, 200), 101

    def played(size: int) -> Any:
        monkeypatch.setattr(rollouts, "GROUP", size)
        monkeypatch.setattr(rollouts, "GROUP_WITH_LOOPS", size)
        options: Any = {"num_episodes": NUM_EPISODES, "horizon": horizon, "attackers": attackers}
        return in_numpy(
            jax.jit(lambda keys: rollout(env, PREFERRING, jnp.asarray(PREFERENCE), keys, **options))(agent_keys(0))
        )

    attackers = [(RandomActionRewardFlip(), ATTACKERS), (RandomReward(), ~ATTACKERS)]
    in_groups, at_once = played(size), played(10**6)
    running = np.arange(at_once.actions.shape[2]) < at_once.lengths[..., None]
    np.testing.assert_array_equal(in_groups.actions[running], at_once.actions[running])
    for field in fields(Episodes):
        if field.name not in ("actions", "log_probabilities"):
            np.testing.assert_array_equal(getattr(in_groups, field.name), getattr(at_once, field.name), field.name)
    np.testing.assert_allclose(in_groups.log_probabilities, at_once.log_probabilities, atol=1e-6)


def test_agents_in_turns_play_what_they_play_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, except for what is recorded after the end of an episode, which does not matter."""

    def played(turn: int) -> Any:
        monkeypatch.setattr(rollouts, "TURN", turn)
        attackers = [(RandomActionRewardFlip(), ATTACKERS[:5]), (RandomReward(), ~ATTACKERS[:5])]
        options: Any = {"num_episodes": NUM_EPISODES, "horizon": 101, "attackers": attackers}
        play = jax.jit(lambda keys: rollout(Counting(1, 200), PREFERRING, jnp.asarray(PREFERENCE[:5]), keys, **options))
        return in_numpy(play(agent_keys(0)[:5]))

    at_once = played(10**6)
    running = np.arange(at_once.actions.shape[2]) < at_once.lengths[..., None]
    # Five turns of one agent, or two of three agents, the last of which is filled up.
    for turn in (1, 5 * NUM_EPISODES // 2):
        in_turns = played(turn)
        for field in fields(Episodes):
            values, expected = getattr(in_turns, field.name), getattr(at_once, field.name)
            over_time = values.shape[:3] == running.shape
            np.testing.assert_array_equal(*((values[running], expected[running]) if over_time else (values, expected)))


def test_rows_hold_every_running_episode_once() -> None:
    rng = np.random.default_rng(3)
    alive = rng.random((7, 21)) < rng.random((7, 1))
    alive[2], alive[5] = False, True
    rows = rollouts._Rows.of(jnp.asarray(alive))
    number = int(rows.ends[-1])
    assert number == sum(-(-count // rollouts.ROW) for count in alive.sum(axis=1)) < rows.most
    agent, episode, present = map(np.asarray, rows.at(jnp.arange(rows.most)))
    assert not np.any(present[number:])
    found = np.full(alive.shape, -1)
    for row, column in zip(*np.nonzero(present), strict=True):
        where = agent[row], episode[row, column]
        assert found[where] == -1
        found[where] = row * rollouts.ROW + column
    np.testing.assert_array_equal(found >= 0, alive)
    np.testing.assert_array_equal(found[alive], np.asarray(rows.places)[alive])


@pytest.mark.slow
def test_draws_of_some_episodes_are_the_entries_of_one_array() -> None:
    """Runs that were saved can only be repeated if no draw ever changes."""
    keys, piece, size, chosen = agent_keys(4), jnp.asarray(3), 2, jnp.asarray([[5, 0, 19]] * NUM_AGENTS)
    setup = Setup(MIXED[0], PREFERRING, MIXED[1])
    run = rollouts._Rollout(setup, Agents((), []), keys[:, None], (), NUM_EPISODES)
    draws = np.asarray(run.draws(keys, piece, chosen, size))
    for agent, key in enumerate(keys):
        shape = (run.clock.piece, NUM_EPISODES, size)
        expected = np.asarray(jax.random.uniform(jax.random.fold_in(key, piece), shape))
        np.testing.assert_array_equal(draws[:, agent], expected[:, chosen[agent]])


# Continuous actions


def test_continuous_actions_are_drawn_recorded_and_attacked() -> None:
    policy = GaussianMLP(3, (), action_size=2)
    rng = np.random.default_rng(0)
    parameters = rng.normal(0, 0.3, (NUM_AGENTS, policy.dimension)).astype(np.float32)
    options = {"num_episodes": NUM_EPISODES, "horizon": 7, "attack": RandomAction(), "byzantine": ATTACKERS}
    episodes = in_numpy(play(Drifting(), policy, parameters, agent_keys(5), **options))
    padded = Clock(7).padded
    assert episodes.observations.shape == (NUM_AGENTS, NUM_EPISODES, padded, 3)
    assert episodes.actions.shape == (NUM_AGENTS, NUM_EPISODES, padded, 2)
    assert episodes.actions.dtype == np.float32
    assert np.all(episodes.lengths == 7)
    assert not np.any(episodes.rewards[:, :, 7:])
    assert not np.any(episodes.log_probabilities[:, :, 7:])
    observations, actions = episodes.observations[:, :, :7], episodes.actions[:, :, :7]
    moved = observations[:, :, :-1, :2] + actions[:, :, :-1]
    np.testing.assert_allclose(observations[:, :, 1:, :2], moved, rtol=1e-6, atol=1e-6)
    paid = -np.sum(observations**2, axis=-1)
    np.testing.assert_allclose(episodes.rewards[:, :, :7], paid, rtol=1e-5)
    np.testing.assert_allclose(episodes.returns, np.sum(paid, axis=2), rtol=1e-5)

    matrices, biases = parameters[:, :6].reshape(-1, 1, 3, 2), parameters[:, None, None, 6:8]
    stds = np.exp(parameters[:, None, None, 8:])
    standardised = (actions - observations @ matrices - biases) / stds
    expected = -np.sum(standardised**2 / 2 + np.log(stds) + np.log(2 * np.pi) / 2, axis=-1)
    np.testing.assert_allclose(episodes.log_probabilities[:, :, :7], expected, rtol=1e-4, atol=1e-4)
    honest = standardised[~ATTACKERS].reshape(-1, 2)
    np.testing.assert_allclose(np.mean(honest, axis=0), 0, atol=4.5 / np.sqrt(len(honest)))
    np.testing.assert_allclose(np.cov(honest.T), np.eye(2), atol=4.5 * np.sqrt(2 / len(honest)))

    attacked = actions[ATTACKERS].reshape(-1, 2)
    assert np.all((attacked >= [-3, 0]) & (attacked < [1, 1]))
    np.testing.assert_allclose(np.mean(attacked, axis=0), [-1, 0.5], atol=4.5 * 4 / np.sqrt(12 * len(attacked)))
    np.testing.assert_allclose(
        np.std(attacked, axis=0), [4 / np.sqrt(12), 1 / np.sqrt(12)], rtol=2 / np.sqrt(len(attacked))
    )
    # Between 0 and 1 a uniform action is the draw itself, so it must differ from the environment's noise.
    noise = observations[ATTACKERS, :, 1:, 2]
    assert not set(attacked[:, 1]) & set(noise.ravel())
    assert len(set(attacked[:, 1])) == len(attacked)


def test_packing_a_state_keeps_its_values() -> None:
    shape = 2, 3
    state = {
        "numbers": (
            jnp.full(shape, jnp.nan),
            jnp.full(shape, -jnp.inf),
            jnp.arange(6.0).reshape(shape),
            -jnp.zeros(shape),
        ),
        "flags": jnp.ones(shape, bool),
        "counts": jnp.full(shape, -7),
        "vectors": jnp.ones((*shape, 4)),
    }
    packing = rollouts._Packing.of(state)
    (numbers, others) = packed = packing.pack(state)
    assert numbers.shape == (*shape, 4)
    assert len(others) == 3
    again = packing.unpack(packed)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()
    nothing = rollouts._Packing.of(())
    assert nothing.unpack(nothing.pack(state)) is state
