"""Communication and structure: the only ops that change where a value is, or its placement.

Each is typed by `comm`; their meaning on arrays is in `executor.collectives`. A sum, gather or scatter along an axis
also takes a bundle of tensors of one mesh and dtype, and is done on all of them at once: `dim` and `outer` are then
tuples, with an entry for each member.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from distir.ir.device import Device, Mesh
from distir.ir.errors import IRTypeError
from distir.ir.spec import Attrs, op
from distir.ir.type import MEAN, NOW, REPLICATE, Partial, Placement, Replicate, Shard, Tensor, Tuple, Type

ALONG_AXIS = frozenset(("MPIAllreduce", "MPIAllgather", "MPIReduceScatter", "MPIAlltoall"))
"""The ops in which the devices along a mesh axis meet; along the time axis they move nothing."""


Rule = Callable[[Attrs, Type], Tensor]


def member_attributes(attrs: Attrs, k: int) -> Attrs:
    """The attributes with which a collective on a bundle is done on its member number k."""
    return {name: x[k] if isinstance(x, tuple) else x for name, x in attrs.items()}


def _bundled(rule: Rule) -> Callable[[Attrs, Type], list[Type]]:
    """The rule for a tensor, and for a bundle, of which it holds member by member."""

    def typed(attrs: Attrs, t: Type) -> list[Type]:
        if not isinstance(t, Tuple):
            return [rule(attrs, t)]
        _check_bundle(attrs, t)
        return [Tuple([rule(member_attributes(attrs, k), x) for k, x in enumerate(t.types)])]

    return typed


def _check_bundle(attrs: Attrs, t: Tuple) -> None:
    """Raises IRTypeError unless the members can be moved as one."""
    if not t.types:
        raise IRTypeError("operand 0: expected a bundle that is not empty")
    first = t.types[0]
    for x in t.types:
        if not isinstance(x, Tensor) or not isinstance(first, Tensor):
            raise IRTypeError(f"operand 0: expected a bundle of tensors, got {t}")
        if _timed(x, attrs["axis"]):
            raise IRTypeError(f"operand 0: microbatches are not summed or gathered in bundles, got {x}")
        alike = x.dtype is first.dtype and x.device is first.device and x.piece == first.piece
        kinds = [p.kind if isinstance(p, Partial) else "" for p in (x.on(attrs["axis"]), first.on(attrs["axis"]))]
        if not alike or kinds[0] != kinds[1]:
            raise IRTypeError(f"operand 0: expected members of one dtype, mesh and reduction, got {first} and {x}")
    for name, x in attrs.items():
        if isinstance(x, tuple) and len(x) != len(t.types):
            raise IRTypeError(f"attribute {name}: expected {len(t.types)} entries, got {len(x)}")


def _expect(t: Type, axis: str, kind: type[Placement]) -> Tensor:
    if not isinstance(t, Tensor):
        raise IRTypeError(f"operand 0: expected a tensor, got {t}")
    if not isinstance(t.on(axis), kind):
        raise IRTypeError(f"operand 0: expected {kind.__name__} along {axis!r}, got {t.on(axis)} in {t}")
    return t


def _split(attrs: Attrs) -> Shard:
    return Shard(attrs["dim"], attrs.get("outer", 1))


def _timed(t: Tensor, axis: str) -> bool:
    return t.mesh.time == t.mesh.position(axis)


def _allreduce(attrs: Attrs, t: Type) -> Tensor:
    t = _expect(t, attrs["axis"], Partial)
    if _timed(t, attrs["axis"]) and t.piece is not None and t.piece != (0, t.mesh.size(attrs["axis"])):
        whole = (0, t.mesh.size(attrs["axis"]))
        raise IRTypeError(f"operand 0: expected a sum over all microbatches {whole}, got {t.piece}")
    return t.placed(attrs["axis"], REPLICATE, None if _timed(t, attrs["axis"]) else t.piece)


def _allgather(attrs: Attrs, *types: Type) -> list[Type]:
    """Along the time axis of a scheduled program the operands are the microbatches, in order."""
    axis = attrs["axis"]
    if len(types) == 1 and isinstance(types[0], Tuple):
        return _gathered_bundle(attrs, types[0])
    first = _expect(types[0], axis, Shard)
    timed = _timed(first, axis)
    if len(types) > 1 or (timed and first.piece is not None):
        want = [first.placed(axis, first.on(axis), (k, k + 1)) for k in range(first.mesh.size(axis))]
        if not timed or list(types) != want:
            raise IRTypeError(f"expected the {len(want)} microbatches in order, got {', '.join(map(repr, types))}")
    return [first.placed(axis, REPLICATE, None if timed else first.piece)]


def _gather_member(attrs: Attrs, t: Type) -> Tensor:
    t = _expect(t, attrs["axis"], Shard)
    return t.placed(attrs["axis"], REPLICATE, t.piece)


_gathered_bundle = _bundled(_gather_member)


def _reducescatter(attrs: Attrs, t: Type) -> Tensor:
    t = _expect(t, attrs["axis"], Partial)
    if _timed(t, attrs["axis"]):
        raise IRTypeError("a sum over microbatches cannot be scattered over them")
    return t.placed(attrs["axis"], _split(attrs), t.piece)


def _alltoall(attrs: Attrs, t: Type) -> list[Type]:
    t = _expect(t, attrs["axis"], Shard)
    if _timed(t, attrs["axis"]) or t.on(attrs["axis"]).dim == attrs["dim"]:  # type: ignore[union-attr]
        raise IRTypeError(f"operand 0: expected a split of another dim than {attrs['dim']} over devices, got {t}")
    return [t.placed(attrs["axis"], _split(attrs), t.piece)]


def _slice(attrs: Attrs, t: Type) -> list[Type]:
    t = _expect(t, attrs["axis"], Replicate)
    return [t.placed(attrs["axis"], _split(attrs), t.piece)]


op("MPIAllreduce", attributes="axis:text", comm=_bundled(_allreduce))
op("MPIAllgather", attributes="axis:text", comm=_allgather)
op("MPIReduceScatter", attributes="axis:text dim:split outer:split?", comm=_bundled(_reducescatter))
op("MPIAlltoall", attributes="axis:text dim:split outer:split?", comm=_alltoall)
op("LocalSlice", attributes="axis:text dim:split outer:split?", comm=_slice, alias=True)


def _to_mesh(attrs: Attrs, t: Type, broadcast: bool) -> list[Type]:
    to, placements = attrs["to"], attrs.get("placements", ())
    if not isinstance(to, Mesh):
        raise IRTypeError(f"attribute to: expected a mesh, got {to}")
    if not isinstance(t, Tensor) or isinstance(t.device, Mesh) or t.device is None:
        raise IRTypeError(f"operand 0: expected a tensor on one device, got {t}")
    if broadcast:
        placements = (REPLICATE,) * len(to.axes)
    if any(isinstance(p, Partial) for p in placements):
        raise IRTypeError(f"attribute placements: expected Shard or Replicate, got {placements}")
    return [Tensor.whole(t.dtype, t.shape, to, placements)]


def _to_device(attrs: Attrs, t: Type, reduce: bool) -> list[Type]:
    to = attrs["to"]
    if not isinstance(to, Device):
        raise IRTypeError(f"attribute to: expected a device, got {to}")
    if not isinstance(t, Tensor) or not isinstance(t.device, Mesh):
        raise IRTypeError(f"operand 0: expected a tensor on a mesh, got {t}")
    time = t.device.time
    if time is not None and not isinstance(t.placements[time], Replicate):
        raise IRTypeError(f"operand 0: expected it whole in time, got {t}")
    if reduce != any(isinstance(p, Partial) for p in t.placements):
        raise IRTypeError(f"operand 0: expected {'a' if reduce else 'no'} Partial, got {t}")
    return [Tensor(t.dtype, t.global_shape, to)]


op(
    "MPIScatter",
    attributes="to:home placements:placements? message:size?",
    comm=lambda attrs, t: _to_mesh(attrs, t, False),
)
op(
    "MPIBroadcast",
    attributes="to:home placements:placements? message:size?",
    comm=lambda attrs, t: _to_mesh(attrs, t, True),
)
op("MPIGather", attributes="to:home message:size?", comm=lambda attrs, t: _to_device(attrs, t, False))
op("MPIReduce", attributes="to:home message:size?", comm=lambda attrs, t: _to_device(attrs, t, True))


def _send(attrs: Attrs, t: Type) -> list[Type]:
    to, at = attrs["to"], t.device
    if isinstance(at, Mesh) and isinstance(to, Mesh):
        if (at.axes, at.sizes) != (to.axes, to.sizes) or not _apart(at, to):
            raise IRTypeError(f"operand 0: expected a mesh of the form of {to} apart from it, got {t}")
    elif at is None or to is at or isinstance(at, Mesh) != isinstance(to, Mesh):
        raise IRTypeError(f"operand 0: cannot be sent from {at} to {to}")
    return [t.moved(to)]


@lru_cache(maxsize=1024)
def _check_part(whole: Mesh, part: Mesh) -> None:
    """Raises IRTypeError unless each device of `part` stands in `whole` at the same index along the axes of `part`."""
    if [a for a in whole.axes if a in part.axes] != list(part.axes):
        raise IRTypeError(f"{part} is not part of {whole}")
    where = dict(zip(whole.devices, whole.coords, strict=True))
    kept = [whole.position(a) for a in part.axes]
    for d, coord in zip(part.devices, part.coords, strict=True):
        here = where.get(d)
        if here is None or tuple([here[i] for i in kept]) != coord:
            raise IRTypeError(f"operand 0: {d} holds another piece in {whole} than in {part}")


@lru_cache(maxsize=1024)
def _apart(a: Mesh, b: Mesh) -> bool:
    return set(a.devices).isdisjoint(b.devices)


def _restrict(attrs: Attrs, t: Type) -> list[Type]:
    """The part, on a stage's mesh, of a value that a larger mesh holds; replicated along the axes that go."""
    to = attrs["to"]
    if not isinstance(t, Tensor) or not isinstance(to, Mesh):
        raise IRTypeError(f"expected a tensor and a mesh, got {t} and {to}")
    kept: list[Placement] = []
    for axis, p in zip(t.mesh.axes, t.placements, strict=True):
        if axis in to.axes:
            kept.append(p)
        elif not isinstance(p, Replicate):
            raise IRTypeError(f"operand 0: expected Replicate along {axis!r}, got {t}")
    _check_part(t.mesh, to)
    return [Tensor(t.dtype, t.shape, to, kept, t.piece)]


