"""Weak scaling: the same batch per rank on more and more ranks, measured and predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distir.api.callbacks import takes_changes, with_changes
from distir.api.compilation import Cluster
from distir.api.metrics import Metrics, Rates, write_json
from distir.api.model import Model
from distir.api.results import seconds
from distir.api.running import AnyData, run
from distir.ir.errors import UsageError, counted
from distir.runtime.launcher import launched
from distir.runtime.options import RunOptions
from distir.transforms.plan import Plan

HEADER = ("ranks", "batch", "epoch", "predicted epoch", "rate", "predicted rate", "efficiency", "predicted")


@takes_changes
def weak_scaling(
    model: Callable[[int], Model],
    ranks: Sequence[int],
    batch: int,
    options: RunOptions | None = None,
    *,
    data: AnyData | None = None,
    cluster: Cluster | None = None,
    on_run: Callable[[list[Metrics]], None] | None = None,
    **changes: Any,
) -> list[Metrics]:
    """Train the model for some epochs (default 3) on each number of ranks, data-parallel, with `batch` samples a rank.

    `model(batch)` makes the model for a global batch size. `on_run` is called with all runs so far after each. The
    rest is as in `run`, except that `metrics` is one file for all runs. Raises UsageError under torchrun or mpirun,
    whose number of ranks is fixed.
    """
    if not ranks or min(ranks) < 1 or len(set(ranks)) < len(ranks):
        raise UsageError(f"expected distinct numbers of ranks of at least 1, got {', '.join(map(str, ranks))}")
    if (found := launched()) is not None:
        raise UsageError("bench scaling starts its ranks itself", f"start it without {found.by}")
    options, callbacks = with_changes(options, None, changes)
    file, options = options.metrics, replace(options, metrics=None, epochs=options.epochs or 3)
    runs: list[Metrics] = []
    for n in ranks:
        if file is not None:
            write_json(to_json(runs), file)  # also before the first run, to fail early if it cannot be written
        found = run(model(n * batch), Plan(dp=n), options, data=data, cluster=cluster, callbacks=callbacks).metrics
        if found is not None:
            runs.append(found)
        if on_run is not None:
            on_run(runs)
    if file is not None:
        write_json(to_json(runs), file)
    return runs


def efficiency(runs: Sequence[Metrics], rate: Callable[[Metrics], float]) -> list[float]:
    """For each run its rate per rank, relative to that of the first run."""
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
    """Measured tokens per second over all ranks; samples per second if samples are not sequences."""
    found = run.measured or Rates(0.0, [], None)
    return found.samples_per_second if found.tokens_per_second is None else found.tokens_per_second


def predicted_rate(run: Metrics) -> float:
    """Predicted rate, in the unit of `measured_rate`."""
    tokens = run.prediction.tokens_per_second
    return run.prediction.samples_per_second if tokens is None else tokens


def rows(runs: Sequence[Metrics]) -> list[tuple[str, ...]]:
    """A row per run, with the columns of `HEADER`."""
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
