"""Which collectives are sent in pieces beside a product, where the runtime does so (`Runtime.overlaps_products`).

What a product needs is gathered while it computes on the pieces that are there; what it sums over devices is scattered
while it computes the next piece. So tensor parallelism hides what it sends under sequence parallelism, all-reduces are
waited for: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models".
"""

from __future__ import annotations

from collections.abc import Mapping

from distir.executor.cost_model.fusion import alike
from distir.ir.device import Mesh
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor


def beside_products(f: Function) -> dict[Op, Op]:
    """Collectives of activations, each with its product: the first that needs what is gathered, or the last that makes
    what is summed. Weights, and their gradients, are not sent so."""
    gathered: dict[Value, Op] = {}
    made: dict[Value, int] = {}
    """The number of the last product that has made a value, or what it is computed from point by point."""
    found: dict[Op, Op] = {}
    for n, op in enumerate(f.ops):
        spec = op.spec
        if spec.kernel == "product":
            for k, v in enumerate(op.inputs):
                if spec.weight not in (None, k) and v in gathered:
                    found.setdefault(gathered[v], op)
            if spec.weight is not None and is_of_a_microbatch(op.outputs[0]):
                made[op.outputs[0]] = n
        elif spec.route == "axis" and spec.comm is not None:
            v = op.inputs[0]
            if spec.comm.scatters and v in made:
                found[op] = f.ops[made[v]]
            elif not spec.comm.sums and v not in made and is_of_a_microbatch(v):
                gathered[op.outputs[0]] = op
        elif spec.alias and op.inputs:
            if op.inputs[0] in gathered:
                gathered.update(dict.fromkeys(op.outputs, gathered[op.inputs[0]]))
            elif op.inputs[0] in made:
                made.update(dict.fromkeys(op.outputs, made[op.inputs[0]]))
        elif spec.comm is None and not spec.kernel and len(op.outputs) == 1:
            of = [made[v] for v in op.inputs if v in made and alike(v, op.outputs[0])]
            if of:
                made[op.outputs[0]] = max(of)
    return found


def shares(beside: Mapping[Op, Op]) -> dict[Op, float]:
    """Of collectives that are sent beside ops, each with its op: the share of the op's time that each has, by bytes."""
    sizes = {op: max([sum([v.type.bytes for v in values]) for values in (op.inputs, op.outputs)]) for op in beside}
    total: dict[Op, int] = {}
    for op, partner in beside.items():
        total[partner] = total.get(partner, 0) + sizes[op]
    return {op: sizes[op] / total[partner] if total[partner] else 1.0 for op, partner in beside.items()}


def is_of_a_microbatch(v: Value) -> bool:
    """Whether a value is neither a weight or a bias, which all microbatches share, nor a sum over them, nor a bundle of
    these."""
    t = v.type
    return isinstance(t, Tensor) and (
        not isinstance(t.device, Mesh) or t.device.time is None or t.over_time.dim is not None
    )
