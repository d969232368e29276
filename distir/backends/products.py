"""Matrix products, on CPUs by the quicker of the two libraries that torch has for them.

torch multiplies float32 matrices with MKL, which uses AVX-512 on Intel's processors only; oneDNN uses it on all that
have it. On a Zen 5 core, 128 x 1024 by 1024 x 1024 takes 3.1 ms with MKL and 1.4 ms with oneDNN; a call of oneDNN costs
10 us more. Which of them multiplies follows from the processor and the sizes, not from a measurement: a run can be
repeated.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""oneDNN's product, as torch.compile calls it; not there in every build of torch."""

_WORTH = 1 << 21
"""Multiplications from which on oneDNN is quicker."""


@functools.cache
def has_quicker() -> bool:
    """Whether oneDNN multiplies quicker than MKL here."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and _LINEAR is not None and torch.backends.mkldnn.is_available() and _is_amd()


def _is_amd() -> bool:
    """Whether the processor is one of AMD's; false also where it is not known."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b."""
    return linear(a, b.t()) if _is_worth_it(a, b) else torch.matmul(a, b)


def gemm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, transposed: bool = False) -> torch.Tensor:
    """a @ b of matrices, or a @ b.T, plus c, if there is one, which may be a row; then `a` may be many matrices."""
    if not _is_worth_it(a, b):
        if a.ndim > 2:
            return torch.nn.functional.linear(a, b if transposed else b.t(), c)
        b = b.t() if transposed else b
        return torch.mm(a, b) if c is None else torch.addmm(c, a, b)
    b = b if transposed else b.t()
    return linear(a, b, c) if c is None or c.shape == b.shape[:1] else linear(a, b) + c


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w.T, plus a bias (n,), by oneDNN: of (..., k) and (n, k)."""
    return torch.ops.mkldnn._linear_pointwise.default(x, w, bias, "none", (), None)


def _is_worth_it(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether oneDNN should multiply these."""
    return (
        has_quicker()
        and a.dtype == b.dtype == torch.float32
        and b.ndim == 2
        and a.ndim >= 2
        and a.device.type == "cpu"
        and a.numel() * b.numel() >= _WORTH * a.shape[-1] > 0
    )
