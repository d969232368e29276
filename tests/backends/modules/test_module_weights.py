"""Weights read from a module, and handed back: without copies where they are numpy's already, of every type."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from distir.backends.modules.module_weights import dtype_of_tensor, hand_back, reader_of
from distir.ir.errors import ModelError, UsageError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_there_and_back(dtype: torch.dtype) -> None:
    x = torch.nn.Parameter(torch.randn(3, 4).to(dtype))
    want = x.detach().double().numpy().copy()
    read = reader_of(x, "x")
    assert read().dtype == (ml_dtypes.bfloat16 if dtype is torch.bfloat16 else str(dtype).removeprefix("torch."))
    np.testing.assert_array_equal(read().astype(np.float64), want)
    before = x.data_ptr()
    hand_back({"x": x, "y": torch.zeros(1)}, {"x": want * 2})
    assert x.data_ptr() == before
    np.testing.assert_array_equal(x.detach().double().numpy(), want * 2)
    np.testing.assert_array_equal(read().astype(np.float64), want * 2)  # as it is now
    hand_back({"x": x}, {"x": read() * read().dtype.type(0.5)})
    np.testing.assert_array_equal(x.detach().double().numpy(), want)


def test_a_view_that_is_not_to_be_written_to() -> None:
    x = torch.ones(3)
    array = reader_of(x, "x")()
    assert np.shares_memory(array, x.numpy())
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2
    x[0] = 5
    assert array[0] == 5


def test_of_another_layout() -> None:
    x = torch.arange(6.0).reshape(2, 3).t()
    hand_back({"x": x}, {"x": reader_of(x, "x")() + 1})
    assert x.tolist() == [[1, 4], [2, 5], [3, 6]]


def test_errors() -> None:
    module = torch.nn.Linear(4, 4)
    read = reader_of(module.weight, "Linear: weight")
    module.double()
    with pytest.raises(UsageError, match=r"Linear: weight is torch.float64.* was torch.float32\[4, 4\] when loaded"):
        read()
    with pytest.raises(ModelError, match=r"w: element type torch\.complex64"):
        dtype_of_tensor(torch.zeros(1, dtype=torch.complex64), "w")
