"""Stages are balanced, values that skip a stage are sent on, and tied weights stay tied."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distir.api.compilation import distribute as make_distributed
from distir.api.model import Precision, load
from distir.ir import Device, Function, FunctionMaker, Mesh, Op
from distir.ir.errors import InfeasibleError
from distir.ir.function import Role
from distir.ir.type import REPLICATE, SUM, BFloat16, Bool, Float32, Float64, Tensor
from distir.models import mlp
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation.training import training_step
from distir.transforms.parallel3d import distribute
from distir.transforms.pipeline import partition
from distir.transforms.pipeline.lift import lift_sums
from distir.transforms.pipeline.partition import balanced, balanced_cut, choices, ways
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, phases
from distir.transforms.pipeline.stages import PLAIN, Follows, StageCost, backward_stages, cut_stages
from distir.transforms.plan import Plan as Settings
from tests.transforms.programs import BATCH, Plan, Program, check, distributed, error, gpt2_tiny, run, small_gpt

costs = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def max_cost(cuts: tuple[int, ...], cost: list[int], cut_cost: list[int]) -> int:
    """The maximum cost of a part, the larger cut cost of its ends included."""
    ends = (0, *cuts, len(cost))
    return max(
        sum(cost[a:b]) + max(cut_cost[a] if a else 0, cut_cost[b] if b < len(cost) else 0)
        for a, b in itertools.pairwise(ends)
    )


@given(costs, st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_sequence_is_cut_best(cost: list[int], parts: int, rng: random.Random) -> None:
    cut_cost = [rng.randrange(10) for _ in range(len(cost) + 1)]
    if parts > len(cost):
        with pytest.raises(InfeasibleError, match=f"{len(cost)} cuttable pieces cannot make {parts} stages"):
            balanced_cut(cost, cut_cost, parts)
        return
    cuts = tuple(balanced_cut(cost, cut_cost, parts))
    assert list(cuts) == sorted(set(cuts))
    best = min(max_cost(c, cost, cut_cost) for c in itertools.combinations(range(1, len(cost)), parts - 1))
    assert max_cost(cuts, cost, cut_cost) == best


@given(st.integers(2, 3), st.randoms(use_true_random=False))
def test_closed_sets_are_cut_best(parts: int, rng: random.Random) -> None:
    """Against all chains of closed sets of a program whose ops are two chains that meet."""
    m = FunctionMaker()
    x = m.add_input_value("x", Tensor(Float64, (rng.randint(1, 9),)))
    left, right = m.add_op("Relu", inputs=[x]), m.add_op("Neg", inputs=[x])
    m.add_op("Add", inputs=[m.add_op("Exp", inputs=[left]), m.add_op("Tanh", inputs=[right])])
    program = ways(m.finalize().ops)
    found = choices(program, [rng.randint(0, 9) for _ in program.ops], rng.choice([0.0, 0.05, 1.0]))
    total, cut_cost, subset = found.total, found.cut_cost, program.subset
    assert total is not None
    assert cut_cost is not None
    assert subset is not None

    def cost(chain: tuple[int, ...]) -> float:
        return max(total[b] - total[a] + max(cut_cost[a], cut_cost[b]) for a, b in itertools.pairwise(chain))

    last = len(program.sets) - 1
    chains = [(0, *c, last) for c in itertools.combinations(range(1, last), parts - 1)]
    best = min(cost(c) for c in chains if all(subset[a, b] for a, b in itertools.pairwise(c)))
    stages = balanced(found, parts)
    first = [sum([1 << i for i, s in enumerate(stages) if s < k]) for k in range(parts + 1)]
    assert cost(tuple([program.sets.index(ops) for ops in first])) == pytest.approx(best)


def test_of_equal_cuts_the_most_even() -> None:
    """The last element alone determines the maximum cost; the others are still balanced."""
    assert balanced_cut([1.0] * 6 + [9.0], [0.0] * 8, 4) == [2, 4, 6]


def test_what_costs_nothing_is_cut_where_least_is_sent() -> None:
    assert balanced_cut([0.0] * 4, [0.0, 3.0, 1.0, 2.0, 0.0], 2) == [2]


@pytest.mark.parametrize("parts", [2, 4, 30])
@pytest.mark.parametrize("cheaper", [0, 300])
def test_a_long_sequence_is_cut_everywhere(parts: int, cheaper: int) -> None:
    """Not only where the first of many crossings are that cost the same."""
    n = 3000
    crossing = [0.0, *[0.5 if 10 <= i < 10 + cheaper else 1.0 for i in range(1, n)], 0.0]
    cuts = [0, *balanced_cut([1.0] * n, crossing, parts), n]
    assert max(b - a for a, b in itertools.pairwise(cuts)) <= n / parts + 30


@pytest.mark.parametrize("few", [True, False])
def test_messages_have_a_price(few: bool) -> None:
    """Of four ops of equal cost two values cross the middle, where a cut is even, and one the other borders."""
    m = FunctionMaker()
    x = m.emit("Relu", m.add_input_value("x", Tensor(Float64, (4,))))
    y = m.emit("Exp", x)
    z = m.emit("Add", x, y)
    m.set_outputs([m.emit("Neg", z)])
    given = ways(m.finalize().ops)
    given = given if few else partition.Ways(given.ops, partition._crossing(given.ops))
    assert given.border.tolist() == [[0, 0], [64, 2], [128, 4], [64, 2], [0, 0]]
    assert balanced(choices(given, [1.0] * 4, 0.0), 2) == [0, 0, 1, 1]
    assert balanced(choices(given, [1.0] * 4, 0.0, 0.4), 2) == [0, 0, 1, 1]  # 2 + 4 x 0.4 are less than 3 + 2 x 0.4
    assert balanced(choices(given, [1.0] * 4, 0.0, 0.6), 2) != [0, 0, 1, 1]
    assert balanced(choices(given, [1.0] * 4, 1 / 64), 2) != [0, 0, 1, 1]  # for the bytes


def test_one_op_sends_nothing_and_makes_no_two_stages() -> None:
    m = FunctionMaker()
    m.set_outputs([m.emit("Relu", m.add_input_value("x", Tensor(Float64, (4,))))])
    given = ways(m.finalize().ops)
    assert given.border.tolist() == [[0, 0], [0, 0]]
    with pytest.raises(InfeasibleError, match="1 cuttable pieces cannot make 2 stages"):
        balanced(choices(given, [1.0], 1.0, 1.0), 2)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_equal_layers_are_cut_alike(parts: int) -> None:
    """The cost of a hand-written backward pass counts: sending costs more here than a layer's forward pass."""
    placed = distributed(Program(mlp(8, 4096, 4096), []), Plan(1, 1, 1, 2)).placed
    _, stage = cut_stages(placed, parts, 2)
    for kind in ("MatMul", "Relu", "MatMulGrad"):
        count = Counter(s for op, s in stage.items() if op.spec.name == kind)
        assert count == dict.fromkeys(range(parts), 8 // parts), kind


def test_a_backward_pass_written_by_hand_is_paid_for() -> None:
    """Its ops have no `of`: their forward ops are inferred from their operands."""
    placed = distributed(Program(mlp(8, 64, 64), []), Plan(1, 1, 1, 2)).placed
    _, stage = cut_stages(placed, 4, 2, StageCost(lambda op: float(op.spec.name == "MatMulGrad"), 0.0))
    assert Counter(s for op, s in stage.items() if op.spec.name == "MatMulGrad") == dict.fromkeys(range(4), 2)


# ---- against brute force over all monotone assignments


def branched(seed: int) -> Function:
    """A training step of a small random network with skip connections and branches."""
    rng = random.Random(seed)
    f = FunctionMaker("net")
    streams = [f.add_input_value("x", Tensor(Float64, (BATCH, 8)), Role("data", 0))]
    for i in range(rng.randrange(3, 6)):
        if rng.random() < 0.3 and len(streams) > 2:
            streams.append(f.emit("Add", streams[-1], rng.choice(streams[1:])))
            continue
        w = f.add_input_value(f"w{i}", Tensor(Float64, (8, 8)), Role("parameter"))
        y = f.emit("MatMul", rng.choice(streams[-3:]), w)
        streams.append(f.emit("Relu", y) if rng.random() < 0.5 else y)
    used = {v for op in f.ops for v in op.inputs}
    first, *rest = [v for v in streams[1:] if v not in used]
    for v in rest:
        first = f.emit("Add", first, v)
    f.set_outputs([first])
    return training_step(f.finalize(), "mse")


def stage_price(function: Function, stage: dict[Op, int], parts: int) -> float:
    """The maximum stage cost, as the cut counts it: ops with those that follow them, and cut costs, both ways."""
    phase = phases(function)
    load = [0.0] * parts
    forward = [op for op in function.ops if phase[op] == FORWARD]
    for op in function.ops:
        if phase[op] == FORWARD:
            load[stage[op]] += PLAIN.op(op)
        elif phase[op] == BACKWARD and op.of in stage:
            load[stage[op.of]] += PLAIN.op(op)
    made = {v: stage[op] for op in forward for v in op.outputs}
    last = dict(made)
    for op in forward:
        for v in op.inputs:
            if v in last:
                last[v] = max(last[v], stage[op])
    boundary_seconds = [0.0] * (parts + 1)
    for v, s in made.items():
        for boundary in range(s, last[v]):
            boundary_seconds[boundary + 1] += 2 * PLAIN.sent * tensor(v).dtype.size * math.prod(shape_of(v))
    return max(x + max(ends) for x, ends in zip(load, itertools.pairwise(boundary_seconds), strict=True))


def monotone(forward: list[Op], parts: int) -> list[dict[Op, int]]:
    """Every assignment in which no op is on an earlier stage than its operands, and no stage is empty."""
    producer = {v: op for op in forward for v in op.outputs}
    found: list[dict[Op, int]] = [{}]
    for op in forward:
        found = [
            {**stage, op: s}
            for stage in found
            for s in range(max([0, *(stage[producer[v]] for v in op.inputs if v in producer)]), parts)
        ]
    return [stage for stage in found if len(set(stage.values())) == parts]


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_as_cheap_as_brute_force(seed: int, parts: int) -> None:
    function = branched(seed)
    placed = distributed(Program(function, []), Plan(1, 1, 1, 2)).placed
    phase = phases(placed)
    forward = [op for op in placed.ops if phase[op] == FORWARD]
    assignments = monotone(forward, parts)
    best = min(stage_price(placed, stage, parts) for stage in assignments)
    cut, found = cut_stages(placed, parts, 2)
    mine = {v.name: s for op, s in found.items() for v in op.outputs}
    stage = {op: mine[op.outputs[0].name] for op in forward}
    assert cut is not None
    assert stage_price(placed, stage, parts) <= best * (1 + 1e-9)


def test_embedding_and_head_are_part_of_the_balance() -> None:
    """With a large vocabulary the head's stage has fewer blocks."""
    program = small_gpt(layers=6, vocabulary=512)
    made = distributed(program, Plan(1, 1, 2, 2)).program
    first = next(f for f in made.callees() if f.name == "fwd0")
    second = next(f for f in made.callees() if f.name == "fwd1")
    blocks = [sum(op.op_type == "Attention" for op in f.ops) for f in (first, second)]
    assert sum(blocks) == 6
    assert blocks[0] > blocks[1]


# ---- what crosses stages


def skipping() -> Program:
    """The first activation is used again at the very end, and a weight on the first and the last stage."""
    f = FunctionMaker("skip")
    width = 256  # so wide that computing costs more than sending
    x = f.add_input_value("x", Tensor(Float64, (BATCH, width)), Role("data", 0))
    weights = [f.add_input_value(f"w{i}", Tensor(Float64, (width, width)), Role("parameter")) for i in range(6)]
    first = a = f.emit("Tanh", f.emit("MatMul", x, weights[0]))
    for w in weights[1:]:
        a = f.emit("Tanh", f.emit("MatMul", a, w))
    f.set_outputs([f.emit("Add", f.emit("MatMul", a, weights[0]), first)])
    step = training_step(f.finalize(), "mse", gradients=True)
    rng = np.random.default_rng(0)
    return Program(step, [rng.standard_normal(shape_of(v)) / 16 for v in step.inputs])


def test_values_that_skip_stages_are_sent_on() -> None:
    program = skipping()
    function = check(program, Plan(1, 1, 3, 4))
    sends = [op for op in function.ops if op.op_type == "Send" and op.inputs[0].kind is None]
    ways = [(tensor(op.inputs[0]).mesh.name, op.attributes["to"].name) for op in sends]
    assert ways.count(("stage0", "stage2")) == 4  # once a microbatch, though two ops there need it
    assert ways.count(("stage0", "stage1")) == ways.count(("stage1", "stage2")) == 4


def test_tied_weights_have_one_gradient_and_one_home() -> None:
    program, plan = gpt2_tiny(), Plan(1, 1, 2, 4)
    function = distributed(program, plan).program
    table = next(v for v in function.inputs if shape_of(v) == (509, 64) and v.kind == "parameter")
    sent = [op for op in function.ops if op.op_type == "Send" and op.inputs[0] is table]
    assert len(sent) == 1  # the weight itself, once a step
    updates = [op for f in function.callees() for op in f.ops if op.op_type == "AdamW"]
    assert sum(shape_of(op.inputs[0]) == (509, 64) for op in updates) == 1
    assert error(run(function, program), program.results()) <= 1e-10


def sent_whole(function: Function, shape: tuple[int, ...]) -> list[str]:
    """The dtypes of what is sent that has, over all devices, a shape."""
    sent = [tensor(op.inputs[0]) for op in function.ops if op.op_type == "Send"]
    return [str(t.dtype) for t in sent if t.global_shape == shape]


def test_a_tied_gradient_is_sent_once_a_step() -> None:
    """Each stage accumulates its part over the microbatches before sending it."""
    for microbatches in (1, 2, 4):
        function = distributed(small_gpt(), Plan(1, 1, 2, microbatches)).program
        assert len(sent_whole(function, (16, 8))) <= 2  # the weight one way, its gradient the other


@pytest.mark.parametrize(("precision", "low"), [("bf16", "bf16"), ("fp16", "f16")])
@pytest.mark.parametrize("pp", [2, 3])
def test_a_tied_gradient_of_16_bits_is_sent_once_a_step(pp: int, precision: Precision, low: str) -> None:
    """Each stage accumulates its part in float32; the weight is sent as it is used."""
    sizes = "gpt:layers=4,hidden=24,heads=2,vocab=56,seq=8,batch=16"
    model = load(sizes, loss="cross-entropy", optimizer="adamw", precision=precision)
    for microbatches in (1, 2, 8):
        function = make_distributed(model, Settings(pp=pp, dp=2, microbatches=microbatches))
        assert sent_whole(function, (56, 24)) == [low, "f32"]


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
def test_under_a_cast_only_sums_are_lifted_of_which_all_operands_are(chosen: bool, cast: bool) -> None:
    """What chooses between two sums is none: it is not cast with them."""
    mesh = Mesh([Device("cpu", 0)], {"mb": 2}, "m")
    f = FunctionMaker("f")
    parts = [f.add_input_value(x, Tensor(BFloat16, (4,), mesh, (SUM,))) for x in "ab"]
    which = f.add_input_value("which", Tensor(Bool, (4,), mesh, (REPLICATE,)))
    made = [f.emit("Neg", x) for x in parts]
    summed = f.emit("Where", which, *made) if chosen else f.emit("Add", *made)
    x = f.emit("Cast", summed, to=Float32) if cast else summed
    f.set_outputs([f.add_op("MPIAllreduce", "total", [x], {"axis": "mb"})])
    function = f.finalize()
    stage = {op: int(k == 1) for k, op in enumerate(function.ops[:-1])}
    lifted, stages = lift_sums(function, stage)
    assert (lifted is function) == (chosen and cast)
    if lifted is not function:
        totals = [op for op in lifted.ops if op.spec.comm is not None]
        assert [stages[lifted.producers()[op.inputs[0]]] for op in totals] == [0, 1]
        dtypes = {tensor(v).dtype for op in totals for v in op.outputs}
        assert dtypes == {Float32 if cast else BFloat16}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2, 3, 4]))
