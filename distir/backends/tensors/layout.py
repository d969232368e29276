"""Memory layout of pieces of a tensor: split into contiguous parts, and merged again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Allocates an uninitialised tensor of a shape and dtype on the compute device."""
WIDER = {torch.int16: torch.int32}
"""Types that neither gloo nor NCCL reduces, and the type in which they are reduced."""


def split_front(x: torch.Tensor, dim: int, outer: int, n: int, allocate: Allocate | None = None) -> torch.Tensor:
    """(n, ...): the n parts of `x`, whose `dim` reads as (outer, n, rest). A copy, if needed, is made in memory from
    `allocate` (default: torch.empty)."""
    shape = x.shape
    y = x.reshape(*shape[:dim], outer, n, shape[dim] // (outer * n), *shape[dim + 1 :]).movedim(dim + 1, 0)
    parts = (n, *shape[:dim], shape[dim] // n, *shape[dim + 1 :])
    return y.reshape(parts) if outer == 1 or y.is_contiguous() else _packed(y, parts, allocate)


def merge_front(x: torch.Tensor, dim: int, outer: int, allocate: Allocate | None = None) -> torch.Tensor:
    """The inverse of `split_front`."""
    n, *shape = x.shape
    y = x.reshape(n, *shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]).movedim(0, dim + 1)
    whole = (*shape[:dim], shape[dim] * n, *shape[dim + 1 :])
    return y.view(whole) if y.is_contiguous() else _packed(y, whole, allocate)


def _packed(x: torch.Tensor, shape: Sequence[int], allocate: Allocate | None) -> torch.Tensor:
    out = torch.empty(shape, dtype=x.dtype, device=x.device) if allocate is None else allocate(shape, x.dtype)
    out.view(x.shape).copy_(x)
    return out


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a contiguous copy, with stride 1 in the last dim.

    Under a TorchFunctionMode it is a call like torch's own, since whether it copies depends on the operand's strides.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(side_by_side, (x,), x)
    return x if x.stride(-1) == 1 else x.contiguous()


def movable(x: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous tensor, in a type that every backend can transfer."""
    row = x.view(-1)
    return row.view(torch.uint8) if x.dtype in WIDER else row


def combine(parts: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
    """The sum, maximum or mean of tensors, in order; a new tensor if there are several."""
    if len(parts) == 1:
        return parts[0]
    total = torch.maximum(parts[0], parts[1]) if kind == "max" else parts[0] + parts[1]
    for x in parts[2:]:
        total = torch.maximum(total, x, out=total) if kind == "max" else total.add_(x)
    return total.div_(len(parts)) if kind == "mean" else total
