"""Callees that are equal up to their mesh, as the stages of a pipeline often are: only one of them is compiled."""

from __future__ import annotations

from distir.ir.cached import cached
from distir.ir.device import Mesh
from distir.ir.function import Function
from distir.ir.mesh_form import MeshForm, mesh_form


@cached
def shapes_of(program: Function) -> dict[Function, tuple[MeshForm, Mesh]]:
    """Of each callee that is all on one mesh its form, and the mesh."""
    return {f: shape for f in program.callees() if (shape := mesh_form(f)) is not None}
