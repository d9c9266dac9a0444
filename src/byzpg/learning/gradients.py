"""Policy-gradient estimates from episodes: REINFORCE, GPOMDP, and the corrections of PAGE's small batches.

Every estimate is Σ_t c_t ∇log π(a_t|s_t), averaged over episodes. An estimator therefore only computes the coefficients
c [agent, episode, time]; one function, `weighted_scores`, computes the gradients for all estimators.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from math import log
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.envs import Enumerable
from byzpg.learning.policies import Policy, Weights
from byzpg.learning.rollouts import Clock, Episodes
from byzpg.robust.components import Component, by_platform, check_choice, check_positive

# The purpose of a random number under an agent's key, beside those of rollouts.
PLACE = 5
# Numbers that a CPU's cache holds. Up to there, one operation on all agents is faster than a loop over them.
IN_CACHE = 2**20

# One number for all agents, or one per agent [agent].
Number = float | Array


def per_agent(number: Number, num_axes: int) -> Array:
    """The number in a shape that broadcasts over arrays of `num_axes` axes, the first of which is [agent]."""
    return jnp.reshape(jnp.asarray(number), (-1,) + (1,) * (num_axes - 1))


def _log(number: Number) -> Number:
    """The logarithm, also of a number that float32 cannot hold."""
    return jnp.log(number) if isinstance(number, Array) else log(number)


@dataclass(frozen=True)
class Estimator(Component):
    """How rewards become the coefficients of ∇log π.

    Attributes:
        baseline: "none", or "leave-one-out": subtract the mean over the other episodes of the batch (at the same step,
            for GPOMDP). This mean does not depend on the episode itself, so the estimate stays unbiased.
    """

    baseline: Literal["none", "leave-one-out"] = "none"

    def __post_init__(self) -> None:
        check_choice(self, "baseline", self.baseline, ("none", "leave-one-out"))

    def check(self, num_episodes: int) -> None:
        """Raise a ValueError if batches of this size are too small."""
        if self.baseline == "leave-one-out" and num_episodes < 2:
            raise ValueError(
                f"{self} compares the episodes of a batch, so a batch must hold at least 2, got {num_episodes}."
            )

    def _centred(self, values: Array) -> Array:
        """Values [agent, episode, ...] minus their baseline."""
        if self.baseline == "none":
            return values
        # x_i − Σ_{j≠i} x_j/(n − 1) = n/(n − 1) (x_i − mean)
        num_episodes = values.shape[1]
        return num_episodes / (num_episodes - 1) * (values - jnp.mean(values, axis=1, keepdims=True))

    @abstractmethod
    def coefficients(self, rewards: Array, discount: Number, weights: Array | None) -> Array:
        """Compute the coefficients c [agent, episode, time].

        Args:
            rewards: [agent, episode, time], 0 after an episode's end.
            discount: γ, one number or one per agent [agent].
            weights: The weight of the steps up to each time [agent, episode, time]. None: all weights are 1.
        """


@dataclass(frozen=True)
class REINFORCE(Estimator):
    """g(τ|θ) = (Σ_h ∇log π(a_h|s_h)) (Σ_h γ^h r_h − b) (Williams 1992)."""

    def coefficients(self, rewards: Array, discount: Number, weights: Array | None) -> Array:
        total = self._centred(jnp.sum(rewards * _discounts(rewards, discount), axis=2))
        if weights is not None:
            total = _weighted(total, weights[:, :, -1])
        return jnp.broadcast_to(total[:, :, None], rewards.shape)


@dataclass(frozen=True)
class GPOMDP(Estimator):
    """g(τ|θ) = Σ_t ∇log π(a_t|s_t) Σ_{h≥t} λ^{h−t} (γ^h r_h − b_h) (Baxter & Bartlett 2001).

    Attributes:
        baseline: As for all estimators.
        trace_decay: λ, in (0, 1]: what an action counts for a reward one step later, relative to one at once. None:
            no decay, as if λ = 1. Below 1, estimates are biased, and vary less where episodes are long.
    """

    numbers: ClassVar[tuple[str, ...]] = ("trace_decay",)

    trace_decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace_decay is not None and not 0 < self.trace_decay <= 1:
            raise ValueError(f"GPOMDP: trace_decay must lie in (0, 1], got {self.trace_decay}.")

    def coefficients(self, rewards: Array, discount: Number, weights: Array | None) -> Array:
        # The baseline continues after an episode's end: if it stopped there, it would depend on the episode.
        gains = self._centred(rewards * _discounts(rewards, discount))
        if weights is not None:
            gains = _weighted(gains, weights)
        if self.trace_decay is None:
            return lax.cumsum(gains, axis=2, reverse=True)
        decay = per_agent(self.trace_decay, 2)

        def add(later: Array, gain: Array) -> tuple[Array, Array]:
            total = gain + decay * later
            return total, total

        _, totals = lax.scan(add, jnp.zeros_like(gains[:, :, 0]), jnp.moveaxis(gains, 2, 0), reverse=True)
        return jnp.moveaxis(totals, 0, 2)


def _weighted(gains: Array, weights: Array) -> Array:
    # A gain of 0 stays 0 even if its weight has overflowed.
    return jnp.where(gains == 0, 0, gains * weights)


def _discounts(rewards: Array, discount: Number) -> Array:
    return per_agent(discount, 3) ** jnp.arange(rewards.shape[2], dtype=rewards.dtype)


@dataclass(frozen=True)
class SmallBatch:
    """What a correction is computed from; arrays lead with [agent]."""

    policy: Policy
    parameters: Array  # θ_t [agent, d]
    previous: Array  # θ_{t−1} [agent, d]
    played: Array  # [agent, point, d], see `Correction.points`
    episodes: Episodes
    estimator: Estimator
    discount: Number
    clock: Clock

    def log_probabilities(self, parameters: Array) -> Array:
        """log π of every step [agent, episode, time] under parameters [agent, d]."""
        return log_probabilities(self.policy, parameters, self.episodes, self.clock)

    def coefficients(self, weights: Array | None) -> Array:
        """The estimator's coefficients [agent, episode, time] with these weights."""
        return self.estimator.coefficients(self.episodes.rewards, self.discount, weights)

    def scores(self, parameters: Array, coefficients: Array) -> Array:
        """Σ_t c_t ∇log π(a_t|s_t) [set, agent, d] for sets of parameters and coefficients."""
        return weighted_scores(self.policy, parameters, self.episodes, coefficients, self.clock)

    def gradients(self, now: Array | None, before: Array) -> tuple[Array, Array]:
        """The weighted gradients at θ_t and at θ_{t−1} [agent, d], with weights [agent, episode, time] of each."""
        coefficients = jnp.stack([self.coefficients(now), self.coefficients(before)])
        here, there = self.scores(jnp.stack([self.parameters, self.previous]), coefficients)
        return here, there


