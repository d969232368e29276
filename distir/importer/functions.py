"""Ops that a model, or the ONNX standard, defines through other ops."""

from __future__ import annotations

import re

import onnx
from onnx import helper, inliner

from distir.importer.node import Node
from distir.importer.tensors import DTYPES
from distir.ir.errors import ModelError
from distir.ops.rules import shape_of, tensor

_SOURCE = re.compile(r"\.(cc|cpp|h):\d+|Assertion")
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def inlined(model: onnx.ModelProto, path: object) -> onnx.ModelProto:
    """The model with its own functions inlined. Raises ModelError if they cannot be."""
    if not model.functions:
        return model
    try:
        model = inliner.inline_local_functions(model)
    except Exception as e:  # the inliner raises all kinds
        raise ModelError(f"{path}: its functions cannot be inlined{_said(e)}") from e
    if model.functions:
        raise ModelError(f"{path}: its function {model.functions[0].name} cannot be inlined: it calls itself?")
    return model


def definition(node: Node) -> list[onnx.NodeProto] | None:
    """The nodes by which the standard defines an op, for operands of these types; None if it does not."""
    proto, scope = node.proto, node.scope
    if proto.domain not in ("", "ai.onnx") or not onnx.defs.has(proto.op_type):
        return None
    inputs: list[onnx.ValueInfoProto] = []
    for name in dict.fromkeys(n for n in proto.input if n):
        if name in scope.known and name not in scope.values and name not in scope.stored:
            array = scope.known[name]()
            inputs.append(
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            )
        else:
            value = scope.value(name)
            inputs.append(helper.make_tensor_value_info(name, _CODES[tensor(value).dtype], shape_of(value)))
    outputs = [onnx.ValueInfoProto(name=name) for name in proto.output if name]
    graph = helper.make_graph([_with_defaults(proto, node.opset)], "definition", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", node.opset)])
    try:
        model = inliner.inline_selected_functions(model, [("", proto.op_type)], inline_schema_functions=True)
    except Exception as e:  # the inliner raises all kinds
        left_out = [k for k, name in enumerate(proto.input) if not name]  # which onnx's inliner does not know
        without = f" where operand {left_out[0]} is left out" if left_out else ""
        raise node.error(f"its definition cannot be inlined{without}{_said(e)}") from e
    nodes = list(model.graph.node)
    if any(n.op_type == proto.op_type for n in nodes):
        return None
    kept = {*proto.input, *proto.output}
    for n in nodes:
        for names in (n.input, n.output):
            names[:] = [name if name in kept else f"{proto.output[0]}/{name}" for name in names]
        n.name = proto.name
    return nodes


def _said(e: Exception) -> str:
    """The first line of what onnx says, unless it is of its own source."""
    lines = str(e).strip().splitlines()
    return f": {lines[0]}" if lines and not _SOURCE.search(lines[0]) else ""


def _with_defaults(proto: onnx.NodeProto, opset: int) -> onnx.NodeProto:
    """The node with the attributes it leaves out: definitions refer to them."""
    result = onnx.NodeProto()
    result.CopyFrom(proto)
    given = {a.name for a in proto.attribute}
    for name, attribute in onnx.defs.get_schema(proto.op_type, opset).attributes.items():
        if name not in given and attribute.default_value.type:
            result.attribute.append(attribute.default_value)
    return result
