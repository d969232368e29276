"""Random differentiable programs for hypothesis, made of blocks that together contain every op.

Streams are activations (batch, sequence, width). Blocks make new streams of earlier ones, so that values skip ahead;
weights may be used again, so that they are tied. Data are bounded, and what is discontinuous is applied to data only:
rounding cannot then be blown up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import HealthCheck
from hypothesis import strategies as st

from distir.ir import Function, FunctionMaker, Value
from distir.ir.function import Role
from distir.ir.type import BFloat16, DType, Float16, Float32, Float64, Int64, Tensor
from distir.ops.rules import shape_of
from distir.transforms.differentiation.draw_dropout import step_of, with_dropout
from distir.transforms.differentiation.grad import grad, parameters
from distir.transforms.differentiation.loss_scale import LossScale, scale_loss
from distir.transforms.differentiation.training import SGD, LearningRate, narrowed, update
from distir.transforms.pipeline.keep_whole import GATHERED_AGAIN
from distir.transforms.rewriting.cleanup import extend, prune
from distir.transforms.rewriting.fuse import fuse
from distir.transforms.rewriting.mixed_precision import mixed_precision
from distir.transforms.rewriting.precision import with_dtype
from distir.transforms.roles import weights
from tests.transforms.programs import BATCH, Plan, Program

WIDTHS = (4, 6, 8, 12, 16, 13, 7)
VOCABULARIES = (8, 16, 9, 13)
UNARY = ["Tanh", "Relu", "Sigmoid", "Silu", "Softplus", "Sin", "Cos", "Erf", "Identity", "Neg", "Abs"]
ON_POSITIVE = ["Sqrt", "Log", "Reciprocal"]
BINARY = ["Add", "Sub", "Mul", "Max", "Min"]
STEPS = ["Sign", "Floor", "Ceil", "Round"]
COMPARISONS = ["Greater", "GreaterOrEqual", "Less", "LessOrEqual"]
LOGIC = ["And", "Or", "Xor"]
LARGE = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]
"""The health checks that are suppressed, as programs are too large for them."""
Block = Callable[["Maker"], None]


class Maker:
    """A program under construction: its streams, weights, data and results."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.f = FunctionMaker("random")
        self.emit = self.f.emit
        self.sequence = draw(st.sampled_from((2, 3, 4)))
        self.streams: list[Value] = []
        self.weights: dict[tuple[int, ...], list[Value]] = {}
        self.results: list[Value] = []
        self.data: dict[Value, range] = {}
        """The arrays of integer inputs."""
        self.pick: Callable[[Sequence[Any]], Any] = lambda options: draw(st.sampled_from(options))

    def flip(self, k: int = 2) -> bool:
        """True with probability 1 / `k`."""
        return self.draw(st.integers(0, k - 1)) == k - 1

    def input(self, *shape: int, below: int = 0, least: int = 0, role: Role | None = None, name: str = "data") -> Value:
        t = Tensor(Int64 if below else Float64, shape)
        v = self.f.add_input_value("ids" if below else name, t, role or Role("data", 0))
        if below:
            self.data[v] = range(least, below)
        return v

    def weight(self, *shape: int) -> Value:
        """A parameter: an existing or a new one."""
        known = self.weights.setdefault(shape, [])
        if known and self.flip(3):
            return self.pick(known)
        known.append(self.f.add_input_value("w", Tensor(Float64, shape), Role("parameter")))
        return known[-1]

    def number(self, x: float, dtype: Any = Float64) -> Value:
        return self.emit("Constant", value=(x,), shape=(), dtype=dtype)

    def stream(self) -> Value:
        """A random stream; newer ones are more likely."""
        return self.streams[-1 - min(self.draw(st.integers(0, 3)), len(self.streams) - 1)]

    def width(self, v: Value) -> int:
        return shape_of(v)[-1]

    def push(self, v: Value) -> None:
        """Add a new stream, sometimes through Tanh, so that values stay bounded."""
        self.streams.append(self.emit("Tanh", v) if self.flip(3) else v)

    def linear(self, x: Value, width: int) -> Value:
        y = self.emit("MatMul", x, self.weight(self.width(x), width))
        return self.emit("Add", y, self.weight(width)) if self.flip() else y

    def like(self, x: Value) -> Value:
        """A stream of the shape of `x`: another one of that shape, or a new one."""
        same = [v for v in self.streams if v is not x and v.type is x.type]
        return self.pick(same) if same else self.linear(self.stream(), self.width(x))

    def positive(self, x: Value) -> Value:
        return self.emit("Add", self.emit("Mul", x, x), self.number(0.5))


