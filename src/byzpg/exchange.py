"""One round of messages: K honest vectors and an attack become what each receiver holds, and a rule is applied there.

What everyone holds alike is multiplied once; only what liars sent to one receiver alone is multiplied per receiver,
for a group of receivers at a time, so that all K × f × d lies never exist at once.

A receiver's own row is always its own true vector, at Byzantine agents too: they lie to others, and keep honest state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from byzpg.attacks import Attack, Knowledge
from byzpg.clouds import Cloud, SharedRows, dot, finite_rows, squared_distances
from byzpg.cluster import Deal
from byzpg.components import Vectors, check_num_byzantine, check_vectors
from byzpg.rules import Rule, clear_search_errors

# Bytes of lies and Gram matrices held at once; a group of receivers is as large as this allows.
GROUP_BYTES = 2**30

Phase = Literal["gradients", "parameters"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Diagnostics:
    """What one round did to the honest agents. Receivers are the agents, or the one server."""

    error: Array  # [receiver] ‖F(x) − honest mean‖²
    honest_variance: Array  # 1/(h(h − 1)) Σ_{i,l honest} ‖x_i − x_l‖²; error/variance is C_ra · α
    diameter_before: Array  # honest diameter
    diameter_after: Array  # diameter of the honest receivers' results
    weights: Array | None  # [receiver, sender]; None for rules that are not weighted means


def exchange(
    rule: Rule,
    vectors: Vectors,
    *,
    byzantine: Vectors | Sequence[int],
    attack: Attack,
    num_byzantine: int,
    phase: Phase = "gradients",
    iteration: int | Array = 0,
    key: Array | None = None,
    at_server: bool = False,
    diagnose: bool = False,
    deal: Deal = Deal(),  # noqa: B008
) -> tuple[Array, Diagnostics | None]:
    """Apply `rule` at every agent to what it receives when the agents `byzantine` [b] attack; results [K, d].

    `vectors` [K, d] is what each agent would send honestly, `num_byzantine` the f that receivers declare. With
    `at_server` there is one trusted receiver, and the result is [d]. Every round needs a `key` of its own. `deal` says
    how receivers are dealt to the devices of a mesh, all of which have the `vectors` and get the results.
    """
    vectors = check_vectors("vectors", vectors)
    rule.check(len(vectors), check_num_byzantine(num_byzantine))
    byzantine = _check_byzantine(byzantine, len(vectors))
    if at_server and rule.needs_own:
        raise ValueError(f"{rule} is for agents, which have a vector of their own; a server has none.")
    if phase not in ("gradients", "parameters"):
        raise ValueError(f"phase must be 'gradients' or 'parameters', got {phase!r}.")
    if key is None:
        if rule.needs_key or attack.needs_key:
            raise ValueError(f"{rule} under {attack} draws random numbers: pass key=jax.random.key(seed).")
        key = jax.random.key(0)
    with clear_search_errors():
        exchanged = _exchange(
            rule,
            vectors,
            byzantine,
            jnp.asarray(iteration),
            key,
            attack=attack,
            num_byzantine=num_byzantine,
            phase=phase,
            at_server=at_server,
            diagnose=diagnose,
            deal=deal,
        )
        if not isinstance(exchanged[0], Tracer):
            jax.block_until_ready(exchanged)
    return exchanged


def _answers(attack: Attack, phase: Phase, knowledge: Knowledge, receivers: Array) -> int:
    """How many different sets of messages the attack has for these receivers: one, or one for each."""
    return jax.eval_shape(lambda asked: attack.messages(phase, knowledge, asked), receivers).shape[0]


def _check_byzantine(byzantine: Vectors | Sequence[int], num_agents: int) -> Array:
    indices = jnp.asarray(byzantine)
    if indices.size == 0:
        indices = indices.astype(int)
    if indices.ndim != 1 or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"byzantine must be a list of agents' indices, got {indices.dtype} of shape {indices.shape}.")
    if len(indices) >= num_agents:
        raise ValueError(f"byzantine must be fewer than K = {num_agents} agents, got {len(indices)}.")
    if not isinstance(indices, Tracer):
        listed = indices.tolist()
        if len(set(listed)) < len(listed) or not all(0 <= agent < num_agents for agent in listed):
            raise ValueError(f"byzantine must be different agents of 0 to {num_agents - 1}, got {listed}.")
    return indices


@partial(jax.jit, static_argnames=("rule", "attack", "num_byzantine", "phase", "at_server", "diagnose", "deal"))
def _exchange(
    rule: Rule,
    vectors: Array,
    byzantine: Array,
    iteration: Array,
    key: Array,
    *,
    attack: Attack,
    num_byzantine: int,
    phase: Phase,
    at_server: bool,
    diagnose: bool,
    deal: Deal,
) -> tuple[Array, Diagnostics | None]:
    num_agents, dimension = vectors.shape
    num_liars = len(byzantine)
    attack_key, rule_key = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
    knowledge = Knowledge(vectors, byzantine, iteration, attack_key, rule, num_byzantine)
    with_weights = diagnose and rule.has_weights

    # Stored rows: the truth of all K agents, then the lies (shared, unless they differ by receiver).
    usable = finite_rows(vectors)
    honest = knowledge.honest
    shared_rows, shared_usable = vectors, usable
    agents = jnp.arange(num_agents)
    equivocal = num_liars > 0 and _answers(attack, phase, knowledge, agents) > 1
    if not equivocal:
        lies = attack.messages(phase, knowledge, agents[:1])[0] if num_liars else vectors[:0]
        shared_rows = jnp.concatenate([vectors, lies])
        shared_usable = jnp.append(usable, finite_rows(lies))
    first = honest[jnp.argmax(usable[honest])]
    shared = SharedRows.around(shared_rows, shared_usable, first, num_agents - num_byzantine, num_agents)
    lie_of = num_agents + jnp.zeros(num_agents, int).at[byzantine].set(jnp.arange(num_liars))

    def at_receiver(receiver: Array, private: Array) -> tuple[Array, Array | None]:
        """Result and weights at one receiver, given the lies told to it alone; num_agents is the server."""
        truthful = knowledge.is_honest | (agents == receiver)
        cloud = Cloud.of(
            shared,
            private,
            finite_rows(private),
            jnp.where(truthful, agents, lie_of),
            None if at_server else receiver,
        )
        receiver_key = jax.random.fold_in(rule_key, receiver)
        if with_weights:
            coefficients = rule.coefficients(cloud, num_byzantine, receiver_key)
            result, weights = cloud.combine(coefficients), coefficients[:-1]
        else:
            result, weights = rule.combine(cloud, num_byzantine, receiver_key), None
        defined = jnp.sum(cloud.usable) >= num_agents - num_byzantine
        if rule.needs_own:
            defined &= cloud.usable[receiver]
        return jax.tree.map(lambda leaf: jnp.where(defined, leaf, jnp.nan), (result, weights))

    def at_group(receivers: Array) -> tuple[Array, Array | None]:
        if equivocal:
            private = attack.messages(phase, knowledge, receivers)
        else:
            private = jnp.zeros((len(receivers), 0, dimension), vectors.dtype)
        return jax.vmap(at_receiver)(receivers, private)

    stands_for = None
    if at_server:
        receivers = jnp.asarray([num_agents])
    elif equivocal or rule.differs_by_receiver:
        receivers = agents
    else:  # all honest receivers hold the same: one stands for them; each liar knows its own truth
        receivers = jnp.append(honest[:1], byzantine)
        stands_for = jnp.zeros(num_agents, int).at[byzantine].set(1 + jnp.arange(num_liars))
    rows_per_receiver = 2 * num_liars * equivocal + 2 + (0 if rule.has_weights else 2 * num_agents)
    # A cloud's mixing, its Gram matrix and the distances, at work twice.
    matrices = 6 * (num_agents + num_liars) ** 2
    here = _in_groups(at_group, deal.part(receivers), 4 * (rows_per_receiver * dimension + matrices))
    results, weights = deal.whole(here, len(receivers))
    if stands_for is not None:
        results = results[stands_for]
        weights = None if weights is None else weights[stands_for]

    diagnostics = None
    if diagnose:
        mean = knowledge.mean()
        around_mean = knowledge.honest_around_mean()
        square = jnp.sum(jnp.square(around_mean))
        diagnostics = Diagnostics(
            error=jnp.sum(jnp.square(results - mean), axis=1),
            honest_variance=2 * square / max(1, len(around_mean) - 1),
            diameter_before=_diameter(around_mean),
            diameter_after=_diameter(results[honest] - results[honest[0]]) if not at_server else jnp.asarray(0.0),
            weights=weights,
        )
    return (results[0] if at_server else results), diagnostics


def _diameter(rows: Array) -> Array:
    return jnp.sqrt(jnp.max(squared_distances(dot(rows, rows.T))))


def _in_groups(function, receivers: Array, bytes_per_receiver: int):
    """function(receivers), a group at a time, the groups as equal and as few as memory allows."""
    num_receivers = len(receivers)
    num_groups = -(-num_receivers * bytes_per_receiver // GROUP_BYTES)
    group = -(-num_receivers // max(1, min(num_groups, num_receivers)))
    num_groups = -(-num_receivers // group)
    if num_groups == 1:
        return function(receivers)
    padded = jnp.pad(receivers, (0, num_groups * group - num_receivers), mode="edge")
    outputs = lax.map(function, padded.reshape(num_groups, group))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:num_receivers], outputs)
