"""Helpers of the benchmarks: flags, CPU seconds by phase, tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def parser(text: str | None, runs: int) -> argparse.ArgumentParser:
    """The flags that all benchmarks have: --runs, and --json, which may name a file."""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--runs", type=_at_least_one, default=runs, metavar="N", help=f"default: {runs}")
    found.add_argument("--json", nargs="?", const="-", metavar="FILE", help="beside the table, or without FILE for it")
    return found


def as_json(flag: str | None, found: object) -> bool:
    """Write what was found to the file of --json; without a file print it. Whether it was printed, and no table is."""
    if flag is None:
        return False
    text = json.dumps(found, indent=2)
    if flag == "-":
        print(text)
        return True
    Path(flag).write_text(text + "\n")
    return False


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
        """Discard the time since the last lap."""
        self._begin = time.process_time()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to `phase`."""
        now = time.process_time()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._begin
        self._begin = now


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each phase over runs."""
    return {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}


def machine() -> str:
    """A description of the processor, its cores and the interpreter."""
    cores = f"{os.cpu_count()} cores"
    return f"{_processor()}, {cores}, {platform.python_implementation()} {platform.python_version()}"


def _processor() -> str:
    """The processor's model, if Linux reports it, and architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{named[0]} ({platform.machine()})" if named else platform.machine()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table: the first column aligned left, the others right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in (header, *rows)
    )
