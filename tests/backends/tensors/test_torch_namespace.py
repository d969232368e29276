"""Ops on torch tensors: through the array namespace, and as the torch calls they come to, they are as on
numpy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from distir.backends.lowering.engine import Allocate, double_scalars, to_numpy, to_torch
from distir.backends.lowering.kernels import Kernel, literal, render
from distir.backends.lowering.torch_calls import DependsOnData, trace
from distir.backends.tensors.staging import DeviceMemory
from distir.backends.tensors.torch_namespace import TORCH, TorchNamespace, torch_dtype
from distir.executor.reference.numpy_namespace import NUMPY
from distir.executor.reference.sequential import evaluate
from distir.ir.errors import ModelError
from distir.ir.function import FunctionMaker, Op
from distir.ir.spec import Spec
from distir.ir.type import BFloat16, DType, Float32, Float64, Int32, Tensor
from distir.ops.rules import tensor
from tests.ops.samples import SAMPLES, Sample

CPU = torch.device("cpu")
each = pytest.mark.parametrize("sample", SAMPLES, ids=[f"{s.op}-{i}" for i, s in enumerate(SAMPLES)])


def one_op(s: Sample) -> Op:
    f = FunctionMaker(s.op)
    operands = [f.add_input_value(f"x{k}", Tensor(o.dtype, o.shape)) for k, o in enumerate(s.operands)]
    f.emit(s.op, *operands, **s.attributes)
    return f.ops[0]


def tensors(op: Op, arrays: list[Any]) -> list[torch.Tensor]:
    return [to_torch(np.asarray(x), v.type.dtype, CPU) for x, v in zip(arrays, op.inputs, strict=True)]  # type: ignore[union-attr]


def compare(op: Op, want: Any, got: Any) -> None:
    wants = want if isinstance(want, tuple | list) else (want,)
    gots = got if isinstance(got, tuple | list) else (got,)
    for v, a, b in zip(op.outputs, wants, gots, strict=True):
        t = v.type
        assert isinstance(t, Tensor)
        assert (tuple(b.shape), b.dtype) == (t.shape, torch_dtype(t.dtype))
        rtol = 1e-5 if t.dtype is Float32 else 1e-10
        np.testing.assert_allclose(np.asarray(b, np.float64), np.asarray(a, np.float64), rtol, atol=rtol)


@each
def test_through_the_namespace(sample: Sample):
    op, arrays = one_op(sample), sample.arrays()
    if op.spec.eval is not None:
        with double_scalars():
            compare(op, evaluate(op, arrays, None), evaluate(op, tensors(op, arrays), None, TORCH))


def attributes(op: Op) -> dict[str, Any]:
    attrs = dict(op.attributes)
    if op.spec.local:
        attrs |= op.spec.local(op.attributes, [v.type for v in op.inputs], [v.type for v in op.outputs])
    if (indexed := op.spec.indexed(op.attributes)) is not None:
        slot, dim = indexed
        attrs["start"] = tensor(op.inputs[slot] if slot >= 0 else op.outputs[~slot]).starts(dim, None)
    return attrs


def compiled(kernel: Kernel, operands: int) -> Any:
    """A Python function of the kernel's calls."""
    bound: dict[str, Any] = {}

    def bind(name: str, x: Any) -> str:
        bound[f"{name}_{len(bound)}"] = x
        return f"{name}_{len(bound) - 1}"

    names = iter(f"s{k}" for k in range(1000))
    row = [f"v{k}" for k in range(operands)]
    lines, results = render(kernel, row, bind, lambda: next(names))
    source = [f"def f({', '.join(row)}):", *(f"    {x}" for x in lines), f"    return ({', '.join(results)},)"]
    exec("\n".join(source), bound)
    return bound["f"]


@each
def test_as_torch_calls(sample: Sample):
    op, arrays = one_op(sample), sample.arrays()
    if op.spec.eval is None:
        return
    with double_scalars():
        kernel = trace(op, attributes(op), TORCH)
        assert kernel is not None
        given = tensors(op, arrays)
        before = [x.clone() for x in given]
        compare(op, evaluate(op, arrays, None), compiled(kernel, len(given))(*given))
    assert all(map(torch.equal, given, before))  # operands are not changed


@each
def test_torch_s_own_kernel(sample: Sample):
    op, arrays = one_op(sample), sample.arrays()
    if op.spec.torch is not None:
        import operator

        kernel = operator.attrgetter(op.spec.torch)(torch)
        compare(op, evaluate(op, arrays, None), kernel(*tensors(op, arrays), **op.attributes))


