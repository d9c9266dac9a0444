"""Attacks: what Byzantine agents do, and which agents attack in which iteration.

Attackers are omniscient and collude: the hooks for messages see `Knowledge`. An attack changes some of these hooks:

- `act` changes the actions in a Byzantine agent's episodes, and `record` changes the rewards it records, as does
  `record_step`, which also sees the actions;
- `gradients` and `parameters` return the messages it sends, [receiver, Byzantine sender, d], for a group of receivers
  at a time. An attack that does not equivocate returns [1, Byzantine sender, d].

A message of NaNs stands for a message that was not sent. Receivers treat both alike.

The examples start from `import jax`, `import jax.numpy as jnp` and `from byzpg.robust import *`. They show what one
attacker sends to agent 0 while the three honest agents hold the vectors (1, 2), (2, 2) and (3, 5).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.robust.components import (
    Component,
    check_array,
    check_choice,
    check_count,
    check_finite,
    check_positive,
    is_own,
    trying,
)
from byzpg.robust.geometry import Cloud, dot, is_sound, row_products, squared_distances, stored, sum_of_rows
from byzpg.robust.least_diameter import least_diameter_subset
from byzpg.robust.rules import SAMPLE_DIMENSION, Rule

__all__ = [
    "ALIE",
    "IPM",
    "Attack",
    "AvgZero",
    "ByzantineSet",
    "Dissensus",
    "Equivocate",
    "FixedSet",
    "Knowledge",
    "LargeNoise",
    "MDAFooling",
    "MessageAttack",
    "Mimic",
    "MinMax",
    "MinSum",
    "NoAttack",
    "NonFinite",
    "Normalized",
    "OptimalALIE",
    "OptimalIPM",
    "RandomAction",
    "RandomReward",
    "RewardFlip",
    "RotatingSet",
    "SignFlip",
    "Silent",
    "Zero",
]


Target = Literal["gradients", "parameters", "both"]


def honest_mask(num_agents: int, byzantine: Array) -> Array:
    """Return which of K agents are honest, for the indices [b] of those that attack."""
    return jnp.all(jnp.arange(num_agents)[:, None] != byzantine, axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Knowledge:
    """What the attackers know in one round.

    Attributes:
        vectors: [K, d], what each agent would send if it were honest.
        byzantine: Indices [b] of the agents that attack.
        iteration: The iteration of training.
        key: Random key of this round. Fold in the index of a receiver for a draw of its own.
        rule: The rule that the receivers apply.
        num_byzantine: f, the number of Byzantine agents that the rule tolerates.
        block: Which part of the agents' vectors this is, where parts are aggregated one by one: 0 for the policy, 1 for
            the critic, 2 for statistics of observations.
        merged: Whether one message stands for those of all attackers where they are the same.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(knowledge.mean(), knowledge.num_honest)
        [2. 3.] 3
    """

    vectors: Array
    byzantine: Array
    iteration: Array
    key: Array
    rule: Rule | None = field(default=None, metadata={"static": True})
    num_byzantine: int = field(default=0, metadata={"static": True})
    block: int = field(default=0, metadata={"static": True})
    merged: bool = field(default=False, metadata={"static": True})

    @property
    def num_agents(self) -> int:
        """K, the number of agents."""
        return len(self.vectors)

    @property
    def is_honest(self) -> Array:
        """Which agents [K] are honest."""
        return honest_mask(self.num_agents, self.byzantine)

    @property
    def num_honest(self) -> int:
        """K − b, the number of honest agents."""
        return self.num_agents - len(self.byzantine)

    @property
    def honest(self) -> Array:
        """Indices [K − b] of the honest agents."""
        # Honest agent number i is agent i + j if j attackers come before it. `jnp.nonzero` takes longer to compile.
        number = jnp.arange(self.num_honest)
        return stored(number + jnp.sum(self.honest_before(self.byzantine) <= number[:, None], axis=1))

    def honest_before(self, agents: Array) -> Array:
        """Return how many honest agents come before each of these agents [n]."""
        return agents - jnp.sum(self.byzantine < agents[:, None], axis=1)

    def mean(self) -> Array:
        """Return the mean [d] of the honest vectors."""
        return sum_of_rows(jnp.where(self.is_honest[:, None], self.vectors, 0)) / self.num_honest

    def deviation(self) -> Array:
        """Return the standard deviation [d] of the honest vectors in each coordinate."""
        square = jnp.where(self.is_honest[:, None], jnp.square(self.vectors - self.mean()), 0)
        return jnp.sqrt(sum_of_rows(square) / self.num_honest)

    def honest_around_mean(self) -> Array:
        """Return the honest vectors [K − b, d] minus their mean."""
        return self.vectors[self.honest] - self.mean()

    def truth(self) -> Array:
        """Return what the attackers would send if they were honest, as messages [1, b, d]."""
        return self.vectors[self.byzantine][None]

    def same_for_all(self, vector: Array) -> Array:
        """Return one vector [d] as the message of every attacker to every receiver, [1, b, d]; [1, 1, d] if merged."""
        return jnp.broadcast_to(vector, (1, 1 if self.merged else len(self.byzantine), *vector.shape))


@dataclass(frozen=True)
class Attack(Component):
    """An attack: all hooks are honest here, and a subclass changes some of them.

    Subclass `MessageAttack` for an attack that changes messages only.
    """

    poisons_play: ClassVar[bool] = False  # it changes `act`, `record` or `record_step`
    needs_key: ClassVar[bool] = False  # its messages are random
    uses_rule: ClassVar[bool] = False  # it looks at the receivers' rule

    @property
    def changes_actions(self) -> bool:
        """Whether the attack changes the actions in an attacker's episodes."""
        return type(self).act is not Attack.act

    def check(self, num_agents: int, num_attackers: int, num_byzantine: int, rule: Rule) -> None:
        """Try an attack from outside byzpg on a sample of vectors.

        Raises:
            ValueError: If it cannot be compiled, fails, or gives messages of another shape than [r or 1, b, d].
        """
        if not is_own(type(self)) or not num_attackers:
            return
        vectors = jax.ShapeDtypeStruct((num_agents, SAMPLE_DIMENSION), jnp.float32)
        receivers, byzantine = jnp.arange(2), jnp.arange(num_agents - num_attackers, num_agents)

        def messages(phase: str, vectors: Array, key: Array) -> Array:
            number = jnp.asarray(0)
            knowledge = Knowledge(vectors, byzantine, number, key, rule=rule, num_byzantine=num_byzantine)
            return self.messages(phase, knowledge, receivers)

        shapes = [(number, num_attackers, SAMPLE_DIMENSION) for number in (1, len(receivers))]
        for phase in ("gradients", "parameters"):
            with trying(self, f"messages of {phase}"):
                sent = jax.eval_shape(partial(messages, phase), vectors, jax.random.key(0))
                check_array(self, f"messages of {phase} [receiver or 1, attacker, d]", sent, shapes)
        with trying(self, "record"):
            arguments = jnp.ones(3), jnp.zeros(3, jnp.int32), jax.random.key(0)
            check_array(self, "recorded rewards", jax.eval_shape(self.record_step, *arguments), [(3,)])

    def act(self, action: Array, uniform: Array) -> Array:
        """Return the action to take.

        Args:
            action: What the policy chose. An action of several numbers is passed number by number.
            uniform: A uniform draw from the action space.
        """
        return action

    def record(self, reward: Array, key: Array) -> Array:
        """Return the reward that is recorded when the environment pays `reward`."""
        return reward

    def record_step(self, reward: Array, action: Array, key: Array) -> Array:
        """Return the rewards [...] recorded for actions [..., n], or for the numbers [...] of discrete actions."""
        return self.record(reward, key)

    def gradients(self, knowledge: Knowledge, receivers: Array) -> Array:
        """Return the gradient messages [receiver or 1, Byzantine sender, d] to `receivers` [r]; K is the server."""
        return knowledge.truth()

    def parameters(self, knowledge: Knowledge, receivers: Array) -> Array:
        """Return the parameter messages [receiver or 1, Byzantine sender, d] to `receivers` [r]."""
        return knowledge.truth()

    def messages(self, phase: str, knowledge: Knowledge, receivers: Array) -> Array:
        """Return the messages to `receivers` in this phase, "gradients" or "parameters"."""
        hook = self.gradients if phase == "gradients" else self.parameters
        return hook(knowledge, receivers)

    def audience(self, knowledge: Knowledge, receivers: Array) -> Array | None:
        """Return a number ≥ 0 for each of `receivers` [r], the same for those that certainly get the same messages.

        Where a large federation takes its receivers in groups, it then multiplies the messages once for neighbouring
        receivers with the same number, and applies the rule once if they also hold the same true vectors. None, the
        default, says that this is not known: the messages are compared, which takes longer, unless almost all receivers
        get something of their own. A subclass that changes the messages must define its own `audience`.
        """
        return None

    def stated_audience(self, knowledge: Knowledge, receivers: Array) -> Array | None:
        """Return `audience`, unless a subclass has changed the messages since."""
        hooks = ("messages", "gradients", "parameters", "false_messages")
        defining = next(cls for cls in type(self).__mro__ if not vars(cls).keys().isdisjoint((*hooks, "audience")))
        return self.audience(knowledge, receivers) if "audience" in vars(defining) else None


