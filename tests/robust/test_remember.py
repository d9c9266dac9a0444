"""Receivers that remember what each agent sent."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import twins

from byzpg.robust import exchange as module
from byzpg.robust.aggregators import (
    ARC,
    MDA,
    NNM,
    RFA,
    Aggregator,
    Bucketing,
    CenteredClipping,
    Clipping,
    FedPGFilter,
    Mean,
    Median,
    Memories,
    PreAggregator,
    Remember,
    TrimmedMean,
)
from byzpg.robust.attacks import ALIE, Attack, AvgZero, LargeNoise
from byzpg.robust.components import with_numbers, without_numbers
from byzpg.robust.exchange import Round, exchange_all
from byzpg.robust.geometry import Cloud
from byzpg.robust.rules import Applied

K, F, D = 9, 2, 6
NUMBERS = ("rule_numbers", "attack_numbers")
RULE = Remember(NNM(TrimmedMean()), exchanges=5.0, weight=3.0)


@partial(jax.jit, static_argnums=(0, 4))
def recall(
    rule: Remember, rows: jax.Array, memories: Memories, present: jax.Array | None = None, num_byzantine: int = F
) -> tuple[Applied, Memories]:
    return rule.recall(rows, memories, present=present, own=None, num_byzantine=num_byzantine, key=None)


def messages(seed: int, num_rounds: int, dimension: int = D) -> np.ndarray:
    return np.random.default_rng(seed).normal(1, 1, (num_rounds, K, dimension)).astype(np.float32)


def twin(rows: np.ndarray, messages: np.ndarray, products: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`RULE` in float64, one agent after the other: the result, and the memories afterwards."""
    typical = np.median([np.linalg.norm(row) for row in rows])
    cut = [row * min(1, typical / np.linalg.norm(row)) for row in rows]
    messages, products = messages.copy(), products.copy()
    for one in range(K):
        messages[one] += (cut[one] - messages[one]) / 5
        for other in range(K):
            products[one, other] += (cut[one] @ cut[other] / typical - products[one, other]) / 5
    seen = []
    for one in range(K):
        correlations = sorted(np.delete(products[one], one))[F:-F]
        seen.append([*rows[one], *(3 * messages[one]), *(3 * np.array(correlations))])
    return twins.trimmed_mean(twins.nnm(np.array(seen), F), F)[:D], messages, products


