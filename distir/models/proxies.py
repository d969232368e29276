"""Proxies of published workloads: programs of their communication, and of sleeps in place of their compute.

The sequences are those of `distir.models.sequences`, verbatim. A program is distributed already: a flat sequence on one
mesh, or a function for each pass of a pipeline stage. A collective is issued where it stands, and waited for where its
result is first used: a `Sleep` of 0 seconds is a wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distir.ir.device import TIME, Device, Mesh
from distir.ir.function import Function, FunctionMaker, Role, Value
from distir.ir.type import REPLICATE, SUM, DType, Float32, Placement, Shard, Tensor
from distir.models.sequences import (
    CosmoflowSequence,
    DlrmSequence,
    Gpt2Sequence,
    Gpt3Sequence,
    MoeSequence,
    PipelineSizes,
    ProxySizes,
)
from distir.ops.rules import tensor


def proxy(sizes: ProxySizes, dtype: DType = Float32) -> Function:
    """The distributed program of a published sequence, on devices cpu:0, cpu:1, ...

    Inputs: `x`, the data, of which nothing is sent. Outputs: of each mesh `done`, which is there when all is.
    """
    if isinstance(sizes, DlrmSequence):
        return _dlrm(sizes, dtype)
    if isinstance(sizes, CosmoflowSequence):
        return _cosmoflow(sizes, dtype)
    return _pipeline(sizes, dtype)


def _mesh(name: str, first: int, **axes: int) -> Mesh:
    """Devices from number `first` on; axes of one device are left out, but time."""
    kept = {axis: n for axis, n in axes.items() if n > 1 or axis == TIME}
    count = math.prod([n for axis, n in kept.items() if axis != TIME])
    return Mesh([Device("cpu", first + k) for k in range(count)], kept, name)


class _Steps:
    """Emits the ops of a function on a mesh."""

    def __init__(self, maker: FunctionMaker, mesh: Mesh, dtype: DType) -> None:
        self.maker, self.mesh, self.dtype = maker, mesh, dtype

    def tensor(self, *shape: int, **placed: Placement) -> Tensor:
        """A tensor of a global shape, placed so along axes of the mesh: one that it has not is passed over."""
        placements = [placed.get(axis, REPLICATE) for axis in self.mesh.axes]
        return Tensor.whole(self.dtype, shape, self.mesh, placements)

    def split(self, size: int, axes: Sequence[str]) -> Tensor:
        """`size` elements on each device, of a whole that is split along axes."""
        places: dict[str, Placement] = {}
        parts = 1
        for axis in axes:
            places[axis] = Shard(0, parts)
            parts *= self.mesh.size(axis)
        return self.tensor(size * parts, **places)

    def partial(self, size: int, axes: Sequence[str]) -> Tensor:
        """A sum over axes, of `size` elements on each device."""
        return self.tensor(size, **dict.fromkeys(axes, SUM))

    def sleep(self, micros: float, waits: Sequence[Value], *gives: Tensor) -> list[Value]:
        """Waits for values, then sleeps; the results."""
        made = self.maker.add_op("Sleep", "y", list(waits), {"seconds": micros / 1e6, "types": gives})
        return list(made) if isinstance(made, tuple) else [made]

    def along(self, op: str, x: Value, axes: Sequence[str], **attributes: int) -> Value:
        """A collective along axes of the mesh: as one, if there are several."""
        return self.maker.emit(op, x, axis=axes[0] if len(axes) == 1 else tuple(axes), **attributes)

    def axes(self, *names: str) -> list[str]:
        """Those of more than one device."""
        return [axis for axis in names if axis in self.mesh.axes]

    def reduced_in_turn(self, size: int, before: Value, axes: Sequence[str]) -> Value:
        """An all-reduce that begins when `before` is there."""
        return self.along("MPIAllreduce", self.sleep(0, [before], self.partial(size, axes))[0], axes)

    @property
    def done(self) -> Tensor:
        """What a device has when it has done everything."""
        return self.tensor()


def _dlrm(s: DlrmSequence, dtype: DType) -> Function:
    maker = FunctionMaker("dlrm")
    steps = _Steps(maker, _mesh("ranks", 0, ep=s.ranks), dtype)
    axes = steps.axes("ep")
    rows = steps.tensor(s.ranks, s.alltoall, ep=Shard(0))
    small = steps.tensor(s.batch, 1, ep=Shard(0))
    x = maker.add_input_value("x", small, Role("data", 0))

    def exchanged(v: Value) -> Value:
        return steps.along("MPIAlltoall", v, axes, dim=1) if axes else v

    tables, *forward = s.numbers("forward")
    (v,) = steps.sleep(tables, [x], rows)
    v = exchanged(v)
    for micros in forward:
        (v,) = steps.sleep(micros, [v], small)
    top, products, bottom, last = s.numbers("backward")
    v, gradient = steps.sleep(top, [v], small, steps.partial(s.top, axes))
    waits = [steps.along("MPIAllreduce", gradient, axes)] if axes else []
    (v,) = steps.sleep(products, [v], small)
    v, gradient = steps.sleep(bottom, [v], rows, steps.partial(s.bottom, axes))
    waits += [steps.along("MPIAllreduce", gradient, axes)] if axes else []
    (v,) = steps.sleep(last, [exchanged(v)], small)
    maker.set_outputs(steps.sleep(0, [v, *waits], steps.done))
    return maker.finalize()


class _Move(NamedTuple):
    """What a layer of CosmoFlow communicates: what it gives for a message of n elements, and what is then there."""

    given: Callable[[int], list[Tensor]]
    moved: Callable[[list[Value]], list[Value]]


def _cosmoflow(s: CosmoflowSequence, dtype: DType) -> Function:
    maker = FunctionMaker("cosmoflow")
    steps = _Steps(maker, _mesh("ranks", 0, dp=s.dp, h=s.h, w=s.w), dtype)
    shards, parts = steps.axes("h", "w"), s.h * s.w
    small = steps.tensor(s.batch * s.dp, 1, dp=Shard(0))
    x = maker.add_input_value("x", small, Role("data", 0))

    faces = _Move(
        lambda n: [steps.split(n, [axis]) for axis in shards],
        lambda vs: [steps.along("MPIPermute", v, [axis]) for v, axis in zip(vs, shards, strict=True)],
    )  # between two devices that is an exchange
    gather = _Move(lambda n: [steps.split(n, shards)], lambda vs: [steps.along("MPIAllgather", vs[0], shards)])
    scatter = _Move(
        lambda n: [steps.partial(n * parts, shards)], lambda vs: [steps.along("MPIReduceScatter", vs[0], shards, dim=0)]
    )
    if not shards:
        faces = gather = scatter = _Move(lambda n: [small], lambda vs: vs)
    *forward, loss = s.numbers("forward")
    values = [x]
    moves = [(faces, n) for n in s.numbers("halos")] + [(gather, n) for n in s.numbers("gathers")]
    for micros, (move, size) in zip(forward, moves, strict=True):
        values = move.moved(steps.sleep(micros, values, *move.given(size)))
    values = steps.sleep(loss, values, small)
    moves = [(scatter, n) for n in s.numbers("scatters")]
    replicas, everyone = steps.axes("dp"), steps.axes("dp", "h", "w")
    gradients: list[tuple[int, list[str]]] = [(0, [])] * (len(moves) - 1)  # those of all dense layers are one
    gradients += [(s.dense, replicas), *[(n, everyone) for n in s.numbers("convolutions")]]
    moves += [(faces, n) for n in s.numbers("backward_halos")]
    last = _Move(lambda n: [small], lambda vs: vs)
    waits: list[Value] = []
    passes = zip(s.numbers("backward"), gradients, [*moves, (last, 0)], strict=True)
    for micros, (size, axes), (move, n) in passes:
        given = move.given(n)
        made = steps.sleep(micros, values, *given, *[steps.partial(size, axes)] if axes else [])
        values = move.moved(made[: len(given)])
        waits += [steps.along("MPIAllreduce", v, axes) for v in made[len(given) :]]
    maker.set_outputs(steps.sleep(0, [*values, *waits], steps.done))
    return maker.finalize()


def _pipeline(s: PipelineSizes, dtype: DType) -> Function:
    """All forward passes, then all backward ones; each stage passes on what it has received."""
    more = {"tp": s.tp} if isinstance(s, Gpt3Sequence) else {"ep": s.ep} if isinstance(s, MoeSequence) else {}
    inside = {"dp": s.dp, **more}
    size = math.prod(inside.values())
    stages = [
        _Stage(s, k, _mesh(f"stage{k}", k * size, **{TIME: s.microbatches}, **inside), dtype) for k in range(s.stages)
    ]
    maker = FunctionMaker("gpt")
    v = maker.add_input_value("x", _rows(_Steps(FunctionMaker(), stages[0].mesh, dtype), 1, True), Role("data", 0))
    held: list[Value] = []
    done: list[Value] = []
    for k in range(s.microbatches):
        y = v
        for stage in stages:
            y = maker.emit("Send", y, to=stage.mesh) if stage.number else y
            y = maker.add_op("Call", "y", [y], {"mb": k}, [stage.forward])
        held.append(y)
    for k, dy in enumerate(held):
        for stage in reversed(stages):
            dy = dy if stage is stages[-1] else maker.emit("Send", dy, to=stage.mesh)
            if k < s.microbatches - 1:
                dy = maker.add_op("Call", "dx", [dy], {"mb": k}, [stage.backward])
            else:
                dy, end = maker.add_op("Call", None, [dy], {"mb": k}, [stage.last], ["dx", "done"])
                done.append(end)
    maker.set_outputs(done)
    return maker.finalize()


class _Stage:
    """The passes of a pipeline stage, of a microbatch: `forward` of what was received, `backward` of its gradient, and
    the `last` backward pass, which then reduces the stage's gradients."""

    def __init__(self, sizes: PipelineSizes, number: int, mesh: Mesh, dtype: DType) -> None:
        self.sizes, self.number, self.mesh, self.dtype = sizes, number, mesh, dtype
        self.forward = self._pass(f"fwd{number}", "forward")
        self.backward = self._pass(f"bwd{number}", "backward")
        self.last = self._pass(f"bwd{number}.last", "backward")

    def _pass(self, name: str, way: str) -> Function:
        s, maker = self.sizes, FunctionMaker(name)
        steps = _Steps(maker, self.mesh, self.dtype)
        activation = _rows(steps, s.activation)
        data = self.number == 0 and way == "forward"
        v = maker.add_input_value("x" if way == "forward" else "dy", _rows(steps, 1, True) if data else activation)
        for _ in range(s.layers // s.stages):
            if isinstance(s, Gpt3Sequence):
                v = _dense_layer(steps, v, activation, s.times[way])
            elif isinstance(s, MoeSequence):
                v = _layer_of_experts(steps, v, activation, s.times[way])
        if isinstance(s, Gpt2Sequence):
            (v,) = steps.sleep(0, [v], activation)
        outputs = [v]
        if name.endswith("last"):
            for size, axes in s.reduced(self.number):
                v = steps.reduced_in_turn(size, v, axes) if (axes := steps.axes(*axes)) else v
            outputs += steps.sleep(0, [v], steps.done)
        maker.set_outputs(outputs)
        return maker.finalize()


def _rows(steps: _Steps, size: int, whole: bool = False) -> Tensor:
    """`size` elements of each sample: a microbatch has one sample on each device, but those of tp share it. `whole`: of
    all microbatches."""
    places: dict[str, Placement] = {}
    samples = 1
    for axis in (TIME, *steps.axes("dp", "ep")):
        places[axis] = Shard(0, samples)
        samples *= steps.mesh.size(axis)
    return steps.tensor(samples, size, **places | ({TIME: REPLICATE} if whole else {}))


def _dense_layer(steps: _Steps, x: Value, activation: Tensor, times: Sequence[float]) -> Value:
    """Sleeps, then reduces two activations, one after the other."""
    if not steps.axes("tp"):
        return steps.sleep(sum(times), [x], activation)[0]
    summed = activation.placed("tp", SUM, activation.piece)
    for micros in (sum(times), 0):
        (x,) = steps.sleep(micros, [x], summed)
        x = steps.along("MPIAllreduce", x, ["tp"])
    return x


def _layer_of_experts(steps: _Steps, x: Value, activation: Tensor, times: Sequence[float]) -> Value:
    """Attention sleeps, tokens go to their experts; these sleep, and tokens come back."""
    attention, experts = times
    (x,) = steps.sleep(attention, [x], activation)
    if not steps.axes("ep"):
        return steps.sleep(experts, [x], activation)[0]
    x = steps.along("MPIAlltoall", x, ["ep"], dim=1)
    (x,) = steps.sleep(experts, [x], tensor(x))
    return steps.along("MPIAlltoall", x, ["ep"], **activation.on("ep").attributes)
