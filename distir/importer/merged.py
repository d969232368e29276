"""Parameters that torch's exporter has merged into one, because their initial values were equal, are parted again.

The exporter's optimizer stores new layer norms and biases, all of them ones or zeros, once for all layers. Trained as
one they would be another model, and what splits one of the layers would have to split all. The file still lists the
module's parameters, and says of each node in which of the modules it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from distir.importer.marks import lost, module_of, parameters_in
from distir.importer.tensor_proto import reader


def part_merged(graph: onnx.GraphProto, path: Path) -> None:
    """Give each missing parameter an initializer of its own, a copy of the one that stands for it, in place.

    An initializer that is a parameter of another module stands for a missing one where a node of its module reads it,
    if both have the same last name, or the module misses no other. Only those with all elements equal are parted:
    others are equal because the module ties them.
    """
    missing: defaultdict[str, list[str]] = defaultdict(list)
    for name in lost(graph):
        missing[name.rpartition(".")[0]].append(name)
    stored = {t.name: t for t in graph.initializer}
    parameters = parameters_in(graph) if missing else set()
    uniform: dict[str, bool] = {}
    for node in graph.node if missing else ():
        module = module_of(node)
        if module not in missing:
            continue
        for k, name in enumerate(node.input):
            if name not in stored or name not in parameters or name.rpartition(".")[0] == module:
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


def _meant(name: str, missing: Sequence[str]) -> str | None:
    """Of the parameters that a module misses the one for which it reads initializer `name`."""
    last = name.rpartition(".")[2]
    alike = [m for m in missing if m.rpartition(".")[2] == last] or missing
    return alike[0] if len(alike) == 1 else None


def _is_uniform(tensor: onnx.TensorProto, path: Path) -> bool:
    """Whether all elements are equal, of an array with several."""
    array = reader(tensor, path)()
    return array.size > 1 and bool(np.all(array == array.flat[0]))


def _copy(graph: onnx.GraphProto, tensor: onnx.TensorProto, name: str) -> None:
    """Append a copy of an initializer, and of what the file says of it, under another name."""
    graph.initializer.add().CopyFrom(tensor)
    graph.initializer[-1].name = name
    for info in [v for v in graph.value_info if v.name == tensor.name]:
        graph.value_info.add().CopyFrom(info)
        graph.value_info[-1].name = name
