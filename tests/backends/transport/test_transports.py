"""Every communication op in every dtype and kind of reduction, over gloo in each way there is, against numpy."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distir.backends.lowering import engine as backend
from distir.backends.lowering.engine import to_numpy
from distir.backends.lowering.launchers import LAUNCHERS
from distir.backends.tensors.staging import Staged
from distir.backends.transport import nccl
from distir.backends.transport import torch_distributed as comm
from distir.backends.transport.shared_memory import peer_memory
from distir.backends.transport.shared_memory.peer_memory import PeerMemory
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.device import Device, Mesh
from distir.ir.function import Function, FunctionMaker, Value
from distir.ir.spec import all_ops
from distir.ir.type import REPLICATE, Bool, DType, Float64, Placement, Shard, Tensor
from tests.backends.ranks import TIMEOUT, on_ranks

DTYPES = list(DType.all.values())
KINDS = {"sum": "ReduceSum", "max": "ReduceMax", "mean": "ReduceMean"}


def reduced_in(dtype: DType) -> list[str]:
    """The ops that leave something to reduce: no op sums booleans to a boolean, and means are of floats."""
    return [op for kind, op in KINDS.items() if dtype.floating or (kind != "mean" and (dtype, kind) != (Bool, "sum"))]


class Maker:
    """A program whose outputs are all that is to be compared, with its inputs."""

    def __init__(self) -> None:
        self.f = FunctionMaker("main")
        self.outputs: list[Value] = []
        self.arrays: list[np.ndarray] = []
        self.rng = np.random.default_rng(0)

    def input(self, dtype: DType, shape: Sequence[int], at: Mesh | Device, *placements: Placement) -> Value:
        t = Tensor.whole(dtype, shape, at, placements or None)
        self.arrays.append(self.rng.integers(0, 5, t.global_shape).astype(dtype.numpy))
        return self.f.add_input_value("x", t)

    def add(self, op: str, x: Value, **attributes: Any) -> Value:
        y = self.f.emit(op, x, **attributes)
        assert isinstance(y, Value)
        self.outputs.append(y)
        return y

    def collectives(self, dtype: DType, mesh: Mesh) -> None:
        """Along all axes of a mesh, and between it and its first and last device."""
        n = len(mesh.devices)
        for k, (axis, size) in enumerate(zip(mesh.axes, mesh.sizes, strict=True)):
            split = [Shard(0) if i == k else Shard(1) for i in range(len(mesh.axes))]
            along = [Shard(0) if i == k else REPLICATE for i in range(len(mesh.axes))]
            x = self.input(dtype, (2 * n, 2 * n), mesh, *split)
            self.add("MPIAllgather", x, axis=axis)
            passed = self.add("MPIPermute", x, axis=axis)
            if size > 2:
                passed = self.add("MPIPermute", passed, axis=axis, shift=1 - size)
            self.add("MPIAllgather", passed, axis=axis)
            self.add("HaloCut", self.add("HaloExchange", x, axis=axis, lo=1, hi=2, fill=1.0), axis=axis)
            self.add("HaloExchange", x, axis=axis, lo=0, hi=1)
            if len(mesh.axes) == 1:
                self.add("MPIAlltoall", x, axis=axis, dim=1)
            for op in reduced_in(dtype):
                part = self.f.emit(op, self.input(dtype, (size, 2 * n, 3), mesh, *split), axes=(0,), keepdims=0)
                self.add("MPIAllreduce", part, axis=axis)
                other = self.f.emit(op, self.input(dtype, (size, 3, 2 * n), mesh, *along), axes=(0,), keepdims=0)
                bundle = self.f.emit("Pack", part, other)
                self.outputs += self.f.emit("Unpack", self.f.emit("MPIAllreduce", bundle, axis=axis))
                if len(mesh.axes) == 1:
                    scattered = self.f.emit("MPIReduceScatter", bundle, axis=axis, dim=(0, 1), outer=(1, 2))
                    self.outputs += self.f.emit("Unpack", scattered)
                    self.outputs += self.f.emit("Unpack", self.f.emit("MPIAllgather", scattered, axis=axis))
                    self.add("MPIReduceScatter", part, axis=axis, dim=0)
                    self.add("MPIReduce", part, to=mesh.devices[-1])
        if len(mesh.axes) == 2:
            self.along_both(dtype, mesh)
        if len(mesh.axes) == 1:
            whole = self.input(dtype, (2 * n, 3), mesh.devices[0])
            self.add("MPIBroadcast", whole, to=mesh)
            self.add("MPIGather", self.add("MPIScatter", whole, to=mesh, placements=(Shard(0),)), to=mesh.devices[-1])

    def along_both(self, dtype: DType, mesh: Mesh) -> None:
        """Along both axes of a mesh as one, and the corners of halos along both."""
        n, (a, b) = len(mesh.devices), mesh.axes
        for order in ((a, b), (b, a)):
            major, minor = Shard(0), Shard(0, mesh.size(order[0]))
            row = self.input(dtype, (n, 3), mesh, *([major, minor] if order == (a, b) else [minor, major]))
            self.add("MPIAllgather", row, axis=order)
            for op in reduced_in(dtype):
                part = self.f.emit(op, row, axes=(0,), keepdims=0)
                self.add("MPIAllreduce", part, axis=order)
        x = self.input(dtype, (2 * n, 2 * n), mesh, Shard(0), Shard(1))
        self.add("HaloExchange", self.f.emit("HaloExchange", x, axis=a, lo=1, hi=1), axis=b, lo=2, hi=1)

    def transfers(self, dtype: DType, first: Mesh, second: Mesh) -> None:
        """There, together with another; and back; and between two devices."""
        n = len(first.devices)
        pair = [self.input(dtype, (n, k), first, Shard(0)) for k in (2, 3)]
        sent = self.f.emit("Unpack", self.f.emit("Send", self.f.emit("Pack", *pair), to=second))
        self.outputs += [self.f.emit("Send", sent[0], to=first), sent[1]]
        self.add("Send", self.input(dtype, (3,), first.devices[0]), to=second.devices[-1])


@functools.cache
def everything(n: int) -> tuple[Function, list[np.ndarray], list[np.ndarray]]:
    """A program on n ranks, its inputs and outputs."""
    devices = [Device("cpu", k) for k in range(n)]
    meshes = [Mesh(devices, {"a": n}, "row"), Mesh(devices[::-1], {"a": n}, "back")]
    if n == 4:
        meshes.append(Mesh(devices, {"a": 2, "b": 2}, "grid"))
    m = Maker()
    for dtype in DTYPES:
        for mesh in meshes:
            m.collectives(dtype, mesh)
        half = n // 2
        m.transfers(dtype, Mesh(devices[:half], {"a": half}, "first"), Mesh(devices[-half:], {"a": half}, "second"))
    m.f.set_outputs(m.outputs)
    main = m.f.finalize()
    return main, m.arrays, SequentialExecutor().compute(main, m.arrays)


def test_every_op_that_meets_is_tried_and_launched() -> None:
    meeting = {spec.name for spec in all_ops() if spec.route == "axis"}
    assert meeting == set(LAUNCHERS)
    assert meeting <= {op.op_type for op in everything(2)[0].ops}


def compared(rank: int, n: int, **settings: Any) -> int:
    """Run everything twice with a Network of these settings, and compare this rank's part; how many values it has."""
    backend.Network = functools.partial(comm.Network, **settings)  # type: ignore[misc]
    main, arrays, want = everything(n)
    engine = backend.TorchRank(main, rank)
    engine.load(dict(enumerate(arrays)))
    got = [engine.step() for _ in range(2)][-1]
    for k, x in got.items():
        v = main.outputs[k]
        assert isinstance(v.type, Tensor)
        piece = want[k]
        if isinstance(v.type.device, Mesh):
            piece = v.type.cut(piece, engine.coordinate(v.type))
        found = to_numpy(x, v.type.dtype)
        assert found.dtype == v.type.dtype.numpy
        np.testing.assert_array_equal(found, piece, err_msg=f"{v}")
    return len(got)


