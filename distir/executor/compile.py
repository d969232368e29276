"""Lowering a Function to the flat lists that the loop runs (`maxplus`).

Every class of devices has streams: `compute`, one for the collectives along each mesh axis, one for what it sends to
and one for what it receives from each mesh or device, so that a transfer that waits holds up no other. An op becomes
one *part* for each class, or each set of classes that meet. Free ops (views, bundles) have no part: what they make is
ready when the parts that it hangs on are. A dependence that a stream's own order already keeps is left out. A callee is
compiled once; of a call's inputs only those are live that may arrive after the streams that wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from distir.executor.cost_model import CostModel
from distir.executor.device_classes import Classes, Home, Uses, classify
from distir.executor.maxplus import Call, Code, Part, Plan, Slots
from distir.ir.device import Device, Mesh
from distir.ir.errors import ModelError, UsageError
from distir.ir.function import Function, Op, Value
from distir.ir.spec import lookup
from distir.ir.type import Tuple, Type

COMPUTE, SEND, RECV = "compute", "send", "recv"
_CALL = lookup("Call")
Where = tuple[int, str, Home | None]
"""A stream: of a class, its name, for transfers also the partner's home."""


class Program:
    """A function and its callees, compiled for a cost model. `main` is its code; `streams` are (class, name)."""

    def __init__(self, function: Function, cost: CostModel, overlap: bool = True) -> None:
        self.function = function
        self.cost = cost
        self.overlap = overlap
        self.streams: list[tuple[int, str]] = []
        self._stream: dict[Where, int] = {}
        self._plans: dict[int, Plan] = {}
        self._sends: dict[object, Plan] = {}
        self._bodies: dict[Function, Code] = {}
        self._held: dict[Type, tuple[int, ...]] = {}
        self.default = self._default()
        functions = [*function.callees(), function]
        self._kinds: dict[object, int] = {}
        """What decides an op's cost and classes, numbered."""
        self._first: list[tuple[Op, Function]] = []
        """The first op of each kind."""
        self._kind_of = {f: self._numbered(f) for f in functions}
        self.classes: Classes = classify(self._uses(functions), cost.topology)
        self.main = self._compile(function, entry=True)

    def _default(self) -> Device | None:
        devices = self.cost.topology.devices[:1]
        return devices[0] if devices else None

    def home(self, t: Type) -> Home | None:
        """Where a value of this type is: the topology's first device for one that is nowhere, None for no value at all.

        A bundle is where its first member is.
        """
        while isinstance(t, Tuple):
            if not t.types:
                return None
            t = t.types[0]
        home = t.device or self.default
        if home is None:
            raise UsageError("the topology has no device for a program that is on none", "add one with add_device")
        return home

    def held(self, t: Type) -> tuple[int, ...]:
        """The classes that hold a value of this type."""
        found = self._held.get(t)
        if found is None:
            home = self.home(t)
            found = self._held[t] = self.classes.homes[home] if home is not None else ()
        return found

    def stream(self, c: int, name: str, partner: Home | None = None) -> int:
        """The number of a class's stream."""
        key: Where = (c, name, partner) if self.overlap else (c, COMPUTE, None)
        found = self._stream.get(key)
        if found is None:
            found = self._stream[key] = len(self.streams)
            self.streams.append((c, shown(*key[1:])))
        return found

    def _numbered(self, f: Function) -> list[int]:
        """The kind of each op, -1 for a call."""
        kinds, out = self._kinds, list[int]()
        for op in f.ops:
            if op.spec is _CALL:
                out.append(-1)
                continue
            key = (op.spec, op.attributes or None, *[v.type for v in op.inputs])
            n = kinds.get(key)
            if n is None:
                n = kinds[key] = len(kinds)
                self._first.append((op, f))
            out.append(n)
        return out

    def _uses(self, functions: Iterable[Function]) -> Uses:
        uses = Uses()
        for f in functions:
            for v in f.inputs:
                self._locate(uses, v, f)
        for op, f in self._first:
            self._use(uses, op, f)
        return uses

    def _locate(self, uses: Uses, v: Value, f: Function) -> None:
        if v.type is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise UsageError(f"{f.name}: %{v.name} has no type", "give the inputs' types, or call infer_types")
        if (home := self.home(v.type)) is not None:
            uses.homes[home] = None

    def _use(self, uses: Uses, op: Op, f: Function) -> None:
        for v in (*op.inputs, *op.outputs):
            self._locate(uses, v, f)
        ins = [v.type for v in op.inputs]
        if self.cost.free(op.spec, op.attributes, ins):
            return
        axis = self.cost.collective_axis(op.spec, op.attributes, ins)
        if axis is not None:
            uses.axes[ins[0].device, axis] = None  # type: ignore[index]
        elif op.spec.name == "Send":
            uses.sends[_ends(op)] = None

    def body(self, callee: Function) -> Code:
        """The code of a callee."""
        found = self._bodies.get(callee)
        if found is None:
            found = self._bodies[callee] = self._compile(callee, entry=False)
        return found

    def _plan(self, op: Op) -> Plan:
        ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
        held = tuple([self.held(t) for t in outs])
        spec, attrs, cost = op.spec, op.attributes, self.cost
        if cost.free(spec, attrs, ins):
            return Plan((), None, held)
        if (axis := cost.collective_axis(spec, attrs, ins)) is not None:
            parts = [
                self._part(cost.collective(spec, attrs, ins, outs, p.group), [(c, axis, None) for c in p.classes])
                for p in self.classes.peers[ins[0].device, axis]  # type: ignore[index]
            ]
        elif spec.name == "Send":
            key = (_ends(op), ins[0].bytes)
            if key not in self._sends:
                self._sends[key] = self._send(op, held)
            return self._sends[key]
        elif (outward := cost.fan(spec)) is not None:
            parts = [self._fan(op, outward)]
        else:
            here = held[0] if outs else self.held(ins[0])
            parts = [
                self._part(cost.compute(spec, attrs, ins, outs, self.classes.first[c]), [(c, COMPUTE, None)])
                for c in here
            ]
        return _plan(parts, held)

    def _part(
        self,
        seconds: float,
        where: Sequence[Where],
        sources: tuple[int, ...] | None = None,
        targets: tuple[int, ...] | None = None,
    ) -> Part:
        """A part on a stream of each class. Without `sources` and `targets` each class feeds and fills itself."""
        streams = [self.stream(*w) for w in where]
        classes = tuple([c for c, _, _ in where])
        communicates = where[0][1] != COMPUTE
        ends = sources or classes, targets or classes
        return Part(seconds, tuple(dict.fromkeys(streams)), classes, *ends, communicates, frozenset(streams))

    def _send(self, op: Op, held: tuple[tuple[int, ...], ...]) -> Plan:
        ins = [v.type for v in op.inputs]
        a, b = _ends(op)
        parts: list[Part] = []
        for p in self.classes.pairs[a, b]:
            where = (p.source, SEND, b), (p.target, RECV, a)
            parts.append(self._part(self.cost.transfer(ins, p.link), where, (p.source,), (p.target,)))
        return _plan(parts, held)

    def _fan(self, op: Op, outward: bool) -> Part:
        """Between one device and a mesh: all of them meet."""
        ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
        root, mesh = (ins[0].device, outs[0].device) if outward else (outs[0].device, ins[0].device)
        roots, others = self.classes.homes[root], self.classes.homes[mesh]  # type: ignore[index]
        where: list[Where] = [(roots[0], SEND if outward else RECV, None)]
        where += [(c, RECV if outward else SEND, None) for c in others if c != roots[0]]
        ends = (roots, others) if outward else (others, roots)
        return self._part(self.cost.between(op.spec, ins, outs, root, mesh), where, *ends)  # type: ignore[arg-type]

    def _compile(self, f: Function, entry: bool) -> Code:
        """The code of a function; of the program itself (`entry`), whose inputs are there from the beginning."""
        env: list[dict[Value, Slots]] = [{} for _ in self.classes.sizes]
        columns: list[tuple[int, int]] = []
        for i, v in enumerate(f.inputs):
            for c in self.held(v.type):
                env[c][v] = () if entry else (len(columns),)
                if not entry:
                    columns.append((i, c))
        code = Code(f, self, columns)
        lowering = _Lowering(code, env)
        plans = self._plans
        for op, kind in zip(f.ops, self._kind_of[f], strict=True):
            if kind < 0:
                lowering.call(op, self.body(op.callee))  # type: ignore[arg-type]
                continue
            plan = plans.get(kind)
            if plan is None:
                plan = plans[kind] = self._plan(op)
            part = plan.simple
            if part is None:
                lowering.general(op, plan)
            else:
                lowering.simple(op, plan, part)
        for k, v in enumerate(f.outputs):
            code.outputs += [(k, c, env[c][v]) for c in self.held(v.type)]
        lowering.finish()
        return code