@dataclass(frozen=True)
class MessageAttack(Attack):
    """An attack that sends false gradients, false parameters, or both. Subclasses implement `false_messages`.

    Args:
        target: Which messages are false: "gradients", "parameters" or "both".
    """

    target: Target = field(default="gradients", kw_only=True)

    def __post_init__(self) -> None:
        check_choice(self, "target", self.target, ("gradients", "parameters", "both"))

    @abstractmethod
    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        """Return the false messages [receiver or 1, Byzantine sender, d] to `receivers` [r]."""

    def gradients(self, knowledge: Knowledge, receivers: Array) -> Array:
        return knowledge.truth() if self.target == "parameters" else self.false_messages(knowledge, receivers)

    def parameters(self, knowledge: Knowledge, receivers: Array) -> Array:
        return knowledge.truth() if self.target == "gradients" else self.false_messages(knowledge, receivers)


@dataclass(frozen=True)
class NoAttack(Attack):
    """No attack: the Byzantine agents behave like honest ones.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(NoAttack().gradients(knowledge, jnp.array([0]))[0, 0])
        [9. 9.]
    """


# Attacks on an agent's own episodes


@dataclass(frozen=True)
class RandomAction(Attack):
    """Attackers take uniformly random actions in their episodes, and are honest otherwise (Fan et al. 2021).

    Examples:
        >>> print(RandomAction().act(jnp.array(1), uniform=jnp.array(3)))
        3
    """

    poisons_play: ClassVar[bool] = True

    def act(self, action: Array, uniform: Array) -> Array:
        return uniform


