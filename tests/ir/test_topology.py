"""Topologies by hand and of regular clusters."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distir import CostModel, Plan, simulate
from distir.ir import Device, Topology
from distir.ir.errors import UsageError
from distir.ir.topology import DeviceSpec, Link, Regular, cores_of, regular_group
from distir.models.mlp import mlp


def test_the_notebooks_calls() -> None:
    topology = Topology()
    a, b, c = [
        topology.add_device("gpu", throughput=1e14, dram_bandwidth=1.2e12, kernel_launch_overhead=1e-5)
        for _ in range(3)
    ]
    assert topology.devices == [a, b, c] == [Device("gpu", i) for i in range(3)]
    topology.set_bandwidth(a, b, 200)
    assert topology.get_bandwidth(a, b) == topology.get_bandwidth(b, a) == 200
    assert topology.get_bandwidth(c, c) == math.inf
    assert topology.link(a, b).bandwidth == 200 * 1.25e8
    with pytest.raises(UsageError, match="no bandwidth is set between gpu:0 and gpu:2"):
        topology.get_bandwidth(a, c)


def test_figures_of_a_device() -> None:
    topology = Topology()
    d = topology.add_device("gpu", {"f32": 2.0, "bf16": 8.0}, 3.0, 0.5, memory=100)
    spec = topology.spec(d)
    assert (spec.peak("bf16"), spec.peak("f64"), spec.peak(None)) == (8.0, 2.0, 2.0)
    narrow = topology.spec(topology.add_device("gpu", {"bf16": 8.0, "f16": 4.0}))
    assert (narrow.runs_as("f16"), narrow.peak("f64"), narrow.peak(None)) == ("f16", 8.0, 8.0)
    assert (spec.dram_bandwidth, spec.kernel_launch_overhead, spec.memory) == (3.0, 0.5, 100)
    with pytest.raises(UsageError, match="positive figures"):
        topology.add_device("gpu", throughput=0.0)
    with pytest.raises(UsageError, match="gpu:7 is not a device"):
        topology.spec(Device("gpu", 7))


def test_routes_lead_through_switches_only() -> None:
    topology = Topology()
    a, b, c = [topology.add_device("gpu") for _ in range(3)]
    switch = topology.add_switch()
    topology.set_link(a, switch, 4e9, 1e-6)
    topology.set_link(switch, b, 1e9, 2e-6)
    topology.set_bandwidth(b, c, 8)
    assert topology.link(a, b)[:2] == (1e9, 3e-6)
    assert switch not in topology.devices
    with pytest.raises(UsageError):  # b is a device: it does not forward
        topology.link(a, c)
    topology.set_bandwidth(a, c, 16)  # a new link is seen
    assert topology.get_bandwidth(a, c) == 16


def test_set_bandwidth_keeps_the_latency() -> None:
    topology = Topology()
    a, b = topology.add_device("gpu"), topology.add_device("gpu")
    topology.set_link(a, b, 1e9, 5e-6)
    topology.set_bandwidth(b, a, 80)
    assert topology.get_latency(a, b) == 5e-6
    for wrong in (0, -1, math.nan):
        with pytest.raises(UsageError):
            topology.set_bandwidth(a, b, wrong)


def _cluster(nodes: int = 3, per_node: int = 4) -> Topology:
    spec = DeviceSpec((("f32", 1e12),))
    return Topology(Regular("c", "gpu", spec, nodes, per_node, Link(1e11, 1e-6), Link(1e10, 1e-5), spec, Link(3e10)))


def test_links_of_a_regular_cluster() -> None:
    topology = _cluster()
    d = topology.devices
    assert len(d) == 12
    assert topology.link(d[0], d[3]).bandwidth == 1e11
    assert topology.link(d[3], d[4]).bandwidth == 1e10
    assert topology.link(topology.host, d[0]).bandwidth == 3e10
    assert topology.link(topology.host, d[4])[:2] == (1e10, 1e-5)
    with pytest.raises(UsageError):
        topology.spec(Device("gpu", 12))
    with pytest.raises(UsageError, match="has its own gpu devices"):
        topology.add_device("gpu")


def test_devices_that_are_near_have_links_of_their_own() -> None:
    r = _cluster(2).regular
    assert r is not None
    near = Link(4e11, 2e-6)
    topology = Topology(replace(r, near=(frozenset((0, 2)), frozenset((1, 3))), near_link=near))
    d = topology.devices
    for a, b, link in ((0, 2, near), (3, 1, near), (5, 7, near), (0, 1, r.intra), (0, 3, r.intra), (0, 6, r.inter)):
        assert topology.link(d[a], d[b]) == topology.link(d[b], d[a]) == link
    for numbers, link in (((0, 2), near), ((5, 7), near), ((0, 1), r.intra), ((0, 1, 2, 3), r.intra)):
        assert topology.group([d[i] for i in numbers]).intra == link
    across = topology.group([d[0], d[2], d[4], d[6]])  # more than one node: each node's links, and the network
    assert (across.nodes, across.intra, across.inter) == (2, r.intra, r.inter)
    assert topology.graph.edges[d[5], d[7]] == {"bandwidth": 4e11, "latency": 2e-6}
    assert not topology.graph.has_edge(d[0], d[1])


@pytest.mark.parametrize("order", [("pp", "tp", "dp"), ("tp", "dp", "pp"), ("dp", "pp", "tp")])
def test_near_devices_are_predicted_as_links_by_hand(order: tuple[str, ...]) -> None:
    """The same step on a regular cluster and on devices that are linked one by one."""
    spec = DeviceSpec((("f32", 1e12),), 1e11, 1e-6)
    slow, near = Link(1e9, 1e-6), Link(8e9, 1e-6)
    regular = Regular("c", "gpu", spec, 1, 4, slow, slow, near=(frozenset((0, 2)), frozenset((1, 3))), near_link=near)
    by_hand = Topology()
    devices = [by_hand.add_device("gpu", 1e12, 1e11, 1e-6) for _ in range(4)]
    for i, a in enumerate(devices):
        for j in range(i):
            link = near if (i - j) == 2 else slow
            by_hand.set_link(a, devices[j], link.bandwidth, link.latency)
    plans: list[dict[str, Any]] = [
        {"tp": 2, "pp": 2},
        {"dp": 2, "tp": 2},
        {"dp": 2, "pp": 2},
        {"pp": 4},
        {"tp": 4},
        {"dp": 2},
    ]
    for sizes in plans:
        plan = Plan(**sizes, microbatches=2, order=order)
        found = [simulate(mlp(4, 8, 64), plan, CostModel(t)).simulation.seconds for t in (Topology(regular), by_hand)]
        assert found[0] == found[1]


def test_groups_know_their_nodes() -> None:
    topology = _cluster()
    d = topology.devices
    inside, across, mixed = topology.group(d[:4]), topology.group(d[::4]), topology.group(d[2:8])
    assert (inside.nodes, inside.per_node, inside.inter) == (1, 4, None)
    assert (across.nodes, across.per_node, across.inter) == (3, 1, Link(1e10, 1e-5))
    assert (mixed.nodes, mixed.per_node, mixed.size) == (2, 2, 6)


@given(st.integers(1, 20), st.integers(0, 60), st.integers(1, 50), st.integers(1, 40))
@example(per_node=5, first=0, spacing=3, size=7)  # 2, 2, 1 and 2 devices: the fewest are on a node between
def test_groups_of_evenly_spaced_devices(per_node: int, first: int, spacing: int, size: int) -> None:
    """Their nodes are counted without counting the devices."""
    regular = _cluster(200, per_node).regular
    assert regular is not None
    devices = range(first, first + spacing * size, spacing)
    assert regular_group(regular, devices) == regular_group(regular, list(devices))


def test_a_group_of_many_devices_is_not_counted_through() -> None:
    regular = _cluster(1 << 60, 8).regular
    assert regular is not None
    group = regular_group(regular, range(6, 1 << 60, 4))
    assert (group.nodes, group.per_node, group.size) == (1 << 57, 1, (1 << 58) - 1)


def test_a_group_by_hand_takes_its_slowest_link() -> None:
    topology = Topology()
    a, b, c = [topology.add_device("gpu") for _ in range(3)]
    for x, y, speed, latency in ((a, b, 4e9, 1e-6), (b, c, 2e9, 3e-6), (a, c, 8e9, 2e-6)):
        topology.set_link(x, y, speed, latency)
    assert topology.group([a, b, c]).intra[:2] == (2e9, 3e-6)


def test_the_graph_is_networkx() -> None:
    import networkx as nx

    graph = _cluster(2, 2).graph
    path = nx.shortest_path(graph, Device("gpu", 0), Device("gpu", 3))
    assert path == [Device("gpu", 0), ("node", 0), ("network", 0), ("node", 1), Device("gpu", 3)]
    topology = Topology()
    a, b = topology.add_device("gpu"), topology.add_device("gpu")
    topology.set_bandwidth(a, b, 8)
    assert topology.graph.edges[a, b]["bandwidth"] == 1e9


def test_importing_it_loads_no_networkx() -> None:
    modules = "sys, distir.ir.topology, distir.executor.simulator.simulation, distir.hardware"
    code = f"import {modules}; print('networkx' in sys.modules)"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "False"


@pytest.mark.parametrize(
    "figures",
    [
        {"throughput": math.nan},
        {"throughput": math.inf},
        {"throughput": 1e-320},
        {"dram_bandwidth": math.nan},
        {"kernel_launch_overhead": math.nan},
        {"kernel_launch_overhead": math.inf},
        {"kernel_launch_overhead": -1.0},
        {"memory": math.nan},
    ],
    ids=str,
)
def test_figures_that_make_no_sense(figures: dict[str, float]) -> None:
    (name, value), t = next(iter(figures.items())), Topology()
    with pytest.raises(UsageError, match=f"{'f32' if name == 'throughput' else name} {value}"):
        t.add_device("gpu", **figures)
    t.add_device("gpu", memory=math.inf)  # not limited
    a, b = (t.add_device("gpu") for _ in range(2))
    for bandwidth, latency in ((1e-320, 0.0), (math.nan, 0.0), (1e9, math.inf), (1e9, math.nan)):
        with pytest.raises(UsageError, match="is out of range"):
            t.set_link(a, b, bandwidth, latency)


def test_routes_through_switches_take_the_least_latency() -> None:
    """Over two switches or three, as the sum of latencies says; the slowest link decides the bandwidth."""
    t = Topology()
    a, b = (t.add_device("gpu") for _ in range(2))
    s = [t.add_switch() for _ in range(3)]
    for x, y, bandwidth, latency in (
        (a, s[0], 4e9, 1e-6),
        (s[0], s[2], 1e9, 9e-6),
        (s[0], s[1], 2e9, 2e-6),
        (s[1], s[2], 3e9, 3e-6),
        (s[2], b, 5e9, 4e-6),
    ):
        t.set_link(x, y, bandwidth, latency)
    assert t.link(a, b)[:2] == (2e9, pytest.approx(1e-5))
    t.set_link(s[0], s[2], 1e9, 1e-6)  # routes are found anew
    assert t.link(a, b)[:2] == (1e9, pytest.approx(6e-6))
    c = t.add_device("gpu")
    with pytest.raises(UsageError, match="no bandwidth is set between gpu:0 and gpu:2"):
        t.link(a, c)


@given(st.integers(1, 40), st.integers(1, 16))
def test_ranks_get_equal_shares_of_cores(ranks: int, cores: int) -> None:
    """None where that cannot be: then the kernel moves them between all."""
    shares = [list(cores_of(r, ranks, cores)) for r in range(ranks)]
    if ranks <= cores:
        assert [c for share in shares for c in share] == list(range(cores))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    elif ranks % cores:
        assert shares == [list(range(cores))] * ranks
    else:
        assert [c for share in shares for c in share] == list(range(cores)) * (ranks // cores)
