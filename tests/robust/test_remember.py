"""Receivers that remember what each agent sent."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import twins

from byzpg.robust.aggregators import ARC, MDA, NNM, RFA, Bucketing, Mean, Median, Remember, TrimmedMean
from byzpg.robust.attacks import ALIE, Attack, AvgZero, LargeNoise
from byzpg.robust.components import with_numbers, without_numbers
from byzpg.robust.exchange import Round, exchange_all
from byzpg.robust.rules import Applied

K, F, D = 9, 2, 6
RULE = Remember(NNM(TrimmedMean()), exchanges=5.0, weight=3.0)


@partial(jax.jit, static_argnums=0)
def recall(
    rule: Remember, rows: jax.Array, memories: jax.Array, present: jax.Array | None = None
) -> tuple[Applied, jax.Array]:
    return rule.recall(rows, memories, present=present, own=None, num_byzantine=F, key=None)


def messages(seed: int, num_rounds: int, dimension: int = D) -> np.ndarray:
    return np.random.default_rng(seed).normal(1, 1, (num_rounds, K, dimension)).astype(np.float32)


def twin(rows: np.ndarray, memories: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`RULE` in float64, one agent after the other: the result, and the memories afterwards."""
    after = np.array([memory + (row - memory) / 5 for row, memory in zip(rows, memories, strict=True)])
    both = np.array([[*row, *(3 * memory)] for row, memory in zip(rows, after, strict=True)])
    return twins.trimmed_mean(twins.nnm(both, F), F)[:D], after


def test_messages_and_memories_are_aggregated_side_by_side() -> None:
    memories, expected = jnp.zeros((K, D)), np.zeros((K, D))
    for rows in messages(0, 12):
        applied, memories = recall(RULE, jnp.asarray(rows), memories)
        result, expected = twin(rows.astype(np.float64), expected)
        np.testing.assert_allclose(applied.result, result, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(memories, expected, rtol=1e-5, atol=1e-5)


def test_what_did_not_arrive_is_not_remembered() -> None:
    rows, memories = jnp.asarray(messages(1, 1)[0]).at[3].set(jnp.nan), jnp.full((K, D), 2.0)
    present = jnp.arange(K) != 5
    applied, after = recall(RULE, rows, memories, present)
    np.testing.assert_array_equal(after[jnp.array([3, 5])], 2.0)
    assert np.all(np.asarray(after[0]) != 2.0)
    assert applied.defined
    assert np.all(np.isfinite(applied.result))
    absent = present & (jnp.arange(K) != 6)
    assert not recall(RULE, rows, memories, absent)[0].defined


def test_a_small_lie_is_found_in_the_long_run_and_not_before() -> None:
    """ALIE's messages are nearer to the honest ones than these are to each other; only what is remembered is not."""
    rule = Remember(MDA(), exchanges=200.0, weight=20.0)
    memories = jnp.zeros((K, 200))
    trusted = []
    for rows in messages(2, 400, 200):
        honest = rows[F:]
        rows[:F] = honest.mean(axis=0) - 0.5 * honest.std(axis=0)
        applied, memories = recall(rule, jnp.asarray(rows), memories)
        assert applied.weights is not None
        trusted.append(np.all(np.asarray(applied.weights[:F]) > 0))
    assert np.all(np.asarray(MDA().weights(rows, num_byzantine=F)[:F]) > 0)
    assert all(trusted[:3])
    assert not any(trusted[-100:])


@pytest.mark.parametrize("at_server", [True, False])
@pytest.mark.parametrize("attack", [ALIE(), AvgZero(), LargeNoise()])
def test_every_receiver_has_memories_of_its_own(attack: Attack, at_server: bool) -> None:
    """Two runs, in which two attackers send lies to others, and hold their own vectors. LargeNoise equivocates."""
    byzantine, num_receivers = np.array([2, 7]), 1 if at_server else K
    true, remembered = messages(3, 2), np.random.default_rng(4).normal(size=(2, num_receivers, K, D))
    code, numbers = without_numbers(RULE)
    keys = jax.random.split(jax.random.key(5), 2)

    def of_run(vectors: jax.Array, key: jax.Array, memories: jax.Array | None) -> Round:
        return Round.of(
            with_numbers(code, numbers) if memories is not None else Mean(),
            attack,
            num_byzantine=F,
            phase="gradients",
            at_server=at_server,
            vectors=vectors,
            byzantine=jnp.asarray(byzantine),
            keys=key,
            iteration=jnp.array(0),
            memories=memories,
        )

    rounds = [of_run(*each) for each in zip(jnp.asarray(true), keys, jnp.asarray(remembered, jnp.float32), strict=True)]
    together = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *rounds)
    ((results, report, memories),) = jax.jit(lambda each: exchange_all([each]))(together)
    assert memories is not None
    for run, round_ in enumerate(rounds):
        lies = round_.false_rows(to_each=True)
        assert lies is not None
        for place in range(num_receivers):
            rows = true[run].astype(np.float64)
            for number, attacker in enumerate(byzantine):
                if at_server or attacker != place:
                    rows[attacker] = lies[place, number] if lies.ndim == 3 else lies[number]
            expected, after = twin(rows, remembered[run, place])
            np.testing.assert_allclose(results[run, place], expected, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(memories[run, place], after, rtol=1e-4, atol=1e-4)
            honest_mean = np.delete(true[run], byzantine, axis=0).mean(axis=0)
            error = np.sum((expected - honest_mean) ** 2)
            np.testing.assert_allclose(report.error[run, place], error, rtol=1e-3, atol=1e-4)


def test_a_call_remembers_nothing() -> None:
    rows = messages(6, 1)[0]
    for rule in (RFA(), NNM(TrimmedMean())):
        expected = rule(rows, num_byzantine=F)
        np.testing.assert_allclose(Remember(rule)(rows, num_byzantine=F), expected, rtol=1e-5, atol=1e-5)
    weights = RFA().weights(rows, num_byzantine=F)
    np.testing.assert_allclose(Remember(RFA()).weights(rows, num_byzantine=F), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Remember(Median()), "treats every coordinate by itself"),
        (lambda: Remember(ARC(TrimmedMean())), r"such as NNM\(TrimmedMean\(\)\)"),
        (lambda: Remember(Bucketing(Mean())), "would change nothing"),
        (lambda: NNM(Remember(RFA())), "Put Remember outside"),
        (lambda: Remember(Remember(RFA())), "Put Remember outside"),
        (lambda: Remember(RFA(), exchanges=0.5), "at least 1, got 0.5"),
        (lambda: Remember(RFA(), weight=0.0), "weight"),
    ],
)
def test_what_cannot_be_remembered_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
