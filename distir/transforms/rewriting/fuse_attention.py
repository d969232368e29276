"""Matches attention that is written out: softmax of scaled and masked products of queries and keys, times values."""

from __future__ import annotations

import math
from typing import NamedTuple

from distir.ir.function import FunctionMaker, Op, Value
from distir.ops.rules import shape_of, statistic, swap_last, tensor
from distir.transforms.rewriting.matching import Found, Operand, Program, Trail

NOTHING = -1e30
"""A score this low absorbs any other (in floats with 8 bits of exponent): adding it equals replacing by it."""


class _Mask(NamedTuple):
    """A mask: `value` is added to the scores; or, with a number `low`, scores are `low` where `value` is not `keep`."""

    value: Value
    low: float | None = None
    keep: bool = True


def find_attention(program: Program, op: Op) -> Found | None:
    """Matches softmax(c Q K^T [+ mask]) V at the product with V. Operands have the same leading dims."""
    trail = Trail(program)
    trail.ops.add(op)
    weights, v = op.inputs
    small = tensor(v).dtype
    softmax = trail.step(_unguarded(trail, _cast_from(trail, weights, wide=False)), "Softmax")
    if softmax is None:
        return None
    scores = _cast_from(trail, softmax.inputs[0], wide=True)
    rank = len(shape_of(scores))
    if rank < 3 or softmax.attributes.get("axis", -1) not in (-1, rank - 1):
        return None
    if tensor(scores).dtype is not small or tensor(softmax.inputs[0]).dtype not in (small, statistic(small)):
        return None
    inner, mask = _unmasked(trail, scores)
    inner, scale = trail.factor(inner)
    product = trail.step(inner, "MatMul")
    if product is None or shape_of(inner) != shape_of(scores):
        return None
    q, by = trail.factor(product.inputs[0])
    scale *= by
    turned, by = trail.factor(product.inputs[1])
    scale *= by
    lead = shape_of(scores)[:-2]
    if any(shape_of(x)[:-2] != lead or len(shape_of(x)) != rank for x in (q, turned, v)):
        return None
    operands: list[Operand] = [q, _keys(program, turned), v]
    if mask is not None:
        operands.append(lambda maker: _added(maker, mask, q))
    return Found(op.outputs[0], frozenset(trail.ops), "Attention", operands, {"scale": scale})


def _cast_from(trail: Trail, v: Value, wide: bool) -> Value:
    """The operand of a cast that makes `v`, if a softmax is computed in a wider dtype, which the op does anyway."""
    cast = trail.program.made_by(v, "Cast")
    if cast is None:
        return v
    before, after = tensor(cast.inputs[0]).dtype, tensor(v).dtype
    small, large = (before, after) if wide else (after, before)
    if not (before.floating and after.floating and small.size < large.size):
        return v
    trail.ops.add(cast)
    return cast.inputs[0]


def _unguarded(trail: Trail, v: Value) -> Value:
    """The weights under a Where that replaces NaN by 0, for rows that are masked out: there the op gives 0 too."""
    where = trail.program.made_by(v, "Where")
    if where is None or trail.program.number(where.inputs[1]) != 0.0:
        return v
    inside = where.inputs[2]
    negation = trail.program.made_by(where.inputs[0], "Not")
    equal = trail.program.made_by(negation.inputs[0], "Equal") if negation else None
    if negation is None or equal is None or any(x is not inside for x in equal.inputs):
        return v
    trail.ops |= {where, negation, equal}
    return inside


def _unmasked(trail: Trail, v: Value) -> tuple[Value, _Mask | None]:
    """The scores before masking, and the mask."""
    add = trail.program.made_by(v, "Add")
    if add is not None:
        for scores, mask in trail.sides(add):
            if _from_product(trail.program, scores) and shape_of(scores) == shape_of(v):
                trail.ops.add(add)
                return scores, _Mask(mask)
    where = trail.program.made_by(v, "Where")
    if where is not None:
        condition, a, b = where.inputs
        for scores, low, keep in ((a, b, True), (b, a, False)):
            number = trail.program.number(low)
            if number is not None and number <= NOTHING and shape_of(scores) == shape_of(v):
                trail.ops.add(where)
                return scores, _Mask(condition, number, keep)
    return v, None


def _from_product(program: Program, v: Value) -> bool:
    v, _ = Trail(program).factor(v)
    return program.made_by(v, "MatMul") is not None


def _added(maker: FunctionMaker, mask: _Mask, like: Value) -> Value:
    """The mask as a value to add to scores."""
    if mask.low is None:
        return mask.value
    dtype = tensor(like).dtype
    zero, low = [maker.emit("Constant", value=(x,), shape=(), dtype=dtype) for x in (0.0, mask.low)]
    return maker.emit("Where", mask.value, *((zero, low) if mask.keep else (low, zero)))


def _keys(program: Program, turned: Value) -> Operand:
    """K, from its transpose: the operand of the Transpose, or else the transpose transposed again."""
    shape = shape_of(turned)
    view = program.made_by(turned, "Transpose")
    if view is not None:
        (before,) = view.inputs
        perm = view.attributes["perm"]
        perm = (*perm[:-2], perm[-1], perm[-2])
        return before if perm == tuple(range(len(shape))) else lambda maker: maker.emit("Transpose", before, perm=perm)
    # exporters merge the leading dims before, and split them again after
    parted = program.made_by(turned, "Reshape")
    swap = program.made_by(parted.inputs[0], "Transpose") if parted else None
    merged = program.made_by(swap.inputs[0], "Reshape") if swap else None
    if swap is not None and merged is not None and swap.attributes["perm"] == (0, 2, 1):
        (before,) = merged.inputs
        keys = (*shape[:-2], shape[-1], shape[-2])
        if shape_of(swap.inputs[0]) == (math.prod(keys[:-2]), *keys[-2:]):
            same = shape_of(before) == keys
            return before if same else lambda maker: maker.emit("Reshape", before, shape=keys)
    return lambda maker: swap_last(maker, turned)
