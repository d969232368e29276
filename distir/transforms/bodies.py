"""Cutting a placed program into bodies: one function for each stage and phase, typed on the stage's mesh.

Values that do not vary in time come to a body as one bundle, what its forward pass saved as another, running sums over
microbatches as a third; activations and their gradients come one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from distir.ir.device import TIME, Mesh
from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.type import NOW, Partial, Tensor, Tuple, Type
from distir.ops.rules import tensor
from distir.transforms.phases import BACKWARD, FORWARD, FREE, PROLOGUE, UPDATE, ends_time, phases, varies

NAMES = {PROLOGUE: "prologue", FORWARD: "fwd", BACKWARD: "bwd", UPDATE: "update"}


class Key(NamedTuple):
    """A body: prologue and update are cut again (`round`) where values cross stages."""

    phase: str
    stage: int
    round: int = 0


class Total(NamedTuple):
    """A sum over microbatches: `part` is added up by the body that makes it; after the last one the collectives
    `reduce` run; `whole` is then the result."""

    part: Value
    reduce: tuple[Op, ...]
    whole: Value


class Group:
    """The ops of one body, and what goes in and out.

    `static`: values from outside that do not vary in time; `saved`: values that the same stage's forward pass made;
    `received`: values of other stages; `totals`: sums over microbatches that this body adds up; `summed`: totals that
    it takes; `keeps` and `sends`: what it makes for the same stage's backward pass, and for others.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self.ops: list[Op] = []
        self.static: list[Value] = []
        self.saved: list[Value] = []
        self.received: list[Value] = []
        self.totals: list[Total] = []
        self.summed: list[Total] = []
        self.keeps: list[Value] = []
        self.sends: list[Value] = []


class Cut(NamedTuple):
    """A program cut into bodies. `joins` are ops that join microbatches; `free` maps values to costless producers."""

    function: Function
    groups: dict[Key, Group]
    owner: dict[Value, Key]
    joins: list[Op]
    free: dict[Value, Op]


def cut_bodies(function: Function, stage: Mapping[Op, int], overlap: bool = True, turn: str = BACKWARD) -> Cut:
    """Group the ops by stage and phase and find what passes between the groups.

    Collectives that follow a sum over time belong to the last microbatch's backward pass, so that they `overlap` with
    it, or else to the update. For `turn` see `phases`.
    """
    phase = phases(function, turn)
    producer = function.producers()
    free = {v: op for op in function.ops if phase[op] == FREE for v in op.outputs}
    joins = [op for op in function.ops if ends_time(op) and not _sums(op)]
    totals = _totals(function, stage if overlap else {})
    skipped = {op for t in totals for op in t.reduce} | {producer[t.whole] for t in totals} | set(joins)
    skipped |= {op for op in function.ops if ends_time(op)}
    groups: dict[Key, Group] = {}
    owner: dict[Value, Key] = {}
    home = {t.whole: t for t in totals}
    for t in totals:  # made whole in the first update body of the stage where it accumulates
        owner[t.whole] = Key(UPDATE, stage[producer[t.part]])
    for op in joins:
        owner[op.outputs[0]] = Key(UPDATE, stage[op], -1)
    for op in function.ops:
        if phase[op] == FREE or op in skipped:
            continue
        key = Key(phase[op], stage[op], _round(op, phase[op], stage[op], owner, free))
        groups.setdefault(key, Group(key)).ops.append(op)
        for v in op.outputs:
            owner[v] = key
    for t in totals:
        groups[owner[t.part]].totals.append(t)
        groups.setdefault(owner[t.whole], Group(owner[t.whole]))
    cut = Cut(function, groups, owner, joins, free)
    _connect(cut, home)
    return cut


def _sums(op: Op) -> bool:
    return isinstance(tensor(op.inputs[0]).on(TIME), Partial)


def _totals(function: Function, stage: Mapping[Op, int]) -> list[Total]:
    """Sums over time, with the collectives over devices that follow on their stage and so can run as soon as a sum is
    complete."""
    users: dict[Value, list[Op]] = {}
    for op in function.ops:
        for v in op.inputs:
            users.setdefault(v, []).append(op)
    results = set(function.outputs)
    totals: list[Total] = []
    for op in function.ops:
        if not ends_time(op) or not _sums(op):
            continue
        whole = op.outputs[0]
        reduce: list[Op] = []
        while whole not in results and len(users.get(whole, ())) == 1:
            after = users[whole][0]
            if after.spec.comm is None or "axis" not in after.attributes or stage.get(after, -1) != stage.get(op):
                break
            if not isinstance(tensor(whole).on(after.attributes["axis"]), Partial):
                break
            reduce.append(after)
            whole = after.outputs[0]
        totals.append(Total(op.inputs[0], tuple(reduce), whole))
    return totals


def roots(v: Value, free: Mapping[Value, Op]) -> list[Value]:
    """The values that a free value is made of; itself if it is not free."""
    op = free.get(v)
    return [v] if op is None else [r for w in op.inputs for r in roots(w, free)]


def _round(op: Op, phase: str, stage: int, owner: Mapping[Value, Key], free: Mapping[Value, Op]) -> int:
    if phase not in (PROLOGUE, UPDATE):
        return 0
    above = [owner[r] for v in op.inputs for r in roots(v, free) if r in owner]
    return max([0, *[k.round + (k.stage != stage) for k in above if k.phase == phase]])


