"""What context parallelism sends of keys and values under a runtime that expands them to the heads of the queries
before (`Runtime.expands_keys`), and sends their gradients, summed over devices, in float32 (github pytorch/pytorch,
torch/distributed/tensor/experimental/_attention.py: the accumulators of `_templated_ring_attention_backward`)."""

from __future__ import annotations

import math

from distir.executor.simulator.categories import leaves
from distir.executor.simulator.sent_keys import sent_keys
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor, Tuple, Type
from distir.ops.rules import tensor

_WIDER = 2
"""The bytes of a gradient in float32, of those in 16 bits."""


def expanded_keys(f: Function) -> dict[Op, int]:
    """By how much larger than in the program is what collectives of keys and values, and of their gradients, send along
    the axes that split the sequence of queries."""
    found: dict[Op, int] = {}
    for op, sent in sent_keys(f).items():
        heads = math.prod(tensor(sent.attention.inputs[0]).shape[:-2])
        numbers = sum([heads * math.prod(tensor(v).shape[-2:]) for v in sent.values])
        if op.spec.comm is not None and op.spec.comm.gathers:
            found[op] = numbers // _numbers(op.outputs[0])
        else:
            wider = _WIDER if leaves(op.inputs[0].type)[0].dtype.size == 2 else 1
            found[op] = wider * numbers // _numbers(op.inputs[0])
    return {op: factor for op, factor in found.items() if factor > 1}


def larger(t: Type, factor: int) -> Type:
    """The type of as many times the numbers."""
    if isinstance(t, Tuple):
        return Tuple([larger(x, factor) for x in t.types])
    if not isinstance(t, Tensor) or not t.shape:
        return t
    return Tensor(t.dtype, (t.shape[0] * factor, *t.shape[1:]), t.device, t.placements)


def _numbers(v: Value) -> int:
    return sum([math.prod(t.shape) for t in leaves(v.type)])
