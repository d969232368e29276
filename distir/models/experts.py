"""Which tokens go to which experts, in the static form of GShard (Lepikhin et al. 2020): every shape is known.

Tokens are in groups. In a group each expert has a number of slots; a token takes the next free slot of the experts that
it chose, first choices of all tokens before second ones. Where no slot is free, the expert does without the token.
"""

from __future__ import annotations

from typing import NamedTuple

from distir.ir.function import FunctionMaker, Value
from distir.ir.type import Int64
from distir.ops.rules import scalar, shape_of, tensor


class Routes(NamedTuple):
    """The tokens of the experts' slots, both (groups, tokens, experts * slots)."""

    dispatch: Value
    """1 where a token takes a slot, else 0."""
    combine: Value
    """There the expert's share in what becomes of the token, else 0."""


def routes(f: FunctionMaker, probabilities: Value, choices: int, slots: int, normalized: bool) -> Routes:
    """The routes of tokens that choose that many experts each, those of largest probability (groups, tokens, experts);
    of equal ones the first.

    Shares are the probabilities, `normalized`: divided by the sum of those that the token chose.
    """
    groups, tokens, experts = shape_of(probabilities)
    slot = f.emit("Constant", value=(slots,), shape=(), dtype=Int64)  # there is no slot of this number
    best = chosen = _largest(f, probabilities)
    ahead: Value | None = None
    for k in range(choices):
        if k:
            left = f.emit("Where", chosen, scalar(f, -1.0, probabilities), probabilities)
            best = _largest(f, left)
            chosen = f.emit("Or", chosen, best)
        count = f.emit("Cast", best, to=Int64)
        place = f.emit("CumSum", count, axis=1, exclusive=True)
        slot = f.emit("Where", best, f.emit("Add", place, ahead) if ahead else place, slot)
        if k < choices - 1:
            taken = f.emit("ReduceSum", count, axes=(1,), keepdims=1)
            ahead = f.emit("Add", ahead, taken) if ahead else taken
    shares = f.emit("Mask", chosen, probabilities)
    if normalized:
        shares = f.emit("Div", shares, f.emit("ReduceSum", shares, axes=(2,), keepdims=1))
    one = f.emit("Expand", f.emit("Constant", value=(1,), shape=(), dtype=Int64), shape=(slots,))
    numbers = f.emit("CumSum", one, axis=0, exclusive=True)
    each = (groups, tokens, experts, 1)
    takes = f.emit("Equal", f.emit("Reshape", slot, shape=each), numbers)
    combine = f.emit("Mask", takes, f.emit("Reshape", shares, shape=each))
    dispatch = f.emit("Cast", takes, to=tensor(probabilities).dtype)
    flat = (groups, tokens, experts * slots)
    return Routes(*[f.emit("Reshape", x, shape=flat) for x in (dispatch, combine)])


def _largest(f: FunctionMaker, x: Value) -> Value:
    """Whether an element is the largest of its row, the first of equal ones."""
    largest = f.emit("GreaterOrEqual", x, f.emit("ReduceMax", x, axes=(2,), keepdims=1))
    number = f.emit("CumSum", f.emit("Cast", largest, to=Int64), axis=2)
    return f.emit("And", largest, f.emit("Equal", number, scalar(f, 1, number)))
