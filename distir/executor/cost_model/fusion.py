"""Ops that a runtime runs as one kernel: chains of pointwise ops, and ops on many tensors (multi-tensor kernels)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from distir.ir.function import Function, Op, Value, type_of
from distir.ir.host_runtime import Runtime
from distir.ir.spec import lookup
from distir.ir.type import Tensor


class Fused(NamedTuple):
    """What an op does not move as it is part of a kernel: operands by number, and its result; whether an earlier op
    launches the kernel; and whether the result is there afterwards though an earlier op has moved it."""

    operands: frozenset[int] = frozenset()
    result: bool = False
    launched: bool = False
    stored: bool = False


UNFUSED = Fused()
_CAST, _CONCAT, _EXTEND = map(lookup, ("Cast", "Concat", "PadTo"))


def fused(f: Function, runtime: Runtime | None, repeated: bool = False) -> dict[Op, Fused]:
    """The ops of a function that the runtime runs as part of a kernel with others.

    `repeated`: the function is called for each microbatch. Its ops are issued as the model's layers are called, one
    after the other: none runs with those of another layer, though blocks that are recomputed do not need each other.
    """
    if runtime is None:
        return {}
    limited = dict.fromkeys([op for op in f.ops if _is_limited_by_memory(op)])
    found = _chains(f, limited) if runtime.fuses else {}
    for op in _with_others(f, limited) if runtime.multi_tensor and not repeated else ():
        found[op] = found.get(op, UNFUSED)._replace(launched=True)
    if runtime.multi_tensor:
        found |= _in_buffers(f)
    return found | (_in_products(f) if runtime.accumulates else {})


def _in_buffers(f: Function) -> dict[Op, Fused]:
    """The extensions with zeros of what only collectives take: they need no time, and no memory of their own.
    Frameworks with kernels for many tensors pack them into the buffers of collectives, which is not counted either, and
    fill these up.

    Source: PyTorch, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`chunk_cat`); Megatron-LM,
    core/distributed/param_and_grad_buffer.py.
    """
    extended = {op.outputs[0]: op for op in f.ops if op.spec is _EXTEND}
    if not extended:  # as most
        return {}
    elsewhere = {*f.outputs, *[v for op in f.ops if op.spec.comm is None for v in op.inputs]}
    return {op: Fused(frozenset((0,)), True, True) for v, op in extended.items() if v not in elsewhere}


def _in_products(f: Function) -> dict[Op, Fused]:
    """The casts and sums over time of gradients that products make, each of which is part of the product. A cast that
    is not added to a sum, as in the first microbatch, is what the product stores.

    Source: Megatron-LM, gradient_accumulation_fusion (core/tensor_parallel/layers.py).
    """
    found: dict[Op, Fused] = {}
    made: set[Value] = set()
    stored = {*f.outputs, *[v for op in f.ops if not _accumulates(op) for v in op.inputs]}
    for op in f.ops:
        if op.spec.kernel == "product":
            made.update([v for v in op.outputs if isinstance(v.type, Tensor) and v.type.over_time.kind is not None])
        elif (_accumulates(op) or op.spec is _CAST) and op.inputs[-1] in made:  # the part of a sum is the last operand
            found[op] = Fused(frozenset(range(len(op.inputs))), True, True, not stored.isdisjoint(op.outputs))
            made.update(op.outputs)
    return found


def _with_others(f: Function, limited: Collection[Op]) -> list[Op]:
    """The ops that a multi-tensor kernel runs with an earlier one: it has the same attributes, and neither needs the
    other, as they are at the same depth. Such are the updates of all weights.
    """
    depth: dict[Value, int] = {}
    seen: set[tuple[object, ...]] = set()
    found: list[Op] = []
    for op in f.ops:
        d = 1
        for v in op.inputs:  # as max() of a list, in half the time
            if depth.get(v, 0) >= d:
                d = depth[v] + 1
        for v in op.outputs:
            depth[v] = d
        if op in limited:
            key = op.spec, op.attributes, op.outputs[0].type.device, d
            if key in seen:
                found.append(op)
            seen.add(key)
    return found


def _chains(f: Function, limited: Collection[Op]) -> dict[Op, Fused]:
    """The ops of a function that are part of a chain, between which nothing is written or read.

    An op is joined to the one after it if that alone uses its result, and gives one of the same shape on the same
    devices, and one of the two is pointwise: another pointwise op, the softmax or norm of its rows, the mask of the
    gradient of a softmax, or the sum over time that it is added to: a microbatch's gradient is cast as it is added. So
    are the parts of what is concatenated, as in rotary embeddings, of another shape: each element is one of theirs.
    """
    results = {op.outputs[0] for op in limited}
    user: dict[Value, Op] = {}
    given = set(f.outputs)
    """What the caller uses, too, or several ops."""
    for op in f.ops:
        for v in op.inputs:
            if v in results and user.setdefault(v, op) is not op:
                given.add(v)
    chains: dict[Op, Fused] = {}
    pointwise = _Pointwise()
    for op in limited:
        y = op.outputs[0]
        later = user.get(y)
        if y in given or later is None or not (later in limited or _accumulates(later)):
            continue
        if later.spec is _CONCAT:
            joined = pointwise.has(op)
        else:
            continues = op.spec is _CONCAT or _continues(op)
            joined = alike(y, later.outputs[0]) and (pointwise.has(op) or (continues and pointwise.has(later)))
        if not joined:
            continue
        before, after = chains.get(op, UNFUSED), chains.get(later, UNFUSED)
        chains[op] = Fused(before.operands, True, before.launched)
        here = [k for k, v in enumerate(later.inputs) if v is y]
        chains[later] = Fused(after.operands.union(here), after.result, True)
    return chains


def _is_limited_by_memory(op: Op) -> bool:
    """Whether an op computes on one device, without a kernel of its own kind."""
    return op.spec.comm is None and not op.spec.alias and not op.spec.kernel and bool(op.inputs and op.outputs)


def _continues(op: Op) -> bool:
    """Whether an op that is not pointwise has one result, of the shape of an operand: a pointwise op that follows is
    given each row while it is in a kernel's hands."""
    return len(op.outputs) == 1 and alike(op.inputs[0], op.outputs[0])


