"""Matrix products, on CPUs by the faster of torch's two libraries.

torch multiplies float32 matrices with MKL, which uses AVX-512 only on Intel processors; oneDNN uses it wherever it is
available. On a Zen 5 core, 128 x 1024 by 1024 x 1024 takes 3.1 ms with MKL and 1.4 ms with oneDNN; a call of oneDNN
costs 10 us more. The choice depends on processor and sizes, not on a measurement, so that runs are reproducible.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""oneDNN's product, as used by torch.compile; missing in some builds of torch."""

_WORTH = 1 << 21
"""Number of multiplications from which oneDNN is faster."""


@functools.cache
def prefers_onednn() -> bool:
    """Whether oneDNN is faster than MKL on this processor."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and _LINEAR is not None and torch.backends.mkldnn.is_available() and _is_amd()


def _is_amd() -> bool:
    """Whether the processor is made by AMD; False if unknown."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b."""
    return linear(a, b.t()) if _is_worth_it(a, b) else torch.matmul(a, b)


def gemm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, transposed: bool = False) -> torch.Tensor:
    """a @ b, or a @ b.T if `transposed`, plus c if given. If c is None or a row, `a` may be a batch of matrices."""
    if not _is_worth_it(a, b):
        if a.ndim > 2:
            return torch.nn.functional.linear(a, b if transposed else b.t(), c)
        b = b.t() if transposed else b
        return torch.mm(a, b) if c is None else torch.addmm(c, a, b)
    b = b if transposed else b.t()
    return linear(a, b, c) if c is None or c.shape == b.shape[:1] else linear(a, b) + c


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w.T plus a bias (n,), by oneDNN; x (..., k), w (n, k)."""
    return torch.ops.mkldnn._linear_pointwise.default(x, w, bias, "none", (), None)


def _is_worth_it(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether to multiply these with oneDNN."""
    return (
        prefers_onednn()
        and a.dtype == b.dtype == torch.float32
        and b.ndim == 2
        and a.ndim >= 2
        and a.device.type == "cpu"
        and a.numel() * b.numel() >= _WORTH * a.shape[-1] > 0
    )
