"""Each import rule against onnxruntime, on a sample of every case that it distinguishes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from distir.executor.reference.sequential import SequentialExecutor
from distir.importer.masked import MASKED_WRITE
from distir.importer.registry import RULES
from distir.ir.errors import ModelError
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation.grad import grad
from distir.transforms.rewriting.cleanup import extend
from tests.importer.models import computed, equal, expected, model, node


class Sample(NamedTuple):
    """Operands, in order: arrays are graph inputs; lists, numbers and `Weight`s are initializers; None is left out."""

    op_type: str
    operands: tuple[Any, ...]
    attributes: Mapping[str, Any] = MappingProxyType({})
    outputs: int = 1
    opset: int = 20
    reference: bool = False


class Weight(NamedTuple):
    array: np.ndarray


rng = np.random.default_rng(0)


def x(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    return (rng.random(shape) + 0.5).astype(np.float32)


def ints(high: int, *shape: int, low: int = 0) -> np.ndarray:
    return rng.integers(low, high, shape)


def truth(*shape: int) -> np.ndarray:
    return rng.random(shape) < 0.5


def w(*shape: int) -> Weight:
    return Weight(x(*shape))


def unique(count: int, below: int, columns: int) -> np.ndarray:
    """In each column so many different integers."""
    return np.stack([rng.permutation(below)[:count] for _ in range(columns)], 1)


def quantized(*sizes: int) -> tuple[Any, ...]:
    """The operands of a product of matrices of these sizes."""
    a, b = (ints(200, *sizes[k : k + 2]).astype(np.uint8) for k in (0, 1))
    numbers = [np.float32(0.02), np.uint8(90)], [np.float32(0.01), np.uint8(110)], [np.float32(0.1), np.uint8(100)]
    return a, *numbers[0], b, *numbers[1], *numbers[2]


def recurrent(kind: str, size: int, hidden: int, ways: int, lengths: list[int] | None = None) -> tuple[Any, ...]:
    """The operands of a recurrent op but the first, for a batch of 3 or of 2 with one direction of fewer inputs."""
    gates, batch = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind], 3 if size == 4 else 2
    states = [x(ways, batch, hidden) for _ in range(2 if kind == "LSTM" else 1)]
    weights = w(ways, gates * hidden, size), w(ways, gates * hidden, hidden), w(ways, 2 * gates * hidden)
    return (*weights, None if lengths is None else np.array(lengths, np.int32), *states)


SIDES = ("LEFT", "RIGHT")
ENDS = np.array([1, np.nan, np.inf, -np.inf], np.float32)
S = Sample
POINTS = "Abs Ceil Cos Erf Exp Floor Neg Reciprocal Relu Round Sigmoid Sign Sin Softplus Tanh Sinh Cosh Tan"
SAMPLES = [
    *[S(t, (x(3, 4),)) for t in POINTS.split()],
    S("Round", (np.array([0.5, 1.5, 2.5, -0.5], np.float32),)),
    *[S(t, (positive(3, 4),)) for t in ("Log", "Sqrt")],
    *[S(t, (x(3, 4), positive(2, 1, 4))) for t in ("Add", "Sub", "Mul", "Div")],
    *[S(t, (ints(9, 3, 4), ints(9, 4))) for t in ("Add", "Sub", "Mul", "Equal", "Less", "Greater")],
    *[S(t, (x(3, 4), x(3, 4))) for t in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")],
    *[S(t, (truth(3, 4), truth(3, 1))) for t in ("And", "Or", "Xor")],
    S("Not", (truth(3, 4),)),
    S("IsNaN", (np.array([1, np.nan, np.inf], np.float32),)),
    S("Where", (truth(3, 1), x(3, 4), x(4))),
    S("Pow", (positive(3, 4), np.float32(2.5))),
    S("Pow", (x(3, 4), 3)),
    S("Pow", (x(3, 4), ints(4, 4))),
    S("MatMul", (x(2, 3, 4), w(4, 5))),
    S("MatMul", (x(2, 3, 4), x(2, 4, 5))),
    S("MatMul", (x(4), w(4, 5))),
    S("MatMul", (x(2, 3, 4), x(4))),
    S("MatMul", (x(4), x(4))),
    *[S(t, (x(3, 4), x(4), x(3, 1))) for t in ("Sum", "Mean", "Max", "Min")],
    S("Sum", (x(3, 4),)),
    S("Identity", (x(3, 4),)),
    S("Dropout", (x(3, 4), np.float32(0.5), np.array(False)), {"seed": 1}),
    S("Cast", (x(3, 4),), {"to": 7}),
    S("Cast", (x(3, 4),), {"to": 9}),
    S("Cast", (truth(3, 4),), {"to": 1}),
    S("Cast", (x(3, 4),), {"to": 1}),
    S("CastLike", (ints(9, 3, 4), x(1))),
    S("CastLike", (7, x(1))),
    S("Gelu", (x(3, 4),)),
    S("Gelu", (x(3, 4),), {"approximate": "tanh"}),
    S("LeakyRelu", (x(3, 4),), {"alpha": 0.2}),
    S("Swish", (x(3, 4),), opset=24, reference=True),
    S("Swish", (x(3, 4),), {"alpha": 0.5}, opset=24, reference=True),
    S("Clip", (x(3, 4), np.float32(-0.5), np.float32(0.5))),
    S("Clip", (x(3, 4), None, np.float32(0.1))),
    S("Clip", (x(3, 4),)),
    S("Clip", (x(3, 4), np.array(-0.2, np.float32) + x(1)[0] * 0, None)),
    S("Softmax", (x(2, 3, 4),)),
    S("Softmax", (x(2, 3, 4),), {"axis": 1}),
    S("LogSoftmax", (x(2, 3, 4),), {"axis": 0}),
    S("LayerNormalization", (x(2, 3, 4), w(4), w(4))),
    S("LayerNormalization", (x(2, 3, 4), w(3, 4)), {"axis": 1, "epsilon": 0.1}),
    S("RMSNormalization", (x(2, 3, 4), w(4)), opset=23),
    S("RMSNormalization", (x(2, 3, 4), w(3, 4)), {"axis": 1, "epsilon": 0.1}, opset=23),
    S("RMSNormalization", (x(2, 3, 4), w(4)), {"axis": -2}, opset=23, reference=True),
    S("Gemm", (x(3, 4), w(4, 5))),
    S("Gemm", (x(4, 3), w(5, 4), w(5)), {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    S("Gemm", (x(3, 4), w(4, 5), x(3, 1))),
    S("Gather", (w(7, 3), ints(7, 2, 4))),
    S("Gather", (x(2, 7, 3), ints(7, 4)), {"axis": 1}),
    S("Gather", (w(7, 3), ints(7, 2, 4, low=-7))),
    S("Gather", (x(2, 7, 3), ints(7, 4, low=-7).astype(np.int32)), {"axis": 1}),
    S("Gather", (x(2, 7, 3), -2), {"axis": 1}),
    S("Gather", (x(2, 7, 3), [1]), {"axis": -1}),
    S("Gather", (x(2, 7, 3), [[0, -1], [3, 3]]), {"axis": 1}),
    S("Transpose", (x(2, 3, 4),)),
    S("Transpose", (x(2, 3, 4),), {"perm": [1, 2, 0]}),
    S("Reshape", (x(2, 3, 4), [0, -1])),
    S("Reshape", (x(2, 3, 4), [4, 6])),
    S("Reshape", (x(2, 0, 4), [0, 8]), {"allowzero": 1}),
    S("Reshape", (x(2, 3), [2, 3])),
    *[S("Flatten", (x(2, 3, 4),), {"axis": a}) for a in (0, 1, 3, -1)],
    S("Squeeze", (x(2, 1, 4, 1),)),
    S("Squeeze", (x(2, 1, 4, 1), [-3])),
    S("Unsqueeze", (x(2, 4), [0, -1, 2])),
    S("Expand", (x(3, 1), [2, 1, 4])),
    S("Expand", (x(3, 4), [1, 4])),
    S("Concat", (x(2, 3), x(2, 1), w(2, 2)), {"axis": -1}),
    S("Concat", (x(2, 3),), {"axis": 0}),
    S("Concat", (x(2, 0), w(2, 3), x(2, 0)), {"axis": 1}),
    S("Concat", (x(2, 0), x(2, 0)), {"axis": 1}),
    S("Split", (x(2, 6),), {"axis": 1, "num_outputs": 3}, 3),
    S("Split", (x(2, 7),), {"axis": 1, "num_outputs": 3}, 3),
    S("Split", (x(2, 6), [1, 3, 2]), {"axis": -1}, 3),
    S("Split", (x(4, 6),), {"num_outputs": 2}, 2),
    S("Split", (x(4, 6),), {"num_outputs": 1}, 1),
    S("Slice", (x(5, 6), [1], [4])),
    S("Slice", (x(5, 6), [-1, 5], [-100, 1], [0, 1], [-2, -1])),
    S("Slice", (x(5, 6), [0], [9223372036854775807], [1])),
    S("Slice", (x(5, 6), [1], [-1], [-1], [2])),
    S("Slice", (x(5, 6), [4], [2], [0])),
    *[
        S(t, (positive(2, 3, 4), [-1, 0]), {"keepdims": k}, opset=20)
        for t in (
            "ReduceSum",
            "ReduceMean",
            "ReduceMax",
            "ReduceMin",
            "ReduceProd",
            "ReduceSumSquare",
            "ReduceL2",
        )
        for k in (0, 1)
    ],
    *[S(t, (positive(2, 3, 4), [1]), {"keepdims": 0}) for t in ("ReduceL1", "ReduceLogSum", "ReduceLogSumExp")],
    S("ReduceLogSumExp", (x(2, 3) + 200,), {"keepdims": 1}),
    S("ReduceSum", (x(2, 3),), {"keepdims": 0}),
    S("ReduceSum", (x(2, 3), []), {"noop_with_empty_axes": 1}),
    S("ReduceLogSumExp", (x(2, 3), []), {"noop_with_empty_axes": 1}, reference=True),
    S("ReduceMax", (x(2, 3),), {"axes": [1]}, opset=13),
    S("Shape", (x(2, 3, 4),), {"start": -2}),
    S("Shape", (x(2, 3, 4),), {"end": 2}),
    S("Size", (x(2, 3),)),
    S("Constant", (), {"value_floats": [1.0, 2.0]}),
    S("Constant", (), {"value_int": 3}),
    S("ConstantOfShape", ([2, 3],)),
    S("EyeLike", (x(2, 3),), {"k": 1}),
    S("EyeLike", (x(2, 2),), {"dtype": 7}),
    S("Trilu", (x(2, 4, 4),)),
    S("Trilu", (x(3, 4), 1), {"upper": 0}),
    S("GatherND", (x(2, 3, 4), [[0, 1], [1, -1]])),
    S("GatherND", (x(2, 3), [[[1, 0], [0, 2]]])),
    S("GatherND", (ints(9, 2, 3), [[[[0, 2], [0, 0]]], [[[1, 2], [1, 0]]]])),
    S("GatherND", (truth(2, 3), [[[[0, 0], [0, 1], [0, 2]]], [[[1, 0], [1, 1], [1, 2]]]])),
    S("GatherND", (x(2, 3), [[[0, 2], [0, 0]], [[1, 2], [1, 1]]])),
    S("GatherND", (x(2, 3), [[[1, 2], [1, 0]], [[0, 2], [0, 0]]])),
    S("GatherND", (x(2, 3), [[1], [0]])),
    # indices and updates that depend on data
    S("GatherElements", (x(3, 4), ints(4, 3, 2, low=-4)), {"axis": -1}),
    S("GatherElements", (truth(3, 4), ints(3, 5, 2, low=-3).astype(np.int32))),
    S(
        "GatherElements",
        (
            ints(9, 2, 3, 2),
            Weight(ints(3, 2, 4, 2)),
        ),
        {"axis": 1},
    ),
    S("GatherND", (x(3, 4, 2), ints(3, 5, 2, low=-2))),
    S("GatherND", (x(3, 4, 2, 2), ints(2, 3, 5, 2)), {"batch_dims": 1}),
    S("GatherND", (truth(3, 4), ints(3, 3, 1)), {"batch_dims": 1}),
    *[S("ScatterElements", (x(3, 4), ints(3, 2, 4, low=-3), x(2, 4)), {"reduction": k}) for k in ("add", "max", "min")],
    S("ScatterElements", (x(3, 4), unique(2, 3, 4), x(2, 4)), {"axis": 0}),
    S("ScatterElements", (x(3, 4), unique(3, 4, 2).T[:, :2].copy(), x(3, 2)[:2]), {"axis": 1}),
    S("ScatterElements", (x(4, 3), ints(4, 7, 3), x(7, 3)), {"reduction": "mul"}),
    S("ScatterElements", (truth(3, 4), unique(2, 3, 4), truth(2, 4))),
    S("ScatterElements", (ints(9, 3, 4), ints(3, 2, 4), ints(9, 2, 4)), {"reduction": "max"}),
    *[
        S("ScatterND", (x(3, 4, 2), ints(3, 5, 2, low=-3), x(5, 2)), {"reduction": k})
        for k in ("add", "mul", "max", "min")
    ],
    S("ScatterND", (x(3, 4), np.array([[2, 1], [0, -1]]), x(2))),
    S("ScatterND", (ints(9, 5, 2), np.array([[[3]], [[1]]]), ints(9, 2, 1, 2))),
    *[
        S(f"Arg{t}", (ints(3, 3, 6),), {"axis": a, "keepdims": k, "select_last_index": k})
        for t in ("Max", "Min")
        for a, k in ((0, 1), (-1, 0))
    ],
    S("TopK", (x(3, 6), [4]), {"axis": 1}, 2),
    S("TopK", (ints(9, 6, 3), [2]), {"axis": 0, "largest": 0}, 2),
    S("Hardmax", (x(3, 4, 2),), {"axis": 1}),
    S("ReverseSequence", (x(4, 3, 2), ints(5, 3, low=1))),
    S("ReverseSequence", (x(3, 4), ints(5, 3, low=1)), {"batch_axis": 0, "time_axis": 1}),
    # sampled elements
    *[
        S("Resize", (x(2, 3, 5, 4), None, None, [2, 3, *sizes]), {"mode": mode, **how})
        for sizes in ([8, 3], [10, 8])
        for mode in ("nearest", "linear", "cubic")
        for how in ({}, {"coordinate_transformation_mode": "align_corners"})
    ],
    *[
        S("Resize", (x(1, 2, 6, 4), None, Weight(np.array([1, 1, *scales], np.float32))), {"mode": mode, **how})
        for scales in ((2, 3), (0.6, 1.5))
        for mode, how in (
            ("nearest", {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
            ("nearest", {"nearest_mode": "round_prefer_ceil"}),
            ("nearest", {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "ceil"}),
            ("linear", {"coordinate_transformation_mode": "pytorch_half_pixel"}),
            ("cubic", {"exclude_outside": 1, "cubic_coeff_a": -0.5}),
            ("linear", {"coordinate_transformation_mode": "asymmetric"}),
        )
    ],
    *[S("Resize", (x(1, 1, 9, 8), None, None, [1, 1, 4, 5]), {"mode": m, "antialias": 1}) for m in ("linear", "cubic")],
    S("Resize", (ints(200, 1, 1, 4, 3).astype(np.uint8), None, None, [1, 1, 8, 9]), {"mode": "nearest"}),
    S("Resize", (x(2, 4, 6), None, None, [8, 5]), {"axes": [1, 2], "keep_aspect_ratio_policy": "not_larger"}),
    S(
        "Resize",
        (x(1, 1, 4, 5), Weight(np.array([0, 0, 0.4, -0.5, 1, 1, 0.6, 1.5], np.float32)), None, [1, 1, 3, 6]),
        {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0},
    ),
    *[S("Pad", (x(4, 3), [1, 2, 3, 0]), {"mode": k}) for k in ("edge", "reflect", "wrap")],
    S("Pad", (x(4, 3), [2, -1], None, [0]), {"mode": "edge"}),
    S("Pad", (x(4, 3), [1, 2, 3, 0], x(1)[0] + np.zeros((), np.float32))),
    # products
    *[
        S("Einsum", tuple(w(*s) if k else x(*s) for k, s in enumerate(shapes)), {"equation": text})
        for text, shapes in (
            ("ij->ji", [(2, 3)]),
            ("ij->i", [(2, 3)]),
            ("...ii->...i", [(2, 3, 3)]),
            ("ii", [(3, 3)]),
            ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
            ("bhqd,bkhd->bhqk", [(2, 3, 4, 5), (2, 6, 3, 5)]),
            ("i,j->ij", [(2,), (3,)]),
            ("ij,jk,kl", [(2, 3), (3, 4), (4, 5)]),
            ("...i,ij...->j...", [(2, 3), (3, 4, 2)]),
            ("bn,anm,bm->ba", [(2, 3), (4, 3, 5), (2, 5)]),
            ("ab,ab,ab->", [(2, 3)] * 3),
        )
    ],
    S("CumProd", (x(2, 3, 4), 1), {"exclusive": 1}, opset=26, reference=True),
    S("CumProd", (x(2, 3, 4), -1), {"reverse": 1}, opset=26, reference=True),
    *[S("LRN", (x(2, 5, 3, 4),), {"size": k, "alpha": 0.5, "beta": 0.6, "bias": 2.0}) for k in (3, 5)],
    S("Compress", (x(3, 4), Weight(np.array([True, False, True]))), {"axis": 0}),
    S("Compress", (x(3, 4), Weight(np.array([True, False, True, False, True])))),
    S("Range", (0, 7, 2)),
    S("Range", (np.float32(1), np.float32(-1), np.float32(-0.3))),
    # recurrent
    *[
        S(kind, (x(5, 3, 4), *recurrent(kind, 4, 6, 2)), {"hidden_size": 6, "direction": "bidirectional"}, outputs)
        for kind, outputs in (("RNN", 2), ("GRU", 2), ("LSTM", 3))
    ],
    *[
        S(kind, (x(5, 3, 4), *recurrent(kind, 4, 6, 1, lengths=[5, 2, 3])), {"hidden_size": 6, "direction": way}, 2)
        for kind in ("RNN", "GRU", "LSTM")
        for way in ("forward", "reverse")
    ],
    S(
        "GRU",
        (x(1, 2, 3), *recurrent("GRU", 3, 4, 1)[:2]),
        {"hidden_size": 4, "linear_before_reset": 1, "clip": 0.5},
        2,
    ),
    S("LSTM", (x(2, 2, 3), *recurrent("LSTM", 3, 4, 1), w(1, 12)), {"hidden_size": 4, "input_forget": 1}, 3),
    S(
        "LSTM",
        (x(2, 2, 3), *recurrent("LSTM", 3, 4, 1)[:2]),
        {"hidden_size": 4, "activations": ["Relu", "Tanh", "Sigmoid"]},
        3,
    ),
    # results beside the first
    S("LayerNormalization", (x(2, 3, 4), w(4), w(4)), {"axis": -1}, 3, reference=True),
    S("Dropout", (x(3, 4),), {}, 2),
    S("SoftmaxCrossEntropyLoss", (x(5, 4, 3), ints(4, 5, 3), w(4)), {"ignore_index": 2}, 2),
    S("SpaceToDepth", (x(2, 2, 4, 6),), {"blocksize": 2, "mode": "CRD"}, opset=28, reference=True),
    # integers
    *[S(f"Bitwise{k}", (ints(99, 3, 4), ints(99, 4))) for k in ("And", "Or", "Xor")],
    S("BitwiseNot", (ints(99, 3, 4).astype(np.int16),)),
    *[S("BitShift", (ints(99, 3).astype(np.uint8), ints(5, 3).astype(np.uint8)), {"direction": k}) for k in SIDES],
    S("Div", (ints(99, 3, 4, low=-99), ints(9, 4, low=1))),
    S("Div", (ints(99, 3, 4, low=-99).astype(np.int32), -ints(9, 4, low=1).astype(np.int32))),
    S("Mod", (ints(99, 3, 4, low=-99), -ints(9, 4, low=1))),
    S("Mod", (ints(99, 3, 4, low=-99), ints(9, 4, low=1)), {"fmod": 1}),
    S("Mod", (x(3, 4), x(4)), {"fmod": 1}),
    S("Pow", (ints(5, 3), positive(3))),
    *[S("IsInf", (ENDS,), {"detect_positive": k // 2, "detect_negative": k % 2}) for k in range(4)],
    S("QuantizeLinear", (x(3, 4) * 9, np.float32(0.3), np.uint8(7))),
    S("QuantizeLinear", (x(3, 4), Weight(positive(4)), Weight(np.arange(4, dtype=np.int8))), {"axis": -1}),
    S("QuantizeLinear", (x(3, 4) * 99, np.float32(0.3))),
    S(
        "DequantizeLinear",
        (ints(99, 3, 4).astype(np.uint8), Weight(positive(3)), Weight(np.arange(3, dtype=np.uint8))),
        {"axis": 0},
    ),
    S("DequantizeLinear", (ints(99, 3, 4).astype(np.int8), np.float32(0.3))),
    S("DequantizeLinear", (ints(99, 3, 5).astype(np.int8), Weight(positive(3, 3))), {"block_size": 2}, opset=21),
    S("QLinearMatMul", quantized(3, 4, 5)),
    *[S(t, (x(3, 4),)) for t in ("Atan", "Asinh")],
    *[S(t, (positive(3, 4) / 2,)) for t in ("Asin", "Acos", "Atanh")],
    S("Acosh", (positive(3, 4) + 1,)),
    S("CumSum", (ints(9, 2, 3, 4), 1)),
    S("CumSum", (x(2, 3), [-1]), {"exclusive": 1}),
    S("CumSum", (x(2, 3), [1]), {"reverse": 1}),
    S("CumSum", (x(3), [0]), {"reverse": 1, "exclusive": 1}),
    S("Conv", (x(2, 3, 4, 6), w(5, 3, 2, 3), w(5)), {"strides": [2, 3], "auto_pad": "VALID"}),
    S("Conv", (x(2, 3, 4), w(5, 3, 1)), {"dilations": [2], "group": 1, "kernel_shape": [1]}),
    S("Conv", (x(2, 3, 2, 2, 4), w(5, 3, 1, 2, 2)), {"strides": [1, 2, 2], "pads": [0] * 6}),
    S("Conv", (x(2, 3, 5), w(4, 3, 3), w(4)), {"pads": [2, 1], "strides": [2]}),
    S("Conv", (x(2, 4, 5, 6), w(6, 2, 3, 2)), {"group": 2, "strides": [1, 2], "auto_pad": "SAME_LOWER"}),
    S("Conv", (x(2, 3, 6), w(4, 3, 2)), {"strides": [2], "dilations": [2]}),
    S("Conv", (x(2, 3, 5, 6), w(4, 3, 1, 2)), {"strides": [2, 3], "auto_pad": "SAME_UPPER"}),
    S("Conv", (x(2, 3, 6, 5), w(4, 3, 3, 2)), {"dilations": [2, 3], "pads": [0, 1, 1, 0]}),
    S("Conv", (x(2, 3, 4, 5), w(4, 3, 2, 2), w(4)), {"strides": [2, 2]}),  # patches that leave some out
    S("Conv", (x(1, 2, 3, 3, 4), w(2, 1, 2, 2, 2)), {"group": 2, "auto_pad": "SAME_UPPER", "strides": [2, 1, 3]}),
    S("ConvTranspose", (x(2, 3, 4), w(3, 2, 3), w(2)), {"strides": [2], "pads": [1, 0], "output_padding": [1]}),
    S("ConvTranspose", (x(2, 4, 2, 3), w(4, 3, 2, 3), w(6)), {"group": 2, "dilations": [2, 1], "strides": [1, 2]}),
    S("ConvTranspose", (x(1, 2, 3, 3), w(2, 1, 3, 3)), {"strides": [3, 2], "output_shape": [10, 6]}),
    *[
        S("ConvTranspose", (x(1, 2, 3), w(2, 1, 4)), {"strides": [3], "auto_pad": f"SAME_{k}"})
        for k in ("UPPER", "LOWER")
    ],
    S("MaxPool", (x(2, 3, 7),), {"kernel_shape": [3], "strides": [2], "ceil_mode": 1, "storage_order": 1}),
    S("MaxPool", (x(2, 3, 5, 6),), {"kernel_shape": [3, 2], "pads": [2, 0, 1, 1], "dilations": [1, 3]}),
    S("MaxPool", (ints(200, 1, 2, 4, 5).astype(np.uint8),), {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}),
    *[
        S("AveragePool", (x(2, 3, 5, 6),), {"kernel_shape": [3, 3], "count_include_pad": k, "ceil_mode": i, **how})
        for k in (0, 1)
        for i in (0, 1)
        for how in ({"strides": [2, 3], "pads": [1, 2, 0, 2]}, {"auto_pad": "SAME_LOWER", "strides": [1, 2]})
    ],
    S("AveragePool", (x(1, 2, 3, 4, 5),), {"kernel_shape": [2, 1, 3], "dilations": [2, 1, 1], "auto_pad": "VALID"}),
    *[S("LpPool", (x(2, 3, 5),), {"kernel_shape": [3], "pads": [1, 1], "p": p}) for p in (1, 2, 3)],
    S("LpPool", (np.zeros((1, 1, 4), np.float32),), {"kernel_shape": [2]}),
    S("Tile", (x(2, 3), [2, 3])),
    S("Tile", (x(2, 3), [1, 1])),
    S("Pad", (x(2, 3), [1, 0, 0, 2], np.float32(0.5))),
    S("Pad", (x(2, 3), [0, 1, 0, -1])),
    S("Pad", (x(2, 3), [-1, 2], None, [1])),
    S("Pad", (x(4, 3), [-1, 0, -1, 0])),
    S("DepthToSpace", (x(2, 8, 2, 3),), {"blocksize": 2}),
    S("DepthToSpace", (x(2, 8, 2, 3),), {"blocksize": 2, "mode": "CRD"}),
    S("SpaceToDepth", (x(2, 2, 4, 6),), {"blocksize": 2}),
    S("OneHot", (ints(4, 2, 3, low=-4), 4, Weight(np.array([0.5, 2], np.float32)))),
    S("OneHot", (ints(4, 2, 3), [4], Weight(np.array([0, 1]))), {"axis": 1}),
    S("BatchNormalization", (x(2, 3, 4, 4), w(3), w(3), w(3), Weight(positive(3))), {"epsilon": 0.01}),
    S("BatchNormalization", (x(5, 3), w(3), w(3), w(3), Weight(positive(3)))),
    S("InstanceNormalization", (x(2, 3, 4, 4), w(3), w(3))),
    S("LpNormalization", (x(2, 3),), {"p": 1}),
    S("LpNormalization", (x(2, 3),), {"axis": 0}),
    *[S("LpNormalization", (np.diag([3, 0, -2]).astype(np.float32),), {"p": p}) for p in (1, 2)],
    *[S("ReduceLogSumExp", (np.full((2, 2), number, np.float32),)) for number in (-np.inf, np.inf)],
    *[S(f"Reduce{k}", (x(2, 0, 3), [1]), {"keepdims": i}) for i, k in enumerate(("Max", "Min"))],
    *[S(f"Reduce{k}", (ints(7, 2, 0), [1])) for k in ("Max", "Min", "Sum", "Prod")],
    *[S(f"Reduce{k}", (x(2, 0), [1])) for k in ("Sum", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")],
    S("ReduceMax", (x(2, 0, 3), [0])),
    *[S(t, (x(2, 3, 4, 5),)) for t in ("GlobalAveragePool", "GlobalMaxPool")],
    S("SoftmaxCrossEntropyLoss", (x(5, 4), ints(4, 5))),
    S("SoftmaxCrossEntropyLoss", (x(5, 4, 3), ints(4, 5, 3)), {"reduction": "none", "ignore_index": 1}),
    S("SoftmaxCrossEntropyLoss", (x(5, 4, 3), ints(4, 5, 3)), {"reduction": "sum", "ignore_index": 0}),
    # defined by the standard through other ops
    *[S(t, (x(3, 4),)) for t in ("HardSwish", "HardSigmoid", "Elu", "Selu", "Celu", "Mish", "Softsign")],
    S("ThresholdedRelu", (x(3, 4),), {"alpha": 0.3}),
    S("PRelu", (x(3, 4), w(4))),
    S("MeanVarianceNormalization", (x(2, 3, 4, 4),)),
    S("GroupNormalization", (x(2, 4, 3, 3), w(4), w(4)), {"num_groups": 2}, opset=21),
    S("RMSNormalization", (x(2, 3, 4), w(4)), opset=23),
    S("Attention", (x(2, 2, 5, 4), x(2, 2, 5, 4), x(2, 2, 5, 4)), {"is_causal": 1}, opset=23),
]


def name_of(s: Sample) -> str:
    return f"{s.op_type} {dict(s.attributes) or ''}".strip()


def test_every_rule_has_a_sample() -> None:
    text = Path(__file__).with_name("test_sequences.py").read_text()
    of_sequences = {name for name in RULES if f'"{name}"' in text}
    optional = {"OptionalGetElement", "OptionalHasElement"}  # of onnx's own cases: node_cases.txt
    assert RULES.keys() <= {s.op_type for s in SAMPLES} | of_sequences | optional | {MASKED_WRITE}


@pytest.mark.parametrize("known", [False, True])
def test_a_shape_of_more_dims_than_numpy_takes(known: bool, tmp_path: Path) -> None:
    given = {"x": x(3)}
    stored = {"s": np.ones(40, np.int64)} | (given if known else {})
    proto = model([node("Expand", "x s", "e"), node("Relu", "e", "y")], {} if known else given, ["y"], stored)
    with pytest.raises(ModelError, match="does not expand to"):
        computed(proto, {} if known else given, tmp_path / "m.onnx")


def test_parts_without_elements_are_left_out(tmp_path: Path) -> None:
    """What made them goes, too: the rest of a rotary embedding that takes all of a head."""
    nodes = [node("Slice", "x eight eight minus", "rest"), node("Neg", "rest", "n"), node("Relu", "x", "r")]
    stored = {"eight": np.array([8]), "minus": np.array([-1])}
    proto = model([*nodes, node("Concat", "r n", "y", axis=-1)], {"x": x(2, 8)}, ["y"], stored)
    assert [op.op_type for op in computed(proto, {"x": x(2, 8)}, tmp_path / "m.onnx")[0].ops] == ["Relu"]


@pytest.mark.parametrize("split", [2, 7, [2, 4, 1], [7]], ids=str)
def test_parts_that_are_a_sequence(split: int | list[int], tmp_path: Path) -> None:
    """As torch's exporter writes a split, before it is optimized."""
    last = -1 if split == 2 else 0
    nodes = [node("SplitToSequence", "x s", "parts", axis=-1), node("SequenceAt", "parts i", "y")]
    inputs = {"x": x(3, 7)}
    proto = model(nodes, inputs, ["y"], {"s": np.array(split), "i": np.array(last)})
    equal(computed(proto, inputs, tmp_path / "m.onnx")[1], expected(proto, inputs))
    nodes[1] = node("Relu", "parts", "y")
    with pytest.raises(ModelError, match="Relu node 'y': reads 'parts', a sequence"):
        computed(model(nodes, inputs, ["y"], {"s": np.array(split)}), inputs, tmp_path / "m.onnx")
    nodes[1] = node("SequenceAt", "x i", "y")
    with pytest.raises(ModelError, match="its operand 'x' is not a sequence that the file makes"):
        computed(model(nodes, inputs, ["y"], {"s": np.array(split), "i": np.array(0)}), inputs, tmp_path / "m.onnx")


