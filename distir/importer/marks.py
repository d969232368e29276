"""Reads metadata of torch's exporter: which initializers are parameters of the module, and which calls of torch's ops
the nodes come from.

The exporter's optimizer folds constants, so a file has tables, masks and factors beside the weights, which cannot be
distinguished by type or shape. Nodes lack what ONNX has no operand for, such as the row of a table that is not trained.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import onnx

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "folded_from"
"""Suffix of the metadata key that lists the initializers from which one was folded."""
_NOT_TRAINED = ("BUFFER", "CONSTANT_TENSOR")
_SCOPES = "pkg.torch.onnx.name_scopes"
_CALL = "pkg.torch.onnx.fx_node"
_OF_ATEN = re.compile(r"\[target=torch\.ops\.aten\.(\w+)[\w.]*\]\(args = \((.*)\), kwargs = \{(.*)\}\)$", re.DOTALL)


def not_trained(graph: onnx.GraphProto, inner: Collection[str] = ()) -> set[str]:
    """The initializers that are not parameters of the module, nor folded from one; none in files without metadata.

    `inner`: those of graphs inside nodes, where the exporter puts only numbers of the module's code.
    """
    trained = _parameters(graph)
    marked = {v.name for v in graph.value_info if _texts(v.metadata_props).get(_KIND) in _NOT_TRAINED}
    if trained is None:
        return marked
    folded = _folded(graph)
    computed = {name for name, sources in folded.items() if sources.isdisjoint(trained)}
    # numbers in the module's code become initializers without a mark
    numbers = {t.name for t in graph.initializer if math.prod(t.dims) == 1} - folded.keys() - set(trained)
    return marked | computed | numbers | (set(inner) - set(trained))


def statistics(graph: onnx.GraphProto) -> set[str]:
    """The running statistics of batch norms, which are not trained. Where one is applied again, the exporter gives it
    copies, which are replaced by what they are copies of, in place."""
    copies: dict[str, str] = {}
    found: set[str] = set()
    for node in graph.node:
        if node.op_type == "Identity" and node.input and node.output:
            copies[node.output[0]] = copies.get(node.input[0], node.input[0])
        elif node.op_type == "BatchNormalization":
            node.input[3:] = [copies.get(name, name) for name in node.input[3:]]
            found.update(node.input[3:])
    return found


class ExportedCall(NamedTuple):
    """A call of an op of torch's: its arguments are numbers, truth values or None, and else texts."""

    name: str
    arguments: list[Any]
    keywords: dict[str, Any]

    def get(self, place: int, name: str, default: Any) -> Any:
        """An argument, by its place or its name."""
        return self.arguments[place] if place < len(self.arguments) else self.keywords.get(name, default)


def call_of(node: onnx.NodeProto) -> ExportedCall:
    """The call of torch's that the exporter translated into the node and others; without metadata one of no name."""
    found = _OF_ATEN.search(_texts(node.metadata_props).get(_CALL, ""))
    if found is None:
        return ExportedCall("", [], {})
    pairs = [text.partition(": ") for text in _parts(found[3])]
    return ExportedCall(found[1], list(map(_argument, _parts(found[2]))), {key: _argument(x) for key, _, x in pairs})


def _parts(text: str) -> Iterator[str]:
    """What commas outside of brackets separate."""
    depth, first = 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            yield text[first:i].strip()
            first = i + 1
    if text[first:].strip():
        yield text[first:].strip()


def _argument(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # of a damaged file, too
        return text


def in_training(node: onnx.NodeProto) -> bool:
    """Whether the module had a batch norm in training mode, which torch's exporter writes in inference mode: the first
    truth value among its arguments says so."""
    call = call_of(node)
    return "batch_norm" in call.name and next((x for x in call.arguments if isinstance(x, bool)), False)


def parameters_in(graph: onnx.GraphProto) -> set[str]:
    """The names of the module's parameters, and of initializers folded from one; none in files without metadata."""
    names = set(_parameters(graph) or ())
    return names | {name for name, sources in _folded(graph).items() if not sources.isdisjoint(names)}


def module_of(node: onnx.NodeProto) -> str:
    """The name of the module that a node is in; empty for the whole model, and where the file does not say it."""
    scopes = re.findall(r"'([^']*)'", _texts(node.metadata_props).get(_SCOPES, ""))
    return scopes[-2] if len(scopes) > 1 else ""


def lost(graph: onnx.GraphProto) -> list[str]:
    """The module's parameters that are missing in a file which the exporter's optimizer has changed: neither stored nor
    folded into an initializer. They were merged with equal ones, dropped because they were zero, or are tied.
    """
    folded = _folded(graph)
    present = {t.name for t in graph.initializer}.union(*folded.values())
    return [name for name in _parameters(graph) or () if folded and name not in present]


def _parameters(graph: onnx.GraphProto) -> list[str] | None:
    """The names of the module's parameters; None if the file does not list them."""
    signature = _texts(graph.metadata_props).get(_SIGNATURE)
    return None if signature is None else re.findall(r"^.*: PARAMETER target='(.*)'$", signature, re.MULTILINE)


def _folded(graph: onnx.GraphProto) -> dict[str, set[str]]:
    """For each initializer that the exporter folded, the names of those that it was folded from."""
    rows = [(v.name, _texts(v.metadata_props).items()) for v in graph.value_info]
    marks = [(name, text) for name, texts in rows for key, text in texts if key.endswith(_FOLDED)]
    return {name: set(re.findall(r"'([^']*)'", text)) for name, text in marks}


def _texts(entries: Iterable[onnx.StringStringEntryProto]) -> dict[str, str]:
    """The entries that are text: of a damaged file protobuf returns bytes."""
    return {e.key: e.value for e in entries if isinstance(e.key, str) and isinstance(e.value, str)}
