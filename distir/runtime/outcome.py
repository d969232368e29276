"""The results of a run: each rank's report of a step, and the outcome merged from all reports. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from distir.runtime.checkpoint import Saved
from distir.runtime.epochs import Epoch, RankEpoch, end_epoch
from distir.runtime.finite import ALL_FINITE
from distir.runtime.job import Job, JobCallbacks
from distir.runtime.pieces import Coord, Pieces, gathered, gathered_gradients


class Report(NamedTuple):
    """A rank's report of a step: its seconds, counted from a barrier of all ranks; its pieces of outputs.

    `epoch`: the report of the epoch that ends with the step. `saved`: the checkpoint written after the step. `memory`:
    increase of peak memory over the rank's start, in bytes; None where not measurable. `gradients`: in the first step
    of a run with check, the gradients passed to optimizers, by the weight's position.
    """

    step: int
    seconds: float
    outputs: Pieces
    epoch: RankEpoch | None = None
    saved: Saved | None = None
    memory: int | None = None
    gradients: Mapping[int, tuple[Coord, Any]] = {}


@dataclass(slots=True)
class Outcome:
    """The outcome of the steps so far. Arrays are whole, in source shapes (without padding).

    `seconds[k]`: step k on the slowest rank, from a barrier after data were loaded. `outputs[k]`: outputs of step k
    that are not updates, by position: those of one element; of the last step (with check of every step) all. `inputs`:
    updated inputs after the last step, by position, if updated where they are held. `gradients`: with check those of
    the first step, as passed to optimizers, by position of the weight. `memory`: see `Report`, per rank. `broken`: the
    number of a value that is not finite after the last step (see `distir.runtime.finite`). `start_seconds`: until all
    ranks started here had joined; `load_seconds`: the part of it until torch was loaded. Under torchrun only rank 0
    has arrays, `epochs`, `saved` and `memory`.
    """

    seconds: list[float] = field(default_factory=list)
    outputs: list[dict[int, np.ndarray]] = field(default_factory=list)
    inputs: dict[int, np.ndarray] = field(default_factory=dict)
    gradients: dict[int, np.ndarray] = field(default_factory=dict)
    epochs: list[Epoch] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    memory: list[int | None] = field(default_factory=list)
    broken: int = ALL_FINITE
    start_seconds: float = 0.0
    load_seconds: float = 0.0

    def add(self, job: Job, reports: Sequence[Report]) -> None:
        """Add a step from the reports of all ranks, in order of ranks."""
        self.seconds.append(max(r.seconds for r in reports))
        self.outputs.append(gathered(job.program, [r.outputs for r in reports], [])[0])
        self.gradients.update(gathered_gradients(job.program, [r.gradients for r in reports]))
        self.memory = [r.memory for r in reports]
        if reports[0].saved is not None:
            self.saved.append(reports[0].saved)

    def announce(self, job: Job, callbacks: JobCallbacks, reports: Sequence[Report]) -> None:
        """Call the callbacks for the step that was added last, and for the epoch if it ends with that step."""
        step = reports[0].step
        callbacks.on_step(step, self.seconds[-1], self.outputs[-1])
        end_epoch(self.epochs, step, job.epochs, [r.epoch for r in reports], callbacks.on_epoch)
