"""Scaled-dot-product attention as one op, so that scores (s x t for each head) are neither stored nor sent.

Its backward pass computes them again from what it saves, as FlashAttention does (Dao et al. 2022, Algorithm 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, FactorMapping, ShardRule, op
from distir.ir.type import REPLICATE, SUM, DType, Int64, Shard
from distir.ops.rules import cast, expect_shape, letters, same, scalar, shape_of, statistic, swap_last, tensor, wide
from distir.ops.shape import reshaped

KEYS_AND_VALUES = (1, 2)
"""The operands of attention, and the results of its gradient, that are of keys and values."""

# ---------------------------------------------------------------- types


def _axes(operands: Sequence[str], result: Callable[[int], str]) -> Callable[[Attrs, Sequence[Shape]], str]:
    """Axes from the dims of each operand after the leading ones, which all share; a mask, which broadcasts, may follow.

    Queries s, keys t, sizes e of a key and f of a value. `result` gives those of the results, from the mask's rank.
    """

    def axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
        rank = len(shapes[0])
        _check_window(attrs)
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
            _check_mask(len(operands), mask, (*shapes[0][:-1], *shapes[1][-2:-1]))
            names = f"{lead} s t".split()[rank - len(mask) :]
            rows.append(" ".join(names))
            if made == "mask":
                made = " ".join("1" if n == 1 else name for name, n in zip(names, mask, strict=True))
                kinds += [f"{x}:sum" for x in lead.split()]
        return f"{', '.join(rows)} -> {made.replace('...', lead)} | {' '.join(kinds)}"

    return axes


def _check_window(attrs: Attrs) -> None:
    if attrs.get("window") and not attrs.get("causal"):
        raise IRTypeError("attribute window: expected causal attention")


def _check_mask(k: int, mask: Shape, scores: Shape) -> None:
    """Raises IRTypeError if the mask, operand k, is larger than the scores are."""
    last = scores[max(0, len(scores) - len(mask)) :]
    if len(mask) != len(last) or any(n not in (1, m) for n, m in zip(mask, last, strict=True)):
        raise IRTypeError(f"operand {k}: expected a shape that broadcasts to the scores' {last}, got {mask}")


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


class _Form(NamedTuple):
    """What scores become after the product of queries and keys: the attributes, and the number of the first query."""

    scale: float = 1.0
    causal: bool = False
    window: int | None = None
    softcap: float = 0.0
    start: int = 0


def _scores(xp: Any, q: Any, k: Any, mask: Any, form: _Form) -> tuple[Any, Any]:
    """The scores, and the slope of the cap, by which their gradient is multiplied."""
    scores, slope = xp.matmul(wide(xp, q), xp.swapaxes(wide(xp, k), -1, -2)) * form.scale, 1
    if form.softcap:
        share = xp.tanh(scores / form.softcap)
        scores, slope = share * form.softcap, 1 - share * share
    if mask is not None:
        scores = scores + wide(xp, mask)
    if form.causal:
        s, t = scores.shape[-2:]
        row = xp.expand_dims(xp.arange(form.start, form.start + s, Int64), 1)
        column = xp.expand_dims(xp.arange(0, t, Int64), 0)
        scores = xp.where(column <= row, scores, -math.inf)
        if form.window is not None:
            scores = xp.where(column > row - form.window, scores, -math.inf)
    return scores, slope


def _attention(xp: Any, q: Any, k: Any, v: Any, mask: Any = None, **form: Any) -> tuple[Any, Any]:
    scores, _ = _scores(xp, q, k, mask, _Form(**form))
    top = xp.max(scores, axis=-1, keepdims=True)
    top = xp.where(top == -math.inf, 0, top)
    weights = xp.exp(scores - top)
    total = xp.sum(weights, axis=-1, keepdims=True)
    total = xp.where(total == 0, 1, total)
    result = xp.matmul(weights / total, wide(xp, v))
    return xp.asarray(result, dtype=q.dtype), (top + xp.log(total))[..., 0]


def _slopes(xp: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, d: Any, mask: Any, form: _Form) -> tuple[Any, Any, Any]:
    """The softmax, the gradient of the masked scores, and that of the product of queries and keys."""
    scores, slope = _scores(xp, q, k, mask, form)
    weights = xp.exp(scores - xp.expand_dims(lse, -1))
    d = wide(xp, d)
    along = xp.sum(d * wide(xp, y), axis=-1, keepdims=True)
    slopes = weights * (xp.matmul(d, xp.swapaxes(wide(xp, v), -1, -2)) - along)
    return weights, slopes, slopes * slope * form.scale


def _attention_grad(
    xp: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, d: Any, mask: Any = None, **form: Any
) -> tuple[Any, Any, Any]:
    weights, _, slopes = _slopes(xp, q, k, v, y, lse, d, mask, _Form(**form))
    dq = xp.matmul(slopes, wide(xp, k))
    dk = xp.matmul(xp.swapaxes(slopes, -1, -2), wide(xp, q))
    dv = xp.matmul(xp.swapaxes(weights, -1, -2), wide(xp, d))
    return xp.asarray(dq, dtype=q.dtype), xp.asarray(dk, dtype=q.dtype), xp.asarray(dv, dtype=q.dtype)


def _mask_grad(xp: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, d: Any, mask: Any, **form: Any) -> Any:
    slopes = _slopes(xp, q, k, v, y, lse, d, mask, _Form(**form))[1]
    lead = slopes.ndim - mask.ndim
    slopes = xp.sum(slopes, axis=tuple(range(lead)))
    slopes = xp.sum(slopes, axis=tuple(i for i, n in enumerate(mask.shape) if n == 1), keepdims=True)
    return xp.asarray(slopes, dtype=q.dtype)


def _definition(f: FunctionMaker, o: Op) -> list[Value] | None:
    """softmax(cap(q k^T scale) + mask) v; of causal attention there is none (its mask would be as large as the scores).

    Scores are in the operands' dtype, as exporters write them out.
    """
    if o.attributes.get("causal"):
        return None
    q, k, v, *mask = o.inputs
    scores = f.emit("MatMul", q, swap_last(f, k))
    scale = o.attributes.get("scale", 1.0)
    scores = scores if scale == 1.0 else f.emit("Mul", scores, scalar(f, scale, q))
    if cap := o.attributes.get("softcap"):
        scores = f.emit("Mul", f.emit("Tanh", f.emit("Div", scores, scalar(f, cap, q))), scalar(f, cap, q))
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
    """The work of that many products of the scores' shape with keys or queries, and with values; of causal attention
    only of the scores that are seen.

    2 and 5 of them forward and backward: Dao 2023 (FlashAttention-2), sections 3.1 and 4.1. Where queries are split
    over devices, causal attention is most work for those that have the last ones, and the others wait for them; given
    the number of all `queries`, a device has the mean of them.
    """

    def work(attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape]) -> tuple[float, float]:
        s, t = ins[0][-2], ins[1][-2]
        rows = min(attrs.get("queries") or s, t)
        points = math.prod(ins[0][:-1]) * (_keys_seen(rows, t, attrs.get("window") or t) if attrs.get("causal") else t)
        return 2.0 * points * (keys * ins[0][-1] + values * ins[2][-1]), 0.0

    return work


def _keys_seen(rows: int, keys: int, window: int) -> float:
    """How many keys each of the last `rows` queries sees on average: the last `window` of them up to its own."""

    def seen(n: int) -> float:
        """By the first n queries."""
        return n * n / 2 if n <= window else window * (n - window / 2)

    return (seen(keys) - seen(keys - rows)) / max(rows, 1)


def _counted(attrs: Attrs) -> tuple[int, int] | None:
    """Causal masks and windows count rows of queries."""
    return (0, -2) if attrs.get("causal") else None


_ATTRIBUTES = "scale:number? causal:flag? window:count? softcap:number?"
"""Scores are capped as softcap tanh(scores / softcap) before masks. `window`, of causal attention: a query sees that
many keys, the last of them its own."""

_FORWARD: dict[str, Any] = {
    "attributes": _ATTRIBUTES,
    "dtype": _dtypes,
    "outputs": 2,
    "saved": 1,
    "precision": "low",
    "index": _counted,
    "kernel": "attention",
    "work": _work(1, 1),
}
_BACKWARD: dict[str, Any] = {
    "attributes": _ATTRIBUTES,
    "dtype": _grad_dtypes(3),
    "outputs": 3,
    "linear": [{5}],
    "index": _counted,
    "kernel": "attention",
    "work": _work(3, 2),
}

op(  # q (.., s, e), k (.., t, e), v (.., t, f), a mask that is added -> (.., s, f), and the rows' log-sum-exp, saved
    "Attention",  # a row that is masked entirely (all of it -inf) gives 0, and saves 0
    axes=_axes(["s e", "t e", "t f"], lambda rank: "... s f, ... s"),
    eval=_attention,
    grad=_emit_grad,
    definition=_definition,
    **_FORWARD,
)
op(  # the gradients of q, k and v, from these, the two results, the gradient of the first, and the mask
    "AttentionGrad",
    axes=_axes(["s e", "t e", "t f", "s f", "s", "s f"], lambda rank: "... s e, ... t e, ... t f"),
    eval=_attention_grad,
    **_BACKWARD,
)
op(  # from the same, the gradient of the mask, for a trained one (position biases)
    "AttentionGradMask",
    attributes=_ATTRIBUTES,
    axes=_axes(["s e", "t e", "t f", "s f", "s", "s f"], lambda rank: "mask"),
    dtype=_grad_dtypes(1),
    linear=[{5}],
    index=_counted,
    eval=_mask_grad,
    kernel="attention",
    work=_work(1, 1),
)

# ---------------------------------------------------------------- grouped queries


def _grouped_shapes(attrs: Attrs, q: Shape, k: Shape, v: Shape, mask: Shape | None = None) -> list[Shape]:
    _check_window(attrs)
    if len(q) < 3:
        raise IRTypeError(f"operand 0: expected rank 3 or more, got shape {q}")
    heads = len(q) - 3
    if len(k) != len(q) or k[:heads] != q[:heads] or k[-1] != q[-1] or not k[heads] or q[heads] % k[heads]:
        raise IRTypeError(f"operand 1: expected heads that divide those of operand 0, of shape {q}, got shape {k}")
    expect_shape(2, v, (*k[:-1], v[-1] if v else 0))
    if mask is not None:
        _check_mask(3, mask, (*q[:-1], k[-2]))
    return [(*q[:-1], v[-1]), q[:-1]]


def _grouped_grad_shapes(
    attrs: Attrs, q: Shape, k: Shape, v: Shape, y: Shape, lse: Shape, d: Shape, mask: Shape | None = None
) -> list[Shape]:
    made = _grouped_shapes(attrs, q, k, v)
    for n, (got, want) in enumerate(zip((y, lse, d), (*made, made[0]), strict=True), 3):
        expect_shape(n, got, want)
    if mask is not None:
        _check_mask(6, mask, (*q[:-1], k[-2]))
    return [q, k, v]


def _grouped_shard(operands: str, results: str) -> ShardRule:
    """Of ops whose operands and results have each the heads of queries (q) or of keys (k), or are a mask (m), which may
    be missing: the sharding of a dim.

    Heads of queries are those of keys times those that share one: either factor may be split. Where it is the second,
    or the length of the queries, every device has all heads of keys, and a part of the sum over what shares them.
    """

    def shard(
        attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape], slot: int, split: Shard, n: int
    ) -> FactorMapping | None:
        kind = operands[slot] if slot >= 0 else results[~slot]
        rank, heads, shared = len(ins[0]), ins[0][-3], ins[1][-3]
        at, factors, apart = rank - 3, (shared, heads // shared), rank - len(ins[-1])
        if kind == "m":
            split = Shard(split.dim + apart, split.outer)
        queries, keys = split, split if split.dim <= at else REPLICATE
        if split.dim == at and kind == "k":
            there = reshaped(factors, (heads,), Shard(0, split.outer), n)
            if there is None:
                return None
            queries = Shard(at, there.outer)
        elif split.dim == at:
            there = reshaped((heads,), factors, Shard(0, split.outer), n)
            if there is None or reshaped(factors, (heads,), there, n) is not Shard(0, split.outer):
                return None
            keys = REPLICATE if there.dim else Shard(at, there.outer)
        elif split.dim > at + 1 or (split.dim == at + 1 and kind == "k"):
            return None
        split_too = queries.dim >= apart and ins[-1][queries.dim - apart] > 1
        mask = Shard(queries.dim - apart, queries.outer) if split_too else REPLICATE
        placed = {"q": queries, "k": keys, "m": mask}
        made = {"q": queries, "k": SUM if keys is REPLICATE else keys}
        return FactorMapping(
            tuple([placed[kind] for kind in operands[: len(ins)]]), tuple([made[kind] for kind in results])
        )

    return shard


def each_head(f: FunctionMaker, x: Value, heads: int) -> Value:
    """Keys or values once for each of that many heads of queries, several times in a row if they share it."""
    *lead, shared, t, e = shape_of(x)
    if shared == heads:
        return x
    x = f.emit("Reshape", x, shape=(*lead, shared, 1, t, e))
    x = f.emit("Expand", x, shape=(*lead, shared, heads // shared, t, e))
    return f.emit("Reshape", x, shape=(*lead, heads, t, e))


def _grouped_definition(f: FunctionMaker, o: Op) -> list[Value]:
    q, k, v, *mask = o.inputs
    heads = shape_of(q)[-3]
    return list(f.add_op("Attention", None, [q, *[each_head(f, x, heads) for x in (k, v)], *mask], o.attributes))


def _grouped_grad_definition(f: FunctionMaker, o: Op) -> list[Value]:
    q, k, v, *saved = o.inputs
    heads, shared = shape_of(q)[-3], shape_of(k)[-3]
    operands = [q, *[each_head(f, x, heads) for x in (k, v)], *saved]
    dq, *wide = f.add_op("AttentionGrad", None, operands, o.attributes)
    found = [dq]
    for x in wide:
        *lead, _, t, e = shape_of(x)
        x = f.emit("Reshape", x, shape=(*lead, shared, heads // shared, t, e))
        x = f.emit("ReduceSum", x, axes=(len(lead) + 1,), keepdims=1)
        found.append(f.emit("Reshape", x, shape=(*lead, shared, t, e)))
    return found


def _emit_grouped_grad(f: FunctionMaker, o: Op, d: Value, *saved: None) -> list[Value]:
    q, k, v, *mask = o.inputs
    grads = list(f.add_op("GroupedAttentionGrad", None, [q, k, v, *o.outputs, d, *mask], o.attributes))
    if mask:  # dropped again where the mask is not trained
        each = [each_head(f, x, shape_of(q)[-3]) for x in (k, v)]
        grads.append(f.add_op("AttentionGradMask", None, [q, *each, *o.outputs, d, *mask], o.attributes))
    return grads


def _repeated(xp: Any, x: Any, heads: int) -> Any:
    """Keys or values once for each of that many heads of queries."""
    *lead, shared, t, e = x.shape
    x = xp.broadcast_to(xp.expand_dims(x, -3), (*lead, shared, heads // shared, t, e))
    return xp.reshape(x, (*lead, heads, t, e))


def _grouped(xp: Any, q: Any, k: Any, v: Any, *mask: Any, **form: Any) -> tuple[Any, Any]:
    return _attention(xp, q, *[_repeated(xp, x, q.shape[-3]) for x in (k, v)], *mask, **form)


def _grouped_gradient(xp: Any, q: Any, k: Any, v: Any, *saved: Any, **form: Any) -> tuple[Any, ...]:
    heads, shared = q.shape[-3], k.shape[-3]
    dq, *each = _attention_grad(xp, q, *[_repeated(xp, x, heads) for x in (k, v)], *saved, **form)
    split = [xp.reshape(x, (*x.shape[:-3], shared, heads // shared, *x.shape[-2:])) for x in each]
    return dq, *[xp.sum(x, axis=-3) for x in split]


op(  # as Attention, where each head of keys and values is that of several heads of queries, in a row
    "GroupedAttention",
    infer=_grouped_shapes,
    shard=_grouped_shard("qkkm", "qq"),
    eval=_grouped,
    grad=_emit_grouped_grad,
    definition=_grouped_definition,
    timed_as="Attention",
    **_FORWARD,
)
op(  # the gradients of q, k and v, from these, the two results, the gradient of the first, and the mask
    "GroupedAttentionGrad",
    infer=_grouped_grad_shapes,
    shard=_grouped_shard("qkkqqqm", "qkk"),
    eval=_grouped_gradient,
    definition=_grouped_grad_definition,
    timed_as="AttentionGrad",
    **_BACKWARD,
)
