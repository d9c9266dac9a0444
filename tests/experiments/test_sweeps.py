"""Sweeps: grids, the order of cells, and that local and Ray workers give the same results even if one is killed."""

import csv
import json
import os
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_federation import PATIENCE, until
from PIL import Image

from byzpg import Config, cli, load, train
from byzpg._install import install
from byzpg.engines.local import LocalWorkers
from byzpg.experiments import figures
from byzpg.experiments.paper import run_name
from byzpg.experiments.sweeps import Cell, Event, Outcome, Progress, Sweep, is_done, outcomes, run, write_table
from byzpg.runs import Run, RunDirectory, packed, unpacked

TESTS = Path(__file__).parent.parent
START = [sys.executable, "-m", "byzpg"]
SHARED = """
algorithm = "Fed-PAGE-PG"
num_agents = 3
num_byzantine = 1
hidden = [4]
horizon = 9
large_batch = 2
num_seeds = 1
trajectories = 4
"""
# 10 cells of two programs in JAX and 2 of one on the host, where a worker can be caught in the midst of a cell.
TWELVE = f"""{SHARED}
[[grid]]
attack = ["AvgZero", "SignFlip"]
seed = {list(range(5))}

[[grid]]
env = ["host_tasks:patient"]
seed = [0, 1]
"""

# What is a grid


def grid(text: str) -> Sweep:
    return Sweep.of(tomllib.loads(text), "mine.toml")


def test_every_combination_is_a_cell_and_equal_ones_are_one() -> None:
    sweep = grid(
        """
num_seeds = 1
trajectories = 50
[[grid]]
num_byzantine = [0, 3]
attack = ["ALIE", "avg-zero"]
seed = [0, 7]
[[grid]]
num_byzantine = [3]
aggregator = ["NNM(TrimmedMean())", "RFA"]
hidden = [[16, 16], [8]]
"""
    )
    assert sweep.options == ("num_byzantine", "attack", "seed", "aggregator", "hidden")
    assert sweep.telling == ["num_byzantine", "attack", "aggregator", "hidden"]
    settings = [cell.settings for cell in sweep.cells]
    # Without attackers there is no attack, and the second table's first cell is in the first one.
    assert len(settings) == 2 + 4 + 3
    assert len(sweep.groups) == 1 + 2 + 3
    shared: dict[str, Any] = {"num_seeds": 1, "trajectories": 50}
    assert settings[0] == Config(num_byzantine=0, seed=0, **shared).resolved()
    assert settings[3] == Config(num_byzantine=3, attack="ALIE", seed=7, **shared).resolved()
    assert settings[-1] == Config(num_byzantine=3, aggregator="RFA", hidden=(8,), **shared).resolved()
    assert [cell.name for cell in sweep.cells] == [run_name(each) for each in settings]
    assert [sweep.cells[-1].option(name) for name in ("aggregator", "hidden", "attack")] == ["RFA", (8,), "AvgZero"]


