"""What one op does on torch, as the torch calls it comes to.

An op's `eval` is run once, on zeros, and the torch calls it makes are written down. So the generated Python
has no layer between it and torch. (Tensors on the "meta" device would do as well, but the first of them costs
seconds.)
"""

from __future__ import annotations

import keyword
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from distir.backends.namespace import TorchNamespace, torch_dtype
from distir.ir.errors import ModelError
from distir.ir.function import Op
from distir.ir.type import Tensor


def rpow(x: torch.Tensor, base: float) -> torch.Tensor:
    """base ** x."""
    return torch.pow(base, x)


_PLAINER: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__rsub__: torch.rsub,
    torch.Tensor.pow: torch.pow,
    torch.Tensor.__rpow__: rpow,
    torch.Tensor.__eq__: torch.eq,
}
"""Methods that torch writes in Python, and what they come to."""


_NEW_SHAPE = (torch.Tensor.reshape, torch.Tensor.expand)

_LOOKS_AT_NO_DATA = frozenset(
    (
        "__get__",
        "size",
        "dim",
        "numel",
        "stride",
        "is_floating_point",
        "element_size",
        "nelement",
        "__len__",
        "ndimension",
    )
)
"""What a rule may ask of a tensor that is not a tensor itself."""


class LooksAtData(Exception):
    """A rule decides by its data what to call."""


class Ref(NamedTuple):
    """Of a call's arguments, one that is a tensor: an operand of the op, or, after those, the result of a
    call.
    """

    number: int


class TorchCall(NamedTuple):
    """One call; its result is the tensor `result` (None: it has none)."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int | None


class Kernel(NamedTuple):
    """The calls of an op, and which tensors are its results."""

    calls: list[TorchCall]
    results: tuple[int, ...]

    @property
    def in_place(self) -> bool:
        """Whether a call changes one of its operands."""
        return any(changes_operand(c.function) for c in self.calls)


def changes_operand(function: Any) -> bool:
    """Whether a torch function works in place: by torch's convention, its name ends with one underscore."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


