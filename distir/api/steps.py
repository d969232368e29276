"""Several steps in one process, on the reference executor: of the sequential program, or of a distributed one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distir.backends.checkpoint import Saved, Saving
from distir.backends.epochs import Epoch, Epochs, Laps, OnEpoch
from distir.backends.finite import ALL_FINITE, Watch, lost
from distir.backends.samples import Samples
from distir.executor.collectives import join, lanes
from distir.executor.sequential import Held, OnUpdate, SequentialExecutor, unfit
from distir.ir.device import Mesh
from distir.ir.function import Function, Op
from distir.ir.type import Tensor
from distir.transforms.gradients import gradients

if TYPE_CHECKING:
    from distir.backends.dcp import WholeKeeper

Feed = Callable[[int], Mapping[int, Any]]
"""Step number -> the arrays that are new in it, by input position."""
OnStep = Callable[[int, float, dict[int, np.ndarray]], None]
"""(step, its seconds, outputs by position)"""


class Job(NamedTuple):
    """What is to be run: `arrays` are the inputs that stay or are updated, by position, `feed` gives the others.

    `samples`, if they are in a file, are what `feed` gives: ranks read them themselves. `on_epoch` is called at the end
    of each of `epochs`. `profile` is a folder for traces of the ranks. The steps are `first` to `steps` - 1. `saving`
    says which checkpoints to write. `compiled`: ranks put what they compute through torch.compile. `gradients`: those
    of the first step are kept. `finite`: it ends with the first step after which the loss is not finite, or after the
    last the weights.
    """

    program: Function
    arrays: Mapping[int, Any]
    feed: Feed
    steps: int
    backend: str = "numpy"
    timeout: float = 600.0
    samples: Samples | None = None
    epochs: Epochs | None = None
    on_epoch: OnEpoch | None = None
    profile: Path | None = None
    first: int = 0
    saving: Saving | None = None
    compiled: bool = False
    gradients: bool = False
    finite: bool = False


class Steps(NamedTuple):
    """What steps gave: seconds each; outputs that are not updates, by position, each; at the end the updated inputs.

    `saved`: the checkpoints that were written. `memory`: the most bytes that each rank held over what it began
    with. `gradients`: those of the first step, as optimizers took them, by the position of the weight. `broken`: the
    number of what is not finite after the last (see `distir.backends.finite`).
    """

    seconds: list[float]
    outputs: list[dict[int, np.ndarray]]
    inputs: dict[int, np.ndarray]
    saved: Sequence[Saved] = ()
    memory: Sequence[int | None] = ()
    gradients: Mapping[int, np.ndarray] = {}
    broken: int = ALL_FINITE


def compute_steps(job: Job, executor: SequentialExecutor | None = None, on_step: OnStep | None = None) -> Steps:
    """Run a job in this process. See `SequentialExecutor`."""
    executor = executor or SequentialExecutor()
    function = job.program
    first: dict[int, np.ndarray] = {}
    if job.gradients:
        executor.on_update = _keeping(function, first)
    position = {v: k for k, v in enumerate(function.inputs)}
    updates = {k: position[function.updates[v]] for k, v in enumerate(function.outputs) if v in function.updates}
    held = dict(job.arrays)
    saved: list[Saved] = []
    done = Steps([], [], {}, saved, gradients=first)
    keeper = None if job.saving is None else _keeper(function, job.saving)
    watch = Watch(function, held) if job.finite or keeper is not None else None
    broken = ALL_FINITE
    laps = None if job.epochs is None else Laps(job.epochs, None)
    for step in range(job.first, job.steps):
        start = time.perf_counter()
        held |= job.feed(step)
        begin = time.perf_counter()
        with np.errstate(all="ignore"):  # a run that diverges says so by its loss
            results = executor.compute(function, [held.get(k) for k in range(len(function.inputs))])
        seconds = time.perf_counter() - begin
        executor.on_update = None
        held |= {place: results[k] for k, place in updates.items()}
        shown = {k: x for k, x in enumerate(results) if k not in updates}
        done.seconds.append(seconds)
        done.outputs.append(shown)
        due = keeper is not None and keeper.saving.due(step + 1, job.steps)
        broken = lost(function, shown) if job.finite else ALL_FINITE
        if watch is not None and (due or step == job.steps - 1):
            broken = min(broken, watch.first(held))
        if keeper is not None and due and broken == ALL_FINITE:
            saved.append(keeper.save(step + 1, held))
        if on_step is not None:
            on_step(step, seconds, shown)
        lap = laps.add(step, begin - start + seconds, begin - start) if laps is not None else None
        if lap is not None and job.epochs is not None and job.on_epoch is not None:
            spent = [lap.seconds], [lap.first], [lap.data_seconds]
            job.on_epoch(Epoch(step // job.epochs.steps, lap.steps, *spent, _evaluated(executor, job.epochs, held)))
        if job.finite and broken != ALL_FINITE:
            break
    done.inputs.update({place: held[place] for place in updates.values()})
    return done._replace(broken=broken)


def _keeping(program: Function, found: dict[int, np.ndarray]) -> OnUpdate:
    """What puts each gradient, without padding, into `found`, by the position of the weight."""
    known = gradients(program)
    unrolled = not any(op.callee for op in program.ops)

    def keep(function: str, op: Op, ins: Sequence[Held]) -> None:
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
    from distir.backends.dcp import WholeKeeper  # loads torch

    return WholeKeeper(function, saving)


def _evaluated(executor: SequentialExecutor, epochs: Epochs, held: Mapping[int, Any]) -> dict[int, np.ndarray]:
    """The means of what evaluation gives over all samples held out."""
    if epochs.evaluation is None or epochs.held_out is None:
        return {}
    rows: list[list[np.ndarray]] = []
    for k in range(epochs.held_out.steps):
        arrays = {**held, **epochs.held_out.step(k)}
        with np.errstate(all="ignore"):
            rows.append(
                executor.compute(epochs.evaluation, [arrays.get(i) for i in range(len(epochs.evaluation.inputs))])
            )
    return {
        i: np.asarray(np.mean(column, axis=0, dtype=np.float64)) for i, column in enumerate(zip(*rows, strict=True))
    }
