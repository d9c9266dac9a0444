"""Commands that look at one run print the same numbers."""

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table
from tiers import slow_except

from byzpg import cli
from byzpg.cli.console import console
from byzpg.cli.tables import BEST, LAST_TENTH, WEIGHT, experiments_table, runs_table
from byzpg.cli.train import _with_plain_averaging
from byzpg.config import Config, Settings
from byzpg.experiments.paper import Scope, grid
from byzpg.experiments.report.wording import spread
from byzpg.experiments.results import Result, Results, joined
from byzpg.experiments.statistics import mean_and_deviation, significant
from byzpg.experiments.summaries import attacker_weight, best_return, final_returns
from byzpg.experiments.sweeps import Sweep
from byzpg.robust.aggregators import Mean
from byzpg.robust.attacks import ALIE
from byzpg.runs import Run, RunDirectory, provenance

NUMBERS = (LAST_TENTH, BEST, WEIGHT)


def a_run(settings: Settings, num_iterations: int) -> Run:
    """A noisy run with batches of 50 and 4, where a mean over iterations is not one over trajectories.

    Every seed tosses its own coin, so seeds are not at the same trajectories after as many iterations.
    """
    rng = np.random.default_rng(num_iterations)
    shape = (settings.num_seeds, num_iterations)
    large = rng.random(shape) < 0.2
    large[:, 0] = True
    trajectories = np.cumsum(np.where(large, 50, 4), axis=1)
    metrics = {
        "return_mean": (np.linspace(10, 300, num_iterations) + rng.normal(0, 60, shape)).astype(np.float32),
        "byzantine_weight": np.where(large, rng.random(shape) * np.linspace(0.1, 0.5, num_iterations), np.nan),
        **{name: np.full(shape, np.nan) for name in ("diameter_before", "diameter_after")},
    }
    zeros = np.zeros((settings.num_seeds, 1, 3))
    parameters, outputs = {"last": zeros, "uniform": zeros}, np.zeros(settings.num_seeds, int)
    return Run(settings, trajectories, large, metrics, parameters, outputs, complete=True)


def numbers_of(table: Table, row: int = 0) -> list[str]:
    """What a row says about last tenth, best and attackers' weight."""
    columns = {str(column.header): list(column.cells) for column in table.columns}
    return [str(columns[name][row]) for name in NUMBERS]


def printed_numbers(text: str) -> list[str]:
    """The same in the output of a command whose table has one row: 123 ± 4, 130, 5.0%."""
    (line,) = [line for line in text.splitlines() if "±" in line and "%" in line]
    spread, best, weight = re.search(r"([\d.]+ ± [\d.]+)\s+([\d.]+)\s.*?([\d.]+%)", line).groups()  # pyright: ignore
    return [spread, best, weight]


@pytest.mark.parametrize("num_iterations", slow_except([40], [1, 3, 40, 700]))
def test_commands_agree_about_a_run(
    num_iterations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "_width", 150)
    Path("one.toml").write_text("num_seeds = 3\n[grid]\nattack = ['ALIE']")
    (cell,) = Sweep.load(Path("one.toml")).cells
    run, path = a_run(cell.settings, num_iterations), Path("sweeps/one/runs") / cell.name
    RunDirectory.create(path, cell.settings).write_results(run)
    result = Result.of(run)
    late = final_returns(result)
    expected = [
        mean_and_deviation(late),
        *(significant(best_return(result)), f"{attacker_weight(result):.1%}"),
    ]

    planned = grid(["fig2"], Scope(num_seeds=3))
    reproduced = Results.of(planned, dict.fromkeys(planned.settings, run), {})
    assert numbers_of(runs_table({path: run}, with_paths=False)) == expected
    assert numbers_of(runs_table({path: run}, with_paths=True)) == expected
    assert numbers_of(experiments_table(reproduced)) == expected

    for command in (["sweep", "one.toml"], ["plot", str(path)]):
        monkeypatch.setattr(sys, "argv", ["byzpg", *command])
        cli.main()
        assert printed_numbers(capsys.readouterr().out) == expected


def test_definitions() -> None:
    """By hand: 20 cells of 10 trajectories, of which the last two are the last tenth."""
    (cell,) = Sweep.of({"grid": {"seed": [0]}, "num_seeds": 2}, "here").cells
    trajectories = np.tile(np.arange(1, 21) * 10, (2, 1))
    returns = np.stack([np.arange(20.0), np.full(20, 5.0)])
    returns[:, 7] = 40.0
    weight = np.full((2, 20), np.nan)
    weight[:, ::2] = [[0.1], [0.3]]
    metrics = {"return_mean": returns, "byzantine_weight": weight}
    run = Run(cell.settings, trajectories, trajectories > 0, metrics, {}, np.zeros(2, int), True)
    result = Result.of(run)
    np.testing.assert_allclose(final_returns(result), [18.5, 5.0])
    assert best_return(result) == 40.0
    assert attacker_weight(result) == pytest.approx(0.2)
    returns[1, 7] = np.nan  # a cell in which a seed has diverged does not count
    assert best_return(Result.of(run)) == pytest.approx((19 + 5) / 2)


