"""Whether what a program trains is finite: weights and the optimizer's state that a rank holds, and the loss.

What is not is told by a number, so that ranks agree by its minimum: 0 stands for the loss, k + 1 for input k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distir.backends.checkpoint import renewed
from distir.ir.errors import DivergedError, UsageError
from distir.ir.function import Function
from distir.ir.type import Float16, Tensor

LOSS = 0
ALL_FINITE = 1 << 62
"""More than any number of what is not finite."""


def is_finite(x: Any) -> bool:
    """Of a numpy array, or a torch tensor: of that without another of its size."""
    if isinstance(x, np.ndarray | np.generic):
        return bool(np.isfinite(x).all())
    if not x.numel():
        return True
    least, most = x.aminmax()  # which are nan if any element is
    return bool(least.isfinite() & most.isfinite())


class Watch:
    """Looks at what a program renews, among the values that are held by position. Not at what was not finite when the
    watch began, such as a mask of -inf among the weights.
    """

    def __init__(self, program: Function, held: Mapping[int, Any]) -> None:
        floating = [k for k, v in renewed(program).items() if isinstance(v.type, Tensor) and v.type.dtype.floating]
        here = [k for k in floating if k in held]
        self.began = first_not_finite(here, held)
        self.watched = [k for k in here if is_finite(held[k])]

    def first(self, held: Mapping[int, Any]) -> int:
        """The number of the first that is not finite now."""
        return first_not_finite(self.watched, held)


def first_not_finite(positions: Iterable[int], held: Mapping[int, Any]) -> int:
    """The number of the first of these inputs that is not finite."""
    return next((k + 1 for k in positions if not is_finite(held[k])), ALL_FINITE)


def lost(program: Function, outputs: Mapping[int, np.ndarray]) -> int:
    """`LOSS` if among a training step's outputs, by position, is a loss that is not finite."""
    trains = bool(program.updates) and 0 in outputs
    return ALL_FINITE if not trains or is_finite(outputs[0]) else LOSS


def name_of(program: Function, number: int) -> str:
    """What a number stands for."""
    return f"the loss, %{program.outputs[0].name}," if number == LOSS else f"%{program.inputs[number - 1].name}"


def refuse(program: Function, number: int, folder: Path) -> None:
    """Raises UsageError for a checkpoint that holds something that is not finite."""
    if number != ALL_FINITE:
        told = f"checkpoint {folder}: {name_of(program, number)} is not finite"
        raise UsageError(told, "--allow-nonfinite goes on with it all the same")


def diverged(program: Function, number: int, step: int, check: str | None) -> DivergedError:
    """The error that says what left the finite numbers in a step, and what a check has found up to there."""
    narrow = any(isinstance(v.type, Tensor) and v.type.dtype is Float16 for v in renewed(program).values())
    instead = "--dtype bfloat16, or " if narrow else ""  # float16 has no number between 0 and 6e-8
    hint = f"{instead}a smaller --lr may keep it finite; --allow-nonfinite goes on"
    return DivergedError(
        f"{name_of(program, number)} is not finite in step {step}{f'; {check}' if check else ''}", hint
    )
