"""`inspect`: its figures against formulas and the program, for every kind of model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import distir
from distir.api.compilation import plan_in_effect
from distir.cli import main
from distir.ir import Device, FunctionMaker, Mesh
from distir.ir.errors import UsageError
from distir.ir.placement import Shard
from distir.ir.type import Float32, Tensor
from tests.importer.models import node
from tests.importer.test_survey import saved

ROOT = Path(__file__).parents[2]
MLP, GPT = str(ROOT / "examples" / "mlp.onnx"), str(ROOT / "examples" / "gpt2-tiny.onnx")


def test_figures_of_an_mlp():
    """Eight layers of 32 x 32: 2 n² a product, n the bias, n the activation; three products in training."""
    found = distir.inspect(MLP, {"batch": 16})
    assert found.parameters["f32"] == (16, 8 * (32 * 32 + 32), 4 * 8 * (32 * 32 + 32))
    products = 8 * 2 * 32 * 32
    assert found.forward is not None
    assert found.training is not None
    assert products <= found.forward.flops <= 1.05 * products
    first = 2 * 32 * 32  # no gradient of the input
    assert 3 * products - first <= found.training.flops <= 1.4 * 3 * products
    saved_values = 8 * 32 * 4  # one value a layer
    assert found.training.activations is not None
    assert saved_values <= found.training.activations <= 2 * saved_values
    assert found.dims == {"batch": 16}
    assert found.ok
    assert found.needed() == ""


def test_a_sample_costs_the_same_in_any_batch():
    small, large = (distir.inspect(GPT, {"batch": n}) for n in (2, 8))
    assert small.forward is not None
    assert large.forward is not None
    assert small.forward.flops == pytest.approx(large.forward.flops, rel=0.01)
    assert small.parameters == large.parameters


def test_dims_to_set_are_named_and_assumed():
    found = distir.inspect(GPT)
    assert found.dims == {"batch": None}
    assert found.needed() == "--dim batch=2"
    assert str(found.inputs[0]) == "i64[batch, 16]"
    assert ("cross-entropy", "logits") in found.losses


@pytest.mark.parametrize(
    ("model", "form", "trained_by"),
    [
        ("gpt:layers=2,hidden=16,heads=2,vocab=32,seq=8", "a model by its name", "cross-entropy"),
        (str(ROOT / "tests" / "golden" / "gpt-tp2.distir"), "a program as text, distributed", "its own loss"),
        ("proxy-dlrm", "a model by its name", None),
    ],
)
def test_every_kind_of_model(model, form, trained_by):
    found = distir.inspect(model)
    assert found.form == form
    assert found.trained_by == trained_by
    assert found.inputs
    assert found.ok
    assert "<table>" in found._repr_html_()
    json.dumps(found.to_json())


def test_a_module():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    found = distir.inspect(module, {"batch": 6}, example_inputs=(torch.zeros(3, 4),))
    assert found.form == "a torch.nn.Module"
    assert sum(p.elements for p in found.parameters.values()) == sum(p.numel() for p in module.parameters())
    assert found.inputs[0].dims == (6, 4)
    assert found.forward is not None
    assert found.forward.flops == 2 * (4 * 8 + 8 * 2) + 8  # products, with their biases, and ReLU
    with pytest.raises(UsageError, match="there are none"):
        distir.inspect(module)


def test_a_distributed_program_has_the_parameters_of_its_source():
    model = distir.load(GPT, {"batch": 4}, loss="cross-entropy")
    program = distir.distribute(model, distir.Plan(tp=2, pp=2, microbatches=2))
    assert distir.inspect(program).parameters == distir.inspect(model).parameters


def test_what_is_not_supported_ends_with_3_after_all_is_printed(tmp_path, capsys):
    nodes = [node("Odd", "x", "y", "odd", domain="mine"), node("GridSample", "image grid", "z", "sample")]
    path = str(saved(tmp_path / "m.onnx", nodes, ["y", "z"]))
    assert main(["inspect", path]) == 3
    out, err = capsys.readouterr()
    assert "Odd" in out
    assert "GridSample" in out
    assert err == f"distir: error: {path}: not supported: Odd (1), GridSample (1)\n"
    assert main(["inspect", path, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert [u["op"] for u in found["unsupported"]] == ["Odd", "GridSample"]
    assert found["supported"] is False


def test_inspect_takes_dims_and_a_loss(capsys):
    assert main(["inspect", MLP, "--dim", "batch=4", "--loss", "mse", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch"], found["trained_by"], found["assumed"]) == (4, "mse", {})
    assert main(["inspect", MLP, "--dim", "x=4"]) == 2
    assert "no symbolic dimension 'x'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("dlrm", None), ("dlrm:pooling=3", None), ("cosmoflow", None), ("gpt2-large:layers=2,batch=2", 2 * 632)],
)
def test_tokens_are_of_sequences(name: str, tokens: int | None) -> None:
    """Indices into tables, one for each, are none."""
    assert distir.load(name).tokens == tokens


def test_a_program_with_a_host_has_one_device_more() -> None:
    host, mesh = Device("cpu", 0), Mesh([Device("cpu", k) for k in (1, 2)], {"dp": 2}, "m")
    f = FunctionMaker("hosted")
    x = f.add_input_value("x", Tensor(Float32, (6, 4), host))
    f.set_outputs([f.emit("MPIGather", f.emit("MPIScatter", x, to=mesh, placements=(Shard(0),)), to=host)])
    model = distir.Model(f.finalize())
    assert plan_in_effect(model, distir.Plan()).size == 3
    assert distir.simulate(model, cluster="dgx-a100").step_seconds > 0
