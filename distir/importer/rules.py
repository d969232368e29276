"""How each ONNX op becomes ours: a table from op type to a small function of the node.

A rule returns the results, in order: values, or arrays where they are known at import. It asks the node for every
attribute it understands; one that no rule asked for is an error, so nothing is dropped unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

from distir.importer.node import Node, Result
from distir.importer.tensors import dtype_of
from distir.ir.function import Value
from distir.ops.rules import shape_of, tensor

Rule = Callable[[Node], "Result | Sequence[Result]"]
RULES: dict[str, Rule] = {}


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Register a rule for these ONNX op types."""

    def register(f: Rule) -> Rule:
        for op_type in op_types:
            RULES[op_type] = f
        return f

    return register


def _same(n: Node) -> Result:
    """The op of the same name, without attributes."""
    return n.emit(n.proto.op_type, *n.operands())


SAME = (
    "Abs Add And Ceil Cos Equal Erf Exp Floor Greater GreaterOrEqual Less LessOrEqual Log MatMul Mul Neg Not Or "
    "Pow Reciprocal Relu Round Sigmoid Sign Sin Softplus Sqrt Sub Tanh Where Xor"
).split()
for _name in SAME:
    RULES[_name] = _same


@rule("Div")
def _div(n: Node) -> Result:
    """Of integers ONNX cuts off what is behind the point; ours divides numbers."""
    if not tensor(n.operand(0)).dtype.floating:
        raise n.error("a division of integers that depend on data is not supported")
    return n.emit("Div", *n.operands())


@rule("Identity")
def _identity(n: Node) -> Result:
    return n.operand(0)


@rule("Dropout")
def _dropout(n: Node) -> Result:
    """In inference nothing is dropped."""
    n.attr("seed")
    if n.has(2) and bool(n.known(2, "training_mode").any()):
        raise n.error("training_mode is on", "export the model in inference mode")
    return n.operand(0)


BINARY = {"Sum": "Add", "Mean": "Add", "Max": "Max", "Min": "Min"}


@rule(*BINARY)
def _chain(n: Node) -> Result:
    """Any number of operands, two at a time."""
    xs = n.operands()
    total = reduce(lambda a, b: n.emit(BINARY[n.proto.op_type], a, b), xs)
    return n.emit("Div", total, n.constant(float(len(xs)), total)) if n.proto.op_type == "Mean" else total


@rule("Cast")
def _cast(n: Node) -> Result:
    n.attr("saturate")  # of 8-bit floats only
    n.attr("round_mode")
    to = dtype_of(n.attr("to", 0), f"{n.scope.path}: {n}: attribute to")
    x = n.operand(0)
    return x if tensor(x).dtype is to else n.emit("Cast", x, to=to)


@rule("CastLike")
def _cast_like(n: Node) -> Result:
    n.attr("saturate")
    x, to = n.operand(0), tensor(n.operand(1)).dtype
    return x if tensor(x).dtype is to else n.emit("Cast", x, to=to)


@rule("Gelu")
def _gelu(n: Node) -> Result:
    n.require("approximate", "none", "none", "tanh")
    return n.emit("Gelu", n.operand(0), approximate=n.attr("approximate", "none"))


@rule("LeakyRelu")
def _leaky_relu(n: Node) -> Result:
    x, alpha = n.operand(0), n.attr("alpha", 0.01)
    positive = n.emit("Relu", x)
    negative = n.emit("Relu", n.emit("Neg", x))
    return n.emit("Sub", positive, n.emit("Mul", negative, n.constant(alpha, x)))


@rule("Clip")
def _clip(n: Node) -> Result:
    """Bounds known at import become attributes."""
    x = n.operand(0)
    bounds = {k: n.number(i) for i, k in ((1, "min"), (2, "max")) if n.has(i)}
    if None not in bounds.values():
        return n.emit("Clip", x, **bounds) if bounds else x
    if n.has(1):
        x = n.emit("Max", x, n.operand(1))
    return n.emit("Min", x, n.operand(2)) if n.has(2) else x


@rule("Softmax", "LogSoftmax")
def _softmax(n: Node) -> Result:
    return n.emit(n.proto.op_type, n.operand(0), axis=n.axis(-1))