@dataclass(frozen=True)
class RewardFlip(Attack):
    """Attackers record their rewards with the opposite sign.

    Examples:
        >>> print(RewardFlip().record(jnp.array([1.0, -2.0]), jax.random.key(0)))
        [-1.  2.]
    """

    poisons_play: ClassVar[bool] = True

    def record(self, reward: Array, key: Array) -> Array:
        return -reward


@dataclass(frozen=True)
class RandomReward(Attack):
    """Attackers record uniform noise between −scale and scale instead of their rewards.

    Args:
        scale: The largest recorded reward.

    Examples:
        >>> print(RandomReward(scale=10.0).record(jnp.array([1.0, -2.0]), jax.random.key(0)).round(1))
        [9.  9.6]
    """

    poisons_play: ClassVar[bool] = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, scale=self.scale)

    def record(self, reward: Array, key: Array) -> Array:
        return jax.random.uniform(key, reward.shape, reward.dtype, -self.scale, self.scale)


# False messages, the same to every receiver


@dataclass(frozen=True)
class AvgZero(MessageAttack):
    """Attackers together send minus the sum of the honest vectors: the plain mean is zero (Jordan et al. 2024).

    Each of b attackers sends −(1/b) Σ_honest x.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(AvgZero().gradients(knowledge, jnp.array([0]))[0, 0])
        [-6. -9.]
    """

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        return knowledge.same_for_all(-knowledge.mean() * (knowledge.num_honest / len(knowledge.byzantine)))


@dataclass(frozen=True)
class SignFlip(MessageAttack):
    """Attackers send −scale times their own true vector.

    Args:
        scale: The factor.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(SignFlip().gradients(knowledge, jnp.array([0]))[0, 0])
        [-9. -9.]
    """

    numbers: ClassVar[tuple[str, ...]] = ("scale",)
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, scale=self.scale)

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        return -self.scale * knowledge.truth()


