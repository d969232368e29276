"""Small instances of ops: the same ops on few elements, in double precision, so that a claim about them can be tried.

Sizes are replaced by small ones, equal ones by equal ones, in shapes and in the attributes that hold sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from distir.ir.attributes import Attribute
from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import Attributes, Op, Value
from distir.ir.infer import infer
from distir.ir.spec import lookup
from distir.ir.type import DType, Float64, Tensor
from distir.ops.rules import shape_of, tensor

Evaluate = Callable[[Op, Sequence[Any], None], Any]
"""(op, operands, no coordinate) -> results, as `distir.executor.sequential.evaluate`."""
Sizes = Mapping[int, int]
"""By size: the small one that stands for it."""
_LARGEST = 1 << 18
"""Elements of an operand or result beyond which nothing is evaluated."""
SIGNS: tuple[Callable[[Any], Any], ...] = (np.asarray, lambda x: -np.abs(x), np.abs)
"""Random numbers of which sign: where all are negative, a maximum of 0 is wrong."""


def small_sizes(ops: Iterable[Op]) -> Sizes:
    """Small sizes for all that stand in these ops: 2, 3, 4, ... in their order.

    Where an op joins or parts a dim, the sizes of this keep their ratios; where it counts in one they stay.
    """
    ops = list(ops)
    shapes = [shape_of(v) for op in ops for v in (*op.inputs, *op.outputs)]
    sizes = {n: n if n < 2 else k for k, n in enumerate(sorted({n for s in shapes for n in s if n > 1}), 2)}
    sizes |= {0: 0, 1: 1}
    for op in ops:
        takes = op.spec.attributes
        along = [d for name, x in op.attributes.items() for d in _dims(takes.get(name), x)]
        joined = {shape_of(v)[d] for v in (*op.inputs, *op.outputs) for d in along if d < len(shape_of(v))}
        if any(takes[name].kind == "ints" for name in op.attributes if name in takes and along):
            sizes |= {n: n for n in joined}
        elif op.spec in _JOINING and math.gcd(*joined):
            sizes |= {n: 2 * n // math.gcd(*joined) for n in joined}
    return sizes


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
    """The attributes in an instance, in which the operands have these shapes."""
    made: dict[str, Any] = {}
    for name, x in op.attributes.items():
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
    """What `new` is where `old` is `small`: dims that are merged are the product of theirs."""
    made: list[int] = []
    i = j = 0
    while j < len(new):
        i0, j0, x, y = i, j, 1, 1
        while i == i0 or j == j0 or x != y:
            if (x <= y or j == len(new)) and i < len(old):
                x, i = x * old[i], i + 1
            elif j < len(new):
                y, j = y * new[j], j + 1
            else:
                break
        made += [math.prod(small[i0:i])] if j == j0 + 1 else [sizes[n] for n in new[j0:j]]
    return tuple(made)


def small_ops(ops: Iterable[Op], env: dict[Value, Value], sizes: Sizes) -> list[Op]:
    """The ops in an instance, where values stand for values as in `env`, which grows.

    Raises IRTypeError if the sizes do not fit, or if too much would have to be computed.
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
    """All values, given those that no op makes."""
    known = dict(arrays)
    for op in ops:
        results = evaluate(op, [known[v] for v in op.inputs], None)
        known.update(zip(op.outputs, results if isinstance(results, tuple | list) else (results,), strict=True))
    return known


def random_array(t: Tensor, rng: np.random.Generator, sign: Callable[[Any], Any], named: Sequence[int] = ()) -> Any:
    """Numbers for an operand: integers that are an index of any dim of at least 2, or among those that attributes name;
    of a single number, a count from 1.
    """
    shape = t.shape
    if t.dtype.floating:
        return np.asarray(sign(rng.standard_normal(shape)) if shape else 0.5 + rng.random(), t.dtype.numpy)
    if t.dtype.kind == "bool":
        return rng.integers(0, 2, shape) == 1
    if not shape:
        return np.asarray(1, t.dtype.numpy)
    return rng.choice([0, 1, 0, 1, *named], shape).astype(t.dtype.numpy)
