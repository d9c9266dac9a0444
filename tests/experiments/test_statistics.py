"""Statistics over seeds on distributions with known answers, and the learning curves drawn from them."""

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

from byzpg.experiments.figures import COLOURS, Curve, learning_curves
from byzpg.experiments.statistics import (
    bootstrap_interval,
    even_grid,
    improvement_interval,
    interquartile_mean,
    lower_median,
    probability_of_improvement,
    smooth_on_grid,
    trajectories_to_reach,
)


def naive_interquartile_mean(values: list[float]) -> float:
    ordered = sorted(values)
    for _ in range(len(values) // 4):
        ordered = ordered[1:-1]
    return sum(ordered) / len(ordered)


@pytest.mark.parametrize("num_seeds", [1, 2, 3, 4, 5, 7, 8, 12, 21])
def test_interquartile_mean_is_the_naive_one(num_seeds: int) -> None:
    values = np.random.default_rng(num_seeds).standard_cauchy((3, num_seeds, 2))
    expected = [[naive_interquartile_mean(list(values[i, :, j])) for j in range(2)] for i in range(3)]
    np.testing.assert_allclose(interquartile_mean(values, axis=1), expected)
    np.testing.assert_allclose(interquartile_mean(values[0]), expected[0])


def test_interquartile_mean_withstands_a_quarter_of_outliers_and_the_mean_does_not() -> None:
    values = np.array([5.0, 5.0, 5.0, 5.0, 1e9, 5.0, -1e12, 5.0])
    assert interquartile_mean(values) == 5
    assert abs(np.mean(values) - 5) > 1e9


# The bootstrap


def coverage(statistic: Callable[..., np.ndarray], truth: float, num_seeds: int, level: float) -> float:
    """How often, of 2000 experiments with Gaussian returns around 7, the interval holds the truth."""
    samples = np.random.default_rng(3).normal(7, 2, (num_seeds, 2000))
    low, high = bootstrap_interval(samples, statistic, level=level, resamples=400)
    return float(np.mean((low <= truth) & (truth <= high)))


@pytest.mark.parametrize("level", [0.8, 0.95])
@pytest.mark.parametrize("statistic", [np.mean, interquartile_mean])
def test_intervals_of_gaussian_samples_hold_the_truth_as_often_as_they_say(
    statistic: Callable[..., np.ndarray], level: float
) -> None:
    # At 40 seeds the percentile bootstrap falls short by one or two in a hundred.
    assert level - 0.04 < coverage(statistic, 7.0, 40, level) < level + 0.02


def test_an_interval_around_another_number_does_not_hold_it() -> None:
    assert coverage(np.mean, 9.0, 40, 0.95) < 0.05


def test_the_interval_of_the_mean_has_the_textbook_width() -> None:
    values = np.random.default_rng(0).normal(0, 1, 400)
    low, high = bootstrap_interval(values, np.mean, resamples=4000)
    np.testing.assert_allclose(high - low, 2 * 1.96 * np.std(values) / 400**0.5, rtol=0.05)
    assert low < np.mean(values) < high


def test_the_bootstrap_is_deterministic_draws_whole_curves_and_rounds_outwards() -> None:
    values = np.random.default_rng(0).normal(size=(6, 4))
    values[:, 3] = values[:, 0]
    low, high = bootstrap_interval(values, interquartile_mean)
    again = bootstrap_interval(values, interquartile_mean)
    other = bootstrap_interval(values, interquartile_mean, seed=1)
    assert low.shape == high.shape == (4,)
    np.testing.assert_array_equal((low, high), again)
    assert np.any(np.stack([low, high]) != np.stack(other))
    assert (low[0], high[0]) == (low[3], high[3])
    np.testing.assert_array_equal(bootstrap_interval(values[:1], np.mean), [values[0], values[0]])
    # Rounded outwards, the ends of two estimates are both of them.
    low, high = bootstrap_interval(values, np.mean, level=0.1, resamples=2)
    assert np.all(low < high)


@pytest.mark.parametrize("statistic", [np.mean, interquartile_mean])
def test_stratified_intervals_hold_the_truth_and_pooled_ones_say_too_little(
    statistic: Callable[..., np.ndarray],
) -> None:
    # Three strata a deviation apart, 20 seeds each, 1000 experiments. Both statistics are even about the middle one.
    rng = np.random.default_rng(0)
    strata = [rng.normal(mean, 1, (20, 1000)) for mean in (6, 7, 8)]
    low, high = bootstrap_interval(strata, statistic, resamples=200)
    # A resample's variance is (n − 1)/n of the sample's; 1000 experiments have a standard error of 0.007.
    expected = 1 - 2 * NormalDist().cdf(-1.96 * (19 / 20) ** 0.5)
    assert abs(np.mean((low <= 7) & (high >= 7)) - expected) < 3 * 0.007
    low, high = bootstrap_interval(np.concatenate(strata), statistic, resamples=200)
    assert np.mean((low <= 7) & (high >= 7)) > expected + 3 * 0.007


def test_strata_are_resampled_apart_and_each_by_its_own_seeds() -> None:
    values = np.random.default_rng(0).normal(size=400)
    textbook = 2 * 1.96 * np.std(values) / 800**0.5
    # With the same draws in both, mirrored strata would cancel.
    low, high = bootstrap_interval([values, 1000 - values], np.mean, resamples=4000)
    np.testing.assert_allclose(high - low, textbook, rtol=0.05)
    low, high = bootstrap_interval(np.concatenate([values, 1000 - values]), np.mean, resamples=4000)
    assert high - low > 100 * textbook
    uneven = [np.zeros((3, 2)), np.ones((9, 2))]
    np.testing.assert_array_equal(bootstrap_interval(uneven, np.mean), np.full((2, 2), 0.75))
    np.testing.assert_array_equal(bootstrap_interval([values], np.mean), bootstrap_interval(values, np.mean))


# Who wins


def naive_probability_of_improvement(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(1.0 if x > y else 0.5 if x == y else 0.0 for x in ours for y in theirs) / (len(ours) * len(theirs))


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0], [0.0], 1.0),
        ([0.0], [0.0], 0.5),
        ([1.0, 2.0, 2.0], [2.0, 0.0], (1 + 0 + 1 + 0.5 + 1 + 0.5) / 6),
        ([np.inf, 3.0], [np.inf, np.inf, 5.0], (0.5 + 0.5 + 1) / 6),
        ([-np.inf, np.inf], [-np.inf], (0.5 + 1) / 2),
        ([np.inf, np.inf], [np.inf], 0.5),
    ],
)
def test_probability_of_improvement_counts_pairs_and_halves_ties(
    ours: list[float], theirs: list[float], expected: float
) -> None:
    assert naive_probability_of_improvement(ours, theirs) == pytest.approx(expected)
    assert probability_of_improvement(np.array(ours), np.array(theirs)) == pytest.approx(expected)
    assert probability_of_improvement(np.array(theirs), np.array(ours)) == pytest.approx(1 - expected)


