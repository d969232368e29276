"""Checkpoints as files: what is whole, what is damaged, what is kept and what is swept up."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from distir.ir.errors import UsageError
from distir.runtime import checkpoint
from distir.runtime.checkpoint import (
    Manifest,
    candidates,
    choose,
    commit,
    file_sum,
    name_of,
    part_of,
    remove_incomplete,
)
from distir.runtime.run_directory import lock_directory

TENSORS = {"w": ((2, 3), "f32"), "step": ((), "i64")}


def put(directory: Path, step: int, previous: str | None = None) -> str:
    """Write a checkpoint of two files, as the ranks of a run would."""
    part = part_of(directory, step)
    part.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (part / name).write_bytes(f"{name} {step}".encode() * 100)
    files = {p.name: file_sum(p) for p in part.iterdir()}
    commit(directory, Manifest(step, {"model": "m"}, TENSORS, files), previous)
    return name_of(step)


def chosen(directory: Path) -> tuple[str | None, list[str]]:
    """The name of the checkpoint to go on with, and what was said of others."""
    said: list[str] = []
    found = choose(directory, lambda name, manifest: None, said.append)
    return (found and found[0]), said


def flip(path: Path, at: int = 50) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_manifest_reads_back() -> None:
    m = Manifest(7, {"model": "m", "seed": 0}, TENSORS, {"a": (3, "ff")})
    assert Manifest.parse(m.text()) == m


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    previous = None
    for step in (2, 4, 6, 8):
        previous = put(tmp_path, step, previous)
        assert chosen(tmp_path) == (previous, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000006", "step-00000008"]


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    put(tmp_path, 99_999_999)
    put(tmp_path, 100_000_000, name_of(99_999_999))
    assert candidates(tmp_path) == ["step-100000000", "step-99999999"]


def truncate(folder: Path) -> None:
    os.truncate(folder / "__1_0.distcp", 600)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, r"__1_0\.distcp is damaged: expected 1,400 bytes, got 600$"),
    "flipped": (
        lambda folder: flip(folder / "__0_0.distcp"),
        r"__0_0\.distcp is damaged: expected SHA-256 [0-9a-f]{64}, got [0-9a-f]{64}$",
    ),
    "missing": (
        lambda folder: (folder / "__0_0.distcp").unlink(),
        r"__0_0\.distcp is missing: expected 1,400 bytes$",
    ),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json is missing$"),
    "manifest flipped": (
        lambda folder: flip(folder / "manifest.json", 22),
        r"manifest\.json is damaged: expected SHA-256",
    ),
    "manifest cut": (
        lambda folder: os.truncate(folder / "manifest.json", 40),
        r"manifest\.json is damaged: ",
    ),
    "manifest of another kind": (
        lambda folder: (folder / "manifest.json").write_text("[1]"),
        r"manifest\.json is damaged: not a JSON object$",
    ),
    "newer format": (
        lambda folder: (folder / "manifest.json").write_text(json.dumps({"format": 2})),
        r"manifest\.json is damaged: expected format 1, got 2$",
    ),
    "gone": (lambda folder: os.rename(folder, folder.with_name("x")), r"step-00000004 is missing, but .*latest names"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_named_and_the_one_before_serves(kind: str, tmp_path: Path) -> None:
    before = put(tmp_path, 2)
    put(tmp_path, 4, before)
    damage, words = DAMAGE[kind]
    damage(tmp_path / "step-00000004")
    name, said = chosen(tmp_path)
    assert name == before
    (line,) = said
    assert "\n" not in line
    assert re.search(words, line), line


def test_nothing_undamaged_is_an_error(tmp_path: Path) -> None:
    before = put(tmp_path, 2)
    put(tmp_path, 4, before)
    for name in (2, 4):
        truncate(tmp_path / name_of(name))
    said: list[str] = []
    with pytest.raises(UsageError, match=r"no checkpoint in .* can be used: 2 damaged ones") as e:
        choose(tmp_path, lambda name, manifest: None, said.append)
    assert e.value.exit_code == 2
    assert len(said) == 2


def test_none_at_all_is_none(tmp_path: Path) -> None:
    assert chosen(tmp_path) == (None, [])


def test_without_a_pointer_the_newest_serves_and_it_is_said(tmp_path: Path) -> None:
    before = put(tmp_path, 2)
    put(tmp_path, 4, before)
    for text in (None, "", "step-", "../../etc", "\0\xff"):
        (tmp_path / "latest").unlink(missing_ok=True)
        if text is not None:
            (tmp_path / "latest").write_text(text, encoding="latin-1")
        name, said = chosen(tmp_path)
        assert name == "step-00000004"
        assert said == [f"{tmp_path / 'latest'} is missing or damaged"]


def test_a_newer_one_takes_the_place_of_a_damaged_one_of_its_name(tmp_path: Path) -> None:
    before = put(tmp_path, 2)
    put(tmp_path, 4, before)
    truncate(tmp_path / "step-00000004")
    put(tmp_path, 4, before)
    assert chosen(tmp_path) == ("step-00000004", [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000004"]


CALLS = ("fsync", "replace", "rmtree")


@pytest.mark.parametrize("call", CALLS)
def test_whenever_it_ends_one_whole_checkpoint_is_there(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing is broken off at each of its calls in turn; what is left is swept up, and serves."""
    before = put(tmp_path, 3, put(tmp_path, 2))
    place = checkpoint.shutil if call == "rmtree" else checkpoint.os
    real = getattr(place, call)
    for broken in range(20):
        left = [broken]

        def once(*args: object, left: list[int] = left, **named: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt  # no error that anyone handles: as if it were the end of the process
            return real(*args, **named)

        monkeypatch.setattr(place, call, once)
        try:
            put(tmp_path, 4, before)
        except KeyboardInterrupt:
            pass
        finally:
            monkeypatch.setattr(place, call, real)
        remove_incomplete(tmp_path)
        name, said = chosen(tmp_path)
        assert said == []
        assert name in (before, "step-00000004")
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
        if left[0] >= 0:
            assert broken > 0
            return
    pytest.fail(f"{call} is called more than 20 times")


def test_what_was_never_the_latest_is_swept_up(tmp_path: Path) -> None:
    put(tmp_path, 2)
    put(tmp_path, 4, name_of(2))
    (tmp_path / "latest").write_text("step-00000002\n")
    (tmp_path / ".step-00000006.part").mkdir()
    (tmp_path / ".step-00000006.part" / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / ".latest.part").write_text("step-0")
    (tmp_path / "notes.txt").write_text("mine")
    remove_incomplete(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "notes.txt", "step-00000002"]


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = put(tmp_path, 2)
    put(tmp_path, 4, before)

    def fails(path: Path) -> tuple[int, str]:
        if "step-00000004" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return file_sum(path)

    monkeypatch.setattr(checkpoint, "file_sum", fails)
    name, (line,) = chosen(tmp_path)
    assert name == before
    assert line.endswith("distcp cannot be read: Input/output error")


def test_a_directory_is_held_by_one(tmp_path: Path) -> None:
    first = lock_directory(tmp_path)
    assert first is not None
    assert lock_directory(tmp_path, patience=0.1) is None
    os.close(first)
    second = lock_directory(tmp_path)
    assert second is not None
    os.close(second)
