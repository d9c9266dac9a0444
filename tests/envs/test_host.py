"""Tasks on the host: compared with their twins in JAX, written by users, and broken ones."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any

import host_tasks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_tasks import Corridor
from tiers import slow_except

from byzpg import Config, Run, envs, play, resume, train
from byzpg._install import install
from byzpg.cli.train import free_directory
from byzpg.envs import Task, host
from byzpg.envs.cartpole import CartPole, State
from byzpg.envs.host import HostTask
from byzpg.envs.spaces import Box, Discrete
from byzpg.federation.simulator import LARGE, SKIP, SMALL, Simulation
from byzpg.learning.gradients import GPOMDP, gradient
from byzpg.learning.host_rollouts import play as play_task
from byzpg.learning.policies import CategoricalMLP, GaussianMLP, Policy
from byzpg.learning.rollouts import Clock, Episodes, PlayAttacks
from byzpg.robust.attacks import Attack, NoAttack, RandomAction, RandomReward, RewardFlip
from byzpg.training import Progress

POLICY = CategoricalMLP(4, (8,), num_actions=2)
SMALL_RUN: dict[str, Any] = {
    "algorithm": "ByzPG",
    "aggregator": "RFA",
    "num_agents": 4,
    "num_byzantine": 1,
    "num_seeds": 1,
    "hidden": (8,),
    "large_batch": 12,
    "small_batch": 6,
    "switch_probability": 0.2,
}


def host_task(name: str) -> HostTask:
    task = envs.make(name)
    assert isinstance(task, HostTask)
    return task


@partial(jax.jit, static_argnums=(0, 1))
def keys_and_parameters(policy: Policy, num_agents: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(1), num_agents)
    return keys, jax.vmap(policy.initial)(keys)


def played(
    task: Task,
    policy: Policy = POLICY,
    num_agents: int = 3,
    num_episodes: int = 5,
    horizon: int = 60,
    attackers: PlayAttacks = (),
    parameters: jax.Array | None = None,
) -> Episodes:
    """Episodes of agents with the given parameters [agent, d], or with initial ones by default."""
    keys, initial = keys_and_parameters(policy, num_agents if parameters is None else len(parameters))
    return play_task(
        task,
        policy,
        initial if parameters is None else parameters,
        keys,
        num_episodes=num_episodes,
        horizon=horizon,
        attackers=attackers,
    )


# Names of tasks


@pytest.mark.parametrize(
    "task",
    [
        HostTask("gymnasium:CartPole-v1", 4, Discrete(2), 500, 475.0),
        HostTask("gymnasium:Pendulum-v1", 3, Box(1, (-2.0,), (2.0,)), 200, None),
        HostTask("envpool:CartPole-v1", 4, Discrete(2), 500, 475.0),
        HostTask("envpool:HalfCheetah-v5", 17, Box(6, 6 * (-1.0,), 6 * (1.0,)), 1000, 4800.0),
        HostTask("host_tasks:corridor", 2, Discrete(3), None, None),
        HostTask("host_tasks:slider", 2, Box(2, (-0.5, -inf), (0.25, inf)), 9, None),
    ],
    ids=lambda task: task.name,
)
def test_a_name_makes_a_task(task: HostTask) -> None:
    assert envs.make(task.name) == task
    assert hash(envs.make(task.name)) == hash(task)


@pytest.mark.parametrize(
    ("name", "sizes", "first_end"),
    [
        ("Hopper-v4", (11, 3), "terminated"),  # MuJoCo
        ("CartpoleSwingup-v1", (5, 1), "truncated"),  # DeepMind Control: a position and a velocity
        ("Acrobot-v1", (6, 1), "truncated"),  # classic control
        ("LunarLander-v3", (8, 1), "terminated"),  # Box2D
        ("FetchReach-v4", (16, 4), "truncated"),  # Gymnasium-Robotics: an observation and two goals
    ],
)
def test_the_suites_of_envpool(name: str, sizes: tuple[int, int], first_end: str) -> None:
    task = host_task(f"envpool:{name}")
    assert task.horizon is not None
    assert (task.observation_size, task.action_space.size) == sizes
    action = np.zeros(2, np.int32) if isinstance(task.action_space, Discrete) else np.zeros((2, sizes[1]))
    with task.stage(2) as stage:
        seen = stage.reset(np.asarray([1, 2]))
        np.testing.assert_array_equal(seen, stage.reset(np.asarray([1, 2])))
        assert np.any(seen[0] != seen[1])
        outcome, steps = stage.step(np.arange(2), action), 1
        while not np.any(outcome.terminated | outcome.truncated):
            assert seen.shape == outcome.observations.shape == (2, sizes[0])
            outcome, steps = stage.step(np.arange(2), action), steps + 1
    assert np.any(getattr(outcome, first_end))
    assert (steps == task.horizon) == (first_end == "truncated")
    np.testing.assert_array_equal(outcome.truncated, first_end == "truncated")


BAD = {
    "gymnasium:CartPole-v7": ["Gymnasium has no task 'CartPole-v7'", "Did you mean 'CartPole-v"],
    "gymnasium:no task": ["gymnasium:no task cannot be made (Error: Malformed environment ID"],
    "gymnasium:Cartpool-v1": ["Gymnasium has no task 'Cartpool-v1'", "Did you mean 'CartPole-v1'?"],
    "envpool:LunaLander-v3": ["EnvPool has no task 'LunaLander-v3'", "Did you mean 'LunarLander-v3'?"],
    "MountainCar-v0": ["MountainCar-v0 is a task of Gymnasium: use the name gymnasium:MountainCar-v0."],
    "gymnasium:Blackjack-v1": ["observations Tuple(Discrete(32)", "vectors: Box of shape (n,)", "FlattenObservation"],
    "envpool:Pong-v5": ["observations of shape (4, 84, 84), such as pixels", "only supports vectors: use a task"],
    "host_tasks:dictionary": ["observations Dict('place': Discrete(2))", "vectors"],
    "host_tasks:image": ["(8, 8, 3), such as pixels", "vectors"],
    "host_tasks:many_choices": ["actions MultiDiscrete([2 3])", "only supports Discrete actions and vectors"],
    "host_tasks:failing": ["the factory failed (KeyError: 'the map is missing')"],
    "host_tasks:no_environment": ["must make a gymnasium.Env or a byzpg.envs.JaxTask, got dict"],
    "host_tasks:coridor": ["host_tasks has no 'coridor'", "Did you mean 'corridor'?"],
    "host_tasks:corridor(size=1)": ["the factory failed (TypeError: corridor() got an unexpected keyword argument"],
    "host_tasks:START": ["must be a class or a function that makes an environment, got (0.01"],
    "host_taks:corridor": ["'host_taks' cannot be imported", "No module named", "gymnasium:ID, envpool:ID, gymnax:ID"],
    "gymnasim:CartPole-v1": ["'gymnasim' cannot be imported", "Did you mean 'gymnasium'?"],
    ":corridor": ["the module '' cannot be imported"],
    "host_tasks:corridor": ["host_tasks:corridor does not limit the length of its episodes: set horizon"],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_names_and_tasks_give_one_clear_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as error:
        Config(env=name).resolved()
    for part in BAD[name]:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("always_another", r"makes environments that differ: the first one has 2 observations and actions Discrete\("),
        ("growing", r"makes environments that differ: the first one has 2 observations and actions Discrete\("),
        ("unpaid", "gave the reward nan: every number must be finite"),
        ("unseen", "gave the observation inf: every number must be finite"),
        ("longer", r"gave an observation of shape \(3,\), but its space has the shape \(2,\)"),
        ("the_same", "must make a new environment each time"),
        ("the_same_wrapped", "must make a new environment each time"),
    ],
)
def test_environments_that_do_not_match_their_description(name: str, message: str) -> None:
    task = host_task(f"host_tasks:{name}")
    with pytest.raises(ValueError, match=f"host_tasks:{name} {message}"):
        played(task, CategoricalMLP(2, (), num_actions=3))


def test_an_error_inside_a_task_names_the_task() -> None:
    with host_task("host_tasks:old").stage(2) as stage:
        stage.reset(np.arange(2))
        with pytest.raises(
            ValueError, match=r"host_tasks:old: step failed \(ValueError: step returned 4 values, as in Gym"
        ):
            stage.step(np.arange(2), np.zeros(2, np.int32))


@pytest.mark.parametrize("extra", ["gymnasium", "envpool"])
def test_the_error_about_a_missing_extra_says_how_to_install_it(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip" not in host.available()[f"{extra}:ID"]
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ValueError, match=rf"^this task needs \w+: {re.escape(install(extra))}\.$"):
        Config(env=f"{extra}:MountainCar-v0").resolved()
    assert host.available()[f"{extra}:ID"].endswith(f"not installed: {install(extra)}")


def test_actions_without_bounds_cannot_be_uniform() -> None:
    slider = Config(env="host_tasks:slider", attack="RewardFlip").resolved()
    assert isinstance(slider.bound_policy(), GaussianMLP)
    with pytest.raises(ValueError, match=r"RandomAction\(\) takes uniform actions, and those of host_tasks:slider"):
        replace(slider, attack=RandomAction())
    bounded = Config(env="gymnasium:Pendulum-v1", attack="RandomAction").resolved()
    assert bounded.attack == RandomAction()


def test_presets_do_not_depend_on_where_a_task_is_played() -> None:
    for preset in ("tuned", "paper", "theory", "script"):
        ours, theirs = (Config(env=env, preset=preset).resolved() for env in ("CartPole-v1", "gymnasium:CartPole-v1"))
        assert replace(theirs, env=ours.env) == ours
    lander = Config(env="envpool:LunarLander-v3", preset="paper").resolved()
    assert (lander.hidden, lander.activation, lander.step_size) == (
        (64, 64),
        "tanh",
        1e-3,
    )  # from the table in the paper


def test_defaults_of_a_task_without_a_table() -> None:
    settings = Config(env="gymnasium:MountainCar-v0").resolved()
    assert (settings.horizon, settings.discount, settings.hidden) == (200, 0.999, (64, 64))
    assert (settings.large_batch, settings.small_batch, settings.activation) == (45, 32, "relu")
    assert free_directory(settings) == Path("runs/gymnasium-MountainCar-v0-DecByzPG-AvgZero-1")


# Episodes


@dataclass(frozen=True)
class FixedStart(CartPole):
    """The JAX twin of host_tasks.fixed_start."""

    def reset(self, key: jax.Array) -> State:
        return State(*(jnp.float32(each) for each in host_tasks.START))


@pytest.mark.parametrize(
    "attack",
    slow_except([RandomAction(), RewardFlip()], [NoAttack(), RandomAction(), RandomReward(), RewardFlip()]),
    ids=str,
)
def test_episodes_are_those_of_the_twin_in_jax(attack: Attack) -> None:
    attackers = [(attack, jnp.asarray(np.asarray([False, True, False])))]
    here = played(host_task("host_tasks:fixed_start"), attackers=attackers)
    there = played(FixedStart(), attackers=attackers)
    assert 1 < int(here.steps) == int(there.steps)
    assert len(np.unique(here.lengths)) > 3
    np.testing.assert_array_equal(here.lengths, there.lengths)
    np.testing.assert_array_equal(here.returns, there.returns)
    alive = np.arange(Clock(60).padded) < np.asarray(here.lengths)[..., None]
    np.testing.assert_array_equal(np.asarray(here.actions)[alive], np.asarray(there.actions)[alive])
    np.testing.assert_allclose(np.asarray(here.observations)[alive], np.asarray(there.observations)[alive], atol=1e-4)
    np.testing.assert_array_equal(here.rewards, there.rewards)
    np.testing.assert_allclose(here.log_probabilities, there.log_probabilities, atol=1e-4)
    for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    honest = played(host_task("host_tasks:fixed_start"))
    changed = [np.any(a != b) for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(honest), strict=True)]
    assert any(changed) == (attack != NoAttack())


@cache
def estimates(task: Task, shift: float = 0.0) -> np.ndarray:
    """The mean return and the gradient of 40 agents with the same policy, 25 episodes each [agent, 1 + d]."""
    policy = CategoricalMLP(4, (), num_actions=2)
    one = np.linspace(-1, 1, policy.dimension) + shift * (np.arange(policy.dimension) % 2)
    parameters = jnp.asarray(np.tile(one.astype(np.float32), (40, 1)))
    episodes = played(task, policy, num_episodes=25, horizon=100, parameters=parameters)
    found = GRADIENT(policy, parameters, episodes, GPOMDP(), 0.99, Clock(100))
    return np.column_stack([np.mean(episodes.returns, axis=1), found])


GRADIENT = jax.jit(gradient, static_argnums=(0, 3, 4, 5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gymnasium:CartPole-v1", "envpool:CartPole-v1"])
def test_returns_and_gradients_are_those_of_cartpole_in_jax(name: str) -> None:
    """The differences are within standard errors, and those to another policy are not."""

    def largest_difference(one: np.ndarray, other: np.ndarray) -> float:
        """The largest difference of the means, in standard errors."""
        error = np.sqrt((np.var(one, axis=0, ddof=1) + np.var(other, axis=0, ddof=1)) / len(one))
        return float(np.max(np.abs(np.mean(one, axis=0) - np.mean(other, axis=0)) / error))

    here = estimates(envs.make(name))
    assert largest_difference(here, estimates(CartPole())) < 4
    assert largest_difference(here, estimates(CartPole(), shift=1.0)) > 6


def test_only_live_episodes_are_stepped_and_environments_are_kept() -> None:
    """`Corridor` raises an error if it is stepped after its end."""
    task, policy = host_task("host_tasks:corridor"), CategoricalMLP(2, (), num_actions=3)
    Corridor.made.clear()
    episodes = played(task, policy, num_agents=2, num_episodes=6, horizon=100)
    lengths = np.asarray(episodes.lengths)
    assert len(Corridor.made) == 12
    assert sum(each.num_steps for each in Corridor.made) == lengths.sum() < lengths.size * lengths.max()
    assert set(lengths.reshape(-1) % 2) == {0, 1}, "both terminated and truncated"
    actions = np.concatenate([each.taken for each in Corridor.made])
    assert set(actions) == {-1, 0, 1}, "actions start at the start of the space"
    np.testing.assert_array_equal(episodes.returns, np.sum(episodes.rewards, axis=2))
    assert sum(float(each) for each in actions) == float(np.sum(episodes.returns))

    again = played(task, policy, num_agents=2, num_episodes=6, horizon=100)
    np.testing.assert_array_equal(again.lengths, lengths)
    cut = played(task, policy, num_agents=2, num_episodes=6, horizon=4)
    np.testing.assert_array_equal(cut.lengths, np.minimum(lengths, 4))
    assert len(Corridor.made) == 12


def test_a_pool_steps_only_live_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    step = host._Pool.step

    def counted(self: Any, episodes: np.ndarray, actions: np.ndarray) -> host.Outcome:
        sizes.append(len(episodes))
        return step(self, episodes, actions)

    monkeypatch.setattr(host._Pool, "step", counted)
    episodes = played(host_task("envpool:CartPole-v1"), num_episodes=10, horizon=200)
    assert sum(sizes) == int(np.sum(episodes.lengths)) < len(sizes) * sizes[0]
    # An environment that is stepped after its end would start again near the middle, with a jump of the angle.
    angle, lengths = np.asarray(episodes.observations)[..., 2], np.asarray(episodes.lengths)
    moved = np.abs(np.diff(angle, axis=2))[np.arange(1, 200) < lengths[..., None]]
    assert 0 < np.max(moved) < 0.1
    np.testing.assert_array_equal(
        played(host_task("envpool:CartPole-v1"), num_episodes=10, horizon=200).lengths, lengths
    )


@pytest.mark.slow
def test_a_continuous_task_is_the_same_in_gymnasium_and_envpool() -> None:
    """Mean returns of 200 episodes of 50 steps agree within standard errors; those of 30 steps do not."""

    def returns(name: str, horizon: int = 50) -> np.ndarray:
        policy = GaussianMLP(3, (), action_size=1)
        episodes = played(envs.make(name), policy, num_agents=2, num_episodes=100, horizon=horizon)
        np.testing.assert_array_equal(episodes.lengths, horizon)
        return np.asarray(episodes.returns).reshape(-1)

    here, there, shorter = (
        returns("gymnasium:Pendulum-v1"),
        returns("envpool:Pendulum-v1"),
        returns("envpool:Pendulum-v1", 30),
    )
    error = np.sqrt((np.var(here) + np.var(there)) / len(here))
    assert abs(np.mean(here) - np.mean(there)) < 4 * error
    assert abs(np.mean(here) - np.mean(shorter)) > 6 * error


def test_continuous_actions_are_clipped_only_for_the_environment() -> None:
    task = host_task("host_tasks:slider")
    Corridor.made.clear()
    episodes = played(task, GaussianMLP(2, (), action_size=2), horizon=9)
    taken = np.concatenate([each.taken for each in Corridor.made if each.taken])
    assert np.min(taken[:, 0]) == -0.5
    assert np.max(taken[:, 0]) == 0.25
    assert np.max(np.abs(taken[:, 1])) > 1
    drawn = np.asarray(episodes.actions)
    assert np.max(np.abs(drawn[..., 0])) > 1
    assert drawn.dtype == np.float32


# Training


def stopped_after(iterations: int, config: Config, directory: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.iteration >= iterations:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, directory, stop)


def assert_same(one: Run, other: Run) -> None:
    for name, values in one.metrics.items():
        np.testing.assert_array_equal(values, other.metrics[name])
    np.testing.assert_array_equal(one.parameters["last"], other.parameters["last"])
    np.testing.assert_array_equal(one.parameters["uniform"], other.parameters["uniform"])


LEARNER = Config(
    env="gymnasium:CartPole-v1", attack="RandomAction", horizon=60, step_size=0.05, trajectories=300, **SMALL_RUN
)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Run, Path]:
    directory = tmp_path_factory.mktemp("run") / "learnt"
    return LEARNER, train(LEARNER, directory), directory


@pytest.mark.slow
def test_a_federation_learns_from_a_server_on_gymnasium(learnt: tuple[Config, Run, Path]) -> None:
    _, run, _ = learnt
    assert run.returns[0, 0] < 30
    assert run.returns[0, -5:].mean() > 40
    steps = run.metrics["environment_steps"]
    assert np.all(steps[run.large] > 4 * 12)
    assert np.all(steps[~run.large] <= 6 * 60), "the server plays small batches alone"
    assert np.all(np.isnan(run.metrics["aggregation_error"][~run.large]))


def test_resumed_to_the_bit_on_gymnasium(tmp_path: Path) -> None:
    shorter = replace(LEARNER, trajectories=100)
    stopped_after(7, shorter, tmp_path / "run")
    assert_same(resume(tmp_path / "run"), train(shorter))


PENDULUM = Config(
    env="envpool:Pendulum-v1",
    algorithm="PAGE-PG",
    num_seeds=2,
    hidden=(8,),
    horizon=40,
    large_batch=12,
    small_batch=6,
    switch_probability=0.2,
    trajectories=60,
)


@pytest.mark.slow
def test_resumed_to_the_bit_on_envpool_and_played(tmp_path: Path) -> None:
    whole = train(PENDULUM)
    stopped_after(3, PENDULUM, tmp_path / "run")
    assert_same(resume(tmp_path / "run"), whole)
    assert np.all((whole.returns < -10) & (whole.returns > -1000))
    assert np.all(whole.returns[0] != whole.returns[1])
    returns, frames = play.evaluate(whole.policy(), whole.settings, 2, 0, greedy=True)
    assert frames == []
    assert len(set(returns)) == 2


@pytest.mark.slow
def test_peers_without_a_server_agree_on_a_continuous_task_of_envpool() -> None:
    config = Config(
        env="envpool:Pendulum-v1",
        algorithm="DecByzPG",
        num_agents=5,
        num_byzantine=1,
        attack="Equivocate",
        hidden=(8,),
        horizon=40,
        large_batch=8,
        small_batch=4,
        switch_probability=1.0,  # other tests play small batches of this task
        trajectories=24,
    )
    run = train(config)
    before, after = run.metrics["diameter_before"][0], run.metrics["diameter_after"][0]
    assert np.all(before > 0)
    assert np.all(after < before)
    assert np.all(np.isfinite(run.parameters["last"]))
    assert np.all(run.metrics["environment_steps"][run.large] == 5 * 8 * 40)


@pytest.mark.slow
def test_skipped_entries_and_the_output() -> None:
    settings = PENDULUM.resolved()
    simulation = Simulation((settings.federation(),), settings.seeds)
    (state,), (metrics,) = simulation.run(simulation.start(), [LARGE, SKIP, SMALL], 1)
    (first,), _ = simulation.run(simulation.start(), [LARGE], 1)
    assert np.all(np.isnan(np.asarray(metrics.return_mean)[:, 1]))
    np.testing.assert_array_equal(metrics.environment_steps[:, [0, 2]], [[12 * 40, 6 * 40]] * 2)
    np.testing.assert_array_equal(state.iteration, [2, 2])
    np.testing.assert_array_equal(state.output, first.agents.parameters)  # θ_T̂ with T̂ = 1
    assert np.any(np.asarray(state.output) != np.asarray(state.agents.parameters))
    # A seed that waits stays as it is, and the other one does what it would do anyway.
    takes_part = np.array([[True, False, True], [True, False, False]])
    (apart,), (seen,) = simulation.run(simulation.start(), [LARGE, SKIP, SMALL], 1, takes_part=takes_part)
    for ours, moved, waited in zip(*map(jax.tree.leaves, (apart, state, first)), strict=True):
        np.testing.assert_array_equal(ours[0], moved[0])
        if ours is not apart.output:  # whose iteration T̂ has come, and is seen at the next entry
            np.testing.assert_array_equal(ours[1], waited[1])
    np.testing.assert_array_equal(apart.iteration, [2, 1])
    np.testing.assert_array_equal(np.isnan(seen.return_mean), [[False, True, False], [False, True, True]])


@pytest.mark.slow
def test_play_renders_tasks_that_can_be_rendered(learnt: tuple[Config, Run, Path]) -> None:
    _, run, _ = learnt
    returns, frames = play.evaluate(run.policy(), run.settings, 2, 3, greedy=True)
    assert len(frames) == returns[0] > 20
    assert frames[0].shape == (400, 600, 3)
    assert np.any(frames[0] != frames[-1])


@pytest.fixture
def forgotten_tasks() -> Iterator[None]:
    """Forget the module `my_task`: another test may use another module of this name."""
    yield
    sys.modules.pop("my_task", None)
    host.describe.cache_clear()
    for key in [key for key in host._idle if "my_task:make" in str(key)]:
        del host._idle[key]


@pytest.mark.slow
@pytest.mark.usefixtures("forgotten_tasks")
def test_the_tutorials_own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial's file is shorter than twenty lines, and a short run in another directory learns its task."""
    text = (Path(__file__).parents[2] / "docs" / "tutorials" / "own-task.md").read_text()
    program = next(block for block in text.split("```python\n") if "class Thermostat" in block).split("\n```")[0]
    assert len(program.splitlines()) < 20
    (tmp_path / "my_task.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    options = SMALL_RUN | {"switch_probability": 1.0, "step_size": 0.05, "trajectories": 300}
    run = train(Config(env="my_task:make", **options))
    assert run.returns[0, 0] < -40
    assert run.returns[0, -5:].mean() > -25
