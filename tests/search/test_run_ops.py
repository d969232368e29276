"""What is joined in a program that is cut and scheduled, is joined in the placed one; each part of that is needed."""

from __future__ import annotations

import pytest

from distir.api.compilation import distribute
from distir.api.model import load
from distir.executor.cost_model import CostModel
from distir.executor.cost_model.fusion import UNFUSED, Fused, fused
from distir.hardware import load_cluster, load_runtime
from distir.ir.function import Op
from distir.ir.host_runtime import Runtime
from distir.ir.spec import Spec
from distir.search import run_ops as module
from distir.search.bounds import adds_sums, step_cost
from distir.search.candidate_bounds import Bounds
from distir.search.exact import Setting, evaluate
from distir.search.placed_program import place, placed_program
from distir.search.run_ops import run_ops, with_others
from distir.search.segments import is_free, profile_of
from distir.search.space import Candidate
from distir.transforms.passes import bucketed_axes
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, RULES, phases
from distir.transforms.plan import Plan
from distir.transforms.rank.as_run import as_run
from distir.transforms.rank.recompose import recompose

GPT = "gpt:layers=2,hidden=64,heads=4,vocab=100,seq=32,dropout=0.1"
LLAMA = "llama:layers=2,hidden=64,heads=4,kv_heads=2,vocab=99,seq=32"
FUSING = ("megatron", "megatron-core", "torchtitan-compiled")


def named(op: Op) -> tuple[Spec, tuple[str, ...]]:
    """The same in functions of one program, for most ops."""
    return op.spec, tuple([v.name for v in op.inputs])


def joined_more(sizes: str, plan: Plan, runtime: Runtime) -> tuple[int, list[tuple[Fused, Fused]]]:
    """How many ops of a scheduled program do not move all, and what of these the bounds say less of."""
    model = load(sizes, {"batch": 24}, loss="cross-entropy", precision="bf16")
    cost = CostModel(load_cluster("dgx-a100", devices=plan.size), runtime=runtime)
    placed = place(Setting(model, 24, cost, 0.0), plan)
    most = {named(x.op): x for x in run_ops(placed, runtime.joins).values()}
    run = as_run(distribute(model, plan, cost.topology.devices[: plan.size]))
    repeated = {op.callee for op in run.ops if op.attributes.get("mb") is not None}
    count, less = 0, list[tuple[Fused, Fused]]()
    for f in run.callees():
        for op, x in fused(f, runtime.joins, f in repeated).items():
            if named(op) not in most:  # its operands have other names
                continue
            count += 1
            found = with_others(most[named(op)], runtime, f in repeated)
            if not (x.operands <= found.operands and x.result <= found.result and x.launched <= found.launched):
                less.append((x, found))
    return count, less


PLANS = [
    Plan(microbatches=2),
    Plan(dp=2, zero=3, microbatches=4),
    Plan(dp=3, zero=2),
    Plan(pp=2, tp=2, microbatches=4, sequence_parallel=True, recompute="selective"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("sizes", [GPT, LLAMA])
@pytest.mark.parametrize("name", FUSING)
def test_a_cut_joins_no_more(sizes: str, plan: Plan, name: str) -> None:
    runtime = load_runtime(name)
    count, less = joined_more(sizes, plan, runtime)
    assert count > 20
    assert less == []


@pytest.mark.parametrize("what", ["_chains", "ends_time", "with_others"])
def test_a_part_that_is_left_out_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load_runtime("megatron")
    if what == "_chains":
        monkeypatch.setattr(module, "fused", lambda f, runtime, repeated: {})
    elif what == "ends_time":
        monkeypatch.setattr(module, what, lambda op: False)
    else:
        monkeypatch.setattr("tests.search.test_run_ops.with_others", lambda run, runtime, repeated: run.fused)
    assert joined_more(GPT, Plan(microbatches=2), runtime)[1]


@pytest.mark.parametrize("repeated", [False, True])
def test_what_hosts_issue(repeated: bool) -> None:
    """Each op that no chain, or kernel of many tensors, launches; none where the host is the device."""
    model, plan = load(GPT, {"batch": 24}, loss="cross-entropy"), Plan(microbatches=24)
    topology = load_cluster("dgx-a100", devices=1)

    def issued(runtime: Runtime) -> float:
        cost = CostModel(topology, runtime=runtime)
        profile = profile_of(place(Setting(model, 24, cost, 0.0), plan), 1, bucketed_axes(plan), runtime)
        return step_cost(profile, 1, cost, {}, repeated).issued

    alone = Runtime("alone", op=2.0**-10)
    cost = CostModel(topology, runtime=alone)
    placed = recompose(place(Setting(model, 24, cost, 0.0), plan))
    phase = phases(placed)
    timed = [op for op in placed.ops if phase[op] in (FORWARD, BACKWARD) and not is_free(op) and not adds_sums(op)]
    ops = [op for op in timed if not cost.free(op.spec, op.attributes, [v.type for v in op.inputs])]
    assert issued(alone) == len(ops) * 2.0**-10
    chains = fused(placed, Runtime("fuses", fuses=True), True)
    assert issued(Runtime("fuses", op=2.0**-10, fuses=True)) == 2.0**-10 * sum(
        [not chains.get(op, UNFUSED).launched for op in ops]
    )
    products = [op for op in ops if op.spec.kernel]
    many = Runtime("many", op=2.0**-10, multi_tensor=True)
    assert issued(many) == 2.0**-10 * len(ops if repeated else products)
    assert issued(Runtime("inline", op=2.0**-10, inline=True)) == 0.0


@pytest.mark.parametrize("op", [0.0, 2.0**-10])
def test_calls_count_with_ops_that_are_issued(op: float) -> None:
    """A call is issued with the first op of a function; a host that issues none is not waited for."""
    model, call = load(GPT, {"batch": 8}, loss="cross-entropy"), 2.0**-6
    c, topology = Candidate(1, 1, 1, 1), load_cluster("dgx-a100", devices=1)

    def bound(runtime: Runtime) -> float:
        setting = Setting(model, 8, CostModel(topology, runtime=runtime), 0.0)
        found = Bounds(setting).of(c)[0]
        assert found <= evaluate(setting, c).seconds
        return found

    more = bound(Runtime("calls", op=op, call=call)) - bound(Runtime("none", op=op))
    assert more == pytest.approx(8 * 2 * call if op else 0.0, rel=1e-5)


def test_products_with_transposed_results_are_not_free() -> None:
    """The ranks compute the transposed result at once, where a placed program has a product and a view."""
    model, plan = load(GPT, {"batch": 8}, loss="cross-entropy"), Plan(microbatches=8)
    setting = Setting(model, 8, CostModel(load_cluster("dgx-a100", devices=1)), 0.0)
    placed = placed_program(place(setting, plan), RULES, bucketed_axes(plan), None)
    as_run = run_ops(placed.function, None)
    turned = [op for op in placed.timed if op.spec.alias and op in as_run and as_run[op].op.spec.kernel == "product"]
    assert turned
    for op in turned:
        assert op not in placed.free
        kind = placed.kinds[placed.kind[op]]
        assert kind is not None
        assert kind.op.spec is as_run[op].op.spec
