"""Who can see whose memory: which tensors of a rank's program may be overwritten, and where.

Every tensor lies in one or more *roots*: memory that an input came in, or that an op took. Views share the roots of
what they are views of; a bundle has the roots of each member. A tensor may be overwritten by an op if that is the last
use of all that lies in its roots, and they belong to the function: an op of it took them, or every caller hands them
over, having no other use for them. What is on its way to another rank belongs to nobody, nor do kept constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from distir.backends.buckets import buffered
from distir.backends.passing import passes
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tuple, Type
from distir.ops.comm import ALONG_AXIS

Place = tuple[int, ...]
"""A tensor among the inputs of a function: the position of the input, then of the member, if it is a bundle."""
Root = int | Place
"""Memory an op took, by number, or that of an input."""


class Part(NamedTuple):
    """The memory of a tensor. Not `plain`: it may not be written to, whoever else sees it, for several of its elements
    may be one in memory, or it is on its way somewhere, or a kept constant. `lent`: it may lie in a
    communication buffer that the next step uses again.
    """

    roots: frozenset[Root]
    plain: bool = True
    lent: bool = False


Parts = Any
"""A Part, or for a bundle a tuple of its members' Parts."""


class Share(NamedTuple):
    """The memory of a result of an op, by number: that of operands, or, after those, what the op took."""

    within: frozenset[int]
    plain: bool = True


class Summary(NamedTuple):
    """What a call does with memory: the Parts of its results, in which numbers are memory it took, and the inputs that
    are still on their way when it returns."""

    outputs: tuple[Parts, ...]
    sent: frozenset[Place]


Shares = Callable[[Op], Sequence[Share] | None]
"""For each result of an op that computes where it lies; None if they are constants that are kept."""


