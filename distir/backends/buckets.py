"""Collectives on bundles: one, on one buffer.

    b0, w0, w1, = bucket()                  # a buffer, and views of it
    v5 = sum(v4, (0,), out=w0)              # what is to be reduced is computed into its view
    v7 = matmul(t_1(v4), v6, out=w1)
    v8 = allreduce_dp(b0, (w0, w1,))        # starts it, and gives functions that wait, and give the views
    h9, h10, = v8

A buffer is kept from step to step if nothing that lies in it is left when the step is over.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from distir.backends.memory import Memory
from distir.backends.namespace import torch_dtype
from distir.backends.optimizers import steps_together
from distir.backends.passing import passes
from distir.ir.function import Function, Op, Value
from distir.ir.kept import kept
from distir.ir.type import Tensor, Tuple

if TYPE_CHECKING:
    from distir.backends.body import Body

_ALIGNED = 64
"""Views begin at multiples of so many bytes."""

Row = Sequence[torch.Tensor]


class Bucket:
    """A bundle's buffer. It and its views have names in the Python function as soon as one is asked for."""

    def __init__(self, body: Body, pack: Op, kept: bool) -> None:
        self.body = body
        self.types = [v.type for v in pack.inputs if isinstance(v.type, Tensor)]
        self.make = buffer(self.types, body.network.memory, kept)
        self.placed: set[Value] = set()
        """The members that are made where they belong."""
        self._names: list[str] = []

    @property
    def names(self) -> list[str]:
        """The buffer's name, then the views'."""
        if not self._names:
            b = self.body
            n = sum(len(other._names) for other in b.buckets.values())
            self._names = [f"b{n}", *[f"w{n + k}" for k in range(len(self.types))]]
            b.lines.append(f"{', '.join(self._names)}, = {b.bind('bucket', self.make)}()")
        return self._names


def buffer(types: Sequence[Tensor], memory: Memory, kept: bool) -> Callable[[], Row]:
    """What gives a buffer for tensors of these types, and a view of it for each; `kept`: the same one each time."""
    dtype = torch_dtype(types[0].dtype)
    step = _ALIGNED // dtype.itemsize
    sizes = [math.prod(t.shape) for t in types]
    ends = [0]
    for n in sizes:
        ends.append(-(-(ends[-1] + n) // step) * step)
    held: list[Row] = []

    def make() -> Row:
        if held:
            return held[0]
        flat = memory.room((ends[-1],), dtype)
        views = [flat[i : i + n].view(t.shape) for i, n, t in zip(ends, sizes, types, strict=False)]
        if kept:
            held.append((flat, *views))
        return (flat, *views)

    return make


def buffered(function: Function) -> dict[Op, Op]:
    """The collectives on bundles that are done on a buffer, with the ops that pack these: for nothing else."""
    used = Counter([v for op in function.ops for v in op.inputs] + list(function.outputs))
    packs: dict[Value, Op] = {}
    found: dict[Op, Op] = {}
    for op in function.ops:
        if op.spec.bundle == "pack" and _flat(op) and used[op.outputs[0]] == 1:
            packs[op.outputs[0]] = op
        elif op.inputs and op.inputs[0] in packs and op.spec.comm is not None:
            if passes(op) and used[op.outputs[0]] == 1:
                packs[op.outputs[0]] = packs[op.inputs[0]]
            elif op.spec.name == "MPIAllreduce" and not passes(op):
                found[op] = packs[op.inputs[0]]
    return found


@kept
def makers_of(function: Function) -> dict[Value, Op]:
    """The op that makes each value."""
    return {v: op for op in function.ops for v in op.outputs}


def find_buckets(b: Body, kept: bool) -> dict[Op, Bucket]:
    """The buckets of a function, by the ops that pack them."""
    makers = makers_of(b.function)
    number = {op: k for k, op in enumerate(b.function.ops)}
    found: dict[Op, Bucket] = {}
    for op, pack in b.memory.buffered.items():
        bucket = found[pack] = Bucket(b, pack, kept)
        for v in pack.inputs:
            once = pack.inputs.count(v) == 1
            if once and v in makers and _placeable(makers[v]) and b.memory.ends(v, number[op]):
                bucket.placed.add(v)
    return found


def bucket_of(b: Body, collective: Op) -> Bucket | None:
    """The bucket that a collective on a bundle reduces, if there is one."""
    pack = b.memory.buffered.get(collective)
    return None if pack is None else b.buckets[pack]


def _flat(pack: Op) -> bool:
    """Whether the members fit into one buffer: tensors of one floating type."""
    types = [v.type for v in pack.inputs]
    dtypes = {t.dtype for t in types if isinstance(t, Tensor)}
    return len(dtypes) == 1 and not any(isinstance(t, Tuple) for t in types) and dtypes.pop().floating


def _placeable(op: Op) -> bool:
    """Whether what the op makes can be made in a given place."""
    if op.spec.name == "Accumulate":
        return isinstance(op.outputs[0].type, Tensor)
    return op.spec.comm is None and len(op.outputs) == 1 and not steps_together(op)


def pack(b: Body, op: Op) -> None:
    """A tuple, or what is left to do to fill a buffer."""
    bucket = b.buckets.get(op)
    if bucket is None:
        handed = [b.hand(v, b.now) for v in op.inputs]
        waits = tuple([w if isinstance(w, int) else 0 for _, w in handed])
        if any(waits):
            b.waits[op.outputs[0]] = waits
        b.assign(op, f"({''.join([f'{name}, ' for name, _ in handed]).rstrip()})")
        return
    _, *views = bucket.names
    for v, view in zip(op.inputs, views, strict=True):
        if v not in bucket.placed:
            b.lines.append(f"{b.bind('copy_', torch.Tensor.copy_)}({view}, {b.use(v)})")


def unpack(b: Body, op: Op) -> None:
    bundle = b.itself(op.inputs[0])
    if not op.outputs:
        return
    name, waits = b.hand(bundle, b.now)
    for v, n in zip(op.outputs, waits if isinstance(waits, tuple) else (), strict=False):
        if n:
            b.waits[v] = n
    row = "".join(f"{b.var(v)}, " for v in op.outputs)
    b.lines.append(f"{row}= {name}")


def reduce(b: Body, op: Op, bucket: Bucket) -> None:
    """Start the reduction of a buffer that is full."""
    flat, *views = bucket.names
    start = b.network.allreduce(bucket.types[0], op.attributes["axis"], own=True)

    def reduced(buffer: torch.Tensor, parts: Row) -> Callable[[], Row]:
        finish = start(buffer)

        def members() -> Row:
            row = finish()  # the buffer, unless the backend cannot use its memory
            return parts if row is buffer else [row.as_strided(x.shape, x.stride(), x.storage_offset()) for x in parts]

        return members

    name = b.bind(f"allreduce_{op.attributes['axis']}", by_member(reduced, len(views)))
    b.assign(op, f"{name}({flat}, ({', '.join(views)},))", pending=True)
    b.lines.append(f"del {flat}, {', '.join(views)}")


def by_member(start: Callable[..., Callable[[], Row]], members: int) -> Callable[..., Any]:
    """What starts a collective on a bundle, and gives a function for each member, which waits and gives it.

    `start` gives one that waits and gives all.
    """

    def each(*operands: Any) -> tuple[Callable[[], torch.Tensor], ...]:
        pending = [start(*operands)]
        results: list[Any] = []

        def member(k: int) -> torch.Tensor:
            if pending:
                results.extend(pending.pop()())
            x, results[k] = results[k], None  # what is taken is not kept for the sake of others
            return x

        return tuple([functools.partial(member, k) for k in range(members)])

    return each
