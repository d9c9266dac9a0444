"""The rates experiment: the stopping rule, slopes, the choice of settings, files, and a tiny run of the command."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from byzpg import cli
from byzpg.cli import reproduce
from byzpg.cli.console import console
from byzpg.config import REPORTED_SEED
from byzpg.experiments import figures, rates
from byzpg.experiments.rates import Curve, Measured, Method, Rates, Scope

RNG = np.random.default_rng(0)


def a_run(squares: np.ndarray, trajectories: np.ndarray, returns: np.ndarray | None = None) -> Any:
    metrics = {"gradient_squared": squares, "return_mean": np.zeros_like(squares) if returns is None else returns}
    return SimpleNamespace(trajectories=trajectories, metrics=metrics)


def naive_reach(squares: np.ndarray, trajectories: np.ndarray, epsilon: float, points: np.ndarray) -> float:
    """Try every number of trajectories; each seed counts the iterations that it has finished by then."""
    for point in points:
        total = 0.0
        for of_seed, ends in zip(squares, trajectories, strict=True):
            done = [square for square, end in zip(of_seed, ends, strict=True) if end <= point + 1e-6]
            total += sum(done) / len(done)
        if total / len(squares) <= epsilon**2:
            return float(point)
    return np.inf


def test_the_stopping_rule_is_the_naive_one() -> None:
    """Seeds toss coins of their own, so that their iterations end at different numbers of trajectories."""
    trajectories = np.cumsum(np.where(RNG.random((3, 200)) < 0.2, 40, 4), axis=1)
    trajectories += 40 - trajectories[:, :1]
    squares = RNG.exponential(1, (3, 200)) / np.arange(1, 201)
    curve = Curve.of(a_run(squares, trajectories))
    assert curve.points[0] == 40
    for epsilon in (0.6, 0.4, 0.2, 0.01):
        assert curve.reach(epsilon) == naive_reach(squares, trajectories, epsilon, curve.points)
    assert curve.reach(0.01) == np.inf
    assert curve.reach(0.4) < np.inf
    assert curve.reach(0.4, share=0.9 * curve.reach(0.4) / curve.points[-1]) == np.inf
    drawn = np.array([[0, 0, 2], [0, 1, 2]])
    expected = [Curve.of(a_run(squares[row], trajectories[row])) for row in drawn]
    np.testing.assert_allclose(curve.resampled(drawn, 0.4), [each.reach(0.4) for each in expected], rtol=0.05)


def test_a_known_slope_is_found_and_infinity_is_not_fitted() -> None:
    epsilons = np.array([0.2, 0.1, 0.05])
    trajectories = 3 * epsilons**-4.0
    np.testing.assert_allclose(rates.fitted_slope(epsilons, trajectories), -4)
    both = np.stack([trajectories, 5 * epsilons**-3.0])
    np.testing.assert_allclose(rates.fitted_slope(epsilons, both), [-4, -3])
    assert not np.isfinite(rates.fitted_slope(epsilons, np.array([1.0, 2.0, np.inf])))


def measured(label: str, factor: float, slope: float) -> Measured:
    epsilons = np.array(rates.EPSILONS)
    exact = factor * epsilons**slope
    noise = np.exp(np.random.default_rng(1).normal(0, 0.1, (len(epsilons), 200)))
    words = ("N = 4, η = 0.5",) * len(epsilons)
    return Measured(label, round(slope), epsilons, exact, exact[:, None] * noise, words, (0,) * len(epsilons))


def some_rates() -> Rates:
    lines = {"p = 1, K = 1": (16.0, -4.0), "p = 1, K = 16": (1.0, -4.0), "PAGE, K = 16, all agents": (10.0, -3.0)}
    methods = tuple(measured(label, *line) for label, line in lines.items())
    floors = np.tile(0.01 + 0.5 ** np.arange(3.0)[:, None], (1, 10))
    diameters = np.concatenate([np.full((1, 10), np.nan), floors[1:]])
    return Rates(methods, np.arange(3), floors, diameters, {"a step": 0.5}, {"command": "byzpg"})


def test_slopes_factors_ratios_and_the_crossover_of_known_lines() -> None:
    found = some_rates()
    fit, factor = found.methods[0].fit(), found.methods[0].factor()
    assert fit.low < fit.value < fit.high
    np.testing.assert_allclose([fit.value, factor.value], [-4, 16])
    assert factor.low < 16 < factor.high
    # ε^−4 = 10 ε^−3 at ε = 0.1.
    met = rates.crossover(found.method("p = 1, K = 16"), found.method("PAGE, K = 16, all agents"))
    np.testing.assert_allclose(met.value, 0.1)
    assert met.low < 0.1 < met.high
    compared = {what: estimate.value for what, estimate, _ in rates.comparisons(found)}
    np.testing.assert_allclose(compared["p = 1: K = 1 over K = 16, ε = 0.042"], 16)
    assert rates.ratio(found.methods[0], found.methods[1], 0.5) is None


def test_only_seeds_that_end_near_the_best_return_have_learned() -> None:
    """A policy on a plateau has a tiny gradient, too, but no return."""
    uniform, best = rates.reference_returns()
    assert best - uniform > 0.2
    start = np.full((3, 50), uniform)
    returns = np.concatenate([start, np.array([[best], [uniform], [np.nan]]) * np.ones((3, 50))], axis=1)
    run = a_run(np.zeros_like(returns), np.tile(np.arange(1, 101), (3, 1)), returns)
    np.testing.assert_array_equal(rates.learned(run), [True, False, False])


@pytest.mark.slow
def test_results_are_read_back_and_drawn(tmp_path: Path) -> None:
    before, path = some_rates(), tmp_path / "rates.npz"
    before.save(path)
    after = Rates.load(path)
    for one, other in zip(before.methods, after.methods, strict=True):
        assert (one.label, one.slope, one.chosen, one.stuck) == (other.label, other.slope, other.chosen, other.stuck)
        np.testing.assert_array_equal(one.resamples, other.resamples)
    np.testing.assert_array_equal(before.diameters, after.diameters)
    assert after.noises == before.noises
    figures.save(figures.draw_rates(after), tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 10_000
    path.write_bytes(b"no results")
    with pytest.raises(ValueError, match="cannot be read as results of `byzpg reproduce rates`"):
        Rates.load(path)


def test_tuning_seeds_are_not_reported() -> None:
    with pytest.raises(ValueError, match="seeds 100 to 111 are for tuning, and seeds from 95 on are to be reported"):
        Scope(95)
    scope = Scope(REPORTED_SEED)
    tuned = {seed for each in scope.tuning_settings() for seed in each.seeds}
    assert not tuned & {seed for each in scope.agreement_settings().values() for seed in each.seeds}
    assert {each.coins for each in scope.tuning_settings()} == {"per-seed"}


def test_methods_like_another_one_have_its_total_batches() -> None:
    methods = {method.label: method for method in rates.METHODS}
    assert len(methods) == len(rates.METHODS)

    def totals(method: Method) -> list[tuple[int, int]]:
        return [(large * method.num_agents, small * method.num_agents * method.page) for large, small in method.batches]

    for method in methods.values():
        if method.like:
            assert totals(method) == totals(methods[method.like])
            assert method.step_sizes == methods[method.like].step_sizes


def byzpg(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run a command in this process, which has its devices already."""
    monkeypatch.setattr(reproduce, "follows_another_process", lambda hardware: False)
    monkeypatch.setattr(sys, "argv", ["byzpg", *arguments])
    cli.main()


