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

from distir.api.differences import (
    INCONCLUSIVE,
    ROUNDING,
    Compared,
    Difference,
    largest_difference,
    magnitude,
    norm,
    not_finite,
    relative,
    vectors,
)
from distir.executor.reference.sequential import fit, unfit
from distir.ir.function import Function, Value
from distir.ir.type import DType, Float32, Float64, Tensor
from distir.runtime.outcome import Outcome
from distir.transforms.rewriting.matching import epsilon

_SIGN_FLIPS = 3
"""Elements of a weight that may differ by chance (a step in the opposite direction) beyond the perturbed run's."""
_FAINT = 32
"""The size that rounding alone may give a gradient, in unit roundoffs of the largest gradient's norm: that of a
thousand terms, which adds up as their root."""
_PART = 4
"""Of the unit roundoff of the 16-bit numbers that a program computes with: what its outputs may differ by at least."""
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
    (float64 1e-10, 16 bits 0.05, mixed precision a quarter of the unit roundoff of the 16 bits); for gradients, state
    and changes of weights 1e-4 of the norm (float64 1e-10, 16 bits 0.05, for changes 0.2). A value is not checked where
    the tolerance would accept half or twice its change.

    Some gradients are zero but for rounding (see `_Faint`): of them, of what they change and of their state only the
    size is compared, and they are reported as not checked.
    """
    rounding = rounding or want
    tolerance = _tolerance(function)
    faint = _Faint.of(function, want, rounding)
    of_outputs = list(_outputs(function, got, want, rounding, first, tolerance.outputs))
    of_gradients = list(_gradients(function, got, want, rounding, faint, first, tolerance.gradients))
    lost = _lost(got, want)
    of_state = list(_state(function, got, want, rounding, faint, tolerance.gradients, lost))
    of_weights = list(_weights(function, begin, got, want, rounding, faint, tolerance.changes, lost))
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


def _names(rows: Iterator[Compared]) -> tuple[str, ...]:
    found = [row.difference for row in rows]
    return tuple(dict.fromkeys([d.name if d.step is None else f"{d.name} in step {d.step}" for d in found]))


def _worst(rows: Sequence[Compared]) -> Difference | None:
    checked = [row.difference for row in rows if not row.hidden]
    return max(checked, key=lambda d: (not d.ok, d.error / d.allowed if d.allowed else 0.0), default=None)


def _tolerance(function: Function) -> Tolerance:
    """By the dtypes of the inputs; in mixed precision for outputs a part of what the rounding of one number makes: a
    loss is a single number, in which the perturbed run may come near to the unperturbed one by chance."""
    types = {v.type.dtype for v in function.inputs if isinstance(v.type, Tensor) and v.type.dtype.floating}
    found = _EXACT if types <= {Float64} else _SINGLE if types <= {Float32, Float64} else _ROUGH
    narrow = max(map(epsilon, types_of_16_bits(function)), default=0.0)
    return found._replace(outputs=max(found.outputs, narrow / _PART))


def types_of_16_bits(function: Function) -> set[DType]:
    """The floating-point types of 16 bits among those of what a program computes."""
    made = {v.type.dtype for op in function.ops for v in op.outputs if isinstance(v.type, Tensor)}
    return {t for t in made if t.floating and t.size == 2}


def _outputs(
    function: Function, got: Outcome, want: Outcome, rounding: Outcome, first: int, tolerance: float
) -> Iterator[Compared]:
    for step, outputs in enumerate(want.outputs):
        made = got.outputs[step] if step < len(got.outputs) else {}
        last = step == len(want.outputs) - 1
        for k, y in outputs.items():
            if k not in made:
                if last or y.size == 1:  # of earlier steps a run may return only scalars
                    yield _missing(function.outputs[k].name, first + step)
                continue
            x, z = made[k], rounding.outputs[step][k]
            noise = ROUNDING * relative(z, y)
            row = Difference(function.outputs[k].name, relative(x, y), max(tolerance, noise), first + step)
            hidden = noise > INCONCLUSIVE and row.error > tolerance
            yield Compared(row, hidden, not_finite(x, y))


class _Faint(NamedTuple):
    """The weights whose first gradient is zero but for rounding, such as that of the bias of keys, which softmax does
    not see: another order of additions makes another one, and its own size says nothing of how much they may differ.

    They are those that are no larger than rounding of the step's largest gradient, and that rounding changes by much
    more than their last place: small gradients that are computed well are compared as others are.
    """

    weights: frozenset[int]
    """Their positions among the inputs."""
    state: frozenset[int]
    """The positions of the state of their optimizers."""
    scale: float
    """The size that rounding may give such a gradient."""

    @staticmethod
    def of(function: Function, want: Outcome, rounding: Outcome) -> _Faint:
        sizes = {k: norm(x.astype(np.float64)) for k, x in want.gradients.items()}
        types = [v.type.dtype for op in function.ops for v in op.outputs if isinstance(v.type, Tensor)]
        roundoff = max((epsilon(t) for t in types if t.floating), default=0.0)
        scale = _FAINT * roundoff * max((size for size in sizes.values() if np.isfinite(size)), default=0.0)
        number = {v: k for k, v in enumerate(function.inputs)}
        found: set[int] = set()
        for k, size in sizes.items():
            if size <= scale:
                noise = norm(rounding.gradients[k].astype(np.float64) - want.gradients[k].astype(np.float64))
                if noise > roundoff**0.5 * size:
                    found.add(k)
        users: dict[int, set[int | None]] = {}
        for op in function.ops:
            for v in op.inputs if op.spec.gradient is not None else ():
                if v.kind == "state" and v in number:
                    users.setdefault(number[v], set()).add(number.get(op.inputs[0]))
        return _Faint(frozenset(found), frozenset(k for k, of in users.items() if of <= found), scale)


def _gradients(
    function: Function, got: Outcome, want: Outcome, rounding: Outcome, faint: _Faint, first: int, tolerance: float
) -> Iterator[Compared]:
    for k, x in want.gradients.items():
        name = function.inputs[k].name
        if k not in got.gradients:
            yield _missing(name, first, "gradient")
        else:
            three = got.gradients[k], x, rounding.gradients[k]
            yield vectors(name, "gradient", three, tolerance, faint.scale if k in faint.weights else 0.0, first)


def _state(
    function: Function, got: Outcome, want: Outcome, rounding: Outcome, faint: _Faint, tolerance: float, lost: bool
) -> Iterator[Compared]:
    for k, v in enumerate(function.inputs):
        if v.kind != "state" or k not in want.inputs:
            continue
        if k not in got.inputs:
            yield _missing(v.name)
        elif want.inputs[k].dtype.kind in "biu":
            yield Compared(Difference(v.name, largest_difference(got.inputs[k], want.inputs[k]), 0.0))
        else:
            three = got.inputs[k], want.inputs[k], rounding.inputs[k]
            least = faint.scale + 2 * norm(three[1].astype(np.float64)) if k in faint.state else 0.0
            yield vectors(v.name, "", three, tolerance, least, lost=lost)


def _weights(
    function: Function,
    begin: Mapping[int, Any],
    got: Outcome,
    want: Outcome,
    rounding: Outcome,
    faint: _Faint,
    tolerance: float,
    lost: bool,
) -> Iterator[Compared]:
    weights = {k: v for k, v in enumerate(function.inputs) if v.kind == "parameter" and k in want.inputs}
    moved = [
        norm(want.inputs[k] - _start(begin[k], v)) / max(1, want.inputs[k].size) ** 0.5 for k, v in weights.items()
    ]
    farthest = max((x for x in moved if np.isfinite(x)), default=0.0) if faint.weights else 0.0
    for k, v in weights.items():
        if k not in got.inputs:
            yield _missing(v.name, None, "change")
            continue
        start = _start(begin[k], v)
        if got.inputs[k].shape != start.shape:
            yield Compared(Difference(v.name, float("inf"), tolerance, None, "change"))
            continue
        mine, expected, perturbed = (steps.inputs[k].astype(np.float64) - start for steps in (got, want, rounding))
        # each weight is rounded to its own last place, so a few elements may differ by one unit in it
        least = _SIGN_FLIPS**0.5 * 2 * epsilon(v.type.dtype) * magnitude(start)  # type: ignore[union-attr]
        unmoved = False
        if k in want.gradients:
            gradient, disturbed = (steps.gradients[k].astype(np.float64) for steps in (want, rounding))
            if k in faint.weights:  # AdamW makes of such a gradient a change as large as any
                least += farthest * expected.size**0.5
            else:
                least += norm(np.sort(_by_chance(expected, gradient, disturbed))[-_SIGN_FLIPS:])
            unmoved = not np.any(gradient) and not np.any(expected)
        row = vectors(v.name, "change", (mine, expected, perturbed), tolerance, least, lost=lost)
        yield row._replace(hidden=False) if unmoved else row


def _start(array: Any, weight: Value) -> np.ndarray:
    """A weight before the run, in its source shape."""
    return unfit(fit(array, weight), weight.role and weight.role.source).astype(np.float64)


def _by_chance(change: np.ndarray, gradient: np.ndarray, disturbed: np.ndarray) -> np.ndarray:
    """The possible error of each element's change where its gradient is of the size of rounding errors: an optimizer
    that normalises gradients (AdamW) turns that into a full step, in either direction.
    """
    with np.errstate(invalid="ignore"):  # of gradients that are not finite, whose step changes nothing
        noise = 3 * norm(disturbed - gradient) / max(1, gradient.size) ** 0.5
    size = np.abs(gradient)
    share = np.divide(noise, size, out=np.full_like(size, 2.0), where=size > noise / 2)
    return np.ravel(np.abs(change) * np.where((size > 0) | (disturbed != 0), share, 0.0))


def _missing(name: str, step: int | None = None, kind: str = "") -> Compared:
    """The row of a value that the run did not return."""
    return Compared(Difference(name, float("nan"), 0.0, step, kind), hidden=True)
