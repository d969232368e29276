"""Lowering a Function to the flat lists that the loop runs (`maxplus`).

Every class of devices has streams: `compute`, one for the collectives along each mesh axis, one for what it sends to
and one for what it receives from each mesh or device, so that a waiting transfer does not delay another; under a
runtime also that of its host, which issues the ops. An op becomes one *part* for each class, or for each set of classes
that take part together. Free ops (views, bundles) have no part: their results are ready when the parts they depend on
are. A collective beside compute has a part on the compute stream, too: the seconds that compute loses (`beside`); it
needs nothing, and nothing needs it. A dependence that a stream's own order implies is left out. A callee is compiled
once; an input of a call is live only if it may arrive later than the streams that wait for it.

A function compiled for a second cost model takes over all that does not depend on seconds: what it was last compiled to
is kept with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from distir.executor.cost_model import CostModel
from distir.executor.cost_model.fusion import UNFUSED, Fused, fused, unwritten
from distir.executor.cost_model.seconds import in_8_bits
from distir.executor.simulator.beside import beside_compute
from distir.executor.simulator.beside_products import beside_products, is_of_a_microbatch, shares
from distir.executor.simulator.dependences import CodeBuilder
from distir.executor.simulator.device_classes import DeviceClasses, Home, Uses, classify, members
from distir.executor.simulator.eight_bits import SAME, EightBits, eight_bits
from distir.executor.simulator.equal_callees import shapes_of
from distir.executor.simulator.expanded_keys import expanded_keys, larger
from distir.executor.simulator.labels import COMMUNICATION, COMPUTE, HOST, RECV, SEND, axis_text, stream_name
from distir.executor.simulator.maxplus import Code, Issues, OpPart, OpPlan, Sent, Slots, Twin
from distir.executor.simulator.ring_attention import ring_attention
from distir.ir.cached import cached
from distir.ir.device import AxisNames, Device, Mesh
from distir.ir.errors import ModelError, UsageError
from distir.ir.function import Function, Op, Value, type_of
from distir.ir.host_runtime import Runtime
from distir.ir.mesh_form import MeshForm
from distir.ir.spec import lookup
from distir.ir.type import Tensor, Tuple, Type

_CALL = lookup("Call")
Where = tuple[int, str, Home | None]
"""A stream: of a class, its name, for transfers also the partner's home."""


class _Kind(NamedTuple):
    """The first op of a kind, where it is, what ops of the kind do not move, whether they run beside compute, the
    product or attention beside which they are sent in pieces, the share of its time that they have, what of them is in
    8 bits, and how many times what the program sends the runtime does."""

    op: Op
    function: Function
    fused: Fused
    beside: bool
    partner: Op | None
    share: float
    eight: EightBits
    times: int


class _Kinds:
    """The kinds of a program's ops, numbered: ops of one kind have the same cost and classes."""

    def __init__(self, program: Function, runtime: Runtime | None, slows: bool) -> None:
        self.first: list[_Kind] = []
        self._runtime, self._slows = runtime, slows
        self.repeated = frozenset([op.callee for op in program.ops if op.attributes.get("mb") is not None])
        """What is called for each microbatch."""
        self._numbers: dict[object, int] = {}
        self._of: dict[Function, list[int]] = {}
        self._unwritten: dict[Function, frozenset[Op]] = {}

    def unwritten(self, f: Function) -> frozenset[Op]:
        """The ops of a function whose results exist within kernels alone."""
        self.of(f)
        return self._unwritten[f]

    def of(self, f: Function) -> list[int]:
        """The kind of each op, -1 for a call."""
        found = self._of.get(f)
        if found is not None:
            return found
        numbers, out = self._numbers, list[int]()
        chains = fused(f, self._runtime, f in self.repeated)
        overlapped = beside_compute(f) if self._slows else frozenset[Op]()
        r = self._runtime
        products = beside_products(f) if r is not None and (r.overlaps_products or (r.fp8 and r.fp8_gathers)) else {}
        eights = eight_bits(f, r, products) if r is not None and r.fp8 else {}
        partners: dict[Op, Op] = {}
        if r is not None:
            partners = (products if r.overlaps_products else {}) | (ring_attention(f) if r.ring_attention else {})
        share = shares(partners)
        expanded = expanded_keys(f) if r is not None and r.expands_keys else {}
        for op in f.ops:
            spec = op.spec
            if spec is _CALL:
                out.append(-1)
                continue
            key: tuple[object, ...] = (spec, op.attributes.form, tuple(map(type_of, op.inputs)))
            chained, beside = chains.get(op, UNFUSED), op in overlapped
            partner = partners.get(op)
            eight, times = eights.get(op, SAME), expanded.get(op, 1)
            if beside or chained is not UNFUSED:  # rare, and slow to hash
                key = (*key, beside, chained)
            if partner is not None:
                key = (*key, partner.spec, partner.attributes.form, *map(type_of, partner.inputs), share[op])
            if eight is not SAME or times > 1:
                key = (*key, eight, times)
            if spec.route == "send":  # whatever it sends, of whichever microbatch
                t = op.inputs[0].type
                key = (spec, *_ends(op), t.bytes, t.placements if isinstance(t, Tensor) else None)
            n = numbers.get(key)
            if n is None:
                n = numbers[key] = len(numbers)
                self.first.append(_Kind(op, f, chained, beside, partner, share.get(op, 1.0), eight, times))
            out.append(n)
        self._of[f] = out
        self._unwritten[f] = frozenset([op for op, chained in chains.items() if unwritten(op, chained)])
        return out


