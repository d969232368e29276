"""How pieces of a tensor lie in memory: cut so that each part is in one place, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

Room = Callable[..., torch.Tensor]
"""Memory for a tensor of a shape and a dtype, as `torch.empty` gives it."""
WIDER = {torch.int16: torch.int32}
"""What neither gloo nor NCCL reduces is reduced as this."""


def split_front(x: torch.Tensor, dim: int, outer: int, n: int) -> torch.Tensor:
    """(n, ...): the n parts of `x`, whose `dim` reads as (outer, n, rest); where it can be without copying."""
    shape = x.shape
    y = x.reshape(*shape[:dim], outer, n, shape[dim] // (outer * n), *shape[dim + 1 :]).movedim(dim + 1, 0)
    return y.reshape(n, *shape[:dim], shape[dim] // n, *shape[dim + 1 :])


def merge_front(x: torch.Tensor, dim: int, outer: int, room: Room = torch.empty) -> torch.Tensor:
    """The inverse of `split_front`; what must be copied is copied to `room`."""
    n, *shape = x.shape
    y = x.reshape(n, *shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]).movedim(0, dim + 1)
    whole = (*shape[:dim], shape[dim] * n, *shape[dim + 1 :])
    if y.is_contiguous():
        return y.view(whole)
    out = room(whole, dtype=x.dtype)
    out.view(y.shape).copy_(y)
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
