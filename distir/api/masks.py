"""Masks that are known when a model is loaded, and say no more than that attention is causal, or nothing at all.

What is alike for all samples is looked at once, whatever the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from distir.executor.repeats import evaluate_once, once
from distir.executor.sequential import fit
from distir.ir.function import Function, Value
from distir.transforms.causal import causal, masks
from distir.transforms.cleanup import fold, live
from distir.transforms.fuse import fuse
from distir.transforms.fuse_attention import NOTHING

MOST = 1 << 28
"""Elements of a mask, or of what it is made of, that are not alike: with more it stays as it is."""


def with_causal_attention(function: Function, arrays: Mapping[Value, Any]) -> Function:
    """The function with attention that needs no mask, where its mask is causal whatever the data, or hides nothing.

    `arrays` are those of its inputs. The function itself is given back if there is no such mask.
    """
    if not any(v.kind == "constant" for v in arrays):
        return function
    fused = fold(fuse(function))
    known = {v: x for v in masks(fused) if (x := _known(fused, v, arrays)) is not None}
    found = [v for v, x in known.items() if _is_causal(x)]
    empty = [v for v, x in known.items() if v not in found and not x.any()]
    return causal(fused, found, empty) if found or empty else function


def _known(function: Function, v: Value, arrays: Mapping[Value, Any]) -> np.ndarray | None:
    """The array that `v` (..., s, t) is, of size 1 along leading dims along which it repeats.

    None if it depends on more than constants, or is too large.
    """
    ops = live(function.ops, [v])
    needed = {x for op in ops for x in op.inputs} | {v}
    inputs = tuple([x for x in function.inputs if x in needed])
    if not all(x.kind == "constant" and x in arrays for x in inputs):
        return None
    held: dict[Value, np.ndarray] = {x: fit(arrays[x], x) for x in inputs}
    for op in ops:
        with np.errstate(all="ignore"):
            results = evaluate_once(op, [held[x] for x in op.inputs], MOST)
        if results is None:
            return None
        held.update(zip(op.outputs, results, strict=True))
    found = once(held[v])
    shape = (*found.shape[:-2], *held[v].shape[-2:])  # of every row it is asked what it sees
    return np.broadcast_to(found, shape) if math.prod(shape) <= MOST else None


def _is_causal(x: np.ndarray) -> bool:
    """Whether added to scores (..., s, t) it lets each row see the columns up to its own, and no other."""
    seen = np.tri(*x.shape[-2:], dtype=bool)
    return bool(np.all(np.where(seen, x == 0, x <= NOTHING)))
