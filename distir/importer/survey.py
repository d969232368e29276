"""What an ONNX file holds, and all that distir does not know of it, not only the first.

Nodes are imported one after the other, as `import_from_onnx` does. Where one fails, its results get the types that the
file declares or onnx infers, so that the nodes after it are tried too.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx
from onnx import helper, shape_inference

from distir.importer.control import EXPANSIONS, lift_initializers
from distir.importer.functions import type_of
from distir.importer.node import Scope
from distir.importer.onnx import (
    add_initializer,
    add_inputs,
    checked,
    dims_of,
    finish,
    import_node,
    leave_untrained,
)
from distir.importer.registry import RULES
from distir.importer.tensor_proto import DTYPES, Arrays, dtype_of, parse
from distir.ir.errors import ModelError, UsageError
from distir.ir.function import Function, FunctionMaker, Op, Role, Value
from distir.ir.type import MOST, Tensor

T = TypeVar("T")
FILE, INITIALIZER, INPUT, OUTPUT = PARTS = "file", "initializer", "input", "output"
"""Parts of a file that are no nodes."""
BATCH, OTHER = 2, 64
"""The sizes that symbolic dims get which none is given for: that of the batch, and all others."""
_QUOTED = re.compile(r"'[^']*'|\d+")
"""What differs between messages about nodes that fail for one reason."""


class Declared(NamedTuple):
    """An input or output as the file declares it: sizes, and names of symbolic dims; None where it says nothing."""

    name: str
    dtype: str
    dims: tuple[int | str | None, ...] | None


class Unsupported(NamedTuple):
    """What distir does not know: an op (or one of PARTS), how many there are, the first, and why it cannot be
    imported."""

    op: str
    count: int
    first: str
    reason: str

    @property
    def is_node(self) -> bool:
        """Whether it is an op of the graph."""
        return self.op not in PARTS


class Survey(NamedTuple):
    """What an ONNX file holds. `program` is None if something is not supported; `ops` are those imported so far.

    `weights`: element type and shape of what would be trained. `external`: bytes of tensors that are in other files,
    which are `files`. `assumed`: sizes of the symbolic dims that were not given, while the nodes were tried.
    `untried`: the nodes whose operands have no known type, because of what is not supported before them.
    """

    opset: int
    nodes: int
    inputs: list[Declared]
    outputs: list[Declared]
    weights: list[tuple[str, tuple[int, ...]]]
    external: int
    files: list[str]
    assumed: dict[str, int]
    unsupported: list[Unsupported]
    untried: int
    ops: list[Op]
    program: tuple[Function, Mapping[Value, np.ndarray]] | None


def survey(path: str | os.PathLike[str], dims: Mapping[str, int] | None = None, batch: str | None = None) -> Survey:
    """What the ONNX file at `path` holds; `dims` and `batch` as of `import_from_onnx`, but that dims may be left out.

    Raises ModelError if the file is no ONNX model at all, UsageError for a file that is not there and for dims that the
    file does not have.
    """
    file = Path(path)
    raw = onnx.ModelProto()
    parse(raw, file, "ONNX model")
    if not raw.HasField("graph") or not raw.graph.output:
        raise ModelError(f"{file}: not an ONNX model: it has no graph with outputs")
    found = _Found(file)
    model = found.attempt(FILE, file.name, lambda: checked(raw, file)) or raw
    graph = model.graph
    scope = Scope(file, FunctionMaker(graph.name or "main"), frozenset())
    lifted = found.attempt(FILE, file.name, lambda: lift_initializers(graph)) or ()
    for t in graph.initializer:
        found.attempt(INITIALIZER, t.name, lambda t=t: add_initializer(scope, t))
        if t.name not in scope.known and t.data_type in DTYPES and min(t.dims, default=0) >= 0:
            _keep_type(scope, t)  # its data is missing: its type is enough for all that follows
    leave_untrained(scope, graph, (), lifted)
    external = [t for t in raw.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    files = dict.fromkeys(e.value for t in external for e in t.external_data if e.key == "location")
    given, assumed = _sizes(found, graph, dims or {}, batch)
    untried, program = 0, None
    inputs = found.attempt(INPUT, "", lambda: add_inputs(scope, graph, given, batch))
    if inputs is not None and not any(u.op == FILE for u in found.rows()):
        untried = _nodes(found, scope, model, given)
        if not found.rows():
            program = found.attempt(OUTPUT, "", lambda: _finished(scope, graph, inputs))
    else:
        found.count_unknown(graph.node, _opset(model))
    return Survey(
        _opset(raw),
        len(raw.graph.node),
        [_declared(i) for i in graph.input if i.name not in {t.name for t in graph.initializer}],
        [_declared(o) for o in graph.output],
        [(dtype.name, shape) for name, (dtype, shape) in scope.stored.items() if scope.trainable(name)],
        sum(_bytes(t) for t in external),
        list(files),
        assumed,
        found.rows(),
        untried,
        scope.maker.ops,
        program,
    )


class _Found:
    """What is not supported, by op and reason."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[tuple[str, str], Unsupported] = {}

    def attempt(self, op: str, name: str, step: Callable[[], T]) -> T | None:
        """What `step` gives; None if it fails, which is noted."""
        try:
            return step()
        except ModelError as e:
            self.add(op, name, e.message)
            return None

    def add(self, op: str, name: str, message: str) -> None:
        """Note a failure. Those of an op for one reason are counted."""
        reason = message.removeprefix(f"{self.path}: ")
        reason = reason.removeprefix(f"{op} node {name!r}: ").removeprefix(f"tensor {name!r}: ")
        key = op, _QUOTED.sub("", reason)
        before = self._rows.get(key)
        self._rows[key] = (
            Unsupported(op, 1, name, reason) if before is None else before._replace(count=before.count + 1)
        )

    def count_unknown(self, nodes: Sequence[onnx.NodeProto], opset: int) -> None:
        """Note the nodes whose op is not known, without looking at operands."""
        for proto in nodes:
            if not _is_known(proto, opset):
                self.add(proto.op_type, _name(proto), _no_rule(proto))

    def rows(self) -> list[Unsupported]:
        """All of them, what occurs most often first."""
        return sorted(self._rows.values(), key=lambda u: -u.count)