# ---- blocks


def linear(m: Maker) -> None:
    y = m.linear(m.stream(), m.pick(WIDTHS))
    m.push(m.emit("Gelu", y, approximate=m.pick(("none", "tanh"))) if m.flip() else m.emit(m.pick(UNARY), y))


def residual(m: Maker) -> None:
    x = m.stream()
    inner = m.emit("Relu", m.linear(x, m.pick(WIDTHS)))
    m.push(m.emit("Add", x, m.emit("Tanh", m.linear(inner, m.width(x)))))


def unary(m: Maker) -> None:
    x = m.stream()
    for _ in range(6):
        x = m.emit(m.pick(UNARY), x)
    m.push(x)


def of_positive(m: Maker) -> None:
    x = m.positive(m.stream())
    for name in ON_POSITIVE:
        x = m.emit("Add", m.emit("Abs", m.emit(name, x)), m.number(0.5))
    m.push(x)


def binary(m: Maker) -> None:
    x = m.stream()
    for name in (m.pick(BINARY), m.pick(("Max", "Min"))):
        x = m.emit("Tanh", m.emit(name, x, m.like(x)))
    m.push(x)


def quotient(m: Maker) -> None:
    x = m.stream()
    m.push(m.emit("Div", x, m.positive(m.like(x))))


def power(m: Maker) -> None:
    x = m.stream()
    exponent = m.pick(("number", "integer", "weight"))
    if exponent == "integer":
        m.push(m.emit("Tanh", m.emit("Pow", x, m.number(2, Int64))))
    elif exponent == "number":
        m.push(m.emit("Tanh", m.emit("Pow", m.positive(x), m.number(1.5))))
    else:
        m.push(m.emit("Tanh", m.emit("Pow", m.positive(m.emit("Tanh", x)), m.weight(m.width(x)))))


def exponential(m: Maker) -> None:
    m.push(m.emit("Exp", m.emit("Clip", m.stream(), min=-1.0, max=m.pick((0.5, 1.0)))))


def layer_norm(m: Maker) -> None:
    x = m.stream()
    operands = [x, m.weight(m.width(x)), *([m.weight(m.width(x))] if m.flip() else [])]
    m.push(m.f.add_op("LayerNormalization", None, operands, {"axis": -1, "epsilon": 1e-2}))


def rms_norm(m: Maker) -> None:
    x = m.stream()
    mean = m.emit("ReduceMean", m.emit("Mul", x, x), axes=(2,), keepdims=1)
    scale = m.emit("Sqrt", m.emit("Add", mean, m.number(0.1)))
    m.push(m.emit("Mul", m.emit("Div", x, scale), m.weight(m.width(x))))


def attention(m: Maker) -> None:
    x = m.stream()
    heads, size = m.pick(((2, 2), (4, 2), (2, 3), (3, 2), (1, 4)))
    qkv = m.linear(x, 3 * heads * size)
    shape = (BATCH, m.sequence, heads, size)
    parts = m.emit("Split", qkv, axis=2, parts=3)
    q, k, v = [m.emit("Transpose", m.emit("Reshape", p, shape=shape), perm=(0, 2, 1, 3)) for p in parts]
    scores = m.emit("MatMul", q, m.emit("Transpose", k, perm=(0, 1, 3, 2)))
    if m.flip():
        scores = m.emit("Mul", scores, m.number(0.5))
    mask = m.pick(("none", "filled", "filled", "data", "samples", "learned", "learned", "whole", "causal", "causal"))
    if mask == "filled":
        mask = m.input(m.sequence, m.sequence, role=Role("constant"))
        seen = m.emit("Less", mask, m.number(0.0))
        scores = m.emit("Where", seen, scores, m.number(m.pick((-9.0, -1e30))))
    elif mask == "causal":
        scores = m.emit("CausalMask", scores, **m.pick(({}, {"scale": 0.5}, {"value": -3.0})))
    elif mask == "data":
        scores = m.emit("Add", m.input(1, 1, m.sequence, m.sequence, role=Role("constant")), scores)
    elif mask == "samples":
        scores = m.emit("Add", scores, m.input(BATCH, 1, 1, m.sequence))
    elif mask == "learned":
        scores = m.emit("Add", scores, m.weight(m.pick((1, heads)), m.sequence, m.sequence))
    elif mask == "whole":
        scores = m.emit("Add", scores, m.weight(BATCH, heads, m.sequence, m.sequence))
    weights = m.emit("Softmax", scores, axis=-1)
    weights = m.emit("Dropout", weights, ratio=m.pick((0.0, 0.3))) if m.flip() else weights
    mixed = m.emit("Transpose", m.emit("MatMul", weights, v), perm=(0, 2, 1, 3))
    mixed = m.emit("Reshape", mixed, shape=(BATCH, m.sequence, heads * size))
    m.push(m.emit("Add", x, m.linear(mixed, m.width(x))))


