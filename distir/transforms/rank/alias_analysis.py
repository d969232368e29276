"""Alias analysis: which tensors of a rank's program may be overwritten, and by which op.

Every tensor lies in one or more *roots*: the memory of an input, or memory that an op allocated. A view shares the
roots of its base; a bundle has the roots of its members. An op may overwrite a tensor if it is the last use of all
tensors in its roots, and the function owns these: one of its ops allocated them, or every caller donates them, having
no other use for them. Tensors that are being sent to another rank, and cached constants, are never overwritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from distir.ir.function import Function, Op, Value
from distir.ir.type import Replicate, Tensor, Tuple, Type
from distir.transforms.rank.idle import is_idle

Place = tuple[int, ...]
"""A tensor among the inputs of a function: the position of the input, then, in a bundle, of the member."""
Root = int | Place
"""A number for memory that an op allocated; a Place for that of an input."""


class TensorMemory(NamedTuple):
    """The memory of a tensor. Not `plain`: never written to, since its elements may overlap in memory, or it is being
    sent, or a cached constant. `in_buffer`: it may lie in a communication buffer that the next step reuses.
    """

    roots: frozenset[Root]
    plain: bool = True
    in_buffer: bool = False


ValueMemory = Any
"""A TensorMemory, or for a bundle a tuple of its members'."""


class ResultAlias(NamedTuple):
    """The memory that a result of an op may lie in: numbers of operands, and, above these, of memory it allocates."""

    within: frozenset[int]
    plain: bool = True


class CallSummary(NamedTuple):
    """The effects of a call on memory: the memory of its results (numbers: allocated by the call), and the inputs that
    are still being sent when it returns."""

    outputs: tuple[ValueMemory, ...]
    sent: frozenset[Place]


ResultAliases = Callable[[Op], Sequence[ResultAlias] | None]
"""For each result of a compute op the memory it lies in; None if the results are cached constants."""


