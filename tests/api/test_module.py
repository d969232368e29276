"""A torch.nn.Module as a model: losses and the weights handed back equal torch's own training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distir
from distir import Plan
from distir.ir.errors import MismatchError, ModelError, UsageError
from distir.runtime.options import RunOptions

pytestmark = pytest.mark.usefixtures("preloaded")

BATCH = 8
OPTIMIZERS: dict[str, tuple[Any, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]] = {
    "sgd": (distir.SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "adamw": (distir.AdamW(0.01), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.01)),
}
Arrays = dict[str, np.ndarray]
Loss = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


class Perceptron(nn.Module):
    """Two layers, a scale of rank 0, a parameter named as the input, one that is frozen, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.b.weight = nn.Parameter(torch.randn(16, 8).t())  # of which numpy has no contiguous view
        self.x = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("kept", torch.randn(8))
        self.register_buffer("made", torch.randn(8), persistent=False)
        self.unused = nn.Linear(2, 2)
        self.kept: torch.Tensor
        self.made: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)) * 0.1) * self.x + self.frozen * self.kept + self.made


class Tied(nn.Module):
    """Returns its loss and more; one weight is in it under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(32, 8), nn.LayerNorm(8), nn.Linear(8, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.head(self.norm(self.embedding(ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "cache": object(), "none": None}


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, stride=2)
        self.head = nn.Linear(8, 5)
        nn.init.normal_(self.norm.running_mean)  # pyright: ignore[reportArgumentType]
        nn.init.uniform_(self.norm.running_var, 0.5, 2)  # pyright: ignore[reportArgumentType]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.b(torch.relu(self.norm(self.a(x))))).mean((2, 3)))


def mse(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(module(batch["x"]), batch["target"])


def cross_entropy(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = batch["labels"]
    logits = module(**{k: x for k, x in batch.items() if k != "labels"})
    logits = getattr(logits, "logits", logits)
    return nn.functional.cross_entropy(logits.reshape(labels.numel(), -1), labels.flatten())


def positional(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch["input"]), batch["labels"])


def own(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(**batch)["loss"]


def trained(module: nn.Module, data: Arrays, loss: Loss, optimizer: str, steps: int) -> tuple[list[float], nn.Module]:
    """Losses and a module after torch's own training loop, of a copy."""
    module = copy.deepcopy(module)
    step = OPTIMIZERS[optimizer][1]([p for p in module.parameters() if p.requires_grad])
    losses = []
    for k in range(steps):
        first = k % (len(next(iter(data.values()))) // BATCH) * BATCH
        batch = {name: torch.tensor(x[first : first + BATCH]) for name, x in data.items()}
        step.zero_grad()
        value = loss(module, batch)
        value.backward()
        step.step()
        losses.append(value.item())
    return losses, module


def agree(got: nn.Module, want: nn.Module, tolerance: float = 1e-10) -> None:
    """The same parameters and buffers."""
    for (name, x), y in zip(got.state_dict().items(), want.state_dict().values(), strict=True):
        assert torch.allclose(x, y, rtol=0, atol=tolerance), name


def random(**shapes: Any) -> Arrays:
    """Two batches: numbers of a shape, or, for (shape, limit), integers below a limit."""
    rng, count = np.random.default_rng(0), 2 * BATCH
    integers = {k: s for k, s in shapes.items() if isinstance(s[0], tuple)}
    floats = {k: rng.standard_normal((count, *s)) for k, s in shapes.items() if k not in integers}
    return floats | {k: rng.integers(0, limit, (count, *s)) for k, (s, limit) in integers.items()}


PERCEPTRON, TIED = random(x=(8,), target=(8,)), random(ids=((4,), 32), labels=((4,), 32))


@pytest.fixture(scope="module")
def perceptron() -> tuple[Perceptron, distir.Model]:
    torch.manual_seed(0)
    module = Perceptron().double()
    return module, distir.load(module, torch.randn(2, 8).double(), {"batch": BATCH})


@pytest.fixture(scope="module")
def tied() -> tuple[Tied, distir.Model]:
    torch.manual_seed(0)
    module, ids = Tied().double(), torch.randint(32, (2, 4))
    return module, distir.load(module, {"ids": ids, "labels": ids}, dims={"batch": BATCH})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "plan", [Plan(), Plan(dp=2, tp=2), Plan(pp=2, microbatches=2), Plan(dp=2, zero=1), Plan(dp=2, zero=3)], ids=str
)
def test_perceptron(perceptron: Any, plan: Plan, optimizer: str) -> None:
    """Each run goes on from where the one before has left the module."""
    module, model = perceptron
    names = [name for name, p in module.named_parameters() if p.requires_grad and "unused" not in name]
    losses, want = trained(module, PERCEPTRON, mse, optimizer, 3)
    before = copy.deepcopy(module)
    step = model.training("mse", OPTIMIZERS[optimizer][0])
    result = distir.run(step, plan, data=PERCEPTRON, steps=3, backend="numpy", check=True)
    np.testing.assert_allclose(result.losses, losses, rtol=0, atol=1e-10)
    agree(module, want)
    assert sorted(name.removesuffix(".1") for name in result.weights) == sorted(names)  # x.1: the input is x
    assert not torch.equal(module.a.weight, before.a.weight)
    assert torch.equal(module.frozen, before.frozen)
    assert module.a.weight.requires_grad
    assert module.a.weight.grad is None


