"""Reverse-mode differentiation: against finite differences and by hand. PyTorch: test_training.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, FunctionMaker, Role, Value
from distir.ir.errors import ModelError, UsageError
from distir.ir.spec import lookup
from distir.ir.type import Float64, Int64, Tensor
from distir.ops.rules import shape_of
from distir.transforms.differentiation.grad import grad
from tests.transforms.reference import sound


class Maker(FunctionMaker):
    """Inputs in float64, sums of everything."""

    def x(self, name: str, *shape: int, role: str | None = "parameter") -> Value:
        return self.add_input_value(name, Tensor(Float64, shape), Role(role) if role else None)

    def total(self, v: Value, name: str = "loss") -> Value:
        return self.add_op("ReduceSum", name, [v], {"axes": tuple(range(len(shape_of(v)))), "keepdims": 0})


def numbers(function: Function, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape_of(v)) for v in function.inputs]


def differences(function: Function, arrays: list[np.ndarray], k: int, output: int = 0) -> np.ndarray:
    """Central differences of an output along every element of input k."""
    result = np.zeros_like(arrays[k])
    for at in np.ndindex(result.shape):
        ends: list[float] = []
        for step in (1e-6, -1e-6):
            moved = [a.copy() for a in arrays]
            moved[k][at] += step
            ends.append(float(SequentialExecutor().compute(function, moved)[output]))
        result[at] = (ends[0] - ends[1]) / 2e-6
    return result


def check(function: Function, loss: Any = 0, inputs: list[int] | None = None) -> Function:
    """The gradients of the given inputs (default: all) equal central differences; gives the differentiated function."""
    inputs = list(range(len(function.inputs))) if inputs is None else inputs
    arrays = numbers(function)
    g = sound(grad(function, loss, [function.inputs[k] for k in inputs]))
    got = SequentialExecutor().compute(g, arrays)
    at = loss if isinstance(loss, int) else [v.name for v in function.outputs].index(loss)
    for k, d in zip(inputs, got[len(function.outputs) :], strict=True):
        np.testing.assert_allclose(d, differences(function, arrays, k, at), rtol=1e-6, atol=1e-8)
    return g


def test_chain() -> None:
    f = Maker()
    x, w, b = f.x("x", 4, 3), f.x("w", 3, 5), f.x("b", 5)
    f.total(f.emit("Tanh", f.emit("Add", f.emit("MatMul", x, w), b)))
    check(f.finalize())


def test_a_value_used_several_times_sums_its_gradients() -> None:
    f = Maker()
    x = f.x("x", 4, 4)
    y = f.emit("Exp", x)
    f.total(f.emit("Mul", f.emit("MatMul", y, x), f.emit("Add", y, x)))
    g = check(f.finalize())
    assert g.outputs[-1].name == "x.grad"


def test_gemm_is_decomposed_and_keeps_its_name() -> None:
    f = Maker()
    x, w, b = f.x("x", 4, 3), f.x("w", 5, 3), f.x("b", 5)
    y = f.add_op("Gemm", "y", [x, w, b], {"transB": 1, "alpha": 0.5, "beta": 2.0})
    f.total(f.emit("Mul", y, y))
    g = check(f.finalize())
    assert "Gemm" not in {op.op_type for op in g.ops}
    assert "y" in {v.name for op in g.ops for v in op.outputs}
    assert all(op.of is None or op.of in g.ops for op in g.ops)


def test_one_of_several_outputs_of_an_op() -> None:
    f = Maker()
    x = f.x("x", 4, 6)
    a, _, c = f.emit("Split", x, axis=1, parts=3)
    f.set_outputs([f.total(f.emit("Mul", a, f.emit("Exp", c)))])
    check(f.finalize())


def test_several_outputs_and_a_loss_by_name_or_value() -> None:
    f = Maker()
    x, y = f.x("x", 3), f.x("y", 3)
    f.set_outputs([f.total(f.emit("Mul", x, x), "a"), f.total(f.emit("Mul", x, f.emit("Sin", y)), "b")])
    function = f.finalize()
    g = check(function, "b")
    assert g.outputs[:2] == function.outputs
    assert grad(function, function.outputs[1]).outputs[2].name == "x.grad"
    assert len(check(function, 1).outputs) == 4


def test_values_inside_the_function() -> None:
    f = Maker()
    x = f.x("x", 3)
    y = f.emit("Exp", x)
    loss = f.total(f.emit("Mul", y, y))
    f.set_outputs([loss])
    function = f.finalize()
    arrays = numbers(function)
    got = SequentialExecutor().compute(grad(function, loss, [y, loss, x]), arrays)
    np.testing.assert_allclose(got[1], 2 * np.exp(arrays[0]))
    assert got[2] == 1
    np.testing.assert_allclose(got[3], 2 * np.exp(2 * arrays[0]))


def test_what_the_loss_does_not_depend_on_is_zero() -> None:
    f = Maker()
    x, y = f.x("x", 3), f.x("y", 2, 2)
    f.set_outputs([f.total(f.emit("Detach", f.emit("Mul", x, x))), f.emit("Exp", y)])
    function = f.finalize()
    got = SequentialExecutor().compute(grad(function), numbers(function))
    np.testing.assert_array_equal(got[2], np.zeros(3))
    np.testing.assert_array_equal(got[3], np.zeros((2, 2)))


def test_a_parameter_as_the_loss() -> None:
    f = Maker()
    x = f.x("x")
    f.set_outputs([x])
    assert SequentialExecutor().compute(grad(f.finalize()), [np.array(3.0)]) == [3.0, 1.0]


def test_without_wrt_it_is_the_parameters() -> None:
    f = Maker()
    x, w = f.x("x", 4, 3, role="data"), f.x("w", 3, 5)
    f.total(f.emit("MatMul", x, w))
    assert [v.name for v in grad(f.finalize()).outputs] == ["loss", "w.grad"]
    f = Maker()
    x, w = f.x("x", 4, 3, role=None), f.x("w", 3, 5, role=None)
    f.total(f.emit("MatMul", x, w))
    assert [v.name for v in grad(f.finalize()).outputs] == ["loss", "w.grad"]


def test_backward_ops_are_of_their_forward_op() -> None:
    f = Maker()
    x = f.x("x", 4, 4)
    y = f.add_op("Exp", "y", [x])
    z = f.add_op("MatMul", "z", [y, y])
    f.total(f.emit("Mul", z, y))
    function = f.finalize()
    g = grad(function)
    assert g.ops[: len(function.ops)] == function.ops
    assert all(op.of in function.ops for op in g.ops[len(function.ops) :])
    added = [op for op in g.ops if op.op_type == "Add"]
    assert [op.of.outputs[0].name for op in added if op.of] == ["z", "z"]


def test_only_what_gradients_need_is_kept() -> None:
    f = Maker()
    x, w = f.x("x", 4, 3, role="data"), f.x("w", 3, 5)
    f.total(f.emit("MatMul", x, w))
    g = grad(f.finalize())
    used = {v for op in g.ops for v in op.inputs} | set(g.outputs)
    assert all(set(op.outputs) & used for op in g.ops)


def test_errors() -> None:
    f = Maker()
    x, i = f.x("x", 4, 3), f.add_input_value("i", Tensor(Int64, (3,)), Role("constant"))
    y = f.add_op("Exp", "y", [x])
    slope = f.add_op("TanhGrad", "slope", [x, x])
    hole = f.add_op("ReduceSum", "hole", [slope], {"axes": (0, 1), "keepdims": 0})
    count = f.add_op("ReduceSum", "count", [i], {"axes": (0,), "keepdims": 0})
    total = f.total(y)
    f.set_outputs([y, hole, count, total])
    function = f.finalize()
    with pytest.raises(UsageError, match=r"%y has shape \(4, 3\), not one number"):
        grad(function, "y")
    with pytest.raises(UsageError, match=r"%count is .*, not a floating"):
        grad(function, "count")
    with pytest.raises(UsageError, match="no output 7"):
        grad(function, 7)
    with pytest.raises(UsageError, match="no value 'nothing'"):
        grad(function, "nothing")
    with pytest.raises(UsageError, match="respect to %i"):
        grad(function, "loss", [i])
    with pytest.raises(ModelError, match="%slope: TanhGrad has no gradient"):
        grad(function, "hole")
    assert grad(function, "loss", [x]).outputs[-1].name == "x.grad"


def test_a_rule_is_applied_once_to_ops_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are alike; but x + x is not of the kind of x + y."""
    f = Maker()
    x, y = f.x("x", 3), f.x("y", 3)
    for _ in range(4):
        x = f.emit("Tanh", f.emit("Add", x, y))
    f.set_outputs([f.total(f.emit("Add", x, x))])
    spec = lookup("Tanh")
    rule, calls = spec.grad, []
    assert rule is not None
    monkeypatch.setattr(spec, "grad", lambda *args: calls.append(args) or rule(*args))
    check(f.finalize())
    assert len(calls) == 1


def test_ops_of_which_other_results_are_used_are_of_other_kinds() -> None:
    f = Maker()
    x, y = f.x("x", 2, 4), f.x("y", 2, 4)
    first, _ = f.emit("Split", x, axis=1, parts=2)
    _, second = f.emit("Split", y, axis=1, parts=2)
    f.set_outputs([f.total(f.emit("Mul", f.emit("Tanh", first), f.emit("Tanh", second)))])
    check(f.finalize())
