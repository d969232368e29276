"""Computing at import with what is known there: shape arithmetic, masks, position ids."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from distir.importer.node import Node, Result, Scope

LIMIT = 1 << 22
"""Elements an operand may have to be computed with at import."""

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
"""Ops whose results are not determined by operands and attributes, or that hold graphs, or give no tensors."""


def attributes_of(proto: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes as numbers, strings, tuples and arrays; graphs stay what they are."""
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


def foldable(scope: Scope, proto: onnx.NodeProto) -> bool:
    """Whether a node can be computed now: all it reads is known, and small enough."""
    if not proto.input or proto.op_type in NOT_PURE:
        return False
    for name in proto.input:
        if name and not scope.is_known(name):
            return False
    return all(scope.size(name) <= LIMIT for name in proto.input if name)


def fold(node: Node, opset: int) -> list[Result]:
    """The results of a node whose operands are all known. Raises ModelError if it cannot be computed."""
    from onnx.reference import ReferenceEvaluator

    scope, proto = node.scope, node.proto
    names = list(dict.fromkeys(name for name in proto.input if name))
    arrays = {name: scope.known[name]() for name in names}
    inputs = [helper.make_value_info(name, onnx.TypeProto()) for name in names]
    outputs = [helper.make_value_info(name, onnx.TypeProto()) for name in proto.output if name]
    graph = helper.make_graph([proto], "known", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(proto.domain, opset)])
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            results = ReferenceEvaluator(model).run(None, arrays)
    except Exception as e:  # the evaluator raises all kinds
        raise node.error(f"cannot be computed from what is known at import: {e}".splitlines()[0]) from e
    made = iter(results)
    return [np.asarray(next(made)) if name else np.empty(0) for name in proto.output]
