"""Appends ops whose result types are known, without type inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from distir.ir.device import Mesh
from distir.ir.function import Attributes, Function, FunctionMaker, Op, Value
from distir.ir.spec import Spec
from distir.ir.type import Type


class Moved(dict[Type, Type]):
    """Maps types to the same types on another mesh of the same form; a cache."""

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
    """Append an op with results of these types and return the results. Names in use get a suffix."""
    outputs = tuple(map(Value, map(maker.fresh, names), types))
    maker.ops.append(Op(spec, inputs, attributes, outputs))
    return outputs


def _carry(maker: FunctionMaker, op: Op, env: Mapping[Value, Value], of: Op | None) -> Op:
    """Append `op` with operands replaced as `env` says, by values of the same types; returns the appended op.

    It is `op` itself if nothing changes; its results are the same Values unless their names are in use.
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


Replaced = Callable[[FunctionMaker, Op, dict[Value, Value], dict[Op, int]], bool]
"""(maker, op, replaced values, stages of new ops) -> whether it has dealt with the op, which else is carried over."""


def rebuilt(function: Function, stage: Mapping[Op, int], replaced: Replaced) -> tuple[Function, dict[Op, int]]:
    """The function with some of its ops replaced by others, and the stages of its ops."""
    maker = FunctionMaker(function.name)
    maker.reserve(function.inputs)
    maker.inputs.extend(function.inputs)
    env: dict[Value, Value] = {}
    ops: dict[Op, Op] = {}
    stages: dict[Op, int] = {}
    changed = False
    for op in function.ops:
        if replaced(maker, op, env, stages):
            changed = True
            continue
        new = op
        if changed:
            new = _carry(maker, op, env, ops.get(op.of) if op.of else None)
        else:  # as most: all before is as it was
            maker.reserve(op.outputs)
            maker.ops.append(op)
        ops[op] = new
        if new.outputs is not op.outputs:
            env.update(zip(op.outputs, new.outputs, strict=True))
        if op in stage:
            stages[new] = stage[op]
    maker.set_outputs(env.get(v, v) for v in function.outputs)
    maker.updates = {env.get(a, a): b for a, b in function.updates.items()}
    maker.sources = {env.get(v, v): shape for v, shape in function.sources.items()}
    return maker.finalize(), stages
