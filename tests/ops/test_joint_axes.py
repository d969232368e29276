"""Collectives along several axes, which count as one: types, what each device then holds, text, order, errors."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distir.executor import SequentialExecutor
from distir.ir import parse, pformat, same, validate, verify
from distir.ir.device import Device, Mesh
from distir.ir.errors import DistirError, IRTypeError
from distir.ir.function import Function, FunctionMaker
from distir.ir.type import REPLICATE, SUM, Float32, Float64, Partial, Placement, Shard, Tensor, Tuple
from distir.transforms.rank.check_programs import check_programs
from distir.transforms.rank.rank_program import rank_programs

SIZES = {"a": 2, "b": 3, "c": 2}
MESH = Mesh([Device("cpu", k) for k in range(12)], SIZES, "grid")
SHAPE = (12, 24)
ORDERS = [o for k in (2, 3) for o in itertools.permutations("abc", k)]
each_order = pytest.mark.parametrize("axes", ORDERS, ids="".join)


def as_one(axes: tuple[str, ...], split: Placement, **others: Placement) -> Tensor:
    """Placed so along the axes as one: an axis inside those before it."""
    placements, inside = dict.fromkeys(SIZES, REPLICATE) | others, 1
    for axis in axes:
        placements[axis] = split if split.dim is None else Shard(split.dim, split.outer * inside)
        inside *= SIZES[axis]
    return Tensor.whole(Float64, SHAPE, MESH, [placements[a] for a in SIZES])


def lone(op: str, t: Tensor, **given: Any) -> Function:
    f = FunctionMaker("f")
    f.set_outputs([f.emit(op, f.add_input_value("x", t), **given)])
    return f.finalize()


def result(function: Function) -> Tensor:
    t = function.outputs[0].type
    assert isinstance(t, Tensor)
    return t


def held(op: str, pieces: dict[tuple[int, ...], Any], function: Function) -> dict[tuple[int, ...], Any]:
    """What each device has after the function's one op, given what each has before."""
    (made,) = function.ops
    assert made.op_type == op
    meaning = made.spec.comm.meaning  # type: ignore[union-attr]

    lanes: Any = SimpleNamespace(unrolled=False, xp=np, of=lambda mesh: mesh.coords)
    (got,) = meaning(lanes, made, [[pieces[c] for c in MESH.coords]])  # type: ignore[misc]
    return dict(zip(MESH.coords, got, strict=True))


def group(axes: tuple[str, ...], coord: tuple[int, ...]) -> tuple[list[tuple[int, ...]], int]:
    """The devices that differ along these axes alone, the first axis slowest, and which of them this is."""
    at = ["abc".index(a) for a in axes]
    found: list[tuple[int, ...]] = []
    for row in itertools.product(*[range(SIZES[a]) for a in axes]):
        c = list(coord)
        for i, k in zip(at, row, strict=True):
            c[i] = k
        found.append(tuple(c))
    return found, found.index(coord)


def terms(shape: tuple[int, ...]) -> dict[tuple[int, ...], Any]:
    rng = np.random.default_rng(0)
    return {c: rng.integers(-9, 9, shape).astype(float) for c in MESH.coords}


@each_order
@pytest.mark.parametrize("kind", ["sum", "max", "mean"])
def test_all_reduce(axes: tuple[str, ...], kind: str) -> None:
    """In any order the same."""
    function = lone("MPIAllreduce", as_one(axes, Partial(kind)), axis=axes)
    verify(function)
    assert result(function).placements == (REPLICATE,) * 3
    pieces = terms(SHAPE)
    for c, got in held("MPIAllreduce", pieces, function).items():
        rows = np.array([pieces[d] for d in group(axes, c)[0]])
        want = {"sum": rows.sum(0), "max": rows.max(0), "mean": rows.mean(0)}[kind]
        np.testing.assert_allclose(got, want, rtol=1e-12)


