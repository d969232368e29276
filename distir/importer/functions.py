"""Inlines functions: ops that a model, or the ONNX standard, defines by other ops."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import onnx
from onnx import helper, inliner

from distir.importer.node import Node
from distir.importer.tensor_proto import DTYPES
from distir.ir.errors import ModelError
from distir.ops.rules import shape_of, tensor

_SOURCE = re.compile(r"\.(cc|cpp|h):\d+|Assertion")
_CODES = {dtype: code for code, dtype in DTYPES.items()}

NODES, BYTES, DEPTH = 1 << 18, 1 << 30, 100
"""Limits of what functions may expand to: nodes, bytes, and depth of nested calls (onnx's own limit)."""


class _Size(NamedTuple):
    """The size of some nodes once all functions that they call are inlined."""

    nodes: int
    bytes: int
    depth: int


_Key = tuple[str, str, str]
_Bodies = Mapping[_Key, Iterable[onnx.NodeProto]]


def _key(domain: str, name: str, overload: str) -> _Key:
    """The identity of a function that a node calls; the standard's domain has two names."""
    return "" if domain == "ai.onnx" else domain, name, overload


def inlined(model: onnx.ModelProto, path: object) -> onnx.ModelProto:
    """The model with its own functions inlined. Raises ModelError if they cannot be, or would be too large."""
    if not model.functions:
        return model
    bodies = {_key(f.domain, f.name, f.overload): f.node for f in model.functions}
    size = _expanded(model.graph.node, bodies, {}, 0)
    if size.depth > DEPTH:
        raise ModelError(f"{path}: its functions call each other {DEPTH} deep: one of them calls itself?")
    if size.nodes > NODES or size.bytes > BYTES:
        got = f"{size.nodes:,} nodes and {size.bytes:,} bytes"
        raise ModelError(f"{path}: its functions expand to {got}, the most is {NODES:,} and {BYTES:,}")
    try:
        model = inliner.inline_local_functions(model)
    except Exception as e:  # the inliner raises all kinds
        raise ModelError(f"{path}: its functions cannot be inlined{_first_line(e)}") from e
    if model.functions:
        raise ModelError(f"{path}: its function {model.functions[0].name} cannot be inlined: it calls itself?")
    return model


def _expanded(
    nodes: Iterable[onnx.NodeProto],
    bodies: Mapping[_Key, Iterable[onnx.NodeProto]],
    known: dict[_Key, _Size],
    depth: int,
) -> _Size:
    """The size of nodes in a body that is `depth` calls deep. `known` caches the size of each function.

    If the depth exceeds the limit, counting stops: only `depth` of the result is meaningful.
    """
    count, size, deepest = 0, 0, depth
    for node in _all(nodes):
        key = _key(node.domain, node.op_type, node.overload)
        if key not in bodies:
            count, size = count + 1, size + node.ByteSize()
            continue
        if depth >= DEPTH:
            return _Size(0, 0, DEPTH + 1)
        if key not in known:
            inner = _expanded(bodies[key], bodies, known, depth + 1)
            if inner.depth > DEPTH:
                return inner
            known[key] = inner._replace(depth=inner.depth - depth)
        inner = known[key]
        count, size, deepest = count + inner.nodes, size + inner.bytes, max(deepest, depth + inner.depth)
    return _Size(count, size, deepest)


def _all(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, and those of their subgraphs."""
    for node in nodes:
        yield node
        for a in node.attribute:
            for graph in (*([a.g] if a.HasField("g") else ()), *a.graphs):
                yield from _all(graph.node)


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
        left_out = [k for k, name in enumerate(proto.input) if not name]  # which onnx's inliner does not handle
        without = f" where operand {left_out[0]} is left out" if left_out else ""
        raise node.error(f"its definition cannot be inlined{without}{_first_line(e)}") from e
    nodes = list(model.graph.node)
    if any(n.op_type == proto.op_type for n in nodes):
        return None
    boundary = {*proto.input, *proto.output}
    for n in nodes:
        for names in (n.input, n.output):
            names[:] = [name if name in boundary else f"{proto.output[0]}/{name}" for name in names]
        n.name = proto.name
    return nodes


def _first_line(e: Exception) -> str:
    """The first line of onnx's message, unless it refers to onnx's source."""
    lines = str(e).strip().splitlines()
    return f": {lines[0]}" if lines and not _SOURCE.search(lines[0]) else ""


def _with_defaults(proto: onnx.NodeProto, opset: int) -> onnx.NodeProto:
    """The node with the defaults of the attributes that it leaves out: definitions refer to them."""
    result = onnx.NodeProto()
    result.CopyFrom(proto)
    given = {a.name for a in proto.attribute}
    for name, attribute in onnx.defs.get_schema(proto.op_type, opset).attributes.items():
        if name not in given and attribute.default_value.type:
            result.attribute.append(attribute.default_value)
    return result
