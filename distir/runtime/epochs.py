"""Epochs of a run: their settings, how a rank times them and evaluates at their end, and the merged results.

Loads no torch: the function that evaluates is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from distir.ir.function import Function
from distir.runtime.pieces import Pieces, Whole, wholes
from distir.runtime.samples import Samples


class Epochs(NamedTuple):
    """An epoch ends after every `steps` steps. Then `evaluation`, a program with the same inputs as the training step
    and without updates, runs on all of `held_out`."""

    steps: int
    evaluation: Function | None = None
    held_out: Samples | None = None

    def shipped(self, folder: Path) -> Epochs:
        """A copy to pickle for other processes on this host; large arrays go to files in `folder`."""
        return self._replace(held_out=self.held_out and self.held_out.shipped(folder, "held_out"))

    def received(self) -> Epochs:
        """The inverse of `shipped`, in the other process."""
        return self._replace(held_out=self.held_out and self.held_out.received())


class RankEpoch(NamedTuple):
    """A rank's report of an epoch: number of steps run; seconds of all steps, and of the `first`, without the time for
    reporting between them; seconds spent loading data; its pieces of the means of the outputs of `evaluation`.
    """

    steps: int
    seconds: float
    first: float
    data_seconds: float
    means: Pieces


class Epoch(NamedTuple):
    """Epoch `number`, from the reports of all ranks (see `RankEpoch`): lists with an entry per rank; `means` are whole
    arrays by output position.
    """

    number: int
    steps: int
    seconds: list[float]
    first: list[float]
    data_seconds: list[float]
    means: Whole


OnEpoch = Callable[[Epoch], None]


class EpochTimer:
    """Times a rank's epochs. `evaluate` returns the rank's pieces of the means over the held-out samples."""

    def __init__(self, epochs: Epochs, evaluate: Callable[[], Pieces] | None) -> None:
        self.epochs, self.evaluate = epochs, evaluate
        self.times: list[tuple[float, float]] = []

    def add(self, step: int, seconds: float, data_seconds: float) -> RankEpoch | None:
        """Add the times of a step; returns the epoch's report if the epoch ends with it."""
        self.times.append((seconds, data_seconds))
        if (step + 1) % self.epochs.steps:
            return None
        whole, data = map(sum, zip(*self.times, strict=True))
        epoch = RankEpoch(len(self.times), whole, self.times[0][0], data, self.evaluate() if self.evaluate else {})
        self.times = []
        return epoch


def end_epoch(
    done: list[Epoch], step: int, epochs: Epochs | None, reports: Sequence[RankEpoch | None], on_epoch: OnEpoch
) -> None:
    """If an epoch ends with a step, merge the reports of all ranks, append it to `done` and call `on_epoch`."""
    ranks = [r for r in reports if r is not None]
    if epochs is None or not ranks:
        return
    epoch = Epoch(
        step // epochs.steps,
        ranks[0].steps,
        [r.seconds for r in ranks],
        [r.first for r in ranks],
        [r.data_seconds for r in ranks],
        wholes(epochs.evaluation, [r.means for r in ranks]),
    )
    done.append(epoch)
    on_epoch(epoch)
