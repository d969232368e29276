"""Callees that are equal up to their mesh, as the stages of a pipeline often are: only one of them is compiled."""

from __future__ import annotations

from distir.ir.cached import cached
from distir.ir.device import Device, Mesh
from distir.ir.function import Function
from distir.ir.type import Tuple, Type


@cached
def shapes_of(program: Function) -> dict[Function, tuple[int, Mesh]]:
    """Of each callee that is all on one mesh the number of its shape, and the mesh."""
    shapes = _Shapes()
    found = {f: shapes.of(f) for f in program.callees()}
    return {f: shape for f, shape in found.items() if shape is not None}


class _Shapes:
    """Numbers the shapes of callees: the ops, how they hang together, and the inputs' types but for their mesh."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._forms: dict[Type, tuple[int, Mesh | None]] = {}

    def of(self, f: Function) -> tuple[int, Mesh] | None:
        """The number of a function's shape, and the mesh that it is on; None if it is not all on one mesh.

        Types of results follow from those of inputs, so they need not be compared.
        """
        forms = [self._form(v.type) for v in f.inputs]
        mesh = forms[0][1] if forms else None
        if mesh is None or any(m is not mesh for _, m in forms):
            return None
        number = {v: i for i, v in enumerate(f.inputs)}
        number_of = number.__getitem__
        rows: list[tuple[object, ...]] = []
        n = len(number)
        for op in f.ops:
            attrs = op.attributes
            if not op.inputs:  # the attribute names the device or mesh itself
                if attrs.get("device") is not mesh:
                    return None
                attrs = attrs.without("device")
            elif op.spec.comm is not None and any(isinstance(x, Mesh | Device | Function) for x in attrs.values()):
                return None
            rows.append((op.spec, attrs.form, *map(number_of, op.inputs)))
            for v in op.outputs:
                number[v] = n
                n += 1
        outputs = tuple([number[v] for v in f.outputs])
        return self._number((tuple([k for k, _ in forms]), tuple(rows), outputs)), mesh

    def _number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _form(self, t: Type) -> tuple[int, Mesh | None]:
        """The number of a type but for its mesh, and the mesh; None for one that is not all on one."""
        found = self._forms.get(t)
        if found is None:
            if isinstance(t, Tuple):
                forms = [self._form(x) for x in t.types]
                meshes = {m for _, m in forms}
                mesh = meshes.pop() if len(meshes) == 1 else None
                found = self._number(tuple([k for k, _ in forms])), mesh
            else:
                mesh = t.device if isinstance(t.device, Mesh) else None
                found = self._number((t.dtype, t.shape, t.placements, t.piece)), mesh
            self._forms[t] = found
        return found
