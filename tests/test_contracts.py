"""What every aggregation and agreement rule promises: `rule_table` lists the claims, and these tests check them.

A claim is tested both ways: a rule that makes it must keep it, and a rule that does not must be seen to break it. So
every test here has its negative control. Golden values, and what holds without faults, are in test_aggregators.py.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_table import AGGREGATORS, AGREEMENTS, CONVEX, KEY, OWN, Case, D, K

from byzpg.robust import aggregators, agreement, rules
from byzpg.robust.aggregators import (
    ARC,
    MDA,
    NNM,
    RFA,
    SMEA,
    Aggregator,
    Bucketing,
    CenteredClipping,
    Clipping,
    FedPGFilter,
    Krum,
    Mean,
    Median,
    MoNNA,
    PreAggregator,
)
from byzpg.robust.agreement import GDA, Agreement

ALL_ROWS = np.ones(K, bool)


every_rule = pytest.mark.parametrize("case", AGGREGATORS + AGREEMENTS, ids=str)


def cloud(seed: int) -> np.ndarray:
    """Rows of spread 1 around a point of norm 1 to 3, two of them outliers, so that every rule drops some row."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(K, D)) + rng.normal(size=D)
    rows[1:3] *= 4
    return rows.astype(np.float32)


def call(
    case: Case, rows: Any, f: int | None = None, present: Any = ALL_ROWS, own: int = OWN, weights: bool = False
) -> jax.Array:
    """Call the rule, or its weights, with all it may need. The signature is fixed, so few programs are compiled."""
    function = case.rule.weights if weights else case.rule
    options = {"own": own} if isinstance(case.rule, Agreement) else {}
    return function(rows, num_byzantine=case.f if f is None else f, present=present, key=KEY, **options)


def without(*missing: int) -> np.ndarray:
    present = ALL_ROWS.copy()
    present[list(missing)] = False
    return present


def close(left: Any, right: Any, tolerance: float = 1e-4) -> bool:
    return np.allclose(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("module", "family", "table"), [(aggregators, Aggregator, AGGREGATORS), (agreement, Agreement, AGREEMENTS)]
)
def test_the_table_holds_every_rule(module: Any, family: type, table: list[Case]):
    classes = {c for c in vars(module).values() if isinstance(c, type) and issubclass(c, family)}
    concrete = {c for c in classes if not inspect.isabstract(c) and not c.__name__.startswith("_")}
    assert {type(case.rule) for case in table} == concrete


@every_rule
def test_shape_dtype_and_input_untouched(case: Case):
    rows, present = cloud(0), without(7)
    rows[9] = np.nan
    rows_before, present_before = rows.tobytes(), present.tobytes()
    result = call(case, rows, present=present)
    assert result.shape == (D,)
    assert result.dtype == jnp.float32
    assert np.all(np.isfinite(result))
    assert (rows.tobytes(), present.tobytes()) == (rows_before, present_before)


@cache
def batched(case: Case) -> tuple[Callable, list]:
    """One program for the results and weights of a batch of clouds, and a list that grows when it is traced."""
    traces = []

    def program(clouds: jax.Array) -> list[jax.Array]:
        traces.append(clouds.shape)
        wanted = (False, True) if case.weights else (False,)
        return [jax.vmap(lambda rows, w=w: call(case, rows, present=None, weights=w))(clouds) for w in wanted]

    return jax.jit(program), traces


@every_rule
def test_jit_and_vmap_are_the_loop_and_trace_once(case: Case):
    program, traces = batched(case)
    for seeds in (range(3), range(3, 6)):
        clouds = np.stack([cloud(seed) for seed in seeds])
        np.testing.assert_allclose(program(clouds)[0], [call(case, rows) for rows in clouds], rtol=1e-5, atol=1e-5)
    assert len(traces) == 1


@every_rule
def test_other_values_do_not_compile_again(case: Case):
    apply: Any = rules._apply
    first = call(case, cloud(0))
    programs = apply._cache_size()
    assert not close(call(case, cloud(1), present=without(8)), first)
    assert apply._cache_size() == programs


