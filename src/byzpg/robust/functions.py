"""Rules and attacks as plain functions over rows [K, d]: the decorators `aggregator` and `attack`.

A decorated function becomes a class like RFA or IPM, whose options are the function's own. So it prints, is parsed and
is saved like them. These rules see the rows themselves. Rules that only need distances are faster as a
`WeightedAggregator`, and those that only need sorted coordinates as an `Aggregator`.
"""

from collections.abc import Callable, Collection
from dataclasses import MISSING, field, fields, make_dataclass
from functools import lru_cache
from inspect import Parameter, cleandoc, signature
from typing import Any, ClassVar, TypeVar, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg.robust.aggregators import Aggregator
from byzpg.robust.attacks import Knowledge, MessageAttack
from byzpg.robust.components import Component, check_array, trying
from byzpg.robust.geometry import Cloud, computed_if
from byzpg.robust.rules import SAMPLE_DIMENSION

__all__ = ["FunctionAggregator", "FunctionAttack", "aggregator", "attack"]

C = TypeVar("C", bound=Component)


class _Function:
    """A component that a function computes."""

    function: ClassVar[Callable[..., Any]]  # as it was written
    asked_for: ClassVar[frozenset[str]]  # the parameters that the library fills in

    def _options(self) -> dict[str, Any]:
        names = [option.name for option in fields(self) if option.name in self._own_options]  # pyright: ignore[reportArgumentType]
        return {name: getattr(self, name) for name in names}

    _own_options: ClassVar[frozenset[str]]

    def _call(self, shapes: Collection[tuple[int, ...]], **given: Any) -> Array:
        """Call the function with what it asks for, and check the shape of what it returns."""
        chosen = {name: value for name, value in given.items() if name in self.asked_for}
        with trying(self, "the function"):  # pyright: ignore[reportArgumentType]
            result = type(self).function(**chosen, **self._options())
            check_array(self, "what the function returns", result, shapes)  # pyright: ignore[reportArgumentType]
        return result


