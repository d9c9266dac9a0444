"""What all aggregation and agreement rules share: the `Rule` interface, and the one way to apply a rule at a receiver.

`apply_at_receiver` is that one way, and `coefficients_at_receiver` the same without the sum. `apply_rule` (a call from
Python), `exchange` (the simulator) and the members of a real federation all end there, so they agree on which rows
count and when a result is defined. Only a call to a rule that is a mean of sound rows takes a shortcut.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from byzpg.robust.components import (
    Component,
    Vectors,
    check_array,
    check_num_byzantine,
    check_vectors,
    is_own,
    trying,
    with_numbers,
    without_numbers,
)
from byzpg.robust.geometry import Cloud, mean_of_all, unless_batched
from byzpg.robust.least_diameter import SearchLimitError


class Rule(Component, ABC):
    """A rule that turns the K vectors one receiver holds into one vector.

    This is the base of aggregation and agreement rules. A rule of your own subclasses `WeightedAggregator`,
    `Aggregator` or `Agreement`, and implements `coefficients` or `combine`.
    """

    bound: ClassVar[str] = "f < K/2"  # for the error message of `check`
    needs_key: ClassVar[bool] = False  # the rule is randomised
    needs_own: ClassVar[bool] = False  # the rule is defined only for a receiver that has a row of its own
    # A row that is far from K − f rows might as well be missing; `byzpg.robust.exchange.FAR` says how far.
    ignores_far_rows: ClassVar[bool] = False
    # The rule takes a faster branch where it is applied at one receiver at a time, so a CPU takes long rows one by one.
    branches: ClassVar[bool] = False
    # The rule ends in `Cloud.in_each_coordinate`, which copies no long rows on a GPU. A subclass says so for itself.
    in_each_coordinate: ClassVar[bool] = False
    # With f = 0, the rule is the mean of all rows. A subclass says so for itself, since it may change the rule.
    averages_all: ClassVar[bool] = False

    @property
    def differs_by_receiver(self) -> bool:
        """Whether two receivers of the same rows may get different results: of a random rule, each draws its own."""
        return self.needs_key

    def max_byzantine(self, num_agents: int) -> int:
        """Return the largest f that the rule tolerates among K = `num_agents` agents."""
        return (num_agents - 1) // 2

    def check(self, num_agents: int, num_byzantine: int) -> None:
        """Check that the rule tolerates f of K.

        Raises:
            ValueError: If it does not; the message names the bound, the largest f for this K and the least K for f.
        """
        if num_agents < 1:
            raise ValueError(f"{self}: the number of agents must be at least 1, got {num_agents}.")
        if num_byzantine < 0:
            raise ValueError(f"{self}: num_byzantine must not be negative, got {num_byzantine}.")
        largest = self.max_byzantine(num_agents)
        if num_byzantine > largest:
            # No bound is below f < K/8, but a limited search may end below any number of agents.
            more = range(num_agents + 1, num_agents + 8 * num_byzantine + 8)
            least = next((each for each in more if self.max_byzantine(each) >= num_byzantine), None)
            fixes = [f"num_byzantine ≤ {largest}"] if largest >= 0 else []
            fixes += [f"at least {least} agents"] if least is not None else []
            raise ValueError(
                f"{self} needs {self.bound}; {num_byzantine} of {num_agents} agents breaks that: use "
                f"{', or '.join(fixes) or 'another rule'}."
            )
        if is_own(type(self)) and _is_static(self):
            _trace_on_sample(self, num_agents, num_byzantine)

    @property
    def combines_in_place(self) -> bool:
        """Whether a GPU needs no copies of long rows to combine them."""
        return vars(type(self)).get("in_each_coordinate", False)

    def is_mean(self, num_byzantine: int) -> bool:
        """Whether the rule is the mean of all rows with this f, if all of them are usable."""
        return num_byzantine == 0 and vars(type(self)).get("averages_all", False)

    @abstractmethod
    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        """Return the result [d] of the rule on the points that one receiver holds."""

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        """Return the coefficients [n + 1], summing to one, of the points and the origin in the result.

        Only rules that are weighted means of the points have coefficients.
        """
        raise NotImplementedError

    @property
    def has_weights(self) -> bool:
        """Whether the rule is a weighted mean of the rows."""
        return type(self).coefficients is not Rule.coefficients

    def initial_memory(self, num_agents: int, dimension: int) -> Any:
        """Return what a receiver of gradients remembers before the first messages: arrays, or None if nothing ever."""
        return None

    @property
    def remembers(self) -> bool:
        """Whether receivers have a memory."""
        return self.initial_memory(2, 1) is not None  # a wrapper may leave it to the rule inside

    def recall(
        self,
        rows: Array,
        memory: Any,
        *,
        present: Array | None,
        own: Array | None,
        num_byzantine: int,
        key: Array | None,
    ) -> "tuple[Applied, Any]":
        """Apply the rule to the rows [K, d] at a receiver with a memory; return the memory afterwards, too."""
        cloud = Cloud.received(rows, present, len(rows) - num_byzantine, own)
        weighted = self.has_weights
        return apply_at_receiver(self, cloud, num_byzantine=num_byzantine, key=key, with_weights=weighted), memory


class WeightedRule(Rule):
    """A rule whose result is a weighted mean of the points, with weights that follow from the Gram matrix alone."""

    @abstractmethod
    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array: ...

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return cloud.combine(self.coefficients(cloud, num_byzantine, key))


# The length of the rows with which a rule of the user's own is traced.
SAMPLE_DIMENSION = 7


def _is_static(rule: Rule) -> bool:
    """Whether no option of the rule is an array, as in a compiled program whose numbers are data."""
    try:
        hash(rule)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=256)
def _trace_on_sample(rule: Rule, num_agents: int, num_byzantine: int) -> None:
    """Trace a rule of the user's own, which computes nothing.

    Raises:
        ValueError: If it cannot be compiled, fails, or gives anything but floats in the right shape.
    """
    rows = jax.ShapeDtypeStruct((num_agents, SAMPLE_DIMENSION), jnp.float32)

    def on_rows(method: Callable[..., Array], rows: Array, key: Array) -> Array:
        present = jnp.ones(num_agents, bool)
        return method(Cloud.received(rows, present, num_agents - num_byzantine, jnp.asarray(0)), num_byzantine, key)

    methods = [(rule.combine, "its result", (SAMPLE_DIMENSION,))]
    if rule.has_weights:
        methods.insert(0, (rule.coefficients, "coefficients, the origin's last,", (num_agents + 1,)))
    for method, what, shape in methods:
        with trying(rule, method.__name__):
            check_array(rule, what, jax.eval_shape(partial(on_rows, method), rows, jax.random.key(0)), [shape])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Applied:
    """The outcome of a rule at one receiver.

    Attributes:
        result: [d]; NaN where it is undefined, because nothing can be raised inside jit.
        weights: [K], of each sender; None if they were not asked for.
        num_usable: The number of rows that are present and sound.
        defined: Whether at least K − f rows are usable, and the receiver's own row too if the rule needs it.
    """

    result: Array
    weights: Array | None
    num_usable: Array
    defined: Array


def apply_at_receiver(
    rule: Rule, cloud: Cloud, *, num_byzantine: int, key: Array | None, with_weights: bool = False
) -> Applied:
    """Apply `rule` to what one receiver holds.

    Args:
        rule: The aggregation or agreement rule.
        cloud: The receiver's rows.
        num_byzantine: f, the number of Byzantine rows to tolerate. The caller has checked that the rule tolerates it.
        key: Random key, for randomised rules.
        with_weights: Whether to return the weight of each sender, for a rule that has weights.
    """
    weights, (num_usable, defined) = None, _usable(rule, cloud, num_byzantine)
    if with_weights:
        coefficients = coefficients_at_receiver(rule, cloud, num_byzantine=num_byzantine, key=key)
        result, weights = cloud.combine(coefficients), coefficients[:-1]
    else:
        result = jnp.where(defined, rule.combine(cloud, num_byzantine, key), jnp.nan)
    return Applied(result, weights, num_usable, defined)


def coefficients_at_receiver(rule: Rule, cloud: Cloud, *, num_byzantine: int, key: Array | None) -> Array:
    """Return the coefficients [n + 1] of the points in the result of a rule that has them; NaN where undefined."""
    _, defined = _usable(rule, cloud, num_byzantine)
    return jnp.where(defined, rule.coefficients(cloud, num_byzantine, key), jnp.nan)


def _usable(rule: Rule, cloud: Cloud, num_byzantine: int) -> tuple[Array, Array]:
    """Return the number of usable points, and whether the rule is defined on them."""
    num_usable = jnp.sum(cloud.usable)
    defined = num_usable >= cloud.num_points - num_byzantine
    if rule.needs_own:
        assert cloud.own is not None
        defined &= cloud.usable[cloud.own]
    return num_usable, defined


def apply_rule(
    rule: Rule,
    received: Vectors,
    *,
    num_byzantine: int,
    present: Vectors | None,
    key: Array | None,
    own: int | Array | None = None,
    with_weights: bool = False,
) -> Applied:
    """Check the arguments, apply `rule` to the rows [K, d], and raise an error if the result is undefined.

    Under jit or vmap, where values are not known yet, an undefined result is NaN instead.

    Args:
        rule: The aggregation or agreement rule.
        received: The vectors [K, d], one row per sender.
        num_byzantine: f, the number of Byzantine rows to tolerate.
        present: Which rows [K] have arrived; None for all of them.
        key: Random key, for randomised rules.
        own: The receiver's own row; None if it has none.
        with_weights: Whether to return the weight of each sender, for a rule that has weights.

    Raises:
        TypeError: If an argument has the wrong type, or weights are asked of a rule that has none.
        ValueError: If the rule does not tolerate f of K, a shape is wrong, or the result is undefined.
    """
    rows = check_vectors("received", received)
    rule.check(len(rows), check_num_byzantine(num_byzantine))
    if rule.needs_key and key is None:
        raise ValueError(f"{rule} is randomised: pass key=jax.random.key(seed).")
    if with_weights and not rule.has_weights:
        raise TypeError(f"{rule} is not a weighted mean of the received vectors, so it has no weights.")
    mask, own_row = _check_present(present, len(rows)), _check_own(own, len(rows))
    with clear_search_errors():
        options = {"num_byzantine": num_byzantine, "with_weights": with_weights}
        code, numbers = without_numbers(rule)  # an attack may call the rule in use, whose numbers are arrays
        applied, is_number = _apply(code, numbers, rows, mask, own_row, key, **options)
        if isinstance(is_number, Tracer) or bool(is_number):
            return applied
    if int(applied.num_usable) < len(rows) - num_byzantine:
        raise ValueError(
            f"{rule}: only {int(applied.num_usable)} of {len(rows)} vectors are present and finite, but at least "
            f"K − f = {len(rows) - num_byzantine} are needed with num_byzantine = {num_byzantine}."
        )
    if not bool(applied.defined):
        raise ValueError(f"{rule}: the receiver's own row, {own}, is absent or not finite.")
    raise ValueError(f"{rule}: the pivot's row is absent or not finite.")


def _check_present(present: Vectors | None, num_rows: int) -> Array | None:
    if present is None:
        return None
    mask = jnp.asarray(present)
    if mask.dtype != bool or mask.shape != (num_rows,):
        raise ValueError(f"present must be one bool per row, [{num_rows}]; got {mask.dtype} {list(mask.shape)}.")
    return mask


def _check_own(own: int | Array | None, num_rows: int) -> Array | None:
    if own is None:
        return None
    row = jnp.asarray(own)
    if row.ndim or not jnp.issubdtype(row.dtype, jnp.integer):
        raise TypeError(f"own must be the index of the receiver's own row, got {own!r}.")
    if not isinstance(row, Tracer) and not 0 <= int(row) < num_rows:
        raise ValueError(f"own must be the index of a row, 0 to {num_rows - 1}; got {own}.")
    return row


@partial(jax.jit, static_argnames=("code", "num_byzantine", "with_weights"))
def _apply(
    code: Rule,
    numbers: tuple[Any, ...],
    rows: Array,
    present: Array | None,
    own: Array | None,
    key: Array | None,
    *,
    num_byzantine: int,
    with_weights: bool,
) -> tuple[Applied, Array]:
    """Apply the rule; also return whether there is no NaN in what was asked for, the weights or the result."""
    rule = with_numbers(code, numbers)

    def apply() -> Applied:
        cloud = Cloud.received(rows, present, len(rows) - num_byzantine, own)
        return apply_at_receiver(rule, cloud, num_byzantine=num_byzantine, key=key, with_weights=with_weights)

    # To look for rows that are not sound takes longer than to add them up. On a GPU, a condition takes longer still.
    if rule.is_mean(num_byzantine) and not with_weights and jax.default_backend() == "cpu":
        mean, complete = mean_of_all(rows)
        if present is not None:
            complete &= jnp.all(present)
        of_all = Applied(mean, None, jnp.sum(jnp.ones(len(rows), bool)), jnp.asarray(True))
        applied = lax.cond(unless_batched(complete), lambda: of_all, apply)
    else:
        applied = apply()
    return applied, ~jnp.any(jnp.isnan(applied.result if applied.weights is None else applied.weights))


@contextmanager
def clear_search_errors() -> Iterator[None]:
    """Raise SearchLimitError itself where XLA has wrapped it in an error of its own."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        _, marker, message = str(error).partition("SearchLimitError: ")
        if marker:
            raise SearchLimitError(message.strip().splitlines()[0]) from None
        raise