def test_gradients_flow_backward_only(seed: int, parts: int) -> None:
    """No stage of the backward pass waits for an earlier one."""
    placed = distributed(Program(branched(seed), []), Plan(1, 1, 1, 2)).placed
    try:
        cut, stage = cut_stages(placed, parts, 2)
    except InfeasibleError:
        return
    phase, producer = phases(cut), cut.producers()
    for op in cut.ops:
        for v in op.inputs:
            made = producer.get(v)
            if made in stage and op in stage and phase[op] == phase[made]:
                if phase[op] == FORWARD:
                    assert stage[made] <= stage[op]
                elif phase[op] == BACKWARD:
                    assert stage[made] >= stage[op]


@pytest.mark.parametrize("pp", [2, 3])
def test_gradients_are_gathered_where_the_whole_is_needed(pp: int) -> None:
    """Under sequence parallelism a stage sends its part of a gradient to the one before, which gathers it."""
    program = small_gpt(layers=3)
    plan = Plan(tp=2, pp=pp, microbatches=2, sequence_parallel=True)
    sent = [
        op.inputs[0]
        for op in check(program, plan).ops
        if op.spec.route == "send" and len(shape_of(op.inputs[0])) == 3 and tensor(op.inputs[0]).dtype.floating
    ]
    assert len(sent) == 2 * 2 * (pp - 1)  # both ways in each microbatch
    assert all([tensor(v).on("tp").dim is not None for v in sent])


