"""Cuts a placed program into bodies: one function for each stage and phase, typed on the stage's mesh.

A body takes the values that do not vary in time as one bundle, the values that its forward pass saved as another, the
running sums over microbatches as a third; it takes activations and their gradients one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from distir.ir.cached import producers
from distir.ir.device import TIME, Mesh
from distir.ir.function import NO_ATTRIBUTES, Attributes, Function, FunctionMaker, Op, Value
from distir.ir.spec import lookup
from distir.ir.type import NOW, Piece, Tuple, Type
from distir.ops.rules import tensor
from distir.transforms.append import Moved, append
from distir.transforms.pipeline.phases import (
    FREE,
    PHASES,
    RULES,
    UPDATE,
    PhaseRules,
    Varying,
    phases,
    time_ends,
    users,
)

PACK, UNPACK, ACCUMULATE, ALLREDUCE = map(lookup, ("Pack", "Unpack", "Accumulate", "MPIAllreduce"))
_EXTEND = lookup("PadTo")
OVER_TIME = Attributes(axis=TIME)


class BodyKey(NamedTuple):
    """Identifies a body. Prologue and update are cut into several rounds (`round`) where values cross stages."""

    phase: str
    stage: int
    round: int = 0


class Total(NamedTuple):
    """A sum over microbatches. The body that makes `part`, by the op `maker`, accumulates it; after the last microbatch
    it runs the collectives `reduce`, with what extends the sum for them; the result is `whole`."""

    part: Value
    maker: Op
    reduce: tuple[Op, ...]
    whole: Value


class Subgraph:
    """The ops of one body, with the free ones that they need, its inputs and its outputs.

    Inputs: `static`, values that do not vary in time; `saved`, values that another phase of the same stage made for
    the same microbatch, by phase; `received`, values of other stages; `summed`, finished totals. Outputs: `residuals`,
    values saved for other phases of the same stage, by phase; `sends`, all others that are used outside; `totals`, the
    sums over microbatches that this body accumulates.
    """

    def __init__(self, key: BodyKey) -> None:
        self.key = key
        self.ops: list[Op] = []
        self.static: list[Value] = []
        self.saved: dict[str, list[Value]] = {}
        self.received: list[Value] = []
        self.totals: list[Total] = []
        self.summed: list[Total] = []
        self.residuals: dict[str, list[Value]] = {}
        self.sends: list[Value] = []


class Cut(NamedTuple):
    """A program cut into bodies. `joins` are the ops that concatenate microbatches."""

    function: Function
    groups: dict[BodyKey, Subgraph]
    owner: dict[Value, BodyKey]
    joins: list[Op]
    varying: Varying
    """Whether values of a type differ between microbatches."""
    sums: dict[tuple[Type, Type, Piece], Type]
    """Cache: type of a sum over microbatches, by the types of a part and of the whole, and the microbatches in it."""
    bodies: dict[tuple[BodyKey, Mesh, bool, bool, object], StageFunction]
    """Cache of built bodies, by mesh, whether for the first and for the last microbatch, and the passes applied.
    Several schedules of one cut share it."""
    kept: frozenset[Value] = frozenset()
    """Values that do not vary, but that forward bodies make anew for each microbatch, and save for backward ones."""

    def passes(self, v: Value) -> bool:
        """Whether a body hands a value on to others of its microbatch."""
        return self.varying[v.type] or v in self.kept


def cut_bodies(function: Function, stage: Mapping[Op, int], overlap: bool = True, rules: PhaseRules = RULES) -> Cut:
    """Group the ops by stage and phase, and find the values that pass between groups.

    Collectives that follow a sum over time run in the last microbatch's backward pass if `overlap`, hidden by compute,
    else in the update. For `rules` see `phases`.
    """
    phase = phases(function, rules)
    free = {v: op for op in function.ops if phase[op] == FREE for v in op.outputs}
    ends = time_ends(function)
    joins = [op for op in ends if not _sums(op)]
    totals = _totals(function, stage if overlap else {})
    skipped = {op for t in totals for op in t.reduce}.union(ends)
    groups: dict[BodyKey, Subgraph] = {}
    owner: dict[Value, BodyKey] = {}
    keys = {(p, s): BodyKey(p, s) for s in {*stage.values()} for p in PHASES}
    for t in totals:  # completed in the first update body of the stage that accumulates it
        owner[t.whole] = keys[UPDATE, stage[t.maker]]
    for op in joins:
        owner[op.outputs[0]] = BodyKey(UPDATE, stage[op], -1)
    for op in function.ops:
        p = phase[op]
        if p == FREE or op in skipped:
            continue
        key = keys[p, stage[op]]
        if not PHASES[p].timed and (nth := _round(op, key, owner, free)):
            key = key._replace(round=nth)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Subgraph(key)
        group.ops.append(op)
        for v in op.outputs:
            owner[v] = key
    for t in totals:
        groups[owner[t.part]].totals.append(t)
        at = owner[t.whole]
        if at not in groups:
            groups[at] = Subgraph(at)
        groups[at].summed.append(t)
    # another object: with the function itself, in whose cache a cut may be, it would form a cycle
    like = Function(function.name, function.inputs, function.ops, function.outputs, function.updates, function.sources)
    kept = frozenset([v for op in rules.kept for v in op.outputs])
    cut = Cut(like, groups, owner, joins, Varying(), {}, {}, kept)
    _connect(cut, free)
    return cut


def _sums(op: Op) -> bool:
    return tensor(op.inputs[0]).over_time.kind is not None


def _totals(function: Function, stage: Mapping[Op, int]) -> list[Total]:
    """The sums over time, each with the collectives over devices that follow it on its stage: they can run as soon as
    the sum is complete.

    All are along the axes of the first collective, that of the part if it is reduced before: a reduction along others
    is left to the update. What the passes send along those would wait behind it until the first has ended.
    """
    used, producer = users(function), producers(function)
    results = set(function.outputs)
    totals: list[Total] = []
    for op in time_ends(function):
        if not _sums(op):
            continue
        whole, maker = op.outputs[0], producer[op.inputs[0]]
        end, steps = whole, list[Op]()
        reduced = 0  # so many of these steps end with a collective
        axis = maker.attributes.get("axis") if maker.spec.comm is not None else None
        while end not in results and len(used.get(end, ())) == 1:
            after = used[end][0]
            if stage.get(after, -1) != stage.get(op):
                break
            if after.spec is not _EXTEND:
                along = after.attributes.get("axis") if after.spec.comm is not None else None
                if along is None or tensor(end).on(along).kind is None or axis not in (None, along):
                    break
                axis = along
            steps.append(after)
            end = after.outputs[0]
            if after.spec is not _EXTEND:
                reduced, whole = len(steps), end
        totals.append(Total(op.inputs[0], maker, tuple(steps[:reduced]), whole))
    return totals


def roots(v: Value, free: Mapping[Value, Op]) -> list[Value]:
    """The values that free ops compute `v` from; `v` itself if no free op makes it."""
    op = free.get(v)
    return [v] if op is None else [r for w in op.inputs for r in roots(w, free)]


def _round(op: Op, at: BodyKey, owner: Mapping[Value, BodyKey], free: Mapping[Value, Op]) -> int:
    found = 0
    for v in op.inputs:
        for r in roots(v, free) if v in free else (v,):
            above = owner.get(r)
            if above is not None and above.phase == at.phase:
                found = max(found, above.round + (above.stage != at.stage))
    return found


def _connect(cut: Cut, free: Mapping[Value, Op]) -> None:
    results = set(cut.function.outputs)
    readers: dict[Value, list[BodyKey]] = {}
    for key, group in cut.groups.items():
        for v in _take_free(group, free):
            from_key = cut.owner.get(v)
            if from_key == key:
                continue
            readers.setdefault(v, []).append(key)
            if not cut.passes(v):
                group.static.append(v)
            elif from_key is not None and _saves_for(from_key, key):
                group.saved.setdefault(from_key.phase, []).append(v)
            else:
                group.received.append(v)
    for op in cut.joins:
        readers.setdefault(op.inputs[0], []).append(BodyKey(UPDATE, -1))
    for v, key in cut.owner.items():
        if v not in results:
            if v not in readers:
                continue
            if cut.passes(v) and all([_saves_for(key, user) for user in readers[v]]):
                continue
        if key in cut.groups:
            cut.groups[key].sends.append(v)
    for key, group in cut.groups.items():
        for phase, values in group.saved.items():
            cut.groups[BodyKey(phase, key.stage)].residuals[key.phase] = values


def _take_free(group: Subgraph, free: Mapping[Value, Op]) -> Iterable[Value]:
    """Put the free ops that a group needs before their first use in it; returns the values that it takes."""
    taken: list[Value] = []
    placed: list[Op] = []
    _take(group.ops, free, set(), taken, placed)
    group.ops = placed
    return taken


def _take(ops: Iterable[Op], free: Mapping[Value, Op], known: set[Value], taken: list[Value], placed: list[Op]) -> None:
    """Add ops to `placed`, after the free ops that they need, and what is neither free nor `known` to `taken`."""
    for op in ops:
        for v in op.inputs:
            if v not in known:
                known.add(v)
                if v in free:
                    _take((free[v],), free, known, taken, placed)
                else:
                    taken.append(v)
        known.update(op.outputs)
        placed.append(op)


def _saves_for(key: BodyKey, user: BodyKey) -> bool:
    """Whether a body saves its results for another, of the same stage and microbatch, instead of sending them."""
    return key.stage == user.stage and PHASES[key.phase].timed and PHASES[user.phase].timed


class StageFunction(NamedTuple):
    """A built body. Its operands, in order: the static bundle, saved bundles, received values, running sums."""

    function: Function
    static: bool
    """Whether it takes a bundle of values that do not vary in time."""
    saved: tuple[str, ...]
    """The phases that it takes a bundle of saved values from."""
    running: bool
    """Whether it takes the sums over the microbatches before."""


def build_body(cut: Cut, group: Subgraph, moved: Moved, microbatches: int, first: bool, last: bool) -> StageFunction:
    """The function of a group on its stage's mesh, for the first, the last or a middle microbatch."""
    name = f"{PHASES[group.key.phase].body}{group.key.stage}"
    if group.key.round:
        name += f".{group.key.round}"
    if group.totals and microbatches > 1:
        name += ".first" if first else ".last" if last else ""
    return _BodyMaker(cut, group, moved, microbatches, name, first, last).build()


