"""Averaging-agreement rules (Avg-Agree). One call is one round at one receiver.

K − f of the K rows are honest and at most Δ apart. In units of Δ, `contraction(K, f)` bounds the honest diameter after
a round, and `drift(K, f)`, the paper's C_avg for one round, bounds how far the honest mean moves. The documentation of
the method proves both. Norms are Euclidean, except for TrimmedMeanAgreement: its bounds hold in each coordinate
separately.

The examples start from `import jax.numpy as jnp` and `from byzpg.robust.agreement import *`. They show the round of the
first agent: five agents are around (2, 2), and one attacker sends a false vector.
"""

from dataclasses import dataclass
from math import ceil, log, sqrt
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from byzpg.robust import aggregators
from byzpg.robust.components import Vectors, check_count
from byzpg.robust.geometry import Cloud
from byzpg.robust.rules import Rule, WeightedRule, apply_rule


class Agreement(Rule):
    """An agreement rule: a receiver replaces its own vector by a mean of the vectors it trusts.

    Examples:
        >>> rows = jnp.array([[1.0, 2], [2, 2], [3, 2], [2, 3], [2, 1], [90, -90]])  # the last row is an attacker's
        >>> print(GDA()(rows, own=0, num_byzantine=1), GDA().weights(rows, own=0, num_byzantine=1))
        [2. 2.] [0.2 0.2 0.2 0.2 0.2 0. ]
    """

    needs_own: ClassVar[bool] = True
    per_coordinate: ClassVar[bool] = False  # `contraction` and `drift` hold in each coordinate separately

    def __call__(
        self,
        received: Vectors,
        *,
        own: int | Array,
        num_byzantine: int,
        present: Vectors | None = None,
        key: Array | None = None,
    ) -> Array:
        """Return the receiver's vector [d] after one round.

        Args:
            received: The vectors [K, d], one row per sender, float32 or float64.
            own: The index of the row that is the receiver's own.
            num_byzantine: f, the number of Byzantine rows to tolerate.
            present: Which rows [K] have arrived (bool); all of them by default.
            key: Random key, for randomised rules.

        Returns:
            One vector [d]. Under jit or vmap it is NaN where a plain call would raise the last error below.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If the rule does not tolerate f of K, a shape is wrong, fewer than K − f rows are usable, or the
                receiver's own row is not.
        """
        return apply_rule(self, received, num_byzantine=num_byzantine, present=present, key=key, own=own).result

    def weights(
        self,
        received: Vectors,
        *,
        own: int | Array,
        num_byzantine: int,
        present: Vectors | None = None,
        key: Array | None = None,
    ) -> Array:
        """Return the weight [K] of each row in the result. The arguments are those of a call."""
        applied = apply_rule(
            self, received, num_byzantine=num_byzantine, present=present, key=key, own=own, with_weights=True
        )
        assert applied.weights is not None
        return applied.weights

    def contraction(self, num_agents: int, num_byzantine: int) -> float | None:
        """Return the bound on the honest diameter after a round, divided by that before it; None if none is known."""
        return None

    def drift(self, num_agents: int, num_byzantine: int) -> float | None:
        """Return C_avg of one round: how far the honest mean moves at most, divided by the honest diameter.

        None if no bound is known.
        """
        return None

    def rounds_to_shrink(self, share: float, num_agents: int, num_byzantine: int) -> int:
        """Return the number of rounds after which the honest diameter is surely at most `share` of what it was.

        It follows from `contraction`. If f = 0, the rules here agree exactly in one round.

        Args:
            share: The share of the Euclidean diameter that may remain, above 0 and below 1.
            num_agents: K.
            num_byzantine: f.

        Raises:
            ValueError: If the rule has no contraction below 1 for f of K, so that no number of rounds is enough.

        Examples:
            >>> MDA().rounds_to_shrink(2**-10, num_agents=13, num_byzantine=1)  # 1/4 in every round
            5
        """
        factor = self.contraction(num_agents, num_byzantine)
        if factor is None or factor >= 1:
            what = "is not known to contract" if factor is None else f"has the contraction {factor:.3g}, not below 1,"
            raise ValueError(
                f"{self} {what} with {num_byzantine} of {num_agents} agents Byzantine, so no number of rounds is sure "
                "to be enough: use MDA, a smaller num_byzantine, or a number of rounds of your own."
            )
        if factor == 0:
            return 1
        # In each coordinate, range² ≤ 2 Σ_i (x_i − mean)². Summed over coordinates: ‖ranges‖² ≤ (K − f − 1) Δ².
        stretch = sqrt(max(1, num_agents - num_byzantine - 1)) if self.per_coordinate else 1.0
        rounds = log(stretch / share) / -log(factor)
        return max(1, ceil(rounds * (1 - 1e-12)))  # a whole number stays one in spite of rounding


