"""The HTML report: one self-contained page with figures, tables, and the differences from the published results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from byzpg._files import write_atomically
from byzpg.experiments.paper import EXPERIMENTS, Experiment
from byzpg.experiments.report.drawings import figure
from byzpg.experiments.report.frame import folded, framed, guide, made_by
from byzpg.experiments.report.tables import numbers_table, options_table, published_tables
from byzpg.experiments.report.wording import bullets, duration, heading, large, short_name, spread, whole
from byzpg.experiments.results import OWN_RUNS, Result, Results
from byzpg.experiments.summaries import (
    LEVELS,
    WINDOW,
    WINDOW_OF_STEPS,
    Comparison,
    Goal,
    comparisons,
    goals,
    mean_reaches,
    returns_at,
)

PRESETS = {
    "tuned": "our own options, which learn fastest and are the default",
    "paper": "the options of the paper's table",
    "theory": "what the paper's theorems ask for, with guesses for the constants that they leave open",
    "script": "the options of the published script, as far as they are known",
}
DIFFERENCES = (
    "The tuned preset differs from the paper's table; the options that differ are listed above. Its curves show how "
    "fast the method can learn, not what the paper measured. The paper's figures leave out the trace decay that it has "
    "on LunarLander, because the algorithms of others were tuned without one; “traces” shows the whole preset.",
    "The published script differs from the paper's table as well. Its step size on CartPole is 5e-4 instead of 5e-3. "
    "Its hidden layers use tanh. Its reference parameters are taken after the update, so that importance weights are 1 "
    "or, for long trajectories, 0. Its agreement stops by looking at the true parameters of the agents. All ten seeds "
    "of a published figure share one θ₀ and one sequence of large and small batches. The script preset reproduces all "
    "this with two exceptions: it runs a fixed number of agreement rounds, and under LargeNoise the attackers do not "
    "shift the coin.",
    "In the script's runs of ByzPG, every worker samples small batches. Here, as in the paper, only the server does, "
    "so attackers affect large batches only.",
    "LunarLander is Gymnasium's v3, reimplemented in JAX. The paper used v2, which has the same physics.",
    "The published numbers were read off the plots, with an error of about ±3 on CartPole and ±2 on LunarLander. Where "
    "one line hides another, or leaves the axes, there is no number. The spread over the published seeds is not known.",
)
GUIDE = {
    "Return at the end": "The undiscounted return over the last tenth of training, averaged over honest agents: mean ± "
    "one standard deviation over seeds.",
    "IQM": "The interquartile mean of the same returns, which leaves out the best and the worst quarter of the seeds.",
    "Until 450": f"Trajectories per agent until the mean return of the last {WINDOW} trajectories reaches this level "
    f"(LunarLander: 200), as the median over seeds. “Never” means not within the run. With a critic: steps, and the "
    f"mean over {WINDOW_OF_STEPS:,} of them.",
    "Beats plain averaging": "The probability that a run ends above a run of plain averaging under the same attack.",
    "[Brackets]": "95 % intervals, bootstrapped over seeds. For several attacks together, seeds are resampled within "
    "each attack.",
}
PAPER_TITLE = """<h1>Federated policy gradients with Byzantine agents, reproduced</h1>
<p class='lead'>Agents learn one policy together by exchanging gradients and parameters. Some of them are Byzantine and
attack the others. The figures compare robust methods with plain averaging and with a single agent: first in the
experiments of the paper, next to the published curves, then in experiments beyond the paper.</p>
<p class='cite'>The method and the published curves are from P. Jordan, F. Grötschla, F. X. Fan, R. Wattenhofer,
“Decentralized Federated Policy Gradient with Byzantine Fault-Tolerance and Provably Fast Convergence”, AAMAS 2024,
arXiv 2401.03489. All other curves are from byzpg.</p>"""
OWN_TITLE = """<h1>Federated reinforcement learning with Byzantine agents</h1>
<p class='lead'>Agents learn one policy together by exchanging gradients and parameters. Some of them may be Byzantine
and attack the others. The figures compare training runs.</p>"""


def write_report(results: Sequence[Results], path: Path) -> None:
    """Write all experiments of these results as one HTML file; experiments with the same name and preset are merged.

    Raises:
        ValueError: If two results hold different runs of the same panel.
    """
    text = _page(by_preset(results))
    write_atomically(path, lambda file: file.write(text.encode()))


@dataclass
class Chapter:
    """All results of one preset."""

    preset: str
    experiments: dict[str, Experiment] = field(default_factory=dict)
    runs: dict[str, Result] = field(default_factory=dict)
    provenance: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)  # by experiment

    def comparisons(self) -> list[Comparison]:
        return list(comparisons(list(self.experiments.values()), self.runs))

    def goals(self) -> list[Goal]:
        return list(goals(list(self.experiments.values()), self.runs))

    def anchor(self, name: str) -> str:
        return f"{self.preset}-{name}"


def by_preset(results: Sequence[Results]) -> list[Chapter]:
    """Merge the results of several files by preset; the panels of one experiment may come from different files."""
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
                    f"{experiment.name} (preset {preset}) is in two of these files with different runs, which have "
                    "other seeds or lengths: leave one of the files out."
                )
            chapter.experiments[experiment.name] = replace(before, panels=panels)
            chapter.provenance.setdefault(experiment.name, []).extend(each.provenance.get("runs", [each.provenance]))
    for chapter in chapters.values():
        found = chapter.experiments
        chapter.experiments = {name: found[name] for name in (*EXPERIMENTS, *found) if name in found}
    return [chapters[preset] for preset in PRESETS if preset in chapters]


# The page


def _page(chapters: Sequence[Chapter]) -> str:
    main = [_contents(chapters), guide("Reading the tables", GUIDE)]
    for chapter in chapters:
        main += [
            f"<h2 id='{chapter.preset}'>Preset {chapter.preset}</h2>",
            f"<p>Unless an experiment says otherwise, its runs use {escape(PRESETS[chapter.preset])}.</p>",
            options_table(chapter.comparisons()),
            _published(chapter),
            *(_experiment(chapter, experiment) for experiment in chapter.experiments.values()),
        ]
    main += [_mismatches(chapters)] if _reproduces(chapters) else []
    top = PAPER_TITLE if _reproduces(chapters) else OWN_TITLE
    return framed("byzpg: experiments", top, _facts(chapters), main, "byzpg report")


def _facts(chapters: Sequence[Chapter]) -> dict[str, str]:
    runs = [result for chapter in chapters for result in chapter.runs.values()]
    found = [goal for chapter in chapters for goal in chapter.goals()]
    compared = [each for chapter in chapters for each in chapter.comparisons()]
    made = {id(each): each for chapter in chapters for several in chapter.provenance.values() for each in several}
    seconds = sum(each.get("seconds") or 0 for each in made.values())
    facts = {"training runs": f"{sum(len(result.returns) for result in runs):,}"}
    for unit, name in {"trajectories": "trajectories", "steps": "steps of agents with a critic"}.items():
        if sampled := sum(_sampled(result) for result in runs if result.settings.unit == unit):
            facts[name] = large(sampled)
    if seconds:
        facts["training time, all runs"] = duration(seconds)
    if found:
        facts["goals met"] = f"{sum(goal.met() for goal in found)} of {len(found)}"
    if compared:
        matched = sum(each.matches() for each in compared)
        facts["published curves matched or beaten"] = f"{matched} of {len(compared)}"
    return facts


def _reproduces(chapters: Sequence[Chapter]) -> bool:
    """Whether the page is about the paper, and not about a user's own runs alone."""
    return any(name != OWN_RUNS for chapter in chapters for name in chapter.experiments)


