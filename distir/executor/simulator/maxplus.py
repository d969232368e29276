"""The simulator's loop, and calls as max-plus maps.

In program order, a part starts when its streams and its dependences are ready; its streams and results are ready when
it ends:

    start = max(clock[streams], ready[needs]);  clock[streams] = ready[part] = start + duration

If a host must issue the part, its clock moves first, and the part starts no earlier than that:

    clock[host] += issue;  start = max(start, clock[host])

A call is a max-plus map from (clocks of the streams it uses, times of its inputs) to (clocks, times of its outputs).
Its columns are computed by the same loop, once for each entry, with all others at minus infinity. As every stream keeps
program order and no duration depends on time, the map is exact: with durations on a grid of 2^-44 s, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakMethod

from distir.ir.function import Function, Op
from distir.ir.topology import Group

NEVER = float("-inf")
Issues = tuple[tuple[int, float], ...]
"""Of the hosts that issue a part: stream and seconds."""
Slots = tuple[int, ...]
"""Slots that a value depends on: it is ready when all of them are; without any, always."""


_ITS_OWN: Mapping[int, int] = {}
"""The classes of a body that is its own model."""


class Sent(NamedTuple):
    """What a part communicates: the bytes of the whole value of a collective (see `Wire`), or of a transfer; those
    that each device sends; among whom, None for a transfer; on how many nodes, None if that is not known; and the
    seconds that it takes if nothing hides any."""

    size: float
    sent: float
    group: Group | None
    nodes: int | None
    seconds: float


class OpPart(NamedTuple):
    """An op on one class of devices, or on classes that meet. `streams` are those of `classes`, one each, and others
    that wait for it.

    `issues` are those of its hosts. A part without `sources` is compute that is lost beside communication. `message` is
    that of a collective or a transfer from stage to stage.
    """

    duration: float
    streams: tuple[int, ...]
    classes: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    communicates: bool
    on: frozenset[int]
    issues: Issues | None = None
    message: Sent | None = None

    @property
    def lanes(self) -> tuple[int, ...]:
        """The stream of each class on which the op is shown."""
        return self.streams[: len(self.classes)]


class OpPlan(NamedTuple):
    """The parts of an op. `simple` is its part where there is only one, on one stream."""

    parts: tuple[OpPart, ...]
    simple: OpPart | None
    classes: tuple[tuple[int, ...], ...]
    """For each result, the classes that hold it."""

    @property
    def form(self) -> object:
        """All but seconds."""
        parts = [
            (p.streams, p.classes, p.sources, p.targets, p.communicates, p.issues and [host for host, _ in p.issues])
            for p in self.parts
        ]
        return self.classes, parts


class Call:
    """A call in a program: its body, the body's live inputs, the map, and the slots that each input depends on.

    `waits` are the slots that hosts wait for before they issue it, by stream.
    """

    __slots__ = ("_body", "given", "live", "rows", "streams", "waits")

    def __init__(
        self,
        body: Code | Twin,
        live: Slots,
        given: list[Slots],
        waits: Mapping[int, list[int]],
    ) -> None:
        self._body, self.live, self.given, self.streams = body, live, given, body.streams
        self.rows, self.waits = body.summary(live), waits

    @property
    def body(self) -> Code:
        """The body's own code."""
        if isinstance(self._body, Twin):
            self._body = self._body.code
        return self._body

    @property
    def model(self) -> Code:
        """Code equal to the body's up to streams and classes."""
        return self._body.model if isinstance(self._body, Twin) else self._body

    @property
    def classes(self) -> Mapping[int, int]:
        """The body's class for each of the model's."""
        return self._body.classes if isinstance(self._body, Twin) else _ITS_OWN

    @property
    def slots(self) -> int:
        """How many slots its results take."""
        return max(len(self.rows) - len(self.streams), 0)

    def run(self, needs: Sequence[Slots], clock: list[float], ready: list[float]) -> list[float]:
        """Apply the map; returns the entry times."""
        for host, slots in self.waits.items():
            clock[host] = max([clock[host], *[ready[j] for j in slots]])
        enter = [clock[x] for x in self.streams]
        for slots in needs:  # mostly of one
            enter.append(ready[slots[0]] if len(slots) == 1 else max([ready[j] for j in slots]))
        left = [max([enter[k] + w for k, w in row]) for row in self.rows]
        for x, t in zip(self.streams, left, strict=False):
            clock[x] = t
        ready += left[len(self.streams) :]
        return enter


