"""How much of a program a mesh axis splits: what cannot be split is replicated, and said."""

from __future__ import annotations

import math
from typing import NamedTuple

from distir.ir.function import Function, Value
from distir.ir.type import Shard
from distir.ops.rules import shape_of, tensor
from distir.transforms.roles import weights
from distir.transforms.spread import TP


class Coverage(NamedTuple):
    """How much of a program an axis splits: shares of FLOPs and of parameters, and the weights it does not split."""

    flops: float
    parameters: float
    replicated: tuple[Value, ...]


def coverage(placed: Function, axis: str = TP) -> Coverage:
    """What is split along an axis of a placed program."""
    held = [v for v in placed.inputs if v.kind == "parameter"] or weights(placed)
    elements = {v: math.prod(shape_of(v)) for v in held}
    if axis not in tensor(placed.inputs[0]).mesh.axes:
        return Coverage(0.0, 0.0, tuple(held))
    unsplit = [v for v in held if not isinstance(tensor(v).on(axis), Shard)]
    total = flops = 0.0
    for op in placed.ops:
        if op.spec.comm is not None:
            continue
        work = op.spec.flops(op.attributes, list(map(shape_of, op.inputs)), list(map(shape_of, op.outputs)))
        total += work
        if any(isinstance(tensor(v).on(axis), Shard) for v in (*op.inputs, *op.outputs)):
            flops += work
    share = 1 - sum(elements[v] for v in unsplit) / max(1, sum(elements.values()))
    return Coverage(flops / total if total else 0.0, share, tuple(unsplit))
