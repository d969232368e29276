"""Ops with a torch kernel that is faster than their `eval`; each function takes the op's operands and attributes."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from distir.backends.lowering import loss_kernels, window_kernels
from distir.backends.lowering.attention_kernels import attention, attention_grad
from distir.backends.tensors import products
from distir.backends.tensors.torch_namespace import TorchNamespace, written_out
from distir.ir.errors import ModelError
from distir.ir.spec import Spec
from distir.ops import dropout
from distir.ops.nn import causal

aten: Any = torch.ops.aten


def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    transA: int = 0,
    transB: int = 0,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> torch.Tensor:
    """`a` may be a batch of matrices."""
    a = a.t() if transA else a
    if alpha == 1 and (c is None or beta == 1) and (a.dim() == 2 or c is None or c.dim() == 1):
        return products.gemm(a, b, c, bool(transB))
    b = b.t() if transB else b
    if c is None or a.dim() > 2:
        y = torch.matmul(a, b) * alpha
        return y if c is None else y + c * beta
    scales: dict[str, Any] = {k: x for k, x in (("alpha", alpha), ("beta", beta)) if x != 1}
    return torch.addmm(c, a, b, **scales)


# ---------------------------------------------------------------- gradients of elementwise functions


def _relu_grad(y: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Differs from the `eval` where y is nan: the result there is d."""
    return aten.threshold_backward.default(d, y, 0)


