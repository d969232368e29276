"""Models exported by torch alone, as users do: their results, and which of their initializers are trained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import distir
from distir.api.model import load
from distir.executor.reference.sequential import SequentialExecutor
from distir.transforms.rewriting.fuse import fuse
from tests.importer.published_models import Pixels, Tokens, perturb
from tests.importer.published_models import exported as written

B, S = 2, 8
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


WIDTHS = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
IMAGES: dict[str, dict[str, Any]] = {
    "ResNet": {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2]},
    "RegNet": {"embedding_size": 8, "groups_width": 4, **WIDTHS},
    "ConvNext": WIDTHS,
    "ConvNextV2": WIDTHS,
    "MobileNetV2": {"depth_multiplier": 0.25},
    "Segformer": {"hidden_sizes": [8, 16, 16, 16]},
}
"""Convolutional networks, small."""


def built(kind: str, **sizes: Any) -> torch.nn.Module:
    """A model of transformers, by the beginning of its class's name."""
    import transformers

    heads = {"Bert": "ForMaskedLM", **dict.fromkeys(["ViT", *IMAGES], "ForImageClassification")}
    config = getattr(transformers, f"{kind}Config")(**({} if kind in IMAGES else SIZES), **sizes)
    model = getattr(transformers, kind + heads.get(kind, "ForCausalLM"))._from_config(config)
    return (Pixels if kind in ("ViT", *IMAGES) else Tokens)(model)


def exported(
    module: torch.nn.Module, inputs: dict[str, torch.Tensor], path: Path, optimize: bool = True, opset: int = 20
) -> Path:
    """A file of the module, with perturbed weights if the exporter's optimizer is to see them."""
    if optimize:
        perturb(module)
    return written(module, inputs, path, optimize, opset)


# a tied embedding of fewer numbers is folded into a transposed copy, and is tied no more
TEXT = {"vocab_size": 401, "max_position_embeddings": 16}
CAUSAL = {**TEXT, "num_key_value_heads": 2, "use_cache": False}


@pytest.mark.parametrize(
    ("kind", "sizes", "masked", "attention"),
    [
        ("Llama", CAUSAL, False, {"causal": True}),
        pytest.param("Llama", CAUSAL, True, {"mask": True}, marks=pytest.mark.slow),
        pytest.param("Mistral", {**CAUSAL, "sliding_window": 3}, False, {"mask": True}, marks=pytest.mark.slow),
        pytest.param("Qwen2", CAUSAL, True, {"mask": True}, marks=pytest.mark.slow),
        pytest.param("GPTNeoX", {**TEXT, "use_cache": False}, False, {"causal": True}, marks=pytest.mark.slow),
        ("Bert", TEXT, True, {"mask": True}),
        pytest.param("Bert", TEXT, False, {}, marks=pytest.mark.slow),
        ("ViT", {"image_size": 8, "patch_size": 4}, False, {}),
    ],
)
def test_of_transformers(kind: str, sizes: dict[str, Any], masked: bool, attention: Any, tmp_path: Path) -> None:
    """Results equal onnxruntime's. Parameters of the module are trained, tables of angles are not; known masks are
    used."""
    torch.manual_seed(0)
    module = built(kind, **sizes)
    inputs = {"input_ids": torch.randint(401, (B, S))}
    if kind == "ViT":
        inputs = {"pixel_values": torch.randn(B, 3, 8, 8)}
    if masked:
        inputs["attention_mask"] = torch.ones(B, S, dtype=torch.int64)
        inputs["attention_mask"][1, 5:] = 0
    path = exported(module, inputs, tmp_path / "m.onnx")
    arrays = {name: x.numpy() for name, x in inputs.items()}
    (want,) = onnxruntime.InferenceSession(path).run(None, arrays)
    model = load(path, {"batch": B})
    given = {v: model.arrays[v] if v in model.arrays else arrays[v.name] for v in model.function.inputs}
    (got,) = SequentialExecutor().compute(model.function, given)
    np.testing.assert_allclose(got, np.asarray(want), atol=1e-5)
    trained = [v for v in model.function.inputs if v.kind == "parameter"]
    assert len(trained) == len(list(module.parameters()))
    step = load(path, {"batch": B}, loss="cross-entropy")
    (op,) = [op for op in step.function.ops if op.op_type == "Attention"]
    assert op.attributes.get("causal", False) is attention.get("causal", False)
    assert len(op.inputs) == 3 + attention.get("mask", False)
    program = distir.distribute(step, distir.Plan())
    kinds = {op.op_type for f in program.callees() for op in f.ops}
    assert ("GroupedAttention" in kinds) is ("num_key_value_heads" in sizes)
    norms = [op.inputs[1].kind for op in step.function.ops if op.op_type == "RMSNorm"]
    assert norms == ["parameter"] * (3 if kind in ("Llama", "Mistral", "Qwen2") else 0)


