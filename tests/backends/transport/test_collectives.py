"""Every communication op over gloo, in every placement, against the reference on numpy. One launch a world
size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.device import Device, Mesh
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Value
from distir.ir.type import (
    REPLICATE,
    BFloat16,
    Bool,
    DType,
    Float16,
    Float32,
    Float64,
    Int8,
    Int16,
    Int32,
    Int64,
    Partial,
    Placement,
    Replicate,
    Shard,
    Tensor,
    UInt8,
)
from tests.backends.launching import run

pytestmark = pytest.mark.usefixtures("preloaded")

DEVICES = [Device("cpu", k) for k in range(4)]
MESH = Mesh(DEVICES, {"dp": 2, "tp": 2})
SHAPE = (8, 12)
SPLITS = [Shard(0), Shard(0, 2), Shard(1), Shard(1, 2), Shard(1, 3)]
DTYPES = [Float16, BFloat16, Float32, Float64, Bool, UInt8, Int8, Int16, Int32, Int64]


class Program:
    """A program being built, whose outputs are all that is to be compared."""

    def __init__(self) -> None:
        self.f = FunctionMaker("main")
        self.outputs: list[Value] = []
        self.arrays: list[np.ndarray] = []
        self.rng = np.random.default_rng(0)

    def add(
        self, dtype: DType, shape: Sequence[int], at: Mesh | Device, placements: Sequence[Placement] | None
    ) -> Value:
        t = Tensor.whole(dtype, shape, at, placements)
        self.arrays.append(self.rng.integers(0, 5, t.global_shape).astype(dtype.numpy))
        return self.f.add_input_value("x", t)

    def try_emit(self, op: str, *operands: Value, **attributes: object) -> Value | None:
        """The op, compared; None if the types do not allow it."""
        try:
            y = self.f.emit(op, *operands, **attributes)
        except IRTypeError:
            return None
        self.outputs.append(y)
        return y

    def check(self, steps: int = 2) -> int:
        """Run and compare with the reference; how many values were compared."""
        self.f.set_outputs(self.outputs)
        main = self.f.finalize()
        want = SequentialExecutor().compute(main, self.arrays)
        got = run(main, self.arrays, steps, timeout=300).outputs[-1]
        for k, v in enumerate(main.outputs):
            assert isinstance(v.type, Tensor)
            assert got[k].dtype == v.type.dtype.numpy
            np.testing.assert_array_equal(got[k], want[k], err_msg=f"{v}")
        return len(want)


def placements() -> Iterator[tuple[Placement, Placement]]:
    every = [REPLICATE, *SPLITS]
    yield from itertools.product(every, every)


def test_every_collective_in_every_placement():
    p = Program()
    for a, b in placements():
        try:
            x = p.add(Float64, SHAPE, MESH, (a, b))
        except IRTypeError:
            continue
        for axis, here in (("dp", a), ("tp", b)):
            if isinstance(here, Replicate):
                term = p.try_emit("LocalTerm", x, axis=axis)
                assert term is not None
                p.try_emit("MPIAllreduce", term, axis=axis)
                for s in SPLITS:
                    p.try_emit("LocalSlice", x, axis=axis, dim=s.dim, outer=s.outer)
                    p.try_emit("LocalSlice", x, axis=axis, dim=s.dim, outer=s.outer, shift=1)
            else:
                p.try_emit("MPIAllgather", x, axis=axis)
                for s in SPLITS:
                    p.try_emit("MPIAlltoall", x, axis=axis, dim=s.dim, outer=s.outer)
                permuted = p.try_emit("MPIPermute", x, axis=axis)
                assert permuted is not None
                if a is b or REPLICATE in (a, b):
                    p.try_emit("MPIAllgather", permuted, axis=axis)
                    p.try_emit("MPIAlltoall", permuted, axis=axis, dim=1 - here.dim)  # type: ignore[attr-defined]
                    p.try_emit("MPIPermute", permuted, axis=axis, shift=-1)
    assert p.check() > 140


def test_reductions_of_every_kind_and_dtype():
    p = Program()
    for kind, dtype in itertools.product(("sum", "max"), DTYPES):
        if kind == "sum" and dtype is Bool:
            continue  # no op sums booleans to a boolean
        x = p.add(dtype, (4, 2, *SHAPE), MESH, (Shard(0), Shard(1)))
        part = p.f.emit("ReduceSum" if kind == "sum" else "ReduceMax", x, axes=(0, 1), keepdims=0)
        assert part.type.placements == (Partial(kind), Partial(kind))
        for axis in ("dp", "tp"):
            p.try_emit("MPIAllreduce", part, axis=axis)
            p.try_emit("MPIAllreduce", p.f.emit("MPIPermute", part, axis=axis), axis=axis)
            for s in SPLITS:
                assert p.try_emit("MPIReduceScatter", part, axis=axis, dim=s.dim, outer=s.outer)
        p.outputs.append(part)
    for dtype in DTYPES:
        x = p.add(dtype, SHAPE, MESH, (Shard(0), Shard(1, 3)))
        p.try_emit("MPIAllgather", x, axis="dp")
        p.try_emit("MPIAllgather", x, axis="tp")
        p.try_emit("MPIAlltoall", x, axis="tp", dim=0, outer=2)
    assert p.check() > 200


@pytest.mark.parametrize("inside", [True, False], ids=["host is a rank of the mesh", "host apart"])
def test_between_a_device_and_a_mesh(inside: bool):
    host = DEVICES[0]
    mesh = Mesh(DEVICES[:2] if inside else DEVICES[1:3], {"tp": 2}, "part")
    p = Program()
    for dtype, s in itertools.product((Float32, Int16, BFloat16), (REPLICATE, *SPLITS)):
        x = p.add(dtype, SHAPE, host, None)
        if s is REPLICATE:
            y = p.try_emit("MPIBroadcast", x, to=mesh)
        else:
            y = p.try_emit("MPIScatter", x, to=mesh, placements=(s,))
        assert y is not None
        assert p.try_emit("MPIGather", y, to=host)
    for reduce, shape in (("ReduceSum", SHAPE), ("ReduceMax", SHAPE)):
        x = p.add(Float32, shape, mesh, (Shard(1),))
        assert p.try_emit("MPIReduce", p.f.emit(reduce, x, axes=(1,), keepdims=0), to=host)
    assert p.check() > 30


def test_between_meshes():
    first, second = (Mesh(DEVICES[k : k + 2], {"dp": 1, "tp": 2}, f"stage{k}") for k in (0, 2))
    both = Mesh(DEVICES, {"pp": 2, "dp": 1, "tp": 2}, "both")
    p = Program()
    for dtype in DTYPES:
        x = p.add(dtype, SHAPE, first, (REPLICATE, Shard(1)))
        y = p.try_emit("Send", x, to=second)
        assert y is not None
        p.try_emit("Send", p.f.emit("Not", y) if dtype is Bool else p.f.emit("Add", y, y), to=first)
    bundle = p.f.emit("Pack", x, p.add(Float32, (), first, None))
    p.outputs += p.f.emit("Unpack", p.f.emit("Send", bundle, to=second))
    z = p.add(Float64, SHAPE, both, (REPLICATE, REPLICATE, Shard(0)))
    p.try_emit("Restrict", z, to=second)
    p.try_emit("Restrict", z, to=first)
    assert p.check() == 24
