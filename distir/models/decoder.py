"""Decoder-only transformers of any size: GPT-2's and Llama's architectures, and what lies between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from distir.ir.errors import UsageError
from distir.ir.function import Function, FunctionMaker, Role, Value
from distir.ir.type import DType, Float32, Int64, Tensor
from distir.models.experts import routes
from distir.ops.rules import shape_of

if TYPE_CHECKING:
    import numpy as np

_EPSILON = 1e-5
_BASE = 10_000.0
"""Of rotary positions: Su et al. 2021."""
_LAYERS = 1 << 14
"""Limit on layers, each of which is some thirty ops of the program."""


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder-only transformer, and which of the usual parts it has.

    Sequences of `seq` tokens. `kv_heads`: heads of keys and values (grouped queries), by default `heads`. `ffn`: the
    width between the products of an MLP, by default 4 `hidden`, if `gated` 8/3 of it, rounded up to a multiple of 256.
    `gated`: the MLP is silu(x W) * (x V), else gelu(x W). `rotary`: positions turn queries and keys, else a table of
    them is added. `rms`: root-mean-square norms, else layer norms. `tied`: the head is the embedding. `bias`: products
    have one. `dropout`: the ratio of what is dropped in training, of the embeddings, of what attention and MLP add, and
    of attention's probabilities. `attention`: "fused" in one op, or "unfused", by default only with dropout: the
    probabilities are then values of their own. `positions`: rows of the table of positions, by default `seq`.

    With several `experts`, each an MLP of width `ffn`, a token goes to the one that a router finds most probable, or to
    the two if `choices` is 2 (`distir.models.experts`). Tokens are in `groups`, by default each sequence is one; of a
    group an expert takes the first ceil(tokens * choices * capacity / experts) that come to it.

    Raises UsageError for sizes below 1, more than 16,384 layers, heads that do not divide what they split, a ratio
    outside of [0, 1), dropout of fused attention, or groups that do not divide the tokens.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "positions", self.positions or self.seq)
        object.__setattr__(self, "groups", self.groups or self.batch)
        if not self.ffn:
            wide = -(-8 * self.hidden // 3 // 256) * 256 if self.gated else 4 * self.hidden
            object.__setattr__(self, "ffn", wide)
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout is a number from 0 to 1, 1 not included, got {self.dropout:g}")
        if not self.attention:
            object.__setattr__(self, "attention", "unfused" if self.dropout else "fused")
        if self.attention not in ("fused", "unfused"):
            raise UsageError(f"attention is fused or unfused, got {self.attention!r}")
        if self.attention == "fused" and self.dropout:
            raise UsageError("fused attention has no dropout", "leave out one of attention=fused and dropout")
        for f in fields(self):
            if kind_of(f) is int and getattr(self, f.name) < 1:
                raise UsageError(f"{f.name} is a whole number of at least 1, got {getattr(self, f.name)}")
        if self.layers > _LAYERS:
            raise UsageError(f"layers is at most {_LAYERS:,}, got {self.layers:,}")
        for what, whole, part in (("hidden", self.hidden, self.heads), ("heads", self.heads, self.kv_heads)):
            if whole % part:
                name = "heads" if what == "hidden" else "kv_heads"
                raise UsageError(f"{what} {whole} does not divide by {part} {name}")
        if self.rotary and self.hidden // self.heads % 2:
            raise UsageError(f"rotary positions need heads of even size, got {self.hidden // self.heads}")

        if self.positions < self.seq:
            raise UsageError(f"{self.positions} positions are fewer than a sequence of {self.seq} has")
        if self.experts > 1:
            self._check_experts()

    def _check_experts(self) -> None:
        if self.choices not in (1, 2) or self.choices > self.experts:
            raise UsageError(f"choices is 1 or 2, got {self.choices}")
        if not 0 < self.capacity < math.inf:
            raise UsageError(f"capacity is a number above 0, got {self.capacity:g}")
        if self.batch * self.seq % self.groups:
            raise UsageError(f"{self.batch} x {self.seq} tokens do not divide by {self.groups} groups")

    @property
    def size(self) -> int:
        """The size of a head."""
        return self.hidden // self.heads

    @property
    def group(self) -> int:
        """The tokens in a group."""
        return self.batch * self.seq // self.groups

    @property
    def slots(self) -> int:
        """The most tokens of a group that an expert takes."""
        return math.ceil(self.group * self.choices * Fraction(str(self.capacity)) / self.experts)


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
    rotary positions the tables `cos` and `sin`, (1, 1, seq, size of a head), see `angles`."""
    return _Builder(config, dtype).build()


