"""Ranks that share the cores of one host."""

from __future__ import annotations

import pytest

from distir.hardware import load_cluster, this_host


def test_a_core_each_is_the_shipped_cluster():
    host, shipped = this_host(2, cores=2).regular, load_cluster("cpu-2core").regular
    assert host is not None
    assert shipped is not None
    assert (host.spec, host.intra, host.nodes, host.per_node) == (shipped.spec, shipped.intra, 1, 2)


@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_beyond_the_cores_wait_for_each_other(ranks):
    host, alone = this_host(ranks, cores=2).regular, this_host(1, cores=2).regular
    assert host is not None
    assert alone is not None
    wait = ranks / 2
    assert host.per_node == ranks
    assert host.spec.peak("f32") == alone.spec.peak("f32") / wait
    assert host.spec.kernel_launch_overhead == alone.spec.kernel_launch_overhead * wait
    assert host.intra.latency == alone.intra.latency * wait
    assert host.spec.memory == alone.spec.memory