def _finished(scope: Scope, graph: onnx.GraphProto, inputs: list[Value]) -> tuple[Function, Arrays]:
    function, reads = finish(scope, graph, inputs)
    return function, Arrays(reads)


def _sizes(
    found: _Found, graph: onnx.GraphProto, dims: Mapping[str, int], batch: str | None
) -> tuple[dict[str, int], dict[str, int]]:
    """A size for each symbolic dim, and those among them that are assumed."""
    stored = {t.name for t in graph.initializer}
    rows = [found.attempt(INPUT, i.name, lambda i=i: dims_of(found.path, i)) for i in graph.input]
    rows = [row for row, i in zip(rows, graph.input, strict=True) if row is not None and i.name not in stored]
    free = list(dict.fromkeys(d for row in rows for d in row if isinstance(d, str)))
    if unknown := [d for d in dims if d not in free]:
        hint = f"it has {', '.join(free) or 'none'}"
        raise UsageError(f"{found.path} has no symbolic dimension {unknown[0]!r}", hint)
    first = batch or (free[0] if free else None)
    assumed = {d: BATCH if d == first else OTHER for d in free if d not in dims}
    return {**dims, **assumed}, assumed


def _nodes(found: _Found, scope: Scope, model: onnx.ModelProto, dims: Mapping[str, int]) -> int:
    """Import all nodes, as far as that goes; returns the number of those that could not be tried."""
    graph, opset, untried = model.graph, _opset(model), 0
    later = {o: n for n in graph.node for o in n.output}
    declared = _declared_types(graph, dims)
    lost: set[str] = set()
    """Results of no known type."""
    for proto in graph.node:
        types = declared
        if not lost.isdisjoint(proto.input):
            known = _is_known(proto, opset)
            untried += known
            if not known:
                found.add(proto.op_type, _name(proto), _no_rule(proto))
        elif found.attempt(proto.op_type, _name(proto), lambda p=proto: _imported(scope, p, opset, later)):
            continue
        else:
            types = {**_inferred(scope, proto, opset), **declared}
        for name in proto.output:
            if not name or scope.is_defined(name):
                continue
            if name in types and types[name].dtype.floating:  # a number may be a shape, which must be known
                scope.values[name] = scope.maker.add_input_value(name, types[name], Role("constant"))
            else:
                lost.add(name)
    return untried


