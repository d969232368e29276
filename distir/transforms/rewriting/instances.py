"""Makes small instances of ops, in double precision, for random testing of claims about them.

Sizes are replaced consistently by small ones, in shapes and in the attributes that hold sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from distir.ir.attributes import Attribute
from distir.ir.axes import Shape
from distir.ir.definition import WHERE
from distir.ir.errors import IRTypeError
from distir.ir.function import Attributes, Op, Value
from distir.ir.infer import infer
from distir.ir.spec import lookup
from distir.ir.type import DType, Float64, Tensor
from distir.ops.rules import shape_of, tensor

Evaluate = Callable[[Op, Sequence[Any], None], Any]
"""(op, operands, no coordinate) -> results, as `distir.executor.reference.sequential.evaluate`."""
Sizes = Mapping[int, int]
"""Maps each size to the small one that replaces it."""
_LARGEST = 1 << 18
"""The maximum size of an op's results, in elements of 8 bytes."""
SIGNS: tuple[Callable[[Any], Any], ...] = (np.asarray, lambda x: -np.abs(x), np.abs)
"""Signs of random operands: any, negative, positive. With all negative, a maximum that starts from 0 is wrong."""


def all_sizes(ops: Sequence[Op]) -> Iterator[Sizes]:
    """The sizes to try, in order: small ones, then the actual ones."""
    yield small_sizes(ops)
    yield {n: n for op in ops for v in (*op.inputs, *op.outputs) for n in shape_of(v)}


