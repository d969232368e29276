"""Tensor parallelism as it is found: where collectives stand, what each device holds, and the programs as text.

`python -m tests.transforms.test_tensor_parallel` writes the golden files in tests/golden anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from distir.ir import Function, FunctionMaker, Op, pformat
from distir.ir.device import AxisNames
from distir.ir.function import Role
from distir.ir.type import Float64, Partial, Shard, Tensor
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation.training import SGD, AdamW, training_step
from distir.transforms.roles import WEIGHTS
from distir.transforms.sharding.coverage import coverage
from tests.transforms.programs import (
    BATCH,
    Plan,
    Program,
    check,
    collectives,
    distributed,
    filled,
    gpt2_tiny,
    imported_mlp,
    small_gpt,
    written_mlp,
)

GOLDEN = Path(__file__).parents[1] / "golden"
FILES: dict[str, tuple[Callable[[], Program], Plan]] = {
    "gpt-tp2": (lambda: small_gpt(layers=1), Plan(1, 2)),
    "gpt-dp2-tp2-pp2-mb2": (lambda: small_gpt(layers=2), Plan(2, 2, 2, 2)),
    "mlp-tp2": (written_mlp, Plan(1, 2)),
    "mlp-dp2-tp2-pp2-mb4": (lambda: written_mlp(layers=4), Plan(2, 2, 2, 4)),
}


def body(program: Program, plan: Plan, name: str) -> Function:
    return next(f for f in distributed(program, plan).program.callees() if f.name == name)


def executed(function: Function) -> Iterator[Op]:
    """The ops of a program as they run, calls opened."""
    for op in function.ops:
        if op.callee is None:
            yield op
        else:
            yield from executed(op.callee)


def over(function: Function, axis: AxisNames) -> list[Op]:
    return [op for op in executed(function) if op.spec.comm is not None and op.attributes.get("axis") == axis]


# ---- where collectives stand


@pytest.mark.parametrize("tp", [2, 4])
def test_two_allreduces_forward_and_two_backward_a_block(tp: int) -> None:
    plan = Plan(1, tp)
    for phase in ("fwd0", "bwd0"):
        counts = [collectives(body(small_gpt(layers=n), plan, phase), "tp") for n in (1, 2, 3)]
        assert counts[1] - counts[0] == counts[2] - counts[1] == Counter(MPIAllreduce=2)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("optimizer", [AdamW(0.01), SGD(0.1)], ids=["adamw", "sgd"])
def test_gpt2_has_no_other_collectives(tp: int, optimizer: SGD | AdamW) -> None:
    """But one at the embedding, one for the head's gradient, and small ones at the cross-entropy."""
    program = gpt2_tiny(optimizer)
    forward, backward, update = (over(body(program, Plan(1, tp), f), "tp") for f in ("fwd0", "bwd0", "update0"))
    assert {op.op_type for op in (*forward, *backward)} == {"MPIAllreduce"}
    tokens, width = 8 * 16, 64
    sizes = Counter(math.prod(shape_of(op.inputs[0])) for op in forward)
    assert sizes == {tokens * width: 1 + 2 * 2, tokens: 3}
    assert Counter(math.prod(shape_of(op.inputs[0])) for op in backward) == {tokens * width: 2 * 2 + 1}
    assert update == []


def test_logits_are_never_gathered() -> None:
    """Whatever has the padded vocabulary as a dim is split along it, everywhere."""
    found = 0
    for f in distributed(gpt2_tiny(), Plan(2, 2, 2, 2)).program.callees():
        for t in (v.type for op in f.ops for v in op.outputs):
            if isinstance(t, Tensor) and 510 in t.global_shape:
                found += 1
                assert t.on("tp") is Shard(t.global_shape.index(510))
    assert found > 10


@pytest.mark.parametrize("program", [gpt2_tiny, small_gpt, imported_mlp], ids=lambda f: f.__name__)
def test_gradients_are_reduced_once_a_step(program: Callable[[], Program]) -> None:
    """After all microbatches: over dp as many all-reduces as without microbatches, none of them before the last."""
    made = program()
    trained = [v for v in made.function.inputs if v.kind == "parameter"]
    counts = {}
    for microbatches in (1, 4):
        function = distributed(made, Plan(2, 2, 1, microbatches)).program
        reduced = over(function, "dp")
        assert {op.op_type for op in reduced} <= {"MPIAllreduce", "LocalSlice"}
        counts[microbatches] = sum(op.op_type == "MPIAllreduce" for op in reduced)
        for f in function.callees():
            if f.name.startswith(("fwd", "bwd")) and not f.name.endswith(".last") and microbatches > 1:
                assert collectives(f, "dp")["MPIAllreduce"] == 0, f.name
    assert counts[1] == counts[4]
    assert counts[1] <= len(trained) + 2  # the loss and the count


def test_gradients_of_split_weights_are_not_reduced_over_tp() -> None:
    function = distributed(small_gpt(), Plan(1, 2)).program
    weights = [shape_of(v) for v in function.inputs if v.kind == "parameter" and isinstance(tensor(v).on("tp"), Shard)]
    for op in over(function, "tp"):
        assert shape_of(op.inputs[0]) not in weights


