"""Comparing a run with the sequential program on the same data, at the scale of what training changes.

A step moves a weight by a thousandth of its size or less, so weights that are close say nothing: they are close, too,
if no update was made. Compared are the outputs of every step; the gradients of the first, as optimizers took them; at
the end the changes of weights, and the optimizer's state. All are allowed to differ by what rounding does: the
sequential program is run once more with its results disturbed by their last bit (see `rounding`). Where that leaves
nothing to be told, the value is named as not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from distir.api.steps import Steps
from distir.executor.sequential import fit
from distir.ir.function import Function
from distir.ir.type import Float32, Float64, Tensor
from distir.transforms.rewrite import epsilon

_SMALLEST = 1e-2
"""Losses below this are compared as if they were this large: a loss is a difference of larger numbers."""
_ROUNDING = 2.5
"""How many times as far as rounding goes in the sequential program it may go in another."""
_TURNED = 3
"""So many elements of a weight may differ by chance where the disturbed run has none that do."""
_SHOWN = 4
"""More names than these are counted."""


class Tolerance(NamedTuple):
    """How much may differ whatever rounding does: of outputs, relative to the largest element; of gradients and state,
    and of the changes of weights, relative to their norms.
    """

    outputs: float
    gradients: float
    changes: float


_EXACT = Tolerance(1e-10, 1e-10, 1e-10)
_SINGLE = Tolerance(1e-5, 1e-4, 1e-4)
_ROUGH = Tolerance(5e-2, 5e-2, 0.2)


@dataclass(frozen=True)
class Difference:
    """How far one value is from the sequential program's, and how far it may be; `kind` says what of it is compared."""

    name: str
    error: float
    allowed: float
    step: int | None = None
    kind: str = ""
    told: str = ""
    """What more can be said, such as the length and direction."""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for nan, too

    def __str__(self) -> str:
        what = f"{self.kind} of %{self.name}" if self.kind else f"%{self.name}"
        where = "" if self.step is None else f" in step {self.step}"
        more = f" ({self.told})" if self.told else ""
        return f"{what}{where} differs by {self.error:.3g}{more}, {self.allowed:.3g} is allowed"

    def to_json(self) -> dict[str, Any]:
        """JSON of its fields."""
        return {"name": self.name, "kind": self.kind, "error": self.error, "allowed": self.allowed, "step": self.step}


@dataclass(frozen=True)
class Check:
    """The largest errors: of outputs (relative to their largest element); of the changes of weights, of the first
    step's gradients and of the optimizer's state (norms, relative to those of the sequential run).
    """

    outputs: Difference | None
    weights: Difference | None
    first: Difference | None = None
    """The first value that differs by more than is allowed."""
    gradients: Difference | None = None
    state: Difference | None = None
    unchecked: tuple[str, ...] = ()
    """What rounding hides: parameters, of which the change is meant, and other values, as "loss in step 3"."""
    infinite: tuple[str, ...] = ()
    """What is not finite in both runs, in parts or whole: the rest of it is compared."""
    compared: int = 0
    """How many values were compared, those that rounding hides left out."""

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
        """The verdict, a row for each sort of value, and what was not checked."""
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
                f"  not checked, as rounding may change them as much, or they are not given: {_listed(self.unchecked)}"
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
    """One comparison. `hidden`: rounding leaves nothing to be told; `infinite`: some is not finite, alike in both."""

    difference: Difference
    hidden: bool = False
    infinite: bool = False


