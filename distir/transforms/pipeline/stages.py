"""Cuts a placed program into pipeline stages: the forward pass, balanced or where a plan says; all other ops follow
their forward ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from distir.ir.cached import cached, producers
from distir.ir.errors import InfeasibleError
from distir.ir.function import Function, Op, Value, type_of
from distir.ir.type import Tensor
from distir.ops.rules import shape_of, tensor
from distir.transforms.pipeline.add_by_stage import add_by_stage
from distir.transforms.pipeline.canonical import canonical_order
from distir.transforms.pipeline.copies import copies, on_own_stages
from distir.transforms.pipeline.cut_at import check_cut, cut_at
from distir.transforms.pipeline.lift import lift_sums
from distir.transforms.pipeline.partition import Ways, balanced, choices, ways
from distir.transforms.pipeline.phases import (
    BACKWARD,
    FORWARD,
    FREE,
    PROLOGUE,
    RULES,
    UPDATE,
    PhaseRules,
    phases,
    time_ends,
    users,
    uses_of,
)
from distir.transforms.roles import WEIGHTS, weights

if TYPE_CHECKING:
    import numpy as np

FLOP_PER_BYTE = 100.0
"""For `plain_cost`: the FLOPs an accelerator does in the time that it moves one byte of memory, roughly."""
LINK_PER_MEMORY = 30.0
"""By how much a link between stages is slower than memory, roughly."""


AnOp = TypeVar("AnOp")
"""An op, or its number."""


class StageCost(NamedTuple):
    """The cost by which stages are balanced: of an op on one device, of a byte sent to the next stage, and of a message
    beside its bytes.

    Ops of one spec, attributes and types cost the same.
    """

    op: Callable[[Op], float]
    sent: float
    message: float = 0.0


def plain_cost(op: Op) -> float:
    """FLOPs plus bytes moved, in FLOPs, at global shapes: so the cut does not depend on how the op is split."""
    moved = sum(math.prod(shape_of(v)) * tensor(v).dtype.size for v in (*op.inputs, *op.outputs))
    flops = op.spec.flops(op.attributes, list(map(shape_of, op.inputs)), list(map(shape_of, op.outputs)))
    return flops + (0.0 if op.spec.alias else FLOP_PER_BYTE * moved)


PLAIN = StageCost(plain_cost, FLOP_PER_BYTE * LINK_PER_MEMORY)


def cut_stages(
    function: Function,
    parts: int,
    microbatches: int,
    cost: StageCost = PLAIN,
    rules: PhaseRules = RULES,
    cut: Sequence[int] = (),
) -> tuple[Function, dict[Op, int]]:
    """The function, and the stage of every op that has a phase. Backward ops and updates follow their forward op.

    Stages are balanced by what a microbatch costs; with `cut`, positions of inputs, they begin where these are first
    used (see `cut_at`).

    The function is changed: sums of values from several stages are lifted (see `lift`), copies stay on their stage.
    Raises InfeasibleError if there are fewer forward ops than stages, or if the forward pass needs the whole batch.
    """
    one = parts == 1 and not cut
    forward = {} if one else forward_stages(function, parts, microbatches, cost, rules, cut)
    _, stage = staged(function, parts, rules, forward)
    if parts == 1:
        return function, stage
    function, stage = lift_sums(*on_own_stages(function, stage))
    phase = phases(function, rules)
    _once_stages(function, phase, stage)
    return add_by_stage(function, phase, stage)


def staged(
    function: Function, parts: int, rules: PhaseRules, forward: Mapping[Op, int]
) -> tuple[Mapping[Op, str], dict[Op, int]]:
    """The phases of a placed program's ops, and the stages of those of the forward and the backward pass, given those
    of the forward ops; of all ops if there is one stage."""
    phase = phases(function, rules)
    if parts == 1:
        return phase, {op: 0 for op in function.ops if phase[op] != FREE}
    stage = dict(forward)
    backward_stages(following(function, rules), stage, parts)
    return phase, stage


def forward_stages(
    function: Function,
    parts: int,
    microbatches: int,
    cost: StageCost,
    rules: PhaseRules,
    cut: Sequence[int] = (),
) -> dict[Op, int]:
    """The stages of a placed program's forward ops. Parameters and errors as of `cut_stages`."""
    phase = phases(function, rules)
    if cut:
        check_cut(cut, parts)
    if len(_forward_ops(function, rules)) < parts:
        _check_cuts_batch(function, phase, microbatches)
    if cut:
        stage = cut_at(function, phase, cut)
    else:
        given = stage_ways(function, rules)
        costs = to_price(function, rules).costs(cost.op)
        stage = dict(zip(given.ops, balanced(choices(given, costs, cost.sent, cost.message), parts), strict=True))
    if rules.kept:
        used = users(function)
        for op in [op for op in reversed(function.ops) if op in rules.kept]:  # where the weight is first used
            stage[op] = min([stage[use] for use in uses_of(op, used, phase) if phase[use] == FORWARD])
    return stage


