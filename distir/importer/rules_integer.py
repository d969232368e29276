"""Import rules of ONNX ops: integers and their bits, remainders, quantized numbers, tests of single numbers."""

from __future__ import annotations

import math

import numpy as np

from distir.importer.marks import call_of
from distir.importer.node import Node, Result
from distir.importer.registry import rule
from distir.importer.tensor_proto import dtype_of
from distir.ir.function import Value
from distir.ir.type import DType, Int32, UInt8
from distir.ops.rules import shape_of, tensor


def cast(n: Node, x: Value, to: DType) -> Value:
    """`x` in that type."""
    return x if tensor(x).dtype is to else n.emit("Cast", x, to=to)


@rule("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot")
def _bitwise(n: Node) -> Result:
    return n.emit(n.proto.op_type, *n.operands())


@rule("BitShift")
def _bit_shift(n: Node) -> Result:
    n.require("direction", None, "LEFT", "RIGHT")
    return n.emit("BitShift", *n.operands(), left=n.attr("direction") == "LEFT")


@rule("Div")
def _div(n: Node) -> Result:
    """Quotients of integers are rounded towards 0."""
    return n.emit("Div" if tensor(n.operand(0)).dtype.floating else "Quotient", *n.operands())


@rule("Mod")
def _mod(n: Node) -> Result:
    """`fmod`: with the sign of the dividend, else of the divisor."""
    given = {"truncated": True} if n.attr("fmod", 0) else {}
    return n.emit("Mod", *n.operands(), **given)


@rule("Pow")
def _pow(n: Node) -> Result:
    """The result has the type of the base; with a fractional exponent integers are computed as such floats."""
    x, exponent = n.operands()
    dtype, other = tensor(x).dtype, tensor(exponent).dtype
    if dtype is other or other.kind == "int":
        return n.emit("Pow", x, exponent)
    if dtype.floating:
        return n.emit("Pow", x, cast(n, exponent, dtype))
    return n.emit("Cast", n.emit("Pow", cast(n, x, other), exponent), to=dtype)


@rule("IsInf")
def _is_inf(n: Node) -> Result:
    x = n.operand(0)
    signs = [s for s, name in ((1, "detect_positive"), (-1, "detect_negative")) if n.attr(name, 1)]
    if not signs:
        return n.emit("Greater", x, n.constant(math.inf, x))
    return n.emit("Equal", x if len(signs) == 1 else n.emit("Abs", x), n.constant(signs[0] * math.inf, x))


# ---------------------------------------------------------------- quantized numbers


def _per_part(n: Node, i: int, x: Value) -> Value:
    """Operand i, a number, one for each index along the axis, or one for each block along it, to broadcast with `x`."""
    v, shape, rank, axis, size = n.operand(i), shape_of(x), len(shape_of(x)), n.attr("axis", 1), n.attr("block_size", 0)
    if len(shape_of(v)) == 0 or shape_of(v) == (1,):
        return n.reshape(v, ())
    axis = n.wrap(axis, rank)
    if len(shape_of(v)) == 1:
        return n.reshape(v, (-1, *[1] * (rank - axis - 1)))
    of = shape_of(v)
    apart, full = (*of[: axis + 1], 1, *of[axis + 1 :]), (*of[: axis + 1], size, *of[axis + 1 :])
    blocks = n.reshape(
        n.emit("Expand", n.reshape(v, apart), shape=full), (*of[:axis], of[axis] * size, *of[axis + 1 :])
    )
    if of[axis] * size == shape[axis]:
        return blocks
    return n.emit("Slice", blocks, starts=(0,), ends=(shape[axis],), axes=(axis,), steps=(1,))


def quantized(n: Node, x: Value, scale: Value, zero: Value | None, to: DType) -> Value:
    """round(x / scale) + zero, within the range of the integers `to`."""
    limits = np.iinfo(to.numpy)  # type: ignore[arg-type]
    steps = n.emit("Round", n.emit("Div", x, cast(n, scale, tensor(x).dtype)))
    whole = n.emit("Cast", n.emit("Clip", steps, min=-float(1 << 30), max=float(1 << 30)), to=Int32)
    whole = whole if zero is None else n.emit("Add", whole, cast(n, zero, Int32))
    return n.emit("Cast", n.emit("Clip", whole, min=int(limits.min), max=int(limits.max)), to=to)


@rule("QuantizeLinear")
def _quantize(n: Node) -> Result:
    n.attr("saturate")  # of 8-bit floats
    n.require("precision", 0, 0)
    x, code = n.operand(0), n.attr("output_dtype", 0)
    if call_of(n.proto).name.startswith("fake_quantize") and n.scope.depends_on_parameters(x):
        hint = "h + (fake_quantize(h) - h).detach() has its value and the gradient of h"
        raise n.error("the gradient that torch.fake_quantize defines is not exported", hint)
    zero = _per_part(n, 2, x) if n.has(2) else None
    to = tensor(zero).dtype if zero else dtype_of(code, f"{n.scope.path}: {n}: output_dtype") if code else UInt8
    return quantized(n, x, _per_part(n, 1, x), zero, to)


@rule("DequantizeLinear")
def _dequantize(n: Node) -> Result:
    """(x - zero) * scale, in the type of the scale."""
    n.require("output_dtype", 0, 0)
    x, scale = n.operand(0), _per_part(n, 1, n.operand(0))
    to = tensor(scale).dtype
    whole = n.emit("Cast", x, to=Int32)
    if n.has(2):
        whole = n.emit("Sub", whole, cast(n, _per_part(n, 2, x), Int32))
    return n.emit("Mul", cast(n, whole, to), scale)


@rule("QLinearMatMul")
def _quantized_product(n: Node) -> Result:
    """Integers are multiplied exactly, then scaled and quantized again."""

    def side(i: int, column: bool) -> tuple[Value, Value]:
        v, scale, zero = n.operand(i), n.operand(i + 1), n.operand(i + 2)
        if any(len(shape_of(s)) > 1 or math.prod(shape_of(s)) != 1 for s in (scale, zero)):
            raise n.error("scales of rows or columns are not supported")
        whole = n.emit("Sub", n.emit("Cast", v, to=Int32), n.reshape(cast(n, zero, Int32), ()))
        return whole, n.reshape(scale, ())

    (a, a_scale), (b, b_scale) = side(0, False), side(3, True)
    product, scale = n.emit("MatMul", a, b), n.reshape(n.operand(6), ())
    factor = n.emit("Div", n.emit("Mul", a_scale, b_scale), scale)
    y = n.emit("Mul", cast(n, product, tensor(factor).dtype), factor)
    one = n.constant(1, y)
    return quantized(n, y, one, n.reshape(n.operand(7), ()), tensor(n.operand(7)).dtype)
