"""Every robust aggregation rule (Aggregate: [K, d] → [d]) and every pre-aggregator.

Notation: of K rows, n are usable (present, finite, norm below 1e18), and f of K are declared Byzantine. A row that is
not usable counts against f, so K − f rows are kept whatever is missing, and f' = f − (K − n) faults are left to fear
among the usable ones: a rule on K rows with some missing is the same rule on the usable rows with f'.

`robustness_bound(K, f)` is the published bound κ on ‖F(x) − x̄_S‖² / (1/|S| Σ_{i∈S} ‖x_i − x̄_S‖²) over every subset S of
K − f rows (Allouah et al. 2023, "Fixing by Mixing"); None where none is known to us.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.robust.components import Vectors, check_choice, check_count, check_positive
from byzpg.robust.geometry import Cloud, dot
from byzpg.robust.least_diameter import least_diameter_subset
from byzpg.robust.order_statistics import ascending, kth_smallest, smallest, sum_of_smallest
from byzpg.robust.rules import Rule, WeightedRule, apply_rule


class Aggregator(Rule):
    """An aggregation rule, called as rule(received, num_byzantine=f, present=None, key=None)."""

    def __call__(
        self, received: Vectors, *, num_byzantine: int, present: Vectors | None = None, key: Array | None = None
    ) -> Array:
        """Aggregate `received` [K, d], of which `present` [K] (bool, default all) arrived, into one vector [d].

        Under jit or vmap, where the values are not known yet, fewer than K − f usable rows give NaN, not an error.
        """
        return apply_rule(self, received, num_byzantine=num_byzantine, present=present, key=key).result

    def weights(
        self, received: Vectors, *, num_byzantine: int, present: Vectors | None = None, key: Array | None = None
    ) -> Array:
        """The weight [K] each row has in the result: who was trusted, who was dropped."""
        applied = apply_rule(self, received, num_byzantine=num_byzantine, present=present, key=key, with_weights=True)
        assert applied.weights is not None
        return applied.weights

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        return None


class WeightedAggregator(WeightedRule, Aggregator):
    """An aggregator that is a weighted mean of the rows."""


def _faults_left(num_points: int, num_usable: Array, num_byzantine: int) -> Array:
    """f' = f − (points missing)."""
    return num_byzantine - (num_points - num_usable)


def krum_scores(cloud: Cloud, count: int) -> Array:
    """Σ of the `count` smallest squared distances of each point, its own zero among them; ∞ if it is not usable."""
    return jnp.where(cloud.usable, sum_of_smallest(cloud.distances(), count), jnp.inf)


# Rules per coordinate


@dataclass(frozen=True)
class Mean(WeightedAggregator):
    """The mean of the usable rows. Not robust: the baseline that one attacker moves anywhere."""

    bound: ClassVar[str] = "f < K"

    def max_byzantine(self, num_agents: int) -> int:
        return num_agents - 1

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return cloud.mean_of(cloud.usable)


def _sorted(rows: list[Array], usable: list[Array]) -> tuple[list[Array], Array]:
    """Values in ascending order per coordinate, missing ones last as +∞, and the number of usable rows."""
    values = [jnp.where(here, row, jnp.inf) for row, here in zip(rows, usable, strict=True)]
    return ascending(values), lax.optimization_barrier(jnp.sum(jnp.stack(usable)))


def _sum_between(values: list[Array], first: Array, stop: Array) -> Array:
    """Σ values[j] for first ≤ j < stop."""
    return sum(
        (jnp.where((first <= j) & (j < stop), value, 0) for j, value in enumerate(values)),
        jnp.zeros_like(values[0]),
    )


def _middle(values: list[Array], num_usable: Array) -> Array:
    """The median of the first `num_usable` of ascending values."""
    low, high = (num_usable - 1) // 2, num_usable // 2
    return _sum_between(values, low, high + 1) / (high - low + 1)


def _mean_around_median(rows: list[Array], usable: list[Array], count: Array | int) -> Array:
    """Per coordinate the mean of the `count` usable values nearest to their median, of two as near the smaller."""
    median = _middle(*_sorted(rows, usable))
    gaps = [jnp.where(here, jnp.abs(row - median), jnp.inf) for row, here in zip(rows, usable, strict=True)]
    limit = _sum_between(ascending(gaps), jnp.asarray(count) - 1, jnp.asarray(count))
    zero = jnp.zeros_like(median)
    num_inside, num_below = zero, zero
    total = zero
    for row, gap in zip(rows, gaps, strict=True):
        num_inside += gap < limit
        num_below += (gap == limit) & (row < median)
        total += jnp.where(gap < limit, row, 0)
    room = count - num_inside  # for values exactly at the limit, on either side
    below = jnp.minimum(num_below, room)
    return (total + below * (median - limit) + (room - below) * (median + limit)) / count


