"""Parsing: the text of a program (see `distir.ir.text`) back into a Function, `same` as the one printed."""

from __future__ import annotations

import re
from math import inf, nan
from typing import Any

from distir.ir.device import Device, Mesh
from distir.ir.errors import DistirError, ModelError, UsageError
from distir.ir.function import NO_ATTRIBUTES, Attributes, Function, Op, Role, Value
from distir.ir.notation import (
    LABEL,
    PLAIN_VALUE,
    QUOTED,
    TENSOR,
    WHERE,
    fail,
    label_name,
    plain_value,
    printable,
    read_device,
    read_mesh,
    read_tensor,
    unquote,
)
from distir.ir.spec import Spec, all_ops, lookup
from distir.ir.type import REPLICATE, DType, Partial, Shard, Tuple, Type

_NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|-inf"
_tokens = re.compile(rf"%(?:{PLAIN_VALUE}|{QUOTED})|{TENSOR}|{_NUMBER}|[@&]{WHERE}|{LABEL}|->|\#\d+|\S").findall
_is_number = re.compile(_NUMBER).fullmatch
_is_folded = re.compile(r"\.\.\. \d+ more").search
_COMMENT = "# "
_WORDS = {"True": True, "False": False, "None": None, "inf": inf, "nan": nan, "Replicate": REPLICATE}


