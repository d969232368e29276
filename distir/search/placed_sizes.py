"""The types of a placed program for other numbers of replicas and microbatches.

How a program is placed does not depend on these numbers, but on whether there are several, and on what they divide: so
one placed program, a template, serves all such plans, if its types are read at a plan's own sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distir.ir.cached import cached
from distir.ir.device import TIME, Device, Mesh
from distir.ir.function import Function
from distir.ir.placement import Placement
from distir.ir.type import Tensor, Tuple, Type
from distir.search.space import Candidate
from distir.transforms.plan import InputSplit
from distir.transforms.roles import weights
from distir.transforms.sharding.pad_state import divides_evenly


class Template(NamedTuple):
    """What candidates of one template share. `divides`: of the sizes of weights, which the replicas divide, where ZeRO
    splits these; `padded`: how many replicas some weight may be padded for, 0 if none is."""

    tp: int
    sequence_parallel: bool
    recompute: str
    split: tuple[InputSplit, ...]
    zero: int
    replicas: bool
    microbatches: bool
    divides: tuple[bool, ...]
    padded: int


def template_of(c: Candidate, function: Function, batch: int) -> Template:
    """The template of a candidate for a step of `function` on `batch` samples."""
    inside = c.tp * math.prod([x.size for x in c.split])
    divides = _divides(function, c.dp, inside) if c.zero else ()
    padded = 0 if not c.zero or divides_evenly(function, c.dp * inside) else c.dp
    several = c.dp > 1, c.microbatches(batch) > 1
    return Template(c.tp, c.sequence_parallel, c.recompute, c.split, c.zero, *several, divides, padded)


@cached
def _divides(function: Function, dp: int, inside: int) -> tuple[bool, ...]:
    sizes = sorted({n for v in weights(function) if isinstance(v.type, Tensor) for n in v.type.global_shape})
    return tuple([n % (dp * k) == 0 for n in sizes for k in range(1, inside + 1) if inside % k == 0])


class Sized:
    """Types of a template at the sizes of another plan; call it with a type."""

    def __init__(self, sizes: Mapping[str, int], devices: Sequence[Device]) -> None:
        self._sizes, self._devices = sizes, devices
        self._known: dict[Type, Type] = {}

    def __call__(self, t: Type) -> Type:
        found = self._known.get(t)
        if found is None:
            found = self._known[t] = self._of(t)
        return found

    def _of(self, t: Type) -> Type:
        if isinstance(t, Tuple):
            return Tuple([self(x) for x in t.types])
        if not isinstance(t, Tensor) or not isinstance(t.device, Mesh):
            return t
        sizes = {axis: self._sizes.get(axis, n) for axis, n in zip(t.device.axes, t.device.sizes, strict=True)}
        count = math.prod([n for axis, n in sizes.items() if axis != TIME])
        mesh = Mesh(self._devices[:count], sizes, t.device.name)
        return Tensor.whole(t.dtype, t.global_shape, mesh, [self._placement(t, p, mesh) for p in t.placements], t.piece)

    def _placement(self, t: Tensor, p: Placement, mesh: Mesh) -> Placement:
        """With as many pieces outside of it as its own axes make now: others change no shape."""
        if p.dim is None or p.outer == 1:
            return p
        outside = [mesh.sizes[k] for outer, _, k in t.subdims[p.dim] if outer < p.outer]
        return p.inside(p.outer).nested(math.prod(outside))
