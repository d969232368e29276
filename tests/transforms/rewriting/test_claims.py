"""Tests what rewrites claim: every law, every definition and every gradient rule, on random instances."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.api.compilation import validate
from distir.api.masks import with_causal_attention
from distir.api.rewrites import CHECKS, check_origins, rewritten
from distir.executor.reference.sequential import SequentialExecutor, evaluate
from distir.ir import Device, Function, FunctionMaker, Role, Value
from distir.ir.definition import definition_of
from distir.ir.errors import MismatchError, ModelWarning
from distir.ir.function import Attributes, Op
from distir.ir.spec import lookup
from distir.ir.type import BFloat16, Bool, DType, Float16, Float32, Float64, Int64, Tensor
from distir.models.gpt import gpt
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation.batch_statistics import with_batch_statistics
from distir.transforms.differentiation.draw_dropout import with_dropout
from distir.transforms.differentiation.grad import grad
from distir.transforms.differentiation.training import (
    SGD,
    training_step,
    with_loss,
    with_scaled_loss,
    with_updates,
)
from distir.transforms.parallel3d import parallel_transform_3d, source_of
from distir.transforms.pipeline.evaluation import evaluation
from distir.transforms.rank.project import project
from distir.transforms.rank.recompose import recompose
from distir.transforms.rewriting import claims, cleanup, decompose, instances
from distir.transforms.rewriting.claims import check_definition, check_gradient, check_rewrite
from distir.transforms.rewriting.fuse import fuse as fused
from distir.transforms.rewriting.laws import REWRITES, Law, Origin, origins
from distir.transforms.rewriting.mixed_precision import mixed_precision
from distir.transforms.rewriting.part_constants import part_constants
from distir.transforms.rewriting.precision import with_dtype
from distir.transforms.rewriting.touch_rows import touch_rows
from distir.transforms.sharding import check_padding as padding
from distir.transforms.sharding import pad
from distir.transforms.sharding.check_padding import check_padding
from distir.transforms.sharding.pad import paddable
from distir.transforms.sharding.pad_state import Share, pad_state
from tests.ops.samples import SAMPLES, Sample
from tests.ops.test_matrix import build, narrow
from tests.transforms.programs import Plan, distributed, gpt2_tiny, small_gpt
from tests.transforms.rewriting.faults import (
    attention,
    differs,
    forward,
    fresh,
    parts,
    picked,
    small_floats,
    total,
    trained,
    untidy,
    written_step,
)
from tests.transforms.rewriting.test_part_constants import sharing

PACKAGE = Path(claims.__file__).parents[2]


# ---------------------------------------------------------------- every rewrite


def loss_of_trained() -> Function:
    return with_loss(fresh(trained()), "cross-entropy")


def slopes() -> Function:
    f = loss_of_trained()
    return grad(f, 0, [v for v in f.inputs if v.kind == "parameter"])


def padded() -> Function:
    f = decompose.decompose(fresh(written_step()), True)
    return pad.pad(f, paddable(f, 2))


def updated() -> Function:
    f = slopes()
    return with_updates(f, SGD(0.5), [v for v in f.inputs if v.kind == "parameter"], False)


def stored() -> Function:
    """Each weight padded by an index of its first dim."""
    f = fresh(updated())
    rows = [(k, shape_of(v)[0]) for k, v in enumerate(f.inputs) if v.kind == "parameter"]
    return pad_state(f, [Share(k, 0, n + 1) for k, n in rows])


def dropping() -> Function:
    f = FunctionMaker("dropping")
    x = f.add_input_value("x", Tensor(Float64, (4, 6)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float64, (6, 6)), Role("parameter"))
    h = f.emit("Dropout", f.emit("MatMul", x, w), ratio=0.5)
    f.set_outputs([f.emit("Dropout", f.emit("Tanh", h), ratio=0.25)])
    return f.finalize()


def centred() -> Function:
    """A column subtracted from its running mean, or in training from that of the batch."""
    f = FunctionMaker("centred")
    x = f.add_input_value("x", Tensor(Float64, (4, 6)), Role("data", 0))
    mean = f.add_input_value("mean", Tensor(Float64, (1, 6)), Role("state"))
    of_batch = f.emit("ReduceMean", x, axes=(0,), keepdims=1)
    f.set_outputs([f.emit("Sub", x, f.emit("RunningStatistic", mean, of_batch, momentum=0.9, correction=1.0))])
    return f.finalize()


REWRITTEN: dict[str, Callable[[], Function]] = {
    "fuse": lambda: fused(fresh(forward())),
    "decompose": lambda: decompose.decompose(fresh(forward())),
    "part_constants": lambda: part_constants(fresh(sharing())),
    "fold": lambda: cleanup.fold(fresh(untidy()), evaluate),
    "pad": padded,
    "pad_state": stored,
    "recompose": lambda: recompose(fresh(parts())),
    "touch_rows": lambda: touch_rows(fresh(picked())),
    "grad": slopes,
    "with_loss": loss_of_trained,
    "with_updates": updated,
    "with_dropout": lambda: with_dropout(fresh(dropping()), 1),
    "with_batch_statistics": lambda: with_batch_statistics(fresh(centred())),
    "mixed_precision": lambda: mixed_precision(with_dtype(fused(loss_of_trained()), Float32), BFloat16),
    "with_scaled_loss": lambda: with_scaled_loss(loss_of_trained()),
    "with_dtype": lambda: with_dtype(fresh(small_floats()), Float64),
    "with_causal_attention": lambda: with_causal_attention(fresh(attention()[0]), attention()[1]),
}
"""An instance of every rewrite."""


def test_every_law_has_a_check_and_every_rewrite_an_instance() -> None:
    assert set(CHECKS) == set(Law)
    assert set(REWRITTEN) == set(REWRITES)
    assert set(REWRITES.values()) == set(Law)


def test_an_op_is_replaced_beside_one_that_stays() -> None:
    """The mean of the data needs no gradient; the other is decomposed, by the number of the elements."""
    f = FunctionMaker("two means")
    x = f.add_input_value("x", Tensor(Float64, (8, 5)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float64, (5,)), Role("parameter"))
    means = [f.emit("ReduceMean", v, axes=(0, 1), keepdims=0) for v in (x, f.emit("Mul", x, w))]
    f.set_outputs([f.emit("Mul", *means)])
    made = grad(f.finalize())
    assert [op.op_type for op in made.ops].count("ReduceMean") == 1
    check_origins(made)


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_rewrite_keeps_its_law(name: str) -> None:
    """The check passes, and both functions compute the same on random numbers."""
    after = REWRITTEN[name]()
    origin = after.cache[Origin]
    assert (origin.rewrite, origin.law) == (name, REWRITES[name])
    check_origins(after)
    before = origin.before
    if origin.law is Law.MORE:
        both = [v for v in before.producers() if v in after.producers()]
        assert both
        before, after = [Function(f.name, f.inputs, f.ops, tuple(both)) for f in (before, after)]
    if origin.law in (Law.DRAWN, Law.OF_BATCH):  # what it computes when nothing is dropped, by running statistics
        after = evaluation(after)
    for seed in range(3):
        arrays = drawn(origin.before, after, seed)
        want, got = [SequentialExecutor().compute(f, [arrays[v.name] for v in f.inputs]) for f in (before, after)]
        if origin.law is Law.RETYPED:
            got = [x.astype(np.float32) for x in got]
        near = {Law.RETYPED: 1e-5, Law.MIXED: 2e-2}.get(origin.law, 1e-9)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=near, atol=near)


def drawn(before: Function, after: Function, seed: int) -> dict[str, Any]:
    """Arrays for the inputs of both by name, in their source shapes; known masks have their actual values."""
    rng = np.random.default_rng(seed)
    masks = {v: x for v, x in attention()[1].items() if v in before.inputs}
    found: dict[str, Any] = {v.name: x for v, x in masks.items()}
    for v in (*before.inputs, *after.inputs):
        shape = (v.role and v.role.source) or shape_of(v)
        integers = tensor(v).dtype.kind == "int"
        found.setdefault(v.name, rng.integers(0, 5, shape) if integers else 0.4 * rng.standard_normal(shape))
    return found


def test_what_a_rank_runs_is_joined_by_law() -> None:
    """Products and biases, in bodies with bundles and communication."""
    program = distributed(small_gpt(layers=1), Plan(1, 2, 2, 2)).program
    bodies = [f for rank in range(4) for f in project(program, rank).function.callees()]
    joined = [new for f in bodies if (new := recompose(f)) is not f]
    assert len(joined) > 4
    for new in joined:
        check_origins(new)


HELPERS = {"prune", "rewrite", "causal", "pad_like"}
"""Helpers of rewrites, which are no rewrites themselves; `pad_like` pads by `pad`."""


@pytest.mark.parametrize("room", ["transforms/rewriting", "transforms/differentiation", "transforms/sharding/pad.py"])
def test_no_rewrite_is_without_a_law(room: str) -> None:
    """Public functions from a Function to a Function are rewrites, or named above."""
    place = PACKAGE / room
    for path in sorted(place.glob("*.py")) if place.is_dir() else [place]:
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or not node.args.args:
                continue
            types = [ast.unparse(x) if x else "" for x in (node.args.args[0].annotation, node.returns)]
            if types == ["Function", "Function"] and node.name not in HELPERS | {"training_step"}:
                assert node.name in REWRITES, f"{path}: {node.name} states no law"


# ---------------------------------------------------------------- every definition and every gradient rule

DEFINED = [s for s in SAMPLES if lookup(s.op).meaning is not None]
SLOPED = [s for s in SAMPLES if lookup(s.op).grad is not None]


@pytest.mark.parametrize("dtype", [Float64, Float32, BFloat16], ids=repr)
@pytest.mark.parametrize("s", DEFINED, ids=lambda s: s.op)
def test_an_op_computes_what_its_definition_does(s: Sample, dtype: DType) -> None:
    """On small instances; in double precision also on the sample's own operands."""
    (op,) = build(narrow(s, dtype)).ops
    found = definition_of(op)
    if found is None:
        assert op.attributes.get("causal")
        return
    check_definition(found, evaluate)
    for seed in range(3) if dtype is Float64 else ():
        want, got = [SequentialExecutor().compute(f, s.arrays(seed)) for f in (build(s), found.parts)]
        assert not differs(got, want)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_causal_attention_is_attention_under_a_triangle(s: int, t: int, seed: int) -> None:
    """The law by which masks go."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((2, n, 3)) for n in (s, t, t)]
    f = FunctionMaker("both")
    q, k, v = [f.add_input_value(n, Tensor(Float64, x.shape)) for n, x in zip("qkv", arrays, strict=True)]
    mask = f.add_input_value("mask", Tensor(Float64, (s, t)))
    y = f.emit("Attention", q, k, v, scale=0.5, causal=True)[0]
    f.set_outputs([y, f.emit("Attention", q, k, v, mask, scale=0.5)[0]])
    triangle = np.where(np.tri(s, t, dtype=bool), 0, -np.inf)
    got, want = SequentialExecutor().compute(f.finalize(), [*arrays, triangle])
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("s", SLOPED, ids=lambda s: s.op)
def test_a_gradient_rule_gives_the_slope(s: Sample) -> None:
    check_gradient(build(s).ops[-1], evaluate)


def test_a_gradient_rule_is_tried_once_on_one_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops of other sizes may have the same small instance; another instance is tried."""
    evaluated: list[Op] = []

    def counting(op: Op, ins: Sequence[Any], coord: None) -> Any:
        evaluated.append(op)
        return evaluate(op, ins, coord)

    monkeypatch.setattr(claims, "_tried", set())
    f = FunctionMaker("f")
    counts: list[int] = []
    for m, k, n in (64, 128, 32), (6, 9, 5), (7, 7, 7):
        a, b = [f.add_input_value("x", Tensor(Float32, shape)) for shape in ((m, k), (k, n))]
        f.emit("MatMul", a, b)
        check_gradient(f.ops[-1], counting)
        counts.append(len(evaluated))
    assert counts[0] == counts[1] < counts[2]


