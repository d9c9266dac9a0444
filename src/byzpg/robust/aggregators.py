"""Aggregation rules (Aggregate: [K, d] → [d]) and pre-aggregators.

Notation: K rows are received, and at most f of them are Byzantine. n of the K rows are usable: they are present, finite
and shorter than 1e18. A row that is not usable counts against f, so f' = f − (K − n) of the usable rows may still be
Byzantine. A rule on K rows with some missing is the same rule on the n usable rows with f'.

`robustness_bound(K, f)` is the published bound κ on ‖F(x) − x̄_S‖² / (1/|S| Σ_{i∈S} ‖x_i − x̄_S‖²) over every subset S of
K − f rows (Allouah et al. 2023, "Fixing by Mixing"). It is None where no bound is known to us.

The examples start from `import jax`, `import jax.numpy as jnp` and `from byzpg.robust import *`. They aggregate five
rows: four honest ones around (2, 2), and one from an attacker.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import combinations
from math import comb
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from byzpg.robust.components import Vectors, check_choice, check_count, check_finite, check_positive
from byzpg.robust.geometry import Cloud, dot, is_sound, row_products, unless_batched
from byzpg.robust.least_diameter import least_diameter_subset
from byzpg.robust.order_statistics import (
    NETWORK_LIMIT,
    ascending,
    kth_smallest,
    smallest,
    sort,
    sum_of_ranks,
    sum_of_smallest,
)
from byzpg.robust.rules import Applied, Rule, WeightedRule, apply_rule

__all__ = [
    "ARC",
    "CAF",
    "MDA",
    "NNM",
    "RFA",
    "SMEA",
    "Aggregator",
    "Bucketing",
    "Bulyan",
    "CenteredClipping",
    "Clipping",
    "FedPGFilter",
    "Krum",
    "MeaMed",
    "Mean",
    "Median",
    "Memories",
    "MoNNA",
    "MultiKrum",
    "PreAggregator",
    "Remember",
    "TrimmedMean",
    "WeightedAggregator",
]


class Aggregator(Rule):
    """An aggregation rule: it turns the K vectors that were received into one.

    Subclass `WeightedAggregator` for a rule that is a weighted mean of the rows, or this class for any other rule.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(Krum()(rows, num_byzantine=1), Krum().weights(rows, num_byzantine=1))
        [2. 2.] [0. 1. 0. 0. 0.]
    """

    def __call__(
        self, received: Vectors, *, num_byzantine: int, present: Vectors | None = None, key: Array | None = None
    ) -> Array:
        """Aggregate the rows that were received.

        Args:
            received: The vectors [K, d], one row per sender, float32 or float64.
            num_byzantine: f, the number of Byzantine rows to tolerate.
            present: Which rows [K] have arrived (bool); all of them by default.
            key: Random key, for randomised rules such as `Bucketing`.

        Returns:
            One vector [d]. Under jit or vmap it is NaN where a plain call would raise the last error below.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If the rule does not tolerate f of K, a shape is wrong, or fewer than K − f rows are usable.
        """
        return apply_rule(self, received, num_byzantine=num_byzantine, present=present, key=key).result

    def weights(
        self, received: Vectors, *, num_byzantine: int, present: Vectors | None = None, key: Array | None = None
    ) -> Array:
        """Return the weight [K] of each row in the result: 0 for a row that the rule discards.

        The arguments are those of a call. A rule that is not a weighted mean of the rows raises a TypeError.
        """
        applied = apply_rule(self, received, num_byzantine=num_byzantine, present=present, key=key, with_weights=True)
        assert applied.weights is not None
        return applied.weights

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        """Return the published bound κ(K, f), see the head of this module; None if no bound is known."""
        return None


class WeightedAggregator(WeightedRule, Aggregator):
    """An aggregation rule that is a weighted mean of the rows. Subclasses implement `coefficients`."""


def _faults_left(num_points: int, num_usable: Array, num_byzantine: int) -> Array:
    """f' = f − (number of missing points)."""
    return num_byzantine - (num_points - num_usable)


def krum_scores(cloud: Cloud, count: int) -> Array:
    """Return, for each point, the sum of its `count` smallest squared distances; ∞ if the point is not usable.

    The zero distance of a point to itself is one of the `count`.
    """
    return jnp.where(cloud.usable, sum_of_smallest(cloud.distances(), count), jnp.inf)


# Rules that work in each coordinate


@dataclass(frozen=True)
class Mean(WeightedAggregator):
    """The plain mean of the usable rows: not robust, since a single attacker can move it anywhere.

    It is the baseline for comparisons, and accepts any f < K.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(Mean()(rows, num_byzantine=1).round(1))
        [ 19.6 -16.4]
    """

    bound: ClassVar[str] = "f < K"

    def is_mean(self, num_byzantine: int) -> bool:
        return type(self) is Mean  # with any f

    def max_byzantine(self, num_agents: int) -> int:
        return num_agents - 1

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return cloud.mean_of(cloud.usable)


def _sum_of_listed(values: list[Array], first: Array | int, stop: Array | int, ranks: range) -> Array:
    """Σ values[j] for first ≤ j < stop, all of which are known to be among `ranks`."""
    return sum(
        (jnp.where((first <= j) & (j < stop), values[j], 0) for j in ranks),
        jnp.zeros_like(values[0]),
    )


def _mean_of_ranks(cloud: Cloud, first: Array, stop: Array) -> Array:
    """In each coordinate, average the values of 0-based ranks first, …, stop − 1, however many rows there are."""
    return sum_of_ranks(*cloud.ascending(), first, stop) / (stop - first)


