"""Golden values: every rule and every option against its naive float64 twin, and what the rules promise as properties.

Non-finite and oversized rows, mutation of the input, jit, vmap and robustness: test_contracts.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import twins
from hypothesis import given, settings

from byzpg.robust import agreement
from byzpg.robust.aggregators import (
    ARC,
    CAF,
    MDA,
    NNM,
    RFA,
    Aggregator,
    Bucketing,
    Bulyan,
    CenteredClipping,
    Clipping,
    Krum,
    MeaMed,
    Mean,
    Median,
    MoNNA,
    MultiKrum,
    TrimmedMean,
)
from byzpg.robust.agreement import GDA, Agreement, NoAgreement, TrimmedMeanAgreement

K, D, OWN = 13, 5, 4
FEW = 7  # rows without faults: the fewer, the faster to compile
KEY = jax.random.key(7)

Twin = Callable[..., np.ndarray]  # twin(received, f, present)


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


@dataclass(frozen=True)
class Golden:
    rule: Aggregator | Agreement
    twin: Twin
    f: int = 3  # of 13 rows
    tolerance: float = 1e-4  # relative to the scale of the rows
    reach: float = np.inf  # or to this, where no result is longer
    ties: bool = True  # defined when rows tie
    mean_at_zero: bool = True  # f = 0 is the mean

    def __str__(self) -> str:
        return f"{self.rule} f={self.f}"


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
clipped_from_medoid = with_options(twins.centered_clipping, radius=1.0, iterations=3, start="medoid")
clipped_from_zero = with_options(twins.centered_clipping, radius=2.0, iterations=5, start="zero")

GOLDEN = [
    Golden(Mean(), twins.mean),
    Golden(Median(), twins.median, mean_at_zero=False),
    Golden(TrimmedMean(), twins.trimmed_mean),
    Golden(MeaMed(), twins.meamed),
    Golden(Bulyan(), twins.bulyan, f=2),
    Golden(Krum(), twins.krum, mean_at_zero=False),
    Golden(Krum(neighbours="original"), with_options(twins.krum, neighbours="original"), mean_at_zero=False),
    Golden(MultiKrum(), twins.multi_krum),
    Golden(MultiKrum(neighbours="original"), with_options(twins.multi_krum, neighbours="original")),
    Golden(RFA(), geometric_median, tolerance=1e-3, mean_at_zero=False),
    Golden(RFA.reference(), reference, mean_at_zero=False),
    Golden(RFA(smoothing=0.1, max_iterations=2, tolerance=0.0, start="zero"), two_steps, mean_at_zero=False),
    Golden(MDA(), twins.mda),  # by the table of subsets
    Golden(MDA(), twins.mda, f=5),  # by search
    Golden(MoNNA(), monna_from_krum),
    Golden(MoNNA(pivot=OWN), with_options(twins.monna, pivot=OWN)),
    Golden(CenteredClipping(), clipped_from_medoid, mean_at_zero=False),
    Golden(CenteredClipping(radius=2.0, iterations=5, start="zero"), clipped_from_zero, reach=10, mean_at_zero=False),
    Golden(CAF(), twins.caf, ties=False),  # of two directions of equal variance, either may come first
    Golden(
        Bucketing(RFA(), size=2),
        in_buckets(lambda k, f: 2, geometric_median),
        tolerance=1e-3,
        mean_at_zero=False,
    ),
    Golden(Bucketing(TrimmedMean()), in_buckets(largest_size_for_trimmed_mean, twins.trimmed_mean), f=2),
    Golden(NNM(MultiKrum()), after(twins.nnm, twins.multi_krum), ties=False),  # mixed rows tie in exact arithmetic only
    Golden(NNM(Median()), after(twins.nnm, twins.median)),
    Golden(ARC(MultiKrum()), after(twins.arc, twins.multi_krum), ties=False),
    Golden(ARC(MeaMed()), after(twins.arc, twins.meamed)),
    Golden(Clipping(Krum(), threshold=2.0), after(clipped_to_2, twins.krum), reach=2, ties=False, mean_at_zero=False),
    Golden(Clipping(Median(), threshold=2.0), after(clipped_to_2, twins.median), reach=2, mean_at_zero=False),
    Golden(agreement.MDA(), at_own(twins.agree_mda)),
    Golden(GDA(), at_own(twins.agree_gda), f=2),
    Golden(TrimmedMeanAgreement(), at_own(twins.agree_trimmed_mean)),
    Golden(NoAgreement(), at_own(twins.agree_none), mean_at_zero=False),
]

every_rule = pytest.mark.parametrize("golden", GOLDEN, ids=str)


def call(rule: Aggregator | Agreement, rows: Any, f: int, present: Any = None, weights: bool = False) -> np.ndarray:
    function: Callable = rule.weights if weights else rule
    present = np.ones(len(rows), bool) if present is None else present
    options = {"own": OWN} if isinstance(rule, Agreement) else {}
    return np.asarray(function(rows, num_byzantine=f, present=present, key=KEY, **options))


@every_rule
@pytest.mark.parametrize("faultless", [False, True], ids=[f"{K=}", "f=0"])
def test_twin(golden: Golden, faultless: bool):
    """Clouds at three scales, with up to three missing rows, without and with an attacker far away in the first row.

    With f rows missing, a rule is the same rule with f = 0 on the others: twins drop them.
    """
    num_rows, f = (FEW, 0) if faultless else (K, golden.f)
    rng = np.random.default_rng(num_rows)
    for _, scale, missing, far in product(range(4), (1e-3, 1, 1e4), ([], [2], [6, 2], [9, 2, 6]), (False, True)):
        if len(missing) + far > f:
            continue
        rows = rng.normal(size=(num_rows, D)) + rng.normal(size=D)
        rows[1:3] *= 4  # honest, but far out
        if far:
            rows[0] += 1e4 * rng.normal(size=D)
        rows = (scale * rows).astype(np.float32)
        present = np.ones(num_rows, bool)
        present[missing[:1]] = False  # one is masked,
        rows[missing[1:]] = np.nan  # the others are not finite
        result, expected = call(golden.rule, rows, f, present), golden.twin(rows, f, present)
        where = f"scale {scale:g}, missing {missing}, far attacker {far}"
        slack = golden.tolerance * min(scale, golden.reach)
        np.testing.assert_allclose(result, expected, golden.tolerance, slack, err_msg=where)


@every_rule
def test_no_faults_is_the_mean(golden: Golden):
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(FEW, D)) + rng.normal(size=D)
    rows[1:3] *= 4
    rows = rows.astype(np.float32)
    result = call(golden.rule, rows, 0)
    assert np.all(np.isfinite(result))
    assert np.allclose(result, rows.mean(axis=0), rtol=1e-5, atol=1e-5) == golden.mean_at_zero


@pytest.mark.parametrize("golden", [golden for golden in GOLDEN if golden.ties], ids=str)
def test_twin_on_integers_with_ties(golden: Golden):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        rows = rng.integers(0, 2 + seed % 3, size=(K, D)).astype(np.float32)
        present = np.arange(K) != (8 if seed % 2 else -1)
        expected = golden.twin(rows, golden.f, present)
        result = call(golden.rule, rows, golden.f, present)
        np.testing.assert_allclose(result, expected, golden.tolerance, golden.tolerance, err_msg=f"{seed=}")


def chosen_by_krum(rows: np.ndarray, f: int, count: int) -> np.ndarray:
    return np.argsort(twins.krum_scores(rows, len(rows) - f), kind="stable")[:count]


@pytest.mark.parametrize(
    ("rule", "f", "chosen"),
    [
        (Krum(), 3, lambda rows: chosen_by_krum(rows, 3, 1)),
        (MultiKrum(), 3, lambda rows: chosen_by_krum(rows, 3, 10)),
        (MDA(), 3, lambda rows: twins.mda_subset(rows, 3)),
        (GDA(), 2, lambda rows: twins.nearest(rows, OWN, 11)),
    ],
    ids=["Krum", "MultiKrum", "MDA", "GDA"],
)
def test_parameters_of_norm_10_that_differ_by_1e_5(rule: Any, f: int, chosen: Callable):
    """The differences are the last few bits of float32: without centring, distances would be rounding errors."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        base, noise = rng.normal(size=50), rng.normal(size=(K, 50))
        rows = 10 * base / np.linalg.norm(base) + 1e-5 * noise / np.linalg.norm(noise, axis=1, keepdims=True)
        if seed % 2:
            rows[0] += 1e4  # centring on the first row would not do
        rows = rows.astype(np.float32)
        weights = call(rule, rows, f, weights=True)
        np.testing.assert_array_equal(np.flatnonzero(weights), np.sort(chosen(rows.astype(np.float64))), f"{seed=}")


