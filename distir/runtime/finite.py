"""Check that the loss, and the weights and optimizer state that a rank holds, are finite.

A value that is not finite is identified by a number, so that ranks agree on the minimum: 0 is the loss, k + 1 input k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distir.ir.errors import DivergedError, UsageError
from distir.ir.function import Function
from distir.ir.type import Float16, Tensor
from distir.runtime.checkpoint import updated_inputs

LOSS = 0
ALL_FINITE = 1 << 62
"""Larger than the number of any value."""


def is_finite(x: Any) -> bool:
    """Whether all elements of a numpy array or torch tensor are finite; of a tensor without a temporary of its size."""
    if isinstance(x, np.ndarray | np.generic):
        return bool(np.isfinite(x).all())
    if not x.numel():
        return True
    least, most = x.aminmax()  # nan if any element is nan
    return bool(least.isfinite() & most.isfinite())


class FiniteWatch:
    """Checks the inputs that a program updates, among values by position. Those that were not finite initially, such as
    a mask of -inf among the weights, are ignored.
    """

    def __init__(self, program: Function, values: Mapping[int, Any]) -> None:
        floating = [
            k for k, v in updated_inputs(program).items() if isinstance(v.type, Tensor) and v.type.dtype.floating
        ]
        here = [k for k in floating if k in values]
        self.initial = first_not_finite(here, values)
        self.watched = [k for k in here if is_finite(values[k])]

    def first(self, values: Mapping[int, Any]) -> int:
        """The number of the first input that is not finite now."""
        return first_not_finite(self.watched, values)


def first_not_finite(positions: Iterable[int], values: Mapping[int, Any]) -> int:
    """The number of the first of these inputs that is not finite; ALL_FINITE if there is none."""
    return next((k + 1 for k in positions if not is_finite(values[k])), ALL_FINITE)


def nonfinite_loss(program: Function, outputs: Mapping[int, np.ndarray]) -> int:
    """`LOSS` if the loss among a training step's outputs is not finite, else ALL_FINITE."""
    trains = bool(program.updates) and 0 in outputs
    return ALL_FINITE if not trains or is_finite(outputs[0]) else LOSS


def name_of(program: Function, number: int) -> str:
    """The name of the value with a number, for messages."""
    return f"the loss, %{program.outputs[0].name}," if number == LOSS else f"%{program.inputs[number - 1].name}"


def reject_nonfinite(program: Function, number: int, folder: Path) -> None:
    """Raises UsageError if a checkpoint has a value that is not finite; `number` identifies it."""
    if number != ALL_FINITE:
        text = f"checkpoint {folder}: {name_of(program, number)} is not finite"
        raise UsageError(text, "--allow-nonfinite resumes from it nevertheless")


def diverged(program: Function, number: int, step: int, check: str | None) -> DivergedError:
    """The error for a value that is not finite after a step; `check`: the verdict of a check up to there."""
    narrow = any(isinstance(v.type, Tensor) and v.type.dtype is Float16 for v in updated_inputs(program).values())
    instead = "--dtype bfloat16, or " if narrow else ""  # float16 overflows at 65504 and underflows at 6e-8
    hint = f"{instead}a smaller --lr may keep it finite; --allow-nonfinite continues"
    return DivergedError(
        f"{name_of(program, number)} is not finite in step {step}{f'; {check}' if check else ''}", hint
    )
