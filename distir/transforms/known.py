"""Appending ops whose result types are known: they are not inferred once more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from distir.ir.device import Mesh
from distir.ir.function import Attributes, FunctionMaker, Op, Value
from distir.ir.spec import Spec
from distir.ir.type import Type


class Moved(dict[Type, Type]):
    """What types are on another mesh of the same form, found once a type."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __missing__(self, t: Type) -> Type:
        found = self[t] = t.moved(self.mesh)
        return found


def append(
    maker: FunctionMaker,
    spec: Spec,
    inputs: tuple[Value, ...],
    attributes: Attributes,
    names: Iterable[str],
    types: Iterable[Type],
) -> tuple[Value, ...]:
    """Append an op whose results have these types; gives them. Names that are taken get a suffix."""
    outputs = tuple(map(Value, map(maker.fresh, names), types))
    maker.ops.append(Op(spec, inputs, attributes, outputs))
    return outputs


def carry(maker: FunctionMaker, op: Op, env: Mapping[Value, Value], of: Op | None) -> Op:
    """Append `op` with those operands that `env` has others of the same types for; gives the op appended.

    It is the very op where nothing changes, and its results are the same Values where their names are not taken.
    """
    inputs = tuple([env.get(v, v) for v in op.inputs])
    outputs: Sequence[Value] = op.outputs
    names = [maker.fresh(v.name) for v in outputs]
    if names != [v.name for v in outputs]:
        outputs = tuple([Value(name, v.type) for name, v in zip(names, outputs, strict=True)])
    if inputs != op.inputs or outputs is not op.outputs or of is not op.of:
        op = Op(op.spec, inputs, op.attributes, tuple(outputs), of)
    maker.ops.append(op)
    return op
