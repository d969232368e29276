"""Placements along one mesh axis: how a device's piece relates to the whole.

A placement's `dim` says which dim it splits, None of those that split none (so `p.dim is not None` makes p a `Shard`
for the type checker, too); its `kind` says how the pieces are reduced to the whole, None unless it is a `Partial`.
Their methods work on any array that reshapes and is indexed as numpy's. `xp` is the array namespace (see
`executor.reference.numpy_namespace`), `i` a device's index along the axis, `n` the size of the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from distir.ir.errors import IRTypeError

Array = Any
Halo = tuple[int, int, float]
"""(lo, hi, fill): how many elements a device has beside its slice, before and after; `fill` is what lies outside the
whole."""


class _Placement:
    """What all placements have; as it is here, it holds of those that split no dim."""

    __slots__ = ()
    outer: int = 1
    shift: int = 0
    halo: Halo | None = None

    @property
    def plain(self) -> Self:
        """The same split without a halo."""
        return self

    def cut(self, x: Array, i: int, n: int) -> Array:
        """Device i's piece of the whole `x`; all of it if it is not split."""
        return x

    def join(self, pieces: Sequence[Array], xp: Any) -> Array:
        """The whole, from the pieces of all devices along the axis, in the order of the devices."""
        return pieces[0]

    def local_size(self, size: int, n: int) -> int:
        """How much of its dim, of `size`, a device holds."""
        return size

    def start(self, i: int, n: int, size: int) -> int:
        """Where device i's piece begins in its dim, of `size` elements once outer sub-dimensions are split off."""
        return 0

    def device(self, k: int, n: int) -> int:
        """The device that holds slice k; the first of them if each holds all."""
        return 0

    def shifted(self, shift: int) -> Self:
        """The same split with another shift."""
        return self

    def inside(self, ways: int) -> Self:
        """The same in an array that other axes have split `ways` ways outside of this one."""
        return self

    def nested(self, ways: int) -> Self:
        """The same within each of `ways` outer parts: `inside` undoes it."""
        return self

    def covers(self, want: Placement) -> bool:
        """Whether a device's piece in `want` is the one that it has, or is cut from it: nothing is sent."""
        return self is want

    def exchanged(self, want: Placement, size: float, n: int) -> float:
        """How much of a whole of `size` goes around the n devices for the placement `want`: each sends (n - 1) / n of
        it."""
        return 0.0

    @property
    def attributes(self) -> Mapping[str, int]:
        """The attributes with which a communication op gives this placement."""
        return {}

    @property
    def form(self) -> object:
        """What the members of a bundle that is communicated as one must agree on."""
        return None


class Replicate(_Placement):
    """Every device along the axis holds the whole."""

    __slots__ = ()
    dim: ClassVar[None] = None
    kind: ClassVar[None] = None
    _one: ClassVar[Replicate | None] = None

    def __new__(cls) -> Replicate:
        if cls._one is None:
            cls._one = object.__new__(cls)
        return cls._one

    def __reduce__(self) -> tuple[type[Replicate], tuple[()]]:
        return Replicate, ()

    def __repr__(self) -> str:
        return "Replicate"

    def covers(self, want: Placement) -> bool:
        return self is want or (want.dim is not None and want.halo is None)


