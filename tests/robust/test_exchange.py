"""One round of messages: what each receiver gets is the rule applied to exactly what that receiver holds."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import twins
from tiers import slow_except

from byzpg.robust import aggregators, agreement, attacks, least_diameter
from byzpg.robust import exchange as module
from byzpg.robust.attacks import Knowledge
from byzpg.robust.components import with_numbers, without_numbers
from byzpg.robust.exchange import attack_key, exchange, rule_key
from byzpg.robust.functions import aggregator
from byzpg.robust.least_diameter import SearchLimitError
from byzpg.robust.rules import apply_rule

K, D, F = 11, 7, 2
ATTACKERS = (1, 6)
HONEST = [k for k in range(K) if k not in ATTACKERS]
KEY = jax.random.key(11)


def true_vectors() -> np.ndarray:
    return (2 + np.random.default_rng(0).normal(size=(K, D))).astype(np.float32)


def ask(rule, attack, phase: Any = "gradients", attackers=ATTACKERS, vectors=None, f: Any = F, **options) -> Any:
    vectors = true_vectors() if vectors is None else vectors
    byzantine = np.asarray(attackers, np.int32)
    options = {"key": KEY, **options}
    return exchange(rule, vectors, byzantine=byzantine, attack=attack, num_byzantine=f, phase=phase, **options)


@partial(jax.jit, static_argnames=("attack", "phase", "rule"))
def messages(attack, phase, attackers, vectors, receivers, rule, key) -> jax.Array:
    knowledge = Knowledge(vectors, attackers, jnp.asarray(0), attack_key(key), rule, F)
    sent = attack.messages(phase, knowledge, receivers)
    return jnp.broadcast_to(sent, (len(receivers), *sent.shape[1:]))


def held(attack, phase, attackers, vectors, receivers, rule=None, key=KEY) -> np.ndarray:
    """What each of `receivers` holds [r, K, d]: true vectors, except for the messages of the other attackers."""
    rule = rule if attack.uses_rule else None
    sent = np.asarray(messages(attack, phase, np.asarray(attackers), vectors, np.asarray(receivers), rule, key))
    rows = np.tile(np.asarray(vectors), (len(receivers), 1, 1))
    for position, receiver in enumerate(receivers):
        for attacker, message in zip(attackers, sent[position], strict=True):
            if attacker != receiver:
                rows[position, attacker] = message
    return rows


@jax.jit
def key_of(receiver) -> jax.Array:
    """The key that `exchange` gives this receiver."""
    return rule_key(KEY, receiver)


@jax.jit
def bucket_order(receiver) -> jax.Array:
    return jax.random.permutation(key_of(receiver), K)


def monna(rows, receiver) -> np.ndarray:
    """Its pivot is the receiver's own row, where there is one, else Krum's choice."""
    pivot = receiver if receiver < K else int(np.argmin(twins.krum_scores(rows.astype(np.float64), K - F)))
    return twins.monna(rows, F, pivot=pivot)


def among_usable(change, inner):
    """A pre-aggregator: the inner twin on the changed usable rows."""

    def twin(rows, receiver) -> np.ndarray:
        usable, f, _ = twins.present_rows(rows, F)
        return inner(change(usable, f), f)

    return twin


def in_buckets(inner):
    return lambda rows, receiver: inner(twins.buckets(rows, np.asarray(bucket_order(receiver)), 2), F)


# The result at one receiver, in float64, straight from the definition.
TWINS = {
    aggregators.Mean(): lambda rows, receiver: twins.mean(rows, F),
    aggregators.Krum(): lambda rows, receiver: twins.krum(rows, F),
    aggregators.MoNNA(): monna,
    aggregators.Median(): lambda rows, receiver: twins.median(rows, F),
    aggregators.TrimmedMean(): lambda rows, receiver: twins.trimmed_mean(rows, F),
    aggregators.Bulyan(): lambda rows, receiver: twins.bulyan(rows, F),
    aggregators.SMEA(): lambda rows, receiver: twins.smea(rows, F),
    aggregators.FedPGFilter(): lambda rows, receiver: twins.fedpg_filter(rows, F),
    aggregators.NNM(aggregators.Median()): among_usable(twins.nnm, twins.median),
    aggregators.ARC(aggregators.TrimmedMean()): among_usable(twins.arc, twins.trimmed_mean),
    aggregators.Bucketing(aggregators.Mean(), size=2): in_buckets(twins.mean),
    aggregators.Bucketing(aggregators.Median(), size=2): in_buckets(twins.median),
    agreement.GDA(): lambda rows, receiver: twins.agree_gda(rows, receiver, F),
    agreement.MDA(): lambda rows, receiver: twins.agree_mda(rows, receiver, F),
    agreement.TrimmedMeanAgreement(): lambda rows, receiver: twins.agree_trimmed_mean(rows, receiver, F),
}


def by_hand(rule, rows, receiver) -> np.ndarray:
    """The rule on one receiver's rows. RFA stops short of its limit, so it is its own twin."""
    if rule in TWINS:
        return TWINS[rule](rows, receiver)
    return np.asarray(rule(rows, num_byzantine=F, key=key_of(receiver)))


