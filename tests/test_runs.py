"""Runs: what is kept of them, that nothing kept is lost or overwritten, and that a resumed run is the run."""

import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
import pytest

import byzpg
from byzpg import Config, Run, runs, training
from byzpg._files import write_atomically
from byzpg.config import Settings
from byzpg.federation.metrics import Metrics
from byzpg.federation.schedule import CommonCoin, Timetable
from byzpg.federation.simulator import LARGE, SKIP, SMALL, Simulation
from byzpg.runs import RunDirectory
from byzpg.training import BLOCK, Progress, iterations_to_run, simulation_of

# Every test uses this one federation, so that it is compiled once. Attackers, their messages and play are drawn anew
# in every iteration, Adam counts iterations, agents have histories, and seeds toss coins of their own: whatever a
# resumed run restores wrongly, it shows.
TINY = Config(
    num_agents=5,
    num_byzantine=1,
    attack="LargeNoise",
    byzantine_set="RotatingSet",
    aggregator="Remember(RFA(), exchanges=4, weight=5)",
    rounds=1,
    num_seeds=2,
    hidden=(4,),
    large_batch=6,
    small_batch=2,
    switch_probability=0.2,
    momentum=0.8,
    decay=0.0,
    horizon=20,
    trajectories=60,
)


class Stopped(Exception):
    """Somebody had enough."""


@pytest.fixture(autouse=True)
def _whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a block ends does not depend on the clock here."""
    monkeypatch.setattr(training, "iterations_to_run", lambda pace: BLOCK)


def timetable_of(config: Config) -> Timetable:
    settings = config.resolved()
    return settings.schedule().timetable(simulation_of(settings).initial_parameters())


@pytest.fixture(scope="module")
def config() -> Config:
    """With seeds whose T̂ come in the second of three blocks, the last of which is not full."""

    def suits(timetable: Timetable) -> bool:
        come = timetable.iterations(BLOCK) < timetable.output_iterations
        gone = timetable.output_iterations < timetable.iterations(2 * BLOCK)
        return bool(np.all(come & gone)) and 2 * BLOCK < timetable.num_entries < 3 * BLOCK

    # None of the seeds before does.
    return next(each for seed in range(229, 1000) if suits(timetable_of(each := replace(TINY, seed=seed))))


@pytest.fixture(scope="module")
def folder(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a complete run; tests only read it."""
    path = tmp_path_factory.mktemp("runs") / "complete"
    byzpg.train(config, path)
    return path


@pytest.fixture(scope="module")
def run(config: Config, folder: Path) -> Run:
    """The same run, which never saw a disk."""
    return byzpg.train(config)


