"""Constant folding at import: shape arithmetic, masks, position ids.

An array that repeats along a dim has stride 0 along it, so that it takes little memory whatever its size. A node is
evaluated only if its result is small.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from distir.importer.node import NUMBERS, Node, Result, Scope, collapsed, distinct_elements
from distir.importer.tensor_proto import DTYPES

LIMIT = 1 << 22
"""The maximum number of elements of an operand that is evaluated at import."""
RESULT = 1 << 28
"""The maximum size of a result, in bytes."""
_READ = 1 << 12
"""The maximum number of elements of an operand that is used to infer a result's shape."""

NOT_PURE = frozenset(
    {
        *(
            "Bernoulli",
            "Multinomial",
            "RandomNormal",
            "RandomNormalLike",
            "RandomUniform",
            "RandomUniformLike",
        ),
        *("Dropout", "If", "Loop", "Scan", "SplitToSequence"),
    }
)
"""Ops that are random, have subgraphs, or do not return tensors."""


def attributes_of(proto: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes as numbers, strings, tuples and arrays; graphs are not converted."""
    result: dict[str, Any] = {}
    for a in proto.attribute:
        value = helper.get_attribute_value(a)
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        elif isinstance(value, onnx.TensorProto):
            value = numpy_helper.to_array(value)
        elif isinstance(value, onnx.GraphProto):
            pass
        elif not isinstance(value, int | float):
            value = tuple(v.decode(errors="replace") if isinstance(v, bytes) else v for v in value)
        result[a.name] = value
    return result


POINTS = frozenset(
    (
        *(
            "Abs",
            "Add",
            "And",
            "BitShift",
            "BitwiseAnd",
            "BitwiseNot",
            "BitwiseOr",
            "BitwiseXor",
            "Cast",
            "Ceil",
            "Clip",
        ),
        *("Cos", "Div", "Equal", "Exp", "Floor", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less"),
        *(
            "LessOrEqual",
            "Log",
            "Max",
            "Mean",
            "Min",
            "Mod",
            "Mul",
            "Neg",
            "Not",
            "Or",
            "Pow",
            "Reciprocal",
            "Relu",
            "Round",
            "Sign",
        ),
        *("Sin", "Sqrt", "Sub", "Sum", "Where", "Xor"),
    )
)
"""Elementwise ops with broadcasting."""

UNCHECKED = ("LayerNormalization",)
"""Ops whose shape inference in onnx ends the process where their axis is out of range."""

VIEWS = frozenset(("Identity", "Shape", "Size", "Slice", "Squeeze", "Transpose", "Unsqueeze"))
"""Ops whose results are views, or a few numbers: the first operand may be of any size."""


def foldable(scope: Scope, proto: onnx.NodeProto) -> bool:
    """Whether a node can be evaluated at import: all its operands are known and small enough."""
    if not proto.input or proto.op_type in NOT_PURE:
        return False
    if proto.op_type in ("ConstantOfShape", "Range", *UNCHECKED) or (
        proto.op_type == "GatherND" and not any(a.name == "batch_dims" and a.i for a in proto.attribute)
    ):
        return False  # their rules do it
    if any(a.name == "num_outputs" and a.i != len(proto.output) for a in proto.attribute):
        return False  # onnx's shape inference would end the process
    for name in proto.input:
        if name and not scope.is_known(name):
            return False
    return all(scope.size(name) <= LIMIT for name in proto.input if name)


def fold(node: Node, opset: int) -> list[Result] | None:
    """The results of a node whose operands are all known; None if they are too large or of unknown size.

    Raises ModelError if they cannot be computed, or exceed the limit on all arrays computed at import.
    """
    proto = node.proto
    arrays = {name: node.scope.known[name]() for name in proto.input if name}
    if any(x.dtype.kind in "OSU" for x in arrays.values()):  # texts, whose length no shape tells
        return None
    if proto.op_type == "Expand" and len(arrays) == 2:
        return _expanded(*[arrays[name] for name in proto.input])
    if proto.op_type == "Cast" and node.scope.numbers and distinct_elements(x := arrays[proto.input[0]]) == 1:
        return [node.scope.cast(x, DTYPES[node.attr("to")])] if node.attr("to") in DTYPES else None
    if proto.op_type == "Concat" and node.attr("axis") in (-1, arrays[proto.input[0]].ndim - 1):
        node.scope.joined[proto.output[0]] = list(proto.input)  # each of them may repeat
    cut, restore = _repeated(node, arrays)
    if proto.op_type in VIEWS:
        if any(arrays[name].size > NUMBERS for name in proto.input[1:] if name):
            return None
    else:
        size = _result_bytes(node, cut, opset)
        if size is None or size > RESULT or any(x.size > LIMIT for x in cut.values()):
            return None
    results = [restore(y) for y in _evaluated(node, cut, opset)]
    for y in results:
        node.scope.take(node, distinct_elements(y) * y.itemsize)
    made = iter(results)
    return [next(made) if name else np.empty(0) for name in proto.output]


def _expanded(x: np.ndarray, shape: np.ndarray) -> list[Result] | None:
    """The expanded array, a view of any size. None if the shape does not fit: then the import rule raises the error."""
    if shape.size > NUMBERS:
        return None
    try:
        return [np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(int(n) for n in shape)))]
    except (ValueError, RuntimeError):  # of more dims than numpy takes
        return None


def _repeated(
    node: Node, arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], Callable[[Any], np.ndarray]]:
    """The operands reduced to size 1 along dims along which all repeat and the op acts elementwise, and a function that
    repeats a result along these."""
    proto, same = node.proto, (dict(arrays), np.asarray)
    if not arrays:  # all operands are left out
        return same
    if proto.op_type in POINTS:
        along, whole = list(arrays), None
    elif proto.op_type in ("Concat", "CumSum"):
        along = list(arrays) if proto.op_type == "Concat" else [proto.input[0]]
        axis = node.attr("axis") if proto.op_type == "Concat" else arrays[proto.input[1]].reshape(-1)[:1]
        ranks = {arrays[name].ndim for name in along}
        if len(ranks) != 1 or axis is None:
            return same
        whole = int(np.asarray(axis).reshape(-1)[0]) % max(1, *ranks) - max(ranks)
    else:
        return same
    rank = max(arrays[name].ndim for name in along)
    dims = {
        d: max(arrays[name].shape[d] for name in along if arrays[name].ndim >= -d)
        for d in range(-rank, 0)
        if d != whole and all(_repeats(arrays[name], d) for name in along)
    }
    dims = {d: n for d, n in dims.items() if n > 1}
    if not dims:
        return same

    def restore(y: Any) -> np.ndarray:
        y = np.asarray(y)
        return np.broadcast_to(y, tuple(dims.get(i - y.ndim, n) for i, n in enumerate(y.shape)))

    return {**arrays, **{name: collapsed(arrays[name], dims) for name in along}}, restore


def _repeats(x: np.ndarray, dim: int) -> bool:
    """Whether the array is constant along a dim, counted from the last, or does not have it."""
    return x.ndim < -dim or x.shape[dim] == 1 or x.strides[dim] == 0


def _result_bytes(node: Node, arrays: Mapping[str, np.ndarray], opset: int) -> int | None:
    """The total size of a node's results in bytes, by ONNX's shape inference; None if it cannot infer it.

    Raises ModelError if its operands do not fit.
    """
    if node.proto.op_type in BOUNDED:
        each = max(1, len(node.proto.output))  # NonZero gives a number for each dim, others one for each output
        return sum(x.size * max(x.itemsize, 8 * max(each, x.ndim)) for x in arrays.values())
    small = [numpy_helper.from_array(np.array(x), k) for k, x in arrays.items() if x.size <= _READ]
    inputs = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for k, x in arrays.items()
        if x.size > _READ
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.proto.output if name]
    graph = helper.make_graph([node.proto], "known", inputs, outputs, small)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(node.proto.domain, opset)])
    try:
        found = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output
    except Exception as e:  # it raises all kinds
        raise node.error("cannot be computed from what is known at import: its operands do not fit") from e
    total = 0
    for info in found:
        t = info.type.tensor_type
        if not t.HasField("shape") or any(not d.HasField("dim_value") for d in t.shape.dim):
            return None
        size = DTYPES[t.elem_type].size if t.elem_type in DTYPES else 16
        total += math.prod(d.dim_value for d in t.shape.dim) * size
    return total


BOUNDED = frozenset(("Compress", "NonZero", "Unique"))
"""Ops with data-dependent result shapes, bounded by the operands'."""


def _evaluated(node: Node, arrays: Mapping[str, np.ndarray], opset: int) -> Sequence[Any]:
    """The results that the node names. Raises ModelError if they cannot be computed."""
    from onnx.reference import ReferenceEvaluator

    proto = node.proto
    inputs = [helper.make_value_info(name, onnx.TypeProto()) for name in arrays]
    outputs = [helper.make_value_info(name, onnx.TypeProto()) for name in proto.output if name]
    graph = helper.make_graph([proto], "known", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(proto.domain, opset)])
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return ReferenceEvaluator(model).run(None, dict(arrays))  # type: ignore[return-value]
    except Exception as e:  # the evaluator raises all kinds
        raise node.error(f"cannot be computed from what is known at import: {e}".splitlines()[0]) from e
