"""What a lower bound needs of a placed program: its ops by phase, and the segments between values that all paths pass.

A segment is the ops between one activation and the next through which everything flows (in a transformer the sums of
the residual stream), and the backward ops of these. A pipeline cut leaves all segments whole but one at each border, so
what is true of every whole segment bounds any cut:

- the streams of a device keep program order, so its compute stream waits inside a segment for collectives whose results
  the segment computes with;
- a segment's last value cannot be ready before its first is, and the ops between have run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from distir.ir.device import AxisNames, Mesh
from distir.ir.function import Function, Op, Value
from distir.ir.host_runtime import Runtime
from distir.ir.type import Tensor
from distir.search.run_ops import RunOp, run_ops
from distir.search.shared_buckets import may_share
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, FREE, PROLOGUE, UPDATE, ends_time, phases
from distir.transforms.roles import weights

COMPUTE = ""
"""The stream of compute; those of collectives are their axes."""


class SegmentOp(NamedTuple):
    """An op of a segment: the number of its kind, the rows of the segment that it needs, and whether it follows from
    the segment's first value."""

    kind: int
    needs: tuple[int, ...]
    follows: bool


class Segment(NamedTuple):
    """Ops in program order. `last` is the row that makes the last value, if the first and last are single values."""

    rows: tuple[SegmentOp, ...]
    last: int | None
    waits: bool
    """Whether no op of another segment stands between its ops."""


class GradientSum(NamedTuple):
    """A sum over microbatches: the shape of a microbatch's part on a device, and the bytes of sum and part."""

    shape: tuple[int, ...]
    bytes: int
    part: int


class Kind(NamedTuple):
    """Ops of equal cost; `run` is one of them. `axis` is that of a collective. A kind that is not `priced` is free."""

    run: RunOp
    axis: AxisNames | None
    priced: bool

    @property
    def op(self) -> Op:
        """One of the ops."""
        return self.run.op


class Reduced(NamedTuple):
    """What is reduced, at least, along the axis of replicas: bytes of all sums over microbatches, of a step, under ZeRO
    2 and 3 of each microbatch; and bytes that ZeRO 3 gathers in each pass."""

    total: int
    gathered: int


@dataclass(frozen=True)
class Profile:
    """A placed program for bounds. `samples` is the size of a microbatch on a device that its types have.

    Bytes are those of one device, of all stages together: of parameters and optimizer state; of parameters as ZeRO 3
    gathers them, by shape (those of several dims, in the least dtype they are used in); of what is `made` once a step
    and used by the backward pass; of the parameters of several dims that this uses `whole`, by shape; and of what is
    saved of one microbatch.
    """

    kinds: list[Kind]
    samples: int
    forward: Mapping[Segment, int]
    backward: Mapping[Segment, int]
    every: Mapping[str, Mapping[int, int]]
    """By phase how often each kind of op occurs."""
    units: Collection[tuple[int, ...]]
    """The kinds of a forward op and of the backward ops that follow it to its stage."""
    sums: Sequence[GradientSum]
    parameters: int
    state: int
    gathered: tuple[tuple[tuple[int, ...], int], ...]
    made: int
    whole: tuple[tuple[tuple[int, ...], int], ...]
    saved: int
    _reduced: dict[tuple[int, int], Reduced] = field(default_factory=dict, repr=False)

    @cached_property
    def axes(self) -> tuple[AxisNames, ...]:
        """The axes along which its ops communicate."""
        return tuple(dict.fromkeys([kind.axis for kind in self.kinds if kind.axis is not None]))

    def reduced(self, dp: int, zero: int) -> Reduced:
        """What is reduced and gathered among `dp` replicas. Under ZeRO 2 and 3 only what is certainly split counts."""
        found = self._reduced.get((dp, zero))
        if found is None:
            split = [x.part for x in self.sums if len(x.shape) > 1 and _divides(x.shape, dp)]
            total = sum(split) if zero > 1 else sum([x.bytes for x in self.sums])
            gathered = sum([n for shape, n in self.gathered if _divides(shape, dp)])
            found = self._reduced[dp, zero] = Reduced(total, gathered)
        return found

    def copied(self, dp: int, zero: int) -> float:
        """The bytes beside a device's share of the weights that the backward pass uses: what is made of weights once a
        step, as in 16 bits; under ZeRO 1 and 2 the other shares of those that it uses whole."""
        if zero == 3:
            return 0.0
        return self.made + (sum([n - n / dp for shape, n in self.whole if _divides(shape, dp)]) if zero else 0.0)


