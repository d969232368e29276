"""Folding and pruning: which ops are removed, and that results do not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.executor.reference.sequential import SequentialExecutor, evaluate
from distir.importer import import_from_onnx
from distir.ir import Function, FunctionMaker, Op, Role, Value, parse, pformat
from distir.ir.errors import MismatchError
from distir.ir.type import Float64, Tensor
from distir.ir.validate import validate
from distir.transforms.differentiation.grad import grad
from distir.transforms.rewriting.cleanup import extend, fold, prune
from tests.transforms.reference import EXAMPLES, sound


def start(name: str = "main") -> tuple[FunctionMaker, Value]:
    f = FunctionMaker(name)
    return f, f.add_input_value("x", Tensor(Float64, (2, 3)), Role("parameter"))


def number(f: FunctionMaker, value: float) -> Value:
    return f.emit("Constant", value=(value,), shape=(), dtype=Float64)


def kinds(function: Function) -> list[str]:
    return [op.op_type for op in function.ops]


def results(function: Function) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return SequentialExecutor().compute(function, [rng.standard_normal(v.type.shape) for v in function.inputs])  # type: ignore[union-attr]


def test_prune_keeps_what_outputs_need_and_all_inputs() -> None:
    f, x = start()
    unused = f.add_input_value("unused", Tensor(Float64, ()), Role("constant"))
    y = f.emit("Exp", x)
    f.emit("Sin", f.emit("Exp", unused))
    f.set_outputs([y])
    f.updates = {y: x}
    function = f.finalize()
    pruned = prune(function)
    assert kinds(pruned) == ["Exp"]
    assert pruned.inputs == (x, unused)
    assert pruned.outputs == (y,)
    assert pruned.updates == {y: x}
    assert pruned.ops[0] is function.ops[0]


def test_prune_keeps_of() -> None:
    """A backward op keeps its forward op as `of`, or has none if that is removed."""
    f, x = start()
    y = f.emit("Exp", x)
    f.emit("ReduceSum", y, axes=(0, 1), keepdims=0)
    g = grad(f.finalize())
    pruned = prune(g)
    assert [op.of and op.of.op_type for op in pruned.ops] == [op.of and op.of.op_type for op in g.ops]
    f = extend(g)
    f.set_outputs(g.outputs[1:])
    pruned = prune(f.finalize())
    assert "ReduceSum" not in kinds(pruned)
    assert all(op.of is None or op.of in pruned.ops for op in pruned.ops)
    np.testing.assert_array_equal(results(pruned)[0], results(g)[1])


def test_prune_drops_an_of_that_is_not_there() -> None:
    """Also where no op is dead."""
    f, x = start()
    y = f.emit("Exp", x)
    f.set_outputs([y])
    function = f.finalize()
    assert prune(function) is function
    (kept,) = function.ops
    gone = Op(kept.spec, (x,), kept.attributes, (Value("z", y.type),))
    back = Op(kept.spec, (x,), kept.attributes, (y,), gone)
    (left,) = prune(Function("net", (x,), (back,), (y,), {}, {})).ops
    assert left.of is None


def test_constants_are_folded() -> None:
    f, x = start()
    two = f.emit("Add", number(f, 1.0), number(f, 1.0))
    half = f.add_op("Reciprocal", "half", [f.emit("Reshape", two, shape=(1, 1))])
    f.add_op("Mul", "y", [x, half])
    function = f.finalize()
    folded = fold(function, evaluate)
    assert kinds(folded) == ["Constant", "Mul"]
    assert folded.ops[0].attributes == {"value": (0.5,), "shape": (1, 1), "dtype": Float64}
    assert folded.ops[0].outputs == (half,)
    assert kinds(fold(function)) == ["Constant", "Add", "Reshape", "Reciprocal", "Mul"]
    np.testing.assert_array_equal(results(folded), results(function))


def test_an_export_has_nothing_to_fold() -> None:
    function, _ = import_from_onnx(EXAMPLES / "gpt2-tiny.onnx", dims={"batch": 1})
    assert fold(function, evaluate).ops == function.ops


def test_ops_alike_are_merged() -> None:
    f, x = start()
    a, b, other = f.emit("Exp", x), f.emit("Exp", x), f.emit("ReduceSum", x, axes=(0,), keepdims=1)
    f.emit("Mul", f.emit("Sin", a), f.emit("Sin", b))
    f.emit("ReduceSum", x, axes=(0,), keepdims=0)
    function = f.finalize()
    folded = fold(function)
    assert kinds(folded) == ["Exp", "ReduceSum", "Sin", "Mul", "ReduceSum"]
    assert folded.ops[3].inputs == (folded.ops[2].outputs[0],) * 2
    assert folded.outputs[0] is other
    for got, want in zip(results(folded), results(function), strict=True):
        np.testing.assert_array_equal(got, want)


def test_outputs_are_not_merged() -> None:
    """Each keeps its name, and can be the next value of its own input."""
    f, x = start()
    y = f.add_input_value("y", x.type, Role("state"))
    a, b = f.emit("Exp", x), f.emit("Exp", x)
    f.set_outputs([a, b])
    f.updates = {a: x, b: y}
    folded = fold(f.finalize())
    assert folded.outputs == (a, b)
    assert folded.updates == {a: x, b: y}
    assert kinds(folded) == ["Exp", "Exp"]


def test_ops_of_different_forward_ops_are_not_merged() -> None:
    f, x = start()
    y = f.emit("Exp", x)
    z = f.emit("Exp", y)
    a, b = f.emit("Neg", y), f.emit("Neg", y)
    f.ops[-2].of, f.ops[-1].of = f.ops[0], f.ops[1]
    f.set_outputs([f.emit("Add", f.emit("Add", a, b), z)])
    assert kinds(fold(f.finalize())).count("Neg") == 2


def test_views_that_undo_each_other_go() -> None:
    f, x = start()
    back = f.emit("Transpose", f.emit("Transpose", x, perm=(1, 0)), perm=(1, 0))
    flat = f.emit("Reshape", f.emit("Reshape", back, shape=(6,)), shape=(2, 3))
    turned = f.emit("Reshape", f.emit("Transpose", flat, perm=(1, 0)), shape=(2, 3))  # is no undoing
    f.emit("Exp", turned)
    function = f.finalize()
    assert kinds(fold(function)) == ["Transpose", "Reshape", "Exp"]
    np.testing.assert_array_equal(results(fold(function)), results(function))


def test_transposes_are_undone_by_the_inverse_only() -> None:
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float64, (2, 2, 2)))
    f.set_outputs(
        [
            f.emit("Exp", f.emit("Transpose", f.emit("Transpose", x, perm=(1, 2, 0)), perm=p))
            for p in ((1, 2, 0), (2, 0, 1))
        ]
    )
    function = f.finalize()
    assert kinds(fold(function)) == ["Transpose", "Transpose", "Exp", "Exp"]
    np.testing.assert_array_equal(results(fold(function)), results(function))


def test_a_view_that_a_backward_op_is_of_stays() -> None:
    f, x = start()
    w = f.add_input_value("w", Tensor(Float64, (3, 2)), Role("parameter"))
    y = f.emit("Exp", f.emit("Transpose", f.emit("Transpose", x, perm=(1, 0)), perm=(1, 0)))
    f.emit("ReduceSum", f.emit("MatMul", y, w), axes=(0, 1), keepdims=0)
    folded = fold(grad(f.finalize()))
    forward = len([op for op in folded.ops if op.of is None])
    assert kinds(folded)[:3] == ["Transpose", "Transpose", "Exp"]
    assert all(op.of in folded.ops[:forward] for op in folded.ops[forward:])


@given(st.data())
def test_random_programs_compute_the_same(data: st.DataObject) -> None:
    f, x = start("random")
    values: list[Any] = [x, number(f, 0.5), number(f, 2.0)]
    for _ in range(data.draw(st.integers(1, 15))):
        a, b = (data.draw(st.sampled_from(values)) for _ in range(2))
        kind = data.draw(st.sampled_from(["Add", "Mul", "Tanh", "Transpose", "Reshape"]))
        shape = a.type.shape
        if kind == "Transpose":
            values.append(f.emit(kind, a, perm=tuple(reversed(range(len(shape))))))
        elif kind == "Reshape":
            values.append(f.emit(kind, a, shape=shape[::-1]))
        elif kind == "Tanh":
            values.append(f.emit(kind, a))
        else:
            b = b if b.type.shape in (shape, ()) else a
            values.append(f.emit(kind, a, b))
    f.set_outputs([values[-1], *data.draw(st.lists(st.sampled_from(values), max_size=2))])
    function = f.finalize()
    for folded in (fold(function, evaluate), fold(function), prune(function)):
        assert len(folded.ops) <= len(function.ops)
        sound(folded)
        for got, want in zip(results(folded), results(function), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)


def scaled(*factors: float) -> Function:
    """The input times each factor."""
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float64, (2,)))
    made = [f.emit("Constant", value=(z,), shape=(), dtype=Float64) for z in factors]
    f.set_outputs([f.emit("Mul", x, z) for z in made])
    return f.finalize()


def test_zeros_of_either_sign_stay_two() -> None:
    """0.0 == -0.0, but 1 / 0.0 is not 1 / -0.0: neither folding nor validation may take one for the other."""
    g = fold(scaled(0.0, -0.0))
    assert len(g.ops) == 4
    plus, minus = SequentialExecutor().compute(g, [np.ones(2)])
    assert not np.signbit(plus).any()
    assert np.signbit(minus).all()
    with pytest.raises(MismatchError):
        validate(scaled(-0.0, 0.0), g)


def test_a_constant_that_is_no_number_is_itself() -> None:
    function = scaled(float("nan"))
    validate(parse(pformat(function)), function)
