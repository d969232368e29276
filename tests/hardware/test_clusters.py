"""The clusters that are shipped, and the errors of cluster files."""

from __future__ import annotations

import re
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import distir.hardware
from distir import Plan, load, simulate
from distir.api.compilation import cost_model
from distir.executor.cost_model.collective_cost import bus, collective
from distir.executor.simulator import device_classes
from distir.hardware import (
    among,
    descriptions,
    known_clusters,
    known_parts,
    known_runtimes,
    load_cluster,
    load_runtime,
)
from distir.ir.communication import Wire
from distir.ir.errors import InfeasibleError, UsageError
from distir.ir.spec import lookup
from distir.ir.topology import FusedAttention, regular_group, spread

FOLDER = Path(distir.hardware.__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.toml")), ids=lambda p: str(p.relative_to(FOLDER)))
def test_every_table_with_figures_has_a_source(path: Path) -> None:
    text = path.read_text()
    table = tomllib.loads(text)
    if path.name == "runtimes.toml":
        assert text.startswith("#")
        return
    assert table["source"] if "device" not in table or isinstance(table["device"], str) else table["device"]["source"]
    for part in ("node", "network", "host", "peak_tflops"):
        assert not isinstance(table.get(part), dict) or table[part]["source"]
    if path.parent == FOLDER:
        assert table["name"] == path.stem


@pytest.mark.parametrize("name", known_clusters())
def test_every_shipped_cluster_loads(name: str) -> None:
    cluster = load_cluster(name, nodes=2).regular
    assert cluster is not None
    assert cluster.name == name


@pytest.mark.parametrize("path", sorted((FOLDER / "devices").glob("*.toml")), ids=lambda p: p.stem)
def test_a_device_has_at_most_ten_fitted_numbers(path: Path) -> None:
    text = path.read_text()
    fitted = text[text.index("# Fitted") : text.index("[peak_tflops]")]
    assert 0 < fitted.count(" = ") <= 10


def test_parts_may_be_named_or_written_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ndevice = "h100-sxm"\nnetwork = "infiniband-ndr"\n\n[node]\ndevices = 4\n'
                    'link_gbs = 300\nlink_us = 5\n\n[node.bus_gbs_by]\n2 = 100\n')  # fmt: skip
    cluster = load_cluster(file, devices=8)
    assert cluster.get_bandwidth(*cluster.devices[:2]) == 300 * 8
    assert cluster.group(cluster.devices[:2]).intra.collective(2) == 100e9
    assert cluster.group(cluster.devices[:4]).intra.collective(4) == 300e9
    file.write_text(file.read_text().replace("h100-sxm", "h900"))
    with pytest.raises(UsageError, match=r"device: unknown device 'h900' \(known: a100-pcie-40gb, .*; or a table\)"):
        load_cluster(file)


@pytest.mark.parametrize("name", ["mi300x-8", "gh200"])
def test_in_a_full_mesh_all_links_of_a_device_are_used_at_once(name: str) -> None:
    """So collectives of some of the devices have the bandwidth of the links among these, and an all-to-all, which sends
    as much as an all-gather, takes no longer."""
    regular = load_cluster(name, nodes=2).regular
    assert regular is not None
    link, most, size = regular.intra, regular.per_node, float(1 << 30)
    for n in range(2, most + 1):
        group = regular_group(regular, range(n))
        assert bus(group) == pytest.approx(link.collective(most) * (n - 1) / (most - 1))
        wire = {kind: wire_of_op(f"MPI{kind}") for kind in ("Allgather", "Alltoall")}
        gathered, exchanged = (collective(wire[kind], size, group) for kind in wire)
        sent = size * (n - 1) / n
        assert sent / (1.01 * (n - 1) * link.bandwidth) <= exchanged <= gathered


def wire_of_op(name: str) -> Wire:
    """What a collective sends."""
    comm = lookup(name).comm
    assert comm is not None
    assert comm.wire is not None
    return comm.wire


