"""Keys and values that are sent around a ring beside attention."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import distir
from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.simulator.beside_products import shares
from distir.executor.simulator.expanded_keys import expanded_keys
from distir.executor.simulator.ring_attention import ring_attention
from distir.executor.simulator.sent_keys import sent_keys
from distir.hardware import load_cluster, load_runtime
from distir.ir import Function, FunctionMaker, Mesh, Value
from distir.ir.host_runtime import Runtime
from distir.ir.type import REPLICATE, SUM, BFloat16, Float32, Shard, Tensor
from distir.transforms.plan import InputSplit
from tests.executor.inlined import Inlined

RING = Runtime("ring", ring_attention=True)
CP = InputSplit("cp", 4, (("input_ids", 1), ("labels", 1)))


def quiet() -> distir.Topology:
    """A node whose collectives take nothing from compute beside them."""
    regular = load_cluster("dgx-h100").regular
    assert regular is not None
    links = {name: getattr(regular, name)._replace(slows=0.0) for name in ("intra", "inter")}
    return distir.Topology(replace(regular, **links))


def model(kv_heads: int, layers: int = 2, seq: int = 64) -> distir.Model:
    sizes = f"llama:layers={layers},hidden=64,heads=8,kv_heads={kv_heads},vocab=64,seq={seq},batch=8"
    return distir.load(sizes, loss="cross-entropy", precision="bf16")


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("again", [False, True], ids=["saved whole", "gathered again"])
def test_keys_values_and_their_gradients_are_beside_attention(kv_heads: int, again: bool) -> None:
    plan = distir.Plan(split=(CP,), tp=2, sequence_parallel=True, recompute="gathers" if again else "none")
    f = distir.distribute(model(kv_heads, layers=3), plan)
    counts = Counter[tuple[str, str, object]]()
    for body in (f, *f.callees()):
        for collective, attention in ring_attention(body).items():
            counts[collective.spec.name, attention.spec.name, collective.attributes["axis"]] += 1
    grouped = "Grouped" if kv_heads < 8 else ""
    want = {("MPIAllgather", f"{grouped}Attention", "cp"): 6}
    if again:
        want["MPIAllgather", f"{grouped}AttentionGrad", "cp"] = 6
    # those of grouped queries are scattered together
    want["MPIReduceScatter", f"{grouped}AttentionGrad", "cp"] = 3 if grouped else 6
    assert counts == want


def attention(tokens: int) -> tuple[Function, Mesh]:
    """Queries, keys and values split by tokens over 8 devices; keys and values are gathered."""
    mesh = Mesh(load_cluster("dgx-h100").devices, {"cp": 8}, "m")
    t = Tensor.whole(BFloat16, (1, 16, tokens, 128), mesh, [Shard(2)])
    f = FunctionMaker("f")
    q, k, v = (f.add_input_value(name, t) for name in "qkv")
    whole = [f.emit("MPIAllgather", x, axis="cp") for x in (k, v)]
    f.set_outputs([f.emit("Attention", q, *whole, scale=0.1, causal=True)[0]])
    return f.finalize(), mesh


def test_not_along_axes_that_do_not_split_the_sequence_of_queries() -> None:
    """Under sequence parallelism keys that one head has for all queries are gathered along the axis of the heads."""
    sizes = "llama:layers=2,hidden=64,heads=4,kv_heads=1,vocab=64,seq=64,batch=4"
    f = distir.distribute(distir.load(sizes, loss="cross-entropy"), distir.Plan(tp=2, sequence_parallel=True))
    gathers = [op.outputs[0] for body in f.callees() for op in body.ops if op.spec.comm and op.spec.comm.gathers]
    keys = {v for body in f.callees() for op in body.ops if op.spec.kernel == "attention" for v in op.inputs[1:3]}
    assert keys & {*gathers}
    assert not any(ring_attention(body) for body in f.callees())


def test_not_along_others_at_once() -> None:
    mesh = Mesh(load_cluster("dgx-h100").devices, {"cp": 4, "tp": 2}, "m")
    f = FunctionMaker("f")
    q = f.add_input_value("q", Tensor.whole(BFloat16, (1, 4, 64, 16), mesh, [Shard(2), REPLICATE]))
    k = f.add_input_value("k", Tensor.whole(BFloat16, (1, 4, 64, 16), mesh, [Shard(2), Shard(2, 4)]))
    whole = f.emit("MPIAllgather", k, axis=("cp", "tp"))
    f.set_outputs([f.emit("Attention", q, whole, whole, scale=0.25, causal=True)[0]])
    gather, attention = f.finalize().ops
    assert sent_keys(f.finalize()) == {gather: (attention, (attention.inputs[1],))}
    assert ring_attention(f.finalize()) == {}


def gathered(f: FunctionMaker, mesh: Mesh, *names: str) -> list[Value]:
    t = Tensor.whole(BFloat16, (1, 4, 512, 16), mesh, [Shard(2)])
    return [f.emit("MPIAllgather", f.add_input_value(name, t), axis="cp") for name in names]


def test_collectives_that_are_alike_may_have_other_shares() -> None:
    """One op of attention shares its time with two, one with a single one."""
    mesh, f = Mesh(load_cluster("dgx-h100").devices, {"cp": 8}, "m"), FunctionMaker("f")
    q = f.add_input_value("q", Tensor.whole(BFloat16, (1, 4, 512, 16), mesh, [Shard(2)]))
    known = f.add_input_value("known", Tensor.whole(BFloat16, (1, 4, 512, 16), mesh, [REPLICATE]))
    a, b, c = gathered(f, mesh, "a", "b", "c")
    f.set_outputs([f.emit("Attention", q, *kv, scale=0.25, causal=True)[0] for kv in ((a, b), (c, known))])
    found = shares(ring_attention(f.finalize()))
    assert [found[op] for op in f.ops[:3]] == [0.5, 0.5, 1.0]
    cost = CostModel(quiet(), runtime=RING)
    simulation, inlined = Simulator(cost).interpret(f.finalize()), Inlined(f.finalize(), cost)
    assert [(e.name, e.ts, e.dur, e.pid, e.tid) for e in simulation.trace] == inlined.events


def test_gradients_that_are_summed_over_heads_before() -> None:
    mesh, f = Mesh(load_cluster("dgx-h100").devices, {"cp": 8}, "m"), FunctionMaker("f")
    split = Tensor.whole(BFloat16, (1, 4, 512, 16), mesh, [Shard(2)])
    rows = Tensor.whole(Float32, (1, 4, 512), mesh, [Shard(2)])
    q, y, d = (f.add_input_value(name, split) for name in "qyd")
    k, v = gathered(f, mesh, "k", "v")
    _, dk, _ = f.emit("AttentionGrad", q, k, v, y, f.add_input_value("rows", rows), d, scale=0.25, causal=True)
    summed = f.emit("ReduceSum", f.emit("Reshape", dk, shape=(1, 2, 2, 512, 16)), axes=(2,), keepdims=0)
    f.set_outputs([f.emit("MPIReduceScatter", summed, axis="cp", dim=2)])
    *gathers, attention, _, _, scatter = f.finalize().ops
    assert ring_attention(f.finalize()) == dict.fromkeys([*gathers, scatter], attention)
    assert expanded_keys(f.finalize()) == {scatter: 2 * 2}  # two heads, in float32


@pytest.mark.parametrize("tokens", [2048, 65536])
def test_both_share_the_time_of_attention(tokens: int) -> None:
    """Of few tokens some is left; of many a piece of each."""
    topology = quiet()
    f, mesh = attention(tokens)
    gather, _, op = f.ops
    cost = CostModel(topology, runtime=RING)
    ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
    compute = cost.compute(op.spec, op.attributes, ins, outs, mesh.devices[0])
    alone = cost.collective(
        gather.spec, gather.attributes, [gather.inputs[0].type], [gather.outputs[0].type], topology.group(mesh.devices)
    )
    left = max(alone / 8, alone - compute / 2 * 7 / 8)
    assert (left > alone / 8) == (tokens == 2048)
    assert Simulator(cost).interpret(f).seconds == pytest.approx(2 * left + compute, rel=1e-9)
    plain = Simulator(CostModel(topology, runtime=Runtime("plain"))).interpret(f).seconds
    assert plain == pytest.approx(2 * alone + compute, rel=1e-9)


def test_a_bundle_has_the_share_of_its_parts() -> None:
    """How gradients are packed does not matter."""
    f = distir.distribute(model(2), distir.Plan(split=(CP,), recompute="gathers"))
    body = next(x for x in f.callees() if any(op.spec.comm and op.spec.comm.scatters for op in ring_attention(x)))
    found = shares(beside := ring_attention(body))
    for attention in {*beside.values()}:
        here = {op: share for op, share in found.items() if beside[op] is attention}
        assert sum(here.values()) == pytest.approx(1)
        assert sorted(here.values()) == pytest.approx([1 / 4, 1 / 4, 1 / 2])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("products", [False, True], ids=["", "products, too"])
def test_as_the_plain_loop(overlap: bool, products: bool) -> None:
    plan = distir.Plan(split=(CP,), tp=2, microbatches=2, sequence_parallel=True, recompute="gathers")
    seconds: list[float] = []
    for ring in (False, True):
        runtime = replace(RING, ring_attention=ring, overlaps_products=products)
        cost = CostModel(load_cluster("dgx-h100"), runtime=runtime)
        program = distir.simulate(model(4, seq=8192), plan, cost).simulation.program.function
        simulation, inlined = Simulator(cost, overlap=overlap).interpret(program), Inlined(program, cost, overlap)
        assert {d: t for d, t in simulation.timestamps.items() if t} == {
            d: t for d, t in inlined.timestamps().items() if t
        }
        seconds.append(simulation.seconds)
    assert (seconds[1] < seconds[0]) == overlap


@pytest.mark.parametrize("runtime", [RING, Runtime("pieces", overlaps_products=True)], ids=lambda r: r.name)
def test_what_is_left_at_least(runtime: Runtime) -> None:
    """A piece of what may be beside attention or a product; of others all, as under other runtimes."""
    topology = load_cluster("dgx-h100")
    mesh = Mesh(topology.devices, {"cp": 8}, "m")
    group, f = topology.group(mesh.devices), FunctionMaker("f")
    split, partial = (
        f.add_input_value(name, Tensor.whole(BFloat16, (1, 16, 4096, 128), mesh, [p]))
        for name, p in (("x", Shard(2)), ("y", SUM))
    )
    f.emit("MPIAllgather", split, axis="cp")
    f.emit("MPIReduceScatter", partial, axis="cp", dim=2)
    f.emit("MPIAllreduce", partial, axis="cp")
    for op, pieces in zip(f.ops, (8, 8, 1), strict=True):
        given = op.spec, op.attributes, [op.inputs[0].type], [op.outputs[0].type], group
        alone = CostModel(topology, runtime=runtime).collective(*given)
        assert CostModel(topology, runtime=runtime).least(*given) == alone / pieces
        assert CostModel(topology, runtime=Runtime("plain")).least(*given) == alone


def test_megatron_sends_so() -> None:
    """Its documentation of cp_comm_type; PyTorch gathers all at once before the second step of its ring."""
    assert all([load_runtime(name).ring_attention for name in ("megatron", "megatron-core", "megatron-core-default")])
    assert not load_runtime("torchtitan").ring_attention