@dataclass(frozen=True)
class Median(Aggregator):
    """Coordinate-wise median; of an even number of values, the mean of the two middle ones (Yin et al. 2018)."""

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return _middle(*_sorted(*cloud.rows()))

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        return 4 * (1 + num_byzantine / (num_agents - 2 * num_byzantine)) ** 2


@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """Per coordinate, the mean without the f' smallest and the f' largest values (Yin et al. 2018)."""

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        values, num_usable = _sorted(*cloud.rows())
        trim = _faults_left(cloud.num_points, num_usable, num_byzantine)
        return _sum_between(values, trim, num_usable - trim) / (num_usable - 2 * trim)

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        ratio = num_byzantine / (num_agents - 2 * num_byzantine)
        return 6 * ratio * (1 + ratio)


@dataclass(frozen=True)
class MeaMed(Aggregator):
    """Mean around the median: per coordinate, the mean of the K − f values nearest to it (Xie et al. 2018)."""

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return _mean_around_median(*cloud.rows(), cloud.num_points - num_byzantine)


@dataclass(frozen=True)
class Bulyan(Aggregator):
    """Krum picks n − 2f' rows one after the other; then the mean of the n − 4f' values nearest to their median.

    El Mhamdi et al. 2018; needs K ≥ 4f + 3. A row's score is the sum of its r − f' − 2 smallest squared distances
    to the other r − 1 rows still there. The last picks have r < f' + 3 rows left, which the paper passes over:
    one distance is used then.
    """

    bound: ClassVar[str] = "K ≥ 4f + 3"

    def max_byzantine(self, num_agents: int) -> int:
        return max(0, (num_agents - 3) // 4)

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        num_usable = jnp.sum(cloud.usable)
        faults = _faults_left(cloud.num_points, num_usable, num_byzantine)
        others = jnp.where(jnp.eye(cloud.num_points, dtype=bool), jnp.inf, cloud.distances())

        def pick(step: Array, left: Array) -> Array:
            neighbours = jnp.maximum(num_usable - step - faults - 2, 1)
            scores = sum_of_smallest(jnp.where(left[None, :], others, jnp.inf), neighbours)
            alone = num_usable - step == 1
            best = jnp.argmin(jnp.where(left, jnp.where(alone, 0, scores), jnp.inf))
            return left & (jnp.arange(len(left)) != best)

        left = lax.fori_loop(0, num_usable - 2 * faults, pick, cloud.usable)
        return _mean_around_median(*cloud.rows(cloud.usable & ~left), num_usable - 4 * faults)


# Rules that choose or weigh whole rows


@dataclass(frozen=True)
class Krum(WeightedAggregator):
    """The row with the least sum of squared distances to its nearest rows: argmin_i Σ_{j∈S_i} ‖x_j − x_i‖².

    Blanchard et al. 2017. neighbours: "paper" counts the K − f nearest rows including itself (Jordan et al. 2024),
    "original" the K − f − 2 nearest others.
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

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        # MultiKrum's is never worse than Krum's (Bareilles et al. 2026).
        return 6 * (1 + num_byzantine / (num_agents - 2 * num_byzantine)) if self.neighbours == "paper" else None


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The mean of the K − f rows with the least Krum scores (Blanchard et al. 2017); needs K > 2f + 2."""

    bound: ClassVar[str] = "K > 2f + 2"

    def max_byzantine(self, num_agents: int) -> int:
        return max(0, (num_agents - 3) // 2)

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        keep = cloud.num_points - num_byzantine
        return cloud.mean_of(smallest(self._scores(cloud, num_byzantine), keep))


@dataclass(frozen=True)
class RFA(WeightedAggregator):
    """The geometric median argmin_z Σ_i ‖z − x_i‖ by smoothed Weiszfeld steps (Pillutla et al. 2022).

    z ← Σ β_i x_i / Σ β_i with β_i = 1/max(ν, ‖z − x_i‖), until a step is shorter than `tolerance` times the median
    distance to the rows. start: "multikrum" begins at MultiKrum's result, because from the mean, which attackers can
    move far away, each step comes back only by a factor f/(K − f); "zero" begins at the origin.
    """

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
        """Eight steps from zero with ν = 0.1, as the published implementations run it."""
        return RFA(smoothing=0.1, max_iterations=8, tolerance=0.0, start="zero")

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            current, iteration, _ = state
            gaps = cloud.distances_to(current)[:-1]
            weights = jnp.where(cloud.usable, 1 / jnp.maximum(gaps, self.smoothing), 0)
            following = jnp.append(weights / jnp.sum(weights), 0)
            moved = _length(cloud, following - current)
            # The median distance, not the largest: one far attacker must not make every step look short.
            scale = kth_smallest(jnp.where(cloud.usable, gaps, jnp.inf), (cloud.num_points - num_byzantine) // 2)
            return following, iteration + 1, moved > self.tolerance * scale

        robust = MultiKrum().coefficients(cloud, num_byzantine, key)
        start = cloud.origin() if self.start == "zero" else robust
        result, _, _ = lax.while_loop(
            lambda state: state[2] & (state[1] < self.max_iterations),
            step,
            (start, jnp.int32(0), jnp.asarray(True)),
        )
        return result

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        return 4 * (1 + num_byzantine / (num_agents - 2 * num_byzantine)) ** 2


def _length(cloud: Cloud, direction: Array) -> Array:
    """‖Σ_j a_j x_j‖ for coefficients a [n + 1] that sum to zero."""
    return jnp.sqrt(jnp.maximum(dot(direction, dot(cloud.gram, direction)), 0))


def nearest_to(cloud: Cloud, pivot: Array, count: int) -> Array:
    """Coefficients of the mean of the `count` points nearest to point `pivot`, itself among them; NaN without it."""
    mean = cloud.mean_of(smallest(cloud.distances()[pivot], count))
    return jnp.where(cloud.usable[pivot], mean, jnp.nan)


@dataclass(frozen=True)
class MDA(WeightedAggregator):
    """Minimum-diameter averaging: the mean of the least-diameter subset of K − f rows, exact at any K.

    Rousseeuw 1985; El Mhamdi et al. 2018. Equal diameters are told apart by Krum scores, see `least_diameter`.
    The search gives up with an error, never with another subset, after `node_limit` nodes.
    """

    node_limit: int = 1_000_000

    def __post_init__(self) -> None:
        check_count(self, node_limit=self.node_limit)

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        keep = cloud.num_points - num_byzantine
        return cloud.mean_of(least_diameter_subset(cloud.distances(), cloud.usable, keep, self.node_limit))

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        # ‖F − x̄_S‖ ≤ 2f/(K − f) · diameter (Farhadkhani et al. 2022), and diameter² ≤ 2 Σ_S ‖x_i − x̄_S‖².
        return 8 * num_byzantine**2 / (num_agents - num_byzantine)


@dataclass(frozen=True)
class MoNNA(WeightedAggregator):
    """The mean of the K − f rows nearest to a trusted row, the pivot (Farhadkhani et al. 2023).

    pivot: a row index, or None for the receiver's own row where that is known (in an exchange) and Krum's choice
    where it is not (at a server).
    """

    pivot: int | None = None

    @property
    def differs_by_receiver(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
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
    """v ← v + 1/n Σ_i min(1, τ/‖x_i − v‖)(x_i − v), a few times (Karimireddy et al. 2021).

    start: "krum" begins at Krum's choice; "zero" at the origin, as with momenta. The radius τ is in the units of
    the rows: an attacker moves the result by at most τ/n per iteration.
    """

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


@dataclass(frozen=True)
class CAF(WeightedAggregator):
    """Covariance-bound-agnostic filter (Allouah et al. 2025).

    While the weights sum to more than n − 2f': weigh rows down by how far they lie along the direction of largest
    weighted variance, c_i ← c_i (1 − τ_i/max τ). The result is the weighted mean whose largest variance was least.
    """

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        num_usable = jnp.sum(cloud.usable)
        least_weight = num_usable - 2 * _faults_left(cloud.num_points, num_usable, num_byzantine)
        gram = cloud.gram[:-1, :-1]

        def step(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            weights, best_mean, best_variance, _ = state
            mean = weights / jnp.sum(weights)
            towards_mean = dot(gram, mean)
            around = gram - towards_mean[:, None] - towards_mean[None, :] + dot(mean, towards_mean)
            root = jnp.sqrt(mean)
            # The K × K matrix √c_i √c_j ⟨x_i − μ, x_j − μ⟩ has the eigenvalues of the d × d covariance.
            variances, directions = jnp.linalg.eigh(around * root[:, None] * root[None, :])
            along = jnp.abs(dot(around, root * directions[:, -1]))
            furthest = jnp.argmax(jnp.where(weights > 0, along, -1))
            better = variances[-1] < best_variance
            # Squared only after the division, since distances⁴ would overflow; and the furthest row's weight is set to
            # 0, since 1 − 1 computed in two places may leave 1e-7, which would make it the furthest row for ever.
            ratio = along / jnp.where(along[furthest] > 0, along[furthest], 1)
            lighter = (weights * jnp.maximum(1 - jnp.square(ratio), 0)).at[furthest].set(0)
            go_on = (along[furthest] > 0) & (jnp.sum(lighter) > least_weight)
            return (
                lighter,
                jnp.where(better, mean, best_mean),
                jnp.minimum(variances[-1], best_variance),
                go_on,
            )

        everyone = cloud.usable.astype(gram.dtype)
        start = (everyone, everyone / num_usable, jnp.asarray(jnp.inf, gram.dtype), jnp.asarray(True))
        _, mean, _, _ = lax.while_loop(lambda state: state[3], step, start)
        return jnp.append(mean, 0)


# Pre-aggregators: they change the points and hand them to the rule inside


class PreAggregator(Aggregator):
    """A rule applied to affine combinations of the rows."""

    rule: Aggregator
    one_to_one: ClassVar[bool] = True  # new point i is still sender i's

    @abstractmethod
    def points(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> tuple[Array, Array, Array | None]:
        """The new points as combinations [n', n + 1] of the old ones, which are usable, and the inner rule's key."""

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
    def bound(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rule.bound

    @property
    def needs_key(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rule.needs_key

    @property
    def differs_by_receiver(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rule.differs_by_receiver

    def max_byzantine(self, num_agents: int) -> int:
        return self.rule.max_byzantine(num_agents)


def _check_inner(wrapper: object, rule: object) -> None:
    if not isinstance(rule, Aggregator):
        raise TypeError(f"{type(wrapper).__name__} wraps an aggregator such as RFA(), got {rule!r}.")


@dataclass(frozen=True)
class NNM(PreAggregator):
    """Nearest-neighbour mixing: each row becomes the mean of its K − f nearest rows (Allouah et al. 2023)."""

    rule: Aggregator

    def __post_init__(self) -> None:
        _check_inner(self, self.rule)

    def points(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> tuple[Array, Array, Array | None]:
        keep = cloud.num_points - num_byzantine
        near = smallest(cloud.distances(), keep) & cloud.usable[:, None] & cloud.usable[None, :]
        near = near.astype(cloud.gram.dtype)
        matrix = near / jnp.maximum(jnp.sum(near, axis=1, keepdims=True), 1)
        return jnp.pad(matrix, ((0, 0), (0, 1))), cloud.usable, key

    def max_byzantine(self, num_agents: int) -> int:
        return min(self.rule.max_byzantine(num_agents), (num_agents - 1) // 2)

    def robustness_bound(self, num_agents: int, num_byzantine: int) -> float | None:
        inner = self.rule.robustness_bound(num_agents, num_byzantine)
        return None if inner is None else 8 * num_byzantine / (num_agents - num_byzantine) * (1 + inner)


def _scaled(scale: Array) -> Array:
    """The points pulled towards the origin by `scale` [n], as combinations [n, n + 1]."""
    return jnp.concatenate([jnp.diag(scale), (1 - scale)[:, None]], axis=1)


def _norms(cloud: Cloud) -> Array:
    return cloud.distances_to(cloud.origin())[:-1]


@dataclass(frozen=True)
class Clipping(PreAggregator):
    """Every row scaled down to norm ≤ threshold."""

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
    """Adaptive robust clipping: the ⌊2f'(n − f')/n⌋ longest rows cut to the next one's norm (Allouah et al. 2025)."""

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
    """Rows shuffled, averaged in buckets of `size`, then the rule on the buckets (Karimireddy et al. 2022).

    size None is the largest the inner rule's bound allows, s = ⌈α_max/α⌉ − 1; size 1 only shuffles. A bucket is the
    mean of its members that are usable; a bucket with none is missing. One attacker spoils at most one bucket.
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

    @property
    def differs_by_receiver(self) -> bool:
        return True

    def bucket_size(self, num_agents: int, num_byzantine: int) -> int:
        if self.size is not None:
            return self.size
        sizes = range(num_agents, 0, -1)
        return next((s for s in sizes if self.rule.max_byzantine(-(-num_agents // s)) >= num_byzantine), 1)

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
        member = member.astype(cloud.gram.dtype)
        count = jnp.sum(member, axis=1, keepdims=True)
        matrix = jnp.pad(member / jnp.maximum(count, 1), ((0, 0), (0, 1)))
        return matrix, count[:, 0] > 0, jax.random.fold_in(key, 1)
