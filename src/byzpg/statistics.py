"""What many seeds say together: robust means, their uncertainty, and learning curves on a common axis.

`trajectories` [iteration] counts those an agent has sampled up to and including an iteration, so it grows strictly;
`returns` [seed, iteration] are the mean returns of what the iteration sampled. As iterations sample batches of
different sizes, every mean over iterations here is weighted by trajectories.
"""

from collections.abc import Callable

import numpy as np


def interquartile_mean(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """The mean without the ⌊n/4⌋ smallest and the ⌊n/4⌋ largest values (Agarwal et al. 2021)."""
    ascending = np.sort(np.moveaxis(np.asarray(values, float), axis, 0), axis=0)
    cut = len(ascending) // 4
    return np.mean(ascending[cut : len(ascending) - cut], axis=0)


def bootstrap_interval(
    values: np.ndarray,
    statistic: Callable[..., np.ndarray],
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bootstrap over the seeds (Efron 1979): the interval of statistic(values [seed, ...], axis=0).

    The same seeds are drawn for everything else in `values`, so a curve's interval is one of whole curves.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}.")
    num_seeds = len(values)
    drawn = np.random.default_rng(seed).integers(num_seeds, size=(resamples, num_seeds))
    estimates = statistic(np.asarray(values, float)[drawn], axis=1)
    low, high = np.quantile(estimates, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


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
