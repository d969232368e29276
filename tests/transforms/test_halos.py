"""Convolutional networks whose spatial dims are split: equal to the sequential program, and what is sent for that."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from distir.ir import Function, FunctionMaker, Op
from distir.ir.errors import InfeasibleError
from distir.ir.function import Role
from distir.ir.type import Float64, Tensor
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation.training import training_step
from tests.transforms.programs import MOMENTUM, Plan, Program, check, distributed, filled
from tests.transforms.test_tensor_parallel import executed

ACROSS = {
    "2x1": ("h=2:x.2",),
    "1x2": ("w=2:x.3",),
    "2x2": ("h=2:x.2", "w=2:x.3"),
    "4x2": ("h=4:x.2", "w=2:x.3"),
}


@functools.cache
def network(
    size: int = 16,
    kernel: int = 3,
    stride: int = 1,
    dilation: int = 1,
    dims: int = 2,
    channels: tuple[int, ...] = (2, 4, 4),
    pool: str = "MaxPool",
    scaled: bool = False,
) -> Program:
    """Data, if `scaled` times a weight, so that the first convolution has a gradient of its operand; convolutions
    with biases and Tanh, perhaps each with a pool, and a dense layer; of odd pads more at the end."""
    f = FunctionMaker("net")
    h = f.add_input_value("x", Tensor(Float64, (8, channels[0], *([size] * dims))), Role("data", 0))
    ones, both = (1,) * dims, max(0, dilation * (kernel - 1) + 1 - stride)
    if scaled:
        h = f.emit("Mul", h, f.add_input_value("scale", Tensor(Float64, (channels[0], *ones)), Role("parameter")))
    for a, b in itertools.pairwise(channels):
        w = f.add_input_value("w", Tensor(Float64, (b, a, *([kernel] * dims))), Role("parameter"))
        pads = (both // 2,) * dims + (both - both // 2,) * dims
        given: dict[str, Any] = {"strides": (stride,) * dims, "dilations": (dilation,) * dims, "pads": pads}
        h = f.emit("Conv", h, w, **given, groups=1)
        bias = f.add_input_value("b", Tensor(Float64, (b, *ones)), Role("parameter"))
        h = f.emit("Tanh", f.emit("Add", h, bias))
        if pool:
            more = {"counted": (0,) * 2 * dims} if pool == "AveragePool" else {}
            two = (2,) * dims
            h = f.emit(pool, h, kernel=two, strides=two, dilations=ones, pads=(0,) * 2 * dims, **more)
    length = math.prod(shape_of(h)[1:])
    h = f.emit("Reshape", h, shape=(8, length))
    h = f.emit("MatMul", h, f.add_input_value("dense", Tensor(Float64, (length, 4)), Role("parameter")))
    f.set_outputs([f.add_op("Identity", "y", [h])])
    return filled(training_step(f.finalize(), "mse", MOMENTUM, gradients=True), {}, np.random.default_rng(0))


def exchanges(function: Function) -> list[Op]:
    return [op for op in executed(function) if op.op_type == "HaloExchange"]


@pytest.mark.parametrize("across", ACROSS)
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5, 7])
def test_kernels(kernel: int, across: str) -> None:
    check(network(kernel=kernel, channels=(2, 4), scaled=True), Plan(split=ACROSS[across]))


@pytest.mark.parametrize("across", ACROSS)
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [(3, 2, 1), (2, 2, 1), (5, 2, 1), (3, 1, 2), (3, 2, 2), (4, 4, 1)]
)
def test_strides_and_dilations(kernel: int, stride: int, dilation: int, across: str) -> None:
    program = network(kernel=kernel, stride=stride, dilation=dilation, pool="", channels=(2, 4), scaled=True)
    check(program, Plan(split=ACROSS[across]))


PLANS = [
    Plan(2, 1, 1, 2),
    Plan(1, 2),
    Plan(1, 1, 2, 2),
    Plan(1, 1, 2, 4, "gpipe", recompute="full"),
    Plan(2, zero=2),
    Plan(2, zero=3, overlap=False, bucket_mb=0),
    Plan(2, host=True),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("across", ["2x1", "2x2"])
@pytest.mark.parametrize("pool", ["MaxPool", "AveragePool"])
def test_beside_other_axes(plan: Plan, across: str, pool: str) -> None:
    check(network(pool=pool), plan._replace(split=ACROSS[across]))


@pytest.mark.parametrize("across", ["2x2", "4x2"])
@pytest.mark.parametrize("stride", [1, 2])
def test_three_dims(across: str, stride: int) -> None:
    given = {"stride": stride, "pool": "MaxPool" if stride == 1 else ""}
    program = network(dims=3, channels=(2, 3, 4), **given)
    check(program, Plan(split=ACROSS[across]))
    check(program, Plan(1, 2, split=ACROSS["2x2"]))


@pytest.mark.slow
@pytest.mark.parametrize("across", ACROSS)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("plan", [Plan(), Plan(2, 1, 1, 2, zero=1), Plan(1, 2, 1, 2), Plan(1, 1, 2, 2)], ids=str)
def test_all(plan: Plan, dims: int, kernel: int, stride: int, across: str) -> None:
    pool = "MaxPool" if stride == 1 else ""
    check(network(kernel=kernel, stride=stride, dims=dims, pool=pool), plan._replace(split=ACROSS[across]))


def test_data_are_given_with_a_halo() -> None:
    """The first convolution and its gradient send nothing; the second, and its gradient, one along each axis."""
    function = distributed(network(), Plan(split=ACROSS["2x2"])).program
    (x,) = [v for v in function.inputs if v.name == "x"]
    assert tensor(x).on("h").halo == tensor(x).on("w").halo == (1, 1, 0.0)
    assert tensor(x).shape == (8, 2, 10, 10)
    sent = Counter(op.attributes["axis"] for op in exchanges(function))
    assert sent == {"h": 2, "w": 2}  # of what the second takes, and of the gradient of what it gives
    assert all(shape_of(op.inputs[0])[1] == 4 for op in exchanges(function))


def test_the_second_exchange_carries_the_corners() -> None:
    function = distributed(network(channels=(2, 4, 4)), Plan(split=ACROSS["2x2"])).program
    sizes = [
        math.prod(tensor(op.outputs[0]).shape) - math.prod(tensor(op.inputs[0]).shape) for op in exchanges(function)
    ]
    assert sizes == [8 * 4 * 2 * 4, 8 * 4 * 2 * (4 + 2)] * 2  # (8, 4, 4, 4) a device


def test_windows_of_one_element_and_side_by_side_need_none() -> None:
    for kernel, stride in ((1, 1), (2, 2)):
        program = network(kernel=kernel, stride=stride, pool="" if stride == 2 else "MaxPool")
        assert exchanges(distributed(program, Plan(split=ACROSS["2x2"])).program) == []


def test_gradients_of_weights_are_reduced_once_over_all() -> None:
    function = distributed(network(), Plan(2, split=ACROSS["2x2"], bucket_mb=0)).program
    sums = [op for op in executed(function) if op.op_type == "MPIAllreduce" and op.attributes["axis"] != "mb"]
    of_filters = [op.attributes["axis"] for op in sums if len(shape_of(op.inputs[0])) == 4]
    assert len(of_filters) >= 2
    assert all(set(axes) == {"dp", "h", "w"} for axes in of_filters)


def test_a_halo_wider_than_a_slice_is_gathered_or_refused() -> None:
    for kernel, across in ((7, "4x2"), (15, "2x2")):
        program = network(size=8, kernel=kernel, channels=(2, 4), pool="")
        with contextlib.suppress(InfeasibleError):
            check(program, Plan(split=ACROSS[across]))


@pytest.mark.parametrize("plan", [Plan(), Plan(2), Plan(1, 2)], ids=str)
def test_two_axes_of_one_dim(plan: Plan) -> None:
    """The outer and the inner part of it: no halo then, but the same results."""
    check(network(), plan._replace(split=("a=2:x.2", "b=2:x.2")))


def test_a_dim_with_a_halo_is_not_padded() -> None:
    """A convolution would read the padding: here of a weight's dim of 13, made 14 by tensor parallelism."""
    f = FunctionMaker("net")
    h = f.add_input_value("x", Tensor(Float64, (8, 2, 13)), Role("data", 0))
    h = f.emit("MatMul", h, f.add_input_value("w", Tensor(Float64, (13, 13)), Role("parameter")))
    for _ in range(2):
        w = f.add_input_value("w", Tensor(Float64, (2, 2, 2)), Role("parameter"))
        h = f.emit("Conv", h, w, strides=(1,), dilations=(1,), pads=(0, 1), groups=1)
        h = f.emit("Add", h, f.add_input_value("b", Tensor(Float64, (2, 1)), Role("parameter")))
    h = f.emit("MatMul", h, f.add_input_value("w", Tensor(Float64, (13, 4)), Role("parameter")))
    f.set_outputs([f.add_op("Identity", "y", [h])])
    step = training_step(f.finalize(), "mse", MOMENTUM, gradients=True)
    check(filled(step, {}, np.random.default_rng(0)), Plan(1, 2))
