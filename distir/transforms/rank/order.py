"""Proves before a run that the programs of all ranks match each other and cannot deadlock.

Every rank executes its program in order. A collective completes when all ranks of its group have reached it, a transfer
when both sides have (a rendezvous): as if nothing were buffered, so a program that passes cannot block however much the
backend buffers. Ranks that share a program run in lockstep, and communication among them alone cannot block. Distinct
programs are simulated against each other, one step per rendezvous. So the time does not grow with dp and tp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from distir.ir.device import Device, Mesh
from distir.ir.errors import ModelError
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor
from distir.transforms.rank.project import RankProgram, homes_of

Names = tuple[str, ...]


class Rendezvous(NamedTuple):
    """A collective or transfer among ranks of several programs, as one of them has it.

    `key` identifies it in all of them; `form` is what must be equal in all.
    """

    key: tuple[object, ...]
    form: tuple[object, ...]
    programs: frozenset[int]
    """The numbers of the programs that take part."""
    op: Op


def check_order(programs: Sequence[RankProgram]) -> None:
    """Raises ModelError, naming ranks and ops, if the ranks of a group issue different collectives or the same in
    another order, if one side of a transfer is missing or of another type, or if ranks would deadlock."""
    number, ranks, where = _shared(programs)
    rows = [list(_rendezvous(f, c, where)) for c, f in enumerate(number)]
    _walk(rows, ranks)


def check_ahead(ahead: Sequence[RankProgram], programs: Sequence[RankProgram]) -> None:
    """Check that the programs `ahead` differ from `programs` only in receives that are posted earlier.

    Receiving earlier and waiting later cannot block: if `check_order` passes `programs`, `ahead` cannot deadlock.
    Raises ModelError, naming ranks and ops, for any other difference.
    """
    number, ranks, where = _shared(programs)
    checked: set[tuple[Function, Function]] = set()
    for mine, p in zip(ahead, programs, strict=True):
        if (mine.function, p.function) in checked:
            continue
        checked.add((mine.function, p.function))
        c = number[p.function]
        got, want = (_split(_rendezvous(f, c, where)) for f in (mine.function, p.function))
        for what, rows in (("run", zip_longest(want[0], got[0])), ("receive", zip_longest(want[1], got[1]))):
            for a, b in rows:
                if a is None or b is None or a[1][:2] != b[1][:2]:
                    expected, found = (repr(x[1].op) if x else "nothing" for x in (a, b))
                    raise ModelError(f"{_rank_names(ranks[c])}: expected to {what} {expected}, got {found}")
                if what == "receive" and b[0] > a[0]:
                    raise ModelError(f"{_rank_names(ranks[c])}: {b[1].op} stands later than where the value is sent")


def _shared(
    programs: Sequence[RankProgram],
) -> tuple[dict[Function, int], list[list[int]], dict[Device | None, int]]:
    """The distinct programs, numbered; the ranks of each; the number of each device's program."""
    number: dict[Function, int] = {}
    ranks: list[list[int]] = []
    where: dict[Device | None, int] = {}
    for p in programs:
        c = number.setdefault(p.function, len(number))
        if c == len(ranks):
            ranks.append([])
        ranks[c].append(p.rank)
        where[p.device] = c
    return number, ranks, where


def _split(row: Iterable[Rendezvous]) -> tuple[list[tuple[int, Rendezvous]], list[tuple[int, Rendezvous]]]:
    """All but the receives, and the receives, each with the number of the former before it."""
    others: list[tuple[int, Rendezvous]] = []
    receives: list[tuple[int, Rendezvous]] = []
    for m in row:
        (receives if m.op.spec.route == "incoming" else others).append((len(others), m))
    return others, receives


