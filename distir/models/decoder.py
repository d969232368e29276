"""Decoder-only transformers of any size: one description of the architectures of GPT-2, Llama, Gemma and others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from fractions import Fraction
from numbers import Integral
from typing import TYPE_CHECKING, Any

from distir.ir.errors import UsageError
from distir.ir.function import Function
from distir.ir.type import DType, Float32
from distir.models.blocks import build
from distir.models.rotary import Scaling, turns

if TYPE_CHECKING:
    import numpy as np

_NEAR = 1 << 12
"""How far from a number its neighbours among divisors are looked for."""
LAYERS = 1 << 14
"""Limit on layers, each of which is some thirty ops of the program."""
PARTS = ("qkv", "out", "mlp", "head")
"""The products that may have a bias."""
OPTIONAL = ("window", "shared_ffn", "first_position")
"""Sizes that may be 0."""
_TRIGONOMETRIC = ("cos", "sin")
_WORDS = {
    "attention": ("fused", "unfused"),
    "activation": ("gelu", "gelu_tanh", "silu", "relu"),
    "shares": ("probabilities", "normalized"),
    "parallel": ("", "one", "two"),
}
"""The words that a field may be."""


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder-only transformer, and which of the usual parts it has.

    Sequences of `seq` tokens. `kv_heads`: heads of keys and values (grouped queries), by default `heads`. `ffn`: the
    width between the products of an MLP, by default 4 `hidden`, if `gated` 8/3 of it, rounded up to a multiple of 256.
    `gated`: the MLP is silu(x W) * (x V), else gelu(x W). `rotary`: positions turn queries and keys, else a table of
    them is added. `rms`: root-mean-square norms, else layer norms. `tied`: the head is the embedding. `bias`: products
    have one. `dropout`: the ratio of what is dropped in training, of the embeddings, of what attention and MLP add, and
    of attention's probabilities, unless it is fused. `attention`: "fused" in one op, or "unfused", by default only with
    dropout: the probabilities are then values of their own. `positions`: rows of the table of positions, by default
    `seq` and `first_position`, the row of the first token.

    With several `experts`, each an MLP of width `ffn`, a token goes to the `choices` that a router finds most probable
    (`distir.models.experts`). Their `shares` are its "probabilities", by default with one choice, or "normalized":
    divided by the sum of those chosen. Tokens are in `groups`, by default each sequence is one; of a group an expert
    takes the first ceil(tokens * choices * capacity / experts) that come to it: with a capacity of experts / choices,
    all. `shared_ffn`: the width of one more MLP, for all tokens, times a sigmoid of the token.

    `separate`: queries, keys and values have a product each, and the two halves of a gated MLP; else one makes all of
    them (or one keys and values, where these have fewer heads), and one both halves.

    `head_size`: by default hidden / heads. `activation`: gelu, gelu_tanh (its approximation), silu or relu. `biases`:
    the products that have a bias if not all do, of qkv, out, mlp and head, joined by +. `epsilon`: what norms add to
    the variance. `offset_norms`: gains are one more than the weights. `qk_norm`: of each head's queries and keys.
    `post_norms`: also of what attention and MLP give. `parallel`: attention and MLP have the same input, of "one" norm
    or each of its own ("two"). `rotary_base`, `rotary_share` (of a head's numbers, which are turned) and
    `rotary_scaling` belong to rotary positions. `window`: the keys that a query sees, its own the last, in the layers
    that `local` marks by 1: a digit for each layer, repeated. Their rotary base is `local_base`, without scaling, if
    that is given. `score_scale`: of queries times keys, by default 1 / sqrt(head_size). `score_cap`, `logit_cap`:
    scores and logits x become cap tanh(x / cap). `embedding_scale`: what embeddings are multiplied by.

    Raises UsageError for sizes below 1, more than 16,384 layers, heads that do not divide what they split, a ratio
    outside of [0, 1), windows of unfused attention, or groups that do not divide the tokens.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int = 50_257
    seq: int = 1024
    batch: int = 1
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    rotary: bool = False
    rms: bool = False
    tied: bool = True
    bias: bool = True
    dropout: float = 0.0
    attention: str = ""
    positions: int = 0
    experts: int = 1
    choices: int = 1
    capacity: float = 1.0
    groups: int = 0
    shares: str = ""
    shared_ffn: int = 0
    head_size: int = 0
    activation: str = ""
    biases: str = ""
    epsilon: float = 1e-5
    offset_norms: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    parallel: str = ""
    first_position: int = 0
    rotary_base: float = 10_000.0
    rotary_share: float = 1.0
    rotary_scaling: Scaling | None = None
    window: int = 0
    local: str = "1"
    local_base: float = 0.0
    score_scale: float = 0.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    separate: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            if kind_of(f) is int and not isinstance(x := getattr(self, f.name), Integral):
                raise UsageError(f"{f.name} is a whole number, got {x!r}")
        self._derive()
        for f in fields(self):
            least = 0 if f.name in OPTIONAL else 1
            if kind_of(f) is int and getattr(self, f.name) < least:
                raise UsageError(f"{f.name} is a whole number of at least {least}, got {getattr(self, f.name)}")
        if self.layers > LAYERS:
            raise UsageError(f"layers is at most {LAYERS:,}, got {self.layers:,}")
        self._check_words()
        self._check_attention()
        if self.positions < self.seq + self.first_position:
            raise UsageError(f"{self.positions} positions are fewer than a sequence of {self.seq} has")
        if self.experts > 1:
            self._check_experts()
        for f in fields(self):
            if kind_of(f) is float and not math.isfinite(getattr(self, f.name)):
                raise UsageError(f"{f.name} is a number, got {getattr(self, f.name)}")

    def _derive(self) -> None:
        """Sets the fields whose defaults depend on others."""

        def default(name: str, value: Any) -> None:
            object.__setattr__(self, name, getattr(self, name) or value)

        default("kv_heads", self.heads)
        default("positions", self.seq + self.first_position)
        default("groups", self.batch)
        default("ffn", -(-8 * self.hidden // 3 // 256) * 256 if self.gated else 4 * self.hidden)
        default("attention", "unfused" if self.dropout else "fused")
        default("activation", "silu" if self.gated else "gelu_tanh")
        default("shares", "probabilities" if self.choices == 1 else "normalized")
        if self.heads > 0 and not self.head_size:
            if self.hidden % self.heads:
                hint = f"{_dividing(self.hidden, self.heads)} heads, or give head_size"
                raise UsageError(f"hidden {self.hidden} does not divide by {self.heads} heads", hint)
            default("head_size", self.hidden // self.heads)
        if self.head_size > 0:
            default("score_scale", 1 / math.sqrt(self.head_size))

    def _check_words(self) -> None:
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout is a number from 0 to 1, 1 not included, got {self.dropout:g}")
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                *first, last = [word or "empty" for word in words]
                raise UsageError(f"{name} is {', '.join(first)} or {last}, got {getattr(self, name)!r}")
        if self.epsilon < 0:
            raise UsageError(f"epsilon is a number of at least 0, got {self.epsilon:g}")
        if not self.local or set(self.local) - {"0", "1"}:
            raise UsageError(f"local is digits 0 and 1, one for each layer, got {self.local!r}")
        for part in self.biases.split("+") if self.biases else ():
            if part not in PARTS:
                raise UsageError(f"biases are of {', '.join(PARTS)}, joined by +, got {self.biases!r}")

        if self.parallel and (self.post_norms or self.experts > 1):
            raise UsageError("layers that are parallel have neither post_norms nor experts")

    def _check_attention(self) -> None:
        if self.heads % self.kv_heads:
            hint = f"kv_heads {_dividing(self.heads, self.kv_heads)}"
            raise UsageError(f"heads {self.heads} does not divide by {self.kv_heads} kv_heads", hint)
        if self.attention == "unfused" and self.window:
            raise UsageError("unfused attention has no window", "leave out window, or attention=fused")
        if self.rotary and self.head_size % 2:
            raise UsageError(f"rotary positions need heads of even size, got {self.head_size}")
        if self.rotary and not (self.rotary_base > 1 and (self.local_base > 1 or self.local_base == 0)):
            raise UsageError(
                f"rotary_base and local_base are numbers above 1, got {self.rotary_base}, {self.local_base}"
            )
        if self.rotary and (not 0 < self.rotary_share <= 1 or self.turned < 2 or self.turned % 2):
            raise UsageError(
                f"rotary_share is a number from 0 to 1 that gives an even part of heads of {self.head_size}, "
                f"got {self.rotary_share:g}"
            )

        scaling = self.rotary_scaling
        if self.rotary and scaling is not None and scaling.kind == "longrope":
            for name, rates in (("short", scaling.short), ("long", scaling.long)):
                if len(rates) != self.turned // 2:
                    raise UsageError(f"scaling of positions: expected {self.turned // 2} {name}, got {len(rates)}")

    def _check_experts(self) -> None:
        if not 1 <= self.choices <= self.experts:
            raise UsageError(f"choices is a number from 1 to {self.experts}, got {self.choices}")
        if not 0 < self.capacity < math.inf:
            raise UsageError(f"capacity is a number above 0, got {self.capacity:g}")
        if self.batch * self.seq % self.groups:
            raise UsageError(f"{self.batch} x {self.seq} tokens do not divide by {self.groups} groups")

    @property
    def turned(self) -> int:
        """The numbers of a head that rotary positions turn."""
        return int(self.head_size * self.rotary_share)

    @property
    def biased(self) -> frozenset[str]:
        """The products that have a bias, of `PARTS`."""
        return frozenset([*(PARTS[:-1] if self.bias else ()), *(self.biases.split("+") if self.biases else ())])

    def windowed(self, layer: int) -> bool:
        """Whether queries of a layer see only the keys of the window, and that is not all of them."""
        return 0 < self.window < self.seq and self.is_local(layer)

    def tables(self) -> Mapping[str, tuple[float, Scaling | None]]:
        """Of the tables of rotary positions the base and the scaling, by the prefix of their names."""
        if not self.rotary:
            return {}
        found: dict[str, tuple[float, Scaling | None]] = {}
        for layer in range(self.layers):
            if self.local_base and self.is_local(layer):
                found["local_"] = self.local_base, None
            else:
                found[""] = self.rotary_base, self.rotary_scaling
        return found

    def is_local(self, layer: int) -> bool:
        """Whether `local` marks the layer."""
        return self.local[layer % len(self.local)] == "1"

    @property
    def group(self) -> int:
        """The tokens in a group."""
        return self.batch * self.seq // self.groups

    @property
    def slots(self) -> int:
        """The most tokens of a group that an expert takes."""
        return min(self.group, math.ceil(self.group * self.choices * Fraction(str(self.capacity)) / self.experts))


def _dividing(n: int, near: int) -> str:
    """The divisors of n next to a number that is none, of those that are not far from it."""
    below = next((k for k in range(near - 1, max(0, near - _NEAR), -1) if n % k == 0), 1)
    above = next((k for k in range(near + 1, near + _NEAR) if n % k == 0), below)
    return " or ".join(map(str, sorted({below, above})))


def kind_of(field: Field[Any]) -> type:
    """The type of a field of `Decoder`."""
    return int if field.default is MISSING else type(field.default)


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"vocab": 32_000, "seq": 2048, "gated": True, "rotary": True, "rms": True, "tied": False, "bias": False},
}
"""By name the parts that differ from `Decoder`'s defaults."""
_GPT3 = {"layers": 96, "hidden": 12_288, "heads": 96, "seq": 2048}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-large": {"layers": 48, "hidden": 1280, "heads": 20, "seq": 632, "positions": 1024, "tied": False},
    "gpt3-175b": _GPT3,
    "gpt3-moe": {**_GPT3, "ffn": 3072, "experts": 16},
}
"""As those of `ARCHITECTURES`, with all sizes."""


def decoder(config: Decoder, dtype: DType = Float32) -> Function:
    """The forward pass: `input_ids` (batch, seq) to `logits` (batch, seq, vocab); other inputs are weights, and with
    rotary positions the tables `cos` and `sin`, (1, 1, seq, turned numbers of a head), see `angles`."""
    return build(config, dtype)


def angles(config: Decoder) -> Mapping[str, np.ndarray]:
    """The tables of rotary positions, by name, made when they are asked for; none without them."""
    return _Angles(config)


class _Angles(Mapping[str, Any]):
    def __init__(self, config: Decoder) -> None:
        self._config, self._tables = config, config.tables()

    def __iter__(self) -> Iterator[str]:
        return (prefix + name for prefix in self._tables for name in _TRIGONOMETRIC)

    def __len__(self) -> int:
        return len(_TRIGONOMETRIC) * len(self._tables)

    def __getitem__(self, name: str) -> np.ndarray:
        import numpy as np

        prefix, found = name[:-3], name[-3:]
        base, scaling = self._tables[prefix]
        tables = turns(self._config.turned, base, scaling, self._config.seq)
        return tables[_TRIGONOMETRIC.index(found)][None, None].astype(np.float32)
