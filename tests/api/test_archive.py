""".npz files: arrays that are not compressed are mapped, and all are what was saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distir.api.archive import archive
from distir.ir.errors import UsageError
from distir.runtime.pieces import Shipped, ship

ARRAYS = {
    "a": np.arange(5000, dtype=np.int32).reshape(50, 100),
    "long name, and a/slash": np.linspace(0, 1, 7),
    "f": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "none": np.zeros((0, 3)),
    "one": np.array(3.5),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_was_saved_is_read(tmp_path: Path, save):
    path = tmp_path / "data.npz"
    save(path, **ARRAYS)
    found = archive(path)
    assert found.keys() == ARRAYS.keys()
    for name, x in ARRAYS.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x)
    mapped = isinstance(found["a"], np.memmap)
    assert mapped == (save is np.savez)
    shipped = ship(found["a"], tmp_path / "copy")
    assert isinstance(shipped, Shipped)
    assert (shipped.path == str(path)) == mapped
    np.testing.assert_array_equal(shipped.array(), ARRAYS["a"])


def test_what_is_none(tmp_path: Path):
    (tmp_path / "text.npz").write_text("text")
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "empty.npz")
    np.savez(tmp_path / "object.npz", x=np.array([{}]))
    np.savez(tmp_path / "cut.npz", x=np.zeros(100))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-40])
    for name in ("text.npz", "array.npy", "empty.npz", "object.npz", "cut.npz"):
        with pytest.raises(UsageError, match=f"{name} is not an .npz file") as raised:
            archive(tmp_path / name)
        assert "pickle" not in f"{raised.value.message} {raised.value.hint}"  # as numpy advises
    with pytest.raises(UsageError, match="cannot read data file"):
        archive(tmp_path / "missing.npz")
