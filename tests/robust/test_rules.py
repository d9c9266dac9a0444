"""The one way to apply a rule at a receiver: a Python call, an exchange and a member of a federation all end there."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from byzpg.robust import NNM, RFA, CenteredClipping, Clipping, Krum, Mean, Median, NoAttack, SignFlip, TrimmedMean
from byzpg.robust.aggregators import Aggregator
from byzpg.robust.agreement import GDA, NoAgreement
from byzpg.robust.attacks import Knowledge, MessageAttack
from byzpg.robust.exchange import exchange
from byzpg.robust.geometry import NORM_LIMIT, Cloud, mean_of_all
from byzpg.robust.rules import Applied, Rule, apply_at_receiver, apply_rule

K, D, F, OWN = 6, 3, 1, 2
KEY = jax.random.key(0)
ROWS = (2 + np.random.default_rng(3).normal(size=(K, D))).astype(np.float32)


@partial(jax.jit, static_argnames=("rule", "with_weights"))
def at_receiver(rule: Rule, rows: Any, present: Any, own: Any, with_weights: bool = False) -> Applied:
    """As a member of a federation does it: the receiver's rows as a cloud, and the rule on it."""
    cloud = Cloud.received(jnp.asarray(rows), present, len(rows) - F, own)
    return apply_at_receiver(rule, cloud, num_byzantine=F, key=KEY, with_weights=with_weights)


RULES = [Mean(), Median(), Krum(), GDA(), NoAgreement()]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_call_an_exchange_and_a_receiver_agree(rule: Rule):
    own = OWN if rule.needs_own else None
    called = apply_rule(rule, ROWS, num_byzantine=F, present=None, key=None, own=own)
    applied = at_receiver(rule, ROWS, None, own)
    np.testing.assert_array_equal(called.result, applied.result)
    assert int(called.num_usable) == int(applied.num_usable) == K
    assert bool(called.defined) == bool(applied.defined) is True
    assert called.weights is None
    exchanged, _ = exchange(rule, ROWS, byzantine=[], attack=NoAttack(), num_byzantine=F)
    np.testing.assert_allclose(exchanged[OWN], called.result, rtol=1e-6, atol=1e-6)


# How long some rows become, by one coordinate or by all of them, and whether these rows count.
LONG = 1.1 * NORM_LIMIT
SPOILED = [
    ([], True),
    ([np.nan], False),
    ([-np.inf], False),
    ([np.inf, -np.inf], False),
    ([np.nan, np.inf], False),
    ([3e38, 3e38], False),  # their sum overflows, though each is finite
    ([LONG, -LONG], False),  # their sum is small, though neither counts
    ([-LONG, LONG], False),
    ([1e25, -1e25], False),
    ([0.3 * NORM_LIMIT, 0.5 * NORM_LIMIT], True),  # too long for the shortcut, but sound
    ([1e16, -1e16], True),
]
CASES = [(values, counts, all_entries) for values, counts in SPOILED for all_entries in (False, True)]


