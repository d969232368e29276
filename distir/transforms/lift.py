"""Accumulate over time before sending: a sum of values from different stages is taken after microbatches are done.

A tied weight's gradients are made on several stages and added. Added as they come, each microbatch's would be sent;
instead each is accumulated where it is made, and the whole ones are added: sum(a + b) = sum(a) + sum(b).
"""

from __future__ import annotations

from collections.abc import Mapping

from distir.ir.device import TIME
from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.type import SUM, Partial
from distir.ops.rules import tensor
from distir.transforms.known import carry
from distir.transforms.phases import ends_time, producers, users


def lift_sums(function: Function, stage: Mapping[Op, int]) -> tuple[Function, dict[Op, int]]:
    """The function with such sums lifted, and the stages of its ops (none for the lifted ones)."""
    producer = producers(function)
    lifted = _lifted(function, stage, producer)
    if not lifted:
        return function, dict(stage)
    maker = FunctionMaker(function.name)
    for v in function.inputs:
        maker.fresh(v.name)
    maker.inputs.extend(function.inputs)
    env: dict[Value, Value] = {}  # what has changed
    ops: dict[Op, Op] = {}
    new_stage: dict[Op, int] = {}

    def total(v: Value, op: Op) -> Value:
        """The sum over time of `v`, whose own sum would be `op`."""
        inner = producer.get(v)
        if inner in lifted and inner is not None:
            parts = [total(w, op) if tensor(w).on(TIME) is SUM else env.get(w, w) for w in inner.inputs]
            return maker.add_op(inner.spec, v.name, parts, inner.attributes)
        return maker.add_op(op.spec, v.name, [env.get(v, v)], op.attributes)

    for op in function.ops:
        if op in lifted:
            continue
        if op.spec.comm is not None and ends_time(op) and producer.get(op.inputs[0]) in lifted:
            env[op.outputs[0]] = total(op.inputs[0], op)
            continue
        new = ops[op] = carry(maker, op, env, ops.get(op.of) if op.of else None)
        if new.outputs is not op.outputs:
            env.update(zip(op.outputs, new.outputs, strict=True))
        if op in stage:
            new_stage[new] = stage[op]
    maker.set_outputs(env.get(v, v) for v in function.outputs)
    maker.updates = {env.get(a, a): b for a, b in function.updates.items()}
    maker.sources = {env.get(v, v): shape for v, shape in function.sources.items()}
    return maker.finalize(), new_stage


def _lifted(function: Function, stage: Mapping[Op, int], producer: Mapping[Value, Op]) -> set[Op]:
    """The sums that are taken of whole values instead: of values of several stages, and used for this sum alone."""
    used = users(function)
    kept = set(function.outputs)

    def liftable(v: Value) -> Op | None:
        op = producer.get(v)
        if op is None or len(op.inputs) < 2 or len(op.outputs) != 1 or op.spec.comm is not None:
            return None
        if len(used[v]) != 1 or v in kept:
            return None
        sums = [w for w in op.inputs if tensor(w).on(TIME) is SUM]
        stages = {stage[producer[w]] for w in sums if producer[w] in stage}
        return op if len(sums) > 1 and len(stages) > 1 else None

    lifted: set[Op] = set()
    for op in function.ops:
        if op.spec.comm is not None and ends_time(op) and isinstance(tensor(op.inputs[0]).on(TIME), Partial):
            todo = [op.inputs[0]]
            while todo:
                inner = liftable(todo.pop())
                if inner is not None and inner not in lifted:
                    lifted.add(inner)
                    todo += inner.inputs
    return lifted
