"""Import of ONNX files: `import_from_onnx`.

- Graph inputs come first, in order. Symbolic dims are bound by `dims`. The first of them is the batch dim: inputs that
  have it are data along it, the others are constants; without symbolic dims every input is data along dim 0.
- Initializers of floating type and rank 1 or more are parameters, except running statistics and those that torch's
  exporter marks as no parameters (role constant); of rank 0 those that it lists as parameters. Others, and results of
  `Constant` nodes, are known at import: with one element they become `Constant` ops where they are used, larger ones
  inputs of role constant.
- Nodes of known operands only (shape arithmetic) are evaluated at import. Ops that no output needs are removed.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx
from onnx import helper, shape_inference, version_converter

from distir.importer import (  # noqa: F401  (they fill the table)
    rules_index,
    rules_integer,
    rules_math,
    rules_products,
    rules_recurrent,
    rules_resize,
    rules_sequence,
    rules_shape,
    rules_windows,
)
from distir.importer.control import EXPANSIONS, lift_initializers
from distir.importer.functions import definition, first_line, inlined
from distir.importer.known import attributes_of, fold, foldable
from distir.importer.marks import lost, not_trained, parameters_in, statistics
from distir.importer.masked import INSTEAD, MASKED_WRITE, OWN, join_masked_writes
from distir.importer.merged import part_merged
from distir.importer.node import Node, Result, Scope, drop_unused_ops
from distir.importer.registry import RULES
from distir.importer.tensor_proto import Arrays, Read, dtype_of, parse, parse_tensor_from_file, reader
from distir.ir.errors import ModelError, ModelWarning, UsageError
from distir.ir.function import Function, FunctionMaker, Role, Value
from distir.ir.type import MOST, DType, Tensor
from distir.ops.rules import tensor

__all__ = ["import_from_onnx", "parse_tensor_from_file"]

T = TypeVar("T")
Stored = tuple[DType, tuple[int, ...], Read]
"""Type and shape of an initializer, and how it is read."""
OLDEST_OPSET = 7
CONVERTED_TO = 13
"""Models of an older opset are converted to this one."""
_LOST = (
    "{} of the module's parameters, such as {}, are not in the file. Unless they are tied to others, torch's exporter "
    "has merged what was equal and dropped what was zero: torch.onnx.export(..., optimize=False) does not"
)
_RESIZE_10 = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
"""What Resize means up to opset 10."""
_TRAIN = "export the module in training mode: torch.onnx.export(module.train(), ..., optimize=False)"
GROUPS = "batchnorm_groups"
"""The name in `dims` for the groups of samples of which batch norms in training mode take statistics, each apart."""


def import_from_onnx(
    path: str | os.PathLike[str],
    name: str | None = None,
    dims: Mapping[str, int] | None = None,
    batch: str | None = None,
    parameters: Collection[str] = (),
    constants: Collection[str] = (),
) -> tuple[Function, Mapping[Value, np.ndarray]]:
    """The Function in the ONNX file at `path`, and the arrays of its parameters and constants, read when asked for.

    `name` names the Function (default: the graph). `dims` gives sizes of symbolic dims, e.g. `{"batch": 8}`; a dim
    without a name is called `input.i`. `batch` names the symbolic dim that is the batch's, if not the first. With
    `batchnorm_groups` among `dims` a batch norm in training mode takes statistics not of the batch, but of each of that
    many equal parts of it.
    `parameters` and `constants` name initializers that are, or are not, trained, against the default.

    Raises ModelError, in one line with the file and the node, if the file is broken or uses what distir does not
    know; UsageError if `dims` leaves a symbolic dim open or names one that is not there. Warns (ModelWarning) of
    parameters that torch's exporter may have merged or dropped.
    """
    file = Path(path)
    model = load(file)
    graph = model.graph
    if gone := lost(graph):
        warnings.warn(ModelWarning(f"{file}: {_LOST.format(len(gone), gone[0])}"), stacklevel=2)
    scope = Scope(file, FunctionMaker(name or graph.name or "main"), frozenset(parameters))
    lifted = lift_initializers(graph)
    for t in graph.initializer:
        add_initializer(scope, t)
    leave_untrained(scope, graph, constants, lifted)
    function, reads = _import_nodes(scope, model, dims, batch)
    return function, Arrays(reads)


def import_graph(
    model: onnx.ModelProto,
    name: str,
    stored: Mapping[str, Stored],
    parameters: Collection[str],
    dims: Mapping[str, int],
    batch: str | None = None,
    numbers: Mapping[float, float] | None = None,
) -> tuple[Function, Mapping[Value, np.ndarray]]:
    """The Function of a model in memory whose initializers are not in it, but in `stored`; and arrays, read each time
    that they are asked for.

    Of those in `stored`, `parameters` are trained and the others constants. `name` names the Function, and the model in
    messages. `dims`, `batch`, errors: as for `import_from_onnx`. `numbers`: by the float32 nearest to them numbers that
    are float64 in the model's source, where the file format has float32 only.
    """
    scope = Scope(Path(name), FunctionMaker(name), frozenset(parameters))
    for key, (dtype, shape, read) in stored.items():
        scope.stored[key], scope.known[key] = (dtype, shape), read
    scope.frozen.update(stored.keys() - scope.parameters, statistics(model.graph))
    scope.numbers = numbers or {}
    function, reads = _import_nodes(scope, checked(model, scope.path), dims, batch)
    return function, Arrays(reads, keep=False)


def _import_nodes(
    scope: Scope, model: onnx.ModelProto, dims: Mapping[str, int] | None, batch: str | None
) -> tuple[Function, Mapping[Value, Read]]:
    """The Function of a model whose initializers are in the scope, and how the arrays of its inputs are read."""
    graph = model.graph
    sizes = dict(dims or {})
    scope.batchnorm_groups = sizes.pop(GROUPS, 1)
    if scope.batchnorm_groups < 1:
        raise UsageError(f"{GROUPS} must be at least 1, got {scope.batchnorm_groups}")
    inputs = add_inputs(scope, graph, sizes, batch)
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    later = {o: n for n in graph.node for o in n.output}
    for proto in graph.node:
        import_node(scope, proto, opset, later)
    if GROUPS in (dims or {}) and not scope.batchnorms:
        raise UsageError(f"{scope.path} has no batch norm in training mode", _TRAIN)
    return finish(scope, graph, inputs)


def symbolic_dims(path: str | os.PathLike[str]) -> list[str]:
    """The names of the symbolic dims of an ONNX file's inputs, in order; the first is the batch dim by default."""
    file = Path(path)
    graph = load(file).graph
    stored = {t.name for t in graph.initializer}
    rows = [dims_of(file, i) for i in graph.input if i.name not in stored]
    return list(dict.fromkeys(d for row in rows for d in row if isinstance(d, str)))


