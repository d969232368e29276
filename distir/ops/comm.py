"""Transfers between devices and meshes, and structural ops: accumulation, bundles, calls.

Collectives within one mesh are in `collectives`, the two sides of a transfer in rank programs in `point_to_point`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from distir.ir.communication import Communication, Lanes, RuntimeValue, Wire
from distir.ir.device import Device, Mesh
from distir.ir.errors import IRTypeError
from distir.ir.function import Op
from distir.ir.placement import MEAN, REPLICATE, Placement, reductions
from distir.ir.spec import Attrs, op
from distir.ir.type import NOW, Tensor, Tuple, Type
from distir.ops.rules import tensor


def _same(lanes: Lanes, op: Op, ins: Sequence[RuntimeValue]) -> Sequence[RuntimeValue]:
    """The first operand, unchanged."""
    return ins[:1]


# --- between a device and a mesh


def _to_mesh(attrs: Attrs, t: Type, broadcast: bool) -> list[Type]:
    to, placements = attrs["to"], attrs.get("placements", ())
    if not isinstance(to, Mesh):
        raise IRTypeError(f"attribute to: expected a mesh, got {to}")
    if not isinstance(t, Tensor) or isinstance(t.device, Mesh) or t.device is None:
        raise IRTypeError(f"operand 0: expected a tensor on one device, got {t}")
    if broadcast:
        placements = (REPLICATE,) * len(to.axes)
    if reductions(placements):
        raise IRTypeError(f"attribute placements: expected Shard or Replicate, got {placements}")
    return [Tensor.whole(t.dtype, t.shape, to, placements)]


def _to_device(attrs: Attrs, t: Type, reduce: bool) -> list[Type]:
    to = attrs["to"]
    if not isinstance(to, Device):
        raise IRTypeError(f"attribute to: expected a device, got {to}")
    if not isinstance(t, Tensor) or not isinstance(t.device, Mesh):
        raise IRTypeError(f"operand 0: expected a tensor on a mesh, got {t}")
    if t.moves:
        raise IRTypeError(f"operand 0: expected it whole in time, got {t}")
    if reduce != bool(reductions(t.placements)):
        raise IRTypeError(f"operand 0: expected {'a' if reduce else 'no'} Partial, got {t}")
    return [Tensor(t.dtype, t.global_shape, to)]


def _cut(lanes: Lanes, op: Op, ins: Sequence[RuntimeValue]) -> Sequence[RuntimeValue]:
    t = tensor(op.outputs[0])
    return [[t.cut(ins[0], coord) for coord in lanes.of(t.mesh)]]


def _joined(lanes: Lanes, op: Op, ins: Sequence[RuntimeValue]) -> Sequence[RuntimeValue]:
    return [lanes.whole(op.inputs[0].type, ins[0])]


_SERIAL, _CHAIN = Wire(("serial",)), Wire(("chain",))
op(
    "MPIScatter",
    attributes="to:home placements:placements? message:size?",
    comm=Communication(lambda attrs, t: _to_mesh(attrs, t, False), _cut, "scatter", wire=_SERIAL),
)
op(
    "MPIBroadcast",
    attributes="to:home placements:placements? message:size?",
    comm=Communication(lambda attrs, t: _to_mesh(attrs, t, True), _cut, "scatter", wire=_CHAIN),
)
op(
    "MPIGather",
    attributes="to:home message:size?",
    comm=Communication(lambda attrs, t: _to_device(attrs, t, False), _joined, "gather", wire=_SERIAL),
)
op(
    "MPIReduce",
    attributes="to:home message:size?",
    comm=Communication(lambda attrs, t: _to_device(attrs, t, True), _joined, "gather", wire=_CHAIN),
)


# --- from a device to a device, or from a mesh to a mesh


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
    """Raises IRTypeError unless each device of `part` has the same coordinates in `whole` along the axes of `part`."""
    if [a for a in whole.axes if a in part.axes] != list(part.axes):
        raise IRTypeError(f"{part} is not part of {whole}")
    where = dict(zip(whole.devices, whole.coords, strict=True))
    positions = [whole.position(a) for a in part.axes]
    for d, coord in zip(part.devices, part.coords, strict=True):
        here = where.get(d)
        if here is None or tuple([here[i] for i in positions]) != coord:
            raise IRTypeError(f"operand 0: {d} holds another piece in {whole} than in {part}")


@lru_cache(maxsize=1024)
def _apart(a: Mesh, b: Mesh) -> bool:
    return set(a.devices).isdisjoint(b.devices)


def _restrict(attrs: Attrs, t: Type) -> list[Type]:
    """The part on a smaller mesh of a value on a larger mesh, which must be replicated along the removed axes."""
    to = attrs["to"]
    if not isinstance(t, Tensor) or not isinstance(to, Mesh):
        raise IRTypeError(f"expected a tensor and a mesh, got {t} and {to}")
    placements: list[Placement] = []
    for axis, p in zip(t.mesh.axes, t.placements, strict=True):
        if axis in to.axes:
            placements.append(p)
        elif p is not REPLICATE:
            raise IRTypeError(f"operand 0: expected Replicate along {axis!r}, got {t}")
    _check_part(t.mesh, to)
    return [Tensor(t.dtype, t.shape, to, placements, t.piece)]


def _restricted(lanes: Lanes, op: Op, ins: Sequence[RuntimeValue]) -> Sequence[RuntimeValue]:
    """Each device of the part keeps its piece; lanes of other devices are dropped."""
    whole, part = tensor(op.inputs[0]).mesh, tensor(op.outputs[0]).mesh
    number = {d: k for k, d in enumerate(whole.devices)}
    return [[ins[0][number[d]] for d in part.devices]]


op("Send", attributes="to:home message:size?", comm=Communication(_send, _same, "send", memberwise=True))
op("Restrict", attributes="to:home", comm=Communication(_restrict, _restricted, unchanged=True), alias=True)


# --- structure


def _accumulate(attrs: Attrs, total: Type, x: Type) -> list[Type]:
    """The type of a running sum over microbatches with the next microbatch added."""
    if isinstance(total, Tuple) and isinstance(x, Tuple):
        if len(total.types) != len(x.types):
            raise IRTypeError(f"expected bundles of one length, got {len(total.types)} and {len(x.types)}")
        return [Tuple(_accumulate(attrs, a, b)[0] for a, b in zip(total.types, x.types, strict=True))]
    if not isinstance(total, Tensor) or not isinstance(x, Tensor) or total.mesh.time is None:
        raise IRTypeError(f"expected tensors on a mesh with a time axis, got {total} and {x}")
    axis = total.mesh.axes[total.mesh.time]
    if total.on(axis).kind is None:
        raise IRTypeError(f"operand 0: expected Partial along {axis!r}, got {total.on(axis)} in {total}")
    if total.on(axis) is MEAN:
        raise IRTypeError("operand 0: means over microbatches are not accumulated: accumulate sums, and divide")
    end = (NOW if x.piece is None else x.piece[0]) if total.piece and total.piece[0] == 0 else -1
    now = x.piece or (NOW, NOW + 1)
    if total.piece != (0, end) or now[1] != now[0] + 1:
        raise IRTypeError(f"expected sums over microbatches (0, k) and (k, k + 1), got {total.piece} and {x.piece}")
    if x.placed(axis, x.on(axis), total.piece) is not total:
        raise IRTypeError(f"operand 1: expected it placed as operand 0, {total}, got {x}")
    return [total.placed(axis, total.on(axis), (0, end + 1))]


def _added(lanes: Lanes, op: Op, ins: Sequence[RuntimeValue]) -> Sequence[RuntimeValue]:
    return [_joined_leaves(lanes, op.inputs[0].type, *ins)]


def _joined_leaves(lanes: Lanes, t: Type, total: RuntimeValue, x: RuntimeValue) -> RuntimeValue:
    if isinstance(t, Tuple):
        return tuple([_joined_leaves(lanes, u, a, b) for u, a, b in zip(t.types, total, x, strict=True)])
    p = t.placements[t.mesh.time or 0]
    return [p.join(pair, lanes.xp) for pair in zip(total, x, strict=True)]


op("Accumulate", comm=Communication(_accumulate, _added, memberwise=True), donates=(0,))


def _unpack(attrs: Attrs, t: Type) -> list[Type]:
    if not isinstance(t, Tuple):
        raise IRTypeError(f"operand 0: expected a bundle, got {t}")
    return list(t.types)


op(
    "Pack",
    comm=Communication(lambda attrs, *types: [Tuple(types)], lambda lanes, op, ins: [tuple(ins)]),
    bundle="pack",
    alias=True,
)
op("Unpack", comm=Communication(_unpack, lambda lanes, op, ins: list(ins[0])), bundle="unpack", alias=True)


def _after(attrs: Attrs, t: Type, other: Type) -> list[Type]:
    if t.device is not other.device:
        raise IRTypeError(f"expected values of one mesh or device, got {t} and {other}")
    return [t]


op("After", comm=Communication(_after, _same, unchanged=True, awaits=(1,)), alias=True)
"""A control dependence: the first operand, available only when the second is."""


def _call(attrs: Attrs, *types: Type) -> list[Any]:
    """A callee is typed with the symbolic current microbatch NOW; `mb` of the call is its number (None: nothing in the
    callee depends on it).
    """
    callee, microbatch = attrs["callee"], attrs.get("mb")
    if len(types) != len(callee.inputs):
        raise IRTypeError(f"{callee.name} takes {len(callee.inputs)} operands, got {len(types)}")
    for k, (v, t) in enumerate(zip(callee.inputs, types, strict=True)):
        want = v.type if microbatch is None else v.type.at(microbatch)
        if t is not want:
            raise IRTypeError(f"{callee.name}: operand {k} (%{v.name}): expected {want}, got {t}")
    return [v.type if microbatch is None else v.type.at(microbatch) for v in callee.outputs]


op(
    "Call",
    attributes="callee:function mb:size/none?",
    comm=Communication(_call),
    outputs=lambda attrs: len(attrs["callee"].outputs),
)
