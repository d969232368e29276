"""Passing pieces on around an axis: types, meaning, and rings that are verified, validated, simulated and run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distir.executor import SequentialExecutor, Simulator
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster
from distir.ir import parse, pformat, same, validate, verify
from distir.ir.device import Device, Mesh
from distir.ir.errors import DistirError, IRTypeError, MismatchError
from distir.ir.function import Attributes, Function, FunctionMaker, Op, Value
from distir.ir.spec import conversion, lookup
from distir.ir.type import REPLICATE, SUM, Float64, Partial, Placement, Shard, Tensor
from distir.transforms.rank.check_programs import check_programs
from distir.transforms.rank.rank_program import rank_programs
from tests.ops.rings import RINGS, Ring, ring_reduction

MESH = Mesh([Device("cpu", k) for k in range(6)], {"a": 2, "b": 3})
WHOLE = np.arange(72.0).reshape(6, 12)


def permuted(p: Placement, **attributes: Any) -> Placement:
    f = FunctionMaker()
    y = f.emit("MPIPermute", f.add_input_value("x", Tensor.whole(Float64, (6, 12), MESH, (REPLICATE, p))), **attributes)
    return y.type.on("b")  # type: ignore[union-attr]


def test_what_it_is_placed_as() -> None:
    assert permuted(Shard(0), axis="b") is Shard(0, 1, 1)
    assert permuted(Shard(1, 2, 1), axis="b", shift=2) is Shard(1, 2)
    assert permuted(Shard(1), axis="b", shift=-1) is Shard(1, 1, 2)
    assert permuted(Partial("max"), axis="b") is Partial("max")
    for shift in (0, 3, -6):
        with pytest.raises(IRTypeError, match="shift: expected no multiple of the axis's size 3"):
            permuted(Shard(0), axis="b", shift=shift)
    with pytest.raises(IRTypeError, match="expected Shard or Partial along 'b', got Replicate"):
        permuted(REPLICATE, axis="b")
    timed = Tensor.whole(Float64, (6,), Mesh(MESH.devices[:1], {"mb": 2}), (Shard(0),))
    f = FunctionMaker()
    with pytest.raises(IRTypeError, match="not over microbatches"):
        f.emit("MPIPermute", f.add_input_value("x", timed), axis="mb")


def test_which_op_converts_placements() -> None:
    def found(have: Placement, want: Placement) -> tuple[str, dict[str, int]] | None:
        spec = conversion(have, want)
        return None if spec is None else (spec[0].name, dict(spec[1]))

    assert found(Shard(0), Shard(0, 1, 2)) == ("MPIPermute", {"shift": 2})
    assert found(Shard(0, 3, 2), Shard(0, 3)) == ("MPIPermute", {"shift": -2})
    assert found(Shard(0), Shard(1, 2)) == ("MPIAlltoall", {"dim": 1, "outer": 2})
    assert found(Shard(0), Shard(0, 2)) is None
    assert found(Shard(0), Shard(1, 1, 1)) is None
    assert found(SUM, Shard(1)) == ("MPIReduceScatter", {"dim": 1})
    assert found(SUM, REPLICATE) == ("MPIAllreduce", {})
    assert found(Shard(1), REPLICATE) == ("MPIAllgather", {})
    assert found(REPLICATE, Shard(1, 1, 1)) == ("LocalSlice", {"dim": 1, "shift": 1})
    assert found(SUM, Partial("max")) is None


@pytest.mark.parametrize("shift", [1, 2, -1, 4])
def test_what_each_device_then_holds(shift: int) -> None:
    """What the one `shift` before it held: numpy's roll along the axis of the devices."""
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor.whole(Float64, WHOLE.shape, MESH, (Shard(0), Shard(1))))
    y = f.emit("MPIPermute", x, axis="b", shift=shift)
    f.set_outputs([y])
    lanes_of: dict[Value, Any] = {}

    def tap(v: Value, h: Any) -> Any:
        lanes_of[v] = h
        return h

    (got,) = SequentialExecutor(tap=tap).compute(f.finalize(), [WHOLE])
    before = np.array([x.type.cut(WHOLE, c) for c in MESH.coords]).reshape(2, 3, 3, 4)  # type: ignore[union-attr]
    np.testing.assert_array_equal(np.array(lanes_of[y]).reshape(2, 3, 3, 4), np.roll(before, shift, axis=1))
    np.testing.assert_array_equal(got, WHOLE)


def arrays_of(f: Function) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(-4, 5, v.type.global_shape).astype(float) for v in f.inputs]  # type: ignore[union-attr]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("make", RINGS)
def test_rings_are_proved_and_exact(make: Callable[[int], Ring], n: int) -> None:
    program, source = make(n)
    verify(program)
    validate(program, source)
    check_programs(program, rank_programs(program))
    assert same(parse(pformat(program)), program)
    arrays = arrays_of(program)
    want = SequentialExecutor().compute(source, arrays)
    for got, x in zip(SequentialExecutor().compute(program, arrays), want, strict=True):
        np.testing.assert_array_equal(got, x)


