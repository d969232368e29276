"""Dynamic scaling of the loss, for gradients in float16, whose small values would be 0 (Micikevicius et al. 2018).

The loss is multiplied by a power of two before it is differentiated, the gradients are divided by it before they are
used. A step whose gradients are not all finite changes no weight and no state of the optimizer; it halves the scale and
is counted. After `INTERVAL` finite steps the scale is doubled. As `torch.amp.GradScaler`, with its defaults.

All of it is kept in three integers, which start at 0 as all state does: the scale's exponent relative to `INITIAL`, the
number of finite steps since it last changed, and the number of skipped steps.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from distir.ir.function import Function, FunctionMaker, Role, Value
from distir.ir.type import Float64, Int64, Tensor
from distir.ops.rules import scalar, tensor

INITIAL = 16
"""The exponent of the first scale."""
INTERVAL = 2000
EXPONENT, FINITE_STEPS, SKIPPED = "loss_scale.exponent", "loss_scale.finite_steps", "loss_scale.skipped"
"""The names of its inputs."""


class LossScale(NamedTuple):
    """The input that holds the exponent, and the scale."""

    exponent: Value
    scale: Value

    @staticmethod
    def of(function: Function) -> LossScale:
        """That of a function to which `scale_loss` was appended last: its exponent is the last input, its result the
        last output."""
        return LossScale(function.inputs[-1], function.producers()[function.outputs[-1]].inputs[1])


def scale_loss(maker: FunctionMaker, loss: Value) -> Value:
    """Append the scaled loss, which is to be differentiated."""
    exponent = maker.add_input_value(EXPONENT, Tensor(Int64, ()), Role("state"))
    shifted = maker.emit("Cast", maker.emit("Add", exponent, scalar(maker, INITIAL, exponent)), to=tensor(loss).dtype)
    scale = maker.add_op("Pow", "loss_scale", [scalar(maker, 2.0, shifted), shifted])
    return maker.add_op("Mul", "scaled_loss", [loss, scale])


def skips(maker: FunctionMaker, scaling: LossScale, squares: Value) -> Value:
    """Append the scale's update; gives whether the step is skipped. `squares`: the sum of those of all gradients."""
    finite = maker.emit("LessOrEqual", squares, scalar(maker, sys.float_info.max, squares))  # false for nan, too
    skip = maker.add_op("Not", "skip", [finite])
    skipped = maker.emit("Cast", skip, to=Int64)
    steps = maker.add_input_value(FINITE_STEPS, Tensor(Int64, ()), Role("state"))
    count = maker.emit("Add", steps, scalar(maker, 1, steps))
    full = maker.emit("And", finite, maker.emit("Equal", count, scalar(maker, INTERVAL, count)))
    grown = maker.emit("Sub", maker.emit("Cast", full, to=Int64), skipped)
    total = maker.add_input_value(SKIPPED, Tensor(Int64, ()), Role("state"))
    restarts = maker.emit("Or", skip, full)
    for old, new in (
        (scaling.exponent, maker.add_op("Add", f"{EXPONENT}.new", [scaling.exponent, grown])),
        (steps, maker.add_op("Where", f"{FINITE_STEPS}.new", [restarts, scalar(maker, 0, count), count])),
        (total, maker.add_op("Add", f"{SKIPPED}.new", [total, skipped])),
    ):
        maker.updates[new] = old
    return skip


def unscale(maker: FunctionMaker, scaling: LossScale, squares: Value) -> tuple[Value, Value]:
    """Append (the factor by which gradients are multiplied, the sum of the squares of those that result)."""
    inverse = maker.emit("Reciprocal", scaling.scale)
    wide = maker.emit("Cast", inverse, to=Float64)
    return wide, maker.emit("Mul", squares, maker.emit("Mul", wide, wide))
