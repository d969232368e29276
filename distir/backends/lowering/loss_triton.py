"""Triton kernels of cross-entropy: the loss of rows of logits, and their gradient. Each reads the logits once.

Logits (n, v) have stride 1 within a row. All is computed in float32. A label out of range has the loss nan.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_BLOCK = tl.constexpr(4096)
"""The logits of a row that a program of the GPU has at a time."""
_WARPS = 8


def row_losses(
    x: torch.Tensor, label: torch.Tensor, ignore_index: int | None, result: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, 0 where the label is `ignore_index`, and the log-sum-exp of its logits."""
    rows, classes = x.shape
    loss, lse = [torch.empty(rows, dtype=dtype, device=x.device) for dtype in (result, torch.float32)]
    launch: Any = _row_losses[(rows,)]  # pyright: ignore[reportIndexIssue]
    with torch.cuda.device_of(x):  # Triton launches on the current device
        launch(x, label.contiguous(), loss, lse, x.stride(0), classes, ignore_index, num_warps=_WARPS)
    return loss, lse


def logit_slopes(
    x: torch.Tensor, label: torch.Tensor, lse: torch.Tensor, d: torch.Tensor, ignore_index: int | None, count: int
) -> torch.Tensor:
    """The gradient of the logits, from the log-sum-exp of each row and the gradient `d` of its loss. The classes from
    `count` on are padding, of gradient 0."""
    rows, width = x.shape
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    d = d if ignore_index is None else d.masked_fill(label == ignore_index, 0)
    columns = [a.contiguous() for a in (label, lse, d)]
    launch: Any = _logit_slopes[(rows,)]  # pyright: ignore[reportIndexIssue]
    with torch.cuda.device_of(x):
        launch(x, *columns, y, x.stride(0), width, count, num_warps=_WARPS)
    return y


@triton.jit
def _row_losses(x, label, loss, lse, stride, CLASSES: tl.constexpr, IGNORED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # there may be more than 2^31 logits
    x += row * stride
    top = float("-inf")
    total = 0.0
    for begin in range(0, CLASSES, _BLOCK):
        column = begin + tl.arange(0, _BLOCK)
        part = tl.load(x + column, mask=column < CLASSES, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(part, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(part - shift), 0)
        top = higher
    log = tl.log(total)
    tl.store(lse + row, top + log)
    k = tl.load(label + row).to(tl.int64)
    picked = tl.load(x + k, mask=(k >= 0) & (k < CLASSES), other=float("nan")).to(tl.float32)
    value = top - picked + log  # in this order, exact where logits are large
    if IGNORED is not None:
        value = tl.where(k == IGNORED, 0.0, value)
    tl.store(loss + row, value.to(loss.dtype.element_ty))


@triton.jit
def _logit_slopes(x, label, lse, d, y, stride, WIDTH: tl.constexpr, CLASSES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    y += row * WIDTH
    log = tl.load(lse + row)
    k = tl.load(label + row).to(tl.int64)
    weight = tl.load(d + row).to(tl.float32)
    for begin in range(0, WIDTH, _BLOCK):
        column = begin + tl.arange(0, _BLOCK)
        part = tl.load(x + column, mask=column < CLASSES, other=0.0).to(tl.float32)
        slope = tl.exp(part - log)
        slope = tl.where(column == k, slope - 1.0, slope) * weight
        slope = tl.where(column < CLASSES, slope, 0.0)
        tl.store(y + column, slope.to(y.dtype.element_ty), mask=column < WIDTH)
