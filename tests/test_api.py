"""The Python API: plans, default data, results, the check and what it says of a wrong run."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distir
from distir.api.check import Check
from distir.api.data import Data, IndexRange, index_ranges
from distir.api.differences import Difference
from distir.api.locate import locate
from distir.api.model import Model
from distir.api.results import rates
from distir.api.steps import compute_steps
from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.reference.sequential import SequentialExecutor
from distir.hardware import load_cluster, load_runtime
from distir.ir import Device, FunctionMaker, Mesh
from distir.ir.errors import InfeasibleError, MismatchError, UsageError
from distir.ir.function import Function, Op, Role
from distir.ir.spec import lookup
from distir.ir.type import BFloat16, Bool, Float32, Float64, Int64, Tensor
from distir.models import gpt, mlp
from distir.ops.rules import tensor
from distir.runtime.job import Job
from distir.runtime.options import RunOptions
from distir.transforms.differentiation.training import AdamW, training_step
from distir.transforms.passes import stage_meshes
from distir.transforms.pipeline.schedule import PipeDreamScheduler
from distir.transforms.pipeline.schedule_table import parse_table
from distir.transforms.rank.project import project

pytestmark = pytest.mark.usefixtures("preloaded")

ROOT = Path(__file__).parent.parent
GPT = ROOT / "examples" / "gpt2-tiny.onnx"


@pytest.fixture(scope="module")
def trained():
    """gpt2-tiny's training step in float64."""
    return distir.load(GPT, {"batch": 8}, loss="cross-entropy", optimizer=AdamW(1e-3), dtype="float64")


# ---------------------------------------------------------------- plans


def test_plan_prints_what_it_is():
    assert str(distir.Plan()) == "dp 1 x tp 1 x pp 1, 1 microbatch"
    plan = distir.Plan(2, 4, 2, 8, order=("pp", "dp", "tp"))
    assert str(plan) == "dp 2 x tp 4 x pp 2, 8 microbatches, 1f1b, order pp,dp,tp"
    assert str(distir.Plan(overlap=False)) == "dp 1 x tp 1 x pp 1, 1 microbatch, no overlap"
    assert plan.size == 16


@pytest.mark.parametrize("bad", [{"dp": 0}, {"tp": 1.5}, {"pp": True}, {"order": ("tp", "tp", "pp")}])
def test_bad_plans(bad):
    with pytest.raises(UsageError):
        distir.Plan(**bad)


def test_a_plan_takes_a_table_a_file_or_a_scheduler(trained, tmp_path):
    rows = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    (tmp_path / "mine.txt").write_text(rows)
    table = parse_table(rows)
    plans = [
        distir.Plan(pp=2, microbatches=2, schedule=x)
        for x in (table, tmp_path / "mine.txt", str(tmp_path / "mine.txt"))
    ]
    programs = [distir.distribute(trained, plan) for plan in plans]
    assert distir.same(programs[0], programs[1])
    assert distir.same(programs[0], programs[2])
    assert str(plans[0]).endswith("2 microbatches, 0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1")
    assert str(plans[1]).endswith("mine.txt")
    assert json.loads(json.dumps([plan.to_json()["schedule"] for plan in plans[:2]]))[1].endswith("mine.txt")
    scheduled = distir.Plan(pp=2, microbatches=2, schedule=PipeDreamScheduler(2))
    assert distir.same(
        distir.distribute(trained, scheduled), distir.distribute(trained, distir.Plan(pp=2, microbatches=2))
    )
    assert "PipeDreamScheduler" in str(scheduled)


def test_order_says_which_devices_stand_together():
    devices = [Device("cpu", i) for i in range(12)]

    def listed(order=()):
        meshes = stage_meshes(distir.Plan(2, 3, 2, order=order), devices).meshes
        return [d.index for mesh in meshes for d in mesh.devices]

    assert listed() == list(range(12))  # tp fastest, then dp, then pp
    # (p, d, t) is device p + 2 d + 4 t
    assert listed(("pp", "dp", "tp")) == [p + 2 * d + 4 * t for p in range(2) for d in range(2) for t in range(3)]


