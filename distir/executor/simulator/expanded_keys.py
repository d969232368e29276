"""What context parallelism sends of keys and values under a runtime that expands them to the heads of the queries
before (`Runtime.expands_keys`), and sends their gradients, summed over devices, in float32 (github pytorch/pytorch,
torch/distributed/tensor/experimental/_attention.py: the accumulators of `_templated_ring_attention_backward`)."""

from __future__ import annotations

import math

from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor, Type

_KEYS_AND_VALUES = (1, 2)
"""The operands of attention, and the results of its gradient, that are of keys and values."""
_WIDER = 2
"""The bytes of a gradient in float32, of those in 16 bits."""


def expanded_keys(f: Function) -> dict[Op, int]:
    """By how much larger than in the program is what collectives of keys and values, and of their gradients, send."""
    found: dict[Op, int] = {}
    whole: dict[Value, int] = {}
    """The numbers of keys or values that attention takes, by what they are made of."""
    for op in reversed(f.ops):
        if op.spec.kernel == "attention":
            whole.update({op.inputs[k]: _numbers(op.inputs[k]) for k in _KEYS_AND_VALUES})
        elif op.outputs and op.outputs[0] in whole:
            if op.spec.comm is not None and op.spec.comm.gathers:
                found[op] = whole[op.outputs[0]] // _numbers(op.outputs[0])
            elif op.spec.comm is None and not op.spec.kernel:
                whole.setdefault(op.inputs[0], whole[op.outputs[0]])
    summed: dict[Value, int] = {}
    for op in f.ops:
        if op.spec.kernel == "attention" and len(op.outputs) > max(_KEYS_AND_VALUES):
            summed.update({op.outputs[k]: _numbers(op.outputs[k]) for k in _KEYS_AND_VALUES})
        elif op.inputs and op.inputs[0] in summed:
            if op.spec.comm is not None and op.spec.comm.sums:
                found[op] = _WIDER * summed[op.inputs[0]] // _numbers(op.inputs[0])
            elif op.spec.comm is None and not op.spec.kernel and len(op.outputs) == 1:
                summed.setdefault(op.outputs[0], summed[op.inputs[0]])
    return {op: factor for op, factor in found.items() if factor > 1}


def larger(t: Type, factor: int) -> Type:
    """The type of as many times the numbers."""
    if not isinstance(t, Tensor) or not t.shape:
        return t
    return Tensor(t.dtype, (t.shape[0] * factor, *t.shape[1:]), t.device, t.placements)


def _numbers(v: Value) -> int:
    return math.prod(v.type.shape) if isinstance(v.type, Tensor) else 0