def small_sizes(ops: Iterable[Op]) -> Sizes:
    """Small sizes for all sizes in these ops: 2, 3, 4, ... in increasing order.

    The size of a dim that a Reshape splits is the product of its parts; that of a dim that is concatenated or split
    keeps its ratio to the parts; a dim along which an attribute has positions keeps its size.
    """
    ops = list(ops)
    shapes = [shape_of(v) for op in ops for v in (*op.inputs, *op.outputs)]
    all_of = sorted({n for s in shapes for n in s if n > 1})
    made_of = {n: (1, parts) for op in ops if op.spec is _RESHAPE for n, parts in _parted(op)}
    counted: set[int] = set()
    for op in ops:
        takes = op.spec.attributes
        along = [d for name, x in op.attributes.items() for d in _dims(takes.get(name), x)]
        joined = {shape_of(v)[d] for v in (*op.inputs, *op.outputs) for d in along if d < len(shape_of(v))}
        if any(takes[name].kind == "ints" for name in op.attributes if name in takes and along):
            counted |= joined
        elif op.spec in _JOINING and (unit := math.gcd(*joined)):
            made_of |= {n: (n // unit, (unit,)) for n in joined - made_of.keys() if n != unit or unit not in all_of}
    sizes = {0: 0, 1: 1}
    for n in all_of:  # increasing: the sizes that it is made of come first
        times, parts = made_of.get(n, (0, ()))
        free = next(k for k in itertools.count(2) if k not in sizes.values())
        sizes[n] = times * math.prod([sizes.get(part, 2) for part in parts]) or free
    return sizes | {n: n for n in counted}


def _parted(op: Op) -> Iterator[tuple[int, Shape]]:
    """Each size of a Reshape that is split into, or merged from, several, with these."""
    old, new = shape_of(op.inputs[0]), shape_of(op.outputs[0])
    for a, b in groups(old, new):
        for one, several in ((old[slice(*a)], new[slice(*b)]), (new[slice(*b)], old[slice(*a)])):
            one, several = [tuple([n for n in part if n != 1]) for part in (one, several)]
            if len(one) == 1 and len(several) > 1:
                yield one[0], several


def groups(old: Shape, new: Shape) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The shortest ranges of dims of `old` and of `new` that have the same number of elements."""
    i = j = 0
    while j < len(new) or i < len(old):
        i0, j0, x, y = i, j, 1, 1
        while i == i0 or j == j0 or x != y:
            if (x <= y or j == len(new)) and i < len(old):
                x, i = x * old[i], i + 1
            elif j < len(new):
                y, j = y * new[j], j + 1
            else:
                break
        yield (i0, i), (j0, j)


_JOINING = (lookup("Split"), lookup("Concat"))
_RESHAPE = lookup("Reshape")


def _dims(takes: Attribute | None, x: Any) -> Sequence[int]:
    kind = takes.kind if takes else ""
    return (x,) if kind == "dim" else x if kind == "dims" else ()


def small_type(v: Value, sizes: Sizes) -> Tensor:
    """The type of the value in an instance."""
    t = tensor(v)
    return Tensor(_double(t.dtype), [sizes[n] for n in shape_of(v)])


def _double(x: Any) -> Any:
    return Float64 if isinstance(x, DType) and x.floating else x


def small_attributes(op: Op, sizes: Sizes, shapes: Sequence[Shape]) -> Attributes:
    """The attributes in an instance without devices, for operands of these shapes."""
    made: dict[str, Any] = {}
    for name, x in op.attributes.items():
        if name in WHERE:
            continue
        kind = op.spec.attributes[name].kind if name in op.spec.attributes else ""
        if op.spec is _RESHAPE:
            made[name] = _reshaped(shape_of(op.inputs[0]), shape_of(op.outputs[0]), shapes[0], sizes)
        elif kind == "size":
            made[name] = sizes.get(x, x)
        elif kind == "sizes":
            made[name] = tuple([sizes.get(n, n) for n in x])
        else:
            made[name] = _double(x)
    return Attributes(made)


def _reshaped(old: Shape, new: Shape, small: Shape, sizes: Sizes) -> Shape:
    """The shape that replaces `new` if `small` replaces `old`: a merged dim is the product of its parts."""
    made: list[int] = []
    for a, b in groups(old, new):
        made += [math.prod(small[slice(*a)])] if b[1] == b[0] + 1 else [sizes[n] for n in new[slice(*b)]]
    return tuple(made)


def small_ops(ops: Iterable[Op], env: dict[Value, Value], sizes: Sizes) -> list[Op]:
    """The ops in an instance. `env` maps values to those of the instance; results are added to it.

    Raises IRTypeError if the sizes do not fit, or if results would be too large to evaluate.
    """
    made: list[Op] = []
    for op in ops:
        ins = tuple([env[v] for v in op.inputs])
        attributes = small_attributes(op, sizes, [shape_of(v) for v in ins])
        types = infer(op.spec, attributes, tuple([v.type for v in ins]))
        if sum(t.bytes for t in types) > 8 * _LARGEST:
            raise IRTypeError(f"{op.spec.name}: too large an instance")
        outs = tuple([Value(v.name, t) for v, t in zip(op.outputs, types, strict=True)])
        env.update(zip(op.outputs, outs, strict=True))
        made.append(Op(op.spec, ins, attributes, outs))
    return made


def computed(ops: Iterable[Op], arrays: Mapping[Value, Any], evaluate: Evaluate) -> dict[Value, Any]:
    """The arrays of all values; `arrays` has those that no op makes."""
    known = dict(arrays)
    for op in ops:
        results = evaluate(op, [known[v] for v in op.inputs], None)
        known.update(zip(op.outputs, results if isinstance(results, tuple | list) else (results,), strict=True))
    return known


def random_array(t: Tensor, rng: np.random.Generator, sign: Callable[[Any], Any], named: Sequence[int] = ()) -> Any:
    """A random operand. Integers are 0 or 1, valid indices of any dim of at least 2, or one of `named`; an integer
    scalar is 1."""
    shape = t.shape
    if t.dtype.floating:
        return np.asarray(sign(rng.standard_normal(shape)) if shape else 0.5 + rng.random(), t.dtype.numpy)
    if t.dtype.kind == "bool":
        return np.asarray(rng.integers(0, 2, shape) == 1)
    if not shape:
        return np.asarray(1, t.dtype.numpy)
    return rng.choice([0, 1, 0, 1, *named], shape).astype(t.dtype.numpy)
