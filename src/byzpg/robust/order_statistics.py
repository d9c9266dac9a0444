"""Order statistics along a short axis, elementwise over everything else.

Sorting K values per coordinate, for millions of coordinates, is the whole cost of the median rules. A sorting
network is a fixed list of (min, max) pairs, so XLA fuses it with whatever consumes the sorted values into one
vectorised pass over memory, which `jnp.sort` along an axis is not on a CPU.
"""

from functools import lru_cache

import jax.numpy as jnp
from jax import Array, lax

# Past this width the unrolled network takes longer to compile than it saves; jnp.sort takes over. For K × K matrices,
# which are small, that point comes earlier, and top_k takes over.
NETWORK_LIMIT = 128
MATRIX_NETWORK_LIMIT = 32


@lru_cache
def sorting_network(width: int) -> tuple[tuple[int, int], ...]:
    """Comparators (i, j), i < j, of Batcher's odd-even merge sort (Batcher 1968) on `width` wires."""
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


def ascending(values: list[Array]) -> list[Array]:
    """The same values, elementwise in ascending order. NaN must have been masked out before."""
    if len(values) > NETWORK_LIMIT:
        return list(jnp.sort(jnp.stack(values), axis=0))
    values = list(values)
    for low, high in sorting_network(len(values)):
        values[low], values[high] = (
            lax.min(values[low], values[high]),
            lax.max(values[low], values[high]),
        )
    return values


def _smallest_first(values: Array, count: int) -> list[Array]:
    """The `count` smallest values along the last axis, in ascending order."""
    width = values.shape[-1]
    if width > MATRIX_NETWORK_LIMIT:
        return list(jnp.moveaxis(-lax.top_k(-values, count)[0], -1, 0))
    return ascending([values[..., j] for j in range(width)])[:count]


def kth_smallest(values: Array, rank: int) -> Array:
    """The value of 0-based `rank` along the last axis."""
    return _smallest_first(values, rank + 1)[rank]


def sum_of_smallest(values: Array, count: int | Array) -> Array:
    """The sum of the `count` smallest values along the last axis."""
    zero = jnp.zeros_like(values[..., 0])
    if isinstance(count, int):
        return sum(_smallest_first(values, count), zero)
    columns = _smallest_first(values, values.shape[-1])
    return sum((jnp.where(j < count, column, 0) for j, column in enumerate(columns)), zero)


def smallest(values: Array, count: int) -> Array:
    """Which entries along the last axis are its `count` smallest; ties go to the lower index."""
    threshold = kth_smallest(values, count - 1)[..., None]
    tied = values == threshold
    room = count - jnp.sum(values < threshold, axis=-1, keepdims=True)
    return (values < threshold) | (tied & (jnp.cumsum(tied, axis=-1) <= room))
