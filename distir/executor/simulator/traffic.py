"""What a simulated step communicates: each kind of collective, how often, and by which algorithm."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from distir.executor.simulator.compile import CompiledProgram
from distir.executor.simulator.labels import SEND, axis_text
from distir.executor.simulator.maxplus import Call, Code, Sent
from distir.ir.function import Op
from distir.ir.pause import no_collection

TRANSFER = "transfer"
FAR = 16
"""Sizes, one this many times the next, are told apart: of the smaller the latency counts, of the larger the bytes."""


class TrafficKind(NamedTuple):
    """A kind of communication.

    - `axis`: the mesh axis, or several as "a+b"; SEND between stages;
    - `collective`: "all-reduce", ..., "transfer" between stages, else the name of the op; `devices`: among how many, on
      how many `nodes` (None where that is not known);
    - `algorithm`: "ring", "tree", "in-network", "pairs" or "next" (see `Wire`), "measured" where the seconds of the
      collective were; empty between stages.
    """

    axis: str
    collective: str
    devices: int
    nodes: int | None
    algorithm: str


class Traffic(NamedTuple):
    """What a device communicates in a step in one kind of collective, or sends to other stages; of sizes that are not
    far apart.

    The device is one of those that spend most on it. `times`: how often; `least` and `most`: the bytes of the smallest
    and the largest, of the whole value that is reduced, gathered or passed on; `seconds`: of all together, what compute
    hides included; `bus_bandwidth`: the bytes/s that the device sends meanwhile, as nccl-tests count them.
    """

    kind: TrafficKind
    times: int
    least: float
    most: float
    seconds: float
    bus_bandwidth: float

    def to_json(self) -> dict[str, Any]:
        """JSON; sizes in bytes, times in seconds, the bandwidth in bytes/s."""
        return {**self.kind._asdict(), **{k: x for k, x in self._asdict().items() if k != "kind"}}


@no_collection()
def traffic(program: CompiledProgram) -> list[Traffic]:
    """What a step communicates, what takes longest first."""
    found = [_most(kind, some) for kind, of_classes in sent_by_class(program).items() for some in _by_size(of_classes)]
    return sorted(found, key=lambda x: (-x.seconds, *x.kind[:2]))


def sent_by_class(program: CompiledProgram) -> dict[TrafficKind, dict[int, Counter[Sent]]]:
    """How often each class of devices takes part in each message of a step, by kind; in transfers, those that send."""
    counts: dict[TrafficKind, dict[int, Counter[Sent]]] = {}
    _count(program, program.main, 1, {}, counts)
    return counts


def _count(
    program: CompiledProgram,
    code: Code,
    times: int,
    classes: Mapping[int, int],
    counts: dict[TrafficKind, dict[int, Counter[Sent]]],
) -> None:
    """Add what runs of code communicate, by class. `classes`: those of the program, where they are not the code's."""
    calls: Counter[tuple[int, int]] = Counter()
    first: dict[tuple[int, int], Call] = {}
    for op, plan in zip(code.function.ops, code.plans, strict=True):
        if isinstance(plan, Call):
            key = id(plan.model), id(plan.classes)
            calls[key] += 1
            first.setdefault(key, plan)
            continue
        for part in plan.parts:
            if part.message is not None:
                seen = counts.setdefault(_kind(program, op, part.message), defaultdict(Counter))
                for c in part.sources:
                    seen[classes.get(c, c)][part.message] += times
    for key, n in calls.items():
        call = first[key]
        inside = {c: classes.get(d, d) for c, d in call.classes.items()} if call.classes else classes
        _count(program, call.model, times * n, inside, counts)


def _kind(program: CompiledProgram, op: Op, message: Sent) -> TrafficKind:
    group, wire = message.group, op.spec.comm and op.spec.comm.wire
    if group is None:
        return TrafficKind(SEND, TRANSFER, 2, message.nodes, "")
    name, algorithm = (wire and wire.collective) or op.op_type, program.cost.pattern(op.spec, message.size, group)
    return TrafficKind(axis_text(op.attributes["axis"]), name, group.size, group.nodes, algorithm)


def _by_size(of_classes: Mapping[int, Mapping[Sent, int]]) -> Iterator[dict[int, dict[Sent, int]]]:
    """The messages of each class, those together whose sizes are less than FAR apart, the next larger from the next."""
    sizes = sorted({m.size for counts in of_classes.values() for m in counts})
    ends = [k for k, (a, b) in enumerate(pairwise(sizes), 1) if b >= FAR * a]
    for begin, end in pairwise([0, *ends, len(sizes)]):
        least, most = sizes[begin], sizes[end - 1]
        found = {c: {m: n for m, n in counts.items() if least <= m.size <= most} for c, counts in of_classes.items()}
        yield {c: counts for c, counts in found.items() if counts}


def _most(kind: TrafficKind, of_classes: Mapping[int, Mapping[Sent, int]]) -> Traffic:
    """That of the class which spends most seconds on it."""
    seconds = {c: sum([m.seconds * n for m, n in counts.items()]) for c, counts in of_classes.items()}
    c = max(seconds, key=seconds.__getitem__)
    counts = of_classes[c]
    sizes = [m.size for m in counts]
    sent = sum([m.sent * n for m, n in counts.items()])
    rate = sent / seconds[c] if seconds[c] else 0.0
    return Traffic(kind, sum(counts.values()), min(sizes), max(sizes), seconds[c], rate)
