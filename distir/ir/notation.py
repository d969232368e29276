"""Text of names, types and meshes: each function that writes beside the one that reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from distir.ir.device import Device, Mesh
from distir.ir.errors import ModelError
from distir.ir.placement import Halo, reductions
from distir.ir.type import NOW, REPLICATE, DType, Partial, Piece, Placement, Shard, Tensor, Tuple, Type

PLAIN = r"[^\W\d][\w.\-/]*"
"""Names of meshes, axes, kinds of devices, functions and attributes that need no quotes."""
PLAIN_VALUE = r"[\w./](?:[\w.\-/:]*[\w.\-/])?"
"""Names of values that need no quotes: they stand after a %, and may be those of an ONNX file."""
QUOTED = r'"(?:[^"\\]|\\.)*"'
NAME = rf"(?:{PLAIN}|{QUOTED})"
LABEL = rf"{NAME}(?:\#\d+)?"
"""A mesh or a function: `name#1` is the second of that name."""
WHERE = rf"{NAME}(?::-?\d+|\#\d+)?"
"""A device or a mesh."""
_HALO = r"(?:~\d+:\d+(?::[^\s,}]+)?)?"
_AXIS = rf"(?:\d+:)?{NAME}(?:\+\d+)?{_HALO}"
_DIM = rf"\d+(?:\{{{_AXIS}(?:,{_AXIS})*\}})?"
_MICROBATCH = r"(?:t(?:[+-]\d+)?|-?\d+)"
_DIMS = rf"(?:{_DIM}(?:,\ {_DIM})*)?"
TENSOR = (
    rf"\w+\[{_DIMS}\](?:\+(?:\w+:)?{NAME})*"
    rf"(?:\#{_MICROBATCH}(?::{_MICROBATCH})?)?(?:\ @\ {WHERE})?"
)
_RUN = rf"({NAME}):(-?\d+)(?:\.\.(-?\d+)(?::(-?[1-9]\d*))?)?((?:\ x\d+\ by\ -?\d+)*)"
MESH = rf"mesh\ ({LABEL})\(((?:{NAME}=\d+(?:,\ )?)*)\)\ =\ ((?:{_RUN}(?:,\ )?)*)"

_is_plain = re.compile(PLAIN).fullmatch
_is_plain_value = re.compile(PLAIN_VALUE).fullmatch
_is_tensor = re.compile(rf"(\w+)\[({_DIMS})\]((?:\+(?:\w+:)?{NAME})*)(?:\#([^\s@]+))?(?:\ @\ ({WHERE}))?").fullmatch
_is_device = re.compile(rf"({NAME}):(-?\d+)").fullmatch
_is_mesh = re.compile(rf"\s*{MESH}\s*").fullmatch
_dims = re.compile(rf"(\d+)(?:\{{({_AXIS}(?:,{_AXIS})*)\}})?").findall
_subdims = re.compile(rf"(?:(\d+):)?({NAME})(?:\+(\d+))?({_HALO})").findall
_partials = re.compile(rf"\+(?:(\w+):)?({NAME})").findall
_sizes = re.compile(rf"({NAME})=(\d+)").findall
_runs = re.compile(_RUN).findall
_repeats = re.compile(r"x(\d+) by (-?\d+)").findall
_escapes = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U(000[0-9a-f]{5}|0010[0-9a-f]{4})|(.))").sub


def fail(expected: str, got: str) -> NoReturn:
    """Raise ModelError for malformed text; `parse` adds the line."""
    raise ModelError(f"expected {expected}, got {got or 'the end of the line'}")


# names


def quote(text: str) -> str:
    """The text in double quotes, on one line."""
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def printable(text: str) -> str:
    """The text on one line: what does not print is escaped as Python does."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain(name: str) -> str:
    """The name of a mesh, an axis, a function or an attribute, quoted if need be."""
    return name if _is_plain(name) else quote(name)


def plain_value(name: str) -> str:
    """`%` and the name of a value, quoted if need be."""
    return f"%{name if _is_plain_value(name) else quote(name)}"


def unquote(text: str) -> str:
    """The name that `quote` or `plain` wrote."""
    if text[:1] != '"':
        return text
    return _escapes(_unescape, text[1:-1]) if "\\" in text else text[1:-1]


