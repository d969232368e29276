"""Mixed precision: products in 16 bits, weights and statistics in float32 (Micikevicius et al. 2018).

Applied to a program with its loss, before its gradients are added: these then have the types of what they are of. Each
definition of an op says how precise it must be (`Spec.precision`): "low" ops take and give 16 bits, "wide" ones
float32; the others follow their operands: in 16 bits, unless one of these was computed in float32. Weights stay float32
inputs, and each is cast once, as long as no wide op alone needs it. So its gradient is cast to float32 once it is
computed, before it is accumulated over microbatches and reduced over devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distir.ir.errors import MismatchError, UsageError
from distir.ir.exact_attributes import Form
from distir.ir.function import AsNamed, Attributes, Function, FunctionMaker, Op, Value
from distir.ir.spec import lookup
from distir.ir.type import DType, Float32, Tensor
from distir.ir.validate import validate
from distir.transforms.rewriting.laws import Law, rewrites
from distir.transforms.rewriting.precision import in_dtype, retyped, with_dtype

_CAST, _CONSTANT = lookup("Cast"), lookup("Constant")


@rewrites(Law.MIXED)
def mixed_precision(function: Function, low: DType) -> Function:
    """The function with its products in `low`, a floating-point type of 16 bits.

    Inputs and outputs keep their types. Raises UsageError if a value has a floating-point type other than float32, or
    `low` is not of 16 bits.
    """
    if not low.floating or low.size != 2:
        raise UsageError(f"mixed precision is of bfloat16 or float16 and float32, got {low}")
    for v in (*function.inputs, *[v for op in function.ops for v in op.outputs]):
        if isinstance(v.type, Tensor) and v.type.dtype.floating and v.type.dtype is not Float32:
            raise UsageError(f"mixed precision needs a float32 program: %{v.name} of {function.name} is {v.type}")
    return _Mixed(function, low).made


class _Mixed:
    """A program rebuilt in two precisions: each value in those of them that are used."""

    def __init__(self, function: Function, low: DType) -> None:
        self.low = low
        self.to = {dtype: Attributes({"to": dtype}) for dtype in (low, Float32)}
        """The attributes of casts."""
        self.maker = maker = FunctionMaker(function.name)
        self.versions: dict[Value, dict[DType, Value]] = {}
        """Per value what it is in each dtype."""
        self.computed: dict[Value, DType | None] = {}
        """Per value the dtype to follow; None for data and constants, which follow other operands."""
        self.constants = {op.outputs[0]: op for op in function.ops if op.spec is _CONSTANT}
        for v in function.inputs:  # they stay the same Values
            maker.fresh(v.name)
            maker.inputs.append(v)
            self._add(v, v, low if v.kind == "parameter" else None)
        for op in function.ops:
            self._emit(op)
        maker.set_outputs([self.get(v, _dtype(v)) for v in function.outputs])
        maker.updates = {self.get(a, _dtype(a)): self.get(b, _dtype(b)) for a, b in function.updates.items()}
        maker.sources = {self.get(v, _dtype(v)): shape for v, shape in function.sources.items()}
        self.made = maker.finalize()

    def _add(self, v: Value, made: Value, computed: DType | None) -> None:
        self.versions[v] = {_dtype(made): made}
        self.computed[v] = computed

    def get(self, v: Value, dtype: DType) -> Value:
        """A value in that dtype, cast the first time that it is needed; one that is not floating as it is."""
        found = self.versions[v]
        made = found.get(dtype)
        if made is not None:
            return made
        if not _dtype(v).floating:
            return found[_dtype(v)]
        name = f"{v.name}.{dtype}"
        if (constant := self.constants.get(v)) is not None:
            made = self.maker.add_op(_CONSTANT, name, [], {**constant.attributes, "dtype": dtype})
        else:
            made = self.maker.add_op(_CAST, name, [next(iter(found.values()))], self.to[dtype])
        found[dtype] = made
        return made

    def _follow(self, op: Op) -> DType | None:
        """The dtype in which an op computes; None if its operands do not say."""
        if op.spec.precision is not None:
            return self.low if op.spec.precision == "low" else Float32
        said = [self.computed[v] for v in op.inputs if _dtype(v).floating]
        return Float32 if Float32 in said else self.low if self.low in said else None

    def _emit(self, op: Op) -> None:
        if _changes_nothing(op):
            self.versions[op.outputs[0]] = self.versions[op.inputs[0]]
            self.computed[op.outputs[0]] = self.computed[op.inputs[0]]
            return
        dtype = self._follow(op)
        operands = [self.get(v, dtype or Float32) for v in op.inputs]
        attributes: Mapping[str, Any] = op.attributes
        if dtype is self.low and "result" in op.spec.attributes:
            attributes = {**attributes, "result": Float32}
        names = [v.name for v in op.outputs]
        self.maker.add_op(op.spec, None, operands, attributes, output_names=names)
        floats = [v for v in op.inputs if _dtype(v).floating]
        for v, new in zip(op.outputs, self.maker.ops[-1].outputs, strict=True):
            self._add(v, new, _dtype(new) if floats and dtype is not None else None)


def _dtype(v: Value) -> DType:
    if not isinstance(v.type, Tensor):
        raise UsageError(f"mixed precision is for sequential programs: %{v.name} is a bundle")
    return v.type.dtype


def check_mixed_precision(before: Function, after: Function, low: DType) -> None:
    """Raises MismatchError, naming the value, unless `after` in float32 throughout is `before`, and operands are as
    precise as their ops say."""
    wants = {"low": low, "wide": Float32}
    for op in after.ops:
        want = wants.get(op.spec.precision or "")
        for v in op.inputs if want is not None else ():
            if _dtype(v).floating and _dtype(v) is not want:
                raise MismatchError(f"{after.name}: {op}: expected %{v.name} in {want}, got {_dtype(v)}")
    source = _in_one_precision(before) if any(map(_changes_nothing, before.ops)) else before
    validate(_in_one_precision(after), source)


def _changes_nothing(op: Op) -> bool:
    """Whether an op casts a floating-point value to the dtype that it has."""
    kind = _dtype(op.inputs[0]) if op.spec is _CAST else None
    return kind is not None and kind.floating and kind is _dtype(op.outputs[0])


def _in_one_precision(function: Function) -> Function:
    """The function with all floating-point values in float32, without casts that then change nothing, and without the
    dtypes of results that are their operands'."""
    maker = AsNamed(function.name)
    env = {v: maker.add_input_value(v.name, retyped(v.type, Float32), v.role) for v in function.inputs}
    changed: dict[Form, Attributes] = {}
    for op in function.ops:
        operands = tuple([env[v] for v in op.inputs])
        narrows = op.spec is _CAST and _dtype(op.inputs[0]).floating
        if narrows and retyped(op.outputs[0].type, Float32) is operands[0].type:
            env[op.outputs[0]] = operands[0]
            continue
        attributes = changed.get(op.attributes.form)
        if attributes is None:
            attributes = changed[op.attributes.form] = in_dtype(op.attributes, Float32).without("result")
        if (callee := op.callee) is not None:
            attributes = Attributes({**attributes, "callee": with_dtype(callee, Float32)})
        maker.add_op(op.spec, None, operands, attributes, output_names=[v.name for v in op.outputs])
        env.update(zip(op.outputs, maker.ops[-1].outputs, strict=True))
    maker.set_outputs([env[v] for v in function.outputs])
    maker.updates = {env[a]: env[b] for a, b in function.updates.items()}
    maker.sources = {env[v]: shape for v, shape in function.sources.items()}
    return maker.finalize()
