"""When each op of a rank ran: what its Python notes while it runs, and the Chrome trace that is made of it.

The lines of an op stand between two looks at the clock:

    begin = now()
    v2 = matmul(v1, v0)
    note((7, begin, now(), t))

and what communication returns goes through `issued`, which notes the wait for it, and when it was complete:

    begin = now()
    h3 = allreduce_tp(v2)
    h3 = issued(8, begin, h3, t)

On CPUs the clock is the host's, the same in all its processes. On CUDA it is events on the stream that computes (see
`clock`), and waits are those of the stream.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distir.backends.buckets import by_member
from distir.backends.clock import Clock
from distir.executor.labels import (
    COMMUNICATION,
    COMPUTE,
    FUNCTION,
    ISSUE,
    RECV,
    SEND,
    STEP,
    WAIT,
    labels,
    stream_name,
)
from distir.ir.device import Device, Mesh
from distir.ir.files import written
from distir.ir.function import Function, Op, Value
from distir.ops.comm import ALONG_AXIS
from distir.transforms.project import device_at, transfer

if TYPE_CHECKING:
    from distir.backends.body import Body
    from distir.backends.comm import Network

RECORDED = 5
"""So many steps are recorded: those after the first, which warms up; the first if there is no other."""
PROMPT_NS = 30_000
"""A wait (in ns) that is over so soon found complete what it waited for. When that was, collectives tell
that go over memory, and some of gloo's: others are marked `late`, and their slices end where the wait begins.
"""


class Entry(NamedTuple):
    """What a note's number stands for."""

    name: str
    category: str
    stream: str
    args: dict[str, Any]


