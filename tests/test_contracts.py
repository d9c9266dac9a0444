"""What every aggregation and agreement rule promises: `rule_table` lists the claims, and these tests check them.

A claim is tested both ways: a rule that makes it must keep it, and a rule that does not must be seen to break it. So
every test here has its negative control. Golden values, and what holds without faults, are in test_aggregators.py.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_table import AGGREGATORS, AGREEMENTS, CONVEX, KEY, OWN, ROUNDED, Case, D, K
from tiers import slow_except

from byzpg.robust import aggregators, agreement
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
from byzpg.testing import check_aggregator, check_agreement, sample_rows

ALL_ROWS = np.ones(K, bool)


every_rule = pytest.mark.parametrize("case", AGGREGATORS + AGREEMENTS, ids=str)
# Every class of rules once. With other options, or around another rule, they are slow where programs are compiled.
ONE_OF_EACH = {type(case.rule): case for case in reversed(AGGREGATORS + AGREEMENTS)}
ALONE = [case for case in ONE_OF_EACH.values() if not isinstance(case.rule, PreAggregator)]


cloud = partial(sample_rows, num_rows=K)


def call(case: Case, rows: Any, f: int | None = None, present: Any = ALL_ROWS) -> jax.Array:
    """Call the rule with all it may need. The signature is fixed, so few programs are compiled."""
    options = {"own": OWN} if isinstance(case.rule, Agreement) else {}
    return case.rule(rows, num_byzantine=case.f if f is None else f, present=present, key=KEY, **options)


def without(*missing: int) -> np.ndarray:
    present = ALL_ROWS.copy()
    present[list(missing)] = False
    return present


@pytest.mark.parametrize(
    ("module", "family", "table"), [(aggregators, Aggregator, AGGREGATORS), (agreement, Agreement, AGREEMENTS)]
)
def test_the_table_holds_every_rule(module: Any, family: type, table: list[Case]):
    classes = {c for c in vars(module).values() if isinstance(c, type) and issubclass(c, family)}
    concrete = {c for c in classes if not inspect.isabstract(c) and not c.__name__.startswith("_")}
    assert {type(case.rule) for case in table} == concrete


CLAIMS = ("order", "translation", "agreement", "exact agreement", "robustness")


@pytest.mark.parametrize(
    "case",
    slow_except(ALONE, AGGREGATORS + AGREEMENTS),
    ids=str,
)
def test_the_contract_is_kept_and_claims_hold_both_ways(case: Case):
    """`byzpg.testing` checks users' rules in the same way. The plain mean must fail the test of robustness."""
    check: Any = check_agreement if isinstance(case.rule, Agreement) else check_aggregator
    report = check(case.rule, num_agents=K, num_byzantine=case.f, claims=())
    claimed = (case.permutes, case.translates, case.agrees != "no", case.agrees == "exactly", case.robust)
    found = [report.has(name) for name in CLAIMS]
    if case.agrees == ROUNDED:  # it may be exact by chance
        found[3] = False
    assert found == list(claimed)
    assert ("convexity" in report.properties) == (case.weights is not None)
    assert case.weights is None or report.has("convexity") == (case.weights == CONVEX)


@pytest.mark.parametrize(
    "case",
    slow_except(
        [c for c in AGGREGATORS + AGREEMENTS if c.rule == Krum()],
        [c for c in AGGREGATORS + AGREEMENTS if not isinstance(c.rule, PreAggregator)],
    ),
    ids=str,
)
def test_no_jit_is_jit(case: Case):
    """Pre-aggregators are left out for time: they wrap the others."""
    expected = call(case, cloud(0))
    with jax.disable_jit():
        np.testing.assert_allclose(call(case, cloud(0)), expected, rtol=1e-5, atol=1e-5)


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
