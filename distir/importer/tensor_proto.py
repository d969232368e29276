"""Tensors in ONNX files: element types, checks of external data, and arrays that are read lazily."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from distir.ir.errors import ModelError, UsageError
from distir.ir.function import Value
from distir.ir.type import (
    BFloat16,
    Bool,
    DType,
    Float16,
    Float32,
    Float64,
    Int8,
    Int16,
    Int32,
    Int64,
    UInt8,
)

DTYPES: dict[int, DType] = {
    TensorProto.FLOAT: Float32,
    TensorProto.DOUBLE: Float64,
    TensorProto.FLOAT16: Float16,
    TensorProto.BFLOAT16: BFloat16,
    TensorProto.BOOL: Bool,
    TensorProto.UINT8: UInt8,
    TensorProto.INT8: Int8,
    TensorProto.INT16: Int16,
    TensorProto.INT32: Int32,
    TensorProto.INT64: Int64,
}
"""ONNX element type -> DType."""

_BY_NUMPY = {d.numpy: d for d in DTYPES.values()}

Read = Callable[[], np.ndarray]


def dtype_of(code: int, where: str) -> DType:
    """The DType of an ONNX element type. Raises ModelError, beginning with `where`, if there is none."""
    dtype = DTYPES.get(code)
    if dtype is None:
        names = TensorProto.DataType
        name = names.Name(code) if code in names.values() else f"number {code}"
        raise ModelError(
            f"{where}: element type {name} is not supported",
            f"supported: {', '.join(names.Name(c) for c in DTYPES)}",
        )
    return dtype


def dtype_of_array(array: np.ndarray, where: str) -> DType:
    """The DType of a numpy array. Raises ModelError, beginning with `where`, if there is none."""
    dtype = _BY_NUMPY.get(array.dtype)
    if dtype is None:
        raise ModelError(f"{where}: element type {array.dtype} is not supported")
    return dtype


class Arrays(Mapping[Value, np.ndarray]):
    """The arrays of a function's inputs, each read on first use; those in external data are memory-mapped.

    Arrays may be read-only views of the file: copy before writing. Without `keep` they are read at each use.
    """

    def __init__(self, reads: Mapping[Value, Read], keep: bool = True) -> None:
        self._reads = dict(reads)
        self._keep = keep
        self._arrays: dict[Value, np.ndarray] = {}

    def __getitem__(self, value: Value) -> np.ndarray:
        if not self._keep:
            return self._reads[value]()
        if value not in self._arrays:
            self._arrays[value] = self._reads[value]()
        return self._arrays[value]

    def __contains__(self, value: object) -> bool:
        return value in self._reads

    def __iter__(self) -> Iterator[Value]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)

    def __repr__(self) -> str:
        return f"<arrays of {', '.join('%' + v.name for v in self._reads)}>"


def reader(tensor: TensorProto, path: Path) -> Read:
    """A function that reads `tensor` of the model at `path`, which is checked now.

    Raises ModelError, naming file and tensor, for an unknown element type, a size that does not fit its shape, and
    external data that is missing, too short, or outside the model's folder.
    """
    where = f"{path}: tensor {tensor.name!r}"
    dtype = dtype_of(tensor.data_type, where)
    shape = tuple(tensor.dims)
    if min(shape, default=0) < 0 or tensor.HasField("segment"):
        raise ModelError(f"{where}: shape {shape} is not valid")
    size = math.prod(shape) * dtype.size
    if tensor.data_location == TensorProto.EXTERNAL:
        file, offset = _external(tensor, path, size, where)
        return lambda: _mapped(file, offset, dtype, shape, where)
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != size:
            raise ModelError(f"{where}: {dtype}{list(shape)} needs {size} bytes, got {len(tensor.raw_data)}")
    else:
        _check_typed_data(tensor, math.prod(shape), where)
    return lambda: _decoded(tensor)


def parse_tensor_from_file(path: str | os.PathLike[str]) -> np.ndarray:
    """The array in a file of one serialized TensorProto (`.pb`, the format of ONNX test data).

    Raises ModelError if the file is not one.
    """
    file = Path(path)
    tensor = TensorProto()
    parse(tensor, file, "TensorProto")
    if not tensor.data_type:
        raise ModelError(f"{file}: not a serialized TensorProto")
    return reader(tensor, file)()


def parse(message: Any, path: Path, what: str) -> None:
    """Read a protobuf message. Raises UsageError if there is no such file, ModelError if it is not that message."""
    from google.protobuf.message import DecodeError

    if path.exists() and not path.is_file():
        raise ModelError(f"cannot read {path}: it is no regular file")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except OSError as e:
        raise ModelError(f"cannot read {path}: {e.strerror or e}") from None
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise ModelError(f"{path}: not a serialized {what}, or cut off: {len(data)} bytes do not parse") from None


def _check_typed_data(tensor: TensorProto, elements: int, where: str) -> None:
    field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    got = len(getattr(tensor, field))
    if got != elements:
        raise ModelError(f"{where}: shape {tuple(tensor.dims)} needs {elements} elements, got {got}")


def _decoded(tensor: TensorProto) -> np.ndarray:
    array = numpy_helper.to_array(tensor)
    array.flags.writeable = False
    return array


def _external(tensor: TensorProto, path: Path, size: int, where: str) -> tuple[Path, int]:
    """The file and offset of external data, checked without reading it."""
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if not location or os.path.isabs(location) or "\\" in location or ".." in Path(location).parts:
        raise ModelError(f"{where}: external data at {location!r} is not inside the model's folder")
    file = path.parent / location
    if not file.is_file():
        raise ModelError(f"{where}: its external data {file} does not exist", "keep it beside the model")
    if not file.resolve().is_relative_to(path.parent.resolve()) and not path.is_symlink():
        raise ModelError(f"{where}: external data at {location!r} is not inside the model's folder")
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", size))
    except ValueError:
        raise ModelError(f"{where}: offset or length of its external data is not a number") from None
    if length != size:
        raise ModelError(f"{where}: its shape and type need {size} bytes, external data has {length}")
    have = file.stat().st_size
    if offset < 0 or offset + length > have:
        raise ModelError(f"{where}: needs bytes {offset} to {offset + length} of {file}, which has {have}: cut off?")
    return file, offset


def _mapped(file: Path, offset: int, dtype: DType, shape: tuple[int, ...], where: str) -> np.ndarray:
    if 0 in shape:
        return np.zeros(shape, dtype.numpy)
    try:
        return np.memmap(file, dtype.numpy, "r", offset, shape)
    except (OSError, ValueError) as e:
        raise ModelError(f"{where}: cannot map its external data {file}: {e}") from None