def test_order_reaches_the_program(trained):
    devices = [Device("cpu", i) for i in range(4)]
    program = distir.distribute(trained, distir.Plan(dp=2, pp=2, order=("pp", "tp", "dp")), devices)
    meshes = {tensor(v).mesh for v in program.inputs if v.kind == "parameter"}
    assert {mesh.devices for mesh in meshes if mesh.name == "stage0"} == {(devices[0], devices[2])}


# ---------------------------------------------------------------- default data


def test_default_data_of_gpt(trained):
    data = Data(trained.function, trained.initial())
    fixed = {v.name: x for v, x in data.fixed().items()}
    mask, positions = fixed["attention_mask"], fixed["position_ids"]
    assert mask.shape == (1, 1, 16, 16)
    assert (mask[0, 0][np.tri(16, dtype=bool)] == 0).all()
    assert (mask[0, 0][~np.tri(16, dtype=bool)] < -1e30).all()
    assert positions.tolist() == [list(range(16))]
    first, second = ({v.name: x for v, x in data.step(k).items()} for k in range(2))
    assert first.keys() == {"input_ids", "labels"}
    for name, x in first.items():
        assert 0 <= x.min() < 20
        assert 480 < x.max() < 509
        assert len({row.tobytes() for row in x}) == 8  # every sample is another
        assert not np.array_equal(x, second[name])  # and so is every step
    assert np.array_equal(first["labels"], {v.name: x for v, x in data.step(0).items()}["labels"])


def test_ranges_follow_uses_to_what_is_indexed():
    f = FunctionMaker()
    table = f.add_input_value("t", Tensor(Float32, (7, 3)), Role("parameter"))
    ids = f.add_input_value("anything", Tensor(Int64, (4, 2)), Role("data", 0))
    other = f.add_input_value("other", Tensor(Int64, (4, 2)), Role("data", 0))
    flat = f.emit("Reshape", f.emit("Transpose", ids, perm=(1, 0)), shape=(8,))
    f.set_outputs([f.emit("Gather", table, flat, axis=0), f.emit("Add", other, other)])
    function = f.finalize()
    assert index_ranges(function) == {ids: IndexRange(7, frozenset())}
    step = Data(function).step(0)
    assert step[ids].max() < 7
    assert step[other].max() < 2


def test_other_masks():
    f = FunctionMaker()
    rows = f.add_input_value("attention_mask", Tensor(Int64, (4, 6)), Role("data", 0))
    f.set_outputs([f.emit("Add", rows, rows)])
    assert (Data(f.finalize()).step(0)[rows] == 1).all()
    f = FunctionMaker()
    allowed = f.add_input_value("attention_mask", Tensor(Bool, (1, 1, 3, 3)), Role("constant"))
    f.set_outputs([f.emit("Not", allowed)])
    assert np.array_equal(Data(f.finalize()).fixed()[allowed][0, 0], np.tri(3, dtype=bool))


def test_data_beside_the_batch_dim(tmp_path):
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float32, (3, 2)), Role("data", 1))
    f.set_outputs([f.emit("Relu", x)])
    np.savez(tmp_path / "data.npz", x=np.arange(12.0).reshape(3, 4))
    data = Data(f.finalize(), source=tmp_path / "data.npz")
    assert data.step(1)[x].tolist() == [[2, 3], [6, 7], [10, 11]]
    assert data.step(2)[x].tolist() == data.step(0)[x].tolist()


def small() -> Model:
    return distir.load(ROOT / "examples" / "mlp.onnx", {"batch": 8}, loss="mse")


