"""Ranks that share the cores of a host: compute takes longer while more ranks are busy than there are cores.

Ranks are bound to cores as `cores_of` says. A rank is busy while it computes, and, where its cores do the work, while
it is in a collective or receives; one that waits or sleeps is not. While more are busy than the cores that they are
bound to, each part of compute gets an equal share of these (processor sharing), and communication takes longer by what
it needs of a core; parts that move more bytes than their share of the memory's bandwidth wait for it. The ranks of a
collective do not arrive together, communication takes longer after long without it, and when a step begins, other
threads compute, too, that feed the ranks (see `CoreSharing`).

The program is run once through such a simulation, in which a part's seconds depend on what runs beside it; then each
part has the seconds that it took, each call code of its own, and the simulator's loop runs as on any cluster.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import copy
from typing import NamedTuple

from distir.executor.cost_model.seconds import quantize
from distir.executor.simulator.compile import CompiledProgram
from distir.executor.simulator.device_classes import DeviceClasses
from distir.executor.simulator.maxplus import Call, Code, OpPart, OpPlan
from distir.ir.function import Function, Op
from distir.ir.topology import CoreSharing, cores_of


class _Share(NamedTuple):
    """Cores to which the same ranks are bound: how many, and the number of these ranks by class."""

    cores: int
    ranks: tuple[int, ...]


class _Task(NamedTuple):
    """A part of the program, the issue of one, or what feeds the ranks: seconds alone, streams, the tasks it waits for,
    whether it computes, and the classes that communicate; `busy`: the numbers of the shares of cores on which it keeps
    ranks busy, or threads beside them, each with how many; `ranks`: how many on all cores; `meets`: in a collective;
    `demand`: bytes/s that each rank moves through the memory that all share."""

    seconds: float
    streams: tuple[int, ...]
    needs: Sequence[int]
    ranks: int = 0
    busy: tuple[tuple[int, int], ...] = ()
    computes: bool = True
    classes: tuple[int, ...] = ()
    meets: bool = False
    demand: float = 0.0


_WAITS = _Task(0.0, (), (), computes=False)
"""What ranks do that wait for another."""


class _Timed(NamedTuple):
    """The tasks of a part: those of its issues by host, and its own."""

    issues: tuple[tuple[int, int], ...]
    part: int


def on_shared_cores(program: CompiledProgram, sharing: CoreSharing) -> CompiledProgram:
    """The program with the seconds that its parts take on shared cores, quantized as all durations."""
    ranks = sum(program.classes.sizes)
    limited = sharing.bandwidth < math.inf
    beside = ranks > 1 and (sharing.communication or limited or sharing.jitter or sharing.cold)
    if ranks * (1 + (sharing.feeding > 0)) <= sharing.cores and not beside:
        return program
    tasks: list[_Task] = []
    timed: list[_Timed] = []
    shares = _shares(program.classes, sharing.cores)
    _Flattened(program, tasks, timed, shares, limited).run(program.main, [() for _ in program.main.columns])
    streams, classes = len(program.streams), range(len(program.classes.sizes))
    tasks.append(_Task(sharing.feeding, (streams,), (), ranks, _busy(shares, classes)))
    seconds = _run(tasks, streams + 1, len(classes), sharing, [s.cores for s in shares])
    out = copy(program)
    out.main = _with_seconds(program.main, program.streams, iter(timed), seconds)
    return out


def _shares(classes: DeviceClasses, cores: int) -> list[_Share]:
    """The shares of a host's cores; of those with equally many cores, and ranks of each class, one."""
    devices = sorted(classes.devices(), key=lambda found: (found[0].index, found[0].kind))
    counts: dict[range, list[int]] = {}
    for rank, (_, c) in enumerate(devices):
        own = cores_of(rank, len(devices), cores)
        counts.setdefault(own, [0] * len(classes.sizes))[c] += 1
    return list(dict.fromkeys([_Share(len(own), tuple(row)) for own, row in counts.items()]))


