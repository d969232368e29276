"""Clipping of gradients by their global norm: the norm of all of them, as of one vector, is limited.

As `torch.nn.utils.clip_grad_norm_` (Pascanu et al., "On the difficulty of training recurrent neural networks", 2013).
The squares are summed gradient by gradient, so that each may be sharded, on any devices of any stage: one sum of
scalars then combines them.
"""

from __future__ import annotations

from collections.abc import Sequence

from distir.ir.errors import UsageError
from distir.ir.function import FunctionMaker, Value


def sum_of_squares(maker: FunctionMaker, gradients: Sequence[Value]) -> Value:
    """Append the sum of the squares of all gradients, |g|^2."""
    return maker.emit("Sum", *[maker.emit("SumOfSquares", g) for g in gradients])


def clip_factor(maker: FunctionMaker, squares: Value, norm: float) -> Value:
    """Append the factor that limits the norm, min(1, norm / (|g| + 1e-6)). Raises UsageError for a norm that is not
    positive."""
    if not norm > 0:
        raise UsageError(f"the norm to clip gradients to is a positive number, got {norm!r}")
    return maker.emit("ClipFactor", squares, norm=float(norm))
