"""Kernels of convolutions and pools; each function takes the operands and attributes of the op.

torch takes pads that are the same at both ends, its pools those of at most half the kernel. Of others the operand is
padded by a copy. Pools of one spatial dim are computed as those of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distir.backends.tensors.torch_namespace import written_out
from distir.ops.windows import sizes_with, unpadded

aten: Any = torch.ops.aten
Ints = tuple[int, ...]
_CONV = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)


def _same_ends(pads: Ints) -> Ints | None:
    """The pads at either end, if they are the same."""
    begin, end = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    return begin if begin == end else None


def _padded(x: torch.Tensor, pads: Ints, value: float = 0.0) -> torch.Tensor:
    rank = len(pads) // 2
    return torch.nn.functional.pad(x, [pads[i + k] for i in reversed(range(rank)) for k in (0, rank)], value=value)


# ---------------------------------------------------------------- convolutions


def conv(x: torch.Tensor, w: torch.Tensor, strides: Ints, dilations: Ints, pads: Ints, groups: int) -> torch.Tensor:
    both = _same_ends(pads)
    x = _padded(x, pads) if both is None else x
    return _CONV[len(strides) - 1](x, w, None, strides, both or 0, dilations, groups)


def conv_grad_input(
    d: torch.Tensor, w: torch.Tensor, strides: Ints, dilations: Ints, pads: Ints, groups: int, sizes: Ints
) -> torch.Tensor:
    both = _same_ends(pads)
    wide = sizes_with(pads, sizes) if both is None else sizes
    x = _of_shape(d, (d.shape[0], groups * w.shape[1], *wide))
    row = _backward((d, x, w), (strides, both or (0,) * len(sizes), dilations), groups, (True, False))
    return unpadded(row[0], pads).contiguous() if both is None else row[0]


def conv_grad_weight(
    x: torch.Tensor, d: torch.Tensor, strides: Ints, dilations: Ints, pads: Ints, groups: int, kernel: Ints
) -> torch.Tensor:
    both = _same_ends(pads)
    x = _padded(x, pads) if both is None else x
    w = _of_shape(x, (d.shape[1], x.shape[1] // groups, *kernel))
    return _backward((d, x, w), (strides, both or (0,) * len(kernel), dilations), groups, (False, True))[1]


def _backward(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    window: tuple[Ints, Ints, Ints],
    groups: int,
    wanted: tuple[bool, bool],
) -> Any:
    """The gradients of x and w that are wanted, from d, x and w; `window` is strides, pads at both ends, dilations."""
    strides, pads, dilations = map(list, window)
    output_pads = [0] * len(strides)
    return aten.convolution_backward.default(
        *tensors, None, strides, pads, dilations, False, output_pads, groups, [*wanted, False]
    )


def _of_shape(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of which a kernel reads the shape alone."""
    return like.new_empty((1,)).expand(tuple(shape))


# ---------------------------------------------------------------- pools


class _Planes(NamedTuple):
    """The operand of a pool as torch takes it, and the pads, in lists."""

    x: torch.Tensor
    kernel: list[int]
    strides: list[int]
    pads: list[int]
    dilations: list[int]
    copied: bool
    """Whether the operand was padded."""

    def result(self, y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return y.squeeze(2) if like.dim() == 3 else y

    def gradient(self, dx: torch.Tensor, like: torch.Tensor, pads: Ints) -> torch.Tensor:
        dx = self.result(dx, like)
        return unpadded(dx, pads).contiguous() if self.copied else dx


def _planes(x: torch.Tensor, kernel: Ints, strides: Ints, dilations: Ints, pads: Ints, value: float = 0.0) -> _Planes:
    both = _same_ends(pads)
    taken = both is not None and all(2 * a <= k for a, k in zip(both, kernel, strict=True))
    left = both if both is not None and taken else (0,) * len(kernel)
    x = x if taken else _padded(x, pads, value)
    if x.dim() > 3:
        return _Planes(x, list(kernel), list(strides), list(left), list(dilations), not taken)
    return _Planes(_plane(x), [1, *kernel], [1, *strides], [0, *left], [1, *dilations], not taken)


def _plane(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(2) if x.dim() == 3 else x


def max_pool(x: torch.Tensor, kernel: Ints, strides: Ints, dilations: Ints, pads: Ints) -> torch.Tensor:
    p = _planes(x, kernel, strides, dilations, pads, -math.inf)
    forward = torch.nn.functional.max_pool2d if p.x.dim() == 4 else torch.nn.functional.max_pool3d
    return p.result(forward(p.x, p.kernel, p.strides, p.pads, p.dilations), x)


def max_pool_grad(
    x: torch.Tensor, d: torch.Tensor, kernel: Ints, strides: Ints, dilations: Ints, pads: Ints
) -> torch.Tensor:
    """The maxima are found once more: their positions take more memory than the operand that is saved anyway."""
    p = _planes(x, kernel, strides, dilations, pads, -math.inf)
    if p.x.dim() == 4:
        forward, backward = aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward
    else:
        forward, backward = aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward
    window = p.kernel, p.strides, p.pads, p.dilations, False
    index = forward.default(p.x, *window)[1]
    return p.gradient(backward.default(_plane(d), p.x, *window, index), x, pads)


def average_pool(
    x: torch.Tensor, kernel: Ints, strides: Ints, dilations: Ints, pads: Ints, counted: Ints
) -> torch.Tensor:
    if not _has_kernel(x, kernel, dilations, pads, counted):
        settings = {"strides": strides, "dilations": dilations, "pads": pads, "counted": counted}
        return written_out("AveragePool", x)(x, kernel=kernel, **settings)
    p = _planes(x, kernel, strides, dilations, pads)
    forward = torch.nn.functional.avg_pool2d if p.x.dim() == 4 else torch.nn.functional.avg_pool3d
    return p.result(forward(p.x, p.kernel, p.strides, p.pads, False, counted == pads), x)


def average_pool_grad(
    d: torch.Tensor, kernel: Ints, strides: Ints, dilations: Ints, pads: Ints, counted: Ints, sizes: Ints
) -> torch.Tensor:
    if not _has_kernel(d, kernel, dilations, pads, counted):
        settings = {"strides": strides, "dilations": dilations, "pads": pads, "counted": counted}
        return written_out("AveragePoolGrad", d)(d, kernel=kernel, sizes=sizes, **settings)
    like = d.new_empty((*d.shape[:2], *sizes))
    p = _planes(like, kernel, strides, dilations, pads)
    backward = aten.avg_pool2d_backward if p.x.dim() == 4 else aten.avg_pool3d_backward
    dx = backward.default(_plane(d), p.x, p.kernel, p.strides, p.pads, False, counted == pads, None)
    return p.gradient(dx, like, pads)


def _has_kernel(x: torch.Tensor, kernel: Ints, dilations: Ints, pads: Ints, counted: Ints) -> bool:
    """Whether torch has such means: no dilations, and all pads are counted, or none of those that it takes."""
    if max(dilations) > 1 or (x.device.type == "cpu" and x.dim() == 5 and x.dtype.itemsize < 4):
        return False
    both = _same_ends(pads)
    return counted == pads or (
        not any(counted) and both is not None and all(2 * a <= k for a, k in zip(both, kernel, strict=True))
    )