def test_grids_with_the_option_names_of_older_versions() -> None:
    """There, num_declared was f and num_byzantine the number of attackers."""
    old = grid("num_seeds = 1\n[grid]\nnum_declared = [3]\nnum_byzantine = [0, 2]\nmemory = ['paper', 'script']")
    assert old.options == ("num_byzantine", "num_attackers", "conventions")
    assert old.telling == ["num_attackers", "conventions"]
    new = grid(
        """
num_seeds = 1
[grid]
num_byzantine = [3]
num_attackers = [0, 2]
conventions = ["Paper", "AuthorsScript(initialization=False, coin=False)"]
"""
    )
    assert [cell.settings for cell in old.cells] == [cell.settings for cell in new.cells]
    assert [cell.option("num_attackers") for cell in old.cells] == [0, 0, 2, 2]
    # With f for all cells, the grid is over the attackers as well; without it, both are one.
    assert grid("num_declared = 3\n[grid]\nnum_byzantine = [1, 2]").telling == ["num_attackers"]
    both = grid("[grid]\nnum_byzantine = [1, 2]")
    assert both.telling == ["num_byzantine"]
    assert [(cell.settings.num_byzantine, cell.settings.num_attackers) for cell in both.cells] == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_agents = 5", "mine.toml needs a table [grid] of options and lists of their values"),
        ("grid = []", "mine.toml needs a table [grid]"),
        ("[grid]", "mine.toml needs a table [grid]"),
        ("grid = 3", "mine.toml needs a table [grid]"),
        ("[grid]\nseed = 3", "mine.toml, [grid]: seed must be a list of at least one value, got 3."),
        ("[grid]\nseed = []", "seed must be a list of at least one value, got []."),
        ("[grid]\nsede = [1]", "mine.toml, [grid]: there is no option 'sede'. Did you mean 'seed'?"),
        ("num_agnts = 5\n[grid]\nseed = [1]", "mine.toml: there is no option 'num_agnts'."),
        ("[grid]\nattack = ['ALIE', 'IPM', 'ALIE']", "attack has 'ALIE' more than once"),
        ("seed = 2\n[grid]\nseed = [1]", "seed is in [grid] and also an option of all cells"),
        ("[grid]\nnum_agents = [13, 4]\nnum_byzantine = [3]", "cell num_agents = 4, num_byzantine = 3: "),
        (
            "[grid]\nalgorithm = ['ByzPG', 'Fed-PAGE-PG']\naggregator = ['RFA']",
            "mine.toml, cell algorithm = 'Fed-PAGE-PG', aggregator = 'RFA': aggregator = RFA has no effect with",
        ),
        ("[grid]\nseed = [0, 3, 20]", "cells with seed = 0 and seed = 3 overlap, as each has num_seeds = 4 seeds"),
    ],
)
def test_bad_grids(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"mine\.toml") as error:
        grid(text)
    assert words in str(error.value)


# Who gets which cell


@dataclass
class Scripted:
    """Workers that do what a script says of a cell's n-th attempt, and finish what it does not mention."""

    number: int
    script: dict[tuple[str, int], str] = field(default_factory=dict)
    together: bool = False
    given: list[tuple[int, Cell]] = field(default_factory=list)
    busy: dict[int, list[Event]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)  # how many cells were given at once

    def idle(self) -> list[int]:
        return [worker for worker in range(self.number) if worker not in self.busy]

    def submit(self, worker: int, cells: Sequence[Cell]) -> None:
        assert worker not in self.busy
        assert self.together or len(cells) == 1
        self.sizes.append(len(cells))
        self.given += [(worker, cell) for cell in cells]
        attempts = Counter(each.name for _, each in self.given)
        kinds: list[Any] = [self.script.get((cell.name, attempts[cell.name]), "finished") for cell in cells]
        self.busy[worker] = [Event(cell, "training", 0.5) for cell in cells] + [
            Event(cell, kind, reason="" if kind == "finished" else "why")
            for cell, kind in zip(cells, kinds, strict=True)
        ]

    def wait(self, seconds: float) -> Event | None:
        worker = next(iter(self.busy))
        event = self.busy[worker].pop(0)
        if not self.busy[worker]:
            del self.busy[worker]
        else:
            self.busy[worker] = self.busy.pop(worker)  # the others' turn
        return event

    def close(self) -> None:
        raise AssertionError("whoever starts workers ends them")


@pytest.fixture(scope="module")
def cells() -> Sequence[Cell]:
    return grid("num_seeds = 1\n[grid]\nattack = ['ALIE', 'IPM']\nseed = [0, 1, 2]").cells


def test_a_worker_keeps_to_the_program_it_has_compiled(cells: Sequence[Cell]) -> None:
    workers, heard = Scripted(2), list[Progress]()
    assert run(cells, workers, 0, heard.append) == {}
    by_worker = [[cell for worker, cell in workers.given if worker == number] for number in range(2)]
    assert by_worker == [list(cells[:3]), list(cells[3:])]
    assert len({cell.program for cell in cells}) == 2
    assert (heard[-1].finished, heard[-1].failed, heard[-1].running, heard[-1].done) == (6, 0, 0, 1.0)
    assert [progress.done for progress in heard] == sorted(progress.done for progress in heard)
    assert not any(progress.news for progress in heard)
    # In whatever order the cells come.
    workers = Scripted(2)
    run([cells[index] for index in (0, 3, 1, 4, 2, 5)], workers, 0, heard.append)
    assert all(len({cell.program for worker, cell in workers.given if worker == number}) == 1 for number in range(2))
    # And helps out where there is nothing of its own left.
    workers = Scripted(2)
    run(cells[:4], workers, 0, heard.append)
    assert sum(worker == 1 for worker, _ in workers.given) == 2


