"""Failures of ranks, and the error raised for them. Loads no torch."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from distir.ir import errors
from distir.ir.errors import DistirError, WorkerError
from distir.runtime.run_directory import log_file

GRACE_SECONDS = 1.0
"""How long to wait after a first failure for others that may show the cause."""
LOADING_SECONDS = 60.0
"""Most seconds in which a busy host loads torch."""
_STEP_HINT = "it was in step %d; a rank that is killed without a message may have run out of memory"


class Failure(NamedTuple):
    """A rank's failure: `kind` is the exception's class name; `peer`: it was raised in communication."""

    kind: str
    message: str
    hint: str | None
    peer: bool
    trace: str


def ending(code: int) -> str:
    """How a process ended, in words, from its exit code."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def died(codes: Mapping[int, int], folder: Path, step: int) -> WorkerError:
    """The error for ranks that ended without reporting a failure, from their exit codes; a killed rank comes first."""
    rank = min(codes, key=lambda r: (codes[r] > 0, r))
    line = _last_line(log_file(folder, rank))
    detail = f"; its last output: {line}" if line else ""
    return WorkerError(f"rank {rank} {ending(codes[rank])}{detail}", _STEP_HINT % step)


def failed(failures: Mapping[int, Failure]) -> DistirError:
    """The error for ranks that reported failures: of the first that failed outside communication, else of the first."""
    own = {r: f for r, f in failures.items() if not f.peer}
    rank, failure = min((own or failures).items())
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, DistirError):
        alike = all(f.message == failure.message for f in failures.values()) and len(failures) > 1
        return kind(failure.message if alike else f"rank {rank}: {failure.message}", failure.hint)
    error = WorkerError(f"rank {rank} failed: {failure.kind}: {first_line(failure.message) or 'no message'}")
    error.add_note(failure.trace)
    return error


def supervisor_died(log: Path) -> WorkerError:
    """The error for a supervisor that ended before its ranks."""
    line = _last_line(log)
    return WorkerError(f"the process that starts the ranks was ended{f': {line}' if line else ''}")


def first_line(text: str) -> str:
    """The first line of a message; "" if it is empty."""
    lines = text.strip().splitlines()
    return lines[0] if lines else ""


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else ""