@pytest.mark.parametrize("backend", ["numpy", "gloo"])
def test_data_given_as_arrays(tmp_path: Path, backend: str):
    """They are what a file with these arrays is: tensors and lists, too."""
    random = np.random.default_rng(0)
    arrays = {"x": random.normal(size=(20, 32)), "target": random.normal(size=(20, 32))}
    np.savez(tmp_path / "data.npz", x=arrays["x"], target=arrays["target"])
    given = {"x": torch.from_numpy(arrays["x"]), "target": arrays["target"].tolist()}
    runs = [
        distir.run(small(), distir.Plan(dp=2), data=data, epochs=2, backend=backend)
        for data in (tmp_path / "data.npz", given)
    ]
    assert len(runs[0].losses) == 2 * 1  # of 20 samples 8 are held out, and 4 are no batch
    assert runs[0].losses == runs[1].losses


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (3, "data: expected a file, or arrays by name, got int"),
        (np.zeros((8, 32)), "data: expected a file, or arrays by name, got ndarray"),
        ({"x": [[1.0], [2.0, 3.0]]}, "data: x is not an array"),
        ({"x": np.zeros((8, 31)), "target": np.zeros((8, 32))}, r"data: x: expected shape (samples, 32), got (8, 31)"),
        ({"x": np.zeros((8, 32))}, "data has no array 'target'"),
    ],
)
def test_data_that_do_not_fit(data: Any, words: str):
    with pytest.raises(UsageError, match=re.escape(words)):
        distir.run(small(), data=data)


def test_a_loss_of_one_number_has_any_rank(tmp_path: Path):
    """What is trained and reported is the same, step by step and in epochs, also spread."""
    data = {"x": np.random.default_rng(0).standard_normal((24, 4))}
    runs: list[Any] = []
    for shape in ((), (1,), (1, 1)):
        f = FunctionMaker()
        x = f.add_input_value("x", Tensor(Float64, (8, 4)), Role("data", 0))
        for k in range(2):
            w = f.add_input_value(f"w{k}", Tensor(Float64, (4, 4)), Role("parameter"))
            x = f.emit("Tanh", f.emit("MatMul", x, w))
        mean = f.emit("ReduceMean", f.emit("Mul", x, x), axes=(0, 1))
        f.set_outputs([f.add_op("Reshape", "loss", [mean], {"shape": shape})])
        step = training_step(f.finalize(), "loss")
        assert step.outputs[0].type is Tensor(Float64, shape)
        for plan in (distir.Plan(), distir.Plan(dp=2, zero=3), distir.Plan(tp=2), distir.Plan(pp=2, microbatches=2)):
            backend = "gloo" if shape == (1, 1) and plan.pp == 2 else "numpy"
            result = distir.run(step, plan, backend=backend, data=data, epochs=2, metrics=tmp_path / "m.json")
            assert result.metrics is not None
            assert result.outputs["loss"].shape == shape
            assert json.loads((tmp_path / "m.json").read_text())["epochs"][1]["loss"] == result.metrics.losses[1]
            runs.append([*result.losses, *result.metrics.losses, *result.metrics.validation])
            assert len(runs[-1]) == 2 * 2 + 2 + 2
    np.testing.assert_allclose(runs, [runs[0]] * len(runs), rtol=1e-10)


# ---------------------------------------------------------------- models


def test_a_function_is_a_model():
    function = mlp(4, 8, 6)
    result = distir.run(function, distir.Plan(dp=2, tp=2), backend="numpy", check=True)
    assert result.check is not None
    assert result.check.ok
    assert result.losses == []  # it trains nothing: the loss is an output like others
    assert result.outputs.keys() == {"l", "dwA", "dwB", "dwC", "dwD"}
    with pytest.raises(UsageError, match="ONNX file"):
        result.save("x.onnx")


def test_a_model_prints_in_a_line(trained):
    assert repr(trained) == (
        "Model(gpt2-tiny.onnx: (input_ids: i64[8, 16], labels: i64[8, 16]), 133,696 parameters, 193 ops, AdamW)"
    )
    assert repr(Model(mlp(3, 8, 16))) == "Model(mlp: (x: f32[8, 16], z: f32[8, 16]), 768 parameters, 14 ops)"


