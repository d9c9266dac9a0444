"""How runs are named in tables and plots."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from byzpg.cli.console import counted
from byzpg.config import Settings
from byzpg.federation.algorithms import ALGORITHMS
from byzpg.robust.components import Component
from byzpg.runs import Run

if TYPE_CHECKING:  # loads Matplotlib, which is slow
    from byzpg.experiments.figures import Curve


def short(component: Component) -> str:
    """A component as text, without empty parentheses."""
    return str(component).removesuffix("()")


def method(settings: Settings) -> str:
    """The algorithm and its rule: DecByzPG with RFA, or Dec-PAGE-PG with plain averaging."""
    if settings.num_agents == 1:
        return settings.algorithm
    robust = ALGORITHMS[settings.algorithm].robust
    return f"{settings.algorithm} with {short(settings.aggregator) if robust else 'plain averaging'}"


def federation(settings: Settings) -> str:
    """The agents, and what attacks them: 13 agents, 3 of them attacking (AvgZero)."""
    agents = counted(settings.num_agents, "agent")
    if not settings.num_attackers:
        return agents
    return f"{agents}, {settings.num_attackers} of them attacking ({short(settings.attack)})"


def curves(runs: Mapping[Path, Run]) -> "tuple[list[Curve], str, str]":
    """The learning curves of runs, each with the shortest label that tells it from the others.

    The second value names what all have in common of the estimator and p; where they differ, the labels name them. The
    third one is what the curves' progress counts: steps, unless all runs count trajectories.
    """
    from byzpg.experiments.figures import Curve
    from byzpg.experiments.summaries import estimates_apart, named

    telling, common = estimates_apart([run.settings for run in runs.values()])
    methods = [named(method(run.settings), parts) for run, parts in zip(runs.values(), telling, strict=True)]
    attacked = [f"{each}, {short(run.settings.attack)}" for each, run in zip(methods, runs.values(), strict=True)]
    paths = [str(path) for path in runs]
    labels = next(each for each in (methods, attacked, paths) if len(set(each)) == len(runs))
    unit = "trajectories" if all(run.settings.unit == "trajectories" for run in runs.values()) else "steps"
    found = [Curve(label, getattr(run, unit), run.returns) for label, run in zip(labels, runs.values(), strict=True)]
    return found, common, unit
