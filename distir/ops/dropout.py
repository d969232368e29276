"""Dropout (Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014).

A mask is a function of a key and of each element's index in the whole tensor: of the seed, the step and the position,
but not of the devices. So every plan draws the same mask, and recomputation draws it again.

The numbers are those of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014): the
key is where the sequence begins, the index counts in it. They are computed in int64, in which both numpy and torch
wrap; the last step of the finaliser, which changes the lower halves only, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, op
from distir.ir.type import Bool, DType, Int64, Tensor
from distir.ops.rules import expect, letters, points, wide

_BLOCK = 1 << 17
"""Elements of which the numbers are computed at a time, on CPUs."""
_STEP = 0x9E3779B97F4A7C15
"""What SplitMix64 adds to its state; the finaliser's constants are Stafford's variant 13."""
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_EACH_STEP = 0xD1342543DE82EF95
"""By how much the key grows from step to step: odd, and unrelated to `_STEP`, so that sequences do not overlap."""


def signed(x: int) -> int:
    """The number of 64 bits with sign that is `x` modulo 2^64."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _mixed(x: int) -> int:
    """SplitMix64's finaliser, on a number of 64 bits without sign."""
    for shift, factor in _MIX:
        x = (x ^ x >> shift) * factor % (1 << 64)
    return x ^ x >> 31


def _key(xp: Any, step: Any, seed: int, stream: int) -> Any:
    first = _mixed((_mixed(seed % (1 << 64)) + (stream + 1) * _STEP) % (1 << 64))
    row = xp.reshape(step, (1,))  # numpy warns where a scalar wraps
    return xp.reshape(row * signed(_EACH_STEP) + signed(first), ())


def _key_dtype(attrs: Attrs, step: DType) -> list[DType]:
    if step is not Int64:
        raise IRTypeError(f"operand 0: expected {Int64}, got {step}")
    return [Int64]


op(  # the number of steps before this one -> a key, for stream number `stream` of this seed
    "RandomKey", attributes="seed:int stream:index", axes="->", dtype=_key_dtype, eval=_key
)

# ---------------------------------------------------------------- masks


class _Dim(NamedTuple):
    """A dim of a piece: its size, where it begins in the whole's dim, and what one index counts in the whole."""

    size: int
    start: int
    stride: int


def _dims(shape: Sequence[int], start: Sequence[int], whole: Sequence[int]) -> list[_Dim]:
    """The dims of a piece, as few as possible: one that is whole is merged into the one before."""
    dims: list[_Dim] = []
    stride = 1
    for size, first, of in zip(reversed(shape), reversed(start), reversed(whole), strict=True):
        inner = dims[-1] if dims else _Dim(1, 0, 1)
        if inner.start == 0 and inner.size * inner.stride == stride:
            dims[-1:] = [_Dim(size * inner.size, first * inner.size, inner.stride)]
        else:
            dims.append(_Dim(size, first, stride))
        stride *= of
    return dims[::-1] or [_Dim(1, 0, 1)]


def _blocks(rows: int, columns: int, most: int) -> Iterator[tuple[range, range]]:
    """Rows and columns of at most so many elements: parts of one row, or several whole rows."""
    if columns >= most:
        for r in range(rows):
            for c in range(0, columns, most):
                yield range(r, r + 1), range(c, min(c + most, columns))
    elif columns:
        taken = most // columns
        for r in range(0, rows, taken):
            yield range(r, min(r + taken, rows)), range(columns)


