"""Lower a collective on a bundle to one collective on one buffer.

    b0, w0, w1, = bucket()                  # a buffer, and views of it
    v5 = sum(v4, (0,), out=w0)              # an operand of the reduction is computed into its view
    v7 = matmul(t_1(v4), v6, out=w1)
    v8 = allreduce_dp(b0, (w0, w1,))        # starts it; returns functions that wait and return the views
    h9, h10, = v8

A buffer is kept from step to step if none of its views is live at the end of a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from distir.backends.lowering.function_writer import Bucket, FunctionWriter
from distir.backends.lowering.launchers import by_member
from distir.backends.tensors.staging import DeviceMemory
from distir.backends.tensors.torch_namespace import torch_dtype
from distir.ir.cached import cached
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor
from distir.transforms.rank.group_optimizers import updates_weights

_ALIGNED = 64
"""Alignment of views in bytes."""

Row = Sequence[torch.Tensor]


def buffer(types: Sequence[Tensor], memory: DeviceMemory, persistent: bool) -> Callable[[], Row]:
    """A function that returns a buffer for these types and a view for each tensor; `persistent`: always the same."""
    dtype = torch_dtype(types[0].dtype)
    step = _ALIGNED // dtype.itemsize
    sizes = [math.prod(t.shape) for t in types]
    ends = [0]
    for n in sizes:
        ends.append(-(-(ends[-1] + n) // step) * step)
    buffers: list[Row] = []

    def make() -> Row:
        if buffers:
            return buffers[0]
        flat = memory.allocate((ends[-1],), dtype)
        views = [flat[i : i + n].view(t.shape) for i, n, t in zip(ends, sizes, types, strict=False)]
        if persistent:
            buffers.append((flat, *views))
        return (flat, *views)

    return make


@cached
def makers_of(function: Function) -> dict[Value, Op]:
    """The op that computes each value."""
    return {v: op for op in function.ops for v in op.outputs}


def find_buckets(b: FunctionWriter, persistent: bool) -> None:
    """Add a function's buckets to its writer; `persistent`: buffers are kept from one call to the next."""
    makers = makers_of(b.function)
    number = {op: k for k, op in enumerate(b.function.ops)}
    for op, pack in b.memory.buffered.items():
        types = [v.type for v in pack.inputs if isinstance(v.type, Tensor)]
        make = buffer(types, b.network.memory, persistent)
        bucket = b.buckets[pack] = Bucket(types, functools.partial(_begin, b, len(types), make))
        for k, v in enumerate(pack.inputs):
            b.place_of[v] = bucket, k
            once = pack.inputs.count(v) == 1
            if once and v in makers and _placeable(makers[v]) and b.memory.ends(v, number[op]):
                bucket.placed.add(v)


def _begin(b: FunctionWriter, members: int, make: Callable[[], Row]) -> list[str]:
    """Write the line that makes the buffer and its views; returns their names."""
    n = sum(len(other.types) + 1 for other in b.buckets.values() if other.started) - members - 1
    names = [f"b{n}", *[f"w{n + k}" for k in range(members)]]
    b.lines.append(f"{', '.join(names)}, = {b.bind('bucket', make)}()")
    return names


def bucket_of(b: FunctionWriter, collective: Op) -> Bucket | None:
    """The bucket of the bundle that a collective reduces, or None."""
    pack = b.memory.buffered.get(collective)
    return None if pack is None else b.buckets[pack]


def _placeable(op: Op) -> bool:
    """Whether the op's result can be computed into given memory."""
    if op.spec.comm is not None:
        return op.spec.accumulates and isinstance(op.outputs[0].type, Tensor)
    return len(op.outputs) == 1 and not updates_weights(op)


def pack(b: FunctionWriter, op: Op) -> None:
    """Lower Pack: a tuple, or, for a bucket, copies of the members that are not computed in place."""
    bucket = b.buckets.get(op)
    if bucket is None:
        passed = [b.pass_on(v, b.now) for v in op.inputs]
        waits = tuple([w if isinstance(w, int) else 0 for _, w in passed])
        if any(waits):
            b.waits[op.outputs[0]] = waits
        b.assign(op, f"({''.join([f'{name}, ' for name, _ in passed]).rstrip()})")
        return
    _, *views = bucket.names
    for v, view in zip(op.inputs, views, strict=True):
        if v in bucket.placed:
            continue
        name = b.use(v)
        if not b.context.proxy:  # whose contents do not matter
            b.lines.append(f"{b.bind('copy_', torch.Tensor.copy_)}({view}, {name})")


def unpack(b: FunctionWriter, op: Op) -> None:
    bundle = b.itself(op.inputs[0])
    if not op.outputs:
        return
    name, waits = b.pass_on(bundle, b.now)
    for v, n in zip(op.outputs, waits if isinstance(waits, tuple) else (), strict=False):
        if n:
            b.waits[v] = n
    row = "".join(f"{b.var(v)}, " for v in op.outputs)
    b.lines.append(f"{row}= {name}")


def reduce(b: FunctionWriter, op: Op, bucket: Bucket) -> None:
    """Lower the reduction of a bucket."""
    flat, *views = bucket.names
    start = b.network.allreduce(bucket.types[0], op.attributes["axis"], own=True)

    def reduced(buffer: torch.Tensor, parts: Row) -> Callable[[], Row]:
        finish = start(buffer)

        def members() -> Row:
            row = finish()  # another tensor than the buffer if the backend stages it
            return parts if row is buffer else [row.as_strided(x.shape, x.stride(), x.storage_offset()) for x in parts]

        return members

    name = b.bind_along("allreduce", op.attributes["axis"], by_member(reduced, len(views)))
    b.assign(op, f"{name}({flat}, ({', '.join(views)},))", pending=True)
    b.lines.append(f"del {flat}, {', '.join(views)}")
