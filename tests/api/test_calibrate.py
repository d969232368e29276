"""Calibration: figures from synthetic measurements, the file that is written, and one run with tiny sizes."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import distir
from distir.api import calibrate as module
from distir.api import calibration_fit
from distir.api.calibrate import _FIT_PHASES, calibrate
from distir.api.calibration_fit import Figures, Links, fit_figures, fit_links, fit_steps, regular_of, to_toml
from distir.api.calibration_runs import TimedStep, Training, is_timed, perceptron, sample
from distir.api.calibration_suite import Suite, measured_again, split_programs, steps_on, suite, timed
from distir.api.compilation import distribute, simulated
from distir.executor.cost_model import CostModel
from distir.executor.cost_model.fitting import ProductFit, Sample
from distir.executor.simulator.labels import by_label
from distir.hardware import host_cache, load_cluster
from distir.ir.errors import UsageError, WorkerError
from distir.ir.function import Op
from distir.ir.topology import CoreSharing, OpSpeed, Regular, Topology
from distir.ir.type import Float32, Tensor
from distir.runtime.options import RunOptions
from distir.transforms.plan import Plan
from distir.transforms.rank.as_run import as_run

pytestmark = pytest.mark.usefixtures("preloaded")

SPEED = OpSpeed(5e-6, 5e10, 2e10)
FIGURES = Figures(
    "cpu",
    2,
    8e9,
    OpSpeed(2e-6, math.inf, 1e10),
    {"f32": ProductFit(5e-6, 5e10, 1e6), "f64": ProductFit(6e-6, 2e10, 0.0)},
    {("MatMul", "f32"): SPEED, ("Relu", "f32"): OpSpeed(1e-6, math.inf, 4e9)},
    Links(1e-4, 3e9, 2e-5, 8e-5, 2e9),
    5e-5,
    2e-5,
)


@pytest.mark.parametrize("name", ["mine", 'a "b" \\c', "größe 🙂"])
def test_any_name_can_be_read_again(tmp_path: Path, name: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(to_toml(FIGURES, name, "distir's own"), encoding="utf-8")
    regular = load_cluster(file).regular
    assert regular is not None
    assert regular.name == name


def steps(figures: Figures, ranks: int) -> list[TimedStep]:
    """Steps that take exactly what is predicted with these figures."""
    found: list[TimedStep] = []
    plans = {
        1: [distir.Plan(), distir.Plan(microbatches=2)],
        2: [distir.Plan(dp=2), distir.Plan(tp=2), distir.Plan(pp=2, microbatches=4)],
        4: [distir.Plan(dp=4), distir.Plan(tp=2, pp=2, microbatches=2)],
    }
    for width in (64, 512):
        model = distir.Model(perceptron([width] * 5, 64, Float32)).training("mse", "sgd")
        for plan in plans[ranks]:
            r = replace(regular_of(figures), per_node=4)
            program = distir.distribute(model, plan, Topology(r).devices[: plan.size])
            seconds = simulated(program, plan, CostModel(Topology(r), runtime=r.runtime)).seconds
            found.append(TimedStep(program, plan, seconds))
    return found


def test_the_file_gives_back_the_figures(tmp_path: Path) -> None:
    sharing = CoreSharing(2, 4e10, 0.75, 5e-4, 3e-4, 3 * 2**19, 2e-4)
    figures = replace(FIGURES, call=1e-5, sharing=sharing, ratios={1: (0.9, 1.2, 1.0), 4: (1.1, 1.3)})
    file = tmp_path / "mine.toml"
    file.write_text(to_toml(figures, "mine", "a test"))
    r = load_cluster(file).regular
    assert r is not None
    assert r.runtime is not None
    assert r.spec.throughput == (("f32", 5e10), ("f64", 2e10))
    assert dict(r.spec.ops) == {k: pytest.approx(x) for k, x in FIGURES.ops.items()}
    assert r.spec.half_size == pytest.approx(1e6)
    assert (r.spec.dram_bandwidth, r.spec.kernel_launch_overhead) == pytest.approx((1e10, 2e-6))
    assert (r.intra.latency, r.intra.bandwidth, r.intra.collective()) == pytest.approx((1e-4, 3e9, 2e9))
    assert (r.runtime.communication, r.runtime.transfer, r.runtime.call) == pytest.approx((5e-5, 2e-5, 1e-5))
    assert r.runtime.inline
    assert r.sharing == pytest.approx(sharing)
    assert r.residuals == ((1, 0.9, 1.2, 3), (4, 1.1, 1.3, 2))


def test_the_file_of_a_gpu_has_its_graphs_and_the_memory_that_software_takes(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(to_toml(replace(FIGURES, kind="gpu", context=7e8, workspace=2.0**25), "mine", "a test"))
    r = load_cluster(file).regular
    assert r is not None
    assert r.runtime is not None
    assert (r.spec.context, r.spec.workspace) == pytest.approx((7e8, 2**25), rel=1e-5)
    assert (r.runtime.graphs, r.runtime.inline) == (True, False)


def test_figures_of_exact_samples() -> None:
    sizes = [(64, 64), (256, 256), (64, 1024), (1024, 1024)]
    work = [(2.0 * m * n * n, 4.0 * (m * n + n * n + m * n)) for m, n in sizes]
    samples = [Sample("MatMul", "f32", "product", f, b, SPEED.seconds(f, b)) for f, b in work]
    samples += [Sample("Relu", "f32", "", b, b, 1e-6 + b / 4e9) for _, b in work]
    found = fit_figures(samples, replace(FIGURES, peaks={}, ops={}))
    assert found.ops["MatMul", "f32"] == pytest.approx(SPEED, rel=1e-6)
    assert found.peaks["f32"].flops == pytest.approx(5e10, rel=0.1)
    assert found.ops["Relu", "f32"] == pytest.approx(OpSpeed(1e-6, math.inf, 4e9), rel=1e-6)
    assert found.general == pytest.approx(OpSpeed(1e-6, math.inf, 4e9), rel=1e-6)


def test_no_op_has_more_than_the_peak() -> None:
    """Also not one whose few sizes do not tell what of its time is due to FLOPs, and what to bytes."""
    samples = [Sample("Gemm", "bf16", "product", f, 0.0, 1e-6 + f / 1e11) for f in (1e7, 1e8, 1e9)]
    samples += [Sample("MatMul", "bf16", "product", f, b, b / 1e9) for f, b in ((1e7, 1e6), (1e8, 9e6), (1e9, 8e7))]
    samples += [Sample("Relu", "f32", "", b, b, 1e-6 + b / 4e9) for b in (1e3, 1e5)]
    found = fit_figures(samples, replace(FIGURES, peaks={}, ops={}))
    rates = {op: found.ops[op, "bf16"].flops for op in ("Gemm", "MatMul")}
    assert max(rates.values()) <= found.peaks["bf16"].flops <= 1.26e11
    assert rates["Gemm"] == pytest.approx(1e11, rel=1e-3)


def test_errors_of_a_fit_are_of_ops_as_they_were_profiled() -> None:
    """Not of the figures for steps, in which ops take longer."""
    samples = [Sample("Relu", "f32", "", b, b, 1e-6 + b / 4e9) for b in (1e3, 1e5, 1e7)]
    samples += [Sample("MatMul", "f32", "product", f, f, 2e-6 + f / 1e11) for f in (1e6, 1e8, 1e9)]
    fitted = fit_figures(samples, FIGURES)
    rows = {row[0]: row[2:] for row in module._rows(fitted.slowed(1.5), fitted, samples)}
    assert rows["Relu f32"] == rows["MatMul f32"] == rows["products f32"] == ("0%", "0%", "3")


def test_layers_that_are_alike_count_once() -> None:
    """Sixteen products of one size: the fit is as with one of them, which took as long as most of them did."""
    work = [(1e6, 1.1), (3e6, 0.9), (1e8, 0.95), (1e9, 1.1)]
    others = [Sample("MatMul", "f32", "product", f, 0.0, (1e-6 + f / 1e11) * far) for f, far in work]
    others += [Sample("Relu", "f32", "", b, b, 1e-6 + b / 4e9) for b in (1e3, 1e5)]
    one, many, less = [
        fit_figures([*others, *[Sample("MatMul", "f32", "product", 3e7, 0.0, x) for x in alike]], FIGURES)
        for alike in ([3.3e-4], [3e-4] + [3.3e-4] * 14 + [5e-4], [3e-4])
    ]
    assert (one.ops, one.peaks) == (many.ops, many.peaks)
    assert one.ops != less.ops


def test_links_of_exact_timings() -> None:
    sizes = [1e3, 1e5, 1e7]
    found = fit_links([(n, 1e-4 + n / 3e9) for n in sizes], [(n, 2.5e-4 + n / 2e9) for n in sizes])
    assert found[:5] == pytest.approx((1e-4, 3e9, 5e-5, 1e-4, 2e9))
    assert found.error.worst < 1e-6
    # an all-reduce that takes less than two transfers
    quick = fit_links([(n, 1e-4 + n / 3e9) for n in sizes], [(n, 1.2e-4 + n / 2e9) for n in sizes])
    assert quick[:5] == pytest.approx((1e-4, 3e9, 0.0, 6e-5, 2e9), rel=1e-9, abs=1e-12)


def test_figures_of_exact_steps() -> None:
    """The links are as they were measured: what a transfer takes of a rank could as well be latency."""
    slower = 1.25
    sharing = CoreSharing(2, bandwidth=4e9, communication=0.85, jitter=4e-3, feeding=6e-4, cache=4096.0, cold=1.5e-4)
    true = replace(FIGURES, call=4e-5, sharing=sharing).slowed(slower)
    found = fit_steps(replace(FIGURES, cache=4096.0), {n: steps(true, n) for n in (1, 2, 4)})
    assert found.slower == pytest.approx(slower, rel=0.05)
    assert found.call == pytest.approx(4e-5 * slower, rel=0.2)
    assert found.ops["MatMul", "f32"] == pytest.approx(true.ops["MatMul", "f32"], rel=0.05)
    assert found.sharing is not None
    assert tuple(found.sharing) == pytest.approx(tuple(sharing), rel=0.15)
    assert found.transfer == pytest.approx(FIGURES.transfer, rel=0.1)
    assert found.links[:5] == pytest.approx(FIGURES.links[:5], rel=0.05)
    assert [len(found.ratios[n]) for n in (1, 2, 4)] == [4, 6, 4]
    assert all([0.95 < x < 1.05 for ratios in found.ratios.values() for x in ratios])


def test_steps_are_predicted_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [s for n in (1, 2, 4) for s in steps(FIGURES, n)]
    slower = FIGURES.slowed(1.5)
    monkeypatch.setattr(calibration_fit, "host_cores", lambda: 3)
    for count in (len(measured), 2, 1):
        expected = [calibration_fit.ratios_of(x, measured[:count]) for x in (FIGURES, slower)]
        with calibration_fit.side_by_side(measured[:count]) as ratios:
            assert [ratios(FIGURES), ratios(slower)] == expected
    monkeypatch.setattr(calibration_fit, "_ratio_of", _killed)
    with pytest.raises(WorkerError, match="ended from outside"), calibration_fit.side_by_side(measured) as ratios:
        ratios(FIGURES)


def _killed(cluster: Regular, k: int) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def test_what_is_expected_holds_back_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps on two ranks take three times as long as predicted, as if other programs ran: latencies follow less
    than if nothing was known of them."""
    true = replace(FIGURES, call=1e-5, sharing=CoreSharing(2, jitter=5e-4, feeding=5e-4))
    measured = {n: steps(true, n) for n in (1, 2)}
    measured[2] = [s._replace(seconds=s.seconds * (3 if k < 3 else 1)) for k, s in enumerate(measured[2])]
    far: list[float] = []
    for noise in (0.1, 1e-6):
        monkeypatch.setattr(calibration_fit, "_NOISE", noise)
        links, known = fit_steps(FIGURES, measured).links, FIGURES.links
        far.append(math.hypot(math.log(links.step / known.step), math.log(links.latency / known.latency)))
    assert far[0] < 0.7 * far[1]


