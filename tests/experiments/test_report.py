"""Results of experiments as numbers, as figures, and as a page in a real browser."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from html import unescape
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from byzpg.cli.tables import interval, reach_table
from byzpg.config import Config, Settings
from byzpg.experiments.figures import colours_by_label, draw_experiment, plots, save
from byzpg.experiments.paper import (
    CARTPOLE,
    HEATMAP_RULES,
    LUNARLANDER,
    Cell,
    Experiment,
    Grid,
    Panel,
    Scope,
    grid,
    published_curves,
)
from byzpg.experiments.report import by_preset, write_report
from byzpg.experiments.results import Result, Results
from byzpg.experiments.statistics import interquartile_mean
from byzpg.experiments.summaries import (
    Estimate,
    comparisons,
    curve_names,
    estimate,
    final_returns,
    goals,
    mean_reaches,
    mean_saving,
    plain_rival,
    reach_estimate,
    returns_at,
    run_means,
    saving,
)
from byzpg.runs import Run

PROVENANCE = {
    "command": "byzpg reproduce all --directory 'my results'",
    "versions": {"byzpg": "0.2.0", "jax": "0.10.2"},
    "python": "3.12.3",
    "machine": "Linux aarch64",
    "devices": ["a small device"],
    "seconds": 83.5,
}
WEIGHING = ("Mean", "Krum", "MultiKrum", "MDA", "RFA", "CAF")


def learned(settings: Settings, rng: np.random.Generator) -> Result:
    """What a run might have looked like: plain averaging stays on the ground under attack, all else learns."""
    ends = np.linspace(0, settings.length, 81)[1:]
    low, high = (-250.0, 260.0) if settings.env == LUNARLANDER else (20.0, 498.0)
    rule = type(settings.aggregator).__name__
    tolerated = settings.num_attackers <= (0 if rule == "Mean" else settings.num_byzantine)
    middle = 0.25 + 0.3 / settings.num_agents + 0.05 * rng.random((settings.num_seeds, 1))
    progress = (1.0 if tolerated else 0.02) / (1 + np.exp(-25 * (ends / ends[-1] - middle)))
    noise = rng.normal(0, 0.004 * (high - low), (settings.num_seeds, len(ends)))
    metrics = {"return_mean": low + (high - low) * progress + noise}
    if rule in WEIGHING:
        metrics["byzantine_weight"] = 0.23 * rng.random((settings.num_seeds, len(ends)))
    if settings.rounds:
        before = 0.1 + 0.05 * rng.random((settings.num_seeds, len(ends)))
        metrics |= {"diameter_before": before, "diameter_after": before * 0.1**settings.rounds}
    return Result(settings, ends, {name: values.astype(np.float32) for name, values in metrics.items()})


def made_up(made: Grid) -> Results:
    rng = np.random.default_rng(0)
    return Results(made.experiments, {name: learned(each, rng) for name, each in made.settings.items()}, PROVENANCE)


def with_returns(result: Result, returns: np.ndarray) -> Result:
    return replace(result, metrics={**result.metrics, "return_mean": returns.astype(np.float32)})


def find(results: Results, name: str, title: str, label: str) -> tuple[Experiment, Panel, Cell]:
    experiment = next(each for each in results.experiments if each.name == name)
    panel = next(each for each in experiment.panels if each.title == title)
    return experiment, panel, next(each for each in panel.cells if each.label == label)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All experiments, after a trip to the disk; three runs with returns that are known to the digit."""
    made = made_up(grid(["all", "beyond"], Scope(num_seeds=3)))
    runs = dict(made.runs)
    robust = find(made, "fig2", "AvgZero", "DecByzPG K=13 α=3/13")[2].run
    steps = np.where(runs[robust].progress <= 200, 15.0, 470.0) + np.array([[-10.0], [0.0], [10.0]])
    runs[robust] = with_returns(runs[robust], steps)
    lander = find(made, "fig3", "AvgZero", "DecByzPG K=13 α=3/13")[2].run
    runs[lander] = with_returns(runs[lander], np.full((3, 80), -30.0) + np.array([[-3.0], [0.0], [3.0]]))
    fallen = find(made, "fig6", "AvgZero", "Fed-PAGE-PG K=13 α=3/13")[2].run
    runs[fallen] = with_returns(runs[fallen], np.full((3, 80), -900.0))
    path = tmp_path_factory.mktemp("results") / "all.npz"
    replace(made, runs=runs).save(path)
    return Results.load(path)


# Results


def test_results_come_back_from_the_disk(results: Results) -> None:
    made = made_up(grid(["all", "beyond"], Scope(num_seeds=3)))
    assert results.experiments == made.experiments
    assert results.provenance == PROVENANCE
    assert list(results.runs) == list(made.runs)
    name = find(made, "fig1", "CartPole", "DecByzPG K=5")[2].run
    assert results.runs[name].settings == made.runs[name].settings
    assert results.runs[name].metrics.keys() == made.runs[name].metrics.keys()
    for metric, values in made.runs[name].metrics.items():
        np.testing.assert_array_equal(results.runs[name].metrics[metric], values)


def test_what_are_no_results_gives_one_clear_error(tmp_path: Path) -> None:
    path, array = tmp_path / "results.npz", BytesIO()
    np.save(array, np.zeros(3))
    for write in (
        lambda: path.write_text("no archive"),
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(array.getvalue()),
        lambda: np.savez(path, something=np.zeros(3)),
        lambda: np.savez(path, about=np.asarray("no JSON")),
        path.unlink,
    ):
        write()
        with pytest.raises(ValueError, match=r"results\.npz cannot be read as results of `byzpg reproduce`: "):
            Results.load(path)
    np.savez(path, about=np.asarray('{"format": 99}'))
    with pytest.raises(
        ValueError, match=r"results\.npz cannot be read .* format 99, and this version of byzpg reads 1\."
    ):
        Results.load(path)


