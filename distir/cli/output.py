"""Printing: JSON, programs, and a progress bar for what takes long."""

from __future__ import annotations

import json
import math
import sys
import time
from types import TracebackType
from typing import Any

from distir.ir.function import Function

_PATIENCE_SECONDS = 2.0
"""What takes no longer has no progress bar."""


def print_json(x: Any) -> None:
    """Print it as JSON; numbers that JSON does not have (infinity, nan) as null."""
    print(json.dumps(_plain(x), indent=2, allow_nan=False))


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def print_program(function: Function) -> None:
    """Print a program, in colours on a terminal."""
    from distir.ir import cpprint, pformat

    if sys.stdout.isatty():
        cpprint(function)
    else:
        print(pformat(function))


class Progress:
    """A bar on stderr, on a terminal only, and only once two seconds have passed."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what = total, what
        self._begin: float | None = None
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def advance(self, step: int) -> None:
        """Say that step number `step`, from 0, is done."""
        now = time.monotonic()
        self._begin = self._begin or now
        if self._bar is None and now - self._begin > _PATIENCE_SECONDS and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self.what, total=self.total)
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1)
            if step + 1 == self.total:
                self._bar.stop()

    def clear(self) -> None:
        """Take the bar off the screen for now, so that a line can be printed."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