def assert_law(results, rule, attack, phase="gradients", attackers=ATTACKERS, vectors=None, tolerance=1e-4):
    vectors = true_vectors() if vectors is None else vectors
    assert results.shape == vectors.shape
    for receiver, rows in enumerate(held(attack, phase, attackers, vectors, range(K), rule)):
        np.testing.assert_allclose(results[receiver], by_hand(rule, rows, receiver), rtol=tolerance, atol=tolerance)


@aggregator
def drawn(received, num_byzantine, key):
    """One of the rows, at random: what it is differs by receiver, since each has a key of its own."""
    return received[jax.random.randint(key, (), 0, len(received))]


@dataclass(frozen=True)
class HalfSilent(attacks.Equivocate):
    """Attackers send nothing to every other receiver, and −1 × the truth to the rest."""

    def false_messages(self, knowledge, receivers):
        return jnp.where(receivers[:, None, None] % 2, jnp.nan, -knowledge.truth())


@dataclass(frozen=True)
class HalfCentral(HalfSilent):
    """The rest get vectors so central that rules choose them, other ones at each receiver."""

    def false_messages(self, knowledge, receivers):
        central = knowledge.mean() + 0.1 * (1 + receivers[:, None, None]) * knowledge.truth()
        return jnp.where(receivers[:, None, None] % 2, jnp.nan, central)