class Correction(Component):
    """How a small batch estimates the change from ∇J(θ_{t−1}) to ∇J(θ_t)."""

    num_points: ClassVar[int] = 1  # an agent plays equal parts of a small batch with so many sets of parameters

    @property
    def weighs_rewards(self) -> bool:
        """Whether it weighs rewards one by one, as only GPOMDP can."""
        return False

    def points(self, parameters: Array, previous: Array, keys: Array) -> Array:
        """The parameters [agent, point, d] with which agents with fresh keys [agent] play a small batch."""
        return parameters[:, None]

    @abstractmethod
    def terms(self, batch: SmallBatch) -> tuple[Array, Array, "Health"]:
        """Two estimates [agent, d] whose difference estimates ∇J(θ_t) − ∇J(θ_{t−1}), and the health of their weights.

        The first one estimates ∇J(θ_t), except for corrections that estimate the difference directly.
        """


def _up_to_here(steps: Array, per_decision: bool) -> Array:
    """What steps [agent, episode, time] add up to: up to each of them or, everywhere, over the whole episode."""
    if per_decision:
        return jnp.cumsum(steps, axis=2)
    return jnp.broadcast_to(jnp.sum(steps, axis=2, keepdims=True), steps.shape)


@dataclass(frozen=True)
class _ByWeights(Correction):
    """A correction by importance weights, of whole episodes or of the steps up to each one."""

    mode: Literal["trajectory", "per-decision"] = "trajectory"

    def __post_init__(self) -> None:
        check_choice(self, "mode", self.mode, ("trajectory", "per-decision"))

    @property
    def weighs_rewards(self) -> bool:
        return self.mode == "per-decision"


