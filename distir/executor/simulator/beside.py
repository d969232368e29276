"""Which collectives run beside compute of the same device.

A collective is issued where it stands, and waited for at the first use of its result. If the device computes something
in between, both share its multiprocessors and its memory.
"""

from __future__ import annotations

from distir.ir.function import Function, Op, Value


def beside_compute(f: Function) -> frozenset[Op]:
    """The collectives of a function between which and the first use of their results it computes."""
    issued: dict[Value, tuple[Op, ...]] = {}
    """Of results of collectives, and views of these: which ones."""
    waiting: set[Op] = set()
    found: set[Op] = set()
    for op in f.ops:
        spec = op.spec
        communicates = spec.route == "axis"
        if not waiting and not communicates:
            continue
        under_way = [x for v in op.inputs if v in issued for x in issued[v]]
        if spec.alias and op.inputs:
            if under_way:
                issued.update(dict.fromkeys(op.outputs, tuple(dict.fromkeys(under_way))))
            continue
        waiting.difference_update(under_way)
        if communicates:
            waiting.add(op)
            for v in op.outputs:
                issued[v] = (op,)
        elif (spec.comm is None and op.inputs) or op.callee is not None:
            found |= waiting
            waiting.clear()
    return frozenset(found)
