"""The main loop of a rank, however it was started."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from distir.backends.lowering.engine import TorchRank, own_array, to_numpy
from distir.backends.lowering.profile import Profiler
from distir.backends.storage.read_ahead import ReadAhead
from distir.backends.tensors.clock import Clock
from distir.backends.tensors.layout import movable
from distir.backends.tensors.resident import Growth
from distir.backends.tensors.staging import control_device
from distir.backends.transport.torch_distributed import all_gather, least
from distir.ir.errors import WorkerError
from distir.ir.function import Function
from distir.ir.type import Tensor
from distir.runtime.checkpoint import Saved, Saving
from distir.runtime.epochs import Epochs, EpochTimer
from distir.runtime.finite import ALL_FINITE, FiniteWatch, nonfinite_loss, reject_nonfinite
from distir.runtime.job import Job
from distir.runtime.malloc import give_back, keep_freed
from distir.runtime.outcome import Report
from distir.runtime.pieces import Coord, Pieces, Shipped, digest
from distir.runtime.record import Recorder

if TYPE_CHECKING:
    from distir.backends.storage.dcp import Keeper


class End(NamedTuple):
    """The end of a rank's run. `inputs`: the rank's pieces of updated inputs; `broken`: the number of a value that is
    not finite, the same on all ranks (see `finite`); `stopped`: the run ended because `report` returned True.
    """

    inputs: Pieces
    broken: int = ALL_FINITE
    stopped: bool = False


class _Rank(NamedTuple):
    """A rank's engine, and what observes and saves its steps."""

    job: Job
    engine: TorchRank
    growth: Growth
    recorder: Recorder | None
    profiler: Profiler | None
    gradients: dict[int, tuple[Coord, Any]]
    timer: EpochTimer | None
    keeper: Keeper | None
    watch: FiniteWatch | None

    @property
    def device(self) -> torch.device:
        return self.engine.device


def execute(
    job: Job,
    rank: int,
    device: torch.device,
    feed: Callable[[int], Mapping[int, Any]],
    report: Callable[[Report], bool],
    on_phase: Callable[[str], None],
    keep_gradient: Callable[[int, np.ndarray], Any],
) -> End:
    """Run a job as rank `rank` of a process group that is already joined.

    The job's arrays are whole, by input position; `feed(k)` returns those that change in step k. `report` is called
    after each step, with the pieces of outputs of which this rank is the first holder; if it returns True on any rank,
    all stop before the next step. `on_phase` is called when a phase of the preparation begins. With check,
    `keep_gradient(weight, piece)` converts this rank's gradients of the first step for the report. With
    `options.compiled`, functions are compiled when they first run. Weights are checked (see `Job.finite`) after the
    last step and before each checkpoint.

    Raises WorkerError if the ranks have different programs, UsageError if a checkpoint cannot be written or read.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and barriers use the current device
    r = _prepared(job, rank, device, on_phase, keep_gradient)
    engine, profiler = r.engine, r.profiler
    data = ReadAhead(engine, feed, job.steps)
    on_phase("compiling, and running the first step" if job.options.compiled else "running the first step")
    clock = Clock(device)
    stop, broken = False, ALL_FINITE
    for k in range(job.first, job.steps):
        start = time.perf_counter()
        data.load(k)
        fed = time.perf_counter()
        proceed, found = least([not stop, broken if job.finite else ALL_FINITE], device)  # a barrier
        if not proceed:
            return End({}, found, True)
        if found != ALL_FINITE:
            return End(_updated(r), found)
        if profiler is not None:
            profiler.begin_step()
        begin = clock.now()
        outputs = engine.step()
        end = clock.now()
        engine.synchronize()
        seconds = clock.between(begin, end) / 1e9
        if profiler is not None:
            profiler.end_step(k)
        engine.on_gradient = None  # only gradients of the first step are reported
        epoch = None if r.timer is None else r.timer.add(k, time.perf_counter() - start, fed - start)
        made = _made(engine, outputs, job.options.check or k == job.steps - 1)
        del outputs  # free the step's memory before the next
        broken, saved = _after_step(r, k, made)
        gradients = r.gradients if k == job.first else {}
        stop = report(Report(k, seconds, made, epoch, saved, r.growth.bytes(), gradients))
        del made
    if profiler is not None:
        profiler.write()
    return End(_updated(r), broken)


def _prepared(
    job: Job,
    rank: int,
    device: torch.device,
    on_phase: Callable[[str], None],
    keep_gradient: Callable[[int, np.ndarray], Any],
) -> _Rank:
    """A rank with its weights loaded, from a checkpoint if the run is resumed."""
    growth = Growth(device)
    keep_freed()
    program, options = job.program, job.options
    check_agreement(digest(program) + job.first.to_bytes(8), "would run another plan than rank 0", device)
    recorder = None if job.record is None else Recorder(job.record, rank, own_array)
    profiler = None
    if options.profile is not None:
        profiler = Profiler(program, rank, device, Path(options.profile), job.first, job.steps)
    gradients: dict[int, tuple[Coord, Any]] = {}

    def on_gradient(weight: int, coord: Coord, x: np.ndarray) -> None:
        gradients[weight] = coord, keep_gradient(weight, x)

    on_phase("choosing kernels")
    shown = on_gradient if options.check else None
    engine = TorchRank(program, rank, device, recorder, profiler, options.compiled, shown, job.proxy)
    on_phase("reading weights")
    for k, x in job.arrays.items():  # one at a time, so that pages read from a file can be dropped
        engine.load({k: x.array() if isinstance(x, Shipped) else x})
    if job.proxy:
        engine.reserve()
    give_back()  # memory used for reading files
    timer = None if job.epochs is None else EpochTimer(job.epochs, _evaluator(engine, job.epochs, on_phase))
    keeper = None if job.saving is None else _keeper(engine, rank, job.saving)
    watch = FiniteWatch(program, engine.values) if job.finite or keeper is not None else None
    if job.finite and keeper is not None and keeper.resumed is not None and watch is not None:
        reject_nonfinite(program, least([watch.initial], device)[0], keeper.resumed)
    return _Rank(job, engine, growth, recorder, profiler, gradients, timer, keeper, watch)


def _after_step(r: _Rank, step: int, made: Pieces) -> tuple[int, Saved | None]:
    """After a step: check that values are finite, and write a checkpoint if one is due. Returns the number of a value
    that is not finite, and the checkpoint written.

    The number is agreed between ranks if weights were checked, else this rank's own.
    """
    job, last = r.job, step == r.job.steps - 1
    due = r.keeper is not None and r.keeper.saving.due(step + 1, job.steps)
    broken = nonfinite_loss(job.program, {i: x for i, (_, x) in made.items()}) if job.finite else ALL_FINITE
    if r.watch is not None and (last or due):
        broken = least([min(broken, r.watch.first(r.engine.values))], r.device)[0]
    saved = r.keeper.save(step + 1) if r.keeper is not None and due and broken == ALL_FINITE else None
    if r.recorder is not None:
        r.recorder.end_step()
    return broken, saved


def _keeper(engine: TorchRank, rank: int, saving: Saving) -> Keeper:
    """The keeper of a rank's checkpoints; loads the one to resume from."""
    from distir.backends.storage.dcp import Keeper  # loading torch.distributed.checkpoint takes a while

    keeper = Keeper(engine, rank, saving)
    keeper.load()
    return keeper


