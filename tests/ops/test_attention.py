"""Attention against PyTorch's; rows that may look nowhere; what it saves, and what that is for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from distir.backends.lowering.attention_kernels import attention, attention_grad
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, FunctionMaker, Value
from distir.ir.errors import IRTypeError, ModelError
from distir.ir.spec import lookup
from distir.ir.type import BFloat16, DType, Float32, Float64, Tensor
from distir.transforms.differentiation.grad import grad

Q, K, V = (2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)
RNG = np.random.default_rng(0)


def program(*mask: int, dtype: DType = Float64, keys: tuple[int, ...] = K, **form: Any) -> Function:
    """The sum of attention times given numbers."""
    f = FunctionMaker()
    operands = [f.add_input_value(n, Tensor(dtype, s)) for n, s in zip("qkv", (Q, keys, keys), strict=True)]
    if mask:
        operands.append(f.add_input_value("mask", Tensor(dtype, mask)))
    y, _ = f.emit("Attention", *operands, scale=0.5, **form)
    weighed = f.emit("Mul", y, f.add_input_value("d", Tensor(dtype, Q)))
    f.set_outputs([f.emit("ReduceSum", weighed, axes=(0, 1, 2, 3), keepdims=0), y])
    return f.finalize()


def arrays(function: Function) -> list[Any]:
    return [RNG.standard_normal(v.type.shape) for v in function.inputs]  # type: ignore[union-attr]


def with_grad(function: Function) -> Function:
    return grad(function, 0, function.inputs[:-1])


MASKS = [((), False), ((), True), ((5, 7), False), ((2, 1, 1, 7), False), ((3, 5, 7), False)]


@pytest.mark.parametrize(("mask", "causal"), MASKS, ids=str)
def test_result_and_gradients_are_pytorchs(mask: tuple[int, ...], causal: bool) -> None:
    function = program(*mask, causal=causal)
    given = arrays(function)
    loss, y, *grads = SequentialExecutor().compute(with_grad(function), given)
    tensors = [torch.tensor(x, requires_grad=True) for x in given[:-1]]
    q, k, v, *m = tensors
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=m[0] if m else None, is_causal=causal, scale=0.5
    )
    total = (want * torch.tensor(given[-1])).sum()
    total.backward()
    np.testing.assert_allclose(y, want.detach(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(loss, total.detach(), rtol=1e-12)
    for x, g in zip(tensors, grads, strict=True):
        np.testing.assert_allclose(g, x.grad, rtol=1e-10, atol=1e-12)  # type: ignore[arg-type]


FORMS = [
    {"causal": True, "window": 2},
    {"causal": True, "window": 1},
    {"causal": True, "window": 9},
    {"softcap": 0.7},
    {"causal": True, "softcap": 0.7},
    {"causal": True, "window": 3, "softcap": 0.7},
]


def written_out(q: Any, k: Any, v: Any, form: dict[str, Any]) -> torch.Tensor:
    window, softcap, causal = form.get("window"), form.get("softcap"), form.get("causal", False)
    scores = 0.5 * q @ k.mT
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    hidden = (columns > rows) & causal
    hidden = hidden | (columns <= rows - window) if window else hidden
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kernels", [False, True], ids=["eval", "kernels"])
def test_windows_and_caps_are_what_autograd_says(form: dict[str, Any], kernels: bool) -> None:
    function = program(**form)
    given = arrays(function)
    tensors = [torch.tensor(x, requires_grad=True) for x in given[:-1]]
    q, k, v = tensors
    want = written_out(q, k, v, form)
    wanted = torch.autograd.grad(want, tensors, torch.tensor(given[-1]))
    if kernels:
        plain, d = [x.detach() for x in tensors], torch.tensor(given[-1])
        y, lse = attention(*plain, scale=0.5, **form)
        grads = attention_grad(*plain, y, lse, d, scale=0.5, **form)
    else:
        _, y, *grads = SequentialExecutor().compute(with_grad(function), given)
    np.testing.assert_allclose(y, want.detach(), rtol=1e-12, atol=1e-12)
    for g, x in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(g, x, rtol=1e-10, atol=1e-12)


def test_only_causal_attention_has_windows() -> None:
    with pytest.raises(IRTypeError, match="attribute window: expected causal attention"):
        program(window=2)


def test_a_row_that_may_look_nowhere_gives_nothing_and_gets_nothing() -> None:
    function = program(5, 7)
    given = arrays(function)
    given[3][2] = -np.inf
    with np.errstate(all="raise"):
        _, y, dq, _, dv, dmask = SequentialExecutor().compute(with_grad(function), given)
    assert not y[:, :, 2].any()
    assert not dq[:, :, 2].any()
    assert not dmask[2].any()
    assert np.isfinite(dv).all()


def test_what_is_saved_is_the_log_of_the_sum() -> None:
    f = FunctionMaker()
    operands = [f.add_input_value(n, Tensor(Float64, s)) for n, s in zip("qkv", (Q, K, V), strict=True)]
    f.set_outputs(f.emit("Attention", *operands, scale=0.5))
    given = arrays(f.finalize())
    _, saved = SequentialExecutor().compute(f.finalize(), given)
    scores = given[0] @ given[1].swapaxes(2, 3) * 0.5
    np.testing.assert_allclose(saved, np.log(np.exp(scores).sum(-1)), rtol=1e-12)


@pytest.mark.parametrize("dtype", [BFloat16, Float32], ids=repr)
def test_statistics_are_not_kept_in_small_floats(dtype: DType) -> None:
    function = program(dtype=dtype)
    attention = function.ops[0]
    assert [v.type.dtype for v in attention.outputs] == [dtype, Float32]  # type: ignore[union-attr]
    given = arrays(function)
    exact = SequentialExecutor().compute(program(), given)[1]
    got = SequentialExecutor().compute(function, [np.asarray(x, dtype.numpy) for x in given])[1]
    assert np.abs(got.astype(float) - exact).max() < (0.05 if dtype is BFloat16 else 1e-5)


def norm() -> tuple[FunctionMaker, list[Value]]:
    f = FunctionMaker()
    x, w = f.add_input_value("x", Tensor(Float64, (4, 6))), f.add_input_value("w", Tensor(Float64, (6,)))
    return f, [x, *f.emit("LayerNorm", x, w, axis=1)]


@pytest.mark.parametrize("what", [2, 3])
def test_no_gradient_flows_from_what_is_saved(what: int) -> None:
    f, values = norm()
    f.set_outputs([f.emit("ReduceSum", values[what], axes=(0, 1), keepdims=0)])
    with pytest.raises(ModelError, match="no gradient flows from what LayerNorm saves"):
        grad(f.finalize(), 0, values[:1])


@pytest.mark.parametrize(
    ("message", "shapes"),
    [
        ("operand 1: expected e = 4, got 3", [(2, 5, 4), (2, 5, 3), (2, 5, 3)]),
        ("operand 2: expected t = 5, got 6", [(2, 5, 4), (2, 5, 4), (2, 6, 4)]),
        ("operand 1: expected leading dims .2,., got shape", [(2, 5, 4), (1, 5, 4), (2, 5, 4)]),
        ("operand 3: expected a shape that broadcasts", [(2, 5, 4), (2, 6, 4), (2, 6, 4), (6, 5)]),
        ("operand 3: expected a shape that broadcasts", [(2, 5, 4), (2, 6, 4), (2, 6, 4), (1, 2, 5, 6)]),
        ("operand 3: expected a shape that broadcasts", [(1, 5, 4), (1, 6, 4), (1, 6, 4), (2, 5, 6)]),
        ("operand 0: expected rank 2 or more", [(4,), (4,), (4,)]),
    ],
)
def test_shapes_that_do_not_fit(message: str, shapes: list[tuple[int, ...]]) -> None:
    f = FunctionMaker()
    operands = [f.add_input_value("x", Tensor(Float64, s)) for s in shapes]
    with pytest.raises(IRTypeError, match=message):
        f.emit("Attention", *operands, scale=1.0)


def test_work_is_that_of_the_products() -> None:
    """2 products of s t e forward, 5 backward; half of them where half is masked: of the last rows, if not of all."""
    shapes = [Q, K, V]
    points = 2 * 3 * 5 * 7
    assert lookup("Attention").flops({}, shapes, [Q]) == 2 * points * (4 + 4)
    assert lookup("AttentionGrad").flops({}, shapes, [Q]) == 2 * points * 5 * 4
    seen = points - 2 * 3 * 5 * 5 / 2  # of the last 5 rows of 7 but a triangle of 5 by 5
    assert math.isclose(lookup("Attention").flops({"causal": True}, shapes, [Q]), 2 * seen * (4 + 4))
    assert math.isclose(lookup("AttentionGrad").flops({"causal": True}, shapes, [Q]), 2 * seen * 5 * 4)
    assert lookup("Attention").flops({"causal": True}, [Q, Q, Q], [Q]) == 2 * 3 * 5 * 5 * (4 + 4)


def test_the_work_of_a_window_is_that_of_the_keys_in_it() -> None:
    """Within the half of the diagonal that a triangle of n rows, n * n / 2, leaves out."""
    for s, t, window in [(64, 64, 16), (64, 64, 63), (16, 64, 8), (32, 64, 48), (64, 64, 99)]:
        seen = sum(min(i + 1, window) for i in range(t - s, t))
        shapes = [(1, s, 4), (1, t, 4), (1, t, 4)]
        flops = lookup("Attention").flops({"causal": True, "window": window}, shapes, shapes[:1])
        assert abs(flops / (2 * 8) - seen) <= s / 2