def test_messages_and_memories_are_aggregated_side_by_side() -> None:
    memories, expected = RULE.initial_memory(K, D), (np.zeros((K, D)), np.zeros((K, K)))
    for rows in messages(0, 12):
        applied, memories = recall(RULE, jnp.asarray(rows), memories)
        result, *expected = twin(rows.astype(np.float64), *expected)
        np.testing.assert_allclose(applied.result, result, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(memories.messages, expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(memories.products, expected[1], rtol=1e-5, atol=1e-5)


def test_what_did_not_arrive_is_not_remembered() -> None:
    rows = jnp.asarray(messages(1, 1)[0]).at[3].set(jnp.nan)
    memories, present, silent = Memories(jnp.full((K, D), 2.0), jnp.full((K, K), 2.0)), jnp.arange(K) != 5, [3, 5]
    applied, after = recall(RULE, rows, memories, present)
    heard = np.delete(np.arange(K), silent)
    for memory in after.messages[:, 0], after.products[0], after.products[:, 0]:
        np.testing.assert_array_equal(memory[np.array(silent)], 2.0)
        assert np.all(np.asarray(memory)[heard] != 2.0)
    assert applied.defined
    assert np.all(np.isfinite(applied.result))
    absent = present & (jnp.arange(K) != 6)
    assert not recall(RULE, rows, memories, absent)[0].defined


def test_a_message_of_any_length_is_soon_forgotten() -> None:
    """Its sender's is, and products with it do not tell honest agents apart."""
    memories = found = RULE.initial_memory(K, D)
    for number, rows in enumerate(messages(7, 40)):
        long = np.copy(rows)
        if number < 5:
            long[0] *= -1e15
        _, memories = recall(RULE, jnp.asarray(rows), memories)
        _, found = recall(RULE, jnp.asarray(long), found)
    np.testing.assert_allclose(found.messages, memories.messages, atol=0.01)
    np.testing.assert_allclose(found.products, memories.products, atol=0.01)


def test_attackers_that_rotate_cannot_use_the_length_of_their_messages() -> None:
    rule = Remember(RFA(), exchanges=50.0)
    memories = rule.initial_memory(K, D)
    for number, rows in enumerate(messages(8, 60)):
        attackers = [number % K, (number + 1) % K]
        honest = np.delete(rows, attackers, axis=0).mean(axis=0)
        rows[attackers] *= -1e6
        applied, memories = recall(rule, jnp.asarray(rows), memories)
        assert np.linalg.norm(applied.result - honest) < 2 * D**0.5  # twice what an honest message is away from it


def weights_in(rule: Remember, rounds: Iterable[np.ndarray], num_byzantine: int = F) -> np.ndarray:
    """The weights [round, K] of the messages in each of several rounds."""
    memories, found = None, []
    for rows in rounds:
        memories = rule.initial_memory(*rows.shape) if memories is None else memories
        applied, memories = recall(rule, jnp.asarray(rows, jnp.float32), memories, None, num_byzantine)
        assert applied.weights is not None
        found.append(applied.weights)
    return np.asarray(found)


def test_an_honest_agent_cannot_be_framed_by_attackers_that_repeat_its_noise() -> None:
    """Three of ten; each is correlated with the victim alone, which is correlated with all three."""

    def framing(number: int) -> np.ndarray:
        rows = np.random.default_rng(number).normal(size=(10, 200))
        rows[:3] += 3**-0.5 * rows[3] - rows[:3].mean(axis=0) - 0.5  # the lie
        return rows

    weights = weights_in(Remember(MDA(), exchanges=200.0, weight=20.0), map(framing, range(400)), 3)
    np.testing.assert_array_equal(weights[-1, :3], 0)
    assert np.all(weights[-1, 3:] > 0)


def test_a_small_lie_is_found_in_the_long_run_and_not_before() -> None:
    """ALIE's messages are nearer to the honest ones than these are to each other; only what is remembered is not."""
    rounds = messages(2, 400, 200)
    for rows in rounds:
        rows[:F] = rows[F:].mean(axis=0) - 0.5 * rows[F:].std(axis=0)
    weights = weights_in(Remember(MDA(), exchanges=200.0, weight=20.0), rounds)
    assert np.all(np.asarray(MDA().weights(rounds[-1], num_byzantine=F)[:F]) > 0)
    assert np.all(weights[:3, :F] > 0)
    np.testing.assert_array_equal(weights[-100:, :F], 0)


def test_a_lie_that_depends_on_others_messages_is_found_even_if_nothing_repeats() -> None:
    """Honest messages are noise alone, and so are the lies, which are nearer to them: only products tell them apart."""

    def noise(number: int) -> np.ndarray:
        rows = np.random.default_rng(number).normal(size=(K, 200))
        rows[:F] = -rows[F:].mean(axis=0)
        return rows

    weights = weights_in(Remember(MDA(), exchanges=50.0, weight=20.0), map(noise, range(100)))
    assert np.all(weights[:3, :F] > 0)
    np.testing.assert_array_equal(weights[-50:, :F], 0)


@pytest.mark.parametrize("at_server", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize(
    ("attack", "at_once", "remember_the_same"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((ALIE(), K, False), (AvgZero(), 4, False))),
        (LargeNoise(), 2, False),
        (AvgZero(), 4, True),
    ],
)
def test_every_receiver_has_memories_of_its_own(
    attack: Attack, at_once: int, remember_the_same: bool, at_server: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs, in which two attackers send lies to others, and hold their own vectors. LargeNoise equivocates.

    Receivers of a run are served in groups, as the memory of a CPU has it. If the same agents always attack and do not
    equivocate, honest agents remember the same, and one of them stands for all.
    """
    byzantine, num_receivers = np.array([[2, 7], [0, 4]]), 1 if at_server else K
    sizes, in_groups = [], jax.lax.map
    monkeypatch.setattr(jax.lax, "map", lambda *given, **size: sizes.append(size) or in_groups(*given, **size))
    monkeypatch.setattr(module, "GROUP_BYTES_ON_CPU", at_once * 16 * K * D)
    true, draw = messages(3, 2), np.random.default_rng(4)
    remembered = [draw.normal(size=(2, num_receivers, *shape)).astype(np.float32) for shape in ((K, D), (K, K))]
    num_served = num_receivers
    if remember_the_same and not at_server:
        num_served = 1 + F
        for each, run in product(remembered, (0, 1)):
            each[run, np.delete(np.arange(K), byzantine[run])] = each[run, 1]
    code, numbers = without_numbers(RULE)
    keys = jax.random.split(jax.random.key(5), 2)

    def of_run(vectors: jax.Array, attackers: jax.Array, key: jax.Array, memories: Memories) -> Round:
        return Round.of(
            with_numbers(code, numbers),
            attack,
            num_byzantine=F,
            phase="gradients",
            at_server=at_server,
            same_attackers=remember_the_same or attack == LargeNoise(),  # which equivocates
            vectors=vectors,
            byzantine=attackers,
            keys=key,
            iteration=jnp.array(0),
            memories=memories,
        )

    runs = zip(jnp.asarray(true), jnp.asarray(byzantine), keys, map(Memories, *remembered), strict=True)
    rounds = [of_run(*each) for each in runs]
    together = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *rounds)
    ((results, report, memories),) = jax.jit(lambda each: exchange_all([each]))(together)
    assert memories is not None
    assert sizes == [{"batch_size": min(at_once, num_served)}]
    for run, round_ in enumerate(rounds):
        lies = round_.false_rows(to_each=True)
        assert lies is not None
        for place in range(num_receivers):
            rows = true[run].astype(np.float64)
            for number, attacker in enumerate(byzantine[run]):
                if at_server or attacker != place:
                    rows[attacker] = lies[place, number] if lies.ndim == 3 else lies[number]
            expected, *after = twin(rows, *(each[run, place].astype(np.float64) for each in remembered))
            np.testing.assert_allclose(results[run, place], expected, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(memories.messages[run, place], after[0], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(memories.products[run, place], after[1], rtol=1e-4, atol=1e-4)
            honest_mean = np.delete(true[run], byzantine[run], axis=0).mean(axis=0)
            error = np.sum((expected - honest_mean) ** 2)
            np.testing.assert_allclose(report.error[run, place], error, rtol=1e-3, atol=1e-4)


def test_what_is_random_at_each_receiver_is_computed_for_each() -> None:
    round_ = Round.of(
        Remember(Bucketing(RFA())),
        AvgZero(),
        num_byzantine=F,
        phase="gradients",
        at_server=False,
        same_attackers=True,
        vectors=jnp.asarray(messages(8, 1)),
        byzantine=jnp.array([[2, 7]]),
        keys=jax.random.split(jax.random.key(9), 1),
        iteration=jnp.zeros(1, int),
        memories=Memories(jnp.zeros((1, K, K, D)), jnp.zeros((1, K, K, K))),
    )
    round_ = replace(round_, **{name: tuple(jnp.asarray([n]) for n in getattr(round_, name)) for name in NUMBERS})
    ((results, *_),) = jax.jit(lambda each: exchange_all([each]))(round_)
    assert len(np.unique(np.asarray(results[0]), axis=0)) == K


def test_several_huge_messages_are_cut_to_the_median() -> None:
    rows = 0.01 * messages(10, 1)[0]
    rows[:F] *= 8e17 / np.linalg.norm(rows[:F], axis=1, keepdims=True)
    _, after = recall(RULE, jnp.asarray(rows), Memories(jnp.zeros((K, D)), jnp.zeros((K, K))))
    _, *expected = twin(rows.astype(np.float64), np.zeros((K, D)), np.zeros((K, K)))
    np.testing.assert_allclose(after.messages, expected[0], rtol=1e-4)
    np.testing.assert_allclose(after.products, expected[1], rtol=1e-4)


def test_a_call_remembers_nothing() -> None:
    rows = messages(6, 1)[0]
    for rule in (RFA(), NNM(TrimmedMean())):
        expected = rule(rows, num_byzantine=F)
        np.testing.assert_allclose(Remember(rule)(rows, num_byzantine=F), expected, rtol=1e-5, atol=1e-5)
    weights = RFA().weights(rows, num_byzantine=F)
    np.testing.assert_allclose(Remember(RFA()).weights(rows, num_byzantine=F), weights, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Outside(PreAggregator):
    """It leaves everything to the rule inside, memories too."""

    rule: Aggregator

    def points(self, cloud: Cloud, num_byzantine: int, key: jax.Array | None) -> Any:
        return jnp.eye(cloud.num_points, cloud.num_points + 1), cloud.usable, key

    def initial_memory(self, num_agents: int, dimension: int) -> Any:
        return self.rule.initial_memory(num_agents, dimension)


def test_a_rule_says_whether_it_remembers() -> None:
    for rule in RFA(), NNM(TrimmedMean()), Outside(RFA()), NNM(Outside(RFA())):
        assert not rule.remembers
    for rule in RULE, Outside(RULE), Outside(Outside(RULE)):
        assert rule.remembers
        with pytest.raises(ValueError, match="Put it outside"):
            NNM(rule)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Remember(Median()), "treats every coordinate by itself"),
        (lambda: Remember(ARC(TrimmedMean())), r"such as NNM\(TrimmedMean\(\)\)"),
        (lambda: Remember(CenteredClipping()), "is told no length"),
        (lambda: Remember(NNM(Clipping(RFA()))), "is told no length"),
        (lambda: Remember(FedPGFilter(radius=2.0)), r"FedPGFilter\(radius=2.0\)'s length .* is told no length"),
        (lambda: Remember(NNM(FedPGFilter(fallback_radius=1.0))), r"FedPGFilter\(fallback_radius=1.0\)'s length"),
        (lambda: Remember(Bucketing(Mean())), "would not use memories"),
        (lambda: NNM(Remember(RFA())), "Put it outside"),
        (lambda: Remember(Remember(RFA())), "Put it outside"),
        (lambda: Remember(RFA(), exchanges=0.5), "at least 1, got 0.5"),
        (lambda: Remember(RFA(), weight=0.0), "weight"),
        (lambda: Remember(RFA(), exchanges=np.inf), "exchanges"),
    ],
)
def test_what_cannot_be_remembered_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
