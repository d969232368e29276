"""Infer shapes and dtypes of torch functions on the CPU without computing them.

Operands are tensors on torch's "meta" device, which have no data. Torch's own meta functions are mostly Python, load
800 modules (1.8 s), and follow GPUs where dtypes differ. So functions used by ops are handled here: dtypes come from a
run on operands of one element, shapes from a rule. Others are left to torch.
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
    """A mode in which functions of meta tensors return results of the shapes and dtypes that they have on the CPU."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would load torch's compiler

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
            return _made([shape], _on_one_element(torch.ones, func, args, kwargs))  # ones, not zeros, for divisions
        return func(*args, **kwargs)


def _is_in_place(func: Any) -> bool:
    """Whether a function works in place on its first argument, by its schema."""
    returned = func._schema.returns
    return len(returned) == 1 and returned[0].alias_info is not None and returned[0].alias_info.is_write


def _on_one_element(fill: Callable[..., torch.Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the function with all sizes 1."""

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


# ---------------------------------------------------------------- shapes of functions that are not elementwise


def _product(a: torch.Tensor, b: torch.Tensor) -> Shapes:
    return [(*a.shape[:-1], b.shape[-1])]


def _like_first(x: torch.Tensor, *_: Any, **__: Any) -> Shapes:
    return [x.shape]


def _reduced(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Shapes:
    dims = [dim] if isinstance(dim, int) else dim or range(x.ndim)
    reduced = {d % x.ndim for d in dims} if x.ndim else set[int]()
    return [[1 if k in reduced else n for k, n in enumerate(x.shape) if keepdim or k not in reduced]]


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
    aten.logsumexp.default: _reduced,
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
"""Position of the argument that is a list of sizes (other lists of integers are dims)."""
