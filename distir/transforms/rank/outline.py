"""Outlines runs of compute ops into functions, which a backend compiles as a whole.

    %a = MatMul(%x, %w)                   %b = Call(%x, %w)        # part0: MatMul, Relu
    %b = Relu(%a)                         %c = MPIAllreduce(%b)
    %c = MPIAllreduce(%b)                 %e = Call(%x, %c)        # part1: Neg, Mul
    %d = Neg(%x)
    %e = Mul(%c, %d)

Optimizers are not outlined, since their kernels work in place, nor is communication. A call waits for all its
arguments, so a run ends before the first op that uses the result of a communication op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Literal

from distir.ir.function import Attributes, Function, Op, Value
from distir.ir.spec import lookup
from distir.ir.type import Tensor
from distir.transforms.rank.group_optimizers import updates_weights
from distir.transforms.rank.idle import is_idle

CALL = lookup("Call")
_FEWEST = 2
"""Runs of fewer ops are not outlined."""
Sort = Literal["joins", "stays", "moves"]
"""An op joins a run; or stays outside, before or after it; or moves data: then a run ends before it, and its results
arrive later."""


def sort(op: Op) -> Sort:
    """Whether an op can be part of a run."""
    if op.callee is not None or (op.spec.comm is not None and op.spec.bundle is None):
        alone = op.callee is None and op.spec.route == "here"
        return "stays" if alone or is_idle(op) else "moves"
    apart = op.spec.bundle is not None or updates_weights(op) or _counts_in_time(op)
    return "stays" if apart else "joins"


def _counts_in_time(op: Op) -> bool:
    """Whether the op depends on the microbatch's index offset: it would be compiled again for each microbatch."""
    indexed = op.spec.indexed(op.attributes)
    if indexed is None:
        return False
    slot = indexed[0]
    t = (op.inputs[slot] if slot >= 0 else op.outputs[~slot]).type
    if not isinstance(t, Tensor) or t.microbatch_dim is None:
        return False
    return op.spec.indexes(op.attributes, slot, t.microbatch_dim, len(t.shape))


def outline(function: Function, sort: Callable[[Op], Sort] = sort) -> Function:
    """The function, and its callees, with runs of at least two ops replaced by calls.

    Inputs, outputs and results do not change. `of` is dropped: the forward op may be in another run.
    """
    return _outlined(function, sort, {})


def _outlined(function: Function, sort: Callable[[Op], Sort], done: dict[Function, Function]) -> Function:
    if function not in done:
        uses = _uses(function.ops)
        uses.update(function.outputs)
        ops: list[Op] = []
        parts = 0
        for run in runs(function, sort):
            inside = _uses(run)
            results = [v for op in run for v in op.outputs if uses[v] > inside[v]]
            if len(run) >= _FEWEST and results:
                ops.append(_call(f"{function.name}.part{parts}", run, results))
                parts += 1
            else:
                ops += [_calling(op, sort, done) for op in run]
        f = function
        done[function] = Function(f.name, f.inputs, tuple(ops), f.outputs, f.updates, f.sources)
    return done[function]


def _uses(ops: Iterable[Op]) -> Counter[Value]:
    return Counter([v for op in ops for v in op.inputs])


class UnderWay:
    """What has been moved and not been waited for, op by op of a function; of its inputs that are `arriving`."""

    def __init__(self, arriving: Iterable[Value] = ()) -> None:
        self._sources: dict[Value, frozenset[Op | Value]] = {v: frozenset((v,)) for v in arriving}
        """For each value under way the ops, and inputs, that it waits for."""
        self._waited: set[Op | Value] = set()

    def awaits(self, v: Value) -> Set[Op | Value]:
        """What a use of the value would wait for."""
        return self._sources.get(v, frozenset()) - self._waited

    def next(self, op: Op, place: Sort) -> bool:
        """Go on to an op; whether it waits."""
        awaits = {source for v in op.inputs for source in self.awaits(v)}
        if place == "joins":
            self._waited |= awaits
        elif place == "moves" or awaits:
            self._sources.update(dict.fromkeys(op.outputs, frozenset((op,) if place == "moves" else awaits)))
        return bool(awaits)


def runs(function: Function, sort: Callable[[Op], Sort], arriving: Iterable[Value] = ()) -> Iterator[list[Op]]:
    """The ops in order, those of a run together. An op that stays outside goes before a run that it does not depend on,
    else after it. Inputs that are `arriving` are waited for by the first run that uses them."""
    run: list[Op] = []
    after: list[Op] = []
    of_run: set[Value] = set()
    of_after: set[Value] = set()
    under_way = UnderWay(arriving)
    for op in function.ops:
        place = sort(op)
        waits = under_way.next(op, place)
        if place == "stays" and of_run.isdisjoint(op.inputs) and of_after.isdisjoint(op.inputs):
            yield [op]
        elif place == "stays":
            after.append(op)
            of_after.update(op.outputs)
        else:
            if place == "moves" or waits or not of_after.isdisjoint(op.inputs):
                yield from _ended(run, after)
                run, after, of_run, of_after = [], [], set(), set()
            if place == "moves":
                yield [op]
            else:
                run.append(op)
                of_run.update(op.outputs)
    yield from _ended(run, after)


def _ended(run: list[Op], after: list[Op]) -> Iterator[list[Op]]:
    """A run, then each op that goes after it."""
    if run:
        yield run
    for op in after:
        yield [op]


def _calling(op: Op, sort: Callable[[Op], Sort], done: dict[Function, Function]) -> Op:
    """The op without `of`; in a call, the callee is outlined too."""
    if op.callee is None:
        return op if op.of is None else Op(op.spec, op.inputs, op.attributes, op.outputs)
    attributes = Attributes({**op.attributes, "callee": _outlined(op.callee, sort, done)})
    return Op(op.spec, op.inputs, attributes, op.outputs)


def _call(name: str, ops: Sequence[Op], results: Sequence[Value]) -> Op:
    """The call of a new function of these ops. The function shares no Values with the caller."""
    new: dict[Value, Value] = {}

    def own(values: Sequence[Value]) -> tuple[Value, ...]:
        new.update((v, Value(v.name, v.type)) for v in values if v not in new)
        return tuple([new[v] for v in values])

    made = {v for op in ops for v in op.outputs}
    operands = tuple(dict.fromkeys([v for op in ops for v in op.inputs if v not in made]))
    inputs = own(operands)
    body = tuple([Op(op.spec, own(op.inputs), op.attributes, own(op.outputs)) for op in ops])
    callee = Function(name, inputs, body, own(results))
    return Op(CALL, operands, Attributes(callee=callee), tuple(results))
