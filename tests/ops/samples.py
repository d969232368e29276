"""One line or a few for each op: operands and attributes on which the matrix test tries it.

Sizes divide by 2, 3 and 4, so that every way to split a dim over two devices, with outer 1, 2 or 3, comes up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from distir.ir.type import Bool, DType, Float32, Float64, Int8, Int32, Int64

Array = Any
Make = Callable[[np.random.Generator, Sequence[Array]], Array]


class Operand(NamedTuple):
    """An operand: its type, and its numbers from a generator and the operands before it."""

    shape: tuple[int, ...]
    dtype: DType
    make: Make
    saved: bool = False
    """A statistic that a gradient is given: it is not of a small dtype where other operands are."""


class Sample(NamedTuple):
    op: str
    operands: tuple[Operand, ...]
    attributes: dict[str, Any]
    detached: tuple[int, ...]
    """Floating operands to which no gradient is given on purpose."""

    def arrays(self, seed: int = 0) -> list[Array]:
        rng = np.random.default_rng(seed)
        made: list[Array] = []
        for o in self.operands:
            made.append(np.asarray(o.make(rng, made), o.dtype.numpy))
        return made


def real(*shape: int) -> Operand:
    return Operand(shape, Float64, lambda rng, made: rng.uniform(-2, 2, shape))


def positive(*shape: int) -> Operand:
    return Operand(shape, Float64, lambda rng, made: rng.uniform(0.5, 2, shape))


def between(low: float, high: float, *shape: int) -> Operand:
    return Operand(shape, Float64, lambda rng, made: rng.uniform(low, high, shape))


def below(n: int, *shape: int, dtype: DType = Int64) -> Operand:
    """Integers in [0, n)."""
    return Operand(shape, dtype, lambda rng, made: rng.integers(0, n, shape))


def around(n: int, *shape: int, dtype: DType = Int64) -> Operand:
    """Integers in [-n, n): indices that count from either end."""
    return Operand(shape, dtype, lambda rng, made: rng.integers(-n, n, shape))


def truth(*shape: int) -> Operand:
    return Operand(shape, Bool, lambda rng, made: rng.integers(0, 2, shape) == 1)


def number(value: float, dtype: DType = Float64) -> Operand:
    return Operand((), dtype, lambda rng, made: value)


def derived(of: Callable[..., Array], *shape: int, dtype: DType = Float64) -> Operand:
    """Computed from the operands before it."""
    return Operand(shape, dtype, lambda rng, made: of(*made))


def saved(of: Callable[..., Array], *shape: int) -> Operand:
    """A statistic of the operands before it."""
    return Operand(shape, Float64, lambda rng, made: of(*[x.astype(float) for x in made]), saved=True)


def sample(op: str, *operands: Operand, detached: tuple[int, ...] = (), **attributes: Any) -> Sample:
    return Sample(op, operands, attributes, detached)


def moments(axis: int) -> tuple[Operand, Operand]:
    """Of the first operand, (4, 2, 6), the mean over the dims from `axis` on, and one over the deviation."""
    shape, dims = ((4, 2, 1), (2,)) if axis == 2 else ((4, 1, 1), (1, 2))
    return (
        saved(lambda x, *_: x.mean(dims, keepdims=True), *shape),
        saved(lambda x, *_: 1 / x.std(dims, keepdims=True), *shape),
    )


def attended(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *mask: tuple[int, ...]) -> list[Operand]:
    """What gradients of `Attention` are given: of any numbers, not only of those that it would save."""
    y = (*q[:-1], v[-1])
    return [real(*q), real(*k), real(*v), real(*y), saved(lambda *_: np.full(q[:-1], 1.5), *q[:-1]), real(*y)] + [
        real(*shape) for shape in mask
    ]


def slid(rank: int, **given: Any) -> dict[str, Any]:
    """The attributes of windows over that many dims, groups included if there are any, those that are given in place of
    the plain ones."""
    groups = {} if "kernel" in given else {"groups": 1}
    return {"strides": (1,) * rank, "dilations": (1,) * rank, "pads": (0,) * 2 * rank, **groups, **given}


CONVOLVED: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 4, 5), (6, 4, 3), (2, 6, 5), {"pads": (1, 1)}),
    ((2, 4, 7), (4, 4, 2), (2, 4, 3), {"strides": (2,), "dilations": (2,), "pads": (1, 0)}),
    ((4, 1, 4, 4), (2, 1, 3, 3), (4, 2, 4, 2), {"strides": (1, 2), "pads": (1, 0, 1, 1)}),
    ((1, 2, 4, 5), (2, 2, 2, 1), (1, 2, 1, 2), {"strides": (3, 4), "pads": (0, 1, 1, 0), "dilations": (2, 3)}),
    ((2, 8, 4), (12, 2, 2), (2, 12, 3), {"groups": 4}),
    ((2, 8, 3, 3), (8, 4, 2, 2), (2, 8, 2, 2), {"groups": 2}),
    ((2, 4, 4), (8, 1, 3), (2, 8, 4), {"groups": 4, "pads": (2, 2), "dilations": (2,)}),  # depthwise
    ((2, 2, 2, 3, 4), (2, 2, 2, 2, 1), (2, 2, 2, 2, 2), {"strides": (2, 1, 2), "pads": (1, 0, 0, 1, 0, 0)}),
]
"""The shapes of x, w and y of a convolution, and its attributes where they are not the plain ones."""

POOLED: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 4, 5), (2, 4, 3), (1, 1), {"kernel": (3,), "strides": (2,), "pads": (1, 1)}),
    ((2, 4, 6), (2, 4, 3), (0, 0), {"kernel": (3,), "strides": (2,), "pads": (0, 1)}),  # rounded up
    ((2, 2, 4, 5), (2, 2, 2, 3), (0, 1, 0, 0), {"kernel": (2, 3), "strides": (2, 2), "pads": (0, 1, 0, 1)}),
    ((2, 1, 5, 3), (2, 1, 3, 2), (0, 0, 0, 0), {"kernel": (2, 2), "dilations": (2, 1)}),
    (
        (1, 2, 3, 2, 3),
        (1, 2, 2, 3, 2),
        (1, 1, 0, 1, 1, 1),
        {"kernel": (3, 2, 3), "strides": (2, 1, 2), "pads": (1,) * 6},
    ),
]
"""The shapes of operand and result of a pool, the pads that a mean counts, and its attributes."""

BINARY = ["Add", "Sub", "Mul", "Max", "Min", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"]
ARCS = ["Asin", "Acos", "Atan", "Asinh", "Atanh"]
SMOOTH = ["Abs", "Sin", "Cos", "Tanh", "Relu", "Sigmoid", "Silu", "Softplus", "Erf", "Exp"]
UNARY = [*SMOOTH, "Neg", "Sign", "Floor", "Ceil", "Round"]

SAMPLES = [
    # elementwise
    *[sample(name, real(4, 6), real(4, 6)) for name in BINARY],
    *[sample(name, real(2, 4, 1), real(12)) for name in ["Add", "Sub", "Mul", "Div", "Max"]],
    sample("Add", below(9, 4, 6), below(9, 4, 1)),
    sample("Div", real(4, 6), positive(4, 6)),
    sample("Div", real(4, 6), number(3.0)),
    sample("Pow", positive(4, 6), real(6)),
    sample("Pow", real(4, 6), number(3.0)),
    sample("Pow", real(4, 6), number(2, Int64)),
    sample("PowGrad", positive(4, 6), real(6), real(4, 6)),
    sample("PowGradExponent", positive(4, 6), real(6), real(4, 6)),
    *[sample(name, real(4, 6)) for name in UNARY],
    *[sample(name, positive(4, 6)) for name in ["Reciprocal", "Sqrt", "Log"]],
    *[sample(f"{name}Grad", real(4, 6), real(4, 6)) for name in SMOOTH],
    *[sample(f"{name}Grad", positive(4, 6), real(4, 6)) for name in ["Reciprocal", "Sqrt", "Log"]],
    *[sample(name, between(-0.9, 0.9, 4, 6)) for name in ARCS],
    *[sample(f"{name}Grad", between(-0.9, 0.9, 4, 6), real(4, 6)) for name in ARCS],
    sample("Acosh", between(1.1, 3, 4, 6)),
    sample("AcoshGrad", between(1.1, 3, 4, 6), real(4, 6)),
    *[
        sample("Mod", real(4, 6), x, truncated=how)
        for x in (between(0.3, 0.9, 6), between(-0.9, -0.3, 4, 1))
        for how in (False, True)
    ],
    *[
        sample(name, around(9, 4, 6), derived(lambda x: x + (x >= 0), 4, 6, dtype=Int64))
        for name in ("Mod", "Quotient")
    ],
    sample("Quotient", around(9, 4, 6, dtype=Int8), number(-4, Int8)),
    sample("Mod", around(9, 4, 6), number(-4, Int64), truncated=True),
    *[sample(f"Bitwise{k}", around(9, 4, 6), around(9, 6)) for k in ("And", "Or", "Xor")],
    sample("BitwiseNot", around(9, 4, 6)),
    *[sample("BitShift", around(9, 4, 6, dtype=Int32), below(5, 6, dtype=Int32), left=k) for k in (True, False)],
    sample("Clip", real(4, 6), min=-1.0, max=0.5),
    sample("Clip", real(4, 6), max=0.5),
    sample("ClipGrad", real(4, 6), real(4, 6), min=-1.0, max=0.5),
    sample("Cast", real(4, 6), to=Float32),
    sample("Cast", real(4, 6), to=Int32),
    sample("Cast", below(9, 4, 6), to=Float64),
    sample("Cast", truth(4, 6), to=Int64),
    sample("Equal", below(3, 4, 6), below(3, 6)),
    sample("Not", truth(4, 6)),
    *[sample(name, truth(4, 6), truth(6)) for name in ["And", "Or", "Xor"]],
    sample("Where", truth(4, 6), real(4, 6), real(6)),
    sample("Where", truth(1, 6), real(4, 6), number(-9.0)),
    sample("Mask", truth(4, 6), real(6)),
    sample("Mask", truth(4), real(4), keep=False),
    # shape
    sample("Identity", real(4, 6)),
    sample("Detach", real(4, 6), detached=(0,)),
    sample("ZerosLike", real(4, 6)),
    sample("Constant", value=(2.5,), shape=(), dtype=Float64),
    sample("Constant", value=(1, 2, 3, 4), shape=(2, 2), dtype=Int64),
    sample("Transpose", real(4, 2, 6), perm=(2, 0, 1)),
    sample("Reshape", real(4, 2, 6), shape=(4, 12)),
    sample("Reshape", real(4, 12), shape=(-1, 3, 4)),
    sample("Reshape", real(4, 3, 12), shape=(12, 12)),
    sample("Reshape", real(4), shape=(1, 4, 1)),
    sample("Split", real(4, 12), axis=1, parts=3),
    sample("Split", real(12, 4), axis=0, parts=2),
    sample("Split", real(4, 12), axis=1, sizes=(6, 6)),
    sample("Split", real(4, 12), axis=1, sizes=(2, 4, 6)),
    sample("Concat", real(4, 4), real(4, 4), real(4, 4), axis=1),
    sample("Concat", real(2, 6), real(4, 6), axis=0),
    sample("Slice", real(4, 12), starts=(2,), ends=(11,), axes=(1,), steps=(3,)),
    sample("Slice", real(4, 2, 12), starts=(11, 0), ends=(-1, 1), axes=(2, 1), steps=(-2, 1)),
    sample("SliceGrad", real(4, 3), shape=(4, 12), starts=(2,), ends=(11,), axes=(1,), steps=(3,)),
    sample("SliceGrad", real(4, 6), shape=(4, 12), starts=(11,), ends=(-1,), axes=(1,), steps=(-2,)),
    sample("SliceGrad", real(4, 0), shape=(4, 6), starts=(6,), ends=(6,), axes=(1,), steps=(1,)),
    sample("Expand", real(4, 1), shape=(2, 4, 12)),
    sample("Expand", real(), shape=(4, 6)),
    sample("PadTo", real(4, 6), dim=1, size=8),
    sample("PadTo", real(4, 6), dim=0, size=6, value=-1.0),
    sample("PadTo", real(4, 0), dim=1, size=2, value=1.0),
    sample("CutTo", real(4, 6), dim=1, size=4),
    sample("FillTail", real(4, 12), dim=1, size=5, value=-30.0),
    sample("FillTail", real(4, 12), dim=0, size=3),
    # linear
    sample("MatMul", real(4, 6), real(6, 12)),
    sample("MatMul", real(4, 2, 6), real(6, 12)),
    sample("MatMul", real(2, 3, 4, 6), real(2, 1, 6, 4)),
    sample("MatMul", real(4, 6), real(2, 6, 4)),
    sample("MatMulGradWeight", real(4, 6), real(4, 12)),
    sample("MatMulGradWeight", real(2, 4, 6), real(2, 4, 4)),
    sample("MatMulGrad", real(4, 6), real(6, 12), real(4, 12)),
    sample("Gemm", real(4, 6), real(6, 12), real(12)),
    sample("Gemm", real(6, 4), real(12, 6), real(4, 12), transA=1, transB=1, alpha=0.5, beta=2.0),
    sample("Gemm", real(4, 6), real(6, 12), real(), beta=3.0),
    sample("Gemm", real(4, 6), real(6, 12)),
    sample("Gemm", real(4, 2, 6), real(6, 12), real(12)),
    sample("Gemm", real(2, 4, 6), real(12, 6), real(4, 12), transB=1, alpha=0.5, beta=2.0),
    # reduce
    *[sample(name, real(4, 2, 6), axes=(0, 2), keepdims=1) for name in ["ReduceSum", "ReduceMax", "ReduceMin"]],
    *[sample(name, real(4, 6), axes=(1,), keepdims=0) for name in ["ReduceSum", "ReduceMax", "ReduceMean"]],
    sample("ReduceSum", real(4, 6), axes=(0, 1), keepdims=0),
    sample("ReduceSum", below(9, 4, 6, dtype=Int32), axes=(0,), keepdims=0),
    sample("ReduceMean", real(4, 2, 6), axes=(0, 2), keepdims=1),
    sample("ReduceProd", real(4, 6), axes=(1,), keepdims=1),
    sample("ReduceProd", real(4, 2, 6), axes=(0, 2), keepdims=0),
    sample("ReduceProdGrad", real(4, 2, 6), real(1, 2, 1), axes=(0, 2)),
    sample("SumOfSquares", real(4, 6)),
    sample("SumOfSquares", real()),
    sample("Sum", real(4, 6), real(4, 6), real(4, 6)),
    sample("Sum", real(4)),
    *[
        sample("CumSum", x, axis=axis, **how)
        for x, axis in [(real(4, 6), 1), (real(4, 2, 6), 0), (below(9, 4, 6, dtype=Int8), 0)]
        for how in [{}, {"exclusive": True}, {"reverse": True}, {"exclusive": True, "reverse": True}]
    ],
    sample("ReduceMaxGrad", real(4, 6), derived(lambda x: x.max(1, keepdims=True), 4, 1), real(4, 1), axes=(1,)),
    # convolutions: x (n, g c, ...), w (g m, c, ...), y (n, g m, ...)
    *[
        sample(name, *[real(*s) for s in shapes], **slid(len(shapes[0]) - 2, **how), **extra)
        for x, w, y, how in CONVOLVED
        for name, shapes, extra in [
            ("Conv", (x, w), {}),
            ("ConvGradInput", (y, w), {"sizes": x[2:]}),
            ("ConvGradWeight", (x, y), {"kernel": w[2:]}),
        ]
    ],
    # pools
    *[
        sample(name, *[real(*s) for s in shapes], **slid(len(x) - 2, **how), **extra)
        for x, y, counted, how in POOLED
        for name, shapes, extra in [
            ("MaxPool", (x,), {}),
            ("MaxPoolGrad", (x, y), {}),
            ("AveragePool", (x,), {"counted": counted}),
            ("AveragePoolGrad", (y,), {"counted": counted, "sizes": x[2:]}),
        ]
    ],
    # equal elements, of which the first takes the gradient
    sample("MaxPoolGrad", below(2, 2, 2, 6, dtype=Float64), real(2, 2, 6), **slid(1, kernel=(3,), pads=(1, 1))),
    # index
    sample("Gather", real(12, 6), below(12, 4, 2), axis=0),
    sample("Gather", real(4, 12, 2), below(12, 4, dtype=Int32), axis=1),
    sample("Gather", below(90, 12), below(12, 4), axis=0),
    sample("Gather", real(12, 6), around(12, 4, 2), axis=0),
    sample("Gather", real(4, 12, 2), around(12, 4, dtype=Int8), axis=1),
    sample("Gather", real(12, 6), around(9, 4, 2), axis=0, count=9),
    sample("Gather", real(4, 6), number(3, Int64), axis=1),
    sample("GatherGrad", real(4, 2, 6), below(12, 4, 2), rows=12, axis=0),
    sample("GatherGrad", real(2, 4, 6), below(12, 4, dtype=Int32), rows=12, axis=1),
    sample("GatherGrad", real(4, 2, 6), around(12, 4, 2), rows=12, axis=0),
    sample("GatherGrad", real(2, 4, 6), around(9, 4, dtype=Int32), rows=12, count=9, axis=1),
    *[
        sample(name, x, index, axis=axis, **{**how, **({"size": 12} if name == "ScatterAdd" else {})})
        for name in ("GatherElements", "ScatterAdd")
        for x, index, axis, how in [
            (real(4, 12) if name[0] == "G" else real(4, 6), around(12, 4, 6), 1, {}),
            (real(12, 2) if name[0] == "G" else real(4, 2), below(12, 4, 2, dtype=Int32), 0, {}),
            (real(2, 12, 2) if name[0] == "G" else real(2, 4, 2), around(9, 2, 4, 2), 1, {"count": 9}),
        ]
    ],
    *[
        sample("TopIndices", x, axis=axis, k=k, **how)
        for x, axis, k in [(real(4, 6), 1, 4), (below(4, 4, 2, 6), 0, 4), (below(3, 4, 6, dtype=Int8), 1, 1)]
        for how in [{}, {"least": True}, {"last": True}, {"least": True, "last": True}]
    ],
    # tables
    *[
        sample(name, numbers, index, **{**how, **({"rows": 12} if name == "LookupGrad" else {})})
        for index, how in [
            (below(12, 4, 2), {}),
            (around(12, 4, 2, dtype=Int8), {}),
            (around(9, 4, 2), {"count": 9}),
            (below(12, 4, 2, 4, dtype=Int32), {"pooling": True}),
            (around(9, 4, 2, 2), {"pooling": True, "count": 9}),
        ]
        for name, numbers in [("Lookup", real(2, 12, 6)), ("LookupGrad", real(4, 2, 6))]
    ],
    sample("Lookup", real(4, 12, 2), below(12, 1, 4)),
    sample("LookupSGD", real(2, 12, 6), around(12, 4, 2), real(4, 2, 6), lr=0.1),
    sample("LookupSGD", real(2, 12, 2), around(9, 4, 2, 4, dtype=Int8), real(4, 2, 2), lr=0.1, count=9, pooling=True),
    *[
        sample("LookupSGD", real(2, 4, 2), below(4, 3, 2), real(3, 2, 2), number(0.2), flag, **how)
        for flag in (number(1, Bool), number(0, Bool))
        for how in [{"lr": 0.1, "scheduled": True, "skips": True}]
    ],
    # nn
    *[sample(name, real(4, 2, 6), axis=-1) for name in ["Softmax", "LogSoftmax"]],
    *[sample(name, real(4, 6), axis=0) for name in ["Softmax", "LogSoftmax"]],
    *[sample(name, real(4, 6), real(4, 6), axis=-1) for name in ["SoftmaxGrad", "LogSoftmaxGrad"]],
    sample("CausalMask", real(2, 4, 6), value=-9.0, scale=0.5),
    sample("CausalMask", real(2, 4, 6), value=0.0),
    sample("Dropout", real(4, 6), ratio=0.1),
    *[sample("RandomKey", number(n, Int64), seed=3, stream=2) for n in (0, 1000)],
    sample("RandomDropout", real(4, 2, 6), number(-12345678987654321, Int64), ratio=0.3),
    sample("RandomDropout", real(4, 6), number(7, Int64), ratio=0.5, whole=(3, 6)),
    sample("DropoutGrad", real(4, 6), truth(4, 6), ratio=0.3),
    sample("LayerNormalization", real(4, 2, 6), real(6), real(6), axis=-1, epsilon=1e-5),
    sample("LayerNormalization", real(4, 6), real(6), axis=1, epsilon=0.1),
    sample("LayerNormalization", real(4, 2, 6), real(2, 6), real(2, 6), axis=1),
    sample("LayerNorm", real(4, 2, 6), real(6), real(6), axis=-1, epsilon=1e-5),
    sample("LayerNorm", real(4, 6), real(6), axis=1, epsilon=0.1),
    sample("LayerNorm", real(4, 2, 6), real(2, 6), real(2, 6), axis=1),
    sample("LayerNormGrad", real(4, 2, 6), real(6), *moments(2), real(4, 2, 6), axis=-1),
    sample("LayerNormGrad", real(4, 2, 6), real(2, 6), *moments(1), real(4, 2, 6), axis=1, bias=False),
    *[
        sample(name, *row, **how)
        for name in ["RMSNormalization", "RMSNorm"]
        for row, how in [
            ((real(4, 2, 6), real(6)), {"axis": -1, "epsilon": 1e-5}),
            ((real(4, 6), real(6)), {"axis": 1, "epsilon": 0.1}),
            ((real(4, 2, 6), real(2, 6)), {"axis": 1}),
        ]
    ],
    sample("RMSNormGrad", real(4, 2, 6), real(6), moments(2)[1], real(4, 2, 6), axis=-1),
    sample("RMSNormGrad", real(4, 2, 6), real(2, 6), moments(1)[1], real(4, 2, 6), axis=1),
    *[sample("Gelu", real(4, 6), approximate=how) for how in ["none", "tanh"]],
    *[sample("GeluGrad", real(4, 6), real(4, 6), approximate=how) for how in ["none", "tanh"]],
    # attention
    sample("Attention", real(4, 2, 6), real(4, 3, 6), real(4, 3, 2), scale=0.5),
    sample("Attention", real(2, 2, 4, 2), real(2, 2, 4, 2), real(2, 2, 4, 2), scale=0.3, causal=True),
    sample("Attention", real(2, 2, 4, 3), real(2, 2, 2, 3), real(2, 2, 2, 3), real(2, 1, 1, 2), scale=2.0),
    sample("Attention", real(2, 4, 3), real(2, 2, 3), real(2, 2, 3), real(4, 2), scale=1.0, causal=True),
    sample("Attention", real(2, 4, 2), real(2, 4, 2), real(2, 4, 2), scale=0.3, causal=True, window=2),
    sample("Attention", real(2, 4, 3), real(2, 2, 3), real(2, 2, 3), real(4, 2), softcap=1.5),
    sample("Attention", real(4, 2), real(4, 2), real(4, 2), scale=0.3, causal=True, window=3, softcap=0.8),
    *[
        sample("AttentionGrad", *attended(q, k, v), scale=0.5, **how)
        for q, k, v, how in [
            ((2, 2, 3), (2, 3, 3), (2, 3, 5), {}),
            ((2, 2, 3), (2, 2, 3), (2, 2, 3), {"causal": True}),
            ((2, 4, 3), (2, 4, 3), (2, 4, 3), {"causal": True, "window": 2, "softcap": 0.8}),
        ]
    ],
    sample("GroupedAttention", real(2, 4, 4, 3), real(2, 2, 6, 3), real(2, 2, 6, 2), scale=0.5),
    sample("GroupedAttention", real(8, 4, 3), real(2, 4, 3), real(2, 4, 3), scale=0.5, causal=True),
    sample("GroupedAttention", real(6, 4, 3), real(1, 4, 3), real(1, 4, 3), causal=True, window=2, softcap=0.8),
    *[
        sample("GroupedAttention", real(2, 4, 4, 3), real(2, 2, 6, 3), real(2, 2, 6, 2), real(*mask), scale=0.5)
        for mask in [(2, 1, 1, 6), (4, 4, 6), (4, 1), (2, 4, 4, 6), (1, 1, 4, 6)]
    ],
    *[
        sample("GroupedAttentionGrad", *attended(q, k, v), scale=0.5, **how)
        for q, k, v, how in [
            ((2, 4, 2, 3), (2, 2, 3, 3), (2, 2, 3, 5), {}),
            ((8, 2, 3), (2, 2, 3), (2, 2, 3), {"causal": True}),
            ((4, 4, 3), (4, 4, 3), (4, 4, 3), {"causal": True, "window": 2, "softcap": 0.8}),
        ]
    ],
    *[
        sample("GroupedAttentionGrad", *attended((2, 4, 2, 3), (2, 2, 3, 3), (2, 2, 3, 3), mask), scale=0.5)
        for mask in [(2, 1, 1, 3), (4, 2, 3), (2, 1)]
    ],
    *[
        sample(name, *attended((2, 2, 3), (2, 3, 3), (2, 3, 3), mask), scale=0.5)
        for mask in [(2, 1, 3), (2, 1), (2, 2, 3)]
        for name in ["AttentionGrad", "AttentionGradMask"]
    ],
    # loss
    sample("Loss", real(4, 6), real(4, 6), N=4),
    sample("LossGrad", real(4, 6), real(4, 6), N=4),
    *[sample("MSELoss", real(4, 6), real(4, 6), reduction=how) for how in ["mean", "sum", "none"]],
    *[
        sample("SoftmaxCrossEntropyLoss", real(4, 2, 12), below(12, 4, 2), reduction=how, ignore_index=ignore)
        for how in ["mean", "sum", "none"]
        for ignore in [None, 3]
    ],
    sample("LogitSums", real(4, 2, 12), below(12, 4, 2), real(4, 2)),
    sample("CrossEntropy", real(4, 2, 12), below(12, 4, 2)),
    sample("CrossEntropy", real(4, 6), below(6, 4, dtype=Int32), ignore_index=3),
    sample("CrossEntropy", real(4, 8), below(6, 4), count=6),
    *[
        sample("CrossEntropyGrad", real(4, 12), below(12, 4, dtype=Int32), lse, real(4), **how)
        for lse in [saved(lambda x, *_: np.log(np.exp(x).sum(-1)), 4)]
        for how in [{}, {"ignore_index": 2}]
    ],
    *[
        sample("CrossEntropyGrad", real(4, 12), below(count, 4), lse, real(4), count=count)
        for count in [3, 6, 11]  # of 12: also where whole parts are padding
        for lse in [saved(lambda x, *_, count=count: np.log(np.exp(x[:, :count]).sum(-1)), 4)]
    ],
    # optim
    sample("SGD", real(4, 6), real(4, 6), lr=0.1),
    sample("SGD", real(4, 6), real(4, 6), real(4, 6), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    *[
        sample("SGD", real(4, 6), real(4, 6), real(4, 6), number(n), lr=0.1, momentum=0.9, dampening=0.5)
        for n in [1, 2]
    ],
    sample("AdamW", real(4, 6), real(4, 6), real(4, 6), positive(4, 6), number(3.0), lr=0.1, weight_decay=0.1),
    *[
        sample("AdamW", real(4), real(4), real(4), positive(4), number(3, Int64), number(0.2), flag, **how)
        for flag in (number(1, Bool), number(0, Bool))
        for how in [{"scheduled": True, "skips": True, "weight_decay": 0.1}]
    ],
    sample("SGD", real(4), real(4), real(4), number(0.2), lr=0.1, momentum=0.9, scheduled=True, weight_decay=0.1),
    sample("SGD", real(4), real(4), number(1, Bool), lr=0.1, skips=True),
    sample("GroupedSGD", real(6), real(6), real(4), real(4), number(0.2), count=2, lr=0.1, scheduled=True),
    *[
        sample("LearningRate", number(n, Int64), lr=0.1, warmup=4, decay=decay, steps=12, least=0.01)
        for n in (3, 8)
        for decay in ("none", "linear", "cosine")
    ],
    sample("RunningStatistic", real(4, 6), real(4, 6), momentum=0.9, correction=1.25, detached=(1,)),
    sample("BatchStatistic", real(4, 6), real(4, 6), momentum=0.9, correction=1.25, detached=(0,)),
    sample("ClipFactor", number(9.0), norm=0.5),
    sample("ClipFactor", number(9.0), norm=5),
    sample("Scale", real(4, 6), number(0.25)),
    sample("AdamW", real(6), real(6), real(6), positive(6), number(3, Int64)),
    sample("GroupedSGD", real(6), real(6), real(2, 4), real(2, 4), count=2, lr=0.1, weight_decay=0.1),
    sample("GroupedSGD", *[real(4)] * 3, *[real(5)] * 3, count=2, lr=0.1, momentum=0.9),
    # a dim of 5 may not be split: there are enough ways to place nine operands
    sample("GroupedAdamW", *[real(5)] * 3, positive(5), *[real(1)] * 3, positive(1), number(3.0), count=2),
]
