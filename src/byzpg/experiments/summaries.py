"""Finished runs in a few numbers, and those numbers against the published ones and against our goals."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nan

import numpy as np

from byzpg.experiments.paper import CARTPOLE, LUNARLANDER, Cell, Experiment, Panel, published_curves
from byzpg.experiments.results import Result
from byzpg.experiments.statistics import (
    Runs,
    bootstrap_interval,
    improvement_interval,
    interquartile_mean,
    lower_median,
    probability_of_improvement,
    trajectories_to_reach,
)
from byzpg.federation.algorithms import ALGORITHMS
from byzpg.robust.aggregators import Mean

# The return that counts as learnt, by task.
LEVELS = {CARTPOLE: 450.0, LUNARLANDER: 200.0}
# Trajectories per agent over which a return is averaged before it counts.
WINDOW = 100
# Published curves are known at every 250th trajectory.
PUBLISHED_SPACING = 250
# By how much ours may end below a published curve, twice the error of reading it; and, for plain averaging under
# attack, where little is left to compare, by how much to either side.
TOLERANCES = {CARTPOLE: 6.0, LUNARLANDER: 4.0}
WIDE_GAP = 50.0


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def estimate(values: Runs, statistic: Callable[..., np.ndarray] = interquartile_mean) -> Estimate:
    """Of one number per seed [seed]; of a list of strata, each resampled by itself."""
    pooled = np.concatenate(values) if isinstance(values, Sequence) else values
    low, high = bootstrap_interval(values, statistic)
    return Estimate(float(statistic(pooled)), float(low), float(high))


def improvement(ours: Runs, theirs: Runs) -> Estimate:
    """The probability that a run of ours ends above one of theirs."""
    low, high = improvement_interval(ours, theirs)
    return Estimate(probability_of_improvement(ours, theirs), float(low), float(high))


def final_returns(result: Result) -> np.ndarray:
    """The mean return [seed] of the last tenth of a run."""
    end = result.trajectories[-1]
    return np.mean(result.returns[:, result.trajectories > 0.9 * end], axis=1, dtype=float)


def returns_at(result: Result, trajectories: float) -> np.ndarray:
    """The mean return [seed] of the PUBLISHED_SPACING trajectories before."""
    near = (result.trajectories > trajectories - PUBLISHED_SPACING) & (result.trajectories <= trajectories)
    if not np.any(near):  # a run's cells may be wider
        near = [int(np.argmin(np.abs(result.trajectories - trajectories)))]
    return np.mean(result.returns[:, near], axis=1, dtype=float)


def run_means(result: Result, metric: str) -> np.ndarray | None:
    """A metric's mean [seed] over the run, where it is known; None if it never is."""
    values = result.metrics.get(metric)
    if values is None or not np.any(np.isfinite(values)):
        return None
    return np.nanmean(values, axis=1, dtype=float)


def trajectories_to_level(result: Result) -> np.ndarray:
    """Trajectories per agent [seed] until the task's level; the task must be one of LEVELS."""
    return trajectories_to_reach(result.trajectories, result.returns, LEVELS[result.settings.env], WINDOW)


def mean_reaches(result: Result, level: float) -> float:
    """Trajectories per agent until the mean curve is at the level; ∞ if it never is."""
    mean = np.mean(result.returns, axis=0, keepdims=True, dtype=float)
    return float(trajectories_to_reach(result.trajectories, mean, level, WINDOW)[0])


def reach_estimate(result: Result) -> Estimate:
    """The median of `trajectories_to_level` over seeds."""
    return estimate(trajectories_to_level(result), lower_median)


def plain_rival(cell: Cell, panel: Panel, runs: Mapping[str, Result]) -> Cell | None:
    """Plain averaging under the same attack in the same place of the panel; None for what is plain or not attacked."""
    settings = runs[cell.run].settings
    if isinstance(settings.aggregator, Mean) or not settings.num_attackers:
        return None
    for other in panel.cells:
        theirs = runs[other.run].settings
        same = (theirs.attack, theirs.num_attackers, other.at) == (settings.attack, settings.num_attackers, cell.at)
        if same and isinstance(theirs.aggregator, Mean):
            return other
    return None