@dataclass(frozen=True)
class IPM(MessageAttack):
    """Inner-product manipulation: attackers send −ε times the honest mean (Xie et al. 2020).

    Args:
        epsilon: ε.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(IPM().gradients(knowledge, jnp.array([0]))[0, 0])
        [-1.  -1.5]
    """

    numbers: ClassVar[tuple[str, ...]] = ("epsilon",)
    epsilon: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, epsilon=self.epsilon)

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        return knowledge.same_for_all(-self.epsilon * knowledge.mean())


def alie_factor(num_agents: int, num_byzantine: int) -> float:
    """Return the largest z that hides among the honest vectors (Baruch et al. 2019).

    Φ(z) = (K − f − s)/(K − f) with s = ⌊K/2 + 1⌋ − f.

    Examples:
        >>> round(alie_factor(13, 3), 3)
        0.253
    """
    supporters = num_agents // 2 + 1 - num_byzantine
    share = (num_agents - num_byzantine - supporters) / (num_agents - num_byzantine)
    return NormalDist().inv_cdf(min(max(share, 1e-3), 1 - 1e-3))


@dataclass(frozen=True)
class ALIE(MessageAttack):
    """A little is enough: attackers send the honest mean minus z standard deviations (Baruch et al. 2019).

    Args:
        z: The number of standard deviations. None computes it from K and the number of attackers, see `alie_factor`.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(ALIE(z=3.0).gradients(knowledge, jnp.array([0]))[0, 0].round(1))
        [-0.4 -1.2]
    """

    numbers: ClassVar[tuple[str, ...]] = ("z",)
    z: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, z=self.z or 0.0)

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        z = alie_factor(knowledge.num_agents, len(knowledge.byzantine)) if self.z is None else self.z
        return knowledge.same_for_all(knowledge.mean() - z * knowledge.deviation())


# What a search over factors may take while it tries several at once.
BYTES_TRIED_AT_ONCE = 2**28


