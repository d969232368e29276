"""Cluster files of machines that were measured: speeds of ops, a runtime, ranks that share cores, intervals."""

from __future__ import annotations

from pathlib import Path

import pytest

import distir
from distir.api.calibration_runs import perceptron
from distir.api.compilation import cost_model
from distir.executor.cost_model import CostModel
from distir.executor.cost_model.seconds import work
from distir.hardware import interpolated, load_cluster, load_runtime
from distir.ir import FunctionMaker
from distir.ir.errors import UsageError
from distir.ir.spec import lookup
from distir.ir.topology import CoreSharing, OpSpeed, Residuals
from distir.ir.type import BFloat16, DType, Float32, Float64, Int64, Tensor

FILE = """
name = "mine"

[device]
kind = "cpu"
memory_gb = 8
memory_gbs = 10
launch_us = 2

[device.peak_tflops]
f32 = 0.1

[device.ops.f32.Relu]
launch_us = 100
gbs = 1

[node]
devices = 2
link_gbs = 1
link_us = 10

[network]
link_gbs = 1
link_us = 10

[runtime]
communication_us = 50
transfer_us = 20
call_us = 0
inline = true

[sharing]
cores = 2
bandwidth_gbs = 40
communication = 0.25
cache_mib = 0.5
jitter_us = 40
feeding_us = 300

[[residuals]]
ranks = 1
low = 0.9
high = 1.2
steps = 10

[[residuals]]
ranks = 2
low = 0.5
high = 2
steps = 8
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return path


def relus(n: int, dtype: DType = Float32, elements: int = 1000) -> distir.Function:
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(dtype, (elements,)))
    for k in range(n):
        x = f.add_op("Relu", f"y{k}", [x])
    f.set_outputs([x])
    return f.finalize()


def test_an_op_takes_its_measured_seconds(file: Path) -> None:
    cost = cost_model(file, distir.Plan())
    ((key, speed),) = cost.topology.spec(cost.topology.devices[0]).ops
    assert (key, speed) == (("Relu", "f32"), pytest.approx(OpSpeed(1e-4, bandwidth=1e9)))
    assert distir.simulate(relus(2), cluster=file).step_seconds == pytest.approx(2 * (1e-4 + 8000 / 1e9))
    # another dtype has the general figures
    assert distir.simulate(relus(2, Float64), cluster=file).step_seconds == pytest.approx(2 * (2e-6 + 16000 / 10e9))


def test_a_prediction_has_an_interval(file: Path) -> None:
    found = distir.simulate(relus(1), cluster=file)
    assert found.interval == pytest.approx((0.9 * found.step_seconds, 1.2 * found.step_seconds))
    assert found.to_json()["interval"] == found.interval
    assert "step 108.0 us (97.2 us .. 129.6 us)" in str(found)
    assert distir.simulate(relus(1), cluster="cpu-2core").interval is None


@pytest.mark.parametrize(("low", "high", "expected"), [(0.5, 0.8, (1.0, 2.0)), (1.5, 3.0, (2.0, 6.0))])
def test_an_interval_contains_the_prediction(low: float, high: float, expected: tuple[float, float]) -> None:
    assert Residuals(1, low, high, 9).interval(2.0) == expected


@pytest.mark.parametrize(("ranks", "low", "high"), [(1, 0.9, 1.2), (2, 0.5, 2.0), (4, 0.5, 2.0)])
def test_an_interval_is_of_as_many_ranks(file: Path, ranks: int, low: float, high: float) -> None:
    model = distir.Model(perceptron([8, 8, 8], 8, Float32)).training("mse", "sgd")
    found = distir.simulate(model, distir.Plan(dp=ranks), file)
    assert found.interval == pytest.approx((low * found.step_seconds, high * found.step_seconds))


def test_ranks_that_share_cores(file: Path) -> None:
    cluster = load_cluster(file, devices=4).regular
    assert cluster is not None
    assert (cluster.nodes, cluster.per_node, cluster.sharing) == (
        1,
        4,
        pytest.approx(CoreSharing(2, 4e10, 0.25, 4e-5, 3e-4, 2**19)),
    )
    assert CostModel(load_cluster(file)).sharing == cluster.sharing
    assert CostModel.distir2021(load_cluster(file)).sharing is None
    assert load_cluster("cpu-2core").regular.sharing is None  # type: ignore[union-attr]


def test_tensors_that_a_cache_holds_do_not_go_through_memory(file: Path) -> None:
    cost, add = cost_model(file, distir.Plan()), (lookup("Add"), {})
    small, large = (Tensor(Float32, shape) for shape in ((1024,), (1000, 1024)))
    assert cost.streamed(*add, [small, small], [small]) == 0
    assert cost.streamed(*add, [large, small], [large]) == 2 * 4096000
    # a result of another type than the operands is read before it is written
    halves = Tensor(BFloat16, (1000, 1024))
    assert cost.streamed(lookup("Cast"), {"to": "bf16"}, [large], [halves]) == 4096000 + 2 * 2048000
    # what an op says that it moves is less than its operands
    table, rows, out = Tensor(Float32, (100000, 64)), Tensor(Int64, (4000,)), Tensor(Float32, (4000, 64))
    gather = lookup("Gather"), {"axis": 0}
    assert cost.streamed(*gather, [table, rows], [out]) == work(*gather, [table, rows], [out])[1] + out.bytes


def test_interpolation() -> None:
    points = [(1, 1.0), (2, 3.0), (4, 4.0)]
    found = [interpolated(points, n) for n in (0.5, 1, 1.5, 2, 3, 4, 8)]
    assert found == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 8.0])


def test_the_host_of_a_cpu_computes_nothing_while_it_issues(file: Path) -> None:
    cost = cost_model(file, distir.Plan(dp=2))
    assert cost.runtime is not None
    assert cost.runtime.inline
    assert cost.issue(lookup("Send")) == pytest.approx(20e-6)
    assert cost.issue(lookup("MPIAllreduce"), devices=2) == pytest.approx(50e-6)
    assert cost.issue(lookup("MPIAllreduce"), computes=True) == 0
    other = CostModel(cost.topology, runtime=load_runtime("distir"))
    assert other.issue(lookup("MPIAllreduce"), computes=True) == other.issue(lookup("MPIAllreduce")) > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("low = 0.9", "low = 1.3", r"residuals\[0\]\.low: expected at most high, 1.2, got 1.3"),
        ("cores = 2", "cores = 0", r"sharing\.cores: expected"),
        ("bandwidth_gbs = 40", "bandwidth_gbs = 0", r"sharing\.bandwidth_gbs: expected a number above 0"),
        ("gbs = 1\n\n[node]", "gbs = 0\n\n[node]", r"device\.ops\.f32\.Relu\.gbs: expected a number above 0"),
        ("inline = true", "inline = 1", r"runtime\.inline: expected true or false"),
    ],
)
def test_errors_name_the_key(file: Path, old: str, new: str, message: str) -> None:
    file.write_text(FILE.replace(old, new, 1))
    with pytest.raises(UsageError, match=message):
        load_cluster(file)


def test_a_cost_model_of_ones_own_runtime_keeps_it(file: Path) -> None:
    topology = load_cluster(file)
    assert distir.simulate(relus(1), cluster=CostModel(topology)).step_seconds == pytest.approx(1.08e-4)
