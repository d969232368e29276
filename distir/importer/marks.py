"""Reads metadata of torch's exporter: which initializers are parameters of the module.

The exporter's optimizer folds constants, so a file has tables, masks and factors beside the weights, which cannot be
distinguished by type or shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable

import onnx

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "folded_from"
"""Suffix of the metadata key that lists the initializers from which one was folded."""
_NOT_TRAINED = ("BUFFER", "CONSTANT_TENSOR")
_SCOPES = "pkg.torch.onnx.name_scopes"
_CALL = "pkg.torch.onnx.fx_node"
_TRAINING = re.compile(r"batch_norm[\w.]*\]\(args = \([^()]*?\b(True|False)\b")
"""A call of a batch norm: the first truth value of its arguments says whether it is in training mode."""


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


def in_training(node: onnx.NodeProto) -> bool:
    """Whether the module had a batch norm in training mode, which torch's exporter writes in inference mode."""
    call = _TRAINING.search(_texts(node.metadata_props).get(_CALL, ""))
    return call is not None and call[1] == "True"


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