def test_figures_of_some_groups_count_in_a_full_mesh(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    node = "devices = 4\nlink_gbs = 30\nbus_gbs = 90\nlink_us = 5\nfull_mesh = true\n[node.bus_gbs_by]\n3 = 50\n"
    file.write_text(f'name = "mine"\ndevice = "h100-sxm"\nnetwork = "infiniband-ndr"\n\n[node]\n{node}')
    regular = load_cluster(file, devices=8).regular
    assert regular is not None
    assert [regular.intra.collective(n) for n in (2, 3, 4)] == [30e9, 50e9, 90e9]


def test_devices_share_the_ports_of_their_node(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    network = "\n[network]\nlink_gbs = 40\nlink_us = 5\n"
    file.write_text('name = "mine"\ndevice = "h100-sxm"\nnode = "nvlink4"\n' + network)
    assert load_cluster(file, nodes=2).regular.inter.bandwidth == 40e9  # type: ignore[union-attr]
    file.write_text(file.read_text() + "ports = 2\noversubscription = 2\n")
    inter = load_cluster(file, nodes=2).regular.inter  # type: ignore[union-attr]
    assert (inter.bandwidth, inter.collective()) == (5e9, 5e9)


def test_some_devices_of_each_node_reach_a_share_of_their_ports(tmp_path: Path) -> None:
    found: list[list[float]] = []
    for more in ("", "\npartial_share = 0.5"):
        file = tmp_path / "mine.toml"
        file.write_text(GOOD.replace("link_gbs = 25", "link_gbs = 25" + more, 1))
        regular = load_cluster(file, nodes=2).regular
        assert regular is not None
        found.append([bus(spread(regular, 2, k, 2 * k)) for k in range(1, 9)])
    plain, shared = found
    assert plain == [k * 25e9 for k in range(1, 9)]
    assert shared == [25e9, *[k * 12.5e9 for k in range(2, 8)], 200e9]
    half = file.read_text().replace("partial_share = 0.5", "partial_share = 0.5\nports = 4")
    file.write_text(half + "\n[network.bus_gbs_by]\n4 = 20\n")
    regular = load_cluster(file, nodes=2).regular
    assert regular is not None
    assert [bus(spread(regular, 2, k, 2 * k)) for k in (2, 4, 8)] == [12.5e9, 40e9, 100e9]


def test_a_rack_of_nvlink_is_one_node() -> None:
    rack = load_cluster("tyche-gb200", devices=144)
    assert rack.group(rack.devices[:64]).nodes == 1
    assert rack.group(rack.devices[:144]).nodes == 2


def test_runtimes() -> None:
    names = [
        "composer",
        "distir",
        "distir-2021",
        "distir-compiled",
        "megatron",
        "megatron-core",
        "megatron-core-default",
    ]
    torch = ["torch-compiled", "torch-eager"]
    titan = ["torchtitan", "torchtitan-2025", "torchtitan-async", "torchtitan-compiled"]
    assert known_runtimes() == [*names, *torch, *titan]
    assert load_runtime("distir-compiled").fuses
    assert not load_runtime("torch-eager").fuses
    megatron = load_runtime("megatron")
    assert (megatron.logit_bytes, megatron.score_block) == ((38, 14), 4)
    assert 0 < megatron.gap < megatron.op
    later = load_runtime("megatron-core")
    for flag in ("cudnn", "accumulates", "overlaps_products", "fp8_gathers"):
        assert (getattr(later, flag), getattr(megatron, flag)) == (True, False)
    plain = load_runtime("megatron-core-default")
    assert (plain.logit_bytes, plain.logit_memory) == (megatron.logit_bytes, (4, 4, 0))
    assert not any(getattr(plain, flag) for flag in ("cudnn", "accumulates", "overlaps_products"))
    assert all(runtime.gradient_buffer for runtime in (megatron, later, plain))
    assert load_cluster("dgx-h100-mcore").regular.runtime is later  # type: ignore[union-attr]
    for name in ("jax", "jax+fp8", "megatron+", "megatron+flash", "megatron+fp8+4bits", "megatron+fp8+fp8"):
        with pytest.raises(UsageError, match=f"unknown runtime {re.escape(repr(name))}"):
            load_runtime(name)
    for name, hint in (
        ("megatorn", "did you mean megatron?"),
        ("jax", "known: composer"),
        ("megatron+fp9", "behind megatron may stand any of +fp8, +flash2, +sync, each once"),
    ):
        with pytest.raises(UsageError) as e:
            load_runtime(name)
        assert (e.value.hint or "").startswith(hint)


def test_attention_of_any_runtime_can_be_flash_attention_2() -> None:
    cudnn, triton = load_runtime("megatron-core"), load_runtime("composer")
    assert (cudnn.cudnn, triton.attention < 1) == (True, True)
    for runtime in (cudnn, triton):
        name = f"{runtime.name}+flash2"
        assert load_runtime(name) == replace(runtime, name=name, cudnn=False, attention=1.0)
    both = load_runtime("megatron-core+fp8+flash2")
    assert (both.name, both.fp8, both.cudnn) == ("megatron-core+fp8+flash2", True, False)


def test_any_runtime_can_wait_for_what_it_sends() -> None:
    own = load_runtime("megatron-core")
    assert (own.overlaps_products, own.ring_attention, own.synchronous) == (True, True, False)
    given = {"synchronous": True, "overlaps_products": False, "ring_attention": False}
    assert load_runtime("megatron-core+sync") == replace(own, name="megatron-core+sync", **given)


def test_a_runtime_of_ones_own_counts_for_the_shipped_one_of_its_name() -> None:
    own = replace(load_runtime("distir"), op=1.0)
    assert load_runtime("distir", own) is own
    assert load_runtime("distir+flash2", own) == replace(own, name="distir+flash2", cudnn=False, attention=1.0)
    assert load_runtime("megatron+flash2", own) is load_runtime("megatron+flash2")


def test_a_transfer_may_take_the_host_longer_where_more_ranks_share_it() -> None:
    runtime = load_runtime("distir-2021")
    assert [among(runtime, n, "gpu").transfer for n in (1, 2, 3, 4, 8)] == pytest.approx(  # type: ignore[union-attr]
        [30e-6, 30e-6, 7.015e-3, 14e-3, 28e-3]
    )
    for n in (2, 4, 8, 64):
        assert among(runtime, n, "gpu", 4) == among(runtime, min(n, 4), "gpu")
    topology = load_cluster("distir-v100-pcie", devices=16)
    cost = cost_model(topology, Plan(dp=16), runtime="distir-2021")
    assert cost.runtime is not None
    assert cost.runtime.transfer == pytest.approx(14e-3)
    assert among(load_runtime("megatron"), 4, "gpu") is load_runtime("megatron")
    assert among(None, 4, "gpu") is None


def test_bytes_of_a_logit_are_of_both_passes(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(f"{GOOD}\n[runtime]\nlogit_bytes = [38]\n")
    with pytest.raises(UsageError, match=r"runtime.logit_bytes: expected two numbers, forward and backward, got 1"):
        load_cluster(str(file))


def test_memory_of_a_logit_is_of_both_passes_and_of_a_hole(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(f"{GOOD}\n[runtime]\nlogit_memory = [8, 8]\n")
    with pytest.raises(UsageError, match=r"runtime.logit_memory: expected three numbers, forward, backward .*, got 2"):
        load_cluster(str(file))


def test_a_cluster_may_name_the_runtime_it_was_measured_with(tmp_path: Path) -> None:
    assert load_cluster("distir-v100-x4").regular.runtime == load_runtime("distir-2021")  # type: ignore[union-attr]
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace('name = "test"', 'name = "test"\nruntime = "jax"'))
    with pytest.raises(UsageError, match=r"runtime: unknown runtime 'jax' \(known: composer, .*; or a table\)"):
        load_cluster(file)
    file.write_text(GOOD.replace('name = "test"', 'name = "test"\nruntime = "megatron+sync"'))
    assert load_cluster(file).regular.runtime == load_runtime("megatron+sync")  # type: ignore[union-attr]


def test_the_files_of_a_cluster_and_its_parts() -> None:
    """Each with its source, as it is shipped."""
    files = descriptions("dgx-h100")
    assert list(files) == ["cluster dgx-h100", "device h100-sxm", "node nvlink4", "network infiniband-ndr"]
    assert all("source = " in text for text in files.values())
    assert [list(descriptions(name)) for name in ("h100-pcie", "xgmi")] == [["device h100-pcie"], ["node xgmi"]]
    for names in known_parts().values():
        for name in names:
            assert all("source = " in text for text in descriptions(name).values()), name
    with pytest.raises(UsageError, match="unknown cluster 'dgx-h10'") as e:
        descriptions("dgx-h10")
    assert e.value.hint == "did you mean dgx-h100?"


def test_what_is_no_cluster_but_a_part_of_one() -> None:
    with pytest.raises(UsageError, match="unknown cluster 'h100-pcie'") as e:
        load_cluster("h100-pcie")
    assert (e.value.hint or "").startswith('it is a device: a cluster file may say device = "h100-pcie"; known: ')
    with pytest.raises(UsageError) as e:
        load_cluster("DGX-H100")
    assert (e.value.hint or "").startswith("did you mean dgx-h100?")


def test_near_devices_of_a_node(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    near = "[node.near]\ndevices = [[0, 1], [2, 3]]\nlink_gbs = 600\nlink_us = 5\n\n[[node.collective]]"
    file.write_text(GOOD.replace("[[node.collective]]", near, 1))
    topology = load_cluster(file, nodes=2)
    d = topology.devices
    assert [topology.link(d[a], d[b]).bandwidth for a, b in ((0, 1), (1, 2), (10, 11), (4, 5))] == [
        600e9,
        274e9,
        600e9,
        274e9,
    ]
    for wrong in ("[[0, 8]]", "[[0, 1], [1, 2]]", "[0, 1]", "[]", '"all"', "[[0, true]]"):
        file.write_text(GOOD.replace("[[node.collective]]", near.replace("[[0, 1], [2, 3]]", wrong), 1))
        with pytest.raises(UsageError, match=r"node\.near\.devices: expected lists of different numbers from 0 to 7"):
            load_cluster(file)


@pytest.mark.parametrize(("ports", "places"), [(8, 8), (2, 2), (1, 1)])
def test_what_stays_on_its_rails_does_not_cross_the_spine(tmp_path: Path, ports: int, places: int) -> None:
    """Oracle: each port leads to a switch of its own, and device k of a node uses port k * ports // 8."""
    file = tmp_path / "mine.toml"
    more = f"link_gbs = 25\nrails = true\noversubscription = 4\nports = {ports}"
    file.write_text(GOOD.replace("link_gbs = 25", more, 1))
    topology = load_cluster(file, nodes=3)
    d, full = topology.devices, 25e9 * ports / 8
    for a in range(24):
        for b in range(24):
            if a // 8 != b // 8:
                alike = a % 8 // (8 // places) == b % 8 // (8 // places)
                assert topology.link(d[a], d[b]).bandwidth == (full if alike else full / 4)
    found = [
        topology.group([d[i] for i in group]).inter.bandwidth / full  # type: ignore[union-attr]
        for group in ([0, 8, 16], range(24), [0, 4, 8, 12], [0, 7, 8], [1, 8, 16], [3, 4, 8, 9, 10, 11, 12])
    ]
    assert found == {8: [1, 1, 1, 0.25, 0.25, 0.25], 2: [1, 1, 1, 0.25, 1, 1], 1: [1] * 6}[ports]


@pytest.mark.parametrize(("plan", "crosses"), [
    (Plan(dp=2, tp=8), False), (Plan(dp=4, tp=4), False), (Plan(tp=8, pp=2, microbatches=2), False),
    (Plan(tp=16), False), (Plan(tp=4, pp=4, microbatches=4), True), (Plan(dp=2, tp=2, pp=4, microbatches=4), True),
])  # fmt: skip
def test_plans_on_rails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan, crosses: bool) -> None:
    """Steps of plans that stay on their rails are those of a network that is not oversubscribed."""
    model = load("gpt:layers=4,hidden=64,heads=16,seq=16,vocab=64,batch=16", loss="cross-entropy", optimizer="sgd")
    file, steps = tmp_path / "mine.toml", dict[str, float]()
    for name, more in {
        "full": "",
        "spine": "\noversubscription = 1000",
        "rails": "\noversubscription = 1000\nrails = true",
    }.items():
        file.write_text(GOOD.replace("link_gbs = 25", "link_gbs = 25" + more, 1))
        steps[name] = simulate(model, plan, file).step_seconds
    assert steps["full"] < steps["spine"]
    assert (steps["rails"] > steps["full"]) == crosses
    monkeypatch.setattr(device_classes, "_by_blocks", lambda *args: None)
    assert simulate(model, plan, file).step_seconds == steps["rails"]


def test_of_one_stage_some_devices_stay_on_their_rails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 0 sends to 10 on its own rail, device 2 to 12 across the spine: not all of a block are linked alike."""
    model = load("gpt:layers=4,hidden=64,heads=16,seq=16,vocab=64,batch=40", loss="cross-entropy", optimizer="sgd")
    file = tmp_path / "mine.toml"
    more = "link_gbs = 25\nrails = true\noversubscription = 1000\nports = 2"
    file.write_text(GOOD.replace("link_gbs = 25", more, 1))
    plan = Plan(dp=10, pp=2, microbatches=2)
    found = simulate(model, plan, file)
    assert len(found.simulation.program.classes.sizes) > 2
    monkeypatch.setattr(device_classes, "_by_blocks", lambda *args: None)
    assert simulate(model, plan, file).step_seconds == found.step_seconds


def test_shipped_clusters() -> None:
    assert {"cpu-2core", "dgx-a100", "dgx-h100", "selene-a100", "tyche-gb200"} <= set(known_clusters())
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
    with pytest.raises(UsageError, match=r"unknown cluster 'dgx-a1O0'.*cpu-2core, .*dgx-a100, .*dgx-h100") as e:
        load_cluster("dgx-a1O0")
    assert "did you mean dgx-a100?" in str(e.value)
    assert e.value.exit_code == 2


GOOD = """
name = "test"

[device]
kind = "gpu"
memory_gb = 80
memory_gbs = 2039
compute_efficiency = 0.869
launch_us = 10.0

[device.peak_tflops]
f32 = 19.5
bf16 = 312

[node]
devices = 8
link_gbs = 274
link_us = 8.0

[[node.collective]]
kind = "ring"
base_us = 14.0
intra_us = 1.9
inter_us = 4.0
share = 0.92

[network]
link_gbs = 25
link_us = 14.0

[[network.collective]]
kind = "tree"
base_us = 14.0
intra_us = 1.25
inter_us = 8.5
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[device]", "[device", "is not valid TOML"),
        ("memory_gb = 80", "", r"device\.memory_gb: missing"),
        ("memory_gb = 80", 'memory_gb = "80"', r"device\.memory_gb: expected a number"),
        ("memory_gb = 80", "memory_gb = inf", r"device\.memory_gb: expected a number of at least 0 and .*, got inf"),
        ("link_us = 14.0", "link_us = nan", r"network\.link_us: expected a number of at least 0, got nan"),
        ("memory_gb = 80", "memory_gb = 0", r"device\.memory_gb: expected a number above 0"),
        ("memory_gb = 80", "memory_gb = 80\ntypo = 1", r"device\.typo: unknown key"),
        ("compute_efficiency = 0.869", "compute_efficiency = 1.2", r"device\.compute_efficiency: expected a share"),
        (
            "launch_us = 10.0",
            "launch_us = 10.0\nmultiprocessors = 108\nwide_efficiency = 0.9\nbatched_tile = 100",
            r"device\.batched_tile: expected one of 128, 64, 32, got 100",
        ),
        ("launch_us = 10.0", "launch_us = 10.0\nwide_efficiency = 0.9", r"device\.multiprocessors: missing"),
        ("bf16 = 312", "bf16 = true", r"device\.peak_tflops\.bf16: expected a number"),
        ("devices = 8", "devices = 0.5", r"node\.devices: expected a whole number above 0"),
        ("link_us = 14.0", "link_us = -1", r"network\.link_us: expected a number of at least 0"),
        (
            'kind = "tree"',
            'kind = "star"',
            r"network\.collective\[0\].kind: expected ring, tree or in-network, got 'star'",
        ),
        ("share = 0.92", "share = 0", r"node\.collective\[0\]\.share: expected a number above 0"),
        ("link_gbs = 25", "link_gbs = 25\npartial_share = 0", r"network\.partial_share: expected a share above 0"),
        ("compute_efficiency = 0.869", "compute_efficiency = 1e-300", r"compute_efficiency: .* at least 1e-06"),
        ("devices = 8", "devices = 400000000\nfull_mesh = true", r"node\.devices: expected at most 65,536 in a node"),
        ("bf16 = 312", "bf17 = 312", r"device\.peak_tflops\.bf17: unknown type of products \(known: f64, f32"),
        ("memory_gb = 80", "memory_gb = 80\nusable_gib = 90", r"usable_gib: expected at most memory_gb, 80, got 90"),
        ('name = "test"', 'name = "test"\nruntme = "megatron"', r"runtme: unknown key .*\bruntime\b"),
        ("link_gbs = 25", "link_gbs = 25\npartial_share = 3", r"network\.partial_share: expected a share above 0"),
        ("link_gbs = 25", "link_gbs = 25\ncompute_share = 3", r"network\.compute_share: .* and at most 1, got 3"),
        ("link_gbs = 25", "link_gbs = 25\nbus_gbs = 0", r"network\.bus_gbs: expected a number above 0"),
        ("link_gbs = 25", "link_gbs = 1e-308", r"network\.link_gbs: expected a number above 0, got 1e-308"),
        ("launch_us = 10.0", "launch_us = 1e308", r"device\.launch_us: .* and at most 1e\+30, got 1e\+308"),
        ("devices = 8", "devices = 99999999999", r"node\.devices: .*, of at most 2,147,483,648, got 99999999999"),
        (
            "link_gbs = 25",
            "link_gbs = 25\noversubscription = 0.5",
            r"network\.oversubscription: expected a number of at",
        ),
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
    file.write_text(GOOD.replace('name = "test"', 'name = "mine"').replace("devices = 8", "devices = 4"))
    assert len(load_cluster(str(file), devices=5).devices) == 8
    with pytest.raises(UsageError, match=r"cannot read cluster file .*distir calibrate --out"):
        load_cluster(tmp_path / "none.toml")


def test_figures_of_fused_attention(tmp_path: Path) -> None:
    figures = "efficiency = 0.4", "half_gflop = 5", "half_keys = 320", "half_queries = 20000", "half_width = 30"
    file = tmp_path / "mine.toml"
    file.write_text(
        GOOD.replace("launch_us = 10.0", "\n".join(["launch_us = 10.0", *[f"attention_{x}" for x in figures]]))
    )
    cluster = load_cluster(file)
    assert cluster.spec(cluster.devices[0]).fused_attention == FusedAttention(0.4, 5e9, 320, 20000, 30)
    file.write_text(GOOD)
    cluster = load_cluster(file)
    assert cluster.spec(cluster.devices[0]).fused_attention == FusedAttention(0.869)  # as products


def test_the_host_of_a_rank_alone_issues_nothing_where_steps_are_graphs() -> None:
    runtime = load_runtime("distir")
    assert runtime.graphs
    alone = among(runtime, 1, "gpu")
    assert alone is not None
    assert not alone.issues
    assert among(runtime, 2, "gpu") == among(runtime, 1, "cpu") == runtime
    eager = load_runtime("torch-eager")
    assert among(eager, 1, "gpu") == eager


@pytest.mark.parametrize(
    ("plan", "cluster", "issued"), [(1, "dgx-h100", False), (2, "dgx-h100", True), (1, "cpu-2core", True)]
)
def test_a_prediction_of_a_rank_alone_on_a_gpu_is_of_a_graph(plan: int, cluster: str, issued: bool) -> None:
    """Ops that are so short that else the device waits for its host."""
    import distir

    model = distir.load("gpt:layers=2,hidden=16,heads=2,vocab=64,seq=8", {"batch": 4}, loss="cross-entropy")
    quick, hosted = (
        distir.simulate(model, distir.Plan(dp=plan), cluster, runtime=r).step_seconds for r in (None, "distir")
    )
    assert (hosted > 1.05 * quick) is issued
