"""Translation validation of the programs of all ranks: together they compute what the distributed program does.

Every value is hash-consed to a term: the operation and the terms of its operands. Unlike in `validate`, communication
is part of terms: the ranks must do all of the distributed program's. Terms are equal up to

- definitions: a `Gemm` equals the products and sums that define it, a group of optimizers the optimizers in it;
- two laws: a + b = b + a, and the transposed gradient of a matrix is the gradient of the transposed matrix;
- names, the order of ops, `After`, and calls of functions that the distributed program does not have (outlined for a
  compiler), which are inlined.

Linear time: the distributed program, each of its functions, and each distinct program of a rank are visited once. The
order of communication is proved by `check_order`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distir.ir.communication import TRANSFERS
from distir.ir.device import Device, Mesh
from distir.ir.errors import MismatchError
from distir.ir.function import NO_ATTRIBUTES, Attributes, Function, FunctionMaker, Op, Value
from distir.ir.pause import no_collection
from distir.ir.spec import lookup
from distir.ir.type import Tensor, Tuple, Type
from distir.transforms.rank.as_run import as_run
from distir.transforms.rank.project import Home, RankProgram, homes_of, ranks

ADD, TRANSPOSE, WEIGHT, GEMM, AFTER, CALL = map(
    lookup, ("Add", "Transpose", "MatMulGradWeight", "Gemm", "After", "Call")
)
_SENDS, _RECEIVES = lookup("MPISend"), lookup("MPIRecv")

Term = int
"""The number of a term."""


@no_collection()
def validate_ranks(program: Function, programs: Sequence[RankProgram]) -> None:
    """Raises MismatchError, naming rank and op, unless every rank does its part of the distributed program.

    All programs must be well typed. A rank returns the outputs on its device (on a mesh, its piece of them), and does
    its side of each transfer.
    """
    whole = _Distributed(program)
    devices: Sequence[Device | None] = ranks(program) or [None]
    if [(p.rank, p.device) for p in programs] != list(enumerate(devices)):
        raise MismatchError(f"{program.name}: expected a program for each of {len(devices)} ranks, in order")
    known: set[object] = set()
    for p in programs:
        homes = whole.homes_with.get(p.device, frozenset())
        key = p.function, p.inputs, p.outputs, homes
        if key not in known:
            known.add(key)
            try:
                _check(whole, p, homes)
            except MismatchError as e:
                raise MismatchError(f"rank {p.rank}: {e.message}", e.hint) from None


class _Terms:
    """Hash-conses terms: (what, attributes, terms of the operands), where `what` is a Spec or a string."""

    def __init__(self) -> None:
        self.number: dict[tuple[Any, ...], int] = {}
        self.known: list[tuple[Any, ...]] = []
        self.forms: dict[Function, tuple[Term, ...]] = {}
        self.definitions: dict[object, Function] = {}

    def term(self, what: object, attributes: object, ins: tuple[Term, ...], results: int = 1) -> int:
        """The number of the first result's term; those of the other results follow it."""
        key = what, attributes, ins
        found = self.number.get(key)
        if found is None:
            found = self.number[key] = len(self.known)
            self.known.append(key)
            self.known += [("result", k, (found,)) for k in range(1, results)]
        return found

    def members(self, t: Term, n: int) -> Sequence[Term]:
        """The terms of a bundle's n members."""
        what, _, ins = self.known[t]
        return ins if what == "bundle" else [self.term("member", k, (t,)) for k in range(n)]

    def form(self, f: Function) -> tuple[Term, ...]:
        """The terms of a function's outputs over its inputs: equal for two functions that compute the same."""
        if f not in self.forms:
            inputs = [self.term("input", k, ()) for k in range(len(f.inputs))]
            self.forms[f] = tuple(self.outputs(f, inputs))
        return self.forms[f]

    def outputs(self, f: Function, args: Sequence[Term]) -> list[Term]:
        """The terms of a function's outputs for these arguments, with calls inlined."""
        env: dict[Value, Term] = dict(zip(f.inputs, args, strict=True))
        for op in f.ops:
            ins = tuple([env[v] for v in op.inputs])
            outs = self.results(op, ins) if op.callee is None else self.outputs(op.callee, ins)
            env.update(zip(op.outputs, outs, strict=False))
        return [env[v] for v in f.outputs]

    def results(self, op: Op, ins: tuple[Term, ...]) -> Sequence[Term]:
        """The terms of the results of an op that is no call."""
        spec, attributes = op.spec, op.attributes
        if spec.bundle is not None:
            pack = spec.bundle == "pack"
            return [self.term("bundle", None, ins)] if pack else self.members(ins[0], len(op.outputs))
        if spec is AFTER:
            return ins[:1]
        if spec is GEMM:
            return self.outputs(self._definition(op), ins)
        if spec.each is not None:
            count, each, rest = spec.each.count(attributes), spec.each, attributes.without("count")
            firsts = [self.term(each, rest or None, tuple(row), count) for row in spec.rows(attributes, ins)]
            return [t for first in firsts for t in range(first, first + count)]
        if spec is ADD:
            ins = tuple(sorted(ins))
        elif spec is TRANSPOSE and attributes["perm"] == (1, 0) and self.known[ins[0]][0] is WEIGHT:
            _, attributes, ins = self.known[ins[0]]
            spec, ins, attributes = WEIGHT, ins[::-1], attributes or NO_ATTRIBUTES
        first = self.term(spec, attributes or None, ins, len(op.outputs))
        return range(first, first + len(op.outputs))

    def _definition(self, op: Op) -> Function:
        """The ops that define an op, as a function."""
        key = op.spec, op.attributes, tuple([v.type for v in op.inputs])
        if key not in self.definitions:
            maker = FunctionMaker(op.spec.name)
            operands = [maker.add_input_value(f"x{k}", v.type) for k, v in enumerate(op.inputs)]
            parts = op.spec.decompose or (lambda maker, op: op.outputs)
            maker.set_outputs(parts(maker, Op(op.spec, tuple(operands), op.attributes, op.outputs)))
            self.definitions[key] = maker.finalize()
        return self.definitions[key]

    def flat(self, t: Term, of: Type) -> list[Term]:
        """The terms of the tensors in a value."""
        if not isinstance(of, Tuple):
            return [t]
        members = self.members(t, len(of.types))
        return [x for m, u in zip(members, of.types, strict=True) for x in self.flat(m, u)]

    def difference(self, want: Term, got: Term) -> str:
        """The first difference between two terms, searching from the results towards the inputs."""
        while True:
            a, b = self.known[want], self.known[got]
            if a[0] != b[0] or a[1] != b[1] or len(a[2]) != len(b[2]):
                return f"expected {self.show(want)}, got {self.show(got)}"
            want, got = next((x, y) for x, y in zip(a[2], b[2], strict=True) if x != y)

    def show(self, t: Term) -> str:
        what, about, ins = self.known[t]
        if what in ("result", "member"):
            return f"{what} {about} of {self.show(ins[0])}"
        if what == "bundle":
            return f"a bundle of {len(ins)}"
        if isinstance(what, str):
            return f"{what} {about}"
        if what is CALL:
            return f"{about[0]}, mb={about[2]}"
        settings = ", ".join(f"{k}={v}" for k, v in about.items()) if isinstance(about, Attributes) else ""
        return f"{what}({settings})"


