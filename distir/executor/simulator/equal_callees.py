"""Callees that are equal up to their mesh, as the stages of a pipeline often are: only one of them is compiled."""

from __future__ import annotations

from distir.ir.cached import cached
from distir.ir.device import Mesh
from distir.ir.function import Function
from distir.ir.mesh_form import MeshForm, mesh_form


@cached
def shapes_of(program: Function) -> dict[Function, tuple[int, Mesh]]:
    """Of each callee that is all on one mesh the number of its shape, and the mesh."""
    numbers: dict[MeshForm, int] = {}
    found: dict[Function, tuple[int, Mesh]] = {}
    for f in program.callees():
        formed = mesh_form(f)
        if formed is not None:
            form, mesh = formed
            found[f] = numbers.setdefault(form, len(numbers)), mesh
    return found
