"""Policy-gradient estimates from episodes: REINFORCE, GPOMDP, importance weights, the PAGE correction.

Every estimate here is Σ_t c_t ∇log π(a_t|s_t), averaged over episodes. So an estimator is a rule for the coefficients
c [agent, episode, time], and one function takes the gradients.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.learning.policies import Policy, Weights
from byzpg.learning.rollouts import Clock, Episodes
from byzpg.robust.components import Component, check_choice, check_positive


@dataclass(frozen=True)
class Estimator(Component):
    """How rewards become the coefficients of ∇log π.

    baseline "leave-one-out": the mean over the batch's other episodes (at the same step, for GPOMDP); since it does not
    depend on the episode it is taken from, the estimate stays unbiased.
    """

    baseline: Literal["none", "leave-one-out"] = "none"

    def __post_init__(self) -> None:
        check_choice(self, "baseline", self.baseline, ("none", "leave-one-out"))

    def check(self, num_episodes: int) -> None:
        if self.baseline == "leave-one-out" and num_episodes < 2:
            raise ValueError(
                f"{self} compares episodes with each other: batches must hold at least 2, got {num_episodes}."
            )

    def _centred(self, values: Array) -> Array:
        """Values [agent, episode, ...] minus their baseline."""
        if self.baseline == "none":
            return values
        # x_i − Σ_{j≠i} x_j/(n − 1) = n/(n − 1) (x_i − mean)
        num_episodes = values.shape[1]
        return num_episodes / (num_episodes - 1) * (values - jnp.mean(values, axis=1, keepdims=True))

    @abstractmethod
    def coefficients(self, rewards: Array, discount: float, log_weights: Array | None) -> Array:
        """c [agent, episode, time] from rewards, 0 after the end; `log_weights` [agent, episode, time], where given,
        are the logarithms of the weights of the steps up to each time."""


@dataclass(frozen=True)
class REINFORCE(Estimator):
    """g(τ|θ) = (Σ_h ∇log π(a_h|s_h)) (Σ_h γ^h r_h − b) (Williams 1992)."""

    def coefficients(self, rewards: Array, discount: float, log_weights: Array | None) -> Array:
        total = self._centred(jnp.sum(rewards * _discounts(rewards, discount), axis=2))
        if log_weights is not None:
            total = _weighted(total, log_weights[:, :, -1])
        return jnp.broadcast_to(total[:, :, None], rewards.shape)


@dataclass(frozen=True)
class GPOMDP(Estimator):
    """g(τ|θ) = Σ_t ∇log π(a_t|s_t) Σ_{h≥t} (γ^h r_h − b_h) (Baxter & Bartlett 2001)."""

    def coefficients(self, rewards: Array, discount: float, log_weights: Array | None) -> Array:
        # The baseline goes on after an episode's end: stopping it there would make it depend on the episode.
        gains = self._centred(rewards * _discounts(rewards, discount))
        if log_weights is not None:
            gains = _weighted(gains, log_weights)
        return lax.cumsum(gains, axis=2, reverse=True)


def _weighted(gains: Array, log_weights: Array) -> Array:
    # What is 0 stays 0, also under a weight that has overflowed.
    return jnp.where(gains == 0, 0, gains * jnp.exp(log_weights))


def _discounts(rewards: Array, discount: float) -> Array:
    return discount ** jnp.arange(rewards.shape[2], dtype=rewards.dtype)


@dataclass(frozen=True)
class ImportanceWeights(Component):
    """ω = p(τ|θ_{t−1})/p(τ|θ_t) = exp Σ_h [log π_{θ_{t−1}} − log π_{θ_t}], always in log space.

    mode "trajectory": one weight per episode (the paper); "per-decision": the weight at reward h uses steps ≤ h only,
    which keeps GPOMDP unbiased with less variance. cap c: min(ω, c), biased but bounded. floor ε > 0: p(τ|θ_t) + ε in
    the denominator, as in the published script, where 1e-9 makes ω vanish for long episodes.
    """

    mode: Literal["trajectory", "per-decision"] = "trajectory"
    cap: float | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_choice(self, "mode", self.mode, ("trajectory", "per-decision"))
        if self.cap is not None:
            check_positive(self, cap=self.cap)
        if self.floor:
            check_positive(self, floor=self.floor)

    def log_weights(self, before: Array, now: Array) -> tuple[Array, "Health"]:
        """log ω [agent, episode, time] from log π_{θ_{t−1}} and log π_{θ_t} of every step, and how healthy they are."""

        def up_to_here(steps: Array) -> Array:
            if self.mode == "per-decision":
                return jnp.cumsum(steps, axis=2)
            return jnp.broadcast_to(jnp.sum(steps, axis=2, keepdims=True), steps.shape)

        plain = up_to_here(before - now)
        if self.floor:  # log(p + ε) = log p + log(1 + ε/p)
            plain -= jax.nn.softplus(log(self.floor) - up_to_here(now))
        whole = plain[:, :, -1]
        capped = plain if self.cap is None else jnp.minimum(plain, log(self.cap))
        # Both sums of the effective sample size share one factor, so that neither overflows.
        relative = jnp.exp(capped[:, :, -1] - jnp.max(capped[:, :, -1], axis=1, keepdims=True))
        sample = jnp.square(jnp.sum(relative, axis=1)) / jnp.sum(jnp.square(relative), axis=1) / relative.shape[1]
        limit = jnp.inf if self.cap is None else log(self.cap)
        health = Health(
            largest=jnp.exp(jnp.max(whole, axis=1)),
            effective_sample=sample,
            capped=jnp.mean(whole > limit, axis=1, dtype=whole.dtype),
        )
        return capped, health


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Health:
    """How far the importance weights ω of a batch's whole episodes have degenerated, per agent."""

    largest: Array  # max ω, before the cap
    effective_sample: Array  # (Σω)²/(BΣω²) after the cap, 1 when all weights are equal
    capped: Array  # fraction of ω above the cap

    @classmethod
    def perfect(cls, num_agents: int) -> "Health":
        """Where no weight is needed, all are 1."""
        return cls(jnp.ones(num_agents), jnp.ones(num_agents), jnp.zeros(num_agents))


