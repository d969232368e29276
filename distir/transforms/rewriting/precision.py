"""Changes the floating-point type of a program, and checks the result."""

from __future__ import annotations

from typing import Any

from distir.ir.errors import MismatchError
from distir.ir.function import Attributes, Function, FunctionMaker, Op
from distir.ir.type import DType, Tensor, Tuple, Type
from distir.transforms.rewriting.laws import Law, rewrites


def _change(x: Any, dtype: DType) -> Any:
    if isinstance(x, tuple) and any([isinstance(t, Tensor | Tuple) for t in x]):
        return tuple([retyped(t, dtype) for t in x])
    return dtype if isinstance(x, DType) and x.floating else x


def retyped(t: Type, dtype: DType) -> Type:
    """The type with all floating-point tensors in `dtype`."""
    if not isinstance(t, Tensor):
        return Tuple(tuple([retyped(x, dtype) for x in t.types]))
    return Tensor(_change(t.dtype, dtype), t.shape, t.device, t.placements, t.piece)


def in_dtype(attributes: Attributes, dtype: DType) -> Attributes:
    """The attributes with the floating-point types among them replaced by `dtype`."""
    if not any([isinstance(x, DType | tuple) for x in attributes.values()]):
        return attributes
    return Attributes({k: _change(x, dtype) for k, x in attributes.items()})


@rewrites(Law.RETYPED)
def with_dtype(function: Function, dtype: DType) -> Function:
    """The function with all floating-point values as `dtype`; integers and booleans do not change."""
    return _with_dtype(function, dtype, {})


def _with_dtype(function: Function, dtype: DType, callees: dict[Function, Function]) -> Function:
    maker = FunctionMaker(function.name)
    env = {v: maker.add_input_value(v.name, retyped(v.type, dtype), v.role) for v in function.inputs}
    ops: dict[Op, Op] = {}
    for op in function.ops:
        attributes = in_dtype(op.attributes, dtype)
        if (callee := op.callee) is not None:
            if callee not in callees:
                callees[callee] = _with_dtype(callee, dtype, callees)
            attributes = Attributes({**attributes, "callee": callees[callee]})
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
        expect(f"input %{w.name}", retyped(v.type, dtype), w.type)
    for a, b in zip(before.ops, after.ops, strict=True):
        expect(f"{b}: op and operands", (a.spec, [env[v] for v in a.inputs]), (b.spec, list(b.inputs)))
        expect(f"{b}: attributes", in_dtype(a.attributes, dtype), b.attributes)
        env.update(zip(a.outputs, b.outputs, strict=True))  # their types follow
    expect("outputs", [env[v] for v in before.outputs], list(after.outputs))
    expect("updates", {env[a]: env[b] for a, b in before.updates.items()}, after.updates)
    expect("sources", {env[v]: shape for v, shape in before.sources.items()}, after.sources)
