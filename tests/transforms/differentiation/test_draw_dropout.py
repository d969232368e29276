"""Dropout in training steps: against autograd with the same masks, under plans, in evaluation, and by its law."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import distir
from distir.api.batches import evaluating
from distir.api.rewrites import check_origins, rewritten
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Device, Function, FunctionMaker, Role, Value, parse, pformat, same, verify
from distir.ir.errors import MismatchError
from distir.ir.function import Op
from distir.ir.spec import lookup
from distir.ir.type import BFloat16, Float16, Float32, Float64, Tensor
from distir.models.decoder import Decoder, decoder
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation import draw_dropout
from distir.transforms.differentiation.draw_dropout import step_of, with_dropout
from distir.transforms.differentiation.training import SGD, AdamW, LearningRate, Optimizer, training_step
from distir.transforms.parallel3d import parallel_transform_3d
from distir.transforms.pipeline.copies import copies
from distir.transforms.pipeline.evaluation import evaluation
from distir.transforms.rewriting.precision import with_dtype
from tests.transforms.programs import BATCH, PLAIN, TOLERANCE, Plan, Program, check, distributed, error, run

pytestmark = pytest.mark.usefixtures("preloaded")

RATIO = 0.2
SMALL = Decoder(2, 16, 4, vocab=19, seq=6, batch=BATCH, dropout=RATIO)


def drawn(function: Function) -> list[Op]:
    return [op for op in function.ops if op.op_type == "RandomDropout"]


@functools.cache
def program(optimizer: Optimizer = PLAIN, config: Decoder = SMALL, step: int = 3) -> Program:
    """A training step in float64, at a step that is not the first."""
    function = with_dtype(training_step(decoder(config), "cross-entropy", optimizer, gradients=True), Float64)
    rng = np.random.default_rng(0)
    arrays: list[np.ndarray] = []
    for v in function.inputs:
        if v.name == "step":
            x: Any = step
        elif v.kind == "data":
            x = rng.integers(0, config.vocab, shape_of(v))
        else:
            x = rng.standard_normal(shape_of(v)) * (0.0 if v.kind == "state" else 0.3)
        arrays.append(np.asarray(x, tensor(v).dtype.numpy))
    return Program(function, arrays)


def values_of(p: Program) -> dict[Value, Any]:
    """Every value that the sequential program computes."""
    seen: dict[Value, Any] = {}
    SequentialExecutor(tap=lambda v, x: seen.setdefault(v, x)).compute(p.function, p.arrays)
    return seen


# ---------------------------------------------------------------- the step


def test_gradients_are_those_of_autograd_with_the_same_masks() -> None:
    p, c = program(), SMALL
    seen = values_of(p)
    masks = iter([torch.from_numpy(seen[op.outputs[1]]) for op in drawn(p.function)])
    given = {v.name: x for v, x in zip(p.function.inputs, p.arrays, strict=True)}
    w = {v.name: torch.tensor(given[v.name], requires_grad=True) for v in p.function.inputs if v.kind == "parameter"}

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return x * next(masks) / (1 - RATIO)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (c.hidden,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(x: torch.Tensor, name: str) -> torch.Tensor:
        rows = (BATCH, c.seq, c.heads, c.head_size)
        q, k, v = [y.reshape(rows).transpose(1, 2) for y in linear(x, f"{name}.qkv").chunk(3, -1)]
        scores = (q @ k.mT / math.sqrt(c.head_size)).masked_fill(~torch.ones(c.seq, c.seq).tril().bool(), -math.inf)
        y = dropped(scores.softmax(-1)) @ v
        return linear(y.transpose(1, 2).reshape(BATCH, c.seq, c.hidden), f"{name}.out")

    x = dropped(w["embedding"][torch.from_numpy(given["input_ids"])] + w["positions"])
    for i in range(c.layers):
        x = x + dropped(attention(norm(x, f"{i}.norm1"), f"{i}.attention"))
        y = torch.nn.functional.gelu(linear(norm(x, f"{i}.norm2"), f"{i}.mlp.in"), approximate="tanh")
        x = x + dropped(linear(y, f"{i}.mlp.out"))
    logits = norm(x, "norm") @ w["embedding"].T
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(given["labels"]).flatten())
    loss.backward()
    assert next(masks, None) is None
    got = p.results()
    assert got[0] == pytest.approx(loss.item(), rel=1e-12)
    for (name, x), gradient in zip(w.items(), got[1:], strict=False):
        assert x.grad is not None
        np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-9, atol=1e-12, err_msg=name)


def test_each_dropout_has_its_own_mask_and_each_step_another() -> None:
    first, other, again = [values_of(program(step=k)) for k in (0, 1, 0)]
    f = program(step=0).function
    masks = {op: first[op.outputs[1]] for op in drawn(f)}
    assert len(masks) == 1 + 3 * SMALL.layers
    alike = [x for x in masks.values() if x.shape == (BATCH, SMALL.seq, SMALL.hidden)]
    assert len({x.tobytes() for x in alike}) == len(alike) == 1 + 2 * SMALL.layers
    g, h = program(step=1).function, program(step=0).function
    for a, b, c in zip(drawn(f), drawn(g), drawn(h), strict=True):
        assert not np.array_equal(first[a.outputs[1]], other[b.outputs[1]])
        assert np.array_equal(first[a.outputs[1]], again[c.outputs[1]])


def test_another_seed_drops_others() -> None:
    masks = [
        values_of(p)[drawn(p.function)[0].outputs[1]]
        for p in (program(), program(SGD(0.1, dropout_seed=1)), program(AdamW(dropout_seed=1)))
    ]
    assert not np.array_equal(masks[0], masks[1])
    assert np.array_equal(masks[1], masks[2])


@pytest.mark.parametrize("optimizer", [SGD(), AdamW(), SGD(schedule=LearningRate(3)), SGD(clip_norm=1.0)], ids=repr)
@pytest.mark.parametrize("precision", [Float32, BFloat16, Float16], ids=repr)
def test_one_counter_counts_the_steps(optimizer: Optimizer, precision: Any) -> None:
    step = training_step(decoder(SMALL), "cross-entropy", optimizer, precision=precision)
    verify(step)
    check_origins(step)
    assert same(parse(pformat(step)), step)
    counters = [v for v in step.inputs if v.name.startswith("step")]
    assert counters == [step_of(step)]
    assert counters[0] in step.updates.values()
    arrays = {v: np.full(shape_of(v), 0.1, tensor(v).dtype.numpy) for v in step.inputs if v.kind == "parameter"}
    arrays |= {v: np.zeros(shape_of(v), tensor(v).dtype.numpy) for v in step.inputs if v not in arrays}
    results = dict(zip(step.outputs, SequentialExecutor().compute(step, arrays), strict=True))
    assert [int(results[v]) for v, w in step.updates.items() if w is counters[0]] == [1]
    for op in drawn(step):  # y is of the type of x, a mask takes a byte an element
        assert op.inputs[0].type is op.outputs[0].type
        assert op.outputs[1].type.bytes == np.prod(shape_of(op.outputs[1]))


def test_a_program_without_dropout_has_no_counter() -> None:
    plain = decoder(Decoder(1, 16, 4, vocab=19, seq=6))
    assert with_dropout(plain, 0) is plain
    step = training_step(plain, "cross-entropy", "sgd")
    assert not any(v.kind == "state" for v in step.inputs)
    unfused = training_step(decoder(Decoder(1, 16, 4, vocab=19, seq=6, attention="unfused")), "cross-entropy", "sgd")
    assert not any(v.kind == "state" for v in unfused.inputs)
    assert not drawn(unfused)


# ---------------------------------------------------------------- plans

PLANS = [
    Plan(dp=2),
    Plan(dp=4, microbatches=2, zero=1),
    Plan(tp=2),
    Plan(tp=4, sequence_parallel=False, recompute="attention"),
    Plan(tp=2, sequence_parallel=True),
    Plan(tp=2, microbatches=4, sequence_parallel=True, recompute="gathers"),
    Plan(dp=2, tp=2, pp=2, microbatches=2, zero=2, sequence_parallel=True, recompute="attention"),
    Plan(pp=2, microbatches=4, schedule="gpipe", recompute="selective"),
    Plan(dp=2, pp=2, microbatches=4, recompute="full", zero=3),
    Plan(pp=2, microbatches=4, schedule="interleaved", chunks=2),
    Plan(dp=2, tp=2, host=True),
    Plan(tp=2, microbatches=2, sequence_parallel=True, split=("cp=3:*.1",)),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan_draws_the_same_masks(plan: Plan) -> None:
    check(program(), plan)
    check(program(AdamW(0.01)), plan)


def test_a_wrong_offset_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that all this is to prevent: every device draws the mask of the first."""
    right = Tensor.starts
    monkeypatch.setattr(Tensor, "starts", lambda self, dim, coord: right(self, dim, None))
    for plan in (Plan(dp=2), Plan(tp=2), Plan(microbatches=2), Plan(tp=2, sequence_parallel=True)):
        p = program()
        assert error(run(distributed(p, plan).program, p), p.results()) > 1e3 * TOLERANCE, plan