def _unescape(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    return chr(int(code, 16)) if code else {"n": "\n", "r": "\r", "t": "\t"}.get(found[4], found[4])


def label_name(label: str) -> str:
    """The name in a label."""
    cut = label.rfind("#")
    return unquote(label[:cut] if cut > label.rfind('"') else label)


# types


def write_type(t: Type, mesh_label: Callable[[Mesh], str], bundle: Callable[[Tuple], str]) -> str:
    """A type, given how meshes and bundles are written."""
    if isinstance(t, Tuple):
        return bundle(t)
    dims = [str(n) for n in t.shape]
    partial = ""
    at = t.device
    if isinstance(at, Mesh):
        for dim, subdims in t.subdims.items():
            end = 1
            parts: list[str] = []
            for outer, n, i in subdims:
                shift = t.placements[i].shift
                part = plain(at.axes[i]) if outer == end else f"{outer}:{plain(at.axes[i])}"
                parts.append(f"{part}+{shift}" if shift else part + _write_halo(t.placements[i].halo))
                end = outer * n
            dims[dim] += "{" + ",".join(parts) + "}"
        for i, kind in reductions(t.placements).items():
            axis = plain(at.axes[i])
            partial += f"+{axis}" if kind == "sum" else f"+{kind}:{axis}"
    where = "" if at is None else f" @ {mesh_label(at) if isinstance(at, Mesh) else write_device(at)}"
    return f"{t.dtype.name}[{', '.join(dims)}]{partial}{_write_piece(t.piece)}{where}"


def format_type(t: Type | None) -> str:
    """A type as text, whole; meshes by their names."""
    if t is None:
        return "untyped"
    return write_type(t, lambda mesh: plain(mesh.name), lambda bundle: row(map(format_type, bundle.types)))


def row(items: Iterable[str]) -> str:
    """Items in parentheses."""
    return f"({', '.join(items)})"


def read_tensor(text: str, where: Callable[[str], Device | Mesh]) -> Tensor | None:
    """The tensor type that `write_type` wrote; None if this is none.

    Raises ModelError for an unknown dtype, mesh or axis, IRTypeError if the placements do not fit.
    """
    found = _is_tensor(text)
    if found is None:
        return None
    name, dims, partials, piece, place = found.groups()
    dtype = DType.all.get(name)
    if dtype is None:
        fail("a dtype", name)
    at = where(place) if place else None
    placements: dict[str, Placement] = {}
    shape: list[int] = []
    for dim, (local, axes) in enumerate(_dims(dims)):
        shape.append(int(local))
        end = 1
        for outer, axis, shift, halo in _subdims(axes):
            axis = unquote(axis)
            placements[axis] = Shard(dim, int(outer or end), int(shift or 0), _read_halo(halo))
            end = int(outer or end) * (at.size(axis) if isinstance(at, Mesh) else 1)
    for kind, axis in _partials(partials):
        placements[unquote(axis)] = Partial(kind or "sum")
    if not isinstance(at, Mesh):
        if placements:
            fail("a mesh that has these axes", text)
        return Tensor(dtype, shape, at, (), _read_piece(piece))
    for axis in placements:
        at.position(axis)
    return Tensor(dtype, shape, at, [placements.get(a, REPLICATE) for a in at.axes], _read_piece(piece))


def _write_halo(halo: Halo | None) -> str:
    if halo is None:
        return ""
    lo, hi, fill = halo
    return f"~{lo}:{hi}" + (f":{fill!r}" if fill else "")


def _read_halo(text: str) -> Halo | None:
    if not text:
        return None
    lo, hi, *fill = text[1:].split(":")
    try:
        return int(lo), int(hi), float(fill[0]) if fill else 0.0
    except ValueError:
        fail("the number that fills a halo", fill[0])


def _write_piece(piece: Piece | None) -> str:
    if piece is None:
        return ""
    first, end = piece
    return (
        f"#{_write_microbatch(first)}" if end == first + 1 else f"#{_write_microbatch(first)}:{_write_microbatch(end)}"
    )


def _read_piece(text: str | None) -> Piece | None:
    if text is None:
        return None
    first, _, end = text.partition(":")
    start = _read_microbatch(first)
    return start, _read_microbatch(end) if end else start + 1


def _write_microbatch(k: int) -> str:
    """A microbatch: a number, or one relative to a body's own, `t`."""
    if k < NOW // 2:
        return str(k)
    return f"t{k - NOW:+d}" if k != NOW else "t"


def _read_microbatch(text: str) -> int:
    return NOW + int(text[1:] or 0) if text[0] == "t" else int(text)


# devices and meshes


def write_device(d: Device) -> str:
    return f"{plain(d.kind)}:{d.index}"


def read_device(text: str) -> Device | None:
    """The device that `write_device` wrote; None if this is none."""
    found = _is_device(text)
    return Device(unquote(found[1]), int(found[2])) if found else None


_Run = tuple[str, int, tuple[tuple[int, int], ...]]
"""(kind, first index, ((count, step), ...)), innermost repetition first."""


def write_mesh(mesh: Mesh) -> str:
    """The axes and devices of a mesh, devices as runs: as short for a thousand of them as for ten."""
    axes = ", ".join(f"{plain(a)}={n}" for a, n in zip(mesh.axes, mesh.sizes, strict=True))
    runs: list[_Run] = [(d.kind, d.index, ()) for d in mesh.devices]
    while len(longer := _merge(runs)) < len(runs):
        runs = longer
    return f"({axes}) = {', '.join(map(_write_run, runs))}"


def read_mesh(line: str) -> tuple[str, Mesh]:
    """The label and the mesh of a line `mesh label(axis=size, ...) = runs`.

    Raises ModelError if the line is not of that form, IRTypeError if the devices do not fit the axes.
    """
    found = _is_mesh(line)
    if found is None:
        fail("mesh name(axis=size, ...) = kind:first..last, ...", line.strip())
    axes = {unquote(axis): int(n) for axis, n in _sizes(found[2])}
    devices: list[Device] = []
    for kind, first, last, step, repeats in _runs(found[3]):
        by = int(step or 1)
        run = list(range(int(first), int(last or first) + (1 if by > 0 else -1), by))
        for count, apart in _repeats(repeats):
            run = [i + k * int(apart) for k in range(int(count)) for i in run]
        devices += [Device(unquote(kind), i) for i in run]
    return found[1], Mesh(devices, axes, label_name(found[1]))


def _merge(runs: Sequence[_Run]) -> list[_Run]:
    """Merge neighbouring runs of the same form at equal distances into one."""
    merged: list[_Run] = []
    i = 0
    while i < len(runs):
        kind, first, form = runs[i]
        j = i + 1
        step = runs[j][1] - first if j < len(runs) else 0
        while step and j < len(runs) and runs[j] == (kind, first + (j - i) * step, form):
            j += 1
        merged.append(runs[i] if j - i == 1 else (kind, first, (*form, (j - i, step))))
        i = j
    return merged


def _write_run(run: _Run) -> str:
    kind, first, form = run
    text = f"{plain(kind)}:{first}"
    if form:
        count, step = form[0]
        text += f"..{first + (count - 1) * step}" + (f":{step}" if step != 1 else "")
    return text + "".join(f" x{count} by {step}" for count, step in form[1:])
