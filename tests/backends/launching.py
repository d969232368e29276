"""Programs that are launched without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from distir.backends.processes import launch
from distir.ir.function import Function
from distir.runtime.job import Job, JobCallbacks
from distir.runtime.options import RunOptions
from distir.runtime.outcome import Outcome

T = TypeVar("T", RunOptions, JobCallbacks)


def by_position(program: Function, arrays: Mapping[Any, Any] | Sequence[Any]) -> dict[int, Any]:
    """Arrays by position among the inputs: of all of them, in order, or by input Value or position."""
    if not isinstance(arrays, Mapping):
        return dict(enumerate(arrays))
    return {program.inputs.index(k) if k in program.inputs else k: x for k, x in arrays.items()}


def run(
    program: Function,
    arrays: Mapping[Any, Any] | Sequence[Any],
    steps: int = 1,
    data: Callable[[int], Mapping[Any, Any]] | None = None,
    **settings: Any,
) -> Outcome:
    """`launch.run` of a program; `settings` are options and callbacks by name, or of the job."""

    def make(kind: type[T]) -> T:
        """Of the settings that are its fields."""
        return kind(**{f.name: settings.pop(f.name) for f in fields(kind) if f.name in settings})

    feed = None if data is None else lambda k: by_position(program, data(k))
    options, callbacks = make(RunOptions), make(JobCallbacks)
    job = Job(program, by_position(program, arrays), feed, steps, options, **settings)
    return launch.run(job, callbacks)