def test_what_looks_at_data_is_called_itself():
    spec = Spec("Peek", eval=lambda xp, x: x * 2 if float(x[0]) > 0 else x)
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float64, (2,)))
    y = f.add_input_value("y", Tensor(Float64, (2,)))
    assert trace(Op(spec, (x,), f.emit("Neg", x) and f.ops[0].attributes, (y,)), {}, TORCH) is None
    assert issubclass(DependsOnData, Exception)


def test_what_is_not_of_its_type_is_refused():
    spec = Spec("Wrong", eval=lambda xp, x: xp.cast(x, Int32))
    f = FunctionMaker("f")
    x, y = (f.add_input_value(name, Tensor(Float64, (2,))) for name in "xy")
    f.emit("Neg", x)
    with pytest.raises(ModelError, match="torch gives"):
        trace(Op(spec, (x,), f.ops[0].attributes, (y,)), {}, TORCH)


@pytest.mark.parametrize("allocate", [None, DeviceMemory(CPU).allocate])
@pytest.mark.parametrize("dtype", DType.all.values(), ids=str)
def test_arrays_to_torch_and_back(dtype: DType, allocate: Allocate | None):
    x = np.array([[0, 1, 3], [1, 0, 2]]).astype(dtype.numpy)
    x.flags.writeable = False
    y = to_torch(x, dtype, CPU, allocate)
    assert y.dtype == torch_dtype(dtype)
    z = to_numpy(y, dtype)
    assert z.dtype == dtype.numpy
    np.testing.assert_array_equal(z.astype(float), x.astype(float))


@pytest.mark.parametrize("allocate", [None, DeviceMemory(CPU).allocate])
def test_casts_on_the_way(allocate: Allocate | None):
    x = np.array([1.5, -2.0], np.float32)
    assert to_torch(x, BFloat16, CPU, allocate).dtype == torch.bfloat16
    assert to_torch(x.astype(BFloat16.numpy), Float64, CPU, allocate).tolist() == [1.5, -2.0]


@pytest.mark.parametrize("dtype", [Float32, BFloat16], ids=str)
@pytest.mark.parametrize("allocate", [None, DeviceMemory(CPU).allocate])
def test_arrays_of_any_strides_are_copied(dtype: DType, allocate: Allocate | None):
    """Optimizers change weights in place: not those of whoever gave them."""
    x = np.arange(6).reshape(2, 3).astype(dtype.numpy)
    for given in (x, x.T, x[:, ::2], np.broadcast_to(x[0], (4, 3)), np.asarray(x[0, 0])):
        before = given.astype(float).tolist()
        y = to_torch(given, dtype, CPU, allocate)
        assert y.is_contiguous()
        assert y.tolist() == before
        y.fill_(7)
        assert given.astype(float).tolist() == before


def test_literals():
    bound: list[tuple[str, Any]] = []

    def bind(name: str, x: Any) -> str:
        bound.append((name, x))
        return name

    plain = [None, True, 3, -0.5, "mean", (1, 2), [3]]
    assert [literal("c", x, bind) for x in plain] == ["None", "True", "3", "-0.5", "'mean'", "(1, 2)", "[3]"]
    assert [literal("c", x, bind) for x in (float("inf"), slice(1), torch.int8)] == ["c", "c", "dtype"]


@pytest.mark.parametrize("numbers", [(0, None), (None, -math.inf), (None, None)])
def test_where_takes_numbers_on_gpus_as_on_cpus(numbers: tuple[float | None, float | None]) -> None:
    """There by masked_fill; here tried on tensors that are not on the device."""
    gpu = TorchNamespace("meta")
    condition = torch.tensor([[True], [False]])
    a, b = (torch.tensor([1.5, 2.5]) * k if x is None else x for k, x in enumerate(numbers, 1))
    called: list[Any] = []

    class Listen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    with Listen():
        got = gpu.where(condition, a, b)
    assert (torch.where in called) is (numbers == (None, None))  # which would bring a number from the host
    want = torch.where(condition, a, b)  # type: ignore[call-overload]
    assert torch.equal(got, want)
    assert got.dtype == want.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize(("shape", "axis"), [((2, 0), 1), ((0, 3), 0), ((0, 3), 1), ((2, 0, 3), (0, 1)), ((0,), None)])
@pytest.mark.parametrize("name", ["max", "min"])
def test_the_largest_and_smallest_of_nothing(name: str, shape: Any, axis: Any, dtype: torch.dtype) -> None:
    """As numpy's reference: infinite, or the end of the range. bfloat16 is compared as float32."""
    got = getattr(TORCH, name)(torch.zeros(shape, dtype=dtype), axis=axis)
    assert got.dtype == dtype
    like = np.zeros(shape, "f4" if dtype is torch.bfloat16 else str(dtype).removeprefix("torch."))
    np.testing.assert_array_equal(
        got.float() if dtype is torch.bfloat16 else got, getattr(NUMPY, name)(like, axis=axis)
    )