@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
def test_rule(sample: Sample, tmp_path: Path) -> None:
    inputs: dict[str, np.ndarray] = {}
    stored: dict[str, np.ndarray] = {}
    names: list[str] = []
    for i, operand in enumerate(sample.operands):
        names.append("-" if operand is None else f"i{i}")
        if isinstance(operand, np.ndarray) and operand.ndim:
            inputs[f"i{i}"] = operand
        elif operand is not None:
            array = operand.array if isinstance(operand, Weight) else np.asarray(operand)
            stored[f"i{i}"] = array if array.size else array.astype(np.int64)
    outputs = [f"o{i}" for i in range(sample.outputs)]
    one = node(sample.op_type, " ".join(names), " ".join(outputs), "n", **sample.attributes)
    proto = model([one], inputs, outputs, stored, sample.opset)
    _, got = computed(proto, inputs, tmp_path / "m.onnx")
    equal(got, expected(proto, inputs, sample.reference), 1e-5)


@pytest.mark.parametrize(("of", "gain"), [(np.float32, np.float64), (np.float64, np.float32)])
def test_a_norm_has_the_type_of_its_gain(of: Any, gain: Any, tmp_path: Path) -> None:
    """As ONNX says; neither onnxruntime nor the reference evaluator takes two types."""
    inputs = {"x": x(2, 3, 4).astype(of), "g": x(4).astype(gain)}
    proto = model([node("RMSNormalization", "x g", "y", epsilon=0.5)], inputs, ["y"], opset=23)
    wide, by = (array.astype(np.float64) for array in inputs.values())
    want = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 0.5) * by
    equal(computed(proto, inputs, tmp_path / "m.onnx")[1], [want.astype(gain)], 1e-7)


