"""The form of a function on a mesh: all of it but its names and the mesh. Functions of one form are alike, as those of
the stages of a pipeline often are."""

from __future__ import annotations

from weakref import WeakValueDictionary

from distir.ir.cached import cached
from distir.ir.device import Device, Mesh
from distir.ir.exact_attributes import Form
from distir.ir.function import Function
from distir.ir.type import Tuple, Type


class MeshForm:
    """Stands for all functions that are equal up to names and mesh: it is hashed and compared by identity."""

    __slots__ = ("__weakref__",)


_forms: WeakValueDictionary[object, MeshForm] = WeakValueDictionary()


@cached
def mesh_form(f: Function) -> tuple[MeshForm, Mesh] | None:
    """The form of a function that is all on one mesh, and that mesh; None for another function.

    It says the ops, how they hang together, and the inputs' types but for their mesh. Types of results follow from
    those of inputs, so they need not be compared.
    """
    mesh = f.inputs[0].type.device if f.inputs else None
    types = _Types(mesh)
    given = [types.form(v.type) for v in f.inputs]
    if not isinstance(mesh, Mesh) or types.elsewhere:
        return None
    specs, attributes = [op.spec for op in f.ops], [op.attributes.form for op in f.ops]
    placeless: set[Form] = set()
    for k, op in enumerate(f.ops):
        if not op.inputs:  # the attribute names the device or mesh itself
            if op.attributes.get("device") is not mesh:
                return None
            attributes[k] = op.attributes.without("device").form
        elif op.spec.comm is not None and attributes[k] not in placeless:
            if any([isinstance(x, Mesh | Device | Function) for x in op.attributes.values()]):
                return None
            placeless.add(attributes[k])
    values = [*f.inputs, *[v for op in f.ops for v in op.outputs]]
    number = dict(zip(values, range(len(values)), strict=True))
    operands, counts = [number[v] for op in f.ops for v in op.inputs], [len(op.inputs) for op in f.ops]
    parts = types.numbers, given, specs, attributes, counts, operands, [number[v] for v in f.outputs]
    return _forms.setdefault(tuple(map(tuple, parts)), MeshForm()), mesh


class _Types:
    """The types of a function's values but for their mesh, numbered in the order in which they are met."""

    def __init__(self, mesh: object) -> None:
        self.elsewhere = False
        """Whether one is not on the mesh."""
        self.numbers: dict[object, int] = {}
        self._mesh = mesh
        self._forms: dict[Type, object] = {}

    def form(self, t: Type) -> object:
        """The number of a tensor's type, those of a bundle's members."""
        found = self._forms.get(t)
        if found is None:
            self.elsewhere |= t.device is not self._mesh
            if isinstance(t, Tuple):
                each = {x: self.form(x) for x in t.distinct}
                found = tuple([each[x] for x in t.types])
            else:
                found = self.numbers.setdefault((t.dtype, t.shape, t.placements, t.piece), len(self.numbers))
            self._forms[t] = found
        return found
