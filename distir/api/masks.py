"""Masks that are known when a model is loaded, and say no more than that attention is causal, or nothing at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from distir.executor.sequential import SequentialExecutor
from distir.ir.function import Function, Value
from distir.transforms.causal import causal, masks
from distir.transforms.cleanup import fold, live
from distir.transforms.fuse import fuse
from distir.transforms.fuse_attention import NOTHING


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
    """The array that `v` is, None if it depends on more than constants."""
    ops = live(function.ops, [v])
    needed = {x for op in ops for x in op.inputs} | {v}
    inputs = tuple([x for x in function.inputs if x in needed])
    if not all(x.kind == "constant" and x in arrays for x in inputs):
        return None
    return SequentialExecutor().compute(Function(v.name, inputs, tuple(ops), (v,)), arrays)[0]


def _is_causal(x: np.ndarray) -> bool:
    """Whether added to scores (..., s, t) it lets each row see the columns up to its own, and no other."""
    seen = np.tri(*x.shape[-2:], dtype=bool)
    return bool(np.all(np.where(seen, x == 0, x <= NOTHING)))
