"""Kernels that write into memory which nobody needs any more, rather than into new memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distir.backends.kernels import Kernel, Memory, Ref, TorchCall, refs_in

_NAMES = ("abs", "add", "clamp", "div", "exp", "log", "mul", "neg", "relu", "sigmoid", "sqrt", "sub", "tanh")
_COMMUTE = ("add", "mul")


def _spellings(name: str) -> list[Any]:
    """A function of torch's and the method of that name."""
    return [getattr(torch, name), getattr(torch.Tensor, name)]


_IN_PLACE: dict[Any, Callable[..., Any]] = {f: getattr(torch.Tensor, f"{n}_") for n in _NAMES for f in _spellings(n)}
"""Functions of points, and what does the same to their first argument."""
_EITHER = {f for n in _COMMUTE for f in _spellings(n)}
"""Those whose first two arguments may change places."""


def in_place(kernel: Kernel, free: frozenset[int]) -> Kernel:
    """The kernel with calls in place where that is seen by nobody: in its own tensors, and in the `free` operands.

    A free operand shares memory with no other, and nobody reads it afterwards.
    """
    last: dict[int, int] = {}
    for k, call in enumerate([*kernel.calls, TorchCall(torch.empty, tuple(map(Ref, kernel.results)), {}, None)]):
        for r in refs_in((call.args, tuple(call.kwargs.values()))):
            last.update(dict.fromkeys(kernel.tensors[r].within, k))
    operands = frozenset(range(len(kernel.tensors))) - {c.result for c in kernel.calls}
    kept = operands - free
    calls: list[TorchCall] = []
    for k, call in enumerate(kernel.calls):
        gone = {m for m, used in last.items() if used <= k} - kept
        calls.append(_changed(call, kernel.tensors, gone))
    return kernel._replace(calls=calls)


def _changed(call: TorchCall, tensors: Sequence[Memory], gone: set[int]) -> TorchCall:
    """The call in place, if it may be; `gone` is memory that no later call reads."""
    function = _IN_PLACE.get(call.function)
    if function is None or call.result is None:
        return call
    first, *others = call.args
    if _may_take(first, others, tensors, call.result, gone):
        return call._replace(function=function)
    swaps = call.function in _EITHER and not call.kwargs and len(others) == 1
    if swaps and _may_take(others[0], [first], tensors, call.result, gone):
        return call._replace(function=function, args=(others[0], first))
    return call


def _may_take(x: Any, others: list[Any], tensors: Sequence[Memory], result: int, gone: set[int]) -> bool:
    """Whether the result may take over the memory of argument `x`."""
    if not isinstance(x, Ref):
        return False
    mine, made = tensors[x.number], tensors[result]
    return (
        mine.plain
        and mine.within <= gone
        and (mine.shape, mine.dtype) == (made.shape, made.dtype)
        and not any(mine.within & tensors[r].within for r in refs_in(others))
    )
