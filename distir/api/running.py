"""Run a model's program under a plan, check the results, and report them with the prediction."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distir.api.batches import Workload, plan_work
from distir.api.callbacks import RunCallbacks, takes_changes, with_changes
from distir.api.check import Check, compare, types_of_16_bits
from distir.api.comparison import start_profile
from distir.api.compilation import ONE, Cluster, cost_model, distribute, plan_in_effect, predict
from distir.api.data import Data
from distir.api.locate import locate
from distir.api.metrics import Metrics, loss_of
from distir.api.model import Model, loads
from distir.api.prediction import Prediction
from distir.api.results import size
from distir.api.resume import check_settings, checkpointing
from distir.api.rounding import perturbed
from distir.api.run_result import RunResult
from distir.api.stage_cost import stage_cost
from distir.api.steps import compute_steps
from distir.backends.processes.launch import run as launch
from distir.backends.processes.preflight import LESS_MEMORY, available_memory, check_memory, joins
from distir.executor.reference.sequential import SequentialExecutor
from distir.hardware import this_host
from distir.ir.errors import CopiesError, InfeasibleError, MismatchError, UsageError
from distir.ir.files import check_writable
from distir.ir.function import Function, Value
from distir.runtime.checkpoint import Saving, updated_inputs
from distir.runtime.finite import ALL_FINITE, FiniteWatch, diverged, name_of, reject_nonfinite
from distir.runtime.job import Job, JobCallbacks, OnStep, ignore
from distir.runtime.launcher import cores_of_ranks, this_rank
from distir.runtime.options import RunOptions
from distir.runtime.outcome import Outcome
from distir.runtime.samples import Samples
from distir.transforms.differentiation.loss_scale import SKIPPED
from distir.transforms.differentiation.training import AdamW
from distir.transforms.plan import Plan

AnyData = Data | Mapping[str, np.ndarray] | str | os.PathLike[str]
_RECORDING_MEMORY = 4
"""Memory needed to record all values of a run, as a multiple of the run's own."""


