"""Ops on points where rounding or the range of a dtype counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distir.backends.tensors.torch_namespace import TorchNamespace
from distir.ir.spec import lookup

NAMESPACES = [np, TorchNamespace(torch.device("cpu"))]


def points(xp: Any, x: np.ndarray) -> Any:
    return x if xp is np else torch.from_numpy(x)


@pytest.mark.parametrize("xp", NAMESPACES, ids=["numpy", "torch"])
def test_a_small_sigmoid_is_exact_to_rounding(xp: Any) -> None:
    sigmoid = lookup("Sigmoid").eval
    assert sigmoid is not None
    x = np.linspace(-80, 80, 401)
    got = np.asarray(sigmoid(xp, points(xp, x.astype(np.float32))), np.float64)
    assert np.allclose(got, 1 / (1 + np.exp(-x.astype(np.float32).astype(np.float64))), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bounds_beyond_a_dtype_are_its_own(dtype: torch.dtype) -> None:
    """As they are where a program in float32 is run in 16 bits."""
    most = torch.finfo(torch.float32).max
    x = torch.tensor([-torch.inf, -1.5, 2.5, torch.inf], dtype=dtype)
    got = TorchNamespace(torch.device("cpu")).clip(x, -most, most)
    limit = torch.finfo(dtype).max
    assert got.dtype == dtype
    assert got.tolist() == [-limit, -1.5, 2.5, limit]