def test_cells_that_differ_in_numbers_share_a_program() -> None:
    text = "num_seeds = 1\n[grid]\nstep_size = [0.01, 0.02]\nattack = ['IPM(epsilon=0.1)', 'IPM(epsilon=2.0)', 'ALIE']"
    assert len({cell.program for cell in grid(text).cells}) == 2


def test_a_worker_on_a_gpu_trains_the_cells_of_a_program_together(cells: Sequence[Cell]) -> None:
    """What fails among others is tried again alone."""
    unlucky = cells[1].name
    workers, heard = Scripted(1, {(unlucky, 1): "failed"}, together=True), list[Progress]()
    assert run(cells, workers, 1, heard.append) == {}
    assert sorted(workers.sizes) == [1, 3, 3]
    assert [cell.name for _, cell in workers.given].count(unlucky) == 2
    assert heard[-1].finished == 6


@pytest.mark.parametrize("kind", ["failed", "lost"])
def test_a_failure_together_is_no_attempt_of_a_cell(cells: Sequence[Cell], kind: str) -> None:
    """One cell makes all cells fail that train with it, so each of them has all its attempts left."""
    unlucky = cells[1].name
    script = {(cell.name, 1): kind for cell in cells[:3]} | {(unlucky, 2): kind}
    workers, heard = Scripted(1, script, together=True), list[Progress]()
    assert run(cells, workers, 0, heard.append) == {unlucky: "why"}
    assert sorted(workers.sizes) == [1, 1, 1, 3, 3]
    assert (heard[-1].finished, heard[-1].failed) == (5, 1)
    assert [progress.done for progress in heard][-1] == 1
    assert sum("alone" in progress.news for progress in heard) == 3


@pytest.mark.slow
def test_cells_that_train_together_end_as_alone_up_to_rounding(tmp_path: Path) -> None:
    swept = "[grid]\nstep_size = [0.01, 0.2]\nattack = ['SignFlip', 'SignFlip(scale=3.0)']"
    chosen = grid(f"{SHARED}estimator = 'GPOMDP()'\n{swept}").cells
    workers = LocalWorkers(tmp_path, 1, len(chosen))
    workers.together = True  # as on a GPU
    try:
        assert run(chosen, workers, 0, lambda progress: None) == {}
    finally:
        workers.close()
    for cell in chosen:
        found, alone = load(tmp_path / "runs" / cell.name), train(Config.of(cell.settings.as_data(), "cell"))
        np.testing.assert_allclose(found.parameters["last"], alone.parameters["last"], atol=1e-5)
    ends = [load(tmp_path / "runs" / cell.name).parameters["last"] for cell in chosen]
    assert np.abs(ends[0] - ends[2]).max() > 0.01  # the step sizes are their own


@pytest.mark.slow
def test_a_worker_that_is_killed_at_its_start_is_started_again(tmp_path: Path) -> None:
    workers = LocalWorkers(tmp_path, 2, 2)
    try:
        workers._workers[1].process.kill()

        def both_are_there() -> bool:
            assert workers.wait(0.2) is None
            return workers.idle() == [0, 1]

        until(both_are_there, "both are there")
    finally:
        workers.close()


