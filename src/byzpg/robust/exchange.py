"""One round of messages: every agent sends its vector, attackers send false ones, and each receiver applies a rule.

Rows that all receivers hold are multiplied once. Messages that attackers sent to one receiver alone are multiplied for
that receiver. This is done for a group of receivers at a time, so the K × b × d such messages never exist at once.

A receiver's own row is always its true vector, at Byzantine agents too: they send false messages to others, but keep
an honest state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from byzpg.robust.attacks import Attack, Knowledge
from byzpg.robust.components import Vectors, check_num_byzantine, check_vectors
from byzpg.robust.geometry import Cloud, SharedRows, dot, is_sound, squared_distances
from byzpg.robust.rules import Rule, apply_at_receiver, clear_search_errors

# Bytes of false messages and Gram matrices in memory at once. A group of receivers is as large as this allows.
GROUP_BYTES = 2**30
# On a CPU, a group's own messages take no more than this: memory that is used again is faster than more of it.
MESSAGE_BYTES = 2**26

Phase = Literal["gradients", "parameters"]


# The random keys of a round. Members of a real federation use the same addresses, and so draw the same numbers.


def attack_key(round_key: Array) -> Array:
    """Return the key of the attackers in a round."""
    return jax.random.fold_in(round_key, 0)


def rule_key(round_key: Array, receiver: Array | int) -> Array:
    """Return the key of the rule at one receiver in a round. The server has index K."""
    return jax.random.fold_in(jax.random.fold_in(round_key, 1), receiver)


@dataclass(frozen=True)
class Shards:
    """How rows are divided among the devices along one axis of a mesh: in equal parts, in their order.

    Args:
        num_devices: The number of devices along the axis.
        axis_name: The name of the axis.
    """

    num_devices: int = 1
    axis_name: str = "agent"

    def part(self, tree: Any, axis: int = 0) -> Any:
        """Return this device's part of leaves that all devices hold; the last row is repeated to fill the last part."""
        if self.num_devices == 1:
            return tree

        def part_of(leaf: Array) -> Array:
            number = leaf.shape[axis]
            size = -(-number // self.num_devices)
            mine = lax.axis_index(self.axis_name) * size + jnp.arange(size)
            return jnp.take(leaf, jnp.minimum(mine, number - 1), axis=axis)

        return jax.tree.map(part_of, tree)

    def whole(self, tree: Any, number: int, axis: int = 0) -> Any:
        """Return all `number` rows on every device: the inverse of `part`."""
        if self.num_devices == 1:
            return tree

        def whole_of(leaf: Array) -> Array:
            joined = lax.all_gather(leaf, self.axis_name, axis=axis, tiled=True)
            return lax.slice_in_dim(joined, 0, number, axis=axis)

        return jax.tree.map(whole_of, tree)


ONE_DEVICE = Shards()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Diagnostics:
    """What one round did to the honest agents. Receivers are the agents, or the server alone.

    Attributes:
        error: [receiver], ‖F(x) − honest mean‖².
        honest_variance: 1/(h(h − 1)) Σ_{i,l honest} ‖x_i − x_l‖², for h honest agents; error/variance is C_ra · α.
        diameter_before: The diameter of the honest vectors.
        diameter_after: The diameter of the honest receivers' results.
        weights: [receiver, sender]; None for rules that are not weighted means.
    """

    error: Array
    honest_variance: Array
    diameter_before: Array
    diameter_after: Array
    weights: Array | None


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
    shards: Shards = ONE_DEVICE,
) -> tuple[Array, Diagnostics | None]:
    """Apply `rule` at every agent to what it receives while some agents attack.

    Args:
        rule: The aggregation or agreement rule that every receiver applies.
        vectors: [K, d], what each agent sends if it is honest.
        byzantine: Indices [b] of the agents that attack.
        attack: What these agents send instead.
        num_byzantine: f, the number of Byzantine agents the rule tolerates.
        phase: What the messages carry, "gradients" or "parameters".
        iteration: The iteration of training, for attacks that depend on it.
        key: Random key of this round; needed by randomised rules and attacks.
        at_server: Whether one trusted server is the only receiver.
        diagnose: Whether to measure errors, diameters and weights.
        shards: How receivers are divided among the devices of a mesh, all of which hold `vectors` and get the results.

    Returns:
        The results [K, d], or [d] at a server, and the diagnostics (None unless `diagnose`). A result is NaN where
        fewer than K − f vectors are usable.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the rule does not tolerate `num_byzantine`, or an argument is out of range.

    Examples:
        >>> from byzpg.robust import AvgZero, Mean, Median
        >>> vectors = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [0, 0]])  # the last agent attacks
        >>> for rule in (Mean(), Median()):
        ...     results, _ = exchange(rule, vectors, byzantine=[4], attack=AvgZero(), num_byzantine=1)
        ...     print(rule, results[0])
        Mean() [0. 0.]
        Median() [2. 2.]
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
    setting = _Setting(
        rule=rule,
        attack=attack,
        num_byzantine=num_byzantine,
        phase=phase,
        at_server=at_server,
        diagnose=diagnose,
        shards=shards,
    )
    with clear_search_errors():
        exchanged = _exchange(setting, vectors, byzantine, iteration, key)
        if not isinstance(exchanged[0], Tracer):
            jax.block_until_ready(exchanged)
    return exchanged


def _check_byzantine(byzantine: Vectors | Sequence[int], num_agents: int) -> Array:
    indices = byzantine if isinstance(byzantine, Array) else jnp.asarray(byzantine)
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


@dataclass(frozen=True)
class _Setting:
    """What determines the compiled program of a round; static under jit."""

    rule: Rule
    attack: Attack
    num_byzantine: int
    phase: Phase
    at_server: bool
    diagnose: bool
    shards: Shards


@partial(jax.jit, static_argnames="setting")
def _exchange(
    setting: _Setting, vectors: Array, byzantine: Array, iteration: int | Array, key: Array
) -> tuple[Array, Diagnostics | None]:
    knowledge = Knowledge(
        vectors=vectors,
        byzantine=byzantine,
        iteration=jnp.asarray(iteration),
        key=attack_key(key),
        rule=setting.rule,
        num_byzantine=setting.num_byzantine,
    )
    messages = _Messages.sent(setting, knowledge)
    receivers, stands_for = _receivers(setting, messages)
    at_group = partial(_at_group, setting, messages, key)
    here = _in_groups(at_group, setting.shards.part(receivers), messages.receivers_at_once(setting.rule))
    results, weights = setting.shards.whole(here, len(receivers))
    if stands_for is not None:
        results = results[stands_for]
        weights = None if weights is None else weights[stands_for]
    diagnostics = _diagnostics(setting, knowledge, results, weights) if setting.diagnose else None
    return (results[0] if setting.at_server else results), diagnostics


@dataclass(frozen=True)
class _Messages:
    """The messages of a round. The true vectors are shared rows, and so are false ones that go to all receivers."""

    knowledge: Knowledge
    shared: SharedRows
    true_row: Array  # [K], the index of an agent's vector: those of honest agents come first, then the attackers'
    equivocal: bool  # attackers send different messages to different receivers

    @classmethod
    def sent(cls, setting: _Setting, knowledge: Knowledge) -> "_Messages":
        """Ask the attackers for their messages, once if they do not equivocate."""
        vectors, byzantine, honest = knowledge.vectors, knowledge.byzantine, knowledge.honest
        num_agents, num_attackers, attack = knowledge.num_agents, len(byzantine), setting.attack
        agents, order = jnp.arange(num_agents), jnp.append(honest, byzantine)
        shared_rows = vectors[order]
        equivocal = num_attackers > 0 and _num_answers(attack, setting.phase, knowledge, agents) > 1
        if num_attackers and not equivocal:
            false_rows = attack.messages(setting.phase, knowledge, agents[:1])[0]
            shared_rows = jnp.concatenate([shared_rows, false_rows])
        usable = is_sound(shared_rows)
        shared = SharedRows.around(
            shared_rows,
            usable,
            first=jnp.argmax(usable[: len(honest)]),
            majority=num_agents - setting.num_byzantine,
            candidates=num_agents,
            num_common=len(honest),
        )
        true_row = jnp.zeros(num_agents, int).at[order].set(agents)
        return cls(knowledge, shared, true_row, equivocal)

    def to_each(self, setting: _Setting, receivers: Array) -> Array:
        """Return the messages that only one receiver holds [receiver, Byzantine sender, d]."""
        if self.equivocal:
            return setting.attack.messages(setting.phase, self.knowledge, receivers)
        vectors = self.knowledge.vectors
        return jnp.zeros((len(receivers), 0, vectors.shape[1]), vectors.dtype)

    def held_by(self, receiver: Array, private: Array, own: Array | None) -> Cloud:
        """Return what one receiver holds: true vectors from honest agents and itself, false rows from attackers."""
        agents = jnp.arange(self.knowledge.num_agents)
        truthful = self.knowledge.is_honest | (agents == receiver)
        # The false row of attacker j comes b rows after its true one.
        place = jnp.where(truthful, self.true_row, self.true_row + len(self.knowledge.byzantine))
        return Cloud.of(self.shared, private, is_sound(private), place=place, own=own)

    def receivers_at_once(self, rule: Rule) -> int:
        """Return how many receivers fit into memory at once, by an estimate of what one of them takes."""
        num_agents, num_attackers = self.knowledge.num_agents, len(self.knowledge.byzantine)
        message = 4 * self.knowledge.vectors.shape[1]
        own = message * (2 * num_attackers * self.equivocal + 2)
        copies = 0 if rule.has_weights else 2 * num_agents * message
        # A cloud's mixing, its inner products and the distances, each held twice.
        matrices = 24 * (num_agents + num_attackers) ** 2
        fit = GROUP_BYTES // (own + copies + matrices)
        if jax.default_backend() == "cpu":
            fit = min(fit, max(2, MESSAGE_BYTES // own))
        return max(1, fit)


def _num_answers(attack: Attack, phase: Phase, knowledge: Knowledge, receivers: Array) -> int:
    """Return how many sets of messages the attack has for these receivers: one for all of them, or one for each."""
    return jax.eval_shape(lambda asked: attack.messages(phase, knowledge, asked), receivers).shape[0]


def _receivers(setting: _Setting, messages: _Messages) -> tuple[Array, Array | None]:
    """Return the receivers to apply the rule at and, if they are not all agents, whose result each agent [K] gets."""
    knowledge = messages.knowledge
    num_agents, num_attackers = knowledge.num_agents, len(knowledge.byzantine)
    if setting.at_server:
        return jnp.asarray([num_agents]), None
    if messages.equivocal or setting.rule.differs_by_receiver:
        return jnp.arange(num_agents), None
    # All honest receivers hold the same rows, so one of them stands for all. Each attacker also has its true vector.
    stands_for = jnp.zeros(num_agents, int).at[knowledge.byzantine].set(1 + jnp.arange(num_attackers))
    return jnp.append(knowledge.honest[:1], knowledge.byzantine), stands_for


def _at_group(setting: _Setting, messages: _Messages, key: Array, receivers: Array) -> tuple[Array, Array | None]:
    """Return the results [receiver, d] and, for diagnostics, the weights [receiver, K] at a group of receivers."""
    rule = setting.rule

    def at_receiver(receiver: Array, private: Array) -> tuple[Array, Array | None]:
        applied = apply_at_receiver(
            rule,
            messages.held_by(receiver, private, own=None if setting.at_server else receiver),
            num_byzantine=setting.num_byzantine,
            key=rule_key(key, receiver),
            with_weights=setting.diagnose and rule.has_weights,
        )
        return applied.result, applied.weights

    return jax.vmap(at_receiver)(receivers, messages.to_each(setting, receivers))


def _diagnostics(setting: _Setting, knowledge: Knowledge, results: Array, weights: Array | None) -> Diagnostics:
    honest, around_mean = knowledge.honest, knowledge.honest_around_mean()
    square = jnp.sum(jnp.square(around_mean))
    after = jnp.asarray(0.0) if setting.at_server else _diameter(results[honest] - results[honest[0]])
    return Diagnostics(
        error=jnp.sum(jnp.square(results - knowledge.mean()), axis=1),
        honest_variance=2 * square / max(1, len(around_mean) - 1),
        diameter_before=_diameter(around_mean),
        diameter_after=after,
        weights=weights,
    )


def _diameter(rows: Array) -> Array:
    return jnp.sqrt(jnp.max(squared_distances(dot(rows, rows.T))))


def _in_groups(function: Callable[[Array], Any], receivers: Array, at_once: int) -> Any:
    """Return function(receivers), computed for one group at a time: groups of equal size, of at most `at_once`."""
    num_receivers = len(receivers)
    group = -(-num_receivers // -(-num_receivers // at_once))
    num_groups = -(-num_receivers // group)
    if num_groups == 1:
        return function(receivers)

    def start(number: Array | int) -> Array:
        return jnp.clip(number * group, 0, num_receivers - group)  # the last group may overlap with the one before

    def stored(results: Any, part: Any, number: Array | int) -> Any:
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start(number), 0), results, part
        )

    def step(number: Array, carry: tuple[Array, Any, Any]) -> tuple[Array, Any, Any]:
        # The next group and the last results wait for one step. XLA would otherwise fuse choosing the group and storing
        # its results with the rule, and run that more slowly and on one thread.
        current, previous, results = carry
        following = lax.dynamic_slice_in_dim(receivers, start(number + 1), group)
        return following, function(current), stored(results, previous, number - 1)

    first = receivers[:group]
    function = jax.jit(function)  # so that it is traced once
    shapes = jax.eval_shape(function, first)
    none_yet = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    results = jax.tree.map(lambda leaf: jnp.zeros((num_receivers, *leaf.shape[1:]), leaf.dtype), shapes)
    _, last, results = lax.fori_loop(0, num_groups, step, (first, none_yet, results))
    return stored(results, last, num_groups - 1)
