"""Models of the field, small but whole, as torch modules with example inputs; and their export to ONNX.

Those of `transformers` are built from a config, with random weights; the others are written here. The batch is symbolic
in the exported file, and named `batch`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

B, S, VOCABULARY = 4, 8, 512
"""Samples, tokens a sample, and words. Embeddings of fewer words are folded by torch's exporter into a transposed copy,
and are tied no more."""
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
CAUSAL = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
WIDTHS: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}


class Case(NamedTuple):
    """A model: the module, its inputs by name, and the loss that it is trained with."""

    module: nn.Module
    inputs: dict[str, Tensor]
    loss: str = "cross-entropy"


class Output(nn.Module):
    """A model of transformers that returns one of its outputs."""

    def __init__(self, model: Any, output: str = "logits") -> None:
        super().__init__()
        self.model, self.output = model, output


class Tokens(Output):
    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return getattr(self.model(input_ids=input_ids, attention_mask=attention_mask), self.output)


class Pixels(Output):
    def forward(self, pixel_values: Any) -> Any:
        return getattr(self.model(pixel_values=pixel_values), self.output)


class Audio(Output):
    def forward(self, input_values: Any) -> Any:
        return getattr(self.model(input_values=input_values), self.output)


class Translation(Output):
    def forward(self, input_ids: Any, decoder_input_ids: Any) -> Any:
        return getattr(self.model(input_ids=input_ids, decoder_input_ids=decoder_input_ids), self.output)


class Speech(Output):
    def forward(self, input_features: Any, decoder_input_ids: Any) -> Any:
        return getattr(self.model(input_features=input_features, decoder_input_ids=decoder_input_ids), self.output)


class Pairs(Output):
    def forward(self, input_ids: Any, pixel_values: Any) -> Any:
        return getattr(self.model(input_ids=input_ids, pixel_values=pixel_values), self.output)


def ids() -> Tensor:
    return torch.randint(VOCABULARY, (B, S))


def of_transformers(kind: str, head: str, **config: Any) -> Any:
    """A model of transformers with random weights: `kind` and `head` are the parts of its class's name."""
    import transformers

    settings = {k: config.pop(k) for k in ("experts_implementation", "attn_implementation") if k in config}
    made = getattr(transformers, f"{kind}Config")(**config)
    return getattr(transformers, kind + head)._from_config(made, **settings)


def decoder(kind: str, **config: Any) -> Callable[[], Case]:
    """A decoder of tokens, which are its only input."""

    def build() -> Case:
        given = {**CAUSAL, "tie_word_embeddings": False, **config}
        model = of_transformers(kind, given.pop("head", "ForCausalLM"), **given)
        return Case(Tokens(model), {"input_ids": ids()})

    return build


def images(kind: str, head: str = "ForImageClassification", size: int = 32, **config: Any) -> Callable[[], Case]:
    def build() -> Case:
        model = of_transformers(kind, head, **config)
        loss = "cross-entropy" if head == "ForImageClassification" else "mse"
        return Case(Pixels(model), {"pixel_values": torch.randn(B, 3, size, size)}, loss)

    return build


def encoder(kind: str, **config: Any) -> Callable[[], Case]:
    """An encoder of tokens with a mask of padding."""

    def build() -> Case:
        model = of_transformers(kind, "ForMaskedLM", **{**TEXT, **config})
        mask = torch.ones(B, S, dtype=torch.int64)
        mask[1, 5:] = 0
        return Case(Tokens(model), {"input_ids": ids() % (VOCABULARY - 3) + 3, "attention_mask": mask})

    return build


def bart() -> Case:
    config = {f"{side}_{k}": n for side in ("encoder", "decoder") for k, n in _SIDE.items()}
    sizes = {"d_model": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "use_cache": False}
    model = of_transformers("Bart", "ForConditionalGeneration", **sizes, **config)
    return Case(Translation(model), {"input_ids": ids(), "decoder_input_ids": ids()})


def t5() -> Case:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    more = {"vocab_size": VOCABULARY, "use_cache": False, "attn_implementation": "eager"}  # torch cannot export sdpa's
    model = of_transformers("T5", "ForConditionalGeneration", **sizes, **more)
    return Case(Translation(model), {"input_ids": ids(), "decoder_input_ids": ids()})