def test_one_is_not_many():
    one = distir.Topology()
    assert repr(one) == "Topology(0 devices)"
    one.add_device("gpu", 1e9, 1e9, 0.0)
    assert repr(one) == "Topology(1 device)"
    assert repr(load_cluster("dgx-a100")) == "Topology(dgx-a100: 1 node of 8 gpu)"
    assert repr(load_cluster("dgx-a100", 2)) == "Topology(dgx-a100: 2 nodes of 8 gpu)"
    with pytest.raises(InfeasibleError, match="1 node of 8 cannot give 9 devices"):
        load_cluster("dgx-a100", 1, 9)
    function = distir.FunctionMaker("f")
    function.add_input_value("x", Tensor(Float32, (2,), Device("cpu", 0)))
    with pytest.raises(UsageError, match="f runs on 1 rank, there is no rank 1"):
        project(function.finalize(), 1)


def test_a_path_is_a_model():
    with pytest.raises(UsageError, match="batch"):
        distir.simulate(GPT)


def test_parameters_without_arrays_are_drawn():
    model = Model(gpt(1, 16, 2, 11, 4, 2)).training("cross-entropy")
    arrays = {v.name: x for v, x in model.initial(seed=1).items()}
    assert np.std(arrays["wte"]) == pytest.approx(11**-0.5, rel=0.3)
    again = {v.name: x for v, x in model.initial(seed=1).items()}
    assert all(np.array_equal(x, again[k]) for k, x in arrays.items())
    assert not np.array_equal(arrays["wte"], {v.name: x for v, x in model.initial(seed=2).items()}["wte"])


def test_dtype_keeps_the_arrays(trained):
    assert {v.type.dtype for v in trained.function.inputs if v.kind == "parameter"} == {Float64}
    arrays = trained.initial()
    assert len(arrays) == len([v for v in trained.function.inputs if v.kind in ("parameter", "state")])
    assert trained.optimizer == AdamW(1e-3)


# ---------------------------------------------------------------- results


def test_without_overlap_a_device_does_one_thing_at_a_time(trained):
    """The reductions over dp come after all else, in the program too."""
    plans = [distir.Plan(2, 1, 2, 4, overlap=overlap) for overlap in (True, False)]
    quick, slow = (distir.simulate(trained, plan, "dgx-a100") for plan in plans)
    assert slow.simulation.seconds > quick.simulation.seconds
    reduced = [
        {f.name[:3] for f in p.program.callees() for op in f.ops if op.attributes.get("axis") == "dp"}
        for p in (quick, slow)
    ]
    assert "bwd" in reduced[0]
    assert reduced[1] == {"pro", "upd"}


@pytest.mark.parametrize("plan", [distir.Plan(1, 1, 4, 16), distir.Plan(2, 2, 4, 8), distir.Plan(1, 1, 6, 16)], ids=str)
def test_stages_are_balanced_for_the_cluster(plan):
    """By its own seconds, not by the plain cost that no cluster has: here the head of a large vocabulary is quick."""
    model = distir.Model(training_step(gpt(12, 768, 12, 32000, 128, 512, BFloat16), "cross-entropy", AdamW()))
    prediction = distir.simulate(model, plan, "dgx-h100")
    cost = CostModel(load_cluster("dgx-h100", devices=plan.size))
    plain = Simulator(cost).interpret(distir.distribute(model, plan, cost.topology.devices[: plan.size]))
    assert prediction.simulation.seconds < plain.seconds
    slowest, mine = (max(s.compute for s in x.stages) for x in (plain, prediction.simulation))
    assert mine < 0.98 * slowest


def test_a_cluster_too_small_for_the_stages(trained):
    topology = distir.Topology()
    topology.add_device("gpu")
    with pytest.raises(InfeasibleError, match="needs 2 devices"):
        distir.simulate(trained, distir.Plan(pp=2), topology)


