"""The reference: runs any Function in one process, with one array a device; pieces meet only in collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distir.executor.reference.joining import join, lanes
from distir.executor.reference.numpy_namespace import NUMPY
from distir.ir.device import Mesh
from distir.ir.errors import DistirError, UsageError
from distir.ir.function import Function, Op, Value
from distir.ir.type import BFloat16, Tensor, Tuple, Type

RuntimeValue = Any
"""A value at run time: an array; on a mesh a list with one array per lane; for a bundle a tuple of these."""
Tap = Callable[[Value, RuntimeValue], RuntimeValue]
OnUpdate = Callable[[str, Op, Sequence[RuntimeValue]], None]
"""(function, an optimizer op, its operands' runtime values)"""


class SequentialExecutor:
    """Runs Functions on numpy arrays. `backend` is "numpy".

    `tap`, if given, is called with the runtime value of every op's result and may replace it (to compare, or to
    corrupt); `on_update` is called with every optimizer op and its operands, before it runs.
    """

    def __init__(self, backend: str = "numpy", tap: Tap | None = None, on_update: OnUpdate | None = None) -> None:
        if backend != "numpy":
            raise UsageError(f"the sequential executor runs on numpy, got {backend!r}")
        self.tap = tap
        self.on_update = on_update

    def compute(self, function: Function, arrays: Mapping[Value, Any] | Sequence[Any]) -> list[np.ndarray]:
        """The outputs, whole, in order, from whole inputs (one array an input, or a mapping from input Values).

        Inputs on a mesh are cut by placement, padded inputs given in their source shape are padded with zeros;
        replicas of an output are checked to be equal. Raises UsageError if an input is missing or has another shape.
        """
        given = [arrays.get(v) for v in function.inputs] if isinstance(arrays, Mapping) else list(arrays)
        if len(given) != len(function.inputs):
            raise UsageError(f"{function.name} has {len(function.inputs)} inputs, got {len(given)}")
        unrolled = not any(op.callee for op in function.ops)
        run = _Run(self.tap, unrolled, self.on_update)
        values = [run.hold(v, x) for v, x in zip(function.inputs, given, strict=True)]
        results = run.run(function, values, None)
        wholes = [run.whole(v.type, x) for v, x in zip(function.outputs, results, strict=True)]
        return [unfit(x, function.sources.get(v)) for v, x in zip(function.outputs, wholes, strict=True)]


def fit(x: Any, v: Value) -> np.ndarray:
    """The array for input `v`, padded where it has its source shape. Raises UsageError for another shape."""
    if x is None:
        raise UsageError(f"no array for input %{v.name}")
    if not isinstance(v.type, Tensor):
        raise UsageError(f"input %{v.name} is not a tensor: {v.type}")
    x = np.asarray(x)
    want = v.type.global_shape
    if v.role is not None and v.role.source is not None and x.shape == v.role.source:
        x = np.pad(x, [(0, w - s) for w, s in zip(want, x.shape, strict=True)])
    if x.shape != want:
        raise UsageError(f"input %{v.name}: expected shape {want}, got {x.shape}")
    return x.astype(v.type.dtype.numpy, copy=False)


def unfit(x: np.ndarray, source: tuple[int, ...] | None) -> np.ndarray:
    """The array without its padding."""
    return x if source is None else x[tuple(slice(0, n) for n in source)]


class _Lanes:
    """The lanes of a run at one microbatch, or at all, as communication ops need them."""

    xp = NUMPY

    def __init__(self, run: _Run, microbatch: int | None) -> None:
        self.run, self.microbatch, self.unrolled = run, microbatch, run.unrolled

    def of(self, mesh: Mesh) -> list[tuple[int, ...]]:
        return self.run.lanes(mesh, self.microbatch)

    def whole(self, t: Type, value: RuntimeValue) -> np.ndarray:
        return self.run.whole(t, value)


class _Run:
    def __init__(self, tap: Tap | None, unrolled: bool, on_update: OnUpdate | None = None) -> None:
        self.tap = tap
        self.on_update = on_update
        self.unrolled = unrolled

    def hold(self, v: Value, x: Any) -> RuntimeValue:
        x = fit(x, v)
        t = v.type
        if not isinstance(t.device, Mesh):
            return x
        return [t.cut(x, coord) for coord in self.lanes(t.device, None)]  # type: ignore[arg-type]

    def whole(self, t: Type, value: RuntimeValue) -> np.ndarray:
        if isinstance(t, Tuple):
            raise DistirError("a bundle cannot be an output of a program")
        if not isinstance(t.device, Mesh):
            return np.asarray(value)
        return join(dict(zip(self.lanes(t.device, None), value, strict=True)), t)

    def lanes(self, mesh: Mesh, microbatch: int | None) -> list[tuple[int, ...]]:
        where = lanes(mesh, self.unrolled)
        if microbatch is None or mesh.time is None:
            return where
        return [(*c[: mesh.time], microbatch, *c[mesh.time + 1 :]) for c in where]

    def run(self, function: Function, args: Sequence[RuntimeValue], microbatch: int | None) -> list[RuntimeValue]:
        env: dict[Value, RuntimeValue] = dict(zip(function.inputs, args, strict=True))
        for op in function.ops:
            if self.on_update is not None and op.spec.gradient is not None:
                self.on_update(function.name, op, [env[v] for v in op.inputs])
            try:
                outs = self.step(op, [env[v] for v in op.inputs], microbatch)
            except (ValueError, IndexError, TypeError, KeyError) as e:
                raise DistirError(f"{function.name}: {op}: {type(e).__name__}: {e}") from e
            for v, x in zip(op.outputs, outs, strict=True):
                env[v] = x if self.tap is None else self.tap(v, x)
        return [env[v] for v in function.outputs]

    def step(self, op: Op, ins: list[RuntimeValue], microbatch: int | None) -> Sequence[RuntimeValue]:
        if op.callee is not None:
            return self.run(op.callee, ins, op.attributes.get("mb"))
        if op.spec.comm is not None:
            if op.spec.comm.meaning is None:
                raise DistirError(f"{op}: {op.spec.name} has a meaning only in the program of a rank")
            return op.spec.comm.meaning(_Lanes(self, microbatch), op, ins)
        device = op.outputs[0].type.device
        if not isinstance(device, Mesh):
            return _results(op, evaluate(op, ins, None))
        where = self.lanes(device, microbatch)
        each = [_results(op, evaluate(op, [x[k] for x in ins], coord)) for k, coord in enumerate(where)]
        return [list(column) for column in zip(*each, strict=True)]


def evaluate(op: Op, ins: Sequence[Any], coord: tuple[int, ...] | None, xp: Any = NUMPY) -> Any:
    """One op on one device's arrays; `coord` is its coordinate on the mesh."""
    spec = op.spec
    if spec.eval is None:
        raise DistirError(f"{spec.name} cannot be evaluated: it should have been decomposed")
    attrs = {k: v for k, v in op.attributes.items() if k not in ("device", "place")}
    if spec.local:
        attrs.update(spec.local(op.attributes, [v.type for v in op.inputs], [v.type for v in op.outputs]))
    indexed = spec.indexed(op.attributes)
    if indexed is not None:
        slot, dim = indexed
        t = (op.inputs[slot] if slot >= 0 else op.outputs[~slot]).type
        attrs["start"] = t.starts(dim, coord) if isinstance(t, Tensor) else 0
    return spec.eval(xp, *ins, **attrs)


def _results(op: Op, y: Any) -> Sequence[Any]:
    """The results in a row. numpy widens bf16 next to a Python number and in products: it is rounded back."""
    ys = y if isinstance(y, tuple | list) else (y,)
    return [
        x.astype(v.type.dtype.numpy) if isinstance(v.type, Tensor) and v.type.dtype is BFloat16 else x
        for x, v in zip(ys, op.outputs, strict=True)
    ]
