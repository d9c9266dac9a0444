"""Attacks with many numbers, which `byzpg audit` searches for the values that do most harm.

All numbers of `Adaptive` are data to a compiled program, so that many candidates train side by side in one program.
The two attacks on play have few, and are code.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from byzpg.robust.attacks import Attack, Knowledge, MessageAttack
from byzpg.robust.components import check_finite

__all__ = ["Adaptive", "BonusForAction", "PoisonedReward"]

DRIFT_SEED = 7  # of the direction that attackers keep to in all iterations


def _check_share(component: object, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{type(component).__name__}: {name} must lie between 0 and 1, got {value}.")


@dataclass(frozen=True)
class Adaptive(MessageAttack):
    """A family of attacks on messages, of which many known ones are members: what is sent, when, and to whom.

    Let x̄ be the honest mean, σ the honest standard deviation in each coordinate, s = ‖σ‖ the honest spread, u a unit
    vector that never changes, n noise of length about 1, and x_j what attacker j would send if it were honest. It sends

        x̄ + w · (−pull · x̄ − against · s · x̄/‖x̄‖ − hide · σ + drift · s · u + noise · s · n + own · (x_j − x̄)),

    where w is `critic` for the gradients of a critic and for statistics, and `actor` for all else. `pull` = 1 + ε is
    IPM, and 1 + h/b is AvgZero with h honest agents and b attackers; `hide` = z is ALIE; MinMax and MinSum choose an
    `against`. A drift accumulates in the histories of agents with momentum.

    Args:
        pull: How far to go against the honest mean, in units of it.
        against: How far to go against the honest mean, in units of the honest spread.
        hide: How many standard deviations to go below the honest mean in every coordinate.
        drift: How far to go in the direction u, in units of the honest spread.
        noise: How far to go in a random direction, another one for every attacker, round and receiver.
        own: How much of its own deviation an attacker keeps, so that attackers look less alike.
        actor: The factor w for the policy, or for agents without a critic.
        critic: The factor w for the critic's gradients and for statistics; parameters are sent whole, with `actor`.
        start: The iteration in which attackers strike first; before it they are honest.
        period: Iterations from one strike to the next.
        duty: The share of a period in which they strike.
        silent: Whether attackers send nothing between strikes, as members that come and go: 1 for yes, 0 for no, where
            they are honest.
        reach: The share of receivers, in their order, that get this message, if attackers equivocate.
        mirror: What the others get, if attackers equivocate: x̄ plus this factor times the deviation from x̄.
        equivocates: Whether receivers may get different messages.

    Examples:
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(Adaptive(pull=1.5).gradients(knowledge, jnp.array([0]))[0, 0])
        [-1.  -1.5]
        >>> print(Adaptive(pull=1.5, start=10.0).gradients(knowledge, jnp.array([0]))[0, 0])
        [9. 9.]
    """

    numbers: ClassVar[tuple[str, ...]] = (
        "pull",
        "against",
        "hide",
        "drift",
        "noise",
        "own",
        "actor",
        "critic",
        "start",
        "period",
        "duty",
        "silent",
        "reach",
        "mirror",
    )
    zero_is_data: ClassVar[bool] = True
    needs_key: ClassVar[bool] = True

    pull: float = 0.0
    against: float = 0.0
    hide: float = 0.0
    drift: float = 0.0
    noise: float = 0.0
    own: float = 0.0
    actor: float = 1.0
    critic: float = 1.0
    start: float = 0.0
    period: float = 1.0
    duty: float = 1.0
    silent: float = 0.0
    reach: float = 1.0
    mirror: float = 1.0
    equivocates: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Whole numbers too are data: as text they are read as int.
        for name in self.numbers:
            object.__setattr__(self, name, float(getattr(self, name)))
        check_finite(self, **{name: getattr(self, name) for name in self.numbers})
        _check_share(self, duty=self.duty, silent=self.silent, reach=self.reach)
        if self.period < 1:
            raise ValueError(f"Adaptive: period must be at least one iteration, got {self.period}.")

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        mean, deviation, truth = knowledge.mean(), knowledge.deviation(), knowledge.truth()
        _, num_attackers, dimension = truth.shape
        spread, dtype = jnp.linalg.norm(deviation), truth.dtype
        length = jnp.sqrt(jnp.asarray(dimension, dtype))
        direction = jax.random.rademacher(jax.random.key(DRIFT_SEED), (dimension,), dtype) / length

        def noise(receiver: Array) -> Array:
            key = jax.random.fold_in(knowledge.key, receiver)
            return jax.random.normal(key, (num_attackers, dimension), dtype) / length

        to = receivers if self.equivocates else receivers[:1] * 0
        unit = mean / jnp.maximum(jnp.linalg.norm(mean), 1e-30)
        push = -self.pull * mean - self.hide * deviation + spread * (self.drift * direction - self.against * unit)
        push = push + self.noise * spread * jax.vmap(noise)(to) + self.own * (truth - mean)
        if self.equivocates:
            reached = to < jnp.round(self.reach * knowledge.num_agents)
            push = jnp.where(reached, 1, self.mirror)[:, None, None] * push
        message = mean + (self.actor if knowledge.block == 0 else self.critic) * push
        since = knowledge.iteration - self.start
        strikes = (since >= 0) & (jnp.mod(since, self.period) < self.duty * self.period)
        between = jnp.where((since >= 0) & (self.silent > 0.5), jnp.nan, truth)
        return jnp.where(strikes, message, between)


@dataclass(frozen=True)
class PoisonedReward(Attack):
    """Attackers multiply some of the rewards that they record: reward poisoning with a budget.

    Args:
        factor: What they multiply a reward by.
        share: The budget: the share of steps, drawn at random, whose rewards they change.

    Examples:
        >>> print(PoisonedReward(factor=-2.0, share=1.0).record(jnp.array([1.0, -2.0]), jax.random.key(0)))
        [-2.  4.]
    """

    poisons_play: ClassVar[bool] = True
    factor: float = -1.0
    share: float = 0.5

    def __post_init__(self) -> None:
        check_finite(self, factor=self.factor)
        _check_share(self, share=self.share)

    def record(self, reward: Array, key: Array) -> Array:
        return jnp.where(jax.random.uniform(key, reward.shape) < self.share, self.factor * reward, reward)


@dataclass(frozen=True)
class BonusForAction(Attack):
    """Attackers record a bonus for the action that they want the federation to learn.

    Args:
        action: The number of the action; on tasks with continuous actions, the value that each of their numbers is to
            have, and the bonus falls with the squared distance d² from it as exp(−d²).
        bonus: The bonus.

    Examples:
        >>> rewards, actions = jnp.array([1.0, 1.0]), jnp.array([0, 1])
        >>> print(BonusForAction(1, bonus=5.0).record_step(rewards, actions, jax.random.key(0)))
        [1. 6.]
    """

    poisons_play: ClassVar[bool] = True
    action: float = 0.0
    bonus: float = 1.0

    def __post_init__(self) -> None:
        check_finite(self, action=self.action, bonus=self.bonus)

    def record_step(self, reward: Array, action: Array, key: Array) -> Array:
        if jnp.issubdtype(action.dtype, jnp.integer):
            match = action == self.action
        else:
            match = jnp.exp(-jnp.sum(jnp.square(action - self.action), axis=-1))
        return reward + self.bonus * match
