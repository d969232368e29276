"""Find the op and the rank that first computed a wrong result.

The steps are run again, and every rank records each value that it computes. Then every op is recomputed by the
reference executor from the operands that the ranks recorded: the first op whose result differs from the recorded one
is at fault. If there is none, the program itself is wrong: then the recorded values are compared with those of its
erasure, the program without devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from distir.api.differences import largest_difference, magnitude
from distir.api.steps import compute_steps
from distir.executor.reference.numpy_namespace import NUMPY
from distir.executor.reference.sequential import SequentialExecutor, evaluate, fit
from distir.ir.device import Device, Mesh
from distir.ir.errors import DistirError, MismatchError
from distir.ir.function import Function, Op, Value
from distir.ir.placement import REPLICATE, reductions
from distir.ir.type import Float32, Float64, Tensor
from distir.ops.collectives import rearranged
from distir.runtime.job import Job, JobCallbacks
from distir.runtime.record import RecordKey
from distir.transforms.rank.project import ranks
from distir.transforms.rewriting.matching import epsilon

_TOLERANCE = {Float64: 1e-9, Float32: 1e-4}
"""Tolerance of one op, relative to the largest element of its result (at least 1)."""
_ROUGH = 5e-2
"""The same for 16 bits."""
_WHOLE = {Float64: 1e-7, Float32: 1e-2}
"""Tolerance of a value after all ops before it; for 16 bits four times `_ROUGH`."""

DeviceValue = Any
"""A value in the reference executor: an array, on a mesh a list with an array per device; of a bundle a tuple."""
Recorded = Sequence[Mapping[RecordKey, np.ndarray]]
"""For each rank, the values that it computed in a step."""


class _Found(Exception):
    """The op at fault."""

    def __init__(self, text: str) -> None:
        super().__init__(text)


def locate(job: Job, executor: Callable[..., SequentialExecutor] = SequentialExecutor) -> str:
    """Run a job again, and return one line that names the first wrong value, its op and rank.

    All ranks are started on this host, even if the run was started by torchrun. `executor` makes the executor for
    backend numpy.
    """
    options = replace(job.options, check=False, profile=None, allow_nonfinite=True)
    job = replace(job, options=options, epochs=None, saving=None)
    try:
        return _search(job, executor)
    except DistirError as e:  # such as a lack of memory, or of GPUs, for the ranks of all hosts
        return f"it could not be run again to find the op at fault: {e.message}"


def _search(job: Job, executor: Callable[..., SequentialExecutor]) -> str:
    with _recording(job, executor) as recording:
        inputs = dict(job.arrays)
        for step in range(job.first, job.steps):
            inputs |= job.feed(step)
            replay = _Replay(job.program, recording(step))
            try:
                with np.errstate(all="ignore"):
                    inputs |= replay.run(inputs)
            except _Found as found:
                return f"in step {step} {found}"
            except MismatchError as e:
                return f"in step {step} {e.message}"
    return "no op by itself is at fault when it is run again: either rounding adds up, or it does not happen every time"


@contextmanager
def _recording(job: Job, executor: Callable[..., SequentialExecutor]) -> Iterator[Callable[[int], Recorded]]:
    """Gives a function that returns the recorded values of a step; to be called for each step in order."""
    if job.options.resolved_backend == "numpy":
        tape = _Tape(job.program)
        try:
            compute_steps(job, executor(tap=tape), JobCallbacks(on_step=lambda *_: tape.end_step()))
        except MismatchError:  # replicas of a result differ: the tape has the values up to there
            tape.end_step()
        yield lambda step: tape.steps[step - job.first]
        return
    from distir.backends.processes.launch import run
    from distir.runtime.record import recorded
    from distir.runtime.run_directory import scratch_folder

    with scratch_folder() as folder:  # for every value of every step: gigabytes
        run(replace(job, record=folder), alone=True)
        files = [recorded(folder, r) for r in range(job.world)]
        yield lambda step: [next(file) for file in files]


class _Instances:
    """Identifies each computed instance of a value: its function and microbatch, by counting instances."""

    def __init__(self, program: Function) -> None:
        self.function = {v: f for f in (*program.callees(), program) for op in f.ops for v in op.outputs}
        self.ops = {v: op for f in (*program.callees(), program) for op in f.ops for v in op.outputs}
        self.calls: dict[Function, list[int | None]] = {program: [None]}
        for op in program.ops:
            if op.callee is not None:
                self.calls.setdefault(op.callee, []).append(op.attributes.get("mb"))
        self.seen: dict[Value, int] = {}

    def key(self, v: Value) -> RecordKey:
        """The key of the instance of `v` that is being computed."""
        f = self.function[v]
        k = self.seen[v] = self.seen.get(v, -1) + 1
        return RecordKey(f.name, v.name, self.calls[f][k])


class _Tape:
    """Records the values that the reference executor computes, per device, as separate ranks would."""

    def __init__(self, program: Function) -> None:
        self.program = program
        self.number = {d: r for r, d in enumerate(ranks(program) or [None])}
        self.steps: list[list[dict[RecordKey, np.ndarray]]] = []
        self._begin()

    def _begin(self) -> None:
        self.instances = _Instances(self.program)
        self.now: list[dict[RecordKey, np.ndarray]] = [{} for _ in self.number]

    def end_step(self) -> None:
        self.steps.append(self.now)
        self._begin()

    def __call__(self, v: Value, value: DeviceValue) -> DeviceValue:
        key = self.instances.key(v)
        if isinstance(v.type, Tensor):
            for device, x in _on_devices(v.type, value):
                self.now[self.number.get(device, 0)][key] = np.array(x)
        return value


class _Replay:
    """One step on the reference executor, in which each result is compared with, and replaced by, the ranks' own."""

    def __init__(self, program: Function, made: Recorded) -> None:
        self.program, self.made = program, made
        self.number = {d: r for r, d in enumerate(ranks(program) or [None])}
        self.instances = _Instances(program)
        self.values: list[tuple[Value, int | None, DeviceValue]] = []
        self.before: dict[Value, DeviceValue] = {}
        """For each result of an optimizer op, the value that it replaces."""

    def run(self, inputs: Mapping[int, Any]) -> dict[int, Any]:
        """The updated inputs. Raises _Found."""
        arrays = [inputs.get(k) for k in range(len(self.program.inputs))]
        try:
            results = SequentialExecutor(tap=self.tap, on_update=self.on_update).compute(self.program, arrays)
        except MismatchError:
            self._as_a_whole(arrays)  # names the op, which the error about replicas does not
            raise
        self._as_a_whole(arrays)
        position = {v: k for k, v in enumerate(self.program.inputs)}
        return {
            position[u]: results[k] for k, v in enumerate(self.program.outputs) if (u := self.program.updates.get(v))
        }

    def on_update(self, function: str, op: Op, ins: Sequence[DeviceValue]) -> None:
        replaced = [x for k, x in enumerate(ins) if k != op.spec.gradient]
        self.before.update(zip(op.outputs, replaced, strict=False))

    def tap(self, v: Value, value: DeviceValue) -> DeviceValue:
        key = self.instances.key(v)
        value = self._replaced(v, v.type, value, key)
        if isinstance(v.type, Tensor) and self.instances.ops[v].callee is None:
            self.values.append((v, key[2], value))
        return value

    def _replaced(self, v: Value, t: Any, value: DeviceValue, key: RecordKey) -> DeviceValue:
        """`value` replaced by what the ranks recorded; members of a received bundle are recorded by name and index."""
        if not isinstance(t, Tensor):
            function, name, microbatch = key
            members = zip(t.types, value, strict=True)
            return tuple(
                self._replaced(v, u, x, RecordKey(function, f"{name}.{k}", microbatch))
                for k, (u, x) in enumerate(members)
            )
        pieces: list[Any] = []
        for device, x in _on_devices(t, value):
            rank = self.number.get(device, 0)
            got = self.made[rank].get(key)
            before = self.before.get(v)
            if before is not None and isinstance(t.device, Mesh):
                before = before[len(pieces)]
            pieces.append(x if got is None else self._compared(v, t, rank, x, got, key[2], before))
        return pieces if isinstance(t.device, Mesh) else pieces[0]

    def _compared(
        self, v: Value, t: Tensor, rank: int, want: Any, got: np.ndarray, microbatch: int | None, before: Any
    ) -> np.ndarray:
        tolerance = _TOLERANCE.get(t.dtype, _ROUGH)
        error = largest_difference(got, np.asarray(want)) / max(1.0, magnitude(np.asarray(want)))
        if not error <= tolerance:
            raise _Found(f"{_named(v, self.instances.ops[v], microbatch)} differs by {error:.3g} on rank {rank}")
        if before is not None and t.dtype.floating:
            a, b, c = (np.asarray(x).astype(np.float64) for x in (got, want, before))
            last_place = 2 * epsilon(t.dtype) * np.linalg.norm(b)
            error, change = np.linalg.norm(a - b), np.linalg.norm(b - c)
            if error > 10 * tolerance * change + last_place:
                what = f"{_named(v, self.instances.ops[v], microbatch)} changes by another amount on rank {rank}"
                raise _Found(f"{what}: {np.linalg.norm(a - c):.3g} instead of {change:.3g}")
        return got.astype(np.asarray(want).dtype, copy=False)

    def _as_a_whole(self, arrays: Sequence[Any]) -> None:
        """Compare the recorded pieces of each value with the erased program's value. Raises _Found."""
        whole = _erased(self.program, arrays)
        for v, microbatch, value in self.values:
            t = v.type
            if not isinstance(t, Tensor) or not isinstance(t.device, Mesh) or not _complete(t):
                continue
            time = t.device.time
            for d, x in _on_devices(t, _summed(t, value)):
                coord = list(t.device.coords[t.device.devices.index(d)])  # type: ignore[arg-type]
                if time is not None and microbatch is not None:
                    coord[time] = microbatch
                want = t.cut(whole[v], coord)
                error = largest_difference(np.asarray(x), want) / max(1.0, magnitude(want))
                if not error <= _WHOLE.get(t.dtype, 4 * _ROUGH):
                    what = _named(v, self.instances.ops[v], microbatch)
                    raise _Found(
                        f"{what} is not the sequential program's: it differs by {error:.3g} on rank {self.number[d]}"
                    )


