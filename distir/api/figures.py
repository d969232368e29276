"""Figures of a program: its parameters by type, and its FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from distir.executor.cost_model.seconds import CostModel, computed_in, work
from distir.ir.device import Mesh
from distir.ir.function import Function, Op, type_of
from distir.ir.type import Tensor
from distir.transforms.roles import weights

_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Parameters(NamedTuple):
    """The parameters of one element type: tensors, elements and bytes."""

    tensors: int
    elements: int
    bytes: int


def parameters(function: Function) -> dict[str, Parameters]:
    """The parameters of a program by element type, largest first; those of a distributed one once, without padding."""
    held = [(v, v.type) for v in weights(function) if v.kind != "state"]
    shapes = [(t, (v.role and v.role.source) or t.global_shape) for v, t in held if isinstance(t, Tensor)]
    return parameters_of((t.dtype.name, shape, t.dtype.size) for t, shape in shapes)


def parameters_of(rows: Iterable[tuple[str, tuple[int, ...], int]]) -> dict[str, Parameters]:
    """By element type what such rows of its name, a shape, and the bytes of an element add up to."""
    found: dict[str, Parameters] = {}
    for name, shape, size in rows:
        n = math.prod(shape)
        tensors, elements, total = found.get(name, (0, 0, 0))
        found[name] = Parameters(tensors + 1, elements + n, total + n * size)
    return dict(sorted(found.items(), key=lambda row: -row[1].bytes))


def parameters_line(function: Function) -> str:
    """The number of parameters, their types, and that of the products, if it is one and another: as text."""
    by_type = parameters(function)
    kinds = " and ".join(by_type) or "no weights"
    ops = [op for f in (function, *function.callees()) for op in f.ops if op.spec.kernel is not None]
    found = {t and t.name for t in [computed_in([v.type for v in op.inputs], []) for op in ops]}
    products = found.pop() if len(found) == 1 else None
    kinds += f", products in {products}" if products and products not in by_type else ""
    return f"{summed(by_type).elements:,} parameters ({kinds})"


def flops(function: Function) -> float:
    """The FLOPs of one run of a program, on all devices together: two for a multiply-add, one a point of other ops."""
    return flops_of(function.ops)


def flops_of(ops: Iterable[Op]) -> float:
    """The FLOPs of some ops, as `flops` counts them."""
    return _total(ops, _flops, {}, {})


def product_flops(function: Function, cost: CostModel) -> float:
    """The FLOPs of a step's matrix products, convolutions and attention; the score matrix of causal attention counts by
    half."""
    return _total(function.ops, lambda op: _product_flops(op, cost), {}, {})


def seconds_at_peak(function: Function, cost: CostModel) -> float:
    """The seconds that one device, the cluster's first, needs for `product_flops` at the peak of their dtype.

    Divided by the seconds of a step and the number of devices that is model FLOPs utilization (Chowdhery et al.,
    "PaLM", 2022, appendix B): of a sequential program, as what a plan repeats, recomputes or pads counts nothing. A
    program that is distributed already has what all its devices compute.
    """
    what = cost.topology.spec(cost.topology.devices[0])

    def ideal(op: Op) -> float:
        ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
        return _product_flops(op, cost) / cost.peak(op.spec, ins, outs, what) if op.spec.kernel else 0.0

    return _total(function.ops, ideal, {}, {})


def types_without_peak(function: Function, cost: CostModel) -> dict[str, str]:
    """The dtypes that a program's matrix products, convolutions and attention compute in, and of which the cluster's
    first device has no peak of its own: each with the dtype at whose speed it is predicted."""
    what = cost.topology.spec(cost.topology.devices[0])
    kinds = {
        (tuple(map(type_of, op.inputs)), tuple(map(type_of, op.outputs)))
        for f in (function, *function.callees())
        for op in f.ops
        if op.spec.kernel
    }
    names = {dtype.name for ins, outs in kinds if (dtype := computed_in(ins, outs)) is not None}
    return {name: what.runs_as(name) for name in sorted(names) if not what.has(name)}


def _total(
    ops: Iterable[Op], of: Callable[[Op], float], done: dict[Function, float], known: dict[object, float]
) -> float:
    """What `of` says of an op on one device, summed over ops and devices. `known`: by kind, as layers are alike."""
    total = 0.0
    for op in ops:
        if op.callee is not None:
            if op.callee not in done:
                done[op.callee] = _total(op.callee.ops, of, done, known)
            total += done[op.callee]
        elif op.spec.comm is None:
            key = op.spec, op.attributes.form, *map(type_of, op.inputs)
            if key not in known:
                homes = [t.device for v in op.outputs if isinstance(t := v.type, Tensor)]
                known[key] = of(op) * max([len(home.devices) for home in homes if isinstance(home, Mesh)], default=1)
            total += known[key]
    return total


def _product_flops(op: Op, cost: CostModel) -> float:
    ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
    return work(op.spec, op.attributes, ins, outs, cost.zigzag)[0] if op.spec.kernel else 0.0


def _flops(op: Op) -> float:
    shapes = ([t.shape for v in row if isinstance(t := v.type, Tensor)] for row in (op.inputs, op.outputs))
    return op.spec.flops(op.attributes, *shapes)


def count(x: float) -> str:
    """A large number with a prefix: 1.25 G, or as it is below 1,000."""
    for unit, prefix in _UNITS:
        if x >= unit:
            return f"{x / unit:.3g} {prefix}" if x < 999.5 * unit else f"{x / unit:.0f} {prefix}"
    return f"{x:.0f} "


def summed(by_type: Mapping[str, Parameters]) -> Parameters:
    """All types together."""
    return Parameters(*[sum(row) for row in zip(*by_type.values(), strict=True)]) if by_type else Parameters(0, 0, 0)
