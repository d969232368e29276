"""The workload of a run: input data per step, epochs, and the program that evaluates at the end of an epoch."""

from __future__ import annotations

from typing import NamedTuple

from distir.api.data import Data
from distir.ir.function import Function
from distir.ir.validate import validate
from distir.ir.verify import verify
from distir.runtime.epochs import Epochs
from distir.runtime.job import Feed
from distir.runtime.options import RunOptions
from distir.runtime.samples import Samples
from distir.transforms.parallel3d import source_of
from distir.transforms.pipeline.evaluation import evaluation


class Workload(NamedTuple):
    """`steps`: total number of steps. `data`: the inputs that change from step to step. `epochs`: None without epochs.

    `held_out`: number of validation samples.
    """

    steps: int
    data: Feed | Samples
    epochs: Epochs | None
    held_out: int = 0


def plan_work(data: Data, function: Function, program: Function, options: RunOptions) -> Workload:
    """The workload of `epochs` epochs of at most `steps` steps each; without epochs, of `steps` steps.

    With given data an epoch is all samples except those held out; with random data it is `steps` steps. A program
    without updates is not evaluated.
    """
    steps, epochs = options.steps, options.epochs
    if epochs is None and options.metrics is not None:
        epochs = 1
    trains = bool(function.updates)
    if not data.sampled:
        count = steps or 1
        each = None if epochs is None else Epochs(count)
        return Workload(count * (epochs or 1), lambda k: _by_position(data, k), each)
    samples, held_out = data.samples(epochs is not None, options.held_out if trains and epochs is not None else 0.0)
    if epochs is None:
        return Workload(steps or 1, samples, None)
    if steps is not None:
        samples = samples._replace(count=min(samples.count, steps * samples.batch))
    other = evaluating(program, function) if held_out is not None else None
    each = Epochs(samples.steps, other, held_out)
    return Workload(samples.steps * epochs, samples, each, held_out.count if held_out else 0)


def _by_position(data: Data, step: int) -> dict[int, object]:
    return {data.number[v]: x for v, x in data.step(step).items()}


def evaluating(program: Function, function: Function) -> Function:
    """The program that computes only the loss of a distributed training step, with the same placement of weights.

    It is verified, and validated against the loss of the training step.
    """
    found = evaluation(program)
    verify(found)
    source = source_of(program, function)
    validate(found, evaluation(source))
    return found
