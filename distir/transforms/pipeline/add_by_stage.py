"""Sums of values on several stages: each stage adds up its own values and sends one partial sum."""

from __future__ import annotations

from collections.abc import Mapping

from distir.ir.cached import producers
from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.transforms.append import append, rebuilt
from distir.transforms.pipeline.phases import UPDATE


def add_by_stage(
    function: Function, phase: Mapping[Op, str], stage: Mapping[Op, int]
) -> tuple[Function, dict[Op, int]]:
    """The function with such sums in the update done in two steps, and the stages of its ops."""
    producer = producers(function)
    apart: dict[Op, dict[int, list[Value]]] = {}
    for op in function.ops:
        if op.spec.addends and phase[op] == UPDATE and all([producer.get(v) in stage for v in op.inputs]):
            terms: dict[int, list[Value]] = {}
            for v in op.inputs:
                terms.setdefault(stage[producer[v]], []).append(v)
            if 1 < len(terms) < len(op.inputs):
                apart[op] = terms
    if not apart:
        return function, dict(stage)

    def replaced(maker: FunctionMaker, op: Op, env: dict[Value, Value], stages: dict[Op, int]) -> bool:
        if op not in apart:
            return False
        names, types = [v.name for v in op.outputs], [v.type for v in op.outputs]
        partial: list[Value] = []
        for s, values in apart[op].items():
            partial += append(maker, op.spec, tuple([env.get(v, v) for v in values]), op.attributes, names, types)
            stages[maker.ops[-1]] = s
        outputs = append(maker, op.spec, tuple(partial), op.attributes, names, types)
        stages[maker.ops[-1]] = stage[op]
        env.update(zip(op.outputs, outputs, strict=True))
        return True

    return rebuilt(function, stage, replaced)