def shared_keys(m: Maker) -> None:
    """Attention in one op, of fewer heads of keys and values than of queries."""
    x = m.stream()
    shared, times, size = m.pick(((1, 2, 2), (2, 2, 2), (1, 4, 2), (2, 4, 1), (1, 3, 2), (3, 2, 1)))
    wide, narrow = shared * times * size, shared * size
    parts = m.emit("Split", m.linear(x, wide + 2 * narrow), axis=2, sizes=(wide, narrow, narrow))
    by_head = [m.emit("Reshape", p, shape=(BATCH, m.sequence, -1, size)) for p in parts]
    q, k, v = [m.emit("Transpose", p, perm=(0, 2, 1, 3)) for p in by_head]
    apart = [m.emit("Reshape", p, shape=(BATCH, shared, 1, m.sequence, size)) for p in (k, v)]
    each = [m.emit("Expand", p, shape=(BATCH, shared, times, m.sequence, size)) for p in apart]
    k, v = [m.emit("Reshape", p, shape=(BATCH, shared * times, m.sequence, size)) for p in each]
    form = m.pick(({}, {"causal": True}, {"causal": True, "window": 2}, {"softcap": 0.8}))
    y = m.f.emit("Attention", q, k, v, scale=0.5, **form)[0]
    mixed = m.emit("Reshape", m.emit("Transpose", y, perm=(0, 2, 1, 3)), shape=(BATCH, m.sequence, wide))
    m.push(m.emit("Add", x, m.linear(mixed, m.width(x))))


def embedding(m: Maker) -> None:
    """Nonnegative and negative indices."""
    rows = m.pick(VOCABULARIES)
    ids = m.input(BATCH, m.sequence, below=rows, least=-rows)
    m.push(m.emit("Gather", m.weight(rows, m.pick(WIDTHS)), ids))


def tables(m: Maker) -> None:
    """A table for each position of the sequence; of several indices the rows are added."""
    rows, pooling = m.pick(VOCABULARIES), m.flip()
    ids = m.input(BATCH, m.sequence, *((2,) if pooling else ()), below=rows, least=-rows)
    m.push(m.emit("Lookup", m.weight(m.sequence, rows, m.pick(WIDTHS)), ids, pooling=pooling))


def running_sum(m: Maker) -> None:
    m.push(m.emit("Tanh", m.emit("CumSum", m.stream(), axis=m.pick((1, 2)), exclusive=m.flip(), reverse=m.flip())))


def columns(m: Maker) -> None:
    """Gather along the last dim, a dim of the table; rows of data are picked by position."""
    table = m.weight(m.pick(WIDTHS), 6)
    ids = m.input(m.sequence, below=6, least=-6, role=Role("constant"))
    picked = m.emit("Transpose", m.emit("Gather", table, ids, axis=1), perm=(1, 0))
    m.push(m.emit("Add", m.linear(m.stream(), m.width(picked)), picked))


def tied_head(m: Maker) -> None:
    tables = [w for shape, ws in m.weights.items() if len(shape) == 2 for w in ws]
    if not tables:
        return linear(m)
    table = m.pick(tables)
    _rows, width = shape_of(table)
    x = m.linear(m.stream(), width)
    m.push(m.emit("LogSoftmax", m.emit("MatMul", x, m.emit("Transpose", table, perm=(1, 0))), axis=-1))
    return None


def gemm(m: Maker) -> None:
    x, width = m.stream(), m.pick(WIDTHS)
    rows = m.emit("Reshape", x, shape=(-1, m.width(x)))
    flipped = m.flip()
    w = m.weight(width, m.width(x)) if flipped else m.weight(m.width(x), width)
    y = m.emit("Gemm", rows, w, m.weight(width), transB=int(flipped), alpha=0.5, beta=m.pick((1.0, 2.0)))
    m.push(m.emit("Reshape", y, shape=(BATCH, m.sequence, width)))


