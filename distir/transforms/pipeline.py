"""Scheduling: calls the bodies of a cut program microbatch by microbatch, in the order of a schedule's table."""

from __future__ import annotations

from collections.abc import Sequence

from distir.ir.device import TIME, Device, Mesh
from distir.ir.function import NO_ATTRIBUTES, Attributes, Function, FunctionMaker, Op, Value
from distir.ir.spec import Spec, lookup
from distir.ir.type import REPLICATE, Tensor, Tuple, Type
from distir.transforms.bodies import PACK, Body, Cut, Group, Key, build_body, order_of
from distir.transforms.bucket import GATHERS, bucket
from distir.transforms.known import Moved, append
from distir.transforms.phases import BACKWARD, FORWARD, PROLOGUE, UPDATE
from distir.transforms.prefetch import prefetch
from distir.transforms.roles import weights
from distir.transforms.spread import DP
from distir.transforms.table import Need, Slot, Table, interleave

CALL, SEND, RESTRICT, SCATTER, BROADCAST = map(lookup, ("Call", "Send", "Restrict", "MPIScatter", "MPIBroadcast"))


def pipeline(
    cut: Cut, meshes: Sequence[Mesh], table: Table, host: Device | None = None, bucket_bytes: float = 0.0
) -> Function:
    """The scheduled program of a placed function that is cut into bodies; `meshes[s]` is where stage s runs.

    Its inputs are the function's, in order: on `host` if there is one; else a weight on its home stage, and what
    several stages need on a mesh over all of them. Its outputs are the function's. Sums over dp are in buckets of
    `bucket_bytes`, and so are gathers of weights (see `bucket` and `prefetch`). Raises InfeasibleError if the table
    would deadlock.
    """
    return _Emitter(cut, meshes, table, host, bucket_bytes).emit()


At = tuple[Value, int, int | None]
"""A value of the placed function, on a stage, of a microbatch (None: of all)."""


