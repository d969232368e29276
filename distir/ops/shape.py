"""Ops that only move or rename elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, FactorMapping, op
from distir.ir.type import DType, Shard, Tensor
from distir.ops.rules import expect_shape, known, letters, no_grad, passed, points, same, shape_of, sum_to


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _here(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> Attrs:
    """The attribute `shape` for one device's piece of the result."""
    return {"shape": outs[0].shape}


op("Identity", axes=points(1), linear=[{0}], eval=lambda xp, x: x, grad=lambda f, o, d: [d], alias=True)
op("Detach", axes=points(1), linear=[{0}], eval=lambda xp, x: x, grad=no_grad, alias=True)
op("ZerosLike", axes=points(1), linear=[{0}], exact=True, eval=lambda xp, x: xp.zeros_like(x), grad=no_grad)


def _constant_infer(attrs: Attrs) -> list[Shape]:
    shape = attrs.get("shape", ())
    if math.prod(shape) != len(attrs["value"]):
        raise IRTypeError(f"attribute value: expected {math.prod(shape)} numbers, got {len(attrs['value'])}")
    dtype = attrs["dtype"]
    if dtype.kind != "float":
        low, high = _RANGES[dtype.name]
        for x in attrs["value"]:
            if isinstance(x, float) or not low <= x <= high:
                raise IRTypeError(f"attribute value: expected numbers of {dtype}, got {x!r}")
    return [shape]


_RANGES = {"bool": (0, 1)} | {
    d.name: (0, 2 ** (8 * d.size) - 1) if d.name[0] == "u" else (-(2 ** (8 * d.size - 1)), 2 ** (8 * d.size - 1) - 1)
    for d in DType.all.values()
    if d.kind == "int"
}
"""The least and the largest number of each dtype that is not floating."""

op(
    "Constant",
    attributes="value:numbers dtype:dtype shape:sizes?",
    infer=_constant_infer,
    dtype=lambda attrs: [attrs["dtype"]],
    eval=lambda xp, value, dtype, shape=(): xp.constant(value, shape, dtype),
    grad=no_grad,
)

# ---------------------------------------------------------------- all elements, in another order


def _transpose_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    names = letters(len(shapes[0]))
    return f"{' '.join(names)} -> {' '.join(names[i] for i in attrs['perm'])}"


def _transpose_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    perm = o.attributes["perm"]
    return [f.emit("Transpose", d, perm=tuple(sorted(range(len(perm)), key=perm.__getitem__)))]


op(
    "Transpose",
    attributes="perm:order",
    axes=_transpose_axes,
    linear=[{0}],
    eval=lambda xp, a, perm: xp.permute_dims(a, perm),
    grad=_transpose_grad,
    alias=True,
)


def _reshape_infer(attrs: Attrs, shape: Shape) -> list[Shape]:
    want = list(attrs["shape"])
    if want.count(-1) == 1:
        i = want.index(-1)
        rest = math.prod(want[:i] + want[i + 1 :])
        want[i] = math.prod(shape) // rest if rest else 0
    if math.prod(want) != math.prod(shape) or min(want, default=0) < 0:
        raise IRTypeError(f"operand 0: shape {shape} does not reshape to {attrs['shape']}")
    return [tuple(want)]


