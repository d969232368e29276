"""The space of plans: every combination of the settings that vary, but those that a rule leaves out.

A `Candidate` is a few numbers; its `Plan` is made when it is needed. `RULES` leave out what equals another candidate,
is dominated by one, by construction, or cannot be applied; each says why. Which further axes there are, context and
expert parallelism, `model_axes` finds in the program.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from distir.api.interop.plan_settings import CONTEXT, EXPERTS
from distir.ir.errors import InfeasibleError, UsageError
from distir.ir.function import Function
from distir.ir.topology import Topology, regular_group
from distir.ops.rules import shape_of
from distir.search.model_axes import ModelAxis, model_axes
from distir.transforms.pipeline.recompute import WORDS
from distir.transforms.plan import InputSplit, Plan, default_order
from distir.transforms.roles import weights

FURTHER = (CONTEXT, EXPERTS)
"""Axes that there are only where the model has their dims."""
SETTINGS = (
    "dp", "tp", "pp", *FURTHER,
    "microbatch", "schedule", "chunks", "zero", "recompute", "sequence_parallel", "order",
)  # fmt: skip
"""What may vary, by name; `microbatch` is the number of samples of one on a device."""
_LEAST_PART = 8192
"""The fewest tokens of a sequence on a device where context parallelism is not asked for: Llama 3 405B was trained so,
16 devices for 131,072 tokens (Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 4)."""
_CHUNKS = 8
"""The most stages of a pipeline rank."""
USUAL: Mapping[str, Sequence[Any]] = {
    "schedule": ("1f1b", "interleaved", "gpipe"),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "sequence_parallel": (False, True),
}
"""The values that settings take where they vary and are not fixed; those of the others follow from the model."""


class Candidate(NamedTuple):
    """A plan of the space: the fields of `Plan`, but with the samples of a microbatch on a device. `order` names all
    axes, also those of `split`: "cp" and "ep"."""

    dp: int
    tp: int
    pp: int
    microbatch: int
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    order: tuple[str, ...] = default_order()
    split: tuple[InputSplit, ...] = ()

    @property
    def cp(self) -> int:
        """The devices along the axis of context parallelism."""
        return self._along(CONTEXT)

    @property
    def ep(self) -> int:
        """The devices along the axis of expert parallelism."""
        return self._along(EXPERTS)

    def _along(self, axis: str) -> int:
        return next((x.size for x in self.split if x.axis == axis), 1) if self.split else 1

    @property
    def devices(self) -> int:
        return self.owners * self.tp * self.pp

    @property
    def owners(self) -> int:
        """The devices over which ZeRO splits state, at most: the replicas, and those along further axes."""
        return self.dp * math.prod([x.size for x in self.split])

    @property
    def owners_of_sums(self) -> int:
        """The devices over which ZeRO splits sums of gradients over microbatches, at most. ZeRO 1 may do so along
        further axes, such as those of experts along that of context parallelism."""
        return {0: 1, 1: self.owners // self.dp}.get(self.zero, self.owners)

    @property
    def shards(self) -> int:
        """How many devices of a stage share a sample: those of a replica, but along the axis of experts each has its
        own."""
        return self.tp * self.cp

    def microbatches(self, batch: int) -> int:
        """How many microbatches a batch is: experts' devices have samples of their own, as replicas have."""
        return batch // (self.dp * self.ep * self.microbatch)

    def plan(self, batch: int) -> Plan:
        """The plan, for a batch of so many samples."""
        given = self._asdict()
        del given["microbatch"]
        return Plan(microbatches=self.microbatches(batch), **given)


class Rule(NamedTuple):
    """What is left out of the space, and why. `drops` is given a candidate and the samples of a batch. `free`: the
    settings that must not be fixed, for the candidate that is as good to be there."""

    drops: Callable[[Candidate, int], bool]
    reason: str
    free: tuple[str, ...] = ()


