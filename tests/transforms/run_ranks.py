"""Runs the programs of all ranks on numpy, each op by op, synchronized only by communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from distir.executor.reference.joining import join
from distir.executor.reference.numpy_namespace import NUMPY
from distir.executor.reference.sequential import evaluate, fit, unfit
from distir.ir.device import Device, Mesh
from distir.ir.function import Function, Op, Value
from distir.ir.type import Partial, Replicate, Tensor, Tuple, Type
from distir.transforms.rank.project import RankProgram, coordinate, device_at
from tests.transforms.programs import Program


class Blocked(Exception):
    """The ranks deadlock."""


Post = dict[Any, Any]
"""The pieces that ranks have contributed to communication, by its key and the rank."""


def run_ranks(program: Function, ranks: Sequence[RankProgram], source: Program) -> list[np.ndarray]:
    """The distributed program's outputs, from those of its ranks. Raises Blocked if they deadlock."""
    post: Post = {}
    runs = [_Rank(p, post) for p in ranks]
    steps = []
    for r in runs:
        values = [program.inputs[k] for k in r.p.inputs]
        args = [r.own(v, source.arrays[k]) for k, v in zip(r.p.inputs, values, strict=True)]
        steps.append(r.run(r.p.function, args, None))
    results: dict[int, Any] = {}
    while len(results) < len(steps):
        done = len(results)
        moved = False
        for k, step in enumerate(steps):
            while k not in results:
                before = len(post), runs[k].count
                try:
                    next(step)
                except StopIteration as e:
                    results[k] = e.value
                if (len(post), runs[k].count) == before:
                    break
                moved = True
        if len(results) == done and not moved:
            raise Blocked
    outputs = []
    for n, v in enumerate(program.outputs):
        t = v.type
        assert isinstance(t, Tensor)
        by_device = {r.p.device: results[k][r.p.outputs.index(n)] for k, r in enumerate(runs) if n in r.p.outputs}
        mesh = t.device
        whole = (
            join({c: by_device[d] for d, c in zip(mesh.devices, mesh.coords, strict=True)}, t)
            if isinstance(mesh, Mesh)
            else next(iter(by_device.values()))
        )
        outputs.append(unfit(whole, program.sources.get(v)))
    return outputs


class _Meeting:
    """The lanes of a collective: all devices of a mesh, with the pieces they contribute. See `Lanes`."""

    xp = NUMPY
    unrolled = False

    def __init__(self, mesh: Mesh) -> None:
        self.where = [coordinate(mesh, d) for d in mesh.devices]

    def of(self, mesh: Mesh) -> Sequence[tuple[int, ...]]:
        return self.where

    def whole(self, t: Type, value: Any) -> Any:
        raise AssertionError("no collective needs the whole")


