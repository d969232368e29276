"""Kernels of cross-entropy; each function takes the op's operands and attributes.

Of logits of 16 bits the loss and its gradient are one call each, which computes in float32 without holding all logits
in it: on GPUs one Triton kernel (there of float32 logits, too), elsewhere some rows at a time.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from distir.backends.tensors.layout import side_by_side
from distir.backends.tensors.torch_namespace import torch_dtype, written_out
from distir.ir.dtype import DType

aten: Any = torch.ops.aten

_CHUNK = 1 << 24
"""The most logits of 16 bits that are widened at once: 64 MiB in float32."""


def cross_entropy(
    x: torch.Tensor,
    label: torch.Tensor,
    ignore_index: int | None = None,
    result: DType | None = None,
    count: int | None = None,
    start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The classes are not sharded: `start` is 0."""
    x = x[..., :count]
    if _in_one_call(x):
        return row_losses(x, label, ignore_index, x.dtype if result is None else torch_dtype(result))
    logs = torch.log_softmax(x, -1)
    ignored = -100 if ignore_index is None else ignore_index
    flat = logs.reshape(-1, x.shape[-1]), label.reshape(-1).long()
    rows, _ = aten.nll_loss_forward.default(*flat, None, 0, ignored)
    # the log-sum-exp of each row: the difference of a logit and its log-probability
    return rows.reshape(tuple(label.shape)), x[..., 0] - logs[..., 0]


def cross_entropy_grad(
    x: torch.Tensor,
    label: torch.Tensor,
    lse: torch.Tensor,
    d: torch.Tensor,
    start: int,
    classes: int,
    ignore_index: int | None = None,
    count: int | None = None,
) -> torch.Tensor:
    if x.shape[-1] != classes:
        settings = {"start": start, "classes": classes, "ignore_index": ignore_index, "count": count}
        return written_out("CrossEntropyGrad", x)(x, label, lse, d, **settings)
    count = classes if count is None else count
    if _in_one_call(x):
        return logit_slopes(x, label, lse, d, ignore_index, count)
    if ignore_index is not None:
        d, label = d.masked_fill(label == ignore_index, 0), label.clamp(0, count - 1)
    y = torch.softmax(x[..., :count], -1).mul_(d.unsqueeze(-1))
    y.scatter_add_(-1, label.long().unsqueeze(-1), d.neg().unsqueeze(-1))
    return _widened(y, classes)


def _widened(y: torch.Tensor, classes: int) -> torch.Tensor:
    """With zeros in further classes."""
    return y if y.shape[-1] == classes else torch.nn.functional.pad(y, (0, classes - y.shape[-1]))


def _in_one_call(x: torch.Tensor) -> bool:
    return x.dtype.itemsize < 4 or (x.dtype == torch.float32 and x.device.type == "cuda")


# ---------------------------------------------------------------- one call, however many it makes


def row_losses(
    x: torch.Tensor, label: torch.Tensor, ignore_index: int | None, result: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row of logits, 0 where the label is `ignore_index`, and their log-sum-exp in float32.

    Under a TorchFunctionMode it is a call like torch's own: what it calls is chosen when run.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(row_losses, (x,), x, label, ignore_index, result)
    if x.device.type == "meta":
        loss, lse = [torch.empty(label.shape, dtype=dtype, device=x.device) for dtype in (result, torch.float32)]
        return loss, lse
    flat, labels, shape = x.reshape(-1, x.shape[-1]), label.reshape(-1), tuple(label.shape)
    if (kernels := _kernels(x)) is not None:
        loss, lse = kernels.row_losses(side_by_side(flat), labels, ignore_index, result)
        return loss.reshape(shape), lse.reshape(shape)
    index = labels.long() if ignore_index is None else labels.long().masked_fill(labels == ignore_index, 0)
    lse = torch.cat([torch.logsumexp(rows.float(), -1) for rows in flat.split(_rows_at_once(flat))])
    loss = lse - flat.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    loss = loss if ignore_index is None else loss.masked_fill(labels == ignore_index, 0)
    return loss.reshape(shape).to(result), lse.reshape(shape)


def logit_slopes(
    x: torch.Tensor, label: torch.Tensor, lse: torch.Tensor, d: torch.Tensor, ignore_index: int | None, count: int
) -> torch.Tensor:
    """The gradient of the logits, from the log-sum-exp of each row and the gradient `d` of its loss. The classes from
    `count` on are padding, of gradient 0.

    Under a TorchFunctionMode it is a call like torch's own: what it calls is chosen when run.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(logit_slopes, (x,), x, label, lse, d, ignore_index, count)
    if x.device.type == "meta":
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if (kernels := _kernels(x)) is not None:
        rows = [a.reshape(-1) for a in (label, lse, d)]
        flat = side_by_side(x.reshape(-1, x.shape[-1]))
        return kernels.logit_slopes(flat, *rows, ignore_index, count).reshape(x.shape)
    d = d.float() if ignore_index is None else d.float().masked_fill(label == ignore_index, 0)
    if torch.compiler.is_compiling():  # the compiler fuses all of it
        hit = torch.arange(count, device=x.device) == label.unsqueeze(-1)
        y = torch.exp(x[..., :count].float() - lse.unsqueeze(-1))
        return _widened((torch.where(hit, y - 1, y) * d.unsqueeze(-1)).to(x.dtype), x.shape[-1])
    label = label.long() if ignore_index is None else label.long().clamp(0, count - 1)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y[..., count:] = 0
    flat, slopes = [a.reshape(-1, x.shape[-1])[:, :count] for a in (x, y)]
    n = _rows_at_once(flat)
    columns = [a.reshape(-1, 1).split(n) for a in (label, lse, d)]
    for rows, out, labels, logs, weights in zip(flat.split(n), slopes.split(n), *columns, strict=True):
        chunk = rows.float().sub_(logs).exp_().mul_(weights)
        out.copy_(chunk.scatter_add_(-1, labels, weights.neg()))
    return y


def _rows_at_once(flat: torch.Tensor) -> int:
    """How many rows of logits are widened at once."""
    rows, classes = flat.shape
    return max(1, rows if torch.compiler.is_compiling() else _CHUNK // max(1, classes))


def _kernels(x: torch.Tensor) -> ModuleType | None:
    """The Triton kernels for these logits, None where torch's are called."""
    return None if torch.compiler.is_compiling() or x.device.type != "cuda" else _triton(x.device)


@functools.cache
def _triton(device: torch.device) -> ModuleType | None:
    """The Triton kernels of a GPU; None without Triton, or without the C compiler that it needs."""
    try:
        from distir.backends.lowering import loss_triton

        x, label = torch.zeros(1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        loss_triton.row_losses(x, label, None, x.dtype)
    except Exception:  # of the import, of Triton, or of the compiler
        return None
    return loss_triton
