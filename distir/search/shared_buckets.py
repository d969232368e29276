"""Reductions that may become part of a bucket, which reduces them together with a later one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from distir.ir.function import Op, Value
from distir.ir.type import Tensor
from distir.transforms.pipeline.bucket import SUMS, along


def may_share(ops: Iterable[Op], axes: Collection[str], ends: bool) -> set[Op]:
    """The reductions along `axes`, of ops that a body has in this order, that may share a bucket with a later one. The
    bucket takes no less than its last member, and no part of it before that is ready.

    As in `bucket` a use closes one; its limit is left out. The body `ends` with these ops, or may have more of them.
    """
    filling: dict[object, list[Op]] = {}
    waiting: dict[Value, object] = {}
    found: set[Op] = set()
    for op in ops:
        for v in op.inputs if waiting else ():
            if v in waiting:
                filling.pop(waiting[v], None)
        t = op.inputs[0].type if op.spec in SUMS and along(op, axes) else None
        if isinstance(t, Tensor):
            axis = op.attributes["axis"]
            key = op.spec, t.dtype, t.device, t.piece, axis, t.on(axis).form
            found.update(filling.get(key, ()))
            filling.setdefault(key, []).append(op)
            waiting[op.outputs[0]] = key
    if not ends:
        found.update([op for members in filling.values() for op in members])
    return found
