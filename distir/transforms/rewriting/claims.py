"""Checks that a rewrite computes the same: by the terms of both programs and, where these differ, by random testing.

A rewrite does not change the Values that it does not remove. So each Value in both programs must have the same term
(see `distir.ir.validate`), where ops that only one program has are expanded by their definitions. If the terms differ,
the ops that compute the Value from common Values are evaluated in both programs on small random instances, in double
precision. Equal cases are tested once. The check is independent of the rules by which the rewrite was made.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, NoReturn

import numpy as np

from distir.ir.cached import producers
from distir.ir.definition import Definition, definition_of
from distir.ir.errors import IRTypeError, MismatchError, ModelError, ModelWarning
from distir.ir.function import Function, FunctionMaker, Op, Value, type_of
from distir.ir.spec import lookup
from distir.ir.validate import Term, Terms, specs
from distir.ops.rules import no_grad, shape_of, tensor
from distir.transforms.rewriting.instances import (
    SIGNS,
    Evaluate,
    Sizes,
    all_sizes,
    computed,
    random_array,
    small_ops,
    small_type,
)
from distir.transforms.rewriting.kept import differing_above_kept
from distir.transforms.rewriting.laws import Law
from distir.transforms.rewriting.matching import epsilon

_CONSTANT, _CAST = lookup("Constant"), lookup("Cast")
_SEEN_THROUGH = (_CONSTANT, *map(lookup, ("Identity", "Transpose", "Reshape")))
"""Ops that are always evaluated, even if their result is a common value: equality may depend on what they compute."""
_tried: set[object] = set()
_TRIED_LIMIT = 1 << 14
_FEW = 64
"""So many values that differ by their terms are tested before the terms of both programs are worked out."""
_ROUNDING = 32
"""Tolerance, in roundings to the program's dtype: constants are rounded to it, but a fused op has them exactly."""
Granted = Callable[[Op, Op], bool]
"""(old op, new op) -> whether their results are equal by a law that is checked elsewhere."""


def check_rewrite(
    before: Function,
    after: Function,
    evaluate: Evaluate,
    law: Law = Law.SAME,
    granted: Granted = lambda old, new: False,
) -> None:
    """Raises MismatchError, naming the value, if `after` computes a common value differently from `before`.

    By Law.SAME both have the same inputs, outputs and updates; by Law.KNOWN `after` may have fewer inputs; by Law.MORE
    only common values are compared. Warns (ModelWarning) of a difference in terms that no small instance can be made
    of to test.
    """
    if before is after:
        return
    if law is not Law.MORE:
        _check_interface(before, after, law)
    old, left = producers(before), set(before.ops)
    changed = [op for op in after.ops if op not in left and not old.keys().isdisjoint(op.outputs)]
    if not changed:
        _check_outputs(after)  # all ops of `after` are ops of `before`, or compute new values
        return
    replaced = {old[v].spec for op in changed for v in op.outputs if v in old and old[v].spec is not op.spec}
    terms = _Terms((specs(before) & specs(after)) - replaced)
    few = differing_above_kept(before, after, terms)
    if few is not None and len(few) <= _FEW:
        pair = _Pair.of(before, after) if few else None
        if pair is None or all(pair.holds(v, evaluate) for v in few):
            _check_definitions(after, terms, evaluate)
            return
    terms = _Terms(terms.shared)
    inputs = dict.fromkeys((*before.inputs, *after.inputs))
    terms.known = [None] * len(inputs)
    want: dict[Value, Term] = {v: k for k, v in enumerate(inputs)}
    got = dict(want)
    for op in before.ops:
        want.update(zip(op.outputs, terms.results(op, _operands(before, op, want)), strict=True))
    pair = None
    same: set[tuple[Function, Function]] = set()
    for op in after.ops:
        ins = _operands(after, op, got)
        called = _called(old.get(op.outputs[0]), op) if op.callee is not None and op.outputs else None
        if called is not None and called not in same:
            check_rewrite(*called, evaluate)
            same.add(called)
        outs = [want[v] for v in op.outputs] if op in left or called is not None else terms.results(op, ins)
        for v, t in zip(op.outputs, outs, strict=True):
            if v in want and t != want[v]:
                pair = pair or _Pair.of(before, after)
                pair.check(v, evaluate, granted)
            got[v] = want.get(v, t)
    _check_definitions(after, terms, evaluate)


def _check_definitions(after: Function, terms: _Terms, evaluate: Evaluate) -> None:
    _check_outputs(after)
    for definition in terms.definitions:
        check_definition(definition, evaluate)


