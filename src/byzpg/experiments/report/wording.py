"""How numbers, names and lists are written on the page."""

import re
from collections.abc import Callable, Iterable, Mapping
from html import escape
from math import inf, isfinite

import numpy as np

from byzpg.experiments.paper import Experiment
from byzpg.experiments.results import Result
from byzpg.experiments.statistics import mean_and_deviation, significant
from byzpg.experiments.summaries import Estimate, num_diverged


def spread(values: np.ndarray) -> str:
    if missing := num_diverged(values):
        return f"{missing} of {len(values)} diverged"
    return typeset(mean_and_deviation(values)).replace(" ", "\N{NO-BREAK SPACE}")


def with_interval(found: Estimate, write: Callable[[float], str]) -> str:
    return f"{write(found.value)} <span class='range'>[{write(found.low)}, {write(found.high)}]</span>"


def digits(value: float) -> str:
    return typeset(significant(value))


def whole(value: float) -> str:
    """A number whose decimals mean nothing, such as a published one, which was read off a plot."""
    return typeset(f"{round(value):,}")


def typeset(text: str) -> str:
    """Numbers with the sign for minus instead of a hyphen."""
    return text.replace("-", "−")


def count(value: float) -> str:
    return "never" if value == inf else f"{value:,.0f}"


def share(value: float) -> str:
    return f"{value:.2f}"


def percent(value: float) -> str:
    """A share in percent, without the sign."""
    return "–" if not isfinite(value) else "over 9,999" if value >= 100 else whole(100 * value)


def times(value: float) -> str:
    return "never" if value == inf else f"{value:.1f}×"


def small(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-") if value < 0.1 else f"{value:.2f}"


def large(value: float) -> str:
    return f"{value / 1e6:,.1f} M" if value >= 1e6 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def short_name(experiment: Experiment) -> str:
    return re.sub(r"^fig(\d+)$", r"Figure \1", experiment.name)


def heading(experiment: Experiment) -> str:
    name = short_name(experiment)
    return f"{name}. {experiment.title}" if name != experiment.name else experiment.title


def seeds_of(experiment: Experiment, runs: Mapping[str, Result]) -> str:
    counts = {len(runs[cell.run].returns) for panel in experiment.panels for cell in panel.cells}
    return (
        f"{min(counts)} to {max(counts)} seeds" if len(counts) > 1 else f"{min(counts)} seed{'s' * (min(counts) > 1)}"
    )


def bullets(items: Iterable[str]) -> str:
    entries = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul class='prose'>{entries}</ul>" if entries else ""
