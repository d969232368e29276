"""Verification: a program is well formed and well typed, so that it computes what its erasure computes.

Each value is defined once, before its uses, under a name of its own; the types of results are those `infer`
gives for the operands; outputs, updates and roles fit. Time is kept apart from space:

- A function that calls others, or is called without `mb`, works on whole values and on pieces that say which
  microbatches they are.
- A function called with `mb` is a *body*, typed at its own, unnamed microbatch. It knows no others, so it may
  reduce or gather over time only what covers all microbatches.
- A program without calls may hold values split over time: it is not scheduled yet.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NoReturn

from distir.ir.device import TIME, Device, Mesh
from distir.ir.errors import IRTypeError
from distir.ir.function import Function, Op, Role, Value, type_of
from distir.ir.infer import infer
from distir.ir.notation import plain, plain_value
from distir.ir.pause import no_collection
from distir.ir.spec import Spec
from distir.ir.type import NOW, Replicate, Tensor, Tuple, Type


class _View:
    """How a function may use the time axis, and what was verified under this rule: functions, types, kinds of ops."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.functions: set[Function] = set()
        self.types: set[Type] = set()
        self.kinds: dict[tuple[object, ...], tuple[Type, ...]] = {}
        """Of ops: by spec, attributes and types of operands those of results."""


@no_collection()
def verify(function: Function) -> None:
    """Check a function and its callees, each once.

    Raises IRTypeError: the function, the number and name of the op, the operand, expected and got.
    """
    scheduled = any(op.callee is not None for op in function.ops)
    verifier = _Verifier()
    verifier.function(function, verifier.whole if scheduled else verifier.unscheduled)
    for v in function.outputs if scheduled else ():
        if any(t.piece is not None for t in _tensors(v.type)):
            raise IRTypeError(
                f"{plain(function.name)}: output {plain_value(v.name)}: expected all microbatches, got {v.type}"
            )


def _makes_whole(spec: Spec) -> bool:
    """Whether the result of an op along the time axis no longer varies in time."""
    return spec.comm is not None and spec.comm.gives is Replicate


def _tensors(t: Type) -> Iterator[Tensor]:
    if isinstance(t, Tensor):
        yield t
    else:
        for part in t.distinct:
            yield from _tensors(part)