# Worked by hand: where other libraries have gone wrong


def test_krum_squares_distances_once():
    """Rows and their 5 nearest, itself included. Σ d² is least at 13, Σ d at 12, Σ d⁴ at 7.

    7: 0 4 5 5 6       Σ d = 20   Σ d² = 102   Σ d⁴ = 2802
    12: 0 1 1 5 8      Σ d = 15   Σ d² = 91    Σ d⁴ = 4723
    13: 0 1 2 6 7      Σ d = 16   Σ d² = 90    Σ d⁴ = 3714
    """
    rows = np.array([[7], [11], [20], [13], [12], [2]], np.float32)
    assert call(Krum(), rows, 1) == [13]


def test_krum_counts_its_neighbours():
    """Of 7 rows with f = 1, "paper" counts 5 other rows, "original" 4."""
    rows = np.array([[0], [1], [2], [3], [4], [6], [20]], np.float32)
    # 5 others of 2: 1 1 4 4 16 = 26, of 3: 1 1 4 9 9 = 24;  4 others of 2: 1 1 4 4 = 10, of 3: 1 1 4 9 = 15.
    assert call(Krum(), rows, 1) == [3]
    assert call(Krum(neighbours="original"), rows, 1) == [2]


def test_trimming_nothing_is_the_mean():
    """values[0:-0] is empty."""
    assert call(TrimmedMean(), np.array([[1], [2], [6]], np.float32), 0) == [3]


