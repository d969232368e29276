"""Decomposition: which ops stay, the names of parts, and the `of` of backward ops."""

from __future__ import annotations

import numpy as np

from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import verify
from distir.ir.function import Function, FunctionMaker, Role
from distir.ir.type import Float64, Tensor
from distir.transforms.rewriting.decompose import decompose


def program() -> Function:
    f = FunctionMaker("program")
    x = f.add_input_value("x", Tensor(Float64, (4, 6)), Role("data", batch=0))
    w = f.add_input_value("w", Tensor(Float64, (6, 6)), Role("parameter"))
    b = f.add_input_value("b", Tensor(Float64, (6,)), Role("parameter"))
    y = f.add_op("Gemm", "add", [x, w, b], {"alpha": 0.5, "transB": 1})
    gemm = f.ops[-1]
    m = f.add_op("ReduceMean", "m", [y], {"axes": (0, 1), "keepdims": 0})
    new = f.add_op("Sub", "new", [w, w], of=gemm)
    f.set_outputs([m, new])
    f.updates = {new: w}
    return f.finalize()


def test_values_roles_and_updates_stay():
    source = program()
    f = decompose(source)
    verify(f)
    assert f.inputs == source.inputs
    assert f.outputs == source.outputs
    assert f.updates == source.updates
    assert [op.op_type for op in f.ops] == [
        *("Transpose", "MatMul", "Constant", "Mul", "Add"),
        *("ReduceSum", "Constant", "Div", "Sub"),
    ]
    assert [v.name for op in f.ops for v in op.outputs] == [
        *("add.transpose", "add.matmul", "add.constant", "add.mul", "add"),
        *("m.reducesum", "m.constant", "m", "new"),
    ]
    arrays = [np.random.default_rng(0).normal(size=v.type.global_shape) for v in f.inputs]  # type: ignore[union-attr]
    for a, b in zip(*(SequentialExecutor().compute(g, arrays) for g in (f, source)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_a_backward_op_points_to_the_part_that_makes_the_result():
    f = decompose(program())
    (sub,) = [op for op in f.ops if op.op_type == "Sub"]
    assert sub.of is f.producers()[next(v for op in f.ops for v in op.outputs if v.name == "add")]


def test_nothing_to_do_gives_the_function_itself():
    f = decompose(program())
    assert decompose(f) is f


def test_called_functions_are_taken_apart_once():
    callee = program()
    f = FunctionMaker("main")
    args = [f.add_input_value(v.name, v.type) for v in callee.inputs]
    for _ in range(2):
        f.add_op("Call", None, args, {"callee": callee})
    got = decompose(f.finalize())
    verify(got)
    (only,) = got.callees()
    assert "Gemm" not in {op.op_type for op in only.ops}