class _Recorder(TorchFunctionMode):
    """Writes down the calls made under it; operands must be known before."""

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[TorchCall] = []
        self.kept: list[torch.Tensor] = list(operands)  # held, so that an id is one tensor's only
        self.number = {id(x): k for k, x in enumerate(self.kept)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._same(func, args, out):
            return out
        if isinstance(out, torch.Tensor) or changes_operand(func) or _has_tensor(out):
            row = tuple(self._refs(x) for x in args)
            named = {k: self._refs(x) for k, x in (kwargs or {}).items()}
            self._add(_PLAINER.get(func, func), row, named, out)
        elif not isinstance(out, torch.Tensor) and func.__name__ not in _LOOKS_AT_NO_DATA:
            raise LooksAtData(func.__name__)
        return out

    def _same(self, func: Any, args: tuple[Any, ...], out: Any) -> bool:
        """Whether a call gives what it got: x.to(its own dtype), or a reshape to its own shape."""
        if id(out) in self.number:
            return not changes_operand(func)
        if isinstance(out, torch.Tensor) and func in _NEW_SHAPE and out.shape == args[0].shape:
            self.kept.append(out)
            self.number[id(out)] = self.number[id(args[0])]
            return True
        return False

    def _add(self, func: Any, row: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        if isinstance(out, torch.Tensor):
            known = self.number.get(id(out))  # what is changed in place is returned
            self.calls.append(TorchCall(func, row, named, self._new(out) if known is None else known))
        elif isinstance(out, tuple | list):
            whole = len(self.kept)
            self.kept.append(torch.empty(0))  # stands for the row of results
            self.calls.append(TorchCall(func, row, named, whole))
            for k, x in enumerate(out):
                if isinstance(x, torch.Tensor):
                    self.calls.append(TorchCall(operator.getitem, (Ref(whole), k), {}, self._new(x)))
        else:
            self.calls.append(TorchCall(func, row, named, None))

    def _new(self, x: torch.Tensor) -> int:
        self.kept.append(x)
        return self.number.setdefault(id(x), len(self.kept) - 1)

    def _refs(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Ref(self.number[id(x)])
        if type(x) in (tuple, list):
            return type(x)([self._refs(y) for y in x])
        return x


def _has_tensor(x: Any) -> bool:
    return isinstance(x, tuple | list) and any(isinstance(y, torch.Tensor) for y in x)


def trace(op: Op, attributes: Mapping[str, Any], xp: TorchNamespace) -> Kernel | None:
    """The calls that the op's `eval` makes on one rank, given its local attributes.

    None if they depend on data, or cannot be followed: then it has to be called itself. Raises ModelError if
    what it gives is not of the op's type.
    """
    spec = op.spec
    if spec.eval is None:
        raise ModelError(f"{spec.name} cannot be evaluated: it should have been decomposed")
    operands = [_zeros(v.type, xp.device) for v in op.inputs]
    recorder = _Recorder(operands)
    try:
        with recorder:
            y = spec.eval(xp, *operands, **attributes)
    except LooksAtData:
        return None
    results = y if isinstance(y, tuple | list) else (y,)
    if not all(isinstance(x, torch.Tensor) and id(x) in recorder.number for x in results):
        return None
    _check(op, results)
    return _scaled(Kernel(recorder.calls, tuple(recorder.number[id(x)] for x in results)), recorder.kept)


def _zeros(t: Any, device: torch.device) -> torch.Tensor:
    """A tensor of that local type, of a single element's memory."""
    if not isinstance(t, Tensor):
        raise ModelError(f"expected a tensor, got {t}")
    return torch.zeros((), dtype=torch_dtype(t.dtype), device=device).expand(t.shape)


def _check(op: Op, results: Sequence[torch.Tensor]) -> None:
    for v, x in zip(op.outputs, results, strict=True):
        t = v.type
        if isinstance(t, Tensor) and (tuple(x.shape) != t.shape or x.dtype != torch_dtype(t.dtype)):
            raise ModelError(f"{op}: torch gives {x.dtype} {tuple(x.shape)}, its type is {t}")


_SCALED = (torch.Tensor.add, torch.Tensor.sub)


def _scaled(kernel: Kernel, tensors: Sequence[torch.Tensor]) -> Kernel:
    """The same with a + b * 0.1 as one call. `tensors` are those the references number."""
    if kernel.in_place:
        return kernel
    uses = count_uses(kernel)
    scaled = {
        c.result: c
        for c in kernel.calls
        if c.function is torch.Tensor.mul and type(c.args[1]) in (int, float) and uses[c.result or 0] == 1
    }
    calls: list[TorchCall] = []
    for c in kernel.calls:
        by = scaled.get(c.args[1].number) if c.function in _SCALED and _is_ref(c.args[1]) else None
        if by is not None and _is_ref(c.args[0]) and _alike(tensors[c.args[0].number], tensors[by.args[0].number]):
            c = TorchCall(c.function, (c.args[0], by.args[0]), {"alpha": by.args[1]}, c.result)
        calls.append(c)
    left = count_uses(Kernel(calls, kernel.results))
    return Kernel([c for c in calls if c.result not in scaled or left[c.result or 0]], kernel.results)


def _is_ref(x: Any) -> bool:
    return isinstance(x, Ref)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.is_floating_point()


def count_uses(kernel: Kernel) -> Counter[int]:
    """How often each tensor is an argument or a result."""
    rows = [_refs_in((c.args, tuple(c.kwargs.values()))) for c in kernel.calls]
    return Counter([r for row in rows for r in row] + list(kernel.results))


Bind = Callable[[str, Any], str]


def render(
    kernel: Kernel, operands: Sequence[str], bind: Bind, fresh: Callable[[], str]
) -> tuple[list[str], list[str]]:
    """Statements, and then an expression for each result.

    `operands` are the expressions of the op's; `bind(name, x)` gives a global that is x, `fresh()` an unused
    name.
    """
    uses = count_uses(kernel)
    text = dict(enumerate(operands))
    lines: list[str] = []
    temporary: list[str] = []
    for call in kernel.calls:
        expression = _call_text(call, text, bind)
        r = call.result
        if r is None or r in text:  # it changes a tensor there is
            lines.append(expression)
        elif uses[r] == 1 and not kernel.in_place:
            text[r] = expression
        elif uses[r]:
            text[r] = fresh()
            temporary.append(text[r])
            lines.append(f"{text[r]} = {expression}")
    return lines, [text[r] for r in kernel.results]


def _refs_in(x: Any) -> list[int]:
    if isinstance(x, Ref):
        return [x.number]
    if isinstance(x, tuple | list):
        return [r for y in x for r in _refs_in(y)]
    return []


def _call_text(call: TorchCall, text: Mapping[int, str], bind: Bind) -> str:
    row = [_argument(x, text, bind) for x in call.args]
    row += [f"{k}={_argument(x, text, bind)}" for k, x in call.kwargs.items()]
    return f"{bind(python_name(call.function), call.function)}({', '.join(row)})"


def python_name(function: Any) -> str:
    """A name for a bound function."""
    name = getattr(function, "__name__", type(function).__name__).strip("_")
    if name == "get":  # of an attribute, as x.T
        return "attribute"
    if not name.isidentifier():
        return "function"
    return f"{name}_" if keyword.iskeyword(name) else name


def _argument(x: Any, text: Mapping[int, str], bind: Bind) -> str:
    if isinstance(x, Ref):
        return text[x.number]
    if type(x) in (tuple, list) and _refs_in(x):
        inner = ", ".join([_argument(y, text, bind) for y in x])
        return f"({inner},)"
    return literal("constant", x, bind)


def literal(name: str, x: Any, bind: Bind) -> str:
    """The text of a constant; a global of that name where it has no short text of its own."""
    if x is None or type(x) in (bool, int, str) or (type(x) is float and abs(x) < float("inf")):
        return repr(x)
    if isinstance(x, tuple | list) and len(x) < 9 and all(type(y) is int for y in x):
        return repr(x)
    return bind("dtype" if isinstance(x, torch.dtype) else name, x)