def _check_interface(before: Function, after: Function, law: Law) -> None:
    for what in ("inputs", "outputs", "updates", "sources"):
        old, new = getattr(before, what), getattr(after, what)
        if old != new and not (what == "inputs" and law is Law.KNOWN and set(new) <= set(old)):
            raise MismatchError(f"{after.name}: a rewrite has changed {what}")


def _check_outputs(after: Function) -> None:
    made = {*after.inputs, *producers(after)}
    for v in after.outputs:
        if v not in made:
            raise MismatchError(f"{after.name}: a rewrite has lost output %{v.name}")


def _operands(function: Function, op: Op, env: Mapping[Value, Term]) -> tuple[Term, ...]:
    for v in op.inputs:
        if v not in env:
            raise MismatchError(f"{function.name}: {op}: nothing makes %{v.name}")
    return tuple([env[v] for v in op.inputs])


def _called(old: Op | None, new: Op) -> tuple[Function, Function] | None:
    """The callees of two calls that are otherwise equal."""
    if old is None or (old.inputs, old.outputs) != (new.inputs, new.outputs) or old.callee is None:
        return None
    alike = old.attributes.without("callee") == new.attributes.without("callee")
    return (old.callee, new.callee) if alike and new.callee is not None else None


class _Terms(Terms):
    """Terms of programs that share Values: results of communication are identified by their Values."""

    def move(self, op: Op, ins: tuple[Term, ...]) -> Sequence[Term]:
        known = op.spec.bundle == "pack" or (op.spec.bundle == "unpack" and ins[0] < 0)
        if op.callee is not None or known:
            return super().move(op, ins)
        return self.number((op.spec, self.attributes(op.attributes)), (*ins, *op.outputs), len(op.outputs))


class _Pair(NamedTuple):
    """The producers of each value before and after, and the common values."""

    old: Mapping[Value, Op]
    new: Mapping[Value, Op]
    common: Set[Value]

    @staticmethod
    def of(before: Function, after: Function) -> _Pair:
        old, new = producers(before), producers(after)
        return _Pair(old, new, {*before.inputs, *after.inputs} | (old.keys() & new.keys()))

    def check(self, v: Value, evaluate: Evaluate, granted: Granted) -> None:
        """Raises MismatchError if `v` is not the same, warns if that cannot be tested."""
        if granted(self.old[v], self.new[v]):
            return
        claim = self._claim(v)
        found = _holds(claim, evaluate)
        if found is False:  # where `after` uses one common value for equal ones, it must be told what that is made of
            found = bool(_holds(self._further(claim), evaluate))
        if found is None:
            untried(f"%{v.name}: a rewrite of {claim}")
            _note(_key(claim, claim.free()))  # it is said once
        elif not found:
            fail(f"%{v.name}: a rewrite of {claim} does not compute the same")

    def holds(self, v: Value, evaluate: Evaluate) -> bool:
        """Whether tests show `v` to be the same, whatever the values that it is computed from."""
        return bool(_holds(self._claim(v), evaluate))

    def _claim(self, v: Value) -> _Claim:
        parts = _cone(v, self.old, self.common)
        beside = {x for op in parts for x in op.outputs}  # not independent of each other: `after` must compute them too
        return _Claim(v, parts, _cone(v, self.new, self.common - beside))

    def _further(self, claim: _Claim) -> _Claim:
        """The claim with the ops of `after` back to the values from which those of `before` compute theirs."""
        known = set(claim._replace(after=[]).free())
        return claim._replace(after=_cone(claim.value, self.new, known))


class _Claim(NamedTuple):
    """The claim that the ops of `before` and those of `after` compute the same value."""

    value: Value
    before: list[Op]
    after: list[Op]

    def free(self) -> list[Value]:
        """The values that both are computed from."""
        sides = [(ops, {v for op in ops for v in op.outputs}) for ops in (self.before, self.after)]
        return list(dict.fromkeys(v for ops, own in sides for op in ops for v in op.inputs if v not in own))

    def __str__(self) -> str:
        return f"{_row(self.before)} as {_row(self.after)}"


def _row(ops: Sequence[Op]) -> str:
    names = [op.op_type for op in ops if op.spec is not _CONSTANT] or ["a constant"]
    return ", ".join(names if len(names) < 8 else [*names[:7], "..."])


def _cone(v: Value, makers: Mapping[Value, Op], common: Set[Value]) -> list[Op]:
    """The ops that compute `v` from common values, in order; the views that make a common value are included."""
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
                if maker is not None and (x not in common or maker.spec in _SEEN_THROUGH):
                    todo.append((maker, False))
    return list(ops)


