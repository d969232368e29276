"""Arrays between processes, and the digest of a plan."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest

from distir.ir.device import Device, Mesh
from distir.ir.errors import IRTypeError
from distir.ir.function import Function, FunctionMaker
from distir.ir.type import REPLICATE, BFloat16, DType, Float64, Placement, Shard, Tensor
from distir.runtime.pieces import digest, holder, is_primary, ship, whole_array
from tests.backends.processes.test_launch import counter, train

MESH = Mesh([Device("cpu", k) for k in range(4)], {"dp": 2, "mb": 3, "tp": 2})
PLACES: list[Placement] = [REPLICATE, Shard(0), Shard(0, 2), Shard(1), Shard(1, 3)]


def placed() -> list[Tensor]:
    found: list[Tensor] = []
    for a, b in itertools.product(PLACES, PLACES):
        try:
            found.append(Tensor.whole(Float64, (8, 12), MESH, (a, REPLICATE, b)))
        except IRTypeError:
            continue
    return found


@pytest.mark.parametrize("t", placed(), ids=lambda t: str(t.placements))
def test_pieces_join_to_the_whole_and_each_element_has_a_holder(t: Tensor):
    x = np.arange(96.0).reshape(8, 12)
    pieces = {c: t.cut(x, c) for c in MESH.coords}
    np.testing.assert_array_equal(whole_array({c: p for c, p in pieces.items() if is_primary(t, c)}, t), x)
    for index in itertools.product(range(8), range(12)):
        device = holder(t, index)
        assert device is not None
        coord = MESH.coords[MESH.devices.index(device)]
        assert x[index] in pieces[coord]
        assert is_primary(t, coord)


def test_padding_is_cut_off():
    t = Tensor.whole(Float64, (8, 12), MESH, (Shard(0), REPLICATE, REPLICATE))
    x = np.arange(96.0).reshape(8, 12)
    pieces = {c: t.cut(x, c) for c in MESH.coords if is_primary(t, c)}
    np.testing.assert_array_equal(whole_array(pieces, t, (7, 12)), x[:7])


@pytest.mark.parametrize("dtype", DType.all.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (40, 50)])
def test_arrays_are_shipped_as_they_are(dtype: DType, shape: tuple[int, ...], tmp_path: Path):
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype.numpy)
    y = pickle.loads(pickle.dumps(ship(x, tmp_path / "x"))).array()
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x)


def test_mapped_files_and_broadcasts_are_not_written(tmp_path: Path):
    file = tmp_path / "weights"
    np.arange(5000.0).tofile(file)
    mapped = np.memmap(file, np.float64, "r", 80, (70, 70))
    for x in (mapped, np.broadcast_to(np.zeros((), BFloat16.numpy), (500, 500))):
        y = ship(x, tmp_path / "copy").array()
        np.testing.assert_array_equal(y, x)
    assert not (tmp_path / "copy").exists()
    part = mapped[3:]  # a view: its offset in the file is not known
    np.testing.assert_array_equal(ship(part, tmp_path / "copy").array(), part)
    assert (tmp_path / "copy").exists()


def again(f: Function) -> Function:
    return pickle.loads(pickle.dumps(f))


def test_the_digest_is_that_of_the_program():
    f = counter()
    assert digest(f) == digest(counter()) == digest(again(f))
    assert len({digest(f), digest(counter(4)), digest(counter(scale=2))}) == 3


def test_the_digest_sees_all_of_a_callee():
    main = train("1f1b")[1]
    assert digest(main) == digest(again(main))
    assert digest(main) != digest(train("gpipe")[1])


def test_the_digest_sees_updates_and_the_order_of_operands():
    def make(update: bool, swap: bool) -> Function:
        f = FunctionMaker("f")
        a, b = (f.add_input_value(name, Tensor(Float64, (2,))) for name in "ab")
        c = f.emit("Sub", *((b, a) if swap else (a, b)))
        f.set_outputs([c])
        f.updates = {c: a} if update else {}
        return f.finalize()

    assert len({digest(make(u, s)) for u in (False, True) for s in (False, True)}) == 4
