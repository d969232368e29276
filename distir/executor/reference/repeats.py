"""Evaluation of ops on broadcast arrays: a dim of stride 0 is computed once, and has stride 0 in the result."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from distir.executor.reference.sequential import evaluate
from distir.ir.axes import Names
from distir.ir.function import Op
from distir.ops.rules import shape_of


def once(x: np.ndarray) -> np.ndarray:
    """The array of size 1 along the dims along which it repeats."""
    return x[tuple([slice(0, 1) if stride == 0 else slice(None) for stride in x.strides])]


def evaluate_once(op: Op, ins: Sequence[np.ndarray], most: int) -> Sequence[np.ndarray] | None:
    """The results of an op of one device, as `evaluate` gives them; None if they would hold more than `most` elements.

    Its factors relate the dims of operands and results. Along a factor that is not reduced and along which all operands
    repeat, one element is computed and the results repeat it.
    """
    shapes = [shape_of(v) for v in op.outputs]
    whole = op.spec.local is not None or op.spec.indexed(op.attributes) is not None
    f = None if whole else op.spec.factors(op.attributes, [x.shape for x in ins])
    if f is None:
        if op.spec.alias and op.spec.axes is not None:  # Expand: a view, however large
            return [np.asarray(evaluate(op, ins, None))]
        if sum(map(math.prod, shapes)) > most:
            return None
        found = evaluate(op, ins, None)
        return found if isinstance(found, tuple | list) else [found]
    free = {name for name, size in f.sizes.items() if size > 1 and name not in f.kinds}
    for names, x in zip(f.ins, ins, strict=True):
        free -= {name for name, stride in zip(names, x.strides, strict=True) if name is not None and stride != 0}
    if sum(math.prod(_cut(names, shape, free)) for names, shape in zip(f.outs, shapes, strict=True)) > most:
        return None
    cut = [x[tuple([slice(0, n) for n in _cut(names, x.shape, free)])] for names, x in zip(f.ins, ins, strict=True)]
    found = evaluate(op, cut, None)
    results = found if isinstance(found, tuple | list) else [found]
    return [np.broadcast_to(y, shape) for y, shape in zip(results, shapes, strict=True)]


def _cut(names: Names, shape: Sequence[int], free: Collection[str]) -> list[int]:
    """The shape, with 1 for the dims of these factors."""
    return [1 if name in free else n for name, n in zip(names, shape, strict=True)]