def _holds(claim: _Claim, evaluate: Evaluate) -> bool | None:
    """Whether a claim holds on small random instances; None if none can be made. One that holds is tested once."""
    free = claim.free()
    key = _key(claim, free)
    if key in _tried:
        return True
    for sizes in all_sizes([*claim.before, *claim.after]):
        try:
            values = [Value(v.name, small_type(v, sizes)) for v in free]
            rows: list[tuple[Sequence[Op], Sequence[Value]]] = []
            for ops in (claim.before, claim.after):
                env = dict(zip(free, values, strict=True))
                rows.append((small_ops(ops, env, sizes), [env[claim.value]]))
        except IRTypeError:  # these sizes do not fit
            continue
        found = _agree(rows, values, _named(claim.before), _near([*free, claim.value]), evaluate)
        if found:
            _note(key)
        if found is not None:
            return found
    return None


def _key(claim: _Claim, free: Sequence[Value]) -> object:
    """The claim's cache key: it does not depend on the names of values."""
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


def _note(key: object) -> None:
    if len(_tried) > _TRIED_LIMIT:
        _tried.clear()
    _tried.add(key)


def _near(values: Sequence[Value]) -> float:
    floats = [tensor(v).dtype for v in values if tensor(v).dtype.floating]
    return 1e-9 + _ROUNDING * max([epsilon(d) for d in floats], default=0.0)


def _named(ops: Sequence[Op]) -> list[int]:
    """The integers in attributes, such as an ignored label: random operands should contain them."""
    takes = [(op.spec.attributes.get(name), x) for op in ops for name, x in op.attributes.items()]
    return [x for kind, x in takes if kind is not None and kind.kind == "int" and type(x) is int]


def _agree(
    sides: Sequence[tuple[Sequence[Op], Sequence[Value]]],
    free: Sequence[Value],
    named: Sequence[int],
    near: float,
    evaluate: Evaluate,
) -> bool | None:
    """Whether both rows of ops compute the same values; None if the first gives only NaN."""
    decided = False
    for seed, sign in enumerate(SIGNS):
        rng = np.random.default_rng(seed)
        arrays = {v: random_array(tensor(v), rng, sign, named) for v in free}
        with np.errstate(all="ignore"):
            rows = [(computed(ops, arrays, evaluate), values) for ops, values in sides]
            for want, got in zip(*[[known[v] for v in values] for known, values in rows], strict=True):
                if not _close(want, got, near):
                    return False
                decided = decided or want.dtype.kind != "f" or not np.isnan(want).all()
    return True if decided else None


def _close(want: Any, got: Any, near: float) -> bool:
    """Whether the arrays are equal within `near`; where NaN is expected, any value passes."""
    if want.shape != got.shape or want.dtype.kind != got.dtype.kind:
        return False
    if want.dtype.kind != "f":
        return bool(np.array_equal(want, got))
    there = ~np.isnan(want)
    scale = max(1.0, float(np.max(np.abs(want[there & np.isfinite(want)]), initial=0.0)))
    return bool(np.allclose(got[there], want[there], rtol=near, atol=near * scale))


def fail(what: str) -> NoReturn:
    """Raise MismatchError."""
    raise MismatchError(what, "please report this: it is a fault of distir's")


def untried(what: str) -> None:
    """Warn that a claim was not tested."""
    warnings.warn(ModelWarning(f"{what} has not been tried: no small instance of it can be made"), stacklevel=2)


# ---------------------------------------------------------------- definitions


def check_definition(definition: Definition, evaluate: Evaluate) -> None:
    """Raises MismatchError if an op differs from its definition on small random instances."""
    op, parts = definition
    key = (
        "definition",
        op.spec,
        op.attributes,
        *[v.type for v in op.inputs],
        _form(parts),
        *[o.attributes for o in parts.ops],
    )
    if key in _tried:
        return
    if [v.type for v in parts.outputs] != [v.type for v in op.outputs]:
        fail(f"{op}: its definition gives {[v.type for v in parts.outputs]}, expected {[v.type for v in op.outputs]}")
    for sizes in all_sizes([op, *parts.ops]):
        small = _small(op, sizes)
        other = definition_of(small) if small is not None else None
        if small is None or other is None or _form(other.parts) != _form(parts):
            continue
        rows = (other.parts.ops, other.parts.outputs), ([small], small.outputs)
        renamed = dict(zip(other.parts.inputs, small.inputs, strict=True))
        rows = ([_with(o, renamed) for o in rows[0][0]], [renamed.get(v, v) for v in rows[0][1]]), rows[1]
        found = _agree(rows, small.inputs, _named([op]), _near([*op.inputs, *op.outputs]), evaluate)
        if found is not None:
            if not found:
                fail(f"{op.op_type} does not compute what its definition does: {_row(parts.ops)}")
            break
    else:
        untried(f"the definition of {op.op_type}")
    _note(key)


