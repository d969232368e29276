"""What torch's functions give on the CPU, in shape and dtype, without computing it.

Operands are tensors on torch's "meta" device, which have no data. What torch itself does with these is written in
Python for most functions, loads 800 modules first (1.8 s), and follows GPUs where dtypes differ. So the functions that
ops come to are answered here: a run on operands of one element gives the dtypes, a rule the shapes. Others are left to
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
aten: Any = torch.ops.aten

Shapes = Sequence[Sequence[int]]
"""A shape for each result."""


class Uncomputed(TorchDispatchMode):
    """Under it functions of tensors on the meta device compute nothing, and give what they do on the CPU."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would load torch's compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_in_place(func):
            return args[0]
        if func in _RULES:
            return _made(_RULES[func](*args, **kwargs), _on_one_element(torch.zeros, func, args, kwargs))
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if torch.Tag.pointwise in func.tags and tensors:
            shape = np.broadcast_shapes(*[x.shape for x in tensors])
            return _made([shape], _on_one_element(torch.ones, func, args, kwargs))  # not zeros: it may divide
        return func(*args, **kwargs)


def _is_in_place(func: Any) -> bool:
    """Whether a function changes its first argument and returns that, by its schema."""
    returned = func._schema.returns
    return len(returned) == 1 and returned[0].alias_info is not None and returned[0].alias_info.is_write


def _on_one_element(fill: Callable[..., torch.Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the function gives where all sizes are 1."""

    def small(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.device == META:
            return fill((1,) * x.ndim, dtype=x.dtype)
        return [small(y) for y in x] if isinstance(x, list | tuple) else x

    row = [[1] * len(x) if k == _SIZES.get(func) else small(x) for k, x in enumerate(args)]
    return func(*row, **{k: small(x) for k, x in kwargs.items()})


def _made(shapes: Shapes, like: Any) -> Any:
    """Results of these shapes, of the dtypes of `like`."""
    if isinstance(like, tuple):
        return tuple([x if x is None else _empty(shape, x) for shape, x in zip(shapes, like, strict=True)])
    return _empty(shapes[0], like) if isinstance(like, torch.Tensor) else like


def _empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=META)


# ---------------------------------------------------------------- the shapes of what is not done point by point


def _product(a: torch.Tensor, b: torch.Tensor) -> Shapes:
    return [(*a.shape[:-1], b.shape[-1])]


def _like_first(x: torch.Tensor, *_: Any, **__: Any) -> Shapes:
    return [x.shape]


def _reduced(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Shapes:
    dims = [dim] if isinstance(dim, int) else dim or range(x.ndim)
    gone = {d % x.ndim for d in dims} if x.ndim else set[int]()
    return [[1 if k in gone else n for k, n in enumerate(x.shape) if keepdim or k not in gone]]


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> Shapes:
    first = tensors[0].shape
    dim %= len(first)
    return [(*first[:dim], sum(x.shape[dim] for x in tensors), *first[dim + 1 :])]


def _layer_norm(x: torch.Tensor, sizes: Sequence[int], *_: Any) -> Shapes:
    statistic = (*x.shape[: x.ndim - len(sizes)], *[1] * len(sizes))
    return [x.shape, statistic, statistic]


def _nll_loss(x: torch.Tensor, label: torch.Tensor, weight: Any, reduction: int, *_: Any) -> Shapes:
    return [() if reduction else label.shape, ()]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Shapes:
    return [(*q.shape[:-1], v.shape[-1]), q.shape[:-1]]


_RULES: dict[Any, Callable[..., Shapes]] = {
    **dict.fromkeys((aten.mm.default, aten.bmm.default), _product),
    aten.addmm.default: lambda c, a, b, **_: _product(a, b),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _like_first),
    **dict.fromkeys((aten._softmax_backward_data.default, aten._log_softmax_backward_data.default), _like_first),
    **dict.fromkeys((aten.flip.default, aten.roll.default, aten.cumsum.default), _like_first),
    **dict.fromkeys((aten.zeros_like.default, aten.ones_like.default, aten.full_like.default), _like_first),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), _reduced),
    **dict.fromkeys((aten.amax.default, aten.amin.default, aten.prod.default, aten.prod.dim_int), _reduced),
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.all.default, aten.all.dim), _reduced),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default), _reduced),
    aten.cat.default: _joined,
    aten.gather.default: lambda x, dim, index, **_: [index.shape],
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: lambda d, x, sizes, *_: [x.shape, sizes, sizes],
    aten.nll_loss_forward.default: _nll_loss,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
}

_SIZES = {aten.native_layer_norm.default: 1, aten.native_layer_norm_backward.default: 2}
"""Which argument of these, a row of integers, is of sizes rather than dims."""
