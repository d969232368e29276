"""Ranks that share the cores of one host."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from distir.hardware import host_cache, load_cluster, this_host
from distir.ir.topology import CoreSharing


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_cores_are_those_of_the_shipped_cluster(ranks: int) -> None:
    host, shipped = this_host(ranks, cores=2).regular, load_cluster("cpu-2core").regular
    assert host is not None
    assert shipped is not None
    assert (host.spec, host.intra, host.nodes, host.per_node) == (shipped.spec, shipped.intra, 1, ranks)
    assert host.sharing == CoreSharing(2)


def test_the_cache_of_a_core() -> None:
    """As the C library says, where it does."""
    assert host_cache() >= 1 << 16
    if shutil.which("getconf"):
        said = subprocess.run(["getconf", "LEVEL2_CACHE_SIZE"], capture_output=True, text=True).stdout.strip()
        if said.isdigit() and int(said):
            assert host_cache() == int(said)
