"""The same program in another floating-point type."""

from __future__ import annotations

from typing import Any

from distir.ir.function import Function, FunctionMaker, Op
from distir.ir.type import DType, Tensor, Type


def with_dtype(function: Function, dtype: DType) -> Function:
    """The function with all its floating-point values of `dtype`; integers and booleans stay."""

    def change(x: Any) -> Any:
        return dtype if isinstance(x, DType) and x.floating else x

    def retyped(t: Type) -> Type:
        if not isinstance(t, Tensor):
            return t
        return Tensor(change(t.dtype), t.shape, t.device, t.placements, t.piece)

    maker = FunctionMaker(function.name)
    env = {v: maker.add_input_value(v.name, retyped(v.type), v.role) for v in function.inputs}
    ops: dict[Op, Op] = {}
    for op in function.ops:
        attributes = op.attributes
        if any(isinstance(x, DType) for x in attributes.values()):
            attributes = {k: change(x) for k, x in attributes.items()}
        of = ops.get(op.of) if op.of else None
        maker.add_op(op.spec, None, [env[v] for v in op.inputs], attributes, (), [v.name for v in op.outputs], of)
        ops[op] = maker.ops[-1]
        env.update(zip(op.outputs, maker.ops[-1].outputs, strict=True))
    maker.set_outputs(env[v] for v in function.outputs)
    maker.updates = {env[a]: env[b] for a, b in function.updates.items()}
    maker.sources = {env[v]: shape for v, shape in function.sources.items()}
    return maker.finalize()
