"""Attention of keys and values that queries share takes them as they are, not once for each head of queries.

    %k.2 = Reshape(%k, shape=(b, g, 1, t, e))
    %k.3 = Expand(%k.2, shape=(b, g, r, t, e))
    %k.4 = Reshape(%k.3, shape=(b, g r, t, e))
    %y, %lse = Attention(%q, %k.4, %v.4)          %y, %lse = GroupedAttention(%q, %k, %v)

A reshape of what is expanded is a copy, which would be kept for the backward pass. This is after placing: until then
keys and values have the heads that tensor parallelism may split. A gather of what is expanded is one of %k then, a
reduction of a gradient that is summed over the heads one of the result of GroupedAttentionGrad.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from distir.ir.cached import cached, producers
from distir.ir.errors import IRTypeError
from distir.ir.exact_attributes import Attributes
from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.infer import infer
from distir.ir.spec import Spec, lookup
from distir.ir.type import Type
from distir.ops.attention import KEYS_AND_VALUES
from distir.ops.rules import shape_of
from distir.transforms.pipeline.bucket import maker_like
from distir.transforms.rewriting.cleanup import live

ATTENTION, GRADIENT, OF_MASK = map(lookup, ("Attention", "AttentionGrad", "AttentionGradMask"))
GROUPED, GROUPED_GRADIENT = map(lookup, ("GroupedAttention", "GroupedAttentionGrad"))
RESHAPE, EXPAND, SUM = map(lookup, ("Reshape", "Expand", "ReduceSum"))


@cached
def group_queries(function: Function) -> Function:
    """The function with grouped attention, forward and backward, where keys and values are expanded for it; the
    function itself if there is none."""
    if not {ATTENTION, EXPAND} <= {op.spec for op in function.ops}:
        return function
    return _Grouping(function).run()


class _Summed(NamedTuple):
    """What a gradient of keys or values becomes: summed over the heads that share one, then by `reductions` over
    devices, if there are any."""

    result: Value
    reductions: list[Op]


class _Grouping:
    def __init__(self, function: Function) -> None:
        self.function, self.made = function, producers(function)
        self.uses = Counter([*[v for op in function.ops for v in op.inputs], *function.outputs])
        self.user = {op.inputs[0]: op for op in function.ops if op.spec in (RESHAPE, SUM) or _along_axis(op)}
        """The ops of one operand that sums of gradients are made of."""
        self.gathers: dict[Op, Op] = {}
        """For each gather of what is expanded that of what it was before."""

    @cached_property
    def maker(self) -> FunctionMaker:
        return maker_like(self.function)

    def run(self) -> Function:
        gradients: dict[Op, list[Op]] = {}
        for op in self.function.ops:
            if op.spec in (GRADIENT, OF_MASK) and op.of is not None:
                gradients.setdefault(op.of, []).append(op)
        new: dict[Op, Op] = {}
        for op in self.function.ops:
            if op.spec is ATTENTION:
                new |= self.grouped([op, *gradients.get(op, ())])
        return self.rebuilt(new) if new else self.function

    def grouped(self, ops: list[Op]) -> dict[Op, Op]:
        """What takes the place of attention, of its gradients and of the reductions of their results; nothing if one of
        them takes keys or values that are not expanded, or gives them gradients that are not summed."""
        found: dict[Op, Op] = {}
        if OF_MASK in [op.spec for op in ops]:
            return {}  # a trained mask: its gradient takes expanded keys
        for op in ops:
            heads, backward = len(shape_of(op.inputs[0])) - 3, op.spec is not ATTENTION
            operands, results, sums = list(op.inputs), list(op.outputs), dict[int, _Summed]()
            for k in KEYS_AND_VALUES:
                before = self.before(operands[k], heads)
                if before is None:
                    return {}
                operands[k] = before
                if backward:
                    summed = self.summed(results[k], shape_of(before), heads)
                    if summed is None:
                        return {}
                    results[k] = summed.result
                    if summed.reductions:
                        sums[k] = summed
            spec = GROUPED_GRADIENT if backward else GROUPED
            types = _types(spec, op.attributes, operands)
            for k, summed in sums.items() if types else ():
                results[k] = Value(self.maker.fresh(op.outputs[k].name), types[k])
                reductions = self.reduced(summed, results[k], heads)
                if reductions is None:
                    return {}
                found |= reductions
            if [v.type for v in results] != types:
                return {}
            found[op] = Op(spec, tuple(operands), op.attributes, tuple(results), op.of)
        return found

    def only(self, v: Value) -> Op | None:
        """The only op that uses a value, if it is one that sums of gradients are made of."""
        return self.user.get(v) if self.uses[v] == 1 else None

    def maker_of(self, v: Value, spec: Spec) -> Op | None:
        """The op that makes a value, if it is one of these."""
        op = self.made.get(v)
        return op if op is not None and op.spec is spec else None

    def before(self, v: Value, heads: int) -> Value | None:
        """What is repeated, each head several times in a row, to make a value; None if it is made otherwise."""
        if (joined := self.maker_of(v, RESHAPE)) is None or (expand := self.maker_of(joined.inputs[0], EXPAND)) is None:
            return None
        gathers, v = list[Op](), expand.inputs[0]
        while (op := self.made.get(v)) is not None and _along_axis(op):
            gathers.append(op)
            (v,) = op.inputs
        apart = self.maker_of(v, RESHAPE)
        if apart is None or heads < 0:
            return None
        (x,) = apart.inputs
        before, wide = shape_of(x), shape_of(expand.outputs[0])
        if len(before) != heads + 3 or len(wide) != heads + 4:
            return None
        lead, rest = before[: heads + 1], before[heads + 1 :]
        shapes = (*lead, 1, *rest), (*lead, wide[heads + 1], *rest), (*lead[:-1], lead[-1] * wide[heads + 1], *rest)
        if any(op.attributes["shape"] != shape for op, shape in zip((apart, expand, joined), shapes, strict=True)):
            return None  # also if a size is left to be worked out: the definition of grouped attention has all
        for gather in reversed(gathers):
            if gather not in self.gathers:
                types = _types(gather.spec, gather.attributes, [x])
                if not types:
                    return None
                y = Value(self.maker.fresh(gather.outputs[0].name), types[0])
                self.gathers[gather] = Op(gather.spec, (x,), gather.attributes, (y,), gather.of)
            (x,) = self.gathers[gather].outputs
        return x

    def summed(self, v: Value, shape: tuple[int, ...], heads: int) -> _Summed | None:
        """The sum of a value over heads that share one, if that is all the value is for."""
        apart = self.only(v)
        if apart is None or apart.spec is not RESHAPE:
            return None
        total = self.only(apart.outputs[0])
        if total is None or total.spec is not SUM or total.attributes != {"axes": (heads + 1,), "keepdims": 1}:
            return None
        reductions, joined = list[Op](), self.only(total.outputs[0])
        while joined is not None and _along_axis(joined):
            reductions.append(joined)
            joined = self.only(joined.outputs[0])
        if joined is None or joined.spec is not RESHAPE:
            return None
        wide = shape_of(apart.outputs[0])
        if (*wide[: heads + 1], *wide[heads + 2 :]) != shape or apart.attributes["shape"] != wide:
            return None
        if joined.attributes["shape"] != shape:
            return None
        return _Summed(joined.outputs[0], reductions)

    def reduced(self, summed: _Summed, v: Value, heads: int) -> dict[Op, Op] | None:
        """Reductions of a value without the dim of the heads that share one, which give the same; None if they do
        not."""
        found: dict[Op, Op] = {}
        for op in summed.reductions:
            attributes = op.attributes
            if "dim" in attributes:
                dim = attributes["dim"]
                attributes = Attributes({**attributes, "dim": dim - 1 if dim > heads else dim})
            types = _types(op.spec, attributes, [v])
            last = op is summed.reductions[-1]
            if not types or (last and types[0] is not summed.result.type):
                return None
            y = summed.result if last else Value(self.maker.fresh(op.outputs[0].name), types[0])
            found[op] = Op(op.spec, (v,), attributes, (y,), op.of)
            v = y
        return found

    def rebuilt(self, new: Mapping[Op, Op]) -> Function:
        """The function with these ops replaced, and without those that only they needed."""
        function = self.function
        elsewhere = {v for old, op in new.items() for v in op.outputs if v not in old.outputs}
        ops: list[Op] = []
        for op in function.ops:
            if op in self.gathers:
                ops.append(self.gathers[op])
            if op in new:
                ops.append(new[op])
            elif elsewhere.isdisjoint(op.outputs):
                ops.append(op)
        left = live(ops, function.outputs)
        if not self.gathers.keys().isdisjoint(left):  # what they gather is used for something else, too
            left = live([self.reshaped(op) for op in ops], function.outputs)
        there, renewed = set(left), dict(new)
        for k, op in enumerate(left):
            of = renewed.get(op.of, op.of) if op.of is not None else None
            if of is not op.of or (of is not None and of not in there):
                of = of if of in there else None
                left[k] = renewed[op] = Op(op.spec, op.inputs, op.attributes, op.outputs, of)
                there.add(left[k])
        return Function(
            function.name, function.inputs, tuple(left), function.outputs, function.updates, function.sources
        )

    def reshaped(self, op: Op) -> Op:
        """A gather of a value that is reshaped, as a reshape of what is gathered before; other ops as they are."""
        if (gather := self.gathers.get(op)) is None:
            return op
        (y,) = op.outputs
        return Op(RESHAPE, gather.outputs, Attributes(shape=shape_of(y)), (y,), op.of)


def _types(spec: Spec, attributes: Attributes, operands: list[Value]) -> list[Type]:
    """The types of an op's results; none if it does not take these operands."""
    try:
        return list(infer(spec, attributes, tuple([v.type for v in operands])))
    except IRTypeError:
        return []


def _along_axis(op: Op) -> bool:
    """Whether it is a collective of one value."""
    return op.spec.route == "axis" and op.spec.comm is not None and len(op.inputs) == len(op.outputs) == 1
