"""Types: what one value is, and what each device of a mesh holds of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from distir.ir.device import TIME, AxisNames, Device, Mesh
from distir.ir.dtype import BFloat16 as BFloat16
from distir.ir.dtype import Bool as Bool
from distir.ir.dtype import DType as DType
from distir.ir.dtype import Float as Float
from distir.ir.dtype import Float16 as Float16
from distir.ir.dtype import Float32 as Float32
from distir.ir.dtype import Float64 as Float64
from distir.ir.dtype import Int8 as Int8
from distir.ir.dtype import Int16 as Int16
from distir.ir.dtype import Int32 as Int32
from distir.ir.dtype import Int64 as Int64
from distir.ir.dtype import UInt8 as UInt8
from distir.ir.errors import IRTypeError
from distir.ir.placement import MEAN as MEAN
from distir.ir.placement import REPLICATE, Placement
from distir.ir.placement import SUM as SUM
from distir.ir.placement import Partial as Partial
from distir.ir.placement import Replicate as Replicate
from distir.ir.placement import Shard as Shard

NOW = 1 << 40
"""The symbolic current microbatch of a body: inside it a range (0, NOW) covers all microbatches before the current one,
(0, NOW + 1) includes it. A `Call` substitutes its own microbatch."""

MOST = 1 << 53
"""The most elements a tensor may have: up to there floating-point numbers count them exactly."""

Piece = tuple[int, int]
SubDim = tuple[int, int, int]
"""A sub-dimension: (outer, n, position of the mesh axis)."""


def _subdims(shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> dict[int, list[SubDim]]:
    """For each sharded dim its sub-dimensions, outermost first. Raises IRTypeError if they overlap or do not divide."""
    per: dict[int, list[SubDim]] = {}
    for i, p in enumerate(placements):
        if p.dim is not None:
            per.setdefault(p.dim, []).append((p.outer, mesh.sizes[i], i))
            if p.shift and (p.shift >= mesh.sizes[i] or i == mesh.time):
                raise IRTypeError(
                    f"{p} cannot be shifted by {p.shift} on mesh axis {mesh.axes[i]!r} of size {mesh.sizes[i]}"
                )
            if p.halo is not None:
                _check_halo(shape, mesh, i, p)
    for dim, subdims in per.items():
        if len(subdims) > 1 and any([placements[i].halo is not None for _, _, i in subdims]):
            raise IRTypeError(f"dim {dim} of shape {tuple(shape)} is split with a halo, so no other axis may split it")
        subdims.sort()
        inside = 1
        for outer, n, i in subdims:
            if dim >= len(shape) or outer % inside or shape[dim] % (outer * n):
                size = shape[dim] if dim < len(shape) else "none"
                raise IRTypeError(
                    f"dim {dim} (size {size}) of shape {tuple(shape)} cannot be split {n} ways "
                    f"with outer {outer} on mesh axis {mesh.axes[i]!r}"
                )
            inside = outer * n
    return per


def _check_halo(shape: Sequence[int], mesh: Mesh, i: int, p: Shard) -> None:
    """Raises IRTypeError unless the neighbours along axis number i hold all of the halo."""
    if i == mesh.time:
        raise IRTypeError(f"{p}: microbatches have no halo")
    if p.dim < len(shape) and max(p.widths) > shape[p.dim] // mesh.sizes[i]:
        raise IRTypeError(
            f"{p}: a halo is at most as wide as a slice, {shape[p.dim] // mesh.sizes[i]} of {shape[p.dim]} on mesh "
            f"axis {mesh.axes[i]!r}"
        )


class Tensor:
    """An array on no device (None), on one `Device`, or on a `Mesh`.

    `shape` is what ONE device holds; `global_shape` is the whole. On a mesh, `placements` has one entry a mesh axis.
    `piece` is the range of microbatches (first, end) that a value of a scheduled program covers, None if the value
    does not vary in time or belongs to a body's own microbatch. Equal tensors are the same object (interned).

    Raises IRTypeError if the placements do not fit the shape or the mesh, or for more than `MOST` elements in all.
    """

    __slots__ = (
        "__weakref__",
        "_erased",
        "_pieces",
        "_still",
        "_subdims",
        "bytes",
        "device",
        "dtype",
        "global_shape",
        "moves",
        "piece",
        "placements",
        "shape",
    )
    _interned: ClassVar[WeakValueDictionary[tuple[object, ...], Tensor]] = WeakValueDictionary()
    """Those without a piece; each refers to the tensors that differ from it in the piece alone."""
    dtype: DType
    shape: tuple[int, ...]
    device: Device | Mesh | None
    placements: tuple[Placement, ...]
    piece: Piece | None
    global_shape: tuple[int, ...]
    bytes: int
    moves: bool
    """Whether it varies in time: is not replicated along the time axis."""
    _still: Tensor | None
    """The one without a piece; None for itself."""
    _pieces: dict[Piece, Tensor]
    _erased: Tensor | None
    """The whole, on no device; None until it is asked for."""

    def __new__(
        cls,
        dtype: DType,
        shape: Iterable[int],
        device: Device | Mesh | None = None,
        placements: Iterable[Placement] | None = None,
        piece: Piece | None = None,
    ) -> Tensor:
        shape = tuple(shape)
        if placements is None:
            placements = (REPLICATE,) * len(device.axes) if isinstance(device, Mesh) else ()
        else:
            placements = tuple(placements)
        key = (dtype, shape, device, placements)
        self = cls._interned.get(key)
        if self is not None:
            return self if piece is None else self.of(piece)
        whole = list(shape)
        if isinstance(device, Mesh):
            if len(placements) != len(device.axes):
                raise IRTypeError(f"{device} has {len(device.axes)} axes, got placements {placements}")
            for p, n in zip(placements, device.sizes, strict=True):
                if p.dim is not None and p.dim < len(whole):
                    whole[p.dim] = p.global_size(whole[p.dim], n)
            if MEAN in placements and not dtype.floating:
                raise IRTypeError(f"a mean is of floats, got {dtype}")
            for p in () if dtype.floating else placements:
                if p.halo is not None and not p.halo[2].is_integer():
                    raise IRTypeError(f"{p}: a halo of {dtype} is filled with an integer")
        elif placements:
            raise IRTypeError(f"placements {placements} need a mesh, got device {device}")
        if math.prod(whole) > MOST:
            raise IRTypeError(f"{dtype}{whole} has {math.prod(whole):,} elements, more than 2^53")
        self = object.__new__(cls)
        self._subdims = _subdims(whole, device, placements) if isinstance(device, Mesh) else {}
        self.dtype, self.shape, self.device, self.placements, self.piece = dtype, shape, device, placements, None
        self.global_shape = tuple(whole)
        self.bytes = math.prod(shape) * dtype.size
        time = device.time if isinstance(device, Mesh) else None
        self.moves = time is not None and placements[time] is not REPLICATE
        self._still, self._pieces, self._erased = None, {}, None
        cls._interned[key] = self
        return self if piece is None else self.of(piece)

    @staticmethod
    def whole(
        dtype: DType,
        shape: Sequence[int],
        device: Device | Mesh | None = None,
        placements: Sequence[Placement] | None = None,
        piece: Piece | None = None,
    ) -> Tensor:
        """As the constructor, but of a global shape. Raises IRTypeError if it does not divide."""
        if isinstance(device, Mesh) and placements is not None:
            _subdims(shape, device, placements)
            shape = list(shape)
            for p, n in zip(placements, device.sizes, strict=True):
                if p.dim is not None:
                    shape[p.dim] = p.local_size(shape[p.dim], n)
        return Tensor(dtype, shape, device, placements, piece)

    def __reduce__(self) -> tuple[type[Tensor], tuple[object, ...]]:
        return Tensor, (self.dtype, self.shape, self.device, self.placements, self.piece)

    def __repr__(self) -> str:
        from distir.ir.notation import format_type

        return format_type(self)

    @property
    def subdims(self) -> dict[int, list[SubDim]]:
        """For each sharded dim its (outer, n, mesh axis position), outermost first."""
        return self._subdims

    @property
    def mesh(self) -> Mesh:
        """The mesh it is on. Raises IRTypeError if it is on none."""
        if not isinstance(self.device, Mesh):
            raise IRTypeError(f"expected a value on a mesh, got {self}")
        return self.device

    def on(self, axis: AxisNames) -> Placement:
        """How it is placed along a mesh axis, or several as one: the same sum, or splits of a dim one inside the other.

        Raises IRTypeError if it is on no mesh, or one without that axis, or if the axes do not count as one.
        """
        if isinstance(axis, str):
            return self.placements[self.mesh.position(axis)]
        at = self.mesh.positions(axis)
        p = self.placements[at[0]]
        expected = p
        for i, before in zip(at[1:], at, strict=False):
            expected = expected.nested(self.mesh.sizes[before])
            if self.placements[i] is not expected:
                raise IRTypeError(f"expected {expected} along {self.mesh.axes[i]!r}, inside {axis[0]!r}, got {self}")
        return p

    @property
    def over_time(self) -> Placement:
        """How it is placed along the time axis, over the microbatches; replicated where there is none."""
        mesh = self.device
        return self.placements[mesh.time] if isinstance(mesh, Mesh) and mesh.time is not None else REPLICATE

    @property
    def microbatch_dim(self) -> int | None:
        """The dim that is split over the microbatches, if there are several; else None."""
        dim = self.over_time.dim
        return dim if dim is not None and self.mesh.size(TIME) > 1 else None

    def local(self, axis: int | AxisNames) -> Placement:
        """Its placement along a mesh axis (or its number, or several axes) within what one device holds: without other
        axes' sub-dimensions."""
        at = (axis,) if isinstance(axis, int) else self.mesh.positions(axis)
        p = self.placements[axis] if isinstance(axis, int) else self.on(axis)
        if p.dim is None or p.outer == 1:
            return p
        return p.inside(math.prod([n for outer, n, k in self.subdims[p.dim] if k not in at and outer < p.outer]))

    def cut(self, x: Any, coord: Mapping[int, int] | Sequence[int]) -> Any:
        """The piece of the whole array `x` that a device at `coord` (its index along each mesh axis) holds.

        Axes that a mapping (mesh axis position -> index) leaves out are kept whole.
        """
        at = coord if isinstance(coord, Mapping) else dict(enumerate(coord))
        for subdims in self._subdims.values():
            gone = 1
            for _, n, i in subdims:
                if i in at:
                    x = self.placements[i].inside(gone).cut(x, at[i], n)
                    gone *= n
        return x

    def start(self, dim: int, coord: Sequence[int]) -> int:
        """The global index at which the piece at `coord` begins in `dim`; it must be contiguous there (see `infer`)."""
        start, size = 0, self.global_shape[dim]
        for _, n, i in self._subdims.get(dim, ()):
            p = self.placements[i]
            start += p.start(coord[i], n, size)
            size //= n
        return start

    def starts(self, dim: int | None, coord: Sequence[int] | None) -> int | tuple[int, ...]:
        """`start`, also for a dim counted from the last, and for None of all dims; 0 without a coordinate."""
        if dim is None:
            return tuple([0 if coord is None else self.start(d, coord) for d in range(len(self.shape))])
        return 0 if coord is None else self.start(dim % len(self.shape), coord)

    def placed(self, axis: AxisNames, placement: Placement, piece: Piece | None = None) -> Tensor:
        """The same whole with another placement along an axis, or along several as one."""
        placements = list(self.placements)
        for i in self.mesh.positions(axis):
            placements[i] = placement
            placement = placement.nested(self.mesh.sizes[i])
        return Tensor.whole(self.dtype, self.global_shape, self.device, placements, piece)

    @property
    def plain(self) -> Tensor:
        """The same whole without halos."""
        if not any([p.halo for p in self.placements]):
            return self
        return Tensor.whole(self.dtype, self.global_shape, self.device, [p.plain for p in self.placements], self.piece)

    @property
    def inside(self) -> tuple[slice, ...]:
        """Where in a device's piece that is which it has of `plain`: all but the halos."""
        found = [slice(0, size) for size in self.shape]
        for p in self.placements:
            if p.dim is not None and p.halo is not None:
                found[p.dim] = slice(p.halo[0], self.shape[p.dim] - p.halo[1])
        return tuple(found)

    def moved(self, device: Device | Mesh | None) -> Tensor:
        """The same pieces on another device, or on a mesh of the same axes."""
        return Tensor(self.dtype, self.shape, device, self.placements, self.piece)

    def erased(self) -> Tensor:
        """The whole, on no device."""
        if self.device is None and self.piece is None:
            return self
        if self._erased is None:
            self._erased = Tensor(self.dtype, self.global_shape)
        return self._erased

    def at(self, microbatch: int) -> Tensor:
        """The type in the caller that a body's type becomes when it is called with this microbatch."""
        if not self.moves:
            return self
        return self.of((microbatch, microbatch + 1) if self.piece is None else (0, self.piece[1] - NOW + microbatch))

    def of(self, piece: Piece | None) -> Tensor:
        """The same, of other microbatches."""
        still = self._still or self
        if piece is None:
            return still
        other = still._pieces.get(piece)
        if other is None:  # a copy: all that the constructor checks holds already
            other = object.__new__(Tensor)
            other.dtype, other.shape, other.device = still.dtype, still.shape, still.device
            other.placements, other.piece, other.moves = still.placements, piece, still.moves
            other.global_shape, other.bytes, other._subdims = still.global_shape, still.bytes, still._subdims
            other._still, other._pieces, other._erased = still, still._pieces, None
            still._pieces[piece] = other
        return other


