"""Collectives that are sent in pieces beside a product; `test_simulator` and `test_exact` compare what the simulator
makes of it with the plain loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

import distir
from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.cost_model.seconds import quantize
from distir.executor.simulator.beside_products import beside_products
from distir.hardware import load_cluster
from distir.ir import Function, FunctionMaker, Mesh
from distir.ir.host_runtime import Runtime
from distir.ir.type import BFloat16, Shard, Tensor
from distir.transforms.plan import InputSplit

IN_PIECES = Runtime("pieces", overlaps_products=True)


def layer(tokens: int, width: int = 4096) -> tuple[Function, Mesh]:
    """Activations that are gathered, a product of split columns and one of split rows, and its scattered sum."""
    mesh = Mesh(load_cluster("dgx-h100").devices, {"tp": 8}, "m")
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor.whole(BFloat16, (tokens, width), mesh, [Shard(0)]))
    a = f.add_input_value("a", Tensor.whole(BFloat16, (width, 4 * width), mesh, [Shard(1)]))
    b = f.add_input_value("b", Tensor.whole(BFloat16, (4 * width, width), mesh, [Shard(0)]))
    y = f.emit("Neg", f.emit("MatMul", f.emit("MPIAllgather", x, axis="tp"), a))
    f.set_outputs([f.emit("MPIReduceScatter", f.emit("MatMul", y, b), axis="tp", dim=0)])
    return f.finalize(), mesh


def test_a_collective_is_beside_the_product_that_needs_or_makes_it() -> None:
    f, _ = layer(1024)
    gather, first, _, second, scatter = f.ops
    assert beside_products(f) == {gather: first, scatter: second}


@pytest.mark.parametrize("turned", [False, True])
def test_of_several_products_the_first_needs_and_the_last_makes(turned: bool) -> None:
    mesh = Mesh(load_cluster("dgx-h100").devices, {"tp": 8}, "m")
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor.whole(BFloat16, (64, 32), mesh, [Shard(0)]))
    a = f.add_input_value("a", Tensor.whole(BFloat16, (32, 64), mesh, [Shard(1)]))
    b = f.add_input_value("b", Tensor.whole(BFloat16, (64, 32), mesh, [Shard(0)]))
    y = f.emit("MPIAllgather", x, axis="tp")
    hidden = [f.emit("MatMul", y, a) for _ in range(2)]
    parts = [f.emit("MatMul", h, b) for h in hidden]
    total = f.emit("Add", *(reversed(parts) if turned else parts))
    f.set_outputs([f.emit("MPIReduceScatter", total, axis="tp", dim=0)])
    gather, first, _, _, last, _, scatter = f.finalize().ops
    assert beside_products(f.finalize()) == {gather: first, scatter: last}


def test_a_sum_that_all_devices_get_is_waited_for() -> None:
    """Without sequence parallelism (Megatron-LM, training/arguments.py: tp_comm_overlap needs it)."""
    mesh = Mesh(load_cluster("dgx-h100").devices, {"tp": 8}, "m")
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor.whole(BFloat16, (64, 32), mesh, [Shard(1)]))
    b = f.add_input_value("b", Tensor.whole(BFloat16, (32, 64), mesh, [Shard(0)]))
    f.set_outputs([f.emit("MPIAllreduce", f.emit("MatMul", x, b), axis="tp")])
    assert beside_products(f.finalize()) == {}


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100"])
def test_what_is_waited_for_delays_what_does_not_need_it(name: str) -> None:
    """The sum of an input's gradient, and the product of the weight's gradient that stands behind it. On H100 a sum
    slows what runs beside it: nothing does that waits."""
    topology = load_cluster(name)
    assert topology.regular is not None
    mesh = Mesh(topology.devices, {"tp": 8}, "m")
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor.whole(BFloat16, (4096, 4096), mesh, [Shard(1)]))
    b = f.add_input_value("b", Tensor.whole(BFloat16, (4096, 4096), mesh, [Shard(0)]))
    w = f.add_input_value("w", Tensor.whole(BFloat16, (4096, 4096), mesh))
    total = f.emit("MPIAllreduce", f.emit("MatMul", x, b), axis="tp")
    f.set_outputs([total, f.emit("MatMul", w, w)])
    first, sums, second = [
        e.dur for e in Simulator(CostModel(topology)).interpret(f.finalize()).trace if e.pid == "gpu:0"
    ]
    beside, behind = [
        Simulator(CostModel(topology, runtime=Runtime("r", synchronous=waits))).interpret(f.finalize())
        for waits in (False, True)
    ]
    lost = quantize(topology.regular.intra.slows * sums)
    assert (lost > 0) == (name == "dgx-h100")
    assert beside.seconds == first + max(sums, second + lost)
    assert behind.seconds == first + sums + second
    assert (behind.stages[0].communication, behind.stages[0].compute) == (sums, first + second)


def test_sums_of_gradients_over_replicas_are_not_waited_for() -> None:
    model, plan = distir.load("gpt:layers=2,hidden=64,heads=2,vocab=96,seq=16,batch=4"), distir.Plan(dp=2, tp=2)
    program = distir.distribute(model.training("cross-entropy"), plan, load_cluster("dgx-h100").devices[:4])
    cost = CostModel(load_cluster("dgx-h100"), runtime=Runtime("r", synchronous=True))
    trace = Simulator(cost).interpret(program).trace
    mine = [e for e in trace if e.pid == "gpu:0" and e.tid != "view" and e.dur]
    beside = {
        e.tid
        for e in mine
        for other in mine
        if other.tid == "compute" and e.tid != "compute" and e.ts < other.ts + other.dur and other.ts < e.ts + e.dur
    }
    assert {e.tid for e in mine} == {"compute", "dp", "tp"}
    assert beside == {"dp"}


def test_what_stands_where_a_product_has_its_weight_is_not_sent_so() -> None:
    mesh = Mesh(load_cluster("dgx-h100").devices, {"cp": 8}, "m")
    f = FunctionMaker("f")
    q, k = (f.add_input_value(name, Tensor.whole(BFloat16, (64, 64), mesh, [Shard(0)])) for name in "qk")
    f.set_outputs([f.emit("MatMul", q, f.emit("MPIAllgather", k, axis="cp"))])
    assert beside_products(f.finalize()) == {}


def test_what_is_sent_in_pieces_takes_its_share_of_compute() -> None:
    """All that is left of it beside a product; what is waited for at once takes none."""
    regular, (f, _) = load_cluster("dgx-h100").regular, layer(4096)
    assert regular is not None
    seconds = {
        (runtime.name, share): Simulator(
            CostModel(
                distir.Topology(replace(regular, intra=regular.intra._replace(slows=share))),
                runtime=runtime,
            )
        )
        .interpret(f)
        .seconds
        for runtime in (Runtime("plain"), IN_PIECES)
        for share in (0.0, 0.5)
    }
    assert seconds["plain", 0.5] == seconds["plain", 0.0]
    assert seconds["pieces", 0.5] > seconds["pieces", 0.0]


def test_a_piece_is_left_and_what_products_do_not_hide() -> None:
    cost = CostModel(load_cluster("dgx-h100"), runtime=IN_PIECES)
    assert cost.exposed(8.0, 8, 100.0) == 1.0
    assert cost.exposed(8.0, 8, 8.0) == 1.0
    assert cost.exposed(8.0, 8, 4.0) == 4.5
    assert cost.exposed(8.0, 8, 0.0) == 8.0


@pytest.mark.parametrize("tokens", [256, 8192])
def test_the_step_is_shorter_by_what_is_hidden(tokens: int) -> None:
    regular = load_cluster("dgx-h100").regular
    assert regular is not None
    topology = distir.Topology(replace(regular, intra=regular.intra._replace(slows=0.0)))
    f, _ = layer(tokens)
    plain, pieces = (Simulator(CostModel(topology, runtime=r)).interpret(f) for r in (Runtime("plain"), IN_PIECES))
    seconds = {e.name: e.dur for e in plain.trace if e.pid == plain.trace[0].pid}
    want = plain.seconds
    for op, product in beside_products(f).items():
        alone = seconds[op.spec.name]
        ins, outs = [v.type for v in product.inputs], [v.type for v in product.outputs]
        of_product = CostModel(topology).compute(product.spec, product.attributes, ins, outs, topology.devices[0])
        want -= alone - max(alone / 8, alone - of_product * 7 / 8)
    assert pieces.seconds == pytest.approx(want, rel=1e-9)
    assert pieces.seconds < plain.seconds


def test_nothing_is_beside_a_product_where_a_device_does_one_thing_at_a_time() -> None:
    f, _ = layer(1024)
    topology = load_cluster("dgx-h100")
    plain, pieces = (
        Simulator(CostModel(topology, runtime=r), overlap=False).interpret(f) for r in (Runtime("plain"), IN_PIECES)
    )
    assert pieces.seconds == plain.seconds


def test_biases_are_not_sent_so() -> None:
    """ZeRO gathers biases, which a product adds, with weights."""
    model = distir.load("gpt:layers=2,hidden=64,heads=4,vocab=96,seq=16,batch=8", loss="cross-entropy")
    plan = distir.Plan(dp=2, microbatches=2, zero=3)
    program = distir.simulate(model, plan, "dgx-h100", runtime="megatron-core").simulation.program.function
    kernels = {op.spec.name for f in program.callees() for op in f.ops if op.spec.kernel == "product"}
    assert "Gemm" in kernels
    assert not any(beside_products(f) for f in program.callees())


def test_gradients_of_experts_are_not_sent_so() -> None:
    """Along the axis that splits experts they are summed as products of batches make them."""
    name = "gpt:layers=2,hidden=64,heads=4,vocab=64,seq=32,batch=16,experts=4,ffn=128,choices=2,capacity=2"
    model = distir.load(name, loss="cross-entropy", precision="bf16")
    parts = [(f"*.mlp.experts.{of}", 0) for of in ("in.weight", "out.weight", "in.bias", "out.bias")]
    split = InputSplit("ep", 2, (("*", 0), *parts))
    program = distir.distribute(model, distir.Plan(dp=2, microbatches=2, split=(split,)))
    reduced = [op for f in program.callees() for op in f.ops if op.spec.name == "MPIReduceScatter"]
    assert reduced
    assert not any(beside_products(f) for f in program.callees())


def test_weights_and_their_gradients_are_not_sent_so() -> None:
    """ZeRO gathers weights for the same products, and sums gradients of products."""
    model = distir.load(
        "gpt:layers=2,hidden=64,heads=4,vocab=96,seq=16,batch=8", loss="cross-entropy", optimizer="adamw"
    )
    program = distir.distribute(model, distir.Plan(dp=2, tp=2, microbatches=2, zero=3, sequence_parallel=True))
    along: dict[object, int] = {}
    for f in program.callees():
        for op, product in beside_products(f).items():
            axis = op.attributes["axis"]
            along[axis] = along.get(axis, 0) + 1
            assert product.spec.weight is not None
    assert along.keys() == {"tp"}
    assert along["tp"] > 8