def _divides(shape: Sequence[int], ways: int) -> bool:
    return any([dim % ways == 0 for dim in shape])


class _Kinds:
    def __init__(self) -> None:
        self.found: list[Kind] = []
        self._number: dict[object, int] = {}

    def of(self, run: RunOp, priced: bool) -> int:
        key = run.form, priced
        n = self._number.get(key)
        if n is None:
            n = self._number[key] = len(self.found)
            self.found.append(Kind(run, axis_of(run.op), priced))
        return n


def axis_of(op: Op) -> AxisNames | None:
    """The axis of devices along which an op communicates; None if it does not."""
    mesh = op.inputs[0].type.device if op.inputs and isinstance(op.inputs[0].type, Tensor) else None
    if op.spec.route != "axis" or not isinstance(mesh, Mesh) or mesh.is_time(op.attributes["axis"]):
        return None
    return op.attributes["axis"]


def profile_of(placed: Function, samples: int, bucketed: Collection[str], runtime: Runtime | None) -> Profile:
    """The profile of a program that is placed along axes of weights and inputs and over time, not over replicas;
    reductions along axes that are `bucketed` share buckets."""
    phase = phases(placed)
    as_run = run_ops(placed, runtime and runtime.joins)
    kinds = _Kinds()
    number: dict[Op, int] = {}
    for op in placed.ops:  # what becomes part of another op costs nothing of its own
        run = as_run.get(op)
        number[op] = kinds.of(run or RunOp(op), run is not None and not is_free(run.op))
    forward = [op for op in placed.ops if phase[op] == FORWARD]
    backward = [op for op in placed.ops if phase[op] == BACKWARD]

    def in_segment(ops: Sequence[Op]) -> Mapping[Op, int]:
        shared = may_share(ops, bucketed, False)
        return {op: kinds.of(RunOp(op), False) if op in shared else number[op] for op in ops}

    cores = _cores(placed, forward)
    part: dict[Op | None, int] = {op: j for j, core in enumerate(cores) for op in core.ops}
    every = {
        word: Counter([number[op] for op in placed.ops if phase[op] == word])
        for word in (FORWARD, BACKWARD, PROLOGUE, UPDATE)
    }
    timed = [*forward, *backward]
    return Profile(
        kinds.found,
        samples,
        Counter([_segment(core.ops, in_segment, core.first, core.last, True) for core in cores]),
        Counter(_backward_segments(backward, part, in_segment)),
        every,
        _units(timed, number),
        _sums(placed, timed),
        *_bytes(placed, backward, phase),
        _saved(forward, backward),
    )


def _units(timed: Sequence[Op], number: Mapping[Op, int]) -> set[tuple[int, ...]]:
    follow: dict[Op, list[int]] = {}
    for op in timed:
        follow.setdefault(op.of or op, []).append(number[op])
    return {tuple(kinds) for kinds in follow.values()}


def _sums(function: Function, timed: Sequence[Op]) -> list[GradientSum]:
    made = {v for op in timed for v in op.outputs}
    found: list[GradientSum] = []
    for op in function.ops:
        part = op.inputs[0] if op.spec.comm is not None and ends_time(op) else None
        if part in made and part is not None and isinstance(part.type, Tensor):
            found.append(GradientSum(part.type.shape, op.outputs[0].type.bytes, part.type.bytes))
    return found


