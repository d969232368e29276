"""The clusters that are shipped, and the errors of cluster files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import distir.hardware
from distir.hardware import known_clusters, load_cluster
from distir.ir.errors import InfeasibleError, UsageError

FOLDER = Path(distir.hardware.__file__).parent


@pytest.mark.parametrize("name", known_clusters())
def test_every_table_of_a_shipped_cluster_has_a_source(name: str) -> None:
    import tomllib

    table = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    parts = [table["device"], table["device"]["peak_tflops"], table["node"], table["network"], table["host"]]
    assert all(part["source"] for part in (*parts, *table["collective"]))
    assert table["name"] == name


def test_shipped_clusters() -> None:
    assert known_clusters() == ["cpu-2core", "dgx-a100", "dgx-h100"]
    a100, h100 = load_cluster("dgx-a100"), load_cluster("dgx-h100")
    spec = a100.spec(a100.devices[0])
    assert (spec.peak("bf16"), spec.peak("f32"), spec.memory) == (312e12, 19.5e12, 80e9)
    assert h100.spec(h100.devices[0]).peak("bf16") == 989e12
    assert a100.get_bandwidth(a100.devices[0], a100.devices[1]) == 274 * 8


def test_as_many_nodes_as_are_needed() -> None:
    assert len(load_cluster("dgx-h100").devices) == 8
    assert len(load_cluster("dgx-h100", devices=17).devices) == 24
    assert len(load_cluster("dgx-h100", nodes=5).devices) == 40
    for wrong in ({"nodes": 0}, {"devices": 0}):
        with pytest.raises(UsageError, match="cannot give"):
            load_cluster("dgx-h100", **wrong)
    with pytest.raises(InfeasibleError, match="1 node of 8 cannot give 9 devices") as caught:
        load_cluster("dgx-h100", nodes=1, devices=9)
    assert caught.value.hint == "9 devices need 2 nodes"


def test_a_large_cluster_is_cheap() -> None:
    start = time.process_time()
    cluster = load_cluster("dgx-h100", devices=65536)
    a, b = cluster.regular, cluster.spec(cluster.host)
    assert a is not None
    assert b.memory > 0
    assert time.process_time() - start < 0.1


def test_a_cluster_beyond_all_clusters() -> None:
    """Refused before its devices are made."""
    with pytest.raises(UsageError, match="99,999,999,999,999 nodes of 8 have more than 16,777,216 devices"):
        load_cluster("dgx-a100", nodes=99_999_999_999_999)


def test_an_unknown_cluster_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"unknown cluster 'dgx-b900'.*cpu-2core, dgx-a100, dgx-h100") as e:
        load_cluster("dgx-b900")
    assert e.value.exit_code == 2


GOOD = (FOLDER / "dgx-a100.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[device]", "[device", "is not valid TOML"),
        ("memory_gb = 80", "", r"device\.memory_gb: missing"),
        ("memory_gb = 80", 'memory_gb = "80"', r"device\.memory_gb: expected a number"),
        ("memory_gb = 80", "memory_gb = inf", r"device\.memory_gb: expected a number of at least 0, got inf"),
        ("link_us = 14.0", "link_us = nan", r"network\.link_us: expected a number of at least 0, got nan"),
        ("memory_gb = 80", "memory_gb = 0", r"device\.memory_gb: expected a number above 0"),
        ("memory_gb = 80", "memory_gb = 80\ntypo = 1", r"device\.typo: unknown key"),
        ("compute_efficiency = 0.869", "compute_efficiency = 1.2", r"device\.compute_efficiency: expected a share"),
        ("bf16 = 312", "bf16 = true", r"device\.peak_tflops\.bf16: expected a number"),
        ("devices = 8", "devices = 0.5", r"node\.devices: expected a whole number above 0"),
        ("link_us = 14.0", "link_us = -1", r"network\.link_us: expected a number of at least 0"),
        ('kind = "tree"', 'kind = "star"', r"collective\[2\]\.kind: expected ring or tree, got 'star'"),
    ],
)
def test_a_malformed_file_names_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UsageError, match=message) as e:
        load_cluster(file)
    assert "mine.toml" in str(e.value)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace('name = "dgx-a100"', 'name = "mine"').replace("devices = 8", "devices = 4"))
    assert len(load_cluster(str(file), devices=5).devices) == 8
    with pytest.raises(UsageError, match="cannot read cluster file"):
        load_cluster(tmp_path / "none.toml")
