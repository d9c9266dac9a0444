"""What many seeds say together: robust means, who wins, how sure that is, and learning curves on a common axis.

`trajectories` [iteration] counts those an agent has sampled up to and including an iteration, so it grows strictly;
`returns` [seed, iteration] are the mean returns of what the iteration sampled. As iterations sample batches of
different sizes, every mean over iterations here is weighted by trajectories.
"""

from collections.abc import Callable, Sequence

import numpy as np

# Of one experiment [seed, ...], or a list of those of several strata, such as attacks or tasks.
Runs = np.ndarray | Sequence[np.ndarray]


def interquartile_mean(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """The mean without the ⌊n/4⌋ smallest and the ⌊n/4⌋ largest values (Agarwal et al. 2021)."""
    ascending = np.sort(np.moveaxis(np.asarray(values, float), axis, 0), axis=0)
    cut = len(ascending) // 4
    return np.mean(ascending[cut : len(ascending) - cut], axis=0)


def lower_median(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """The least of `values` that at least half of them do not exceed: inf {t : F(t) ≥ ½} (Kaplan & Meier 1958).

    Of trajectories to reach a level, those within which half the seeds got there, and ∞ if fewer than half ever do.
    It is the smaller of two middle values, as the mean of 900 and ∞ says nothing of either.
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
    """Percentile bootstrap over the seeds (Efron 1979): the interval of statistic(values [seed, ...], axis=0).

    The same seeds are drawn for everything else in `values`, so a curve's interval is one of whole curves. Of a list of
    strata, each is resampled by itself, and the statistic is that of all, pooled in their order (Agarwal et al. 2021):
    how far strata lie apart does not widen the interval.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}.")
    rng = np.random.default_rng(seed)
    drawn = [each[rng.integers(len(each), size=(resamples, len(each)))] for each in _strata(values)]
    estimates = statistic(np.concatenate(drawn, axis=1), axis=1)
    # Both ends are estimates, the next ones outwards: between two infinities there is nothing to interpolate.
    low = np.quantile(estimates, (1 - level) / 2, axis=0, method="lower")
    high = np.quantile(estimates, (1 + level) / 2, axis=0, method="higher")
    return low, high


def probability_of_improvement(ours: Runs, theirs: Runs) -> float:
    """P(X > Y) + ½ P(X = Y) over all pairs of a run X [seed] of ours and Y [seed] of theirs (Mann & Whitney 1947).

    Of lists of strata, the mean over strata, each with its own pairs (Agarwal et al. 2021). Where less is better, as
    in trajectories to reach a level, swap the two; two runs that never got there, ∞ and ∞, are a tie.
    """
    return float(_wins(*_opponents(ours, theirs)))


def improvement_interval(
    ours: Runs,
    theirs: Runs,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The interval of `probability_of_improvement`, with the runs of each method in each stratum resampled apart."""
    our_strata, their_strata = _opponents(ours, theirs)
    strata = [*our_strata, *their_strata]
    starts = np.cumsum([len(each) for each in strata])[:-1]

    def wins(pooled: np.ndarray, axis: int) -> np.ndarray:
        parts = np.split(pooled, starts, axis)
        return _wins(parts[: len(our_strata)], parts[len(our_strata) :])

    return bootstrap_interval(strata, wins, level, resamples, seed)


def _wins(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> np.ndarray:
    """The share of pairs that ours [..., seed] win, a tie being half a win, averaged over strata."""
    pairs = [(x[..., :, None], y[..., None, :]) for x, y in zip(ours, theirs, strict=True)]
    # Comparisons, not signs of differences: ∞ − ∞ is no tie but NaN.
    return np.mean([np.mean(x > y, axis=(-2, -1)) + np.mean(x >= y, axis=(-2, -1)) for x, y in pairs], axis=0) / 2


def _opponents(ours: Runs, theirs: Runs) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The strata of both, each [seed], after a look at all of them."""
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
    """An array as the one stratum it is, a list of arrays as it is, after a look at their shapes."""
    strata = [np.asarray(each, float) for each in (values if isinstance(values, Sequence) else [values])]
    shapes = [each.shape for each in strata]
    if not strata or not all(each.ndim and len(each) for each in strata) or len({shape[1:] for shape in shapes}) > 1:
        raise ValueError(
            "values must be an array [seed, ...] or a list of them, with seeds in each and alike in all other axes; "
            f"got {'shapes ' + ', '.join(map(str, shapes)) if shapes else 'none'}."
        )
    return strata


def _check_order(values: np.ndarray) -> None:
    """NaN is neither more nor less than anything."""
    missing = np.sum(np.isnan(values))
    if missing or not values.size:
        raise ValueError(
            f"runs must be at least one and none NaN, got {values.size} with {missing} NaN; "
            "leave those out or make them ∞ or −∞, whichever is worse."
        )


def _batch_sizes(trajectories: np.ndarray, returns: np.ndarray) -> np.ndarray:
    """How many trajectories [iteration] each iteration sampled, after a look at both arrays."""
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
    """Ends of at most so many even cells, and of no more than there are iterations, from the first iteration's on."""
    grid = np.linspace(0, trajectories[-1], min(most, len(trajectories)) + 1)[1:]
    return grid[grid >= trajectories[0]]


def smooth_on_grid(trajectories: np.ndarray, returns: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Returns [seed, cell] by cells of trajectories, cell i being (grid[i − 1], grid[i]] and the first from 0 on.

    A cell is the mean of the iterations that end in it. Cells with none are interpolated; those before the first or
    after the last iteration are NaN.
    """
    trajectories, returns, grid = (np.asarray(each, float) for each in (trajectories, returns, grid))
    sizes = _batch_sizes(trajectories, returns)
    if np.any(np.diff(grid) <= 0):
        raise ValueError("grid must increase.")
    cell = np.searchsorted(grid, trajectories)
    # The one cell more holds what lies beyond the grid.
    weight, *totals = (np.bincount(cell, each, len(grid) + 1)[:-1] for each in (sizes, *(returns * sizes)))
    full = weight > 0
    if not np.any(full):
        return np.full((len(returns), len(grid)), np.nan)
    means = (total[full] / weight[full] for total in totals)
    return np.stack([np.interp(grid, grid[full], each, left=np.nan, right=np.nan) for each in means])


def trajectories_to_reach(trajectories: np.ndarray, returns: np.ndarray, level: float, window: float) -> np.ndarray:
    """The trajectories [seed] after which the mean return of the last `window` of them is `level`; ∞ if it never is."""
    trajectories, returns = np.asarray(trajectories, float), np.asarray(returns, float)
    sizes = _batch_sizes(trajectories, returns)
    if not window > 0:
        raise ValueError(f"window must be a positive number of trajectories, got {window}.")
    first = np.searchsorted(trajectories, trajectories - window, side="right")
    spans = np.stack([first, np.arange(len(first)) + 1], axis=1).ravel()
    # Sums of slices, not differences of running sums: those miss a perfect score of 500 by rounding.
    columns = np.pad(np.stack([sizes, *(returns * sizes)]), ((0, 0), (0, 1)))
    weight, *totals = np.add.reduceat(columns, spans, axis=1)[:, ::2]
    # A window that is not full yet could be one lucky episode.
    reached = (np.stack(totals) / weight >= level) & (trajectories >= window)
    return np.where(np.any(reached, axis=1), trajectories[np.argmax(reached, axis=1)], np.inf)
