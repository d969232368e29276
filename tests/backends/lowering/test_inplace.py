"""Kernels that write into what nobody needs, and buffers that results are written into."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distir.backends.lowering import kernels
from distir.backends.lowering.buckets import buffer
from distir.backends.lowering.inplace import in_place
from distir.backends.lowering.kernels import Kernel, KernelTensor, Ref, TorchCall, python_name, render
from distir.backends.lowering.launchers import by_member
from distir.backends.lowering.optimizers import adamw, sgd
from distir.backends.lowering.torch_calls import trace
from distir.backends.tensors.staging import DeviceMemory
from distir.backends.tensors.torch_namespace import TORCH
from distir.ir.function import FunctionMaker, Op
from distir.ir.type import Float32, Float64, Tensor
from tests.backends.tensors.test_torch_namespace import compiled


def kernel(name: str, *shapes: tuple[int, ...], **attributes: Any) -> tuple[Op, Kernel]:
    f = FunctionMaker()
    f.emit(name, *[f.add_input_value("x", Tensor(Float64, s)) for s in shapes], **attributes)
    found = trace(f.ops[0], attributes, TORCH)
    assert found is not None
    return f.ops[0], found


def functions(k: Kernel) -> list[str]:
    return [python_name(c.function) for c in k.calls]


def test_a_free_operand_is_overwritten():
    _, k = kernel("Relu", (2, 3))
    assert functions(in_place(k, frozenset())) == ["relu"]
    x = torch.tensor([[-1.0, 2.0]], dtype=torch.float64)
    changed = in_place(k, frozenset((0,)))
    assert functions(changed) == ["relu_"]
    (y,) = compiled(changed, 1)(x)
    assert y is x
    assert x.tolist() == [[0.0, 2.0]]


def test_a_sum_that_names_no_dims_has_no_output_argument():
    """As in the gradient of a slice: torch has none for it."""
    _, k = kernel("SliceGrad", (2, 3), shape=(4, 3), starts=(0,), ends=(2,), axes=(0,), steps=(1,))
    assert "sum" in functions(k)
    lines, _ = render(k, ["x"], lambda name, _: name, lambda: "t", allocate=lambda *_: "memory")
    assert not [line for line in lines if "sum" in line and "memory" in line]


def test_of_two_that_commute_the_free_one_is_overwritten():
    _, k = kernel("Mul", (2, 3), (2, 3))
    a, b = torch.full((2, 3), 2.0), torch.full((2, 3), 3.0)
    (y,) = compiled(in_place(k, frozenset((1,))), 2)(a, b)
    assert y is b
    assert a[0, 0] == 2
    _, k = kernel("Sub", (2, 3), (2, 3))
    assert functions(in_place(k, frozenset((1,)))) == ["sub"]


def test_what_is_smaller_than_the_result_is_not_overwritten():
    _, k = kernel("Add", (3,), (2, 3))
    assert functions(in_place(k, frozenset((0,)))) == ["add"]
    assert functions(in_place(k, frozenset((1,)))) == ["add_"]


def test_what_is_read_again_is_not_overwritten():
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float64, (2, 3)))
    f.emit(
        "PowGrad", x, f.add_input_value("e", Tensor(Float64, (2, 3))), f.add_input_value("d", Tensor(Float64, (2, 3)))
    )
    written = trace(f.ops[0], {}, TORCH)
    assert written is not None
    args = [torch.rand(2, 3, dtype=torch.float64) + 1 for _ in range(3)]
    (want,) = compiled(written, 3)(*args)
    (got,) = compiled(in_place(written, frozenset((0, 1, 2))), 3)(*[x.clone() for x in args])
    torch.testing.assert_close(got, want)


def test_what_another_operand_shows_is_not_overwritten():
    """The transposed view of a matrix would show what has been written."""
    square = KernelTensor(torch.Size((3, 3)), torch.float64, frozenset((0,)))
    calls = [TorchCall(torch.transpose, (Ref(0), 0, 1), {}, 1), TorchCall(torch.sub, (Ref(0), Ref(1)), {}, 2)]
    written = Kernel(calls, (2,), [square, square, square._replace(within=frozenset((2,)))])
    x = torch.rand(3, 3, dtype=torch.float64)
    (got,) = compiled(in_place(written, frozenset((0,))), 1)(x.clone())
    torch.testing.assert_close(got, x - x.T)


def test_a_result_is_computed_into_a_given_place():
    for name, shapes, placed in (("MatMul", ((2, 3), (3, 4)), True), ("Exp", ((2, 3),), False)):
        op, k = kernel(name, *shapes)
        bound: dict[str, Any] = {}

        def bind(name: str, x: Any, bound: dict[str, Any] = bound) -> str:
            bound[name] = x
            return name

        lines, (text,) = render(k, ["a", "b"][: len(shapes)], bind, lambda: "s0", "place")
        assert lines == []
        assert ("out=place" in text) == placed
        assert text.startswith("copy_(place, ") != placed
        args = {n: torch.rand(s, dtype=torch.float64) for n, s in zip("ab", shapes, strict=False)}
        place = torch.empty(op.outputs[0].type.shape, dtype=torch.float64)  # type: ignore[union-attr]
        assert eval(text, bound, {**args, "place": place}) is place
        torch.testing.assert_close(place, getattr(torch, name.lower())(*args.values()))


def test_a_buffer_and_its_views():
    types = [Tensor(Float32, s) for s in ((3,), (2, 5), ())]
    flat, *views = buffer(types, DeviceMemory(torch.device("cpu")), persistent=False)()
    assert [tuple(v.shape) for v in views] == [(3,), (2, 5), ()]
    assert all(v.data_ptr() % 64 == flat.data_ptr() % 64 and v.is_contiguous() for v in views)
    flat.zero_()
    for k, v in enumerate(views):
        v.fill_(k + 1)
    assert flat.sum() == 3 * 1 + 10 * 2 + 3
    for persistent in (False, True):
        make = buffer(types, DeviceMemory(torch.device("cpu")), persistent)
        assert (make()[0] is make()[0]) == persistent


def test_a_bundle_is_waited_for_once():
    waited: list[int] = []

    def start(x: int) -> Any:
        return lambda: (waited.append(x), [torch.tensor(x), torch.tensor(x + 1)])[1]

    first, second = by_member(start, 2)(5)
    assert waited == []
    assert (int(second()), int(first())) == (6, 5)
    assert waited == [5]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_optimizers_step_whatever_the_strides(turned: bool, dtype: torch.dtype):
    """torch's fused kernels do not look at them."""

    def tensors(n: int) -> list[torch.Tensor]:
        torch.manual_seed(n)
        x = torch.rand(3, 4).to(dtype)
        return [x.t() if turned else x, torch.rand(2).to(dtype)]

    def net(step: Any, **settings: Any) -> list[torch.Tensor]:
        weights = [x.clone().requires_grad_() for x in tensors(0)]
        optimizer = step(weights, foreach=False, **settings)
        for k in range(3):
            for w, g in zip(weights, tensors(k + 1), strict=True):
                w.grad = g.clone()
            optimizer.step()
        return [w.detach() for w in weights]

    tolerance: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {}
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    weights, momenta = tensors(0), [torch.zeros_like(x) for x in tensors(0)]
    for k in range(3):
        sgd(tensors(k + 1), weights, momenta, momentum=0.9, nesterov=True, **settings)
    for a, b in zip(weights, net(torch.optim.SGD, momentum=0.9, nesterov=True, **settings), strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    weights, means, squares = tensors(0), *[[torch.zeros_like(x) for x in tensors(0)] for _ in range(2)]
    for k in range(3):
        adamw(tensors(k + 1), weights, means, squares, step=torch.tensor(k + 1), **settings)
    for a, b in zip(weights, net(torch.optim.AdamW, **settings), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


X, Y = torch.linspace(-2, 2, 12).view(3, 4), torch.linspace(1, 3, 12).view(3, 4)
OPERANDS: dict[str, tuple[Any, ...]] = {
    "addmm": (X @ Y.T, X, Y.T),
    "cat": ((X, Y), 1),
    "index_select": (X, 0, torch.tensor([2, 0])),
    "log_softmax": (X, -1),
    "matmul": (X, Y.T),
    "mm": (X, Y.T),
    "softmax": (X, -1),
    "sum": (X, 1),
    "threshold_backward": (X, Y, 0),
    "zeros": ((2, 3),),
}


@pytest.mark.parametrize("function", list(kernels._INTO), ids=lambda f: f.__name__)
def test_results_are_put_where_they_are_to_be(function: Any) -> None:
    name = getattr(function, "__name__", str(function)).split(".")[0]
    operands = OPERANDS.get(name, (X,) if name in ("gelu", "neg", "sigmoid", "tanh") else (X, Y))
    want = function(*operands)
    place = torch.full_like(want, 7)
    into, keyword = kernels._INTO[function]
    into(*operands, **{keyword: place})
    assert torch.equal(place, want)