class _Emitter:
    def __init__(
        self, cut: Cut, meshes: Sequence[Mesh], table: Table, host: Device | None, bucket_bytes: float
    ) -> None:
        self.cut, self.meshes, self.table, self.host, self.bucket_bytes = cut, meshes, table, host, bucket_bytes
        self.unsent: list[At] = []
        self.microbatches = meshes[0].size(TIME)
        self.maker = FunctionMaker(cut.function.name)
        self.at: dict[At, Value] = {}
        self.bundles: dict[Key, Value] = {}  # static bundles
        self.saved: dict[tuple[int, int], Value] = {}  # (stage, microbatch)
        self.running: dict[Key, Value] = {}
        self.groups = {(key.stage, key.phase): group for key, group in cut.groups.items() if not key.round}
        self.needs = {
            at: list(dict.fromkeys([cut.owner[v] for v in (*group.received, *group.saved, *_timely(cut, group))]))
            for at, group in self.groups.items()
        }
        self.moved = {mesh: Moved(mesh) for mesh in meshes}
        self.to = [Attributes(to=mesh) for mesh in meshes]
        self.beside = [
            [o for o, other in enumerate(meshes) if other is mesh and o != s] for s, mesh in enumerate(meshes)
        ]
        self.updated = {old: cut.owner[new].stage for new, old in cut.function.updates.items() if new in cut.owner}
        self.wanted: dict[Value, list[int]] = {}
        for key, group in cut.groups.items():
            for v in (*group.static, *group.received):
                if key.stage not in self.wanted.setdefault(v, []):
                    self.wanted[v].append(key.stage)

    def emit(self) -> Function:
        self._inputs()
        for key in order_of(self.cut.groups, PROLOGUE):
            self._once(key)
        interleave(self.table, self._needs, self._slot, self._send_all)
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
        held = {*weights(source), *source.updates.values()}
        everywhere: Mesh | None = None
        for v in source.inputs:
            stages = sorted(self.wanted.get(v, [])) or [0]
            t = v.type
            if not isinstance(t, Tensor):
                raise TypeError(f"input %{v.name} is not a tensor")
            if self.host is not None:
                x = self.maker.add_input_value(v.name, Tensor(t.dtype, t.global_shape, self.host), v.role)
                for s in [self._home(v, stages)] if v in held else stages:
                    self._distribute(v, x, t, s)
            elif v in held or len({self.meshes[s] for s in stages}) == 1:
                home = self._home(v, stages)
                self.at[v, home, None] = self.maker.add_input_value(v.name, self._type(v, home), v.role)
            else:
                everywhere = everywhere or _union(self.meshes)
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
        """What the value is on a stage."""
        return self.moved[self.meshes[s]][v.type]

    def _on(self, v: Value, s: int, spec: Spec, x: Value, attributes: Attributes, i: int | None = None) -> Value:
        """Append the op that takes `x`, where it is, to a stage."""
        t = self._type(v, s)
        return append(self.maker, spec, (x,), attributes, (v.name,), (t if i is None else t.at(i),))[0]

    def _get(self, v: Value, s: int, i: int | None) -> Value:
        """The value on a stage: there already, or sent from where it is."""
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
        """The value as another stage on the same mesh has it."""
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

    def _once(self, key: Key) -> None:
        group = self.cut.groups[key]
        body = self._body(group, True, True)
        args = self._static(group, body)
        if group.summed:
            args.append(self._totals(group))
        self._call(group, body, args, None)

    def _needs(self, slot: Slot) -> list[Need]:
        s, phase, i = slot
        return [(key.stage, key.phase, i) for key in self.needs.get((s, phase), ())]

    def _slot(self, slot: Slot) -> None:
        s, phase, i = slot
        group = self.groups.get((s, phase))
        if group is None:
            return
        key = group.key
        last = i == self.microbatches - 1 and any(t.reduce for t in group.totals)
        body = self._body(group, i == 0, last or self.microbatches == 1)
        args = self._static(group, body)
        if body.saved:
            args.append(self.saved[key.stage, i])
        args += [self._get(v, key.stage, i) for v in group.received]
        if body.running:
            args.append(self.running[key])
        self._call(group, body, args, i)

    def _body(self, group: Group, first: bool, last: bool) -> Body:
        if not group.totals:
            first = last = True
        mesh = self.meshes[group.key.stage]
        key = group.key, mesh, first, last, self.bucket_bytes
        body = self.cut.bodies.get(key)
        if body is None:
            body = build_body(self.cut, group, self.moved[mesh], self.microbatches, first, last)
            if group.key.phase in (FORWARD, BACKWARD):
                function = bucket(body.function, DP, self.bucket_bytes)
                body = body._replace(function=prefetch(function, DP, self.bucket_bytes))
            elif group.key.phase == UPDATE:
                body = body._replace(function=bucket(body.function, DP, self.bucket_bytes, GATHERS))
            self.cut.bodies[key] = body
        return body

    def _static(self, group: Group, body: Body) -> list[Value]:
        if not body.static:
            return []
        if group.key not in self.bundles:
            values = [self._get(v, group.key.stage, None) for v in group.static]
            self.bundles[group.key] = self._pack(f"{body.function.name}.static", values)
        return [self.bundles[group.key]]

    def _totals(self, group: Group) -> Value:
        """The finished sums that an update takes, as one bundle: that of the one body that made them, if it is one."""
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

    def _call(self, group: Group, body: Body, args: Sequence[Value], i: int | None) -> None:
        key = group.key
        results = body.function.outputs
        if i is None:
            attributes = Attributes(callee=body.function)
            names, types = [v.name for v in results], [v.type for v in results]
        else:
            attributes = Attributes(mb=i, callee=body.function)
            names, types = [f"{v.name}.{i}" for v in results], [v.type.at(i) for v in results]
        outs = list(append(self.maker, CALL, tuple(args), attributes, names, types))
        if group.keeps:
            self.saved[key.stage, i or 0] = outs.pop(0)
        for v in group.sends:
            self.at[v, key.stage, i if self.cut.varying[v.type] else None] = outs.pop(0)
        if group.totals:
            self.running[key] = outs.pop(0)
        self.unsent += [(v, s, i) for v in group.sends for s in self.wanted.get(v, ())]

    def _send_all(self) -> None:
        """What the slots of a time step made: when all of them run, so that no receiver waits before its own slot."""
        for v, s, i in self.unsent:
            self._get(v, s, i)
        self.unsent.clear()

    def _join(self, op: Op) -> None:
        s = self.cut.owner[op.outputs[0]].stage
        pieces = [self._get(op.inputs[0], s, i) for i in range(self.microbatches)]
        name = op.outputs[0].name
        self.at[op.outputs[0], s, None] = self.maker.add_op(op.spec, name, pieces, op.attributes)


def _timely(cut: Cut, group: Group) -> list[Value]:
    """What a body takes that does not vary in time, and that a body of the schedule makes all the same."""
    return [v for v in group.static if v in cut.owner and cut.owner[v].phase in (FORWARD, BACKWARD)]


def _union(meshes: Sequence[Mesh]) -> Mesh:
    """A mesh over all stages, with the stages as its outermost axis."""
    meshes = list(dict.fromkeys(meshes))
    axes = dict(zip(meshes[0].axes, meshes[0].sizes, strict=True))
    return Mesh([d for mesh in meshes for d in mesh.devices], {"pp": len(meshes), **axes}, "all")
