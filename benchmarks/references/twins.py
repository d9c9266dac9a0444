"""Naive twins: every rule and attack in float64 NumPy, written straight from its definition.

Tests take golden values from them, and `benchmarks/robust.py` times them as its baseline.
"""

from collections.abc import Callable
from itertools import combinations
from statistics import NormalDist

import numpy as np

# Shared pieces


def present_rows(received: np.ndarray, f: int, present: np.ndarray | None = None) -> tuple[np.ndarray, int, np.ndarray]:
    """The usable rows in float64, the faults that remain after dropped rows, and the rows' original positions."""
    received = np.asarray(received, dtype=np.float64)
    here = np.ones(len(received), dtype=bool) if present is None else np.asarray(present, dtype=bool)
    with np.errstate(over="ignore", invalid="ignore"):
        short = np.linalg.norm(received, axis=1) < 1e18  # False for NaN and infinity
    index = np.flatnonzero(here & short)
    num_unusable = len(received) - len(index)
    if num_unusable > f:
        raise ValueError(f"{num_unusable} unusable rows, but only f = {f} may be faulty")
    return received[index], f - num_unusable, index


def squared_distances(rows: np.ndarray) -> np.ndarray:
    """The [n, n] matrix of squared Euclidean distances."""
    return np.sum((rows[:, None] - rows[None, :]) ** 2, axis=-1)


def diameter(rows: np.ndarray) -> float:
    """The greatest distance between two rows."""
    return float(np.sqrt(squared_distances(rows).max()))


def nearest(rows: np.ndarray, pivot: int, count: int) -> np.ndarray:
    """Positions of the `count` rows nearest to rows[pivot], itself included; ties to the lowest position."""
    return np.argsort(np.sum((rows - rows[pivot]) ** 2, axis=1), kind="stable")[:count]


def mean_around_median(rows: np.ndarray, count: int) -> np.ndarray:
    """Per coordinate, the mean of the `count` values closest to the median; ties to the smaller value."""
    result = np.zeros(rows.shape[1])
    for k in range(rows.shape[1]):
        values = np.sort(rows[:, k])
        order = np.argsort(np.abs(values - np.median(values)), kind="stable")
        result[k] = values[order[:count]].mean()
    return result


# Aggregators