def test_simulate_is_shared_between_plans(trained):
    cost = distir.CostModel(distir.simulate(trained, distir.Plan(dp=8), "dgx-a100").simulation.program.cost.topology)
    plans = [distir.Plan(dp=8), distir.Plan(dp=4, tp=2), distir.Plan(dp=2, pp=2, microbatches=4)]
    times = [distir.simulate(trained, plan, cost).step_seconds for plan in plans]
    assert times == [distir.simulate(trained, plan, "dgx-a100").step_seconds for plan in plans]
    assert len(set(times)) == 3


def decoder() -> Model:
    return distir.load("gpt:layers=4,hidden=8,heads=2,vocab=16,seq=4,batch=8", loss="cross-entropy", optimizer="adamw")


def test_what_is_simulated_again_is_not_built_again() -> None:
    model, plan = decoder(), distir.Plan(pp=2, microbatches=2)
    first = distir.simulate(model, plan, "dgx-a100")
    again = distir.simulate(model, plan, "dgx-a100")
    assert again.program is first.program
    assert again.step_seconds == first.step_seconds
    run = distir.run(model, plan, steps=1, check=True, backend="numpy")  # of this host, which has other costs
    assert run.check is not None
    other = distir.simulate(model, replace(plan, dp=2), "dgx-a100")
    assert other.program is not first.program
    assert distir.simulate(model, replace(plan, dp=2), "dgx-h100").program is not other.program
    assert distir.simulate(decoder(), plan, "dgx-a100").step_seconds == first.step_seconds


def test_devices_of_another_place_have_a_program_of_their_own() -> None:
    model = decoder()
    for at in (0, 4, 0):
        devices = [Device("gpu", at + k) for k in range(4)]
        made = distir.distribute(model, distir.Plan(dp=4), devices)
        assert {d for v in made.inputs if isinstance(v.type.device, Mesh) for d in v.type.device.devices} == {*devices}


def test_a_changed_topology_is_priced_again() -> None:
    """A link that became slow: stages are balanced again."""
    topology = distir.Topology()
    a, b = topology.add_device("gpu"), topology.add_device("gpu")
    topology.set_bandwidth(a, b, 1e6)
    cost = CostModel(topology)
    model, plan = decoder(), distir.Plan(pp=2)
    first = distir.simulate(model, plan, cost)
    assert distir.simulate(model, plan, cost).program is first.program
    topology.set_bandwidth(a, b, 1e-3)
    assert distir.simulate(model, plan, cost).program is not first.program
    c, d = topology.add_device("gpu"), topology.add_device("gpu")
    for one, other in ((a, c), (a, d), (b, c), (b, d), (c, d)):
        topology.set_bandwidth(one, other, 1e3)
    plan = distir.Plan(tp=2, pp=2)
    first = distir.simulate(model, plan, cost)
    topology.set_bandwidth(c, d, 1.0)  # the link of tensor parallelism, not that between the stages
    assert distir.simulate(model, plan, cost).program is not first.program


def test_what_a_user_does_to_a_cluster_stays_with_the_user() -> None:
    model, plan = decoder(), distir.Plan(pp=2, cut=("even",))
    first = distir.simulate(model, plan, "dgx-a100")
    topology = first.simulation.program.cost.topology
    a, b = topology.devices[:2]
    topology.set_bandwidth(a, b, 1e-3)
    assert topology.get_latency(a, b) == load_cluster("dgx-a100").get_latency(a, b) > 0
    assert distir.simulate(model, plan, topology).step_seconds > first.step_seconds
    again = distir.simulate(decoder(), plan, "dgx-a100")
    assert again.step_seconds == first.step_seconds
    again.simulation.program.cost.runtime = load_runtime("megatron")
    assert distir.simulate(decoder(), plan, "dgx-a100").step_seconds == first.step_seconds


