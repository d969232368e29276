"""Products by either library are the same up to rounding, in every layout; small ones are torch's own."""

from __future__ import annotations

import pytest
import torch

from distir.backends.tensors import products
from distir.backends.tensors.torch_namespace import TORCH

here = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As on a processor where oneDNN is quicker: the shapes of what it multiplied."""
    made: list[tuple[int, ...]] = []
    inner = products.linear

    def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        made.append(tuple(x.shape))
        return inner(x, w, bias)

    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "linear", linear)
    return made


def operands(m: tuple[int, ...], k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn((*m, k), generator=random, dtype=dtype), torch.randn((k, n), generator=random, dtype=dtype)


@here
@pytest.mark.parametrize("m", [(160,), (4, 40)], ids=["matrix", "batch"])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_layouts(calls: list[tuple[int, ...]], m: tuple[int, ...], left: bool, right: bool) -> None:
    a, b = operands(m, 130, 120, torch.float32)
    want = torch.matmul(a.double(), b.double())
    a = a.mT.contiguous().mT if left else a
    b = b.mT.contiguous().mT if right else b
    with torch.inference_mode():
        got = TORCH.matmul(a, b)
    assert calls == [(*m, 130)]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@here
@pytest.mark.parametrize("shape", [(120,), (160, 120), (1, 120)], ids=str)
def test_with_a_bias(calls: list[tuple[int, ...]], shape: tuple[int, ...]) -> None:
    a, b = operands((160,), 130, 120, torch.float32)
    c = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    want = torch.addmm(c.double(), a.double(), b.double())
    for got in (products.gemm(a, b, c), products.gemm(a, b.t().contiguous(), c, transposed=True)):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    assert calls == [(160, 130)] * 2
    assert torch.equal(products.gemm(a[:8], b, b[0]), torch.addmm(b[0], a[:8], b))
    assert torch.equal(products.gemm(a[:8], b), torch.mm(a[:8], b))
    assert torch.equal(products.gemm(a[:8], b.t(), transposed=True), torch.mm(a[:8], b))


@pytest.mark.parametrize(
    ("m", "dtype"), [((8,), torch.float32), ((160,), torch.float64), ((160,), torch.bfloat16), ((160,), torch.int64)]
)
def test_others_are_left_to_torch(calls: list[tuple[int, ...]], m: tuple[int, ...], dtype: torch.dtype) -> None:
    a, b = operands(m, 130, 120, torch.float32)
    a, b = (a * 4).to(dtype), (b * 4).to(dtype)
    assert torch.equal(products.matmul(a, b), torch.matmul(a, b))
    assert not calls


def test_batches_of_matrices_are_left_to_torch(calls: list[tuple[int, ...]]) -> None:
    a, _ = operands((4, 160), 130, 1, torch.float32)
    assert torch.equal(products.matmul(a, a.mT), torch.matmul(a, a.mT))
    assert torch.equal(products.matmul(a[0, 0], a[0].mT), torch.matmul(a[0, 0], a[0].mT))
    assert torch.equal(products.matmul(a[0, :, :0], a[0, :0]), torch.zeros(160, 130))
    assert not calls


def test_only_where_it_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)
    monkeypatch.setattr(products, "linear", None)
    a, b = operands((160,), 130, 120, torch.float32)
    assert torch.equal(products.matmul(a, b), torch.matmul(a, b))
