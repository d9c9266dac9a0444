"""`byzpg.testing` finds what is wrong. That it accepts byzpg's own components is in the tests of those."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import own_parts
import pytest
from jax import Array

from byzpg.envs import CartPole
from byzpg.learning.policies import CategoricalMLP, GaussianMLP
from byzpg.robust import Equivocate, Knowledge, Mean, MessageAttack, RewardFlip, aggregator
from byzpg.robust.aggregators import WeightedAggregator
from byzpg.testing import ContractError, check_aggregator, check_attack, check_environment, check_policy


@dataclass(frozen=True)
class Forgetful(WeightedAggregator):
    """Averages missing rows too, claims a bound it does not keep, and does not compare its option."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return 1

    def max_byzantine(self, num_agents: int) -> int:
        return num_agents

    def coefficients(self, cloud: Any, num_byzantine: int, key: Array | None) -> Array:
        return jnp.append(jnp.full(cloud.num_points, 2 / cloud.num_points), -1)


@aggregator
def reads_missing(received, num_byzantine, present):
    return jnp.sum(received, axis=0) / len(received)


def test_aggregators() -> None:
    with pytest.raises(ContractError) as caught:
        check_aggregator(Forgetful(), num_agents=9, num_byzantine=2)
    found = str(caught.value)
    assert "test_testing:Forgetful() breaks its contract:\n- value: a copy is not equal to it" in found
    for name in (
        "bound: max_byzantine(9) is 9",
        "weights: weights are",
        "agreement: where all rows are",
        "robustness: ",
    ):
        assert f"\n- {name}" in found
    report = check_aggregator(own_parts.trimmed(), num_agents=9, claims=["order"])
    assert str(report).startswith(
        "own_parts:trimmed(): 8 of 8 checks passed; properties: order, translation, agreement"
    )
    with pytest.raises(ContractError, match="- robustness: with 2 of 9 rows"):
        check_aggregator(Mean(), num_agents=9)
    with pytest.raises(ContractError, match=r"own_parts:wrong_shape.*\n- first use: ValueError"):
        check_aggregator(own_parts.wrong_shape())
    with pytest.raises(TypeError, match="is no aggregator"):
        check_aggregator(own_parts.trimmed)
    with pytest.raises(ValueError, match="there is no property 'fast'"):
        check_aggregator(Mean(), num_agents=9, claims=["fast"])


@dataclass(frozen=True)
class Undeclared(MessageAttack):
    """Draws, looks at the rule, and tells a receiver something else when it is asked about it alone."""

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        noise = jax.random.normal(knowledge.key, knowledge.truth().shape)
        return noise * len(receivers) * (1 if knowledge.rule is None else 2)


@dataclass(frozen=True)
class OneAudience(Equivocate):
    """Says that all receivers get the same."""

    def audience(self, knowledge: Knowledge, receivers: Array) -> Array:
        return jnp.zeros_like(receivers)


@dataclass(frozen=True)
class NegativeAudience(Equivocate):
    def audience(self, knowledge: Knowledge, receivers: Array) -> Array:
        return -receivers


@dataclass(frozen=True)
class Secretly(RewardFlip):
    """Poisons play, and does not say so."""

    poisons_play: ClassVar[bool] = False


def test_an_attack_that_declares_nothing() -> None:
    with pytest.raises(ContractError) as caught:
        check_attack(Undeclared(), num_agents=7, num_attackers=2)
    for problem in (
        "- receivers: a receiver alone",
        "- needs_key: gradients are random",
        "- uses_rule: gradients depend",
    ):
        assert f"\n{problem}" in str(caught.value)


@pytest.mark.slow
def test_attacks_that_do_not_keep_their_word() -> None:
    with pytest.raises(ContractError, match=r"\n- play: its episodes are poisoned, and poisons_play is False"):
        check_attack(Secretly(), num_agents=7, num_attackers=2)
    with pytest.raises(ContractError, match=r"\n- receivers: receivers of one audience get different gradients"):
        check_attack(OneAudience(), num_agents=7, num_attackers=2)
    with pytest.raises(ContractError, match=r"\n- receivers: audience must be a number ≥ 0 for each of 7 receivers"):
        check_attack(NegativeAudience(), num_agents=7, num_attackers=2)
    with pytest.raises(ContractError, match=r"\n- messages: ValueError: own_parts:wrong_message"):
        check_attack(own_parts.wrong_message(), num_agents=7, num_attackers=2)
    with pytest.raises(ValueError, match="num_attackers must be between 1 and 6, got 0"):
        check_attack(own_parts.reversed_mean(), num_agents=7, num_attackers=0)
    report = check_attack(own_parts.reversed_mean(), num_agents=7, num_attackers=2)
    assert [report.has(name) for name in ("false gradients", "false parameters", "equivocation")] == [
        True,
        False,
        False,
    ]


@dataclass(frozen=True)
class Broken(CartPole):
    """Episodes that depend on the others of a batch, and infinite rewards."""

    name = "Broken"

    def step(self, state: Any, action: Any, noise: Any) -> Any:
        after, reward, ended = super().step(state, action, noise)
        mean = jnp.mean(after[0]) * jnp.ones_like(after[0])
        return after._replace(position=mean), jnp.where(mean != 0, jnp.inf, reward), ended


@pytest.mark.slow
def test_environments() -> None:
    assert str(check_environment(CartPole(), steps=20)) == "CartPole-v1: 6 of 6 checks passed."
    with pytest.raises(ContractError) as caught:
        check_environment(Broken(), steps=20)
    for problem in ("numbers: gave the reward [inf]", "batches: an episode in a batch differs from one alone"):
        assert f"\n- {problem}" in str(caught.value)
    with pytest.raises(ContractError, match=r"\n- seeds: the same seeds and actions give other episodes"):
        check_environment("host_tasks:unseeded", steps=5)
    assert str(check_environment("gymnasium:CartPole-v1", steps=5)) == "gymnasium:CartPole-v1: 2 of 2 checks passed."
    with pytest.raises(ContractError, match=r"\n- first use: .*only supports vectors"):
        check_environment("host_tasks:image")


@dataclass(frozen=True)
class Shifted(CategoricalMLP):
    """Draws another action than the one that log π is about."""

    def choose_numbers(self, weights: Any, outputs: Any, deviates: Any) -> Any:
        (chosen,) = super().choose_numbers(weights, outputs, deviates)
        return ((chosen + 1) % self.num_actions,)

    def mode(self, weights: Any, outputs: Array) -> Array:
        return jnp.argmin(outputs, axis=-1).astype(jnp.int32)


@pytest.mark.parametrize(
    "policy",
    [pytest.param(CategoricalMLP(3, (4,), num_actions=3), marks=pytest.mark.slow), GaussianMLP(2, (4,), action_size=2)],
    ids=str,
)
def test_policies(policy: Any) -> None:
    assert str(check_policy(policy)).endswith(": 7 of 7 checks passed.")


def test_a_wrong_policy() -> None:
    with pytest.raises(ContractError) as caught:
        check_policy(Shifted(3, (4,), num_actions=3))
    for name in ("draws: draws do not follow log π", "entropy: the entropy is", "mode: a draw is more likely"):
        assert f"\n- {name}" in str(caught.value)
    assert np.isfinite(replace(Shifted(3), hidden=(2,)).dimension)