Rows = list[list[tuple[int, float]]]
"""A body's map at some live inputs: rows of (column, weight)."""


class Column(NamedTuple):
    """Times when one entry is at 0 and all others never: of the streams, of every slot."""

    clock: list[float]
    ready: list[float]


class Code:
    """A compiled function. Slots are numbered: first a body's inputs (value and class), then parts in program order.

    `duration`, `stream`, `needs`, `more` are the loop's lists: `more` is None for a part on one stream, the other
    streams of a part on several, a `Call`, or `()` never. A call takes a slot an output and class. `issues` are those
    of each part; `None` where no host takes any time.
    """

    def __init__(
        self, function: Function, program_streams: Sequence[tuple[int, str]], columns: list[tuple[int, int]]
    ) -> None:
        self.function = function
        self.program_streams = program_streams
        """(class, name) of every stream of the program; grows while the program is compiled."""
        self.columns = columns
        """(input, class) of each input slot."""
        self.plans: list[OpPlan | Call] = []
        self.views: list[list[Slots]] = []
        """For each free op, in order, the slots its results depend on, class by class of `OpPlan.classes`."""
        self.outputs: list[tuple[int, int, Slots]] = []
        """(output, class, slots it depends on)"""
        self.streams: tuple[int, ...] = ()
        self.duration: list[float] = []
        self.stream: list[int] = []
        self.needs: list[Sequence[Any]] = []
        self.more: list[Any] = []
        self.issues: list[Issues | None] | None = None
        self.consumers: list[set[frozenset[int]]] = []
        """For each input slot, the streams of each part that waits for it; an empty set if they are unknown."""
        self.passed: frozenset[int] = frozenset()
        """Input slots that outputs depend on."""
        self.dominated: list[frozenset[int]] = []
        """For each output the streams whose clock is never earlier than it when the body ends, whatever the seconds."""
        self._waits: dict[tuple[int, frozenset[int]], bool] = {}
        self._column: dict[int, Column] = {}
        self._summary: dict[Slots, Rows] = {}

    def run(self, clock: list[float], ready: list[float]) -> list[list[float]]:
        """The loop. Changes `clock` (of all streams), extends `ready` (of the inputs); returns calls' entry times."""
        if self.issues is not None:
            return self._run_issued(self.issues, clock, ready)
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
                entries.append(more.run(needs, clock, ready))
        return entries

    def _run_issued(self, issues: list[Issues | None], clock: list[float], ready: list[float]) -> list[list[float]]:
        """The same loop, with hosts that issue the parts."""
        entries: list[list[float]] = []
        append = ready.append
        for d, s, needs, more, issue in zip(self.duration, self.stream, self.needs, self.more, issues, strict=True):
            if isinstance(more, Call):
                entries.append(more.run(needs, clock, ready))
                continue
            t = clock[s]
            if issue is not None:
                for host, seconds in issue:
                    clock[host] = issued = clock[host] + seconds
                    if issued > t:
                        t = issued
            for j in needs:
                r = ready[j]
                if r > t:
                    t = r
            if more is None:  # as most
                clock[s] = t = t + d
            else:
                t = max([t, *[clock[x] for x in more]]) + d
                for x in (s, *more):
                    clock[x] = t
            append(t)
        return entries

    def timed(
        self,
        program_streams: Sequence[tuple[int, str]],
        plans: Iterable[tuple[Op, OpPlan | None]],
        body: Callable[[Function], Code | Twin],
    ) -> Code:
        """The same code with the seconds of other plans, of the same form, and of other bodies."""
        code = Code(self.function, program_streams, self.columns)
        code.views, code.outputs, code.streams, code.stream = self.views, self.outputs, self.streams, self.stream
        code.needs, code.consumers, code.passed, code._waits = self.needs, self.consumers, self.passed, self._waits
        code.dominated = self.dominated
        duration, more, issues = code.duration, code.more, list[Issues | None]()
        for (op, plan), before in zip(plans, self.plans, strict=True):
            if isinstance(before, Call):
                call = Call(body(op.attributes["callee"]), before.live, before.given, before.waits)
                code.plans.append(call)
                duration.append(0.0)
                more.append(call)
                issues.append(None)
            elif plan is not None:
                code.plans.append(plan)
                for part in plan.parts:
                    duration.append(part.duration)
                    more.append(part.streams[1:] or None)
                    issues.append(part.issues)
        code.issues = issues if self.issues is not None else None
        return code

    def waits(self, j: int, dominated: frozenset[int]) -> bool:
        """Whether anything may wait for input slot j, given that these streams dominate it."""
        key = (j, dominated)
        found = self._waits.get(key)
        if found is None:
            found = self._waits[key] = any(dominated.isdisjoint(s) for s in self.consumers[j])
        return found

    def column(self, k: int) -> Column:
        """Entry k: the streams, then the input slots."""
        found = self._column.get(k)
        if found is None:
            clock = [NEVER] * len(self.program_streams)
            ready = [NEVER] * len(self.columns)
            if k < len(self.streams):
                clock[self.streams[k]] = 0.0
            else:
                ready[k - len(self.streams)] = 0.0
            self.run(clock, ready)
            found = self._column[k] = Column([clock[s] for s in self.streams], ready)
        return found

    def summary(self, live: Slots) -> Rows:
        """The map whose entries are the streams and the live input slots."""
        found = self._summary.get(live)
        if found is None:
            found = self._summary[live] = self._summarise(live)
        return found

    def _summarise(self, live: Slots) -> Rows:
        n = len(self.streams)
        columns = [self.column(k) for k in (*range(n), *(n + j for j in live))]
        rows = [[c.clock[i] for c in columns] for i in range(n)]
        for _, _, slots in self.outputs:
            if len(slots) == 1:  # as most
                rows.append([c.ready[slots[0]] for c in columns])
            else:
                rows.append([max([c.ready[j] for j in slots], default=NEVER) for c in columns])
        return [[(k, w) for k, w in enumerate(row) if w != NEVER] or [(0, NEVER)] for row in rows] if columns else []