@dataclass(frozen=True)
class ImportanceWeights(_ByWeights):
    """ω = p(τ|θ_{t−1})/p(τ|θ_t) = exp Σ_h [log π_{θ_{t−1}} − log π_{θ_t}], always in log space.

    Attributes:
        mode: "trajectory": one weight per episode, as in the paper. "per-decision": the weight of the reward at step h
            uses only the steps ≤ h, which keeps GPOMDP unbiased with less variance.
        cap: c, the largest weight: min(ω, c). The estimate is then biased but bounded.
        floor: ε, added to p(τ|θ_t) in the denominator. The authors' script uses 1e-9, which makes ω vanish for long
            episodes.
    """

    numbers: ClassVar[tuple[str, ...]] = ("cap", "floor")

    cap: float | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap is not None:
            check_positive(self, cap=self.cap)
        if self.floor != 0:
            check_positive(self, floor=self.floor)

    def log_weights(self, before: Array, now: Array) -> tuple[Array, "Health"]:
        """Compute log ω [agent, episode, time] and the health of the weights.

        Args:
            before: log π_{θ_{t−1}} of every step [agent, episode, time].
            now: log π_{θ_t} of every step [agent, episode, time].
        """
        up_to_here = partial(_up_to_here, per_decision=self.weighs_rewards)
        plain = up_to_here(before - now)
        if not (isinstance(self.floor, int | float) and self.floor == 0):  # log(p + ε) = log p + log(1 + ε/p)
            plain -= jax.nn.softplus(per_agent(_log(self.floor), 3) - up_to_here(now))
        limit = jnp.inf if self.cap is None else per_agent(_log(self.cap), 2)
        capped = jnp.minimum(plain, jnp.expand_dims(limit, 2)) if self.cap is not None else plain
        return capped, Health.of(plain[:, :, -1], limit)

    def terms(self, batch: SmallBatch) -> tuple[Array, Array, "Health"]:
        before = batch.log_probabilities(batch.previous)
        log_weights, health = self.log_weights(before, batch.episodes.log_probabilities)
        return *batch.gradients(None, jnp.exp(log_weights)), health


@dataclass(frozen=True)
class DefensiveSampling(_ByWeights):
    """Half of a small batch is played with θ_{t−1}, so that no weight exceeds 2 (Owen & Zhou 2000; unbiased).

    The episodes come from q = ½ p(τ|θ_t) + ½ p(τ|θ_{t−1}), and the two gradients have the weights p(τ|θ_t)/q(τ) and
    p(τ|θ_{t−1})/q(τ), which add up to 2.

    Attributes:
        mode: As for `ImportanceWeights`.
    """

    num_points: ClassVar[int] = 2

    def points(self, parameters: Array, previous: Array, keys: Array) -> Array:
        return jnp.stack([parameters, previous], axis=1)

    def terms(self, batch: SmallBatch) -> tuple[Array, Array, "Health"]:
        now, before = map(batch.log_probabilities, (batch.parameters, batch.previous))
        ratio = _up_to_here(before - now, self.weighs_rewards)
        health = Health.of(log(2) + jax.nn.log_sigmoid(ratio[:, :, -1]))
        return *batch.gradients(2 * jax.nn.sigmoid(-ratio), 2 * jax.nn.sigmoid(ratio)), health