@dataclass(frozen=True, eq=False)
class Comparison:
    """A published curve and our run of the same method."""

    experiment: Experiment
    panel: Panel
    cell: Cell
    result: Result
    trajectories: np.ndarray  # of the published curve, where it can be seen
    returns: np.ndarray

    def published_reach(self) -> tuple[float, float]:
        """Between which trajectories the published curve gets to the level; apart where it is hidden. ∞: never."""
        above = np.flatnonzero(self.returns >= LEVELS[self.panel.task])
        if not len(above):
            return inf, inf
        first = above[0]
        return float(self.trajectories[first - 1]) if first else 0.0, float(self.trajectories[first])

    @property
    def end(self) -> float:
        """The last trajectories that both curves have."""
        return float(min(8000.0, self.result.trajectories[-1]))

    def published_end(self) -> float:
        """The published return there; NaN where it cannot be seen."""
        near = (self.trajectories <= self.end) & (self.trajectories > self.end - 2 * PUBLISHED_SPACING)
        return float(self.returns[near][-1]) if np.any(near) else nan

    def reached_later(self) -> bool:
        """Whether the published mean is at the level of CartPole before ours."""
        return self.panel.task == CARTPOLE and self.published_reach()[1] < mean_reaches(self.result, LEVELS[CARTPOLE])

    def _gap(self) -> float:
        """By how much our mean ends above the published one."""
        theirs = self.published_end()
        # What cannot be seen at the end has left the axes, which stop at −300.
        return float(np.mean(returns_at(self.result, self.end))) - (theirs if np.isfinite(theirs) else -300.0)

    def _plain_under_attack(self) -> bool:
        return bool(self.result.settings.num_attackers) and isinstance(self.result.settings.aggregator, Mean)

    def ends_lower(self) -> bool:
        return self._gap() < -(WIDE_GAP if self._plain_under_attack() else TOLERANCES[self.panel.task])

    def withstands_more(self) -> bool:
        """Whether plain averaging, under attack, is not hurt as it was published to be."""
        return self._plain_under_attack() and self._gap() > WIDE_GAP

    def matches(self) -> bool:
        """Whether ours is as published; with the tuned preset, robust and honest runs may be better."""
        repeated = self.result.settings.preset == "tuned" or self._gap() <= TOLERANCES[self.panel.task]
        return repeated and not (self.reached_later() or self.ends_lower() or self.withstands_more())


def comparisons(experiments: Sequence[Experiment], runs: Mapping[str, Result]) -> Iterator[Comparison]:
    """Every run that has a published curve."""
    for experiment in experiments:
        for panel in experiment.panels:
            curves = published_curves(*panel.published) if panel.published else {}
            for cell in panel.cells:
                if cell.label in curves:
                    yield Comparison(experiment, panel, cell, runs[cell.run], *curves[cell.label])


@dataclass(frozen=True, eq=False)
class Goal:
    """A mean return that a robust method under attack should have by, or at, some number of trajectories."""

    of: Comparison
    level: float
    trajectories: float
    at: bool = False  # not only by then

    def seeds(self) -> np.ndarray:
        """Which seeds are there in time [seed]."""
        result = self.of.result
        if self.at:
            far = result.trajectories[-1] > self.trajectories - PUBLISHED_SPACING
            return far & (returns_at(result, self.trajectories) >= self.level)
        times = trajectories_to_reach(result.trajectories, result.returns, self.level, WINDOW)
        return times <= self.trajectories

    def met(self) -> bool:
        """Whether the mean over seeds is."""
        mean = {"return_mean": np.mean(self.of.result.returns, axis=0, keepdims=True, dtype=float)}
        one = replace(self, of=replace(self.of, result=replace(self.of.result, metrics=mean)))
        return bool(one.seeds()[0])


def goals(found: Sequence[Comparison]) -> Iterator[Goal]:
    """With the tuned preset, those of every robust method under attack in the paper's figures."""
    for each in found:
        settings = each.result.settings
        if settings.num_attackers and ALGORITHMS[settings.algorithm].robust and settings.preset == "tuned":
            if each.panel.task == CARTPOLE:
                yield Goal(each, 475.0, 1500.0)
            else:
                yield Goal(each, 200.0, 5000.0)
                yield Goal(each, 250.0, 8000.0, at=True)
