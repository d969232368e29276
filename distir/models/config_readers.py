"""Fields of a `Decoder` that take more than one field of a config to know, or another one's words."""

from __future__ import annotations

import math
from collections.abc import Callable

from distir.models.config_file import ConfigFile
from distir.models.decoder import LAYERS
from distir.models.rotary import SCALINGS, Scaling

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


def activation(key: str, default: str) -> Callable[[ConfigFile], str]:
    def read(c: ConfigFile) -> str:
        name = c.get(key, str, default)
        if name not in _ACTIVATIONS:
            raise c.error(f"{key}: unknown activation {name!r}", f"known are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    return read


def biases(**parts: tuple[str, bool]) -> Callable[[ConfigFile], str]:
    """The parts that have a bias, by the flag that says so and its default."""

    def read(c: ConfigFile) -> str:
        return "+".join([part.replace("_", "+") for part, (key, default) in parts.items() if c.get(key, bool, default)])

    return read


def _rope(c: ConfigFile) -> ConfigFile:
    """Of rotary positions: `rope_parameters` of newer files, `rope_scaling` of older ones."""
    given = c.inside("rope_parameters" if c.values.get("rope_parameters") else "rope_scaling")
    return given.inside("full_attention") if "full_attention" in given.values else given


def rotary_base(default: float, key: str = "rope_theta") -> Callable[[ConfigFile], float]:
    return lambda c: _rope(c).positive("rope_theta", float, c.positive(key, float, default))


def rotary_share(default: float, key: str = "partial_rotary_factor") -> Callable[[ConfigFile], float]:
    return lambda c: _rope(c).get("partial_rotary_factor", float, c.get(key, float, default))


def rotary_scaling(c: ConfigFile) -> Scaling | None:
    rope = _rope(c)
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    kind = "longrope" if kind == "su" else kind
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise rope.error(f"unknown rope_type {kind!r}", f"known are default, {', '.join(SCALINGS)}")
    longest = c.positive("max_position_embeddings", int, 2048)
    original = "original_max_position_embeddings"
    positions = longest if kind == "dynamic" else rope.positive(original, int, c.positive(original, int, longest))
    if kind == "longrope":
        return _longrope(rope, longest / positions, positions)
    factor = rope.positive("factor", float)
    if kind == "yarn":
        return _yarn(rope, factor, positions)
    turns = (
        (rope.positive("low_freq_factor", float), rope.positive("high_freq_factor", float)) if kind == "llama3" else ()
    )
    return Scaling(kind, factor, positions, *turns)


def _longrope(rope: ConfigFile, longer: float, positions: int) -> Scaling:
    factor = rope.positive("factor", float, longer)
    amplitude = math.sqrt(1 + math.log(factor) / math.log(positions)) if factor > 1 and positions > 1 else 1.0
    short, long = (rope.numbers(key) for key in ("short_factor", "long_factor"))
    return Scaling(
        "longrope", factor, positions, short=short, long=long, amplitude=rope.get("attention_factor", float, amplitude)
    )


def _yarn(rope: ConfigFile, factor: float, positions: int) -> Scaling:
    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

    numerator, denominator = rope.positive("mscale", float, 0.0), rope.positive("mscale_all_dim", float, 0.0)
    amplitude = grown(numerator) / grown(denominator) if numerator and denominator else grown(1)
    low, high = rope.positive("beta_slow", float, 1.0), rope.positive("beta_fast", float, 32.0)
    return Scaling("yarn", factor, positions, low, high, amplitude=rope.get("attention_factor", float, amplitude))


def local_layers(otherwise: Callable[[ConfigFile], str]) -> Callable[[ConfigFile], str]:
    """The layers that have a window: by the types of layers, if the config says them."""
    kinds = {"sliding_attention": "1", "full_attention": "0"}

    def read(c: ConfigFile) -> str:
        types = c.get("layer_types", list, None)
        if types is None:
            return otherwise(c)
        for kind in types:
            if type(kind) is not str or kind not in kinds:
                raise c.error(f"layer_types: {kind!r} is not supported", f"supported are {', '.join(kinds)}")
        return "".join(kinds[kind] for kind in types)

    return read


def late_layers(c: ConfigFile) -> str:
    """Qwen: the layers from `max_window_layers` on."""
    first = c.get("max_window_layers", int, 28)
    return "".join(["0" if k < first else "1" for k in range(min(c.get("num_hidden_layers", int), LAYERS))]) or "0"


def all_but_each(c: ConfigFile) -> str:
    """Gemma 3: every sixth layer has none."""
    count = c.positive("sliding_window_pattern", int, c.positive("_sliding_window_pattern", int, 6))
    return "".join(["0" if (k + 1) % count == 0 else "1" for k in range(min(count, LAYERS))])


def used_window(c: ConfigFile) -> int:
    return c.get("sliding_window", int, 4096, 0) if c.get("use_sliding_window", bool, False) else 0


def parallel_layers(c: ConfigFile) -> str:
    return "two" if c.get("use_parallel_residual", bool, True) else ""


def query_scale(c: ConfigFile) -> float:
    return c.positive("query_pre_attn_scalar", float, 256.0) ** -0.5


def root_of_width(c: ConfigFile) -> float:
    return math.sqrt(c.positive("hidden_size", int))
