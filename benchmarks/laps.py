"""What the benchmarks share: their flags, CPU seconds by phase, a table."""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Mapping, Sequence


def parser(text: str | None, runs: int) -> argparse.ArgumentParser:
    """The flags that all benchmarks have: --runs and --json."""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--runs", type=_at_least_one, default=runs, metavar="N", help=f"default: {runs}")
    found.add_argument("--json", action="store_true")
    return found


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return int(text)


class Laps:
    """Adds up the CPU seconds between calls of `lap`, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.process_time()

    def start(self) -> None:
        """Forget what passed since the last lap."""
        self._begin = time.process_time()

    def lap(self, phase: str) -> None:
        """What passed since the last lap counts as `phase`."""
        now = time.process_time()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._begin
        self._begin = now


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each phase over runs."""
    return {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}


def machine() -> str:
    """The processor and the interpreter, in words."""
    return f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned text: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in (header, *rows)
    )
