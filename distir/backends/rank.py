"""What every rank does from start to end, however it was started."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from distir.backends.ahead import Ahead
from distir.backends.checkpoint import Saved, Saving
from distir.backends.clock import Clock
from distir.backends.comm import all_gather
from distir.backends.epochs import Epochs, Lap, Laps
from distir.backends.finite import ALL_FINITE, Watch, lost, refuse
from distir.backends.layout import movable
from distir.backends.malloc import give_back, keep_freed
from distir.backends.memory import agreed_on
from distir.backends.pieces import Coord, Shipped, digest
from distir.backends.profile import Profiler
from distir.backends.record import Recorder
from distir.backends.resident import Growth
from distir.backends.torch import TorchRank, own_array, to_numpy
from distir.ir.errors import WorkerError
from distir.ir.function import Function
from distir.ir.type import Tensor

if TYPE_CHECKING:
    from distir.backends.dcp import Keeper

Pieces = dict[int, tuple[Coord, np.ndarray]]
"""By position among a program's inputs or outputs: where this rank is on the value's mesh, and what it holds.
"""


class Report(NamedTuple):
    """What a rank tells after a step; `lap` (at the end of an epoch): of the epoch; `saved`: the checkpoint that was
    written after it, if one was; `memory`: see `Growth`; `gradients` (after the first, if asked for): what optimizers
    took, by the weight's position.
    """

    step: int
    seconds: float
    outputs: Pieces
    lap: Lap | None = None
    saved: Saved | None = None
    memory: int | None = None
    gradients: Mapping[int, tuple[Coord, Any]] = {}


class End(NamedTuple):
    """How a rank's run has ended. `inputs`: the values of inputs that were replaced; `broken`: the number of what is
    not finite, the same on all ranks (see `finite`); `told`: whether it ended because a report asked for it.
    """

    inputs: Pieces
    broken: int = ALL_FINITE
    told: bool = False


def execute(
    program: Function,
    rank: int,
    device: torch.device,
    arrays: Mapping[int, Any],
    feed: Callable[[int], Mapping[int, Any]],
    steps: int,
    report: Callable[[Report], bool],
    every: bool = False,
    final: bool = True,
    record: str | None = None,
    profile: str | None = None,
    epochs: Epochs | None = None,
    doing: Callable[[str], None] = lambda what: None,
    first: int = 0,
    saving: Saving | None = None,
    compiled: bool = False,
    finite: bool = False,
    keep_gradient: Callable[[int, np.ndarray], Any] | None = None,
) -> End:
    """Run steps `first` to `steps` - 1 of `program` as rank `rank` of a process group that is joined.

    `arrays`: whole arrays by input position; `feed(k)` those that are new in step k. After each step `report`
    gets the seconds it took on this rank, all ranks having begun together, and this rank's pieces of
    one-element outputs, after the last (or with `every` each) step of all others. Of copies only the first holder
    reports. Where it gives True on any rank, all end before the next step. With `final` the end tells the replaced
    inputs. `record` is a folder in which to keep every value that is made (see `distir.backends.record`), `profile` one
    for a trace of when ops ran (see `distir.backends.profile`).
    `epochs`: at the end of each `report` also gets its lap; `doing` is told what is being done, now and then, while
    there is nothing to report. `saving` says which checkpoints to write, and which to begin with.
    `compiled`: what only computes goes through torch.compile, when it first runs. `finite`: all ranks
    end with the first step after which the loss is not finite; weights are looked at after the last step, and always
    before a checkpoint, which is not written of any that are not. `keep_gradient`, if given, makes what is reported of
    this rank's piece of a gradient (of the weight at that position), in the first step.

    Raises WorkerError if the ranks have different programs, UsageError if a checkpoint cannot be written or read.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # whoever has joined the process group: events and barriers go by it
    growth = Growth(device)
    keep_freed()
    agree(digest(program) + first.to_bytes(8), "would run another plan than rank 0", device)
    recorder = None if record is None else Recorder(Path(record), rank, own_array)
    profiler = None if profile is None else Profiler(program, rank, device, Path(profile), first, steps)
    taken: dict[int, tuple[Coord, Any]] = {}

    def on_gradient(weight: int, coord: Coord, x: np.ndarray) -> None:
        if keep_gradient is not None and k == first:
            taken[weight] = coord, keep_gradient(weight, x)

    doing("choosing kernels")
    shown = None if keep_gradient is None else on_gradient
    engine = TorchRank(program, rank, device, recorder, profiler, compiled, shown)
    doing("reading weights")
    for k, x in arrays.items():  # one at a time: what has been read of a file need not stay
        engine.load({k: x.array() if isinstance(x, Shipped) else x})
    give_back()  # what was read of files
    laps = None if epochs is None else Laps(epochs, _evaluator(engine, epochs, doing))
    keeper = None if saving is None else _keeper(engine, rank, saving)
    watch = Watch(program, engine.values) if finite or keeper is not None else None
    if finite and keeper is not None and keeper.resumed is not None and watch is not None:
        refuse(program, _least(device, watch.began)[0], keeper.resumed)
    data = Ahead(engine, feed, steps)
    doing("compiling, and running the first step" if compiled else "running the first step")
    clock = Clock(device)
    told, broken = False, ALL_FINITE
    for k in range(first, steps):
        start = time.perf_counter()
        data.load(k)
        fed = time.perf_counter()
        going, found = _least(device, not told, broken if finite else ALL_FINITE)  # a barrier, too: all begin together
        if not going:
            return End({}, found, True)
        if found != ALL_FINITE:
            return End(_renewed(engine) if final else {}, found)
        if profiler is not None:
            profiler.begin_step()
        begin = clock.now()
        outputs = engine.step()
        end = clock.now()
        engine.synchronize()
        seconds = clock.between(begin, end) / 1e9
        if profiler is not None:
            profiler.end_step(k)
        lap = laps.add(k, time.perf_counter() - start, fed - start) if laps is not None else None
        last = k == steps - 1
        made = _made(engine, outputs, last or every)
        del outputs  # nothing of a step is held in the next
        due = keeper is not None and keeper.saving.due(k + 1, steps)
        broken = lost(program, {i: x for i, (_, x) in made.items()}) if finite else ALL_FINITE
        if watch is not None and (last or due):
            broken = _least(device, min(broken, watch.first(engine.values)))[0]
        saved = keeper.save(k + 1) if keeper is not None and due and broken == ALL_FINITE else None
        if recorder is not None:
            recorder.end_step()
        told = report(Report(k, seconds, made, lap, saved, growth.bytes(), taken if k == first else {}))
        del made
    if profiler is not None:
        profiler.write()
    return End(_renewed(engine) if final else {}, broken)


