"""Finds the roles of inputs (weights, data, batch dims); without declared roles, from the operands they are used as."""

from __future__ import annotations

from collections.abc import Mapping

from distir.ir.cached import cached
from distir.ir.errors import InfeasibleError, UsageError
from distir.ir.function import Function, Value
from distir.ops.rules import shape_of

WEIGHTS = ("parameter", "state")


@cached
def weights(function: Function) -> list[Value]:
    """The inputs that are parameters or optimizer state.

    In a program without roles: inputs used only as operands that an op's spec names as its weight.
    """
    if any(v.role for v in function.inputs):
        return [v for v in function.inputs if v.kind in WEIGHTS]
    used: dict[Value, bool] = {}
    for op in function.ops:
        for k, v in enumerate(op.inputs):
            if used.get(v, True):
                used[v] = op.spec.weight == k
    return [v for v in function.inputs if used.get(v, False)]


def batch_dims(function: Function, batch: Mapping[Value, int] | None = None) -> dict[Value, int]:
    """The batch dim of each data input: as given, else by role, else dim 0 of every input that is not a weight.

    Raises UsageError for a dim that an input does not have.
    """
    if batch is None:
        if any(v.role for v in function.inputs):
            batch = {v: v.role.batch for v in function.inputs if v.role and v.role.batch is not None}
        else:
            params = set(weights(function))
            batch = {v: 0 for v in function.inputs if v not in params and shape_of(v)}
    for v, dim in batch.items():
        if not 0 <= dim < len(shape_of(v)):
            raise UsageError(f"input %{v.name} has no dim {dim} to be the batch: its shape is {shape_of(v)}")
    return dict(batch)


def batch_size(function: Function, batch: Mapping[int, int]) -> int:
    """The number of samples in the batch. `batch` maps positions of data inputs to their batch dim.

    Raises InfeasibleError if the data inputs differ.
    """
    sizes = {shape_of(function.inputs[i])[dim]: function.inputs[i] for i, dim in batch.items()}
    if len(sizes) > 1:
        found = ", ".join(f"%{v.name} has {n}" for n, v in sizes.items())
        raise InfeasibleError(f"{function.name}: the batch differs between inputs: {found}")
    return next(iter(sizes), 1)