class _BodyMaker:
    """Types are those of the placed program, moved to the stage's mesh; only sums over time get new types."""

    def __init__(
        self, cut: Cut, group: Subgraph, moved: Moved, microbatches: int, name: str, first: bool, last: bool
    ) -> None:
        self.cut, self.group, self.moved, self.microbatches = cut, group, moved, microbatches
        self.first, self.last = first, last
        self.maker = FunctionMaker(name)
        self.env: dict[Value, Value] = {}
        self.running: Sequence[Value] = ()
        self.sums: dict[int, Value] = {}

    def bundle(self, name: str, values: Sequence[Value], types: Sequence[Type]) -> tuple[Value, ...]:
        """Add an input that is a bundle; returns its members."""
        bundle = self.maker.add_input_value(name, Tuple(types))
        return append(self.maker, UNPACK, (bundle,), NO_ATTRIBUTES, [v.name for v in values], types)

    def pack(self, name: str, parts: Iterable[Value]) -> Value:
        """Append the op that packs values into a bundle."""
        parts = tuple(parts)
        return append(self.maker, PACK, parts, NO_ATTRIBUTES, (name,), (Tuple([v.type for v in parts]),))[0]

    def build(self) -> StageFunction:
        group, maker, env, moved = self.group, self.maker, self.env, self.moved
        for name, values in (("static", group.static), *[("saved", values) for values in group.saved.values()]):
            if values:
                types = [moved[v.type] for v in values]
                env.update(zip(values, self.bundle(name, values, types), strict=True))
        for v in group.received:
            env[v] = maker.add_input_value(v.name, moved[v.type])
        self.running = self._running()
        self._wholes()
        summed: dict[Op, list[int]] = {}
        late: list[int] = []  # reduced over devices before it is accumulated: last, so that reductions form buckets
        for k, t in enumerate(group.totals):
            (late if t.maker.spec.comm else summed.setdefault(t.maker, [])).append(k)
        self._ops(group.ops, summed)
        for k in late:
            self._sum(k)
        outputs: list[Value] = []
        outputs += [self.pack("saved", [env[v] for v in values]) for values in group.residuals.values()]
        outputs += [env[v] for v in group.sends]
        if group.totals:
            outputs.append(self.pack("totals", [v for _, v in sorted(self.sums.items())]))
        maker.set_outputs(outputs)
        return StageFunction(maker.finalize(), bool(group.static), tuple(group.saved), bool(self.running))

    def _running(self) -> Sequence[Value]:
        """The sums over the microbatches before this one; none for the first."""
        if not self.group.totals or self.first:
            return ()
        parts = [t.part for t in self.group.totals]
        return self.bundle("running", parts, [self._summed(v, (0, NOW), v) for v in parts])

    def _summed(self, part: Value, piece: Piece, whole: Value) -> Type:
        """The type of a sum of `part` over the microbatches `piece`, placed over devices as `whole` is."""
        key = part.type, whole.type, piece
        found = self.cut.sums.get(key)
        if found is None:
            found = self.cut.sums[key] = tensor(whole).placed(TIME, tensor(part).on(TIME), piece)
        return self.moved[found]

    def _wholes(self) -> None:
        """In an update: unpack the finished totals and type each as replicated over time."""
        totals = self.group.summed
        if not totals:
            return
        everything = (0, self.microbatches)
        types = [self._summed(t.part, everything, t.whole) for t in totals]
        for t, v in zip(totals, self.bundle("totals", [t.part for t in totals], types), strict=True):
            made = append(self.maker, ALLREDUCE, (v,), OVER_TIME, (t.whole.name,), (self.moved[t.whole.type],))
            self.env[t.whole] = made[0]

    def _sum(self, k: int) -> None:
        """Accumulate this microbatch's part into total number k; after the last microbatch, reduce it over devices.

        Done as soon as the part exists: it can be freed, and the reduction overlaps the compute that is left.
        """
        t = self.group.totals[k]
        v = self.env[t.part]
        if self.running:
            total = self._summed(t.part, (0, NOW + 1), t.part)
            (v,) = append(self.maker, ACCUMULATE, (self.running[k], v), NO_ATTRIBUTES, (t.part.name,), (total,))
        for op in t.reduce if self.last else ():
            v = self.maker.add_op(op.spec, t.part.name, [v], op.attributes)
        self.sums[k] = v

    def _ops(self, ops: Iterable[Op], summed: Mapping[Op, Sequence[int]]) -> None:
        """Append the ops, and after each the sums over time of its results."""
        env, moved, fresh, append_op = self.env, self.moved, self.maker.fresh, self.maker.ops.append
        value_of = env.__getitem__
        for op in ops:
            inputs, attributes, made = tuple(map(value_of, op.inputs)), op.attributes, op.outputs
            if attributes and "device" in attributes:
                attributes = Attributes({**attributes, "device": moved.mesh})
            if len(made) == 1:  # as most
                (v,) = made
                outputs = (Value(fresh(v.name), moved[v.type]),)
                env[v] = outputs[0]
            else:
                outputs = tuple([Value(fresh(v.name), moved[v.type]) for v in made])
                env.update(zip(made, outputs, strict=True))
            append_op(Op(op.spec, inputs, attributes, outputs))
            if op in summed:
                for k in summed[op]:
                    self._sum(k)


def order_of(groups: Mapping[BodyKey, Subgraph], phase: str) -> list[BodyKey]:
    """The bodies of a phase that runs once a step, by round, then by stage."""
    return sorted((k for k in groups if k.phase == phase), key=lambda k: (k.round, k.stage))
