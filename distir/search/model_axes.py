"""Which further axes a model offers beside dp, tp and pp: context parallelism and expert parallelism.

Both follow from the program, not from names. The length of sequences is a dim of the data, other than the batch, whose
class (`transforms.sharding.classes`) runs through most of the model's FLOPs, contains no dim of a weight's matrices and
needs no halo. Experts are a dim of weights that their product does with each index apart: a factor of all its operands
and of its result, beside the factors of the matrices; tables of a lookup are the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from distir.api.interop.plan_settings import CONTEXT, EXPERTS
from distir.api.named_dims import named_dims
from distir.ir.cached import cached
from distir.ir.errors import UsageError
from distir.ir.function import Function, Value
from distir.ir.type import Shard
from distir.ops.rules import shape_of
from distir.transforms.plan import InputSplit
from distir.transforms.roles import batch_dims, weights
from distir.transforms.sharding.classes import Classes, classes_from
from distir.transforms.sharding.graph import Graph, graph_of
from distir.transforms.sharding.sequence import features

_MOST = 0.5
"""The share of a model's FLOPs that are computed along the sequence, at least."""


class ModelAxis(NamedTuple):
    """An axis that a model offers: the dims of inputs that it splits, and the size that each degree divides: the
    tokens of a sequence, or the number of experts."""

    name: str
    size: int
    dims: tuple[tuple[str, int], ...]

    def split(self, n: int) -> InputSplit:
        """The axis with n devices."""
        return InputSplit(self.name, n, self.dims)


@cached
def model_axes(function: Function) -> Mapping[str, ModelAxis]:
    """The further axes that a sequential program offers, by name: "cp" and "ep", where there is one."""
    graph = graph_of(function)
    find: dict[str, Callable[[Graph], Mapping[Value, int]]] = {CONTEXT: _context, EXPERTS: _experts}
    found: dict[str, ModelAxis] = {}
    for name, dims in [(name, dims(graph)) for name, dims in find.items()]:
        if name == EXPERTS:  # samples are split, too, but have a size of their own
            data = batch_dims(function)
            size = math.gcd(*[shape_of(v)[dim] for v, dim in dims.items() if data.get(v) != dim])
        else:
            size = math.gcd(*[shape_of(v)[dim] for v, dim in dims.items()])
        if size > 1:
            found[name] = ModelAxis(name, size, _as_text(function, name, dims))
    return found


def _context(graph: Graph) -> dict[Value, int]:
    """The dim of each data input that is the length of sequences; none without sequences."""
    batch = batch_dims(graph.function)
    data = _data(graph.function)
    for v in data:
        for dim, size in enumerate(shape_of(v)):
            n = _least_divisor(size)
            if n == 1 or batch.get(v) == dim:
                continue
            classes = classes_from(graph, n, ((graph.index[v], Shard(dim)),))
            c = classes.at[graph.index[v]][Shard(dim)]
            if _is_sequence(graph, classes, c):
                return {w: at[0] for w in data if (at := _dims_in(graph, classes, w, c))}
    return {}


def _is_sequence(graph: Graph, classes: Classes, c: int) -> bool:
    """Whether a class of data is the length of sequences."""
    if c in features(graph, classes) or c in classes.with_halos:
        return False
    flops = [(sig.flops, any([k == c for _, k in row])) for sig, row in zip(graph.sigs, classes.mappings, strict=True)]
    return sum([n for n, inside in flops if inside]) > _MOST * sum([n for n, _ in flops])


