"""Placement of every op along one mesh axis, given the classes that are split, and its cost.

The price is a sum of shares of the program's own totals (see `shares`), so it depends on the program and n alone: of
FLOPs, of elements computed and of weights stored; an element sent costs twice one computed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from distir.ir.spec import FactorMapping
from distir.ir.type import REPLICATE, SUM, Placement, Shard
from distir.transforms.sharding.graph import Graph, Signature
from distir.transforms.sharding.shares import Shares

_SWEEPS = 6
_WIRE = 2.0
"""Price of an element sent, relative to one computed."""
_DEEPEST = 100
"""The longest chain of values of a quotient that is followed against its order."""
_EVEN = 1 - 1e-9
"""Prices whose ratio is at least this are equal."""


class _Choice(NamedTuple):
    """The cheapest mapping for an op, given its operands' placements."""

    price: float
    collectives: int
    """The number of collectives that convert its operands."""
    mapping: FactorMapping | None
    wants: Sequence[Placement]
    outs: Sequence[Placement]
    moves: bool
    """Whether an operand must be converted to another placement."""
    sums: bool
    """Whether a result is Partial."""


class View(NamedTuple):
    """A graph, or its quotient, with each op's candidate mappings: `mappings[j]` as (mapping, group).

    An op without a mapping of a chosen group is not split; None in a row allows that beside the other mappings.
    """

    sigs: Sequence[Signature]
    kinds: Sequence[int]
    """Per op its kind, as in `Shares`."""
    ins: Sequence[Sequence[int]]
    outs: Sequence[Sequence[int]]
    mappings: Sequence[Sequence[tuple[FactorMapping | None, int]]]
    flops: Sequence[float]
    made: Sequence[float]
    stored: Sequence[float]
    """Shares of one op, and of one value."""
    users: Sequence[Sequence[tuple[int, int]]]
    """Per value the (op, operand) that use it."""
    times: Sequence[int]
    """How many ops an op stands for."""
    copies: Sequence[int]
    """How many values a value stands for."""
    inputs: Collection[int]
    outputs: Collection[int]
    order: Sequence[int]
    """The ops in the order in which they are decided."""
    choices: dict[tuple[int, ...], dict[tuple[Placement | None, ...], _Choice]]
    """Those made before: by degree, kind and the ids of the options, then by the placements of operands. Ops that are
    alike in all these have the same choice, also those of a quotient."""


class Placed(NamedTuple):
    """`mappings[j]`: the mapping op j takes, None if its operands are replicated (or pass as Partial).

    `reduce`: values whose Partial is reduced where it is made. `inputs`: how inputs are split. `scatter`: values whose
    Partial is scattered as soon as it is made, for those that use it so. `collectives`: how many there are.
    """

    price: float
    mappings: list[FactorMapping | None]
    reduce: set[int]
    inputs: dict[int, Shard]
    scatter: Mapping[int, Shard] = MappingProxyType({})
    collectives: int = 0


def view(graph: Graph, mappings: Sequence[Sequence[tuple[FactorMapping | None, int]]], shares: Shares) -> View:
    """The whole graph as a view."""
    one = [1] * max(len(graph.sigs), len(graph.values))
    return View(
        graph.sigs,
        shares.kinds,
        graph.ins,
        graph.outs,
        mappings,
        shares.flops,
        shares.made,
        shares.stored,
        graph.users,
        one,
        one,
        graph.inputs,
        graph.outputs,
        graph.order,
        {},
    )


_NOTHING = _Choice(0.0, 0, None, (), (), False, False)


