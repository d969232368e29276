"""Optimizers that are grouped: each group waits for one collective only."""

from __future__ import annotations

from distir.ir.device import Device, Mesh
from distir.ir.function import FunctionMaker, Value
from distir.ir.type import REPLICATE, SUM, Float64, Tensor
from distir.transforms.rank.group_optimizers import group_optimizers


def test_gradients_of_one_collective_are_of_one_group() -> None:
    """Of five weights: two gradients come in a bundle, two in all-reduces of their own, one in none. In the order in
    which the collectives start, that of none first."""
    mesh = Mesh([Device("cpu", k) for k in range(2)], {"dp": 2}, "all")
    whole, part = (Tensor.whole(Float64, (3,), mesh, (p,)) for p in (REPLICATE, SUM))
    f = FunctionMaker()
    weights = [f.add_input_value(f"w{k}", whole) for k in range(5)]
    partial = [f.add_input_value(f"g{k}", part) for k in range(4)]
    near = f.add_input_value("g4", whole)
    alone = [f.emit("MPIAllreduce", g, axis="dp") for g in partial[:2]]
    bundle = f.emit("Unpack", f.emit("MPIAllreduce", f.emit("Pack", *partial[2:]), axis="dp"))
    gradients: list[Value] = [bundle[0], alone[1], near, alone[0], bundle[1]]
    f.set_outputs([f.emit("SGD", w, g, lr=0.1) for w, g in zip(weights, gradients, strict=True)])
    main = f.finalize()
    grouped = group_optimizers(main)[main]
    found = [op.inputs[1::2] for op in grouped.ops if op.spec.each is not None or op.op_type == "SGD"]
    assert found == [(near,), (alone[0],), (alone[1],), (bundle[0], bundle[1])]
