"""Faults in rules that fuse, take apart or pad: `validate` finds each, and `--check` need not run for that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from distir.api.road import validate
from distir.executor.sequential import SequentialExecutor, evaluate
from distir.ir import Device, Function, FunctionMaker, Role, Value
from distir.ir.errors import MismatchError
from distir.ir.function import Attributes, Op
from distir.ir.spec import Spec, lookup
from distir.ir.type import BFloat16, DType, Float16, Float32, Float64, Int64, Tensor
from distir.models.gpt import gpt
from distir.transforms import claims, decompose, fuse, instances, pad, padding
from distir.transforms.claims import check_rewrite
from distir.transforms.fuse import fuse as fused
from distir.transforms.pad import paddable
from distir.transforms.padding import check_padding
from distir.transforms.parallel3d import parallel_transform_3d
from distir.transforms.precision import with_dtype
from distir.transforms.training import training_step

Swap = Callable[[pytest.MonkeyPatch], None]


def distribute(f: Function, tp: int = 2) -> None:
    """As `distir.distribute` does: what is found out about other functions does not count."""
    f = Function(f.name, f.inputs, f.ops, f.outputs, f.updates)
    validate(parallel_transform_3d(f, 1, tp, 1, [Device("cpu", k) for k in range(tp)], 1), f)


@functools.cache
def step() -> Function:
    """A training step with 15 words, split in 8."""
    return training_step(gpt(1, 8, 2, 15, 4, 2, Float64), "cross-entropy", "sgd")


@functools.cache
def forward() -> Function:
    """Everything that is fused, taken apart, or whose padding must be filled."""
    f = FunctionMaker("forward")
    x = f.add_input_value("x", Tensor(Float64, (4, 2, 8)), Role("data", 0))
    labels = f.add_input_value("labels", Tensor(Int64, (4, 2)), Role("data", 0))

    def weight(*shape: int) -> Value:
        return f.add_input_value("w", Tensor(Float64, shape), Role("parameter"))

    x = f.emit("LayerNormalization", x, weight(8), weight(8), axis=-1, epsilon=0.25)
    q, k, v = [f.emit("MatMul", x, weight(8, 8)) for _ in range(3)]
    scores = f.emit("MatMul", q, f.emit("Transpose", k, perm=(0, 2, 1)))
    scores = f.emit("Mul", scores, f.emit("Constant", value=(0.25,), shape=(), dtype=Float64))
    mask = f.add_input_value("mask", Tensor(Float64, (1, 2, 2)), Role("constant"))
    x = f.emit("MatMul", f.emit("Softmax", f.emit("Add", scores, mask), axis=-1), v)
    h = f.emit("MatMul", x, weight(8, 8))
    x = f.emit("Mul", h, f.emit("Sigmoid", h))
    half, one, root = [f.emit("Constant", value=(c,), shape=(), dtype=Float64) for c in (0.5, 1.0, 2.0**0.5)]
    h = f.emit("MatMul", x, weight(8, 8))
    erf = f.emit("Add", f.emit("Erf", f.emit("Div", h, root)), one)
    x = f.emit("Mul", f.emit("Mul", h, erf), half)
    rows = f.emit("Reshape", x, shape=(8, 8))
    x = f.emit("Gemm", rows, weight(15, 8), weight(15), transB=1, alpha=0.5, beta=2.0)
    top = f.emit("ReduceMax", x, axes=(1,), keepdims=0)
    mean = f.emit("ReduceMean", x, axes=(0, 1), keepdims=0)
    x = f.emit("Reshape", x, shape=(4, 2, 15))
    loss = f.emit("SoftmaxCrossEntropyLoss", x, labels, ignore_index=3)
    error = f.emit("MSELoss", q, k)
    f.set_outputs([loss, top, mean, error, f.emit("ReduceSum", f.emit("Exp", x), axes=(0, 1, 2), keepdims=0)])
    return f.finalize()


# ---------------------------------------------------------------- seeding


def attributes_lost(*names: str) -> Callable[[Op], Op]:
    return lambda o: Op(o.spec, o.inputs, o.attributes.without(*names), o.outputs)


def given(name: str, change: Callable[[Op], Op]) -> Swap:
    """The op's `decompose` rule sees another op."""

    def swap(patch: pytest.MonkeyPatch) -> None:
        rule = lookup(name).decompose
        patch.setattr(lookup(name), "decompose", lambda f, o: rule(f, change(o)))  # type: ignore[misc]

    return swap


