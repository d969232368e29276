"""The models built in Python, against PyTorch and spread over devices."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import distir
from distir.api.data import Data
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import parse, pformat, same, verify
from distir.ir.errors import UsageError
from distir.ir.type import Float64
from distir.models import gpt, mlp
from distir.transforms.differentiation.training import training_step

PLANS = [distir.Plan(2, 1, 1), distir.Plan(1, 2, 1), distir.Plan(1, 1, 2, 2), distir.Plan(2, 2, 2, 2)]


def arrays_of(model, seed=0):
    arrays = model.initial(seed)
    data = Data(model.function, arrays, seed=seed)
    return {v.name: x for v, x in (arrays | data.fixed() | data.step(0)).items()}


def compute(function, arrays):
    results = SequentialExecutor().compute(function, [arrays[v.name] for v in function.inputs])
    return {v.name: x for v, x in zip(function.outputs, results, strict=True)}


@pytest.mark.parametrize("function", [mlp(3, 4, 6), gpt(2, 16, 4, 11, 5, 2)], ids=["mlp", "gpt"])
def test_verifies_and_prints(function):
    verify(function)
    assert same(parse(pformat(function)), function)


def test_mlp_has_the_gradients_of_autograd():
    function = mlp(3, 4, 6, Float64)
    arrays = arrays_of(distir.Model(function))
    got = compute(function, arrays)
    weights = [torch.tensor(arrays[f"w{c}"], requires_grad=True) for c in "ABC"]
    a = torch.tensor(arrays["x"])
    for w in weights:
        a = torch.relu(a @ w)
    loss = (a - torch.tensor(arrays["z"])) ** 2 / 4
    np.testing.assert_allclose(got["l"], loss.detach().numpy(), rtol=1e-12)
    for c, g in zip("ABC", torch.autograd.grad(loss.sum(), weights), strict=True):
        np.testing.assert_allclose(got[f"dw{c}"], g.numpy(), rtol=1e-10, atol=1e-14)


def test_mlp_of_many_layers_has_names_of_all_kinds():
    function = mlp(100, 2, 2)
    assert "w~" in {v.name for v in function.inputs}
    assert same(parse(pformat(function)), function)


def test_gpt_computes_what_torch_computes():
    layers, width, heads, vocabulary, sequence = 2, 16, 4, 11, 5
    function = gpt(layers, width, heads, vocabulary, sequence, 3, Float64)
    arrays = arrays_of(distir.Model(function))
    p = {k: torch.tensor(x) for k, x in arrays.items()}

    def norm(x, name):
        return torch.nn.functional.layer_norm(x, (width,), p[f"{name}.weight"], p[f"{name}.bias"])

    def linear(x, name):
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    x = p["wte"][p["input_ids"]] + p["wpe"]
    for i in range(layers):
        q, k, v = linear(norm(x, f"h{i}.ln_1"), f"h{i}.attn.qkv").chunk(3, -1)
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).flatten(2), f"h{i}.attn.proj")
        y = torch.nn.functional.gelu(linear(norm(x, f"h{i}.ln_2"), f"h{i}.mlp.fc"), approximate="tanh")
        x = x + linear(y, f"h{i}.mlp.proj")
    want = norm(x, "ln") @ p["wte"].T
    np.testing.assert_allclose(compute(function, arrays)["logits"], want, rtol=1e-10, atol=1e-12)


def test_heads_must_divide():
    with pytest.raises(UsageError, match="width 16 does not divide by 3 heads"):
        gpt(1, 16, 3, 11, 5, 2)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_mlp_is_spread(plan):
    """Its backward pass is written by hand: nothing says which op belongs to which."""
    function = mlp(4, 8, 12, Float64)
    check = distir.run(function, plan, backend="numpy", check=True).check
    assert check is not None
    assert check.outputs is not None
    assert check.outputs.error < 1e-12


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_gpt_is_spread(plan):
    model = distir.Model(training_step(gpt(2, 16, 4, 12, 4, 8, Float64), "cross-entropy", "sgd"))
    check = distir.run(model, plan, steps=2, backend="numpy", check=True).check
    assert check is not None
    assert check.outputs is not None
    assert check.weights is not None
    assert max(check.outputs.error, check.weights.error) < 1e-12


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpt2-lrage:batch=4", "did you mean gpt2-large?"),
        ("nothing", "models by name are gpt,"),
        ("nothing.onnx", None),
        ("nothing.**", None),
        ("examples/gpt2-tny.onnx", "did you mean examples/gpt2-tiny.onnx?"),
    ],
)
@pytest.mark.parametrize("read", [distir.load, distir.inspect])
def test_a_model_that_there_is_not(read, name, hint, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(UsageError, match=re.escape(f"there is no file {name}")) as e:
        read(name)
    assert e.value.hint == hint or (e.value.hint or "").startswith(hint or "?")
