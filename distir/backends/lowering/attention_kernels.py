"""Torch's attention kernels, chosen by device and operands when a rank's program is lowered.

All save the same log-sum-exp of each row, so that the gradient may use another kernel than the forward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distir.backends.tensors.layout import side_by_side
from distir.backends.tensors.torch_namespace import written_out

aten: Any = torch.ops.aten

Results = tuple[torch.Tensor, ...]
_HALVES = (torch.float16, torch.bfloat16)
_AMPERE = 8
"""The first GPU generation (compute capability) with flash kernels and bfloat16."""
_ALIGNED = 16
"""The bytes of a row of one head must be a multiple of this."""
_LANES = 8
"""The efficient kernel needs the row length of a mask to be a multiple of this."""
_ROWS = 32
"""The efficient kernel needs the row length of the log-sum-exp to be a multiple of this."""
_RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
_SHARED_SINCE = (2, 9)
"""The first release whose kernel for CPUs takes fewer heads of keys than of queries (pytorch/pytorch, pull request
157893). It sums their gradients in the dtype of keys, so that it is used for 32 bits and more."""


def attention(
    *operands: torch.Tensor,
    scale: float = 1.0,
    causal: bool = False,
    start: int = 0,
    window: int | None = None,
    softcap: float = 0.0,
) -> Results:
    """The results of the eval of `Attention`, or `GroupedAttention`; operands: q, k, v, maybe a mask."""
    q, k, v = operands[:3]
    mask = operands[3] if len(operands) > 3 else None
    if causal and (start or window is not None):
        causal, mask = False, _causal_from(start, window, q, k, mask)
    kernel = None if softcap else _kernel(q, k, v, mask, causal)
    k, v = [_for_kernel(x, q, kernel) for x in (k, v)]
    if kernel is None:
        operands = (q, k, v) if mask is None else (q, k, v, mask)
        return written_out("Attention", q)(*operands, scale=scale, causal=causal, softcap=softcap)
    y, lse = _FORWARD[kernel](_four(q), _four(k), _four(v), _mask(kernel, q, k, mask), causal, scale)
    return y.reshape(tuple(q.shape)), lse.reshape(tuple(q.shape[:-1]))


def attention_grad(
    *operands: torch.Tensor,
    scale: float = 1.0,
    causal: bool = False,
    start: int = 0,
    window: int | None = None,
    softcap: float = 0.0,
) -> Results:
    """The results of the eval of `AttentionGrad`, or `GroupedAttentionGrad`; operands: q, k, v, y, log-sum-exp,
    gradient of y, maybe a mask."""
    q, k, v, y, lse, d = operands[:6]
    mask = operands[6] if len(operands) > 6 else None
    if causal and (start or window is not None):
        causal, mask = False, _causal_from(start, window, q, k, mask)
    kernel = None if softcap else _kernel(q, k, v, mask, causal)
    shapes = [tuple(x.shape) for x in (q, k, v)]
    k, v = [_for_kernel(x, q, kernel) for x in (k, v)]
    if kernel is None:
        operands = (q, k, v, y, lse, d) if mask is None else (q, k, v, y, lse, d, mask)
        grads = written_out("AttentionGrad", q)(*operands, scale=scale, causal=causal, softcap=softcap)
    else:
        saved = [*[_four(x) for x in (q, k, v, y)], lse.reshape((1,) * (3 - lse.ndim) + tuple(lse.shape))]
        grads = _BACKWARD[kernel](_four(d), saved, _mask(kernel, q, k, mask), causal, scale)
    return tuple([_summed(g, shape) for g, shape in zip(grads[:3], shapes, strict=True)])


def _for_kernel(x: torch.Tensor, q: torch.Tensor, kernel: str | None) -> torch.Tensor:
    """Keys or values as a kernel, or the eval of `Attention`, takes them: each head once for each head of queries that
    shares it, unless the kernel does so itself."""
    if x.ndim < 3 or x.shape[-3] == q.shape[-3] or kernel == "flash" or (kernel == "cpu" and _shares_on_cpu(q.dtype)):
        return x
    *lead, shared, length, width = x.shape
    times = q.shape[-3] // shared
    return x.unsqueeze(-3).expand(*lead, shared, times, length, width).reshape(*lead, shared * times, length, width)


def _shares_on_cpu(dtype: torch.dtype) -> bool:
    return dtype.itemsize >= 4 and _RELEASE >= _SHARED_SINCE


def _summed(gradient: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A gradient in the shape of its operand, summed over the heads of queries that share a head of it."""
    if gradient.numel() == math.prod(shape):
        return gradient.reshape(shape)
    *lead, shared, length, width = shape
    return gradient.reshape(*lead, shared, -1, length, width).sum(-3)


