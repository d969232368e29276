"""An op that stands for others in a proxy of a program: it takes their time, and computes nothing."""

from __future__ import annotations

from distir.ir.communication import Communication
from distir.ir.spec import Attrs, op
from distir.ir.type import Type


def _results(attrs: Attrs, *types: Type) -> list[Type]:
    return list(attrs["types"])


op(
    "Sleep",
    attributes="seconds:duration types:types spin:flag?",
    comm=Communication(_results, seconds=lambda attrs: attrs["seconds"]),
    outputs=lambda attrs: len(attrs["types"]),
)
"""Waits for its operands, then `seconds`: idle, or with `spin` busy. The results have the `types`, and any contents."""
