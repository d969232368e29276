"""The reference executor: one array a device, pieces meet in collectives only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distir.executor.reference.numpy_namespace import NUMPY
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Device, Function, FunctionMaker, Mesh, Value
from distir.ir.errors import DistirError, MismatchError, UsageError
from distir.ir.function import Role
from distir.ir.type import REPLICATE, SUM, BFloat16, DType, Float16, Float64, Int64, Placement, Shard, Tensor
from tests.transforms.programs import Plan, distributed, small_gpt

GPUS = [Device("gpu", i) for i in range(4)]
MESH = Mesh(GPUS, {"dp": 2, "tp": 2})


def placed(shape: tuple[int, ...], *placements: Placement) -> Tensor:
    return Tensor.whole(Float64, shape, MESH, placements)


def product() -> Function:
    """x split over dp and its columns over tp, times w with its rows over tp: partial sums, reduced."""
    f = FunctionMaker("product")
    x = f.add_input_value("x", placed((4, 6), Shard(0), Shard(1)))
    w = f.add_input_value("w", placed((6, 3), REPLICATE, Shard(0)))
    y = f.add_op("MatMul", "y", [x, w])
    f.add_op("MPIAllreduce", "z", [y], {"axis": "tp"})
    return f.finalize()


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((4, 6)), rng.standard_normal((6, 3))]


def test_pieces_are_what_types_say() -> None:
    x, w = arrays()
    seen: dict[str, Any] = {}
    function = product()
    (z,) = SequentialExecutor(tap=lambda v, value: seen.setdefault(v.name, value)).compute(function, [x, w])
    assert np.allclose(z, x @ w, atol=1e-15)
    assert len(seen["y"]) == 4
    for (i, j), y in zip([(0, 0), (0, 1), (1, 0), (1, 1)], seen["y"], strict=True):
        rows, columns = slice(2 * i, 2 * i + 2), slice(3 * j, 3 * j + 3)
        assert np.array_equal(y, x[rows, columns] @ w[columns])


def test_inputs_by_value_or_in_order() -> None:
    x, w = arrays()
    function = product()
    one = SequentialExecutor("numpy").compute(function, [x, w])
    two = SequentialExecutor().compute(function, dict(zip(function.inputs, [x, w], strict=True)))
    assert np.array_equal(one[0], two[0])


def test_what_does_not_fit_is_said() -> None:
    x, w = arrays()
    function = product()
    with pytest.raises(UsageError, match="runs on numpy, got 'torch'"):
        SequentialExecutor("torch")
    with pytest.raises(UsageError, match="has 2 inputs, got 1"):
        SequentialExecutor().compute(function, [x])
    with pytest.raises(UsageError, match="no array for input %w"):
        SequentialExecutor().compute(function, {function.inputs[0]: x})
    with pytest.raises(UsageError, match=r"input %w: expected shape \(6, 3\), got \(3, 6\)"):
        SequentialExecutor().compute(function, [x, w.T])


def test_an_error_names_the_op() -> None:
    f = FunctionMaker("bad")
    x = f.add_input_value("x", Tensor(Float64, (2, 2)))
    f.add_op("Gemm", "y", [x, x])
    with pytest.raises(DistirError, match=r"bad: %y = Gemm\(%x, %x\): ValueError"):
        SequentialExecutor(tap=None).compute(_with_odd_attribute(f.finalize()), [np.ones((2, 2))])


def _with_odd_attribute(function: Function) -> Function:
    from distir.ir.function import Attributes, Op

    (op,) = function.ops
    odd = Op(op.spec, op.inputs, Attributes({"alpha": (1.0, 2.0, 3.0)}), op.outputs)
    return Function(function.name, function.inputs, (odd,), function.outputs)


def test_replicas_of_a_result_are_compared() -> None:
    x, w = arrays()

    def corrupt(v: Value, value: Any) -> Any:
        return [value[0] + 1, *value[1:]] if v.name == "z" else value

    with pytest.raises(MismatchError, match="replicas of"):
        SequentialExecutor(tap=corrupt).compute(product(), [x, w])


def test_a_missing_reduction_is_summed_in_the_result_but_not_before() -> None:
    f = FunctionMaker("partial")
    x = f.add_input_value("x", placed((4, 4), REPLICATE, Shard(1)))
    y = f.add_op("ReduceSum", "y", [x], {"axes": (1,), "keepdims": 0})
    assert isinstance(y.type, Tensor)
    assert y.type.on("tp") is SUM
    x0 = np.arange(16.0).reshape(4, 4)
    (got,) = SequentialExecutor().compute(f.finalize(), [x0])
    assert np.array_equal(got, x0.sum(1))


def test_padded_inputs_and_results() -> None:
    f = FunctionMaker("padded")
    x = f.add_input_value("x", Tensor(Float64, (3, 6)), Role("data", 0, (3, 5)))
    y = f.emit("Exp", x)
    f.set_outputs([y])
    f.sources[y] = (3, 5)
    x0 = np.arange(15.0).reshape(3, 5)
    (got,) = SequentialExecutor().compute(f.finalize(), [x0])
    assert np.array_equal(got, np.exp(x0))


def test_offsets_reach_ops_that_index() -> None:
    """A table split by rows gives rows held elsewhere as 0, so that the sum is the row."""
    f = FunctionMaker("rows")
    table = f.add_input_value("table", placed((8, 3), REPLICATE, Shard(0)))
    ids = f.add_input_value("ids", Tensor.whole(Int64, (4,), MESH, (Shard(0), REPLICATE)))
    f.add_op("MPIAllreduce", "rows", [f.emit("Gather", table, ids)], {"axis": "tp"})
    rng = np.random.default_rng(0)
    t, i = rng.standard_normal((8, 3)), np.array([7, 0, 3, 4])
    (got,) = SequentialExecutor().compute(f.finalize(), [t, i])
    assert np.array_equal(got, t[i])


def test_a_host_scatters_and_gathers() -> None:
    host = Device("cpu", 0)
    f = FunctionMaker("host")
    x = f.add_input_value("x", Tensor(Float64, (4, 6), host))
    w = f.add_input_value("w", Tensor(Float64, (6,), host))
    a = f.add_op("MPIScatter", "a", [x], {"to": MESH, "placements": (Shard(0), Shard(1, 3))})
    b = f.add_op("MPIScatter", "b", [w], {"to": MESH, "placements": (REPLICATE, Shard(0, 3))})
    y = f.emit("Mul", a, b)
    f.add_op("MPIGather", "y", [y], {"to": host})
    f.add_op("MPIReduce", "s", [f.emit("ReduceSum", y, axes=(1,), keepdims=0)], {"to": host})
    x0, w0 = np.arange(24.0).reshape(4, 6), np.arange(6.0)
    got = SequentialExecutor().compute(f.finalize(), [x0, w0])
    assert np.array_equal(got[0], x0 * w0)
    assert np.array_equal(got[1], (x0 * w0).sum(1))


def test_bf16_stays_bf16() -> None:
    f = FunctionMaker("half")
    x = f.add_input_value("x", Tensor(BFloat16, (4, 4)))
    f.emit("MatMul", f.emit("Tanh", x), x)
    (got,) = SequentialExecutor().compute(f.finalize(), [np.ones((4, 4))])
    assert got.dtype == BFloat16.numpy


def test_the_placed_program_runs_unrolled_in_time() -> None:
    """Before it is scheduled a program holds all microbatches side by side, and gives the same."""
    program = small_gpt(layers=1)
    made = distributed(program, Plan(2, 2, 1, 2))
    want = program.results()
    for function in (made.placed, made.program):
        for a, b in zip(SequentialExecutor().compute(function, program.arrays), want, strict=True):
            assert np.max(np.abs(a - b)) <= 1e-10 * max(1.0, float(np.max(np.abs(b))))


@pytest.mark.parametrize("dtype", [BFloat16, Float16], ids=repr)
def test_sums_of_small_floats_are_rounded_once(dtype: DType) -> None:
    """As torch does it; else the loss of a vocabulary is wrong in its second digit."""
    x = np.random.default_rng(0).random((3, 509)).astype(dtype.numpy)
    want = x.astype(np.float64).sum(1)
    got = NUMPY.sum(x, axis=1)
    assert got.dtype == dtype.numpy
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2.0 ** -(8 if dtype is BFloat16 else 10))
