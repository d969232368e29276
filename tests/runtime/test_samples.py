"""Samples: each epoch takes each once, in an order that only the seed decides; a rank reads its own."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.ir.device import Device, Mesh
from distir.ir.type import REPLICATE, Float32, Placement, Shard, Tensor
from distir.runtime.samples import Chosen, Samples, batches

MESH = Mesh([Device("cpu", k) for k in range(4)], {"dp": 2, "tp": 2})


def numbered(count: int, batch: int, seed: int | None, first: int = 0) -> Samples:
    return Samples({3: np.arange(first + count)}, {3: 0}, batch, first, count, seed)


def taken(samples: Samples, epoch: int) -> list[int]:
    steps = range(epoch * samples.steps, (epoch + 1) * samples.steps)
    return [int(i) for k in steps for i in np.asarray(samples.step(k)[3])]


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 5), st.integers(0, 7))
def test_an_epoch_takes_no_sample_twice(count: int, batch: int, seed: int, first: int):
    batch = min(batch, count)
    for epoch in range(3):
        found = taken(numbered(count, batch, seed, first), epoch)
        assert len(found) == count // batch * batch
        assert len(set(found)) == len(found)
        assert set(found) <= set(range(first, first + count))


def test_epochs_differ_and_the_seed_decides():
    a, same, other = (numbered(40, 5, seed) for seed in (1, 1, 2))
    assert taken(a, 0) == taken(same, 0) != taken(a, 1)
    assert taken(a, 0) != taken(other, 0)
    assert taken(numbered(40, 5, None), 1) == list(range(40))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "placements",
    [(Shard(0), REPLICATE), (Shard(1, 2), REPLICATE), (Shard(0, 2), Shard(1)), (REPLICATE, Shard(2)), (REPLICATE,) * 2],
)
def test_a_piece_is_the_piece_of_the_whole(placements: tuple[Placement, ...], dim: int):
    shape = [8, 8, 6]
    t = Tensor.whole(Float32, shape, MESH, placements)
    shape[dim] = 20
    array = np.arange(np.prod(shape)).reshape(shape)
    chosen = Chosen(array, dim, np.random.default_rng(0).permutation(20)[:8])
    for coord in MESH.coords:
        piece = chosen.piece(t, coord)
        assert piece.dtype == np.float32
        np.testing.assert_array_equal(piece, t.cut(np.asarray(chosen), coord))


def test_only_what_a_rank_holds_is_read():
    """Of arrays that are not aligned, too, which numpy.take would copy whole."""
    raw = np.zeros(32 * 4096 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(32, 4096)
    assert not raw.flags.aligned
    t = Tensor.whole(Float32, (8, 4096), MESH, (Shard(0), REPLICATE))
    chosen = Chosen(raw, 0, np.arange(8))
    chosen.piece(t, (1, 0))
    tracemalloc.start()
    chosen.piece(t, (1, 0))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1.2 * raw.nbytes / 8


def test_other_processes_map_the_file(tmp_path: Path):
    file = tmp_path / "x.bin"
    np.arange(5000, dtype=np.int64).tofile(file)
    mapped, loaded = np.memmap(file, np.int64, "r", 0, (50, 100)), np.ones((50, 300))
    samples = Samples({0: mapped, 1: loaded}, {0: 0, 1: 0}, 4, 0, 48, 7)
    shipped = samples.shipped(tmp_path, "samples")
    assert not (tmp_path / "samples0").exists()
    assert len(pickle.dumps(shipped)) < 2000
    received = shipped.received()
    assert isinstance(received.arrays[1], np.memmap)
    for k in (0, 30):
        for i in (0, 1):
            np.testing.assert_array_equal(np.asarray(received.step(k)[i]), np.asarray(samples.step(k)[i]))


def test_digests_tell_samples_apart():
    a = numbered(40, 5, 1)
    assert a.digest() == numbered(40, 5, 1).digest()
    changed = a._replace(arrays={3: np.arange(40) + 1})
    others = [numbered(40, 5, 2), numbered(40, 4, 1), numbered(41, 5, 1), numbered(40, 5, 1, 2), changed]
    assert len({a.digest(), *[x.digest() for x in others]}) == 6


@given(st.integers(1, 200), st.integers(1, 9), st.floats(0, 0.9))
def test_whole_batches_are_held_out(count: int, batch: int, share: float):
    train, held_out = batches(count, batch, share)
    assert train + held_out == count
    assert held_out % batch == 0
    assert share * count - 1e-6 <= held_out < share * count + batch


def test_shares_that_are_not_quite_numbers():
    assert batches(100, 10, 0.1) == (90, 10)
    assert batches(300, 10, 0.7) == (90, 210)
    assert batches(100, 10, 0.0) == (100, 0)