@rule("LayerNormalization")
def _layer_norm(n: Node) -> Result:
    n.attr("stash_type")  # the precision of the statistics, ours to choose
    axis, epsilon = n.axis(-1), n.attr("epsilon", 1e-5)
    return n.emit("LayerNormalization", *n.operands(), axis=axis, epsilon=epsilon)


@rule("Gemm")
def _gemm(n: Node) -> Result:
    flags = {"transA": int(n.attr("transA", 0)), "transB": int(n.attr("transB", 0))}
    scales = {"alpha": float(n.attr("alpha", 1.0)), "beta": float(n.attr("beta", 1.0))}
    return n.emit("Gemm", *n.operands(), **scales, **flags)


@rule("Gather")
def _gather(n: Node) -> Result:
    """Known indices may count from the end; those that are data must not, as ours do not.

    One known index is a Slice.
    """
    axis, shape = n.axis(0), n.shape()
    if not n.scope.is_known(n.proto.input[1]):
        return n.emit("Gather", n.operand(0), n.operand(1), axis=axis)
    index = n.known(1, "the indices").astype(np.int64)
    if ((index < -shape[axis]) | (index >= shape[axis])).any():
        raise n.error(f"an index is out of range for dim {axis} of shape {shape}")
    index = index % shape[axis]
    if index.size != 1:
        return n.emit("Gather", n.operand(0), n.array("indices", index), axis=axis)
    at = int(index.reshape(-1)[0])
    row = n.emit("Slice", n.operand(0), starts=(at,), ends=(at + 1,), axes=(axis,), steps=(1,))
    return n.reshape(row, (*shape[:axis], *index.shape, *shape[axis + 1 :]))


@rule("Transpose")
def _transpose(n: Node) -> Result:
    rank = len(n.shape())
    perm = n.attr("perm", tuple(reversed(range(rank))))
    if sorted(perm) != list(range(rank)):
        raise n.error(f"perm {perm} is not a permutation of {rank} dims")
    return n.emit("Transpose", n.operand(0), perm=perm)


@rule("Reshape")
def _reshape(n: Node) -> Result:
    """A 0 in the target means the operand's dim, unless allowzero; -1 stays."""
    target, shape = n.ints(1, "the shape"), n.shape()
    if target is None:
        raise n.error("operand 1 is missing")
    if not n.attr("allowzero", 0):
        if any(d == 0 and i >= len(shape) for i, d in enumerate(target)):
            raise n.error(f"target {target} keeps a dim that shape {shape} does not have")
        target = tuple(shape[i] if d == 0 else d for i, d in enumerate(target))
    return n.reshape(n.operand(0), target)


@rule("Flatten")
def _flatten(n: Node) -> Result:
    shape, axis = n.shape(), n.attr("axis", 1)
    axis = axis if axis == len(shape) else n.wrap(axis, len(shape))
    return n.reshape(n.operand(0), (math.prod(shape[:axis]), math.prod(shape[axis:])))


def _axes(n: Node, i: int = 1) -> tuple[int, ...] | None:
    """The axes, an operand since opset 13, an attribute before; None if left out."""
    axes = n.attr("axes")
    return n.ints(i, "the axes") if axes is None else axes


@rule("Squeeze")
def _squeeze(n: Node) -> Result:
    shape, axes = n.shape(), _axes(n)
    if axes is None:
        axes = [i for i, d in enumerate(shape) if d == 1]
    gone = {n.wrap(a, len(shape)) for a in axes}
    if any(shape[i] != 1 for i in gone):
        raise n.error(f"dims {sorted(gone)} of shape {shape} are not all 1")
    return n.reshape(n.operand(0), tuple(d for i, d in enumerate(shape) if i not in gone))


@rule("Unsqueeze")
def _unsqueeze(n: Node) -> Result:
    shape, axes = list(n.shape()), _axes(n) or ()
    rank = len(shape) + len(axes)
    for a in sorted(n.wrap(a, rank) for a in axes):
        shape.insert(a, 1)
    return n.reshape(n.operand(0), tuple(shape))


