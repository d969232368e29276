"""Moves a program to other devices: its n-th device is replaced by the n-th of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

from distir.ir.cached import cached
from distir.ir.device import Device, Mesh
from distir.ir.errors import InfeasibleError
from distir.ir.function import Attributes, Function, FunctionMaker, Op, Value
from distir.ir.type import Tensor, Tuple, Type


@cached
def homes_of(function: Function) -> set[Device | Mesh]:
    """The devices and meshes on which a program and its callees have values."""
    found: set[Device | Mesh] = set()
    for f in (function, *function.callees()):
        todo = list({v.type for v in (*f.inputs, *[v for op in f.ops for v in op.outputs])})
        while todo:
            t = todo.pop()
            if isinstance(t, Tuple):
                todo += t.types
            elif isinstance(t, Tensor) and t.device is not None:
                found.add(t.device)
    return found


def devices_of(function: Function) -> list[Device]:
    """The devices of a program and its callees, by kind and index."""
    rows = [home.devices if isinstance(home, Mesh) else (home,) for home in homes_of(function)]
    return sorted({d for row in rows for d in row}, key=lambda d: (d.kind, d.index))


def relocate(function: Function, devices: Sequence[Device]) -> Function:
    """The program on these devices. Raises InfeasibleError if it needs more."""
    before = devices_of(function)
    if len(devices) < len(before):
        raise InfeasibleError(f"{function.name} is spread over {len(before)} devices, there are {len(devices)}")
    return _Relocated(dict(zip(before, devices, strict=False))).function(function)


class _Relocated:
    """Maps devices, meshes, types and functions to their replacements; a cache."""

    def __init__(self, to: dict[Device, Device]) -> None:
        self.to = to
        self.meshes: dict[Mesh, Mesh] = {}
        self.types: dict[Type, Type] = {}
        self.functions: dict[Function, Function] = {}

    def home(self, home: Device | Mesh | None) -> Device | Mesh | None:
        if not isinstance(home, Mesh):
            return home and self.to[home]
        if home not in self.meshes:
            axes = dict(zip(home.axes, home.sizes, strict=True))
            self.meshes[home] = Mesh([self.to[d] for d in home.devices], axes, home.name)
        return self.meshes[home]

    def type(self, t: Type) -> Type:
        if t not in self.types:
            if isinstance(t, Tuple):
                self.types[t] = Tuple([self.type(member) for member in t.types])
            else:
                self.types[t] = t.moved(self.home(t.device)) if isinstance(t, Tensor) else t
        return self.types[t]

    def function(self, function: Function) -> Function:
        if function in self.functions:
            return self.functions[function]
        env = {v: Value(v.name, self.type(v.type), v.role) for v in function.inputs}
        ops: dict[Op, Op] = {}
        maker = FunctionMaker(function.name)
        maker.inputs = list(env.values())
        for op in function.ops:
            outputs = tuple([Value(v.name, self.type(v.type)) for v in op.outputs])
            env.update(zip(op.outputs, outputs, strict=True))
            attributes = Attributes({k: self._attribute(x) for k, x in op.attributes.items()})
            inputs = tuple([env[v] for v in op.inputs])
            ops[op] = Op(op.spec, inputs, attributes, outputs, ops.get(op.of) if op.of else None)
            maker.ops.append(ops[op])
        maker.set_outputs([env[v] for v in function.outputs])
        maker.updates = {env[a]: env[b] for a, b in function.updates.items()}
        maker.sources = {env[v]: shape for v, shape in function.sources.items()}
        self.functions[function] = maker.finalize()
        return self.functions[function]

    def _attribute(self, x: object) -> object:
        if isinstance(x, Function):
            return self.function(x)
        return self.home(x) if isinstance(x, Device | Mesh) else x