def is_free(op: Op) -> bool:
    """Whether an op takes no time: a view, or communication along no axis of devices."""
    return op.spec.alias or (op.spec.comm is not None and axis_of(op) is None)


class _Core(NamedTuple):
    """The forward ops between two values through which everything flows: all depend on `first`, `last` on all."""

    ops: Sequence[Op]
    first: Value
    last: Value


def _cores(function: Function, forward: Sequence[Op]) -> list[_Core]:
    owned = set(weights(function))
    for op in function.ops:
        if not owned.isdisjoint(op.inputs):
            owned.update(op.outputs)
    root = _Roots(forward)
    place = {v: k for k, op in enumerate(forward) for v in op.outputs}
    flows = [v for v in place if v in owned and isinstance(v.type, Tensor) and v.type.moves]
    until = dict.fromkeys([root[v] for v in flows], -1)
    for k, op in enumerate(forward):
        for v in op.inputs:
            if root[v] in until:
                until[root[v]] = k
    change = [0] * (len(forward) + 1)
    for v, last in until.items():
        if v in place and last > place[v]:
            change[place[v]] += 1
            change[last] -= 1
    narrow: list[tuple[int, Value]] = []
    live = 0
    for k, op in enumerate(forward):
        live += change[k]
        if live == 1 and op.spec.comm is None and not op.spec.alias:
            narrow += [(k, v) for v in op.outputs if until.get(v, -1) > k]
    return [_core(forward[a + 1 : b + 1], first, last, root) for (a, first), (b, last) in itertools.pairwise(narrow)]


class _Roots(dict[Value, Value]):
    """The value in whose buffer a value lies, through views."""

    def __init__(self, ops: Iterable[Op]) -> None:
        for op in ops:
            if op.spec.alias and op.inputs:
                self.update(dict.fromkeys(op.outputs, self[op.inputs[0]]))

    def __missing__(self, v: Value) -> Value:
        return v


def _core(ops: Sequence[Op], first: Value, last: Value, root: _Roots) -> _Core:
    after = {first}
    for op in ops:
        if any([root[v] in after or v in after for v in op.inputs]):
            after.update(op.outputs)
    before = {last}
    kept: list[Op] = []
    for op in reversed(ops):
        if not before.isdisjoint(op.outputs) and not after.isdisjoint(op.outputs):
            kept.append(op)
            before.update(op.inputs)
    return _Core(kept[::-1], first, last)


_Numbered = Callable[[Sequence[Op]], Mapping[Op, int]]
"""The kinds of the ops of a segment."""


def _segment(ops: Sequence[Op], numbered: _Numbered, first: Value | None, last: Value | None, waits: bool) -> Segment:
    number = numbered(ops)
    place = {v: k for k, op in enumerate(ops) for v in op.outputs}
    follows: set[Value] = {first} if first is not None else set()
    rows: list[SegmentOp] = []
    for op in ops:
        after = not follows.isdisjoint(op.inputs)
        if after:
            follows.update(op.outputs)
        needs = tuple(dict.fromkeys([place[v] for v in op.inputs if v in place]))
        rows.append(SegmentOp(number[op], needs, after))
    single = first is not None and last in place and last in follows
    return Segment(tuple(rows), place[last] if single and last is not None else None, waits)


def _backward_segments(backward: Sequence[Op], part: Mapping[Op | None, int], numbered: _Numbered) -> list[Segment]:
    """The backward ops of each core, in the order of the cores; of cores whose backward ops alternate together."""
    group = _apart(backward, part)
    mine: dict[int, list[Op]] = {}
    where: dict[Value, int | None] = {}
    given: dict[int, dict[Value, None]] = {}
    """By group the values that its backward ops take from those of others."""
    passed: dict[int, dict[Value, None]] = {}
    foreign: set[int] = set()
    for op in backward:
        j = group.get(part.get(op.of))
        where.update(dict.fromkeys(op.outputs, j))
        if j is not None:
            mine.setdefault(j, []).append(op)
        for v in op.inputs:
            i = where.get(v, j)
            if i == j:
                continue
            if j is not None:
                given.setdefault(j, {})[v] = None
                if i != j + 1:
                    foreign.add(j)
            if i is not None:
                passed.setdefault(i, {})[v] = None
    found: list[Segment] = []
    for j, ops in sorted(mine.items()):
        into, out = list(given.get(j, ())), list(passed.get(j, ()))
        first = into[0] if len(into) == 1 and j not in foreign else None
        last = out[0] if len(out) == 1 else None
        found.append(_segment(ops, numbered, first, last, j not in foreign))
    return found


