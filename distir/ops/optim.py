"""Optimizers, as in torch.optim: from a weight, its gradient and their state to the next ones.

Values of 16 bits are computed in float32 and rounded once, at the end: in float16 AdamW's eps would be 0, and in
bfloat16 a small update would be lost twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.spec import Attrs, Spec, op
from distir.ir.type import DType, Float32, Float64
from distir.ops.rules import expect_shape, letters, same

CLIP_EPSILON = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm."""


def _in_float32(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule, which gives a result or several, with operands of less than 32 bits widened and its results rounded."""

    def update(xp: Any, w: Any, *operands: Any, **settings: Any) -> Any:
        narrow = w.dtype
        if narrow.itemsize >= Float32.size:
            return rule(xp, w, *operands, **settings)
        found = rule(xp, *[xp.cast(x, Float32) if x.dtype == narrow else x for x in (w, *operands)], **settings)
        if isinstance(found, tuple):
            return tuple(xp.asarray(x, dtype=narrow) for x in found)
        return xp.asarray(found, dtype=narrow)

    return update


def _alike(tensors: int, results: int, attrs: Attrs, shapes: Sequence[Shape]) -> str:
    """`tensors` operands of one shape, and perhaps a scalar, the step."""
    if len(shapes) not in (tensors, tensors + 1):
        raise IRTypeError(f"expected {tensors} operands, or one more, got {len(shapes)}")
    for k, s in enumerate(shapes):
        expect_shape(k, s, shapes[0] if k < tensors else ())
    row = " ".join(letters(len(shapes[0])))
    step = [""] * (len(shapes) - tensors)
    return f"{', '.join([row] * tensors + step)} -> {', '.join([row] * results)}"


def _sgd_count(attrs: Attrs) -> int:
    return 2 if attrs.get("momentum") else 1


def _sgd_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    if attrs.get("dampening") and len(shapes) < 4:
        raise IRTypeError(f"dampening needs 4 operands (weight, gradient, momentum, step), got {len(shapes)}")
    n = _sgd_count(attrs)
    return _alike(n + 1, n, attrs, shapes)


def _sgd(
    xp: Any,
    w: Any,
    g: Any,
    m: Any = None,
    step: Any = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> Any:
    if weight_decay:
        g = g + weight_decay * w
    if not momentum:
        return w - lr * g
    damped = g if not dampening else xp.where(step == 1, g, (1 - dampening) * g)
    m = momentum * m + damped
    return w - lr * (g + momentum * m if nesterov else m), m


SGD = op(  # (w, g) -> w; with momentum (w, g, m) -> w, m; with dampening also the number of this step, from 1
    "SGD",
    attributes="lr:number momentum:number? dampening:number? weight_decay:number? nesterov:flag?",
    axes=_sgd_axes,
    dtype=lambda attrs, *dtypes: same(attrs, *dtypes[: _sgd_count(attrs) + 1]) * _sgd_count(attrs),
    outputs=_sgd_count,
    donates=(0, 2),
    keeps_zero=True,
    gradient=1,
    eval=_in_float32(_sgd),
)


def _adamw(
    xp: Any,
    w: Any,
    g: Any,
    m: Any,
    v: Any,
    step: Any,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Any:
    """Decoupled weight decay (Loshchilov and Hutter, 2019), in the order of torch.optim.AdamW."""
    b1, b2 = betas
    w = w * (1 - lr * weight_decay)
    m = m + (1 - b1) * (g - m)
    v = b2 * v + (1 - b2) * g * g
    step = xp.cast(step, Float64)  # 1 - 0.999 in float32 has four digits
    step_size = xp.asarray(lr / (1 - b1**step), dtype=w.dtype)
    correction = xp.asarray((1 - b2**step) ** 0.5, dtype=w.dtype)
    return w - step_size * (m / (xp.sqrt(v) / correction + eps)), m, v


def _adamw_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    if len(shapes) != 5:
        raise IRTypeError(f"expected 5 operands (weight, gradient, two moments, step), got {len(shapes)}")
    return _alike(4, 3, attrs, shapes)


def _adamw_dtype(attrs: Attrs, *dtypes: DType) -> list[DType]:
    return same(attrs, *dtypes[:4]) * 3


ADAMW = op(  # (w, g, m, v, step) -> w, m, v; step is the number of this step, from 1
    "AdamW",
    attributes="lr:number? betas:pair? eps:number? weight_decay:number?",
    axes=_adamw_axes,
    dtype=_adamw_dtype,
    outputs=3,
    donates=(0, 2, 3),
    keeps_zero=True,
    gradient=1,
    eval=_in_float32(_adamw),
)


def _grouped(each: Spec) -> Spec:
    """Define the op that updates `count` weights at once, each with its gradient and states; the step is shared.

    SGD's dampening, with which the first step differs, is left out.
    """
    kinds = [f"{k}:{a.kind}{'?' if a.optional else ''}" for k, a in each.attributes.items() if k != "dampening"]

    def results(xp: Any, *operands: Any, count: int, **settings: Any) -> Any:
        found = [each.eval(xp, *row, **settings) for row in spec.rows({"count": count}, operands)]  # type: ignore[misc]
        return tuple([x for row in found for x in (row if isinstance(row, tuple) else (row,))])

    def flops(attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape]) -> tuple[float, float]:
        return sum(each.flops(attrs, row, outs) for row in spec.rows(attrs, ins)), 0.0

    spec = op(
        f"Grouped{each.name}",
        attributes=" ".join(["count:count", *kinds]),
        each=each,
        outputs=lambda attrs: attrs["count"] * each.count(attrs),
        work=flops,
        eval=results,
    )
    return spec


GROUPED = {each: _grouped(each) for each in (SGD, ADAMW)}
"""By optimizer the op that updates several weights at once."""


def _scaled_dtype(attrs: Attrs, x: DType, factor: DType) -> list[DType]:
    if not factor.floating:
        raise IRTypeError(f"operand 1: expected a floating type, got {factor}")
    return [x]


def _scaled(xp: Any, x: Any, factor: Any) -> Any:
    wide = xp.cast(x, Float32) if x.dtype.itemsize < Float32.size else x
    return xp.asarray(wide * xp.asarray(factor, dtype=wide.dtype), dtype=x.dtype)


op(  # from the sum of all squares, float64: the factor that limits the gradients' norm to `norm`
    "ClipFactor",
    attributes="norm:number",
    axes="->",
    dtype=same,
    eval=lambda xp, total, norm: xp.minimum(norm / (xp.sqrt(total) + CLIP_EPSILON), 1.0),
)
op(  # (x, a number) -> x times it, in x's dtype
    "Scale",
    axes=lambda attrs, shapes: f"{(row := ' '.join(letters(len(shapes[0]))))}, -> {row}",
    dtype=_scaled_dtype,
    linear=[{0}],
    donates=(0,),
    eval=_scaled,
)
