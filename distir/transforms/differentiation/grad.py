"""Reverse-mode differentiation: `grad` adds the backward pass, as IR, to a function.

Each backward op records its forward op (`of`). The terms of a gradient are added as soon as they are made, by an Add
with the same `of` as the last term, so that terms of one pipeline stage are added before they leave it. The result
shares Values and ops with the function, so mappings from its input Values to arrays are valid for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from distir.ir.errors import ModelError, UsageError
from distir.ir.function import AsNamed, Attributes, Function, FunctionMaker, Op, Value, type_of
from distir.ir.spec import Spec
from distir.ir.type import Tensor, Type
from distir.ops.rules import no_grad, tensor
from distir.transforms.rewriting.cleanup import extend, live
from distir.transforms.rewriting.decompose import expand
from distir.transforms.rewriting.laws import Law, rewrites
from distir.transforms.roles import weights


@rewrites(Law.MORE)
def grad(function: Function, loss: Value | int | str = 0, wrt: Sequence[Value] | None = None) -> Function:
    """`function` with the gradients of output `loss` appended to its outputs, one for each of `wrt`, in that order.

    `loss` is a value of the function, a position among its outputs, or a name; it must hold one floating-point
    number. `wrt` are inputs or other values of the function; without it, all inputs of role parameter. The gradient
    of a value that the loss does not depend on is zeros. Ops without a gradient rule are decomposed first.

    Raises UsageError for a loss or a `wrt` that cannot be differentiated, ModelError for an op between them without a
    gradient.
    """
    variables = parameters(function) if wrt is None else list(wrt)
    target = find_loss(function, loss)
    for v in variables:
        if not isinstance(v.type, Tensor) or not v.type.dtype.floating:
            raise UsageError(f"no gradient with respect to %{v.name}: {v.type} is not floating-point")
    reached = dependent(function, variables)
    ops = path(function, target, reached)
    if any(op.spec.grad is None for op in ops):
        function = _differentiable(function, ops)
        reached = dependent(function, variables)
        ops = path(function, target, reached)
    backward = _Backward(function, target, reached, ops)
    backward.run()
    gradients = [backward.total(v) for v in variables]
    maker = backward.maker
    maker.set_outputs([*function.outputs, *gradients])
    forward = len(function.ops)
    maker.ops[forward:] = live(maker.ops[forward:], gradients)
    backward.rename()
    return maker.finalize()


def parameters(function: Function) -> list[Value]:
    """The inputs of role parameter; in a program without roles those that are only used as weights of ops."""
    return [v for v in weights(function) if v.kind in (None, "parameter")]


def find_loss(function: Function, loss: Value | int | str) -> Value:
    """The value that `loss` names. Raises UsageError unless it is a single floating-point number."""
    if isinstance(loss, Value):
        target = loss
    elif isinstance(loss, int):
        if not -len(function.outputs) <= loss < len(function.outputs):
            raise UsageError(f"{function.name} has {len(function.outputs)} outputs, no output {loss}")
        target = function.outputs[loss]
    else:
        named = [v for v in (*function.outputs, *function.producers()) if v.name == loss]
        if not named:
            outputs = ", ".join(v.name for v in function.outputs)
            raise UsageError(f"{function.name} has no value {loss!r}", f"cross-entropy, mse, or an output: {outputs}")
        target = named[0]
    t = target.type
    if not isinstance(t, Tensor) or not t.dtype.floating:
        raise UsageError(f"the loss %{target.name} is {t}, not a floating-point number")
    if math.prod(t.global_shape) != 1:
        hint = "sum or average it first, or use the loss cross-entropy or mse"
        raise UsageError(f"the loss %{target.name} has shape {t.global_shape}, not one number", hint)
    return target


def _is_floating(v: Value) -> bool:
    t = v.type
    return t.dtype.floating if isinstance(t, Tensor) else tensor(v).dtype.floating


def dependent(function: Function, wrt: Iterable[Value]) -> set[Value]:
    """The floating-point values that depend on any of `wrt` through ops with gradients, `wrt` included."""
    reached = set(wrt)
    for op in function.ops:
        if op.spec.grad is not no_grad and not reached.isdisjoint(op.inputs):
            reached.update(filter(_is_floating, op.outputs))
    return reached


def sources(function: Function, target: Value) -> set[Value]:
    """The floating-point values on which `target` depends through ops with gradients, itself included."""
    needed = {target}
    for op in reversed(function.ops):
        if op.spec.grad is not no_grad and not needed.isdisjoint(op.outputs):
            needed.update(filter(_is_floating, op.inputs))
    return needed


def path(function: Function, target: Value, reached: Set[Value]) -> list[Op]:
    """The ops by which `target` depends on values that are `reached` (see `dependent`), in order."""
    between = sources(function, target) & reached
    return [op for op in function.ops if not (between.isdisjoint(op.outputs) or between.isdisjoint(op.inputs))]


def _differentiable(function: Function, ops: Iterable[Op]) -> Function:
    """The function with those of `ops` that have no gradient rule decomposed; its values stay the same objects."""
    without = {op for op in ops if op.spec.grad is None}
    if not without:
        return function
    maker = extend(function)
    maker.ops.clear()
    became: dict[Op, Op] = {}
    for op in function.ops:
        if op in without and op.spec.decompose is not None:
            became[op] = expand(maker, op)
        elif op.of in became:
            maker.ops.append(Op(op.spec, op.inputs, op.attributes, op.outputs, became[op.of]))
        else:
            maker.ops.append(op)
    return maker.finalize()


class _Made(NamedTuple):
    """What a gradient rule made of one op: of another op of its kind it makes the same.

    Values are numbered: the op's operands, its results, their gradients, then what is made, in order.
    """

    ops: Sequence[tuple[Spec, Attributes, Sequence[int], Sequence[Type]]]
    """Each with the numbers of its operands and the types of its results."""
    gradients: Sequence[int | None]

    @staticmethod
    def of(values: Iterable[Value], ops: Sequence[Op], gradients: Sequence[Value | None]) -> _Made:
        number = {v: k for k, v in enumerate([*values, *[v for op in ops for v in op.outputs]])}
        rows = [(op.spec, op.attributes, [number[v] for v in op.inputs], [v.type for v in op.outputs]) for op in ops]
        return _Made(rows, [None if d is None else number[d] for d in gradients])

    def again(self, maker: FunctionMaker, values: Sequence[Value]) -> Sequence[Value | None]:
        """Append the same ops on other values; returns the gradients."""
        known = [*values]
        for spec, attributes, operands, types in self.ops:
            outputs = tuple([Value(spec.name, t) for t in types])
            maker.ops.append(Op(spec, tuple([known[k] for k in operands]), attributes, outputs))
            known += outputs
        return [None if k is None else known[k] for k in self.gradients]


class _Rules:
    """Applies gradient rules, once to the ops of a kind: layers are alike."""

    def __init__(self) -> None:
        self.made: dict[tuple[object, ...], _Made] = {}

    def apply(
        self, rule: Callable[..., Sequence[Value | None]], maker: FunctionMaker, op: Op, given: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        """Append the gradients of one op's operands, given those of its results (None where there is none)."""
        values = [*op.inputs, *op.outputs, *[d for d in given if d is not None]]
        if len({*values}) < len(values):  # one value in two roles
            return rule(maker, op, *given)
        there = [d is not None for d in given]
        kind = (op.spec, op.attributes.form, len(op.inputs), *there, *map(type_of, values))
        made = self.made.get(kind)
        if made is not None:
            return made.again(maker, values)
        first = len(maker.ops)
        gradients = rule(maker, op, *given)
        self.made[kind] = _Made.of(values, maker.ops[first:], gradients)
        return gradients


