"""A recommender as DLRM (Naumov et al. 2019): tables of categorical features, an MLP of the dense ones, their products
in pairs, and an MLP that says how probable a click is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from distir.ir.errors import UsageError
from distir.ir.function import Function, FunctionMaker, Role, Value
from distir.ir.type import DType, Float32, Int64, Tensor
from distir.models.decoder import kind_of
from distir.ops.rules import shape_of


@dataclass(frozen=True)
class Recommender:
    """The sizes of a recommender.

    `tables` of `rows` rows, each of `width` numbers; a sample has `dense` numbers and an index into each table, or with
    `pooling` that many, whose rows are added. `bottom` and `top` are the widths of the results of the MLPs' products:
    `bottom` ends with `width`, by default it is that three times; `top` with 1.

    Raises UsageError for sizes below 1, and for widths that are none or end otherwise.
    """

    tables: int = 4
    rows: int = 80_000
    width: int = 128
    dense: int = 128
    bottom: str = ""
    top: str = "512-512-512-256-1"
    batch: int = 2048
    pooling: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "bottom", self.bottom or "-".join([str(self.width)] * 3))
        for f in fields(self):
            least = 0 if f.name == "pooling" else 1
            if kind_of(f) is int and getattr(self, f.name) < least:
                raise UsageError(f"{f.name} is a whole number of at least {least}, got {getattr(self, f.name)}")
        for name, last in (("bottom", self.width), ("top", 1)):
            if self.widths(name)[-1] != last:
                raise UsageError(f"{name} ends with {last}, got {getattr(self, name)}")

    def widths(self, name: str) -> Sequence[int]:
        """The widths of `bottom` or `top`."""
        return widths_of(name, getattr(self, name))


def widths_of(name: str, text: str) -> Sequence[int]:
    """The widths that a text says, as the field `name`. Raises UsageError for a text that says none."""
    found = text.split("-")
    if not all(x.isdecimal() and len(x) < 10 and int(x) for x in found):
        raise UsageError(f"{name} is widths such as 512-256-1, got {text!r}")
    return [int(x) for x in found]


def recommender(sizes: Recommender, dtype: DType = Float32) -> Function:
    """The forward pass, to the loss: the mean binary cross-entropy of the labels.

    Inputs: `dense` (batch, dense), `indices` (batch, tables), with pooling (batch, tables, pooling), `labels` (batch,),
    integers 0 and 1; and the parameters, all tables in one, `tables` (tables, rows, width).
    """
    return _Builder(sizes, dtype).build()


class _Builder:
    def __init__(self, sizes: Recommender, dtype: DType) -> None:
        self.sizes, self.dtype = sizes, dtype
        self.maker = FunctionMaker("recommender")
        self.emit = self.maker.emit

    def build(self) -> Function:
        s = self.sizes
        pooled = (s.pooling,) if s.pooling else ()
        dense = self.data("dense", self.dtype, s.batch, s.dense)
        indices = self.data("indices", Int64, s.batch, s.tables, *pooled)
        labels = self.data("labels", Int64, s.batch)
        tables = self.parameter("tables", s.tables, s.rows, s.width)
        x = self.mlp(dense, "bottom")
        x = self.emit("Relu", x)
        given = {"pooling": True} if s.pooling else {}
        features = self.emit("Lookup", tables, indices, **given)
        logits = self.mlp(self.emit("Concat", x, self.products(x, features), axis=1), "top")
        self.maker.set_outputs([self.loss(self.emit("Reshape", logits, shape=(s.batch,)), labels)])
        return self.maker.finalize()

    def data(self, name: str, dtype: DType, *shape: int) -> Value:
        return self.maker.add_input_value(name, Tensor(dtype, shape), Role("data", 0))

    def parameter(self, name: str, *shape: int) -> Value:
        return self.maker.add_input_value(name, Tensor(self.dtype, shape), Role("parameter"))

    def mlp(self, x: Value, name: str) -> Value:
        """Products and biases, with a Relu between them."""
        for k, out in enumerate(self.sizes.widths(name)):
            x = self.emit("Relu", x) if k else x
            x = self.emit("MatMul", x, self.parameter(f"{name}.{k}.weight", shape_of(x)[-1], out))
            x = self.emit("Add", x, self.parameter(f"{name}.{k}.bias", out))
        return x

    def products(self, x: Value, features: Value) -> Value:
        """The products of any two of x (batch, width) and the features (batch, tables, width): (batch, pairs)."""
        batch, tables, width = shape_of(features)
        count = tables + 1
        rows = self.emit("Concat", self.emit("Reshape", x, shape=(batch, 1, width)), features, axis=1)
        products = self.emit("MatMul", rows, self.emit("Transpose", rows, perm=(0, 2, 1)))
        pairs = tuple([i * count + j for i in range(count) for j in range(i)])
        index = self.emit("Constant", value=pairs, shape=(len(pairs),), dtype=Int64)
        return self.emit("Gather", self.emit("Reshape", products, shape=(batch, count * count)), index, axis=1)

    def loss(self, logits: Value, labels: Value) -> Value:
        """The mean of softplus(z) - y z."""
        hit = self.emit("Mul", self.emit("Cast", labels, to=self.dtype), logits)
        rows = self.emit("Sub", self.emit("Softplus", logits), hit)
        return self.maker.add_op("ReduceMean", "loss", [rows], {"axes": (0,), "keepdims": 0})
