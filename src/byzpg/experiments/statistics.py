"""Statistics over seeds: robust means, probabilities of improvement, bootstrap intervals, and curves on a common axis.

`trajectories` [iteration] is the number of trajectories that an agent has sampled up to and including an iteration, so
it grows strictly. `returns` [seed, iteration] is the mean return of what the iteration sampled. Iterations sample
batches of different sizes, so every mean over iterations is weighted by trajectories.
"""

from collections.abc import Callable, Sequence

import numpy as np

# Values of one experiment [seed, ...], or a list of them with one array per stratum, such as an attack or a task.
Runs = np.ndarray | Sequence[np.ndarray]


def interquartile_mean(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """The mean without the ⌊n/4⌋ smallest and the ⌊n/4⌋ largest values (Agarwal et al. 2021)."""
    ascending = np.sort(np.moveaxis(np.asarray(values, float), axis, 0), axis=0)
    cut = len(ascending) // 4
    return np.mean(ascending[cut : len(ascending) - cut], axis=0)


def lower_median(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """The least of `values` that at least half of them do not exceed: inf {t : F(t) ≥ ½} (Kaplan & Meier 1958).

    For trajectories to a level, it is the number within which half the seeds reach it, or ∞ if fewer than half ever do.
    Of two middle values it is the smaller one, because the mean of 900 and ∞ would tell nothing about either.
    """
    values = np.asarray(values, float)
    _check_order(values)
    return np.quantile(values, 0.5, axis=axis, method="inverted_cdf")


def bootstrap_interval(
    values: Runs,
    statistic: Callable[..., np.ndarray],
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bootstrap over seeds (Efron 1979): the interval of statistic(values [seed, ...], axis=0).

    Whole seeds are drawn, so the interval of a curve is one of whole curves. Strata are resampled one by one, and the
    statistic is computed on all of them, concatenated in their order (Agarwal et al. 2021), so the distance between
    strata does not widen the interval.

    Args:
        values: The values [seed, ...], or a list of strata.
        statistic: A function of an array and an axis.
        level: The confidence level.
        resamples: The number of resamples.
        seed: The seed of the resamples.

    Returns:
        The lower and the upper end.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}.")
    rng = np.random.default_rng(seed)
    drawn = [each[rng.integers(len(each), size=(resamples, len(each)))] for each in _strata(values)]
    estimates = statistic(np.concatenate(drawn, axis=1), axis=1)
    # Both ends are estimates themselves, rounded outwards: between two infinities there is nothing to interpolate.
    low = np.quantile(estimates, (1 - level) / 2, axis=0, method="lower")
    high = np.quantile(estimates, (1 + level) / 2, axis=0, method="higher")
    return low, high


def probability_of_improvement(ours: Runs, theirs: Runs) -> float:
    """P(X > Y) + ½ P(X = Y) over all pairs of a run X [seed] of ours and Y [seed] of theirs (Mann & Whitney 1947).

    For lists of strata, it is the mean over strata, each with its own pairs (Agarwal et al. 2021). Where less is
    better, as in trajectories to a level, swap the two arguments. Two runs that never reach the level, ∞ and ∞, tie.
    """
    return float(_wins(*_opponents(ours, theirs)))


def improvement_interval(
    ours: Runs,
    theirs: Runs,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The interval of `probability_of_improvement`; both methods are resampled independently in each stratum."""
    our_strata, their_strata = _opponents(ours, theirs)
    strata = [*our_strata, *their_strata]
    starts = np.cumsum([len(each) for each in strata])[:-1]

    def wins(pooled: np.ndarray, axis: int) -> np.ndarray:
        parts = np.split(pooled, starts, axis)
        return _wins(parts[: len(our_strata)], parts[len(our_strata) :])

    return bootstrap_interval(strata, wins, level, resamples, seed)


def _wins(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> np.ndarray:
    """The share of pairs that ours [..., seed] win, averaged over strata; a tie counts as half a win."""
    pairs = [(x[..., :, None], y[..., None, :]) for x, y in zip(ours, theirs, strict=True)]
    # Comparisons, not signs of differences: ∞ − ∞ is NaN instead of a tie.
    return np.mean([np.mean(x > y, axis=(-2, -1)) + np.mean(x >= y, axis=(-2, -1)) for x, y in pairs], axis=0) / 2


def _opponents(ours: Runs, theirs: Runs) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Check the strata of both methods, each [seed], and return them as lists."""
    our_strata, their_strata = _strata(ours), _strata(theirs)
    if len(our_strata) != len(their_strata):
        raise ValueError(
            "ours and theirs must have the same strata in the same order; "
            f"got {len(our_strata)} and {len(their_strata)} of them."
        )
    for each in (*our_strata, *their_strata):
        if each.ndim != 1:
            raise ValueError(f"runs must be [seed], one number each, got shape {each.shape}; give strata as a list.")
        _check_order(each)
    return our_strata, their_strata


def _strata(values: Runs) -> list[np.ndarray]:
    """Check the shapes, and return the strata as a list; an array is one stratum."""
    strata = [np.asarray(each, float) for each in (values if isinstance(values, Sequence) else [values])]
    shapes = [each.shape for each in strata]
    if not strata or not all(each.ndim and len(each) for each in strata) or len({shape[1:] for shape in shapes}) > 1:
        raise ValueError(
            "values must be an array [seed, ...] or a list of them, with seeds in each and alike in all other axes; "
            f"got {'shapes ' + ', '.join(map(str, shapes)) if shapes else 'none'}."
        )
    return strata


def _check_order(values: np.ndarray) -> None:
    """Refuse NaN, which has no place in any order."""
    missing = np.sum(np.isnan(values))
    if missing or not values.size:
        raise ValueError(
            f"runs must be at least one and none NaN, got {values.size} with {missing} NaN; "
            "leave those out or make them ∞ or −∞, whichever is worse."
        )


def _batch_sizes(trajectories: np.ndarray, returns: np.ndarray) -> np.ndarray:
    """Check both arrays, and return the number of trajectories [iteration] that each iteration sampled."""
    if trajectories.ndim != 1 or returns.ndim != 2 or returns.shape[1:] != trajectories.shape:
        raise ValueError(
            "trajectories must be [iteration] and returns [seed, iteration]; "
            f"got shapes {trajectories.shape} and {returns.shape}."
        )
    sizes = np.diff(trajectories, prepend=0)
    if np.any(sizes <= 0):
        raise ValueError("trajectories must be running totals: positive, and more in every iteration.")
    return sizes


def even_grid(trajectories: np.ndarray, most: int) -> np.ndarray:
    """The ends of even cells, at most `most` and at most one per iteration; none lies before the first iteration."""
    grid = np.linspace(0, trajectories[-1], min(most, len(trajectories)) + 1)[1:]
    return grid[grid >= trajectories[0]]


def smooth_on_grid(trajectories: np.ndarray, returns: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Returns [seed, cell] on cells of trajectories: cell i is (grid[i − 1], grid[i]], and the first cell starts at 0.

    A cell holds the mean of the iterations that end in it. Empty cells are interpolated; cells before the first or
    after the last iteration are NaN.
    """
    trajectories, returns, grid = (np.asarray(each, float) for each in (trajectories, returns, grid))
    sizes = _batch_sizes(trajectories, returns)
    if np.any(np.diff(grid) <= 0):
        raise ValueError("grid must increase.")
    cell = np.searchsorted(grid, trajectories)
    # One more cell takes what lies beyond the grid.
    weight, *totals = (np.bincount(cell, each, len(grid) + 1)[:-1] for each in (sizes, *(returns * sizes)))
    full = weight > 0
    if not np.any(full):
        return np.full((len(returns), len(grid)), np.nan)
    means = (total[full] / weight[full] for total in totals)
    return np.stack([np.interp(grid, grid[full], each, left=np.nan, right=np.nan) for each in means])


def trajectories_to_reach(trajectories: np.ndarray, returns: np.ndarray, level: float, window: float) -> np.ndarray:
    """Trajectories [seed] until the mean return of the last `window` of them reaches `level`; ∞ if it never does."""
    trajectories, returns = np.asarray(trajectories, float), np.asarray(returns, float)
    sizes = _batch_sizes(trajectories, returns)
    if not window > 0:
        raise ValueError(f"window must be a positive number of trajectories, got {window}.")
    first = np.searchsorted(trajectories, trajectories - window, side="right")
    spans = np.stack([first, np.arange(len(first)) + 1], axis=1).ravel()
    # Sums of slices, not differences of running sums, whose rounding misses a perfect score of 500.
    columns = np.pad(np.stack([sizes, *(returns * sizes)]), ((0, 0), (0, 1)))
    weight, *totals = np.add.reduceat(columns, spans, axis=1)[:, ::2]
    # Before the window is full, one lucky episode could be enough.
    reached = (np.stack(totals) / weight >= level) & (trajectories >= window)
    return np.where(np.any(reached, axis=1), trajectories[np.argmax(reached, axis=1)], np.inf)