class FunctionAggregator(_Function, Aggregator):
    """An aggregation rule that a function computes; the decorator `aggregator` makes its subclasses."""

    bound: ClassVar[str] = "f ≤ max_byzantine(K)"
    largest: ClassVar[Callable[[int], int]]

    def max_byzantine(self, num_agents: int) -> int:
        most = type(self).largest(num_agents)
        if type(most) is not int:
            raise ValueError(f"{self}: max_byzantine({num_agents}) must be a whole number, got {most!r}.")
        return most

    def check(self, num_agents: int, num_byzantine: int) -> None:
        super().check(num_agents, num_byzantine)
        _call_on_sample(self, num_agents, num_byzantine)

    def combine(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        points, usable = cloud.points()
        if "present" in self.asked_for:
            return self._result(points, num_byzantine, usable, key)
        # A function of n rows for each number n that may be usable: shapes are fixed in a compiled program.
        first = points[jnp.argsort(~usable, stable=True)]
        num_missing = cloud.num_points - jnp.sum(usable)
        result = self._result(first, num_byzantine, None, key)
        for missing in range(1, num_byzantine + 1):

            def on_usable(rows: Array, missing: int = missing) -> Array:
                return self._result(rows[: len(rows) - missing], num_byzantine - missing, None, key)

            result = computed_if(num_missing == missing, on_usable, (first,), otherwise=result)
        return result

    def _result(self, rows: Array, num_byzantine: int, present: Array | None, key: Array | None) -> Array:
        given = {"received": rows, "num_byzantine": num_byzantine, "present": present, "key": key}
        return self._call([rows.shape[1:]], **given).astype(rows.dtype)


@lru_cache(maxsize=256)
def _call_on_sample(rule: FunctionAggregator, num_agents: int, num_byzantine: int) -> None:
    """Call a function with all rows, and with as few as there may be: during training, NaN would spoil all parameters.

    Raises:
        ValueError: If a result is not finite.
    """
    rows = np.random.default_rng(0).normal(size=(num_agents, SAMPLE_DIMENSION)).astype(np.float32)
    with jax.ensure_compile_time_eval():
        for missing in sorted({0, num_byzantine}):
            present = jnp.arange(num_agents) < num_agents - missing
            usable, left = (rows, 0) if "present" in rule.asked_for else (rows[: num_agents - missing], missing)
            result = rule._result(jnp.asarray(usable), num_byzantine - left, present, jax.random.key(0))
            if not np.all(np.isfinite(result)):
                raise ValueError(
                    f"{rule}: the function must return finite numbers; got {np.asarray(result)} for "
                    f"{num_agents - missing} finite rows of {num_agents}, with num_byzantine = {num_byzantine}."
                )


class FunctionAttack(_Function, MessageAttack):
    """An attack that a function computes; the decorator `attack` makes its subclasses."""

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        own = knowledge.truth()[0]
        result = self._call(
            [own.shape[1:], own.shape],
            honest=knowledge.vectors[knowledge.honest],
            own=own,
            num_byzantine=knowledge.num_byzantine,
            iteration=knowledge.iteration,
            key=knowledge.key,
        )
        return jnp.broadcast_to(result, own.shape)[None].astype(own.dtype)


def aggregator(
    function: Callable[..., Array] | None = None,
    *,
    max_byzantine: Callable[[int], int] = lambda num_agents: (num_agents - 1) // 2,
) -> Any:
    """Make an aggregation rule of a function.

    The function takes

    - `received` [n, d], the rows that are present, finite and shorter than 1e18, in the order of their senders;
    - `num_byzantine`, how many of these may be Byzantine: f, less the number of rows that are missing.

    These are what the rule tolerates: a missing row counts against f. A compiled program contains the function once for
    each n from K − f to K. A function that also takes `present` [K] is contained once: it gets all K rows, with zeros
    where `present` is False, and f itself. With `key`, it gets a random key, another one at each receiver. All other
    parameters are options of the rule. It returns one row [d].

    Args:
        function: The function.
        max_byzantine: The largest f that the rule tolerates among K agents. Default: f < K/2.

    Returns:
        A class of rules, a subclass of `Aggregator`, with the function's name and options.

    Raises:
        TypeError: If the function has other parameters than these.

    Examples:
        >>> @aggregator(max_byzantine=lambda num_agents: (num_agents - 1) // 2)
        ... def norm_filtered_mean(received, num_byzantine):
        ...     norms = jnp.linalg.norm(received, axis=1)
        ...     kept = norms <= jnp.sort(norms)[len(received) - num_byzantine - 1]
        ...     return jnp.sum(jnp.where(kept[:, None], received, 0), axis=0) / jnp.sum(kept)
        >>> rows = jnp.array([[1.0, 1], [2, 2], [3, 2], [2, 3], [90, -90]])  # the last row is an attacker's
        >>> print(norm_filtered_mean()(rows, num_byzantine=1))
        [2. 2.]
    """

    def decorate(function: Callable[..., Array]) -> type[FunctionAggregator]:
        made = _made(FunctionAggregator, function, ("received", "num_byzantine"), ("present", "key"))
        made.largest = staticmethod(max_byzantine)
        made.needs_key = "key" in made.asked_for
        return made

    return decorate if function is None else decorate(function)


def attack(function: Callable[..., Array]) -> Any:
    """Make an attack on messages of a function.

    The function takes `honest` [K − b, d], the vectors of the honest agents, and, if it has these parameters: `own`
    [b, d], what the b attackers would send if they were honest; `num_byzantine`, f; the `iteration`; and a random
    `key`. All other parameters are options of the attack. It returns the message of all attackers [d], or of each
    [b, d], to all receivers. As with other attacks on messages, the option `target` says which messages are false.

    Returns:
        A class of attacks, a subclass of `MessageAttack`, with the function's name and options.

    Raises:
        TypeError: If the function has other parameters than these.

    Examples:
        >>> @attack
        ... def scaled_mean(honest, scale: float = -1.0):
        ...     return scale * jnp.mean(honest, axis=0)
        >>> vectors = jnp.array([[1.0, 2], [2, 2], [3, 5], [9, 9]])  # the last agent attacks
        >>> knowledge = Knowledge(vectors, jnp.array([3]), iteration=jnp.array(0), key=jax.random.key(0))
        >>> print(scaled_mean(scale=-2.0).gradients(knowledge, jnp.array([0]))[0, 0])
        [-4. -6.]
    """
    made = _made(FunctionAttack, function, ("honest",), ("own", "num_byzantine", "iteration", "key"))
    made.needs_key = "key" in made.asked_for
    return made


def _made(base: type[C], function: Callable[..., Any], needed: tuple[str, ...], offered: tuple[str, ...]) -> type[C]:
    """A frozen dataclass for a function, whose fields are the function's options."""
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function) or "<lambda>" in name:
        raise TypeError(f"{base.__name__} is made of a function with a name (def), got {name}.")
    parameters = signature(function).parameters
    variable = [
        each.name for each in parameters.values() if each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    positional = [each.name for each in parameters.values() if each.kind is Parameter.POSITIONAL_ONLY]
    if variable or positional or not set(needed) <= parameters.keys():
        raise TypeError(
            f"{name} must have the parameters {', '.join(needed)}, may have {', '.join(offered)} and options of its "
            f"own, and is called by name; got ({', '.join(map(str, parameters.values()))})."
        )
    filled = frozenset(parameters) & {*needed, *offered}
    hints = get_type_hints(function)
    options = []
    for each in parameters.values():
        if each.name in filled:
            continue
        if hasattr(base, each.name):
            raise TypeError(
                f"{name}: the option {each.name} needs another name, which is no attribute of {base.__name__}."
            )
        known = each.default is not Parameter.empty
        hint = hints.get(each.name, type(each.default) if known and each.default is not None else Any)
        options.append((each.name, hint, field(default=each.default) if known else field(default=MISSING)))
    namespace = {
        "function": staticmethod(function),
        "asked_for": filled,
        "_own_options": frozenset(option[0] for option in options),
        "__doc__": cleandoc(function.__doc__ or f"The function {name}."),
    }
    made = make_dataclass(function.__name__, options, bases=(base,), namespace=namespace, frozen=True, repr=True)
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return made