@dataclass(frozen=True)
class _LineSearch(MessageAttack):
    """Attackers send the honest mean + t × a step, with the factor t that does the rule in use most harm.

    Args:
        largest: The largest factor that is tried, with both signs.
        candidates: How many factors of each sign are tried, each half of the one before.
    """

    uses_rule: ClassVar[bool] = True
    largest: float = 10.0
    candidates: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, largest=self.largest)
        check_count(self, candidates=self.candidates)

    @abstractmethod
    def step(self, knowledge: Knowledge) -> Array:
        """Return the step [d]."""

    def harm(self, result: Array, mean: Array) -> Array:
        """Return how bad a result [d] of the rule is, for attackers who know the honest mean [d]."""
        return jnp.sum(jnp.square(result - mean))

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        rule = knowledge.rule
        if rule is None:
            raise ValueError(f"{self} searches against the rule in use: Knowledge needs a rule.")
        mean, step, honest = knowledge.mean(), self.step(knowledge), knowledge.is_honest
        victim = knowledge.honest[0]
        # Every message lies on the line through x̄ and x̄ + the step, so inner products with these serve for all factors.
        ends = jnp.where(honest[:, None], knowledge.vectors, mean + step)
        majority = knowledge.num_agents - knowledge.num_byzantine
        cloud = Cloud.received(ends, None, majority, victim)
        itself = jnp.eye(knowledge.num_agents, knowledge.num_agents + 1, dtype=mean.dtype)
        as_mean = jnp.append(honest, False).astype(mean.dtype) / knowledge.num_honest

        def damage(factor: Array) -> Array:
            points = jnp.where(honest[:, None], itself, factor * itself + (1 - factor) * as_mean)
            usable = cloud.usable & (honest | is_sound(mean + factor * step))
            received = cloud.mixed(points, usable, victim)
            result = rule.combine(received, knowledge.num_byzantine, jax.random.fold_in(knowledge.key, 0))
            return self.harm(result, mean)

        sizes = self.largest / 2.0 ** jnp.arange(self.candidates, dtype=mean.dtype)
        factors = jnp.concatenate([-sizes, sizes])
        # A GPU tries as many at once as fit. On a CPU, that takes no less time, and more to compile.
        tried = 2 * knowledge.vectors.nbytes  # a rule may need all points, and a copy of them
        at_once = None if jax.default_backend() == "cpu" else max(1, BYTES_TRIED_AT_ONCE // tried)
        harm = lax.map(damage, factors, batch_size=at_once)
        best = factors[jnp.argmax(jnp.where(jnp.isfinite(harm), harm, -1))]
        return knowledge.same_for_all(mean + best * step)


@dataclass(frozen=True)
class OptimalALIE(_LineSearch):
    """ALIE with the number of standard deviations, of either sign, that moves the rule in use furthest.

    The options `largest` and `candidates` bound the search: it tries largest, largest/2, largest/4, … of both signs.

    Examples:
        >>> from byzpg.robust import Median
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), jnp.array(0), jax.random.key(0), Median(), num_byzantine=1)
        >>> print(OptimalALIE(candidates=4).gradients(knowledge, jnp.array([0]))[0, 0].round())
        [ -6. -11.]
    """

    numbers: ClassVar[tuple[str, ...]] = ("largest",)

    def step(self, knowledge: Knowledge) -> Array:
        return knowledge.deviation()


@dataclass(frozen=True)
class OptimalIPM(_LineSearch):
    """IPM with the factor, of either sign, that moves the rule in use furthest.

    The options `largest` and `candidates` bound the search: it tries largest, largest/2, largest/4, … of both signs.

    Examples:
        >>> from byzpg.robust import Median
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), jnp.array(0), jax.random.key(0), Median(), num_byzantine=1)
        >>> print(OptimalIPM(candidates=4).gradients(knowledge, jnp.array([0]))[0, 0].round(1))
        [-18. -27.]
    """

    numbers: ClassVar[tuple[str, ...]] = ("largest",)

    def step(self, knowledge: Knowledge) -> Array:
        return knowledge.mean()


@dataclass(frozen=True)
class _Directed(MessageAttack):
    """Attackers move away from the honest mean.

    Args:
        direction: p. "unit" is −mean/‖mean‖, "std" is −standard deviation, "sign" is −sign(mean).
    """

    direction: Literal["unit", "std", "sign"] = "unit"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "direction", self.direction, ("unit", "std", "sign"))

    def away(self, knowledge: Knowledge) -> Array:
        """Return the direction p [d]."""
        if self.direction == "std":
            return -knowledge.deviation()
        mean = knowledge.mean()
        return -jnp.sign(mean) if self.direction == "sign" else -_unit(mean)


def _unit(vector: Array) -> Array:
    return vector / jnp.maximum(jnp.linalg.norm(vector), 1e-30)


@dataclass(frozen=True)
class Normalized(_LineSearch, _Directed):
    """Attackers turn the result of the rule in use away from the honest mean as far as they can (Fang et al. 2025).

    All send m = x̄ + t ‖x̄‖ p/‖p‖, with the factor t of either sign that maximizes ‖F/‖F‖ − x̄/‖x̄‖‖: F is the result of
    the rule, x̄ the honest mean, and p the `direction`. Normalized steps, and Adam, follow the direction alone. Of
    factors that turn the result equally far, the largest counts.

    Deviations: the paper searches for the direction of unit vectors and then, in a second stage, for their length. Here
    one search does both, because m is not normalized. The result before the attack is taken to be the honest mean.

    Args:
        direction: p. "unit" is −mean/‖mean‖, "std" is −standard deviation, "sign" is −sign(mean).
        largest: The largest factor that is tried, with both signs.
        candidates: How many factors of each sign are tried, each half of the one before.

    Examples:
        >>> from byzpg.robust import Median
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), jnp.array(0), jax.random.key(0), Median(), num_byzantine=1)
        >>> print(Normalized(candidates=4).gradients(knowledge, jnp.array([0]))[0, 0].round())
        [-23. -22.]
    """

    numbers: ClassVar[tuple[str, ...]] = ("largest",)
    direction: Literal["unit", "std", "sign"] = "sign"

    def step(self, knowledge: Knowledge) -> Array:
        return jnp.linalg.norm(knowledge.mean()) * _unit(self.away(knowledge))

    def harm(self, result: Array, mean: Array) -> Array:
        # Along the mean, all messages that reverse the result tie: rounding errors must not decide between them.
        return jnp.round(jnp.sum(jnp.square(_unit(result) - _unit(mean))), 4)


