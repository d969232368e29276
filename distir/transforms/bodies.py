"""Cutting a placed program into bodies: one function for each stage and phase, typed on the stage's mesh.

Values that do not vary in time come to a body as one bundle, what its forward pass saved as another, running sums over
microbatches as a third; activations and their gradients come one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from distir.ir.device import TIME, Mesh
from distir.ir.function import NO_ATTRIBUTES, Attributes, Function, FunctionMaker, Op, Value
from distir.ir.spec import lookup
from distir.ir.type import NOW, Partial, Piece, Tuple, Type
from distir.ops.rules import tensor
from distir.transforms.known import Moved, append
from distir.transforms.phases import (
    BACKWARD,
    FORWARD,
    FREE,
    PROLOGUE,
    UPDATE,
    Varying,
    ends_time,
    phases,
    producers,
    users,
)

PACK, UNPACK, ACCUMULATE, ALLREDUCE = map(lookup, ("Pack", "Unpack", "Accumulate", "MPIAllreduce"))
OVER_TIME = Attributes(axis=TIME)
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
    varying: Varying
    """Whether values of a type differ between microbatches."""
    sums: dict[tuple[Type, Type, Piece], Type]
    """Types of sums over microbatches, by those of a part, of the whole, and the microbatches."""
    bodies: dict[tuple[Key, Mesh, bool, bool, float], Body]
    """Those that are built, by mesh, whether of the first and of the last microbatch, and size of buckets: schedules
    share them."""


def cut_bodies(function: Function, stage: Mapping[Op, int], overlap: bool = True, turn: str = BACKWARD) -> Cut:
    """Group the ops by stage and phase and find what passes between the groups.

    Collectives that follow a sum over time belong to the last microbatch's backward pass, so that they `overlap` with
    it, or else to the update. For `turn` see `phases`.
    """
    phase = phases(function, turn)
    producer = producers(function)
    free = {v: op for op in function.ops if phase[op] == FREE for v in op.outputs}
    ends = [op for op in function.ops if op.spec.comm is not None and ends_time(op)]
    joins = [op for op in ends if not _sums(op)]
    totals = _totals(function, ends, stage if overlap else {})
    skipped = {op for t in totals for op in t.reduce}.union(ends)
    groups: dict[Key, Group] = {}
    owner: dict[Value, Key] = {}
    home = {t.whole: t for t in totals}
    for t in totals:  # made whole in the first update body of the stage where it accumulates
        owner[t.whole] = Key(UPDATE, stage[producer[t.part]])
    for op in joins:
        owner[op.outputs[0]] = Key(UPDATE, stage[op], -1)
    keys = {(p, s): Key(p, s) for s in {*stage.values()} for p in NAMES}
    for op in function.ops:
        p = phase[op]
        if p == FREE or op in skipped:
            continue
        key = keys[p, stage[op]]
        if p in (PROLOGUE, UPDATE):
            key = key._replace(round=_round(op, key, owner, free))
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(key)
        group.ops.append(op)
        for v in op.outputs:
            owner[v] = key
    for t in totals:
        groups[owner[t.part]].totals.append(t)
        groups.setdefault(owner[t.whole], Group(owner[t.whole]))
    cut = Cut(function, groups, owner, joins, free, Varying(), {}, {})
    _connect(cut, home)
    return cut


def _sums(op: Op) -> bool:
    return isinstance(tensor(op.inputs[0]).on(TIME), Partial)


def _totals(function: Function, ends: Iterable[Op], stage: Mapping[Op, int]) -> list[Total]:
    """Sums over time, with the collectives over devices that follow on their stage and so can run as soon as a sum is
    complete."""
    used = users(function)
    results = set(function.outputs)
    totals: list[Total] = []
    for op in ends:
        if not _sums(op):
            continue
        whole = op.outputs[0]
        reduce: list[Op] = []
        while whole not in results and len(used.get(whole, ())) == 1:
            after = used[whole][0]
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


def _round(op: Op, at: Key, owner: Mapping[Value, Key], free: Mapping[Value, Op]) -> int:
    above = [owner[r] for v in op.inputs for r in roots(v, free) if r in owner]
    return max([0, *[k.round + (k.stage != at.stage) for k in above if k.phase == at.phase]])


def _connect(cut: Cut, totals: Mapping[Value, Total]) -> None:
    results = set(cut.function.outputs)
    wanted: dict[Value, set[Key]] = {}
    for key, group in cut.groups.items():
        made = {v for op in group.ops for v in op.outputs}
        forward = Key(FORWARD, key.stage)
        outside = dict.fromkeys([v for op in group.ops for v in op.inputs if v not in made])
        for v in dict.fromkeys([r for w in outside for r in roots(w, cut.free)]):
            from_key = cut.owner.get(v)
            if from_key == key:
                continue
            wanted.setdefault(v, set()).add(key)
            if not cut.varying[v.type]:
                group.static.append(v)
            elif from_key == forward:
                group.saved.append(v)
            else:
                group.received.append(v)
    for op in cut.joins:
        wanted.setdefault(op.inputs[0], set()).add(Key(UPDATE, -1))
    for v, t in totals.items():
        key = cut.owner[v]
        cut.groups[key].summed.append(t)
    for v, key in cut.owner.items():
        takers = wanted.get(v)
        if v not in results:
            if not takers:
                continue
            if key.phase == FORWARD and len(takers) == 1 and cut.varying[v.type] and Key(BACKWARD, key.stage) in takers:
                continue  # it is saved
        if key in cut.groups:
            cut.groups[key].sends.append(v)
    for key, group in cut.groups.items():
        if key.phase == BACKWARD and group.saved:
            cut.groups[Key(FORWARD, key.stage)].keeps = group.saved


class Body(NamedTuple):
    """A built body and the order of its operands: bundles (None where there is none), then `received`."""

    function: Function
    static: bool
    saved: bool
    running: bool


def build_body(cut: Cut, group: Group, moved: Moved, microbatches: int, first: bool, last: bool) -> Body:
    """The function of a group on its stage's mesh: of the first, the last or a middle microbatch."""
    name = f"{NAMES[group.key.phase]}{group.key.stage}"
    if group.key.round:
        name += f".{group.key.round}"
    if group.totals and microbatches > 1:
        name += ".first" if first else ".last" if last else ""
    return _BodyMaker(cut, group, moved, microbatches, name, first, last).build()


