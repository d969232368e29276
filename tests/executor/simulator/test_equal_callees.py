"""Stages that are the same up to their mesh: what is taken from one for another is what its own code would give."""

from __future__ import annotations

import pytest

import distir
from distir.api import distribute, load
from distir.executor.cost_model import CostModel, fusion
from distir.executor.simulator import categories, lifetimes
from distir.executor.simulator import compile as lowering
from distir.executor.simulator.categories import (
    ACTIVATION,
    CATEGORIES,
    GRADIENT,
    PARAMETER,
    STATE,
    Categories,
    leaves,
)
from distir.executor.simulator.compile import CompiledProgram
from distir.executor.simulator.equal_callees import shapes_of
from distir.executor.simulator.maxplus import Call, Code, Twin
from distir.executor.simulator.simulation import Simulation, Simulator
from distir.ir import Function, Topology
from distir.ir.host_runtime import Runtime
from distir.models import mlp
from distir.transforms import parallel_transform_3d
from distir.transforms.plan import Plan
from distir.transforms.relocate import relocate


def plan(topology: Topology, d: int, h: int, p: int) -> Function:
    return parallel_transform_3d(mlp(8, 16, 16), d, h, p, topology.devices[: d * h * p], 4)


def topology(slow: int | None = None, far: int | None = None) -> Topology:
    """Eight devices, one of which may compute or communicate more slowly."""
    t = Topology()
    for i in range(8):
        t.add_device("gpu", 1e9 if i != slow else 5e8, 1e9)
    for i, a in enumerate(t.devices):
        for k, b in enumerate(t.devices[:i]):
            t.set_bandwidth(a, b, 8 if far not in (i, k) else 2)
    return t


def bodies(program: CompiledProgram) -> list[Code | Twin]:
    return [program.body(f) for f in program.function.callees()]


@pytest.mark.parametrize(("d", "h", "p"), [(1, 1, 8), (2, 1, 4), (1, 2, 4)])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_twin_is_its_own_code(d: int, h: int, p: int, overlap: bool):
    t = topology()
    program = CompiledProgram(plan(t, d, h, p), CostModel(t), overlap)
    twins = [b for b in bodies(program) if isinstance(b, Twin)]
    assert twins
    for twin in twins:
        own = twin.code
        assert own.function is twin.function
        assert (twin.columns, twin.outputs, twin.streams, twin.passed, twin.dominated) == (
            own.columns,
            own.outputs,
            own.streams,
            own.passed,
            own.dominated,
        )
    for call in program.main.plans:
        if isinstance(call, Call):
            assert (call.rows, call.streams) == (call.body.summary(call.live), call.body.streams)


@pytest.mark.parametrize("slow", [None, 0, 3, 7])
@pytest.mark.parametrize("far", [None, 3, 6])
@pytest.mark.parametrize(("d", "h", "p"), [(1, 1, 8), (2, 1, 4), (1, 2, 4)])
def test_each_stage_with_its_own_code_takes_as_long(
    monkeypatch: pytest.MonkeyPatch, slow: int | None, far: int | None, d: int, h: int, p: int
):
    t = topology(slow, far)
    program = plan(t, d, h, p)
    shared = Simulator(CostModel(t)).interpret(program)
    monkeypatch.setattr(CompiledProgram, "_twin", lambda self, callee: None)  # pyright: ignore[reportUnknownLambdaType]
    own = Simulator(CostModel(t)).interpret(plan(t, d, h, p))
    assert dict(shared.timestamps) == dict(own.timestamps)
    assert shared.stages == own.stages


def test_the_peaks_of_more_equal_stages_take_no_more_evaluations() -> None:
    sizes = []
    for p in (4, 8):
        t = topology()
        function = parallel_transform_3d(mlp(2 * p, 16, 16), 1, 1, p, t.devices[:p], 2 * p)
        simulation = Simulator(CostModel(t)).interpret(function)
        assert [simulation.peak_memory[d] for d in t.devices[:p]] == [simulation.memory(d).total for d in t.devices[:p]]
        sizes.append(len(simulation._totals._results))
    assert sizes[0] == sizes[1]


def test_peaks_are_not_counted_again_after_categories() -> None:
    t = topology()
    function = plan(t, 1, 2, 4)
    alone, after = (Simulator(CostModel(t)).interpret(function) for _ in range(2))
    devices = t.devices[:8]
    assert all(sum(after.memory_at_peak(d).values()) == alone.peak_memory[d] > 0 for d in devices)
    assert [after.peak_memory[d] for d in devices] == [alone.peak_memory[d] for d in devices]
    assert "_totals" not in after.__dict__