@pytest.mark.parametrize(
    "case", [c for c in AGGREGATORS + AGREEMENTS if not isinstance(c.rule, PreAggregator)], ids=str
)
def test_no_jit_is_jit(case: Case):
    """Pre-aggregators are left out for time: they wrap the others."""
    expected = call(case, cloud(0))
    with jax.disable_jit():
        np.testing.assert_allclose(call(case, cloud(0)), expected, rtol=1e-5, atol=1e-5)


@every_rule
@pytest.mark.parametrize("row", [0, 7])
def test_content_of_a_missing_row_does_not_matter(case: Case, row: int):
    rows = cloud(2)
    expected = call(case, rows, present=without(row))
    assert np.all(np.isfinite(expected))
    for garbage in (0, -1e4, 1e25, np.nan, -np.inf):
        rows[row] = garbage
        np.testing.assert_array_equal(call(case, rows, present=without(row)), expected)
    for columns in (slice(None), 3):  # a whole row, or one entry of it
        for unusable in (np.nan, np.inf, -np.inf, 1e25):
            rows[row] = 1
            rows[row, columns] = unusable
            np.testing.assert_array_equal(call(case, rows), expected)


@every_rule
def test_permutation(case: Case):
    same = []
    for seed in range(5):
        rows, order = cloud(seed), np.random.default_rng(seed).permutation(K)
        own = int(np.flatnonzero(order == OWN)[0])
        same.append(close(call(case, rows[order], own=own), call(case, rows)))
    assert all(same) == case.permutes


@every_rule
def test_translation(case: Case):
    assert close(call(case, cloud(5) + np.float32(10)), np.asarray(call(case, cloud(5))) + 10) == case.translates


@every_rule
def test_weights(case: Case):
    if case.weights is None:
        with pytest.raises(TypeError, match="not a weighted mean"):
            call(case, cloud(7), weights=True)
        return
    clouds = np.stack([cloud(seed) for seed in (7, 8, 9)])
    clouds[:, 8] = np.nan
    results, weights = map(np.asarray, batched(case)[0](clouds))
    assert weights.shape == (3, K)
    assert np.all(weights >= 0)
    assert np.all(weights[:, 8] == 0)
    assert np.all(weights.sum(axis=1) < 1 + 1e-6)
    assert np.all(weights.sum(axis=1) > 1 - 1e-6) == (case.weights == CONVEX)
    for rows, weight, result in zip(np.nan_to_num(clouds), weights, results, strict=True):
        np.testing.assert_allclose(weight @ rows, result, rtol=1e-5, atol=1e-5)


@every_rule
def test_identical_rows_come_back(case: Case):
    row = 3 * np.random.default_rng(8).normal(size=D).astype(np.float32)
    result = np.asarray(call(case, np.tile(row, (K, 1))))
    few_ulp = np.max(np.abs(result - row) / np.spacing(np.abs(row))) <= 4
    assert few_ulp == (case.agrees != "no")
    assert np.array_equal(result, row) or case.agrees != "exactly"


@every_rule
def test_error_is_bounded_wherever_the_attackers_are(case: Case):
    """The plain mean must fail this."""
    worst = 0.0
    for seed in range(5):
        rng = np.random.default_rng(100 + seed)
        honest = rng.normal(size=(K - case.f, D)) + 1 / np.sqrt(D)
        spread = np.sqrt(np.mean(np.sum((honest - honest.mean(axis=0)) ** 2, axis=1)))
        direction = rng.normal(size=D)
        direction /= np.linalg.norm(direction)
        for distance in (1, 1e2, 1e4, 1e6, 1e10, 1e16):
            false_row = honest.mean(axis=0) + distance * spread * direction
            rows = np.concatenate([np.tile(false_row, (case.f, 1)), honest]).astype(np.float32)
            error = np.linalg.norm(np.asarray(call(case, rows)) - honest.mean(axis=0))
            worst = max(worst, float(error / spread))
    assert (worst < 3) == case.robust


@every_rule
def test_rules_are_values(case: Case):
    same = replace(case.rule)
    assert same is not case.rule
    assert same == case.rule
    assert hash(same) == hash(case.rule)
    assert eval(str(case.rule), vars(inspect.getmodule(type(case.rule)))) == case.rule
    assert [other.rule for other in AGGREGATORS + AGREEMENTS].count(case.rule) == 1


