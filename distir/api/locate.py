"""Which op, on which rank, first computed something else than it should have.

The steps are run again, every rank keeping each value that it makes. Then every op is computed once more, on the
reference executor, from what the ranks had as its operands: the first op whose result is not what the ranks have is at
fault, and the rank that has another result. If no op is, the program itself is wrong: then what the ranks have of each
value is compared with the whole value, as the program computes it without devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from distir.api.check import largest_difference, magnitude
from distir.api.steps import Job, compute_steps
from distir.backends.record import Key
from distir.executor.collectives import cut, move
from distir.executor.sequential import SequentialExecutor, evaluate, fit
from distir.ir.device import Device, Mesh
from distir.ir.errors import DistirError, MismatchError
from distir.ir.function import Function, Op, Value
from distir.ir.type import REPLICATE, Float32, Float64, Partial, Tensor
from distir.transforms.project import ranks
from distir.transforms.rewrite import epsilon

_TOLERANCE = {Float64: 1e-9, Float32: 1e-4}
"""How far one op may be off, relative to its largest result (at least 1)."""
_ROUGH = 5e-2
"""The same in 16 bits."""
_WHOLE = {Float64: 1e-7, Float32: 1e-2}
"""How far a value may be off once rounding has gone through all ops before it; in 16 bits four times `_ROUGH`."""

Held = Any
Recorded = Sequence[Mapping[Key, np.ndarray]]
"""For each rank, what it made in a step."""


class _Found(Exception):
    """The op at fault."""

    def __init__(self, text: str) -> None:
        super().__init__(text)


def locate(job: Job, executor: Callable[..., SequentialExecutor] = SequentialExecutor) -> str:
    """Run a distributed program again, and say in a line which value first differs, its op and rank.

    All ranks are started on this host, even if torchrun started those of the run. `executor` makes the executor of
    the backend "numpy".
    """
    try:
        return _search(job, executor)
    except DistirError as e:  # such as a lack of memory, or of GPUs, for the ranks of all hosts
        return f"it could not be run again to find the op at fault: {e.message}"


def _search(job: Job, executor: Callable[..., SequentialExecutor]) -> str:
    with _recording(job, executor) as recording:
        held = dict(job.arrays)
        for step in range(job.first, job.steps):
            held |= job.feed(step)
            replay = _Replay(job.program, recording(step))
            try:
                with np.errstate(all="ignore"):
                    held |= replay.run(held)
            except _Found as found:
                return f"in step {step} {found}"
            except MismatchError as e:
                return f"in step {step} {e.message}"
    return "no op by itself is at fault when it is run again: either rounding adds up, or it does not happen every time"


@contextmanager
def _recording(job: Job, executor: Callable[..., SequentialExecutor]) -> Iterator[Callable[[int], Recorded]]:
    """Gives a function from a step's number, in order, to what the ranks made in it."""
    if job.backend == "numpy":
        tape = _Tape(job.program)
        try:
            compute_steps(job, executor(tap=tape), lambda *_: tape.end_step())
        except MismatchError:  # copies of a result differ: what led to them is on the tape
            tape.end_step()
        yield lambda step: tape.steps[step - job.first]
        return
    from distir.backends.held import scratch_folder
    from distir.backends.launch import run
    from distir.backends.record import recorded

    with scratch_folder() as folder:  # for every value of every step: gigabytes
        settings = {"backend": job.backend, "timeout": job.timeout, "first": job.first}
        run(job.program, job.arrays, job.steps, data=job.feed, final=False, record=folder, alone=True, **settings)
        files = [recorded(folder, r) for r in range(max(1, len(ranks(job.program))))]
        yield lambda step: [next(file) for file in files]


class _Moments:
    """Which function makes a value, and of which microbatch, given how often it was made before."""

    def __init__(self, program: Function) -> None:
        self.function = {v: f for f in (*program.callees(), program) for op in f.ops for v in op.outputs}
        self.ops = {v: op for f in (*program.callees(), program) for op in f.ops for v in op.outputs}
        self.calls: dict[Function, list[int | None]] = {program: [None]}
        for op in program.ops:
            if op.callee is not None:
                self.calls.setdefault(op.callee, []).append(op.attributes.get("mb"))
        self.seen: dict[Value, int] = {}

    def key(self, v: Value) -> Key:
        """The key of `v`, which is being made."""
        f = self.function[v]
        k = self.seen[v] = self.seen.get(v, -1) + 1
        return Key(f.name, v.name, self.calls[f][k])


