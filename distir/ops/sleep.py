"""An op that stands for others in a proxy of a program: it takes their time, and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from distir.ir.communication import Communication, Lanes, RuntimeValue
from distir.ir.device import Mesh
from distir.ir.function import Op
from distir.ir.spec import Attrs, op
from distir.ir.type import Type
from distir.ops.rules import tensor


def _results(attrs: Attrs, *types: Type) -> list[Type]:
    return list(attrs["types"])


def _zeros(lanes: Lanes, op: Op, ins: Sequence[RuntimeValue]) -> Sequence[RuntimeValue]:
    """Zeros, for the reference executor, which takes no time into account."""
    types = [tensor(v) for v in op.outputs]
    made = [(t, lanes.xp.full(t.shape, 0, t.dtype)) for t in types]
    return [[x for _ in lanes.of(t.device)] if isinstance(t.device, Mesh) else x for t, x in made]


op(
    "Sleep",
    attributes="seconds:duration types:types spin:flag?",
    comm=Communication(_results, _zeros, seconds=lambda attrs: attrs["seconds"]),
    outputs=lambda attrs: len(attrs["types"]),
)
"""Waits for its operands, then `seconds`: idle, or with `spin` busy. The results have the `types`, and any contents."""
