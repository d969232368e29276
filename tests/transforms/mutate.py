"""Faults seeded into a distributed program: one op, input or update of it is changed, and types follow.

Types are inferred anew from the fault on. Where they do not fit any more, the types that stood there are kept, for
`verify` to find. The types of the program's results are part of its interface: a result whose type changed keeps the
old one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from distir.ir import Function, Mesh, Op, Value
from distir.ir.errors import IRTypeError
from distir.ir.function import Attributes
from distir.ir.infer import infer
from distir.ir.placement import Halo, splits
from distir.ir.spec import Spec, lookup
from distir.ir.type import NOW, REPLICATE, SUM, Partial, Placement, Shard, Tensor, Tuple, Type

COMMUNICATION = (
    *("drop", "double", "extra", "axis", "kind", "dim", "placement", "input placement", "mesh", "input mesh"),
    *("halo", "halo drop", "halo double", "halo axis", "input halo", "joint axes"),
)
"""Faults in a collective, a placement or a mesh: what `verify` alone must reject."""
DATAFLOW = (
    *("operand", "microbatch", "piece", "callee", "stage", "add dropped", "add doubled", "sum dropped", "sum doubled"),
    *("constant", "scale forgotten", "attribute", "op", "update"),
)
KINDS = (*COMMUNICATION, *DATAFLOW)
COLLECTIVES = ("MPIAllreduce", "MPIAllgather", "MPIReduceScatter", "MPIAlltoall", "LocalSlice", "LocalTerm")

Edit = Callable[["Rebuild", Op, list[Value]], Sequence[Value]]
"""(maker, op, its operands in the mutant) -> what stands for its results."""


class Mutant(NamedTuple):
    """`where` says in words what was done."""

    kind: str
    where: str
    function: Function


class Site(NamedTuple):
    """Op number `index` of a function of the program."""

    function: Function
    index: int

    @property
    def op(self) -> Op:
        return self.function.ops[self.index]


class Rebuild:
    """One function of the mutant under construction."""

    def __init__(self, source: Function) -> None:
        self.source = source
        self.inputs: list[Value] = []
        self.ops: list[Op] = []
        self.env: dict[Value, Value] = {}

    def add(self, spec: Spec, ins: Sequence[Value], attributes: Any, like: Sequence[Value]) -> list[Value]:
        """An op with the results' types inferred; where it is ill typed, those of the values it is `like`."""
        attributes = attributes if isinstance(attributes, Attributes) else Attributes(attributes)
        try:
            types: Sequence[Type] = infer(spec, attributes, tuple(v.type for v in ins))
        except IRTypeError:
            types = [v.type for v in like]
        names = [v.name for v in like] if len(like) == len(types) else [f"{spec.name}.{k}" for k in range(len(types))]
        outs = tuple(Value(f"{n}#{len(self.ops)}", t) for n, t in zip(names, types, strict=True))
        self.ops.append(Op(spec, tuple(ins), attributes, outs))
        return list(outs)

    def original(self, v: Value) -> Value:
        """A result of main, with the type that it must have."""
        w = self.env[v]
        if w.type is v.type:
            return w
        out = Value(f"{v.name}#result", v.type)
        self.ops.append(Op(lookup("Identity"), (w,), Attributes(), (out,)))
        return out


class Fault(NamedTuple):
    """An edit at a site, types of inputs that change, and another `updates` of main."""

    where: str
    site: Site | None = None
    edit: Edit | None = None
    inputs: Mapping[Value, Type] = MappingProxyType({})
    updates: dict[Value, Value] | None = None