class _Backward:
    """The backward pass under construction."""

    def __init__(self, function: Function, target: Value, reached: Set[Value], ops: Sequence[Op]) -> None:
        self.function, self.target, self.reached = function, target, reached
        self.maker = extend(function, AsNamed(function.name))
        self.ops = ops
        self.rules = _Rules()
        self.terms: dict[Value, list[Value]] = {}
        """For each value the terms of its gradient and their running sums; the last is the sum so far."""

    def run(self) -> None:
        """Differentiate every op between `wrt` and the loss, last first."""
        if self.target in self.reached:
            made_by = self.function.producers().get(self.target)
            self.terms[self.target] = [self.filled(self.target, 1.0, made_by)]
        for op in reversed(self.ops):
            if not self.terms.keys().isdisjoint(op.outputs):
                self.differentiate(op, [self.terms[v][-1] if v in self.terms else None for v in op.outputs])

    def differentiate(self, op: Op, given: Sequence[Value | None]) -> None:
        """Append the gradients of one op's operands, given those of its results (None where there is none)."""
        first = len(self.maker.ops)
        rule = op.spec.grad
        if rule is None:
            name = op.outputs[0].name
            raise ModelError(f"%{name}: {op.op_type} has no gradient", "keep it off the way from weights to the loss")
        for k in range(len(given) - op.spec.saved, len(given)):
            if given[k] is not None:
                hint, name = "compute it by other ops where the loss depends on it", op.outputs[k].name
                raise ModelError(f"%{name}: no gradient flows from what {op.op_type} saves for its own", hint)
        gradients = self.rules.apply(rule, self.maker, op, given)
        if len(gradients) != len(op.inputs):
            raise ModelError(f"the gradient rule of {op.op_type} gives {len(gradients)} for {len(op.inputs)} operands")
        for v, d in zip(op.inputs, gradients, strict=True):
            if d is None or v not in self.reached:
                continue
            if d.type is not v.type:
                raise ModelError(f"{op.op_type}: the gradient of %{v.name} is {d.type}, expected {v.type}")
            terms = self.terms.get(v)
            if terms is None:
                self.terms[v] = [d]
            else:
                terms += [d, self.maker.emit("Add", terms[-1], d)]
        for made in self.maker.ops[first:]:
            made.of = op

    def filled(self, like: Value, number: float, of: Op | None) -> Value:
        """`number` in the shape of `like`."""
        t = tensor(like)
        first = len(self.maker.ops)
        value = self.maker.emit("Constant", value=(number,), shape=(), dtype=t.dtype)
        if t.global_shape:
            value = self.maker.emit("Expand", value, shape=t.global_shape)
        for op in self.maker.ops[first:]:
            op.of = of
        return value

    def total(self, v: Value) -> Value:
        """The gradient of `v`; zeros if the loss does not depend on it."""
        if v not in self.terms:
            self.terms[v] = [self.filled(v, 0.0, None)]
        return self.terms[v][-1]

    def rename(self) -> None:
        """Name the gradient of %x %x.grad, its terms %x.grad.1 ..., other values after the forward op."""
        names = extend(self.function)
        made = self.maker.ops[len(self.function.ops) :]
        new = {v for op in made for v in op.outputs}
        for last in (True, False):
            for v, terms in self.terms.items():
                for d in terms[-1:] if last else terms[:-1]:
                    if d in new:
                        new.discard(d)
                        d.name = names.fresh(f"{v.name}.grad")
        for op in made:
            for v in op.outputs:
                if v in new:
                    base = op.of.outputs[0].name if op.of else self.target.name
                    v.name = names.fresh(f"{base}.{op.op_type.lower()}")