class _Distributed(_Terms):
    """The distributed program: its terms and its transfers."""

    def __init__(self, program: Function) -> None:
        super().__init__()
        self.program = program
        self.callees: dict[tuple[Term, ...], str] = {}
        """The name of each callee, by the terms of its outputs; one name for callees that compute the same."""
        for f in program.callees():
            self.callees.setdefault(self.form(f), f.name)
        self.homes_with: dict[Device | None, frozenset[Home]] = _homes_with(program)
        self.transfers: dict[int, Op] = {}
        self.sent: dict[int, list[Term]] = {}
        self.outgoing: dict[Home, list[int]] = {}
        self.incoming: dict[Home, list[int]] = {}
        message = {op: n for n, op in enumerate(as_run(program).ops) if op.spec.route in TRANSFERS}
        self.env: dict[Value, Term] = {v: self.term("input", k, ()) for k, v in enumerate(program.inputs)}
        for op in program.ops:
            ins = tuple([self.env[v] for v in op.inputs])
            if op.spec.route in TRANSFERS:
                outs: Sequence[Term] = [self._moved(op, message[op], ins[0])]
            else:
                outs = self.results(op, ins) if op.callee is None else self.called(op, op.callee, ins)
            self.env.update(zip(op.outputs, outs, strict=True))

    def called(self, op: Op, callee: Function, ins: tuple[Term, ...]) -> Sequence[Term]:
        """The terms of a call's results; a callee that the program does not have is inlined."""
        form, microbatch = self.form(callee), op.attributes.get("mb")
        if form in self.callees:
            n = len(op.outputs)
            first = self.term(CALL, (self.callees[form], form, microbatch), ins, n)
            return range(first, first + n)
        self._check_name(callee, microbatch)
        return self.outputs(callee, ins)

    def _check_name(self, callee: Function, microbatch: int | None) -> None:
        """Raises MismatchError if a callee that differs from all of the program's has the name of one of them, or is
        called for a microbatch."""
        for f in self.program.callees():
            if f.name == callee.name and len(f.outputs) == len(callee.outputs):
                for v, want, got in zip(callee.outputs, self.form(f), self.form(callee), strict=True):
                    if want != got:
                        raise MismatchError(f"{callee.name}: output %{v.name}: {self.difference(want, got)}")
        if microbatch is not None:
            raise MismatchError(f"{callee.name}: no function of the program computes this")

    def _moved(self, op: Op, message: int, x: Term) -> Term:
        source, to = op.inputs[0].type, op.outputs[0].type
        self.transfers[message] = op
        self.sent[message] = self.flat(x, source)
        for home in dict.fromkeys(homes_of(source)):
            self.outgoing.setdefault(home, []).append(message)
        for home in dict.fromkeys(homes_of(to)):
            self.incoming.setdefault(home, []).append(message)
        return self.arrived(to, message, iter(range(len(self.sent[message]))))

    def arrived(self, t: Type, message: int, number: Iterator[int]) -> Term:
        """The term of a transfer's result; the tensors in it are numbered."""
        if isinstance(t, Tuple):
            return self.term("bundle", None, tuple([self.arrived(u, message, number) for u in t.types]))
        return self.term("transfer", (message, next(number)), ())


