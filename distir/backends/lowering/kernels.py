"""Kernels: the torch calls of one op as data (made by `trace`), and their rendering as Python."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Ref(NamedTuple):
    """A reference to a tensor of a kernel, by number."""

    number: int


class TorchCall(NamedTuple):
    """One call; `result`: the number of its result, None without one."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int | None


class KernelTensor(NamedTuple):
    """A tensor of a kernel. `within`: the tensors whose memory it may use, itself or those that it may be a view of.

    Not `plain`: several of its elements may share memory.
    """

    shape: torch.Size
    dtype: torch.dtype
    within: frozenset[int]
    plain: bool = True


class Kernel(NamedTuple):
    """The calls of an op, the numbers of its results, and all its tensors by number, operands first."""

    calls: list[TorchCall]
    results: tuple[int, ...]
    tensors: Sequence[KernelTensor]

    @property
    def in_place(self) -> bool:
        """Whether a call works in place."""
        return any(changes_operand(c.function) for c in self.calls)


def changes_operand(function: Any) -> bool:
    """Whether a torch function works in place: by torch's convention, its name ends with one underscore."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def count_uses(kernel: Kernel) -> Counter[int]:
    """How often each tensor is used as an argument or a result."""
    rows = [refs_in((c.args, tuple(c.kwargs.values()))) for c in kernel.calls]
    return Counter([r for row in rows for r in row] + list(kernel.results))


Bind = Callable[[str, Any], str]


_DEEPEST = 20
"""How deep expressions are nested; Python takes 200, and a norm over all weights adds up hundreds of numbers."""
_MAKE = ("add", "addmm", "cat", "div", "index_select", "log_softmax", "matmul", "mm", "mul", "neg", "softmax", "sub")
_INTO: dict[Any, tuple[Callable[..., Any], str]] = {
    f: (getattr(torch, name), "out")
    for name in (*_MAKE, "sigmoid", "sum", "tanh", "zeros")
    for f in (getattr(torch, name), getattr(torch.Tensor, name, None))
    if f is not None
} | {
    torch.nn.functional.gelu: (torch.ops.aten.gelu.out, "out"),
    torch.ops.aten.gelu_backward.default: (torch.ops.aten.gelu_backward.grad_input, "grad_input"),
    torch.ops.aten.tanh_backward.default: (torch.ops.aten.tanh_backward.grad_input, "grad_input"),
    torch.ops.aten.sigmoid_backward.default: (torch.ops.aten.sigmoid_backward.grad_input, "grad_input"),
    torch.ops.aten.silu_backward.default: (torch.ops.aten.silu_backward.grad_input, "grad_input"),
    torch.ops.aten.threshold_backward.default: (torch.ops.aten.threshold_backward.grad_input, "grad_input"),
}
"""Functions with an output argument: the variant that takes it, and its keyword."""


def _takes_output(call: TorchCall) -> bool:
    """Whether a variant of the call takes an output argument; a sum over all dims that names none has no such."""
    if call.function in (torch.sum, torch.Tensor.sum) and len(call.args) == 1 and "dim" not in call.kwargs:
        return False
    return call.function in _INTO


def _placed(call: TorchCall, into: int) -> TorchCall:
    """The call with tensor number `into` as its output argument."""
    function, keyword = _INTO[call.function]
    return call._replace(function=function, kwargs={**call.kwargs, keyword: Ref(into)})


def can_place(kernel: Kernel) -> bool:
    """Whether the only result can be computed directly into a given tensor."""
    last = kernel.calls[-1] if kernel.calls else None
    return last is not None and kernel.results == (last.result,) and _takes_output(last)


def render(
    kernel: Kernel,
    operands: Sequence[str],
    bind: Bind,
    fresh: Callable[[], str],
    into: str | None = None,
    allocate: Callable[[Sequence[int], torch.dtype], str | None] = lambda *_: None,
) -> tuple[list[str], list[str]]:
    """(statements, an expression for each result) of a kernel.

    `operands`: expressions of the op's operands; `bind(name, x)` returns the name of a global that is x, `fresh()` an
    unused name. `into`: a tensor for the only result, computed into it where torch supports that, else copied.
    `allocate`: returns an expression for the memory of a result, None to leave it to torch.
    """
    if into is not None and not can_place(kernel):
        lines, (result,) = render(kernel, operands, bind, fresh, allocate=allocate)
        return lines, [f"{bind('copy_', torch.Tensor.copy_)}({into}, {result})"]
    uses, in_place = count_uses(kernel), kernel.in_place
    text = dict(enumerate(operands))
    calls: list[TorchCall] = []
    for k, call in enumerate(kernel.calls):
        place = into if k == len(kernel.calls) - 1 else None
        if place is None and call.result is not None and _takes_output(call):
            made = kernel.tensors[call.result]
            place = allocate(made.shape, made.dtype)
        if place is not None:
            number = len(kernel.tensors) + k
            text[number] = place
            call = _placed(call, number)
        calls.append(call)
    kernel = kernel._replace(calls=calls)
    lines: list[str] = []
    depth: dict[int, int] = {}  # of expressions that are part of another
    for k, call in enumerate(kernel.calls):
        expression = _call_text(call, text, bind)
        r = call.result
        inner = 1 + max([depth.get(x, 0) for x in refs_in((call.args, tuple(call.kwargs.values())))], default=0)
        if r is None or r in text:  # it works in place
            lines.append(expression)
        elif uses[r] == 1 and inner < _DEEPEST and (not in_place or _is_next(kernel, k)):
            text[r], depth[r] = expression, inner
        elif uses[r]:
            text[r] = fresh()
            lines.append(f"{text[r]} = {expression}")
    return lines, [text[r] for r in kernel.results]


def _is_next(kernel: Kernel, k: int) -> bool:
    """Whether the next call uses the result of call k, so that no call in place comes between."""
    after = kernel.calls[k + 1] if k + 1 < len(kernel.calls) else None
    return after is None or kernel.calls[k].result in refs_in((after.args, tuple(after.kwargs.values())))


def refs_in(x: Any) -> list[int]:
    if isinstance(x, Ref):
        return [x.number]
    if isinstance(x, tuple | list):
        return [r for y in x for r in refs_in(y)]
    return []


def _call_text(call: TorchCall, text: Mapping[int, str], bind: Bind) -> str:
    row = [_argument(x, text, bind) for x in call.args]
    row += [f"{k}={_argument(x, text, bind)}" for k, x in call.kwargs.items()]
    return f"{bind(python_name(call.function), call.function)}({', '.join(row)})"


def python_name(function: Any) -> str:
    """A Python identifier for a torch function."""
    name = getattr(function, "__name__", type(function).__name__).split(".")[0].lstrip("_")
    name = name.removesuffix("__")
    if name == "get":  # of an attribute, as x.T
        return "attribute"
    if not name.isidentifier():
        return "function"
    return f"{name}_" if keyword.iskeyword(name) else name


def _argument(x: Any, text: Mapping[int, str], bind: Bind) -> str:
    if isinstance(x, Ref):
        return text[x.number]
    if type(x) in (tuple, list) and refs_in(x):
        inner = ", ".join([_argument(y, text, bind) for y in x])
        return f"({inner},)"
    return literal("constant", x, bind)


def literal(name: str, x: Any, bind: Bind) -> str:
    """A constant as Python text; the name of a global if it has no short literal."""
    if x is None or type(x) in (bool, int, str) or (type(x) is float and abs(x) < float("inf")):
        return repr(x)
    if isinstance(x, tuple | list) and len(x) < 9 and all(type(y) is int for y in x):
        return repr(tuple(x) if isinstance(x, tuple) else x)  # a torch.Size is a tuple
    return bind("dtype" if isinstance(x, torch.dtype) else name, x)
