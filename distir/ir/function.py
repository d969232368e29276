"""Values, ops, functions, and the one way to build them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from distir.ir.errors import ModelError
from distir.ir.exact_attributes import NO_ATTRIBUTES as NO_ATTRIBUTES
from distir.ir.exact_attributes import Attributes as Attributes
from distir.ir.result_types import infer
from distir.ir.spec import Spec, lookup
from distir.ir.type import Tensor, Type

_SEQUENCES = (list, tuple)
_NUMBERS = frozenset((int, float))


def _freeze(value: Any) -> Any:
    """The value, lists in it as tuples."""
    if not isinstance(value, _SEQUENCES) or (type(value) is tuple and _NUMBERS.issuperset(map(type, value))):
        return value
    return tuple([_freeze(v) for v in value])


class Role:
    """The role of an input: "data" (with the dim of the batch), "parameter", "state" (of the optimizer) or "constant".

    `source` is the shape in the model, where padding has enlarged it; `used` that in which the program uses it, where
    more of the padding is only stored: what shares of all devices of ZeRO are filled up with.
    """

    __slots__ = ("batch", "kind", "source", "used")

    def __init__(
        self,
        kind: str,
        batch: int | None = None,
        source: tuple[int, ...] | None = None,
        used: tuple[int, ...] | None = None,
    ) -> None:
        if kind not in ("data", "parameter", "state", "constant"):
            raise ModelError(f"a role is data, parameter, state or constant, got {kind!r}")
        self.kind, self.batch, self.source, self.used = kind, batch, source, used

    def _key(self) -> tuple[object, ...]:
        return self.kind, self.batch, self.source, self.used

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Role) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        batch = "" if self.batch is None else f", batch={self.batch}"
        source = "" if self.source is None else f", source={self.source}"
        used = "" if self.used is None else f", used={self.used}"
        return f"Role({self.kind!r}{batch}{source}{used})"


class Value:
    """A named value. `type` may be None while a function is built by hand, until `infer_types`."""

    __slots__ = ("name", "role", "type")

    def __init__(self, name: str, type: Type | None, role: Role | None = None) -> None:
        self.name = name
        self.type: Type = type  # type: ignore[assignment]  # None only before infer_types
        self.role = role

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"

    @property
    def kind(self) -> str | None:
        """The kind of its role, None without one."""
        return self.role.kind if self.role else None


type_of = attrgetter("type")
"""The type of a value: mapped over operands it is faster than a comprehension."""


class Op:
    """One op. `of` is the forward op that a backward op differentiates, `callee` the function a `Call` calls."""

    __slots__ = ("attributes", "callee", "inputs", "of", "outputs", "spec")

    def __init__(
        self,
        spec: Spec,
        inputs: tuple[Value, ...],
        attributes: Attributes,
        outputs: tuple[Value, ...],
        of: Op | None = None,
    ) -> None:
        self.spec, self.inputs, self.attributes, self.outputs, self.of = spec, inputs, attributes, outputs, of
        self.callee: Function | None = attributes.get("callee") if attributes else None

    @property
    def op_type(self) -> str:
        return self.spec.name

    def __repr__(self) -> str:
        outs = ", ".join(f"%{v.name}" for v in self.outputs)
        return f"{outs} = {self.spec.name}({', '.join('%' + v.name for v in self.inputs)})"


def is_cast(op: Op) -> bool:
    """Whether an op only changes the dtype of its operand, and is linear in it."""
    if op.spec.dtype is None or len(op.inputs) != 1 or len(op.outputs) != 1 or op.spec.comm is not None:
        return False
    a, b = op.inputs[0].type, op.outputs[0].type
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dtype is b.dtype or a.shape != b.shape:
        return False
    return bool(op.spec.linear_sets(1, op.attributes))


class Function:
    """An immutable, typed program in SSA form.

    `updates` maps an output to the input whose next value it is; `sources` an output that padding has enlarged to its
    shape in the model.
    """

    __slots__ = ("cache", "identity", "inputs", "name", "ops", "outputs", "sources", "updates")

    def __init__(
        self,
        name: str,
        inputs: tuple[Value, ...],
        ops: tuple[Op, ...],
        outputs: tuple[Value, ...],
        updates: Mapping[Value, Value] | None = None,
        sources: Mapping[Value, tuple[int, ...]] | None = None,
    ) -> None:
        self.name, self.inputs, self.ops, self.outputs = name, inputs, ops, outputs
        self.updates: dict[Value, Value] = dict(updates or {})
        self.sources: dict[Value, tuple[int, ...]] = dict(sources or {})
        self.cache: dict[object, Any] = {}
        """Results of analyses, cached with the function: see `cached`."""
        self.identity = object()
        """Stands for the function in keys that are not to keep it alive."""

    def __repr__(self) -> str:
        from distir.ir.text import pformat

        return pformat(self)

    def __reduce__(self) -> tuple[type[Function], tuple[object, ...]]:
        """Cached analyses are not pickled."""
        return Function, (self.name, self.inputs, self.ops, self.outputs, self.updates, self.sources)

    def producers(self) -> dict[Value, Op]:
        """The op that makes each value that is not an input."""
        return {v: op for op in self.ops for v in op.outputs}

    def callees(self) -> list[Function]:
        """The distinct functions called, callees of callees first."""
        found = self.cache.get(Function.callees)
        if found is None:
            found = self.cache[Function.callees] = self._callees()
        return list(found)

    def _callees(self) -> tuple[Function, ...]:
        seen: dict[Function, None] = {}
        for op in self.ops:
            callee = op.callee
            if callee is not None and callee not in seen:
                seen.update(dict.fromkeys(callee.callees()))
                seen[callee] = None
        return tuple(seen)


class FunctionMaker:
    """The only mutable thing, and the only way to build a Function.

    `inputs` and `ops` are lists that may be read while building. Names asked for twice get a suffix.
    """

    def __init__(self, name: str = "main") -> None:
        self.name = name
        self.inputs: list[Value] = []
        self.ops: list[Op] = []
        self.updates: dict[Value, Value] = {}
        self.sources: dict[Value, tuple[int, ...]] = {}
        self._outputs: tuple[Value, ...] | None = None
        self._names: dict[str, int] = {}

    def fresh(self, name: str) -> str:
        """`name`, or `name.1`, `name.2` ... if it is taken."""
        names = self._names
        k = names.get(name)
        if k is None:
            names[name] = 0
            return name
        k += 1
        while (new := f"{name}.{k}") in names:
            k += 1
        names[name] = k
        names[new] = 0
        return new

    def reserve(self, values: Iterable[Value]) -> None:
        """Take the names of values of another function, which are unique and not taken yet."""
        self._names.update(dict.fromkeys([v.name for v in values], 0))

    def add_input_value(self, name: str, type: Type | None, role: Role | None = None) -> Value:
        """Append an input; `role` says what it is for: data (with its batch dim), a parameter, state or a constant."""
        v = Value(self.fresh(name), type, role)
        self.inputs.append(v)
        return v

    def add_op(
        self,
        op_type: str | Spec,
        name: str | None = None,
        inputs: Sequence[Value] = (),
        attributes: Mapping[str, Any] | None = None,
        subfunctions: Sequence[Function] = (),
        output_names: Sequence[str] | None = None,
        of: Op | None = None,
    ) -> Any:
        """Append an op; return None, its output, or a tuple of them.

        Types are inferred at once if the operands have theirs; else by `infer_types` later. `name` names the outputs
        where `output_names` does not. Raises ModelError for an unknown op, IRTypeError if the types do not fit.
        """
        spec = lookup(op_type) if isinstance(op_type, str) else op_type
        if not attributes:
            attrs = NO_ATTRIBUTES
        elif isinstance(attributes, Attributes):
            attrs = attributes
        else:
            attrs = Attributes({k: _freeze(v) for k, v in attributes.items()})
        if subfunctions:
            attrs = Attributes({**attrs, "callee": subfunctions[0]})
        inputs = tuple(inputs)
        operands = tuple(map(type_of, inputs))
        types: Sequence[Type | None]
        if None in operands:  # pyright: ignore[reportUnnecessaryContains]
            types = [None] * (len(output_names) if output_names else spec.count(attrs))
        else:
            types = infer(spec, attrs, operands)
        count, fresh = len(types), self.fresh
        if output_names is None:
            base = name or spec.name.lower()
            output_names = (base,) if count == 1 else [f"{base}.{i}" for i in range(count)]
        if len(output_names) != count:
            raise ModelError(f"{spec.name} has {count} outputs, got names {list(output_names)}")
        if count == 1:  # as most
            v = Value(fresh(output_names[0]), types[0])
            self.ops.append(Op(spec, inputs, attrs, (v,), of))
            return v
        outputs = tuple([Value(fresh(n), t) for n, t in zip(output_names, types, strict=True)])
        self.ops.append(Op(spec, inputs, attrs, outputs, of))
        return outputs or None

    def emit(self, op_type: str | Spec, *inputs: Value, **attributes: Any) -> Any:
        """`add_op` for rules and transforms: operands by position, attributes by keyword, automatic names."""
        return self.add_op(op_type, None, inputs, attributes)

    def set_outputs(self, values: Iterable[Value]) -> None:
        self._outputs = tuple(values)

    def finalize(self) -> Function:
        """The Function. Outputs that were not set are the sinks: values that no op uses."""
        outputs = self._outputs
        if outputs is None:
            used = {v for op in self.ops for v in op.inputs}
            outputs = tuple(v for op in self.ops for v in op.outputs if v not in used)
        return Function(self.name, tuple(self.inputs), tuple(self.ops), outputs, self.updates, self.sources)


class AsNamed(FunctionMaker):
    """A maker that takes names as they are: they differ already, or values get others later."""

    def fresh(self, name: str) -> str:
        return name

    def reserve(self, values: Iterable[Value]) -> None:
        pass