def _experts(graph: Graph) -> dict[Value, int]:
    """The dim of each weight that counts experts, or tables, and of each data input: the same or, without one, the
    batch; none without experts."""
    function = graph.function
    stacked = _stacked(function)
    if not stacked:
        return {}
    batch = batch_dims(function)
    found = dict(stacked)
    nodes = tuple([(graph.index[v], Shard(dim)) for v, dim in stacked.items()])
    classes = classes_from(graph, _least_divisor(math.gcd(*[shape_of(v)[dim] for v, dim in stacked.items()])), nodes)
    mine = {classes.at[v].get(split) for v, split in nodes}
    matrices = _used_as_weights(function)
    for v in weights(function):
        if v.kind == "state" or v in matrices or math.prod(shape_of(v)) in shape_of(v):
            continue  # a router's matrix is whole, and so is what has no dim but that of the experts: its bias
        at = [dim for c in mine if c is not None for dim in _dims_in(graph, classes, v, c)]
        if at:
            found[v] = at[0]
    for v in _data(function):
        at = [dim for c in mine if c is not None for dim in _dims_in(graph, classes, v, c)]
        if at or v in batch:
            found[v] = at[0] if at else batch[v]
    return found


def _stacked(function: Function) -> dict[Value, int]:
    """The weights that are stacks of matrices, each computed with by itself, and the dim of the stack."""
    made_of = _made_of_weights(function)
    found: dict[Value, int] = {}
    for op in function.ops:
        slot = op.spec.weight
        if slot is None or slot >= len(op.inputs) or op.inputs[slot] not in made_of:
            continue
        weight = made_of[op.inputs[slot]]
        factors = op.spec.factors(op.attributes, [shape_of(v) for v in op.inputs])
        if factors is None or shape_of(weight) != shape_of(op.inputs[slot]):
            continue
        names = factors.ins[slot]
        everywhere = [name is not None and all([name in x for x in (*factors.ins, *factors.outs)]) for name in names]
        apart = [dim for dim, yes in enumerate(everywhere) if yes and shape_of(weight)[dim] > 1]
        if apart and not all(everywhere):
            found.setdefault(weight, apart[0])
    return found


def _made_of_weights(function: Function) -> dict[Value, Value]:
    """The weight that each value is made of alone, such as one that is cast; weights themselves included."""
    found = {v: v for v in weights(function) if v.kind != "state"}
    for op in function.ops:
        if len(op.inputs) == len(op.outputs) == 1 and op.inputs[0] in found:
            found[op.outputs[0]] = found[op.inputs[0]]
    return found


def _used_as_weights(function: Function) -> set[Value]:
    """The weights of products and lookups."""
    made_of = _made_of_weights(function)
    slots = [(op, op.spec.weight) for op in function.ops]
    used = [op.inputs[k] for op, k in slots if k is not None and k < len(op.inputs)]
    return {made_of[v] for v in used if v in made_of}


def _data(function: Function) -> list[Value]:
    owned = set(weights(function))
    return [v for v in function.inputs if v.kind in ("data", None) and v not in owned]


def _dims_in(graph: Graph, classes: Classes, v: Value, c: int) -> list[int]:
    """The dims of an input that are of a class."""
    at = classes.at[graph.index[v]]
    return [dim for dim in range(len(shape_of(v))) if at.get(Shard(dim)) == c]


def _least_divisor(n: int) -> int:
    """The least prime factor; 1 of 1."""
    return next((k for k in range(2, math.isqrt(n) + 1) if n % k == 0), n)


def _as_text(function: Function, name: str, dims: Mapping[Value, int]) -> tuple[tuple[str, int], ...]:
    """The dims by names of inputs: one name with `*` for those that differ in numbers, and for all data, where that
    stands for no other input."""
    data = [v for v in dims if v in set(_data(function))]
    wanted = {(function.inputs.index(v), dim) for v, dim in dims.items()}
    numbered = list(dict.fromkeys([(re.sub(r"\d+", "*", v.name), dim) for v, dim in dims.items() if v not in data]))
    each = [(v.name, dim) for v, dim in dims.items() if v not in data]
    tries: list[Sequence[tuple[str, int]]] = []
    for rest in (numbered, each):
        tries += [
            [*[("*", dim) for dim in dict.fromkeys([dims[v] for v in data])], *rest],
            [*[(v.name, dims[v]) for v in data], *rest],
        ]
    for given in tries[:-1]:
        try:
            said = named_dims(function, [InputSplit(name, 1, tuple(given))])[name]
        except UsageError:
            continue
        if set(said) == wanted:
            return tuple(given)
    return tuple(tries[-1])
