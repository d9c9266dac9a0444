"""Every attack: what Byzantine agents do, all hooks in one place, and who is Byzantine when.

An attack is omniscient and colluding: each hook sees `Knowledge`. It has three hooks:

- play: `act` changes the action a Byzantine agent takes, `record` the reward it notes down;
- `gradients` and `parameters`: the messages it sends, asked for a group of receivers at a time and answered
  [receiver, Byzantine sender, d]. An attack that tells everyone the same answers [1, Byzantine sender, d].

A message of NaNs is one that was never sent: receivers treat both alike.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.robust.components import Component, check_choice, check_count, check_finite, check_positive
from byzpg.robust.geometry import Cloud, dot, squared_distances
from byzpg.robust.least_diameter import least_diameter_subset
from byzpg.robust.rules import Rule

Target = Literal["gradients", "parameters", "both"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Knowledge:
    """Everything the adversary sees in one round."""

    vectors: Array  # [K, d] what every agent would send if it were honest
    byzantine: Array  # [b] indices of the Byzantine agents
    iteration: Array
    key: Array  # of this round; fold in a receiver for a draw of its own
    rule: Rule | None = field(default=None, metadata={"static": True})  # what receivers apply
    num_byzantine: int = field(default=0, metadata={"static": True})  # what receivers declare as f

    @property
    def num_agents(self) -> int:
        return len(self.vectors)

    @property
    def is_honest(self) -> Array:
        return jnp.ones(self.num_agents, bool).at[self.byzantine].set(False)

    @property
    def num_honest(self) -> int:
        return self.num_agents - len(self.byzantine)

    @property
    def honest(self) -> Array:
        """Indices [K − b] of the honest agents."""
        return jnp.nonzero(self.is_honest, size=self.num_honest)[0]

    def mean(self) -> Array:
        """The honest mean [d]."""
        return jnp.sum(jnp.where(self.is_honest[:, None], self.vectors, 0), axis=0) / self.num_honest

    def deviation(self) -> Array:
        """The honest standard deviation [d], per coordinate."""
        square = jnp.where(self.is_honest[:, None], jnp.square(self.vectors - self.mean()), 0)
        return jnp.sqrt(jnp.sum(square, axis=0) / self.num_honest)

    def honest_around_mean(self) -> Array:
        """The honest vectors [K − b, d] minus their mean."""
        return self.vectors[self.honest] - self.mean()

    def truth(self) -> Array:
        """What the Byzantine agents would send if they were honest, as messages [1, b, d]."""
        return self.vectors[self.byzantine][None]

    def everyone_sends(self, vector: Array) -> Array:
        """One vector [d] from every Byzantine agent to every receiver, as messages [1, b, d]."""
        return jnp.broadcast_to(vector, (1, len(self.byzantine), *vector.shape))


@dataclass(frozen=True)
class Attack(Component):
    """Honest behaviour in all hooks; every attack changes some of them."""

    poisons_play: ClassVar[bool] = False  # `act` or `record` is changed
    needs_key: ClassVar[bool] = False  # messages are random
    uses_rule: ClassVar[bool] = False  # looks at the receivers' rule

    @property
    def changes_actions(self) -> bool:
        return type(self).act is not Attack.act

    def act(self, action: Array, uniform: Array) -> Array:
        """The action taken where the policy chose `action`; `uniform` is a uniform draw from the action space.

        Elementwise: an action of several numbers comes number by number.
        """
        return action

    def record(self, reward: Array, key: Array) -> Array:
        """The reward noted down where the environment paid `reward`."""
        return reward

    def gradients(self, knowledge: Knowledge, receivers: Array) -> Array:
        """The gradient messages [receiver or 1, Byzantine sender, d] for `receivers` [r]; index K is a server."""
        return knowledge.truth()

    def parameters(self, knowledge: Knowledge, receivers: Array) -> Array:
        """The parameter messages [receiver or 1, Byzantine sender, d] for `receivers` [r]."""
        return knowledge.truth()

    def messages(self, phase: str, knowledge: Knowledge, receivers: Array) -> Array:
        """What `receivers` get in this phase: `gradients` or `parameters`."""
        hook = self.gradients if phase == "gradients" else self.parameters
        return hook(knowledge, receivers)


@dataclass(frozen=True)
class MessageAttack(Attack):
    """One lie for gradient messages, parameter messages, or both."""

    target: Target = "gradients"  # which messages lie

    def __post_init__(self) -> None:
        check_choice(self, "target", self.target, ("gradients", "parameters", "both"))

    @abstractmethod
    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        """The messages [receiver or 1, Byzantine sender, d]."""

    def gradients(self, knowledge: Knowledge, receivers: Array) -> Array:
        return knowledge.truth() if self.target == "parameters" else self.lie(knowledge, receivers)

    def parameters(self, knowledge: Knowledge, receivers: Array) -> Array:
        return knowledge.truth() if self.target == "gradients" else self.lie(knowledge, receivers)


@dataclass(frozen=True)
class NoAttack(Attack):
    """Byzantine agents that happen to behave."""


# Poisoned play


@dataclass(frozen=True)
class RandomAction(Attack):
    """Uniform actions in the Byzantine agents' episodes, honest otherwise (Fan et al. 2021)."""

    poisons_play: ClassVar[bool] = True

    def act(self, action: Array, uniform: Array) -> Array:
        return uniform


