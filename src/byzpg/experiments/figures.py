"""Results as figures. This module trains nothing, and takes every number from `summaries` and `statistics`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import cycle
from math import ceil, inf
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from byzpg._files import write_atomically
from byzpg.experiments.paper import CARTPOLE, LUNARLANDER, Experiment, Panel, published_curves
from byzpg.experiments.rates import Measured, Rates
from byzpg.experiments.results import Result
from byzpg.experiments.statistics import (
    bootstrap_interval,
    even_grid,
    interquartile_mean,
    significant,
    smooth_on_grid,
)
from byzpg.experiments.summaries import (
    Estimate,
    curve_names,
    estimate,
    final_returns,
    level_of,
    reach_estimate,
    run_means,
)

# Distinct for every kind of colour vision (Okabe & Ito 2008). Their yellow is too pale for lines: the last is by Tol.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#882255")
# The three tones of everything that is not data. Nothing else uses them, so that a page can replace them by its own.
INK, MUTED, GRID = "#1A1B1C", "#737475", "#EAEBEC"
STYLE: dict[Any, Any] = {
    "axes.facecolor": "none",
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
}


def save(figure: Figure, path: Path) -> None:
    """Write a figure and close it. The suffix of the path is the format; a .png is reduced to 256 colours."""
    file_format = path.suffix.removeprefix(".")
    drawn = BytesIO()
    # A .png is compressed again below.
    quickly: dict[str, Any] = {"pil_kwargs": {"compress_level": 1}} if file_format == "png" else {}
    try:
        figure.savefig(drawn, format=file_format, bbox_inches="tight", dpi=160, **quickly)
    finally:
        pyplot.close(figure)
    if file_format == "png":
        image, drawn = Image.open(drawn).convert("RGB").quantize(256), BytesIO()
        image.save(drawn, "PNG")
    write_atomically(path, lambda file: file.write(drawn.getvalue()))


def save_animation(frames: Sequence[np.ndarray], path: Path) -> None:
    """Write frames [height, width, 3] as a GIF: every second frame at half its size, 25 frames per second."""
    first, *rest = (Image.fromarray(frame).reduce(2).quantize(32) for frame in frames[::2])
    write_atomically(path, lambda file: first.save(file, "GIF", save_all=True, append_images=rest, duration=40, loop=0))


def constants_heatmap(constants: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Measured constants by rule (rows) and attack (columns) on a logarithmic colour scale."""
    rules, attacks = list(constants), list(next(iter(constants.values())))
    # Below 0.01 the aggregate is practically the honest mean; above 100 the rule is broken.
    values = np.clip([[constants[rule][attack] for attack in attacks] for rule in rules], 1e-2, 1e2)
    norm, colours = LogNorm(1e-2, 1e2), matplotlib.colormaps["RdYlGn_r"]
    figure, axes = pyplot.subplots(figsize=(1.6 + 0.72 * len(attacks), 1.4 + 0.34 * len(rules)))
    image = axes.imshow(values, norm=norm, cmap=colours, aspect="auto")
    for row, rule in enumerate(rules):
        for column, attack in enumerate(attacks):
            ink = _ink_on(colours(norm(values[row, column])))
            text = short_number(constants[rule][attack])
            axes.text(column, row, text, color=ink, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(attacks)), attacks, rotation=35, ha="right")
    axes.set_yticks(range(len(rules)), rules)
    axes.tick_params(length=0)
    axes.set_title(title, fontsize=11)
    figure.colorbar(image, label="C_ra (green: close to the honest mean)", pad=0.02)
    return figure


def _ink_on(colour: Sequence[float]) -> str:
    """The colour of text on a cell of a heat map: white where the cell is dark (luma of ITU-R BT.601)."""
    return "#FFFFFF" if np.dot(colour[:3], (0.299, 0.587, 0.114)) < 0.5 else "#101010"


def short_number(value: float) -> str:
    """A number in a few characters: at most two significant digits below 100, and one from 10,000 on."""
    if value < 0.005:
        return "0"
    if value >= 1e4:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


