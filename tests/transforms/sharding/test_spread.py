"""Plans of one program share what is found out about it, and get what they would get alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distir.ir import Device, Function, FunctionMaker, Mesh, pformat
from distir.ir.errors import DistirError
from distir.ir.type import Float64, Tensor
from distir.transforms.plan import Plan
from distir.transforms.rewriting.decompose import decompose
from distir.transforms.roles import batch_dims
from distir.transforms.sharding import spread
from distir.transforms.sharding.graph import Graph, graph_of
from distir.transforms.sharding.spread import SplitDims, padded, place
from distir.transforms.sharding.strategies import data_parallel
from tests.transforms.programs import Program, gpt2_tiny, small_gpt, written_mlp

PROGRAMS: dict[str, Callable[[], Program]] = {
    "gpt2-tiny": gpt2_tiny,  # its vocabulary of 509 is padded
    "gpt": lambda: small_gpt(width=12, heads=6, batch=24),
    "mlp": written_mlp,
}
DEGREES = [(1, 2, 1), (2, 1, 4), (4, 1, 2), (2, 2, 2), (2, 2, 4), (1, 3, 2), (2, 4, 1), (1, 4, 8), (1, 1, 4)]


def mesh(dp: int, tp: int, microbatches: int) -> Mesh:
    return Mesh([Device("gpu", i) for i in range(dp * tp)], {"mb": microbatches, "dp": dp, "tp": tp}, "stage0")


def fresh(function: Function) -> Function:
    """The same function, nothing kept with it."""
    return Function(function.name, function.inputs, function.ops, function.outputs, function.updates, function.sources)


def batch(function: Function) -> SplitDims:
    dims = batch_dims(function)
    return SplitDims(tuple([(i, dims[v]) for i, v in enumerate(function.inputs) if v in dims]))


def placed(function: Function, dp: int, tp: int, microbatches: int) -> str:
    """The placed program and its source as text, or the error."""
    try:
        sharding = Plan(dp, tp, microbatches=microbatches).sharding
        source = padded(decompose(function), batch(function), sharding)
        result = place(source, batch(function), sharding, mesh(dp, tp, microbatches))
    except DistirError as e:
        return f"{e} {e.hint}"
    return f"{pformat(source)}\n{pformat(result)}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_that_share_get_what_they_get_alone(name: str) -> None:
    function = PROGRAMS[name]().function
    alone = {degrees: placed(fresh(function), *degrees) for degrees in DEGREES}
    for order in (DEGREES, DEGREES[::-1]):
        shared = fresh(function)
        for degrees in order:
            assert placed(shared, *degrees) == alone[degrees], degrees


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_subdim_inside_the_microbatches_is_decided_as_for_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = decompose(fresh(PROGRAMS[name]().function))
    pairs = batch(function).batch
    quick = {(n, m): data_parallel(function, n, pairs, m) for n in (2, 4) for m in (1, 2)}
    monkeypatch.setattr("distir.transforms.sharding.classes.Classes.inside", lambda *_: None)
    for (n, m), decided in quick.items():
        assert data_parallel(fresh(function), n, pairs, m) == decided, (n, m)


def test_a_plan_asked_for_twice_is_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    function = decompose(fresh(written_mlp().function))
    args = batch(function), Plan(2, 2, microbatches=2).sharding, mesh(2, 2, 2)
    first = place(function, *args)
    assert place(function, *args) is first
    monkeypatch.setattr(spread, "_RECENT", 0)  # only the last is kept
    place(function, args[0], Plan(1, 2, microbatches=2).sharding, mesh(1, 2, 2))
    again = place(function, *args)
    assert again is not first
    assert pformat(again) == pformat(first)


def test_a_graph_is_made_once() -> None:
    function = fresh(small_gpt().function)
    graph = graph_of(function)
    assert graph_of(function) is graph
    assert graph.order == Graph(function).order
    where = {j: i for i, j in enumerate(graph.order)}
    assert sorted(where) == list(range(len(function.ops)))
    made = {v: j for j, outs in enumerate(graph.outs) for v in outs}
    assert all(where[made[v]] < where[j] for j, ins in enumerate(graph.ins) for v in ins if v in made)


def test_a_program_without_ops() -> None:
    f = FunctionMaker("nothing")
    f.set_outputs([f.add_input_value("x", Tensor(Float64, (4, 4)))])
    function = f.finalize()
    assert "fn nothing(%x: f64[4, 4] @ stage0)" in placed(function, 2, 1, 2)
    assert "tp 2 splits nothing in nothing" in placed(function, 1, 2, 1)