def _small(op: Op, sizes: Sizes) -> Op | None:
    """The op at these sizes; None if they do not fit it."""
    try:
        (small,) = small_ops([op], {v: Value(v.name, small_type(v, sizes)) for v in op.inputs}, sizes)
    except IRTypeError:
        return None
    return small


def _with(op: Op, renamed: Mapping[Value, Value]) -> Op:
    return Op(op.spec, tuple([renamed.get(v, v) for v in op.inputs]), op.attributes, op.outputs)


def _form(function: Function) -> object:
    """The dataflow of the ops, independent of sizes; without casts among floating dtypes, as all are double here."""
    count = itertools.count()
    number = {v: next(count) for v in function.inputs}
    rows: list[object] = []
    for op in function.ops:
        if op.spec is _CAST and tensor(op.inputs[0]).dtype.floating and tensor(op.outputs[0]).dtype.floating:
            number[op.outputs[0]] = number[op.inputs[0]]
            continue
        rows.append((op.spec, *[number[v] for v in op.inputs]))
        for v in op.outputs:
            number[v] = next(count)
    return tuple(rows), tuple([number[v] for v in function.outputs])


# ---------------------------------------------------------------- gradients

_STEP, _SLOPE = 1e-6, 1e-5
"""Of central differences: the step, and the tolerance, relative to the larger of 1 and the expected slope."""


def check_gradients(before: Function, after: Function, evaluate: Evaluate) -> None:
    """Raises MismatchError if the gradient rule of an op that was differentiated is wrong.

    Rules are tested on small random instances, by central differences along random directions.
    """
    there = set(before.ops)
    for op in dict.fromkeys([op.of for op in after.ops if op.of is not None and op not in there]):
        check_gradient(op, evaluate)


def check_gradient(op: Op, evaluate: Evaluate) -> None:
    """Check the gradient rule of one op: see `check_gradients`."""
    key = "gradient", *_rule(op)
    if key in _tried or op.spec.grad in (None, no_grad):
        return
    for sizes in all_sizes([op]):
        small = _small(op, sizes)
        if small is None:
            continue
        agrees = "slope", *_rule(small)  # the same instance is made of ops of other sizes
        found = agrees in _tried or _slopes_agree(small, evaluate)
        if found is not None:
            if not found:
                fail(f"the gradient rule of {op.op_type} does not give its slope")
            _note(agrees)
            break
    else:
        untried(f"the gradient rule of {op.op_type}")
    _note(key)


def _rule(op: Op) -> tuple[object, ...]:
    """What the claim of an op's gradient rule depends on."""
    return op.spec, op.spec.grad, op.attributes.form, *map(type_of, op.inputs)


def _slopes_agree(op: Op, evaluate: Evaluate) -> bool | None:
    """Whether the rule gives the slope along random directions; None if no slope is finite."""
    rule = op.spec.grad
    if rule is None:
        raise ModelError(f"{op.op_type} has no gradient rule to check")
    maker = FunctionMaker("gradient")
    maker.inputs.extend(op.inputs)
    maker.ops.append(op)
    flows = op.outputs[: len(op.outputs) - op.spec.saved]
    given = [
        maker.add_input_value("d", v.type) if v in flows and tensor(v).dtype.floating else None for v in op.outputs
    ]
    if not any(given):
        return True  # no gradient flows through integers
    gradients = rule(maker, op, *given)
    decided = False
    for seed, sign in enumerate(SIGNS):
        rng = np.random.default_rng(seed)
        free = [*op.inputs, *[d for d in given if d is not None]]
        arrays = {v: random_array(tensor(v), rng, sign, _named([op])) for v in free}
        along = {v: rng.standard_normal(shape_of(v)) * tensor(v).dtype.floating for v in op.inputs}

        def total(step: float) -> Any:
            moved = {v: arrays[v] + (step * u if tensor(v).dtype.floating else 0) for v, u in along.items()}  # noqa: B023
            made = computed([op], moved, evaluate)
            return sum(  # what is masked out has no slope
                np.sum(np.where(np.isinf(made[y]), 0.0, made[y] * arrays[d]))  # noqa: B023
                for y, d in zip(op.outputs, given, strict=True)
                if d is not None
            )

        with np.errstate(all="ignore"):
            want = (total(_STEP) - total(-_STEP)) / (2 * _STEP)
            made = computed(maker.ops, arrays, evaluate)
            got = sum(np.sum(made[g] * along[v]) for v, g in zip(op.inputs, gradients, strict=True) if g is not None)
            if np.isfinite(want):
                decided = True
                if not abs(got - want) <= _SLOPE * max(1.0, abs(want)):
                    return False
    return True if decided else None
