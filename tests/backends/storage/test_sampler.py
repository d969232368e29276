"""Splitting a dataset: nothing twice, nothing lost, as many batches on every rank, another order each epoch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distir.backends.storage.sampler import DataPartitioner, partition_dataset
from distir.ir.errors import UsageError

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=6).map(lambda x: [y / max(1.0, sum(x)) for y in x])


@given(st.integers(0, 200), SHARES, st.integers(0, 9))
def test_parts_do_not_overlap(n: int, sizes: list[float], seed: int) -> None:
    data = [10 * i for i in range(n)]
    partitioner = DataPartitioner(data, sizes, seed)
    parts = [list(partitioner.use(i)) for i in range(len(sizes))]
    together = [x for part in parts for x in part]
    assert len(set(together)) == len(together)
    assert set(together) <= set(data)
    for part, share in zip(parts, sizes, strict=True):
        assert abs(len(part) - n * share) <= 1


@given(st.integers(0, 200), st.integers(1, 7))
def test_shares_that_sum_to_one_lose_nothing(n: int, parts: int) -> None:
    partitioner = DataPartitioner(list(range(n)), [1 / parts] * parts)
    together = [x for i in range(parts) for x in partitioner.use(i)]
    assert sorted(together) == list(range(n))


def test_the_seed_decides_the_split() -> None:
    first, same, other = (list(DataPartitioner(range(50), seed=s).use(0)) for s in (1, 1, 2))
    assert first == same != other
    assert len(first) == 35


@given(st.integers(1, 5), st.integers(5, 100), st.integers(5, 40))
def test_ranks_have_equal_batches(world: int, n: int, batch: int) -> None:
    loaders = [partition_dataset(r, world, range(n), batch) for r in range(world)]
    epochs = [[[x.tolist() for x in loader] for loader in loaders] for _ in range(2)]
    for batches in epochs:
        lengths = [[len(b) for b in rank] for rank in batches]
        assert all(row == lengths[0] for row in lengths)
        assert max(lengths[0]) <= batch // world
        seen = [x for rank in batches for b in rank for x in b]
        assert len(seen) == len(set(seen)) == n // world * world
    first, second = ([sorted(x for b in rank for x in b) for rank in batches] for batches in epochs)
    assert first == second  # a rank's samples stay its own


def test_an_epoch_has_an_order_of_its_own() -> None:
    loader, twin = (partition_dataset(0, 2, range(64), 16) for _ in range(2))
    first, second = ([x.tolist() for x in loader] for _ in range(2))
    assert first != second
    assert [x.tolist() for x in twin] == first


def test_samples_are_collated() -> None:
    data = [(torch.full((2,), float(i)), i) for i in range(8)]
    x, y = next(iter(partition_dataset(1, 2, data, 4)))
    assert x.shape == (2, 2)
    assert torch.equal(x[:, 0], y.to(x.dtype))
    batch = next(iter(partition_dataset(1, 2, data, 4, collate_fn=len)))
    assert batch == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DataPartitioner([1], [0.7, 0.7]), "sum to at most 1"),
        (lambda: DataPartitioner([1], [1.2, -0.2]), "sum to at most 1"),
        (lambda: DataPartitioner(iter([1])), "has no length"),
        (lambda: DataPartitioner([1]).use(3), "there are 3 parts, got 3"),
        (lambda: DataPartitioner([1, 2], [float("nan"), 0.5]), "sum to at most 1"),
        (lambda: partition_dataset(2, 2, [1, 2, 3]), "there are 2 ranks, got rank 2"),
        (lambda: partition_dataset(0, 4, [1, 2, 3]), "at least as many samples, got 128 and 3"),
        (lambda: partition_dataset(0, 4, [1] * 9, 3), "at least as many samples, got 3 and 9"),
    ],
)
def test_what_cannot_be_split(call, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()
