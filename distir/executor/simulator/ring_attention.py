"""Which collectives are sent around a ring beside attention, where the runtime does so (`Runtime.ring_attention`).

Devices that split the queries of a sequence need the keys and values of all. Each begins with its own, and passes on
what it has while attention computes on it; in the backward pass their gradients go around, too, and each device adds
its own: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
"""

from __future__ import annotations

from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor


def ring_attention(f: Function) -> dict[Op, Op]:
    """Gathers of keys and values, and reduce-scatters of their gradients, along axes that split the sequence of the
    queries: each with its op of attention, the first that needs what is gathered, or the one that makes the gradient.
    """
    gathered: dict[Value, Op] = {}
    made: dict[Value, Op] = {}
    """The gradients of keys and values, with the op that has made them."""
    found: dict[Op, Op] = {}
    for op in f.ops:
        spec = op.spec
        if spec.kernel == "attention":
            for gather in [gathered[v] for v in op.inputs[1:3] if v in gathered]:
                if _splits_sequence(gather, op):
                    found.setdefault(gather, op)
            made.update(dict.fromkeys(op.outputs[1:3], op))  # of the forward op its statistics, which are not summed
        elif spec.route == "axis" and spec.comm is not None:
            if spec.comm.gathers:
                gathered[op.outputs[0]] = op
            elif spec.comm.scatters and op.inputs[0] in made and _splits_sequence(op, made[op.inputs[0]]):
                found[op] = made[op.inputs[0]]
        elif spec.alias and op.inputs:
            if op.inputs[0] in gathered:
                gathered.update(dict.fromkeys(op.outputs, gathered[op.inputs[0]]))
            elif op.inputs[0] in made:
                made.update(dict.fromkeys(op.outputs, made[op.inputs[0]]))
    return found


def _splits_sequence(collective: Op, attention: Op) -> bool:
    """Whether a collective is along an axis, or axes, that split the sequence of the queries of an op of attention."""
    axes, queries = collective.attributes["axis"], attention.inputs[0].type
    names = (axes,) if isinstance(axes, str) else axes
    return isinstance(queries, Tensor) and all([queries.on(axis).dim == len(queries.shape) - 2 for axis in names])
