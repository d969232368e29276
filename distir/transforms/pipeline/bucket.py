"""Gradient buckets: merges consecutive reductions along the same axes into one, on a bundle of their operands.

Members are added in program order, so a backward pass fills buckets from the last layer to the first. A bucket is
reduced when its last member is computed, overlapping the rest of the backward pass. Where gradients are reduced after
the backward pass, each beside its first use, they are all reduced first (`reductions_first`), and so share buckets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

from distir.ir.function import NO_ATTRIBUTES, Attributes, Function, FunctionMaker, Op, Value
from distir.ir.spec import Spec, all_ops, lookup
from distir.ir.type import Tensor, Tuple
from distir.transforms.append import append

PACK, UNPACK, AFTER = map(lookup, ("Pack", "Unpack", "After"))
SUMS = frozenset(spec for spec in all_ops() if spec.comm is not None and spec.comm.bundles and spec.comm.sums)
GATHERS = frozenset(spec for spec in all_ops() if spec.comm is not None and spec.comm.bundles and spec.comm.gathers)


def bucket(function: Function, axes: Collection[str], limit: float, kinds: Collection[Spec] = SUMS) -> Function:
    """The function with its collectives along `axes` in buckets; a bucket is full at `limit` bytes on a device.

    Torch's DistributedDataParallel fills its buckets in the same way (`bucket_cap_mb`), except for its smaller first
    one. With a limit of 0 no collectives are merged, with infinity there is one bucket. A use of a member's result
    closes its bucket. Members have the same dtype, mesh, axis and reduction. `kinds` are the collectives to merge:
    `SUMS` reduce gradients, `GATHERS` gather sharded weights.
    """
    buckets = _buckets(function, axes, limit, kinds)
    return _with_bundles(function, buckets) if buckets else function


def _along(op: Op, axes: Collection[str]) -> bool:
    """Whether a collective is along one of the axes, or several of them as one."""
    axis = op.attributes["axis"]
    return axis in axes if isinstance(axis, str) else all([a in axes for a in axis])


def reductions_first(function: Function, axes: Collection[str]) -> Function:
    """The function with its reductions along `axes`, and what they need, before all else; those that need another one,
    such as of the norm of all gradients, stay behind it."""
    reduced: set[Value] = set()
    first: set[Op] = set()
    for op in function.ops:
        if not reduced.isdisjoint(op.inputs):
            reduced.update(op.outputs)
        elif op.spec in SUMS and _along(op, axes):
            reduced.update(op.outputs)
            first.add(op)
    if not first:
        return function
    needed = {v for op in first for v in op.inputs}
    for op in reversed(function.ops):
        if op in first or not needed.isdisjoint(op.outputs):
            first.add(op)
            needed.update(op.inputs)
    maker = maker_like(function)
    maker.ops = [op for op in function.ops if op in first] + [op for op in function.ops if op not in first]
    return maker.finalize()


def _buckets(function: Function, axes: Collection[str], limit: float, kinds: Collection[Spec]) -> dict[Op, list[Op]]:
    """The buckets of more than one member, by their last member."""
    if len([op for op in function.ops if op.spec in kinds and _along(op, axes)]) < 2:
        return {}
    closed, left = buckets(function.ops, axes, limit, kinds)
    return {members[-1]: members for members in (*closed, *left) if len(members) > 1}


class Buckets(NamedTuple):
    """The buckets of ops in their order: those that are closed, and those that later ops may still fill."""

    closed: list[list[Op]]
    open: list[list[Op]]


def buckets(
    ops: Iterable[Op], axes: Collection[str], limit: float = math.inf, kinds: Collection[Spec] = SUMS
) -> Buckets:
    """How collectives along `axes` fill buckets (see `bucket`), those of one member included."""
    closed: list[list[Op]] = []
    filling: dict[object, list[Op]] = {}
    size: dict[object, int] = {}
    waiting: dict[Value, object] = {}
    """The open bucket that each result belongs to."""

    def end(key: object) -> None:
        if key in filling:
            closed.append(filling.pop(key))

    for op in ops:
        for v in op.inputs if waiting else ():
            if v in waiting:
                end(waiting[v])
        t = op.inputs[0].type if op.spec in kinds and _along(op, axes) else None
        if isinstance(t, Tensor):
            axis = op.attributes["axis"]
            key = op.spec, t.dtype, t.device, t.piece, axis, t.on(axis).form
            if key not in filling:
                filling[key], size[key] = [], 0
            filling[key].append(op)
            size[key] += max(t.bytes, op.outputs[0].type.bytes)
            waiting[op.outputs[0]] = key
            if size[key] >= limit:
                end(key)
    return Buckets(closed, list(filling.values()))


def _with_bundles(function: Function, buckets: dict[Op, list[Op]]) -> Function:
    """The function with each bucket's collectives merged. All other ops are the same objects."""
    bundled = {op for members in buckets.values() for op in members}
    maker = maker_like(function)
    for op in function.ops:
        if op in buckets:
            bundle_collective(maker, buckets[op])
        elif op not in bundled:
            maker.ops.append(op)
    return maker.finalize()


def maker_like(function: Function) -> FunctionMaker:
    """A maker with the function's name, inputs, outputs and updates, its value names reserved, but without ops."""
    maker = FunctionMaker(function.name)
    maker.inputs = list(function.inputs)
    maker.reserve([*function.inputs, *[v for op in function.ops for v in op.outputs]])
    maker.set_outputs(function.outputs)
    maker.updates, maker.sources = function.updates, function.sources
    return maker


def bundle_collective(maker: FunctionMaker, members: list[Op], after: Value | None = None) -> None:
    """Append one collective, on a bundle of the members' operands; its results are the members' own Values.

    With `after`, it starts no earlier than that value is computed.
    """
    operands = tuple([op.inputs[0] for op in members])
    results = tuple([op.outputs[0] for op in members])
    first = members[0]
    types = Tuple([v.type for v in operands])
    (bundle,) = append(maker, PACK, operands, NO_ATTRIBUTES, ("bucket",), (types,))
    if after is not None:
        (bundle,) = append(maker, AFTER, (bundle, after), NO_ATTRIBUTES, ("bucket",), (types,))
    attributes = first.attributes
    if "dim" in attributes:
        rows = {
            "dim": [op.attributes["dim"] for op in members],
            "outer": [op.attributes.get("outer", 1) for op in members],
        }
        attributes = Attributes(axis=attributes["axis"], **{k: tuple(row) for k, row in rows.items()})
    wholes = Tuple([v.type for v in results])
    (bundle,) = append(maker, first.spec, (bundle,), attributes, ("bucket",), (wholes,))
    maker.ops.append(Op(UNPACK, (bundle,), NO_ATTRIBUTES, results))