op("Send", attributes="to:home message:size?", comm=_send)
op("Restrict", attributes="to:home", comm=_restrict, alias=True)


def _accumulate(attrs: Attrs, total: Type, x: Type) -> list[Type]:
    """A running sum over microbatches, and the next one."""
    if isinstance(total, Tuple) and isinstance(x, Tuple):
        if len(total.types) != len(x.types):
            raise IRTypeError(f"expected bundles of one length, got {len(total.types)} and {len(x.types)}")
        return [Tuple(_accumulate(attrs, a, b)[0] for a, b in zip(total.types, x.types, strict=True))]
    if not isinstance(total, Tensor) or not isinstance(x, Tensor) or total.mesh.time is None:
        raise IRTypeError(f"expected tensors on a mesh with a time axis, got {total} and {x}")
    axis = total.mesh.axes[total.mesh.time]
    if _expect(total, axis, Partial).on(axis) is MEAN:
        raise IRTypeError("operand 0: means over microbatches are not accumulated: accumulate sums, and divide")
    end = (NOW if x.piece is None else x.piece[0]) if total.piece and total.piece[0] == 0 else -1
    now = x.piece or (NOW, NOW + 1)
    if total.piece != (0, end) or now[1] != now[0] + 1:
        raise IRTypeError(f"expected sums over microbatches (0, k) and (k, k + 1), got {total.piece} and {x.piece}")
    if x.placed(axis, x.on(axis), total.piece) is not total:
        raise IRTypeError(f"operand 1: expected it placed as operand 0, {total}, got {x}")
    return [total.placed(axis, total.on(axis), (0, end + 1))]


