"""Decoders by their sizes against the models of transformers, with the same weights."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import distir
from distir.api.model import load
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import verify
from distir.ir.errors import UsageError
from distir.ir.function import Function
from distir.models.decoder import Decoder, angles, decoder
from distir.models.named import is_named, named
from distir.ops.rules import shape_of
from distir.transforms.differentiation.training import training_step
from distir.transforms.rewriting.fuse import fuse

transformers = pytest.importorskip("transformers")


def perturbed(model: Any) -> Any:
    """The model with weights that are not those it begins with: norms begin with ones and zeros."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def gpt2() -> tuple[Decoder, Any, dict[str, np.ndarray]]:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=61, n_positions=12)
    model = perturbed(transformers.GPT2LMHeadModel(config))
    blocks = [(f"{i}", block) for i, block in enumerate(model.transformer.h)]
    weights = {"embedding": model.transformer.wte.weight, "positions": model.transformer.wpe.weight}
    parts = [("norm", model.transformer.ln_f)]
    for i, b in blocks:
        parts += [(f"{i}.norm1", b.ln_1), (f"{i}.norm2", b.ln_2), (f"{i}.attention.qkv", b.attn.c_attn)]
        parts += [(f"{i}.attention.out", b.attn.c_proj), (f"{i}.mlp.in", b.mlp.c_fc), (f"{i}.mlp.out", b.mlp.c_proj)]
    for name, part in parts:
        weights |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
    return Decoder(2, 32, 4, vocab=61, seq=12, batch=2), model, arrays(weights)


def llama(tied: bool) -> tuple[Decoder, Any, dict[str, np.ndarray]]:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=61,
        max_position_embeddings=12,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    model = perturbed(transformers.LlamaForCausalLM(config))
    weights = {"embedding": model.model.embed_tokens.weight, "norm.weight": model.model.norm.weight}
    if not tied:
        weights["head"] = model.lm_head.weight.T
    for i, b in enumerate(model.model.layers):
        a, m = b.self_attn, b.mlp
        weights |= {
            f"{i}.norm1.weight": b.input_layernorm.weight,
            f"{i}.norm2.weight": b.post_attention_layernorm.weight,
            f"{i}.attention.q.weight": a.q_proj.weight.T,
            f"{i}.attention.kv.weight": torch.cat([a.k_proj.weight.T, a.v_proj.weight.T], 1),
            f"{i}.attention.out.weight": a.o_proj.weight.T,
            f"{i}.mlp.in.weight": torch.cat([m.gate_proj.weight.T, m.up_proj.weight.T], 1),
            f"{i}.mlp.out.weight": m.down_proj.weight.T,
        }
    text = f"llama:layers=2,hidden=32,heads=4,kv_heads=2,ffn=48,vocab=61,seq=12,tied={int(tied)}"
    return named(text, {"batch": 2}), model, arrays(weights)


def arrays(weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: w.detach().numpy() for name, w in weights.items()}


