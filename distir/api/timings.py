"""What traces hold: the slices of a prediction, or of the ranks of a run, with the seconds that each stands for.

Of communication a rank's trace says when the rank issued it and when it was complete. What it waited for other ranks
before anything could move is not the communication's: here it begins when all that take part have issued it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from distir.executor.labels import COMMUNICATION, SEND, STEP
from distir.ir.errors import UsageError, counted

PREDICTED = "predicted.json"
"""The file of a prediction, beside `rank0.json`, `rank1.json`, ..."""


Key = tuple[str, str | None, str | None, str | None]
"""An op of the program: its name, function, result and stage."""


class Slice(NamedTuple):
    """An op, or a part of one, on one process: where, and from when to when (s). In a run a process is a rank."""

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

    @property
    def keys(self) -> list[Key]:
        """The ops, where several were done at once."""
        if "does" not in self.args:
            return [self.key]
        return [(name, self.args.get("function"), result, self.args.get("stage")) for name, result in self.args["does"]]


class Process(NamedTuple):
    """A rank, or, in a prediction, devices that all do the same."""

    name: str
    devices: int
    host: str


class Trace(NamedTuple):
    """Slices, and the processes by number."""

    slices: list[Slice]
    processes: dict[int, Process]


def read_trace(path: Path) -> Trace:
    """The slices of a trace in Chrome's format. Raises UsageError if it is no such file."""
    try:
        events = json.loads(path.read_bytes())["traceEvents"]
        about = {e["pid"]: e["args"] for e in events if e["name"] == "process_name"}
        number = {pid: args.get("rank", pid) for pid, args in about.items()}
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        slices = [_slice(e, number[e["pid"]], threads[e["pid"], e["tid"]]) for e in events if e["ph"] == "X"]
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror or e}", "distir run --profile DIR writes it") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is no trace of distir's") from None
    return Trace(
        slices, {number[k]: Process(x["name"], x.get("devices", 1), x.get("host", "")) for k, x in about.items()}
    )


def _slice(e: Mapping[str, Any], process: int, thread: str) -> Slice:
    begin = e["ts"] / 1e6
    return Slice(process, thread, e["cat"], e["name"], begin, begin + e["dur"] / 1e6, e["args"])


def read_folder(folder: Path) -> tuple[Trace, Trace]:
    """The prediction and the run in a folder. Raises UsageError, naming it, for a file that is not there."""
    predicted = read_trace(folder / PREDICTED)
    world = sum(p.devices for p in predicted.processes.values())
    missing = [r for r in range(world) if not (folder / f"rank{r}.json").exists()]
    if missing:
        raise UsageError(
            f"{folder} has no trace of {counted(len(missing), 'rank')} of {world}, such as rank{missing[0]}.json",
            "each rank writes its own when the run ends",
        )
    ranks = [read_trace(folder / f"rank{r}.json") for r in range(world)]
    return predicted, joined(ranks)


def joined(traces: Iterable[Trace]) -> Trace:
    """Several traces as one."""
    out = Trace([], {})
    for t in traces:
        out.slices.extend(t.slices)
        out.processes.update(t.processes)
    return out


def steps(trace: Trace) -> list[Slice]:
    """The steps that were recorded, of each process; of a prediction the only one."""
    found = [s for s in trace.slices if s.category == STEP]
    if found or not trace.slices:
        return found
    begin, end = min(s.begin for s in trace.slices), max(s.end for s in trace.slices)
    return [Slice(p, STEP, STEP, STEP, min(0.0, begin), end, {}) for p in trace.processes]


def quicker_half(trace: Trace) -> Trace:
    """Without the steps that took longer than the median one: of these a busy machine says more than the program."""
    seconds: dict[int, float] = {}
    for s in trace.slices:
        if s.category == STEP:
            seconds[s.args["step"]] = max(s.seconds, seconds.get(s.args["step"], 0.0))
    if not seconds:
        return trace
    most = median_low(seconds.values())
    kept = [s for s in trace.slices if seconds.get(s.args.get("step", -1), 0.0) <= most]
    return trace._replace(slices=kept)


class Aligned(NamedTuple):
    """Slices, and of each communication the share of it whose end is known; the rest is left out."""

    slices: list[Slice]
    known: dict[Key, float]


def aligned(trace: Trace) -> Aligned:
    """The slices, communication from when all that take part have issued it; of transfers only who receives.

    Where ranks are on several hosts, whose clocks differ, only from when the rank itself has issued it.
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
                begin = max(s.args["issued"] / 1e6, ready.get(_meeting(s, k), 0.0), free[s.process, s.stream])
                s = s._replace(begin=min(begin, s.end))
                free[s.process, s.stream] = s.end
            whole = s.process, s.args.get("step"), s.key, s.args.get("message", (k,))
            found.setdefault(whole, []).append(s)
    known: dict[Key, list[bool]] = defaultdict(list)
    for parts in found.values():  # several of one transfer are the members of a bundle
        ends = [s.end for s in parts if "late" not in s.args]
        known[parts[0].key].append(bool(ends))
        if ends:
            out.append(parts[0]._replace(begin=min(s.begin for s in parts), end=max(ends)))
    return Aligned(out, {key: sum(row) / len(row) for key, row in known.items()})


def _numbered(slices: Sequence[Slice]) -> Iterator[tuple[Slice, int]]:
    """Each slice with how many of its op there were before it on its process, in its step."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for s in slices:
        key = s.process, s.category, s.key, s.args.get("step"), s.args.get("side")
        yield s, seen[key]
        seen[key] += 1


def _meeting(s: Slice, k: int) -> tuple[Any, ...]:
    """What is the same for all slices of one collective, or of one transfer, and for no others."""
    about, rank = s.args, s.process
    if "peer" in about:
        ends = (rank, about["peer"]) if about.get("side") == SEND else (about["peer"], rank)
        return "transfer", about["step"], about["message"], *ends, k
    return "collective", about["step"], *s.key, *about.get("ranks", (rank,)), k


def _issued_by_all(slices: Sequence[Slice]) -> dict[tuple[Any, ...], float]:
    """When the last of those that meet had issued it."""
    found: dict[tuple[Any, ...], float] = {}
    for s, k in _numbered(sorted(slices, key=lambda s: s.begin)):
        if s.category == COMMUNICATION and "issued" in s.args:
            key = _meeting(s, k)
            found[key] = max(found.get(key, 0.0), s.args["issued"] / 1e6)
    return found