@pytest.mark.parametrize("how", ["attention", "selective", "full"])
def test_masks_are_drawn_again_from_the_same_key(how: str) -> None:
    placed = distributed(program(), Plan(recompute=how)).placed
    again = copies(placed)
    found = [op for op in drawn(placed) if op.outputs[0] in again]
    assert len(found) >= SMALL.layers
    for op in found:
        assert op.of is not None
        assert op.inputs[1] is op.of.inputs[1]


def test_a_padded_dim_is_dropped_as_it_was() -> None:
    """Dropout of values with a dim of 15, which is padded."""
    f = FunctionMaker("odd")
    x = f.add_input_value("x", Tensor(Float64, (BATCH, 3, 4)), Role("data", 0))
    u, w = [f.add_input_value("w", Tensor(Float64, shape), Role("parameter")) for shape in ((4, 15), (15, 4))]
    h = f.emit("Dropout", f.emit("MatMul", x, u), ratio=0.5)
    f.set_outputs([f.emit("MatMul", f.emit("Tanh", h), w)])
    step = training_step(f.finalize(), "mse", gradients=True)
    rng = np.random.default_rng(1)
    arrays = [np.asarray(7) if v.kind == "state" else rng.standard_normal(shape_of(v)) for v in step.inputs]
    p = Program(step, arrays)
    for plan in (Plan(tp=2), Plan(tp=4, dp=2), Plan(tp=2, microbatches=2, pp=2)):
        made = check(p, plan)
        assert any(v.role is not None and v.role.source for v in made.inputs)
        ops = [op for g in (made, *made.callees()) for op in drawn(g)]
        assert {op.attributes.get("whole") for op in ops} == {(BATCH, 3, 15)}


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize("plan", [Plan(), Plan(2, 2, 2, 2), Plan(tp=2, sequence_parallel=True)], ids=str)
def test_evaluation_drops_nothing(plan: Plan) -> None:
    p = program()
    found = evaluating(distributed(p, plan).program, p.function)
    assert not any(drawn(f) for f in (found, *found.callees()))
    (loss,) = SequentialExecutor().compute(found, p.arrays)
    config = Decoder(2, 16, 4, vocab=19, seq=6, batch=BATCH, attention="unfused")
    plain = with_dtype(training_step(decoder(config), "cross-entropy", "sgd"), Float64)
    given = {v.name: x for v, x in zip(p.function.inputs, p.arrays, strict=True)}
    want = SequentialExecutor().compute(plain, [given[v.name] for v in plain.inputs])[0]
    assert loss == pytest.approx(want, rel=1e-12)
    assert abs(loss - p.results()[0]) > 1e-4


