"""Records of the ops that move values between devices, or change their placements or structure (bundles, calls).

Each op of `ops.collectives` and `ops.comm` has one such record in its definition (`Spec.comm`). Executors, cost models,
checks and lowering use the record, never an op's name; a backend adds only how the op is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from distir.ir.device import Mesh
from distir.ir.placement import Partial, Placement, Replicate, Shard
from distir.ir.type import Tensor, Type

Attrs = Mapping[str, Any]
Coord = tuple[int, ...]
"""A device's index along each mesh axis."""
RuntimeValue = Any
"""A value at run time: an array; on a mesh a list with one array per lane; for a bundle a tuple of these."""
Route = Literal["here", "axis", "send", "scatter", "gather", "outgoing", "incoming"]
"""Between which devices values move:

- "here": between none;
- "axis": all devices along the mesh axis, or axes, that the attribute `axis` names take part, each with its own piece;
- "send": from a device, or from each device of a mesh, to another, or to its counterpart on another mesh;
- "scatter", "gather": from one device to all of a mesh, and back;
- "outgoing", "incoming": one side of a transfer, in the program of a single rank.

All but "here" block: a rank waits for other ranks, at such an op or when it uses the result.
"""
TRANSFERS: frozenset[Route | None] = frozenset(("send", "scatter", "gather"))
"""Routes on which the operand and the result are on different devices."""


class Lanes(Protocol):
    """The interface of an executor to an op's meaning. A lane is a device, or, in an unscheduled program, a device at a
    microbatch."""

    xp: Any
    """The array namespace."""
    unrolled: bool
    """Whether each microbatch is a lane of its own."""

    def of(self, mesh: Mesh) -> Sequence[Coord]:
        """The coordinates of each lane of a mesh."""
        ...

    def whole(self, t: Type, value: RuntimeValue) -> Any:
        """The whole array of a value of type `t`. Raises CopiesError if replicas differ."""
        ...


class Wire(NamedTuple):
    """The traffic among n devices that reduce, gather or pass on S bytes (`size`: the whole on one device).

    `patterns` are the possible algorithms, of which the fastest is taken: "ring", "tree", "in-network" (by switches),
    "pairs" (each sends to each), "next" (each sends to one); between one device and a mesh "serial" (one after the
    other) or "chain" (from device to device), which `sent` and `steps` do not apply to.
    `executor.cost_model.collective_cost` gives seconds.
    """

    patterns: tuple[str, ...]
    sent: Callable[[int], tuple[int, int]] = lambda n: (1, 1)
    """n -> (a, b): a device sends a/b of S bytes."""
    steps: Callable[[int], int] = lambda n: 1
    """n -> the number of consecutive messages."""
    size: Callable[[int, int], int] = max
    """Bytes on one device of the operand and of the result -> S."""
    collective: str | None = None
    """The one of the interconnect benchmark whose traffic it is."""
    share: Callable[[Attrs, int], float] = lambda attrs, n: 1.0
    """(attributes, n) -> the part of S that counts."""


def as_wanted(have: Placement, want: Placement) -> Attrs | None:
    """The attributes of an op that gives any placement of its kind; none from or to a halo."""
    return want.attributes if have.halo is None and want.halo is None else None


class Communication(NamedTuple):
    """See the module; `distir.ir.spec.op` describes the other fields of a definition (`alias`, `donates`, `bundle`)."""

    infer: Callable[..., Sequence[Any]]
    """(attributes, *types) -> types of the results. Raises IRTypeError."""
    meaning: Callable[[Lanes, Any, Sequence[RuntimeValue]], Sequence[RuntimeValue]] | None = None
    """(lanes, op, runtime values of the operands) -> those of the results. None for ops of rank programs only."""
    route: Route = "here"
    takes: tuple[type[Placement], ...] = ()
    """Of an op along an axis: how its operand may be placed there."""
    gives: type[Placement] | None = None
    """How its result is then placed; None: as the operand, or, of an op that takes none, in no way."""
    converts: Callable[[Placement, Placement], Attrs | None] = as_wanted
    """(from, to) -> the attributes, but for the axis, with which the op moves one to the other; None if it cannot."""
    wire: Wire | None = None
    bundles: bool = False
    """Whether it may be done on a bundle, on all members at once."""
    memberwise: bool = False
    """Whether it does to a bundle what it does to each member alone, with the same attributes."""
    unchanged: bool = False
    """Whether each device's array stays as it is."""
    seconds: Callable[[Attrs], float] | None = None
    """The time of an op that is given, not computed."""
    awaits: tuple[int, ...] = ()
    """Operands that are only waited for; their contents are not used."""

    @property
    def sums(self) -> bool:
        """Whether it reduces partial values along an axis."""
        return Partial in self.takes and self.gives is not None

    @property
    def gathers(self) -> bool:
        """Whether it makes a value that is split along an axis whole."""
        return Shard in self.takes and self.gives is Replicate

    @property
    def scatters(self) -> bool:
        """Whether it gives each device a part of a sum."""
        return self.sums and self.gives is Shard

    def idle(self, attrs: Attrs, t: Type) -> bool:
        """Whether the op does nothing: on every device the result is the operand, of type `t`.

        That holds along an axis of one device, and for a sum over microbatches, which is complete when it is used.
        """
        mesh = t.device
        if not self.takes or not isinstance(mesh, Mesh):
            return self.unchanged
        axis = attrs["axis"]
        sums = isinstance(t, Tensor) and mesh.is_time(axis) and t.on(axis).kind is not None
        return sums or mesh.size(axis) == 1
