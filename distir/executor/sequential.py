"""The reference: runs any Function in one process, with one array a device; pieces meet only in collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distir.executor.collectives import accumulate, cut, join, join_digit, lanes, local_outer, move, start_of
from distir.executor.namespace import NUMPY
from distir.ir.device import Mesh
from distir.ir.errors import DistirError, UsageError
from distir.ir.function import Function, Op, Value
from distir.ir.type import BFloat16, Partial, Shard, Tensor, Tuple, Type

Held = Any
"""What is held of a value: an array; on a mesh a list with an array a lane; of a bundle a tuple of these."""
Tap = Callable[[Value, Held], Held]
OnUpdate = Callable[[str, Op, Sequence[Held]], None]
"""(function, an optimizer op, what is held of its operands)"""


class SequentialExecutor:
    """Runs Functions on numpy arrays. `backend` is "numpy".

    `tap`, if given, sees what is held of every op's result and may replace it (to compare, or to corrupt);
    `on_update` sees what every optimizer op is about to take.
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
        held = [run.hold(v, x) for v, x in zip(function.inputs, given, strict=True)]
        results = run.run(function, held, None)
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


class _Run:
    def __init__(self, tap: Tap | None, unrolled: bool, on_update: OnUpdate | None = None) -> None:
        self.tap = tap
        self.on_update = on_update
        self.unrolled = unrolled

    def hold(self, v: Value, x: Any) -> Held:
        x = fit(x, v)
        t = v.type
        if not isinstance(t.device, Mesh):
            return x
        return [cut(x, t, coord) for coord in self.lanes(t.device, None)]  # type: ignore[arg-type]

    def whole(self, t: Type, held: Held) -> np.ndarray:
        if isinstance(t, Tuple):
            raise DistirError("a bundle cannot be an output of a program")
        if not isinstance(t.device, Mesh):
            return np.asarray(held)
        return join(dict(zip(self.lanes(t.device, None), held, strict=True)), t)

    def lanes(self, mesh: Mesh, moment: int | None) -> list[tuple[int, ...]]:
        where = lanes(mesh, self.unrolled)
        if moment is None or mesh.time is None:
            return where
        return [(*c[: mesh.time], moment, *c[mesh.time + 1 :]) for c in where]

    def run(self, function: Function, args: Sequence[Held], moment: int | None) -> list[Held]:
        env: dict[Value, Held] = dict(zip(function.inputs, args, strict=True))
        for op in function.ops:
            if self.on_update is not None and op.spec.gradient is not None:
                self.on_update(function.name, op, [env[v] for v in op.inputs])
            try:
                outs = self.step(op, [env[v] for v in op.inputs], moment)
            except (ValueError, IndexError, TypeError, KeyError) as e:
                raise DistirError(f"{function.name}: {op}: {type(e).__name__}: {e}") from e
            for v, x in zip(op.outputs, outs, strict=True):
                env[v] = x if self.tap is None else self.tap(v, x)
        return [env[v] for v in function.outputs]

    def step(self, op: Op, ins: list[Held], moment: int | None) -> Sequence[Held]:
        if op.callee is not None:
            return self.run(op.callee, ins, op.attributes.get("mb"))
        if op.spec.comm is not None:
            return _MOVES[op.spec.name](self, op, ins, moment)
        device = op.outputs[0].type.device
        if not isinstance(device, Mesh):
            return _results(op, evaluate(op, ins, None))
        where = self.lanes(device, moment)
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
        attrs["start"] = 0
        if coord is not None and isinstance(t, Tensor):
            attrs["start"] = start_of(t, dim % len(t.shape), coord)
    return spec.eval(xp, *ins, **attrs)


def _results(op: Op, y: Any) -> Sequence[Any]:
    """The results in a row. numpy widens bf16 next to a Python number and in products: it is rounded back."""
    ys = y if isinstance(y, tuple | list) else (y,)
    return [
        x.astype(v.type.dtype.numpy) if isinstance(v.type, Tensor) and v.type.dtype is BFloat16 else x
        for x, v in zip(ys, op.outputs, strict=True)
    ]


