"""What rules do with a few very long rows, as GPU kernels that read every number once.

A library's matrix product wants its rows in one array, centred beforehand: four times the memory traffic at ten million
coordinates. Here, rows are taken from where they are and centred on the way. There are two products, of the rows with
each other and of coefficients with the rows, and what rules compute in each coordinate, such as a median.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

# A matrix product in a kernel needs at least 16 rows; more than 32 of them take too many registers.
FEWEST, MOST = 16, 32
# Where rows are shorter, the time is that of starting kernels, and ordinary products compile faster.
SHORTEST = 2**18
# The columns that a program takes at once, its warps and, where programs sum up, how many of them there are: the
# fastest on an H200.
SUMMED_COLUMNS, SUMMED_WARPS, NUM_SUMS = 64, 1, 4096
COLUMNS, WARPS = 256, 4
# The same of what is computed in each coordinate, whose values are all in registers.
SORTED_COLUMNS, SORTED_WARPS = 512, 4


class Rows(NamedTuple):
    """Rows in two arrays: row i is vectors[order[i]] and, after these, more[more_order[i]].

    Without an order, they are the vectors as they are, which are then not copied.
    """

    vectors: Array  # [K, d]
    order: Array | None  # [c − b]
    more: Array  # [b, d], or fewer if some are the same
    more_order: Array | None = None  # [b]

    @property
    def num_vectors(self) -> int:
        """How many rows come before those of `more`."""
        return len(self.vectors if self.order is None else self.order)

    @property
    def number(self) -> int:
        return self.num_vectors + len(self.more if self.more_order is None else self.more_order)

    @property
    def joined(self) -> Array:
        """The rows as one array [c, d]."""
        first = self.vectors if self.order is None else self.vectors[self.order]
        return jnp.concatenate([first, self.of_more(self.more)]) if len(self.more) else first

    def of_more(self, items: Array) -> Array:
        """An item for each of the rows of `more`, in their order."""
        return items if self.more_order is None else items[self.more_order]

    def vector(self, index: Array) -> Array:
        """One of the rows [d] before those of `more`."""
        return self.vectors[index if self.order is None else self.order[index]]

    @property
    def fit_kernels(self) -> bool:
        """Whether the kernels below can be used, on a GPU that holds all coordinates. Places are 32-bit numbers."""
        dimension = self.vectors.shape[1]
        is_small = max(len(self.vectors), self.number) * dimension < 2**31
        fits = self.number <= MOST and dimension >= SHORTEST and is_small and self.vectors.dtype == jnp.float32
        return fits and self.order is not None


def rows_needed(number: int) -> int:
    """How many rows a kernel's matrix product needs for this number of rows: a power of two."""
    return max(FEWEST, 1 << (number - 1).bit_length())


def _tile(rows: Rows, order: Any, vectors: Any, more: Any, centre: Any, columns: Array, only_finite: bool) -> Any:
    """These columns of all rows minus the centre, and of the centre.

    Args:
        rows: Their shapes.
        order: Like the next three, a reference that the kernel reads: where each row is in its array.
        vectors: See `Rows`.
        more: See `Rows`.
        centre: The centre.
        columns: The columns.
        only_finite: Whether numbers that are not finite are replaced by 0.
    """
    from jax.experimental.pallas import triton

    num_first, index, inside = rows.num_vectors, jnp.arange(rows_needed(rows.number)), columns < rows.vectors.shape[1]
    is_first, is_more, places = index < num_first, (index >= num_first) & (index < rows.number), order[...][:, None]
    tile = triton.load(vectors.at[places, columns[None, :]], mask=is_first[:, None] & inside[None, :], other=0.0)
    if len(rows.more):
        after = triton.load(more.at[places, columns[None, :]], mask=is_more[:, None] & inside[None, :], other=0.0)
        tile = jnp.where(is_first[:, None], tile, after)
    around = triton.load(centre.at[columns], mask=inside, other=0.0)
    holds = (is_first | is_more)[:, None] & (jnp.abs(tile) < jnp.inf if only_finite else inside[None, :])
    return jnp.where(holds, tile - around[None, :], 0.0), around


def _read(rows: Rows) -> tuple[Array, ...]:
    """What `_tile` reads of the rows. An empty array cannot be read, so it is replaced."""
    assert rows.order is not None
    order = jnp.append(rows.order, rows.of_more(jnp.arange(len(rows.more)))).astype(jnp.int32)
    order = jnp.pad(order, (0, rows_needed(rows.number) - len(order)))
    return order, rows.vectors, rows.more if len(rows.more) else order


