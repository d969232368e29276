"""Labels of ops in traces: the same for a prediction and a measurement, so that the two can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir.ir.device import STREAMS, AxisNames, Device, Mesh
from distir.ir.function import Function, Op, Value

COMPUTE, SEND, RECV, HOST = STREAMS
"""Streams of a device, and that of its host; those of collectives have the names of their axes."""
COMMUNICATION, ISSUE, WAIT, FUNCTION, STEP = "communication", "issue", "wait", "function", "step"
"""Categories of slices, besides COMPUTE. Only measured traces have the last four: launches of communication and waits
for it, on the compute stream, calls of functions, and whole steps.
"""


def labels(op: Op, function: Function, microbatch: int | None = None, side: str | None = None) -> dict[str, Any]:
    """The function and stage, microbatch, results and bytes of an op; for communication also its axis or side.

    `side` is that of a transfer, SEND or RECV, and decides the stage. `bytes` are those of operands and results on one
    device, of communication those of the operands.
    """
    values = op.inputs if op.spec.comm is not None and op.inputs else (*op.inputs, *op.outputs)
    made = op.outputs[0] if op.outputs else None
    found = {
        "function": function.name,
        "stage": stage_of(op.inputs if side == SEND else op.outputs or op.inputs),
        "microbatch": microbatch,
        "result": made and f"%{made.name}",
        "type": made and repr(made.type),
        "axis": axis_text(op.attributes["axis"]) if op.spec.route == "axis" else None,
        "side": side,
        "bytes": sum(v.type.bytes for v in values),
    }
    return {k: x for k, x in found.items() if x is not None}


def by_label(function: Function) -> dict[tuple[str, str], Op]:
    """The ops of a function and its callees by the function and the first result in their labels."""
    functions = (*function.callees(), function)
    return {(f.name, f"%{op.outputs[0].name}"): op for f in functions for op in f.ops if op.outputs}


def axis_text(axis: AxisNames) -> str:
    """An axis, or several as "a+b": also the name of their stream."""
    return axis if isinstance(axis, str) else "+".join(axis)


def stream_name(stream: str, partner: Device | Mesh | None) -> str:
    """A stream as traces show it: of transfers there is one for each partner."""
    return f"{stream} {partner.name if isinstance(partner, Mesh) else partner}" if partner is not None else stream


def stage_of(values: Sequence[Value]) -> str | None:
    """The mesh or device where the first of the values is, in words; None if it is nowhere."""
    home = values[0].type.device if values else None
    return home.name if isinstance(home, Mesh) else home and repr(home)
