"""What a runtime changes in the seconds of ops: kernels that ops share, and transfers that replicas share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from distir.api.compilation import distribute, simulate
from distir.api.model import Model, load
from distir.executor.cost_model import CostModel
from distir.executor.cost_model.fusion import Fused, fused, unwritten
from distir.executor.cost_model.seconds import work
from distir.executor.simulator.memory import beside_logits
from distir.executor.simulator.simulation import Simulator
from distir.hardware import load_cluster, load_runtime
from distir.ir import Device, FunctionMaker, Mesh, Topology
from distir.ir.errors import UsageError
from distir.ir.function import NO_ATTRIBUTES, Attributes, Function
from distir.ir.host_runtime import Runtime
from distir.ir.spec import lookup
from distir.ir.topology import DeviceSpec, FusedAttention, Link, Regular
from distir.ir.type import REPLICATE, SUM, BFloat16, DType, Float32, Int64, Placement, Shard, Tensor
from distir.models.decoder import Decoder, decoder
from distir.search.planning import plan as search_plans
from distir.transforms.differentiation.training import SGD
from distir.transforms.pipeline.phases import users
from distir.transforms.plan import Plan

MULTI = Runtime("multi", op=1e-5, multi_tensor=True)


def test_ops_of_one_kind_at_one_depth_are_one_kernel() -> None:
    f = FunctionMaker("f")
    x, y = (f.add_input_value(name, Tensor(Float32, (4, 4))) for name in "xy")
    a, b = f.emit("Neg", x), f.emit("Neg", y)
    f.set_outputs([f.emit("Neg", a), f.emit("Exp", b), *[f.emit("MatMul", p, q) for p, q in ((x, y), (y, x))]])
    g = f.finalize()
    kernels = fused(g, MULTI)
    assert [op in kernels and kernels[op].launched for op in g.ops] == [False, True, False, False, False, False]
    assert fused(g, Runtime("plain", op=1e-5)) == {}
    assert fused(g, None) == {}
    assert fused(g, MULTI, repeated=True) == {}  # of a microbatch: one layer is called after the other


def test_blocks_that_are_recomputed_share_no_kernel() -> None:
    """They do not need each other, and are equal; yet each is called for itself, in the backward pass of its layer."""
    step = Model(decoder(Decoder(layers=3, hidden=64, heads=2, vocab=96, seq=16, batch=4))).training(
        "cross-entropy", SGD()
    )
    topology = load_cluster("dgx-a100")
    saved: list[float] = []
    for recompute in ("none", "full"):
        program = distribute(step, Plan(microbatches=2, recompute=recompute), topology.devices[:1])
        runtimes = Runtime("plain", op=1e-2), Runtime("multi", op=1e-2, multi_tensor=True)
        alone, shared = (Simulator(CostModel(topology, runtime=r)).interpret(program).seconds for r in runtimes)
        saved.append(alone - shared)
    assert saved[0] > 0.01  # of the update
    assert saved[1] == pytest.approx(saved[0], abs=1e-3)


def test_the_mask_of_a_gradient_is_part_of_the_softmax_before_it() -> None:
    f = FunctionMaker("f")
    y, d = (f.add_input_value(name, Tensor(BFloat16, (8, 16, 16))) for name in "yd")
    slope = f.emit("SoftmaxGrad", y, d, axis=-1)
    masked = f.emit("CausalMask", slope, value=0.0)
    f.set_outputs([f.emit("MatMul", masked, y)])
    g = f.finalize()
    kernels = fused(g, Runtime("fuses", op=1e-5, fuses=True))
    assert kernels == {g.ops[0]: Fused(result=True), g.ops[1]: Fused(frozenset((0,)), launched=True)}


def test_a_reduction_is_not_part_of_what_follows() -> None:
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(BFloat16, (8, 16)))
    f.set_outputs([f.emit("Neg", f.emit("ReduceSum", x, axes=(0,), keepdims=0))])
    assert fused(f.finalize(), Runtime("fuses", op=1e-5, fuses=True)) == {}


@pytest.mark.parametrize(("name", "way"), [("CrossEntropy", 0), ("CrossEntropyGrad", 1)])
def test_bytes_of_a_logit(name: str, way: int) -> None:
    topology = load_cluster("dgx-a100")
    device, what = topology.devices[0], topology.spec(topology.devices[0])
    cost = CostModel(topology, runtime=Runtime("slow", logit_bytes=(38.0, 14.0), passes=3.0))
    logits, labels, row = Tensor(BFloat16, (64, 4096)), Tensor(Int64, (64,)), Tensor(Float32, (64,))
    ins, outs = ([logits, labels], [row, row]) if way == 0 else ([logits, labels, row, row], [logits])
    seconds = cost.compute(lookup(name), {}, ins, outs, device) - what.kernel_launch_overhead
    bandwidth = what.dram_bandwidth * what.memory_efficiency
    assert seconds == pytest.approx(64 * 4096 * (38, 14)[way] / bandwidth, rel=1e-6)


def test_logits_that_are_split_along_the_classes() -> None:
    """Their kernels have figures of their own, for bytes moved and for what lives beside them."""
    topology = load_cluster("dgx-a100")
    device, what = topology.devices[0], topology.spec(topology.devices[0])
    mesh = Mesh(topology.devices[:2], {"tp": 2}, "m")
    labels, row = (Tensor.whole(t, (64,), mesh) for t in (Int64, BFloat16))
    runtime = Runtime(
        "slow",
        logit_bytes=(22.0, 26.0),
        sharded_logit_bytes=(38.0, 40.0),
        logit_memory=(8.0, 9.0, 2.0),
        sharded_logit_memory=(12.0, 13.0, 3.0),
    )
    for placement, moved, beside in ((REPLICATE, 22, (8, 9, 2)), (Shard(1), 38, (12, 13, 3))):
        f = FunctionMaker("f")
        logits = f.add_input_value("x", Tensor.whole(BFloat16, (64, 4096), mesh, [placement]))
        f.emit("LogitSums", logits, f.add_input_value("y", labels), f.add_input_value("top", row))
        (op,) = f.finalize().ops
        ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
        count = logits.type.bytes // 2
        seconds = CostModel(topology, runtime=runtime).compute(op.spec, op.attributes, ins, outs, device)
        bandwidth = what.dram_bandwidth * what.memory_efficiency
        assert seconds - what.kernel_launch_overhead == pytest.approx(count * moved / bandwidth, rel=1e-6)
        assert beside_logits(op, runtime) == tuple([n * count for n in beside])
        assert beside_logits(op, None) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("name", "way"), [("RMSNorm", 0), ("RMSNormGrad", 1)])
def test_bytes_of_a_norm(name: str, way: int) -> None:
    """Of a number of 16 bits; those of 32 are read and written once."""
    topology = load_cluster("dgx-a100")
    device, what = topology.devices[0], topology.spec(topology.devices[0])
    slow, plain = CostModel(topology, runtime=Runtime("slow", norm_bytes=(36.0, 96.0))), CostModel(topology)
    for dtype in (BFloat16, Float32):
        x, gain, row = Tensor(dtype, (64, 4096)), Tensor(dtype, (4096,)), Tensor(Float32, (64, 1))
        ins, outs = ([x, gain], [x, row]) if way == 0 else ([x, gain, row, x], [x, gain])
        given = lookup(name), Attributes(axis=1, epsilon=1e-5), ins, outs, device
        seconds = slow.compute(*given) - what.kernel_launch_overhead
        if dtype is BFloat16:
            moved = 64 * 4096 * (36, 96)[way] / (what.dram_bandwidth * what.memory_efficiency)
            assert seconds == pytest.approx(moved, rel=1e-6)
        else:
            assert slow.compute(*given) == plain.compute(*given)


@pytest.mark.parametrize(
    ("shape", "dtype", "more"), [((3, 2, 8, 8), BFloat16, 4), ((4, 2, 8, 8), BFloat16, 0), ((3, 2, 8, 8), Float32, 0)]
)
def test_scores_that_a_kernel_cannot_take_are_masked_apart(shape: tuple[int, ...], dtype: DType, more: int) -> None:
    topology = load_cluster("dgx-a100")
    device, what = topology.devices[0], topology.spec(topology.devices[0])
    t, mask = [Tensor(dtype, shape)], lookup("CausalMask")
    runtimes = Runtime("any", op=1e-5), Runtime("fours", op=1e-5, score_block=4)
    costs = [CostModel(topology, runtime=r) for r in runtimes]
    assert [c.more_kernels(mask, t) for c in costs] == [0, more]
    assert [c.more_kernels(lookup("Neg"), t) for c in costs] == [0, 0]
    a, b = (c.compute(mask, {}, t, t, device) for c in costs)
    moved = 33 * 384 if more else 0
    assert b - a == pytest.approx(moved / what.dram_bandwidth / what.memory_efficiency, rel=1e-4, abs=1e-12)
    assert costs[1].issue(mask, more=more) == pytest.approx((1 + more) * 1e-5, rel=1e-6)
    assert costs[1].issue(mask, 1, Fused(launched=True), more=more) == pytest.approx(more * 1e-5, rel=1e-6)


def test_hosts_issue_scores_that_are_masked_apart() -> None:
    f = FunctionMaker("f")
    mesh = Mesh(load_cluster("dgx-a100").devices[:1], {"dp": 1}, "m")
    x = f.add_input_value("x", Tensor(BFloat16, (6, 8, 8), mesh, (REPLICATE,)))
    f.set_outputs([f.emit("CausalMask", x)])
    g, seconds = f.finalize(), list[float]()
    for block in (1, 4):
        cost = CostModel(load_cluster("dgx-a100"), runtime=Runtime("host", op=1.0, score_block=block))
        seconds.append(Simulator(cost).interpret(g).seconds)
    assert seconds[1] - seconds[0] == pytest.approx(4.0, abs=1e-3)


def test_a_gap_beside_each_kernel() -> None:
    topology = load_cluster("dgx-a100")
    t, neg, device = [Tensor(Float32, (64, 64))], lookup("Neg"), topology.devices[0]
    plain, slow = CostModel(topology, runtime=Runtime("a")), CostModel(topology, runtime=Runtime("b", gap=1e-3))
    assert slow.compute(neg, {}, t, t, device) == pytest.approx(plain.compute(neg, {}, t, t, device) + 1e-3, rel=1e-6)
    later = Fused(launched=True)
    assert slow.compute(neg, {}, t, t, device, later) == plain.compute(neg, {}, t, t, device, later)


def test_updates_with_other_settings_or_elsewhere_are_other_kernels() -> None:
    f = FunctionMaker("f")
    xs = [f.add_input_value(f"x{k}", Tensor(Float32, (4, 4), Device("gpu", k // 3))) for k in range(4)]
    f.set_outputs([f.emit("ReduceSum", x, axes=(k % 2,)) for k, x in enumerate(xs)])
    g = f.finalize()
    kernels = fused(g, MULTI)
    assert [op in kernels for op in g.ops] == [False, False, True, False]


def test_a_kernel_is_launched_and_issued_once() -> None:
    f = FunctionMaker("f")
    xs = [f.add_input_value(f"x{k}", Tensor(Float32, (4,))) for k in range(3)]
    f.set_outputs([f.emit("Neg", x) for x in xs])
    g = f.finalize()
    topology = load_cluster("dgx-a100")
    cost, kernels = CostModel(topology, runtime=MULTI), fused(g, MULTI)
    neg, later = lookup("Neg"), kernels[g.ops[1]]
    assert (cost.issue(neg), cost.issue(neg, 1, later)) == (pytest.approx(1e-5, rel=1e-6), 0.0)
    t, device = [xs[0].type], topology.devices[0]
    saved = cost.compute(neg, {}, t, t, device) - cost.compute(neg, {}, t, t, device, later)
    assert saved == pytest.approx(topology.spec(device).kernel_launch_overhead, rel=1e-6)


@pytest.mark.parametrize(("placement", "copies"), [(REPLICATE, 4), (Shard(1), 1)])
def test_replicas_send_a_part_each_and_gather_it(placement: Placement, copies: int) -> None:
    """Along the axis where they have the same; replicas of the batch have other samples, microbatches are one after the
    other."""
    topology = load_cluster("dgx-a100", nodes=2)
    mesh = Mesh(topology.devices[:8], {"mb": 2, "dp": 2, "tp": 4}, "stage")
    t = Tensor(Float32, (1024, 1024), mesh, (REPLICATE, Shard(0, 2), placement))
    link = topology.link(topology.devices[0], topology.devices[8])
    whole = CostModel(topology, runtime=Runtime("whole")).transfer([t], link)
    parts = CostModel(topology, runtime=Runtime("parts", scatters=True)).transfer([t], link)
    assert whole == pytest.approx(link.latency + 2**22 / link.bandwidth, rel=1e-6)
    gathered = 2**22 * (copies - 1) / copies / topology.regular.intra.collective()  # type: ignore[union-attr]
    assert parts == pytest.approx(link.latency + 2**22 / copies / link.bandwidth + gathered, rel=1e-6)


def test_more_passes_over_memory_and_collectives_that_wait() -> None:
    topology = load_cluster("dgx-a100")
    device, what = topology.devices[0], topology.spec(topology.devices[0])
    plain, slow = CostModel(topology), CostModel(topology, runtime=Runtime("slow", passes=2.0, skew=0.5))
    t, narrow = Tensor(Float32, (4096, 4096)), Tensor(BFloat16, (4096, 4096))
    launch = what.kernel_launch_overhead
    for name, ins, factor in (("Neg", [narrow], 2.0), ("MatMul", [narrow, narrow], 1.0), ("Neg", [t], 1.0)):
        seconds = [cost.compute(lookup(name), {}, ins, ins[:1], device) - launch for cost in (plain, slow)]
        assert seconds[1] == pytest.approx(factor * seconds[0], rel=1e-6)
    inside = Fused(frozenset((0,)), result=True, launched=True)  # of a chain: it moves nothing
    assert slow.compute(lookup("Neg"), {}, [narrow], [narrow], device, inside) == pytest.approx(0.0, abs=1e-12)
    mesh = Mesh(topology.devices[:8], {"dp": 8}, "m")
    part, whole = (Tensor(Float32, (4096, 4096), mesh, (p,)) for p in (SUM, REPLICATE))
    group = topology.group(topology.devices[:8])
    seconds = [
        cost.collective(lookup("MPIAllreduce"), Attributes(axis="dp"), [part], [whole], group) for cost in (plain, slow)
    ]
    assert seconds[1] == pytest.approx(1.5 * seconds[0], rel=1e-6)


@pytest.mark.parametrize("cluster", ["dgx-h100", "h100", "h200"])
def test_an_op_of_a_chain_moves_the_rest_as_quickly_as_alone(cluster: str) -> None:
    """Also where ops were measured, and have bandwidths and launches of their own."""
    topology = load_cluster(cluster)
    device, cost = topology.devices[0], CostModel(topology, runtime=load_runtime("torch-compiled"))
    x, narrow = Tensor(Float32, (1 << 26,)), Tensor(BFloat16, (1 << 26,))
    some = Fused(frozenset((0,)), result=True, launched=True)
    alone = cost.compute(lookup("Add"), NO_ATTRIBUTES, [x, x], [x], device)
    rest = cost.compute(lookup("Add"), NO_ATTRIBUTES, [x, x], [x], device, some)
    assert rest == pytest.approx(alone / 3, rel=0.05)  # one of three tensors; the launch takes some microseconds
    cast = cost.compute(lookup("Cast"), Attributes({"to": BFloat16}), [x], [narrow], device, some)
    assert cast == pytest.approx(0.0, abs=1e-9)


def test_equal_functions_of_which_one_is_called_for_a_microbatch() -> None:
    """Only the other has kernels of many tensors: they are not equal to a simulator."""
    topology = load_cluster("dgx-a100")
    mesh = Mesh(topology.devices[:1], {"dp": 1}, "m")
    t = Tensor(Float32, (4, 4), mesh, (REPLICATE,))

    def two() -> Function:
        f = FunctionMaker("two")
        f.set_outputs([f.emit("Neg", f.add_input_value(name, t)) for name in "xy"])
        return f.finalize()

    main = FunctionMaker("main")
    ins = [main.add_input_value(name, t) for name in "xy"]
    once, repeated = (main.add_op("Call", None, ins, given, [two()]) for given in ({}, {"mb": 0}))
    assert isinstance(once, tuple)
    assert isinstance(repeated, tuple)
    main.set_outputs([*once, *repeated])
    cost = CostModel(topology, runtime=Runtime("host", op=1.0, multi_tensor=True))
    assert Simulator(cost).interpret(main.finalize()).seconds == pytest.approx(3.0, abs=1e-3)


def test_speeds_of_kernels_are_those_of_the_runtime() -> None:
    """Of products and of attention, forward and backward; other ops have the device's figures."""
    topology = load_cluster("dgx-h100")
    device, what = topology.devices[0], topology.spec(topology.devices[0])
    assert what.early < 1 < what.cudnn
    x, w = Tensor(BFloat16, (1 << 13, 1 << 12)), Tensor(BFloat16, (1 << 12, 1 << 12))
    q, row = Tensor(BFloat16, (8, 1 << 12, 128)), Tensor(Float32, (8, 1 << 12))
    of_product, of_attention = (what.early, 1.0, 1.0), (1.0, what.cudnn, 0.5)
    rows = (
        ("MatMul", [x, w], [x], of_product),
        ("Attention", [q, q, q], [q, row], of_attention),
        ("AttentionGrad", [q, q, q, q, row, q], [q, q, q], of_attention),
        ("Neg", [x], [x], (1.0, 1.0, 1.0)),
    )
    runtimes = Runtime("b", early=True), Runtime("c", cudnn=True), Runtime("d", attention=0.5)
    for name, ins, outs, want in rows:
        given = lookup(name), {}, ins, outs, device
        plain, *others = [CostModel(topology, runtime=r).compute(*given) for r in (Runtime("a"), *runtimes)]
        launch = what.kernel_launch_overhead
        assert [(plain - launch) / (x - launch) for x in others] == pytest.approx(want, rel=1e-6), name


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize(("ring", "streams"), [(False, 1), (True, 2)])
def test_a_ring_has_a_kernel_for_the_keys_of_each_device(parts: int, ring: bool, streams: int) -> None:
    """Of Transformer Engine two at a time, so that twice as many queries fill the device."""
    t = 1 << 13
    what = DeviceSpec((("f32", 1e9),), 1e15, 0.0, attention=FusedAttention(0.5, keys=512.0, queries=1024.0))
    topology = Topology(Regular("one", "gpu", what, 1, parts, Link(1e9), Link(1e9)))
    mesh = Mesh(topology.devices, {"cp": parts}, "m")
    shapes = ((t, 64), Shard(0)), ((t, 64), REPLICATE), ((t,), Shard(0))
    q, k, row = (Tensor.whole(Float32, shape, mesh, [p]) for shape, p in shapes)
    cost = CostModel(topology, runtime=Runtime("r", zigzag=True, ring_attention=ring))
    got = cost.compute(lookup("Attention"), Attributes(causal=1), [q, k, k], [q, row], mesh.devices[0])
    at_once = t // parts * (streams if parts > 1 else 1)
    want = 2 * 2 * 64 * t * t / 2 / parts / 0.5e9 * (1 + 512 / (t / 2 / parts)) * (1 + 1024 / at_once)
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_causal_attention_in_zigzag_is_the_same_work_for_all(parts: int) -> None:
    """Of all scores below the diagonal each device has as many; else those with the last queries have most."""
    topology = load_cluster("dgx-h100")
    t, mesh = 1 << 13, Mesh(topology.devices[:parts], {"cp": parts}, "m")
    shapes = ((t, 64), Shard(0)), ((t, 64), REPLICATE), ((t,), Shard(0))
    q, k, row = (Tensor.whole(Float32, shape, mesh, [p]) for shape, p in shapes)
    attrs = Attributes(causal=1)
    most, mean = (work(lookup("Attention"), attrs, [q, k, k], [q, row], zigzag)[0] for zigzag in (False, True))
    scores = t * t / 2
    assert mean == pytest.approx(2 * 2 * 64 * scores / parts)
    before = (t - t // parts) ** 2 / 2  # what the devices before have
    assert most == pytest.approx(2 * 2 * 64 * (scores - before))
    device = topology.devices[0]
    seconds = [
        CostModel(topology, runtime=Runtime("r", zigzag=zigzag)).compute(
            lookup("Attention"), attrs, [q, k, k], [q, row], device
        )
        for zigzag in (False, True)
    ]
    assert seconds[0] == seconds[1] if parts == 1 else seconds[0] > seconds[1]
    few = Tensor(Float32, (8, 64))  # queries that are few, and whole, have seen more keys: that is no split
    both = [work(lookup("Attention"), attrs, [few, k, k], [few, row], zigzag)[0] for zigzag in (False, True)]
    assert both[0] == both[1]


def test_gradients_that_products_accumulate_are_neither_cast_nor_added() -> None:
    """Those of weights in products; biases and norms have kernels of their own."""
    step = Model(decoder(Decoder(layers=1, hidden=64, heads=2, vocab=96, seq=16, batch=4, tied=False))).training(
        "cross-entropy", SGD(), precision="bf16"
    )
    topology = load_cluster("dgx-a100")
    program = distribute(step, Plan(microbatches=2), topology.devices[:1])
    runtime = Runtime("sums", op=1e-6, accumulates=True)
    sums = {op: f for f in program.callees() for op in f.ops if op.spec.name == "Accumulate"}
    assert sums
    apart = 0
    for op, f in sums.items():
        kernels, producer = fused(f, runtime), f.producers()
        part = producer[op.inputs[1]]
        of_product = producer[part.inputs[0]].spec.kernel == "product"
        assert (op in kernels, part in kernels) == (of_product, of_product)
        apart += not of_product
        if of_product:
            cost = CostModel(topology, runtime=runtime)
            ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
            assert cost.compute(op.spec, op.attributes, ins, outs, topology.devices[0], kernels[op]) == 0
            assert cost.issue(op.spec, 1, kernels[op], True) == 0
    assert 0 < apart < len(sums)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_that_products_store_take_their_bytes(microbatches: int) -> None:
    """In 32 bits, before there is a sum to add to: what the update, or the next microbatch, is given."""
    step = Model(decoder(Decoder(layers=1, hidden=64, heads=2, vocab=96, seq=16, batch=4, tied=False))).training(
        "cross-entropy", SGD(), precision="bf16"
    )
    topology = load_cluster("dgx-a100")
    program = distribute(step, Plan(microbatches=microbatches), topology.devices[:1])
    runtime, found = Runtime("sums", op=1e-6, accumulates=True), 0
    for f in program.callees():
        for op, kernel in fused(f, runtime).items():
            if op.spec.name == "Cast":
                added = [x.spec.name for x in users(f)[op.outputs[0]]] == ["Accumulate"]
                assert kernel.result
                assert unwritten(op, kernel) is added
                found += not added
    assert found


def test_rotary_embeddings_are_one_chain() -> None:
    """The halves that are turned are read where they are: what is concatenated is not written first."""
    f = FunctionMaker("f")
    x, cos, sin = (f.add_input_value(name, Tensor(BFloat16, (64, 128))) for name in ("x", "cos", "sin"))
    w = f.add_input_value("w", Tensor(BFloat16, (128, 128)))
    low, high = f.emit("Split", x, axis=1, parts=2)
    turned = f.emit("Concat", f.emit("Neg", high), low, axis=1)
    f.set_outputs([f.emit("MatMul", f.emit("Add", f.emit("Mul", x, cos), f.emit("Mul", turned, sin)), w)])
    g = f.finalize()
    kernels = fused(g, Runtime("fuses", op=1e-5, fuses=True))
    unwritten = [op.spec.name for op in g.ops if op in kernels and kernels[op].result]
    assert sorted(unwritten) == ["Concat", "Mul", "Mul", "Neg"]
    assert kernels[next(op for op in g.ops if op.spec.name == "Concat")].operands == {0}


def test_a_model_without_products_for_8_bits_is_refused() -> None:
    """Those of float32 would run as without; in a distributed program they are in its functions."""
    model = load("gpt:layers=1,hidden=64,heads=2,vocab=100,seq=16,batch=8", loss="cross-entropy")
    low = load("gpt:layers=1,hidden=64,heads=2,vocab=100,seq=16,batch=8", loss="cross-entropy", precision="bf16")
    cost = CostModel(load_cluster("dgx-h100", devices=2), runtime=load_runtime("megatron-core+fp8"))
    distributed = replace(low, function=distribute(low, Plan(2), cost.topology.devices[:2]))
    for made in (low, distributed):
        assert simulate(made, Plan(), cost).step_seconds > 0
    for call in (lambda: simulate(model, Plan(), cost), lambda: search_plans(model, cost, 2)):
        with pytest.raises(UsageError, match="gpt has no products of weights in 16 bits") as e:
            call()
        assert e.value.hint == "--precision bf16"


def test_products_of_weights_in_8_bits() -> None:
    """Forward and backward at the device's share of the peak of 8 bits; products of activations stay."""
    runtime = load_runtime("megatron-core+fp8")
    assert (runtime.name, runtime.fp8, load_runtime("megatron-core").fp8) == ("megatron-core+fp8", True, False)
    tokens, width = 8192, 4096
    x, w, y = (Tensor(BFloat16, shape) for shape in ((4, tokens, width), (width, 3 * width), (4, tokens, 3 * width)))
    scores = [Tensor(BFloat16, (4, 32, 128, 128))] * 3
    topology = load_cluster("dgx-h100")
    what = topology.spec(topology.devices[0])
    assert what.fp8 < 1
    plain, narrow = (CostModel(topology, runtime=r) for r in (load_runtime("megatron-core"), runtime))
    regular = topology.regular
    assert regular is not None
    slow = CostModel(Topology(replace(regular, spec=replace(what, fp8=0.1))), runtime=runtime)

    def seconds(cost: CostModel, name: str, types: Sequence[Tensor], moved: float = 0.0) -> float:
        return cost.compute(lookup(name), NO_ATTRIBUTES, types[:-1], types[-1:], topology.devices[0], moved=moved)

    beside = what.kernel_launch_overhead + runtime.gap
    for name, types in (("MatMul", (x, w, y)), ("MatMulGradWeight", (x, y, w))):
        before, after = (seconds(cost, name, types) for cost in (plain, narrow))
        assert after - beside == pytest.approx((before - beside) / 2 / what.fp8, rel=1e-3)
        peaks = [cost.peak(lookup(name), types[:-1], types[-1:], what) for cost in (plain, narrow)]
        assert peaks == [what.peak("bf16"), what.peak("f8")]
        assert seconds(narrow.in_16_bits, name, types) == before
        given = lookup(name), NO_ATTRIBUTES, types[:-1], types[-1:], topology.devices[0]
        assert narrow.least_compute(*given) == after < before == slow.least_compute(*given) < slow.compute(*given)
        more = seconds(narrow, name, types, moved=1e9) - after
        assert more == pytest.approx(1e9 / (what.dram_bandwidth * what.memory_efficiency))
    assert seconds(narrow, "MatMul", scores) == seconds(plain, "MatMul", scores)
    with pytest.raises(UsageError, match=r"megatron-core\+fp8: the devices of dgx-a100 have no peak of 8 bits"):
        CostModel(load_cluster("dgx-a100"), runtime=runtime)


def test_a_runtime_may_write_shared_keys_for_each_head() -> None:
    """Keys and values for 8 heads where there are 2, backward their gradients: both are read, or written, once."""
    topology = load_cluster("dgx-h100")
    what, plain = topology.spec(topology.devices[0]), Runtime("plain")
    q, k = Tensor(BFloat16, (2, 8, 512, 64)), Tensor(BFloat16, (2, 2, 512, 64))
    lse = Tensor(Float32, q.shape[:-1])
    rows = {"GroupedAttention": ((q, k, k), (q, lse)), "GroupedAttentionGrad": ((q, k, k, q, lse, q), (q, k, k))}
    for name, (ins, outs) in rows.items():
        seconds = [
            CostModel(topology, runtime=r).compute_seconds(lookup(name), NO_ATTRIBUTES, ins, outs, what)
            for r in (plain, replace(plain, expands_keys=True))
        ]
        moved = 2 * (k.bytes + 4 * k.bytes)
        assert seconds[1] - seconds[0] == pytest.approx(moved / (what.dram_bandwidth * what.memory_efficiency))
    alike = (q, q, q), (q, lse)
    costs = [CostModel(topology, runtime=r) for r in (plain, replace(plain, expands_keys=True))]
    each = [cost.compute_seconds(lookup("Attention"), NO_ATTRIBUTES, *alike, what) for cost in costs]
    assert each[0] == each[1]