TINY = (
    Method("p = 1, K = 1", "PAGE-PG", 1, False, ((16, 1),), 20, step_sizes=(0.5,)),
    Method("p = 1, K = 4", "ByzPG", 4, False, ((16, 1),), 20, step_sizes=(0.5,), like="p = 1, K = 1"),
)


@pytest.mark.slow
def test_the_command_measures_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rates, "Scope", partial(Scope, methods=TINY, rounds=(0,)))
    monkeypatch.setattr(rates, "AGREEING", rates.AGREEING | {"num_agents": 2, "num_byzantine": 0, "trajectories": 64})
    monkeypatch.setattr(rates, "LEARNED", -10.0)
    monkeypatch.setattr(rates, "TUNING_SEEDS", 2)
    monkeypatch.setattr(rates, "ROOM", 1.0)
    monkeypatch.setattr(rates, "EPSILONS", (0.9, 0.6))
    (name, step), *_ = rates.STEPS.items()
    monkeypatch.setattr(rates, "STEPS", {name: step | {"large_batch": 16}})
    monkeypatch.setattr(rates, "STEP_EPISODES", 50)
    monkeypatch.setattr(console, "_width", 200)
    byzpg(monkeypatch, "reproduce", "rates", "--seeds", "3", "--directory", str(tmp_path))
    out = capsys.readouterr().out
    assert "1 runs, seeds for tuning: 0 done, 1 to do." in out
    assert "factor for ε/2" in out
    found = Rates.load(tmp_path / "rates-3-seeds.npz")
    assert [each.label for each in found.methods] == ["p = 1, K = 1", "p = 1, K = 4"]
    assert 0 < next(iter(found.noises.values())) < 1
    assert all((tmp_path / f"rates-3-seeds{ending}").is_file() for ending in (".png", ".svg", ".pdf"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("fig1",), "rates is run by itself"),
        (("--task", "CartPole-v1"), "--task has no effect on rates"),
        (("--trajectories", "5"), "--trajectories has no effect on rates"),
    ],
)
def test_options_that_do_not_fit(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        byzpg(monkeypatch, "reproduce", "rates", *options)
    assert message in capsys.readouterr().err
