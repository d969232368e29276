"""A regression of cosmological parameters from volumes, as CosmoFlow (Mathuriya et al. 2018): convolutions and pools of
three spatial dims, then products."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from distir.ir.errors import UsageError
from distir.ir.function import Function, FunctionMaker, Role, Value
from distir.ir.type import DType, Float32, Tensor
from distir.models.decoder import kind_of
from distir.models.recommender import widths_of
from distir.ops.rules import shape_of


@dataclass(frozen=True)
class Volumes:
    """The sizes of a network over cubes of `size` elements a side, with `channels` values each.

    `filters` are the channels of the results of the convolutions, of `kernel` elements a side, each followed by a Relu
    and a maximum over 2 elements a side; `dense` the widths of the products after them, with a Relu between them.

    Raises UsageError for sizes below 1, widths that are none, a kernel of an even number of elements, or a cube that
    the pools do not halve.
    """

    size: int = 128
    channels: int = 4
    filters: str = "32-64-128-256-512"
    kernel: int = 3
    dense: str = "128-64-4"
    batch: int = 8

    def __post_init__(self) -> None:
        for f in fields(self):
            if kind_of(f) is int and getattr(self, f.name) < 1:
                raise UsageError(f"{f.name} is a whole number of at least 1, got {getattr(self, f.name)}")
        widths_of("dense", self.dense)
        halved = 2 ** len(widths_of("filters", self.filters))
        if self.kernel % 2 == 0:
            raise UsageError(f"kernel is an odd number, got {self.kernel}")
        if self.size % halved:
            raise UsageError(f"size is a multiple of {halved}, as each convolution's result is halved, got {self.size}")


def volumes(sizes: Volumes, dtype: DType = Float32) -> Function:
    """The forward pass: `x` (batch, channels, size, size, size) to `y` (batch, outputs).

    Parameters: `conv.K.weight` (filters, channels, kernel, kernel, kernel), `conv.K.bias` (filters, 1, 1, 1),
    `dense.K.weight` (inputs, outputs), `dense.K.bias` (outputs,).
    """
    maker = FunctionMaker("volumes")

    def parameter(name: str, *shape: int) -> Value:
        return maker.add_input_value(name, Tensor(dtype, shape), Role("parameter"))

    cube = (sizes.size,) * 3
    x = maker.add_input_value("x", Tensor(dtype, (sizes.batch, sizes.channels, *cube)), Role("data", 0))
    ones, twos = (1,) * 3, (2,) * 3
    same = (sizes.kernel // 2,) * 6
    for k, filters in enumerate(widths_of("filters", sizes.filters)):
        weight = parameter(f"conv.{k}.weight", filters, shape_of(x)[1], *(sizes.kernel,) * 3)
        x = maker.emit("Conv", x, weight, strides=ones, dilations=ones, pads=same, groups=1)
        x = maker.emit("Relu", maker.emit("Add", x, parameter(f"conv.{k}.bias", filters, *ones)))
        x = maker.emit("MaxPool", x, kernel=twos, strides=twos, dilations=ones, pads=(0,) * 6)
    x = maker.emit("Reshape", x, shape=(sizes.batch, math.prod(shape_of(x)[1:])))
    widths = widths_of("dense", sizes.dense)
    for k, out in enumerate(widths):
        x = maker.emit("MatMul", x, parameter(f"dense.{k}.weight", shape_of(x)[-1], out))
        name = "y" if k == len(widths) - 1 else f"dense.{k}"
        x = maker.add_op("Add", name, [x, parameter(f"dense.{k}.bias", out)])
        x = maker.emit("Relu", x) if k < len(widths) - 1 else x
    maker.set_outputs([x])
    return maker.finalize()