class _Verifier:
    """Verifies functions, each once in each view of time."""

    def __init__(self) -> None:
        self.unscheduled = _View("a program without calls")
        self.whole = _View("a function called without mb, or that calls others")
        self.body = _View("a function called with mb")
        self._sizes: dict[Function, int] = {}

    def function(self, f: Function, view: _View) -> None:
        """Raise unless `f` is well typed, itself and its callees."""
        if f in view.functions:
            return
        view.functions.add(f)
        for v in f.inputs:
            if v.type not in view.types:
                self._new_type(f, None, v, view)
        types: dict[Value, Type] = {v: v.type for v in f.inputs}
        if len(types) != len(f.inputs):
            raise IRTypeError(f"{plain(f.name)}: an input is there twice")
        count = len(types)
        number: dict[Op, int] = {}
        known, type_at = view.kinds, types.__getitem__
        for k, op in enumerate(f.ops):
            outputs, spec = op.outputs, op.spec
            try:
                operands = tuple(map(type_at, op.inputs))
            except KeyError:
                _undefined(f, k, op, types)
            kind = (spec, op.attributes.form, operands)
            if len(outputs) == 1:  # as most
                t = types[outputs[0]] = outputs[0].type
                results = (t,)
            else:
                results = tuple(map(type_of, outputs))
                types.update(zip(outputs, results, strict=True))
            if results != known.get(kind):
                self._op(f, k, op, operands, view)
                known[kind] = results
            count += len(outputs)
            if len(types) != count:
                _fail(f, k, f"{spec.name}: expected new results, got one that is defined already")
            if op.of is not None:
                number = number or {x: i for i, x in enumerate(f.ops)}
                if number.get(op.of, k) >= k:
                    _fail(f, k, f"{spec.name}: expected `of` an earlier op of {plain(f.name)}, got {op.of}")
        _check_names(f, types)
        _check_interface(f, types)

    def _op(self, f: Function, k: int, op: Op, types: tuple[Type, ...], view: _View) -> None:
        """Raise unless op `k` fits its view of time, and its results have the types that follow from its operands'."""
        if op.spec.comm is not None:
            self._communication(f, k, op, view)
        try:
            want = infer(op.spec, op.attributes, types)
        except IRTypeError as e:
            _fail(f, k, e.message, e.hint)
        if len(want) != len(op.outputs):
            _fail(f, k, f"{op.op_type}: expected {len(want)} results, got {len(op.outputs)}")
        for v, t in zip(op.outputs, want, strict=True):
            if v.type is not t:
                _wrong_result(f, k, v, t)
            if t not in view.types:
                self._new_type(f, k, v, view)

    def _new_type(self, f: Function, k: int | None, v: Value, view: _View) -> None:
        """Raise if `v`, an input (k None) or a result of op `k`, has no type, or one that `view` forbids."""
        wrong = None
        if v.type is None:  # pyright: ignore[reportUnnecessaryComparison]
            wrong = "has no type", "run infer_types first"
        elif view is not self.unscheduled:
            wrong = self._wrong_in_time(v.type, view)
        if wrong is not None:
            where = f"{plain(f.name)}: {'input' if k is None else f'op {k}'} {plain_value(v.name)}"
            raise IRTypeError(f"{where}: {wrong[0]}", wrong[1])
        view.types.add(v.type)

    def _wrong_in_time(self, t: Type, view: _View) -> tuple[str, str | None] | None:
        """Why a value of type `t` is not allowed in a function of this view of time, and a hint; None if it is."""
        if isinstance(t, Tuple):
            for x in t.moving:
                if x not in view.types:
                    if wrong := self._wrong_in_time(x, view):
                        return wrong
                    view.types.add(x)
            return None
        piece, mesh = t.piece, t.device
        if not t.moves or not isinstance(mesh, Mesh) or mesh.time is None:
            return None if piece is None else (f"does not vary in time: expected no microbatch, got {t}", None)
        size = mesh.sizes[mesh.time]
        if view is self.body:
            if piece is None or piece[1] >= NOW // 2 or piece == (0, size):
                return None
            return f"expected its own microbatch, got {t} in {view.text}", None
        if piece is None or not 0 <= piece[0] <= piece[1] <= size:
            hint = "values are split over time in functions that are called with mb"
            return f"expected a whole, or microbatches within 0..{size - 1}, got {t} in {view.text}", hint
        if piece[1] != piece[0] + 1 and t.over_time.dim is not None:
            return f"is split over time: expected one microbatch, got {t}", None
        return None

    def _communication(self, f: Function, k: int, op: Op, view: _View) -> None:
        """Check calls, and collectives over time in a body."""
        if op.spec.name == "Call":
            self._call(f, k, op, view)
        elif view is self.body and op.attributes.get("axis") == TIME and _makes_whole(op.spec):
            for i, v in enumerate(op.inputs):
                if not isinstance(v.type, Tensor) or v.type.piece != (0, v.type.mesh.size(TIME)):
                    what = f"{op.spec.name}: operand {i}: expected all microbatches, got a body's own: {v.type}"
                    _fail(f, k, what, "reduce over time in a function that is called without mb")

    def _call(self, f: Function, k: int, op: Op, view: _View) -> None:
        callee, microbatch = op.attributes.get("callee"), op.attributes.get("mb")
        if not isinstance(callee, Function):
            _fail(f, k, f"Call: expected a function as callee, got {callee!r}")
        if microbatch is None:  # in a body: at the body's own microbatch
            self.function(callee, self.body if view is self.body else self.whole)
            return
        if view is self.body:
            _fail(f, k, f"Call: expected no mb in a body, got mb={microbatch!r}", "a callee shares its microbatch")
        size = self._sizes.get(callee)
        if size is None:
            sizes = [n for v in (*callee.inputs, *callee.outputs) for n in _time_sizes(v.type)]
            size = self._sizes[callee] = min(sizes, default=NOW)
        if type(microbatch) is not int or not 0 <= microbatch < size:
            _fail(f, k, f"Call: expected mb of {plain(callee.name)} in 0..{size - 1}, got {microbatch!r}")
        self.function(callee, self.body)


def _fail(f: Function, k: int, message: str, hint: str | None = None) -> NoReturn:
    """Raise for op `k`; operands that the message numbers get their names."""
    op = f.ops[k]

    def named(found: re.Match[str]) -> str:
        i = int(found[1])
        return f"{found[0]} ({plain_value(op.inputs[i].name)})" if i < len(op.inputs) else found[0]

    message = re.sub(r"\boperand (\d+)(?! \(%)", named, message)
    results = ", ".join(plain_value(v.name) for v in op.outputs)
    raise IRTypeError(f"{plain(f.name)}: op {k} {results} = {message}", hint)


def _undefined(f: Function, k: int, op: Op, defined: Collection[Value]) -> NoReturn:
    i = next(i for i, v in enumerate(op.inputs) if v not in defined)
    later = next((j for j, o in enumerate(f.ops) if op.inputs[i] in o.outputs), None)
    got = "one of another function" if later is None else f"a result of op {later}"
    _fail(f, k, f"{op.op_type}: operand {i}: expected a value defined before, got {got}")


def _wrong_result(f: Function, k: int, v: Value, want: Type) -> NoReturn:
    op, name = f.ops[k].op_type, plain_value(v.name)
    if v.type is None:  # pyright: ignore[reportUnnecessaryComparison]
        _fail(f, k, f"{op}: result {name} has no type", "run infer_types first")
    _fail(f, k, f"{op}: result {name}: expected {_difference(want, v.type)}")


