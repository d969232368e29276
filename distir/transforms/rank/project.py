"""Projects a distributed program to one rank: keeps the ops that the rank's device takes part in.

All devices that are in the same meshes share one projected Function; only their coordinates differ. So projecting to
every rank of a large plan costs no more than to one rank per pipeline stage.

Inputs that another stage needs too (a tied weight) are sent first: no stage has to wait for them until another has run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from distir.ir.cached import cached
from distir.ir.communication import TRANSFERS
from distir.ir.device import Device, Mesh
from distir.ir.errors import ModelError, UsageError
from distir.ir.function import Attributes, Function, FunctionMaker, Op, Value
from distir.ir.spec import lookup
from distir.ir.type import Tensor, Tuple, Type
from distir.transforms.append import append

_RESTRICT = lookup("Restrict")

Home = Device | Mesh
"""The device or mesh that a value is on."""


class RankProgram(NamedTuple):
    """The program of one rank. `function` is shared by all ranks in the same meshes.

    `inputs` and `outputs` are the positions of the function's inputs and outputs among the distributed program's.
    """

    rank: int
    device: Device | None
    function: Function
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def ranks(function: Function) -> list[Device]:
    """The devices of a distributed program, by index: rank r runs on the r-th. Empty for a program without devices."""
    found = {d for home in _homes(function) for d in _devices(home)}
    return sorted(found, key=lambda d: (d.index, d.kind))


def project(function: Function, rank: int) -> RankProgram:
    """The program of one rank.

    Raises UsageError if there is no such rank, ModelError for an op with only some of its values on the rank's device.
    """
    devices: Sequence[Device | None] = ranks(function) or [None]
    if not 0 <= rank < len(devices):
        raise UsageError(
            f"{function.name} runs on {len(devices)} rank{'s' if len(devices) > 1 else ''}, there is no rank {rank}"
        )
    function = inputs_first(function)
    device = devices[rank]
    mine = frozenset(h for h in _homes(function) if device in _devices(h))
    return RankProgram(rank, device, *_restricted(function, mine, range(len(function.ops))))


def project_all(function: Function) -> list[RankProgram]:
    """The programs of all ranks, in order; ranks in the same meshes share one Function."""
    devices: Sequence[Device | None] = ranks(function) or [None]
    function = inputs_first(function)
    mine: dict[Device | None, list[Home]] = {d: [] for d in devices}
    for home in _homes(function):
        for d in _devices(home):
            mine[d].append(home)
    touching = _touching(function)
    shared: dict[frozenset[Home], tuple[Function, tuple[int, ...], tuple[int, ...]]] = {}
    programs: list[RankProgram] = []
    for rank, device in enumerate(devices):
        key = frozenset(mine[device])
        if key not in shared:
            shared[key] = _restricted(
                function, key, sorted({n for home in (None, *key) for n in touching.get(home, ())})
            )
        programs.append(RankProgram(rank, device, *shared[key]))
    return programs


def _devices(home: Home) -> tuple[Device, ...]:
    return home.devices if isinstance(home, Mesh) else (home,)


def homes_of(t: Type) -> Iterator[Home]:
    """The devices and meshes of a type: none, one, or, of a bundle, those of its members."""
    if isinstance(t, Tuple):
        for member in t.distinct:
            yield from homes_of(member)
    elif t.device is not None:
        yield t.device


def _homes(function: Function) -> dict[Home, None]:
    values = (*function.inputs, *(v for op in function.ops for v in op.outputs))
    return {home: None for t in dict.fromkeys(v.type for v in values) for home in homes_of(t)}


@cached
def inputs_first(function: Function) -> Function:
    """The program with the sends of its inputs, and of restrictions of them, moved to the beginning."""
    there = set(function.inputs)
    first: dict[Op, None] = {}
    for op in function.ops:
        if (op.spec.route == "send" or op.spec is _RESTRICT) and op.inputs[0] in there:
            first[op] = None
            if op.spec is _RESTRICT:
                there.update(op.outputs)
    return reordered(function, [*first, *[op for op in function.ops if op not in first]])


def reordered(function: Function, ops: Sequence[Op]) -> Function:
    """The function with its ops in another order."""
    if list(function.ops) == list(ops):
        return function
    return Function(function.name, function.inputs, tuple(ops), function.outputs, function.updates, function.sources)


def _touching(function: Function) -> dict[Home | None, list[int]]:
    """For each home the numbers of the ops with a value there; under None, of the ops with a value on no device."""
    found: dict[Home | None, list[int]] = {}
    known: dict[Type, tuple[Home | None, ...]] = {}
    for n, op in enumerate(function.ops):
        homes: dict[Home | None, None] = {}
        for v in (*op.inputs, *op.outputs):
            if v.type not in known:
                known[v.type] = tuple(homes_of(v.type)) or (None,)
            homes.update(dict.fromkeys(known[v.type]))
        for home in homes or (None,):
            found.setdefault(home, []).append(n)
    return found


def _restricted(
    function: Function, mine: frozenset[Home], touching: Iterable[int]
) -> tuple[Function, tuple[int, ...], tuple[int, ...]]:
    """The function restricted to the homes `mine`, and the positions of its inputs and of its outputs.

    `touching` are the numbers of the ops to consider.
    """
    f = FunctionMaker(function.name)
    holds = _Holds(mine)
    env: dict[Value, Value] = {}
    inputs = [k for k, v in enumerate(function.inputs) if holds(v)]
    for k in inputs:
        v = function.inputs[k]
        env[v] = f.add_input_value(v.name, v.type, v.role)
    for message in touching:
        op = function.ops[message]
        if op.spec.route in TRANSFERS:
            _transfer(f, op, message, env, holds)
        elif all(map(holds, op.inputs)) and all(map(holds, op.outputs)):
            _keep(f, op, env, op.attributes)
        elif op.spec is not _RESTRICT and any(map(holds, (*op.inputs, *op.outputs))):
            raise ModelError(f"{function.name}: {op}: its operands and results are on different devices")
    outputs = [k for k, v in enumerate(function.outputs) if v in env]
    f.set_outputs(env[function.outputs[k]] for k in outputs)
    f.updates = {env[new]: env[old] for new, old in function.updates.items() if new in env and old in env}
    f.sources = {env[v]: shape for v, shape in function.sources.items() if v in env}
    return f.finalize(), tuple(inputs), tuple(outputs)


class _Holds:
    """Whether a rank that is in the homes `mine` holds a value or its piece of it; all hold values without a device."""

    def __init__(self, mine: frozenset[Home]) -> None:
        self.mine = mine
        self.known: dict[Type, bool] = {}

    def __call__(self, v: Value) -> bool:
        known = self.known.get(v.type)
        if known is None:
            known = self.known[v.type] = all(h in self.mine for h in homes_of(v.type))
        return known


def _keep(f: FunctionMaker, op: Op, env: dict[Value, Value], attributes: Attributes) -> None:
    operands, names, types = [env[v] for v in op.inputs], [v.name for v in op.outputs], [v.type for v in op.outputs]
    env.update(zip(op.outputs, append(f, op.spec, tuple(operands), attributes, names, types), strict=True))


def _transfer(f: FunctionMaker, op: Op, message: int, env: dict[Value, Value], holds: _Holds) -> None:
    """Append the transfer if the rank is on both sides, else the side that it is on."""
    (x,), (y,) = op.inputs, op.outputs
    if holds(x) and holds(y):
        _keep(f, op, env, Attributes({**op.attributes, "message": message}))
    elif holds(x):
        _send(f, env[x], op.attributes, message)
    elif holds(y):
        env[y] = _receive(f, y.name, x.type, y.type, message)


def _send(f: FunctionMaker, x: Value, attributes: Mapping[str, Any], message: int) -> None:
    if isinstance(x.type, Tuple):
        for member in _unpacked(f, x):
            _send(f, member, attributes, message)
        return
    to = attributes["to"]
    extra = {"placements": attributes["placements"]} if "placements" in attributes else {}
    f.add_op("MPISend", None, [x], {"to": to, **extra, "message": message})


def _unpacked(f: FunctionMaker, x: Value) -> Iterable[Value]:
    members = f.emit("Unpack", x)
    return members if isinstance(members, tuple) else () if members is None else (members,)


def _receive(f: FunctionMaker, name: str, sent: Type, got: Type, message: int) -> Value:
    if isinstance(sent, Tuple) and isinstance(got, Tuple):
        pairs = zip(sent.types, got.types, strict=True)
        members = [_receive(f, f"{name}.{k}", a, b, message) for k, (a, b) in enumerate(pairs)]
        return f.add_op("Pack", name, members)
    if not isinstance(sent, Tensor) or not isinstance(got, Tensor):
        raise ModelError(f"%{name}: cannot receive {got} of {sent}")
    at = got if isinstance(got.device, Mesh) else sent
    extra: dict[str, Any] = {"placements": at.placements} if isinstance(at.device, Mesh) else {}
    if got.piece is not None:
        extra["piece"] = got.piece
    attributes = {
        "source": sent.device,
        "to": got.device,
        "dtype": got.dtype,
        "shape": got.global_shape,
        **extra,
    }
    return f.add_op("MPIRecv", name, (), {**attributes, "message": message})


def coordinate(mesh: Mesh, device: Device) -> tuple[int, ...]:
    """The index of `device` along each axis of the mesh, 0 along the time axis. Raises ModelError if it is not in the
    mesh."""
    if device not in mesh.devices:
        raise ModelError(f"{device} is not in {mesh}")
    place = mesh.devices.index(device)
    coord: list[int] = []
    for i, n in reversed(list(enumerate(mesh.sizes))):
        coord.append(0 if i == mesh.time else place % n)
        place //= 1 if i == mesh.time else n
    return tuple(reversed(coord))


def device_at(mesh: Mesh, coord: Sequence[int]) -> Device:
    """The inverse of `coordinate`."""
    sizes = [1 if i == mesh.time else n for i, n in enumerate(mesh.sizes)]
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return mesh.devices[sum(c * s for c, s in zip(coord, strides, strict=True) if s)]
