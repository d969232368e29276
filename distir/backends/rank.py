"""What every rank does from start to end, however it was started."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from distir.backends.comm import all_gather, movable
from distir.backends.pieces import Coord, digest
from distir.backends.record import Recorder
from distir.backends.torch import TorchRank, own_array, to_numpy
from distir.ir.errors import WorkerError
from distir.ir.function import Function
from distir.ir.type import Tensor

Pieces = dict[int, tuple[Coord, np.ndarray]]
"""By position among a program's inputs or outputs: where this rank is on the value's mesh, and what it holds.
"""


class Report(NamedTuple):
    """What a rank tells after a step; `inputs` (after the last): the values of inputs that were replaced."""

    step: int
    seconds: float
    outputs: Pieces
    inputs: Pieces


def execute(
    program: Function,
    rank: int,
    device: torch.device,
    arrays: Mapping[int, Any],
    feed: Callable[[int], Mapping[int, Any]],
    steps: int,
    report: Callable[[Report], None],
    every: bool = False,
    final: bool = True,
    record: str | None = None,
) -> None:
    """Run `steps` steps of `program` as rank `rank` of a process group that is joined.

    `arrays`: whole arrays by input position; `feed(k)` those that are new in step k. After each step `report`
    gets the seconds it took on this rank, all ranks having begun together, and this rank's pieces of
    one-element outputs, after the last (or with `every` each) step of all others; and with `final` the
    replaced inputs. Of copies only the first holder reports. `record` is a folder in which to keep every value that is
    made (see `distir.backends.record`).

    Raises WorkerError if the ranks have different programs.
    """
    _agree(program, device)
    recorder = None if record is None else Recorder(Path(record), rank, own_array)
    engine = TorchRank(program, rank, device, recorder)
    engine.load(arrays)
    for k in range(steps):
        engine.load(feed(k))
        _barrier(device)
        begin = time.perf_counter()
        outputs = engine.step()
        engine.synchronize()
        seconds = time.perf_counter() - begin
        if recorder is not None:
            recorder.end_step()
        last = k == steps - 1
        shown = {i: x for i, x in outputs.items() if i not in engine.updates}
        if not (last or every):
            shown = {i: x for i, x in shown.items() if _elements(program, i) == 1}
        renewed = {i: engine.values[i] for i in sorted(set(engine.updates.values())) if i in engine.values}
        report(
            Report(
                k,
                seconds,
                _pieces(engine, program.outputs, shown),
                _pieces(engine, program.inputs, renewed) if last and final else {},
            )
        )


def _elements(program: Function, output: int) -> int:
    t = program.outputs[output].type
    return int(np.prod(t.global_shape)) if isinstance(t, Tensor) else 0


def _pieces(engine: TorchRank, values: Any, held: Mapping[int, torch.Tensor]) -> Pieces:
    return {
        k: (engine.coordinate(t), to_numpy(x, t.dtype))
        for k, x in held.items()
        if isinstance(t := values[k].type, Tensor) and engine.holds_first(t)
    }


def _agree(program: Function, device: torch.device) -> None:
    """Raises WorkerError, on every rank, naming those whose program is not rank 0's."""
    mine = torch.frombuffer(bytearray(digest(program)), dtype=torch.uint8).to(device)
    everyone = torch.empty((dist.get_world_size(), len(mine)), dtype=torch.uint8, device=device)
    all_gather(movable(everyone), mine)
    others = [r for r, row in enumerate(everyone) if not torch.equal(row, everyone[0])]
    if others:
        names = ", ".join(map(str, others))
        raise WorkerError(
            f"rank{'s' if len(others) > 1 else ''} {names} would run another plan than rank 0",
            "start all ranks with the same model, flags and version",
        )


def _barrier(device: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