class FunctionMemory:
    """The memory of one function's values."""

    def __init__(self, function: Function, shares: ResultAliases, callee: Callable[[Function], CallSummary]) -> None:
        self.function = function
        self.shares, self.callee = shares, callee
        self.parts: dict[Value, ValueMemory] = {}
        self.protected: set[Root] = set()
        """Roots that are never overwritten: being sent, or of cached constants."""
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
        """The number of the last op that uses a tensor in a root; the number of ops if an output lies in it."""
        for v, k in used.items():
            for part in each_part(self.parts[v]):
                for root in part.roots:
                    self.end[root] = max(self.end.get(root, -1), k)
        self.owned: frozenset[Place] = frozenset()

    def summary(self) -> CallSummary:
        """The function's effects, for the analysis of its callers."""
        sent = frozenset(r for r in self.protected if not isinstance(r, int))

        def exported(part: TensorMemory) -> TensorMemory:
            return part if part.roots.isdisjoint(self.protected) else part._replace(plain=False)

        return CallSummary(tuple([_mapped(self.parts[v], exported) for v in self.function.outputs]), sent)

    def may_overwrite(self, op: Op, k: int, operand: int) -> bool:
        """Whether op number k may overwrite an operand (a bundle: all its members)."""
        mine = list(each_part(self.parts[op.inputs[operand]]))
        return all(self._free(part, k) for part in mine) and self._exclusive(mine, op)

    def renewable(self, op: Op, k: int) -> list[bool]:
        """Whether op number k, whose result may be a view of its operand, may write into it; one answer per member."""
        made, lying = self._lying

        def ends(root: Root) -> bool:
            """Whether no value that exists by then lies there and is used after the op."""
            return not any(made[v] < k < self.used[v] for v in lying.get(root, ()))

        parts = list(each_part(self.parts[op.inputs[0]]))
        own = [part.plain and not part.in_buffer and all(map(self._owns, part.roots)) for part in parts]
        return [
            mine and all(map(ends, part.roots)) and self._exclusive([part], op)
            for mine, part in zip(own, parts, strict=True)
        ]

    @cached_property
    def _lying(self) -> tuple[dict[Value, int], dict[Root, list[Value]]]:
        """The number of the op that makes each value, -1 for inputs; and the values that lie in each root."""
        made: dict[Value, int] = dict.fromkeys(self.function.inputs, -1)
        for number, op in enumerate(self.function.ops):
            made.update(dict.fromkeys(op.outputs, number))
        lying: dict[Root, list[Value]] = {}
        for v in made:
            for part in each_part(self.parts[v]):
                for root in part.roots:
                    lying.setdefault(root, []).append(v)
        return made, lying

    def _exclusive(self, parts: Iterable[TensorMemory], op: Op) -> bool:
        """Whether none of these parts shares memory with another operand of the op, or with each other."""
        seen = Counter([r for v in op.inputs for part in each_part(self.parts[v]) for r in part.roots])
        return all(seen[r] == 1 for part in parts for r in part.roots)

    def ends(self, v: Value, k: int) -> bool:
        """Whether an op of this function allocated the memory of a tensor, and no op after number k uses it."""
        return all(isinstance(r, int) and r not in self.protected and self.end[r] <= k for r in self.parts[v].roots)

    def donated(self, op: Op, k: int) -> frozenset[Place]:
        """The tensors among its arguments that call number k donates to the callee."""
        dying = [j for j, v in enumerate(op.inputs) if self.used[v] <= k]
        parts = [(place, part) for j in dying for place, part in _places(self.parts[op.inputs[j]], (j,))]
        seen = Counter([r for _, part in parts for r in part.roots])
        return frozenset(
            place for place, part in parts if self._free(part, k) and all(seen[r] == 1 for r in part.roots)
        )

    def _free(self, part: TensorMemory, k: int) -> bool:
        return not part.in_buffer and part.plain and all(self.end[r] <= k and self._owns(r) for r in part.roots)

    def _owns(self, root: Root) -> bool:
        return root not in self.protected and (isinstance(root, int) or root in self.owned)

    # --- the memory of results

    def _results(self, op: Op) -> Sequence[ValueMemory]:
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
            self.protected.update(r for part in own for r in part.roots)
            return own
        at: dict[int, TensorMemory] = dict(enumerate(ins))
        for number in sorted({n for s in shares for n in s.within} - at.keys()):
            at[number] = self._own()
        return [self._union([at[n] for n in s.within], s.plain) for s in shares]

    def _own(self) -> TensorMemory:
        """A newly allocated tensor."""
        self._taken += 1
        return TensorMemory(frozenset((self._taken,)))

    def _union(self, parts: Sequence[TensorMemory], plain: bool = True) -> TensorMemory:
        if not parts:
            return self._own()
        roots = frozenset[Root]().union(*[p.roots for p in parts])
        return TensorMemory(roots, plain and all(p.plain for p in parts), any(p.in_buffer for p in parts))

    def _moved(self, op: Op, ins: Sequence[ValueMemory]) -> Sequence[ValueMemory]:
        """The results of a communication op. Operands that it still reads count as part of its result: the wait for the
        result ends these reads."""
        if op.spec.accumulates:
            return [self._new(v.type) for v in op.outputs]
        if is_idle(op):
            return ins[:1]
        if op in self.buffered:  # reads its buffer only, not its operands
            return [_mapped(self._new(v.type), lambda own: own._replace(in_buffer=True)) for v in op.outputs]
        read = [part for x in ins for part in each_part(x)]
        if op.spec.alias:
            return [self._union(read)]
        if op.spec.route != "axis":  # a send may not complete before the step ends
            self.protected.update(r for part in read for r in part.roots)
        if op.outputs and isinstance(
            op.outputs[0].type, Tuple
        ):  # member k of the result depends on member k of the operand alone
            return [tuple([self._union([self._own(), part]) for part in ins[0]])]
        return [self._union([self._own(), *read]) for _ in op.outputs]

    def _new(self, t: Type) -> ValueMemory:
        return tuple([self._new(u) for u in t.types]) if isinstance(t, Tuple) else self._own()

    def _called(self, summary: CallSummary, ins: Sequence[ValueMemory]) -> Sequence[ValueMemory]:
        own: dict[int, TensorMemory] = {}

        def here(part: TensorMemory) -> TensorMemory:
            roots: list[TensorMemory] = []
            for r in part.roots:
                if isinstance(r, int):
                    if r not in own:
                        own[r] = self._own()
                    roots.append(own[r])
                else:
                    roots.append(_at(ins, r))
            in_buffer = part.in_buffer or any(p.in_buffer for p in roots)
            return self._union(roots, part.plain)._replace(in_buffer=in_buffer)

        for place in summary.sent:
            self.protected.update(_at(ins, place).roots)
        return [_mapped(parts, here) for parts in summary.outputs]


