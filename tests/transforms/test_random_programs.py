"""Random programs under random plans equal the sequential ones, and together they hold every op and kind of plan."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import Phase, event, given, settings

from distir.ir import Function
from distir.ir.errors import InfeasibleError
from distir.ir.spec import all_ops
from distir.ops.rules import shape_of
from tests.transforms.programs import TOLERANCE, Plan, Program, collectives, distributed, error, run
from tests.transforms.random_programs import (
    BLOCKS,
    LARGE,
    Picks,
    looked_up,
    random_picks,
    random_plans,
    random_programs,
    with_split,
)

ELSEWHERE = {"AdamW", "GroupedAdamW", "GroupedSGD", "LookupSGD"}
"""Ops that these programs do not hold: AdamW blows rounding of zero gradients up (see test_equality), only programs of
ranks group optimizers (see test_rank_programs), and gradients that are results are whole (see test_recommender_plans).
"""
MOVES = {"MPIAllreduce", "MPIAllgather", "LocalSlice", "Send", "Restrict", "Accumulate", "MPIScatter", "MPIBroadcast"}
MOVES |= {"MPIAlltoall", "HaloExchange"}
EACH = 13
"""The number of programs for each block."""
SLOW = int(os.environ.get("DISTIR_EXAMPLES", "1000"))


def ops_in(*functions: Function | None) -> Counter[str]:
    return Counter(op.op_type for f in functions if f for g in (f, *f.callees()) for op in g.ops)


def compared(program: Program, plan: Plan, picks: Picks = None) -> Counter[str] | None:
    """Assert equality; returns what the program covers, None if the plan is refused."""
    plan = with_split(program, plan, picks)
    try:
        result = distributed(program, plan)
    except InfeasibleError as e:
        if e.message.startswith("sequence parallelism"):
            event(e.message.split(" over ")[0] + " splits nothing")
            return compared(program, plan._replace(split=()) if plan.split else plan._replace(sequence_parallel=False))
        event(f"refused: {e.message.split(' in ')[0]}")
        return None
    function = result.program
    gap = error(run(function, program), program.results())
    assert gap <= TOLERANCE, f"{plan}: off by {gap}"
    for axis in ("dp", "tp", "pp", "microbatches"):
        event(f"{axis} > 1: {getattr(plan, axis) > 1}")
    event(f"sequence parallel: {plan.sequence_parallel and plan.tp > 1}")
    for kind in collectives(function):
        event(f"has {kind}")
    seen = ops_in(program.forward, program.function, result.source, function)
    seen.update(f"{axis} > 1" for axis in ("dp", "tp", "pp", "microbatches") if getattr(plan, axis) > 1)
    seen["a split of inputs"] = bool(plan.split)
    seen["sequence parallel"] = plan.sequence_parallel and plan.tp > 1
    uses = Counter(v for op in program.forward.ops for v in set(op.inputs)) if program.forward else Counter()
    seen["a weight used twice"] = any(n > 1 and v.kind == "parameter" for v, n in uses.items())
    sent = [op.inputs[0] for op in function.ops if op.op_type == "Send"]
    seen["a weight on several stages"] = any(v.kind == "parameter" for v in sent)
    seen["several results"] = len(program.forward.outputs) > 1 if program.forward else 0
    seen["padding"] = any(v.role is not None and v.role.source for v in function.inputs)
    return seen


def test_random_programs_hold_every_op_and_kind_of_plan() -> None:
    """A fixed set of examples: equality on each, and complete coverage together."""
    seen = Counter[str]()
    refused = Counter[bool]()

    def equal(program: Program, plan: Plan, picks: Picks) -> None:
        found = compared(program, plan, picks)
        refused[found is None] += 1
        seen.update(k for k, n in (found or {}).items() if n)

    fixed = settings(
        max_examples=EACH,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=LARGE,
    )
    for block in BLOCKS:
        fixed(given(random_programs(block), random_plans, random_picks)(equal))()
    print("programs in which each occurs:", dict(sorted(seen.items())))
    expected = {spec.name for spec in all_ops() if spec.comm is None} - ELSEWHERE | MOVES
    expected |= {"a weight used twice", "a weight on several stages", "several results", "padding"}
    assert expected - set(seen) == set()
    for axis in ("dp", "tp", "pp", "microbatches"):
        assert seen[f"{axis} > 1"] >= 40, axis
    assert seen["sequence parallel"] >= 40
    assert seen["a split of inputs"] >= 40
    assert refused[True] < refused[False] / 10, refused


def test_tables_and_halos_together() -> None:
    """Windows over rows that are looked up, with the rows of each table split: exchanged by neighbours."""
    seen = Counter[str]()

    def equal(program: Program, plan: Plan) -> None:
        forward = program.forward or program.function
        rows = [op.inputs[0] for op in forward.ops if op.op_type == "Lookup" and op.inputs[0] in forward.inputs]
        names = dict.fromkeys([v.name for v in rows if shape_of(v)[2] % 4 == 0])
        if not names:
            return
        n = 2 if plan.dp * plan.tp * plan.pp > 2 else 4
        plan = plan._replace(host=False, split=(f"d={n}:{','.join([f'{name}.2' for name in names])}",))
        found = compared(program, plan) or Counter()
        seen["equal"] += bool(found)
        seen["both"] += bool(found["Lookup"] and found["HaloExchange"])

    fixed = settings(
        max_examples=12, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=LARGE
    )
    fixed(given(random_programs(looked_up), random_plans)(equal))()
    assert seen["both"] >= 2, seen


@pytest.mark.slow
@settings(max_examples=SLOW, suppress_health_check=LARGE)
@given(random_programs(), random_plans, random_picks)
def test_random_programs_equal_sequential(program: Program, plan: Plan, picks: Picks) -> None:
    compared(program, plan, picks)
