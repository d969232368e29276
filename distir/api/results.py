"""What results are printed with: the summary of a plan, tables, units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distir.api.model import Model
from distir.ir.errors import counted
from distir.ir.function import Function
from distir.ir.type import Tensor
from distir.transforms.plan import WEIGHTS, Plan
from distir.transforms.sharding.coverage import Coverage, coverage

_SHOWN = 6
"""Names listed in a message; the rest is counted."""


@dataclass(frozen=True)
class Summary:
    """A plan applied to a model: what is split by tensor parallelism, and what is padded.

    `forward_only`: the model was loaded from a file without a loss, so nothing is trained. False for a Function.
    """

    model: str
    plan: Plan
    batch: int
    tokens: int | None
    split: Coverage | None
    padded: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    forward_only: bool

    @staticmethod
    def of(model: Model, plan: Plan, program: Function) -> Summary:
        """The summary of a distributed program."""
        padded = {
            v.name: (v.role.source, used)
            for v in program.inputs
            if v.role and v.role.source and v.kind != "state" and isinstance(v.type, Tensor)
            if v.role.source != (used := v.role.used or v.type.global_shape)
        }
        weights = plan.sharding.along(WEIGHTS)
        trained = any([v.kind == "parameter" for v in program.inputs])  # a proxy may have none
        split = coverage(program, weights[0].name) if weights and trained else None
        forward_only = model.path is not None and not model.function.updates
        return Summary(model.name, plan, model.batch, model.tokens, split, padded, forward_only)

    def lines(self) -> list[str]:
        """The plan; with tensor parallelism the shares that it splits; what is padded."""
        what = "; forward only: no loss was given" if self.forward_only else ""
        lines = [f"{self.model}: {self.plan}, batch {self.batch}, on {counted(self.plan.size, 'device')}{what}"]
        if self.split is not None:
            flops, parameters = _share(self.split.flops), _share(self.split.parameters)
            axes = self.plan.sharding.along(WEIGHTS)
            text = f"{axes[0].name} splits {flops} of the FLOPs and {parameters} of the parameters"
            unsplit = [v for v in self.split.replicated if isinstance(v.type, Tensor)]
            names = [f"{v.name} ({size(v.type.bytes)})" for v in unsplit]
            lines.append(f"{text}; not split: {listed(names)}" if names else text)
        if self.padded:
            rows = [f"{name} {_shape(a)} to {_shape(b)}" for name, (a, b) in self.padded.items()]
            lines.append(f"padded to be divisible: {', '.join(rows)}")
        return [*lines, *self._without_effect()]

    def _without_effect(self) -> list[str]:
        """What the plan asks for, and has no devices to split over."""
        plan, found = self.plan, list[str]()
        if plan.zero and math.prod([a.size for a in plan.sharding.axes if a.strategy != WEIGHTS]) == 1:
            found.append(f"ZeRO {plan.zero} splits nothing: there is one replica")
        if plan.sequence_parallel and math.prod([a.size for a in plan.sharding.along(WEIGHTS)]) == 1:
            found.append("sequence parallelism splits nothing: there is no tensor parallelism")
        return found

    def to_json(self) -> dict[str, Any]:
        """JSON of all fields."""
        split = self.split and {
            "flops": self.split.flops,
            "parameters": self.split.parameters,
            "replicated": [v.name for v in self.split.replicated],
        }
        padded = {name: {"from": list(a), "to": list(b)} for name, (a, b) in self.padded.items()}
        plan = self.plan.to_json()
        return {
            "model": self.model,
            "plan": plan,
            "batch": self.batch,
            "tokens": self.tokens,
            "split": split,
            "padded": padded,
            "forward_only": self.forward_only,
        }


def step_header(loss: bool) -> tuple[str, ...]:
    """The columns of `step_row`."""
    return ("step", "loss", "time") if loss else ("step", "time")


def step_row(step: int, loss: float | None, time: float) -> tuple[str, ...]:
    """Step, loss (if there is one) and time as text."""
    return str(step), *(() if loss is None else (f"{loss:.6f}",)), seconds(time)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first column is text, the others numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as an HTML table; the first is the header."""
    from html import escape

    head, *body = rows
    cells = "".join(f"<th>{escape(x)}</th>" for x in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(x)}</td>" for x in row) + "</tr>" for row in body)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"


def paragraphs(lines: Sequence[str]) -> str:
    from html import escape

    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def seconds(x: float, like: float = 0.0) -> str:
    """A time in seconds with a unit; 0 gets the unit of the time `like`."""
    most = x or like
    if most >= 1 or most == 0:
        return f"{x:.3f} s"
    return f"{x * 1e3:.3f} ms" if most >= 1e-3 else f"{x * 1e6:.1f} us"


def size(n: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:,.1f} GiB"


def rates(samples: float, tokens: float | None) -> str:
    """Samples and, if there are any, tokens a second."""
    rows = [(samples, 1, "samples/s"), *([] if tokens is None else [(tokens, 0, "tokens/s")])]
    return ", ".join([f"{x:,.{n}f} {unit}" if x >= 1 or not x else f"{x:.2g} {unit}" for x, n, unit in rows])


def listed(names: Sequence[str], most: int = _SHOWN) -> str:
    """The first names; the rest is counted."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _share(x: float) -> str:
    """A percentage; only exact values print as 0% or 100%."""
    return f"{x:.1%}" if x in (0.0, 1.0) or 0.0005 <= x < 0.9995 else "less than 0.1%" if x < 0.5 else "more than 99.9%"


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"
