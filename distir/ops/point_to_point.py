"""The two sides of a transfer, as in the program of one rank (see `transforms.rank.project`).

In a distributed program a transfer is one op. A rank that has only the sending or only the receiving side has one of
these instead. `message` is the number of the transfer in the distributed program, the same on both sides.
"""

from __future__ import annotations

from distir.ir.communication import Communication
from distir.ir.device import Mesh
from distir.ir.errors import IRTypeError
from distir.ir.spec import Attrs, op
from distir.ir.type import Tensor, Type


def _send(attrs: Attrs, t: Type) -> list[Type]:
    """To a mesh of the same form: to the device at the same coordinate. From a device to a mesh: a piece to each."""
    if not isinstance(t, Tensor) or t.device is None or t.device is attrs["to"]:
        raise IRTypeError(f"operand 0: expected a tensor on another device than {attrs['to']}, got {t}")
    return []


def _receive(attrs: Attrs) -> list[Type]:
    """`shape` is global; `placements`: those on the mesh, if there is one at an end; `piece` as in the type."""
    to, placements = attrs["to"], attrs.get("placements")
    return [
        Tensor.whole(
            attrs["dtype"],
            attrs["shape"],
            to,
            placements if isinstance(to, Mesh) else None,
            attrs.get("piece"),
        )
    ]


op(
    "MPISend",
    attributes="to:home placements:placements? message:size",
    comm=Communication(_send, route="outgoing"),
    outputs=0,
)
op(
    "MPIRecv",
    attributes="source:home to:home dtype:dtype shape:sizes placements:placements? piece:piece? message:size",
    comm=Communication(_receive, route="incoming"),
)