@dataclass(frozen=True)
class RewardFlip(Attack):
    """Rewards noted down with the opposite sign."""

    poisons_play: ClassVar[bool] = True

    def record(self, reward: Array, key: Array) -> Array:
        return -reward


@dataclass(frozen=True)
class RandomReward(Attack):
    """Rewards replaced by uniform noise in ±scale."""

    poisons_play: ClassVar[bool] = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, scale=self.scale)

    def record(self, reward: Array, key: Array) -> Array:
        return jax.random.uniform(key, reward.shape, reward.dtype, -self.scale, self.scale)


# False messages, the same to everyone


@dataclass(frozen=True)
class AvgZero(MessageAttack):
    """−(1/b) Σ_honest x: the plain mean of all vectors becomes zero (Jordan et al. 2024)."""

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        return knowledge.everyone_sends(-knowledge.mean() * (knowledge.num_honest / len(knowledge.byzantine)))


@dataclass(frozen=True)
class SignFlip(MessageAttack):
    """−scale × the sender's own true vector."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, scale=self.scale)

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        return -self.scale * knowledge.truth()


@dataclass(frozen=True)
class IPM(MessageAttack):
    """Inner-product manipulation: −ε × the honest mean (Xie et al. 2020)."""

    epsilon: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, epsilon=self.epsilon)

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        return knowledge.everyone_sends(-self.epsilon * knowledge.mean())


def alie_factor(num_agents: int, num_byzantine: int) -> float:
    """The largest z that hides among the honest (Baruch et al. 2019): Φ(z) = (K − f − s)/(K − f), s = ⌊K/2 + 1⌋ − f."""
    supporters = num_agents // 2 + 1 - num_byzantine
    share = (num_agents - num_byzantine - supporters) / (num_agents - num_byzantine)
    return NormalDist().inv_cdf(min(max(share, 1e-3), 1 - 1e-3))


@dataclass(frozen=True)
class ALIE(MessageAttack):
    """A little is enough: honest mean − z × honest standard deviation (Baruch et al. 2019). z None: from K and f."""

    z: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, z=self.z or 0.0)

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        z = alie_factor(knowledge.num_agents, len(knowledge.byzantine)) if self.z is None else self.z
        return knowledge.everyone_sends(knowledge.mean() - z * knowledge.deviation())


@dataclass(frozen=True)
class _LineSearch(MessageAttack):
    """honest mean + t × a direction, t being the factor (of both signs) that moves the rule in use furthest."""

    uses_rule: ClassVar[bool] = True
    largest: float = 10.0
    candidates: int = 16  # of each sign

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, largest=self.largest)
        check_count(self, candidates=self.candidates)

    @abstractmethod
    def direction(self, knowledge: Knowledge) -> Array: ...

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        rule = knowledge.rule
        if rule is None:
            raise ValueError(f"{self} searches against the rule in use: Knowledge needs a rule.")
        mean, direction = knowledge.mean(), self.direction(knowledge)
        victim = knowledge.honest[0]

        def damage(factor: Array) -> Array:
            received = knowledge.vectors.at[knowledge.byzantine].set(mean + factor * direction)
            keep = knowledge.num_agents - knowledge.num_byzantine
            cloud = Cloud.received(received, None, keep, victim)
            result = rule.combine(cloud, knowledge.num_byzantine, jax.random.fold_in(knowledge.key, 0))
            return jnp.sum(jnp.square(result - mean))

        sizes = self.largest / 2.0 ** jnp.arange(self.candidates, dtype=mean.dtype)
        factors = jnp.concatenate([-sizes, sizes])
        harm = lax.map(damage, factors)
        best = factors[jnp.argmax(jnp.where(jnp.isfinite(harm), harm, -1))]
        return knowledge.everyone_sends(mean + best * direction)


@dataclass(frozen=True)
class OptimalALIE(_LineSearch):
    """ALIE with the factor z that moves the rule in use furthest, of either sign."""

    def direction(self, knowledge: Knowledge) -> Array:
        return knowledge.deviation()


@dataclass(frozen=True)
class OptimalIPM(_LineSearch):
    """IPM with the factor ε that moves the rule in use furthest, of either sign."""

    def direction(self, knowledge: Knowledge) -> Array:
        return knowledge.mean()


def _principal_axis(around_mean: Array) -> Array:
    """Unit direction [d] in which the rows [h, d] spread most."""
    _, directions = jnp.linalg.eigh(dot(around_mean, around_mean.T))
    axis = dot(directions[:, -1], around_mean)
    return axis / jnp.maximum(jnp.linalg.norm(axis), 1e-30)


@dataclass(frozen=True)
class Mimic(MessageAttack):
    """Every attacker repeats one honest agent's vector (Karimireddy et al. 2022).

    agent: the position among the honest agents; None picks the one furthest out along their direction of largest
    spread, which over-weighs an unusual agent most.
    """

    agent: int | None = None

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        if self.agent is not None and not 0 <= self.agent < knowledge.num_honest:
            raise ValueError(f"{self}: agent must be 0 to {knowledge.num_honest - 1}, an honest agent's position.")
        if self.agent is not None:
            chosen = jnp.asarray(self.agent)
        else:
            around_mean = knowledge.honest_around_mean()
            chosen = jnp.argmax(jnp.abs(dot(around_mean, _principal_axis(around_mean))))
        return knowledge.everyone_sends(knowledge.vectors[knowledge.honest[chosen]])


@dataclass(frozen=True)
class MinMax(MessageAttack):
    """honest mean + γp, the largest γ with max_i ‖m − x_i‖ ≤ max_ij ‖x_i − x_j‖ (Shejwalkar & Houmansadr 2021).

    p: "unit" −mean/‖mean‖, "std" −standard deviation, "sign" −sign(mean). γ is found in closed form.
    """

    direction: Literal["unit", "std", "sign"] = "unit"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "direction", self.direction, ("unit", "std", "sign"))

    def _step(self, distances: Array, square: Array, slope: Array, curvature: Array) -> Array:
        """γ, from ‖m − x_i‖² = square_i + 2γ slope_i + γ² curvature."""
        limit = jnp.max(distances)
        return jnp.min(_larger_root(square - limit, slope, curvature))

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        mean, around_mean = knowledge.mean(), knowledge.honest_around_mean()
        if self.direction == "unit":
            step = -mean / jnp.maximum(jnp.linalg.norm(mean), 1e-30)
        else:
            step = -knowledge.deviation() if self.direction == "std" else -jnp.sign(mean)
        gram = dot(around_mean, around_mean.T)
        square, slope = jnp.diagonal(gram), -dot(around_mean, step)
        size = self._step(squared_distances(gram), square, slope, jnp.sum(jnp.square(step)))
        return knowledge.everyone_sends(mean + size * step)


def _larger_root(constant: Array, slope: Array, curvature: Array) -> Array:
    """The larger γ with curvature γ² + 2 slope γ + constant = 0; 0 where there is no direction to go."""
    root = jnp.sqrt(jnp.maximum(jnp.square(slope) - curvature * constant, 0))
    return jnp.where(curvature > 0, jnp.maximum((root - slope) / jnp.maximum(curvature, 1e-30), 0), 0)


@dataclass(frozen=True)
class MinSum(MinMax):
    """As MinMax, with Σ_i ‖m − x_i‖² ≤ max_i Σ_j ‖x_i − x_j‖² instead (Shejwalkar & Houmansadr 2021)."""

    def _step(self, distances: Array, square: Array, slope: Array, curvature: Array) -> Array:
        limit = jnp.max(jnp.sum(distances, axis=1))
        return _larger_root(jnp.sum(square) - limit, jnp.sum(slope), len(square) * curvature)


@dataclass(frozen=True)
class Zero(MessageAttack):
    """Zeros: an agent that does not contribute."""

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        return jnp.zeros_like(knowledge.truth())


@dataclass(frozen=True)
class NonFinite(MessageAttack):
    """The true vector with one entry overwritten: NaN from the first attacker, +Inf, −Inf from the next, and so on."""

    target: Target = "both"

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        truth = knowledge.truth()
        poison = jnp.asarray([jnp.nan, jnp.inf, -jnp.inf])[jnp.arange(truth.shape[1]) % 3]
        return truth.at[:, :, 0].set(poison)


@dataclass(frozen=True)
class Silent(MessageAttack):
    """Nothing is sent."""

    target: Target = "both"

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        return jnp.full_like(knowledge.truth(), jnp.nan)


# Equivocation: different receivers are told different things


def _first_half(knowledge: Knowledge, receivers: Array) -> Array:
    """Which receivers [r] belong to the first half of the agents, shaped to be broadcast over messages."""
    return (receivers < (knowledge.num_agents + 1) // 2)[:, None, None]


@dataclass(frozen=True)
class LargeNoise(MessageAttack):
    """Every coordinate i.i.d. U(−scale, scale), a fresh draw per receiver (Jordan et al. 2024)."""

    needs_key: ClassVar[bool] = True
    target: Target = "both"
    scale: float = 1000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, scale=self.scale)

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        _, *shape = knowledge.truth().shape

        def draw(receiver: Array) -> Array:
            key = jax.random.fold_in(knowledge.key, receiver)
            return jax.random.uniform(key, shape, knowledge.vectors.dtype, -self.scale, self.scale)

        return jax.vmap(draw)(receivers)


@dataclass(frozen=True)
class Equivocate(MessageAttack):
    """The truth to the first half of the receivers, −scale × the truth to the others."""

    target: Target = "both"
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, scale=self.scale)

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        return jnp.where(_first_half(knowledge, receivers), 1, -self.scale) * knowledge.truth()


@dataclass(frozen=True)
class Dissensus(MessageAttack):
    """Keeps receivers apart: to receiver k, x_k − (scale/b) Σ_honest (x_j − x_k) (He et al. 2022, complete graph).

    With scale 1, plain averaging leaves every receiver where it is.
    """

    target: Target = "parameters"
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, scale=self.scale)

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        at_agent = (receivers < knowledge.num_agents)[:, None]  # a server has no vector: the honest mean stands for it
        own = jnp.where(at_agent, knowledge.vectors.at[receivers].get(mode="clip"), knowledge.mean())
        pull = knowledge.num_honest * (knowledge.mean() - own)
        num_attackers = len(knowledge.byzantine)
        message = own - self.scale / num_attackers * pull
        return jnp.broadcast_to(message[:, None], (len(receivers), num_attackers, message.shape[-1]))


@dataclass(frozen=True)
class MDAFooling(MessageAttack):
    """Lies that least-diameter selection keeps: as far out as fits, one way for half the receivers, back for the rest.

    From the mean of the least-diameter subset S of honest vectors that leaves room for the lies among the K − f kept,
    the largest step, along the direction in which the honest vectors spread most, that stays within S's diameter of S.
    """

    target: Target = "both"
    node_limit: int = 1_000_000

    def lie(self, knowledge: Knowledge, receivers: Array) -> Array:
        around_mean = knowledge.honest_around_mean()
        gram = dot(around_mean, around_mean.T)
        distances = squared_distances(gram)
        size = max(1, knowledge.num_honest - knowledge.num_byzantine)
        everyone = jnp.ones(len(gram), bool)
        members = least_diameter_subset(distances, everyone, size, self.node_limit)
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
        there, back = middle + step(1.0) * axis, middle + step(-1.0) * axis
        lies = jnp.where(_first_half(knowledge, receivers), there, back)
        return jnp.broadcast_to(lies, (len(receivers), len(knowledge.byzantine), lies.shape[-1]))


# Who is Byzantine


@dataclass(frozen=True)
class FixedSet(Component):
    """The same Byzantine agents in every iteration: `members`, or the last f agents."""

    members: tuple[int, ...] | None = None

    def __call__(self, num_agents: int, num_byzantine: int, iteration: Array | int, key: Array) -> Array:
        """Indices [f] of the Byzantine agents in this iteration."""
        members = self.members
        if members is None:
            return jnp.arange(num_agents - num_byzantine, num_agents)
        if not len(set(members)) == len(members) == num_byzantine or not all(0 <= m < num_agents for m in members):
            raise ValueError(
                f"FixedSet: members must be {num_byzantine} different agents of 0 to {num_agents - 1}; got {members}."
            )
        return jnp.asarray(sorted(members), int)


@dataclass(frozen=True)
class RotatingSet(Component):
    """f agents drawn anew every `period` iterations."""

    period: int = 1

    def __post_init__(self) -> None:
        check_count(self, period=self.period)

    def __call__(self, num_agents: int, num_byzantine: int, iteration: Array | int, key: Array) -> Array:
        """Indices [f] of the Byzantine agents in this iteration."""
        drawn = jax.random.permutation(jax.random.fold_in(key, iteration // self.period), num_agents)
        return jnp.sort(drawn[:num_byzantine])


ByzantineSet = FixedSet | RotatingSet