def _check_cuts_batch(function: Function, phase: Mapping[Op, str], microbatches: int) -> None:
    """Raises InfeasibleError if the forward pass is computed on the whole batch, before the first microbatch."""
    trained = set(weights(function))
    fed = {v for v in function.inputs if v not in trained and v.kind != "constant"}
    differentiated = {op.of for op in function.ops}
    last: Value | None = None
    for op in function.ops:
        of_weights, of_data = not trained.isdisjoint(op.inputs), not fed.isdisjoint(op.inputs)
        if of_weights:
            trained.update(op.outputs)
        if of_data:
            fed.update(op.outputs)
        if of_weights and of_data and phase[op] == PROLOGUE and op in differentiated:  # not the cast of a weight
            last = op.outputs[0]
    if last is not None:
        raise InfeasibleError(
            f"{function.name}: the gradient of %{last.name} needs the whole batch, as it is not a sum or a mean over "
            f"samples: no stage could begin its backward pass before all {microbatches} microbatches are through",
            "use --microbatches 1, or --pp 1",
        )


class ToPrice(NamedTuple):
    """What is priced for a cut: `kinds` are ops of different cost. `own`: the kind of each forward op. Of the backward
    ops, which follow these to their stages: the `kind`, and the number of the forward op."""

    kinds: Sequence[Op]
    own: np.ndarray
    kind: np.ndarray
    owner: np.ndarray

    def costs(self, cost: Callable[[Op], float]) -> Sequence[float]:
        """Per forward op the cost of itself and of its backward ops."""
        import numpy as np

        each = np.array([cost(op) for op in self.kinds])
        return (each[self.own] + np.bincount(self.owner, each[self.kind], len(self.own))).tolist()


@cached
def _forward_ops(function: Function, rules: PhaseRules) -> list[Op]:
    phase = phases(function, rules)
    return [op for op in function.ops if phase[op] == FORWARD]


@cached
def _touching(function: Function, rules: PhaseRules) -> dict[Value, list[Op]]:
    """The forward ops that make or use each value."""
    found: dict[Value, list[Op]] = {}
    for op in _forward_ops(function, rules):
        for v in dict.fromkeys((*op.inputs, *op.outputs)):
            found.setdefault(v, []).append(op)
    return found


@cached
def stage_ways(function: Function, rules: PhaseRules) -> Ways:
    """The ways to cut a placed program's forward ops into stages."""
    return ways(canonical_order(function, _forward_ops(function, rules)))


@cached
def to_price(function: Function, rules: PhaseRules) -> ToPrice:
    """What is priced for a cut of a placed program; forward ops are numbered as `stage_ways` orders them."""
    import numpy as np

    phase, forward = phases(function, rules), stage_ways(function, rules).ops
    kinds: list[Op] = []
    number: dict[tuple[object, ...], int] = {}

    def kind(op: Op) -> int:
        key = op.spec, op.attributes.form, tuple(map(type_of, op.inputs))
        if key not in number:
            number[key] = len(kinds)
            kinds.append(op)
        return number[key]

    own = [kind(op) for op in forward]
    place = {op: i for i, op in enumerate(forward)}
    follow: list[tuple[int, int]] = []
    for op in function.ops:
        if phase[op] == BACKWARD:
            owner = op.of or _likely_forward(op, _touching(function, rules))
            if owner in place:
                follow.append((kind(op), place[owner]))
    rows = np.array(follow, int).reshape(-1, 2).T
    return ToPrice(kinds, np.array(own, int), rows[0], rows[1])


def _likely_forward(op: Op, touched: Mapping[Value, Sequence[Op]]) -> Op | None:
    """The forward op of a backward op without `of`: of those that share most values with it, the last."""
    count: dict[Op, int] = {}
    for v in op.inputs:
        for f in touched.get(v, ()):
            count[f] = count.get(f, 0) + 1
    most = max(count.values(), default=0)
    return next((f for f in reversed(count) if count[f] == most), None)


class Follows(NamedTuple, Generic[AnOp]):
    """What decides the stage of a backward op: its forward op `of`, the backward ops `above` that its gradients come
    from, and, without `of`, for each saved value the forward ops that make or use it. A copy goes `with_of` alone.
    `gathers`: it gathers the gradient that one op above made, of which it goes to the first stage that needs all: a
    device's part is less to send."""

    op: AnOp
    of: AnOp | None
    with_of: bool
    above: Sequence[AnOp]
    saved: Sequence[Sequence[AnOp]]
    gathers: bool = False