RULES: tuple[Rule, ...] = (
    Rule(
        lambda c, batch: c.zero > 0 and c.owners == 1,
        "ZeRO splits among replicas and context parallelism's devices: without any it is the same program",
    ),
    Rule(
        lambda c, batch: c.sequence_parallel and c.tp == 1,
        "sequence parallelism is along the axis of tensor parallelism: without one there is none",
    ),
    Rule(
        lambda c, batch: c.zero == 2 and c.pp == 1 and c.microbatches(batch) == 1,
        "with one microbatch on one pipeline rank ZeRO 2 is ZeRO 1",
        ("zero",),
    ),
    Rule(
        lambda c, batch: c.schedule != "1f1b" and c.pp == 1,
        "on one pipeline rank 1f1b saves the least: of other schedules only the pieces of gradients' sums would differ",
        ("schedule",),
    ),
    Rule(
        lambda c, batch: c.schedule == "gpipe" and c.microbatches(batch) == 1,
        "with one microbatch gpipe is 1f1b",
        ("schedule",),
    ),
    Rule(
        lambda c, batch: (c.schedule == "interleaved") != (c.chunks > 1),
        "interleaved with one chunk is 1f1b, and other schedules have one",
        ("schedule",),
    ),
    Rule(
        lambda c, batch: math.gcd(c.cp, c.microbatch) > 1,
        "more replicas with fewer samples a microbatch do what context parallelism does, and gather no keys and values",
        ("dp", CONTEXT, "microbatch"),
    ),
)


_SAME_NODES = "another order of the axes puts equal groups of devices into the nodes"


class Space(NamedTuple):
    """The candidates; how many each rule left out, by its reason; the axes that might vary, too; the settings of the
    model that do not vary."""

    candidates: list[Candidate]
    left_out: Mapping[str, int]
    unused: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


def space(
    function: Function,
    batch: int,
    gpus: int,
    topology: Topology,
    vary: Sequence[str] | None = None,
    fix: Mapping[str, Any] | None = None,
) -> Space:
    """All candidates for a training step of `batch` samples on `gpus` devices.

    Settings not in `vary` have the default of `Plan` (a microbatch is then all the samples that a replica has), those
    in `fix` that value. Without `vary` all of them vary, but sequences are split only into parts of at least 8,192
    tokens. Raises UsageError for an unknown setting or value, or an axis that the model does not have,
    InfeasibleError where there is no candidate.
    """
    fix = dict(fix or {})
    _check_settings(vary or (), fix)
    axes = model_axes(function)
    _check_axes(axes, vary or (), fix)
    given = SETTINGS if vary is None else vary
    varied = [name for name in given if name not in fix]
    free = [name for name in (*varied, "microbatch") if name not in fix]
    repeats, most = repeated(function), len(function.ops)  # no pipeline rank is without an op

    def combined(fix: Mapping[str, Any], given: Sequence[str]) -> Iterator[Candidate]:
        varied = [name for name in given if name not in fix]
        splits = _splits(axes, gpus, varied, fix, _LEAST_PART if vary is None else 1)
        return _combinations(batch, _factors(gpus, varied, fix, splits, most), varied, fix, repeats)

    orders: dict[object, list[tuple[str, ...]]] = {}
    found: list[Candidate] = []
    dropped: Counter[str] = Counter()
    for c in combined(fix, given):
        rule = next(
            (rule for rule in RULES if rule.drops(c, batch) and all([name in free for name in rule.free])), None
        )
        if rule is not None:
            dropped[rule.reason] += 1
            continue
        key = c[:3], c.split
        if key not in orders:
            orders[key] = _orders(c, topology) if "order" in varied else [_in_order(c, fix.get("order", ()))]
        if "order" in varied:
            dropped[_SAME_NODES] += math.factorial(len(c.order)) - len(orders[key])
        found += [c._replace(order=order) for order in orders[key]]
    if not found:
        ways = [f"without {name}" for name in fix if any(combined({k: x for k, x in fix.items() if k != name}, given))]
        idle = [name for name in ("dp", "tp", "pp") if name not in given and name not in fix]
        ways += [f"let {name} vary" for name in idle if any(combined(fix, (*given, name)))]
        raise _nothing(batch, gpus, fix, dropped, " or ".join(ways))
    held = [name for name in SETTINGS if name not in varied and (name not in FURTHER or name in axes)]
    unused = [name for name in axes if all([not c.split for c in found])]
    return Space(found, dict(dropped), tuple(unused), tuple(held))


_Degrees = tuple[int, int, int, tuple[InputSplit, ...]]
"""dp, tp, pp and the further axes."""