def _whole(*arrays: Any) -> list[Any]:
    from jax.experimental import pallas as pl

    return [pl.BlockSpec(array.shape, lambda *_, array=array: (0,) * array.ndim) for array in arrays]


def inner_products(rows: Rows, centre: Array, *, only_finite: bool = True, interpret: bool = False) -> Array:
    """Return the inner products [c, c] of the rows minus the centre; what is not finite counts as 0, if so asked."""
    from jax.experimental import pallas as pl  # slow to import, and only GPUs need it
    from jax.experimental.pallas import triton

    size, dimension = rows_needed(rows.number), rows.vectors.shape[1]
    given = *_read(rows), centre
    num_sums = min(NUM_SUMS, -(-dimension // SUMMED_COLUMNS))
    # Tensor cores, with three products for each: about as exact as float32, and four times faster.
    precision = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3

    def kernel(order: Any, vectors: Any, more: Any, centre: Any, sums: Any) -> None:
        number = pl.program_id(0)

        def add(turn: Array, total: Array) -> Array:
            columns = (turn * num_sums + number) * SUMMED_COLUMNS + jnp.arange(SUMMED_COLUMNS)
            tile, _ = _tile(rows, order, vectors, more, centre, columns, only_finite)
            return total + lax.dot_general(tile, tile, (((1,), (1,)), ((), ())), precision=precision)

        turns = -(-dimension // (num_sums * SUMMED_COLUMNS))
        sums[...] = lax.fori_loop(0, turns, add, jnp.zeros((size, size), jnp.float32))

    sums = pl.pallas_call(
        kernel,
        grid=(num_sums,),
        in_specs=_whole(*given),
        out_specs=pl.BlockSpec((None, size, size), lambda i: (i, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((num_sums, size, size), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=SUMMED_WARPS, num_stages=2),
        interpret=interpret,
    )(*given)
    return jnp.sum(sums, axis=0)[: rows.number, : rows.number]


def combinations(coefficients: Array, share: Array, rows: Rows, centre: Array, *, interpret: bool = False) -> Array:
    """Return Σ_i coefficients[·, i] (x_i − centre) + share × centre, [m, d], for coefficients [m, c] and shares [m]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    number, dimension = len(coefficients), rows.vectors.shape[1]
    size = rows_needed(number)
    coefficients = jnp.pad(coefficients, ((0, size - number), (0, rows_needed(rows.number) - rows.number)))
    given = coefficients, jnp.pad(share, (0, size - number)), *_read(rows), centre

    def kernel(coefficients: Any, share: Any, order: Any, vectors: Any, more: Any, centre: Any, results: Any) -> None:
        columns, places = pl.program_id(0) * COLUMNS + jnp.arange(COLUMNS), jnp.arange(size)
        tile, around = _tile(rows, order, vectors, more, centre, columns, only_finite=True)
        found = jnp.dot(coefficients[...], tile, precision=lax.Precision.HIGHEST)
        found += share[...][:, None] * around[None, :]
        mask = (places < number)[:, None] & (columns < dimension)[None, :]
        triton.store(results.at[places[:, None], columns[None, :]], found, mask=mask)

    results = jax.ShapeDtypeStruct((number, dimension), jnp.float32)
    return pl.pallas_call(
        kernel,
        grid=(-(-dimension // COLUMNS),),
        in_specs=_whole(*given),
        out_specs=_whole(results)[0],
        out_shape=results,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
    )(*given)


class Points(NamedTuple):
    """The points that each of several receivers holds: rows, or affine combinations of rows around a centre.

    Attributes:
        members: [receiver, n], which points count.
        place: [receiver, n], the row that each point is.
        mixing: [receiver, n, c], the coefficients of the rows minus the centre in each point; None if points are rows.
        share: [receiver, n], those of the centre.
    """

    members: Array
    place: Array
    mixing: Array | None = None
    share: Array | None = None


def in_each_coordinate(
    function: Callable[..., Array],
    numbers: tuple[Array, ...],
    points: Points,
    rows: Rows,
    centre: Array | None,
    *,
    interpret: bool = False,
) -> Array:
    """Return function(values, *numbers) [d] of the values of one receiver's points in each coordinate, in any order.

    Args:
        function: Elementwise in the values, a list of arrays alike.
        numbers: Numbers that depend on the receiver.
        points: The points of the receiver, without the leading axis. The others have the value +∞.
        rows: The rows.
        centre: The centre of combinations; None if points are rows.
        interpret: Whether to run without a GPU.
    """

    @jax.custom_batching.custom_vmap
    def of_one(numbers: tuple[Array, ...], points: Points, large: tuple[Rows, Array | None]) -> Array:
        numbers, points = jax.tree.map(lambda leaf: leaf[None], (numbers, points))
        return _in_each_coordinate(function, numbers, points, *large, interpret=interpret)[0]

    # Receivers of the same rows are neighbours in the grid, so that the rows come from memory once for all of them.
    @of_one.def_vmap
    def _(number: int, batched: Any, numbers: tuple[Array, ...], points: Points, large: tuple[Rows, Any]) -> Any:
        def repeated(leaf: Array, has_axis: bool) -> Array:
            return leaf if has_axis else jnp.broadcast_to(leaf, (number, *leaf.shape))

        if any(jax.tree.leaves(batched[2])):
            everything = jax.tree.map(repeated, (numbers, points, large), tuple(batched))
            return lax.map(lambda each: of_one(*each), everything), True
        numbers, points = jax.tree.map(repeated, (numbers, points), tuple(batched[:2]))
        return _in_each_coordinate(function, numbers, points, *large, interpret=interpret), True

    return of_one(numbers, points, (rows, centre))


def _in_each_coordinate(
    function: Callable[..., Array],
    numbers: tuple[Array, ...],
    points: Points,
    rows: Rows,
    centre: Array | None,
    *,
    interpret: bool,
) -> Array:
    """As `in_each_coordinate`, of several receivers [receiver, d]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (num_receivers, num_points), dimension = points.members.shape, rows.vectors.shape[1]
    order, vectors, more = _read(rows)
    given: list[Array] = [points.members.astype(jnp.int32), order, vectors, more, *numbers]
    if points.mixing is None:
        given.append(points.place.astype(jnp.int32))
    else:
        assert points.share is not None
        assert centre is not None
        is_used = jnp.any(points.mixing != 0, axis=1)
        given += [points.mixing, points.share, is_used.astype(jnp.int32), centre]

    def kernel(*references: Any) -> None:
        (members, order, vectors, more), references = references[:4], references[4:]
        numbers_here, references = references[: len(numbers)], references[len(numbers) :]
        *described, results = references
        receiver, block = pl.program_id(0) % num_receivers, pl.program_id(0) // num_receivers
        columns = block * SORTED_COLUMNS + jnp.arange(SORTED_COLUMNS)
        inside = columns < dimension

        def load(source: Any, row: Any, counts: Any) -> Array:
            return triton.load(source.at[row, columns], mask=inside & counts, other=0.0)

        if points.mixing is None:
            (place,) = described

            def point(number: int) -> Array:
                counts, row = members[receiver, number] > 0, place[receiver, number]
                is_first = row < rows.num_vectors
                value = load(vectors, order[row], counts & is_first)
                if len(rows.more):
                    value += load(more, order[row], counts & ~is_first)
                return jnp.where(counts, value, jnp.inf)

        else:
            mixing, share, is_used, centre = described
            around, held = triton.load(centre.at[columns], mask=inside, other=0.0), []
            for row in range(rows.number):
                is_first, counts = row < rows.num_vectors, is_used[receiver, row] > 0
                value = load(vectors if is_first else more, order[row], counts)
                held.append(jnp.where(counts & (jnp.abs(value) < jnp.inf), value - around, 0.0))

            def point(number: int) -> Array:
                value = share[receiver, number] * around
                for row, each in enumerate(held):
                    value += mixing[receiver, number, row] * each
                return jnp.where(members[receiver, number] > 0, value, jnp.inf)

        found = function([point(number) for number in range(num_points)], *(each[receiver] for each in numbers_here))
        triton.store(results.at[receiver, columns], found, mask=inside)

    results = jax.ShapeDtypeStruct((num_receivers, dimension), jnp.float32)
    return pl.pallas_call(
        kernel,
        grid=(-(-dimension // SORTED_COLUMNS) * num_receivers,),
        in_specs=_whole(*given),
        out_specs=_whole(results)[0],
        out_shape=results,
        compiler_params=triton.CompilerParams(num_warps=SORTED_WARPS, num_stages=1),
        interpret=interpret,
    )(*given)