def test_the_file_of_a_schedule_is_read_again(tmp_path: Path) -> None:
    path, model = tmp_path / "table.csv", decoder()
    plan = distir.Plan(pp=2, microbatches=2, schedule=str(path))
    seconds = []
    for text in ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"):
        path.write_text(text)
        seconds.append(distir.simulate(model, plan, "dgx-a100").step_seconds)
    assert seconds[0] != seconds[1]


def test_a_program_that_was_not_checked_is_checked_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from distir.api import compilation

    calls: list[Function] = []
    monkeypatch.setattr(compilation, "verify", calls.append)
    model, plan = decoder(), distir.Plan(dp=2)
    for check, count in ((False, 0), (True, 1), (True, 1), (False, 1)):
        distir.distribute(model, plan, check=check)
        assert len(calls) == count


def test_results_print_well(trained):
    prediction = distir.simulate(trained, distir.Plan(tp=2), "dgx-a100")
    assert repr(prediction) == str(prediction)
    html = prediction._repr_html_()
    assert html.count("<tr>") == 2
    assert "padded" in html
    result = distir.run(trained, distir.Plan(tp=2), steps=2, backend="numpy", check=True)
    html = result._repr_html_()
    assert html.count("<tr>") == 3
    assert "check passed" in html
    assert "check passed" in str(result)
    assert result.weights["transformer.wte.weight"].shape == (509, 64)  # the padding is gone


@pytest.mark.parametrize(
    ("samples", "tokens", "text"),
    [
        (1234.56, None, "1,234.6 samples/s"),
        (0.0241, 49.36, "0.024 samples/s, 49 tokens/s"),
        (0.00031, 0.63, "0.00031 samples/s, 0.63 tokens/s"),
        (0.0, 0.0, "0.0 samples/s, 0 tokens/s"),
    ],
)
def test_rates_below_one_are_not_rounded_to_nothing(samples, tokens, text):
    assert rates(samples, tokens) == text


def test_shares_are_not_rounded_to_all_or_nothing():
    from distir.api.results import _share

    assert [_share(x) for x in (0.0, 1e-6, 0.5, 0.9999, 1.0)] == [
        "0.0%",
        "less than 0.1%",
        "50.0%",
        "more than 99.9%",
        "100.0%",
    ]


def test_share_of_flops_counts_every_call():
    """Of a scheduled program whose work is in bodies, called once a microbatch: two products, one of them split."""
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float32, (8, 4)), Role("data", 0))
    a = f.add_input_value("a", Tensor(Float32, (4, 6)), Role("parameter"))
    b = f.add_input_value("b", Tensor(Float32, (6, 3)), Role("parameter"))
    w = f.add_input_value("w", Tensor(Float32, (3, 5)), Role("parameter"))
    f.set_outputs([f.emit("MatMul", f.emit("MatMul", f.emit("MatMul", x, a), b), w)])
    split = distir.simulate(f.finalize(), distir.Plan(tp=2, microbatches=4)).summary.split
    assert split is not None
    assert [v.name for v in split.replicated] == ["w"]
    assert split.parameters == pytest.approx(1 - 15 / (24 + 18 + 15))
    assert split.flops == pytest.approx(1 - 15 / (24 + 18 + 15))


def test_what_is_not_split_begins_with_the_largest():
    """Of a weight that is split along `tp` alone, and two that are not, the larger of which is used last."""
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float32, (8, 4)), Role("data", 0))
    shapes = {"a": (4, 6), "b": (6, 3), "small": (3, 5), "large": (5, 7)}
    y = x
    for name, shape in shapes.items():
        y = f.emit("MatMul", y, f.add_input_value(name, Tensor(Float32, shape), Role("parameter")))
    f.set_outputs([y])
    split = distir.simulate(f.finalize(), distir.Plan(tp=2)).summary.split
    assert split is not None
    assert [v.name for v in split.replicated] == ["large", "small"]