def test_roles(perceptron: Any) -> None:
    function = perceptron[1].function
    kinds = {v.name: v.kind for v in function.inputs}
    assert kinds["x"] == "data"
    assert kinds["x.1"] == kinds["a.weight"] == "parameter"
    assert "parameter" not in {kind for name, kind in kinds.items() if name in ("frozen", "kept", "made", "mul_1")}
    assert (perceptron[1].batch, perceptron[1].name) == (BATCH, "Perceptron")


@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(dp=2, zero=1), Plan(pp=2, microbatches=4)], ids=str)
def test_tied_with_a_loss_of_its_own(tied: Any, plan: Plan) -> None:
    module, model = tied
    losses, want = trained(module, TIED, own, "adamw", 3)
    step = model.training("loss", OPTIMIZERS["adamw"][0])
    result = distir.run(step, plan, data=TIED, steps=3, backend="numpy")
    np.testing.assert_allclose(result.losses, losses, rtol=0, atol=1e-10)
    agree(module, want)
    assert [*result.weights] == ["embedding.weight", "norm.weight", "norm.bias"]
    assert module.head.weight is module.embedding.weight
    assert [v.name for v in model.function.outputs] == ["loss", "logits"]


@pytest.mark.slow
def test_on_gloo(tied: Any) -> None:
    module, model = tied
    losses, want = trained(module, TIED, own, "sgd", 2)
    step = model.training("loss", OPTIMIZERS["sgd"][0])
    result = distir.run(step, Plan(dp=2), data=TIED, steps=2, backend="gloo")
    np.testing.assert_allclose(result.losses, losses, rtol=0, atol=1e-10)
    agree(module, want)


def test_whatever_takes_a_model_takes_a_module() -> None:
    module = nn.Linear(4, 4)
    options: dict[str, Any] = {"example_inputs": torch.randn(2, 4), "loss": "mse", "dims": {"batch": 8}}
    before = copy.deepcopy(module)
    assert distir.simulate(module, Plan(dp=2), "dgx-a100", **options).summary.batch == 8
    agree(module, before, 0.0)
    result = distir.run(module, Plan(dp=2), steps=2, backend="numpy", check=True, **options)
    got = {name: p.detach().numpy() for name, p in module.named_parameters()}
    assert got.keys() == result.weights.keys()
    assert all(np.array_equal(got[name], x) for name, x in result.weights.items())
    assert not torch.equal(module.weight, before.weight)


@pytest.mark.slow
def test_planning_and_explaining_a_module() -> None:
    module, options = nn.Linear(4, 4), {"example_inputs": torch.randn(2, 4), "loss": "mse", "dims": {"batch": 8}}
    found = distir.plan(module, "dgx-a100", 2, top=1, **options)  # pyright: ignore
    assert found.rows
    assert "dp 2" in str(distir.explain(module, Plan(dp=2), "dgx-a100", **options))  # pyright: ignore