_SIDE = {"layers": 1, "attention_heads": 4, "ffn_dim": 48}


def whisper() -> Case:
    config = {f"{side}_{k}": n for side in ("encoder", "decoder") for k, n in _SIDE.items()}
    sizes = {"d_model": 32, "vocab_size": VOCABULARY, "num_mel_bins": 8, "use_cache": False}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    lengths = {"max_source_positions": 16, "max_target_positions": 16}
    model = of_transformers("Whisper", "ForConditionalGeneration", **sizes, **tokens, **lengths, **config)
    return Case(Speech(model), {"input_features": torch.randn(B, 8, 32), "decoder_input_ids": ids()})


def wav2vec2() -> Case:
    convolutions = {"conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2)}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    model = of_transformers("Wav2Vec2", "ForCTC", **SIZES, **convolutions, **positions, vocab_size=32)
    return Case(Audio(model), {"input_values": torch.randn(B, 400)})


def clip() -> Case:
    text = {**TEXT, "projection_dim": 32, "eos_token_id": VOCABULARY - 1}
    vision = {**SIZES, "image_size": 16, "patch_size": 8, "projection_dim": 32}
    model = of_transformers("CLIP", "Model", text_config=text, vision_config=vision, projection_dim=32)
    words = ids()
    words[:, -1] = VOCABULARY - 1
    return Case(Pairs(model, "logits_per_image"), {"input_ids": words, "pixel_values": torch.randn(B, 3, 16, 16)})


class UNet(nn.Module):
    """Segmentation (Ronneberger et al. 2015): two levels, with batch norms and transposed convolutions."""

    def __init__(self, width: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(3, width), self.block(width, 2 * width)])
        self.bottom = self.block(2 * width, 4 * width)
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.up = nn.ModuleList([self.block(4 * width, 2 * width), self.block(2 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def block(inside: int, outside: int) -> nn.Sequential:
        rows = [(inside, outside), (outside, outside)]
        parts = [[nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()] for a, b in rows]
        return nn.Sequential(*parts[0], *parts[1])

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            kept.append(x := block(x))
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([kept.pop(), grow(x)], 1))
        return self.head(x)


class Recurrent(nn.Module):
    """A language model of recurrent layers."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers: nn.Module = kind(32, 32, 2, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(input_ids))[0])


class Recommender(nn.Module):
    """A recommender (Naumov et al. 2019): dense features, tables, products of all pairs; `bags`: rows are summed."""

    def __init__(self, bags: bool, tables: int = 3, width: int = 16) -> None:
        super().__init__()
        self.bags = bags
        kind = (lambda: nn.EmbeddingBag(40, width, mode="sum")) if bags else (lambda: nn.Embedding(40, width))
        self.tables = nn.ModuleList([kind() for _ in range(tables)])
        self.bottom = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 2))
        self.register_buffer("pair", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        x = self.bottom(dense)
        picked = [table(rows[:, i] if self.bags else rows[:, i, 0]) for i, table in enumerate(self.tables)]
        every = torch.stack([x, *picked], 1)
        products = every @ every.transpose(1, 2)
        return self.top(torch.cat([x, products[:, self.pair[0], self.pair[1]]], 1))  # type: ignore[index]


def recommender(bags: bool) -> Case:
    inputs = {"dense": torch.randn(B, 12), "rows": torch.randint(40, (B, 3, 4))}
    return Case(Recommender(bags), inputs)


class Video(nn.Module):
    """A classifier of volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *[nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2)],
            *[nn.Conv3d(8, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten()],
        )
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Sequences(nn.Module):
    """torch's own Transformer between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(32, 4, 1, 1, 48, batch_first=True, dropout=0.0)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        sides = self.embedding(input_ids), self.embedding(decoder_input_ids)
        return self.head(self.transformer(*sides))


def mlp() -> Case:
    layers = [m for _ in range(3) for m in (nn.Linear(32, 32), nn.ReLU())]
    return Case(Called(nn.Sequential(*layers, nn.Linear(32, 8))), {"x": torch.randn(B, 32)}, "mse")


class Called(nn.Module):
    """A module whose input has a name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": VOCABULARY, "use_cache": False}
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK = {
    **_LATENT,
    **dict.fromkeys(("num_key_value_heads", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group"), 2),
    **dict.fromkeys(("n_shared_experts", "topk_group", "first_k_dense_replace"), 1),
    "moe_intermediate_size": 16,
    "experts_implementation": "batched_mm",
}
_RESNET: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 2, 1, 1]}
_BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "use_cache": False}
_SWIN: dict[str, Any] = {"patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": VOCABULARY}

