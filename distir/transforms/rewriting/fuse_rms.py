"""Matches root-mean-square norms that are written out: x times a gain, over the root of the mean of its squares."""

from __future__ import annotations

from typing import NamedTuple

from distir.ir.function import Op, Value
from distir.ops.rules import shape_of, statistic, tensor
from distir.transforms.rewriting.matching import Found, Program, Trail

_LONGEST = 6
"""The maximum number of ops between the root and the norm."""


class _Norm(NamedTuple):
    """A product of powers: of x, of the root of the mean of its squares, and, once there is one, of a gain."""

    x: int
    root: int
    gain: Value | None = None


def find_rms_norm(program: Program, op: Op) -> Found | None:
    """Matches at the op that takes the root; the norm is over the last dims, those of the gain."""
    power = _root(program, op)
    trail = Trail(program)
    trail.ops.add(op)
    statistics = _mean_square(trail, op.inputs[0]) if power is not None else None
    if statistics is None or power is None:
        return None
    wide, axis, epsilon = statistics
    x = (wide, _before(program, wide))
    v, norm = op.outputs[0], _Norm(0, power)
    found: Found | None = None
    for _ in range(_LONGEST):
        use = program.only_use(v)
        product = _times(program, use, v, norm, x) if use is not None else None
        if use is None or product is None:
            break
        trail.ops.add(use)
        v, norm = use.outputs[0], product
        operands = _operands(program, v, norm, axis, x)
        if operands is not None:
            attributes = {"axis": axis, "epsilon": epsilon}
            found = Found(v, frozenset(trail.ops), "RMSNormalization", operands, attributes)
    return found  # the last: what follows a norm may be its rounding


def _root(program: Program, op: Op) -> int | None:
    """The power of the root that an op makes; None if it makes none."""
    if op.op_type == "Sqrt":
        return 1
    by = program.number(op.inputs[1])
    return {0.5: 1, -0.5: -1}.get(by) if by is not None else None


def _mean_square(trail: Trail, v: Value) -> tuple[Value, int, float] | None:
    """x, dim and epsilon, if `v` is epsilon and the mean of the squares of x over its dims from that one on."""
    add = trail.step(v, "Add")
    for mean, number in trail.sides(add) if add is not None else ():
        epsilon = trail.program.number(number)
        reduce = trail.program.made_by(mean, "ReduceMean")
        square = trail.program.made_by(reduce.inputs[0], "Mul", "Pow") if reduce is not None else None
        if reduce is None or square is None or epsilon is None or epsilon <= 0:
            continue
        x, other = square.inputs
        rank = len(shape_of(x))
        axes = sorted(a % rank for a in reduce.attributes["axes"])
        twice = other is x if square.op_type == "Mul" else trail.program.number(other) == 2.0
        last = bool(axes) and axes == list(range(axes[0], rank)) and bool(reduce.attributes["keepdims"])
        if twice and last:
            trail.ops |= {reduce, square}
            return x, axes[0], epsilon
    return None


def _before(program: Program, x: Value) -> Value:
    """What `x` is cast from, if only to the dtype of statistics, in which the op computes anyway; else `x`."""
    cast = program.made_by(x, "Cast")
    return cast.inputs[0] if cast is not None and _widens(cast) else x


def _widens(cast: Op) -> bool:
    """Whether a Cast is to the dtype of its operand's statistics."""
    small, wide = tensor(cast.inputs[0]).dtype, tensor(cast.outputs[0]).dtype
    return small.floating and small is not wide and statistic(small) is wide


def _times(program: Program, op: Op, v: Value, norm: _Norm, x: tuple[Value, Value]) -> _Norm | None:
    """What `op` makes of `v`, which is `norm`; None if it is no part of a norm. `x` wide, and before it was cast."""
    inverse = _Norm(-norm.x, -norm.root)
    if op.op_type == "Reciprocal":
        return inverse if norm.gain is None else None
    if op.op_type == "Cast":
        return norm if {tensor(v).dtype, tensor(op.outputs[0]).dtype} <= {tensor(w).dtype for w in x} else None
    if op.op_type not in ("Mul", "Div") or op.inputs.count(v) != 1:
        return None
    other = op.inputs[1] if op.inputs[0] is v else op.inputs[0]
    if op.op_type == "Div":
        if op.inputs[0] is v or norm.gain is not None:
            return None
        norm = inverse
    if other in x:
        return norm._replace(x=norm.x + 1)
    if program.number(other) == 1.0:
        return norm
    return norm._replace(gain=other) if norm.gain is None else None


def _operands(program: Program, v: Value, norm: _Norm, axis: int, x: tuple[Value, Value]) -> list[Value] | None:
    """x and the gain in the dtype of `v`, if `v` is their norm, and of the shape of x: no number had more dims."""
    gain, dtype, sizes = norm.gain, tensor(v).dtype, shape_of(x[0])
    if gain is None or (norm.x, norm.root) != (1, -1) or shape_of(v) != sizes or shape_of(gain) != sizes[axis:]:
        return None
    if tensor(gain).dtype is not dtype:
        gain = _before(program, gain)
    given = next((w for w in x if tensor(w).dtype is dtype), None)
    return [given, gain] if given is not None and tensor(gain).dtype is dtype else None