def in_each_way(rank: int, n: int) -> int:
    """As for ranks of one host; through other memory, as for GPUs; as for NCCL, that knows no numbers of messages."""
    elsewhere = Staged(torch.device("cpu"))
    return min(compared(rank, n), compared(rank, n, memory=elsewhere), compared(rank, n, numbered=False))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_op_dtype_and_kind(n: int) -> None:
    assert min(on_ranks(n, in_each_way)) > 100


def over_hosts(rank: int, n: int, hosts: list[int]) -> tuple[int, list[bool]]:
    """As for ranks of several hosts; and which ranks this one reaches."""
    peer_memory._boot_id = lambda: bytes([1 + hosts[rank]] * 16)  # type: ignore[attr-defined]
    comm._peer_memory = end = PeerMemory(rank, TIMEOUT, comm._exchanged)  # type: ignore[attr-defined]
    return compared(rank, n), [end.reaches((rank, r)) for r in range(n)]


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1], [0, 1, 2, 3], [0, 1]], ids=str)
def test_ranks_of_several_hosts(hosts: list[int]) -> None:
    """Those of one reach each other, and all that cross hosts goes over gloo."""
    for host, (values, reached) in zip(hosts, on_ranks(len(hosts), over_hosts, hosts), strict=True):
        assert values > 100
        assert reached == [host == h for h in hosts]


NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


def with_names_of(rank: int, n: int, version: str) -> int:
    """With only the names that one version of torch has: whichever this is, the functions are the same."""
    for new, old in NAMES.items():
        function = getattr(dist, new, None) or getattr(dist, old)
        for name in (new, old):
            if hasattr(dist, name):
                delattr(dist, name)
        setattr(dist, new if version == "2.13" else old, function)
    importlib.reload(nccl)
    importlib.reload(comm)
    return compared(rank, n, numbered=False)


@pytest.mark.parametrize("version", ["2.11", "2.13"])
def test_both_sets_of_names_that_torch_has(version: str) -> None:
    assert min(on_ranks(2, with_names_of, version)) > 100


def chained(n: int) -> Function:
    """Each rank meets the next: the first and the last are in one group, the others in two."""
    devices = [Device("cpu", k) for k in range(n)]
    f = FunctionMaker("main")
    gathered: list[Value] = []
    for k in range(n - 1):
        mesh = Mesh(devices[k : k + 2], {"a": 2}, f"m{k}")
        x = f.add_input_value("x", Tensor.whole(Float64, (2,), mesh, (Shard(0),)))
        y = f.emit("MPIAllgather", x, axis="a")
        assert isinstance(y, Value)
        gathered.append(y)
    f.set_outputs(gathered)
    return f.finalize()


def run_chained(rank: int, n: int) -> list[list[float]]:
    engine = backend.TorchRank(chained(n), rank)
    engine.load({k: np.arange(2.0) + k for k in range(n - 1)})
    return [x.tolist() for _, x in sorted(engine.step().items())]


def timeouts(rank: int, n: int) -> list[float]:
    """In seconds: of the group of all ranks, and of another."""
    groups = [dist.group.WORLD, comm._new_group([0, 1])]
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]  # type: ignore[union-attr]


def test_all_groups_wait_as_long_as_given() -> None:
    assert on_ranks(2, timeouts) == [[TIMEOUT, TIMEOUT]] * 2


def test_ranks_in_different_numbers_of_groups() -> None:
    assert on_ranks(3, run_chained) == [[[0, 1]], [[0, 1], [1, 2]], [[1, 2]]]