def reshaped(a: Shape, b: Shape, split: Shard, n: int) -> Shard | None:
    """The split of `a` after a reshape to `b`: dims are grouped by equal products."""
    i = j = 0
    while i < len(a) and j < len(b):
        i0, j0, x, y = i, j, a[i], b[j]
        i, j = i + 1, j + 1
        while x != y:
            if x < y:
                x *= a[i]
                i += 1
            else:
                y *= b[j]
                j += 1
        if split.dim < i:
            outer = math.prod(a[i0 : split.dim]) * split.outer
            for k in range(j - 1, j0 - 1, -1):
                before = math.prod(b[j0:k])
                if outer % before == 0 and b[k] % (outer // before * n) == 0:
                    return Shard(k, outer // before)
            return None
    return None


def _reshape_shard(
    attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape], slot: int, split: Shard, n: int
) -> FactorMapping | None:
    a, b = (ins[0], outs[0]) if slot >= 0 else (outs[0], ins[0])
    there = reshaped(a, b, split, n)
    if there is None or reshaped(b, a, there, n) is not split:
        return None  # the reverse reshape must give the same split
    return FactorMapping((split,), (there,)) if slot >= 0 else FactorMapping((there,), (split,))


op(
    "Reshape",
    attributes="shape:ints",
    infer=_reshape_infer,
    shard=_reshape_shard,
    linear=[{0}],
    local=_here,
    eval=lambda xp, a, shape: xp.reshape(a, shape),
    grad=lambda f, o, d: [f.emit("Reshape", d, shape=shape_of(o.inputs[0]))],
    alias=True,
)

# ---------------------------------------------------------------- parts


def _sizes(attrs: Attrs, size: int) -> tuple[int, ...]:
    """The sizes of a Split's parts."""
    sizes = attrs.get("sizes")
    if sizes is None:
        parts = attrs["parts"]
        sizes = (size // parts,) * parts
    if sum(sizes) != size:
        raise IRTypeError(f"operand 0: size {size} does not split into {attrs.get('sizes') or attrs['parts']}")
    return sizes


def _split_shard(
    attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape], slot: int, split: Shard, n: int
) -> FactorMapping | None:
    """Along its axis: (outer, n, rest) of the whole is (outer / parts, n, rest) of each of equal parts."""
    whole = part = split
    if split.dim == attrs["axis"]:
        parts = len(outs)
        if len({s[split.dim] for s in outs}) > 1 or (slot >= 0 and split.outer % parts):
            return None
        if slot >= 0:
            part = Shard(split.dim, split.outer // parts)
        else:
            whole = Shard(split.dim, split.outer * parts)
    return FactorMapping((whole,), (part,) * len(outs))


def _split_eval(xp: Any, a: Any, axis: int, parts: int = 0, sizes: tuple[int, ...] | None = None) -> tuple[Any, ...]:
    before = (slice(None),) * axis
    pieces: list[Any] = []
    start = 0
    for size in sizes or (a.shape[axis] // parts,) * parts:
        pieces.append(a[(*before, slice(start, start + size))])
        start += size
    return tuple(pieces)


def _split_grad(f: FunctionMaker, o: Op, *d: Value | None) -> list[Value]:
    return [f.emit("Concat", *known(f, o, d), axis=o.attributes["axis"])]


op(
    "Split",
    attributes="axis:dim parts:count? sizes:sizes?",
    infer=lambda attrs, a: [_with(a, attrs["axis"], s) for s in _sizes(attrs, a[attrs["axis"]])],
    dtype=lambda attrs, d: [d] * (attrs.get("parts") or len(attrs["sizes"])),
    outputs=lambda attrs: attrs.get("parts") or len(attrs["sizes"]),
    shard=_split_shard,
    linear=[{0}],
    local=lambda attrs, ins, outs: {"sizes": tuple(t.shape[attrs["axis"]] for t in outs)} if "sizes" in attrs else {},
    eval=_split_eval,
    grad=_split_grad,
    alias=True,
)


def _concat_infer(attrs: Attrs, *shapes: Shape) -> list[Shape]:
    axis = attrs["axis"]
    for k, s in enumerate(shapes):
        expect_shape(k, s, _with(shapes[0], axis, s[axis]) if len(s) == len(shapes[0]) else shapes[0])
    return [_with(shapes[0], axis, sum(s[axis] for s in shapes))]


def _concat_shard(
    attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape], slot: int, split: Shard, n: int
) -> FactorMapping | None:
    mapping = _split_shard(attrs, outs, ins, ~slot, split, n)
    return None if mapping is None else FactorMapping(mapping.outs, mapping.ins)


def _concat_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    axis = o.attributes["axis"]
    sizes = tuple(shape_of(v)[axis] for v in o.inputs)
    if len(sizes) == 1:
        return [d]
    how = {"parts": len(sizes)} if len(set(sizes)) == 1 else {"sizes": sizes}
    return list(f.emit("Split", d, axis=axis, **how))


op(
    "Concat",
    attributes="axis:dim",
    infer=_concat_infer,
    dtype=same,
    shard=_concat_shard,
    linear="all",
    exact=True,
    eval=lambda xp, *a, axis: xp.concat(a, axis=axis),
    grad=_concat_grad,
)


def _ranges(attrs: Attrs) -> dict[int, range]:
    """For each dim that a Slice cuts, the indices it takes."""
    rows = zip(attrs["starts"], attrs["ends"], attrs["axes"], attrs["steps"], strict=True)
    return {axis: range(start, end, step) for start, end, axis, step in rows}


def _slice_infer(attrs: Attrs, shape: Shape) -> list[Shape]:
    for axis, taken in _ranges(attrs).items():
        if taken and (min(taken[0], taken[-1]) < 0 or max(taken[0], taken[-1]) >= shape[axis]):
            raise IRTypeError(f"operand 0: {taken} is not within dim {axis} of shape {shape}")
        shape = _with(shape, axis, len(taken))
    return [shape]


def _taken(xp: Any, x: Any, ranges: dict[int, range]) -> Any:
    """The view of `x` at these indices, those of a negative step in rising order."""
    cuts = [slice(None)] * x.ndim
    for axis, r in ranges.items():
        r = r if r.step > 0 else r[::-1]
        cuts[axis] = slice(r.start, r.stop, r.step) if r else slice(0, 0)
    return x[tuple(cuts)]


def _turned(xp: Any, x: Any, ranges: dict[int, range]) -> Any:
    back = tuple(axis for axis, r in ranges.items() if r.step < 0)
    return xp.flip(x, axis=back) if back else x


def _slice_eval(xp: Any, x: Any, **attrs: Any) -> Any:
    ranges = _ranges(attrs)
    return _turned(xp, _taken(xp, x, ranges), ranges)


def _slice_grad_eval(xp: Any, d: Any, shape: Shape, **attrs: Any) -> Any:
    """`d` where the slice was taken from zeros of `shape`."""
    ranges = _ranges(attrs)
    x = xp.zeros_like(xp.broadcast_to(d.reshape(-1)[:1].sum(), shape))  # also where the slice is empty
    _taken(xp, x, ranges)[...] = _turned(xp, d, ranges)
    return x


op(
    "Slice",
    attributes="starts:ints ends:ints axes:dims steps:ints",
    infer=_slice_infer,
    shard=lambda attrs, ins, outs, slot, split, n: passed(1, split, attrs["axes"]),
    linear=[{0}],
    eval=_slice_eval,
    grad=lambda f, o, d: [f.emit("SliceGrad", d, shape=shape_of(o.inputs[0]), **o.attributes)],
    alias=True,
)


def _slice_grad_infer(attrs: Attrs, d: Shape) -> list[Shape]:
    expect_shape(0, d, _slice_infer(attrs, attrs["shape"])[0])
    return [attrs["shape"]]


op(
    "SliceGrad",
    attributes="starts:ints ends:ints axes:dims steps:ints shape:sizes",
    infer=_slice_grad_infer,
    shard=lambda attrs, ins, outs, slot, split, n: passed(1, split, attrs["axes"]),
    linear=[{0}],
    local=_here,
    exact=True,
    eval=_slice_grad_eval,
    grad=lambda f, o, d: [f.add_op("Slice", None, [d], o.attributes.without("shape"))],
)

# ---------------------------------------------------------------- more elements than there were


def _expand_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    names = letters(len(attrs["shape"]))
    if len(shapes[0]) > len(names):
        raise IRTypeError(f"operand 0: shape {shapes[0]} does not expand to {attrs['shape']}")
    return f"{' '.join(names[len(names) - len(shapes[0]) :])} -> {' '.join(names)}"


op(
    "Expand",
    attributes="shape:sizes",
    axes=_expand_axes,
    sizes=lambda attrs, shapes: dict(zip(letters(len(attrs["shape"])), attrs["shape"], strict=True)),
    linear=[{0}],
    local=_here,
    work=lambda attrs, ins, outs: (0.0, 0.0),
    eval=lambda xp, x, shape: xp.broadcast_to(x, shape),
    grad=lambda f, o, d: [sum_to(f, d, o.inputs[0])],
    alias=True,
)


def _pad_eval(xp: Any, x: Any, dim: int, size: int, value: float = 0.0) -> Any:
    tail = xp.zeros(_with(x.shape, dim, size - x.shape[dim]), dtype=x.dtype)
    return xp.concat((x, tail + value), axis=dim)


def _resized(attrs: Attrs, shape: Shape, larger: bool) -> list[Shape]:
    if (attrs["size"] < shape[attrs["dim"]]) if larger else (attrs["size"] > shape[attrs["dim"]]):
        raise IRTypeError(f"operand 0: dim {attrs['dim']} of shape {shape} cannot become {attrs['size']}")
    return [_with(shape, attrs["dim"], attrs["size"])]


op(  # dim grows to `size`, by `value` at the end
    "PadTo",
    attributes="dim:dim size:size value:number?",
    infer=lambda attrs, shape: _resized(attrs, shape, True),
    shard=lambda attrs, ins, outs, slot, split, n: passed(1, split, (attrs["dim"],)),
    linear=lambda attrs: [] if attrs.get("value") else [{0}],
    exact=True,
    eval=_pad_eval,
    grad=lambda f, o, d: [f.emit("CutTo", d, dim=o.attributes["dim"], size=shape_of(o.inputs[0])[o.attributes["dim"]])],
)
op(  # dim shrinks to `size`, at the end
    "CutTo",
    attributes="dim:dim size:size",
    infer=lambda attrs, shape: _resized(attrs, shape, False),
    shard=lambda attrs, ins, outs, slot, split, n: passed(1, split, (attrs["dim"],)),
    linear=[{0}],
    eval=lambda xp, x, dim, size: x[(slice(None),) * dim + (slice(0, size),)],
    grad=lambda f, o, d: [f.emit("PadTo", d, dim=o.attributes["dim"], size=shape_of(o.inputs[0])[o.attributes["dim"]])],
    alias=True,
)


def _fill_eval(xp: Any, x: Any, start: int, dim: int, size: int, value: float = 0.0) -> Any:
    valid = min(max(size - start, 0), x.shape[dim])
    head = x[(slice(None),) * dim + (slice(0, valid),)]
    tail = x[(slice(None),) * dim + (slice(valid, None),)]
    return xp.concat((head, xp.zeros_like(tail) + value), axis=dim)


op(  # `value` in place of the elements of dim from index `size` on; the dim may be split
    "FillTail",
    attributes="dim:dim size:size value:number?",
    axes=points(1),
    index=lambda attrs: (0, attrs["dim"]),
    linear=lambda attrs: [] if attrs.get("value") else [{0}],
    donates=(0,),
    exact=True,
    eval=_fill_eval,
    grad=lambda f, o, d: [f.emit("FillTail", d, dim=o.attributes["dim"], size=o.attributes["size"])],
)
