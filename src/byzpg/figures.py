"""Results as pictures. Nothing here computes a result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from PIL import Image

from byzpg.files import write_atomically
from byzpg.statistics import bootstrap_interval, interquartile_mean, smooth_on_grid

# Told apart with any colour vision (Okabe & Ito 2008); their yellow, too pale for lines, is left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")


def save(figure: Figure, path: Path) -> None:
    """Write the picture; the format follows the path's ending."""
    picture_format = path.suffix.removeprefix(".")
    try:
        write_atomically(path, lambda file: figure.savefig(file, format=picture_format, bbox_inches="tight", dpi=160))
    finally:
        pyplot.close(figure)


def save_animation(frames: Sequence[np.ndarray], path: Path) -> None:
    """Write pictures [height, width, 3] as a GIF of half their size, every second one, at 25 a second."""
    first, *rest = (Image.fromarray(frame).reduce(2).quantize(32) for frame in frames[::2])
    write_atomically(path, lambda file: first.save(file, "GIF", save_all=True, append_images=rest, duration=40, loop=0))


def constants_heatmap(constants: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Measured constants by rule (rows) and attack (columns) on a logarithmic colour scale."""
    rules, attacks = list(constants), list(next(iter(constants.values())))
    # Below 0.01 the result is the honest mean for all purposes; above 100 the rule has been broken.
    values = [[min(max(constants[rule][attack], 1e-2), 1e2) for attack in attacks] for rule in rules]
    figure, axes = pyplot.subplots(figsize=(1.6 + 0.72 * len(attacks), 1.4 + 0.34 * len(rules)))
    picture = axes.imshow(values, norm=LogNorm(1e-2, 1e2), cmap="RdYlGn_r", aspect="auto")
    for row, rule in enumerate(rules):
        for column, attack in enumerate(attacks):
            axes.text(column, row, short_number(constants[rule][attack]), ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(attacks)), attacks, rotation=35, ha="right")
    axes.set_yticks(range(len(rules)), rules)
    axes.tick_params(length=0)
    axes.set_title(title, fontsize=11)
    figure.colorbar(picture, label="C_ra (green: close to the honest mean)", pad=0.02)
    return figure


def short_number(value: float) -> str:
    """A few characters: at most two significant digits below 100, one from 10,000 on."""
    if value < 0.005:
        return "0"
    if value >= 1e4:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


@dataclass(frozen=True, eq=False)
class Curve:
    """The returns of one method's runs over the trajectories each agent sampled."""

    label: str
    trajectories: np.ndarray  # [iteration], running total per agent
    returns: np.ndarray  # [seed, iteration]


def learning_curves(
    curves: Sequence[Curve], title: str, *, reference_level: float | None = None, reference_name: str = "reference"
) -> Figure:
    """Mean ± one standard deviation over seeds; beside it, from 3 seeds on, the interquartile mean and its interval."""
    if not curves:
        raise ValueError("learning_curves needs at least one curve.")
    repeated = [curve for curve in curves if len(curve.returns) >= 3]
    columns = 2 if repeated else 1
    size = (2 + 4 * columns, 4)
    figure, panels = pyplot.subplots(1, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    left, right = panels[0, 0], panels[0, -1]
    # Beyond one round of colours, the dashes tell curves apart.
    styles = ((colour, dashes) for dashes in cycle(("-", "--", ":", "-.")) for colour in COLOURS)
    for curve, (colour, dashes) in zip(curves, styles, strict=False):
        grid, returns = _cells(curve)
        mean, deviation = np.mean(returns, axis=0), np.std(returns, axis=0)
        left.fill_between(grid, mean - deviation, mean + deviation, color=colour, alpha=0.16, linewidth=0)
        left.plot(grid, mean, color=colour, linestyle=dashes, label=curve.label)
        if curve in repeated:
            right.fill_between(
                grid, *bootstrap_interval(returns, interquartile_mean), color=colour, alpha=0.16, linewidth=0
            )
            right.plot(grid, interquartile_mean(returns), color=colour, linestyle=dashes, label=curve.label)
    left.set_title(f"mean ± one standard deviation, {_seeds(curves)}", fontsize=10, loc="left")
    if repeated:
        right.set_title(f"interquartile mean, 95 % bootstrap interval, {_seeds(repeated)}", fontsize=10, loc="left")
    for axes in panels[0]:
        if reference_level is not None:
            name = f"{reference_name}: {reference_level:g}"
            axes.axhline(reference_level, color="0.45", linewidth=1, linestyle="--", zorder=1, label=name)
        axes.set_xlabel("trajectories per agent")
        axes.set_xlim(0, max(curve.trajectories[-1] for curve in curves))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(color="0.92", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("return (mean over honest agents)")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    handles, labels = left.get_legend_handles_labels()
    fitting = int(size[0] / (0.6 + 0.07 * max(map(len, labels))))  # in inches: a handle, a letter
    figure.legend(handles, labels, loc="outside lower center", ncols=min(max(fitting, 1), 4), frameon=False, fontsize=9)
    return figure


def _seeds(curves: Sequence[Curve]) -> str:
    """How many runs a picture rests on: 10 seeds, or 3 to 10 seeds."""
    counts = [len(curve.returns) for curve in curves]
    fewest, most = min(counts), max(counts)
    return f"{fewest} seed{'s' * (fewest > 1)}" if fewest == most else f"{fewest} to {most} seeds"


def _cells(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """The curve on an even grid [cell] of at most 100 cells: as fine as the eye needs, with the noise averaged out."""
    trajectories = np.asarray(curve.trajectories, float)
    grid = np.linspace(0, trajectories[-1], min(100, len(trajectories)) + 1)[1:]
    grid = grid[grid >= trajectories[0]]
    return grid, smooth_on_grid(trajectories, curve.returns, grid)
