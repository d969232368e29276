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
    signature = _texts(graph.metadata_props).get(_SIGNATURE, "")
    parameters = set(re.findall(r"^.*: PARAMETER target='(.*)'$", signature, re.MULTILINE))
    found: set[str] = set()
    for info in graph.value_info:
        marks = _texts(info.metadata_props)
        sources = next((set(re.findall(r"'([^']*)'", v)) for k, v in marks.items() if k.endswith(_FOLDED)), None)
        computed = signature != "" and sources is not None and sources.isdisjoint(parameters)
        if computed or marks.get(_KIND) in _NOT_TRAINED:
            found.add(info.name)
    return found


def _texts(entries: Iterable[onnx.StringStringEntryProto]) -> dict[str, str]:
    """Those that are text: of a damaged file protobuf gives bytes."""
    return {e.key: e.value for e in entries if isinstance(e.key, str) and isinstance(e.value, str)}