def test_a_step_that_something_disturbed_decides_little() -> None:
    true = replace(FIGURES, call=1e-5, sharing=CoreSharing(2, jitter=5e-4, feeding=5e-5, cold=1.5e-4))
    measured = {n: steps(true, n) for n in (1, 2, 4)}
    measured[2][3] = measured[2][3]._replace(seconds=3 * measured[2][3].seconds)
    found = fit_steps(FIGURES, measured)
    assert found.slower == pytest.approx(1.0, rel=0.03)
    others = [x for n in (1, 2, 4) for k, x in enumerate(found.ratios[n]) if (n, k) != (2, 3)]
    assert others == pytest.approx([1.0] * len(others), rel=0.05)


def test_the_shortest_steps_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, on two ranks at most; the geometric mean counts."""
    three = [Training(f"8,{n},8", 16, "sgd", 2) for n in (8, 16, 32)]
    what = Suite(three, None, (), (1, 2, 4), (64,), spread=(0, 1, 2))
    assert not measured_again(what, "cuda").trainings
    assert not measured_again(what, "cuda").ranks
    done: list[tuple[Any, ...]] = []

    def measured(model: distir.Model, plan: distir.Plan, *rest: object) -> TimedStep:
        done.append((model.function.inputs[1].type, plan))
        return TimedStep(model.function, plan, 4.0 ** done.count(done[-1]))

    monkeypatch.setattr(module, "measure_step", measured)
    again = measured_again(what, "cpu")
    found = module._measure_steps((what, again), RunOptions(device="cpu"), module._Phases(None, 0))
    seconds = {n: [s.seconds for s in rows] for n, rows in found.items()}
    assert seconds[1] == pytest.approx([8.0] * 4 + [4.0] * 2)
    assert seconds[2] == pytest.approx([8.0] * 8 + [4.0] * 4)
    assert set(seconds[4]) == {4.0}


def test_what_steps_do_not_show_stays_as_expected() -> None:
    """Of two ranks on two cores, whose tensors their caches hold, under data parallelism."""
    sharing = CoreSharing(2, jitter=5e-4, feeding=5e-4, cache=2.0**30)
    true = replace(FIGURES, call=1e-5, sharing=sharing)
    known = replace(FIGURES, cache=2.0**30)
    found = fit_steps(known, {1: steps(true, 1), 2: [s for s in steps(true, 2) if s.plan == distir.Plan(dp=2)]})
    assert found.sharing is not None
    assert found.sharing.bandwidth == pytest.approx(FIGURES.general.bandwidth)
    assert (found.transfer, found.links.latency) == pytest.approx((known.transfer, known.links.latency))


def test_some_training_steps_are_timed_on_several_ranks() -> None:
    """The first of them is too small for four."""
    three = [Training(f"8,{n},8", 16, "sgd", 2) for n in (8, 16, 32)]
    what = Suite(three, None, (), (1, 2, 4), (64,), spread=(0, 2))
    found = {n: [three.index(t) for t, _ in timed(what, n)] for n in what.ranks}
    assert found == {1: [0, 1, 2], 2: [0, 2], 4: [2]}


def test_the_host_of_a_gpu_issues_ops() -> None:
    gpu = replace(FIGURES, kind="gpu")
    slow = replace(gpu, op=8e-5)
    alone, launched = steps(FIGURES, 1), steps(slow, 1)
    measured = [step._replace(seconds=s.seconds, launched=True) for step, s in zip(alone, launched, strict=True)]
    found = fit_steps(
        gpu, {1: [*[s._replace(seconds=g.seconds) for s, g in zip(alone, steps(gpu, 1), strict=True)], *measured]}
    )
    assert found.ratios[1] == pytest.approx([1.0] * len(alone), rel=0.05)
    assert found.op == pytest.approx(8e-5, rel=0.1)
    assert found.sharing == CoreSharing(2, communication=0.0)


def test_kernels_of_a_graph_follow_each_other_closely() -> None:
    """Launches are shorter by one time for all ops, whatever they take themselves."""
    long = OpSpeed(2e-5, math.inf, 4e9)
    gpu = replace(FIGURES, kind="gpu", ops=FIGURES.ops | {("Relu", "f32"): long})
    exact = gpu.slowed(1.25, 1.5e-6)
    assert exact.ops["Relu", "f32"].launch == pytest.approx(1.25 * 1.85e-5)
    assert exact.general.launch == pytest.approx(1.25 * 0.5e-6)
    pairs = zip(steps(FIGURES, 1), steps(exact, 1), strict=True)
    found = fit_steps(gpu, {1: [step._replace(seconds=s.seconds) for step, s in pairs]})
    assert found.ops["Relu", "f32"].launch == pytest.approx(1.25 * 1.85e-5, rel=0.05)
    assert found.ratios[1] == pytest.approx([1.0] * len(found.ratios[1]), rel=0.03)


def test_no_op_of_a_gpu_is_left_out_of_its_fit() -> None:
    """A sample that is unlike the others: on a CPU it was disturbed, on a GPU kernels differ."""
    samples = [Sample("Gelu", "f32", "", 0.0, n * 1e6, n * 1e-6) for n in (1, 2, 3, 4, 8)]
    samples.append(Sample("Gelu", "f32", "", 0.0, 6e6, 3e-5))
    cpu, gpu = (fit_figures(samples, replace(FIGURES, kind=kind)).ops["Gelu", "f32"] for kind in ("cpu", "gpu"))
    assert cpu.seconds(0, 4e6) == pytest.approx(4e-6, rel=0.01)
    assert gpu.seconds(0, 4e6) > 4.1e-6


def test_residuals_are_the_extremes_of_steps(tmp_path: Path) -> None:
    exact = steps(FIGURES, 1)
    off = [step._replace(seconds=step.seconds * factor) for step, factor in zip(exact, (0.8, 1, 1, 1.25), strict=True)]
    found = fit_steps(FIGURES, {1: off})
    file = tmp_path / "mine.toml"
    file.write_text(to_toml(found, "mine", "a test"))
    regular = load_cluster(file).regular
    assert regular is not None
    [residuals] = regular.residuals
    assert residuals == pytest.approx((1, min(found.ratios[1]), max(found.ratios[1]), 4), rel=1e-5)
    assert residuals.high / residuals.low > 1.2


@pytest.mark.parametrize(
    ("out", "message"), [("mine.txt", "is a .toml file"), ("none/mine.toml", "no folder"), ("f.toml", "it is a folder")]
)
def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, message: str
) -> None:
    (tmp_path / "f.toml").mkdir()
    monkeypatch.setattr(module, "_machine", lambda device: pytest.fail("something was measured"))
    with pytest.raises(UsageError, match=message):
        calibrate("cpu", tmp_path / out)


def test_cuda_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from distir.backends.processes import preflight

    monkeypatch.setattr(preflight, "gpus", lambda: (0, 0.0))
    with pytest.raises(UsageError, match="--device cuda needs a GPU"):
        calibrate("cuda")


TINY = Suite([Training("16,32,8", 16, "sgd", 2, microbatches=(1, 2))], None, (), (1,), (64, 4096))


def is_scalar(op: Op) -> bool:
    t = op.outputs[0].type
    return isinstance(t, Tensor) and not t.shape


@pytest.mark.parametrize(("device", "least"), [("cpu", 3.9e5), ("cuda", 1.5e7)])
def test_ops_of_floats_are_timed_where_bytes_count(device: str, least: float) -> None:
    """Not only in sizes at which most of their time is the launch: their bandwidth would be anything."""
    largest: dict[str, float] = {}
    for training in suite(device, 2).trainings:
        for n in training.microbatches:
            program = as_run(distribute(training.model(), Plan(microbatches=n)))
            for op in filter(is_timed, by_label(program).values()):
                found = sample(op, 1.0)
                if found.dtype in ("f32", "bf16") and not is_scalar(op):
                    largest[found.op] = max(found.bytes, largest.get(found.op, 0.0))
    assert "Accumulate" in largest  # of gradients
    assert not {op for op, size in largest.items() if size < least}


def timed_ops(model: distir.Model, plan: Plan) -> set[str]:
    """The ops of floats of a program that compute in a time of their own."""
    ops = [op for op in by_label(as_run(distribute(model, plan))).values() if is_timed(op) and op.outputs]
    return {found.op for op in ops if not is_scalar(op) and (found := sample(op, 1.0)).dtype == "f32"}


def test_ops_of_split_programs_are_timed() -> None:
    """A program on several ranks has ops that none on one rank has, such as the sums of a loss over split classes."""
    what = suite("cpu", 2)
    known = set[str]().union(*[timed_ops(t.model(), Plan(microbatches=n)) for t in what.trainings for n in (1, 2)])
    split = set[str]().union(*[timed_ops(t.model(), plan) for t, plan in split_programs(what)])
    assert {"LogitSums", "AdamW"} <= split - known
    for t, _ in timed(what, 2):
        for plan in (Plan(dp=2), Plan(tp=2), Plan(pp=2, microbatches=4), Plan(dp=2, pp=2), Plan(tp=2, pp=2)):
            assert timed_ops(t.model(), plan) <= known | split, plan


@pytest.mark.slow
def test_a_calibration_on_two_ranks() -> None:
    """Of ops of split programs, too."""
    sizes = [f"gpt:layers=1,hidden={n},heads=2,vocab={4 * n},seq=8" for n in (8, 16)]
    what = Suite([Training(x, 4, "sgd", 2) for x in sizes], None, (), (1, 2), (64, 4096), spread=(0, 1))
    phases: list[str] = []
    done = calibrate("cpu", None, lambda name, number, total: phases.append(f"{number} {total}"), what)
    assert len(phases) + _FIT_PHASES - 1 == int(phases[0].split()[1])  # the fit is the last
    assert ("LogitSums", "f32") in done.figures.ops
    assert done.figures.sharing is not None
    assert done.figures.sharing.cache == host_cache() > 0


def test_a_calibration(tmp_path: Path) -> None:
    """With tiny sizes, on one rank: how good the fit is, is not asked here."""
    out = tmp_path / "mine.toml"
    phases: list[str] = []
    done = calibrate("cpu", out, lambda what, number, total: phases.append(f"{number} {total}"), TINY)
    assert len(phases) + _FIT_PHASES - 1 == int(phases[0].split()[1])  # the fit is the last
    assert ("Accumulate", "f32") in done.figures.ops
    assert str(out) in str(done)
    prediction = distir.simulate(perceptron([16, 32, 8], 16, Float32), cluster=str(out))
    assert prediction.interval is not None
    low, high = min(done.figures.ratios[1]), max(done.figures.ratios[1])
    expected = min(1.0, low) * prediction.step_seconds, max(1.0, high) * prediction.step_seconds
    assert prediction.interval == pytest.approx(expected, rel=1e-5)


@pytest.mark.gpu
def test_a_calibration_on_a_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    out = tmp_path / "mine.toml"
    calibrate("cuda", out, None, TINY)
    regular = load_cluster(out).regular
    assert regular is not None
    assert regular.runtime is not None
    assert (regular.kind, regular.runtime.inline) == ("gpu", False)


def test_long_steps_on_several_ranks_are_fewer() -> None:
    t = Training("8,8", 4, "sgd", 100)
    assert [steps_on(n, t, 0.001) for n in (1, 2, 4, 64)] == [100, 100, 100, 19]
    assert [steps_on(n, t, 0.02) for n in (1, 2, 4, 64)] == [100, 30, 15, 6]
    assert steps_on(2, t, None) == 100
    assert steps_on(2, t._replace(steps=3), 10.0) == 3  # never more than on one
