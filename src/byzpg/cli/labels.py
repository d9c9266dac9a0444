"""How runs are named in tables and plots."""

from collections.abc import Mapping
from dataclasses import fields
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
    """The learning curves of runs, what all have in common, and what their progress counts.

    That is steps, unless all runs count trajectories. The first two are those of `named_runs`.
    """
    from byzpg.experiments.figures import Curve

    labelled, common = named_runs(runs)
    unit = "trajectories" if all(run.settings.unit == "trajectories" for run in runs.values()) else "steps"
    return [Curve(label, getattr(run, unit), run.returns) for label, run in labelled.items()], common, unit


def named_runs(runs: Mapping[Path, Run]) -> tuple[dict[str, Run], str]:
    """Runs by the shortest label that tells each from the others, and what all have in common.

    That is the estimator and p; where they differ, the labels name them.
    """
    from byzpg.experiments.summaries import estimates_apart, named

    telling, common = estimates_apart([run.settings for run in runs.values()])
    methods = [named(method(run.settings), parts) for run, parts in zip(runs.values(), telling, strict=True)]
    attacked = [f"{each}, {short(run.settings.attack)}" for each, run in zip(methods, runs.values(), strict=True)]
    differing = [", ".join([name, *options]) for name, options in zip(methods, _options_apart(runs), strict=True)]
    paths = [str(path) for path in runs]
    labels = next(each for each in (methods, attacked, differing, paths) if len(set(each)) == len(runs))
    return dict(zip(labels, runs.values(), strict=True)), common


def _options_apart(runs: Mapping[Path, Run]) -> list[list[str]]:
    """The options of each run that not all have in common, but for those that its method and its seeds name."""
    named = {"algorithm", "aggregator", "seed", "num_seeds"}
    options = [option.name for option in fields(Settings) if option.name not in named]
    values = {option: [getattr(run.settings, option) for run in runs.values()] for option in options}
    telling = {option: each for option, each in values.items() if len(set(each)) > 1}
    return [
        [
            f"{option} {short(each[at]) if isinstance(each[at], Component) else each[at]}"
            for option, each in telling.items()
        ]
        for at in range(len(runs))
    ]