def compare(
    function: Function,
    begin: Mapping[int, Any],
    got: Steps,
    want: Steps,
    rounding: Steps | None = None,
    first: int = 0,
) -> Check:
    """Compare a run of a program with the sequential one, `want`, on the same data.

    `begin`: the arrays that both began with, by input position. `rounding`: the sequential run once more, disturbed by
    rounding (see `rounding`); without it only the tolerance is allowed. `first`: the number of the first step. What the
    run does not give is named as not checked, but for outputs of many elements of steps before the last.

    Allowed are 2.5 times what rounding does, and at least: for outputs 1e-5 of the largest element, in float64 1e-10,
    in 16 bits 0.05; for gradients, state and changes of weights 1e-4 of the norm, in float64 1e-10, in 16 bits 0.05 and
    for changes 0.2. Where so much would have to be allowed that half or twice a change would pass, it is not checked.
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


def _lost(got: Steps, want: Steps) -> bool:
    """Whether a number that both runs give, such as the loss, left the finite ones in both: what kernels make of nan is
    their own."""
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
    function: Function, got: Steps, want: Steps, rounding: Steps, first: int, tolerance: float
) -> Iterator[_Row]:
    for step, outputs in enumerate(want.outputs):
        made = got.outputs[step] if step < len(got.outputs) else {}
        last = step == len(want.outputs) - 1
        for k, y in outputs.items():
            if k not in made:
                if last or y.size == 1:  # of other steps a run may give no more
                    yield _missing(function.outputs[k].name, first + step)
                continue
            x, z = made[k], rounding.outputs[step][k]
            noise = _ROUNDING * _relative(z, y)
            row = Difference(function.outputs[k].name, _relative(x, y), max(tolerance, noise), first + step)
            hidden = noise > _TELLS and row.error > tolerance
            yield _Row(row, hidden, _infinite(x, y))


_TELLS = 0.45
"""Relative errors that may be no larger tell nothing."""


def _gradients(
    function: Function, got: Steps, want: Steps, rounding: Steps, first: int, tolerance: float
) -> Iterator[_Row]:
    for k, x in want.gradients.items():
        name = function.inputs[k].name
        if k not in got.gradients:
            yield _missing(name, first, "gradient")
        else:
            yield _vectors(name, "gradient", got.gradients[k], x, rounding.gradients[k], tolerance, step=first)


def _state(
    function: Function, got: Steps, want: Steps, rounding: Steps, tolerance: float, lost: bool
) -> Iterator[_Row]:
    for k, v in enumerate(function.inputs):
        if v.kind != "state" or k not in want.inputs:
            continue
        if k not in got.inputs:
            yield _missing(v.name)
        elif want.inputs[k].dtype.kind in "biu":
            yield _Row(Difference(v.name, largest_difference(got.inputs[k], want.inputs[k]), 0.0))
        else:
            yield _vectors(v.name, "", got.inputs[k], want.inputs[k], rounding.inputs[k], tolerance, lost=lost)


def _weights(
    function: Function,
    begin: Mapping[int, Any],
    got: Steps,
    want: Steps,
    rounding: Steps,
    tolerance: float,
    lost: bool,
) -> Iterator[_Row]:
    for k, v in enumerate(function.inputs):
        if v.kind != "parameter" or k not in want.inputs:
            continue
        if k not in got.inputs:
            yield _missing(v.name, None, "change")
            continue
        start = fit(begin[k], v).astype(np.float64)
        if got.inputs[k].shape != start.shape:
            yield _Row(Difference(v.name, float("inf"), tolerance, None, "change"))
            continue
        changes = [steps.inputs[k].astype(np.float64) - start for steps in (got, want, rounding)]
        # a weight is rounded to its own last place: a few elements may end one place further
        least = _TURNED**0.5 * 2 * epsilon(v.type.dtype) * magnitude(start)  # type: ignore[union-attr]
        unmoved = False
        if k in want.gradients:
            gradient, disturbed = (steps.gradients[k].astype(np.float64) for steps in (want, rounding))
            least += _norm(np.sort(_by_chance(changes[1], gradient, disturbed))[-_TURNED:])
            unmoved = not np.any(gradient) and not np.any(changes[1])
        row = _vectors(v.name, "change", *changes, tolerance, least, lost=lost)
        yield row._replace(hidden=False) if unmoved else row


def _by_chance(change: np.ndarray, gradient: np.ndarray, disturbed: np.ndarray) -> np.ndarray:
    """How far each element's change may be off where its gradient is hardly more than rounding: an optimizer that
    divides by its size makes a whole step of that, in either direction.
    """
    noise = 3 * _norm(disturbed - gradient) / max(1, gradient.size) ** 0.5
    size = np.abs(gradient)
    share = np.divide(noise, size, out=np.full_like(size, 2.0), where=size > noise / 2)
    return np.ravel(np.abs(change) * np.where((size > 0) | (disturbed != 0), share, 0.0))


def _missing(name: str, step: int | None = None, kind: str = "") -> _Row:
    """What the run did not give."""
    return _Row(Difference(name, float("nan"), 0.0, step, kind), hidden=True)


def _vectors(
    name: str,
    kind: str,
    got: np.ndarray,
    want: np.ndarray,
    rounding: np.ndarray,
    tolerance: float,
    least: float = 0.0,
    step: int | None = None,
    lost: bool = False,
) -> _Row:
    """The norm of the difference of two arrays, relative to that of `want`; or, where rounding is too large for that in
    single elements, that of the part that goes `want`'s way. `lost`: one may have elements that are not finite where
    the other has none.
    """
    if got.shape != want.shape:
        return _Row(Difference(name, float("inf"), tolerance, step, kind))
    a, b, c = (np.ravel(x).astype(np.float64) for x in (got, want, rounding))
    finite = np.isfinite(a) & np.isfinite(b)
    infinite = not finite.all()
    if not lost and not np.array_equal(np.isfinite(a), np.isfinite(b)):
        hidden = not np.array_equal(np.isfinite(c), np.isfinite(b))  # rounding alone leaves other elements finite
        return _Row(Difference(name, float("inf"), tolerance, step, kind, "not finite"), hidden, infinite)
    if infinite:
        a, b, c = a[finite], b[finite], c[finite]
    size, noise, error = _norm(b), _norm(c - b), _norm(a - b)
    if not size:
        hidden = error <= least or not np.isfinite(noise)
        return _Row(Difference(name, error, _ROUNDING * noise + least, step, kind), hidden, infinite)
    noise, error, least = noise / size, error / size, least / size
    along = float(a @ b) / size**2
    told = f"{_norm(a) / size:.3g} times as long, {_cosine(a, b):.3g} the cosine"
    allowed = max(tolerance, _ROUNDING * noise + least)
    if allowed + noise <= 0.5 or error > allowed:
        return _Row(Difference(name, error, allowed, step, kind, told), False, infinite)
    # rounding of single elements goes every way: of n of them 1 / sqrt(n) goes this one; those that are reversed take
    # away twice their squares
    part = abs(float((c - b) @ b)) / size**2
    allowed = max(tolerance, _ROUNDING * (part + noise / max(1, b.size) ** 0.5) + least**2 / 2)
    hidden = not allowed + part <= _TELLS
    what = f"length of the {kind}".strip()
    return _Row(Difference(name, abs(along - 1), allowed, step, what, told), hidden, infinite)


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
    """Of one number the relative error; of many, relative to the largest."""
    return largest_difference(a, b) / max(_SMALLEST if b.size == 1 else 1.0, magnitude(b))