@pytest.mark.parametrize("kind", [k if k == "ResNet" else pytest.param(k, marks=pytest.mark.slow) for k in IMAGES])
def test_of_images(kind: str, tmp_path: Path) -> None:
    """Convolutional networks: results equal onnxruntime's, and a step of data and tensor parallel training one
    device's."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 64, 64)
    path = exported(built(kind, **IMAGES[kind]), {"pixel_values": x}, tmp_path / "m.onnx")
    (want,) = onnxruntime.InferenceSession(path).run(None, {"pixel_values": x.numpy()})
    model = load(path, {"batch": 4})
    given = {v: model.arrays[v] if v in model.arrays else x.numpy() for v in model.function.inputs}
    (got,) = SequentialExecutor().compute(model.function, given)
    np.testing.assert_allclose(got, np.asarray(want), atol=1e-5)
    assert "Conv" in {op.op_type for op in model.function.ops}
    step = load(path, {"batch": 4}, loss="cross-entropy", optimizer="sgd", dtype="float64")
    done = distir.run(step, distir.Plan(dp=2, tp=2), steps=1, backend="numpy", check=True)
    assert done.check is not None
    assert done.check.ok


def test_as_it_was_written(tmp_path: Path) -> None:
    """Without the exporter's optimizer every parameter is present under its name; known masks are recognized, too."""
    module = built("GPTNeoX", **TEXT, use_cache=False)
    inputs = {"input_ids": torch.randint(401, (B, S))}
    model = load(exported(module, inputs, tmp_path / "m.onnx", optimize=False), {"batch": B}, loss="cross-entropy")
    trained = {v.name for v in model.function.inputs if v.kind == "parameter"}
    assert trained == {name for name, _ in module.named_parameters()}
    (op,) = [op for op in model.function.ops if op.op_type == "Attention"]
    assert op.attributes["causal"]


@pytest.mark.parametrize(
    ("dtype", "optimize", "opset"),
    [
        (torch.float32, True, 20),
        (torch.bfloat16, False, 20),
        (torch.bfloat16, True, 23),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(torch.float32, False, 20), (torch.bfloat16, True, 20), (torch.float32, True, 23)]
        ],
    ],
    ids=str,
)
def test_a_norm_is_one_op(dtype: torch.dtype, optimize: bool, opset: int, tmp_path: Path) -> None:
    """Root-mean-square norms in 16 bits are written with casts; the exporter's optimizer fuses those of opset 23."""
    torch.manual_seed(0)
    module = built("Llama", **CAUSAL).to(dtype)
    path = exported(module, {"input_ids": torch.randint(401, (B, S))}, tmp_path / "m.onnx", optimize, opset)
    model = load(path, {"batch": B})
    fused = fuse(model.function)
    kinds = Counter(op.op_type for op in fused.ops)
    assert kinds["RMSNormalization"] == 3
    assert not {"Pow", "Sqrt", "Reciprocal"} & kinds.keys()
    given = {v: model.arrays.get(v, np.arange(B * S).reshape(B, S)) for v in fused.inputs}
    (want,), (got,) = (SequentialExecutor().compute(f, given) for f in (model.function, fused))
    near = 1e-5 if dtype is torch.float32 else 0.05
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=near, atol=near)


class Masked(torch.nn.Module):
    """Self-attention with a mask and a table that are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.register_buffer("mask", torch.ones(S, S, dtype=torch.bool).triu(1))
        self.register_buffer("table", torch.randn(S, 16))

    def forward(self, x: Any) -> Any:
        x = x + self.table
        return self.attention(x, x, x, need_weights=False, attn_mask=self.mask)[0]


def test_of_torch(tmp_path: Path) -> None:
    """Masks and factors that the exporter has folded are no weights, so that attention is recognized as causal."""
    torch.manual_seed(0)
    module, x = Masked(), torch.randn(B, S, 16)
    model = load(exported(module, {"x": x}, tmp_path / "m.onnx"), {"batch": B}, loss="mse")
    parameters = [v for v in model.function.inputs if v.kind == "parameter"]
    assert len(parameters) == len(list(module.parameters()))
    (op,) = [op for op in model.function.ops if op.op_type == "Attention"]
    assert op.attributes["causal"]


def test_a_flag_that_says_nothing_of_an_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples.export import main

    with pytest.raises(SystemExit) as stopped:
        main(["mlp", "--ids-only", "--out", str(tmp_path / "m.onnx")])
    assert stopped.value.code == 2
    assert "mlp takes no ids" in capsys.readouterr().err