class Profiler:
    """Records the ops of one rank in some of the steps `first` to `steps` - 1, and writes `rank{r}.json` into `folder`;
    that of an earlier run is removed first.
    """

    def __init__(
        self, program: Function, rank: int, device: torch.device, folder: Path, first: int, steps: int
    ) -> None:
        self.program, self.rank, self.clock = program, rank, Clock(device)
        self.path = folder / f"rank{rank}.json"
        self.path.unlink(missing_ok=True)
        warm = first + min(1, steps - first - 1)
        self.wanted = range(warm, min(warm + RECORDED, steps))
        self.entries: list[Entry] = []
        self.notes: list[Any] = []
        """Four items a note: number of the entry, begin and end (ns, or CUDA events), microbatch. A flat list: a tuple
        a note would set off the garbage collector.
        """
        self._made: dict[Function, dict[Op, list[Op]]] = {}
        self.slices: list[tuple[Entry, int, int, dict[str, Any]]] = []
        self._futures: list[Any] = []
        self._base: tuple[Any, int] = (None, 0)
        """When the step began, by the device and by the host."""

    # --- while the Python is written

    def timed(self, body: Body, ops: Sequence[Op], lines: Sequence[str]) -> list[str]:
        """The lines of an op, or of several that are done at once, with those that time them; without lines nothing
        is timed.
        """
        if not lines:
            return []
        op = ops[0]
        name, stream, args = _described(op, body.function, self.program, body.network)
        if op.callee is None and op.spec.comm is None:
            name, joined = self._joined(body, ops, name)
            args |= joined
        now = body.bind("now", self.clock.now)
        begin = f"begin = {now}()"
        if op.callee is not None:
            number = self._add(Entry(op.callee.name, FUNCTION, COMPUTE, {"microbatch": op.attributes.get("mb")}))
        elif op.spec.bundle is None and op.outputs and op.outputs[0] in body.waits:
            entry, handle = Entry(name, ISSUE, COMPUTE, args), body.var(op.outputs[0])
            waits = entry._replace(category=WAIT), entry._replace(category=COMMUNICATION, stream=stream)
            number = self._add(entry, *waits)
            issued = self.issued if isinstance(body.waits[op.outputs[0]], int) else self.issued_bundle
            return [begin, *lines, f"{handle} = {body.bind('issued', issued)}({number}, begin, {handle}, t)"]
        elif args.get("side") == SEND:
            entry = Entry(name, ISSUE, COMPUTE, args)
            number = self._add(entry, entry._replace(category=COMMUNICATION, stream=stream))
            return [begin, *lines, f"{body.bind('sent', self.sent)}({number}, begin, t)"]
        else:
            number = self._add(Entry(name, COMPUTE, COMPUTE, args))
        return [begin, *lines, f"{body.bind('note', self.notes.extend)}(({number}, begin, {now}(), t))"]

    def _joined(self, body: Body, ops: Sequence[Op], name: str) -> tuple[str, dict[str, Any]]:
        """The name of ops that are done at once, and, if it is not just an op of the program, which of them they do."""
        made = self._made.get(body.function)
        if made is None:
            made = self._made[body.function] = made_by(body.source, body.function)
        does = [x for op in ops for x in made.get(op, ()) if not x.spec.alias]
        if [(x.spec, x.outputs[0]) for x in does] == [(op.spec, op.outputs[0]) for op in ops[:1]] or not does:
            return name, {}
        return "+".join(dict.fromkeys(x.spec.name for x in does)), {
            "does": [(x.spec.name, f"%{x.outputs[0].name}") for x in does],
            "bytes": sum(labels(op, body.function)["bytes"] for op in ops),
        }

    def _add(self, *entries: Entry) -> int:
        """The number of the first of these entries; the others follow it."""
        self.entries += entries
        return len(self.entries) - len(entries)

    def waiting(self, name: str, wait: Callable[[], None]) -> Callable[[], None]:
        """The same as `wait`, noted as a wait for communication."""
        number = self._add(Entry(name, WAIT, COMPUTE, {}))

        def noted() -> None:
            begin = self.clock.now()
            wait()
            self.notes.extend((number, begin, self.clock.now(), None))

        return noted

    # --- while it runs

    def watch(self, work: Any) -> None:
        """Take note of the work of a collective that has just been started."""
        if self.clock.on_host:
            with contextlib.suppress(RuntimeError):  # not all of gloo's tell when they are complete
                self._futures.append(work.get_future())

    def issued(self, number: int, begin: Any, pending: Callable[[], Any], moment: int | None) -> Callable[[], Any]:
        """What to call in place of `pending`, which was issued since `begin`, to wait for it."""
        now, note = self.clock.now, self.notes.extend
        note((number, begin, now(), moment))
        complete: list[int] = []
        for future in self._futures:
            future.add_done_callback(lambda _: complete.append(now()))
        self._futures.clear()

        def wait() -> Any:
            start = now()
            result = pending()
            end = now()
            note((number + 1, start, end, moment))
            note((number + 2, begin, min(max(complete), end) if complete else end, moment))
            return result

        return wait

    def issued_bundle(self, number: int, begin: Any, pending: Sequence[Callable[[], Any]], moment: int | None) -> Any:
        """The same for what gives the members of a bundle: the first that is asked for waits for all."""
        wait = self.issued(number, begin, lambda: [member() for member in pending], moment)
        return by_member(lambda: wait, len(pending))()

    def sent(self, number: int, begin: Any, moment: int | None) -> None:
        """Note what is sent, and not waited for."""
        end = self.clock.now()
        self.notes += (number, begin, end, moment, number + 1, begin, end, moment)

    def begin_step(self) -> None:
        """Begin to note a step; the device has nothing left to do."""
        self.notes.clear()
        self._base = self.clock.now(), time.perf_counter_ns()

    def end_step(self, step: int) -> None:
        """Keep what was noted, if the step is one to record; the device has done all it was given."""
        end = time.perf_counter_ns()
        if step not in self.wanted:
            return
        waiting = waited = 0
        about: dict[str, Any] = {"step": step}
        each = iter(self.notes)
        for number, begin, finish, moment in zip(each, each, each, each, strict=True):
            entry, start, stop = self.entries[number], self._ns(begin), self._ns(finish)
            extra = about if moment is None else {**about, "microbatch": moment}
            if entry.category == WAIT:
                waiting, waited = start, stop
            elif entry.category in (COMPUTE, ISSUE):
                start = max(start, waited)  # operands were waited for within the lines of the op
            elif entry.category == COMMUNICATION and stop == waited and waited - waiting < PROMPT_NS:
                stop, extra = waiting, {**extra, "late": True}
            self.slices.append((entry, start, stop, extra))
        self.slices.append((Entry(f"step {step}", STEP, STEP, {}), self._base[1], end, about))

    def _ns(self, moment: Any) -> int:
        """A moment of the step as the host's clock has it."""
        begin, base = self._base
        return base + self.clock.between(begin, moment)

    # --- afterwards

    def write(self) -> None:
        """Write the trace. Raises UsageError if it cannot be written."""
        with written(self.path) as new, open(new, "w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(map(json.dumps, self._events())))
            file.write("\n]}\n")

    def _events(self) -> Iterator[dict[str, Any]]:
        pid = self.rank + 1  # 0 is that of an idle machine
        streams = dict.fromkeys([STEP, COMPUTE, *(entry.stream for entry, *_ in self.slices)])
        thread = {name: 1000 * pid + k for k, name in enumerate(streams)}
        about = {"name": f"rank {self.rank}", "rank": self.rank, "host": platform.node()}
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": about}
        yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": self.rank}}
        for k, (name, tid) in enumerate(thread.items()):
            yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": k}}
        free = dict.fromkeys(streams, 0)
        for entry, start, stop, extra in sorted(self.slices, key=lambda s: s[1]):
            if entry.category == COMMUNICATION:  # one after the other, as a stream carries them out
                extra = {**extra, "issued": start / 1e3}
                start = max(start, free[entry.stream])
                stop = free[entry.stream] = max(start, stop)
            where = {"pid": pid, "tid": thread[entry.stream], "ts": start / 1e3, "dur": (stop - start) / 1e3}
            yield {**where, "cat": entry.category, "name": entry.name, "ph": "X", "args": {**entry.args, **extra}}


def made_by(source: Function, function: Function) -> dict[Op, list[Op]]:
    """Which ops of `source` each op of `function` does, if some of them were joined: it makes what the last makes.

    What an op that is gone has made was used by the one that it has become a part of.
    """
    makes = {op.outputs[0]: op for op in function.ops if op.outputs}
    user: dict[Value, Op] = {}
    for op in source.ops:
        for v in op.inputs:
            user.setdefault(v, op)
    found: dict[Op, list[Op]] = {}
    for op in source.ops:
        last: Op | None = op
        while last is not None and last.outputs and last.outputs[0] not in makes:
            last = user.get(last.outputs[0])
        if last is not None and last.outputs:
            found.setdefault(makes[last.outputs[0]], []).append(op)
    return found


def _described(op: Op, function: Function, program: Function, network: Network) -> tuple[str, str, dict[str, Any]]:
    """An op as the simulator's trace has it: its name, the stream of its communication, and what is said of it."""
    name, attrs = op.spec.name, op.attributes
    if name in ALONG_AXIS:
        mesh = op.inputs[0].type.device
        ranks = [network.number[d] for d in _peers(mesh, attrs["axis"], network.here)]
        return name, attrs["axis"], {**labels(op, function), "ranks": ranks}
    if "message" not in attrs:
        return name, COMPUTE, labels(op, function)
    whole = transfer(program, attrs["message"])  # of which this is one side
    side = RECV if name in ("MPIRecv", "MPIGather", "MPIReduce") else SEND
    partner = (whole.inputs if side == RECV else whole.outputs)[0].type.device
    about: dict[str, Any] = {**labels(whole, program, side=side), "message": attrs["message"]}
    if whole.spec.name != "Send" or partner is None:
        return whole.spec.name, side, about
    here = (whole.inputs if side == SEND else whole.outputs)[0].type.device
    twin = partner
    if isinstance(partner, Mesh) and isinstance(here, Mesh):
        twin = device_at(partner, network.coordinate(here))
    if isinstance(twin, Device):
        about["peer"] = network.number[twin]
    return "Send", stream_name(side, partner), about


def _peers(home: Device | Mesh | None, axis: str, here: Device | None) -> list[Device]:
    """The devices that meet along a mesh axis."""
    return home.group(axis, home.devices.index(here)) if isinstance(home, Mesh) and here is not None else []
