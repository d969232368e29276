"""Models by a Hugging Face config against those of transformers: parameters, logits and gradients."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distir
from distir.api.model import Model, as_model
from distir.cli import main
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import verify
from distir.ir.errors import DistirError, ModelError, UsageError
from distir.ir.type import BFloat16, Float64
from distir.models import from_config
from distir.models.architectures import ARCHITECTURES
from distir.models.configs import described
from distir.models.decoder import angles
from distir.models.rotary import turns
from distir.ops.rules import shape_of
from distir.transforms.differentiation.training import training_step
from tests.models.published import LLAMA3_SCALING, PUBLISHED, sizes

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")

BATCH, SEQ, VOCAB = 2, 12, 61


@pytest.fixture(autouse=True)
def one_thread():
    """Small products are quicker so, where other programs run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def theirs(config: dict[str, Any], **how: Any) -> Any:
    """transformers' model of a config. Its classes change what they are given; what pads would have no gradient."""
    fields = json.loads(json.dumps(config))
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    made.pad_token_id = None
    return transformers.AutoModelForCausalLM.from_config(made, **how)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_number_of_parameters(name: str) -> None:
    config, count = PUBLISHED[name]
    function = from_config(config, sequence=64, capacity=1e9).function
    assert sum(math.prod(shape_of(v)) for v in function.inputs if v.kind == "parameter") == count
    with torch.device("meta"):
        model = theirs(config)
    assert sum(p.numel() for p in model.parameters()) == count


# ---------------------------------------------------------------- logits and gradients