class _Sweep:
    """Passes over the ops in order, with the cheapest mapping for each; inputs not in `fixed` follow a split use."""

    def __init__(self, v: View, n: int, chosen: Collection[int], fixed: Mapping[int, Placement]) -> None:
        self.v, self.n, self.fixed = v, n, fixed
        self.wire = (n - 1) / n * _WIRE
        self.inputs: dict[int, Shard] = {i: p for i, p in fixed.items() if p.dim is not None}
        self.reduce: set[int] = set()
        self.state: list[Placement | None] = []
        self.made: list[_Choice] = []
        """The choice for each op."""
        self.sums: list[int] = []
        """The ops with a result that is Partial, in order."""
        self.later: dict[int, float] = {}
        """Of values that are Partial the cost of reducing them, where they are made or later."""
        self.passing: dict[int, tuple[float, float]] = {}
        """By op what its results cost later, and the size of its partial operands, which share that cost; kept, as an
        op such as the sum over all gradients may have thousands."""
        self.open: set[int] = set()
        """The values that are being decided."""
        self.options: dict[tuple[int, int], Sequence[FactorMapping | None]] = {}
        """By kind and row of mappings."""
        self.choices: list[dict[tuple[Placement | None, ...], _Choice]] = []
        """Per op those known by the placements of its operands."""
        known: dict[tuple[int, int], dict[tuple[Placement | None, ...], _Choice]] = {}
        for key, row in zip(zip(v.kinds, map(id, v.mappings), strict=True), v.mappings, strict=True):
            if key not in known:
                options = self.options[key] = [mapping for mapping, group in row if group in chosen]
                known[key] = v.choices.setdefault((n, key[0], *map(id, options)), {})
            self.choices.append(known[key])

    def forward(self, first: bool) -> tuple[float, int]:
        """Choose for every op; returns the total price and the number of collectives.

        In the `first` pass inputs have no placement yet.
        """
        v, choices = self.v, self.choices
        state: list[Placement | None] = [None] * len(v.made)
        self.state = state  # None: an input without a placement yet
        total, collectives = 0.0, 0
        for i, p in self.fixed.items():
            state[i] = p
        if not first:
            for i in v.inputs:
                state[i] = self.inputs.get(i, REPLICATE)
                total += v.stored[i] / (self.n if i in self.inputs else 1) * v.copies[i]
        made, summing = self.made, self.sums = [_NOTHING] * len(v.sigs), []
        outs, times, copies, reduce = v.outs, v.times, v.copies, self.reduce
        # of how many copies a value is converted; of several ops each takes the same copies as those before
        paid: dict[tuple[int, Placement], int] = {}
        moved: set[int] = set()  # the values in `paid`
        operands, placement = v.ins, state.__getitem__
        for j in v.order:
            ins = operands[j]
            have = tuple(map(placement, ins))
            if moved and not moved.isdisjoint(ins):
                choice = self._cheapest(j, have, paid)
            else:
                known = choices[j]
                choice = known.get(have)
                if choice is None:
                    choice = known[have] = self._cheapest(j, have, paid)
            made[j] = choice
            price, moving, _, wants, placements, moves, sums = choice
            total += price * times[j]
            if moves:
                collectives += moving * times[j]
                for i, want in zip(ins, wants, strict=True):
                    h = state[i]
                    if h is None:
                        if want.dim is not None:
                            state[i] = self.inputs[i] = want
                    elif h is not want:
                        already, taken = paid.get((i, want), 0), min(times[j], copies[i])
                        if already < taken:
                            paid[i, want] = taken
                            moved.add(i)
                            if free := times[j] - (taken - already):  # ops whose operand another converts
                                total -= free * self._move(h, want, v.made[i])
                                collectives -= free * (h is not REPLICATE)
            if sums:
                summing.append(j)
                for i, p in zip(outs[j], placements, strict=True):
                    if i in reduce and p.kind is not None:
                        collectives += times[j]
                        total += 2 * v.made[i] * self.wire * times[j]
                        p = REPLICATE
                    state[i] = p
            elif len(placements) == 1:  # as most
                state[outs[j][0]] = placements[0]
            else:
                for i, p in zip(outs[j], placements, strict=True):
                    state[i] = p
        for i in v.outputs:
            p = state[i]
            if p is not None and p.kind is not None:
                collectives += v.copies[i]
                total += 2 * v.made[i] * self.wire * v.copies[i]
        return total, collectives

    def _cheapest(
        self, j: int, have: tuple[Placement | None, ...], paid: Mapping[tuple[int, Placement], int]
    ) -> _Choice:
        """The choice for op j; a conversion that is paid for at least as many copies as it takes costs nothing more."""
        v, n, sig, flops = self.v, self.n, self.v.sigs[j], self.v.flops[j]
        made = sum([v.made[i] for i in v.outs[j]])
        best = None
        options = self.options[v.kinds[j], id(v.mappings[j])] or (None,)
        # a sum that is passed on where ops may be split is scattered later, at half the price of reducing it
        later = 1 if len(options) > 1 and None in options else 2
        if later == 1 and sig.spec.alias:
            made = 0.0  # a view
        for mapping in options:
            if mapping is None:
                wants, out = self._pass(sig, have)
                price = flops + made
                outs: Sequence[Placement] = [out] * len(v.outs[j])
            else:
                wants, outs = mapping.ins, mapping.outs
                price = flops / n + made / (n if outs[0].kind is None else 1)
            moving = 0
            for i, h, want in zip(v.ins[j], have, wants, strict=True):
                if paid.get((i, want), 0) < min(v.times[j], v.copies[i]):
                    price += self._move(h, want, v.made[i])
                    moving += h is not want and h is not None and h is not REPLICATE
            partial = [v.made[i] for i, p in zip(v.outs[j], outs, strict=True) if p.kind is not None]
            rank = price + later * sum(partial) * self.wire
            if best is None or rank < best[0] - 1e-12:
                moves = any([h is not want for h, want in zip(have, wants, strict=True)])
                best = rank, _Choice(price, moving, mapping, wants, outs, moves, bool(partial))
        if best is None:
            raise RuntimeError("an op has at least one option")
        return best[1]

    def _pass(self, sig: Signature, have: Sequence[Placement | None]) -> tuple[Sequence[Placement], Placement]:
        """Operand and result placements of an op that is not split. A Partial on all operands of a linear set passes on
        if the others are replicated; on any operand of a sum."""
        if sig.spec.addends and SUM in have and all([h is SUM or h is None or h is REPLICATE for h in have]):
            return [SUM] * len(have), SUM
        for linear in sig.linear:
            if all(have[k] is SUM for k in linear) and all(
                h is None or h is REPLICATE for k, h in enumerate(have) if k not in linear
            ):
                return [SUM if k in linear else REPLICATE for k in range(len(have))], SUM
        return [REPLICATE] * len(have), REPLICATE

    def _move(self, have: Placement | None, want: Placement, made: float) -> float:
        if have is want or have is None:
            return 0.0
        if have is REPLICATE:  # nothing is sent, but it is an op more
            return 1e-9 * made * _WIRE
        return have.exchanged(want, made, self.n) * self.wire

    def settle(self) -> None:
        """Decide which Partials are reduced where they are made: those that cost no more there than at their uses."""
        self.later, self.passing, self.open = {}, {}, set()
        for j in reversed(self.sums):  # uses first
            for i in self.v.outs[j]:
                self._settle(i)

    def _settle(self, i: int) -> float:
        """Decide for value i; the cost of reducing it here or later, 0 if it is no Partial.

        In a quotient uses may come before what they use, as equal layers form a circle: they are decided at once. One
        that this comes back to is reduced where it is made.
        """
        known = self.later.get(i)
        if known is not None:
            return known
        p = self.state[i]
        if p is None or p.kind is None:
            return 0.0
        here = 2 * self.v.made[i]
        if i in self.open or len(self.open) > _DEEPEST:
            return here
        self.open.add(i)
        below = self._below(i, here)
        self.open.remove(i)
        if below >= here * _EVEN:
            self.reduce.add(i)
        found = self.later[i] = min(here, below)
        return found

    def _below(self, i: int, here: float) -> float:
        """The cost of reducing value i after its uses, if they pass a Partial on; infinity if one does not."""
        v, made, passing = self.v, self.made, self.passing
        if i in v.outputs:
            return here
        uses = [(j, made[j].wants[k]) for j, k in v.users[i]]
        if uses and uses[0][1].dim is not None and all([want is uses[0][1] for _, want in uses]):
            return here / 2
        below = 0.0
        for j, want in uses:
            if want is not SUM:
                return math.inf
            if j not in passing:
                passed = sum([v.made[x] for x, w in zip(v.ins[j], made[j].wants, strict=True) if w is SUM])
                passing[j] = sum([self._settle(x) for x in v.outs[j]]), passed
            cost, passed = passing[j]
            below += cost * v.made[i] / passed if passed else 0.0  # operands without elements
        return below


