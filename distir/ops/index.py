"""Ops that pick rows of a table by index. A table split along its rows gives partial sums.

Negative indices count from the end, as in ONNX: of the table's rows, or of the first `count`, if the rest is padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, op
from distir.ir.type import DType, Int64, Tensor
from distir.ops.rules import expect, shape_of


def _axis(attrs: Attrs) -> int:
    return attrs.get("axis", 0)


def local_rows(attrs: Attrs, table: Tensor, axis: int) -> Attrs:
    """Whether this device holds all rows of the table, which are along `axis`, and how many there are."""
    here, rows = table.shape[axis], table.global_shape[axis]
    return {"whole": here == rows, "count": attrs.get("count", rows)}


def _row(names: Sequence[str]) -> str:
    return " ".join(names)


def _factors(axis: int, data: int, index: int) -> tuple[list[str], list[str], list[str], list[str]]:
    """Factors of the dims of the table, the indices and the picked rows, and those of the indices alone."""
    if axis >= data:
        raise IRTypeError(f"attribute axis: expected a dim of a table of rank {data}, got {axis}")
    rest = [f"r{i}" for i in range(data - 1)]
    each = [f"i{i}" for i in range(index)]
    return [*rest[:axis], "v", *rest[axis:]], each, [*rest[:axis], *each, *rest[axis:]], each


def _gather_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    table, each, picked, _ = _factors(_axis(attrs), len(shapes[0]), len(shapes[1]))
    return f"{_row(table)}, {_row(each)} -> {_row(picked)} | v:sum"


def _gather_grad_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    if not attrs["rows"] and math.prod(shapes[1]):
        raise IRTypeError("attribute rows: expected a table in which there are rows, got 0")
    table, each, picked, _ = _factors(_axis(attrs), len(shapes[0]) - len(shapes[1]) + 1, len(shapes[1]))
    return f"{_row(picked)}, {_row(each)} -> {_row(table)} | {_row([f'{e}:sum' for e in each])}"


def index_dtype(attrs: Attrs, table: DType, index: DType) -> list[DType]:
    """The dtype rule of picked rows: those of the table."""
    expect(1, index, "int")
    if table.kind == "bool":
        raise IRTypeError("operand 0: expected numbers, got bool: rows held elsewhere are added as 0")
    return [table]


def local_index(xp: Any, index: Any, count: int, start: int, rows: int) -> tuple[Any, Any]:
    """For each index its row among the local ones (`start` is the first), 0 for others; and whether it is local."""
    index = xp.cast(index, Int64)  # smaller integers may not hold the sum
    row = xp.where(index < 0, index + count, index) - start
    here = (row >= 0) & (row < rows)
    return xp.where(here, row, 0), here


def _gather(xp: Any, table: Any, index: Any, start: int, whole: bool, count: int, axis: int = 0) -> Any:
    """Rows that are not local are 0 (`whole`: all are local)."""
    table = xp.moveaxis(table, axis, 0)
    row, here = local_index(xp, index, count, start, table.shape[0])
    rows = xp.take(table, row, axis=0)
    rows = xp.where(xp.reshape(here, (*here.shape, *(1,) * (table.ndim - 1))), rows, 0)
    if axis == 0:
        return rows
    return xp.moveaxis(rows, tuple(range(index.ndim)), tuple(range(axis, axis + index.ndim)))


def _gather_grad(xp: Any, d: Any, index: Any, start: int, whole: bool, count: int, rows: int, axis: int = 0) -> Any:
    n = index.ndim
    if axis:
        d = xp.moveaxis(d, tuple(range(axis, axis + n)), tuple(range(n)))
    row, here = local_index(xp, xp.reshape(index, (-1,)), count, start, rows)
    flat = xp.reshape(d, (math.prod(index.shape), math.prod(d.shape[n:])))
    flat = xp.where(xp.reshape(here, (-1, 1)), flat, 0)
    table = xp.reshape(xp.scatter_add(rows, row, flat), (rows, *d.shape[n:]))
    return xp.moveaxis(table, 0, axis)


def _emit_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value | None]:
    table, index = o.inputs
    axis = _axis(o.attributes)
    return [f.emit("GatherGrad", d, index, rows=shape_of(table)[axis], axis=axis, **_count(o)), None]


def _count(o: Op) -> Attrs:
    return {"count": o.attributes["count"]} if "count" in o.attributes else {}


op(  # table (.., v, ..), indices in [-v, v) -> (.., *indices, ..), along `axis`
    "Gather",
    attributes="axis:dim? count:size?",
    axes=_gather_axes,
    dtype=index_dtype,
    linear=[{0}],
    weight=0,
    precision="low",
    index=lambda attrs: (0, _axis(attrs)),
    unpadded="count",
    local=lambda attrs, ins, outs: local_rows(attrs, ins[0], _axis(attrs)),
    work=lambda attrs, ins, outs: (0.0, 2.0 * math.prod(outs[0]) + math.prod(ins[1])),
    exact=True,
    eval=_gather,
    grad=_emit_grad,
)
op(  # its gradient, of a table of `rows` rows; these may be split by the attribute `place`
    "GatherGrad",
    attributes="rows:size axis:index? count:size?",
    axes=_gather_grad_axes,
    sizes=lambda attrs, shapes: {"v": attrs["rows"]},
    dtype=index_dtype,
    linear=[{0}],
    index=lambda attrs: (~0, _axis(attrs)),
    unpadded="count",
    local=lambda attrs, ins, outs: {"rows": outs[0].shape[_axis(attrs)], **local_rows(attrs, outs[0], _axis(attrs))},
    work=lambda attrs, ins, outs: (float(math.prod(ins[0])), 0.0),
    eval=_gather_grad,
    grad=lambda f, o, d: [f.emit("Gather", d, o.inputs[1], axis=_axis(o.attributes), **_count(o)), None],
)
