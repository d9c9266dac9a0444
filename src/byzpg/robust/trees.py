"""The rules in any JAX training loop: gradients that are pytrees, and optax's aggregators."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from byzpg.robust.components import Vectors, check_num_byzantine
from byzpg.robust.rules import Rule, apply_rule

Tree = Any  # a pytree of arrays


def aggregate(
    rule: Rule | type[Rule],
    gradients: Tree,
    *,
    num_byzantine: int,
    present: Vectors | None = None,
    key: Array | None = None,
) -> Tree:
    """Aggregate the gradients of K workers, which are pytrees, by a robust rule.

    The rule sees every gradient as one vector: all distances are those between whole gradients. Rows that are missing
    or not finite count as Byzantine. Inside jit, an undefined result is NaN, because nothing can be raised there.

    Args:
        rule: The rule, such as `NNM(TrimmedMean())`, or one of your own.
        gradients: A list of K pytrees, or one pytree whose leaves lead with K, as `jax.vmap(jax.grad(loss), ...)` gives
            it. A list is always one gradient per worker.
        num_byzantine: f, the number of Byzantine workers to tolerate.
        present: Which gradients [K] have arrived; None for all of them.
        key: Random key, for randomised rules.

    Returns:
        One pytree in the shapes and types of one gradient.

    Raises:
        TypeError: If a leaf is not an array of floats.
        ValueError: If gradients do not have one structure, or the rule does not tolerate f of K.

    Examples:
        >>> import numpy as np
        >>> from byzpg.robust import Median, aggregate
        >>> gradients = [{"w": np.float32([1, 2]), "b": np.float32(3)} for _ in range(4)]
        >>> attack = {"w": np.float32([-99, 99]), "b": np.float32(99)}
        >>> jax.tree.map(float, aggregate(Median(), [*gradients, attack], num_byzantine=1)["b"])
        3.0
    """
    if isinstance(gradients, list):
        _check_alike(gradients)
        gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients)
    return _aggregate_stacked(_instance(rule), gradients, num_byzantine, present, key)


def _aggregate_stacked(
    rule: Rule, gradients: Tree, num_byzantine: int, present: Vectors | None, key: Array | None
) -> Tree:
    """As `aggregate`, for leaves that lead with K; a list is a part of a gradient here."""
    leaves, structure = jax.tree.flatten(_checked(gradients))
    # Half precision would not do for distances.
    dtype = jnp.result_type(jnp.float32, *leaves)
    rows = jnp.concatenate([leaf.reshape(len(leaf), -1).astype(dtype) for leaf in leaves], axis=1)
    result = apply_rule(rule, rows, num_byzantine=num_byzantine, present=present, key=key).result
    parts, start = [], 0
    for leaf in leaves:
        size = leaf[0].size
        parts.append(result[start : start + size].reshape(leaf.shape[1:]).astype(leaf.dtype))
        start += size
    return jax.tree.unflatten(structure, parts)


def _instance(rule: Rule | type[Rule]) -> Rule:
    made = rule() if isinstance(rule, type) and issubclass(rule, Rule) else rule
    if not isinstance(made, Rule):
        raise TypeError(f"the rule must be one of byzpg.robust, such as RFA(), or your own; got {rule!r}.")
    return made


def _checked(gradients: Tree) -> Tree:
    """The stacked gradients, once they are known to be arrays of floats whose leaves lead with K."""
    named = jax.tree_util.tree_leaves_with_path(gradients)
    if not named:
        raise ValueError("gradients hold no array.")
    workers: dict[int, str] = {}
    for path, leaf in named:
        name = _name(path)
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"gradients must be arrays of floats, got {getattr(leaf, 'dtype', type(leaf).__name__)}{name}."
            )
        if leaf.ndim == 0:
            raise ValueError(f"stacked gradients must lead with an axis of workers [K, ...], got a number{name}.")
        workers.setdefault(leaf.shape[0], name)
    if len(workers) > 1:
        found = ", ".join(f"{number}{name}" for number, name in workers.items())
        raise ValueError(f"stacked gradients must all lead with the same number of workers, got {found}.")
    return jax.tree.map(jnp.asarray, gradients)


def _check_alike(gradients: list[Tree]) -> None:
    if not gradients:
        raise ValueError("gradients must be a list of one pytree per worker, got an empty list.")
    for number, gradient in enumerate(gradients):
        if jax.tree.structure(gradient) != jax.tree.structure(gradients[0]):
            raise ValueError(
                f"all gradients must have one structure: that of worker {number} is {jax.tree.structure(gradient)}, "
                f"that of worker 0 is {jax.tree.structure(gradients[0])}."
            )
        pairs = zip(jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(gradients[0]), strict=True)
        for (path, leaf), first in pairs:
            if jnp.shape(leaf) != jnp.shape(first):
                raise ValueError(
                    f"all gradients must have the same shapes: worker {number} has {list(jnp.shape(leaf))}, worker 0 "
                    f"{list(jnp.shape(first))}{_name(path)}."
                )


def _name(path: Any) -> str:
    text = jax.tree_util.keystr(path)
    return f" at {text}" if text else ""


class OptaxState(NamedTuple):
    """How many updates were aggregated: randomised rules draw anew in each."""

    num_updates: Array


def optax_aggregator(rule: Rule | type[Rule], *, num_byzantine: int, seed: int = 0) -> Any:
    """Make an `optax.experimental.aggregating.Aggregator` of a rule.

    Its updates are stacked: leaves lead with the workers. `optax.experimental.aggregating.process` and `optax.chain`
    put it in front of an optimizer.

    Args:
        rule: The rule, such as `NNM(TrimmedMean())`, or one of your own.
        num_byzantine: f, the number of Byzantine workers to tolerate.
        seed: Of the draws of randomised rules.

    Examples:
        >>> import optax
        >>> from byzpg.robust import NNM, TrimmedMean, optax_aggregator
        >>> optimizer = optax.chain(optax_aggregator(NNM(TrimmedMean()), num_byzantine=1), optax.sgd(0.1))
        >>> parameters = jnp.zeros(2)
        >>> gradients = jnp.asarray([[1.0, 1], [1, 1], [1, 1], [-90, 90]])  # of four workers
        >>> updates, state = optimizer.update(gradients, optimizer.init(parameters), parameters)
        >>> print(updates)
        [-0.1 -0.1]
    """
    from optax.experimental import aggregating  # slow to import

    check_num_byzantine(num_byzantine)
    made = _instance(rule)
    if made.remembers:
        raise ValueError(
            f"optax keeps no memories of workers, which {made} needs: use another rule, or call its recall in a loop "
            "of your own."
        )

    def init(params: Tree) -> OptaxState:
        return OptaxState(jnp.zeros((), jnp.int32))

    def update(updates: Tree, state: Any, params: Tree | None = None, **extra_args: Any) -> tuple[Tree, OptaxState]:
        key = jax.random.fold_in(jax.random.key(seed), state.num_updates) if made.needs_key else None
        result = _aggregate_stacked(made, updates, num_byzantine, None, key)
        return result, OptaxState(state.num_updates + 1)

    return aggregating.Aggregator(init, update)
