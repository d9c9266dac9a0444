"""Finished experiments as one page that needs nothing but itself: figures, tables, and what does not match."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib.resources import files
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from byzpg._files import write_atomically
from byzpg.experiments.paper import EXPERIMENTS, Experiment
from byzpg.experiments.report.drawings import figure
from byzpg.experiments.report.tables import numbers_table, options_table, published_tables
from byzpg.experiments.report.wording import bullets, duration, heading, large, short_name, spread, whole
from byzpg.experiments.results import Result, Results
from byzpg.experiments.summaries import LEVELS, WINDOW, Comparison, Goal, comparisons, goals, mean_reaches, returns_at

PRESETS = {
    "tuned": "our choice of options, the one that learns fastest and the default of the command line",
    "paper": "the options of the paper's table",
    "theory": "the options for which convergence is proven",
    "script": "the options of the published script, as far as they could be found out",
}
DIFFERENCES = (
    "The tuned preset is not the paper's table; its options are listed above. Its curves say how fast the method can "
    "learn, not what the paper measured.",
    "The published script is not the paper's table either. Its step size on CartPole is 5e-4 and not 5e-3, its hidden "
    "layers have Tanh, its reference parameters are taken after the update, so that importance weights are 1 or, once "
    "a trajectory is long, 0, and its agreement stops by looking at the agents' true parameters. All ten seeds of a "
    "published figure share one θ₀ and one sequence of large and small batches. The script preset repeats this, but "
    "for the oracle (a fixed number of rounds instead) and, under LargeNoise, for a coin that attackers shift.",
    "In the script's runs of ByzPG every worker samples small batches; here, as in the paper, the server does it "
    "alone, so that lies reach large batches only.",
    "LunarLander is Gymnasium's v3, rebuilt in JAX; the paper used v2, whose physics are the same.",
    "Published numbers are read off the plots, with an error of about ±3 on CartPole and ±2 on LunarLander. Where one "
    "line hides another, or leaves the axes, there is no number. The spread over published seeds is not known.",
)
GUIDE = {
    "Return at the end": "of the last tenth of training, undiscounted, averaged over honest agents: mean ± one "
    "standard deviation over seeds.",
    "IQM": "its interquartile mean: without the best and the worst quarter of the seeds.",
    "Until 450": "trajectories per agent until the return of the last "
    f"{WINDOW} is at that level (LunarLander: 200), median over seeds. Never: not within the run.",
    "Beats plain averaging": "the probability that a run ends above one of plain averaging under the same attack.",
    "[Brackets]": "95 % intervals, bootstrapped over seeds; of several attacks together, within each attack.",
}
TOGGLE = """
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
});
"""


def write_report(results: Sequence[Results], path: Path) -> None:
    """All experiments of these results as one HTML file; those of one name and preset become one."""
    text = _page(by_preset(results))
    write_atomically(path, lambda file: file.write(text.encode()))


@dataclass
class Chapter:
    """All results of one preset."""

    preset: str
    experiments: dict[str, Experiment] = field(default_factory=dict)
    runs: dict[str, Result] = field(default_factory=dict)
    made_by: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)  # provenance, by experiment

    def comparisons(self) -> list[Comparison]:
        return list(comparisons(list(self.experiments.values()), self.runs))

    def goals(self) -> list[Goal]:
        return list(goals(self.comparisons()))

    def anchor(self, name: str) -> str:
        return f"{self.preset}-{name}"


def by_preset(results: Sequence[Results]) -> list[Chapter]:
    """Results of several files put together: an experiment's panels may come from different ones."""
    chapters: dict[str, Chapter] = {}
    for each in results:
        for experiment in each.experiments:
            preset = each.runs[experiment.panels[0].cells[0].run].settings.preset
            chapter = chapters.setdefault(preset, Chapter(preset))
            chapter.runs |= {cell.run: each.runs[cell.run] for panel in experiment.panels for cell in panel.cells}
            before = chapter.experiments.setdefault(experiment.name, experiment)
            panels = tuple(dict.fromkeys((*before.panels, *experiment.panels)))
            if len({(panel.title, panel.task) for panel in panels}) < len(panels):
                raise ValueError(
                    f"{experiment.name} (preset {preset}) is in two of these files with different runs, of other seeds "
                    "or lengths: leave one of them out."
                )
            chapter.experiments[experiment.name] = replace(before, panels=panels)
            chapter.made_by.setdefault(experiment.name, []).append(each.provenance)
    for chapter in chapters.values():
        found = chapter.experiments
        chapter.experiments = {name: found[name] for name in (*EXPERIMENTS, *found) if name in found}
    return [chapters[preset] for preset in PRESETS if preset in chapters]


