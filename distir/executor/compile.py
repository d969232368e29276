"""Lowering a Function to flat lists that one loop runs, and calls to max-plus maps.

Every class of devices has streams: `compute`, one for the collectives along each mesh axis, `send` and `recv`. An op
becomes one *part* for each class, or each set of classes that meet. In program order, a part starts when its streams
and its inputs are ready, and all of them are ready again when it ends:

    start = max(clock[streams], ready[inputs]);  clock[streams] = ready[part] = start + duration

Free ops (views, bundles) have no part: what they make is ready when the parts that it hangs on are. A dependence that a
stream's own order already keeps is left out.

A call is a max-plus map from (clocks of the streams it uses, times of its inputs) to (clocks, times of its outputs).
Its columns are found by the same loop, run once an entry with all others at minus infinity. As every stream keeps
program order and no duration depends on time, the map is exact: with durations on a grid of 2^-44 s, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from distir.executor.cost_model import CostModel
from distir.executor.device_classes import Classes, Home, Uses, classify
from distir.ir.device import Device
from distir.ir.errors import ModelError, UsageError
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tuple, Type

NEVER = float("-inf")
COMPUTE, SEND, RECV = "compute", "send", "recv"
Slots = tuple[int, ...]
"""Parts (or columns) on which a value hangs: it is ready when all of them are; without any, from the beginning."""


class Part(NamedTuple):
    """An op on one class of devices, or on classes that meet. `streams` are those of `classes`, one each."""

    duration: float
    streams: tuple[int, ...]
    classes: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    communicates: bool
    on: frozenset[int]


class Plan(NamedTuple):
    """What becomes of an op. `simple` is its part where there is only one, on one stream."""

    parts: tuple[Part, ...]
    simple: Part | None
    classes: tuple[tuple[int, ...], ...]
    """For each result, the classes that hold it."""


class Call:
    """A call in a program: its body, which of the body's inputs are live, the map, and what each input hangs on."""

    __slots__ = ("body", "given", "live", "rows", "streams")

    def __init__(
        self, body: Code, live: Slots, rows: Sequence[Sequence[tuple[int, float]]], given: list[Slots]
    ) -> None:
        self.body, self.live, self.rows, self.given, self.streams = body, live, rows, given, body.streams


class Summary(NamedTuple):
    """A body's map at some live inputs: rows of (column, weight), and by which streams each output is dominated."""

    rows: list[list[tuple[int, float]]]
    dominated: list[frozenset[int]]


class Column(NamedTuple):
    """Times when one entry is at 0 and all others never: of the streams, of every slot."""

    clock: list[float]
    ready: list[float]


class Code:
    """A compiled function. Slots are numbered: first a body's inputs (value and class), then parts in program order.

    `duration`, `stream`, `needs`, `more` are the loop's lists: `more` is None for a part on one stream, the other
    streams of a part on several, a `Call`, or `()` never. A call takes a slot an output and class.
    """

    def __init__(self, function: Function, program: Program, columns: list[tuple[int, int]]) -> None:
        self.function = function
        self.program = program
        self.columns = columns
        """(input, class) of each input slot."""
        self.plans: list[Plan | Call] = []
        self.views: list[list[Slots]] = []
        """For each free op, in order, what its results hang on, class by class of `Plan.classes`."""
        self.outputs: list[tuple[int, int, Slots]] = []
        """(output, class, what it hangs on)"""
        self.streams: tuple[int, ...] = ()
        self.duration: list[float] = []
        self.stream: list[int] = []
        self.needs: list[Sequence[Any]] = []
        self.more: list[Any] = []
        self.consumers: list[set[frozenset[int]]] = []
        """For each input slot, the streams of each part that waits for it; an empty set: somewhere unknown."""
        self.passed: frozenset[int] = frozenset()
        """Input slots that outputs hang on."""
        self._waits: dict[tuple[int, frozenset[int]], bool] = {}
        self._column: dict[int, Column] = {}
        self._summary: dict[Slots, Summary] = {}

    def run(self, clock: list[float], ready: list[float]) -> list[list[float]]:
        """The loop. `clock` (of all streams) changes, `ready` (of the inputs) grows; what entered each call returns."""
        entries: list[list[float]] = []
        append = ready.append
        for d, s, needs, more in zip(self.duration, self.stream, self.needs, self.more, strict=True):
            if more is None:
                t = clock[s]
                for j in needs:
                    r = ready[j]
                    if r > t:
                        t = r
                clock[s] = t = t + d
                append(t)
            elif more.__class__ is tuple:
                t = clock[s]
                for x in more:
                    if clock[x] > t:
                        t = clock[x]
                for j in needs:
                    r = ready[j]
                    if r > t:
                        t = r
                clock[s] = t = t + d
                for x in more:
                    clock[x] = t
                append(t)
            else:
                enter = [clock[x] for x in more.streams]
                for slots in needs:
                    enter.append(max([ready[j] for j in slots]))
                left = [max([enter[k] + w for k, w in row]) for row in more.rows]
                for x, t in zip(more.streams, left, strict=False):
                    clock[x] = t
                ready += left[len(more.streams) :]
                entries.append(enter)
        return entries

    def waits(self, j: int, dominated: frozenset[int]) -> bool:
        """Whether anything may wait for input slot j, if it is never later than the clocks of these streams."""
        key = (j, dominated)
        found = self._waits.get(key)
        if found is None:
            found = self._waits[key] = any(dominated.isdisjoint(s) for s in self.consumers[j])
        return found

    def column(self, k: int) -> Column:
        """Entry k: the streams, then the input slots."""
        found = self._column.get(k)
        if found is None:
            clock = [NEVER] * len(self.program.streams)
            ready = [NEVER] * len(self.columns)
            if k < len(self.streams):
                clock[self.streams[k]] = 0.0
            else:
                ready[k - len(self.streams)] = 0.0
            self.run(clock, ready)
            found = self._column[k] = Column([clock[s] for s in self.streams], ready)
        return found

    def summary(self, live: Slots) -> Summary:
        """The map whose entries are the streams and the live input slots."""
        found = self._summary.get(live)
        if found is None:
            found = self._summary[live] = self._summarise(live)
        return found

    def _summarise(self, live: Slots) -> Summary:
        n = len(self.streams)
        columns = [self.column(k) for k in (*range(n), *(n + j for j in live))]
        rows = [[c.clock[i] for c in columns] for i in range(n)]
        for _, _, slots in self.outputs:
            rows.append([max([c.ready[j] for j in slots], default=NEVER) for c in columns])
        dominated: list[frozenset[int]] = []
        for row in rows[n:]:
            above = [i for i in range(n) if all(x <= y for x, y in zip(row, rows[i], strict=True))]
            dominated.append(frozenset(self.streams[i] for i in above))
        sparse = [[(k, w) for k, w in enumerate(row) if w != NEVER] or [(0, NEVER)] for row in rows]
        return Summary(sparse if columns else [], dominated)


