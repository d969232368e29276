"""Proxies: what is sent stays, in its order; all compute is slept, and takes what was predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

from distir.api.compilation import predict
from distir.api.messages import messages
from distir.api.model import Model
from distir.api.stage_cost import OpSeconds
from distir.executor.cost_model import CostModel
from distir.executor.simulator.simulation import Simulator
from distir.hardware import load_cluster
from distir.ir import Device, Function, Mesh, Op, parse, pformat, same, verify
from distir.ir.errors import InfeasibleError, IRTypeError
from distir.ir.function import Attributes, FunctionMaker
from distir.ir.type import REPLICATE, SUM, Float32, Tensor
from distir.transforms.plan import Plan as Whole
from distir.transforms.rank.as_run import as_run
from distir.transforms.rank.order import check_order
from distir.transforms.rank.proxied import proxied
from distir.transforms.rank.rank_program import in_step
from distir.transforms.relocate import relocate
from tests.transforms.programs import Plan, Program, distributed, gpt2_tiny, imported_mlp, small_gpt
from tests.transforms.random_programs import LARGE, random_plans, random_programs

PLANS = [
    Plan(2, 2, 2, 4),
    Plan(2, 1, 2, 4, zero=2),
    Plan(4, 1, 1, 2, zero=3, bucket_mb=0.001),
    Plan(1, 2, 1, 1, sequence_parallel=True),
    Plan(2, 1, 1, 1, split=("cp=2:input_ids.1,labels.1",)),
    Plan(1, 2, 1, 1, split=("cp=2:input_ids.1,labels.1",), sequence_parallel=True),
]


def ops_of(program: Function) -> Iterator[tuple[Function, Op]]:
    for f in (program, *program.callees()):
        for op in f.ops:
            yield f, op


def one_second(function: Function, op: Op) -> float:
    return 1.0


def computes(op: Op) -> bool:
    return op.spec.comm is None


def check(program: Function) -> Function:
    """The proxy of a program as it is run, with what holds for all of them."""
    proxy = proxied(program, one_second)
    verify(proxy)
    assert same(parse(pformat(proxy)), proxy)
    assert messages(proxy) == messages(program)
    in_bodies = [op for f, op in ops_of(proxy) if f is not proxy]
    assert not any(computes(op) for op in in_bodies)
    slept = Counter[str]()
    for f, op in ops_of(proxy):
        if op.op_type == "Sleep":
            slept[f.name] += round(op.attributes["seconds"])
    held = {"Pack", "Unpack", "After"}
    for f in program.callees():  # each op is slept once: what computes, and what moves a device's own data
        own = [op for op in f.ops if op.callee is None and op.spec.route in (None, "here") and op.op_type not in held]
        assert slept[f.name] == len(own), f.name
    return proxy


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_is_sent_stays_and_compute_is_slept(plan: Plan) -> None:
    program = as_run(distributed(small_gpt(), plan).program)
    proxy = check(program)
    check_order(in_step(proxy))  # ranks meet in the same order


@settings(max_examples=15, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=LARGE)
@given(random_programs(), random_plans)
def test_of_random_programs(program: Program, plan: Plan) -> None:
    try:
        made = distributed(program, plan)
    except InfeasibleError:
        return
    check(as_run(made.program))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([0.0, 0.5, 3.0]))
def test_the_simulator_takes_the_seconds_of_a_sleep(seconds: float) -> None:
    maker = FunctionMaker("sleeps")
    cost = CostModel(load_cluster("cpu-2core"))
    x = maker.add_input_value("x", Tensor(Float32, (4,), cost.topology.devices[0]))
    y = maker.emit("Sleep", x, seconds=seconds, types=(x.type,))
    maker.set_outputs([maker.emit("Sleep", y, seconds=1.0, types=(x.type,))])
    assert Simulator(cost).interpret(maker.finalize()).seconds == seconds + 1


def test_a_proxy_takes_what_its_program_is_predicted_to_take() -> None:
    """Without communication beside compute a step is the sum of all ops, slept or not."""
    program = imported_mlp()
    plan = Whole(2, overlap=False)
    cost = CostModel(load_cluster("cpu-2core"))
    made = as_run(distributed(program, Plan(2, overlap=False)).program)
    made = relocate(made, cost.topology.devices[:2])
    seconds = OpSeconds(cost)
    proxy = proxied(made, lambda function, op: seconds(op))
    model = Model(program.function)
    want, got = (predict(model, plan, p, cost).step_seconds for p in (made, proxy))
    assert got == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"seconds": -1.0}, "attribute seconds"),
        ({"seconds": float("inf")}, "attribute seconds"),
        ({"types": ("f32",)}, "attribute types"),
    ],
)
def test_sleeps_that_are_none(attributes: dict[str, object], said: str) -> None:
    maker = FunctionMaker("sleeps")
    x = maker.add_input_value("x", Tensor(Float32, (4,)))
    with pytest.raises(IRTypeError, match=said):
        maker.emit("Sleep", x, **{"seconds": 1.0, "types": (x.type,), **attributes})


def test_a_wrong_result_of_a_sleep_is_rejected() -> None:
    program = as_run(distributed(gpt2_tiny(), Plan(2)).program)
    proxy = proxied(program, one_second)
    body = next(f for f in proxy.callees() if any(op.op_type == "Sleep" for op in f.ops))
    op = next(op for op in body.ops if op.op_type == "Sleep" and len(op.outputs) > 1)
    bad = Op(op.spec, op.inputs, Attributes({**op.attributes, "types": op.attributes["types"][:1]}), op.outputs)
    ops = tuple([bad if x is op else x for x in body.ops])
    with pytest.raises(IRTypeError):
        verify(Function(body.name, body.inputs, ops, body.outputs))


@pytest.mark.parametrize("under_way", [True, False])
def test_what_an_earlier_function_has_issued_is_waited_for_at_its_first_use(under_way: bool) -> None:
    """A function takes a result of another one late: one that was only issued there, or one that was used."""
    mesh = Mesh([Device("cpu", 0), Device("cpu", 1)], {"dp": 2}, "m")
    whole, part = (Tensor.whole(Float32, (4,), mesh, [p]) for p in (REPLICATE, SUM))
    first = FunctionMaker("first")
    summed = first.emit("MPIAllreduce", first.add_input_value("x", part), axis="dp")
    first.set_outputs([summed if under_way else first.emit("Relu", summed)])
    second = FunctionMaker("second")
    a, b = second.add_input_value("a", whole), second.add_input_value("b", whole)
    y = second.emit("Neg", a)
    second.set_outputs([y, second.emit("Add", y, second.emit("Relu", b))])
    maker = FunctionMaker("main")
    x, w = maker.add_input_value("x", part), maker.add_input_value("w", whole)
    arrived = maker.add_op("Call", "s", [x], {}, [first.finalize()])
    maker.set_outputs(list(maker.add_op("Call", None, [w, arrived], {}, [second.finalize()], ["y", "z"])))
    proxy = proxied(maker.finalize(), one_second)
    verify(proxy)
    sleeps = [op for f in proxy.callees() if f.name == "second" for op in f.ops]
    assert [op.attributes["seconds"] for op in sleeps] == ([1.0, 2.0] if under_way else [3.0])
    if under_way:
        assert [v.name for v in sleeps[0].inputs] == ["a"]