def _middle_ranks(fewest: int, most: int) -> range:
    """The 0-based ranks among which is the median of `fewest` to `most` values."""
    return range((fewest - 1) // 2, most // 2 + 1)


def _middle(values: list[Array], num_usable: Array | int, ranks: range) -> Array:
    """The median of the first `num_usable` of ascending values; it is among `ranks`."""
    low, high = (num_usable - 1) // 2, num_usable // 2
    return _sum_of_listed(values, low, high + 1, ranks) / (high - low + 1)


def _least_reach(lows: list[Array], highs: list[Array], median: Array) -> Array:
    """The least distance from the median within which a window of ascending values lies, from a low to a high one.

    The values nearest to the median are neighbours in ascending order. So this is the largest gap among them.
    """
    windows = zip(lows, highs, strict=False)
    return reduce(jnp.minimum, [jnp.maximum(median - low, high - median) for low, high in windows])


def _from_place(values: list[Array], first: int, step: int, steps: Array, most: int) -> list[Array]:
    """values[first + step · steps:], followed by +∞, for a number of steps, at most `most`, that is known later."""
    values = values[first:]
    for bit in range(most.bit_length()):
        missing = [jnp.full_like(values[0], jnp.inf)] * min(len(values), step << bit)
        taken = (steps >> bit) % 2 == 1
        values = [jnp.where(taken, *pair) for pair in zip([*values[step << bit :], *missing], values, strict=True)]
    return values


def _mean_near(values: list[Array], median: Array, limit: Array, count: Array | int) -> Array:
    """In each coordinate, average the `count` values nearest to the median; ties go to the smaller value.

    The `limit` is the largest gap between such a value and the median. Missing values are +∞.
    """
    zero = jnp.zeros_like(median)
    num_inside, num_below, total = zero, zero, zero
    for value in values:
        gap = jnp.abs(value - median)
        num_inside += gap < limit
        num_below += (gap == limit) & (value < median)
        total += jnp.where(gap < limit, value, 0)
    room = count - num_inside  # for values exactly at the limit, on either side
    below = jnp.minimum(num_below, room)
    return (total + below * (median - limit) + (room - below) * (median + limit)) / count


@dataclass(frozen=True)
class Median(Aggregator):
    """The coordinate-wise median (Yin et al. 2018).

    Of an even number of values, it is the mean of the two middle ones. Tolerates f < K/2.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(Median()(rows, num_byzantine=1))
        [2. 2.]
    """

    in_each_coordinate: ClassVar[bool] = True

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        num_rows = cloud.num_points
        if num_rows > NETWORK_LIMIT:
            num_usable = jnp.sum(cloud.usable)
            return _mean_of_ranks(cloud, (num_usable - 1) // 2, num_usable // 2 + 1)
        ranks = _middle_ranks(num_rows - num_byzantine, num_rows)
        return cloud.in_each_coordinate(lambda values, num_usable: _middle(ascending(values, ranks), num_usable, ranks))

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        return 4 * (1 + num_byzantine / (num_agents - 2 * num_byzantine)) ** 2


@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """The mean without the f smallest and the f largest values, in each coordinate (Yin et al. 2018).

    With missing rows, f' values are dropped at either end. Tolerates f < K/2.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(TrimmedMean()(rows, num_byzantine=1).round(1))
        [2.3 1.7]
    """

    averages_all: ClassVar[bool] = True
    in_each_coordinate: ClassVar[bool] = True

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        if cloud.num_points > NETWORK_LIMIT:
            num_usable = jnp.sum(cloud.usable)
            trim = _faults_left(cloud.num_points, num_usable, num_byzantine)
            return _mean_of_ranks(cloud, trim, num_usable - trim)
        # The n − f' smallest of n usable values are as many as the K − f smallest of all: missing ones count as +∞.
        keep = cloud.num_points - num_byzantine

        def trimmed(values: list[Array], num_usable: Array) -> Array:
            values = ascending(values, range(keep))
            trim = _faults_left(cloud.num_points, num_usable, num_byzantine)
            total = sum(values[num_byzantine:keep], _sum_of_listed(values, trim, trim + keep, range(num_byzantine)))
            return total / (keep - trim)

        return cloud.in_each_coordinate(trimmed)

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        ratio = num_byzantine / (num_agents - 2 * num_byzantine)
        return 6 * ratio * (1 + ratio)


@dataclass(frozen=True)
class MeaMed(Aggregator):
    """Mean around the median: in each coordinate, the mean of the K − f values nearest to it (Xie et al. 2018).

    Of two values equally near to the median, the smaller one is preferred. Tolerates f < K/2.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(MeaMed()(rows, num_byzantine=1))
        [2. 2.]
    """

    in_each_coordinate: ClassVar[bool] = True

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        num_rows, count = cloud.num_points, cloud.num_points - num_byzantine

        def around_median(values: list[Array], num_usable: Array) -> Array:
            values = ascending(values)
            median = _middle(values, num_usable, _middle_ranks(count, num_rows))
            limit = _least_reach(values, values[count - 1 :], median)
            return _mean_near(values, median, limit, count)

        return cloud.in_each_coordinate(around_median)


@dataclass(frozen=True)
class Bulyan(Aggregator):
    """Krum selects K − 2f rows, one after the other; MeaMed then averages them (El Mhamdi et al. 2018).

    When r rows are left to select from, the score of a row is the sum of its r − f' − 2 smallest squared distances to
    the others. In each coordinate, the n − 4f' values nearest to the median of the n − 2f' selected ones are averaged.
    Needs K ≥ 4f + 3.

    Deviation: for the last selections, r < f' + 3, and the paper does not define the score. It is one distance here.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [1, 2], [2, 1], [90, -90]])  # the last is an attacker's
        >>> print(Bulyan()(rows, num_byzantine=1).round(1))
        [1.7 2. ]
    """

    bound: ClassVar[str] = "K ≥ 4f + 3"
    branches: ClassVar[bool] = True
    in_each_coordinate: ClassVar[bool] = True

    def max_byzantine(self, num_agents: int) -> int:
        return max(0, (num_agents - 3) // 4)

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        num_usable = jnp.sum(cloud.usable)
        faults = _faults_left(cloud.num_points, num_usable, num_byzantine)
        others = jnp.where(jnp.eye(cloud.num_points, dtype=bool), jnp.inf, cloud.distances())
        nearest = jnp.argsort(others, axis=1)  # once, since rows only drop out
        ascending_others = jnp.take_along_axis(others, nearest, axis=1)
        up_to = jnp.triu(jnp.ones_like(others))  # to count with a product: a cumulative sum takes longer on CPUs

        def pick(step: Array, left: Array) -> Array:
            neighbours = jnp.maximum(num_usable - step - faults - 2, 1)
            among = left[nearest]
            counted = among & (dot(among.astype(others.dtype), up_to) <= neighbours)
            scores = jnp.sum(jnp.where(counted, ascending_others, 0), axis=1)
            alone = num_usable - step == 1
            best = jnp.argmin(jnp.where(left, jnp.where(alone, 0, scores), jnp.inf))
            return left & (jnp.arange(len(left)) != best)

        left = lax.fori_loop(0, num_usable - 2 * faults, pick, cloud.usable)
        selected, num_rows = cloud.usable & ~left, cloud.num_points
        fewest, least = num_rows - 2 * num_byzantine, num_rows - 4 * num_byzantine

        def without_missing() -> Array:
            """Sort the selected rows alone, since their number is known: half as many comparators as for all rows."""
            values = ascending(cloud.rows_at(jnp.nonzero(selected, size=fewest)[0]))
            median = _middle(values, fewest, _middle_ranks(fewest, fewest))
            limit = _least_reach(values, values[least - 1 :], median)
            return _mean_near(values, median, limit, least)[0]

        def with_missing(values: list[Array], num_selected: Array, num_usable: Array, faults: Array) -> Array:
            """With m missing rows, f' = f − m: so K − 2f + m rows were selected, and K − 4f + 3m of them count."""
            most = num_rows - num_byzantine
            values = ascending(values, range(most))[:most]
            median = _middle(values, num_selected, _middle_ranks(fewest, most))
            highs = _from_place(values, least - 1, 3, num_byzantine - faults, num_byzantine)
            limit = _least_reach(values, highs[: 2 * num_byzantine + 1], median)
            return _mean_near(values, median, limit, num_usable - 4 * faults)

        def of_all() -> Array:
            return cloud.in_each_coordinate(with_missing, num_usable, faults, members=selected)

        # On a GPU, a second network takes longer to compile than it saves.
        if num_byzantine == 0 or jax.default_backend() != "cpu":
            return of_all()
        return lax.cond(unless_batched(jnp.all(cloud.usable)), without_missing, of_all)


# Rules that select or weight whole rows


@dataclass(frozen=True)
class Krum(WeightedAggregator):
    """The row that is nearest to its neighbours, by squared distances (Blanchard et al. 2017).

    argmin_i Σ_{j∈S_i} ‖x_j − x_i‖², where S_i are the rows nearest to x_i. Tolerates f < K/4.

    Args:
        neighbours: The size of S_i. "paper" counts the K − f nearest rows including x_i itself (Jordan et al. 2024);
            "original" counts the K − f − 2 nearest others (Blanchard et al. 2017).

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(Krum()(rows, num_byzantine=1))
        [2. 2.]
    """

    bound: ClassVar[str] = "f < K/4"
    neighbours: Literal["paper", "original"] = "paper"

    def __post_init__(self) -> None:
        check_choice(self, "neighbours", self.neighbours, ("paper", "original"))

    def max_byzantine(self, num_agents: int) -> int:
        return (num_agents - 1) // 4

    def _scores(self, cloud: Cloud, num_byzantine: int) -> Array:
        keep = cloud.num_points - num_byzantine
        return krum_scores(cloud, keep if self.neighbours == "paper" else keep - 1)

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return cloud.mean_of(jnp.arange(cloud.num_points) == jnp.argmin(self._scores(cloud, num_byzantine)))

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        if type(self) is not Krum or cloud.mixing is not None:
            return super().combine(cloud, num_byzantine, key)
        # To copy the row takes less than a sum over all rows.
        return cloud.rows_at(jnp.argmin(self._scores(cloud, num_byzantine))[None])[0][0]

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        # MultiKrum's is never worse than Krum's (Bareilles et al. 2026).
        return 6 * (1 + num_byzantine / (num_agents - 2 * num_byzantine)) if self.neighbours == "paper" else None


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The mean of the K − f rows with the lowest Krum scores (Blanchard et al. 2017).

    Needs K > 2f + 2. The option `neighbours` is that of `Krum`.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(MultiKrum().weights(rows, num_byzantine=1))
        [0.25 0.25 0.25 0.25 0.  ]
    """

    bound: ClassVar[str] = "K > 2f + 2"

    def max_byzantine(self, num_agents: int) -> int:
        return max(0, (num_agents - 3) // 2)

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        keep = cloud.num_points - num_byzantine
        return cloud.mean_of(smallest(self._scores(cloud, num_byzantine), keep))


class _WeiszfeldState(NamedTuple):
    current: Array  # coefficients [n + 1] of z
    iteration: Array
    moving: Array  # bool: the last step was longer than the tolerance


@dataclass(frozen=True)
class RFA(WeightedAggregator):
    """The geometric median argmin_z Σ_i ‖z − x_i‖, by smoothed Weiszfeld steps (Pillutla et al. 2022).

    z ← Σ β_i x_i / Σ β_i with β_i = 1/max(ν, ‖z − x_i‖), until a step is short. Tolerates f < K/2.

    Deviation: the iteration starts at MultiKrum's result instead of the mean. Attackers can move the mean far away, and
    each step brings it back only by a factor f/(K − f).

    Args:
        smoothing: ν, the distance below which weights stop growing.
        max_iterations: The largest number of steps.
        tolerance: Stop when a step is shorter than this times the median distance to the rows.
        start: Where to start, "multikrum" or "zero" (the origin).

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(RFA()(rows, num_byzantine=1).round(1))
        [2. 2.]
    """

    numbers: ClassVar[tuple[str, ...]] = ("smoothing", "tolerance")
    smoothing: float = 1e-6
    max_iterations: int = 200
    tolerance: float = 1e-5
    start: Literal["multikrum", "zero"] = "multikrum"

    def __post_init__(self) -> None:
        check_positive(self, smoothing=self.smoothing)
        check_count(self, max_iterations=self.max_iterations)
        check_choice(self, "start", self.start, ("multikrum", "zero"))
        if self.tolerance < 0:
            raise ValueError(f"RFA: tolerance must not be negative, got {self.tolerance}.")

    @staticmethod
    def reference() -> "RFA":
        """Return the rule as published implementations run it: eight steps from zero with ν = 0.1."""
        return RFA(smoothing=0.1, max_iterations=8, tolerance=0.0, start="zero")

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        def step(state: _WeiszfeldState) -> _WeiszfeldState:
            gaps = cloud.distances_to(state.current)[:-1]
            weights = jnp.where(cloud.usable, 1 / jnp.maximum(gaps, self.smoothing), 0)
            following = jnp.append(weights / jnp.sum(weights), 0)
            moved = _length(cloud, following - state.current)
            # The median distance, not the largest: one far attacker must not make every step look short.
            scale = kth_smallest(jnp.where(cloud.usable, gaps, jnp.inf), (cloud.num_points - num_byzantine) // 2)
            return _WeiszfeldState(following, state.iteration + 1, moved > self.tolerance * scale)

        robust = MultiKrum().coefficients(cloud, num_byzantine, key)
        start = cloud.origin() if self.start == "zero" else robust
        last = lax.while_loop(
            lambda state: state.moving & (state.iteration < self.max_iterations),
            step,
            _WeiszfeldState(start, iteration=jnp.int32(0), moving=jnp.asarray(True)),
        )
        return last.current

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        return 4 * (1 + num_byzantine / (num_agents - 2 * num_byzantine)) ** 2


def _length(cloud: Cloud, direction: Array) -> Array:
    """‖Σ_j a_j x_j‖ for coefficients a [n + 1] that sum to zero."""
    return jnp.sqrt(jnp.maximum(dot(direction, dot(cloud.gram, direction)), 0))


def nearest_to(cloud: Cloud, pivot: Array, count: int) -> Array:
    """Return the coefficients of the mean of the `count` points nearest to point `pivot`, itself included.

    They are NaN if the pivot is not usable.
    """
    mean = cloud.mean_of(smallest(cloud.distances_from(pivot), count))
    return jnp.where(cloud.usable[pivot], mean, jnp.nan)


@dataclass(frozen=True)
class MDA(WeightedAggregator):
    """Minimum-diameter averaging: the mean of the K − f rows with the least diameter (El Mhamdi et al. 2018).

    mean(S) with S = argmin_{|S| = K − f} max_{i,j∈S} ‖x_i − x_j‖ (Rousseeuw 1985). The subset is exact at any K. Krum
    scores decide between subsets of equal diameter, see `byzpg.robust.least_diameter`. Tolerates f < K/2.

    Args:
        node_limit: The most nodes that the search may visit. If that is not enough, it raises SearchLimitError; it
            never returns another subset.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(MDA()(rows, num_byzantine=1))
        [2. 2.]
    """

    ignores_far_rows: ClassVar[bool] = True
    averages_all: ClassVar[bool] = True
    node_limit: int = 1_000_000

    def __post_init__(self) -> None:
        check_count(self, node_limit=self.node_limit)

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        keep = cloud.num_points - num_byzantine
        return cloud.mean_of(least_diameter_subset(cloud.distances(), cloud.usable, keep, self.node_limit))

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        # ‖F − x̄_S‖ ≤ 2f/(K − f) · diameter (Farhadkhani et al. 2022), and diameter² ≤ 2 Σ_S ‖x_i − x̄_S‖².
        return 8 * num_byzantine**2 / (num_agents - num_byzantine)


# So many subsets are tried at a time, so that their matrices fit into memory for many receivers.
SUBSETS_AT_ONCE = 256


@lru_cache
def _subsets(num_rows: int, size: int) -> np.ndarray:
    """Return all subsets of `size` rows, in lexicographic order, as indices [C, size]."""
    return np.array(list(combinations(range(num_rows), size)), np.int32)


# A matrix is squared so often to find its largest eigenvalue, and scaled after so many squarings: no entry of M⁸
# exceeds K⁷ if none of M exceeds 1.
SQUARINGS, UNSCALED = 24, 3


def _largest_eigenvalue(matrix: Array) -> tuple[Array, Array]:
    """The largest eigenvalue of a positive semidefinite matrix, and an eigenvector of length 1, or 0 if there is none.

    The powers of a matrix turn every column towards that eigenvector. In the power p = 2²⁴, what is left of others
    changes the eigenvalue by at most 1/(2ep) of it, which is below float32's rounding, however close theirs are. Many
    small matrices are squared faster than they are decomposed, and LAPACK may hang in batches inside of loops.
    """

    def positive(number: Array) -> Array:
        return jnp.where(number > 0, number, 1)

    # Rounding may have made it indefinite, with small numbers on its diagonal. Squares have their largest one there.
    scale = positive(jnp.max(jnp.abs(matrix)))
    power = unit = matrix / scale
    for squaring in range(1, SQUARINGS + 1):  # unrolled: a loop of XLA is slow on a GPU
        power = dot(power, power)
        if squaring % UNSCALED == 0:
            power = power / positive(jnp.max(jnp.diagonal(power)))
    found = power[:, jnp.argmax(jnp.diagonal(power))]
    direction = found / positive(jnp.linalg.norm(found))
    return scale * jnp.maximum(dot(direction, dot(unit, direction)), 0), direction


@dataclass(frozen=True)
class SMEA(WeightedAggregator):
    """Smallest maximum eigenvalue averaging: the mean of the K − f rows that vary least (Allouah et al. 2023).

    mean(S) with S = argmin_{|S| = K − f} λ_max(1/|S| Σ_{i∈S} (x_i − x̄_S)(x_i − x̄_S)ᵀ): in no direction do the rows of
    S vary more than the rows of any other subset do in their worst direction. Of subsets with equal eigenvalues, the
    first in lexicographic order counts ("On the Privacy-Robustness-Utility Trilemma").

    All C(K, f) subsets are tried, and their eigenvalues are exact up to rounding. Tolerates f < K/2 as long as there
    are no more than `subset_limit` subsets. `CAF` lowers the same eigenvalue without trying subsets.

    Args:
        subset_limit: The most subsets that may be tried. The time grows with their number, and with the cube of K − f.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(SMEA()(rows, num_byzantine=1))
        [2. 2.]
    """

    averages_all: ClassVar[bool] = True
    subset_limit: int = 10_000

    def __post_init__(self) -> None:
        check_count(self, subset_limit=self.subset_limit)

    @property
    def bound(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (
            f"f < K/2 and C(K, f) ≤ subset_limit = {self.subset_limit} (raise it, or use CAF, which tries no subsets)"
        )

    def max_byzantine(self, num_agents: int) -> int:
        faults = range((num_agents - 1) // 2 + 1)
        return max((f for f in faults if comb(num_agents, f) <= self.subset_limit), default=-1)

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        subsets = jnp.asarray(_subsets(cloud.num_points, cloud.num_points - num_byzantine))

        def largest_variance(rows: Array) -> Array:
            # The Gram matrix of the rows around their mean has the nonzero eigenvalues of |S| times their covariance.
            gram = cloud.inner[rows[:, None], rows[None, :]]
            half = gram - jnp.mean(gram, axis=0)
            variance, _ = _largest_eigenvalue(half - jnp.mean(half, axis=1, keepdims=True))
            return jnp.where(jnp.all(cloud.usable[rows]) & jnp.isfinite(variance), variance, jnp.inf)

        variances = lax.map(largest_variance, subsets, batch_size=SUBSETS_AT_ONCE)
        members = jnp.zeros_like(cloud.usable).at[subsets[jnp.argmin(variances)]].set(True)
        return cloud.mean_of(members)

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        # Two sets of K − f rows share at least K − 2f. Along any direction, the mean of a share p of some rows is
        # within √((1 − p)/p) standard deviations of the mean of all: here √(f/(K − 2f)). The chosen set varies no more
        # than the honest one, so this distance counts twice.
        return 4 * num_byzantine / (num_agents - 2 * num_byzantine)


@dataclass(frozen=True)
class FedPGFilter(WeightedAggregator):
    """FedPG-BR's filter: the mean of the rows within a radius T of a vector median (Fan et al. 2021).

    Dense rows have more than half of the rows within T, themselves included. The vector median is the dense row nearest
    to the mean of the dense rows; of equally near ones, the one that needs the smallest radius to be dense. If fewer
    than K − f rows are within T of it, or no row is dense, all is done again with a wider radius, and as many rows as
    are within that count. Tolerates f < K/2.

    In the paper, T = 2σ √(V/B) with V = 2 log(2K/δ), and the wider radius is 2σ. Here B is the size of the batches, and
    no gradient of one trajectory is further than σ from the true one. To use constants of your own, give both radii.

    Deviations: a rule knows neither σ nor B, so by default T is twice an estimate of the standard deviation σ/√B of the
    rows: T = 2 S/√2, where S is the median over the rows of the median distance to all rows (as S_n of Rousseeuw and
    Croux 1993). Distances between rows of standard deviation s are about √2 s in many dimensions, and fewer than half
    of the rows cannot move S beyond the distances of the others. √V is left out: it is about 3, the noise of long
    vectors does not exceed its standard deviation by such factors, and attackers would use the room. Where no row is
    dense within the wider radius either, the published code makes no step; here, that radius grows until one is.

    Args:
        radius: T, in the units of the rows. None computes √2 S.
        fallback_radius: The wider radius. None means 2T.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(FedPGFilter().weights(rows, num_byzantine=1))
        [0.25 0.25 0.25 0.25 0.  ]
    """

    numbers: ClassVar[tuple[str, ...]] = ("radius", "fallback_radius")
    radius: float | None = None
    fallback_radius: float | None = None

    def __post_init__(self) -> None:
        radii = {"radius": self.radius, "fallback_radius": self.fallback_radius}
        check_positive(self, **{name: value for name, value in radii.items() if value is not None})
        if self.radius is not None and self.fallback_radius is not None and self.fallback_radius < self.radius:
            raise ValueError(
                f"FedPGFilter: fallback_radius must be at least radius = {self.radius}, got {self.fallback_radius}."
            )

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        distances, middle = cloud.distances(), jnp.sum(cloud.usable) // 2
        reach = sort(distances, axis=-1)[:, middle]  # the squared radius within which a row has more than half
        densest = jnp.arange(cloud.num_points) == jnp.argmin(reach)
        limit = 2 * sort(reach, axis=0)[middle] if self.radius is None else jnp.square(self.radius)
        wider = 4 * limit if self.fallback_radius is None else jnp.square(self.fallback_radius)

        def near_median(limit: Array) -> Array:
            dense = (reach <= limit) | densest
            gaps = jnp.where(dense, cloud.distances_to(cloud.mean_of(dense))[:-1], jnp.inf)
            # Two dense rows are equally near to their mean: rounding errors must not decide between them.
            nearest = gaps <= 1.0001 * jnp.min(gaps)
            median = jnp.argmin(jnp.where(nearest, reach, jnp.inf))
            return distances[median] <= jnp.maximum(limit, reach[median])

        near = near_median(limit)
        enough = (jnp.min(reach) <= limit) & (jnp.sum(near) >= cloud.num_points - num_byzantine)
        return cloud.mean_of(jnp.where(enough, near, near_median(wider)))


@dataclass(frozen=True)
class MoNNA(WeightedAggregator):
    """The mean of the K − f rows nearest to a trusted row, the pivot (Farhadkhani et al. 2023).

    Tolerates f < K/2.

    Args:
        pivot: The index of the trusted row. None means the receiver's own row where that is known (in an exchange),
            and Krum's choice where it is not (at a server).

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(MoNNA(pivot=0)(rows, num_byzantine=1))
        [2. 2.]
    """

    pivot: int | None = None

    @property
    def differs_by_receiver(self) -> bool:
        return self.pivot is None

    def max_byzantine(self, num_agents: int) -> int:
        if self.pivot is not None and not 0 <= self.pivot < num_agents:
            raise ValueError(f"{self}: pivot must be the index of a row, 0 to {num_agents - 1}.")
        return (num_agents - 1) // 2

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        keep = cloud.num_points - num_byzantine
        if self.pivot is not None:
            pivot = jnp.asarray(self.pivot)
        elif cloud.own is not None:
            pivot = cloud.own
        else:
            pivot = jnp.argmin(krum_scores(cloud, keep))
        return nearest_to(cloud, pivot, keep)


@dataclass(frozen=True)
class CenteredClipping(WeightedAggregator):
    """A centre moved by the mean of the rows' differences from it, each clipped (Karimireddy et al. 2021).

    v ← v + 1/n Σ_i min(1, τ/‖x_i − v‖)(x_i − v), a few times. One attacker moves the result by at most τ/n in each
    iteration. Tolerates f < K/2.

    Args:
        radius: τ, in the units of the rows.
        iterations: The number of iterations.
        start: Where v starts: "krum" at Krum's choice, "zero" at the origin, as is usual for momenta.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(CenteredClipping(radius=1.0)(rows, num_byzantine=1).round(1))
        [2.3 1.9]
    """

    numbers: ClassVar[tuple[str, ...]] = ("radius",)
    radius: float = 1.0
    iterations: int = 3
    start: Literal["krum", "zero"] = "krum"

    def __post_init__(self) -> None:
        check_positive(self, radius=self.radius)
        check_count(self, iterations=self.iterations)
        check_choice(self, "start", self.start, ("krum", "zero"))

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        choice = Krum().coefficients(cloud, num_byzantine, key)
        begin = cloud.origin() if self.start == "zero" else choice

        def step(_: Array, current: Array) -> Array:
            gaps = cloud.distances_to(current)[:-1]
            share = jnp.where(cloud.usable, jnp.minimum(1, self.radius / jnp.maximum(gaps, 1e-30)), 0)
            share = share / jnp.sum(cloud.usable)
            return (1 - jnp.sum(share)) * current + jnp.append(share, 0)

        return lax.fori_loop(0, self.iterations, step, begin)


class _FilterState(NamedTuple):
    weights: Array  # [n], the c_i
    best_mean: Array  # [n], coefficients of the weighted mean with the least largest variance so far
    best_variance: Array
    unfinished: Array  # bool


@dataclass(frozen=True)
class CAF(WeightedAggregator):
    """Covariance-bound-agnostic filter: rows that cause the largest variance lose weight (Allouah et al. 2025).

    While the weights sum to more than n − 2f', c_i ← c_i (1 − τ_i/max_j τ_j). Here τ_i is the squared distance of row i
    from the weighted mean, measured along the direction of largest weighted variance. The result is the weighted mean
    for which the largest variance was least. Tolerates f < K/2.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(CAF()(rows, num_byzantine=1).round(1))
        [2. 2.]
    """

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        num_usable = jnp.sum(cloud.usable)
        least_weight = num_usable - 2 * _faults_left(cloud.num_points, num_usable, num_byzantine)
        gram = cloud.inner

        def step(state: _FilterState) -> _FilterState:
            weights = state.weights
            mean = weights / jnp.sum(weights)
            towards_mean = dot(gram, mean)
            around = gram - towards_mean[:, None] - towards_mean[None, :] + dot(mean, towards_mean)
            root = jnp.sqrt(mean)
            # The K × K matrix √c_i √c_j ⟨x_i − μ, x_j − μ⟩ has the eigenvalues of the d × d covariance.
            variance, direction = _largest_eigenvalue(around * root[:, None] * root[None, :])
            along = jnp.abs(dot(around, root * direction))
            furthest = jnp.argmax(jnp.where(weights > 0, along, -1))
            better = variance < state.best_variance
            # The ratio is squared after the division, because distances⁴ would overflow. The furthest row's weight is
            # set to 0: 1 − 1 computed in two places may leave 1e-7, and the same row would be the furthest for ever.
            ratio = along / jnp.where(along[furthest] > 0, along[furthest], 1)
            lighter = (weights * jnp.maximum(1 - jnp.square(ratio), 0)).at[furthest].set(0)
            unfinished = (along[furthest] > 0) & (jnp.sum(lighter) > least_weight)
            return _FilterState(
                weights=lighter,
                best_mean=jnp.where(better, mean, state.best_mean),
                best_variance=jnp.where(better, variance, state.best_variance),
                unfinished=unfinished,
            )

        full_weights = cloud.usable.astype(gram.dtype)
        start = _FilterState(
            weights=full_weights,
            best_mean=full_weights / num_usable,
            best_variance=jnp.asarray(jnp.inf, gram.dtype),
            unfinished=jnp.asarray(True),
        )
        last = lax.while_loop(lambda state: state.unfinished, step, start)
        return jnp.append(last.best_mean, 0)


# Pre-aggregators: they change the points, and pass them to the rule inside


class PreAggregator(Aggregator):
    """An aggregation rule that changes the rows and passes them to the rule inside it.

    The changed rows are affine combinations of the received ones. Subclasses implement `points`.
    """

    rule: Aggregator
    one_to_one: ClassVar[bool] = True  # new point i still belongs to sender i

    @abstractmethod
    def points(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> tuple[Array, Array, Array | None]:
        """Return the changed points.

        Returns:
            The new points as combinations [n', n + 1] of the old ones and the origin, which of them are usable [n'],
            and the key of the inner rule.
        """

    def _mixed(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> tuple[Cloud, Array, Array | None]:
        matrix, usable, key = self.points(cloud, num_byzantine, key)
        return cloud.mixed(matrix, usable, cloud.own if self.one_to_one else None), matrix, key

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        mixed, _, key = self._mixed(cloud, num_byzantine, key)
        return self.rule.combine(mixed, num_byzantine, key)

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        mixed, matrix, key = self._mixed(cloud, num_byzantine, key)
        inner = self.rule.coefficients(mixed, num_byzantine, key)
        result = dot(inner[:-1], matrix)
        return result.at[-1].add(inner[-1])

    @property
    def has_weights(self) -> bool:
        return self.rule.has_weights

    @property
    def combines_in_place(self) -> bool:
        return self.rule.combines_in_place

    @property
    def bound(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rule.bound

    @property
    def needs_key(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rule.needs_key

    @property
    def differs_by_receiver(self) -> bool:
        return self.needs_key or self.rule.differs_by_receiver

    def max_byzantine(self, num_agents: int) -> int:
        return self.rule.max_byzantine(num_agents)

    def num_points(self, num_agents: int, num_byzantine: int) -> int:
        """Return the number n' of changed rows."""
        return num_agents

    def check(self, num_agents: int, num_byzantine: int) -> None:
        super().check(num_agents, num_byzantine)
        self.rule.check(self.num_points(num_agents, num_byzantine), num_byzantine)  # a rule may try itself there


def _check_inner(wrapper: object, rule: object) -> None:
    if not isinstance(rule, Aggregator):
        raise TypeError(f"{type(wrapper).__name__} wraps an aggregator such as RFA(), got {rule!r}.")
    if rule.remembers:
        raise ValueError(
            f"{type(wrapper).__name__} cannot wrap {rule}: what is remembered is what was received. Put it outside, "
            "around all other rules."
        )


@dataclass(frozen=True)
class NNM(PreAggregator):
    """Nearest-neighbour mixing: each row becomes the mean of its K − f nearest rows (Allouah et al. 2023).

    Tolerates what the inner rule tolerates, and at most f < K/2.

    Args:
        rule: The rule that aggregates the mixed rows.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(NNM(TrimmedMean())(rows, num_byzantine=1).round(1))
        [2. 2.]
    """

    rule: Aggregator

    def __post_init__(self) -> None:
        _check_inner(self, self.rule)

    def is_mean(self, num_byzantine: int) -> bool:
        # With f = 0, all new rows are the mean of all rows.
        return num_byzantine == 0 and type(self) is NNM and self.rule.is_mean(num_byzantine)

    def points(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> tuple[Array, Array, Array | None]:
        keep = cloud.num_points - num_byzantine
        near = smallest(cloud.distances(), keep) & cloud.usable[:, None] & cloud.usable[None, :]
        near = near.astype(cloud.inner.dtype)
        matrix = near / jnp.maximum(jnp.sum(near, axis=1, keepdims=True), 1)
        return jnp.pad(matrix, ((0, 0), (0, 1))), cloud.usable, key

    def max_byzantine(self, num_agents: int) -> int:
        return min(self.rule.max_byzantine(num_agents), (num_agents - 1) // 2)

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        inner = self.rule.robustness_bound(num_agents, num_byzantine)
        return None if inner is None else 8 * num_byzantine / (num_agents - num_byzantine) * (1 + inner)


def _scaled(scale: Array) -> Array:
    """The points scaled by `scale` [n] towards the origin, as combinations [n, n + 1]."""
    return jnp.concatenate([jnp.diag(scale), (1 - scale)[:, None]], axis=1)


def _norms(cloud: Cloud) -> Array:
    return cloud.distances_to(cloud.origin())[:-1]


@dataclass(frozen=True)
class Clipping(PreAggregator):
    """Clipping: every row longer than a threshold is scaled down to that norm.

    x_i ← min(1, τ/‖x_i‖) x_i. Tolerates what the inner rule tolerates.

    Args:
        rule: The rule that aggregates the clipped rows.
        threshold: τ, in the units of the rows.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(Clipping(Mean(), threshold=3.0)(rows, num_byzantine=1).round(1))
        [1.9 1. ]
    """

    numbers: ClassVar[tuple[str, ...]] = ("threshold",)
    rule: Aggregator
    threshold: float = 1.0

    def __post_init__(self) -> None:
        _check_inner(self, self.rule)
        check_positive(self, threshold=self.threshold)

    def points(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> tuple[Array, Array, Array | None]:
        scale = jnp.minimum(1, self.threshold / jnp.maximum(_norms(cloud), 1e-30))
        return _scaled(scale), cloud.usable, key


@dataclass(frozen=True)
class ARC(PreAggregator):
    """Adaptive robust clipping: the longest rows are scaled down to the norm of the next one (Allouah et al. 2025).

    The ⌊2f'(n − f')/n⌋ longest rows are clipped. Tolerates what the inner rule tolerates.

    Args:
        rule: The rule that aggregates the clipped rows.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(ARC(Mean())(rows, num_byzantine=1).round())
        [2. 1.]
    """

    rule: Aggregator

    def __post_init__(self) -> None:
        _check_inner(self, self.rule)

    def points(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> tuple[Array, Array, Array | None]:
        num_usable = jnp.sum(cloud.usable)
        faults = _faults_left(cloud.num_points, num_usable, num_byzantine)
        num_clipped = 2 * faults * (num_usable - faults) // num_usable
        norms = _norms(cloud)
        longest_first, _ = lax.top_k(jnp.where(cloud.usable, norms, -1), cloud.num_points)
        threshold = longest_first[num_clipped]
        return _scaled(jnp.minimum(1, threshold / jnp.maximum(norms, 1e-30))), cloud.usable, key

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        inner = self.rule.robustness_bound(num_agents, num_byzantine)
        return None if inner is None else inner + 2 * num_byzantine / (num_agents - 2 * num_byzantine)


@dataclass(frozen=True)
class Bucketing(PreAggregator):
    """Bucketing: rows are shuffled and averaged in small buckets before the rule is applied (Karimireddy et al. 2022).

    A bucket is the mean of its usable rows; a bucket without usable rows is missing. One attacker spoils at most one
    bucket, so the inner rule must tolerate f of ⌈K/size⌉ buckets. Needs a random key.

    Args:
        rule: The rule that aggregates the buckets.
        size: The number of rows in a bucket. None means the largest size that the inner rule's bound allows,
            s = ⌈α_max/α⌉ − 1; 1 only shuffles.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(Bucketing(Median(), size=2)(rows, num_byzantine=1, key=jax.random.key(0)).round(1))
        [3.  1.5]
    """

    rule: Aggregator
    size: int | None = None
    one_to_one: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_inner(self, self.rule)
        if isinstance(self.rule, MoNNA) and self.rule.pivot is not None:
            raise ValueError(
                f"Bucketing: buckets are random, so {self.rule} would trust a random one; leave out pivot."
            )
        if self.size is not None:
            check_count(self, size=self.size)

    @property
    def needs_key(self) -> bool:
        return True

    def bucket_size(self, num_agents: int, num_byzantine: int) -> int:
        """Return the number of rows in a bucket for f of K."""
        if self.size is not None:
            return self.size
        sizes = range(num_agents, 0, -1)
        return next((s for s in sizes if self.rule.max_byzantine(-(-num_agents // s)) >= num_byzantine), 1)

    def num_points(self, num_agents: int, num_byzantine: int) -> int:
        return -(-num_agents // self.bucket_size(num_agents, num_byzantine))

    def max_byzantine(self, num_agents: int) -> int:
        size = self.size or 1
        return self.rule.max_byzantine(-(-num_agents // size))

    @property
    def bound(self) -> str:
        return f"{self.rule.bound} for K/{self.size} buckets" if self.size else self.rule.bound

    def points(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> tuple[Array, Array, Array | None]:
        assert key is not None
        num_rows = cloud.num_points
        size = self.bucket_size(num_rows, num_byzantine)
        num_buckets = -(-num_rows // size)
        place = jax.random.permutation(key, num_rows)
        bucket_of = jnp.zeros(num_rows, int).at[place].set(jnp.arange(num_rows) // size)
        member = (bucket_of[None, :] == jnp.arange(num_buckets)[:, None]) & cloud.usable[None, :]
        member = member.astype(cloud.inner.dtype)
        count = jnp.sum(member, axis=1, keepdims=True)
        matrix = jnp.pad(member / jnp.maximum(count, 1), ((0, 0), (0, 1)))
        return matrix, count[:, 0] > 0, jax.random.fold_in(key, 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memories:
    """What a receiver remembers of K agents' messages, each cut to the median length of those that came with it."""

    messages: Array  # the mean message of each agent [K, d]
    products: Array  # the mean inner product of each two messages, over that length [K, K]


@dataclass(frozen=True)
class Remember(PreAggregator):
    """Receivers remember what each agent sent, and the rule sees messages and memories side by side.

    A lie within the spread of the honest messages is hidden in one exchange, but not over many: honest noise averages
    out, and a lie that is repeated does not. (SafeguardSGD, Allen-Zhu et al. 2021, drops agents by what they sent in
    all.) Nor does honest noise depend on others' messages, as most lies do.

    So a receiver remembers the mean message r of each agent and the mean inner product of each two messages, both over
    about `exchanges` exchanges: r ← r + (x − r)/`exchanges` for each message x that arrives. For both, messages that
    are longer than the median are cut to it; the products are in units of the median. The rule is applied to the rows
    (x, `weight` · r, `weight` · c), where c are the agent's products with others in order of size, without the f
    smallest and the f largest: f attackers choose the products with their own messages. The result is the part that
    belongs to the messages. In a call, where nothing is remembered, this is the rule inside; in a loop of your own,
    `initial_memory` and `recall` give and take the memories.

    For agents that all estimate the same gradient, and for rules that compare whole rows and have no lengths of their
    own. Each receiver remembers K vectors.

    Args:
        rule: The rule that aggregates messages and memories.
        exchanges: Over how many exchanges a memory is the mean, about; not below 1. For agents with a critic, 1000 are
            those of some thirty iterations, and for others, 1000 iterations.
        weight: The factor of the memories. What is independent in each of n iterations is by about √(2n) smaller in the
            memory, so that 30 gives thirty iterations about four times as much weight as messages have.

    Examples:
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(Remember(RFA())(rows, num_byzantine=1).round(1))
        [2. 2.]
    """

    numbers: ClassVar[tuple[str, ...]] = ("exchanges", "weight")
    rule: Aggregator
    exchanges: float = 1000.0
    weight: float = 30.0

    def __post_init__(self) -> None:
        _check_inner(self, self.rule)
        rules = [self.rule]
        while isinstance(rules[-1], PreAggregator):
            rules.append(rules[-1].rule)
        if isinstance(rules[-1], Mean | Median | TrimmedMean | MeaMed) and not any(isinstance(r, NNM) for r in rules):
            raise ValueError(
                f"Remember({self.rule}) would not use memories: {rules[-1]} treats every coordinate by itself. Use a "
                f"rule that compares whole rows, such as NNM({rules[-1]}) or RFA()."
            )
        for rule in rules:
            told = isinstance(rule, FedPGFilter) and (rule.radius or rule.fallback_radius)
            if told or isinstance(rule, Clipping | CenteredClipping):
                raise ValueError(
                    f"Remember({self.rule}) would compare {rule}'s length with messages and memories together. Use a "
                    "rule that is told no length, such as NNM(TrimmedMean()) or RFA()."
                )
        check_finite(self, exchanges=self.exchanges, weight=self.weight)
        if not self.exchanges >= 1:
            raise ValueError(f"Remember: exchanges must be at least 1, got {self.exchanges}.")
        check_positive(self, weight=self.weight)

    def points(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> tuple[Array, Array, Array | None]:
        return jnp.eye(cloud.num_points, cloud.num_points + 1), cloud.usable, key

    def initial_memory(self, num_agents: int, dimension: int) -> Memories:
        return Memories(jnp.zeros((num_agents, dimension)), jnp.zeros((num_agents, num_agents)))

    def recall(
        self,
        rows: Array,
        memory: Memories,
        *,
        present: Array | None,
        own: Array | None,
        num_byzantine: int,
        key: Array | None,
    ) -> tuple[Applied, Memories]:
        usable = is_sound(rows) if present is None else is_sound(rows) & present
        memory = self._updated(memory, jnp.where(usable[:, None], rows, 0), usable)
        num_others = len(rows) - 1
        others = jnp.sort(jnp.where(jnp.eye(len(rows), dtype=bool), jnp.inf, memory.products), axis=1)
        correlations = others[:, num_byzantine : num_others - num_byzantine]
        seen = jnp.concatenate([rows, self.weight * memory.messages, self.weight * correlations], axis=1)
        applied, _ = self.rule.recall(seen, None, present=usable, own=own, num_byzantine=num_byzantine, key=key)
        return replace(applied, result=applied.result[: rows.shape[1]]), memory

    def _updated(self, memory: Memories, messages: Array, usable: Array) -> Memories:
        """The memory with one more message of each usable agent; the other rows are zero."""
        products = row_products(messages, messages)
        lengths = jnp.sqrt(jnp.diagonal(products))
        typical = jnp.nanmedian(jnp.where(usable, lengths, jnp.nan))
        # Else one long message would be remembered for as long as it is long, and decide others' products with it.
        factors = jnp.minimum(1, typical / jnp.maximum(lengths, 1e-30))
        products = products * factors[:, None] / jnp.maximum(typical, 1e-30) * factors  # in an order without underflow

        def updated(old: Array, new: Array, known: Array) -> Array:
            return old + jnp.where(known, new - old, 0) / self.exchanges

        return Memories(
            updated(memory.messages, messages * factors[:, None], usable[:, None]),
            updated(memory.products, products, usable[:, None] & usable),
        )
