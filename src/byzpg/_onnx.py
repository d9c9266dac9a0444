"""A JAX function of one vector as ONNX nodes: what an export of a network of the user's own needs.

The function is traced, and the operations that depend on the vector are translated one by one. Everything else is
computed and becomes a constant.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

# Operations with one counterpart that takes the same inputs.
SAME = {
    name: operator
    for text in (
        "tanh Tanh, exp Exp, log Log, neg Neg, sin Sin, cos Cos, sqrt Sqrt, abs Abs, sign Sign, logistic Sigmoid",
        "erf Erf, floor Floor, ceil Ceil, stop_gradient Identity, copy Identity, copy_p Identity",
        "add Add, add_any Add, sub Sub, mul Mul, div Div, max Max, min Min, pow Pow",
        "gt Greater, lt Less, ge GreaterOrEqual, le LessOrEqual, eq Equal, and And, or Or, not Not",
    )
    for name, operator in (pair.split() for pair in text.split(", "))
}
REDUCTIONS = {"reduce_max": "ReduceMax", "reduce_min": "ReduceMin", "reduce_prod": "ReduceProd"}
# Operations that contain others, which are translated in their place.
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2")


class Untranslatable(ValueError):
    """An operation has no translation."""


def translated(function: Callable[[jax.Array], jax.Array], size: int, input_name: str, output_name: str) -> Any:
    """Translate a function of one float32 vector [size] into an ONNX graph.

    Raises:
        Untranslatable: If it contains an operation that has no translation; the message names it.
    """
    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((size,), jnp.float32))
    writer = _Writer()
    (result,) = writer.run(closed.jaxpr, closed.consts, [input_name])
    if not isinstance(result, str):
        result = writer.constant(result)
    writer.nodes.append(helper.make_node("Identity", [result], [output_name]))
    (shape,) = (each.shape for each in closed.out_avals)
    return helper.make_graph(
        writer.nodes,
        "network",
        [helper.make_tensor_value_info(input_name, TensorProto.FLOAT, [size])],
        [helper.make_tensor_value_info(output_name, TensorProto.FLOAT, shape)],
        writer.constants,
    )


class _Writer:
    """Writes nodes; a value is the name of a tensor or, if it does not depend on the vector, an array."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def constant(self, value: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(self, operator: str, *inputs: Any, **attributes: Any) -> str:
        names = [each if isinstance(each, str) else self.constant(each) for each in inputs]
        output = f"value_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, names, [output], **attributes))
        return output

    def run(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """The values of a program's results."""
        values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

        def value(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else values[atom]

        for equation in jaxpr.eqns:
            inputs = [value(atom) for atom in equation.invars]
            results = self.equation(equation, inputs)
            values.update(zip(equation.outvars, results, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        name, options = equation.primitive.name, equation.params
        if name in CALLS:
            inner = options.get("jaxpr", options.get("call_jaxpr"))
            return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs)
        if not any(isinstance(each, str) for each in inputs):
            found = equation.primitive.bind(*map(jnp.asarray, inputs), **options)
            return found if equation.primitive.multiple_results else [found]
        if name == "split":
            ends = np.cumsum([0, *options["sizes"]])
            axis = [options["axis"]]
            return [self.add("Slice", inputs[0], *map(_whole, ([a], [b], axis))) for a, b in pairwise(ends)]
        return [
            self.operation(name, options, inputs, [each.aval for each in equation.invars], equation.outvars[0].aval)
        ]

    def operation(self, name: str, options: Any, inputs: list[Any], shapes: list[Any], result: Any) -> str:
        if name in SAME:
            return self.add(SAME[name], *inputs)
        if name in REDUCTIONS:
            return self.add(REDUCTIONS[name], *inputs, axes=list(options["axes"]), keepdims=0)
        match name:
            case "reduce_sum":
                return self.add("ReduceSum", inputs[0], _whole(options["axes"]), keepdims=0)
            case "integer_pow":
                return self.add("Pow", inputs[0], np.float32(options["y"]))
            case "square":
                return self.add("Mul", inputs[0], inputs[0])
            case "rsqrt":
                return self.add("Reciprocal", self.add("Sqrt", *inputs))
            case "log1p":
                return self.add("Log", self.add("Add", inputs[0], np.float32(1)))
            case "expm1":
                return self.add("Sub", self.add("Exp", *inputs), np.float32(1))
            case "ne":
                return self.add("Not", self.add("Equal", *inputs))
            case "select_n" if len(inputs) == 3 and shapes[0].dtype == bool:
                return self.add("Where", inputs[0], inputs[2], inputs[1])
            case "convert_element_type":
                return self.add("Cast", inputs[0], to=helper.np_dtype_to_tensor_dtype(np.dtype(result.dtype)))
            case "reshape" | "squeeze" | "expand_dims":
                return self.add("Reshape", inputs[0], _whole(result.shape))
            case "broadcast_in_dim":
                kept = dict(zip(options["broadcast_dimensions"], shapes[0].shape, strict=True))
                spread = [kept.get(axis, 1) for axis in range(len(result.shape))]
                return self.add("Expand", self.add("Reshape", inputs[0], _whole(spread)), _whole(result.shape))
            case "transpose":
                return self.add("Transpose", inputs[0], perm=list(options["permutation"]))
            case "concatenate":
                return self.add("Concat", *inputs, axis=options["dimension"])
            case "stack":
                single = [1 if axis == options["axis"] else size for axis, size in enumerate(result.shape)]
                rows = [self.add("Reshape", each, _whole(single)) for each in inputs]
                return self.add("Concat", *rows, axis=options["axis"])
            case "tile":
                return self.add("Tile", inputs[0], _whole(options["reps"]))
            case "clamp":
                low, value, high = inputs
                return self.add("Min", self.add("Max", value, low), high)
            case "slice":
                steps = options["strides"] or [1] * len(result.shape)
                bounds = (options["start_indices"], options["limit_indices"], range(len(result.shape)), steps)
                return self.add("Slice", inputs[0], *map(_whole, bounds))
            case "dot_general":
                return self.product(options["dimension_numbers"], inputs, shapes, result)
        raise Untranslatable(f"the operation {name} has no translation to ONNX")

    def product(self, axes: Any, inputs: list[Any], shapes: list[Any], result: Any) -> str:
        """Sum over the contracted axes: a product of matrices [batch, free, summed] and [batch, summed, free]."""
        (left, right), (left_batch, right_batch) = axes
        matrices = []
        for value, array, summed, batch in zip(inputs, shapes, (left, right), (left_batch, right_batch), strict=True):
            free = [axis for axis in range(array.ndim) if axis not in (*summed, *batch)]
            sizes = [prod(array.shape[axis] for axis in group) for group in (batch, free, summed)]
            order, is_left = (*batch, *free, *summed), not matrices
            if not is_left:
                order, sizes = (*batch, *summed, *free), [sizes[0], sizes[2], sizes[1]]
            turned = self.add("Transpose", value, perm=list(order)) if array.ndim > 1 else value
            matrices.append(self.add("Reshape", turned, _whole(sizes)))
        return self.add("Reshape", self.add("MatMul", *matrices), _whole(result.shape))


def _whole(numbers: Any) -> np.ndarray:
    return np.asarray(list(numbers), np.int64)
