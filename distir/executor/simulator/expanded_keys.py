"""What context parallelism sends of keys and values under a runtime that expands them to the heads of the queries
before (`Runtime.expands_keys`), and sends their gradients, summed over devices, in float32 (github pytorch/pytorch,
torch/distributed/tensor/experimental/_attention.py: the accumulators of `_templated_ring_attention_backward`)."""

from __future__ import annotations

import math
from typing import NamedTuple

from distir.executor.simulator.categories import leaves
from distir.ir.device import Mesh
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor, Tuple, Type
from distir.ops.attention import KEYS_AND_VALUES
from distir.ops.rules import tensor

_WIDER = 2
"""The bytes of a gradient in float32, of those in 16 bits."""


def expanded_keys(f: Function) -> dict[Op, int]:
    """By how much larger than in the program is what collectives of keys and values, and of their gradients, send along
    the axes that split the sequence of queries."""
    found: dict[Op, int] = {}
    whole: dict[Value, _Whole] = {}
    """What attention takes of keys or values, by what they are made of."""
    for op in reversed(f.ops):
        if op.spec.kernel == "attention":
            whole.update({op.inputs[k]: _whole(op, op.inputs[k]) for k in KEYS_AND_VALUES})
        elif op.outputs and (of := whole.get(op.outputs[0])) is not None:
            if op.spec.comm is not None:
                if op.spec.comm.gathers and of.along(op):
                    found[op] = of.numbers // _numbers(op.outputs[0])
            elif not op.spec.kernel:
                whole.setdefault(op.inputs[0], of)
    summed: dict[Value, _Whole] = {}
    for op in f.ops:
        if op.spec.kernel == "attention" and len(op.outputs) > max(KEYS_AND_VALUES):
            summed.update({op.outputs[k]: _whole(op, op.outputs[k]) for k in KEYS_AND_VALUES})
        elif op.spec.bundle == "pack":
            parts = [summed[v] for v in op.inputs if v in summed]
            if len(parts) == len(op.inputs) > 0:
                summed[op.outputs[0]] = parts[0]._replace(numbers=sum([of.numbers for of in parts]))
        elif op.inputs and (of := summed.get(op.inputs[0])) is not None:
            if op.spec.comm is not None:
                if op.spec.comm.sums and of.along(op):
                    wider = _WIDER if leaves(op.inputs[0].type)[0].dtype.size == 2 else 1
                    found[op] = wider * of.numbers // _numbers(op.inputs[0])
            elif not op.spec.kernel and len(op.outputs) == 1:
                summed.setdefault(op.outputs[0], of)
    return {op: factor for op, factor in found.items() if factor > 1}


class _Whole(NamedTuple):
    """The numbers of keys or values that attention has, and the mesh axes that split its queries' sequence."""

    numbers: int
    axes: frozenset[str]

    def along(self, op: Op) -> bool:
        """Whether a collective is along one of the axes."""
        axis = op.attributes.get("axis", ())
        return not self.axes.isdisjoint((axis,) if isinstance(axis, str) else axis)


def _whole(attention: Op, v: Value) -> _Whole:
    queries, keys = tensor(attention.inputs[0]), tensor(v)
    sequence, mesh = len(queries.shape) - 2, queries.device
    axes = zip(mesh.axes, queries.placements, strict=True) if isinstance(mesh, Mesh) else ()
    numbers = math.prod(queries.shape[:-2]) * math.prod(keys.shape[-2:])  # for each head of queries
    return _Whole(numbers, frozenset([axis for axis, p in axes if p.dim == sequence]))


def larger(t: Type, factor: int) -> Type:
    """The type of as many times the numbers."""
    if isinstance(t, Tuple):
        return Tuple([larger(x, factor) for x in t.types])
    if not isinstance(t, Tensor) or not t.shape:
        return t
    return Tensor(t.dtype, (t.shape[0] * factor, *t.shape[1:]), t.device, t.placements)


def _numbers(v: Value) -> int:
    return sum([math.prod(t.shape) for t in leaves(v.type)])