def apply(program: Function, fault: Fault) -> Function:
    """The program with the fault."""
    cache: dict[Function, Function] = {}

    def rebuilt(f: Function) -> Function:
        if f in cache:
            return cache[f]
        made = Rebuild(f)
        for v in f.inputs:
            made.env[v] = Value(v.name, fault.inputs.get(v, v.type), v.role)
            made.inputs.append(made.env[v])
        for k, op in enumerate(f.ops):
            attributes = op.attributes
            if op.callee is not None and rebuilt(op.callee) is not op.callee:
                attributes = Attributes({**attributes, "callee": rebuilt(op.callee)})
            ins = [made.env[v] for v in op.inputs]
            if fault.site == (f, k) and fault.edit is not None:
                outs = fault.edit(made, Op(op.spec, op.inputs, attributes, op.outputs), ins)
            else:
                outs = made.add(op.spec, ins, attributes, op.outputs)
            made.env.update(zip(op.outputs, outs, strict=False))
            for v in op.outputs[len(outs) :]:
                made.env[v] = v  # not defined any more
        outputs = [made.original(v) if f is program else made.env[v] for v in f.outputs]
        updates = (fault.updates if f is program else None) or f.updates
        place = dict(zip(f.outputs, outputs, strict=True))
        new = {place[a]: made.env[b] for a, b in updates.items()}
        touched = f is program or (fault.site and fault.site.function is f) or any(v in fault.inputs for v in f.inputs)
        same = not touched and all(a.attributes is b.attributes for a, b in zip(f.ops, made.ops, strict=True))
        sources = {place[v]: shape for v, shape in f.sources.items()}
        changed = Function(f.name, tuple(made.inputs), tuple(made.ops), tuple(outputs), new, sources)
        cache[f] = f if same else changed
        return cache[f]

    return rebuilt(program)


