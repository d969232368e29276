"""The one loop, and calls as max-plus maps.

In program order, a part starts when its streams and what it needs are ready; then they are ready when it ends:

    start = max(clock[streams], ready[needs]);  clock[streams] = ready[part] = start + duration

A call is a max-plus map from (clocks of the streams it uses, times of its inputs) to (clocks, times of its outputs).
Its columns are found by the same loop, run once an entry with all others at minus infinity. As every stream keeps
program order and no duration depends on time, the map is exact: with durations on a grid of 2^-44 s, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from distir.ir.function import Function

if TYPE_CHECKING:
    from distir.executor.compile import Program

NEVER = float("-inf")
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

    __slots__ = ("_body", "given", "live", "rows", "streams")

    def __init__(
        self, body: Code | Twin, live: Slots, rows: Sequence[Sequence[tuple[int, float]]], given: list[Slots]
    ) -> None:
        self._body, self.live, self.rows, self.given, self.streams = body, live, rows, given, body.streams

    @property
    def body(self) -> Code:
        """The body's own code."""
        if isinstance(self._body, Twin):
            self._body = self._body.code
        return self._body


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
        self._program = ref(program)  # a cycle would keep both, until all that lives is looked at
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

    @property
    def program(self) -> Program:
        """The program it is a part of, as long as that is there."""
        program = self._program()
        if program is None:
            raise RuntimeError(f"the program that {self.function.name} was compiled for is gone")
        return program

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
                for slots in needs:  # mostly of one
                    enter.append(ready[slots[0]] if len(slots) == 1 else max([ready[j] for j in slots]))
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


class Twin:
    """What a call of a body does whose code is that of another, `model`, but for the streams and classes.

    Whatever a caller looks at, as of a `Code`; the body's own code is made when it is looked at.
    """

    def __init__(self, function: Function, model: Code, classes: dict[int, int], streams: dict[int, int]) -> None:
        self.function, self.model = function, model
        self.columns = [(i, classes[c]) for i, c in model.columns]
        self.outputs = [(k, classes[c], slots) for k, c, slots in model.outputs]
        self.streams = tuple([streams[s] for s in model.streams])
        self.passed = model.passed
        self._there = streams
        self._back = {t: s for s, t in streams.items()}
        self._waits: dict[tuple[int, frozenset[int]], bool] = {}
        self._summary: dict[Slots, Summary] = {}

    @property
    def code(self) -> Code:
        """Its own code."""
        return self.model.program.code(self.function)

    def waits(self, j: int, dominated: frozenset[int]) -> bool:
        """As `Code.waits`."""
        key = (j, dominated)
        found = self._waits.get(key)
        if found is None:
            back = self._back
            found = self._waits[key] = self.model.waits(j, frozenset([back[s] for s in dominated if s in back]))
        return found

    def summary(self, live: Slots) -> Summary:
        """As `Code.summary`."""
        found = self._summary.get(live)
        if found is None:
            rows, dominated = self.model.summary(live)
            there = self._there
            found = self._summary[live] = Summary(rows, [frozenset([there[s] for s in below]) for below in dominated])
        return found
