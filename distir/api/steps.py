"""Run a job in this process on the reference executor: a sequential program, or all devices of a distributed one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distir.executor.reference.joining import join, lanes
from distir.executor.reference.sequential import OnUpdate, RuntimeValue, SequentialExecutor, unfit
from distir.ir.device import Mesh
from distir.ir.function import Function, Op
from distir.ir.type import Tensor
from distir.runtime.checkpoint import Saving
from distir.runtime.epochs import Epoch, Epochs, EpochTimer
from distir.runtime.finite import ALL_FINITE, FiniteWatch, nonfinite_loss
from distir.runtime.job import NO_CALLBACKS, Job, JobCallbacks
from distir.runtime.outcome import Outcome
from distir.transforms.differentiation.gradients import gradients

if TYPE_CHECKING:
    from distir.backends.storage.dcp import WholeKeeper


def compute_steps(
    job: Job, executor: SequentialExecutor | None = None, callbacks: JobCallbacks = NO_CALLBACKS
) -> Outcome:
    """Run a job in this process; the outcome has every output of each step. See `SequentialExecutor`."""
    executor = executor or SequentialExecutor()
    function, done = job.program, Outcome()
    if job.options.check:
        executor.on_update = _keeping(function, done.gradients)
    position = {v: k for k, v in enumerate(function.inputs)}
    updates = {k: position[function.updates[v]] for k, v in enumerate(function.outputs) if v in function.updates}
    values = dict(job.arrays)
    keeper = None if job.saving is None else _keeper(function, job.saving)
    watch = FiniteWatch(function, values) if job.finite or keeper is not None else None
    timer = None if job.epochs is None else EpochTimer(job.epochs, None)
    for step in range(job.first, job.steps):
        start = time.perf_counter()
        values |= job.feed(step)
        begin = time.perf_counter()
        with np.errstate(all="ignore"):  # divergence is detected by the loss
            results = executor.compute(function, [values.get(k) for k in range(len(function.inputs))])
        seconds = time.perf_counter() - begin
        executor.on_update = None
        values |= {place: results[k] for k, place in updates.items()}
        shown = {k: x for k, x in enumerate(results) if k not in updates}
        done.seconds.append(seconds)
        done.outputs.append(shown)
        due = keeper is not None and keeper.saving.due(step + 1, job.steps)
        done.broken = nonfinite_loss(function, shown) if job.finite else ALL_FINITE
        if watch is not None and (due or step == job.steps - 1):
            done.broken = min(done.broken, watch.first(values))
        if keeper is not None and due and done.broken == ALL_FINITE:
            done.saved.append(keeper.save(step + 1, values))
        callbacks.on_step(step, seconds, shown)
        ended = timer.add(step, begin - start + seconds, begin - start) if timer is not None else None
        if ended is not None and job.epochs is not None:
            spent = [ended.seconds], [ended.first], [ended.data_seconds]
            means = _evaluated(executor, job.epochs, values)
            callbacks.on_epoch(Epoch(step // job.epochs.steps, ended.steps, *spent, means))
        if job.finite and done.broken != ALL_FINITE:
            break
    done.inputs.update({place: values[place] for place in updates.values()})
    return done


def _keeping(program: Function, found: dict[int, np.ndarray]) -> OnUpdate:
    """A callback that puts each gradient, without padding, into `found`, by the position of the weight."""
    known = gradients(program)
    unrolled = not any(op.callee for op in program.ops)

    def keep(function: str, op: Op, ins: Sequence[RuntimeValue]) -> None:
        gradient = known.get((function, op.outputs[0].name))
        if gradient is None or op.spec.gradient is None:
            return
        t, x = gradient.type, ins[op.spec.gradient]
        if isinstance(t, Tensor) and isinstance(t.device, Mesh):
            x = join(dict(zip(lanes(t.device, unrolled), x, strict=True)), t)
        role = program.inputs[gradient.weight].role
        found[gradient.weight] = np.array(unfit(x, role and role.source))

    return keep


def _keeper(function: Function, saving: Saving) -> WholeKeeper:
    from distir.backends.storage.dcp import WholeKeeper  # loads torch

    return WholeKeeper(function, saving)


def _evaluated(executor: SequentialExecutor, epochs: Epochs, values: Mapping[int, Any]) -> dict[int, np.ndarray]:
    """The means of what evaluation gives over all held-out samples."""
    if epochs.evaluation is None or epochs.held_out is None:
        return {}
    rows: list[list[np.ndarray]] = []
    for k in range(epochs.held_out.steps):
        arrays = {**values, **epochs.held_out.step(k)}
        with np.errstate(all="ignore"):
            rows.append(
                executor.compute(epochs.evaluation, [arrays.get(i) for i in range(len(epochs.evaluation.inputs))])
            )
    return {
        i: np.asarray(np.mean(column, axis=0, dtype=np.float64)) for i, column in enumerate(zip(*rows, strict=True))
    }
