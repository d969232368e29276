"""Keys and values of grouped queries that a runtime sends for all heads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import distir
from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.simulator.expanded_keys import expanded_keys, larger
from distir.hardware import load_cluster
from distir.ir import Function, FunctionMaker, Mesh
from distir.ir.host_runtime import Runtime
from distir.ir.type import BFloat16, Shard, Tensor, Tuple
from distir.transforms.plan import InputSplit

GROUPS = 4
"""Heads of queries for one of keys."""


def program(grouped: bool) -> Function:
    """A training step whose sequences are split over 2 devices."""
    sizes = f"llama:layers=1,hidden=64,heads=8,kv_heads={8 // GROUPS if grouped else 8},vocab=64,seq=32,batch=4"
    split = InputSplit("cp", 2, (("input_ids", 1), ("labels", 1)))
    return distir.distribute(distir.load(sizes, loss="cross-entropy", precision="bf16"), distir.Plan(split=(split,)))


@pytest.mark.parametrize(("grouped", "want"), [(True, GROUPS), (False, 1)])
def test_keys_and_values_count_for_all_heads_and_their_gradients_in_float32(grouped: bool, want: int) -> None:
    counts = Counter[tuple[str, int]]()
    f = program(grouped)
    for body in (f, *f.callees()):
        counts.update([(op.spec.name, times) for op, times in expanded_keys(body).items()])
    if grouped:  # the gradients of keys and of values are scattered together
        assert counts == {("MPIAllgather", want): 2, ("MPIReduceScatter", 2 * want): 1}
    else:
        assert counts == {("MPIReduceScatter", 2 * want): 2}


def test_other_axes_and_wider_gradients_count_as_they_are() -> None:
    """Heads that tensor parallelism splits are summed along it as in the program; float32 is not doubled."""
    sizes = "llama:layers=1,hidden=32,heads=4,kv_heads={},vocab=64,seq=16,batch=8"
    for kv_heads, tp, sequence in ((1, 2, False), (2, 4, False), (1, 2, True)):
        model = distir.load(sizes.format(kv_heads), loss="cross-entropy", precision="bf16")
        f = distir.distribute(model, distir.Plan(tp=tp, sequence_parallel=sequence))
        assert not [op for body in (f, *f.callees()) for op in expanded_keys(body)]
    split = InputSplit("cp", 2, (("input_ids", 1), ("labels", 1)))
    f = distir.distribute(distir.load(sizes.format(2), loss="cross-entropy"), distir.Plan(split=(split,)))
    assert {times for body in (f, *f.callees()) for times in expanded_keys(body).values()} == {2}


def test_the_step_takes_what_is_sent() -> None:
    topology = load_cluster("dgx-h100")
    mesh = Mesh(topology.devices, {"cp": 8}, "m")
    f = FunctionMaker("f")
    q = f.add_input_value("q", Tensor.whole(BFloat16, (1, 8, 4096, 64), mesh, [Shard(2)]))
    k, v = (f.add_input_value(n, Tensor.whole(BFloat16, (1, 2, 4096, 64), mesh, [Shard(2)])) for n in "kv")
    whole = [f.emit("MPIAllgather", x, axis="cp") for x in (k, v)]
    each = [
        f.emit("Reshape", f.emit("Expand", f.emit("Reshape", x, shape=(1, 2, 1, 4096, 64)), shape=(1, 2, 4, 4096, 64)),
               shape=(1, 8, 4096, 64))
        for x in whole
    ]  # fmt: skip
    f.set_outputs([f.emit("Attention", q, *each, scale=0.125, causal=False)[0]])
    g, plain = f.finalize(), Runtime("plain")
    times = expanded_keys(g)
    assert [times[op] for op in g.ops[:2]] == [GROUPS, GROUPS]
    group = topology.group(topology.devices)
    for runtime, factor in ((plain, 1), (replace(plain, expands_keys=True), GROUPS)):
        cost = CostModel(topology, runtime=runtime)
        took = next(e.dur for e in Simulator(cost).interpret(g).trace if e.name == "MPIAllgather")
        op = g.ops[0]
        ins, outs = ([larger(x.type, factor) for x in xs] for xs in (op.inputs, op.outputs))
        assert took == cost.collective(op.spec, op.attributes, ins, outs, group)


def test_a_bundle_is_larger_in_all_its_parts() -> None:
    a, b = Tensor(BFloat16, (2, 4, 8)), Tensor(BFloat16, (2, 2, 4))
    assert larger(Tuple((a, b)), 3).bytes == 3 * (a.bytes + b.bytes)