def assert_same(one: Run, other: Run) -> None:
    """To the bit, NaNs included."""
    assert one.settings == other.settings
    assert one.complete == other.complete
    plans = [
        {"trajectories": each.trajectories, "large": each.large, "T̂": each.output_iteration} for each in (one, other)
    ]
    for ours, theirs in (
        plans,
        (one.metrics, other.metrics),
        (one.parameters, other.parameters),
    ):
        assert set(ours) == set(theirs)
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype, name
            assert ours[name].shape == theirs[name].shape, name
            assert ours[name].tobytes() == theirs[name].tobytes(), name


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stop_after(num_blocks: int) -> Callable[[Progress], None]:
    """Has enough after so many blocks."""
    seen = []

    def on_progress(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == num_blocks:
            raise Stopped

    return on_progress


def interrupted(config: Config, path: Path, num_blocks: int = 1) -> Path:
    with pytest.raises(Stopped):
        byzpg.train(config, path, stop_after(num_blocks))
    return path


# What is kept


def test_a_run_is_a_directory_of_plain_files(folder: Path) -> None:
    files = {"config.json", "provenance.json", "checkpoint.npz", "metrics.npz", "parameters.npz"}
    assert {path.name for path in folder.iterdir()} == files
    for path in folder.glob("*.npz"):
        with np.load(path, allow_pickle=False) as arrays:
            assert all(arrays[name].dtype != object for name in arrays)
        with zipfile.ZipFile(path) as archive:
            assert all(archive.read(name).startswith(b"\x93NUMPY") for name in archive.namelist())
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["command"] == sys.argv
    assert provenance["versions"]["jax"] == jax.__version__


def test_what_is_on_the_disk_is_what_was_returned(folder: Path, run: Run, config: Config) -> None:
    assert run.complete
    assert run.settings == config.resolved()
    assert_same(byzpg.load(folder), run)
    assert Config.load(folder / "config.json").resolved() == run.settings


def test_metrics_are_the_documented_columns(folder: Path, run: Run) -> None:
    assert set(run.metrics) == {column.name for column in fields(Metrics)}
    assert run.trajectories.shape == run.large.shape == (2, max(run.num_iterations))
    assert all(values.shape == run.large.shape for values in run.metrics.values())
    assert run.returns is run.metrics["return_mean"]
    sampled = np.arange(run.returns.shape[1]) < run.num_iterations[:, None]
    assert np.all((run.returns[sampled] >= 1) & (run.returns[sampled] <= 20))
    assert np.all(np.isnan(run.returns[~sampled]))
    assert np.any(run.returns[0] != run.returns[1])
    with np.load(folder / "metrics.npz") as arrays:
        assert set(arrays) == set(run.metrics) | {"trajectories", "large"}


def test_batches_are_the_coins(config: Config, run: Run) -> None:
    simulation = simulation_of(config.resolved())
    for seed, initial in enumerate(np.asarray(simulation.start()[0].agents.parameters)[:, 0]):
        coin, sizes, large = CommonCoin.of(initial), [], []
        while sum(sizes) < 60:
            large.append(coin.is_large(len(sizes), 0.2))
            sizes.append(6 if large[-1] else 2)
        end = len(sizes)
        assert run.num_iterations[seed] == end
        np.testing.assert_array_equal(run.large[seed, :end], large)
        assert not np.any(run.large[seed, end:])
        np.testing.assert_array_equal(run.trajectories[seed, :end], np.cumsum(sizes))
        np.testing.assert_array_equal(run.trajectories[seed, end:], sum(sizes))
        assert run.output_iteration[seed] == coin.output_iteration(end)
        # The iteration that reaches the trajectories asked for is the last, also when it reaches them exactly.
        for asked in (int(run.trajectories[seed, 9]), int(run.trajectories[seed, 9]) - 1):
            plans = timetable_of(replace(config, trajectories=asked)).plans
            np.testing.assert_array_equal(plans[seed].large, large[:10])
        steps_per_episode = run.metrics["environment_steps"][seed, :end] / (5 * np.asarray(sizes))
        assert np.all((steps_per_episode > 1) & (steps_per_episode <= 20))
    assert not np.array_equal(run.large[0], run.large[1])


def test_uniform_is_the_iterate_at_the_start_of_its_iteration(config: Config, run: Run) -> None:
    simulation, timetable = simulation_of(config.resolved()), timetable_of(config)
    states, iterates = simulation.start(), [[], []]
    for large, takes_part in zip(timetable.large, timetable.takes_part.T, strict=True):
        for seed in np.flatnonzero(takes_part):
            iterates[seed].append(np.asarray(states[0].agents.parameters)[seed])
        one, part = np.full(BLOCK, SKIP), np.zeros((2, BLOCK), bool)
        one[0], part[:, 0] = LARGE if large else SMALL, takes_part
        states, _ = simulation.run(states, one, output_iteration=-1, takes_part=part)
    for seed in range(2):
        np.testing.assert_array_equal(run.parameters["uniform"][seed], iterates[seed][run.output_iteration[seed]])
        assert len({iterate.tobytes() for iterate in iterates[seed]}) == len(iterates[seed]) == run.num_iterations[seed]
    np.testing.assert_array_equal(run.parameters["last"], states[0].agents.parameters)
    assert run.parameters["last"].shape == (2, 5, 4 * 4 + 4 + 4 * 2 + 2)


def test_the_seed_is_all_there_is_to_chance(config: Config, run: Run) -> None:
    assert_same(byzpg.train(config), run)
    other = byzpg.train(replace(config, seed=config.seed + 1))
    assert not np.array_equal(other.parameters["last"], run.parameters["last"])
    # Seeds are consecutive: θ_0 of its first seed is that of our second.
    starts = [np.asarray(simulation_of(each.settings).start()[0].agents.parameters) for each in (run, other)]
    np.testing.assert_array_equal(starts[0][1], starts[1][0])


def test_diverged_seeds_are_named(config: Config, run: Run) -> None:
    assert run.diverged == []
    parameters = run.parameters["last"].copy()
    parameters[1, 2, 3] = np.nan
    assert replace(run, parameters={"last": parameters}).diverged == [config.seed + 1]


def test_progress_is_told_after_every_block(config: Config, run: Run) -> None:
    seen: list[Progress] = []
    byzpg.train(config, on_progress=seen.append)
    timetable = timetable_of(config)
    ends = [BLOCK, 2 * BLOCK, timetable.num_entries]
    assert [each.iteration for each in seen] == ends
    done = [timetable.iterations(end) for end in ends]
    assert [each.progress for each in seen] == [int(run.trajectories[[0, 1], end - 1].mean()) for end in done]
    assert all(each.num_iterations == timetable.num_entries for each in seen)
    assert all(each.total == int(run.trajectories[:, -1].mean()) for each in seen)
    last = np.concatenate([run.returns[seed, done[1][seed] : done[2][seed]] for seed in range(2)])
    assert seen[-1].mean_return == pytest.approx(np.mean(last))
    assert [each.done for each in seen] == sorted({each.done for each in seen})
    assert seen[-1].done == 1
    assert 0 < seen[0].seconds <= seen[1].seconds <= seen[2].seconds


@pytest.mark.parametrize(
    ("pace", "number"), [(inf, 1), (60.0, 1), (2.0, 1), (1.2, 2), (0.5, 5), (0.3, BLOCK), (1e-9, BLOCK)]
)
def test_reports_come_every_few_seconds(pace: float, number: int) -> None:
    assert iterations_to_run(pace) == number


def test_the_length_of_blocks_does_not_change_a_run(config: Config, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, seen = iter([1, 1, 5, 3]), list[int]()
    monkeypatch.setattr(training, "iterations_to_run", lambda pace: next(lengths, BLOCK))
    assert_same(byzpg.train(config, on_progress=lambda progress: seen.append(progress.iteration)), run)
    assert seen[:5] == [1, 2, 7, 10, 10 + BLOCK]


# Policies


def test_policies_act_on_one_observation_or_many(run: Run) -> None:
    policy = run.policy()
    many = np.random.default_rng(0).normal(size=(3, 50, 4))
    actions = policy.act(many, greedy=True)
    assert actions.shape == (3, 50)
    assert set(actions.ravel()) <= {0, 1}
    assert policy.act(many[0, 0]).shape == ()
    np.testing.assert_array_equal([policy.act(each, greedy=True) for each in many[1, :5]], actions[1, :5])


def test_actions_are_drawn_as_often_as_the_policy_says(run: Run) -> None:
    policy = run.policy()
    seen = np.array([0.1, -0.4, 0.02, 0.3])
    weights = policy.policy.unflatten(jax.numpy.asarray(policy.parameters))
    (hidden, hidden_bias), (last, last_bias) = (tuple(np.asarray(part) for part in layer) for layer in weights)
    logits = np.maximum(seen @ hidden + hidden_bias, 0) @ last + last_bias
    probability = 1 / (1 + np.exp(logits[0] - logits[1]))
    many = np.tile(seen, (20_000, 1))
    for drawn in (policy.act(many, jax.random.key(0)), policy.act(many)):
        assert abs(np.mean(drawn) - probability) < 4 * (probability * (1 - probability) / 20_000) ** 0.5
    assert policy.act(seen, greedy=True) == (probability > 0.5)
    np.testing.assert_array_equal(policy.act(many, jax.random.key(0)), policy.act(many, jax.random.key(0)))
    assert np.any(policy.act(many, jax.random.key(0)) != policy.act(many, jax.random.key(1)))
    assert policy.act(seen, jax.random.key(0)).shape == ()
    with pytest.raises(ValueError, match="greedy actions are not drawn: leave out key, or greedy"):
        policy.act(seen, jax.random.key(0), greedy=True)


def test_without_a_key_every_call_draws_anew_and_every_program_alike(run: Run) -> None:
    seen, first, second = np.zeros((200, 4)), run.policy(), run.policy()
    ours = [first.act(seen) for _ in range(3)]
    assert not np.array_equal(ours[0], ours[1])
    assert not np.array_equal(ours[1], ours[2])
    first.act(seen, greedy=True)  # draws nothing
    np.testing.assert_array_equal(ours, [second.act(seen) for _ in range(3)])
    np.testing.assert_array_equal(first.act(seen), second.act(seen))


def test_which_policy(run: Run) -> None:
    last, uniform = np.random.default_rng(0).normal(size=(2, 2, 5, 30)).astype(np.float32)
    run = replace(run, parameters={"last": last, "uniform": uniform})
    np.testing.assert_array_equal(run.policy().parameters, last[0, 0])
    np.testing.assert_array_equal(run.policy(seed=1, agent=4).parameters, last[1, 4])
    np.testing.assert_array_equal(run.policy(1, 2, "uniform").parameters, uniform[1, 2])
    as_in_theory = replace(run, settings=replace(run.settings, output="uniform"))
    np.testing.assert_array_equal(as_in_theory.policy().parameters, uniform[0, 0])
    np.testing.assert_array_equal(as_in_theory.policy(output="last").parameters, last[0, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.policy(seed=2), "seed must be 0 to 1, got 2"),
        (lambda run: run.policy(seed=-1), "seed must be 0 to 1, got -1"),
        (lambda run: run.policy(agent=5), "agent must be 0 to 4, got 5"),
        (lambda run: run.policy(output="best"), "output must be last or uniform, got 'best'"),
        (lambda run: run.policy().act(np.zeros(3)), r"observation must have 4 features in its last axis, got \(3,\)"),
        (lambda run: run.policy().act(np.zeros((4, 1))), r"got \(4, 1\)"),
        (lambda run: run.policy().act(np.float32(1)), r"got \(\)"),
    ],
)
def test_bad_requests(call: Callable[[Run], Any], message: str, run: Run) -> None:
    with pytest.raises(ValueError, match=message):
        call(run)


# Interrupted and resumed


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_resumed_run_is_the_run_to_the_bit(num_blocks: int, config: Config, run: Run, tmp_path: Path) -> None:
    """Stopped after the first block, in the middle, after the last one."""
    path = interrupted(config, tmp_path / "run", num_blocks)
    timetable = timetable_of(config)
    done = timetable.iterations(num_blocks * BLOCK)
    partial = byzpg.load(path)
    assert not (path / "parameters.npz").exists()
    np.testing.assert_array_equal(partial.num_iterations, done)
    for seed, end in enumerate(done):
        np.testing.assert_array_equal(partial.returns[seed, :end], run.returns[seed, :end])
        np.testing.assert_array_equal(partial.large[seed, :end], run.large[seed, :end])
    seen: list[Progress] = []
    assert_same(byzpg.resume(path, seen.append), run)
    assert [each.iteration for each in seen] == [2 * BLOCK, timetable.num_entries][num_blocks - 1 :]
    assert_same(byzpg.load(path), run)


def test_runs_of_older_versions_are_read_and_continued(config: Config, tmp_path: Path) -> None:
    """Their seeds shared one coin: plans and iterations had no axis for seeds, and there was no option."""
    shared, path = replace(config, coins="shared"), interrupted(replace(config, coins="shared"), tmp_path / "run")

    def as_older(name: str, *shared_by_seeds: str) -> None:
        with np.load(path / name) as arrays:
            older = {key: values[0] if key in shared_by_seeds else values for key, values in arrays.items()}
        older.pop("metric_gradient_squared", None)
        older |= {"config": RunDirectory(path)._config_digest()} if "config" in older else {}
        np.savez(path / name, **older)

    def drop_the_option() -> None:
        values = json.loads((path / "config.json").read_text())
        del values["coins"]
        (path / "config.json").write_text(json.dumps(values))

    drop_the_option()
    with np.load(path / "checkpoint.npz") as arrays:
        (iterations,) = (key for key in arrays if key.startswith("state_") and arrays[key].shape == (2,))
    as_older("checkpoint.npz", iterations)
    expected = byzpg.train(shared)
    assert_same(byzpg.resume(path), expected)
    as_older("metrics.npz", "trajectories", "large")
    as_older("parameters.npz", "output_iteration")
    assert_same(byzpg.load(path), expected)
    np.testing.assert_array_equal(expected.large[0], expected.large[1])


def test_a_run_stopped_again_and_again_is_the_run(config: Config, run: Run, tmp_path: Path) -> None:
    path = interrupted(config, tmp_path / "run")
    for _ in range(2):
        with pytest.raises(Stopped):
            byzpg.resume(path, stop_after(1))
    assert_same(byzpg.resume(path), run)


@pytest.mark.parametrize("keep_every_block", [True, False])
def test_a_run_that_died_is_the_run_once_resumed(
    keep_every_block: bool, config: Config, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a warning, in the third block: it goes on from the last checkpoint, or from the start."""
    path, blocks, run_block = tmp_path / "run", [], Simulation.run

    def dying(self: Simulation, *arguments: Any, **options: Any) -> Any:
        blocks.append(arguments)
        if len(blocks) == 3:
            raise SystemError("out of luck")
        return run_block(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(training, "CHECKPOINT_SECONDS", -1.0 if keep_every_block else 1e9)
        patch.setattr(training, "CHECKPOINT_SHARE", np.inf)
        patch.setattr(Simulation, "run", dying)
        with pytest.raises(SystemError):
            byzpg.train(config, path)
    if keep_every_block:
        np.testing.assert_array_equal(byzpg.load(path).num_iterations, timetable_of(config).iterations(2 * BLOCK))
    else:
        with pytest.raises(ValueError, match="has not reached its first checkpoint: continue it with `byzpg resume"):
            byzpg.load(path)
    assert_same(byzpg.resume(path), run)


def test_checkpoints_do_not_change_a_run(
    config: Config, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = RunDirectory.write_checkpoint
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    monkeypatch.setattr(training, "CHECKPOINT_SHARE", np.inf)
    monkeypatch.setattr(
        RunDirectory, "write_checkpoint", lambda self, kept: (written.append(kept.iteration), write(self, kept))
    )
    assert_same(byzpg.train(config, tmp_path / "run"), run)
    assert written == [BLOCK, 2 * BLOCK, timetable_of(config).num_entries]


# Extending a run


LONGER = 90


@pytest.fixture(scope="module")
def long_run(config: Config) -> Run:
    return byzpg.train(replace(config, trajectories=LONGER))


def assert_extended(run: Run, short: Run, long: Run) -> None:
    """One long run to the bit, except for the uniform output of seeds whose T̂ in it was over: they keep theirs."""
    over = long.output_iteration < short.num_iterations
    assert np.all(run.output_iteration == np.where(over, short.output_iteration, long.output_iteration))
    np.testing.assert_array_equal(run.parameters["uniform"][over], short.parameters["uniform"][over])
    np.testing.assert_array_equal(run.parameters["uniform"][~over], long.parameters["uniform"][~over])
    outputs = {"last": run.parameters["last"], "uniform": long.parameters["uniform"]}
    assert_same(replace(run, parameters=outputs, output_iteration=long.output_iteration), long)


@pytest.mark.parametrize("probability", [0.2, 1.0])
def test_an_extended_run_is_one_long_run_to_the_bit(probability: float, config: Config, tmp_path: Path) -> None:
    """Also if seeds toss coins of their own, so that the short run ends elsewhere in the timetable of the long one."""
    short, longer, longest = (
        replace(config, switch_probability=probability, trajectories=length) for length in (60, LONGER, 120)
    )
    runs = [byzpg.train(short, tmp_path), *map(byzpg.train, (longer, longest))]
    extended = byzpg.resume(tmp_path, trajectories=LONGER)
    assert_extended(extended, *runs[:2])
    assert_same(byzpg.load(tmp_path), extended)
    assert_same(byzpg.resume(tmp_path, trajectories=LONGER), extended)
    assert_extended(byzpg.resume(tmp_path, trajectories=120), extended, runs[2])


@pytest.mark.slow
def test_an_extension_that_stops_anywhere_is_the_same(
    config: Config, run: Run, folder: Path, long_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "stopped")
    with pytest.raises(Stopped):
        byzpg.resume(tmp_path / "stopped", stop_after(1), trajectories=LONGER)
    partial = byzpg.load(tmp_path / "stopped")
    assert not partial.complete
    width = partial.num_iterations[0]
    np.testing.assert_array_equal(partial.returns[0, :width], long_run.returns[0, :width])
    assert_extended(byzpg.resume(tmp_path / "stopped"), run, long_run)

    # A process may die before or after each of the four changes in the directory.
    unlink, left = Path.unlink, 99

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(path: Path, *arguments: Any, **options: Any) -> Any:
            nonlocal left
            if not path.name.startswith("."):  # no temporary file
                if not left:
                    raise Stopped
                left -= 1
            return function(path, *arguments, **options)

        return step

    monkeypatch.setattr(Path, "unlink", dying(unlink))
    monkeypatch.setattr(runs, "write_atomically", dying(write_atomically))
    for number in range(4):
        path = tmp_path / f"{number}"
        shutil.copytree(folder, path)
        left = number
        with pytest.raises(Stopped):
            training.extend(path, trajectories=LONGER)
        left = 99
        assert_same(byzpg.resume(path), run)  # as before
        assert_extended(byzpg.resume(path, trajectories=LONGER), run, long_run)


def test_an_extension_that_makes_no_sense_is_one_error(config: Config, folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    with pytest.raises(ValueError, match="has 60 trajectories: trajectories must be at least that, got 59"):
        byzpg.resume(folder, trajectories=59)
    with pytest.raises(ValueError, match="steps = 99 has no effect with DecByzPG: set trajectories"):
        byzpg.resume(folder, steps=99)
    assert contents(folder) == before
    unfinished = interrupted(config, tmp_path / "unfinished")
    with pytest.raises(ValueError, match="has not reached its 60 trajectories: finish it first"):
        byzpg.resume(unfinished, trajectories=LONGER)
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "checkpoint.npz").unlink()
    with pytest.raises(ValueError, match=r"has no checkpoint\.npz, from which it could be extended"):
        byzpg.resume(tmp_path / "bare", trajectories=LONGER)


def test_a_complete_run_is_just_loaded(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(folder)
    monkeypatch.setattr(Simulation, "run", lambda *_, **__: pytest.fail("nothing is left to train"))
    monkeypatch.setattr(RunDirectory, "_write_arrays", lambda *_: pytest.fail("nothing is left to write"))
    assert_same(byzpg.resume(folder), run)
    assert contents(folder) == before


def test_an_incomplete_run_can_be_looked_at(config: Config, run: Run, tmp_path: Path) -> None:
    path = interrupted(config, tmp_path / "run", 2)
    before = contents(path)
    partial = byzpg.load(path)
    assert not partial.complete
    assert partial.trajectories.shape == partial.large.shape == (2, max(partial.num_iterations))
    np.testing.assert_array_equal(partial.parameters["uniform"], run.parameters["uniform"])
    assert not np.array_equal(partial.parameters["last"], run.parameters["last"])
    assert partial.policy().act(np.zeros(4)).shape == ()
    assert partial.policy(output="uniform").act(np.zeros(4)).shape == ()
    early = byzpg.load(interrupted(config, tmp_path / "early"))
    with pytest.raises(
        ValueError, match=f"T̂ = {run.output_iteration[0]} of this seed has not come yet: finish the run"
    ):
        early.policy(output="uniform")
    assert contents(path) == before


# Nothing kept is lost


@pytest.mark.parametrize("what", ["complete run", "interrupted run", "file", "other files"])
def test_what_is_there_is_never_overwritten(what: str, config: Config, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "taken"
    if what == "complete run":
        path = folder
    elif what == "interrupted run":
        interrupted(config, path)
    elif what == "file":
        path.write_text("precious")
    else:
        path.mkdir()
        (path / "thesis.tex").write_text("precious")
    before = contents(path.parent)
    message = r"already holds a run: .*`byzpg resume .*`" if "run" in what else "is not an empty directory"
    with pytest.raises(ValueError, match=message):
        byzpg.train(config, path)
    assert contents(path.parent) == before


def test_bad_configurations_make_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_byzantine ≤ 1"):
        byzpg.train(replace(TINY, num_byzantine=2), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_an_empty_directory_will_do(config: Config, run: Run, tmp_path: Path) -> None:
    assert_same(byzpg.train(config, str(tmp_path)), run)


def change_config(path: Path) -> None:
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"step_size": 0.5}))


def truncate_checkpoint(path: Path) -> None:
    whole = (path / "checkpoint.npz").read_bytes()
    (path / "checkpoint.npz").write_bytes(whole[: len(whole) // 2])


def rewrite_checkpoint(path: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    with np.load(path / "checkpoint.npz") as stored:
        arrays = dict(stored)
    change(arrays)
    np.savez(path / "checkpoint.npz", allow_pickle=False, **arrays)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change_config, "belongs to another configuration than the config.json beside it: put that config.json back"),
        (truncate_checkpoint, r"checkpoint\.npz cannot be read"),
        (lambda path: (path / "checkpoint.npz").write_bytes(b""), r"checkpoint\.npz cannot be read"),
        (
            lambda path: (path / "checkpoint.npz").write_bytes(b"cos\nsystem\n(S'ls'\ntR."),
            r"checkpoint\.npz cannot be read",
        ),
        (lambda path: (path / "config.json").unlink(), "holds no run: there is no config.json in it"),
        (lambda path: (path / "config.json").write_text("{"), r"config\.json cannot be read|another configuration"),
        (lambda path: rewrite_checkpoint(path, lambda arrays: arrays.pop("config")), "another configuration"),
        (
            lambda path: rewrite_checkpoint(path, lambda arrays: arrays.update(state_0=arrays["state_0"][:, :-1])),
            "does not fit this version of byzpg: its arrays have other names or shapes",
        ),
        (
            lambda path: rewrite_checkpoint(
                path, lambda arrays: arrays.update(state_0=arrays["state_0"].astype(float))
            ),
            "does not fit this version",
        ),
        (
            lambda path: rewrite_checkpoint(path, lambda arrays: arrays.pop("metric_return_std")),
            "does not fit this version",
        ),
        (
            lambda path: rewrite_checkpoint(
                path, lambda arrays: arrays.update(metric_capped=arrays["metric_capped"][:1])
            ),
            "does not fit this version",
        ),
    ],
)
def test_what_cannot_be_continued_is_one_error(
    spoil: Callable[[Path], Any], message: str, config: Config, tmp_path: Path
) -> None:
    path = interrupted(config, tmp_path / "run")
    spoil(path)
    before = contents(path)
    for use in (byzpg.resume, byzpg.load):
        with pytest.raises(ValueError, match=message):
            use(path)
    assert contents(path) == before


def test_spoilt_results_are_one_error(config: Config, tmp_path: Path) -> None:
    byzpg.train(config, tmp_path / "run")
    whole = (tmp_path / "run" / "metrics.npz").read_bytes()
    (tmp_path / "run" / "metrics.npz").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"metrics\.npz cannot be read"):
        byzpg.load(tmp_path / "run")
    np.savez(tmp_path / "run" / "metrics.npz", large=np.zeros(3))
    with pytest.raises(ValueError, match="the results lack 'trajectories'"):
        byzpg.load(tmp_path / "run")
    with pytest.raises(ValueError, match="nowhere holds no run"):
        byzpg.load(tmp_path / "nowhere")


# Whole or not at all


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(failure: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def half(file: IO[bytes]) -> None:
        file.write(b"ne")
        file.flush()
        assert path.read_bytes() == b"old"
        raise failure

    with pytest.raises(type(failure)):
        write_atomically(path, half)
    assert contents(tmp_path) == {"deep/file": b"old"}
    write_atomically(path, lambda file: file.write(b"new"))
    assert contents(tmp_path) == {"deep/file": b"new"}
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_checkpoint_that_could_not_be_written_leaves_the_one_before(
    config: Config, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = interrupted(config, tmp_path / "run")
    before = contents(path)

    def half(file: IO[bytes], **arrays: Any) -> None:
        file.write(b"PK half of it")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", half)
        with pytest.raises(OSError, match="disk full"):
            byzpg.resume(path, stop_after(1))
    assert contents(path) == before
    assert_same(byzpg.resume(path), run)


@pytest.mark.parametrize("lost", ["metrics.npz", "parameters.npz"])
def test_a_run_is_complete_when_all_of_it_is_written(
    lost: str, config: Config, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace_file = tmp_path / "run", RunDirectory._write_arrays

    def failing(self: RunDirectory, name: str, arrays: Any) -> None:
        if name == lost:
            raise OSError("disk full")
        replace_file(self, name, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "_write_arrays", failing)
        with pytest.raises(OSError, match="disk full"):
            byzpg.train(config, path)
    assert not RunDirectory.open(path).complete
    assert_same(byzpg.resume(path), run)


def test_settings_on_the_disk_are_every_option(folder: Path) -> None:
    assert set(json.loads((folder / "config.json").read_text())) == {option.name for option in fields(Settings)}


# Words about runs


def test_a_run_and_its_policy_print_in_one_line(run: Run, config: Config, tmp_path: Path) -> None:
    last = np.mean([returns[np.isfinite(returns)][-1] for returns in run.returns])
    about = f"Run(CartPole-v1, DecByzPG, 5 agents (1 attacking, {run.settings.attack}), 2 seeds"
    reached = np.max(run.trajectories)
    assert repr(run) == f"{about}, {reached} trajectories, last return {last:.4g})"
    stopped = byzpg.load(interrupted(config, tmp_path / "run"))
    assert repr(stopped).startswith(f"{about}, {np.max(stopped.trajectories)} of 60 trajectories, last return ")
    assert "\n" not in repr(run) + repr(stopped)
    assert repr(run.policy()).startswith("TrainedPolicy(policy=CategoricalMLP(")
    assert len(repr(run.policy())) < 150