@dataclass(frozen=True)
class HessianVector(Correction):
    """∇J(θ_t) − ∇J(θ_{t−1}) as ∇²J(θ)(θ_t − θ_{t−1}), θ uniform between both (HAPG, Shen et al. 2019; unbiased).

    The batch is played with that θ, so there are no importance weights. For GPOMDP, with S_h = Σ_{t≤h} ∇log π_t and
    u = θ_t − θ_{t−1}, it is Σ_h (γ^h r_h − b_h) ((S_h·u) S_h + ∇S_h u). With a trace decay, the second and third S_h
    are Σ_{t≤h} λ^{h−t} ∇log π_t: it estimates the change of what GPOMDP estimates then.
    """

    def points(self, parameters: Array, previous: Array, keys: Array) -> Array:
        place = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, PLACE)))(keys)[:, None]
        return (previous + place * (parameters - previous))[:, None]

    def terms(self, batch: SmallBatch) -> tuple[Array, Array, "Health"]:
        point, change = batch.played[:, 0], batch.parameters - batch.previous
        _, along = jax.jvp(batch.log_probabilities, (point,), (change,))  # ∇log π_t·u
        weighted = batch.coefficients(_up_to_here(along, isinstance(batch.estimator, GPOMDP)))
        plain = batch.coefficients(None)
        first = batch.scores(point[None], weighted[None])[0]
        _, second = jax.jvp(lambda at: batch.scores(at[None], plain[None])[0], (point,), (change,))
        return first + second, jnp.zeros_like(point), Health.perfect(len(point))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Health:
    """How far the importance weights ω of a batch's whole episodes have degenerated, per agent."""

    largest: Array  # max ω, before the cap
    effective_sample: Array  # (Σω)²/(BΣω²) after the cap, 1 when all weights are equal
    capped: Array  # fraction of ω above the cap
    # β of the gate "health": (ESS − 1/B)/(1 − 1/B) · min(m, 1/m), with the effective sample size ESS and the mean m of
    # ω. It is 1 if all weights are 1. It is near 0 if one weight dominates, or if m is far from 1, its expectation.
    gate: Array

    @classmethod
    def of(cls, log_weights: Array, limit: Array | float = jnp.inf) -> "Health":
        """The health of weights [agent, episode], given by their logarithms, and capped at the limit."""
        capped = jnp.minimum(log_weights, limit)
        # The effective sample size does not change if all weights are divided by the largest. This avoids overflow.
        highest, size = jnp.max(capped, axis=1), capped.shape[1]
        relative = jnp.exp(capped - highest[:, None])
        sample = jnp.square(jnp.sum(relative, axis=1)) / jnp.sum(jnp.square(relative), axis=1) / size
        # One weight alone cannot be uneven.
        evenness = (size * sample - 1) / (size - 1) if size > 1 else jnp.ones_like(sample)
        log_mean = highest + jnp.log(jnp.mean(relative, axis=1))
        gate = jnp.minimum(evenness, 1) * jnp.exp(-jnp.abs(log_mean))
        return cls(
            largest=jnp.exp(jnp.max(log_weights, axis=1)),
            effective_sample=sample,
            capped=jnp.mean(log_weights > limit, axis=1, dtype=log_weights.dtype),
            # 0 below rounding: where the gate is open, m ≤ 1/eps, and no weight overflows.
            gate=jnp.where(gate < jnp.finfo(gate.dtype).eps, 0, gate),
        )

    @classmethod
    def perfect(cls, num_agents: int) -> "Health":
        """The health of weights that are all 1."""
        return cls(jnp.ones(num_agents), jnp.ones(num_agents), jnp.zeros(num_agents), jnp.ones(num_agents))


def _span(clock: Clock, values: Array, span: Array) -> Array:
    """One span of values [agent, episode, time, ...] as [agent, episode × time, ...], for matrix products."""
    here = lax.dynamic_slice_in_dim(values, span * clock.span, clock.span, axis=2)
    return here.reshape(len(here), -1, *here.shape[3:])