def buffered(function: Function) -> dict[Op, Op]:
    """The collectives on bundles that run on one contiguous buffer, each with the op that packs its bundle.

    The bundle has no other use, so that its members can be written into the buffer directly.
    """
    used = Counter([v for op in function.ops for v in op.inputs] + list(function.outputs))
    packs: dict[Value, Op] = {}
    found: dict[Op, Op] = {}
    for op in function.ops:
        if op.spec.bundle == "pack" and _flat(op) and used[op.outputs[0]] == 1:
            packs[op.outputs[0]] = op
        elif op.inputs and op.inputs[0] in packs and op.spec.comm is not None:
            if is_idle(op) and used[op.outputs[0]] == 1:
                packs[op.outputs[0]] = packs[op.inputs[0]]
            elif op.spec.comm.sums and op.spec.comm.gives is Replicate and not is_idle(op):
                found[op] = packs[op.inputs[0]]
    return found


def _flat(pack: Op) -> bool:
    """Whether one buffer can hold all members: tensors of the same floating dtype."""
    types = [v.type for v in pack.inputs]
    dtypes = {t.dtype for t in types if isinstance(t, Tensor)}
    return len(dtypes) == 1 and not any(isinstance(t, Tuple) for t in types) and dtypes.pop().floating


def _given(t: Type, place: Place) -> ValueMemory:
    if isinstance(t, Tuple):
        return tuple([_given(u, (*place, k)) for k, u in enumerate(t.types)])
    return TensorMemory(frozenset((place,)))


def each_part(parts: ValueMemory) -> Iterator[TensorMemory]:
    if isinstance(parts, TensorMemory):
        yield parts
    else:
        for p in parts:
            yield from each_part(p)


def _places(parts: ValueMemory, place: Place) -> Iterator[tuple[Place, TensorMemory]]:
    if isinstance(parts, TensorMemory):
        yield place, parts
    else:
        for k, p in enumerate(parts):
            yield from _places(p, (*place, k))


def _mapped(parts: ValueMemory, change: Callable[[TensorMemory], TensorMemory]) -> ValueMemory:
    return change(parts) if isinstance(parts, TensorMemory) else tuple([_mapped(p, change) for p in parts])


def _at(parts: Sequence[ValueMemory], place: Place) -> TensorMemory:
    found: ValueMemory = parts
    for k in place:
        found = found[k]
    return found


class Ownership:
    """The memory of a rank's program and of its callees, by function.

    `updates` maps positions of outputs to the positions of the inputs that they replace in the next step. The program
    may overwrite such an input, unless another output of the step before shares its memory.
    """

    def __init__(
        self,
        program: Function,
        shares: ResultAliases,
        updates: Mapping[int, int],
    ) -> None:
        self.memory: dict[Function, FunctionMemory] = {}
        summaries: dict[Function, CallSummary] = {}
        for f in (*program.callees(), program):
            self.memory[f] = FunctionMemory(f, shares, summaries.__getitem__)
            summaries[f] = self.memory[f].summary()
        self.calls = Counter([op.callee for f in (*program.callees(), program) for op in f.ops if op.callee])
        """The number of calls of each function in a step."""
        self.memory[program].owned = self._replaced(self.memory[program], updates)
        self._donate(program)

    def _replaced(self, main: FunctionMemory, updates: Mapping[int, int]) -> frozenset[Place]:
        outputs = [list(each_part(main.parts[v])) for v in main.function.outputs]
        seen = Counter([r for parts in outputs for part in parts for r in part.roots])
        self.keeps_buffers = not any(part.in_buffer for parts in outputs for part in parts)
        """Whether no output of a step may lie in a communication buffer: then the next step may reuse them."""
        replaced = set(updates.values())

        def alone(root: Root) -> bool:
            return root not in main.protected and seen[root] == 1 and (isinstance(root, int) or root[0] in replaced)

        return frozenset(
            (i,) for k, i in updates.items() if all(p.plain and all(map(alone, p.roots)) for p in outputs[k])
        )

    def _donate(self, program: Function) -> None:
        """A function owns the arguments that all its calls donate; a function that a callee calls owns none."""
        main = self.memory[program]
        donated: dict[Function, frozenset[Place]] = {}
        for k, op in enumerate(main.function.ops):
            if op.callee is not None:
                places = main.donated(op, k)
                donated[op.callee] = donated[op.callee] & places if op.callee in donated else places
        inner = {op.callee for f in program.callees() for op in f.ops if op.callee is not None}
        for f, places in donated.items():
            if f not in inner:
                self.memory[f].owned = places
