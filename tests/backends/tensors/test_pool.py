"""Blocks of the pool: used again when nothing lies in them, and never more than were in use at once."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest
import torch

from distir.backends.lowering.engine import TorchRank
from distir.backends.tensors.pool import LARGE, Pool
from distir.backends.tensors.staging import DeviceMemory
from distir.ir.function import FunctionMaker
from distir.ir.type import Float32, Tensor

N = LARGE // 4


def test_a_block_is_used_again_when_no_view_of_it_is_left() -> None:
    pool = Pool()
    x = pool.empty((4, N // 2), torch.float32)
    assert x.shape == (4, N // 2)
    assert x.is_contiguous()
    x.fill_(3.0)
    at, view = x.data_ptr(), x[1:2].t()
    del x
    other = pool.empty((2 * N,), torch.float32)
    assert other.data_ptr() != at
    other.fill_(5.0)
    assert torch.all(view == 3.0)
    del view
    assert pool.empty((N,), torch.float64).data_ptr() == at  # as many bytes, in another dtype
    assert pool.empty((2, N), torch.float32).data_ptr() == at


def test_no_more_is_mapped_than_was_in_use_at_once() -> None:
    pool = Pool()

    def in_turn() -> None:
        for n in (4, 2, 1):
            row = [pool.empty((n * N,), torch.float32) for _ in range(4 // n)]
            assert pool._mapped == 4 * LARGE
            del row

    in_turn()
    in_turn()
    big = pool.empty((6 * N,), torch.float32)
    assert pool._mapped == 6 * LARGE
    more = [pool.empty((N,), torch.float32) for _ in range(3)]
    assert pool._mapped == 9 * LARGE
    del big, more
    large = pool.empty((2 * N,), torch.float32)  # of what there was 6 and 1 go
    assert pool._mapped <= 9 * LARGE
    assert large.numel() == 2 * N


def test_what_lies_in_a_block_stays_while_others_are_given_back() -> None:
    pool = Pool()
    live = [pool.empty((N,), torch.float32).fill_(k) for k in range(5)]
    del live[1], live[2]
    x = pool.empty((3 * N,), torch.float32).fill_(-1.0)
    assert [int(y[0]) for y in live] == [0, 2, 4]
    assert all(torch.all(y == y[0]) for y in live)
    assert torch.all(x == -1.0)
    assert pool._mapped == 6 * LARGE


def test_only_large_tensors_on_the_cpu_have_blocks() -> None:
    memory = DeviceMemory(torch.device("cpu"))
    assert memory._pool is not None
    memory.empty((N - 1,), torch.float32)
    assert not memory._pool._blocks
    assert memory.empty((0,), torch.float32).numel() == 0
    memory.empty((N,), torch.float32)
    assert memory._pool._mapped == LARGE


def test_other_ways_of_counting_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Python 3.14 a call does not count as a reference to what is in a variable."""
    count = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda x: count(x) - 2)  # that of this function, and one less
    pool = Pool()
    x = pool.empty((N,), torch.float32).fill_(1.0)
    y = pool.empty((N,), torch.float32).fill_(2.0)
    assert float(x[0]) == 1.0
    at = x.data_ptr()
    del x
    assert pool.empty((N,), torch.float32).data_ptr() == at
    assert float(y[0]) == 2.0


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)  # unknown to any kernel
    assert Pool().empty((N,), torch.float32).fill_(1.0).sum() == N


def test_what_was_once_in_use_stays_mapped() -> None:
    pool = Pool()
    row = [pool.empty((N,), torch.float32) for _ in range(4)]
    del row
    x = pool.empty((2 * N,), torch.float32)
    assert pool._mapped == 4 * LARGE  # two small ones are left
    assert x.numel() == 2 * N


def test_sizes_in_turn_share_a_block() -> None:
    """A step with tensors of several sizes, one after the other, maps nothing when it is repeated."""
    pool, places = Pool(), set[int]()
    for n in (6, 4, 5, 6, 4):
        x = pool.empty((n * N,), torch.float32)
        assert x.numel() == n * N
        places.add(x.data_ptr())
        del x
    assert len(places) == 1
    small = pool.empty((4 * N - 1,), torch.float32)  # less than two thirds of it
    assert small.data_ptr() not in places
    assert pool._mapped == small.nbytes


def test_the_smallest_block_that_holds_a_tensor_is_taken() -> None:
    pool = Pool()
    at = {n: x.data_ptr() for n, x in [(n, pool.empty((n * N,), torch.float32)) for n in (8, 6, 4, 5)]}
    assert pool.empty(((9 * N) // 2,), torch.float32).data_ptr() == at[5]


def test_sizes_of_which_there_is_no_block_are_forgotten() -> None:
    """Else a program of many sizes would look for blocks among them all."""
    pool = Pool()
    for n in range(LARGE, 9 * LARGE, LARGE):
        pool.empty((n,), torch.float32)
    assert len(pool._blocks) <= 2


def test_only_idle_blocks_are_given_back() -> None:
    pool = Pool()
    row = [pool.empty((N,), torch.float32) for _ in range(2)]
    del row[0]
    row.append(pool.empty((2 * N,), torch.float32))  # the idle one goes for it
    assert pool._mapped == 3 * LARGE
    row.append(pool.empty((N,), torch.float32))
    assert pool._mapped == 4 * LARGE


def test_what_is_large_lies_in_the_pool() -> None:
    """What is loaded, and what ops make: else it would be held twice, at the peak of each."""
    f = FunctionMaker("main")
    x = f.add_input_value("x", Tensor(Float32, (512, 1024)))
    made = [f.emit("Softmax", x, axis=-1), f.emit("Gelu", x), f.emit("Sigmoid", x)]
    made += [f.emit("GeluGrad", x, made[1]), f.emit("Concat", x, x, axis=0)]
    f.set_outputs(made)
    rank = TorchRank(f.finalize(), 0)
    rank.load({0: np.ones((512, 1024), np.float32)})
    pool = rank.network.memory._pool
    assert pool is not None
    assert pool._mapped == rank.values[0].nbytes
    for y in rank.step().values():
        assert not y.untyped_storage().resizable()  # as memory is that torch has not taken itself
