"""Cross-entropy as one call each way: its Triton kernels, and what torch.compile is given, against float64's formulas.

The kernels run on a GPU, or where there is none in Triton's interpreter if that is installed.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import distir
from distir.backends import lowering
from distir.backends.lowering import loss_kernels
from distir.backends.lowering.engine import TorchRank

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
ULP = {torch.bfloat16: 2.0**-8 if GPU else 2.0**-7, torch.float16: 2.0**-11, torch.float32: 2.0**-22}
"""The interpreter cuts the last bits off where others round."""
Row = tuple[torch.Tensor, ...]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels, in Triton's interpreter where there is no GPU."""
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    from distir.backends.lowering import loss_triton

    return loss_triton


def of_kernels(test: Callable[..., None]) -> Callable[..., None]:
    missing = not GPU and importlib.util.find_spec("triton") is None
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason="neither a GPU nor Triton here")(test))


def operands(n: int, v: int, dtype: torch.dtype, like: str, pad: int = 0, scale: float = 4.0) -> Row:
    """Logits (n, v), each row `pad` longer in memory; labels; gradients of the losses: `like` "own", "float" or "one"
    (the same for all rows, of the stride 0).
    """
    rng = torch.Generator().manual_seed(n * v)
    x = (scale * torch.randn(n, v + pad, generator=rng)).to(dtype)[:, :v]
    label = torch.randint(0, v, (n,), generator=rng)
    d = torch.randn(n, generator=rng).to(torch.float32 if like == "float" else dtype)
    d = d[:1].expand(n) if like == "one" else d
    return tuple([a.to(DEVICE) if pad == 0 else moved(a) for a in (x, label, d)])


def moved(a: torch.Tensor) -> torch.Tensor:
    """On the device, with the same strides."""
    span = 1 + sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True))
    return a.as_strided((span,), (1,)).to(DEVICE).as_strided(a.shape, a.stride())


def formulas(x: torch.Tensor, label: torch.Tensor, d: torch.Tensor, ignored: int | None) -> Row:
    """The losses, log-sum-exp and gradients of the logits, in float64."""
    wide, kept = x.double(), torch.ones_like(label, dtype=torch.bool) if ignored is None else label != ignored
    row = label.long() * kept
    lse = torch.logsumexp(wide, -1)
    loss = (lse - wide.gather(-1, row.unsqueeze(-1)).squeeze(-1)).masked_fill(~kept, 0)
    hit = torch.nn.functional.one_hot(row, x.shape[-1])
    slope = (torch.exp(wide - lse.unsqueeze(-1)) - hit) * (d.double() * kept).unsqueeze(-1)
    return loss, lse, slope


def check(got: Row, want: Row) -> None:
    """Each as near as its dtype allows."""
    for a, b in zip(got, want, strict=True):
        size = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() else 0.0
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=ULP[a.dtype], atol=1e-6 * max(1, size), equal_nan=True)


SHAPES = [(1, 1), (5, 12), (3, 4096), (4, 5000), (2, 8193)]