@loads
@takes_changes
def run(
    model: Model,
    plan: Plan = ONE,
    options: RunOptions | None = None,
    *,
    data: AnyData | None = None,
    cluster: Cluster | None = None,
    callbacks: RunCallbacks | None = None,
    **changes: Any,
) -> RunResult:
    """Run steps of the model's program, with a process per device, and compare the time with the prediction.

    Options and callbacks may be given as keywords: `run(model, plan, steps=5, check=True, on_step=print)`; see
    `help(distir.RunOptions)` and `help(distir.RunCallbacks)`. `data`: an .npz file, arrays by name or a text (see
    `Data`); by default random, from `seed`. `cluster`: what to predict for; by default "cpu-2core" with this host's
    cores, which the ranks share.

    A training run ends at the first step whose loss is not finite, or when weights or optimizer state are not finite;
    these are checked before each checkpoint and after the last step. With `allow_nonfinite` it continues, but writes no
    checkpoint with values that are not finite.

    A model that came from a torch.nn.Module starts from the module's weights as they are, and trained weights are
    written into the module, in place, if the run and its check succeed (under torchrun on rank 0).

    Raises DivergedError, naming the step and with the verdict of `check`, for a run that ended so; InfeasibleError for
    a plan that cannot be applied or does not fit in memory; MismatchError, naming the first value that differs, its op
    and rank, if the check fails; WorkerError if a rank fails; UsageError for an option that does not exist or does not
    fit, and for checkpoints that cannot be written, are of another model, not finite, or all damaged.
    """
    options, callbacks = with_changes(options, callbacks, changes)
    check_settings(model, options)
    if options.save is not None:
        _check_save(options.save, model)
    plan = plan_in_effect(model, plan)
    prepared = _prepare(model, plan, options, data, cluster)
    job, prediction, metrics = prepared.job, prepared.prediction, prepared.metrics
    if metrics is not None and options.resume:
        metrics.continue_file(options.metrics)
    listeners = callbacks.measuring(metrics, model.function, options)
    if callbacks.on_plan is not None:
        callbacks.on_plan(prediction)
    if metrics is not None and callbacks.on_epoch is not None:
        callbacks.on_epoch(metrics)
    with checkpointing(model, plan, prepared.data, options) as saving:
        job = _resumed(job, saving)
        if metrics is not None:
            metrics.drop_from(job.first // metrics.steps)
        done = _execute(job, prediction, listeners)
    check = None
    if options.check and done.seconds and this_rank() == 0:
        check = _check(model, job, done, prediction, callbacks.on_check or ignore)
    if job.finite and done.broken != ALL_FINITE:
        raise diverged(model.function, done.broken, job.first + len(done.seconds) - 1, check and check.verdict)
    result = _result(model, prepared._replace(job=job), done, check)
    if model.parameters is not None and result.weights:
        from distir.backends.modules.module_weights import hand_back

        hand_back(model.parameters, result.weights)
        for counter in model.counters:
            counter.advance(job.first, len(done.seconds))
    if options.save is not None and result.weights:
        result.save(options.save)
    return result


def _check_save(path: str | os.PathLike[str], model: Model) -> None:
    """Check, before training, that there will be weights to save, and that the path can be written."""
    if not model.function.updates:
        raise UsageError("--save writes trained weights: it needs a loss", "--loss cross-entropy, or mse")
    if model.path is None:
        trained = "the module itself is trained: torch.save(module.state_dict(), FILE)"
        raise UsageError(
            f"--save writes the model's ONNX file with other weights: {model.name} has none",
            None if model.parameters is None else trained,
        )
    check_writable(path)


class _Prepared(NamedTuple):
    """A compiled run, before its first step."""

    job: Job
    data: Data
    prediction: Prediction
    metrics: Metrics | None


def _prepare(model: Model, plan: Plan, options: RunOptions, data: AnyData | None, cluster: Cluster | None) -> _Prepared:
    """Compile and predict the program, check that it fits in memory, and collect its initial arrays and data."""
    function = model.function
    cost = cost_model(this_host(plan.size, cores_of_ranks()) if cluster is None else cluster, plan)
    program = distribute(model, plan, cost.topology.devices[: plan.size], cost=stage_cost(cost, plan))
    prediction = predict(model, plan, program, cost)
    _check_memory(prediction, options.resolved_backend, plan.size)
    arrays = model.initial(options.seed)
    fed = data if isinstance(data, Data) else Data(function, arrays, data, options.seed, options.tokenizer)
    if options.profile is not None:
        start_profile(Path(options.profile), options.resolved_backend, prediction)
    work = plan_work(fed, function, program, options)
    metrics = None
    if work.epochs is not None:
        metrics = Metrics(prediction, work.epochs.steps, _about(work, fed, options, plan))
    job = Job(
        program,
        _by_position(function, arrays | fed.fixed()),
        work.data,
        work.steps,
        options,
        epochs=work.epochs,
    )
    return _Prepared(job, fed, prediction, metrics)


def _about(work: Workload, data: Data, options: RunOptions, plan: Plan) -> dict[str, Any]:
    """Fields of the metrics file that describe the run: backend, ranks, data and seed."""
    samples = None
    if isinstance(work.data, Samples):
        samples = {"training": work.data.count, "held_out": work.held_out}
    file = None if data.path is None else os.fspath(data.path)
    ran = {"backend": options.resolved_backend, "ranks": plan.size}
    return {**ran, "data": file, "samples": samples, "seed": data.seed}


def _resumed(job: Job, saving: Saving | None) -> Job:
    """The job with its checkpoint settings; with `resume`, starting from a checkpoint."""
    job = replace(job, saving=saving)
    if saving is None or saving.resume is None:
        return job
    old = updated_inputs(job.program)
    arrays = {k: x for k, x in job.arrays.items() if k not in old}
    # ranks read their own pieces; this process needs whole arrays only where it computes itself
    if job.options.check or job.options.resolved_backend == "numpy" or saving.step >= job.steps:
        from distir.backends.storage.dcp import read_wholes

        folder = Path(saving.directory, saving.resume)
        found = read_wholes(folder, job.program)
        if job.finite:
            reject_nonfinite(job.program, FiniteWatch(job.program, found).initial, folder)
        arrays |= found
    return replace(job, arrays=arrays, first=saving.step)


def _execute(job: Job, prediction: Prediction, callbacks: JobCallbacks) -> Outcome:
    """Run a job: in this process with backend numpy, else in a process per rank."""
    if job.first >= job.steps:  # all steps were done before the checkpoint
        return Outcome(inputs={k: job.arrays[k] for k in updated_inputs(job.program)})
    if job.options.resolved_backend != "numpy":
        return launch(job, callbacks)
    try:
        return compute_steps(job, callbacks=callbacks)
    except CopiesError as e:
        raise MismatchError(f"{e.message}; {_locate(job, prediction)}") from e


def _check(model: Model, job: Job, done: Outcome, prediction: Prediction, on_check: OnStep) -> Check:
    """Compare with the sequential program. Raises MismatchError if the results differ."""
    options = replace(job.options, allow_nonfinite=True)  # the run may have ended at a step that is not finite
    job = replace(job, options=options, epochs=None, saving=None, steps=job.first + len(done.seconds))
    alone, callbacks = replace(job, program=model.function), JobCallbacks(on_step=on_check)
    want = compute_steps(alone, callbacks=callbacks)
    rounding = compute_steps(alone, SequentialExecutor(tap=perturbed(model.function)), callbacks)
    comparison = compare(model.function, job.arrays, done, want, rounding, job.first)
    if (first := comparison.first) is not None:
        if options.compiled:
            raise MismatchError(
                f"the run differs from the sequential one: {first}", "without --compile the op at fault is named"
            )
        where = _locate(job if first.step is None else replace(job, steps=first.step + 1), prediction)
        hint = None
        if first.step != job.first and isinstance(model.optimizer, AdamW):
            hint = (
                "AdamW magnifies the rounding of gradients near its eps: float64 distinguishes rounding from an error"
            )
        elif types_of_16_bits(model.function):
            hint = "a norm of few numbers, for one, magnifies rounding in 16 bits: dtype float64 widens all of the step"
        raise MismatchError(f"the run differs from the sequential one: {first}; {where}", hint)
    return comparison


def _check_memory(prediction: Prediction, backend: str, ranks: int) -> None:
    """Raises InfeasibleError if a run does not fit in the memory of this host, before its arrays take any."""
    if backend != "numpy":
        launched = joins(backend)
        check_memory(prediction.peak_memory, launched.here if launched else ranks, backend)
        return
    need, have = _memory(prediction), available_memory()
    if have is not None and need > have:
        raise InfeasibleError(f"{size(need)} of memory are needed, {size(have)} are available", LESS_MEMORY)


def _memory(prediction: Prediction) -> int:
    """Predicted bytes of all devices together."""
    simulation = prediction.simulation
    return sum(
        [memory * n for (memory, _), n in zip(simulation.memories, simulation.program.classes.sizes, strict=True)]
    )


def _locate(job: Job, prediction: Prediction) -> str:
    """See `locate`; if there is not enough memory to record every value, a message that says so."""
    have = available_memory()
    if have is not None and _memory(prediction) * _RECORDING_MEMORY > have:
        return "there is not enough memory to find the op at fault: try a smaller batch or model"
    return locate(job)


def _by_position(function: Function, arrays: Mapping[Value, Any]) -> dict[int, Any]:
    return {k: arrays[v] for k, v in enumerate(function.inputs) if v in arrays}


def _result(model: Model, prepared: _Prepared, done: Outcome, check: Check | None) -> RunResult:
    function, job, prediction = model.function, prepared.job, prepared.prediction
    losses = [x for outputs in done.outputs if (x := loss_of(function, outputs)) is not None]
    return RunResult(
        summary=prediction.summary,
        backend=job.options.resolved_backend,
        losses=losses,
        seconds=done.seconds,
        outputs={function.outputs[k].name: x for k, x in (done.outputs[-1] if done.outputs else {}).items()},
        weights={
            v.name: done.inputs[k]
            for k, v in enumerate(function.inputs)
            if k in done.inputs and (v.kind == "parameter" or v in model.arrays)
        },
        prediction=prediction,
        check=check,
        model=model,
        metrics=prepared.metrics,
        first=job.first,
        saved=done.saved,
        memory=done.memory,
        profiled=job.options.profile is not None,
        unsaved=None if job.saving is None or done.broken == ALL_FINITE else name_of(function, done.broken),
        skipped=next((int(x) for k, x in done.inputs.items() if function.inputs[k].name == SKIPPED), 0),
    )
