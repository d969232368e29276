"""Type inference: the types of a whole function's values, from its inputs' types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distir.ir.errors import IRTypeError, ModelError
from distir.ir.function import Function, Op, Value
from distir.ir.pause import no_collection
from distir.ir.result_types import forget as forget
from distir.ir.result_types import infer as infer
from distir.ir.type import Type


@no_collection()
def infer_types(function: Function, types: Iterable[Type | Value]) -> Function:
    """The function with all types inferred, given one type (or typed value) an input.

    The function itself, if all its values have types and these are its inputs'. Raises IRTypeError that names the op.
    """
    given = [t.type if isinstance(t, Value) else t for t in types]
    if len(given) != len(function.inputs):
        raise IRTypeError(f"{function.name} has {len(function.inputs)} inputs, got {len(given)} types")
    if given == [v.type for v in function.inputs] and _typed(function):
        return function
    env = {v: Value(v.name, t, v.role) for v, t in zip(function.inputs, given, strict=True)}
    ops: dict[Op, Op] = {}
    for op in function.ops:
        ins = tuple([env[v] for v in op.inputs])
        found = _results(function, op, tuple([v.type for v in ins]))
        outs = tuple([Value(v.name, t) for v, t in zip(op.outputs, found, strict=True)])
        ops[op] = Op(op.spec, ins, op.attributes, outs, ops.get(op.of) if op.of else None)
        env.update(zip(op.outputs, outs, strict=True))
    return Function(
        function.name,
        tuple([env[v] for v in function.inputs]),
        tuple(ops.values()),
        tuple([env[v] for v in function.outputs]),
        {env[a]: env[b] for a, b in function.updates.items()},
        {env[v]: shape for v, shape in function.sources.items()},
    )


def _typed(function: Function) -> bool:
    """Whether all values have types."""
    types: list[Type | None] = [v.type for v in function.inputs]
    types += [v.type for op in function.ops for v in op.outputs]
    return None not in types


def _results(function: Function, op: Op, types: tuple[Type, ...]) -> Sequence[Type | None]:
    """The types of an op's results; all None if an operand has no type yet."""
    if None in types:  # pyright: ignore[reportUnnecessaryContains]
        return [None] * len(op.outputs)
    try:
        found = infer(op.spec, op.attributes, types)
    except IRTypeError as e:
        name = op.outputs[0].name if op.outputs else "?"
        raise IRTypeError(f"{function.name}: %{name} = {e.message}", e.hint) from None
    if len(found) != len(op.outputs):
        raise ModelError(f"{function.name}: {op} has {len(found)} results")
    return found
