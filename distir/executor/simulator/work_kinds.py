"""What each op of a scheduled program is for: the forward or backward pass, work done again, or the update.

Derived from dataflow, never from names.
"""

from __future__ import annotations

from collections.abc import Mapping

from distir.executor.simulator.categories import leaves
from distir.executor.simulator.equal_callees import shapes_of
from distir.ir.device import TIME, Device, Mesh
from distir.ir.function import Function, Op, Value
from distir.ir.mesh_form import MeshForm
from distir.ir.spec import lookup
from distir.ir.type import Tensor, Tuple, Type

FORWARD, BACKWARD, RECOMPUTED, UPDATE, COMPUTE = "forward", "backward", "recomputed", "update", "compute"


def pass_of_ops(main: Function) -> dict[Op, str]:
    """FORWARD, BACKWARD or UPDATE for each op of a program, calls included; COMPUTE for all if it has no backward op.

    An op is of the backward pass if it records its forward op (`of`); a call, if it uses a result of another call of
    the same stage and microbatch, that is, a saved value. An update depends on gradients and is not of a microbatch;
    ops that only join microbatches are not updates.
    """
    makers: dict[Value, Op] = {}
    """The calls that made values."""
    late: set[Value] = set()
    kinds: dict[Op, str] = {}
    for op in main.ops:
        kind = FORWARD
        if op.of is not None or _uses_saved(op, makers):
            kind = BACKWARD
        elif not late.isdisjoint(op.inputs):
            kind = UPDATE if microbatch_of(op) is None and not _joins(op) else BACKWARD
        kinds[op] = kind
        if kind != FORWARD:
            late.update(op.outputs)
        if op.callee is not None:
            makers.update(dict.fromkeys(op.outputs, op))
    return kinds if late else dict.fromkeys(kinds, COMPUTE)


def microbatch_of(op: Op) -> int | None:
    """The microbatch of an op: of a call its attribute, else that of its operands; None if not a single one."""
    if op.callee is not None:
        return op.attributes.get("mb")
    pieces = {t.piece for v in op.inputs for t in leaves(v.type)}
    piece = pieces.pop() if len(pieces) == 1 else None
    return piece[0] if piece is not None and piece[1] == piece[0] + 1 else None


def _joins(op: Op) -> bool:
    """Whether the op joins a device's pieces of all microbatches (it is along the time axis)."""
    return op.attributes.get("axis") == TIME


def _uses_saved(op: Op, makers: Mapping[Value, Op]) -> bool:
    """Whether a call uses a result of another call of the same stage and microbatch."""
    mb = op.attributes.get("mb") if op.callee is not None else None
    if mb is None:
        return False
    calls = {makers[v] for v in op.inputs if v in makers}
    return any([made.attributes.get("mb") == mb and _stage(made) is _stage(op) for made in calls])


def stages_of(main: Function) -> set[Device | Mesh | None]:
    """The devices or meshes on which calls of microbatches run."""
    return {_stage(op) for op in main.ops if op.callee is not None and op.attributes.get("mb") is not None}


def _stage(call: Op) -> Device | Mesh | None:
    """The device or mesh of a call's results."""
    if call.outputs and (device := call.outputs[0].type.device) is not None:
        return device  # that of the first tensor
    return next((t.device for v in call.outputs if (t := _first(v.type)) is not None), None)


def _first(t: Type) -> Tensor | None:
    """The first tensor of a type; a bundle may have thousands."""
    if isinstance(t, Tensor):
        return t
    return (
        next((found for part in t.types if (found := _first(part)) is not None), None) if isinstance(t, Tuple) else None
    )


def kinds_of_work(main: Function) -> dict[Op, str]:
    """The kind of each op of a program and of its callees: as `pass_of_ops`, and RECOMPUTED for one that computes again
    what its stage has computed of the same microbatch.

    The ops of a callee are of the kind of its first call.
    """
    kinds = pass_of_ops(main)
    terms = _Terms()
    calls: dict[tuple[Device | Mesh | None, int | None], list[Op]] = {}
    """Those of a stage and microbatch so far."""
    seen: set[Function] = set()
    shapes = shapes_of(main)
    again: dict[object, list[int]] = {}
    for op in main.ops:
        callee = op.callee
        if callee is None:
            terms.add(op, terms.main)
            continue
        before = calls.setdefault((_stage(op), op.attributes.get("mb")), [])
        if callee not in seen:
            seen.add(callee)
            kinds.update(dict.fromkeys(callee.ops, kinds[op]))
            if kinds[op] == BACKWARD and before:
                key = terms.form([*before, op], shapes)
                if key not in again:
                    again[key] = terms.computed_again(op, before)
                kinds.update([(callee.ops[k], RECOMPUTED) for k in again[key]])
        before.append(op)
    return kinds


