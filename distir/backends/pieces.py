"""Pieces of arrays on their way between processes: whole arrays by file, and wholes from the pieces ranks
report.

Loads no torch: the process that starts the ranks need not wait for it.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distir.executor.collectives import combine, join_digit, local_outer
from distir.executor.sequential import unfit
from distir.ir.device import Device, Mesh
from distir.ir.errors import UsageError
from distir.ir.function import Function, Value
from distir.ir.type import REPLICATE, Partial, Replicate, Shard, Tensor, Type
from distir.transforms.gradients import gradients
from distir.transforms.project import device_at

Coord = tuple[int, ...]
Arrays = Mapping[Any, Any] | Sequence[Any]
"""An array for each input: in order, or by input Value or position."""
Whole = dict[int, np.ndarray]
"""Whole arrays by position."""
Pieces = Mapping[int, tuple[Coord, Any]]
"""By position: where a rank is on the value's mesh, and the array (or how to have it) that it holds."""

_INLINE_BYTES = 1 << 12
"""Smaller arrays travel in the message itself."""


def by_position(program: Function, arrays: Arrays) -> dict[int, Any]:
    """The arrays by position among the program's inputs. Raises UsageError for a sequence of another length."""
    if not isinstance(arrays, Mapping):
        if len(arrays) != len(program.inputs):
            raise UsageError(f"{program.name} has {len(program.inputs)} inputs, got {len(arrays)} arrays")
        return {k: x for k, x in enumerate(arrays) if x is not None}
    given: dict[int, Any] = {}
    for k, v in enumerate(program.inputs):
        if v in arrays:
            given[k] = arrays[v]
        elif k in arrays:
            given[k] = arrays[k]
    return given


class Shipped(NamedTuple):
    """An array that another process on this host can have: a region of a file, or, without one, `value`
    broadcast.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: str | None
    offset: int
    value: np.ndarray | None

    def array(self) -> np.ndarray:
        """The array, read-only; of a file only what is touched is read."""
        if self.path is None:
            return np.broadcast_to(np.asarray(self.value), self.shape)
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


def ship(x: Any, file: Path) -> Shipped:
    """Make an array ready for other processes: by reference if it is mapped from a file, else written to
    `file`.
    """
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
    """Whether, of the devices that hold the same piece of `t`, the one at `coord` is the first."""
    return all(c == 0 for c, p in zip(coord, t.placements, strict=True) if isinstance(p, Replicate))


def holder(t: Tensor, index: Sequence[int]) -> Device | None:
    """The first device that holds the element of the whole at `index`; to say on which rank a value is wrong."""
    if not isinstance(t.device, Mesh):
        return t.device
    coord = [0] * len(t.placements)
    for dim, digits in t.digits.items():
        for outer, n, axis in digits:
            if axis != t.device.time:
                coord[axis] = index[dim] // (t.global_shape[dim] // (outer * n)) % n
    return device_at(t.device, coord)


def join_pieces(
    pieces: Mapping[Coord, Any],
    t: Tensor,
    merge: Callable[[Sequence[Any], int, int], Any],
    combine: Callable[[Sequence[Any], str], Any],
) -> Any:
    """The whole of a value of type `t` from one of each set of copies of its pieces, by coordinate.

    `merge(parts, dim, outer)` undoes a split, `combine(parts, kind)` takes the sum, maximum or mean, in order.
    """
    for i in reversed(range(len(t.placements))):
        p = t.placements[i]
        if isinstance(p, Replicate):
            continue
        rows: dict[Coord, list[Any]] = {}
        for coord in sorted(pieces):
            rows.setdefault((*coord[:i], 0, *coord[i + 1 :]), []).append(pieces[coord])
        if isinstance(p, Shard):
            outer = local_outer(t, i)
            pieces = {c: merge(row, p.dim, outer) if len(row) > 1 else row[0] for c, row in rows.items()}
        elif isinstance(p, Partial):
            pieces = {c: combine(row, p.kind) for c, row in rows.items()}
        t = t.placed(t.mesh.axes[i], REPLICATE, t.piece)
    return next(iter(pieces.values()))


def whole_array(pieces: Mapping[Coord, np.ndarray], t: Type, source: tuple[int, ...] | None = None) -> np.ndarray:
    """The whole array, a copy, of a value of type `t` from one of each set of copies of its pieces.

    `source` is its shape without padding, which is cut off.
    """
    if isinstance(t, Tensor) and isinstance(t.device, Mesh):
        whole = join_pieces(pieces, t, join_digit, combine)
    else:
        whole = next(iter(pieces.values()))
    return np.array(unfit(whole, source))


def gathered(program: Function, outputs: Sequence[Pieces], inputs: Sequence[Pieces]) -> tuple[Whole, Whole]:
    """The whole arrays of outputs, and of inputs, from what each rank reported of its pieces."""
    sources = {k: v.role.source for k, v in enumerate(program.inputs) if v.role}
    of_outputs = {k: program.sources.get(v) for k, v in enumerate(program.outputs)}
    types_of_outputs = {k: v.type for k, v in enumerate(program.outputs)}
    types_of_inputs = {k: v.type for k, v in enumerate(program.inputs)}
    return _wholes(types_of_outputs, outputs, of_outputs), _wholes(types_of_inputs, inputs, sources)


def gathered_gradients(program: Function, reports: Sequence[Pieces]) -> Whole:
    """The whole gradients, by the position of the weight, from what each rank reported of its pieces."""
    types = {g.weight: g.type for g in gradients(program).values()}
    sources = {k: v.role.source for k, v in enumerate(program.inputs) if v.role}
    return _wholes(types, reports, sources)


def wholes(program: Function | None, outputs: Sequence[Pieces]) -> Whole:
    """The whole arrays of a program's outputs, from the pieces of each rank; of no program none."""
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
    """32 bytes that two processes agree on if, and as good as only if, their programs are the same."""
    return _Digest().function(program)


class _Digest:
    """What stands for functions, meshes and types in the digest, each worked out once."""

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