class Memory:
    """The memory of one function's values."""

    def __init__(self, function: Function, shares: Shares, callee: Callable[[Function], Summary]) -> None:
        self.function = function
        self.shares, self.callee = shares, callee
        self.parts: dict[Value, Parts] = {}
        self.foreign: set[Root] = set()
        """What may never be overwritten: sent, or kept."""
        self.buffered = buffered(function)
        self._taken = 0
        for k, v in enumerate(function.inputs):
            self.parts[v] = _given(v.type, (k,))
        for op in function.ops:
            self.parts.update(zip(op.outputs, self._results(op), strict=True))
        used: dict[Value, int] = dict.fromkeys(function.inputs, -1)
        for k, op in enumerate(function.ops):
            used.update(dict.fromkeys((*op.inputs, *op.outputs), k))
        used.update(dict.fromkeys(function.outputs, len(function.ops)))
        self.used = used
        self.end: dict[Root, int] = {}
        """The number of the last op that uses anything in a root; that of ops, if an output does."""
        for v, k in used.items():
            for part in each_part(self.parts[v]):
                for root in part.roots:
                    self.end[root] = max(self.end.get(root, -1), k)
        self.owned: frozenset[Place] = frozenset()

    def summary(self) -> Summary:
        """For callers."""
        sent = frozenset(r for r in self.foreign if not isinstance(r, int))

        def told(part: Part) -> Part:
            return part if part.roots.isdisjoint(self.foreign) else part._replace(plain=False)

        return Summary(tuple([_mapped(self.parts[v], told) for v in self.function.outputs]), sent)

    def may_overwrite(self, op: Op, k: int, operand: int) -> bool:
        """Whether op number k may write into an operand (of a bundle: into every member)."""
        mine = list(each_part(self.parts[op.inputs[operand]]))
        return all(self._free(part, k) for part in mine) and self.alone(mine, [op])

    def renewable(self, op: Op, k: int) -> list[bool]:
        """Whether op number k, whose result may lie where its operand does, may write there; of a bundle, for each
        member.
        """
        made: dict[Value, int] = {}
        for number, other in enumerate(self.function.ops[:k]):
            made.update(dict.fromkeys(other.outputs, number))
        later: set[Root] = set()  # memory of which others see something after it
        for v, used in self.used.items():
            if used > k and (v in made or v in self.function.inputs):
                later.update(*[part.roots for part in each_part(self.parts[v])])
        parts = list(each_part(self.parts[op.inputs[0]]))
        own = [part.plain and not part.lent and all(map(self._owns, part.roots)) for part in parts]
        return [
            mine and part.roots.isdisjoint(later) and self.alone([part], [op])
            for mine, part in zip(own, parts, strict=True)
        ]

    def alone(self, parts: Iterable[Part], ops: Iterable[Op]) -> bool:
        """Whether among the operands of these ops nothing but each of these parts, once, shares its memory."""
        seen = Counter([r for op in ops for v in op.inputs for part in each_part(self.parts[v]) for r in part.roots])
        return all(seen[r] == 1 for part in parts for r in part.roots)

    def ends(self, v: Value, k: int) -> bool:
        """Whether no op after number k sees the memory of a tensor, which an op of this function took."""
        return all(isinstance(r, int) and r not in self.foreign and self.end[r] <= k for r in self.parts[v].roots)

    def handed(self, op: Op, k: int) -> frozenset[Place]:
        """The tensors that call number k hands over."""
        dying = [j for j, v in enumerate(op.inputs) if self.used[v] <= k]
        parts = [(place, part) for j in dying for place, part in _places(self.parts[op.inputs[j]], (j,))]
        seen = Counter([r for _, part in parts for r in part.roots])
        return frozenset(
            place for place, part in parts if self._free(part, k) and all(seen[r] == 1 for r in part.roots)
        )

    def _free(self, part: Part, k: int) -> bool:
        return not part.lent and part.plain and all(self.end[r] <= k and self._owns(r) for r in part.roots)

    def _owns(self, root: Root) -> bool:
        return root not in self.foreign and (isinstance(root, int) or root in self.owned)

    # --- what ops make

    def _results(self, op: Op) -> Sequence[Parts]:
        ins = [self.parts[v] for v in op.inputs]
        if op.callee is not None:
            return self._called(self.callee(op.callee), ins)
        if op.spec.bundle is not None:
            return [tuple(ins)] if op.spec.bundle == "pack" else ins[0]
        if op.spec.comm is not None:
            return self._moved(op, ins)
        shares = self.shares(op)
        if shares is None:
            own = [self._own() for _ in op.outputs]
            self.foreign.update(r for part in own for r in part.roots)
            return own
        at: dict[int, Part] = dict(enumerate(ins))
        for number in sorted({n for s in shares for n in s.within} - at.keys()):
            at[number] = self._own()
        return [self._union([at[n] for n in s.within], s.plain) for s in shares]

    def _own(self) -> Part:
        """New memory."""
        self._taken += 1
        return Part(frozenset((self._taken,)))

    def _union(self, parts: Sequence[Part], plain: bool = True) -> Part:
        if not parts:
            return self._own()
        roots = frozenset[Root]().union(*[p.roots for p in parts])
        return Part(roots, plain and all(p.plain for p in parts), any(p.lent for p in parts))

    def _moved(self, op: Op, ins: Sequence[Parts]) -> Sequence[Parts]:
        """Communication. What an operation under way still reads counts as part of its result, which is waited for."""
        if op.spec.name == "Accumulate":
            return [self._new(v.type) for v in op.outputs]
        if passes(op):
            return ins[:1]
        if op in self.buffered:  # which reads its buffer only
            return [_mapped(self._new(v.type), lambda own: own._replace(lent=True)) for v in op.outputs]
        read = [part for x in ins for part in each_part(x)]
        if op.spec.alias:
            return [self._union(read)]
        if op.spec.name not in ALONG_AXIS:  # a send may be under way until the step ends
            self.foreign.update(r for part in read for r in part.roots)
        if op.outputs and isinstance(op.outputs[0].type, Tuple):  # each member of what the same member is
            return [tuple([self._union([self._own(), part]) for part in ins[0]])]
        return [self._union([self._own(), *read]) for _ in op.outputs]

    def _new(self, t: Type) -> Parts:
        return tuple([self._new(u) for u in t.types]) if isinstance(t, Tuple) else self._own()

    def _called(self, summary: Summary, ins: Sequence[Parts]) -> Sequence[Parts]:
        own: dict[int, Part] = {}

        def here(part: Part) -> Part:
            roots: list[Part] = []
            for r in part.roots:
                if isinstance(r, int):
                    if r not in own:
                        own[r] = self._own()
                    roots.append(own[r])
                else:
                    roots.append(_at(ins, r))
            return self._union(roots, part.plain)._replace(lent=part.lent or any(p.lent for p in roots))

        for place in summary.sent:
            self.foreign.update(_at(ins, place).roots)
        return [_mapped(parts, here) for parts in summary.outputs]


