"""The two sides of a transfer, as they stand in the program of one rank (see `transforms.project`).

In a distributed program a transfer is one op. A rank that holds only what is sent, or only what comes, has
one of these instead. `message` numbers the transfer in the distributed program, the same on both sides.
"""

from __future__ import annotations

from distir.ir.device import Mesh
from distir.ir.errors import IRTypeError
from distir.ir.spec import Attrs, op
from distir.ir.type import Tensor, Type


def _send(attrs: Attrs, t: Type) -> list[Type]:
    """`to` a mesh of the same form: to the device in the same place. Between a device and a mesh: a piece
    each.
    """
    if not isinstance(t, Tensor) or t.device is None or t.device is attrs["to"]:
        raise IRTypeError(f"operand 0: expected a tensor on another device than {attrs['to']}, got {t}")
    return []


def _receive(attrs: Attrs) -> list[Type]:
    """`shape` is the whole's; `placements` those on the mesh, of the two ends, if any; `piece` as in the
    type.
    """
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


op("MPISend", attributes="to:home placements:placements? message:size", comm=_send, outputs=0)
op(
    "MPIRecv",
    attributes="source:home to:home dtype:dtype shape:sizes placements:placements? piece:piece? message:size",
    comm=_receive,
)
