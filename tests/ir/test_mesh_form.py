"""Functions of one form are equal up to their names and their mesh."""

from __future__ import annotations

from distir.ir import Device, Function, FunctionMaker, Mesh
from distir.ir.mesh_form import mesh_form
from distir.ir.type import REPLICATE, Float32, Shard, Tensor, Tuple
from distir.transforms.relocate import relocate

DEVICES = [Device("gpu", i) for i in range(8)]
MESH, OTHER = Mesh(DEVICES[:2], {"dp": 2}, "a"), Mesh(DEVICES[2:4], {"dp": 2}, "b")


def body(mesh: Mesh = MESH, prefix: str = "", rows: int = 4, axis: int = 1, swap: bool = False) -> Function:
    f = FunctionMaker(f"{prefix}body")
    t = Tensor(Float32, (rows, 8, 2), mesh, (Shard(0),))
    x, pair = f.add_input_value(f"{prefix}x", t), f.add_input_value(f"{prefix}pair", Tuple((t, t)))
    a, b = f.add_op("Unpack", None, [pair], None, (), [f"{prefix}a", f"{prefix}b"])
    y = f.emit("Softmax", f.emit("Sub", *((b, a) if swap else (a, b))), axis=axis)
    f.set_outputs([f.emit("Add", x, y), f.emit("Constant", value=(1.0,), dtype=Float32, shape=(1,), device=mesh)])
    return f.finalize()


def test_names_and_the_mesh_do_not_count() -> None:
    here, there = mesh_form(body()), mesh_form(body(OTHER, "other."))
    assert here is not None
    assert there is not None
    assert here[0] is there[0]
    assert (here[1], there[1]) == (MESH, OTHER)
    moved = mesh_form(relocate(body(), DEVICES[4:6]))
    assert moved is not None
    assert moved[0] is here[0]


def test_all_else_counts() -> None:
    forms = [mesh_form(f) for f in (body(), body(rows=6), body(axis=2), body(swap=True))]
    assert len({found[0] for found in forms if found is not None}) == 4


def test_results_and_how_operands_are_dealt_out_count() -> None:
    t = Tensor(Float32, (2, 4), MESH, (Shard(0),))
    found: set[object] = set()
    for rows in ((0, 1), (2,)), ((0,), (1, 2)):
        for results in (0, 1), (1, 0), (0,):
            f = FunctionMaker("f")
            given = [f.add_input_value("x", t) for _ in range(3)]
            joined = [f.emit("Concat", *[given[k] for k in row], axis=1) for row in rows]
            f.set_outputs([joined[k] for k in results])
            form = mesh_form(f.finalize())
            assert form is not None
            found.add(form[0])
    assert len(found) == 6


def test_a_function_on_several_meshes_or_on_none_has_no_form() -> None:
    f = FunctionMaker("f")
    for mesh in (MESH, OTHER):
        f.emit("Relu", f.add_input_value("x", Tensor(Float32, (4,), mesh, (REPLICATE,))))
    assert mesh_form(f.finalize()) is None
    for t in (Tensor(Float32, (4,)), Tensor(Float32, (4,), DEVICES[0]), Tuple(())):
        g = FunctionMaker("g")
        g.set_outputs([g.add_input_value("x", t)])
        assert mesh_form(g.finalize()) is None
    assert mesh_form(Function("none", (), (), ())) is None


def test_a_function_that_sends_or_calls_has_no_form() -> None:
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float32, (4,), MESH, (REPLICATE,)))
    f.emit("Send", x, to=OTHER)
    assert mesh_form(f.finalize()) is None
    g = FunctionMaker("g")
    y = g.add_input_value("x", Tensor(Float32, (4,), MESH, (REPLICATE,)))
    inner = FunctionMaker("inner")
    inner.set_outputs([inner.emit("Relu", inner.add_input_value("x", y.type))])
    g.add_op("Call", None, [y], subfunctions=[inner.finalize()])
    assert mesh_form(g.finalize()) is None
