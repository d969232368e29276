"""What is written under one placement and read under another: the same numbers, whatever the pieces."""

from __future__ import annotations

import errno
import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from distir.backends.storage import dcp
from distir.backends.storage.dcp import Piece, read, write
from distir.backends.tensors.torch_namespace import torch_dtype
from distir.ir.device import Device, Mesh
from distir.ir.errors import UsageError
from distir.ir.placement import Placement
from distir.ir.type import REPLICATE, BFloat16, Bool, DType, Float32, Float64, Int64, Shard, Tensor
from distir.runtime import checkpoint
from distir.runtime.boxes import boxes
from distir.runtime.checkpoint import Saving, choose, name_of
from distir.runtime.pieces import is_primary

FOUR = Mesh([Device("cpu", k) for k in range(4)], {"dp": 2, "tp": 2}, "stage0")
ROWS: list[tuple[Placement, Placement]] = [
    (REPLICATE, REPLICATE),
    (REPLICATE, Shard(0, 3)),  # a fused projection, by heads
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0, 6)),
    (Shard(1, 2), Shard(0)),
]
PLACED = [Tensor(Float32, (12, 8)), *[Tensor.whole(Float32, (12, 8), FOUR, row) for row in ROWS]]
SOURCE = (11, 8)
"""The last row is padding."""


def coords(t: Tensor) -> list[tuple[int, ...]]:
    return list(t.mesh.coords) if isinstance(t.device, Mesh) else [()]


def pieces_of(whole: np.ndarray, t: Tensor, name: str = "w", source: tuple[int, ...] = SOURCE) -> list[Piece]:
    """What all ranks together write."""
    return [
        Piece(name, source, boxes(t, c, source), torch.from_numpy(np.array(t.cut(whole, c))))
        for c in coords(t)
        if is_primary(t, c)
    ]


def saved(directory: Path, pieces: list[Piece], step: int = 1, previous: str | None = None) -> Path:
    write(Saving(str(directory), None, {}), step, pieces, {}, previous)
    return directory / name_of(step)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(PLACED, PLACED)), ids=str)
def test_any_placement_reads_what_any_other_wrote(before: Tensor, after: Tensor, tmp_path: Path) -> None:
    whole = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
    whole[11] = 0
    folder = saved(tmp_path, pieces_of(whole, before))
    for c in coords(after):
        x = torch.zeros(after.shape)
        read(folder, [Piece("w", SOURCE, boxes(after, c, SOURCE), x)])
        np.testing.assert_array_equal(x.numpy(), after.cut(whole, c))


@pytest.mark.parametrize("dtype", [Float32, Float64, BFloat16, Int64, Bool])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (4, 3)])
def test_every_type_and_shape(dtype: DType, shape: tuple[int, ...], tmp_path: Path) -> None:
    t = Tensor(dtype, shape)
    x = (torch.arange(12).reshape(4, 3) % 2).to(torch_dtype(dtype))
    x = x.reshape(-1)[: int(np.prod(shape))].reshape(shape)
    folder = saved(
        tmp_path, [Piece("x", shape, boxes(t, ()), x), Piece("w", (1,), boxes(PLACED[0], (), (1, 1)), x)][:1]
    )
    y = torch.zeros(shape, dtype=x.dtype)
    read(folder, [Piece("x", shape, boxes(t, ()), y)])
    assert torch.equal(x, y)


def test_strides_do_not_matter(tmp_path: Path) -> None:
    x = torch.arange(12.0).reshape(3, 4).t()
    t = Tensor(Float32, (4, 3))
    folder = saved(tmp_path, [Piece("x", (4, 3), boxes(t, ()), x)])
    y = torch.zeros(3, 4).t()
    read(folder, [Piece("x", (4, 3), boxes(t, ()), y)])
    assert torch.equal(x, y)


def test_it_is_a_checkpoint_of_torch(tmp_path: Path) -> None:
    """Its own tools read what is written."""
    whole = np.arange(96, dtype=np.float32).reshape(12, 8)
    folder = saved(tmp_path, pieces_of(whole, PLACED[2]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, tmp_path / "all.pt")
    np.testing.assert_array_equal(torch.load(tmp_path / "all.pt")["w"].numpy(), whole[:11])


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "words"),
    [
        ("v", SOURCE, torch.float32, "it has no tensor 'v'"),
        ("w", (11, 4), torch.float32, r"w: expected torch.float32 \(11, 4\), got torch.float32 \(11, 8\)"),
        ("w", SOURCE, torch.float64, r"w: expected torch.float64 \(11, 8\), got torch.float32 \(11, 8\)"),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, words: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, pieces_of(np.zeros((12, 8), np.float32), PLACED[0]))
    t = Tensor(Float32, shape)
    with pytest.raises(UsageError, match=f"cannot read checkpoint {folder}: {words}"):
        read(folder, [Piece(name, shape, boxes(t, ()), torch.zeros(shape, dtype=dtype))])


def full(*_: object, **named: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["data", "metadata", "manifest"])
def test_a_full_disk_is_named_and_the_checkpoint_before_stays(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = np.ones((12, 8), np.float32)
    saved(tmp_path, pieces_of(whole, PLACED[2]))
    if where == "data":
        monkeypatch.setattr(torch, "save", full)
    elif where == "metadata":
        monkeypatch.setattr(dcp.FileSystemWriter, "finish", full)
    else:
        monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(UsageError, match=r"cannot write checkpoint .*step-00000002: rank 0: No space left") as e:
        saved(tmp_path, pieces_of(whole, PLACED[2]), 2, name_of(1))
    assert "\n" not in e.value.message
    assert e.value.hint == f"{tmp_path / name_of(1)} is unchanged"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", name_of(1)]
    found = choose(tmp_path, lambda name, manifest: None, pytest.fail)
    assert found is not None
    assert found[0] == name_of(1)


def test_an_error_of_its_own_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path, pieces_of(np.zeros((12, 8), np.float32), PLACED[0]))
    (folder / "__0_0.distcp").unlink()  # after it was found to be whole
    with pytest.raises(UsageError, match=r"cannot read checkpoint .*: rank 0: No such file.*__0_0\.distcp") as e:
        read(folder, pieces_of(np.zeros((12, 8), np.float32), PLACED[0]))
    assert "\n" not in e.value.message
    monkeypatch.setattr(dcp.FileSystemReader, "read_data", lambda *_: 1 / 0)
    with pytest.raises(UsageError, match=r"rank 0: ZeroDivisionError: division by zero"):
        read(folder, pieces_of(np.zeros((12, 8), np.float32), PLACED[0]))


def test_ctrl_c_is_no_failure_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp.FileSystemWriter, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, pieces_of(np.zeros((12, 8), np.float32), PLACED[0]))