def test_probability_of_improvement_is_the_mean_over_strata_each_against_its_own() -> None:
    rng = np.random.default_rng(0)
    ours = [rng.integers(5, size=n).astype(float) for n in (4, 9, 1)]
    theirs = [rng.integers(5, size=n).astype(float) for n in (7, 2, 3)]
    each = [naive_probability_of_improvement(list(x), list(y)) for x, y in zip(ours, theirs, strict=True)]
    assert probability_of_improvement(ours, theirs) == pytest.approx(np.mean(each))
    # Pooled, the second stratum of theirs would beat the first of ours.
    ours, theirs = [np.array([1.0, 2.0]), np.array([11.0])], [np.array([0.0]), np.array([10.0, 9.0])]
    assert probability_of_improvement(ours, theirs) == 1
    np.testing.assert_array_equal(improvement_interval(ours, theirs), [1, 1])
    np.testing.assert_array_equal(improvement_interval(theirs, ours), [0, 0])
    assert probability_of_improvement(np.concatenate(ours), np.concatenate(theirs)) < 1


@pytest.mark.parametrize("gap", [0.0, 0.7, -2.0])
def test_probability_of_improvement_of_gaussians_has_its_closed_form(gap: float) -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(gap, 1.5, 2000), rng.normal(0, 1.5, 2000)
    expected = NormalDist().cdf(gap / (2**0.5 * 1.5))  # Φ(Δ / √2 σ)
    # Its standard error is at most that of equal distributions, √((n + m + 1) / 12 n m) = 0.009.
    assert abs(probability_of_improvement(ours, theirs) - expected) < 3 * 0.009