def _combinations(
    batch: int, degrees: Sequence[_Degrees], varied: Sequence[str], fix: Mapping[str, Any], repeats: int
) -> Iterator[Candidate]:
    def values(name: str) -> Sequence[Any]:
        if name in fix:
            return (fix[name],)
        return USUAL[name] if name in varied else (USUAL[name][0],)

    for dp, tp, pp, split in degrees:
        usual = default_order([x.axis for x in split])
        start = Candidate(dp, tp, pp, 1, order=usual, split=split)
        pieces = dp * start.ep
        if batch % pieces:
            continue
        sizes = divisors(batch // pieces) if "microbatch" in varied else [batch // pieces]
        for microbatch in [fix["microbatch"]] if "microbatch" in fix else sizes:
            if batch // pieces % microbatch:
                continue
            rows = itertools.product(*[values(name) for name in ("schedule", "zero", "recompute", "sequence_parallel")])
            for schedule, zero, recompute, sequence in rows:
                c = Candidate(dp, tp, pp, microbatch, schedule, 1, zero, recompute, sequence, usual, split)
                if schedule != "interleaved":
                    if fix.get("chunks", 1) == 1:
                        yield c
                elif c.microbatches(batch) % pp == 0:
                    chunks = [fix["chunks"]] if "chunks" in fix else _chunks(pp, repeats, "chunks" in varied)
                    yield from [c._replace(chunks=n) for n in chunks]


def _factors(
    gpus: int, varied: Sequence[str], fix: Mapping[str, Any], splits: Sequence[tuple[InputSplit, ...]], most: int
) -> list[_Degrees]:
    """The degrees whose product is the number of devices, with `most` pipeline ranks at most."""
    found: list[_Degrees] = []
    for split in splits:
        rest = gpus // math.prod([x.size for x in split])
        found += [(rest // (tp * pp), tp, pp, split) for tp in divisors(rest) for pp in divisors(rest // tp)]
    found = [row for row in found if row[2] <= most]
    for k, name in enumerate(("dp", "tp", "pp")):
        if name in fix:
            found = [row for row in found if row[k] == fix[name]]
        elif name not in varied:
            found = [row for row in found if row[k] == 1]
    return found


def _splits(
    axes: Mapping[str, ModelAxis], gpus: int, varied: Sequence[str], fix: Mapping[str, Any], least: int
) -> list[tuple[InputSplit, ...]]:
    """The further axes of more than one device, in all combinations; the first has none. Sequences are split into parts
    of at least so many tokens."""
    choices: list[list[InputSplit | None]] = []
    for name, axis in axes.items():
        if name in fix:
            sizes = [fix[name]] if gpus % fix[name] == 0 else []
        else:
            sizes = divisors(math.gcd(gpus, axis.size)) if name in varied else [1]
            if name == CONTEXT:
                sizes = [n for n in sizes if n == 1 or axis.size // n >= least]
        choices.append([axis.split(n) if n > 1 else None for n in sizes])
    rows = [tuple([x for x in row if x is not None]) for row in itertools.product(*choices)]
    return [row for row in rows if gpus % math.prod([x.size for x in row]) == 0]


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    low = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return low + [n // k for k in reversed(low) if k * k != n]


def _chunks(pp: int, repeats: int, varied: bool) -> list[int]:
    """How many stages a pipeline rank may have: so that each has as many of the repeated blocks."""
    if not varied or repeats % pp:
        return [2] if 2 * pp <= max(repeats, 2 * pp if not varied else 0) else []
    return [n for n in divisors(repeats // pp) if 1 < n <= _CHUNKS]


def repeated(function: Function) -> int:
    """How many blocks a model has that are alike, as its matrices of equal shapes say; 1 if none are."""
    shapes = Counter([shape_of(v) for v in weights(function) if v.kind != "state" and len(shape_of(v)) > 1])
    return math.gcd(*[n for n in shapes.values() if n > 1]) or 1


def _orders(c: Candidate, topology: Topology) -> list[tuple[str, ...]]:
    """The orders of the axes that differ in which devices share a node, the default first."""
    usual = c.order
    r = topology.uniform
    if r is not None and not r.near and c.devices <= r.per_node:
        return [usual]
    if r is not None and (r.near or r.rail_link is not None):
        r = None  # it matters which devices are neighbours: in a node, or on which rails
    seen: set[object] = set()
    found: list[tuple[str, ...]] = []
    for order in sorted(itertools.permutations(usual), key=lambda order: order != usual):
        key = (
            tuple([name for name in order if getattr(c, name) > 1])
            if r is None
            else tuple([_groups(c, topology, order, axis) for axis in usual])
        )
        if key not in seen:
            seen.add(key)
            found.append(order)
    return found


def _in_order(c: Candidate, given: Sequence[str]) -> tuple[str, ...]:
    """The order given, of the axes that a candidate has; further axes that it does not name come after tp."""
    if not given:
        return c.order
    named = [name for name in given if name in c.order or name not in FURTHER]
    missing = [name for name in [x.axis for x in c.split] if name not in named]
    k = named.index("tp") + 1 if "tp" in named else 0
    return (*named[:k], *missing, *named[k:])


def starts(c: Candidate, order: Sequence[str], axes: Sequence[str], modulo: int) -> list[int]:
    """The numbers, modulo the devices of a node, of the first devices of all groups along axes."""
    found = {0}
    for name in order:
        if name not in axes:
            spacing, size = spacing_of(c, order, name), min(getattr(c, name), modulo)
            found = {(d + k * spacing) % modulo for d in found for k in range(size)}
    return sorted(found)


def spacing_of(c: Candidate, order: Sequence[str], axis: str) -> int:
    """The difference between the numbers of neighbours along an axis."""
    return math.prod([getattr(c, name) for name in order[: order.index(axis)]])


def _groups(c: Candidate, topology: Topology, order: Sequence[str], axis: str) -> object:
    """The groups of devices along an axis, up to which nodes they are on."""
    r = topology.uniform
    if r is None or getattr(c, axis) == 1:
        return None
    spacing, size = spacing_of(c, order, axis), getattr(c, axis)
    reach = size * spacing
    return frozenset([regular_group(r, range(d, d + reach, spacing)) for d in starts(c, order, (axis,), r.per_node)])


def _check_settings(vary: Sequence[str], fix: Mapping[str, Any]) -> None:
    if isinstance(vary, str):  # a sequence of letters
        raise UsageError(f"vary is a list of settings, got {vary!r}", f"such as [{vary!r}]")
    for name in (*vary, *fix):
        if name not in SETTINGS:
            raise UsageError(f"{name!r} does not vary between plans", f"settings are {', '.join(SETTINGS)}")
    for name in ("dp", "tp", "pp", *FURTHER, "microbatch", "chunks"):
        if name in fix and not (type(fix[name]) is int and fix[name] >= 1):
            raise UsageError(f"{name} is a whole number of at least 1, got {fix[name]!r}")
    for name, words in {**USUAL, "recompute": WORDS}.items():
        if name in fix and not any([type(fix[name]) is type(word) and fix[name] == word for word in words]):
            raise UsageError(f"{name} is one of {', '.join(map(str, words)).lower()}, got {fix[name]!r}")
    if "order" in fix:
        order = [str(x) for x in (fix["order"] if isinstance(fix["order"], tuple | list) else [fix["order"]])]
        usual, more = default_order(), (*default_order(), *FURTHER)
        if len(set(order)) < len(order) or not set(usual) <= set(order) <= set(more):
            once, maybe = (f"{', '.join(first)} and {last}" for *first, last in (usual, FURTHER))
            raise UsageError(f"order names {once} once each, and maybe {maybe}, got {fix['order']!r}")


def _check_axes(axes: Mapping[str, ModelAxis], vary: Sequence[str], fix: Mapping[str, Any]) -> None:
    """Raises UsageError for a further axis that is asked for, and the model does not have; InfeasibleError for a degree
    that does not divide what the axis splits."""
    what = {CONTEXT: "sequences that can be split", EXPERTS: "experts"}
    for name in FURTHER:
        n = fix.get(name, 1)
        if name not in axes and (name in vary or n > 1):
            raise UsageError(f"{name}: the model has no {what[name]}", f"leave {name} out")
        if name in axes and axes[name].size % n:
            sizes = ", ".join(map(str, divisors(axes[name].size)[1:7]))
            raise InfeasibleError(
                f"{name} {n} does not divide {what[name].split()[0]} of {axes[name].size}", f"use {name}={sizes}"
            )


def _nothing(batch: int, gpus: int, fix: Mapping[str, Any], dropped: Mapping[str, int], ways: str) -> InfeasibleError:
    said = ", ".join([f"{name} {x}" for name, x in fix.items()])
    asked = f"{gpus} devices" + (f" with {said}" if said else "")
    degrees = [dp for dp in divisors(gpus) if batch % dp == 0]
    hint = ways or (f"a batch of {batch} divides by dp {', '.join(map(str, degrees[-4:]))}" if degrees else None)
    odd = [name for name in ("dp", "tp", "pp", *FURTHER) if gpus % fix.get(name, 1)]
    if odd:
        hint = f"{odd[0]} {fix[odd[0]]} does not divide {gpus}"
    elif dropped:
        hint = ": ".join([x for x in (ways, next(iter(dropped))) if x])
    return InfeasibleError(f"no plan for a batch of {batch} on {asked}", hint)