def test_a_run_that_fails_leaves_the_module(perceptron: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, model = perceptron
    before = copy.deepcopy(module)

    def fail(*_: Any) -> None:
        raise MismatchError("it differs")

    monkeypatch.setattr("distir.api.running._check", fail)
    with pytest.raises(MismatchError):
        distir.run(model.training("mse"), data=PERCEPTRON, steps=1, backend="numpy", check=True)
    agree(module, before, 0.0)


@pytest.mark.parametrize(
    ("call", "error", "texts"),
    [
        (lambda m: distir.run(m), UsageError, ["Perceptron", "example inputs", "distir.load(module, example_inputs)"]),
        (lambda m: distir.load(m, (torch.ones(2, 8),) * 2), UsageError, ["forward", "too many positional"]),
        (lambda m: distir.load(m, {"z": torch.ones(2, 8)}), UsageError, ["forward", "'x'"]),
        (lambda m: distir.load(m, (3,)), UsageError, ["no tensor"]),
        (lambda m: distir.load(m, torch.ones(2, 8), {"seq": 3}), UsageError, ["'seq'", "it has batch"]),
        (lambda m: distir.load(m, torch.ones(2, 8), {"batch": 0}), UsageError, ["at least 1"]),
        (lambda m: distir.load(m, torch.ones(2, 8), {}, {}), UsageError, ["3 arguments"]),
        (lambda m: distir.load(m, torch.ones(2, 8), los="mse"), UsageError, ["'los'", "loss"]),
        (lambda m: distir.load("mlp.onnx", example_inputs=torch.ones(2)), UsageError, ["example_inputs"]),
        (lambda m: distir.load(3), UsageError, ["not a int"]),  # pyright: ignore[reportArgumentType]
        (lambda m: distir.load(m, torch.ones(2, 7).double()), ModelError, ["[2, 7]", "test_module.py:"]),
    ],
)
def test_errors(call: Callable[[nn.Module], Any], error: type[Exception], texts: list[str]) -> None:
    with pytest.raises(error) as e:
        call(Perceptron().double())
    assert "\n" not in str(e.value)
    assert [t for t in texts if t not in str(e.value)] == []


def test_errors_of_what_is_loaded(perceptron: Any, tmp_path: Path) -> None:
    model = perceptron[1]
    with pytest.raises(UsageError, match="loaded already: it takes no loss"):
        distir.simulate(model, loss="mse")  # pyright: ignore
    with pytest.raises(UsageError, match=r"Perceptron has none .*torch.save"):
        distir.run(model.training("mse"), save=tmp_path / "x.onnx")
    with pytest.raises(UsageError, match="has no output 'nothing'"):
        model.training("mse", output="nothing")


def test_run_saves_as_the_command_does(tmp_path: Path) -> None:
    model = distir.load("examples/mlp.onnx", {"batch": 4}, loss="mse")
    result = distir.run(model, steps=2, backend="numpy", save=tmp_path / "out.onnx")
    again = distir.load(tmp_path / "out.onnx", {"batch": 4})
    got = {v.name: x for v, x in again.arrays.items()}
    assert result.weights
    assert all(np.array_equal(got[name], x) for name, x in result.weights.items())
    for path, text in (("/no/such/folder/x.onnx", "cannot write"), (tmp_path, "cannot write")):
        with pytest.raises(UsageError, match=text):
            distir.run(model, options=RunOptions(save=path), backend="numpy")
    with pytest.raises(UsageError, match="needs a loss"):
        distir.run("examples/mlp.onnx", dims={"batch": 4}, save=tmp_path / "x.onnx", backend="numpy")


def transformer(kind: str, **sizes: Any) -> nn.Module:
    """A language model of transformers in float64, its weights moved off the constants at which they start."""
    import transformers

    torch.manual_seed(0)
    module = getattr(transformers, f"{kind}ForCausalLM" if kind != "GPT2" else "GPT2LMHeadModel")(
        getattr(transformers, f"{kind}Config")(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes)
    )
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    return module.double().eval()


def follows(module: nn.Module, example: Any, data: Arrays, plan: Plan, optimizer: str) -> None:
    """Training by the cross-entropy of its output is torch's."""
    losses, want = trained(module, data, cross_entropy, optimizer, 3)
    step = distir.load(
        module, example, {"batch": BATCH}, loss="cross-entropy", optimizer=OPTIMIZERS[optimizer][0], output=0
    )
    result = distir.run(step, plan, data=data, steps=3, backend="numpy")
    np.testing.assert_allclose(result.losses, losses, rtol=0, atol=1e-10)
    agree(module, want)


IDS = random(input_ids=((8,), 64), labels=((8,), 64))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(dp=2, tp=2, zero=1), Plan(pp=2, microbatches=2)], ids=str)
def test_gpt2(plan: Plan) -> None:
    """Its head is tied; the cache that it returns is left out."""
    module = transformer("GPT2", n_positions=8, n_embd=16, n_layer=2, n_head=2)
    assert module.lm_head.weight is module.transformer.wte.weight  # pyright: ignore
    follows(module, torch.zeros(2, 8, dtype=torch.int64), IDS, plan, "adamw")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_other_types(dtype: str) -> None:
    """Weights in the run are those handed back, of the module's type; dropout is drawn the same under each plan."""
    torch.manual_seed(0)
    t = getattr(torch, dtype)
    module = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 8)).to(t).train()
    before = copy.deepcopy(module)
    step = distir.load(module, torch.randn(2, 8).to(t), {"batch": BATCH}, loss="mse", optimizer=distir.SGD(0.5))
    result = distir.run(step, Plan(dp=2), steps=2, backend="numpy", check=True)
    assert {p.dtype for p in module.parameters()} == {t}
    for name, p in module.named_parameters():
        np.testing.assert_array_equal(p.detach().double().numpy(), result.weights[name].astype(np.float64))
        assert not torch.equal(p, before.get_parameter(name))
    module.load_state_dict(before.state_dict())  # in place: the loaded model follows
    again = distir.run(step, Plan(tp=2), steps=2, backend="numpy", check=True)
    np.testing.assert_allclose(again.losses, result.losses, rtol=0, atol=5e-2)


