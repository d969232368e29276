"""Whether the programs of all ranks fit together: proved before anything runs.

Every rank goes through its program in order. A collective ends when all ranks of its group have come to it, a transfer
when both sides have: as if nothing were buffered, so what passes here cannot block however much the backend buffers.
Ranks that share a program go in step, and what only they take part in cannot block; the others are walked, a step for
each collective or transfer that they share. So the time this takes does not grow with dp and tp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from distir.ir.device import Device, Mesh
from distir.ir.errors import IRTypeError, ModelError
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor
from distir.ir.verify import verify
from distir.ops.comm import ALONG_AXIS
from distir.transforms.ahead import posted_ahead
from distir.transforms.project import RankProgram, homes_of

Names = tuple[str, ...]


class Meeting(NamedTuple):
    """What ranks of several programs do together: `key` is the same for all, so is `form` if they agree."""

    key: tuple[object, ...]
    form: tuple[object, ...]
    who: frozenset[int]
    """The programs that take part, by number."""
    op: Op


def check_programs(programs: Sequence[RankProgram]) -> None:
    """Raises ModelError, naming ranks and ops, unless the programs of all ranks are well typed, with their receives
    posted ahead, and fit together (see `check_order`)."""
    checked: set[Function] = set()
    for p in programs:
        if p.function not in checked:
            checked.add(p.function)
            try:
                verify(posted_ahead(p).function)
            except IRTypeError as e:
                raise IRTypeError(f"rank {p.rank}: {e.message}", e.hint) from None
    check_order(programs)


def check_order(programs: Sequence[RankProgram]) -> None:
    """Raises ModelError, naming ranks and ops, if the ranks of a group issue different collectives or the same in
    another order, if one side of a transfer is missing or of another type, or if ranks would wait for each other for
    ever."""
    number: dict[Function, int] = {}
    ranks: list[list[int]] = []
    where: dict[Device | None, int] = {}
    for p in programs:
        c = number.setdefault(p.function, len(number))
        if c == len(ranks):
            ranks.append([])
        ranks[c].append(p.rank)
        where[p.device] = c
    rows = [list(_meetings(f, c, where)) for c, f in enumerate(number)]
    _walk(rows, ranks)


def _meetings(function: Function, mine: int, where: dict[Device | None, int]) -> Iterator[Meeting]:
    """What a program does together with other programs, in order."""
    memo: dict[object, frozenset[int]] = {}
    bodies: dict[Function, list[tuple[Mesh, Op, Names]]] = {}
    count: dict[tuple[object, ...], int] = {}

    def among(*homes: Device | Mesh) -> frozenset[int]:
        if homes not in memo:
            devices = [d for home in homes for d in (home.devices if isinstance(home, Mesh) else (home,))]
            memo[homes] = frozenset(where[d] for d in devices if d in where)
        return memo[homes]

    def collectives(f: Function) -> list[tuple[Mesh, Op, Names]]:
        if f not in bodies:
            members = _members(f)
            bodies[f] = [found for op in f.ops for found in shared(op, members)]
        return bodies[f]

    def shared(op: Op, members: Mapping[Value, Names]) -> list[tuple[Mesh, Op, Names]]:
        if op.callee is not None:
            return collectives(op.callee)
        mesh = op.inputs[0].type.device if op.spec.name in ALONG_AXIS else None
        if not isinstance(mesh, Mesh) or mesh.time == mesh.position(op.attributes["axis"]):
            return []
        return [(mesh, op, members.get(op.inputs[0], ()))] if len(among(mesh)) > 1 else []

    members = _members(function)
    for op in function.ops:
        if (message := op.attributes.get("message")) is not None:
            key, who = ("message", message), among(*_ends(op))
            if len(who) > 1:
                count[key] = count.get(key, -1) + 1
                yield Meeting((*key, count[key]), _sent(op), who | {mine}, op)
        for mesh, inner, names in shared(op, members):
            key = mesh, inner.attributes["axis"]
            count[key] = count.get(key, -1) + 1
            types = inner.inputs[0].type, inner.outputs[0].type
            form = (inner.spec.name, inner.outputs[0].name, names, *types, op.attributes.get("mb"))
            yield Meeting((*key, count[key]), form, among(mesh), inner)


def _members(function: Function) -> dict[Value, Names]:
    """What is in each bundle that a function makes."""
    found: dict[Value, Names] = {}
    for op in function.ops:
        if op.spec.bundle == "pack":
            found[op.outputs[0]] = tuple([v.name for v in op.inputs])
        elif op.spec.name == "After" and op.inputs[0] in found:
            found[op.outputs[0]] = found[op.inputs[0]]
    return found


def _ends(op: Op) -> tuple[Device | Mesh, Device | Mesh]:
    """From where to where a transfer, or the side of one, goes; a side that only receives says itself from where."""
    source = next(homes_of(op.inputs[0].type)) if op.inputs else op.attributes["source"]
    return source, op.attributes["to"]


def _sent(op: Op) -> tuple[object, ...]:
    """What both sides of a transfer must agree on: the whole's dtype and shape."""
    t = (op.inputs or op.outputs)[0].type
    return (t.dtype, t.global_shape) if isinstance(t, Tensor) else ()


def _walk(rows: Sequence[Sequence[Meeting]], ranks: Sequence[Sequence[int]]) -> None:
    """Go through all programs as far as they get; all get to the end, or the first that cannot is told."""
    at = [0] * len(rows)
    todo = list(range(len(rows)))
    while todo:
        c = todo.pop()
        while at[c] < len(rows[c]):
            here = rows[c][at[c]]
            there = [rows[d][at[d]] if at[d] < len(rows[d]) else None for d in here.who]
            if any(m is None or m.key != here.key for m in there):
                break
            _agree(here, there, ranks)
            for d in here.who:
                at[d] += 1
                if d != c:
                    todo.append(d)
    stuck = [c for c, row in enumerate(rows) if at[c] < len(row)]
    if stuck:
        _fail(rows, ranks, at, stuck)


def _agree(here: Meeting, there: Sequence[Meeting | None], ranks: Sequence[Sequence[int]]) -> None:
    for d, m in zip(here.who, there, strict=True):
        if m is not None and m.form != here.form:
            mine = next(c for c, other in zip(here.who, there, strict=True) if other is here)
            raise ModelError(
                f"{_named(ranks[mine])} would run {here.op} where {_named(ranks[d])} would run {m.op}",
                "all ranks of a group must issue the same collectives, in the same order, on equal pieces",
            )


def _fail(
    rows: Sequence[Sequence[Meeting]], ranks: Sequence[Sequence[int]], at: Sequence[int], stuck: Sequence[int]
) -> None:
    """Raise for what is never met, or else for a cycle of programs that wait for each other."""
    waits: dict[int, int] = {}
    for c in stuck:
        here = rows[c][at[c]]
        for d in here.who:
            left = rows[d][at[d] :]
            if not any(m.key == here.key for m in left):
                raise ModelError(f"{_named(ranks[c])}: {here.op} waits for {_named(ranks[d])}, which never comes to it")
            if left[0].key != here.key:
                waits[c] = d
    seen: list[int] = []
    c = stuck[0]
    while c not in seen:
        seen.append(c)
        c = waits[c]
    cycle = seen[seen.index(c) :]
    lines = [f"{_named(ranks[c])} in {rows[c][at[c]].op} for {_named(ranks[waits[c]])}" for c in cycle]
    raise ModelError("ranks would wait for each other for ever: " + "; ".join(lines))


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:4]))}{' ...' if len(ranks) > 4 else ''}"
