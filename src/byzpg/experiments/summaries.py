"""Runs in a few numbers, and those numbers next to the published ones and to our goals.

All commands take "last tenth", "best", "solved at" and "attackers' weight" from here, so that no two of them disagree
about a run. Each is a function of a `Result`: the run on even cells of trajectories, each cell the mean over the
iterations that end in it, weighted by trajectories. An unfinished run counts as far as it has come.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path

import numpy as np

from byzpg._files import write_atomically
from byzpg.config import PAPER, Settings
from byzpg.experiments.paper import (
    CARTPOLE,
    LUNARLANDER,
    PUBLISHED_LENGTH,
    Cell,
    Experiment,
    Panel,
    published_curves,
)
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
from byzpg.robust.aggregators import Mean
from byzpg.robust.attacks import AvgZero

# The return that counts as learned, by task, unless a panel has one of its own.
LEVELS = {CARTPOLE: 450.0, LUNARLANDER: 200.0}
# Number of trajectories per agent over which a return is averaged before it counts, and that of steps.
WINDOW = 100
WINDOW_OF_STEPS = 2_000
# The published curves were read at every 250th trajectory.
PUBLISHED_SPACING = 250
# How far ours may end below a published curve: twice the error of reading it. Plain averaging under attack varies more,
# and may end this far to either side.
TOLERANCES = {CARTPOLE: 6.0, LUNARLANDER: 4.0}
WIDE_GAP = 50.0
# Adam's ε up to which it rescales the rounding of a mean that is zero, about 1e-7 of a gradient.
RESCALED_ROUNDING = 1e-7


# How the curves came about


def gradient_estimate(settings: Settings) -> tuple[str, str, str, str]:
    """What agents send: estimator, momentum, how it is scaled ("" if it is not), and p; of PPO, its batches.

    With p = 1, no algorithm uses the PAGE correction.
    """
    momentum = f"momentum {settings.momentum:g}" if settings.momentum else "no momentum"
    scaling = "Adam at the agents" if settings.optimizer == "local-adam" else ""
    if settings.has_critic:
        learner = settings.ppo
        played = f"{learner.environments} × {learner.segment} steps per iteration"
        return "PPO", momentum, scaling, f"{played}, {learner.num_updates} updates"
    return str(settings.estimator).removesuffix("()"), momentum, scaling, f"p = {settings.switch_probability:g}"


def estimates_apart(settings: Sequence[Settings]) -> tuple[list[list[str]], str]:
    """In what the gradient estimates of runs differ, for each run, and what all of them have in common.

    Every curve is shown with both, because with p = 1 a method that is called PAGE-PG does not use PAGE.
    """
    estimates = [gradient_estimate(each) for each in settings]
    common = [parts[0] for parts in zip(*estimates, strict=True) if len(set(parts)) == 1 and parts[0]]
    telling = [[part for part in each if part and part not in common] for each in estimates]
    if all(each.switch_probability == 1 and not each.has_critic for each in settings):
        common.append("so without small batches and the PAGE correction")
    return telling, ", ".join(common)


def named(label: str, telling: Sequence[str]) -> str:
    """A label with what tells its estimate from others, unless the label says so itself."""
    added = ", ".join(part for part in telling if part not in label)
    return f"{label} ({added})" if added else label


def curve_names(experiment: Experiment, runs: Mapping[str, Result]) -> tuple[dict[str, str], str]:
    """The name of each label of an experiment, and sentences about what all curves have in common."""
    cells = [cell for panel in experiment.panels for cell in panel.cells]
    telling, common = estimates_apart([runs[cell.run].settings for cell in cells])
    by_label: dict[str, dict[str, None]] = {}
    for cell, parts in zip(cells, telling, strict=True):
        by_task = gradient_estimate(runs[cell.run].settings)[1:3]  # sentences tell them
        by_label.setdefault(cell.label, {}).update(dict.fromkeys(part for part in parts if part not in by_task))
    published = any(panel.published for panel in experiment.panels)
    sentences = [f"{'Ours' if published else 'All runs'}: {common}."] if common else []
    if published:
        sentences.append(f"Published: p = {PAPER['switch_probability']:g}.")
    sentences += _momenta(experiment, runs)
    rounding = dict.fromkeys(cell.label for cell in cells if shows_rounding(runs[cell.run].settings))
    if rounding:
        sentences.append(
            f"{' and '.join(rounding)} under AvgZero shows rounding alone: the mean is zero up to 1e-7 of a gradient, "
            "and Adam rescales it to full steps."
        )
    return {label: named(label, list(parts)) for label, parts in by_label.items()}, " ".join(sentences)


def _momenta(experiment: Experiment, runs: Mapping[str, Result]) -> list[str]:
    """Which curves have momentum and Adam at the agents, by task, unless all are alike or their labels say so."""
    labels: dict[tuple[str, str], dict[str, None]] = {}
    for panel in experiment.panels:
        for cell in panel.cells:
            parts = gradient_estimate(runs[cell.run].settings)[1:3]
            if untold := " and ".join(part for part in parts if part not in cell.label):
                labels.setdefault((panel.task, untold), {})[cell.label] = None
    if len({untold for _, untold in labels}) <= 1:
        return []
    return [f"{task}, {untold}: {', '.join(of)}." for (task, untold), of in labels.items()]


def shows_rounding(settings: Settings) -> bool:
    """Whether a run shows rounding alone: a mean that the attack makes zero, rescaled to full steps by Adam."""
    averages = isinstance(settings.aggregator, Mean) and settings.num_attackers > 0
    rescales = settings.optimizer == "adam" and settings.adam_epsilon <= RESCALED_ROUNDING
    return averages and isinstance(settings.attack, AvgZero) and rescales


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def estimate(values: Runs, statistic: Callable[..., np.ndarray] = interquartile_mean) -> Estimate:
    """The statistic of one number per seed [seed], or of a list of strata, each of which is resampled by itself."""
    pooled = np.concatenate(values) if isinstance(values, Sequence) else values
    low, high = bootstrap_interval(values, statistic)
    return Estimate(float(statistic(pooled)), float(low), float(high))


def improvement(ours: Runs, theirs: Runs) -> Estimate:
    """The probability that one of our runs ends above one of theirs."""
    low, high = improvement_interval(ours, theirs)
    return Estimate(probability_of_improvement(ours, theirs), float(low), float(high))


def final_returns(result: Result) -> np.ndarray:
    """The return of the last tenth [seed]: the mean over the cells that end after 90 % of the run's trajectories.

    In a run of fewer than ten cells that is its last cell. A seed that diverged there has NaN.
    """
    end = result.progress[-1]
    return np.mean(result.returns[:, result.progress > 0.9 * end], axis=1, dtype=float)


def scores_by_algorithm(
    results: Mapping[str, Result], labels: Sequence[str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The returns of the last tenth in the form that rliable takes (Agarwal et al. 2021).

    Runs with the same label and task must differ only in their seeds; they are put together.

    Args:
        results: The results of runs, by their names.
        labels: For each, the name of its algorithm.

    Returns:
        For each label an array [run, task], where a run is a seed; and the tasks, in the order of the columns.

    Raises:
        ValueError: If runs cannot be told apart, or if an algorithm lacks runs of a task.
    """
    found: dict[str, dict[str, list[str]]] = {}  # label, task: the names of results
    for (name, result), label in zip(results.items(), labels, strict=True):
        alike = found.setdefault(label, {}).setdefault(result.settings.env, [])
        for other in alike:
            theirs = results[other].settings
            if replace(result.settings, seed=theirs.seed, num_seeds=theirs.num_seeds) != theirs:
                raise ValueError(
                    f"{other} and {name} are both {label!r} on {theirs.env}, but with other options: export them apart."
                )
            if set(result.settings.seeds) & set(theirs.seeds):
                raise ValueError(f"{other} and {name} have seeds in common: export one of them.")
        alike.append(name)
    tasks = sorted({task for by_task in found.values() for task in by_task})
    scores = {}
    for label, by_task in found.items():
        columns = [[final_returns(results[name]) for name in by_task.get(task, [])] for task in tasks]
        counts = [sum(map(len, column)) for column in columns]
        if len(set(counts)) > 1:
            listed = ", ".join(f"{count} on {task}" for task, count in zip(tasks, counts, strict=True))
            raise ValueError(f"every algorithm needs equally many runs of every task, but {label!r} has {listed}.")
        scores[label] = np.stack([np.concatenate(column) for column in columns], axis=1)
    return scores, tasks


