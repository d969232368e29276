"""Which collectives run beside compute of the same device.

A collective is issued where it stands, and waited for at the first use of its result. If the device computes something
in between, both share its multiprocessors and its memory.
"""

from __future__ import annotations

from distir.ir.function import Function, Op, Value

NOTHING: frozenset[Op] = frozenset()


def beside_compute(f: Function) -> frozenset[Op]:
    """The collectives of a function between which and the first use of their results it computes."""
    issued: dict[Value, frozenset[Op]] = {}
    """Of results of collectives, and views of these: which ones."""
    waiting: set[Op] = set()
    found: set[Op] = set()
    for op in f.ops:
        if not waiting and op.spec.route != "axis":
            continue
        under_way = NOTHING.union(*[issued[v] for v in op.inputs if v in issued]) if issued else NOTHING
        if op.spec.alias and op.inputs:
            if under_way:
                issued.update(dict.fromkeys(op.outputs, under_way))
            continue
        waiting -= under_way
        if op.spec.route == "axis":
            waiting.add(op)
            issued.update(dict.fromkeys(op.outputs, frozenset([op])))
        elif op.callee is not None or (op.spec.comm is None and op.inputs):
            found |= waiting
            waiting.clear()
    return frozenset(found)
