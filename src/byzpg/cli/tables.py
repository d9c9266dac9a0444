"""The tables that several commands print. Their numbers are defined in `byzpg.experiments.summaries`."""

from collections.abc import Mapping, Sequence
from math import inf, isnan
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from byzpg import envs
from byzpg.cli.console import say
from byzpg.cli.labels import method
from byzpg.experiments.paper import Cell, Experiment, Panel
from byzpg.experiments.rates import Rates, comparisons
from byzpg.experiments.results import Result, Results
from byzpg.experiments.statistics import lower_median, mean_and_deviation, significant
from byzpg.experiments.summaries import (
    Estimate,
    attacker_weight,
    best_return,
    curve_names,
    estimates_apart,
    final_returns,
    level_of,
    mean_reaches,
    mean_saving,
    named,
    num_diverged,
    saving,
    trajectories_to_level,
)
from byzpg.runs import Run

TITLE, OVER_SEEDS = "Return of honest agents", " (mean ± standard deviation over seeds)"
LAST_TENTH, BEST, SOLVED, WEIGHT = "last tenth", "best", "solved at", "attackers' weight"
MEANINGS = {
    LAST_TENTH: "mean return over the last tenth of training",
    BEST: "highest point of the mean learning curve",
    SOLVED: "trajectories, or with a critic steps, per agent until solved (median over seeds)",
    WEIGHT: "their share of the aggregated gradient",
}


def runs_table(runs: Mapping[Path, Run], *, with_paths: bool) -> Table:
    """A row per run; with paths, also where each run is and how far it has come."""
    telling, common = estimates_apart([run.settings for run in runs.values()])
    several = any(run.settings.num_seeds > 1 for run in runs.values())
    table = summary_table(["method"], [LAST_TENTH, BEST, SOLVED, WEIGHT], common, several_seeds=several)
    for (path, run), parts in zip(runs.items(), telling, strict=True):
        result = Result.of(run)
        name = escape(named(method(run.settings), parts))
        if with_paths:
            name += f"\n[dim]{escape(str(path))}\n{np.max(run.progress):,} {run.settings.unit} per agent[/dim]"
        table.add_row(
            name,
            spread(final_returns(result)),
            significant(best_return(result)),
            _solved_at(result),
            percent(attacker_weight(result)),
        )
    return table


def experiments_table(results: Results) -> Table:
    """A row per run of every experiment."""
    notes = {experiment.name: curve_names(experiment, results.runs) for experiment in results.experiments}
    common = dict.fromkeys(note for _, note in notes.values())
    table = summary_table(["experiment", "panel", "run"], [LAST_TENTH, BEST, WEIGHT], "\n".join(common))
    for experiment in results.experiments:
        names, _ = notes[experiment.name]
        for panel in experiment.panels:
            for cell in panel.cells:
                result = results.runs[cell.run]
                label = names[cell.label] if cell.at is None else f"{names[cell.label]}: {cell.at}"
                table.add_row(
                    experiment.name,
                    panel.title,
                    escape(label),
                    spread(final_returns(result)),
                    significant(best_return(result)),
                    percent(attacker_weight(result)),
                )
    return table


def reach_table(experiment: Experiment, runs: Mapping[str, Result]) -> Table:
    """When each run reaches the level, and how many times sooner than a single agent."""
    unit = runs[experiment.panels[0].cells[0].run].settings.unit
    levels = " or ".join(dict.fromkeys(f"{level_of(panel):g}" for panel in experiment.panels))
    table = _plain_table(f"{experiment.name}: {unit} per agent until a return of {levels}")
    for column in ("run", "K", "attack", "median", "times sooner", "mean", "times sooner"):
        table.add_column(column, justify="left" if column in ("run", "attack") else "right", no_wrap=column == "attack")
    table.padding = (0, 1, 0, 0)
    table.caption_justify = "left"
    table.caption = (
        "K: number of agents (attackers)\n"
        "median: over seeds (how many get there); mean: where the mean curve over seeds gets there\n"
        "times sooner: than a single agent \\[95 % interval]"
    )
    rows: dict[str, tuple[Cell, Panel]] = {}
    for panel in experiment.panels:
        for cell in panel.cells:
            rows.setdefault(cell.run, (cell, panel))  # without attackers, all panels have the same run
    places = list(dict.fromkeys((cell.label, cell.at) for panel in experiment.panels for cell in panel.cells))
    alone = next((runs[cell.run] for cell, _ in rows.values() if cell.at == 1), None)
    for cell, panel in sorted(rows.values(), key=lambda row: places.index((row[0].label, row[0].at))):
        result, level = runs[cell.run], level_of(panel)
        savings = [of(result, alone, level) for of in (saving, mean_saving)] if alone and cell.at != 1 else [None, None]
        attackers = result.settings.num_attackers
        table.add_row(
            escape(cell.label),
            f"{cell.at} ({attackers})",
            panel.title if attackers else "–",
            _median_reach(result, level),
            _factor(savings[0]),
            _count(mean_reaches(result, level)),
            _factor(savings[1]),
        )
    return table


