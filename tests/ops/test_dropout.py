"""Masks of dropout: functions of seed, step and global index alone, that look random; and causal masks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distir.backends.lowering import native
from distir.backends.tensors.torch_namespace import TORCH
from distir.executor.reference.numpy_namespace import NUMPY
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, FunctionMaker
from distir.ir.errors import IRTypeError
from distir.ir.type import BFloat16, DType, Float16, Float32, Float64, Int64, Tensor
from distir.ops import dropout

Shape = tuple[int, ...]


def key(step: int = 0, seed: int = 0, stream: int = 0) -> Any:
    return dropout._key(NUMPY, np.asarray(step), seed, stream)


def mask(shape: Shape, ratio: float = 0.5, **at: int) -> Any:
    return dropout.random_mask(NUMPY, key(**at), shape, (0,) * len(shape), shape, ratio)


def mixed(z: int) -> int:
    """SplitMix64 as its authors print it (Steele, Lea and Flood 2014, figure 16, with the constants of their code)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_numbers_are_those_of_splitmix() -> None:
    """Of seed 0: the first outputs that implementations of it are tested by, and each element's."""
    steps = [mixed((k + 1) * 0x9E3779B97F4A7C15 % 2**64) for k in range(3)]
    assert steps == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    begin = int(key(3, 5, 7))
    drawn = [mixed((begin + k * 0x9E3779B97F4A7C15) % 2**64) / 2**64 for k in range(4096)]
    for ratio in (0.0, 0.1, 0.5, 0.9):
        # compared as numbers with sign: what is below half of all comes first
        want = [(x + 0.5) % 1 >= ratio for x in drawn]
        assert mask((4096,), ratio, step=3, seed=5, stream=7).tolist() == want