op("Accumulate", comm=_accumulate, donates=(0,))


def _unpack(attrs: Attrs, t: Type) -> list[Type]:
    if not isinstance(t, Tuple):
        raise IRTypeError(f"operand 0: expected a bundle, got {t}")
    return list(t.types)


op("Pack", comm=lambda attrs, *types: [Tuple(types)], bundle="pack", alias=True)
op("Unpack", comm=_unpack, bundle="unpack", alias=True)


def _after(attrs: Attrs, t: Type, other: Type) -> list[Type]:
    if t.device is not other.device:
        raise IRTypeError(f"expected values of one mesh or device, got {t} and {other}")
    return [t]


op("After", comm=_after, alias=True)
"""The first operand, as soon as the second is there: so what is done with it does not begin earlier."""


def _call(attrs: Attrs, *types: Type) -> list[Any]:
    """A callee is typed at the moment NOW; the call says which microbatch that is (none: nothing in it varies)."""
    callee, moment = attrs["callee"], attrs.get("mb")
    if len(types) != len(callee.inputs):
        raise IRTypeError(f"{callee.name} takes {len(callee.inputs)} operands, got {len(types)}")
    for k, (v, t) in enumerate(zip(callee.inputs, types, strict=True)):
        want = v.type if moment is None else v.type.at(moment)
        if t is not want:
            raise IRTypeError(f"{callee.name}: operand {k} (%{v.name}): expected {want}, got {t}")
    return [v.type if moment is None else v.type.at(moment) for v in callee.outputs]


op("Call", attributes="callee:function mb:size/none?", comm=_call, outputs=lambda attrs: len(attrs["callee"].outputs))
