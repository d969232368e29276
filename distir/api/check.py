"""Compare a run with the sequential program on the same data, at the scale of the changes that training makes.

A step changes a weight by a thousandth of its size or less, so comparing weights proves nothing: they agree even if no
update was made. Compared are the outputs of every step; the gradients of the first step, as passed to the optimizers;
and at the end the changes of weights and the optimizer state. The tolerance is measured: the sequential program is run
again with the last bit of its results perturbed (see `rounding`). A value whose tolerance would be too large for the
comparison to mean anything is reported as not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from distir.executor.reference.sequential import fit, unfit
from distir.ir.function import Function
from distir.ir.type import Float32, Float64, Tensor
from distir.runtime.outcome import Outcome
from distir.transforms.rewriting.matching import epsilon

_SMALLEST = 1e-2
"""Losses below this are compared as if they were this large: a loss is a difference of larger numbers."""
_ROUNDING = 2.5
"""Tolerance as a multiple of the error that rounding alone causes in the sequential program."""
_SIGN_FLIPS = 3
"""Elements of a weight that may differ by chance (a step in the opposite direction) beyond the perturbed run's."""
_SHOWN = 4
"""Names listed in a message; the rest is counted."""


class Tolerance(NamedTuple):
    """The least tolerance: for outputs relative to the largest element; for gradients and optimizer state, and for
    changes of weights, relative to the norm.
    """

    outputs: float
    gradients: float
    changes: float


_EXACT = Tolerance(1e-10, 1e-10, 1e-10)
_SINGLE = Tolerance(1e-5, 1e-4, 1e-4)
_ROUGH = Tolerance(5e-2, 5e-2, 0.2)


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