def _given(t: Type, place: Place) -> Parts:
    if isinstance(t, Tuple):
        return tuple([_given(u, (*place, k)) for k, u in enumerate(t.types)])
    return Part(frozenset((place,)))


def each_part(parts: Parts) -> Iterator[Part]:
    if isinstance(parts, Part):
        yield parts
    else:
        for p in parts:
            yield from each_part(p)


def _places(parts: Parts, place: Place) -> Iterator[tuple[Place, Part]]:
    if isinstance(parts, Part):
        yield place, parts
    else:
        for k, p in enumerate(parts):
            yield from _places(p, (*place, k))


def _mapped(parts: Parts, change: Callable[[Part], Part]) -> Parts:
    return change(parts) if isinstance(parts, Part) else tuple([_mapped(p, change) for p in parts])


def _at(parts: Sequence[Parts], place: Place) -> Part:
    found: Parts = parts
    for k in place:
        found = found[k]
    return found


class Ownership:
    """The memory of a rank's program and of all that it calls, by function.

    `body(f)` is what is run for f. `updates` are the positions of outputs that replace inputs, and of those: the
    program may overwrite such an input, unless something else it gave in the step before shared its memory.
    """

    def __init__(
        self,
        program: Function,
        shares: Shares,
        body: Callable[[Function], Function],
        updates: Mapping[int, int],
    ) -> None:
        self.memory: dict[Function, Memory] = {}
        summaries: dict[Function, Summary] = {}
        for f in (*program.callees(), program):
            self.memory[f] = Memory(body(f), shares, summaries.__getitem__)
            summaries[f] = self.memory[f].summary()
        self.calls = Counter([op.callee for f in (*program.callees(), program) for op in f.ops if op.callee])
        """How often each function is called in a step."""
        self.memory[program].owned = self._replaced(self.memory[program], updates)
        self._hand_over(program)

    def _replaced(self, main: Memory, updates: Mapping[int, int]) -> frozenset[Place]:
        outputs = [list(each_part(main.parts[v])) for v in main.function.outputs]
        seen = Counter([r for parts in outputs for part in parts for r in part.roots])
        self.keeps_buffers = not any(part.lent for parts in outputs for part in parts)
        """Whether nothing of a step is left in communication buffers when it is over."""
        replaced = set(updates.values())

        def alone(root: Root) -> bool:
            return root not in main.foreign and seen[root] == 1 and (isinstance(root, int) or root[0] in replaced)

        return frozenset(
            (i,) for k, i in updates.items() if all(p.plain and all(map(alone, p.roots)) for p in outputs[k])
        )

    def _hand_over(self, program: Function) -> None:
        """What all calls of a function hand over is its own. What a callee calls gets nothing."""
        main = self.memory[program]
        handed: dict[Function, frozenset[Place]] = {}
        for k, op in enumerate(main.function.ops):
            if op.callee is not None:
                over = main.handed(op, k)
                handed[op.callee] = handed[op.callee] & over if op.callee in handed else over
        inner = {op.callee for f in program.callees() for op in f.ops if op.callee is not None}
        for f, over in handed.items():
            if f not in inner:
                self.memory[f].owned = over
