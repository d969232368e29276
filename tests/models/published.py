"""Published configs, with the fields that say what a model is, and the number of its parameters."""

from __future__ import annotations

from typing import Any

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128_256,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
GPT2 = {"model_type": "gpt2", "activation_function": "gelu_new", "n_positions": 1024, "vocab_size": 50_257}


def sizes(hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": ({**GPT2, "n_embd": 768, "n_layer": 12, "n_head": 12}, 124_439_808),
    "gpt2-xl": ({**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
    "opt-1.3b": (
        {
            "model_type": "opt",
            "hidden_size": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "vocab_size": 50_272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 2048,
            "do_layer_norm_before": True,
        },
        1_315_758_080,
    ),
    "pythia-6.9b": (
        sizes(4096, 16_384, 32, 32, model_type="gpt_neox", hidden_act="gelu", rotary_pct=0.25, vocab_size=50_432),
        6_857_302_016,
    ),
    "llama-3-8b": ({**LLAMA, **sizes(4096, 14_336, 32, 32)}, 8_030_261_248),
    "llama-3-70b": ({**LLAMA, **sizes(8192, 28_672, 80, 64)}, 70_553_706_496),
    "llama-3.1-405b": (
        {
            **LLAMA,
            **sizes(16_384, 53_248, 126, 128),
            "max_position_embeddings": 131_072,
            "rope_scaling": LLAMA3_SCALING,
        },
        405_853_388_800,
    ),
    "mistral-7b": (
        sizes(
            4096,
            14_336,
            32,
            32,
            model_type="mistral",
            num_key_value_heads=8,
            vocab_size=32_000,
            sliding_window=4096,
            max_position_embeddings=32_768,
        ),
        7_241_732_096,
    ),
    "mixtral-8x7b": (
        sizes(
            4096,
            14_336,
            32,
            32,
            model_type="mixtral",
            num_key_value_heads=8,
            vocab_size=32_000,
            sliding_window=None,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_theta=1e6,
            max_position_embeddings=32_768,
        ),
        46_702_792_704,
    ),
    "qwen2.5-7b": (
        sizes(
            3584,
            18_944,
            28,
            28,
            model_type="qwen2",
            num_key_value_heads=4,
            vocab_size=152_064,
            max_window_layers=28,
            sliding_window=131_072,
            use_sliding_window=False,
            rope_theta=1e6,
            tie_word_embeddings=False,
        ),
        7_615_616_512,
    ),
    "qwen3-8b": (
        sizes(4096, 12_288, 36, 32, model_type="qwen3", num_key_value_heads=8, head_dim=128, vocab_size=151_936),
        8_190_735_360,
    ),
    "qwen1.5-moe-a2.7b": (
        sizes(
            2048,
            5632,
            24,
            16,
            model_type="qwen2_moe",
            num_key_value_heads=16,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
            vocab_size=151_936,
        ),
        14_315_784_192,
    ),
    "qwen3-30b-a3b": (
        sizes(
            2048,
            6144,
            48,
            32,
            model_type="qwen3_moe",
            num_key_value_heads=4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            vocab_size=151_936,
        ),
        30_532_122_624,
    ),
    "gemma-7b": (
        sizes(3072, 24_576, 28, 16, model_type="gemma", num_key_value_heads=16, head_dim=256, vocab_size=256_000),
        8_537_680_896,
    ),
    "gemma-2-9b": (
        sizes(3584, 14_336, 42, 16, model_type="gemma2", num_key_value_heads=8, head_dim=256, vocab_size=256_000),
        9_241_705_984,
    ),
    "gemma-3-1b": (
        sizes(
            1152,
            6912,
            26,
            4,
            model_type="gemma3_text",
            num_key_value_heads=1,
            head_dim=256,
            vocab_size=262_144,
            sliding_window=512,
            sliding_window_pattern=6,
        ),
        999_885_952,
    ),
    "phi-2": (
        sizes(2560, 10_240, 32, 32, model_type="phi", partial_rotary_factor=0.4, vocab_size=51_200),
        2_779_683_840,
    ),
    "phi-3-mini-4k": (
        sizes(3072, 8192, 32, 32, model_type="phi3", num_key_value_heads=32, vocab_size=32_064, sliding_window=2047),
        3_821_079_552,
    ),
}
