"""Proximal policy optimization (Schulman et al. 2017): advantages from a critic, and the clipped objective.

Functions are written for one agent; callers `vmap`.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.learning.gradients import Number
from byzpg.learning.policies import Critic, Policy
from byzpg.robust.components import Component, check_count, check_finite, check_positive

# Added to standard deviations and norms by which something is divided.
TINY = 1e-8
# An observation's standard deviation counts as at least this: one that was constant so far may still change.
LEAST_STD = 0.01
# The weight of what the divergence of policies exceeds its limit by: for the policy, nothing else counts beyond it.
BEYOND_LARGEST_KL = 100.0


@dataclass(frozen=True)
class PPO(Component):
    """The options of PPO.

    Attributes:
        environments: The number E of environments of each agent.
        segment: The number S of steps in each environment per iteration.
        epochs: How often an iteration goes through its E · S steps.
        minibatches: The number of equal parts, each of one update, into which an epoch divides them at random.
        exchange_every: The number of updates between two exchanges of messages. With 1, agents exchange gradients. With
            more, each agent takes steps of its own, and they exchange the change of their parameters.
        gae_lambda: λ of generalized advantage estimation, in [0, 1] (Schulman et al. 2016).
        clip: How far a probability may move from that of the policy that played, relative to it, before it gains
            nothing more.
        largest_kl: The Kullback–Leibler divergence from the policy that played, in nats, beyond which an agent's
            gradient leads back (Wang et al. 2019). It is estimated from the steps of a minibatch, and is no hard limit:
            other agents move the policy as well. None: gradients never lead back.
        entropy: The weight of the entropy bonus.
        value: The weight of the critic's loss.
        reward_scale: The factor of rewards: advantages are normalized, but the critic has to reach the returns.
        largest_norm: The norm to which the gradient of the policy and that of the critic are cut before they are sent.
        initial_log_std: The log standard deviation of continuous actions in θ_0. With 0, the first actions are drawn
            with standard deviation 1.
        normalize_observations: Whether policy and critic see observations with mean 0 and standard deviation 1. The
            statistics are part of θ, and agents aggregate and agree on them as on the rest. Iteration 0 only measures
            them.
    """

    numbers: ClassVar[tuple[str, ...]] = (
        "gae_lambda",
        "clip",
        "largest_kl",
        "entropy",
        "value",
        "reward_scale",
        "largest_norm",
    )

    environments: int = 8
    segment: int = 64
    epochs: int = 4
    minibatches: int = 4
    exchange_every: int = 1
    gae_lambda: float = 0.95
    clip: float = 0.2
    largest_kl: float | None = None
    entropy: float = 0.0
    value: float = 0.5
    reward_scale: float = 1.0
    largest_norm: float = 0.5
    initial_log_std: float = 0.0
    normalize_observations: bool = False

    def __post_init__(self) -> None:
        counts = ("environments", "segment", "epochs", "minibatches", "exchange_every")
        check_count(self, **{name: getattr(self, name) for name in counts})
        if self.num_steps % self.minibatches:
            raise ValueError(
                f"PPO: minibatches must divide environments × segment = {self.num_steps} steps, got {self.minibatches}."
            )
        if self.num_updates % self.exchange_every:
            raise ValueError(
                f"PPO: exchange_every must divide epochs × minibatches = {self.num_updates} updates, got "
                f"{self.exchange_every}."
            )
        given = {name: each for name in self.numbers if (each := getattr(self, name)) is not None}
        check_finite(self, **given)
        if not abs(self.initial_log_std) <= 20:  # far inside what float32 can hold of its exponential
            raise ValueError(f"PPO: initial_log_std must lie in [-20, 20], got {self.initial_log_std}.")
        if not 0 <= self.gae_lambda <= 1:
            raise ValueError(f"PPO: gae_lambda must lie in [0, 1], got {self.gae_lambda}.")
        positive = ("clip", "largest_kl", "reward_scale", "largest_norm")
        check_positive(self, **{name: given[name] for name in positive if name in given})
        for name in ("entropy", "value"):
            if getattr(self, name) < 0:
                raise ValueError(f"PPO: {name} must not be negative, got {getattr(self, name)}.")

    @property
    def num_steps(self) -> int:
        """Steps per iteration and agent."""
        return self.environments * self.segment

    @property
    def num_updates(self) -> int:
        """Updates per iteration."""
        return self.epochs * self.minibatches

    @property
    def num_exchanges(self) -> int:
        """Exchanges of messages per iteration."""
        return self.num_updates // self.exchange_every


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Steps:
    """What PPO learns from: arrays [step, ...]."""

    observations: Array
    actions: Array
    log_probabilities: Array  # of the policy that played
    advantages: Array
    targets: Array  # of the critic


def generalized_advantages(
    rewards: Array,
    values: Array,
    following: Array,
    terminated: Array,
    ended: Array,
    *,
    discount: Number,
    gae_lambda: Number,
) -> Array:
    """A_t = δ_t + γλ A_{t+1}, with δ_t = r_t + γ V(s_{t+1}) − V(s_t); all arrays are [environment, time].

    An episode that the task ended has no value afterwards; one that was cut off has that of the state it was left in.
    No advantage reaches beyond the end of an episode or of the segment.
    """
    errors = rewards + discount * jnp.where(terminated, 0, following) - values

    def back(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        error, ended = now
        advantage = error + discount * gae_lambda * jnp.where(ended, 0, later)
        return advantage, advantage

    _, advantages = lax.scan(back, jnp.zeros_like(rewards[:, 0]), (errors.T, ended.T), reverse=True)
    return advantages.T


def normalized(values: Array) -> Array:
    """The values, shifted and scaled to mean 0 and standard deviation 1."""
    return (values - jnp.mean(values)) / (jnp.std(values) + TINY)


def statistics(observations: Array) -> Array:
    """The mean of each feature of observations [..., feature], then the logarithm of each standard deviation [2n]."""
    values = observations.reshape(-1, observations.shape[-1])
    return jnp.concatenate([jnp.mean(values, axis=0), jnp.log(jnp.maximum(jnp.std(values, axis=0), LEAST_STD))])


def objective(policy: Policy, critic: Critic, parameters: Array, steps: Steps, options: PPO) -> Array:
    """What an update increases, at parameters [d] of policy and critic: the mean over steps of

    min(r A, clip(r, 1 − ε, 1 + ε) A) + c_e H(π(·|s)) − c_v (V(s) − R)²/2, with r = π(a|s)/π_played(a|s).

    With `largest_kl`, less 100 times what D = mean(r − 1 − log r) exceeds it by. D is an estimate of KL(π_played ‖ π)
    that is unbiased and never negative.
    """
    of_policy, of_critic = jnp.split(parameters, [policy.dimension])
    actor, weights = policy.unflatten(of_policy), critic.unflatten(of_critic)
    outputs = policy.outputs(actor, steps.observations)
    log_ratios = policy.log_probability(actor, outputs, steps.actions) - steps.log_probabilities
    ratios = jnp.exp(log_ratios)
    clipped = jnp.clip(ratios, 1 - options.clip, 1 + options.clip)
    gains = jnp.minimum(ratios * steps.advantages, clipped * steps.advantages)
    errors = critic.values(weights, steps.observations) - steps.targets
    bonus = options.entropy * policy.entropy(actor, outputs)
    gained = jnp.mean(gains + bonus - options.value * 0.5 * jnp.square(errors))
    if options.largest_kl is None:
        return gained
    divergence = jnp.mean(jnp.expm1(log_ratios) - log_ratios)
    return gained - BEYOND_LARGEST_KL * jnp.maximum(divergence - options.largest_kl, 0)


def shortened(vector: Array, largest_norm: Number) -> Array:
    """The vector, cut to a norm."""
    return vector * jnp.minimum(1, largest_norm / (jnp.linalg.norm(vector) + TINY))
