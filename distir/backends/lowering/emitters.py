"""Lowering rules for communication and structure ops: each writes the Python lines of an op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distir.backends.lowering import buckets
from distir.backends.lowering.function_writer import FunctionWriter
from distir.backends.lowering.launchers import LAUNCHERS, Launch, Start, by_member
from distir.backends.lowering.proxy_launchers import proxy_launcher
from distir.backends.lowering.routes import receiver, sender
from distir.backends.tensors.layout import combine
from distir.backends.tensors.torch_namespace import TORCH, torch_dtype
from distir.ir.cached import cached
from distir.ir.communication import Route
from distir.ir.device import TIME, Mesh
from distir.ir.errors import ModelError
from distir.ir.function import Function, Op, Value
from distir.ir.spec import Spec
from distir.ir.type import Tensor, Tuple
from distir.runtime.emulate import sleeper


def _tensor(v: Value) -> Tensor:
    if not isinstance(v.type, Tensor):
        raise ModelError(f"expected a tensor, got %{v.name}: {v.type}")
    return v.type


def _along_axis(b: FunctionWriter, op: Op) -> None:
    """A collective along a mesh axis."""
    if isinstance(op.inputs[0].type, Tuple):
        _bundle_along_axis(b, op)
        return
    before, after, axis = _tensor(op.inputs[0]), _tensor(op.outputs[0]), op.attributes["axis"]
    if before.mesh.is_time(axis):
        _gather_in_time(b, op, before)
    else:
        start = b.bind_along(op.spec.name[3:].lower(), axis, _alone(_starter(b, op, [before], [after])))
        b.assign(op, f"{start}({b.use(op.inputs[0])})", pending=True)


def _starter(b: FunctionWriter, op: Op, before: Sequence[Tensor], after: Sequence[Tensor]) -> Start:
    """A function that starts a collective on tensors of these types."""
    if op.spec.name not in LAUNCHERS:
        raise ModelError(f"{b.function.name}: the torch backend cannot launch {op.spec.name}")
    if b.context.proxy:
        start = proxy_launcher(op.spec.name, Launch(b.network, op.attributes, before, after, ()))
        if start is not None:
            return start
    within: Sequence[bool] = ()
    if op.spec.comm is not None and op.spec.comm.gathers:
        within = _within(b, op)
    elif op.spec.donates and len(before) == 1:  # several are copied into one buffer
        within = b.memory.renewable(op, b.now)
    return LAUNCHERS[op.spec.name](Launch(b.network, op.attributes, before, after, within))


def _alone(start: Start) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
    """Adapt a collective on several tensors to one tensor."""

    def started(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        finish = start([x])
        return lambda: finish()[0]

    return started


def _within(b: FunctionWriter, op: Op) -> list[bool]:
    """For each part that an op gathers, whether it is a slice, along the same axis, of a whole that is no longer live,
    so that it can be gathered in place.
    """
    makers, t = buckets.makers_of(b.function), op.outputs[0].type
    bundle = makers.get(b.itself(op.inputs[0]))
    parts = bundle.inputs if bundle is not None and bundle.spec.bundle == "pack" else op.inputs
    wholes = t.types if isinstance(t, Tuple) else (t,)
    if len(parts) < len(wholes):  # a bundle made in another function
        return [False] * len(wholes)
    sliced: list[bool] = []
    for v, whole in zip(parts, wholes, strict=True):
        cut = makers.get(b.itself(v))
        axis = cut.attributes["axis"] if cut is not None and cut.spec.name == "LocalSlice" else None
        sliced.append(cut is not None and axis == op.attributes["axis"] and cut.inputs[0].type == whole)
    if not any(sliced):  # the common case: no alias analysis needed
        return sliced
    return [same and free for same, free in zip(sliced, b.memory.renewable(op, b.now), strict=True)]


def _bundle_along_axis(b: FunctionWriter, op: Op) -> None:
    """A collective on a bundle of tensors: on their bucket's buffer, else on a buffer that they are copied into."""
    before, after, axis = op.inputs[0].type, op.outputs[0].type, op.attributes["axis"]
    if not isinstance(before, Tuple) or not isinstance(after, Tuple):
        raise ModelError(f"expected bundles, got {op}")
    members = [[x for x in t.types if isinstance(x, Tensor)] for t in (before, after)]
    if (bucket := buckets.bucket_of(b, op)) is not None:
        buckets.reduce(b, op, bucket)
        return
    start = by_member(_starter(b, op, *members), len(after.types))
    start = b.bind_along(f"bundle_{op.spec.name[3:].lower()}", axis, start)
    b.assign(op, f"{start}({b.use(op.inputs[0])})", pending=True)