@of_kernels
@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize(("n", "v"), SHAPES)
@pytest.mark.parametrize(("like", "pad", "ignored"), [("own", 0, None), ("float", 7, 2), ("one", 16, -100)])
def test_kernels(
    n: int, v: int, dtype: torch.dtype, like: str, pad: int, ignored: int | None, kernels: ModuleType
) -> None:
    x, label, d = operands(n, v, dtype, like, pad)
    if ignored is not None:
        label[n // 2 :: 2] = ignored
    want = formulas(x, label, d, ignored)
    for result in (torch.float32, dtype):
        loss, lse = kernels.row_losses(x, label, ignored, result)
        assert (loss.dtype, lse.dtype) == (result, torch.float32)
        check((loss, lse), want[:2])
    slope = kernels.logit_slopes(x, label, lse, d, ignored, v)
    assert slope.dtype == dtype
    check((slope,), want[2:])
    assert not slope[label == ignored].any() if ignored is not None else True


@of_kernels
@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize(("v", "count"), [(16, 9), (8192, 8191), (8200, 8190), (9000, 4096)])
def test_the_gradient_of_padded_classes_is_0(v: int, count: int, dtype: torch.dtype, kernels: ModuleType) -> None:
    x, label, d = operands(3, v, dtype, "own")
    x[:, count:] = torch.nan
    label %= count
    loss, lse = kernels.row_losses(x[:, :count], label, None, torch.float32)
    slope = kernels.logit_slopes(x, label, lse, d, None, count)
    check((loss, lse, slope[:, :count]), formulas(x[:, :count], label, d, None))
    assert slope.shape == (3, v)
    assert not slope[:, count:].any()


@of_kernels
@pytest.mark.parametrize("label_dtype", [torch.int32, torch.uint8, torch.int64], ids=str)
def test_labels_of_any_integers(label_dtype: torch.dtype, kernels: ModuleType) -> None:
    x, label, d = operands(6, 200, torch.bfloat16, "own")
    every_other = torch.stack((label, label), 1).to(label_dtype)[:, 0]
    loss, lse = kernels.row_losses(x, every_other, None, torch.float32)
    slope = kernels.logit_slopes(x, every_other, lse, d, None, 200)
    check((loss, lse, slope), formulas(x, label, d, None))


@of_kernels
@pytest.mark.parametrize("dtype", ULP, ids=str)
def test_large_and_infinite_logits(dtype: torch.dtype, kernels: ModuleType) -> None:
    """Rows with logits of 6e4, of -6e4, whose first 5000 are -inf, whose last are. Of large ones the log-sum-exp is
    rounded, and the gradient's exponentials with it.
    """
    x, label, d = operands(4, 9000, dtype, "float")
    x[0, ::3] = 6e4
    x[1] = -6e4
    x[2, :5000], x[3, 5000:] = -torch.inf, -torch.inf
    label[:] = torch.tensor([0, 8000, 6000, 10])
    loss, lse = kernels.row_losses(x, label, None, torch.float32)
    want = formulas(x, label, d, None)
    check((loss, lse), want[:2])
    slope = kernels.logit_slopes(x, label, lse, d, None, 9000)
    torch.testing.assert_close(slope.double(), want[2], rtol=2.0**-6, atol=1e-6)


@of_kernels
def test_what_is_not_finite_stays_so(kernels: ModuleType) -> None:
    """A nan, logits that are all -inf, a label out of range: no loss is finite but that of an ignored row."""
    x, label, d = operands(5, 5000, torch.bfloat16, "own")
    x[0, 4500], x[1] = torch.nan, -torch.inf
    label[2], label[3], label[4] = 5000, -1, -100
    loss, lse = kernels.row_losses(x, label, -100, torch.float32)
    assert loss.isfinite().tolist() == [False] * 4 + [True]
    assert lse.tolist()[1] == -torch.inf
    slope = kernels.logit_slopes(x, label, lse, d, -100, 5000)
    assert slope.isnan().all(-1).tolist() == [True, True, False, False, False]
    assert not slope[4].any()


@of_kernels
def test_no_rows(kernels: ModuleType) -> None:
    x, label, d = operands(0, 7, torch.bfloat16, "own")
    loss, lse = kernels.row_losses(x, label, None, torch.float32)
    assert kernels.logit_slopes(x, label, lse, d, None, 7).shape == (0, 7)
    assert loss.shape == lse.shape == (0,)


@of_kernels
@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize("across", [False, True])
def test_the_ops_take_the_kernels(
    dtype: torch.dtype, across: bool, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows of two dims, and logits whose classes are not side by side."""
    assert loss_kernels._triton.__wrapped__(DEVICE) is kernels
    if not GPU:
        monkeypatch.setattr(loss_kernels, "_kernels", lambda x: kernels)
        monkeypatch.setattr(loss_kernels, "_in_one_call", lambda x: True)
    v = 300
    x, label, d = [a.reshape(2, 3, *a.shape[1:]) for a in operands(6, v, dtype, "own")]
    label[0, 1] = 3
    x = x.mT.contiguous().mT if across else x
    rows = loss_kernels.cross_entropy(x, label, 3)
    slope = loss_kernels.cross_entropy_grad(x, label, rows[1], d, 0, v, 3)
    check((*rows, slope), formulas(x, label, d, 3))
    count, label = 290, label % 290
    rows = loss_kernels.cross_entropy(x, label, 3, count=count)
    slope = loss_kernels.cross_entropy_grad(x, label, rows[1], d, 0, v, 3, count)
    check((*rows, slope[..., :count]), formulas(x[..., :count], label, d, 3))
    assert not slope[..., count:].any()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU here")
def test_more_than_2_to_the_31_logits() -> None:
    n, v = (1 << 16) + 8, 1 << 15
    x = torch.zeros(n, v, dtype=torch.bfloat16, device=DEVICE)
    label = torch.full((n,), v - 1, device=DEVICE)
    x[-1, v - 1] = 20
    loss, lse = loss_kernels.cross_entropy(x, label)
    slope = loss_kernels.cross_entropy_grad(x, label, lse, torch.ones_like(lse), 0, v)
    check((loss[-2:], lse[-2:], slope[-2:]), formulas(x[-2:], label[-2:], torch.ones(2, device=DEVICE), None))


# ---------------------------------------------------------------- without a GPU


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ignored", [None, 2, -100])
def test_what_the_compiler_is_given_is_what_chunks_are(
    dtype: torch.dtype, ignored: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, v = 6, 40
    x, label, d = [a.cpu().reshape(2, 3, *a.shape[1:]) for a in operands(n, v, dtype, "float")]
    label[0, 1] = 2 if ignored is None else ignored
    want = formulas(x, label, d, ignored)
    for compiling, chunk in ((False, 2 * v), (False, 1 << 24), (True, 1)):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        monkeypatch.setattr(loss_kernels, "_CHUNK", chunk)
        loss, lse = loss_kernels.row_losses(x, label, ignored, torch.float32)
        slope = loss_kernels.logit_slopes(x, label, lse, d, ignored, v)
        assert (loss.dtype, lse.dtype, slope.dtype) == (torch.float32, torch.float32, dtype)
        check((loss, lse, slope), want)
        further = loss_kernels.logit_slopes(torch.nn.functional.pad(x, (0, 8)), label, lse, d, ignored, v)
        assert torch.equal(further, torch.nn.functional.pad(slope, (0, 8)))


def test_the_compiler_captures_it_whole() -> None:
    """Without a loop over rows, whatever the size."""
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    def step(x: torch.Tensor, label: torch.Tensor, d: torch.Tensor) -> Row:
        loss, lse = loss_kernels.row_losses(x, label, -100, torch.float32)
        return loss, lse, loss_kernels.logit_slopes(x, label, lse, d, -100, x.shape[-1])

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    for n, v in ((4, 8), (700, 50_000)):
        x, label, d = torch.zeros(n, v, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.int64), torch.ones(n)
        for a, b in zip(compiled(x, label, d), step(x, label, d), strict=True):
            torch.testing.assert_close(a, b)
    torch._dynamo.reset()
    assert len(sizes) == 2
    assert sizes[0] == sizes[1]
    assert sizes[0] < 40


def test_a_step_calls_each_once() -> None:
    """However many rows there are."""
    model = distir.load("gpt:layers=1,hidden=16,heads=4,vocab=20000,seq=512", {"batch": 4})
    model = model.training("cross-entropy", "sgd").with_dtype("bfloat16")
    source = TorchRank(distir.distribute(model), 0).source()
    assert len(re.findall(r"\brow_losses\(", source)) == 1
    assert len(re.findall(r"\blogit_slopes\(", source)) == 1
    assert not re.search(r"\b(logsumexp|scatter_add_)\(", source)


def test_without_triton_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, f"{lowering.__name__}.loss_triton", raising=False)
    monkeypatch.delattr(lowering, "loss_triton", raising=False)
    assert loss_kernels._triton.__wrapped__(DEVICE) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ignored_rows_have_no_gradient(dtype: torch.dtype) -> None:
    x, label = torch.randn(3, 12).to(dtype), torch.tensor([4, -100, 11])
    lse = torch.logsumexp(x.double(), -1).to(torch.float64 if dtype == torch.float64 else torch.float32)
    slope = loss_kernels.cross_entropy_grad(x, label, lse, torch.ones_like(lse), 0, 12, -100)
    assert slope[1].eq(0).all()
    assert slope[[0, 2]].ne(0).all()