def mean(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """The mean of the usable rows."""
    rows, _, _ = present_rows(received, f, present)
    return rows.mean(axis=0)


def median(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """The coordinate-wise median; with an even count the mean of the two middle values."""
    rows, _, _ = present_rows(received, f, present)
    return np.median(rows, axis=0)


def trimmed_mean(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """Per coordinate, the mean without the f least and the f greatest values."""
    rows, f, _ = present_rows(received, f, present)
    n = len(rows)
    if n <= 2 * f:
        raise ValueError("trimmed mean needs n > 2f")
    return np.sort(rows, axis=0)[f : n - f].mean(axis=0)


def krum_scores(rows: np.ndarray, count: int) -> np.ndarray:
    """For each row, the sum of its `count` least squared distances, the zero to itself included."""
    return np.sort(squared_distances(rows), axis=1)[:, :count].sum(axis=1)


def krum(received: np.ndarray, f: int, present: np.ndarray | None = None, neighbours: str = "paper") -> np.ndarray:
    """The row with the least Krum score."""
    rows, f, _ = present_rows(received, f, present)
    keep = len(rows) - f
    count = {"paper": keep, "original": keep - 1}[neighbours]
    return rows[np.argmin(krum_scores(rows, count))]


def multi_krum(
    received: np.ndarray, f: int, present: np.ndarray | None = None, neighbours: str = "paper"
) -> np.ndarray:
    """The mean of the n - f rows with the least Krum scores."""
    rows, f, _ = present_rows(received, f, present)
    keep = len(rows) - f
    count = {"paper": keep, "original": keep - 1}[neighbours]
    best = np.argsort(krum_scores(rows, count), kind="stable")[:keep]
    return rows[best].mean(axis=0)


def rfa(
    received: np.ndarray,
    f: int,
    present: np.ndarray | None = None,
    smoothing: float = 1e-6,
    tolerance: float = 1e-12,
    max_iterations: int = 100000,
    start: str = "mean",
) -> np.ndarray:
    """The geometric median by smoothed Weiszfeld iterations."""
    rows, _, _ = present_rows(received, f, present)
    z = {"mean": rows.mean(axis=0), "zero": np.zeros(rows.shape[1])}[start]
    for _ in range(max_iterations):
        distances = np.linalg.norm(rows - z, axis=1)
        weights = 1 / np.maximum(smoothing, distances)
        weights = weights / weights.sum()
        z_next = weights @ rows
        change = np.linalg.norm(z_next - z)
        z = z_next
        if change <= tolerance * distances.max():
            break
    return z


def mda_subset(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """Sorted original indices of the least-diameter n - f rows; ties to the first in Krum-score order."""
    rows, f, index = present_rows(received, f, present)
    keep = len(rows) - f
    order = np.argsort(krum_scores(rows, keep), kind="stable")
    distances = np.sqrt(squared_distances(rows))
    subsets = np.array(list(combinations(order, keep)))
    diameters = distances[subsets[:, :, None], subsets[:, None, :]].max(axis=(1, 2))
    return np.sort(index[subsets[np.argmin(diameters)]])


def mda(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """The mean of the least-diameter subset of n - f rows."""
    subset = mda_subset(received, f, present)
    return np.asarray(received, dtype=np.float64)[subset].mean(axis=0)


def smea_subset(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """Sorted original indices of the n - f rows whose covariance has the least largest eigenvalue."""
    rows, f, index = present_rows(received, f, present)
    subsets = np.array(list(combinations(range(len(rows)), len(rows) - f)))
    centred = rows[subsets] - rows[subsets].mean(axis=1, keepdims=True)
    deviations = np.linalg.svd(centred, compute_uv=False)[:, 0]
    return index[subsets[np.argmin(deviations)]]


def smea(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """The mean of the n - f rows that vary least in the direction in which they vary most."""
    return np.asarray(received, dtype=np.float64)[smea_subset(received, f, present)].mean(axis=0)


def fedpg_filter(
    received: np.ndarray,
    f: int,
    present: np.ndarray | None = None,
    radius: float | None = None,
    fallback_radius: float | None = None,
) -> np.ndarray:
    """The mean of the rows within a radius of the dense row that is nearest to the mean of all dense rows."""
    rows, f, _ = present_rows(received, f, present)
    n = len(rows)
    distances = squared_distances(rows)
    upper_median = [float(np.sort(row)[n // 2]) for row in distances]
    limit = 2 * np.sort(upper_median)[n // 2] if radius is None else radius**2
    wider = 4 * limit if fallback_radius is None else fallback_radius**2
    kept = np.zeros(n, dtype=bool)
    for squared_radius in (limit, max(wider, min(upper_median))):
        dense = [i for i in range(n) if np.sum(distances[i] <= squared_radius) > n / 2]
        if squared_radius > wider:
            dense = [int(np.argmin(upper_median))]
        if dense:
            to_mean = np.linalg.norm(rows[dense] - rows[dense].mean(axis=0), axis=1)
            near = [i for i, gap in zip(dense, to_mean, strict=True) if gap <= 1.0001 * to_mean.min()]
            kept = distances[min(near, key=lambda i: upper_median[i])] <= squared_radius
        if kept.sum() >= n - f:
            break
    return rows[kept].mean(axis=0)


def monna(received: np.ndarray, f: int, present: np.ndarray | None = None, pivot: int = 0) -> np.ndarray:
    """The mean of the n - f rows nearest to the row that was received at position `pivot`."""
    rows, f, index = present_rows(received, f, present)
    if pivot not in index:
        raise ValueError(f"the pivot row {pivot} is not usable")
    position = int(np.flatnonzero(index == pivot)[0])
    return rows[nearest(rows, position, len(rows) - f)].mean(axis=0)


def meamed(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """Per coordinate, the mean of the n - f values closest to the median."""
    rows, f, _ = present_rows(received, f, present)
    return mean_around_median(rows, len(rows) - f)


def bulyan(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """Select n - 2f rows by repeated Krum, then average the n - 4f values closest to their median."""
    rows, f, _ = present_rows(received, f, present)
    n = len(rows)
    if n <= 4 * f:
        raise ValueError("Bulyan needs n > 4f")
    distances = squared_distances(rows)
    remaining = list(range(n))
    selected = []
    for _ in range(n - 2 * f):
        count = max(len(remaining) - f - 2, 1)
        scores = []
        for i in remaining:
            others = sorted(distances[i, j] for j in remaining if j != i)
            scores.append(np.sum(others[:count]))
        winner = remaining[int(np.argmin(scores))]
        selected.append(winner)
        remaining.remove(winner)
    return mean_around_median(rows[selected], n - 4 * f)


def centered_clipping(
    received: np.ndarray,
    f: int,
    present: np.ndarray | None = None,
    *,
    radius: float,
    iterations: int,
    start: str = "zero",
) -> np.ndarray:
    """Repeatedly add the mean of the rows' differences to the centre, each clipped to `radius`."""
    rows, f, _ = present_rows(received, f, present)
    medoid = rows[np.argmin(krum_scores(rows, len(rows) - f))]
    v = {"zero": np.zeros(rows.shape[1]), "medoid": medoid}[start]
    for _ in range(iterations):
        v = v + clip(rows - v, radius).mean(axis=0)
    return v


def caf(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """Covariance-bound agnostic filter: the weighted mean whose covariance had the least top eigenvalue."""
    rows, f, _ = present_rows(received, f, present)
    n = len(rows)
    if n <= 2 * f:
        raise ValueError("CAF needs n > 2f")
    negligible = 1e-28 * np.max(np.sum(rows**2, axis=1))
    c = np.ones(n)
    best_value, best_mean = np.inf, rows.mean(axis=0)
    while True:
        mu = c @ rows / c.sum()
        centred = rows - mu
        # The top right singular vector of these rows is the top eigenvector of sum c_i x_i x_i^T / sum c_i.
        _, singular, directions = np.linalg.svd(np.sqrt(c / c.sum())[:, None] * centred, full_matrices=False)
        value = singular[0] ** 2
        if value < best_value:
            best_value, best_mean = value, mu
        t = (centred @ directions[0]) ** 2
        t_max = t[c > 0].max()
        if t_max <= negligible:
            break
        c = np.maximum(c * (1 - t / t_max), 0)
        if c.sum() <= n - 2 * f:
            break
    return best_mean


# Pre-aggregators: rows in, rows out


def nnm(rows: np.ndarray, f: int) -> np.ndarray:
    """Each row becomes the mean of its n - f nearest rows, itself included."""
    rows = np.asarray(rows, dtype=np.float64)
    n = len(rows)
    return np.array([rows[nearest(rows, i, n - f)].mean(axis=0) for i in range(n)])


def clip(rows: np.ndarray, threshold: float) -> np.ndarray:
    """Scale every row longer than `threshold` down to that norm."""
    result = np.array(rows, dtype=np.float64)
    for i, row in enumerate(result):
        norm = np.linalg.norm(row)
        if norm > threshold:
            result[i] = row * (threshold / norm)
    return result


def arc(rows: np.ndarray, f: int) -> np.ndarray:
    """Clip all rows to the (k+1)-th largest norm, k = floor(2 f (n - f) / n)."""
    n = len(rows)
    k = 2 * f * (n - f) // n
    norms = sorted((float(np.linalg.norm(row)) for row in np.asarray(rows, dtype=np.float64)), reverse=True)
    return clip(rows, norms[k])


def buckets(rows: np.ndarray, permutation: np.ndarray, size: int) -> np.ndarray:
    """Means of consecutive groups of `size` permuted rows; the last group by its own size."""
    shuffled = np.asarray(rows, dtype=np.float64)[np.asarray(permutation)]
    return np.array([shuffled[i : i + size].mean(axis=0) for i in range(0, len(shuffled), size)])


# Agreement: what the agent at position `own` moves to


def agree_mda(received: np.ndarray, own: int, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """The mean of the least-diameter subset; the same at every receiver."""
    return mda(received, f, present)


def agree_gda(received: np.ndarray, own: int, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """The mean of the n - f rows nearest to the receiver's own."""
    return monna(received, f, present, pivot=own)


def agree_trimmed_mean(received: np.ndarray, own: int, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """The coordinate-wise trimmed mean; the same at every receiver."""
    return trimmed_mean(received, f, present)


def agree_none(received: np.ndarray, own: int, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """The receiver's own row, unchanged."""
    return np.asarray(received, dtype=np.float64)[own]


# Attacks: the one vector [d] that all f Byzantine senders send


def attack_avg_zero(honest: np.ndarray, f: int) -> np.ndarray:
    """Minus the honest sum over f, so that the mean of all is zero."""
    return -np.asarray(honest, dtype=np.float64).sum(axis=0) / f


def attack_ipm(honest: np.ndarray, f: int, epsilon: float) -> np.ndarray:
    """Inner-product manipulation: minus epsilon times the honest mean."""
    return -epsilon * np.asarray(honest, dtype=np.float64).mean(axis=0)


def alie_z(n: int, f: int) -> float:
    """The z of "a little is enough" for n agents of which f are Byzantine."""
    s = n // 2 + 1 - f
    return NormalDist().inv_cdf((n - f - s) / (n - f))


def attack_alie(honest: np.ndarray, f: int, z: float | None = None) -> np.ndarray:
    """A little is enough: the honest mean minus z standard deviations; z from n = h + f when not given."""
    honest = np.asarray(honest, dtype=np.float64)
    if z is None:
        z = alie_z(len(honest) + f, f)
    return honest.mean(axis=0) - z * honest.std(axis=0)


def attack_direction(honest: np.ndarray, direction: str) -> np.ndarray:
    """The direction p of Min-Max and Min-Sum; zero where the mean (or deviation) is zero."""
    centre = honest.mean(axis=0)
    norm = np.linalg.norm(centre)
    return {
        "unit": -centre / norm if norm > 0 else np.zeros_like(centre),
        "std": -honest.std(axis=0),
        "sign": -np.sign(centre),
    }[direction]


def largest_step(allowed: Callable[[float], bool]) -> float:
    """The largest gamma >= 0 that is allowed, by doubling and then 200 halvings."""
    low, high = 0.0, 1.0
    while allowed(high):
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if allowed(middle):
            low = middle
        else:
            high = middle
    return low


def attack_min_max(honest: np.ndarray, f: int, direction: str = "unit") -> np.ndarray:
    """The furthest point along p whose greatest distance to an honest row is within the honest diameter."""
    honest = np.asarray(honest, dtype=np.float64)
    centre, p = honest.mean(axis=0), attack_direction(honest, direction)
    if not np.any(p):
        return centre
    bound = diameter(honest)

    def allowed(gamma: float) -> bool:
        return bool(np.linalg.norm(centre + gamma * p - honest, axis=1).max() <= bound)

    return centre + largest_step(allowed) * p


def attack_min_sum(honest: np.ndarray, f: int, direction: str = "unit") -> np.ndarray:
    """The furthest point along p whose sum of squared distances is within the greatest honest one."""
    honest = np.asarray(honest, dtype=np.float64)
    centre, p = honest.mean(axis=0), attack_direction(honest, direction)
    if not np.any(p):
        return centre
    bound = squared_distances(honest).sum(axis=1).max()

    def allowed(gamma: float) -> bool:
        return bool(np.sum((centre + gamma * p - honest) ** 2) <= bound)

    return centre + largest_step(allowed) * p


def attack_normalized(
    honest: np.ndarray,
    f: int,
    rule: Callable[[np.ndarray, int], np.ndarray],
    direction: str = "sign",
    largest: float = 10.0,
    candidates: int = 16,
) -> np.ndarray:
    """Of the points mean + t |mean| p/|p|, the one that turns the rule's result furthest away from the mean."""
    honest = np.asarray(honest, dtype=np.float64)
    centre, p = honest.mean(axis=0), attack_direction(honest, direction)
    length = np.linalg.norm(centre)
    messages = [
        centre + sign * largest / 2**j * length * p / np.linalg.norm(p) for sign in (-1, 1) for j in range(candidates)
    ]
    results = [rule(np.concatenate([honest, np.tile(message, (f, 1))]), f) for message in messages]
    cosines = [float(result @ centre / np.linalg.norm(result) / length) for result in results]
    return messages[int(np.argmin(np.round(cosines, 4)))]


def attack_dissensus(receiver_row: np.ndarray, honest: np.ndarray, f: int, scale: float) -> np.ndarray:
    """Push the receiver away from the honest rows: its row minus scale/f times the sum of differences."""
    receiver_row = np.asarray(receiver_row, dtype=np.float64)
    return receiver_row - scale / f * (np.asarray(honest, dtype=np.float64) - receiver_row).sum(axis=0)