def _busy(shares: Sequence[_Share], classes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The numbers of the shares that have ranks of some classes, each with how many."""
    counts = enumerate([sum([share.ranks[c] for c in classes]) for share in shares])
    return tuple([(k, n) for k, n in counts if n])


class _Flattened:
    """Adds the tasks of runs of code to `tasks`, calls expanded, and those of each part to `timed`. `limited`: the
    bytes that they move count."""

    def __init__(
        self,
        program: CompiledProgram,
        tasks: list[_Task],
        timed: list[_Timed],
        shares: Sequence[_Share] = (),
        limited: bool = False,
    ) -> None:
        self._program, self._tasks, self._timed = program, tasks, timed
        self._shares, self._limited = shares, limited
        self._busy = [_busy(shares, (c,)) for c in range(len(program.classes.sizes))]
        """By class, of what its host does."""
        self._parts: dict[Code, list[_Task]] = {}

    def run(self, code: Code, given: Iterable[Sequence[int]]) -> list[Sequence[int]]:
        """Add a run. `given`: the tasks that each input slot waits for; the result is that of all slots."""
        slots, sizes = list(given), self._program.classes.sizes
        tasks, streams = self._tasks, self._program.streams
        parts = self._parts.get(code)
        if parts is None:
            parts = self._parts[code] = [
                self._task(op, part)
                for op, plan in zip(code.function.ops, code.plans, strict=True)
                if isinstance(plan, OpPlan)
                for part in plan.parts
            ]
        alone = iter(parts)
        issues = code.issues or [None] * len(code.duration)
        for needs, more, issue in zip(code.needs, code.more, issues, strict=True):
            if isinstance(more, Call):
                for host, waited in more.waits.items():
                    tasks.append(_Task(0.0, (host,), [k for j in waited for k in slots[j]]))
                inputs = [[k for j in found for k in slots[j]] for found in more.given]
                inside = self.run(more.body, inputs)
                if more.slots:
                    slots += [[k for j in found for k in inside[j]] for _, _, found in more.body.outputs]
                continue
            waits = [k for j in needs for k in slots[j]]
            hosts: list[tuple[int, int]] = []
            for host, seconds in issue or ():
                hosts.append((host, len(tasks)))
                waits.append(len(tasks))
                c = streams[host][0]
                tasks.append(_Task(seconds, (host,), (), sizes[c], self._busy[c]))
            self._timed.append(_Timed(tuple(hosts), len(tasks)))
            slots.append((len(tasks),))
            tasks.append(next(alone)._replace(needs=waits))
        return slots

    def _task(self, op: Op, part: OpPart) -> _Task:
        """A part's task, in all runs, but for what it waits for."""
        sleeps = op.spec.comm is not None and op.spec.comm.seconds is not None
        # a message is copied by who receives it
        at_work = () if sleeps else part.targets or part.classes
        ranks, busy = sum([self._program.classes.sizes[c] for c in at_work]), _busy(self._shares, at_work)
        among = part.classes if part.communicates else ()
        meets = part.communicates and part.sources == part.targets != () and ranks > 1
        computes, demand = not (part.communicates or sleeps), 0.0
        if self._limited and computes and part.sources and part.duration:
            ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
            demand = self._program.cost.streamed(op.spec, op.attributes, ins, outs) / part.duration
        return _Task(part.duration, part.streams, (), ranks, busy, computes, among, meets, demand)


def _run(tasks: Sequence[_Task], streams: int, classes: int, sharing: CoreSharing, cores: Sequence[int]) -> list[float]:
    """The seconds of each task, on shares of so many cores. Each stream runs its tasks in their order."""
    missing, after = _order(tasks, streams)
    met = [0.0] * classes
    """When each class last communicated."""
    now = 0.0
    running: dict[int, _Task] = {}
    """Of those that have begun what they do now: a collective first waits for its last rank."""
    left: dict[int, float] = {}
    """The seconds that each would still take alone."""
    alone = [task.seconds for task in tasks]
    """Their seconds, with what communication takes longer."""
    start, taken = [0.0] * len(tasks), [0.0] * len(tasks)
    ready = [k for k, n in enumerate(missing) if not n]
    while True:
        for k in ready:
            task, waits = tasks[k], 0.0
            start[k] = now
            if task.classes:
                apart = now - min([met[c] for c in task.classes])
                waits = sharing.late(apart) if task.meets else 0.0
                alone[k] += sharing.resumed(apart)
            running[k], left[k] = (_WAITS, waits) if waits else (task, alone[k])
        ready.clear()
        if not left:
            return taken
        rates = _rates(running.values(), sharing, cores)
        passed, k = min([(x / rate, k) for (k, x), rate in zip(left.items(), rates, strict=True)])
        for (j, x), rate in zip(left.items(), rates, strict=True):
            left[j] = x - passed * rate
        now, task = now + passed, tasks[k]
        if running[k] is _WAITS:
            running[k], left[k] = task, alone[k]
            continue
        del running[k], left[k]
        taken[k] = now - start[k]
        for c in task.classes:
            met[c] = now
        for j in after[k]:
            missing[j] -= 1
            if not missing[j]:
                ready.append(j)


def _rates(running: Collection[_Task], sharing: CoreSharing, cores: Sequence[int]) -> list[float]:
    """How fast each of the tasks that run together goes, as a share of how fast it goes alone: as the slowest of its
    ranks."""
    busy = [0.0] * len(cores)
    for t in running:
        for k, n in t.busy:
            busy[k] += n if t.computes else n * sharing.communication
    full = [max(1.0, n / own) for n, own in zip(busy, cores, strict=True)]
    slower = [max([full[k] for k, _ in t.busy], default=1.0) for t in running]
    most = math.inf
    if sharing.bandwidth < math.inf:
        most = sharing.share([(t.demand / x, t.ranks) for t, x in zip(running, slower, strict=True) if t.demand])
    rates: list[float] = []
    for t, x in zip(running, slower, strict=True):
        if t.computes:
            rates.append(min(1 / x, most / t.demand) if t.demand else 1 / x)
        else:
            rates.append(1 / (1 + sharing.communication * (x - 1)))
    return rates


def _order(tasks: Sequence[_Task], streams: int) -> tuple[list[int], list[list[int]]]:
    """Of each task how many must end before it begins, those that it waits for and the last on its streams, and the
    tasks after it."""
    missing: list[int] = []
    after: list[list[int]] = [[] for _ in tasks]
    last: list[int | None] = [None] * streams
    for k, task in enumerate(tasks):
        before = {*task.needs, *[j for s in task.streams if (j := last[s]) is not None]}
        for j in before:
            after[j].append(k)
        for s in task.streams:
            last[s] = k
        missing.append(len(before))
    return missing, after


def _with_seconds(
    code: Code, streams: Sequence[tuple[int, str]], timed: Iterator[_Timed], seconds: Sequence[float]
) -> Code:
    """The code with the seconds of its run's tasks, in their order: each call has code of its own."""
    bodies: list[Code] = []
    plans: list[OpPlan | None] = []
    for plan in code.plans:
        if isinstance(plan, Call):
            bodies.append(_with_seconds(plan.body, streams, timed, seconds))
            plans.append(None)
            continue
        parts = tuple([_part(part, next(timed), seconds) for part in plan.parts])
        plans.append(plan._replace(parts=parts, simple=parts[0] if plan.simple else None))
    made = iter(bodies)

    def body(callee: Function) -> Code:
        return next(made)

    return code.timed(streams, zip(code.function.ops, plans, strict=True), body)


def _part(part: OpPart, timed: _Timed, seconds: Sequence[float]) -> OpPart:
    issues, duration = tuple([(host, quantize(seconds[k])) for host, k in timed.issues]), quantize(seconds[timed.part])
    message = part.message and part.message._replace(seconds=duration)
    return part._replace(duration=duration, issues=issues or part.issues, message=message)
