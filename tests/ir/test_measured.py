"""Collectives that were measured: the figures, the file that has them, and what is predicted with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from distir.api.network_file import COLLECTIVES, to_toml
from distir.backends.processes.bench_collectives import Timing
from distir.executor.cost_model import CostModel
from distir.executor.simulator.simulation import Simulator
from distir.hardware import load_cluster
from distir.ir.device import Mesh
from distir.ir.errors import UsageError
from distir.ir.function import Function, FunctionMaker
from distir.ir.measured import Measured
from distir.ir.type import SUM, Float32, Shard, Tensor

TIMINGS = [
    Timing(c, size, (1 + k) * 1e-4 * n * (1 + size / 4096), 1.0, 1.0, "mpi", n)
    for n in (2, 4)
    for k, c in enumerate(COLLECTIVES)
    for size in (16, 4096, 8192, 65_536)
]
"""Seconds that differ by collective, ranks and size."""


def taken(collective: str, size: int, ranks: int) -> float:
    return next(t.seconds for t in TIMINGS if (t.collective, t.size, t.ranks) == (collective, size, ranks))


def test_between_measured_sizes() -> None:
    m = Measured("all-reduce", 2, ((100.0, 1.0), (400.0, 4.0), (1600.0, 4.0)))
    assert [m.seconds(n) for n in (1, 100, 400, 800, 1600)] == pytest.approx([1, 1, 4, 4, 4])
    assert m.seconds(200) == pytest.approx(2.0)
    assert m.seconds(3200) == pytest.approx(8.0)


def test_the_rising_seconds_below_measured_ones() -> None:
    """More bytes that took less: so few do not need more."""
    m = Measured("all-reduce", 2, ((100.0, 3.0), (400.0, 1.0), (1600.0, 4.0), (6400.0, 2.0)))
    least = m.rising()
    assert [x for _, x in least.points] == [1, 1, 2, 2]
    sizes = [50 * 1.3**k for k in range(30)]
    seconds = [least.seconds(n) for n in sizes]
    assert seconds == sorted(seconds)
    assert all([least.seconds(n) <= m.seconds(n) for n in sizes])


def cluster(folder: Path) -> CostModel:
    file = folder / "net.toml"
    file.write_text(to_toml(TIMINGS, 4, "net"))
    return CostModel(load_cluster(file))


def test_ranks_beyond_the_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they communicate was measured so; what they compute was not."""
    monkeypatch.setattr("distir.api.network_file.host_cores", lambda: 2)
    assert "[sharing]\ncores = 2\ncommunication = 0\n" in to_toml(TIMINGS, 4, "net")
    monkeypatch.setattr("distir.api.network_file.host_cores", lambda: 4)
    assert "[sharing]" not in to_toml(TIMINGS, 4, "net")


def seconds(cost: CostModel, *collectives: str, ranks: int = 4, size: int = 65_536) -> float:
    """Of collectives side by side, of whole values of so many bytes."""
    mesh = Mesh(cost.topology.devices[:ranks], {"x": ranks}, "m")
    return Simulator(cost).interpret(_program(mesh, collectives, size // 4)).seconds


def _program(mesh: Mesh, collectives: tuple[str, ...], n: int) -> Function:
    ranks = mesh.sizes[0]
    made = {
        "all-reduce": ("MPIAllreduce", (n,), SUM, {}),
        "all-gather": ("MPIAllgather", (n,), Shard(0), {}),
        "reduce-scatter": ("MPIReduceScatter", (n,), SUM, {"dim": 0}),
        "all-to-all": ("MPIAlltoall", (ranks, n), Shard(0), {"dim": 1}),
        "send-recv": ("MPIPermute", (n * ranks,), Shard(0), {}),
    }
    maker = FunctionMaker("f")
    results = []
    for k, name in enumerate(collectives):
        op, shape, placement, attributes = made[name]
        x = maker.add_input_value(f"x{k}", Tensor.whole(Float32, shape, mesh, [placement]))
        results.append(maker.emit(op, x, axis="x", **attributes))
    maker.set_outputs(results)
    return maker.finalize()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("size", [4096, 65_536])
@pytest.mark.parametrize("collective", COLLECTIVES[:-1])
def test_a_collective_takes_what_it_took(collective: str, size: int, ranks: int, tmp_path: Path) -> None:
    assert seconds(cluster(tmp_path), collective, ranks=ranks, size=size) == pytest.approx(
        taken(collective, size, ranks), rel=1e-5
    )


def test_a_transfer_takes_what_it_took(tmp_path: Path) -> None:
    cost = cluster(tmp_path)
    a, b = cost.topology.devices[:2]
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float32, (1024,), a))
    maker.set_outputs([maker.emit("Send", x, to=b)])
    assert Simulator(cost).interpret(maker.finalize()).seconds == pytest.approx(taken("send", 4096, 2), rel=1e-5)


@pytest.mark.parametrize(("lo", "hi", "bytes_sent"), [(1, 1, 4096), (1, 0, 4096), (0, 2, 8192)])
def test_of_two_devices_each_has_one_neighbour(lo: int, hi: int, bytes_sent: int, tmp_path: Path) -> None:
    cost = cluster(tmp_path)
    mesh = Mesh(cost.topology.devices[:2], {"x": 2}, "m")
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor.whole(Float32, (8, 1024), mesh, [Shard(0)]))
    maker.set_outputs([maker.emit("HaloExchange", x, axis="x", lo=lo, hi=hi)])
    predicted = Simulator(cost).interpret(maker.finalize()).seconds
    assert predicted == pytest.approx(taken("send-recv", bytes_sent, 2), rel=1e-5)


def test_one_after_the_other(tmp_path: Path) -> None:
    """Along different axes, too: one thread moves all."""
    cost = cluster(tmp_path)
    mesh = Mesh(cost.topology.devices, {"h": 2, "w": 2}, "m")
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor.whole(Float32, (1024,), mesh, [SUM, SUM]))
    y = maker.add_input_value("y", Tensor.whole(Float32, (1024,), mesh, [SUM, SUM]))
    maker.set_outputs([maker.emit("MPIAllreduce", x, axis="h"), maker.emit("MPIAllreduce", y, axis="w")])
    function, one = maker.finalize(), taken("all-reduce", 4096, 2)
    assert Simulator(cost).interpret(function).seconds == pytest.approx(2 * one, rel=1e-5)
    file = tmp_path / "net.toml"
    file.write_text(file.read_text().replace("in_turn = true\n", ""))
    beside = Simulator(CostModel(load_cluster(file))).interpret(function)
    assert beside.seconds == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "bytes = [16, 4096, 8192, 65536]",
            "bytes = [16, 65536, 4096, 8192]",
            "measured[0].bytes: expected ascending sizes",
        ),
        (
            "bytes = [16, 4096, 8192, 65536]",
            "bytes = [16, 4096]",
            "expected ascending sizes, one for each of us, got 2 and 4",
        ),
        ("bytes = [16, 4096, 8192, 65536]", "bytes = 16", "measured[0].bytes: expected a list of numbers above 0"),
        (
            "bytes = [16, 4096, 8192, 65536]",
            "bytes = [0, 16, 17]",
            "measured[0].bytes: expected a list of numbers above 0",
        ),
        ("in_turn = true", "in_turn = 1", "node.in_turn: expected true or false"),
        ('collective = "send"\n', "", "measured[5].collective: missing"),
    ],
)
def test_files_that_are_none(old: str, new: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "net.toml"
    text = to_toml(TIMINGS, 4, "net")
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(UsageError) as e:
        load_cluster(file)
    assert said in e.value.message