class Mutator:
    """Draws faults of a kind for one program."""

    def __init__(self, program: Function, seed: int) -> None:
        self.program = program
        self.random = random.Random(seed)
        self.functions = [program, *program.callees()]
        self.sites = [Site(f, k) for f in self.functions for k in range(len(f.ops))]
        types = [v.type for f in self.functions for v in (*f.inputs, *(x for op in f.ops for x in op.outputs))]
        self.meshes = list(dict.fromkeys(m for t in types for m in _meshes(t)))

    def draw(self, kind: str) -> Mutant | None:
        """A mutant of that kind; None if the program has no place for it, or the draw would change nothing."""
        fault = getattr(self, "_" + kind.replace(" ", "_"))()
        if fault is None:
            return None
        return Mutant(kind, fault.where, apply(self.program, fault))

    # ---- drawing

    def pick(self, options: Sequence[Any]) -> Any:
        return self.random.choice(options) if options else None

    def site(self, keep: Callable[[Op], Any]) -> Site | None:
        return self.pick([s for s in self.sites if keep(s.op)])

    def fault(self, site: Site | None, what: str, edit: Edit) -> Fault | None:
        return None if site is None else Fault(f"{site.function.name}: {site.op}: {what}", site, edit)

    def other(self, options: Sequence[Any], one: Any) -> Any:
        return self.pick([x for x in options if x is not one and x != one])

    def changed(self, site: Site | None, attributes: dict[str, Any]) -> Fault | None:
        """The op with some attributes changed."""
        return self.fault(
            site,
            f"with {attributes}",
            lambda m, op, ins: m.add(op.spec, ins, {**op.attributes, **attributes}, op.outputs),
        )

    def collective(self) -> Site | None:
        return self.site(lambda op: op.op_type in COLLECTIVES)

    def axes(self, site: Site | None) -> list[str]:
        """The mesh axes of the values around an op."""
        if site is None:
            return []
        values = (*site.op.inputs, *site.op.outputs)
        return list(dict.fromkeys(a for v in values for m in _meshes(v.type) for a in m.axes))

    def placement(self, rank: int) -> Placement:
        splits = [Shard(dim, outer) for dim in range(rank) for outer in (1, 2, 3)]
        return self.pick([REPLICATE, SUM, Partial("max"), *splits, *splits])

    # ---- collectives, placements, meshes

    def _drop(self) -> Fault | None:
        return self.fault(self.site(_moves), "dropped", lambda m, op, ins: ins[:1])

    def _double(self) -> Fault | None:
        def twice(m: Rebuild, op: Op, ins: list[Value]) -> list[Value]:
            return m.add(op.spec, m.add(op.spec, ins, op.attributes, op.outputs), op.attributes, op.outputs)

        return self.fault(self.site(_moves), "done twice", twice)

    def _extra(self) -> Fault | None:
        site = self.site(lambda op: op.spec.comm is None or op.op_type in COLLECTIVES)
        axis, kind = self.pick(self.axes(site)), self.pick(COLLECTIVES)
        if axis is None:
            return None

        def more(m: Rebuild, op: Op, ins: list[Value]) -> list[Value]:
            first, *rest = m.add(op.spec, ins, op.attributes, op.outputs)
            return [*m.add(lookup(kind), [first], _taken(kind, {"axis": axis, "dim": 0}), op.outputs[:1]), *rest]

        return self.fault(site, f"followed by {kind} over {axis}", more)

    def _axis(self) -> Fault | None:
        site = self.collective()
        axis = self.other(self.axes(site), site.op.attributes["axis"]) if site else None
        return self.changed(site, {"axis": axis}) if axis else None

    def _kind(self) -> Fault | None:
        site = self.collective()
        if site is None:
            return None
        kind, attributes = self.other(COLLECTIVES, site.op.op_type), {"dim": self.random.randrange(2)}
        return self.fault(
            site,
            f"as {kind}",
            lambda m, op, ins: m.add(lookup(kind), ins, _taken(kind, {**attributes, **op.attributes}), op.outputs),
        )

    def _dim(self) -> Fault | None:
        site = self.site(lambda op: op.op_type in COLLECTIVES and isinstance(op.attributes.get("dim"), int))
        if site is None:
            return None
        old = Shard(site.op.attributes["dim"], site.op.attributes.get("outer", 1))
        new = self.other([Shard(d, o) for d in range(3) for o in (1, 2, 3)], old)
        return self.changed(site, {"dim": new.dim, "outer": new.outer})

    def _placement(self) -> Fault | None:
        """Of an attribute: where a scatter or an op without split operands places its result."""
        site = self.site(lambda op: "placements" in op.attributes or "place" in op.attributes)
        if site is None:
            return None
        attributes = site.op.attributes
        if "placements" in attributes:
            row = list(attributes["placements"])
            k = self.random.randrange(len(row))
            row[k] = self.other([REPLICATE, Shard(0), Shard(0, 2), Shard(1), Shard(1, 3), SUM], row[k])
            return self.changed(site, {"placements": tuple(row)})
        axis, split = attributes["place"][0]
        rows = [(), ((axis, self.other([Shard(0), Shard(1), Shard(0, 2)], split)),)]
        rows += [((self.other(self.axes(site), axis), split),)]
        return self.changed(site, {"place": self.pick(rows)})

    def _input_placement(self) -> Fault | None:
        f = self.pick(self.functions)
        options = [v for v in f.inputs for t in _tensors(v.type) if isinstance(t.device, Mesh) and t.device.axes]
        v = self.pick(options)
        if v is None:
            return None
        k = self.random.randrange(len(_tensors(v.type)))
        t = _tensors(v.type)[k]
        if not isinstance(t.device, Mesh):
            return None
        i = self.random.randrange(len(t.placements))
        row = list(t.placements)
        row[i] = self.placement(len(t.shape))
        new = self._typed(t, row)
        return None if new in (None, t) else Fault(f"{f.name}: input {v}: as {new}", inputs={v: _with(v.type, k, new)})

    def _typed(self, t: Tensor, placements: Sequence[Placement]) -> Tensor | None:
        piece = t.piece
        if isinstance(t.device, Mesh) and t.device.time is not None and placements[t.device.time] is REPLICATE:
            piece = None
        try:
            return Tensor.whole(t.dtype, t.global_shape, t.device, placements, piece)
        except IRTypeError:
            return None

    def _mesh(self) -> Fault | None:
        site = self.site(lambda op: isinstance(op.attributes.get("to", op.attributes.get("device")), Mesh))
        if site is None:
            return None
        name = "to" if "to" in site.op.attributes else "device"
        mesh = self.other([*self.meshes, *map(self._shuffled, self.meshes)], site.op.attributes[name])
        return self.changed(site, {name: mesh}) if mesh else None

    def _shuffled(self, mesh: Mesh) -> Mesh:
        """The same devices in another order."""
        return Mesh(mesh.devices[::-1], dict(zip(mesh.axes, mesh.sizes, strict=True)), mesh.name)

    def _input_mesh(self) -> Fault | None:
        f = self.pick(self.functions)
        v = self.pick([v for v in f.inputs if _meshes(v.type)])
        if v is None:
            return None
        mesh = self.other([*self.meshes, *map(self._shuffled, self.meshes)], _meshes(v.type)[0])
        try:
            return Fault(f"{f.name}: input {v}: on {mesh}", inputs={v: v.type.moved(mesh)}) if mesh else None
        except IRTypeError:
            return None

    # ---- halos, and several axes as one

    def _halo(self) -> Fault | None:
        """Another width or fill than the op needs."""
        site = self.site(_is("HaloExchange"))
        if site is None:
            return None
        lo, hi, fill = self._other_halo(Shard(0, halo=_halo_of(site.op)))
        return self.changed(site, {"lo": lo, "hi": hi, "fill": fill})

    def _other_halo(self, split: Shard) -> Halo:
        lo, hi, fill = split.halo or (0, 0, 0.0)
        rows = [(lo + 1, hi, fill), (lo, hi + 1, fill), (hi, lo, fill), (lo, hi, fill + 1.0), (lo, hi, -math.inf)]
        rows += [(max(0, lo - 1), hi, fill), (lo, max(0, hi - 1), fill), (lo + hi, 0, fill), (0, lo + hi, fill)]
        return self.other(rows, split.halo)

    def _halo_drop(self) -> Fault | None:
        """The slice alone: as it is, or with pads for what the neighbours have."""
        site = self.site(_is("HaloExchange"))
        return self.fault(site, "dropped", lambda m, op, ins: ins[:1])

    def _halo_double(self) -> Fault | None:
        """Exchanged twice, or cut and exchanged again with another halo."""
        site = self.site(_is("HaloExchange"))
        if site is None:
            return None
        axis = site.op.attributes["axis"]
        cut, (lo, hi, fill) = self.random.randrange(2), self._other_halo(Shard(0, halo=_halo_of(site.op)))
        again = {"axis": axis, "lo": lo, "hi": hi, "fill": fill}

        def twice(m: Rebuild, op: Op, ins: list[Value]) -> list[Value]:
            once = m.add(op.spec, ins, op.attributes, op.outputs)
            if cut:
                once = m.add(lookup("HaloCut"), once, {"axis": axis}, op.inputs)
            return m.add(op.spec, once, again if cut else op.attributes, op.outputs)

        return self.fault(site, f"done twice, {f'then with {again}' if cut else 'alike'}", twice)

    def _halo_axis(self) -> Fault | None:
        """Along another axis."""
        site = self.site(_is("HaloExchange"))
        axis = self.other(self.axes(site), site.op.attributes["axis"]) if site else None
        return self.changed(site, {"axis": axis}) if axis else None

    def _input_halo(self) -> Fault | None:
        """An input given with another halo than its uses take, or with one that none takes."""
        rows = [
            (f, v, v.type, axis, p)
            for f in self.functions
            for v in f.inputs
            if isinstance(v.type, Tensor)
            for axis, p in _slices(v.type)
        ]
        row = self.pick([r for r in rows if r[4].halo] or rows)
        if row is None:
            return None
        f, v, t, axis, split = row
        lo, hi, fill = self.pick([(0, 0, 0.0), self._other_halo(split)]) if split.halo else (1, 1, 0.0)
        try:
            new = t.placed(axis, Shard(split.dim).with_halo(lo, hi, fill), t.piece)
        except IRTypeError:
            return None
        return Fault(f"{f.name}: input {v}: as {new}", inputs={v: new})

    def _joint_axes(self) -> Fault | None:
        """A collective along several axes along one of them less, along another one more, or in another order."""
        site = self.site(lambda op: isinstance(op.attributes.get("axis"), tuple))
        if site is None:
            return None
        axes = site.op.attributes["axis"]
        k = self.random.randrange(len(axes))
        fewer = (*axes[:k], *axes[k + 1 :])
        free = [a for a in self.axes(site) if a not in axes]
        rows = [fewer[0] if len(fewer) == 1 else fewer, axes[::-1]]
        rows += [(*axes, a) for a in free] + [(*axes[:k], a, *axes[k + 1 :]) for a in free]
        return self.changed(site, {"axis": self.pick(rows)})

    # ---- dataflow

    def _operand(self) -> Fault | None:
        """Another value of the same type."""
        site = self.site(lambda op: op.inputs)
        if site is None:
            return None
        k = self.random.randrange(len(site.op.inputs))
        before = [*site.function.inputs, *(v for op in site.function.ops[: site.index] for v in op.outputs)]
        one = site.op.inputs[k]
        other = self.pick([v for v in before if v.type is one.type and v is not one])
        return self._with_operand(site, k, other)

    def _with_operand(self, site: Site, k: int, other: Value | None) -> Fault | None:
        if other is None:
            return None
        return self.fault(
            site,
            f"operand {k} is %{other.name}",
            lambda m, op, ins: m.add(op.spec, [*ins[:k], m.env[other], *ins[k + 1 :]], op.attributes, op.outputs),
        )

    def _microbatch(self) -> Fault | None:
        """A call for another microbatch."""
        site = self.site(lambda op: op.attributes.get("mb") is not None)
        if site is None:
            return None
        size = next(m.size("mb") for m in self.meshes if "mb" in m.axes)
        return self.changed(site, {"mb": self.other(range(size), site.op.attributes["mb"])}) if size > 1 else None

    def _piece(self) -> Fault | None:
        """An operand of another microbatch."""
        site = self.site(lambda op: any(_moments(v.type) for v in op.inputs))
        if site is None:
            return None
        k = self.pick([k for k, v in enumerate(site.op.inputs) if _moments(v.type)])
        before = [*site.function.inputs, *(v for op in site.function.ops[: site.index] for v in op.outputs)]
        one = site.op.inputs[k]
        alike = [v for v in before if v.type is not one.type and v.type.erased() is one.type.erased()]
        return self._with_operand(site, k, self.pick(alike))

    def _callee(self) -> Fault | None:
        site = self.site(lambda op: op.callee is not None)
        if site is None:
            return None
        callee = self.other([f for f in self.functions if f is not self.program], site.op.callee)
        return self.changed(site, {"callee": callee}) if callee else None

    def _stage(self) -> Fault | None:
        """A callee that computes the same kind of thing for another stage: of as many operands and results."""
        site = self.site(lambda op: op.callee is not None)
        if site is None or site.op.callee is None:
            return None
        size = len(site.op.inputs), len(site.op.outputs)
        alike = [f for f in self.functions[1:] if (len(f.inputs), len(f.outputs)) == size and f is not site.op.callee]
        callee = self.pick(alike)
        return self.changed(site, {"callee": callee}) if callee else None

    def _add_dropped(self) -> Fault | None:
        k = self.random.randrange(2)
        return self.fault(self.site(_is("Add")), f"only operand {k}", lambda m, op, ins: [ins[k]])

    def _add_doubled(self) -> Fault | None:
        k = self.random.randrange(2)
        site = self.site(_is("Add"))
        return self.fault(
            site, f"operand {k} twice", lambda m, op, ins: m.add(op.spec, [ins[k]] * 2, op.attributes, op.outputs)
        )

    def _sum_dropped(self) -> Fault | None:
        k = self.random.randrange(2)
        return self.fault(self.site(_is("Accumulate")), f"only operand {k}", lambda m, op, ins: [ins[k]])

    def _sum_doubled(self) -> Fault | None:
        def twice(m: Rebuild, op: Op, ins: list[Value]) -> list[Value]:
            once = m.add(op.spec, ins, op.attributes, op.outputs)
            return m.add(op.spec, [once[0], ins[1]], op.attributes, op.outputs)

        return self.fault(self.site(_is("Accumulate")), "operand 1 twice", twice)

    def _constant(self) -> Fault | None:
        site = self.site(_is("Constant"))
        if site is None:
            return None
        return self.changed(site, {"value": tuple(type(x)(2 * x + 1) for x in site.op.attributes["value"])})

    def _scale_forgotten(self) -> Fault | None:
        scales = self.site(lambda op: op.op_type in ("Mul", "Div"))
        return self.fault(scales, "operand 0 as it is", lambda m, op, ins: ins[:1])

    def _attribute(self) -> Fault | None:
        """A number among the attributes of a computing op changed, or two of a tuple swapped."""
        site = self.site(lambda op: op.spec.comm is None and op.op_type != "Constant" and _numeric(op))
        if site is None:
            return None
        name = self.pick(_numeric(site.op))
        x = site.op.attributes[name]
        if isinstance(x, tuple):
            new: Any = x[::-1] if x[::-1] != x else tuple(k + 1 for k in x)
        else:
            new = not x if isinstance(x, bool) else x + 1 if isinstance(x, int) else 2 * x + 0.5
        return self.changed(site, {name: new})

    def _op(self) -> Fault | None:
        """Another op of as many operands and results."""
        families = [
            ("Add", "Sub", "Mul", "Div", "Max", "Min"),
            ("Tanh", "Relu", "Sigmoid", "Gelu", "Identity", "Neg", "Exp", "Log", "ZerosLike"),
            ("ReduceSum", "ReduceMax", "ReduceMin"),
            ("TanhGrad", "ReluGrad", "SigmoidGrad", "GeluGrad"),
        ]
        site = self.site(lambda op: any(op.op_type in row for row in families))
        if site is None:
            return None
        name = self.other(next(row for row in families if site.op.op_type in row), site.op.op_type)
        return self.fault(
            site, f"as {name}", lambda m, op, ins: m.add(lookup(name), ins, _taken(name, op.attributes), op.outputs)
        )

    def _update(self) -> Fault | None:
        """The next values of two inputs swapped."""
        rows = list(self.program.updates.items())
        pairs = [(a, b) for a in rows for b in rows if a is not b and a[1].type is b[1].type]
        pair = self.pick(pairs)
        if pair is None:
            return None
        (a, b), (c, d) = pair
        return Fault(f"updates of %{b.name} and %{d.name} swapped", updates={**self.program.updates, a: d, c: b})


