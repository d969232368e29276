"""Progress output of `distir run`: its callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distir.api import RunCallbacks, RunOptions
from distir.api.metrics import Metrics, loss_of
from distir.api.prediction import Prediction
from distir.api.results import step_header, step_row
from distir.cli.output import Progress, columns
from distir.ir.function import Function
from distir.runtime.launcher import launched


def run_callbacks(function: Function | None, options: RunOptions, progress: Progress, prints: bool) -> RunCallbacks:
    """Callbacks that update the progress bar and, if this process `prints`, print a line per step or epoch of the
    program `function`."""
    total = options.steps
    in_epochs = bool(options.epochs or options.metrics)
    row = _rows(function, options) if prints and not in_epochs and function is not None else None

    def on_plan(prediction: Prediction) -> None:
        progress.phase("starting")
        if prints:
            _print_summary(prediction)

    def on_step(step: int, time: float, outputs: dict[int, Any]) -> None:
        progress.phase("running", total)
        progress.advance(step)
        if row is not None:
            row(step, time, outputs)

    def on_epoch(metrics: Metrics) -> None:
        nonlocal total
        total = metrics.steps * (options.epochs or 1)
        if prints and metrics.epochs:
            _print_epoch(metrics)

    def on_check(step: int, time: float, outputs: dict[int, Any]) -> None:
        progress.phase("checking", total)
        progress.advance(step)

    return RunCallbacks(on_plan=on_plan, on_step=on_step, on_check=on_check, on_epoch=on_epoch, on_phase=progress.phase)


def _print_summary(prediction: Prediction) -> None:
    try:
        print("\n".join(prediction.summary.lines()), flush=True)
    except BrokenPipeError:
        if launched() is None:
            raise  # the other ranks wait for this one: a later print raises it again


def _rows(function: Function, options: RunOptions) -> Callable[[int, float, dict[int, Any]], None]:
    """A function that prints a row per step, and a header before the first."""
    started = False

    def row(step: int, time: float, outputs: dict[int, Any]) -> None:
        nonlocal started
        loss = loss_of(function, outputs)
        widths = [len(x) for x in step_row(max(options.steps or 0, 1000), None if loss is None else 100.0, 0.1)]
        if not started:
            print(f"\n{columns(step_header(loss is not None), widths)}")
            started = True
        print(columns(step_row(step, loss, time), widths), flush=True)

    return row


def _print_epoch(metrics: Metrics) -> None:
    head, *rows = metrics.table()
    most = ("1000", *["100.000000"] * (len(head) - 1))
    widths = [max(map(len, column)) for column in zip(head, most, strict=True)]
    if len(rows) == 1:
        print(f"\n{columns(head, widths)}")
    print(columns(rows[-1], widths), flush=True)
