"""The optimizers of `ops.optim` by torch's fused kernels, for many weights at once and in place."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

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


def _rate(lr: float | torch.Tensor) -> float | torch.Tensor:
    """The learning rate as kernels take it: on GPUs they read float32; for meta tensors there is none."""
    if isinstance(lr, float | int) or lr.is_cpu:
        return lr
    return 1.0 if lr.is_meta else lr.float()


# on CPUs torch updates only the last few elements of 16-bit weights: pytorch/pytorch issue 191763
@_any_strides(narrow=False)
def sgd(
    gradients: Row,
    weights: Row,
    momenta: Row | tuple[()] = (),
    *,
    lr: float | torch.Tensor,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    skip: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """A step of SGD, without dampening."""
    torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
        weights,
        gradients,
        momenta,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=_rate(lr),
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,  # momenta start at zero, which is equivalent
        found_inf=None if skip is None else skip.float(),
    )


@_any_strides(narrow=True)
def adamw(
    gradients: Row,
    weights: Row,
    *moments: Row,
    step: torch.Tensor,
    lr: float | torch.Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    skip: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """Step number `step` of AdamW. `moments`: the running means of gradients and of their squares."""
    means, squares = moments
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        weights,
        gradients,
        means,
        squares,
        [],
        [step.float()] * len(weights),
        lr=_rate(lr),
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=None if skip is None else skip.float(),
    )


_FUSED = {SGD: sgd, ADAMW: adamw}


def update(op: Op) -> Callable[..., None]:
    """The in-place update of an optimizer op, or a group of them: (gradients, weights, *states[, step=])."""
    return functools.partial(_FUSED[op.spec.each or op.spec], **op.attributes.without("device", "place", "count"))