def _factor(saved: Estimate | None) -> str:
    """How many times sooner; it is 0 if a run never reaches the level."""
    if saved is None:
        return "–"
    return interval(saved, ".1f") if saved.value else "never"


def _median_reach(result: Result, level: float) -> str:
    """When half the seeds have reached a level, and how many reach it if not all do."""
    reached = trajectories_to_level(result, level)
    there = int(np.sum(np.isfinite(reached)))
    share = f" ({there} of {len(reached)})" if 0 < there < len(reached) else ""
    return _count(float(lower_median(reached))) + share


def _count(value: float) -> str:
    return "never" if value == inf else f"{value:,.0f}"


def rates_tables(rates: Rates) -> list[Table]:
    """The slope of every method, the trajectories it takes, how methods compare, κ, and the noise of corrections.

    Stuck are the seeds that end on a plateau at the least ε.
    """
    slopes = _plain_table("Trajectories per agent until the mean of ‖∇J‖² so far is at most ε² [95 % interval]")
    for column in ("method", "ε", "slope", "theory", "factor for ε/2", "at the least ε", "stuck"):
        slopes.add_column(column)
    for each in rates.methods:
        if not len(each.epsilons):
            slopes.add_row(each.label, "none reached")
            continue
        several = len(each.epsilons) > 1
        slopes.add_row(
            each.label,
            f"{each.epsilons[0]:g} to {each.epsilons[-1]:g}",
            interval(each.fit()) if several else "–",
            f"{each.slope:g}",
            interval(each.factor()) if several else "–",
            interval(each.estimate(-1), ",.0f"),
            f"{each.stuck[-1]}",
        )
    compared = _plain_table("Comparisons [95 % interval]")
    for column in ("what", "measured", "theory"):
        compared.add_column(column)
    for what, found, theory in comparisons(rates):
        compared.add_row(what, interval(found), theory)
    agreement = _plain_table("κ rounds of agreement: the last half of a run with 3 of 13 agents equivocating")
    for column in ("κ", "honest diameter", "mean ‖∇J‖²"):
        agreement.add_column(column, justify="right")
    for rounds, diameter, floor in zip(rates.rounds, rates.diameters, rates.floors, strict=True):
        agreement.add_row(f"{rounds}", f"{np.mean(diameter):.2g}", f"{np.mean(floor):.2g}")
    noises = _plain_table("Variance of one trajectory's correction over that of its gradient; PAGE pays below (B/N)²")
    noises.add_column("step")
    noises.add_column("noise", justify="right")
    for label, noise in rates.noises.items():
        noises.add_row(label, f"{noise:.3g}")
    return [slopes, compared, agreement, noises]


def interval(estimate: Estimate, form: str = ".2f") -> str:
    """A number and its interval."""
    return f"{estimate.value:{form}} \\[{estimate.low:{form}}, {estimate.high:{form}}]"


def _plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)


def summary_table(
    names: Sequence[str], numbers: Sequence[str], common: str = "", *, several_seeds: bool = True
) -> Table:
    """An empty table with columns of names and of numbers, which explains its numbers and what runs have in common."""
    known = [f"{column}: {MEANINGS[column]}" for column in numbers if column in MEANINGS]
    known += [escape(common)] if common else []
    # Without borders, the longest names fit into 80 columns.
    table = _plain_table(TITLE + OVER_SEEDS * several_seeds)
    table.padding = (0, 1, 0, 0)
    table.caption, table.caption_justify = "\n".join(["", *known]), "left"
    for column in names:
        table.add_column(column, overflow="fold")
    for column in numbers:
        # On a narrow terminal, names are folded and numbers are not.
        narrow = column == WEIGHT
        table.add_column(column, justify="right", max_width=len("attackers'") if narrow else None, no_wrap=not narrow)
    return table


def report_diverged(seeds: Sequence[int], where: object, advice: str = "") -> None:
    """Name the seeds of a run whose parameters are no longer finite."""
    if seeds:
        say(f"Diverged: seed {', '.join(map(str, seeds))} of {where}. {advice}".rstrip())


def spread(values: np.ndarray) -> str:
    """Mean ± standard deviation of one number per seed [seed], or how many diverged."""
    if missing := num_diverged(values):
        return "diverged" if missing == len(values) else f"{missing} of {len(values)} diverged"
    return mean_and_deviation(values)


def percent(share: float) -> str:
    """A share in percent; a dash for NaN."""
    return "–" if isnan(share) else f"{share:.1%}"


def _solved_at(result: Result) -> str:
    threshold = envs.make(result.settings.env).reward_threshold
    if threshold is None:
        return "–"
    reached = trajectories_to_level(result, threshold)
    solved = int(np.sum(np.isfinite(reached)))
    if not solved:
        return "never"
    share = f"{solved} of {len(reached)}"
    median = float(lower_median(reached))
    if not np.isfinite(median):
        return f"{share} seeds"
    return f"{median:,.0f}" if solved == len(reached) else f"{median:,.0f} ({share})"
