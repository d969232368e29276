"""Numeric check of padding on small instances: within the source's shapes the padded program computes the same.

Op by op: given operands that are right within their source shapes, so are the results, whatever the padding contains
beyond what is known of it. That too is observed: padding that was one number in all instances. The rules that `pad`
uses (`neutral`, `linear`, `keeps_zero`) are not consulted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError, MismatchError
from distir.ir.function import Attributes, Function, Op, Value
from distir.ir.infer import infer
from distir.ir.spec import lookup
from distir.ir.type import Tensor
from distir.ir.validate import positions
from distir.ops.rules import shape_of, tensor
from distir.transforms.rewriting.claims import untried
from distir.transforms.rewriting.instances import (
    SIGNS,
    Evaluate,
    Sizes,
    all_sizes,
    computed,
    random_array,
    small_attributes,
    small_type,
)

Tails = tuple[float | None, ...]
"""Per dim of a value the contents of its padding: a number, or None for anything."""
_FILL, _RESHAPE = lookup("FillTail"), lookup("Reshape")
_CUT, _EXTEND = lookup("CutTo"), lookup("PadTo")
_MORE = 2
"""How many indices the padding of a dim has in an instance."""
_tried: dict[object, list[Tails] | None] = {}
_TRIED_LIMIT = 1 << 14


def check_padding(source: Function, padded: Function, evaluate: Evaluate) -> None:
    """Raises MismatchError, naming op or value, unless the padded program computes what its source does.

    Outputs are compared within their source shapes; the padding of inputs is 0, and must be so in their next values.
    """
    if padded is not source:
        _Comparison(padded, evaluate).compare(source)


class _Comparison:
    def __init__(self, padded: Function, evaluate: Evaluate) -> None:
        self.padded, self.evaluate = padded, evaluate
        self.source_of: dict[Value, Value] = {}
        """Of the padded program's values made so far, those of the source."""
        self.tails: dict[Value, Tails] = {}
        """The contents of their padding, if other than zeros."""

    def compare(self, source: Function) -> None:
        for what, mine, theirs in (
            ("inputs", self.padded.inputs, source.inputs),
            ("outputs", self.padded.outputs, source.outputs),
        ):
            if len(mine) != len(theirs):
                raise MismatchError(f"{self.padded.name}: expected {len(theirs)} {what}, got {len(mine)}")
        for v, w in zip(source.inputs, self.padded.inputs, strict=True):
            self.same_source(
                f"input %{w.name}", v, w, w.role.source if w.role else None, v.role.source if v.role else None
            )
            self.note(w, v)
        left = iter(source.ops)
        op = next(left, None)
        for new in self.padded.ops:
            if new is op and tuple(map(self.source_of.get, new.inputs)) == new.inputs:  # as most
                self.source_of.update(zip(new.outputs, new.outputs, strict=True))
                op = next(left, None)
                continue
            here = op if op is not None and self.corresponds(op, new) else None
            # the source's own cuts take what was cut before; its own extensions are equal to theirs
            may_be_new = here is None or new.spec is _CUT or here.attributes != new.attributes
            if may_be_new and self.resized(new):
                continue
            if here is not None:
                self.step(here, new)
                op = next(left, None)
            elif new.spec is _FILL and new.inputs[0] in self.source_of:
                self.filled(new)
            else:
                raise MismatchError(f"{self.padded.name}: {new}: expected {op or 'no more ops'}")
        if op is not None:
            raise MismatchError(f"{self.padded.name}: expected {op}, which padding has lost")
        for v, w in zip(source.outputs, self.padded.outputs, strict=True):
            self.output(source, v, w)
        want, got = positions(source), positions(self.padded)
        if want != got:
            raise MismatchError(f"{self.padded.name}: expected updates {want} (input: output), got {got}")

    def corresponds(self, op: Op, new: Op) -> bool:
        return op.spec is new.spec and tuple(map(self.source_of.get, new.inputs)) == op.inputs

    def note(self, w: Value, source: Value, tails: Tails | None = None) -> None:
        """Note what a value of the padded program is; its padding contains zeros, unless said otherwise."""
        self.source_of[w] = source
        self.tails.pop(w, None)
        if tails is not None and any([x != 0.0 for x in tails]):
            self.tails[w] = tails

    def tails_of(self, w: Value) -> Tails:
        return self.tails.get(w) or (0.0,) * len(shape_of(w))

    def same_source(self, what: str, v: Value, w: Value, got: Shape | None, before: Shape | None) -> None:
        """Raise unless `w` is `v`, enlarged if at all, and says from which shape."""
        if v is w and got == before:  # as most
            return
        small, large = shape_of(v), shape_of(w)
        fits = len(small) == len(large) and all(a <= b for a, b in zip(small, large, strict=True))
        if not fits or tensor(v).dtype is not tensor(w).dtype:
            raise MismatchError(f"{what}: expected it to be padded from {small}, got {large}")
        want = before or (small if small != large else None)
        if got != want:
            raise MismatchError(f"{what}: expected {want} as the source shape of {large}, got {got}")

    def resized(self, new: Op) -> bool:
        """Whether the op cuts off the padding of a dim, or pads a dim, which is not padded yet, with zeros."""
        source = self.source_of.get(new.inputs[0]) if new.spec in (_CUT, _EXTEND) else None
        if source is None or new.attributes.get("value"):
            return False
        dim, after = new.attributes["dim"], new.attributes["size"]
        before, given = shape_of(new.inputs[0])[dim], shape_of(source)[dim]
        if shape_of(new.outputs[0])[dim] != after or not min(before, after) == given < max(before, after):
            return False
        self.note(new.outputs[0], source, self._tails_with(new.inputs[0], dim, 0.0))
        return True

    def _tails_with(self, w: Value, dim: int, value: float) -> Tails:
        """Those of a value, with `value` in the padding of a dim."""
        tails = self.tails_of(w)
        return (*tails[:dim], value, *tails[dim + 1 :])

    def filled(self, new: Op) -> None:
        source = self.source_of[new.inputs[0]]
        dim, size = new.attributes["dim"], new.attributes["size"]
        if size != shape_of(source)[dim]:
            raise MismatchError(f"{new}: expected padding from {shape_of(source)[dim]} on, got {size}")
        value = float(new.attributes.get("value", 0.0))
        self.note(new.outputs[0], source, self._tails_with(new.inputs[0], dim, value))

    def step(self, op: Op, new: Op) -> None:
        tails = [self.tails_of(w) for w in new.inputs]
        made: list[Tails] | None = None
        pairs = list(zip((*op.inputs, *op.outputs), (*new.inputs, *new.outputs), strict=True))
        if any(shape_of(v) != shape_of(w) for v, w in pairs):
            key = op.spec, op.attributes, new.attributes, *[v.type for row in pairs for v in row], *tails
            if key not in _tried:
                if len(_tried) > _TRIED_LIMIT:
                    _tried.clear()
                _tried[key] = _tried_on(op, new, tails, self.evaluate)
            made = _tried[key]
            if made is None:
                raise MismatchError(f"{new}: what stands in the padding of its operands changes the result")
        elif op.attributes != new.attributes:
            raise MismatchError(f"{new}: expected attributes {dict(op.attributes)}, got {dict(new.attributes)}")
        for k, (v, w) in enumerate(zip(op.outputs, new.outputs, strict=True)):
            self.note(w, v, made[k] if made else None)

    def output(self, source: Function, v: Value, w: Value) -> None:
        if self.source_of.get(w) is not v:
            raise MismatchError(f"output %{w.name}: expected %{v.name} of the source, padded")
        self.same_source(f"output %{w.name}", v, w, self.padded.sources.get(w), source.sources.get(v))
        if w in self.padded.updates:
            for dim, (a, b) in enumerate(zip(shape_of(v), shape_of(w), strict=True)):
                if a != b and self.tails_of(w)[dim] != 0.0:
                    raise MismatchError(f"output %{w.name}: expected 0 in the padding of dim {dim}, got anything")