def _collective(run: _Run, op: Op, ins: list[Held], moment: int | None) -> Sequence[Held]:
    before, after = op.inputs[0].type, op.outputs[0].type
    axis = op.attributes["axis"]
    if isinstance(before, Tuple) and isinstance(after, Tuple):
        where = run.lanes(_tensor(before.types[0]).mesh, moment)
        members = zip(ins[0], before.types, after.types, strict=True)
        return [tuple([move(x, _tensor(b), _tensor(a), axis, where) for x, b, a in members])]
    before, after = _tensor(before), _tensor(after)
    mesh = before.mesh
    timed = mesh.time is not None and mesh.axes[mesh.time] == axis
    if timed and not run.unrolled:
        if isinstance(before.on(axis), Partial):
            return [ins[0]]  # the sum is complete: it was paid for while it ran
        if isinstance(before.on(axis), Shard):
            p, outer = before.on(axis), local_outer(before, mesh.position(axis))
            return [[join_digit(list(pieces), p.dim, outer) for pieces in zip(*ins, strict=True)]]  # type: ignore[union-attr]
    return [move(ins[0], before, after, axis, run.lanes(mesh, moment))]


def _tensor(t: Type) -> Tensor:
    """The type, known to be a tensor's."""
    if not isinstance(t, Tensor):
        raise DistirError(f"expected a tensor, got {t}")
    return t


def _scatter(run: _Run, op: Op, ins: list[Held], moment: int | None) -> Sequence[Held]:
    t = _tensor(op.outputs[0].type)
    return [[cut(ins[0], t, coord) for coord in run.lanes(t.mesh, moment)]]


def _gather(run: _Run, op: Op, ins: list[Held], moment: int | None) -> Sequence[Held]:
    return [run.whole(op.inputs[0].type, ins[0])]


def _restrict(run: _Run, op: Op, ins: list[Held], moment: int | None) -> Sequence[Held]:
    """Each device keeps what it holds; lanes of devices outside the part go."""
    whole, part = op.inputs[0].type.device, op.outputs[0].type.device
    if not isinstance(whole, Mesh) or not isinstance(part, Mesh):
        raise DistirError(f"{op}: expected meshes")
    number = {d: k for k, d in enumerate(whole.devices)}
    return [[ins[0][number[d]] for d in part.devices]]


def _accumulate(run: _Run, op: Op, ins: list[Held], moment: int | None) -> Sequence[Held]:
    return [_accumulated(op.inputs[0].type, *ins)]


def _accumulated(t: Type, total: Held, x: Held) -> Held:
    if isinstance(t, Tuple):
        return tuple(_accumulated(u, a, b) for u, a, b in zip(t.types, total, x, strict=True))
    p = t.placements[t.mesh.time] if t.mesh.time is not None else None
    kind = p.kind if isinstance(p, Partial) else "sum"
    return [accumulate(a, b, kind) for a, b in zip(total, x, strict=True)]


_MOVES: dict[str, Callable[[_Run, Op, list[Held], int | None], Sequence[Held]]] = {
    **dict.fromkeys(("MPIAllreduce", "MPIAllgather", "MPIReduceScatter", "MPIAlltoall", "LocalSlice"), _collective),
    **dict.fromkeys(("MPIScatter", "MPIBroadcast"), _scatter),
    **dict.fromkeys(("MPIGather", "MPIReduce"), _gather),
    "Restrict": _restrict,
    "Send": lambda run, op, ins, moment: [ins[0]],
    "Accumulate": _accumulate,
    "After": lambda run, op, ins, moment: [ins[0]],
    "Pack": lambda run, op, ins, moment: [tuple(ins)],
    "Unpack": lambda run, op, ins, moment: list(ins[0]),
}