def _sampled(result: Result) -> float:
    """The trajectories or steps of all seeds and agents, as if every agent sampled in every iteration."""
    return result.progress[-1] * len(result.returns) * result.settings.num_agents


def _contents(chapters: Sequence[Chapter]) -> str:
    groups = []
    for chapter in chapters:
        titles = {"published": "Published results and ours"} if chapter.comparisons() else {}
        titles |= {name: heading(experiment) for name, experiment in chapter.experiments.items()}
        links = [f"<li><a href='#{chapter.anchor(name)}'>{escape(title)}</a></li>" for name, title in titles.items()]
        link = f"<a href='#{chapter.preset}'>Preset {chapter.preset}</a>"
        groups.append(f"<li class='group'>{link}<ol>{''.join(links)}</ol></li>")
    last = "<li><a href='#mismatches'>Differences from the published results</a></li>" if _reproduces(chapters) else ""
    return f"<nav aria-label='contents'><h2>Contents</h2><ol>{''.join(groups)}{last}</ol></nav>"


def _published(chapter: Chapter) -> str:
    if not chapter.comparisons():
        return ""
    tables = published_tables(chapter.comparisons(), {name: chapter.anchor(name) for name in chapter.experiments})
    return f"<section id='{chapter.anchor('published')}'><h3>Published results and ours</h3>{tables}</section>"


