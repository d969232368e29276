"""Accumulates over microbatches before sending: moves sums of values from several stages after the sums over time.

A tied weight's gradients are made on several stages and added. Adding them as they are would send one of them for each
microbatch; instead each stage accumulates its own, and the totals are added: sum(a + b) = sum(a) + sum(b).
"""

from __future__ import annotations

from collections.abc import Mapping

from distir.ir.cached import producers
from distir.ir.device import TIME
from distir.ir.function import Function, FunctionMaker, Op, Value
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

    def total(maker: FunctionMaker, v: Value, op: Op, env: dict[Value, Value]) -> Value:
        """The sum over time of `v`, by ops like `op`: of a lifted sum, the sum of its operands' totals."""
        inner = producer.get(v)
        if inner in lifted and inner is not None:
            summed = [tensor(w).on(TIME) is SUM for w in inner.inputs]
            rows = zip(inner.inputs, summed, strict=True)
            parts = [total(maker, w, op, env) if s else env.get(w, w) for w, s in rows]
            return maker.add_op(inner.spec, v.name, parts, inner.attributes)
        return maker.add_op(op.spec, v.name, [env.get(v, v)], op.attributes)

    def replaced(maker: FunctionMaker, op: Op, env: dict[Value, Value], stages: dict[Op, int]) -> bool:
        if op in ends and producer.get(op.inputs[0]) in lifted:
            env[op.outputs[0]] = total(maker, op.inputs[0], op, env)
            return True
        return op in lifted

    return rebuilt(function, stage, replaced)


def _lifted(function: Function, stage: Mapping[Op, int], producer: Mapping[Value, Op]) -> set[Op]:
    """The ops to lift: they add partial sums of several stages, and only a sum over time uses their result."""
    used = users(function)
    outputs = set(function.outputs)

    def liftable(v: Value) -> Op | None:
        op = producer.get(v)
        if op is None or len(op.inputs) < 2 or len(op.outputs) != 1 or op.spec.comm is not None:
            return None
        if len(used[v]) != 1 or v in outputs:
            return None
        sums = [w for w in op.inputs if tensor(w).on(TIME) is SUM]
        stages = {stage[producer[w]] for w in sums if producer[w] in stage}
        return op if len(sums) > 1 and len(stages) > 1 else None

    lifted: set[Op] = set()
    for op in time_ends(function):
        if tensor(op.inputs[0]).over_time.kind is not None:
            todo = [op.inputs[0]]
            while todo:
                inner = liftable(todo.pop())
                if inner is not None and inner not in lifted:
                    lifted.add(inner)
                    todo += inner.inputs
    return lifted