def _principal_axis(around_mean: Array) -> Array:
    """Return the unit direction [d] in which the rows [h, d] spread most."""
    _, directions = jnp.linalg.eigh(row_products(around_mean, around_mean))
    axis = dot(directions[:, -1], around_mean)
    return axis / jnp.maximum(jnp.linalg.norm(axis), 1e-30)


@dataclass(frozen=True)
class Mimic(MessageAttack):
    """Every attacker repeats the vector of one honest agent (Karimireddy et al. 2022).

    Args:
        agent: The position of that agent among the honest ones. None selects the agent furthest out along the direction
            in which the honest vectors spread most: repeating an unusual vector does most harm.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(Mimic(agent=0).gradients(knowledge, jnp.array([0]))[0, 0])
        [1. 2.]
    """

    agent: int | None = None

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        if self.agent is not None and not 0 <= self.agent < knowledge.num_honest:
            raise ValueError(f"{self}: agent must be 0 to {knowledge.num_honest - 1}, an honest agent's position.")
        if self.agent is not None:
            chosen = jnp.asarray(self.agent)
        else:
            around_mean = knowledge.honest_around_mean()
            chosen = jnp.argmax(jnp.abs(dot(around_mean, _principal_axis(around_mean))))
        return knowledge.same_for_all(knowledge.vectors[knowledge.honest[chosen]])


@dataclass(frozen=True)
class MinMax(_Directed):
    """Attackers send the honest mean plus the longest step within the honest diameter (Shejwalkar & Houmansadr 2021).

    m = mean + γp, with the largest γ for which max_i ‖m − x_i‖ ≤ max_ij ‖x_i − x_j‖. γ is computed in closed form.

    Args:
        direction: p. "unit" is −mean/‖mean‖, "std" is −standard deviation, "sign" is −sign(mean).

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(MinMax().gradients(knowledge, jnp.array([0]))[0, 0].round(1))
        [1.2 1.9]
    """

    def _step(self, distances: Array, square: Array, slope: Array, curvature: Array) -> Array:
        """Return γ, given that ‖m − x_i‖² = square_i + 2γ slope_i + γ² curvature."""
        limit = jnp.max(distances)
        return jnp.min(_larger_root(square - limit, slope, curvature))

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        mean, around_mean, step = knowledge.mean(), knowledge.honest_around_mean(), self.away(knowledge)
        gram = row_products(around_mean, around_mean)
        square, slope = jnp.diagonal(gram), -dot(around_mean, step)
        size = self._step(squared_distances(gram), square, slope, jnp.sum(jnp.square(step)))
        return knowledge.same_for_all(mean + size * step)


def _larger_root(constant: Array, slope: Array, curvature: Array) -> Array:
    """Return the larger γ with curvature γ² + 2 slope γ + constant = 0; 0 where the direction is zero."""
    root = jnp.sqrt(jnp.maximum(jnp.square(slope) - curvature * constant, 0))
    return jnp.where(curvature > 0, jnp.maximum((root - slope) / jnp.maximum(curvature, 1e-30), 0), 0)


@dataclass(frozen=True)
class MinSum(MinMax):
    """As MinMax, but the sum of squared distances to the honest vectors is bounded (Shejwalkar & Houmansadr 2021).

    m = mean + γp, with the largest γ for which Σ_i ‖m − x_i‖² ≤ max_i Σ_j ‖x_i − x_j‖². `direction` is as in `MinMax`.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(MinSum().gradients(knowledge, jnp.array([0]))[0, 0].round(1))
        [0.8 1.1]
    """

    def _step(self, distances: Array, square: Array, slope: Array, curvature: Array) -> Array:
        limit = jnp.max(jnp.sum(distances, axis=1))
        return _larger_root(jnp.sum(square) - limit, jnp.sum(slope), len(square) * curvature)


@dataclass(frozen=True)
class Zero(MessageAttack):
    """Attackers send zeros, and so contribute nothing.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(Zero().gradients(knowledge, jnp.array([0]))[0, 0])
        [0. 0.]
    """

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        return jnp.zeros_like(knowledge.truth())