@dataclass(frozen=True, eq=False)
class Curve:
    """The returns of one method over the trajectories or steps of each agent."""

    label: str
    progress: np.ndarray  # [seed, iteration], running total per agent, or [iteration] if all seeds share it
    returns: np.ndarray  # [seed, iteration]


def learning_curves(
    curves: Sequence[Curve],
    title: str,
    *,
    subtitle: str = "",
    reference_level: float | None = None,
    reference_name: str = "reference",
    what: str = "return (mean over honest agents)",
    unit: str = "trajectories",
) -> Figure:
    """Plot learning curves: mean ± one standard deviation and, from 3 seeds on, the interquartile mean beside it.

    Args:
        curves: The curves, in the order of the legend.
        title: The title of the figure.
        subtitle: A line below the title: what all curves have in common.
        reference_level: A return to mark with a horizontal line.
        reference_name: The name of that line in the legend.
        what: The label of the vertical axis.
        unit: What the curves' progress counts.
    """
    if not curves:
        raise ValueError("learning_curves needs at least one curve.")
    repeated = [curve for curve in curves if len(curve.returns) >= 3]
    columns = 2 if repeated else 1
    size = (2 + 4 * columns, 4)
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(1, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
        left, right = panels[0, 0], panels[0, -1]
        # Once all colours are used, dashes distinguish the curves.
        styles = ((colour, dashes) for dashes in cycle(("-", "--", ":", "-.")) for colour in COLOURS)
        for curve, (colour, dashes) in zip(curves, styles, strict=False):
            grid, returns = _cells(curve)
            look = {"color": colour, "linestyle": dashes, "label": curve.label}
            _draw_mean(left, grid, returns, **look)
            if curve in repeated:
                interval = bootstrap_interval(returns, interquartile_mean)
                _draw_band(right, grid, interquartile_mean(returns), *interval, **look)
        if any(len(curve.returns) > 1 for curve in curves):
            left.set_title(f"mean ± one standard deviation, {_seeds(curves)}", fontsize=10, loc="left")
        if repeated:
            right.set_title(f"interquartile mean, 95 % bootstrap interval, {_seeds(repeated)}", fontsize=10, loc="left")
        for axes in panels[0]:
            if reference_level is not None:
                name = f"{reference_name}: {reference_level:g}"
                axes.axhline(reference_level, color=MUTED, linewidth=1, linestyle="--", zorder=1, label=name)
            _over_progress(axes, max(np.max(curve.progress) for curve in curves), unit)
        left.set_ylabel(what)
        _head(figure, title, subtitle)
        _legend(figure, *left.get_legend_handles_labels())
    return figure


def dots(values: Mapping[str, np.ndarray], title: str, what: str) -> Figure:
    """Plot a row per label: a dot per seed [seed], a stroke at their mean, and the mean as a number."""
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(7, 1.1 + 0.3 * len(values)), layout="constrained")
        largest = max(
            (float(np.max(np.abs(each))) for each in values.values() if np.all(np.isfinite(each))), default=0.0
        )
        for row, each in enumerate(values.values()):
            known = each[np.isfinite(each)]
            look: dict[str, Any] = {"color": COLOURS[0], "linestyle": "none"}
            axes.plot(known, np.full(len(known), row), marker="o", alpha=0.45, markersize=5, markeredgewidth=0, **look)
            if len(known):
                axes.plot(np.mean(known), row, marker="|", markersize=15, markeredgewidth=2.2, **look)
            mean = significant(float(np.mean(each)), largest)
            shown = mean if len(known) == len(each) else f"{len(each) - len(known)} diverged"
            axes.annotate(shown, (1.02, row), xycoords=("axes fraction", "data"), va="center", fontsize=9)
        axes.set_yticks(range(len(values)), list(values), fontsize=9)
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.set_xlabel(what)
        axes.margins(x=0.04)
        _tidy(axes)
        axes.set_title(title, fontsize=12, fontweight="bold", loc="left")
    return figure