# The page


def _page(chapters: Sequence[Chapter]) -> str:
    body = [_top(chapters), "<main>", _contents(chapters), _guide()]
    for chapter in chapters:
        body += [
            f"<h2 id='{chapter.preset}'>Preset {chapter.preset}</h2>",
            f"<p>Where an experiment does not say otherwise, runs use {escape(PRESETS[chapter.preset])}.</p>",
            options_table(chapter.comparisons()),
            _published(chapter),
            *(_experiment(chapter, experiment) for experiment in chapter.experiments.values()),
        ]
    body += [_mismatches(chapters), "</main>", "<footer>Written by <code>byzpg</code> from the numbers alone.</footer>"]
    css = (files("byzpg.experiments.report") / "page.css").read_text()
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<title>byzpg: experiments</title>\n<link rel='icon' href='data:,'>\n"
        f"<style>\n{css}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>{TOGGLE}</script>\n</body>\n</html>\n"
    )


def _top(chapters: Sequence[Chapter]) -> str:
    runs = [result for chapter in chapters for result in chapter.runs.values()]
    found = [goal for chapter in chapters for goal in chapter.goals()]
    compared = [each for chapter in chapters for each in chapter.comparisons()]
    made = {id(each): each for chapter in chapters for several in chapter.made_by.values() for each in several}
    seconds = sum(each.get("seconds") or 0 for each in made.values())
    facts = {
        "training runs": f"{sum(len(result.returns) for result in runs):,}",
        "trajectories": large(sum(_sampled(result) for result in runs)),
    }
    if seconds:
        facts["of training, all runs together"] = duration(seconds)
    if found:
        facts["goals met"] = f"{sum(goal.met() for goal in found)} of {len(found)}"
    if compared:
        matched = sum(each.matches() for each in compared)
        facts["published curves met or beaten"] = f"{matched} of {len(compared)}"
    strip = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"""<header class='top'>
<button id='theme' type='button' aria-label='switch between light and dark'>light / dark</button>
<h1>Federated policy gradients with Byzantine agents, reproduced</h1>
<p class='lead'>Agents learn one policy together and exchange nothing but vectors. Some of them lie. Every figure below
compares learning that withstands lies with plain averaging and with one agent alone, first on the experiments of the
paper, then beyond them, next to what the paper reports.</p>
<p class='cite'>The method and the published curves: P. Jordan, F. Grötschla, F. X. Fan, R. Wattenhofer, “Decentralized
Federated Policy Gradient with Byzantine Fault-Tolerance and Provably Fast Convergence”, AAMAS 2024, arXiv 2401.03489.
The runs: byzpg.</p>
<dl class='strip'>{strip}</dl>
</header>"""


def _sampled(result: Result) -> float:
    """Trajectories of all seeds and agents, counted as if every agent sampled in every iteration."""
    return result.trajectories[-1] * len(result.returns) * result.settings.num_agents


def _contents(chapters: Sequence[Chapter]) -> str:
    groups = []
    for chapter in chapters:
        titles = {"published": "Published against ours"} if chapter.comparisons() else {}
        titles |= {name: heading(experiment) for name, experiment in chapter.experiments.items()}
        links = [f"<li><a href='#{chapter.anchor(name)}'>{escape(title)}</a></li>" for name, title in titles.items()]
        link = f"<a href='#{chapter.preset}'>Preset {chapter.preset}</a>"
        groups.append(f"<li class='group'>{link}<ol>{''.join(links)}</ol></li>")
    last = "<li><a href='#mismatches'>What does not match, and why</a></li>"
    return f"<nav aria-label='contents'><h2>Contents</h2><ol>{''.join(groups)}{last}</ol></nav>"


def _guide() -> str:
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in GUIDE.items())
    return f"<h3>Reading the tables</h3><dl class='guide'>{terms}</dl>"


def _published(chapter: Chapter) -> str:
    if not chapter.comparisons():
        return ""
    tables = published_tables(chapter.comparisons(), {name: chapter.anchor(name) for name in chapter.experiments})
    return f"<section id='{chapter.anchor('published')}'><h3>Published against ours</h3>{tables}</section>"