def test_a_gradient_that_several_stages_need_whole_is_gathered_on_the_last_of_them() -> None:
    """The gradient comes from stage 3; those who need it are on stages 0 and 2, in either order."""
    forward: dict[int, int] = {10: 3, 11: 2, 12: 0}
    made, gather = Follows[int](0, 10, False, (), ()), Follows[int](1, 10, False, (0,), (), gathers=True)
    for users in itertools.permutations([(2, 11), (3, 12)]):
        stage = dict(forward)
        backward_stages([made, gather, *[Follows[int](op, of, False, (1,), ()) for op, of in users]], stage, 4)
        assert [stage[op] for op in range(4)] == [3, 2, 2, 0]


def test_the_loss_gradient_alone_counts_with_the_forward_pass() -> None:
    """Not what transposes saved values of attention, which needs no gradient either: else stages end up on the last."""
    text = "gpt:layers=4,hidden=32,heads=4,seq=16,batch=8,vocab=32,attention=unfused"
    step = load(text, loss="cross-entropy").function
    for start in ("backward", "forward"):
        plan = Settings(pp=4, microbatches=2, loss_gradient=start)
        made = distribute(step, plan, [Device("cpu", i) for i in range(4)])
        found = {v.name: v.type.device for v in made.program.inputs if isinstance(v.type, Tensor)}
        stages = [found[f"{k}.mlp.in.weight"] for k in range(4)]
        assert [home.name if isinstance(home, Mesh) else "" for home in stages] == [f"stage{k}" for k in range(4)]
