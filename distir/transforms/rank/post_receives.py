"""Posts receives early, so that transfers overlap compute.

In a projected program a receive stands at the position of its send, followed by the bundles of received values, which
wait for it. This pass moves each receive before the call that precedes its first use, unless it stands there already,
and each bundle to its first use. So at most the arguments of the next call are received early. The order of receives
does not change: a backend may match messages by it.

Receiving earlier and waiting later cannot block, so what `check_order` proves still holds (see `check_ahead`).
"""

from __future__ import annotations

from collections.abc import Sequence

from distir.ir.function import Function, Op, Value
from distir.transforms.rank.project import RankProgram, reordered


def posted_ahead(program: RankProgram) -> RankProgram:
    """A rank's program with its receives posted ahead."""
    return program._replace(function=_ahead(program.function))


def _ahead(function: Function) -> Function:
    ops = function.ops
    order = receive_order(ops, [op.spec.route == "incoming" for op in ops])
    return reordered(function, [ops[k] for k in order])


def receive_order(ops: Sequence[Op], receives: Sequence[bool]) -> list[int]:
    """The order of one device's ops with its receives posted ahead, as positions in `ops`; `receives` flags the
    receives among them."""
    end = len(ops)
    late = _received(ops, receives)
    call_before = [-1] * (end + 1)
    for k, op in enumerate(ops):
        call_before[k + 1] = k if op.callee is not None else call_before[k]
    needed: dict[Value, int] = {}
    """The position of a value's first use by an op that does not move."""
    place: list[tuple[int, int]] = [(k, 2) for k in range(end)]
    """Sort key of each op: the op it goes before; 0 for receives, 1 for bundles, 2 for that op itself."""
    earliest = end
    for k in reversed(range(end)):
        op = ops[k]
        need = min([needed.get(v, end) for v in op.outputs], default=end)
        if receives[k]:
            ahead = call_before[need]
            earliest = min(earliest, k, ahead if ahead >= 0 else k)
            place[k] = (earliest, 0)
            continue
        if op.spec.bundle == "pack" and op.outputs[0] in late:
            place[k] = (need, 1)
        else:
            need = k
        for v in op.inputs:
            needed[v] = min(needed.get(v, end), need)
    return sorted(range(end), key=place.__getitem__)


def _received(ops: Sequence[Op], receives: Sequence[bool]) -> set[Value]:
    """The received values, and bundles with them."""
    found: set[Value] = set()
    for op, receive in zip(ops, receives, strict=True):
        if receive or (op.spec.bundle == "pack" and not found.isdisjoint(op.inputs)):
            found.update(op.outputs)
    return found
