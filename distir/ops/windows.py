"""Windows that slide over the spatial dims of (batch, channels, *spatial): what convolutions and pools share.

The attributes are the same for all: `strides` and `dilations` have a number for each spatial dim, `pads` two, the first
half at the begin of each. Pads at the end may be larger than those of a model that rounds the number of windows up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.spec import Attrs

WINDOWS = "strides:sizes dilations:sizes pads:sizes"
"""The declaration of these attributes."""
_MOST = 3
"""The most spatial dims."""
Cut = tuple[slice, ...]


def spatial(k: int, shape: Shape) -> Shape:
    """The spatial dims of operand k. Raises IRTypeError unless there are 1 to 3 after batch and channels."""
    if not 3 <= len(shape) <= 2 + _MOST:
        raise IRTypeError(f"operand {k}: expected two dims and 1 to {_MOST} spatial ones, got shape {shape}")
    return shape[2:]


def counts(attrs: Attrs, sizes: Shape, kernel: Shape, what: str = "operand 0") -> Shape:
    """How many windows of `kernel` elements there are along each spatial dim. Raises IRTypeError, naming `what` has
    these sizes, if there are none."""
    rank, pads = len(sizes), attrs["pads"]
    for name in ("strides", "dilations"):
        if len(attrs[name]) != rank or 0 in attrs[name]:
            raise IRTypeError(f"attribute {name}: expected {rank} integers from 1, got {attrs[name]}")
    if len(pads) != 2 * rank:
        raise IRTypeError(f"attribute pads: expected {2 * rank} integers from 0, got {pads}")
    found: list[int] = []
    for i, (size, wide) in enumerate(zip(sizes, extents(attrs, kernel), strict=True)):
        room = size + pads[i] + pads[rank + i] - wide
        if room < 0:
            have = f"{size}, padded by {pads[i]} and {pads[rank + i]}"
            raise IRTypeError(f"{what}: expected at least {wide} elements along spatial dim {i}, got {have}")
        found.append(room // attrs["strides"][i] + 1)
    return tuple(found)


def extents(attrs: Attrs, kernel: Shape) -> Shape:
    """How many elements a window reaches over along each spatial dim."""
    return tuple(d * (k - 1) + 1 for d, k in zip(attrs["dilations"], kernel, strict=True))


class Halos(NamedTuple):
    """What a device needs beside its part of a spatial dim, before and after it, and the pads of its own windows.

    x is what windows slide over, y has an element for each. Of x: for the windows of its part of y. Of y: for the
    gradient of its part of x; `pads` are those with which that gradient is computed from it.
    """

    of_x: tuple[int, int]
    of_y: tuple[int, int]
    pads: tuple[int, int]


def halos(attrs: Attrs, kernel: Shape, i: int) -> Halos | None:
    """The halos along spatial dim i; None if equal parts of x are not those under equal parts of y.

    A window reaches over e elements, and the next begins t further on. Parts of s elements of x are under s / t windows
    if p + q = e - t, p and q being the pads at both ends, and t divides s. Window o reads x[o t + k - p] at position k,
    so x[j] is read by the windows from (j + p - e + 1) / t, rounded up, to (j + p) / t, rounded down.
    """
    p, q, t, e = attrs["pads"][i], attrs["pads"][len(kernel) + i], attrs["strides"][i], extents(attrs, kernel)[i]
    if p + q != e - t:
        return None
    lo, hi = (e - 1 - p) // t, -(-p // t)
    return Halos((p, q), (lo, hi), (lo * t + p, (hi - 1) * t + e - p))


def padded(xp: Any, x: Any, pads: Shape, value: float = 0.0) -> Any:
    """`x` with its spatial dims padded."""
    if not any(pads):
        return x
    rank = len(pads) // 2
    return xp.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)], constant_values=value)


def unpadded(x: Any, pads: Shape) -> Any:
    """A view of `x` without its pads."""
    rank = len(pads) // 2
    ends = zip(pads[:rank], x.shape[2:], pads[rank:], strict=True)
    return x[(slice(None), slice(None), *[slice(lo, size - hi) for lo, size, hi in ends])]


def taps(sizes: Shape, kernel: Shape, strides: Shape, dilations: Shape) -> Iterator[Cut]:
    """For each position in the kernel, in order, the elements of a padded array that all windows have there.

    `sizes` are the array's padded ones.
    """
    steps = list(zip(sizes, kernel, strides, dilations, strict=True))
    ends = [size - d * (k - 1) for size, k, _, d in steps]
    for at in itertools.product(*map(range, kernel)):
        along = zip(at, steps, ends, strict=True)
        yield (slice(None), slice(None), *[slice(i * d, end + i * d, s) for i, (_, _, s, d), end in along])


def flat(xp: Any, x: Any, *lead: int) -> Any:
    """`x` with its first two dims as `lead`, and its spatial ones as one."""
    return xp.reshape(x, (*lead, math.prod(x.shape[2:])))


def sizes_with(pads: Shape, sizes: Sequence[int]) -> Shape:
    """The spatial sizes with these pads."""
    rank = len(sizes)
    return tuple(size + pads[i] + pads[rank + i] for i, size in enumerate(sizes))
