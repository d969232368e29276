"""Ops that pick rows of a stack of tables, each by indices of its own: embeddings of several features in one weight.

With `pooling` a feature has several indices, whose rows are added. Indices and tables split along their rows are as of
`Gather`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, op
from distir.ir.type import Int64, Tensor
from distir.ops.index import index_dtype, local_rows
from distir.ops.rules import expect_shape, shape_of

ROWS = 1
"""The dim of the tables along which rows are picked."""


def _indices(attrs: Attrs) -> str:
    return "b t p" if attrs.get("pooling") else "b t"


def _summed(attrs: Attrs, names: str) -> str:
    return " ".join([f"{name}:sum" for name in (f"{names} p" if attrs.get("pooling") else names).split()])


def _lookup_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    if len(shapes) == 2 and len(shapes[0]) == 3 and len(shapes[1]) > 1 and shapes[1][1] != shapes[0][0]:
        raise IRTypeError(f"operand 1: expected indices (b, {shapes[0][0]}, ...), one for each table, got {shapes[1]}")
    return f"t v d, {_indices(attrs)} -> b t d | {_summed(attrs, 'v')}"


def _lookup_grad_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    if len(shapes) == 2 and len(shapes[0]) == 3:
        expect_shape(0, shapes[0][:2], shapes[1][:2])
    if not attrs["rows"] and math.prod(shapes[-1]):
        raise IRTypeError("attribute rows: expected tables in which there are rows, got 0")
    return f"b t d, {_indices(attrs)} -> t v d | {_summed(attrs, 'b')}"


def _flat(xp: Any, index: Any, count: int, start: int, rows: int) -> tuple[Any, Any]:
    """For each index its row among those of all tables here, one table after the other; and whether it is here.

    `start` is the first row of each table that is here; others give the first row.
    """
    index = xp.cast(index, Int64)  # smaller integers may not hold the sum
    row = xp.where(index < 0, index + count, index) - start
    here = (row >= 0) & (row < rows)
    tables = index.shape[1]
    first = xp.reshape(xp.arange(0, tables, Int64) * rows, (1, tables, *(1,) * (index.ndim - 2)))
    return xp.where(here, row + first, 0), here


def _lookup(xp: Any, tables: Any, index: Any, start: int, whole: bool, count: int, pooling: bool = False) -> Any:
    """Rows that are not local are 0 (`whole`: all are local)."""
    number, rows, width = tables.shape
    row, here = _flat(xp, index, count, start, rows)
    found = xp.take(xp.reshape(tables, (number * rows, width)), row, axis=0)
    found = xp.where(xp.expand_dims(here, -1), found, 0)
    return xp.sum(found, axis=2) if pooling else found


def _lookup_grad(
    xp: Any, d: Any, index: Any, start: int, whole: bool, count: int, rows: int, pooling: bool = False
) -> Any:
    _, tables, width = d.shape
    row, here = _flat(xp, index, count, start, rows)
    d = xp.broadcast_to(xp.expand_dims(d, 2), (*index.shape, width)) if pooling else d
    flat = xp.reshape(xp.where(xp.expand_dims(here, -1), d, 0), (math.prod(index.shape), width))
    return xp.reshape(xp.scatter_add(tables * rows, xp.reshape(row, (-1,)), flat), (tables, rows, width))


def _given(o: Op) -> dict[str, Any]:
    return {k: o.attributes[k] for k in ("pooling", "count") if k in o.attributes}


def _emit_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value | None]:
    tables, index = o.inputs
    return [f.emit("LookupGrad", d, index, rows=shape_of(tables)[ROWS], **_given(o)), None]


def _grad_local(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> Attrs:
    return {"rows": outs[0].shape[ROWS], **local_rows(attrs, outs[0], ROWS)}


op(  # tables (t, v, d), indices (b, t) in [-v, v) -> (b, t, d); `pooling`: indices (b, t, p), and their rows added
    "Lookup",
    attributes="pooling:flag? count:size?",
    axes=_lookup_axes,
    dtype=index_dtype,
    linear=[{0}],
    weight=0,
    precision="low",
    index=(0, ROWS),
    unpadded="count",
    local=lambda attrs, ins, outs: local_rows(attrs, ins[0], ROWS),
    work=lambda attrs, ins, outs: (
        float(math.prod(ins[1]) * ins[0][-1]) if attrs.get("pooling") else 0.0,
        float(math.prod(ins[1]) * (1 + ins[0][-1]) + math.prod(outs[0])),
    ),
    eval=_lookup,
    grad=_emit_grad,
)
op(  # its gradient, of tables of `rows` rows each; these may be split by the attribute `place`
    "LookupGrad",
    attributes="rows:size pooling:flag? count:size?",
    axes=_lookup_grad_axes,
    sizes=lambda attrs, shapes: {"v": attrs["rows"]},
    dtype=index_dtype,
    linear=[{0}],
    index=(~0, ROWS),
    unpadded="count",
    local=_grad_local,
    work=lambda attrs, ins, outs: (float(math.prod(ins[1]) * ins[0][-1]), 0.0),
    eval=_lookup_grad,
    grad=lambda f, o, d: [f.emit("Lookup", d, o.inputs[1], **_given(o)), None],
)