shapes = st.lists(st.integers(0, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Shape, Shape, Shape]:
    """(whole, start, shape): a box in a whole."""
    whole = draw(shapes)
    start = tuple([draw(st.integers(0, n)) for n in whole])
    return whole, start, tuple([draw(st.integers(0, n - a)) for n, a in zip(whole, start, strict=True)])


@given(pieces(), st.sampled_from((1, 3, 7, 1 << 16)), st.integers(-(2**63), 2**63 - 1))
def test_a_piece_is_a_part_of_the_whole(piece: tuple[Shape, Shape, Shape], block: int, number: int) -> None:
    """On numpy and torch, in blocks of any size."""
    whole, start, shape = piece
    n = math.prod(whole)
    flat = dropout.random_mask(NUMPY, np.asarray(number), (n,), (0,), (n,), 0.4)
    want = flat.reshape(whole)[tuple([slice(a, a + n) for a, n in zip(start, shape, strict=True)])]
    for xp, k in ((NUMPY, np.asarray(number)), (TORCH, torch.tensor(number))):
        got = dropout.random_mask(xp, k, shape, start, whole, 0.4, block)
        assert got.shape == want.shape
        assert np.array_equal(np.asarray(got), want)
    got = native.random_mask(torch.tensor(number), shape, start, whole, 0.4)
    assert np.array_equal(got.numpy(), want)


@given(st.integers(0, 2**40), st.integers(0, 2**63 - 1), st.integers(0, 10_000))
def test_keys_are_equal_on_numpy_and_torch(step: int, seed: int, stream: int) -> None:
    assert int(key(step, seed, stream)) == int(dropout._key(TORCH, torch.tensor(step), seed, stream))


COUNT = 1 << 20


def deviations(x: Any, expected: float) -> float:
    """By how many standard deviations a share of COUNT independent elements is off."""
    return abs(float(np.mean(x)) - expected) / math.sqrt(expected * (1 - expected) / np.size(x))


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(ratio: float) -> None:
    for step in range(4):
        x = mask((1024, 1024), ratio, step=step)
        assert deviations(~x, ratio) < 5
        spread = np.concatenate([x.sum(0), x.sum(1)]).var() / (1024 * ratio * (1 - ratio))
        assert spread == pytest.approx(1, abs=0.15)  # rows and columns are as uneven as they should be


def test_masks_are_independent_of_each_other_and_along_themselves() -> None:
    """Of other steps, seeds, dropouts; and of the same, some elements on."""
    steps = [{"step": s} for s in (0, 1, 2, 1000)]
    others = [{"seed": 1}, {"seed": 2**32}, {"stream": 1}, {"stream": 2}]
    masks = [mask((COUNT,), **where) for where in (*steps, *others)]
    for a, b in itertools.combinations(masks, 2):
        assert deviations(a == b, 0.5) < 5
    for lag in (1, 2, 3, 64, 1000, 1024, 4096, 65536):
        assert deviations(masks[0][lag:] == masks[0][:-lag], 0.5) < 5


def test_sequences_of_a_million_steps_do_not_overlap() -> None:
    """Where two steps begin in the one sequence of all numbers is at least 2^38 elements apart."""
    apart = dropout._EACH_STEP * pow(dropout._STEP, -1, 2**64) % 2**64
    steps = np.arange(1, 1 << 20, dtype=np.uint64) * np.uint64(apart)
    assert int(np.minimum(steps, np.uint64(0) - steps).min()) > 1 << 38


# ---------------------------------------------------------------- the ops


def built(dtype: DType, shape: Shape, ratio: float, whole: Shape | None = None) -> Function:
    f = FunctionMaker("dropout")
    x, step = f.add_input_value("x", Tensor(dtype, shape)), f.add_input_value("step", Tensor(Int64, ()))
    k = f.emit("RandomKey", step, seed=1, stream=2)
    more = {} if whole is None else {"whole": whole}
    y, mask_value = f.emit("RandomDropout", x, k, ratio=ratio, **more)
    f.set_outputs([y, mask_value, f.emit("DropoutGrad", x, mask_value, ratio=ratio)])
    return f.finalize()


@pytest.mark.parametrize("dtype", [Float64, Float32, Float16, BFloat16], ids=repr)
def test_kept_elements_are_scaled_and_rounded_once(dtype: DType) -> None:
    x: Any = np.random.default_rng(0).standard_normal((8, 32)).astype(dtype.numpy)
    y, mask_value, d = SequentialExecutor().compute(built(dtype, (8, 32), 0.1), [x, np.asarray(5)])
    wide: Any = x.astype(np.float32 if dtype.size < 4 else dtype.numpy)
    assert np.array_equal(y, np.where(mask_value, (wide * (1 / 0.9)).astype(dtype.numpy), 0))
    assert np.array_equal(d, y)
    assert np.array_equal(mask_value, mask((8, 32), 0.1, step=5, seed=1, stream=2))
    if dtype is not BFloat16:
        got = native._dropped(torch.from_numpy(x), torch.from_numpy(mask_value), 0.1)
        assert np.array_equal(got.numpy(), y)


def test_infinity_and_nan_are_dropped_too() -> None:
    x = np.array([[math.inf, math.nan, -math.inf, 1.0] * 64])
    y, mask_value, d = SequentialExecutor().compute(built(Float64, (1, 256), 0.5), [x, np.asarray(0)])
    assert not y[~mask_value].any()
    assert not d[~mask_value].any()
    assert np.array_equal(np.isnan(y), np.isnan(x) & mask_value)


def test_padding_does_not_move_an_element() -> None:
    """With rows of 5 padded to 8, the elements are those of rows of 5."""
    x = np.ones((4, 8))
    small = SequentialExecutor().compute(built(Float64, (4, 5), 0.5), [x[:, :5], np.asarray(0)])
    large = SequentialExecutor().compute(built(Float64, (4, 8), 0.5, (4, 5)), [x, np.asarray(0)])
    for a, b in zip(small, large, strict=True):
        assert np.array_equal(a, b[:, :5])


@pytest.mark.parametrize("ratio", [-0.1, 1, 1.5, math.nan])
def test_a_ratio_is_at_least_0_and_below_1(ratio: float) -> None:
    with pytest.raises(IRTypeError, match=r"attribute ratio: expected at least 0 and below 1"):
        built(Float64, (2,), ratio)


def test_a_causal_mask_is_a_triangle() -> None:
    f = FunctionMaker("causal")
    x = f.add_input_value("x", Tensor(Float64, (2, 3, 4, 6)))
    f.set_outputs([f.emit("CausalMask", x, scale=0.5), f.emit("CausalMask", x, value=0.0)])
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 6))
    hidden, zero = SequentialExecutor().compute(f.finalize(), [x])
    assert np.array_equal(hidden, np.where(np.tri(4, 6, dtype=bool), 0.5 * x, -np.inf))
    assert np.array_equal(zero, np.tril(x))
