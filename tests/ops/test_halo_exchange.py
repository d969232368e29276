"""Halos from the neighbours, and without them again: types, what each device then holds, which op converts, errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from distir.executor import SequentialExecutor, Simulator
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster
from distir.ir import parse, pformat, same, validate, verify
from distir.ir.device import Device, Mesh
from distir.ir.errors import IRTypeError, MismatchError
from distir.ir.function import Function, FunctionMaker, Value
from distir.ir.spec import conversion
from distir.ir.type import REPLICATE, SUM, Float64, Placement, Shard, Tensor
from distir.transforms.rank.check_programs import check_programs
from distir.transforms.rank.rank_program import rank_programs

MESH = Mesh([Device("cpu", k) for k in range(6)], {"h": 3, "w": 2}, "grid")
WHOLE = np.arange(72.0).reshape(6, 12) + 1
STEPS: list[list[tuple[str, dict[str, Any]]]] = [
    [("h", {"lo": 1, "hi": 0})],
    [("h", {"lo": 1, "hi": 2, "fill": -math.inf}), ("w", {"lo": 2, "hi": 1})],
    [("w", {"lo": 0, "hi": 5}), ("h", {"lo": 2, "hi": 2})],
    [("w", {"lo": 6, "hi": 6, "fill": 0.5}), ("h", {"lo": 0, "hi": 1, "fill": -1})],
]


def on_grid(h: Placement, w: Placement) -> Tensor:
    return Tensor.whole(Float64, WHOLE.shape, MESH, (h, w))


def exchanged(steps: list[tuple[str, dict[str, Any]]], cut: bool = False) -> tuple[Function, Value]:
    """The exchanges one after another, and the value that has all halos; with `cut` without them again at the end."""
    f = FunctionMaker("f")
    x = f.add_input_value("x", on_grid(Shard(0), Shard(1)))
    for axis, given in steps:
        x = f.emit("HaloExchange", x, axis=axis, **given)
    y = x
    for axis, _ in steps if cut else ():
        y = f.emit("HaloCut", y, axis=axis)
    f.set_outputs([y])
    return f.finalize(), x


def held(function: Function) -> dict[Value, list[Any]]:
    """What each device has of each value."""
    found: dict[Value, list[Any]] = {}

    def tap(v: Value, h: Any) -> Any:
        found[v] = h
        return h

    SequentialExecutor(tap=tap).compute(function, [WHOLE])
    for v in function.inputs:
        found[v] = [v.type.cut(WHOLE, c) for c in MESH.coords]  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("steps", STEPS)
def test_what_each_device_then_holds(steps: list[tuple[str, dict[str, Any]]]) -> None:
    """A part of the padded whole, corners too: outside of both dims those of the later exchange."""
    function, v = exchanged(steps, cut=True)
    verify(function)
    validate(function, function)
    assert v.type.global_shape == WHOLE.shape  # type: ignore[union-attr]
    padded, dims = WHOLE, {"h": (0, 3), "w": (1, 2)}
    for axis, given in steps:
        pads = [(given["lo"], given["hi"]) if dim == dims[axis][0] else (0, 0) for dim in (0, 1)]
        padded = np.pad(padded, pads, constant_values=given.get("fill", 0.0))
    parts = held(function)
    for at, got in zip(MESH.coords, parts[v], strict=True):
        want = padded
        for axis, i in zip("hw", at, strict=True):
            given = dict(steps).get(axis, {"lo": 0, "hi": 0})
            dim, n = dims[axis]
            s = WHOLE.shape[dim] // n
            want = want.take(np.arange(i * s, (i + 1) * s + given["lo"] + given["hi"]), dim)
        np.testing.assert_array_equal(got, want)
        assert got.shape == v.type.shape  # type: ignore[union-attr]
    for got, want in zip(parts[function.outputs[0]], parts[function.inputs[0]], strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("steps", STEPS)
def test_text_ranks_and_meaning(steps: list[tuple[str, dict[str, Any]]]) -> None:
    function, _ = exchanged(steps, cut=True)
    assert same(parse(pformat(function)), function)
    check_programs(function, rank_programs(function))
    source = FunctionMaker("f")
    x = source.add_input_value("x", Tensor(Float64, WHOLE.shape))
    source.set_outputs([x])
    validate(function, source.finalize())  # identities
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float64, WHOLE.shape))
    f.set_outputs([f.emit("Neg", x)])
    with pytest.raises(MismatchError):
        validate(function, f.finalize())


def test_what_it_is_placed_as() -> None:
    _, v = exchanged(STEPS[1])
    assert v.type.placements == (Shard(0, halo=(1, 2, -math.inf)), Shard(1, halo=(2, 1, 0.0)))  # type: ignore[union-attr]
    f = FunctionMaker()
    x = f.add_input_value("x", on_grid(Shard(1), SUM))
    assert f.emit("HaloExchange", x, axis="h", lo=4, hi=0).type.placements == (Shard(1, halo=(4, 0, 0.0)), SUM)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("types", "op", "given", "words"),
    [
        ((Shard(0), Shard(1)), "HaloExchange", {"axis": "h", "lo": 0, "hi": 0}, "lo, hi: expected one above 0, got 0"),
        ((Shard(0), Shard(1)), "HaloExchange", {"axis": "h", "lo": -1, "hi": 2}, "lo: expected an integer from 0"),
        ((Shard(0), Shard(1)), "HaloExchange", {"axis": "h", "lo": 1.0, "hi": 2}, "lo: expected an integer from 0"),
        ((Shard(0), Shard(1)), "HaloExchange", {"axis": "h", "lo": 1}, "hi"),
        ((Shard(0), Shard(1)), "HaloExchange", {"axis": "h", "lo": 3, "hi": 0}, "at most as wide as a slice, 2 of 6"),
        ((Shard(0), Shard(1)), "HaloExchange", {"axis": "h", "lo": 1, "hi": 0, "fill": math.nan}, "with a number"),
        ((Shard(0), Shard(1)), "HaloExchange", {"axis": "h", "lo": 1, "hi": 0, "fill": "0"}, "fill: expected a number"),
        ((Shard(0), Shard(1)), "HaloExchange", {"axis": ("h", "w"), "lo": 1, "hi": 0}, "axis: expected"),
        ((Shard(0), Shard(1)), "HaloExchange", {"axis": "d", "lo": 1, "hi": 0}, "no axis 'd'"),
        ((SUM, Shard(1)), "HaloExchange", {"axis": "h", "lo": 1, "hi": 0}, "expected Shard along 'h', got Partial"),
        ((REPLICATE, Shard(1)), "HaloExchange", {"axis": "h", "lo": 1, "hi": 0}, "expected Shard along 'h', got Repl"),
        ((Shard(0, 2), Shard(1)), "HaloExchange", {"axis": "h", "lo": 1, "hi": 0}, "an outer of 1 and no shift"),
        ((Shard(0, 1, 1), Shard(1)), "HaloExchange", {"axis": "h", "lo": 1, "hi": 0}, "an outer of 1 and no shift"),
        ((Shard(0), Shard(0, 3)), "HaloExchange", {"axis": "h", "lo": 1, "hi": 0}, "so no other axis may split it"),
        ((Shard(0, halo=(1, 0, 0.0)), SUM), "HaloExchange", {"axis": "h", "lo": 1, "hi": 0}, "expected no halo along"),
        ((Shard(0), Shard(1)), "HaloCut", {"axis": "h"}, "expected a halo along 'h', got Shard"),
        ((REPLICATE, Shard(1, halo=(1, 0, 0.0))), "HaloCut", {"axis": "h"}, "expected a halo along 'h', got Replicate"),
        ((Shard(0, halo=(1, 0, 0.0)), SUM), "MPIAllgather", {"axis": "h"}, "expected no halo along 'h'"),
        ((Shard(0, halo=(1, 0, 0.0)), SUM), "MPIAlltoall", {"axis": "h", "dim": 1}, "expected no halo along 'h'"),
        ((Shard(0, halo=(1, 0, 0.0)), SUM), "MPIPermute", {"axis": "h"}, "expected no halo along 'h'"),
        ((Shard(0, halo=(1, 0, 0.0)), SUM), "Neg", {}, "operand 0: expected Shard"),
    ],
)
def test_refused(types: tuple[Placement, Placement], op: str, given: dict[str, Any], words: str) -> None:
    if types[0].dim == 0 and types[0].outer == 2:  # the rows divide by 2 x 3
        t = Tensor.whole(Float64, (12, 12), MESH, types)
    else:
        t = Tensor.whole(Float64, (6, 12), MESH, types)
    f = FunctionMaker()
    x = f.add_input_value("x", t)
    with pytest.raises(IRTypeError) as e:
        f.emit(op, x, **given)
    assert words in e.value.message
    assert "\n" not in e.value.message


def test_microbatches_and_bundles_have_none() -> None:
    f = FunctionMaker()
    timed = Tensor.whole(Float64, (6,), Mesh(MESH.devices[:1], {"mb": 2}), (Shard(0),))
    with pytest.raises(IRTypeError, match="microbatches have no halo"):
        f.emit("HaloExchange", f.add_input_value("x", timed), axis="mb", lo=1, hi=0)
    x = f.add_input_value("x", on_grid(Shard(0), Shard(1)))
    with pytest.raises(IRTypeError, match="expected a tensor"):
        f.emit("HaloExchange", f.emit("Pack", x, x), axis="h", lo=1, hi=0)


def test_which_op_converts_placements() -> None:
    def found(have: Placement, want: Placement) -> tuple[str, dict[str, Any]] | None:
        spec = conversion(have, want)
        return None if spec is None else (spec[0].name, dict(spec[1]))

    a, b = Shard(0, halo=(1, 0, 0.0)), Shard(0, halo=(2, 1, -math.inf))
    assert found(Shard(0), a) == ("HaloExchange", {"lo": 1, "hi": 0})
    assert found(Shard(0), b) == ("HaloExchange", {"lo": 2, "hi": 1, "fill": -math.inf})
    assert found(a, Shard(0)) == ("HaloCut", {})
    for have, want in [
        (a, b),
        (a, REPLICATE),
        (REPLICATE, a),
        (SUM, a),
        (Shard(1), a),
        (a, Shard(1)),
        (a, Shard(0, 2)),
    ]:
        assert found(have, want) is None, (have, want)


@pytest.mark.parametrize("devices", [2, 4])
def test_costs_what_is_received(devices: int) -> None:
    """Faces from both sides, but of two devices each has one neighbour; a cut costs nothing."""
    cluster = load_cluster("dgx-a100")
    mesh = Mesh(cluster.devices[: 2 * devices], {"h": devices, "w": 2})
    seconds: list[float] = []
    for lo, first in itertools.product((0, 1), (1, 2)):
        f = FunctionMaker()
        x = f.add_input_value("x", Tensor.whole(Float64, (1024 * devices, 2048, 64), mesh, (Shard(0), Shard(1))))
        x = f.emit("HaloExchange", x, axis="h", lo=lo * first, hi=first)
        f.set_outputs([x])
        seconds.append(Simulator(CostModel(cluster)).simulate(f.finalize()).seconds)
        y = f.emit("HaloCut", x, axis="h")
        f.set_outputs([y])
        assert Simulator(CostModel(cluster)).simulate(f.finalize()).seconds == seconds[-1]
    group = cluster.group(cluster.devices[:devices])
    slope = 1024 * 64 * 8 / (group.inter or group.intra).bandwidth
    assert seconds[1] - seconds[0] == pytest.approx(slope, rel=1e-6)
    faces = 1 if devices == 2 else 2
    assert seconds[2] - seconds[0] == pytest.approx((faces - 1) * slope, rel=1e-6, abs=1e-12)
    assert seconds[3] - seconds[0] == pytest.approx((2 * faces - 1) * slope, rel=1e-6)