class Tuple:
    """A bundle of values that travel together: parameters, residuals, gradients.

    As with tensors, bundles that differ only in their microbatches refer to each other. The members of a derived one
    are computed on first access: a schedule has a bundle for each microbatch and reads few of them.
    """

    __slots__ = (
        "__weakref__",
        "_distinct",
        "_moving",
        "_others",
        "_still",
        "_types",
        "bytes",
        "device",
        "moves",
        "piece",
    )
    _interned: ClassVar[WeakValueDictionary[tuple[Type, ...], Tuple]] = WeakValueDictionary()
    device: Device | Mesh | None
    """That of the first member."""
    bytes: int
    moves: bool
    """Whether any of them varies in time."""
    piece: Piece | None
    """The microbatches of all members that vary in time; None if there are none, or if they differ."""
    _still: Tuple | None
    """The one without a piece, maybe itself; None if the members' pieces differ."""
    _types: tuple[Type, ...] | None
    _distinct: tuple[Type, ...] | None
    _moving: tuple[Type, ...] | None
    _others: dict[Piece | int, Tuple]
    """Without a piece: the bundles that have one. With members of different pieces: its type at each microbatch."""

    def __new__(cls, types: Iterable[Type]) -> Tuple:
        types = tuple(types)
        self = cls._interned.get(types)
        if self is None:
            distinct = tuple(dict.fromkeys(types))
            piece, differ = cls._common(distinct)
            if piece is not None:
                still = {t: t.of(None) for t in distinct}
                self = Tuple([still[t] for t in types]).of(piece)
            else:
                self = object.__new__(cls)
                self.bytes = sum([t.bytes for t in types])
                self.device = types[0].device if types else None
                self.moves = any([t.moves for t in distinct])
                self.piece, self._still, self._moving, self._others = None, None if differ else self, None, {}
            self._types, self._distinct = types, distinct
            cls._interned[types] = self
        return self

    @staticmethod
    def _common(types: Iterable[Type]) -> tuple[Piece | None, bool]:
        """The microbatches of all types that vary in time, and whether these differ."""
        pieces = {t.piece for t in types if t.moves}
        odd = [t for t in types if (t._still is None if isinstance(t, Tuple) else not t.moves and t.piece is not None)]
        return (None, True) if odd or len(pieces) > 1 else (next(iter(pieces), None), False)

    def __reduce__(self) -> tuple[type[Tuple], tuple[tuple[Type, ...]]]:
        return Tuple, (self.types,)

    def __repr__(self) -> str:
        return "(" + ", ".join(map(repr, self.types)) + ")"

    @property
    def types(self) -> tuple[Type, ...]:
        """Its members' types."""
        if self._types is None:
            still = self._still or self
            new = dict(zip(still.distinct, self.distinct, strict=True))
            self._types = tuple([new[t] for t in still.types])
        return self._types

    @property
    def distinct(self) -> tuple[Type, ...]:
        """Its distinct types: a bundle has many members of few types."""
        if self._distinct is None:
            self._distinct = _all_of((self._still or self).distinct, self.piece)
        return self._distinct

    @property
    def moving(self) -> tuple[Type, ...]:
        """As many of its distinct types as a check of their pieces needs: all, if the pieces differ.

        Else, of the tensors that vary in time, one of each mesh and placement over time.
        """
        if self._still is None:
            return self.distinct
        if self._moving is None:
            self._moving = _samples(self.distinct) if self._still is self else _all_of(self._still.moving, self.piece)
        return self._moving

    def _each(self, change: Callable[[Type], Type]) -> Tuple:
        """The bundle of the changed types."""
        new = {t: change(t) for t in self.distinct}
        return Tuple([new[t] for t in self.types])

    def moved(self, device: Device | Mesh | None) -> Tuple:
        """The same pieces on another device, or on a mesh of the same axes."""
        return self._each(lambda t: t.moved(device))

    def erased(self) -> Tuple:
        """The wholes, on no device."""
        return self._each(lambda t: t.erased())

    def at(self, microbatch: int) -> Tuple:
        """The type in the caller that a body's type becomes when it is called with this microbatch."""
        if not self.moves:
            return self
        if self._still is not None:
            return self.of(
                (microbatch, microbatch + 1) if self.piece is None else (0, self.piece[1] - NOW + microbatch)
            )
        t = self._others.get(microbatch)
        if t is None:
            t = self._others[microbatch] = self._each(lambda t: t.at(microbatch))
        return t

    def of(self, piece: Piece | None) -> Tuple:
        """The same, what varies in time being of other microbatches."""
        still = self._still
        if still is None:
            return self._each(lambda t: t.of(piece) if t.moves else t)
        if piece is None or not self.moves:
            return still
        other = still._others.get(piece)
        if other is None:
            other = object.__new__(Tuple)
            other.device, other.bytes, other.moves, other.piece = still.device, still.bytes, True, piece
            other._types = other._distinct = other._moving = None
            other._still, other._others = still, still._others
            still._others[piece] = other
        return other


def _all_of(types: Iterable[Type], piece: Piece | None) -> tuple[Type, ...]:
    return tuple([t.of(piece) if t.moves else t for t in types])


def _samples(types: Iterable[Type]) -> tuple[Type, ...]:
    """Of the tensors that vary in time one of each mesh and placement over time."""
    found: dict[object, Tensor] = {}
    for t in types:
        for x in t.moving if isinstance(t, Tuple) else (t,):
            if isinstance(x, Tensor) and x.moves:
                found.setdefault((x.mesh, x.placements[x.mesh.time or 0]), x)
    return tuple(found.values())


Type = Tensor | Tuple
