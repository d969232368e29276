"""Work in epochs: what each step is fed, and the program that evaluates at the end of an epoch."""

from __future__ import annotations

from typing import NamedTuple

from distir.api.data import Data
from distir.api.steps import Feed
from distir.backends.epochs import Epochs
from distir.backends.samples import Samples
from distir.ir.function import Function
from distir.ir.validate import validate
from distir.ir.verify import verify
from distir.transforms.cleanup import prune
from distir.transforms.evaluation import evaluation
from distir.transforms.parallel3d import source_of


class Work(NamedTuple):
    """What is to be done: `steps` in all. `feed` gives what is new in each by input position; `samples`, if there is a
    file of them, is where from. `epochs` is None where there are none.
    """

    steps: int
    feed: Feed
    samples: Samples | None
    epochs: Epochs | None
    held_out: int = 0


def plan_work(
    data: Data, function: Function, program: Function, steps: int | None, epochs: int | None, share: float
) -> Work:
    """The work of `epochs` epochs, of at most `steps` steps each; without epochs of so many steps.

    Of a file an epoch is all samples but those held out, which are at least that `share` of them; of data that are
    drawn it is `steps` steps. What has no loss is not evaluated.
    """
    trains = bool(function.updates)
    if not data.sampled:
        count = steps or 1
        laps = None if epochs is None else Epochs(count)
        return Work(count * (epochs or 1), lambda k: _by_position(data, k), None, laps)
    samples, held_out = data.samples(epochs is not None, share if trains and epochs is not None else 0.0)
    if epochs is None:
        return Work(steps or 1, samples.step, samples, None)
    if steps is not None:
        samples = samples._replace(count=min(samples.count, steps * samples.batch))
    other = evaluating(program, function) if held_out is not None else None
    laps = Epochs(samples.steps, other, held_out)
    return Work(samples.steps * epochs, samples.step, samples, laps, held_out.count if held_out else 0)


def _by_position(data: Data, step: int) -> dict[int, object]:
    return {data.number[v]: x for v, x in data.step(step).items()}


def evaluating(program: Function, function: Function) -> Function:
    """The program that gives the loss of a distributed training step, with its weights where they are.

    Verified, and validated against the loss of the step it was made of.
    """
    found = evaluation(program)
    verify(found)
    source = source_of(program, function)
    validate(found, prune(Function(source.name, source.inputs, source.ops, source.outputs[:1])))
    return found
