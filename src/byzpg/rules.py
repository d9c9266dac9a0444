"""What every aggregation and agreement rule has in common: checked input, one call, weights, known bounds."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from byzpg.clouds import Cloud
from byzpg.components import Component, Vectors, check_num_byzantine, check_vectors
from byzpg.least_diameter import SearchLimitError


class Rule(Component, ABC):
    """A rule that turns the K vectors one receiver holds into one vector."""

    bound: ClassVar[str] = "f < K/2"  # shown when it is broken
    needs_key: ClassVar[bool] = False  # randomised rules
    needs_own: ClassVar[bool] = False  # defined only for a receiver that has a row of its own
    # Two receivers of the same rows may get different results.
    differs_by_receiver: ClassVar[bool] = False

    def max_byzantine(self, num_agents: int) -> int:
        """The largest number of Byzantine agents the rule tolerates among `num_agents`."""
        return (num_agents - 1) // 2

    def check(self, num_agents: int, num_byzantine: int) -> None:
        """Raise ValueError, naming the bound and the largest f allowed, if the rule does not tolerate f of K."""
        if num_agents < 1:
            raise ValueError(f"{self}: the number of agents must be at least 1, got {num_agents}.")
        if num_byzantine < 0:
            raise ValueError(f"{self}: num_byzantine must not be negative, got {num_byzantine}.")
        largest = self.max_byzantine(num_agents)
        if num_byzantine > largest:
            fix = f"use num_byzantine ≤ {largest}" if largest >= 0 else "use more agents"
            raise ValueError(f"{self} needs {self.bound}; {num_byzantine} of {num_agents} agents breaks that: {fix}.")

    @abstractmethod
    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        """The rule itself, on the points of one receiver's cloud."""

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        """Affine coefficients [n + 1] of the points (the last one the origin), for rules that have them."""
        raise NotImplementedError

    @property
    def has_weights(self) -> bool:
        return type(self).coefficients is not Rule.coefficients


class WeightedRule(Rule):
    """A rule whose result is a combination of the points, found from the Gram matrix alone."""

    @abstractmethod
    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array: ...

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        return cloud.combine(self.coefficients(cloud, num_byzantine, key))


def apply_rule(
    rule: Rule,
    received: Vectors,
    num_byzantine: int,
    present: Vectors | None,
    key: Array | None,
    own: int | Array | None = None,
    *,
    want_weights: bool = False,
) -> Array:
    """Check the input, run the rule, and turn what only shows in the values into errors too."""
    rows = check_vectors("received", received)
    rule.check(len(rows), check_num_byzantine(num_byzantine))
    if rule.needs_key and key is None:
        raise ValueError(f"{rule} is randomised: pass key=jax.random.key(seed).")
    if want_weights and not rule.has_weights:
        raise TypeError(f"{rule} is not a weighted mean of the received vectors, so it has no weights.")
    mask = None
    if present is not None:
        mask = jnp.asarray(present)
        if mask.dtype != bool or mask.shape != rows.shape[:1]:
            raise ValueError(f"present must be one bool per row, [{len(rows)}]; got {mask.dtype} {list(mask.shape)}.")
    own_row = None
    if own is not None:
        own_row = jnp.asarray(own)
        if own_row.ndim or not jnp.issubdtype(own_row.dtype, jnp.integer):
            raise TypeError(f"own must be the index of the receiver's own row, got {own!r}.")
        if not isinstance(own_row, Tracer) and not 0 <= int(own_row) < len(rows):
            raise ValueError(f"own must be the index of a row, 0 to {len(rows) - 1}; got {own}.")
    with clear_search_errors():
        result, num_usable, own_usable = _run(
            rule, rows, mask, own_row, key, num_byzantine=num_byzantine, want_weights=want_weights
        )
        if isinstance(num_usable, Tracer):
            return result
        jax.block_until_ready(result)
    if int(num_usable) < len(rows) - num_byzantine:
        raise ValueError(
            f"{rule}: only {int(num_usable)} of {len(rows)} vectors are present and finite, but at least "
            f"K − f = {len(rows) - num_byzantine} are needed with num_byzantine = {num_byzantine}."
        )
    if not bool(own_usable):
        raise ValueError(f"{rule}: the receiver's own row, {own}, is absent or not finite.")
    if bool(jnp.any(jnp.isnan(result))):
        raise ValueError(f"{rule}: the pivot's row is absent or not finite.")
    return result


@contextmanager
def clear_search_errors() -> Iterator[None]:
    """Raise SearchLimitError itself, where XLA has wrapped it."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        _, marker, message = str(error).partition("SearchLimitError: ")
        if marker:
            raise SearchLimitError(message.strip().splitlines()[0]) from None
        raise


@partial(jax.jit, static_argnames=("rule", "num_byzantine", "want_weights"))
def _run(
    rule: Rule,
    rows: Array,
    present: Array | None,
    own: Array | None,
    key: Array | None,
    *,
    num_byzantine: int,
    want_weights: bool,
) -> tuple[Array, Array, Array]:
    """The result (NaN where it is undefined: nothing can be raised inside jit), usable rows, own row usable."""
    cloud = Cloud.received(rows, present, len(rows) - num_byzantine, own)
    if want_weights:
        result = rule.coefficients(cloud, num_byzantine, key)[:-1]
    else:
        result = rule.combine(cloud, num_byzantine, key)
    num_usable = jnp.sum(cloud.usable)
    own_usable = jnp.asarray(True) if own is None else cloud.usable[own]
    defined = (num_usable >= len(rows) - num_byzantine) & own_usable
    return jnp.where(defined, result, jnp.nan), num_usable, own_usable
