"""Building the distributed program: every op on the mesh, placed as decided, with the collectives this takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distir.ir.device import TIME, Mesh
from distir.ir.errors import IRTypeError
from distir.ir.function import Attributes, Function, FunctionMaker, Op, Value, type_of
from distir.ir.infer import infer
from distir.ir.spec import FactorMapping, Spec, conversion
from distir.ir.type import REPLICATE, SUM, Placement, Shard, Tensor, Type
from distir.ops.rules import tensor
from distir.transforms.sharding.graph import Graph, Signature
from distir.transforms.sharding.place import Placed


def shard(graph: Graph, mesh: Mesh, decisions: Mapping[str, Placed]) -> Function:
    """The graph's function on `mesh`, with the placements decided for each axis; the others stay replicated.

    Operands are converted axis after axis in the order of `decisions`. The next value of an input is placed as it is.
    The result is typed on the time axis but not scheduled: `MPIAllreduce(axis="mb")` stands for a sum over time.
    """
    return _Builder(graph, mesh, decisions).build()


Collective = tuple[Spec, Attributes, Type]


class _Recipe(NamedTuple):
    """How an op is rebuilt: the conversions of its operands, its attributes, and the types of its results."""

    steps: list[tuple[str, list[Placement | None]]]
    """Axis by axis, the new placement of each operand; None where it does not change."""
    attributes: Attributes
    types: list[Type]


class _Builder:
    def __init__(self, graph: Graph, mesh: Mesh, decisions: Mapping[str, Placed]) -> None:
        self.graph, self.mesh = graph, mesh
        self.decisions = {a: placed for a, placed in decisions.items() if a in mesh.axes}
        self.maker = FunctionMaker(graph.function.name)
        self.moved: dict[tuple[Value, str, Placement], Value] = {}
        self.collectives: dict[tuple[Type, str, Placement], Collective | None] = {}
        self.env: list[Value] = []
        """The values on the mesh, by their numbers in the graph."""
        self.of: dict[Value, Op] = {}  # the forward op that a value's op differentiates
        self.due: dict[Value, tuple[str, ...]] = {}
        """Sums over microbatches that are to be reduced over devices, along these axes, once they are complete."""
        self.time = list(self.decisions).index(TIME) if TIME in self.decisions else None

    def build(self) -> Function:
        graph, source = self.graph, self.graph.function
        types = self._input_types()
        self.env = [self.maker.add_input_value(v.name, t, v.role) for v, t in zip(source.inputs, types, strict=True)]
        recipes: dict[tuple[object, ...], _Recipe] = {}
        taken = [placed.mappings for placed in self.decisions.values()]
        rows = zip(*taken, strict=True) if taken else [()] * len(source.ops)
        ids = zip(*[map(id, row) for row in taken], strict=True) if taken else [()] * len(source.ops)
        ops: dict[Op, Op] = {}
        env, of_value = self.env, self.of
        reduced = set[int]().union(*[placed.reduce for placed in self.decisions.values()])
        scattered = set[int]().union(*[placed.scatter for placed in self.decisions.values()])
        fresh, append, due = self.maker.fresh, self.maker.ops.append, self.due
        of_op = zip(source.ops, graph.sigs, graph.outs, graph.ins, rows, ids, strict=True)
        for op, sig, outs, numbers, mappings, as_ids in of_op:
            ins = list(map(env.__getitem__, numbers))
            of = ops.get(op.of) if op.of else None
            # memoised by signature, mappings and types; ids are safe: mappings live as long as the graph
            key = (sig.number, as_ids, tuple(map(type_of, ins)))
            if due and not due.keys().isdisjoint(ins):
                key += tuple([(k, due[v]) for k, v in enumerate(ins) if v in due])
            recipe = recipes.get(key)
            if recipe is None:
                recipe = recipes[key] = self._recipe(op, sig, mappings, ins)
            for axis, wants in recipe.steps:
                ins = [v if want is None else self.to(v, axis, want) for v, want in zip(ins, wants, strict=True)]
            if len(outs) == 1:  # as most
                made = [Value(fresh(op.outputs[0].name), recipe.types[0])]
            else:
                made = [Value(fresh(v.name), t) for v, t in zip(op.outputs, recipe.types, strict=True)]
            new = ops[op] = Op(op.spec, tuple(ins), recipe.attributes, tuple(made), of)
            append(new)
            if of is not None:
                for w in made:
                    of_value[w] = of
            if not reduced.isdisjoint(outs):
                made = [self._reduce(i, w) for i, w in zip(outs, made, strict=True)]
            if not scattered.isdisjoint(outs):
                self._scatter(outs, made)
            env += made
        outputs = [self._as_before(v, env[graph.index[v]]) for v in source.outputs]
        open_axes = {t: self._open_axes(t) for t in {v.type for v in outputs}}
        for k, v in enumerate(outputs):
            for axis in open_axes[v.type]:
                outputs[k] = self.to(outputs[k], axis, REPLICATE)
        self.maker.set_outputs(outputs)
        place = dict(zip(source.outputs, outputs, strict=True))
        self.maker.updates = {place[a]: env[graph.index[b]] for a, b in source.updates.items()}
        self.maker.sources = {place[v]: shape for v, shape in source.sources.items()}
        return self.maker.finalize()

    def _as_before(self, output: Value, v: Value) -> Value:
        """The value of an output; the next value of an input is placed as the input is."""
        old = self.graph.function.updates.get(output)
        if old is not None:
            want = tensor(self.env[self.graph.index[old]])
            if v.type is want:  # as most
                return v
            for axis in sorted(self.mesh.axes, key=lambda a: want.on(a) is not REPLICATE):  # gathered, then split
                if axis != TIME or want.on(axis) is REPLICATE:
                    v = self.to(v, axis, want.on(axis))
        return v

    def _input_types(self) -> list[Type]:
        splits = [self.decisions[a].inputs if a in self.decisions else {} for a in self.mesh.axes]
        made: dict[tuple[Type | Placement, ...], Type] = {}
        types: list[Type] = []
        for i, v in enumerate(self.graph.function.inputs):
            placements: list[Placement] = [split.get(i, REPLICATE) for split in splits]
            dims = [p.dim for p in placements if p.dim is not None]
            if len(dims) > len(set(dims)):  # no dim has a halo that several axes split
                placements = [p.plain for p in placements]
            key = v.type, *placements
            if key not in made:
                made[key] = Tensor.whole(tensor(v).dtype, self.graph.shapes[i], self.mesh, placements)
            types.append(made[key])
        return types

    def _recipe(self, op: Op, sig: Signature, mappings: Sequence[FactorMapping | None], ins: list[Value]) -> _Recipe:
        """The recipe for ops of that signature; converts the operands of the first."""
        mappings = self._in_ranges(sig, mappings)
        steps: list[tuple[str, list[Placement | None]]] = []
        free: list[tuple[str, Shard]] = []
        whole = [REPLICATE] * len(op.outputs)
        placed: dict[str, Sequence[Placement]] = {}  # the results, by axis
        for axis, mapping in zip(self.decisions, mappings, strict=True):
            have = [tensor(v).on(axis) for v in ins]
            wants = mapping.ins if mapping is not None else _passed(sig, have, self._done(axis, mappings, ins))
            if mapping is not None and all(p is REPLICATE for p in wants) and mapping.outs[0].dim is not None:
                free.append((axis, mapping.outs[0]))
            placed[axis] = mapping.outs if mapping is not None else [SUM] * len(whole) if SUM in wants else whole
            if any(h is not want for h, want in zip(have, wants, strict=True)):
                now = [None if h is want else want for h, want in zip(have, wants, strict=True)]
                new = [*self._out_of_the_way(ins, axis, now), (axis, now)]
                for a, row in new:
                    ins = [v if want is None else self.to(v, a, want) for v, want in zip(ins, row, strict=True)]
                steps += new
        extra: dict[str, Any] = {} if ins else {"device": self.mesh}
        if free:
            extra["place"] = tuple(free)
        attributes = Attributes({**op.attributes, **extra}) if extra else op.attributes
        # mappings give the results' placements: inference, which would derive them again, is left to `verify`
        rows = zip(*[placed.get(axis, whole) for axis in self.mesh.axes], strict=True)
        types: list[Type] = [
            Tensor.whole(tensor(v).dtype, tensor(v).shape, self.mesh, row)
            for v, row in zip(op.outputs, rows, strict=True)
        ]
        return _Recipe(steps, attributes, types)

    def _out_of_the_way(
        self, ins: Sequence[Value], axis: str, wants: Sequence[Placement | None]
    ) -> list[tuple[str, list[Placement | None]]]:
        """Conversions to make before those along an axis: operands are made whole along axes decided later, whose
        splits do not go together with the one that is wanted."""
        found: list[tuple[str, list[Placement | None]]] = []
        after = list(self.decisions)[list(self.decisions).index(axis) + 1 :]
        for k, (v, want) in enumerate(zip(ins, wants, strict=True)):
            if want is None or want.dim is None:
                continue
            others = [a for a in after if a != TIME and tensor(v).on(a).dim == want.dim]
            if others and not _fits(tensor(v), axis, want):
                row: list[Placement | None] = [REPLICATE if i == k else None for i in range(len(ins))]
                found += [(a, row) for a in others]
        return found

    def _in_ranges(self, sig: Signature, mappings: Sequence[FactorMapping | None]) -> Sequence[FactorMapping | None]:
        """The mappings without those inside a split that the op does not have, if it counts in the dim: such as of an
        op that works on the whole batch, of which an axis of replicas splits each microbatch."""
        given = [(m, self.mesh.size(axis)) for axis, m in zip(self.decisions, mappings, strict=True) if m is not None]
        if not sig.scattered(given):
            return mappings
        return [m if m is None or not sig.scattered([(m, 2)]) else None for m in mappings]

    def _done(self, axis: str, mappings: Sequence[FactorMapping | None], ins: Sequence[Value]) -> list[bool]:
        """Which operands are sums that the op takes when they are complete, and so reduced along the axis."""
        mapping = None if self.time is None else mappings[self.time]
        waits = mapping is not None and all(p is REPLICATE for p in mapping.ins)
        return [axis in self.due.get(v, ()) and (waits or not self._sums_in_time(v)) for v in ins]

    def _reduce(self, i: int, v: Value) -> Value:
        """Value number i, reduced where it is made if that was decided; a sum over microbatches, later."""
        for axis, placed in self.decisions.items():
            if i in placed.reduce and tensor(v).on(axis).kind is not None:
                if self._sums_in_time(v):
                    self.due[v] = (*self.due.get(v, ()), axis)
                else:
                    v = self.to(v, axis, REPLICATE)
        return v

    def _scatter(self, numbers: Sequence[int], made: Sequence[Value]) -> None:
        """Scatter those of the values that are to be scattered at once: `to` will find it done. Axis after axis, as
        operands are converted: a sum over an axis before that does not scatter it is reduced."""
        for i, v in zip(numbers, made, strict=True):
            rows = list(self.decisions.items())
            while rows and i not in rows[-1][1].scatter:
                rows.pop()
            for axis, placed in rows:
                if axis != TIME and tensor(v).on(axis).kind is not None:
                    v = self.to(v, axis, placed.scatter.get(i, REPLICATE))

    def _sums_in_time(self, v: Value) -> bool:
        """A sum over microbatches is reduced over devices once, where it is used: when it is complete."""
        return tensor(v).over_time.kind is not None

    def _open_axes(self, t: Type) -> list[str]:
        """The axes along which to convert an output: sums are reduced, microbatches joined; other splits stay."""
        placements = t.placements if isinstance(t, Tensor) else ()
        return [
            axis
            for axis, p in zip(self.mesh.axes, placements, strict=True)
            if p.kind is not None or (axis == TIME and p is not REPLICATE)
        ]

    def to(self, v: Value, axis: str, want: Placement) -> Value:
        """`v` placed as `want` along `axis`; each conversion is made once."""
        have = tensor(v).on(axis)
        if have is want:
            return v
        key = v, axis, want
        new = self.moved.get(key)
        if new is None:
            found = self._collective(v.type, axis, have, want)
            if found is None:
                new = self.to(self.to(v, axis, _between(have, want)), axis, want)
            else:
                of = self.of.get(v)
                spec, attributes, t = found
                new = Value(self.maker.fresh(v.name), t)
                self.maker.ops.append(Op(spec, (v,), attributes, (new,), of))
                if of is not None:
                    self.of[new] = of
            self.moved[key] = new
            if v in self.due:
                self.due[new] = self.due[v]
        return new

    def _collective(self, t: Type, axis: str, have: Placement, want: Placement) -> Collective | None:
        """The op that converts a value of type `t`, its attributes, and the type of its result; None if it takes
        several ops.
        """
        key = t, axis, want
        if key not in self.collectives:
            found = conversion(have, want)
            if found is not None:
                spec, attributes = found[0], Attributes({"axis": axis, **found[1]})
                self.collectives[key] = spec, attributes, infer(spec, attributes, (t,))[0]
            else:
                self.collectives[key] = None
        return self.collectives[key]


def _fits(t: Tensor, axis: str, want: Placement) -> bool:
    """Whether it can be placed so along an axis, as it is along the others."""
    try:
        t.placed(axis, want, t.piece)
    except IRTypeError:
        return False
    return True


def _between(have: Placement, want: Placement) -> Placement:
    """The next placement on the way from one to another that takes several ops: without halos, else replicated."""
    if have is not have.plain:
        return have.plain
    return want.plain if want is not want.plain else REPLICATE


def _passed(sig: Signature, have: Sequence[Placement], done: Sequence[bool]) -> Sequence[Placement]:
    """The operand placements of an op that is not split: a Partial passes where the op is linear, all else is
    replicated. A Partial that is `done` does not pass.
    """
    partial = frozenset(k for k, p in enumerate(have) if p is SUM)
    passes = partial and not any([done[k] for k in partial]) and all(p is SUM or p is REPLICATE for p in have)
    if passes and sig.spec.addends:
        return [SUM] * len(have)
    return have if passes and partial in sig.linear else [REPLICATE] * len(have)
