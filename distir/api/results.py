"""The result of `run`, printed as text or as tables in a notebook, and what other results are printed with."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from distir.api.check import Check
from distir.api.model import Model
from distir.ir.errors import UsageError, counted
from distir.ir.function import Function
from distir.ir.type import Tensor
from distir.runtime.checkpoint import Saved
from distir.transforms.plan import WEIGHTS, Plan
from distir.transforms.sharding.coverage import Coverage, coverage

if TYPE_CHECKING:
    from distir.api.metrics import Metrics
    from distir.api.prediction import Prediction

_SHOWN = 6
"""Names listed in a message; the rest is counted."""
_FAR = 2.0
"""Factor between measured and predicted time from which a hint is printed."""
_MUCH_MEMORY = 1 << 26
"""Predicted bytes from which memory is compared: below it Python and the libraries dominate the measurement."""


@dataclass(frozen=True)
class Summary:
    """A plan applied to a model: what is split by tensor parallelism, and what is padded.

    `forward_only`: the model was loaded from a file without a loss, so nothing is trained. False for a Function.
    """

    model: str
    plan: Plan
    batch: int
    tokens: int | None
    split: Coverage | None
    padded: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    forward_only: bool

    @staticmethod
    def of(model: Model, plan: Plan, program: Function) -> Summary:
        """The summary of a distributed program."""
        padded = {
            v.name: (v.role.source, v.type.global_shape)
            for v in program.inputs
            if v.role and v.role.source and v.kind != "state" and isinstance(v.type, Tensor)
        }
        weights = plan.sharding.along(WEIGHTS)
        trained = any([v.kind == "parameter" for v in program.inputs])  # a proxy may have none
        split = coverage(program, weights[0].name) if weights and trained else None
        forward_only = model.path is not None and not model.function.updates
        return Summary(model.name, plan, model.batch, model.tokens, split, padded, forward_only)

    def lines(self) -> list[str]:
        """The plan; with tensor parallelism the shares that it splits; what is padded."""
        what = "; forward only: no loss was given" if self.forward_only else ""
        lines = [f"{self.model}: {self.plan}, batch {self.batch}, on {counted(self.plan.size, 'device')}{what}"]
        if self.split is not None:
            flops, parameters = _share(self.split.flops), _share(self.split.parameters)
            axes = self.plan.sharding.along(WEIGHTS)
            text = f"{axes[0].name} splits {flops} of the FLOPs and {parameters} of the parameters"
            unsplit = [v for v in self.split.replicated if isinstance(v.type, Tensor)]
            names = [f"{v.name} ({size(v.type.bytes)})" for v in unsplit]
            lines.append(f"{text}; not split: {listed(names)}" if names else text)
        if self.padded:
            rows = [f"{name} {_shape(a)} to {_shape(b)}" for name, (a, b) in self.padded.items()]
            lines.append(f"padded to be divisible: {', '.join(rows)}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """JSON of all fields."""
        split = self.split and {
            "flops": self.split.flops,
            "parameters": self.split.parameters,
            "replicated": [v.name for v in self.split.replicated],
        }
        padded = {name: {"from": list(a), "to": list(b)} for name, (a, b) in self.padded.items()}
        plan = self.plan.to_json()
        return {
            "model": self.model,
            "plan": plan,
            "batch": self.batch,
            "tokens": self.tokens,
            "split": split,
            "padded": padded,
            "forward_only": self.forward_only,
        }


@dataclass(frozen=True)
class RunResult:
    """The result of a run. `weights` are the parameters after the last step, by name; `outputs` those of the last step.

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
        if self.prediction is None or not known or self.prediction.peak_memory < _MUCH_MEMORY:
            return []
        return [f"memory of a rank: predicted {size(self.prediction.peak_memory)} at most; measured {size(max(known))}"]

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


def step_header(loss: bool) -> tuple[str, ...]:
    """The columns of `step_row`."""
    return ("step", "loss", "time") if loss else ("step", "time")


def step_row(step: int, loss: float | None, time: float) -> tuple[str, ...]:
    """Step, loss (if there is one) and time as text."""
    return str(step), *(() if loss is None else (f"{loss:.6f}",)), seconds(time)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first column is text, the others numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as an HTML table; the first is the header."""
    head, *body = rows
    cells = "".join(f"<th>{html.escape(x)}</th>" for x in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(x)}</td>" for x in row) + "</tr>" for row in body)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"


def paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def seconds(x: float, like: float = 0.0) -> str:
    """A time in seconds with a unit; 0 gets the unit of the time `like`."""
    most = x or like
    if most >= 1 or most == 0:
        return f"{x:.3f} s"
    return f"{x * 1e3:.3f} ms" if most >= 1e-3 else f"{x * 1e6:.1f} us"


def size(n: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def rates(samples: float, tokens: float | None) -> str:
    """Samples and, if there are any, tokens a second."""
    return f"{samples:,.1f} samples/s" + ("" if tokens is None else f", {tokens:,.0f} tokens/s")


def listed(names: Sequence[str], most: int = _SHOWN) -> str:
    """The first names; the rest is counted."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _share(x: float) -> str:
    """A percentage; only exact values print as 0% or 100%."""
    return f"{x:.1%}" if x in (0.0, 1.0) or 0.0005 <= x < 0.9995 else "less than 0.1%" if x < 0.5 else "over 99.9%"


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"