@dataclass(frozen=True)
class NonFinite(MessageAttack):
    """Attackers overwrite one entry of their true vector by NaN, +Inf or −Inf.

    The first attacker sends NaN, the next +Inf, the next −Inf, and so on.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(NonFinite().gradients(knowledge, jnp.array([0]))[0, 0])
        [nan  9.]
    """

    target: Target = field(default="both", kw_only=True)

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        truth = knowledge.truth()
        poison = jnp.asarray([jnp.nan, jnp.inf, -jnp.inf])[jnp.arange(truth.shape[1]) % 3]
        return truth.at[:, :, 0].set(poison)


@dataclass(frozen=True)
class Silent(MessageAttack):
    """Attackers send nothing.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(Silent().gradients(knowledge, jnp.array([0]))[0, 0])
        [nan nan]
    """

    target: Target = field(default="both", kw_only=True)

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        return jnp.full_like(knowledge.truth(), jnp.nan)


# Equivocation: different receivers get different messages


def _first_half(knowledge: Knowledge, receivers: Array) -> Array:
    """Return which receivers [r] are in the first half of the agents."""
    return receivers < (knowledge.num_agents + 1) // 2


@dataclass(frozen=True)
class LargeNoise(MessageAttack):
    """Attackers send uniform noise between −scale and scale, drawn separately for each receiver (Jordan et al. 2024).

    Args:
        scale: The largest coordinate.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(LargeNoise().gradients(knowledge, jnp.array([0]))[0, 0].round())
        [ 685. -635.]
    """

    numbers: ClassVar[tuple[str, ...]] = ("scale",)
    needs_key: ClassVar[bool] = True
    target: Target = field(default="both", kw_only=True)
    scale: float = 1000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, scale=self.scale)

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        _, *shape = knowledge.truth().shape

        def draw(receiver: Array) -> Array:
            key = jax.random.fold_in(knowledge.key, receiver)
            return jax.random.uniform(key, shape, knowledge.vectors.dtype, -self.scale, self.scale)

        return jax.vmap(draw)(receivers)


@dataclass(frozen=True)
class Equivocate(MessageAttack):
    """Attackers send the truth to the first half of the receivers, and −scale times the truth to the others.

    Args:
        scale: The factor.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(Equivocate().gradients(knowledge, jnp.array([0, 2]))[:, 0])  # to agents 0 and 2
        [[ 9.  9.]
         [-9. -9.]]
    """

    numbers: ClassVar[tuple[str, ...]] = ("scale",)
    target: Target = field(default="both", kw_only=True)
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, scale=self.scale)

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        return jnp.where(_first_half(knowledge, receivers), 1, -self.scale)[:, None, None] * knowledge.truth()

    def audience(self, knowledge: Knowledge, receivers: Array) -> Array:
        return _first_half(knowledge, receivers).astype(int)


@dataclass(frozen=True)
class Dissensus(MessageAttack):
    """Attackers push each receiver away from the honest vectors, to prevent agreement (He et al. 2022).

    Each of b attackers sends x_k − (scale/b) Σ_honest (x_j − x_k) to receiver k: the attack on a complete graph. With
    scale 1, plain averaging leaves every receiver where it is.

    Args:
        scale: The strength of the push.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(Dissensus().parameters(knowledge, jnp.array([0, 2]))[:, 0])  # to agents 0 and 2
        [[-2. -1.]
         [ 6. 11.]]
    """

    numbers: ClassVar[tuple[str, ...]] = ("scale",)
    target: Target = field(default="parameters", kw_only=True)
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, scale=self.scale)

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        # A server has no vector of its own: the honest mean takes its place.
        at_agent = (receivers < knowledge.num_agents)[:, None]
        own = jnp.where(at_agent, knowledge.vectors.at[receivers].get(mode="clip"), knowledge.mean())
        pull = knowledge.num_honest * (knowledge.mean() - own)
        num_attackers = len(knowledge.byzantine)
        message = own - self.scale / num_attackers * pull
        return jnp.broadcast_to(message[:, None], (len(receivers), num_attackers, message.shape[-1]))


