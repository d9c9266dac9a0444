"""Adaptive attacks: known attacks are members of the family, and its numbers say what is sent, when, and to whom."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from byzpg import Config, train
from byzpg.learning.advantages import PPO
from byzpg.robust.adaptive import Adaptive, BonusForAction, PoisonedReward
from byzpg.robust.attacks import ALIE, IPM, Attack, AvgZero, Knowledge, MessageAttack, Zero
from byzpg.robust.components import without_numbers
from byzpg.testing import check_attack

K, D, ATTACKERS = 7, 5, (2, 5)


def known(iteration: int = 0, *, block: int = 0, key: int = 0) -> Knowledge:
    vectors = np.random.default_rng(3).normal(0.5, 1, (K, D)).astype(np.float32)
    arrays = jnp.asarray(vectors), jnp.asarray(ATTACKERS), jnp.asarray(iteration), jax.random.key(key)
    return Knowledge(*arrays, num_byzantine=2, block=block)


def sent(attack: Attack, knowledge: Knowledge, receivers: Array | None = None) -> np.ndarray:
    """The gradient messages [receiver or 1, attacker, d]."""
    return np.asarray(attack.gradients(knowledge, jnp.arange(K) if receivers is None else receivers))


@pytest.mark.parametrize(
    ("member", "attack"),
    [
        (Adaptive(pull=1.7), IPM(epsilon=0.7)),
        (Adaptive(pull=1 + 5 / 2), AvgZero()),
        (Adaptive(hide=1.3), ALIE(z=1.3)),
        (Adaptive(pull=1.0), Zero()),
    ],
    ids=str,
)
def test_known_attacks_are_members(member: Adaptive, attack: MessageAttack) -> None:
    np.testing.assert_allclose(sent(member, known()), sent(attack, known()), rtol=1e-5, atol=1e-6)


def test_every_number_moves_the_message_by_what_it_says() -> None:
    knowledge = known()
    honest = np.delete(np.asarray(knowledge.vectors, float), ATTACKERS, axis=0)
    mean, spread, truth = honest.mean(0), np.linalg.norm(honest.std(0)), np.asarray(knowledge.vectors)[list(ATTACKERS)]
    drift = sent(Adaptive(drift=2.0), knowledge)[0] - mean
    np.testing.assert_allclose(np.linalg.norm(drift, axis=1), 2 * spread, rtol=1e-5)
    np.testing.assert_array_equal(drift, sent(Adaptive(drift=2.0), known(9, key=4))[0] - mean, "it never turns")
    against = mean - sent(Adaptive(against=2.0), knowledge)[0, 0]
    np.testing.assert_allclose(against, 2 * spread * mean / np.linalg.norm(mean), rtol=1e-5)
    np.testing.assert_allclose(sent(Adaptive(own=0.5), knowledge)[0], (mean + truth) / 2, rtol=1e-5)
    noise = sent(Adaptive(noise=3.0), knowledge)[0]
    assert not np.allclose(noise[0], noise[1]), "attackers draw alone"
    assert not np.allclose(noise, sent(Adaptive(noise=3.0), known(key=1))[0])
    np.testing.assert_allclose(sent(Adaptive(pull=2.0, actor=0.5), knowledge)[0, 0], 0 * mean, atol=1e-6)
    np.testing.assert_allclose(sent(Adaptive(pull=2.0, actor=0.5), known(block=1))[0, 0], -mean, rtol=1e-5)
    np.testing.assert_allclose(sent(Adaptive(pull=2.0, critic=0.5), known(block=1))[0, 0], 0 * mean, atol=1e-6)


def test_attackers_sleep_strike_and_rest() -> None:
    truth = sent(Adaptive(), known()) * 0 + np.asarray(known().vectors)[None, list(ATTACKERS)]
    attack = Adaptive(pull=2.0, start=3.0, period=4.0, duty=0.5)
    strikes = [not np.allclose(sent(attack, known(t)), truth) for t in range(12)]
    assert strikes == [False] * 3 + [True, True, False, False] * 2 + [True]
    coming_and_going = Adaptive(pull=2.0, start=3.0, period=4.0, duty=0.5, silent=1.0)
    silent = [bool(np.all(np.isnan(sent(coming_and_going, known(t))))) for t in range(12)]
    assert silent == [False] * 3 + [False, False, True, True] * 2 + [False]


def test_some_receivers_get_the_message_and_others_its_mirror_image() -> None:
    attack = Adaptive(pull=2.0, reach=3 / K, mirror=-0.5, equivocates=True)
    mean = np.asarray(known().mean())
    deviations = sent(attack, known())[:, 0] - mean
    np.testing.assert_allclose(deviations, np.where(np.arange(K) < 3, -2.0, 1.0)[:, None] * mean, rtol=1e-5)
    np.testing.assert_allclose(sent(attack, known(), jnp.asarray([5]))[0, 0] - mean, mean, rtol=1e-5)
    one = sent(Adaptive(pull=2.0, reach=0.5, mirror=-0.5), known())
    assert len(one) == 1, "all receivers get the same unless the attack may equivocate"


def test_all_numbers_are_data_whatever_they_are() -> None:
    code, numbers = without_numbers(Adaptive(pull=2, drift=0.1))
    assert len(numbers) == len(Adaptive.numbers)
    assert code == without_numbers(Adaptive(period=3.0, own=0.0))[0]
    assert code != without_numbers(Adaptive(equivocates=True))[0]


@pytest.mark.parametrize(
    "attack",
    [pytest.param(Adaptive(pull=2.0), marks=pytest.mark.slow), PoisonedReward(), BonusForAction()],
    ids=str,
)
def test_contract(attack: Attack) -> None:
    check_attack(attack, num_agents=K, num_attackers=2)


def test_wrong_numbers_are_refused() -> None:
    for options, problem in (
        ({"period": 0.5}, "period must be at least one iteration, got 0.5"),
        ({"duty": 1.5}, "duty must lie between 0 and 1, got 1.5"),
        ({"pull": float("nan")}, "pull must be a finite number, got nan"),
    ):
        with pytest.raises(ValueError, match=problem):
            Adaptive(**options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="share must lie between 0 and 1, got 2"):
        PoisonedReward(share=2)


def test_poison_keeps_to_its_budget_and_the_bonus_goes_to_the_action() -> None:
    rewards = jnp.ones(20_000)
    poisoned = np.asarray(PoisonedReward(factor=-3.0, share=0.25).record(rewards, jax.random.key(0)))
    assert set(poisoned.tolist()) == {1.0, -3.0}
    assert np.mean(poisoned < 0) == pytest.approx(0.25, abs=0.02)
    near = BonusForAction(0.5, bonus=2.0).record_step(jnp.zeros(2), jnp.asarray([[0.5], [1.5]]), jax.random.key(0))
    np.testing.assert_allclose(near, [2.0, 2.0 * np.exp(-1.0)], rtol=1e-6)


def test_the_critic_can_be_attacked_alone() -> None:
    """With plain averaging, one iteration moves the attacked part of θ far away and leaves the other where it was."""

    def parameters(**weights: float) -> np.ndarray:
        attack = replace(Adaptive(drift=1e4), **weights)
        config = Config(algorithm="Fed-PPO", num_agents=3, num_byzantine=1, attack=attack, num_seeds=1, steps=16)
        ppo = PPO(environments=1, segment=16, epochs=1, minibatches=1)
        config = Config(**{**vars(config), "ppo": ppo, "optimizer": "sgd", "momentum": 0.0, "hidden": (4,)})
        return train(config).held()

    neither, actor, critic = (parameters(actor=a, critic=c) for a, c in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)))
    moved_by_actor, moved_by_critic = actor != neither, critic != neither
    assert np.any(moved_by_actor)
    assert np.any(moved_by_critic)
    assert not np.any(moved_by_actor & moved_by_critic)
