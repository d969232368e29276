"""Resolves the names of inputs in a plan: those whose dims further axes split (`Plan.split`), and those at which
pipeline stages begin (`Plan.cut`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from distir.ir.errors import UsageError, did_you_mean
from distir.ir.function import Function, Value
from distir.ops.rules import shape_of
from distir.transforms.plan import InputSplit
from distir.transforms.roles import weights

_SHOWN = 8
"""The most names that a hint lists."""


def named_dims(function: Function, splits: Sequence[InputSplit]) -> Mapping[str, Sequence[tuple[int, int]]]:
    """For each axis the dims that it splits, as (position of the input, dim).

    A name with `*` stands for all data inputs that it matches and that have such a dim; if there are none, for other
    inputs. Raises UsageError for a name that no input has, a dim that an input does not have, and an input of which one
    axis would split two dims.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    position = {v: i for i, v in enumerate(function.inputs)}
    for split in splits:
        dims: dict[Value, int] = {}
        for name, dim in split.dims:
            for v in _matches(function, split, name, dim):
                if dims.setdefault(v, dim) != dim:
                    raise UsageError(
                        f"split: {split.axis} splits dims {dims[v]} and {dim} of %{v.name}",
                        "an axis splits one dim of an input; another dim takes another axis",
                    )
        found[split.axis] = [(position[v], dim) for v, dim in dims.items()]
    return found


def named_cuts(function: Function, names: Sequence[str]) -> tuple[int, ...]:
    """The positions of the inputs of these names. Raises UsageError for a name that no input has, and for data."""
    position = {v.name: i for i, v in enumerate(function.inputs)}
    data = [v.name for v in _data(function)]
    for name in names:
        if name not in position or name in data:
            found = [v.name for v in weights(function) if v.kind != "state"]
            listed = f"weights are {', '.join(found[:_SHOWN])}{', ...' if len(found) > _SHOWN else ''}"
            listed = listed if found else "the model has no weights"
            hint = did_you_mean(name, [x for x in position if x not in data], listed)
            what = f"{name!r} is data: a stage begins at a weight" if name in data else f"no input is called {name!r}"
            raise UsageError(f"cut: {what}", hint)
    return tuple([position[name] for name in names])


def _matches(function: Function, split: InputSplit, name: str, dim: int) -> list[Value]:
    given = f"split: {split.axis} names {name}.{dim}"
    if "*" not in name:
        v = next((v for v in function.inputs if v.name == name), None)
        if v is None:
            raise UsageError(f"{given}: no input is called {name!r}", _known(function, name))
        if dim >= len(shape_of(v)):
            raise UsageError(f"{given}: the shape of %{name} is {shape_of(v)}", _dims(shape_of(v)))
        return [v]
    matching = [v for v in function.inputs if fnmatchcase(v.name, name)]
    data = set(_data(function))
    chosen = [v for v in matching if v in data] or [v for v in matching if v.kind != "state"]
    chosen = [v for v in chosen if dim < len(shape_of(v))]
    if not chosen:
        raise UsageError(f"{given}: no input matches and has a dim {dim}", _known(function))
    return chosen


def _data(function: Function) -> list[Value]:
    parts = set(weights(function))
    return [v for v in function.inputs if v.kind in ("data", None) and v not in parts]


def _dims(shape: Sequence[int]) -> str:
    return f"its dims are 0 to {len(shape) - 1}" if shape else "it has no dims"


def _known(function: Function, name: str = "") -> str:
    """A hint: names like this one, or the data inputs'."""
    if near := did_you_mean(name, [v.name for v in function.inputs]):
        return near
    data = _data(function)
    shown = ", ".join([f"{v.name} {shape_of(v)}" for v in data[:_SHOWN]])
    return f"data inputs are {shown}{', ...' if len(data) > _SHOWN else ''}"
