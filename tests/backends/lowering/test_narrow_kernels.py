"""Kernels of 16-bit operands against the ops' `eval` on numpy: sums and statistics are float32's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distir.backends.lowering import loss_kernels, native
from distir.backends.lowering.engine import to_numpy, to_torch
from distir.backends.tensors.torch_namespace import torch_dtype
from distir.executor.reference.numpy_namespace import NUMPY
from distir.ir.spec import lookup
from distir.ir.type import BFloat16, DType, Float16, Float32

NARROW = pytest.mark.parametrize("dtype", [BFloat16, Float16], ids=repr)
RNG = np.random.default_rng(0)
ROWS, CLASSES = 7, 12
ULP = {BFloat16: 2.0**-7, Float16: 2.0**-10}


@NARROW
@pytest.mark.parametrize("ignored", [None, 3])
@pytest.mark.parametrize("chunk", [1, 2 * CLASSES, 1 << 24])
@pytest.mark.parametrize("count", [None, CLASSES - 3])
def test_cross_entropy(
    dtype: DType, ignored: int | None, chunk: int, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows are widened at once, and also where the last classes are padding."""
    monkeypatch.setattr(loss_kernels, "_CHUNK", chunk)
    logits = (4 * RNG.standard_normal((ROWS, CLASSES))).astype(dtype.numpy)
    labels = np.arange(ROWS) % CLASSES
    d = RNG.standard_normal(ROWS).astype(np.float32)
    ignoring = {} if ignored is None else {"ignore_index": ignored}
    if count is not None:
        ignoring["count"] = count
    rows, lse = both("CrossEntropy", logits, labels, start=0, result=Float32, **ignoring)
    for got, want in (rows, lse):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    ((got, want),) = both("CrossEntropyGrad", logits, labels, lse[1], d, start=0, classes=CLASSES, **ignoring)
    assert got.dtype == dtype.numpy
    np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=ULP[dtype], atol=1e-6)
    assert not got[:, count or CLASSES :].astype(float).any()
    if ignored is not None:
        assert not got[ignored].astype(float).any()


@NARROW
def test_layer_norm(dtype: DType) -> None:
    x, gain, bias, d = (
        RNG.standard_normal(shape).astype(dtype.numpy) for shape in [(ROWS, 64), (64,), (64,), (ROWS, 64)]
    )
    y, mean, scale = both("LayerNorm", x, gain, bias, axis=1, epsilon=1e-5)
    for got, want in (mean, scale):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for got, want in (y, *both("LayerNormGrad", x, gain, mean[1], scale[1], d, axis=1, bias=True)):
        assert got.dtype == dtype.numpy
        got, want = (a.astype(np.float64) for a in (got, want))
        assert np.abs(got - want).max() <= 2 * ULP[dtype] * np.abs(want).max()


@NARROW
def test_rms_norm(dtype: DType) -> None:
    x, gain, d = (RNG.standard_normal(shape).astype(dtype.numpy) for shape in [(ROWS, 64), (64,), (ROWS, 64)])
    y, scale = both("RMSNorm", x, gain, axis=1, epsilon=1e-5)
    assert scale[0].dtype == np.float32
    np.testing.assert_allclose(*scale, rtol=1e-5)
    for got, want in (y, *both("RMSNormGrad", x, gain, scale[1], d, axis=1)):
        assert got.dtype == dtype.numpy
        got, want = (a.astype(np.float64) for a in (got, want))
        assert np.abs(got - want).max() <= 2 * ULP[dtype] * np.abs(want).max()


def both(name: str, *operands: np.ndarray, **attributes: object) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each result of an op on torch and on numpy."""
    spec, cpu = lookup(name), torch.device("cpu")
    assert spec.eval is not None
    want = spec.eval(NUMPY, *[x.copy() for x in operands], **attributes)
    got = native.NATIVE[name](*[to_torch(x, dtype_of(x), cpu) for x in operands], **attributes)
    rows = [x if isinstance(x, tuple) else (x,) for x in (got, want)]
    assert [a.dtype for a in rows[0]] == [torch_dtype(dtype_of(b)) for b in rows[1]]
    return [(to_numpy(a, dtype_of(b)), np.asarray(b)) for a, b in zip(*rows, strict=True)]


def dtype_of(x: np.ndarray) -> DType:
    return next(d for d in DType.all.values() if d.numpy == x.dtype)
