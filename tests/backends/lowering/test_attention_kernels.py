"""Which of torch's attention kernels is called, and that it is called as it wants to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from distir.backends.lowering import attention_kernels
from distir.backends.lowering.attention_kernels import _kernel, attention, attention_grad
from distir.backends.lowering.engine import TorchRank
from distir.backends.tensors.layout import side_by_side
from distir.backends.tensors.torch_namespace import TorchNamespace
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.function import FunctionMaker
from distir.ir.spec import lookup
from distir.ir.type import Float64, Tensor

Shape = tuple[int, ...]


def operands(make: Callable[..., torch.Tensor], q: Shape, k: Shape, v: Shape, mask: Shape | None) -> list[torch.Tensor]:
    return [make(*s) for s in (q, k, v)] + ([] if mask is None else [make(*mask)])


def calls(run: Callable[[], Any]) -> list[str]:
    """The names of the operators that torch is asked for."""
    seen: list[str] = []

    class Listen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Listen():
        run()
    return [name for name in seen if "attention" in name]


HEADS = (2, 3, 16, 8)
CASES: list[tuple[str | None, torch.dtype, Shape, Shape, Shape | None, bool]] = [
    ("flash", torch.bfloat16, HEADS, HEADS, None, True),
    ("flash", torch.float16, HEADS, (2, 3, 40, 8), None, False),
    ("efficient", torch.bfloat16, HEADS, (2, 3, 40, 8), None, True),
    ("efficient", torch.bfloat16, HEADS, HEADS, (1, 1, 16, 16), False),
    ("efficient", torch.float32, HEADS, HEADS, None, True),
    ("efficient", torch.float32, (3, 20, 8), (3, 16, 8), (20, 16), False),
    (None, torch.float64, HEADS, HEADS, None, True),
    (None, torch.bfloat16, HEADS, (2, 3, 15, 8), (16, 15), False),
    (None, torch.bfloat16, HEADS, (2, 3, 16, 8), (16, 1), False),
    (None, torch.bfloat16, (2, 3, 16, 4), (2, 3, 16, 4), None, True),
    (None, torch.float32, (2, 3, 16, 6), (2, 3, 16, 6), None, True),
    ("efficient", torch.float32, (2, 3, 16, 4), (2, 3, 16, 4), None, True),
    ("flash", torch.bfloat16, (2, 6, 16, 8), HEADS, None, True),
    ("efficient", torch.float32, (6, 16, 8), (3, 16, 8), None, True),
    ("efficient", torch.bfloat16, (2, 6, 16, 8), HEADS, (2, 1, 1, 16), False),
]
"""The last ones: heads that the kernels find misaligned; keys that all have one mask; keys that heads share."""


@pytest.mark.parametrize(("kernel", "dtype", "q", "k", "mask", "causal"), [c for c in CASES if c[0]], ids=str)
def test_on_cuda(kernel: str, dtype: torch.dtype, q: Shape, k: Shape, mask: Shape | None, causal: bool) -> None:
    """Without a GPU: that each kernel is called with what it takes, and gives tensors of the right shapes."""
    with FakeTensorMode():
        given = operands(lambda *s: torch.empty(s, dtype=dtype, device="cuda"), q, k, k, mask)
        results: list[Any] = []
        forward = calls(lambda: results.extend(attention(*given, scale=0.5, causal=causal)))
        y, lse = results
        assert y.shape == q
        assert lse.shape == q[:-1]
        assert (y.dtype, lse.dtype) == (dtype, torch.float32)
        grads: list[Any] = []
        row: list[Any] = [*given[:3], y, lse, y, *given[3:]]
        backward = calls(lambda: grads.extend(attention_grad(*row, scale=0.5, causal=causal)))
        assert [g.shape for g in grads] == [q, k, k]
        assert all(g.dtype == dtype for g in grads)
    assert forward == [f"_scaled_dot_product_{kernel}_attention.default"]
    assert backward == [f"_scaled_dot_product_{kernel}_attention_backward.default"]


@pytest.mark.parametrize(("kernel", "dtype", "q", "k", "mask", "causal"), [c for c in CASES if not c[0]], ids=str)
def test_written_out_on_cuda(
    kernel: None, dtype: torch.dtype, q: Shape, k: Shape, mask: Shape | None, causal: bool
) -> None:
    """Where none of the kernels takes the operands."""
    with FakeTensorMode():
        x, y, z, *m = operands(lambda *s: torch.empty(s, dtype=dtype, device="cuda"), q, k, k, mask)
        assert _kernel(x, y, z, m[0] if m else None, causal) is None


@pytest.mark.parametrize(("generation", "dtype", "kernel"), [(7, "float16", "efficient"), (7, "bfloat16", None)])
def test_older_gpus_have_no_flash(
    monkeypatch: pytest.MonkeyPatch, generation: int, dtype: str, kernel: str | None
) -> None:
    monkeypatch.setattr(attention_kernels, "_generation", lambda device: generation)
    with FakeTensorMode():
        q = torch.empty(HEADS, dtype=getattr(torch, dtype), device="cuda")
        assert _kernel(q, q, q, None, True) == kernel


@pytest.mark.parametrize(
    ("q", "v", "native"), [(HEADS, HEADS, True), ((3, 5, 8), (3, 5, 8), True), (HEADS, (2, 3, 16, 4), False)]
)
def test_on_cpus(q: Shape, v: Shape, native: bool) -> None:
    """Where sizes of keys and values differ, the formula is written out."""
    x, w = torch.randn(q), torch.randn(v)
    assert bool(calls(lambda: attention(x, x, w, scale=0.5))) is native


def heads_of_keys(run: Callable[[], Any]) -> list[int]:
    """How many heads of keys the kernels of attention are given."""
    seen: list[int] = []

    class Listen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "attention" in getattr(func, "__name__", ""):
                seen.append(args[2 if "backward" in func.__name__ else 1].shape[-3])
            return func(*args, **(kwargs or {}))

    with Listen():
        run()
    return seen


@pytest.mark.parametrize(
    ("device", "dtype", "release", "want"),
    [
        ("cuda", torch.bfloat16, (2, 6), 2),
        ("cuda", torch.float32, (2, 9), 4),
        ("cpu", torch.float32, (2, 9), 2),
        ("cpu", torch.float64, (2, 9), 2),
        ("cpu", torch.float64, (99, 0), 4),  # before the release from which on the kernel takes them
        ("cpu", torch.bfloat16, (2, 9), 4),  # it would add up gradients in 16 bits
    ],
    ids=str,
)
def test_keys_are_repeated_for_kernels_that_cannot_share_them(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, release: tuple[int, int], want: int
) -> None:
    monkeypatch.setattr(attention_kernels, "_SHARED_SINCE", release)
    with FakeTensorMode():
        q, k = (
            torch.empty(2, 4, 16, 8, dtype=dtype, device=device),
            torch.empty(2, 2, 16, 8, dtype=dtype, device=device),
        )
        lse = torch.empty(2, 4, 16, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
        assert heads_of_keys(lambda: attention(q, k, k, scale=0.5, causal=True)) == [want]
        assert heads_of_keys(lambda: attention_grad(q, k, k, q, lse, q, scale=0.5, causal=True)) == [want]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", [{}, {"causal": True}, {"causal": True, "window": 3}, {"softcap": 0.7}], ids=str)
@pytest.mark.parametrize("release", [(2, 9), (99, 0)], ids=str)
@pytest.mark.parametrize("heads", [(3, 6), (1, 4)], ids=str)
def test_heads_that_share_keys_are_what_autograd_says(
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int],
    release: tuple[int, int],
    form: dict[str, Any],
    masked: bool,
) -> None:
    """On this CPU, whether its kernel takes them or they are repeated: the result and all gradients."""
    monkeypatch.setattr(attention_kernels, "_SHARED_SINCE", release)
    torch.manual_seed(0)
    shared, all_heads = heads
    rows = [torch.randn(2, n, 12, 8, dtype=torch.float64, requires_grad=True) for n in (all_heads, shared, shared)]
    q, k, v = rows
    wide = [x.repeat_interleave(all_heads // shared, 1) for x in (k, v)]
    scores = 0.5 * q @ wide[0].mT
    scores = form["softcap"] * (scores / form["softcap"]).tanh() if "softcap" in form else scores
    distance = torch.arange(12)[:, None] - torch.arange(12)
    hidden = (distance < 0) & form.get("causal", False) | (distance >= form.get("window", 12))
    mask = [torch.randn(2, 1, 1, 12, dtype=torch.float64)] if masked else []
    want = sum(mask, scores).masked_fill(hidden, -torch.inf).softmax(-1) @ wide[1]
    d = torch.randn_like(want)
    plain = [x.detach() for x in rows]
    y, lse = attention(*plain, *mask, scale=0.5, **form)
    torch.testing.assert_close(y, want.detach(), rtol=1e-12, atol=1e-12)
    grads = attention_grad(*plain, y, lse, d, *mask, scale=0.5, **form)
    for got, right in zip(grads, torch.autograd.grad(want, rows, d), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_floats_on_cpus(dtype: torch.dtype) -> None:
    """The result, and the gradients, are those of double precision, to the dtype's."""
    torch.manual_seed(0)
    q, k, v, d = (torch.randn(HEADS, dtype=torch.float64) for _ in range(4))
    mask = torch.randn(16, 16, dtype=torch.float64)
    y, lse = attention(q, k, v, mask, scale=0.5)
    want = [y, lse, *attention_grad(q, k, v, y, lse, d, mask, scale=0.5)]
    q, k, v, d, mask = (x.to(dtype) for x in (q, k, v, d, mask))
    y, lse = attention(q, k, v, mask, scale=0.5)
    assert (y.dtype, lse.dtype) == (dtype, torch.float32)
    got = [y, lse, *attention_grad(q, k, v, y, lse, d, mask, scale=0.5)]
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).abs().max() < 0.1


