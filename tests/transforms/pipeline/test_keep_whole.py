"""Weights that stay whole from the forward to the backward pass: exact, proved, and those that blocks do not have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distir.api.compilation import validate
from distir.api.model import load
from distir.ir import Device, Function, Op, Value, verify
from distir.transforms.parallel3d import distribute
from distir.transforms.plan import Plan
from tests.transforms.programs import ADAMW, TOLERANCE, error, imported_mlp, run, small_gpt

PLANS = [
    Plan(2, 1, 1, 1, zero=3),
    Plan(2, 1, 1, 2, zero=3, recompute="products"),
    Plan(2, 1, 2, 4, zero=3, recompute="all-products"),
    Plan(2, 2, 1, 2, zero=3, bucket_mb=0, recompute="full"),
]


def made(function: Function, plan: Plan) -> Function:
    return distribute(function, plan, [Device("cpu", i) for i in range(plan.size)]).program


def kept(plan: Plan) -> Plan:
    return replace(plan, gathered_again="blocks")


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_equals_sequential(name: str, plan: Plan) -> None:
    program = small_gpt(layers=4, optimizer=ADAMW) if name == "gpt" else imported_mlp()
    program_of = made(program.function, kept(plan))
    verify(program_of)
    validate(program_of, program.function)
    assert error(run(program_of, program), program.results()) <= TOLERANCE


def bodies(program: Function, prefix: str) -> list[Function]:
    return [f for f in program.callees() if f.name.startswith(prefix)]


def gathers(f: Function) -> int:
    """The weights that a body gathers."""
    found = [op for op in f.ops if op.op_type == "MPIAllgather"]
    return sum(len(getattr(op.outputs[0].type, "types", (1,))) for op in found)


def test_backward_passes_gather_blocks_but_the_last() -> None:
    function = small_gpt(layers=4, optimizer=ADAMW).function
    again, whole = (made(function, plan) for plan in (PLANS[0], kept(PLANS[0])))
    counts = [[sum(gathers(f) for f in bodies(p, prefix)) for prefix in ("fwd", "bwd")] for p in (again, whole)]
    assert counts[0][0] == counts[1][0]
    each = counts[1][1] // 3  # of three blocks of four
    assert counts[1][1] == 3 * each
    assert counts[0][1] > 4 * each  # of four, and of what no block has
    (backward,) = bodies(whole, "bwd")
    waits = [op for op in backward.ops if op.op_type == "After" and is_given(backward, op.inputs[1])]
    assert waits  # what no backward op needs, such as the embedding, lives until the gradient of what used it
    used = {v for op in backward.ops for v in op.inputs}
    assert used.issuperset([op.outputs[0] for op in waits])


def is_given(f: Function, v: Value) -> bool:
    """Whether a value is an input, or a part of one."""
    makers: dict[Value, Op] = f.producers()
    return v in f.inputs or (makers[v].op_type == "Unpack" and makers[v].inputs[0] in f.inputs)


def test_a_weight_that_stays_whole_is_gathered_where_it_is_used() -> None:
    """The first block's positions, of which a slice is used, and the last block's norms were on other stages."""
    size = "gpt:layers=2,hidden=16,heads=4,vocab=24,seq=8,tied=0,positions=12"
    step = load(size, {"batch": 8}, loss="cross-entropy", optimizer="adamw").with_dtype("float64")
    plan = kept(Plan(2, 1, 2, 2, zero=3, bucket_mb=0))
    program = made(step.function, plan)
    validate(program, step.function)
    forward = bodies(program, "fwd")
    assert len(forward) >= 2
    for f in forward:
        used = {v for op in f.ops for v in op.inputs}
        found = [op for op in f.ops if op.op_type == "MPIAllgather"]
        assert found
        assert all(not used.isdisjoint(op.outputs) for op in found)