def test_results_of_older_versions_can_be_read(tmp_path: Path) -> None:
    """There, f was num_declared, each convention was an option, progress was called trajectories, and the texts had
    other words."""
    made = made_up(grid(["tolerance"], Scope(num_seeds=3)))
    made.save(tmp_path / "new.npz")
    with np.load(tmp_path / "new.npz") as stored:
        arrays = dict(stored)
    arrays = {name.replace("/progress", "/trajectories"): values for name, values in arrays.items()}
    about = json.loads(str(arrays["about"]))
    for settings in about["settings"].values():
        settings |= {"num_declared": settings.pop("num_byzantine"), "num_byzantine": settings.pop("num_attackers")}
        del settings["conventions"]
        settings |= {"memory": "paper", "coin": "common", "initialization": "seeded"}
    (experiment,) = about["experiments"]
    experiment["title"] = "How many liars are too many?"
    for panel in experiment["panels"]:
        for cell in panel["cells"]:
            cell["label"] += " declared" if "f = " in cell["label"] else ""
    arrays["about"] = np.asarray(json.dumps(about))
    np.savez(tmp_path / "old.npz", allow_pickle=False, **arrays)
    old = Results.load(tmp_path / "old.npz")
    assert old.experiments == made.experiments
    assert {name: result.settings for name, result in old.runs.items()} == {
        name: result.settings for name, result in made.runs.items()
    }
    for name, result in old.runs.items():
        np.testing.assert_array_equal(result.progress, made.runs[name].progress)


def a_run(sizes: list[int], **metrics: Any) -> Run:
    settings = Config(num_seeds=2).resolved()
    trajectories = np.tile(np.cumsum(sizes), (2, 1))
    unknown = np.full((2, len(sizes)), np.nan)
    known = {name: np.asarray(values, float) for name, values in metrics.items()}
    every = dict.fromkeys(("return_mean", "byzantine_weight", "diameter_before", "diameter_after"), unknown) | known
    return Run(settings, trajectories, np.tile(np.array(sizes) > 4, (2, 1)), every, {}, np.zeros(2, int), True)


def test_a_result_has_cells_that_weigh_iterations_by_their_trajectories() -> None:
    """Iterations of 30 and 10 in the second half, more than there are cells."""
    sizes = [100] + [1, 3] * 400
    returns = np.stack([np.concatenate([[7.0], np.tile([10.0, 20.0], 400)])] * 2)
    result = Result.of(a_run(sizes, return_mean=returns))
    assert result.progress[-1] == sum(sizes)
    assert len(result.progress) <= 160
    np.testing.assert_allclose(np.diff(result.progress), sum(sizes) / 160)
    assert result.returns[0, 0] == pytest.approx(7.0, abs=1)
    assert np.mean(result.returns[:, 20:]) == pytest.approx(17.5, abs=0.3)  # (1·10 + 3·20)/4
    assert set(result.metrics) == {"return_mean"}


def test_a_metric_of_large_batches_alone_is_spread_over_the_run() -> None:
    sizes = [30, 4, 4, 30, 4, 4, 30, 4, 4]
    weights = np.full((2, 9), np.nan)
    weights[:, ::3] = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]
    result = Result.of(a_run(sizes, return_mean=np.ones((2, 9)), byzantine_weight=weights))
    found = result.metrics["byzantine_weight"]
    assert found.shape == result.returns.shape
    np.testing.assert_allclose(found[:, -1], [0.3, 0.6], rtol=1e-6)
    means = run_means(result, "byzantine_weight")
    assert means is not None
    assert 0.1 < means[0] < 0.3
    assert 0.4 < means[1] < 0.6
    assert run_means(result, "diameter_after") is None


# Numbers


def test_numbers_of_a_run(results: Results) -> None:
    result = results.runs[find(results, "fig2", "AvgZero", "DecByzPG K=13 α=3/13")[2].run]
    np.testing.assert_allclose(final_returns(result), [460, 470, 480])
    np.testing.assert_allclose(returns_at(result, 200), [5, 15, 25])
    assert mean_reaches(result, 450) == 300
    assert mean_reaches(result, 471) == np.inf
    reach = reach_estimate(result)
    assert (reach.value, reach.low, reach.high) == (300, 300, 300)
    middle = estimate(final_returns(result))
    assert (middle.value, middle.low, middle.high) == (470, 460, 480)
    together = estimate([final_returns(result), final_returns(result) + 100])
    assert together.value == pytest.approx(interquartile_mean(np.array([460, 470, 480, 560, 570, 580])))
    assert 470 < together.low < together.value < together.high < 570


def test_the_rival_is_plain_averaging_under_the_same_attack(results: Results) -> None:
    _, panel, robust = find(results, "fig5", "LargeNoise", "ByzPG K=13 α=3/13")
    rivals = {cell.label: plain_rival(cell, panel, results.runs) for cell in panel.cells}
    plain = rivals.pop(robust.label)
    assert plain is not None
    assert plain.label == "Fed-PAGE-PG K=13 α=3/13"
    assert rivals.pop("FedPG-BR K=13 α=3/13") == plain
    assert set(rivals.values()) == {None}
    _, panel, _ = find(results, "tolerance", "ALIE", "ByzPG, f = 6")
    for cell in panel.cells:
        rival = plain_rival(cell, panel, results.runs)
        if cell.label == "Dec-PAGE-PG" or cell.at == 0:
            assert rival is None
        else:
            assert rival is not None
            assert (rival.label, rival.at) == ("Dec-PAGE-PG", cell.at)