def split_and_join(m: Maker) -> None:
    x = m.linear(m.stream(), 12)
    how = m.pick(({"parts": 2}, {"parts": 3}, {"sizes": (4, 8)}, {"sizes": (6, 6)}))
    a, *rest = m.emit("Split", x, axis=2, **how)
    b = m.emit("Sigmoid", rest[-1])
    m.push(m.emit("Concat", b, a, axis=2) if m.flip() or a.type is not b.type else m.emit("Mul", a, b))


def cut(m: Maker) -> None:
    x = m.stream()
    size = m.width(x)
    first = m.pick((0, 1))
    if m.flip():
        m.push(m.emit("Slice", x, starts=(first,), ends=(size,), axes=(2,), steps=(m.pick((1, 2)),)))
    else:
        y = m.emit("Slice", x, starts=(m.sequence - 1,), ends=(-1,), axes=(1,), steps=(-1,))
        m.push(m.emit("Add", x, y))


def reduced(m: Maker) -> None:
    x = m.stream()
    kind, dim = m.pick(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"]), m.pick((1, 2))
    y = m.emit(kind, x, axes=(dim,), keepdims=1)
    how = m.pick(("broadcast", "expand"))
    m.push(m.emit("Sub", x, y) if how == "broadcast" else m.emit("Expand", y, shape=shape_of(x)))


def turned(m: Maker) -> None:
    """Mixes along the sequence."""
    x = m.emit("Transpose", m.stream(), perm=(0, 2, 1))
    y = m.emit("MatMul", x, m.weight(m.sequence, m.sequence))
    m.push(m.emit("Transpose", y, perm=(0, 2, 1)))


def by_heads(m: Maker) -> None:
    """The width read as two dims, with a weight for each."""
    x = m.linear(m.stream(), 12)
    y = m.emit("Reshape", x, shape=(BATCH, m.sequence, 3, 4))
    y = m.emit("Mul", y, m.weight(3, 1)) if m.flip() else m.emit("Add", y, m.weight(4))
    m.push(m.emit("Reshape", y, shape=(BATCH, m.sequence, 12)))


def steps(m: Maker) -> None:
    """What is discontinuous, on data."""
    x = m.input(BATCH, m.sequence, 1)
    y, z = [m.emit(m.pick(STEPS), m.emit("Mul", x, m.number(k))) for k in (2.0, 3.0)]
    m.push(m.emit("Mul", m.stream(), m.emit("Sin", m.emit("Sub", y, z))))


def conditional(m: Maker) -> None:
    a, b = m.input(BATCH, m.sequence, 1), m.input(BATCH, 1, 1)
    c = m.emit(m.pick(COMPARISONS), a, b)
    d = m.emit("Not", m.emit(m.pick(COMPARISONS), b, m.number(0.3)))
    c = m.emit(m.pick(LOGIC), c, d)
    x = m.stream()
    m.push(m.emit("Where", c, x, m.like(x)) if m.flip() else m.emit("Mask", c, x, keep=m.flip()))


def classes(m: Maker) -> None:
    """Where two integers are equal."""
    a, b = m.input(BATCH, m.sequence, 1, below=3), m.number(1, Int64)
    m.push(m.emit("Mul", m.stream(), m.emit("Cast", m.emit("Equal", a, b), to=Float64)))


def padded(m: Maker) -> None:
    x = m.stream()
    y = m.emit("PadTo", x, dim=2, size=m.width(x) + m.pick((1, 2)))
    m.push(m.emit("CutTo", y, dim=2, size=m.width(x) - 1) if m.flip() else y)


def stopped(m: Maker) -> None:
    x = m.stream()
    other = m.emit(m.pick(("Detach", "ZerosLike")), x)
    m.push(m.emit("Add", x, m.emit("FillTail", other, dim=2, size=m.width(x) - 1, value=m.pick((0.0, 0.5)))))


def tensor_constant(m: Maker) -> None:
    n = m.pick((4, 6))
    c = m.emit("Constant", value=tuple(k / n for k in range(n)), shape=(n,), dtype=Float64)
    m.push(m.emit("Add", m.linear(m.stream(), n), c))


def dropped(m: Maker) -> None:
    """Dropout of what a product makes, in several shapes, and of data."""
    x = m.stream()
    y = m.linear(x, m.width(x))
    how = m.pick(("alone", "residual", "turned", "samples"))
    if how == "turned":
        z = m.emit("Transpose", m.emit("Reshape", y, shape=(-1, m.width(x))), perm=(1, 0))
        z = m.emit("Transpose", m.emit("Dropout", z, ratio=0.25), perm=(1, 0))
        y = m.emit("Reshape", z, shape=shape_of(y))
    elif how == "samples":
        y = m.emit("Mul", y, m.emit("Dropout", m.emit("Exp", m.input(BATCH, 1, 1)), ratio=0.5))
    else:
        y = m.emit("Dropout", y, ratio=m.pick((0.1, 0.5)))
    m.push(m.emit("Add", x, y) if how == "residual" else y)


def per_sample(m: Maker) -> None:
    """A weight for each sample, as models exported with a fixed batch have them."""
    x = m.stream()
    m.push(m.emit("Mul", x, m.weight(BATCH, 1, m.width(x))))


def crossed(m: Maker) -> None:
    """Samples compared with each other: two dims are the batch."""
    x = m.emit("ReduceSum", m.stream(), axes=(1,), keepdims=0)
    y = m.emit("MatMul", m.emit("Softmax", m.emit("MatMul", x, m.emit("Transpose", x, perm=(1, 0))), axis=-1), x)
    m.push(m.emit("Add", m.linear(m.stream(), m.width(y)), m.emit("Reshape", y, shape=(BATCH, 1, m.width(y)))))


def picked(m: Maker) -> None:
    """Rows of data, by index."""
    ids = m.input(m.sequence, below=BATCH, least=-BATCH, role=Role("constant"))
    rows = m.emit("Gather", m.input(BATCH, 4), ids)
    m.push(m.emit("Add", m.linear(m.stream(), 4), rows))


def batch_norm(m: Maker) -> None:
    """Data minus its mean over the batch, which depends on all microbatches, or a running one."""
    x = m.input(BATCH, m.sequence, 4)
    mean = m.emit("ReduceMean", x, axes=(0, 1), keepdims=1)
    if m.flip():
        running = m.input(1, 1, 4, role=Role("constant"))
        which = m.pick(("RunningStatistic", "BatchStatistic"))
        mean = m.emit(which, running, mean, momentum=0.9, correction=1.25)
    m.push(m.linear(m.emit("Sub", x, mean), m.pick(WIDTHS)))


def convolved(m: Maker) -> None:
    """Convolutions and pools of data or of a stream; channels are a multiple of the sequence, to be a stream again."""
    x, free = _image(m)
    for _ in range(m.pick((1, 2, 2, 3))):
        x = _convolution(m, x)
        if free or m.flip():
            x = m.emit("Tanh", x)
        if m.flip():
            x = _pool(m, x, largest=free and m.flip())
    sizes = shape_of(x)[1:]
    x = m.emit("Reshape", x, shape=(BATCH, m.sequence, math.prod(sizes) // m.sequence))
    m.push(m.linear(x, m.pick(WIDTHS)))


def looked_up(m: Maker) -> None:
    """Windows over what is looked up in tables, along their rows: a split of these needs halos."""
    rows, pooling = m.pick(VOCABULARIES), m.flip()
    ids = m.input(BATCH, m.sequence, *((2,) if pooling else ()), below=rows, least=-rows)
    x = m.emit("Lookup", m.weight(m.sequence, rows, m.pick((4, 8, 16))), ids, pooling=pooling)
    for _ in range(m.pick((1, 2))):
        x = m.emit("Tanh", _convolution(m, x))
    m.push(m.emit("Reshape", x, shape=(BATCH, m.sequence, math.prod(shape_of(x)[1:]) // m.sequence)))


def pooled(m: Maker) -> None:
    """Pools of data and of streams. Maxima are of data and what is made of it: streams may have equal elements."""
    data = m.input(BATCH, m.sequence, *m.pick(IMAGES), name="image")
    x = m.emit("Mul", data, m.weight(m.sequence, *[1] * (len(shape_of(data)) - 2)))
    for largest in (True, False):
        x = _pool(m, x, largest)
    m.push(m.emit("Reshape", x, shape=(BATCH, m.sequence, math.prod(shape_of(x)[2:]))))


IMAGES = ((8,), (16,), (4, 4), (8, 4), (4, 8), (8, 8), (6, 4))
"""Spatial sizes of data."""


def _image(m: Maker) -> tuple[Value, bool]:
    """Data or a stream as (batch, channels, *sizes), and whether it is data."""
    if not m.flip(4):
        return m.input(BATCH, m.pick((1, 2, m.sequence)), *m.pick(IMAGES), name="image"), True
    x = m.stream()
    width = m.width(x)
    if m.flip(3):
        return m.emit("Transpose", x, perm=(0, 2, 1)), False
    sizes = (2, width // 2) if width % 2 == 0 and m.flip() else (width,)
    return m.emit("Reshape", x, shape=(BATCH, m.sequence, *sizes)), False


def _convolution(m: Maker, x: Value) -> Value:
    """With pads with which most dims may be split."""
    _, channels, *sizes = shape_of(x)
    rows: list[tuple[int, ...]] = []
    for size in sizes:
        k, d, t = m.pick((1, 2, 3, 3, 4, 5)), m.pick((1, 1, 2)), m.pick((1, 1, 2))
        e = d * (k - 1) + 1
        if e < t or size % t:
            k, e, t = 1, 1, 1
        both = m.draw(st.integers(max(0, e - size), e)) if m.flip(4) else e - t
        p = m.draw(st.integers(0, both))
        rows.append((k, t, d, p, both - p))
    kernel, strides, dilations, before, after = zip(*rows, strict=True)
    filters = m.sequence * m.pick((1, 2))
    groups = m.pick([g for g in range(1, channels + 1) if channels % g == 0 and filters % g == 0])
    w = m.weight(filters, channels // groups, *kernel)
    y = m.emit("Conv", x, w, strides=strides, dilations=dilations, pads=(*before, *after), groups=groups)
    return m.emit("Add", y, m.weight(filters, *[1] * len(sizes))) if m.flip() else y


def _pool(m: Maker, x: Value, largest: bool) -> Value:
    """Windows side by side, or overlapping and padded."""
    sizes = shape_of(x)[2:]
    rows: list[tuple[int, ...]] = []
    for size in sizes:
        if size % 2 == 0 and m.flip():
            rows.append((2, 2, 1, 0, 0))
        elif size > 2:
            rows.append(m.pick(((3, 1, 1, 1, 1), (3, 2, 1, 1, 0), (2, 1, 1, 0, 0), (2, 1, 2, 1, 0))))
        else:
            rows.append((1, 1, 1, 0, 0))
    kernel, strides, dilations, before, after = zip(*rows, strict=True)
    given = {"kernel": kernel, "strides": strides, "dilations": dilations, "pads": (*before, *after)}
    if largest:
        return m.emit("MaxPool", x, **given)
    counted = m.pick((given["pads"], (0,) * len(given["pads"])))
    return m.emit("AveragePool", x, **given, counted=counted)


def arcs(m: Maker) -> None:
    x = m.stream()
    for name in ("Asin", "Acos", "Atanh", "Atan", "Asinh"):
        x = m.emit(name, m.emit("Mul", m.emit("Tanh", x), m.number(0.9)))
    m.push(m.emit("Acosh", m.emit("Add", m.emit("Mul", x, x), m.number(1.5))))


def elements(m: Maker) -> None:
    """Elements of the last dim, by indices that are given, or by the order of other data."""
    x = m.stream()
    index = m.input(BATCH, m.sequence, m.pick((1, 4)), below=m.width(x), least=-m.width(x))
    if m.flip():
        index = m.emit("TopIndices", m.input(*shape_of(x)), axis=2, k=m.width(x), least=m.flip(), last=m.flip())
    m.push(m.emit("GatherElements", x, index, axis=2))


def product(m: Maker) -> None:
    x = m.emit("Tanh", m.stream())
    m.push(m.emit("Mul", x, m.emit("ReduceProd", m.like(x), axes=(m.pick((1, 2)),), keepdims=1)))


def integers(m: Maker) -> None:
    a, b = (m.input(BATCH, m.sequence, 1, below=16, least=1) for _ in range(2))
    for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
        a = m.emit(name, a, m.emit("BitwiseNot", b))
    a = m.emit("Mod", m.emit("Quotient", a, b), m.number(5, Int64), truncated=m.flip())
    a = m.emit("BitShift", a, m.number(1, Int64), left=m.flip())
    m.push(m.emit("Mul", m.stream(), m.emit("Tanh", m.emit("Cast", a, to=Float64))))


BLOCKS: list[Block] = [
    *[linear, residual, attention, shared_keys, embedding, tied_head, dropped],
    *[unary, of_positive, binary, quotient, power, exponential, layer_norm, rms_norm, columns, gemm, split_and_join],
    *[cut, reduced, turned, by_heads, steps, conditional, classes, padded, stopped, tensor_constant, batch_norm],
    *[per_sample, crossed, picked, tables, running_sum, convolved, convolved, pooled],
    *[arcs, elements, product, integers],
]

# ---- results


def labelled(m: Maker, x: Value) -> Value:
    labels = m.input(BATCH, m.sequence, below=m.width(x))
    how = m.pick(({"ignore_index": 0}, {"ignore_index": 1}, {}))
    return m.emit("SoftmaxCrossEntropyLoss", x, labels, reduction="mean", **how)


def squared(m: Maker, x: Value) -> Value:
    return m.emit("MSELoss", x, m.input(*shape_of(x)), reduction="mean")


def summed(m: Maker, x: Value) -> Value:
    points = m.emit("Loss", x, m.input(*shape_of(x)), N=BATCH)
    return m.emit("ReduceSum", points, axes=(0, 1, 2), keepdims=0)


def meant(m: Maker, x: Value) -> Value:
    return m.emit("ReduceMean", m.emit("Mul", x, m.input(*shape_of(x))), axes=(0, 1, 2), keepdims=0)


LOSSES = [labelled, labelled, squared, summed, meant]


def measure(m: Maker) -> None:
    """A result besides the loss."""
    x = m.stream()
    kind = m.pick(("whole", "rows", "best", "total", "share", "product", "data", "slope"))
    if kind == "whole":
        y = m.emit("Cast", x, to=Float32) if m.flip(4) else x
    elif kind == "rows":
        y = m.emit("ReduceSum", x, axes=(2,), keepdims=0)
    elif kind == "best":
        y = m.emit("ReduceMax", x, axes=(0, 1, 2), keepdims=0)
    elif kind == "total":
        y = m.emit("ReduceSum", x, axes=(0, 1), keepdims=0)
    elif kind == "share":
        hits = m.emit("Cast", m.emit("Equal", m.input(BATCH, below=3), m.number(1, Int64)), to=Float64)
        y = m.emit("ReduceMean", hits, axes=(0,), keepdims=0)
    elif kind == "product":
        y = m.emit("ReduceProd", m.emit("Sin", x), axes=(2,), keepdims=0)
    elif kind == "data":
        y = m.emit("ReduceSum", m.emit("Exp", m.input(BATCH, 3)), axes=(0,), keepdims=0)
    else:
        a, d = m.input(BATCH, 4), m.input(BATCH, 6)
        m.results.append(m.emit("ReduceSum", a, axes=(0,), keepdims=0))
        y = m.emit("MatMulGrad", a, m.weight(4, 6), d)[1]
    m.results.append(y)


@st.composite
def random_programs(draw: st.DrawFn, block: Block | None = None) -> Program:
    """A training step under SGD, its gradients among the results, with data that differ in every sample.

    With `block`, the loss is of a stream which that block made.
    """
    m = Maker(draw)
    if draw(st.booleans()):
        m.streams.append(m.input(BATCH, m.sequence, m.pick(WIDTHS)))
    else:
        embedding(m)
    for _ in range(draw(st.integers(2, 8))):
        m.pick(BLOCKS)(m)
    if block is not None:
        block(m)
    for _ in range(draw(st.integers(0, 2))):
        measure(m)
    x = m.streams[-1]
    loss = m.pick(LOSSES)(m, m.linear(x, m.pick(WIDTHS)) if m.flip() or m.width(x) < 2 else x)
    m.f.set_outputs([loss, *m.results])
    forward = fuse(m.f.finalize()) if m.flip() else m.f.finalize()
    low = m.pick((None, None, BFloat16, Float16))
    schedule = m.pick((None, LearningRate(4, m.pick(("linear", "cosine")), 8)))
    optimizer = SGD(
        0.1, m.pick((0.0, 0.9)), 0.1, clip_norm=m.pick((None, 0.5)), schedule=schedule, decay_vectors=m.flip()
    )
    step = trained(forward, optimizer, low, m.pick((Float32, low or Float32)))
    data = {step.inputs[forward.inputs.index(v)]: x for v, x in m.data.items()}
    return Program(step, arrays(step, data, draw(st.integers(0, 2**32 - 1))), forward)


def trained(function: Function, optimizer: SGD, low: DType | None = None, grad_dtype: DType = Float32) -> Function:
    """The function with dropout, gradients and next values of all its parameters; with `low` in mixed precision,
    otherwise in float64."""
    scaling = None
    function = with_dropout(function, seed=3)
    if low is not None:
        function = mixed_precision(with_dtype(function, Float32), low)
    target = function.outputs[0]
    if low is Float16:
        maker = extend(function)
        target = scale_loss(maker, target)
        maker.set_outputs([*function.outputs, target])
        function = maker.finalize()
        scaling = LossScale.of(function)
    weights = parameters(function)
    backward = grad(function, target, weights)
    gradients = backward.outputs[len(function.outputs) :]
    maker = extend(backward)
    given = dict(zip(weights, narrowed(maker, gradients, grad_dtype), strict=True))
    new = update(maker, optimizer, given, scaling, step_of(backward))
    maker.set_outputs([*backward.outputs, *new])
    return prune(maker.finalize())


def arrays(function: Function, indices: dict[Value, range], seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    made: list[np.ndarray] = []
    for v in function.inputs:
        shape = shape_of(v)
        if v in indices:
            x: Any = rng.integers(indices[v].start, indices[v].stop, shape)
        elif v.kind == "state" and v.type.dtype.kind == "int":  # type: ignore[union-attr]
            x = rng.integers(0, 3, shape)
        elif v.kind == "state":
            x = rng.standard_normal(shape) * 0.1
        elif v.kind == "parameter":
            x = rng.standard_normal(shape) / math.sqrt(shape[0] if len(shape) > 1 else 4)
        else:
            x = rng.standard_normal(shape)
        made.append(np.asarray(x, v.type.dtype.numpy))  # type: ignore[union-attr]
    return made


def _interleaved(plan: Plan) -> Plan:
    """With two stages a rank, where the microbatches divide by the ranks."""
    fits = plan.pp > 1 and plan.microbatches % plan.pp == 0
    return plan._replace(schedule="interleaved", chunks=2) if fits else plan


PRODUCTS = ("products", "all-products")
random_plans = st.builds(
    Plan,
    dp=st.sampled_from((1, 2, 2, 4)),
    tp=st.sampled_from((1, 2, 2, 3, 4)),
    pp=st.sampled_from((1, 2, 2, 3, 4)),
    microbatches=st.sampled_from((1, 2, 4)),
    schedule=st.sampled_from(("1f1b", "gpipe", "interleaved")),
    host=st.sampled_from((False, False, True)),
    chunks=st.just(1),
    bucket_mb=st.sampled_from((25.0, 0.0, 0.001)),
    zero=st.sampled_from((0, 0, 1, 2, 3)),
    recompute=st.sampled_from(("none", "none", "gathers", "attention", "selective", "full", *PRODUCTS)),
    sequence_parallel=st.sampled_from((True, True, False)),
    split=st.just(()),
    cut=st.just(()),
    gathered_again=st.sampled_from(GATHERED_AGAIN),
    pad_multiple=st.sampled_from((1, 1, 1, 2, 8)),
).map(lambda p: _interleaved(p) if p.schedule == "interleaved" else p)
random_plans = random_plans.filter(
    lambda p: p.fits_batch and p.dp * p.tp * p.pp <= 8 and (p.schedule != "interleaved" or p.chunks > 1)
)

Picks = tuple[int, tuple[int, ...]] | None
"""A size of a further axis, and numbers that choose the dims that it splits."""
random_picks = st.none() | st.tuples(st.sampled_from((2, 2, 4)), st.tuples(st.integers(0, 99), st.integers(0, 99)))


def with_split(program: Program, plan: Plan, picks: Picks) -> Plan:
    """The plan with an axis that splits dims of inputs, data or weights, if there are any that divide."""
    if picks is None or plan.dp * plan.tp * plan.pp * picks[0] > 16:
        return plan
    size, numbers = picks
    spaces = _spaces(program, size) if numbers[0] % 8 else []
    if spaces:
        split = spaces[numbers[1] % len(spaces)]
        if plan.dp * plan.tp * plan.pp * size * size > 16:
            split = split[:1]
        return plan._replace(split=split)
    parts = set(weights(program.function))
    dims: dict[str, int] = {}
    for number in numbers:
        wanted = [v for v in program.function.inputs if v.kind != "state" and (v in parts) == (number % 4 == 0)]
        free = [(v.name, d) for v in wanted for d, n in enumerate(shape_of(v)) if n % size == 0 and v.name not in dims]
        if free:
            name, dim = free[number // 4 % len(free)]
            dims[name] = dim
    if not dims:
        return plan
    return plan._replace(split=(f"xp={size}:{','.join([f'{name}.{dim}' for name, dim in dims.items()])}",))


def _spaces(program: Program, size: int) -> list[tuple[str, ...]]:
    """The splits of spatial dims of data: of one, and of two along an axis each."""
    found: list[tuple[str, ...]] = []
    for v in program.function.inputs:
        if v.name.startswith("image"):
            dims = [d for d, n in enumerate(shape_of(v)) if d > 1 and n % size == 0]
            axes = [tuple(f"{axis}={size}:{v.name}.{d}" for axis, d in zip("hw", dims, strict=False))]
            found += [*axes, *[(f"h={size}:{v.name}.{d}",) for d in dims]] if dims else []
    return found
