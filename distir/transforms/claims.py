"""What rewrites claim, tried on small instances: the ops that are put in the place of others compute the same.

`fuse` and `decompose` keep the values that they do not do away with. So each value that another op makes than before is
computed in both ways from those that are in both programs: random ones, of small sizes, in double precision. What is
alike is tried once. Rules that a rewrite goes by are not asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, NoReturn

import numpy as np

from distir.ir.errors import IRTypeError, MismatchError
from distir.ir.function import Function, Op, Value
from distir.ir.spec import lookup
from distir.ops.rules import tensor
from distir.transforms.decompose import decompose
from distir.transforms.instances import (
    SIGNS,
    Evaluate,
    computed,
    random_array,
    small_ops,
    small_sizes,
    small_type,
)
from distir.transforms.rewrite import epsilon

_CONSTANT, _CAST = lookup("Constant"), lookup("Cast")
_tried: set[object] = set()
_TRIED_LIMIT = 1 << 14
_ROUNDING = 32
"""Of so many roundings of constants to the program's dtype: a fused op knows them exactly."""


def check_rewrite(before: Function, after: Function, evaluate: Evaluate) -> None:
    """Raises MismatchError, naming the value, if an op of `after` computes something else than those it replaces."""
    if before is after or after in before.found:
        return
    if (before.inputs, before.outputs, before.updates, before.sources) != (
        *(after.inputs, after.outputs, after.updates, after.sources),
    ):
        raise MismatchError(f"{after.name}: a rewrite has changed inputs, outputs or updates")
    old, new = before.producers(), after.producers()
    values = {*before.inputs, *old}
    common = {v for v in (*after.inputs, *new) if v in values}
    for v in before.outputs:
        if v not in common:
            raise MismatchError(f"{after.name}: a rewrite has lost output %{v.name}")
    for v in new:
        callees = (old[v].callee, new[v].callee) if v in old else (None, None)
        if callees[0] and callees[1] and old[v].inputs == new[v].inputs:
            check_rewrite(callees[0], callees[1], evaluate)
        elif v in old and not _alike(old[v], new[v]):
            parts = _cone(v, old, common)
            beside = {x for op in parts for x in op.outputs}  # they depend on one another: see what makes these, too
            _check(_Claim(v, parts, _cone(v, new, common - beside)), evaluate)
    before.found[after] = True


class _Claim(NamedTuple):
    """That the ops come to one value, both ways."""

    value: Value
    before: list[Op]
    after: list[Op]


def _alike(a: Op, b: Op) -> bool:
    return a is b or (
        a.spec is b.spec and a.inputs == b.inputs and a.attributes == b.attributes and a.outputs == b.outputs
    )


def _cone(v: Value, makers: Mapping[Value, Op], common: Set[Value]) -> list[Op]:
    """The ops that make `v` of values that are common to both programs, in order; constants are not among these."""
    ops: dict[Op, None] = {}
    entered: set[Op] = set()
    todo: list[tuple[Op, bool]] = [(makers[v], False)]
    while todo:
        op, ready = todo.pop()
        if ready:
            ops[op] = None
        elif op not in entered:
            entered.add(op)
            todo.append((op, True))
            for x in op.inputs:
                maker = makers.get(x)
                if maker is not None and (x not in common or maker.spec is _CONSTANT):
                    todo.append((maker, False))
    return list(ops)


def _check(claim: _Claim, evaluate: Evaluate) -> None:
    rows = claim.before, claim.after
    made = [{v for op in ops for v in op.outputs} for ops in rows]
    free = list(
        dict.fromkeys(v for ops, own in zip(rows, made, strict=True) for op in ops for v in op.inputs if v not in own)
    )
    key = _key(claim, free)
    if key in _tried:
        return
    if len(_tried) > _TRIED_LIMIT:
        _tried.clear()
    for sizes in (small_sizes([*claim.before, *claim.after]), _Actual()):
        try:
            _try(claim, free, sizes, evaluate)
            break
        except IRTypeError:  # these sizes do not fit
            continue
    _tried.add(key)