def compared(results: Results, name: str, title: str, label: str) -> Any:
    found = comparisons(results.experiments, results.runs)
    return next(
        each for each in found if (each.experiment.name, each.panel.title, each.cell.label) == (name, title, label)
    )


def test_published_curves_against_ours(results: Results) -> None:
    robust = compared(results, "fig2", "AvgZero", "DecByzPG K=13 α=3/13")
    assert robust.published_reach() == (4500, 4750)
    assert not robust.reached_later()
    assert robust.end == 600
    assert robust.ends_lower()  # at 470, where 488.7 was published after 8,000 trajectories
    assert not robust.matches()
    plain = compared(results, "fig2", "LargeNoise", "Dec-PAGE-PG K=13 α=3/13")
    assert plain.published_reach() == (np.inf, np.inf)
    assert plain.matches()
    moved = replace(plain, result=with_returns(plain.result, plain.result.returns + 100))
    assert moved.withstands_more()
    assert not moved.matches()
    long = replace(robust.result, progress=robust.result.progress * 10)
    late = replace(robust, result=with_returns(long, np.where(long.progress < 5000, 9, 499.0)[None]))
    assert late.reached_later()
    assert not late.ends_lower()
    # What a preset made for it may beat, another is to repeat.
    better = replace(robust, result=with_returns(robust.result, robust.result.returns + 29))
    assert better.matches()
    repeating = replace(better.result, settings=replace(better.result.settings, preset="script"))
    assert not replace(better, result=repeating).matches()
    assert replace(better, result=repeating).published_end() < 30, "the published curve after 600 trajectories"
    lander = compared(results, "fig3", "AvgZero", "DecByzPG K=13 α=3/13")
    assert lander.published_end() == 0.6
    assert lander.ends_lower()
    hidden = compared(results, "fig3", "RandomAction", "Dec-PAGE-PG K=13 α=3/13")
    assert np.isnan(hidden.published_end())
    assert hidden.withstands_more()  # −240, where the published one has left the axes
    every = list(comparisons(results.experiments, results.runs))
    assert len(every) == 60
    # A curve that another one hides around the level: between which points it got there.
    seen = replace(robust, trajectories=np.array([0.0, 4000, 6000]), returns=np.array([10.0, 400, 480]))
    assert seen.published_reach() == (4000, 6000)


def test_goals_are_of_robust_methods_under_attack(results: Results) -> None:
    every = list(goals(results.experiments, results.runs))
    assert len(every) == 2 * 3 + 3 * 2  # CartPole; LunarLander has two each
    attacked = {f"DecByzPG under {attack}" for attack in ("RandomAction", "LargeNoise", "AvgZero")}
    assert {goal.cell.label for goal in every} == {"DecByzPG K=13 α=3/13", "ByzPG K=13 α=3/13"} | attacked
    robust = compared(results, "fig2", "AvgZero", "DecByzPG K=13 α=3/13")
    (goal,) = (each for each in every if each.result is robust.result)
    assert not replace(goal, trajectories=600).met()
    assert list(replace(goal, trajectories=600).seeds()) == [False, False, True]
    assert replace(goal, level=450, trajectories=300).met()
    assert not replace(goal, level=450, trajectories=299).met()
    for scope in (Scope(preset="script", num_seeds=3), Scope(num_seeds=3, trajectories=240)):  # too short to tell
        without = made_up(grid(["fig2"], scope))
        assert not list(goals(without.experiments, without.runs))


# Figures


def drawn(results: Results, name: str) -> tuple[Experiment, Figure]:
    experiment = next(each for each in results.experiments if each.name == name)
    return experiment, draw_experiment(experiment, results.runs)


def y_of(line: Any) -> np.ndarray:
    return np.asarray(line.get_ydata(), float)