def _evaluator(engine: TorchRank, epochs: Epochs, on_phase: Callable[[str], None]) -> Callable[[], Pieces] | None:
    """A function that evaluates all held-out samples with the current weights of `engine`; None without them."""
    if epochs.evaluation is None or epochs.held_out is None:
        return None
    program, samples = epochs.evaluation, epochs.held_out
    other = TorchRank(program, engine.mine.rank, engine.device)

    def evaluate() -> Pieces:
        sums: dict[int, torch.Tensor] = {}
        other.values = dict(engine.values)
        for k in range(samples.steps):
            on_phase("evaluating")
            other.load(samples.step(k))
            for i, x in other.step().items():
                sums[i] = x.double() + sums.get(i, 0)
        other.values = {}
        return _pieces(other, program.outputs, {i: x / samples.steps for i, x in sums.items()})

    return evaluate


def _made(engine: TorchRank, outputs: Mapping[int, torch.Tensor], everything: bool) -> Pieces:
    """This rank's pieces of the outputs of a step that are not updates: all, or those of one element."""
    shown = {i: x for i, x in outputs.items() if i not in engine.updates}
    if not everything:
        shown = {i: x for i, x in shown.items() if _elements(engine.program, i) == 1}
    return _pieces(engine, engine.program.outputs, shown)


def _updated(r: _Rank) -> Pieces:
    """This rank's pieces of the updated inputs; none in a recorded run, of which only the records are needed."""
    if r.recorder is not None:
        return {}
    engine = r.engine
    values = {i: engine.values[i] for i in sorted(set(engine.updates.values())) if i in engine.values}
    return _pieces(engine, engine.program.inputs, values)


def _elements(program: Function, output: int) -> int:
    t = program.outputs[output].type
    return int(np.prod(t.global_shape)) if isinstance(t, Tensor) else 0


def _pieces(engine: TorchRank, declared: Any, values: Mapping[int, torch.Tensor]) -> Pieces:
    return {
        k: (engine.coordinate(t), to_numpy(x, t.dtype))
        for k, x in values.items()
        if isinstance(t := declared[k].type, Tensor) and engine.holds_first(t)
    }


def check_agreement(value: bytes, wrong: str, device: torch.device) -> None:
    """Raises WorkerError on every rank unless `value` is the same on all; names those that differ from rank 0.

    `wrong` completes the message "ranks ...".
    """
    mine = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(control_device(device))
    everyone = torch.empty((dist.get_world_size(), len(mine)), dtype=torch.uint8, device=mine.device)
    all_gather(movable(everyone), mine)
    others = [r for r, row in enumerate(everyone) if not torch.equal(row, everyone[0])]
    if others:
        names = ", ".join(map(str, others))
        raise WorkerError(
            f"rank{'s' if len(others) > 1 else ''} {names} {wrong}",
            "start all ranks with the same model, data, flags and version",
        )
