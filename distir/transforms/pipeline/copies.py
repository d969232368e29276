"""Finds the copies of forward ops that `recompute` puts into the backward pass, and keeps their use to their stage."""

from __future__ import annotations

from collections.abc import Mapping

from distir.ir.cached import cached
from distir.ir.function import Function, FunctionMaker, Op, Value


@cached
def copies(function: Function) -> dict[Value, Value]:
    """Maps each result of a recomputing op (same spec, attributes and operands as its `of`) to the original result."""
    found: dict[Value, Value] = {}
    for op in function.ops:
        first = op.of
        if (
            first is not None
            and first.spec is op.spec
            and first.attributes.form is op.attributes.form
            and len(first.inputs) == len(op.inputs)
            and all([found.get(v, v) is w for v, w in zip(op.inputs, first.inputs, strict=True)])
        ):
            found.update(zip(op.outputs, first.outputs, strict=True))
    return found


def on_own_stages(function: Function, stage: Mapping[Op, int]) -> tuple[Function, dict[Op, int]]:
    """The function, and the stages of its ops, with copies used only on the stage that makes them.

    An op of another stage uses the original, which is sent between stages anyway.
    """
    origin = copies(function)
    if not origin:
        return function, dict(stage)
    home = {v: stage.get(op) for op in function.ops for v in op.outputs if v in origin}
    uses = [(v, op) for op in function.ops for v in op.inputs if v in origin]
    used = {v for v, _ in uses}.union(function.outputs)
    if used.issuperset(origin) and all([home[v] == stage.get(op) for v, op in uses]):  # as mostly
        return function, dict(stage)
    maker = FunctionMaker(function.name)
    maker.inputs.extend(function.inputs)
    became: dict[Op, Op] = {}
    for op in function.ops:
        inputs = op.inputs
        if not origin.keys().isdisjoint(inputs):
            here = stage.get(op)
            inputs = tuple([origin[v] if v in origin and home[v] != here else v for v in inputs])
        of = became.get(op.of, op.of) if op.of else None
        same = inputs == op.inputs and of is op.of
        became[op] = op if same else Op(op.spec, inputs, op.attributes, op.outputs, of)
    used = set(function.outputs)
    for op in reversed(function.ops):
        if op.outputs[0] in origin and used.isdisjoint(op.outputs):
            continue  # a copy without users on its stage
        maker.ops.append(became[op])
        used.update(became[op].inputs)
    maker.ops.reverse()
    maker.set_outputs(function.outputs)
    maker.updates, maker.sources = dict(function.updates), dict(function.sources)
    return maker.finalize(), {became[op]: s for op, s in stage.items()}