# ---- what each device holds


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("program", [gpt2_tiny, small_gpt], ids=lambda f: f.__name__)
def test_each_device_holds_its_share_of_every_matrix(program: Callable[[], Program], tp: int) -> None:
    """Of a block's matrices, of the embedding, and of their optimizer state; positions may be held whole."""
    made = program()
    sequence = next(shape_of(v)[1] for v in made.function.inputs if v.kind == "data")
    types = [tensor(v) for v in distributed(made, Plan(1, tp)).placed.inputs if v.kind in WEIGHTS]
    matrices = [t for t in types if len(t.global_shape) == 2 and t.global_shape[0] != sequence]
    assert len(matrices) >= 2 * 4 + 1
    for t in matrices:
        assert math.prod(t.shape) * tp == math.prod(t.global_shape)


def test_a_fused_projection_is_split_by_heads() -> None:
    placed = distributed(small_gpt(), Plan(1, 2)).placed
    fused = [v for v in placed.inputs if shape_of(v) == (8, 24)]
    assert fused
    assert {tensor(v).on("tp") for v in fused} == {Shard(1, 3)}


def test_coverage_says_what_is_split() -> None:
    made = distributed(gpt2_tiny(), Plan(1, 4))
    found = coverage(made.placed, "tp")
    assert found.parameters > 0.99
    assert found.flops > 0.99
    assert all(len(shape_of(v)) == 1 for v in found.replicated)
    none = coverage(distributed(gpt2_tiny(), Plan(2)).placed, "tp")
    assert (none.flops, none.parameters) == (0.0, 0.0)
    assert len(none.replicated) == sum(v.kind == "parameter" for v in made.placed.inputs)


def test_heads_that_do_not_divide_are_replicated_and_reported() -> None:
    """12 heads of 2 on 8 devices: attention is computed by each, the rest is split."""
    program = small_gpt(layers=1, width=24, heads=12, vocabulary=16)
    plan = Plan(1, 8)
    check(program, plan)
    made = distributed(program, plan)
    found = coverage(made.placed, "tp")
    replicated = {v.name for v in found.replicated}
    assert {v.name for v in made.placed.inputs if shape_of(v) == (24, 72)} <= replicated
    split = {v.name for v in made.placed.inputs if v.kind == "parameter"} - replicated
    assert {v.name for v in made.placed.inputs if shape_of(v) in ((24, 96), (96, 24))} <= split
    assert 0.3 < found.parameters < 0.9
    staged = distributed(program, Plan(1, 8, 2, 2))  # stages that differ in what is split
    assert coverage(staged.program, "tp").flops == pytest.approx(coverage(staged.placed, "tp").flops, rel=1e-3)


@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(dp=2, tp=2), Plan(2, 1, 2, 2)], ids=str)
def test_values_without_elements(plan: Plan) -> None:
    """The end of a product, of no columns, is joined with it again, as a rotary embedding of all of a head writes it;
    the next product's sum is added to an empty one's."""
    f = FunctionMaker("empty")
    x = f.add_input_value("x", Tensor(Float64, (BATCH, 8)), Role("data", 0))
    wide, narrow = (
        f.add_input_value(f"w{k}", Tensor(Float64, s), Role("parameter")) for k, s in enumerate([(8, 16), (16, 8)])
    )
    y = f.emit("MatMul", f.emit("Relu", f.emit("MatMul", x, wide)), narrow)
    end = f.emit("Slice", y, starts=(8,), ends=(8,), axes=(1,), steps=(1,))
    f.set_outputs([f.emit("Concat", f.emit("Neg", end), y, end, axis=1)])
    step = training_step(f.finalize(), "mse", SGD(0.1), gradients=True)
    check(filled(step, {}, np.random.default_rng(0)), plan)


def test_nothing_partial_is_a_result() -> None:
    for program, plan in ((small_gpt(), Plan(2, 2, 2, 2)), (imported_mlp(), Plan(2, 2, 2, 4))):
        for v in distributed(program, plan).program.outputs:
            assert not any(isinstance(p, Partial) for p in tensor(v).placements)


# ---- the programs as text


@pytest.mark.parametrize("name", FILES)
def test_golden(name: str) -> None:
    """Programs equal the recorded ones. To accept a change: `python -m tests.transforms.test_tensor_parallel`."""
    make, plan = FILES[name]
    text = pformat(distributed(make(), plan).program)
    assert text.rstrip("\n") == (GOLDEN / f"{name}.distir").read_text().rstrip("\n")


@pytest.mark.parametrize("name", FILES)
def test_golden_text_shows_what_is_promised(name: str) -> None:
    text = (GOLDEN / f"{name}.distir").read_text()
    over_tp = [line for line in text.splitlines() if 'axis="tp"' in line]
    assert over_tp
    assert all("= MPIAllreduce(" in line for line in over_tp)


if __name__ == "__main__":
    for name, (make, plan) in FILES.items():
        (GOLDEN / f"{name}.distir").write_text(pformat(distributed(make(), plan).program).rstrip("\n") + "\n")
        print(GOLDEN / f"{name}.distir")
