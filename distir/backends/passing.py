"""Which communication ops do nothing on a rank."""

from __future__ import annotations

from distir.ir.device import Mesh
from distir.ir.function import Op
from distir.ir.type import Partial, Tensor
from distir.ops.comm import ALONG_AXIS


def passes(op: Op) -> bool:
    """Whether the result of a communication op is its operand: along an axis, if there is one device, or if it is a
    sum over time, which is complete.
    """
    name = op.spec.name
    if name not in ALONG_AXIS and name != "LocalSlice":
        return name in ("Restrict", "After")
    t, axis = op.inputs[0].type, op.attributes["axis"]
    mesh = t.device
    if not isinstance(mesh, Mesh):
        return False
    over_time = mesh.time == mesh.position(axis) and isinstance(t, Tensor) and isinstance(t.on(axis), Partial)
    return mesh.size(axis) == 1 or over_time