def _experiment(chapter: Chapter, experiment: Experiment) -> str:
    return "\n".join(
        [
            f"<section id='{chapter.anchor(experiment.name)}'>",
            f"<h3>{escape(heading(experiment))}</h3>",
            f"<p class='question'>{escape(experiment.question)}</p>",
            figure(experiment, chapter.runs, chapter.anchor(experiment.name)),
            numbers_table(experiment, chapter.runs),
            folded("How to reproduce this", made_by(chapter.provenance[experiment.name])),
            "</section>",
        ]
    )


# Differences from the published results


# The tuned preset may beat the published curves; any other preset should repeat them.
AGREES = {True: "matched or beaten", False: "matched"}


def _mismatches(chapters: Sequence[Chapter]) -> str:
    parts = ["<section><h2 id='mismatches'>Differences from the published results</h2>"]
    for chapter in chapters:
        compared, found = chapter.comparisons(), chapter.goals()
        missed = [goal for goal in found if not goal.met()]
        apart = [each for each in compared if not each.matches()]
        if found:
            met = f"{len(found) - len(missed)} of {len(found)} goals are met."
            parts.append(f"<h3>Goals of robust methods under attack, preset {chapter.preset}</h3>")
            parts.append(f"<p>{met}{' These are not:' if missed else ''}</p>{bullets(map(_missed, missed))}")
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


def _place(each: Comparison | Goal) -> str:
    return f"{short_name(each.experiment)}, {each.panel.title}, {each.cell.label}"


def _missed(goal: Goal) -> str:
    result = goal.result
    wanted = f"{_place(goal)}: a mean return of {goal.level:g} by {goal.trajectories:,.0f} trajectories per agent."
    reached, end = mean_reaches(result, goal.level), result.progress[-1]
    ours = f"reaches it at {reached:,.0f}" if reached < inf else f"does not reach it by {end:,.0f}"
    return f"{wanted} Ours {ours}; {np.sum(goal.seeds())} of {len(result.returns)} seeds do so in time."


def _apart(each: Comparison) -> str:
    """How a published curve and ours differ."""
    parts, theirs = [], each.published_end()
    if each.reached_later():
        level = LEVELS[each.panel.task]
        ours, end = mean_reaches(each.result, level), each.result.progress[-1]
        when = f"at {ours:,.0f}" if ours < inf else f"not by {end:,.0f}"
        parts.append(
            f"the published mean reaches {level:g} by {each.published_reach()[1]:,.0f} trajectories, ours {when}"
        )
    if each.ends_lower() or each.withstands_more() or not parts:  # a curve to repeat may also end too high
        seen = f"at {whole(theirs)}" if isfinite(theirs) else "below the axes"
        ours = f"{spread(returns_at(each.result, each.end))} after {each.end:,.0f} trajectories"
        parts.append(f"the published mean ends {seen}, ours at {ours}")
    if each.withstands_more():
        parts.append("so the attack hurts plain averaging less here")
    return f"{_place(each)}: {', '.join(parts)}."