def _difference(want: Type, got: Type) -> str:
    """`expected, got got`; of long bundles only the first entry that differs."""
    if isinstance(want, Tuple) and isinstance(got, Tuple) and len(want.types) == len(got.types) > 4:
        pairs = zip(want.types, got.types, strict=True)
        i, (a, b) = next((i, (a, b)) for i, (a, b) in enumerate(pairs) if a is not b)
        return f"entry {i} to be {_difference(a, b)}"
    return f"{want}, got {got}"


def _time_sizes(t: Type) -> list[int]:
    """The numbers of microbatches of the meshes that `t` is on."""
    if isinstance(t, Tuple):
        return [n for x in t.distinct for n in _time_sizes(x)]
    mesh = t.device
    return [mesh.sizes[mesh.time]] if isinstance(mesh, Mesh) and mesh.time is not None else []


# names and the interface


def _check_names(f: Function, defined: Collection[Value]) -> None:
    """Raise if two values share a name."""
    if len({v.name for v in defined}) == len(defined):
        return
    seen: set[str] = set()
    for v in (*f.inputs, *[v for op in f.ops for v in op.outputs]):
        if v.name in seen:
            raise IRTypeError(f"{plain(f.name)}: two values have the name {plain_value(v.name)}")
        seen.add(v.name)


def _check_interface(f: Function, defined: Collection[Value]) -> None:
    """Raise unless outputs are values of the function, and roles and updates fit the inputs."""
    for v in f.outputs:
        if v not in defined:
            raise IRTypeError(f"{plain(f.name)}: output {plain_value(v.name)} is not a value of the function")
    for v in f.inputs:
        if v.role is not None and (wrong := _wrong_role(v.role, v.type)):
            raise IRTypeError(f"{plain(f.name)}: input {plain_value(v.name)}: {v.role}: {wrong}")
    inputs, outputs = set(f.inputs), set(f.outputs)
    for v, shape in f.sources.items():
        what = f"{plain(f.name)}: source {shape} of {plain_value(v.name)}"
        if v not in outputs:
            raise IRTypeError(f"{what}: expected an output of the function")
        if not isinstance(v.type, Tensor) or not _within(shape, v.type.global_shape):
            raise IRTypeError(f"{what}: expected a shape within that of {v.type}")
    updated: set[Value] = set()
    for new, old in f.updates.items():
        wrong = None
        if new not in outputs or old not in inputs:
            wrong = "expected an input and an output of the function"
        elif old in updated:
            wrong = "expected one update of an input, got two"
        elif old.kind in ("data", "constant"):
            wrong = f"expected a parameter or a state, got {old.role}"
        elif not _updates(new.type, old.type):
            wrong = f"expected {_difference(old.type, new.type)}"
        elif f.sources.get(new) != (old.role.source if old.role else None):
            wrong = f"expected the input's source shape, {old.role and old.role.source}, got {f.sources.get(new)}"
        if wrong is not None:
            what = f"update of {plain_value(old.name)} by {plain_value(new.name)}"
            raise IRTypeError(f"{plain(f.name)}: {what}: {wrong}")
        updated.add(old)


def _wrong_role(role: Role, t: Type) -> str | None:
    """Why an input of type `t` cannot have this role; None if it can."""
    if not isinstance(t, Tensor):
        return f"expected a tensor, got {t}"
    shape, source = t.global_shape, role.source
    batch = role.batch
    if batch is not None and (role.kind != "data" or type(batch) is not int or not 0 <= batch < len(shape)):
        return f"expected the batch among the dims of data, got {t}"
    if source is not None and not _within(source, role.used or shape):
        return f"expected a source shape within {role.used or shape}, got {source}"
    if role.used is not None and (source is None or not _within(role.used, shape)):
        return f"expected a source shape, and that in which it is used within {shape}, got {role.used}"
    return None


def _within(source: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether padding may have enlarged `source` to `shape`."""
    return len(source) == len(shape) and all(type(a) is int and 0 <= a <= b for a, b in zip(source, shape, strict=True))


def _updates(new: Type, old: Type) -> bool:
    """Whether a value of type `new` may be the next one of an input of type `old`."""
    if new is old:
        return True
    if isinstance(old.device, Device) and isinstance(new.device, Mesh):  # a host holds the inputs
        return new.erased() is old.erased()
    return _same_but_piece(new, old)


def _same_but_piece(a: Type, b: Type) -> bool:
    if isinstance(a, Tuple) and isinstance(b, Tuple):
        return len(a.types) == len(b.types) and all(map(_same_but_piece, a.types, b.types))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.dtype, a.shape, a.device, a.placements) == (b.dtype, b.shape, b.device, b.placements)
    return False