def _draw_band(
    axes: Axes, x: np.ndarray, middle: np.ndarray, low: np.ndarray, high: np.ndarray, color: str, **look: object
) -> None:
    """Draw a line and the band around it."""
    # Fewer points are enough for the band, which is pale; bands make up half the size of a page.
    few = np.unique(np.append(np.arange(0, len(x), 1 + len(x) // 100), len(x) - 1))
    axes.fill_between(x[few], low[few], high[few], color=color, alpha=0.16, linewidth=0)
    axes.plot(x, middle, color=color, **look)  # pyright: ignore[reportArgumentType]


def _draw_mean(axes: Axes, x: np.ndarray, returns: np.ndarray, color: str, **look: object) -> None:
    """Draw the mean ± one standard deviation over seeds."""
    mean, deviation = np.mean(returns, axis=0, dtype=float), np.std(returns, axis=0, dtype=float)
    _draw_band(axes, x, mean, mean - deviation, mean + deviation, color, **look)


def _over_progress(axes: Axes, end: float, unit: str = "trajectories") -> None:
    axes.set_xlabel(f"{unit} per agent")
    axes.set_xlim(0, end)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _head(figure: Figure, title: str, subtitle: str) -> None:
    """Draw the title and, in plain letters, the line below it."""
    lines = wrap(subtitle, int(14 * figure.get_figwidth()), break_on_hyphens=False)
    # The empty lines of the title keep this place free.
    figure.suptitle(title + "\n" * len(lines), fontsize=12.5, fontweight="bold")
    look: dict[str, Any] = {"fontsize": 9, "ha": "center", "va": "top", "linespacing": 1.4}
    figure.text(0.5, 1 - 0.27 / figure.get_figheight(), "\n".join(lines), **look)


def _legend(figure: Figure, handles: Sequence[Line2D], labels: Sequence[str]) -> None:
    """Draw one legend for all panels, below them, in as many columns as fit."""
    fitting = int(figure.get_figwidth() / (0.6 + 0.07 * max(map(len, labels))))  # in inches: a handle, a letter
    columns = min(max(fitting, 1), 5)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _seeds(curves: Sequence[Curve]) -> str:
    """The number of seeds behind some curves: 10 seeds, or 3 to 10 seeds."""
    counts = [len(curve.returns) for curve in curves]
    fewest, most = min(counts), max(counts)
    return f"{fewest} seed{'s' * (fewest > 1)}" if fewest == most else f"{fewest} to {most} seeds"


def _cells(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """The curve on an even grid of at most 100 cells, which averages out some of the noise."""
    grid = even_grid(curve.progress, 100)
    return grid, smooth_on_grid(curve.progress, curve.returns, grid)


# Experiments

# Colours of labels that mean the same in several figures. Other labels take the colours that are left, in order.
KNOWN_COLOURS = {
    r"PAGE-PG K=1( |$)|PPO alone": "#000000",  # a single agent
    r".+-PAGE-PG .*α=0": "#009E73",  # plain averaging, all honest
    r".+-PAGE-PG|Dec-PPO": "#D55E00",  # plain averaging under attack
    r".+PG K=5": "#56B4E9",
}
# The vertical axis of each task, which also fits the published curves.
RETURN_RANGES = {CARTPOLE: (0.0, 515.0), LUNARLANDER: (-400.0, 300.0)}
PUBLISHED_DASHES = (0, (3.5, 2.0))
# The diameter of perfect agreement: float32 cannot resolve smaller differences between parameters of size 1.
LEAST_DIAMETER = 1e-7
PANEL_SIZE = (4.1, 3.1)  # inches


@dataclass(frozen=True)
class Plot:
    """One pair of axes of an experiment, not drawn yet."""

    title: str
    description: str  # for people who cannot see it
    draw: Callable[[Axes], None]
    size: tuple[float, float] = PANEL_SIZE

    def alone(self) -> Figure:
        """Draw it as a figure of its own, without its title."""
        with pyplot.rc_context(STYLE):
            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure.subplots())
        return figure


def colours_by_label(experiment: Experiment) -> dict[str, str]:
    """The colour of every line of an experiment, the same in all its panels."""
    labels = list(dict.fromkeys(cell.label for panel in experiment.panels for cell in panel.cells))
    known = {label: [c for pattern, c in KNOWN_COLOURS.items() if re.match(pattern, label)] for label in labels}
    taken = {matching[0] for matching in known.values() if matching}
    free = cycle([colour for colour in COLOURS if colour not in taken])
    return {label: matching[0] if matching else next(free) for label, matching in known.items()}


def plots(experiment: Experiment, runs: Mapping[str, Result]) -> list[Plot]:
    """The plots of an experiment."""
    colours, (names, _) = colours_by_label(experiment), curve_names(experiment, runs)

    def of_panel(panel: Panel) -> list[Plot]:
        who = ", ".join(dict.fromkeys(names[cell.label] for cell in panel.cells))
        given = {"panel": panel, "runs": runs, "colours": colours}
        final = Plot(
            f"{panel.title}: return at the end",
            f"{panel.title}: interquartile mean of the return over the last tenth of training, for {who}.",
            partial(_draw_final, **given),
        )
        match experiment.kind:
            case "curves":
                beside = " Dashed lines are the published curves." if panel.published else ""
                unit = runs[panel.cells[0].run].settings.unit
                about = f"{panel.title}: return over {unit} per agent, mean and standard deviation, for {who}."
                return [Plot(panel.title, about + beside, partial(_draw_curves, **given))]
            case "reach":
                level, unit = level_of(panel), runs[panel.cells[0].run].settings.unit
                about = (
                    f"{panel.title}: median {unit} per agent until a return of {level:g}, by number of agents, for "
                    f"{who}."
                )
                return [Plot(f"{panel.title}: {unit} to {level:g}", about, partial(_draw_reach, **given))]
            case "tolerance":
                about = f"{panel.title}: return at the end by number of attackers, for {who}."
                return [Plot(panel.title, about, partial(_draw_tolerance, **given))]
            case "agreement":
                about = f"{panel.title}: mean diameter of honest parameters after κ agreement rounds, for {who}."
                diameter = Plot(f"{panel.title}: honest diameter", about, partial(_draw_diameters, **given))
                return [diameter, final]
            case "heatmap":
                rows, columns = _axes_of_table(panel)
                size = (2.4 + 0.56 * len(columns), 1.5 + 0.36 * len(rows))
                task = f"{panel.title}: "
                return [
                    Plot(
                        f"{task}return at the end",
                        f"{task}mean return over the last tenth of training, by rule and attack.",
                        partial(_draw_heatmap, panel=panel, runs=runs, metric="return"),
                        size,
                    ),
                    Plot(
                        f"{task}weight of the attackers, %",
                        f"{task}mean weight of the attackers' gradients in percent, by rule and attack.",
                        partial(_draw_heatmap, panel=panel, runs=runs, metric="weight"),
                        size,
                    ),
                ]

    # One kind after the other, so that plots of one kind are side by side.
    return [plot for same_kind in zip(*map(of_panel, experiment.panels), strict=True) for plot in same_kind]


def legend_handles(experiment: Experiment, runs: Mapping[str, Result]) -> dict[str, Line2D]:
    """The legend of an experiment, by the name of a line; a heat map has none."""
    if experiment.kind == "heatmap":
        return {}
    names, _ = curve_names(experiment, runs)
    handles = {names[label]: Line2D([], [], color=colour) for label, colour in colours_by_label(experiment).items()}
    if any(panel.published for panel in experiment.panels):
        handles["published"] = Line2D([], [], color=MUTED, linestyle=PUBLISHED_DASHES, linewidth=1.1)
    return handles


def draw_experiment(experiment: Experiment, runs: Mapping[str, Result]) -> Figure:
    """Draw all plots of an experiment in one figure, with one legend."""
    drawn = plots(experiment, runs)
    columns = 1 if experiment.kind == "heatmap" else 2 if len(drawn) == 4 else min(len(drawn), 3)
    rows = ceil(len(drawn) / columns)
    width, height = drawn[0].size
    with pyplot.rc_context(STYLE):
        figure = Figure(figsize=(columns * width, rows * height + 0.9), layout="constrained")
        for number, plot in enumerate(drawn, start=1):
            axes = figure.add_subplot(rows, columns, number)
            plot.draw(axes)
            axes.set_title(plot.title, fontsize=10.5, loc="left")
        _head(figure, experiment.title, curve_names(experiment, runs)[1])
        if handles := legend_handles(experiment, runs):
            _legend(figure, list(handles.values()), list(handles))
    return figure


def _draw_curves(axes: Axes, panel: Panel, runs: Mapping[str, Result], colours: Mapping[str, str]) -> None:
    curves = published_curves(*panel.published) if panel.published else {}
    for cell in panel.cells:
        result, colour = runs[cell.run], colours[cell.label]
        if cell.label in curves:
            look = {"linestyle": PUBLISHED_DASHES, "linewidth": 1.1, "zorder": 1.5}
            axes.plot(*curves[cell.label], color=colour, label=f"{cell.label}, published", **look)
        _draw_mean(axes, result.progress, result.returns, colour, label=cell.label, linewidth=1.6)
    _over_progress(
        axes, max(runs[cell.run].progress[-1] for cell in panel.cells), runs[panel.cells[0].run].settings.unit
    )
    means = np.concatenate([np.mean(runs[cell.run].returns, axis=0) for cell in panel.cells])
    _return_axis(axes, panel, spread=float(np.ptp(means)))


def _return_axis(axes: Axes, panel: Panel, spread: float = inf) -> None:
    """The axis of the task, unless the values differ too little to be told apart on it."""
    axes.set_ylabel("return")
    if panel.task in RETURN_RANGES and spread > 0.05 * np.ptp(RETURN_RANGES[panel.task]):
        axes.set_ylim(*RETURN_RANGES[panel.task])


def _lines(panel: Panel) -> dict[str, list[tuple[int, str]]]:
    """The line of each label: its places, and the runs there."""
    lines: dict[str, list[tuple[int, str]]] = {}
    for cell in panel.cells:
        assert isinstance(cell.at, int)
        lines.setdefault(cell.label, []).append((cell.at, cell.run))
    return {label: sorted(points) for label, points in lines.items()}


def _draw_points(
    axes: Axes, panel: Panel, colours: Mapping[str, str], find: Callable[[str], Estimate | None], dodge: float = 0.09
) -> None:
    """Draw a line of estimates with intervals per label; lines are shifted sideways so that none hides another."""
    lines = _lines(panel)
    for number, (label, points) in enumerate(lines.items()):
        known = [(at, each) for at, run in points if (each := find(run)) is not None]
        if known:
            x = np.array([at + dodge * (number - (len(lines) - 1) / 2) for at, _ in known])
            value, low, high = np.array([(each.value, each.low, each.high) for _, each in known]).T
            look = {"marker": "os^D"[number % 4], "markersize": 4.5, "capsize": 2.5, "color": colours[label]}
            axes.errorbar(x, value, (value - low, high - value), label=label, **look)
    places = sorted({at for points in lines.values() for at, _ in points})
    axes.set_xticks(places, [f"{at}" for at in places])
    if dodge:
        axes.set_xlim(places[0] - 0.4, places[-1] + 0.7)  # room for a bound to the right of the last place
    _tidy(axes)


def _draw_final(axes: Axes, panel: Panel, runs: Mapping[str, Result], colours: Mapping[str, str]) -> None:
    _draw_points(axes, panel, colours, lambda run: estimate(final_returns(runs[run])))
    axes.set_xlabel("agreement rounds κ")
    _return_axis(axes, panel)


def _draw_diameters(axes: Axes, panel: Panel, runs: Mapping[str, Result], colours: Mapping[str, str]) -> None:
    def diameter(run: str) -> Estimate | None:
        means = run_means(runs[run], "diameter_after")
        return None if means is None else estimate(np.maximum(means, LEAST_DIAMETER))

    _draw_points(axes, panel, colours, diameter)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-").replace("e+00", ""))
    axes.set_xlabel("agreement rounds κ")
    axes.set_ylabel("diameter after agreement")


def _draw_tolerance(axes: Axes, panel: Panel, runs: Mapping[str, Result], colours: Mapping[str, str]) -> None:
    _draw_points(axes, panel, colours, lambda run: estimate(final_returns(runs[run])))
    for cell in {cell.label: cell for cell in panel.cells}.values():
        if tolerated := runs[cell.run].settings.num_byzantine:
            axes.axvline(tolerated + 0.5, color=colours[cell.label], linestyle=":", linewidth=1.4)
    axes.set_xlabel("number of attackers (dotted line: f)")
    _return_axis(axes, panel)


def _draw_reach(axes: Axes, panel: Panel, runs: Mapping[str, Result], colours: Mapping[str, str]) -> None:
    found = {cell.run: reach_estimate(runs[cell.run], level_of(panel)) for cell in panel.cells}
    never = {cell.at for cell in panel.cells if found[cell.run].value == inf}
    # Runs that never reach the level are drawn at the top, above the longest run.
    top = (1.4 if never else 1) * max(runs[cell.run].progress[-1] for cell in panel.cells)

    def shown(run: str) -> Estimate:
        each = found[run]
        return Estimate(min(each.value, top), min(each.low, top), min(each.high, top))

    axes.set_xscale("log")
    axes.set_yscale("log")
    _draw_points(axes, panel, colours, shown, dodge=0)
    for cell in panel.cells:
        if cell.at == 1 and found[cell.run].value < inf:  # where joining others begins to pay
            axes.axhline(found[cell.run].value, color=colours[cell.label], linestyle=":", linewidth=1.1)
    axes.xaxis.minorticks_off()
    for place in never:
        axes.annotate("never", (float(place or 0), top), (0, 6), textcoords="offset points", ha="center", fontsize=9)
    lowest = min(each.low for each in found.values())
    axes.set_ylim(0.7 * min(lowest, top), 1.3 * top if never else None)
    axes.set_xlabel("number of agents K")
    axes.set_ylabel(f"{runs[panel.cells[0].run].settings.unit} per agent")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter(_few_labels)


def _few_labels(value: float, _: object) -> str:
    """The labels 2, 3 and 5 between powers of ten, which may be all there is on an axis."""
    return f"{value:,.0f}" if f"{value:e}"[0] in "235" else ""


def _axes_of_table(panel: Panel) -> tuple[list[str], list[str]]:
    """The rows and columns of a heat map."""
    rows = dict.fromkeys(cell.label for cell in panel.cells)
    return list(rows), list(dict.fromkeys(str(cell.at) for cell in panel.cells))


def _draw_heatmap(axes: Axes, panel: Panel, runs: Mapping[str, Result], metric: str) -> None:
    rows, columns = _axes_of_table(panel)
    values = np.full((len(rows), len(columns)), np.nan)
    for cell in panel.cells:
        result = runs[cell.run]
        each = final_returns(result) if metric == "return" else run_means(result, "byzantine_weight")
        if each is not None:
            values[rows.index(cell.label), columns.index(str(cell.at))] = np.mean(each) * (
                1 if metric == "return" else 100
            )
    settings = runs[panel.cells[0].run].settings
    # Attackers that the rule takes for honest get their share. Twice that share has the darkest colour.
    span = (0.0, 200 * settings.num_attackers / settings.num_agents)
    norm = Normalize(*(RETURN_RANGES.get(panel.task, (None, None)) if metric == "return" else span))
    norm.autoscale_None(values[np.isfinite(values)])
    colours = matplotlib.colormaps["viridis" if metric == "return" else "magma_r"]
    axes.set_facecolor(GRID)  # the colour of cells without a number
    axes.pcolormesh(values, norm=norm, cmap=colours, edgecolors=GRID, linewidth=0.8)
    largest = float(np.max(np.abs(values[np.isfinite(values)]), initial=0))
    for (row, column), value in np.ndenumerate(values):
        known = bool(np.isfinite(value))
        ink = _ink_on(colours(norm(value))) if known else MUTED
        text = f"{value:.0f}" if known and metric == "weight" else significant(float(value), largest)
        axes.text(column + 0.5, row + 0.5, text, color=ink, ha="center", va="center", fontsize=9)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


# Audits


def curves_by_colour(title: str, curves: Mapping[str, Curve], level: float, lowest: float, unit: str) -> Plot:
    """Learning curves with a dotted line at a level. The axes end at `lowest`: a diverged run would hide the rest."""

    def draw(axes: Axes) -> None:
        for colour, curve in curves.items():
            _draw_mean(axes, curve.progress, curve.returns, colour, label=curve.label, linewidth=1.6)
        axes.axhline(level, color=MUTED, linestyle=":", linewidth=1.1, zorder=1)
        _over_progress(axes, max(curve.progress[-1] for curve in curves.values()), unit)
        axes.set_ylabel("return")
        axes.set_ylim(bottom=max(axes.get_ylim()[0], lowest))

    who = ", ".join(curve.label for curve in curves.values())
    return Plot(title, f"{title}: return over {unit} per agent, mean and standard deviation, for {who}.", draw)


def lost_by_attackers(title: str, lost: Mapping[int, Estimate], bound: int) -> Plot:
    """The share of learning that is lost by the number of attackers, with a dotted line behind the bound f."""

    def draw(axes: Axes) -> None:
        numbers = list(lost)
        value, low, high = 100 * np.array([(each.value, each.low, each.high) for each in lost.values()]).T
        errors = np.maximum((value - low, high - value), 0)
        axes.errorbar(numbers, value, errors, color=COLOURS[1], marker="o", markersize=4.5, capsize=2.5)
        axes.axvline(bound + 0.5, color=MUTED, linestyle=":", linewidth=1.4)
        axes.set_xticks(numbers)
        axes.set_xlim(numbers[0] - 0.4, max(numbers[-1], bound + 0.5) + 0.4)
        axes.set_ylim(min(0, float(np.min(low))) - 4, max(100, float(np.max(high))) + 4)
        axes.set_xlabel("number of attackers (dotted line: f)")
        axes.set_ylabel("learning lost, %")
        _tidy(axes)

    about = f"{title}: share of the learning that is lost, by number of attackers, with f = {bound}."
    return Plot(title, about, draw)


# Rates

# The panels of trajectories against ε: the methods in each, by label.
RATE_PANELS: dict[str, Sequence[str]] = {
    "Large batches alone (p = 1) and PAGE": (
        "p = 1, K = 1",
        "p = 1, K = 16",
        "PAGE, K = 1",
        "PAGE, K = 16, all agents",
    ),
    "Who samples the small batches of PAGE": (
        "PAGE, K = 1",
        "PAGE, K = 4, server alone",
        "PAGE, K = 4, all agents",
        "PAGE, K = 16, server alone",
        "PAGE, K = 16, all agents",
    ),
    "α = 1/8: 2 of 16 agents attack (ALIE)": tuple(
        f"{algorithm}, {name}, α = 1/8" for algorithm in ("ByzPG", "DecByzPG") for name in ("p = 1", "PAGE")
    ),
    "α = 3/13: 3 of 13 agents attack (ALIE)": tuple(
        f"{algorithm}, {name}, α = 3/13" for algorithm in ("ByzPG", "DecByzPG") for name in ("p = 1", "PAGE")
    ),
}


def draw_rates(rates: Rates) -> Figure:
    """Draw trajectories against ε with fitted and theoretical slopes, and what κ rounds of agreement leave."""
    with pyplot.rc_context(STYLE):
        figure = Figure(figsize=(13.5, 8.6), layout="constrained")
        panels = figure.subplots(2, 3).ravel()
        measured = {each.label: each for each in rates.methods}
        for axes, (title, labels) in zip(panels, RATE_PANELS.items(), strict=False):
            shown = [measured[label] for label in labels if label in measured and len(measured[label].epsilons)]
            _draw_methods(axes, shown)
            axes.set_title(title, fontsize=10.5, loc="left")
        last = {"honest diameter after agreement": rates.diameters, "mean ‖∇J‖² of honest agents": rates.floors}
        for axes, (what, values) in zip(panels[len(RATE_PANELS) :], last.items(), strict=True):
            _draw_over_rounds(axes, rates.rounds, values, what)
            axes.set_title("κ rounds of agreement (3 of 13 equivocate)", fontsize=10.5, loc="left")
        figure.suptitle(
            "Trajectories per agent until the mean of ‖∇J‖² so far is at most ε² (95 % intervals over seeds)",
            fontsize=12.5,
            fontweight="bold",
        )
    return figure


def _draw_methods(axes: Axes, methods: Sequence[Measured]) -> None:
    for number, each in enumerate(methods):
        colour, x, y = COLOURS[number % len(COLOURS)], each.epsilons, each.trajectories
        found = [each.estimate(at) for at in range(len(x))]
        top = 4 * np.max(y)  # an interval may reach to infinity
        errors = ([one.value - one.low for one in found], [min(one.high, top) - one.value for one in found])
        label = each.label
        if len(x) > 1:
            fit = each.fit()
            label += f": {fit.value:.1f} [{fit.low:.1f}, {fit.high:.1f}], theory {each.slope:.0f}".replace("-", "−")
            theory = np.exp(np.mean(np.log(y))) * (x / np.exp(np.mean(np.log(x)))) ** each.slope
            axes.plot(x, theory, color=colour, linestyle=":", linewidth=1.1)
        # Later lines are thinner, so that of two equal ones both are seen.
        look: dict[str, Any] = {
            "marker": "os^Dv"[number % 5],
            "markersize": 7 - number,
            "linewidth": 2.8 - 0.45 * number,
        }
        axes.errorbar(x, y, errors, color=colour, capsize=2.5, elinewidth=1.2, label=label, **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    places = sorted({float(x) for each in methods for x in each.epsilons})
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel("ε (dotted: the slope of the theory)")
    axes.set_ylabel("trajectories per agent")
    _tidy(axes)
    if methods:
        # Above the lines, which fall from the left to the right.
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** (0.1 + 0.075 * len(methods)))
        axes.legend(frameon=False, fontsize=7.8, loc="upper right", title="fitted slope", title_fontsize=7.8)


def _draw_over_rounds(axes: Axes, rounds: np.ndarray, values: np.ndarray, what: str) -> None:
    found = [estimate(np.maximum(each, LEAST_DIAMETER), np.mean) for each in values if np.all(np.isfinite(each))]
    known = [k for k, each in zip(rounds, values, strict=True) if np.all(np.isfinite(each))]
    middle = np.array([each.value for each in found])
    errors = np.array([[each.value - each.low for each in found], [each.high - each.value for each in found]])
    axes.errorbar(known, middle, errors, color=COLOURS[0], marker="o", markersize=4.5, capsize=2.5, label="measured")
    if len(known):
        guide = middle[0] * 2.0 ** -(np.asarray(known) - known[0])
        axes.plot(known, guide, color=MUTED, linestyle=":", label="halved by every round, 2^−κ")
    axes.set_yscale("log")
    axes.set_xlabel("agreement rounds κ")
    axes.set_ylabel(what)
    _tidy(axes)
    axes.legend(frameon=False, fontsize=9)
