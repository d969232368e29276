"""Finds the gradient of each parameter, also in a distributed and scheduled program.

An optimizer op of a distributed program works on a piece of its weight, in the body of a stage, on operands from
bundles. Weights are traced from the program's inputs through calls, bundles and communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from distir.ir.cached import cached
from distir.ir.function import Function, Value
from distir.ir.type import Tensor, Type

Key = tuple[str, str]
"""A function's name, and that of the first result of an optimizer op in it."""
Origin = Any
"""The position of the program's input that a value is, or is a piece of; None if of none; of a bundle a tuple."""


class Gradient(NamedTuple):
    """A gradient operand of an optimizer: the position of the program's input that it is of, and its type."""

    weight: int
    type: Type


@cached
def gradients(program: Function) -> dict[Key, Gradient]:
    """The gradient of every weight that an optimizer updates; if several ops update copies of one, that of the first.

    Without weights that are updated in parts, one per microbatch (weights that have a row per sample).
    """
    found: dict[Key, Gradient] = {}
    walked: dict[tuple[Function, tuple[Origin, ...]], list[Origin]] = {}

    def walk(function: Function, args: Sequence[Origin]) -> list[Origin]:
        key = function, tuple(args)
        if key not in walked:
            env: dict[Value, Origin] = dict(zip(function.inputs, args, strict=True))
            for op in function.ops:
                ins = [env[v] for v in op.inputs]
                if op.spec.gradient is not None and isinstance(ins[0], int):
                    gradient = Gradient(ins[0], op.inputs[op.spec.gradient].type)
                    found.setdefault((function.name, op.outputs[0].name), gradient)
                env.update(zip(op.outputs, outs(op, ins), strict=True))
            walked[key] = [env[v] for v in function.outputs]
        return walked[key]

    def outs(op: Any, ins: list[Origin]) -> Sequence[Origin]:
        if op.callee is not None:
            return walk(op.callee, ins)
        if op.spec.bundle == "pack":
            return [tuple(ins)]
        if op.spec.bundle == "unpack":
            return ins[0] if isinstance(ins[0], tuple) else [None] * len(op.outputs)
        moves = op.spec.comm is not None and op.spec.comm.seconds is None
        return [ins[0] if moves else None] * len(op.outputs)

    walk(program, range(len(program.inputs)))
    first: dict[int, Key] = {}
    for key, gradient in found.items():
        first.setdefault(gradient.weight, key)
    parts = {gradient.weight for gradient in found.values() if _of_one_microbatch(gradient.type)}
    return {key: found[key] for weight, key in first.items() if weight not in parts}


def _of_one_microbatch(t: Type) -> bool:
    return isinstance(t, Tensor) and t.microbatch_dim is not None
