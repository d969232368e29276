"""The result of `run`, printed as text or as tables in a notebook."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from distir.api.check import Check
from distir.api.metrics import Metrics
from distir.api.model import Model
from distir.api.prediction import Prediction
from distir.api.results import (
    Summary,
    aligned,
    html_table,
    paragraphs,
    rates,
    seconds,
    size,
    step_header,
    step_row,
)
from distir.ir.errors import UsageError, counted
from distir.runtime.checkpoint import Saved

_FAR = 2.0
"""Factor between measured and predicted time from which a hint is printed."""
_MUCH_MEMORY = 1 << 26
"""Predicted bytes from which memory is compared: below it Python and the libraries dominate the measurement."""


@dataclass(frozen=True)
class RunResult:
    """The result of a run. `weights` are the parameters and the running statistics of batch norms after the last step,
    by name; `outputs` those of the last step.

    `seconds`: the time of each step on the slowest rank, from step `first` on (earlier steps were done by the run that
    was resumed). `saved`: the checkpoints written. `memory`: for each rank the increase of peak memory over its start,
    in bytes (on CPUs resident memory, on Linux), None where not measurable. Under torchrun only rank 0 has arrays.
    """

    summary: Summary
    backend: str
    losses: list[float]
    seconds: list[float]
    outputs: dict[str, np.ndarray] = field(repr=False)
    weights: dict[str, np.ndarray] = field(repr=False)
    prediction: Prediction | None = field(default=None, repr=False)
    check: Check | None = None
    model: Model | None = field(default=None, repr=False)
    metrics: Metrics | None = field(default=None, repr=False)
    """Only of a run in epochs."""
    first: int = 0
    saved: list[Saved] = field(default_factory=list)
    memory: list[int | None] = field(default_factory=list)
    profiled: bool = False
    unsaved: str | None = None
    """Name of a value that is not finite after the last step, so that no checkpoint was written."""
    skipped: int = 0
    """The number of steps, since training began, that were skipped because gradients overflowed float16."""

    @property
    def step_seconds(self) -> float:
        """The median time of a step, without the first (warm-up) if there are more; nan if no step was run."""
        return median(self.seconds[1:] or self.seconds or [nan])

    @property
    def samples_per_second(self) -> float:
        return self.summary.batch / self.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """None if samples are not sequences."""
        return self.summary.tokens / self.step_seconds if self.summary.tokens else None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the model with these weights as ONNX. Raises UsageError if it was not loaded from an ONNX file."""
        from distir.importer.save import save_onnx

        if self.model is None or self.model.path is None:
            raise UsageError("only a model that came from an ONNX file can be saved")
        return save_onnx(self.model.path, self.weights, path)

    def table(self) -> list[tuple[str, ...]]:
        """A header and a row per step, in a run in epochs per epoch."""
        if self.metrics is not None:
            return self.metrics.table()
        return [step_header(bool(self.losses)), *[self.row(k) for k in range(len(self.seconds))]]

    def row(self, step: int) -> tuple[str, ...]:
        """The row of a step; `step` counts from the first of this run."""
        return step_row(self.first + step, self.losses[step] if self.losses else None, self.seconds[step])

    def lines(self) -> list[str]:
        """Lines for the end of a run: rates, prediction, memory, checkpoints, the check."""
        if not self.seconds:
            return [f"nothing left to do: {counted(self.first, 'step')} already done"]
        lines = [*(self._rates() if self.metrics is None else self.metrics.lines()), *self._memory()]
        if self.saved:
            rate = sum(s.bytes for s in self.saved) / sum(s.seconds for s in self.saved)
            what = f"{counted(len(self.saved), 'checkpoint')} of {size(self.saved[-1].bytes)}"
            lines.append(f"{what} written at {rate / 1e6:.1f} MB/s, the last after {self.saved[-1].step} steps")
        if self.skipped:
            lines.append(f"{counted(self.skipped, 'step')} skipped: gradients were not finite in float16")
        if self.unsaved:
            lines.append(f"no checkpoint after {self.first + len(self.seconds)} steps: {self.unsaved} is not finite")
        return lines if self.check is None else [*lines, *self.check.lines()]

    def _rates(self) -> list[str]:
        last = len(self.seconds) - 1
        which = f" (median of steps {self.first + 1} to {self.first + last})" if last > 1 else ""
        which = which or (" (the first step, warm-up)" if last == 0 else f" (step {self.first + 1})")
        lines = [f"step {seconds(self.step_seconds)}{which}, {rates(self.samples_per_second, self.tokens_per_second)}"]
        if self.prediction is not None and self.backend != "numpy":  # the reference runs all ranks in one process
            predicted = self.prediction.step_seconds
            if last == 0:
                detail = "not compared: the first step is warm-up"
                return [*lines, f"predicted {seconds(predicted)} on {self.prediction.cluster}; {detail}"]
            where, measured = self.prediction.cluster, seconds(self.step_seconds)
            times = f"predicted {self.prediction.step()} on {where}; measured {measured} here"
            lines.append(f"{times} ({self.step_seconds / predicted:.2f} times as long)")
            if not self.profiled and not 1 / _FAR <= self.step_seconds / predicted <= _FAR:
                lines.append("where they differ: distir run --profile DIR, then distir compare DIR")
        return lines

    def _memory(self) -> list[str]:
        known = [n for n in self.memory if n is not None]
        predicted = self.prediction.allocated_memory if self.prediction is not None and known else 0
        if predicted < _MUCH_MEMORY:
            return []
        return [f"memory of a rank: predicted {size(predicted)} at most; measured {size(max(known))}"]

    def __str__(self) -> str:
        return "\n".join([*self.summary.lines(), "", *aligned(self.table()), "", *self.lines()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return paragraphs(self.summary.lines()) + html_table(self.table()) + paragraphs(self.lines())

    def to_json(self) -> dict[str, Any]:
        """JSON of everything except arrays; times in seconds, memory in bytes."""
        return {
            **self.summary.to_json(),
            "backend": self.backend,
            "first_step": self.first,
            "losses": self.losses,
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "predicted": self.prediction and self.prediction.to_json(),
            "metrics": self.metrics and self.metrics.to_json(),
            "memory": self.memory,
            "checkpoints": [s._asdict() for s in self.saved],
            "check": self.check and self.check.to_json(),
            "skipped_steps": self.skipped,
        }
