"""One round of messages: every agent sends its vector, attackers send false ones, and each receiver applies a rule.

Rows that all receivers hold are multiplied once. Messages that attackers sent to one receiver alone are multiplied for
that receiver. This is done for a group of receivers at a time, so the K × b × d such messages never exist at once.
A group whose receivers hold the same rows as those before them is skipped.

A receiver's own row is always its true vector, at Byzantine agents too: they send false messages to others, but keep
an honest state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from byzpg.robust.attacks import Attack, Knowledge
from byzpg.robust.components import Vectors, check_num_byzantine, check_vectors
from byzpg.robust.geometry import Cloud, SharedRows, ascending_rows, dot, is_sound, squared_distances
from byzpg.robust.rules import Rule, apply_at_receiver, clear_search_errors

# Bytes of false messages and Gram matrices in memory at once. A group of receivers is as large as this allows. They
# wait for each other. A GPU needs many of them to be busy; a CPU does not, and has a small cache.
GROUP_BYTES = 2**30
GROUP_BYTES_ON_CPU = 2**27

# A row so many times further out than all honest ones has no influence on a rule that `ignores_far_rows`. Let R be the
# largest distance of an honest row from the centre. Honest rows are at most 2R apart, so a row further out than 3R is
# in no subset of least diameter. A row within 3R has all honest rows within 4R, and a row beyond 7R is further from it:
# it is in no Krum score that counts. The rest is for rounding.
FAR = 8.0

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
        exchanged = _exchange(setting, vectors, byzantine, jnp.asarray(iteration), key)
        if not isinstance(exchanged[0], Tracer):
            jax.block_until_ready(exchanged)
    return exchanged


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
    setting: _Setting, vectors: Array, byzantine: Array, iteration: Array, key: Array
) -> tuple[Array, Diagnostics | None]:
    knowledge = Knowledge(
        vectors=vectors,
        byzantine=byzantine,
        iteration=iteration,
        key=attack_key(key),
        rule=setting.rule,
        num_byzantine=setting.num_byzantine,
    )
    messages = _Messages.sent(setting, knowledge)
    receivers, stands_for = _receivers(setting, messages)
    here = _at_receivers(setting, messages, key, setting.shards.part(receivers))
    results, weights = setting.shards.whole(here, len(receivers))
    if stands_for is not None:
        results, weights = jax.tree.map(lambda leaf: leaf[stands_for], (results, weights))
        if setting.rule.needs_own:
            has_own = messages.shared.usable[: knowledge.num_agents, None]
            results, weights = jax.tree.map(lambda leaf: jnp.where(has_own, leaf, jnp.nan), (results, weights))
    diagnostics = _diagnostics(setting, knowledge, results, weights) if setting.diagnose else None
    return (results[0] if setting.at_server else results), diagnostics


@dataclass(frozen=True)
class _Messages:
    """The messages of a round. The true vectors are shared rows, and so are false ones that go to all receivers."""

    knowledge: Knowledge
    shared: SharedRows
    false_row: Array  # [K], the index of the row that a Byzantine agent sends instead of its vector
    witness: Array  # an honest agent, whose own vector is usable if that of any honest agent is
    equivocal: bool  # attackers send different messages to different receivers

    @classmethod
    def sent(cls, setting: _Setting, knowledge: Knowledge) -> "_Messages":
        """Ask the attackers for their messages, once if they do not equivocate."""
        vectors, byzantine, num_agents = knowledge.vectors, knowledge.byzantine, knowledge.num_agents
        num_attackers, attack = len(byzantine), setting.attack
        agents = jnp.arange(num_agents)
        shared_rows, shared_usable = vectors, is_sound(vectors)
        honest = knowledge.honest
        first = honest[jnp.argmax(shared_usable[honest])]
        equivocal = num_attackers > 0 and _num_answers(attack, setting.phase, knowledge, agents) > 1
        if not equivocal:
            false_rows = attack.messages(setting.phase, knowledge, agents[:1])[0] if num_attackers else vectors[:0]
            shared_rows = jnp.concatenate([vectors, false_rows])
            shared_usable = jnp.append(shared_usable, is_sound(false_rows))
        majority = num_agents - setting.num_byzantine
        shared = SharedRows.around(shared_rows, shared_usable, first=first, majority=majority, candidates=num_agents)
        always = knowledge.is_honest & shared_usable[:num_agents]
        shared = replace(shared, differing=byzantine, ascending=ascending_rows(vectors, always))
        false_row = num_agents + jnp.zeros(num_agents, int).at[byzantine].set(jnp.arange(num_attackers))
        return cls(knowledge, shared, false_row, first, equivocal)

    @property
    def sender(self) -> Array:
        """The agents that may have sent the stored rows: true vectors, then false ones."""
        return jnp.append(jnp.arange(self.knowledge.num_agents), self.knowledge.byzantine)

    def to_each(self, setting: _Setting, receivers: Array) -> Array:
        """Return the messages that only one receiver holds [receiver, Byzantine sender, d]."""
        if self.equivocal:
            return setting.attack.messages(setting.phase, self.knowledge, receivers)
        vectors = self.knowledge.vectors
        return jnp.zeros((len(receivers), 0, vectors.shape[1]), vectors.dtype)

    def different(self, setting: _Setting, receivers: Array, private: Array) -> tuple[Array, Array]:
        """Return the rows that not all receivers hold [receiver, b, d], and which of them have influence."""
        knowledge, shared = self.knowledge, self.shared
        num_agents = knowledge.num_agents
        sent = private if self.equivocal else shared.raw[None, num_agents:]
        rows = jnp.where(self.is_own(receivers)[:, :, None], knowledge.truth(), sent)
        counts = is_sound(rows)
        if setting.rule.ignores_far_rows:
            honest = knowledge.is_honest & shared.usable[:num_agents]
            from_centre = jnp.diagonal(shared.gram)[:num_agents]
            reach = jnp.max(jnp.where(honest, from_centre, 0))
            reach = jnp.maximum(reach, from_centre.at[receivers].get(mode="fill", fill_value=0))
            far = jnp.sum(jnp.square(rows - shared.centre), axis=2) > FAR**2 * reach[:, None]
            counts &= ~(far & (jnp.sum(honest) >= num_agents - setting.num_byzantine))
        return rows, counts

    def is_own(self, receivers: Array) -> Array:
        """Return which attackers the receivers are [receiver, b]."""
        return receivers[:, None] == self.knowledge.byzantine

    def truth_held_by(self, receiver: Array, own: Array | None) -> Cloud:
        """Return what one receiver holds without false messages, as if they had not arrived."""
        agents = jnp.arange(self.knowledge.num_agents)
        no_rows = self.knowledge.vectors[:0]
        sender = self.sender[: len(self.shared.raw)]
        cloud = Cloud.of(self.shared, no_rows, is_sound(no_rows), place=agents, sender=sender, own=own)
        return replace(cloud, usable=cloud.usable & (self.knowledge.is_honest | (agents == receiver)))

    def held_by(self, receiver: Array, private: Array, own: Array | None) -> Cloud:
        """Return what one receiver holds: true vectors from honest agents and itself, false rows from attackers."""
        agents = jnp.arange(self.knowledge.num_agents)
        truthful = self.knowledge.is_honest | (agents == receiver)
        place = jnp.where(truthful, agents, self.false_row)
        return Cloud.of(self.shared, private, is_sound(private), place=place, sender=self.sender, own=own)

    def bytes_per_receiver(self, rule: Rule) -> int:
        """Estimate the memory that applying the rule at one receiver takes."""
        num_agents, num_attackers = self.knowledge.num_agents, len(self.knowledge.byzantine)
        rows = 2 * num_attackers * self.equivocal + 2 + (0 if rule.has_weights else 2 * num_agents)
        # A cloud's mixing, its Gram matrix and the distances, each held twice.
        matrices = 6 * (num_agents + num_attackers) ** 2
        return 4 * (rows * self.knowledge.vectors.shape[1] + matrices)


def _num_answers(attack: Attack, phase: Phase, knowledge: Knowledge, receivers: Array) -> int:
    """Return how many sets of messages the attack has for these receivers: one for all of them, or one for each."""
    return jax.eval_shape(lambda asked: attack.messages(phase, knowledge, asked), receivers).shape[0]


def _receivers(setting: _Setting, messages: _Messages) -> tuple[Array, Array | None]:
    """Return the receivers to apply the rule at and, if they are not all agents, whose result each agent [K] gets."""
    knowledge = messages.knowledge
    num_agents, num_attackers = knowledge.num_agents, len(knowledge.byzantine)
    if setting.at_server:
        return jnp.asarray([num_agents]), None
    if setting.rule.differs_by_receiver:
        return jnp.arange(num_agents), None
    if messages.equivocal:
        # Honest ones first, because attackers also hold their true vectors. Every device gets a share of both.
        order = jnp.append(knowledge.honest, knowledge.byzantine)
        num_devices = setting.shards.num_devices
        order = jnp.concatenate([order[device::num_devices] for device in range(num_devices)])
        return order, jnp.zeros(num_agents, int).at[order].set(jnp.arange(num_agents))
    # All honest receivers hold the same rows, so one of them stands for all. Each attacker also has its true vector.
    stands_for = jnp.zeros(num_agents, int).at[knowledge.byzantine].set(1 + jnp.arange(num_attackers))
    return jnp.append(messages.witness, knowledge.byzantine), stands_for


def _at_receivers(setting: _Setting, messages: _Messages, key: Array, receivers: Array) -> tuple[Array, Array | None]:
    """Return the results [receiver, d] and, for diagnostics, the weights [receiver, K].

    The rule is applied to one group of receivers after the other: groups of equal size, as few as memory allows.
    """
    num_receivers = len(receivers)
    limit = min(GROUP_BYTES, GROUP_BYTES_ON_CPU) if jax.default_backend() == "cpu" else GROUP_BYTES
    num_groups = -(-num_receivers * messages.bytes_per_receiver(setting.rule) // limit)
    group = -(-num_receivers // max(1, min(num_groups, num_receivers)))
    num_groups = -(-num_receivers // group)
    if num_groups == 1:
        return _at_group(setting, messages, key, receivers, messages.to_each(setting, receivers))

    groups = jnp.pad(receivers, (0, num_groups * group - num_receivers), mode="edge").reshape(num_groups, group)
    at_group = partial(_at_group, setting, messages, key)
    if setting.rule.differs_by_receiver:
        outputs = lax.map(lambda group: at_group(group, messages.to_each(setting, group)), groups)
    else:
        outputs = _skipping_equals(setting, messages, at_group, groups)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:num_receivers], outputs)


NOBODY = -1


class _Last(NamedTuple):
    """The receiver before a group."""

    rows: Array  # those that not all receivers hold [b, d], as bits
    has_own: Array  # 1 if its own vector is usable, 0 if not, NOBODY if there is no receiver before the group
    outputs: Any


def _skipping_equals(
    setting: _Setting, messages: _Messages, at_group: Callable[[Array, Array | None], Any], groups: Array
) -> Any:
    """Return the outputs of all groups. A group is skipped if its receivers all hold the rows of the one before it."""
    knowledge = messages.knowledge
    integer = jnp.int32 if knowledge.vectors.dtype.itemsize == 4 else jnp.int64

    def visit(last: _Last, receivers: Array) -> tuple[_Last, Any]:
        private = messages.to_each(setting, receivers)
        rows, counts = messages.different(setting, receivers, private)
        bits = lax.bitcast_convert_type(jnp.where(counts[:, :, None], rows, jnp.nan), integer)
        has_own = messages.shared.usable.at[receivers].get(mode="fill", fill_value=True).astype(jnp.int32)
        is_new = jnp.any(bits != last.rows) | jnp.any(has_own != last.has_own)
        outputs = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(receivers), *leaf.shape)), last.outputs)
        false_counts = jnp.asarray(True)
        if setting.rule.ignores_far_rows:
            false_counts = jnp.any(counts & ~messages.is_own(receivers))
            outputs = _where(is_new & ~false_counts, lambda: at_group(receivers, None), outputs)
        outputs = _where(is_new & false_counts, lambda: at_group(receivers, private), outputs)
        return _Last(bits[-1], has_own[-1], jax.tree.map(lambda leaf: leaf[-1], outputs)), outputs

    def empty(leaf: Array | jax.ShapeDtypeStruct) -> Array:
        return jnp.zeros(leaf.shape[1:], leaf.dtype)

    shapes = jax.eval_shape(at_group, groups[0], jax.eval_shape(partial(messages.to_each, setting), groups[0]))
    no_rows = jnp.zeros((len(knowledge.byzantine), knowledge.vectors.shape[1]), integer)
    first = _Last(no_rows, jnp.int32(NOBODY), jax.tree.map(empty, shapes))
    return lax.scan(visit, first, groups)[1]


def _where(condition: Array, compute: Callable[[], Any], otherwise: Any) -> Any:
    """Return compute() if the condition holds. Under vmap, unlike lax.cond, skip it where the condition never holds."""
    start = condition, otherwise
    return lax.while_loop(lambda state: state[0], lambda _: (jnp.zeros_like(condition), compute()), start)[1]


def _at_group(
    setting: _Setting, messages: _Messages, key: Array, receivers: Array, private: Array | None
) -> tuple[Array, Array | None]:
    """Return the results [receiver, d] and, for diagnostics, the weights [receiver, K] at a group of receivers.

    Where `private` is None, no false messages have arrived; else they are those of `to_each`.
    """
    rule = setting.rule

    def at_receiver(receiver: Array, private: Array | None) -> tuple[Array, Array | None]:
        own = None if setting.at_server else receiver
        applied = apply_at_receiver(
            rule,
            messages.truth_held_by(receiver, own) if private is None else messages.held_by(receiver, private, own),
            num_byzantine=setting.num_byzantine,
            key=rule_key(key, receiver),
            with_weights=setting.diagnose and rule.has_weights,
        )
        return applied.result, applied.weights

    return jax.vmap(at_receiver)(receivers, private)


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