def _span(clock: Clock, values: Array, span: Array) -> Array:
    """One span of values [agent, episode, time, ...] as [agent, episode × time, ...], for products of matrices."""
    here = lax.dynamic_slice_in_dim(values, span * clock.span, clock.span, axis=2)
    return here.reshape(len(here), -1, *here.shape[3:])


def log_probabilities(policy: Policy, parameters: Array, episodes: Episodes, clock: Clock) -> Array:
    """log π_θ(a|s) [agent, episode, time] of each agent's parameters [agent, d]; 0 after the end."""
    weights = jax.vmap(policy.unflatten)(parameters)

    def fill(span: Array, filled: Array) -> Array:
        def of_agent(weights: Weights, observations: Array, actions: Array) -> Array:
            return policy.log_probability(weights, policy.outputs(weights, observations), actions)

        here = jax.vmap(of_agent)(
            weights, _span(clock, episodes.observations, span), _span(clock, episodes.actions, span)
        )
        here = here.reshape(*filled.shape[:2], clock.span)
        return lax.dynamic_update_slice_in_dim(filled, here, span * clock.span, axis=2)

    filled = lax.fori_loop(0, _num_spans(episodes, clock), fill, jnp.zeros_like(episodes.rewards))
    return jnp.where(jnp.arange(clock.padded) < episodes.lengths[..., None], filled, 0)


def _num_spans(episodes: Episodes, clock: Clock) -> Array:
    return -(-episodes.steps // clock.span)


def weighted_scores(policy: Policy, parameters: Array, episodes: Episodes, coefficients: Array, clock: Clock) -> Array:
    """Σ_t c_t ∇log π(a_t|s_t), averaged over each agent's episodes, without what lies past their ends: [set, agent, d].

    Several sets of parameters [set, agent, d] and coefficients [set, agent, episode, time] share the episodes.
    """
    num_sets, num_agents, _ = parameters.shape
    coefficients = jnp.where(jnp.arange(clock.padded) < episodes.lengths[..., None], coefficients, 0)
    weights = jax.vmap(jax.vmap(policy.unflatten))(parameters)

    def total(weights: Weights, observations: Array, actions: Array, coefficients: Array) -> Array:
        return jnp.sum(coefficients * policy.log_probability(weights, policy.outputs(weights, observations), actions))

    scores = jax.vmap(jax.vmap(jax.grad(total)), (0, None, None, 0))

    def add(span: Array, sums: Weights) -> Weights:
        seen, taken = _span(clock, episodes.observations, span), _span(clock, episodes.actions, span)
        here = scores(weights, seen, taken, jax.vmap(partial(_span, clock), (0, None))(coefficients, span))
        return jax.tree.map(jnp.add, sums, here)

    sums = lax.fori_loop(0, _num_spans(episodes, clock), add, jax.tree.map(jnp.zeros_like, weights))
    flat = [part.reshape(num_sets, num_agents, -1) for part in jax.tree.leaves(sums)]
    return jnp.concatenate(flat, axis=2) / episodes.lengths.shape[1]


def gradient(
    policy: Policy, parameters: Array, episodes: Episodes, estimator: Estimator, discount: float, clock: Clock
) -> Array:
    """(1/N) Σ_i g(τ_i|θ) [agent, d]."""
    coefficients = estimator.coefficients(episodes.rewards, discount, None)
    return weighted_scores(policy, parameters[None], episodes, coefficients[None], clock)[0]


def corrected_gradient(
    policy: Policy,
    parameters: Array,
    previous: Array,
    direction: Array,
    episodes: Episodes,
    estimator: Estimator,
    importance: ImportanceWeights,
    gate: float | Literal["health"],
    discount: float,
    clock: Clock,
) -> tuple[Array, Health]:
    """The PAGE estimate of a small batch [agent, d], and the health of its weights.

    ṽ = (1/B) Σ g(τ_i|θ_t) + β (v̂_{t−1} − (1/B) Σ ω_i g(τ_i|θ_{t−1})), with `previous` = θ_{t−1}, `direction` = v̂_{t−1};
    the gate β is a number (1: the paper), or "health": the effective sample size of ω.
    """
    before = log_probabilities(policy, previous, episodes, clock)
    log_weights, health = importance.log_weights(before, episodes.log_probabilities)
    if gate == 0:  # weights that have overflowed, times 0, would not be 0
        return gradient(policy, parameters, episodes, estimator, discount, clock), health
    coefficients = [estimator.coefficients(episodes.rewards, discount, weights) for weights in (None, log_weights)]
    both = jnp.stack([parameters, previous])
    here, before = weighted_scores(policy, both, episodes, jnp.stack(coefficients), clock)
    opened = health.effective_sample[:, None] if gate == "health" else gate
    return here + opened * (direction - before), health