def test_gradients_that_are_asked_for_are_those_of_the_step() -> None:
    """With its masks: what an evaluation gives beside the loss is not of another function."""
    p = program()
    found = evaluation(p.function, [2, 1])
    verify(found)
    for got, want in zip(SequentialExecutor().compute(found, p.arrays), (p.results()[2], p.results()[1]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_forward_program_drops_nothing() -> None:
    forward = decoder(SMALL)
    assert sum(op.op_type == "Dropout" for op in forward.ops) == 1 + 3 * SMALL.layers
    config = Decoder(2, 16, 4, vocab=19, seq=6, batch=BATCH, attention="unfused")
    rng = np.random.default_rng(2)
    arrays = [
        rng.integers(0, 19, shape_of(v)) if v.kind == "data" else 0.3 * rng.standard_normal(shape_of(v))
        for v in forward.inputs
    ]
    got, want = [SequentialExecutor().compute(f, arrays)[0] for f in (forward, decoder(config))]
    assert np.array_equal(got, want)


# ---------------------------------------------------------------- the law


def before() -> Function:
    f = FunctionMaker("two")
    x = f.add_input_value("x", Tensor(Float64, (4, 6)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float64, (6, 6)), Role("parameter"))
    h = f.emit("Dropout", f.emit("MatMul", x, w), ratio=0.5)
    f.set_outputs([f.emit("Dropout", f.emit("Tanh", h), ratio=0.25), f.emit("Dropout", h, ratio=0.0)])
    return f.finalize()


def test_what_is_drawn_is_reported() -> None:
    made = with_dropout(before(), 0)
    check_origins(made)
    assert rewritten(made) == ["with_dropout: 2 RandomKey, 2 RandomDropout in place of 2 Dropout"]
    assert [op.op_type for op in made.ops if op.op_type == "Dropout"] == ["Dropout"]  # that of ratio 0


Change = Callable[[Op, FunctionMaker], Op]


def attributes(**new: Any) -> Change:
    return lambda op, f: Op(op.spec, op.inputs, type(op.attributes)({**op.attributes, **new}), op.outputs)


def of_another(op: Op, f: FunctionMaker) -> Op:
    return Op(
        op.spec,
        (f.inputs[0] if len(shape_of(op.inputs[0])) else op.inputs[0], *op.inputs[1:]),
        op.attributes,
        op.outputs,
    )


def as_op(name: str) -> Change:
    return lambda op, f: Op(lookup(name), op.inputs[:1], type(op.attributes)(), op.outputs[:1])


def from_the_step(op: Op, f: FunctionMaker) -> Op:
    return Op(op.spec, (op.inputs[0], f.inputs[-1]), op.attributes, op.outputs)


FAULTS: dict[str, tuple[str, Change]] = {
    "another ratio": ("RandomDropout", attributes(ratio=0.4)),
    "of another value": ("RandomDropout", of_another),
    "another function": ("RandomDropout", as_op("Relu")),
    "one key for all": ("RandomKey", attributes(stream=0)),
    "the step itself as a key": ("RandomDropout", from_the_step),
    "another op beside": ("Tanh", as_op("Sin")),
    "one that is not drawn": ("Dropout", attributes(ratio=0.5)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_law_rejects(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, change = FAULTS[fault]

    class Changed(FunctionMaker):
        def finalize(self) -> Function:
            self.ops[:] = [change(op, self) if op.op_type == kind else op for op in self.ops]
            return super().finalize()

    source = before()
    monkeypatch.setattr(draw_dropout, "FunctionMaker", Changed)
    made = with_dropout(source, 0)
    with pytest.raises(MismatchError):
        check_origins(made)


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("plan", [distir.Plan(dp=2), distir.Plan(tp=2), distir.Plan(pp=2, microbatches=2)], ids=str)
def test_ranks_drop_what_the_sequential_program_drops(plan: distir.Plan) -> None:
    model = distir.load("gpt:layers=2,hidden=16,heads=4,seq=8,vocab=32,batch=4,dropout=0.3", loss="cross-entropy")
    result = distir.run(model, plan, steps=3, check=True)
    assert result.check is not None
    assert result.check.ok, result.check
    assert result.check.compared > 30


def test_replicas_draw_their_part_of_each_microbatch() -> None:
    """They split what the microbatches are made of: still contiguous ranges, so that nothing is gathered to draw it."""
    sizes = Decoder(1, 16, 2, vocab=32, seq=4, batch=16, dropout=RATIO)
    step = training_step(decoder(sizes), "cross-entropy", SGD(0.1))
    devices = [Device("cpu", i) for i in range(4)]
    placed = parallel_transform_3d(step, 4, 1, 1, devices, 2)
    used = [op.op_type for f in (placed, *placed.callees()) for op in f.ops]
    assert "RandomDropout" in used
    assert "MPIAllgather" not in used