def _accumulates(op: Op) -> bool:
    """Whether an op adds to a sum over time."""
    return op.spec.comm is not None and op.spec.comm.memberwise and op.spec.route == "here"


def unwritten(op: Op, chained: Fused) -> bool:
    """Whether an op of a chain reads one value, and hands on none that is smaller: it then needs no memory but that."""
    return (
        chained.result
        and not chained.stored
        and len(op.inputs) == 1
        and op.inputs[0].type.bytes <= op.outputs[0].type.bytes
    )


class _Pointwise:
    """Whether each element of an op's results depends on one element of each operand: found once for ops of a kind."""

    def __init__(self) -> None:
        self._known: dict[object, bool] = {}

    def has(self, op: Op) -> bool:
        kind = op.spec, op.attributes.form, tuple(map(type_of, op.inputs))
        found = self._known.get(kind)
        if found is None:
            found = self._known[kind] = _is_pointwise(op)
        return found


def _is_pointwise(op: Op) -> bool:
    shapes = [v.type.global_shape for v in op.inputs if isinstance(v.type, Tensor)]
    found = op.spec.factors(op.attributes, shapes) if len(shapes) == len(op.inputs) else None
    return found is not None and not found.kinds and len(found.outs[0]) == len(set(found.outs[0]))


def alike(a: Value, b: Value) -> bool:
    """Whether two tensors have the same shape and devices."""
    s, t = a.type, b.type
    return isinstance(s, Tensor) and isinstance(t, Tensor) and s.shape == t.shape and s.device is t.device
