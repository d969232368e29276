"""Checkpoints by torch.distributed.checkpoint: writing and reading a rank's pieces.

Every input that the program updates is saved under its name, in its source shape, as boxes, each written by one rank. A
box is read from all saved boxes that overlap it, so a checkpoint can be read under any plan.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from distir.backends.lowering.engine import TorchRank, to_numpy, to_torch
from distir.backends.tensors.torch_namespace import torch_dtype
from distir.ir.errors import UsageError
from distir.ir.function import Function
from distir.runtime.boxes import Box, boxes
from distir.runtime.checkpoint import (
    Manifest,
    Saved,
    Saving,
    Tensors,
    commit,
    file_sum,
    name_of,
    part_of,
    remove_incomplete,
    saved_type,
    tensor_table,
    updated_inputs,
    whole_shape,
)

T = TypeVar("T")


class Piece(NamedTuple):
    """The piece that this process holds of a tensor `name` of global shape `shape`."""

    name: str
    shape: tuple[int, ...]
    boxes: list[Box]
    data: torch.Tensor


class Ranks(NamedTuple):
    """The ranks that save and load together: this rank's number, and how many there are."""

    rank: int = 0
    world: int = 1

    def everywhere(self, do: Callable[[], T]) -> list[T]:
        """The results of `do` on each rank. Raises UsageError on all ranks if it raises OSError on any."""
        mine: tuple[T | None, str | None]
        try:
            mine = do(), None
        except OSError as e:
            mine = None, _line(self.rank, e)
        everyone: list[Any] = [mine]
        if self.world > 1:
            everyone = [None] * self.world
            dist.all_gather_object(everyone, mine)
        for _, error in everyone:
            if error is not None:
                raise UsageError(error)
        return [x for x, _ in everyone]

    def files(self, part: Path) -> list[Path]:
        """The files to be hashed by this rank: its own, and on rank 0 also all that belong to no other rank."""
        of_ranks = [sorted(part.glob(f"__{r}_*")) for r in range(self.world)]
        if self.rank:
            return of_ranks[self.rank]
        others = {p for row in of_ranks[1:] for p in row}
        return [p for p in sorted(part.iterdir()) if p not in others]


ALONE = Ranks()


class Keeper:
    """Writes the checkpoints of a run, and reads the one to resume from; called on all ranks together.

    Raises UsageError for a program whose updated weights are not on the devices of the inputs that they replace.
    """

    def __init__(self, engine: TorchRank, rank: int, saving: Saving) -> None:
        self.engine, self.saving = engine, saving
        self.ranks = Ranks(rank, dist.get_world_size())
        self.previous = saving.resume
        self.resumed = None if saving.resume is None else Path(saving.directory, saving.resume)
        self.inputs = updated_inputs(engine.program)
        if away := [v.name for k, v in self.inputs.items() if k not in engine.updates.values()]:
            raise UsageError(f"the next %{away[0]} is not on the device of the input: it cannot be saved")

    def load(self) -> None:
        """Load this rank's pieces from the checkpoint to resume from. Raises UsageError if it cannot be read."""
        if self.resumed is None:
            return
        fresh: dict[int, torch.Tensor] = {}
        for k in self.inputs:
            if k in self.engine.mine.inputs:
                t = saved_type(self.inputs[k])
                fresh[k] = torch.zeros(t.shape, dtype=torch_dtype(t.dtype), device=self.engine.device)
        read(self.resumed, [self._piece(k, x) for k, x in fresh.items()])
        self.engine.values.update(fresh)

    def save(self, step: int) -> Saved:
        """Write a checkpoint after `step` steps. Raises UsageError on all ranks if it fails on any."""
        values = {k: self.engine.values[k] for k in self.inputs if k in self.engine.values}
        first = {k: x for k, x in values.items() if self.engine.holds_first(saved_type(self.inputs[k]))}
        pieces = [self._piece(k, x) for k, x in first.items()]
        saved = write(self.saving, step, pieces, tensor_table(self.engine.program), self.previous, self.ranks)
        self.previous = name_of(step)
        return saved

    def _piece(self, k: int, x: torch.Tensor) -> Piece:
        v = self.inputs[k]
        t, shape = saved_type(v), whole_shape(v)
        return Piece(v.name, shape, boxes(t, self.engine.coordinate(t), shape), x)


class WholeKeeper:
    """Writes the checkpoints of a run in one process, from whole arrays, without padding, by position."""

    def __init__(self, program: Function, saving: Saving) -> None:
        self.program, self.saving, self.previous = program, saving, saving.resume

    def save(self, step: int, values: Mapping[int, np.ndarray]) -> Saved:
        """Write a checkpoint after `step` steps. Raises UsageError if it fails."""
        pieces = [
            _whole(v.name, whole_shape(v), to_torch(values[k], saved_type(v).dtype, torch.device("cpu")))
            for k, v in updated_inputs(self.program).items()
        ]
        saved = write(self.saving, step, pieces, tensor_table(self.program), self.previous)
        self.previous = name_of(step)
        return saved


