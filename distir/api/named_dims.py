"""Resolves the names of inputs in a plan: those whose dims further axes split (`Plan.split`), and those at which
pipeline stages begin (`Plan.cut`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from distir.ir.errors import InfeasibleError, UsageError, counted, did_you_mean
from distir.ir.function import Function, Value
from distir.ops.rules import shape_of
from distir.transforms.pipeline.layers import even_layers, layers
from distir.transforms.plan import BALANCED, EVEN, InputSplit, Plan
from distir.transforms.roles import weights

_NAMES = f"--cut W,W,... gives weights, or numbers of layers, at which stages begin; or --cut {EVEN}"
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


def named_cuts(function: Function, plan: Plan) -> tuple[int, ...]:
    """The positions of the inputs at whose first use the plan's stages begin, but the first.

    What `Plan.cut` gives are names of inputs, numbers of layers, or `even` alone; a name goes before what else it could
    mean. Raises UsageError for what is none of these, and for data; InfeasibleError for more stages than layers.
    """
    position = {v.name: i for i, v in enumerate(function.inputs)}
    if plan.cut == (EVEN,) and EVEN not in position:
        return _even(function, plan.stage_count)
    data = [v.name for v in _data(function)]
    found: list[int] = []
    for name in plan.cut:
        if name in position and name not in data:
            found.append(position[name])
        elif name.isdecimal() and len(name) < 10:
            found.append(_numbered(function, int(name)))
        elif name in (EVEN, BALANCED):
            raise UsageError(f"cut: {name!r} stands alone", _NAMES)
        else:
            named = [v.name for v in weights(function) if v.kind != "state"]
            listed = f"weights are {', '.join(named[:_SHOWN])}{', ...' if len(named) > _SHOWN else ''}"
            listed = listed if named else "the model has no weights"
            hint = did_you_mean(name, [EVEN, BALANCED, *[x for x in position if x not in data]], listed)
            what = f"{name!r} is data: a stage begins at a weight" if name in data else f"no input is called {name!r}"
            raise UsageError(f"cut: {what}", hint)
    return tuple(found)


def _even(function: Function, stages: int) -> tuple[int, ...]:
    """Where stages of equal numbers of layers begin. Raises InfeasibleError if there are too few."""
    count = len(layers(function).first) if stages > 1 else 1
    if count < stages:
        raise InfeasibleError(f"cut: {stages} stages need a layer each: {_repeated(function)}", _NAMES)
    return tuple([_numbered(function, n) for n in accumulate(even_layers(count, stages)[:-1])])


def _numbered(function: Function, number: int) -> int:
    """The first weight of the layer of this number; of the number of layers, the first after them. Raises UsageError if
    there is none."""
    first, after = layers(function)
    if number > len(first) or (number == len(first) and after is None):
        raise UsageError(f"cut: there is no layer {number}: {_repeated(function)}", _NAMES)
    return first[number] if number < len(first) else after  # type: ignore[return-value]


def _repeated(function: Function) -> str:
    """What layers there are, as a text."""
    names = [function.inputs[i].name for i in layers(function).first]
    listed = f", which begin at {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}" if names else ""
    return f"{function.name} has {counted(len(names), 'layer')} that repeat{listed}"


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
