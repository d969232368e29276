"""Constant folding, common subexpression elimination and dead code elimination.

The results share with the given function its inputs, and every value and op that did not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distir.ir.function import Attributes, Function, FunctionMaker, Op, Value
from distir.ir.spec import lookup
from distir.ir.type import Tensor
from distir.transforms.rewriting.laws import Law, rewrites


def extend(function: Function, maker: FunctionMaker | None = None) -> FunctionMaker:
    """A maker, if none is given a new one, with the inputs, ops, outputs, updates and names of `function`, to append
    to."""
    maker = maker or FunctionMaker(function.name)
    maker.inputs.extend(function.inputs)
    maker.ops.extend(function.ops)
    maker.updates = dict(function.updates)
    maker.sources = dict(function.sources)
    maker.reserve(function.inputs)
    maker.reserve([v for op in function.ops for v in op.outputs])
    maker.set_outputs(function.outputs)
    return maker


def live(ops: Sequence[Op], outputs: Iterable[Value]) -> list[Op]:
    """The ops that `outputs` depend on, in order."""
    needed = set(outputs)
    found: list[Op] = []
    for op in reversed(ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
            found.append(op)
    return found[::-1]


def prune(function: Function) -> Function:
    """The function without dead ops. All inputs stay. A backward op whose forward op is removed loses its `of`."""
    left = live(function.ops, function.outputs)
    there = {None, *left}
    if len(left) == len(function.ops) and all([op.of in there for op in left]):
        return function
    made: dict[Op, Op] = {}
    for op in left:
        made[op] = _rebuilt(op, {}, made)
    return Function(
        function.name,
        function.inputs,
        tuple(made.values()),
        function.outputs,
        function.updates,
        function.sources,
    )


Evaluate = Callable[[Op, Sequence[Any], None], Any]
"""(op, operands, no coordinate) -> result, as `distir.executor.reference.sequential.evaluate`."""


@rewrites(Law.SAME)
def fold(function: Function, evaluate: Evaluate | None = None) -> Function:
    """The function without repeated ops and views that cancel and, with `evaluate`, with constants folded.

    Of equal ops (type, attributes, operands, forward op) the first stays. A Transpose or Reshape that inverts another
    one is removed, unless a backward op is `of` it. An op whose operands are all `Constant` and whose result has one
    element becomes a `Constant`. Ops that make outputs stay, so that each output keeps its name and its place in
    `updates`, and so do communication and calls.
    """
    env: dict[Value, Value] = {}
    made: dict[Op, Op] = {}
    seen: dict[tuple[Any, ...], Op] = {}
    makers: dict[Value, Op] = {}
    numbers: dict[Value, Any] = {}
    outputs = set(function.outputs)
    forward = {op.of for op in function.ops}
    views = (lookup("Transpose"), lookup("Reshape"))
    ops: list[Op] = []
    for source in function.ops:
        op = _rebuilt(source, env, made)
        op = _folded(op, numbers, evaluate) if evaluate else op
        key = _key(op)
        first = seen.get(key)
        if first is None and op.spec not in views:  # as most
            ops.append(op)
            made[source] = seen[key] = op
            continue
        stays = op.spec.comm is not None or not outputs.isdisjoint(op.outputs)
        undone = _undone(op, makers) if op.spec in views and not (stays or first or source in forward) else None
        if undone is not None:
            env[op.outputs[0]] = undone
        elif first is None or stays:
            ops.append(op)
            made[source] = seen[key] = op
            if op.spec in views:
                makers[op.outputs[0]] = op
        else:
            made[source] = first
            env.update(zip(op.outputs, first.outputs, strict=True))
    return prune(
        Function(function.name, function.inputs, tuple(ops), function.outputs, function.updates, function.sources)
    )


def _key(op: Op) -> tuple[Any, ...]:
    """Equal for two ops that compute the same."""
    return op.spec, op.attributes.form, op.inputs, op.of


def _undone(op: Op, makers: Mapping[Value, Op]) -> Value | None:
    """The operand of the view before, if this view inverts it. `makers` maps results of views to their ops."""
    before = makers.get(op.inputs[0])
    if before is None or before.spec is not op.spec or before.inputs[0].type is not op.outputs[0].type:
        return None
    if op.spec is lookup("Transpose"):
        inner, outer = before.attributes["perm"], op.attributes["perm"]
        if [inner[i] for i in outer] != list(range(len(inner))):
            return None
    return before.inputs[0]


def _rebuilt(op: Op, env: Mapping[Value, Value], made: Mapping[Op, Op]) -> Op:
    """The op with operands replaced as in `env`, and `of` as in `made` (None if that op was removed)."""
    of = made.get(op.of) if op.of is not None else None
    if not env or env.keys().isdisjoint(op.inputs):
        return op if of is op.of else Op(op.spec, op.inputs, op.attributes, op.outputs, of)
    return Op(op.spec, tuple([env.get(v, v) for v in op.inputs]), op.attributes, op.outputs, of)


def _folded(op: Op, numbers: dict[Value, Any], evaluate: Evaluate) -> Op:
    """The op, or a Constant if all its operands are in `numbers`, to which its result is added."""
    t = op.outputs[0].type if len(op.outputs) == 1 else None
    if not isinstance(t, Tensor) or t.device is not None or math.prod(t.shape) != 1:
        return op
    if op.spec is lookup("Constant"):
        numbers[op.outputs[0]] = evaluate(op, [], None)
    if not op.inputs or not all(v in numbers for v in op.inputs):
        return op
    array = numbers[op.outputs[0]] = evaluate(op, [numbers[v] for v in op.inputs], None)
    attributes = {"value": (array.reshape(-1)[0].item(),), "shape": t.shape, "dtype": t.dtype}
    return Op(lookup("Constant"), (), Attributes(attributes), op.outputs, op.of)
