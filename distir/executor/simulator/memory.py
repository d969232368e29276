"""Live memory, counted in program order for each class of devices, as a caching allocator sees it.

Buffers are counted, not values: views and bundles lie in their operands' buffers; a result takes over the buffer of an
operand that the op donates, if nothing else needs it; a result that exists only within a kernel lies in the operand's
that the kernel reads instead; a buffer is freed after the last use of the last value in it. The
caller keeps the program's inputs alive, except those that it updates (`Function.updates`), which die with their last
use. The operands of a reduce-scatter whose result a body only returns live until the next one starts, or the body ends:
it is in flight until then. Under a runtime that has a buffer for the sums of gradients over microbatches
(`Runtime.gradient_buffer`) they take no memory of their own: the buffer exists from the start.

A call counts as its body inlined. Its effect depends on which tensors die in it and which of its results are needed:
for each such case a (net, peak, where), computed once. Where categories are not asked for, callees that are equal up to
their mesh share it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from distir.executor.cost_model.seconds import split_classes
from distir.executor.simulator.buffers import Block, Given, Holding, Layout, Sizes, alone, holding
from distir.executor.simulator.categories import BUFFER, CATEGORIES, GRADIENT, Categories, leaves
from distir.executor.simulator.lifetimes import Lifetimes, Step
from distir.executor.simulator.overheads import allocated, caches
from distir.executor.simulator.saved_in_8_bits import bytes_saved
from distir.ir.cached import cached
from distir.ir.function import Function, Op, Value
from distir.ir.host_runtime import Runtime
from distir.ir.pause import no_collection
from distir.ir.spec import lookup
from distir.ir.type import Tensor, Tuple, Type

Bytes = tuple[int, ...]
"""Bytes by category, in the order of CATEGORIES; or of all together."""


class Point(NamedTuple):
    """Live memory at op number `op` of a function: at its highest while the op runs, and after it. `inside`: of a call
    the points of its body, above what is live before the call."""

    op: int
    highest: Bytes
    after: Bytes
    inside: tuple[Point, ...] = ()


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


class Output(NamedTuple):
    """Where an output of a body lies: blocks (-1, number of a new block) or (operand, position of its block)."""

    blocks: tuple[tuple[int, int], ...]
    layout: Layout
    key: int


class Result(NamedTuple):
    """The effect of a body: net bytes, its peak above the beginning, and where that is; its new blocks; its outputs.

    `curve`: its points above the beginning, by category; empty where categories are not asked for.
    `splits` are blocks (operand, position) of which outputs keep single tensors: the caller must take them apart.
    """

    net: Bytes
    peak: Bytes
    where: Op | None
    blocks: tuple[Sizes, ...]
    outputs: dict[int, Output]
    splits: frozenset[tuple[int, int]]
    curve: tuple[Point, ...]


class _Sizes(dict[Tensor, int]):
    """The bytes that a tensor takes: those of its block, on devices that have a caching allocator; none in a buffer of
    sums over microbatches."""

    def __init__(self, caches: bool, buffered: bool) -> None:
        self._caches, self._buffered = caches, buffered

    def __missing__(self, t: Tensor) -> int:
        size = self[t] = 0 if self._buffered and _is_sum(t) else self.block(t)
        return size

    def block(self, t: Tensor) -> int:
        """The bytes of a block for a tensor."""
        return self.block_of(t.bytes)

    def block_of(self, size: int) -> int:
        """The bytes of a block of which so many are used."""
        return allocated(size) if self._caches else size


def _is_sum(t: Tensor) -> bool:
    """Whether it is a sum over microbatches, or a part of one: of gradients, as that of losses is a single number."""
    return t.over_time.kind is not None and bool(t.shape)


@cached
def _sums_begun(main: Function) -> tuple[Type, ...]:
    """The types of the bundles of sums that bodies begin, and hand on to the bodies of later microbatches."""
    sums: dict[Type, bool] = {}

    def has_sums(v: Value) -> bool:
        t = v.type
        if t not in sums:
            sums[t] = isinstance(t, Tuple) and any([_is_sum(x) for part in t.distinct for x in leaves(part)])
        return sums[t]

    calls = [op for op in main.ops if op.callee is not None and op.attributes.get("mb") is not None]
    begins = [op for op in calls if any(map(has_sums, op.outputs)) and not any(map(has_sums, op.inputs))]
    return tuple([v.type for op in begins for v in op.outputs if has_sums(v)])


def beside_logits(op: Op, runtime: Runtime | None) -> tuple[float, float, float]:
    """The bytes that the runtime's kernels of a cross-entropy of 16 bits work in, beside what the op takes and makes,
    forward and backward, and those of the hole that its logits leave; 0 of another op."""
    t = op.inputs[0].type if op.spec.logits is not None else None
    if runtime is None or not isinstance(t, Tensor) or t.dtype.size != 2:
        return 0.0, 0.0, 0.0
    forward, backward, hole = runtime.memory_of_logits(split_classes(t)) or (0.0, 0.0, 0.0)
    count = t.bytes // 2
    return forward * count, backward * count, hole * count


class LiveMemory:
    """Counts a program's memory, class by class, in the order of its lifetimes.

    Without categories `where` is the op of an equal callee.
    """

    @no_collection()
    def __init__(self, lifetimes: Lifetimes, by_category: bool = True) -> None:
        self.lifetimes = lifetimes
        self.program = program = lifetimes.program
        self.by_category = by_category
        self._categories: dict[int, Categories] = {}
        runtime = program.cost.runtime
        self.sizes = _Sizes(caches(program), runtime is not None and runtime.gradient_buffer)
        self.saved = {v: self.sizes.block_of(n) for v, n in bytes_saved(program).items()}
        """The bytes of values that take others than their types say."""
        self.pack, self.unpack = map(lookup, ("Pack", "Unpack"))
        self._results: dict[object, Result] = {}
        self._alike: dict[frozenset[object], MemoryUse] = {}
        self._inputs: dict[int, list[Value]] = {}
        """The program's inputs, by class."""
        for v in program.function.inputs:
            for c in program.classes_of(v.type):
                self._inputs.setdefault(c, []).append(v)

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
        categories = frame.categories
        updated = set(main.updates.values())
        for v in self._inputs.get(c, ()):
            kind = categories.of_input(v) if categories else 0
            made = [Block(((kind, self.sizes[t]),), v not in updated) for t in leaves(v.type)]
            frame.bind(v, holding([(b, 0) for b in made]))
            frame.grow(made)
        frame.live[GRADIENT if categories else 0] += self.gradient_buffer(c)
        start = tuple(frame.live)
        frame.peak, frame.highest = sum(start), start
        curve = frame.curve(self.lifetimes.steps(main, c, frozenset()))
        return MemoryUse(start, frame.highest, frame.where, curve)

    def gradient_buffer(self, c: int) -> int:
        """The bytes of the buffer for sums of gradients on class c, under a runtime that has one."""
        runtime = self.program.cost.runtime
        if runtime is None or not runtime.gradient_buffer:
            return 0
        classes_of = self.program.classes_of
        here = [t for bundle in _sums_begun(self.program.function) if c in classes_of(bundle) for t in leaves(bundle)]
        return sum([self.sizes.block(t) for t in here])

    def categories(self, c: int) -> Categories | None:
        """The categories of the values on class c; None where they are not asked for."""
        if self.by_category and c not in self._categories:
            classes_of = self.program.classes_of
            self._categories[c] = Categories(self.program.function, lambda t: c in classes_of(t))
        return self._categories.get(c)

    def beside_logits(self, op: Op) -> int:
        """The bytes that the runtime's kernels of a cross-entropy work in, beside what the op takes and makes."""
        return round(beside_logits(op, self.program.cost.runtime)[op.spec.logits == "backward"])

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
        steps = self.lifetimes.steps(f, c, unneeded)
        curve: list[Point] = []
        if self.by_category:
            curve = frame.curve(steps)
        else:
            for step in steps:
                frame.step(step)
        classes_of = self.program.classes_of
        outputs = {k: v for k, v in enumerate(f.outputs) if k not in unneeded and c in classes_of(v.type)}
        return _result(frame, outputs, origin, given, tuple(curve))


