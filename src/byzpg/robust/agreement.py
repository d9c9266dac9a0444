"""Every averaging-agreement rule (Avg-Agree). One call is one round at one receiver.

K − f of the K rows are honest and at most Δ apart. `contraction(K, f)` bounds the honest diameter after a round in
units of Δ, `drift(K, f)` how far the honest mean moves (the paper's C_avg); docs/method.md proves both. Norms are
Euclidean, except for TrimmedMeanAgreement, whose bounds hold in every coordinate by itself.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from byzpg.robust import aggregators
from byzpg.robust.components import Vectors, check_count
from byzpg.robust.geometry import Cloud
from byzpg.robust.rules import Rule, WeightedRule, apply_rule


class Agreement(Rule):
    """An agreement rule, called as rule(received, own=k, num_byzantine=f, present=None)."""

    needs_own: ClassVar[bool] = True
    per_coordinate: ClassVar[bool] = False  # `contraction` and `drift` hold coordinate by coordinate

    def __call__(
        self,
        received: Vectors,
        *,
        own: int | Array,
        num_byzantine: int,
        present: Vectors | None = None,
        key: Array | None = None,
    ) -> Array:
        """The receiver's vector [d] after one round, from the `received` [K, d], row `own` being its own."""
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
        """The weight [K] each row has in the result."""
        applied = apply_rule(
            self, received, num_byzantine=num_byzantine, present=present, key=key, own=own, with_weights=True
        )
        assert applied.weights is not None
        return applied.weights

    def contraction(self, num_agents: int, num_byzantine: int) -> float | None:
        """Bound on the honest diameter after a round over before; None where none is known."""
        return None

    def drift(self, num_agents: int, num_byzantine: int) -> float | None:
        """Bound on how far the honest mean moves over the honest diameter (C_avg); None where none is known."""
        return None


class WeightedAgreement(WeightedRule, Agreement):
    """An agreement rule that is a weighted mean of the rows."""


@dataclass(frozen=True)
class MDA(WeightedAgreement):
    """Minimum-diameter averaging: the mean of the least-diameter subset of K − f rows, exact at any K.

    El-Mhamdi et al. 2021. The search is `aggregators.MDA`'s; the bound on f is the one for agreement.
    """

    bound: ClassVar[str] = "f < K/4"
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
    """Greedy-diameter averaging: the mean of the K − f rows nearest to the receiver's own (El-Mhamdi et al. 2021)."""

    bound: ClassVar[str] = "f < K/5"
    differs_by_receiver: ClassVar[bool] = True

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
    """Coordinate-wise trimmed mean (RB-TM of El-Mhamdi et al. 2021 without its reliable broadcast)."""

    bound: ClassVar[str] = "f < K/4"
    per_coordinate: ClassVar[bool] = True

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
    """Every receiver keeps its own vector."""

    bound: ClassVar[str] = "f < K"
    differs_by_receiver: ClassVar[bool] = True

    def max_byzantine(self, num_agents: int) -> int:
        return num_agents - 1

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return cloud.mean_of(jnp.arange(cloud.num_points) == cloud.own)

    def contraction(self, num_agents: int, num_byzantine: int) -> float:
        return 1.0

    def drift(self, num_agents: int, num_byzantine: int) -> float:
        return 0.0
