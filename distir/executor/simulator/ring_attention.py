"""Which collectives are sent around a ring beside attention, where the runtime does so (`Runtime.ring_attention`).

Devices that split the queries of a sequence need the keys and values of all. Each begins with its own, and passes on
what it has while attention computes on it; in the backward pass their gradients go around, too, and each device adds
its own: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
"""

from __future__ import annotations

from distir.executor.simulator.sent_keys import sent_keys
from distir.ir.function import Function, Op


def ring_attention(f: Function) -> dict[Op, Op]:
    """Gathers of keys and values, and reduce-scatters of their gradients, along axes that split the sequence of the
    queries and no others: each with its op of attention, the first that needs what is gathered, or the one that makes
    the gradient."""
    return {
        op: sent.attention
        for op, sent in sent_keys(f).items()
        if op.spec.comm is not None and (op.spec.comm.gathers or op.spec.comm.scatters) and all(sent.along(op))
    }
