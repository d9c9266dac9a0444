"""Results as pictures. Nothing here computes a result."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Write the picture whole or not at all; the format follows the path's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        figure.savefig(temporary, bbox_inches="tight", dpi=160)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    finally:
        pyplot.close(figure)
        Path(temporary).unlink(missing_ok=True)


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
