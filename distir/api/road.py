"""The road: from a model and a plan to a distributed program, to what it costs, and to what it computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distir.api.balance import stage_cost
from distir.api.check import Check, compare
from distir.api.compare import start_profile
from distir.api.data import Data
from distir.api.epochs import Work, plan_work
from distir.api.locate import locate
from distir.api.metrics import Metrics
from distir.api.model import Model, as_model
from distir.api.plan import Plan
from distir.api.results import Prediction, RunResult, Summary, size
from distir.api.resume import beginning, check_settings
from distir.api.rounding import perturbed
from distir.api.steps import Job, OnStep, Steps, compute_steps
from distir.backends.checkpoint import Saving, renewed
from distir.backends.epochs import Epoch
from distir.backends.finite import ALL_FINITE, Watch, diverged, name_of, refuse
from distir.backends.launch import run as launch
from distir.backends.limits import available_memory, backend_on
from distir.executor.cost_model import CostModel
from distir.executor.sequential import SequentialExecutor, evaluate
from distir.executor.simulator import Simulator
from distir.hardware import load_cluster, this_host
from distir.ir import Device, Function, Topology, verify
from distir.ir import validate as compare_terms
from distir.ir.errors import CopiesError, InfeasibleError, MismatchError, UsageError, counted
from distir.ir.function import Value
from distir.transforms.claims import check_rewrite
from distir.transforms.padding import check_padding
from distir.transforms.parallel3d import parallel_transform_3d, prepared
from distir.transforms.stages import PLAIN, StageCost
from distir.transforms.training import AdamW

AnyModel = Model | Function | str | os.PathLike[str]
Cluster = CostModel | Topology | str | os.PathLike[str]
ONE = Plan()
_KEPT = 4
"""How many times the memory of a run is needed to keep all values that it makes."""


def distribute(
    model: AnyModel,
    plan: Plan = ONE,
    devices: Sequence[Device] | None = None,
    check: bool = True,
    cost: StageCost = PLAIN,
) -> Function:
    """The model's program spread over devices (without any: `cpu:0`, `cpu:1`, ...), verified and validated.

    `cost` is what stages are balanced by: the plain default knows no cluster; `simulate` and `run` take the cluster's.
    `check=False` leaves out the verification. Raises InfeasibleError for a plan that cannot be carried out.
    """
    function = as_model(model).function
    devices = [Device("cpu", i) for i in range(plan.size)] if devices is None else devices
    program = parallel_transform_3d(
        function,
        plan.dp,
        plan.tp,
        plan.pp,
        devices,
        plan.microbatches,
        schedule=plan.schedule,
        order=plan.order,
        chunks=plan.chunks,
        overlap=plan.overlap,
        bucket_mb=plan.bucket_mb,
        zero=plan.zero,
        cost=cost,
    )
    if check:
        verify(program)
        validate(program, function)
    return program


def validate(distributed: Function, source: Function) -> None:
    """Check that a distributed program computes what its source does, whatever the inputs.

    The source is what was given to the transform. What is done to it before it is distributed (ops fused, taken apart,
    padded) is tried on small instances (`claims`, `padding`); what comes of that has the same terms as the distributed
    program. Raises MismatchError that names the first output which is not the source's, and where the two part, or the
    rewrite that computes something else.
    """
    source, fused, parts, padded = prepared(distributed, source)
    check_rewrite(source, fused, evaluate)
    check_rewrite(fused, parts, evaluate)
    check_padding(parts, padded, evaluate)
    compare_terms(distributed, padded)


def simulate(model: AnyModel, plan: Plan = ONE, cluster: Cluster = "cpu-2core", nodes: int | None = None) -> Prediction:
    """What a step takes on a cluster: one that is shipped (`distir clusters`), a .toml file, a Topology, a CostModel.

    Without `nodes` the cluster has as many as the plan needs. To try many plans, give the same Model and the same
    CostModel: what does not change between plans is then worked out once.
    """
    model = as_model(model)
    cost = cost_model(cluster, plan, nodes)
    program = distribute(model, plan, cost.topology.devices[: plan.size], cost=stage_cost(cost, plan))
    return predict(model, plan, program, cost)


def cost_model(cluster: Cluster, plan: Plan, nodes: int | None = None) -> CostModel:
    """The cost model of a cluster that has devices enough for the plan. Raises InfeasibleError if it has not."""
    if isinstance(cluster, CostModel):
        return cluster
    if isinstance(cluster, Topology):
        return CostModel(cluster)
    return CostModel(load_cluster(os.fspath(cluster), nodes, plan.size))


def predict(model: Model, plan: Plan, program: Function, cost: CostModel) -> Prediction:
    """The prediction for a program that is already distributed."""
    simulator = Simulator(cost, overlap=cost.overlap and plan.overlap)
    simulation = simulator.interpret(program, batch=model.batch, tokens=model.tokens)
    return Prediction(Summary.of(model, plan, program), describe(cost.topology), program, simulation)


def describe(topology: Topology) -> str:
    """A cluster in a few words."""
    r = topology.regular
    if r is None:
        n = len(topology.devices)
        return f"of {counted(n, 'device')}"
    return f"{r.name}, {counted(r.nodes, 'node')} of {r.per_node} {r.kind}"


def run(
    model: AnyModel,
    plan: Plan = ONE,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    data: Data | Mapping[str, np.ndarray] | str | os.PathLike[str] | None = None,
    held_out: float = 0.1,
    tokenizer: str | os.PathLike[str] | None = None,
    metrics: str | os.PathLike[str] | None = None,
    seed: int = 0,
    backend: str | None = None,
    device: str | None = None,
    compiled: bool = False,
    check: bool = False,
    cluster: Cluster | None = None,
    timeout: float = 600.0,
    profile: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int | None = None,
    resume: bool = False,
    allow_nonfinite: bool = False,
    on_plan: Callable[[Prediction], None] | None = None,
    on_step: OnStep | None = None,
    on_check: OnStep | None = None,
    on_epoch: Callable[[Metrics], None] | None = None,
    on_phase: Callable[[str], None] | None = None,
) -> RunResult:
    """Run `steps` steps (1) of the model's program, a process a device, and compare the time with the prediction.

    `backend` is "gloo" (CPUs), "nccl" (GPUs) or "numpy" (this process alone). `device` is "cpu" or "cuda": on cuda gloo
    lets ranks share GPUs, for tests; without `backend` gloo runs on the one, nccl on the other. `data` is an .npz file,
    arrays by name or a text (see `Data`), a text's `tokenizer` the file of its BPE (see `read_tokens`); without data
    they are drawn by `seed`. `cluster` is what to predict for; by default "cpu-2core", with this host's cores, which
    the ranks share. `compiled`: what ranks compute goes through torch.compile, in the first step, which then takes
    longer; time and memory are not predicted for that. `check` compares with the sequential program on the same data.
    `profile` is a folder for traces: what is predicted, and of each rank when its ops ran (see `compare`). `on_plan` is
    called when the plan is made, `on_step` and `on_check` after each step, of the run and of the check, `on_phase` with
    what is being prepared in between, in words.

    With `epochs` the samples are gone through so often, in an order that `seed` draws for each epoch; of the last of
    them the share `held_out`, rounded up to whole batches, is not trained on: of it the loss is taken at the end of
    each epoch. `steps` are then the most of an epoch, and a last batch that is not full is left out. `metrics` is the
    file that is written after each epoch (without `epochs` after an only one), and with `resume` gone on with;
    `on_epoch` is called before the first and after each.

    `checkpoint` is a directory to which weights and optimizer state are saved after every `every` steps, if that is
    given, and after the last; the newest two are kept. With `resume` the run goes on with the newest that is undamaged,
    by whatever plan and backend it was made, until as many steps are done in all.

    A training run ends with the first step whose loss is not finite, or after which weights or optimizer state are not;
    these are looked at before a checkpoint is written, and after the last step. With `allow_nonfinite` it goes on, but
    no checkpoint is written of what is not finite.

    Raises DivergedError, naming the step, for a run that ends so, with what `check` found up to there; InfeasibleError
    for a plan that cannot be carried out or does not fit in memory, MismatchError, naming the first value that differs,
    its op and rank, if the check fails, WorkerError if a rank fails, UsageError for checkpoints that cannot be written,
    are of another model, not finite, or all damaged.
    """
    backend = backend_on(backend, device)
    for what, number in (("steps", steps), ("epochs", epochs)):
        if number is not None and number < 1:
            raise UsageError(f"{what}: expected at least 1, got {number}")
    if not 0 <= held_out < 1:
        raise UsageError(f"held_out is a share of at least 0 and below 1, got {held_out:g}")
    model = as_model(model)
    check_settings(model, checkpoint, every, resume, backend)
    if compiled:
        _check_compiled(backend, profile is not None)
    function = model.function
    arrays = model.initial(seed)
    fed = data if isinstance(data, Data) else Data(function, arrays, data, seed, tokenizer)
    cost = cost_model(this_host(plan.size) if cluster is None else cluster, plan)
    program = distribute(model, plan, cost.topology.devices[: plan.size], cost=stage_cost(cost, plan))
    prediction = predict(model, plan, program, cost)
    traces = None if profile is None else start_profile(Path(profile), backend, prediction)
    if metrics is not None and epochs is None:
        epochs = 1
    work = plan_work(fed, function, program, steps, epochs, held_out)
    found = None if work.epochs is None else Metrics(prediction, work.epochs.steps, _about(work, fed, backend, plan))
    if found is not None and resume:
        found.go_on(metrics)
    on_step, on_lap = _measuring(found, function, metrics, on_step, on_epoch)
    if on_plan is not None:
        on_plan(prediction)
    if found is not None and on_epoch is not None:
        on_epoch(found)
    given = _by_position(function, arrays | fed.fixed())
    told = work.samples, work.epochs, on_lap, traces
    job = Job(program, given, work.feed, work.steps, backend, timeout, *told, compiled=compiled, gradients=check)
    job = job._replace(finite=not allow_nonfinite and bool(function.updates))
    with beginning(model, plan, fed, checkpoint, every, resume) as saving:
        job = _begun(job, saving, whole=check or backend == "numpy")
        if found is not None:
            found.forget(job.first // found.steps)
        done = _done(job, prediction, check, on_step, on_phase)
    comparison = None
    if check and done.seconds and int(os.environ.get("RANK", 0)) == 0:
        again = job._replace(epochs=None, saving=None, finite=False, steps=job.first + len(done.seconds))
        comparison = _checked(model, again, done, prediction, on_check)
    if job.finite and done.broken != ALL_FINITE:
        raise diverged(function, done.broken, job.first + len(done.seconds) - 1, comparison and comparison.verdict)
    return _result(model, done, prediction, job, comparison, found)


def _check_compiled(backend: str, profiled: bool) -> None:
    """Raises UsageError for what does not go with torch.compile."""
    if backend == "numpy":
        raise UsageError("backend numpy has nothing to compile", "--backend gloo")
    if profiled:
        raise UsageError("a profile tells the time of every op, and what is compiled are many", "leave out --compile")


def _begun(job: Job, saving: Saving | None, whole: bool) -> Job:
    """The job, as it goes on with a checkpoint. `whole`: its arrays are wanted here, not only by the ranks."""
    if saving is None or saving.resume is None:
        return job._replace(saving=saving)
    old = renewed(job.program)
    arrays = {k: x for k, x in job.arrays.items() if k not in old}
    if whole or saving.step >= job.steps:
        from distir.backends.dcp import read_wholes

        folder = Path(saving.directory, saving.resume)
        found = read_wholes(folder, job.program)
        if job.finite:
            refuse(job.program, Watch(job.program, found).began, folder)
        arrays |= found
    return job._replace(arrays=arrays, first=saving.step, saving=saving)


def _checked(model: Model, job: Job, done: Steps, prediction: Prediction, on_check: OnStep | None) -> Check:
    """Compare with the sequential program. Raises MismatchError if it has other results."""
    alone = job._replace(program=model.function)
    want = compute_steps(alone, on_step=on_check)
    rounding = compute_steps(alone, SequentialExecutor(tap=perturbed(model.function)), on_check)
    comparison = compare(model.function, job.arrays, done, want, rounding, job.first)
    if (first := comparison.first) is not None:
        if job.compiled:
            raise MismatchError(
                f"the run is not the sequential one: {first}", "without --compile the op at fault is told"
            )
        where = _located(job if first.step is None else job._replace(steps=first.step + 1), prediction)
        adam = first.step != job.first and isinstance(model.optimizer, AdamW)
        hint = "AdamW magnifies the rounding of gradients near its eps: float64 tells rounding from an error"
        raise MismatchError(f"the run is not the sequential one: {first}; {where}", hint if adam else None)
    return comparison


def _about(work: Work, data: Data, backend: str, plan: Plan) -> dict[str, Any]:
    """What metrics say of a run beside plan and figures."""
    samples = None if work.samples is None else {"training": work.samples.count, "held_out": work.held_out}
    file = None if data.path is None else os.fspath(data.path)
    return {"backend": backend, "ranks": plan.size, "data": file, "samples": samples, "seed": data.seed}


def _measuring(
    metrics: Metrics | None,
    function: Function,
    path: str | os.PathLike[str] | None,
    on_step: OnStep | None,
    on_epoch: Callable[[Metrics], None] | None,
) -> tuple[OnStep | None, Callable[[Epoch], None] | None]:
    """What is called after a step and after an epoch, so that `metrics` grow and are written to `path`."""
    if metrics is None:
        return on_step, None
    losses: list[float] = []
    if path is not None and int(os.environ.get("RANK", 0)) == 0:
        metrics.save(path)  # before hours of training: whether it can be written

    def stepped(step: int, time: float, outputs: dict[int, np.ndarray]) -> None:
        if (loss := loss_of(function, outputs)) is not None:
            losses.append(loss)
        if on_step is not None:
            on_step(step, time, outputs)

    def lapped(epoch: Epoch) -> None:
        metrics.add(epoch, losses)
        losses.clear()
        if path is not None:
            metrics.save(path)
        if on_epoch is not None:
            on_epoch(metrics)

    return stepped, lapped


def _done(
    job: Job,
    prediction: Prediction,
    every: bool,
    on_step: OnStep | None,
    on_phase: Callable[[str], None] | None,
) -> Steps:
    """Carry out a job. `every`: give the outputs of every step, not only of the last."""
    if job.first >= job.steps:  # the checkpoint has them all
        return Steps([], [], {k: job.arrays[k] for k in renewed(job.program)})
    if job.backend == "numpy":
        return _computed(job, prediction, on_step)
    result = launch(
        job.program,
        job.arrays,
        job.steps,
        data=job.feed if job.samples is None else job.samples,
        backend=job.backend,
        timeout=job.timeout,
        bytes_per_rank=prediction.peak_memory,
        every=every,
        on_step=on_step,
        epochs=job.epochs,
        on_epoch=job.on_epoch,
        profile=job.profile,
        first=job.first,
        saving=job.saving,
        compiled=job.compiled,
        gradients=job.gradients,
        on_phase=on_phase,
        finite=job.finite,
    )
    kept = result.gradients, result.broken
    return Steps(result.seconds, result.outputs, result.inputs, result.saved, result.memory, *kept)


def _computed(job: Job, prediction: Prediction, on_step: OnStep | None) -> Steps:
    """All devices in this process, on the reference executor."""
    need, have = _memory(prediction), available_memory()
    if have is not None and need > have:
        hint = "more microbatches or a smaller batch need less"
        raise InfeasibleError(f"{size(need)} of memory are needed, {size(have)} are available", hint)
    try:
        return compute_steps(job, on_step=on_step)
    except CopiesError as e:
        raise MismatchError(f"{e.message}; {_located(job, prediction)}") from e


def _memory(prediction: Prediction) -> int:
    """Bytes that all devices need together."""
    return sum(stage.memory * stage.devices for stage in prediction.simulation.stages)


def _located(job: Job, prediction: Prediction) -> str:
    """See `locate`; where there is not enough memory to keep every value that is made, how to get at it."""
    have = available_memory()
    if have is not None and _memory(prediction) * _KEPT > have:
        return "there is not enough memory to find the op at fault: try a smaller batch or model"
    return locate(job._replace(epochs=None, saving=None))


def _by_position(function: Function, arrays: Mapping[Value, Any]) -> dict[int, Any]:
    return {k: arrays[v] for k, v in enumerate(function.inputs) if v in arrays}


def _result(
    model: Model, done: Steps, prediction: Prediction, job: Job, check: Check | None, metrics: Metrics | None
) -> RunResult:
    function = model.function
    losses = [x for outputs in done.outputs if (x := loss_of(function, outputs)) is not None]
    return RunResult(
        summary=prediction.summary,
        backend=job.backend,
        losses=losses,
        seconds=done.seconds,
        outputs={function.outputs[k].name: x for k, x in (done.outputs[-1] if done.outputs else {}).items()},
        weights={
            v.name: done.inputs[k] for k, v in enumerate(function.inputs) if v.kind == "parameter" and k in done.inputs
        },
        prediction=prediction,
        check=check,
        model=model,
        metrics=metrics,
        first=job.first,
        saved=list(done.saved),
        memory=list(done.memory),
        profiled=job.profile is not None,
        unsaved=None if job.saving is None or done.broken == ALL_FINITE else name_of(function, done.broken),
    )


def loss_of(function: Function, outputs: Mapping[int, np.ndarray]) -> float | None:
    """The loss among a step's outputs: the first, of one element, if the program trains. None if it is not there."""
    return float(outputs[0].item()) if function.updates and 0 in outputs else None