class _BodyMaker:
    """Types are those of the placed program, on the stage's mesh: only what adds up over time is typed anew."""

    def __init__(
        self, cut: Cut, group: Group, moved: Moved, microbatches: int, name: str, first: bool, last: bool
    ) -> None:
        self.cut, self.group, self.moved, self.microbatches = cut, group, moved, microbatches
        self.first, self.last = first, last
        self.maker = FunctionMaker(name)
        self.env: dict[Value, Value] = {}
        self.running: Sequence[Value] = ()
        self.sums: dict[int, Value] = {}

    def bundle(self, name: str, values: Sequence[Value], types: Sequence[Type]) -> tuple[Value, ...]:
        """An input that is a bundle, and its parts."""
        bundle = self.maker.add_input_value(name, Tuple(types))
        return append(self.maker, UNPACK, (bundle,), NO_ATTRIBUTES, [v.name for v in values], types)

    def pack(self, name: str, parts: Iterable[Value]) -> Value:
        """A bundle of these."""
        parts = tuple(parts)
        return append(self.maker, PACK, parts, NO_ATTRIBUTES, (name,), (Tuple([v.type for v in parts]),))[0]

    def build(self) -> Body:
        group, maker, env, moved = self.group, self.maker, self.env, self.moved
        for name, values in (("static", group.static), ("saved", group.saved)):
            if values:
                types = [moved[v.type] for v in values]
                env.update(zip(values, self.bundle(name, values, types), strict=True))
        for v in group.received:
            env[v] = maker.add_input_value(v.name, moved[v.type])
        self.running = self._running()
        self._wholes()
        summed: dict[Op, list[int]] = {}
        producer = producers(self.cut.function)
        late: list[int] = []  # what is reduced before it is added up: buckets of reductions can then be filled
        for k, t in enumerate(group.totals):
            maker_of = producer[t.part]
            (late if maker_of.spec.comm else summed.setdefault(maker_of, [])).append(k)
        for op in group.ops:
            self._op(op)
            for k in summed.get(op, ()):
                self._sum(k)
        for k in late:
            self._sum(k)
        outputs: list[Value] = []
        if group.keeps:
            outputs.append(self.pack("saved", [env[v] for v in group.keeps]))
        outputs += [env[v] for v in group.sends]
        if group.totals:
            outputs.append(self.pack("totals", [v for _, v in sorted(self.sums.items())]))
        maker.set_outputs(outputs)
        return Body(maker.finalize(), bool(group.static), bool(group.saved), bool(self.running))

    def _running(self) -> Sequence[Value]:
        """The sums over the microbatches before this one, if there were any."""
        if not self.group.totals or self.first:
            return ()
        parts = [t.part for t in self.group.totals]
        return self.bundle("running", parts, [self._summed(v, (0, NOW), v) for v in parts])

    def _summed(self, part: Value, piece: Piece, whole: Value) -> Type:
        """The type of a sum of `part` over these microbatches, placed over devices as `whole` is."""
        key = part.type, whole.type, piece
        found = self.cut.sums.get(key)
        if found is None:
            found = self.cut.sums[key] = tensor(whole).placed(TIME, tensor(part).on(TIME), piece)
        return self.moved[found]

    def _wholes(self) -> None:
        """In an update: the finished sums, whole."""
        totals = self.group.summed
        if not totals:
            return
        everything = (0, self.microbatches)
        types = [self._summed(t.part, everything, t.whole) for t in totals]
        for t, v in zip(totals, self.bundle("totals", [t.part for t in totals], types), strict=True):
            made = append(self.maker, ALLREDUCE, (v,), OVER_TIME, (t.whole.name,), (self.moved[t.whole.type],))
            self.env[t.whole] = made[0]

    def _sum(self, k: int) -> None:
        """Add total number k up, this microbatch included, and after the last reduce it over devices: as soon as its
        part is there, so that it need not be kept, and reductions run beside what is left to compute."""
        t = self.group.totals[k]
        v = self.env[t.part]
        if self.running:
            total = self._summed(t.part, (0, NOW + 1), t.part)
            (v,) = append(self.maker, ACCUMULATE, (self.running[k], v), NO_ATTRIBUTES, (t.part.name,), (total,))
        for op in t.reduce if self.last else ():
            v = self.maker.add_op(op.spec, t.part.name, [v], op.attributes)
        self.sums[k] = v

    def _op(self, op: Op) -> None:
        env, moved = self.env, self.moved
        for v in op.inputs:
            if v not in env:
                self._op(self.cut.free[v])
        attributes = op.attributes
        if "device" in attributes:
            attributes = Attributes({**attributes, "device": moved.mesh})
        fresh = self.maker.fresh
        outputs = tuple([Value(fresh(v.name), moved[v.type]) for v in op.outputs])
        self.maker.ops.append(Op(op.spec, tuple([env[v] for v in op.inputs]), attributes, outputs))
        for v, new in zip(op.outputs, outputs, strict=True):
            env[v] = new


def order_of(groups: Mapping[Key, Group], phase: str) -> list[Key]:
    """The bodies of a phase that run once, rounds in order."""
    return sorted((k for k in groups if k.phase == phase), key=lambda k: (k.round, k.stage))
