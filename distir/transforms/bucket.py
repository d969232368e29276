"""Gradient buckets: sums along a mesh axis that follow one another are done as one, on a bundle of their operands.

A bucket is filled in the order in which its members are made, so a backward pass fills it from the last layer to the
first, and is reduced when its last member is there: beside what the backward pass has left to compute.
"""

from __future__ import annotations

from collections.abc import Collection

from distir.ir.function import NO_ATTRIBUTES, Attributes, Function, FunctionMaker, Op, Value
from distir.ir.spec import Spec, lookup
from distir.ir.type import Partial, Tensor, Tuple
from distir.transforms.known import append

PACK, UNPACK, AFTER = map(lookup, ("Pack", "Unpack", "After"))
SUMS = frozenset(map(lookup, ("MPIAllreduce", "MPIReduceScatter")))
GATHERS = frozenset((lookup("MPIAllgather"),))


def bucket(function: Function, axis: str, limit: float, kinds: Collection[Spec] = SUMS) -> Function:
    """The function with its sums along `axis` in buckets: each is full once it holds `limit` bytes on a device.

    That is how torch's DistributedDataParallel fills its own (`bucket_cap_mb`), but for its smaller first one. With a
    limit of 0 each sum stays alone, with infinity there is one bucket. A sum whose result is used before its bucket is
    full ends the bucket. Members have the same dtype, mesh and reduction. `kinds` are the
    collectives that are meant: with `GATHERS` those that join the parts of weights again.
    """
    buckets = _buckets(function, axis, limit, kinds)
    return _with_bundles(function, buckets) if buckets else function


def _buckets(function: Function, axis: str, limit: float, kinds: Collection[Spec]) -> dict[Op, list[Op]]:
    """The buckets of more than one member, by their last."""
    found: dict[Op, list[Op]] = {}
    filling: dict[object, list[Op]] = {}
    size: dict[object, int] = {}
    waiting: dict[Value, object] = {}
    """To which bucket, not yet full, a result belongs."""

    def end(key: object) -> None:
        members = filling.pop(key, [])
        if len(members) > 1:
            found[members[-1]] = members

    for op in function.ops:
        for v in op.inputs if waiting else ():
            if v in waiting:
                end(waiting[v])
        t = op.inputs[0].type if op.spec in kinds and op.attributes["axis"] == axis else None
        if isinstance(t, Tensor):
            p = t.on(axis)
            key = op.spec, t.dtype, t.device, t.piece, p.kind if isinstance(p, Partial) else None
            if key not in filling:
                filling[key], size[key] = [], 0
            filling[key].append(op)
            size[key] += max(t.bytes, op.outputs[0].type.bytes)
            waiting[op.outputs[0]] = key
            if size[key] >= limit:
                end(key)
    for key in list(filling):
        end(key)
    return found


def _with_bundles(function: Function, buckets: dict[Op, list[Op]]) -> Function:
    """The function with these collectives done in bundles. All other ops stay the very ops they are."""
    bundled = {op for members in buckets.values() for op in members}
    maker = maker_like(function)
    for op in function.ops:
        if op in buckets:
            bundle_collective(maker, buckets[op])
        elif op not in bundled:
            maker.ops.append(op)
    return maker.finalize()


def maker_like(function: Function) -> FunctionMaker:
    """A maker of a function like this one, whose names are taken, but still without ops."""
    maker = FunctionMaker(function.name)
    maker.inputs = list(function.inputs)
    for v in (*function.inputs, *[v for op in function.ops for v in op.outputs]):
        maker.fresh(v.name)
    maker.set_outputs(function.outputs)
    maker.updates, maker.sources = function.updates, function.sources
    return maker


def bundle_collective(maker: FunctionMaker, members: list[Op], after: Value | None = None) -> None:
    """Append collectives of one kind as one, on a bundle of their operands; their results are the same Values.

    It begins no earlier than `after` is there.
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