def _connect(cut: Cut, totals: Mapping[Value, Total]) -> None:
    results = set(cut.function.outputs)
    wanted: dict[Value, set[Key]] = {}
    for key, group in cut.groups.items():
        outside = dict.fromkeys(r for op in group.ops for v in op.inputs for r in roots(v, cut.free))
        for v in outside:
            from_key = cut.owner.get(v)
            if from_key == key:
                continue
            wanted.setdefault(v, set()).add(key)
            if not varies(v):
                group.static.append(v)
            elif from_key == Key(FORWARD, key.stage):
                group.saved.append(v)
            else:
                group.received.append(v)
    for op in cut.joins:
        wanted.setdefault(op.inputs[0], set()).add(Key(UPDATE, -1))
    for v, t in totals.items():
        key = cut.owner[v]
        cut.groups[key].summed.append(t)
    for v, key in cut.owner.items():
        if key not in cut.groups:
            continue
        group = cut.groups[key]
        users = wanted.get(v, set())
        keeper = {Key(BACKWARD, key.stage)} if key.phase == FORWARD and varies(v) else set[Key]()
        if users - keeper or v in results:
            group.sends.append(v)
    for key, group in cut.groups.items():
        if key.phase == BACKWARD and group.saved:
            cut.groups[Key(FORWARD, key.stage)].keeps = group.saved


class Body(NamedTuple):
    """A built body and the order of its operands: bundles (None where there is none), then `received`."""

    function: Function
    static: bool
    saved: bool
    running: bool


def build_body(cut: Cut, group: Group, mesh: Mesh, microbatches: int, first: bool, last: bool) -> Body:
    """The function of a group on its stage's mesh: of the first, the last or a middle microbatch."""
    name = f"{NAMES[group.key.phase]}{group.key.stage}"
    if group.key.round:
        name += f".{group.key.round}"
    if group.totals and microbatches > 1:
        name += ".first" if first else ".last" if last else ""
    return _BodyMaker(cut, group, mesh, microbatches, name, first, last).build()


class _BodyMaker:
    def __init__(
        self, cut: Cut, group: Group, mesh: Mesh, microbatches: int, name: str, first: bool, last: bool
    ) -> None:
        self.cut, self.group, self.mesh, self.microbatches = cut, group, mesh, microbatches
        self.first, self.last = first, last
        self.maker = FunctionMaker(name)
        self.env: dict[Value, Value] = {}

    def moved(self, v: Value) -> Type:
        return v.type.moved(self.mesh)

    def bundle(self, name: str, values: Sequence[Value], types: Iterable[Type]) -> list[Value]:
        """An input that is a bundle, and its parts."""
        bundle = self.maker.add_input_value(name, Tuple(types))
        parts = self.maker.add_op("Unpack", None, [bundle], None, (), [v.name for v in values])
        return [parts] if isinstance(parts, Value) else list(parts)

    def build(self) -> Body:
        group, maker = self.group, self.maker
        for name, values in (("static", group.static), ("saved", group.saved)):
            if values:
                self.env.update(zip(values, self.bundle(name, values, map(self.moved, values)), strict=True))
        for v in group.received:
            self.env[v] = maker.add_input_value(v.name, self.moved(v))
        running = self._running()
        self._wholes()
        for op in group.ops:
            self._op(op)
        outputs: list[Value] = []
        if group.keeps:
            outputs.append(maker.add_op("Pack", "saved", [self.env[v] for v in group.keeps]))
        outputs += [self.env[v] for v in group.sends]
        if group.totals:
            sums = [self._add_up(t, running) for t in group.totals]
            outputs.append(maker.add_op("Pack", "totals", sums))
        maker.set_outputs(outputs)
        return Body(maker.finalize(), bool(group.static), bool(group.saved), bool(running))

    def _running(self) -> dict[Value, Value]:
        """The sums over the microbatches before this one."""
        if not self.group.totals or self.first:
            return {}
        parts = [t.part for t in self.group.totals]
        types = [self._summed_type(v, (0, NOW)) for v in parts]
        return dict(zip(parts, self.bundle("running", parts, types), strict=True))

    def _summed_type(self, v: Value, piece: tuple[int, int]) -> Tensor:
        t = tensor(v)
        return t.moved(self.mesh).placed(TIME, t.on(TIME), piece)

    def _wholes(self) -> None:
        """In an update: the finished sums, whole."""
        totals = self.group.summed
        if not totals:
            return
        everything = (0, self.microbatches)
        types = [tensor(t.whole).moved(self.mesh).placed(TIME, tensor(t.part).on(TIME), everything) for t in totals]
        for t, v in zip(totals, self.bundle("totals", [t.part for t in totals], types), strict=True):
            self.env[t.whole] = self.maker.add_op("MPIAllreduce", t.whole.name, [v], {"axis": TIME})

    def _add_up(self, t: Total, running: Mapping[Value, Value]) -> Value:
        v = self.env[t.part]
        if running:
            v = self.maker.add_op("Accumulate", t.part.name, [running[t.part], v])
        if self.last:
            for op in t.reduce:
                v = self.maker.add_op(op.spec, t.part.name, [v], op.attributes)
        return v

    def _op(self, op: Op) -> None:
        ins = [self._value(v) for v in op.inputs]
        attributes = op.attributes
        if "device" in attributes:
            attributes = {**attributes, "device": self.mesh}
        self.maker.add_op(op.spec, None, ins, attributes, (), [v.name for v in op.outputs])
        self.env.update(zip(op.outputs, self.maker.ops[-1].outputs, strict=True))

    def _value(self, v: Value) -> Value:
        if v not in self.env:
            self._op(self.cut.free[v])
        return self.env[v]


def order_of(groups: Mapping[Key, Group], phase: str) -> list[Key]:
    """The bodies of a phase that run once, rounds in order."""
    return sorted((k for k in groups if k.phase == phase), key=lambda k: (k.round, k.stage))
