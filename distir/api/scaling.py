"""Weak scaling: the same work a rank on more and more ranks, how long it takes and how long it should."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distir.api.metrics import Metrics, Rates, write_json
from distir.api.model import Model
from distir.api.plan import Plan
from distir.api.results import seconds
from distir.api.road import run
from distir.backends.limits import joined
from distir.ir.errors import UsageError, counted

HEADER = ("ranks", "batch", "epoch", "predicted epoch", "rate", "predicted rate", "efficiency", "predicted")


def weak_scaling(
    model: Callable[[int], Model],
    ranks: Sequence[int],
    batch: int,
    *,
    metrics: str | os.PathLike[str] | None = None,
    on_run: Callable[[list[Metrics]], None] | None = None,
    epochs: int = 3,
    **settings: Any,
) -> list[Metrics]:
    """Train the model for some epochs on each number of ranks, data-parallel, with `batch` samples a rank.

    `model` makes it for a batch; `settings` are those of `run`. `metrics` is the file of all runs, written after each;
    `on_run` is then called with those that there are. Raises UsageError under torchrun, whose ranks are as many as they
    are.
    """
    if not ranks or min(ranks) < 1 or len(set(ranks)) < len(ranks):
        raise UsageError(f"ranks are different whole numbers of at least 1, got {', '.join(map(str, ranks))}")
    if joined() is not None:
        raise UsageError("scaling starts ranks of its own, as many as it needs", "start it without torchrun")
    runs: list[Metrics] = []
    for n in ranks:
        if metrics is not None:
            write_json(to_json(runs), metrics)  # the first time before the first run: whether it can be written
        found = run(model(n * batch), Plan(dp=n), epochs=epochs, **settings).metrics
        if found is not None:
            runs.append(found)
        if on_run is not None:
            on_run(runs)
    if metrics is not None:
        write_json(to_json(runs), metrics)
    return runs


def efficiency(runs: Sequence[Metrics], rate: Callable[[Metrics], float]) -> list[float]:
    """Of each run its rate a rank, as a share of the first run's."""
    each = [rate(run) / run.prediction.summary.plan.size for run in runs]
    return [x / each[0] for x in each]


def to_json(runs: Sequence[Metrics]) -> dict[str, Any]:
    """JSON of all runs, with their efficiencies."""
    measured, predicted = efficiency(runs, measured_rate), efficiency(runs, predicted_rate)
    shares: list[Mapping[str, float]] = [
        {"efficiency": a, "predicted_efficiency": b} for a, b in zip(measured, predicted, strict=True)
    ]
    return {"runs": [{**run.to_json(), **share} for run, share in zip(runs, shares, strict=True)]}


def measured_rate(run: Metrics) -> float:
    """Tokens a second of all ranks; samples, if they are no sequences."""
    found = run.measured or Rates(0.0, [], None)
    return found.samples_per_second if found.tokens_per_second is None else found.tokens_per_second


def predicted_rate(run: Metrics) -> float:
    """As `measured_rate`."""
    tokens = run.prediction.tokens_per_second
    return run.prediction.samples_per_second if tokens is None else tokens


def rows(runs: Sequence[Metrics]) -> list[tuple[str, ...]]:
    """A row of `HEADER` a run."""
    unit = "samples/s" if any(run.prediction.summary.tokens is None for run in runs) else "tokens/s"
    shares = zip(efficiency(runs, measured_rate), efficiency(runs, predicted_rate), strict=True)
    return [
        (
            counted(run.prediction.summary.plan.size, "rank"),
            str(run.prediction.summary.batch),
            seconds(run.measured.seconds) if run.measured else "",
            seconds(run.predicted_seconds),
            f"{measured_rate(run):,.0f} {unit}",
            f"{predicted_rate(run):,.0f} {unit}",
            f"{share:.0%}",
            f"{predicted:.0%}",
        )
        for run, (share, predicted) in zip(runs, shares, strict=True)
    ]
