"""Inlines functions: ops that a model, or the ONNX standard, defines by other ops."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import onnx
from onnx import helper, inliner

from distir.importer.control import renamed
from distir.importer.node import Node, Scope
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
        raise ModelError(f"{path}: its functions cannot be inlined{first_line(e)}") from e
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


def definition(node: Node) -> tuple[list[onnx.NodeProto], int] | None:
    """The nodes by which the standard defines an op, for operands of these types, and their opset; None if it does
    not."""
    proto, scope = node.proto, node.scope
    if proto.domain not in ("", "ai.onnx"):
        return None
    try:
        schema: Any = onnx.defs.get_schema(proto.op_type, node.opset)  # the stubs lack its functions
    except onnx.defs.SchemaError:  # no op of the standard, or of a later opset only
        return None
    versions = schema.context_dependent_function_opset_versions or schema.function_opset_versions
    if not versions or any(name in scope.sequences for name in proto.input):
        return None
    given = _with_defaults(proto, node.opset)
    body, version = onnx.FunctionProto(), max([v for v in versions if v <= node.opset], default=min(versions))
    try:
        if schema.has_context_dependent_function:
            types = [type_of(scope, name).SerializeToString() for name in proto.input]
            text = schema.get_context_dependent_function_with_opset_version(version, given.SerializeToString(), types)
        else:
            text = schema.get_function_with_opset_version(version)
        body.ParseFromString(text)
    except Exception as e:  # onnx raises all kinds
        raise node.error(f"its definition cannot be inlined{first_line(e)}") from e
    if not body.node or any(n.op_type == proto.op_type for n in body.node):
        return None
    names = dict(zip(body.input, [*proto.input, *[""] * len(body.input)], strict=False))
    names |= {name: to for name, to in zip(body.output, proto.output, strict=False) if to}
    nodes = _with_attributes(body.node, {a.name: a for a in given.attribute})
    nodes = renamed(nodes, lambda name: names.get(name, f"{proto.output[0]}/{name}"))
    for n in nodes:
        n.name = proto.name
    return nodes, next((o.version for o in body.opset_import if not o.domain), version)


def type_of(scope: Scope, name: str) -> onnx.TypeProto:
    """The type of an operand; an empty one if it is left out."""
    if not name:
        return onnx.TypeProto()
    if name in scope.known and name not in scope.values and name not in scope.stored:
        array = scope.known[name]()
        return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
    value = scope.value(name)
    return helper.make_tensor_type_proto(_CODES[tensor(value).dtype], shape_of(value))


def _with_attributes(nodes: Iterable[onnx.NodeProto], given: Mapping[str, onnx.AttributeProto]) -> list[onnx.NodeProto]:
    """Copies of a function's nodes in which its attributes stand in place of the references to them."""
    result: list[onnx.NodeProto] = []
    for node in nodes:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        del new.attribute[:]
        for a in node.attribute:
            if not a.ref_attr_name:
                new.attribute.append(a)
                if a.HasField("g"):
                    inner = _with_attributes(a.g.node, given)
                    del new.attribute[-1].g.node[:]
                    new.attribute[-1].g.node.extend(inner)
            elif a.ref_attr_name in given:
                new.attribute.append(given[a.ref_attr_name])
                new.attribute[-1].name = a.name
        result.append(new)
    return result


def first_line(e: Exception) -> str:
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
