"""Root-mean-square norms against PyTorch's, and their gradients against autograd: as `eval` says, and as torch runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from distir.backends.lowering.native import NATIVE
from distir.executor.reference.numpy_namespace import NUMPY
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import FunctionMaker, Role
from distir.ir.definition import definition_of
from distir.ir.spec import lookup
from distir.ir.type import Float64, Tensor
from distir.transforms.differentiation.grad import grad

CASES = pytest.mark.parametrize(
    ("shape", "axis", "epsilon"), [((4, 6), 1, 1e-5), ((2, 3, 8), -1, 0.1), ((2, 3, 8), 1, 1e-6), ((5, 7), 0, 1e-5)]
)


def arrays(shape: tuple[int, ...], axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal(shape), rng.standard_normal(shape[axis:]), rng.standard_normal(shape)


def autograd(x: np.ndarray, gain: np.ndarray, d: np.ndarray, epsilon: float) -> list[np.ndarray]:
    """The norm, and the gradients of x and gain."""
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, gain)]
    y = torch.nn.functional.rms_norm(leaves[0], list(gain.shape), leaves[1], epsilon)
    y.backward(torch.tensor(d))
    slopes = [leaf.grad for leaf in leaves]
    return [y.detach().numpy(), *[s.numpy() for s in slopes if s is not None]]


def near(got: Sequence[Any], want: Sequence[np.ndarray]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-12, atol=1e-12)


@CASES
def test_norm_and_gradients_are_torch_s(shape: tuple[int, ...], axis: int, epsilon: float) -> None:
    x, gain, d = arrays(shape, axis)
    want = autograd(x, gain, d, epsilon)
    norm, slope = lookup("RMSNorm").eval, lookup("RMSNormGrad").eval
    assert norm is not None
    assert slope is not None
    y, scale = norm(NUMPY, x, gain, axis=axis, epsilon=epsilon)
    near([y, *slope(NUMPY, x, gain, scale, d, axis=axis)], want)
    of_torch = [torch.tensor(a) for a in (x, gain, d)]
    y, scale = NATIVE["RMSNorm"](*of_torch[:2], axis=axis, epsilon=epsilon)
    near([y, *NATIVE["RMSNormGrad"](*of_torch[:2], scale, of_torch[2], axis=axis)], want)


@CASES
def test_a_program_s_gradients(shape: tuple[int, ...], axis: int, epsilon: float) -> None:
    """Through `RMSNormalization`, decomposed and differentiated; also where it is its definition's parts."""
    x, gain, d = arrays(shape, axis)
    f = FunctionMaker("f")
    inputs = [f.add_input_value(n, Tensor(Float64, a.shape), Role("parameter")) for n, a in (("x", x), ("g", gain))]
    weights = f.add_input_value("d", Tensor(Float64, d.shape), Role("constant"))
    y = f.emit("RMSNormalization", *inputs, axis=axis, epsilon=epsilon)
    f.set_outputs([f.emit("ReduceSum", f.emit("Mul", y, weights), axes=tuple(range(d.ndim)), keepdims=0)])
    step = grad(f.finalize(), 0, inputs)
    want = autograd(x, gain, d, epsilon)
    results = SequentialExecutor().compute(step, [x, gain, d])
    near(results, [np.sum(want[0] * d), *want[1:]])
    (norm,) = [op for op in step.ops if op.op_type == "RMSNorm"]
    (slope,) = [op for op in step.ops if op.op_type == "RMSNormGrad"]
    assert slope.inputs[:3] == (*norm.inputs, norm.outputs[1])  # x, the gain and one number a row are saved
    assert norm.outputs[1].type is Tensor(Float64, (*shape[:axis], *[1] * len(shape[axis:])))
    found = definition_of(norm)
    assert found is not None
    near(SequentialExecutor().compute(found.parts, [x, gain])[:1], want[:1])


def test_a_row_of_zeros() -> None:
    """Neither a division by 0, nor a slope that is infinite."""
    x, gain, d = np.zeros((2, 4)), np.ones(4), np.ones((2, 4))
    near([NATIVE["RMSNorm"](torch.tensor(x), torch.tensor(gain))[0]], [x])
    want = autograd(x, gain, d, 1e-5)
    scale = torch.full((2, 1), 1e-5, dtype=torch.float64).rsqrt()
    near(NATIVE["RMSNormGrad"](torch.tensor(x), torch.tensor(gain), scale, torch.tensor(d)), want[1:])
