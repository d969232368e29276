"""Split a dataset over the ranks of data-parallel training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from distir.ir.errors import UsageError


class Partition(Dataset[Any]):
    """Some of the samples of a dataset: number k is `data[indices[k]]`."""

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self.data, self.indices = data, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, k: int) -> Any:
        return self.data[self.indices[k]]

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in self.indices)


class DataPartitioner:
    """Splits a dataset into parts without overlap, its samples shuffled by `seed`.

    `sizes` are the parts' shares of the samples. Together they hold all samples if the shares sum to 1; each part
    has its share rounded up or down. Raises UsageError for shares that are negative or sum to more than 1.
    """

    def __init__(self, data: Any, sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234) -> None:
        if not all(s >= 0 for s in sizes) or sum(sizes) > 1 + 1e-9:
            raise UsageError(f"sizes: expected shares that sum to at most 1, got {list(sizes)}")
        self.data = data
        order = list(range(_length(data)))
        random.Random(seed).shuffle(order)
        # ends are rounded, not lengths, so that no sample is lost between two parts
        ends = [round(len(order) * min(sum(sizes[: k + 1]), 1.0)) for k in range(len(sizes))]
        self.parts = [order[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def use(self, part: int) -> Partition:
        """One part. Raises UsageError if there is no such part."""
        if not 0 <= part < len(self.parts):
            raise UsageError(f"there are {len(self.parts)} parts, got {part}")
        return Partition(self.data, self.parts[part])


class Reshuffled(Sampler[int]):
    """A sampler of 0 to n - 1 that shuffles anew for each iteration, reproducibly for a seed."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed, self.epoch = n, seed, 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.n))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        self.epoch += 1
        return iter(order)


def partition_dataset(
    rank: int,
    world_size: int,
    dataset: Any,
    batch_size: int = 128,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 1234,
) -> DataLoader[Any]:
    """The batches of one of `world_size` ranks: batch_size // world_size samples each, reshuffled each epoch.

    All ranks have equally many samples and batches; at most world_size - 1 samples are left out. Raises UsageError for
    a rank out of range, or a batch or dataset with fewer samples than ranks.
    """
    if not 0 <= rank < world_size:
        raise UsageError(f"there are {world_size} ranks, got rank {rank}")
    each = _length(dataset) // world_size
    if batch_size < world_size or each == 0:
        raise UsageError(
            f"{world_size} ranks need a batch and a dataset of at least as many samples, "
            f"got {batch_size} and {_length(dataset)}"
        )
    part = DataPartitioner(dataset, [1 / world_size] * world_size, seed).use(rank)
    return DataLoader(part, batch_size // world_size, sampler=Reshuffled(each, seed), collate_fn=collate_fn)


def _length(data: Any) -> int:
    if not isinstance(data, Sized):
        raise UsageError(f"a {type(data).__name__} has no length, so it cannot be split")
    return len(data)
