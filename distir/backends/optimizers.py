"""The optimizers of `ops.optim`, for many weights at once and in place: torch's fused kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from distir.ir.errors import ModelError
from distir.ir.function import Function, Op, Value
from distir.ir.kept import kept

Row = list[torch.Tensor]


def _takes_any(narrow: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes of a kernel one for tensors of any strides: it goes through memory as it lies, and does not look at them.

    Its first row of tensors are gradients, which it reads, the others it changes. Of what lies otherwise it gets
    copies, of one weight at a time; of 16 bits on CPUs, unless it is right for them (`narrow`), copies in float32.
    """

    def taken(x: torch.Tensor) -> bool:
        return x.is_contiguous() and (narrow or x.itemsize >= 4 or not x.is_cpu)

    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous() if narrow or x.itemsize >= 4 or not x.is_cpu else x.float().contiguous()

    def wrapped(kernel: Callable[..., None]) -> Callable[..., None]:
        def update(gradients: Row, *changed: Row, **settings: Any) -> None:
            rows = [gradients, *changed]
            if all([all(map(taken, row)) for row in rows]):
                kernel(*rows, **settings)
                return
            whole = [all(taken(row[k]) for row in rows if row) for k in range(len(gradients))]
            if any(whole):
                kernel(*[list(itertools.compress(row, whole)) for row in rows], **settings)
            for k in [k for k, lies in enumerate(whole) if not lies]:
                one = [row[k : k + 1] for row in rows]
                copies = [[copied(x) for x in row] for row in one]
                kernel(*copies, **settings)
                for row, changed_copies in zip(one[1:], copies[1:], strict=True):
                    for x, y in zip(row, changed_copies, strict=True):
                        x.copy_(y)

        return update

    return wrapped


# torch leaves weights of 16 bits on CPUs as they are, but for the last few elements: pytorch/pytorch issue 191763
@_takes_any(narrow=False)
def sgd(
    gradients: Row,
    weights: Row,
    momenta: Row | tuple[()] = (),
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    **_: Any,
) -> None:
    """A step of SGD, without dampening."""
    torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
        weights,
        gradients,
        momenta,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,  # momenta begin as zeros, which comes to the same
    )


@_takes_any(narrow=True)
def adamw(
    gradients: Row,
    weights: Row,
    means: Row,
    squares: Row,
    *,
    step: torch.Tensor,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """A step of AdamW, the `step`-th."""
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        weights,
        gradients,
        means,
        squares,
        [],
        [step.float()] * len(weights),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


_FUSED: dict[str, Callable[..., None]] = {"SGD": sgd, "AdamW": adamw}


def steps_together(op: Op) -> bool:
    """Whether several of this op may be one call."""
    return op.spec.name in _FUSED and not op.attributes.get("dampening")


def gradient_of(op: Op) -> Value:
    """An optimizer's gradient; operands before and after it are changed, but for a step at the end."""
    if op.spec.gradient is None:
        raise ModelError(f"{op}: not an optimizer")
    return op.inputs[op.spec.gradient]


@kept
def put_together(function: Function) -> Function:
    """The function with its optimizers put off until what they give is used: they then follow one another, although
    weights are cut and gradients come in between.
    """
    ops: list[Op] = []
    waiting: list[Op] = []
    made: set[Value] = set()
    for op in function.ops:
        if steps_together(op) and made.isdisjoint(op.inputs):
            waiting.append(op)
            made.update(op.outputs)
            continue
        if not made.isdisjoint(op.inputs):
            ops += waiting
            waiting, made = [], set()
        ops.append(op)
    ops += waiting
    if ops == list(function.ops):
        return function
    return Function(function.name, function.inputs, tuple(ops), function.outputs, function.updates, function.sources)


def update(op: Op) -> Callable[..., None]:
    """What does the work of ops like this one: (gradients, weights, *states[, step=]) changes weights and
    states.
    """
    return functools.partial(_FUSED[op.spec.name], **op.attributes.without("device", "place"))
