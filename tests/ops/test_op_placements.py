"""Rules worth spelling out: what is split where, what is refused, and how that is said."""

from __future__ import annotations

from typing import Any

import pytest

from distir.ir.device import Device, Mesh
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker
from distir.ir.type import (
    MEAN,
    REPLICATE,
    SUM,
    DType,
    Float32,
    Float64,
    Int32,
    Int64,
    Partial,
    Placement,
    Shard,
    Tensor,
)

MESH = Mesh([Device("cpu", 0), Device("cpu", 1)], {"tp": 2})


def results(name: str, *operands: tuple[tuple[int, ...], Placement] | DType, **attributes: Any) -> list[Placement]:
    """Placements of the results, from (global shape, placement) of each operand; a dtype goes before one."""
    maker, types, dtype = FunctionMaker(), [], Float64
    for o in operands:
        if isinstance(o, DType):
            dtype = o
        else:
            types.append(Tensor.whole(dtype, o[0], MESH, [o[1]]))
            dtype = Float64
    maker.emit(name, *[maker.add_input_value("x", t) for t in types], **attributes)
    return [v.type.placements[0] for v in maker.ops[-1].outputs]  # type: ignore[union-attr]


def refused(match: str, name: str, *operands: Any, **attributes: Any) -> None:
    with pytest.raises(IRTypeError, match=match):
        results(name, *operands, **attributes)


R = REPLICATE


def test_a_contracted_factor_leaves_a_partial_sum():
    assert results("MatMul", ((4, 6), Shard(1)), ((6, 8), Shard(0))) == [SUM]
    assert results("MatMul", ((2, 4, 6), R), ((6, 8), Shard(1))) == [Shard(2)]
    assert results("MatMulGradWeight", ((2, 4, 6), Shard(0)), ((2, 4, 8), Shard(0))) == [SUM]
    assert results("MatMulGradWeight", ((2, 4, 6), R), ((2, 4, 8), Shard(2, 2))) == [Shard(1, 2)]
    assert results("MatMulGrad", ((4, 6), Shard(0)), ((6, 8), R), ((4, 8), Shard(0))) == [Shard(0), SUM]
    refused("operand 1: expected Shard.0., got Replicate", "MatMul", ((4, 6), Shard(1)), ((6, 8), R))


def test_a_bias_is_not_added_on_every_device():
    refused("operand 0: .* Add is not linear", "Add", ((4, 6), SUM), ((6,), R))
    product = ((4, 6), Shard(1)), ((6, 8), Shard(0))
    refused("operand 2: expected Partial, got Replicate, with operand 0 split", "Gemm", *product, ((8,), R))
    assert results("Gemm", *product, ((8,), SUM)) == [SUM]
    assert results("Add", ((4, 6), SUM), ((6,), SUM)) == [SUM]


def test_partial_sums_pass_only_linear_operands():
    assert results("Div", ((4,), SUM), ((4,), R)) == [SUM]
    refused("operand 1: expected Replicate, got Partial", "Div", ((4,), R), ((4,), SUM))
    refused("operand 0: expected Replicate, got Partial", "Mul", ((4,), SUM), ((4,), SUM))
    refused("Relu is not linear", "Relu", ((4,), SUM))
    refused("operand 0", "Neg", ((4,), Partial("max")))
    assert results("Cast", ((4,), SUM), to=Float32) == [SUM]
    refused("operand 0", "Cast", ((4,), SUM), to=Int64)
    refused("operand 0", "PadTo", ((4,), SUM), dim=0, size=6, value=1.0)


def test_a_split_mean_leaves_a_partial_mean_which_passes_as_sums_do():
    assert results("ReduceMean", ((4, 6), Shard(1)), axes=(1,)) == [MEAN]
    assert results("ReduceMean", ((4, 6), Shard(0)), axes=(1,)) == [Shard(0)]
    assert results("Add", ((4,), MEAN), ((4,), MEAN)) == [MEAN]
    assert results("MatMul", ((4, 6), MEAN), ((6, 8), R)) == [MEAN]
    refused("operand 0: expected Replicate, got Partial.mean.: Add", "Add", ((4,), MEAN), ((4,), SUM))
    refused("operand 0: expected Replicate, got Partial.mean.: Relu", "Relu", ((4,), MEAN))
    refused("a mean is of floats, got i32", "ReduceMean", Int32, ((4, 6), Shard(1)), axes=(1,))


def test_means_over_microbatches_are_not_accumulated():
    mesh = Mesh([Device("cpu", 0)], {"mb": 4}, "m")
    maker = FunctionMaker()
    total, x = (maker.add_input_value("x", Tensor(Float64, (4,), mesh, (MEAN,), piece)) for piece in ((0, 1), (1, 2)))
    with pytest.raises(IRTypeError, match="means over microbatches are not accumulated"):
        maker.emit("Accumulate", total, x)


