"""Emits the scheduled program: calls of a cut program's bodies, in the order of a schedule's table, and transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from distir.ir.device import TIME, Device, Mesh
from distir.ir.function import NO_ATTRIBUTES, Attributes, Function, FunctionMaker, Op, Value
from distir.ir.spec import Spec, lookup
from distir.ir.type import REPLICATE, Tensor, Tuple, Type
from distir.transforms.append import Moved, append
from distir.transforms.pipeline.bodies import PACK, BodyKey, Cut, StageFunction, Subgraph, build_body, order_of
from distir.transforms.pipeline.phases import CELLS, PHASES, PROLOGUE, UPDATE
from distir.transforms.pipeline.schedule_table import Cell, Need, Table, interleave
from distir.transforms.roles import weights

CALL, SEND, RESTRICT, SCATTER, BROADCAST = map(lookup, ("Call", "Send", "Restrict", "MPIScatter", "MPIBroadcast"))


class Stages(NamedTuple):
    """Where stages run: `meshes[s]` is the mesh of stage s, `axis` names the axis along which the meshes lie."""

    meshes: Sequence[Mesh]
    axis: str
    host: Device | None = None
    """A device that holds all inputs, whole, before the first step."""


BodyPass = Callable[[Function, bool], Function]
"""(body, whether it runs once a microbatch) -> the transformed body. Hashable: bodies are cached by it."""


def pipeline(cut: Cut, stages: Stages, table: Table, bodies: BodyPass | None = None) -> Function:
    """The scheduled program of a placed function that is cut into bodies.

    Its inputs are the function's, in order: on the host if there is one; else a weight is on its home stage, and an
    input that several stages need is on a mesh of all stages. Its outputs are the function's. `bodies` is applied to
    each body. Raises InfeasibleError if the table would deadlock.
    """
    return _Emitter(cut, stages, table, bodies).emit()


At = tuple[Value, int, int | None]
"""A value of the placed function, the stage it is on, its microbatch (None: it does not vary)."""


class _Emitter:
    def __init__(self, cut: Cut, stages: Stages, table: Table, bodies: BodyPass | None) -> None:
        self.cut, self.table, self.passes = cut, table, bodies
        meshes = self.meshes = stages.meshes
        self.host, self.axis = stages.host, stages.axis
        self.unsent: list[At] = []
        self.microbatches = meshes[0].size(TIME)
        self.maker = FunctionMaker(cut.function.name)
        self.at: dict[At, Value] = {}
        self.bundles: dict[BodyKey, Value] = {}  # static bundles
        self.saved: dict[tuple[int, int, str, str], Value] = {}
        """Bundles of saved values, by stage, microbatch, producing phase and consuming phase."""
        self.running: dict[BodyKey, Value] = {}
        self.groups = {(key.stage, key.phase): group for key, group in cut.groups.items() if not key.round}
        self.needs = {at: _needed(cut, group) for at, group in self.groups.items()}
        self.moved = {mesh: Moved(mesh) for mesh in meshes}
        self.bodies: dict[tuple[BodyKey, bool, bool], StageFunction] = {}
        """Those in use, by whether for the first and for the last microbatch."""
        self.to = [Attributes(to=mesh) for mesh in meshes]
        self.beside = [
            [o for o, other in enumerate(meshes) if other is mesh and o != s] for s, mesh in enumerate(meshes)
        ]
        self.updated = {old: cut.owner[new].stage for new, old in cut.function.updates.items() if new in cut.owner}
        self.reading_stages: dict[Value, list[int]] = {}
        for key, group in cut.groups.items():
            for v in (*group.static, *group.received):
                if key.stage not in self.reading_stages.setdefault(v, []):
                    self.reading_stages[v].append(key.stage)

    def emit(self) -> Function:
        self._inputs()
        for key in order_of(self.cut.groups, PROLOGUE):
            self._once(key)
        interleave(self.table, self._needs, self._cell, self._send_all)
        for op in self.cut.joins:
            self._join(op)
        for key in order_of(self.cut.groups, UPDATE):
            self._once(key)
        source = self.cut.function
        outputs = [self._output(v) for v in source.outputs]
        self.maker.set_outputs(outputs)
        new = dict(zip(source.outputs, outputs, strict=True))
        place = dict(zip(source.inputs, self.maker.inputs, strict=True))
        self.maker.updates = {new[a]: place[b] for a, b in source.updates.items()}
        self.maker.sources = {new[v]: shape for v, shape in source.sources.items()}
        return self.maker.finalize()

    # ---- where values are

    def _inputs(self) -> None:
        source = self.cut.function
        stationary = {*weights(source), *source.updates.values()}
        everywhere: Mesh | None = None
        for v in source.inputs:
            stages = sorted(self.reading_stages.get(v, [])) or [0]
            t = v.type
            if not isinstance(t, Tensor):
                raise TypeError(f"input %{v.name} is not a tensor")
            if self.host is not None:
                x = self.maker.add_input_value(v.name, Tensor(t.dtype, t.global_shape, self.host), v.role)
                for s in [self._home(v, stages)] if v in stationary else stages:
                    self._distribute(v, x, t, s)
            elif v in stationary or len({self.meshes[s] for s in stages}) == 1:
                home = self._home(v, stages)
                self.at[v, home, None] = self.maker.add_input_value(v.name, self._type(v, home), v.role)
            else:
                everywhere = everywhere or _union(self.meshes, self.axis)
                wide = Tensor(t.dtype, t.shape, everywhere, (REPLICATE, *t.placements))
                x = self.maker.add_input_value(v.name, wide, v.role)
                for s in stages:
                    self.at[v, s, None] = self._beside(v, s, None) or self._on(v, s, RESTRICT, x, self.to[s])

    def _home(self, v: Value, stages: Sequence[int]) -> int:
        """The stage that updates a weight; without an update, the first that uses it."""
        return self.updated.get(v, stages[0])

    def _distribute(self, v: Value, x: Value, t: Tensor, s: int) -> None:
        if any(p is not REPLICATE for p in t.placements):
            attributes = Attributes(to=self.meshes[s], placements=t.placements)
            self.at[v, s, None] = self._on(v, s, SCATTER, x, attributes)
        else:
            self.at[v, s, None] = self._on(v, s, BROADCAST, x, self.to[s])

    def _type(self, v: Value, s: int) -> Type:
        """The value's type on a stage."""
        return self.moved[self.meshes[s]][v.type]

    def _on(self, v: Value, s: int, spec: Spec, x: Value, attributes: Attributes, i: int | None = None) -> Value:
        """Append the op that moves `x` to a stage."""
        t = self._type(v, s)
        return append(self.maker, spec, (x,), attributes, (v.name,), (t if i is None else t.at(i),))[0]

    def _get(self, v: Value, s: int, i: int | None) -> Value:
        """The value on a stage; a Send is appended if it is not there yet."""
        if i is not None and not self.cut.varying[v.type]:
            i = None
        here = self.at.get((v, s, i))
        if here is None:
            here = self._beside(v, s, i)
            if here is None:
                there = self.cut.owner[v].stage if v in self.cut.owner else self._found(v)
                there = there if (v, there, i) in self.at else self._found(v)
                here = self._on(v, s, SEND, self.at[v, there, i], self.to[s], i)
            self.at[v, s, i] = here
        return here

    def _beside(self, v: Value, s: int, i: int | None) -> Value | None:
        """The value on another stage of the same mesh, if one has it."""
        for o in self.beside[s]:
            if (v, o, i) in self.at:
                return self.at[v, o, i]
        return None

    def _found(self, v: Value) -> int:
        return next(s for s in range(len(self.meshes)) if (v, s, None) in self.at)

    def _output(self, v: Value) -> Value:
        key = self.cut.owner.get(v)
        return self.at[v, key.stage if key else self._found(v), None]

    # ---- calls

    def _once(self, key: BodyKey) -> None:
        group = self.cut.groups[key]
        body = self._body(group, True, True)
        args = self._static(group, body)
        if group.summed:
            args.append(self._totals(group))
        self._call(group, body, args, None)

    def _needs(self, cell: Cell) -> list[Need]:
        s, phase, i = cell
        return [(key.stage, key.phase, i) for key in self.needs.get((s, phase), ())]

    def _cell(self, cell: Cell) -> None:
        s, phase, i = cell
        group = self.groups.get((s, phase))
        if group is None:
            return
        key = group.key
        last = i == self.microbatches - 1 and any(t.reduce for t in group.totals)
        body = self._body(group, i == 0, last or self.microbatches == 1)
        args = self._static(group, body)
        args += [self.saved[key.stage, i, made, key.phase] for made in body.saved]
        args += [self._get(v, key.stage, i) for v in group.received]
        if body.running:
            args.append(self.running[key])
        self._call(group, body, args, i)

    def _body(self, group: Subgraph, first: bool, last: bool) -> StageFunction:
        if not group.totals:
            first = last = True
        body = self.bodies.get((group.key, first, last))
        if body is None:
            body = self.bodies[group.key, first, last] = self._built(group, first, last)
        return body

    def _built(self, group: Subgraph, first: bool, last: bool) -> StageFunction:
        mesh = self.meshes[group.key.stage]
        key = group.key, mesh, first, last, self.passes
        body = self.cut.bodies.get(key)
        if body is None:
            body = build_body(self.cut, group, self.moved[mesh], self.microbatches, first, last)
            if self.passes is not None:
                body = body._replace(function=self.passes(body.function, PHASES[group.key.phase].timed))
            self.cut.bodies[key] = body
        return body

    def _static(self, group: Subgraph, body: StageFunction) -> list[Value]:
        if not body.static:
            return []
        if group.key not in self.bundles:
            values = [self._get(v, group.key.stage, None) for v in group.static]
            self.bundles[group.key] = self._pack(f"{body.function.name}.static", values)
        return [self.bundles[group.key]]

    def _totals(self, group: Subgraph) -> Value:
        """The finished sums that an update takes, as one bundle: the body's own, if a single body made just these."""
        parts: dict[Value, Value] = {}
        for key in dict.fromkeys(self.cut.owner[t.part] for t in group.summed):
            owned = [t.part for t in self.cut.groups[key].totals]
            if owned == [t.part for t in group.summed]:
                return self.running[key]
            values = self.maker.add_op("Unpack", None, [self.running[key]], None, (), [v.name for v in owned])
            parts.update(zip(owned, values if isinstance(values, tuple) else (values,), strict=True))
        return self._pack("totals", [parts[t.part] for t in group.summed])

    def _pack(self, name: str, values: Sequence[Value]) -> Value:
        t = Tuple([v.type for v in values])
        return append(self.maker, PACK, tuple(values), NO_ATTRIBUTES, (name,), (t,))[0]

    def _call(self, group: Subgraph, body: StageFunction, args: Sequence[Value], i: int | None) -> None:
        key = group.key
        results = body.function.outputs
        if i is None:
            attributes = Attributes(callee=body.function)
            names, types = [v.name for v in results], [v.type for v in results]
        else:
            attributes = Attributes(mb=i, callee=body.function)
            names, types = [f"{v.name}.{i}" for v in results], [v.type.at(i) for v in results]
        outs = iter(append(self.maker, CALL, tuple(args), attributes, names, types))
        for consumer in group.residuals:
            self.saved[key.stage, i or 0, key.phase, consumer] = next(outs)
        for v in group.sends:
            self.at[v, key.stage, i if self.cut.varying[v.type] else None] = next(outs)
        if group.totals:
            self.running[key] = next(outs)
        self.unsent += [(v, s, i) for v in group.sends for s in self.reading_stages.get(v, ())]

    def _send_all(self) -> None:
        """Send the results of a time step after all its cells, so that no receive precedes the receiver's own cell."""
        for v, s, i in self.unsent:
            self._get(v, s, i)
        self.unsent.clear()

    def _join(self, op: Op) -> None:
        s = self.cut.owner[op.outputs[0]].stage
        pieces = [self._get(op.inputs[0], s, i) for i in range(self.microbatches)]
        name = op.outputs[0].name
        self.at[op.outputs[0], s, None] = self.maker.add_op(op.spec, name, pieces, op.attributes)


def _needed(cut: Cut, group: Subgraph) -> list[BodyKey]:
    """The bodies of the schedule's cells that make operands of a body, those that do not vary in time included."""
    received = [cut.owner[v] for v in group.received]
    saved = [BodyKey(phase, group.key.stage) for phase in group.saved]
    static = [cut.owner[v] for v in group.static if v in cut.owner and cut.owner[v].phase in CELLS]
    return list(dict.fromkeys([*received, *saved, *static]))


def _union(meshes: Sequence[Mesh], axis: str) -> Mesh:
    """A mesh of all stages' devices, with the stages as its outermost axis."""
    meshes = list(dict.fromkeys(meshes))
    axes = dict(zip(meshes[0].axes, meshes[0].sizes, strict=True))
    return Mesh([d for mesh in meshes for d in mesh.devices], {axis: len(meshes), **axes}, "all")
