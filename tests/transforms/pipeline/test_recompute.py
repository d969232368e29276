"""Recomputation: exact, proved, and what is saved is what was chosen by cost."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from distir.api.compilation import validate
from distir.api.model import load
from distir.api.named_dims import named_dims
from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.simulator.simulation import Simulation
from distir.hardware import load_cluster
from distir.ir import Device, Function, FunctionMaker, Op, Value, parse, pformat, same, verify
from distir.ir.errors import InfeasibleError, UsageError
from distir.ir.type import Replicate
from distir.models.decoder import Decoder, decoder
from distir.models.gpt import gpt
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation.training import training_step
from distir.transforms.parallel3d import distribute
from distir.transforms.passes import PassContext, run_passes
from distir.transforms.pipeline.copies import copies, on_own_stages
from distir.transforms.pipeline.phases import BACKWARD, phases
from distir.transforms.pipeline.recompute import _blocks_again, _cheap, _saving, _still_saved, recompute, saved_bytes
from distir.transforms.pipeline.stages import cut_stages
from distir.transforms.plan import InputSplit, Plan
from tests.transforms.programs import ADAMW, TOLERANCE, error, gpt2_tiny, imported_mlp, run, small_gpt

PROGRAMS = {
    "gpt": lambda: small_gpt(layers=4, optimizer=ADAMW),
    "gpt2-tiny": gpt2_tiny,
    "mlp": imported_mlp,
}
PLANS = [
    Plan(),
    Plan(2, 2, 2, 2),
    Plan(2, 1, 2, 4, zero=3),
    Plan(1, 2, 4, 4, "gpipe"),
    Plan(1, 1, 2, 4, "interleaved", chunks=2),
    Plan(1, 1, 3, 2, overlap=False, loss_gradient="forward"),
]


def placed(function: Function, plan: Plan) -> Function:
    devices = [Device("cpu", i) for i in range(plan.size)]
    return run_passes(function, ("fuse", "decompose", "pad", "place"), PassContext(plan, devices))


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_sequential(name: str, plan: Plan, how: str) -> None:
    program = PROGRAMS[name]()
    devices = [Device("cpu", i) for i in range(plan.size)]
    made = distribute(program.function, replace(plan, recompute=how), devices)
    verify(made.placed)
    assert same(parse(pformat(made.placed)), made.placed)
    verify(made.program)
    validate(made.program, program.function)
    assert error(run(made.program, program), program.results()) <= TOLERANCE


@pytest.mark.parametrize("how", ["selective", "full"])
def test_copies_run_in_the_backward_pass_on_their_own_stage(how: str) -> None:
    base = recompute(placed(small_gpt(layers=4).function, Plan(microbatches=2)), how)
    assert copies(base)
    function, stage = cut_stages(base, 3, 2)
    phase, again = phases(function), copies(function)
    assert again
    home = {v: stage[op] for op in function.ops if op in stage for v in op.outputs}
    for op in function.ops:
        if op.outputs[0] in again:
            assert phase[op] == BACKWARD
            assert op.of is not None
            assert stage[op] == stage[op.of]
        for v in op.inputs:
            if v in again:
                assert home[v] == stage[op], "what crosses from stage to stage is never made again for it"


def test_copies_used_on_another_stage_are_replaced_by_what_they_copy() -> None:
    base = recompute(placed(small_gpt(layers=4).function, Plan(microbatches=2)), "full")
    again = copies(base)
    stage = dict.fromkeys(base.ops, 0)
    assert on_own_stages(base, stage) == (base, stage)
    users = [op for op in base.ops if op.outputs[0] not in again and not again.keys().isdisjoint(op.inputs)]
    assert len(users) > 10
    for user in users:
        function, stages = on_own_stages(base, {**stage, user: 1})
        new = next(op for op in function.ops if op.outputs == user.outputs)
        assert stages[new] == 1
        assert new.inputs == tuple([again.get(v, v) for v in user.inputs])
        used = {v for op in function.ops for v in op.inputs}
        assert all([not used.isdisjoint(op.outputs) for op in function.ops if op.outputs[0] in again])


def test_a_copy_that_nothing_uses_is_left_out() -> None:
    base = recompute(placed(small_gpt(layers=4).function, Plan(microbatches=2)), "full")
    first = next(op for op in base.ops if op.of is not None).of
    assert first is not None
    more = Op(first.spec, first.inputs, first.attributes, tuple([Value("more", v.type) for v in first.outputs]), first)
    function = Function(base.name, base.inputs, (*base.ops, more), base.outputs, base.updates, base.sources)
    found, _ = on_own_stages(function, dict.fromkeys(function.ops, 0))
    assert found.ops == base.ops


def test_full_saves_what_crosses_between_blocks_alike() -> None:
    """Of a GPT of n layers what enters each layer: (batch, sequence, width)."""
    saved: dict[int, float] = {}
    for layers in (3, 6):
        base = placed(small_gpt(layers=layers).function, Plan())
        found = _saving(base)
        assert len(found.blocks) == layers
        assert len({len(block) for block in found.blocks}) == 1
        full = recompute(base, "full")
        saved[layers] = saved_bytes(_saving(full), ())
        assert saved[layers] < saved_bytes(found, ()) / 4
    assert saved[6] - saved[3] == 3 * 8 * 4 * 8 * 8  # three more layers: batch 8, sequence 4, width 8, float64


def large() -> Function:
    """A GPT wide enough that its products are dear, with attention taken apart into scores and softmax."""
    return training_step(gpt(2, 1024, 16, 128, 64, 2), optimizer="sgd")


def test_selective_makes_no_matrix_product_of_weights_again() -> None:
    base = placed(large(), Plan())
    found = _saving(base)
    again = _cheap(found)
    assert again
    names = {found.maker[v].spec.name for v in again}
    assert "MatMul" not in names
    assert {"LayerNorm", "Gelu"} <= names
    assert saved_bytes(found, again) < 0.8 * saved_bytes(found, ())


def test_no_collective_is_repeated_where_it_is_cheap_to_save() -> None:
    base = placed(large(), Plan(tp=4))
    made = recompute(base, "selective")
    kinds = {op.spec.name for op in made.ops if op.outputs[0] in copies(made)}
    assert kinds
    assert not {name for name in kinds if name.startswith("MPI")}


def test_sums_over_devices_are_not_repeated() -> None:
    """A short product and the function on it are made again, but not where the product is summed over devices."""
    from distir.ir import Role
    from distir.ir.type import Float64, Tensor

    f = FunctionMaker("short")
    x = f.add_input_value("x", Tensor(Float64, (512, 64)), Role("data", 0))
    a, b = [f.add_input_value(name, Tensor(Float64, (64, 64)), Role("parameter")) for name in "ab"]
    f.set_outputs([f.emit("Tanh", f.emit("MatMul", f.emit("Relu", f.emit("MatMul", x, a)), b))])
    step = training_step(f.finalize(), "mse", "sgd")
    products: list[int] = []
    for tp in (1, 2):
        made = recompute(placed(step, Plan(tp=tp)), "selective")
        kinds = [op.op_type for op in made.ops if op.outputs[0] in copies(made)]
        assert "MPIAllreduce" not in kinds
        products.append(kinds.count("MatMul"))
    assert products == [2, 1]


def test_a_budget_of_bytes() -> None:
    base = placed(small_gpt(layers=4).function, Plan())
    none = saved_bytes(_saving(base), ())
    cheap = saved_bytes(_saving(recompute(base, "selective")), ())
    full = saved_bytes(_saving(recompute(base, "full")), ())
    assert full < cheap < none
    assert recompute(base, str(none)) is base
    for budget in (none - 1, cheap, cheap - 1, full + 1):
        got = saved_bytes(_saving(recompute(base, str(budget))), ())
        assert got <= budget
    assert saved_bytes(_saving(recompute(base, str(cheap / 2), stages=2)), ()) == cheap
    with pytest.raises(InfeasibleError, match="bytes saved a microbatch are too few: with all blocks made again it is"):
        recompute(base, "1")


def simulated(plan: Plan) -> tuple[Function, Simulation]:
    topology = load_cluster("dgx-a100", None, plan.size)
    step = training_step(gpt(8, 256, 8, 512, 128, 16), optimizer="sgd")
    program = distribute(step, plan, topology.devices[: plan.size]).program
    return program, Simulator(CostModel(topology)).interpret(program)


def test_live_memory_falls_as_predicted() -> None:
    """The peak falls by about what is no longer saved, times the microbatches in flight, and the step takes longer."""
    none, selective, full = (simulated(Plan(2, 1, 2, 4, recompute=how))[1] for how in ("none", "selective", "full"))
    first = [s.stages[0] for s in (none, selective, full)]
    assert first[0].memory > first[1].memory > first[2].memory
    assert none.seconds < full.seconds < 1.5 * none.seconds
    base = placed(training_step(gpt(8, 256, 8, 512, 128, 16), optimizer="sgd"), Plan(2, 1, 2, 4))
    less = (saved_bytes(_saving(base), ()) - saved_bytes(_saving(recompute(base, "full")), ())) / 2  # of one stage
    fallen = first[0].memory - first[2].memory
    assert 0.5 * 2 * less < fallen < 1.1 * 2 * less  # two microbatches in flight, one block of them being made again


def test_where_no_blocks_are_alike_nothing_is_made_again() -> None:
    f = FunctionMaker("odd")
    from distir.ir import Role
    from distir.ir.type import Float, Tensor

    x = f.add_input_value("x", Tensor(Float(), (8, 4)), Role("data", 0))
    widths = [4, 6, 10, 3]
    for k, (a, b) in enumerate(itertools.pairwise(widths)):
        x = f.emit("Relu", f.emit("MatMul", x, f.add_input_value(f"w{k}", Tensor(Float(), (a, b)), Role("parameter"))))
    f.set_outputs([x])
    base = placed(training_step(f.finalize(), "mse", "sgd"), Plan())
    assert _saving(base).blocks == []
    assert recompute(base, "full") is base


def test_words_and_bytes_only() -> None:
    with pytest.raises(UsageError, match=r"recompute: expected none, .* or the bytes .*; got 'some'"):
        Plan(recompute="some")
    assert Plan(recompute="1e9").recompute == "1e9"


def test_a_gradient_of_the_same_kind_is_no_copy() -> None:
    """The gradient of a product is a product, and `of` it."""
    base = placed(imported_mlp().function, Plan())
    ops: list[Op] = [op for op in base.ops if op.of is not None and op.of.spec is op.spec]
    assert ops
    assert not copies(base)


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_blocks_are_found_in_few_layers(layers: int) -> None:
    """The first of two begins with another sum than the second: that of the embeddings."""
    saving = _saving(placed(small_gpt(layers=layers).function, Plan()))
    assert len(saving.blocks) >= layers
    assert saved_bytes(saving, _blocks_again(saving, saving.blocks)) < 0.6 * saved_bytes(saving, ())


def unfused(plan: Plan) -> Function:
    step = training_step(decoder(Decoder(3, 64, 4, vocab=64, seq=8, batch=4, dropout=0.1)), optimizer="sgd")
    return placed(step, plan)


def test_attention_recomputes_what_lies_between_two_products_of_activations() -> None:
    """Scores, probabilities and what is left of them, but no product of weights, and not what attention gives."""
    base = unfused(Plan())
    made = recompute(base, "attention")
    again = copies(made)
    kinds = Counter(op.op_type for op in made.ops if op.outputs[0] in again)
    assert kinds == {"MatMul": 3, "CausalMask": 3, "Softmax": 3, "RandomDropout": 3}
    square = 4, 4, 8, 8  # batch, heads, and the sequence twice
    for f, count in ((base, 3 * 3), (made, 0)):  # probabilities, a mask, and what it leaves of them
        assert sum(shape_of(v) == square for v in _still_saved(_saving(f), ())) == count


@pytest.mark.parametrize("how", ["gathers", "attention"])
def test_gathers_are_repeated_and_shards_saved(how: str) -> None:
    plan = Plan(tp=2, sequence_parallel=True)
    base = unfused(plan)
    made = recompute(base, how)
    again = copies(made)
    kinds = Counter(op.op_type for op in made.ops if op.outputs[0] in again)
    assert kinds["MPIAllgather"] == 2 * 3 + 1  # two a layer, and the head's
    assert ("Softmax" in kinds) == (how == "attention")
    for v in _still_saved(_saving(made), ()):
        whole = isinstance(tensor(v).on("tp"), Replicate)
        assert not whole or len(shape_of(v)) < 3 or shape_of(v)[-1] == 1 or tensor(v).dtype.kind == "int", v


@pytest.mark.parametrize("how", ["gathers", "attention", "selective"])
def test_without_anything_of_its_kind_nothing_is_recomputed(how: str) -> None:
    """Fused attention is one op, and without sequence parallelism nothing is gathered."""
    base = placed(small_gpt().function, Plan(tp=2))
    assert (recompute(base, how) is base) == (how != "selective")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sizes", ["attention=unfused", "dropout=0.1", "attention=fused"])
def test_what_only_the_backward_pass_gathers_belongs_to_its_block(sizes: str, tp: int) -> None:
    """Under context parallelism keys are gathered once more, as the backward pass of attention that is not fused needs
    them: at the end of the forward pass each would cross all borders of blocks after its own."""
    text = f"llama:layers=5,hidden=32,heads=4,vocab=48,seq=16,batch=4,{sizes}"
    model = load(text, loss="cross-entropy", optimizer="adamw")
    plan = Plan(tp=tp, split=(InputSplit("cp", 2, (("*", 1),)),))
    dims = named_dims(model.function, plan.split)
    context = PassContext(plan, [Device("cpu", i) for i in range(plan.size)], splits=dims)
    saving = _saving(run_passes(model.function, ("fuse", "decompose", "pad", "place"), context))
    assert len(saving.blocks) == 5
    assert len({len(block) for block in saving.blocks}) == 1
    assert saved_bytes(saving, _blocks_again(saving, saving.blocks)) < 0.35 * saved_bytes(saving, ())


@pytest.mark.parametrize("how", ["products", "all-products"])
def test_of_products_every_second_is_recomputed(how: str) -> None:
    """A block of Llama has seven: q, k, v, out, gate, up and down. All but attention's and every second's results are
    made again; the last is in no backward op, and `all-products` keeps it until the block's backward pass."""
    sizes = Decoder(
        4, 32, 4, 64, 8, 2, ffn=48, gated=True, rotary=True, rms=True, bias=False, tied=False, separate=True
    )
    function = training_step(decoder(sizes), "cross-entropy", ADAMW)
    base = placed(function, Plan())
    made = recompute(base, how)
    again = copies(made)
    kinds = Counter(op.op_type for op in made.ops if op.outputs[0] in again)
    assert kinds["MatMul"] == 3 * 4
    assert kinds["Attention"] == 0
    assert kinds["RMSNorm"] == 2 * 4
    weights = [op.of.inputs[1].name for op in made.ops if op.outputs[0] in again and op.op_type == "MatMul" and op.of]
    assert {name.partition(".")[2] for name in weights} == {
        f"{x}.weight" for x in ("attention.k", "attention.out", "mlp.up")
    }
    backward = [op for op in made.ops if phases(made)[op] == BACKWARD]
    down = {op.outputs[0] for op in made.ops if op.inputs[1:] and op.inputs[1].name.endswith("mlp.out.weight")}
    used = down.intersection([v for op in backward for v in op.inputs])
    assert len(used) == (4 if how == "all-products" else 0)


@pytest.mark.parametrize("how", ["products", "all-products"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_products_are_exact(plan: Plan, how: str) -> None:
    test_equals_sequential("gpt", plan, how)