class _Tape:
    """Keeps what the reference executor holds on each device, as ranks of their own would."""

    def __init__(self, program: Function) -> None:
        self.program = program
        self.number = {d: r for r, d in enumerate(ranks(program) or [None])}
        self.steps: list[list[dict[Key, np.ndarray]]] = []
        self._begin()

    def _begin(self) -> None:
        self.moments = _Moments(self.program)
        self.now: list[dict[Key, np.ndarray]] = [{} for _ in self.number]

    def end_step(self) -> None:
        self.steps.append(self.now)
        self._begin()

    def __call__(self, v: Value, held: Held) -> Held:
        key = self.moments.key(v)
        if isinstance(v.type, Tensor):
            for device, x in _on_devices(v.type, held):
                self.now[self.number.get(device, 0)][key] = np.array(x)
        return held


class _Replay:
    """One step on the reference executor, with what the ranks made in place of what it makes."""

    def __init__(self, program: Function, made: Recorded) -> None:
        self.program, self.made = program, made
        self.number = {d: r for r, d in enumerate(ranks(program) or [None])}
        self.moments = _Moments(program)
        self.values: list[tuple[Value, int | None, Held]] = []
        self.before: dict[Value, Held] = {}
        """For results of optimizer ops what they replace."""

    def run(self, held: Mapping[int, Any]) -> dict[int, Any]:
        """The updated inputs. Raises _Found."""
        arrays = [held.get(k) for k in range(len(self.program.inputs))]
        try:
            results = SequentialExecutor(tap=self.tap, on_update=self.on_update).compute(self.program, arrays)
        except MismatchError:
            self._as_a_whole(arrays)  # this says more than that copies of a result differ
            raise
        self._as_a_whole(arrays)
        position = {v: k for k, v in enumerate(self.program.inputs)}
        return {
            position[u]: results[k] for k, v in enumerate(self.program.outputs) if (u := self.program.updates.get(v))
        }

    def on_update(self, function: str, op: Op, ins: Sequence[Held]) -> None:
        replaced = [x for k, x in enumerate(ins) if k != op.spec.gradient]
        self.before.update(zip(op.outputs, replaced, strict=False))

    def tap(self, v: Value, held: Held) -> Held:
        key = self.moments.key(v)
        held = self._replaced(v, v.type, held, key)
        if isinstance(v.type, Tensor) and self.moments.ops[v].callee is None:
            self.values.append((v, key[2], held))
        return held

    def _replaced(self, v: Value, t: Any, held: Held, key: Key) -> Held:
        """What the ranks have in place of what is held; a bundle that was received has its members' names."""
        if not isinstance(t, Tensor):
            function, name, moment = key
            members = zip(t.types, held, strict=True)
            return tuple(
                self._replaced(v, u, x, Key(function, f"{name}.{k}", moment)) for k, (u, x) in enumerate(members)
            )
        pieces: list[Any] = []
        for device, x in _on_devices(t, held):
            rank = self.number.get(device, 0)
            got = self.made[rank].get(key)
            before = self.before.get(v)
            if before is not None and isinstance(t.device, Mesh):
                before = before[len(pieces)]
            pieces.append(x if got is None else self._compared(v, t, rank, x, got, key[2], before))
        return pieces if isinstance(t.device, Mesh) else pieces[0]

    def _compared(
        self, v: Value, t: Tensor, rank: int, want: Any, got: np.ndarray, moment: int | None, before: Any
    ) -> np.ndarray:
        tolerance = _TOLERANCE.get(t.dtype, _ROUGH)
        error = largest_difference(got, np.asarray(want)) / max(1.0, magnitude(np.asarray(want)))
        if not error <= tolerance:
            raise _Found(f"{_named(v, self.moments.ops[v], moment)} differs by {error:.3g} on rank {rank}")
        if before is not None and t.dtype.floating:
            a, b, c = (np.asarray(x).astype(np.float64) for x in (got, want, before))
            last_place = 2 * epsilon(t.dtype) * np.linalg.norm(b)
            error, change = np.linalg.norm(a - b), np.linalg.norm(b - c)
            if error > 10 * tolerance * change + last_place:
                what = f"{_named(v, self.moments.ops[v], moment)} changes by another amount on rank {rank}"
                raise _Found(f"{what}: {np.linalg.norm(a - c):.3g} instead of {change:.3g}")
        return got.astype(np.asarray(want).dtype, copy=False)

    def _as_a_whole(self, arrays: Sequence[Any]) -> None:
        """Compare what the ranks have of each value with the whole. Raises _Found."""
        whole = _erased(self.program, arrays)
        for v, moment, held in self.values:
            t = v.type
            if not isinstance(t, Tensor) or not isinstance(t.device, Mesh) or not _complete(t):
                continue
            time = t.device.time
            for d, x in _on_devices(t, _summed(t, held)):
                coord = list(t.device.coords[t.device.devices.index(d)])  # type: ignore[arg-type]
                if time is not None and moment is not None:
                    coord[time] = moment
                want = cut(whole[v], t, tuple(coord))
                error = largest_difference(np.asarray(x), want) / max(1.0, magnitude(want))
                if not error <= _WHOLE.get(t.dtype, 4 * _ROUGH):
                    what = _named(v, self.moments.ops[v], moment)
                    raise _Found(
                        f"{what} is not the whole program's: it differs by {error:.3g} on rank {self.number[d]}"
                    )