def test_intervals_of_improvement_hold_the_closed_form_and_not_another() -> None:
    rng = np.random.default_rng(0)
    runs = rng.normal(size=(400, 2, 30)) + np.array([[1.0], [0.0]])
    low, high = np.transpose([improvement_interval(*each, resamples=200, seed=i) for i, each in enumerate(runs)])
    truth = NormalDist().cdf(1 / 2**0.5)
    # 400 experiments have a standard error of 0.011; the percentile bootstrap falls short by about one in a hundred.
    assert 0.94 - 3 * 0.011 < np.mean((low <= truth) & (truth <= high)) < 0.94 + 3 * 0.011
    assert np.mean((low <= 0.5) & (high >= 0.5)) < 0.1


def test_the_interval_of_improvement_has_the_textbook_width() -> None:
    # With the same draws in both, a method against itself would always be a tie.
    values = np.random.default_rng(0).normal(size=50)
    textbook = 2 * 1.96 * (101 / (12 * 50 * 50)) ** 0.5
    low, high = improvement_interval(values, values)
    np.testing.assert_allclose([low, high], [0.5 - textbook / 2, 0.5 + textbook / 2], atol=0.02)
    # The mean over four strata alike is half as uncertain.
    low, high = improvement_interval([values] * 4, [values] * 4)
    np.testing.assert_allclose(high - low, textbook / 2, rtol=0.1)
    narrow = improvement_interval(values, values, level=0.5, resamples=500, seed=3)
    np.testing.assert_allclose(narrow[1] - narrow[0], textbook * 0.674 / 1.96, rtol=0.2)


# Seeds that never get there


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        ([7.0], 7.0),
        ([5.0, 3.0], 3.0),
        ([9.0, 1.0, 5.0], 5.0),
        ([np.inf, 900.0], 900.0),
        ([np.inf, 2.0, np.inf, 1.0], 2.0),
        ([np.inf, 2.0, np.inf], np.inf),
        ([np.inf] * 4, np.inf),
    ],
)
def test_the_lower_median_is_when_half_the_seeds_got_there(reached: list[float], expected: float) -> None:
    assert lower_median(np.array(reached)) == expected
    np.testing.assert_array_equal(lower_median(np.array([reached, reached]), axis=1), [expected, expected])


def test_the_interval_of_the_lower_median_is_that_of_order_statistics_also_among_infinities() -> None:
    # Its ends are order statistics by binomial counts: of 25 seeds, the 8th and the 18th (David & Nagaraja 2003).
    reached = np.arange(1.0, 26.0)
    low, high = bootstrap_interval(reached, lower_median)
    assert abs(low - 8) <= 1
    assert abs(high - 18) <= 1
    few = np.where(reached > 15, np.inf, reached)
    np.testing.assert_array_equal(bootstrap_interval(few, lower_median), [low, np.inf])
    np.testing.assert_array_equal(bootstrap_interval(np.full(5, np.inf), lower_median), [np.inf, np.inf])
    none_above = np.where(reached > 20, np.inf, reached)
    np.testing.assert_array_equal(bootstrap_interval(none_above, lower_median), [low, high])


