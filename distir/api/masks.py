"""Constant attention masks that are causal, or mask nothing: attention is rewritten to do without them.

A mask that repeats along the batch is evaluated once, whatever the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from distir.executor.reference.repeats import evaluate_once, once
from distir.executor.reference.sequential import evaluate, fit
from distir.ir.errors import MismatchError
from distir.ir.function import Function, Op, Value
from distir.transforms.rewriting.causal import causal, masks
from distir.transforms.rewriting.claims import check_rewrite
from distir.transforms.rewriting.cleanup import fold, live
from distir.transforms.rewriting.fuse import fuse
from distir.transforms.rewriting.fuse_attention import NOTHING
from distir.transforms.rewriting.laws import Law, rewrites

MOST = 1 << 28
"""Largest number of distinct elements of a mask, or of a value it is computed from; a larger mask is kept."""


@rewrites(Law.KNOWN)
def with_causal_attention(function: Function, arrays: Mapping[Value, Any]) -> Function:
    """The function with masks removed from attention where they are constant and either causal or without effect.

    `arrays` are those of its inputs. Returns the function itself if there is no such mask.
    """
    if not any(v.kind == "constant" for v in arrays):
        return function
    fused = fold(fuse(function))
    known = {v: x for v in masks(fused) if (x := _known(fused, v, arrays)) is not None}
    found = [v for v, x in known.items() if _is_causal(x)]
    empty = [v for v, x in known.items() if v not in found and not x.any()]
    return causal(fused, found, empty) if found or empty else function


def _known(function: Function, v: Value, arrays: Mapping[Value, Any]) -> np.ndarray | None:
    """The array of `v` (..., s, t), of size 1 along leading dims along which it repeats.

    None if it depends on inputs that are not constants, or is too large.
    """
    ops = live(function.ops, [v])
    needed = {x for op in ops for x in op.inputs} | {v}
    inputs = tuple([x for x in function.inputs if x in needed])
    if not all(x.kind == "constant" and x in arrays for x in inputs):
        return None
    env: dict[Value, np.ndarray] = {x: fit(arrays[x], x) for x in inputs}
    for op in ops:
        with np.errstate(all="ignore"):
            results = evaluate_once(op, [env[x] for x in op.inputs], MOST)
        if results is None:
            return None
        env.update(zip(op.outputs, results, strict=True))
    found = once(env[v])
    shape = (*found.shape[:-2], *env[v].shape[-2:])  # causality is a property of whole rows and columns
    return np.broadcast_to(found, shape) if math.prod(shape) <= MOST else None


def _is_causal(x: np.ndarray) -> bool:
    """Whether a mask added to scores (..., s, t) is causal: 0 up to the diagonal, -inf (or so low) above it."""
    seen = np.tri(*x.shape[-2:], dtype=bool)
    return bool(np.all(np.where(seen, x == 0, x <= NOTHING)))


def check_masks(before: Function, after: Function, arrays: Mapping[Value, Any]) -> None:
    """Raises MismatchError unless `after` computes the same as `before` with these arrays, for all other inputs.

    For each removed mask, attention weights of random scores are computed with and without it.
    """
    fused = fold(fuse(before))
    checked: set[tuple[Value, bool]] = set()

    def granted(old: Op, new: Op) -> bool:
        if old.spec is not new.spec or old.op_type != "Attention" or new.inputs != old.inputs[:-1]:
            return False
        mask, causal = old.inputs[-1], bool(new.attributes.get("causal"))
        if old.attributes.without("causal") != new.attributes.without("causal"):
            return False
        if (mask, causal) not in checked:
            x = _known(fused, mask, arrays)
            if x is None or not _weighs_alike(x, causal):
                what = "causal attention" if causal else "attention without a mask"
                raise MismatchError(f"%{new.outputs[0].name}: {what} is not attention with %{mask.name}")
            checked.add((mask, causal))
        return True

    check_rewrite(before, fused, evaluate)
    check_rewrite(fused, after, evaluate, Law.KNOWN, granted)


_BLOCK = 1 << 20
"""Number of scores whose softmax is computed at a time."""


def _weighs_alike(mask: np.ndarray, causal: bool) -> bool:
    """Whether a mask leaves the softmax of scores unchanged; `causal`: that of the scores up to the diagonal."""
    s, t = mask.shape[-2:]
    rng = np.random.default_rng(0)
    step = max(1, _BLOCK // t)
    for rows in mask.reshape(-1, s, t):
        for first in range(0, s, step):
            cut = rows[first : first + step].astype(np.float64)
            seen = np.tri(len(cut), t, first, dtype=bool) if causal else True
            scores = rng.standard_normal(cut.shape)
            for scale in (1.0, 1e6):  # large scores reveal a mask that lowers scores but does not exclude them
                found = [_weights(x) for x in (scale * scores + cut, np.where(seen, scale * scores, -math.inf))]
                if not np.allclose(*found, rtol=1e-9, atol=1e-12):
                    return False
    return True


def _weights(scores: np.ndarray) -> np.ndarray:
    """The softmax of each row; 0 for a row that is masked entirely."""
    top = scores.max(axis=-1, keepdims=True)
    e = np.exp(scores - np.where(np.isfinite(top), top, 0))
    return e / np.maximum(e.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
