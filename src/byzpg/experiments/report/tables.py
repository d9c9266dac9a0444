"""The tables of the report."""

from collections.abc import Mapping, Sequence
from html import escape
from math import inf, isfinite

import numpy as np

from byzpg.config import PAPER, Config, Settings
from byzpg.experiments.paper import CARTPOLE, LUNARLANDER, Cell, Experiment, Panel
from byzpg.experiments.report.frame import folded, row_of, table
from byzpg.experiments.report.wording import (
    count,
    digits,
    heading,
    seeds_of,
    share,
    short_name,
    small,
    spread,
    whole,
    with_interval,
)
from byzpg.experiments.results import Result
from byzpg.experiments.summaries import (
    LEVELS,
    Comparison,
    curve_names,
    estimate,
    estimates_apart,
    final_returns,
    improvement,
    level_of,
    mean_reaches,
    named,
    plain_rival,
    reach_estimate,
    returns_at,
    run_means,
)
from byzpg.federation.algorithms import ALGORITHMS

# The heading of `Cell.at`, by kind of experiment.
PLACES = {"reach": "K", "tolerance": "Attackers", "agreement": "κ"}
LONG_TABLE = 16  # rows; a longer table is folded
# The options that may differ between presets, and those of them that have no effect if all batches are large.
OPTIONS = {
    "optimizer": "optimizer",
    "adam_epsilon": "Adam's ε",
    "momentum": "momentum β",
    "step_size": "step size η",
    "decay": "decay of the step size",
    "large_batch": "large batch N",
    "small_batch": "small batch B",
    "switch_probability": "probability p of a large batch",
    "coins": "coins",
    "estimator": "estimator",
    "importance": "importance weights",
    "gate": "gate β",
    "conventions": "conventions",
    "activation": "activation",
    "output_tanh": "Tanh on the outputs",
    "aggregator": "aggregator",
    "agreement": "agreement",
    "rounds": "rounds κ",
    "output": "output",
}
OF_SMALL_BATCHES = ("small_batch", "coins", "importance", "gate")

Rivals = Mapping[tuple[Panel, Cell], Cell | None]


def options_table(found: Sequence[Comparison]) -> str:
    """The options in which the preset differs from the paper's table, by task."""
    robust: dict[str, Settings] = {}
    for each in found:
        if ALGORITHMS[each.result.settings.algorithm].robust:
            robust.setdefault(each.panel.task, each.result.settings)
    rows: dict[str, dict[str, tuple[str, str]]] = {}
    for task, ours in robust.items():
        paper = Config(env=task, algorithm=ours.algorithm, preset="paper").resolved().as_data()
        for option, value in ours.as_data().items():
            idle = ours.switch_probability == 1 and option in OF_SMALL_BATCHES
            if option in OPTIONS and value != paper[option] and not idle:
                rows.setdefault(option, {})[task] = f"{paper[option]}", f"{value}"
    if not rows:
        return ""
    head = ["Option", *(f"{task}, {who}" for task in robust for who in ("paper", "here"))]
    body = []
    for option, name in OPTIONS.items():
        if option in rows:
            pairs = [rows[option].get(task, ("", "the same")) for task in robust]
            body.append(row_of(escape(name), *(escape(value.removesuffix("()")) for pair in pairs for value in pair)))
    caption = "Options that differ from the paper's table."
    if any(settings.switch_probability == 1 for settings in robust.values()):
        caption += " With p = 1 all batches are large, and the PAGE correction is never used."
    return table(caption, head, {"": body})


def published_tables(found: Sequence[Comparison], anchors: Mapping[str, str]) -> str:
    """Every published curve next to ours, in a table per task; figures link to the anchors of their experiments."""
    tables = []
    reach = (
        f"CartPole: trajectories per agent until the mean curve reaches {LEVELS[CARTPOLE]:g}. The published curves "
        "were read at every 250th trajectory; a range means that another line hides the curve in between."
    )
    end = (
        "LunarLander: return at the end of our run, with the standard deviation over seeds, and the published one at "
        "the same number of trajectories per agent or, next to the tuned preset, whose runs are shorter, at its end."
    )
    for task, caption, cells, columns in (
        (CARTPOLE, reach, _reach_cells, ["Published", "Ours", "Ours, median over seeds [95 %]", "Ours is"]),
        (LUNARLANDER, end, _end_cells, ["Published", "Ours", "Difference"]),
    ):
        groups: dict[str, list[str]] = {}
        telling, common = estimates_apart([each.result.settings for each in found])
        for each, parts in zip(found, telling, strict=True):
            if each.panel.task == task:
                link = f"<a href='#{anchors[each.experiment.name]}'>{escape(short_name(each.experiment))}</a>"
                group = link if each.panel.title in caption else f"{link}, {escape(each.panel.title)}"
                groups.setdefault(group, []).append(row_of(escape(named(each.cell.label, parts)), *cells(each)))
        if common:
            caption += f" Ours: {common}. Published: p = {PAPER['switch_probability']:g}."
        tables += [table(caption, ["Method", *columns], groups)] if groups else []
    return "".join(tables)


def _reach_cells(each: Comparison) -> list[str]:
    (low, high), ours = each.published_reach(), mean_reaches(each.result, LEVELS[each.panel.task])
    hidden = high - low > 250
    theirs = f"{low:,.0f}–{high:,.0f}" if hidden and high < inf else count(high)
    if ours == high == inf:
        verdict = "neither reaches it"
    elif ours == inf or high == inf:
        verdict = "never" if ours == inf else "the only one"
    else:
        ratio = low / ours  # a lower bound, as the published curves were read at every 250th trajectory
        verdict = f"{ratio:.1f}× sooner" if ratio >= 1 else f"{1 / ratio:.1f}× later"
    verdict += "; ends lower" * each.ends_lower() + "; ends higher" * each.withstands_more()
    return [theirs, count(ours), with_interval(reach_estimate(each.result), count), _verdict(each, verdict)]


