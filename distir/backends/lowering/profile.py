"""Profile a rank's ops: timing added to the generated Python, and the Chrome trace made of the records.

The lines of an op are between two timestamps:

    begin = now()
    v2 = matmul(v1, v0)
    note((7, begin, now(), t))

and the result of communication goes through `issued`, which records the wait for it, and when it was complete:

    begin = now()
    h3 = allreduce_tp(v2)
    h3 = issued(8, begin, h3, t)

On CPUs the clock is the host's, the same in all processes. On CUDA timestamps are events on the compute stream (see
`clock`), and waits are those of the stream.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distir.backends.lowering.function_writer import FunctionWriter
from distir.backends.lowering.launchers import by_member
from distir.backends.tensors.clock import Clock
from distir.backends.transport.torch_distributed import Network
from distir.executor.simulator.labels import (
    COMMUNICATION,
    COMPUTE,
    FUNCTION,
    ISSUE,
    RECV,
    SEND,
    STEP,
    WAIT,
    axis_text,
    labels,
    stream_name,
)
from distir.ir.device import AxisNames, Device, Mesh
from distir.ir.files import written
from distir.ir.function import Function, Op
from distir.transforms.rank.as_run import as_run
from distir.transforms.rank.project import device_at

RECORDED = 5
"""Number of steps recorded, from the second on (the first is warm-up); the first if it is the only one."""
PROMPT_NS = 30_000
"""A shorter wait (ns) means that communication was complete before the wait. Only shared-memory collectives and some
of gloo's report their completion time; others are marked `late`, and their slices end where the wait begins.
"""


class Entry(NamedTuple):
    """The op that the number in a record stands for."""

    name: str
    category: str
    stream: str
    args: dict[str, Any]


class Profiler:
    """Records the ops of one rank in some of the steps `first` to `steps` - 1, and writes `rank{r}.json` to `folder`;
    the file of an earlier run is removed first.
    """

    def __init__(
        self, program: Function, rank: int, device: torch.device, folder: Path, first: int, steps: int
    ) -> None:
        self.program, self.rank, self.clock = program, rank, Clock(device)
        self.path = folder / f"rank{rank}.json"
        self.path.unlink(missing_ok=True)
        warm = first + min(1, steps - first - 1)
        self.recorded = range(warm, min(warm + RECORDED, steps))
        self.entries: list[Entry] = []
        self.notes: list[Any] = []
        """Four items per record: number of the entry, begin and end (ns, or CUDA events), microbatch. A flat list,
        since a tuple per record would trigger the garbage collector.
        """
        self.slices: list[tuple[Entry, int, int, dict[str, Any]]] = []
        self._futures: list[Any] = []
        self._base: tuple[Any, int] = (None, 0)
        """The begin of the step by the device's clock and by the host's."""

    # --- while the Python is written

    def timed(self, body: FunctionWriter, op: Op, lines: Sequence[str]) -> list[str]:
        """The lines of an op with timing added; no lines stay no lines."""
        if not lines:
            return []
        name, stream, args = _described(op, body.function, self.program, body.network)
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

    def _add(self, *entries: Entry) -> int:
        """Add entries; returns the number of the first."""
        self.entries += entries
        return len(self.entries) - len(entries)

    def waiting(self, name: str, wait: Callable[[], None]) -> Callable[[], None]:
        """`wait`, recorded as a wait for communication."""
        number = self._add(Entry(name, WAIT, COMPUTE, {}))

        def noted() -> None:
            begin = self.clock.now()
            wait()
            self.notes.extend((number, begin, self.clock.now(), None))

        return noted

    # --- while it runs

    def watch(self, work: Any) -> None:
        """Register the work of a collective that has just been started."""
        if self.clock.on_host:
            with contextlib.suppress(RuntimeError):  # some of gloo's works have no future
                self._futures.append(work.get_future())

    def issued(self, number: int, begin: Any, pending: Callable[[], Any], microbatch: int | None) -> Callable[[], Any]:
        """Wrap `pending`, the wait for communication that was issued since `begin`, to record the wait."""
        now, note = self.clock.now, self.notes.extend
        note((number, begin, now(), microbatch))
        complete: list[int] = []
        for future in self._futures:
            future.add_done_callback(lambda _: complete.append(now()))
        self._futures.clear()

        def wait() -> Any:
            start = now()
            result = pending()
            end = now()
            note((number + 1, start, end, microbatch))
            note((number + 2, begin, min(max(complete), end) if complete else end, microbatch))
            return result

        return wait

    def issued_bundle(
        self, number: int, begin: Any, pending: Sequence[Callable[[], Any]], microbatch: int | None
    ) -> Any:
        """`issued` for the members of a bundle: the first that is taken waits for all."""
        wait = self.issued(number, begin, lambda: [member() for member in pending], microbatch)
        return by_member(lambda: wait, len(pending))()

    def sent(self, number: int, begin: Any, microbatch: int | None) -> None:
        """Record a send, which is not waited for."""
        end = self.clock.now()
        self.notes += (number, begin, end, microbatch, number + 1, begin, end, microbatch)

    def begin_step(self) -> None:
        """Start recording a step; the device must be idle."""
        self.notes.clear()
        self._base = self.clock.now(), time.perf_counter_ns()

    def end_step(self, step: int) -> None:
        """Keep the step's records if it is one to record; the device must be idle."""
        end = time.perf_counter_ns()
        if step not in self.recorded:
            return
        waiting = waited = 0
        about: dict[str, Any] = {"step": step}
        each = iter(self.notes)
        for number, begin, finish, microbatch in zip(each, each, each, each, strict=True):
            entry, start, stop = self.entries[number], self._ns(begin), self._ns(finish)
            extra = about if microbatch is None else {**about, "microbatch": microbatch}
            if entry.category == WAIT:
                waiting, waited = start, stop
            elif entry.category in (COMPUTE, ISSUE):
                start = max(start, waited)  # operands were waited for within the lines of the op
            elif entry.category == COMMUNICATION and stop == waited and waited - waiting < PROMPT_NS:
                stop, extra = waiting, {**extra, "late": True}
            self.slices.append((entry, start, stop, extra))
        self.slices.append((Entry(f"step {step}", STEP, STEP, {}), self._base[1], end, about))

    def _ns(self, time: Any) -> int:
        """A timestamp of the step by the host's clock (ns)."""
        begin, base = self._base
        return base + self.clock.between(begin, time)

    # --- afterwards

    def write(self) -> None:
        """Write the trace. Raises UsageError if it cannot be written."""
        with written(self.path) as new, open(new, "w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(map(json.dumps, self._events())))
            file.write("\n]}\n")

    def _events(self) -> Iterator[dict[str, Any]]:
        pid = self.rank + 1  # Perfetto shows pid 0 as the idle process
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
            if entry.category == COMMUNICATION:  # sequential, as on a stream
                extra = {**extra, "issued": start / 1e3}
                start = max(start, free[entry.stream])
                stop = free[entry.stream] = max(start, stop)
            where = {"pid": pid, "tid": thread[entry.stream], "ts": start / 1e3, "dur": (stop - start) / 1e3}
            yield {**where, "cat": entry.category, "name": entry.name, "ph": "X", "args": {**entry.args, **extra}}


def _described(op: Op, function: Function, program: Function, network: Network) -> tuple[str, str, dict[str, Any]]:
    """(name, stream, args) of an op, as in the simulator's trace."""
    name, attrs = op.spec.name, op.attributes
    if op.spec.route == "axis":
        mesh = op.inputs[0].type.device
        ranks = [network.number[d] for d in _peers(mesh, attrs["axis"], network.here)]
        return name, axis_text(attrs["axis"]), {**labels(op, function), "ranks": ranks}
    if "message" not in attrs:
        return name, COMPUTE, labels(op, function)
    whole = as_run(program).ops[attrs["message"]]  # the transfer of which this op is one side
    side = RECV if op.spec.route in ("incoming", "gather") else SEND
    partner = (whole.inputs if side == RECV else whole.outputs)[0].type.device
    about: dict[str, Any] = {**labels(whole, program, side=side), "message": attrs["message"]}
    if whole.spec.route != "send" or partner is None:
        return whole.spec.name, side, about
    here = (whole.inputs if side == SEND else whole.outputs)[0].type.device
    twin = partner
    if isinstance(partner, Mesh) and isinstance(here, Mesh):
        twin = device_at(partner, network.coordinate(here))
    if isinstance(twin, Device):
        about["peer"] = network.number[twin]
    return whole.spec.name, stream_name(side, partner), about


def _peers(mesh: Device | Mesh | None, axis: AxisNames, here: Device | None) -> list[Device]:
    """The devices along a mesh axis, including `here`."""
    return mesh.group(axis, mesh.devices.index(here)) if isinstance(mesh, Mesh) and here is not None else []