class _Rank:
    def __init__(self, p: RankProgram, post: Post) -> None:
        self.p, self.post = p, post
        self.count = 0
        """The number of ops that are done."""
        self.met: dict[Any, int] = {}

    def own(self, v: Value, x: Any) -> Any:
        """The rank's piece of an input."""
        whole, t = fit(x, v), v.type
        return t.cut(whole, self.at(t.device)) if isinstance(t, Tensor) and isinstance(t.device, Mesh) else whole

    def at(self, mesh: Mesh, microbatch: int | None = None) -> tuple[int, ...]:
        assert self.p.device is not None
        c = coordinate(mesh, self.p.device)
        return c if microbatch is None or mesh.time is None else (*c[: mesh.time], microbatch, *c[mesh.time + 1 :])

    def run(self, f: Function, args: Sequence[Any], microbatch: int | None) -> Iterator[None]:
        """Yields where others may have to go on first; returns the outputs. What is received is waited for when it is
        used."""
        env: dict[Value, Any] = dict(zip(f.inputs, args, strict=True))
        for op in f.ops:
            if op.callee is not None:
                ins = yield from self.there([env[v] for v in op.inputs])
                outs = yield from self.run(op.callee, ins, op.attributes.get("mb"))  # type: ignore[misc]
            elif op.spec.bundle is not None:
                outs = [tuple(env[v] for v in op.inputs)] if op.spec.bundle == "pack" else env[op.inputs[0]]
            elif op.spec.route == "incoming":
                outs = [_Coming(op, self.arrived(op))]
            else:
                ins = yield from self.there([env[v] for v in op.inputs])
                outs = yield from self.step(op, ins, microbatch)
            env.update(zip(op.outputs, outs, strict=True))
            self.count += 1
        return (yield from self.there([env[v] for v in f.outputs]))  # type: ignore[return-value]

    def there(self, xs: Sequence[Any]) -> Iterator[None]:
        found = []
        for x in xs:
            if isinstance(x, tuple):
                x = tuple((yield from self.there(x)))  # type: ignore[misc]
            elif isinstance(x, _Coming):
                x = yield from x.wait()  # type: ignore[misc]
            found.append(x)
        return found  # type: ignore[return-value]

    def step(self, op: Op, ins: list[Any], microbatch: int | None) -> Iterator[None]:
        name, attributes = op.spec.name, op.attributes
        if op.spec.route == "outgoing":
            key = attributes["message"], self.next("sent", attributes["message"])
            self.post[("sent", *key, self.p.device)] = ins[0], op.inputs[0].type
            return []  # type: ignore[return-value]
        if op.spec.route == "axis" or name == "LocalSlice":
            return (yield from self.collective(op, ins, microbatch))  # type: ignore[return-value]
        if name in ("After", "Restrict"):
            return ins[:1]  # type: ignore[return-value]
        if name == "Accumulate":
            return [_added(op.inputs[0].type, *ins)]  # type: ignore[return-value]
        assert op.spec.comm is None, op
        mesh = op.outputs[0].type.device
        y = evaluate(op, ins, self.at(mesh, microbatch) if isinstance(mesh, Mesh) else None)
        return list(y) if isinstance(y, tuple | list) else [y]  # type: ignore[return-value]

    def next(self, *key: Any) -> int:
        n = self.met[key] = self.met.get(key, -1) + 1
        return n

    def collective(self, op: Op, ins: list[Any], microbatch: int | None) -> Iterator[None]:
        before, after, axis = op.inputs[0].type, op.outputs[0].type, op.attributes["axis"]
        first = before.types[0] if isinstance(before, Tuple) else before
        assert isinstance(first, Tensor)
        mesh = first.mesh
        if mesh.time == mesh.position(axis):
            if isinstance(first.on(axis), Partial):
                return ins  # type: ignore[return-value]
            if op.spec.route == "axis":
                return [first.local(mesh.position(axis)).join(ins, NUMPY)]  # type: ignore[return-value]
        if isinstance(first.on(axis), Replicate):
            return [self.slice(after, axis, ins[0], microbatch)]  # type: ignore[return-value]
        key = "meet", mesh, self.next(mesh)
        self.post[(*key, self.p.device)] = ins[0]
        while not all((*key, d) in self.post for d in mesh.devices):
            yield
        xs = [self.post[(*key, d)] for d in mesh.devices]
        mine = mesh.devices.index(self.p.device)  # type: ignore[arg-type]
        assert op.spec.comm is not None
        assert op.spec.comm.meaning is not None
        bundle = isinstance(before, Tuple)
        (moved,) = op.spec.comm.meaning(_Meeting(mesh), op, [list(zip(*xs, strict=True)) if bundle else xs])
        return [tuple(row[mine] for row in moved) if bundle else moved[mine]]  # type: ignore[return-value]

    def slice(self, t: Any, axis: str, x: Any, microbatch: int | None) -> Any:
        a = t.mesh.position(axis)
        return t.local(a).cut(x, self.at(t.mesh, microbatch)[a], t.mesh.sizes[a])

    def arrived(self, op: Op) -> Iterator[None]:
        source, got = op.attributes["source"], op.outputs[0].type
        assert isinstance(got, Tensor)
        key = "sent", op.attributes["message"], self.next("got", op.attributes["message"])
        if isinstance(source, Mesh) and isinstance(got.device, Mesh):
            expected: tuple[Device, ...] = (device_at(source, self.at(got.device)),)
        else:
            expected = source.devices if isinstance(source, Mesh) else (source,)

        def wait() -> Iterator[None]:
            while not all((*key, d) in self.post for d in expected):
                yield
            found = [self.post[(*key, d)] for d in expected]
            if isinstance(source, Mesh) and not isinstance(got.device, Mesh):
                return join(dict(zip(source.coords, [x for x, _ in found], strict=True)), found[0][1])  # type: ignore
            if isinstance(got.device, Mesh) and not isinstance(source, Mesh):
                return got.cut(found[0][0], self.at(got.device))  # type: ignore
            return found[0][0]

        return wait()


class _Coming:
    """What a receive returns: the value is waited for once, at its first use."""

    def __init__(self, op: Op, waiting: Iterator[None]) -> None:
        self.op, self.waiting = op, waiting
        self.found: list[Any] = []

    def wait(self) -> Iterator[None]:
        if not self.found:
            self.found.append((yield from self.waiting))
        return self.found[0]


def _added(t: Any, total: Any, x: Any) -> Any:
    if isinstance(t, Tuple):
        return tuple(_added(u, a, b) for u, a, b in zip(t.types, total, x, strict=True))
    return t.placements[t.mesh.time].join((total, x), NUMPY)