def test_what_fails_is_tried_again_up_to_a_limit(cells: Sequence[Cell]) -> None:
    unlucky, hopeless = cells[1].name, cells[2].name
    script = {(unlucky, 1): "lost", (unlucky, 2): "failed"} | {(hopeless, number): "failed" for number in range(1, 9)}
    workers, heard = Scripted(2, script), list[Progress]()
    assert run(cells, workers, 2, heard.append) == {hopeless: "why"}
    tried = [cell.name for _, cell in workers.given]
    assert [tried.count(cell.name) for cell in cells] == [1, 3, 3, 1, 1, 1]
    assert [progress.news for progress in heard if unlucky in progress.news] == [
        f"{unlucky} lost its worker (attempt 1 of 3, will be tried again): why",
        f"{unlucky} failed (attempt 2 of 3, will be tried again): why",
    ]
    assert f"{hopeless} failed (attempt 3 of 3, given up): why" in [progress.news for progress in heard]
    assert (heard[-1].finished, heard[-1].failed) == (5, 1)
    assert run(cells, Scripted(1, {(unlucky, 1): "lost"}), 0, heard.append) == {unlucky: "why"}


def test_whoever_watches_may_stop_it(cells: Sequence[Cell]) -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    workers = Scripted(1)
    with pytest.raises(KeyboardInterrupt):
        run(cells, workers, 0, stop)
    assert len(workers.given) == 1


# Which cells are done


def a_run(cell: Cell, returns: np.ndarray, weight: float = np.nan) -> Run:
    trajectories = np.tile(np.arange(1, returns.shape[1] + 1) * 10, (len(returns), 1))
    metrics = {"return_mean": returns, "byzantine_weight": np.full(returns.shape, weight)}
    metrics |= {name: np.full(returns.shape, np.nan) for name in ("diameter_before", "diameter_after")}
    last = np.where(np.isfinite(returns[:, -1]), 0.0, np.nan)[:, None, None]
    parameters, outputs = {"last": last, "uniform": last}, np.zeros(len(last), int)
    return Run(cell.settings, trajectories, trajectories > 0, metrics, parameters, outputs, True)


def kept(cell: Cell, folder: Path, returns: np.ndarray, weight: float = np.nan) -> Path:
    RunDirectory.create(folder / cell.name, cell.settings).write_results(a_run(cell, returns, weight))
    return folder / cell.name


def test_only_a_complete_and_sound_run_is_done(cells: Sequence[Cell], tmp_path: Path) -> None:
    cell, returns = cells[0], np.ones((1, 4))
    path = tmp_path / cell.name
    assert not is_done(cell, tmp_path)
    path.mkdir()
    assert not is_done(cell, tmp_path)
    RunDirectory.create(path, cell.settings)
    assert not is_done(cell, tmp_path)
    RunDirectory.open(path).write_results(a_run(cell, returns))
    assert is_done(cell, tmp_path)

    def broken(words: str) -> None:
        with pytest.raises(ValueError, match="Remove it, and the cell is trained again") as error:
            is_done(cell, tmp_path)
        assert str(path) in str(error.value)
        assert words in str(error.value)

    RunDirectory.open(path).write_results(a_run(cell, np.ones((2, 4))))
    broken("other shapes")
    whole = (path / "metrics.npz").read_bytes()
    (path / "metrics.npz").write_bytes(whole[:100])
    broken("metrics.npz cannot be read")
    (path / "config.json").write_text(json.dumps(cells[1].settings.as_data()))
    broken("not the one that its name stands for")
    (path / "config.json").unlink()
    broken("holds no run")


def test_results_in_bytes(cells: Sequence[Cell]) -> None:
    sent = a_run(cells[0], np.arange(4.0).reshape(1, 4))
    arrived = unpacked(sent.settings, packed(sent), "a cell")
    assert arrived.settings == sent.settings
    assert (list(arrived.output_iteration), arrived.complete) == ([0], True)
    for ours, theirs in ((sent.metrics, arrived.metrics), (sent.parameters, arrived.parameters)):
        assert {name: values.tobytes() for name, values in ours.items()} == {
            name: values.tobytes() for name, values in theirs.items()
        }
    of_objects = BytesIO()  # what NumPy would read as a pickle, if it were allowed to
    with zipfile.ZipFile(of_objects, "w") as archive, archive.open("metrics/return_mean.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    for bad, problem in (
        (b"", ""),
        (packed(sent)[:-30], ""),
        (of_objects.getvalue(), "Object arrays cannot be loaded"),
    ):
        with pytest.raises(ValueError, match=f"a cell cannot be read: .*{problem}"):
            unpacked(sent.settings, bad, "a cell")


