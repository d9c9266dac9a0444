"""Tasks in JAX that are written for one episode: of users, of gymnax and of Brax."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import own_tasks
import pytest
from host_tasks import Corridor
from own_tasks import STEP, Walk, Wind

from byzpg import Config, envs, load, play, train
from byzpg.envs import Box, Discrete, Environment, JaxTask, host
from byzpg.envs.cartpole import CartPole, State
from byzpg.learning.policies import CategoricalMLP, GaussianMLP
from byzpg.learning.rollouts import Clock, rollout
from byzpg.learning.segments import Environments, play_segment
from byzpg.testing import check_environment

KEYS = jax.random.split(jax.random.key(3), 2)


def jax_task(name: str) -> Environment:
    task = envs.make(name)
    assert isinstance(task, Environment)
    return task


# Episodes


def check_walk(observations: np.ndarray, actions: np.ndarray, following: np.ndarray) -> None:
    """What is seen after each action is what the walk makes of it."""
    moved = np.stack([STEP * (actions - 1), 0 * actions, np.ones_like(actions)], axis=-1)
    np.testing.assert_allclose(following, observations + moved, atol=1e-5)


@pytest.mark.slow
def test_episodes_whose_state_has_further_axes() -> None:
    policy, horizon, num_episodes = CategoricalMLP(3, (4,), num_actions=3), Walk().horizon, 150  # played in groups
    parameters = jax.vmap(policy.initial)(KEYS)
    play_all = jax.jit(partial(rollout, Walk(), policy, num_episodes=num_episodes, horizon=horizon))
    episodes = play_all(parameters, KEYS)
    lengths, seen = np.asarray(episodes.lengths), np.asarray(episodes.observations)
    assert seen.shape == (2, num_episodes, Clock(horizon).padded, 3)
    assert lengths.max() == horizon
    assert len(np.unique(lengths)) > 1
    inside = np.arange(seen.shape[2] - 1) < lengths[..., None] - 1
    check_walk(seen[:, :, :-1][inside], np.asarray(episodes.actions)[:, :, :-1][inside], seen[:, :, 1:][inside])
    # Terminated on the left, and otherwise cut off at the horizon.
    last = np.take_along_axis(seen, lengths[..., None, None] - 1, axis=2)[:, :, 0, 0]
    moved = STEP * (np.take_along_axis(np.asarray(episodes.actions), lengths[..., None] - 1, axis=2)[..., 0] - 1)
    assert np.all((last + moved < -1) | (lengths == horizon))
    assert len(np.unique(seen[:, :, 0, 1])) == 2 * num_episodes, "every episode has a start of its own"


@pytest.mark.parametrize("task", [Walk(), Wind(), jax_task("gymnax:Pendulum-v1")], ids=lambda task: task.name)
def test_segments_tell_termination_from_truncation(task: Any) -> None:
    is_discrete, horizon, num_steps = isinstance(task.action_space, Discrete), 12, 30
    policy = CategoricalMLP(3, (), num_actions=3) if is_discrete else GaussianMLP(3, (), action_size=1)
    environments = Environments.initial(task, 2, 4)
    segment_of = jax.jit(partial(play_segment, task, policy, num_steps=num_steps, horizon=horizon))
    after, segment = segment_of(jax.vmap(policy.initial)(KEYS), environments, KEYS)
    ended, terminated = np.asarray(segment.ended), np.asarray(segment.terminated)
    seen, following = np.asarray(segment.observations), np.asarray(segment.following)
    assert ended.any()
    assert terminated.any() == (task == Walk())
    np.testing.assert_array_equal(seen[:, :, 1:][~ended[:, :, :-1]], following[:, :, :-1][~ended[:, :, :-1]])
    assert not np.any(np.all(seen[:, :, 1:] == following[:, :, :-1], axis=-1)[ended[:, :, :-1]])
    if isinstance(task, Walk):
        assert np.all(following[..., 2][ended & ~terminated] == horizon)
        assert np.all(seen[:, :, 1:, 2][ended[:, :, :-1]] == 0), "a new episode follows in the same step"
        np.testing.assert_array_equal(after.state.observation[..., 2], after.elapsed)
    if task == Walk():
        check_walk(seen, np.asarray(segment.actions), following)
        np.testing.assert_array_equal(terminated, following[..., 0] < -1)
    if task == Wind():
        wind = (following - seen)[..., 1]
        assert len(np.unique(wind.round(5))) > wind.size - 3, "every step has a key of its own"
        assert wind.min() >= 0
        np.testing.assert_allclose((following - seen)[..., 0], np.clip(segment.actions[..., 0], -1, 1), atol=1e-5)


@pytest.mark.parametrize("name", ["own_tasks:WholeNumbers", "own_tasks:WithPlace"])
def test_no_step_rounds_what_is_seen(name: str) -> None:
    task, twin = jax_task(name), Walk()
    states = [jax.vmap(each.reset)(KEYS) for each in (task, twin)]
    action, noise = (jnp.asarray([0, 2]),), (jnp.zeros(2),) * 2
    seen, expected = (
        jnp.stack(each.observe(each.step(state, action, noise)[0]))
        for each, state in zip((task, twin), states, strict=True)
    )
    np.testing.assert_array_equal(seen, expected)


def test_a_task_for_one_episode_fulfils_the_contract_of_environments() -> None:
    assert not check_environment(Wind(), steps=12).failures


# Libraries


@pytest.mark.slow
def test_gymnax_takes_the_steps_of_our_cartpole_and_never_terminates_at_its_limit() -> None:
    task, ours = jax_task("gymnax:CartPole-v1"), CartPole()
    assert (task.observation_size, task.action_space, task.horizon) == (4, Discrete(2), 500)
    state = jax.jit(jax.vmap(task.reset))(jax.random.split(jax.random.key(0), 64))
    there = State(*task.observe(state))
    step, step_ours = jax.jit(task.step), jax.jit(ours.step)
    noise = (jnp.full(64, 0.5),) * task.noise_size
    ends = 0
    for time in range(30):
        action = (jnp.asarray((np.arange(64) // 2 ** (time % 6)) % 2),)
        state, reward, terminated = step(state, action, noise)
        there, _, ended = step_ours(there, action, ())
        ends += int(np.sum(terminated))
        np.testing.assert_allclose(jnp.stack(task.observe(state)), jnp.stack(there), atol=1e-4)
        np.testing.assert_array_equal(terminated, ended)
        np.testing.assert_array_equal(reward[~ended], 1)
        state, there = (jax.tree.map(lambda leaf: jnp.where(ended, 0, leaf.T).T, each) for each in (state, there))  # noqa: B023
    assert ends > 10
    calm = jax.tree.map(jnp.zeros_like, state)
    times = [index for index, leaf in enumerate(state.state) if leaf.dtype == jnp.int32]
    late = [leaf + 499 if index in times else leaf for index, leaf in enumerate(calm.state)]
    after, _, terminated = step(calm._replace(state=tuple(late)), (jnp.zeros(64, int),), noise)
    assert [np.all(after.state[index] == 500) for index in times] == [True]
    assert not np.any(terminated), "reaching the limit is truncation, which the horizon is for"


def test_brax_takes_its_own_steps() -> None:
    task = jax_task("brax:fast")
    assert (task.observation_size, task.action_space, task.horizon) == (2, Box(1, (-1.0,), (1.0,)), 1000)
    state = jax.vmap(task.reset)(KEYS)
    step = partial(jax.jit(task.step), action=(jnp.asarray([0.5, -3.0]),), noise=(jnp.zeros(2),) * 2)
    state, reward, terminated = step(step(step(state)[0])[0])
    # Its velocity rises by dt = 0.02 in every step with a positive action.
    np.testing.assert_allclose(task.observe(state)[1], [0.06, 0], atol=1e-6)
    np.testing.assert_allclose(reward, task.observe(state)[0], atol=1e-6)
    assert not np.any(terminated)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["brax:inverted_pendulum", "mjx:inverted_pendulum"])
def test_agents_with_a_critic_learn_from_physics(name: str) -> None:
    ppo = "PPO(environments=2, segment=32, epochs=1, minibatches=1)"
    config = Config(env=name, algorithm="DecByzPPO", num_agents=5, num_seeds=1, hidden=(8,), steps=192, ppo=ppo)
    run = train(config)
    assert run.metrics["episodes"].sum() > 0, "the pendulum falls, and episodes begin anew"
    assert np.all(run.returns > 1)


BAD = {
    "gymnax:CartPool-v1": "gymnax has no task 'CartPool-v1'. Did you mean 'CartPole-v1'?",
    "gymnax:Breakout-MinAtar": "gymnax:Breakout-MinAtar has observations of shape (10, 10, 4), such as pixels",
    "brax:antt": "Brax has no task 'antt'. Did you mean 'ant'?",
    "own_tasks:Undecorated": "Undecorated must be a dataclass: write @dataclass(frozen=True) above it.",
    "own_tasks:WithoutHorizon": "own_tasks:WithoutHorizon: horizon must be set, as byzpg.envs.JaxTask says.",
    "own_tasks:WrongSize": "begin gives observations of shape (3,), but observation_size is 2.",
    "own_tasks:Pixels": "has observations of shape (8, 8, 3), such as pixels, but byzpg only supports vectors",
    "own_tasks:Untraceable": "advance cannot be traced by JAX (TracerBoolConversionError",
    "own_tasks:Forgetful": "like that of begin: {'empty': (0, 2), 'place': (2,), 'time': ()}; got (2,).",
    "own_tasks:ManyRewards": "both of shape (); after the state come (3,), (2,), ().",
    "own_tasks:Rounding": "begin gives a state with an array of int32 where that of advance is float32: let begin give",
    "own_tasks:unhashable": "must be @dataclass(frozen=True), with options that are numbers, texts or tuples (unhash",
    "own_tasks:OnlyState": "begin must return the state, the observation, and all but the state must be arrays.",
    "own_tasks:Listing": "advance must return the state, the observation, the reward, whether the episode ended, and",
    "own_tasks:WithKey": "a state must consist of arrays of numbers, got key<fry>",
    "own_tasks:Walk(size=1)": "the factory failed (TypeError: Walk.__init__() got an unexpected keyword argument",
}


@pytest.mark.parametrize("name", BAD)
def test_tasks_that_do_not_work_give_one_clear_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as error:
        Config(env=name).resolved()
    assert BAD[name] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("gymnax:CartPole-v2", "gymnax", "gymnax"), ("mjx:ants", "brax.envs", "brax")]
)
def test_the_error_about_a_missing_library(name: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"^this task needs \w+: pip install .*\[{extra}\]"):
        envs.make(name)


# Objects in place of names


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (Walk, "own_tasks:Walk"),
        (Walk(), "own_tasks:Walk"),
        (Walk(width=2.0), "own_tasks:Walk(width=2.0)"),
        (own_tasks.walk, "own_tasks:walk"),
        (CartPole(), "CartPole-v1"),
        (jax_task("gymnax:Acrobot-v1"), "gymnax:Acrobot-v1"),
        (Corridor, "host_tasks:Corridor"),
    ],
)
def test_an_object_is_saved_as_its_name(task: Any, name: str) -> None:
    settings = Config(env=task, horizon=9).resolved()
    assert settings.env == name
    assert Config.of(settings.as_data(), "the run").resolved() == settings
    if isinstance(task, JaxTask):
        assert envs.make(name) == task


class Here(Walk):
    """Looks like a module's, but its name finds something else."""