def test_every_device_has_the_whole_sum_in_the_end() -> None:
    program, _ = ring_reduction(4)
    (x,) = arrays_of(program)
    lanes_of: dict[str, Any] = {}

    def tap(v: Value, h: Any) -> Any:
        lanes_of[v.name] = h
        return h

    SequentialExecutor(tap=tap).compute(program, [x])
    last = [op for op in program.ops if op.op_type == "Add"][-1].outputs[0]
    for mine in lanes_of[last.name]:
        np.testing.assert_array_equal(mine, x.sum(0))


def edited(program: Function, op: Op, new: Op | None) -> Function:
    """The program with an op replaced, or, without, its operand in place of its result; types as they were."""
    if new is not None:
        ops = [new if other is op else other for other in program.ops]
        return Function(program.name, program.inputs, tuple(ops), program.outputs)
    swap = {op.outputs[0]: op.inputs[0]}
    ops = [
        Op(o.spec, tuple([swap.get(v, v) for v in o.inputs]), o.attributes, o.outputs)
        for o in program.ops
        if o is not op
    ]
    return Function(program.name, program.inputs, tuple(ops), tuple([swap.get(v, v) for v in program.outputs]))


@pytest.mark.parametrize("make", RINGS)
def test_faults_in_rings_are_rejected_unless_they_change_nothing(make: Callable[[int], Ring]) -> None:
    """Each permutation dropped, or with another shift, and each slice taken where the weight is not."""
    program, source = make(4)
    arrays = arrays_of(program)
    want = SequentialExecutor().compute(source, arrays)
    rejected = 0
    for op in program.ops:
        if op.op_type not in ("MPIPermute", "LocalSlice"):
            continue
        wrong = [edited(program, op, None)] if op.op_type == "MPIPermute" else []
        for shift in (0, 1, 2, 3):
            if shift != op.attributes.get("shift", 1):
                changed = Attributes({**op.attributes, "shift": shift})
                wrong.append(edited(program, op, Op(op.spec, op.inputs, changed, op.outputs)))
        for f in wrong:
            try:
                verify(f)
                validate(f, source)
            except (IRTypeError, MismatchError):
                rejected += 1
                continue
            for got, x in zip(SequentialExecutor().compute(f, arrays), want, strict=True):
                np.testing.assert_array_equal(got, x)
    assert rejected >= (27 if make is RINGS[0] else 3)


def test_pieces_in_different_places_do_not_go_together() -> None:
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor.whole(Float64, (6, 12), MESH, (REPLICATE, Shard(1))))
    y = f.emit("MPIPermute", x, axis="b")
    with pytest.raises(IRTypeError, match=r"operand 1: expected Shard\(1\), got Shard\(1, 1, 1\)"):
        f.emit("Add", x, y)
    with pytest.raises(IRTypeError, match="expected members of one dtype, mesh and reduction"):
        f.emit("MPIAllgather", f.emit("Pack", x, y), axis="b")
    assert f.emit("Add", y, y).type.on("b") is Shard(1, 1, 1)  # type: ignore[union-attr]


def test_a_side_of_a_transfer_has_a_meaning_in_a_rank_alone() -> None:
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float64, (2,), Device("cpu", 0)))
    f.add_op("MPISend", None, [x], {"to": Device("cpu", 1), "message": 0})
    f.set_outputs([x])
    with pytest.raises(DistirError, match="MPISend has a meaning only in the program of a rank"):
        SequentialExecutor().compute(f.finalize(), [np.zeros(2)])


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_ring_is_simulated(nodes: int) -> None:
    """Each step costs a message over the slowest link on the way, beside nothing else that the devices send."""
    cluster = load_cluster("dgx-a100", devices=8 * nodes)
    n = len(cluster.devices)
    mesh = Mesh(cluster.devices, {"tp": n})
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float64, (1 << 20,), mesh, (SUM,)))
    y = f.emit("MPIPermute", f.emit("MPIPermute", x, axis="tp"), axis="tp")
    f.set_outputs([y])
    program = f.finalize()
    group = cluster.group(cluster.devices)
    slow = group.inter or group.intra
    base = min([a.base for a in group.algorithms if a.kind == "ring"], default=0.0)
    one = slow.latency + (8 << 20) / slow.bandwidth + base
    got = Simulator(CostModel(cluster)).simulate(program)
    assert got.seconds == pytest.approx(2 * one, rel=1e-6)
    assert lookup("MPIPermute").comm.wire.sent(n) == (1, 1)  # type: ignore[union-attr]
