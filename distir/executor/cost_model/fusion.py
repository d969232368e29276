"""Chains of pointwise ops that a runtime runs as one kernel: what lies between them is neither written nor read."""

from __future__ import annotations

from typing import NamedTuple

from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor


class Fused(NamedTuple):
    """What an op of a chain does not move: operands by number, and its result; with operands it is not issued alone."""

    operands: frozenset[int] = frozenset()
    result: bool = False


UNFUSED = Fused()


def fused(f: Function) -> dict[Op, Fused]:
    """The ops of a function that are part of a chain.

    A pointwise op is joined to the one after it if that alone uses its result, with the same shape and devices.
    """
    users: dict[Value, list[Op]] = {}
    for op in f.ops:
        for v in dict.fromkeys(op.inputs):
            users.setdefault(v, []).append(op)
    given = set(f.outputs)
    chains: dict[Op, Fused] = {}
    for op in f.ops:
        if not _is_pointwise(op):
            continue
        (y,) = op.outputs
        later = users.get(y, [])
        if y in given or len(later) != 1 or not _is_pointwise(later[0]) or not _alike(y, later[0].outputs[0]):
            continue
        chains[op] = chains.get(op, UNFUSED)._replace(result=True)
        after = chains.get(later[0], UNFUSED)
        here = frozenset(k for k, v in enumerate(later[0].inputs) if v is y)
        chains[later[0]] = after._replace(operands=after.operands | here)
    return chains


def _is_pointwise(op: Op) -> bool:
    """Whether the op has one result, each element of which depends on one element of each operand."""
    if op.spec.comm is not None or op.spec.alias or op.spec.kernel or not op.inputs or len(op.outputs) != 1:
        return False
    shapes = [v.type.global_shape for v in op.inputs if isinstance(v.type, Tensor)]
    found = op.spec.factors(op.attributes, shapes) if len(shapes) == len(op.inputs) else None
    return found is not None and not found.kinds and len(found.outs[0]) == len(set(found.outs[0]))


def _alike(a: Value, b: Value) -> bool:
    """Whether two tensors have the same shape and devices."""
    s, t = a.type, b.type
    return isinstance(s, Tensor) and isinstance(t, Tensor) and s.shape == t.shape and s.device is t.device
