"""Exchange of arrays between processes: whole arrays shipped by file, and whole arrays assembled from ranks' pieces.

Loads no torch: the process that starts the ranks need not wait for it.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distir.executor.reference.numpy_namespace import NUMPY
from distir.executor.reference.sequential import unfit
from distir.ir.device import Device, Mesh
from distir.ir.function import Function, Value
from distir.ir.type import REPLICATE, Tensor, Type
from distir.transforms.differentiation.gradients import gradients
from distir.transforms.rank.project import device_at

Coord = tuple[int, ...]
Whole = dict[int, np.ndarray]
"""Whole arrays by position."""
Pieces = Mapping[int, tuple[Coord, Any]]
"""By position: the rank's coordinate on the value's mesh, and its piece (an array or a Shipped)."""

_INLINE_BYTES = 1 << 12
"""Smaller arrays travel in the message itself."""


class Shipped(NamedTuple):
    """A reference to an array for other processes on this host: a region of a file, or `value`, broadcast."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: str | None
    offset: int
    value: np.ndarray | None

    def array(self) -> np.ndarray:
        """The array, read-only; a file is memory-mapped."""
        if self.path is None:
            return np.broadcast_to(np.asarray(self.value), self.shape)
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


def ship(x: Any, file: Path) -> Shipped:
    """Make an array available to other processes: by reference if it is mapped from a file, else written to `file`."""
    x = np.asarray(x) if not isinstance(x, np.ndarray) else x
    if isinstance(x, np.memmap) and isinstance(x.base, mmap.mmap) and x.filename and x.flags.c_contiguous:
        return Shipped(x.shape, x.dtype, str(x.filename), x.offset, None)
    if x.nbytes <= _INLINE_BYTES:
        return Shipped(x.shape, x.dtype, None, 0, np.array(x))
    if not any(x.strides):
        return Shipped(x.shape, x.dtype, None, 0, np.array(x[(0,) * x.ndim]))
    np.ascontiguousarray(x).tofile(file)
    return Shipped(x.shape, x.dtype, str(file), 0, None)


def is_primary(t: Tensor, coord: Sequence[int]) -> bool:
    """Whether the device at `coord` is the first of those that hold the same piece of `t`."""
    return all(c == 0 for c, p in zip(coord, t.placements, strict=True) if p is REPLICATE)