Here.__qualname__ = "Walk"
Here.__module__ = "own_tasks"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lambda: Walk(), r"has no name by which opening the run could find it again\. Move it to a module of its own"),
        (type("Inner", (Walk,), {"__module__": "__main__"}), "has no name by which opening the run could find it"),
        (Here, r"could not be read back from its name own_tasks:Walk\. Move it"),
        (gymnasium.make("CartPole-v1"), "env must make environments, since every agent has several; got one"),
        (5, "env must be a name, a task in JAX, or a class or function that makes a task; got 5"),
    ],
)
def test_an_object_that_could_not_be_found_again_is_refused(task: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(Config(env=task), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_train_load_and_play_a_task_of_ones_own(tmp_path: Path) -> None:
    config = Config(
        env=Walk(width=0.5),
        num_agents=4,
        num_byzantine=0,
        num_seeds=1,
        hidden=(4,),
        step_size=0.1,
        large_batch=8,
        trajectories=240,
    )
    run = train(config, tmp_path / "own_tasks-Walk")
    assert run.returns[0, -1] > run.returns[0, 0] + 1, "it learns to go to the right"
    again = load(tmp_path / "own_tasks-Walk")
    assert again.settings == run.settings
    assert again.settings.task_in_names == "own_tasks-Walk-width-0.5"
    returns, frames = play.evaluate(again.policy(), again.settings, 5, seed=1)
    same, _ = play.evaluate(again.policy(), again.settings, 5, seed=1)
    np.testing.assert_array_equal(returns, same)
    assert len(set(returns)) > 1
    assert frames == []


def test_the_list_of_tasks_names_all_kinds() -> None:
    assert {"gymnasium:ID", "envpool:ID", "gymnax:ID", "brax:NAME, mjx:NAME", "module:Name"} == set(host.available())
