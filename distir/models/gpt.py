"""A decoder-only transformer as GPT-2 is: learned positions, norms before blocks, fused QKV projection, tied head."""

from __future__ import annotations

import math

from distir.ir.errors import UsageError
from distir.ir.function import Function, FunctionMaker, Role, Value
from distir.ir.type import DType, Float32, Int64, Tensor

_EPSILON = 1e-5


def gpt(
    layers: int, width: int, heads: int, vocabulary: int, sequence: int, batch: int, dtype: DType = Float32
) -> Function:
    """The forward pass: `input_ids` (batch, sequence) to `logits` (batch, sequence, vocabulary).

    Further inputs are the additive `attention_mask` (1, 1, sequence, sequence), `position_ids` (1, sequence), and the
    parameters. Raises UsageError if the heads do not divide the width.
    """
    if width % heads:
        raise UsageError(f"width {width} does not divide by {heads} heads")
    maker = FunctionMaker("gpt")
    ids = maker.add_input_value("input_ids", Tensor(Int64, (batch, sequence)), Role("data", 0))
    mask = maker.add_input_value("attention_mask", Tensor(dtype, (1, 1, sequence, sequence)), Role("constant"))
    positions = maker.add_input_value("position_ids", Tensor(Int64, (1, sequence)), Role("constant"))
    builder = _Builder(maker, width, heads, mask, dtype)
    table = builder.parameter("wte", vocabulary, width)
    x = builder.emit("Gather", table, ids, axis=0)
    x = builder.emit("Add", x, builder.emit("Gather", builder.parameter("wpe", sequence, width), positions, axis=0))
    for i in range(layers):
        x = builder.block(x, f"h{i}")
    x = builder.norm(x, "ln")
    head = builder.emit("Transpose", table, perm=(1, 0))
    maker.set_outputs([maker.add_op("MatMul", "logits", [x, head])])
    return maker.finalize()


class _Builder:
    def __init__(self, maker: FunctionMaker, width: int, heads: int, mask: Value, dtype: DType) -> None:
        self.maker, self.width, self.heads, self.mask, self.dtype = maker, width, heads, mask, dtype
        self.emit = maker.emit

    def parameter(self, name: str, *shape: int) -> Value:
        return self.maker.add_input_value(name, Tensor(self.dtype, shape), Role("parameter"))

    def scalar(self, x: float) -> Value:
        return self.emit("Constant", value=(x,), shape=(), dtype=self.dtype)

    def norm(self, x: Value, name: str) -> Value:
        scale, bias = self.parameter(f"{name}.weight", self.width), self.parameter(f"{name}.bias", self.width)
        return self.emit("LayerNormalization", x, scale, bias, axis=2, epsilon=_EPSILON)

    def linear(self, x: Value, name: str, out: int) -> Value:
        width = x.type.global_shape[-1]  # type: ignore[union-attr]
        y = self.emit("MatMul", x, self.parameter(f"{name}.weight", width, out))
        return self.emit("Add", y, self.parameter(f"{name}.bias", out))

    def block(self, x: Value, name: str) -> Value:
        x = self.emit("Add", x, self.attention(self.norm(x, f"{name}.ln_1"), f"{name}.attn"))
        y = self.linear(self.norm(x, f"{name}.ln_2"), f"{name}.mlp.fc", 4 * self.width)
        return self.emit("Add", x, self.linear(self.gelu(y), f"{name}.mlp.proj", self.width))

    def attention(self, x: Value, name: str) -> Value:
        rows, size = x.type.global_shape[:2], self.width // self.heads  # type: ignore[union-attr]
        split = self.emit("Split", self.linear(x, f"{name}.qkv", 3 * self.width), axis=2, parts=3)
        q, k, v = (self.emit("Reshape", y, shape=(*rows, self.heads, size)) for y in split)
        q, v = (self.emit("Transpose", y, perm=(0, 2, 1, 3)) for y in (q, v))
        scores = self.emit("MatMul", q, self.emit("Transpose", k, perm=(0, 2, 3, 1)))
        scores = self.emit("Mul", scores, self.scalar(1 / math.sqrt(size)))
        weights = self.emit("Softmax", self.emit("Add", scores, self.mask), axis=3)
        mixed = self.emit("Transpose", self.emit("MatMul", weights, v), perm=(0, 2, 1, 3))
        return self.linear(self.emit("Reshape", mixed, shape=(*rows, self.width)), f"{name}.proj", self.width)

    def gelu(self, x: Value) -> Value:
        """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), Hendrycks and Gimpel 2016."""
        cube = self.emit("Mul", self.emit("Pow", x, self.scalar(3.0)), self.scalar(0.044715))
        inner = self.emit("Mul", self.emit("Add", x, cube), self.scalar(math.sqrt(2 / math.pi)))
        return self.emit(
            "Mul",
            self.emit("Mul", x, self.scalar(0.5)),
            self.emit("Add", self.emit("Tanh", inner), self.scalar(1.0)),
        )