@cached
def following(function: Function, rules: PhaseRules) -> list[Follows[Op]]:
    """The backward ops, in program order."""
    phase, producer, again = phases(function, rules), producers(function), copies(function)
    found: list[Follows[Op]] = []
    forward, backward = set(_forward_ops(function, rules)), set[Op]()
    for op in function.ops:
        if phase[op] != BACKWARD:
            continue
        backward.add(op)
        if op.of is not None and op.outputs[0] in again:
            found.append(Follows(op, op.of, True, (), ()))
            continue
        above = [p for v in op.inputs if (p := producer.get(v)) in backward and v not in again]
        of = op.of if op.of in forward or op.of in backward else None
        saved: Sequence[Sequence[Op]] = ()
        if of is None:
            touching = _touching(function, rules)
            saved = [touching[v] for v in op.inputs if v in touching]
        gathers = op.spec.comm is not None and op.spec.comm.gathers and len(above) == 1
        found.append(Follows(op, of, False, above, saved, gathers))
    return found


def backward_stages(rows: Sequence[Follows[AnOp]], stage: dict[AnOp, int], parts: int) -> None:
    """Add the stages of backward ops to those of the forward ops.

    A backward op goes to its forward op's stage; without `of`, to the last stage that has all its saved values. Never
    to a later stage than its gradients come from: gradients flow backward only.
    """
    for op, of, with_of, above, saved, _ in rows:
        if of is not None and with_of:
            stage[op] = stage[of]
            continue
        top = min([stage[p] for p in above]) if above else parts - 1
        if of is not None:
            stage[op] = min(stage[of], top)
            continue
        at_hand, last = (1 << top + 1) - 1, top
        for ops in saved:
            stages = 0  # bit s: stage s makes or uses it
            for f in ops:
                stages |= 1 << stage[f]
            at_hand &= stages
            last = min(last, stages.bit_length() - 1)
        stage[op] = at_hand.bit_length() - 1 if at_hand else last
    _send_parts(rows, stage)


def _send_parts(rows: Sequence[Follows[AnOp]], stage: dict[AnOp, int]) -> None:
    """Move gathers of gradients to the stage that is the first to need the whole in the backward pass."""
    needed: dict[AnOp, int] = {}
    for row in reversed(rows):
        if row.gathers and row.op in needed:
            stage[row.op] = needed[row.op]
        for p in row.above:
            needed[p] = max(needed.get(p, 0), stage[row.op])


def _once_stages(function: Function, phase: Mapping[Op, str], stage: dict[Op, int]) -> None:
    """Prologue ops go to their first user's stage, updates to their weight's, sums to the stage that accumulates."""
    producer, ends = producers(function), time_ends(function)
    used = users(function)
    updates = [op for op in function.ops if phase[op] == UPDATE]

    def first(v: Value) -> tuple[int, int]:
        return -_bytes(v), stage[producer[v]]

    home = homes(function, phase, stage)
    for op in updates:
        if op in ends:
            stage[op] = stage[producer[op.inputs[0]]]
        elif owned := [home[v] for v in op.inputs if v in home and v.kind in WEIGHTS]:
            stage[op] = max(owned)
    for op in updates:
        if op not in stage:
            above = [v for v in op.inputs if producer.get(v) in stage]
            if len(above) == 1:  # as most
                stage[op] = stage[producer[above[0]]]
                continue
            below = [stage[u] for v in op.outputs for u in used.get(v, ()) if u in stage]
            from_one = len({stage[producer[v]] for v in above}) == 1
            stage[op] = stage[producer[min(above, key=first)]] if from_one or not below else min(below)
    for op in reversed(function.ops):
        if phase[op] == PROLOGUE:
            below = [s for v in op.outputs for s in _user_stages(v, used, phase, stage)]
            stage[op] = min(below, default=0)


def _bytes(v: Value) -> int:
    return v.type.bytes if isinstance(v.type, Tensor) else 0


def _user_stages(
    v: Value, used: Mapping[Value, Sequence[Op]], phase: Mapping[Op, str], stage: Mapping[Op, int]
) -> list[int]:
    """The stages of the ops that use a value, directly or through free ops."""
    found: list[int] = []
    for op in used.get(v, ()):
        if phase[op] == FREE:
            for w in op.outputs:
                found += _user_stages(w, used, phase, stage)
        elif op in stage:
            found.append(stage[op])
    return found


def homes(function: Function, phase: Mapping[Op, str], stage: Mapping[Op, int]) -> dict[Value, int]:
    """The stage of each input: the first that uses it in the forward pass, else in the backward pass, the prologue, the
    update; through free ops too."""
    roots: dict[Value, tuple[Value, ...]] = {v: (v,) for v in function.inputs}
    found: dict[Value, tuple[int, int]] = {}
    rank = {FORWARD: 0, BACKWARD: 1, PROLOGUE: 2, UPDATE: 3}
    for op in function.ops:
        if phase[op] == FREE:
            above = tuple(dict.fromkeys(r for v in op.inputs for r in roots.get(v, ())))
            for w in op.outputs:
                roots[w] = above
        elif op in stage and not roots.keys().isdisjoint(op.inputs):
            here = rank[phase[op]], stage[op]
            for v in op.inputs:
                for r in roots.get(v, ()):
                    found[r] = min(found.get(r, here), here)
    return {v: at for v, (_, at) in found.items()}
