"""Ops for which torch has a kernel of its own that is quicker than the calls their `eval` makes, in other words."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from distir.backends.namespace import TorchNamespace
from distir.ir.errors import ModelError
from distir.ir.spec import Spec


def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    transA: int = 0,
    transB: int = 0,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> torch.Tensor:
    a, b = a.t() if transA else a, b.t() if transB else b
    if c is None:
        y = torch.mm(a, b)
        return y if alpha == 1 else y * alpha
    scales: dict[str, Any] = {k: x for k, x in (("alpha", alpha), ("beta", beta)) if x != 1}
    return torch.addmm(c, a, b, **scales)


def _relu_grad(y: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Other than the `eval` where y is nan: there it passes d."""
    return torch.ops.aten.threshold_backward.default(d, y, 0)


NATIVE: dict[str, Callable[..., Any]] = {"Gemm": _gemm, "ReluGrad": _relu_grad}
"""By op: a function of its operands and attributes."""


def implementation(spec: Spec, xp: TorchNamespace) -> Callable[..., Any]:
    """What computes the op on tensors: the function above, the torch kernel that the op names, or its `eval`."""
    if spec.name in NATIVE:
        return NATIVE[spec.name]
    if spec.torch is not None:
        return operator.attrgetter(spec.torch)(torch)
    if spec.eval is None:
        raise ModelError(f"{spec.name} cannot be evaluated: it should have been decomposed")
    return functools.partial(spec.eval, xp)