def test_intervals_of_the_lower_median_hold_the_truth() -> None:
    samples = np.random.default_rng(0).exponential(1.0, (41, 1000))
    samples[samples > 1.2] = np.inf  # 30 % never get there
    low, high = bootstrap_interval(samples, lower_median, resamples=200)
    # Counts of seeds are discrete, so the level is met from either side; 1000 experiments have an error of 0.007.
    assert 0.95 - 3 * 0.007 < np.mean((low <= np.log(2)) & (np.log(2) <= high)) < 0.95 + 3 * 0.007
    assert np.mean((low <= 1.1) & (high >= 1.1)) < 0.5


# Curves on a common axis


def test_cells_are_means_weighted_by_trajectories() -> None:
    trajectories = np.array([10, 12, 20, 21, 50, 70])  # batches of 10, 2, 8, 1, 29, 20
    returns = np.array([[1.0, 7.0, 2.0, 5.0, 4.0, 9.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    smooth = smooth_on_grid(trajectories, returns, np.array([5, 20, 30, 40, 50, 60]))
    first = (10 * 1 + 2 * 7 + 8 * 2) / 20
    np.testing.assert_allclose(smooth[0], [np.nan, first, 5.0, 4.5, 4.0, 6.5])
    np.testing.assert_allclose(smooth[1], [np.nan, 0, 0, 0, 0, 0.5])
    beyond = smooth_on_grid(trajectories, returns, np.array([50, 70, 71]))
    np.testing.assert_array_equal(np.isnan(beyond), [[False, False, True]] * 2)


def test_seeds_with_iterations_of_their_own_are_what_each_is_alone() -> None:
    """After the last iteration of a seed, trajectories stay the same and returns are NaN."""
    rng = np.random.default_rng(0)
    lengths = [30, 21, 25]
    totals = [np.cumsum(rng.choice([4, 50], length)) for length in lengths]
    scores = [rng.normal(size=length) for length in lengths]
    trajectories = np.stack([np.append(each, [each[-1]] * (30 - len(each))) for each in totals])
    returns = np.stack([np.append(each, [np.nan] * (30 - len(each))) for each in scores])
    grid = even_grid(trajectories, 12)
    assert grid[-1] == min(each[-1] for each in totals)
    assert len(even_grid(trajectories, 1000)) <= 21
    smooth = smooth_on_grid(trajectories, returns, grid)
    assert np.all(np.isfinite(smooth))
    reached = trajectories_to_reach(trajectories, returns, 0.2, window=100)
    for index, (total, score) in enumerate(zip(totals, scores, strict=True)):
        np.testing.assert_array_equal(smooth[index], smooth_on_grid(total, score[None], grid)[0])
        assert reached[index] == trajectories_to_reach(total, score[None], 0.2, window=100)[0]
    with pytest.raises(ValueError, match="running totals"):
        smooth_on_grid(np.array([[1, 1, 2]]), np.zeros((1, 3)), np.arange(3))


def test_a_grid_of_the_iterations_themselves_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    trajectories = np.cumsum(rng.integers(1, 50, 30))
    returns = rng.normal(size=(4, 30))
    np.testing.assert_allclose(smooth_on_grid(trajectories, returns, trajectories), returns, rtol=1e-12)


def test_one_cell_is_the_mean_of_all_trajectories_and_a_missing_return_stays_where_it_is() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 50, 30)
    returns = rng.normal(size=(4, 30))
    whole = smooth_on_grid(np.cumsum(sizes), returns, np.array([np.sum(sizes)]))
    np.testing.assert_allclose(whole[:, 0], returns @ sizes / np.sum(sizes))
    returns[1, 7] = np.nan
    holed = smooth_on_grid(np.cumsum(sizes), returns, np.cumsum(sizes))
    assert np.argwhere(np.isnan(holed)).tolist() == [[1, 7]]
    assert np.all(np.isnan(smooth_on_grid(np.array([10]), np.ones((2, 1)), np.array([1, 2]))))


def naive_trajectories_to_reach(sizes: list[int], returns: list[float], level: float, window: float) -> float:
    for t in range(len(sizes)):
        here = sum(sizes[: t + 1])
        inside = [s for s in range(t + 1) if sum(sizes[: s + 1]) > here - window]
        mean = sum(sizes[s] * returns[s] for s in inside) / sum(sizes[s] for s in inside)
        if here >= window and mean >= level:
            return here
    return np.inf


@pytest.mark.parametrize("window", [1, 30, 100, 100_000])
def test_trajectories_to_reach_is_the_naive_one(window: float) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.choice([4, 50], 60)
    returns = np.linspace(0, 10, 60) + rng.normal(size=(5, 60))
    for level in (-5.0, 2.0, 6.0, 9.9, 20.0):
        expected = [naive_trajectories_to_reach(list(sizes), list(row), level, window) for row in returns]
        np.testing.assert_array_equal(trajectories_to_reach(np.cumsum(sizes), returns, level, window), expected)


def test_a_perfect_score_is_reached_exactly_and_one_lucky_start_is_not_enough() -> None:
    trajectories = np.arange(1, 201) * 7
    returns = np.where(np.arange(200) < 100, 10 + np.random.default_rng(0).random(200) * 300, 500.0)
    returns[0] = 500.0
    (reached,) = trajectories_to_reach(trajectories, returns[None], 500.0, window=70)
    assert reached == trajectories[109]
    (raw,) = trajectories_to_reach(trajectories, returns[None], 500.0, window=7)
    assert raw == trajectories[0]
    assert trajectories_to_reach(trajectories, returns[None], 500.1, window=7) == [np.inf]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: smooth_on_grid(np.arange(1, 4), np.zeros(3), np.arange(3)), r"got shapes \(3,\) and \(3,\)"),
        (lambda: smooth_on_grid(np.arange(1, 4), np.zeros((2, 4)), np.arange(3)), r"got shapes \(3,\) and \(2, 4\)"),
        (lambda: smooth_on_grid(np.array([1, 3, 3]), np.zeros((2, 3)), np.arange(3)), "running totals"),
        (lambda: smooth_on_grid(np.arange(1, 4), np.zeros((2, 3)), np.zeros(3)), "grid must increase"),
        (lambda: trajectories_to_reach(np.arange(3), np.zeros((2, 3)), 1.0, 2), "running totals"),
        (lambda: trajectories_to_reach(np.arange(1, 4), np.zeros((2, 3)), 1.0, 0), "window must be a positive"),
        (lambda: bootstrap_interval(np.zeros(3), np.mean, level=95), "between 0 and 1, got 95"),
        (lambda: bootstrap_interval(np.zeros(0), np.mean), r"with seeds in each .* got shapes \(0,\)"),
        (lambda: bootstrap_interval([], np.mean), "got none"),
        (lambda: bootstrap_interval([np.zeros(2), np.zeros((0,))], np.mean), r"got shapes \(2,\), \(0,\)"),
        (lambda: bootstrap_interval([np.zeros((2, 3)), np.zeros((2, 4))], np.mean), "alike in all other axes"),
        (lambda: bootstrap_interval(np.array(3.0), np.mean), r"got shapes \(\)"),
        (lambda: bootstrap_interval(np.array([1.0, np.nan]), lower_median), "none NaN, got"),
        (lambda: lower_median(np.array([1.0, np.nan, np.inf])), "got 3 with 1 NaN; leave those out"),
        (lambda: lower_median(np.zeros(0)), "got 0 with 0 NaN"),
        (lambda: probability_of_improvement(np.zeros(3), np.array([np.nan, 1.0])), "got 2 with 1 NaN"),
        (lambda: improvement_interval(np.array([np.nan]), np.zeros(3)), "got 1 with 1 NaN"),
        (lambda: probability_of_improvement(np.zeros(0), np.zeros(3)), r"got shapes \(0,\)"),
        (lambda: probability_of_improvement([np.zeros(3)] * 2, [np.zeros(3)] * 3), "got 2 and 3 of them"),
        (lambda: probability_of_improvement(np.zeros((2, 3)), np.zeros(3)), r"got shape \(2, 3\); give strata as"),
        (lambda: improvement_interval(np.zeros(3), np.zeros(3), level=0.0), "between 0 and 1, got 0.0"),
        (lambda: learning_curves([], "title"), "at least one curve"),
    ],
)
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# Learning curves