def _tanh_grad(y: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return aten.tanh_backward.default(d, y)


def _sigmoid_grad(y: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return aten.sigmoid_backward.default(d, y)


def _silu_grad(x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return aten.silu_backward.default(d, x)


def _gelu_grad(x: torch.Tensor, d: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return aten.gelu_backward.default(d, x, approximate=approximate)


# ---------------------------------------------------------------- softmax and norms


def _softmax_grad(y: torch.Tensor, d: torch.Tensor, axis: int = -1) -> torch.Tensor:
    return aten._softmax_backward_data.default(d, y, axis, y.dtype)


def _causal_mask(x: torch.Tensor, start: Sequence[int], scale: float = 1.0, value: float = -math.inf) -> torch.Tensor:
    seen = causal(TorchNamespace(x.device), *[range(a, a + n) for a, n in zip(start[-2:], x.shape[-2:], strict=True)])
    return (x * scale).masked_fill(~seen, value)


def _log_softmax_grad(y: torch.Tensor, d: torch.Tensor, axis: int = -1) -> torch.Tensor:
    return aten._log_softmax_backward_data.default(d, y, axis, y.dtype)


def _layer_norm(
    x: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor | None = None,
    axis: int = -1,
    epsilon: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if x.device.type == "cpu" and x.dtype.itemsize < 4:  # else statistics are of 16 bits, too
        gain, bias = gain.float(), torch.zeros_like(gain, dtype=torch.float32) if bias is None else bias.float()
    return torch.native_layer_norm(x, list(x.shape[axis:]), gain, bias, epsilon)


def _layer_norm_grad(
    x: torch.Tensor,
    gain: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    d: torch.Tensor,
    axis: int = -1,
    bias: bool = True,
) -> tuple[torch.Tensor, ...]:
    if x.device.type == "cpu" and x.dtype.itemsize < 4:
        gain = gain.float()
    rows = aten.native_layer_norm_backward.default(
        d, x, list(x.shape[axis:]), mean, scale, gain, gain if bias else None, [True, True, bias]
    )
    return tuple([r.to(x.dtype) for r in (rows if bias else rows[:2])])


def _rms_norm(
    x: torch.Tensor, gain: torch.Tensor, axis: int = -1, epsilon: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without the squares in memory. torch's own kernel is no quicker on CPUs, and has no backward pass there."""
    if _fused_norm(x, gain):
        return aten._fused_rms_norm.default(x, list(x.shape[axis:]), gain, epsilon)
    dims, wide = tuple(range(axis % x.dim(), x.dim())), torch.float32 if x.dtype.itemsize < 4 else x.dtype
    count = math.prod(x.shape[axis:])
    lengths = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=wide)
    scale = lengths.square_().div_(count).add_(epsilon).rsqrt_()
    return (x * scale).mul_(gain).to(x.dtype), scale


def _rms_norm_grad(
    x: torch.Tensor, gain: torch.Tensor, scale: torch.Tensor, d: torch.Tensor, axis: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """With three arrays as large as `x` at a time."""
    if _fused_norm(x, gain):
        return aten._fused_rms_norm_backward.default(d, x, list(x.shape[axis:]), scale, gain, [True, True])
    dims, lead = tuple(range(axis % x.dim(), x.dim())), tuple(range(axis % x.dim()))
    y, rows = x * scale, d.to(scale.dtype) * gain
    along = torch.sum(rows * y, dims, keepdim=True)
    rows.addcmul_(y, along, value=-1 / math.prod(x.shape[axis:])).mul_(scale)
    slope = y.mul_(d)
    return rows.to(x.dtype), (torch.sum(slope, lead) if lead else slope).to(x.dtype)


def _fused_norm(x: torch.Tensor, gain: torch.Tensor) -> bool:
    """Whether torch has kernels for a root-mean-square norm and its gradient: on GPUs, from 2.9 on."""
    return x.device.type == "cuda" and x.dtype == gain.dtype and hasattr(aten, "_fused_rms_norm_backward")


# ---------------------------------------------------------------- gathering from a table that is not sharded


def _nonnegative(index: torch.Tensor, count: int) -> torch.Tensor:
    """Indices flattened, negative ones (which count from the end of `count` rows) made non-negative."""
    index = index.long().reshape(-1)
    return torch.where(index < 0, index + count, index)


def _gather(
    table: torch.Tensor, index: torch.Tensor, start: int, whole: bool, count: int, axis: int = 0
) -> torch.Tensor:
    if not whole:
        return written_out("Gather", table)(table, index, start=start, whole=whole, count=count, axis=axis)
    rows = table.index_select(axis, _nonnegative(index, count))
    return rows.reshape((*table.shape[:axis], *index.shape, *table.shape[axis + 1 :]))


def _gather_grad(
    d: torch.Tensor, index: torch.Tensor, start: int, whole: bool, count: int, rows: int, axis: int = 0
) -> torch.Tensor:
    if not whole:
        settings = {"start": start, "whole": whole, "count": count, "rows": rows, "axis": axis}
        return written_out("GatherGrad", d)(d, index, **settings)
    row = _nonnegative(index, count)
    lead, rest = d.shape[:axis], d.shape[axis + index.ndim :]
    if d.device.type != "cpu" and not lead and len(rest) == 1:  # accumulates in float32, in a fixed order
        return aten.embedding_dense_backward.default(d, row.reshape(index.shape), rows, -1, False)
    table = torch.zeros((*lead, rows, *rest), dtype=d.dtype, device=d.device)
    return table.index_add_(axis, row, d.reshape((*lead, row.numel(), *rest)))


def _lookup(
    tables: torch.Tensor, index: torch.Tensor, start: int, whole: bool, count: int, pooling: bool = False
) -> torch.Tensor:
    """Without the rows that are added in memory."""
    if not whole:
        settings = {"start": start, "whole": whole, "count": count, "pooling": pooling}
        return written_out("Lookup", tables)(tables, index, **settings)
    flat, row = tables.reshape(-1, tables.shape[-1]), _rows_of_all(index, count, tables.shape[1])
    if pooling and index.shape[2]:
        found = torch.nn.functional.embedding_bag(row.reshape(-1, index.shape[2]), flat, mode="sum")
    else:
        found = flat.index_select(0, row)
        found = found.reshape(*index.shape, tables.shape[-1]).sum(2) if pooling else found
    return found.reshape(*index.shape[:2], tables.shape[-1])


def _lookup_grad(
    d: torch.Tensor, index: torch.Tensor, start: int, whole: bool, count: int, rows: int, pooling: bool = False
) -> torch.Tensor:
    if not whole:
        settings = {"start": start, "whole": whole, "count": count, "rows": rows, "pooling": pooling}
        return written_out("LookupGrad", d)(d, index, **settings)
    tables, width = d.shape[1:]
    d = d.unsqueeze(2).expand(*index.shape, width) if pooling else d
    total = torch.zeros((tables * rows, width), dtype=d.dtype, device=d.device)
    total.index_add_(0, _rows_of_all(index, count, rows), d.reshape(-1, width))
    return total.reshape(tables, rows, width)


def _rows_of_all(index: torch.Tensor, count: int, rows: int) -> torch.Tensor:
    """Of indices (b, t, ...), flattened, the rows among those of all tables, one table after the other."""
    tables = index.shape[1]
    first = torch.arange(tables, device=index.device).reshape(1, tables, *(1,) * (index.ndim - 2)) * rows
    return (_nonnegative(index, count).reshape(index.shape) + first).reshape(-1)


# ---------------------------------------------------------------- dropout


_GPU_BLOCK = 1 << 24
"""Elements of a mask that are computed at a time on GPUs, where launches take long and memory is large."""


def random_mask(
    key: torch.Tensor, shape: Sequence[int], start: Sequence[int], whole: Sequence[int], ratio: float
) -> torch.Tensor:
    """See `distir.ops.dropout.random_mask`.

    Under a TorchFunctionMode it is a call like torch's own: how many calls it makes depends on the size.
    """
    if has_torch_function_unary(key):
        return handle_torch_function(random_mask, (key,), key, shape, start, whole, ratio)
    if key.device.type == "meta":
        return torch.empty(tuple(shape), dtype=torch.bool, device=key.device)
    settings: dict[str, int] = {}
    if torch.compiler.is_compiling():  # which fuses all of it
        settings["block"] = max(1, math.prod(shape))
    elif key.device.type != "cpu":
        settings["block"] = _GPU_BLOCK
    return dropout.random_mask(TorchNamespace(key.device), key, shape, start, whole, ratio, **settings)


def _random_dropout(
    x: torch.Tensor, key: torch.Tensor, ratio: float, start: Sequence[int], whole: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = random_mask(key, tuple(x.shape), start, whole, ratio)
    return _dropped(x, mask, ratio), mask


def _dropped(x: torch.Tensor, mask: torch.Tensor, ratio: float) -> torch.Tensor:
    """Without `x` in float32: a kernel rounds the product once."""
    return TorchNamespace(x.device).where(mask, x * (1 / (1 - ratio)), 0)


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Without the squares in memory."""
    wide = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    return torch.linalg.vector_norm(x, dtype=wide).to(torch.float64).square()


NATIVE: dict[str, Callable[..., Any]] = {
    "Gemm": _gemm,
    "ReluGrad": _relu_grad,
    "TanhGrad": _tanh_grad,
    "SigmoidGrad": _sigmoid_grad,
    "SiluGrad": _silu_grad,
    "GeluGrad": _gelu_grad,
    "CausalMask": _causal_mask,
    "SoftmaxGrad": _softmax_grad,
    "LogSoftmaxGrad": _log_softmax_grad,
    "LayerNorm": _layer_norm,
    "LayerNormGrad": _layer_norm_grad,
    "RMSNorm": _rms_norm,
    "RMSNormGrad": _rms_norm_grad,
    "Gather": _gather,
    "GatherGrad": _gather_grad,
    "Lookup": _lookup,
    "LookupGrad": _lookup_grad,
    "CrossEntropy": loss_kernels.cross_entropy,
    "CrossEntropyGrad": loss_kernels.cross_entropy_grad,
    **dict.fromkeys(("Attention", "GroupedAttention"), attention),
    **dict.fromkeys(("AttentionGrad", "GroupedAttentionGrad"), attention_grad),
    "RandomDropout": _random_dropout,
    "DropoutGrad": _dropped,
    "SumOfSquares": _sum_of_squares,
    "Conv": window_kernels.conv,
    "ConvGradInput": window_kernels.conv_grad_input,
    "ConvGradWeight": window_kernels.conv_grad_weight,
    "MaxPool": window_kernels.max_pool,
    "MaxPoolGrad": window_kernels.max_pool_grad,
    "AveragePool": window_kernels.average_pool,
    "AveragePoolGrad": window_kernels.average_pool_grad,
}
"""Implementations by op name."""


def implementation(spec: Spec, xp: TorchNamespace) -> Callable[..., Any]:
    """The function that computes an op on tensors: from NATIVE, the torch function its spec names, or its `eval`."""
    if spec.name in NATIVE:
        return NATIVE[spec.name]
    if spec.torch is not None:
        return operator.attrgetter(spec.torch)(torch)
    if spec.eval is None:
        raise ModelError(f"{spec.name} cannot be evaluated: it should have been decomposed")
    return functools.partial(spec.eval, xp)
