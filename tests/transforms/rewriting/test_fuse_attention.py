"""Attention is matched in all the ways it is written, with its mask and scale, and nothing else is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, FunctionMaker, Value, verify
from distir.ir.type import BFloat16, Bool, DType, Float32, Float64, Tensor
from distir.transforms.rewriting.fuse import fuse

B, H, S, T, E = 2, 3, 4, 5, 6


class Writer(FunctionMaker):
    """Writes attention out; each part may be replaced."""

    def __init__(self, dtype: DType = Float64) -> None:
        super().__init__("attention")
        self.dtype = dtype
        self.q = self.add_input_value("q", Tensor(dtype, (B, S, H, E)))
        self.k = self.add_input_value("k", Tensor(dtype, (B, T, H, E)))
        self.v = self.add_input_value("v", Tensor(dtype, (B, H, T, E)))

    def of(self, x: float, dtype: DType | None = None) -> Value:
        return self.emit("Constant", value=(x,), shape=(), dtype=dtype or self.dtype)

    def heads(self) -> Value:
        return self.emit("Transpose", self.q, perm=(0, 2, 1, 3))

    def turned(self) -> Value:
        return self.emit("Transpose", self.k, perm=(0, 2, 3, 1))

    def scores(self, scale: float | None = 0.3) -> Value:
        scores = self.emit("MatMul", self.heads(), self.turned())
        return scores if scale is None else self.emit("Mul", scores, self.of(scale))

    def mask(self, *shape: int, dtype: DType | None = None) -> Value:
        return self.add_input_value("mask", Tensor(dtype or self.dtype, shape))

    def done(self, scores: Value, v: Value | None = None, axis: int = 3) -> Function:
        weights = self.emit("Softmax", scores, axis=axis)
        self.set_outputs([self.emit("Neg", self.emit("MatMul", weights, self.v if v is None else v))])
        return self.finalize()


def arrays(function: Function, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    made: list[Any] = []
    for v in function.inputs:
        t = v.type
        assert isinstance(t, Tensor)
        x = rng.standard_normal(t.shape)
        made.append(np.asarray(x > -0.5 if t.dtype is Bool else x, t.dtype.numpy))
    return made


def check(function: Function, scale: float, tolerance: float = 1e-12) -> Function:
    """It becomes one op of that scale, and computes the same."""
    fused = fuse(function)
    verify(fused)
    kinds = [op.op_type for op in fused.ops if op.op_type not in ("Transpose", "Constant", "Where")]
    assert kinds == ["Attention", "Neg"]
    attention = next(op for op in fused.ops if op.op_type == "Attention")
    assert attention.attributes["scale"] == pytest.approx(scale, rel=1e-6)
    assert attention.outputs[0] in {v for op in function.ops for v in op.outputs}
    given = arrays(function)
    want, got = (SequentialExecutor().compute(f, given)[0].astype(float) for f in (function, fused))
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    return fused


@pytest.mark.parametrize("dtype", [Float64, Float32, BFloat16], ids=repr)
def test_scaled(dtype: DType) -> None:
    w = Writer(dtype)
    check(w.done(w.scores(0.5)), 0.5, {Float64: 1e-12, Float32: 1e-5}.get(dtype, 0.05))


def test_not_scaled() -> None:
    w = Writer()
    check(w.done(w.scores(None)), 1.0)


def test_divided() -> None:
    w = Writer()
    check(w.done(w.emit("Div", w.scores(None), w.of(math.sqrt(E)))), 1 / math.sqrt(E))


def test_scaled_before_the_product() -> None:
    w = Writer()
    q, k = w.emit("Mul", w.heads(), w.of(0.5)), w.emit("Mul", w.turned(), w.of(0.7))
    check(w.done(w.emit("MatMul", q, k)), 0.35)


@pytest.mark.parametrize("shape", [(1, 1, S, T), (S, T), (B, 1, 1, T), (B, H, S, T), (T,), (H, 1, 1)], ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_a_mask_that_is_added(shape: tuple[int, ...], first: bool) -> None:
    w = Writer()
    scores, mask = w.scores(), w.mask(*shape)
    fused = check(w.done(w.emit("Add", mask, scores) if first else w.emit("Add", scores, mask)), 0.3)
    attention = next(op for op in fused.ops if op.op_type == "Attention")
    assert attention.inputs[3] is mask


@pytest.mark.parametrize("low", [-math.inf, float(np.finfo(np.float64).min), -1e30])
@pytest.mark.parametrize("keep", [True, False])
def test_scores_that_are_filled(low: float, keep: bool) -> None:
    w = Writer()
    mask, scores = w.mask(S, T, dtype=Bool), w.scores()
    function = w.done(w.emit("Where", mask, *((scores, w.of(low)) if keep else (w.of(low), scores))))
    given = arrays(function)
    given[3][:, :2] = [True, False]  # every row has something to look at
    fused = fuse(function)
    assert any(op.op_type == "Attention" for op in fused.ops)
    want, got = (SequentialExecutor().compute(f, given)[0] for f in (function, fused))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("low", [-1e30, float(np.finfo(np.float64).min)])
def test_rows_of_the_lowest_scores_look_everywhere(low: float) -> None:
    """A softmax of equal scores is uniform, with the op as without."""
    w = Writer()
    function = w.done(w.emit("Where", w.mask(S, T, dtype=Bool), w.scores(), w.of(low)))
    given = arrays(function)
    given[3][1] = False
    want, got = (SequentialExecutor().compute(f, given)[0] for f in (function, fuse(function)))
    assert fuse(function) is not function
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(want[:, :, 1], -given[2].mean(2), rtol=1e-12)


def guarded(w: Writer, scores: Value) -> Function:
    """As torch exports it: 0 where the softmax of a row of -inf is NaN."""
    weights = w.emit("Softmax", scores, axis=-1)
    nan = w.emit("Not", w.emit("Equal", weights, weights))
    w.set_outputs([w.emit("Neg", w.emit("MatMul", w.emit("Where", nan, w.of(0.0), weights), w.v))])
    return w.finalize()


def test_rows_that_may_look_nowhere_give_nothing() -> None:
    w = Writer()
    function = guarded(w, w.emit("Add", w.scores(), w.mask(S, T)))
    check(function, 0.3)
    given = arrays(function)
    given[3][2] = -np.inf
    with np.errstate(invalid="ignore"):
        (want,) = SequentialExecutor().compute(function, given)
    (got,) = SequentialExecutor().compute(fuse(function), given)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    assert not got[:, :, 2].any()


def test_keys_turned_with_their_leading_dims_merged() -> None:
    w = Writer()
    keys = w.emit("Transpose", w.k, perm=(0, 2, 1, 3))
    flat = w.emit("Reshape", keys, shape=(-1, T, E))
    turned = w.emit("Reshape", w.emit("Transpose", flat, perm=(0, 2, 1)), shape=(B, H, E, T))
    fused = check(w.done(w.emit("MatMul", w.heads(), turned)), 1.0)
    assert [op.op_type for op in fused.ops].count("Reshape") == 0


def test_repeated_keys_turned_with_their_leading_dims_merged() -> None:
    """As exporters write out heads that share keys: what is repeated is reshaped to heads once."""
    w = Writer()
    k = w.add_input_value("few", Tensor(Float64, (B, 1, T, E)))
    each = w.emit("Expand", w.emit("Reshape", k, shape=(B, 1, 1, T, E)), shape=(B, 1, H, T, E))
    flat = w.emit("Transpose", w.emit("Reshape", each, shape=(B * H, T, E)), perm=(0, 2, 1))
    turned = w.emit("Reshape", flat, shape=(B, H, E, T))
    function = w.done(w.emit("MatMul", w.heads(), turned))
    fused, given = fuse(function), arrays(function)
    (want,), (got,) = [SequentialExecutor().compute(f, given) for f in (function, fused)]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    assert sorted(op.op_type for op in fused.ops) == sorted(
        ["Reshape", "Expand", "Reshape", "Transpose", "Attention", "Neg"]
    )


def test_keys_that_come_turned() -> None:
    w = Writer()
    turned = w.add_input_value("kt", Tensor(Float64, (B, H, E, T)))
    check(w.done(w.emit("MatMul", w.heads(), turned)), 1.0)


def test_keys_in_the_order_of_the_op_are_taken_as_they_are() -> None:
    f = FunctionMaker()
    q, k, v = (f.add_input_value(n, Tensor(Float64, (H, S, E))) for n in "qkv")
    scores = f.emit("MatMul", q, f.emit("Transpose", k, perm=(0, 2, 1)))
    f.set_outputs([f.emit("MatMul", f.emit("Softmax", scores, axis=-1), v)])
    (attention,) = fuse(f.finalize()).ops
    assert attention.inputs == (q, k, v)


def test_a_softmax_in_single_precision() -> None:
    w = Writer(BFloat16)
    scores = w.emit("Cast", w.scores(0.5), to=Float32)
    weights = w.emit("Cast", w.emit("Softmax", scores, axis=3), to=BFloat16)
    w.set_outputs([w.emit("Neg", w.emit("MatMul", weights, w.v))])
    check(w.finalize(), 0.5, 0.05)


def test_a_mask_may_be_a_product() -> None:
    """Relative positions: the added mask is not confused with the scores."""
    w = Writer()
    table = w.add_input_value("positions", Tensor(Float64, (B, H, S, 2)))
    other = w.emit("MatMul", table, w.add_input_value("r", Tensor(Float64, (B, H, 2, T))))
    function = w.done(w.emit("Add", w.scores(), other))
    fused = fuse(function)
    assert [op.op_type for op in fused.ops].count("Attention") == 1
    want, got = (SequentialExecutor().compute(f, arrays(function))[0] for f in (function, fused))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


# ---- what is left alone


def stays(function: Function) -> None:
    assert not any(op.op_type == "Attention" for op in fuse(function).ops)


def test_another_axis_stays() -> None:
    f = FunctionMaker()
    q, k, v = (f.add_input_value(n, Tensor(Float64, (H, S, S))) for n in "qkv")
    scores = f.emit("MatMul", q, f.emit("Transpose", k, perm=(0, 2, 1)))
    f.set_outputs([f.emit("MatMul", f.emit("Softmax", scores, axis=1), v)])
    stays(f.finalize())


def test_matrices_stay() -> None:
    """Two layers with a softmax between them, and samples compared with each other."""
    f = FunctionMaker()
    x, w1, w2 = (f.add_input_value(n, Tensor(Float64, (S, S))) for n in ("x", "w1", "w2"))
    f.set_outputs([f.emit("MatMul", f.emit("Softmax", f.emit("MatMul", x, w1), axis=-1), w2)])
    stays(f.finalize())


def test_a_layer_with_a_softmax_stays() -> None:
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float64, (B, S, E)))
    w1, w2 = (f.add_input_value(n, Tensor(Float64, (E, E))) for n in ("w1", "w2"))
    f.set_outputs([f.emit("MatMul", f.emit("Softmax", f.emit("MatMul", x, w1), axis=-1), w2)])
    stays(f.finalize())


def test_keys_that_broadcast_stay() -> None:
    w = Writer()
    one = w.add_input_value("kt", Tensor(Float64, (B, 1, E, T)))
    stays(w.done(w.emit("MatMul", w.heads(), one)))


def test_values_that_broadcast_stay() -> None:
    w = Writer()
    stays(w.done(w.scores(), v=w.add_input_value("v1", Tensor(Float64, (1, H, T, E)))))


def test_scores_filled_with_something_stay() -> None:
    w = Writer()
    stays(w.done(w.emit("Where", w.mask(S, T, dtype=Bool), w.scores(), w.of(-9.0))))


def test_scores_changed_in_another_way_stay() -> None:
    w = Writer()
    stays(w.done(w.emit("Tanh", w.scores())))


def test_a_scale_that_is_no_number_stays() -> None:
    w = Writer()
    stays(w.done(w.emit("Mul", w.scores(None), w.mask(H, 1, 1))))


def test_two_masks_stay() -> None:
    w = Writer()
    stays(w.done(w.emit("Add", w.emit("Add", w.scores(), w.mask(S, T)), w.mask(B, 1, 1, T))))


def test_weights_that_are_changed_stay() -> None:
    w = Writer()
    weights = w.emit("Mul", w.emit("Softmax", w.scores(), axis=3), w.of(0.9))
    w.set_outputs([w.emit("MatMul", weights, w.v)])
    stays(w.finalize())


@pytest.mark.parametrize("kind", ["Softmax", "Mul", "MatMul"])
def test_what_is_needed_elsewhere_stays(kind: str) -> None:
    w = Writer()
    function = w.done(w.scores())
    inside = next(op for op in function.ops if op.op_type == kind).outputs[0]
    stays(Function("f", function.inputs, function.ops, (*function.outputs, inside)))
    f = FunctionMaker()
    f.inputs += function.inputs
    f.ops += function.ops
    f.set_outputs([*function.outputs, f.emit("Sin", inside)])
    stays(f.finalize())


def test_a_softmax_that_is_cast_down_and_back_stays() -> None:
    w = Writer()
    weights = w.emit("Softmax", w.emit("Cast", w.scores(), to=Float32), axis=3)
    w.set_outputs([w.emit("MatMul", w.emit("Cast", weights, to=Float64), w.v)])
    stays(w.finalize())
