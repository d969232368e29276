"""Files are written whole or not at all, and nothing but files is replaced."""

from __future__ import annotations

import os

import pytest

from distir.ir.errors import UsageError
from distir.ir.files import written


def test_files_appear_whole(tmp_path):
    target = tmp_path / "a.txt"
    with written(target) as new:
        new.write_text("all")
        new.with_name("a.txt.data").write_text("more")
        assert not target.exists()
    assert target.read_text() == "all"
    assert sorted(p.name for p in target.parent.iterdir()) == ["a.txt", "a.txt.data"]


def test_an_error_leaves_what_was_there(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("old")

    def fail() -> None:
        with written(target) as new:
            new.write_text("ne")
            raise ValueError("half way")

    with pytest.raises(ValueError, match="half"):
        fail()
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    with written(tmp_path / "link.txt") as new:
        new.write_text("new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(UsageError, match="no regular file"), written(path):
            pass
    assert (tmp_path / "fifo").is_fifo()


def test_no_file_is_replaced_where_one_cannot_be(tmp_path):
    (tmp_path / "a.2").mkdir()
    (tmp_path / "a.1").write_text("old")

    def write() -> None:
        with written(tmp_path / "a.all") as new:
            for name in ("a.1", "a.2", "a.all"):
                (new.parent / name).write_text("new")

    with pytest.raises(UsageError, match=r"cannot write .*a\.2: it is there"):
        write()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.1", "a.2"]
    assert (tmp_path / "a.1").read_text() == "old"


def test_a_folder_that_is_not_there(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.txt", tmp_path / "missing" / "a.txt"):
        with pytest.raises(UsageError, match="cannot write"), written(path):
            pass
