"""How robust a rule is: constants measured on many random clouds of honest vectors, next to the proven bounds.

For an aggregation rule, the constant is C_ra of the paper's Definition 1:
E‖F(x) − x̄_H‖² ≤ C_ra · α · 1/(h(h − 1)) Σ_{i,l∈H} ‖x_i − x_l‖², where H are the h = K − f honest agents and α = f/K.
For an agreement rule, there are two constants. In one round, the honest diameter shrinks to at most `contraction` times
its length, and the honest mean moves by at most C_avg times that length.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.robust.aggregators import Aggregator
from byzpg.robust.agreement import Agreement
from byzpg.robust.attacks import Knowledge, MessageAttack
from byzpg.robust.exchange import exchange
from byzpg.robust.rules import Rule


@dataclass(frozen=True)
class Certificate:
    """The worst constants that were measured, and the known bounds. Print it to read it.

    It is not a proof: there may be worse clouds and attacks.

    Attributes:
        rule: The rule that was measured.
        attack: The attack that it was measured under.
        num_agents: K.
        num_byzantine: f, which is also the number of attackers.
        dimension: The length of the vectors.
        trials: The number of clouds.
        seed: The seed of the clouds and of the random numbers of rule and attack.
        measured: The constants, "C_ra" or "contraction" and "C_avg".
        bounds: The proven bounds on them; None where no bound is known.
    """

    rule: Aggregator | Agreement
    attack: MessageAttack
    num_agents: int
    num_byzantine: int
    dimension: int
    trials: int
    seed: int
    measured: dict[str, float]
    bounds: dict[str, float | None]

    def __str__(self) -> str:
        """Return the certificate as a sentence."""
        parts = []
        for name, value in self.measured.items():
            bound = self.bounds[name]
            known = "no bound known" if bound is None else f"bound {bound:.4g}"
            parts.append(f"{name} {value:.4g} ({known})")
        return (
            f"{self.rule} under {self.attack}, K = {self.num_agents}, f = {self.num_byzantine}, worst of "
            f"{self.trials} clouds: {', '.join(parts)}"
        )


@partial(jax.jit, static_argnames=("trials", "num_agents", "dimension"))
def honest_clouds(key: Array, trials: int, num_agents: int, dimension: int) -> Array:
    """Return random clouds [trials, K, d] of four kinds in turn: Gaussian, heavy-tailed, two clusters, along one axis.

    The mean of each cloud has a random length, because some attacks and rules depend on where the origin is.
    """
    normal, tail, axis, size, mean = (jax.random.fold_in(key, purpose) for purpose in range(5))
    shape = (trials, num_agents, dimension)
    noise = jax.random.normal(normal, shape)
    heavy = jax.random.t(tail, 2.5, shape)
    line = jax.random.normal(axis, (trials, 1, dimension))
    sides = jnp.where(jnp.arange(num_agents)[:, None] % 2, 1.0, -1.0)
    kinds = jnp.stack([noise, heavy, 0.1 * noise + sides * line, 0.1 * noise + noise[:, :, :1] * line])
    clouds = kinds[jnp.arange(trials) % 4, jnp.arange(trials)]
    sizes = 10 ** jax.random.uniform(size, (trials, 1, 1), minval=-1, maxval=1)
    return clouds + sizes * jax.random.normal(mean, (trials, 1, dimension))


def default_num_byzantine(rules: Iterable[Rule], num_agents: int) -> int:
    """Return f for K agents: ⌊(K − 1)/4⌋ but at least 1, or what all of these rules tolerate if that is less.

    Examples:
        >>> from byzpg.robust import Bulyan, RFA
        >>> default_num_byzantine([RFA()], 13), default_num_byzantine([RFA(), Bulyan()], 13)
        (3, 2)
    """
    return min([max(1, (num_agents - 1) // 4), *(rule.max_byzantine(num_agents) for rule in rules)])


def certificate(
    rule: Aggregator | Agreement,
    attack: MessageAttack,
    *,
    num_agents: int = 13,
    num_byzantine: int | None = None,
    dimension: int = 50,
    trials: int = 256,
    seed: int = 0,
) -> Certificate:
    """Measure how robust `rule` is to `attack`, on random clouds of honest vectors.

    Args:
        rule: An aggregation or agreement rule.
        attack: An attack on messages.
        num_agents: K, the number of agents.
        num_byzantine: f, the number of Byzantine agents that the rule tolerates; as many attack. Default: see
            `default_num_byzantine`.
        dimension: The length of the vectors.
        trials: The number of clouds.
        seed: The seed of all random numbers.

    Returns:
        The worst constants over all clouds, and the proven bounds. Print it to read it.

    Raises:
        TypeError: If the attack does not change messages.
        ValueError: If the rule does not tolerate f of K, or a number is out of range.

    Examples:
        >>> from byzpg.robust import AvgZero, Mean, Median
        >>> print(certificate(Median(), AvgZero(), num_agents=5, num_byzantine=1, dimension=2, trials=4))
        Median() under AvgZero(), K = 5, f = 1, worst of 4 clouds: C_ra 1.726 (bound 13.33)
        >>> print(certificate(Mean(), AvgZero(), num_agents=5, num_byzantine=1, dimension=2, trials=4))
        Mean() under AvgZero(), K = 5, f = 1, worst of 4 clouds: C_ra 1463 (no bound known)
    """
    if num_byzantine is None:
        num_byzantine = default_num_byzantine([rule], num_agents)
    rule.check(num_agents, num_byzantine)
    if not isinstance(attack, MessageAttack):
        raise TypeError(f"A certificate needs an attack on messages such as AvgZero(), got {attack}.")
    if num_byzantine < 1 or num_agents - num_byzantine < 2:
        raise ValueError("A certificate needs at least one Byzantine agent and two honest ones.")
    attack.check(num_agents, num_byzantine, num_byzantine, rule)
    if trials < 1 or dimension < 1:
        raise ValueError(f"trials and dimension must be positive, got {trials} and {dimension}.")
    key = jax.random.key(seed)
    clouds = honest_clouds(key, trials, num_agents, dimension)
    keys = jax.random.split(jax.random.fold_in(key, 5), trials)
    if isinstance(rule, Aggregator):
        measured, bounds = _certify_aggregator(rule, attack, clouds, keys, num_byzantine=num_byzantine)
    else:
        # Agreement exchanges parameters, so the attack must change those, whatever its target was.
        attack = replace(attack, target="parameters")
        measured, bounds = _certify_agreement(rule, attack, clouds, keys, num_byzantine=num_byzantine)
    return Certificate(
        rule=rule,
        attack=attack,
        num_agents=num_agents,
        num_byzantine=num_byzantine,
        dimension=dimension,
        trials=trials,
        seed=seed,
        measured=measured,
        bounds=bounds,
    )


_Constants = tuple[dict[str, float], dict[str, float | None]]  # measured, bounds


def _certify_aggregator(
    rule: Aggregator, attack: MessageAttack, clouds: Array, keys: Array, *, num_byzantine: int
) -> _Constants:
    num_agents = clouds.shape[1]
    rule_in_use = rule if attack.uses_rule else None
    received = _received(attack, clouds, keys, num_byzantine=num_byzantine, rule=rule_in_use)
    ratios = _aggregation_ratios(rule, received, keys, num_byzantine=num_byzantine)
    fraction = num_byzantine / num_agents
    num_honest = num_agents - num_byzantine
    kappa = rule.robustness_bound(num_agents, num_byzantine)
    # 1/(h(h − 1)) Σ ‖x_i − x_l‖² is 2h/(h − 1) times the variance that kappa is relative to.
    bound = None if kappa is None else kappa * (num_honest - 1) / (2 * num_honest) / fraction
    return {"C_ra": float(jnp.max(ratios)) / fraction}, {"C_ra": bound}


def _certify_agreement(
    rule: Agreement, attack: MessageAttack, clouds: Array, keys: Array, *, num_byzantine: int
) -> _Constants:
    num_agents = clouds.shape[1]
    contraction, drift = _agreement_ratios(rule, attack, clouds, keys, num_byzantine=num_byzantine)
    measured = {"contraction": float(jnp.max(contraction)), "C_avg": float(jnp.max(drift))}
    bounds = {
        "contraction": rule.contraction(num_agents, num_byzantine),
        "C_avg": rule.drift(num_agents, num_byzantine),
    }
    return measured, bounds


def _attackers(num_agents: int, num_byzantine: int) -> Array:
    return jnp.arange(num_agents - num_byzantine, num_agents)


@partial(jax.jit, static_argnames=("attack", "num_byzantine", "rule"))
def _received(
    attack: MessageAttack, clouds: Array, keys: Array, *, num_byzantine: int, rule: Aggregator | None
) -> Array:
    """Return what the last honest agent holds [trials, K, d].

    Attacks are compiled separately from rules, so that fewer programs are compiled in all.
    """
    attackers = _attackers(clouds.shape[1], num_byzantine)

    def attacked(vectors: Array, key: Array) -> Array:
        knowledge = Knowledge(
            vectors=vectors,
            byzantine=attackers,
            iteration=jnp.asarray(0),
            key=key,
            rule=rule,
            num_byzantine=num_byzantine,
        )
        return vectors.at[attackers].set(attack.false_messages(knowledge, attackers[:1] - 1)[0])

    return lax.map(lambda both: attacked(*both), (clouds, keys))


@partial(jax.jit, static_argnames=("rule", "num_byzantine"))
def _aggregation_ratios(rule: Aggregator, received: Array, keys: Array, *, num_byzantine: int) -> Array:
    """Return ‖F(x) − x̄_H‖² over the honest pairwise variance, [trials]."""
    # Clouds are measured one after the other: vmap would double the time to compile, and save little.
    results = lax.map(lambda both: rule(both[0], num_byzantine=num_byzantine, key=both[1]), (received, keys))
    honest = received[:, : received.shape[1] - num_byzantine]
    mean = jnp.mean(honest, axis=1)
    variance = 2 * jnp.sum(jnp.square(honest - mean[:, None]), axis=(1, 2)) / (honest.shape[1] - 1)
    return jnp.sum(jnp.square(results - mean), axis=1) / variance


@partial(jax.jit, static_argnames=("rule", "attack", "num_byzantine"))
def _agreement_ratios(
    rule: Agreement, attack: MessageAttack, clouds: Array, keys: Array, *, num_byzantine: int
) -> tuple[Array, Array]:
    """Return the diameter after the round and the move of the mean, both over the diameter before, [trials] each."""
    num_agents = clouds.shape[1]
    num_honest = num_agents - num_byzantine

    def one_round(vectors: Array, key: Array) -> tuple[Array, Array]:
        agreed, _ = exchange(
            rule,
            vectors,
            byzantine=_attackers(num_agents, num_byzantine),
            attack=attack,
            num_byzantine=num_byzantine,
            phase="parameters",
            key=key,
        )
        before, after = vectors[:num_honest], agreed[:num_honest]
        moved = jnp.mean(after, axis=0) - jnp.mean(before, axis=0)
        if rule.per_coordinate:
            spread = jnp.ptp(before, axis=0)
            return jnp.max(jnp.ptp(after, axis=0) / spread), jnp.max(jnp.abs(moved) / spread)
        spread = _greatest_distance(before)
        return _greatest_distance(after) / spread, jnp.linalg.norm(moved) / spread

    return lax.map(lambda both: one_round(*both), (clouds, keys))


def _greatest_distance(rows: Array) -> Array:
    return jnp.sqrt(jnp.max(jnp.sum(jnp.square(rows[:, None] - rows[None, :]), axis=-1)))
