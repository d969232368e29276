"""What stages are balanced by: seconds of ops, of what crosses their borders, and of messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

import distir
from distir.api.compilation import distribute
from distir.api.stage_cost import stage_cost
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster
from distir.ir.host_runtime import Runtime
from distir.ir.topology import Topology
from distir.search.exact import Setting
from distir.search.model_axes import model_axes
from distir.search.placed_program import place
from distir.search.segments import axis_of
from distir.transforms.plan import Plan

LATENCY, TRANSFER = 3e-4, 2e-4


def cost_of(runtime: Runtime | None) -> CostModel:
    """Of two nodes of two cores, under a runtime."""
    r = load_cluster("cpu-2core", devices=4, nodes=2).regular
    assert r is not None
    return CostModel(Topology(replace(r, intra=r.intra._replace(latency=LATENCY))), runtime=runtime)


@pytest.mark.parametrize("inline", [True, False])
def test_messages_have_a_price_where_cores_do_what_links_do_elsewhere(inline: bool) -> None:
    plan = Plan(pp=2)
    found = stage_cost(cost_of(Runtime("inline", transfer=TRANSFER, inline=inline)), plan)
    assert found.message == pytest.approx(LATENCY + TRANSFER if inline else 0.0, rel=1e-6)
    assert stage_cost(cost_of(None), plan).message == 0.0


def test_stages_are_cut_where_few_messages_are_sent() -> None:
    """Between the blocks of a small decoder one value crosses; within them two, where stages would be more even."""
    sizes = "gpt:layers=2,hidden=64,heads=4,vocab=512,seq=32"
    model, plan = distir.load(sizes, {"batch": 8}, loss="cross-entropy", optimizer="adamw"), Plan(pp=4, microbatches=4)
    sends: list[int] = []
    for runtime in (None, Runtime("inline", transfer=1e-3, inline=True)):
        program = distribute(model, plan, cost=stage_cost(cost_of(runtime), plan))
        sends.append(sum([op.spec.name == "Send" for op in program.ops if op.callee is None]))
    assert sends[0] > sends[1]


def test_gradients_that_zero_splits_over_experts_cost_nothing() -> None:
    """What is sent to the experts, and back, does: it takes place between products that need it."""
    sizes = "gpt:layers=2,hidden=64,heads=4,vocab=64,seq=32,experts=2,ffn=64"
    model, cost = distir.load(sizes, {"batch": 8}, loss="cross-entropy", optimizer="adamw"), cost_of(None)
    plan = Plan(pp=2, zero=3, microbatches=4, split=(model_axes(model.function)["ep"].split(2),))
    price = stage_cost(cost, plan).op
    found: dict[str, set[bool]] = {}
    for op in place(Setting(model, 8, cost, 0.0), plan).ops:
        if axis_of(op) == "ep":
            found.setdefault(op.spec.name, set()).add(price(op) > 0)
    assert found["MPIAlltoall"] == {True}
    assert found["MPIReduceScatter"] == {False}
