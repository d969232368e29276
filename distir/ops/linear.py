"""Matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir.ir.axes import Factors, Shape, factors
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, FactorMapping, axes_mapping, op
from distir.ir.type import SUM, Shard
from distir.ops.rules import all_same, letters, same, scalar, shape_of, sum_to, swap_last


def _matmul_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    a, b = o.inputs
    da = f.emit("MatMul", d, swap_last(f, b))
    if len(shape_of(b)) == 2:
        # one large product rather than a batch of them that is summed afterwards
        db = f.emit("MatMulGradWeight", a, d)
    else:
        db = f.emit("MatMul", swap_last(f, a), d)
    return [sum_to(f, da, a), sum_to(f, db, b)]


op(
    "MatMul",
    axes="... m k, ... k n -> ... m n | k:sum",
    dtype=same,
    linear=[{0}, {1}],
    weight=1,
    precision="low",
    kernel="product",
    eval=lambda xp, a, b: xp.matmul(a, b),
    grad=_matmul_grad,
)


def _weight_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    rows = letters(len(shapes[0]) - 1)
    lead = " ".join(rows)
    return f"{lead} y, {lead} z -> y z | {' '.join(f'{r}:sum' for r in rows)}"


def _weight_eval(xp: Any, a: Any, d: Any) -> Any:
    count = math.prod(a.shape[:-1])  # not -1, which an empty array leaves open
    rows = xp.reshape(a, (count, a.shape[-1]))
    return xp.matmul(xp.permute_dims(rows, (1, 0)), xp.reshape(d, (count, d.shape[-1])))


op(  # of MatMul (..., k) x (k, n) the gradient of the matrix, summed over all rows
    "MatMulGradWeight",
    axes=_weight_axes,
    dtype=same,
    linear=[{0}, {1}],
    kernel="product",
    eval=_weight_eval,
)
op(  # both gradients at once, for backward passes written by hand
    "MatMulGrad",
    axes="m k, k n, m n -> m k, k n | m:sum n:sum",
    dtype=all_same(2),
    outputs=2,
    linear=[{2}],
    weight=1,
    kernel="product",
    work=lambda attrs, ins, outs: (4.0 * ins[0][0] * ins[1][0] * ins[1][1], 0.0),
    eval=lambda xp, x, w, d: (xp.matmul(d, w.T), xp.matmul(x.T, d)),
)


def _gemm_factors(attrs: Attrs, shapes: Sequence[Shape]) -> Factors:
    """`a` may be many matrices, if it is not transposed."""
    a = "k m" if attrs.get("transA") else "... m k"
    b = "n k" if attrs.get("transB") else "k n"
    c = ["", ", ", ", n", ", m n"][1 + len(shapes[2]) if len(shapes) > 2 else 0]
    return factors(f"{a}, {b}{c} -> {'' if attrs.get('transA') else '... '}m n | k:sum", shapes)


def _gemm_shard(
    attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape], slot: int, split: Shard, n: int
) -> FactorMapping | None:
    """If k is split, the added operand is a partial sum, too: a replicated one would be added on every device."""
    mapping = axes_mapping(_gemm_factors(attrs, ins), slot, split)
    if mapping is None or len(ins) < 3 or mapping.outs != (SUM,):
        return mapping
    return FactorMapping((*mapping.ins[:2], SUM), mapping.outs)


def _gemm(xp: Any, a: Any, b: Any, c: Any = None, **attrs: Any) -> Any:
    y = xp.matmul(a.T if attrs.get("transA") else a, b.T if attrs.get("transB") else b)
    y = y * attrs.get("alpha", 1.0)
    return y if c is None else y + c * attrs.get("beta", 1.0)


def _gemm_decompose(f: FunctionMaker, o: Op) -> list[Value]:
    attrs = o.attributes
    a, b, *c = o.inputs
    a = swap_last(f, a) if attrs.get("transA") else a
    b = swap_last(f, b) if attrs.get("transB") else b
    y = _scaled(f, f.emit("MatMul", a, b), attrs.get("alpha", 1.0))
    return [f.emit("Add", y, _scaled(f, c[0], attrs.get("beta", 1.0))) if c else y]


def _scaled(f: FunctionMaker, v: Value, by: float) -> Value:
    return v if by == 1.0 else f.emit("Mul", v, scalar(f, by, v))


op(
    "Gemm",
    attributes="alpha:number? beta:number? transA:flag? transB:flag?",
    infer=lambda attrs, *shapes: _gemm_factors(attrs, shapes).out_shapes(),
    shard=_gemm_shard,
    linear=[{0, 2}, {1, 2}],
    dtype=same,
    weight=1,
    precision="low",
    kernel="product",
    work=lambda attrs, ins, outs: (2.0 * math.prod(ins[0]) * outs[0][-1], 0.0),
    eval=_gemm,
    decompose=_gemm_decompose,
)
