"""The job of a run: one value, passed from the process that starts a run to each rank. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from distir.ir.function import Function
from distir.runtime.checkpoint import Saving
from distir.runtime.epochs import Epochs, OnEpoch
from distir.runtime.options import RunOptions
from distir.runtime.pieces import ship
from distir.runtime.samples import Samples
from distir.transforms.rank.project import ranks

Feed = Callable[[int], Mapping[int, Any]]
"""Step number -> the arrays that change in that step, by input position."""
OnStep = Callable[[int, float, dict[int, np.ndarray]], None]
"""(step, its seconds, outputs by position)"""


def ignore(*_: Any) -> None:
    """A callback that does nothing."""


@dataclass(frozen=True, slots=True)
class JobCallbacks:
    """Callbacks in the process that starts a run: after each step, after each epoch, and when a phase of the
    preparation begins.
    """

    on_step: OnStep = ignore
    on_epoch: OnEpoch = ignore
    on_phase: Callable[[str], None] = ignore


NO_CALLBACKS = JobCallbacks()


@dataclass(frozen=True, slots=True)
class Job:
    """Steps `first` to `steps` - 1 of a distributed program.

    `arrays`: whole arrays by input position; those that change from step to step come from `data` (samples are read by
    the ranks themselves). An output that is an update replaces its input before the next step. `epochs`: length and
    evaluation of epochs. `saving`: checkpoints to write, and the one to resume from. `record`: a folder in which ranks
    record every value (see `distir.runtime.record`); the outcome then has no inputs. `proxy`: the program computes
    nothing, and inputs without an array are buffers of any contents.
    """

    program: Function
    arrays: Mapping[int, Any]
    data: Feed | Samples | None = None
    steps: int = 1
    options: RunOptions = field(default_factory=RunOptions)
    first: int = 0
    epochs: Epochs | None = None
    saving: Saving | None = None
    record: Path | None = None
    proxy: bool = False

    @property
    def world(self) -> int:
        """The number of ranks."""
        return max(1, len(ranks(self.program)))

    @property
    def finite(self) -> bool:
        """Whether to stop when the loss, or the weights at their checks, are not finite."""
        return not self.options.allow_nonfinite and bool(self.program.updates)

    def feed(self, step: int) -> Mapping[int, Any]:
        """The arrays that change in a step, by input position."""
        if isinstance(self.data, Samples):
            return self.data.step(step)
        return self.data(step) if self.data else {}

    def shipped(self, folder: Path) -> Job:
        """A copy to pickle for other processes on this host; large arrays go to files in `folder`. The caller sends the
        arrays of `data` unless they are samples."""
        return replace(
            self,
            arrays={k: ship(x, folder / f"array{k}") for k, x in self.arrays.items()},
            data=self.data.shipped(folder, "samples") if isinstance(self.data, Samples) else None,
            epochs=self.epochs and self.epochs.shipped(folder),
        )

    def received(self) -> Job:
        """The inverse of `shipped`, in the other process; `arrays` stay Shipped, to be read one at a time."""
        data = self.data.received() if isinstance(self.data, Samples) else None
        return replace(self, data=data, epochs=self.epochs and self.epochs.received())