def angles(config: Decoder) -> Mapping[str, np.ndarray]:
    """The tables of rotary positions, by name; none without them."""
    import numpy as np

    if not config.rotary:
        return {}
    rates = _BASE ** (-np.arange(0, config.size, 2) / config.size)
    turns = np.tile(np.outer(np.arange(config.seq), rates), 2)[None, None]
    return {"cos": np.cos(turns).astype(np.float32), "sin": np.sin(turns).astype(np.float32)}


class _Builder:
    def __init__(self, config: Decoder, dtype: DType) -> None:
        self.config, self.dtype = config, dtype
        self.maker = FunctionMaker("decoder")
        self.emit = self.maker.emit
        self.rows = config.batch, config.seq

    def build(self) -> Function:
        c = self.config
        ids = self.maker.add_input_value("input_ids", Tensor(Int64, self.rows), Role("data", 0))
        if c.rotary:
            table = Tensor(self.dtype, (1, 1, c.seq, c.size))
            self.cos, self.sin = (self.maker.add_input_value(n, table, Role("constant")) for n in ("cos", "sin"))
        embedding = self.parameter("embedding", c.vocab, c.hidden)
        x = self.emit("Gather", embedding, ids, axis=0)
        if not c.rotary:
            table = self.parameter("positions", c.positions, c.hidden)
            if c.positions > c.seq:
                table = self.emit("Slice", table, starts=(0,), ends=(c.seq,), axes=(0,), steps=(1,))
            x = self.emit("Add", x, table)
        x = self.dropped(x)
        for i in range(c.layers):
            x = self.emit("Add", x, self.dropped(self.attention(self.norm(x, f"{i}.norm1"), f"{i}.attention")))
            mlp = self.experts if c.experts > 1 else self.mlp
            x = self.emit("Add", x, self.dropped(mlp(self.norm(x, f"{i}.norm2"), f"{i}.mlp")))
        x = self.norm(x, "norm")
        head = self.emit("Transpose", embedding, perm=(1, 0)) if c.tied else self.parameter("head", c.hidden, c.vocab)
        self.maker.set_outputs([self.maker.add_op("MatMul", "logits", [x, head])])
        return self.maker.finalize()

    def parameter(self, name: str, *shape: int) -> Value:
        return self.maker.add_input_value(name, Tensor(self.dtype, shape), Role("parameter"))

    def norm(self, x: Value, name: str) -> Value:
        gain = self.parameter(f"{name}.weight", self.config.hidden)
        if not self.config.rms:
            bias = self.parameter(f"{name}.bias", self.config.hidden)
            return self.emit("LayerNormalization", x, gain, bias, axis=2, epsilon=_EPSILON)
        return self.emit("RMSNormalization", x, gain, axis=2, epsilon=_EPSILON)

    def linear(self, x: Value, name: str, out: int) -> Value:
        y = self.emit("MatMul", x, self.parameter(f"{name}.weight", shape_of(x)[-1], out))
        return self.emit("Add", y, self.parameter(f"{name}.bias", out)) if self.config.bias else y

    def by_heads(self, x: Value, heads: int) -> Value:
        y = self.emit("Reshape", x, shape=(*self.rows, heads, self.config.size))
        return self.emit("Transpose", y, perm=(0, 2, 1, 3))

    def attention(self, x: Value, name: str) -> Value:
        c = self.config
        if c.kv_heads == c.heads:  # one product
            found = self.emit("Split", self.linear(x, f"{name}.qkv", 3 * c.hidden), axis=2, parts=3)
        else:
            pair = self.linear(x, f"{name}.kv", 2 * c.kv_heads * c.size)
            found = [self.linear(x, f"{name}.q", c.hidden), *self.emit("Split", pair, axis=2, parts=2)]
        q, k, v = (self.by_heads(y, heads) for y, heads in zip(found, (c.heads, c.kv_heads, c.kv_heads), strict=True))
        if c.rotary:
            q, k = self.turned(q), self.turned(k)
        k, v = self.repeated(k), self.repeated(v)
        scale = 1 / math.sqrt(c.size)
        if c.attention == "fused":
            y, _ = self.emit("Attention", q, k, v, scale=scale, causal=True)
        else:
            y = self.emit("MatMul", self.probabilities(q, k, scale), v)
        y = self.emit("Reshape", self.emit("Transpose", y, perm=(0, 2, 1, 3)), shape=(*self.rows, c.hidden))
        return self.linear(y, f"{name}.out", c.hidden)

    def probabilities(self, q: Value, k: Value, scale: float) -> Value:
        """Those of causal attention. The Dropout, also of ratio 0, keeps them from being fused."""
        scores = self.emit("MatMul", q, self.emit("Transpose", k, perm=(0, 1, 3, 2)))
        found = self.emit("Softmax", self.emit("CausalMask", scores, scale=scale), axis=3)
        return self.emit("Dropout", found, ratio=self.config.dropout)

    def dropped(self, x: Value) -> Value:
        return self.emit("Dropout", x, ratio=self.config.dropout) if self.config.dropout else x

    def turned(self, x: Value) -> Value:
        """Each pair of numbers turned by an angle that grows with the position."""
        a, b = self.emit("Split", x, axis=3, parts=2)
        across = self.emit("Concat", self.emit("Neg", b), a, axis=3)
        return self.emit("Add", self.emit("Mul", x, self.cos), self.emit("Mul", across, self.sin))

    def repeated(self, x: Value) -> Value:
        """Each head of keys or values once for each head of queries that shares it."""
        c, (batch, seq) = self.config, self.rows
        times = c.heads // c.kv_heads
        if times == 1:
            return x
        x = self.emit("Reshape", x, shape=(batch, c.kv_heads, 1, seq, c.size))
        x = self.emit("Expand", x, shape=(batch, c.kv_heads, times, seq, c.size))
        return self.emit("Reshape", x, shape=(batch, c.heads, seq, c.size))

    def mlp(self, x: Value, name: str) -> Value:
        return self.linear(self.activated(self.linear(x, f"{name}.in", self.wide)), f"{name}.out", self.config.hidden)

    @property
    def wide(self) -> int:
        """The width of an MLP's first product."""
        return self.config.ffn * (2 if self.config.gated else 1)

    def activated(self, x: Value) -> Value:
        if not self.config.gated:
            return self.emit("Gelu", x, approximate="tanh")
        gate, up = self.emit("Split", x, axis=2, parts=2)
        return self.emit("Mul", self.emit("Silu", gate), up)

    def experts(self, x: Value, name: str) -> Value:
        """Each expert's MLP of the tokens that it takes; a token gets its experts' shares."""
        c = self.config
        x = self.reshaped(x, c.groups, c.group, c.hidden)
        router = self.parameter(f"{name}.router.weight", c.hidden, c.experts)
        probabilities = self.emit("Softmax", self.emit("MatMul", x, router), axis=2)
        dispatch, combine = routes(self.maker, probabilities, c.choices, c.slots)
        y = self.emit("MatMul", self.emit("Transpose", dispatch, perm=(0, 2, 1)), x)
        y = self.emit("Reshape", y, shape=(c.groups, c.experts, c.slots, c.hidden))
        y = self.emit("Transpose", y, perm=(1, 0, 2, 3))
        y = self.emit("Reshape", y, shape=(c.experts, c.groups * c.slots, c.hidden))
        y = self.activated(self.stacked(y, f"{name}.experts.in", self.wide))
        y = self.stacked(y, f"{name}.experts.out", c.hidden)
        y = self.emit("Reshape", y, shape=(c.experts, c.groups, c.slots, c.hidden))
        y = self.emit("Transpose", y, perm=(1, 0, 2, 3))
        y = self.emit("Reshape", y, shape=(c.groups, c.experts * c.slots, c.hidden))
        return self.reshaped(self.emit("MatMul", combine, y), *self.rows, c.hidden)

    def reshaped(self, x: Value, *shape: int) -> Value:
        return x if shape_of(x) == shape else self.emit("Reshape", x, shape=shape)

    def stacked(self, x: Value, name: str, out: int) -> Value:
        """As `linear`, with weights of its own for each expert: (experts, rows, width) to (experts, rows, out)."""
        c = self.config
        y = self.emit("MatMul", x, self.parameter(f"{name}.weight", c.experts, shape_of(x)[-1], out))
        return self.emit("Add", y, self.parameter(f"{name}.bias", c.experts, 1, out)) if c.bias else y