def load(path: Path) -> onnx.ModelProto:
    """The model at `path`, model-local functions inlined, external data left alone. Raises ModelError if broken."""
    model = onnx.ModelProto()
    parse(model, path, "ONNX model")
    return checked(model, path)


def checked(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """The model, model-local functions inlined, in a known opset; `path` is its name in messages. Raises ModelError if
    it is broken."""
    if not model.HasField("graph") or not model.graph.output:
        raise ModelError(f"{path}: not an ONNX model: it has no graph with outputs")
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if not OLDEST_OPSET <= opset <= onnx.defs.onnx_opset_version():
        newest = onnx.defs.onnx_opset_version()
        raise ModelError(f"{path}: opset {opset} is not supported", f"export with opset {OLDEST_OPSET} to {newest}")
    _check_text(model.graph, path)
    model = inlined(model, path)
    if model.graph.sparse_initializer:
        raise ModelError(f"{path}: sparse initializers are not supported")
    part_merged(model.graph, path)
    model = model if opset >= CONVERTED_TO else _converted(model, path, opset)
    join_masked_writes(model.graph)
    return model


def _converted(model: onnx.ModelProto, path: Path, opset: int) -> onnx.ModelProto:
    """The model in opset 13. onnx converts neither graphs inside nodes nor external data, which stays as it is."""
    hint = f"export with opset {CONVERTED_TO} or later"
    if inner := [n.op_type for n in model.graph.node if any(a.HasField("g") or a.graphs for a in n.attribute)]:
        raise ModelError(f"{path}: opset {opset} is not supported with {inner[0]}", hint)
    if any(n.op_type == "Hardmax" for n in model.graph.node):
        raise ModelError(f"{path}: opset {opset} is not supported with Hardmax, which merges dims there", hint)
    stored = {t.name: t for t in model.graph.initializer}
    try:
        result = version_converter.convert_version(shape_inference.infer_shapes(model), CONVERTED_TO)
    except Exception as e:  # onnx raises all kinds
        raise ModelError(f"{path}: opset {opset} cannot be converted to {CONVERTED_TO}{first_line(e)}", hint) from e
    for t in result.graph.initializer:
        if t.name in stored:
            t.CopyFrom(stored[t.name])
    for node in result.graph.node if opset <= 10 else ():
        if node.op_type == "Resize":  # onnx gives it the positions of later opsets
            kept = [a for a in node.attribute if a.name == "mode"]
            del node.attribute[:]
            node.attribute.extend([*kept, *[helper.make_attribute(k, v) for k, v in _RESIZE_10.items()]])
    return result


def _check_text(graph: onnx.GraphProto, path: Path) -> None:
    """Raise ModelError for a name that is not UTF-8, which protobuf returns as bytes."""
    texts: list[str | bytes] = [graph.name, *[t.name for t in graph.initializer]]
    for t in graph.initializer:
        texts += [text for entry in t.external_data for text in (entry.key, entry.value)]
    for info in (*graph.input, *graph.output):
        texts += [info.name, *[d.dim_param for d in info.type.tensor_type.shape.dim]]
    for node in graph.node:
        texts += [node.op_type, node.name, node.domain, *node.input, *node.output, *[a.name for a in node.attribute]]
    if bad := [t for t in texts if isinstance(t, bytes)]:
        raise ModelError(f"{path}: the name {bad[0]!r} is not UTF-8: the file is damaged")


def add_initializer(scope: Scope, t: onnx.TensorProto) -> None:
    """Add an initializer to what is known. Raises ModelError if it is damaged, or its data is not there."""
    if not t.name or t.name in scope.known:
        raise ModelError(f"{scope.path}: initializer {t.name!r} is there twice or has no name")
    scope.known[t.name] = reader(t, scope.path)
    dtype = dtype_of(t.data_type, f"{scope.path}: tensor {t.name!r}")
    scope.stored[t.name] = dtype, tuple(t.dims)


def leave_untrained(
    scope: Scope, graph: onnx.GraphProto, constants: Collection[str], lifted: Collection[str] = ()
) -> None:
    """Mark the initializers that are no parameters: statistics, those that the exporter marks, and `constants`.

    `lifted`: those that were in graphs inside nodes.
    """
    for name in (*scope.parameters, *constants):
        if name not in scope.stored:
            raise UsageError(f"{scope.path} has no initializer {name!r}")
    scope.frozen.update(constants, not_trained(graph, lifted))
    scope.scalars = parameters_in(graph) - scope.frozen
    scope.frozen.update(statistics(graph))


def add_inputs(scope: Scope, graph: onnx.GraphProto, dims: dict[str, int], batch: str | None) -> list[Value]:
    """Add the graph's inputs, in order. Raises UsageError for dims that do not fit, ModelError for damaged inputs."""
    infos = [i for i in graph.input if i.name not in scope.stored]
    symbols = {i.name: dims_of(scope.path, i) for i in infos}
    free = list(dict.fromkeys(d for row in symbols.values() for d in row if isinstance(d, str)))
    for d, size in dims.items():
        if d not in free:
            raise UsageError(f"{scope.path} has no symbolic dimension {d!r}", f"it has {', '.join(free) or 'none'}")
        if size < 1:
            raise UsageError(f"dimension {d} must be at least 1, got {size}")
    if open_dims := [d for d in free if d not in dims]:
        what = "dimensions are" if len(open_dims) > 1 else "dimension is"
        hint = " ".join(f"--dim {d}=8" for d in open_dims)
        raise UsageError(f"{scope.path}: symbolic {what} not given: {', '.join(open_dims)}", hint)
    if batch is not None and batch not in free:
        raise UsageError(f"{scope.path} has no symbolic dimension {batch!r}", f"it has {', '.join(free) or 'none'}")
    batch = batch or (free[0] if free else None)
    inputs: list[Value] = []
    for info in infos:
        if not info.name or info.name in scope.values:
            raise ModelError(f"{scope.path}: input {info.name!r} is there twice or has no name")
        row = symbols[info.name]
        shape = tuple(int(dims[d]) if isinstance(d, str) else d for d in row)
        dtype = dtype_of(info.type.tensor_type.elem_type, f"{scope.path}: input {info.name!r}")
        if math.prod(shape) > MOST:
            given = ", ".join(f"{d} = {dims[d]:,}" for d in row if isinstance(d, str))
            message = f"{scope.path}: input {info.name!r} has {math.prod(shape):,} elements, more than 2^53"
            raise UsageError(f"{message}: {given}") if given else ModelError(message)
        value = scope.maker.add_input_value(info.name, Tensor(dtype, shape), _role(row, batch))
        scope.values[info.name] = value
        inputs.append(value)
    return inputs


def dims_of(path: Path, info: onnx.ValueInfoProto) -> list[int | str]:
    """The dims of a graph input: sizes, and names of symbolic ones."""
    if info.type.WhichOneof("value") != "tensor_type" or not info.type.tensor_type.HasField("shape"):
        raise ModelError(f"{path}: input {info.name!r} is not a tensor of known rank")
    row: list[int | str] = []
    for i, d in enumerate(info.type.tensor_type.shape.dim):
        row.append(d.dim_value if d.HasField("dim_value") else d.dim_param or f"{info.name}.{i}")
        if d.dim_value < 0:
            raise ModelError(f"{path}: input {info.name!r}: dim {i} is {d.dim_value}")
    return row


def _role(row: list[int | str], batch: str | None) -> Role:
    if batch is None:
        return Role("data", 0 if row else None)
    return Role("data", row.index(batch)) if batch in row else Role("constant")


def import_node(scope: Scope, proto: onnx.NodeProto, opset: int, later: Mapping[str, onnx.NodeProto]) -> None:
    """Append what a node becomes. Raises ModelError, naming the node, for what is not supported."""
    try:
        attributes = attributes_of(proto)
    except Exception as e:  # onnx raises all kinds on malformed attributes
        raise ModelError(f"{scope.path}: {proto.op_type} node {proto.name!r}: bad attribute: {e}") from e
    for key, x in attributes.items():
        if isinstance(x, float):
            attributes[key] = scope.numbers.get(x, x)
    node = Node(scope, proto, attributes, opset)
    _check_names(scope, node, later)
    known = foldable(scope, proto)
    if known and (found := fold(node, opset)) is not None:
        node.finish(found, len(scope.maker.ops), folded=True)
        return
    rule = RULES.get(proto.op_type) if proto.domain in ("", "ai.onnx", OWN) else None
    if rule is None and known:
        raise node.error("is not computed at import: its result is too large, or of unknown size")
    if proto.op_type in EXPANSIONS and proto.domain in ("", "ai.onnx"):
        steps = EXPANSIONS[proto.op_type](node)
        while (part := _guarded(node, lambda: next(steps, None))) is not None:
            import_node(scope, part, opset, {})
        return
    if rule is None and not _import_definition(node):
        domain = f" of domain {proto.domain}" if proto.domain else ""
        hint = INSTEAD.get(proto.op_type) or f"supported: {', '.join(sorted(RULES.keys() - {MASKED_WRITE}))}"
        raise node.error(f"op {proto.op_type}{domain} is not supported", hint)
    if rule is None:
        return
    first = len(scope.maker.ops)
    result = _guarded(node, lambda: rule(node))
    if result is None:
        _import_definition(node)
    else:
        _guarded(node, lambda: node.finish(_results(result), first))


def _guarded(node: Node, step: Callable[[], T]) -> T:
    """What `step` gives. Raises ModelError, which names the node, where its attributes or operands do not fit."""
    try:
        return step()
    except ModelError as e:
        if e.message.startswith(str(node.scope.path)):
            raise
        raise node.error(e.message, e.hint) from e
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
        raise node.error(f"its attributes or operands are malformed: {type(e).__name__}: {e}") from e


def _import_definition(node: Node) -> bool:
    """Import the nodes that define a node; False if the standard has no definition."""
    defined = definition(node)
    if defined is None:
        return False
    nodes, opset = defined
    for part in nodes:
        import_node(node.scope, part, opset, {})
    return True


def _results(result: Result | Iterable[Result]) -> list[Result]:
    return [result] if isinstance(result, Value | np.ndarray) else list(result)


def _check_names(scope: Scope, node: Node, later: Mapping[str, onnx.NodeProto]) -> None:
    for name in node.proto.input:
        if name and not scope.is_defined(name):
            if name in later:
                raise node.error(f"reads {name!r} before it is made: the graph has a cycle or is not sorted")
            raise node.error(f"reads {name!r}, which nothing makes")
    made: set[str] = set()
    for name in node.proto.output:
        if name and (scope.is_defined(name) or name in made):
            raise node.error(f"makes {name!r}, which is there already")
        made.add(name)


def _output(scope: Scope, info: onnx.ValueInfoProto) -> Value:
    """The value of a graph output. Raises ModelError if nothing makes it, or not with the type it declares."""
    name = info.name
    if name in scope.sequences:
        raise ModelError(f"{scope.path}: output {name!r} is a sequence", "only tensors are supported")
    if name not in scope.values and name not in scope.known:
        raise ModelError(f"{scope.path}: output {name!r} is made by no node")
    value = scope.value(name)
    declared, t = info.type.tensor_type, tensor(value)
    want = dtype_of(declared.elem_type, f"{scope.path}: output {name!r}") if declared.elem_type else t.dtype
    if want is not t.dtype:
        raise ModelError(f"{scope.path}: output {name!r}: declared {want}, but its node makes {t}")
    if declared.HasField("shape"):
        sizes = [d.dim_value if d.HasField("dim_value") else None for d in declared.shape.dim]
        shape = t.global_shape
        if len(sizes) != len(shape) or any(a is not None and a != b for a, b in zip(sizes, shape, strict=True)):
            raise ModelError(f"{scope.path}: output {name!r}: declared {sizes}, but its node makes {t}")
    return value


def finish(scope: Scope, graph: onnx.GraphProto, inputs: list[Value]) -> tuple[Function, Mapping[Value, Read]]:
    """The function of all that was imported, and how its arrays are read. Raises ModelError for an output that is not
    as it is declared."""
    maker = scope.maker
    outputs: list[Value] = []
    named = set(maker.inputs)
    for info in graph.output:
        value = _output(scope, info)
        if value not in named and value not in scope.arrays and value.name != info.name:
            value.name = maker.fresh(info.name)  # the result of an alias, such as Identity
        named.add(value)
        outputs.append(value)
    used = set(outputs)
    drop_unused_ops(maker.ops, used)
    order = {name: i for i, name in enumerate(scope.stored)}
    weights = sorted(scope.arrays, key=lambda v: order.get(v.name, len(order)))
    maker.inputs[:] = [*inputs, *[v for v in weights if v in used]]
    maker.set_outputs(outputs)
    return maker.finalize(), {v: scope.arrays[v] for v in maker.inputs if v in scope.arrays}
