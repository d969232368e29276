"""Ops that pick elements along one dim by an index for each element, and the indices of the largest.

Where the dim is split, elements that are held elsewhere count as 0: the results are partial sums.
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
from distir.ops.index import index_dtype, local_index, local_rows
from distir.ops.rules import expect_shape, letters, no_grad, shape_of


def _rows(axis: int, rank: int) -> tuple[str, str]:
    """The factors of what has the picked dim, v, and of the indices, which have j in its place."""
    if axis >= rank:
        raise IRTypeError(f"attribute axis: expected a dim of rank {rank}, got {axis}")
    names = letters(rank)
    return tuple([" ".join([*names[:axis], one, *names[axis + 1 :]]) for one in ("v", "j")])  # type: ignore[return-value]


def _same_but(axis: int, k: int, got: Shape, want: Shape) -> None:
    """Raises IRTypeError unless operand k has the shape `want` in all dims but one: no dim broadcasts."""
    if len(got) != len(want):
        raise IRTypeError(f"operand {k}: expected rank {len(want)}, got shape {got}")
    expect_shape(k, got, (*want[:axis], *got[axis : axis + 1], *want[axis + 1 :]))


def _picked_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    whole, picked = _rows(attrs["axis"], len(shapes[0]))
    _same_but(attrs["axis"], 1, shapes[1], shapes[0])
    return f"{whole}, {picked} -> {picked} | v:sum"


def _spread_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    whole, picked = _rows(attrs["axis"], len(shapes[0]))
    expect_shape(1, shapes[1], shapes[0])
    if not attrs["size"] and math.prod(shapes[1]):
        raise IRTypeError("attribute size: expected a dim in which there are elements, got 0")
    return f"{picked}, {picked} -> {whole} | j:sum"


def _pick(xp: Any, x: Any, index: Any, start: int, whole: bool, count: int, axis: int) -> Any:
    row, here = local_index(xp, index, count, start, x.shape[axis])
    return xp.where(here, xp.take_along_axis(x, row, axis=axis), 0)


def _spread(xp: Any, d: Any, index: Any, start: int, whole: bool, count: int, axis: int, size: int) -> Any:
    row, here = local_index(xp, index, count, start, size)
    before, after = (math.prod(part) for part in (d.shape[:axis], d.shape[axis + 1 :]))
    row = xp.reshape(row, (before, d.shape[axis], after))
    outside = xp.reshape(xp.arange(0, before, Int64), (before, 1, 1))
    inside = xp.reshape(xp.arange(0, after, Int64), (1, 1, after))
    flat = xp.reshape((outside * size + row) * after + inside, (-1,))
    total = xp.scatter_add(before * size * after, flat, xp.reshape(xp.where(here, d, 0), (-1,)))
    return xp.reshape(total, (*d.shape[:axis], size, *d.shape[axis + 1 :]))


def _here(attrs: Attrs, whole: Tensor) -> Attrs:
    return local_rows(attrs, whole, attrs["axis"])


def _pick_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value | None]:
    size = shape_of(o.inputs[0])[o.attributes["axis"]]
    return [f.add_op("ScatterAdd", None, [d, o.inputs[1]], {**o.attributes, "size": size}), None]


op(  # x (.., v, ..), indices (.., j, ..) in [-v, v) -> (.., j, ..)
    "GatherElements",
    attributes="axis:dim count:size?",
    axes=_picked_axes,
    dtype=index_dtype,
    linear=[{0}],
    index=lambda attrs: (0, attrs["axis"]),
    unpadded="count",
    local=lambda attrs, ins, outs: _here(attrs, ins[0]),
    work=lambda attrs, ins, outs: (0.0, 3.0 * math.prod(outs[0])),
    exact=True,
    eval=_pick,
    grad=_pick_grad,
)
op(  # its gradient: d (.., j, ..) added up at these indices of a dim of `size`; the attribute `place` may split that
    "ScatterAdd",
    attributes="axis:dim size:size count:size?",
    axes=_spread_axes,
    sizes=lambda attrs, shapes: {"v": attrs["size"]},
    dtype=index_dtype,
    linear=[{0}],
    index=lambda attrs: (~0, attrs["axis"]),
    unpadded="count",
    local=lambda attrs, ins, outs: {"size": outs[0].shape[attrs["axis"]], **_here(attrs, outs[0])},
    work=lambda attrs, ins, outs: (float(math.prod(ins[0])), 0.0),
    eval=_spread,
    grad=lambda f, o, d: [
        f.add_op("GatherElements", None, [d, o.inputs[1]], o.attributes.without("size")),
        None,
    ],
)


def _top_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    axis, k = attrs["axis"], attrs["k"]
    if k > shapes[0][axis]:
        raise IRTypeError(f"attribute k: expected at most {shapes[0][axis]}, got {k}")
    whole, picked = _rows(axis, len(shapes[0]))
    return f"{whole} -> {picked} | v:whole j:whole"


def _top(xp: Any, x: Any, axis: int, k: int, least: bool = False, last: bool = False) -> Any:
    """A stable sort of the dim, turned round where the largest, or of equal elements the last, come first."""
    n, turned = x.shape[axis], bool(least) == bool(last)
    x = xp.flip(x, axis=(axis,)) if turned else x
    order = xp.argsort(x, axis)
    order = n - 1 - order if turned else order
    order = order if least else xp.flip(order, axis=(axis,))
    return xp.cast(order[(*(slice(None),) * axis, slice(0, k))], Int64)


op(  # the indices of the k largest, or least, along a dim, in order; of equal elements the first, or `last`, is first
    "TopIndices",
    attributes="axis:dim k:size least:flag? last:flag?",
    axes=_top_axes,
    sizes=lambda attrs, shapes: {"j": attrs["k"]},
    dtype=lambda attrs, x: [Int64],
    work=lambda attrs, ins, outs: (float(math.prod(ins[0])) * max(1.0, math.log2(max(1, ins[0][attrs["axis"]]))), 0.0),
    eval=_top,
    grad=no_grad,
)