def write_scores(scores: Mapping[str, np.ndarray], path: Path) -> None:
    """Write scores as JSON: for each algorithm a list of rows, with null for a seed that diverged.

    Raises:
        ValueError: If the file exists.
    """
    if path.exists():
        raise ValueError(f"{path} already exists: remove it, or choose another file.")
    rows = {
        label: [[float(each) if np.isfinite(each) else None for each in row] for row in values]
        for label, values in scores.items()
    }
    text = json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def best_return(result: Result) -> float:
    """The best return: the highest point of the mean over seeds, among the cells in which no seed has diverged."""
    mean = np.mean(result.returns, axis=0, dtype=float)
    finite = mean[np.isfinite(mean)]
    return float(np.max(finite)) if len(finite) else nan


def attacker_weight(result: Result) -> float:
    """The attackers' weight: their share of the aggregated gradient, averaged over the run and over seeds.

    NaN if nobody attacks, or if the rule is not a weighted mean.
    """
    means = run_means(result, "byzantine_weight") if result.settings.num_attackers else None
    return nan if means is None else float(np.nanmean(means))


def num_diverged(values: np.ndarray) -> int:
    """How many of one number per seed [seed] are not finite."""
    return int(np.sum(~np.isfinite(values)))


def returns_at(result: Result, trajectories: float) -> np.ndarray:
    """The mean return [seed] over the PUBLISHED_SPACING trajectories up to this number."""
    near = (result.progress > trajectories - PUBLISHED_SPACING) & (result.progress <= trajectories)
    if not np.any(near):  # the cells of a long run may be wider
        near = [int(np.argmin(np.abs(result.progress - trajectories)))]
    return np.mean(result.returns[:, near], axis=1, dtype=float)


