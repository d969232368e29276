"""Identifies communication ops that do nothing on a rank."""

from __future__ import annotations

from distir.ir.function import Op


def is_idle(op: Op) -> bool:
    """Whether the result of a communication op is its operand: see `Communication.idle`."""
    comm = op.spec.comm
    return comm is not None and bool(op.inputs) and comm.idle(op.attributes, op.inputs[0].type)
