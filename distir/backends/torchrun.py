"""One rank of a run that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distir.backends.checkpoint import Saving
from distir.backends.comm import leave_group, start_group
from distir.backends.epochs import Epochs, OnEpoch, end_epoch
from distir.backends.launch import Data, RunResult
from distir.backends.limits import place_of, plainly
from distir.backends.pieces import by_position, gathered, gathered_gradients
from distir.backends.rank import Report, agree, execute
from distir.backends.samples import Samples
from distir.ir.errors import DistirError, WorkerError
from distir.ir.function import Function


def join(
    program: Function,
    arrays: Mapping[int, Any],
    steps: int,
    data: Data | Samples | None,
    backend: str,
    timeout: float,
    threads: int,
    every: bool,
    final: bool,
    on_step: Callable[[int, float, dict[int, np.ndarray]], None] | None,
    epochs: Epochs | None,
    on_epoch: OnEpoch | None,
    profile: str | None,
    first: int,
    saving: Saving | None,
    compiled: bool,
    gradients: bool,
    on_phase: Callable[[str], None] | None,
    finite: bool,
) -> RunResult:
    """Run `program` as the rank that the environment names; see `launch.run`. Rank 0 gathers the results.

    Raises WorkerError if another rank goes away or does not answer in time, and what `on_step` or `on_epoch` raise: on
    other ranks than 0, which calls them, WorkerError, or BrokenPipeError as there.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name, where = place_of(backend, int(os.environ.get("LOCAL_RANK", rank)))
    device = torch.device(where)
    torch.set_num_threads(threads)
    result = RunResult(world, rank, backend)

    def feed(step: int) -> Mapping[int, Any]:
        if isinstance(data, Samples):
            return data.step(step)
        return by_position(program, data(step)) if data else {}

    failures: list[Exception] = []

    def told(mine: Any) -> list[Any]:
        """What all ranks tell, on rank 0."""
        everyone: list[Any] = [None] * world
        dist.gather_object(mine, everyone if rank == 0 else None)
        return everyone

    def report(r: Report) -> bool:
        everyone = told((r.seconds, r.outputs, r.lap, r.memory, r.gradients))
        if rank != 0:
            result.seconds.append(r.seconds)
            return False
        times, of_outputs, laps, memory, of_gradients = zip(*everyone, strict=True)
        result.seconds.append(max(times))
        result.memory = list(memory)
        outputs = gathered(program, of_outputs, [])[0]
        result.outputs.append(outputs)
        result.gradients.update(gathered_gradients(program, of_gradients))
        result.saved += [] if r.saved is None else [r.saved]
        try:
            if on_step is not None:
                on_step(r.step, result.seconds[-1], outputs)
            end_epoch(result.epochs, r.step, epochs, laps, on_epoch)
        except Exception as e:  # the other ranks are told before the next step, else they would wait for this one
            failures.append(e)
        return bool(failures)

    def doing(what: str) -> None:
        if rank == 0 and on_phase is not None:
            on_phase(what)

    mine, done = not dist.is_initialized(), False
    try:
        if mine:
            start_group(name, rank, world, device, None, timeout)
        if isinstance(data, Samples):
            agree(data.digest(), "would read other data than rank 0", device)
        more = None, profile, epochs, doing, first, saving, compiled, finite
        kept = (lambda _, x: np.array(x)) if gradients else None
        end = execute(program, rank, device, arrays, feed, steps, report, every, final, *more, keep_gradient=kept)
        if end.told:
            failures += _told_by_first(failures, rank)
        result.broken, ends = end.broken, told(end.inputs)
        if rank == 0:
            result.inputs = gathered(program, [], ends)[1]
        done = True
    except DistirError:
        raise
    except (RuntimeError, OSError) as e:
        if (short := plainly(e)) is not None:
            raise type(short)(f"rank {rank}: {short.message}", short.hint) from e
        raise WorkerError(f"rank {rank} failed: {type(e).__name__}: {_one_line(e)}") from e
    finally:
        if mine:
            leave_group(done)
    if failures:
        raise failures[0]
    return result


def _told_by_first(failures: Sequence[Exception], rank: int) -> list[Exception]:
    """On other ranks than 0, what to raise where a callback there has failed: nobody reads what they print either."""
    told: list[Any] = [None]
    if failures:
        e = failures[0]
        told = [(isinstance(e, BrokenPipeError), f"a callback of rank 0 failed: {type(e).__name__}: {_one_line(e)}")]
    dist.broadcast_object_list(told, 0)
    closed, text = told[0]
    return [] if rank == 0 else [BrokenPipeError(text) if closed else WorkerError(text)]


def _one_line(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    return lines[0] if lines else ""
