"""The IR: devices, types, functions, their text form and their checks.

All is imported at once, so that `verify` and `validate` are the functions, not the modules of these names.
Nothing here loads numpy, networkx or prettyprinter.
"""

from distir.ir.device import Device, Mesh
from distir.ir.function import Function, FunctionMaker, Op, Role, Value
from distir.ir.parse import parse
from distir.ir.same import same
from distir.ir.text import cpprint, pformat
from distir.ir.topology import Topology
from distir.ir.validate import validate
from distir.ir.verify import verify

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
    "validate",
    "verify",
]
