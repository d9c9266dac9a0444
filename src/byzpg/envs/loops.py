"""Elementwise functions with loops in them, of which some elements need many turns and most need few or none.

A loop ends when the last of its batch is done. So on CPUs the elements that need one are taken out of the batch and
seen to in chunks. On GPUs a loop becomes a kernel, in which 32 elements at a time stay in registers and go through it
by themselves: as a plain program, every turn would be a dozen launches.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

Result = TypeVar("Result")
BLOCK = 32  # elements of a kernel's block: one warp


def some(mask: Array) -> Array:
    # jnp.any would do, but Pallas kernels know no reduction by "or".
    return jnp.max(mask.astype(jnp.int32)) > 0


def choose(mask: Array, a: Any, b: Any) -> Any:
    """`a` where the mask holds, else `b`, for every array of the two."""
    return jax.tree.map(partial(jnp.where, mask), a, b)


def stacked(items: Sequence[Any]) -> Any:
    """One item with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *items)


def together(function: Callable[[Any], Any], items: Sequence[Any]) -> tuple[Any, ...]:
    """function(item) for every item, all at once as one batch."""
    results = function(stacked(items))
    return tuple(jax.tree.map(itemgetter(i), results) for i in range(len(items)))


def once(tree: Any) -> Any:
    """The same; but XLA on CPUs, which computes anew for each use whatever is not a quotient, computes it once."""
    return jax.tree.map(lambda leaf: leaf / jnp.where(leaf == leaf, 1.0, 2.0), tree)


class Loops:
    """How loops are run: in chunks, or in kernels."""

    def __init__(self, *, in_kernels: bool, interpret: bool = False) -> None:
        self.in_kernels, self.interpret = in_kernels, interpret

    def few(
        self, mask: Array, function: Callable[..., Result], arguments: tuple[Any, ...], otherwise: Result, chunk: int
    ) -> Result:
        """function(mask, *arguments) where the mask holds, else `otherwise`; all arrays have the mask's shape.

        In chunks, at the cost of as many as hold them.
        """
        shape, size = mask.shape, mask.size
        mask = once(mask.astype(jnp.float32)) > 0
        if self.in_kernels or size <= chunk:
            return choose(mask, function(mask, *arguments), otherwise)
        mask, arguments, otherwise = jax.tree.map(lambda leaf: leaf.reshape(-1), (mask, arguments, otherwise))
        found = jnp.cumsum(mask.astype(jnp.int32))
        padded = -(-size // chunk) * chunk
        places = jnp.minimum(jnp.searchsorted(found, jnp.arange(1, padded + 1)), size - 1)

        def one_chunk(carry: tuple[Array, Any]) -> tuple[Array, Any]:
            start, results = carry
            here = lax.dynamic_slice_in_dim(places, start, chunk)
            chosen = jax.tree.map(lambda leaf: leaf[here], arguments)
            new = function(start + jnp.arange(chunk) < found[-1], *chosen)
            return start + chunk, jax.tree.map(
                lambda all_of, part: lax.dynamic_update_slice_in_dim(all_of, part, start, 0), results, new
            )

        blank = jax.tree.map(lambda leaf: jnp.zeros(padded, leaf.dtype), otherwise)
        _, results = lax.while_loop(lambda carry: carry[0] < found[-1], one_chunk, (jnp.int32(0), blank))
        results = choose(mask, jax.tree.map(lambda leaf: leaf[found - 1], results), otherwise)
        return jax.tree.map(lambda leaf: leaf.reshape(shape), results)

    def rounds(
        self,
        one_round: Callable[[Any, Any, Array], tuple[Any, Array]],
        most: int,
        constants: Any,
        state: Any,
        wanted: Array,
        usual: int,
        chunk: int,
    ) -> tuple[Any, Array]:
        """The state after at most so many rounds, as long as one_round(constants, state, run) → (state, run) wants it.

        In chunks, for those that are not done after the `usual` number. Also given: who would still go on.
        """

        def up_to(number: int, run: Array, constants: Any, state: Any) -> tuple[Any, Array]:
            def turn(carry: tuple[Array, Any, Array]) -> tuple[Array, Any, Array]:
                count, state, run = carry
                return count + 1, *one_round(constants, state, run)

            carry = jnp.int32(0), state, run
            return lax.while_loop(lambda carry: (carry[0] < number) & some(carry[2]), turn, carry)[1:]

        if self.in_kernels or wanted.size <= chunk:
            return self.looped(partial(up_to, most), wanted, constants, state)
        state, run = up_to(usual, wanted, constants, state)
        return self.few(run, partial(up_to, most - usual), (constants, state), (state, run), chunk)

    def looped(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """function(*arguments), where all arrays of either have one shape."""
        if not self.in_kernels:
            return function(*arguments)
        leaves, structure = jax.tree.flatten(arguments)
        return _in_kernel(lambda *leaves: function(*jax.tree.unflatten(structure, leaves)), leaves, self.interpret)


def by_platform(*arguments: Any, cuda: Callable[..., Result], default: Callable[..., Result]) -> Result:
    """`lax.platform_dependent`, but where there are only CPUs, the kernel is not even traced: that takes long."""
    if jax.default_backend() == "cpu":
        return default(*arguments)
    return lax.platform_dependent(*arguments, cuda=cuda, default=default)


def _in_kernel(function: Callable[..., Result], leaves: Sequence[Array], interpret: bool) -> Result:
    from jax.experimental import pallas as pl  # slow to import, and only GPUs need it
    from jax.experimental.pallas import triton

    shape, size = leaves[0].shape, leaves[0].size
    padded = pl.cdiv(size, BLOCK) * BLOCK
    block = jax.ShapeDtypeStruct((BLOCK,), jnp.float32)
    kinds = [leaf.dtype for leaf in leaves]
    results, structure = jax.tree.flatten(jax.eval_shape(function, *(block.update(dtype=kind) for kind in kinds)))

    def stored(dtype: Any) -> Any:
        return jnp.int32 if dtype == jnp.bool_ else dtype

    def kernel(*refs: Any) -> None:
        given, taken = refs[: len(leaves)], refs[len(leaves) :]
        values = (ref[...] != 0 if kind == jnp.bool_ else ref[...] for ref, kind in zip(given, kinds, strict=True))
        for ref, value in zip(taken, jax.tree.leaves(function(*values)), strict=True):
            ref[...] = value.astype(ref.dtype)

    spec = pl.BlockSpec((BLOCK,), lambda i: (i,))
    outputs = pl.pallas_call(
        kernel,
        grid=(padded // BLOCK,),
        in_specs=[spec] * len(leaves),
        out_specs=[spec] * len(results),
        out_shape=[jax.ShapeDtypeStruct((padded,), stored(result.dtype)) for result in results],
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(*(jnp.pad(leaf.astype(stored(leaf.dtype)).reshape(-1), (0, padded - size)) for leaf in leaves))
    return jax.tree.unflatten(
        structure,
        [output[:size].reshape(shape).astype(result.dtype) for output, result in zip(outputs, results, strict=True)],
    )