Term = object
"""Equal for values that are computed alike from the same values."""


class _Bundle(tuple[Term, ...]):
    """The terms of a bundle's members."""

    __slots__ = ()


def _form(term: Term, number: dict[Value, int], made: Op) -> object:
    """A term by the numbers of the values in it, those of new ones being added; `made` for what an op has made."""
    if isinstance(term, _Bundle):
        return tuple([_form(x, number, made) for x in term])
    return number.setdefault(term, len(number)) if isinstance(term, Value) else made


class _Terms:
    """Terms of values, numbered, with communication erased."""

    def __init__(self) -> None:
        self.main: dict[Value, Term] = {}
        """Of the program's values; those that are not here are terms themselves."""
        self._numbers: dict[object, int] = {}
        self._pack, self._unpack = lookup("Pack"), lookup("Unpack")

    def add(self, op: Op, env: dict[Value, Term]) -> Term:
        """Add the terms of an op's results; returns the op's."""
        operands = tuple([env.get(v, v) for v in op.inputs])
        if op.spec is self._pack:
            env[op.outputs[0]] = bundle = _Bundle(operands)
            return bundle
        if op.spec is self._unpack and isinstance(operands[0], _Bundle):
            env.update(zip(op.outputs, operands[0], strict=True))
            return operands
        if op.spec.comm is not None and operands and op.callee is None:
            env.update(dict.fromkeys(op.outputs, operands[0]))
            return operands
        key = op.spec, op.attributes.form, operands
        term = self._numbers.setdefault(key, len(self._numbers))
        for k, v in enumerate(op.outputs):
            env[v] = term, k
        return term

    def form(self, calls: list[Op], shapes: Mapping[Function, tuple[MeshForm, Mesh]]) -> object:
        """What `computed_again` depends on: equal for callees that are equal up to their mesh and are called alike, if
        no argument is computed outside of calls."""
        made: dict[Value, tuple[int, int]] = {}
        number: dict[Value, int] = {}
        rows: list[object] = []
        for n, call in enumerate(calls):
            shape = shapes.get(call.callee) if call.callee is not None else None
            given = [made[v] if v in made else (_form(self.main.get(v, v), number, calls[-1]),) for v in call.inputs]
            rows.append((shape[0] if shape is not None else call, *given))
            made.update([(v, (n, k)) for k, v in enumerate(call.outputs)])
        return tuple(rows)

    def computed_again(self, call: Op, before: list[Op]) -> list[int]:
        """The numbers of the ops of a call's callee that compute what one of the calls `before` has computed; views
        aside."""
        computed: set[Term] = set()
        known: dict[Value, Term] = {}
        for other in before:
            assert other.callee is not None
            env = self._arguments(other, known)
            computed.update([self.add(op, env) for op in other.callee.ops])
            known.update(zip(other.outputs, [env.get(v, v) for v in other.callee.outputs], strict=True))
        assert call.callee is not None
        env = self._arguments(call, known)
        found: list[int] = []
        new: set[Value] = set()  # what uses these is not in `computed`
        for k, op in enumerate(call.callee.ops):
            moves = op.spec.comm is not None or op.spec.bundle is not None
            if not moves and not new.isdisjoint(op.inputs):
                new.update(op.outputs)
                continue
            term = self.add(op, env)
            if term not in computed:
                if not moves:
                    new.update(op.outputs)
            elif not op.spec.alias:
                found.append(k)
        return found

    def _arguments(self, call: Op, known: Mapping[Value, Term]) -> dict[Value, Term]:
        assert call.callee is not None
        given = [known.get(v, self.main.get(v, v)) for v in call.inputs]
        return dict(zip(call.callee.inputs, given, strict=True))
