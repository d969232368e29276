"""Which collectives are sent in pieces beside a product, where the runtime does so (`Runtime.overlaps_products`).

What a product needs is gathered while it computes on the pieces that are there; what it sums over devices is sent while
it computes the next piece. So tensor parallelism hides what it sends: Wang et al. 2023, "Overlap Communication with
Dependent Computation via Decomposition in Large Deep Learning Models".
"""

from __future__ import annotations

from distir.ir.device import Mesh
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor


def beside_products(f: Function) -> dict[Op, Op]:
    """Collectives of activations, each with its product: the first that needs what is gathered, or the one that makes
    what is summed. Weights, and their gradients, are not sent so."""
    gathered: dict[Value, Op] = {}
    made: dict[Value, Op] = {}
    """What a product has made, and what is computed from that point by point."""
    found: dict[Op, Op] = {}
    for op in f.ops:
        spec = op.spec
        if spec.kernel == "product":
            for k, v in enumerate(op.inputs):
                if spec.weight not in (None, k) and v in gathered:
                    found.setdefault(gathered[v], op)
            if spec.weight is not None and _is_of_a_microbatch(op.outputs[0]):
                made[op.outputs[0]] = op
        elif spec.route == "axis" and spec.comm is not None:
            v = op.inputs[0]
            if spec.comm.sums and v in made:
                found[op] = made[v]
            elif not spec.comm.sums and v not in made and _is_of_a_microbatch(v):
                gathered[op.outputs[0]] = op
        elif spec.alias and op.inputs:
            for at in (gathered, made):
                if op.inputs[0] in at:
                    at.update(dict.fromkeys(op.outputs, at[op.inputs[0]]))
        elif spec.comm is None and not spec.kernel and len(op.outputs) == 1:
            of = [v for v in op.inputs if v in made and _shape(v) == _shape(op.outputs[0])]
            if of:
                made[op.outputs[0]] = made[of[-1]]
    return found


def _is_of_a_microbatch(v: Value) -> bool:
    """Whether a value is neither a weight or a bias, which all microbatches share, nor a sum over them, nor a bundle of
    these."""
    t = v.type
    return isinstance(t, Tensor) and (
        not isinstance(t.device, Mesh) or t.device.time is None or t.over_time.dim is not None
    )


def _shape(v: Value) -> object:
    return v.type.shape if isinstance(v.type, Tensor) else v
