"""Trace an op to the torch calls that it makes.

The op's implementation (see `native`) is run once and its torch calls are recorded, so that the generated Python calls
torch directly. On the CPU tracing uses tensors without data (see `meta`), whatever the op's size.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from distir.backends.lowering.kernels import (
    Kernel,
    KernelTensor,
    Ref,
    TorchCall,
    changes_operand,
    count_uses,
    python_name,
    refs_in,
)
from distir.backends.lowering.meta import META, Uncomputed
from distir.backends.lowering.native import implementation
from distir.backends.tensors.layout import side_by_side
from distir.backends.tensors.torch_namespace import TorchNamespace, torch_dtype
from distir.ir.errors import ModelError
from distir.ir.function import Op
from distir.ir.type import Tensor


def rpow(x: torch.Tensor, base: float) -> torch.Tensor:
    """base ** x."""
    return torch.pow(base, x)


_NATIVE_SPELLING: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__rsub__: torch.rsub,
    torch.Tensor.pow: torch.pow,
    torch.Tensor.__rpow__: rpow,
    torch.Tensor.__eq__: torch.eq,
}
"""Methods that torch implements in Python, and the functions that they call."""


_NEW_SHAPE = (torch.Tensor.reshape, torch.Tensor.expand)

_MAY_COPY = frozenset(
    ("reshape", "contiguous", "side_by_side", "to", "type", "flatten", "ravel", "view_as", "as_tensor")
)
"""Functions whose result is a view or a copy, depending on strides."""

_STRIDE_DEPENDENT = (torch.Tensor.contiguous, side_by_side)
"""Functions that return their operand or a copy, depending on strides."""

_OVERLAPPING = frozenset(("expand", "expand_as", "broadcast_to", "as_strided", "unfold"))
"""Views in which several elements may share memory."""

_METADATA = frozenset(
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
        "device",
    )
)
"""Functions that read metadata of a tensor, not its data."""

_DEVICE_OF = torch.Tensor.device.__get__  # pyright: ignore[reportAttributeAccessIssue]


class DependsOnData(Exception):
    """The calls of an op depend on the data of its operands."""


class _Recorder(TorchFunctionMode):
    """Records the calls made in its context on the given operands.

    Operands are on the meta device or on `device`, and report `device` in both cases.
    """

    def __init__(self, operands: Sequence[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.calls: list[TorchCall] = []
        self.tensors: list[torch.Tensor] = list(operands)  # kept alive, so that ids are unique
        self.number = {id(x): k for k, x in enumerate(self.tensors)}
        self.memory = [KernelTensor(x.shape, x.dtype, frozenset((k,))) for k, x in enumerate(operands)]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self._called(func, args, kwargs or {})
        if func in _STRIDE_DEPENDENT and id(out) in self.number:
            out = out.view(out.shape)  # an operand may have other strides when run
        if self._same(func, args, out):
            return out
        if isinstance(out, torch.Tensor) or changes_operand(func) or _has_tensor(out):
            row = tuple(self._refs(x) for x in args)
            named = {k: self._refs(x) for k, x in (kwargs or {}).items()}
            self._add(_NATIVE_SPELLING.get(func, func), row, named, out)
        elif not isinstance(out, torch.Tensor) and func.__name__ not in _METADATA:
            raise DependsOnData(func.__name__)
        return out

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the function; meta tensors stand for tensors on the device."""
        if self.device.type != "cpu" or func is torch.device:
            return func(*args, **kwargs)
        if func == _DEVICE_OF:
            return self.device
        try:
            return func(*map(self._without_data, args), **{k: self._without_data(x) for k, x in kwargs.items()})
        except RuntimeError as e:  # raised by torch where data are needed
            raise DependsOnData(func.__name__) from e

    def _without_data(self, x: Any) -> Any:
        return META if isinstance(x, torch.device) and x == self.device else x

    def _same(self, func: Any, args: tuple[Any, ...], out: Any) -> bool:
        """Whether a call returns its operand: x.to(its own dtype), or a reshape to its own shape."""
        if id(out) in self.number:
            return not changes_operand(func)
        if isinstance(out, torch.Tensor) and func in _NEW_SHAPE and out.shape == args[0].shape:
            before = self.number[id(args[0])]
            self.tensors.append(out)
            self.memory.append(self.memory[before])
            self.number[id(out)] = before
            return True
        return False

    def _add(self, func: Any, row: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        if isinstance(out, torch.Tensor):
            known = self.number.get(id(out))  # an in-place call returns its operand
            self.calls.append(TorchCall(func, row, named, self._new(out, func, row) if known is None else known))
        elif isinstance(out, tuple | list):
            whole = self._new(torch.empty(0), func, row)  # stands for the tuple of results
            self.calls.append(TorchCall(func, row, named, whole))
            for k, x in enumerate(out):
                if isinstance(x, torch.Tensor):
                    taken = (Ref(whole), k)
                    self.calls.append(TorchCall(operator.getitem, taken, {}, self._new(x, func, (Ref(whole), *row))))
        else:
            self.calls.append(TorchCall(func, row, named, None))

    def _new(self, x: torch.Tensor, func: Any, row: tuple[Any, ...]) -> int:
        """Add a result, which may be a view of the tensors in `row`; returns its number."""
        number, name, address = len(self.tensors), python_name(func), x.untyped_storage()._cdata
        seen = [
            self.memory[r]
            for r in refs_in(row)
            if name in _MAY_COPY or self.tensors[r].untyped_storage()._cdata == address
        ]
        within = frozenset((number,)) if not seen else frozenset().union(*[m.within for m in seen])
        plain = name not in _OVERLAPPING and all(m.plain for m in seen)
        self.memory.append(KernelTensor(x.shape, x.dtype, within, plain))
        self.tensors.append(x)
        return self.number.setdefault(id(x), number)

    def _refs(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Ref(self.number[id(x)])
        if type(x) in (tuple, list):
            return type(x)([self._refs(y) for y in x])
        return x


def _has_tensor(x: Any) -> bool:
    return isinstance(x, tuple | list) and any(isinstance(y, torch.Tensor) for y in x)


def trace(op: Op, attributes: Mapping[str, Any], xp: TorchNamespace) -> Kernel | None:
    """The kernel of an op on one rank, given its local attributes.

    None if its calls depend on data or cannot be recorded; then the implementation is called at run time. Raises
    ModelError if a result does not have the op's type.
    """
    compute = implementation(op.spec, xp)
    on_cpu = xp.device.type == "cpu"  # on GPUs kernels are run: they reject some operands by size and alignment
    operands = [_operand(v.type, META if on_cpu else xp.device) for v in op.inputs]
    recorder = _Recorder(operands, xp.device)
    try:
        with Uncomputed() if on_cpu else contextlib.nullcontext(), recorder:
            y = compute(*operands, **attributes)
    except DependsOnData:
        return None
    results = y if isinstance(y, tuple | list) else (y,)
    if not all(isinstance(x, torch.Tensor) and id(x) in recorder.number for x in results):
        return None
    _check(op, results)
    return _scaled(Kernel(recorder.calls, tuple(recorder.number[id(x)] for x in results), recorder.memory))


def _operand(t: Any, device: torch.device) -> torch.Tensor:
    """A zero tensor of that local type."""
    if not isinstance(t, Tensor):
        raise ModelError(f"expected a tensor, got {t}")
    return torch.zeros(t.shape, dtype=torch_dtype(t.dtype), device=device)


def _check(op: Op, results: Sequence[torch.Tensor]) -> None:
    for v, x in zip(op.outputs, results, strict=True):
        t = v.type
        if isinstance(t, Tensor) and (tuple(x.shape) != t.shape or x.dtype != torch_dtype(t.dtype)):
            raise ModelError(f"{op}: torch gives {x.dtype} {tuple(x.shape)}, its type is {t}")


_SCALED = (torch.Tensor.add, torch.Tensor.sub)


def _scaled(kernel: Kernel) -> Kernel:
    """The kernel with a + b * 0.1 as one call."""
    if kernel.in_place:
        return kernel
    uses, tensors = count_uses(kernel), kernel.tensors
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
    left = count_uses(kernel._replace(calls=calls))
    return kernel._replace(calls=[c for c in calls if c.result not in scaled or left[c.result or 0]])


def _is_ref(x: Any) -> bool:
    return isinstance(x, Ref)


def _alike(a: KernelTensor, b: KernelTensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.dtype.is_floating_point
