"""Ops of integers on the points of their operands, which broadcast: quotients, remainders, bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, op
from distir.ir.type import DType
from distir.ops.rules import expect, no_grad, points, same, sum_to


def _ints(attrs: Attrs, *dtypes: DType) -> list[DType]:
    expect(0, dtypes[0], "int")
    return same(attrs, *dtypes)


def _bits(name: str, operands: int, eval: Callable[..., Any], attributes: str = "") -> None:
    op(name, attributes=attributes, axes=points(operands), dtype=_ints, eval=eval, grad=no_grad)


_bits("BitwiseAnd", 2, lambda xp, a, b: a & b)
_bits("BitwiseOr", 2, lambda xp, a, b: a | b)
_bits("BitwiseXor", 2, lambda xp, a, b: a ^ b)
_bits("BitwiseNot", 1, lambda xp, a: ~a)
_bits("BitShift", 2, lambda xp, a, b, left: a << b if left else a >> b, "left:flag")
_bits("Quotient", 2, lambda xp, a, b: (a - xp.fmod(a, b)) // b)  # rounded towards 0


def _remainder_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    """The remainder is a - b q; q, an integer, is found from it, so that it is the one that was subtracted."""
    a, b = o.inputs
    q = f.emit("Round", f.emit("Div", f.emit("Sub", a, o.outputs[0]), b))
    return [sum_to(f, d, a), f.emit("Neg", sum_to(f, f.emit("Mul", d, q), b))]


op(  # of the quotient rounded down, with the sign of b, or towards 0 (`truncated`), with the sign of a; also of floats
    "Mod",
    attributes="truncated:flag?",
    axes=points(2),
    dtype=same,
    eval=lambda xp, a, b, truncated=False: xp.fmod(a, b) if truncated else xp.remainder(a, b),
    grad=_remainder_grad,
)
