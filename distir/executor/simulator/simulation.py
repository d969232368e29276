"""The simulator: runs a compiled program once; `Simulation` holds times and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from distir.executor.cost_model import CostModel
from distir.executor.simulator.busy import busy_times
from distir.executor.simulator.compile import CompiledProgram, device_streams
from distir.executor.simulator.lifetimes import Lifetimes, Order
from distir.executor.simulator.memory import LiveMemory, MemoryUse
from distir.executor.simulator.overheads import Overheads, overheads
from distir.executor.simulator.pools import in_pools
from distir.executor.simulator.shared_cores import on_shared_cores
from distir.executor.simulator.trace import Run, Trace, write_chrome
from distir.ir.device import Device
from distir.ir.errors import UsageError
from distir.ir.function import Function, Value
from distir.ir.infer import infer_types
from distir.ir.pause import no_collection
from distir.ir.topology import Topology
from distir.ir.type import Type

GIB = 2**30
T = TypeVar("T")


class Simulator:
    """Predicts the time and memory of a Function under a cost model.

    With `overlap` a device's communication runs beside its compute where dependencies allow; without, each device does
    one thing at a time. None leaves it to the cost model.
    """

    def __init__(self, cost_model: CostModel, *, overlap: bool | None = None) -> None:
        self.cost_model = cost_model
        self.overlap = cost_model.overlap if overlap is None else overlap

    @no_collection()
    def interpret(
        self,
        function: Function,
        types: Iterable[Type | Value] | None = None,
        *,
        batch: int | None = None,
        tokens: int | None = None,
        order: Order | None = None,
    ) -> Simulation:
        """Simulate one run of the function.

        `types`, one an input, are needed if the function has none. `batch` and `tokens` are the samples and tokens of
        a run, for the rates; without, `batch` is read from the data inputs' roles. `order` is that in which a device
        goes through the program, for its memory (see `Memory`).

        Raises UsageError for a device or link that the topology lacks, or a value without a type; IRTypeError for types
        that do not fit.
        """
        if types is not None:
            function = infer_types(function, types)
        program = CompiledProgram(function, self.cost_model, self.overlap)
        if self.cost_model.sharing is not None:
            program = on_shared_cores(program, self.cost_model.sharing)
        clock = [0.0] * len(program.streams)
        ready: list[float] = []
        entries = program.main.run(clock, ready)
        if batch is None:
            batch = _batch(function)
        return Simulation(program, clock, Run(program.main, ready, entries), batch, tokens, order)

    simulate = interpret


def _batch(function: Function) -> int | None:
    """The samples of a run, as the first data input with a batch dim has it."""
    for v in function.inputs:
        if v.role is not None and v.role.batch is not None:
            return v.type.erased().global_shape[v.role.batch]  # type: ignore[union-attr]
    return None


class PerDevice(Mapping[Device, T]):
    """A figure of every device, stored once for each class. Devices that the program does not use have `unused`."""

    def __init__(self, program: CompiledProgram, figure: Callable[[int], T], unused: T) -> None:
        self._program, self._figure, self._unused = program, figure, unused

    def __getitem__(self, device: Device) -> T:
        c = self._program.classes.of(device)
        if c is not None:
            return self._figure(c)
        try:
            self._program.cost.topology.spec(device)
        except UsageError:
            raise KeyError(device) from None
        return self._unused

    def __iter__(self) -> Iterator[Device]:
        used = dict(self._program.classes.devices())
        yield from used
        yield from (d for d in self._program.cost.topology.devices if d not in used)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        classes = self._program.classes
        rows = [f"{classes.label(c)}: {self._figure(c)!r}" for c in range(len(classes.sizes))]
        return "{" + ", ".join(rows) + "}"


class Stage(NamedTuple):
    """Use of a class of devices: seconds of compute, of exposed communication, and idle; bytes in use at the peak, and
    those of them that are tensors."""

    name: str
    devices: int
    compute: float
    communication: float
    bubble: float
    memory: int
    tensors: int


class Fit(NamedTuple):
    """Whether a program fits in memory, with a message. True if it fits."""

    ok: bool
    message: str

    def __bool__(self) -> bool:
        return self.ok


class Simulation:
    """The result of a simulation, in seconds and bytes. Prints as a table; all but the times is computed on first
    access.

    `run` is when each part of the program ended (see `distir.executor.simulator.trace.walk`).
    """

    def __init__(
        self,
        program: CompiledProgram,
        clock: list[float],
        run: Run,
        batch: int | None = None,
        tokens: int | None = None,
        order: Order | None = None,
    ) -> None:
        self.program, self.order = program, order
        self.batch, self.tokens = batch, tokens
        self.run = run
        self._ends = [max([clock[s] for s in streams], default=0.0) for _, streams in device_streams(program)]

    @property
    def seconds(self) -> float:
        """The time of the whole run."""
        return max(self._ends, default=0.0)

    @property
    def timestamps(self) -> PerDevice[float]:
        """The time at which each device finished; 0 for one that the program does not use."""
        return PerDevice(self.program, self._ends.__getitem__, 0.0)

    @cached_property
    def _lifetimes(self) -> Lifetimes:
        return Lifetimes(self.program, self.order)

    @cached_property
    def _memory(self) -> LiveMemory:
        return LiveMemory(self._lifetimes)

    @cached_property
    def _totals(self) -> LiveMemory:
        return LiveMemory(self._lifetimes, by_category=False)

    @cached_property
    def _overheads(self) -> list[Overheads]:
        """What the memory of each class holds beside tensors."""
        runtime = self.program.cost.runtime
        found = [overheads(self.program, c) for c in range(len(self.program.classes.sizes))]
        if runtime is not None and runtime.pools:
            return [x.with_slack(in_pools(self.program, self._memory.use(c))) for c, x in enumerate(found)]
        return found

    @cached_property
    def _tensors(self) -> dict[int, int]:
        """The most bytes of tensors of a device at once, by class: of classes whose categories were counted, or that
        were asked for."""
        return {}

    def _tensor_bytes(self, c: int) -> int:
        found = self._tensors.get(c)
        if found is None:
            found = self._tensors[c] = self._totals.use(c).total
        return found

    def _peak(self, c: int) -> int:
        """The most bytes of a device of a class in use at once."""
        return self._tensor_bytes(c) + self._overheads[c].total

    def _allocated(self, c: int) -> int:
        return self._tensor_bytes(c) + self._overheads[c].workspace

    def _class_of(self, device: Device) -> int:
        c = self.program.classes.of(device)
        if c is None:
            raise UsageError(f"{self.program.function.name} does not use {device}")
        return c

    def memory(self, device: Device) -> MemoryUse:
        """The live memory of a device's tensors: peak, categories, curve. Raises UsageError if the program does not use
        the device."""
        c = self._class_of(device)
        use = self._memory.use(c)
        self._tensors[c] = use.total
        return use

    def overheads(self, device: Device) -> Overheads:
        """What a device's memory holds beside tensors. Raises UsageError if the program does not use the device."""
        return self._overheads[self._class_of(device)]

    def memory_at_peak(self, device: Device) -> dict[str, int]:
        """Bytes of a device by category when most are in use: of tensors, and beside them. Raises UsageError if the
        program does not use the device."""
        return {**self.memory(device).by_category(), **self.overheads(device).by_category()}

    @property
    def peak_memory(self) -> PerDevice[int]:
        """The most bytes of each device in use at once, what is beside tensors included."""
        return PerDevice(self.program, self._peak, 0)

    @property
    def allocated_memory(self) -> PerDevice[int]:
        """The most bytes of each device that its allocator has handed out at once (`torch.cuda.max_memory_allocated`):
        of tensors, and workspaces."""
        return PerDevice(self.program, self._allocated, 0)

    @property
    def reserved_memory(self) -> PerDevice[int]:
        """The most bytes of each device that its allocator has held (`torch.cuda.max_memory_reserved`): slack, too."""
        return PerDevice(self.program, lambda c: self._allocated(c) + self._overheads[c].slack, 0)

    @cached_property
    def trace(self) -> Trace:
        """One event per op and device, computed on access."""
        return Trace(self.program, self.run)

    def to_chrome(self, path: str | Path) -> None:
        """Write a trace that Chrome and Perfetto open: a process a device class, a thread a stream."""
        classes = range(len(self.program.classes.sizes))
        write_chrome(path, self.program, self.run, {c: self._memory.use(c) for c in classes})

    @cached_property
    def stages(self) -> list[Stage]:
        """The use of each device class, in order of devices; compute, communication and bubble add up to `seconds`."""
        classes = self.program.classes
        rows: list[Stage] = []
        for c, (compute, busy) in enumerate(busy_times(self.run, len(classes.sizes))):
            memory, tensors = self.memories[c]
            name, devices = classes.label(c), classes.sizes[c]
            rows.append(Stage(name, devices, compute, busy - compute, self.seconds - busy, memory, tensors))
        return rows

    @cached_property
    def memories(self) -> list[tuple[int, int]]:
        """The peak of each device class, in order of devices: bytes in use, and of tensors alone."""
        return [(self._peak(c), self._tensor_bytes(c)) for c in range(len(self.program.classes.sizes))]

    @property
    def samples_per_second(self) -> float | None:
        """None if the batch is not known."""
        return self.batch / self.seconds if self.batch and self.seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """None if the tokens of a run are not known."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    def fits(self, topology: Topology | None = None) -> Fit:
        """Whether the peaks fit in the devices' memory (of another cluster, if given), and the worst shortfall."""
        topology = topology or self.program.cost.topology
        worst, message = 0.0, "fits in memory"
        for c, first in enumerate(self.program.classes.first):
            need, have = self._peak(c), topology.spec(first).capacity
            if need - have > worst:
                worst = need - have
                name = self.program.classes.label(c)
                message = f"short by {_gib(worst)} on {name} (needs {_gib(need)}, has {_gib(have)})"
        return Fit(worst == 0, message)

    def __str__(self) -> str:
        header = ("stage", "devices", "compute", "exposed comm", "bubble", "peak memory")
        rows = [
            (s.name, str(s.devices), _s(s.compute), _s(s.communication), _s(s.bubble), _gib(s.memory))
            for s in self.stages
        ]
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        lines: list[str] = []
        for name, *figures in (header, *rows):
            cells = [x.rjust(w) for x, w in zip(figures, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *cells]))
        end = [f"step time {_s(self.seconds)}"]
        if (rate := self.samples_per_second) is not None:
            end.append(f"{rate:,.1f} samples/s")
        if (rate := self.tokens_per_second) is not None:
            end.append(f"{rate:,.0f} tokens/s")
        return "\n".join([*lines, ", ".join([*end, str(self.fits().message)])])

    __repr__ = __str__

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        printer.text(str(self))  # type: ignore[attr-defined]


def _s(seconds: float) -> str:
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _gib(size: float) -> str:
    for unit, n in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= n / 10 and (size >= n or unit == "GiB"):
            return f"{size / n:,.1f} {unit}"
    return f"{size:.0f} B"
