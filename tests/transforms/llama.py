"""A decoder-only transformer as Llama is: root-mean-square norms, rotary positions, grouped queries, a gated MLP."""

from __future__ import annotations

import math

from distir.ir.function import Function, FunctionMaker, Role, Value
from distir.ir.type import DType, Float64, Int64, Tensor
from distir.ops.rules import shape_of


def llama(
    layers: int,
    width: int,
    heads: int,
    kv: int,
    ffn: int,
    vocabulary: int,
    sequence: int,
    batch: int,
    tied: bool = False,
    flat: bool = False,
    dtype: DType = Float64,
) -> Function:
    """The forward pass: `ids` (batch, sequence) to `logits`; `kv` heads of keys and values.

    `tied`: the head is the embedding. `flat`: products are of matrices, as torch's exporter writes some.
    """
    return _Builder(layers, width, heads, kv, ffn, vocabulary, sequence, batch, tied, flat, dtype).build()


class _Builder:
    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        kv: int,
        ffn: int,
        vocabulary: int,
        sequence: int,
        batch: int,
        tied: bool,
        flat: bool,
        dtype: DType,
    ) -> None:
        self.layers, self.width, self.heads, self.kv, self.ffn = layers, width, heads, kv, ffn
        self.vocabulary, self.rows, self.tied, self.flat, self.dtype = vocabulary, (batch, sequence), tied, flat, dtype
        self.maker = FunctionMaker("llama")
        self.emit = self.maker.emit
        self.size = width // heads

    def build(self) -> Function:
        batch, sequence = self.rows
        ids = self.maker.add_input_value("ids", Tensor(Int64, (batch, sequence)), Role("data", 0))
        self.cos, self.sin = (self.constant(name, 1, 1, sequence, self.size) for name in ("cos", "sin"))
        self.mask = self.constant("mask", 1, 1, sequence, sequence)
        table = self.parameter(self.vocabulary, self.width)
        x = self.emit("Gather", table, ids, axis=0)
        for _ in range(self.layers):
            x = self.emit("Add", x, self.attention(self.norm(x)))
            x = self.emit("Add", x, self.gated(self.norm(x)))
        head = self.emit("Transpose", table, perm=(1, 0)) if self.tied else self.parameter(self.width, self.vocabulary)
        self.maker.set_outputs([self.maker.add_op("MatMul", "logits", [self.norm(x), head])])
        return self.maker.finalize()

    def constant(self, name: str, *shape: int) -> Value:
        return self.maker.add_input_value(name, Tensor(self.dtype, shape), Role("constant"))

    def parameter(self, *shape: int) -> Value:
        return self.maker.add_input_value("w", Tensor(self.dtype, shape), Role("parameter"))

    def number(self, x: float) -> Value:
        return self.emit("Constant", value=(x,), shape=(), dtype=self.dtype)

    def norm(self, x: Value) -> Value:
        squares = self.emit("ReduceMean", self.emit("Mul", x, x), axes=(2,), keepdims=1)
        scale = self.emit("Reciprocal", self.emit("Sqrt", self.emit("Add", squares, self.number(1e-5))))
        return self.emit("Mul", self.parameter(self.width), self.emit("Mul", x, scale))

    def linear(self, x: Value, out: int) -> Value:
        k = shape_of(x)[-1]
        if not self.flat:
            return self.emit("MatMul", x, self.parameter(k, out))
        rows = self.emit("Reshape", x, shape=(math.prod(self.rows), k))
        return self.emit("Reshape", self.emit("MatMul", rows, self.parameter(k, out)), shape=(*self.rows, out))

    def by_heads(self, x: Value, heads: int) -> Value:
        y = self.emit("Reshape", self.linear(x, heads * self.size), shape=(*self.rows, heads, self.size))
        return self.emit("Transpose", y, perm=(0, 2, 1, 3))

    def turned(self, x: Value) -> Value:
        """With rotary positions: Su et al. 2021."""
        a, b = self.emit("Split", x, axis=3, parts=2)
        across = self.emit("Concat", self.emit("Neg", b), a, axis=3)
        return self.emit("Add", self.emit("Mul", x, self.cos), self.emit("Mul", across, self.sin))

    def repeated(self, x: Value) -> Value:
        """Each head of keys or values for as many heads of queries as share it."""
        (batch, sequence), times = self.rows, self.heads // self.kv
        if times == 1:
            return x
        x = self.emit("Reshape", x, shape=(batch, self.kv, 1, sequence, self.size))
        x = self.emit("Expand", x, shape=(batch, self.kv, times, sequence, self.size))
        return self.emit("Reshape", x, shape=(batch, self.heads, sequence, self.size))

    def attention(self, x: Value) -> Value:
        q, k, v = self.by_heads(x, self.heads), self.by_heads(x, self.kv), self.by_heads(x, self.kv)
        k, v = self.repeated(self.turned(k)), self.repeated(v)
        scores = self.emit("MatMul", self.turned(q), self.emit("Transpose", k, perm=(0, 1, 3, 2)))
        scores = self.emit("Mul", scores, self.number(1 / math.sqrt(self.size)))
        mixed = self.emit("MatMul", self.emit("Softmax", self.emit("Add", scores, self.mask), axis=3), v)
        mixed = self.emit("Reshape", self.emit("Transpose", mixed, perm=(0, 2, 1, 3)), shape=(*self.rows, self.width))
        return self.linear(mixed, self.width)

    def gated(self, x: Value) -> Value:
        gate, up = self.linear(x, self.ffn), self.linear(x, self.ffn)
        return self.linear(self.emit("Mul", self.emit("Mul", gate, self.emit("Sigmoid", gate)), up), self.width)
