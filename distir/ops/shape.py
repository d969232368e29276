"""Ops that only move or rename elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, Strand, op
from distir.ir.type import Shard

_LETTERS = "abcdefghijkl"


def letters(rank: int) -> list[str]:
    """Factor names for the dims of an operand of that rank."""
    return list(_LETTERS[:rank])


def sum_to(f: FunctionMaker, d: Value, like: Value) -> Value:
    """The gradient `d` of a result, summed over the dims along which `like` was broadcast."""
    got, want = d.type.global_shape, like.type.global_shape
    lead = len(got) - len(want)
    kept = tuple(i for i in range(lead, len(got)) if want[i - lead] == 1 and got[i] != 1)
    if kept:
        d = f.emit("ReduceSum", d, axes=kept, keepdims=1)
    if lead:
        d = f.emit("ReduceSum", d, axes=tuple(range(lead)), keepdims=0)
    return d


def swap_last(f: FunctionMaker, v: Value) -> Value:
    """`v` with its last two dims swapped."""
    n = len(v.type.global_shape)
    return f.emit("Transpose", v, perm=(*range(n - 2), n - 1, n - 2))


def _transpose_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    names = letters(len(shapes[0]))
    return f"{' '.join(names)} -> {' '.join(names[i] for i in attrs['perm'])}"


def _transpose_grad(f: FunctionMaker, o: Op, d: Any) -> list[Any]:
    perm = o.attributes["perm"]
    return [f.emit("Transpose", d, perm=tuple(sorted(range(len(perm)), key=perm.__getitem__)))]


op(
    "Transpose",
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
    """Where a split of `a` stands once it is reshaped to `b`: dims are grouped by equal products."""
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
) -> Strand | None:
    a, b = (ins[0], outs[0]) if slot >= 0 else (outs[0], ins[0])
    there = reshaped(a, b, split, n)
    if there is None or reshaped(b, a, there, n) is not split:
        return None  # a split must come back as it went
    return Strand((split,), (there,)) if slot >= 0 else Strand((there,), (split,))


op(
    "Reshape",
    infer=_reshape_infer,
    shard=_reshape_shard,
    linear=[{0}],
    local=lambda attrs, ins, outs: {"shape": outs[0].shape},
    eval=lambda xp, a, shape: xp.reshape(a, shape),
    grad=lambda f, o, d: [f.emit("Reshape", d, shape=o.inputs[0].type.global_shape)],
    alias=True,
)
