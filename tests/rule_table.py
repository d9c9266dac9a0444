"""One row per rule: what it claims, and the naive twin it is held against. To test a new rule, add its row here.

`tests/test_contracts.py` checks the claims, `tests/robust/test_aggregators.py` the values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import comb
from typing import Any

import jax
import numpy as np
import twins

from byzpg.robust import agreement
from byzpg.robust.aggregators import (
    ARC,
    CAF,
    MDA,
    NNM,
    RFA,
    SMEA,
    Bucketing,
    Bulyan,
    CenteredClipping,
    Clipping,
    FedPGFilter,
    Krum,
    MeaMed,
    Mean,
    Median,
    MoNNA,
    MultiKrum,
    Remember,
    TrimmedMean,
)
from byzpg.robust.agreement import GDA, NoAgreement, TrimmedMeanAgreement

K, D, OWN = 13, 5, 4  # rows, columns, the receiver's own row
KEY = jax.random.key(7)

Twin = Callable[..., np.ndarray]  # twin(received, f, present)


@dataclass(frozen=True)
class Case:
    rule: Any  # an Aggregator or Agreement
    f: int
    tolerates: Callable[[int, int], bool]  # f Byzantine rows of K
    weights: str | None = None  # "sum to 1"; "at most 1" (the origin has the rest); None: not a weighted mean
    permutes: bool = True  # the order of the rows does not matter
    translates: bool = True  # F(x + c) = F(x) + c
    agrees: str = "exactly"  # identical rows come back; "up to rounding"; or "no"
    robust: bool = True  # the error stays within a constant times the honest spread, wherever the attackers are
    twin: Twin = field(kw_only=True)  # the rule again, in NumPy and float64, written for clarity
    tolerance: float = 1e-4  # of the comparison, relative to the scale of the rows
    reach: float = np.inf  # or to this, where no result is longer
    ties: bool = True  # the result is defined if rows tie
    mean_at_zero: bool = True  # with f = 0, the rule is the mean

    def __str__(self) -> str:
        return f"{self.rule} f={self.f}"


# Twins with options, and around others


def monna_from_krum(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
    """MoNNA around Krum's choice, where no row is known to be the receiver's own."""
    rows, f, _ = twins.present_rows(received, f, present)
    return twins.monna(rows, f, pivot=int(np.argmin(twins.krum_scores(rows, len(rows) - f))))


def after(change: Callable[[np.ndarray, int], np.ndarray], inner: Twin) -> Twin:
    """A pre-aggregator: the inner twin on the changed usable rows."""

    def twin(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
        rows, f, _ = twins.present_rows(received, f, present)
        return inner(change(rows, f), f)

    return twin


@cache
def shuffled(num_rows: int) -> np.ndarray:
    return np.asarray(jax.random.permutation(KEY, num_rows))


def in_buckets(size: Callable[[int, int], int], inner: Twin) -> Twin:
    """Buckets of size(K, f) rows, shuffled as Bucketing shuffles them; missing rows are left out of their bucket."""

    def twin(received: np.ndarray, f: int, present: np.ndarray | None = None) -> np.ndarray:
        _, _, usable = twins.present_rows(received, f, present)
        order = shuffled(len(received))
        width = size(len(received), f)
        groups = [np.intersect1d(order[i : i + width], usable) for i in range(0, len(order), width)]
        missing = np.full((1, received.shape[1]), np.nan)
        return inner(np.array([(received[group] if len(group) else missing).mean(axis=0) for group in groups]), f)

    return twin


def with_options(twin: Twin, **options: Any) -> Twin:
    return lambda received, f, present=None: twin(received, f, present, **options)


def at_own(twin: Twin) -> Twin:
    return lambda received, f, present=None: twin(received, OWN, f, present)


def largest_size_for_trimmed_mean(num_rows: int, f: int) -> int:
    """The most rows per bucket that leave more than 2f buckets."""
    return max(size for size in range(1, num_rows + 1) if -(-num_rows // size) > 2 * f)


def clipped_to_2(rows: np.ndarray, f: int) -> np.ndarray:
    return twins.clip(rows, 2)


geometric_median = with_options(twins.rfa, tolerance=1e-10)  # RFA stops at steps of 1e-5: good to 1e-3
reference = with_options(twins.rfa, smoothing=0.1, max_iterations=8, tolerance=0, start="zero")
two_steps = with_options(twins.rfa, smoothing=0.1, max_iterations=2, tolerance=0, start="zero")
narrow = with_options(twins.fedpg_filter, radius=1.5, fallback_radius=3.0)
clipped_from_medoid = with_options(twins.centered_clipping, radius=1.0, iterations=3, start="medoid")
clipped_from_zero = with_options(twins.centered_clipping, radius=2.0, iterations=5, start="zero")


# Claims

CONVEX, SHRUNK, ROUNDED = "sum to 1", "at most 1", "up to rounding"
ANY, HALF, QUARTER, FIFTH = (lambda k, f, part=part: part * f < k for part in (1, 2, 4, 5))
MULTI_KRUM, BULYAN = (lambda k, f, part=part: k >= part * f + 3 or f == 0 for part in (2, 4))

AGGREGATORS = [
    Case(Mean(), 3, ANY, CONVEX, robust=False, twin=twins.mean),
    Case(Median(), 3, HALF, twin=twins.median, mean_at_zero=False),
    Case(TrimmedMean(), 3, HALF, agrees=ROUNDED, twin=twins.trimmed_mean),
    Case(MeaMed(), 3, HALF, agrees=ROUNDED, twin=twins.meamed),
    # Its last picks tie by construction.
    Case(Bulyan(), 2, BULYAN, permutes=False, agrees=ROUNDED, twin=twins.bulyan),
    Case(Krum(), 3, QUARTER, CONVEX, twin=twins.krum, mean_at_zero=False),
    Case(
        MultiKrum(neighbours="original"),
        3,
        MULTI_KRUM,
        CONVEX,
        twin=with_options(twins.multi_krum, neighbours="original"),
    ),
    Case(RFA(), 3, HALF, CONVEX, twin=geometric_median, tolerance=0.001, mean_at_zero=False),
    Case(
        RFA(smoothing=0.1, max_iterations=2, tolerance=0.0, start="zero"),
        3,
        HALF,
        CONVEX,
        translates=False,
        twin=two_steps,
        mean_at_zero=False,
    ),
    Case(MDA(), 3, HALF, CONVEX, twin=twins.mda),  # by the table of subsets
    # Directions of equal variance tie in exact arithmetic only.
    Case(SMEA(), 3, lambda k, f: HALF(k, f) and comb(k, f) <= 10_000, CONVEX, twin=twins.smea, ties=False),
    # So do rows that are equally near to a mean. Without faults, only a row that is much further out is dropped.
    Case(FedPGFilter(), 3, HALF, CONVEX, twin=twins.fedpg_filter, ties=False),
    Case(
        FedPGFilter(radius=1.5, fallback_radius=3.0),
        3,
        HALF,
        CONVEX,
        twin=narrow,
        ties=False,
        mean_at_zero=False,
    ),
    Case(MoNNA(), 3, HALF, CONVEX, twin=monna_from_krum),
    Case(MoNNA(pivot=OWN), 3, HALF, CONVEX, permutes=False, twin=with_options(twins.monna, pivot=OWN)),
    Case(CenteredClipping(), 3, HALF, CONVEX, twin=clipped_from_medoid, mean_at_zero=False),
    Case(
        CenteredClipping(radius=2.0, iterations=5, start="zero"),
        3,
        HALF,
        SHRUNK,
        translates=False,
        agrees="no",
        twin=clipped_from_zero,
        reach=10,
        mean_at_zero=False,
    ),
    # Of two directions of equal variance, either may come first.
    Case(CAF(), 3, HALF, CONVEX, twin=twins.caf, ties=False),
    Case(
        Bucketing(RFA(), size=2),
        3,
        lambda k, f: HALF(-(-k // 2), f),
        CONVEX,
        permutes=False,
        twin=in_buckets(lambda k, f: 2, geometric_median),
        tolerance=0.001,
        mean_at_zero=False,
    ),
    Case(
        Bucketing(TrimmedMean()),
        2,
        HALF,
        permutes=False,
        twin=in_buckets(largest_size_for_trimmed_mean, twins.trimmed_mean),
    ),
    # Mixed rows tie in exact arithmetic only.
    Case(NNM(MultiKrum()), 3, MULTI_KRUM, CONVEX, twin=after(twins.nnm, twins.multi_krum), ties=False),
    Case(NNM(Median()), 3, HALF, twin=after(twins.nnm, twins.median)),
    Case(
        ARC(MultiKrum()), 3, MULTI_KRUM, SHRUNK, translates=False, twin=after(twins.arc, twins.multi_krum), ties=False
    ),
    Case(ARC(MeaMed()), 3, HALF, translates=False, agrees=ROUNDED, twin=after(twins.arc, twins.meamed)),
    Case(
        Clipping(Krum(), threshold=2.0),
        3,
        QUARTER,
        SHRUNK,
        translates=False,
        agrees="no",
        twin=after(clipped_to_2, twins.krum),
        reach=2,
        ties=False,
        mean_at_zero=False,
    ),
    Case(
        Clipping(Median(), threshold=2.0),
        3,
        HALF,
        translates=False,
        agrees="no",
        twin=after(clipped_to_2, twins.median),
        reach=2,
        mean_at_zero=False,
    ),
    Case(Remember(MDA()), 3, HALF, CONVEX, twin=twins.mda),  # in a call, where nothing is remembered
]

AGREEMENTS = [
    Case(agreement.MDA(), 3, QUARTER, CONVEX, twin=at_own(twins.agree_mda)),
    Case(GDA(), 2, FIFTH, CONVEX, twin=at_own(twins.agree_gda)),
    Case(TrimmedMeanAgreement(), 3, QUARTER, agrees=ROUNDED, twin=at_own(twins.agree_trimmed_mean)),
    Case(NoAgreement(), 3, ANY, CONVEX, twin=at_own(twins.agree_none), mean_at_zero=False),
]

# Other options of these rules, held against their twins alone.
VARIANTS = [
    Case(
        Krum(neighbours="original"), 3, HALF, twin=with_options(twins.krum, neighbours="original"), mean_at_zero=False
    ),
    Case(MultiKrum(), 3, HALF, twin=twins.multi_krum),
    Case(RFA.reference(), 3, HALF, twin=reference, mean_at_zero=False),
    Case(MDA(), 5, HALF, twin=twins.mda),  # by search
]
