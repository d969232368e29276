"""Control flow known at import: the chosen branch of an `If`, the iterations of a `Loop` or `Scan` one after the other.

An expansion is a generator of nodes; each is imported before the next is asked for, so that it may read what the nodes
before it have made known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper

from distir.importer.node import Node
from distir.ops.rules import shape_of

MOST = 1 << 15
"""The most nodes that the loops of a model may expand to."""

Rename = Callable[[str], str]


def renamed(nodes: Iterable[onnx.NodeProto], rename: Rename) -> list[onnx.NodeProto]:
    """Copies of the nodes, and of the graphs inside them, with other names of values; the empty name stays."""
    result: list[onnx.NodeProto] = []
    for node in nodes:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        for names in (new.input, new.output):
            names[:] = [rename(name) if name else "" for name in names]
        for a in new.attribute:
            for graph in (*([a.g] if a.HasField("g") else ()), *a.graphs):
                for value in (*graph.initializer, *graph.input, *graph.output, *graph.value_info):
                    value.name = rename(value.name)
                inner = renamed(graph.node, rename)
                del graph.node[:]
                graph.node.extend(inner)
        result.append(new)
    return result


def _made(graph: onnx.GraphProto) -> set[str]:
    """The names that are defined in a graph and in the graphs inside it."""
    found = {v.name for v in (*graph.initializer, *graph.input)} | {o for n in graph.node for o in n.output}
    for node in graph.node:
        for a in node.attribute:
            for inner in (*([a.g] if a.HasField("g") else ()), *a.graphs):
                found |= _made(inner)
    return found


def inner_initializers(graph: onnx.GraphProto) -> list[tuple[str, onnx.GraphProto, onnx.TensorProto]]:
    """The initializers of the graphs inside a graph's nodes: the name by which the model knows each, the graph that has
    it, and itself. The name is its own unless another one has it."""
    taken = {v.name for v in (*graph.initializer, *graph.input)} | {o for n in graph.node for o in n.output}
    found: list[tuple[str, onnx.GraphProto, onnx.TensorProto]] = []
    todo = [graph]
    while todo:
        for node in todo.pop().node:
            for a in node.attribute:
                for inner in (*([a.g] if a.HasField("g") else ()), *a.graphs):
                    todo.append(inner)
                    for t in inner.initializer:
                        name = t.name
                        while name in taken:
                            name += "'"
                        taken.add(name)
                        found.append((name, inner, t))
    return found


def lift_initializers(graph: onnx.GraphProto) -> set[str]:
    """Move the initializers of the graphs inside a graph's nodes into the graph, so that a weight is one, however often
    the graph inside runs. Returns their names."""
    found = inner_initializers(graph)
    for name, inner, t in found:
        if name != t.name:
            new = renamed(inner.node, lambda x, old=t.name, name=name: name if x == old else x)
            del inner.node[:]
            inner.node.extend(new)
            for output in inner.output:
                output.name = name if output.name == t.name else output.name
        graph.initializer.add().CopyFrom(t)
        graph.initializer[-1].name = name
    for _, inner, _ in found:
        del inner.initializer[:]
    return {name for name, _, _ in found}


def _instance(graph: onnx.GraphProto, prefix: str, given: Mapping[str, str]) -> tuple[list, list[str]]:
    """The nodes of a graph with its inputs bound to the names `given`, and the names of its results."""
    own = _made(graph) - given.keys()

    def rename(name: str) -> str:
        return given.get(name) or (prefix + name if name in own else name)

    return renamed(graph.node, rename), [rename(o.name) for o in graph.output]


def _identities(names: Sequence[str], to: Sequence[str]) -> Iterator[onnx.NodeProto]:
    for a, b in zip(names, to, strict=False):
        if b:
            yield helper.make_node("Identity", [a], [b], b)


def _flag(node: Node, name: str) -> bool:
    """A truth value known at import. Raises ModelError if it depends on data."""
    if not node.scope.is_known(name):
        raise node.error(f"its condition {name!r} depends on data", "only conditions known at import are supported")
    return bool(np.asarray(node.scope.known[name]()).reshape(-1)[0])


def _branch(node: Node) -> Iterator[onnx.NodeProto]:
    graph = node.attr("then_branch" if _flag(node, node.proto.input[0]) else "else_branch")
    if graph is None or len(graph.output) != len(node.proto.output):
        raise node.error(f"a branch gives {0 if graph is None else len(graph.output)} results")
    nodes, results = _instance(graph, f"{node.proto.output[0]}/", {})
    yield from nodes
    yield from _identities(results, node.proto.output)


def _counted(node: Node, graph: onnx.GraphProto, times: int) -> None:
    if times * max(1, len(graph.node)) > MOST:
        raise node.error(f"{times:,} iterations of {len(graph.node)} nodes are too many", f"the most is {MOST:,} nodes")


def _stacked(node: Node, parts: Sequence[str], axis: int, to: str) -> Iterator[onnx.NodeProto]:
    """The results of all iterations along a new dim."""
    if not parts:
        raise node.error(f"no iteration makes {to!r}")
    axes = f"{to}/axis"
    node.scope.known[axes] = lambda: np.array([axis], np.int64)
    rows = [f"{part}/row" for part in parts]
    for part, row in zip(parts, rows, strict=True):
        yield helper.make_node("Unsqueeze", [part, axes], [row], row)
    yield helper.make_node("Concat", rows, [to], to, axis=axis)


def _loop(node: Node) -> Iterator[onnx.NodeProto]:
    """Iterations are counted: by the operand, or by conditions known at import. As in onnxruntime, the body's condition
    counts even where none is given for the first."""
    graph, scope, proto = node.attr("body"), node.scope, node.proto
    most = int(node.numbers(0, "the number of iterations")[0]) if node.has(0) else MOST
    condition = proto.input[1] if node.has(1) else None
    carried, count = list(proto.input[2:]), len(proto.input) - 2
    if len(graph.input) != count + 2 or len(graph.output) != len(proto.output) + 1:
        raise node.error(f"its body has {len(graph.input)} inputs and {len(graph.output)} outputs: they do not fit")
    rows: list[list[str]] = [[] for _ in proto.output[count:]]
    if condition is None:
        _counted(node, graph, most)
    i = 0
    while i < most and (condition is None or _flag(node, condition)):
        _counted(node, graph, i + 1)
        prefix = f"{proto.output[0]}/{i}/"
        index, go_on = f"{prefix}index", f"{prefix}condition"
        scope.known[index] = lambda i=i: np.array(i, np.int64)
        scope.known[go_on] = lambda: np.array(True)
        bound = dict(zip([v.name for v in graph.input], [index, go_on, *carried], strict=True))
        nodes, results = _instance(graph, prefix, bound)
        yield from nodes
        condition, carried = results[0], results[1 : count + 1]
        for row, name in zip(rows, results[count + 1 :], strict=True):
            row.append(name)
        i += 1
    yield from _identities(carried, proto.output)
    for row, to in zip(rows, proto.output[count:], strict=True):
        if to:
            yield from _stacked(node, row, 0, to)


def _scan(node: Node) -> Iterator[onnx.NodeProto]:
    """An iteration for each index of the scanned operands' dim."""
    graph, scope, proto = node.attr("body"), node.scope, node.proto
    if node.opset < 9:
        raise node.error("with a dim of a batch, of opset 8, is not supported")
    scanned = node.attr("num_scan_inputs")
    if not 0 < scanned <= len(proto.input):
        raise node.error(f"{scanned} of its {len(proto.input)} operands are to be scanned")
    count = len(proto.input) - scanned
    states, of = list(proto.input[:count]), list(proto.input[count:])
    ways = node.attr("scan_input_directions", (0,) * scanned)
    into, ways_out = proto.output[count:], node.attr("scan_output_directions", (0,) * (len(proto.output) - count))
    shapes = [shape_of(scope.value(name)) for name in of]
    axes = [node.wrap(a, len(s)) for a, s in zip(node.attr("scan_input_axes", (0,) * scanned), shapes, strict=True)]
    times = {s[a] for a, s in zip(axes, shapes, strict=True)}
    if len(times) != 1:
        raise node.error(f"its operands have {sorted(times)} elements to scan")
    (size,) = times
    _counted(node, graph, size)
    rows: list[list[str]] = [[] for _ in into]
    for i in range(size):
        prefix, parts = f"{proto.output[0]}/{i}/", []
        for k, (name, axis, back) in enumerate(zip(of, axes, ways, strict=True)):
            at, part = f"{prefix}at{k}", f"{prefix}part{k}"
            index = np.array(size - 1 - i if back else i, np.int64)
            scope.known[at] = functools.partial(np.asarray, index)
            yield helper.make_node("Gather", [name, at], [part], part, axis=axis)
            parts.append(part)
        bound = dict(zip([v.name for v in graph.input], [*states, *parts], strict=True))
        nodes, results = _instance(graph, prefix, bound)
        yield from nodes
        states = results[:count]
        for row, name, back in zip(rows, results[count:], ways_out, strict=True):
            row.insert(0 if back else len(row), name)
    yield from _identities(states, proto.output)
    along = node.attr("scan_output_axes", (0,) * len(into))
    for row, axis, to in zip(rows, along, into, strict=True):
        if to:
            rank = len(shape_of(scope.value(row[0]))) + 1 if row else 1
            yield from _stacked(node, row, node.wrap(axis, rank), to)


EXPANSIONS = {"If": _branch, "Loop": _loop, "Scan": _scan}
"""For each op with graphs inside what it becomes."""
