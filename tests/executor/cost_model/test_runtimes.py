"""What a runtime changes in the seconds of ops: kernels that ops share, and transfers that replicas share."""

from __future__ import annotations

import pytest

from distir.executor.cost_model import CostModel
from distir.executor.cost_model.fusion import Fused, fused
from distir.hardware import load_cluster
from distir.ir import Device, FunctionMaker, Mesh
from distir.ir.function import Attributes
from distir.ir.host_runtime import Runtime
from distir.ir.spec import lookup
from distir.ir.type import REPLICATE, SUM, BFloat16, Float32, Placement, Shard, Tensor

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