def _homes_with(program: Function) -> dict[Device | None, frozenset[Home]]:
    """For each device the homes of the program's values that it is in."""
    found: dict[Device | None, list[Home]] = {}
    values = (*program.inputs, *(v for op in program.ops for v in op.outputs))
    for home in {h: None for t in dict.fromkeys(v.type for v in values) for h in homes_of(t)}:
        for d in home.devices if isinstance(home, Mesh) else (home,):
            found.setdefault(d, []).append(home)
    return {d: frozenset(homes) for d, homes in found.items()}


def _check(whole: _Distributed, p: RankProgram, homes: frozenset[Home]) -> None:
    """Raises MismatchError unless a rank in these homes does its part."""
    program, f = whole.program, p.function

    def positions_here(values: Sequence[Value]) -> tuple[int, ...]:
        return tuple([k for k, v in enumerate(values) if all(h in homes for h in homes_of(v.type))])

    for what, positions, mine, all_ in (
        ("inputs", p.inputs, f.inputs, program.inputs),
        ("outputs", p.outputs, f.outputs, program.outputs),
    ):
        if positions != positions_here(all_) or len(mine) != len(positions):
            raise MismatchError(f"{f.name}: expected the {what} number {positions_here(all_)}, got {positions}")
        for k, v in zip(positions, mine, strict=True):
            if v.type is not all_[k].type or v.role != all_[k].role:
                raise MismatchError(f"{f.name}: {what[:-1]} %{v.name}: expected {all_[k]!r}, got {v!r}")
    env: dict[Value, Term] = {v: whole.env[program.inputs[k]] for k, v in zip(p.inputs, f.inputs, strict=True)}
    done = _Transfers(whole)
    for op in f.ops:
        ins = tuple([env[v] for v in op.inputs])
        if "message" in op.attributes:
            outs = done.transfer(op, ins)
        else:
            outs = whole.results(op, ins) if op.callee is None else whole.called(op, op.callee, ins)
        env.update(zip(op.outputs, outs, strict=True))
    for k, v in zip(p.outputs, f.outputs, strict=True):
        want, got = whole.env[program.outputs[k]], env[v]
        if want != got:
            raise MismatchError(f"{f.name}: output %{v.name}: {whole.difference(want, got)}")
    done.complete(homes)
    number = {v: k for k, v in zip((*p.inputs, *p.outputs), (*f.inputs, *f.outputs), strict=True)}
    place = {v: k for k, v in enumerate(program.inputs)}
    outputs = [program.outputs[k] for k in p.outputs]
    want = {k: place[program.updates[v]] for k, v in zip(p.outputs, outputs, strict=True) if v in program.updates}
    want = {k: old for k, old in want.items() if old in p.inputs}
    got = {number[new]: number[old] for new, old in f.updates.items()}
    if want != got:
        raise MismatchError(f"{f.name}: expected updates {want} (output: input), got {got}")


