"""The IR: devices, types, functions, their text form and their checks."""

from typing import TYPE_CHECKING, Any

from distir.ir.device import Device, Mesh
from distir.ir.function import Function, FunctionMaker, Op, Role, Value
from distir.ir.parse import parse
from distir.ir.same import same
from distir.ir.text import cpprint, pformat
from distir.ir.verify import verify

if TYPE_CHECKING:
    from distir.ir.topology import Topology

__all__ = [
    "Device",
    "Function",
    "FunctionMaker",
    "Mesh",
    "Op",
    "Role",
    "Topology",
    "Value",
    "cpprint",
    "parse",
    "pformat",
    "same",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "Topology":  # loads networkx
        from distir.ir.topology import Topology

        return Topology
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
