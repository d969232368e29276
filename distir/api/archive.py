"""Read .npz files lazily: uncompressed arrays are memory-mapped."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np

from distir.ir.errors import UsageError

_LOCAL_HEADER = 30
"""Size in bytes of a zip member's local header; its last two numbers are the lengths of the two fields after it."""


def archive(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name; mapped ones are read-only. Raises UsageError if it is not an .npz file."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise UsageError(f"{path} is not an .npz file", _HINT)
        with loaded, ZipFile(path) as members, open(path, "rb") as file:
            stored = {m.filename.removesuffix(".npy"): m for m in members.infolist() if m.compress_type == ZIP_STORED}
            arrays = {name: _mapped(file, stored.get(name)) for name in loaded.files}
            arrays = {name: loaded[name] if x is None else x for name, x in arrays.items()}
    except OSError as e:
        raise UsageError(f"cannot read data file {path}: {e.strerror or e}") from None
    except (ValueError, EOFError, BadZipFile):  # numpy's own message suggests loading pickles, which can run any code
        raise UsageError(f"{path} is not an .npz file of numbers, or truncated", _HINT) from None
    if not arrays:
        raise UsageError(f"{path} is not an .npz file", _HINT)
    return arrays


_HINT = "write it with numpy.savez(path, name=array, ...)"


def _mapped(file: BinaryIO, member: ZipInfo | None) -> np.ndarray | None:
    """The memory-mapped array of an uncompressed member. None if it cannot be mapped."""
    if member is None:
        return None
    file.seek(member.header_offset)
    name, extra = struct.unpack("<HH", file.read(_LOCAL_HEADER)[-4:])
    file.seek(name + extra, 1)
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        return None
    shape, fortran, dtype = _HEADERS[version](file)
    if fortran or dtype.hasobject or 0 in shape:
        return None
    return np.memmap(file, dtype, "r", file.tell(), shape)


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
