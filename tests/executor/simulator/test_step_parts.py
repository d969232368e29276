"""Where the time of a step goes: disjoint parts that add up to it, against the events of its trace and the textbook."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import distir
from distir.executor.cost_model.seconds import work
from distir.executor.simulator import busy
from distir.executor.simulator.labels import COMPUTE, SEND
from distir.executor.simulator.simulation import Simulation
from distir.executor.simulator.step_parts import (
    BELOW_PEAK,
    DEPENDENCY,
    IDEAL,
    IMBALANCE,
    OPTIMIZER,
    RECOMPUTATION,
    WARM_UP,
    StageParts,
    step_parts,
)
from distir.executor.simulator.trace import VIEW, expand_model
from distir.ir import Role
from distir.ir.errors import InfeasibleError
from distir.ir.type import Float32, Tensor
from distir.transforms.differentiation.training import SGD, training_step
from tests.executor.test_bubbles import simulate as pipeline

GPT = "gpt:layers=4,hidden=32,heads=4,seq=16,batch=16,vocab=64"


@cache
def gpt() -> distir.Model:
    """A small GPT."""
    return distir.load(GPT, loss="cross-entropy", optimizer="adamw")


def exposed_in_trace(simulation: Simulation, c: int) -> dict[str, float]:
    """The seconds in which a device of a class communicates and does not compute, by stream, from its events."""
    device = repr(simulation.program.classes.first[c])
    spans = [(e.ts, e.ts + e.dur, e.tid) for e in simulation.trace if e.pid == device and e.tid != VIEW and e.dur]
    edges = sorted({t for a, b, _ in spans for t in (a, b)})
    found: dict[str, float] = {}
    for a, b in pairwise(edges):
        streams = {name.split(" ")[0] for x, y, name in spans if x <= a and b <= y}
        streams = {SEND if name == "recv" else name for name in streams}
        if streams and COMPUTE not in streams:
            for name in streams:
                found[name] = found.get(name, 0.0) + (b - a) / len(streams)
    return found


def check(simulation: Simulation, rows: list[StageParts]) -> None:
    """The parts add up to the step, and to the stages' compute, communication and bubble."""
    for row, stage in zip(rows, simulation.stages, strict=True):
        assert min(row.parts.values()) >= -1e-12
        assert math.fsum(row.parts.values()) == pytest.approx(simulation.seconds, rel=1e-9)
        assert math.fsum(row.compute.values()) == pytest.approx(stage.compute, rel=1e-9)
        assert math.fsum(row.exposed.values()) == pytest.approx(stage.communication, rel=1e-9, abs=1e-12)
        assert math.fsum(row.bubble.values()) == pytest.approx(stage.bubble, rel=1e-9, abs=1e-12)


NOTHING_SAVED = {"degrees": (1, 1, 4), "microbatches": 1, "zero": 0, "recompute": "full"}


@example(**NOTHING_SAVED, schedule="1f1b", sequence=False, runtime=None)
@settings(max_examples=25, deadline=None)
@given(
    degrees=st.sampled_from([(1, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2)]),
    microbatches=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    zero=st.sampled_from([0, 1, 3]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    sequence=st.booleans(),
    runtime=st.sampled_from([None, "torch-eager", "megatron", "megatron+sync", "megatron-core", "composer"]),
)
def test_parts_add_up_and_agree_with_the_trace(degrees, microbatches, schedule, zero, recompute, sequence, runtime):
    dp, tp, pp = degrees
    more = {"zero": zero, "recompute": recompute, "sequence_parallel": sequence and tp > 1}
    plan = distir.Plan(dp, tp, pp, microbatches, schedule if pp > 1 else "1f1b", **more)
    try:
        simulation = distir.simulate(gpt(), plan, "dgx-a100", runtime=runtime).simulation
    except InfeasibleError:
        return
    rows = step_parts(simulation)
    check(simulation, rows)
    for c, row in enumerate(rows):
        assert {k: x for k, x in row.exposed.items() if x} == pytest.approx(exposed_in_trace(simulation, c), abs=1e-12)
        assert (row.compute[RECOMPUTATION] > 0) == (recompute != "none")
        assert row.compute[OPTIMIZER] > 0
        assert row.compute[IDEAL] > 0


@pytest.mark.parametrize("plan", [distir.Plan(), distir.Plan(dp=2, tp=2, microbatches=2), distir.Plan(dp=4, zero=3)])
@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputation_is_what_it_costs(plan, how):
    """Without a runtime, and with nothing to fuse, the other compute stays the same."""
    before = step_parts(distir.simulate(gpt(), plan, "dgx-a100").simulation)[0].compute
    again = step_parts(distir.simulate(gpt(), replace(plan, recompute=how), "dgx-a100").simulation)[0].compute
    assert before[RECOMPUTATION] == 0
    assert again[RECOMPUTATION] > 0
    for part in (IDEAL, BELOW_PEAK, OPTIMIZER):
        assert again[part] == pytest.approx(before[part], rel=1e-9)


def test_ideal_compute_is_that_of_the_products():
    """Three products of 2 B n n FLOPs a layer: forward, and the gradients of the weight and of the layer before."""
    b, n, layers = 8, 1024, 3
    f = distir.FunctionMaker("products")
    x = f.add_input_value("x", Tensor(Float32, (b, n)), Role("data", 0))
    for i in range(layers):
        w = f.add_input_value(f"w{i}", Tensor(Float32, (n, n)), Role("parameter"))
        x = f.emit("Relu", f.emit("MatMul", x, w))
    f.set_outputs([x])
    simulation = distir.simulate(training_step(f.finalize(), "mse", SGD()), cluster="dgx-a100").simulation
    (row,) = step_parts(simulation)
    peak = simulation.program.cost.topology.spec(simulation.program.classes.first[0]).peak("f32")
    assert row.compute[IDEAL] == pytest.approx((3 * layers - 1) * 2 * b * n * n / peak)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (3, 7), (4, 8)])
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_the_bubble_of_equal_stages_is_warm_up(p, m, schedule, backward):
    """(p - 1)(f + b): Narayanan et al., SC'21, section 2.2.1."""
    for row in step_parts(pipeline(p, m, 1, schedule, backward)):
        assert row.bubble == {WARM_UP: (p - 1) * (1 + backward), IMBALANCE: 0, DEPENDENCY: 0}


