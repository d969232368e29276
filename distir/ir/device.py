"""Devices, and meshes of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

from distir.ir.errors import IRTypeError


class Device:
    """One device. Devices of the same kind and index are the same object; what a device can do is in a `Topology`."""

    __slots__ = ("index", "kind")
    _interned: ClassVar[dict[tuple[str, int], Device]] = {}
    kind: str
    index: int

    def __new__(cls, kind: str, index: int) -> Device:
        self = cls._interned.get((kind, index))
        if self is None:
            self = object.__new__(cls)
            self.kind, self.index = kind, index
            cls._interned[kind, index] = self
        return self

    def __reduce__(self) -> tuple[type[Device], tuple[str, int]]:
        return Device, (self.kind, self.index)

    def __repr__(self) -> str:
        return f"{self.kind}:{self.index}"


AxisNames = str | tuple[str, ...]
"""An axis of a mesh, or several that count as one, the first varying slowest."""


def names_of(axis: AxisNames) -> tuple[str, ...]:
    """An axis, or several, as a tuple."""
    return (axis,) if isinstance(axis, str) else axis


TIME = "mb"
"""The name of the time axis: microbatches, one after the other on the same devices."""
STREAMS = ("compute", "send", "recv", "host")
"""What a device does at a time; for each axis also its collectives, so that no axis of a plan has such a name."""


class Mesh:
    """An ordered set of devices with named axes, the last varying fastest.

    `axes` maps axis names to sizes. The axis named "mb" is a *time* axis: it has a size but no devices; its pieces are
    microbatches, processed one after the other. `len(devices)` is the product of the other axes' sizes. Meshes that are
    alike in name, devices and axes are the same object.

    Raises IRTypeError if the number of devices does not fit, or a device is there twice.
    """

    __slots__ = ("_coords", "_index", "axes", "devices", "like", "name", "sizes", "time")
    _interned: ClassVar[dict[tuple[object, ...], Mesh]] = {}
    _likes: ClassVar[dict[tuple[tuple[str, int], ...], Mesh]] = {}
    name: str
    devices: tuple[Device, ...]
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    _coords: tuple[tuple[int, ...], ...] | None
    time: int | None
    """The position of the time axis in `axes`."""
    like: Mesh
    """The first mesh that was made with these axes, of these sizes."""

    def __new__(cls, devices: Iterable[Device], axes: Mapping[str, int], name: str = "mesh") -> Mesh:
        devices = tuple(devices)
        key = (name, devices, tuple(axes.items()))
        self = cls._interned.get(key)
        if self is not None:
            return self
        if any(n < 1 for n in axes.values()):
            raise IRTypeError(f"mesh {name}: axes have at least one index, got {dict(axes)}")
        want = math.prod(n for a, n in axes.items() if a != TIME)
        if want != len(devices):
            raise IRTypeError(f"mesh {name} {dict(axes)} needs {want} devices, got {len(devices)}")
        if len(set(devices)) != len(devices):
            raise IRTypeError(f"mesh {name}: a device is in it twice")
        self = object.__new__(cls)
        self.name, self.devices = name, devices
        self.axes, self.sizes = tuple(axes), tuple(axes.values())
        self.time = self.axes.index(TIME) if TIME in axes else None
        self._index = {a: i for i, a in enumerate(self.axes)}
        self._coords = None
        self.like = cls._likes.setdefault(key[2], self)
        cls._interned[key] = self
        return self

    def __reduce__(self) -> tuple[type[Mesh], tuple[tuple[Device, ...], dict[str, int], str]]:
        return Mesh, (self.devices, dict(zip(self.axes, self.sizes, strict=True)), self.name)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{a}={n}" for a, n in zip(self.axes, self.sizes, strict=True))
        return f"{self.name}({sizes})"

    def position(self, axis: str) -> int:
        """The position of `axis` among the axes. Raises IRTypeError if it is not one of them."""
        i = self._index.get(axis)
        if i is None:
            raise IRTypeError(f"mesh {self.name} has no axis {axis!r}", f"its axes are {', '.join(self.axes)}")
        return i

    def positions(self, axis: AxisNames) -> tuple[int, ...]:
        """The position of `axis`, or of each of several. Raises IRTypeError if one is not among the axes."""
        return (self.position(axis),) if isinstance(axis, str) else tuple([self.position(a) for a in axis])

    def size(self, axis: AxisNames) -> int:
        return math.prod([self.sizes[i] for i in self.positions(axis)])

    def is_time(self, axis: AxisNames) -> bool:
        """Whether it is the time axis."""
        return self.time is not None and axis == self.axes[self.time]

    @property
    def coords(self) -> tuple[tuple[int, ...], ...]:
        """For each device its index along every axis, the time axis counted as 0."""
        if self._coords is None:
            space = [range(1 if i == self.time else n) for i, n in enumerate(self.sizes)]
            self._coords = tuple(itertools.product(*space))
        return self._coords

    def stride(self, i: int) -> int:
        """The distance in `devices` between neighbours along axis number i, which is not the time axis."""
        return math.prod([n for k, n in enumerate(self.sizes) if k > i and k != self.time])

    def group(self, axis: AxisNames, device: int = 0) -> list[Device]:
        """The devices that differ from number `device` only along `axis`, or several axes, in their order."""
        if self.is_time(axis):
            return [self.devices[device]]
        found = [device]
        for i in self.positions(axis):
            stride, n = self.stride(i), self.sizes[i]
            found = [d + (k - d // stride % n) * stride for d in found for k in range(n)]
        return [self.devices[d] for d in found]
