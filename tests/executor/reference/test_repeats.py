"""What repeats is computed once, and gives what all of it gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.executor.reference.repeats import evaluate_once, once
from distir.executor.reference.sequential import evaluate
from distir.ir.function import FunctionMaker, Op
from distir.ir.spec import lookup
from distir.ir.type import Float64, Tensor
from tests.ops.samples import SAMPLES, Sample

LOCAL = [s for s in SAMPLES if lookup(s.op).eval is not None]


def made(sample: Sample) -> Op:
    f = FunctionMaker("f")
    inputs = [f.add_input_value(f"x{k}", Tensor(o.dtype, o.shape)) for k, o in enumerate(sample.operands)]
    f.add_op(sample.op, None, inputs, sample.attributes)
    return f.ops[-1]


def as_row(y: object) -> list[np.ndarray]:
    return [np.asarray(x) for x in (y if isinstance(y, tuple | list) else (y,))]


@given(st.data())
def test_results_are_those_of_the_whole(data: st.DataObject) -> None:
    """Of any op, whichever dims its operands repeat along."""
    sample = data.draw(st.sampled_from(LOCAL))
    op = made(sample)
    arrays: list[np.ndarray] = []
    for x in sample.arrays():
        dims = [data.draw(st.booleans()) for _ in x.shape]
        part = x[tuple([slice(0, 1) if d else slice(None) for d in dims])]
        arrays.append(np.broadcast_to(part, x.shape))
    with np.errstate(all="ignore"):
        want = as_row(evaluate(op, [x.copy() for x in arrays], None))
        got = evaluate_once(op, arrays, 1 << 20)
    assert got is not None
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=1e-12, atol=1e-12)


def single(results: Sequence[np.ndarray] | None) -> np.ndarray:
    assert results is not None
    (y,) = results
    return y


def test_what_repeats_takes_no_memory() -> None:
    """Nor what is reduced, but then its size counts."""
    f = FunctionMaker("f")
    x, y = (f.add_input_value(name, Tensor(Float64, (1 << 20, 1, 5, 6))) for name in "xy")
    f.emit("ReduceMax", f.emit("Transpose", f.emit("Add", x, y), perm=(2, 0, 1, 3)), axes=(3,), keepdims=1)
    f.emit("ReduceSum", f.ops[0].outputs[0], axes=(0,))
    arrays = [np.broadcast_to(np.arange(30.0).reshape(1, 1, 5, 6), x.type.shape)] * 2  # type: ignore[union-attr]
    total = single(evaluate_once(f.ops[0], arrays, 30))
    assert once(total).shape == (1, 1, 5, 6)
    turned = single(evaluate_once(f.ops[1], [total], 30))
    top = single(evaluate_once(f.ops[2], [turned], 5))
    np.testing.assert_array_equal(once(top)[:, 0, 0, 0], 2 * np.arange(5, 30, 6))
    assert top.shape == (5, 1 << 20, 1, 1)
    assert evaluate_once(f.ops[0], arrays, 29) is None


@pytest.mark.parametrize("most", [23, 24])
def test_what_is_too_large_is_not_computed(most: int) -> None:
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float64, (4, 1, 6)))
    f.emit("Reshape", x, shape=(24,))
    found = evaluate_once(f.ops[0], [np.broadcast_to(1.0, (4, 1, 6))], most)
    assert (found is None) is (most < 24)
