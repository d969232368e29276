"""Programs that pass pieces around a ring of devices, and what they compute without devices."""

from __future__ import annotations

from typing import NamedTuple

from distir.ir.device import Device, Mesh
from distir.ir.function import Function, FunctionMaker, Value
from distir.ir.type import Float64, Shard, Tensor


class Ring(NamedTuple):
    program: Function
    source: Function


def _mesh(n: int) -> Mesh:
    return Mesh([Device("cpu", k) for k in range(n)], {"tp": n}, "ring")


def ring_products(n: int) -> Ring:
    """The sum of n products with one weight, of which each device has a part of the rows, passed on after each.

    The other operands are whole everywhere: of each a device takes the columns of the rows that it has just then.
    """
    mesh, rows, columns = _mesh(n), 3, 2 * n
    f, g = FunctionMaker("ring"), FunctionMaker("ring")
    w = f.add_input_value("w", Tensor.whole(Float64, (columns, 4), mesh, (Shard(0),)))
    v = g.add_input_value("w", Tensor(Float64, (columns, 4)))
    totals: list[Value] = []
    wholes: list[Value] = []
    for k in range(n):
        x = f.add_input_value(f"x{k}", Tensor(Float64, (rows, columns), mesh))
        part = f.emit("MatMul", f.emit("LocalSlice", x, axis="tp", dim=1, shift=k), w)
        totals.append(part if not totals else f.emit("Add", totals[-1], part))
        w = f.emit("MPIPermute", w, axis="tp")
        whole = g.emit("MatMul", g.add_input_value(f"x{k}", Tensor(Float64, (rows, columns))), v)
        wholes.append(whole if not wholes else g.emit("Add", wholes[-1], whole))
    f.set_outputs([f.emit("MPIAllreduce", totals[-1], axis="tp"), w])
    g.set_outputs([wholes[-1], v])
    return Ring(f.finalize(), g.finalize())


def ring_reduction(n: int) -> Ring:
    """Each device adds up the parts of a sum that come by, so that after n - 1 steps each has it all."""
    f, g = FunctionMaker("ring"), FunctionMaker("ring")
    part = f.emit(
        "ReduceSum",
        f.add_input_value("x", Tensor.whole(Float64, (2 * n, 5), _mesh(n), (Shard(0),))),
        axes=(0,),
        keepdims=0,
    )
    whole = g.emit("ReduceSum", g.add_input_value("x", Tensor(Float64, (2 * n, 5))), axes=(0,), keepdims=0)
    total, sequential = part, whole
    for _ in range(n - 1):
        part = f.emit("MPIPermute", part, axis="tp")
        total = f.add_op("Add", "total", [total, part])
        sequential = g.emit("Add", sequential, whole)
    assert total is not None
    assert sequential is not None
    f.set_outputs([f.emit("MPIAllreduce", total, axis="tp")])
    g.set_outputs([sequential])
    return Ring(f.finalize(), g.finalize())


RINGS = (ring_products, ring_reduction)