def test_html_is_escaped():
    from distir.api.results import html_table, paragraphs

    assert html_table([("<a>",), ("&",)]).count("&lt;a&gt;") == 1
    assert paragraphs(["<b>"]) == "<p>&lt;b&gt;</p>"


def test_trace(trained, tmp_path):
    distir.simulate(trained, distir.Plan(pp=2), "dgx-a100").save_trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 1000


# ---------------------------------------------------------------- the check


def test_float64_is_compared_to_1e_10(trained):
    result = distir.run(trained, distir.Plan(dp=2, tp=2), steps=2, backend="numpy", check=True)
    assert result.check is not None
    for found in (result.check.outputs, result.check.weights, result.check.gradients, result.check.state):
        assert found is not None
        assert found.allowed == 1e-10
        assert found.error < 1e-12


def step_of(model, plan):
    """A program and what it is fed, for one step in this process."""
    program = distir.distribute(model, plan)
    arrays = model.initial()
    data = Data(model.function, arrays)
    number = {v: k for k, v in enumerate(model.function.inputs)}
    given = {number[v]: x for v, x in (arrays | data.fixed()).items()}
    feed = lambda step: {number[v]: x for v, x in data.step(step).items()}  # noqa: E731
    return Job(program, given, feed, options=RunOptions(backend="numpy"))