class Shard(_Placement):
    """Dimension `dim`, read as (outer, n, rest), is split in its middle sub-dimension over the n devices of the axis.

    Device i holds slice (i - shift) mod n: with a `shift` of 0 the devices hold the slices in order, with k each slice
    is k devices further on. With a `halo` (lo, hi, fill) it also holds the lo elements before its slice and the hi
    after it, `fill` where they are outside the whole: of slices of s elements [i s - lo, (i + 1) s + hi).

    Raises IRTypeError unless `dim` and `shift` are integers from 0, and `outer` one from 1; and for a halo with an
    `outer` or a `shift`, or whose widths are not integers from 0, one above it.
    """

    __slots__ = ("dim", "halo", "outer", "shift")
    _interned: ClassVar[dict[tuple[int, int, int, Halo | None], Shard]] = {}
    dim: int
    outer: int
    shift: int
    halo: Halo | None
    kind: ClassVar[None] = None

    def __new__(cls, dim: int, outer: int = 1, shift: int = 0, halo: Halo | None = None) -> Shard:
        if type(dim) is not int or type(outer) is not int:  # 1.0 and True are found where 1 is
            raise IRTypeError(f"a split is of a dim and an outer that are integers, got dim={dim!r}, outer={outer!r}")
        if type(shift) is not int:
            raise IRTypeError(f"a split is shifted by an integer, got {shift!r}")
        if halo is not None:
            halo = _checked(halo, outer, shift)
        self = cls._interned.get((dim, outer, shift, halo))
        if self is None:
            if dim < 0 or outer < 1:
                raise IRTypeError(f"a split is of a dim from 0, with an outer from 1, got dim={dim}, outer={outer}")
            if shift < 0:
                raise IRTypeError(f"a split is shifted by 0 or more, got shift={shift}")
            self = object.__new__(cls)
            self.dim, self.outer, self.shift, self.halo = dim, outer, shift, halo
            cls._interned[dim, outer, shift, halo] = self
        return self

    def __reduce__(self) -> tuple[type[Shard], tuple[int, int, int, Halo | None]]:
        return Shard, (self.dim, self.outer, self.shift, self.halo)

    def __repr__(self) -> str:
        if self.halo:
            return f"Shard({self.dim}, 1, 0, {self.halo})"
        if self.shift:
            return f"Shard({self.dim}, {self.outer}, {self.shift})"
        return f"Shard({self.dim})" if self.outer == 1 else f"Shard({self.dim}, {self.outer})"

    @property
    def plain(self) -> Shard:
        return self if self.halo is None else Shard(self.dim)

    def with_halo(self, lo: int, hi: int, fill: float = 0.0) -> Shard:
        """The same split with a halo; itself if that is of no width. Raises IRTypeError where there can be none."""
        return Shard(self.dim, self.outer, self.shift, (lo, hi, fill)) if lo or hi else self

    @property
    def widths(self) -> tuple[int, int]:
        """How many elements a device has before its slice, and after it."""
        return self.halo[:2] if self.halo else (0, 0)

    def overlaps(self, n: int, other: Shard, m: int) -> bool:
        """Whether a dim cannot be split both so over n devices and as `other` over m: neither is inside the other."""
        return self.dim == other.dim and bool(self.outer % (other.outer * m) and other.outer % (self.outer * n))

    def slice_index(self, i: int, n: int) -> int:
        """The index of the slice that device i holds."""
        return (i - self.shift) % n if self.shift else i

    def device(self, k: int, n: int) -> int:
        return (k + self.shift) % n if self.shift else k

    def shifted(self, shift: int) -> Shard:
        return self if shift == self.shift else Shard(self.dim, self.outer, shift, self.halo)

    def cut(self, x: Array, i: int, n: int) -> Array:
        shape, dim = x.shape, self.dim
        if self.halo is not None:
            (lo, hi, fill), s, before = self.halo, shape[dim] // n, (slice(None),) * dim
            y = x[(*before, [min(max(k, 0), shape[dim] - 1) for k in range(i * s - lo, (i + 1) * s + hi)])]
            if i * s < lo:
                y[(*before, slice(0, lo - i * s))] = fill
            if (after := (i + 1) * s + hi - shape[dim]) > 0:
                y[(*before, slice(s + lo + hi - after, None))] = fill
            return y
        y = x.reshape(*shape[:dim], self.outer, n, shape[dim] // (self.outer * n), *shape[dim + 1 :])
        y = y[(slice(None),) * (dim + 1) + (self.slice_index(i, n),)]
        return y.reshape(*shape[:dim], shape[dim] // n, *shape[dim + 1 :])

    def join(self, pieces: Sequence[Array], xp: Any) -> Array:
        n, dim = len(pieces), self.dim
        if self.halo is not None:
            inside = slice(self.halo[0], pieces[0].shape[dim] - self.halo[1])
            return xp.concat([x[(*(slice(None),) * dim, inside)] for x in pieces], dim)
        shape = pieces[0].shape
        parts = *shape[:dim], self.outer, 1, shape[dim] // self.outer, *shape[dim + 1 :]
        split = [pieces[self.device(k, n)].reshape(*parts) for k in range(n)]
        return xp.concat(split, dim + 1).reshape(*shape[:dim], shape[dim] * n, *shape[dim + 1 :])

    def local_size(self, size: int, n: int) -> int:
        return size // n + sum(self.widths)

    def global_size(self, size: int, n: int) -> int:
        """The size of a dim of which a device holds `size`."""
        return (size - sum(self.widths)) * n

    def start(self, i: int, n: int, size: int) -> int:
        return self.slice_index(i, n) * (size // n) - self.widths[0]

    def inside(self, ways: int) -> Shard:
        return self if ways == 1 else Shard(self.dim, self.outer // ways, self.shift)

    def nested(self, ways: int) -> Shard:
        return self if ways == 1 else Shard(self.dim, self.outer * ways, self.shift)

    def exchanged(self, want: Placement, size: float, n: int) -> float:
        if self.halo is not None or want.halo is not None:  # what a halo takes is small
            return 0.0 if want.plain is self.plain else self.plain.exchanged(want.plain, size, n)
        if want is REPLICATE or want.dim == self.dim:  # gathered, then cut
            return size
        return size / n  # each device sends parts of its slice

    @property
    def attributes(self) -> Mapping[str, int]:
        given = {"dim": self.dim}
        if self.outer != 1:
            given["outer"] = self.outer
        if self.shift:
            given["shift"] = self.shift
        return given

    @property
    def form(self) -> object:
        return self.shift, self.halo


def _checked(halo: Halo, outer: int, shift: int) -> Halo:
    """A halo, its fill a float. Raises IRTypeError if it is none, or of a split that can have none."""
    lo, hi, fill = halo
    if type(lo) is not int or type(hi) is not int or lo < 0 or hi < 0 or lo + hi == 0:
        raise IRTypeError(f"a halo's widths are integers from 0, one above it, got {lo!r} and {hi!r}")
    if type(fill) not in (int, float) or fill != fill:
        raise IRTypeError(f"a halo is filled with a number, got {fill!r}")
    if type(fill) is int and abs(fill) > 1 << 53:
        raise IRTypeError("a halo is filled with a number up to 2^53, or with a float")
    if outer != 1 or shift:
        raise IRTypeError(f"a split with a halo has an outer of 1 and no shift, got outer={outer}, shift={shift}")
    return lo, hi, float(fill) + 0.0


class Partial(_Placement):
    """The whole is the sum (or maximum, or, of floats, mean) of the pieces."""

    __slots__ = ("kind",)
    _interned: ClassVar[dict[str, Partial]] = {}
    kind: str
    dim: ClassVar[None] = None

    def __new__(cls, kind: str = "sum") -> Partial:
        self = cls._interned.get(kind)
        if self is None:
            if kind not in ("sum", "max", "mean"):
                raise IRTypeError(f"Partial is of sum, max or mean, got {kind!r}")
            self = object.__new__(cls)
            self.kind = kind
            cls._interned[kind] = self
        return self

    def __reduce__(self) -> tuple[type[Partial], tuple[str]]:
        return Partial, (self.kind,)

    def __repr__(self) -> str:
        return "Partial" if self.kind == "sum" else f"Partial({self.kind})"

    def cut(self, x: Array, i: int, n: int) -> Array:
        raise IRTypeError(f"the pieces of a partial {self.kind} are not parts of the whole")

    def join(self, pieces: Sequence[Array], xp: Any) -> Array:
        total = pieces[0]
        for x in pieces[1:]:
            total = xp.maximum(total, x) if self.kind == "max" else total + x
        return xp.asarray(total / len(pieces), dtype=total.dtype) if self.kind == "mean" else total

    def exchanged(self, want: Placement, size: float, n: int) -> float:
        return 2 * size if want is REPLICATE else size  # reduced and gathered, or reduced alone

    @property
    def form(self) -> object:
        return self.kind


Placement = Replicate | Shard | Partial
"""How each device's piece relates to the whole, along one mesh axis."""


REPLICATE = Replicate()
SUM = Partial("sum")
MEAN = Partial("mean")


def splits(placements: Iterable[Placement]) -> list[tuple[int, Shard]]:
    """Those that split a dim, with their positions."""
    return [(k, p) for k, p in enumerate(placements) if p.dim is not None]


def reductions(placements: Iterable[Placement]) -> dict[int, str]:
    """The positions of the partial ones, with their kinds: empty if no sum, maximum or mean is left to be taken."""
    return {k: p.kind for k, p in enumerate(placements) if p.kind is not None}
