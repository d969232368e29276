"""Faults in rewrites, as data: in which program each shows, and what is changed in the rules.

A case makes a program by rewrites, checks it as `distir` does, and gives what it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from distir.api import masks
from distir.api.compilation import validate
from distir.api.masks import with_causal_attention
from distir.api.rewrites import check_origins
from distir.executor.reference.sequential import SequentialExecutor, evaluate
from distir.ir import Device, Function, FunctionMaker, Role, Value, verify
from distir.ir.function import Attributes, Op
from distir.ir.spec import Spec, lookup
from distir.ir.type import Bool, Float32, Float64, Int64, Tensor
from distir.models.gpt import gpt
from distir.ops.rules import scalar, shape_of, tensor
from distir.transforms.differentiation.training import training_step
from distir.transforms.parallel3d import parallel_transform_3d
from distir.transforms.rank import recompose
from distir.transforms.rewriting import (
    causal,
    cleanup,
    decompose,
    fuse,
    fuse_attention,
    fuse_gelu,
    fuse_rms,
    precision,
    touch_rows,
)
from distir.transforms.sharding import pad

Swap = Callable[[pytest.MonkeyPatch], None]

# ---------------------------------------------------------------- programs


def weight(f: FunctionMaker, *shape: int) -> Value:
    return f.add_input_value("w", Tensor(Float64, shape), Role("parameter"))


@functools.cache
def written_step() -> Function:
    """A training step with 15 words, split in 8."""
    return training_step(gpt(1, 8, 2, 15, 4, 2, Float64), "cross-entropy", "sgd")


@functools.cache
def total() -> Function:
    """A training step whose loss is a sum of products, and of their weight (9, 9): its gradient is a constant more."""
    f = FunctionMaker("total")
    x = f.add_input_value("x", Tensor(Float64, (4, 9)), Role("data", 0))
    w, b = [f.add_input_value(n, Tensor(Float64, s), Role("parameter")) for n, s in (("w", (9, 9)), ("b", (9,)))]
    y = f.emit("ReduceSum", f.emit("Add", f.emit("MatMul", x, w), b), axes=(0, 1), keepdims=0)
    loss = f.emit("Add", y, f.emit("ReduceSum", w, axes=(0, 1), keepdims=0))
    f.set_outputs([loss])
    return training_step(f.finalize(), loss.name, "sgd")


@functools.cache
def forward() -> Function:
    """All ops that are fused, decomposed, or need a fill value in their padding."""
    f = FunctionMaker("forward")
    x = f.add_input_value("x", Tensor(Float64, (4, 2, 8)), Role("data", 0))
    labels = f.add_input_value("labels", Tensor(Int64, (4, 2)), Role("data", 0))
    x = f.emit("LayerNormalization", x, weight(f, 8), weight(f, 8), axis=-1, epsilon=0.25)
    x = f.emit("RMSNormalization", x, weight(f, 8), axis=-1, epsilon=0.5)
    q, k, v = [f.emit("MatMul", x, weight(f, 8, 8)) for _ in range(3)]
    scores = f.emit("MatMul", q, f.emit("Transpose", k, perm=(0, 2, 1)))
    scores = f.emit("Mul", scores, scalar(f, 0.25, x))
    mask = f.add_input_value("mask", Tensor(Float64, (1, 2, 2)), Role("constant"))
    x = f.emit("MatMul", f.emit("Softmax", f.emit("Add", scores, mask), axis=-1), v)
    h = f.emit("MatMul", x, weight(f, 8, 8))
    x = f.emit("Mul", h, f.emit("Sigmoid", h))
    mean = f.emit("ReduceMean", f.emit("Mul", x, x), axes=(2,), keepdims=1)
    root = f.emit("Sqrt", f.emit("Add", mean, scalar(f, 0.125, x)))
    x = f.emit("Mul", weight(f, 8), f.emit("Mul", x, f.emit("Reciprocal", root)))
    half, one, root = [scalar(f, c, x) for c in (0.5, 1.0, 2.0**0.5)]
    h = f.emit("MatMul", x, weight(f, 8, 8))
    erf = f.emit("Add", f.emit("Erf", f.emit("Div", h, root)), one)
    x = f.emit("Mul", f.emit("Mul", h, erf), half)
    rows = f.emit("Reshape", x, shape=(8, 8))
    x = f.emit("Gemm", rows, weight(f, 15, 8), weight(f, 15), transB=1, alpha=0.5, beta=2.0)
    top = f.emit("ReduceMax", x, axes=(1,), keepdims=0)
    mean = f.emit("ReduceMean", x, axes=(0, 1), keepdims=0)
    x = f.emit("Reshape", x, shape=(4, 2, 15))
    loss = f.emit("SoftmaxCrossEntropyLoss", x, labels, ignore_index=3)
    error = f.emit("MSELoss", q, k)
    f.set_outputs([loss, top, mean, error, f.emit("ReduceSum", f.emit("Exp", x), axes=(0, 1, 2), keepdims=0)])
    return f.finalize()


@functools.cache
def near_misses() -> Function:
    """Near misses of fused groups, and attention in other forms: filled, scaled twice, square."""
    f = FunctionMaker("near")
    t = Tensor(Float64, (4, 4, 4))
    x, y = [f.add_input_value(n, t, Role("data", 0)) for n in "xy"]
    a = f.emit("MatMul", x, weight(f, 4, 4))
    low = scalar(f, -1e30, x)
    half, one, third = [scalar(f, c, x) for c in (0.5, 1.0, 1 / 3)]
    seen = f.add_input_value("seen", Tensor(Bool, (4, 4)), Role("constant"))
    plain = f.emit("MatMul", f.emit("Mul", y, half), f.emit("Mul", f.emit("Transpose", a, perm=(0, 2, 1)), third))
    filled = f.emit("Where", seen, plain, low)
    gain = weight(f, 4)
    more = f.emit("Add", f.emit("ReduceMean", f.emit("Mul", x, x), axes=(2,), keepdims=1), half)
    less = f.emit("Sub", f.emit("ReduceMean", f.emit("Mul", x, x), axes=(2,), keepdims=1), scalar(f, -0.5, x))
    other = f.emit("MatMul", y, a)  # keys that are not turned
    f.set_outputs(
        [
            f.emit("Mul", x, f.emit("Sigmoid", y)),
            f.emit("Mul", f.emit("Mul", x, half), f.emit("Add", f.emit("Tanh", f.emit("Mul", x, half)), one)),
            f.emit("MatMul", f.emit("Softmax", filled, axis=-1), x),
            f.emit("Mul", gain, f.emit("Mul", x, f.emit("Reciprocal", f.emit("Sqrt", less)))),
            f.emit("Mul", gain, f.emit("Mul", y, f.emit("Reciprocal", f.emit("Sqrt", more)))),
            f.emit("MatMul", f.emit("Softmax", other, axis=-1), x),
        ]
    )
    return f.finalize()


@functools.cache
def untidy() -> Function:
    """Repeated ops, views that cancel, and constants to be folded."""
    f = FunctionMaker("untidy")
    x, y = [f.add_input_value(n, Tensor(Float64, (3, 3, 3)), Role("data", 0)) for n in "xy"]
    turned = f.emit("Transpose", x, perm=(1, 2, 0))
    again = f.emit("Exp", f.emit("Transpose", turned, perm=(2, 0, 1)))
    twice = f.emit("Exp", f.emit("Transpose", turned, perm=(1, 2, 0)))
    three = f.emit("Add", scalar(f, 1.25, x), scalar(f, 1.75, x))
    sums = [
        f.emit("ReduceSum", f.emit("Sub", *row), axes=(axis,), keepdims=0)
        for axis in (0, 1)
        for row in ((x, y), (y, x))
    ]
    maxima = f.emit("ReduceMax", f.emit("Sub", x, y), axes=(0,), keepdims=0)
    f.set_outputs([f.emit("Mul", v, three) for v in (again, twice, turned, *sums, maxima)])
    return f.finalize()


@functools.cache
def attention() -> tuple[Function, dict[Value, Any]]:
    """Attention with known masks: causal, causal with one column more, of positions, and without."""
    f = FunctionMaker("masked")
    q, k, v = [f.add_input_value(n, Tensor(Float64, (2, 3, 4, 4)), Role("data", 0)) for n in "qkv"]
    lowest = float(np.finfo(np.float64).min)
    window = np.where(np.tri(4, k=1, dtype=bool), 0, lowest)
    slope = np.where(np.tri(4, dtype=bool), -0.5 * np.abs(np.subtract.outer(np.arange(4), np.arange(4))), lowest)
    arrays: dict[Value, Any] = {}
    outputs: list[Value] = []
    for x in (np.triu(np.full((4, 4), lowest), 1), window, window.T, slope, np.zeros((4, 4)), np.eye(4)):
        mask = f.add_input_value("mask", Tensor(Float64, (4, 4)), Role("constant"))
        arrays[mask] = x
        scores = f.emit("Mul", f.emit("MatMul", q, f.emit("Transpose", k, perm=(0, 1, 3, 2))), scalar(f, 0.5, q))
        outputs.append(f.emit("MatMul", f.emit("Softmax", f.emit("Add", scores, mask), axis=-1), v))
    f.set_outputs(outputs)
    return f.finalize(), arrays


@functools.cache
def parts() -> Function:
    """Ops that are recomposed: products and biases, transposed gradients."""
    f = FunctionMaker("parts")
    x, d, w, c = [f.add_input_value(n, Tensor(Float64, (4, 4))) for n in ("x", "d", "w", "c")]
    b = f.add_input_value("b", Tensor(Float64, (4,)))
    turned = f.emit("Transpose", w, perm=(1, 0))
    f.set_outputs(
        [
            f.emit("Add", f.emit("MatMul", x, turned), b),
            f.emit("Add", c, f.emit("MatMul", x, w)),
            f.emit("Transpose", f.emit("MatMulGradWeight", x, d), perm=(1, 0)),
        ]
    )
    return f.finalize()


@functools.cache
def picked() -> Function:
    """SGD of two stacks of tables, of one of them with several indices a sample."""
    f = FunctionMaker("picked")
    outputs: list[Value] = []
    for pooling in (False, True):
        tables = f.add_input_value("tables", Tensor(Float64, (2, 8, 3)), Role("parameter"))
        index = f.add_input_value("index", Tensor(Int64, (2, 2, 2) if pooling else (2, 2)))
        d, other = [f.add_input_value("d", Tensor(Float64, (2, 2, 3))) for _ in range(2)]
        slope = f.emit("LookupGrad", d, index, rows=8, pooling=pooling)
        outputs += [f.emit("SGD", tables, slope, lr=0.5), other]
    f.set_outputs(outputs)
    return f.finalize()


@functools.cache
def trained() -> Function:
    """All ops with a gradient rule that rewrites make or decompose, and some others."""
    f = FunctionMaker("trained")
    x = f.add_input_value("x", Tensor(Float64, (4, 2, 8)), Role("data", 0))
    h = f.emit("LayerNormalization", x, weight(f, 8), weight(f, 8), axis=-1)
    q, k, v = [f.emit("MatMul", h, weight(f, 8, 8)) for _ in range(3)]
    bias = f.add_input_value("bias", Tensor(Float64, (2, 2)), Role("parameter"))
    h = f.emit("Attention", q, k, v, bias, scale=0.5)[0]
    h = f.emit("Gelu", f.emit("MatMul", h, weight(f, 8, 8)))
    h = f.emit("Silu", f.emit("Sub", h, f.emit("MatMul", x, weight(f, 8, 8))))
    h = f.emit("RMSNormalization", h, weight(f, 8), axis=-1)
    h = f.emit("Softmax", f.emit("Div", h, f.emit("Exp", f.emit("Tanh", h))), axis=-1)
    f.set_outputs([f.emit("Gemm", f.emit("Reshape", h, shape=(8, 8)), weight(f, 5, 8), weight(f, 5), transB=1)])
    return f.finalize()


@functools.cache
def small_floats() -> Function:
    """A program with casts and statistics."""
    f = FunctionMaker("floats")
    x = f.add_input_value("x", Tensor(Float32, (4, 8)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float32, (8, 8)), Role("parameter"))
    h = f.emit("Cast", f.emit("MatMul", x, w), to=Float64)
    h = f.emit("Sub", f.emit("Cast", f.emit("Mul", h, scalar(f, 0.3, h)), to=Float32), x)
    f.set_outputs([h, f.emit("Exp", w)])
    f.updates = {f.ops[-1].outputs[0]: w}
    return f.finalize()


def fresh(f: Function) -> Function:
    """Clears the analyses cached with the function."""
    return Function(f.name, f.inputs, f.ops, f.outputs, f.updates)


# ---------------------------------------------------------------- cases


class Case(NamedTuple):
    """`make` makes a program by rewrites; `check` raises MismatchError if the program is wrong."""

    make: Callable[[], Function]
    check: Callable[[Function], None]
    given: Callable[[], Mapping[str, Any]] = dict
    """Arrays of inputs by name, where random ones are not suitable."""


def spread(source: Callable[[], Function], tp: int = 2, given: Callable[[], Mapping[str, Any]] = dict) -> Case:
    """Distributed, and validated against the source."""
    sources: list[Function] = []

    def make() -> Function:
        sources[:] = [fresh(source())]
        return parallel_transform_3d(sources[0], 1, tp, 1, [Device("cpu", k) for k in range(tp)], 1)

    def check(program: Function) -> None:
        verify(program)
        validate(program, sources[0])

    return Case(make, check, given)


def indices() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    ids, labels = rng.integers(0, 15, (2, 2, 4))
    ids[0, 1], labels[1, 2] = -1, -100
    return {"input_ids": ids, "labels": labels, "position_ids": np.arange(4)[None]}


def labels() -> dict[str, Any]:
    return {"labels": np.array([[0, 3], [3, 14], [2, 5], [3, 1]])}


STEP, FORWARD = spread(written_step, given=indices), spread(forward, given=labels)
TOTAL = spread(total)
NEAR = spread(near_misses, tp=1, given=lambda: {"seen": np.tri(4, dtype=bool)})
UNTIDY = Case(lambda: cleanup.fold(fresh(untidy()), evaluate), check_origins)
MASKED = Case(
    lambda: with_causal_attention(fresh(attention()[0]), attention()[1]),
    check_origins,
    lambda: {v.name: x for v, x in attention()[1].items()},
)
TABLES = Case(lambda: touch_rows.touch_rows(fresh(picked())), check_origins)
PARTS = Case(lambda: recompose.recompose(fresh(parts())), check_origins)
TRAINED = Case(lambda: training_step(fresh(trained()), "cross-entropy", "sgd", gradients=True), check_origins)
FLOATS = Case(lambda: precision.with_dtype(fresh(small_floats()), Float64), check_origins)


def arrays_of(case: Case, program: Function) -> list[np.ndarray]:
    """Arrays for a program's inputs, in the shapes of its source."""
    given = case.given()
    rows: list[np.ndarray] = []
    for k, v in enumerate(program.inputs):
        rng = np.random.default_rng(k)
        shape = (v.role and v.role.source) or shape_of(v)
        drawn = rng.integers(0, 5, shape) if tensor(v).dtype.kind == "int" else 0.4 * rng.standard_normal(shape)
        rows.append(np.asarray(given.get(v.name, drawn)))
    return rows