@pytest.mark.parametrize("plan", [distir.Plan(dp=2), distir.Plan(tp=2, microbatches=2), distir.Plan(2, 2, 2, 2)])
def test_the_op_and_rank_at_fault_are_named(trained, plan):
    """One device's piece of one value is corrupted, in one place after the other: each is found."""
    job = step_of(trained, plan)
    made = []
    compute_steps(job, SequentialExecutor(tap=lambda v, x: made.append((v, x)) or x))
    where = [k for k, (v, x) in enumerate(made) if isinstance(x, list) and v.type.dtype.floating]
    for k in where[:: len(where) // 7]:
        v, device = made[k][0], len(made[k][1]) - 1
        place = iter(range(len(made)))

        def corrupt(value, lanes, k=k, device=device, place=place):
            if next(place) == k:
                lanes = [*lanes]
                lanes[device] = lanes[device] + 0.5 * max(1.0, np.max(np.abs(lanes[device])))
            return lanes

        said = locate(job, lambda tap, corrupt=corrupt: Both(corrupt, tap))
        rank = v.type.device.devices[device].index
        assert said.startswith(f"in step 0 %{v.name} = "), said
        assert said.endswith(f"on rank {rank}"), said


class Both(SequentialExecutor):
    """Two taps, one after the other."""

    def __init__(self, first, second):
        super().__init__(tap=lambda v, x: second(v, first(v, x)))


def test_a_wrong_program_is_named_too(trained):
    """Where every op did what it should, the program is at fault: an all-reduce is missing."""
    job = step_of(trained, distir.Plan(dp=1, tp=2))
    program = job.program
    body = next(f for f in program.callees() if any(op.op_type == "MPIAllreduce" for op in f.ops))
    victim = next(op for op in body.ops if op.op_type == "MPIAllreduce" and op.attributes["axis"] == "tp")
    copy = Op(lookup("Identity"), victim.inputs, victim.attributes.without("axis"), victim.outputs)
    broken = Function(
        body.name, body.inputs, tuple(copy if op is victim else op for op in body.ops), body.outputs, body.updates
    )
    calls = [
        Op(op.spec, op.inputs, type(op.attributes)({**op.attributes, "callee": broken}), op.outputs)
        if op.callee is body
        else op
        for op in program.ops
    ]
    wrong = Function(program.name, program.inputs, tuple(calls), program.outputs, program.updates, program.sources)
    said = locate(replace(job, program=wrong))
    assert f"%{victim.outputs[0].name} = Identity(" in said
    assert "is not the sequential program's" in said


def test_a_right_run_has_no_op_at_fault(trained):
    job = step_of(trained, distir.Plan(dp=2, pp=2, microbatches=2))
    assert "no op by itself is at fault" in locate(replace(job, steps=2))


@pytest.mark.parametrize(("step", "hint"), [(0, False), (1, True), (None, True)])
def test_what_is_said_where_adamw_may_have_made_much_of_rounding(step, hint, monkeypatch):
    """Of all but the losses of the first step, which no update came before."""
    found = Check(None, None, Difference("loss", 2e-5, 1e-5, step))
    monkeypatch.setattr("distir.api.running.compare", lambda *_: found)
    model = distir.load(ROOT / "examples" / "mlp.onnx", {"batch": 8}, loss="mse", optimizer=AdamW(0.1))
    with pytest.raises(MismatchError) as caught:
        distir.run(model, distir.Plan(dp=2), steps=2, backend="numpy", check=True)
    assert ("float64 distinguishes" in (caught.value.hint or "")) is hint


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_said_where_16_bits_may_have_made_much_of_rounding(precision, monkeypatch):
    found = Check(None, None, Difference("loss", 2e-5, 1e-5, 0))
    monkeypatch.setattr("distir.api.running.compare", lambda *_: found)
    model = distir.load(
        "gpt:layers=1,hidden=8,heads=2,seq=4,vocab=8,batch=4", loss="cross-entropy", precision=precision
    )
    with pytest.raises(MismatchError) as caught:
        distir.run(model, distir.Plan(dp=2), backend="numpy", check=True)
    assert ("widens all of the step" in (caught.value.hint or "")) is (precision == "bf16")


def test_a_failed_check_raises(trained, monkeypatch):
    """Through `run`: the reference executor, told to go wrong on device 1."""
    right = SequentialExecutor.compute

    def wrong(self, function, arrays):
        results = right(self, function, arrays)
        return [x + 1e-3 if function.callees() else x for x in results]

    monkeypatch.setattr(SequentialExecutor, "compute", wrong)
    with pytest.raises(MismatchError, match=r"%loss in step 0 differs by .*, 1e-10 is allowed"):
        distir.run(trained, distir.Plan(dp=2), backend="numpy", check=True)


def test_validate_takes_what_the_user_has(trained):
    program = distir.distribute(trained, distir.Plan(tp=2), check=False)
    distir.validate(program, trained.function)  # decomposed and padded as the program was
    other = distir.load(GPT, {"batch": 8}, loss="cross-entropy", optimizer=AdamW(1e-2), dtype="float64")
    with pytest.raises(MismatchError):
        distir.validate(program, other.function)


def test_infeasible_plans(trained):
    with pytest.raises(InfeasibleError, match="does not divide"):
        distir.distribute(trained, distir.Plan(dp=3))
    with pytest.raises(InfeasibleError, match="needs 2 devices"):
        distir.distribute(trained, distir.Plan(dp=2), [Device("cpu", 0)])


@pytest.mark.parametrize("backend", ["numpy", "gloo"])
def test_steps_whose_gradients_overflow_are_counted(backend: str) -> None:
    """Targets so large that gradients of the scaled loss do not fit into float16, until the scale has fallen."""
    model = distir.load(ROOT / "examples/mlp.onnx", {"batch": 8}).training("mse", AdamW(1e-3), precision="fp16")
    rng = np.random.default_rng(0)
    names = {v.name: v for v in model.function.inputs if v.kind == "data"}
    data = {name: rng.standard_normal(tensor(v).global_shape).astype(np.float32) for name, v in names.items()}
    data["target"] *= 100
    result = distir.run(model, distir.Plan(dp=2), steps=8, data=data, backend=backend)
    assert 1 <= result.skipped < 8
    assert f"{result.skipped} step" in str(result)
    assert result.to_json()["skipped_steps"] == result.skipped
    changed = [n for n, x in model.initial().items() if n.kind == "parameter" and np.any(result.weights[n.name] != x)]
    assert changed