def _complete(t: Tensor) -> bool:
    """Whether a value is complete: not a sum over microbatches that is still being accumulated."""
    return isinstance(t.device, Mesh) and t.over_time.kind is None and t.piece is None


def _summed(t: Tensor, value: DeviceValue) -> DeviceValue:
    """`value` with partial sums (or maxima, or means) reduced along all axes."""
    for i in reductions(t.placements):
        axis = t.mesh.axes[i]
        after = t.placed(axis, REPLICATE, t.piece)
        value = rearranged({"axis": axis}, value, t, after, t.mesh.coords, NUMPY)
        t = after
    return value


def _erased(program: Function, arrays: Sequence[Any]) -> dict[Value, Any]:
    """Every value of the erasure of a distributed program; each body is run once, on the whole batch."""
    env: dict[Value, Any] = {v: fit(x, v) for v, x in zip(program.inputs, arrays, strict=True)}
    _walk(program, env, set())
    return env


def _walk(function: Function, env: dict[Value, Any], walked: set[Function]) -> None:
    """Add the values of a function's ops, and of those of its callees that were not walked yet."""
    for op in function.ops:
        ins = [env[v] for v in op.inputs]
        if op.callee is not None:
            if op.callee not in walked:
                walked.add(op.callee)
                env.update(zip(op.callee.inputs, ins, strict=True))
                _walk(op.callee, env, walked)
            outs: Sequence[Any] = [env[v] for v in op.callee.outputs]
        elif op.spec.bundle is not None:
            outs = [tuple(ins)] if op.spec.bundle == "pack" else list(ins[0])
        elif op.spec.comm is not None:
            outs = [ins[0]] * len(op.outputs)
        else:
            outs = _evaluated(op, ins)
        env.update(zip(op.outputs, outs, strict=True))


def _evaluated(op: Op, ins: Sequence[Any]) -> Sequence[Any]:
    """One op on whole arrays."""
    whole = {v: Value(v.name, v.type.erased()) for v in (*op.inputs, *op.outputs)}
    bare = Op(op.spec, tuple(whole[v] for v in op.inputs), op.attributes, tuple(whole[v] for v in op.outputs))
    result = evaluate(bare, ins, None)
    return result if isinstance(result, tuple | list) else (result,)


def _on_devices(t: Tensor, value: DeviceValue) -> list[tuple[Device | None, Any]]:
    if isinstance(t.device, Mesh):
        return list(zip(t.device.devices, value, strict=True))
    return [(t.device, value)]


def _named(v: Value, op: Op, microbatch: int | None) -> str:
    """A value with its op: `%y = MatMul(%x, %w) of microbatch 1`."""
    inputs = ", ".join(f"%{x.name}" for x in op.inputs)
    return f"%{v.name} = {op.op_type}({inputs})" + ("" if microbatch is None else f" of microbatch {microbatch}")
