"""Loops inside elementwise functions, where a few elements need many iterations and most need few or none.

A loop over a batch runs until its last element is done. On CPUs, the elements that need a loop are therefore taken out
of the batch and processed in chunks, or one by one where they need very different numbers of iterations. On GPUs, the
whole function is one kernel: each block of 32 elements stays in registers and loops only as often as its own elements
need. As a plain program, every iteration would launch a dozen kernels.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata

from byzpg.robust.components import zeros_for

Result = TypeVar("Result")


def any_true(mask: Array) -> Array:
    # Pallas kernels do not support the reduction of `jnp.any`.
    return jnp.max(mask.astype(jnp.int32)) > 0


def choose(mask: Array, a: Any, b: Any) -> Any:
    """`jnp.where` for trees of arrays."""
    return jax.tree.map(partial(jnp.where, mask), a, b)


def stacked(items: Sequence[Any]) -> Any:
    """Stack trees of arrays along a new leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *items)


def computed_once(tree: Any) -> Any:
    """Return the same values, and keep XLA from computing them more than once.

    On CPUs, XLA fuses cheap operations into every operation that uses their result, so that they are computed again for
    each use. It never repeats a division, however. This function therefore divides by 1, written in a way that XLA does
    not simplify: the divisor seems to depend on the value. (It is 2 for NaN, which stays NaN.) As in all of XLA's
    arithmetic there, subnormal numbers become 0.
    """
    if jax.default_backend() != "cpu":
        return tree

    def divided_by_one(value: Array) -> Array:
        if value.dtype == jnp.bool_:
            return divided_by_one(value.astype(jnp.float32)) > 0
        is_number = value == value
        return value / jnp.where(is_number, 1.0, 2.0)

    return jax.tree.map(divided_by_one, tree)


def quotients(values: Sequence[Array], divisor: Array) -> tuple[Array, ...]:
    """The values divided by the same divisor: with one division on GPUs, and one each on CPUs (see `computed_once`)."""
    if jax.default_backend() == "cpu":
        return tuple(value / divisor for value in values)
    inverse = 1 / divisor
    return tuple(value * inverse for value in values)


