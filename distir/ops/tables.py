"""Ops that pick rows of a stack of tables, each by indices of its own: embeddings of several features in one weight;
and the step of SGD on the rows that were picked.

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
from distir.ir.type import Bool, DType, Int64, Tensor
from distir.ops.index import index_dtype, local_rows
from distir.ops.optim import shared_numbers
from distir.ops.rules import expect_shape, same, shape_of, wide

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


# ---------------------------------------------------------------- a step of SGD on the rows used


def _sgd_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    """The samples are whole: what each device holds is the next value of all of its rows."""
    if len(shapes) != 3 + (numbers := len(shared_numbers(attrs, 0))):
        raise IRTypeError(f"expected {3 + numbers} operands (tables, indices, gradient ...), got {len(shapes)}")
    if len(shapes[0]) == len(shapes[2]) == 3:
        expect_shape(2, shapes[2], (*shapes[1][:2], shapes[0][2]))
        expect_shape(0, shapes[0][:1], shapes[1][1:2])
    for k, shape in enumerate(shapes[3:], 3):
        expect_shape(k, shape, ())
    kinds = " ".join([f"{name}:whole" for name in _indices(attrs).split() if name != "t"])
    return f"t v d, {_indices(attrs)}, b t d{', ' * numbers} -> t v d | {kinds}"


def _sgd_dtype(attrs: Attrs, tables: DType, index: DType, d: DType, *numbers: DType) -> list[DType]:
    same(attrs, tables, tables, d)
    for k, (name, dtype) in enumerate(zip(shared_numbers(attrs, 0), numbers, strict=True), 3):
        if (dtype is Bool) != (name == "skip") or (name == "lr" and not dtype.floating):
            raise IRTypeError(f"operand {k}: expected {'bool' if name == 'skip' else 'a floating type'}, got {dtype}")
    return index_dtype(attrs, tables, index)


def row_steps(xp: Any, index: Any, d: Any, given: Sequence[Any], attrs: Attrs) -> Any:
    """What is added to the row of each index, of the shape of the indices and (width,). `given`: the numbers that
    follow the gradient; the attributes are those of the op."""
    numbers = dict(zip(shared_numbers(attrs, 0), given, strict=True))
    rate = xp.asarray(numbers["lr"], dtype=d.dtype) if "lr" in numbers else attrs["lr"]
    steps = -rate * d
    if "skip" in numbers:
        steps = xp.where(numbers["skip"], 0, steps)
    return xp.broadcast_to(xp.expand_dims(steps, 2), (*index.shape, d.shape[2])) if attrs.get("pooling") else steps


def _lookup_sgd(
    xp: Any, tables: Any, index: Any, d: Any, *given: Any, start: int, whole: bool, count: int, **attrs: Any
) -> Any:
    number, rows, width = tables.shape
    row, here = _flat(xp, index, count, start, rows)
    steps = xp.where(xp.expand_dims(here, -1), row_steps(xp, index, wide(xp, d), given, attrs), 0)
    flat = xp.reshape(wide(xp, tables), (number * rows, width))
    flat = xp.add_rows(flat, xp.reshape(row, (-1,)), xp.reshape(steps, (math.prod(index.shape), width)))
    return xp.reshape(xp.asarray(flat, dtype=tables.dtype), tables.shape)


def _sgd_definition(f: FunctionMaker, o: Op) -> list[Value]:
    tables, index, d, *numbers = o.inputs
    slope = f.emit("LookupGrad", d, index, rows=shape_of(tables)[ROWS], **_given(o))
    settings = {k: x for k, x in o.attributes.items() if k in ("lr", "scheduled", "skips")}
    return [f.emit("SGD", tables, slope, *numbers, momentum=0.0, weight_decay=0.0, **settings)]


op(  # tables, indices, gradient of what was picked -> SGD's next tables, without a gradient as large as these
    "LookupSGD",
    attributes="lr:number pooling:flag? count:size? scheduled:flag? skips:flag?",
    axes=_sgd_axes,
    dtype=_sgd_dtype,
    index=(0, ROWS),
    unpadded="count",
    local=lambda attrs, ins, outs: local_rows(attrs, ins[0], ROWS),
    donates=(0,),
    work=lambda attrs, ins, outs: (
        2.0 * math.prod(ins[1]) * ins[0][-1],
        float(math.prod(ins[1]) * (1 + 2 * ins[0][-1]) + math.prod(ins[2])),
    ),
    eval=_lookup_sgd,
    definition=_sgd_definition,
)
