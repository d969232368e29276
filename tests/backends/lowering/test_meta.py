"""Kernels are chosen without computing: shapes and dtypes are those that torch gives, whatever the size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from distir.backends.lowering.engine import double_scalars
from distir.backends.lowering.kernels import Kernel, Ref
from distir.backends.lowering.meta import META, Uncomputed
from distir.backends.lowering.torch_calls import trace
from distir.backends.tensors import products
from distir.backends.tensors.torch_namespace import TORCH
from distir.ir.function import FunctionMaker
from distir.ir.type import BFloat16, DType, Float32, Int64, Tensor
from tests.backends.tensors.test_torch_namespace import attributes, one_op, tensors
from tests.ops.samples import SAMPLES, Sample
from tests.ops.test_matrix import narrow

ROOT = Path(__file__).parents[3]
N = 1_000_000


class Computed(TorchDispatchMode):
    """Counts the elements of what is made outside the meta device, all together."""

    elements = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.device != META:
                self.elements += x.numel()
        return out


F, I = Float32, Int64
HUGE: list[tuple[str, list[tuple[DType, tuple[int, ...]]], dict[str, Any]]] = [
    ("MatMul", [(F, (N, N)), (F, (N, N))], {}),
    ("MatMul", [(F, (8, N, N)), (F, (N, N))], {}),
    ("Gemm", [(F, (N, N)), (F, (N, N)), (F, (N,))], {}),
    ("Gelu", [(F, (N, N))], {}),
    ("Add", [(F, (N, 1)), (F, (1, N))], {}),
    ("Softmax", [(F, (N, N))], {"axis": -1}),
    ("ReduceSum", [(F, (N, N))], {"axes": (0,), "keepdims": 0}),
    ("Transpose", [(F, (N, N))], {"perm": (1, 0)}),
    ("Concat", [(F, (N, N)), (F, (N, N))], {"axis": 0}),
    ("LayerNorm", [(F, (N, N)), (F, (N,)), (F, (N,))], {}),
    ("RMSNorm", [(F, (N, N)), (F, (N,))], {}),
    ("Attention", [(F, (1, 8, N, 64))] * 3, {"causal": True}),
    ("CrossEntropy", [(F, (N, N)), (I, (N,))], {}),
    ("CrossEntropyGrad", [(F, (N, N)), (I, (N,)), (F, (N,)), (F, (N,))], {}),
    ("Gather", [(F, (N, N)), (I, (N,))], {}),
    ("GatherGrad", [(F, (N, N)), (I, (N,))], {"rows": N}),
]
"""Ops whose results have 1e12 elements: 4 TB."""


@pytest.mark.parametrize("quicker", [False, True], ids=["MKL", "oneDNN"])
@pytest.mark.parametrize(("name", "operands", "settings"), HUGE, ids=[name for name, _, _ in HUGE])
def test_nothing_is_computed_to_choose_kernels(
    name: str, operands: Any, settings: dict[str, Any], quicker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "prefers_onednn", lambda: quicker)
    f = FunctionMaker("main")
    f.emit(name, *[f.add_input_value(f"x{k}", Tensor(*t)) for k, t in enumerate(operands)], **settings)
    with Computed() as made:
        kernel = trace(f.ops[0], attributes(f.ops[0]) | ({"whole": True} if "Gather" in name else {}), TORCH)
    assert kernel is not None
    assert made.elements < 100


@pytest.mark.parametrize("dtype", [Float32, BFloat16], ids=repr)
@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{s.op}-{i}" for i, s in enumerate(SAMPLES)])
def test_tensors_of_a_kernel_are_as_they_will_be(sample: Sample, dtype: DType) -> None:
    """Those between its calls too."""
    sample = narrow(sample, dtype)
    op = one_op(sample)
    if op.spec.eval is None:
        return
    with double_scalars():
        kernel = trace(op, attributes(op), TORCH)
        assert kernel is not None
        check(kernel, tensors(op, sample.arrays()))


def check(kernel: Kernel, operands: list[torch.Tensor]) -> None:
    """Make the calls, and compare what they give with what the kernel says of it."""
    made: dict[int, Any] = dict(enumerate(operands))

    def real(x: Any) -> Any:
        if isinstance(x, Ref):
            return made[x.number]
        return type(x)([real(y) for y in x]) if type(x) in (tuple, list) else x

    for c in kernel.calls:
        out = c.function(*map(real, c.args), **{k: real(x) for k, x in c.kwargs.items()})
        if c.result is not None:
            made[c.result] = out
        if isinstance(out, torch.Tensor) and c.result is not None:
            predicted = kernel.tensors[c.result]
            assert (out.shape, out.dtype) == (predicted.shape, predicted.dtype), c


SIZES = st.integers(0, 3)
SHAPES = st.lists(SIZES, max_size=4)
DTYPES = st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool))
FLOATS = st.sampled_from((torch.float64, torch.float32, torch.bfloat16))
Call = Callable[..., Any]


@st.composite
def calls(draw: st.DrawFn) -> tuple[Call, list[torch.Tensor]]:
    """A function of torch's, and tensors that it takes."""
    kind = draw(st.sampled_from((points, reduction, rows, product, joined, layer_norm, loss)))
    return kind(draw)


