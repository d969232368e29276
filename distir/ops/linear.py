"""Matrix products."""

from __future__ import annotations

from typing import Any

from distir.ir.function import FunctionMaker, Op
from distir.ir.spec import op
from distir.ops.shape import sum_to, swap_last


def _matmul_grad(f: FunctionMaker, o: Op, d: Any) -> list[Any]:
    a, b = o.inputs
    if len(b.type.global_shape) == 2 and len(a.type.global_shape) > 2:
        # one large product rather than a batch of them that is summed afterwards
        rows = f.emit("Reshape", a, shape=(-1, a.type.global_shape[-1]))
        drows = f.emit("Reshape", d, shape=(-1, d.type.global_shape[-1]))
        db = f.emit("MatMul", swap_last(f, rows), drows)
    else:
        db = sum_to(f, f.emit("MatMul", swap_last(f, a), d), b)
    return [sum_to(f, f.emit("MatMul", d, swap_last(f, b)), a), db]


op(
    "MatMul",
    axes="... m k, ... k n -> ... m n | k:sum",
    linear=[{0}, {1}],
    weight=1,
    eval=lambda xp, a, b: xp.matmul(a, b),
    grad=_matmul_grad,
)
op(
    "MatMulGrad",
    axes="m k, k n, m n -> m k, k n | m:sum n:sum",
    outputs=2,
    weight=1,
    eval=lambda xp, x, w, d: (xp.matmul(d, w.T), xp.matmul(x.T, d)),
)
