"""Order statistics along a short axis, elementwise over all other axes.

Sorting K values in each of millions of coordinates is the whole cost of the median rules. A sorting network is a fixed
list of (min, max) pairs. XLA therefore fuses it with the code that consumes the sorted values into one vectorised pass
over memory, which it does not do for `jnp.sort` on a CPU. All values must have the same rank, from the arrays that they
are slices of to the result: on a reshape in between, XLA gives up on one pass and computes most of the network again
for each of a hundred passes.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array, lax

# For more values than this, the unrolled network takes longer to compile than it saves, and `sort` is used. K × K
# matrices are small, so for them the limit is lower.
NETWORK_LIMIT = 128
MATRIX_NETWORK_LIMIT = 32

# Rows that are summed in advance.
BLOCK = 32


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
        return list(sort(jnp.stack(values), axis=0))
    values = list(values)
    for low, high in selection_network(len(values), range(len(values)) if ranks is None else ranks):
        values[low], values[high] = (
            lax.min(values[low], values[high]),
            lax.max(values[low], values[high]),
        )
    return values


def sort(values: Array, axis: int) -> Array:
    """Return the values in ascending order along an axis. There must be no NaN among them.

    The bits of floats are sorted as integers. On a CPU this is five times faster than sorting floats, for which XLA's
    comparison has to place NaNs too.
    """
    integer = jnp.int32 if values.dtype.itemsize == 4 else jnp.int64

    def flip_negatives(bits: Array) -> Array:
        """Between the bits of floats and integers in the same order; its own inverse."""
        return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)

    keys = flip_negatives(lax.bitcast_convert_type(values, integer))
    keys = lax.sort(keys, dimension=axis, is_stable=False)
    return lax.bitcast_convert_type(flip_negatives(keys), values.dtype)


def sum_of_ranks(common: Array, extra: Array, first: Array, stop: Array) -> Array:
    """Return, in each column, the sum of the values of ranks first, …, stop − 1 among two lists together.

    Where many receivers hold the same list with a few extra values each, only the extra values are sorted for each.

    Args:
        common: [c, d], ascending in each column.
        extra: [p, d], ascending in each column.
        first: The lowest 0-based rank.
        stop: The rank after the highest; at most c + p.
    """
    low, high = (_num_common(common, extra, rank) for rank in (first, stop))
    total = _sum_between(common, low, high)
    return total + _sum_between(extra, first - low, stop - high) if len(extra) else total


def _sum_between(values: Array, first: Array, stop: Array) -> Array:
    """Return Σ values[j] for first ≤ j < stop, both [d], in each column of values [n, d].

    Blocks of rows are summed once for all receivers, and only the rows of the first and last block for each of them.
    A difference of cumulative sums would be cheaper still, but one large value would spoil all later ones.
    """
    number = len(values)
    padding = -number % BLOCK
    blocks = jnp.sum(jnp.pad(values, ((0, padding), (0, 0))).reshape(-1, BLOCK, values.shape[1]), axis=1)
    first_block, last_block = -(-first // BLOCK), stop // BLOCK
    index = jnp.arange(len(blocks))[:, None]
    total = jnp.sum(jnp.where((first_block <= index) & (index < last_block), blocks, 0), axis=0)
    # Before the first whole block, and from the last one on; if there is none, both ends are in the same block.
    end = jnp.minimum(first_block * BLOCK, stop)
    begin = jnp.maximum(last_block * BLOCK, end)
    for low, high in ((first, end), (begin, stop)):
        row = low + jnp.arange(BLOCK)[:, None]
        at_end = jnp.take_along_axis(values, jnp.minimum(row, number - 1), axis=0)
        total += jnp.sum(jnp.where(row < high, at_end, 0), axis=0)
    return total


def _num_common(common: Array, extra: Array, rank: Array) -> Array:
    """Return how many [d] of the `rank` smallest values of two ascending lists are in `common`; extras win ties."""
    num_common, num_extra, width = len(common), len(extra), common.shape[1]
    if num_extra == 0:
        return jnp.full(width, rank)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = jnp.minimum((low + high) // 2, num_common - 1)
        other = jnp.clip(rank - middle - 1, 0, num_extra - 1)
        ours = jnp.take_along_axis(common, middle[None], axis=0)[0]
        theirs = jnp.take_along_axis(extra, other[None], axis=0)[0]
        enough = theirs <= ours
        open_ = low < high
        return jnp.where(open_ & ~enough, middle + 1, low), jnp.where(open_ & enough, middle, high)

    low = jnp.full(width, jnp.maximum(rank - num_extra, 0))
    high = jnp.full(width, jnp.minimum(rank, num_common))
    return lax.fori_loop(0, min(num_common, num_extra).bit_length() + 1, halve, (low, high))[0]


def _counts(width: int) -> bool:
    """Whether to find the ranks of `width` values by counting, which takes longer to run and less to compile.

    On GPUs, a network of some hundred operations takes XLA a second to fuse, and a kernel's time is that of its launch.
    """
    return width <= MATRIX_NETWORK_LIMIT and jax.default_backend() != "cpu"


def _ranks(values: Array) -> Array:
    """Return the 0-based rank of each entry along the last axis; ties go to the lower index."""
    index = jnp.arange(values.shape[-1])
    one, other = values[..., :, None], values[..., None, :]
    return jnp.sum((other < one) | ((other == one) & (index < index[:, None])), axis=-1)


def kth_smallest(values: Array, rank: int) -> Array:
    """Return the value of 0-based `rank` along the last axis."""
    width = values.shape[-1]
    if _counts(width):
        return jnp.min(jnp.where(_ranks(values) == rank, values, jnp.inf), axis=-1)
    if width > MATRIX_NETWORK_LIMIT:
        return sort(values, axis=-1)[..., rank]
    return ascending([values[..., j] for j in range(width)], range(rank, rank + 1))[rank]


def sum_of_smallest(values: Array, count: int) -> Array:
    """Return the sum of the `count` smallest values along the last axis."""
    width = values.shape[-1]
    if _counts(width):
        return jnp.sum(jnp.where(_ranks(values) < count, values, 0), axis=-1)
    if width > MATRIX_NETWORK_LIMIT:
        return jnp.sum(jnp.where(jnp.arange(width) < count, sort(values, axis=-1), 0), axis=-1)
    columns = ascending([values[..., j] for j in range(width)], range(count))
    return sum(columns[:count], jnp.zeros_like(columns[0]))


def smallest(values: Array, count: int) -> Array:
    """Return which entries along the last axis are its `count` smallest; ties go to the lower index."""
    if _counts(values.shape[-1]):
        return _ranks(values) < count
    threshold = kth_smallest(values, count - 1)[..., None]
    tied = values == threshold
    room = count - jnp.sum(values < threshold, axis=-1, keepdims=True)
    return (values < threshold) | (tied & (jnp.cumsum(tied, axis=-1) <= room))