def computed(program: Function, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Its outputs; next values of inputs with their padding, which the next step uses."""
    uncut = Function(program.name, program.inputs, program.ops, program.outputs, program.updates)
    states = zip(program.outputs, SequentialExecutor().compute(uncut, arrays), strict=True)
    after = {program.updates[v]: x for v, x in states if v in program.updates}
    return [*SequentialExecutor().compute(program, arrays), *[after[v] for v in program.inputs if v in after]]


def differs(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> bool:
    return len(got) != len(want) or any(
        a.shape != b.shape or not np.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
        for a, b in zip(got, want, strict=True)
    )


# ---------------------------------------------------------------- how faults are seeded


def attributes_lost(*names: str) -> Callable[[Op], Op]:
    return lambda o: Op(o.spec, o.inputs, o.attributes.without(*names), o.outputs, o.of)


def replaced(module: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Swap:
    """A function of a module, changed."""
    return lambda patch: patch.setattr(module, name, change(getattr(module, name)))


def given(name: str, change: Callable[[Op], Op], rule: str = "decompose") -> Swap:
    """The op's rule sees another op."""

    def swap(patch: pytest.MonkeyPatch) -> None:
        old = getattr(lookup(name), rule)
        patch.setattr(lookup(name), rule, lambda f, o, *d: old(f, change(o), *d))

    return swap


def giving(name: str, change: Callable[[FunctionMaker, list[Any]], Sequence[Any]], rule: str = "decompose") -> Swap:
    """The result of the op's rule is changed."""

    def swap(patch: pytest.MonkeyPatch) -> None:
        old = getattr(lookup(name), rule)
        patch.setattr(lookup(name), rule, lambda f, o, *d: change(f, list(old(f, o, *d))))

    return swap


def found(name: str, change: Callable[[Any], Any]) -> Swap:
    """The match that a rule of `fuse` returns is changed."""
    return replaced(fuse, name, lambda old: lambda program, op: (x := old(program, op)) and change(x))


def padder(name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Swap:
    return replaced(pad.Padder, name, change)


def neutral(value: float) -> Swap:
    return lambda patch: patch.setattr(Spec, "neutral", lambda self, mapping: value)


def maker(module: Any, change: Callable[[FunctionMaker], None]) -> Swap:
    """The result of a pass is changed."""

    class Changed(FunctionMaker):
        def finalize(self) -> Function:
            change(self)
            return super().finalize()

    return lambda patch: patch.setattr(module, "FunctionMaker", Changed)


def uncleared(old: Callable[..., Any]) -> Callable[..., Any]:
    def output(self: Any, v: Value) -> Value:
        w = self._now(v)
        if w.type is not v.type:
            self.maker.sources[w] = self.graph.shapes[self.graph.index[v]]
        return w

    return output


def uncleared_updates(patch: pytest.MonkeyPatch) -> None:
    """Neither what an optimizer takes is cleared, nor what it gives."""
    patch.setattr(pad.Padder, "_clear", pad.Padder._fill)
    padder("_output", uncleared)(patch)


def shorter(old: Callable[..., Any]) -> Callable[..., Any]:
    def output(self: Any, v: Value) -> Value:
        w = old(self, v)
        if w in self.maker.sources:
            first, *rest = self.maker.sources[w]
            self.maker.sources[w] = (first - 1, *rest)
        return w

    return output


def early(old: Callable[..., Any]) -> Callable[..., Any]:
    """The fill begins one index early."""

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
    """All padding is assumed to be 0."""

    def result(self: Any, op: Op, mapping: Any, ins: Any, made: Op) -> None:
        for v in made.outputs:
            self.tail.update({(v, d): 0.0 for d in range(4)})

    return result


def sources_of_inputs(old: Callable[..., Any]) -> Callable[..., Any]:
    def inputs(self: Any, v: Value) -> None:
        old(self, v)
        w = self._now(v)
        if w.role and w.role.source:
            w.role = Role(w.role.kind, w.role.batch, w.type.shape)

    return inputs


def plus(number: float) -> Callable[[FunctionMaker, list[Value]], Sequence[Value]]:
    return lambda f, row: [f.emit("Add", row[0], scalar(f, number, row[0])), *row[1:]]


def times(number: float, k: int = 0) -> Callable[[FunctionMaker, list[Any]], Sequence[Any]]:
    return lambda f, row: [f.emit("Mul", v, scalar(f, number, v)) if i == k else v for i, v in enumerate(row)]


def turned(*order: int) -> Callable[[FunctionMaker, list[Any]], Sequence[Any]]:
    return lambda f, row: [row[i] for i in order]


def edited(kind: str, change: Callable[[Op], Op]) -> Callable[[FunctionMaker], None]:
    """Each op of a kind, changed."""

    def change_all(maker: FunctionMaker) -> None:
        maker.ops[:] = [change(op) if op.op_type == kind else op for op in maker.ops]

    return change_all


def rotated_updates(maker: FunctionMaker) -> None:
    """The next values of two inputs of one type swapped."""
    rows = list(maker.updates.items())
    (a, v), (b, w) = next((x, y) for x in rows for y in rows if x is not y and x[1].type is y[1].type)
    maker.updates |= {a: w, b: v}


def swapped_operands(op: Op) -> Op:
    return Op(op.spec, op.inputs[::-1], op.attributes, op.outputs, op.of)


def with_attributes(**new: Any) -> Callable[[Op], Op]:
    return lambda op: Op(op.spec, op.inputs, Attributes({**op.attributes, **new}), op.outputs, op.of)


def as_op(kind: str) -> Callable[[Any], Any]:
    return lambda x: x._replace(op_type=kind, attributes={})


def joined(change: Callable[[Op], Op]) -> Swap:
    def changed(old: Callable[..., Any]) -> Callable[..., Any]:
        return lambda op, *row: op if (new := old(op, *row)) is op else change(new)

    return replaced(recompose, "_joined", changed)


def touched(change: Callable[[Any, Any], Any]) -> Swap:
    """Of what SGD on the rows used is found for: (program, found) -> found."""

    def changed(old: Callable[..., Any]) -> Callable[..., Any]:
        return lambda program, op: None if (found := old(program, op)) is None else change(program, found)

    return replaced(touch_rows, "find_row_update", changed)


def another_operand(k: int) -> Swap:
    """Of the rows used: operand k is another input of its type."""

    def other(program: Any, found: Any) -> Any:
        operands = list(found.operands)
        operands[k] = next(v for v in program.function.inputs if v.type is operands[k].type and v is not operands[k])
        return found._replace(operands=operands)

    return touched(other)


def any_silu(program: Any, op: Op) -> Any:
    if op.op_type == "Mul":
        for x, y in (op.inputs, op.inputs[::-1]):
            if (made := program.made_by(y, "Sigmoid")) is not None:
                return fuse_gelu.Found(op.outputs[0], frozenset({op, made}), "Silu", [x], {})
    return None


def any_factor(old: Callable[..., Any]) -> Callable[..., Any]:
    """What is divided by the root is taken for what the root is of."""
    return lambda program, op, v, norm, x: old(program, op, v, norm, x if norm.x else (*x, *op.inputs))


def any_sum(trail: Any, v: Value) -> Any:
    """Epsilon is added, or taken away."""
    op = trail.step(v, "Add", "Sub")
    mean = op and trail.step(op.inputs[0], "ReduceMean")
    square = mean and trail.step(mean.inputs[0], "Mul")
    epsilon = op and trail.program.number(op.inputs[1])
    return square and (square.inputs[0], mean.attributes["axes"][0], epsilon)


def straight(f: FunctionMaker, o: Op, d: Value, *saved: None) -> list[Value]:
    """The gradients of x times the scale, as if that were a constant."""
    x, gain = o.inputs
    slope = f.emit("Mul", f.emit("Mul", d, gain), o.outputs[1])
    rows = f.emit("Mul", d, f.emit("Mul", x, o.outputs[1]))
    return [slope, f.emit("ReduceSum", rows, axes=(0, 1), keepdims=0)]


def mask_changed(**new: Any) -> Swap:
    def changed(old: Callable[..., Any]) -> Callable[..., Any]:
        def unmasked(trail: Any, v: Value) -> Any:
            inner, mask = old(trail, v)
            return inner, mask and mask._replace(**{k: x(mask) for k, x in new.items()})

        return unmasked

    return replaced(fuse_attention, "_unmasked", changed)


def said(rule: Callable[[np.ndarray], bool]) -> Swap:
    return replaced(masks, "_is_causal", lambda old: rule)


def mask_gone(**new: Any) -> Swap:
    """Attention without its mask gets other attributes."""
    return replaced(causal, "_without_mask", lambda old: lambda op, instead: with_attributes(**new)(old(op, instead)))


FAULTS: dict[str, tuple[Case, Swap]] = {
    # pad
    "pad: 0 fills what a maximum is over": (STEP, neutral(0.0)),
    "pad: -inf fills what a sum is over": (FORWARD, neutral(float("-inf"))),
    "pad: next weights are not cleared": (TOTAL, uncleared_updates),
    "pad: sources one row short": (STEP, padder("_output", shorter)),
    "pad: inputs whose source is what they became": (STEP, padder("_input", sources_of_inputs)),
    "pad: filled from one index before": (STEP, padder("_filled", early)),
    "pad: nothing is filled": (STEP, padder("_filled", lambda old: lambda self, source, v, dim, value: v)),
    "pad: indices count from the end of the padding": (STEP, padder("_note_length", lambda old: lambda *_: None)),
    "pad: indices count from one after the end": (STEP, padder("_note_length", longer)),
    "pad: all padding is taken for 0": (FORWARD, padder("_result", all_zero)),
    "pad: weights that are not updated": (STEP, maker(pad, lambda f: f.updates.clear())),
    "pad: next weights of other inputs": (STEP, maker(pad, rotated_updates)),
    # decompose
    "decompose: a cross-entropy without its mask": (FORWARD, given("CrossEntropy", attributes_lost("ignore_index"))),
    "decompose: a mean over ignored labels": (
        FORWARD,
        given("SoftmaxCrossEntropyLoss", attributes_lost("ignore_index")),
    ),
    "decompose: rows doubled": (FORWARD, giving("CrossEntropy", times(2.0))),
    "decompose: results in another order": (FORWARD, giving("CrossEntropy", turned(1, 0))),
    "decompose: the mean of another label": (
        FORWARD,
        given("SoftmaxCrossEntropyLoss", with_attributes(ignore_index=2)),
    ),
    "decompose: a sum for a mean": (FORWARD, given("SoftmaxCrossEntropyLoss", with_attributes(reduction="sum"))),
    "decompose: a Gemm without its scales": (FORWARD, given("Gemm", attributes_lost("alpha", "beta"))),
    "decompose: a Gemm that scales the bias as the product": (FORWARD, given("Gemm", with_attributes(beta=0.5))),
    "decompose: a mean a little too large": (FORWARD, giving("ReduceMean", plus(1e-3))),
    "decompose: a mean over one more": (FORWARD, giving("ReduceMean", times(120 / 121))),
    "decompose: a squared error a little too large": (FORWARD, giving("MSELoss", plus(1e-3))),
    "decompose: a squared error not divided": (FORWARD, given("MSELoss", with_attributes(reduction="sum"))),
    "decompose: a norm with another epsilon": (FORWARD, given("LayerNormalization", attributes_lost("epsilon"))),
    "decompose: a root-mean-square norm with another epsilon": (
        *(FORWARD, given("RMSNormalization", attributes_lost("epsilon"))),
    ),
    "decompose: a root-mean-square norm doubled": (FORWARD, giving("RMSNormalization", times(2.0))),
    "decompose: gain and bias swapped": (
        FORWARD,
        given("LayerNormalization", lambda o: Op(o.spec, (o.inputs[0], *o.inputs[:0:-1]), o.attributes, o.outputs)),
    ),
    "decompose: means multiplied by their count": (
        FORWARD,
        maker(decompose, edited("Div", lambda op: Op(lookup("Mul"), op.inputs, op.attributes, op.outputs, op.of))),
    ),
    # fuse
    "fuse: Silu as Tanh": (FORWARD, found("find_silu", as_op("Tanh"))),
    "fuse: Silu as Relu": (FORWARD, found("find_silu", as_op("Relu"))),
    "fuse: a Sigmoid of another value in Silu": (NEAR, lambda patch: patch.setattr(fuse, "find_silu", any_silu)),
    "fuse: Gelu by another formula": (
        *(FORWARD, found("find_gelu", lambda x: x._replace(attributes={"approximate": "tanh"}))),
    ),
    "fuse: Gelu as Silu": (FORWARD, found("find_gelu", as_op("Silu"))),
    "fuse: Gelu whatever the constants": (
        NEAR,
        replaced(fuse_gelu, "_close", lambda old: lambda got, *_: got is not None),
    ),
    "fuse: attention without its scale": (FORWARD, found("find_attention", lambda x: x._replace(attributes={}))),
    "fuse: attention scaled as its square": (
        *(FORWARD, found("find_attention", lambda x: x._replace(attributes={"scale": x.attributes["scale"] ** 2}))),
    ),
    "fuse: attention without its mask": (
        *(FORWARD, found("find_attention", lambda x: x._replace(operands=x.operands[:3]))),
    ),
    "fuse: keys for queries": (
        *(FORWARD, found("find_attention", lambda x: x._replace(operands=[*x.operands[1::-1], *x.operands[2:]]))),
    ),
    "fuse: queries for values": (
        *(
            FORWARD,
            found("find_attention", lambda x: x._replace(operands=[*x.operands[:2], x.operands[0], *x.operands[3:]])),
        ),
    ),
    "fuse: a condition turned round": (NEAR, mask_changed(keep=lambda mask: not mask.keep)),
    "fuse: what is hidden gets 0": (NEAR, mask_changed(low=lambda mask: mask.low and 0.0)),
    "fuse: keys that are not turned": (NEAR, replaced(fuse_attention, "_keys", lambda old: lambda program, v: v)),
    "fuse: causal attention for a mask": (
        FORWARD,
        found(
            "find_attention", lambda x: x._replace(operands=x.operands[:3], attributes={**x.attributes, "causal": True})
        ),
    ),
    "fuse: a norm with another epsilon": (
        *(FORWARD, found("find_rms_norm", lambda x: x._replace(attributes={**x.attributes, "epsilon": 0.25}))),
    ),
    "fuse: a norm of another value": (NEAR, replaced(fuse_rms, "_times", any_factor)),
    "fuse: a norm that is centred": (
        FORWARD,
        found("find_rms_norm", lambda x: x._replace(op_type="LayerNormalization")),
    ),
    "fuse: a Sub for the Add of epsilon": (NEAR, lambda patch: patch.setattr(fuse_rms, "_mean_square", any_sum)),
    # cleanup
    "cleanup: any two transposes undo each other": (
        UNTIDY,
        replaced(cleanup, "_undone", lambda old: lambda op, makers: (b := makers.get(op.inputs[0])) and b.inputs[0]),
    ),
    "cleanup: ops alike but for attributes are merged": (
        UNTIDY,
        replaced(
            cleanup, "_key", lambda old: lambda op: (op.spec, op.inputs, op.op_type == "Constant" and op.attributes)
        ),
    ),
    "cleanup: ops alike but for the order of operands are merged": (
        UNTIDY,
        replaced(cleanup, "_key", lambda old: lambda op: (op.spec, op.attributes, frozenset(op.inputs))),
    ),
    "cleanup: ops alike but for their type are merged": (
        UNTIDY,
        replaced(cleanup, "_key", lambda old: lambda op: (op.attributes, op.inputs)),
    ),
    "cleanup: constants are folded with another op": (
        UNTIDY,
        lambda patch: patch.setattr(
            *(cleanup, "_folded", _folded_wrongly(cleanup._folded)),
        ),
    ),
    # causal
    "causal: every mask": (MASKED, said(lambda x: True)),
    "causal: a mask that shows a column more": (
        MASKED,
        said(lambda x: bool(np.all(np.where(np.tri(*x.shape[-2:], k=1, dtype=bool), x == 0, x < -1e30)))),
    ),
    "causal: a mask that looks ahead": (
        MASKED,
        said(lambda x: bool(np.all(np.where(np.tri(*x.shape[-2:], dtype=bool).T, x == 0, True)))),
    ),
    "causal: what is seen is not looked at": (
        MASKED,
        said(lambda x: bool(np.all(np.where(np.tri(*x.shape[-2:], dtype=bool), True, x < -1e30)))),
    ),
    "causal: without its scale": (MASKED, mask_gone(scale=1.0)),
    "causal: said of a mask that hides nothing": (MASKED, mask_gone(causal=True)),
    "causal: not said": (MASKED, mask_gone(causal=False)),
    # recompose
    "recompose: a product that is not turned": (PARTS, joined(attributes_lost("transB"))),
    "recompose: operands swapped": (
        PARTS,
        joined(lambda op: Op(op.spec, (op.inputs[1], op.inputs[0], *op.inputs[2:]), op.attributes, op.outputs)),
    ),
    "recompose: the bias twice": (
        PARTS,
        joined(lambda op: with_attributes(beta=2.0)(op) if op.op_type == "Gemm" else op),
    ),
    "recompose: the bias is lost": (PARTS, joined(lambda op: Op(op.spec, op.inputs[:2], op.attributes, op.outputs))),
    # touch_rows
    "touch_rows: another rate": (
        TABLES,
        touched(lambda program, x: x._replace(attributes={**x.attributes, "lr": 0.25})),
    ),
    "touch_rows: other tables": (TABLES, another_operand(0)),
    "touch_rows: another gradient": (TABLES, another_operand(2)),
    # precision
    "precision: operands swapped": (FLOATS, maker(precision, edited("Sub", swapped_operands))),
    "precision: a constant rounded": (FLOATS, maker(precision, edited("Constant", with_attributes(value=(0.25,))))),
    "precision: a sum for a difference": (
        *(FLOATS, maker(precision, edited("Sub", lambda op: Op(lookup("Add"), op.inputs, op.attributes, op.outputs)))),
    ),
    # gradients
    "grad: Gelu's by another formula": (TRAINED, given("Gelu", with_attributes(approximate="tanh"), "grad")),
    "grad: Silu's is Sigmoid's": (
        TRAINED,
        lambda patch: patch.setattr(lookup("Silu"), "grad", lambda f, o, d: [f.emit("SigmoidGrad", o.outputs[0], d)]),
    ),
    "grad: attention's without its scale": (TRAINED, given("Attention", attributes_lost("scale"), "grad")),
    "grad: keys' for queries'": (TRAINED, giving("Attention", turned(1, 0, 2, 3), "grad")),
    "grad: none for a trained mask": (
        TRAINED,
        giving("Attention", lambda f, row: [*row[:3], f.emit("ZerosLike", row[3])], "grad"),
    ),
    "grad: gain's for bias'": (TRAINED, giving("LayerNorm", turned(0, 2, 1), "grad")),
    "grad: a norm's as if each row were as long": (
        TRAINED,
        lambda patch: patch.setattr(lookup("RMSNorm"), "grad", straight),
    ),
    "grad: a gain's doubled": (TRAINED, giving("RMSNorm", times(2.0, 1), "grad")),
    "grad: the rows of a cross-entropy doubled": (
        TRAINED,
        giving("CrossEntropy", lambda f, row: [f.emit("Add", row[0], row[0]), None], "grad"),
    ),
    "grad: a difference's as a sum's": (TRAINED, giving("Sub", lambda f, row: [row[0], f.emit("Neg", row[1])], "grad")),
    "grad: Softmax' as LogSoftmax'": (
        TRAINED,
        lambda patch: patch.setattr(
            lookup("Softmax"),
            "grad",
            lambda f, o, d: [f.add_op("LogSoftmaxGrad", None, [o.outputs[0], d], o.attributes)],
        ),
    ),
}


def _folded_wrongly(old: Callable[..., Any]) -> Callable[..., Any]:
    def folded(op: Op, numbers: dict[Value, Any], evaluate: Any) -> Op:
        new = old(op, numbers, evaluate)
        return new if new is op else with_attributes(value=tuple([x + 1 for x in new.attributes["value"]]))(new)

    return folded