def test_an_instance_that_could_not_be_tried_says_nothing_of_other_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    f = FunctionMaker("f")
    a, b = [f.add_input_value("x", Tensor(Float32, shape)) for shape in ((64, 128), (128, 32))]
    f.emit("MatMul", a, b)
    (op,) = f.ops
    monkeypatch.setattr(claims, "_tried", set())
    small = claims._small(op, next(iter(claims.all_sizes([op]))))
    assert small is not None
    with monkeypatch.context() as unable:
        unable.setattr(claims, "_slopes_agree", lambda op, evaluate: None)
        with pytest.warns(ModelWarning):
            check_gradient(small, evaluate)
    tried: list[Op] = []
    monkeypatch.setattr(claims, "_slopes_agree", lambda op, evaluate: not tried.append(op))
    check_gradient(op, evaluate)
    assert tried


def test_what_cannot_be_tried_is_said() -> None:
    """A rewrite of ops whose sizes are too large to test, and that give only NaN at small sizes."""
    f = FunctionMaker("large")
    x = f.add_input_value("x", Tensor(Float64, (1 << 12, 1 << 12)))
    cut = f.emit("Slice", x, starts=(0, 0), ends=(4096, 4000), axes=(0, 1), steps=(1, 1))
    f.set_outputs([f.emit("Neg", cut)])
    before = f.finalize()
    cut_op, neg = before.ops
    other = Op(lookup("Abs"), neg.inputs, neg.attributes, neg.outputs)
    inside = Op(
        cut_op.spec, cut_op.inputs, Attributes({**cut_op.attributes, "starts": (0, 0)}), (Value("c", cut.type),)
    )
    other = Op(other.spec, inside.outputs, other.attributes, other.outputs)
    with pytest.warns(ModelWarning, match="has not been tried"):
        check_rewrite(before, Function("large", before.inputs, (inside, other), before.outputs), evaluate)


