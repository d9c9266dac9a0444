"""Golden values: every rule and every option against its naive float64 twin, and what the rules promise as properties.

Non-finite and oversized rows, mutation of the input, jit, vmap and robustness: test_contracts.py.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import twins
from hypothesis import given, settings
from rule_table import AGGREGATORS, AGREEMENTS, KEY, OWN, VARIANTS, Case, D, K
from tiers import slow_except

from byzpg.robust.aggregators import (
    CAF,
    MDA,
    NNM,
    RFA,
    SMEA,
    Aggregator,
    Bucketing,
    Bulyan,
    FedPGFilter,
    Krum,
    MeaMed,
    Mean,
    Median,
    MoNNA,
    MultiKrum,
    TrimmedMean,
    _largest_eigenvalue,
)
from byzpg.robust.agreement import GDA, Agreement
from byzpg.robust.geometry import UNROLLED_SUM

FEW = 7  # rows without faults: the fewer, the faster to compile

EVERY_CASE = [*AGGREGATORS, *AGREEMENTS, *VARIANTS]
every_rule = pytest.mark.parametrize("case", EVERY_CASE, ids=str)
ONE_OF_EACH = list({type(case.rule): case for case in reversed(EVERY_CASE)}.values())
FEW_CASES = [case for case in EVERY_CASE if case.rule in (MDA(), Krum(), RFA(), Median())]


def call(rule: Aggregator | Agreement, rows: Any, f: int, present: Any = None, weights: bool = False) -> np.ndarray:
    function: Callable = rule.weights if weights else rule
    present = np.ones(len(rows), bool) if present is None else present
    options = {"own": OWN} if isinstance(rule, Agreement) else {}
    return np.asarray(function(rows, num_byzantine=f, present=present, key=KEY, **options))


@pytest.mark.parametrize("case", slow_except(ONE_OF_EACH, EVERY_CASE), ids=str)
@pytest.mark.parametrize("faultless", [False, pytest.param(True, marks=pytest.mark.slow)], ids=[f"{K=}", "f=0"])
def test_twin(case: Case, faultless: bool):
    """Clouds at three scales, with up to three missing rows, without and with an attacker far away in the first row.

    With f rows missing, a rule is the same rule with f = 0 on the others: twins drop them.
    """
    num_rows, f = (FEW, 0) if faultless else (K, case.f)
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
        result, expected = call(case.rule, rows, f, present), case.twin(rows, f, present)
        where = f"scale {scale:g}, missing {missing}, far attacker {far}"
        slack = case.tolerance * min(scale, case.reach)
        np.testing.assert_allclose(result, expected, case.tolerance, slack, err_msg=where)


@pytest.mark.parametrize("case", slow_except(FEW_CASES, EVERY_CASE), ids=str)
def test_no_faults_is_the_mean(case: Case):
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(FEW, D)) + rng.normal(size=D)
    rows[1:3] *= 4
    rows = rows.astype(np.float32)
    result = call(case.rule, rows, 0)
    assert np.all(np.isfinite(result))
    assert np.allclose(result, rows.mean(axis=0), rtol=1e-5, atol=1e-5) == case.mean_at_zero


@pytest.mark.slow
def test_bucketing_makes_the_geometric_median_the_mean_without_faults():
    """The paper's definition asks for error 0 at α = 0, relative to the pairwise variance: RFA alone is not enough."""
    rng = np.random.default_rng(7)
    errors: dict[str, list[float]] = {"Bucketing(RFA())": [], "RFA()": []}
    for rule in (Bucketing(RFA()), RFA()):
        for _ in range(5):
            rows = rng.normal(size=(K, 2)).astype(np.float32)
            pairwise = np.sum(np.square(rows[:, None] - rows)) / (K * (K - 1))
            errors[str(rule)].append(float(np.sum(np.square(call(rule, rows, 0) - rows.mean(axis=0))) / pairwise))
    assert max(errors["Bucketing(RFA())"]) < 1e-12
    assert max(errors["RFA()"]) > 1e-2


@pytest.mark.parametrize("case", [case for case in EVERY_CASE if case.ties], ids=str)
def test_twin_on_integers_with_ties(case: Case):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        rows = rng.integers(0, 2 + seed % 3, size=(K, D)).astype(np.float32)
        present = np.arange(K) != (8 if seed % 2 else -1)
        expected = case.twin(rows, case.f, present)
        result = call(case.rule, rows, case.f, present)
        np.testing.assert_allclose(result, expected, case.tolerance, case.tolerance, err_msg=f"{seed=}")


