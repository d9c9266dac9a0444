"""GPU kernels of many operations: each block of 32 elements is computed by one warp, which keeps it in registers."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.robust.components import zeros_for

Result = TypeVar("Result")
BLOCK = 32  # elements per block: one warp


class Apart:
    """Keeps what a kernel reads and writes apart from what it computes.

    For every load and store, Triton's compiler collects all operations that are connected with it, in a time that grows
    with the square of their number: minutes for a kernel with thousands of operations. Values that enter or leave a
    `while` loop do not connect operations. In such a kernel, loads and stores therefore stand in loops of one turn, and
    all loops around them are `while` loops. Since constants connect operations, too, the kernel reads vectors only,
    apart from numbers at its start: the addresses of single numbers share constants with its loops.

    Args:
        ones: The number 1, read twice from memory, since the compiler simplifies a loop whose turns it can count; or
            None if loads and stores may stand anywhere.
        wait: Lets the threads of a block wait until what each has written can be read by all.
    """

    def __init__(self, ones: tuple[Array, Array] | None, wait: Callable[[], None] = lambda: None) -> None:
        self.ones, self.wait = ones, wait

    def repeat(
        self,
        number: int,
        function: Callable[[Array, Any], Any],
        state: Any,
        goes_on: Callable[[Any], Array] | None = None,
    ) -> Any:
        """The state after function(0, ·), function(1, ·)…, `number` times.

        Where loads stand apart, it stops earlier if goes_on(state) is false.
        """
        if self.ones is None:
            return lax.fori_loop(0, number, function, state)

        def unfinished(carry: tuple[Array, tuple[Array, Array], Any]) -> Array:
            return (carry[0] < number) if goes_on is None else (carry[0] < number) & goes_on(carry[2])

        # The loop keeps its step among its own values: two ones that change places, or the compiler would move it out.
        def turn(carry: tuple[Array, tuple[Array, Array], Any]) -> tuple[Array, tuple[Array, Array], Any]:
            i, (one, other), state = carry
            return i + one, (other, one), function(i, state)

        return lax.while_loop(unfinished, turn, (jnp.int32(0), self.ones, state))[2]

    def read(self, function: Callable[[Array], Any]) -> Any:
        """The result of function(0), which reads. It must use its argument, or its loads would leave the loop."""
        if self.ones is None:
            return function(jnp.int32(0))
        return self.repeat(1, lambda i, _: function(i), zeros_for(function, jnp.int32(0)))

    def write(self, function: Callable[[Array, Any], None], values: Any) -> None:
        """Call function(0, values), which writes the values."""
        if self.ones is None:
            return function(jnp.int32(0), values)

        def turn(i: Array, values: Any) -> Any:
            function(i, values)
            return jax.tree.map(lambda value: value + value, values)  # unchanged, they would not enter the loop

        self.repeat(1, turn, values)

    def through_memory(
        self,
        function: Callable[[Array, tuple[Array, ...]], tuple[Array, ...]],
        values: tuple[Array, ...],
        time: Array,
        source: Any,
        target: Any,
    ) -> tuple[Array, ...]:
        """The results of function(0, values), which reads.

        The function works on matrices. If it were connected with the rest of the kernel, the compiler would have many
        threads hold, and compute, the same numbers everywhere. Its arguments and its results therefore pass through
        memory: entries [·, time, episode] of `source` and `target`.
        """
        if self.ones is None:
            return function(jnp.int32(0), values)

        def store(ref: Any, i: Array, numbers: tuple[Array, ...]) -> None:
            for j, number in enumerate(numbers):
                ref[j, time + i, :] = number

        def load(ref: Any, i: Array) -> tuple[Array, ...]:
            return tuple(ref[j, time + i, :] for j in range(ref.shape[0]))

        def turn(i: Array, nothing: tuple[()]) -> tuple[()]:
            store(target, i, function(i, load(source, i)))
            return nothing

        self.write(partial(store, source), values)
        self.wait()
        self.repeat(1, turn, ())
        self.wait()
        return self.read(partial(load, target))


def in_kernel(function: Callable[..., Result], *arguments: Any, interpret: bool = False) -> Result:
    """Compute function(*arguments) in a GPU kernel.

    Args:
        function: An elementwise function: all arrays in its arguments and in its result have the same shape.
        arguments: Its arguments.
        interpret: Whether the kernel is interpreted, so that it runs on any device.
    """
    from jax.experimental import pallas as pl  # slow to import, and only GPUs need it
    from jax.experimental.pallas import triton

    leaves, arguments_structure = jax.tree.flatten(arguments)
    shape, size = leaves[0].shape, leaves[0].size
    padded = pl.cdiv(size, BLOCK) * BLOCK
    block = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((BLOCK,), leaf.dtype), arguments)
    results, structure = jax.tree.flatten(jax.eval_shape(function, *block))
    kinds = [leaf.dtype for leaf in leaves]

    def stored(dtype: Any) -> Any:
        """Booleans are stored as integers."""
        return jnp.int32 if dtype == jnp.bool_ else dtype

    def filled(row: Array) -> Array:
        # A place without an element holds ones: in a state that says whether its episode has ended, it has.
        return jnp.pad(row, ((0, 0), (0, padded - size)), constant_values=1)

    def kernel(ones: Any, *refs: Any) -> None:
        apart = Apart((ones[0], ones[1]))
        inputs, outputs = refs[: len(leaves)], refs[len(leaves) :]
        values = apart.read(lambda i: [ref[i, :] for ref in inputs])
        values = [value != 0 if kind == jnp.bool_ else value for value, kind in zip(values, kinds, strict=True)]
        found = jax.tree.leaves(function(*jax.tree.unflatten(arguments_structure, values)))

        def write(i: Array, values: list[Array]) -> None:
            for ref, value in zip(outputs, values, strict=True):
                ref[i, :] = value

        apart.write(write, [value.astype(ref.dtype) for ref, value in zip(outputs, found, strict=True)])

    spec = pl.BlockSpec((1, BLOCK), lambda block: (0, block))
    outputs = pl.pallas_call(
        kernel,
        grid=(padded // BLOCK,),
        in_specs=[pl.BlockSpec((2,), lambda block: (0,)), *[spec] * len(leaves)],
        out_specs=[spec] * len(results),
        out_shape=[jax.ShapeDtypeStruct((1, padded), stored(result.dtype)) for result in results],
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(
        jnp.ones(2, jnp.int32),
        *(filled(leaf.astype(stored(leaf.dtype)).reshape(1, -1)) for leaf in leaves),
    )
    return jax.tree.unflatten(
        structure,
        [output[0, :size].reshape(shape).astype(result.dtype) for output, result in zip(outputs, results, strict=True)],
    )