def test_kinds_of_ops_are_found_once_for_all_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    t = topology()
    function = plan(t, 1, 2, 4)
    runtimes = [Runtime("a", op=1e-6, fuses=True), Runtime("b", op=2e-6, call=1e-5, fuses=True), Runtime("c", op=1e-6)]
    looked: list[Function] = []

    def fused(f: Function, runtime: Runtime | None, repeated: bool) -> object:
        looked.append(f)
        return fusion.fused(f, runtime, repeated)

    monkeypatch.setattr(lowering, "fused", fused)
    counts = []
    for runtime in runtimes:
        CompiledProgram(function, CostModel(t, runtime=runtime))
        counts.append(len(looked))
    assert counts[0] == counts[1] < counts[2]  # c does not fuse


def seen(simulation: Simulation) -> list[tuple[object, ...]]:
    """Its trace, in names and numbers."""
    return [(e.name, e.ts, e.dur, e.pid, e.tid) for e in simulation.trace]


def test_only_seconds_are_found_anew_for_other_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(speed: float, link: float) -> Topology:
        t = Topology()
        devices = [t.add_device("gpu", speed * 1e9, speed * 1e9) for _ in range(8)]
        for i, a in enumerate(devices):
            for b in devices[:i]:
                t.set_bandwidth(a, b, 8 * link)
        return t

    t = topology()
    function = plan(t, 1, 2, 4)
    built: list[Function] = []
    build = CompiledProgram._built

    def building(self: CompiledProgram, f: Function, entry: bool) -> Code:
        built.append(f)
        return build(self, f, entry)

    monkeypatch.setattr(CompiledProgram, "_built", building)
    counts: list[int] = []
    for there in (of(1, 1), of(2, 2), of(1, 64), topology(slow=3), t):
        built.clear()
        got = Simulator(CostModel(there)).interpret(function)
        counts.append(len(built))
        anew = Simulator(CostModel(there)).interpret(plan(t, 1, 2, 4))
        assert (dict(got.timestamps), got.stages) == (dict(anew.timestamps), anew.stages)
        assert seen(got) == seen(anew)
    anew, *others, slow, again = counts
    assert others == [0, 0]
    assert 1 < anew < slow  # with a slow device the classes are others
    assert again == anew


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_stages_share_is_what_each_has_alone(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    """Categories, ops within kernels and peaks, of stages with weights in 16 bits and states of the optimizer."""
    t = topology()
    name = "gpt:layers=8,hidden=16,heads=2,vocab=32,seq=8,batch=8"
    model = load(name, loss="cross-entropy", optimizer="adamw", precision="bf16")
    program = distribute(model, Plan(tp=2, pp=4, microbatches=4, recompute=recompute))
    program = relocate(program, t.devices)
    runtime = Runtime("host", fuses=True)

    def found() -> tuple[object, ...]:
        simulation = Simulator(CostModel(t, runtime=runtime)).interpret(program)
        labels, unwritten = Categories(program).labels, simulation.program.unwritten
        return labels, unwritten, dict(simulation.peak_memory), [simulation.memory_at_peak(d) for d in t.devices]

    shared = found()
    assert len(set(shapes_of(program).values())) > len({n for n, _ in shapes_of(program).values()})
    for module in (lowering, categories, lifetimes):
        monkeypatch.setattr(module, "shapes_of", lambda f: {})  # pyright: ignore[reportUnknownLambdaType]
    program.cache.clear()
    alone = found()
    assert {PARAMETER, GRADIENT, STATE, ACTIVATION} <= set(alone[0].values())  # type: ignore[attr-defined]
    assert alone[1]
    assert shared == alone


@pytest.mark.parametrize("zero", [0, 1])
def test_categories_of_a_place_are_those_of_the_program(zero: int) -> None:
    """Those of a tied weight's gradients too, which are made on another stage than the weight's."""
    model = load("gpt:layers=4,hidden=16,heads=2,vocab=32,seq=8,batch=8", loss="cross-entropy", optimizer="adamw")
    program = distribute(model, Plan(dp=2, pp=4, microbatches=2, zero=zero))
    program = relocate(program, topology().devices)
    compiled, every = CompiledProgram(program, CostModel(topology())), Categories(program)
    found: set[int] = set()
    for c in range(len(compiled.classes.sizes)):
        here = Categories(program, lambda t, c=c: c in compiled.classes_of(t))
        assert len(here.labels) < len(every.labels)
        for op in [op for f in (program, *program.callees()) for op in f.ops]:
            for v in [v for v in op.outputs if c in compiled.classes_of(v.type)]:
                kinds = [every.of(v, i, t) for i, t in enumerate(leaves(v.type))]
                assert kinds == [here.of(v, i, t) for i, t in enumerate(leaves(v.type))]
                found.update(kinds)
    assert found == set(range(len(CATEGORIES)))


def test_a_printed_prediction_counts_the_memory_of_one_class_once() -> None:
    prediction = distir.simulate("gpt:layers=1,hidden=16,heads=2,seq=4,batch=2,vocab=8", distir.Plan(), "dgx-a100")
    assert str(prediction)
    assert "_totals" not in prediction.simulation.__dict__
