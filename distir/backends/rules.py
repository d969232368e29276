"""How communication and structure ops become Python: one rule an op, which adds the lines for it to a
function's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from distir.backends import buckets
from distir.backends.bundles import bundle_starter
from distir.backends.layout import combine, merge
from distir.backends.routes import receiver, sender
from distir.executor.collectives import cut, local_outer, take_digit
from distir.ir.device import Mesh
from distir.ir.errors import ModelError
from distir.ir.function import Function, Op, Value
from distir.ir.kept import kept
from distir.ir.type import Partial, Shard, Tensor, Tuple

if TYPE_CHECKING:
    from distir.backends.body import Body


def _tensor(v: Value) -> Tensor:
    if not isinstance(v.type, Tensor):
        raise ModelError(f"expected a tensor, got %{v.name}: {v.type}")
    return v.type


def digit_of(t: Tensor, axis: int) -> tuple[int, int]:
    """The dim that mesh axis number `axis` splits, and the axis's size. Raises ModelError if it splits none."""
    p = t.placements[axis]
    if not isinstance(p, Shard):
        raise ModelError(f"expected Shard along {t.mesh.axes[axis]!r}, got {t}")
    return p.dim, t.mesh.sizes[axis]


def _along_axis(b: Body, op: Op) -> None:
    """A collective along a mesh axis."""
    if isinstance(op.inputs[0].type, Tuple):
        _bundle_along_axis(b, op)
        return
    before, after, axis = _tensor(op.inputs[0]), _tensor(op.outputs[0]), op.attributes["axis"]
    a = before.mesh.position(axis)
    if a == before.mesh.time:
        _gather_in_time(b, op, before, a)
    else:
        start = b.bind(f"{op.spec.name[3:].lower()}_{axis}", _starter(b, op, before, after, axis))
        b.assign(op, f"{start}({b.use(op.inputs[0])})", pending=True)


def _starter(b: Body, op: Op, before: Tensor, after: Tensor, axis: str) -> Callable[[Any], Any]:
    """What starts a collective on a tensor of type `before`."""
    network = b.network
    starts = {
        "MPIAllreduce": lambda: network.allreduce(before, axis),
        "MPIAllgather": lambda: _single(network.allgather([before], axis, _within(b, op))),
        "MPIReduceScatter": lambda: _single(network.reduce_scatter([before], [after], axis)),
        "MPIAlltoall": lambda: network.alltoall(before, after, axis),
    }
    return starts[op.spec.name]()