def random_mask(
    xp: Any,
    key: Any,
    shape: Sequence[int],
    start: Sequence[int],
    whole: Sequence[int],
    ratio: float,
    block: int = _BLOCK,
) -> Any:
    """The mask of a piece of this shape, which begins at `start` in a tensor of shape `whole`: false with probability
    `ratio`, independently for each element. `block`: of how many elements the numbers are computed at a time."""
    *lead, last = _dims(shape, start, whole)
    least = signed(round(ratio * 2**64) + (1 << 63))
    origin = sum(d.start * d.stride for d in (*lead, last)) * _STEP
    begin = xp.reshape(key, (1,)) + signed(origin)
    out = xp.full((math.prod([d.size for d in lead]) * last.size,), True, Bool)
    for rows, columns in _blocks(math.prod([d.size for d in lead]), last.size, block):
        z = xp.arange(columns.start, columns.stop, Int64) * signed(last.stride * _STEP) + begin
        if lead:
            z = xp.expand_dims(_offsets(xp, rows, lead), 1) + xp.expand_dims(z, 0)
        for shift, factor in _MIX:
            z ^= (z >> shift) & ((1 << 64 - shift) - 1)
            z *= signed(factor)
        first = rows.start * last.size + columns.start
        out[first : first + len(rows) * len(columns)] = xp.reshape(z, (-1,)) >= least
    return xp.reshape(out, tuple(shape))


def _offsets(xp: Any, rows: range, lead: Sequence[_Dim]) -> Any:
    """What the indices of these rows, in the leading dims, add to the state."""
    rest, total = xp.arange(rows.start, rows.stop, Int64), 0
    for d in reversed(lead):
        total = total + rest % d.size * signed(d.stride * _STEP)
        rest = rest // d.size
    return total


def _scaled(xp: Any, x: Any, mask: Any, ratio: float) -> Any:
    return xp.where(mask, xp.asarray(wide(xp, x) * (1 / (1 - ratio)), dtype=x.dtype), 0)


def _dropout(xp: Any, x: Any, key: Any, ratio: float, start: Sequence[int], whole: Sequence[int]) -> tuple[Any, Any]:
    mask = random_mask(xp, key, x.shape, start, whole, ratio)
    return _scaled(xp, x, mask, ratio), mask


def _ratio(attrs: Attrs, x: DType) -> list[DType]:
    if not 0 <= attrs["ratio"] < 1:
        raise IRTypeError(f"attribute ratio: expected at least 0 and below 1, got {attrs['ratio']}")
    expect(0, x, "float")
    return [x]


def _dropout_dtype(attrs: Attrs, x: DType, key: DType) -> list[DType]:
    if key is not Int64:
        raise IRTypeError(f"operand 1: expected {Int64}, got {key}")
    return [*_ratio(attrs, x), Bool]


def _grad_dtype(attrs: Attrs, d: DType, mask: DType) -> list[DType]:
    expect(1, mask, "bool")
    return _ratio(attrs, d)


def _dropout_axes(attrs: Attrs, shapes: Sequence[Sequence[int]]) -> str:
    row = " ".join(letters(len(shapes[0])))
    return f"{row}, -> {row}, {row}"


def _whole(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> Attrs:
    return {"whole": attrs.get("whole", ins[0].global_shape)}


def _emit_grad(f: FunctionMaker, o: Op, d: Value, mask: None) -> list[Value | None]:
    return [f.emit("DropoutGrad", d, o.outputs[1], ratio=o.attributes["ratio"]), None]


op(  # where a training step drops elements; elsewhere the identity
    "Dropout",
    attributes="ratio:number",
    axes=points(1),
    dtype=_ratio,
    linear=[{0}],
    eval=lambda xp, x, ratio: x,
    grad=lambda f, o, d: [d],
    alias=True,
)
op(  # (x, key) -> x / (1 - ratio) where the mask is true, else 0; and the mask, saved
    "RandomDropout",  # `whole`: the shape before padding
    attributes="ratio:number whole:sizes?",
    axes=_dropout_axes,
    dtype=_dropout_dtype,
    outputs=2,
    saved=1,
    index=(0, None),
    unpadded="whole",
    local=_whole,
    training_only=True,
    eval=_dropout,
    grad=_emit_grad,
)
op(  # (d, mask) -> d / (1 - ratio) where the mask is true, else 0
    "DropoutGrad",
    attributes="ratio:number",
    axes=points(2),
    dtype=_grad_dtype,
    linear=[{0}],
    eval=_scaled,
    grad=lambda f, o, d: [f.emit("DropoutGrad", d, o.inputs[1], ratio=o.attributes["ratio"]), None],
)