# What came of it


def test_tables_and_groups(tmp_path: Path) -> None:
    sweep = grid("num_seeds = 2\n[grid]\nattack = ['ALIE', 'IPM']\nseed = [0, 2]")
    rows = [np.tile(np.arange(20.0), (2, 1)), np.full((2, 20), 7.0), np.full((2, 20), 3.0)]
    rows[1][1] = 9.0
    rows[2][1, 5:] = np.nan
    for cell, returns, weight in zip(sweep.cells, rows, (0.25, 0.75, np.nan), strict=False):
        kept(cell, tmp_path, returns, weight)
    groups = outcomes(sweep.groups, tmp_path)
    assert [len(group.cells) for group in groups] == [2, 1]  # of the last group, a cell is missing
    first, second = groups
    np.testing.assert_allclose(first.final_returns, [18.5, 18.5, 7, 9])
    assert (first.best, first.attacker_weight, first.trajectories, first.diverged) == ((19 + 8) / 2, 0.5, 200, ())
    assert (second.best, second.diverged) == (3.0, (1,))
    assert np.isnan(second.attacker_weight)
    write_table(sweep, tmp_path, tmp_path / "table.csv")
    with (tmp_path / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["run"], row["attack"], row["seed"]) for row in table] == [
        (cell.name, str(cell.settings.attack).removesuffix("()"), str(cell.settings.seed)) for cell in sweep.cells[:3]
    ]
    assert [row["last_tenth"] for row in table] == ["18.5", "8.0", ""]
    assert [row["last_tenth_deviation"] for row in table] == ["0.0", "1.0", ""]
    assert [row["weight_of_attackers"] for row in table] == ["0.25", "0.75", ""]
    assert [row["diverged"] for row in table] == ["", "", "1"]


def test_cells_of_a_group_may_have_other_lengths(cells: Sequence[Cell]) -> None:
    """The coin, and so the number of iterations, depends on the seed."""
    both = Outcome.of(cells[:2], [a_run(cells[0], np.full((1, 20), 4.0)), a_run(cells[1], np.full((1, 15), 6.0))])
    assert (both.best, both.trajectories, list(both.final_returns)) == (5.0, 200, [4.0, 6.0])


def test_the_plot_has_a_row_per_group(tmp_path: Path) -> None:
    values = {"DecByzPG, ALIE": np.asarray([450.0, 480.0, 500.0]), "DecByzPG, IPM": np.asarray([20.0, np.nan])}
    figure = figures.dots(values, "mine", "return")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    notes = [text.get_text() for text in figure.axes[0].texts]
    assert (labels, notes) == (list(values), ["477", "1 diverged"])
    figures.save(figure, tmp_path / "dots.png")
    with Image.open(tmp_path / "dots.png") as picture:
        assert picture.width > 800


# Real workers


@pytest.fixture(autouse=True, scope="module")
def tasks() -> Iterator[None]:
    """Workers find the tests' tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("COLUMNS", "150")
        yield


def processes_of(folder: Path) -> list[int]:
    """Those that were told to wait there, and whatever these have started."""
    found, wanted = [], f"BYZPG_WAIT={folder}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@dataclass
class Command:
    """A sweep that a user has started; its patient task waits in the midst of a cell."""

    process: subprocess.Popen[str]
    folder: Path

    def caught(self) -> int:
        """The process that is in the midst of the cell."""
        noted = self.folder / "process"
        until(lambda: noted.exists() or self.process.poll() is not None, "a cell is being trained", 3 * PATIENCE)
        assert noted.exists(), self.process.communicate()
        return int(noted.read_text())

    def go(self) -> None:
        (self.folder / "go").touch()

    def said(self) -> tuple[str, str]:
        return self.process.communicate()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Command]]:
    commands = []

    def start(*arguments: object, folder: Path) -> Command:
        waiting = tmp_path_factory.mktemp("waiting")
        line = [*START, "sweep", *map(str, arguments)]
        told = os.environ | {"BYZPG_WAIT": str(waiting)}
        process = subprocess.Popen(line, stdout=-1, stderr=-1, text=True, cwd=folder, env=told, process_group=0)
        commands.append(Command(process, waiting))
        return commands[-1]

    yield start
    for command in commands:
        command.go()
        command.process.kill()
        command.said()
        for process in processes_of(command.folder):  # of a test that failed
            os.kill(process, signal.SIGKILL)


def byzpg(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    """The command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["byzpg", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def results(folder: Path) -> dict[str, bytes]:
    """All that two sweeps of one grid must have in common."""
    names = ("config.json", "metrics.npz", "parameters.npz", "table.csv")
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.name in names}


