"""One ONNX node as an import rule sees it: operands, attributes, and the ops it becomes."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from distir.importer.tensor_proto import Read, dtype_of_array
from distir.ir.errors import ModelError
from distir.ir.function import FunctionMaker, Op, Role, Value
from distir.ir.type import DType, Float32, Float64, Tensor
from distir.ops.rules import shape_of, tensor

Result = Value | np.ndarray
"""What a name of the ONNX graph denotes: a value of the program, or an array known at import."""
KNOWN = 1 << 30
"""Limit on all arrays computed at import, in bytes."""
NUMBERS = 1 << 16
"""Limit on the elements of an operand that gives a shape, axes, sizes or positions."""
_MESSAGE = 1 << 11
"""Limit on the text of an error, in characters: a name or a shape in it may have any length."""


def distinct_elements(x: np.ndarray) -> int:
    """The number of distinct elements in memory: dims of stride 0 count as 1."""
    return math.prod([n for n, stride in zip(x.shape, x.strides, strict=True) if stride != 0 or n == 0])


def collapsed(x: np.ndarray, dims: Container[int] | None = None) -> np.ndarray:
    """The array reduced to size 1 along `dims` (counted from the last; default: all) of stride 0, which repeat it."""
    found = [dims is None or i - x.ndim in dims for i in range(x.ndim)]
    return x[tuple([slice(0, 1) if f and x.strides[i] == 0 else slice(None) for i, f in enumerate(found)])]


class Scope:
    """The names of the graph that are defined so far, and their values.

    A name is in `values` (part of the program), in `known` (arrays known at import, read when needed), or in both once
    a known array has become an operand. `arrays` has the arrays of inputs that were initializers or computed at import.
    """

    def __init__(self, path: Path, maker: FunctionMaker, parameters: frozenset[str]) -> None:
        self.path, self.maker, self.parameters = path, maker, parameters
        self.values: dict[str, Value] = {}
        self.known: dict[str, Read] = {}
        self.stored: dict[str, tuple[DType, tuple[int, ...]]] = {}
        """Type and shape of the initializers, which are in `known`."""
        self.sequences: dict[str, list[Value]] = {}
        """For each name of a sequence its values."""
        self.arrays: dict[Value, Read] = {}
        self.joined: dict[str, Sequence[str]] = {}
        """For each name of a concatenation along the last dim the names of its parts, each of which may repeat."""
        self.bytes = 0
        """Total size of the arrays computed at import."""
        self.frozen: set[str] = set()
        """Initializers that no rule may train: running statistics."""
        self.scalars: set[str] = set()
        """Initializers that are trained whatever their rank: the file says that they are parameters."""
        self.numbers: Mapping[float, float] = {}
        """By the float32 nearest to them numbers that are float64 in the source of the model."""
        self.batchnorm_groups = 1
        """The parts of the batch of which a batch norm in training mode takes statistics, each apart."""
        self.batchnorms = 0
        """The number of batch norms in training mode."""
        self._seen = 0
        self._trained: set[Value] = set()
        """The results of the first `_seen` ops that are computed from parameters."""

    def is_defined(self, name: str) -> bool:
        """Whether the name is defined yet."""
        return name in self.values or name in self.known or name in self.sequences

    def size(self, name: str) -> int:
        """The number of distinct elements of a known array; initializers are not read for that."""
        return math.prod(self.stored[name][1]) if name in self.stored else distinct_elements(self.known[name]())

    def take(self, node: Node, size: int) -> None:
        """Count the bytes of a node's computed results. Raises ModelError if the total exceeds the limit."""
        self.bytes += size
        if self.bytes > KNOWN:
            raise node.error(f"what is computed at import takes {self.bytes:,} bytes, the most is {KNOWN:,}")

    def is_known(self, name: str) -> bool:
        """Whether the value is known at import: an array that is not a parameter."""
        return name in self.known and not self.trainable(name)

    def trainable(self, name: str) -> bool:
        """Whether it is a parameter: named by the user, or an initializer of floating type that is not frozen, of rank
        1 or more or marked in the file."""
        if name in self.parameters:
            return True
        if name not in self.stored or name in self.frozen:
            return False
        dtype, shape = self.stored[name]
        return dtype.floating and (len(shape) > 0 or name in self.scalars)

    def depends_on_parameters(self, v: Value) -> bool:
        """Whether a value is computed from parameters, so that a gradient may pass through it."""
        for op in self.maker.ops[self._seen :]:
            if any([x.kind == "parameter" or x in self._trained for x in op.inputs]):
                self._trained.update(op.outputs)
        self._seen = len(self.maker.ops)
        return v.kind == "parameter" or v in self._trained

    def cast(self, x: np.ndarray, dtype: DType) -> np.ndarray:
        """A known array in another type; a number that was rounded to float32 is as it was before, in float64."""
        y = collapsed(x).astype(dtype.numpy)
        if dtype is Float64 and x.dtype == Float32.numpy and y.size == 1:
            y = np.full_like(y, self.numbers.get(y.item(), y.item()))
        return np.broadcast_to(y, x.shape)

    def value(self, name: str) -> Value:
        """The value for `name`; a known array becomes a Constant op (one element) or an input."""
        if name in self.values:
            return self.values[name]
        read = self.known[name]
        where = f"{self.path}: tensor {name!r}"
        if name in self.stored:
            dtype, shape = self.stored[name]
        else:
            array = read()
            dtype, shape = dtype_of_array(array, where), array.shape
        if self.trainable(name):
            value = self.maker.add_input_value(name, Tensor(dtype, shape), Role("parameter"))
            self.arrays[value] = read
        elif name not in self.stored and distinct_elements(array := read()) < array.size:
            value = self._repeated(name, collapsed(array), shape)
        elif shape.count(1) == len(shape):
            number = (read().reshape(-1)[0].item(),)
            attributes = {"value": number, "shape": shape, "dtype": dtype}
            value = self.maker.add_op("Constant", name, (), attributes)
        else:
            value = self.maker.add_input_value(name, Tensor(dtype, shape), Role("constant"))
            self.arrays[value] = read
        self.values[name] = value
        return value

    def state(self, name: str) -> Value:
        """The value for an initializer that training updates, which becomes an input of role state; of another name the
        value as it is."""
        if name in self.stored and name not in self.values:
            dtype, shape = self.stored[name]
            self.values[name] = value = self.maker.add_input_value(name, Tensor(dtype, shape), Role("state"))
            self.arrays[value] = self.known[name]
        return self.value(name)

    def _repeated(self, name: str, array: np.ndarray, shape: tuple[int, ...]) -> Value:
        """The array expanded to `shape` by an op, so that the program stores its distinct elements only."""
        part = f"{name}.once"
        while part in self.known or part in self.values:
            part += "'"
        self.known[part] = lambda: array
        return self.maker.add_op("Expand", name, [self.value(part)], {"shape": shape})


