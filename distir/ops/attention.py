"""Scaled-dot-product attention as one op, so that scores (s x t for each head) are neither stored nor sent.

Its backward pass computes them again from what it saves, as FlashAttention does (Dao et al. 2022, Algorithm 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, op
from distir.ir.type import DType, Int64
from distir.ops.rules import cast, letters, same, scalar, shape_of, statistic, swap_last, tensor, wide

# ---------------------------------------------------------------- types


def _axes(operands: Sequence[str], result: Callable[[int], str]) -> Callable[[Attrs, Sequence[Shape]], str]:
    """Axes from the dims of each operand after the leading ones, which all share; a mask, which broadcasts, may follow.

    Queries s, keys t, sizes e of a key and f of a value. `result` gives those of the results, from the mask's rank.
    """

    def axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
        rank = len(shapes[0])
        if rank < 2:
            raise IRTypeError(f"operand 0: expected rank 2 or more, got shape {shapes[0]}")
        lead = " ".join([f"{x}0" for x in letters(rank - 2)])
        rows = [f"{lead} {own}" for own in operands]
        for k, (row, s) in enumerate(zip(rows, shapes, strict=False)):
            if len(s) == len(row.split()) and s[: rank - 2] != shapes[0][: rank - 2]:
                raise IRTypeError(f"operand {k}: expected leading dims {shapes[0][: rank - 2]}, got shape {s}")
        kinds = [*[f"{x}:whole" for x in "tef"], "s:sum"]
        made = result(rank)
        if len(shapes) == len(operands) + 1:
            mask = shapes[-1]
            names = f"{lead} s t".split()[rank - len(mask) :]
            _check_mask(len(operands), names, mask, rows, shapes)
            rows.append(" ".join(names))
            if made == "mask":
                made = " ".join("1" if n == 1 else name for name, n in zip(names, mask, strict=True))
                kinds += [f"{x}:sum" for x in lead.split()]
        return f"{', '.join(rows)} -> {made.replace('...', lead)} | {' '.join(kinds)}"

    return axes


def _check_mask(k: int, names: Sequence[str], mask: Shape, rows: Sequence[str], shapes: Sequence[Shape]) -> None:
    """Raises IRTypeError if the mask is larger than the scores are."""
    size = {x: n for row, s in zip(rows, shapes, strict=False) for x, n in zip(row.split(), s, strict=False)}
    scores = tuple(size[x] for x in names)
    if len(names) != len(mask) or any(n not in (1, m) for n, m in zip(mask, scores, strict=True)):
        raise IRTypeError(f"operand {k}: expected a shape that broadcasts to the scores' {scores}, got {mask}")


def _dtypes(attrs: Attrs, *dtypes: DType) -> list[DType]:
    (d,) = same(attrs, *dtypes)
    return [d, statistic(d)]


def _grad_dtypes(results: int) -> Callable[..., list[DType]]:
    def rule(attrs: Attrs, *dtypes: DType) -> list[DType]:
        first = dtypes[0]
        if dtypes[4] is not statistic(first):
            raise IRTypeError(f"operand 4: expected {statistic(first)}, got {dtypes[4]}")
        same(attrs, *[first if k == 4 else d for k, d in enumerate(dtypes)])
        return [first] * results

    return rule


# ---------------------------------------------------------------- meaning


def _scores(xp: Any, q: Any, k: Any, mask: Any, scale: float, causal: bool, start: int) -> Any:
    scores = xp.matmul(wide(xp, q), xp.swapaxes(wide(xp, k), -1, -2)) * scale
    if mask is not None:
        scores = scores + wide(xp, mask)
    if causal:
        s, t = scores.shape[-2:]
        seen = xp.expand_dims(xp.arange(0, t, Int64), 0) <= xp.expand_dims(xp.arange(start, start + s, Int64), 1)
        scores = xp.where(seen, scores, -math.inf)
    return scores


def _attention(
    xp: Any, q: Any, k: Any, v: Any, mask: Any = None, scale: float = 1.0, causal: bool = False, start: int = 0
) -> tuple[Any, Any]:
    scores = _scores(xp, q, k, mask, scale, causal, start)
    top = xp.max(scores, axis=-1, keepdims=True)
    top = xp.where(top == -math.inf, 0, top)
    weights = xp.exp(scores - top)
    total = xp.sum(weights, axis=-1, keepdims=True)
    total = xp.where(total == 0, 1, total)
    result = xp.matmul(weights / total, wide(xp, v))
    return xp.asarray(result, dtype=q.dtype), (top + xp.log(total))[..., 0]


def _slopes(
    xp: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, d: Any, mask: Any, scale: float, causal: bool, start: int
) -> tuple[Any, Any]:
    """The softmax, and the gradient of the scores."""
    weights = xp.exp(_scores(xp, q, k, mask, scale, causal, start) - xp.expand_dims(lse, -1))
    d = wide(xp, d)
    along = xp.sum(d * wide(xp, y), axis=-1, keepdims=True)
    return weights, weights * (xp.matmul(d, xp.swapaxes(wide(xp, v), -1, -2)) - along)


def _attention_grad(
    xp: Any,
    q: Any,
    k: Any,
    v: Any,
    y: Any,
    lse: Any,
    d: Any,
    mask: Any = None,
    scale: float = 1.0,
    causal: bool = False,
    start: int = 0,
) -> tuple[Any, Any, Any]:
    weights, slopes = _slopes(xp, q, k, v, y, lse, d, mask, scale, causal, start)
    dq = xp.matmul(slopes, wide(xp, k)) * scale
    dk = xp.matmul(xp.swapaxes(slopes, -1, -2), wide(xp, q)) * scale
    dv = xp.matmul(xp.swapaxes(weights, -1, -2), wide(xp, d))
    return xp.asarray(dq, dtype=q.dtype), xp.asarray(dk, dtype=q.dtype), xp.asarray(dv, dtype=q.dtype)


def _mask_grad(
    xp: Any,
    q: Any,
    k: Any,
    v: Any,
    y: Any,
    lse: Any,
    d: Any,
    mask: Any,
    scale: float = 1.0,
    causal: bool = False,
    start: int = 0,
) -> Any:
    slopes = _slopes(xp, q, k, v, y, lse, d, mask, scale, causal, start)[1]
    lead = slopes.ndim - mask.ndim
    slopes = xp.sum(slopes, axis=tuple(range(lead)))
    slopes = xp.sum(slopes, axis=tuple(i for i, n in enumerate(mask.shape) if n == 1), keepdims=True)
    return xp.asarray(slopes, dtype=q.dtype)


def _definition(f: FunctionMaker, o: Op) -> list[Value] | None:
    """softmax(q k^T scale + mask) v; of causal attention there is none (its mask would be as large as the scores).

    Scores are in the operands' dtype, as exporters write them out.
    """
    if o.attributes.get("causal"):
        return None
    q, k, v, *mask = o.inputs
    scores = f.emit("MatMul", q, swap_last(f, k))
    scale = o.attributes.get("scale", 1.0)
    scores = scores if scale == 1.0 else f.emit("Mul", scores, scalar(f, scale, q))
    scores = f.emit("Add", scores, mask[0]) if mask else scores
    y = f.emit("MatMul", f.emit("Softmax", scores, axis=-1), v)
    last = (len(shape_of(scores)) - 1,)
    scores = cast(f, scores, tensor(o.outputs[1]).dtype)
    top = f.emit("ReduceMax", scores, axes=last, keepdims=1)
    total = f.emit("ReduceSum", f.emit("Exp", f.emit("Sub", scores, top)), axes=last, keepdims=1)
    lse = f.emit("Add", f.emit("Log", total), top)
    return [y, f.emit("Reshape", lse, shape=shape_of(lse)[:-1])]


# ---------------------------------------------------------------- gradient and work


def _emit_grad(f: FunctionMaker, o: Op, d: Value, *saved: None) -> list[Value]:
    q, k, v, *mask = o.inputs
    operands = [q, k, v, *o.outputs, d, *mask]
    grads = list(f.add_op("AttentionGrad", None, operands, o.attributes))
    if mask:  # dropped again where the mask is not trained
        grads.append(f.add_op("AttentionGradMask", None, operands, o.attributes))
    return grads


def _work(keys: int, values: int) -> Callable[..., tuple[float, float]]:
    """The work of that many products of the scores' shape with keys or queries, and with values; half if causal.

    2 and 5 of them forward and backward: Dao 2023 (FlashAttention-2), sections 3.1 and 4.1. Where queries are split
    over devices, causal attention is most work for those that have the last ones, and the others wait for them.
    """

    def work(attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape]) -> tuple[float, float]:
        s, t = ins[0][-2], ins[1][-2]
        points = math.prod(ins[0][:-1]) * (t - min(s, t) / 2 if attrs.get("causal") else t)
        return 2.0 * points * (keys * ins[0][-1] + values * ins[2][-1]), 0.0

    return work


def _counted(attrs: Attrs) -> tuple[int, int] | None:
    """A causal mask counts rows of queries."""
    return (0, -2) if attrs.get("causal") else None


op(  # q (.., s, e), k (.., t, e), v (.., t, f), a mask that is added -> (.., s, f), and the rows' log-sum-exp, saved
    "Attention",  # a row that is masked entirely (all of it -inf) gives 0, and saves 0
    attributes="scale:number? causal:flag?",
    axes=_axes(["s e", "t e", "t f"], lambda rank: "... s f, ... s"),
    dtype=_dtypes,
    outputs=2,
    saved=1,
    precision="low",
    index=_counted,
    eval=_attention,
    grad=_emit_grad,
    definition=_definition,
    kernel="attention",
    work=_work(1, 1),
)
op(  # the gradients of q, k and v, from these, the two results, the gradient of the first, and the mask
    "AttentionGrad",
    attributes="scale:number? causal:flag?",
    axes=_axes(["s e", "t e", "t f", "s f", "s", "s f"], lambda rank: "... s e, ... t e, ... t f"),
    dtype=_grad_dtypes(3),
    outputs=3,
    linear=[{5}],
    index=_counted,
    eval=_attention_grad,
    kernel="attention",
    work=_work(3, 2),
)
op(  # from the same, the gradient of the mask, for a trained one (position biases)
    "AttentionGradMask",
    attributes="scale:number? causal:flag?",
    axes=_axes(["s e", "t e", "t f", "s f", "s", "s f"], lambda rank: "mask"),
    dtype=_grad_dtypes(1),
    linear=[{5}],
    index=_counted,
    eval=_mask_grad,
    kernel="attention",
    work=_work(1, 1),
)
