"""How pieces of a tensor lie in memory: cut so that each part is in one place, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

Room = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Gives memory for a tensor, where the tensors are that are computed with."""
WIDER = {torch.int16: torch.int32}
"""What neither gloo nor NCCL reduces is reduced as this."""


def split_front(x: torch.Tensor, dim: int, outer: int, n: int, room: Room | None = None) -> torch.Tensor:
    """(n, ...): the n parts of `x`, whose `dim` reads as (outer, n, rest). What must be copied is copied to
    `room`, by default to new memory."""
    shape = x.shape
    y = x.reshape(*shape[:dim], outer, n, shape[dim] // (outer * n), *shape[dim + 1 :]).movedim(dim + 1, 0)
    parts = (n, *shape[:dim], shape[dim] // n, *shape[dim + 1 :])
    return y.reshape(parts) if outer == 1 or y.is_contiguous() else _packed(y, parts, room)


def merge_front(x: torch.Tensor, dim: int, outer: int, room: Room | None = None) -> torch.Tensor:
    """The inverse of `split_front`."""
    n, *shape = x.shape
    y = x.reshape(n, *shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]).movedim(0, dim + 1)
    whole = (*shape[:dim], shape[dim] * n, *shape[dim + 1 :])
    return y.view(whole) if y.is_contiguous() else _packed(y, whole, room)


def _packed(x: torch.Tensor, shape: Sequence[int], room: Room | None) -> torch.Tensor:
    out = torch.empty(shape, dtype=x.dtype, device=x.device) if room is None else room(shape, x.dtype)
    out.view(x.shape).copy_(x)
    return out


def merge(parts: Sequence[torch.Tensor], dim: int, outer: int) -> torch.Tensor:
    """The whole, of whose `dim`, read as (outer, n, rest), these are the n parts."""
    return merge_front(torch.stack(tuple(parts)), dim, outer)


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy, in which the elements of a row follow each other in memory; others may lie anywhere.

    To who listens to torch's functions it is one of them: whether it copies is seen at every call anew.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(side_by_side, (x,), x)
    return x if x.stride(-1) == 1 else x.contiguous()


def movable(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a row, in a type that every backend moves; of the same memory."""
    row = x.view(-1)
    return row.view(torch.uint8) if x.dtype in WIDER else row


def combine(parts: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
    """The sum, maximum or mean of tensors, in order, as a new one if there are several."""
    if len(parts) == 1:
        return parts[0]
    total = torch.maximum(parts[0], parts[1]) if kind == "max" else parts[0] + parts[1]
    for x in parts[2:]:
        total = torch.maximum(total, x, out=total) if kind == "max" else total.add_(x)
    return total.div_(len(parts)) if kind == "mean" else total
