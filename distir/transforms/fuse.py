"""One op for what exporters and models write out in several, before differentiation and distribution.

It pays twice: one kernel runs for many, and one value is saved for the backward pass where each part saves its own.
"""

from __future__ import annotations

from distir.ir.function import Function
from distir.ir.kept import kept
from distir.transforms.fuse_attention import find_attention
from distir.transforms.fuse_gelu import find_gelu, find_silu
from distir.transforms.rewrite import rewrite


@kept
def fuse(function: Function) -> Function:
    """The function with attention, Gelu and Silu each in one op, wherever nothing else needs what is inside them.

    It computes the same, but for rounding, and but for rows of attention that may look nowhere at all (every score
    -inf): they give 0, where a softmax gives NaN. Inputs, outputs and all values that remain are the same objects.
    """
    for find in (find_gelu, find_silu, find_attention):
        function = rewrite(function, find)
    return function