def chosen_by_krum(rows: np.ndarray, f: int, count: int) -> np.ndarray:
    return np.argsort(twins.krum_scores(rows, len(rows) - f), kind="stable")[:count]


@pytest.mark.parametrize(
    ("rule", "f", "chosen"),
    [
        (Krum(), 3, lambda rows: chosen_by_krum(rows, 3, 1)),
        (MultiKrum(), 3, lambda rows: chosen_by_krum(rows, 3, 10)),
        (MDA(), 3, lambda rows: twins.mda_subset(rows, 3)),
        (SMEA(), 3, lambda rows: twins.smea_subset(rows, 3)),
        (GDA(), 2, lambda rows: twins.nearest(rows, OWN, 11)),
    ],
    ids=["Krum", "MultiKrum", "MDA", "SMEA", "GDA"],
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


@pytest.mark.parametrize("num_rows", [UNROLLED_SUM, UNROLLED_SUM + 1])
def test_a_mean_of_many_rows(num_rows: int):
    """Their sum is one pass or, for more of them, a product; both leave out a row that is not finite."""
    rows = np.random.default_rng(0).normal(10, 1, (num_rows, 3)).astype(np.float32)
    rows[1, 2] = np.nan
    found = Mean()(jnp.asarray(rows), num_byzantine=1)
    np.testing.assert_allclose(found, np.delete(rows, 1, axis=0).mean(axis=0, dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("missing", [[], [5]], ids=str)
def test_bulyan_of_mixed_rows(missing: list[int]):
    """Whether rows are missing or not, which are two branches, the rows that it selects are the mixed ones."""
    rows, present = np.random.default_rng(3).normal(size=(K, D)).astype(np.float32), np.ones(K, bool)
    present[missing] = False
    few, f = rows[present].astype(np.float64), 2 - len(missing)
    found = call(NNM(Bulyan()), rows, 2, present)
    np.testing.assert_allclose(found, twins.bulyan(twins.nnm(few, f), f), rtol=1e-5, atol=1e-5)


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


def test_the_filter_widens_its_radius_until_enough_rows_are_left():
    """More than half of 0 1 2 3 100 are within 1 of the rows 1 and 2, and within 2 of all but 100."""
    rows = np.array([[0], [1], [2], [3], [100]], np.float32)
    assert call(FedPGFilter(radius=2.0), rows, 1) == [1.5]
    assert call(FedPGFilter(radius=1.0), rows, 1) == [1.5]  # three rows are too few, so the radius is 2
    assert call(FedPGFilter(radius=1.0), rows, 2) == [1]  # of two equally dense rows, the first
    assert call(FedPGFilter(radius=1.0, fallback_radius=1.0), rows, 1) == [1]  # three rows must do
    assert call(FedPGFilter(radius=0.1, fallback_radius=0.1), rows, 1) == [1]  # there is no dense row: the densest


def test_largest_eigenvalue_whatever_the_others_are():
    spectra = (
        [5, 5, 5, 5],
        [5, 4.9999, 0, 0],
        [5, 0, 0, 0],
        [5e-12, 3e-12, 1e-12, 0],
        [5e30, 1, 0, 0],
        [5e-33, 0, 0, 0],
    )
    for spectrum in spectra:
        basis = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
        matrix = (basis * spectrum) @ basis.T
        value, direction = _largest_eigenvalue(jnp.asarray(matrix, jnp.float32))
        assert value == pytest.approx(spectrum[0], rel=2e-6)
        np.testing.assert_allclose(matrix @ direction / spectrum[0], direction, atol=2e-5)
        assert np.linalg.norm(direction) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("noise", [0.0, -1e10])
def test_rows_that_coincide_have_no_variance(noise: float):
    """What rounding leaves of their Gram matrix may be negative."""
    value, direction = _largest_eigenvalue(jnp.full((3, 3), noise))
    assert value == 0
    assert np.all(np.isfinite(direction))


@pytest.mark.parametrize("scale", [1.0, 1e6, 2.0**40])
def test_caf_finds_rows_that_coincide(scale: float):
    """Without the others, the six have variance 0; their Gram matrix is rounding, of the size of the others."""
    rows = scale * np.array(2 * [[3.0, -3]] + 6 * [[2, -1]] + [[-2, 0]])
    np.testing.assert_allclose(call(CAF(), rows.astype(np.float32), 2) / scale, [2, -1], atol=1e-6)


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