_FREE: Mapping[int, Placement] = MappingProxyType({})


def place_all(
    v: View, n: int, chosen: Collection[int], fixed: Mapping[int, Placement] = _FREE, near: Placed | None = None
) -> Placed:
    """Place every op along an axis of n devices, the classes of the groups `chosen` split; inputs as in `fixed`, others
    as their uses take them. `near`: inputs and reductions to begin with, as they are found for a quotient."""
    return place_values(v, n, chosen, fixed, near)[0]


def place_values(
    v: View, n: int, chosen: Collection[int], fixed: Mapping[int, Placement] = _FREE, near: Placed | None = None
) -> tuple[Placed, Sequence[Placement | None]]:
    """As `place_all`, with the placement of each value where it is made."""
    sweep = _Sweep(v, n, chosen, fixed)
    if near is None:
        sweep.forward(first=True)
        sweep.settle()
    else:
        sweep.inputs, sweep.reduce = near.inputs | sweep.inputs, set(near.reduce)
    price, collectives = 0.0, 0
    for _ in range(_SWEEPS - 1):
        before = len(sweep.reduce)
        price, collectives = sweep.forward(first=False)
        sweep.settle()
        if len(sweep.reduce) == before:
            break
    mappings = [choice.mapping for choice in sweep.made]
    return Placed(price, mappings, sweep.reduce, sweep.inputs, collectives=collectives), sweep.state
