"""Run a job on this host, or as one of the processes of torchrun or mpirun, after preflight checks."""

from __future__ import annotations

from distir.backends.processes.host import run_here
from distir.backends.processes.preflight import check_backend, check_repeats, joins
from distir.ir.errors import UsageError, counted
from distir.runtime.job import NO_CALLBACKS, Job, JobCallbacks
from distir.runtime.outcome import Outcome
from distir.transforms.rank.check_programs import check_programs
from distir.transforms.rank.rank_program import RankOptions, rank_programs


def run(job: Job, callbacks: JobCallbacks = NO_CALLBACKS, alone: bool = False) -> Outcome:
    """Run a job, with a process for each device of its program.

    Under torchrun, or mpirun with backend mpi, this process joins as its rank; else, or if `alone`, all ranks are
    started here and ended with the call in any case.

    Raises UsageError for arguments that do not fit, or a checkpoint that cannot be written or read; InfeasibleError if
    the memory of a GPU does not suffice; WorkerError, naming the rank, if one fails, is killed or does not respond in
    time; and any DistirError that a rank raises.
    """
    world = job.world
    launched = None if alone else joins(job.options.resolved_backend)
    if launched and launched.world != world:
        raise UsageError(f"the plan has {counted(world, 'rank')}, {launched.by} started {launched.world}")
    if job.steps <= job.first:
        raise UsageError(f"steps: expected at least {job.first + 1}, got {job.steps}")
    here, backend = launched.here if launched else world, job.options.resolved_backend
    check_backend(backend, here)
    _check_programs(job)
    if launched:
        from distir.backends.processes.launched_rank import join  # loads torch

        return join(job, launched, callbacks)
    return run_here(job, callbacks)


def _check_programs(job: Job) -> None:
    """Verify the program and the ranks' programs. Raises what `verify` and `check_programs` raise."""
    from distir.ir.verify import verify

    verify(job.program)
    check_repeats(job.program, job.steps - job.first)
    options = RankOptions(job.options.compiled)
    check_programs(job.program, rank_programs(job.program, options))
    if job.epochs is not None and job.epochs.evaluation is not None:
        verify(job.epochs.evaluation)
        check_programs(job.epochs.evaluation, rank_programs(job.epochs.evaluation, options))
