"""Comparing a run with the sequential program on the same data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distir.api.model import Model
from distir.api.steps import Steps
from distir.ir.function import Value
from distir.ir.type import Float32, Float64, Tensor
from distir.transforms.training import AdamW

_SMALLEST = 1e-2
"""Losses below this are compared as if they were this large: a loss is a difference of larger numbers."""


@dataclass(frozen=True)
class Difference:
    """How far the values of one input or output are from the sequential program's, and how far they may be."""

    name: str
    error: float
    allowed: float
    step: int | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for nan, too

    def __str__(self) -> str:
        where = "" if self.step is None else f" in step {self.step}"
        return f"%{self.name}{where} differs by {self.error:.3g}, {self.allowed:.3g} is allowed"


@dataclass(frozen=True)
class Check:
    """The largest error among outputs (relative), and among updated weights (relative; AdamW: absolute)."""

    outputs: Difference | None
    weights: Difference | None
    first: Difference | None = None
    """The first value that differs by more than is allowed, outputs step by step, then weights in order."""
    diverged: int | None = None
    """The step in which both runs left the finite numbers: nothing after it is compared."""

    @property
    def ok(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        parts = [
            f"{what} equal the sequential run's to {d.error:.2g} (allowed {d.allowed:.2g}; largest error in %{d.name})"
            for what, d in (("outputs", self.outputs), ("weights", self.weights))
            if d is not None
        ]
        if self.first:
            return f"check failed: {self.first}"
        if self.diverged is not None:
            diverge = f"both runs diverge in step {self.diverged}, where their loss is not finite"
            if not parts:
                return f"nothing was checked: {diverge}"
            parts.append(f"{diverge}: nothing later is compared")
        return "check passed: " + "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        def row(d: Difference | None) -> dict[str, Any] | None:
            return d and {"name": d.name, "error": d.error, "allowed": d.allowed, "step": d.step}

        return {
            "ok": self.ok,
            "outputs": row(self.outputs),
            "weights": row(self.weights),
            "first": row(self.first),
            "diverged": self.diverged,
        }


def compare(model: Model, got: Steps, want: Steps, begin: int = 0) -> Check:
    """Compare a run with the sequential one. Of each step, from `begin` on, those outputs are compared that both have.

    Allowed is 1e-5 relative, for weights under AdamW 0.05 * lr * steps; in float64 1e-10; in 16 bits 0.05. AdamW
    divides a gradient that is nothing but rounding by another such, so large models may need float64 to pass.
    """
    function = model.function
    tolerance = _tolerance(model)
    diverged = _diverged(got, want)
    rows = [
        Difference(function.outputs[k].name, _relative(x, want.outputs[step][k]), tolerance, begin + step)
        for step, outputs in enumerate(got.outputs[:diverged])
        for k, x in outputs.items()
        if k in want.outputs[step]
    ]
    names = {k: v for k, v in enumerate(function.inputs) if v.kind == "parameter"}
    weights: list[Difference] = []
    if diverged is None:
        weights = _weights(model, names, got.inputs, want.inputs, len(want.seconds), tolerance)
    first = next((d for d in (*rows, *weights) if not d.ok), None)
    return Check(_worst(rows), _worst(weights), first, None if diverged is None else begin + diverged)


def _diverged(got: Steps, want: Steps) -> int | None:
    """The first step in which a number that both runs give, such as the loss, is finite in neither."""
    for step, (a, b) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        numbers = [k for k, x in b.items() if x.size == 1 and x.dtype.kind not in "biu" and k in a]
        if any(not np.isfinite(float(a[k])) and not np.isfinite(float(b[k])) for k in numbers):
            return step
    return None


def _tolerance(model: Model) -> float:
    types = {v.type.dtype for v in model.function.inputs if isinstance(v.type, Tensor) and v.type.dtype.floating}
    if types <= {Float64}:
        return 1e-10
    return 1e-5 if types <= {Float32, Float64} else 5e-2


def _weights(
    model: Model,
    names: Mapping[int, Value],
    got: Mapping[int, np.ndarray],
    want: Mapping[int, np.ndarray],
    steps: int,
    tolerance: float,
) -> list[Difference]:
    adam = isinstance(model.optimizer, AdamW) and tolerance == 1e-5
    rows: list[Difference] = []
    for k, v in names.items():
        if k not in got or k not in want:
            continue
        if adam and isinstance(model.optimizer, AdamW):
            rows.append(Difference(v.name, largest_difference(got[k], want[k]), 0.05 * model.optimizer.lr * steps))
        else:
            rows.append(Difference(v.name, _scaled(got[k], want[k]), tolerance))
    return rows


def _worst(rows: list[Difference]) -> Difference | None:
    return max(rows, key=lambda d: (not d.ok, d.error / d.allowed), default=None)


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; infinite where only one is finite, or if the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    if a.dtype.kind in "biu":
        return 0.0 if np.array_equal(a, b) else float("inf")
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = (a == b) | ~(np.isfinite(a) | np.isfinite(b))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(a - b))
    return float(np.max(np.where(np.isnan(error), np.inf, error), initial=0.0))


def magnitude(b: np.ndarray) -> float:
    """The largest absolute value that is finite."""
    finite = np.abs(b.astype(np.float64))
    return float(np.max(finite[np.isfinite(finite)], initial=0.0))


def _scaled(a: np.ndarray, b: np.ndarray) -> float:
    return largest_difference(a, b) / max(1.0, magnitude(b))


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    """Of one number the relative error; of many, relative to the largest."""
    return largest_difference(a, b) / max(_SMALLEST, magnitude(b)) if b.size == 1 else _scaled(a, b)