CASES: dict[str, Callable[[], Case]] = {
    "GPT-2": decoder("GPT2", head="LMHeadModel", tie_word_embeddings=True, **_GPT2),
    "Llama": decoder("Llama"),
    "Mistral": decoder("Mistral", sliding_window=3),
    "Qwen2": decoder("Qwen2"),
    "Qwen3": decoder("Qwen3", head_dim=8),
    "Gemma2": decoder("Gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "Phi": decoder("Phi", num_key_value_heads=4, partial_rotary_factor=0.5, pad_token_id=0),
    "OPT": decoder("OPT", ffn_dim=48, word_embed_proj_dim=32, pad_token_id=0),
    "GPT-NeoX": decoder("GPTNeoX"),
    "BLOOM": decoder("Bloom", **_BLOOM),
    "Falcon": decoder("Falcon", multi_query=True, new_decoder_architecture=False),
    "OLMo2": decoder("Olmo2", pad_token_id=0),
    "Mixtral": decoder("Mixtral", **_MIXTRAL),
    "DeepSeek-V3": decoder("DeepseekV3", **_DEEPSEEK),
    "Mamba": decoder("Mamba", state_size=4, conv_kernel=4, time_step_rank=4, pad_token_id=0),
    "BERT": encoder("Bert"),
    "DistilBERT": encoder("DistilBert", **_DISTILBERT),
    "RoBERTa": encoder("Roberta", max_position_embeddings=20, pad_token_id=1),
    "BART": bart,
    "T5": t5,
    "torch's Transformer": lambda: Case(Sequences(), {"input_ids": ids(), "decoder_input_ids": ids()}),
    "Whisper": whisper,
    "wav2vec2": wav2vec2,
    "CLIP": clip,
    "ViT": images("ViT", size=16, image_size=16, patch_size=4, **SIZES),
    "Swin": images("Swin", image_size=32, attn_implementation="eager", **_SWIN),
    "ResNet-50": images("ResNet", layer_type="bottleneck", **_RESNET),
    "ConvNeXt": images("ConvNext", **WIDTHS),
    "SegFormer": images("Segformer", "ForSemanticSegmentation", 64, **WIDTHS, decoder_hidden_size=16, num_labels=4),
    "U-Net": lambda: Case(UNet(), {"x": torch.randn(B, 3, 16, 16)}, "mse"),
    "3-D CNN": lambda: Case(Video(), {"x": torch.randn(B, 1, 8, 8, 8)}),
    "LSTM": lambda: Case(Recurrent(nn.LSTM), {"input_ids": ids()}),
    "GRU": lambda: Case(Recurrent(nn.GRU), {"input_ids": ids()}),
    "DLRM": lambda: recommender(False),
    "DLRM with EmbeddingBag": lambda: recommender(True),
    "MLP": mlp,
}
"""The models by name."""


def built(name: str) -> Case:
    """The model of that name in evaluation mode, the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case = CASES[name]()
        perturb(case.module)
    return case._replace(module=case.module.eval())


def perturb(module: nn.Module) -> None:
    """Move the weights away from their initial values: the exporter's optimizer merges equal ones."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)


def exported(
    module: nn.Module, inputs: Mapping[str, Tensor], path: Path, optimize: bool = True, opset: int = 20
) -> Path:
    """A file of the module at `path`, by torch's exporter, with its optimizer or without."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = {name: {0: torch.export.Dim("batch")} for name in inputs}
        options: dict[str, Any] = {"dynamo": True, "optimize": optimize, "opset_version": opset, "verbose": False}
        program = torch.onnx.export(module.eval(), (), kwargs=dict(inputs), dynamic_shapes=shapes, **options)
    assert program is not None
    program.save(path)
    return path