class _Lowering:
    """The state of compiling one function: what each value hangs on, and which streams dominate each slot."""

    def __init__(self, code: Code, env: list[dict[Value, Slots]]) -> None:
        self.code, self.env = code, env
        inputs = len(code.columns)
        self.dominated: list[frozenset[int]] = [frozenset()] * inputs
        """Streams whose clock is never again before the slot's time."""
        self.on: list[frozenset[int]] = [frozenset()] * inputs
        """Streams the slot is a part on."""
        self.parts: list[Part | Call] = []

    def simple(self, op: Op, plan: Plan, part: Part) -> None:
        """An op that is one part on one stream of one class."""
        env, dominated, s = self.env[part.sources[0]], self.dominated, part.streams[0]
        self.code.needs.append([j for v in op.inputs for j in env[v] if s not in dominated[j]])
        slot = (len(dominated),)
        for v in op.outputs:
            env[v] = slot
        dominated.append(part.on)
        self.on.append(part.on)
        self.parts.append(part)
        self.code.plans.append(plan)

    def general(self, op: Op, plan: Plan) -> None:
        """An op that is free, or has several parts, or several streams."""
        env, dominated = self.env, self.dominated
        self.code.plans.append(plan)
        if not plan.parts:
            self.code.views.append(self._free(op, plan))
            return
        for part in plan.parts:
            on = part.on
            slots = {j for c in part.sources for v in op.inputs for j in env[c][v]}
            self.code.needs.append([j for j in slots if on.isdisjoint(dominated[j])])
            for c in part.targets:
                for v in op.outputs:
                    env[c][v] = (len(dominated),)
            dominated.append(on)
            self.on.append(on)
            self.parts.append(part)

    def _free(self, op: Op, plan: Plan) -> list[Slots]:
        slots: list[Slots] = []
        for v, classes in zip(op.outputs, plan.classes, strict=True):
            for c in classes:
                here = self.env[c]
                found = [here[x] for x in op.inputs if x in here]
                here[v] = found[0] if len(found) == 1 else self._latest({j for js in found for j in js})
                slots.append(here[v])
        return slots

    def _latest(self, slots: set[int]) -> Slots:
        """The slots that matter: those that no later part on one of their streams outlasts."""
        last: dict[int, int] = {}
        for j in slots:
            for s in self.on[j]:
                last[s] = max(last.get(s, -1), j)
        return tuple([j for j in sorted(slots) if not any(last.get(s, -1) > j for s in self.dominated[j])])

    def call(self, op: Op, body: Code) -> None:
        """A call: which inputs are live, and the map for these."""
        passed = body.passed
        live: list[int] = []
        needs: list[Slots] = []
        given = [self.env[c][op.inputs[i]] for i, c in body.columns]
        dominated = self.dominated
        for j, slots in enumerate(given):
            if j not in passed:
                slots = tuple([k for k in slots if body.waits(j, dominated[k])])
            if slots:
                live.append(j)
                needs.append(slots)
        summary = body.summary(tuple(live))
        self.code.needs.append(needs)
        call = Call(body, tuple(live), summary.rows, given)
        self.parts.append(call)
        self.code.plans.append(call)
        for (k, c, _), below in zip(body.outputs, summary.dominated, strict=True):
            if not summary.rows:  # nothing enters: all is there from the beginning
                self.env[c][op.outputs[k]] = ()
                continue
            self.env[c][op.outputs[k]] = (len(dominated),)
            dominated.append(below)
            self.on.append(frozenset())

    def finish(self) -> None:
        """The loop's lists, and who waits for the inputs."""
        code, inputs = self.code, len(self.code.columns)
        for part in self.parts:
            if isinstance(part, Call):
                code.duration.append(0.0)
                code.stream.append(-1)
                code.more.append(part)
            else:
                code.duration.append(part.duration)
                code.stream.append(part.streams[0])
                code.more.append(part.streams[1:] or None)
        used = dict.fromkeys(p.body.streams if isinstance(p, Call) else p.streams for p in self.parts)
        code.streams = tuple(dict.fromkeys(s for streams in used for s in streams))
        code.passed = frozenset(j for _, _, slots in code.outputs for j in slots if j < inputs)
        code.consumers = [set() for _ in range(inputs)]
        if not inputs:
            return
        for part, needs in zip(self.parts, code.needs, strict=True):
            if isinstance(part, Call):
                self._consume_by_call(part, needs)
                continue
            for j in needs:
                if j < inputs:
                    code.consumers[j].add(part.on)

    def _consume_by_call(self, call: Call, needs: Sequence[Slots]) -> None:
        consumers, body = self.code.consumers, call.body
        for j, slots in zip(call.live, needs, strict=True):
            for k in slots:
                if k < len(consumers):
                    consumers[k] |= body.consumers[j]
                    if j in body.passed:
                        consumers[k].add(frozenset())


def shown(name: str, partner: Home | None) -> str:
    """The name of a stream as traces show it."""
    return f"{name} {partner.name if isinstance(partner, Mesh) else partner}" if partner is not None else name


def _plan(parts: list[Part], held: tuple[tuple[int, ...], ...]) -> Plan:
    simple = len(parts) == 1 and len(parts[0].streams) == 1 and len(parts[0].classes) == 1
    return Plan(tuple(parts), parts[0] if simple else None, held)


def _ends(op: Op) -> tuple[Home, Home]:
    a, b = op.inputs[0].type.device, op.outputs[0].type.device
    if a is None or b is None:
        raise ModelError(f"{op}: a Send is from a device or mesh to another")
    return a, b


def device_streams(program: Program) -> Iterator[tuple[int, list[int]]]:
    """Each class with its streams."""
    for c in range(len(program.classes.sizes)):
        yield c, [s for s, (k, _) in enumerate(program.streams) if k == c]
