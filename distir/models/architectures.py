"""What the config.json of each architecture says: a row an architecture, by its `model_type`.

Defaults are those of transformers' configuration classes, except for sizes, which must be in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from distir.models.config_file import REQUIRED
from distir.models.config_readers import (
    activation,
    all_but_each,
    biases,
    late_layers,
    local_layers,
    parallel_layers,
    query_scale,
    root_of_width,
    rotary_base,
    rotary_scaling,
    rotary_share,
    used_window,
)


class Key(NamedTuple):
    """A field of the config; `default` where it is not there, `null` where it is null."""

    name: str
    default: Any = REQUIRED
    null: Any = REQUIRED


class Architecture(NamedTuple):
    """How the config of an architecture becomes a `Decoder`, and its weights those of the Decoder's program."""

    fields: Mapping[str, Any]
    """By a Decoder's field its value: a `Key`, a function of the config, or what all of the architecture have."""
    modules: Mapping[str, str]
    """By a part of the Decoder the module of transformers that holds its weight and bias; {i} is a layer, {e} an
    expert. Of parts that are one product (`distir.models.pretrained.PIECES`) the whole or the pieces are here."""
    length: str = "max_position_embeddings"
    """The field that says how long sequences may be."""
    only: Mapping[str, Any] = {}
    """Fields that must have this value, if they are there: others are not supported."""
    transposed: bool = True
    """Weights of products in layers are (out, in)."""
    by_head: bool = False
    """Of the product of queries, keys and values the columns are those of the first head, then those of the next."""


# ---------------------------------------------------------------- what several rows share

_SIZES = {
    "layers": Key("num_hidden_layers"),
    "hidden": Key("hidden_size"),
    "heads": Key("num_attention_heads"),
    "vocab": Key("vocab_size"),
    "ffn": Key("intermediate_size"),
}
_LLAMA = {
    **_SIZES,
    "kv_heads": Key("num_key_value_heads"),
    "head_size": Key("head_dim", 0),
    "gated": True,
    "activation": activation("hidden_act", "silu"),
    "rms": True,
    "epsilon": Key("rms_norm_eps", 1e-6),
    "bias": False,
    "tied": Key("tie_word_embeddings", False),
    "rotary": True,
    "rotary_base": rotary_base(10_000.0),
    "rotary_scaling": rotary_scaling,
}
_GEMMA = {
    **_LLAMA,
    "head_size": Key("head_dim", 256),
    "activation": activation("hidden_activation", "gelu_pytorch_tanh"),
    "biases": biases(qkv_out=("attention_bias", False)),
    "offset_norms": True,
    "tied": Key("tie_word_embeddings", True),
    "embedding_scale": root_of_width,
}
_GEMMA2 = {
    **_GEMMA,
    "post_norms": True,
    "score_scale": query_scale,
    "window": Key("sliding_window", 4096, 0),
    "logit_cap": Key("final_logit_softcapping", 30.0, 0.0),
    "score_cap": Key("attn_logit_softcapping", 50.0, 0.0),
}
_QWEN_EXPERTS = {
    **_LLAMA,
    "ffn": Key("moe_intermediate_size"),
    "experts": lambda c: c.get("num_local_experts" if "num_local_experts" in c.values else "num_experts", int),
    "choices": Key("num_experts_per_tok"),
    "shares": lambda c: "normalized" if c.get("norm_topk_prob", bool, False) else "probabilities",
}
_DENSE_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _in_layers(layer: str, parts: Mapping[str, str]) -> dict[str, str]:
    return {part: f"{layer}.{name}" for part, name in parts.items()}