@rule("Expand")
def _expand(n: Node) -> Result:
    want, shape = n.ints(1, "the shape") or (), n.shape()
    try:
        shape = np.broadcast_shapes(want, shape)
    except ValueError:
        raise n.error(f"shape {shape} does not expand to {want}") from None
    x = n.operand(0)
    return x if shape == shape_of(x) else n.emit("Expand", x, shape=shape)


@rule("Concat")
def _concat(n: Node) -> Result:
    return n.operand(0) if len(n.proto.input) == 1 else n.emit("Concat", *n.operands(), axis=n.axis(0))


@rule("Split")
def _split(n: Node) -> Sequence[Result]:
    axis, sizes = n.axis(0), n.ints(1, "the sizes") or n.attr("split")
    parts = n.attr("num_outputs", len(n.proto.output))
    size = n.shape()[axis]
    if sizes is None:
        each = -(-size // parts)
        sizes = (*[each] * (parts - 1), size - each * (parts - 1))
    if len(sizes) == 1:
        return [n.operand(0)]
    if len(set(sizes)) == 1:
        return n.emit("Split", n.operand(0), axis=axis, parts=len(sizes))
    return n.emit("Split", n.operand(0), axis=axis, sizes=tuple(sizes))


@rule("Slice")
def _slice(n: Node) -> Result:
    """Starts and ends come out within the dim, ends open; for a negative step an end of -1 is before the first."""
    shape = n.shape()
    starts, ends = n.ints(1, "starts") or (), n.ints(2, "ends") or ()
    axes = n.ints(3, "axes") or tuple(range(len(starts)))
    steps = n.ints(4, "steps") or (1,) * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise n.error(f"starts {starts}, ends {ends}, axes {axes}, steps {steps} do not fit")
    rows = []
    for start, end, axis, step in sorted(zip(starts, ends, axes, steps, strict=True), key=lambda r: r[2]):
        axis = n.wrap(axis, len(shape))
        start, end, step = slice(start, end, step).indices(shape[axis])
        if (start, end, step) != (0, shape[axis], 1):
            rows.append((start, end, axis, step))
    if not rows:
        return n.operand(0)
    starts, ends, axes, steps = zip(*rows, strict=True)
    return n.emit("Slice", n.operand(0), starts=starts, ends=ends, axes=axes, steps=steps)


def _reduce(n: Node, op_type: str, x: Value) -> Value:
    axes, keepdims = _axes(n), int(n.attr("keepdims", 1))
    rank = len(shape_of(x))
    if not axes:
        if n.attr("noop_with_empty_axes", 0):
            return x
        axes = tuple(range(rank))
    n.attr("noop_with_empty_axes")
    axes = tuple(sorted(n.wrap(a, rank) for a in axes))
    return n.emit(op_type, x, axes=axes, keepdims=keepdims)


@rule("ReduceSum", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd")
def _reduction(n: Node) -> Result:
    return _reduce(n, n.proto.op_type, n.operand(0))


@rule("ReduceSumSquare", "ReduceL2")
def _sum_of_squares(n: Node) -> Result:
    x = n.operand(0)
    total = _reduce(n, "ReduceSum", n.emit("Mul", x, x))
    return total if n.proto.op_type == "ReduceSumSquare" else n.emit("Sqrt", total)


@rule("Shape")
def _shape(n: Node) -> Result:
    shape = n.shape()
    start, end, _ = slice(n.attr("start", 0), n.attr("end")).indices(len(shape))
    return np.array(shape[start:end], np.int64)


@rule("Size")
def _size(n: Node) -> Result:
    return np.array(math.prod(n.shape()), np.int64)


@rule("Constant")
def _constant(n: Node) -> Result:
    for name in ("value", "value_int", "value_ints", "value_float", "value_floats"):
        value = n.attr(name)
        if isinstance(value, np.ndarray):
            return value
        if value is not None:
            return np.array(value, np.float32 if "float" in name else np.int64)
    raise n.error("only numbers and tensors are supported")


@rule("ConstantOfShape")
def _constant_of_shape(n: Node) -> Result:
    value = n.attr("value", np.zeros(1, np.float32))
    return np.broadcast_to(value.reshape(()), n.ints(0, "the shape") or ())
