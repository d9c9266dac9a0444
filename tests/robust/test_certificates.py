"""Certificates: what is measured stays below what is proven, is what it says it is, and exposes the plain mean."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
import twins
from tiers import slow_except

from byzpg.robust import aggregators, agreement, attacks
from byzpg.robust.certificates import certificate, honest_clouds

K, F, D, TRIALS = 13, 3, 6, 24  # one shape throughout: drawing clouds is slow to compile
ALPHA = F / K


@cache
def measure(rule, attack, f=F, seed=0) -> Any:
    return certificate(rule, attack, num_agents=K, num_byzantine=f, dimension=D, trials=TRIALS, seed=seed)


def clouds_of(seed: int) -> np.ndarray:
    return np.asarray(honest_clouds(jax.random.key(seed), TRIALS, K, D), np.float64)


ROBUST = (
    aggregators.Median(),
    aggregators.TrimmedMean(),
    aggregators.Krum(),
    aggregators.RFA(),
    aggregators.MDA(),
    aggregators.SMEA(),
    aggregators.NNM(aggregators.RFA()),
    aggregators.ARC(aggregators.RFA()),
)
FEW = (aggregators.Krum(), aggregators.RFA())


@pytest.mark.parametrize("rule", slow_except(FEW, ROBUST), ids=str)
def test_aggregators_keep_their_bounds(rule):
    for attack in (attacks.LargeNoise(), attacks.ALIE(), attacks.MinMax()):
        result = measure(rule, attack)
        assert result.measured.keys() == result.bounds.keys() == {"C_ra"}
        assert 0 < result.measured["C_ra"] <= result.bounds["C_ra"]


def test_the_plain_mean_is_exposed():
    worst = measure(aggregators.Mean(), attacks.LargeNoise())
    assert worst.bounds["C_ra"] is None
    for rule in ROBUST:
        assert worst.measured["C_ra"] > 100 * measure(rule, attacks.LargeNoise()).bounds["C_ra"]


@pytest.mark.parametrize(
    ("rule", "f", "attack"),
    [
        (agreement.MDA(), 3, attacks.Dissensus()),
        pytest.param(agreement.MDA(), 3, attacks.Equivocate(), marks=pytest.mark.slow),
        pytest.param(agreement.GDA(), 2, attacks.Equivocate(), marks=pytest.mark.slow),
        (agreement.TrimmedMeanAgreement(), 3, attacks.Dissensus()),
    ],
    ids=str,
)
def test_agreement_rules_keep_their_bounds(rule, f, attack):
    result = measure(rule, attack, f)
    assert result.measured.keys() == result.bounds.keys() == {"contraction", "C_avg"}
    for name, value in result.measured.items():
        assert 0 < value <= result.bounds[name]


def test_without_agreement_nothing_contracts():
    measured = measure(agreement.NoAgreement(), attacks.Equivocate()).measured
    assert measured["contraction"] == pytest.approx(1, abs=1e-4)
    assert measured["C_avg"] == pytest.approx(0, abs=1e-4)


def test_an_agreement_rule_is_attacked_whatever_the_default_target():
    rule, zero = agreement.TrimmedMeanAgreement(), attacks.Zero
    default, aimed = measure(rule, zero()), measure(rule, zero(target="parameters"))
    assert default.measured == aimed.measured


# The numbers themselves


@pytest.mark.parametrize("direction", ["unit", "std"])
def test_the_constant_is_the_definition(direction):
    result = measure(aggregators.Median(), attacks.MinMax(direction=direction), seed=7)
    ratios = []
    for cloud in clouds_of(7):
        honest = cloud[: K - F]
        message = twins.attack_min_max(honest, F, direction)
        moved = twins.median(np.concatenate([honest, np.tile(message, (F, 1))]), F) - honest.mean(axis=0)
        h = len(honest)
        ratios.append(moved @ moved / (ALPHA * twins.squared_distances(honest).sum() / (h * (h - 1))))
    assert result.measured["C_ra"] == pytest.approx(max(ratios), rel=1e-3)
    # 4 (1 + f/(K − 2f))² relates to 1/h Σ ‖x_i − x̄‖²; the definition's variance is 2h/(h − 1) times that.
    assert result.bounds["C_ra"] == pytest.approx(4 * (1 + 3 / 7) ** 2 * 9 / 20 / ALPHA)


@pytest.mark.parametrize("rule", [agreement.MDA(), agreement.TrimmedMeanAgreement()], ids=str)
def test_contraction_and_drift_are_the_definition(rule):
    result = measure(rule, attacks.Dissensus())
    contractions, drifts = [], []
    for cloud in clouds_of(0):
        before, after = cloud[: K - F], np.empty((K - F, D))
        for own in range(K - F):
            message = twins.attack_dissensus(cloud[own], before, F, 1.0)
            received = np.concatenate([before, np.tile(message, (F, 1))])
            after[own] = (twins.agree_trimmed_mean if rule.per_coordinate else twins.agree_mda)(received, own, F)
        moved = after.mean(axis=0) - before.mean(axis=0)
        if rule.per_coordinate:
            contractions.append(np.max(np.ptp(after, axis=0) / np.ptp(before, axis=0)))
            drifts.append(np.max(np.abs(moved) / np.ptp(before, axis=0)))
        else:
            contractions.append(twins.diameter(after) / twins.diameter(before))
            drifts.append(np.linalg.norm(moved) / twins.diameter(before))
    assert result.measured["contraction"] == pytest.approx(max(contractions), rel=1e-3)
    assert result.measured["C_avg"] == pytest.approx(max(drifts), rel=1e-3)


def test_deterministic_by_seed():
    fresh = measure.__wrapped__
    first, again, other = (fresh(aggregators.Median(), attacks.LargeNoise(), seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.measured != other.measured


def test_reads_as_a_sentence():
    known = measure(aggregators.Median(), attacks.LargeNoise())
    for part in ("Median()", "LargeNoise()", "K = 13", "f = 3", "24 clouds", "bound 15.92"):
        assert part in str(known)
    assert f"C_ra {known.measured['C_ra']:.4g}" in str(known)
    assert "no bound known" in str(measure(aggregators.Mean(), attacks.LargeNoise()))
    both = str(measure(agreement.NoAgreement(), attacks.Equivocate()))
    assert "contraction 1 (bound 1)" in both
    assert "C_avg" in both


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_byzantine": 0}, "at least one Byzantine"),
        ({"num_agents": 4, "num_byzantine": 3}, "two honest"),
        ({"trials": 0}, "trials and dimension must be positive"),
        ({"dimension": 0}, "trials and dimension must be positive"),
        ({"num_byzantine": 13}, "f < K"),
    ],
)
def test_bad_input(options, match):
    with pytest.raises(ValueError, match=match):
        certificate(aggregators.Mean(), attacks.Zero(), **options)


# The clouds


def test_honest_clouds_are_of_four_kinds():
    clouds = clouds_of(0)
    assert clouds.shape == (TRIALS, K, D)
    np.testing.assert_array_equal(clouds, clouds_of(0))
    assert not np.array_equal(clouds, clouds_of(1))
    assert np.ptp(np.log10(np.linalg.norm(clouds.mean(axis=1), axis=1))) > 1  # means of every size
    around = clouds - clouds.mean(axis=1, keepdims=True)
    gaussian, heavy, clusters, line = (around[kind::4] for kind in range(4))
    assert gaussian.std() == pytest.approx(1, abs=0.15)
    assert np.abs(gaussian).max() < 6 < np.abs(heavy).max()
    for cloud in clusters:  # every other row on the other side
        for side in (cloud[::2], cloud[1::2]):
            assert side.std(axis=0).max() < 0.2
        assert np.linalg.norm(cloud[::2].mean(axis=0) - cloud[1::2].mean(axis=0)) > 1
    for cloud in line:
        spread = np.linalg.svd(cloud, compute_uv=False)
        assert spread[0] > 3 * spread[1]
    assert np.linalg.svd(gaussian[0], compute_uv=False)[:2] @ [1, -3] < 0
