"""The definition of an op (`Spec`), and the registry of ops. `distir.ops` defines them, one call of `op` each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from distir.ir.attributes import declared
from distir.ir.axes import Factors, Shape, factors
from distir.ir.communication import Communication, Route
from distir.ir.errors import IRTypeError, ModelError, did_you_mean
from distir.ir.placement import MEAN, REPLICATE, SUM, Partial, Placement, Shard, reductions, splits
from distir.ir.type import DType

Attrs = Mapping[str, Any]
LinearSets = tuple[frozenset[int], ...] | str
Indexed = tuple[int, int | None]
"""(slot, dim): the dim that an op counts in, a negative one from the last; None for all dims."""
T = TypeVar("T")


class FactorMapping(NamedTuple):
    """A factor mapping: how every operand and result is placed if one factor of the op is split over an axis.

    Operands are Shard, with a halo where a device needs what its neighbours hold, or Replicate; results may also be
    Partial, where the split factor is reduced, and an operand that is added to such a result.
    """

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]

    @property
    def has_halo(self) -> bool:
        """Whether an operand takes a halo."""
        return any([p.halo is not None for p in self.ins])

    def shifted(self, shift: int) -> FactorMapping:
        """The same with every split shifted by `shift` (see `Shard`)."""
        return FactorMapping(*[tuple([p.shifted(shift) for p in row]) for row in self])

    def nested(self, ways: int) -> FactorMapping:
        """The same with every split within each of `ways` outer parts."""
        return FactorMapping(*[tuple([p.nested(ways) for p in row]) for row in self])

    def splits(self) -> list[tuple[int, Shard]]:
        """The slots that are split (operand k as k, result k as ~k), with their split, without its halo."""
        return [(k, p.plain) for k, p in splits(self.ins)] + [(~k, p.plain) for k, p in splits(self.outs)]


ShardRule = Callable[[Attrs, Sequence[Shape], Sequence[Shape], int, Shard, int], FactorMapping | None]
"""(attributes, global operand shapes, global result shapes, slot, split, n) -> factor mapping; None for a split that is
not allowed. Slot k is operand k, slot ~k result k; the mapping returned must have `split` at that slot."""


class Spec:
    """An op. See `op` for the fields."""

    __slots__ = (
        "addends",
        "alias",
        "attributes",
        "axes",
        "bundle",
        "comm",
        "decompose",
        "definition",
        "donates",
        "dtype",
        "each",
        "eval",
        "exact",
        "grad",
        "gradient",
        "ignored",
        "index",
        "infer",
        "keeps_zero",
        "kernel",
        "linear",
        "local",
        "logits",
        "name",
        "neutral_value",
        "norm",
        "outputs",
        "precision",
        "route",
        "saved",
        "scores",
        "shard",
        "sizes",
        "timed_as",
        "torch",
        "training_only",
        "unpadded",
        "weight",
        "work",
    )

    def __init__(self, name: str, **fields: Any) -> None:
        self.name = name
        self.attributes = declared(fields.pop("attributes", ""))
        self.axes: str | Callable[[Attrs, Sequence[Shape]], str] | None = fields.pop("axes", None)
        self.sizes: Callable[[Attrs, Sequence[Shape]], Mapping[str, int]] | None = fields.pop("sizes", None)
        self.infer: Callable[..., Sequence[Shape]] | None = fields.pop("infer", None)
        self.shard: ShardRule | None = fields.pop("shard", None)
        self.dtype: Callable[..., Sequence[DType]] | None = fields.pop("dtype", None)
        self.comm: Communication | None = fields.pop("comm", None)
        self.route: Route | None = self.comm.route if self.comm is not None else None
        self.linear: LinearSets | Callable[[Attrs], Iterable[Iterable[int]]] = _linear(fields.pop("linear", ()))
        self.eval: Callable[..., Any] | None = fields.pop("eval", None)
        self.grad: Callable[..., Sequence[Any]] | None = fields.pop("grad", None)
        self.decompose: Callable[..., Sequence[Any]] | None = fields.pop("decompose", None)
        self.definition: Callable[..., Sequence[Any] | None] | None = fields.pop("definition", None)
        self.work: Callable[..., tuple[float, float]] | None = fields.pop("work", None)
        self.weight: int | None = fields.pop("weight", None)
        self.neutral_value: float | None = fields.pop("neutral", None)
        self.local: Callable[..., Attrs] | None = fields.pop("local", None)
        self.index: Indexed | Callable[[Attrs], Indexed] | None = fields.pop("index", None)
        self.ignored: str | None = fields.pop("ignored", None)
        self.unpadded: str | None = fields.pop("unpadded", None)
        self.outputs: int | Callable[[Attrs], int] = fields.pop("outputs", 1)
        self.saved: int = fields.pop("saved", 0)
        self.bundle: str | None = fields.pop("bundle", None)
        self.addends: bool = fields.pop("addends", False)
        self.alias: bool = fields.pop("alias", False)
        self.donates: tuple[int, ...] = fields.pop("donates", ())
        self.each: Spec | None = fields.pop("each", None)
        self.gradient: int | None = fields.pop("gradient", None)
        self.precision: str | None = fields.pop("precision", None)
        self.kernel: str | None = fields.pop("kernel", None)
        self.timed_as: str = fields.pop("timed_as", name)
        self.scores: bool = fields.pop("scores", False)
        self.logits: str | None = fields.pop("logits", None)
        self.norm: str | None = fields.pop("norm", None)
        self.exact: bool = fields.pop("exact", False)
        self.keeps_zero: bool = fields.pop("keeps_zero", False)
        self.training_only: bool = fields.pop("training_only", False)
        self.torch: str | None = fields.pop("torch", None)
        if fields:
            raise TypeError(f"op {name}: unknown fields {sorted(fields)}")

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], Spec], tuple[str]]:
        return lookup, (self.name,)

    @property
    def meaning(self) -> Callable[..., Sequence[Any] | None] | None:
        """The rule that expresses the op by simpler ones: its `definition`, or `decompose`; None without."""
        return self.definition or self.decompose

    def count(self, attrs: Attrs) -> int:
        """How many results the op has."""
        return self.outputs(attrs) if callable(self.outputs) else self.outputs

    def rows(self, attrs: Attrs, slots: Sequence[T]) -> list[list[T]]:
        """For an op that repeats another (`each`): the operands of each repetition, the shared ones included."""
        if self.each is None:
            return [list(slots)]
        n, own = attrs["count"], self.each.count(attrs) + 1  # for each result the value before; and the gradient
        return [[*slots[k * own : (k + 1) * own], *slots[n * own :]] for k in range(n)]

    @property
    def accumulates(self) -> bool:
        """Whether it is a communication op that computes with what its device has, and may overwrite an operand."""
        return self.comm is not None and self.route == "here" and bool(self.donates)

    def donated(self, attrs: Attrs, operands: int) -> list[int]:
        """The numbers of the operands whose buffers a result may take over."""
        if self.each is None:
            return [k for k in self.donates if k < operands]
        rows = self.rows(attrs, range(operands))
        return list(dict.fromkeys(row[k] for row in rows for k in self.each.donated(attrs, len(row))))

    def factors(self, attrs: Attrs, shapes: Sequence[Shape]) -> Factors | None:
        """Its factors at these shapes; None without `axes`."""
        if self.axes is None:
            return None
        text = self.axes(attrs, shapes) if callable(self.axes) else self.axes
        return factors(text, shapes, self.sizes(attrs, shapes) if self.sizes else None)

    def shapes(self, attrs: Attrs, shapes: Sequence[Shape]) -> list[Shape]:
        """Result shapes. Raises IRTypeError if the operand shapes do not fit."""
        f = self.factors(attrs, shapes)
        if f is not None:
            return f.out_shapes()
        if self.infer is None:
            raise IRTypeError(f"{self.name} has no shape rule")
        return [tuple(s) for s in self.infer(attrs, *shapes)]

    def linear_sets(self, operands: int, attrs: Attrs | None = None) -> tuple[frozenset[int], ...]:
        """The sets of operands in which the op is jointly linear; where attributes decide, none without them."""
        if isinstance(self.linear, str):
            return (frozenset(range(operands)),)
        if callable(self.linear):
            return () if attrs is None else tuple(frozenset(s) for s in self.linear(attrs))
        return self.linear

    def indexed(self, attrs: Attrs) -> Indexed | None:
        """The (slot, dim) that eval's `start` counts in; None if eval takes no `start`."""
        return self.index(attrs) if callable(self.index) else self.index

    def indexes(self, attrs: Attrs, slot: int, dim: int, rank: int) -> bool:
        """Whether eval's `start` counts in that dim, from 0, of the operand or result of that rank."""
        indexed = self.indexed(attrs)
        if indexed is None or indexed[0] != slot:
            return False
        return indexed[1] is None or indexed[1] % rank == dim

    def mapping(
        self, attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape], slot: int, split: Shard, n: int
    ) -> FactorMapping | None:
        """The factor mapping with `split` over n devices at `slot` (k: operand k, ~k: result k); None without one.

        A shift is the same in the whole mapping: an op does not depend on which device holds which slice. A halo of the
        split is not looked at: the mapping says which one the op needs.
        """
        split = split.plain
        if split.shift:
            found = self.mapping(attrs, ins, outs, slot, split.shifted(0), n)
            return None if found is None or found.has_halo else found.shifted(split.shift)
        shape = ins[slot] if slot >= 0 else outs[~slot]
        if split.dim >= len(shape):
            return None
        f = self.factors(attrs, ins)
        if f is not None:
            found = axes_mapping(f, slot, split)
        else:
            found = self.shard(attrs, ins, outs, slot, split, n) if self.shard else None
        if found is None:
            return None
        for p, s in zip((*found.ins, *found.outs), (*ins, *outs), strict=True):
            if p.dim is not None and (s[p.dim] % (p.outer * n) or max(p.widths) > s[p.dim] // n):
                return None
        return found

    def counted(self, attrs: Attrs, ins: Sequence[Shape], slot: int, split: Shard) -> FactorMapping | None:
        """The factor mapping of a dim of an operand that the op needs whole, but without its padding; None if the op
        does not take its length (`unpadded`)."""
        if self.unpadded is None or slot < 0 or split != Shard(split.dim):
            return None
        f = self.factors(attrs, ins)
        if f is None or not self.indexes(attrs, slot, split.dim, len(ins[slot])):
            return None
        return axes_mapping(f, slot, split, whole=True)

    def neutral(self, mapping: FactorMapping) -> float:
        """The neutral value of an operand where the op reduces along this factor mapping.

        Raises ModelError for a mean, in which there is none.
        """
        if self.neutral_value is not None:
            return self.neutral_value
        if MEAN in mapping.outs:
            raise ModelError(f"{self.name}: in a mean every value counts", "decompose it first")
        return float("-inf") if "max" in reductions(mapping.outs).values() else 0.0

    def flops(self, attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
        """Floating-point operations at these (local) shapes: two a point of a contraction, else one a point.

        Ops that `axes` does not describe are counted by `work`, or as moving data only.
        """
        if self.work is not None:
            return self.work(attrs, ins, outs)[0]
        f = self.factors(attrs, ins)
        if f is None:
            return 0.0
        contracts = len(ins) > 1 and "sum" in f.kinds.values()
        return float(math.prod(f.sizes.values())) * (2 if contracts else 1)


def _linear(sets: Any) -> Any:
    return sets if isinstance(sets, str) or callable(sets) else tuple(frozenset(s) for s in sets)


def axes_mapping(f: Factors, slot: int, split: Shard, whole: bool = False) -> FactorMapping | None:
    """The factor mapping of a factor of `axes`; None if it may not be split. With `whole` it is none that is reduced,
    and every result without it is the same on all devices."""
    name = f.ins[slot][split.dim] if slot >= 0 else f.outs[~slot][split.dim]
    if name is None or (f.kinds.get(name) == "whole") != whole:
        return None
    if any(row.count(name) > 1 for row in (*f.ins, *f.outs)):
        return None
    kind = f.kinds.get(name)
    ins = tuple(_at(row, name, split.outer) for row in f.ins)
    outs: list[Placement] = []
    for row in f.outs:
        if name in row:
            outs.append(_at(row, name, split.outer))
        elif whole:
            outs.append(REPLICATE)
        elif kind is None:
            return None  # not reduced and not there: every device would hold a different result
        else:
            outs.append(Partial(kind))
    return FactorMapping(ins, tuple(outs))


def _at(row: Sequence[str | None], name: str, outer: int) -> Placement:
    return Shard(row.index(name), outer) if name in row else REPLICATE


_registry: dict[str, Spec] = {}
_conversions: dict[tuple[type[Placement], type[Placement]], list[Spec]] = {}
"""The ops along an axis, by the placements that they take and give."""


def op(name: str, **fields: Any) -> Spec:
    """Define an op. Fields, all optional:

    - `attributes`: those it takes, with their kinds (see `distir.ir.attributes`); none without it. Ops with `comm`
      check their own.
    - `axes`: its factors (see `distir.ir.axes`), or a function (attributes, operand shapes) -> text; `sizes`: a
      function (attributes, operand shapes) -> sizes of factors that stand in results only.
    - `infer(attributes, *shapes) -> shapes` and `shard` (a `ShardRule`), for ops that `axes` cannot describe.
    - `dtype(attributes, *dtypes) -> dtypes` of the results; the first operand's without it.
    - `linear`: the sets of operands in which it is jointly linear, "all" of them, or a function attributes -> sets:
      a Partial may pass there, nowhere else.
    - `addends`: the result is the sum of its operands, however many. Where some are Partial, so may all be.
    - `eval(xp, *arrays, **attributes)`: its meaning, on local arrays. `local(attributes, operand types, result types)
      -> attributes` gives the attributes for one device's piece. With `index=(slot, dim)`, or a function of the
      attributes that gives it, eval gets the keyword `start`, the global index at which this device's piece of that
      dim begins (a negative dim counts from the last); with a dim of None a tuple, for all dims. `unpadded` names the
      attribute that says, if that dim is padded, how long it was (of all dims: the shape): no result depends on what is
      beyond, and results that have one such dim are 0 there; `ignored` the one that says which index, in that dim or
      not, counts for nothing.
    - `grad(maker, op, *gradients of the results) -> gradients of the operands`, None where there is none.
    - `decompose(maker, op) -> results`: in ops that can be split. With a `grad` beside it, only if something is split:
      the op itself is faster.
    - `definition(maker, op) -> results`: the simpler ops that define it, for ops into which rewrites fuse several and
      that are not decomposed; None for attributes without a definition. `validate` compares by these definitions (and
      by `decompose`), and checks them against `eval`.
    - `work(attributes, operand shapes, result shapes) -> (FLOP, elements moved)` where `axes` does not give it;
      elements of the first result's size, 0 for all operands and results.
    - `kernel`: the kind of kernel whose speed the cost model takes: "product" (matrix products, convolutions) or
      "attention" (fused); without it, one that is limited by memory.
    - `timed_as`: the op whose measured speeds are its own, too, if one kernel does both.
    - `scores`: it masks scores of attention: runtimes differ in what they fuse it with.
    - `logits`: in a cross-entropy, whether it goes over the logits, operand 0, "forward" or "backward": runtimes differ
      in how many kernels do. `norm`: the same of a root-mean-square norm of operand 0.
    - `weight`: the operand that is a weight where it may be one.
    - `training_only`: an op of training alone; in evaluation result 0 is operand 0.
    - `keeps_zero`: a point is 0 in all results where it is 0 in all operands (linear ops do so anyway).
    - `exact`: it rounds nothing, however it is split: each number of the results is an operand's, maybe negated, a
      given one, a whole one, or infinite.
    - `neutral`: the value of an operand that does not count where it is reduced, if not 0 (a sum) or -inf (a maximum).
    - `outputs`: how many results, a number or a function of the attributes; `saved`: how many of them, the last, are
      saved for the gradient: no gradient flows from them.
    - `gradient`: in an optimizer, the operand that is the gradient; operand 0 is the weight, result 0 its next value.
    - `alias`: the result is a view of operand 0. `donates`: operands whose buffer a result may take over.
    - `each`: the op that this one repeats `count` times at once: the operands of one repetition follow those of
      another, shared ones last; so do results. Types and meaning are those of that op.
    - `precision`: in mixed precision "low", if operands and results are of 16 bits (sums inside it are wider), or
      "wide", if they are float32; without it those of its operands. An attribute `result` is the dtype of results that
      are wider than the operands.
    - `torch`: the name below `torch` of a faster kernel of the same signature.
    - `comm`: the record of an op that changes the devices, placements or structure of values, in place of `axes`,
      `infer`, `shard`, `linear`, `eval` and `work`: see `Communication`. `bundle`: "pack" or "unpack" for the two that
      make and open bundles.
    """
    if name in _registry:
        raise ModelError(f"op {name} is defined twice")
    spec = _registry[name] = Spec(name, **fields)
    if spec.comm is not None:
        for taken in spec.comm.takes:
            _conversions.setdefault((taken, spec.comm.gives or taken), []).append(spec)
    return spec


def lookup(name: str) -> Spec:
    """The op of that name. Raises ModelError, with the nearest names, if there is none."""
    spec = _registry.get(name)
    if spec is None:
        raise ModelError(f"unknown op {name!r}", did_you_mean(name, _registry, most=3))
    return spec


def conversion(have: Placement, want: Placement) -> tuple[Spec, Attrs] | None:
    """The op that moves a value from one placement along an axis to another, and its attributes but for the axis.

    None if no op does so at once.
    """
    for spec in _conversions.get((type(have), type(want)), ()):
        attrs = spec.comm.converts(have, want) if spec.comm is not None else None
        if attrs is not None:
            return spec, attrs
    return None


def all_ops() -> Iterable[Spec]:
    """Every op that is registered."""
    return _registry.values()


def place(
    spec: Spec,
    attrs: Attrs,
    ins: Sequence[Shape],
    outs: Sequence[Shape],
    placements: Sequence[Placement],
    n: int,
    free: Shard | None = None,
) -> tuple[Placement, ...]:
    """The results' placements along one mesh axis of n devices, from the operands'.

    A split operand must agree with a factor mapping, and all others with it; a Partial is accepted only where the op is
    linear, with the other operands replicated. `free` splits a result on a factor that no operand has.

    Raises IRTypeError that names the operand, expected and got.
    """
    slot, shard = next(iter(splits(placements)), (~0, free))
    if shard is None:
        return _place_partial(spec, attrs, placements, len(outs))
    mapping = spec.mapping(attrs, ins, outs, slot, shard, n)
    if mapping is None or (free is not None and mapping.outs[0] is not free):
        what = f"operand {slot} of shape {ins[slot]}" if slot >= 0 else f"result of shape {outs[0]}"
        raise IRTypeError(f"{what} may not be split as {shard} over {n}")
    for k, (want, got) in enumerate(zip(mapping.ins, placements, strict=True)):
        if want is not got:
            split = f"operand {slot} split as {shard}" if slot >= 0 else f"the result split as {shard}"
            raise IRTypeError(f"operand {k}: expected {want}, got {got}, with {split}")
    return mapping.outs


def _place_partial(spec: Spec, attrs: Attrs, placements: Sequence[Placement], results: int) -> tuple[Placement, ...]:
    partial = frozenset(reductions(placements))
    if not partial:
        return (REPLICATE,) * results
    sets = spec.linear_sets(len(placements), attrs)
    kind = placements[min(partial)]
    if partial in sets and kind in (SUM, MEAN) and all(placements[k] is kind for k in partial):
        return (kind,) * results
    where = f"only on all operands of one of {list(map(sorted, sets))}, the others replicated" if sets else "nowhere"
    raise IRTypeError(
        f"operand {min(partial)}: expected {REPLICATE}, got {placements[min(partial)]}: {spec.name} is not linear so "
        f"(a Partial may stand {where})"
    )