@dataclass(frozen=True)
class Check:
    """The result of a check: the largest error of outputs (relative to their largest element), of changes of weights,
    of the first step's gradients and of the optimizer state (norms, relative to those of the sequential run).
    """

    outputs: Difference | None
    weights: Difference | None
    first: Difference | None = None
    """The first value whose error exceeds its tolerance."""
    gradients: Difference | None = None
    state: Difference | None = None
    unchecked: tuple[str, ...] = ()
    """Values not checked because of rounding: names of parameters (their changes), or such as "loss in step 3"."""
    infinite: tuple[str, ...] = ()
    """Values with elements that are not finite in both runs; only their finite elements are compared."""
    compared: int = 0
    """Number of values compared, without those in `unchecked`."""

    @property
    def ok(self) -> bool:
        return self.first is None

    @property
    def verdict(self) -> str:
        """One line."""
        if self.first:
            return f"check failed: {self.first}"
        if not self.compared:
            return "nothing was checked"
        if self.unchecked:
            all_of_them = self.compared + len(self.unchecked)
            return f"check passed in part: {self.compared} of {all_of_them} values equal the sequential run's"
        return f"check passed: {self.compared} of {self.compared} values equal the sequential run's"

    def lines(self) -> list[str]:
        """The verdict, a row for each kind of value, and what was not checked."""
        if self.first:
            return [self.verdict]
        named = (
            ("outputs", self.outputs),
            ("first gradients", self.gradients),
            ("changes of weights", self.weights),
            ("optimizer state", self.state),
        )
        rows = [(what, f"{d.error:.2g}", f"{d.allowed:.2g}", f"%{d.name}") for what, d in named if d is not None]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [self.verdict]
        for what, error, allowed, name in rows:
            lines.append(f"  {what.ljust(widths[0])}  to {error.ljust(widths[1])}  ({allowed} allowed; most in {name})")
        if self.infinite:
            lines.append(f"  not finite in both runs: {_listed(self.infinite)}")
        if self.unchecked:
            lines.append(
                f"  not checked (rounding error as large as the value, or not returned): {_listed(self.unchecked)}"
            )
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> dict[str, Any]:
        """JSON of the largest errors, and of what was not checked."""
        rows = {
            "outputs": self.outputs,
            "weights": self.weights,
            "gradients": self.gradients,
            "state": self.state,
            "first": self.first,
        }
        found = {name: d and d.to_json() for name, d in rows.items()}
        names = {"unchecked": list(self.unchecked), "infinite": list(self.infinite)}
        return {"ok": self.ok, **found, **names, "compared": self.compared}


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(f"%{name}" for name in names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


class _Row(NamedTuple):
    """One comparison. `hidden`: inconclusive because of rounding; `infinite`: has non-finite elements in both runs."""

    difference: Difference
    hidden: bool = False
    infinite: bool = False


def compare(
    function: Function,
    begin: Mapping[int, Any],
    got: Outcome,
    want: Outcome,
    rounding: Outcome | None = None,
    first: int = 0,
) -> Check:
    """Compare a run of a program, `got`, with the sequential run on the same data, `want`.

    `begin`: the initial arrays of both, by input position. `rounding`: the perturbed sequential run (see module
    `rounding`); without it only the least tolerance applies. `first`: the number of the first step. A value that the
    run did not return is reported as not checked, except outputs of more than one element of steps before the last.

    The tolerance is 2.5 times the error of the perturbed run, and at least: for outputs 1e-5 of the largest element
    (float64 1e-10, 16 bits 0.05); for gradients, state and changes of weights 1e-4 of the norm (float64 1e-10, 16 bits
    0.05, for changes 0.2). A value is not checked where the tolerance would accept half or twice its change.
    """
    rounding = rounding or want
    tolerance = _tolerance(function)
    of_outputs = list(_outputs(function, got, want, rounding, first, tolerance.outputs))
    of_gradients = list(_gradients(function, got, want, rounding, first, tolerance.gradients))
    lost = _lost(got, want)
    of_state = list(_state(function, got, want, rounding, tolerance.gradients, lost))
    of_weights = list(_weights(function, begin, got, want, rounding, tolerance.changes, lost))
    at_first = [row for row in of_outputs if row.difference.step == first]
    rows = [*at_first, *of_gradients, *of_outputs[len(at_first) :], *of_state, *of_weights]
    checked = [row.difference for row in rows if not row.hidden]
    return Check(
        outputs=_worst(of_outputs),
        weights=_worst(of_weights),
        first=next((d for d in checked if not d.ok), None),
        gradients=_worst(of_gradients),
        state=_worst(of_state),
        unchecked=_names(row for row in rows if row.hidden),
        infinite=_names(row for row in rows if row.infinite),
        compared=len(checked),
    )


def _lost(got: Outcome, want: Outcome) -> bool:
    """Whether a scalar output, such as the loss, is not finite in both runs: kernels differ in how they propagate
    nan, so then the positions of elements that are not finite are not compared."""
    for a, b in zip(got.outputs, want.outputs, strict=False):
        numbers = [k for k, x in b.items() if x.size == 1 and x.dtype.kind not in "biu" and k in a]
        if any(not np.isfinite(a[k]).all() and not np.isfinite(b[k]).all() for k in numbers):
            return True
    return False


def _names(rows: Iterator[_Row]) -> tuple[str, ...]:
    found = [row.difference for row in rows]
    return tuple(dict.fromkeys([d.name if d.step is None else f"{d.name} in step {d.step}" for d in found]))


def _worst(rows: Sequence[_Row]) -> Difference | None:
    checked = [row.difference for row in rows if not row.hidden]
    return max(checked, key=lambda d: (not d.ok, d.error / d.allowed if d.allowed else 0.0), default=None)


def _tolerance(function: Function) -> Tolerance:
    types = {v.type.dtype for v in function.inputs if isinstance(v.type, Tensor) and v.type.dtype.floating}
    return _EXACT if types <= {Float64} else _SINGLE if types <= {Float32, Float64} else _ROUGH


def _outputs(
    function: Function, got: Outcome, want: Outcome, rounding: Outcome, first: int, tolerance: float
) -> Iterator[_Row]:
    for step, outputs in enumerate(want.outputs):
        made = got.outputs[step] if step < len(got.outputs) else {}
        last = step == len(want.outputs) - 1
        for k, y in outputs.items():
            if k not in made:
                if last or y.size == 1:  # of earlier steps a run may return only scalars
                    yield _missing(function.outputs[k].name, first + step)
                continue
            x, z = made[k], rounding.outputs[step][k]
            noise = _ROUNDING * _relative(z, y)
            row = Difference(function.outputs[k].name, _relative(x, y), max(tolerance, noise), first + step)
            hidden = noise > _INCONCLUSIVE and row.error > tolerance
            yield _Row(row, hidden, _infinite(x, y))


_INCONCLUSIVE = 0.45
"""A relative tolerance above this makes a comparison inconclusive."""


def _gradients(
    function: Function, got: Outcome, want: Outcome, rounding: Outcome, first: int, tolerance: float
) -> Iterator[_Row]:
    for k, x in want.gradients.items():
        name = function.inputs[k].name
        if k not in got.gradients:
            yield _missing(name, first, "gradient")
        else:
            yield _vectors(name, "gradient", (got.gradients[k], x, rounding.gradients[k]), tolerance, step=first)


def _state(
    function: Function, got: Outcome, want: Outcome, rounding: Outcome, tolerance: float, lost: bool
) -> Iterator[_Row]:
    for k, v in enumerate(function.inputs):
        if v.kind != "state" or k not in want.inputs:
            continue
        if k not in got.inputs:
            yield _missing(v.name)
        elif want.inputs[k].dtype.kind in "biu":
            yield _Row(Difference(v.name, largest_difference(got.inputs[k], want.inputs[k]), 0.0))
        else:
            three = got.inputs[k], want.inputs[k], rounding.inputs[k]
            yield _vectors(v.name, "", three, tolerance, lost=lost)


def _weights(
    function: Function,
    begin: Mapping[int, Any],
    got: Outcome,
    want: Outcome,
    rounding: Outcome,
    tolerance: float,
    lost: bool,
) -> Iterator[_Row]:
    for k, v in enumerate(function.inputs):
        if v.kind != "parameter" or k not in want.inputs:
            continue
        if k not in got.inputs:
            yield _missing(v.name, None, "change")
            continue
        start = unfit(fit(begin[k], v), v.role and v.role.source).astype(np.float64)
        if got.inputs[k].shape != start.shape:
            yield _Row(Difference(v.name, float("inf"), tolerance, None, "change"))
            continue
        mine, expected, perturbed = (steps.inputs[k].astype(np.float64) - start for steps in (got, want, rounding))
        # each weight is rounded to its own last place, so a few elements may differ by one unit in it
        least = _SIGN_FLIPS**0.5 * 2 * epsilon(v.type.dtype) * magnitude(start)  # type: ignore[union-attr]
        unmoved = False
        if k in want.gradients:
            gradient, disturbed = (steps.gradients[k].astype(np.float64) for steps in (want, rounding))
            least += _norm(np.sort(_by_chance(expected, gradient, disturbed))[-_SIGN_FLIPS:])
            unmoved = not np.any(gradient) and not np.any(expected)
        row = _vectors(v.name, "change", (mine, expected, perturbed), tolerance, least, lost=lost)
        yield row._replace(hidden=False) if unmoved else row


def _by_chance(change: np.ndarray, gradient: np.ndarray, disturbed: np.ndarray) -> np.ndarray:
    """The possible error of each element's change where its gradient is of the size of rounding errors: an optimizer
    that normalises gradients (AdamW) turns that into a full step, in either direction.
    """
    noise = 3 * _norm(disturbed - gradient) / max(1, gradient.size) ** 0.5
    size = np.abs(gradient)
    share = np.divide(noise, size, out=np.full_like(size, 2.0), where=size > noise / 2)
    return np.ravel(np.abs(change) * np.where((size > 0) | (disturbed != 0), share, 0.0))


def _missing(name: str, step: int | None = None, kind: str = "") -> _Row:
    """The row of a value that the run did not return."""
    return _Row(Difference(name, float("nan"), 0.0, step, kind), hidden=True)


def _vectors(
    name: str,
    kind: str,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    tolerance: float,
    least: float = 0.0,
    step: int | None = None,
    lost: bool = False,
) -> _Row:
    """The norm of the difference of two arrays, relative to that of `want`; where rounding of single elements is too
    large for that, the error of the projection on `want`. `arrays`: got, expected, expected perturbed by rounding.
    `lost`: positions of elements that are not finite may differ.
    """
    got, want, rounding = arrays
    if got.shape != want.shape:
        return _Row(Difference(name, float("inf"), tolerance, step, kind))
    a, b, c = (np.ravel(x).astype(np.float64) for x in (got, want, rounding))
    finite = np.isfinite(a) & np.isfinite(b)
    infinite = not finite.all()
    if not lost and not np.array_equal(np.isfinite(a), np.isfinite(b)):
        hidden = not np.array_equal(np.isfinite(c), np.isfinite(b))  # rounding alone changes which are finite
        return _Row(Difference(name, float("inf"), tolerance, step, kind, "not finite"), hidden, infinite)
    if infinite:
        a, b, c = a[finite], b[finite], c[finite]
    size, noise, error = _norm(b), _norm(c - b), _norm(a - b)
    if not size:
        hidden = error <= least or not np.isfinite(noise)
        return _Row(Difference(name, error, _ROUNDING * noise + least, step, kind), hidden, infinite)
    noise, error, least = noise / size, error / size, least / size
    along = float(a @ b) / size**2
    detail = f"{_norm(a) / size:.3g} times as long, {_cosine(a, b):.3g} the cosine"
    allowed = max(tolerance, _ROUNDING * noise + least)
    if allowed + noise <= 0.5 or error > allowed:
        return _Row(Difference(name, error, allowed, step, kind, detail), False, infinite)
    # rounding errors of n elements are independent: 1 / sqrt(n) of their norm falls along `want`; an element whose
    # sign flips takes away twice its square
    part = abs(float((c - b) @ b)) / size**2
    allowed = max(tolerance, _ROUNDING * (part + noise / max(1, b.size) ** 0.5) + least**2 / 2)
    hidden = not allowed + part <= _INCONCLUSIVE
    what = f"length of the {kind}".strip()
    return _Row(Difference(name, abs(along - 1), allowed, step, what, detail), hidden, infinite)


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x)) if np.isfinite(x).all() else float("inf")


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    both = _norm(a) * _norm(b)
    return float(a @ b) / both if both else 0.0


def _infinite(a: np.ndarray, b: np.ndarray) -> bool:
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


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, relative to the largest magnitude in `b`."""
    return largest_difference(a, b) / max(_SMALLEST if b.size == 1 else 1.0, magnitude(b))
