"""Matches Gelu, exact or by tanh, Silu and the logarithm of a sigmoid that exporters write out in several ops."""

from __future__ import annotations

import math

from distir.ir.function import Op, Value
from distir.ops.rules import tensor
from distir.transforms.rewriting.matching import Found, Program, Trail, alike, epsilon

Polynomial = dict[tuple[int, int], float]
"""Coefficients by (power of x, power of t), t being the tanh or erf."""

_GELU: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
INSIDE: dict[str, tuple[str, Polynomial]] = {
    "Erf": ("none", {(1, 0): math.sqrt(0.5)}),
    "Tanh": ("tanh", {(1, 0): math.sqrt(2 / math.pi), (3, 0): math.sqrt(2 / math.pi) * 0.044715}),
}
"""By function the attribute `approximate`, and the function's operand."""
_LONGEST = 6
"""The maximum number of ops between the function's result and the root, or between x and its operand."""


def find_gelu(program: Program, op: Op) -> Found | None:
    """Matches x (1 + t) / 2 at the op that makes t: Erf of x / sqrt(2), or Tanh of sqrt(2 / pi) (x + 0.044715 x^3)."""
    t = op.outputs[0]
    approximate, inside = INSIDE[op.op_type]
    for x in _above(program, op.inputs[0]):
        trail = Trail(program)
        if alike(x, t) and _close(_polynomial(trail, op.inputs[0], x, t), inside, t):
            root = _root(trail, x, t)
            if root is not None and alike(root, x):
                return Found(root, frozenset({*trail.ops, op}), "Gelu", [x], {"approximate": approximate})
    return None


def find_silu(program: Program, op: Op) -> Found | None:
    """Matches x times the Sigmoid of x at the Mul."""
    trail = Trail(program)
    for x, y in trail.sides(op):
        sigmoid = program.made_by(y, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is x:
            return Found(op.outputs[0], frozenset({op, sigmoid}), "Silu", [x], {})
    return None


def find_log_sigmoid(program: Program, op: Op) -> Found | None:
    """Matches the Log of a Sigmoid, which is -inf where the sigmoid is 0: as -Softplus(-x) it is exact."""
    sigmoid = program.made_by(op.inputs[0], "Sigmoid")
    if sigmoid is None:
        return None
    x = sigmoid.inputs[0]
    return Found(op.outputs[0], frozenset({op, sigmoid}), "Neg", [lambda f: f.emit("Softplus", f.emit("Neg", x))], {})


def _above(program: Program, v: Value) -> list[Value]:
    """The values that `v` is computed from by products and sums, the nearest first."""
    found, level = [v], [v]
    for _ in range(_LONGEST):
        ops = [op for x in level if (op := program.made_by(x, *_ARITHMETIC)) is not None]
        level = [x for op in ops for x in op.inputs if program.number(x) is None]
        found += level
    return list(dict.fromkeys(found))


def _root(trail: Trail, x: Value, t: Value) -> Value | None:
    """The value computed from t that is the Gelu of x."""
    v = t
    for _ in range(_LONGEST):
        use = trail.program.only_use(v)
        if use is None or use.op_type not in _ARITHMETIC:
            return None
        v = use.outputs[0]
        if _close(_polynomial(trail, v, x, t), _GELU, x):
            return v
    return None


_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "Pow")


def _polynomial(trail: Trail, v: Value, x: Value, t: Value, depth: int = 2 * _LONGEST) -> Polynomial | None:
    """`v` as a polynomial of x and t; None if it is not one."""
    if v is x or v is t:
        return {(1, 0) if v is x else (0, 1): 1.0}
    number = trail.program.number(v)
    if number is not None:
        return {(0, 0): number}
    op = trail.step(v, *_ARITHMETIC) if depth else None
    if op is None:
        return None
    rows: list[Polynomial] = [{(0, 0): -1.0}] if op.op_type == "Neg" else []
    for u in op.inputs:
        row = _polynomial(trail, u, x, t, depth - 1)
        if row is None:
            return None
        rows.append(row)
    a, b = rows
    if op.op_type in ("Add", "Sub"):
        sign = 1.0 if op.op_type == "Add" else -1.0
        return {key: a.get(key, 0.0) + sign * b.get(key, 0.0) for key in a | b}
    if op.op_type in ("Mul", "Neg"):
        return _product(a, b)
    by = b.get((0, 0)) if set(b) == {(0, 0)} else None
    if op.op_type == "Div":
        return {key: c / by for key, c in a.items()} if by else None
    if by not in (1.0, 2.0, 3.0):
        return None
    power = a
    for _ in range(int(by) - 1):
        power = _product(power, a)
    return power


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for (i, j), p in a.items():
        for (k, n), q in b.items():
            result[i + k, j + n] = result.get((i + k, j + n), 0.0) + p * q
    return result


def _close(got: Polynomial | None, want: Polynomial, like: Value) -> bool:
    """Whether the coefficients are equal up to the rounding of constants to the dtype."""
    near = 4 * epsilon(tensor(like).dtype)
    return got is not None and all(
        abs(got.get(key, 0.0) - want.get(key, 0.0)) <= near * abs(want.get(key, 0.0)) for key in got | want
    )
