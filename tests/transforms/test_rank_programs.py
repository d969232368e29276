"""Programs of ranks: together they do what the distributed program does, by proof and run; and are simulated as run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.ir import Device, Function, Mesh, Op, Topology, Value, parse, pformat, same
from distir.ir.communication import TRANSFERS
from distir.ir.errors import IRTypeError, ModelError
from distir.ir.function import Attributes
from distir.models.gpt import gpt
from distir.transforms.differentiation.training import AdamW, training_step
from distir.transforms.parallel3d import parallel_transform_3d
from distir.transforms.rank import validate_ranks as validation
from distir.transforms.rank.as_run import as_run
from distir.transforms.rank.check_programs import check_programs
from distir.transforms.rank.order import check_ahead, check_order
from distir.transforms.rank.post_receives import receive_order
from distir.transforms.rank.project import RankProgram
from distir.transforms.rank.rank_program import RankOptions, rank_program, rank_programs
from tests.transforms.programs import ADAMW, TOLERANCE, Plan, Program, distributed, error, imported_mlp, small_gpt
from tests.transforms.run_ranks import run_ranks

PLANS = [
    *(Plan(2, 1, 1, 1), Plan(1, 2, 1, 1), Plan(1, 1, 2, 2), Plan(2, 2, 2, 2), Plan(2, 1, 2, 4, zero=1)),
    *(Plan(2, 2, 1, 1, zero=3), Plan(2, 2, 2, 2, host=True), Plan(1, 1, 2, 4, "interleaved", chunks=2)),
]


def replaced(f: Function, old: Op, new: Op | None) -> Function:
    """The function with another op in the place of one; None: with its operand in the place of its result."""
    stands: dict[Value, Value] = {} if new else dict.fromkeys(old.outputs, old.inputs[0])
    ops = []
    for op in f.ops:
        if op is old and new is None:
            continue
        op = new if op is old and new else op
        ops.append(Op(op.spec, tuple([stands.get(v, v) for v in op.inputs]), op.attributes, op.outputs, op.of))
    outputs = tuple([stands.get(v, v) for v in f.outputs])
    updates = {stands.get(a, a): b for a, b in f.updates.items()}
    return Function(f.name, f.inputs, tuple(ops), outputs, updates, {stands.get(v, v): s for v, s in f.sources.items()})


def calling(f: Function, old: Function, new: Function) -> Function:
    """The program with another callee in the place of one."""
    if f is old:
        return new
    ops = [
        Op(op.spec, op.inputs, Attributes({**op.attributes, "callee": new}), op.outputs) if op.callee is old else op
        for op in f.ops
    ]
    return Function(f.name, f.inputs, tuple(ops), f.outputs, f.updates, f.sources)


def edits(f: Function) -> Iterator[tuple[str, Function]]:
    """A function with one fault, for each there is a place for."""
    for op in f.ops:
        if op.spec.route == "axis" and op.inputs[0].type is not op.outputs[0].type:
            yield f"{op} dropped", replaced(f, op, None)
            at = op.inputs[0].type.device
            axes = at.axes if isinstance(at, Mesh) else ()
            for axis in axes:
                if axis != op.attributes["axis"]:
                    other = Op(op.spec, op.inputs, Attributes({**op.attributes, "axis": axis}), op.outputs)
                    yield f"{op} along {axis}", replaced(f, op, other)
        elif op.op_type in ("Accumulate", "LocalSlice"):
            yield f"{op} dropped", replaced(f, op, None)
        elif op.attributes.get("mb") is not None:
            mb = Attributes({**op.attributes, "mb": 1 - min(op.attributes["mb"], 1)})
            yield f"{op} for microbatch {mb['mb']}", replaced(f, op, Op(op.spec, op.inputs, mb, op.outputs))


def faulty(programs: Sequence[RankProgram]) -> Iterator[tuple[str, list[RankProgram]]]:
    """The programs with a fault, the same on all ranks that share a program."""
    for f in dict.fromkeys(p.function for p in programs):
        for g in (f, *f.callees()):
            for what, new in edits(g):
                bad = calling(f, g, new)
                yield f"{g.name}: {what}", [p._replace(function=bad) if p.function is f else p for p in programs]


def passes(check, programs: Sequence[RankProgram]) -> bool:
    try:
        check(programs)
    except ModelError:
        return False
    return True


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_faults_of_all_ranks_of_a_stage_are_found(plan: Plan) -> None:
    program = distributed(small_gpt(vocabulary=15), plan).program
    programs = rank_programs(program, RankOptions(receives_ahead=False))
    check = partial(check_programs, program)
    check(programs)
    seen = Counter[bool]()
    for what, bad in faulty(programs):
        seen[passes(check_order, bad)] += 1
        assert not passes(check, bad), what
    if plan != Plan(1, 1, 2, 4, "interleaved", chunks=2):
        assert seen[True] >= 5, "faults that the order of communication does not show"


OPTIONS = [RankOptions(), RankOptions(compiled=True), RankOptions(receives_ahead=False)]


@pytest.mark.parametrize("program", [small_gpt, imported_mlp, lambda: small_gpt(vocabulary=15, optimizer=ADAMW)])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_ranks_compute_together_what_the_program_does(program: Callable[[], Program], plan: Plan) -> None:
    """Proved, and on numbers; with all that passes of ranks make."""
    source, kinds = program(), Counter[str]()
    whole = distributed(source, plan).program
    for options in OPTIONS:
        found = rank_programs(whole, options)
        check_programs(whole, found)
        assert error(run_ranks(whole, found, source), source.results()) <= TOLERANCE
        for p in found:
            assert same(parse(pformat(p.function)), p.function)
            kinds.update(op.op_type for f in (p.function, *p.function.callees()) for op in f.ops)
    assert kinds["Gemm"] > 0
    assert kinds["GroupedSGD"] + kinds["GroupedAdamW"] > 0 or plan.zero == 1


def test_one_rank_alone_is_as_among_all() -> None:
    program = distributed(small_gpt(), Plan(1, 2, 2, 2)).program
    for p in rank_programs(program, RankOptions(compiled=True)):
        alone = rank_program(program, p.rank, RankOptions(compiled=True))
        assert same(alone.function, p.function)
        assert alone[:2] + alone[3:] == p[:2] + p[3:]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_is_simulated_is_what_ranks_run(plan: Plan) -> None:
    """On each device the ops that are priced are those of its rank's program; memory counts them in their order."""
    program = distributed(small_gpt(vocabulary=15, optimizer=ADAMW), plan).program
    topology = Topology()
    for i in range(len(plan.devices)):
        topology.add_device("gpu", 1e12, 1e11, 1e9)
        for j in range(i):
            topology.set_bandwidth(topology.devices[j], topology.devices[i], 10.0)
    simulation = Simulator(CostModel(topology)).interpret(as_run(program), order=receive_order)
    for p in rank_programs(program):
        curve = [as_run(program).ops[point.op] for point in simulation.memory(p.device).curve]  # type: ignore[arg-type]
        executed = [op for op in curve if op.spec.name != "Restrict"]
        mine = [op for op in p.function.ops if op.spec.name != "Restrict"]
        assert [key(op) for op in mine] == [key(op) for op in executed]