IMPORTING = "Importing the module 'host_tasks' for the task 'host_tasks:patient'.\n"


def survive(command: Command) -> None:
    """One of two workers is killed in the midst of a cell; all twelve are trained, and no process is left."""
    os.kill(command.caught(), signal.SIGKILL)
    out, errors = command.said()
    assert command.process.returncode == 0, out + errors
    assert errors == IMPORTING
    assert "12 cells: 0 done, 12 to do" in out
    assert out.count("lost its worker") == 1
    assert "host_tasks-patient-Fed-PAGE-PG-3-1-AvgZero" in out
    assert "lost its worker (attempt 1 of 3, will be tried again): " in out
    assert "12 of 12 cells, 0 running (100% done after" in out
    assert "Return of honest agents (mean ± standard deviation over seeds)" in out
    until(lambda: not processes_of(command.folder), "all processes have ended")


@pytest.fixture(scope="module")
def user(started: Callable[..., Command], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user has run a grid of twelve cells on two workers, one of whom was killed."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "twelve.toml").write_text(TWELVE)
    survive(started("twelve.toml", "--workers", 2, folder=folder))
    return folder


@pytest.mark.slow
def test_twelve_cells_here(user: Path) -> None:
    folder = user / "sweeps" / "twelve"
    sweep = Sweep.load(user / "twelve.toml")
    assert len(results(folder)) == 3 * 12 + 1
    with (folder / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["run"] for row in table] == [cell.name for cell in sweep.cells]
    for row, cell in zip(table[::10], sweep.cells[::10], strict=True):
        found, alone = load(folder / "runs" / cell.name), train(Config.of(cell.settings.as_data(), "cell"))
        assert found.settings == cell.settings
        assert found.parameters["last"].tobytes() == alone.parameters["last"].tobytes()
        assert float(row["last_tenth"]) == pytest.approx(alone.returns[0, -1], rel=1e-6)
        assert float(row["weight_of_attackers"]) == pytest.approx(1 / 3)
        about = json.loads((folder / "runs" / cell.name / "provenance.json").read_text())
        assert about["command"][1:] == ["sweep", "twelve.toml", "--workers", "2"]
        assert len(about["devices"]) == 1
    with Image.open(folder / "sweep.png") as picture:
        assert picture.format == "PNG"


@pytest.mark.slow  # Ray takes half a minute to start and stop, and several minutes on a busy machine
def test_twelve_cells_on_ray_are_the_same_to_the_bit(started: Callable[..., Command], user: Path) -> None:
    survive(started("twelve.toml", "--engine", "ray", "--workers", 2, "--directory", "on-ray", folder=user))
    assert results(user / "on-ray") == results(user / "sweeps" / "twelve")


@pytest.mark.slow
def test_what_is_finished_is_skipped(
    user: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(user)
    before = results(user)
    monkeypatch.setattr(subprocess, "Popen", None)  # nobody is to be started
    assert byzpg("sweep", "twelve.toml", monkeypatch=monkeypatch) == 0
    assert "12 cells: 12 done, 0 to do → sweeps/twelve" in capsys.readouterr().out
    assert results(user) == before


def test_a_cell_that_fails_is_named_and_the_others_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text(f"{SHARED}[grid]\nenv = ['host_tasks:stumbling', 'host_tasks:patient']")
    bad, good = Sweep.load(Path("bad.toml")).cells
    code = byzpg("sweep", "bad.toml", "--retries", 1, "--workers", 1, "--directory", "s", monkeypatch=monkeypatch)
    said = capsys.readouterr()
    assert code == 1
    reason = "ValueError: host_tasks:stumbling: step failed (KeyError: 'the map is missing')"
    assert f"{bad.name} failed (attempt 1 of 2, will be tried again): {reason}" in said.out
    assert f"{bad.name} failed (attempt 2 of 2, given up): {reason}" in said.out
    assert said.err == f"failed: {bad.name}: {reason}\n"
    assert "1 cell failed after 2 attempts. Try again with: byzpg sweep bad.toml --retries 1" in said.out
    assert not RunDirectory(Path("s/runs") / bad.name).complete
    ours, theirs = Path("s/runs") / good.name, Path("alone")
    train(Config.of(good.settings.as_data(), "cell"), theirs)
    for name in ("metrics.npz", "parameters.npz"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    with Path("s/table.csv").open() as file:
        assert [row["run"] for row in csv.DictReader(file)] == [good.name]
    assert "KeyError: 'the map is missing'" in Path("s/logs/worker-1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_whoever_started_them(
    how: signal.Signals,
    started: Callable[..., Command],
    user: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Ctrl-C or by a crash; what they were at is saved, and the same command goes on from there."""
    (tmp_path / "one.toml").write_text(f"{SHARED}[grid]\nenv = ['host_tasks:patient']")
    command = started("one.toml", folder=tmp_path)
    worker = command.caught()
    assert {command.process.pid, worker} <= set(processes_of(command.folder))
    if how == signal.SIGINT:
        os.killpg(command.process.pid, how)  # as a terminal does
        output = command.process.stdout
        assert output is not None
        until(lambda: "Stopping after the blocks" in output.readline(), "it says that it will stop")
    else:
        command.process.kill()
        command.process.wait()
    command.go()
    out, errors = command.said()
    until(lambda: not processes_of(command.folder), "all processes have ended")
    if how == signal.SIGINT:
        assert command.process.returncode == 130, out
        assert errors == f"{IMPORTING}Stopped. Continue with: byzpg sweep one.toml\n"
    (path,) = (tmp_path / "sweeps" / "one" / "runs").iterdir()
    assert (path / "checkpoint.npz").is_file()
    assert load(path).trajectories.shape[1] == 1
    if how == signal.SIGINT:
        monkeypatch.chdir(tmp_path)
        assert byzpg("sweep", "one.toml", monkeypatch=monkeypatch) == 0
        theirs = user / "sweeps" / "twelve" / "runs" / path.name
        for name in ("metrics.npz", "parameters.npz"):
            assert (path / name).read_bytes() == (theirs / name).read_bytes()


BAD = {
    "sweep nowhere.toml": "grid nowhere.toml cannot be read: ",
    "sweep broken.toml": "grid broken.toml cannot be read: ",
    "sweep empty.toml": "empty.toml needs a table [grid]",
    "sweep sound.toml --workers 0": "--workers must be at least 1, got 0.",
    "sweep sound.toml --retries -1": "--retries must not be negative, got -1.",
    "sweep sound.toml --address auto": "--address is the address of a Ray cluster: add --engine ray.",
    "sweep sound.toml --engine ray --address 127.0.0.1:1": "there is no Ray cluster at address 127.0.0.1:1: ",
    "sweep sound.toml --engine ray --address here": "must be host:port, ray://host:port or auto, got 'here'.",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_error_before_any_work(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("[grid")
    Path("empty.toml").write_text("num_agents = 5")
    Path("sound.toml").write_text("[grid]\nseed = [0, 4]")
    before = list(tmp_path.iterdir())
    assert byzpg(*line.split(), monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err
    assert BAD[line] in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == before


def test_ray_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("byzpg.cli.sweep.find_spec", lambda name: None)
    assert byzpg("sweep", tmp_path / "any.toml", "--engine", "ray", monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err == f"error: --engine ray needs Ray: {install('ray')}.\n"