def _keeper(engine: TorchRank, rank: int, saving: Saving) -> Keeper:
    """The keeper of a rank's checkpoints, the one to begin with already loaded."""
    from distir.backends.dcp import Keeper  # loading torch.distributed.checkpoint takes a while

    keeper = Keeper(engine, rank, saving)
    keeper.load()
    return keeper


def _evaluator(engine: TorchRank, epochs: Epochs, doing: Callable[[str], None]) -> Callable[[], Pieces] | None:
    """What runs the program that evaluates on all held-out samples, with the weights that `engine` then holds."""
    if epochs.evaluation is None or epochs.held_out is None:
        return None
    program, samples = epochs.evaluation, epochs.held_out
    other = TorchRank(program, engine.mine.rank, engine.device)

    def evaluate() -> Pieces:
        sums: dict[int, torch.Tensor] = {}
        other.values = dict(engine.values)
        for k in range(samples.steps):
            doing("evaluating")
            other.load(samples.step(k))
            for i, x in other.step().items():
                sums[i] = x.double() + sums.get(i, 0)
        other.values = {}
        return _pieces(other, program.outputs, {i: x / samples.steps for i, x in sums.items()})

    return evaluate


def _made(engine: TorchRank, outputs: Mapping[int, torch.Tensor], everything: bool) -> Pieces:
    """This rank's pieces of the outputs of a step that are no updates: of one element, or all."""
    shown = {i: x for i, x in outputs.items() if i not in engine.updates}
    if not everything:
        shown = {i: x for i, x in shown.items() if _elements(engine.program, i) == 1}
    return _pieces(engine, engine.program.outputs, shown)


def _renewed(engine: TorchRank) -> Pieces:
    """This rank's pieces of the inputs that are updated."""
    held = {i: engine.values[i] for i in sorted(set(engine.updates.values())) if i in engine.values}
    return _pieces(engine, engine.program.inputs, held)


def _elements(program: Function, output: int) -> int:
    t = program.outputs[output].type
    return int(np.prod(t.global_shape)) if isinstance(t, Tensor) else 0


def _pieces(engine: TorchRank, values: Any, held: Mapping[int, torch.Tensor]) -> Pieces:
    return {
        k: (engine.coordinate(t), to_numpy(x, t.dtype))
        for k, x in held.items()
        if isinstance(t := values[k].type, Tensor) and engine.holds_first(t)
    }


def agree(told: bytes, wrong: str, device: torch.device) -> None:
    """Raises WorkerError, on every rank, naming those that do not tell what rank 0 tells: they are `wrong`."""
    mine = torch.frombuffer(bytearray(told), dtype=torch.uint8).to(agreed_on(device))
    everyone = torch.empty((dist.get_world_size(), len(mine)), dtype=torch.uint8, device=mine.device)
    all_gather(movable(everyone), mine)
    others = [r for r, row in enumerate(everyone) if not torch.equal(row, everyone[0])]
    if others:
        names = ", ".join(map(str, others))
        raise WorkerError(
            f"rank{'s' if len(others) > 1 else ''} {names} {wrong}",
            "start all ranks with the same model, data, flags and version",
        )


def _least(device: torch.device, *mine: int) -> list[int]:
    """Of each number the least that any rank gives: when all have given theirs, and the device has nothing to do."""
    numbers = torch.tensor(mine, dtype=torch.int64, device=agreed_on(device))
    dist.all_reduce(numbers, dist.ReduceOp.MIN)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return numbers.tolist()