SMALL = sizes(32, 40, 2, 4, vocab_size=VOCAB, max_position_embeddings=32)
GQA = {**SMALL, "num_key_value_heads": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 16}
OPT = {
    "model_type": "opt",
    **{k: x for k, x in SMALL.items() if k != "intermediate_size"},
    "ffn_dim": 40,
    "word_embed_proj_dim": 32,
}
GEMMA2 = {**GQA, "model_type": "gemma2", "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5}
GEMMA3 = {**GEMMA2, "model_type": "gemma3_text", "sliding_window_pattern": 2}
MIXTRAL = {**GQA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 3}
LLAMA = {**GQA, "model_type": "llama"}
EXTENDED = {"factor": 4.0, "original_max_position_embeddings": 8}
TINY: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, other width, untied": {**GPT2, "n_inner": 24, "tie_word_embeddings": False, "activation_function": "relu"},
    "opt": OPT,
    "opt, no biases": {**OPT, "enable_bias": False, "tie_word_embeddings": False},
    "gpt_neox": {**SMALL, "model_type": "gpt_neox", "rotary_pct": 0.25},
    "gpt_neox, one after the other": {
        **SMALL,
        "model_type": "gpt_neox",
        "rotary_pct": 0.5,
        "use_parallel_residual": False,
        "attention_bias": False,
    },
    "llama": {**LLAMA, "rms_norm_eps": 1e-3, "rope_theta": 500.0},
    "llama, as many heads, tied": {**SMALL, "model_type": "llama", "tie_word_embeddings": True},
    "llama, biases, larger heads": {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "llama, llama3": {**LLAMA, "rope_scaling": {**LLAMA3_SCALING, "original_max_position_embeddings": 16}},
    "llama, linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama, yarn": {**LLAMA, "rope_scaling": {"rope_type": "yarn", **EXTENDED}},
    "mistral": {**GQA, "model_type": "mistral", "sliding_window": 5},
    "mistral, no window": {**GQA, "model_type": "mistral", "sliding_window": None},
    "mixtral": MIXTRAL,
    "mixtral, three of four, window": {**MIXTRAL, "num_experts_per_tok": 3, "sliding_window": 4},
    "qwen2": {**GQA, "model_type": "qwen2"},
    "qwen2, window of the last layers": {
        **GQA,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": {**GQA, "model_type": "qwen3", "head_dim": 12},
    "qwen2_moe": {**GQA, **EXPERTS, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 28},
    "qwen3_moe": {**GQA, **EXPERTS, "model_type": "qwen3_moe", "norm_topk_prob": True, "head_dim": 12},
    "gemma": {**SMALL, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 12},
    "gemma2": GEMMA2,
    "gemma2, uncapped, untied": {
        **GEMMA2,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
    },
    "gemma3_text": GEMMA3,
    "gemma3_text, linear": {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "phi": {**SMALL, "model_type": "phi", "partial_rotary_factor": 0.5},
    "phi, grouped": {**GQA, "model_type": "phi", "partial_rotary_factor": 0.25, "hidden_act": "gelu"},
    "phi3": {**SMALL, "model_type": "phi3", "sliding_window": 4, "pad_token_id": 0},
    "phi3, grouped, longrope": {
        **GQA,
        "model_type": "phi3",
        "original_max_position_embeddings": 8,
        "pad_token_id": 0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.0, 1.5, 2.0],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
    },
}


def no_drops(config: dict[str, Any]) -> float:
    """The capacity with which experts take all tokens."""
    experts = config.get("num_experts", config.get("num_local_experts", 1))
    return experts / config.get("num_experts_per_tok", 1)


def perturbed(model: Any) -> Any:
    """The model with weights that are not those it begins with: norms begin with ones and zeros."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.double().eval()


def saved(model: Any, folder: Path) -> dict[str, np.ndarray]:
    """What transformers writes into a file of the model, by the names in it."""
    model.save_pretrained(folder)
    return safetensors.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", TINY)
def test_logits_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """By the files that it saves. Norms and angles it computes in single precision."""
    config = TINY[name]
    model = perturbed(theirs(config, attn_implementation="eager", experts_implementation="eager"))
    weights = saved(model, tmp_path / "weights")
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(0, VOCAB, (2, BATCH, SEQ))
    logits = model(torch.from_numpy(ids)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten())
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    slopes = saved(model, tmp_path / "gradients")

    how: dict[str, Any] = {"sequence": SEQ, "batch": BATCH, "capacity": no_drops(config), "dtype": Float64}
    made = from_config(config, weights=weights, **how)
    verify(made.function)
    given = {**made.arrays, "input_ids": ids, "labels": labels}
    (got,) = SequentialExecutor().compute(made.function, [given[v.name] for v in made.function.inputs])
    np.testing.assert_allclose(got, logits.detach(), rtol=1e-5, atol=1e-5)

    step = training_step(made.function, "cross-entropy", "sgd", gradients=True)
    rows = [given.get(v.name, np.float64(0.0)) for v in step.inputs]
    total, *results = SequentialExecutor().compute(step, rows)
    np.testing.assert_allclose(total, loss.detach(), rtol=1e-6)
    want = from_config(config, weights=slopes, **how).arrays
    parameters = [v.name for v in made.function.inputs if v.kind == "parameter"]
    assert sum(x.size for x in slopes.values()) == sum(want[n].size for n in parameters)
    for n, slope in zip(parameters, results, strict=False):
        np.testing.assert_allclose(slope, want[n], rtol=1e-5, atol=1e-6, err_msg=n)


@pytest.mark.parametrize("name", TINY)
def test_files_that_transformers_writes_say_the_same(name: str) -> None:
    """With all defaults, and with the fields that newer versions have instead of older ones."""
    config = TINY[name]
    fields = json.loads(json.dumps(config))
    written = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields).to_dict()
    assert described(json.loads(json.dumps(written)), {"seq": SEQ}) == described(config, {"seq": SEQ})


def test_every_architecture_is_compared() -> None:
    assert {config["model_type"] for config in TINY.values()} == set(ARCHITECTURES)
    assert {config["model_type"] for config, _ in PUBLISHED.values()} == set(ARCHITECTURES)


# ---------------------------------------------------------------- positions

SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": LLAMA3_SCALING,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn, amplitudes": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 16.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "short_factor": [1 + k / 50 for k in range(32)],
        "long_factor": [1 + k for k in range(32)],
    },
}


@pytest.mark.parametrize("seq", [500, 1500])
@pytest.mark.parametrize("name", SCALED)
def test_angles_are_those_of_transformers(name: str, seq: int) -> None:
    """Within the positions of training, and beyond them."""
    config = {**LLAMA, "hidden_size": 256, "max_position_embeddings": 1024, "rope_theta": 50_000.0}
    made = described({**config, "rope_scaling": SCALED[name]}, {"seq": seq})
    cos, sin = turns(made.turned, made.rotary_base, made.rotary_scaling, seq)
    theirs_config = transformers.LlamaConfig(
        **{k: x for k, x in config.items() if k not in ("model_type", "rope_theta")},
        rope_parameters={**SCALED[name], "rope_theta": 50_000.0},
    )
    if name == "default":
        rates, amplitude = 50_000.0 ** (-torch.arange(0, 64, 2) / 64), 1.0
    else:
        rule = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[SCALED[name]["rope_type"]]
        rates, amplitude = rule(theirs_config, "cpu", seq_len=seq)
    angles = np.tile(np.outer(np.arange(seq), rates.double().numpy()), 2)
    np.testing.assert_allclose(cos, amplitude * np.cos(angles), atol=3e-4)  # rates there are in single precision
    np.testing.assert_allclose(sin, amplitude * np.sin(angles), atol=3e-4)


# ---------------------------------------------------------------- what is loaded, and what is not


def test_a_file_its_folder_and_its_fields_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    sizes = {"batch": 4, "seq": 8}
    models = [distir.load(m, sizes) for m in (folder, folder / "config.json", tmp_path / "other.json", LLAMA)]
    assert [m.name for m in models] == ["small", "small", "other.json", "llama"]
    for model in models:
        assert distir.same(model.function, models[0].function)
        assert model.function.updates  # trained by cross-entropy
        assert (model.batch, model.tokens) == (4, 32)
    assert not distir.load(folder, sizes, loss="none").function.updates


def test_what_is_built_is_a_model_with_its_arrays() -> None:
    """Weights are not read before they are needed."""

    class Unread(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise AssertionError(name)

    built = from_config(LLAMA, sequence=SEQ, weights=Unread())
    model = as_model(built)
    assert isinstance(model, Model)
    assert {v.name for v in model.arrays} == {v.name for v in built.function.inputs} - {"input_ids"}
    with pytest.raises(ModelError, match=r"the weights have no model\.embed_tokens\.weight"):
        built.arrays["embedding"]
    found = from_config(LLAMA, weights={"embed_tokens.weight": np.zeros((3, 32))}, sequence=SEQ).arrays
    with pytest.raises(ModelError, match=r"the weights of embedding: expected shape \(61, 32\), got \(3, 32\)"):
        found["embedding"]


def test_lengths_and_groups_by_default() -> None:
    assert described(LLAMA).seq == 32
    assert described({**LLAMA, "max_position_embeddings": 1 << 20}).seq == 8192
    assert described(PUBLISHED["gpt2"][0]).positions == 1024
    mixture = described(MIXTRAL, {"seq": 3000, "batch": 2})
    assert (mixture.group, mixture.groups, mixture.slots) == (1000, 6, 500)
    assert described(MIXTRAL, {"seq": 8, "capacity": 99}).slots == 8
    assert angles(described(PUBLISHED["gemma-3-1b"][0], {"seq": 8})).keys() == {"cos", "sin", "local_cos", "local_sin"}


def test_windows_are_there_where_they_hide_something() -> None:
    def windows(seq: int) -> list[int | None]:
        function = from_config(GEMMA2, sequence=seq).function
        return [op.attributes.get("window") for op in function.ops if op.op_type == "Attention"]

    assert windows(12) == [5, None]
    assert windows(5) == [None, None]


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: x for k, x in config.items() if k not in keys}


@pytest.mark.parametrize(
    ("config", "message", "hint"),
    [
        ({}, "no field model_type, which names the architecture", r"known are gpt2, opt, .*phi3"),
        ({"model_type": "bert"}, r"unknown architecture 'bert' \(model_type\)", r"known are gpt2, .*"),
        ({"model_type": None}, "no field model_type, which names the architecture", r"known are gpt2, .*"),
        ({"model_type": 3}, "model_type: expected a text, got 3", None),
        (without(LLAMA, "hidden_size"), "no field hidden_size, which models of type llama need", None),
        (without(MIXTRAL, "num_local_experts"), "no field num_local_experts, which .* mixtral need", None),
        ({**LLAMA, "vocab_size": None}, "no field vocab_size, which models of type llama need", None),
        ({**LLAMA, "hidden_size": "wide"}, 'hidden_size: expected a whole number, got "wide"', None),
        ({**LLAMA, "hidden_size": 32.5}, "hidden_size: expected a whole number, got 32.5", None),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers: expected a whole number, got true", None),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers: expected a number above 0, got 0", None),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads: expected a number above 0, got 0", None),
        ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads: expected a number above 0, got 0", None),
        ({**LLAMA, "intermediate_size": 0}, "intermediate_size: expected a number above 0, got 0", None),
        ({**LLAMA, "hidden_size": -1}, "hidden_size: expected a number above 0, got -1", None),
        ({**LLAMA, "max_position_embeddings": 0}, "max_position_embeddings: expected a number above 0, got 0", None),
        ({**LLAMA, "rms_norm_eps": -1.0}, "epsilon is a number of at least 0, got -1", None),
        ({**LLAMA, "num_attention_heads": 5}, "hidden 32 does not divide by 5 heads", "4 or 8 heads, .*"),
        ({**LLAMA, "tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1", None),
        ({**LLAMA, "rms_norm_eps": math.nan}, "rms_norm_eps: expected a number, got NaN", None),
        ({**LLAMA, "hidden_act": "quick_gelu"}, "hidden_act: unknown activation 'quick_gelu'", r"known are gelu, .*"),
        ({**LLAMA, "rope_scaling": [2]}, r"rope_scaling: expected an object, got \[2\]", None),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "mrope"}},
            "rope_scaling: unknown rope_type 'mrope'",
            "known are default, linear, dynamic, llama3, yarn, longrope",
        ),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, "rope_scaling: no field factor", None),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_slow": 32, "beta_fast": 1}},
            "scaling of positions: expected .*, and low below high, got factor 2, positions 32, low 32, high 1",
            None,
        ),
        ({**GEMMA2, "layer_types": ["chunked_attention"]}, "layer_types: 'chunked_attention' is not supported", ".*"),
        ({**OPT, "word_embed_proj_dim": 16}, "word_embed_proj_dim 16 is not supported", "supported is 32"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx True .*", ".*False"),
    ],
)
def test_configs_that_are_none(config: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(ModelError) as e:
        distir.load(config)
    assert re.fullmatch(f"the config: {message}", e.value.message)
    assert e.value.hint is None if hint is None else re.fullmatch(hint, e.value.hint or "")


ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -3,
    7,
    0.5,
    -0.5,
    math.inf,
    10**30,
    "x",
    "",
    [],
    [1],
    [[]],
    {},
    {"a": 1},
)


@pytest.mark.parametrize("name", TINY)
def test_odd_values_are_refused_in_one_line_or_understood(name: str) -> None:
    """Of every field, and of those inside of fields: another error than distir's would show."""

    def tried(config: dict[str, Any]) -> None:
        with contextlib.suppress(DistirError):
            assert described(config, {"seq": SEQ}).layers > 0

    config = TINY[name]
    for key, value in config.items():
        tried(without(config, key))
        for odd in ODD:
            tried({**config, key: odd})
            for inner in value if isinstance(value, dict) else ():
                tried({**config, key: {**value, inner: odd}})


@pytest.mark.parametrize(
    ("dims", "message", "hint"),
    [
        ({"sequence": 8}, "the config has no 'sequence'", None),
        ({"batches": 8}, "the config has no 'batches'", "did you mean batch?"),
        ({"seq": "8"}, "the config: seq is a whole number, got '8'", None),
        ({"batch": 2.5}, "the config: batch is a whole number, got 2.5", None),
        ({"seq": 0}, "the config: seq is a whole number of at least 1, got 0", None),
        ({"batch": 0}, "the config: batch is a whole number of at least 1, got 0", None),
        ({"seq": 17}, "the config: 16 positions are fewer than a sequence of 17 has", None),
    ],
)
def test_sizes_that_do_not_fit(dims: dict[str, int], message: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as e:
        distir.load(GPT2, dims)
    assert e.value.message == message
    assert hint is None or e.value.hint == hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not JSON"),
        ("[1]", "config.json: expected an object, got list"),
        ("[" * 10**5, "is not JSON"),
    ],
)
def test_files_that_are_no_configs(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=re.escape(message)):
        distir.load(tmp_path)
    with pytest.raises(ModelError, match=r"cannot read .*none\.json: No such file"):
        distir.load(tmp_path / "none.json")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*config\.json: No such file") as e:
        distir.load(tmp_path)
    assert e.value.hint == "the folder of a model has a Hugging Face config.json"


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config is predicted and run as other models are; an error says what is wrong, with the code of models."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2))
    sizes = ["--dim", "batch=4", "--dim", "seq=8", "--json"]
    assert main(["simulate", str(tmp_path), *sizes, "--dp", "2", "--tp", "2", "--cluster", "dgx-h100"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] > 0
    flags = ["--dp", "2", "--backend", "numpy", "--check", "--steps", "1", "--dtype", "float64"]
    assert main(["run", str(tmp_path), *sizes, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["check"]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["show", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert said.endswith("config.json: no field num_hidden_layers, which models of type llama need\n")


def test_the_type_of_weights_may_be_named() -> None:
    config = {
        **json.loads((Path(__file__).parents[2] / "examples" / "llama-3-8b.json").read_text()),
        "num_hidden_layers": 1,
    }
    function = from_config(config, sequence=8, dtype="bfloat16").function
    assert {v.type.dtype for v in function.inputs if v.kind == "parameter"} == {BFloat16}  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="unknown dtype 'int8'"):
        from_config(config, sequence=8, dtype="int8")