def test_even_median_is_the_middle_of_two():
    assert call(Median(), np.array([[1], [100], [2], [4]], np.float32), 1) == [3]


def test_trimmed_mean_takes_f_from_both_ends():
    assert call(TrimmedMean(), np.array([[9], [1], [2], [-50], [4]], np.float32), 1) == [np.float32(7) / 3]


def test_mean_around_median_prefers_the_smaller_of_two_as_near():
    assert call(MeaMed(), np.array([[0], [1], [3], [5], [6]], np.float32), 2) == [3]
    assert call(MeaMed(), np.array([[0], [1], [3], [5], [6]], np.float32), 1) == [2.25]


# Properties


properties = settings(max_examples=25, deadline=None, derandomize=True, database=None)
honest_rows = hnp.arrays(np.float32, (K - 3, D), elements=st.floats(-100, 100, width=32))
attacker_rows = hnp.arrays(np.float32, (3, D), elements=st.floats(width=32))  # NaN, infinite, huge, anything


@properties
@given(honest_rows, attacker_rows, st.permutations(range(K)))
@pytest.mark.parametrize(("rule", "slack"), [(Median(), 0), (TrimmedMean(), 0), (MeaMed(), 1)], ids=str)
def test_the_result_lies_within_the_honest_range(rule: Any, slack: int, honest: Any, attackers: Any, order: Any):
    """MeaMed may leave it, by less than its width: of the honest 0, 10 and an attacker's 11, it takes 10 and 11."""
    result = call(rule, np.concatenate([honest, attackers])[order], 3)
    low, high = honest.min(axis=0), honest.max(axis=0)
    margin = slack * (high - low) + 1e-4
    assert np.all((low - margin <= result) & (result <= high + margin))


@properties
@given(honest_rows, attacker_rows)
def test_krum_returns_a_row(honest: np.ndarray, attackers: np.ndarray):
    rows = np.concatenate([attackers, honest])
    weights = call(Krum(), rows, 3, weights=True)
    assert np.count_nonzero(weights) == 1
    chosen = rows[np.argmax(weights)]
    np.testing.assert_allclose(call(Krum(), rows, 3), chosen, rtol=1e-5, atol=1e-3)


@properties
@given(honest_rows, attacker_rows)
@pytest.mark.parametrize("rule", [MDA(), MultiKrum(neighbours="original"), MoNNA()], ids=str)
def test_rules_that_choose_rows_weigh_them_alike(rule: Any, honest: np.ndarray, attackers: np.ndarray):
    weights = call(rule, np.concatenate([honest, attackers]), 3, weights=True)
    np.testing.assert_array_equal(np.unique(weights), np.array([0, 1 / (K - 3)], np.float32))
    assert np.count_nonzero(weights) == K - 3


@pytest.mark.parametrize("distance", [1e4, 1e6])
def test_geometric_median_is_reached_with_almost_half_the_rows_false(distance: float):
    """From the mean, Weiszfeld steps would still be far out after hundreds of iterations."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(51, 4)).astype(np.float32)
    rows[26:] = distance
    twin = twins.rfa(rows, 25, start="zero", tolerance=1e-9)
    np.testing.assert_allclose(RFA()(rows, num_byzantine=25), twin, rtol=0.02, atol=0.02)
