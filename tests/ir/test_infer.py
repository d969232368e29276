"""Inference of whole functions, and types that share what they have in common."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.ir import Device, FunctionMaker, Mesh
from distir.ir.errors import IRTypeError
from distir.ir.infer import infer_types
from distir.ir.type import NOW, REPLICATE, SUM, Float, Float64, Int64, Shard, Tensor, Tuple

SQUARE = Tensor(Float(), (4, 4))


def untyped():
    f = FunctionMaker("f")
    x, w = f.add_input_value("x", None), f.add_input_value("w", None)
    y = f.add_op("MatMul", None, [x, w], output_names=["y"])
    f.add_op("ReluGrad", None, [y, y], output_names=["z"], of=f.ops[0])
    return f.finalize()


def test_the_function_itself_if_nothing_changes():
    typed = infer_types(untyped(), [SQUARE, SQUARE])
    assert infer_types(typed, typed.inputs) is typed
    assert infer_types(typed, [SQUARE, SQUARE]) is typed


def test_another_function_for_other_types():
    typed = infer_types(untyped(), [SQUARE, SQUARE])
    wide = infer_types(typed, [SQUARE, Tensor(Float(), (4, 8))])
    assert wide is not typed
    assert [v.type.shape for op in wide.ops for v in op.outputs] == [(4, 8), (4, 8)]  # type: ignore[union-attr]
    assert [v.name for op in wide.ops for v in op.outputs] == ["y", "z"]
    assert wide.ops[1].of is wide.ops[0]


def test_types_all_there_but_of_an_input():
    f = untyped()
    assert infer_types(f, [SQUARE, SQUARE]).outputs[0].type is SQUARE
    with pytest.raises(IRTypeError, match=r"f: %y = MatMul"):
        infer_types(f, [SQUARE, Tensor(Float(), (3, 4))])


def test_results_are_on_the_mesh_of_the_operands():
    """Types on a mesh are those on another mesh of the same axes; an error names the operands' own."""
    first, second = [Mesh([Device("gpu", 2 * k), Device("gpu", 2 * k + 1)], {"tp": 2}, f"part{k}") for k in range(2)]
    assert second.like is first.like
    for mesh in (first, second):
        f = FunctionMaker("f")
        x, w, table = [Tensor.whole(Float(), (4, 4), mesh, (p,)) for p in (REPLICATE, Shard(1), Shard(0, 2))]
        assert f.emit("MatMul", *[f.add_input_value("x", t) for t in (x, w)]).type is w
        operands = [f.add_input_value("x", t) for t in (table, Tensor(Int64(), (2,), mesh))]
        with pytest.raises(IRTypeError, match=f"contiguous ranges, got .* @ {mesh.name}$"):
            f.emit("Gather", *operands, axis=0)


def test_types_of_microbatches_are_interned():
    mesh = Mesh([Device("gpu", i) for i in range(2)], {"mb": 4, "dp": 2}, "stage")
    body = Tensor.whole(Float(), (16, 4), mesh, (Shard(0), Shard(0, 4)))
    total = Tensor.whole(Float(), (4, 4), mesh, (SUM, REPLICATE), (0, NOW))
    weight = Tensor(Float(), (4, 4), mesh)
    assert body.at(2) is Tensor(Float(), (2, 4), mesh, (Shard(0), Shard(0, 4)), (2, 3))
    assert body.at(2).of(None) is body
    assert total.at(3).piece == (0, 3)
    assert weight.at(3) is weight
    bundle = Tuple([weight, body, weight, total])
    assert bundle.at(1) is Tuple([weight, body.at(1), weight, total.at(1)])
    assert Tuple([weight]).at(1) is Tuple([weight])
    assert (bundle.moves, Tuple([weight]).moves) == (True, False)