def run_means(result: Result, metric: str) -> np.ndarray | None:
    """The mean of a metric [seed] over the run, where the metric is known; None if it never is."""
    values = result.metrics.get(metric)
    if values is None or not np.any(np.isfinite(values)):
        return None
    means = np.full(len(values), nan)
    known = np.any(np.isfinite(values), axis=1)  # a seed that diverged at once has none
    means[known] = np.nanmean(values[known], axis=1, dtype=float)
    return means


def trajectories_to_level(result: Result, level: float | None = None) -> np.ndarray:
    """Trajectories per agent [seed] until the mean return of the last WINDOW of them reaches a level; ∞ means never.

    A task is solved at the trajectories to its own threshold. Without a level, the task must be one of LEVELS.
    """
    level = LEVELS[result.settings.env] if level is None else level
    return trajectories_to_reach(result.progress, result.returns, level, window_of(result))


def window_of(result: Result) -> int:
    """The number of trajectories or, with a critic, of steps over which a return is averaged before it counts."""
    return WINDOW if result.settings.unit == "trajectories" else WINDOW_OF_STEPS


def level_of(panel: Panel) -> float:
    """The return that counts as learned in a panel."""
    return LEVELS[panel.task] if panel.level is None else panel.level


def mean_reaches(result: Result, level: float) -> float:
    """Trajectories per agent until the mean curve reaches the level; ∞ if it never does."""
    mean = np.mean(result.returns, axis=0, keepdims=True, dtype=float)
    return float(trajectories_to_reach(result.progress, mean, level, window_of(result))[0])


def reach_estimate(result: Result, level: float | None = None) -> Estimate:
    """The median of `trajectories_to_level` over seeds."""
    return estimate(trajectories_to_level(result, level), lower_median)


def saving(result: Result, alone: Result, level: float | None = None) -> Estimate:
    """How many times more a single agent takes to the level than this run: the ratio of their medians over seeds.

    It is 0 if this run does not get there, and ∞ if only the single agent does not.
    """
    times = [trajectories_to_level(each, level) for each in (alone, result)]

    def ratio(pooled: np.ndarray, axis: int = 0) -> np.ndarray:
        return _times_sooner(*(lower_median(part, axis) for part in np.split(pooled, [len(times[0])], axis)))

    return estimate(times, ratio)


def mean_saving(result: Result, alone: Result, level: float) -> Estimate:
    """As `saving`, for the mean curves over seeds."""
    both = (alone, result)
    if not np.any(result.returns >= level):
        return Estimate(0, 0, 0)

    def ratio(seeds: np.ndarray, axis: int = 0) -> np.ndarray:  # of the means of these seeds [seed] or [resample, seed]
        drawn = np.split(np.atleast_2d(seeds).astype(int), [len(alone.returns)], axis=1)
        means = (np.mean(each.returns[which], axis=1, dtype=float) for each, which in zip(both, drawn, strict=True))
        reached = (
            trajectories_to_reach(each.progress, mean, level, window_of(each))
            for each, mean in zip(both, means, strict=True)
        )
        return _times_sooner(*reached).reshape(seeds.shape[:axis])

    return estimate([np.arange(len(each.returns)) for each in both], ratio)


def _times_sooner(alone: np.ndarray, together: np.ndarray) -> np.ndarray:
    return np.divide(alone, together, out=np.zeros_like(alone), where=np.isfinite(together))


