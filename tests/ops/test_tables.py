"""Rows of a stack of tables, each table with indices of its own: a loop over numpy's own indexing is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.ir.errors import IRTypeError
from distir.ir.function import Attributes
from distir.ir.infer import infer
from distir.ir.spec import lookup
from distir.ir.type import Float64, Int8, Int32, Int64, Tensor, UInt8
from tests.ops.test_index import on_numpy, on_torch

COUNT = st.integers(1, 4)


def oracle(tables: np.ndarray, index: np.ndarray, pooling: bool) -> np.ndarray:
    index = index.astype(int)
    picked = np.stack([table[index[:, t]] for t, table in enumerate(tables)], 1)
    return picked.sum(2) if pooling else picked


def slope(shape: tuple[int, ...], index: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The gradient of the tables from that of what is picked, `d`."""
    total = np.zeros(shape)
    for at in np.ndindex(*index.shape):
        total[at[1], int(index[at])] += d[at[:2]]
    return total


@pytest.mark.parametrize("compute", [on_numpy, on_torch])
@given(st.data())
def test_rows_of_each_table(compute: Callable[..., np.ndarray], data: st.DataObject) -> None:
    """Of tables in parts each gives its share of the sum; what follows `count` is padding."""
    batch, tables, width, rows = (data.draw(COUNT) for _ in range(4))
    dtype, pooling = data.draw(st.sampled_from([Int64, Int32, Int8, UInt8])), data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape = (batch, tables, data.draw(st.integers(0, 3))) if pooling else (batch, tables)
    index = rng.integers(0 if dtype is UInt8 else -rows, rows, shape).astype(dtype.numpy)
    table, d = rng.standard_normal((tables, rows, width)), rng.standard_normal((batch, tables, width))
    pads = [(0, 0), (0, data.draw(st.integers(0, 3))), (0, 0)]
    padded = np.pad(table, pads)
    parts = data.draw(st.sampled_from([n for n in range(1, padded.shape[1] + 1) if padded.shape[1] % n == 0]))
    attrs: dict[str, Any] = {"count": rows, "whole": parts == 1, "pooling": pooling}
    picked, slopes = 0, []
    for k, piece in enumerate(np.split(padded, parts, 1)):
        here = {**attrs, "start": k * piece.shape[1]}
        picked = picked + compute("Lookup", piece, index, **here)
        slopes.append(compute("LookupGrad", d, index, rows=piece.shape[1], **here))
    np.testing.assert_allclose(picked, oracle(table, index, pooling), atol=1e-12)
    np.testing.assert_allclose(np.concatenate(slopes, 1), np.pad(slope(table.shape, index, d), pads), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shapes", "attributes", "message"),
    [
        ("Lookup", [(3, 5, 2), (4, 1)], {}, r"operand 1: expected indices \(b, 3, ...\), one for each table"),
        ("Lookup", [(1, 5, 2), (4, 3)], {}, r"operand 1: expected indices \(b, 1, ...\), one for each table"),
        ("Lookup", [(3, 5, 2), (4, 3)], {"pooling": True}, "operand 1: expected rank 3"),
        ("Lookup", [(3, 5, 2), (4, 3, 2)], {}, "operand 1: expected rank 2"),
        ("LookupGrad", [(1, 3, 2), (4, 3)], {"rows": 5}, r"operand 0: expected shape \(4, 3\), got \(1, 3\)"),
        ("LookupGrad", [(4, 3, 2), (4, 3)], {"rows": 0}, "attribute rows: expected tables in which there are rows"),
    ],
)
def test_refuses(name: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any], message: str) -> None:
    types = (Tensor(Float64, shapes[0]), Tensor(Int64, shapes[1]))
    with pytest.raises(IRTypeError, match=message):
        infer(lookup(name), Attributes(attributes), types)
