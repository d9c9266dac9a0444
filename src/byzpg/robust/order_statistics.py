"""Order statistics along a short axis, elementwise over all other axes.

Sorting K values in each of millions of coordinates is the whole cost of the median rules. A sorting network is a fixed
list of (min, max) pairs. XLA therefore fuses it with the code that consumes the sorted values into one vectorised pass
over memory, which it does not do for `jnp.sort` on a CPU. All values must have the same rank, from the arrays that they
are slices of to the result: on a reshape in between, XLA gives up on one pass and computes most of the network again
for each of a hundred passes.
"""

from functools import lru_cache

import jax.numpy as jnp
from jax import Array, lax

# For more values than this, the unrolled network takes longer to compile than it saves, and jnp.sort is used. K × K
# matrices are small, so for them the limit is lower, and top_k is used.
NETWORK_LIMIT = 128
MATRIX_NETWORK_LIMIT = 32


@lru_cache
def sorting_network(width: int) -> tuple[tuple[int, int], ...]:
    """Return the comparators (i, j), i < j, of Batcher's odd-even merge sort (Batcher 1968) on `width` wires."""
    comparators = []
    run = 1
    while run < width:
        step = run
        while step >= 1:
            for start in range(step % run, width - step, 2 * step):
                for low in range(start, start + min(step, width - start - step)):
                    if low // (2 * run) == (low + step) // (2 * run):
                        comparators.append((low, low + step))
            step //= 2
        run *= 2
    return tuple(comparators)


@lru_cache
def selection_network(width: int, ranks: range) -> tuple[tuple[int, int], ...]:
    """Return the comparators of the sorting network that the outputs of these ranks depend on."""
    needed, comparators = set(ranks), []
    for comparator in reversed(sorting_network(width)):
        if not needed.isdisjoint(comparator):
            needed.update(comparator)
            comparators.append(comparator)
    return tuple(reversed(comparators))


def ascending(values: list[Array], ranks: range | None = None) -> list[Array]:
    """Return the same values, elementwise in ascending order. There must be no NaN among them.

    If only the values of some 0-based `ranks` are needed, the others are any values.
    """
    if len(values) > NETWORK_LIMIT:
        return list(jnp.sort(jnp.stack(values), axis=0))
    values = list(values)
    for low, high in selection_network(len(values), range(len(values)) if ranks is None else ranks):
        values[low], values[high] = (
            lax.min(values[low], values[high]),
            lax.max(values[low], values[high]),
        )
    return values


def _smallest_first(values: Array, count: int) -> list[Array]:
    """Return the `count` smallest values along the last axis, in ascending order."""
    width = values.shape[-1]
    if width > MATRIX_NETWORK_LIMIT:
        return list(jnp.moveaxis(-lax.top_k(-values, count)[0], -1, 0))
    return ascending([values[..., j] for j in range(width)], range(count))[:count]


def kth_smallest(values: Array, rank: int) -> Array:
    """Return the value of 0-based `rank` along the last axis."""
    return _smallest_first(values, rank + 1)[rank]


def sum_of_smallest(values: Array, count: int | Array) -> Array:
    """Return the sum of the `count` smallest values along the last axis."""
    zero = jnp.zeros_like(values[..., 0])
    if isinstance(count, int):
        return sum(_smallest_first(values, count), zero)
    columns = _smallest_first(values, values.shape[-1])
    return sum((jnp.where(j < count, column, 0) for j, column in enumerate(columns)), zero)


def smallest(values: Array, count: int) -> Array:
    """Return which entries along the last axis are its `count` smallest; ties go to the lower index."""
    threshold = kth_smallest(values, count - 1)[..., None]
    tied = values == threshold
    room = count - jnp.sum(values < threshold, axis=-1, keepdims=True)
    return (values < threshold) | (tied & (jnp.cumsum(tied, axis=-1) <= room))