class _Transfers:
    """Collects the sends and receives of a rank's program."""

    def __init__(self, whole: _Distributed) -> None:
        self.whole = whole
        self.sends: dict[int, list[Term]] = {}
        self.receives: dict[int, int] = {}

    def transfer(self, op: Op, ins: tuple[Term, ...]) -> Sequence[Term]:
        """Record a transfer, or one side of it; returns the terms of its results."""
        message, spec = op.attributes["message"], op.spec
        of = self.whole.transfers.get(message)
        if of is None or (spec is not _SENDS and spec is not _RECEIVES and spec is not of.spec):
            raise MismatchError(f"{op}: there is no such transfer, number {message}")
        if spec is _RECEIVES:
            k = self.receives[message] = self.receives.get(message, -1) + 1
            self._check_receive(op, of, k)
            return [self.whole.term("transfer", (message, k), ())]
        _expect(op, of.attributes, op.attributes, ("to", "placements"))
        self.sends.setdefault(message, []).extend(self.whole.flat(ins[0], op.inputs[0].type))
        if spec is _SENDS:
            return []
        self.receives[message] = len(self.whole.sent[message]) - 1
        return [self.whole.arrived(op.outputs[0].type, message, iter(range(self.receives[message] + 1)))]

    def _check_receive(self, op: Op, of: Op, k: int) -> None:
        """Raises MismatchError unless the receive is that of tensor number k of a transfer."""
        sent, got = _tensors(of.inputs[0].type), _tensors(of.outputs[0].type)
        if k >= len(got):
            raise MismatchError(f"{op}: expected {len(got)} tensors of transfer {op.attributes['message']}, got more")
        if op.outputs[0].type is not got[k]:
            raise MismatchError(f"{op}: expected {got[k]}, got {op.outputs[0].type}")
        at = got[k] if isinstance(got[k].device, Mesh) else sent[k]
        want: dict[str, Any] = {"source": sent[k].device, "to": got[k].device}
        if isinstance(at.device, Mesh):
            want["placements"] = at.placements
        _expect(op, want, op.attributes, tuple(want))

    def complete(self, homes: frozenset[Home]) -> None:
        """Raises MismatchError unless a rank in these homes has done its sides of all transfers, and no others."""
        whole = self.whole
        outgoing = {
            m for h in homes for m in whole.outgoing.get(h, ()) if homes.issuperset(_ends(whole.transfers[m])[0])
        }
        incoming = {
            m for h in homes for m in whole.incoming.get(h, ()) if homes.issuperset(_ends(whole.transfers[m])[1])
        }
        for m in sorted(outgoing | self.sends.keys()):
            want, got = whole.sent[m] if m in outgoing else [], self.sends.get(m, [])
            if len(want) != len(got):
                raise MismatchError(f"{whole.transfers[m]}: expected {len(want)} tensors sent, got {len(got)}")
            if want != got:
                a, b = next((a, b) for a, b in zip(want, got, strict=True) if a != b)
                raise MismatchError(f"{whole.transfers[m]}: {whole.difference(a, b)}")
        for m in sorted(incoming | self.receives.keys()):
            want, got = len(whole.sent[m]) if m in incoming else 0, self.receives.get(m, -1) + 1
            if want != got:
                raise MismatchError(f"{whole.transfers[m]}: expected {want} tensors received, got {got}")


def _ends(op: Op) -> tuple[set[Home], set[Home]]:
    return set(homes_of(op.inputs[0].type)), set(homes_of(op.outputs[0].type))


def _tensors(t: Type) -> list[Tensor]:
    return [t] if isinstance(t, Tensor) else [x for u in t.types for x in _tensors(u)]


def _expect(op: Op, want: Mapping[str, Any], got: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if want.get(name) != got.get(name):
            raise MismatchError(f"{op}: attribute {name}: expected {want.get(name)}, got {got.get(name)}")