class Program:
    """A function and its callees, compiled for a cost model. `main` is its code; `streams` are (class, name)."""

    def __init__(self, function: Function, cost: CostModel, overlap: bool = True) -> None:
        self.function = function
        self.cost = cost
        self.overlap = overlap
        self.streams: list[tuple[int, str]] = []
        self._stream: dict[tuple[int, str], int] = {}
        self._plans: dict[object, Plan] = {}
        self._sends: dict[object, Plan] = {}
        self._bodies: dict[Function, Code] = {}
        self._held: dict[Type, tuple[int, ...]] = {}
        self.default = self._default()
        functions = [*function.callees(), function]
        self._signatures = {f: [_signature(op) for op in f.ops] for f in functions}
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

    def stream(self, c: int, name: str) -> int:
        """The number of a class's stream."""
        key = (c, name if self.overlap else COMPUTE)
        found = self._stream.get(key)
        if found is None:
            found = self._stream[key] = len(self.streams)
            self.streams.append(key)
        return found

    def _uses(self, functions: Iterable[Function]) -> Uses:
        uses, seen = Uses(), set[object]()
        for f in functions:
            for v in f.inputs:
                self._locate(uses, v, f)
            for op, key in zip(f.ops, self._signatures[f], strict=True):
                if key not in seen:
                    seen.add(key)
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
        if op.callee is not None or self.cost.free(op.spec, op.attributes, ins):
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
                self._part(cost.collective(spec, attrs, ins, outs, p.group), [(c, axis) for c in p.classes])
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
                self._part(cost.compute(spec, attrs, ins, outs, self.classes.first[c]), [(c, COMPUTE)]) for c in here
            ]
        return _plan(parts, held)

    def _part(
        self,
        seconds: float,
        where: list[tuple[int, str]],
        sources: tuple[int, ...] | None = None,
        targets: tuple[int, ...] | None = None,
    ) -> Part:
        """A part on a stream of each class. Without `sources` and `targets` each class feeds and fills itself."""
        streams = [self.stream(c, name) for c, name in where]
        classes = tuple([c for c, _ in where])
        communicates = where[0][1] != COMPUTE
        ends = sources or classes, targets or classes
        return Part(seconds, tuple(dict.fromkeys(streams)), classes, *ends, communicates, frozenset(streams))

    def _send(self, op: Op, held: tuple[tuple[int, ...], ...]) -> Plan:
        ins = [v.type for v in op.inputs]
        parts = [
            self._part(self.cost.transfer(ins, p.link), [(p.source, SEND), (p.target, RECV)], (p.source,), (p.target,))
            for p in self.classes.pairs[_ends(op)]
        ]
        return _plan(parts, held)

    def _fan(self, op: Op, outward: bool) -> Part:
        """Between one device and a mesh: all of them meet."""
        ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
        root, mesh = (ins[0].device, outs[0].device) if outward else (outs[0].device, ins[0].device)
        roots, others = self.classes.homes[root], self.classes.homes[mesh]  # type: ignore[index]
        where = [(roots[0], SEND if outward else RECV)]
        where += [(c, RECV if outward else SEND) for c in others if c != roots[0]]
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
        for op, key in zip(f.ops, self._signatures[f], strict=True):
            if key is None:
                lowering.call(op, self.body(op.callee))  # type: ignore[arg-type]
                continue
            plan = plans.get(key)
            if plan is None:
                plan = plans[key] = self._plan(op)
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


def _plan(parts: list[Part], held: tuple[tuple[int, ...], ...]) -> Plan:
    simple = len(parts) == 1 and len(parts[0].streams) == 1 and len(parts[0].classes) == 1
    return Plan(tuple(parts), parts[0] if simple else None, held)


def _signature(op: Op) -> object:
    """What decides an op's cost and classes; None for a call."""
    attributes = op.attributes
    if "callee" in attributes:
        return None
    return (op.spec, attributes or None, *[v.type for v in op.inputs])


def _ends(op: Op) -> tuple[Home, Home]:
    a, b = op.inputs[0].type.device, op.outputs[0].type.device
    if a is None or b is None:
        raise ModelError(f"{op}: a Send is from a device or mesh to another")
    return a, b


def device_streams(program: Program) -> Iterator[tuple[int, list[int]]]:
    """Each class with its streams."""
    for c in range(len(program.classes.sizes)):
        yield c, [s for s, (k, _) in enumerate(program.streams) if k == c]