@every_rule
def test_the_bound_is_kept_and_named_and_so_is_the_largest_f(case: Case):
    for num_rows in range(OWN + 1, 20):
        largest = max(f for f in range(num_rows) if case.tolerates(num_rows, f))
        case.rule.check(num_rows, largest)
        refusal = f"{re.escape(f'{case.rule} needs {case.rule.bound}; ')}.* num_byzantine ≤ {largest}[,.]"
        with pytest.raises(ValueError, match=refusal) as refused:
            call(case, np.ones((num_rows, D), np.float32), f=largest + 1)
        # The message names the least number of agents with which this f would do.
        if named := re.search(r"or at least (\d+) agents\.$", str(refused.value)):
            case.rule.check(int(named[1]), largest + 1)
            with pytest.raises(ValueError, match="breaks that"):
                case.rule.check(int(named[1]) - 1, largest + 1)
        else:
            assert not any(case.rule.max_byzantine(each) > largest for each in range(num_rows, 60))


@every_rule
def test_too_few_rows(case: Case):
    missing = range(K - case.f - 1, K)
    with pytest.raises(ValueError, match=f"only {K - case.f - 1} of 13 .* at least K − f = {K - case.f} are needed"):
        call(case, cloud(0), present=without(*missing))
    rows = cloud(0)
    rows[missing] = np.inf
    with pytest.raises(ValueError, match="present and finite"):
        call(case, rows)


@pytest.mark.parametrize("case", [AGGREGATORS[1], AGREEMENTS[1]], ids=str)
def test_what_would_be_an_error_is_nan_under_jit(case: Case):
    compiled = jax.jit(lambda rows, present: call(case, rows, present=present))
    assert np.all(np.isfinite(compiled(cloud(0), ALL_ROWS)))
    assert np.all(np.isnan(compiled(cloud(0), without(*range(6, K)))))


X: Any = cloud(0)


def median(rows: Any = X, f: Any = 3, **options: Any) -> jax.Array:
    return Median()(rows, num_byzantine=f, **options)


def gda(**options: Any) -> jax.Array:
    return GDA()(X, num_byzantine=2, **options)


