"""Collectives: the devices along one mesh axis exchange pieces of a value, which changes its placement.

All-reduce, all-gather and reduce-scatter also take several axes, which count as one, the first varying slowest; and a
bundle of tensors of one mesh and dtype, on which they operate at once: `dim` and `outer` are then tuples with an entry
per member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distir.ir.communication import Communication, Coord, Lanes, RuntimeValue, Wire, as_wanted
from distir.ir.device import AxisNames
from distir.ir.errors import IRTypeError
from distir.ir.function import Op
from distir.ir.placement import Array
from distir.ir.spec import Attrs, op
from distir.ir.type import REPLICATE, SUM, Partial, Placement, Replicate, Shard, Tensor, Tuple, Type

# --- types


def _expect(t: Type, axis: AxisNames, takes: tuple[type[Placement], ...], halo: bool = False) -> Tensor:
    if not isinstance(t, Tensor):
        raise IRTypeError(f"operand 0: expected a tensor, got {t}")
    if (t.on(axis).halo is not None) != halo:
        raise IRTypeError(f"operand 0: expected {'a' if halo else 'no'} halo along {axis!r}, got {t.on(axis)} in {t}")
    if not isinstance(t.on(axis), takes):
        names = " or ".join([kind.__name__ for kind in takes])
        raise IRTypeError(f"operand 0: expected {names} along {axis!r}, got {t.on(axis)} in {t}")
    return t


def _timed(t: Tensor, axis: AxisNames) -> bool:
    if not isinstance(axis, str) and any([t.mesh.is_time(a) for a in axis]):
        raise IRTypeError(f"attribute axis: expected axes of devices, got {axis}")
    return t.mesh.is_time(axis)


To = Callable[[Attrs, Placement, int], Placement]
"""(attributes, the operand's placement, devices along the axis) -> the result's. Raises IRTypeError."""


def _rule(takes: tuple[type[Placement], ...], to: To, over_time: bool) -> Callable[[Attrs, Type], Tensor]:
    """The type rule for a tensor. `over_time`: the time axis is allowed too, for a value of all microbatches."""

    def typed(attrs: Attrs, t: Type) -> Tensor:
        axis = attrs["axis"]
        t = _expect(t, axis, takes)
        n = t.mesh.size(axis)
        timed = _timed(t, axis)
        if timed and (not over_time or t.piece not in (None, (0, n))):
            want = f"all microbatches {(0, n)}" if over_time else "a placement over devices, not over microbatches"
            raise IRTypeError(f"operand 0: expected {want}, got {t}")
        return t.placed(axis, to(attrs, t.on(axis), n), None if timed else t.piece)

    return typed


def _single(rule: Callable[[Attrs, Type], Tensor]) -> Callable[[Attrs, Type], list[Type]]:
    return lambda attrs, t: [rule(attrs, t)]


def _bundled(rule: Callable[[Attrs, Type], Tensor]) -> Callable[[Attrs, Type], list[Type]]:
    """Extend the rule for a tensor to bundles, member by member."""

    def typed(attrs: Attrs, t: Type) -> list[Type]:
        if not isinstance(t, Tuple):
            return [rule(attrs, t)]
        _check_bundle(attrs, t)
        return [Tuple([rule(_member_attributes(attrs, k), x) for k, x in enumerate(t.types)])]

    return typed


def _member_attributes(attrs: Attrs, k: int) -> Attrs:
    """The attributes of a collective on a bundle for member number k."""
    return {name: x[k] if isinstance(x, tuple) and name != "axis" else x for name, x in attrs.items()}


def _check_bundle(attrs: Attrs, t: Tuple) -> None:
    """Raises IRTypeError unless the members can be communicated at once."""
    if not t.types:
        raise IRTypeError("operand 0: expected a non-empty bundle")
    first = t.types[0]
    for x in t.types:
        if not isinstance(x, Tensor) or not isinstance(first, Tensor):
            raise IRTypeError(f"operand 0: expected a bundle of tensors, got {t}")
        if _timed(x, attrs["axis"]):
            raise IRTypeError(f"operand 0: microbatches are not summed or gathered in bundles, got {x}")
        alike = x.dtype is first.dtype and x.device is first.device and x.piece == first.piece
        if not alike or x.on(attrs["axis"]).form != first.on(attrs["axis"]).form:
            raise IRTypeError(f"operand 0: expected members of one dtype, mesh and reduction, got {first} and {x}")
    for name, x in attrs.items():
        if isinstance(x, tuple) and name != "axis" and len(x) != len(t.types):
            raise IRTypeError(f"attribute {name}: expected {len(t.types)} entries, got {len(x)}")


def _replicated(attrs: Attrs, p: Placement, n: int) -> Placement:
    return REPLICATE


def _split(attrs: Attrs, p: Placement, n: int) -> Shard:
    return Shard(attrs["dim"], attrs.get("outer", 1), attrs.get("shift", 0))


_gather_bundle = _bundled(_rule((Shard,), _replicated, over_time=False))
_gather = _rule((Shard,), _replicated, over_time=True)


def _allgather(attrs: Attrs, *types: Type) -> list[Type]:
    """Along the time axis of a scheduled program the operands are the microbatches, in order."""
    axis = attrs["axis"]
    if len(types) == 1 and isinstance(types[0], Tuple):
        return _gather_bundle(attrs, types[0])
    first = _expect(types[0], axis, (Shard,))
    if len(types) == 1 and (first.piece is None or not _timed(first, axis)):
        return [_gather(attrs, first)]
    want = [first.placed(axis, first.on(axis), (k, k + 1)) for k in range(first.mesh.size(axis))]
    if not _timed(first, axis) or list(types) != want:
        raise IRTypeError(f"expected the {len(want)} microbatches in order, got {', '.join(map(repr, types))}")
    return [first.placed(axis, REPLICATE)]


def _split_anew(attrs: Attrs, p: Placement, n: int) -> Shard:
    if p.dim == attrs["dim"]:
        raise IRTypeError(f"operand 0: expected a split of another dim than {attrs['dim']}, got {p}")
    return Shard(attrs["dim"], attrs.get("outer", 1), p.shift)


def _other_dim(have: Placement, want: Placement) -> Attrs | None:
    halo = have.halo is not None or want.halo is not None
    return None if halo or have.dim == want.dim or have.shift != want.shift else want.shifted(0).attributes


# --- meaning on arrays

Moved = Callable[[Attrs, Sequence[Array], Tensor, Tensor, Sequence[Coord], Any], list[Array]]
"""(attributes, each lane's array, the operand's type, the result's, the lanes' coordinates, array namespace) -> each
lane's array of the result."""


def rearranged(
    attrs: Attrs, xs: Sequence[Array], before: Tensor, after: Tensor, where: Sequence[Coord], xp: Any
) -> list[Array]:
    """Join the pieces of each group of devices by the operand's placement, and cut them by the result's."""
    mesh, axis = before.mesh, attrs["axis"]
    at, n, p, q = mesh.positions(axis), mesh.size(axis), before.local(axis), after.local(axis)
    groups: dict[Coord, dict[int, Array]] = {}
    places: list[tuple[Coord, int]] = []
    """Of each lane its group, and its index in it."""
    for x, coord in zip(xs, where, strict=True):
        index = 0
        for i in at:
            index = index * mesh.sizes[i] + coord[i]
        places.append((tuple([c for i, c in enumerate(coord) if i not in at]), index))
        groups.setdefault(places[-1][0], {})[index] = x
    wholes: dict[Coord, Array] = {}
    if p is not REPLICATE:
        wholes = {key: p.join([pieces[k] for k in sorted(pieces)], xp) for key, pieces in groups.items()}
    return [q.cut(wholes.get(key, x), index, n) for x, (key, index) in zip(xs, places, strict=True)]


def _meaning(moved: Moved) -> Callable[[Lanes, Op, Sequence[RuntimeValue]], Sequence[RuntimeValue]]:
    """The meaning of a collective, from its effect on the arrays of all lanes."""

    def meaning(lanes: Lanes, op: Op, ins: Sequence[RuntimeValue]) -> Sequence[RuntimeValue]:
        attrs, before, after = op.attributes, op.inputs[0].type, op.outputs[0].type
        if isinstance(before, Tuple) and isinstance(after, Tuple):
            pairs = zip(before.types, after.types, strict=True)
            typed = [(b, a) for b, a in pairs if isinstance(b, Tensor) and isinstance(a, Tensor)]
            rows = zip(ins[0], typed, strict=True)
            return [tuple([moved(attrs, x, b, a, lanes.of(b.mesh), lanes.xp) for x, (b, a) in rows])]
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            raise IRTypeError(f"expected tensors, got {op}")
        p = before.on(attrs["axis"])
        if _timed(before, attrs["axis"]) and not lanes.unrolled and p is not REPLICATE:
            if p.kind is not None:
                return ins[:1]  # the sum is complete: it was accumulated
            p = before.local(attrs["axis"])
            return [[p.join(pieces, lanes.xp) for pieces in zip(*ins, strict=True)]]
        return [moved(attrs, ins[0], before, after, lanes.of(before.mesh), lanes.xp)]

    return meaning


def _parts(n: int) -> tuple[int, int]:
    """The share of the data that a device sends: all except its own part, as (numerator, denominator)."""
    return n - 1, n


def _along(
    takes: type[Placement],
    gives: type[Placement],
    to: To,
    wire: Wire | None = None,
    bundles: bool = False,
    infer: Callable[..., list[Type]] | None = None,
    converts: Callable[[Placement, Placement], Attrs | None] = as_wanted,
) -> Communication:
    """A collective that joins pieces along an axis and cuts them again. Along time only to or from Replicate."""
    rule = _rule((takes,), to, over_time=Replicate in (takes, gives))
    return Communication(
        infer=infer or (_bundled(rule) if bundles else _single(rule)),
        meaning=_meaning(rearranged),
        route="here" if wire is None else "axis",
        takes=(takes,),
        gives=gives,
        converts=converts,
        wire=wire,
        bundles=bundles,
        memberwise=bundles and gives is Replicate,  # there is no attribute for each member
    )


# --- the ops

_RING = Wire(("ring",), sent=_parts, steps=lambda n: n - 1)
_REDUCED = Wire(
    ("ring", "tree", "in-network"),
    sent=lambda n: (2 * (n - 1), n),
    steps=lambda n: 2 * (n - 1),
    collective="all-reduce",
)

op(
    "MPIAllreduce",
    attributes="axis:mesh-axis",
    comm=_along(Partial, Replicate, _replicated, _REDUCED, bundles=True),
    donates=(0,),
)
op(
    "MPIAllgather",
    attributes="axis:mesh-axis",
    comm=_along(Shard, Replicate, _replicated, _RING._replace(collective="all-gather"), bundles=True, infer=_allgather),
)
op(
    "MPIReduceScatter",
    attributes="axis:mesh-axis dim:split outer:split?",
    comm=_along(Partial, Shard, _split, _RING._replace(collective="reduce-scatter"), bundles=True),
)
op(
    "MPIAlltoall",
    attributes="axis:text dim:split outer:split?",
    comm=_along(
        Shard,
        Shard,
        _split_anew,
        Wire(("pairs",), sent=_parts, steps=lambda n: n - 1, collective="all-to-all"),
        converts=_other_dim,
    ),
)


def _permuted(attrs: Attrs, p: Placement, n: int) -> Placement:
    """A Partial stays the same sum; the pieces of a Shard are then `shift` devices further along the axis."""
    shift = attrs.get("shift", 1)
    if n > 1 and shift % n == 0:
        raise IRTypeError(f"attribute shift: expected no multiple of the axis's size {n}, got {shift}")
    return p.shifted((p.shift + shift) % n)


def _passed_on(
    attrs: Attrs, xs: Sequence[Array], before: Tensor, after: Tensor, where: Sequence[Coord], xp: Any
) -> list[Array]:
    a, shift, pieces = before.mesh.position(attrs["axis"]), attrs.get("shift", 1), dict(zip(where, xs, strict=True))
    n = before.mesh.sizes[a]
    return [pieces[(*coord[:a], (coord[a] - shift) % n, *coord[a + 1 :])] for coord in where]


def _further_on(have: Placement, want: Placement) -> Attrs | None:
    return {"shift": want.shift - have.shift} if have.shifted(0) is want.shifted(0) else None


op(
    "MPIPermute",
    attributes="axis:text shift:int?",
    comm=Communication(
        infer=_single(_rule((Shard, Partial), _permuted, over_time=False)),
        meaning=_meaning(_passed_on),
        route="axis",
        takes=(Shard, Partial),
        converts=_further_on,
        wire=Wire(("next",), collective="send-recv"),
    ),
)
"""Each device sends its piece to the device `shift` positions further (default 1, may be negative), cyclically."""


def _with_halo(attrs: Attrs, t: Type) -> list[Type]:
    """From the neighbours along an axis. Along other axes the operand may have a halo: it is sent, too."""
    t = _expect(t, attrs["axis"], (Shard,))
    p = t.on(attrs["axis"])
    if p.dim is None or attrs["lo"] + attrs["hi"] == 0:
        raise IRTypeError(f"attributes lo, hi: expected one above 0, got {attrs['lo']} and {attrs['hi']}")
    return [t.placed(attrs["axis"], p.with_halo(attrs["lo"], attrs["hi"], attrs.get("fill", 0.0)), t.piece)]


def _halo_wanted(have: Placement, want: Placement) -> Attrs | None:
    if have.halo is not None or want.halo is None or have is not want.plain:
        return None
    lo, hi, fill = want.halo
    return {"lo": lo, "hi": hi, "fill": fill} if fill else {"lo": lo, "hi": hi}


def _of_a_neighbour(attrs: Attrs, n: int) -> float:
    """Of both sides' elements those that a device moves: of two devices each has one neighbour."""
    lo, hi = attrs["lo"], attrs["hi"]
    return max(lo, hi) / (lo + hi) if n == 2 else 1.0


def _without_halo(attrs: Attrs, t: Type) -> list[Type]:
    t = _expect(t, attrs["axis"], (Shard,), halo=True)
    return [t.placed(attrs["axis"], t.on(attrs["axis"]).plain, t.piece)]


op(
    "HaloExchange",
    attributes="axis:text lo:size hi:size fill:number?",
    comm=Communication(
        infer=_with_halo,
        meaning=_meaning(rearranged),
        route="axis",
        takes=(Shard,),
        gives=Shard,
        converts=_halo_wanted,
        wire=Wire(  # from both sides at a time
            ("next",),
            share=_of_a_neighbour,
            size=lambda before, after: after - before,
            collective="send-recv",
        ),
    ),
)
"""Each device receives the `lo` elements before its slice and the `hi` after it from its neighbours; those at the ends
of the line get `fill`."""

op(
    "HaloCut",
    attributes="axis:text",
    comm=Communication(
        infer=_without_halo,
        meaning=_meaning(rearranged),
        takes=(Shard,),
        gives=Shard,
        converts=lambda have, want: {} if have.halo is not None and want is have.plain else None,
    ),
    alias=True,
)
"""The slice of each device without its halo."""

op(
    "LocalSlice",
    attributes="axis:text dim:split outer:split? shift:size?",
    comm=_along(Replicate, Shard, _split),
    alias=True,
)


def _first_keeps(
    attrs: Attrs, xs: Sequence[Array], before: Tensor, after: Tensor, where: Sequence[Coord], xp: Any
) -> list[Array]:
    """What is whole, on the first device of each group; zeros on the others."""
    a = before.mesh.position(attrs["axis"])
    return [x if coord[a] == 0 else xp.zeros_like(x) for x, coord in zip(xs, where, strict=True)]


op(
    "LocalTerm",
    attributes="axis:text",
    comm=Communication(
        infer=_single(_rule((Replicate,), lambda attrs, p, n: SUM, over_time=False)),
        meaning=_meaning(_first_keeps),
        route="here",
        takes=(Replicate,),
        gives=Partial,
        converts=lambda have, want: {} if want is SUM else None,
    ),
)
"""A replicated value as the terms of a sum along the axis: the value on the first device, zeros on the others."""
