"""What torch's exporter says of initializers in the file: which are parameters of the module.

Its optimizer computes with whatever is known, so that beside weights the file has tables, masks and factors, which no
type and no shape tells from weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "folded_from"
"""Ends the key under which an initializer that was computed has the names of all that it was computed from."""
_NOT_TRAINED = ("BUFFER", "CONSTANT_TENSOR")


def not_trained(graph: onnx.GraphProto) -> set[str]:
    """The initializers that are no parameters of the module, nor computed from any; none in files without marks."""
    trained = _parameters(graph)
    computed = {name for name, sources in _folded(graph).items() if trained is not None and sources.isdisjoint(trained)}
    return computed | {v.name for v in graph.value_info if _texts(v.metadata_props).get(_KIND) in _NOT_TRAINED}


def lost(graph: onnx.GraphProto) -> list[str]:
    """The module's parameters that are not in a file which the exporter's optimizer has changed, under their own name
    or as what was computed from them: they were merged with equal ones, or dropped, being zero; or they are tied.
    """
    folded = _folded(graph)
    kept = {t.name for t in graph.initializer}.union(*folded.values())
    return [name for name in _parameters(graph) or () if folded and name not in kept]


def _parameters(graph: onnx.GraphProto) -> list[str] | None:
    """The names of the module's parameters, None where the file does not say."""
    signature = _texts(graph.metadata_props).get(_SIGNATURE)
    return None if signature is None else re.findall(r"^.*: PARAMETER target='(.*)'$", signature, re.MULTILINE)


def _folded(graph: onnx.GraphProto) -> dict[str, set[str]]:
    """Of what the optimizer has computed, the names of all that it was computed from."""
    rows = [(v.name, _texts(v.metadata_props).items()) for v in graph.value_info]
    marks = [(name, text) for name, texts in rows for key, text in texts if key.endswith(_FOLDED)]
    return {name: set(re.findall(r"'([^']*)'", text)) for name, text in marks}


def _texts(entries: Iterable[onnx.StringStringEntryProto]) -> dict[str, str]:
    """Those that are text: of a damaged file protobuf gives bytes."""
    return {e.key: e.value for e in entries if isinstance(e.key, str) and isinstance(e.value, str)}
