"""Fuses attention, Gelu, Silu, logarithms of sigmoids and root-mean-square norms that models write out in several ops.

This is before differentiation and distribution. It saves kernel launches, and memory: the backward pass needs one saved
value instead of one for each part, of a norm x and one number a row.
"""

from __future__ import annotations

from distir.ir.cached import cached
from distir.ir.function import Function
from distir.transforms.rewriting.fuse_attention import find_attention
from distir.transforms.rewriting.fuse_gelu import INSIDE, find_gelu, find_log_sigmoid, find_silu
from distir.transforms.rewriting.fuse_rms import find_rms_norm
from distir.transforms.rewriting.laws import Law, rewrites
from distir.transforms.rewriting.matching import rewrite


@cached
@rewrites(Law.SAME)
def fuse(function: Function) -> Function:
    """The function with attention, Gelu, Silu and root-mean-square norms each in one op, where their intermediate
    values have no other use; the logarithm of a sigmoid by the softplus.

    It computes the same, except for rounding, for rows of attention that are masked out entirely (every score -inf):
    they give 0, where a softmax gives NaN, and for sigmoids that underflow. Inputs, outputs and all values that remain
    are the same objects.
    """
    function = rewrite(function, find_gelu, *INSIDE)
    function = rewrite(function, find_silu, "Mul")
    function = rewrite(function, find_log_sigmoid, "Log")
    function = rewrite(function, find_rms_norm, "Sqrt", "Pow")
    return rewrite(function, find_attention, "MatMul")
