"""Figures as elements of the page."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO

import numpy as np
from matplotlib import pyplot
from matplotlib.lines import Line2D

from byzpg.experiments.figures import COLOURS, GRID, INK, MUTED, RETURN_RANGES, Plot, legend_handles, plots
from byzpg.experiments.paper import Experiment
from byzpg.experiments.report.wording import digits, seeds_of
from byzpg.experiments.results import Result
from byzpg.experiments.summaries import curve_names, window_of


def figure(experiment: Experiment, runs: Mapping[str, Result], anchor: str) -> str:
    """All plots of an experiment with one legend; the anchor keeps their ids apart from those of other figures."""
    drawn = plots(experiment, runs)
    shape = "wide" if experiment.kind == "heatmap" else "pair" if len(drawn) in (1, 2, 4) else ""
    caption = f"{_caption(experiment, runs)} {curve_names(experiment, runs)[1]}".rstrip()
    return panels(experiment.title, drawn, legend_handles(experiment, runs), caption, anchor, shape)


def panels(
    title: str, drawn: Sequence[Plot], legend: Mapping[str, Line2D], caption: str, anchor: str, shape: str = ""
) -> str:
    """Plots side by side, with a legend above and a caption below them."""
    made = []
    for number, plot in enumerate(drawn):
        svg = _svg(plot, f"{anchor}-{number}")
        made.append(f"<div class='panel'><p class='name'>{escape(plot.title)}</p><div class='canvas'>{svg}</div></div>")
    return (
        f"<figure aria-label='{escape(title)}'>{_key(legend)}<div class='panels {shape}'>"
        f"{''.join(made)}</div><figcaption>{escape(caption)}</figcaption></figure>"
    )


def _key(legend: Mapping[str, Line2D]) -> str:
    items = []
    for label, line in legend.items():
        dashes = " stroke-dasharray='5 3'" if line.is_dashed() else ""
        stroke = _themed(f"stroke: {line.get_color()}")
        path = f"<path d='M0 4H26' style='{stroke}' stroke-width='2.4'{dashes}/>"
        items.append(f"<li><svg viewBox='0 0 26 8' aria-hidden='true'>{path}</svg>{escape(label)}</li>")
    return f"<ul class='key'>{''.join(items)}</ul>" if items else ""


def _caption(experiment: Experiment, runs: Mapping[str, Result]) -> str:
    seeds = seeds_of(experiment, runs)
    match experiment.kind:
        case "curves":
            text = f"Training return of honest agents: mean and one standard deviation over {seeds}."
            if any(panel.published for panel in experiment.panels):
                text += " Dashed lines in the same colours are the published means."
            for panel in experiment.panels:
                for cell in panel.cells:
                    lowest = float(np.min(np.mean(runs[cell.run].returns, axis=0)))
                    if panel.task in RETURN_RANGES and lowest < RETURN_RANGES[panel.task][0]:
                        text += f" {panel.title}: {cell.label} leaves the axes, down to {digits(lowest)}."
            return text
        case "reach":
            one = runs[experiment.panels[0].cells[0].run]
            return (
                f"Median over {seeds} with 95 % bootstrap intervals. Returns are means over {window_of(one):,} "
                f"{one.settings.unit}. Dotted: a single agent."
            )
        case "tolerance":
            return f"Interquartile mean over {seeds} of the last tenth of training, with 95 % bootstrap intervals."
        case "heatmap":
            return f"Means over {seeds}. A dash means that the rule does not weight agents."
        case "agreement":
            return (
                f"Interquartile means over {seeds} with 95 % bootstrap intervals. The diameter is averaged over the "
                "whole run, the return over its last tenth. With κ = 0 there are no rounds and no diameter after them."
            )


def _themed(text: str) -> str:
    """Replace the colours of the figures by variables of the page, so that they follow its theme."""
    tones = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"}
    for colour, variable in (tones | {colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)}).items():
        text = re.sub(colour, variable, text, flags=re.IGNORECASE)
    return text


def _svg(plot: Plot, salt: str) -> str:
    """A plot as an element of the page, without metadata and unused ids, and with short numbers."""
    buffer = BytesIO()
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10.5}):
        plot.alone().savefig(buffer, format="svg", facecolor="none")
    svg = buffer.getvalue().decode()
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"#(\w+)[\")]", svg))
    svg = re.sub(r' id="([\w.]+)"', lambda found: found[0] if found[1] in used else "", svg)
    svg = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--sans)", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    start = svg.index("<svg")
    box = re.search(r'viewBox="[^"]+"', svg)
    assert box
    opening = f"<svg {box[0]} role='img' aria-label='{escape(plot.description)}'>"
    return _themed(opening + svg[svg.index(">", start) + 1 :])