# ---------------------------------------------------------------- one op


def _tried_on(op: Op, new: Op, tails: Sequence[Tails], evaluate: Evaluate) -> list[Tails] | None:
    """The contents of the results' padding; None if the operands' padding changes a result."""
    if op.spec is _RESHAPE:
        return _reshaped(op, new, tails[0])
    for sizes in all_sizes([op]):
        try:
            return _Trial(op, new, tails, sizes).run(evaluate)
        except IRTypeError:  # these sizes do not fit
            continue
    untried(f"{new}: that its results do not depend on padding")
    return [(None,) * len(shape_of(v)) for v in op.outputs]


def _reshaped(op: Op, new: Op, tails: Tails) -> list[Tails] | None:
    """A padded dim must be one of the result, with as much before it and after it."""
    (a, b), (c, d) = [(shape_of(o.inputs[0]), shape_of(o.outputs[0])) for o in (op, new)]
    made: list[float | None] = [0.0] * len(b)
    place = -1
    for i in [i for i, n in enumerate(a) if n != c[i]]:
        fits = [
            j
            for j, n in enumerate(b)
            if j > place and (n, d[j]) == (a[i], c[i]) and math.prod(b[:j]) == math.prod(a[:i])
        ]
        if not fits:
            return None
        place = fits[0]
        made[place] = tails[i]
    padded = [j for j, n in enumerate(b) if n != d[j]]
    return [tuple(made)] if len(padded) == sum(n != m for n, m in zip(a, c, strict=True)) else None


