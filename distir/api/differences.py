"""The difference of two values, and whether rounding explains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

_SMALLEST = 1e-2
"""Losses below this are compared as if they were this large: a loss is a difference of larger numbers."""
ROUNDING = 2.5
"""Tolerance as a multiple of the error that rounding alone causes in the sequential program."""
INCONCLUSIVE = 0.45
"""A relative tolerance above this makes a comparison inconclusive."""


@dataclass(frozen=True)
class Difference:
    """The error of one value against the sequential program, and the error allowed; `kind`: what of it is compared."""

    name: str
    error: float
    allowed: float
    step: int | None = None
    kind: str = ""
    detail: str = ""
    """Further detail for the message, such as relative length and cosine."""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for nan, too

    def __str__(self) -> str:
        what = f"{self.kind} of %{self.name}" if self.kind else f"%{self.name}"
        where = "" if self.step is None else f" in step {self.step}"
        more = f" ({self.detail})" if self.detail else ""
        return f"{what}{where} differs by {self.error:.3g}{more}, {self.allowed:.3g} is allowed"

    def to_json(self) -> dict[str, Any]:
        """JSON of its fields."""
        return {"name": self.name, "kind": self.kind, "error": self.error, "allowed": self.allowed, "step": self.step}


class Compared(NamedTuple):
    """One comparison. `hidden`: inconclusive because of rounding; `infinite`: has non-finite elements in both runs."""

    difference: Difference
    hidden: bool = False
    infinite: bool = False


def vectors(
    name: str,
    kind: str,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    tolerance: float,
    least: float = 0.0,
    step: int | None = None,
    lost: bool = False,
) -> Compared:
    """The norm of the difference of two arrays, relative to that of `want`; where rounding of single elements is too
    large for that, the error of the projection on `want`. `arrays`: got, expected, expected perturbed by rounding.
    `lost`: positions of elements that are not finite may differ.
    """
    got, want, rounding = arrays
    if got.shape != want.shape:
        return Compared(Difference(name, float("inf"), tolerance, step, kind))
    a, b, c = (np.ravel(x).astype(np.float64) for x in (got, want, rounding))
    finite = np.isfinite(a) & np.isfinite(b)
    infinite = not finite.all()
    if not lost and not np.array_equal(np.isfinite(a), np.isfinite(b)):
        hidden = not np.array_equal(np.isfinite(c), np.isfinite(b))  # rounding alone changes which are finite
        return Compared(Difference(name, float("inf"), tolerance, step, kind, "not finite"), hidden, infinite)
    if infinite:
        a, b, c = a[finite], b[finite], c[finite]
    size, noise, error = norm(b), norm(c - b), norm(a - b)
    if not size:
        hidden = error <= least or not np.isfinite(noise)
        return Compared(Difference(name, error, ROUNDING * noise + least, step, kind), hidden, infinite)
    noise, error, least = noise / size, error / size, least / size
    along = float(a @ b) / size**2
    detail = f"{norm(a) / size:.3g} times as long, {_cosine(a, b):.3g} the cosine"
    allowed = max(tolerance, ROUNDING * noise + least)
    if allowed + noise <= 0.5 or error > allowed:
        return Compared(Difference(name, error, allowed, step, kind, detail), False, infinite)
    # rounding errors of n elements are independent: 1 / sqrt(n) of their norm falls along `want`; an element whose
    # sign flips takes away twice its square
    part = abs(float((c - b) @ b)) / size**2
    allowed = max(tolerance, ROUNDING * (part + noise / max(1, b.size) ** 0.5) + least**2 / 2)
    hidden = not allowed + part <= INCONCLUSIVE
    what = f"length of the {kind}".strip()
    return Compared(Difference(name, abs(along - 1), allowed, step, what, detail), hidden, infinite)


def norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x)) if np.isfinite(x).all() else float("inf")


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    both = norm(a) * norm(b)
    return float(a @ b) / both if both else 0.0


def not_finite(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype.kind not in "biu" and not (np.isfinite(a).all() or np.isfinite(b).all())


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


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, relative to the largest magnitude in `b`."""
    return largest_difference(a, b) / max(_SMALLEST if b.size == 1 else 1.0, magnitude(b))