@each_order
@pytest.mark.parametrize(("dim", "outer"), [(0, 1), (1, 1), (1, 2)])
def test_all_gather(axes: tuple[str, ...], dim: int, outer: int) -> None:
    t = as_one(axes, Shard(dim, outer))
    function = lone("MPIAllgather", t, axis=axes)
    verify(function)
    assert result(function).placements == (REPLICATE,) * 3
    whole = np.arange(float(math.prod(SHAPE))).reshape(SHAPE)
    pieces = {c: t.cut(whole, c) for c in MESH.coords}
    for c, got in held("MPIAllgather", pieces, function).items():
        np.testing.assert_array_equal(got, whole)
        devices, _ = group(axes, c)
        split = [x.reshape(*SHAPE[:dim], outer, -1, *SHAPE[dim + 1 :]) for x in [pieces[d] for d in devices]]
        np.testing.assert_array_equal(got, np.concatenate(split, dim + 1).reshape(SHAPE))
    np.testing.assert_array_equal(SequentialExecutor().compute(function, [whole])[0], whole)


@each_order
@pytest.mark.parametrize(("dim", "outer"), [(0, 1), (1, 1), (1, 2)])
def test_reduce_scatter(axes: tuple[str, ...], dim: int, outer: int) -> None:
    """The parts are numbered along the first axis slowest."""
    given = {"outer": outer} if outer > 1 else {}
    function = lone("MPIReduceScatter", as_one(axes, SUM), axis=axes, dim=dim, **given)
    verify(function)
    assert result(function) is as_one(axes, Shard(dim, outer))
    pieces = terms(SHAPE)
    n = math.prod(SIZES[a] for a in axes)
    for c, got in held("MPIReduceScatter", pieces, function).items():
        devices, index = group(axes, c)
        total = np.sum([pieces[d] for d in devices], axis=0)
        parts = np.moveaxis(total, dim, 0).reshape(outer, n, -1, SHAPE[1 - dim])[:, index]
        np.testing.assert_array_equal(got, np.moveaxis(parts.reshape(-1, SHAPE[1 - dim]), 0, dim))


def test_the_order_of_the_axes_says_which_is_inside() -> None:
    t = as_one(("a", "b"), Shard(0))
    assert t.on(("a", "b")) is Shard(0)
    with pytest.raises(IRTypeError, match=r"expected Shard\(0, 6\) along 'a', inside 'b'"):
        lone("MPIAllgather", t, axis=("b", "a"))
    one, other = (result(lone("MPIReduceScatter", as_one(o, SUM), axis=o, dim=0)) for o in (("a", "b"), ("b", "a")))
    assert one.placements == (Shard(0), Shard(0, 2), REPLICATE)
    assert other.placements == (Shard(0, 3), Shard(0), REPLICATE)


def test_beside_another_axis() -> None:
    """What an axis that is not joined splits stays split, inside or outside."""
    t = as_one(("a", "b"), Shard(0, 2), c=Shard(0))
    function = lone("MPIAllgather", t, axis=("a", "b"))
    verify(function)
    assert result(function).placements == (REPLICATE, REPLICATE, Shard(0))
    whole = np.arange(float(math.prod(SHAPE))).reshape(SHAPE)
    np.testing.assert_array_equal(SequentialExecutor().compute(function, [whole])[0], whole)
    pieces = {c: t.cut(whole, c) for c in MESH.coords}
    for c, got in held("MPIAllgather", pieces, function).items():
        np.testing.assert_array_equal(got, result(function).cut(whole, c))


@each_order
def test_text_and_ranks(axes: tuple[str, ...]) -> None:
    for op, t, given in (
        ("MPIAllreduce", as_one(axes, SUM), {}),
        ("MPIAllgather", as_one(axes, Shard(0)), {}),
        ("MPIReduceScatter", as_one(axes, SUM), {"dim": 1, "outer": 2}),
    ):
        function = lone(op, t, axis=axes, **given)
        read = parse(pformat(function))
        assert same(read, function)
        assert read.ops[0].attributes["axis"] == axes
        validate(function, erased(function))
        check_programs(function, rank_programs(function))