def points(draw: st.DrawFn) -> tuple[Call, list[torch.Tensor]]:
    whole = draw(SHAPES)
    operands: list[torch.Tensor] = []
    for _ in range(2):
        shape = whole[draw(st.integers(0, len(whole))) :]
        operands.append(torch.ones([1 if draw(st.booleans()) else n for n in shape], dtype=draw(DTYPES)))
    named = ("mul", "add", "div", "maximum", "eq", "lt", "pow", "bitwise_or", "logical_and", "where", "clamp", "clone")
    name = draw(st.sampled_from(named))
    if name == "where":
        return lambda x, y: torch.where(x > 0, x, y), operands
    if name == "clamp":
        return lambda x, _: x.clamp(0, 1.5), operands
    if name == "clone":
        return lambda x, _: x.clone(), operands
    return getattr(torch, name), operands


def reduction(draw: st.DrawFn) -> tuple[Call, list[torch.Tensor]]:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    dims = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    dims = [d - len(shape) if draw(st.booleans()) else d for d in dims]
    keep, name = draw(st.booleans()), draw(st.sampled_from(("sum", "mean", "amax", "amin", "prod", "argmax", "all")))
    x = torch.ones(shape, dtype=draw(DTYPES))
    if draw(st.booleans()) and name in ("sum", "prod", "all", "mean"):
        return getattr(torch, name), [x]
    one = name in ("prod", "argmax", "all")
    return lambda x: getattr(torch, name)(x, dims[0] if one else dims, keepdim=keep), [x]


def rows(draw: st.DrawFn) -> tuple[Call, list[torch.Tensor]]:
    shape = draw(st.lists(SIZES, min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    aten = torch.ops.aten
    functions: list[Call] = [
        lambda x: torch.softmax(x, dim),
        lambda x: torch.log_softmax(x, dim),
        lambda x: aten._softmax_backward_data.default(x, x, dim, x.dtype),
        lambda x: aten._log_softmax_backward_data.default(x, x, dim, x.dtype),
        lambda x: torch.cumsum(x, dim),
        lambda x: x.flip(dim),
        lambda x: x.roll(1, dim),
        lambda x: torch.zeros_like(x),
        lambda x: x.gather(dim, torch.zeros_like(x, dtype=torch.int64)),
        lambda x: x.add_(1).mul_(x),
    ]
    return draw(st.sampled_from(functions)), [torch.ones(shape, dtype=draw(FLOATS))]


def product(draw: st.DrawFn) -> tuple[Call, list[torch.Tensor]]:
    m, k, n, *lead = draw(st.lists(SIZES, min_size=3, max_size=5))
    dtype = draw(FLOATS)
    a, b = torch.ones((*lead, m, k), dtype=dtype), torch.ones((k, n), dtype=dtype)
    if draw(st.booleans()):
        return torch.matmul, [a, b.expand(*lead, k, n)]
    return torch.nn.functional.linear, [a, torch.ones((n, k), dtype=dtype), torch.ones(n, dtype=dtype)]


def joined(draw: st.DrawFn) -> tuple[Call, list[torch.Tensor]]:
    shape = draw(st.lists(SIZES, min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    parts: list[torch.Tensor] = []
    for _ in range(draw(st.integers(1, 3))):
        shape[dim] = draw(SIZES)
        parts.append(torch.ones(shape, dtype=draw(DTYPES)))
    return lambda *x: torch.cat(x, dim), parts


def layer_norm(draw: st.DrawFn) -> tuple[Call, list[torch.Tensor]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    x = torch.ones((*draw(st.lists(st.integers(1, 3), max_size=2)), *sizes), dtype=draw(FLOATS))
    gain, mask = torch.ones(sizes, dtype=x.dtype), [True, True, draw(st.booleans())]

    def both(x: torch.Tensor, gain: torch.Tensor) -> Any:
        y, mean, scale = torch.native_layer_norm(x, sizes, gain, None, 1e-5)
        back = torch.ops.aten.native_layer_norm_backward.default
        return y, mean, scale, *back(y, x, sizes, mean, scale, gain, gain, mask)

    return both, [x, gain]


def loss(draw: st.DrawFn) -> tuple[Call, list[torch.Tensor]]:
    m, n, reduced = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    row = torch.zeros(m, dtype=torch.int64)
    forward = torch.ops.aten.nll_loss_forward.default
    return lambda x, y: forward(x, y, None, reduced, -100), [torch.ones((m, n), dtype=draw(FLOATS)), row]


@given(calls())
def test_answers_are_torch_s(drawn: tuple[Call, list[torch.Tensor]]) -> None:
    function, operands = drawn
    without = [torch.empty(x.shape, dtype=x.dtype, device=META) for x in operands]
    try:
        want = function(*operands)
    except (RuntimeError, IndexError):
        return  # torch does not take these
    with Uncomputed():
        got = function(*without)
    for a, b in zip(*[y if isinstance(y, tuple) else (y,) for y in (want, got)], strict=True):
        assert (a is None) is (b is None)
        if a is not None:
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert b.device == META


def test_choosing_kernels_loads_no_compiler() -> None:
    """What torch loads to answer itself takes seconds, and memory of which no prediction tells."""
    script = """
import sys, distir
from distir.backends.lowering.engine import python_source
for name, loss in (("gpt2-tiny", "cross-entropy"), ("mlp", "mse")):
    model = distir.load(f"examples/{name}.onnx", {"batch": 8}, loss=loss, optimizer="adamw")
    assert "return" in python_source(distir.distribute(model, distir.Plan(dp=2, tp=2)), 0)
print([m for m in ("sympy", "torch._dynamo") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