MODELS = {"gpt": gpt2, "llama": lambda: llama(False), "llama, tied": lambda: llama(True)}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    config, model, weights = MODELS[name]()
    function = decoder(config)
    verify(function)
    ids = np.random.default_rng(0).integers(0, config.vocab, (config.batch, config.seq))
    given: dict[str, Any] = {"input_ids": ids, **angles(config), **weights}
    assert {v.name for v in function.inputs} == given.keys()
    (got,) = SequentialExecutor().compute(function, [given[v.name] for v in function.inputs])
    with torch.no_grad():
        want = model(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert parameters(function) == sum(p.numel() for p in model.parameters())


def parameters(function: Function) -> int:
    return sum(int(np.prod(shape_of(v))) for v in function.inputs if v.kind == "parameter")


@pytest.mark.parametrize(
    ("text", "billions"),
    [
        ("gpt:layers=96,hidden=12288,heads=96,vocab=51200,seq=2048", 174.6),  # Narayanan et al. 2021, table 1
        ("gpt:layers=105,hidden=20480,heads=128,vocab=51200,seq=2048", 529.6),
        ("llama:layers=80,hidden=8192,heads=64,kv_heads=8,ffn=28672", 68.98),  # Touvron et al. 2023
        ("llama:layers=126,hidden=16384,heads=128,kv_heads=8,ffn=53248,vocab=128256", 405.9),
    ],
)
def test_published_sizes(text: str, billions: float) -> None:
    assert parameters(decoder(named(text, {}))) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_defaults() -> None:
    assert named("gpt:layers=1,hidden=64,heads=4", {}).ffn == 256
    assert named("llama:layers=1,hidden=4096,heads=32", {}).ffn == 11_008
    assert named("gpt:layers=1,hidden=64,heads=4,batch=2", {"batch": 8}).batch == 8
    assert is_named("gpt:layers=1")
    assert not is_named("gpt.onnx")
    assert not is_named("other:layers=1")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("gpt:layers=2", "gpt:layers=2: hidden and heads missing", "such as gpt:layers=12,hidden=768,heads=12"),
        ("gpt:layer=2", "gpt:layer=2: gpt has no 'layer'", "did you mean layers?"),
        ("gpt:layers=2,layers=3", "gpt:layers=2,layers=3: layers is given twice", None),
        ("gpt:layers=x", "gpt:layers=x: expected layers=N, a whole number, got 'layers=x'", None),
        (
            "gpt:layers=2,hidden=8,heads=3",
            "gpt:layers=2,hidden=8,heads=3: hidden 8 does not divide by 3 heads",
            "2 or 4 heads, or give head_size",
        ),
        ("gpt:layers=2,hidden=8,heads=9", r".*: hidden 8 does not divide by 9 heads", "8 heads, or give head_size"),
        ("gpt:layers=2,hidden=8,heads=4,kv_heads=3", r".*: heads 4 does not divide by 3 kv_heads", "kv_heads 2 or 4"),
        ("gpt:layers=0,hidden=8,heads=4", r".*: layers is a whole number of at least 1, got 0", None),
        ("gpt:layers=99999999999,hidden=8,heads=4", r".*: layers is at most 16,384, got 99,999,999,999", None),
        ("gpt:layers=1,hidden=8,heads=4,tied=2", r".*: tied is 0 or 1, got 2", None),
        ("gpt:layers=1,hidden=8,heads=4,dropout=some", r".*: expected dropout=X, a number, got 'dropout=some'", None),
        (
            "gpt:layers=1,hidden=8,heads=4,dropout=1",
            r".*: dropout is a number from 0 to 1, 1 not included, got 1",
            None,
        ),
        ("gpt:layers=1,hidden=8,heads=4,dropout=nan", r".*: dropout is a number from 0 to 1, .* got nan", None),
        ("gpt:layers=1,hidden=8,heads=4,attention=flash", r".*: attention is fused or unfused, got 'flash'", None),
        (
            "gpt:layers=1,hidden=8,heads=4,dropout=0.1,window=2",
            r".*: unfused attention has no window",
            "leave out window, or attention=fused",
        ),
        ("llama:layers=1,hidden=12,heads=4", r".*: rotary positions need heads of even size, got 3", None),
    ],
)
def test_what_is_none(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as e:
        load(text)
    assert re.fullmatch(message, e.value.message)
    assert e.value.hint == hint


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_unfused_attention_computes_the_same_and_stays_unfused(name: str) -> None:
    text = f"{name}:layers=2,hidden=32,heads=4,kv_heads=2,vocab=61,seq=12,batch=2"
    configs = [named(text + more, {}) for more in ("", ",attention=unfused", ",dropout=0.1")]
    assert [c.attention for c in configs] == ["fused", "unfused", "unfused"]
    functions = [decoder(c) for c in configs]
    rng = np.random.default_rng(0)
    given = {v.name: 0.2 * rng.standard_normal(shape_of(v)) for v in functions[0].inputs}
    given |= {"input_ids": rng.integers(0, 61, (2, 12)), **angles(configs[0])}
    results = [SequentialExecutor().compute(f, [given[v.name] for v in f.inputs])[0] for f in functions]
    for f, got in zip(functions, results, strict=True):
        verify(f)
        np.testing.assert_allclose(got, results[0], rtol=1e-4, atol=1e-5)
    for f in functions[1:]:
        assert not any(op.op_type == "Attention" for op in fuse(f).ops)
        step = training_step(f, "cross-entropy", "sgd")
        assert not any(op.op_type.startswith("Attention") for op in fuse(step).ops)
    fused = [op for op in fuse(functions[0]).ops if op.op_type == "Attention"]
    assert len(fused) == 2


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt,dropout=0.2", "llama,dropout=0.2,attention=fused"])
def test_trained_under_a_plan(name: str) -> None:
    """A step of a named model on ranks in this process equals the sequential one."""
    name, _, more = name.partition(",")
    text = f"{name}:layers=2,hidden=32,heads=4,kv_heads=2,vocab=64,seq=8,batch=4,{more}"
    model = distir.load(text.rstrip(","), loss="cross-entropy", dtype="float64")
    kinds = {op.op_type for op in model.function.ops}
    assert ("RandomDropout" in kinds) == ("dropout" in more)
    assert ("Attention" in kinds) == (not more or "fused" in more)
    plan = distir.Plan(dp=2, tp=2, pp=2, microbatches=2)
    result = distir.run(model, plan, steps=2, backend="numpy", check=True)
    assert result.check is not None
    assert result.losses[0] > 1
    assert str(result).startswith(f"{name}: dp 2")