def mutants(programs: Sequence[Function], count: int, seed: int = 0) -> Iterator[tuple[int, Mutant]]:
    """`count` mutants, the kinds in turn, each of a program drawn at random: (number of the program, mutant)."""
    rng = random.Random(seed)
    mutators = [Mutator(f, seed + i) for i, f in enumerate(programs)]
    made = 0
    while made < count:
        kind = KINDS[made % len(KINDS)]
        for _ in range(200):
            i = rng.randrange(len(programs))
            mutant = mutators[i].draw(kind)
            if mutant is not None:
                made += 1
                yield i, mutant
                break
        else:
            raise ValueError(f"no program has a place for a fault of kind {kind}")


def _is(name: str) -> Callable[[Op], bool]:
    return lambda op: op.op_type == name


def _taken(kind: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the attributes that an op of this kind takes: others are refused whatever else is wrong."""
    return {name: x for name, x in attributes.items() if name in lookup(kind).attributes}


def _halo_of(op: Op) -> Halo:
    return op.attributes["lo"], op.attributes["hi"], op.attributes.get("fill", 0.0)


def _slices(t: Tensor) -> list[tuple[str, Shard]]:
    """The mesh axes along which a value may have a halo: it is split in slices; and its placement."""
    if not isinstance(t.device, Mesh):
        return []
    found = [(t.device.axes[i], p) for i, p in splits(t.placements) if i != t.device.time]
    return [(axis, p) for axis, p in found if p.outer == 1 and not p.shift]


def _moves(op: Op) -> bool:
    return op.spec.comm is not None and op.callee is None and op.spec.bundle is None and len(op.inputs) == 1


def _numeric(op: Op) -> list[str]:
    def numeric(x: Any) -> bool:
        if isinstance(x, tuple):
            return bool(x) and all(isinstance(k, int | float) for k in x)
        return isinstance(x, int | float)

    return [name for name, x in op.attributes.items() if name not in ("place", "device") and numeric(x)]


def _tensors(t: Type) -> tuple[Tensor, ...]:
    return tuple(x for u in t.types for x in _tensors(u)) if isinstance(t, Tuple) else (t,)


def _with(t: Type, k: int, new: Tensor) -> Type:
    if isinstance(t, Tuple):
        return Tuple(new if i == k else x for i, x in enumerate(t.types))
    return new


def _meshes(t: Type) -> list[Mesh]:
    return list(dict.fromkeys(x.device for x in _tensors(t) if isinstance(x.device, Mesh)))


def _moments(t: Type) -> bool:
    return any(x.piece is not None and x.piece[1] < NOW for x in _tensors(t))