def _gather_in_time(b: FunctionWriter, op: Op, t: Tensor) -> None:
    """An all-gather along the time axis: concatenates the microbatches in order."""
    p = t.local(TIME)
    if len(op.inputs) != t.mesh.size(TIME):
        b.varies = op.inputs[0].name
    join = b.bind("join_microbatches", lambda *xs: p.join(xs, TORCH))
    b.assign(op, f"{join}({', '.join([b.use(v) for v in op.inputs])})")


def _slice(b: FunctionWriter, op: Op) -> None:
    t = _tensor(op.outputs[0])
    a = t.mesh.position(op.attributes["axis"])
    p, n = t.local(a), t.mesh.sizes[a]
    index = b.microbatch(t.mesh, op.outputs[0]) if a == t.mesh.time else str(b.network.coordinate(t.mesh)[a])
    part = b.bind("piece", lambda x, k: p.cut(x, k, n))
    b.assign(op, f"{part}({b.use(op.inputs[0])}, {index})")


def _cut_halo(b: FunctionWriter, op: Op) -> None:
    p = _tensor(op.inputs[0]).on(op.attributes["axis"])
    if p.dim is None:
        raise ModelError(f"expected a halo, got {op}")
    dim, (lo, _), size = p.dim, p.widths, _tensor(op.outputs[0]).shape[p.dim]
    b.assign(op, f"{b.bind('slice', lambda x: x.narrow(dim, lo, size))}({b.use(op.inputs[0])})")


def _sleep(b: FunctionWriter, op: Op) -> None:
    """Waits for the operands and sleeps; the results are buffers that are made once, but where one is to be a part of a
    bucket's."""
    for v in op.inputs:
        b.use(v)
    sleep = sleeper(op.attributes["seconds"], bool(op.attributes.get("spin")), b.network.beside)
    b.lines.append(f"{b.bind('sleep', sleep)}()")
    for v in op.outputs:
        t = _tensor(v)
        name = b.place(v)
        if name is None:
            name = b.bind("buffer", torch.empty(t.shape, dtype=torch_dtype(t.dtype), device=b.context.xp.device))
        b.lines.append(f"{b.var(v)} = {name}")


def _term(b: FunctionWriter, op: Op) -> None:
    """The value itself on the first device of the axis, else zeros."""
    mesh = _tensor(op.outputs[0]).mesh
    x, index = b.use(op.inputs[0]), b.network.coordinate(mesh)[mesh.position(op.attributes["axis"])]
    b.assign(op, f"{b.bind('term', lambda x, k: x.clone() if k == 0 else torch.zeros_like(x))}({x}, {index})")


def _send(b: FunctionWriter, op: Op) -> None:
    source, to, whole = _tensor(op.inputs[0]), op.attributes["to"], None
    if isinstance(to, Mesh) and not isinstance(source.device, Mesh):
        whole = Tensor.whole(source.dtype, source.shape, to, op.attributes.get("placements"))
    stays = op.inputs[0] in b.function.inputs
    send = b.bind("send", sender(b.network, source, to, whole, op.attributes["message"], stays))
    b.lines.append(f"{send}({b.use(op.inputs[0])})")


