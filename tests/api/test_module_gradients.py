"""What torch's exporter leaves out of a module, and what is refused as it cannot be taken over: results are torch's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import distir
from distir import Plan
from distir.backends.modules.module_export import export_module
from distir.importer.marks import ExportedCall
from distir.ir.errors import ModelError, ModelWarning
from tests.api.test_module import OPTIMIZERS, trained

CLASSES, WIDTH = 12, 8
PLANS = [Plan(dp=2, tp=2), Plan(pp=2, microbatches=2)]
Loss = Callable[["Words", torch.Tensor, torch.Tensor], torch.Tensor]


class Words(nn.Module):
    """Embeddings with a row of padding, two layers, weights of classes; the loss is a function of them."""

    weight: torch.Tensor

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH, padding_idx=0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("weight", torch.rand(CLASSES))
        self.loss = loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self, ids, labels)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.a(self.words(ids))

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.b(self.hidden(ids)).transpose(1, 2)


def smoothed(**settings: Any) -> Loss:
    return lambda m, ids, labels: functional.cross_entropy(
        m.logits(ids), labels, label_smoothing=0.3, **settings
    ).mean()


def weighted(m: Words, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(m.logits(ids), labels, weight=m.weight, label_smoothing=0.2, ignore_index=3)


def straight_through(m: Words, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    h = m.hidden(ids)
    h = h + ((h * 4).round() / 4 - h).detach()
    return functional.cross_entropy(m.b(h).transpose(1, 2), labels)


def without_grad(m: Words, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    h = m.hidden(ids)
    with torch.no_grad():
        target, twice = m.b(h).tanh(), h * 2
    return functional.mse_loss(m.b(h), target) + (twice * h).mean() + m.b(h).gather(-1, labels[..., None]).mean()


def converted_without_grad(m: Words, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A conversion to the type that is there gives the tensor itself, to which gradients pass."""
    h = m.hidden(ids)
    with torch.no_grad():
        k, scale = h.double().abs().amax(-1, keepdim=True), m.a.weight.to(torch.float64).abs().mean()
        same = h.to(h.dtype)
    return functional.cross_entropy(m.b(h / k * scale).transpose(1, 2), labels) + (same * m.a.bias).mean()


