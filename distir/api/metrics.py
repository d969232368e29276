"""Metrics of a training run per epoch, measured and predicted, and their JSON file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from distir.api.prediction import Prediction
from distir.api.results import rates, seconds
from distir.ir.errors import UsageError
from distir.ir.files import written
from distir.ir.function import Function
from distir.runtime.epochs import Epoch


@dataclass(frozen=True)
class Rates:
    """Rates of an epoch, or the mean of several: seconds (mean over ranks), and samples and tokens per second of each
    rank. Each rank is credited with an equal share of every step, whatever the plan.
    """

    seconds: float
    samples: list[float]
    tokens: list[float] | None

    @property
    def samples_per_second(self) -> float:
        """The sum over ranks."""
        return sum(self.samples)

    @property
    def tokens_per_second(self) -> float | None:
        """The sum over ranks. None if samples are not sequences."""
        return None if self.tokens is None else sum(self.tokens)

    def to_json(self) -> dict[str, Any]:
        return {
            "samples_per_second_by_rank": self.samples,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second_by_rank": self.tokens,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True)
class Metrics:
    """The prediction of a run and its measured epochs, which `add` appends.

    `steps`: steps per epoch; `about`: further fields of the JSON file. `losses[k]` and `validation[k]` are means over
    epoch k, None without a loss or without held-out samples. `earlier`: the metrics file of the run that this one
    resumes; its epochs are in no average.
    """

    prediction: Prediction
    steps: int
    about: Mapping[str, Any] = field(default_factory=dict)
    epochs: list[Epoch] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    validation: list[float | None] = field(default_factory=list)
    earlier: dict[str, Any] = field(default_factory=dict)

    def add(self, epoch: Epoch, losses: Sequence[float]) -> None:
        """Append an epoch; `losses` are those of its steps."""
        self.epochs.append(epoch)
        self.losses.append(fmean(losses) if losses else None)
        self.validation.append(float(epoch.means[0].item()) if epoch.means else None)

    def rates(self, epochs: Sequence[Epoch], warm_up: bool = False) -> Rates:
        """Mean rates of epochs; with `warm_up` without the first step of each, if each has more than one."""
        first = warm_up and all(e.steps > 1 for e in epochs)
        steps = sum(e.steps - first for e in epochs)
        spent = [sum(e.seconds[r] - first * e.first[r] for e in epochs) for r in range(len(epochs[0].seconds))]
        summary = self.prediction.summary
        each = [steps / s / len(spent) for s in spent]
        tokens = None if summary.tokens is None else [x * summary.tokens for x in each]
        return Rates(fmean(spent) / steps * self.steps, [x * summary.batch for x in each], tokens)

    @property
    def measured(self) -> Rates | None:
        """Mean rates without the first epoch (warm-up); of a single epoch without its first step. None before that."""
        return self.rates(self.epochs[1:] or self.epochs, len(self.epochs) == 1) if self.epochs else None

    @property
    def predicted_seconds(self) -> float:
        """Predicted seconds of an epoch."""
        return self.prediction.step_seconds * self.steps

    def table(self) -> list[tuple[str, ...]]:
        """A header and a row per epoch."""
        return [epoch_header(self), *[self.row(k) for k in range(len(self.epochs))]]

    def row(self, k: int) -> tuple[str, ...]:
        """Epoch, losses (if there are any), time and rate as text."""
        found = self.rates([self.epochs[k]])
        losses = [f"{x:.6f}" for x in (self.losses[k], self.validation[k]) if x is not None]
        rate = found.samples_per_second if found.tokens_per_second is None else found.tokens_per_second
        return str(self.epochs[k].number), *losses, seconds(found.seconds), f"{rate:,.0f}"

    def lines(self) -> list[str]:
        """Lines for the end of a run: averages, predicted and measured."""
        found = self.measured
        if found is None:
            return []
        counted = [e.number for e in self.epochs[1:]]  # after --resume they do not begin with 1
        which = f"mean of epochs {counted[0]} to {counted[-1]}" if len(counted) > 1 else ""
        alone = "without its first step" if self.epochs[0].steps > 1 else "of one step, the first"
        which = which or (f"epoch {counted[0]}" if counted else alone)
        p = self.prediction
        text = f"epoch {seconds(found.seconds)} ({which}), {rates(found.samples_per_second, found.tokens_per_second)}"
        if self.about.get("backend") == "numpy":  # the reference runs all ranks in one process
            return [text]
        figures = f"{seconds(self.predicted_seconds)}, {rates(p.samples_per_second, p.tokens_per_second)}"
        return [text, f"predicted {figures} on {p.cluster}"]

    def to_json(self) -> dict[str, Any]:
        """JSON; times in seconds. Keys that end in `_by_rank` have a number per rank, the others are over all ranks."""
        found, p = self.measured, self.prediction
        summary = p.summary.to_json()
        before = self.earlier.get("measured") if self.earlier.get("plan") == summary["plan"] else None
        epochs = [
            {
                "epoch": e.number,
                "steps": e.steps,
                "loss": self.losses[k],
                "validation_loss": self.validation[k],
                "seconds_by_rank": e.seconds,
                "data_seconds_by_rank": e.data_seconds,
                **self.rates([e]).to_json(),
            }
            for k, e in enumerate(self.epochs)
        ]
        return {
            **summary,
            **self.about,
            "cluster": p.cluster,
            "steps": self.steps,
            "predicted": {
                "epoch_seconds": self.predicted_seconds,
                "step_seconds": p.step_seconds,
                "samples_per_second": p.samples_per_second,
                "tokens_per_second": p.tokens_per_second,
            },
            "measured": before
            if found is None
            else {
                "epochs": [e.number for e in self.epochs[1:] or self.epochs],
                "epoch_seconds": found.seconds,
                "step_seconds": found.seconds / self.steps,
                **found.to_json(),
            },
            "epochs": [*self.earlier.get("epochs", []), *epochs],
        }

    def continue_file(self, path: str | os.PathLike[str] | None) -> None:
        """Continue the metrics file of an earlier run, if it exists. Raises UsageError if it is not one run's file."""
        if path is None or not Path(path).exists():
            return
        runs = _runs(path)
        if len(runs) > 1:
            raise UsageError(f"{os.fspath(path)} holds the metrics of {len(runs)} runs", "--metrics of another file")
        self.earlier.update(runs[0])

    def drop_from(self, epoch: int) -> None:
        """Drop the earlier run's epochs from number `epoch` on: they are run again."""
        if self.earlier:
            self.earlier["epochs"] = [e for e in self.earlier["epochs"] if e["epoch"] < epoch]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file atomically. Raises UsageError if it cannot be written."""
        write_json(self.to_json(), path)


def epoch_header(metrics: Metrics) -> tuple[str, ...]:
    """The columns of `Metrics.row`."""
    loss = ["loss"] * any(x is not None for x in metrics.losses)
    validation = ["validation loss"] * any(x is not None for x in metrics.validation)
    unit = "samples/s" if metrics.prediction.summary.tokens is None else "tokens/s"
    return "epoch", *loss, *validation, "time", unit


def finite(x: Any) -> Any:
    """`x` with infinity and nan, which JSON lacks, replaced by None."""
    if isinstance(x, dict):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def write_json(x: Any, path: str | os.PathLike[str]) -> None:
    """Write a JSON file atomically. Raises UsageError if it cannot be written."""
    with written(path) as file:
        file.write_text(json.dumps(finite(x), indent=2, allow_nan=False) + "\n")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The runs in a metrics file of `run` or `bench scaling`. Raises UsageError if it is not such a file, or if a run
    has no measured epoch.
    """
    runs = _runs(path)
    if any(r["measured"] is None for r in runs):
        raise UsageError(f"{os.fspath(path)}: no epoch was measured yet")
    return runs


def _runs(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    try:
        found = json.loads(Path(path).read_text())
    except OSError as e:
        raise UsageError(f"cannot read {os.fspath(path)}: {e.strerror or e}") from None
    except ValueError:
        raise UsageError(f"{os.fspath(path)} is not JSON", _HINT) from None
    runs = found.get("runs", [found]) if isinstance(found, dict) else []
    if not runs or not all(
        isinstance(r, dict) and {"plan", "predicted", "measured", "epochs"} <= r.keys() for r in runs
    ):
        raise UsageError(f"{os.fspath(path)} holds no metrics", _HINT)
    return runs


_HINT = "distir run --metrics FILE.json writes such a file"


def loss_of(function: Function, outputs: Mapping[int, np.ndarray]) -> float | None:
    """The loss among a step's outputs: the first output of a training step. None if it is absent."""
    return float(outputs[0].item()) if function.updates and 0 in outputs else None