@cached
def _kinds(program: Function, runtime: Runtime | None, slows: bool) -> _Kinds:
    """The kinds of a program's ops under a runtime; they do not depend on seconds. `slows`: of the cost model."""
    return _Kinds(program, runtime, slows)


class CompiledProgram:
    """A function and its callees, compiled for a cost model. `main` is its code; `streams` are (class, name)."""

    def __init__(self, function: Function, cost: CostModel, overlap: bool = True) -> None:
        self.function = function
        self.cost = cost
        self.overlap = overlap
        runtime = cost.runtime
        self._issued = runtime is not None and runtime.issues
        """Whether ops wait for their hosts."""
        self._waits = self._issued and runtime is not None and runtime.waits
        self._synchronous = runtime is not None and runtime.synchronous
        self._host = COMPUTE if runtime is not None and runtime.inline else HOST
        """The stream on which ops are issued."""
        self._in_turn = (r := cost.topology.regular) is not None and r.in_turn
        """Whether all that a device sends and receives shares a stream."""
        self.streams: list[tuple[int, str]] = []
        self._stream: dict[Where, int] = {}
        self._where: list[Where] = []
        self._plans: dict[int, OpPlan] = {}
        """Of each kind of op."""
        self._bodies: dict[Function, Code | Twin] = {}
        self._codes: dict[Function, Code] = {}
        self._situations: dict[Mesh, object] = {}
        self.default = self._default()
        joins = runtime and runtime.joins
        self._kinds = _kinds(function, joins, cost.slows)
        self._shapes = shapes_of(function)
        self._models: dict[object, Code] = {}
        """The first code of each shape and situation of a mesh."""
        uses = self._uses([*function.callees(), function])
        self.classes: DeviceClasses = classify(uses, cost.topology)
        self._joint_axes = tuple(dict.fromkeys([axis for _, axis in uses.axes if not isinstance(axis, str)]))
        last = CompiledProgram, overlap, self._issued, self._waits, self._host, self._in_turn, joins
        self._before = self._alike(function.cache.get(last))
        """The same function compiled for another cost model, from which this one differs by seconds alone."""
        self.main = self._compile(function, entry=True)
        self._before = None  # keeps no chain of cost models alive
        function.cache[last] = self

    @cached_property
    def unwritten(self) -> frozenset[Op]:
        """The ops of the program whose results exist within kernels alone: they take no memory.

        They are at the same places in all functions of a shape.
        """
        places: dict[object, list[int]] = {}
        found: list[Op] = []
        for f in (self.function, *self.function.callees()):
            key = self._shapes[f][0] if f in self._shapes else f
            if key not in places:
                here = self._kinds.unwritten(f)
                places[key] = [k for k, op in enumerate(f.ops) if op in here] if here else []
            found += [f.ops[k] for k in places[key]]
        return frozenset(found)

    def _alike(self, before: CompiledProgram | None) -> CompiledProgram | None:
        """`before`, if it has the same classes, streams and parts; None if not."""
        if before is None or before.classes.homes != self.classes.homes:
            return None
        self.streams, self._stream, self._where = list(before.streams), dict(before._stream), list(before._where)
        for kind, plan in before._plans.items():
            found = self._plans[kind] = self._plan(self._kinds.first[kind])
            if found.form != plan.form:
                self.streams, self._stream, self._where, self._plans = [], {}, [], {}
                return None
        return before

    def _default(self) -> Device | None:
        devices = self.cost.topology.devices[:1]
        return devices[0] if devices else None

    def home(self, t: Type) -> Home | None:
        """The home of a value of this type: the topology's first device if the type has none, None for an empty bundle.

        A bundle is where its first member is.
        """
        if t.device is not None:
            return t.device
        while isinstance(t, Tuple):
            if not t.types:
                return None
            t = t.types[0]
        if self.default is None:
            raise UsageError("the topology has no device for a program that is on none", "add one with add_device")
        return self.default

    def classes_of(self, t: Type) -> tuple[int, ...]:
        """The classes that hold a value of this type."""
        home = t.device or self.home(t)
        return self.classes.homes[home] if home is not None else ()

    def stream(self, c: int, name: str, partner: Home | None = None) -> int:
        """The number of a class's stream."""
        key: Where = (c, name, partner) if self.overlap or name == HOST else (c, COMPUTE, None)
        if self._in_turn and key[1] not in (HOST, COMPUTE):
            key = (c, COMMUNICATION, None)
        found = self._stream.get(key)
        if found is None:
            found = self._stream[key] = len(self.streams)
            self.streams.append((c, stream_name(*key[1:])))
            self._where.append(key)
        return found

    def _uses(self, functions: Iterable[Function]) -> Uses:
        """The homes, axes and transfers of all functions; of functions of one shape only the first is examined."""
        uses, kinds = Uses(), dict[Function, Iterable[int]]()
        first: dict[MeshForm, Function] = {}
        for f in functions:
            shape = self._shapes.get(f)
            inputs = f.inputs if shape is None else f.inputs[:1]  # else all are on one mesh
            for v in {v.type: v for v in inputs}.values():
                self._locate(uses, v, f)
            if shape is None or first.setdefault(shape[0], f) is f:
                kinds[f] = dict.fromkeys(self._kinds.of(f))
        used = dict.fromkeys(k for found in kinds.values() for k in found if k >= 0)
        axis = {k: self._use(uses, self._kinds.first[k].op, self._kinds.first[k].function) for k in used}
        axes = {n: dict.fromkeys(axis[k] for k in kinds[f] if k >= 0) for n, f in first.items()}
        for n, mesh in self._shapes.values():
            for a in axes[n]:
                if a is not None:
                    uses.axes[mesh, a] = None
        return uses

    def _locate(self, uses: Uses, v: Value, f: Function) -> None:
        if v.type is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise UsageError(f"{f.name}: %{v.name} has no type", "give the inputs' types, or call infer_types")
        if (home := self.home(v.type)) is not None:
            uses.homes[home] = None

    def _use(self, uses: Uses, op: Op, f: Function) -> AxisNames | None:
        """Note what an op uses; the mesh axis, or axes, along which it communicates."""
        for v in op.outputs:
            self._locate(uses, v, f)
        ins = [v.type for v in op.inputs]
        if self.cost.free(op.spec, op.attributes, ins):
            return None
        axis = self.cost.collective_axis(op.spec, op.attributes, ins)
        if axis is not None:
            uses.axes[ins[0].device, axis] = None  # type: ignore[index]
        elif op.spec.route == "send":
            uses.sends[_ends(op)] = None
        return axis

    def body(self, callee: Function) -> Code | Twin:
        """The code of a callee, or that of another callee that is equal up to its mesh."""
        found = self._bodies.get(callee)
        if found is None:
            found = self._bodies[callee] = self._twin(callee) or self.code(callee)
        return found

    def code(self, callee: Function) -> Code:
        """The code of a callee."""
        found = self._codes.get(callee)
        if found is None:
            found = self._codes[callee] = self._compile(callee, entry=False)
        return found

    def _twin(self, callee: Function) -> Twin | None:
        """The first code of the same shape, on a mesh in the same situation; None if there is none before."""
        shape = self._shapes.get(callee)
        if shape is None:
            return None
        number, mesh = shape
        key = number, callee in self._kinds.repeated, self._situation(mesh)
        model = self._models.get(key)
        if model is None:
            self._models[key] = self.code(callee)
            return None
        before = self.classes.homes[self._shapes[model.function][1]]
        classes = dict(zip(before, self.classes.homes[mesh], strict=True))
        streams: dict[int, int] = {}
        for s in model.streams:
            c, name, partner = self._where[s]
            streams[s] = self.stream(classes[c], name, partner)
        return Twin(callee, model, classes, streams, self.code)

    def _situation(self, mesh: Mesh) -> object:
        """The cache key of durations on a mesh: its form, its classes' devices, and which classes communicate."""
        found = self._situations.get(mesh)
        if found is None:
            here = self.classes.homes[mesh]
            what = tuple([self.cost.topology.spec(self.classes.first[c]) for c in here])
            meet = [
                (axis, tuple([here.index(c) for c in p.classes]), p.group)
                for axis in (*mesh.axes, *self._joint_axes)
                for p in self.classes.peers.get((mesh, axis), ())
            ]
            found = self._situations[mesh] = mesh.axes, mesh.sizes, what, tuple(meet)
        return found

    def _plan(self, kind: _Kind) -> OpPlan:
        op, _, chained, beside, partner, share, eight, times = kind
        ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
        result_classes = tuple([self.classes_of(t) for t in outs])
        spec, attrs, cost = op.spec, op.attributes, self.cost.in_16_bits if eight.wide else self.cost
        if cost.free(spec, attrs, ins):
            return OpPlan((), None, result_classes)
        if (axis := cost.collective_axis(spec, attrs, ins)) is not None:
            parts = list[OpPart]()
            waited = self._synchronous and is_of_a_microbatch(op.inputs[0])
            for p in self.classes.peers[ins[0].device, axis]:  # type: ignore[index]
                sent = (in_8_bits(ins), in_8_bits(outs)) if eight.sent else (ins, outs)
                if times > 1:
                    sent = [larger(t, times) for t in ins], [larger(t, times) for t in outs]
                seconds = alone = cost.collective(spec, attrs, *sent, p.group)
                if partner is not None and self.overlap:
                    least = min([self._seconds(partner, cost, c) for c in p.classes])
                    seconds = cost.exposed(alone, p.group.size, least * share)
                where = [(c, axis_text(axis), None) for c in p.classes]
                beside_it = [self.stream(c, COMPUTE) for c in p.classes] if waited else []
                message = None
                if spec.comm is not None and spec.comm.wire is not None:  # else what it sends only its cost model knows
                    size, (a, b) = cost.collective_bytes(spec, attrs, *sent, p.group), spec.comm.wire.sent(p.group.size)
                    message = Sent(size, size * a / b, p.group, p.group.nodes, alone)
                part = self._part(op, seconds, where, devices=p.group.size, communicates=True, busy=beside_it)
                parts.append(part._replace(message=message))
                hidden = partner is not None or (beside and not waited)
                if hidden and self.overlap and (lost := cost.beside(alone, p.group)):
                    parts += [self._lost(lost, c) for c in p.classes]
        elif spec.route == "send":
            return self._send(op, result_classes)
        elif (outward := cost.fan(spec)) is not None:
            parts = [self._fan(op, outward)]
        else:
            here = result_classes[0] if outs else self.classes_of(ins[0])
            moved = eight.moved(cost.runtime) if cost.runtime is not None else 0.0
            parts = [
                self._part(
                    op,
                    cost.compute(spec, attrs, ins, outs, self.classes.first[c], chained, moved),
                    [(c, COMPUTE, None)],
                    chained=chained,
                )
                for c in here
            ]
        return _plan(parts, result_classes)

    def _seconds(self, op: Op, cost: CostModel, c: int) -> float:
        """The seconds of an op of compute on a class."""
        ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
        return cost.compute(op.spec, op.attributes, ins, outs, self.classes.first[c])

    def _part(
        self,
        op: Op,
        seconds: float,
        where: Sequence[Where],
        ends: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
        devices: int = 1,
        chained: Fused = UNFUSED,
        communicates: bool = False,
        busy: Sequence[int] = (),
    ) -> OpPart:
        """A part on a stream of each class; `ends` are those where its operands and its results are, by default each.

        `devices` take part in it; the streams in `busy` wait for it, too.
        """
        streams = [self.stream(*w) for w in where]
        classes = tuple([c for c, _, _ in where])
        sources, targets = ends or (classes, classes)
        issues: Issues | None = None
        issue, cost = 0.0, self.cost
        if self._issued:
            more = cost.more_kernels(op.spec, [v.type for v in op.inputs])
            issue = cost.issue(op.spec, devices, chained, not communicates, more)
        if issue or (self._issued and self._host != HOST):  # a call is added to the first part that is issued
            hosts = [self.stream(c, self._host) for c in dict.fromkeys(classes)]
            issues = tuple([(host, issue) for host in hosts])
        streams = tuple(dict.fromkeys([*streams, *busy]))
        on = frozenset(streams)
        return OpPart(seconds, streams, classes, sources, targets, communicates, on, issues)

    def _lost(self, seconds: float, c: int) -> OpPart:
        """The part of a collective on the compute stream of a class: the compute that is lost beside it."""
        on = (self.stream(c, COMPUTE),)
        return OpPart(seconds, on, (c,), (), (), True, frozenset(on))

    def _send(self, op: Op, result_classes: tuple[tuple[int, ...], ...]) -> OpPlan:
        ins = [v.type for v in op.inputs]
        a, b = _ends(op)
        size, sent = float(sum([t.bytes for t in ins])), self.cost.bytes_sent(ins)
        regular = self.cost.topology.regular
        parts: list[OpPart] = []
        for p in self.classes.pairs[a, b]:
            where = (p.source, SEND, b), (p.target, RECV, a)
            seconds = self.cost.transfer(ins, p.link)
            nodes = None if regular is None else 1 + (p.link not in (regular.intra, regular.near_link))
            part = self._part(op, seconds, where, ((p.source,), (p.target,)), devices=2, communicates=True)
            parts.append(part._replace(message=Sent(size, sent, None, nodes, seconds)))
        return _plan(parts, result_classes)

    def _fan(self, op: Op, outward: bool) -> OpPart:
        """The part of a transfer between one device and a mesh: all take part at once."""
        ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
        root, mesh = (ins[0].device, outs[0].device) if outward else (outs[0].device, ins[0].device)
        roots, others = self.classes.homes[root], self.classes.homes[mesh]  # type: ignore[index]
        where: list[Where] = [(roots[0], SEND if outward else RECV, None)]
        where += [(c, RECV if outward else SEND, None) for c in others if c != roots[0]]
        ends = (roots, others) if outward else (others, roots)
        seconds = self.cost.between(op.spec, ins, outs, root, mesh)  # type: ignore[arg-type]
        return self._part(op, seconds, where, ends, len({root, *members(mesh)}), communicates=True)  # type: ignore[arg-type]

    def _compile(self, f: Function, entry: bool) -> Code:
        """The code of a function; with `entry` of the program itself, whose inputs are ready from the start."""
        before = self._before and (self._before.main if entry else self._before._codes.get(f))
        code = before.timed(self.streams, self._planned(f), self.body) if before else self._built(f, entry)
        if not entry and code.issues is not None:
            code.issues = _entered(code.issues, self.cost.enter())
        return code

    def _built(self, f: Function, entry: bool) -> Code:
        """The same, built anew; the issues without those of a call."""
        env: list[dict[Value, Slots]] = [{} for _ in self.classes.sizes]
        columns: list[tuple[int, int]] = []
        for i, v in enumerate(f.inputs):
            for c in self.classes_of(v.type):
                env[c][v] = () if entry else (len(columns),)
                if not entry:
                    columns.append((i, c))
        code = Code(f, self.streams, columns)
        code.issues = [] if self._issued else None
        builder = CodeBuilder(code, env, (lambda c: self.stream(c, self._host)) if self._waits else None)
        builder.run(self._planned(f), self.body)
        for k, v in enumerate(f.outputs):
            code.outputs += [(k, c, env[c][v]) for c in self.classes_of(v.type)]
        if not entry:
            builder.finish()
        return code

    def _planned(self, f: Function) -> Iterator[tuple[Op, OpPlan | None]]:
        """The ops with their plans; None for a call."""
        plans = self._plans
        for op, kind in zip(f.ops, self._kinds.of(f), strict=True):
            plan = plans.get(kind)
            if plan is None and kind >= 0:
                plan = plans[kind] = self._plan(self._kinds.first[kind])
            yield op, plan


def _entered(issues: list[Issues | None], seconds: float) -> list[Issues | None]:
    """The same, where the first part that each host issues in a function takes `seconds` more: those of the call."""
    entered: set[int] = set()
    out = list(issues)
    for k, issue in enumerate(issues):
        if issue is not None and any([host not in entered for host, _ in issue]):
            out[k] = tuple([(host, x + (0.0 if host in entered else seconds)) for host, x in issue])
            entered.update([host for host, _ in issue])
    return out


def _plan(parts: list[OpPart], result_classes: tuple[tuple[int, ...], ...]) -> OpPlan:
    simple = len(parts) == 1 and len(parts[0].on) == 1 and len(parts[0].classes) == 1
    return OpPlan(tuple(parts), parts[0] if simple else None, result_classes)


def _ends(op: Op) -> tuple[Home, Home]:
    a, b = op.inputs[0].type.device, op.outputs[0].type.device
    if a is None or b is None:
        raise ModelError(f"{op}: a Send is from a device or mesh to another")
    return a, b


def device_streams(program: CompiledProgram) -> Iterator[tuple[int, list[int]]]:
    """Each class with its streams."""
    for c in range(len(program.classes.sizes)):
        yield c, [s for s, (k, _) in enumerate(program.streams) if k == c]
