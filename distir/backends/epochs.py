"""Epochs of a run: what is asked for, how a rank times them and evaluates at their end, and what comes of it.

Loads no torch: what evaluates is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from distir.backends.pieces import Pieces, Whole, wholes
from distir.backends.samples import Samples
from distir.ir.function import Function


class Epochs(NamedTuple):
    """After every `steps` steps an epoch ends. Then `evaluation`, a program with the inputs of the one that trains and
    without updates, runs on `held_out`, all of it."""

    steps: int
    evaluation: Function | None = None
    held_out: Samples | None = None

    def shipped(self, folder: Path) -> Epochs:
        """The same, for other processes on this host."""
        return self._replace(held_out=self.held_out and self.held_out.shipped(folder, "held_out"))

    def received(self) -> Epochs:
        """The same, in another process."""
        return self._replace(held_out=self.held_out and self.held_out.received())


class Lap(NamedTuple):
    """What a rank says of an epoch: how many of its steps it ran; the seconds from the beginning of each to its end,
    without what is reported in between, of all and of the `first`; those in which it read data; its pieces of the means
    of what `evaluation` gives.
    """

    steps: int
    seconds: float
    first: float
    data_seconds: float
    means: Pieces


class Epoch(NamedTuple):
    """What all ranks say of epoch `number`: a figure a rank (see `Lap`); the means, whole, by position."""

    number: int
    steps: int
    seconds: list[float]
    first: list[float]
    data_seconds: list[float]
    means: Whole


OnEpoch = Callable[[Epoch], None]


class Laps:
    """Times a rank's epochs. `evaluate` gives the rank's pieces of the means over the held-out samples."""

    def __init__(self, epochs: Epochs, evaluate: Callable[[], Pieces] | None) -> None:
        self.epochs, self.evaluate = epochs, evaluate
        self.times: list[tuple[float, float]] = []

    def add(self, step: int, seconds: float, data_seconds: float) -> Lap | None:
        """Count a step; at the end of an epoch the lap."""
        self.times.append((seconds, data_seconds))
        if (step + 1) % self.epochs.steps:
            return None
        whole, data = map(sum, zip(*self.times, strict=True))
        lap = Lap(len(self.times), whole, self.times[0][0], data, self.evaluate() if self.evaluate else {})
        self.times = []
        return lap


def end_epoch(
    done: list[Epoch], step: int, epochs: Epochs | None, told: Sequence[Lap | None], on_epoch: OnEpoch | None
) -> None:
    """If an epoch ends with a step, add it to those that are `done`: from what each rank, in order, told of it."""
    laps = [lap for lap in told if lap is not None]
    if epochs is None or not laps:
        return
    epoch = Epoch(
        step // epochs.steps,
        laps[0].steps,
        [lap.seconds for lap in laps],
        [lap.first for lap in laps],
        [lap.data_seconds for lap in laps],
        wholes(epochs.evaluation, [lap.means for lap in laps]),
    )
    done.append(epoch)
    if on_epoch is not None:
        on_epoch(epoch)
