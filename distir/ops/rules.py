"""Helpers of op definitions: factor names, dtype rules, common parts of gradients."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, FactorMapping, op
from distir.ir.type import Bool, DType, Float32, Shard, Tensor

_LETTERS = "abcdefghijklmnop"


def letters(rank: int) -> list[str]:
    """Factor names for the dims of an operand of that rank."""
    return list(_LETTERS[:rank])


def points(operands: int) -> str:
    """The axes of an op on the points of its operands, which broadcast."""
    return ", ".join(["..."] * operands) + " -> ..."


def tensor(v: Value) -> Tensor:
    """The type of a value. Raises IRTypeError if it is a bundle, or types are not inferred yet."""
    t = v.type
    if not isinstance(t, Tensor):
        raise IRTypeError(f"expected a tensor, got {v}")
    return t


def shape_of(v: Value) -> Shape:
    """The global shape of a value."""
    return tensor(v).global_shape


def same(attrs: Attrs, *dtypes: DType) -> list[DType]:
    """The dtype rule of most ops: all operands have one, and the result has it too."""
    for k, d in enumerate(dtypes):
        if d is not dtypes[0]:
            raise IRTypeError(f"operand {k}: expected {dtypes[0]}, got {d}")
    return [dtypes[0]]


def all_same(results: int) -> Callable[..., list[DType]]:
    """As `same`, for several results."""
    return lambda attrs, *dtypes: same(attrs, *dtypes) * results


def truth(attrs: Attrs, *dtypes: DType) -> list[DType]:
    """The dtype rule of comparisons."""
    same(attrs, *dtypes)
    return [Bool]


def statistic(dtype: DType) -> DType:
    """The dtype of saved statistics, sums over many numbers of `dtype`: at least single precision."""
    return Float32 if dtype.size < 4 else dtype


def wide(xp: Any, x: Any) -> Any:
    """An array, in the dtype of statistics of it."""
    return xp.cast(x, Float32) if x.dtype.itemsize < 4 else x


def rounded_once(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The `eval` of an op with a result of its operands' dtype: of 16 bits computed in float32, and rounded at the end,
    as kernels do."""

    def eval(xp: Any, *operands: Any, **attributes: Any) -> Any:
        if operands[0].dtype.itemsize >= 4:
            return rule(xp, *operands, **attributes)
        return xp.asarray(rule(xp, *[wide(xp, x) for x in operands], **attributes), dtype=operands[0].dtype)

    return eval


def expect(k: int, dtype: DType, kind: str) -> None:
    """Raises IRTypeError if operand k is not of that kind of dtype: "float", "int" or "bool"."""
    if dtype.kind != kind:
        raise IRTypeError(f"operand {k}: expected a dtype of kind {kind}, got {dtype}")


def expect_shape(k: int, got: Shape, want: Shape) -> None:
    """Raises IRTypeError if operand k has another shape: for ops whose operands do not broadcast."""
    if got != want:
        raise IRTypeError(f"operand {k}: expected shape {want}, got {got}")


def passed(count: int, split: Shard, whole: Container[int], results: int = 1) -> FactorMapping | None:
    """The factor mapping of an op that keeps dims in place: dims in `whole` may not be split."""
    return None if split.dim in whole else FactorMapping((split,) * count, (split,) * results)


def scalar(f: FunctionMaker, number: float, like: Value) -> Value:
    """A number of the dtype and on the device of `like`."""
    t = tensor(like)
    where = {} if t.device is None else {"device": t.device}
    return f.emit("Constant", value=(number,), shape=(), dtype=t.dtype, **where)


def next_statistic(f: FunctionMaker, running: Value, batch: Value, momentum: float, correction: float) -> Value:
    """The next value of a running statistic: momentum * running + (1 - momentum) * correction * the batch's.

    Where the batch's is of groups of samples, in dim 0, it is their mean; other dims that `running` has not are of size
    1.
    """
    if shape_of(batch)[0] > 1:
        batch = f.emit("ReduceMean", batch, axes=(0,), keepdims=0)
    batch = f.emit("Reshape", batch, shape=shape_of(running))
    parts = (running, momentum), (batch, (1 - momentum) * correction)
    return f.emit("Add", *[f.emit("Mul", v, scalar(f, by, v)) for v, by in parts])


def cast(f: FunctionMaker, v: Value, to: DType) -> Value:
    """`v` in that dtype."""
    return v if tensor(v).dtype is to else f.emit("Cast", v, to=to)


def no_grad(f: FunctionMaker, o: Op, *d: Any) -> list[None]:
    """The gradient rule of an op without gradients."""
    return [None] * len(o.inputs)


def known(f: FunctionMaker, o: Op, d: Sequence[Value | None]) -> list[Value]:
    """The gradients of all results, zeros for those that have none."""
    return [f.emit("ZerosLike", y) if g is None else g for g, y in zip(d, o.outputs, strict=True)]


def sum_to(f: FunctionMaker, d: Value, like: Value) -> Value:
    """The gradient `d` of a result, summed over the dims along which `like` was broadcast."""
    got, want = shape_of(d), shape_of(like)
    lead = len(got) - len(want)
    broadcast = tuple(i for i in range(lead, len(got)) if want[i - lead] == 1 and got[i] != 1)
    if broadcast:
        d = f.emit("ReduceSum", d, axes=broadcast, keepdims=1)
    if lead:
        d = f.emit("ReduceSum", d, axes=tuple(range(lead)), keepdims=0)
    return d


def swap_last(f: FunctionMaker, v: Value) -> Value:
    """`v` with its last two dims swapped."""
    n = len(shape_of(v))
    return f.emit("Transpose", v, perm=(*range(n - 2), n - 1, n - 2))


def smooth(
    name: str,
    eval: Callable[..., Any],
    slope: Callable[..., Any],
    saved: str = "x",
    attributes: str = "",
    exact: bool = False,
    **more: Any,
) -> None:
    """An op on the points of one operand and, as `<name>Grad`, its gradient.

    `slope(xp, saved, d, **attributes)` is the operand's gradient from the result's, d, and what is saved: the
    operand ("x") or the result ("y"). An `exact` function rounds nothing, and may be of integers. `more` are further
    fields of the op's definition (see `distir.ir.spec.op`).
    """
    once: Callable[..., Any] = (lambda rule: rule) if exact else rounded_once

    def grad(f: FunctionMaker, o: Op, d: Value) -> Sequence[Value]:
        v = o.inputs[0] if saved == "x" else o.outputs[0]
        return [f.add_op(f"{name}Grad", None, [v, d], o.attributes)]

    given = {"attributes": attributes, "exact": exact}
    op(name, axes=points(1), eval=once(eval), grad=grad, **given, **more)
    op(f"{name}Grad", axes=points(2), dtype=same, linear=[{1}], eval=once(slope), **given)
