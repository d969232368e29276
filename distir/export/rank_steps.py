"""The steps of each class of devices in a compiled program: what a device computes and sends, calls expanded.

A step has its seconds, by the cost model, the steps whose results it needs, and the one before it on its stream.
Devices of one class have equal steps; only their partners differ (`Partners`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distir.executor.simulator.compile import CompiledProgram
from distir.executor.simulator.maxplus import Call, Code, OpPart, OpPlan
from distir.ir.device import AxisNames, Device, Mesh
from distir.ir.errors import UsageError
from distir.ir.function import Function, Op, Value

Needs = tuple[int, ...]
"""The steps that a value needs. As in the simulator a bundle is there when all its members are."""
Home = Device | Mesh


class Along(NamedTuple):
    """Where a collective takes place: a mesh, and an axis of it, or several."""

    mesh: Mesh
    axis: AxisNames


class Across(NamedTuple):
    """The ends of a transfer, this device's and the partner's, and whether this device sends."""

    here: Home
    there: Home
    sends: bool


class RankStep(NamedTuple):
    """A step of a device. `needs` and `before` are positions in the class's list of steps; -1: nothing is before it on
    its stream. `where` is None if it computes. `message` numbers communication, the same for all that take part."""

    op: Op
    microbatch: int | None
    seconds: float
    stream: int
    needs: tuple[int, ...]
    before: int
    where: Along | Across | None
    message: int


def steps(program: CompiledProgram) -> list[list[RankStep]]:
    """The steps of each class, in program order. Raises UsageError for a program with a host that sends its inputs."""
    walk = _Walk(len(program.classes.sizes))
    main = program.main
    given: list[dict[Value, Needs]] = [
        {v: () for v in main.function.inputs if c in program.classes_of(v.type)} for c in range(walk.classes)
    ]
    walk.run(main, given, None)
    return walk.found


class _Walk:
    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.found: list[list[RankStep]] = [[] for _ in range(classes)]
        self._last: list[dict[int, int]] = [{} for _ in range(classes)]
        self._messages = 0

    def run(self, code: Code, env: list[dict[Value, Needs]], mb: int | None) -> None:
        """Add the steps of a function; `env` are, by class, the needs of its values."""
        for op, plan in zip(code.function.ops, code.plans, strict=True):
            if isinstance(plan, Call):
                self._call(op, plan, env)
            elif not plan.parts:
                self._pass_on(op, plan, env)
            else:
                for part in plan.parts:
                    if part.sources:  # else it is compute that is lost beside another part
                        self._part(op, part, env, mb)

    def _call(self, op: Op, plan: Call, env: list[dict[Value, Needs]]) -> None:
        body: Function = plan.body.function
        pairs = list(zip(body.inputs, op.inputs, strict=True))
        inner = [{v: here[x] for v, x in pairs if x in here} for here in env]
        self.run(plan.body, inner, op.attributes.get("mb"))
        for here, there in zip(env, inner, strict=True):
            here.update({v: there[w] for v, w in zip(op.outputs, body.outputs, strict=True) if w in there})

    def _part(self, op: Op, part: OpPart, env: list[dict[Value, Needs]], mb: int | None) -> None:
        """A step of each class that takes part."""
        if op.spec.route in ("scatter", "gather"):
            raise UsageError("a program with a host that sends its inputs is not exported", "leave the host out")
        message = self._messages
        self._messages += part.communicates
        for c, stream in zip(part.classes, part.lanes, strict=True):
            here, mine = env[c], self.found[c]
            needs = self._all(c, [here[v] for v in op.inputs if v in here])
            where = _where(op, c, part) if part.communicates or op.spec.route == "send" else None
            before = self._last[c].get(stream, -1)
            self._last[c][stream] = len(mine)
            mine.append(RankStep(op, mb, part.duration, stream, needs, before, where, message))
        for c in part.targets:
            env[c].update(dict.fromkeys(op.outputs, (len(self.found[c]) - 1,)))

    def _pass_on(self, op: Op, plan: OpPlan, env: list[dict[Value, Needs]]) -> None:
        """The results of an op that takes no time need what its operands do."""
        for c in dict.fromkeys([c for classes in plan.classes for c in classes]):
            here = env[c]
            needs = self._all(c, [here[v] for v in op.inputs if v in here])
            here.update(dict.fromkeys(op.outputs, needs))

    def _all(self, c: int, given: Sequence[Needs]) -> Needs:
        """The steps of several values, without those that come before another one on its stream."""
        if len(given) == 1:
            return given[0]
        mine, last = self.found[c], dict[int, int]()
        for needs in given:
            for j in needs:
                stream = mine[j].stream
                last[stream] = max(last.get(stream, -1), j)
        return tuple(sorted(last.values()))


def _where(op: Op, c: int, part: OpPart) -> Along | Across:
    here = op.inputs[0].type.device
    if op.spec.route == "send":
        there = op.outputs[0].type.device
        if here is None or there is None:
            raise UsageError(f"{op}: its ends are on no device")
        return Across(here, there, True) if c in part.sources else Across(there, here, False)
    if not isinstance(here, Mesh):
        raise UsageError(f"{op}: it is on no mesh")
    return Along(here, op.attributes["axis"])


class Partners:
    """The ranks of a program's devices, and with whom each communicates."""

    def __init__(self, program: CompiledProgram) -> None:
        pairs = sorted(program.classes.devices(), key=lambda pair: (pair[0].index, pair[0].kind))
        self.devices: list[tuple[Device, int]] = pairs
        """By rank the device, and its class."""
        self.rank = {d: i for i, (d, _) in enumerate(pairs)}
        self._place: dict[Mesh, dict[Device, int]] = {}

    def _at(self, mesh: Mesh, device: Device) -> int:
        if mesh not in self._place:
            self._place[mesh] = {d: i for i, d in enumerate(mesh.devices)}
        return self._place[mesh][device]

    def group(self, where: Along, device: Device) -> tuple[int, ...]:
        """The ranks of a device's group, in the order of the axis."""
        return tuple([self.rank[d] for d in where.mesh.group(where.axis, self._at(where.mesh, device))])

    def partner(self, where: Across, device: Device) -> int:
        """The rank at the other end of a transfer."""
        if isinstance(where.here, Mesh) and isinstance(where.there, Mesh):
            return self.rank[where.there.devices[self._at(where.here, device)]]
        if isinstance(where.there, Mesh):
            raise UsageError("a transfer is from device to device, or from mesh to mesh")
        return self.rank[where.there]
