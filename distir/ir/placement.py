"""Placements: what each device's piece is of the whole, along one mesh axis."""

from __future__ import annotations

from typing import ClassVar

from distir.ir.errors import IRTypeError


class Placement:
    """What each device's piece is of the whole, along one mesh axis."""

    __slots__ = ()


class Replicate(Placement):
    """Every device along the axis holds the whole."""

    __slots__ = ()
    _one: ClassVar[Replicate | None] = None

    def __new__(cls) -> Replicate:
        if cls._one is None:
            cls._one = object.__new__(cls)
        return cls._one

    def __reduce__(self) -> tuple[type[Replicate], tuple[()]]:
        return Replicate, ()

    def __repr__(self) -> str:
        return "Replicate"


class Shard(Placement):
    """Dimension `dim`, read as (outer, n, rest), is split on its middle digit over the n devices of the axis.

    Raises IRTypeError unless `dim` is an integer from 0, and `outer` one from 1.
    """

    __slots__ = ("dim", "outer")
    _interned: ClassVar[dict[tuple[int, int], Shard]] = {}
    dim: int
    outer: int

    def __new__(cls, dim: int, outer: int = 1) -> Shard:
        if type(dim) is not int or type(outer) is not int:  # 1.0 and True are found where 1 is
            raise IRTypeError(f"a split is of a dim and an outer that are integers, got dim={dim!r}, outer={outer!r}")
        self = cls._interned.get((dim, outer))
        if self is None:
            if dim < 0 or outer < 1:
                raise IRTypeError(f"a split is of a dim from 0, with an outer from 1, got dim={dim}, outer={outer}")
            self = object.__new__(cls)
            self.dim, self.outer = dim, outer
            cls._interned[dim, outer] = self
        return self

    def __reduce__(self) -> tuple[type[Shard], tuple[int, int]]:
        return Shard, (self.dim, self.outer)

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.outer == 1 else f"Shard({self.dim}, {self.outer})"


class Partial(Placement):
    """The whole is the sum (or maximum, or, of floats, mean) of the pieces."""

    __slots__ = ("kind",)
    _interned: ClassVar[dict[str, Partial]] = {}
    kind: str

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


REPLICATE = Replicate()
SUM = Partial("sum")
MEAN = Partial("mean")