@pytest.mark.slow
def test_a_loss_of_transformers() -> None:
    """Labels are an input; dims have names. The loss is in float32, whatever the weights are in."""
    module, ids = transformer("GPT2", n_positions=8, n_embd=16, n_layer=1, n_head=2).float(), torch.zeros(2, 4).long()
    names = {k: {0: "batch", 1: "length"} for k in ("input_ids", "labels")}
    inputs = {"input_ids": ids, "labels": ids}
    step = distir.load(module, inputs, {"batch": BATCH, "length": 8}, dim_names=names, loss="loss")
    before = copy.deepcopy(module)
    result = distir.run(step, Plan(dp=2), data=IDS, steps=1, backend="numpy", check=True)
    batch = {k: torch.tensor(x[:BATCH]) for k, x in IDS.items()}
    assert result.losses == pytest.approx([before(**batch).loss.item()], abs=1e-5)


class Angles(nn.Module):
    """Of positions, in float64."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(length).double(), 100.0 ** -(torch.arange(0, width, 2).double() / width))
        angles = torch.cat([angles, angles], -1)[None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor, position_ids: Any = None, **_: Any) -> Any:
        return self.cos, self.sin


@pytest.mark.slow
def test_llama() -> None:
    """Angles and norms are in float64: transformers computes them in float32, which each library rounds its way."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    module = transformer("Llama", num_key_value_heads=2, **sizes)
    model: Any = module.model
    model.rotary_emb = Angles(4, 8)
    for layer in model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = (nn.RMSNorm(16, eps=1e-6).double() for _ in range(2))
    model.norm = nn.RMSNorm(16, eps=1e-6).double()
    follows(module, {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}, IDS, Plan(dp=2, tp=2), "sgd")


class Normed(nn.Module):
    """One batch norm, applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(torch.relu(self.norm(self.a(input)))))


def test_running_statistics_are_handed_back(tmp_path: Path) -> None:
    """In training mode they are updated as torch does, and batches counted; a run that is resumed counts all of it."""
    torch.manual_seed(0)
    module = Normed().double()
    nn.init.constant_(module.norm.num_batches_tracked, 10)  # pyright: ignore[reportArgumentType]
    before, again = copy.deepcopy(module.norm.running_mean), copy.deepcopy(module)
    _, want = trained(module, data := random(input=(8,), labels=((), 5)), positional, "sgd", 3)
    step, resumed = (
        distir.load(m, torch.randn(BATCH, 8).double(), loss="cross-entropy", optimizer=OPTIMIZERS["sgd"][0])
        for m in (module, again)
    )
    distir.run(step, Plan(dp=2), data=data, steps=2, backend="numpy", checkpoint=tmp_path)
    assert not torch.equal(module.norm.running_mean, before)  # pyright: ignore
    assert module.norm.num_batches_tracked == 14
    for each, m in ((step, module), (resumed, again)):
        distir.run(each, Plan(dp=2), data=data, steps=3, backend="numpy", checkpoint=tmp_path, resume=True)
        assert m.norm.num_batches_tracked == want.get_buffer("norm.num_batches_tracked") == 16
    agree(module, want, 1e-7)  # the momentum of an ONNX node is in float32
    for x, y in zip(module.parameters(), want.parameters(), strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_convolutions_with_a_batch_norm(optimizer: str) -> None:
    """In eval mode: its statistics stay as they are."""
    torch.manual_seed(0)
    module = Convolutions().double().eval()
    data = random(x=(3, 8, 8), labels=((), 5))
    statistics = copy.deepcopy(module.norm.running_mean)
    follows(module, torch.randn(2, 3, 8, 8).double(), data, Plan(dp=2, tp=2), optimizer)
    assert torch.equal(module.norm.running_mean, statistics)  # pyright: ignore
    assert not module.training