def _rendezvous(function: Function, mine: int, where: dict[Device | None, int]) -> Iterator[Rendezvous]:
    """The rendezvous of a program with other programs, in order."""
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
        mesh = op.inputs[0].type.device if op.spec.route == "axis" else None
        if not isinstance(mesh, Mesh) or mesh.is_time(op.attributes["axis"]):
            return []
        return [(mesh, op, members.get(op.inputs[0], ()))] if len(among(mesh)) > 1 else []

    members = _members(function)
    for op in function.ops:
        if (message := op.attributes.get("message")) is not None:
            key, programs = ("message", message), among(*_ends(op))
            if len(programs) > 1:
                count[key] = count.get(key, -1) + 1
                yield Rendezvous((*key, count[key]), _sent(op), programs | {mine}, op)
        for mesh, inner, names in shared(op, members):
            key = mesh, inner.attributes["axis"]
            count[key] = count.get(key, -1) + 1
            types = inner.inputs[0].type, inner.outputs[0].type
            form = (inner.spec.name, inner.outputs[0].name, names, *types, op.attributes.get("mb"))
            yield Rendezvous((*key, count[key]), form, among(mesh), inner)


def _members(function: Function) -> dict[Value, Names]:
    """The names of the members of each bundle that a function makes."""
    found: dict[Value, Names] = {}
    for op in function.ops:
        if op.spec.bundle == "pack":
            found[op.outputs[0]] = tuple([v.name for v in op.inputs])
        elif op.spec.comm is not None and op.spec.comm.unchanged and op.inputs[0] in found:
            found[op.outputs[0]] = found[op.inputs[0]]
    return found


def _ends(op: Op) -> tuple[Device | Mesh, Device | Mesh]:
    """The source and the destination of a transfer, or of one side of it."""
    source = next(homes_of(op.inputs[0].type)) if op.inputs else op.attributes["source"]
    return source, op.attributes["to"]


def _sent(op: Op) -> tuple[object, ...]:
    """What must be equal on both sides of a transfer: dtype and global shape."""
    t = (op.inputs or op.outputs)[0].type
    return (t.dtype, t.global_shape) if isinstance(t, Tensor) else ()


def _walk(rows: Sequence[Sequence[Rendezvous]], ranks: Sequence[Sequence[int]]) -> None:
    """Execute the rendezvous of all programs; raises ModelError if one does not reach its end."""
    at = [0] * len(rows)
    todo = list(range(len(rows)))
    while todo:
        c = todo.pop()
        while at[c] < len(rows[c]):
            here = rows[c][at[c]]
            there = [rows[d][at[d]] if at[d] < len(rows[d]) else None for d in here.programs]
            if any(m is None or m.key != here.key for m in there):
                break
            _agree(here, there, ranks)
            for d in here.programs:
                at[d] += 1
                if d != c:
                    todo.append(d)
    stuck = [c for c, row in enumerate(rows) if at[c] < len(row)]
    if stuck:
        _fail(rows, ranks, at, stuck)


def _agree(here: Rendezvous, there: Sequence[Rendezvous | None], ranks: Sequence[Sequence[int]]) -> None:
    for d, m in zip(here.programs, there, strict=True):
        if m is not None and m.form != here.form:
            mine = next(c for c, other in zip(here.programs, there, strict=True) if other is here)
            raise ModelError(
                f"{_rank_names(ranks[mine])} would run {here.op} where {_rank_names(ranks[d])} would run {m.op}",
                "all ranks of a group must issue the same collectives, in the same order, on equal pieces",
            )


def _fail(
    rows: Sequence[Sequence[Rendezvous]], ranks: Sequence[Sequence[int]], at: Sequence[int], stuck: Sequence[int]
) -> None:
    """Raise for a rendezvous that a program never reaches, or else for a cycle of programs that wait for each other."""
    waits: dict[int, int] = {}
    for c in stuck:
        here = rows[c][at[c]]
        for d in here.programs:
            left = rows[d][at[d] :]
            if not any(m.key == here.key for m in left):
                raise ModelError(
                    f"{_rank_names(ranks[c])}: {here.op} waits for {_rank_names(ranks[d])}, which never comes to it"
                )
            if left[0].key != here.key:
                waits[c] = d
    seen: list[int] = []
    c = stuck[0]
    while c not in seen:
        seen.append(c)
        c = waits[c]
    cycle = seen[seen.index(c) :]
    lines = [f"{_rank_names(ranks[c])} in {rows[c][at[c]].op} for {_rank_names(ranks[waits[c]])}" for c in cycle]
    raise ModelError("ranks would wait for each other for ever: " + "; ".join(lines))


def _rank_names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:4]))}{' ...' if len(ranks) > 4 else ''}"
