"""What each rank sends in a step, read from a distributed program: nothing is run or simulated.

Ranks of one mesh send the same, and a body that is called many times is read once: the time does not grow with devices,
replicas or microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, groupby
from typing import Any

from distir.ir.device import Device, Mesh
from distir.ir.function import Function, Op
from distir.ir.type import Tensor, Tuple, Type
from distir.transforms.rank.as_run import as_run
from distir.transforms.rank.project import ranks

_TEXTS = 4
"""The columns of the table that are texts; the others are numbers."""


@dataclass(frozen=True)
class Message:
    """A message, or a rank's part in a collective, that each of some ranks sends `times` times a step.

    `ranks` are these, such as "0-7,16-23". `over` are the axes of a collective, or the ranks that a transfer goes to;
    `function` is where the op is: the pass, and the stage. `members` are the elements of each tensor of a bucket, or of
    the one tensor; `elements` is their sum, `bytes` that of one message. What is sent for a halo is one message to each
    neighbour: devices at the ends of an axis have but one.

    Elements are those that one device has of the operand; of a reduce-scatter, of the result; of a scatter or broadcast
    from one device, of the piece that each other device gets, which is a message of its own.
    """

    ranks: str
    op: str
    over: str
    function: str
    members: tuple[int, ...]
    bytes: int
    times: int

    @property
    def elements(self) -> int:
        """The elements of a message."""
        return sum(self.members)

    def to_json(self) -> dict[str, Any]:
        """Its fields, and what it adds up to in a step."""
        total = {"total_elements": self.elements * self.times, "total_bytes": self.bytes * self.times}
        return {**asdict(self), "members": list(self.members), "elements": self.elements, **total}


def messages(program: Function) -> list[Message]:
    """What the ranks of a distributed program send, as they run it; messages that are alike are one, in the order of
    ranks and then of the program."""
    program = as_run(program)
    number = {d: i for i, d in enumerate(ranks(program))}
    found: dict[Message, int] = {}
    for function, times in _called(program).items():
        word = function.name.partition(".")[0] if function is not program else "-"
        for op in function.ops:
            for m in _sent(op, word, number):
                found[m] = found.get(m, 0) + times * m.times
    first = {m: int(m.ranks.replace("-", ",").partition(",")[0]) for m in found}
    return [replace(m, times=n) for m, n in sorted(found.items(), key=lambda pair: first[pair[0]])]


def most_sent(rows: Sequence[Message], of: Callable[[Message], int] = lambda m: m.bytes) -> dict[str, int]:
    """For each op the bytes of the rank that sends most of it in a step; or the most of another figure of a message."""
    changes: dict[str, dict[int, int]] = {}
    """By op and rank: how much more that rank sends than the one before it."""
    for m in rows:
        of_op = changes.setdefault(m.op, {})
        for run in m.ranks.split(","):
            first, _, last = run.partition("-")
            for rank, sign in ((int(first), 1), (int(last or first) + 1, -1)):
                of_op[rank] = of_op.get(rank, 0) + sign * of(m) * m.times
    return {op: max(accumulate([n for _, n in sorted(of_op.items())])) for op, of_op in changes.items()}


def table(rows: Sequence[Message]) -> list[str]:
    """The messages as the lines of a table."""
    if not rows:
        return ["nothing is sent"]
    head = ("ranks", "op", "over", "in", "elements", "tensors", "times", "total elements", "total bytes")
    cells = [
        (
            *(m.ranks, m.op, m.over, m.function),
            *(f"{m.elements:,}", f"{len(m.members):,}", f"{m.times:,}"),
            *(f"{m.elements * m.times:,}", f"{m.bytes * m.times:,}"),
        )
        for m in rows
    ]
    widths = [max(len(row[i]) for row in (head, *cells)) for i in range(len(head))]
    return [
        "  ".join([x.rjust(w) if i >= _TEXTS else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))])
        for row in (head, *cells)
    ]


def _called(program: Function) -> dict[Function, int]:
    """How often each function is called in a step, in the order of first calls."""
    times = dict.fromkeys((program, *reversed(program.callees())), 0)
    times[program] = 1
    for function, n in times.items():
        for op in function.ops:
            if op.callee is not None:
                times[op.callee] += n
    order = dict.fromkeys([program, *[op.callee for op in program.ops if op.callee is not None]])
    return {f: times[f] for f in (*order, *[f for f in times if f not in order])}


def _sent(op: Op, word: str, number: dict[Device, int]) -> Iterator[Message]:
    """The messages of one op, each with how often a rank sends it."""
    comm, route = op.spec.comm, op.spec.route
    if comm is None or route in (None, "here"):
        return
    name = op.spec.name
    before = op.inputs[0].type
    if route == "axis":
        axis, mesh = op.attributes["axis"], before.device
        if not isinstance(mesh, Mesh) or mesh.is_time(axis) or comm.idle(op.attributes, before):
            return
        after = op.outputs[0].type
        if isinstance(axis, str) and isinstance(after, Tensor) and after.on(axis).halo is not None:
            yield from _faces(Message("", name, axis, word, (), 0, 0), before, after, number)
            return
        moved = after if comm.sums and after.bytes < before.bytes else before  # a reduce-scatter sums to a part
        over = axis if isinstance(axis, str) else "+".join(axis)
        yield Message(_text(mesh, number), name, over, word, _elements(moved), moved.bytes, 1)
        return
    after = op.outputs[0].type
    source, target = before.device, after.device
    if source is None or target is None:
        return
    ends = _text(source, number), name, f"to {_text(target, number)}", word
    if route == "send":
        for t in before.types if isinstance(before, Tuple) else (before,):
            yield Message(*ends, _elements(t), t.bytes, 1)
    elif route == "gather":
        yield Message(*ends, _elements(before), before.bytes, 1)
    elif route == "scatter" and isinstance(target, Mesh):
        others = len([d for d in target.devices if d is not source])
        yield Message(*ends, _elements(after), after.bytes, others)


def _faces(message: Message, before: Type, after: Tensor, number: dict[Device, int]) -> Iterator[Message]:
    """What a device sends to its neighbours along an axis: to the next one its last `lo` slices, to the one before it
    its first `hi`. Those at the ends have one neighbour."""
    mesh, halo = after.mesh, after.on(message.over).halo
    if halo is None:
        return
    lo, hi, _ = halo
    one, last = (after.bytes - before.bytes) // (lo + hi), mesh.size(message.over) - 1
    sides = [(lo, last), (hi, 0)]  # the slices, and who does not send them
    if last == 1 and lo == hi:
        sides = [(lo, -1)]  # each of the two sends as much to the other
    at = mesh.position(message.over)
    for width, end in sides:
        senders = [d for d, c in zip(mesh.devices, mesh.coords, strict=True) if c[at] != end]
        if width:
            elements = one * width // after.dtype.size
            yield replace(message, ranks=_text(senders, number), members=(elements,), bytes=one * width, times=1)


def _elements(t: Type) -> tuple[int, ...]:
    """The elements that one device has of each tensor of a value."""
    if isinstance(t, Tensor):
        return (t.bytes // t.dtype.size,)
    return tuple([n for member in t.types for n in _elements(member)])


def _text(home: Device | Mesh | Sequence[Device], number: dict[Device, int]) -> str:
    """The ranks of a home, or of some devices, as runs of numbers."""
    devices = home.devices if isinstance(home, Mesh) else (home,) if isinstance(home, Device) else home
    found = sorted([number[d] for d in devices])
    runs = [[n for _, n in run] for _, run in groupby(enumerate(found), lambda pair: pair[1] - pair[0])]
    return ",".join([f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs])