def read_wholes(folder: Path, program: Function) -> dict[int, np.ndarray]:
    """The inputs in a checkpoint: whole arrays, without padding, by position. Raises UsageError if unreadable."""
    inputs = updated_inputs(program)
    found = {k: torch.zeros(whole_shape(v), dtype=torch_dtype(saved_type(v).dtype)) for k, v in inputs.items()}
    read(folder, [_whole(inputs[k].name, whole_shape(inputs[k]), x) for k, x in found.items()])
    return {k: to_numpy(x, saved_type(inputs[k]).dtype) for k, x in found.items()}


def _whole(name: str, shape: tuple[int, ...], x: torch.Tensor) -> Piece:
    inside = tuple(slice(0, n) for n in shape)
    return Piece(name, shape, [Box((0,) * len(shape), shape, inside)] if x.numel() else [], x)


def write(
    saving: Saving,
    step: int,
    pieces: list[Piece],
    tensors: Tensors,
    previous: str | None = None,
    ranks: Ranks = ALONE,
) -> Saved:
    """Write a checkpoint from the pieces of all ranks, without replicas; rank 0 commits it.

    Raises UsageError on every rank if it cannot be written; the incomplete checkpoint is removed.
    """
    begin = time.perf_counter()
    directory = Path(saving.directory)
    part = part_of(directory, step)
    try:
        with _named():
            writer = _Writer(part, overwrite=False)
            save({}, storage_writer=writer, planner=_SavePlanner(pieces))
        sums = ranks.everywhere(lambda: {p.name: file_sum(p) for p in ranks.files(part)})
        files = {name: entry for one in sums for name, entry in sorted(one.items())}
        manifest = Manifest(step, saving.about, tensors, files)
        ranks.everywhere(lambda: commit(directory, manifest, previous) if ranks.rank == 0 else None)
    except UsageError as e:
        if ranks.rank == 0:
            remove_incomplete(directory)
        hint = f"{directory / previous} is unchanged" if previous else None
        raise UsageError(f"cannot write checkpoint {directory / name_of(step)}: {e.message}", hint) from None
    return Saved(step, time.perf_counter() - begin, sum(size for size, _ in files.values()))


def read(folder: Path, pieces: list[Piece]) -> None:
    """Fill the pieces from a checkpoint, on all ranks together, leaving padding unchanged. Raises UsageError on all."""
    try:
        with _named():
            reader = FileSystemReader(folder)
            load({}, storage_reader=reader, planner=_LoadPlanner(pieces))
    except UsageError as e:
        raise UsageError(f"cannot read checkpoint {folder}: {e.message}") from None


@contextmanager
def _named() -> Iterator[None]:
    """Context that turns exceptions of torch.distributed.checkpoint into UsageErrors of one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about running without a process group
            yield
    except CheckpointException as e:  # a BaseException; the same on all ranks
        if any(isinstance(error, KeyboardInterrupt) for error, _ in e.failures.values()):
            raise KeyboardInterrupt from None
        rank = min(e.failures)
        raise UsageError(_line(rank, e.failures[rank][0])) from None
    except OSError as e:
        raise UsageError(_line(0, e)) from None


def _line(rank: int, error: BaseException) -> str:
    if isinstance(error, UsageError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"rank {rank}: {error.strerror}{where}"
    lines = str(error).strip().splitlines()
    return f"rank {rank}: {type(error).__name__}: {lines[0] if lines else ''}"


class _Writer(FileSystemWriter):
    """Raises the operating system's error in place of torch's, which hides it."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as e:
            cause: BaseException | None = e
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, cause.filename or str(self.path)) from None


class _SavePlanner(DefaultSavePlanner):
    """Plans a write item for each box of each piece."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.boxes = {(p.name, box.offsets): p.data[box.inside] for p in pieces for box in p.boxes}
        self.items = [_item(p, box) for p in pieces for box in p.boxes]

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self.items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data={})  # with None dcp_to_torch_save of torch 2.6 fails

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        index = write_item.index
        return self.boxes[index.fqn, tuple(index.offset or ())].detach()


def _item(piece: Piece, box: Box) -> WriteItem:
    data = TensorWriteData(_chunk(box), TensorProperties(dtype=piece.data.dtype), torch.Size(piece.shape))
    return WriteItem(MetadataIndex(piece.name, box.offsets), WriteItemType.SHARD, tensor_data=data)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class _LoadPlanner(DefaultLoadPlanner):
    """Fills each box of each piece from the saved boxes that overlap it."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = {p.name: p for p in pieces}

    def create_local_plan(self) -> LoadPlan:
        known = self.metadata.state_dict_metadata if isinstance(self.metadata, Metadata) else {}
        items: list[ReadItem] = []
        for p in self.pieces.values():
            saved = known.get(p.name)
            if not p.boxes:
                continue  # of no elements
            if not isinstance(saved, TensorStorageMetadata):
                raise UsageError(f"it has no tensor {p.name!r}")
            if tuple(saved.size) != p.shape or saved.properties.dtype != p.data.dtype:
                expected, got = (f"{p.data.dtype} {p.shape}", f"{saved.properties.dtype} {tuple(saved.size)}")
                raise UsageError(f"{p.name}: expected {expected}, got {got}")
            items += create_read_items_for_chunk_list(p.name, saved, [_chunk(box) for box in p.boxes])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        piece = self.pieces[read_item.dest_index.fqn]
        target = piece.data[piece.boxes[read_item.dest_index.index or 0].inside]
        for dim, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            target = target.narrow(dim, start, size)
        return target
