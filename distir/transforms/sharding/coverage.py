"""How much of a program a mesh axis splits, and which weights it leaves replicated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from distir.ir.device import Mesh
from distir.ir.function import Function, Op, Value, type_of
from distir.ir.mesh_form import mesh_form
from distir.ir.type import Tensor
from distir.ops.rules import shape_of, tensor
from distir.transforms.roles import weights


class Coverage(NamedTuple):
    """How much of a program an axis splits: shares of FLOPs and of parameters, and the weights it does not split,
    largest first."""

    flops: float
    parameters: float
    replicated: tuple[Value, ...]


def coverage(placed: Function, axis: str) -> Coverage:
    """What is split along an axis of a placed or scheduled program; FLOPs are those of one device of the other axes."""
    parameters = [v for v in placed.inputs if v.kind == "parameter"] or weights(placed)
    elements = {v: math.prod(shape_of(v)) for v in parameters}
    unsplit = sorted([v for v in parameters if not _split(v, axis)], key=lambda v: -elements[v])
    share = 1 - sum(elements[v] for v in unsplit) / max(1, sum(elements.values()))
    total, split = _flops(placed.ops, axis, {}, {})
    return Coverage(split / total if total else 0.0, share, tuple(unsplit))


def _split(v: Value, axis: str) -> int:
    """Over how many devices a value is split along the axis; 0 if it is not."""
    t = v.type
    if not isinstance(t, Tensor) or not isinstance(t.device, Mesh) or axis not in t.device.axes:
        return 0
    return 0 if t.on(axis).dim is None else t.device.size(axis)


def _flops(
    ops: Iterable[Op], axis: str, done: dict[object, tuple[float, float]], known: dict[object, tuple[float, int]]
) -> tuple[float, float]:
    """FLOPs of ops without the split along the axis, and how many of them are split.

    `done`: those of functions that are alike; `known`: of each kind of op the FLOPs on a device, and over how many
    devices it is split.
    """
    total = split = 0.0
    for op in ops:
        if op.callee is not None:
            called = done.get(op.callee)
            if called is None:
                formed = mesh_form(op.callee)
                alike = op.callee if formed is None else (formed[0], formed[1].like)
                called = done.get(alike) or _flops(op.callee.ops, axis, done, known)
                done[op.callee] = done[alike] = called
            total, split = total + called[0], split + called[1]
        elif op.spec.comm is None:
            key = op.spec, op.attributes.form, *map(type_of, op.inputs)
            found = known.get(key)
            if found is None:
                shapes = ([tensor(v).shape for v in row] for row in (op.inputs, op.outputs))
                n = max([_split(v, axis) for v in (*op.inputs, *op.outputs)], default=0)
                found = known[key] = op.spec.flops(op.attributes, *shapes), n
            work, n = found
            total += work * max(1, n)
            split += work * n
    return total, split