def _receive(b: FunctionWriter, op: Op) -> None:
    attrs, got = op.attributes, _tensor(op.outputs[0])
    at = attrs["source"]
    placements = attrs.get("placements") if isinstance(at, Mesh) else None
    source = Tensor.whole(got.dtype, attrs["shape"], at, placements)
    b.assign(op, f"{b.bind('receive', receiver(b.network, source, got, attrs['message']))}()", pending=True)


def _scatter(b: FunctionWriter, op: Op) -> None:
    """A scatter on the device that has the whole, and that also gets a piece."""
    whole, t = _tensor(op.inputs[0]), _tensor(op.outputs[0])
    mine = b.network.coordinate(t.mesh)
    send = b.bind("send", sender(b.network, whole, t.mesh, t, op.attributes["message"]))
    b.lines.append(f"{send}({b.use(op.inputs[0])})")
    b.assign(op, f"{b.bind('piece', lambda x: t.cut(x, mine))}({b.use(op.inputs[0])})")


def _gather(b: FunctionWriter, op: Op) -> None:
    """A gather on the device that gets the whole, and that also has a piece."""
    source, got = _tensor(op.inputs[0]), _tensor(op.outputs[0])
    gather = b.bind("gather", receiver(b.network, source, got, op.attributes["message"]))
    b.assign(op, f"{gather}({b.use(op.inputs[0])})", pending=True)


@cached
def _last_of_batches(function: Function) -> frozenset[Op]:
    """The last transfer of each run of consecutive transfers, which are posted together as a batch."""
    ops = function.ops
    return frozenset(
        op
        for op, after in zip(ops, (*ops[1:], None), strict=True)
        if op.spec.route in _TRANSFERS and (after is None or after.spec.route not in _TRANSFERS)
    )


def _posted(rule: Callable[[FunctionWriter, Op], None]) -> Callable[[FunctionWriter, Op], None]:
    """Extend the rule of a transfer: after the last of a batch, post the batch."""

    def with_batch(b: FunctionWriter, op: Op) -> None:
        rule(b, op)
        if op in _last_of_batches(b.function):
            b.lines.append(f"{b.bind('post', b.network.transfers.post)}()")

    return with_batch


def _accumulate(b: FunctionWriter, op: Op) -> None:
    """In place if nothing else reads the running sum."""
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
    """A function that adds a bundle to a bundle of running sums; in place if `owned`."""
    kinds = ["max" if isinstance(u, Tensor) and _is_max(u) else "sum" for u in t.types]

    def accumulate(totals: Any, xs: Any) -> Any:
        rows = zip(totals, xs, kinds, strict=True)
        if not owned:
            return tuple([combine((a, x), kind) for a, x, kind in rows])
        return tuple([torch.maximum(a, x, out=a) if kind == "max" else a.add_(x) for a, x, kind in rows])

    return accumulate


def _is_max(t: Tensor) -> bool:
    return t.over_time.kind == "max"


_TRANSFERS: dict[Route | None, Callable[[FunctionWriter, Op], None]] = {
    "outgoing": _posted(_send),
    "incoming": _posted(_receive),
    "scatter": _posted(_scatter),
    "gather": _posted(_gather),
}
_HERE: dict[str, Callable[[FunctionWriter, Op], None]] = {
    "LocalSlice": _slice,
    "HaloCut": _cut_halo,
    "LocalTerm": _term,
    "Sleep": _sleep,
    "Accumulate": _accumulate,
    "Pack": buckets.pack,
    "Unpack": buckets.unpack,
}


def rule_of(spec: Spec) -> Callable[[FunctionWriter, Op], None] | None:
    """The rule of an op that communicates or is structural; None if a rank cannot run it."""
    return _along_axis if spec.route == "axis" else _TRANSFERS.get(spec.route) or _HERE.get(spec.name)
