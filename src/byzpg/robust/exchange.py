"""One round of messages: every agent sends its vector, attackers send false ones, and each receiver applies a rule.

Rows that all receivers hold are multiplied once. Messages that attackers sent to one receiver alone are multiplied for
that receiver. This is done for a group of receivers at a time, so the K × b × d such messages never exist at once.
Where there are several groups, a rule is applied once for neighbouring receivers that hold the same rows, and messages
are multiplied once for neighbouring receivers that get the same, if the attack says so. Each receiver that remembers
multiplies rows of its own, unless it remembers what another one does.

A receiver's own row is always its true vector, at Byzantine agents too: they send false messages to others, but keep
an honest state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from byzpg.robust.aggregators import Mean, Remember
from byzpg.robust.attacks import Attack, Knowledge, NoAttack
from byzpg.robust.components import (
    Vectors,
    by_platform,
    check_num_byzantine,
    check_vectors,
    default_platform,
    is_own,
    with_numbers,
    without_numbers,
    zeros_for,
)
from byzpg.robust.geometry import (
    Cloud,
    Products,
    SharedRows,
    ascending_rows,
    is_sound,
    repeated,
    row_products,
    squared_distances,
    stored,
)
from byzpg.robust.kernels import SHORTEST, Rows, inner_products
from byzpg.robust.rules import Rule, apply_at_receiver, clear_search_errors, coefficients_at_receiver

# Bytes of false messages and Gram matrices in memory at once. A group of receivers is as large as this allows.
GROUP_BYTES = 2**30
# On a CPU, a group's own messages, matrices and copies take no more than this: memory that is used again is faster than
# more of it, and receivers that search wait for each other, which a GPU needs to be busy and a CPU does not.
GROUP_BYTES_ON_CPU = 2**26

# On a GPU, messages that differ by receiver are made before the rule is applied if they take at most so many bytes: so
# rounds with and without such messages share its code.
SHARED_CODE_BYTES = 2**24

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
        coordinates: The number of devices among which the compiler divides the coordinates of all rows instead.
    """

    num_devices: int = 1
    axis_name: str = "agent"
    coordinates: int = 1

    def part(self, tree: Any, axis: int = 0) -> Any:
        """Return this device's part of leaves that all devices hold; the last row is repeated to fill the last part."""
        if self.num_devices == 1:
            return tree

        def part_of(leaf: Array) -> Array:
            number = leaf.shape[axis]
            size = -(-number // self.num_devices)
            mine = lax.axis_index(self.axis_name) * size + jnp.arange(size)
            return jnp.take(leaf, mine, axis=axis, mode="clip")

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
        weights: [receiver, sender]; NaN for rules that are not weighted means.
    """

    error: Array
    honest_variance: Array
    diameter_before: Array
    diameter_after: Array
    weights: Array


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
    round_ = Round.of(
        rule,
        attack,
        num_byzantine=num_byzantine,
        phase=phase,
        at_server=at_server,
        vectors=vectors,
        byzantine=byzantine,
        iteration=iteration if isinstance(iteration, Array) else np.int32(iteration),  # faster than a jnp array
        keys=key,
    )
    with clear_search_errors():
        exchanged = _exchange(round_, diagnose, shards)
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
    """What determines the compiled program of a round, apart from shapes."""

    rule: Rule
    attack: Attack
    num_byzantine: int
    phase: Phase
    at_server: bool
    block: int = 0
    same_attackers: bool = False  # in every iteration, so that honest agents remember the same if they hear the same
    diagnose: bool = True
    shards: Shards = ONE_DEVICE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Round:
    """A round of messages, or one of each of several runs alike: arrays then lead with [run]."""

    code: _Setting = field(metadata={"static": True})  # the rule and the attack without their numbers
    vectors: Array  # [K, d]
    byzantine: Array  # [b]
    keys: Array  # []
    rule_numbers: tuple[Any, ...]
    attack_numbers: tuple[Any, ...]
    iteration: Array  # []
    memories: Any = None  # of each receiver [receiver, ...], for a rule that remembers

    @classmethod
    def of(
        cls,
        rule: Rule,
        attack: Attack,
        *,
        num_byzantine: int,
        phase: Phase,
        at_server: bool,
        block: int = 0,
        same_attackers: bool = False,
        **data: Any,
    ) -> "Round":
        """The round of one run, for a rule and an attack that have their numbers."""
        rule, rule_numbers = without_numbers(rule)
        attack, attack_numbers = without_numbers(attack)
        code = _Setting(rule, attack, num_byzantine, phase, at_server, block, same_attackers)
        return cls(code, rule_numbers=rule_numbers, attack_numbers=attack_numbers, **data)

    @property
    def setting(self) -> _Setting:
        """The setting of one run, numbers included."""
        code = self.code
        rule, attack = with_numbers(code.rule, self.rule_numbers), with_numbers(code.attack, self.attack_numbers)
        return replace(code, rule=rule, attack=attack)

    @property
    def knowledge(self) -> Knowledge:
        """What the attackers of one run know."""
        setting = self.setting
        return Knowledge(
            vectors=self.vectors,
            byzantine=self.byzantine,
            iteration=self.iteration,
            key=attack_key(self.keys),
            rule=setting.rule,
            num_byzantine=setting.num_byzantine,
            block=setting.block,
        )

    def false_rows(self, *, to_each: bool = False) -> Array | None:
        """What the attackers of one run send to all receivers [b, d], or [1, d] if it is long and the same from all.

        If they equivocate, it is None, or what they send `to_each` receiver [K, b, d].
        """
        setting, knowledge = self.setting, self.knowledge
        receivers = jnp.asarray([knowledge.num_agents]) if setting.at_server else jnp.arange(knowledge.num_agents)
        if not len(self.byzantine):
            return self.vectors[:0]
        if len(receivers) > 1 and _num_answers(setting.attack, setting.phase, knowledge, receivers) > 1:
            return setting.attack.messages(setting.phase, knowledge, receivers) if to_each else None
        # An attack of a user's own may rely on one message for each attacker.
        merged = self.vectors.shape[1] >= SHORTEST and not is_own(type(setting.attack))
        return setting.attack.messages(setting.phase, replace(knowledge, merged=merged), receivers[:1])[0]

    @property
    def shares_code(self) -> bool:
        """Whether what each receiver gets in all runs is small enough to be made beforehand."""
        copies = self.vectors.size * self.byzantine.shape[-1]
        return jax.default_backend() != "cpu" and 4 * copies <= SHARED_CODE_BYTES


def exchange_all(rounds: Sequence[Round], shards: Shards = ONE_DEVICE) -> list[tuple[Array, Diagnostics, Any]]:
    """Carry out rounds of messages of several runs each, inside a compiled program.

    Rounds with the same rule and shapes share its code, whatever the attackers send to all receivers.

    Returns:
        The results [run, K, d], or [run, 1, d] at a server, the diagnostics of each round, and the memories afterwards.
    """
    groups: dict[Any, list[tuple[int, Round, Array | None]]] = {}
    found: dict[int, tuple[Array, Diagnostics, Any]] = {}
    for index, each in enumerate(rounds):
        if each.memories is not None:
            found[index] = jax.vmap(partial(_recalled, shards=shards))(each)
            continue
        false_rows = jax.vmap(partial(Round.false_rows, to_each=each.shares_code))(each)
        merged = false_rows is not None and false_rows.ndim == 3 and false_rows.shape[1] < each.byzantine.shape[1]
        shapes = each.vectors.shape[1:], each.byzantine.shape[1:], merged
        if false_rows is not None:  # the attack is done
            each = replace(
                each, code=replace(each.code, attack=NoAttack(), phase="gradients", block=0), attack_numbers=()
            )
        if each.code.rule.is_mean(each.code.num_byzantine):
            each = replace(each, code=replace(each.code, rule=Mean()), rule_numbers=())
        groups.setdefault((each.code, shapes), []).append((index, each, false_rows))
    # A server holds what an honest agent holds: where agents do the same, its result is read off one of them.
    for code, shapes in list(groups):
        agents = replace(code, at_server=False), shapes
        if code.at_server and not code.rule.differs_by_receiver and agents in groups:
            groups[agents] += groups.pop((code, shapes))
    receive = jax.vmap(partial(_receive, diagnose=True, shards=shards))
    for (code, _), members in groups.items():
        parts = [(replace(each, code=code), false_rows) for _, each, false_rows in members]
        together, false_rows = joined(_for_each_receiver(parts))
        vectors, byzantine, false_rows = stored((together.vectors, together.byzantine, false_rows))
        outcome, begin = receive(replace(together, vectors=vectors, byzantine=byzantine), false_rows), 0
        for index, each, _ in members:
            end = begin + len(each.vectors)
            theirs = jax.tree.map(partial(lax.slice_in_dim, start_index=begin, limit_index=end), outcome)
            results, report = (
                jax.vmap(_at_honest_agent)(each, *theirs) if each.code.at_server != code.at_server else theirs
            )
            if not rounds[index].code.rule.has_weights:  # though it is a mean here
                report = replace(report, weights=jnp.full_like(report.weights, jnp.nan))
            found[index] = results, report, None
            begin = end
    return [found[index] for index in range(len(rounds))]


def _recalled(round_: Round, shards: Shards) -> tuple[Array, Diagnostics, Any]:
    """Apply a rule that remembers at every receiver of one run: each has memories of its own.

    Where all honest agents remember the same, one of them stands for all. All devices of a mesh do the same, unless the
    coordinates are divided among them.
    """
    setting, knowledge = round_.setting, round_.knowledge
    rule, byzantine, vectors = setting.rule, knowledge.byzantine, knowledge.vectors
    false_rows = round_.false_rows(to_each=True)
    assert false_rows is not None

    def at_receiver(each: tuple[Array, Any, Array]) -> tuple[Array, Array | None, Any]:
        receiver, memories, place = each
        sent = false_rows[place] if false_rows.ndim == 3 else false_rows
        rows = vectors.at[byzantine].set(jnp.where((byzantine == receiver)[:, None], vectors[byzantine], sent))
        applied, memories = rule.recall(
            rows,
            memories,
            present=None,
            own=None if setting.at_server else receiver,
            num_byzantine=setting.num_byzantine,
            key=rule_key(round_.keys, receiver),
        )
        return applied.result, applied.weights, memories

    num_agents, dimension = vectors.shape
    receivers, memories = jnp.asarray([num_agents]) if setting.at_server else jnp.arange(num_agents), round_.memories
    stands_for = None
    # A rule of a user's own may remember what depends on the receiver.
    alike = setting.same_attackers and type(rule) is Remember and not (rule.needs_own or rule.differs_by_receiver)
    if alike and not setting.at_server and false_rows.ndim == 2:
        receivers, stands_for = _one_for_all(knowledge, knowledge.honest[0])
        memories = jax.tree.map(itemgetter(receivers), memories)
    at_once = min(_num_fitting(16 * num_agents * dimension), len(receivers))
    found = lax.map(at_receiver, (receivers, memories, jnp.arange(len(receivers))), batch_size=at_once)
    results, weights, memories = found if stands_for is None else jax.tree.map(itemgetter(stands_for), found)
    return results, _diagnostics(replace(setting, shards=shards), knowledge, results, weights), memories


def _for_each_receiver(parts: list[tuple[Round, Array | None]]) -> list[tuple[Round, Array | None]]:
    """Repeat what attackers send to all receivers for each of them, where those of other runs equivocate."""
    if all(false_rows is None or false_rows.ndim == 3 for _, false_rows in parts):
        return parts
    num_agents = parts[0][0].vectors.shape[1]
    return [
        (each, jnp.repeat(false_rows[:, None], num_agents, axis=1) if false_rows.ndim == 3 else false_rows)
        for each, false_rows in parts
        if false_rows is not None
    ]


def _at_honest_agent(round_: Round, results: Array, diagnostics: Diagnostics) -> tuple[Array, Diagnostics]:
    """What a server would have: the result of one honest agent."""
    honest = round_.knowledge.honest[:1]
    error, weights = diagnostics.error[honest], diagnostics.weights[honest]
    return results[honest], replace(diagnostics, error=error, weights=weights)


def joined(parts: Sequence[Any]) -> Any:
    """The rows of several parts as one batch. A leaf without an axis is the same for all: the first is taken."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves) if leaves[0].ndim else leaves[0], *parts)


@partial(jax.jit, static_argnames=("diagnose", "shards"))
def _exchange(round_: Round, diagnose: bool, shards: Shards) -> tuple[Array, Diagnostics | None]:
    results, diagnostics = _receive(round_, round_.false_rows(), diagnose, shards)
    return (results[0] if round_.code.at_server else results), diagnostics


def _receive(
    round_: Round, false_rows: Array | None, diagnose: bool, shards: Shards
) -> tuple[Array, Diagnostics | None]:
    """Apply the rule of one run at its receivers.

    All of them get `false_rows` [b, d]. If attackers equivocate, these are [K, b, d], or None: the attack is asked.
    """
    setting, knowledge = replace(round_.setting, diagnose=diagnose, shards=shards), round_.knowledge
    messages = _Messages.sent(setting, knowledge, false_rows)
    receivers, stands_for = _receivers(setting, messages)
    here = _at_receivers(setting, messages, round_.keys, shards.part(receivers))
    results, weights = shards.whole(here, len(receivers))
    defined = messages.has_own if setting.rule.needs_own and stands_for is not None else None
    if messages.has_combinations(setting.rule):
        results = messages.shared.combine(results, stands_for, defined)
    else:
        results = repeated(results, stands_for, defined)
    if weights is not None:
        weights = repeated(weights, stands_for, defined)
    return results, _diagnostics(setting, knowledge, results, weights) if diagnose else None


@dataclass(frozen=True)
class _Messages:
    """The messages of a round. The true vectors are shared rows, and so are false ones that go to all receivers."""

    knowledge: Knowledge
    shared: SharedRows
    true_row: Array  # [K], the index of an agent's vector: those of honest agents come first, then the attackers'
    sender: Array  # [K + b], the agents that may have sent the stored rows: true vectors, then false ones
    witness: Array  # an honest agent, whose own vector is usable if that of any honest agent is
    equivocal: bool  # attackers send different messages to different receivers
    made: Array | None  # [K, b, d], these messages; None if the attack is asked for them

    @classmethod
    def sent(cls, setting: _Setting, knowledge: Knowledge, false_rows: Array | None) -> "_Messages":
        """The messages of attackers that send `false_rows`, as in `_receive`."""
        made = false_rows if false_rows is not None and false_rows.ndim == 3 else None
        if made is not None:
            false_rows = None
        byzantine, honest, num_agents = knowledge.byzantine, knowledge.honest, knowledge.num_agents
        order = jnp.append(honest, byzantine)
        vectors = knowledge.vectors
        if false_rows is None:
            rows = Rows(vectors, order, vectors[:0])
        else:
            merged = len(false_rows) < len(byzantine)
            rows = Rows(vectors, order, false_rows, jnp.zeros_like(byzantine) if merged else None)
        usable = jnp.append(is_sound(vectors)[order], rows.of_more(is_sound(rows.more)))
        first = jnp.argmax(usable[: len(honest)])
        shared = SharedRows.around(
            rows,
            usable,
            first=first,
            majority=num_agents - setting.num_byzantine,
            num_common=len(honest),
            on_one_device=setting.shards.coordinates == 1,
            search=type(setting.rule) is not Mean,
        )
        shared = replace(shared, ascending=ascending_rows(shared.raw[: len(honest)], usable[: len(honest)]))
        honest_before = knowledge.honest_before(jnp.arange(num_agents))
        true_row = jnp.where(knowledge.is_honest, honest_before, len(honest) + _place_among(num_agents, byzantine))
        sender, equivocal = jnp.append(order, byzantine), false_rows is None
        return cls(knowledge, shared, true_row, sender, honest[first], equivocal, made)

    def has_combinations(self, rule: Rule) -> bool:
        """Whether all results are weighted means of the shared rows, so that their coefficients say everything."""
        return rule.has_weights and not self.equivocal

    @property
    def has_own(self) -> Array:
        """Which agents [K] have a usable vector of their own."""
        return self.shared.usable[self.true_row]

    def to_each(self, setting: _Setting, receivers: Array) -> Array:
        """Return the messages that only one receiver holds [receiver, Byzantine sender, d]."""
        if self.made is not None:
            return self.made[receivers]
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
            honest = knowledge.is_honest & self.has_own
            from_centre = jnp.diagonal(shared.inner)[self.true_row]
            reach = jnp.max(jnp.where(honest, from_centre, 0))
            reach = jnp.maximum(reach, from_centre.at[receivers].get(mode="fill", fill_value=0))
            far = jnp.sum(jnp.square(rows - shared.centre), axis=2) > FAR**2 * reach[:, None]
            counts &= ~(far & (jnp.sum(honest) >= num_agents - setting.num_byzantine))
        return rows, counts

    def is_own(self, receivers: Array) -> Array:
        """Return which attackers the receivers are [receiver, b]."""
        return receivers[:, None] == self.knowledge.byzantine

    def held_by(
        self, receiver: Array, private: Array, products: Products, own: Array | None, *, has_products: bool
    ) -> Cloud:
        """Return what one receiver holds: true vectors from honest agents and itself, false rows from attackers."""
        agents = jnp.arange(self.knowledge.num_agents)
        truthful = self.knowledge.is_honest | (agents == receiver)
        # The false row of attacker j comes b rows after its true one.
        place = jnp.where(truthful, self.true_row, self.true_row + len(self.knowledge.byzantine))
        return Cloud.of(
            self.shared, private, products, place=place, sender=self.sender, own=own, has_products=has_products
        )

    def receivers_at_once(self, setting: _Setting) -> int:
        """Return how many receivers fit into memory at once, by an estimate of what one of them takes."""
        num_agents, num_attackers = self.knowledge.num_agents, len(self.knowledge.byzantine)
        message = 4 * self.knowledge.vectors.shape[1] // setting.shards.coordinates
        # Its false messages, and its inner products and distances, each held twice.
        own = message * (2 * num_attackers * self.equivocal + 2) + 24 * (num_agents + num_attackers) ** 2
        in_kernel = self.shared.in_kernels and not self.equivocal and default_platform() == "cuda"
        in_place = setting.rule.has_weights or (in_kernel and setting.rule.combines_in_place)
        copies = 0 if in_place else 2 * num_agents * message
        return _num_fitting(own + copies, fewest=1 if setting.rule.branches else 2)


def _num_fitting(receiver_bytes: int, *, fewest: int = 2) -> int:
    """Return how many receivers fit into memory at once, if each takes so many bytes: on a CPU, at least `fewest`."""
    fit = GROUP_BYTES // receiver_bytes
    if jax.default_backend() == "cpu":
        fit = min(fit, max(fewest, GROUP_BYTES_ON_CPU // receiver_bytes))
    return max(1, fit)


def _place_among(num_agents: int, byzantine: Array) -> Array:
    """Return, for each agent [K], which attacker it is; 0 for an honest agent. A scatter takes longer to compile."""
    is_byzantine = jnp.arange(num_agents)[:, None] == byzantine
    return jnp.sum(jnp.where(is_byzantine, jnp.arange(len(byzantine)), 0), axis=1)


def _num_answers(attack: Attack, phase: Phase, knowledge: Knowledge, receivers: Array) -> int:
    """Return how many sets of messages the attack has for these receivers: one for all of them, or one for each."""
    return jax.eval_shape(lambda asked: attack.messages(phase, knowledge, asked), receivers).shape[0]


def _receivers(setting: _Setting, messages: _Messages) -> tuple[Array, Array | None]:
    """Return the receivers to apply the rule at and, if they are not all agents, whose result each agent [K] gets."""
    knowledge = messages.knowledge
    num_agents = knowledge.num_agents
    if setting.at_server:
        return jnp.asarray([num_agents]), None
    if setting.rule.differs_by_receiver:
        return jnp.arange(num_agents), None
    if messages.equivocal:
        # Honest ones first, because attackers also hold their true vectors. Every device gets a share of both.
        order = jnp.append(knowledge.honest, knowledge.byzantine)
        num_devices = setting.shards.num_devices
        if num_devices == 1:
            return order, messages.true_row
        order = jnp.concatenate([order[device::num_devices] for device in range(num_devices)])
        return order, jnp.zeros(num_agents, int).at[order].set(jnp.arange(num_agents))
    return _one_for_all(knowledge, messages.witness)


def _one_for_all(knowledge: Knowledge, honest: Array) -> tuple[Array, Array]:
    """As `_receivers`, where all honest agents hold the same: one stands for all. An attacker holds its true vector."""
    stands_for = jnp.where(knowledge.is_honest, 0, 1 + _place_among(knowledge.num_agents, knowledge.byzantine))
    return jnp.append(honest, knowledge.byzantine), stands_for


def _at_receivers(setting: _Setting, messages: _Messages, key: Array, receivers: Array) -> tuple[Array, Array | None]:
    """Return the results [receiver, d] and, for diagnostics, the weights [receiver, K].

    Where results are combinations of the shared rows, return their coefficients [receiver, c + 1] instead.

    The rule is applied to one group of receivers after the other: groups of equal size, as few as memory allows.
    """
    at_once = messages.receivers_at_once(setting)
    if len(receivers) <= at_once:
        return _at_group(setting, messages, key, receivers)
    rule, attack = setting.rule, setting.attack
    audience = attack.stated_audience(messages.knowledge, receivers) if messages.equivocal else None

    products = None
    # Like the size of a group, this counts the memory of one run of a batch.
    if audience is not None and 4 * len(receivers) * len(messages.sender) ** 2 <= GROUP_BYTES_ON_CPU:

        def of_audience(receivers: Array) -> Products:
            private = messages.to_each(setting, receivers)
            return _products_at_group(setting, messages, receivers, private, many=False)

        as_before = jnp.append(False, audience[1:] == audience[:-1])
        products = _looked_up(of_audience, receivers, as_before, at_once=1)

    def at_group(places: Array) -> tuple[Array, Array | None]:
        known = None if products is None else products(places)
        return _at_group(setting, messages, key, receivers[places], known, many=True)

    places = jnp.arange(len(receivers))
    # Random messages differ, unless the rule ignores them, so that looking for equal ones would only draw them twice.
    differ = audience is None and attack.needs_key and messages.equivocal and not rule.ignores_far_rows
    if differ or rule.differs_by_receiver:
        return _in_groups(at_group, places, at_once, len(receivers))
    as_before = _same_as_before(setting, messages, receivers, at_once, audience)
    return _looked_up(at_group, places, as_before, at_once)(places)


def _same_as_before(
    setting: _Setting, messages: _Messages, receivers: Array, at_once: int, audience: Array | None
) -> Array:
    """Return which receivers certainly hold the same rows as the receiver before them.

    Their messages are compared, unless the attack states who gets the same.
    """
    knowledge = messages.knowledge
    has_own = jnp.append(messages.has_own, True)  # at a server, nothing is missing
    if audience is not None:
        at_attacker = jnp.any(messages.is_own(receivers), axis=1)  # which also holds its true vector
        held = jnp.where(at_attacker, -1 - receivers, 2 * audience + has_own[receivers])
        return jnp.append(False, held[1:] == held[:-1])
    integer = jnp.int32 if knowledge.vectors.dtype.itemsize == 4 else jnp.int64

    def compare(last: tuple[Array, Array], receivers: Array) -> tuple[tuple[Array, Array], Array]:
        rows, counts = messages.different(setting, receivers, messages.to_each(setting, receivers))
        bits = lax.bitcast_convert_type(jnp.where(counts[:, :, None], rows, jnp.nan), integer)
        here = bits, has_own[receivers]
        before = jax.tree.map(lambda one, all_: jnp.concatenate([one[None], all_[:-1]]), last, here)
        same = jnp.all(here[0] == before[0], axis=(1, 2)) & (here[1] == before[1])
        return (here[0][-1], here[1][-1]), same

    nothing = jnp.zeros((len(knowledge.byzantine), knowledge.vectors.shape[1]), integer)
    groups = jnp.pad(receivers, (0, -len(receivers) % at_once), mode="edge").reshape(-1, at_once)
    _, same = lax.scan(compare, (nothing, jnp.asarray(False)), groups)
    return same.ravel()[: len(receivers)].at[0].set(False)


def _at_group(
    setting: _Setting,
    messages: _Messages,
    key: Array,
    receivers: Array,
    products: Products | None = None,
    *,
    many: bool = False,
) -> tuple[Array, Array | None]:
    """As `_at_receivers`, at one group of receivers, or one of `many` groups. Its products may be known already."""
    rule, private, has_products = setting.rule, messages.to_each(setting, receivers), products is not None
    if products is None:
        products = _products_at_group(setting, messages, receivers, private, many=many)

    def at_receiver(receiver: Array, private: Array, products: Products) -> tuple[Array, Array | None]:
        own = None if setting.at_server else receiver
        cloud = messages.held_by(receiver, private, products, own, has_products=has_products)
        options = {"num_byzantine": setting.num_byzantine, "key": rule_key(key, receiver)}
        if messages.has_combinations(rule):
            coefficients = coefficients_at_receiver(rule, cloud, **options)
            return cloud.of_stored(coefficients[None])[0], coefficients[:-1] if setting.diagnose else None
        applied = apply_at_receiver(rule, cloud, with_weights=setting.diagnose and rule.has_weights, **options)
        return applied.result, applied.weights

    each = receivers, private, products
    if len(receivers) == 1:  # with an axis of its own, XLA would not fuse a sorting network into one pass
        return jax.tree.map(lambda leaf: leaf[None], at_receiver(*jax.tree.map(lambda leaf: leaf[0], each)))
    return jax.vmap(at_receiver)(*each)


def _products_at_group(
    setting: _Setting, messages: _Messages, receivers: Array, private: Array, *, many: bool
) -> Products:
    """Return the products of what each receiver of a group may hold, with the messages that are `private` to it.

    If it is one of `many` groups, then private messages without influence are left out.
    """
    selective = many and messages.equivocal and setting.rule.ignores_far_rows
    heard = messages.different(setting, receivers, private)[1] if selective else is_sound(private)
    if selective:
        heard &= ~messages.is_own(receivers)
    return messages.shared.products(private, heard, often_unusable=selective)


def _diagnostics(setting: _Setting, knowledge: Knowledge, results: Array, weights: Array | None) -> Diagnostics:
    honest, mean = knowledge.honest, knowledge.mean()
    error = jnp.sum(jnp.square(results - mean), axis=1)
    products = _products_around(mean, knowledge.vectors, honest, setting.shards)
    if setting.at_server:
        after = jnp.asarray(0.0)
    else:
        after = _diameter(_products_around(results[honest[0]], results, honest, setting.shards))
    return Diagnostics(
        error=error,
        honest_variance=2 * jnp.trace(products) / max(1, len(honest) - 1),
        diameter_before=_diameter(products),
        diameter_after=after,
        weights=jnp.full((len(results), knowledge.num_agents), jnp.nan) if weights is None else weights,
    )


def _products_around(centre: Array, vectors: Array, chosen: Array, shards: Shards) -> Array:
    """Return the inner products of the chosen vectors minus the centre."""
    rows = Rows(vectors, chosen, vectors[:0])

    def plain() -> Array:
        around = rows.joined - centre
        return row_products(around, around)

    def in_kernel() -> Array:
        return inner_products(rows, centre, only_finite=False)

    return by_platform(cuda=in_kernel if shards.coordinates == 1 and rows.fit_kernels else None, default=plain)


def _diameter(inner: Array) -> Array:
    return jnp.sqrt(jnp.max(squared_distances(inner)))


def _looked_up(
    function: Callable[[Array], Any], receivers: Array, as_before: Array, at_once: int
) -> Callable[[Array], Any]:
    """Return a function of places among the receivers: function(receivers) there.

    It is computed only for receivers that do not get the same `as_before`, and looked up there for the others.
    """
    is_new = ~as_before
    firsts = jnp.nonzero(is_new, size=len(receivers), fill_value=0)[0]
    found = _in_groups(function, receivers[firsts], at_once, jnp.sum(is_new))
    stands_for = jnp.cumsum(is_new) - 1
    return lambda places: jax.tree.map(lambda leaf: leaf[stands_for[places]], found)


def _in_groups(function: Callable[[Array], Any], receivers: Array, at_once: int, number: Array | int) -> Any:
    """Return function(receivers), computed for one group of at most `at_once` at a time.

    Only the results of the first `number` receivers are needed.
    """
    num_receivers = len(receivers)
    group = -(-num_receivers // -(-num_receivers // at_once))
    num_groups = -(-number // group)

    def start(number: Array | int) -> Array:
        return jnp.clip(number * group, 0, num_receivers - group)  # the last group may overlap with the one before

    def written(results: Any, part: Any, number: Array | int) -> Any:
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start(number), 0), results, part
        )

    def step(number: Array, carry: tuple[Array, Any, Any]) -> tuple[Array, Any, Any]:
        # The next group and the last results wait for one step. XLA would otherwise fuse choosing the group and storing
        # its results with the rule, and run that more slowly and on one thread.
        current, previous, results = carry
        following = lax.dynamic_slice_in_dim(receivers, start(number + 1), group)
        return following, function(current), written(results, previous, number - 1)

    first = receivers[:group]
    function = jax.jit(function)  # so that it is traced once
    none_yet = zeros_for(function, first)
    results = jax.tree.map(lambda leaf: jnp.zeros((num_receivers, *leaf.shape[1:]), leaf.dtype), none_yet)
    _, last, results = lax.fori_loop(0, num_groups, step, (first, none_yet, results))
    return written(results, last, num_groups - 1)