_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_ATTENTION = _in_layers(
    "model.layers.{i}",
    {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    },
)
_MLP = _in_layers("model.layers.{i}.mlp", {"mlp.gate": "gate_proj", "mlp.up": "up_proj", "mlp.out": "down_proj"})
_LLAMA_MODULES = {**_TOP, **_ATTENTION, **_MLP}
_GEMMA2_MODULES = {
    **_LLAMA_MODULES,
    **_in_layers(
        "model.layers.{i}",
        {
            "post_norm1": "post_attention_layernorm",
            "norm2": "pre_feedforward_layernorm",
            "post_norm2": "post_feedforward_layernorm",
        },
    ),
}
_QWEN_EXPERT_MODULES = {
    **_TOP,
    **_ATTENTION,
    **_in_layers(
        "model.layers.{i}.mlp",
        {
            "mlp.router": "gate",
            "mlp.experts.gate": "experts.{e}.gate_proj",
            "mlp.experts.up": "experts.{e}.up_proj",
            "mlp.experts.out": "experts.{e}.down_proj",
            "mlp.shared.gate": "shared_expert.gate_proj",
            "mlp.shared.up": "shared_expert.up_proj",
            "mlp.shared.out": "shared_expert.down_proj",
            "mlp.shared_gate": "shared_expert_gate",
        },
    ),
}