class Node:
    """A node being imported. Attributes that no rule has read are reported by `finish`."""

    def __init__(self, scope: Scope, proto: onnx.NodeProto, attributes: Mapping[str, Any], opset: int) -> None:
        self.scope, self.proto, self.opset = scope, proto, opset
        self._attributes = dict(attributes)
        self._asked: set[str] = set()

    def __repr__(self) -> str:
        first = next((o for o in self.proto.output if o), "?")
        return f"{self.proto.op_type} node {self.proto.name or first!r}"

    def error(self, message: str, hint: str | None = None) -> ModelError:
        """An error that begins with the file and the node."""
        text = f"{self}: {message}".replace("\n", "\\n")  # names may hold anything
        text = text if len(text) <= _MESSAGE else f"{text[:_MESSAGE]} ..."
        return ModelError(f"{self.scope.path}: {text}", hint)

    def has(self, i: int) -> bool:
        """Whether the optional operand `i` is given."""
        return i < len(self.proto.input) and self.proto.input[i] != ""

    def operand(self, i: int) -> Value:
        """Operand `i`, as a value."""
        if not self.has(i):
            raise self.error(f"operand {i} is missing")
        name = self.proto.input[i]
        if name in self.scope.sequences:
            raise self.error(f"reads {name!r}, a sequence", "only ops on sequences do")
        return self.scope.value(name)

    def operands(self) -> list[Value]:
        """All operands. Raises ModelError if one is left out."""
        return [self.operand(i) for i in range(len(self.proto.input))]

    def known(self, i: int, what: str) -> np.ndarray:
        """Operand `i` as an array known at import. Raises ModelError, naming it `what`, if it depends on data."""
        name = self.proto.input[i]
        if name not in self.scope.known:
            raise self.error(
                f"{what} (operand {i}, {name!r}) depends on data", "only values known at import are supported"
            )
        return self.scope.known[name]()

    def numbers(self, i: int, what: str) -> np.ndarray:
        """Operand `i`, known at import, in one row. Raises ModelError if it has more elements than such operands may
        have: an array that repeats its elements has any size at no cost until it is copied."""
        x = self.known(i, what)
        if x.size > NUMBERS:
            raise self.error(
                f"{what} (operand {i}, {self.proto.input[i]!r}) has {x.size:,} elements, the most is {NUMBERS:,}"
            )
        return x.reshape(-1)

    def ints(self, i: int, what: str) -> tuple[int, ...] | None:
        """Operand `i` as integers known at import, None if it is left out."""
        return tuple(int(x) for x in self.numbers(i, what)) if self.has(i) else None

    def number(self, i: int, what: str = "the number") -> float | int | None:
        """The first element of operand `i`, None if it is not known at import."""
        return self.numbers(i, what)[0].item() if self.scope.is_known(self.proto.input[i]) else None

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute: a number, string, tuple or array."""
        self._asked.add(name)
        return self._attributes.get(name, default)

    def require(self, name: str, default: Any, *allowed: Any) -> None:
        """Accept an attribute only with one of these values. Raises ModelError otherwise."""
        got = self.attr(name, default)
        if got not in allowed:
            raise self.error(
                f"attribute {name}={got!r} is not supported", f"supported: {', '.join(map(repr, allowed))}"
            )

    def shape(self, i: int = 0) -> tuple[int, ...]:
        return shape_of(self.operand(i))

    def axis(self, default: int, i: int = 0, name: str = "axis") -> int:
        """An attribute that is a dim of operand `i`, counted from the front."""
        return self.wrap(self.attr(name, default), len(self.shape(i)))

    def wrap(self, axis: int, rank: int) -> int:
        """A dim counted from the front. Raises ModelError if there is none."""
        if not -rank <= axis < rank:
            raise self.error(f"axis {axis} is out of range for rank {rank}")
        return axis % rank

    def axes(self, i: int = 1) -> tuple[int, ...] | None:
        """The attribute `axes`, or operand `i`, which it became in later opsets; None if left out."""
        axes = self.attr("axes")
        return self.ints(i, "the axes") if axes is None else axes

    def emit(self, op_type: str, *inputs: Value, **attributes: Any) -> Any:
        """Append an op, named after the node's first output."""
        return self.scope.maker.add_op(op_type, f"{self.proto.output[0]}.{op_type.lower()}", inputs, attributes)

    def constant(self, number: float, like: Value) -> Value:
        """A scalar of the type of `like`."""
        return self.emit("Constant", value=(number,), shape=(), dtype=tensor(like).dtype)

    def room(self, *shape: int) -> tuple[int, ...]:
        """`shape`, of an array that a rule is about to make. Raises ModelError if 8 bytes per element exceed the limit
        on arrays computed at import."""
        self.scope.take(self, math.prod(shape) * 8)
        return shape

    def array(self, what: str, array: np.ndarray) -> Value:
        """An array known at import that the rule made, as a value."""
        name = f"{self.proto.output[0]}.{what}"
        while name in self.scope.known or name in self.scope.values:
            name += "'"
        self.scope.known[name] = lambda: array
        return self.scope.value(name)

    def full(self, shape: tuple[int, ...], number: float, like: Value) -> Value:
        """A value of `shape` filled with `number`."""
        return self.emit("Expand", self.constant(number, like), shape=shape)

    def dropped(self, x: Value, dims: tuple[int, ...]) -> Value:
        """`x` without these dims, which have size 1."""
        return self.reshape(x, tuple(d for i, d in enumerate(shape_of(x)) if i not in dims))

    def reshape(self, x: Value, shape: tuple[int, ...]) -> Value:
        """`x` in another shape, in which one dim may be -1: what is left for it; `x` itself if the shape does not
        change."""
        have = shape_of(x)
        rest = -math.prod(shape)
        if shape.count(-1) == 1 and rest > 0 and math.prod(have) % rest == 0:
            shape = tuple(math.prod(have) // rest if d == -1 else d for d in shape)
        return x if shape == have else self.emit("Reshape", x, shape=shape)

    def finish(self, results: list[Result], first_op: int, folded: bool = False) -> None:
        """Name the node's results as its outputs. Raises ModelError for an attribute that no rule has read."""
        left = sorted(set(self._attributes) - self._asked)
        if left and not folded:
            raise self.error(f"attribute {left[0]} is not supported")
        names = list(self.proto.output)
        if any(name and name not in self.scope.sequences for name in names[len(results) :]):
            raise self.error(f"only its first {len(results)} outputs are supported")
        made = {v for op in self.scope.maker.ops[first_op:] for v in op.outputs}
        for name, result in zip(names, results, strict=False):
            if name == "":
                continue
            if isinstance(result, Value):
                if result in made:
                    result.name = self.scope.maker.fresh(name)
                    made.discard(result)
                self.scope.values[name] = result
            else:
                self.scope.known[name] = lambda array=result: array


def drop_unused_ops(ops: list[Op], keep: set[Value]) -> None:
    """Remove, in place, the ops that no value in `keep` depends on."""
    live: list[Op] = []
    for op in reversed(ops):
        if any(v in keep for v in op.outputs):
            keep.update(op.inputs)
            live.append(op)
    ops[:] = reversed(live)