def test_equal_calls_are_counted_once_though_hosts_run_ahead_further_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of which intervals are computed do not grow with the microbatches."""
    expanded: list[int] = []

    def counted(*args):
        expanded[-1] += 1
        return expand_model(*args)

    monkeypatch.setattr(busy, "expand_model", counted)
    for microbatches in (16, 32):
        expanded.append(0)
        name = f"gpt:layers=4,hidden=4096,heads=32,seq=2048,vocab=64,batch={microbatches}"
        plan = distir.Plan(pp=4, microbatches=microbatches)
        model = distir.load(name, loss="cross-entropy")
        step_parts(distir.simulate(model, plan, "dgx-a100", runtime="megatron-core").simulation)
    assert expanded[0] == expanded[1] < 4 * 16


def test_a_stage_with_less_work_waits_for_the_busiest():
    """Three layers on the first of two stages, one on the other."""
    plan = distir.Plan(pp=2, microbatches=8, cut=("3.norm1.weight",))
    model = distir.load(GPT, loss="cross-entropy")
    simulation = distir.simulate(model, plan, "dgx-a100").simulation
    busy, idle = step_parts(simulation)
    assert busy.bubble[IMBALANCE] == 0
    stages = simulation.stages
    less = (stages[0].compute + stages[0].communication) - (stages[1].compute + stages[1].communication)
    assert less > 0
    assert 0 < idle.bubble[IMBALANCE] <= less
    assert idle.bubble[DEPENDENCY] == 0 or idle.bubble[IMBALANCE] == pytest.approx(less)


def test_products_in_8_bits_count_at_their_peak() -> None:
    """The FLOPs of products of weights at the device's peak of 8 bits, those of attention at that of 16."""
    sizes = "gpt:layers=2,hidden=1024,heads=8,vocab=1024,seq=512,batch=8"
    model = distir.load(sizes, loss="cross-entropy", precision="bf16")
    prediction = distir.simulate(model, distir.Plan(), "dgx-h100", runtime="torch-compiled+fp8")
    peaks = {"product": 1979e12, "attention": 989e12}
    ideal = 0.0
    for op in model.function.ops:
        if op.spec.kernel:
            flops, _ = work(op.spec, op.attributes, [v.type for v in op.inputs], [v.type for v in op.outputs])
            ideal += flops / peaks[op.spec.kernel]
    assert prediction.utilization * prediction.step_seconds == pytest.approx(ideal, rel=0.01)


def ideal_seconds(model: distir.Model, peak: float) -> float:
    """Of the model's products and attention on one device, by hand."""
    ops = [op for op in model.function.ops if op.spec.kernel]
    flops = [work(op.spec, op.attributes, [v.type for v in op.inputs], [v.type for v in op.outputs])[0] for op in ops]
    return sum(flops) / peak


def test_what_all_shards_compute_counts_once_in_the_utilization() -> None:
    """4 heads of keys do not divide by 8: attention is whole on each of 8 devices."""
    text = "llama:layers=2,hidden=1024,heads=16,kv_heads=4,ffn=2816,vocab=32000,seq=2048,batch=2"
    model = distir.load(text, loss="cross-entropy", precision="bf16")
    prediction = distir.simulate(model, distir.Plan(tp=8), "dgx-h100")
    ideal = ideal_seconds(model, 989e12) / 8
    assert prediction.utilization * prediction.step_seconds == pytest.approx(ideal, rel=1e-3)
    (stage,) = step_parts(prediction.simulation)
    assert stage.compute[IDEAL] > 1.2 * ideal


def test_in_zigzag_each_device_has_an_equal_part_of_causal_attention() -> None:
    """Of runtimes whose context parallelism splits queries so; in a row the last device has the most keys."""
    text = "llama:layers=2,hidden=1024,heads=8,vocab=1024,seq=32768,batch=1"
    model = distir.load(text, loss="cross-entropy", precision="bf16")
    plan = distir.Plan(split=("cp=4:*.1",))  # type: ignore[arg-type]
    part = ideal_seconds(model, 989e12) / 4
    found: list[float] = []
    for runtime in ("megatron-core", "torch-eager"):
        prediction = distir.simulate(model, plan, "dgx-h100", runtime=runtime)
        assert prediction.utilization * prediction.step_seconds == pytest.approx(part, rel=1e-3)
        (stage,) = step_parts(prediction.simulation)
        found.append(stage.compute[IDEAL])
    assert found[0] == pytest.approx(part, rel=1e-3)
    assert found[1] > 1.3 * part