@dataclass(frozen=True)
class SilentToSome(HalfSilent):
    """The same in a row for a few receivers, as it says."""

    def false_messages(self, knowledge, receivers):
        return super().false_messages(knowledge, receivers // 4)

    def audience(self, knowledge, receivers):
        return receivers // 4 % 2


MEAN, HONESTLY = aggregators.Mean(), attacks.NoAttack()
NOISE, SPLIT = attacks.LargeNoise(), attacks.Equivocate(scale=3.0)
BUCKETS = aggregators.Bucketing(MEAN, size=2)
DISTANT_BUCKETS = aggregators.Bucketing(aggregators.RFA(), size=2)
LAW = (
    (aggregators.Mean(), attacks.SignFlip(), "gradients"),
    (aggregators.RFA(), HalfSilent(), "gradients"),
    (aggregators.RFA(), attacks.AvgZero(), "gradients"),
    (aggregators.Krum(), attacks.NonFinite(), "parameters"),
    (aggregators.Krum(), HalfCentral(), "gradients"),
    (aggregators.Krum(), attacks.NoAttack(), "gradients"),
    (aggregators.MoNNA(), attacks.IPM(), "gradients"),
    (aggregators.Median(), NOISE, "parameters"),
    (aggregators.Median(), attacks.Silent(), "gradients"),
    (aggregators.TrimmedMean(), attacks.NonFinite(), "gradients"),
    (aggregators.TrimmedMean(), attacks.LargeNoise(target="parameters"), "gradients"),
    (aggregators.Bulyan(), SPLIT, "gradients"),
    (aggregators.SMEA(), HalfSilent(), "gradients"),
    (aggregators.FedPGFilter(), SPLIT, "gradients"),
    (aggregators.NNM(aggregators.RFA()), attacks.Silent(), "parameters"),
    (aggregators.NNM(aggregators.Median()), SPLIT, "parameters"),
    (aggregators.ARC(aggregators.TrimmedMean()), attacks.SignFlip(scale=9.0), "gradients"),
    (BUCKETS, SPLIT, "gradients"),
    (aggregators.Bucketing(aggregators.Median(), size=2), attacks.IPM(), "gradients"),
    (drawn(), attacks.IPM(), "gradients"),
    (agreement.GDA(), attacks.Dissensus(), "parameters"),
    (agreement.GDA(), attacks.AvgZero(), "parameters"),
    (agreement.TrimmedMeanAgreement(), HalfSilent(), "parameters"),
)
# Of every way to compute a round one: the same for all, in parts, from products, by coordinate, with keys, alone.
FEW_OF_THE_LAW = (
    (aggregators.Mean(), attacks.SignFlip(), "gradients"),
    (aggregators.RFA(), HalfSilent(), "gradients"),
    (aggregators.Krum(), attacks.NonFinite(), "parameters"),
    (aggregators.Krum(), HalfCentral(), "gradients"),
    (aggregators.MoNNA(), attacks.IPM(), "gradients"),
    (aggregators.Median(), attacks.Silent(), "gradients"),
    (aggregators.TrimmedMean(), attacks.LargeNoise(target="parameters"), "gradients"),
    (aggregators.NNM(aggregators.Median()), SPLIT, "parameters"),
    (drawn(), attacks.IPM(), "gradients"),
    (agreement.GDA(), attacks.Dissensus(), "parameters"),
    (agreement.TrimmedMeanAgreement(), HalfSilent(), "parameters"),
)


# Each has a program of its own. That every rule is its naive twin is tested where rules are tested.
@pytest.mark.parametrize(
    ("rule", "attack", "phase"),
    [each if each in FEW_OF_THE_LAW else pytest.param(*each, marks=pytest.mark.slow) for each in LAW],
    ids=str,
)
def test_every_receiver_gets_the_rule_of_what_it_holds(rule, attack, phase):
    assert_law(ask(rule, attack, phase)[0], rule, attack, phase)


@pytest.mark.parametrize("attack", [NOISE, attacks.AvgZero(), attacks.Dissensus(target="both")], ids=str)
def test_without_byzantine_agents_every_vector_counts(attack):
    expected = true_vectors().mean(axis=0)
    np.testing.assert_allclose(ask(MEAN, attack, attackers=())[0], np.tile(expected, (K, 1)), rtol=1e-5)


@pytest.mark.parametrize(("rule", "attack"), [(aggregators.MoNNA(), SPLIT), (BUCKETS, attacks.SignFlip())], ids=str)
def test_at_the_server_every_attacker_sends_a_false_message(rule, attack):
    result, diagnostics = ask(rule, attack, at_server=True, diagnose=True)
    (rows,) = held(attack, "gradients", ATTACKERS, true_vectors(), [K])
    expected = by_hand(rule, rows, K)
    assert result.shape == (D,)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    error = np.sum((expected - true_vectors()[HONEST].mean(axis=0)) ** 2)
    np.testing.assert_allclose(diagnostics.error, [error], rtol=1e-3, atol=1e-6)


def test_byzantine_receivers_keep_their_own_truth():
    np.testing.assert_allclose(ask(agreement.NoAgreement(), NOISE, "parameters")[0], true_vectors(), rtol=1e-6)


@pytest.mark.parametrize("rule", [agreement.NoAgreement(), agreement.GDA()], ids=str)
def test_an_agent_whose_own_vector_is_not_finite_gets_no_other_vector_for_it(rule):
    vectors = true_vectors()
    vectors[5, 2] = np.nan
    results = np.asarray(ask(rule, attacks.NoAttack(), attackers=(1,), vectors=vectors)[0])
    assert np.isnan(results[5]).all()
    assert np.isfinite(np.delete(results, 5, axis=0)).all()


@pytest.mark.parametrize("rule", [aggregators.Krum(), agreement.MDA()], ids=str)
def test_a_diverged_honest_agent_does_not_drown_the_others(rule):
    vectors = 10 + np.float32(1e-3) * true_vectors()
    vectors[0] = 1e6
    results, _ = ask(rule, attacks.NoAttack(), attackers=(1,), vectors=vectors)
    assert_law(results, rule, attacks.NoAttack(), attackers=(1,), vectors=vectors, tolerance=1e-6)


@dataclass(frozen=True)
class OnlyGradients(attacks.Attack):
    """An attack of a user's own that overrides one hook and equivocates in it."""

    def gradients(self, knowledge, receivers):
        return receivers[:, None, None] * jnp.ones_like(knowledge.truth())


def test_an_attack_may_override_one_hook():
    rule, attack = aggregators.Mean(), OnlyGradients()
    assert_law(ask(rule, attack)[0], rule, attack)
    assert_law(ask(rule, attack, "parameters")[0], rule, attack, "parameters")


def test_all_but_one_may_be_byzantine():
    vectors = np.asarray([[1.0], [3.0]], np.float32)
    results, _ = exchange(MEAN, vectors, byzantine=[0], attack=attacks.Zero(), num_byzantine=1)
    np.testing.assert_allclose(results, [[2.0], [1.5]])


def test_own_rows_reach_a_rule_inside_another():
    rule, attack = aggregators.Clipping(aggregators.MoNNA(), threshold=1e6), attacks.Equivocate()
    np.testing.assert_allclose(ask(rule, attack)[0], ask(aggregators.MoNNA(), attack)[0], rtol=1e-5)


@pytest.mark.slow
def test_a_search_cut_short_is_a_clear_error():
    rows = np.random.default_rng(0).normal(size=(17, 3)).astype(np.float32)  # too many subsets to list
    with pytest.raises(SearchLimitError, match="node_limit = 2"):
        exchange(agreement.MDA(node_limit=2), rows, byzantine=[0], attack=HONESTLY, num_byzantine=4)


def test_too_few_usable_vectors_give_nan():
    # Two are silent and f = 1: honest receivers lack one vector, but an attacker knows its own and has enough.
    results = np.asarray(ask(aggregators.Mean(), attacks.Silent(), attackers=(1, 4), f=1)[0])
    assert np.isnan(np.delete(results, (1, 4), axis=0)).all()
    assert np.isfinite(results[[1, 4]]).all()


# Diagnostics


def test_diagnostics():
    rule, vectors = agreement.MDA(), true_vectors().astype(np.float64)
    honest = vectors[HONEST]
    results, diagnostics = ask(rule, NOISE, "parameters", diagnose=True)
    assert_law(results, rule, NOISE, "parameters")
    results = np.asarray(results)
    error = np.sum((results - honest.mean(axis=0)) ** 2, axis=1)
    np.testing.assert_allclose(diagnostics.error, error, rtol=1e-3, atol=1e-6)
    pairs = twins.squared_distances(honest)
    np.testing.assert_allclose(diagnostics.honest_variance, pairs.sum() / (9 * 8), rtol=1e-5)
    np.testing.assert_allclose(diagnostics.diameter_before, np.sqrt(pairs.max()), rtol=1e-5)
    np.testing.assert_allclose(diagnostics.diameter_after, twins.diameter(results[HONEST]), atol=1e-5)
    weights = np.asarray(diagnostics.weights)
    rows = held(NOISE, "parameters", ATTACKERS, true_vectors(), range(K))
    chosen = [np.isin(np.arange(K), twins.mda_subset(each, F)) for each in rows]
    np.testing.assert_allclose(weights, np.asarray(chosen) / (K - F), atol=1e-6)
    for receiver in range(K):
        assert (weights[receiver, [attacker for attacker in ATTACKERS if attacker != receiver]] == 0).all()
    assert ask(MEAN, attacks.SignFlip())[1] is None


def test_diagnostics_where_one_result_stands_for_many():
    results, diagnostics = ask(aggregators.TrimmedMean(), attacks.SignFlip(), diagnose=True)
    assert np.all(np.isnan(diagnostics.weights))
    assert diagnostics.diameter_after == 0  # all honest receivers hold the same
    honest_mean = true_vectors()[HONEST].mean(axis=0)
    np.testing.assert_allclose(diagnostics.error, np.sum((np.asarray(results) - honest_mean) ** 2, axis=1), rtol=1e-3)
    weights = ask(aggregators.Mean(), attacks.Silent(), diagnose=True)[1].weights
    expected = np.asarray([[j in HONEST or j == receiver for j in range(K)] for receiver in range(K)])
    np.testing.assert_allclose(weights, expected / expected.sum(axis=1, keepdims=True), rtol=1e-6)


# Bad input


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: ask(MEAN, HONESTLY, vectors=np.zeros(D, np.float32)), "two axes"),
        (lambda: ask(MEAN, HONESTLY, "rewards"), "phase must be"),
        (lambda: ask(MEAN, NOISE, key=None), "pass key"),
        (lambda: ask(aggregators.Bucketing(MEAN), HONESTLY, key=None), "pass key"),
        (lambda: ask(aggregators.Krum(), HONESTLY, f=3), "f < K/4"),
        (lambda: ask(agreement.GDA(), HONESTLY, f=3), "f < K/5"),
        (lambda: ask(MEAN, HONESTLY, f=-1), "negative"),
        (lambda: ask(MEAN, HONESTLY, attackers=range(K)), "fewer than K = 11"),
        (lambda: ask(MEAN, HONESTLY, attackers=(1, 1)), "different agents of 0 to 10"),
        (lambda: ask(MEAN, HONESTLY, attackers=(11,)), "different agents of 0 to 10"),
        (lambda: ask(agreement.GDA(), HONESTLY, at_server=True), "a server has none"),
    ],
)
def test_bad_input(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_bad_types():
    for bad in ({"f": 3.0}, {"vectors": [[1.0]]}, {"vectors": np.zeros((K, D), int)}):
        with pytest.raises(TypeError, match="must be"):
            ask(MEAN, HONESTLY, **bad)


# Cost: how often things are compiled, and how large they get


@dataclass(frozen=True)
class TracedMean(aggregators.Mean):
    traces: ClassVar[list] = []

    def coefficients(self, cloud, num_byzantine, key):
        self.traces.append(cloud.num_points)
        return super().coefficients(cloud, num_byzantine, key)


def test_one_compile_for_all_byzantine_sets_of_one_size():
    TracedMean().check(K, F)  # a rule from outside byzpg is traced on a sample first
    TracedMean.traces.clear()
    for iteration, attackers in enumerate([(0, 1), (1, 6), (3, 10)]):
        results, _ = ask(TracedMean(), SPLIT, attackers=attackers, iteration=iteration)
        assert_law(results, MEAN, SPLIT, attackers=attackers)
    assert len(TracedMean.traces) == 1


@dataclass(frozen=True)
class WatchedSplit(attacks.Equivocate):
    """Equivocate, noting how many receivers it was asked for at once."""

    asked: ClassVar[list] = []

    def false_messages(self, knowledge, receivers):
        self.asked.append(len(receivers))
        return super().false_messages(knowledge, receivers)


@pytest.fixture
def group_bytes(monkeypatch):
    """A function that sets GROUP_BYTES, which is read when `exchange` is traced."""
    program: Any = module._exchange

    def set_to(size):
        monkeypatch.setattr(module, "GROUP_BYTES", size)
        program.clear_cache()

    yield set_to
    program.clear_cache()


@pytest.fixture
def groups(monkeypatch):
    """A list to which every loop over groups adds whether it computes products that receivers share."""
    loop, found = module._in_groups, []

    def watched(function, receivers, at_once, number):
        found.append(function.__name__ == "of_audience")
        return loop(function, receivers, at_once, number)

    monkeypatch.setattr(module, "_in_groups", watched)
    return found


WATCHED = WatchedSplit(scale=3.0)


@pytest.mark.parametrize(
    ("rule", "attack", "size"),
    [
        (agreement.GDA(), WATCHED, 17_000),  # three groups of four, so one receiver is asked twice
        (agreement.GDA(), WATCHED, 1),  # one by one
        (aggregators.TrimmedMean(), attacks.SignFlip(), 7500),  # one for the honest, and each attacker
        (aggregators.TrimmedMean(), attacks.Equivocate(scale=3.0), 7500),  # one for each half, and each attacker
        (aggregators.RFA(), attacks.MDAFooling(), 250),
        # One by one, a branch is taken where no row is missing.
        (aggregators.Bulyan(), HalfCentral(), 2),
        pytest.param(BUCKETS, attacks.SignFlip(), 250, marks=pytest.mark.slow),
        # Receivers of the same messages share products, and draw buckets of their own: one by one, and four at once.
        pytest.param(DISTANT_BUCKETS, attacks.Equivocate(scale=3.0), 7500, marks=pytest.mark.slow),
        pytest.param(DISTANT_BUCKETS, attacks.Equivocate(scale=3.0), 17_001, marks=pytest.mark.slow),
        pytest.param(DISTANT_BUCKETS, SilentToSome(), 17_001, marks=pytest.mark.slow),
        # It does not say who gets the same.
        pytest.param(DISTANT_BUCKETS, HalfSilent(), 17_001, marks=pytest.mark.slow),
        pytest.param(agreement.GDA(), attacks.Equivocate(scale=3.0), 17_001, marks=pytest.mark.slow),
        pytest.param(agreement.MDA(), SilentToSome(), 17_001, marks=pytest.mark.slow),
        pytest.param(
            aggregators.NNM(aggregators.TrimmedMean()), attacks.Equivocate(scale=3.0), 7500, marks=pytest.mark.slow
        ),
        (aggregators.TrimmedMean(), attacks.LargeNoise(), 7500),  # random messages, which are not compared
    ],
    ids=str,
)
def test_groups_of_receivers_change_nothing(rule, attack, size, group_bytes, groups):
    WATCHED.asked.clear()
    group_bytes(size)
    results, _ = ask(rule, attack)
    assert groups, "all receivers were one group"
    assert any(groups) == (type(attack) in (attacks.Equivocate, attacks.MDAFooling, SilentToSome))
    # First it is asked for the shape of its answer to all receivers, then for messages.
    assert WATCHED.asked == {17_000: [K, 4], 1: [K, 1]}.get(size, [])
    assert_law(results, rule, attack)


def test_products_that_would_not_fit_are_not_shared(group_bytes, groups, monkeypatch):
    monkeypatch.setattr(module, "GROUP_BYTES_ON_CPU", 1)
    group_bytes(17_001)
    results, _ = ask(aggregators.Krum(), attacks.Equivocate(scale=3.0))
    assert groups == [False]
    assert_law(results, aggregators.Krum(), attacks.Equivocate(scale=3.0))


@dataclass(frozen=True)
class Kept(aggregators.Mean):
    """Krum's row: a mean by name alone, which needs distances."""

    def coefficients(self, cloud, num_byzantine, key):
        return aggregators.Krum().coefficients(cloud, num_byzantine, key)


@pytest.mark.slow
def test_a_subclass_of_the_mean_may_need_distances():
    vectors = 1e-3 * true_vectors()
    vectors[0] = 1e5  # an honest agent, far from all others
    for attack in (attacks.SignFlip(), attacks.Equivocate()):
        results, expected = (ask(rule, attack, vectors=vectors)[0] for rule in (Kept(), aggregators.Krum()))
        np.testing.assert_allclose(results, expected, rtol=1e-6)  # Krum copies the row, and does not add up


@pytest.mark.parametrize("attack", [attacks.Equivocate(scale=3.0), HalfSilent()], ids=str)
def test_who_gets_the_same_messages(attack, group_bytes):
    """Attackers also hold their own vectors, and a subclass that changes the messages is not taken for its parent."""
    group_bytes(7500)
    attackers = (K - 2, K - 1)  # after the last honest agent, which is told the same
    results, _ = ask(aggregators.TrimmedMean(), attack, attackers=attackers)
    assert_law(results, aggregators.TrimmedMean(), attack, attackers=attackers)


@dataclass(frozen=True)
class Scripted(attacks.MessageAttack):
    """Receivers in runs of up to three get the same messages. Each is true, repeated, close, far or not finite."""

    target: attacks.Target = "both"

    def false_messages(self, knowledge, receivers):
        truth = knowledge.truth()[0]
        honest = knowledge.vectors[knowledge.honest]

        def to(receiver):
            key = jax.random.fold_in(knowledge.key, receiver // 3)
            kind, chosen, step = (
                jax.random.randint(jax.random.fold_in(key, purpose), (len(truth), 1), 0, limit)
                for purpose, limit in enumerate((6, len(honest), 4))
            )
            message = jnp.select(
                [kind == number for number in range(5)],
                [truth, honest[chosen[:, 0]], honest[chosen[:, 0]] + step, truth + 30 * step, 1e6 * (1 + truth)],
                jnp.nan,
            )
            return jnp.where((kind == 4) & (step == 0), jnp.inf, message)

        return jax.vmap(to)(receivers)


@dataclass(frozen=True)
class Announced(Scripted):
    """Scripted, saying who gets the same."""

    def audience(self, knowledge, receivers):
        return receivers // 3


def naive(rule, rows, receiver) -> np.ndarray:
    """`by_hand`, where the result is defined."""
    usable = np.isfinite(rows).all(axis=1)
    if usable.sum() < K - F or (rule.needs_own and not usable[receiver]):
        return np.full(rows.shape[1], np.nan)
    return by_hand(rule, rows, receiver)


# A rule of either kind, for groups of one receiver and of several.
SHARED = (
    (agreement.MDA(), 15_500),
    (agreement.GDA(), 1),
    (aggregators.TrimmedMean(), 15_500),
    (aggregators.Median(), 1),
)


@pytest.mark.parametrize("attack", slow_except([Announced()], [Scripted(), Announced()]), ids=str)
@pytest.mark.parametrize(("rule", "size"), [pytest.param(*SHARED[0], marks=pytest.mark.slow), *SHARED[1:]], ids=str)
def test_many_receivers_share_their_work(rule, size, attack, group_bytes, monkeypatch):
    """What large federations use, at a size that can be done by hand: integers, so that ties are real."""
    monkeypatch.setattr(least_diameter, "TABLE_LIMIT", 0)
    monkeypatch.setattr(aggregators, "NETWORK_LIMIT", 0)
    group_bytes(size)
    rng = np.random.default_rng(0)
    for trial in range(24):
        vectors = rng.integers(-2, 3, (K, 3)).astype(np.float32)
        vectors[rng.permutation(K)[: trial % 4]] = vectors[0]  # identical rows
        if trial % 6 == 5:
            vectors[HONEST[trial % 9], 1] = np.nan
        key = jax.random.key(trial)
        results, _ = ask(rule, attack, "parameters", vectors=vectors, key=key)
        for receiver, rows in enumerate(held(attack, "parameters", ATTACKERS, vectors, range(K), key=key)):
            expected = naive(rule, rows, receiver)
            np.testing.assert_allclose(results[receiver], expected, rtol=1e-5, atol=1e-5, err_msg=f"{trial} {receiver}")


def of_runs_alike(
    vectors: jax.Array, attackers: tuple[int, ...], keys: jax.Array, num_byzantine: int
) -> dict[str, Any]:
    """A round of runs that differ in their vectors and keys only."""
    return {
        "num_byzantine": num_byzantine,
        "phase": "gradients",
        "vectors": vectors,
        "byzantine": jnp.tile(jnp.asarray(attackers, int), (len(vectors), 1)),
        "keys": keys,
        "iteration": jnp.zeros(len(vectors), int),
    }


def test_a_server_has_what_an_honest_agent_has():
    """Where agents apply the same rule in the same program, the server's result is read off one of them."""
    attack, attackers = attacks.SignFlip(), (0, K - 1)  # agents that hold something else: their own true vectors
    vectors = np.stack([true_vectors(), 1 - true_vectors()])

    @jax.jit
    def together(vectors, keys):
        shared = of_runs_alike(vectors, attackers, keys, F)
        of_runs = with_numbers(without_numbers(attack)[0], [jnp.ones(2)])
        rounds = [
            module.Round.of(aggregators.MultiKrum(), of_runs, at_server=at_server, **shared)
            for at_server in (True, False, True)
        ]
        return module.exchange_all(rounds)

    found = together(vectors, jnp.stack([KEY, KEY]))
    for run, rows in enumerate(vectors):
        for (results, report, _), at_server in zip(found, (True, False, True), strict=True):
            options: Any = {"attackers": attackers, "vectors": rows, "at_server": at_server, "diagnose": True}
            expected, diagnostics = ask(aggregators.MultiKrum(), attack, **options)
            np.testing.assert_allclose(results[run], np.reshape(expected, (-1, D)), rtol=1e-5, atol=1e-5)
            for name in ("error", "honest_variance", "diameter_before", "diameter_after", "weights"):
                of_run = getattr(report, name)[run]
                np.testing.assert_allclose(of_run, getattr(diagnostics, name), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("num_byzantine", [F, 0])
def test_rounds_that_share_code_on_gpus(num_byzantine, monkeypatch):
    """A rule is applied once to the rounds of all attacks, equivocal or not; without Byzantine agents it is a mean."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    rule, attackers = aggregators.NNM(aggregators.TrimmedMean()), (1, K - 1)[: 2 * (num_byzantine > 0)]
    chosen = (attacks.LargeNoise(), attacks.SignFlip())
    places = ((chosen[0], False), (chosen[1], False), (chosen[1], True))
    vectors = true_vectors()[None]

    @jax.jit
    def together(vectors, keys):
        shared = of_runs_alike(vectors, attackers, keys, num_byzantine)
        rounds = []
        for attack, at_server in places:
            of_runs = with_numbers(
                without_numbers(attack)[0], [jnp.asarray([number]) for number in without_numbers(attack)[1]]
            )
            rounds.append(module.Round.of(rule, of_runs, at_server=at_server, **shared))
        return module.exchange_all(rounds)

    found = together(vectors, KEY[None])
    for (results, report, _), (attack, at_server) in zip(found, places, strict=True):
        expected, diagnostics = module.exchange(
            rule,
            vectors[0],
            byzantine=attackers,
            attack=attack,
            num_byzantine=num_byzantine,
            key=KEY,
            at_server=at_server,
            diagnose=True,
        )
        np.testing.assert_allclose(results[0], np.reshape(expected, (-1, D)), rtol=1e-4, atol=1e-4)
        for name in ("error", "honest_variance", "diameter_before", "diameter_after", "weights"):
            np.testing.assert_allclose(
                getattr(report, name)[0], getattr(diagnostics, name), rtol=1e-3, atol=1e-4, err_msg=name
            )


@dataclass(frozen=True)
class JustInside(attacks.MessageAttack):
    """Messages that are as far from the centre of the honest vectors as a member of the subset can be: 2.9 of 3 R."""

    def false_messages(self, knowledge, receivers):
        return jnp.broadcast_to(2.9 + 1e-3 * receivers[:, None, None], (len(receivers), *knowledge.truth().shape[1:]))


def test_a_row_that_is_far_but_not_too_far_counts(group_bytes):
    """With the centre 0 and R = 1, seven honest rows at 1 and both false ones are closer together than all honest."""
    vectors = np.ones((K, 1), np.float32)
    vectors[[0, 2, *ATTACKERS], 0] = 0, -1, -1, -1
    group_bytes(1)
    results, _ = ask(aggregators.MDA(), JustInside(), vectors=vectors)
    assert np.all(np.asarray(results)[HONEST] > 1)
    assert_law(results, aggregators.MDA(), JustInside(), vectors=vectors)


@dataclass(frozen=True)
class MedianOfLeastDiameter(aggregators.Aggregator):
    """A rule of a user's own that ignores far rows, and is no weighted mean."""

    ignores_far_rows: ClassVar[bool] = True

    def combine(self, cloud, num_byzantine, key):
        keep = cloud.num_points - num_byzantine
        members = least_diameter.least_diameter_subset(cloud.distances(), cloud.usable, keep, node_limit=1000)
        rows, among = cloud.rows(members)
        return jnp.nanmedian(jnp.where(jnp.stack(among)[:, None], jnp.concatenate(rows), jnp.nan), axis=0)


def test_a_rule_that_asks_for_rows_may_ignore_far_ones(group_bytes):
    rule = MedianOfLeastDiameter()
    expected, _ = ask(rule, attacks.LargeNoise())
    group_bytes(1)
    np.testing.assert_allclose(ask(rule, attacks.LargeNoise())[0], expected, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2**30])
@pytest.mark.parametrize("attack", [attacks.SignFlip(target="both"), SPLIT], ids=str)
def test_no_result_without_an_own_vector_and_none_lost_for_it(attack, size, group_bytes):
    """One receiver stands for others, but not one that has no result itself."""
    group_bytes(size)
    vectors = true_vectors()
    vectors[0, 2] = np.nan
    results = np.asarray(ask(agreement.MDA(), attack, "parameters", attackers=(1,), vectors=vectors)[0])
    assert np.isnan(results[0]).all()
    assert np.isfinite(results[1:]).all()


def largest_intermediate(rule, attack, dimension=64) -> int:
    """Elements of the largest array in the program of one exchange."""

    def arrays(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda item: hasattr(item, "eqns")):
                inner = getattr(leaf, "jaxpr", leaf)
                if hasattr(inner, "eqns"):
                    yield from arrays(inner)

    program = jax.make_jaxpr(lambda vectors: ask(rule, attack, vectors=vectors)[0])
    return max(arrays(program(jnp.zeros((K, dimension))).jaxpr))


def test_false_messages_do_not_cost_k_copies(group_bytes):
    copies = K * len(ATTACKERS) * 64
    for rule in (aggregators.RFA(), aggregators.TrimmedMean(), aggregators.Krum()):
        assert largest_intermediate(rule, attacks.SignFlip()) < min(copies, K**3)  # K Gram matrices are K³
    assert largest_intermediate(aggregators.RFA(), SPLIT) >= copies  # it would be noticed
    group_bytes(1)
    for rule in (aggregators.RFA(), aggregators.TrimmedMean()):  # long rows: there may be K Gram matrices here
        assert largest_intermediate(rule, SPLIT, dimension=256) < 4 * copies


@pytest.mark.parametrize("make", [agreement.NoAgreement, agreement.GDA, agreement.MDA, aggregators.MoNNA])
@pytest.mark.parametrize("attacker", [0, 5])
def test_a_far_agent_costs_the_others_no_digits(make: Any, attacker: int) -> None:
    """Results are sums around one row for all receivers. It must not be one that is far from most of them."""
    vectors = 1e-3 * np.random.default_rng(0).normal(size=(6, 3))
    vectors[0] = 1e4
    rows = jnp.asarray(vectors, jnp.float32)
    results, _ = exchange(make(), rows, byzantine=[attacker], attack=attacks.NoAttack(), num_byzantine=1)
    for agent in range(1, 6):
        alone = apply_rule(make(), rows, num_byzantine=1, present=None, key=None, own=agent).result
        np.testing.assert_allclose(results[agent], alone, atol=1e-8)


def test_the_diameter_of_defined_results_is_known_though_a_vector_is_not_finite() -> None:
    vectors = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32).at[1, 0].set(jnp.nan)
    options: dict[str, Any] = {"byzantine": [5], "attack": attacks.NoAttack(), "num_byzantine": 2, "diagnose": True}
    results, diagnostics = exchange(aggregators.RFA(), vectors, **options)
    assert np.all(np.isfinite(results))
    assert diagnostics is not None
    assert diagnostics.diameter_after == 0