def _end_cells(each: Comparison) -> list[str]:
    theirs, ours = each.published_end(), returns_at(each.result, each.end)
    if not isfinite(theirs):
        return ["not visible", spread(ours), _verdict(each, "ends higher" if each.withstands_more() else "")]
    gap = round(float(np.mean(ours)) - theirs)
    return [whole(theirs), spread(ours), _verdict(each, "+" * (gap > 0) + whole(gap))]


def _verdict(each: Comparison, text: str) -> str:
    return f"<span class='{'good' if each.matches() else 'bad'}'>{escape(text)}</span>"


def numbers_table(experiment: Experiment, runs: Mapping[str, Result]) -> str:
    """The numbers of an experiment."""
    return _rules_table(experiment, runs) if experiment.kind == "heatmap" else _runs_table(experiment, runs)


def _runs_table(experiment: Experiment, runs: Mapping[str, Result]) -> str:
    """A row per run, and a row for all attacks together if a method was attacked in several panels."""
    cells = [(panel, cell) for panel in experiment.panels for cell in panel.cells]
    placed = experiment.kind in PLACES
    levels = all(panel.level is not None or panel.task in LEVELS for panel in experiment.panels)
    diameters = experiment.kind == "agreement"
    rivals = {(panel, cell): plain_rival(cell, panel, runs) for panel, cell in cells}
    names, _ = curve_names(experiment, runs)
    head = ["Method", *([PLACES[experiment.kind]] if placed else []), "Return at the end", "IQM [95 %]"]
    head += ["Diameter after"] * diameters
    if levels:
        told = dict.fromkeys(f"{level_of(panel):g}" for panel in experiment.panels)
        head.append(f"Until {' or '.join(told)} [95 %]")
    head += ["Beats plain averaging [95 %]"] * any(rivals.values())
    groups: dict[str, list[str]] = {}
    for (panel, cell), rival in rivals.items():
        shared = experiment.kind == "curves" and sum(other.run == cell.run for _, other in cells) > 1
        result, final = runs[cell.run], final_returns(runs[cell.run])
        row = [escape(names[cell.label]), *([f"{cell.at}"] if placed else [])]
        row += [spread(final), with_interval(estimate(final), digits)]
        if diameters:
            means = run_means(result, "diameter_after")
            row.append("–" if means is None else small(float(np.mean(means))))
        if levels:
            row.append(with_interval(reach_estimate(result, level_of(panel)), count))
        if any(rivals.values()):
            row.append(with_interval(improvement(final, final_returns(runs[rival.run])), share) if rival else "")
        group = groups.setdefault("All panels" if shared else escape(panel.title), [])
        if row_of(*row) not in group:  # several panels may share a run
            group.append(row_of(*row))
    attacked = [] if placed else [group for group in _attacked(rivals).values() if len(group) > 1]
    foot = [_pooled_row(group, rivals, runs, levels) for group in attacked]
    numbers = table(f"{heading(experiment)} ({seeds_of(experiment, runs)})", head, groups, foot)
    length = sum(map(len, groups.values()))
    if length > LONG_TABLE:
        return folded(f"All numbers ({length} rows)", numbers)
    return numbers


def _attacked(rivals: Rivals) -> dict[str, list[tuple[Panel, Cell]]]:
    """The cells that have a rival, by label."""
    groups: dict[str, list[tuple[Panel, Cell]]] = {}
    for (panel, cell), rival in rivals.items():
        if rival:
            groups.setdefault(cell.label, []).append((panel, cell))
    return groups


def _pooled_row(group: Sequence[tuple[Panel, Cell]], rivals: Rivals, runs: Mapping[str, Result], levels: bool) -> str:
    """The row of a method under several attacks, which are the strata."""
    ours = [final_returns(runs[cell.run]) for _, cell in group]
    theirs = [final_returns(runs[rival.run]) for each in group if (rival := rivals[each])]
    row = [f"{escape(group[0][1].label)}, all attacks", spread(np.concatenate(ours))]
    row += [with_interval(estimate(ours), digits)] + [""] * levels
    return row_of(*row, with_interval(improvement(ours, theirs), share))


def _rules_table(experiment: Experiment, runs: Mapping[str, Result]) -> str:
    """A row per rule, over all attacks."""
    head = ["Rule", "Return at the end", "IQM [95 %]", "Worst attack", "Return under it", "Beats Mean [95 %]"]
    (panel,) = experiment.panels
    finals = {cell: final_returns(runs[cell.run]) for cell in panel.cells}
    rows = []
    for label in dict.fromkeys(cell.label for cell in panel.cells):
        ours = [cell for cell in panel.cells if cell.label == label]
        pairs = [(cell, rival) for cell in ours if (rival := plain_rival(cell, panel, runs))]
        worst = min(ours, key=lambda cell: float(np.mean(finals[cell])))
        all_ours = [finals[cell] for cell in ours]
        wins = (
            improvement([finals[cell] for cell, _ in pairs], [finals[rival] for _, rival in pairs]) if pairs else None
        )
        row = [escape(label), spread(np.concatenate(all_ours)), with_interval(estimate(all_ours), digits)]
        row += [escape(str(worst.at)), digits(float(np.mean(finals[worst])))]
        rows.append(row_of(*row, with_interval(wins, share) if wins else ""))
    return table(
        f"{heading(experiment)} (all attacks together, {seeds_of(experiment, runs)})",
        head,
        {"": rows},
    )
