"""Convolutions and pools beyond the matrix test: which splits they have, what they refuse, cost, memory."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from distir.backends.lowering import window_kernels
from distir.executor.reference.numpy_namespace import NUMPY
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker
from distir.ir.spec import lookup
from distir.ir.type import REPLICATE, SUM, Float64, Int32, Partial, Placement, Shard, Tensor
from tests.ops.samples import slid

ARRAYS = {"Conv": "xwy", "ConvGradInput": "ywx", "ConvGradWeight": "xyw"}
"""Of each op the two arrays that it takes, and the one that it computes."""


def shapes(groups: int, c: int, m: int) -> dict[str, tuple[int, ...]]:
    return {"x": (4, groups * c, 5, 5), "w": (groups * m, c, 3, 3), "y": (4, groups * m, 3, 3)}


def attributes(op_type: str, groups: int) -> dict[str, Any]:
    extra = {"ConvGradInput": {"sizes": (5, 5)}, "ConvGradWeight": {"kernel": (3, 3)}}
    return slid(2, groups=groups, **extra.get(op_type, {}))


R, S = REPLICATE, Shard
SPLITS: list[tuple[int, int, int, str, Shard, int, dict[str, Placement] | None]] = [
    # groups, c, m, the array that is split, how, over how many devices, and how all of them are then
    (1, 4, 6, "x", S(0), 2, {"x": S(0), "w": R, "y": S(0)}),
    (1, 4, 6, "x", S(1), 2, {"x": S(1), "w": S(1), "y": R}),
    (1, 4, 6, "w", S(0, 3), 2, {"x": R, "w": S(0, 3), "y": S(1, 3)}),
    (1, 4, 6, "x", S(2), 5, None),
    (1, 4, 6, "w", S(3), 3, None),
    (1, 4, 6, "y", S(3), 3, None),
    (4, 2, 6, "x", S(1), 2, {"x": S(1), "w": S(0), "y": S(1)}),  # whole groups
    (4, 2, 6, "x", S(1, 2), 2, {"x": S(1, 2), "w": S(0, 2), "y": S(1, 2)}),
    (4, 2, 6, "x", S(1, 4), 2, {"x": S(1, 4), "w": S(1), "y": R}),  # the channels of each group
    (4, 2, 6, "y", S(1, 12), 2, {"x": R, "w": S(0, 12), "y": S(1, 12)}),  # the filters of each group
    (4, 2, 6, "w", S(1), 2, {"x": S(1, 4), "w": S(1), "y": R}),
    (4, 2, 6, "w", S(0), 8, None),  # part of a group
    (3, 4, 4, "x", S(1), 2, None),
    (6, 1, 1, "y", S(1), 3, {"x": S(1), "w": S(0), "y": S(1)}),  # depthwise
]


@pytest.mark.parametrize("op_type", ARRAYS)
@pytest.mark.parametrize(("groups", "c", "m", "array", "split", "n", "want"), SPLITS, ids=str)
def test_splits(
    op_type: str, groups: int, c: int, m: int, array: str, split: Shard, n: int, want: dict[str, Placement] | None
) -> None:
    """The same relation of three arrays for all three ops; the result is a partial sum where it is not split."""
    names, shape = ARRAYS[op_type], shapes(groups, c, m)
    ins, outs = [shape[a] for a in names[:2]], [shape[names[2]]]
    slot = (0, 1, ~0)[names.index(array)]
    got = lookup(op_type).mapping(attributes(op_type, groups), ins, outs, slot, split, n)
    if want is None:
        assert got is None
        return
    assert got is not None
    assert got.ins == tuple(want[a] for a in names[:2])
    assert got.outs == (want[names[2]] if want[names[2]] is not R else SUM,)


@pytest.mark.parametrize("name", ["MaxPool", "AveragePool", "AveragePoolGrad", "MaxPoolGrad"])
def test_pools_split_batch_and_channels_and_windows_side_by_side(name: str) -> None:
    spec, x, y = lookup(name), (4, 6, 8, 8), (4, 6, 4, 4)
    attrs = slid(2, kernel=(2, 2), strides=(2, 2), counted=(0,) * 4, sizes=(8, 8))
    ins, outs = {"MaxPoolGrad": ([x, y], [x]), "AveragePoolGrad": ([y], [x])}.get(name, ([x], [y]))
    for dim in range(4):
        for slot in (*range(len(ins)), ~0):
            found = spec.mapping(attrs, ins, outs, slot, Shard(dim, 1), 2)
            assert found is not None
            assert not any(isinstance(p, Partial) for p in found.outs)
            if dim > 1:  # windows of 2 on parts of 1, dilated, padded or that overlap
                assert spec.mapping(attrs, ins, outs, slot, Shard(dim, 1), 8) is None
                for other in ({"dilations": (2, 2)}, {"pads": (1, 1, 1, 1)}, {"strides": (1, 1)}):
                    assert spec.mapping({**attrs, **other}, ins, outs, slot, Shard(dim, 1), 2) is None


# ---------------------------------------------------------------- errors

X, W, Y = (2, 4, 5, 5), (6, 4, 3, 3), (2, 6, 3, 3)
PLAIN = slid(2)
POOL = slid(2, kernel=(2, 2))
MEAN = {**POOL, "counted": (0,) * 4}


@pytest.mark.parametrize(
    ("op_type", "operands", "attrs", "message"),
    [
        ("Conv", [X, (6, 3, 3, 3)], PLAIN, r"operand 1: expected filters of 4 / 1 channels, got shape \(6, 3, 3, 3\)"),
        ("Conv", [X, (6, 1, 3, 3)], PLAIN, r"operand 1: expected filters of 4 / 1 channels"),  # no broadcasting
        ("Conv", [X, (6, 4, 3)], PLAIN, r"operand 1: expected filters of 2 spatial dims"),
        ("Conv", [(4, 5), (6, 4)], PLAIN, r"operand 0: expected two dims and 1 to 3 spatial ones"),
        ("Conv", [(2, 4, 5, 5, 5, 5), W], PLAIN, r"operand 0: expected two dims and 1 to 3 spatial ones"),
        ("Conv", [X, (6, 2, 3, 3)], slid(2, groups=4), r"operand 1: expected filters for 4 groups"),
        ("Conv", [X, (6, 4, 0, 3)], PLAIN, r"operand 1: expected filters for 1 groups, got shape \(6, 4, 0, 3\)"),
        ("Conv", [X, (6, 4, 3, 6)], PLAIN, r"operand 0: expected at least 6 elements along spatial dim 1, got 5"),
        ("Conv", [X, W], slid(2, strides=(1, 0)), r"attribute strides: expected 2 integers from 1"),
        ("Conv", [X, W], slid(2, dilations=(1,)), r"attribute dilations: expected 2 integers from 1"),
        ("Conv", [X, W], slid(2, pads=(1, 1)), r"attribute pads: expected 4 integers from 0"),
        ("ConvGradInput", [Y, W], slid(2, sizes=(5,)), r"operand 1: .* and sizes of so many"),
        ("ConvGradInput", [Y, W], slid(2, sizes=(5, 6)), r"operand 0: expected shape \(2, 6, 3, 4\)"),
        ("ConvGradInput", [Y, W], slid(2, sizes=(2, 5)), r"attribute sizes: expected at least 3 elements"),
        ("ConvGradWeight", [X, Y], slid(2, kernel=(3, 4), groups=1), r"operand 1: expected shape \(2, 6, 3, 2\)"),
        ("ConvGradWeight", [X, Y], slid(2, kernel=(3, 0), groups=1), r"attribute kernel: expected 2 integers"),
        ("ConvGradWeight", [X, Y], slid(2, kernel=(3, 3), groups=3), r"operand 0: expected channels for 3 groups"),
        ("MaxPool", [X], slid(2, kernel=(2,)), r"attribute kernel: expected 2 integers from 1"),
        ("MaxPool", [X], {**POOL, "pads": (2, 0, 0, 0)}, r"attribute pads: expected none with a window of 2 in them"),
        ("MaxPool", [X], {**POOL, "pads": (0, 0, 0, 2)}, r"attribute pads: expected none with a window of 2 in them"),
        ("MaxPoolGrad", [X, (2, 4, 4, 5)], POOL, r"operand 1: expected shape \(2, 4, 4, 4\), got \(2, 4, 4, 5\)"),
        ("AveragePool", [X], {**MEAN, "counted": (0, 0, 0, 1)}, r"attribute counted: expected 4 integers, none above"),
        ("AveragePoolGrad", [(2, 4, 4, 4)], {**MEAN, "sizes": (5,)}, r"attribute sizes: expected 2 integers"),
        ("AveragePoolGrad", [(2, 4, 4, 4)], {**MEAN, "sizes": (5, 4)}, r"operand 0: expected shape \(2, 4, 4, 3\)"),
    ],
    ids=str,
)
def test_refuses(op_type: str, operands: list[tuple[int, ...]], attrs: dict[str, Any], message: str) -> None:
    maker = FunctionMaker("f")
    values = [maker.add_input_value("x", Tensor(Float64, shape)) for shape in operands]
    with pytest.raises(IRTypeError, match=f"{op_type}: {message}"):
        maker.emit(op_type, *values, **attrs)


def test_pools_are_of_floats() -> None:
    maker = FunctionMaker("f")
    with pytest.raises(IRTypeError, match="operand 0: expected a dtype of kind float, got i32"):
        maker.emit("MaxPool", maker.add_input_value("x", Tensor(Int32, X)), **POOL)


# ---------------------------------------------------------------- cost


@pytest.mark.parametrize("groups", [1, 2])
def test_flops_are_those_that_torch_counts(groups: int) -> None:
    shape = shapes(groups, 4, 6)
    x, w = (torch.zeros(shape[a], requires_grad=True) for a in "xw")
    with FlopCounterMode(display=False) as forward:
        y = torch.nn.functional.conv2d(x, w, groups=groups)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    found = {
        name: lookup(name).flops(attributes(name, groups), [shape[a] for a in row[:2]], [shape[row[2]]])
        for name, row in ARRAYS.items()
    }
    assert found["Conv"] == forward.get_total_flops()
    assert found["ConvGradInput"] + found["ConvGradWeight"] == (2 * forward.get_total_flops())
    if groups == 1:  # torch counts more for gradients of groups
        assert found["ConvGradInput"] + found["ConvGradWeight"] == backward.get_total_flops()


def test_eval_holds_no_patches() -> None:
    """Neither a convolution nor its gradients hold the operand once for each element of the kernel."""
    rng = np.random.default_rng(0)
    arrays = {"x": rng.random((2, 16, 40, 40)), "w": rng.random((16, 16, 5, 5)), "y": rng.random((2, 16, 36, 36))}
    extra = {"ConvGradInput": {"sizes": (40, 40)}, "ConvGradWeight": {"kernel": (5, 5)}}
    for name, row in ARRAYS.items():
        evaluate = lookup(name).eval
        assert evaluate is not None
        tracemalloc.start()
        evaluate(NUMPY, *[arrays[a] for a in row[:2]], **slid(2, groups=1), **extra.get(name, {}))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 6 * arrays["x"].nbytes


# ---------------------------------------------------------------- torch's kernels


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_gradients_are_those_of_autograd(rank: int, dtype: torch.dtype) -> None:
    """Of kernels, in 16 bits, too; equal elements are frequent there."""
    torch.manual_seed(0)
    near = {torch.float64: 1e-12, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    x = torch.randint(-4, 5, (2, 4, *[6] * rank)).to(dtype).requires_grad_()
    w = torch.randn(6, 2, *[3] * rank, dtype=dtype).requires_grad_()
    strides, dilations, pads = (2,) * rank, (1,) * rank, (1,) * 2 * rank
    window = {"strides": strides, "dilations": dilations, "pads": pads}
    functions = torch.nn.functional
    y = getattr(functions, f"conv{rank}d")(x.double(), w.double(), None, 2, 1, 1, 2)
    d = torch.randn(y.shape, dtype=dtype)
    y.backward(d.double())
    row = [
        (window_kernels.conv(x.detach(), w.detach(), **window, groups=2), y),
        (window_kernels.conv_grad_input(d, w.detach(), **window, groups=2, sizes=(6,) * rank), x.grad),
        (window_kernels.conv_grad_weight(x.detach(), d, **window, groups=2, kernel=(3,) * rank), w.grad),
    ]
    window["kernel"] = (3,) * rank
    counted = (0,) * 2 * rank
    for maxima in (True, False):
        x.grad = None
        wide = x.double()
        if maxima:
            y = getattr(functions, f"max_pool{rank}d")(wide, 3, 2, 1)
        else:
            y = getattr(functions, f"avg_pool{rank}d")(wide, 3, 2, 1, count_include_pad=False)
        d = torch.randn(y.shape, dtype=dtype)
        y.backward(d.double())
        if maxima:
            row.append((window_kernels.max_pool(x.detach(), **window), y))
            row.append((window_kernels.max_pool_grad(x.detach(), d, **window), x.grad))
        else:
            row.append((window_kernels.average_pool(x.detach(), **window, counted=counted), y))
            slope = window_kernels.average_pool_grad(d, **window, counted=counted, sizes=(6,) * rank)
            row.append((slope, x.grad))
    for got, want in row:
        assert want is not None
        assert (got.dtype, got.shape) == (dtype, want.shape)
        scale = max(1.0, float(want.detach().abs().max()))
        assert math.isclose(float((got.double() - want.detach()).abs().max()), 0, abs_tol=2 * near * scale)