def _imported(scope: Scope, proto: onnx.NodeProto, opset: int, later: Mapping[str, onnx.NodeProto]) -> bool:
    import_node(scope, proto, opset, later)
    return True


def _keep_type(scope: Scope, t: onnx.TensorProto) -> None:
    """An initializer whose data cannot be read."""

    def missing() -> np.ndarray:
        raise ModelError(f"{scope.path}: the data of tensor {t.name!r} is missing")

    scope.known[t.name] = missing
    scope.stored[t.name] = dtype_of(t.data_type, ""), tuple(t.dims)


def _declared_types(graph: onnx.GraphProto, dims: Mapping[str, int]) -> dict[str, Tensor]:
    """The types that the file declares for values, where they have no other symbolic dims."""
    found = {info.name: _tensor(info, dims) for info in (*graph.value_info, *graph.output)}
    return {name: t for name, t in found.items() if t is not None}


def _tensor(info: onnx.ValueInfoProto, dims: Mapping[str, int]) -> Tensor | None:
    """The type of a value, if its shape is known."""
    t = info.type.tensor_type
    sizes = [d.dim_value if d.HasField("dim_value") else dims.get(d.dim_param, -1) for d in t.shape.dim]
    if t.elem_type not in DTYPES or not t.HasField("shape") or min(sizes, default=0) < 0 or math.prod(sizes) > MOST:
        return None
    return Tensor(DTYPES[t.elem_type], tuple(sizes))


def _inferred(scope: Scope, proto: onnx.NodeProto, opset: int) -> dict[str, Tensor]:
    """The types of a node's results, of an op that distir does not know, as onnx infers them.

    Not of other ops: where their attributes are damaged, onnx may end the process.
    """
    if _is_known(proto, opset) or proto.domain not in ("", "ai.onnx"):
        return {}
    try:
        ins = [helper.make_value_info(name, type_of(scope, name)) for name in dict.fromkeys(proto.input) if name]
        outs = [onnx.ValueInfoProto(name=name) for name in proto.output if name]
        graph = helper.make_graph([proto], "one", ins, outs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        return _declared_types(shape_inference.infer_shapes(model, data_prop=True).graph, {})
    except Exception:  # onnx raises all kinds; then the types are not known
        return {}


def _is_known(proto: onnx.NodeProto, opset: int) -> bool:
    """Whether the op has a rule, or the standard defines it by other ops."""
    if proto.domain not in ("", "ai.onnx"):
        return False
    if proto.op_type in RULES or proto.op_type in EXPANSIONS:
        return True
    try:
        schema: Any = onnx.defs.get_schema(proto.op_type, opset)  # the stubs lack its functions
    except onnx.defs.SchemaError:
        return False
    return schema.has_function or schema.has_context_dependent_function


def _no_rule(proto: onnx.NodeProto) -> str:
    return f"op {proto.op_type}{f' of domain {proto.domain}' if proto.domain else ''} is not supported"


def _name(proto: onnx.NodeProto) -> str:
    return proto.name or next((o for o in proto.output if o), "?")


def _opset(model: onnx.ModelProto) -> int:
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)


def _declared(info: onnx.ValueInfoProto) -> Declared:
    t = info.type.tensor_type
    names = onnx.TensorProto.DataType
    dtype = (
        DTYPES[t.elem_type].name
        if t.elem_type in DTYPES
        else names.Name(t.elem_type).lower()
        if t.elem_type in names.values()
        else "?"
    )
    if not info.type.HasField("tensor_type") or not t.HasField("shape"):
        return Declared(info.name, dtype, None)
    dims = [
        d.dim_value if d.HasField("dim_value") else d.dim_param or f"{info.name}.{i}" for i, d in enumerate(t.shape.dim)
    ]
    return Declared(info.name, dtype, tuple(dims))


def _bytes(t: onnx.TensorProto) -> int:
    size = DTYPES[t.data_type].size if t.data_type in DTYPES else 0
    return int(np.prod(t.dims, dtype=object)) * size
