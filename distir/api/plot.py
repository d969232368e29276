"""Figures of predictions beside measurements, in files.

Of training runs two: seconds per epoch, and tokens (or samples) per second. Of an accuracy: predicted against measured.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir.api.metrics import read_metrics
from distir.ir.errors import UsageError, counted
from distir.ir.files import written

if TYPE_CHECKING:
    from distir.api.accuracy import Accuracy
    from distir.viz.figure import Figure

FORMATS = ("pdf", "png", "svg")
ACCURATE = 0.2
"""The error that the figure of an accuracy marks."""
_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6))


def training_figure(runs: Sequence[dict[str, Any]]) -> Figure:
    """Bars of runs (see `read_metrics`): seconds per epoch, the mean over ranks and epochs; tokens per second (samples,
    if some run has no sequences), the sum over ranks. Raises UsageError without matplotlib.
    """
    from distir.viz import grouped

    sides = ("predicted", "measured")
    times = {side: [run[side]["epoch_seconds"] for run in runs] for side in sides}
    most = max(x for row in times.values() for x in row)
    unit, scale = next((u for u in _UNITS if most * u[1] >= 1), _UNITS[-1])
    what = "tokens" if all(run["measured"]["tokens_per_second"] for run in runs) else "samples"
    rates = {side: [run[side][f"{what}_per_second"] for run in runs] for side in sides}
    return grouped(
        {
            "training time of an epoch": (
                f"{unit}, mean over ranks and epochs",
                {side: [x * scale for x in row] for side, row in times.items()},
            ),
            f"{what} a second": (f"{what}/s, sum over ranks", rates),
        },
        _labels(runs),
    )


def _labels(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Ranks and batch of each run; where these are equal, also the degrees of parallelism and the model."""
    labels = [f"{counted(run['plan']['devices'], 'rank')}\nbatch {run['batch']:,}" for run in runs]
    for more in (_degrees, lambda run: run["model"]):
        twice = Counter(labels)
        labels = [f"{x}\n{more(run)}" if twice[x] > 1 else x for x, run in zip(labels, runs, strict=True)]
    return labels


def _degrees(run: dict[str, Any]) -> str:
    plan = run["plan"]
    return f"dp {plan['dp']} tp {plan['tp']} pp {plan['pp']} mb {plan['microbatches']}"


def plot(files: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    """Draw the runs of metrics files as PDF, PNG or SVG. Raises UsageError for another format, or no metrics file."""
    format_of(output)
    save(training_figure([run for file in files for run in read_metrics(file)]), output)


def accuracy_figure(found: Accuracy) -> Figure:
    """Predicted against measured seconds of the rows that are predicted. Raises UsageError without matplotlib."""
    from distir.viz import against

    points: dict[str, list[tuple[float, float]]] = {name: [] for name in found.sources}
    for scored in found.rows:
        if scored.predicted is not None and scored.row.measured_seconds is not None:
            points[scored.row.source].append((scored.row.measured_seconds, scored.predicted.seconds))
    shown = {name: pairs for name, pairs in points.items() if pairs}
    return against(shown, x="measured step (s)", y="predicted step (s)", within=ACCURATE)


def format_of(output: str | os.PathLike[str]) -> str:
    """The format of a figure's file, as its name ends. Raises UsageError for one that is not drawn."""
    kind = Path(output).suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise UsageError(f"cannot draw {os.fspath(output)}", f"a figure's file ends in .{', .'.join(FORMATS)}")
    return kind


def save(figure: Figure, output: str | os.PathLike[str]) -> None:
    """Write a figure. Raises UsageError for another format than PDF, PNG or SVG, or a file that cannot be written."""
    drawn = BytesIO()  # written by us: matplotlib masks the error of a full disk with one of its own
    figure.savefig(drawn, format=format_of(output))
    with written(output) as file:
        file.write_bytes(drawn.getvalue())
