"""Optimizers, as in torch.optim: from a weight, its gradient and their state to the next ones.

Operands: the weight, its gradient, its states, and then numbers that all weights share: `step`, the number of this step
from 1; the learning rate, if it is `scheduled`; and, if it `skips`, whether this step changes nothing. The gradient may
be of 16 bits where the weight is not.

Values of 16 bits are computed in float32 and rounded once, at the end: in float16 AdamW's eps would be 0, and in
bfloat16 a small update would be lost twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.spec import Attrs, Spec, op
from distir.ir.type import Bool, DType, Float32, Float64
from distir.ops.rules import expect_shape, letters, same

CLIP_EPSILON = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm."""


def shared_numbers(attrs: Attrs, count: int) -> list[str]:
    """The names of an optimizer's last `count` operands, which all weights share."""
    last = [name for flag, name in (("scheduled", "lr"), ("skips", "skip")) if attrs.get(flag)]
    return [*["step"] * (count - len(last)), *last]


def _stepping(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The `eval` of a rule, which gives a result or several: values of less than 32 bits are widened, its results
    rounded; nothing changes if the step is skipped."""

    def update(xp: Any, w: Any, g: Any, *operands: Any, **settings: Any) -> Any:
        given = [*operands]
        skip = given.pop() if settings.pop("skips", False) else None
        if settings.pop("scheduled", False):
            settings["lr"] = given.pop()
        narrow, wide = w.dtype, w.dtype.itemsize < Float32.size
        before = [w, *[x for x in given if x.shape == w.shape and x.dtype == narrow]]
        row = [xp.cast(x, Float32) if wide and x.dtype == narrow else x for x in (w, *given)]
        found = rule(xp, row[0], xp.asarray(g, dtype=row[0].dtype), *row[1:], **settings)
        results = [xp.asarray(x, dtype=narrow) for x in (found if isinstance(found, tuple) else (found,))]
        if skip is not None:
            results = [xp.where(skip, old, new) for old, new in zip(before, results, strict=False)]
        return tuple(results) if isinstance(found, tuple) else results[0]

    return update


def _alike(tensors: int, results: int, attrs: Attrs, shapes: Sequence[Shape]) -> str:
    """`tensors` operands of one shape, then numbers."""
    numbers = len(shapes) - tensors
    for k, s in enumerate(shapes):
        expect_shape(k, s, shapes[0] if k < tensors else ())
    row = " ".join(letters(len(shapes[0])))
    return f"{', '.join([row] * tensors + [''] * numbers)} -> {', '.join([row] * results)}"


def _dtypes(tensors: int, results: int, attrs: Attrs, dtypes: Sequence[DType]) -> list[DType]:
    """Weight and states are of one dtype, the gradient of that or of 16 bits."""
    w, g, *states = dtypes[:tensors]
    if not (g.floating and g.size == 2 < w.size):
        same(attrs, w, g)
    same(attrs, w, w, *states)
    for k, name in enumerate(shared_numbers(attrs, len(dtypes) - tensors), tensors):
        if (dtypes[k] is Bool) != (name == "skip") or (name == "lr" and not dtypes[k].floating):
            expected = {"skip": "bool", "lr": "a floating type", "step": "a number"}[name]
            raise IRTypeError(f"operand {k}: expected {expected}, got {dtypes[k]}")
    return [w] * results


def _sgd_count(attrs: Attrs) -> int:
    return 2 if attrs.get("momentum") else 1


def _sgd_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    n, numbers = _sgd_count(attrs), len(shared_numbers(attrs, 0))
    if attrs.get("dampening") and len(shapes) - numbers != 4:
        raise IRTypeError(f"dampening needs 4 operands (weight, gradient, momentum, step), got {len(shapes)}")
    if not attrs.get("dampening") and len(shapes) - numbers != n + 1:
        raise IRTypeError(f"expected {n + 1 + numbers} operands, got {len(shapes)}")
    return _alike(n + 1, n, attrs, shapes)


def _sgd(
    xp: Any,
    w: Any,
    g: Any,
    m: Any = None,
    step: Any = None,
    *,
    lr: Any,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> Any:
    lr = lr if isinstance(lr, float | int) else xp.asarray(lr, dtype=w.dtype)
    if weight_decay:
        g = g + weight_decay * w
    if not momentum:
        return w - lr * g
    damped = g if not dampening else xp.where(step == 1, g, (1 - dampening) * g)
    m = momentum * m + damped
    return w - lr * (g + momentum * m if nesterov else m), m


SGD = op(  # (w, g) -> w; with momentum (w, g, m) -> w, m; with dampening also the number of this step, from 1
    "SGD",
    attributes="lr:number momentum:number? dampening:number? weight_decay:number? nesterov:flag? scheduled:flag? "
    "skips:flag?",
    axes=_sgd_axes,
    dtype=lambda attrs, *dtypes: _dtypes(_sgd_count(attrs) + 1, _sgd_count(attrs), attrs, dtypes),
    outputs=_sgd_count,
    donates=(0, 2),
    keeps_zero=True,
    gradient=1,
    eval=_stepping(_sgd),
)


def _adamw(
    xp: Any,
    w: Any,
    g: Any,
    m: Any,
    v: Any,
    step: Any,
    *,
    lr: Any = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Any:
    """Decoupled weight decay (Loshchilov and Hutter, 2019), in the order of torch.optim.AdamW."""
    b1, b2 = betas
    factor = 1 - lr * weight_decay
    w = w * (factor if isinstance(factor, float | int) else xp.asarray(factor, dtype=w.dtype))
    m = m + (1 - b1) * (g - m)
    v = b2 * v + (1 - b2) * g * g
    step = xp.cast(step, Float64)  # 1 - 0.999 in float32 has four digits
    step_size = xp.asarray(lr / (1 - b1**step), dtype=w.dtype)
    correction = xp.asarray((1 - b2**step) ** 0.5, dtype=w.dtype)
    return w - step_size * (m / (xp.sqrt(v) / correction + eps)), m, v


def _adamw_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    expected = 5 + len(shared_numbers(attrs, 0))
    if len(shapes) != expected:
        raise IRTypeError(f"expected {expected} operands (weight, gradient, two moments, step ...), got {len(shapes)}")
    return _alike(4, 3, attrs, shapes)


def _adamw_dtype(attrs: Attrs, *dtypes: DType) -> list[DType]:
    return _dtypes(4, 3, attrs, dtypes)


ADAMW = op(  # (w, g, m, v, step) -> w, m, v; step is the number of this step, from 1
    "AdamW",
    attributes="lr:number? betas:pair? eps:number? weight_decay:number? scheduled:flag? skips:flag?",
    axes=_adamw_axes,
    dtype=_adamw_dtype,
    outputs=3,
    donates=(0, 2, 3),
    keeps_zero=True,
    gradient=1,
    eval=_stepping(_adamw),
)


def _grouped(each: Spec) -> Spec:
    """Define the op that updates `count` weights at once, each with its gradient and states; the step is shared.

    SGD's dampening, with which the first step differs, is left out.
    """
    kinds = [f"{k}:{a.kind}{'?' if a.optional else ''}" for k, a in each.attributes.items() if k != "dampening"]

    def results(xp: Any, *operands: Any, count: int, **settings: Any) -> Any:
        found = [each.eval(xp, *row, **settings) for row in spec.rows({"count": count, **settings}, operands)]  # type: ignore[misc]
        return tuple([x for row in found for x in (row if isinstance(row, tuple) else (row,))])

    def flops(attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape]) -> tuple[float, float]:
        alike = Counter(map(tuple, spec.rows(attrs, ins)))
        return sum(n * each.flops(attrs, row, outs) for row, n in alike.items()), 0.0

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


def _learning_rate(
    xp: Any, step: Any, lr: float, warmup: int = 0, decay: str = "none", steps: int = 0, least: float = 0.0
) -> Any:
    step = xp.cast(step, Float64)
    rate = lr * xp.clip(step / max(1, warmup), 0, 1)
    if decay == "none":
        return rate
    done = xp.clip((step - warmup) / max(1, steps - warmup), 0, 1)
    left = 1 - done if decay == "linear" else 0.5 * (1 + xp.cos(math.pi * done))
    return xp.where(step < warmup, rate, least + (lr - least) * left)


op(  # the learning rate of a step, numbered from 1: linear from 0 to `lr` over `warmup` steps, then down to `least`,
    # which is reached at number `steps`: linearly, or along half a cosine (Loshchilov and Hutter, 2017)
    "LearningRate",
    attributes="lr:number warmup:index? decay:none|linear|cosine? steps:index? least:number?",
    axes="->",
    dtype=lambda attrs, step: [Float64],
    eval=_learning_rate,
)


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
