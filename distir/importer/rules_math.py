"""Import rules of ONNX ops: arithmetic, matrix products, reductions, activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import ml_dtypes
import numpy as np

from distir.importer.marks import call_of, in_training
from distir.importer.node import Node, Result
from distir.importer.registry import rule
from distir.importer.tensor_proto import dtype_of
from distir.ir.errors import UsageError
from distir.ir.function import Value
from distir.ir.type import Float32, Float64
from distir.ops.rules import next_statistic, shape_of, statistic, tensor


@rule("Abs", "Add", "And", "Ceil", "Cos", "Equal", "Erf", "Exp", "Floor", "Greater", "GreaterOrEqual", "Less")
@rule("LessOrEqual", "Log", "Mul", "Neg", "Not", "Or", "Reciprocal", "Relu", "Round", "Sigmoid")
@rule(
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Sign", "Sin", "Softplus", "Sqrt", "Sub", "Tanh", "Where", "Xor"
)
def _same(n: Node) -> Result:
    """Becomes the op of the same name, without attributes."""
    return n.emit(n.proto.op_type, *n.operands())


@rule("MatMul")
def _matmul(n: Node) -> Result:
    """A vector becomes a matrix of one row (of one column if it is the second operand); that dim is removed again."""
    a, b = n.operands()
    first, second = len(shape_of(a)) == 1, len(shape_of(b)) == 1
    a = n.reshape(a, (1, *shape_of(a))) if first else a
    b = n.reshape(b, (*shape_of(b), 1)) if second else b
    y = n.emit("MatMul", a, b)
    rank = len(shape_of(y))
    return n.dropped(y, (*[rank - 2] * first, *[rank - 1] * second))


@rule("Identity")
def _identity(n: Node) -> Result | Sequence[Result]:
    if n.proto.input[0] in n.scope.sequences:
        n.scope.sequences[n.proto.output[0]] = n.scope.sequences[n.proto.input[0]]
        return []
    x = n.operand(0)
    if call_of(n.proto).name == "detach" and n.scope.depends_on_parameters(x):
        return n.emit("Detach", x)
    return x


@rule("Dropout")
def _dropout(n: Node) -> Result | Sequence[Result]:
    """The identity if the model was exported for inference; in training mode the op that training makes random.

    torch's exporter writes the dropout of attention probabilities, which torch always applies, as in inference."""
    n.attr("seed")
    ratio = float(n.numbers(1, "ratio")[0]) if n.has(1) else 0.5
    training = (n.has(2) and bool(n.numbers(2, "training_mode").any())) or _drops(n)
    if ratio == 0 or not training:
        return [n.operand(0), np.broadcast_to(np.array(True), n.shape())]  # all are kept
    if not 0 <= ratio < 1:
        raise n.error(f"ratio {ratio:g} is not in [0, 1)")
    return n.emit("Dropout", n.operand(0), ratio=ratio)


def _drops(n: Node) -> bool:
    """Whether the node is of an attention with dropout of its probabilities."""
    call = call_of(n.proto)
    return call.name == "scaled_dot_product_attention" and call.get(4, "dropout_p", 0.0) > 0


@rule("Attention")
def _attention(n: Node) -> None:
    """What the standard defines it by, which has no dropout."""
    if _drops(n):
        raise n.error("torch's exporter leaves its dropout out", "export it with opset_version=22 or below")


BINARY = {"Sum": "Add", "Mean": "Add", "Max": "Max", "Min": "Min"}


@rule(*BINARY)
def _chain(n: Node) -> Result:
    """A variadic op becomes a chain of binary ops."""
    xs = n.operands()
    total = reduce(lambda a, b: n.emit(BINARY[n.proto.op_type], a, b), xs)
    return n.emit("Div", total, n.constant(float(len(xs)), total)) if n.proto.op_type == "Mean" else total


@rule("Cast")
def _cast(n: Node) -> Result:
    n.attr("saturate")  # of 8-bit floats only
    n.attr("round_mode")
    to = dtype_of(n.attr("to", 0), f"{n.scope.path}: {n}: attribute to")
    x = n.operand(0)
    if tensor(x).dtype is Float64 and to is Float32 and call_of(n.proto).name in _IN_FLOAT32:
        return x
    return x if tensor(x).dtype is to else n.emit("Cast", x, to=to)


_IN_FLOAT32 = "embedding_bag", "celu"
"""Ops of torch's that its exporter computes in float32, whatever their operands are."""