# ---------------------------------------------------------------- the rows

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        {
            "layers": Key("n_layer"),
            "hidden": Key("n_embd"),
            "heads": Key("n_head"),
            "vocab": Key("vocab_size"),
            "ffn": Key("n_inner", 0),
            "positions": Key("n_positions", 1024),
            "activation": activation("activation_function", "gelu_new"),
            "epsilon": Key("layer_norm_epsilon", 1e-5),
            "tied": Key("tie_word_embeddings", True),
        },
        {
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
            **_in_layers(
                "transformer.h.{i}",
                {
                    "norm1": "ln_1",
                    "norm2": "ln_2",
                    "attention.qkv": "attn.c_attn",
                    "attention.out": "attn.c_proj",
                    "mlp.in": "mlp.c_fc",
                    "mlp.out": "mlp.c_proj",
                },
            ),
        },
        length="n_positions",
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        transposed=False,
    ),
    "opt": Architecture(
        {
            **_SIZES,
            "ffn": Key("ffn_dim"),
            "positions": lambda c: c.get("max_position_embeddings", int, 2048) + 2,
            "first_position": 2,
            "activation": activation("activation_function", "relu"),
            "bias": Key("enable_bias", True),
            "tied": Key("tie_word_embeddings", True),
        },
        {
            "embedding": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "norm": "model.decoder.final_layer_norm",
            "head": "lm_head",
            **_in_layers(
                "model.decoder.layers.{i}",
                {
                    "norm1": "self_attn_layer_norm",
                    "norm2": "final_layer_norm",
                    "attention.q": "self_attn.q_proj",
                    "attention.k": "self_attn.k_proj",
                    "attention.v": "self_attn.v_proj",
                    "attention.out": "self_attn.out_proj",
                    "mlp.in": "fc1",
                    "mlp.out": "fc2",
                },
            ),
        },
        only={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
            "word_embed_proj_dim": Key("hidden_size"),
        },
    ),
    "gpt_neox": Architecture(
        {
            **_SIZES,
            "activation": activation("hidden_act", "gelu"),
            "epsilon": Key("layer_norm_eps", 1e-5),
            "bias": False,
            "biases": lambda c: "qkv+out+mlp" if c.get("attention_bias", bool, True) else "mlp",
            "tied": Key("tie_word_embeddings", False),
            "parallel": parallel_layers,
            "rotary": True,
            "rotary_base": rotary_base(10_000.0, "rotary_emb_base"),
            "rotary_share": rotary_share(0.25, "rotary_pct"),
            "rotary_scaling": rotary_scaling,
        },
        {
            "embedding": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
            **_in_layers(
                "gpt_neox.layers.{i}",
                {
                    "norm1": "input_layernorm",
                    "norm2": "post_attention_layernorm",
                    "attention.qkv": "attention.query_key_value",
                    "attention.out": "attention.dense",
                    "mlp.in": "mlp.dense_h_to_4h",
                    "mlp.out": "mlp.dense_4h_to_h",
                },
            ),
        },
        by_head=True,
    ),
    "llama": Architecture(
        {
            **_LLAMA,
            "kv_heads": Key("num_key_value_heads", 0),
            "biases": biases(qkv_out=("attention_bias", False), mlp=("mlp_bias", False)),
        },
        _LLAMA_MODULES,
    ),
    "mistral": Architecture({**_LLAMA, "window": Key("sliding_window", 4096, 0)}, _LLAMA_MODULES),
    "mixtral": Architecture(
        {
            **_LLAMA,
            "epsilon": Key("rms_norm_eps", 1e-5),
            "rotary_base": rotary_base(1e6),
            "window": Key("sliding_window", 0),
            "experts": Key("num_local_experts"),
            "choices": Key("num_experts_per_tok"),
            "shares": "normalized",
        },
        {
            **_TOP,
            **_ATTENTION,
            **_in_layers(
                "model.layers.{i}.block_sparse_moe",
                {
                    "mlp.router": "gate",
                    "mlp.experts.gate": "experts.{e}.w1",
                    "mlp.experts.up": "experts.{e}.w3",
                    "mlp.experts.out": "experts.{e}.w2",
                },
            ),
        },
    ),
    "qwen2": Architecture(
        {**_LLAMA, "biases": "qkv", "window": used_window, "local": local_layers(late_layers)}, _LLAMA_MODULES
    ),
    "qwen3": Architecture(
        {
            **_LLAMA,
            "head_size": Key("head_dim", 128),
            "biases": biases(qkv_out=("attention_bias", False)),
            "qk_norm": True,
            "window": used_window,
            "local": local_layers(late_layers),
        },
        _LLAMA_MODULES,
    ),
    "qwen2_moe": Architecture(
        {
            **_QWEN_EXPERTS,
            "biases": biases(qkv=("qkv_bias", True)),
            "shared_ffn": Key("shared_expert_intermediate_size"),
            "window": used_window,
            "local": local_layers(late_layers),
        },
        _QWEN_EXPERT_MODULES,
        only=_DENSE_LAYERS,
    ),
    "qwen3_moe": Architecture(
        {
            **_QWEN_EXPERTS,
            "biases": biases(qkv_out=("attention_bias", False)),
            "qk_norm": True,
            "window": used_window,
        },
        _QWEN_EXPERT_MODULES,
        only=_DENSE_LAYERS,
    ),
    "gemma": Architecture(_GEMMA, _LLAMA_MODULES),
    "gemma2": Architecture({**_GEMMA2, "local": local_layers(lambda c: "10")}, _GEMMA2_MODULES),
    "gemma3_text": Architecture(
        {
            **_GEMMA2,
            "qk_norm": True,
            "rotary_base": rotary_base(1e6),
            "local_base": lambda c: (
                c.inside("rope_parameters")
                .inside("sliding_attention")
                .get("rope_theta", float, c.get("rope_local_base_freq", float, 10_000.0))
            ),
            "local": local_layers(all_but_each),
            "logit_cap": Key("final_logit_softcapping", 0.0),
            "score_cap": Key("attn_logit_softcapping", 0.0),
        },
        _GEMMA2_MODULES,
        only={"use_bidirectional_attention": False},
    ),
    "phi": Architecture(
        {
            **_SIZES,
            "kv_heads": Key("num_key_value_heads", 0),
            "activation": activation("hidden_act", "gelu_new"),
            "epsilon": Key("layer_norm_eps", 1e-5),
            "biases": "head",
            "tied": Key("tie_word_embeddings", False),
            "parallel": "one",
            "rotary": True,
            "rotary_base": rotary_base(10_000.0),
            "rotary_share": rotary_share(0.5),
            "rotary_scaling": rotary_scaling,
        },
        {
            **_LLAMA_MODULES,
            "norm": "model.final_layernorm",
            **_in_layers(
                "model.layers.{i}", {"attention.out": "self_attn.dense", "mlp.in": "mlp.fc1", "mlp.out": "mlp.fc2"}
            ),
        },
        only={"qk_layernorm": False},
    ),
    "phi3": Architecture(
        {
            **_LLAMA,
            "kv_heads": Key("num_key_value_heads", 0),
            "epsilon": Key("rms_norm_eps", 1e-5),
            "rotary_share": rotary_share(1.0),
            "window": Key("sliding_window", 0),
        },
        {
            **_TOP,
            **_in_layers(
                "model.layers.{i}",
                {
                    "norm1": "input_layernorm",
                    "norm2": "post_attention_layernorm",
                    "attention.qkv": "self_attn.qkv_proj",
                    "attention.out": "self_attn.o_proj",
                    "mlp.in": "mlp.gate_up_proj",
                    "mlp.out": "mlp.down_proj",
                },
            ),
        },
    ),
}
