"""What rounding alone does to a program: it is computed again, every result moved by about a unit in the last place.

This is Monte Carlo arithmetic (D. S. Parker, "Monte Carlo arithmetic: exploiting randomness in floating-point
arithmetic", UCLA, 1997). Another order of additions, other kernels, partial sums of shards: they all come to errors of
that size in results. How far the run ends from the undisturbed one says how much a difference means, for each output
and parameter: a gradient that cancels to nothing but rounding differs by its own size, and so does what AdamW makes of
it.
"""

from __future__ import annotations

import numpy as np

from distir.executor.sequential import Held, Tap
from distir.ir.function import Function, Value
from distir.ir.type import Tensor
from distir.transforms.rewrite import epsilon
from distir.transforms.roles import weights

_MASKED = -1e4
"""Numbers as low as this are scores to which a mask was added."""


def perturbed(function: Function, seed: int = 0) -> Tap:
    """For `SequentialExecutor(tap=...)`: moves the elements of results up or down at random, by about one unit in the
    last place.

    Left as they are: what optimizers give, for a weight takes up its change in the same arithmetic everywhere; views;
    integers; what depends on no weight (positions, masks), which no plan computes otherwise; and what is masked: the
    last place of -1e9 is 64.
    """
    rounds = _rounds(function)
    draw = np.random.default_rng(seed)

    def tap(v: Value, held: Held) -> Held:
        if v not in rounds:
            return held
        x = np.asarray(held)
        wide = np.promote_types(np.float32, x.dtype)
        # 16 bits are computed in 32 and rounded back: half a unit moves most of them by one
        step = epsilon(v.type.dtype) * (2 if x.dtype == wide else 1)  # type: ignore[union-attr]
        signs = (draw.integers(0, 2, x.shape, np.int8) * 2 - 1) * (x > _MASKED)
        return (x * (1 + signs * wide.type(step))).astype(x.dtype)

    return tap


def _rounds(function: Function) -> set[Value]:
    """The results to move."""
    varies = set(weights(function))
    found: set[Value] = set()
    for op in function.ops:
        if varies.isdisjoint(op.inputs):
            continue
        varies.update(op.outputs)
        if op.spec.gradient is None and not op.spec.alias:
            found.update(v for v in op.outputs if isinstance(v.type, Tensor) and v.type.dtype.floating)
    return found