@rule("CastLike")
def _cast_like(n: Node) -> Result:
    n.attr("saturate")
    to = tensor(n.operand(1)).dtype
    if n.scope.is_known(n.proto.input[0]):
        x = n.known(0, "the number")
        return n.scope.cast(x, to)
    x = n.operand(0)
    return x if tensor(x).dtype is to else n.emit("Cast", x, to=to)


@rule("Gelu")
def _gelu(n: Node) -> Result:
    n.require("approximate", "none", "none", "tanh")
    return n.emit("Gelu", n.operand(0), approximate=n.attr("approximate", "none"))


@rule("LeakyRelu")
def _leaky_relu(n: Node) -> Result:
    x, alpha = n.operand(0), n.attr("alpha", 0.01)
    negative = n.emit("Relu", n.emit("Neg", x))
    return n.emit("Sub", n.emit("Relu", x), n.emit("Mul", negative, n.constant(alpha, x)))


@rule("Celu")
def _celu(n: Node) -> Result:
    """In the operand's dtype: the standard has it in float32 only."""
    x, alpha = n.operand(0), n.constant(n.attr("alpha", 1.0), n.operand(0))
    low = n.emit("Neg", n.emit("Relu", n.emit("Neg", x)))
    below = n.emit("Sub", n.emit("Exp", n.emit("Div", low, alpha)), n.constant(1.0, x))
    return n.emit("Add", n.emit("Relu", x), n.emit("Mul", alpha, below))


@rule("Swish")
def _swish(n: Node) -> Result:
    x, alpha = n.operand(0), n.attr("alpha", 1.0)
    if alpha == 1.0:
        return n.emit("Silu", x)
    return n.emit("Mul", x, n.emit("Sigmoid", n.emit("Mul", x, n.constant(alpha, x))))


@rule("Tan")
def _tan(n: Node) -> Result:
    return n.emit("Div", n.emit("Sin", n.operand(0)), n.emit("Cos", n.operand(0)))


@rule("Sinh", "Cosh")
def _hyperbolic(n: Node) -> Result:
    x = n.operand(0)
    up, down = n.emit("Exp", x), n.emit("Exp", n.emit("Neg", x))
    both = n.emit("Sub" if n.proto.op_type == "Sinh" else "Add", up, down)
    return n.emit("Mul", both, n.constant(0.5, x))


@rule("IsNaN")
def _is_nan(n: Node) -> Result:
    return n.emit("Not", n.emit("Equal", n.operand(0), n.operand(0)))


@rule("Clip")
def _clip(n: Node) -> Result:
    """Bounds known at import become attributes."""
    x = n.operand(0)
    bounds = {k: n.number(i) for i, k in ((1, "min"), (2, "max")) if n.has(i)}
    if None not in bounds.values():
        return n.emit("Clip", x, **bounds) if bounds else x
    if n.has(1):
        x = n.emit("Max", x, n.operand(1))
    return n.emit("Min", x, n.operand(2)) if n.has(2) else x


@rule("Softmax", "LogSoftmax")
def _softmax(n: Node) -> Result:
    return n.emit(n.proto.op_type, n.operand(0), axis=n.axis(-1))


@rule("LayerNormalization")
def _layer_norm(n: Node) -> Result | Sequence[Result]:
    n.attr("stash_type")  # the precision of the statistics: an implementation's choice
    axis, epsilon, x = n.axis(-1), n.attr("epsilon", 1e-5), n.operand(0)
    y = n.emit("LayerNormalization", *n.operands(), axis=axis, epsilon=epsilon)
    if not any(n.proto.output[1:]):
        return y
    wide = x if tensor(x).dtype is statistic(tensor(x).dtype) else n.emit("Cast", x, to=statistic(tensor(x).dtype))
    mean, variance = _moments(n, wide, tuple(range(axis, len(n.shape()))))
    deviation = n.emit("Sqrt", n.emit("Add", variance, n.constant(epsilon, variance)))
    return [y, mean, n.emit("Reciprocal", deviation)]


@rule("RMSNormalization")
def _rms_norm(n: Node) -> Result:
    """Computed in the wider of the types of operand and gain; the result has the gain's."""
    n.attr("stash_type")
    x, gain = n.operands()
    axis, epsilon = n.axis(-1), n.attr("epsilon", 1e-5)
    small = tensor(gain).dtype
    dtype = max(tensor(x).dtype, small, key=lambda d: d.size)
    x, gain = [v if tensor(v).dtype is dtype else n.emit("Cast", v, to=dtype) for v in (x, gain)]
    sizes = shape_of(x)[axis:]
    gain = gain if shape_of(gain) == sizes else n.emit("Expand", gain, shape=sizes)
    y = n.emit("RMSNormalization", x, gain, axis=axis, epsilon=epsilon)
    return y if dtype is small else n.emit("Cast", y, to=small)


