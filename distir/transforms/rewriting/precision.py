"""Changes the floating-point type of a program, and checks the result."""

from __future__ import annotations

from typing import Any

from distir.ir.errors import MismatchError
from distir.ir.function import Attributes, Function, FunctionMaker, Op
from distir.ir.type import DType, Tensor, Tuple, Type
from distir.transforms.rewriting.laws import Law, rewrites


def _change(x: Any, dtype: DType) -> Any:
    if isinstance(x, tuple) and any([isinstance(t, Tensor | Tuple) for t in x]):
        return tuple([_retyped(t, dtype) for t in x])
    return dtype if isinstance(x, DType) and x.floating else x


def _retyped(t: Type, dtype: DType) -> Type:
    if not isinstance(t, Tensor):
        return Tuple(tuple([_retyped(x, dtype) for x in t.types]))
    return Tensor(_change(t.dtype, dtype), t.shape, t.device, t.placements, t.piece)


@rewrites(Law.RETYPED)
def with_dtype(function: Function, dtype: DType) -> Function:
    """The function with all floating-point values as `dtype`; integers and booleans do not change."""
    return _with_dtype(function, dtype, {})


def _with_dtype(function: Function, dtype: DType, callees: dict[Function, Function]) -> Function:
    maker = FunctionMaker(function.name)
    env = {v: maker.add_input_value(v.name, _retyped(v.type, dtype), v.role) for v in function.inputs}
    ops: dict[Op, Op] = {}
    for op in function.ops:
        attributes = op.attributes
        if any([isinstance(x, DType | tuple) for x in attributes.values()]):
            attributes = {k: _change(x, dtype) for k, x in attributes.items()}
        if (callee := op.callee) is not None:
            if callee not in callees:
                callees[callee] = _with_dtype(callee, dtype, callees)
            attributes = {**attributes, "callee": callees[callee]}
        of = ops.get(op.of) if op.of else None
        maker.add_op(op.spec, None, [env[v] for v in op.inputs], attributes, (), [v.name for v in op.outputs], of)
        ops[op] = maker.ops[-1]
        env.update(zip(op.outputs, maker.ops[-1].outputs, strict=True))
    maker.set_outputs(env[v] for v in function.outputs)
    maker.updates = {env[a]: env[b] for a, b in function.updates.items()}
    maker.sources = {env[v]: shape for v, shape in function.sources.items()}
    return maker.finalize()


def check_dtype(before: Function, after: Function, dtype: DType) -> None:
    """Raises MismatchError, naming op or value, unless `after` has the same ops in `dtype`."""

    def expect(what: str, want: object, got: object) -> None:
        if want != got:
            raise MismatchError(f"{after.name}: {what}: expected {want}, got {got}")

    expect("number of ops", len(before.ops), len(after.ops))
    names = [[(v.name, v.role) for v in f.inputs] for f in (before, after)]
    expect("inputs", *names)
    env = dict(zip(before.inputs, after.inputs, strict=True))
    for v, w in env.items():
        expect(f"input %{w.name}", _retyped(v.type, dtype), w.type)
    for a, b in zip(before.ops, after.ops, strict=True):
        expect(f"{b}: op and operands", (a.spec, [env[v] for v in a.inputs]), (b.spec, list(b.inputs)))
        expect(f"{b}: attributes", Attributes({k: _change(x, dtype) for k, x in a.attributes.items()}), b.attributes)
        env.update(zip(a.outputs, b.outputs, strict=True))  # their types follow
    expect("outputs", [env[v] for v in before.outputs], list(after.outputs))
    expect("updates", {env[a]: env[b] for a, b in before.updates.items()}, after.updates)
    expect("sources", {env[v]: shape for v, shape in before.sources.items()}, after.sources)
