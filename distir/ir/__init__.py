"""The IR: devices, types, functions, their text form and their checks."""

from distir.ir.device import Device, Mesh
from distir.ir.function import Function, FunctionMaker, Op, Role, Value

__all__ = ["Device", "Function", "FunctionMaker", "Mesh", "Op", "Role", "Value"]