def giving(name: str, change: Callable[[FunctionMaker, list[Value]], Sequence[Value]]) -> Swap:
    """What the op's `decompose` rule gives is changed."""

    def swap(patch: pytest.MonkeyPatch) -> None:
        rule = lookup(name).decompose
        patch.setattr(lookup(name), "decompose", lambda f, o: change(f, list(rule(f, o))))  # type: ignore[misc]

    return swap


def found(name: str, change: Callable[[Any], Any]) -> Swap:
    """What a rule of `fuse` finds is changed."""

    def swap(patch: pytest.MonkeyPatch) -> None:
        rule = getattr(fuse, name)
        patch.setattr(fuse, name, lambda program, op: (x := rule(program, op)) and change(x))

    return swap


def padder(name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Swap:
    return lambda patch: patch.setattr(pad._Padder, name, change(getattr(pad._Padder, name)))


def neutral(value: float) -> Swap:
    return lambda patch: patch.setattr(Spec, "neutral", lambda self, strand: value)


def uncleared(old: Callable[..., Any]) -> Callable[..., Any]:
    def output(self: Any, v: Value) -> Value:
        if self.env[v].type is not v.type:
            self.maker.sources[self.env[v]] = self.graph.shapes[self.graph.index[v]]
        return self.env[v]

    return output


def shorter(old: Callable[..., Any]) -> Callable[..., Any]:
    def output(self: Any, v: Value) -> Value:
        w = old(self, v)
        if w in self.maker.sources:
            first, *rest = self.maker.sources[w]
            self.maker.sources[w] = (first - 1, *rest)
        return w

    return output


def early(old: Callable[..., Any]) -> Callable[..., Any]:
    """Filled from one index before."""

    def filled(self: Any, source: Value, v: Value, dim: int, value: float) -> Value:
        w = old(self, source, v, dim, value)
        for k, op in enumerate(self.maker.ops):
            if w in op.outputs and op.op_type == "FillTail" and w is not v:
                size = self.graph.shapes[self.graph.index[source]][dim] - 1
                new = Attributes({**op.attributes, "size": size})
                self.maker.ops[k] = Op(op.spec, op.inputs, new, op.outputs)
        return w

    return filled


def longer(old: Callable[..., Any]) -> Callable[..., Any]:
    def note(self: Any, op: Op, attributes: dict[str, Any]) -> None:
        before = set(attributes)
        old(self, op, attributes)
        for name in attributes.keys() - before:
            attributes[name] += 1

    return note


def all_zero(old: Callable[..., Any]) -> Callable[..., Any]:
    """All padding is taken for 0."""

    def result(self: Any, op: Op, strand: Any, ins: Any, made: Op) -> None:
        for v in made.outputs:
            self.tail.update({(v, d): 0.0 for d in range(4)})

    return result


def sources_of_inputs(old: Callable[..., Any]) -> Callable[..., Any]:
    def inputs(self: Any, v: Value) -> None:
        old(self, v)
        w = self.env[v]
        if w.role and w.role.source:
            w.role = Role(w.role.kind, w.role.batch, w.type.shape)

    return inputs


def swapped(f: FunctionMaker, row: list[Value]) -> list[Value]:
    return row[::-1]


def plus_one(f: FunctionMaker, row: list[Value]) -> list[Value]:
    like: Any = row[0].type
    one = f.emit("Constant", value=(1e-3,), shape=(), dtype=like.dtype)
    return [f.emit("Add", row[0], one), *row[1:]]


FAULTS: dict[str, tuple[Callable[[], Function], Swap]] = {
    "pad: 0 fills what a maximum is over": (step, neutral(0.0)),
    "pad: -inf fills what a sum is over": (forward, neutral(float("-inf"))),
    "pad: next weights are not cleared": (step, padder("_output", uncleared)),
    "pad: sources one row short": (step, padder("_output", shorter)),
    "pad: inputs whose source is what they became": (step, padder("_input", sources_of_inputs)),
    "pad: filled from one index before": (step, padder("_filled", early)),
    "pad: nothing is filled": (step, padder("_filled", lambda old: lambda self, source, v, dim, value: v)),
    "pad: indices count from the end of the padding": (step, padder("_note_length", lambda old: lambda *_: None)),
    "pad: indices count from one after the end": (step, padder("_note_length", longer)),
    "pad: all padding is taken for 0": (forward, padder("_result", all_zero)),
    "decompose: a cross-entropy without its mask": (forward, given("CrossEntropy", attributes_lost("ignore_index"))),
    "decompose: a mean over ignored labels": (
        *(forward, given("SoftmaxCrossEntropyLoss", attributes_lost("ignore_index"))),
    ),
    "decompose: rows doubled": (
        *(forward, giving("CrossEntropy", lambda f, row: [f.emit("Add", row[0], row[0]), row[1]])),
    ),
    "decompose: results in another order": (forward, giving("CrossEntropy", swapped)),
    "decompose: a Gemm without its scales": (forward, given("Gemm", attributes_lost("alpha", "beta"))),
    "decompose: a mean a little too large": (forward, giving("ReduceMean", plus_one)),
    "decompose: a squared error a little too large": (forward, giving("MSELoss", plus_one)),
    "decompose: a norm with another epsilon": (forward, given("LayerNormalization", attributes_lost("epsilon"))),
    "fuse: Silu as Tanh": (forward, found("find_silu", lambda x: x._replace(op_type="Tanh"))),
    "fuse: Gelu by another formula": (
        *(forward, found("find_gelu", lambda x: x._replace(attributes={"approximate": "tanh"}))),
    ),
    "fuse: attention without its scale": (forward, found("find_attention", lambda x: x._replace(attributes={}))),
    "fuse: attention without its mask": (
        *(forward, found("find_attention", lambda x: x._replace(operands=x.operands[:3]))),
    ),
    "fuse: keys for queries": (
        *(forward, found("find_attention", lambda x: x._replace(operands=[*x.operands[1::-1], *x.operands[2:]]))),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, swap = FAULTS[fault]
    distribute(make())
    swap(monkeypatch)
    with pytest.raises(MismatchError):
        distribute(make())


# ---------------------------------------------------------------- what is tried, and on what


@pytest.mark.parametrize("dtype", [Float32, Float16, BFloat16], ids=repr)
@pytest.mark.parametrize("make", [step, forward])
def test_right_rewrites_pass_in_every_dtype(make: Callable[[], Function], dtype: DType) -> None:
    """Constants are rounded to it, and statistics cast."""
    for tp in (2, 4):
        distribute(with_dtype(make(), dtype), tp)


def test_functions_that_are_called() -> None:
    f = FunctionMaker("main")
    x, labels = f.add_input_value("x", Tensor(Float64, (4, 3))), f.add_input_value("l", Tensor(Int64, (4,)))
    inner = FunctionMaker("inner")
    a, b = [inner.add_input_value(v.name, v.type) for v in (x, labels)]
    inner.set_outputs([inner.emit("SoftmaxCrossEntropyLoss", a, b)])
    f.set_outputs([f.add_op("Call", None, [x, labels], {}, [inner.finalize()])])
    function = f.finalize()
    check_rewrite(function, decompose.decompose(function), evaluate)
    (op,) = decompose.decompose(function).ops
    wrong = Function("inner", op.callee.inputs, op.callee.ops[:-1], op.callee.outputs)  # type: ignore[union-attr]
    bad = Op(op.spec, op.inputs, Attributes({**op.attributes, "callee": wrong}), op.outputs)
    with pytest.raises(MismatchError, match="has lost output"):
        check_rewrite(function, Function("main", function.inputs, (bad,), function.outputs), evaluate)


def test_what_is_alike_is_tried_once_whatever_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On few elements, of programs of any size; nothing the second time."""
    evaluated: list[int] = []

    def counting(op: Op, ins: Sequence[Any], coord: None) -> Any:
        evaluated.append(sum(np.size(x) for x in ins))
        return evaluate(op, ins, coord)

    def tried(layers: int, width: int, words: int) -> int:
        evaluated.clear()
        for module, name in ((claims, "_tried"), (padding, "_tried")):
            monkeypatch.setattr(module, name, type(getattr(module, name))())
        f = training_step(gpt(layers, width, 2, words, 16, 4, Float32), "cross-entropy", "adamw")
        parts = decompose.decompose(f)
        check_rewrite(f, parts, counting)
        check_padding(parts, pad.pad(parts, paddable(parts, 2)), counting)
        assert max(evaluated) < 5000
        return len(evaluated)

    assert tried(1, 64, 509) == tried(4, 256, 4099) > 0
    f = forward()
    check_rewrite(f, fused(f), counting)
    evaluated.clear()
    other = Function(f.name, f.inputs, f.ops, f.outputs)
    check_rewrite(other, fused(other), counting)
    assert evaluated == []


def test_an_exporter_s_attention_is_tried_at_small_sizes() -> None:
    """Keys whose leading dims are merged and parted: shapes among the attributes become small, too."""
    f = FunctionMaker("exported")
    q, k, v = [f.add_input_value(n, Tensor(Float32, (16, 12, 512, 64))) for n in "qkv"]
    merged = f.emit("Reshape", k, shape=(192, 512, 64))
    turned = f.emit("Reshape", f.emit("Transpose", merged, perm=(0, 2, 1)), shape=(16, 12, 64, 512))
    f.set_outputs([f.emit("MatMul", f.emit("Softmax", f.emit("MatMul", q, turned), axis=-1), v)])
    function = f.finalize()
    new = fused(function)
    assert [op.op_type for op in new.ops] == ["Attention"]
    small = instances.small_sizes(function.ops)
    env = {x: Value(x.name, instances.small_type(x, small)) for x in function.inputs}
    made = instances.small_ops(function.ops, env, small)
    assert env[k].type is Tensor(Float64, (3, 2, 6, 4))
    assert made[1].outputs[0].type is Tensor(Float64, (6, 4, 6))
    check_rewrite(function, new, evaluate)


def test_a_weight_whose_gradient_is_a_constant() -> None:
    """Its padding stays 0 from step to step: what is expanded into it is not 0 there."""
    f = FunctionMaker("total")
    x = f.add_input_value("x", Tensor(Float64, (4, 9)), Role("data", 0))
    w, b = [f.add_input_value(n, Tensor(Float64, s), Role("parameter")) for n, s in (("w", (9, 8)), ("b", (8,)))]
    y = f.emit("ReduceSum", f.emit("Add", f.emit("MatMul", x, w), b), axes=(0, 1), keepdims=0)
    loss = f.emit("Add", y, f.emit("ReduceSum", w, axes=(0, 1), keepdims=0))
    f.set_outputs([loss])
    step = training_step(f.finalize(), loss.name, "sgd")
    padded = pad.pad(step, paddable(step, 2))
    assert any(v.role and v.role.source for v in padded.inputs)
    check_padding(step, padded, evaluate)
    new = next(v for v in padded.outputs if v in padded.updates and padded.updates[v].name == "w")
    seen: dict[Value, Any] = {}
    arrays = [np.ones(v.type.shape) for v in step.inputs]  # type: ignore[union-attr]
    SequentialExecutor(tap=lambda v, x: seen.setdefault(v, x)).compute(padded, arrays)
    assert np.all(seen[new][9:] == 0)
    assert np.any(seen[new][:9] != 1)