class _Trial:
    """One op on small operands, and on the same, padded."""

    def __init__(self, op: Op, new: Op, tails: Sequence[Tails], sizes: Sizes) -> None:
        self.tails = tails
        ins = [Value(v.name, small_type(v, sizes)) for v in op.inputs]
        self.padded_by = [
            [_MORE if n != m else 0 for n, m in zip(shape_of(v), shape_of(w), strict=True)]
            for v, w in zip((*op.inputs, *op.outputs), (*new.inputs, *new.outputs), strict=True)
        ]
        larger = [Value(v.name, _enlarged(tensor(v), more)) for v, more in zip(ins, self.padded_by, strict=False)]
        attributes = small_attributes(op, sizes, [shape_of(v) for v in ins])
        self.small = _op(op, ins, attributes)
        self.large = _op(op, larger, _enlarged_attributes(op, new, self.small))
        for k, (v, w) in enumerate(zip(self.small.outputs, self.large.outputs, strict=True)):
            if tensor(w) is not _enlarged(tensor(v), self.padded_by[len(ins) + k]):
                raise IRTypeError(f"{op}: other sizes than expected")

    def run(self, evaluate: Evaluate) -> list[Tails] | None:
        found: list[list[set[str]]] = [[set() for _ in tensor(v).shape] for v in self.small.outputs]
        for seed, sign in enumerate(SIGNS):
            rng = np.random.default_rng(seed)
            named = [-1] if self.small.spec.unpadded else []  # the last there is, whatever comes after it
            heads = [random_array(tensor(v), rng, sign, named) for v in self.small.inputs]
            wide = [
                self.padded(tensor(w), head, tails, rng)
                for w, head, tails in zip(self.large.inputs, heads, self.tails, strict=True)
            ]
            with np.errstate(all="ignore"):
                rows = [
                    [computed([o], dict(zip(o.inputs, xs, strict=True)), evaluate)[v] for v in o.outputs]
                    for o, xs in ((self.small, heads), (self.large, wide))
                ]
                for want, got, seen in zip(*rows, found, strict=True):
                    head = got[tuple([slice(0, n) for n in want.shape])]
                    if not np.allclose(head, want, rtol=1e-9, atol=1e-9, equal_nan=True):
                        return None
                    for d, n in enumerate(want.shape):
                        tail = got[(slice(None),) * d + (slice(n, None),)].astype(float) + 0.0  # -0.0 is 0.0
                        seen[d].update(map(repr, tail.ravel().tolist()))
        return [tuple([_number(x) for x in row]) for row in found]

    def padded(self, t: Tensor, head: Any, tails: Tails, rng: np.random.Generator) -> Any:
        """The operand with its known padding, and random values where nothing is known."""
        x = random_array(t, rng, lambda x: 1e3 * x)
        for d in sorted(range(len(t.shape)), key=lambda d: tails[d] is not None):
            value = tails[d]
            if value is not None and t.shape[d] != head.shape[d]:
                x[(slice(None),) * d + (slice(head.shape[d], None),)] = value
        x[tuple([slice(0, n) for n in head.shape])] = head
        return x


def _number(seen: set[str]) -> float | None:
    return float(next(iter(seen))) if len(seen) == 1 else 0.0 if not seen else None


def _op(op: Op, ins: Sequence[Value], attributes: Attributes) -> Op:
    types = infer(op.spec, attributes, tuple([v.type for v in ins]))
    if sum(t.bytes for t in (*types, *[v.type for v in ins])) > 1 << 22:
        raise IRTypeError(f"{op.spec.name}: too large an instance")
    return Op(
        op.spec, tuple(ins), attributes, tuple([Value(v.name, t) for v, t in zip(op.outputs, types, strict=True)])
    )


def _enlarged(t: Tensor, more: Sequence[int]) -> Tensor:
    return Tensor(t.dtype, [n + k for n, k in zip(t.shape, more, strict=True)])


def _enlarged_attributes(op: Op, new: Op, small: Op) -> Attributes:
    """Those of the padded op: sizes that padding has changed are larger, all else is as in the source.

    Beside these the padded op may say how long a dim is without its padding.
    """
    made: dict[str, Any] = {}
    length = op.spec.unpadded
    if length is not None and length in new.attributes and length not in op.attributes:
        if new.attributes[length] != (size := _indexed_size(op)):
            raise MismatchError(f"{new}: attribute {length}: expected {size}, got {new.attributes[length]}")
        made[length] = _indexed_size(small)
    if op.attributes.keys() != new.attributes.keys() - made.keys():
        raise MismatchError(f"{new}: expected attributes {sorted(op.attributes)}, got {sorted(new.attributes)}")
    for name, x in small.attributes.items():
        old, other = op.attributes[name], new.attributes[name]
        if op.spec.attributes[name].kind in ("size", "sizes"):
            made[name] = _grown(x, old, other)
        elif Attributes(x=old) != Attributes(x=other):
            raise MismatchError(f"{new}: attribute {name}: expected {old}, got {other}")
        else:
            made[name] = x
    return Attributes(made)


def _indexed_size(op: Op) -> int | Shape:
    """How long the dim is that the op indexes; of all dims, the shape."""
    slot, dim = op.spec.indexed(op.attributes) or (0, 0)
    shape = shape_of(op.inputs[slot] if slot >= 0 else op.outputs[~slot])
    return shape if dim is None else shape[dim]


def _grown(small: Any, old: Any, new: Any) -> Any:
    if isinstance(small, tuple):
        return tuple([_grown(*row) for row in zip(small, old, new, strict=True)])
    return small if old == new else small + _MORE