def _causal_from(
    start: int, window: int | None, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """A mask to add for causal attention of rows from `start` on, or in a window: kernels know only that of all rows
    and columns."""
    s, t = q.shape[-2], k.shape[-2]
    rows = torch.arange(start, start + s, device=q.device)
    columns = torch.arange(t, device=q.device)
    added = torch.zeros(s, t, dtype=q.dtype, device=q.device).masked_fill_(columns > rows.unsqueeze(1), -math.inf)
    if window is not None:
        added.masked_fill_(columns <= rows.unsqueeze(1) - window, -math.inf)
    return added if mask is None else added + mask


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> str | None:
    """The kernel that supports these operands; None if there is none, and the eval is used."""
    if q.ndim not in (3, 4) or q.shape[-1] != v.shape[-1]:
        return None
    if q.device.type == "cpu":
        return "cpu"
    generation = _generation(q.device)
    aligned = q.shape[-1] * q.dtype.itemsize % _ALIGNED == 0
    if not generation or not aligned or q.dtype not in (torch.float32, *_HALVES):
        return None
    if generation < _AMPERE and q.dtype == torch.bfloat16:
        return None
    square = q.shape[-2] == k.shape[-2]  # otherwise kernels differ in the alignment of the diagonal
    flash = generation >= _AMPERE and q.dtype in _HALVES and q.shape[-1] <= 256
    if flash and mask is None and (square or not causal):
        return "flash"
    whole = mask is None or mask.shape[-1] == k.shape[-2]
    return "efficient" if whole and (mask is None or k.shape[-2] % _LANES == 0) else None


@functools.cache
def _generation(device: torch.device) -> int:
    """The major compute capability of a GPU; 0 for other devices."""
    if device.type != "cuda":
        return 0
    return (
        torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else _AMPERE
    )  # lowering for a GPU without having one


def _four(x: torch.Tensor) -> torch.Tensor:
    """`x` in four dims and with stride 1 in the last: the kernels assume this without checking."""
    x = side_by_side(x)
    return x.unsqueeze(0) if x.ndim == 3 else x


def _mask(kernel: str, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask in four dims; for CUDA kernels, which do not broadcast it, expanded."""
    if mask is None:
        return None
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    if kernel == "cpu":
        return mask
    lead = (1, *q.shape)[-4:-2]
    return mask.contiguous().expand(*lead, q.shape[-2], k.shape[-2])


# ---------------------------------------------------------------- the kernels


def _cpu(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Results:
    call = aten._scaled_dot_product_flash_attention_for_cpu.default
    return call(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _cpu_grad(d: Any, saved: Sequence[Any], mask: Any, causal: bool, scale: float) -> Results:
    call = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return call(d, *saved, 0.0, causal, attn_mask=mask, scale=scale)


def _flash(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Results:
    return aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _flash_grad(d: Any, saved: Sequence[Any], mask: Any, causal: bool, scale: float) -> Results:
    q, k = saved[:2]
    s, t = q.shape[-2], k.shape[-2]
    seed, offset = _no_random_state(q, torch.uint64, 2), _no_random_state(q, torch.uint64)
    call = aten._scaled_dot_product_flash_attention_backward.default
    return call(d, *saved, None, None, s, t, 0.0, causal, seed, offset, scale=scale)


def _efficient(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Results:
    call = aten._scaled_dot_product_efficient_attention.default
    y, lse, _, _ = call(q, k, v, mask, True, 0.0, causal, scale=scale)
    return y, lse.narrow(-1, 0, q.shape[-2])  # it is padded to rows of a multiple of 32


def _efficient_grad(d: Any, saved: Sequence[Any], mask: Any, causal: bool, scale: float) -> Results:
    q, k, v, y, lse = saved
    if lse.shape[-1] % _ROWS:
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % _ROWS), value=math.inf)
    call = aten._scaled_dot_product_efficient_attention_backward.default
    seed = offset = _no_random_state(q, torch.int64)
    needs_gradient = [True, True, True, False]
    return call(d, q, k, v, mask, y, lse, seed, offset, 0.0, needs_gradient, causal, scale=scale)


def _no_random_state(q: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A placeholder for the random state of dropout, which is not used."""
    return torch.empty(shape, dtype=dtype, device=q.device)


_FORWARD: dict[str, Callable[..., Results]] = {"cpu": _cpu, "flash": _flash, "efficient": _efficient}
_BACKWARD: dict[str, Callable[..., Results]] = {
    "cpu": _cpu_grad,
    "flash": _flash_grad,
    "efficient": _efficient_grad,
}
