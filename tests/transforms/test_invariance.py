"""Plans do not depend on names, nor on the order of independent ops."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distir.ir import Function, Op, Value
from distir.ir.errors import InfeasibleError
from distir.transforms.parallel3d import Distributed
from distir.transforms.rewriting.cleanup import fold
from tests.transforms.programs import Plan, Program, distributed, gpt2_tiny, imported_mlp, small_gpt, written_mlp
from tests.transforms.random_programs import LARGE, random_plans, random_programs

Summary = Counter[Any]


def shuffled(function: Function, seed: int) -> Function:
    """The same program with other names, its ops in a random topological order."""
    rng = random.Random(seed)
    names = [f"v{k}" for k in range(len(function.inputs) + sum(len(op.outputs) for op in function.ops))]
    rng.shuffle(names)
    env = {v: Value(names.pop(), v.type, v.role) for v in function.inputs}
    made: dict[Op, Op] = {}
    users: dict[Value | Op, list[Op]] = {}
    waiting: dict[Op, int] = {}
    for op in function.ops:
        needs = {v for v in op.inputs if v not in env} | ({op.of} if op.of else set())
        waiting[op] = len(needs)
        for need in needs:
            users.setdefault(need, []).append(op)
    ready = [op for op, n in waiting.items() if n == 0]
    while ready:
        op = ready.pop(rng.randrange(len(ready)))
        outs = tuple(Value(names.pop(), v.type) for v in op.outputs)
        made[op] = Op(op.spec, tuple(env[v] for v in op.inputs), op.attributes, outs, made[op.of] if op.of else None)
        env.update(zip(op.outputs, outs, strict=True))
        for done in (op, *op.outputs):
            for user in users.get(done, ()):
                waiting[user] -= 1
                if waiting[user] == 0:
                    ready.append(user)
    assert len(made) == len(function.ops)
    updates = {env[a]: env[b] for a, b in function.updates.items()}
    outputs = tuple(env[v] for v in function.outputs)
    return Function("renamed", tuple(env[v] for v in function.inputs), tuple(made.values()), outputs, updates)


def plan_of(made: Distributed) -> Summary:
    """What is where: of inputs and results the types, stages included; of each body how many of which ops."""
    program = made.program
    found: Summary = Counter()
    for k, v in enumerate((*program.inputs, *program.outputs)):
        found[f"input or result {k}: {v.type}"] += 1
    for f in program.callees():
        for op in f.ops:
            types = tuple(v.type for v in op.inputs), tuple(v.type for v in op.outputs)
            if op.spec.bundle is None and op.op_type != "After":  # which says when, in the order of the program
                found[f.name, op.op_type, op.attributes, types] += 1
    for op in program.ops:
        if op.op_type == "Send":
            found["Send", op.inputs[0].type.bytes, op.outputs[0].type.device] += 1
    return found


def same_plan(program: Program, plan: Plan, seed: int) -> None:
    want = plan_of(distributed(program, plan))
    other = Program(shuffled(program.function, seed), program.arrays)
    got = plan_of(distributed(other, plan))
    assert got - want == Counter()
    assert want - got == Counter()


PLANS = [Plan(2, 2, 2, 2, bucket_mb=0), Plan(1, 4), Plan(1, 1, 4, 4), Plan(2, 2, 2, 2, host=True, bucket_mb=0)]
"""Buckets are filled in the order of the program: here each gradient is reduced alone."""


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("program", [gpt2_tiny, small_gpt, imported_mlp, written_mlp], ids=lambda f: f.__name__)
def test_names_and_order_do_not_matter(program: Callable[[], Program], plan: Plan) -> None:
    for seed in range(3):
        same_plan(program(), plan, seed)


@settings(max_examples=30, deadline=None, suppress_health_check=LARGE)
@given(random_programs(), random_plans, st.integers(0, 1000))
def test_names_and_order_do_not_matter_to_random_programs(program: Program, plan: Plan, seed: int) -> None:
    plan = plan._replace(bucket_mb=0)
    program = program._replace(function=fold(program.function))
    alike = [(op.spec, op.attributes, op.inputs) for op in program.function.ops if op.inputs]
    assume(len(set(alike)) == len(alike))  # results that are the same cannot be told apart
    try:
        want = plan_of(distributed(program, plan))
    except InfeasibleError as refused:
        with pytest.raises(InfeasibleError, match=re.escape(refused.message.split(" in ")[0])):
            distributed(Program(shuffled(program.function, seed), program.arrays), plan)
        return
    got = plan_of(distributed(Program(shuffled(program.function, seed), program.arrays), plan))
    assert (got - want, want - got) == (Counter(), Counter())


def test_a_shuffled_program_is_in_another_order() -> None:
    function = small_gpt().function
    one = shuffled(function, 0)
    assert [op.op_type for op in one.ops] != [op.op_type for op in function.ops]
    assert sorted(op.op_type for op in one.ops) == sorted(op.op_type for op in function.ops)
