"""One rank of a run started by torchrun or mpirun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distir.backends.processes.preflight import as_distir_error, backend_and_device, rank_threads
from distir.backends.processes.rank_loop import check_agreement, execute
from distir.backends.transport.torch_distributed import leave_group, start_group
from distir.ir.errors import DistirError, WorkerError
from distir.runtime.failure import first_line
from distir.runtime.job import Job, JobCallbacks
from distir.runtime.launcher import Launched
from distir.runtime.outcome import Outcome, Report
from distir.runtime.pieces import gathered
from distir.runtime.samples import Samples


def join(job: Job, launched: Launched, callbacks: JobCallbacks) -> Outcome:
    """Run as the rank that this process was started as; see `launch.run`. Rank 0 gathers the results.

    Raises WorkerError if another rank exits or does not respond in time. An exception of `callbacks` is raised on rank
    0, which calls them; other ranks then raise WorkerError, or BrokenPipeError if it was one.
    """
    rank, world = launched.rank, launched.world
    name, where = backend_and_device(job.options.resolved_backend, launched.local_rank)
    device = torch.device(where)
    torch.set_num_threads(rank_threads())
    outcome, failures = Outcome(), list[Exception]()
    mine, done = not dist.is_initialized(), False
    try:
        if mine:
            start_group(name, rank, world, device, None, job.options.timeout)
        _run(job, callbacks, device, outcome, failures)
        done = True
    except DistirError:
        raise
    except (RuntimeError, OSError) as e:
        if (short := as_distir_error(e)) is not None:
            raise type(short)(f"rank {rank}: {short.message}", short.hint) from e
        raise WorkerError(f"rank {rank} failed: {type(e).__name__}: {first_line(str(e))}") from e
    finally:
        if mine:
            leave_group(done)
    if failures:
        raise failures[0]
    return outcome


_TOGETHER = 16
"""So many steps of a proxy are reported at once: to report one disturbs the next, which may take but milliseconds."""


def _run(job: Job, callbacks: JobCallbacks, device: torch.device, outcome: Outcome, failures: list[Exception]) -> None:
    """Run the job in a process group that is already joined; exceptions of callbacks are added to `failures`."""
    rank = dist.get_rank()

    kept: list[Report] = []

    def report(r: Report) -> bool:
        kept.append(r)
        if job.proxy and len(kept) < _TOGETHER and r.step < job.steps - 1:
            return False
        mine = kept.copy()
        kept.clear()
        everyone = _gather_on_rank0(mine)
        if rank != 0:
            outcome.seconds += [x.seconds for x in mine]
            return False
        for reports in zip(*everyone, strict=True):
            outcome.add(job, list(reports))
            try:
                outcome.announce(job, callbacks, list(reports))
            except Exception as e:  # broadcast before the next step, or the other ranks would wait for this one
                failures.append(e)
                break
        return bool(failures)

    def doing(what: str) -> None:
        if rank == 0:
            callbacks.on_phase(what)

    if isinstance(job.data, Samples):
        check_agreement(job.data.digest(), "would read other data than rank 0", device)
    end = execute(job, rank, device, job.feed, report, doing, lambda _, x: np.array(x))
    if end.stopped:
        failures += _failure_of_rank0(failures, rank)
    ends = _gather_on_rank0(end.inputs)
    outcome.broken = end.broken
    if rank == 0:
        outcome.inputs = gathered(job.program, [], ends)[1]


def _gather_on_rank0(mine: Any) -> list[Any]:
    """The objects of all ranks, on rank 0; a list of None on others."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, everyone if dist.get_rank() == 0 else None)
    return everyone


def _failure_of_rank0(failures: Sequence[Exception], rank: int) -> list[Exception]:
    """Broadcast a callback's failure on rank 0; returns the exception to raise on other ranks, [] on rank 0.

    A BrokenPipeError stays one: the other ranks' output has no reader either.
    """
    message: list[Any] = [None]
    if failures:
        e = failures[0]
        text = f"a callback of rank 0 failed: {type(e).__name__}: {first_line(str(e))}"
        message = [(isinstance(e, BrokenPipeError), text)]
    dist.broadcast_object_list(message, 0)
    closed, text = message[0]
    return [] if rank == 0 else [BrokenPipeError(text) if closed else WorkerError(text)]