def a_curve(label: str, num_seeds: int, num_iterations: int = 250) -> Curve:
    rng = np.random.default_rng(num_seeds)
    sizes = np.where(rng.random(num_iterations) < 0.2, 50, 4)
    sizes[0] = 200  # several cells' worth
    returns = np.linspace(10, 400, num_iterations) + rng.normal(0, 20, (num_seeds, num_iterations))
    return Curve(label, np.cumsum(sizes), returns)


def test_learning_curves_draw_means_and_interquartile_means() -> None:
    curves = [a_curve("robust", 8), a_curve("single", 1), a_curve("fragile", 5, num_iterations=40)]
    figure = learning_curves(curves, "a title", reference_level=300.0)
    left, right = figure.axes
    assert figure.get_suptitle() == "a title"
    assert left.get_ylabel() == "return (mean over honest agents)"
    assert left.get_xlabel() == right.get_xlabel() == "trajectories per agent"
    assert left.get_title(loc="left") == "mean ± one standard deviation, 1 to 8 seeds"
    assert right.get_title(loc="left") == "interquartile mean, 95 % bootstrap interval, 5 to 8 seeds"
    assert [line.get_label() for line in left.lines] == ["robust", "single", "fragile", "reference: 300"]
    assert [line.get_label() for line in right.lines] == ["robust", "fragile", "reference: 300"]
    assert [len(left.collections), len(right.collections)] == [3, 2]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["robust", "single", "fragile", "reference: 300"]
    colours = [to_hex(line.get_color()).upper() for line in left.lines[:3]]
    assert colours == list(COLOURS[:3])
    assert [to_hex(line.get_color()).upper() for line in right.lines[:2]] == [COLOURS[0], COLOURS[2]]
    figure.draw_without_rendering()
    for axes in (left, right):
        assert axes.get_xlim() == (0, curves[0].progress[-1])
        drawn = axes.get_tightbbox()
        assert drawn is not None
        assert not legend.get_window_extent().overlaps(drawn)
        assert all(np.all(np.isfinite(np.asarray(line.get_ydata()))) for line in axes.lines)
    pyplot.close(figure)


