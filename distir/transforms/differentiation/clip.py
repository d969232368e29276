"""Clipping of gradients by their global norm: the norm of all of them, as of one vector, is limited.

As `torch.nn.utils.clip_grad_norm_` (Pascanu et al., "On the difficulty of training recurrent neural networks", 2013).
The squares are summed gradient by gradient, so that each may be sharded, on any devices of any stage: one sum of
scalars then combines them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distir.ir.errors import UsageError
from distir.ir.function import FunctionMaker, Value


def clip(maker: FunctionMaker, gradients: Sequence[Value], norm: float | None) -> Iterator[Value]:
    """Append the clipping ops; yields each gradient clipped, just before its use, so that it lives no longer than
    needed.

    All are scaled by min(1, norm / (|g| + 1e-6)), where |g| is the square root of the sum of all squares. With None
    they stay as they are. Raises UsageError for a norm that is not positive.
    """
    if norm is None or not gradients:
        yield from gradients
        return
    if not norm > 0:
        raise UsageError(f"the norm to clip gradients to is a positive number, got {norm!r}")
    total = maker.emit("Sum", *[maker.emit("SumOfSquares", g) for g in gradients])
    factor = maker.emit("ClipFactor", total, norm=float(norm))
    for g in gradients:
        yield maker.emit("Scale", g, factor)
