"""Rewrite kernels to work in place, in memory that is no longer live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distir.backends.lowering.kernels import Kernel, KernelTensor, Ref, TorchCall, refs_in

_NAMES = (
    "abs",
    "add",
    "clamp",
    "div",
    "exp",
    "index_add",
    "log",
    "mul",
    "neg",
    "relu",
    "sigmoid",
    "sqrt",
    "sub",
    "tanh",
)
_COMMUTE = ("add", "mul")


def _spellings(name: str) -> list[Any]:
    """The torch function and the tensor method of a name."""
    return [getattr(torch, name), getattr(torch.Tensor, name)]


_IN_PLACE: dict[Any, Callable[..., Any]] = {f: getattr(torch.Tensor, f"{n}_") for n in _NAMES for f in _spellings(n)}
"""Elementwise functions, and their variants that overwrite the first argument."""
_EITHER = {f for n in _COMMUTE for f in _spellings(n)}
"""Commutative functions."""


def in_place(kernel: Kernel, free: frozenset[int]) -> Kernel:
    """The kernel with calls in place where possible: in its temporaries, and in the `free` operands.

    A free operand shares memory with no other value and is not read after the op.
    """
    last: dict[int, int] = {}
    for k, call in enumerate([*kernel.calls, TorchCall(torch.empty, tuple(map(Ref, kernel.results)), {}, None)]):
        for r in refs_in((call.args, tuple(call.kwargs.values()))):
            last.update(dict.fromkeys(kernel.tensors[r].within, k))
    operands = frozenset(range(len(kernel.tensors))) - {c.result for c in kernel.calls}
    protected = operands - free
    calls: list[TorchCall] = []
    for k, call in enumerate(kernel.calls):
        dead = {m for m, used in last.items() if used <= k} - protected
        calls.append(_changed(call, kernel.tensors, dead))
    return kernel._replace(calls=calls)


def _changed(call: TorchCall, tensors: Sequence[KernelTensor], dead: set[int]) -> TorchCall:
    """The call in place if possible; `dead`: tensors that no later call reads."""
    function = _IN_PLACE.get(call.function)
    if function is None or call.result is None:
        return call
    first, *others = call.args
    if _may_take(first, others, tensors, call.result, dead):
        return call._replace(function=function)
    swaps = call.function in _EITHER and not call.kwargs and len(others) == 1
    if swaps and _may_take(others[0], [first], tensors, call.result, dead):
        return call._replace(function=function, args=(others[0], first))
    return call


def _may_take(x: Any, others: list[Any], tensors: Sequence[KernelTensor], result: int, dead: set[int]) -> bool:
    """Whether the result may be written into the memory of argument `x`."""
    if not isinstance(x, Ref):
        return False
    mine, made = tensors[x.number], tensors[result]
    return (
        mine.plain
        and mine.within <= dead
        and (mine.shape, mine.dtype) == (made.shape, made.dtype)
        and not any(mine.within & tensors[r].within for r in refs_in(others))
    )
