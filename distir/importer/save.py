"""Writing a model back with new weights: `save_onnx`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from distir.importer.control import inner_initializers
from distir.importer.functions import inlined
from distir.importer.merged import part_merged
from distir.importer.tensor_proto import DTYPES, parse, reader
from distir.ir.errors import UsageError
from distir.ir.files import written

EXTERNAL_FROM = 1_500_000_000
"""Weights of more bytes are stored in a file beside the model: a protobuf file is limited to 2 GB."""
SMALL = 1024
"""Tensors of fewer bytes stay in the model file, so that shapes can be read without the data."""
ALIGN = 4096
"""Alignment of data in a file, in bytes, for memory mapping."""


def save_onnx(source: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], out: str | os.PathLike[str]) -> Path:
    """Write the model at `source` to `out`, initializers replaced by `arrays` of the same name and shape.

    Arrays are cast to the type the model stores. Weights go to `OUT.data` beside the model if the source keeps them
    in another file, or if they are large. Files are written atomically; `out` may be `source`. Returns the path
    written. Raises UsageError for a name that is no initializer, another shape, or a path that cannot be written;
    ModelError for a broken source.
    """
    source, out = Path(source), Path(out)
    model = onnx.ModelProto()
    parse(model, source, "ONNX model")
    tensors = _initializers(model, source)
    if model.functions and not arrays.keys() <= tensors.keys():
        model = inlined(model, source)
        tensors = _initializers(model, source)
    for name, array in arrays.items():
        if name not in tensors:
            raise UsageError(f"{source} has no initializer {name!r}")
        if np.shape(array) != tuple(tensors[name].dims):
            raise UsageError(f"{name}: expected shape {tuple(tensors[name].dims)}, got {np.shape(array)}")
    size = sum(_bytes(t) for t in tensors.values())
    outside = any(t.data_location == TensorProto.EXTERNAL for t in tensors.values())
    with written(out) as new:
        _write(model, tensors, source, arrays, new, outside or size > EXTERNAL_FROM)
    return out


def _initializers(model: onnx.ModelProto, source: Path) -> dict[str, TensorProto]:
    """The model's initializers by the names that the import gives them; merged ones are parted, in place."""
    part_merged(model.graph, source)
    tensors = {t.name: t for t in model.graph.initializer}
    return tensors | {name: t for name, _, t in inner_initializers(model.graph)}


def _bytes(tensor: TensorProto) -> int:
    size = DTYPES[tensor.data_type].size if tensor.data_type in DTYPES else 8
    return int(np.prod(tensor.dims, dtype=np.int64)) * size


def _write(
    model: onnx.ModelProto,
    tensors: Mapping[str, onnx.TensorProto],
    source: Path,
    arrays: Mapping[str, np.ndarray],
    out: Path,
    external: bool,
) -> None:
    """Write the model and, if it has any, its external data beside it. `tensors`: its initializers, by name."""
    data = out.with_name(f"{out.name}.data")
    with open(data, "wb") as file:
        for name, tensor in tensors.items():
            keeps = tensor.data_location != TensorProto.EXTERNAL
            if name not in arrays and keeps and (not external or _bytes(tensor) < SMALL):
                continue
            stored = reader(tensor, source)
            dtype = DTYPES[tensor.data_type].numpy
            new = arrays.get(name)
            array = stored() if new is None else np.asarray(new).astype(dtype, copy=False)
            if external and _bytes(tensor) >= SMALL:
                _store(tensor, array, file, data.name)
            else:
                tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))
        used = file.tell() > 0
    if not used:
        data.unlink()
    out.write_bytes(model.SerializeToString())


def _store(tensor: TensorProto, array: np.ndarray, file: IO[bytes], location: str) -> None:
    """Append the array to the data file and refer to it."""
    file.write(b"\0" * (-file.tell() % ALIGN))
    entries = {"location": location, "offset": file.tell(), "length": array.nbytes}
    np.ascontiguousarray(array).tofile(file)
    code, dims, name = tensor.data_type, list(tensor.dims), tensor.name
    tensor.Clear()
    tensor.data_type, tensor.name, tensor.data_location = code, name, TensorProto.EXTERNAL
    tensor.dims.extend(dims)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