class WeightedAgreement(WeightedRule, Agreement):
    """An agreement rule that is a weighted mean of the rows. Subclasses implement `coefficients`."""


@dataclass(frozen=True)
class MDA(WeightedAgreement):
    """Minimum-diameter averaging: the mean of the K − f rows with the least diameter (El-Mhamdi et al. 2021).

    The subset is that of `aggregators.MDA`: exact at any K. Tolerates f < K/4, which agreement needs.

    Args:
        node_limit: The most nodes that the search may visit before it raises SearchLimitError.

    Examples:
        >>> rows = jnp.array([[1.0, 2], [2, 2], [3, 2], [2, 3], [2, 1], [90, -90]])  # the last row is an attacker's
        >>> print(MDA()(rows, own=0, num_byzantine=1))
        [2. 2.]
    """

    bound: ClassVar[str] = "f < K/4"
    ignores_far_rows: ClassVar[bool] = True
    averages_all: ClassVar[bool] = True
    node_limit: int = 1_000_000

    def __post_init__(self) -> None:
        check_count(self, node_limit=self.node_limit)

    def max_byzantine(self, num_agents: int) -> int:
        return (num_agents - 1) // 4

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return aggregators.MDA(self.node_limit).coefficients(cloud, num_byzantine, key)

    def contraction(self, num_agents: int, num_byzantine: int) -> float:
        return 3 * num_byzantine / (num_agents - num_byzantine)

    def drift(self, num_agents: int, num_byzantine: int) -> float:
        return 2 * num_byzantine / (num_agents - num_byzantine)


@dataclass(frozen=True)
class GDA(WeightedAgreement):
    """Greedy-diameter averaging: the mean of the K − f rows nearest to the receiver's own (El-Mhamdi et al. 2021).

    Tolerates f < K/5.

    Examples:
        >>> rows = jnp.array([[1.0, 2], [2, 2], [3, 2], [2, 3], [2, 1], [90, -90]])  # the last row is an attacker's
        >>> print(GDA()(rows, own=0, num_byzantine=1))
        [2. 2.]
    """

    bound: ClassVar[str] = "f < K/5"

    @property
    def differs_by_receiver(self) -> bool:
        return True

    def max_byzantine(self, num_agents: int) -> int:
        return (num_agents - 1) // 5

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        assert cloud.own is not None
        return aggregators.nearest_to(cloud, cloud.own, cloud.num_points - num_byzantine)

    def contraction(self, num_agents: int, num_byzantine: int) -> float:
        return 4 * num_byzantine / (num_agents - num_byzantine)

    def drift(self, num_agents: int, num_byzantine: int) -> float:
        return 2 * num_byzantine / (num_agents - num_byzantine)


@dataclass(frozen=True)
class TrimmedMeanAgreement(Agreement):
    """The coordinate-wise trimmed mean: RB-TM of El-Mhamdi et al. 2021 without its reliable broadcast.

    Tolerates f < K/4. Without reliable broadcast, receivers may hold different values of an attacker.

    Examples:
        >>> rows = jnp.array([[1.0, 2], [2, 2], [3, 2], [2, 3], [2, 1], [90, -90]])  # the last row is an attacker's
        >>> print(TrimmedMeanAgreement()(rows, own=0, num_byzantine=1))
        [2.25 1.75]
    """

    bound: ClassVar[str] = "f < K/4"
    per_coordinate: ClassVar[bool] = True
    in_each_coordinate: ClassVar[bool] = True

    def max_byzantine(self, num_agents: int) -> int:
        return (num_agents - 1) // 4

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return aggregators.TrimmedMean().combine(cloud, num_byzantine, key)

    def contraction(self, num_agents: int, num_byzantine: int) -> float:
        return num_byzantine / (num_agents - 2 * num_byzantine)

    def drift(self, num_agents: int, num_byzantine: int) -> float:
        return num_byzantine / (num_agents - num_byzantine)


@dataclass(frozen=True)
class NoAgreement(WeightedAgreement):
    """No agreement: every receiver keeps its own vector.

    Accepts any f < K.

    Examples:
        >>> rows = jnp.array([[1.0, 2], [2, 2], [3, 2], [2, 3], [2, 1], [90, -90]])  # the last row is an attacker's
        >>> print(NoAgreement()(rows, own=0, num_byzantine=1))
        [1. 2.]
    """

    bound: ClassVar[str] = "f < K"

    @property
    def differs_by_receiver(self) -> bool:
        return True

    def max_byzantine(self, num_agents: int) -> int:
        return num_agents - 1

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return cloud.mean_of(jnp.arange(cloud.num_points) == cloud.own)

    def contraction(self, num_agents: int, num_byzantine: int) -> float:
        return 1.0

    def drift(self, num_agents: int, num_byzantine: int) -> float:
        return 0.0
