"""Read traces: the slices of a prediction, or of the ranks of a run, aligned for comparison.

A rank's trace records when the rank issued a communication and when it was complete. A communication is taken to begin
when all participants have issued it, so waiting for other ranks does not count.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from distir.executor.simulator.labels import COMMUNICATION, SEND, STEP
from distir.ir.errors import UsageError, counted

PREDICTED = "predicted.json"
"""Name of the predicted trace, beside `rank0.json`, `rank1.json`, ..."""


Key = tuple[str, str | None, str | None, str | None]
"""An op of the program: its name, function, result and stage."""


class Slice(NamedTuple):
    """An op, or a part of one, on a stream of a process, from `begin` to `end` (s). In a run a process is a rank."""

    process: int
    stream: str
    category: str
    name: str
    begin: float
    end: float
    args: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def key(self) -> Key:
        """The op: the same in a prediction and in a run."""
        return self.name, self.args.get("function"), self.args.get("result"), self.args.get("stage")


class Process(NamedTuple):
    """A rank, or, in a prediction, a device class."""

    name: str
    devices: int
    host: str


class TraceFile(NamedTuple):
    """The slices of a trace, and its processes by number."""

    slices: list[Slice]
    processes: dict[int, Process]


def read_trace(path: Path) -> TraceFile:
    """Read a trace in Chrome's format. Raises UsageError if it is not a trace written by distir."""
    try:
        events = json.loads(path.read_bytes())["traceEvents"]
        about = {e["pid"]: e["args"] for e in events if e["name"] == "process_name"}
        number = {pid: args.get("rank", pid) for pid, args in about.items()}
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        slices = [_slice(e, number[e["pid"]], threads[e["pid"], e["tid"]]) for e in events if e["ph"] == "X"]
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror or e}", "distir run --profile DIR writes it") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is not a trace written by distir") from None
    return TraceFile(
        slices, {number[k]: Process(x["name"], x.get("devices", 1), x.get("host", "")) for k, x in about.items()}
    )


def _slice(e: Mapping[str, Any], process: int, thread: str) -> Slice:
    begin = e["ts"] / 1e6
    return Slice(process, thread, e["cat"], e["name"], begin, begin + e["dur"] / 1e6, e["args"])


def read_folder(folder: Path) -> tuple[TraceFile, TraceFile]:
    """The predicted and the measured trace in a folder. Raises UsageError that names a missing file."""
    predicted = read_trace(folder / PREDICTED)
    world = sum(p.devices for p in predicted.processes.values())
    missing = [r for r in range(world) if not (folder / f"rank{r}.json").exists()]
    if missing:
        raise UsageError(
            f"{folder} has no trace of {counted(len(missing), 'rank')} of {world}, such as rank{missing[0]}.json",
            "each rank writes its trace at the end of the run",
        )
    ranks = [read_trace(folder / f"rank{r}.json") for r in range(world)]
    return predicted, joined(ranks)


def joined(traces: Iterable[TraceFile]) -> TraceFile:
    """Merge traces."""
    out = TraceFile([], {})
    for t in traces:
        out.slices.extend(t.slices)
        out.processes.update(t.processes)
    return out


def steps(trace: TraceFile) -> list[Slice]:
    """The slices of recorded steps, for each process; in a prediction one per process."""
    found = [s for s in trace.slices if s.category == STEP]
    if found or not trace.slices:
        return found
    begin, end = min(s.begin for s in trace.slices), max(s.end for s in trace.slices)
    return [Slice(p, STEP, STEP, STEP, min(0.0, begin), end, {}) for p in trace.processes]


def quicker_half(trace: TraceFile) -> TraceFile:
    """The trace without steps slower than the median, which measure a busy machine rather than the program."""
    seconds: dict[int, float] = {}
    for s in trace.slices:
        if s.category == STEP:
            seconds[s.args["step"]] = max(s.seconds, seconds.get(s.args["step"], 0.0))
    if not seconds:
        return trace
    most = median_low(seconds.values())
    selected = [s for s in trace.slices if seconds.get(s.args.get("step", -1), 0.0) <= most]
    return trace._replace(slices=selected)


class Aligned(NamedTuple):
    """Slices, and for each communication op the share of its instances whose completion time is known."""

    slices: list[Slice]
    known: dict[Key, float]


def aligned(trace: TraceFile) -> Aligned:
    """Align communication: it begins when all participants have issued it. Of transfers only the receiving side stays.

    With several hosts, whose clocks differ, communication begins when the rank itself has issued it. Communication
    whose completion time is unavailable is left out.
    """
    ready = _issued_by_all(trace.slices) if len({p.host for p in trace.processes.values()}) == 1 else {}
    out: list[Slice] = []
    found: dict[tuple[Any, ...], list[Slice]] = {}
    free: dict[tuple[int, str], float] = defaultdict(float)
    for s, k in _numbered(sorted(trace.slices, key=lambda s: s.begin)):
        if s.category != COMMUNICATION:
            out.append(s)
        elif s.args.get("side") != SEND:
            if "issued" in s.args:
                begin = max(s.args["issued"] / 1e6, ready.get(_exchange_key(s, k), 0.0), free[s.process, s.stream])
                s = s._replace(begin=min(begin, s.end))
                free[s.process, s.stream] = s.end
            whole = s.process, s.args.get("step"), s.key, s.args.get("message", (k,))
            found.setdefault(whole, []).append(s)
    known: dict[Key, list[bool]] = defaultdict(list)
    for parts in found.values():  # several parts of one transfer are the members of a bundle
        ends = [s.end for s in parts if "late" not in s.args]
        known[parts[0].key].append(bool(ends))
        if ends:
            out.append(parts[0]._replace(begin=min(s.begin for s in parts), end=max(ends)))
    return Aligned(out, {key: sum(row) / len(row) for key, row in known.items()})


def _numbered(slices: Sequence[Slice]) -> Iterator[tuple[Slice, int]]:
    """Each slice with the number of earlier instances of its op on the same process and in the same step."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for s in slices:
        key = s.process, s.category, s.key, s.args.get("step"), s.args.get("side")
        yield s, seen[key]
        seen[key] += 1


def _exchange_key(s: Slice, k: int) -> tuple[Any, ...]:
    """The key shared by all slices of one collective or transfer."""
    about, rank = s.args, s.process
    if "peer" in about:
        ends = (rank, about["peer"]) if about.get("side") == SEND else (about["peer"], rank)
        return "transfer", about["step"], about["message"], *ends, k
    return "collective", about["step"], *s.key, *about.get("ranks", (rank,)), k


def _issued_by_all(slices: Sequence[Slice]) -> dict[tuple[Any, ...], float]:
    """For each collective or transfer, when the last participant issued it (s)."""
    found: dict[tuple[Any, ...], float] = {}
    for s, k in _numbered(sorted(slices, key=lambda s: s.begin)):
        if s.category == COMMUNICATION and "issued" in s.args:
            key = _exchange_key(s, k)
            found[key] = max(found.get(key, 0.0), s.args["issued"] / 1e6)
    return found
