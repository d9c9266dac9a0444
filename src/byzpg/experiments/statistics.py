"""Statistics over seeds: robust means, probabilities of improvement, bootstrap intervals, and curves on a common axis.

`trajectories` [seed, iteration] is the number of trajectories that an agent has sampled up to and including an
iteration, so it grows strictly until the last iteration of the seed, and then stays the same. It is [iteration] where
all seeds share it. `returns` [seed, iteration] is the mean return of what the iteration sampled. Iterations sample
batches of different sizes, so every mean over iterations is weighted by trajectories.
"""

from collections.abc import Callable, Sequence
from math import floor, isnan, log10

import numpy as np

# Values of one experiment [seed, ...], or a list of them with one array per stratum, such as an attack or a task.
Runs = np.ndarray | Sequence[np.ndarray]


def significant(value: float, *beside: float) -> str:
    """A number with the decimals of three significant digits, its own or those of larger numbers beside it; – for NaN.

    Examples:
        >>> print(*(significant(value) for value in (1234.5, 228.3, 66.44, 0.4817, -0.0002, 0)))
        1,234 228 66.4 0.482 -0.0002 0
        >>> print(significant(0.5, 228.3))
        0
    """
    if isnan(value):
        return "–"
    largest = max(abs(float(f"{each:.3g}")) for each in (value, *beside))
    if 0 < largest < 0.01:
        return f"{value:.3g}"
    decimals = 0 if largest == 0 or largest >= 100 else min(2 - floor(log10(largest)), 3)
    return f"{round(value, decimals) + 0.0:,.{decimals}f}"  # + 0.0: no minus before a zero


def mean_and_deviation(values: np.ndarray) -> str:
    """Mean ± standard deviation of one number per seed [seed]; of a single seed, its number alone."""
    mean, deviation = float(np.mean(values)), float(np.std(values))
    if len(values) == 1:
        return significant(mean)
    return f"{significant(mean, deviation)} ± {significant(deviation, mean)}"


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


def _by_seed(trajectories: np.ndarray, returns: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Check both arrays, and return the trajectories and returns [iteration] of each seed, as far as it has come."""
    trajectories, returns = np.asarray(trajectories, float), np.asarray(returns, float)
    if returns.ndim != 2 or trajectories.shape not in (returns.shape, returns.shape[1:]):
        raise ValueError(
            "returns must be [seed, iteration] and trajectories too, or [iteration] for all seeds; "
            f"got shapes {trajectories.shape} and {returns.shape}."
        )
    totals = np.broadcast_to(trajectories, returns.shape)
    sizes = np.diff(totals, prepend=0, axis=1)
    ended = sizes == 0
    falls = np.any(sizes < 0) or np.any(ended[:, :1]) or np.any(ended[:, :-1] & ~ended[:, 1:])
    if falls or (trajectories.ndim == 1 and np.any(ended)):
        raise ValueError("trajectories must be running totals: positive, and more in every iteration of a seed.")
    return [(total[~end], of_seed[~end]) for total, of_seed, end in zip(totals, returns, ended, strict=True)]


def even_grid(trajectories: np.ndarray, most: int) -> np.ndarray:
    """The ends of even cells up to where all seeds have come; none lies before the first iteration of a seed.

    There are at most `most` cells, and at most one per iteration of the seed with the fewest.
    """
    totals = np.atleast_2d(trajectories)
    fewest = np.min(np.sum(np.diff(totals, prepend=0, axis=1) > 0, axis=1))
    grid = np.linspace(0, np.min(totals[:, -1]), min(most, fewest) + 1)[1:]
    return grid[grid >= np.max(totals[:, 0])]


def smooth_on_grid(trajectories: np.ndarray, returns: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Returns [seed, cell] on cells of trajectories: cell i is (grid[i − 1], grid[i]], and the first cell starts at 0.

    A cell holds the mean of the iterations that end in it. Empty cells are interpolated; cells before the first or
    after the last iteration are NaN.
    """
    grid = np.asarray(grid, float)
    if np.any(np.diff(grid) <= 0):
        raise ValueError("grid must increase.")
    return np.stack([_smooth(*of_seed, grid) for of_seed in _by_seed(trajectories, returns)])


def _smooth(trajectories: np.ndarray, returns: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """As `smooth_on_grid`, for one seed."""
    sizes, cell = np.diff(trajectories, prepend=0), np.searchsorted(grid, trajectories)
    # One more cell takes what lies beyond the grid.
    weight, total = (np.bincount(cell, each, len(grid) + 1)[:-1] for each in (sizes, returns * sizes))
    full = weight > 0
    # The iteration under way at the end of the grid is not in a cell, but the empty cells before its end lead to it.
    beyond = slice(count := int(np.sum(cell < len(grid))), count + 1)
    ends, means = np.append(grid[full], trajectories[beyond]), np.append(total[full] / weight[full], returns[beyond])
    return np.interp(grid, ends, means, left=np.nan, right=np.nan)


def trajectories_to_reach(trajectories: np.ndarray, returns: np.ndarray, level: float, window: float) -> np.ndarray:
    """Trajectories [seed] until the mean return of the last `window` of them reaches `level`; ∞ if it never does."""
    if not window > 0:
        raise ValueError(f"window must be a positive number of trajectories, got {window}.")
    return np.asarray([_first_reach(*of_seed, level, window) for of_seed in _by_seed(trajectories, returns)])


def _first_reach(trajectories: np.ndarray, returns: np.ndarray, level: float, window: float) -> float:
    """As `trajectories_to_reach`, for one seed."""
    sizes = np.diff(trajectories, prepend=0)
    first = np.searchsorted(trajectories, trajectories - window, side="right")
    spans = np.stack([first, np.arange(len(first)) + 1], axis=1).ravel()
    # Sums of slices, not differences of running sums, whose rounding misses a perfect score of 500.
    columns = np.pad(np.stack([sizes, returns * sizes]), ((0, 0), (0, 1)))
    weight, total = np.add.reduceat(columns, spans, axis=1)[:, ::2]
    # Before the window is full, one lucky episode could be enough.
    reached = (total / weight >= level) & (trajectories >= window)
    return float(trajectories[np.argmax(reached)]) if np.any(reached) else np.inf