def holder(t: Tensor, index: Sequence[int]) -> Device | None:
    """The first device that holds the element at global `index`, for messages about wrong values."""
    if not isinstance(t.device, Mesh):
        return t.device
    coord = [0] * len(t.placements)
    for dim, subdims in t.subdims.items():
        for outer, n, axis in subdims:
            if axis != t.device.time:
                coord[axis] = t.placements[axis].device(index[dim] // (t.global_shape[dim] // (outer * n)) % n, n)
    return device_at(t.device, coord)


def join_pieces(pieces: Mapping[Coord, Any], t: Tensor, xp: Any) -> Any:
    """The whole array of a value of type `t` from its pieces by coordinate, one of each set of replicas; `xp` is the
    array namespace.
    """
    for i in reversed(range(len(t.placements))):
        if t.placements[i] is REPLICATE:
            continue
        rows: dict[Coord, list[Any]] = {}
        for coord in sorted(pieces):
            rows.setdefault((*coord[:i], 0, *coord[i + 1 :]), []).append(pieces[coord])
        p = t.local(i)
        pieces = {c: p.join(row, xp) if len(row) > 1 else row[0] for c, row in rows.items()}
        t = t.placed(t.mesh.axes[i], REPLICATE, t.piece)
    return next(iter(pieces.values()))


def whole_array(pieces: Mapping[Coord, np.ndarray], t: Type, source: tuple[int, ...] | None = None) -> np.ndarray:
    """A copy of the whole array of a value of type `t` from its pieces, one of each set of replicas.

    `source` is its shape without padding, which is removed.
    """
    if isinstance(t, Tensor) and isinstance(t.device, Mesh):
        whole = join_pieces(pieces, t, NUMPY)
    else:
        whole = next(iter(pieces.values()))
    return np.array(unfit(whole, source))


def gathered(program: Function, outputs: Sequence[Pieces], inputs: Sequence[Pieces]) -> tuple[Whole, Whole]:
    """The whole arrays of outputs and of inputs, from the pieces that ranks reported."""
    sources = {k: v.role.source for k, v in enumerate(program.inputs) if v.role}
    of_outputs = {k: program.sources.get(v) for k, v in enumerate(program.outputs)}
    types_of_outputs = {k: v.type for k, v in enumerate(program.outputs)}
    types_of_inputs = {k: v.type for k, v in enumerate(program.inputs)}
    return _wholes(types_of_outputs, outputs, of_outputs), _wholes(types_of_inputs, inputs, sources)


def gathered_gradients(program: Function, reports: Sequence[Pieces]) -> Whole:
    """The whole gradients by position of the weight, from the pieces that ranks reported."""
    types = {g.weight: g.type for g in gradients(program).values()}
    sources = {k: v.role.source for k, v in enumerate(program.inputs) if v.role}
    return _wholes(types, reports, sources)


def wholes(program: Function | None, outputs: Sequence[Pieces]) -> Whole:
    """The whole arrays of a program's outputs, from the pieces that ranks reported; {} without a program."""
    return {} if program is None else gathered(program, outputs, [])[0]


def _wholes(
    types: Mapping[int, Type], reports: Sequence[Pieces], sources: Mapping[int, tuple[int, ...] | None]
) -> Whole:
    pieces: dict[int, dict[Coord, np.ndarray]] = {}
    for report in reports:
        for k, (coord, x) in report.items():
            pieces.setdefault(k, {})[coord] = x if isinstance(x, np.ndarray) else x.array()
    return {k: whole_array(pieces[k], types[k], sources.get(k)) for k in sorted(pieces)}


def digest(program: Function) -> bytes:
    """SHA-256 of a program (32 bytes): equal programs have equal digests in all processes."""
    return _Digest().function(program)


class _Digest:
    """Digests of functions and texts of meshes and types, each computed once."""

    def __init__(self) -> None:
        self.functions: dict[Function, bytes] = {}
        self.texts: dict[Any, str] = {}

    def function(self, f: Function) -> bytes:
        if f not in self.functions:
            number: dict[Value, int] = {}
            lines = [f.name]
            for v in f.inputs:
                number[v] = len(number)
                lines.append(f"{v.name} {v.role} {self.type(v.type)}")
            for op in f.ops:
                for v in op.outputs:
                    number[v] = len(number)
                attrs = ",".join(f"{k}={self.text(x)}" for k, x in sorted(op.attributes.items()))
                types = ",".join([self.type(v.type) for v in op.outputs])
                lines.append(f"{op.spec.name} {[number[v] for v in op.inputs]} {attrs} {types}")
            lines.append(str([number[v] for v in f.outputs]))
            lines.append(str([(number[a], number[b]) for a, b in f.updates.items()]))
            self.functions[f] = hashlib.sha256("\n".join(lines).encode()).digest()
        return self.functions[f]

    def type(self, t: Type) -> str:
        text = self.texts.get(t)
        if text is None:
            if isinstance(t, Tensor):
                text = f"{t.dtype}{t.shape}{t.placements}{t.piece}{self.text(t.device)}"
            else:
                text = f"({','.join([self.type(x) for x in t.types])})"
            self.texts[t] = text
        return text

    def text(self, x: Any) -> str:
        if isinstance(x, Function):
            return self.function(x).hex()
        if isinstance(x, tuple):
            return f"({','.join([self.text(y) for y in x])})"
        if isinstance(x, Mesh):
            if x not in self.texts:
                self.texts[x] = hashlib.sha256(f"{x}{x.devices}".encode()).hexdigest()
            return self.texts[x]
        return repr(x)