def erased(function: Function) -> Function:
    f = FunctionMaker("f")
    f.set_outputs([f.add_input_value("x", Tensor(Float64, SHAPE))])
    return f.finalize()


def test_bundles() -> None:
    """An entry of dim and outer for each member, and axes for all."""
    f = FunctionMaker("f")
    axes = ("c", "a")
    xs = [f.add_input_value("x", as_one(axes, SUM)) for _ in range(2)]
    y = f.emit("MPIReduceScatter", f.emit("Pack", *xs), axis=axes, dim=(0, 1), outer=(1, 2))
    z = f.emit("MPIAllgather", y, axis=axes)
    f.set_outputs([z])
    verify(f.finalize())
    assert isinstance(y.type, Tuple)
    assert y.type.types == (as_one(axes, Shard(0)), as_one(axes, Shard(1, 2)))
    mixed = f.emit("Pack", xs[0], f.add_input_value("x", as_one(axes, Partial("max"))))
    with pytest.raises(IRTypeError, match="expected members of one dtype, mesh and reduction"):
        f.emit("MPIAllreduce", mixed, axis=axes)


@pytest.mark.parametrize(
    ("op", "t", "axis", "words"),
    [
        ("MPIAllreduce", as_one(("a",), SUM), ("a", "b"), "expected Partial along 'b', inside 'a'"),
        ("MPIAllreduce", as_one(("a",), SUM, b=Partial("max")), ("a", "b"), "expected Partial along 'b'"),
        ("MPIAllgather", as_one(("a",), Shard(0), b=Shard(1)), ("a", "b"), "along 'b', inside 'a'"),
        ("MPIAllgather", as_one(("a",), Shard(0)), ("a", "b"), "along 'b', inside 'a'"),
        ("MPIAllgather", as_one(("a",), Shard(0, halo=(1, 0, 0.0))), ("a", "b"), ""),
        ("MPIAllreduce", as_one(("a", "b"), SUM), ("a", "a"), "axis"),
        ("MPIAllreduce", as_one(("a", "b"), SUM), (), "axis: expected"),
        ("MPIAllreduce", as_one(("a",), SUM), ("a",), "or a tuple of several"),
        ("MPIAllreduce", as_one(("a", "b"), SUM), ("a", 1), "axis: expected"),
        ("MPIAllreduce", as_one(("a", "b"), SUM), ("a", "d"), "no axis 'd'"),
        ("MPIAllreduce", Tensor(Float32, (2,)), ("a", "b"), "mesh"),
        ("MPIReduceScatter", as_one(("a", "b"), SUM, c=Shard(0, 3)), ("a", "b"), "dim 0"),
        ("MPIAlltoall", as_one(("a", "b"), Shard(1)), ("a", "b"), "axis: expected"),
        ("MPIPermute", as_one(("a", "b"), Shard(1)), ("a", "b"), "axis: expected"),
        ("LocalSlice", as_one(("a", "b"), REPLICATE), ("a", "b"), "axis: expected"),
    ],
)
def test_refused(op: str, t: Tensor, axis: Any, words: str) -> None:
    given = {"dim": 0} if op in ("MPIReduceScatter", "MPIAlltoall", "LocalSlice") else {}
    with pytest.raises(DistirError) as e:
        lone(op, t, axis=axis, **given)
    assert isinstance(e.value, IRTypeError)
    assert words in e.value.message
    assert "\n" not in e.value.message


def test_time_is_none_of_several() -> None:
    mesh = Mesh(MESH.devices[:2], {"mb": 2, "a": 2})
    t = Tensor.whole(Float64, (4,), mesh, (SUM, SUM))
    with pytest.raises(IRTypeError, match=r"attribute axis: expected axes of devices, got \('mb', 'a'\)"):
        lone("MPIAllreduce", t, axis=("mb", "a"))
