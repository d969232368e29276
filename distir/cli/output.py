"""Output: JSON, tables, programs, and a progress bar."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from distir.ir.function import Function
from distir.runtime.launcher import this_rank

_PATIENCE_SECONDS = 1.5
"""Delay before the progress bar appears."""


def print_json(x: Any) -> None:
    """Print JSON; infinity and nan become null."""
    from distir.api.metrics import finite

    print(json.dumps(finite(x), indent=2, allow_nan=False))


def columns(row: Sequence[str], widths: Sequence[int]) -> str:
    """A line of a table whose first column is text, the others numbers."""
    return "  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))


def first_rank() -> bool:
    """Whether this process prints results: no launcher has started it, or as rank 0."""
    return this_rank() == 0


def print_program(function: Function, fold: bool = False) -> None:
    """Print a program, in colours on a terminal; with `fold` without the rest of long lists."""
    from distir.ir import cpprint, pformat

    text = io.StringIO()
    with Progress("formatting"):
        if sys.stdout.isatty():
            cpprint(function, text, fold=fold)
        else:
            text.write(f"{pformat(function, fold)}\n")
    print(text.getvalue(), end="")


class Progress:
    """A progress bar on stderr, only on a terminal, and before a command has been silent for two seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._total, self._done = what, None, 0
        self._bar: Any = None
        self._task: Any = None
        self._timer = threading.Timer(_PATIENCE_SECONDS, self._start)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._timer.start()
        return self

    def phase(self, what: str, total: int | None = None) -> None:
        """Begin a phase, of `total` steps if known."""
        self._what, self._total, self._done = what, total, 0
        self._update()

    def advance(self, step: int) -> None:
        """Step number `step`, counted from 0, is done."""
        self._done = step + 1
        self._update()

    def _start(self) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(interval / 50)  # an import waits at each file until the command lets it go on: seconds
        try:
            from rich.console import Console
            from rich.progress import Progress as Bar
        finally:
            sys.setswitchinterval(interval)

        # printed lines go above the bar; output to a redirected stdout stays there
        bar = Bar(console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty())
        self._task = bar.add_task(self._what, total=self._total, completed=self._done)
        self._bar = bar
        bar.start()

    def _update(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=self._what, total=self._total, completed=self._done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._bar is not None:
            self._bar.stop()