@rule("Gemm")
def _gemm(n: Node) -> Result:
    flags = {"transA": int(n.attr("transA", 0)), "transB": int(n.attr("transB", 0))}
    scales = {"alpha": float(n.attr("alpha", 1.0)), "beta": float(n.attr("beta", 1.0))}
    return n.emit("Gemm", *n.operands(), **scales, **flags)


def _reduced_axes(n: Node) -> tuple[int, ...] | None:
    """The dims to reduce; without axes all, or None if the node is then the identity (`noop_with_empty_axes`)."""
    axes, rank = n.axes(), len(n.shape())
    nothing = n.attr("noop_with_empty_axes", 0)
    if not axes:
        return None if nothing else tuple(range(rank))
    return tuple(sorted({n.wrap(a, rank) for a in axes}))


def _reduce(n: Node, op_type: str, x: Value) -> Value:
    axes, keepdims = _reduced_axes(n), int(n.attr("keepdims", 1))
    return x if not axes else n.emit(op_type, x, axes=axes, keepdims=keepdims)


@rule("ReduceSum", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd")
def _reduction(n: Node) -> Result:
    return _reduce(n, n.proto.op_type, n.operand(0))


@rule("ReduceSumSquare", "ReduceL2", "ReduceL1", "ReduceLogSum")
def _reduction_of_points(n: Node) -> Result:
    """A sum of mapped elements, then a function of the sum."""
    x, op_type = n.operand(0), n.proto.op_type
    if op_type == "ReduceL1":
        x = n.emit("Abs", x)
    elif op_type != "ReduceLogSum":
        x = n.emit("Mul", x, x)
    total = _reduce(n, "ReduceSum", x)
    if op_type == "ReduceL2":
        return where_not(n, n.emit("Sqrt", divisor(n, total)), total)
    return n.emit("Log", total) if op_type == "ReduceLogSum" else total


def divisor(n: Node, total: Value) -> Value:
    """`total` (>= 0) with 1 in place of 0: so that neither its root nor its inverse has an infinite slope."""
    return n.emit("Where", n.emit("Equal", total, n.constant(0, total)), n.constant(1, total), total)


def where_not(n: Node, x: Value, total: Value) -> Value:
    """`x`, but 0, with gradient 0, where `total` is 0."""
    return n.emit("Mask", n.emit("Equal", total, n.constant(0, total)), x, keep=False)


@rule("ReduceLogSumExp")
def _reduce_log_sum_exp(n: Node) -> Result:
    x, axes = n.operand(0), _reduced_axes(n)
    if axes is None:
        return x
    result = _log_sum_exp(n, x, axes)
    return result if n.attr("keepdims", 1) else n.dropped(result, axes)


def _log_sum_exp(n: Node, x: Value, axes: tuple[int, ...]) -> Value:
    """The maximum, clipped to finite numbers, is subtracted before and added after, so that nothing overflows."""
    largest = float(ml_dtypes.finfo(tensor(x).dtype.numpy).max)
    top = n.emit("Clip", n.emit("ReduceMax", x, axes=axes, keepdims=1), min=-largest, max=largest)
    top = n.emit("Detach", top)
    total = n.emit("ReduceSum", n.emit("Exp", n.emit("Sub", x, top)), axes=axes, keepdims=1)
    return n.emit("Add", n.emit("Log", total), top)


# ---------------------------------------------------------------- normalisation


def _standard(n: Node, x: Value, mean: Value, variance: Value, epsilon: float) -> Value:
    """`x` minus its mean, divided by its standard deviation."""
    deviation = n.emit("Sqrt", n.emit("Add", variance, n.constant(epsilon, x)))
    return n.emit("Div", n.emit("Sub", x, mean), deviation)


def _per_channel(n: Node, i: int) -> Value:
    """Operand i, one number per channel, reshaped to broadcast with operand 0, (batch, channels, ...), in its dtype."""
    x, to = n.operand(i), tensor(n.operand(0)).dtype
    x = x if tensor(x).dtype is to else n.emit("Cast", x, to=to)
    return n.reshape(x, (n.shape()[1], *[1] * (len(n.shape()) - 2)))


@rule("BatchNormalization")
def _batch_norm(n: Node) -> Result | Sequence[Result]:
    """In inference mode with running statistics, which are constants. In training mode with those of the batch, or of
    each of the groups that it is read as; a training step updates the running ones.

    torch's exporter writes inference mode for a module in training mode, too: then only a training step takes the
    batch's, and the running variance is of a sample (divided by n - 1, not n), as in torch.
    """
    n.require("training_mode", 0, 0, 1)
    given, momentum, epsilon = n.attr("training_mode", 0), float(n.attr("momentum", 0.9)), n.attr("epsilon", 1e-5)
    x, scale, bias, shape = n.operand(0), _per_channel(n, 1), _per_channel(n, 2), n.shape()
    if not given and not (in_training(n.proto) and n.proto.input[3] in n.scope.stored):
        y = _standard(n, x, _per_channel(n, 3), _per_channel(n, 4), epsilon)
        return n.emit("Add", n.emit("Mul", y, scale), bias)
    whole = _grouped(n, x)
    channel = len(shape_of(whole)) - len(shape) + 1
    dims = tuple([i for i in range(channel - 1, len(shape_of(whole))) if i != channel])
    count = math.prod([shape_of(whole)[i] for i in dims])
    corrections = 1.0, 1.0 if given or count == 1 else count / (count - 1)
    kind = "BatchStatistic" if given else "RunningStatistic"
    used: list[Value] = []
    following: list[Result] = []
    for i, new, correction in zip((3, 4), _moments(n, whole, dims), corrections, strict=True):
        old = n.scope.state(n.proto.input[i])
        row = n.reshape(old, tuple([m if k == channel else 1 for k, m in enumerate(shape_of(new))]))
        row = row if shape_of(row) == shape_of(new) else n.emit("Expand", row, shape=shape_of(new))
        used.append(n.emit(kind, row, new, momentum=momentum, correction=correction))
        following.append(next_statistic(n.scope.maker, old, new, momentum, correction))
    y = n.emit("Add", n.emit("Mul", _standard(n, whole, used[0], used[1], epsilon), scale), bias)
    return [n.reshape(y, shape), *following]


def _grouped(n: Node, x: Value) -> Value:
    """The batch, in dim 0, as (groups, its samples in a group), if the user asks for more groups than one."""
    groups, (batch, *rest) = n.scope.batchnorm_groups, shape_of(x)
    n.scope.batchnorms += 1
    if batch % groups:
        raise UsageError(f"{n.scope.path}: {n}: its batch of {batch} cannot be split into {groups} groups")
    return n.reshape(x, (groups, batch // groups, *rest)) if groups > 1 else x


def _moments(n: Node, x: Value, dims: tuple[int, ...]) -> tuple[Value, Value]:
    """The mean and the variance over these dims, which stay as dims of size 1."""
    mean = n.emit("ReduceMean", x, axes=dims, keepdims=1)
    error = n.emit("Sub", x, mean)
    return mean, n.emit("ReduceMean", n.emit("Mul", error, error), axes=dims, keepdims=1)


@rule("InstanceNormalization")
def _instance_norm(n: Node) -> Result:
    x = n.operand(0)
    mean, variance = _moments(n, x, tuple(range(2, len(n.shape()))))
    y = _standard(n, x, mean, variance, n.attr("epsilon", 1e-5))
    return n.emit("Add", n.emit("Mul", y, _per_channel(n, 1)), _per_channel(n, 2))


@rule("LpNormalization")
def _lp_norm(n: Node) -> Result:
    """A vector of norm 0 stays 0."""
    n.require("p", 2, 1, 2)
    x, dims, p = n.operand(0), (n.axis(-1),), n.attr("p", 2)
    points = n.emit("Abs", x) if p == 1 else n.emit("Mul", x, x)
    total = n.emit("ReduceSum", points, axes=dims, keepdims=1)
    length = divisor(n, total) if p == 1 else n.emit("Sqrt", divisor(n, total))
    return where_not(n, n.emit("Div", x, length), total)


@rule("SoftmaxCrossEntropyLoss")
def _cross_entropy(n: Node) -> Result | None:
    """ONNX has the classes in dim 1, distir has them last. With weights of classes, or if the logarithms are results,
    it is what the standard defines it by. torch's exporter leaves label smoothing out."""
    call = call_of(n.proto)
    smoothing = float(call.get(5, "label_smoothing", 0.0)) if call.name == "cross_entropy_loss" else 0.0
    if tensor(n.operand(1)).dtype.floating:
        return _of_shares(n, smoothing)
    if smoothing:
        return _smoothed(n, smoothing)
    if n.has(2) or any(n.proto.output[1:]):
        return None
    x = _classes_last(n, n.operand(0))
    attributes = {"reduction": n.attr("reduction", "mean"), "ignore_index": n.attr("ignore_index")}
    given = {k: v for k, v in attributes.items() if v is not None}
    return n.emit("SoftmaxCrossEntropyLoss", x, n.operand(1), **given)


def _classes_last(n: Node, x: Value) -> Value:
    """(batch, classes, ...) as (batch, ..., classes)."""
    rank = len(shape_of(x))
    return n.emit("Transpose", x, perm=(0, *range(2, rank), 1)) if rank > 2 else x


def _of_shares(n: Node, smoothing: float) -> Result:
    """Cross-entropy with a share of each class as target, as torch's may have: of shape (batch, classes, ...). The mean
    is over all rows."""
    if n.shape(1) != n.shape():
        raise n.error(f"shares of classes {n.shape(1)} do not fit logits {n.shape()}")
    n.attr("ignore_index")  # of targets that are classes
    x, share = (_classes_last(n, v) for v in (n.operand(0), n.operand(1)))
    rank, reduction = len(shape_of(x)), n.attr("reduction", "mean")
    classes, last = shape_of(x)[-1], (rank - 1,)
    if smoothing:
        share = n.emit("Mul", share, n.constant(1 - smoothing, share))
        share = n.emit("Add", share, n.constant(smoothing / classes, share))
    share = n.emit("Mul", share, n.operand(2)) if n.has(2) else share
    total = n.emit("Mul", _log_sum_exp(n, x, last), n.emit("ReduceSum", share, axes=last, keepdims=1))
    picked = n.emit("ReduceSum", n.emit("Mul", share, x), axes=last, keepdims=0)
    rows, dims = n.emit("Sub", n.dropped(total, last), picked), tuple(range(rank - 1))
    if reduction == "none":
        return rows
    return n.emit("ReduceMean" if reduction == "mean" else "ReduceSum", rows, axes=dims, keepdims=0)


def _smoothed(n: Node, smoothing: float) -> Result:
    """Cross-entropy with label smoothing, as torch defines it: of the target 1 - s, and of each class s / classes.

    A class counts by its weight w: of a row that is not ignored the sum over classes of -w log p is
    (sum of w) log(sum of exp x) - sum of w x. The mean divides by the targets' weights."""
    x, target, rank, reduction = (
        _classes_last(n, n.operand(0)),
        n.operand(1),
        len(n.shape()),
        n.attr("reduction", "mean"),
    )
    classes, last = shape_of(x)[-1], (rank - 1,)
    ignored = {} if n.attr("ignore_index") is None else {"ignore_index": n.attr("ignore_index")}
    other = n.emit("Equal", target, n.constant(ignored["ignore_index"], target)) if ignored else None
    own = n.emit("SoftmaxCrossEntropyLoss", x, target, reduction="none", **ignored)
    total = n.dropped(_log_sum_exp(n, x, last), last)
    if n.has(2):
        weight = n.operand(2)
        index = target if other is None else n.emit("Where", other, n.constant(0, target), target)
        counts = n.emit("Gather", weight, index, axis=0)
        own = n.emit("Mul", own, counts)
        total = n.emit("Mul", total, n.emit("ReduceSum", weight, axes=(0,), keepdims=0))
        each = n.emit("Sub", total, n.emit("ReduceSum", n.emit("Mul", x, weight), axes=last, keepdims=0))
        each = n.emit("Div", each, n.constant(float(classes), x))
    else:
        counts = n.full(shape_of(target), 1.0, x)
        each = n.emit("Sub", total, n.emit("ReduceMean", x, axes=last, keepdims=0))
    if other is not None:
        counts, each = (n.emit("Mask", other, v, keep=False) for v in (counts, each))
    own, each = n.emit("Mul", own, n.constant(1 - smoothing, x)), n.emit("Mul", each, n.constant(smoothing, x))
    rows, dims = n.emit("Add", own, each), tuple(range(rank - 1))
    if reduction == "none":
        return rows
    result = n.emit("ReduceSum", rows, axes=dims, keepdims=0)
    return n.emit("Div", result, n.emit("ReduceSum", counts, axes=dims, keepdims=0)) if reduction == "mean" else result
