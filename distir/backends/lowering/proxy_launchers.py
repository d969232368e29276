"""Launch functions of a proxy's collectives: the messages of the real ones, without the copies before and after.

The contents of a proxy's values do not matter. So results are buffers that are made once, and what a collective sends
is its operand as it lies, or, of several tensors or of a slice, a buffer of that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from distir.backends.lowering.launchers import Launch, Start, Tensors, halo_sides, permuted_ranks
from distir.backends.tensors.torch_namespace import torch_dtype
from distir.backends.transport.interface import Line, Work, wait_all
from distir.backends.transport.mpi import Mpi
from distir.ir.type import Tensor

Post = Callable[[Tensors], list[Work]]
"""Starts a collective on its operands."""


def proxy_launcher(name: str, x: Launch) -> Start | None:
    """The launch function of a collective in a proxy; None for one that moves as it does in a real run: those made of
    messages of single tensors, and reductions of a transport that works in place.
    """
    line = x.network.line(x.after[0] if name == "MPIReduceScatter" else x.before[0], x.axis)
    post = _POSTS[name](x, line)
    if post is None:
        return None
    results = [_buffer(x, t) for t in x.after]

    def start(xs: Tensors) -> Callable[[], Tensors]:
        works = post(xs)

        def finish() -> Tensors:
            wait_all(works)
            return list(results)

        return finish

    return start


def _buffer(x: Launch, t: Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=torch_dtype(t.dtype), device=x.network.memory.device)


def _message(x: Launch, like: Tensor, *shape: int) -> torch.Tensor:
    """A buffer that the backend reads or writes."""
    return x.network.memory.empty(shape, torch_dtype(like.dtype))


def _operand(x: Launch, types: Sequence[Tensor]) -> Callable[[Tensors], torch.Tensor]:
    """A flat tensor to send in place of operands: the only one, or a buffer as large as all."""
    memory = x.network.memory
    if len(types) == 1:
        return lambda xs: memory.to_backend(xs[0]).view(-1)
    buffer = _message(x, types[0], sum([math.prod(t.shape) for t in types]))
    return lambda xs: buffer


def _all_reduce(x: Launch, line: Line) -> Post | None:
    transport, kind = line.transport, x.before[0].on(x.axis).kind
    if not isinstance(transport, Mpi) or kind is None:
        return None
    given = _operand(x, x.before)
    into = _message(x, x.before[0], sum([math.prod(t.shape) for t in x.before]))
    return lambda xs: [transport.all_reduce_into(into, given(xs), line, kind)]


def _all_gather(x: Launch, line: Line) -> Post | None:
    if not line.transport.grouped:
        return None
    given, n = _operand(x, x.before), len(line.ranks)
    out = _message(x, x.before[0], n, sum([math.prod(t.shape) for t in x.before]))
    return lambda xs: line.transport.all_gather(out, given(xs), line)


def _reduce_scatter(x: Launch, line: Line) -> Post | None:
    kind = x.before[0].on(x.axis).kind
    if not line.transport.grouped or kind is None:
        return None
    given, n = _operand(x, x.before), len(line.ranks)
    return lambda xs: line.transport.reduce_scatter(given(xs).view(n, -1), line, kind, x.network.memory)[0]


def _all_to_all(x: Launch, line: Line) -> Post:
    given, n = _operand(x, x.before), len(line.ranks)
    out = _message(x, x.before[0], n, math.prod(x.before[0].shape) // n)
    return lambda xs: line.transport.all_to_all(out, given(xs).view(n, -1), line)


def _permute(x: Launch, line: Line) -> Post:
    to, source = permuted_ranks(x, line)
    given, out = _operand(x, x.before), _message(x, x.before[0], math.prod(x.before[0].shape))
    return lambda xs: line.transport.exchange([(to, given(xs))], [(source, out)], line)


def _halo(x: Launch, line: Line) -> Post:
    dim, _, sides = halo_sides(x, line)
    face = math.prod(x.before[0].shape) // x.before[0].shape[dim]
    near = [s for s in sides if 0 <= s.neighbour < len(line.ranks)]
    sent, received = (
        [(line.ranks[s.neighbour], _message(x, x.before[0], face * part[1])) for s in near if (part := one(s))[1]]
        for one in (lambda s: s.taken, lambda s: s.given)
    )
    return lambda xs: line.transport.exchange(sent, received, line)


_POSTS: dict[str, Callable[[Launch, Line], Post | None]] = {
    "MPIAllreduce": _all_reduce,
    "MPIAllgather": _all_gather,
    "MPIReduceScatter": _reduce_scatter,
    "MPIAlltoall": _all_to_all,
    "MPIPermute": _permute,
    "HaloExchange": _halo,
}
