"""Callbacks of a run, and options and callbacks passed as keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from distir.api.metrics import Metrics, loss_of
from distir.api.model import OPTIONS
from distir.api.prediction import Prediction
from distir.ir.errors import UsageError, did_you_mean
from distir.ir.function import Function
from distir.runtime.epochs import Epoch
from distir.runtime.job import JobCallbacks, OnStep, ignore
from distir.runtime.launcher import this_rank
from distir.runtime.options import RunOptions

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCallbacks:
    """Functions that `run` calls in the calling process; under torchrun or mpirun those after steps and epochs only on
    rank 0.

    `on_plan(Prediction)`: once the program is compiled and predicted.
    `on_step(step, seconds, outputs by position)`: after each step.
    `on_check(step, seconds, outputs by position)`: after each step of the sequential reference runs.
    `on_epoch(Metrics)`: before the first epoch and after each.
    `on_phase(text)`: when a phase of the preparation begins.
    """

    on_plan: Callable[[Prediction], None] | None = None
    on_step: OnStep | None = None
    on_check: OnStep | None = None
    on_epoch: Callable[[Metrics], None] | None = None
    on_phase: Callable[[str], None] | None = None

    def measuring(self, metrics: Metrics | None, function: Function, options: RunOptions) -> JobCallbacks:
        """The callbacks of a job; they also add each epoch to `metrics`, if given, and write the metrics file."""
        on_step, on_phase = self.on_step or ignore, self.on_phase or ignore
        if metrics is None:
            return JobCallbacks(on_step=on_step, on_phase=on_phase)
        losses: list[float] = []
        if options.metrics is not None and this_rank() == 0:
            metrics.save(options.metrics)  # fail before training, not after it, if the file cannot be written

        def after_step(step: int, time: float, outputs: dict[int, np.ndarray]) -> None:
            if (loss := loss_of(function, outputs)) is not None:
                losses.append(loss)
            on_step(step, time, outputs)

        def after_epoch(epoch: Epoch) -> None:
            metrics.add(epoch, losses)
            losses.clear()
            if options.metrics is not None:
                metrics.save(options.metrics)
            if self.on_epoch is not None:
                self.on_epoch(metrics)

        return JobCallbacks(on_step=after_step, on_epoch=after_epoch, on_phase=on_phase)


_OPTIONS, _CALLBACKS = ({f.name: f for f in fields(kind)} for kind in (RunOptions, RunCallbacks))


def with_changes(
    options: RunOptions | None, callbacks: RunCallbacks | None, changes: Mapping[str, Any]
) -> tuple[RunOptions, RunCallbacks]:
    """Options and callbacks with `changes` applied by field name. Raises UsageError for an unknown name."""
    for name in changes:
        if name not in _OPTIONS and name not in _CALLBACKS:
            known = ["data", "cluster", *_OPTIONS, *_CALLBACKS, *OPTIONS]
            hint = did_you_mean(name, known, f"there are {', '.join(known)}", most=3, cutoff=0.7)
            raise UsageError(f"a run has no option {name!r}", hint)
    return (
        replace(options or RunOptions(), **{k: x for k, x in changes.items() if k in _OPTIONS}),
        replace(callbacks or RunCallbacks(), **{k: x for k, x in changes.items() if k in _CALLBACKS}),
    )


def takes_changes(function: F) -> F:
    """Decorator: put every option and callback into the signature in place of `**changes`, for help and completion."""
    found = inspect.signature(function)
    shown = [p for p in found.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for f in (*_OPTIONS.values(), *_CALLBACKS.values()):
        shown.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type))
    function.__signature__ = found.replace(parameters=shown)  # type: ignore[attr-defined]
    return function
