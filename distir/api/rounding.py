"""Estimate the effect of rounding on a program: run it with every result perturbed by about one unit in the last place.

This is Monte Carlo arithmetic (D. S. Parker, "Monte Carlo arithmetic: exploiting randomness in floating-point
arithmetic", UCLA, 1997). Another order of additions, other kernels and partial sums over shards cause errors of this
size in each result. The difference between the perturbed and the unperturbed run is therefore the scale on which other
differences are judged, for each output and parameter: a gradient that cancels to rounding errors differs by its own
size, and so does AdamW's update from it.
"""

from __future__ import annotations

import numpy as np

from distir.executor.reference.joining import lanes
from distir.executor.reference.sequential import RuntimeValue, Tap
from distir.ir.device import Mesh
from distir.ir.function import Function, Value
from distir.ir.type import Tensor
from distir.transforms.rewriting.matching import epsilon
from distir.transforms.roles import weights

_MASKED = -1e4
"""Lower numbers are taken for attention scores with a mask added."""


def perturbed(function: Function, seed: int = 0) -> Tap:
    """A tap for `SequentialExecutor` that moves each element of a result up or down at random, by about one unit in the
    last place.

    Not perturbed: results of optimizers, which every plan computes in the same order; views; integers; what an op makes
    without rounding, such as a maximum, which is compared with what it was taken of; values that depend on no weight
    (positions, masks), which every plan computes alike; and masked scores: the unit in the last place of -1e9 is 64. On
    a mesh replicas move alike: they are copies of one result.
    """
    rounds = _rounds(function)
    draw = np.random.default_rng(seed)
    unrolled = not any(op.callee for op in function.ops)

    def moves(t: Tensor, shape: tuple[int, ...]) -> np.ndarray:
        """For each element whether it moves up or down: 1 or -1."""
        on_mesh = isinstance(t.device, Mesh)
        drawn = draw.integers(0, 2, t.global_shape if on_mesh else shape, np.int8) * 2 - 1
        return np.stack([t.cut(drawn, c) for c in lanes(t.mesh, unrolled)]) if on_mesh else drawn

    def tap(v: Value, value: RuntimeValue) -> RuntimeValue:
        if v not in rounds:
            return value
        x = np.asarray(value)
        wide = np.promote_types(np.float32, x.dtype)
        # 16-bit types are computed in 32 bits and rounded back: half a unit moves most of them by one
        step = epsilon(v.type.dtype) * (2 if x.dtype == wide else 1)  # type: ignore[union-attr]
        signs = moves(v.type, x.shape) * (x > _MASKED)  # type: ignore[arg-type]
        return (x * (1 + signs * wide.type(step))).astype(x.dtype)

    return tap


def _rounds(function: Function) -> set[Value]:
    """The results to perturb."""
    varies = set(weights(function))
    found: set[Value] = set()
    for op in function.ops:
        if varies.isdisjoint(op.inputs):
            continue
        varies.update(op.outputs)
        exact = op.spec.exact or op.spec.alias or not any(map(_floating, op.inputs))
        if op.spec.gradient is None and not exact:
            found.update(filter(_floating, op.outputs))
    return found


def _floating(v: Value) -> bool:
    return isinstance(v.type, Tensor) and v.type.dtype.floating