class _Frame:
    """One function running on one class: its live memory, relative to its beginning."""

    def __init__(self, memory: LiveMemory, c: int) -> None:
        self.memory, self.c = memory, c
        self.env: dict[Value, Holding] = {}
        self.categories = memory.categories(c)
        self.live = [0] * (len(CATEGORIES) if self.categories else 1)
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

    def release(self, values: Iterable[Value]) -> None:
        """Free the buffers of which these are the last values."""
        pop, live = self.env.pop, self.live
        for v in values:
            for b in pop(v).blocks:
                b.refs -= 1
                if not b.refs and not b.outside:
                    for kind, size in b.sizes:
                        live[kind] -= size

    def note(self, highest: Bytes, where: Op | None) -> None:
        total = sum(highest)
        if total > self.peak:
            self.peak, self.highest, self.where = total, highest, where

    def curve(self, steps: Iterable[Step]) -> list[Point]:
        """Run ops; returns their points."""
        found: list[Point] = []
        for step in steps:
            highest, inside = self.step(step)
            found.append(Point(step.number, highest, tuple(self.live), inside))
        return found

    def step(self, step: Step) -> tuple[Bytes, tuple[Point, ...]]:
        """Run one op; returns its highest, and the points of its body."""
        callee = step.op.callee
        found = (self.run(step), ()) if callee is None else self.call(step, callee)
        if step.released:
            self.release(step.released)
        return found

    def run(self, step: Step) -> Bytes:
        op, spec = step.op, step.op.spec
        if step.view:
            self.view(step)
        elif spec.donates or spec.each:
            self.make(step, self.donated(step))
        else:
            self.make(step, {})
        highest = tuple(self.live)
        if spec.logits is not None and (beside := self.memory.beside_logits(op)):
            kind = BUFFER if self.categories else 0
            highest = tuple([x + beside * (k == kind) for k, x in enumerate(highest)])
        self.note(highest, op)
        self.release(step.dies)
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

    def make(self, step: Step, donated: dict[int, list[Block]]) -> None:
        """New buffers for the results, or donated ones."""
        categories, sizes, saved = self.categories, self.memory.sizes, self.memory.saved
        for v in step.makes:
            t = v.type
            if (not donated or v in saved) and isinstance(t, Tensor):  # as most
                kind, size = categories.of(v, 0, t) if categories else 0, saved[v] if v in saved else sizes[t]
                self.live[kind] += size
                self.env[v] = alone(kind, size)
                continue
            tensors: list[tuple[Block, int]] = []
            for i, t in enumerate(leaves(v.type)):
                size = sizes[t]
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
        operands, dies = step.op.inputs, set(step.dies)
        for v in dict.fromkeys(operands[k] for k in step.op.spec.donated(step.op.attributes, len(operands))):
            if v not in dies or v not in self.env:
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
                for b in set(pieces).intersection(split.blocks):
                    b.refs += 1

    def call(self, step: Step, callee: Function) -> tuple[Bytes, tuple[Point, ...]]:
        """Run a call by its (net, peak, where); returns its highest and the points of its body."""
        op, before, memory = step.op, self.live, self.memory
        callee, c = (callee, self.c) if memory.by_category else memory.lifetimes.equal(callee, self.c)
        inputs = memory.lifetimes.used(callee, c, step.unneeded)
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
        return highest, result.curve

    def given(self, step: Step, holdings: dict[int, Holding]) -> Given:
        """The call's operands; a block dies if all values in it die here."""
        refs: dict[Block, int] = {}
        for v in step.dies:
            for b in self.env[v].blocks:
                refs[b] = refs.get(b, 0) + 1
        return Given(holdings, frozenset([b for b, n in refs.items() if n == b.refs and not b.outside]))


def _result(
    frame: _Frame,
    outputs: dict[int, Value],
    origin: dict[Block, tuple[int, int]],
    given: Given,
    curve: tuple[Point, ...],
) -> Result:
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
    return Result(tuple(frame.live), frame.highest, frame.where, tuple(blocks), found, frozenset(splits), curve)