def _experiment(chapter: Chapter, experiment: Experiment) -> str:
    return "\n".join(
        [
            f"<section id='{chapter.anchor(experiment.name)}'>",
            f"<h3>{escape(heading(experiment))}</h3>",
            f"<p class='question'>{escape(experiment.question)}</p>",
            figure(experiment, chapter.runs, chapter.anchor(experiment.name)),
            numbers_table(experiment, chapter.runs),
            _made_by(chapter.made_by[experiment.name]),
            "</section>",
        ]
    )


def _made_by(several: Sequence[Mapping[str, Any]]) -> str:
    """The commands, the versions and the machine behind an experiment."""
    parts = []
    for provenance in several:
        command, seconds = provenance["command"], provenance.get("seconds")
        versions = ", ".join(f"{name} {number}" for name, number in provenance["versions"].items())
        devices = ", ".join(dict.fromkeys(provenance["devices"]))
        took = f", {duration(seconds)} for all runs of this command" if seconds else ""
        about = f"Python {provenance['python']}, {versions}; {provenance['machine']}; {devices}{took}."
        made = f"<pre tabindex='0'><code>{escape(command)}</code></pre><p class='quiet'>{escape(about)}</p>"
        parts += [made] if made not in parts else []
    return f"<details><summary>How this was made</summary>{''.join(parts)}</details>"


# What does not match


# A preset made for it is to beat the published curves, any other to repeat them.
AGREES = {True: "met or beaten", False: "met"}


def _mismatches(chapters: Sequence[Chapter]) -> str:
    parts = ["<section><h2 id='mismatches'>What does not match, and why</h2>"]
    for chapter in chapters:
        compared, found = chapter.comparisons(), chapter.goals()
        missed = [goal for goal in found if not goal.met()]
        apart = [each for each in compared if not each.matches()]
        if found:
            met = f"{len(found) - len(missed)} of {len(found)} are met"
            parts.append(f"<h3>Goals of robust methods under attack, preset {chapter.preset}</h3>")
            parts.append(f"<p>{met}{'. These are not:' if missed else '.'}</p>{bullets(map(_missed, missed))}")
        if compared:
            fewer = (
                f"{len(apart)} of {len(compared)} do not match:"
                if apart
                else f"All {len(compared)} are {AGREES[chapter.preset == 'tuned']}."
            )
            parts.append(
                f"<h3>Published curves, preset {chapter.preset}</h3><p>{fewer}</p>{bullets(map(_apart, apart))}"
            )
    return "".join(parts) + f"<h3>Known differences</h3>{bullets(DIFFERENCES)}</section>"


def _place(each: Comparison) -> str:
    return f"{short_name(each.experiment)}, {each.panel.title}, {each.cell.label}"


def _missed(goal: Goal) -> str:
    result, when = goal.of.result, "at" if goal.at else "by"
    wanted = (
        f"{_place(goal.of)}: a mean return of {goal.level:g} {when} {goal.trajectories:,.0f} trajectories per agent."
    )
    if goal.at:
        ours = f"has {spread(returns_at(result, goal.trajectories))}"
    else:
        reached = mean_reaches(result, goal.level)
        ours = f"is there at {reached:,.0f}" if reached < inf else f"is not there by {result.trajectories[-1]:,.0f}"
    return f"{wanted} Ours {ours}; of single seeds, {np.sum(goal.seeds())} of {len(result.returns)} are in time."


def _apart(each: Comparison) -> str:
    """How a published curve and ours differ."""
    parts, theirs = [], each.published_end()
    if each.reached_later():
        level = LEVELS[each.panel.task]
        ours, end = mean_reaches(each.result, level), each.result.trajectories[-1]
        when = f"at {ours:,.0f}" if ours < inf else f"not by {end:,.0f}"
        parts.append(
            f"the published mean is at {level:g} by {each.published_reach()[1]:,.0f} trajectories, ours {when}"
        )
    if each.ends_lower() or each.withstands_more():
        seen = f"at {whole(theirs)}" if isfinite(theirs) else "out of sight"
        parts.append(f"the published mean ends {seen}, ours at {spread(returns_at(each.result, each.end))}")
    if each.withstands_more():
        parts.append("so plain averaging suffers less here")
    return f"{_place(each)}: {', '.join(parts)}."
