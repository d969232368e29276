"""Parameters that torch's exporter has merged into one, because their initial values were equal, are parted again.

The exporter's optimizer stores new layer norms and biases, all of them ones or zeros, once for all layers. Trained as
one they would be another model, and what splits one of the layers would have to split all. The file still lists the
module's parameters, and says of each node in which of the modules it is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from distir.importer.marks import lost, texts
from distir.importer.tensor_proto import reader

_SCOPES = "pkg.torch.onnx.name_scopes"


def part_merged(graph: onnx.GraphProto, path: Path) -> None:
    """Give each missing parameter an initializer of its own, a copy of the one that stands for it, in place.

    An initializer stands for a missing parameter of a module where a node of that module reads it, and the initializer
    is a parameter of another module, of the same name or the module misses no other. Only those with all elements
    equal are parted: others are equal because the module ties them.
    """
    missing: defaultdict[str, list[str]] = defaultdict(list)
    for name in lost(graph):
        missing[name.rpartition(".")[0]].append(name)
    stored = {t.name: t for t in graph.initializer}
    uniform: dict[str, bool] = {}
    for node in graph.node if missing else ():
        module = _module(node)
        if module not in missing:
            continue
        for k, name in enumerate(node.input):
            if name not in stored or name.rpartition(".")[0] == module:
                continue
            meant = _meant(name, missing[module])
            if meant is None:
                continue
            if name not in uniform:
                uniform[name] = _is_uniform(stored[name], path)
            if uniform[name]:
                if meant not in stored:
                    _copy(graph, stored[name], meant)
                    stored[meant] = graph.initializer[-1]
                node.input[k] = meant


def _module(node: onnx.NodeProto) -> str:
    """The name of the module that a node is in; empty for the whole model, and where the file does not say it."""
    scopes = re.findall(r"'([^']*)'", texts(node.metadata_props).get(_SCOPES, ""))
    return scopes[-2] if len(scopes) > 1 else ""


def _meant(name: str, missing: Sequence[str]) -> str | None:
    """Of the parameters that a module misses the one for which it reads initializer `name`."""
    last = name.rpartition(".")[2]
    alike = [m for m in missing if m.rpartition(".")[2] == last] or missing
    return alike[0] if len(alike) == 1 else None


def _is_uniform(tensor: onnx.TensorProto, path: Path) -> bool:
    """Whether all elements are equal, of an array of floats with several."""
    array = reader(tensor, path)()
    return array.size > 1 and array.dtype.kind == "f" and bool(np.all(array == array.flat[0]))


def _copy(graph: onnx.GraphProto, tensor: onnx.TensorProto, name: str) -> None:
    """Append a copy of an initializer, and of what the file says of it, under another name."""
    graph.initializer.add().CopyFrom(tensor)
    graph.initializer[-1].name = name
    for info in [v for v in graph.value_info if v.name == tensor.name]:
        graph.value_info.add().CopyFrom(info)
        graph.value_info[-1].name = name