class Loops:
    """How loops run: on the elements that need them, in chunks, or inside a kernel on blocks of elements.

    Args:
        in_kernel: Whether the functions are called inside a kernel.
        may_leave: The number of elements that `iterate` may leave unfinished: a loop of many elements that goes on for
            a few of them is wasteful. Kernels finish all elements.
    """

    def __init__(self, *, in_kernel: bool, may_leave: int = 0) -> None:
        self.in_kernel, self.may_leave = in_kernel, may_leave

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> tuple[Any, ...]:
        """Compute function(item) for every item, compiling the function only once.

        Outside kernels this is one call on the stacked items; for numbers and in kernels, it is a loop.
        """
        if self.in_kernel:
            return _map_in_kernel(function, items)
        together = stacked(items)
        on_numbers = jax.tree.leaves(together)[0].ndim == 1
        results = lax.map(function, together) if on_numbers else function(together)
        return tuple(jax.tree.map(itemgetter(i), results) for i in range(len(items)))

    def where_needed(
        self, mask: Array, function: Callable[..., Result], arguments: tuple[Any, ...], otherwise: Result, *, chunk: int
    ) -> Result:
        """Compute function(needed, *arguments) where the mask is true, and take `otherwise` elsewhere.

        Outside kernels, the cost grows with the number of true elements, not with the size of the batch. A kernel skips
        blocks without any.

        Args:
            mask: Where the function is needed. All other arrays have its shape.
            function: An elementwise function. It is called with whole chunks, and its first argument is a mask of the
                elements that are really needed.
            arguments: Its other arguments.
            otherwise: The result where the mask is false.
            chunk: The number of elements per chunk. With 1, the function is computed on numbers, one element after the
                other, in a single native function: the best way if few elements need it, and those need very different
                numbers of iterations.
        """
        shape, size = mask.shape, mask.size
        mask = computed_once(mask)
        if not shape:
            return lax.cond(mask, lambda: function(mask, *arguments), lambda: otherwise)
        if self.in_kernel:
            return lax.cond(
                any_true(mask), lambda: choose(mask, function(mask, *arguments), otherwise), lambda: otherwise
            )
        if size <= chunk:
            return choose(mask, function(mask, *arguments), otherwise)
        mask, arguments, otherwise = jax.tree.map(lambda leaf: leaf.reshape(-1), (mask, arguments, otherwise))
        if chunk == 1:
            results = _one_by_one(function, mask, arguments, otherwise)
            return jax.tree.map(lambda leaf: leaf.reshape(shape), results)
        # Needed element number n stands at places[n − 1]; rank is how many needed elements stand up to each place.
        rank = jnp.cumsum(mask.astype(jnp.int32))
        padded = -(-size // chunk) * chunk
        places = jnp.minimum(jnp.searchsorted(rank, jnp.arange(1, padded + 1)), size - 1)

        def one_chunk(carry: tuple[Array, Any]) -> tuple[Array, Any]:
            start, results = carry
            here = lax.dynamic_slice_in_dim(places, start, chunk)
            chosen = jax.tree.map(lambda leaf: leaf[here], arguments)
            new = function(start + jnp.arange(chunk) < rank[-1], *chosen)
            return start + chunk, jax.tree.map(
                lambda all_of, part: lax.dynamic_update_slice_in_dim(all_of, part, start, 0), results, new
            )

        blank = jax.tree.map(lambda leaf: jnp.zeros(padded, leaf.dtype), otherwise)
        _, results = lax.while_loop(lambda carry: carry[0] < rank[-1], one_chunk, (jnp.int32(0), blank))
        results = choose(mask, jax.tree.map(lambda leaf: leaf[rank - 1], results), otherwise)
        return jax.tree.map(lambda leaf: leaf.reshape(shape), results)

    def any_of(self, mask: Array) -> Array:
        """Whether a kernel's block has any element in the mask, for `if_any`."""
        return any_true(mask) if self.in_kernel else mask

    def if_any(
        self, needed: Array, function: Callable[..., tuple[Any, ...]], values: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Compute function(*values). A kernel skips it where no element of a block needs it, as `any_of` found out.

        Only elements that need it count. To ask the threads of a block takes as long as a dozen operations, so that it
        is done before a loop, and not in each of its rounds.
        """
        if not self.in_kernel:
            return function(*values)
        return lax.cond(needed, function, lambda *values: values, *values)

    def iterate(
        self,
        one_round: Callable[[Any, Any, Array], tuple[Any, Array]],
        constants: Any,
        state: Any,
        active: Array,
        *,
        most: int,
        usual: int,
    ) -> tuple[Any, Array]:
        """Repeat a round for each element as long as the element is active, but at most `most` times.

        Args:
            one_round: Maps (constants, state, active) to the next (state, active).
            constants: Arrays that a round reads.
            state: Arrays that a round changes.
            active: Which elements need a first round.
            most: The largest number of rounds.
            usual: The number of rounds after which elements may be left unfinished, as `may_leave` says.

        Returns:
            The state after the last round, and which elements were left unfinished.
        """

        def goes_on(carry: tuple[Array, Any, Array]) -> Array:
            count, _, active = carry
            if not self.may_leave:
                return (count < most) & any_true(active)
            return (count < most) & (jnp.sum(active) > jnp.where(count < usual, 0, self.may_leave))

        def turn(carry: tuple[Array, Any, Array]) -> tuple[Array, Any, Array]:
            count, state, active = carry
            return count + 1, *one_round(constants, state, active)

        count, state, active = lax.while_loop(goes_on, turn, (jnp.int32(0), state, active))
        return state, active & (count < most)


def _map_in_kernel(function: Callable[[Any], Any], items: Sequence[Any]) -> tuple[Any, ...]:
    """A loop over the items. A kernel cannot index registers, so that each turn selects its item and its result."""

    def turn(i: Array, results: tuple[Any, ...]) -> tuple[Any, ...]:
        item = items[0]
        for j in range(1, len(items)):
            item = choose(i == j, items[j], item)
        new = function(item)
        return tuple(choose(i == j, new, old) for j, old in enumerate(results))

    function = jax.jit(function)  # so that it is traced only once
    return lax.fori_loop(0, len(items), turn, (zeros_for(function, items[0]),) * len(items))


def _one_by_one(function: Callable[..., Result], mask: Array, arguments: tuple[Any, ...], otherwise: Result) -> Result:
    """Compute function(True, *arguments) for each true element in turn, on numbers, and take `otherwise` elsewhere.

    All arrays are vectors. The loop is one native function: XLA's programs for CPUs start every operation of a loop by
    itself, which takes longer than an operation on a number, but they compile small loops to functions, and this loop
    is marked as one of them. Where XLA ignores the mark, the result is the same, but it takes longer.
    """
    packed, unpack = _packed(arguments)
    results, unpack_results = _packed(otherwise)

    @jax.jit
    def loop(mask: Array, packed: Array, results: Array) -> Array:
        def next_needed(place: Array) -> Array:
            def skipped(place: Array) -> Array:
                return (place < mask.size) & ~lax.dynamic_index_in_dim(mask, place, keepdims=False)

            return lax.while_loop(skipped, lambda place: place + 1, place)

        def turn(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            place, results = carry
            chosen = unpack(lax.dynamic_index_in_dim(packed, place, keepdims=False))
            new, _ = _packed(function(jnp.asarray(True), *chosen))
            return next_needed(place + 1), lax.dynamic_update_index_in_dim(results, new, place, 0)

        return lax.while_loop(lambda carry: carry[0] < mask.size, turn, (next_needed(jnp.int32(0)), results))[1]

    # XLA compiles only calls whose arguments are all in use to a function, hence the packing.
    marked: Any = set_xla_metadata(loop(mask, packed, results), xla_cpu_small_call="true", inlineable="false")
    return unpack_results(marked)


def _packed(tree: Result) -> tuple[Array, Callable[[Array], Result]]:
    """The leaves as the last axis of one array of 32-bit numbers, and the inverse function."""
    leaves, structure = jax.tree.flatten(tree)
    kinds = [leaf.dtype for leaf in leaves]

    def stored(leaf: Array) -> Array:
        leaf = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        return lax.bitcast_convert_type(leaf, jnp.float32)

    def restored(number: Array, kind: Any) -> Array:
        number = lax.bitcast_convert_type(number, jnp.int32 if kind == jnp.bool_ else kind)
        return number != 0 if kind == jnp.bool_ else number

    def unpack(array: Array) -> Any:
        return jax.tree.unflatten(structure, [restored(array[..., i], kind) for i, kind in enumerate(kinds)])

    return jnp.stack([stored(leaf) for leaf in leaves], axis=-1), unpack