def test_a_split_table_gives_partial_rows():
    assert results("Gather", ((12, 6), Shard(0)), Int64, ((4, 2), R), axis=0) == [SUM]
    assert results("Gather", ((12, 6), Shard(1)), Int64, ((4, 2), R), axis=0) == [Shard(2)]
    assert results("GatherGrad", ((4, 6), Shard(0)), Int64, ((4,), Shard(0)), rows=12) == [SUM]
    rows = (("tp", Shard(0)),)
    assert results("GatherGrad", ((4, 6), R), Int64, ((4,), R), rows=12, place=rows) == [Shard(0)]
    refused("contiguous", "Gather", ((12, 6), Shard(0, 3)), Int64, ((4, 2), R), axis=0)
    refused("operand 0: expected", "GatherGrad", ((4, 6), SUM), Int64, ((4,), R), rows=12, place=rows)


def test_a_fused_projection_splits_by_heads():
    """(3, heads): the sub-dimension inside the three parts becomes the outermost of each part, and back."""
    assert results("Split", ((4, 24), Shard(1, 3)), axis=1, parts=3) == [Shard(1)] * 3
    assert results("Concat", *[((4, 8), Shard(1))] * 3, axis=1) == [Shard(1, 3)]
    refused("operand 0", "Split", ((4, 24), Shard(1)), axis=1, parts=3)
    refused("operand 0", "Split", ((4, 24), Shard(1, 2)), axis=1, sizes=(8, 16))
    assert results("Reshape", ((4, 24), Shard(1, 3)), shape=(4, 3, 2, 4)) == [Shard(2)]


def test_normalised_dims_stay_whole():
    refused("operand 0", "Softmax", ((4, 6), Shard(1)))
    refused("operand 0", "LayerNormalization", ((4, 6), Shard(1)), ((6,), Shard(0)))
    assert results("LayerNorm", ((4, 6), Shard(0)), ((6,), R)) == [Shard(0)] * 3
    rows = ((4, 1), Shard(0))
    split = [((4, 6), Shard(0)), ((6,), R), rows, rows, ((4, 6), Shard(0))]
    assert results("LayerNormGrad", *split) == [Shard(0), SUM, SUM]
    whole = ((4, 1), R)
    assert results("LayerNormGrad", ((4, 6), R), ((6,), R), whole, whole, ((4, 6), SUM)) == [SUM] * 3
    refused("operand 0", "RMSNormalization", ((4, 6), Shard(1)), ((6,), Shard(0)))
    assert results("RMSNorm", ((4, 6), Shard(0)), ((6,), R)) == [Shard(0)] * 2
    assert results("RMSNormGrad", ((4, 6), Shard(0)), ((6,), R), rows, ((4, 6), Shard(0))) == [Shard(0), SUM]
    assert results("RMSNormGrad", ((4, 6), R), ((6,), R), whole, ((4, 6), SUM)) == [SUM] * 2
    refused("operand 0: .* RMSNorm is not linear", "RMSNorm", ((4, 6), SUM), ((6,), R))


def test_what_expands_may_be_split_by_place():
    assert results("Expand", ((), R), shape=(4, 6), place=(("tp", Shard(1)),)) == [Shard(1)]
    assert results("Expand", ((4, 1), Shard(0)), shape=(4, 6)) == [Shard(0)]
    assert results("Expand", ((), SUM), shape=(4, 6)) == [SUM]


@pytest.mark.parametrize(
    ("message", "name", "types", "attributes"),
    [
        ("Add: operand 1: expected f64, got f32", "Add", [(Float64, 4), (Float32, 4)], {}),
        ("MatMul: operand 1: expected k = 6, got 5", "MatMul", [(Float64, 4, 6), (Float64, 5, 2)], {}),
        ("Not: operand 0: expected a dtype of kind bool, got f64", "Not", [(Float64, 4)], {}),
        ("Div: operand 0: expected a dtype of kind float", "Div", [(Int64, 4), (Int64, 4)], {}),
        ("Gather: operand 1: expected a dtype of kind int", "Gather", [(Float64, 4), (Float64, 4)], {}),
        ("Split: operand 0: size 4 does not split into 3", "Split", [(Float64, 4)], {"axis": 0, "parts": 3}),
        ("Concat: operand 1: expected shape", "Concat", [(Float64, 4, 2), (Float64, 4, 3)], {"axis": 0}),
        ("Expand: operand 0", "Expand", [(Float64, 4)], {"shape": (6,)}),
        ("CutTo: operand 0: dim 0", "CutTo", [(Float64, 4)], {"dim": 0, "size": 5}),
        ("Softmax: expected 1 operands, got 2", "Softmax", [(Float64, 4), (Float64, 4)], {}),
        ("attribute reduction", "MSELoss", [(Float64, 4), (Float64, 4)], {"reduction": "average"}),
        (
            "Constant: attribute value: expected 2 numbers",
            "Constant",
            [],
            {"value": (1,), "shape": (2,), "dtype": Int64},
        ),
    ],
)
def test_errors_say_what_was_expected(
    message: str, name: str, types: list[tuple[Any, ...]], attributes: dict[str, Any]
):
    maker = FunctionMaker()
    operands = [maker.add_input_value("x", Tensor(dtype, shape)) for dtype, *shape in types]
    with pytest.raises(IRTypeError, match=message):
        maker.emit(name, *operands, **attributes)
