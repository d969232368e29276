"""Collectives against the formulas of textbooks, and against the same transfers one by one."""

from __future__ import annotations

import itertools

import pytest

from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.cost_model import collective_cost as cost
from distir.executor.cost_model.seconds import wire_of
from distir.ir import FunctionMaker, Topology, Value
from distir.ir.communication import Wire
from distir.ir.spec import lookup
from distir.ir.topology import Algorithm, Group, Link
from distir.ir.type import Float32, Tensor

B = 1e11
"""Bytes/s of a link."""
S = 8e9
"""Bytes of a value."""


def wire(name: str) -> Wire:
    return wire_of(lookup(name))


def ring(n: int, *algorithms: Algorithm) -> Group:
    return Group(n, 1, n, Link(B), None, algorithms)


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(n: int) -> None:
    parts = [cost.collective(wire(name), S, ring(n)) for name in ("MPIReduceScatter", "MPIAllgather")]
    assert cost.collective(wire("MPIAllreduce"), S, ring(n)) == pytest.approx(sum(parts))
    assert parts[0] == pytest.approx(S * (n - 1) / (n * B))


@pytest.mark.parametrize("n", [3, 8, 64])
def test_a_ring_beats_sending_all_to_one(n: int) -> None:
    """Naive: n - 1 devices send the whole to one, which adds up and sends the sum to each."""
    naive = 2 * cost.serial(S, [(n - 1, Link(B))])
    assert naive == pytest.approx(2 * (n - 1) * S / B)
    assert cost.collective(wire("MPIAllreduce"), S, ring(n)) == pytest.approx(naive / n)


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_an_all_reduce_up_and_down_a_tree_is_a_reduce_and_a_broadcast(nodes: int) -> None:
    """Both pipelined; in a ring, where each device keeps its part, it takes (n-1) / n of that."""
    parts = [cost.pipelined(S, [(nodes - 1, Link(B))]) for _ in ("reduce", "broadcast")]
    tree, slow = Algorithm("tree", 0.0, 0.0, 0.0), Algorithm("ring", 1.0, 0.0, 0.0)
    over = Group(nodes, nodes, 1, Link(B), Link(B), (tree, slow))
    assert cost.collective(wire("MPIAllreduce"), S, over) == pytest.approx(sum(parts))


@pytest.mark.parametrize("pieces", [1, 2, 7, 60])
@pytest.mark.parametrize("k", [2, 3, 8])
def test_a_broadcast_along_a_chain_in_pieces(k: int, pieces: int) -> None:
    """Of k devices, each of which hands on a piece as soon as it has it: (k-2+c) S / (c B); whole (k-1) S / B."""
    t = Topology()
    chain = [t.add_device("gpu", 1e12, 1e12, 0.0) for _ in range(k)]
    for a, b in itertools.pairwise(chain):
        t.set_link(a, b, B)
    f, size = FunctionMaker("broadcast"), 840 * 2**10
    received: list[Value] = []
    for _ in range(pieces):
        x = f.add_input_value("piece", Tensor(Float32, (size // pieces,), chain[0]))
        for to in chain[1:]:
            x = f.emit("Send", x, to=to)
            received.append(x)
    f.set_outputs(received)
    want = (k - 2 + pieces) * 4 * size / (pieces * B)
    assert Simulator(CostModel(t)).interpret(f.finalize()).seconds == pytest.approx(want, rel=1e-6)


def test_a_broadcast_is_pipelined_in_small_pieces() -> None:
    """Along a chain of k devices; the formula above tends to S / B."""
    k, pieces = 8, 1 << 20
    assert cost.serial(S, [(k - 1, Link(B))]) == pytest.approx((k - 1) * S / B)
    assert cost.pipelined(S, [(k - 1, Link(B))]) == pytest.approx((k - 2 + pieces) * S / (pieces * B), rel=1e-4)


def test_in_the_network_each_device_sends_the_value_once() -> None:
    switches = Algorithm("in-network", 1e-5, 0.0, 0.0)
    alone = ring(8, switches)
    assert cost.collective(wire("MPIAllreduce"), S, alone._replace(algorithms=(switches,))) <= S / B + 1e-5
    both = ring(8, switches, Algorithm("ring", 0.0, 0.0, 0.0))
    assert cost.collective(wire("MPIAllreduce"), S, both) == pytest.approx(S / B + 1e-5)  # the ring: 1.75 S / B
    assert cost.collective(wire("MPIAllgather"), S, both) == pytest.approx(7 / 8 * S / B)  # nothing is reduced
    over = both._replace(size=16, nodes=2, inter=Link(B / 8))
    assert cost.collective(wire("MPIAllreduce"), S, over) == pytest.approx(2 * 15 / 16 * S / B)  # rings leave the node


def test_latency_is_hidden_where_links_saturate() -> None:
    plain, smooth = Algorithm("ring", 1e-4, 0.0, 0.0), Algorithm("ring", 1e-4, 0.0, 0.0, 1.0, 1e-3)
    small, large = 1e3, 1e12
    of = wire("MPIAllreduce")
    assert cost.collective(of, small, ring(8, smooth)) == pytest.approx(1e-4, rel=1e-3)
    assert cost.collective(of, large, ring(8, smooth)) == pytest.approx(
        cost.collective(of, large, ring(8, plain)), rel=1e-2
    )
    between = 1e-4 * B / 1.75  # as long as the latency
    assert (
        cost.collective(of, between, ring(8, smooth))
        < 2e-4
        == pytest.approx(cost.collective(of, between, ring(8, plain)))
    )


def test_over_nodes_a_ring_leaves_by_as_many_links_as_devices() -> None:
    for per_node, want in ((1, 1), (4, 4), (8, 8)):
        group = Group(2 * per_node, 2, per_node, Link(B), Link(B / 100), (Algorithm("ring", 0.0, 0.0, 0.0),))
        assert cost.bus(group) == pytest.approx(want * B / 100)