@pytest.mark.parametrize("name", ["fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "ablation", "variance"])
def test_curves_are_means_before_the_published_ones_in_the_same_colour(results: Results, name: str) -> None:
    experiment, figure = drawn(results, name)
    assert figure.get_suptitle().rstrip() == experiment.title
    names, _ = curve_names(experiment, results.runs)
    colours = colours_by_label(experiment)
    assert len(set(colours.values())) == len(colours)
    for axes, panel in zip(figure.axes, experiment.panels, strict=True):
        assert axes.get_title(loc="left") == panel.title
        assert axes.get_xlabel() == "trajectories per agent"
        lines = {str(line.get_label()): line for line in axes.lines}
        curves = published_curves(*panel.published) if panel.published else {}
        assert set(lines) == {cell.label for cell in panel.cells} | {f"{label}, published" for label in curves}
        assert len(axes.collections) == len(panel.cells)
        for cell in panel.cells:
            line, result = lines[cell.label], results.runs[cell.run]
            np.testing.assert_allclose(y_of(line), np.mean(result.returns, axis=0), rtol=1e-5)
            assert to_hex(line.get_color()) == colours[cell.label].lower()
            assert line.get_linestyle() == "-"
        for label, (trajectories, returns) in curves.items():
            line = lines[f"{label}, published"]
            np.testing.assert_array_equal(np.asarray(line.get_xdata()), trajectories)
            np.testing.assert_array_equal(y_of(line), returns)
            assert line.is_dashed()
            assert line.get_color() == lines[label].get_color()
            assert line.get_zorder() < lines[label].get_zorder()
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == [*names.values(), *(["published"] if name.startswith("fig") else [])]


def test_every_curve_is_shown_with_the_estimator_and_p_that_were_used(results: Results, tmp_path: Path) -> None:
    """With p = 1, what is called PAGE-PG does not use PAGE; and under AvgZero, Adam rescales rounding."""
    names: dict[str, dict[str, str]] = {}
    notes: dict[str, str] = {}
    for experiment in results.experiments:
        names[experiment.name], notes[experiment.name] = curve_names(experiment, results.runs)
    estimator = "GPOMDP(baseline='leave-one-out')"
    without = "p = 1, so without small batches and the PAGE correction."
    assert notes["fig1"] == (
        f"Ours: {estimator}. Published: p = 0.2. CartPole-v1, no momentum: PAGE-PG K=1, SVRPG K=1. CartPole-v1, "
        "momentum 0.8 and Adam at the agents: DecByzPG K=5, DecByzPG K=13. CartPole-v1, momentum 0.9: N-PG-IGT K=1. "
        "LunarLander-v3, no momentum: PAGE-PG K=1, SVRPG K=1. LunarLander-v3, momentum 0.8 and Adam at the agents: "
        "DecByzPG K=5, DecByzPG K=13. LunarLander-v3, momentum 0.9: N-PG-IGT K=1."
    )
    assert {"PAGE-PG K=1 (p = 1)", "DecByzPG K=13 (p = 1)", "SVRPG K=1 (p = 0.2)"} <= set(names["fig1"].values())
    assert notes["fig2"].startswith(f"Ours: {estimator}. Published: p = 0.2.")
    assert "shows rounding alone" not in notes["fig2"], "agents scale, so a mean of zero is no step"
    assert notes["rotating"] == f"All runs: {estimator}, momentum 0.8, Adam at the agents, {without}"
    assert notes["momentum"] == f"All runs: {estimator}, Adam at the agents, {without}", "labels tell the momentum"
    assert notes["averaging"].count("shows rounding alone") == 1
    assert "Plain averaging, ε = 1e-8 under" in notes["averaging"]
    assert notes["ablation"] == f"All runs: {estimator}, no momentum."
    assert {"PAGE as printed (p = 0.2)", "p = 1, N = 15"} <= set(names["ablation"].values())
    _, figure = drawn(results, "fig2")
    texts = [" ".join(text.get_text().split()) for text in figure.texts]
    assert notes["fig2"] in texts
    shown = tuple(each for each in results.experiments if each.name in ("fig2", "ablation"))
    write_report([replace(results, experiments=shown)], tmp_path / "report.html")
    page = unescape((tmp_path / "report.html").read_text())
    for experiment in shown:
        assert notes[experiment.name] in page
    assert "PAGE as printed (p = 0.2)" in page


def test_a_role_has_one_colour_in_all_figures(results: Results) -> None:
    roles: dict[str, set[str]] = {}
    for experiment in results.experiments:
        if experiment.name.startswith("fig"):
            for label, colour in colours_by_label(experiment).items():
                role = re.sub("^(Dec|Fed)-PAGE", "plain", re.sub("^(Dec)?Byz", "robust", label))
                roles.setdefault(role.replace("PAGE-PG K=1 α=0", "PAGE-PG K=1"), set()).add(colour)
    assert set(roles) == {
        *("PAGE-PG K=1", "plain-PG K=13 α=0", "plain-PG K=13 α=3/13"),
        *("robustPG K=13 α=3/13", "robustPG K=13", "robustPG K=5"),
        *("SVRPG K=1", "N-PG-IGT K=1", "FedPG-BR K=13 α=3/13", "FedPG-BR K=13 α=3/13, with a server"),
    }
    assert all(len(colours) == 1 for colours in roles.values())
    # The robust method with 13 agents is one, attacked or not. Lone peers are in figures without plain averaging.
    assert len(set.union(*roles.values())) == 6


def test_reach_by_number_of_agents_and_never(results: Results) -> None:
    experiment = next(each for each in results.experiments if each.name == "speedup")
    (panel,) = experiment.panels
    runs = dict(results.runs)
    runs[panel.cells[0].run] = with_returns(runs[panel.cells[0].run], np.zeros((3, 80)))
    figure = draw_experiment(experiment, runs)
    (axes,) = figure.axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    line = axes.lines[0]
    assert list(np.asarray(line.get_xdata())) == [cell.at for cell in panel.cells] == [1, 2, 3, 5, 8, 13, 25, 50, 100]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "3", "5", "8", "13", "25", "50", "100"]
    heights = y_of(line)
    end = runs[panel.cells[0].run].progress[-1]
    assert heights[0] > end
    assert [text.get_text() for text in axes.texts] == ["never"]
    np.testing.assert_allclose(heights[1:], [reach_estimate(runs[cell.run]).value for cell in panel.cells[1:]])
    bottom, top = axes.get_ylim()
    assert 0 < bottom < min(heights)
    assert top > heights[0]


@pytest.fixture(scope="module")
def joining() -> Results:
    """Runs that reach the level of 475 after a number of steps that is known for each seed, or never."""
    made = made_up(grid(["joining"], Scope(num_seeds=3, steps=100_000), CARTPOLE))
    runs = {}
    for name, result in made.runs.items():
        settings = result.settings
        learns = settings.algorithm != "Dec-PPO" or not settings.num_attackers
        slow = 2 if type(settings.attack).__name__ == "ALIE" else 1
        wanted = np.array([[0.8], [1.0], [1.2]]) * slow * 80_000 / settings.num_agents**0.5
        ends = np.arange(1000, 100_001, 1000.0)
        returns = np.where(learns & (ends >= wanted), 500.0, 20.0)
        runs[name] = replace(with_returns(result, returns), progress=ends)
    return replace(made, runs=runs)


def test_joining_is_drawn_next_to_a_single_agent_and_plain_averaging(joining: Results) -> None:
    (experiment,) = joining.experiments
    figure, colours = draw_experiment(experiment, joining.runs), colours_by_label(experiment)
    assert [colours[label] for label in ("PPO alone", "Dec-PPO")] == ["#000000", "#D55E00"]
    for axes, panel in zip(figure.axes, experiment.panels, strict=True):
        assert axes.get_title(loc="left") == f"{panel.title}: steps to 475"
        assert axes.get_ylabel() == "steps per agent"
        lines = {container.get_label(): container[0] for container in axes.containers}
        assert set(lines) == {"PPO alone", "DecByzPPO", "Dec-PPO"}
        # A window of 2,000 steps in cells of 1,000 is full of good returns one cell after the first of them.
        alone, together = y_of(lines["PPO alone"]), y_of(lines["DecByzPPO"])
        np.testing.assert_array_equal(alone, [81_000])
        slow = 2 if panel.title == "ALIE" else 1
        np.testing.assert_array_equal(together[-1], slow * 16_000 + 1000)
        plain = y_of(lines["Dec-PPO"])
        assert plain[0] < 100_000 < min(plain[1:])
        assert [text.get_text() for text in axes.texts] == ["never"] * 2
        (dotted,) = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert set(y_of(dotted)) == {81_000}


def test_how_many_times_sooner(joining: Results) -> None:
    (experiment,) = joining.experiments
    panel = next(panel for panel in experiment.panels if panel.title == "AvgZero")
    found = {(cell.label, cell.at): joining.runs[cell.run] for cell in panel.cells}
    alone = found["PPO alone", 1]
    many = saving(found["DecByzPPO", 25], alone, 475)
    assert many.value == 81 / 17
    # Resampled medians are those of the seeds: 65, 81 or 97 over 14, 17 or 21.
    assert 65 / 21 <= many.low < many.value < many.high <= 97 / 14
    never = found["Dec-PPO", 13]
    assert saving(never, alone, 475) == saving(never, never, 475) == Estimate(0, 0, 0)
    assert saving(alone, never, 475).value == np.inf
    # The mean over seeds is at the level once the slowest of the drawn seeds is.
    of_means = mean_saving(found["DecByzPPO", 25], alone, 475)
    assert of_means.value == 97 / 21
    assert 65 / 21 <= of_means.low < of_means.value < of_means.high <= 97 / 14
    assert mean_saving(never, alone, 475) == Estimate(0, 0, 0)
    coarse = replace(alone, progress=alone.progress[1::2], metrics={"return_mean": alone.returns[:2, 1::2]})
    assert mean_saving(found["DecByzPPO", 25], coarse, 475).value == mean_reaches(coarse, 475) / 21_000
    assert mean_saving(alone, never, 475).value == np.inf
    # Every row of the table takes resampling, so only some of the panels and sizes.
    few = tuple(
        replace(panel, cells=tuple(cell for cell in panel.cells if cell.at in (1, 2, 13, 25)))
        for panel in experiment.panels
        if panel.title in ("AvgZero", "ALIE")
    )
    table = reach_table(replace(experiment, panels=few), joining.runs)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows[0] == ("PPO alone", "1 (0)", "–", "81,000", "–", "97,000", "–")
    assert [row[:2] for row in rows[1:3]] == [("DecByzPPO", "2 (0)"), ("Dec-PPO", "2 (0)")]
    by_attack = {row[2]: row[3:] for row in rows if row[:2] == ("DecByzPPO", "25 (6)")}
    assert list(by_attack) == [panel.title for panel in few]
    assert by_attack["AvgZero"] == ("17,000", interval(many, ".1f"), "21,000", interval(of_means, ".1f"))
    assert by_attack["ALIE"][0] == "33,000"
    assert by_attack["ALIE"][1].startswith(f"{81 / 33:.1f} ")
    assert [row[3:] for row in rows if row[:2] == ("Dec-PPO", "13 (3)")] == [("never",) * 4] * 2


def test_tolerance_marks_the_tolerated_numbers(results: Results) -> None:
    experiment, figure = drawn(results, "tolerance")
    colours = colours_by_label(experiment)
    for axes, panel in zip(figure.axes, experiment.panels, strict=True):
        dotted = [line for line in axes.lines if line.get_linestyle() == ":"]
        bounds = {to_hex(line.get_color()): float(np.asarray(line.get_xdata())[0]) for line in dotted}
        robust = {label: colours[label].lower() for label in ("DecByzPG, f = 3", "ByzPG, f = 6")}
        assert bounds == dict(zip(robust.values(), (3.5, 6.5), strict=True))
        for container in axes.containers:
            cells = [cell for cell in panel.cells if cell.label == container.get_label()]
            line = container[0]
            assert [cell.at for cell in cells] == list(range(7))
            np.testing.assert_allclose(np.asarray(line.get_xdata()), np.arange(7), atol=0.2)
            finals = [float(interquartile_mean(final_returns(results.runs[cell.run]))) for cell in cells]
            np.testing.assert_allclose(y_of(line), finals)
        assert len(axes.containers) == 3


def test_agreement_leaves_out_what_has_no_rounds(results: Results) -> None:
    experiment, figure = drawn(results, "agreement")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    attacks = [panel.title for panel in experiment.panels]
    assert titles == [
        *(f"{each}: honest diameter" for each in attacks),
        *(f"{each}: return at the end" for each in attacks),
    ]
    for axes in figure.axes[:3]:
        assert axes.get_yscale() == "log"
        for container in axes.containers:
            np.testing.assert_allclose(np.asarray(container[0].get_xdata()), [1, 2, 3, 5, 8], atol=0.2)
            np.testing.assert_allclose(y_of(container[0])[:3], 0.125 * 0.1 ** np.array([1, 2, 3]), rtol=0.1)
            assert y_of(container[0])[-1] == 1e-7  # as close as float32 tells
    for axes in figure.axes[3:]:
        for container in axes.containers:
            np.testing.assert_allclose(np.asarray(container[0].get_xdata()), [0, 1, 2, 3, 5, 8], atol=0.2)


def test_heat_maps_hold_readable_numbers(results: Results) -> None:
    experiment, figure = drawn(results, "heatmap")
    (panel,) = experiment.panels
    rules = list(dict.fromkeys(cell.label for cell in panel.cells))
    attacks = list(dict.fromkeys(cell.at for cell in panel.cells))
    returns, weights = figure.axes
    for axes in (returns, weights):
        assert [text.get_text() for text in axes.get_yticklabels()] == rules
        assert [text.get_text() for text in axes.get_xticklabels()] == attacks
        assert axes.yaxis_inverted()
    for index, cell in enumerate(panel.cells):
        row, column = divmod(index, len(attacks))
        assert (rules[row], attacks[column]) == (cell.label, cell.at)
        result = results.runs[cell.run]
        assert returns.texts[index].get_text() == f"{np.mean(final_returns(result)):.0f}"
        weighs = type(result.settings.aggregator).__name__ in WEIGHING
        expected = f"{100 * np.mean(result.metrics['byzantine_weight']):.0f}" if weighs else "–"
        assert weights.texts[index].get_text() == expected
    figure.draw_without_rendering()
    faces = np.asarray(returns.collections[0].get_facecolor())[:, :3]
    for text, face in zip(returns.texts, faces, strict=True):
        ink = np.array([int(to_hex(text.get_color())[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert contrast(ink, face) > 4.5


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    """Of two colours in [0, 1]³ (WCAG 2)."""
    linear = [np.where(c <= 0.03928, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) for c in (one, other)]
    low, high = sorted(float(np.dot(c, (0.2126, 0.7152, 0.0722))) for c in linear)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.slow
def test_figures_are_saved_and_each_plot_stands_alone(tmp_path: Path, results: Results) -> None:
    _, figure = drawn(results, "fig1")
    for ending in ("png", "svg", "pdf"):
        save(figure, tmp_path / f"figure.{ending}")
        assert (tmp_path / f"figure.{ending}").stat().st_size > 10_000
    for experiment in results.experiments:
        made = plots(experiment, results.runs)
        assert len(made) == len(experiment.panels) * (2 if experiment.kind in ("heatmap", "agreement") else 1)
        together = draw_experiment(experiment, results.runs)
        (alone,) = made[-1].alone().axes
        assert [y_of(line).tolist() for line in alone.lines] == [
            y_of(line).tolist() for line in together.axes[-1].lines
        ]
    assert not pyplot.get_fignums()


# The page

OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
COLOURS_ON_PAGE = """() => {
  const back = getComputedStyle(document.body).backgroundColor;
  const seen = {};
  for (const name of ["p", "h2", "h3", "a", "caption", "thead th", "td", ".range", ".good", ".bad", "figcaption",
                      "summary", "nav a", "dt", "dd", "button"])
    seen[name] = getComputedStyle(document.querySelector(name)).color;
  seen["svg text"] = getComputedStyle(document.querySelector(".panel svg text")).fill;
  return [back, seen];
}"""
# Undoes what tests do to the theme and to details, for the next test.
AS_FOUND = """() => {
  delete document.documentElement.dataset.theme;
  for (const each of document.querySelectorAll("details")) each.open = false;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("the report is tested in a real browser, and there is none: apt-get install chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory, results: Results) -> Path:
    """All experiments with the tuned preset, and a figure with another one."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report([results, made_up(grid(["fig2"], Scope(preset="script", num_seeds=3)))], path)
    return path


@pytest.fixture(scope="module")
def pages(browser: Browser, page_path: Path) -> Iterator[Any]:
    """The page, once for each width and scheme: to lay it out takes the browser seconds. And what was heard of it."""
    requests: list[str] = []
    troubles: list[str] = []

    @cache
    def opened(width: int, scheme: Any) -> Page:
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(page_path.as_uri())
        page.wait_for_load_state("networkidle")
        return page

    yield opened, requests, troubles
    for context in browser.contexts:
        context.close()


@pytest.fixture
def open_page(pages: Any, page_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens the page; at the end, nothing may have gone wrong and nothing may have been asked for but the page."""
    opened, requests, troubles = pages
    used: list[Page] = []

    def open_it(width: int = 1280, scheme: str = "light") -> Page:
        used.append(opened(width, scheme))
        return used[-1]

    yield open_it
    for page in used:
        page.evaluate(AS_FOUND)
    found = troubles.copy()
    troubles.clear()
    assert not found
    assert {url for url in requests if not url.startswith("data:")} == {page_path.as_uri()}


def channels(colour: str) -> np.ndarray:
    return np.array([float(part) for part in re.findall(r"[\d.]+", colour)[:3]]) / 255


def test_nothing_overflows_and_every_figure_is_seen(open_page: Callable[..., Page]) -> None:
    for width in (360, 1280):
        page = open_page(width)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        wide = page.evaluate(
            "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .canvas, pre') "
            "&& e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"
        )
        assert wide == []
        boxes = page.evaluate(
            "[...document.querySelectorAll('svg[role=img]')].map(e => e.getBoundingClientRect())"
            ".map(box => [box.width, box.height])"
        )
        assert len(boxes) == 16 + 4 + 8 + 1 + 2 + 1 + 3 + 2 + 3 + 6 + 2 + 3
        assert np.all(np.array(boxes) > (280, 180))
        columns = page.evaluate(
            "new Set([...document.querySelectorAll('#tuned-fig2 .panel')]"
            ".map(e => e.getBoundingClientRect().left)).size"
        )
        assert columns == (1 if width == 360 else 3)
        letters = page.evaluate(
            "[...document.querySelectorAll('.panel svg text')]"
            ".map(e => [parseFloat(getComputedStyle(e).fontSize), e.getScreenCTM()])"
            ".map(([size, map]) => size * Math.hypot(map.a, map.b))"
        )
        assert min(letters) > 8.8  # pixels


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_theme_and_can_be_read(open_page: Callable[..., Page], scheme: str) -> None:
    page = open_page(scheme=scheme)
    back, seen = page.evaluate(COLOURS_ON_PAGE)
    assert (np.mean(channels(back)) > 0.5) == (scheme == "light")
    for name, colour in seen.items():
        assert contrast(channels(colour), channels(back)) >= 4.5, name
    page.click("#theme")
    other_back, others = page.evaluate(COLOURS_ON_PAGE)
    assert (np.mean(channels(other_back)) > 0.5) == (scheme == "dark")
    for name, colour in others.items():
        assert contrast(channels(colour), channels(other_back)) >= 4.5, name
    assert others["svg text"] != seen["svg text"]
    page.click("#theme")
    page.mouse.move(0, 700)  # off the button, which has a colour of its own then
    assert page.evaluate(COLOURS_ON_PAGE) == [back, seen]


def test_data_follow_the_theme(open_page: Callable[..., Page]) -> None:
    """The black line of one agent alone is light in the dark; no line of data is lost on the background."""
    for scheme in ("light", "dark"):
        page = open_page(scheme=scheme)
        back = channels(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        strokes = page.evaluate(
            "[...document.querySelectorAll('#tuned-fig2 .key path')].map(e => getComputedStyle(e).stroke)"
        )
        assert len(set(strokes)) == 6
        assert all(contrast(channels(stroke), back) > 2.2 for stroke in strokes)
        assert contrast(channels(strokes[0]), back) > 12
        lines = page.evaluate(
            "[...document.querySelectorAll('#tuned-fig2 .panel:first-child svg path')]"
            ".map(e => getComputedStyle(e).stroke)"
        )
        assert set(strokes) <= set(lines)
        picture = Image.open(BytesIO(page.locator("#tuned-fig2 .canvas svg").first.screenshot())).convert("RGB")
        close = np.max(np.abs(np.asarray(picture) / 255 - back), axis=-1) < 0.1
        assert np.mean(close) > 0.75  # the page shines through


def rows_of(page: Page, section: str) -> dict[tuple[str, str], list[str]]:
    """Of all tables in a section: by group and heading, the cells of a row."""
    rows = page.evaluate(
        """section => [...document.querySelectorAll(`${section} tbody tr, ${section} tfoot tr`)].map(row => [
             row.parentElement.querySelector("th[scope=rowgroup]")?.innerText || "",
             ...[...row.children].map(cell => cell.innerText.replace(/\\s+/g, " ").trim())])""",
        section,
    )
    return {(group, heading): cells for group, heading, *cells in rows if cells}


def test_tables_hold_the_numbers(open_page: Callable[..., Page]) -> None:
    page = open_page()
    published_rows = rows_of(page, "#tuned-published")
    assert page.locator("#tuned-published th[scope=row]").count() == 60
    how = "(momentum 0.8, Adam at the agents)"
    assert published_rows["Figure 2, AvgZero", f"DecByzPG K=13 α=3/13 {how}"] == [
        *("4,750", "300", "300 [300, 300]", "15.0× sooner; ends lower")
    ]
    assert published_rows["Figure 2, LargeNoise", f"Dec-PAGE-PG K=13 α=3/13 {how}"] == [
        *("never", "never", "never [never, never]", "neither reaches it")
    ]
    assert published_rows["Figure 3, AvgZero", f"DecByzPG K=13 α=3/13 {how}"] == ["1", "−30.0 ± 2.4", "−31"]
    assert published_rows["Figure 3, RandomAction", f"Dec-PAGE-PG K=13 α=3/13 {how}"][::2] == [
        "not visible",
        "ends higher",
    ]
    numbers = rows_of(page, "#tuned-fig2")
    assert numbers["AvgZero", "DecByzPG K=13 α=3/13 (p = 1)"] == [
        *("470 ± 8", "470 [460, 480]", "300 [300, 300]", "1.00 [1.00, 1.00]")
    ]
    assert numbers["All panels", "PAGE-PG K=1 α=0 (p = 1)"][3] == ""
    assert numbers["", "DecByzPG K=13 α=3/13, all attacks"][3] == "1.00 [1.00, 1.00]"
    assert len(numbers) == 2 + 3 * 3 + 2, "the last two rows are over all attacks"
    rules = rows_of(page, "#tuned-heatmap")
    assert len(rules) == len(HEATMAP_RULES)
    assert rules["", "Median"][-1] == "1.00 [1.00, 1.00]"
    assert rules["", "Mean"][-1] == ""
    page.click("#tuned-tolerance summary")
    attackers = rows_of(page, "#tuned-tolerance")
    assert ("ALIE", "DecByzPG, f = 3") in attackers
    assert page.locator("#tuned-tolerance tbody tr").count() == 3 * (1 + 7 * 3)
    assert page.locator("#script-fig2").count() == 1
    options = page.locator("table:has-text('differ from the paper')")
    tuned = dict(row.split("\t", 1) for row in options.first.inner_text().splitlines() if "\t" in row)
    assert tuned["Tanh on the outputs"] == "True\tFalse\tTrue\tFalse"
    assert tuned["aggregator"] == "RFA\tNNM(TrimmedMean())\tRFA\tNNM(TrimmedMean())"
    assert tuned["decay of the step size"] == "0.0\t0.9\t0.0\t0.7"
    assert "discount" not in tuned
    assert options.count() == 2
    for table in page.locator("table").all():
        assert table.locator("caption").count() == table.locator("thead").count() == 1


def test_the_page_says_how_to_reproduce_it_and_what_differs(open_page: Callable[..., Page]) -> None:
    page = open_page(360)
    page.click("#tuned-fig2 summary >> text=How to reproduce this")
    assert page.inner_text("#tuned-fig2 pre") == "byzpg reproduce all --directory 'my results'"
    made = page.inner_text("#tuned-fig2 details p")
    assert made == (
        "Python 3.12.3, byzpg 0.2.0, jax 0.10.2; Linux aarch64; a small device. All runs of this command took 84 s."
    )
    items = page.locator("section:has(#mismatches) li").all_inner_texts()
    items = [re.sub(r"\s+", " ", item) for item in items]
    assert (
        "Figure 2, AvgZero, DecByzPG K=13 α=3/13: a mean return of 475 by 250 trajectories per agent. Ours does "
        "not reach it by 600; 0 of 3 seeds do so in time." in items
    )
    assert (
        "Figure 2, AvgZero, DecByzPG K=13 α=3/13: the published mean ends at 489, ours at 470 ± 8 after 600 "
        "trajectories." in items
    )
    assert any("hurts plain averaging less here" in item for item in items)
    repeated = "Figure 2, LargeNoise, PAGE-PG K=1 α=0: the published mean ends at 483, ours at 498"
    assert any(item.startswith(repeated) for item in items), "a curve that is to be repeated may also end too high"
    caption = page.inner_text("#tuned-fig6 figcaption")
    assert "AvgZero: Fed-PAGE-PG K=13 α=3/13 leaves the axes, down to −900." in caption
    assert "leaves" not in page.inner_text("#tuned-fig3 figcaption")
    assert page.locator("figure figcaption").count() == page.locator("figure[aria-label]").count() == 17
    assert page.locator("svg[role=img]:not([aria-label])").count() == 0


def test_links_and_ids_are_sound(open_page: Callable[..., Page]) -> None:
    page = open_page()
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    targets = page.evaluate("[...document.querySelectorAll('a[href]')].map(e => e.getAttribute('href').slice(1))")
    within = page.evaluate("[...document.querySelectorAll('svg use')].map(e => e.href.baseVal.slice(1))")
    clips = re.findall(r"url\(#(\w+)\)", page.content())
    assert set(re.findall(r"var\((--c\d)\)", page.content())) == set(re.findall(r"(--c\d):", page.content()))
    assert targets
    assert within
    assert clips
    assert {*targets, *within, *clips} <= set(ids)


@pytest.mark.slow
def test_the_page_is_small_and_the_same_each_time(tmp_path: Path, page_path: Path, results: Results) -> None:
    assert page_path.stat().st_size < 2e6
    one = replace(
        results, experiments=tuple(each for each in results.experiments if each.name in ("fig1", "agreement"))
    )
    for name in ("first.html", "second.html"):
        write_report([one], tmp_path / name)
    assert (tmp_path / "first.html").read_bytes() == (tmp_path / "second.html").read_bytes()


@pytest.mark.slow
def test_files_of_one_preset_become_one_chapter(tmp_path: Path) -> None:
    scope = Scope(num_seeds=3, trajectories=2000)
    parts = [made_up(grid([name], scope)) for name in ("cartpole", "lunarlander")]
    write_report([*parts, parts[0]], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert text.count("<h2 id='tuned'>") == 1
    assert text.count("<section id='tuned-fig1'>") == 1
    assert text.index("tuned-fig4'>Figure 4") < text.index("tuned-fig6'>Figure 6")
    chapter = text[text.index("<section id='tuned-fig1'>") : text.index("<section id='tuned-fig2'>")]
    assert chapter.count("role='img'") == 2  # CartPole from one file, LunarLander from the other
    (merged,) = by_preset(parts)
    assert [panel.task for panel in merged.experiments["fig1"].panels] == [CARTPOLE, LUNARLANDER]
    longer = made_up(grid(["cartpole"], Scope(num_seeds=3, trajectories=3000)))
    with pytest.raises(ValueError, match=r"fig1 .* in two of these files with different runs"):
        write_report([parts[0], longer], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == text


def test_texts_are_no_markup(tmp_path: Path) -> None:
    made = made_up(grid(["fig1"], Scope(num_seeds=3)))
    (experiment,) = made.experiments
    odd = replace(experiment, title="<b>'title'</b>", question="<i>f < K & g</i>")
    provenance = {**PROVENANCE, "command": "byzpg <u>"}
    write_report([replace(made, experiments=(odd,), provenance=provenance)], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert not re.search("<[biu]>", text)
    assert "&lt;i&gt;f &lt; K &amp; g&lt;/i&gt;" in text
    assert "aria-label='&lt;b&gt;&#x27;title&#x27;&lt;/b&gt;'" in text