def _apart(backward: Sequence[Op], part: Mapping[Op | None, int]) -> dict[int | None, int]:
    """By core its group, in the order of the cores: the backward ops of a group stand together, but for some of no
    core."""
    span: dict[int, tuple[int, int]] = {}
    for k, op in enumerate(backward):
        if (j := part.get(op.of)) is not None:
            span[j] = span.get(j, (k, k))[0], k
    groups: list[set[int]] = []
    until = -1
    for j, (begin, end) in sorted(span.items(), key=lambda x: x[1]):
        if begin > until:
            groups.append(set())
        groups[-1].add(j)
        until = max(until, end)
    return {j: k for k, group in enumerate(sorted(groups, key=min)) for j in group}


def made_once(v: Value, maker: Mapping[Value, Op], phase: Mapping[Op, str]) -> tuple[Value | None, Value | None]:
    """The value of the prologue in whose buffer a value lies, and the input that it is made of; None without one."""
    root: Value | None = None
    inside = True
    while (op := maker.get(v)) is not None:
        if phase[op] not in (FREE, PROLOGUE) or len(op.inputs) != 1:
            return root, None
        if phase[op] == PROLOGUE and inside and not op.spec.alias:
            root = v
        inside = inside and op.spec.alias
        v = op.inputs[0]
    return root, v


_ByShape = tuple[tuple[tuple[int, ...], int], ...]


def _bytes(
    function: Function, backward: Sequence[Op], phase: Mapping[Op, str]
) -> tuple[int, int, _ByShape, int, _ByShape]:
    """Bytes on one device: see `Profile`."""
    maker = {v: op for op in function.ops for v in op.outputs}
    found = [made_once(v, maker, phase) for v in dict.fromkeys([v for op in backward for v in op.inputs])]
    made = {root for root, _ in found if root is not None}
    direct = {v for root, v in found if root is None and v is not None and v.kind == "parameter"}
    owned = {v: v.type.bytes for v in function.inputs if v.kind == "parameter"}
    state = sum([v.type.bytes for v in function.inputs if v.kind == "state"])
    least = dict(owned)
    for op in function.ops:
        for v in op.inputs:
            if v in least and len(op.inputs) == 1:
                least[v] = min(least[v], op.outputs[0].type.bytes)
    by_shape, whole = _by_shape(least.items()), _by_shape([(v, owned[v]) for v in direct])
    return sum(owned.values()), state, by_shape, sum([v.type.bytes for v in made]), whole


def _by_shape(sizes: Iterable[tuple[Value, int]]) -> _ByShape:
    """Bytes by shape, of values of several dims."""
    found: Counter[tuple[int, ...]] = Counter()
    for v, n in sizes:
        if isinstance(v.type, Tensor) and len(v.type.shape) > 1:
            found[v.type.shape] += n
    return tuple(found.items())


def _saved(forward: Sequence[Op], backward: Sequence[Op]) -> int:
    """Bytes that a device keeps of a microbatch between its forward and its backward pass."""
    root = _Roots(forward)
    made = {v for op in forward for v in op.outputs}
    kept = dict.fromkeys([root[v] for op in backward for v in op.inputs if v in made])
    return sum([v.type.bytes for v in kept if v in made and isinstance(v.type, Tensor) and v.type.moves])