def plain_rival(cell: Cell, panel: Panel, runs: Mapping[str, Result]) -> Cell | None:
    """The panel's cell with plain averaging under the same attack; None if this cell is plain or not attacked."""
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
    trajectories: np.ndarray  # of the published curve, where it is visible
    returns: np.ndarray  # of the published curve

    def published_reach(self) -> tuple[float, float]:
        """The last point before and the first point at the level; both ∞ if the published curve never reaches it.

        The two are far apart where another line hides the curve.
        """
        above = np.flatnonzero(self.returns >= LEVELS[self.panel.task])
        if not len(above):
            return inf, inf
        first = above[0]
        return float(self.trajectories[first - 1]) if first else 0.0, float(self.trajectories[first])

    @property
    def end(self) -> float:
        """The trajectories at which ours is compared: the last that it reaches, if the published curve does too."""
        return float(min(PUBLISHED_LENGTH, self.result.progress[-1]))

    def published_end(self) -> float:
        """The published return to compare with ours; NaN if it is not visible.

        It is the one at the same number of trajectories. Runs of the tuned preset are short because they learn fast and
        end with small steps, so that their last return is compared with the last published one.
        """
        end = PUBLISHED_LENGTH if self.result.settings.preset == "tuned" else self.end
        near = (self.trajectories <= end) & (self.trajectories > end - 2 * PUBLISHED_SPACING)
        return float(self.returns[near][-1]) if np.any(near) else nan

    def reached_later(self) -> bool:
        """Whether, on CartPole, the published mean reaches the level before ours does."""
        return self.panel.task == CARTPOLE and self.published_reach()[1] < mean_reaches(self.result, LEVELS[CARTPOLE])

    def _gap(self) -> float:
        """How far our mean ends above the published one."""
        theirs = self.published_end()
        # A curve that is not visible at the end has left the axes, which stop at −300.
        return float(np.mean(returns_at(self.result, self.end))) - (theirs if np.isfinite(theirs) else -300.0)

    def _plain_under_attack(self) -> bool:
        return bool(self.result.settings.num_attackers) and isinstance(self.result.settings.aggregator, Mean)

    def ends_lower(self) -> bool:
        """Whether our mean ends lower than the published one, by more than the tolerance."""
        return self._gap() < -(WIDE_GAP if self._plain_under_attack() else TOLERANCES[self.panel.task])

    def withstands_more(self) -> bool:
        """Whether the attack hurts plain averaging less than published."""
        return self._plain_under_attack() and self._gap() > WIDE_GAP

    def matches(self) -> bool:
        """Whether ours matches the published curve; with the tuned preset, it may also be better."""
        repeated = self.result.settings.preset == "tuned" or self._gap() <= TOLERANCES[self.panel.task]
        return repeated and not (self.reached_later() or self.ends_lower() or self.withstands_more())


def comparisons(experiments: Sequence[Experiment], runs: Mapping[str, Result]) -> Iterator[Comparison]:
    """A comparison for every run that has a published curve."""
    for experiment in experiments:
        for panel in experiment.panels:
            curves = published_curves(*panel.published) if panel.published else {}
            for cell in panel.cells:
                if cell.label in curves:
                    yield Comparison(experiment, panel, cell, runs[cell.run], *curves[cell.label])


@dataclass(frozen=True, eq=False)
class Goal:
    """A mean return that a robust method under attack should reach within some number of trajectories."""

    experiment: Experiment
    panel: Panel
    cell: Cell
    result: Result
    level: float
    trajectories: float

    def seeds(self) -> np.ndarray:
        """Which seeds reach the goal in time [seed]."""
        return trajectories_to_level(self.result, self.level) <= self.trajectories

    def met(self) -> bool:
        """Whether the mean over seeds reaches the goal in time."""
        return mean_reaches(self.result, self.level) <= self.trajectories


# The goals of the tuned preset: a return, and the trajectories per agent within which it is to be reached, by the
# experiment that runs this preset as it is.
GOALS = {"fig2": ((475.0, 250.0),), "fig5": ((475.0, 250.0),), "traces": ((200.0, 1300.0), (250.0, 2000.0))}


def goals(experiments: Sequence[Experiment], runs: Mapping[str, Result]) -> Iterator[Goal]:
    """The goals of ByzPG and DecByzPG under attack, where runs are long enough to decide them."""
    shown = ((each, panel, cell) for each in experiments for panel in each.panels for cell in panel.cells)
    for experiment, panel, cell in shown:
        result = runs[cell.run]
        settings = result.settings
        if settings.algorithm in ("ByzPG", "DecByzPG") and settings.preset == "tuned" and settings.num_attackers:
            for level, trajectories in GOALS.get(experiment.name, ()):
                if result.progress[-1] >= trajectories:
                    yield Goal(experiment, panel, cell, result, level, trajectories)