# ---------------------------------------------------------------- from the program as imported on


def test_validate_goes_back_to_the_program_as_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault before the model became a training step is found when the step is distributed."""
    from distir.transforms.rewriting import fuse

    rule = fuse.find_silu
    monkeypatch.setattr(fuse, "find_silu", lambda program, op: (x := rule(program, op)) and x._replace(op_type="Tanh"))
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float64, (8, 8)), Role("data", 0))
    h = f.emit("MatMul", x, f.add_input_value("w", Tensor(Float64, (8, 8)), Role("parameter")))
    f.set_outputs([f.emit("Mul", h, f.emit("Sigmoid", h))])
    step = training_step(f.finalize(), "mse", "sgd")
    program = parallel_transform_3d(step, 2, 1, 1, [Device("cpu", i) for i in range(2)], 2)
    with pytest.raises(MismatchError, match="Sigmoid, Mul as Tanh"):
        validate(program, step)


def test_what_was_rewritten_is_listed() -> None:
    step = gpt2_tiny().function
    program = parallel_transform_3d(step, 1, 2, 1, [Device("cpu", i) for i in range(2)], 1)
    lines = rewritten(source_of(program, step))
    assert [line.split(":")[0] for line in lines] == ["fuse", "grad", "fold", "with_dtype", "decompose", "pad"]
    assert "2 Attention, 2 Gelu in place of " in lines[0]
    assert lines[1] == "grad: 8 Gemm, 5 LayerNormalization, 1 SoftmaxCrossEntropyLoss decomposed"
    assert lines[4] == "decompose: 1 CrossEntropy decomposed"
    assert lines[5].startswith("pad: 509 padded to 510 (%")
    first = [origin.rewrite for origin, _ in origins(step)][-1]
    assert first == "with_loss"


def distribute(f: Function, tp: int = 2) -> None:
    """As `distir.distribute` does, with no cached analyses of other functions."""
    f = Function(f.name, f.inputs, f.ops, f.outputs, f.updates)
    validate(parallel_transform_3d(f, 1, tp, 1, [Device("cpu", k) for k in range(tp)], 1), f)


# ---------------------------------------------------------------- what is tried, and on what


@pytest.mark.parametrize("dtype", [Float32, Float16, BFloat16], ids=repr)
@pytest.mark.parametrize("make", [written_step, forward])
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
    """On few elements, for programs of any size; the second time nothing is evaluated."""
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
    """Keys whose leading dims are merged and split: shapes in attributes become small, too."""
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
    assert env[k].type is Tensor(Float64, (3, 2, 5, 4))
    assert made[1].outputs[0].type is Tensor(Float64, (6, 4, 5))
    check_rewrite(function, new, evaluate)


def test_a_claim_that_fails_and_cannot_be_tried_further_is_refused() -> None:
    """That a value is used in place of another holds where both are equal: it depends on what they are made of. Slices
    are so large that this is not tried."""

    def swapped(sliced: bool) -> tuple[Function, Function]:
        f = FunctionMaker("swapped")
        x, a = [f.add_input_value(n, Tensor(Float32, (s, s))) for n, s in (("x", 600), ("a", 700 if sliced else 600))]
        one, other = [f.emit(name, a) for name in ("Tanh", "Relu")]
        if sliced:
            ends = {"starts": (0, 0), "ends": (600, 600), "axes": (0, 1), "steps": (1, 1)}
            one, other = [f.emit("Slice", v, **ends) for v in (one, other)]
        f.set_outputs([f.emit("Add", x, one), other])
        function = f.finalize()
        *ops, add = function.ops
        wrong = Op(add.spec, (x, other), add.attributes, add.outputs)
        return function, Function(function.name, function.inputs, (*ops, wrong), function.outputs)

    for sliced in (True, False):
        with pytest.raises(MismatchError, match="does not compute the same"):
            check_rewrite(*swapped(sliced), evaluate)


def test_one_mask_in_place_of_equal_ones() -> None:
    """Each attention has a mask of its own, made alike; the rewritten ones share the first, which `before` has, too."""
    f = FunctionMaker("two layers")
    seen = f.add_input_value("seen", Tensor(Bool, (64, 64)))
    x = f.add_input_value("x", Tensor(Float32, (2, 3, 64, 16)))
    for _ in range(2):
        half = f.emit("Constant", value=(0.5,), shape=(), dtype=Float32)
        scores = f.emit("MatMul", f.emit("Mul", x, half), f.emit("Transpose", x, perm=(0, 1, 3, 2)))
        zero, low = [f.emit("Constant", value=(n,), shape=(), dtype=Float32) for n in (0.0, -1e38)]
        added = f.emit("Add", scores, f.emit("Where", seen, zero, low))
        x = f.emit("MatMul", f.emit("Softmax", added, axis=-1), x)
    f.set_outputs([x])
    function = f.finalize()
    once = cleanup.fold(fused(function))
    masks = {op.inputs[3] for op in once.ops if op.op_type == "Attention"}
    assert len(masks) == 1
    check_rewrite(function, once, evaluate)
    (mask,) = masks
    ops = [
        Op(op.spec, (op.inputs[0], op.inputs[2], op.inputs[1]), op.attributes, op.outputs) if mask in op.outputs else op
        for op in once.ops
    ]
    wrong = Function(once.name, once.inputs, tuple(ops), once.outputs)
    with pytest.raises(MismatchError, match="does not compute the same"):
        check_rewrite(function, wrong, evaluate)


def test_dims_that_are_merged_behind_one_of_size_1_are_tried() -> None:
    """Keys of grouped queries in a batch of one sample."""
    f = FunctionMaker("grouped")
    k = f.add_input_value("k", Tensor(Float32, (1, 2, 4, 4096, 128)))
    f.set_outputs([f.emit("Reshape", k, shape=(1, 8, 4096, 128))])
    (op,) = f.finalize().ops
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_gradient(op, evaluate)


def test_a_weight_whose_gradient_is_a_constant() -> None:
    """Its padding stays 0 from step to step: what is expanded into it is not 0 there."""
    step = total()
    padded = pad.pad(step, paddable(step, 2))
    assert any(v.role and v.role.source for v in padded.inputs)
    check_padding(step, padded, evaluate)
    new = next(v for v in padded.outputs if v in padded.updates and padded.updates[v].name == "w")
    seen: dict[Value, Any] = {}
    arrays = [np.ones(v.type.shape) for v in step.inputs]  # type: ignore[union-attr]
    SequentialExecutor(tap=lambda v, x: seen.setdefault(v, x)).compute(padded, arrays)
    assert np.all(seen[new][9:] == 0)
    assert np.any(seen[new][:9] != 1)