def _single(start: Callable[[Any], Callable[[], Any]]) -> Callable[[Any], Any]:
    """A collective on several tensors, for one."""

    def started(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        finish = start([x])
        return lambda: finish()[0]

    return started


def _within(b: Body, op: Op) -> list[bool]:
    """Which of the parts that an op gathers lie in the memory of a whole that was cut in the same way, and that nobody
    sees any more.
    """
    makers, t = buckets.makers_of(b.function), op.outputs[0].type
    bundle = makers.get(b.itself(op.inputs[0]))
    parts = bundle.inputs if bundle is not None and bundle.spec.bundle == "pack" else op.inputs
    wholes = t.types if isinstance(t, Tuple) else (t,)
    if len(parts) < len(wholes):  # a bundle that was made elsewhere
        return [False] * len(wholes)
    alike: list[bool] = []
    for v, whole in zip(parts, wholes, strict=True):
        cut = makers.get(b.itself(v))
        axis = cut.attributes["axis"] if cut is not None and cut.spec.name == "LocalSlice" else None
        alike.append(cut is not None and axis == op.attributes["axis"] and cut.inputs[0].type == whole)
    if not any(alike):  # as most are not: who sees what need not be found out
        return alike
    return [same and free for same, free in zip(alike, b.memory.renewable(op, b.now), strict=True)]


def _bundle_along_axis(b: Body, op: Op) -> None:
    """A collective on a bundle of tensors: on the buffer in which they lie, else on one that they are copied into."""
    before, after, axis = op.inputs[0].type, op.outputs[0].type, op.attributes["axis"]
    if not isinstance(before, Tuple) or not isinstance(after, Tuple):
        raise ModelError(f"expected bundles, got {op}")
    if (bucket := buckets.bucket_of(b, op)) is not None:
        buckets.reduce(b, op, bucket)
        return
    within = _within(b, op) if op.spec.name == "MPIAllgather" else ()
    start = buckets.by_member(bundle_starter(b.network, op.spec.name, before, after, axis, within), len(after.types))
    start = b.bind(f"bundle_{op.spec.name[3:].lower()}_{axis}", start)
    b.assign(op, f"{start}({b.use(op.inputs[0])})", pending=True)


def _gather_in_time(b: Body, op: Op, t: Tensor, axis: int) -> None:
    """All microbatches, in order, as one."""
    (dim, _), outer = digit_of(t, axis), local_outer(t, axis)
    if len(op.inputs) != t.mesh.sizes[axis]:
        b.varies = op.inputs[0].name
    join = b.bind("join_microbatches", lambda *xs: merge(xs, dim, outer))
    b.assign(op, f"{join}({', '.join([b.use(v) for v in op.inputs])})")


def _slice(b: Body, op: Op) -> None:
    t = _tensor(op.outputs[0])
    a = t.mesh.position(op.attributes["axis"])
    dim, n = digit_of(t, a)
    outer = local_outer(t, a)
    index = b.moment(t.mesh, op.outputs[0]) if a == t.mesh.time else str(b.network.coordinate(t.mesh)[a])
    part = b.bind("piece", lambda x, k: take_digit(x, dim, outer, n, k))
    b.assign(op, f"{part}({b.use(op.inputs[0])}, {index})")


def _send(b: Body, op: Op) -> None:
    source, to, whole = _tensor(op.inputs[0]), op.attributes["to"], None
    if isinstance(to, Mesh) and not isinstance(source.device, Mesh):
        whole = Tensor.whole(source.dtype, source.shape, to, op.attributes.get("placements"))
    stays = op.inputs[0] in b.function.inputs
    send = b.bind("send", sender(b.network, source, to, whole, op.attributes["message"], stays))
    b.lines.append(f"{send}({b.use(op.inputs[0])})")


def _receive(b: Body, op: Op) -> None:
    attrs, got = op.attributes, _tensor(op.outputs[0])
    at = attrs["source"]
    placements = attrs.get("placements") if isinstance(at, Mesh) else None
    source = Tensor.whole(got.dtype, attrs["shape"], at, placements)
    b.assign(op, f"{b.bind('receive', receiver(b.network, source, got, attrs['message']))}()", pending=True)


def _scatter(b: Body, op: Op) -> None:
    """On the device that has the whole, where it also gets a piece."""
    whole, t = _tensor(op.inputs[0]), _tensor(op.outputs[0])
    mine = b.network.coordinate(t.mesh)
    send = b.bind("send", sender(b.network, whole, t.mesh, t, op.attributes["message"]))
    b.lines.append(f"{send}({b.use(op.inputs[0])})")
    b.assign(op, f"{b.bind('piece', lambda x: cut(x, t, mine))}({b.use(op.inputs[0])})")


def _gather(b: Body, op: Op) -> None:
    """On the device that gets the whole, where it also has a piece."""
    source, got = _tensor(op.inputs[0]), _tensor(op.outputs[0])
    gather = b.bind("gather", receiver(b.network, source, got, op.attributes["message"]))
    b.assign(op, f"{gather}({b.use(op.inputs[0])})", pending=True)


@kept
def _last_of_batches(function: Function) -> frozenset[Op]:
    """The transfers that no other follows at once: with each, all since the one before are posted together."""
    ops = function.ops
    return frozenset(
        op
        for op, after in zip(ops, (*ops[1:], None), strict=True)
        if op.spec.name in _TRANSFERS and (after is None or after.spec.name not in _TRANSFERS)
    )


def _posted(rule: Callable[[Body, Op], None]) -> Callable[[Body, Op], None]:
    """A transfer, posted with its batch."""

    def with_batch(b: Body, op: Op) -> None:
        rule(b, op)
        if op in _last_of_batches(b.function):
            b.lines.append(f"{b.bind('post', b.network.transfers.post)}()")

    return with_batch


def _accumulate(b: Body, op: Op) -> None:
    """In place, if nobody else sees the sum so far."""
    (total, x), t = op.inputs, op.inputs[0].type
    owned = b.memory.may_overwrite(op, b.now, 0)
    if isinstance(t, Tuple):
        add = b.bind("accumulate", accumulator(t, owned))
        b.assign(op, f"{add}({b.use(total)}, {b.use(x)})")
        return
    names, place = f"{b.use(total)}, {b.use(x)}", b.place(op.outputs[0])
    add = b.bind("maximum" if _is_max(t) else "add", torch.maximum if _is_max(t) else torch.add)
    if place is None and owned:
        b.lines.append(f"{add}({names}, out={b.use(total)})")
        b.take_over(op.outputs[0], total)
    else:
        b.assign(op, f"{add}({names})" if place is None else f"{add}({names}, out={place})")


def accumulator(t: Tuple, owned: bool) -> Callable[[Any, Any], Any]:
    """What adds the next bundle to the running sums of one."""
    kinds = ["max" if isinstance(u, Tensor) and _is_max(u) else "sum" for u in t.types]

    def accumulate(totals: Any, xs: Any) -> Any:
        rows = zip(totals, xs, kinds, strict=True)
        if not owned:
            return tuple([combine((a, x), kind) for a, x, kind in rows])
        return tuple([torch.maximum(a, x, out=a) if kind == "max" else a.add_(x) for a, x, kind in rows])

    return accumulate


def _is_max(t: Tensor) -> bool:
    p = t.placements[t.mesh.time] if t.mesh.time is not None else None
    return isinstance(p, Partial) and p.kind == "max"


_TRANSFERS: dict[str, Callable[[Body, Op], None]] = {
    "MPISend": _send,
    "MPIRecv": _receive,
    **dict.fromkeys(("MPIScatter", "MPIBroadcast"), _scatter),
    **dict.fromkeys(("MPIGather", "MPIReduce"), _gather),
}

RULES: dict[str, Callable[[Body, Op], None]] = {
    **dict.fromkeys(("MPIAllreduce", "MPIAllgather", "MPIReduceScatter", "MPIAlltoall"), _along_axis),
    "LocalSlice": _slice,
    **{name: _posted(rule) for name, rule in _TRANSFERS.items()},
    "Accumulate": _accumulate,
    "Pack": buckets.pack,
    "Unpack": buckets.unpack,
}