def test_plain_averaging_is_compared_under_the_same_attack() -> None:
    options = Config(agreement="GDA")  # tolerates fewer Byzantine agents than the mean
    ours = options.resolved()
    plain = _with_plain_averaging(options, ours)
    assert (plain.num_byzantine, plain.num_attackers, plain.attack) == (2, 2, ours.attack)
    assert (ours.num_byzantine, ours.num_attackers) == (2, 2)
    assert (plain.algorithm, plain.aggregator, plain.rounds) == ("Dec-PAGE-PG", Mean(), 0)


def test_small_returns_are_readable_and_one_seed_has_no_spread() -> None:
    (cell,) = Sweep.of({"grid": {"seed": [0]}, "num_seeds": 2}, "here").cells
    returns = np.stack([np.linspace(0, 0.8, 20), np.linspace(0, 0.7, 20)])
    progress = np.tile(np.arange(1, 21) * 10, (2, 1))
    run = Run(cell.settings, progress, progress > 0, {"return_mean": returns}, {}, np.zeros(2, int), True)
    table = runs_table({Path("two"): run}, with_paths=False)
    assert numbers_of(table)[:2] == ["0.730 ± 0.049", "0.750"]
    assert "standard deviation" in str(table.title)
    alone = replace(
        run,
        settings=replace(run.settings, num_seeds=1),
        progress=progress[:1],
        large=progress[:1] > 0,
        metrics={"return_mean": returns[:1]},
    )
    table = runs_table({Path("one"): alone}, with_paths=False)
    assert numbers_of(table)[:2] == ["0.779", "0.800"]
    assert str(table.title) == "Return of honest agents"
    assert spread(returns[:1, -1]) == "0.800"  # of the report


def test_plot_and_report_take_runs_sweeps_and_experiments_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "_width", 150)

    def byzpg(*command: str) -> str:
        monkeypatch.setattr(sys, "argv", ["byzpg", *command])
        cli.main()
        return capsys.readouterr().out

    cells = Sweep.of({"grid": {"seed": [0, 1], "step_size": [0.1, 0.2]}, "num_seeds": 1}, "here").cells
    runs = {cell.name: a_run(cell.settings, 30 + cell.settings.seed) for cell in cells}
    for cell in cells:
        RunDirectory.create(Path("sweeps/mine/runs") / cell.name, cell.settings).write_results(runs[cell.name])
    begun = replace(cells[0].settings, seed=9)
    RunDirectory.create(Path("sweeps/mine/runs/no-checkpoint-yet"), begun)
    alone = replace(cells[0].settings, attack=ALIE(), step_size=0.3, num_seeds=3)
    RunDirectory.create(Path("alone"), alone).write_results(a_run(alone, 20))
    planned = grid(["fig1"], Scope(num_seeds=2))
    reproduced = {name: a_run(settings, 10) for name, settings in planned.settings.items()}
    Results.of(planned, reproduced, {**provenance(), "command": "byzpg reproduce fig1"}).save(Path("fig1.npz"))

    # Runs of a sweep that differ in the seed alone are one row, with their common spread; a copy is none of them.
    again = RunDirectory.create(Path("sweeps/mine/runs/z-copy"), cells[0].settings)
    again.write_results(runs[cells[0].name])
    text = byzpg("plot", "sweeps/mine", "--output", "sweep.pdf")
    assert "1 run without a checkpoint yet: left out." in text
    for first, second in zip(cells[:2], cells[2:], strict=True):
        assert first.settings == replace(second.settings, seed=0)
        ends = [final_returns(Result.of(joined([runs[each.name] for each in (first, second)])))]
        assert mean_and_deviation(ends[0]) in text
    assert Path("sweep.pdf").is_file()
    assert re.findall(r"\S*z-copy.*", text)[0].strip() == "sweeps/mine/runs/z-copy"
    assert text.count("and 1 other seed") == 2
    shutil.rmtree(again.path)

    everything = ("sweeps/mine", "alone", "fig1.npz")
    text = byzpg("plot", *everything, "--output", "all.svg")
    assert re.findall(r"Plot: (\S+)", text) == ["all-runs.svg", "all-fig1-tuned.svg"]
    assert "step_size 0.1" in Path("all-runs.svg").read_text()
    byzpg("report", *everything)
    page = Path("report.html").read_text()
    for words in ("step_size 0.2", "attack ALIE", "byzpg reproduce fig1", "Known differences"):
        assert words in page
    byzpg("report", "alone")
    assert "Known differences" not in Path("report.html").read_text()  # it is not about the paper


def test_runs_with_other_seeds_are_joined() -> None:
    first, second = (a_run(Config(num_seeds=2, seed=seed).resolved(), 20 + seed) for seed in (0, 2))
    both = joined([first, second])
    assert both.returns.shape == (4, 22)
    assert both.num_iterations.tolist() == [20, 20, 22, 22]
    np.testing.assert_array_equal(both.returns[2:], second.returns)
    np.testing.assert_array_equal(both.progress[:2, 20:], first.progress[:, -1:].repeat(2, axis=1))
    assert np.all(np.isnan(both.returns[:2, 20:]))
    assert np.all(np.isfinite(final_returns(Result.of(both))))