def key(op: Op) -> object:
    """What an op is in a rank's program and in the distributed one: a call by its callee, a transfer by what comes."""
    if op.callee is not None:
        return op.callee.name, op.attributes.get("mb")
    if op.spec.route in ("incoming", "outgoing", *TRANSFERS):
        return "transfer"
    return op.spec.name, tuple(v.name for v in op.outputs)


def test_the_rank_is_named() -> None:
    program = distributed(small_gpt(), Plan(1, 2, 2, 2)).program
    programs = rank_programs(program)
    bad = next(bad for what, bad in faulty(programs) if "bwd1" in what and "dropped" in what)
    with pytest.raises(IRTypeError, match=r"^rank 2: \w+\.?\w*: op \d+ %"):
        check_programs(program, bad)


def test_a_receive_that_stands_later_is_refused() -> None:
    program = distributed(small_gpt(), Plan(1, 1, 2, 4)).program
    ahead, in_step = rank_programs(program), rank_programs(program, RankOptions(receives_ahead=False))
    check_ahead(ahead, in_step)
    with pytest.raises(ModelError, match=r"rank \d: .*MPIRecv\(\) stands later than where the value is sent"):
        check_ahead(in_step, ahead)


def test_what_is_validated_does_not_grow_with_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 ranks take as many steps as 64."""
    step = training_step(gpt(8, 64, 4, 128, 16, 512), "cross-entropy", AdamW())
    right, counts = validation._Terms.results, Counter[int]()
    for dp in (4, 64):
        program = parallel_transform_3d(step, dp, 2, 8, [Device("gpu", i) for i in range(dp * 16)], 8)
        found = rank_programs(program)
        assert len(found) == dp * 16

        def counted(terms: Any, op: Op, ins: Any, dp: int = dp) -> Any:
            counts[dp] += 1
            return right(terms, op, ins)

        monkeypatch.setattr(validation._Terms, "results", counted)
        validation.validate_ranks(program, found)
    assert counts[4] == counts[64] > 1000
