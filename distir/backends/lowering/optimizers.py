"""The optimizers of `ops.optim` by torch's fused kernels, for many weights at once and in place."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from distir.ir.function import Op
from distir.ops.optim import ADAMW, SGD

Row = list[torch.Tensor]


def _any_strides(narrow: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator for a fused kernel, which ignores strides: makes it accept tensors of any strides.

    The first row of tensors are gradients, which are read; the others are updated. Tensors that are not contiguous are
    copied, one weight at a time; so are gradients of another dtype than their weight, and 16-bit tensors on CPUs, as
    float32, unless the kernel supports them (`narrow`).
    """

    def taken(x: torch.Tensor) -> bool:
        return x.is_contiguous() and (narrow or x.itemsize >= 4 or not x.is_cpu)

    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous() if narrow or x.itemsize >= 4 or not x.is_cpu else x.float().contiguous()

    def wrapped(kernel: Callable[..., None]) -> Callable[..., None]:
        def update(gradients: Row, *changed: Row, **settings: Any) -> None:
            rows = [gradients, *changed]
            alike = [g.dtype is w.dtype for g, w in zip(gradients, changed[0], strict=True)]
            if all(alike) and all([all(map(taken, row)) for row in rows]):
                kernel(*rows, **settings)
                return
            whole = [alike[k] and all(taken(row[k]) for row in rows if row) for k in range(len(gradients))]
            if any(whole):
                kernel(*[list(itertools.compress(row, whole)) for row in rows], **settings)
            for k in [k for k, lies in enumerate(whole) if not lies]:
                one = [row[k : k + 1] for row in rows]
                copies = [[copied(x) for x in row] for row in one]
                copies[0] = [g.to(w.dtype) for g, w in zip(copies[0], copies[1], strict=True)]
                kernel(*copies, **settings)
                for row, changed_copies in zip(one[1:], copies[1:], strict=True):
                    for x, y in zip(row, changed_copies, strict=True):
                        if x is not y:
                            x.copy_(y)

        return update

    return wrapped


def _loses_rate(rate: Any, weights: Row) -> TypeGuard[torch.Tensor]:
    """Whether the kernel reads the learning rate in float32, as on GPUs any tensor, though the weights are float64."""
    return isinstance(rate, torch.Tensor) and not (rate.is_cpu or rate.is_meta) and weights[0].dtype is torch.float64


def _exact_rate(kernel: Callable[..., None]) -> Callable[..., None]:
    """Decorator for a fused kernel: makes it as exact in its learning rate as in its weights. An update is the rate
    times something that does not depend on it, which the kernel with rate 1 computes."""

    def update(gradients: Row, weights: Row, *states: Row, **settings: Any) -> None:
        rate = settings.get("lr")
        if not _loses_rate(rate, weights):
            kernel(gradients, weights, *states, **settings)
            return
        ends = [x.clone() for x in weights]
        kernel(gradients, ends, *states, **settings | {"lr": 1.0})
        for x, end in zip(weights, ends, strict=True):
            x.lerp_(end, rate.to(x.dtype))

    return update


def _numbers(settings: dict[str, Any], lr: float) -> dict[str, Any]:
    """The learning rate, and whether to skip the step, as kernels take them; a meta tensor has no rate."""
    rate, skip = settings.get("lr", lr), settings.get("skip")
    if isinstance(rate, torch.Tensor) and not rate.is_cpu:
        rate = 1.0 if rate.is_meta else rate.float()
    return {"lr": rate, "found_inf": None if skip is None else skip.float()}


# on CPUs torch updates only the last few elements of 16-bit weights: pytorch/pytorch issue 191763
@_any_strides(narrow=False)
@_exact_rate
def sgd(gradients: Row, weights: Row, momenta: Row | tuple[()] = (), **settings: Any) -> None:
    """A step of SGD, without dampening; `settings` are the op's attributes, and the numbers that weights share."""
    torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
        weights,
        gradients,
        momenta,
        weight_decay=settings.get("weight_decay", 0.0),
        momentum=settings.get("momentum", 0.0),
        dampening=0.0,
        nesterov=settings.get("nesterov", False),
        maximize=False,
        is_first_step=False,  # momenta start at zero, which is equivalent
        **_numbers(settings, 1e-3),
    )


@_any_strides(narrow=True)
@_exact_rate
def adamw(gradients: Row, weights: Row, means: Row, squares: Row, *, step: torch.Tensor, **settings: Any) -> None:
    """Step number `step` of AdamW, with the running means of gradients and of their squares; `settings` as of `sgd`."""
    first, second = settings.get("betas", (0.9, 0.999))
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        weights,
        gradients,
        means,
        squares,
        [],
        [step.float()] * len(weights),
        beta1=first,
        beta2=second,
        weight_decay=settings.get("weight_decay", 1e-2),
        eps=settings.get("eps", 1e-8),
        amsgrad=False,
        maximize=False,
        **_numbers(settings, 1e-3),
    )


_FUSED = {SGD: sgd, ADAMW: adamw}


def update(op: Op) -> Callable[..., None]:
    """The in-place update of an optimizer op, or a group of them: (gradients, weights, *states[, step=])."""
    return functools.partial(_FUSED[op.spec.each or op.spec], **op.attributes.without("device", "place", "count"))
