"""Printing: a program as text, one line an op, that `distir.ir.parse` reads back.

    mesh stage0(mb=4, dp=2, tp=2) = gpu:0..3
    bundle T0 = (f32[12{3:tp}, 8] @ stage0, ...)
    fn fwd0(%w: T0, %x: i64[4{mb,dp}, 16] @ stage0 data(0)) {
      %y: f32[4{mb,dp}, 8]+tp @ stage0 = MatMul(%x, %w) of %h
      %z: f32[4{mb,dp}, 8]#3 @ stage0 = fwd0(%w, %y, mb=3)
      return %z, %w.new -> %w
    }

- A shape is what one device holds. `{mb,dp}` names the mesh axes that split a dim, outermost first;
  `{3:tp}` gives the `outer` of a sub-dimension that does not begin where the one before ended. `+tp` is a partial
  sum, `+max:tp` a partial maximum. `#3` is the piece of microbatch 3, `#0:3` of 0, 1 and 2, `t` the current
  microbatch of a body.
- Devices of a mesh are runs `kind:first..last:step`, repeated by ` x8 by 16` (8 of them, 16 apart).
- A Tuple type of more than 4 entries is a `bundle` in the head, as a body sees it; `T0#3` as a call at mb=3.
- Callees stand before callers, the program itself last. A Call is written as its callee. `of` names the first
  result of an op's forward op (`of #3`: op number 3, which has none). `-> %w`: the next value of input %w.
- `source=(3, 8)`: the shape in the model of an input or an output that padding has enlarged.
- Names that are not plain are quoted. `name#1` is the second mesh or function of that name.
- A line that begins with `# ` is a comment. In a folded text `... 45 more` stands for the rest of a long list, so that
  it cannot be parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TextIO

from distir.ir.device import Device, Mesh
from distir.ir.errors import ModelError
from distir.ir.function import Function, Op, Value
from distir.ir.notation import format_type, plain, plain_value, quote, row, write_device, write_mesh, write_type
from distir.ir.spec import all_ops
from distir.ir.type import NOW, DType, Partial, Replicate, Shard, Tensor, Tuple, Type

Doc = Any
"""A document of prettyprinter, or a string."""
Line = Any
"""A document laid out: strings, and marks where colours begin and end; or already one string."""

_INLINE = 4
"""Longer bundles, parameter lists and outputs are not written on one line."""
_FOLDED, _KEPT = 8, 4
"""Longer lists are folded, where that is asked for, to so many items."""


def pformat(x: Any, fold: bool = False) -> str:
    """The text of a function (with its callees and meshes), an op, a value or a type.

    With `fold` lists of more than 8 operands, results, inputs, or types in a bundle, end after the first 4. Anything
    else as prettyprinter does. Raises ModelError if an attribute is of a kind that has no text.
    """
    if isinstance(x, Tensor | Tuple):
        return format_type(x)
    if isinstance(x, Function | Op | Value):
        return "\n".join(_Printer(_without_colours, fold).text(x))
    import prettyprinter

    return prettyprinter.pformat(x)


def cpprint(x: Any, stream: TextIO | None = None, style: Any = None, fold: bool = False) -> None:
    """Print `pformat(x, fold)` in colours. `stream` is stdout if None, `style` a pygments style."""
    import sys

    from prettyprinter import python_to_sdocs
    from prettyprinter.color import colored_render_to_stream
    from prettyprinter.sdoctypes import SLine

    out: TextIO = stream or sys.stdout
    if isinstance(x, Tensor | Tuple):
        colored_render_to_stream(out, [format_type(x)], style)
    elif isinstance(x, Function | Op | Value):
        lines = _Printer(list, fold).text(x)
        colored_render_to_stream(out, [s for line in lines for s in (*line, SLine(0))][:-1], style)
    else:
        colored_render_to_stream(out, python_to_sdocs(x, 4, 79, 71, None, 1000, False), style)
    out.write("\n")


def _without_colours(sdocs: Iterator[Any]) -> str:
    return "".join([s for s in sdocs if isinstance(s, str)])


def _seen_by_body(t: Type, k: int) -> Type:
    """The type that `at(k)` may have turned into `t`."""
    if isinstance(t, Tuple):
        return Tuple([_seen_by_body(x, k) for x in t.types])
    if t.piece is None:
        return t
    first, end = t.piece
    piece = None if (first, end) == (k, k + 1) else (first, NOW + end - k)
    return Tensor(t.dtype, t.shape, t.device, t.placements, piece)


def _last_microbatch(t: Type) -> int | None:
    """The last microbatch that the first piece in `t` covers."""
    if isinstance(t, Tensor):
        return t.piece[1] - 1 if t.piece else None
    return next((k for x in t.types if (k := _last_microbatch(x)) is not None), None)


class _Labels:
    """Printed names of objects that may share one: `name`, `name#1`, `name#2`."""

    def __init__(self, reserved: frozenset[str] = frozenset()) -> None:
        self.label: dict[Mesh | Function, str] = {}
        self._count: dict[str, int] = {}
        self._reserved = reserved

    def __call__(self, x: Mesh | Function) -> str:
        label = self.label.get(x)
        if label is None:
            label = quote(x.name) if x.name in self._reserved else plain(x.name)
            k = self._count.get(x.name, 0)
            self._count[x.name] = k + 1
            self.label[x] = label = f"{label}#{k}" if k else label
        return label


class _Printer:
    """The state of printing one program. Its lines are prettyprinter documents, laid out one at a time."""

    def __init__(self, finish: Callable[[Iterator[Any]], Line], fold: bool = False) -> None:
        from prettyprinter.doc import annotate, concat
        from prettyprinter.layout import layout_fast
        from prettyprinter.syntax import Token

        self._annotate, self._concat, self._layout, self._token = annotate, concat, layout_fast, Token
        self._finish, self._fold = finish, fold
        words = ("fn", "mesh", "bundle", "return", "of", "update")
        self._keyword = {word: annotate(Token.KEYWORD_CONSTANT, word) for word in words}
        self._mesh = _Labels()
        self._function = _Labels(frozenset(s.name for s in all_ops()) | {"return"})
        self._values: dict[Value, Doc] = {}
        self._types: dict[Type, Doc] = {}
        self._texts: dict[Type, str] = {}
        self._bundles: dict[Tuple, str] = {}
        self._bundle_lines: list[Line] = []
        self._operators: dict[str, Doc] = {}
        self._lines: list[Line] = []
        self._inline = _INLINE

    def text(self, x: Function | Op | Value) -> list[Line]:
        """The lines, laid out, and finished by the function given."""
        if not isinstance(x, Function):
            self._inline = 1 << 40  # there is no head to put bundles in
        if isinstance(x, Value):
            return [self._line(self._definition(x))]
        if isinstance(x, Op):
            return [self._line(self._op(x, None))]
        self._print(x)
        meshes = [self._line(self._mesh_line(m, label)) for m, label in self._mesh.label.items()]  # type: ignore[arg-type]
        return [*meshes, *self._bundle_lines, *self._lines]

    def _folded(self, items: list[list[Doc]]) -> list[list[Doc]]:
        """The first of a long list, if it is to be folded."""
        if not self._fold or len(items) <= _FOLDED:
            return items
        return [*items[:_KEPT], [f"... {len(items) - _KEPT} more"]]

    def _line(self, docs: list[Doc]) -> Line:
        return self._finish(self._layout(self._concat(docs), 1 << 40))

    def _mesh_line(self, mesh: Mesh, label: str) -> list[Doc]:
        name = self._annotate(self._token.NAME_ENTITY, label)
        return [self._keyword["mesh"], " ", name, write_mesh(mesh)]

    def _print(self, f: Function) -> None:
        """Append the lines of `f`, after those of its callees."""
        numbers: dict[Op, int] = {}
        for k, op in enumerate(f.ops):
            numbers[op] = k
            for callee in _functions(op.attributes.values()):
                if callee not in self._function.label:
                    self._print(callee)
        add, line = self._lines.append, self._line
        head = [self._keyword["fn"], " ", self._annotate(self._token.NAME_FUNCTION, self._function(f))]
        inputs = self._folded([self._definition(v) for v in f.inputs])
        if len(inputs) <= _INLINE:
            add(line([*head, "(", *_commas(inputs), ") {"]))
        else:
            add(line([*head, "("]))
            for docs in inputs:
                add(line(["  ", *docs, ","]))
            add(line([") {"]))
        for op in f.ops:
            add(line(["  ", *self._op(op, numbers)]))
        for out, of in f.updates.items():
            if out not in f.outputs:  # not valid, and `verify` says so; but to be seen
                add(line(["  ", self._keyword["update"], " ", self._value(out), " -> ", self._value(of)]))
        results = [
            [
                self._value(v),
                *([" -> ", self._value(f.updates[v])] if v in f.updates else []),
                *([f" source={self._attribute(f.sources[v])}"] if v in f.sources else []),
            ]
            for v in f.outputs
        ]
        results = self._folded(results)
        if len(results) <= _INLINE:
            add(line(["  ", self._keyword["return"], " " if results else "", *_commas(results)]))
        else:
            add(line(["  ", self._keyword["return"], " ("]))
            for docs in results:
                add(line(["    ", *docs, ","]))
            add(line(["  )"]))
        add(line(["}"]))

    def _value(self, v: Value) -> Doc:
        doc = self._values.get(v)
        if doc is None:
            doc = self._values[v] = self._annotate(self._token.NAME_VARIABLE, plain_value(v.name))
        return doc

    def _definition(self, v: Value, seen: Type | None = None, microbatch: Any = None) -> list[Doc]:
        """`%name: type role`; `seen` is the type the callee gives it."""
        docs = [self._value(v)]
        if v.type is not None:  # pyright: ignore[reportUnnecessaryComparison]
            doc = self._types.get(v.type)
            if doc is None:
                body = seen if isinstance(seen, Tuple) and type(microbatch) is int and microbatch >= 0 else None
                if body is not None and body.at(microbatch) is v.type:
                    self._texts[v.type] = self._bundle(body, microbatch)
                doc = self._types[v.type] = self._annotate(self._token.NAME_BUILTIN, self._type(v.type))
            docs += ": ", doc
        if v.role is not None:
            batch = "" if v.role.batch is None else f"({v.role.batch})"
            shapes = [("source", v.role.source), ("used", v.role.used)]
            rest = "".join([f" {name}={self._attribute(shape)}" for name, shape in shapes if shape is not None])
            docs += " ", self._annotate(self._token.KEYWORD_CONSTANT, v.role.kind), batch + rest
        return docs

    def _type(self, t: Type) -> str:
        text = self._texts.get(t)
        if text is None:
            text = self._texts[t] = write_type(t, self._mesh, self._bundle)
        return text

    def _bundle(self, t: Tuple, microbatch: int | None = None) -> str:
        """A short bundle in full; a long one by its label, and the microbatch of the call."""
        if len(t.types) <= self._inline:
            whole = t if microbatch is None else t.at(microbatch)
            return row([self._type(x) for x in whole.types])
        body = t
        if microbatch is None and (k := _last_microbatch(t)) is not None and 0 <= k < NOW // 2:
            body = _seen_by_body(t, k)
            body, microbatch = (body, k) if isinstance(body, Tuple) and body.at(k) is t else (t, None)
        label = self._bundles.get(body)
        if label is None:
            text = row(["".join(docs) for docs in self._folded([[self._type(x)] for x in body.types])])
            label = self._bundles[body] = f"T{len(self._bundles)}"
            name = self._annotate(self._token.NAME_BUILTIN, label)
            self._bundle_lines.append(self._line([self._keyword["bundle"], " ", name, f" = {text}"]))
        return label if microbatch is None else f"{label}#{microbatch}"

    def _op(self, op: Op, numbers: dict[Op, int] | None) -> list[Doc]:
        """The line of an op; `numbers` are those of all ops of its function."""
        docs: list[Doc] = []
        attributes = op.attributes
        callee = attributes.get("callee") if op.spec.name == "Call" else None
        if isinstance(callee, Function):
            operator = self._operator(self._function(callee))
            seen: Sequence[Type | None] = [v.type for v in callee.outputs]
        else:
            operator, callee, seen = self._operator(op.spec.name), None, ()
        microbatch = attributes.get("mb")
        results = [self._definition(v, x, microbatch) for v, x in zip_longest(op.outputs, seen[: len(op.outputs)])]
        docs += _commas(self._folded(results))
        docs += (" = " if docs else ""), operator, "("
        docs += _commas(self._folded([[self._value(v)] for v in op.inputs]))
        separator = ", " if op.inputs else ""
        for name, x in attributes.items():
            if x is not callee or name != "callee":
                text = self._annotate(self._token.NUMBER_INT, self._attribute(x))
                docs += f"{separator}{plain(name)}=", text
                separator = ", "
        docs.append(")")
        if op.of is not None:
            docs += " ", self._keyword["of"], " ", self._of(op.of, numbers)
        return docs

    def _operator(self, name: str) -> Doc:
        doc = self._operators.get(name)
        if doc is None:
            doc = self._operators[name] = self._annotate(self._token.NAME_FUNCTION, name)
        return doc

    def _of(self, op: Op, numbers: dict[Op, int] | None) -> Doc:
        if op.outputs and (numbers is None or op in numbers):
            return self._value(op.outputs[0])
        return f"#{numbers.get(op, '?') if numbers else '?'}"  # ?: not of this function, as `verify` says

    def _attribute(self, x: Any) -> str:
        """The text of an attribute. Raises ModelError if its kind has none."""
        match x:
            case None | bool() | int() | float() if type(x) in (type(None), bool, int, float):
                return repr(x)
            case str() if type(x) is str:
                return quote(x)
            case tuple() if type(x) is tuple:
                return row([self._attribute(y) for y in x]) if len(x) != 1 else f"({self._attribute(x[0])},)"
            case DType() | Shard() | Partial() | Replicate():
                return repr(x)
            case Tensor():
                return self._type(x)
            case Mesh():
                return f"@{self._mesh(x)}"
            case Device():
                return f"@{write_device(x)}"
            case Function():
                return f"&{self._function(x)}"
            case _:
                raise ModelError(
                    f"an attribute {x!r} of type {type(x).__name__} has no text",
                    "numbers, strings, None, tuples, dtypes, placements, meshes, devices and functions do",
                )


def _functions(attributes: Any) -> Iterator[Function]:
    for x in attributes:
        if isinstance(x, Function):
            yield x
        elif isinstance(x, tuple):
            yield from _functions(x)


def _commas(items: Sequence[list[Doc]]) -> list[Doc]:
    docs: list[Doc] = []
    for item in items:
        docs += [", ", *item] if docs else item
    return docs