@dataclass(frozen=True)
class MDAFooling(MessageAttack):
    """Attackers send the furthest vectors that MDA keeps, in opposite directions to the two halves of the receivers.

    S is the least-diameter subset of honest vectors that leaves room for the false messages among the K − f vectors
    that MDA keeps. From the mean of S, the message is the longest step, along the direction in which the honest vectors
    spread most, that stays within the diameter of S from every member of S.

    Args:
        node_limit: The most nodes that the search for S may visit.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), jnp.array(0), jax.random.key(0), num_byzantine=1)
        >>> print(MDAFooling().gradients(knowledge, jnp.array([0, 2]))[:, 0].round())  # to agents 0 and 2
        [[2. 3.]
         [1. 1.]]
    """

    target: Target = field(default="both", kw_only=True)
    node_limit: int = 1_000_000

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        around_mean = knowledge.honest_around_mean()
        gram = row_products(around_mean, around_mean)
        distances = squared_distances(gram)
        size = max(1, knowledge.num_honest - knowledge.num_byzantine)
        usable = jnp.ones(len(gram), bool)
        members = least_diameter_subset(distances, usable, size, self.node_limit)
        centre = dot(members.astype(around_mean.dtype) / size, around_mean)
        axis = _principal_axis(around_mean)
        both = members[:, None] & members[None, :]
        limit = jnp.max(jnp.where(both, distances, 0))
        offsets = centre - around_mean
        square, slope = jnp.sum(jnp.square(offsets), axis=1), dot(offsets, axis)

        def step(sign: float) -> Array:
            sizes = _larger_root(square - limit, sign * slope, jnp.ones_like(limit))
            return sign * jnp.min(jnp.where(members, sizes, jnp.inf))

        middle = knowledge.mean() + centre
        forward, backward = middle + step(1.0) * axis, middle + step(-1.0) * axis
        messages = jnp.where(_first_half(knowledge, receivers)[:, None, None], forward, backward)
        return jnp.broadcast_to(messages, (len(receivers), len(knowledge.byzantine), messages.shape[-1]))

    def audience(self, knowledge: Knowledge, receivers: Array) -> Array:
        return _first_half(knowledge, receivers).astype(int)


# Which agents attack


@dataclass(frozen=True)
class ByzantineSet(Component, ABC):
    """Which agents attack in which iteration. Subclasses implement the call."""

    @abstractmethod
    def __call__(self, num_agents: int, num_attackers: int, iteration: Array | int, key: Array) -> Array:
        """Return the indices, in ascending order, of the `num_attackers` agents that attack in this iteration.

        Args:
            num_agents: K, a Python int.
            num_attackers: How many attack, a Python int.
            iteration: The iteration of training.
            key: Random key of the run; fold in the iteration for a draw of its own.
        """


@dataclass(frozen=True)
class FixedSet(ByzantineSet):
    """The same agents attack in every iteration: the last ones, unless others are named.

    Args:
        members: Their indices.

    Examples:
        >>> print(FixedSet((0, 2))(num_agents=5, num_attackers=2, iteration=7, key=jax.random.key(0)))
        [0 2]
    """

    members: tuple[int, ...] | None = None

    def __call__(self, num_agents: int, num_attackers: int, iteration: Array | int, key: Array) -> Array:
        members = self.members
        if members is None:
            return jnp.arange(num_agents - num_attackers, num_agents)
        if not len(set(members)) == len(members) == num_attackers or not all(0 <= m < num_agents for m in members):
            raise ValueError(
                f"FixedSet: members must be {num_attackers} different agents of 0 to {num_agents - 1}; got {members}."
            )
        return jnp.asarray(sorted(members), int)


@dataclass(frozen=True)
class RotatingSet(ByzantineSet):
    """Different agents attack over time: they are redrawn every `period` iterations.

    Args:
        period: The number of iterations between two draws.

    Examples:
        >>> print(RotatingSet(period=10)(num_agents=5, num_attackers=2, iteration=7, key=jax.random.key(0)))
        [0 2]
    """

    period: int = 1

    def __post_init__(self) -> None:
        check_count(self, period=self.period)

    def __call__(self, num_agents: int, num_attackers: int, iteration: Array | int, key: Array) -> Array:
        drawn = jax.random.permutation(jax.random.fold_in(key, iteration // self.period), num_agents)
        return jnp.sort(drawn[:num_attackers])
