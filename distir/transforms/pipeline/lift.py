"""Accumulates over microbatches before sending: moves sums of values from several stages after the sums over time.

A tied weight's gradients are made on several stages and added. Adding them as they are would send one of them for each
microbatch; instead each stage accumulates its own, and the totals are added: sum(a + b) = sum(a) + sum(b). If
the sum is cast, as to float32 in mixed precision, each part is: sum(cast(a + b)) = sum(cast(a)) + sum(cast(b)), which
rounds less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from distir.ir.cached import producers
from distir.ir.device import TIME
from distir.ir.function import Function, FunctionMaker, Op, Value, is_cast
from distir.ir.type import SUM
from distir.ops.rules import tensor
from distir.transforms.append import rebuilt
from distir.transforms.pipeline.phases import time_ends, users


def lift_sums(function: Function, stage: Mapping[Op, int]) -> tuple[Function, dict[Op, int]]:
    """The function with such sums moved after the sums over time, and the stages of its ops (none for moved sums)."""
    producer, ends = producers(function), time_ends(function)
    lifted = _lifted(function, stage, producer)
    if not lifted:
        return function, dict(stage)

    def replaced(maker: FunctionMaker, op: Op, env: dict[Value, Value], stages: dict[Op, int]) -> bool:
        if op in ends and producer.get(op.inputs[0]) in lifted:
            env[op.outputs[0]] = _Total(op, lifted, producer, stage, maker, env, stages).of(op.inputs[0], [])
            return True
        return op in lifted

    return rebuilt(function, stage, replaced)


class _Total(NamedTuple):
    """Makes the sum over time that `op` is, of what is left where sums are lifted. `stages` are those of new ops."""

    op: Op
    lifted: Set[Op]
    producer: Mapping[Value, Op]
    stage: Mapping[Op, int]
    maker: FunctionMaker
    env: Mapping[Value, Value]
    stages: dict[Op, int]

    def of(self, v: Value, then: Sequence[Op]) -> Value:
        """The sum over time of `v`, to which ops like `then` are applied before: of a lifted sum, the sum of its
        operands' totals."""
        inner, env, maker = self.producer.get(v), self.env, self.maker
        if inner in self.lifted and inner is not None:
            if is_cast(inner):
                return self.of(inner.inputs[0], [inner, *then])
            parts = [self.of(w, then) if _sums(w) else env.get(w, w) for w in inner.inputs]
            return maker.add_op(inner.spec, v.name, parts, inner.attributes)
        found = env.get(v, v)
        for step in then:
            found = maker.add_op(step.spec, v.name, [found], step.attributes)
            if inner is not None and inner in self.stage:
                self.stages[maker.ops[-1]] = self.stage[inner]
        return maker.add_op(self.op.spec, v.name, [found], self.op.attributes)


def _lifted(function: Function, stage: Mapping[Op, int], producer: Mapping[Value, Op]) -> set[Op]:
    """The ops to lift: they add partial sums of several stages, and only a sum over time uses their result, or a cast
    between the two."""
    used = users(function)
    outputs = set(function.outputs)

    def liftable(v: Value, cast: bool) -> list[Op]:
        """The casts of a sum that make a value, and the sum; none if it is not of several stages. `cast`: the value is
        part of a sum that is cast; of these all operands must be summed up."""
        found: list[Op] = []
        while (op := producer.get(v)) is not None and len(op.outputs) == len(used[v]) == 1 and v not in outputs:
            found.append(op)
            if not is_cast(op):
                sums = list(filter(_sums, op.inputs))
                stages = {stage[made] for w in sums if (made := producer.get(w)) is not None and made in stage}
                whole = len(sums) == len(op.inputs) or not (cast or len(found) > 1)
                return found if len(sums) > 1 and len(stages) > 1 and op.spec.comm is None and whole else []
            v = op.inputs[0]
        return []

    lifted: set[Op] = set()
    for op in time_ends(function):
        if tensor(op.inputs[0]).over_time.kind is not None:
            todo = [(op.inputs[0], False)]
            while todo:
                v, cast = todo.pop()
                found = liftable(v, cast)
                if found and found[-1] not in lifted:
                    lifted.update(found)
                    todo += [(w, cast or len(found) > 1) for w in found[-1].inputs]
    return lifted


def _sums(v: Value) -> bool:
    """Whether it is a partial sum over time."""
    return tensor(v).on(TIME) is SUM