def recomputed(m: Words, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    h: Any = checkpoint(torch.tanh, m.hidden(ids), use_reentrant=True)
    with torch.no_grad():
        k = h.abs().max()
    return functional.cross_entropy(m.b(h / k).transpose(1, 2), labels)


def biased_attention(m: Words, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A trained table of biases, as of relative positions."""
    q = m.hidden(ids).reshape(-1, 4, 2, 4).transpose(1, 2)
    bias = m.b.weight[:4, :4][None, None]
    h = functional.scaled_dot_product_attention(q, q, q, attn_mask=bias).transpose(1, 2).reshape(-1, 4, WIDTH)
    return functional.cross_entropy(m.b(h).transpose(1, 2), labels)


def masked(m: Words, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Assignments by masks: of a number, of a sum, of a row to all rows that a mask selects, and to a mask."""
    h = m.hidden(ids).clone()
    h[h > 0.5] = 0.25
    h[ids % 3 == 1] = m.b.weight[2]
    h[labels[:, 0] == 2] = m.a.bias.sum()
    keep = torch.ones_like(labels, dtype=torch.bool)
    keep[labels == 4] = False
    return functional.cross_entropy(m.b(h).transpose(1, 2), labels.masked_fill(~keep, -100))


def grad_enabled(m: Words, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h = m.hidden(ids)
        with torch.enable_grad():
            h = m.a(h)
    return functional.mse_loss(m.b(h).transpose(1, 2), m.logits(ids).detach())


def large_logits(m: Words, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    truth = (labels % 2).double()[:, None].expand(-1, CLASSES, -1)
    return functional.binary_cross_entropy_with_logits(1000 * m.logits(ids), truth)


def whole(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(**batch)


def arrays(batch: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {k: x.numpy() for k, x in batch.items()}


def load(module: nn.Module, batch: dict[str, torch.Tensor]) -> distir.Model:
    size = len(next(iter(batch.values())))
    return distir.load(module, batch, {"batch": size}, loss="loss", optimizer=OPTIMIZERS["sgd"][0])


@pytest.mark.parametrize(
    "loss",
    [
        smoothed(),
        smoothed(reduction="sum", ignore_index=3),
        smoothed(reduction="none"),
        weighted,
        straight_through,
        without_grad,
        masked,
        grad_enabled,
        converted_without_grad,
        recomputed,
        biased_attention,
        large_logits,
    ],
    ids=[
        "smoothed",
        "sum",
        "none",
        "weighted",
        "straight through",
        "no_grad",
        "masked",
        "enable_grad",
        "converted",
        "recomputed",
        "biased attention",
        "large logits",
    ],
)
@pytest.mark.filterwarnings("error::distir.ir.errors.ModelWarning")
def test_losses_and_updates_are_those_of_torch(loss: Loss) -> None:
    torch.manual_seed(0)
    module = Words(loss).double()
    batch = {"ids": torch.randint(0, CLASSES, (8, 4)), "labels": torch.randint(0, CLASSES, (8, 4))}
    batch["ids"][:, 0] = 0  # padding is there
    losses, want = trained(module, arrays(batch), whole, "sgd", 3)
    assert torch.equal(want.words.weight[0], module.words.weight[0])  # pyright: ignore
    before = copy.deepcopy(module.state_dict())
    for plan in PLANS:
        module.load_state_dict(before)
        data = arrays(batch)
        found = distir.run(load(module, batch), plan, data=data, steps=3, backend="numpy", check=True)
        assert np.allclose(found.losses, losses, rtol=1e-10)
        for name, p in want.named_parameters():
            got: Any = found.weights.get(name, before[name].numpy())  # what no gradient reaches stays
            assert np.allclose(got, p.detach().numpy(), rtol=1e-10, atol=1e-10), name


def test_positions_at_the_row_of_padding() -> None:
    """Indices that are known: several, of which one is padding, and padding alone."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.a = nn.Embedding(5, WIDTH, padding_idx=1), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.table(torch.arange(4)) + self.table(torch.tensor([1]))
            return functional.mse_loss(self.a(x + rows), torch.ones_like(x))

    torch.manual_seed(0)
    module, batch = Positions().double(), {"x": torch.randn(8, 4, WIDTH).double()}
    losses, want = trained(module, arrays(batch), whole, "sgd", 2)
    found = distir.run(load(module, batch), data=arrays(batch), steps=2, backend="numpy")
    assert np.allclose(found.losses, losses, rtol=1e-10)
    assert np.allclose(found.weights["table.weight"], want.table.weight.detach().numpy(), rtol=0, atol=1e-10)  # pyright: ignore


def test_gradients_are_taken_wherever_it_is_loaded() -> None:
    torch.manual_seed(0)
    module = Words(without_grad).double()
    batch = {"ids": torch.randint(0, CLASSES, (8, 4)), "labels": torch.randint(0, CLASSES, (8, 4))}
    losses, _ = trained(module, arrays(batch), whole, "sgd", 2)
    with torch.no_grad():
        model = load(module, batch)
    assert np.allclose(distir.run(model, data=arrays(batch), steps=2, backend="numpy").losses, losses, rtol=1e-10)


def test_an_example_of_valid_shapes_only() -> None:
    """Its values are not needed, so that the module may fail for them: then a note says so."""
    ids = torch.full((8, 4), CLASSES)
    with pytest.warns(ModelWarning, match="Words fails for the example inputs"):
        load(Words(smoothed()), {"ids": ids, "labels": ids})


def test_of_a_file_too(tmp_path: Path) -> None:
    """A file says by its metadata what the module did."""
    torch.manual_seed(0)
    module = Words(lambda m, i, y: straight_through(m, i, y) + smoothed()(m, i, y)).double()
    batch = {"ids": torch.randint(0, 3, (8, 4)), "labels": torch.randint(0, CLASSES, (8, 4))}
    losses, want = trained(module, arrays(batch), whole, "sgd", 1)
    file = tmp_path / "words.onnx"
    torch.onnx.export(module, tuple(batch.values()), file, dynamo=True, optimize=False, verbose=False)
    model = distir.load(file, loss=onnx.load(file).graph.output[0].name, optimizer=OPTIMIZERS["sgd"][0])
    found = distir.run(model, data=arrays(batch), steps=1, backend="numpy")
    assert abs(found.losses[0] - losses[0]) < 1e-10
    for name, p in want.named_parameters():
        assert np.allclose(found.weights[name], p.detach().numpy(), rtol=0, atol=1e-10), name


def test_dropout_of_attention_drops() -> None:
    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
            self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            h = self.attention(h, h, h, need_weights=False)[0][:, None]
            return functional.scaled_dot_product_attention(h, h, h, dropout_p=0.25, is_causal=True).square().mean()

    x = torch.randn(4, 3, WIDTH)
    ratios = [
        [op.attributes["ratio"] for op in load(module, {"x": x}).function.ops if op.op_type == "RandomDropout"]
        for module in (Attentive().train(), Attentive().eval())
    ]
    assert sorted(ratios[0]) == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.25, 0.5])
    assert ratios[1] == [0.25]  # dropout_p is always applied


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *d: torch.Tensor) -> torch.Tensor:
        return -d[0]


def hooked_inside(m: Words, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    h = m.hidden(ids)
    h.register_hook(lambda d: d * 0.1)
    return h.mean()


def quantized(m: Words, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(m.hidden(ids), 0.1, 0, -128, 127).mean()


def clamped(m: Words, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.a.weight.clamp_(-0.2, 0.2)
    return m.hidden(ids).mean()


def hooked(module: Words) -> None:
    module.a.weight.register_hook(lambda d: -d)


def hooked_in_all(module: Words) -> None:
    module.b.register_full_backward_hook(lambda m, before, after: None)


def by_frequency(module: Words) -> None:
    module.words.scale_grad_by_freq = True


@pytest.mark.parametrize(
    ("loss", "change", "message"),
    [
        (
            lambda m, i, y: Reversed.apply(m.logits(i)).mean(),
            None,
            "the gradient that Reversed defines is not exported",
        ),
        (hooked_inside, None, "a hook on a gradient is not exported"),
        (quantized, None, "the gradient that torch.fake_quantize defines is not exported"),
        (clamped, None, "forward changes the parameter a.weight"),
        (smoothed(), hooked, "a.weight has a hook on gradients"),
        (smoothed(), hooked_in_all, "b has a hook on gradients"),
        (smoothed(), by_frequency, "scale_grad_by_freq"),
    ],
    ids=["Function", "hook inside", "fake_quantize", "clamped", "hook", "module's hook", "by frequency"],
)
def test_refused(loss: Loss, change: Callable[[Words], None] | None, message: str) -> None:
    module, apply = Words(loss), torch.autograd.Function.apply
    if change is not None:
        change(module)
    ids = torch.zeros(4, 4, dtype=torch.int64)
    with pytest.raises(ModelError, match=message) as e:
        load(module, {"ids": ids, "labels": ids})
    assert e.value.hint
    assert torch.autograd.Function.apply == apply


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False)), (8, 6)),
        (nn.Sequential(nn.EmbeddingBag(10, 6, mode="sum"), nn.Linear(6, 6)), None),
    ],
    ids=["batch norm without scale", "EmbeddingBag"],
)
def test_in_float64_all_is(module: nn.Sequential, shape: tuple[int, ...] | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).double() if shape else torch.randint(0, 10, (8, 4))
    y = torch.randn(8, 6).double()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(module).double()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.mse_loss(self.inner(x), y)

    own = Loss()
    losses, want = trained(own, arrays({"x": x, "y": y}), whole, "sgd", 2)
    data = arrays({"x": x, "y": y})
    found = distir.run(load(own, {"x": x, "y": y}), data=data, steps=2, backend="numpy")
    assert np.allclose(found.losses, losses, rtol=1e-12)
    for name, p in want.named_parameters():
        assert np.allclose(found.weights[name], p.detach().numpy(), rtol=0, atol=1e-12), name


def test_buffers_that_stay_are_noted() -> None:
    """Those of batch norms and counters are kept up, which need no note."""

    class Moving(nn.Module):
        mean: torch.Tensor

        def __init__(self, moves: bool) -> None:
            super().__init__()
            self.a, self.norm, self.moves = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), moves
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.a(x))
            if self.moves:
                self.mean.mul_(0.9).add_(h.detach().mean(0) * 0.1)
            return (h - self.mean).square().mean()

    batch = {"x": torch.randn(8, WIDTH)}
    with pytest.warns(ModelWarning, match="forward changes the buffer mean: in training it stays as it is"):
        load(Moving(True), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        load(Moving(False), batch)


def test_what_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imported program is compared with the module, but where it is large or its results are random."""
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, CLASSES, (8, 4)), "labels": torch.randint(0, CLASSES, (8, 4))}
    module, attentive = Words(smoothed()).double(), nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True).eval()
    random = Words(lambda m, ids, labels: functional.dropout(m.hidden(ids)).mean())
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        load(module, batch)
    monkeypatch.setattr("distir.importer.rules_math.call_of", lambda node: ExportedCall("", [], {}))
    assert export_module(attentive, torch.randn(4, 3, WIDTH)).example is not None, "without dropout it is not random"
    lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5)
    assert export_module(lstm.eval(), torch.randn(4, 3, WIDTH)).example is not None
    assert export_module(lstm.train(), torch.randn(4, 3, WIDTH)).example is None
    assert export_module(attentive.train(), torch.randn(4, 3, WIDTH)).example is None
    with pytest.warns(
        ModelWarning, match=r"Words: for the example inputs %loss differs from the module's own by 0\.\d+"
    ):
        load(module, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        load(random, batch)
        distir.load(attentive, torch.randn(4, 3, WIDTH))
        monkeypatch.setattr("distir.api.module_outputs._FLOPS", 100.0)
        load(module, batch)