@pytest.mark.parametrize("op_type", ["Add", "Mul"])
def test_no_rows_stay_none(op_type: str) -> None:
    """A dim of 0 is not one to broadcast; one of 1 follows it."""
    f = FunctionMaker()
    none, one = f.add_input_value("x", Tensor(Float64, (0, 4))), f.add_input_value("y", Tensor(Float64, (1, 4)))
    assert f.emit(op_type, none, one).type.shape == f.emit(op_type, one, none).type.shape == (0, 4)
    assert f.emit("Relu", none).type.shape == (0, 4)
    assert f.emit("MatMul", none, f.add_input_value("w", Tensor(Float64, (4, 3)))).type.shape == (0, 3)


@given(st.data())
def test_bundles_of_microbatches_are_what_their_members_are(data: st.DataObject):
    mesh = Mesh([Device("gpu", i) for i in range(2)], {"mb": 4, "dp": 2}, "stage")
    split = Tensor.whole(Float(), (16, 4), mesh, (Shard(0), Shard(0, 4)))
    total = Tensor(Float(), (4, 4), mesh, (SUM, REPLICATE))
    weight = Tensor(Float(), (4, 4), mesh)
    pieces = st.sampled_from([None, (0, NOW), (0, NOW + 1), (2, 3)])
    leaf = st.one_of(st.just(weight), st.builds(Tensor.of, st.sampled_from([split, total, weight]), pieces))
    members = data.draw(st.lists(st.one_of(leaf, st.lists(leaf, max_size=3).map(Tuple)), max_size=4))
    microbatch = data.draw(st.integers(0, 3))
    bundle = Tuple(members)
    seen = bundle.at(microbatch)
    if data.draw(st.booleans()):  # it is the same bundle whether or not its members were looked at
        assert seen.types == tuple([t.at(microbatch) for t in members])
    assert seen is Tuple([t.at(microbatch) for t in members])
    assert seen.types == tuple([t.at(microbatch) for t in members])
    for t in (bundle, seen):
        assert t is Tuple(t.types) is pickle.loads(pickle.dumps(t))
        assert (t.bytes, t.moves) == (sum(x.bytes for x in t.types), any(x.moves for x in t.types))
        assert t.device is (t.types[0].device if t.types else None)
        assert t.distinct == tuple(dict.fromkeys(t.types))
    piece = data.draw(pieces)
    other = bundle.of(piece)
    assert other is Tuple([t.of(piece) if t.moves else t for t in members])


def test_more_elements_than_can_be_counted_exactly():
    """In all: on a mesh those of the whole."""
    mesh = Mesh([Device("d", i) for i in range(4)], {"dp": 4})
    assert Tensor(Float(), (1 << 26, 1 << 27)).bytes == 4 << 53
    assert Tensor(Float(), (1 << 51,), mesh, [Shard(0)]).global_shape == (1 << 53,)
    for shape, where in (((1 << 26, 1 << 28), None), (((1 << 51) + 1,), mesh), ((10**20,), None)):
        with pytest.raises(IRTypeError, match=r"elements, more than 2\^53$"):
            Tensor(Float(), shape, where, where and [Shard(0)])
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float(), (1 << 30, 1)))
    y = f.add_input_value("y", Tensor(Float(), (1, 1 << 30)))
    with pytest.raises(IRTypeError, match=r"MatMul: f32\[1073741824, 1073741824\] has"):
        f.emit("MatMul", x, y)


def test_operands_on_two_meshes_of_the_same_axes_do_not_fit():
    """Whichever mesh was made first: types are taken over from it to the others."""
    meshes = [Mesh([Device("d", 2 * i), Device("d", 2 * i + 1)], {"two": 2}) for i in range(3)]
    f = FunctionMaker("f")
    values = [f.add_input_value("x", Tensor(Float(), (4,), mesh, [REPLICATE])) for mesh in meshes]
    f.emit("Add", values[0], values[0])
    for a in values:
        for b in values:
            if a is b:
                assert f.emit("Add", a, b).type.device is a.type.device
            else:
                with pytest.raises(IRTypeError):
                    f.emit("Add", a, b)