def spoiled(values: list[float], all_entries: bool, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Ordinary rows, some of which are filled with values, and which these are."""
    rows, filled = ROWS.copy(), (first + 3 * np.arange(len(values))) % K
    for row, value in zip(filled, values, strict=True):
        rows[row, slice(None) if all_entries else 1] = value / np.sqrt(D) if all_entries else value
    return rows, np.isin(np.arange(K), filled)


@pytest.mark.parametrize(("values", "counts", "all_entries"), CASES, ids=str)
def test_a_mean_adds_up_the_rows_that_are_present_and_sound(values: list[float], counts: bool, all_entries: bool):
    batch, expected, scales = [], [], []
    for first in range(K):
        rows, filled = spoiled(values, all_entries, first)
        for present in (np.ones(K, bool), np.arange(K) != first):
            used = present & (counts | ~filled)
            batch.append((rows, present))
            expected.append(rows[used].mean(axis=0, dtype=np.float64))
            applied = apply_rule(Mean(), rows, num_byzantine=3, present=present, key=None)
            assert int(applied.num_usable) == np.sum(used)
            scales.append(np.max(np.abs(rows[used])))  # rows may cancel out
            np.testing.assert_allclose(applied.result, expected[-1], rtol=1e-6, atol=1e-6 * scales[-1])
        if not values or not counts:  # a sound row may take the careful path or not
            assert bool(mean_of_all(jnp.asarray(rows))[1]) == counts
    rows, present = (jnp.asarray(each) for each in zip(*batch, strict=True))
    found = jax.vmap(lambda rows, present: Mean()(rows, num_byzantine=3, present=present))(rows, present)
    each = np.array(scales)[:, None]
    np.testing.assert_allclose(found / each, expected / each, rtol=1e-6, atol=1e-6)


def test_a_mean_of_too_few_rows_is_undefined():
    """Also of a rule that is the mean without faults, where all rows count, and of rows that are all as long."""
    bad = [(spoiled([np.nan, LONG], False, 0)[0], 4), (np.full_like(ROWS, LONG / np.sqrt(D)), 0)]
    for rule, f in ((Mean(), 1), (TrimmedMean(), 0), (NNM(Mean()), 0)):
        np.testing.assert_allclose(rule(ROWS, num_byzantine=f), ROWS.mean(axis=0), rtol=1e-6)
        for rows, number in bad:
            with pytest.raises(ValueError, match=f"only {number} of 6 vectors are present and finite"):
                rule(rows, num_byzantine=f)
            assert np.all(np.isnan(jax.jit(lambda rows, rule=rule, f=f: rule(rows, num_byzantine=f))(rows)))


def test_a_mean_of_mixed_rows_is_not_the_mean():
    rows = ROWS.copy()
    rows[0] = 100
    assert np.max(np.abs(NNM(Mean())(rows, num_byzantine=1) - rows.mean(axis=0))) > 1


@pytest.mark.parametrize("spoiled_row", [False, True])
def test_a_mean_has_a_gradient(spoiled_row: bool):
    rows = jnp.asarray(ROWS).at[1].set(jnp.nan if spoiled_row else 2.0)
    weights = np.full(K, 1 / (K - spoiled_row)) * ~(spoiled_row & (np.arange(K) == 1))
    found = jax.grad(lambda rows: jnp.sum(Mean()(rows, num_byzantine=1)))(rows)
    np.testing.assert_allclose(found, np.broadcast_to(weights[:, None], (K, D)), rtol=1e-6)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.needs_own], ids=str)
def test_a_server_has_no_row_of_its_own(rule: Rule):
    """The server of an exchange holds what a call without `own` is given."""
    received = ROWS.copy()
    received[K - 1] *= -3
    attack = SignFlip(scale=3.0)
    exchanged, _ = exchange(rule, ROWS, byzantine=[K - 1], attack=attack, num_byzantine=F, at_server=True)
    np.testing.assert_allclose(exchanged, at_receiver(rule, received, None, None).result, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_too_few_usable_rows_are_an_error_in_a_call_and_nan_elsewhere(rule: Rule):
    own, vectors = OWN if rule.needs_own else None, ROWS.copy()
    vectors[0], vectors[4] = np.nan, np.inf  # f = 1 may be missing, but two are
    with pytest.raises(ValueError, match="only 4 of 6 vectors are present and finite"):
        apply_rule(rule, vectors, num_byzantine=F, present=None, key=None, own=own)
    applied = at_receiver(rule, vectors, None, own)
    assert not bool(applied.defined)
    assert int(applied.num_usable) == 4
    assert np.isnan(applied.result).all()
    exchanged, _ = exchange(rule, vectors, byzantine=[], attack=NoAttack(), num_byzantine=F)
    assert np.isnan(exchanged).all()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_only_a_rule_that_needs_the_receivers_own_row_misses_it(rule: Rule):
    vectors = ROWS.copy()
    vectors[OWN, 1] = np.nan
    applied = at_receiver(rule, vectors, None, OWN)
    assert bool(applied.defined) != rule.needs_own
    assert np.isnan(applied.result).all() == rule.needs_own
    exchanged, _ = exchange(rule, vectors, byzantine=[], attack=NoAttack(), num_byzantine=F)
    assert np.isnan(exchanged[OWN]).all() == rule.needs_own
    assert np.isfinite(np.delete(exchanged, OWN, axis=0)).all()
    if rule.needs_own:
        with pytest.raises(ValueError, match="own row, 2, is absent or not finite"):
            apply_rule(rule, vectors, num_byzantine=F, present=None, key=None, own=OWN)
    else:
        called = apply_rule(rule, vectors, num_byzantine=F, present=None, key=None)
        np.testing.assert_allclose(called.result, applied.result, rtol=1e-6)


def test_a_row_that_did_not_arrive_is_like_one_that_is_not_finite():
    spoiled, present = ROWS.copy(), np.arange(K) != 4
    spoiled[4] = np.inf
    for rule in RULES:
        own = OWN if rule.needs_own else None
        absent, unsound = at_receiver(rule, ROWS, present, own), at_receiver(rule, spoiled, np.ones(K, bool), own)
        jax.tree.map(np.testing.assert_array_equal, absent, unsound)
        assert int(absent.num_usable) == K - 1


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.has_weights], ids=str)
def test_the_weights_are_those_of_the_result(rule: Rule):
    own = OWN if rule.needs_own else None
    applied = at_receiver(rule, ROWS, None, own, with_weights=True)
    called = apply_rule(rule, ROWS, num_byzantine=F, present=None, key=None, own=own, with_weights=True)
    np.testing.assert_array_equal(called.weights, applied.weights)
    np.testing.assert_allclose(np.asarray(applied.weights) @ ROWS, applied.result, rtol=1e-5)
    _, diagnostics = exchange(rule, ROWS, byzantine=[], attack=NoAttack(), num_byzantine=F, diagnose=True)
    assert diagnostics is not None
    assert diagnostics.weights is not None
    np.testing.assert_allclose(diagnostics.weights[OWN], applied.weights, atol=1e-6)


@dataclass(frozen=True)
class ReverseOfTheResult(MessageAttack):
    """An attack of a user's own, which calls the rule in use."""

    uses_rule: ClassVar[bool] = True

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        assert isinstance(knowledge.rule, Aggregator)
        return knowledge.same_for_all(-knowledge.rule(knowledge.vectors, num_byzantine=knowledge.num_byzantine))


@pytest.mark.parametrize("rule", [Median(), RFA(), Clipping(CenteredClipping(), threshold=0.5)], ids=str)
def test_an_attack_may_call_the_rule_in_use(rule: Aggregator):
    """In an exchange, the numbers of a rule are arrays."""
    results, _ = exchange(rule, ROWS, byzantine=[0], attack=ReverseOfTheResult(), num_byzantine=F)
    received = np.asarray(ROWS).copy()
    received[0] = -np.asarray(rule(ROWS, num_byzantine=F))
    np.testing.assert_allclose(results[1], rule(received, num_byzantine=F), rtol=1e-5, atol=1e-5)


def test_a_mean_is_no_shortcut_if_one_row_is_slightly_too_long() -> None:
    """The mean itself is shorter than the limit."""
    rows = np.full((6, 3), 0.98 * NORM_LIMIT / np.sqrt(3), np.float32)
    rows[2] *= 1.04
    np.testing.assert_allclose(Mean()(rows, num_byzantine=1), rows[0], rtol=1e-6)