class Twin:
    """A body whose code equals that of another, `model`, up to streams and classes.

    It has the interface of `Code` that callers use; the body's own code is compiled on first access.
    """

    def __init__(
        self,
        function: Function,
        model: Code,
        classes: dict[int, int],
        streams: dict[int, int],
        compile_callee: Callable[[Function], Code],
    ) -> None:
        self.function, self.model, self.classes = function, model, classes
        self._compile_callee = WeakMethod(compile_callee)  # a strong reference would make a cycle with the program
        self.columns = [(i, classes[c]) for i, c in model.columns]
        self.outputs = [(k, classes[c], slots) for k, c, slots in model.outputs]
        self.streams = tuple([streams[s] for s in model.streams])
        self.passed = model.passed
        self.dominated = [frozenset([streams[s] for s in below]) for below in model.dominated]
        self._back = {t: s for s, t in streams.items()}
        self._waits: dict[tuple[int, frozenset[int]], bool] = {}

    @property
    def code(self) -> Code:
        """Its own code, compiled when first asked for. Raises RuntimeError if its program no longer exists."""
        compile_callee = self._compile_callee()
        if compile_callee is None:
            raise RuntimeError(f"the program that {self.function.name} was compiled for is gone")
        return compile_callee(self.function)

    def waits(self, j: int, dominated: frozenset[int]) -> bool:
        """As `Code.waits`."""
        key = (j, dominated)
        found = self._waits.get(key)
        if found is None:
            back = self._back
            found = self._waits[key] = self.model.waits(j, frozenset([back[s] for s in dominated if s in back]))
        return found

    def summary(self, live: Slots) -> Rows:
        """As `Code.summary`."""
        return self.model.summary(live)
