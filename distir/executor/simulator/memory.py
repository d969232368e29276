"""Live memory, counted in program order for each class of devices, as a caching allocator sees it.

Buffers are counted, not values: views and bundles lie in their operands' buffers; a result takes over the buffer of an
operand that the op donates, if nothing else needs it; a result that exists only within a kernel lies in the operand's
that the kernel reads instead; a buffer is freed after the last use of the last value in it. The
caller keeps the program's inputs alive, except those that it updates (`Function.updates`), which die with their last
use. The operands of a reduce-scatter whose result a body only returns live until the next one starts, or the body ends:
it is in flight until then.

A call counts as its body inlined. Its effect depends on which tensors die in it and which of its results are needed:
for each such case a (net, peak, where), computed once. Where categories are not asked for, callees that are equal up to
their mesh share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from distir.executor.simulator.buffers import Block, Given, Holding, Layout, Sizes, holding
from distir.executor.simulator.categories import CATEGORIES, Categories, leaves
from distir.executor.simulator.compile import CompiledProgram
from distir.executor.simulator.equal_callees import shapes_of
from distir.executor.simulator.overheads import allocated, caches
from distir.ir.function import Function, Op, Value
from distir.ir.pause import no_collection
from distir.ir.spec import lookup
from distir.ir.type import Shard, Tensor

Bytes = tuple[int, ...]
"""Bytes by category, in the order of CATEGORIES; or of all together."""


class Point(NamedTuple):
    """Live memory at op number `op` of the program: at its highest while the op runs, and after it."""

    op: int
    highest: Bytes
    after: Bytes


class MemoryUse(NamedTuple):
    """Live memory of one class: bytes when the program begins, at the peak, and at every op that the class runs.

    `where` is the op of the peak, None if that is at the beginning.
    """

    start: Bytes
    peak: Bytes
    where: Op | None
    curve: list[Point]

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak)

    def by_category(self) -> dict[str, int]:
        """Bytes at the peak by category."""
        return dict(zip(CATEGORIES, self.peak, strict=True))


class Step(NamedTuple):
    """An op on one class: its operands and results there, the values that die with it, the numbers of a call's results
    that are not needed, and the values freed after it because a reduction in flight used them."""

    number: int
    op: Op
    uses: tuple[Value, ...]
    makes: tuple[Value, ...]
    dies: tuple[Value, ...]
    unneeded: frozenset[int]
    released: tuple[Value, ...]


class Output(NamedTuple):
    """Where an output of a body lies: blocks (-1, number of a new block) or (operand, position of its block)."""

    blocks: tuple[tuple[int, int], ...]
    layout: Layout
    key: int


class Result(NamedTuple):
    """The effect of a body: net bytes, its peak above the beginning, and where that is; its new blocks; its outputs.

    `splits` are blocks (operand, position) of which outputs keep single tensors: the caller must take them apart.
    """

    net: Bytes
    peak: Bytes
    where: Op | None
    blocks: tuple[Sizes, ...]
    outputs: dict[int, Output]
    splits: frozenset[tuple[int, int]]


Order = Callable[[Sequence[Op], Sequence[bool]], Sequence[int]]
"""(the program's ops that a device has a part in, which of them it receives by) -> the order in which it comes to them,
as numbers of these ops."""


class LiveMemory:
    """Counts a program's memory, class by class, in the order of its ops, or in the one that `order` gives.

    Without categories `where` is the op of an equal callee.
    """

    @no_collection()
    def __init__(self, program: CompiledProgram, order: Order | None = None, by_category: bool = True) -> None:
        self.program, self.order = program, order
        self.categories = Categories(program.function) if by_category else None
        self.shapes = shapes_of(program.function)
        self._unwritten = program.unwritten
        self._caches = caches(program)
        self._first: dict[object, Function] = {}
        self._models: dict[Function, tuple[Function, int]] = {}
        self.pack, self.unpack = map(lookup, ("Pack", "Unpack"))
        self._steps: dict[tuple[Function, int, frozenset[int]], list[Step]] = {}
        self._used: dict[tuple[Function, int, frozenset[int]], frozenset[int]] = {}
        self._in_flight: dict[Function, dict[Op, set[Value]]] = {}
        self._touching: dict[Function, dict[int, list[tuple[int, bool]]]] = {}
        self._results: dict[object, Result] = {}
        self._alike: dict[frozenset[object], MemoryUse] = {}

    @no_collection()
    def use(self, c: int) -> MemoryUse:
        """The live memory of class c; of classes in the same meshes it is the same."""
        key = frozenset(h for h, classes in self.program.classes.homes.items() if c in classes)
        if key not in self._alike:
            self._alike[key] = self._use(c)
        return self._alike[key]

    def _use(self, c: int) -> MemoryUse:
        main = self.program.function
        frame = _Frame(self, c)
        updated = set(main.updates.values())
        for v in main.inputs:
            if c in self.program.classes_of(v.type):
                kind = self.categories.of_input(v) if self.categories else 0
                made = [Block(((kind, self.bytes_of(t)),), v not in updated) for t in leaves(v.type)]
                frame.bind(v, holding([(b, 0) for b in made]))
                frame.grow(made)
        start = tuple(frame.live)
        frame.peak, frame.highest = sum(start), start
        curve: list[Point] = []
        for step in self.steps(main, c, frozenset()):
            highest = frame.step(step)
            curve.append(Point(step.number, highest, tuple(frame.live)))
        return MemoryUse(start, frame.highest, frame.where, curve)

    def bytes_of(self, t: Tensor) -> int:
        """The bytes that a tensor takes: those of its block, on devices that have a caching allocator."""
        return allocated(t.bytes) if self._caches else t.bytes

    def touching(self, f: Function) -> dict[int, list[tuple[int, bool]]]:
        """For each class the numbers of the ops of `f` that it has a part in, and whether it holds all their values."""
        if f not in self._touching:
            found: dict[int, list[tuple[int, bool]]] = {}
            if f in self.shapes:  # all on one mesh
                rows = [(n, True) for n in range(len(f.ops))]
                found = self._touching[f] = dict.fromkeys(self.program.classes.homes[self.shapes[f][1]], rows)
                return found
            classes_of = self.program.classes_of
            for n, op in enumerate(f.ops):
                makes = {classes_of(v.type) for v in op.outputs}
                homes = makes.union([classes_of(v.type) for v in op.inputs])
                if len(homes) > 1 and op.inputs and op.spec.alias:
                    homes = makes  # a part of a larger mesh
                for c in {c for classes in homes for c in classes}:
                    found.setdefault(c, []).append((n, len(homes) == 1))
            if self.order is not None and f is self.program.function:
                found = {c: self._ordered(f, c, rows, self.order) for c, rows in found.items()}
            self._touching[f] = found
        return self._touching[f]

    def _ordered(self, f: Function, c: int, rows: list[tuple[int, bool]], order: Order) -> list[tuple[int, bool]]:
        classes_of, ops = self.program.classes_of, [f.ops[n] for n, _ in rows]
        receives = [
            not whole and not any(c in classes_of(v.type) for v in op.inputs)
            for op, (_, whole) in zip(ops, rows, strict=True)
        ]
        return [rows[k] for k in order(ops, receives)]

    def equal(self, callee: Function, c: int) -> tuple[Function, int]:
        """The first callee that shares the memory of a callee on class c, and its class."""
        found = self._models.get(callee)
        if found is None:
            shape = self.shapes.get(callee)
            if shape is None or self.categories:
                return callee, c
            number, mesh = shape
            first = self._first.setdefault((number, mesh.axes, mesh.sizes), callee)
            found = self._models[callee] = first, self.program.classes.homes[self.shapes[first][1]][0]
        return found

    def steps(self, f: Function, c: int, unneeded: frozenset[int]) -> list[Step]:
        """The ops of `f` on class c, given the numbers of its outputs that are not needed."""
        key = (f, c, unneeded)
        if key not in self._steps:
            self._steps[key] = self._lifetimes(f, c, unneeded)
        return self._steps[key]

    def _lifetimes(self, f: Function, c: int, unneeded: frozenset[int]) -> list[Step]:
        classes_of = self.program.classes_of
        later = {v for k, v in enumerate(f.outputs) if k not in unneeded}
        steps: list[Step] = []
        for n, whole in reversed(self.touching(f).get(c, [])):
            op = f.ops[n]
            makes = op.outputs if whole else tuple([v for v in op.outputs if c in classes_of(v.type)])
            spare: frozenset[int] = frozenset()
            if (callee := op.callee) is not None:
                spare = frozenset([k for k, v in enumerate(op.outputs) if v not in later])
                needed = self.used(*self.equal(callee, c), spare)
                uses = tuple([v for i, v in enumerate(op.inputs) if i in needed])
                ends = uses
            else:
                uses = op.inputs if whole else tuple([v for v in op.inputs if c in classes_of(v.type)])
                ends = uses + makes
            dies = tuple([v for v in dict.fromkeys(ends) if v not in later])
            later.update(uses)
            steps.append(Step(n, op, uses, makes, dies, spare, ()))
        steps.reverse()
        self._hold(f, steps)
        return steps

    def _hold(self, f: Function, steps: list[Step]) -> None:
        """Extend the lives of operands of reductions in flight until the next one starts, or the body ends."""
        in_flight = self.in_flight(f)
        if not in_flight:
            return
        begins = [k for k, step in enumerate(steps) if step.op in in_flight]
        for begin, end in itertools.pairwise([*begins, len(steps)]):
            step = steps[begin]
            operands = tuple([v for v in step.dies if v in in_flight[step.op]])
            if operands and end - 1 > begin:
                steps[begin] = step._replace(dies=tuple([v for v in step.dies if v not in operands]))
                steps[end - 1] = steps[end - 1]._replace(released=operands)

    def in_flight(self, f: Function) -> dict[Op, set[Value]]:
        """The reduce-scatters whose results a body only returns, so that they overlap later ops, each with the operands
        that nothing uses after it.
        """
        if f not in self._in_flight:
            reduced: dict[Value, Op] = {}
            used: set[Op] = set()
            last: dict[Value, Op | None] = {}
            for op in f.ops:
                last.update(dict.fromkeys(op.inputs, op))
                if op.spec.comm is not None and op.spec.comm.sums and op.spec.comm.gives is Shard:
                    reduced.update(dict.fromkeys(op.outputs, op))
                handed = [reduced[v] for v in op.inputs if v in reduced]
                if handed and self.is_view(op):
                    reduced.update({y: x for x in handed for y in op.outputs})
                else:
                    used.update(handed)
            last.update(dict.fromkeys(f.outputs))
            found = [op for op in dict.fromkeys(reduced.values()) if op not in used]
            self._in_flight[f] = {op: {v for v in op.inputs if last[v] is op} for op in found}
        return self._in_flight[f]

    def is_view(self, op: Op) -> bool:
        """Whether its results share its operands' buffers."""
        return op in self._unwritten or (
            bool(op.inputs) and self.program.cost.free(op.spec, op.attributes, [v.type for v in op.inputs])
        )

    def used(self, f: Function, c: int, unneeded: frozenset[int]) -> frozenset[int]:
        """The numbers of the inputs that a body uses on class c."""
        key = (f, c, unneeded)
        if key not in self._used:
            used = {v for step in self.steps(f, c, unneeded) for v in step.uses}
            used |= {v for k, v in enumerate(f.outputs) if k not in unneeded and c in self.program.classes_of(v.type)}
            self._used[key] = frozenset(i for i, v in enumerate(f.inputs) if v in used)
        return self._used[key]

    def result(self, f: Function, c: int, unneeded: frozenset[int], given: Given) -> Result:
        """The memory that a call adds, memoised."""
        key = (f, c, unneeded, given.key())
        found = self._results.get(key)
        if found is None:
            found = self._results[key] = self._result(f, c, unneeded, given)
        return found

    def _result(self, f: Function, c: int, unneeded: frozenset[int], given: Given) -> Result:
        frame = _Frame(self, c)
        inside: dict[tuple[Block, int], Block] = {}
        origin: dict[Block, tuple[int, int]] = {}
        for i, h in given.holdings.items():
            for p, b in enumerate(h.blocks):
                for j, size in enumerate(b.sizes):
                    if (b, j) not in inside:
                        inside[b, j] = Block((size,), b not in given.dying)
                        origin[inside[b, j]] = (i, p)
            frame.bind(f.inputs[i], holding([(inside[b, j], 0) for b, j in h.tensors()]))
        for step in self.steps(f, c, unneeded):
            frame.step(step)
        classes_of = self.program.classes_of
        outputs = {k: v for k, v in enumerate(f.outputs) if k not in unneeded and c in classes_of(v.type)}
        return _result(frame, outputs, origin, given)


class _Frame:
    """One function running on one class: its live memory, relative to its beginning."""

    def __init__(self, memory: LiveMemory, c: int) -> None:
        self.memory, self.c = memory, c
        self.env: dict[Value, Holding] = {}
        self.live = [0] * (len(CATEGORIES) if memory.categories else 1)
        self.peak = 0
        self.highest: Bytes = tuple(self.live)
        self.where: Op | None = None

    def bind(self, v: Value, h: Holding) -> None:
        self.env[v] = h
        for b in h.blocks:
            b.refs += 1

    def grow(self, blocks: Iterable[Block]) -> None:
        for b in blocks:
            for kind, size in b.sizes:
                self.live[kind] += size

    def release(self, v: Value) -> None:
        for b in self.env.pop(v).blocks:
            b.refs -= 1
            if not b.refs and not b.outside:
                for kind, size in b.sizes:
                    self.live[kind] -= size

    def note(self, highest: Bytes, where: Op | None) -> None:
        total = sum(highest)
        if total > self.peak:
            self.peak, self.highest, self.where = total, highest, where

    def step(self, step: Step) -> Bytes:
        """Run one op; returns its peak."""
        highest = self.run(step) if step.op.callee is None else self.call(step, step.op.callee)
        for v in step.released:
            self.release(v)
        return highest

    def run(self, step: Step) -> Bytes:
        op = step.op
        if self.memory.is_view(op):
            self.view(step)
        else:
            self.make(step)
        highest = tuple(self.live)
        self.note(highest, op)
        for v in step.dies:
            self.release(v)
        return highest

    def view(self, step: Step) -> None:
        """Results that lie in the operands' buffers."""
        op = step.op
        if op.spec is self.memory.pack:
            self.bind(op.outputs[0], holding([x for v in op.inputs for x in self.env[v].tensors()]))
        elif op.spec is self.memory.unpack:
            self.explode(self.env[op.inputs[0]])
            tensors, at = self.env[op.inputs[0]].tensors(), 0
            for v in op.outputs:
                n = len(leaves(v.type))
                self.bind(v, holding(tensors[at : at + n]))
                at += n
        else:
            for v in step.makes:
                self.bind(v, self.env[op.inputs[0]])

    def make(self, step: Step) -> None:
        """New buffers for the results, or donated ones."""
        spec, categories = step.op.spec, self.memory.categories
        donated = self.donated(step) if spec.donates or spec.each else {}
        for v in step.makes:
            tensors: list[tuple[Block, int]] = []
            for i, t in enumerate([v.type] if isinstance(v.type, Tensor) else leaves(v.type)):
                size = self.memory.bytes_of(t)
                if donated.get(size):
                    block = donated[size].pop(0)
                else:
                    kind = categories.of(v, i, t) if categories else 0
                    block = Block(((kind, size),))
                    self.live[kind] += size
                tensors.append((block, 0))
            self.bind(v, holding(tensors))

    def donated(self, step: Step) -> dict[int, list[Block]]:
        """Buffers that the results may take over, by bytes: of donated operands that die here, in no other value."""
        found: dict[int, list[Block]] = {}
        operands = step.op.inputs
        for v in dict.fromkeys(operands[k] for k in step.op.spec.donated(step.op.attributes, len(operands))):
            if v not in step.dies or v not in self.env:
                continue
            self.explode(self.env[v])
            for b in self.env[v].blocks:
                if b.refs == 1 and not b.outside:
                    found.setdefault(b.sizes[0][1], []).append(b)
        return found

    def explode(self, h: Holding, position: int | None = None) -> None:
        """Make each tensor of a holding's blocks (or of the one at `position`) a block of its own, wherever it is."""
        chosen = h.blocks if position is None else (h.blocks[position],)
        for whole in [b for b in chosen if len(b.sizes) > 1]:
            pieces = [Block((size,)) for size in whole.sizes]
            for v, other in [(v, o) for v, o in self.env.items() if whole in o.blocks]:
                split = holding([(pieces[i], 0) if b is whole else (b, i) for b, i in other.tensors()])
                self.env[v] = split
                for b in pieces:
                    b.refs += b in split.blocks

    def call(self, step: Step, callee: Function) -> Bytes:
        """Run a call by its (net, peak, where)."""
        op, before, memory = step.op, self.live, self.memory
        callee, c = memory.equal(callee, self.c)
        inputs = sorted(memory.used(callee, c, step.unneeded))
        while True:
            given = self.given(step, {i: self.env[op.inputs[i]] for i in inputs})
            result = memory.result(callee, c, step.unneeded, given)
            if not result.splits:
                break
            for i, p in result.splits:
                self.explode(given.holdings[i], p)
        blocks = [Block(sizes) for sizes in result.blocks]
        for k, out in result.outputs.items():
            where = tuple([blocks[p] if i < 0 else given.holdings[i].blocks[p] for i, p in out.blocks])
            self.bind(op.outputs[k], Holding(where, out.layout, out.key))
        highest = tuple([a + b for a, b in zip(before, result.peak, strict=True)])
        self.note(highest, result.where)
        for v in step.dies:
            for b in self.env.pop(v).blocks:
                b.refs -= 1
        self.live = [a + b for a, b in zip(before, result.net, strict=True)]
        return highest

    def given(self, step: Step, holdings: dict[int, Holding]) -> Given:
        """The call's operands; a block dies if all values in it die here."""
        refs: dict[Block, int] = {}
        for v in step.dies:
            for b in self.env[v].blocks:
                refs[b] = refs.get(b, 0) + 1
        return Given(holdings, frozenset([b for b, n in refs.items() if n == b.refs and not b.outside]))


def _result(frame: _Frame, outputs: dict[int, Value], origin: dict[Block, tuple[int, int]], given: Given) -> Result:
    """The effect of a finished frame. Tensors in the same outputs form one new block."""
    lies: dict[tuple[Block, int], list[int]] = {}
    for k, v in outputs.items():
        for tensor in frame.env[v].tensors():
            if not tensor[0].outside:
                lies.setdefault(tensor, []).append(k)
    groups: dict[frozenset[int], list[tuple[Block, int]]] = {}
    for tensor, ks in lies.items():
        groups.setdefault(frozenset(ks), []).append(tensor)
    blocks = [tuple([b.sizes[i] for b, i in group]) for group in groups.values()]
    at = {tensor: (g, j) for g, group in enumerate(groups.values()) for j, tensor in enumerate(group)}
    found: dict[int, Output] = {}
    splits: set[tuple[int, int]] = set()
    for k, v in outputs.items():
        position: dict[tuple[int, int], int] = {}
        layout: list[tuple[int, int]] = []
        sizes: dict[tuple[int, int], Sizes] = {}
        for b, i in frame.env[v].tensors():
            ref, j = ((-1, at[b, i][0]), at[b, i][1]) if (b, i) in at else (origin[b], 0)
            sizes[ref] = blocks[ref[1]] if ref[0] < 0 else given.holdings[ref[0]].blocks[ref[1]].sizes
            if ref[0] >= 0 and len(sizes[ref]) > 1:
                splits.add(ref)
            layout.append((position.setdefault(ref, len(position)), j))
        key = Holding.key_of(tuple(layout), [sizes[ref] for ref in position])
        found[k] = Output(tuple(position), tuple(layout), key)
    return Result(tuple(frame.live), frame.highest, frame.where, tuple(blocks), found, frozenset(splits))