def _complete(t: Tensor) -> bool:
    """Whether all there is of a value at a moment is there: not a sum over time that is still running."""
    mesh = t.device
    return isinstance(mesh, Mesh) and (
        mesh.time is None or (not isinstance(t.placements[mesh.time], Partial) and t.piece is None)
    )


def _summed(t: Tensor, held: Held) -> Held:
    """What is held, partial sums (or maxima, or means) replaced by the whole's pieces."""
    for axis, p in zip(t.mesh.axes, t.placements, strict=True):
        if isinstance(p, Partial):
            after = t.placed(axis, REPLICATE, t.piece)
            held = move(held, t, after, axis, t.mesh.coords)
            t = after
    return held


def _erased(program: Function, arrays: Sequence[Any]) -> dict[Value, Any]:
    """Every value of a distributed program as it is without devices and microbatches; each body is run once."""
    env: dict[Value, Any] = {v: fit(x, v) for v, x in zip(program.inputs, arrays, strict=True)}
    walked: set[Function] = set()

    def walk(function: Function) -> None:
        for op in function.ops:
            ins = [env[v] for v in op.inputs]
            if op.callee is not None:
                if op.callee not in walked:
                    walked.add(op.callee)
                    env.update(zip(op.callee.inputs, ins, strict=True))
                    walk(op.callee)
                outs: Sequence[Any] = [env[v] for v in op.callee.outputs]
            elif op.spec.bundle is not None:
                outs = [tuple(ins)] if op.spec.bundle == "pack" else list(ins[0])
            elif op.spec.comm is not None:
                outs = [ins[0]] * len(op.outputs)
            else:
                outs = _evaluated(op, ins)
            env.update(zip(op.outputs, outs, strict=True))

    walk(program)
    return env


def _evaluated(op: Op, ins: Sequence[Any]) -> Sequence[Any]:
    """One op on whole arrays."""
    whole = {v: Value(v.name, v.type.erased()) for v in (*op.inputs, *op.outputs)}
    bare = Op(op.spec, tuple(whole[v] for v in op.inputs), op.attributes, tuple(whole[v] for v in op.outputs))
    result = evaluate(bare, ins, None)
    return result if isinstance(result, tuple | list) else (result,)


def _on_devices(t: Tensor, held: Held) -> list[tuple[Device | None, Any]]:
    if isinstance(t.device, Mesh):
        return list(zip(t.device.devices, held, strict=True))
    return [(t.device, held)]


def _named(v: Value, op: Op, moment: int | None) -> str:
    """A value with its op: `%y = MatMul(%x, %w), microbatch 1,`."""
    inputs = ", ".join(f"%{x.name}" for x in op.inputs)
    return f"%{v.name} = {op.op_type}({inputs})" + ("" if moment is None else f" of microbatch {moment}")
