"""One rank of a run that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
) -> RunResult:
    """Run `program` as the rank that the environment names; see `launch.run`. Rank 0 gathers the results.

    Raises WorkerError if another rank goes away or does not answer in time.
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

    def report(r: Report) -> None:
        everyone: list[Any] = [None] * world
        row = r.seconds, r.outputs, r.inputs, r.lap, r.memory, r.gradients
        dist.gather_object(row, everyone if rank == 0 else None)
        if rank != 0:
            result.seconds.append(r.seconds)
            return
        times, of_outputs, of_inputs, laps, memory, of_gradients = zip(*everyone, strict=True)
        result.seconds.append(max(times))
        result.memory = list(memory)
        outputs, inputs = gathered(program, of_outputs, of_inputs)
        result.outputs.append(outputs)
        result.inputs.update(inputs)
        result.gradients.update(gathered_gradients(program, of_gradients))
        result.saved += [] if r.saved is None else [r.saved]
        if on_step is not None:
            on_step(r.step, result.seconds[-1], outputs)
        end_epoch(result.epochs, r.step, epochs, laps, on_epoch)

    def doing(what: str) -> None:
        if rank == 0 and on_phase is not None:
            on_phase(what)

    mine, done = not dist.is_initialized(), False
    try:
        if mine:
            start_group(name, rank, world, device, None, timeout)
        if isinstance(data, Samples):
            agree(data.digest(), "would read other data than rank 0", device)
        told = None, profile, epochs, doing, first, saving, compiled
        kept = (lambda _, x: np.array(x)) if gradients else None
        execute(program, rank, device, arrays, feed, steps, report, every, final, *told, keep_gradient=kept)
        done = True
    except DistirError:
        raise
    except (RuntimeError, OSError) as e:
        if (short := plainly(e)) is not None:
            raise type(short)(f"rank {rank}: {short.message}", short.hint) from e
        message = str(e).strip().splitlines()
        raise WorkerError(f"rank {rank} failed: {type(e).__name__}: {message[0] if message else ''}") from e
    finally:
        if mine:
            leave_group(done)
    return result
