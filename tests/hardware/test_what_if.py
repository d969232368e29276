"""Clusters with figures changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import distir
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster, load_runtime
from distir.hardware.what_if import FIGURES, RATES, changed, changed_runtime
from distir.ir.errors import UsageError
from distir.ir.topology import CoreSharing, Link

GPT = "gpt:layers=2,hidden=64,heads=4,seq=32,batch=16,vocab=256"
MEASURED = str(Path(__file__).parents[1] / "measured_collectives.toml")
PLAN = distir.Plan(dp=2, tp=2, pp=2, microbatches=2)


@pytest.mark.parametrize("cluster", ["dgx-a100", "cpu-2core", "selene-a100", "distir-v100-x4", MEASURED])
def test_with_everything_twice_as_fast_a_step_takes_half(cluster):
    model = distir.load(GPT, loss="cross-entropy")
    factors = {name: 2.0 if name in RATES else 0.5 for name in FIGURES}
    topology = load_cluster(cluster, devices=8)
    regular = topology.regular
    assert regular is not None
    runtime = regular.runtime or load_runtime("megatron")
    before = distir.simulate(model, PLAN, CostModel(topology, runtime=runtime)).step_seconds
    faster = CostModel(changed(topology, factors), runtime=changed_runtime(runtime, factors))
    saturates = any(a.saturation for a in (*regular.algorithms, *regular.over_nodes))
    share = 5e-2 if saturates else 1e-6  # a saturation, in √s, is no rate
    assert distir.simulate(model, PLAN, faster).step_seconds == pytest.approx(before / 2, rel=share)


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_matters_and_nothing_gets_slower(name):
    model = distir.load(GPT, loss="cross-entropy")
    plan = distir.Plan(dp=8, tp=2, microbatches=2)  # over two nodes
    topology, runtime = load_cluster("dgx-a100", devices=16), load_runtime("torch-eager")
    before = distir.simulate(model, plan, CostModel(topology)).step_seconds
    factors = {name: 1e3 if name in RATES else 0.0}
    cost = CostModel(changed(topology, factors))
    if name == "host":
        before = distir.simulate(model, plan, CostModel(topology, runtime=runtime)).step_seconds
        cost = CostModel(topology, runtime=changed_runtime(runtime, factors))
    assert distir.simulate(model, plan, cost).step_seconds < before


def test_rails_are_of_the_network():
    regular = load_cluster("dgx-a100", nodes=2).regular
    assert regular is not None
    topology = distir.Topology(replace(regular, rails=8, rail_link=Link(4e9, 1e-5)))
    new = changed(topology, {"network": 2, "link": 3, "latency": 0.5})
    assert new.link(new.devices[0], new.devices[8])[:2] == (8e9, 5e-6)


def test_of_measured_collectives_the_least_seconds_are_latency():
    topology = load_cluster(MEASURED)
    measured = topology.group(topology.devices[:2]).measured[0]
    least = measured.points[0][1]

    def seconds(size: float, **factors: float) -> float:
        new = changed(topology, factors)
        return new.group(new.devices[:2]).measured[0].seconds(size)

    for size, before in measured.points:
        assert seconds(size, link=4) == pytest.approx(least + (before - least) / 4)
        assert seconds(size, latency=0) == pytest.approx(max(1e-12, before - least))


def test_memory_that_ranks_share_changes_with_the_devices_memory():
    topology = load_cluster("cpu-2core")
    regular = topology.regular
    assert regular is not None
    shared = distir.Topology(replace(regular, sharing=CoreSharing(2, bandwidth=4e9)))
    new = changed(shared, {"memory_bandwidth": 3.0}).regular
    assert new is not None
    assert new.sharing is not None
    assert new.sharing.bandwidth == 12e9


def test_links_and_devices_set_by_hand():
    topology = distir.Topology()
    a, b = (topology.add_device("gpu", 1e12, 1e9, 1e-6) for _ in range(2))
    topology.set_link(a, b, 1e9, 1e-5)
    new = changed(topology, {"compute": 3, "memory_bandwidth": 5, "link": 2, "latency": 0.5, "launch": 0})
    assert new.devices == topology.devices
    assert new.link(a, b)[:2] == (2e9, 5e-6)
    assert new.spec(a).peak("f32") == 3e12
    assert new.spec(b).dram_bandwidth == 5e9
    assert new.spec(b).kernel_launch_overhead == 0
    assert topology.link(a, b)[:2] == (1e9, 1e-5)
    assert new.add_device("gpu").index == 2


@pytest.mark.parametrize(("factors", "said"), [
    ({"links": 2}, "unknown figure 'links'"),
    ({"link": 0}, "link: expected a factor from 1e-09 to 1e.09, got 0"),
    ({"latency": -1}, "latency: expected a factor from 1e-09 to 1e.09, or 0, got -1"),
    ({"compute": float("inf")}, "compute: expected"),
    ({"compute": float("nan")}, "compute: expected"),
])  # fmt: skip
def test_factors_out_of_range(factors, said):
    with pytest.raises(UsageError, match=said):
        changed(load_cluster("dgx-a100"), factors)