@pytest.mark.parametrize("turned", range(5))
def test_operands_whose_rows_are_not_side_by_side(turned: int) -> None:
    """Torch's kernel reads each row as if its elements were; keys come turned from what a model writes out."""
    torch.manual_seed(0)
    given = [torch.randn(HEADS, dtype=torch.float64) for _ in range(4)]
    mask = torch.randn(16, 16, dtype=torch.float64)

    def results(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        q, k, v, d = rows[:4]
        y, lse = attention(q, k, v, mask, scale=0.5)
        return [y, lse, *attention_grad(q, k, v, rows[4] if rows[4:] else y, lse, d, mask, scale=0.5)]

    want = results(given)
    given.append(want[0])
    given[turned] = given[turned].mT.contiguous().mT
    for a, b in zip(results(given), want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_rank_copies_only_rows_that_are_not_side_by_side() -> None:
    """How an operand lies is seen when the step runs, not when its Python is made."""
    f = FunctionMaker()
    q, k, v = (f.add_input_value(x, Tensor(Float64, s)) for x, s in (("q", HEADS), ("k", (2, 3, 8, 16)), ("v", HEADS)))
    f.set_outputs([f.emit("Attention", q, f.emit("Transpose", k, perm=(0, 1, 3, 2)), v, scale=0.5)[0]])
    function = f.finalize()
    given = [np.random.default_rng(i).standard_normal(x.type.shape) for i, x in enumerate((q, k, v))]  # type: ignore[union-attr]
    rank = TorchRank(function, 0)
    rank.load(dict(enumerate(given)))
    copied: list[bool] = []

    class Listen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is side_by_side:
                copied.append(out is not args[0])
            return out

    with Listen():
        (got,) = rank.step().values()
    (want,) = SequentialExecutor().compute(function, given)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-12)
    assert copied == [False, True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kernel", "dtype", "q", "k", "mask", "causal"), CASES, ids=str)
def test_on_a_gpu(kernel: str | None, dtype: torch.dtype, q: Shape, k: Shape, mask: Shape | None, causal: bool) -> None:
    """The kernels give what the formula does, there too."""
    torch.manual_seed(0)
    given = operands(lambda *s: torch.randn(s, dtype=dtype, device="cuda"), q, k, k, mask)
    d = torch.randn(q, dtype=dtype, device="cuda")
    xp, how = TorchNamespace("cuda"), {"scale": 0.5, "causal": causal}
    y, lse = attention(*given, scale=0.5, causal=causal)
    row: list[Any] = [*given[:3], y, lse, d, *given[3:]]
    got = [y, lse, *attention_grad(*row, scale=0.5, causal=causal)]
    wide = [x.double() for x in given]
    y, lse = lookup("Attention").eval(xp, *wide, **how)  # type: ignore[misc]
    want = [y, lse, *lookup("AttentionGrad").eval(xp, *wide[:3], y, lse, d.double(), *wide[3:], **how)]  # type: ignore[misc]
    close = {torch.float64: 1e-10, torch.float32: 1e-2}.get(dtype, 0.1)  # single precision may be tf32
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).abs().max() < close
