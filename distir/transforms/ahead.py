"""Receives posted ahead, so that transfers run while a rank computes, and not after.

In a projected program a receive stands where the value was sent, and a bundle of what was received is made there, which
waits for it. Here each receive is posted before the call that precedes its first use, if it does not stand before that
already, and a bundle is made where it is needed. So no more is received beforehand than the next call needs. Receives
stay in their order, by which a backend may match messages.

To receive earlier and to wait later blocks nothing: what `check_order` proves of a program holds of this one, too.
"""

from __future__ import annotations

from distir.ir.function import Function, Value
from distir.transforms.project import RankProgram, reordered


def posted_ahead(program: RankProgram) -> RankProgram:
    """A rank's program with its receives posted ahead."""
    return program._replace(function=_ahead(program.function))


def _ahead(function: Function) -> Function:
    ops, end = function.ops, len(function.ops)
    late = _received(function)
    call_before = [-1] * (end + 1)
    for k, op in enumerate(ops):
        call_before[k + 1] = k if op.callee is not None else call_before[k]
    needed: dict[Value, int] = {}
    """Where a value is needed first: by an op that stays where it is."""
    place: list[tuple[int, int]] = [(k, 2) for k in range(end)]
    """Of each op: before which op it goes, receives first, then bundles, then that op itself."""
    earliest = end
    for k in reversed(range(end)):
        op = ops[k]
        need = min([needed.get(v, end) for v in op.outputs], default=end)
        if op.spec.name == "MPIRecv":
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
    return reordered(function, [ops[k] for k in sorted(range(end), key=place.__getitem__)])


def _received(function: Function) -> set[Value]:
    """What is received, and bundles of it."""
    found: set[Value] = set()
    for op in function.ops:
        if op.spec.name == "MPIRecv" or (op.spec.bundle == "pack" and not found.isdisjoint(op.inputs)):
            found.update(op.outputs)
    return found