def _small_sides(claim: _Claim, env: Mapping[Value, Value], sizes: Mapping[int, int]) -> list[tuple[list[Op], Value]]:
    """What makes the value before and after, in an instance in which `env` says what stands for what.

    The parts of an op that is taken apart may hold numbers that depend on sizes (how many a mean is over): they are
    those of the op in the instance. Raises MismatchError if they are other ops than those of the claim.
    """
    known = dict(env)
    before = small_ops(claim.before, known, sizes)
    v = known[claim.value]
    if len(before) > 1 or before[0].spec.decompose is None:
        changed = dict(env)
        return [(before, v), (small_ops(claim.after, changed, sizes), changed[claim.value])]
    one = Function("op", before[0].inputs, (before[0],), before[0].outputs)
    for split in (True, False):
        parts = decompose(one, split)
        cone = _cone(v, parts.producers(), set(one.inputs))
        if _form(cone, v) == _form(claim.after, claim.value):
            return [(before, v), (cone, v)]
    _fail(claim)


def _form(ops: Sequence[Op], value: Value) -> object:
    """Which ops follow which, whatever the sizes; casts among floating dtypes there are none in double precision."""
    number: dict[Value, int] = {}
    rows: list[object] = []
    for op in ops:
        if op.spec is _CAST and tensor(op.inputs[0]).dtype.floating and tensor(op.outputs[0]).dtype.floating:
            number[op.outputs[0]] = number.setdefault(op.inputs[0], len(number))
            continue
        rows.append((op.spec, *[number.setdefault(v, len(number)) for v in op.inputs]))
        for v in op.outputs:
            number.setdefault(v, len(number))
    return rows, number[value]


class _Actual(dict[int, int]):
    """Every size as it is."""

    def __missing__(self, n: int) -> int:
        return n

    def get(self, n: int, default: Any = None) -> int:
        return n


def _key(claim: _Claim, free: Sequence[Value]) -> object:
    """What the claim says, whatever its values are called."""
    number = {v: k for k, v in enumerate(free)}
    rows: list[object] = []
    for ops in (claim.before, claim.after):
        own = dict(number)
        row: list[object] = []
        for op in ops:
            row.append((op.spec, op.attributes, *[own[v] for v in op.inputs]))
            own.update((v, len(own) + k) for k, v in enumerate(op.outputs))
        rows.append((*row, own[claim.value]))
    return (*rows, *[v.type for v in free])


def _try(claim: _Claim, free: Sequence[Value], sizes: Mapping[int, int], evaluate: Evaluate) -> None:
    values = [Value(v.name, small_type(v, sizes)) for v in free]
    sides = _small_sides(claim, dict(zip(free, values, strict=True)), sizes)
    named = [x for op in claim.before for x in _integers(op)]
    floats = [tensor(v).dtype for v in (*free, claim.value) if tensor(v).dtype.floating]
    near = 1e-9 + _ROUNDING * max([epsilon(d) for d in floats], default=0.0)
    for seed, sign in enumerate(SIGNS):
        rng = np.random.default_rng(seed)
        arrays = {v: random_array(tensor(v), rng, sign, named) for v in values}
        with np.errstate(all="ignore"):
            want, got = [computed(ops, arrays, evaluate)[v] for ops, v in sides]
            if not _close(want, got, near):
                _fail(claim)


def _integers(op: Op) -> list[int]:
    """Integers that its attributes name, such as the label that is ignored."""
    takes = op.spec.attributes
    return [x for name, x in op.attributes.items() if name in takes and takes[name].kind == "int" and type(x) is int]


def _close(want: Any, got: Any, near: float) -> bool:
    """Whether they are equal; where nothing is expected (nan), anything is right."""
    if want.shape != got.shape:
        return False
    if want.dtype.kind != "f":
        return bool(np.array_equal(want, got))
    there = ~np.isnan(want)
    scale = max(1.0, float(np.max(np.abs(want[there & np.isfinite(want)]), initial=0.0)))
    return bool(np.allclose(got[there], want[there], rtol=near, atol=near * scale))


def _fail(claim: _Claim) -> NoReturn:
    def row(ops: Sequence[Op]) -> str:
        names = [op.op_type for op in ops if op.spec is not _CONSTANT]
        return ", ".join(names if len(names) < 8 else [*names[:7], "..."])

    what = f"a rewrite of {row(claim.before)} as {row(claim.after)} does not compute the same"
    raise MismatchError(f"%{claim.value.name}: {what}", "please report this: it is a fault of distir's")