@pytest.mark.parametrize(("op_type", "p"), [("LpNormalization", 1), ("LpNormalization", 2), ("ReduceL2", 2)])
def test_the_gradient_of_a_vector_without_length(op_type: str, p: int, tmp_path: Path) -> None:
    """0 for the vector of zeros; for the others torch's."""
    import torch

    array = np.array([[3, -4, 0], [0, 0, 0], [1, 2, -2]], np.float64)
    attributes: dict[str, Any] = {"p": p} if op_type == "LpNormalization" else {"axes": [1]}
    proto = model([node(op_type, "x", "y", **attributes)], {"x": array}, ["y"], opset=17)
    function, _ = computed(proto, {"x": array}, tmp_path / "m.onnx")
    maker = extend(function)
    (y,) = function.outputs
    factors = np.random.default_rng(0).standard_normal(shape_of(y))
    c = maker.add_input_value("c", tensor(y))
    maker.set_outputs([maker.emit("ReduceSum", maker.emit("Mul", y, c), axes=(0, 1))])
    step = grad(maker.finalize(), 0, [function.inputs[0]])
    with np.errstate(all="raise"):
        got = SequentialExecutor().compute(step, [array, factors])[1]
    x = torch.tensor(array[[0, 2]], requires_grad=True)
    length = torch.linalg.vector_norm(x, p, 1, keepdim=True)
    rows = x / length if op_type == "LpNormalization" else length
    (rows * torch.tensor(factors[[0, 2]])).sum().backward()
    assert x.grad is not None
    np.testing.assert_allclose(got[[0, 2]], x.grad, atol=1e-12)
    np.testing.assert_array_equal(got[1], 0)