def log_probabilities(policy: Policy, parameters: Array, episodes: Episodes, clock: Clock) -> Array:
    """Compute log π_θ(a|s) [agent, episode, time] with each agent's parameters [agent, d]; 0 after an episode's end."""
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
    """Compute Σ_t c_t ∇log π(a_t|s_t), averaged over each agent's episodes [set, agent, d].

    Several sets of parameters [set, agent, d] and coefficients [set, agent, episode, time] share the episodes.
    Coefficients past an episode's end do not count.
    """
    num_sets, num_agents, _ = parameters.shape
    coefficients = jnp.where(jnp.arange(clock.padded) < episodes.lengths[..., None], coefficients, 0)
    weights = jax.vmap(jax.vmap(policy.unflatten))(parameters)

    def total(weights: Weights, observations: Array, actions: Array, coefficients: Array) -> Array:
        return jnp.sum(coefficients * policy.log_probability(weights, policy.outputs(weights, observations), actions))

    def scores(span: Array, weights: Weights, observations: Array, actions: Array, coefficients: Array) -> Weights:
        observations, actions = _span(clock, observations, span), _span(clock, actions, span)
        coefficients = jax.vmap(partial(_span, clock), (0, None))(coefficients, span)
        return jax.vmap(jax.vmap(jax.grad(total)), (0, None, None, 0))(weights, observations, actions, coefficients)

    def of_all(span: Array, sums: Weights) -> Weights:
        here = scores(span, weights, episodes.observations, episodes.actions, coefficients)
        return jax.tree.map(jnp.add, sums, here)

    def of_running(span: Array, sums: Weights) -> Weights:
        """One agent at a time, whose part fits into the cache; agents whose episodes have all ended cost nothing."""

        def of_next(index: Array, sums: Weights) -> Weights:
            agent = order[index]
            take = partial(lax.dynamic_slice_in_dim, start_index=agent, slice_size=1)
            before, theirs = jax.tree.map(partial(take, axis=1), (sums, weights))
            played = take(episodes.observations), take(episodes.actions), take(coefficients, axis=1)
            after = jax.tree.map(jnp.add, before, scores(span, theirs, *played))
            return jax.tree.map(partial(lax.dynamic_update_slice_in_dim, start_index=agent, axis=1), sums, after)

        return lax.fori_loop(0, jnp.sum(longest > span * clock.span), of_next, sums)

    longest = jnp.max(episodes.lengths, axis=1)
    order = jnp.argsort(-longest)

    def add(span: Array, sums: Weights) -> Weights:
        fits = coefficients.size * policy.observation_size <= IN_CACHE
        return by_platform(span, sums, cuda=of_all, default=of_all if fits else of_running)

    sums = lax.fori_loop(0, _num_spans(episodes, clock), add, jax.tree.map(jnp.zeros_like, weights))
    flat = [part.reshape(num_sets, num_agents, -1) for part in jax.tree.leaves(sums)]
    return jnp.concatenate(flat, axis=2) / episodes.lengths.shape[1]


def gradient(
    policy: Policy, parameters: Array, episodes: Episodes, estimator: Estimator, discount: Number, clock: Clock
) -> Array:
    """Estimate ∇J(θ) from a batch of each agent's episodes: (1/N) Σ_i g(τ_i|θ) [agent, d].

    Args:
        policy: The policy's architecture.
        parameters: θ [agent, d], with which the episodes were played.
        episodes: N episodes of each agent.
        estimator: g.
        discount: γ, one number or one per agent [agent].
        clock: The spans of time for which gradients are computed at once.
    """
    coefficients = estimator.coefficients(episodes.rewards, discount, None)
    return weighted_scores(policy, parameters[None], episodes, coefficients[None], clock)[0]


def corrected_gradient(
    batch: SmallBatch, *, direction: Array, importance: Correction, gate: Number | Literal["health"]
) -> tuple[Array, Health]:
    """Estimate ∇J(θ_t) from a small batch by correcting an earlier direction (PAGE).

    ṽ = (1/B) Σ g(τ_i|θ_t) + β (v̂_{t−1} − (1/B) Σ ω_i g(τ_i|θ_{t−1})), or what the correction puts in place of the sums.

    Args:
        batch: The batch.
        direction: v̂_{t−1} [agent, d].
        importance: The correction, with ω in the paper.
        gate: β, one number (1 in the paper) or one per agent [agent], or "health": `Health.gate` of this batch.

    Returns:
        ṽ [agent, d], and the health of the importance weights.
    """
    here, before, health = importance.terms(batch)
    opened = per_agent(health.gate if isinstance(gate, str) else gate, 2)
    # A closed gate also keeps out weights that have overflowed.
    return here + jnp.where(opened == 0, 0, opened * (direction - before)), health


def exact_gradient(task: Enumerable, policy: Policy, parameters: Array, horizon: int, discount: Number) -> Array:
    """Compute ∇J(θ) [agent, d] without sampling, on a task with few states and discrete actions.

    Args:
        task: The task.
        policy: The policy's architecture.
        parameters: θ [agent, d].
        horizon: H.
        discount: γ, one number or one per agent [agent].
    """
    observations = task.every_observation()

    def expected_return(parameters: Array, discount: Array) -> Array:
        weights = policy.unflatten(parameters)
        outputs = policy.outputs(weights, observations)[:, None]  # [state, 1, action]
        actions = jnp.arange(policy.num_outputs)
        return task.expected_return(jnp.exp(policy.log_probability(weights, outputs, actions)), horizon, discount)

    return jax.vmap(jax.grad(expected_return))(parameters, jnp.broadcast_to(discount, len(parameters)))
