"""Recomposition: products and their biases become one op again, and compute the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import distir
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.function import Function, FunctionMaker, Value
from distir.ir.type import Float64, Int64, Tensor
from distir.ir.verify import verify
from distir.transforms.rank.as_run import _recomposed
from distir.transforms.rank.recompose import recompose
from tests.transforms.programs import error, imported_mlp, small_gpt

SMALL = "gpt:layers=4,hidden=16,heads=2,seq=4,batch=2,vocab=8"


def kinds(f: Function) -> Counter[str]:
    return Counter(op.op_type for op in f.ops)


def same_results(f: Function) -> Function:
    """The function recomposed, checked to compute the same."""
    rng = np.random.default_rng(0)
    arrays: list[Any] = [rng.integers(0, 9, v.type.shape) + 0.5 * (v.type.dtype is Float64) for v in f.inputs]  # type: ignore[union-attr]
    new = recompose(f)
    run = SequentialExecutor().compute
    assert error(run(new, arrays), run(f, arrays)) <= 1e-12
    assert (new.inputs, new.outputs, new.updates) == (f.inputs, f.outputs, f.updates)
    return new


def linear(bias_shape: tuple[int, ...], dtype: Any = Float64, lead: tuple[int, ...] = (4,), first: bool = False) -> Any:
    """x times a transposed matrix, plus a bias."""
    f = FunctionMaker()
    x, w, b = [f.add_input_value(n, Tensor(dtype, s)) for n, s in (("x", (*lead, 3)), ("w", (5, 3)), ("b", bias_shape))]
    y = f.emit("MatMul", x, f.emit("Transpose", w, perm=(1, 0)))
    return f, y, f.emit("Add", b, y) if first else f.emit("Add", y, b)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("bias", "lead"), [((5,), (4,)), ((4, 5), (4,)), ((5,), (2, 4))])
def test_a_product_and_a_bias(bias: tuple[int, ...], lead: tuple[int, ...], first: bool):
    f, _, _ = linear(bias, lead=lead, first=first)
    new = same_results(f.finalize())
    assert kinds(new) == {"Gemm": 1}
    assert new.ops[0].attributes == {"transB": 1}


@pytest.mark.parametrize(
    ("bias", "dtype", "lead"), [((1,), Float64, (4,)), ((5,), Int64, (4,)), ((2, 4, 5), Float64, (2, 4))]
)
def test_what_is_no_gemm_stays(bias: tuple[int, ...], dtype: Any, lead: tuple[int, ...]):
    f, _, _ = linear(bias, dtype, lead)
    assert kinds(same_results(f.finalize())) == {"Transpose": 1, "MatMul": 1, "Add": 1}


def test_a_product_that_is_used_again_stays():
    f, product, y = linear((5,))
    f.set_outputs([product, y])
    assert kinds(same_results(f.finalize())) == {"Transpose": 1, "MatMul": 1, "Add": 1}


def test_the_gradient_of_a_transposed_matrix():
    def gradient(outputs: Any) -> Function:
        f = FunctionMaker()
        x, d = [f.add_input_value(n, Tensor(Float64, s)) for n, s in (("x", (2, 4, 3)), ("d", (2, 4, 5)))]
        dw: Value = f.emit("MatMulGradWeight", x, d)
        f.set_outputs(outputs(dw, f.emit("Transpose", dw, perm=(1, 0))))
        return f.finalize()

    assert kinds(same_results(gradient(lambda dw, turned: [turned]))) == {"MatMulGradWeight": 1}
    assert kinds(same_results(gradient(lambda dw, turned: [turned, dw]))) == {"MatMulGradWeight": 1, "Transpose": 1}


@pytest.mark.parametrize("program", [imported_mlp, small_gpt])
def test_of_training_steps(program: Any):
    p = program()
    new = recompose(p.function)
    verify(new)
    assert error(SequentialExecutor().compute(new, p.arrays), p.results()) <= 1e-12
    assert kinds(new)["Gemm"] >= 6
    assert recompose(p.function) is new


def test_nothing_to_do_gives_the_very_function():
    f = FunctionMaker()
    f.emit("Exp", f.add_input_value("x", Tensor(Float64, (2,))))
    found = f.finalize()
    assert recompose(found) is found


def test_functions_of_one_form_alone_are_taken_to_be_alike():
    """Stages in which there is nothing to do, beside others."""
    program = distir.distribute(distir.load(SMALL, loss="cross-entropy", optimizer="sgd"), distir.Plan(pp=4))
    found = _recomposed(program)
    assert found.keys() == {*program.callees(), program}
    assert {f: f is g for f, g in found.items()} == {f: recompose(f) is f for f in found}
    assert len({f is g for f, g in found.items()}) == 2