def parse(text: str) -> Function:
    """The last function of a text as `pformat` writes it. Types are read, not checked: see `verify`.

    Raises ModelError: the number of the line, what was expected there and what stands there instead. UsageError for
    what is no text.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"expected the text of a program, got {type(text).__name__}", "pformat prints a Function")
    parser = _Parser(text.rstrip().split("\n"))
    try:
        return parser.program()
    except DistirError as e:
        hint = "it is folded: distir show --full prints all" if _is_folded(parser.line) else e.hint
        raise ModelError(printable(f"line {parser.n}: {e.message}, in: {parser.line.strip()}"), hint) from None
    except (ArithmeticError, ValueError, RecursionError, MemoryError) as e:  # numbers or nesting beyond all reason
        raise ModelError(printable(f"line {parser.n}: cannot be read ({type(e).__name__})")) from None


class _Parser:
    """The state of parsing one text: its position, and the names defined so far."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.n = 0
        """The number of the line that is being read, from 1."""
        self.functions: dict[str, Function] = {}
        self.meshes: dict[str, Mesh] = {}
        self.types: dict[str, Type] = {}
        self.specs: dict[str, Spec] = {s.name: s for s in all_ops()}
        self.attributes: dict[tuple[str, ...], Attributes] = {("",): NO_ATTRIBUTES}

    @property
    def line(self) -> str:
        return self.lines[self.n - 1] if 0 < self.n <= len(self.lines) else ""

    def next_line(self) -> list[str]:
        """The tokens of the next line that is not blank, then empty ones; ModelError if there is none."""
        while self.n < len(self.lines):
            self.n += 1
            line = self.lines[self.n - 1]
            tokens = _tokens(line)
            if tokens and not line.startswith(_COMMENT):
                tokens += ("", "", "")
                return tokens
        raise ModelError("expected more lines, got the end of the text")

    def program(self) -> Function:
        function = None
        while self.n < len(self.lines) or function is None:
            tokens = self.next_line()
            if tokens[0] == "mesh":
                self.mesh()
            elif tokens[0] == "bundle":
                self.bundle(tokens)
            elif tokens[0] == "fn":
                function = self.function(tokens)
            else:
                fail("mesh, bundle or fn", tokens[0])
        return function

    # head

    def mesh(self) -> None:
        label, mesh = read_mesh(self.line)
        if self.meshes.setdefault(label, mesh) is not mesh:
            fail("a new name", f"{label}, which is a mesh already")

    def bundle(self, tokens: list[str]) -> None:
        if tokens[2] != "=":
            fail("=", tokens[2])
        self.types[tokens[1]], i = self.type(tokens, 3)
        if tokens[i]:
            fail("the end of the line", tokens[i])

    def where(self, text: str) -> Device | Mesh:
        """A mesh or a device."""
        found = read_device(text) or self.meshes.get(text)
        if found is None:
            fail("a mesh of the head or a device", text)
        return found

    # types

    def type(self, tokens: list[str], i: int) -> tuple[Type, int]:
        """The type at token `i`, and the token after it."""
        token = tokens[i]
        if token == "(":
            entries: list[Type] = []
            i += 1
            while tokens[i] != ")":
                entry, i = self.type(tokens, i)
                entries.append(entry)
                i = _comma(tokens, i)
            return Tuple(entries), i + 1
        type = self.types.get(token)
        if type is None:
            type = read_tensor(token, self.where)
            if type is None:
                body, _, microbatch = token.rpartition("#")
                if body not in self.types:
                    fail("a type", token)
                type = self.types[body].at(int(microbatch))
            self.types[token] = type
        return type, i + 1

    # functions

    def function(self, tokens: list[str]) -> Function:
        label = tokens[1]
        if tokens[2] != "(" or label in self.functions:
            fail("a new name and (", f"{label} {tokens[2]}")
        values: dict[str, Value] = {}
        inputs: list[Value] = []
        i = 3
        while tokens[i] != ")":
            if not tokens[i]:
                tokens, i = self.next_line(), 0
                continue
            v, i = self.definition(tokens, i, values)
            values[v.name] = v
            inputs.append(v)
            i = _comma(tokens, i)
        if tokens[i + 1] != "{":
            fail("{", tokens[i + 1])
        ops: list[Op] = []
        first: dict[str, Op] = {}
        tokens = self.next_line()
        while tokens[0] != "return":
            self.op(tokens, values, ops, first)
            tokens = self.next_line()
        outputs, updates, sources = self.results(tokens, values)
        tokens = self.next_line()
        if tokens[0] != "}":
            fail("}", tokens[0])
        function = Function(label_name(label), tuple(inputs), tuple(ops), tuple(outputs), updates, sources)
        self.functions[label] = function
        return function

    def definition(self, tokens: list[str], i: int, values: dict[str, Value]) -> tuple[Value, int]:
        """`%name: type role` at token `i`, and the token after it."""
        token = tokens[i]
        if token[:1] != "%":
            fail("a value", token)
        name = token[1:] if token[1:2] != '"' else unquote(token[1:])
        if name in values:
            fail("a new name", f"{token}, which is defined already")
        type: Type | None = None
        i += 1
        if tokens[i] == ":":
            type = self.types.get(tokens[i + 1])
            if type is None:
                type, i = self.type(tokens, i + 1)
            else:
                i += 2
        role = None
        if tokens[i] not in ("=", ",", ")", ""):
            role, i = self.role(tokens, i)
        return Value(name, type, role), i

    def role(self, tokens: list[str], i: int) -> tuple[Role, int]:
        kind, batch = Role(tokens[i]).kind, None
        i += 1
        if tokens[i] == "(":
            batch, i = self.value(tokens, i + 1)
            i += 1
        shapes: dict[str, tuple[int, ...]] = {}
        for name in ("source", "used"):
            if tokens[i] == name:
                shapes[name], i = self.shape(tokens, i)
        return Role(kind, batch, **shapes), i

    def shape(self, tokens: list[str], i: int) -> tuple[tuple[int, ...], int]:
        """`NAME=(shape)` at token `i`, and the token after it."""
        shape, end = self.value(tokens, i + 2) if tokens[i + 1] == "=" else (None, i)
        if not isinstance(shape, tuple):
            fail(f"{tokens[i]}=(shape)", f"{tokens[i]}{tokens[i + 1]}{tokens[i + 2]}")
        return shape, end

    def op(self, tokens: list[str], values: dict[str, Value], ops: list[Op], first: dict[str, Op]) -> None:
        """Append the op of a line."""
        outputs: list[Value] = []
        i = 0
        if tokens[0][0] == "%":
            while True:
                v, i = self.definition(tokens, i, values)
                outputs.append(v)
                if tokens[i] != ",":
                    break
                i += 1
            if tokens[i] != "=":
                fail("=", tokens[i])
            i += 1
        operator = tokens[i]
        if tokens[i + 1] != "(":
            fail("an op, and (", f"{operator} {tokens[i + 1]}")
        i += 2
        inputs: list[Value] = []
        while (token := tokens[i])[:1] == "%":
            v = values.get(token[1:] if token[1:2] != '"' else unquote(token[1:]))
            if v is None:
                fail("a value defined before", token)
            inputs.append(v)
            i += 1
            if tokens[i] != ",":
                break
            i += 1
        end = len(tokens) - 4
        of = None
        if tokens[end - 1] == "of":
            of = self.of(tokens[end], ops, first)
            end -= 2
        if tokens[end] != ")" or end < i:
            fail(")", tokens[end])
        spec = self.specs.get(operator)
        key = (operator if spec is None else "", *tokens[i:end])
        attributes = self.attributes.get(key)
        if attributes is None:
            attributes = self.attributes[key] = self.new_attributes(key)
        op = Op(self.specs["Call"] if spec is None else spec, tuple(inputs), attributes, tuple(outputs), of)
        ops.append(op)
        for v in outputs:
            if values.setdefault(v.name, v) is not v:
                fail("a new name", f"{plain_value(v.name)}, which is defined already")
        if outputs:
            first[outputs[0].name] = op

    def of(self, token: str, ops: list[Op], first: dict[str, Op]) -> Op:
        """The forward op that `of` names."""
        if token[:1] == "#" and token[1:].isdecimal() and int(token[1:]) < len(ops):
            return ops[int(token[1:])]
        op = first.get(unquote(token[1:])) if token[:1] == "%" else None
        if op is None:
            fail("the first result of an op before this one", token)
        return op

    def results(
        self, tokens: list[str], values: dict[str, Value]
    ) -> tuple[list[Value], dict[Value, Value], dict[Value, tuple[int, ...]]]:
        """Outputs, updates and source shapes of a `return`."""
        outputs: list[Value] = []
        updates: dict[Value, Value] = {}
        sources: dict[Value, tuple[int, ...]] = {}
        many = tokens[1] == "("
        i = 2 if many else 1
        while tokens[i] != ")":
            if not tokens[i]:
                if not many:
                    break
                tokens, i = self.next_line(), 0
                continue
            v = self.use(tokens[i], values)
            outputs.append(v)
            i += 1
            if tokens[i] == "->":
                updates[v] = self.use(tokens[i + 1], values)
                i += 2
            if tokens[i] == "source":
                sources[v], i = self.shape(tokens, i)
            i = _comma(tokens, i)
        return outputs, updates, sources

    def use(self, token: str, values: dict[str, Value]) -> Value:
        v = values.get(unquote(token[1:])) if token[:1] == "%" else None
        if v is None:
            fail("a value of the function", token)
        return v

    # attributes

    def new_attributes(self, key: tuple[str, ...]) -> Attributes:
        """The attributes of the tokens after the first, which is the label of a Call's callee, or empty."""
        attributes: dict[str, Any] = {}
        if key[0]:
            if key[0] not in self.functions:
                lookup(key[0])  # says which ops have a name like it
            attributes["callee"] = self.functions[key[0]]
        tokens = [*key, "", ""]
        i = 1
        while tokens[i]:
            name = unquote(tokens[i])
            if tokens[i + 1] != "=" or name in attributes:
                fail("name=value", f"{tokens[i]}{tokens[i + 1]}")
            attributes[name], i = self.value(tokens, i + 2)
            i = _comma(tokens, i, "")
        return Attributes(attributes)

    def value(self, tokens: list[str], i: int) -> tuple[Any, int]:
        """The attribute at token `i`, and the token after it."""
        token = tokens[i]
        head = token[:1]
        if head == "(":
            entries: list[Any] = []
            i += 1
            while tokens[i] != ")":
                entry, i = self.value(tokens, i)
                entries.append(entry)
                i = _comma(tokens, i)
            return tuple(entries), i + 1
        if head == '"':
            return unquote(token), i + 1
        if _is_number(token):
            return (float(token) if set(token) & set(".en") else int(token)), i + 1
        if head == "@":
            return self.where(token[1:]), i + 1
        if head == "&" and token[1:] in self.functions:
            return self.functions[token[1:]], i + 1
        if token in _WORDS:
            return _WORDS[token], i + 1
        if token in DType.all:
            return DType.all[token], i + 1
        if "[" in token:
            return self.type(tokens, i)
        if token == "Partial" and tokens[i + 1] != "(":
            return Partial(), i + 1
        if token == "Partial" and tokens[i + 3] == ")":
            return Partial(tokens[i + 2]), i + 4
        if token == "Shard":
            numbers, i = self.value(tokens, i + 1)
            whole, halo = (numbers[:3], numbers[3:]) if isinstance(numbers, tuple) else ((), ())
            if {*map(type, whole)} != {int} or not (halo == () or (len(halo) == 1 and _is_halo(halo[0]))):
                fail("Shard(dim), Shard(dim, outer), Shard(dim, outer, shift) or a halo after these", f"Shard{numbers}")
            return Shard(*numbers), i
        return fail("an attribute", token)


def _is_halo(x: Any) -> bool:
    return type(x) is tuple and [type(n) for n in x] in ([int, int, float], [int, int, int])


def _comma(tokens: list[str], i: int, end: str = ")") -> int:
    """The token after the comma at token `i`; a list may end without one."""
    if tokens[i] == ",":
        return i + 1
    if tokens[i] not in (end, ""):
        fail(f", or {end or 'the end'}", tokens[i])
    return i