BAD_INPUT: dict[str, tuple[Callable, type[Exception], str]] = {
    "rank 1": (lambda: median(X[0]), ValueError, r"two axes \[K, d\].*\(5,\)"),
    "rank 3": (lambda: median(X[None]), ValueError, "two axes.*jax.vmap"),
    "int": (lambda: median(X.astype(int)), TypeError, "must be float32.*int"),
    "bool": (lambda: median(X > 0), TypeError, "must be float32.*bool"),
    "float16": (lambda: median(X.astype(np.float16)), TypeError, "must be float32.*float16"),
    "list": (lambda: median(X.tolist()), TypeError, "must be an array.*list"),
    "no rows": (lambda: median(X[:0]), ValueError, "at least one row"),
    "no columns": (lambda: median(X[:, :0]), ValueError, "at least one row and one column"),
    "negative f": (lambda: median(f=-1), ValueError, "must not be negative"),
    "float f": (lambda: median(f=3.0), TypeError, "Python int.*float"),
    "bool f": (lambda: median(f=True), TypeError, "Python int.*bool"),
    "JAX f": (lambda: median(f=jnp.asarray(3)), TypeError, "Python int"),
    "short present": (lambda: median(present=ALL_ROWS[1:]), ValueError, r"one bool per row, \[13\]"),
    "int present": (lambda: median(present=np.ones(K, int)), ValueError, "one bool per row.*int"),
    "unknown argument": (lambda: median(num_rows=3), TypeError, "num_rows"),
    "unknown option": (lambda: Krum(neighbors="paper"), TypeError, "neighbors"),  # type: ignore[call-arg]
    "Krum neighbours": (lambda: Krum(neighbours="all"), ValueError, "one of paper, original; got 'all'"),  # type: ignore[arg-type]
    "RFA start": (lambda: RFA(start="medoid"), ValueError, "RFA: start must be one of multikrum, zero"),  # type: ignore[arg-type]
    "clipping start": (lambda: CenteredClipping(start="mean"), ValueError, "one of krum, zero"),  # type: ignore[arg-type]
    "radius": (lambda: CenteredClipping(radius=0), ValueError, "CenteredClipping: radius must be positive"),
    "NaN radius": (lambda: CenteredClipping(radius=float("nan")), ValueError, "radius must be positive"),
    "iterations": (lambda: CenteredClipping(iterations=0), ValueError, "iterations must be a positive whole number"),
    "smoothing": (lambda: RFA(smoothing=0), ValueError, "smoothing must be positive"),
    "max_iterations": (lambda: RFA(max_iterations=0), ValueError, "max_iterations must be a positive whole number"),
    "tolerance": (lambda: RFA(tolerance=-1e-9), ValueError, "tolerance must not be negative"),
    "threshold": (lambda: Clipping(Median(), threshold=-1), ValueError, "threshold must be positive"),
    "size": (lambda: Bucketing(Median(), size=0), ValueError, "size must be a positive whole number"),
    "node_limit": (lambda: MDA(node_limit=0), ValueError, "node_limit must be a positive whole number"),
    "subset_limit": (lambda: SMEA(subset_limit=0), ValueError, "subset_limit must be a positive whole number"),
    "too many subsets": (
        lambda: SMEA(subset_limit=100)(X, num_byzantine=3),
        ValueError,
        r"C\(K, f\) ≤ subset_limit = 100 \(raise it, or use CAF.*3 of 13 agents .* num_byzantine ≤ 2\.",
    ),
    "filter radius": (lambda: FedPGFilter(radius=-1.0), ValueError, "FedPGFilter: radius must be positive, got -1.0"),
    "filter fallback": (lambda: FedPGFilter(fallback_radius=0), ValueError, "fallback_radius must be positive"),
    "narrower fallback": (
        lambda: FedPGFilter(radius=2.0, fallback_radius=1.0),
        ValueError,
        "fallback_radius must be at least radius = 2.0, got 1.0",
    ),
    "agreement node_limit": (
        lambda: agreement.MDA(node_limit=-1),
        ValueError,
        "node_limit must be a positive whole number",
    ),
    "no key": (lambda: Bucketing(Mean())(X, num_byzantine=3), ValueError, "pass key="),
    "no key inside": (lambda: NNM(Bucketing(Mean()))(X, num_byzantine=3), ValueError, "pass key="),
    "wrapping a name": (lambda: NNM("median"), TypeError, "NNM wraps an aggregator.*'median'"),  # type: ignore[arg-type]
    "wrapping a class": (lambda: ARC(Median), TypeError, "ARC wraps an aggregator"),  # type: ignore[arg-type]
    "wrapping agreement": (lambda: Bucketing(GDA()), TypeError, "Bucketing wraps an aggregator"),  # type: ignore[arg-type]
    "wrapping nothing": (lambda: Clipping(None), TypeError, "Clipping wraps an aggregator"),  # type: ignore[arg-type]
    "fractional size": (lambda: Bucketing(Median(), size=2.5), ValueError, "size must be a positive whole number"),  # type: ignore[arg-type]
    "pivot of buckets": (lambda: Bucketing(MoNNA(pivot=3)), ValueError, "leave out pivot"),
    "pivot absent": (
        lambda: MoNNA(pivot=4)(X, num_byzantine=3, present=without(4)),
        ValueError,
        "pivot's row is absent",
    ),
    "pivot": (lambda: MoNNA(pivot=K)(X, num_byzantine=3), ValueError, "pivot must be the index of a row, 0 to 12"),
    "negative pivot": (lambda: MoNNA(pivot=-1)(X, num_byzantine=3), ValueError, "0 to 12"),
    "no own": (lambda: gda(), TypeError, "own"),
    "own": (lambda: gda(own=K), ValueError, "own must be the index of a row, 0 to 12; got 13"),
    "negative own": (lambda: gda(own=-1), ValueError, "0 to 12; got -1"),
    "float own": (lambda: gda(own=4.0), TypeError, "own must be the index"),
    "own is bool": (lambda: gda(own=True), TypeError, "own must be the index"),
    "own row absent": (lambda: gda(own=7, present=without(7)), ValueError, "own row, 7, is absent or not finite"),
}


@pytest.mark.parametrize(("function", "error", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_refused(function: Callable, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        function()