def test_what_is_drawn_is_what_was_measured() -> None:
    """Few iterations of one size, so that no two share a cell."""
    rng = np.random.default_rng(0)
    curve = Curve("label", np.arange(1, 21) * 10, rng.normal(100, 10, (8, 20)))
    figure = learning_curves([curve], "title")
    (mean,), (middle,) = (axes.lines for axes in figure.axes)
    for line in (mean, middle):
        np.testing.assert_allclose(np.asarray(line.get_xdata()), curve.progress)
    np.testing.assert_allclose(np.asarray(mean.get_ydata()), np.mean(curve.returns, axis=0))
    np.testing.assert_allclose(np.asarray(middle.get_ydata()), interquartile_mean(curve.returns))
    bands = [axes.collections[0].get_datalim(axes.transData) for axes in figure.axes]
    deviation = np.std(curve.returns, axis=0)
    low, high = bootstrap_interval(curve.returns, interquartile_mean)
    limits = [(np.mean(curve.returns, axis=0) - deviation, np.mean(curve.returns, axis=0) + deviation), (low, high)]
    for band, (bottom, top) in zip(bands, limits, strict=True):
        np.testing.assert_allclose([band.y0, band.y1], [np.min(bottom), np.max(top)])
    pyplot.close(figure)


def test_too_few_seeds_make_one_panel_and_many_curves_stay_apart() -> None:
    figure = learning_curves([a_curve(f"{i}", 2, 30) for i in range(9)], "title")
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "mean ± one standard deviation, 2 seeds"
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(looks) == 9
    pyplot.close(figure)
