"""Times of compute that are given for a proxy: of functions, of a model's layers, or measured in an earlier run.

A file has microseconds of a call, for one microbatch on one device:

    fwd0 = 1200                       # a function, also its variants such as fwd0.last that have no line

    [layers."transformer.h.3"]        # ops from the first use of weights whose names begin so, up to other weights
    forward = 1200
    backward = 2400                   # what differentiates these ops, and what is recomputed of them
    update = 300                      # the optimizer, of weights whose names begin so

They are shared among the ops by the cost model.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distir.api.model import Model
from distir.api.timings import Key, quicker_half, read_folder
from distir.executor.simulator.labels import COMPUTE, labels
from distir.ir.errors import UsageError, did_you_mean
from distir.ir.files import read_toml
from distir.ir.function import Function, Op, Value
from distir.transforms.parallel3d import source_of
from distir.transforms.passes import DISTRIBUTED, form_of
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, PHASES, UPDATE
from distir.transforms.rank.proxied import is_slept
from distir.transforms.roles import weights

Where = tuple[Function, Op]
_LAYERS = "layers"
_WAYS = {PHASES[letter].word: PHASES[letter].body for letter in (FORWARD, BACKWARD, UPDATE)}
"""The passes of a layer, and how the names of functions with their ops begin."""
_TOGETHER = "weights of several layers are updated together: give the time of the function, or use --bucket-mb 0"
_SHOWN = 8
"""The most names that a hint lists."""


def given_times(
    path: str | os.PathLike[str], model: Model, program: Function, predicted: Callable[[Op], float]
) -> Mapping[Where, float]:
    """Seconds of ops of a distributed program as it is run, by function: those that a TOML file gives, or that a folder
    of `--profile` has measured. `predicted` are seconds by the cost model.

    Raises UsageError for a file that cannot be read, has other lines, or names functions or layers that there are not,
    or that compute nothing; and for a folder with none of the program's ops.
    """
    name = os.fspath(path)
    if os.path.isdir(name):
        return _measured(name, program)
    given = read_toml(name, "times are lines such as: fwd0 = 1200")
    layers = given.pop(_LAYERS, {})
    found: dict[Where, float] = {}
    for function, ops in _of_functions(name, given, program):
        found |= _shared(f"{name}: {function.name}", ops, given[_named(function, given)], predicted)
    for (layer, way), ops in _of_layers(name, layers, model, program).items():
        if any([where in found for where in ops]):
            raise UsageError(f"{name}: ops of layer {layer!r} are also in a function with a time", "give one of them")
        hint = _TOGETHER if way == PHASES[UPDATE].word else None
        found |= _shared(f"{name}: {way} of {layer}", ops, layers[layer][way], predicted, hint)
    return found


def _shared(
    what: str, ops: Iterable[Where], micros: object, predicted: Callable[[Op], float], hint: str | None = None
) -> dict[Where, float]:
    """Microseconds shared among ops as predicted; equally if all are predicted to take none.

    The ops may be in functions of several stages, and in variants of each, of which one runs at a time. Raises
    UsageError, with the hint, if there are none.
    """
    if isinstance(micros, bool) or not isinstance(micros, int | float) or not 0 <= micros < math.inf:
        raise UsageError(f"{what}: expected microseconds, a number from 0, got {micros!r}")
    each = {where: predicted(where[1]) for where in ops}
    if micros and not each:
        raise UsageError(f"{what}: nothing is computed that could take {micros:g} us", hint)
    if not any(each.values()):
        each = dict.fromkeys(each, 1.0)
    own: dict[Function, float] = {}
    for (function, _), x in each.items():
        own[function] = own.get(function, 0.0) + x
    most: dict[str, float] = {}
    for function, x in own.items():
        most[_stem(function)] = max(x, most.get(_stem(function), 0.0))
    whole = {f: x + sum(most.values()) - most[_stem(f)] for f, x in own.items()}
    return {(f, op): micros * 1e-6 * x / whole[f] for (f, op), x in each.items() if x}


def _slept(function: Function) -> list[Where]:
    """The ops that a proxy sleeps."""
    return [(function, op) for op in function.ops if is_slept(op) or op.spec.name == "Sleep"]


def _unknown(path: str, what: str, name: str, known: Iterable[str]) -> UsageError:
    names = list(known)
    listed = f"it has {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
    return UsageError(f"{path}: the {what} {name!r}", did_you_mean(name, names, listed))


# --- functions


def _of_functions(path: str, given: Mapping[str, Any], program: Function) -> list[tuple[Function, list[Where]]]:
    """The functions that have a time, and their ops."""
    every = [*program.callees(), *([program] if any([op.spec.name == "Sleep" for op in program.ops]) else [])]
    known = dict.fromkeys([name for f in every for name in (f.name, _stem(f))])
    for name in given:
        if name not in known:
            raise _unknown(path, "program has no function", name, known)
    return [(f, _slept(f)) for f in every if _named(f, given) in given]


def _stem(function: Function) -> str:
    """The name of a function without that of its variant: bwd0.last is bwd0 of the last microbatch."""
    return function.name.partition(".")[0]


def _named(function: Function, given: Mapping[str, Any]) -> str:
    return function.name if function.name in given else _stem(function)


# --- layers


def _of_layers(path: str, given: object, model: Model, program: Function) -> dict[tuple[str, str], list[Where]]:
    """The ops of each pass of each layer that has a time."""
    if not isinstance(given, dict):
        raise UsageError(f'{path}: expected tables such as [layers."h.3"], got {_LAYERS} = {given!r}')
    found: dict[tuple[str, str], list[Where]] = {}
    if not given:
        return found
    if form_of(model.function) == DISTRIBUTED:
        hint = "give times of its functions, such as fwd0 = 1200"
        raise UsageError(f"{path}: {model.name} is distributed already, and has no layers", hint)
    source = source_of(program, model.function)
    names = [v.name for v in weights(source)]
    for layer, times in given.items():
        if not any([_is_of(name, layer) for name in names]):
            raise _unknown(path, "model has no layer", layer, _layers(names))
        if not isinstance(times, dict) or not times or set(times) - set(_WAYS):
            raise UsageError(f"{path}: layer {layer}: expected some of {', '.join(_WAYS)}, got {times!r}")
        found |= {(layer, way): [] for way in times}
    latest = _latest_weights(source)
    for function in program.callees():
        way = next((word for word, body in _WAYS.items() if _stem(function).startswith(body)), None)
        if way is None:
            continue
        used = _updating(function, names) if way == PHASES[UPDATE].word else _labelled(function, latest)
        for op, weight in used:
            layer = max([x for x in given if _is_of(weight, x)], key=len, default=None)
            if layer is not None and way in given[layer]:
                found[layer, way].append((function, op))
    return found


def _updating(function: Function, names: Sequence[str]) -> Iterable[tuple[Op, str]]:
    """The ops that a proxy sleeps and that take weights, each with what the names of these begin with; one that takes
    those of several layers is of none."""
    for _, op in _slept(function):
        used = [v.name for v in op.inputs if v.name in names]
        if common := _common(used):
            yield op, common


def _common(names: Sequence[str]) -> str:
    """What the names begin with, up to a dot or whole."""
    rows = [name.split(".") for name in names]
    parts = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    return ".".join([column[0] for column in parts])


def _is_of(weight: str, layer: str) -> bool:
    return weight == layer or weight.startswith(f"{layer}.")


def _layers(names: Iterable[str]) -> dict[str, None]:
    """What names of weights begin with, up to a dot."""
    parts = [name.split(".") for name in names]
    return dict.fromkeys([".".join(row[:n]) for row in parts for n in range(1, len(row) + 1)])


def _latest_weights(source: Function) -> dict[str, str]:
    """For each result of a training step the weight that was the last to come into use before it, of a backward op that
    of the op which it differentiates; by names, which results keep when they are placed."""
    alone: dict[Value, tuple[Value, ...]] = {v: (v,) for v in weights(source)}
    """What is computed from weights only, and from which."""
    order: dict[Value, int] = {}
    """When each weight came into use."""
    at: dict[Value, int] = {}
    for op in source.ops:
        used = tuple([w for v in op.inputs for w in alone.get(v, ())])
        if op.inputs and all([v in alone for v in op.inputs]):
            alone.update(dict.fromkeys(op.outputs, used))
            continue
        for w in used:
            order.setdefault(w, len(order))
        before = [*[order[w] for w in used], *[at[v] for v in op.inputs if v in at]]
        latest = at.get(op.of.outputs[0]) if op.of is not None else None
        if latest is not None or before:
            at.update(dict.fromkeys(op.outputs, max(before) if latest is None else latest))
    at |= {v: max([order.get(w, -1) for w in ws]) for v, ws in alone.items()}
    names = {k: w.name for w, k in order.items()}
    return {v.name: names[k] for v, k in at.items() if k in names}


def _labelled(function: Function, latest: Mapping[str, str]) -> Iterable[tuple[Op, str]]:
    """The ops that a proxy sleeps, each with its weight: by the name of a result, without the number of a copy, else as
    that of an operand."""
    found: dict[Value, str] = {}
    for op in function.ops:
        before = next((found[v] for v in op.inputs if v in found), None)
        for v in op.outputs:
            weight = latest.get(v.name) or latest.get(v.name.rpartition(".")[0]) or before
            if weight is not None:
                found[v] = weight
        if is_slept(op) and op.outputs and op.outputs[0] in found:
            yield op, found[op.outputs[0]]


# --- an earlier run


def _measured(folder: str, program: Function) -> dict[Where, float]:
    """Mean seconds of each op in the quicker half of the recorded steps, over ranks, steps and microbatches."""
    rows: dict[Key, list[float]] = {}
    for s in quicker_half(read_folder(Path(folder))[1]).slices:
        if s.category == COMPUTE:
            rows.setdefault(s.key, []).append(s.seconds)
    found: dict[Where, float] = {}
    for function in (*program.callees(), program):
        slept = {op for _, op in _slept(function)}
        for op in function.ops:
            about = labels(op, function)
            taken = rows.pop((op.spec.name, about["function"], about.get("result"), about.get("stage")), [])
            if taken and op in slept:
                found[function, op] = sum(taken) / len(taken)
    if rows or not found:
        name = next(iter(rows), None)
        what = f"%{name[2].removeprefix('%')} of {name[1]}" if name and name[2] else "nothing"
        hint = "it is a profile of another model, or of another plan"
        raise UsageError(f"{folder} has the time of {what}, which the program does not compute", hint)
    return found
