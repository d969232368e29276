"""Replaces causal masks of attention by the attribute `causal`.

Torch's kernels for causal attention read no mask, and skip the half of the scores that is masked out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from distir.ir.function import Attributes, Function, Op, Value
from distir.ops.rules import shape_of
from distir.transforms.rewriting.cleanup import prune

_MASK = 3
"""The position of Attention's mask, which is added to its scores."""


def masks(function: Function) -> list[Value]:
    """The distinct masks of attention that have an element for each score."""
    return list(dict.fromkeys(op.inputs[_MASK] for op in function.ops if _masked(op)))


def causal(function: Function, known: Collection[Value], empty: Collection[Value] = ()) -> Function:
    """The function with causal attention in place of the masks `known`, which are causal, and without `empty`.

    `empty` are masks that mask nothing. For programs without gradients. Inputs that only these masks needed are
    removed.
    """
    gone = {v: {"causal": True} for v in known} | {v: {} for v in empty}
    ops = [
        _without_mask(op, gone[op.inputs[_MASK]]) if _masked(op) and op.inputs[_MASK] in gone else op
        for op in function.ops
    ]
    changed = prune(Function(function.name, function.inputs, tuple(ops), function.outputs, function.updates))
    before, after = _used(function), _used(changed)
    inputs = tuple([v for v in function.inputs if v in after or v not in before])
    return Function(function.name, inputs, changed.ops, changed.outputs, changed.updates, function.sources)


def _masked(op: Op) -> bool:
    if op.op_type != "Attention" or len(op.inputs) <= _MASK:
        return False
    q, k, _, mask = map(shape_of, op.inputs)
    return mask[-2:] == (q[-2], k[-2])


def _without_mask(op: Op, instead: Mapping[str, Any]) -> Op:
    return Op(op.spec, op.inputs[:_MASK], Attributes({**op.attributes, **instead}), op.outputs, op.of)


def _used(function: Function) -> set[Value]:
    return {v for op in function.ops for v in op.inputs} | set(function.outputs)
