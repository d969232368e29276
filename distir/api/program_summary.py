"""A program in a few lines: functions, ops by kind, and what a rank communicates, by axis."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from distir.api.figures import parameters, summed
from distir.api.messages import messages, most_sent
from distir.api.results import listed, size
from distir.ir.errors import counted
from distir.ir.function import Function
from distir.transforms.passes import DISTRIBUTED, form_of
from distir.transforms.rank.project import ranks

_TRANSFERS = "between meshes"
_KINDS = 8
"""So many kinds of ops are named."""


class AxisTraffic(NamedTuple):
    """An op that communicates along an axis: how often, and the bytes of the rank that sends most, in a step."""

    axis: str
    op: str
    times: int
    bytes: int


class ProgramSummary(NamedTuple):
    """A program in a few figures. Ops of a function count once, however often it is called.

    `devices`: 0 for a program on no device. `communication`: largest first, of a distributed program only.
    """

    name: str
    form: str
    devices: int
    functions: int
    parameters: int
    ops: dict[str, int]
    communication: list[AxisTraffic]

    def lines(self) -> list[str]:
        """The figures as text."""
        where = f" over {counted(self.devices, 'device')}" if self.devices else ""
        what = f"{counted(self.functions, 'function')}, {counted(sum(self.ops.values()), 'op')}"
        kinds = [f"{n:,} {op}" for op, n in self.ops.items()]
        lines = [
            f"{self.name}, {self.form}{where}: {what}, {self.parameters:,} parameters",
            f"ops: {listed(kinds, _KINDS)}",
        ]
        for axis in dict.fromkeys(c.axis for c in self.communication):
            sent = [f"{c.times:,} {c.op} ({size(c.bytes)})" for c in self.communication if c.axis == axis]
            lines.append(f"{axis}: a rank sends {listed(sent)}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """JSON of all fields."""
        return {**self._asdict(), "communication": [c._asdict() for c in self.communication]}


def summary_of(program: Function) -> ProgramSummary:
    """The summary of a program of any form."""
    functions = (*program.callees(), program)
    ops = Counter(op.spec.name for f in functions for op in f.ops if op.callee is None)
    form = form_of(program)
    devices = len(ranks(program)) if form == DISTRIBUTED else 0
    weights = summed(parameters(program)).elements
    sent = _communication(program) if form == DISTRIBUTED else []
    return ProgramSummary(program.name, form, devices, len(functions), weights, dict(ops.most_common()), sent)


def _communication(program: Function) -> list[AxisTraffic]:
    rows = messages(program)
    by_kind = {m: (_TRANSFERS if m.over.startswith("to ") else m.over, m.op) for m in rows}
    found = [
        AxisTraffic(*kind, most_sent(of_kind, of=lambda m: 1)[kind[1]], most_sent(of_kind)[kind[1]])
        for kind in dict.fromkeys(by_kind.values())
        for of_kind in [[m for m in rows if by_kind[m] == kind]]
    ]
    return sorted(found, key=lambda c: -c.bytes)
