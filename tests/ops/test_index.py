"""Indices count from either end of a table, however it is split and padded: numpy's own indexing is the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.backends.lowering.native import implementation
from distir.backends.tensors.torch_namespace import TorchNamespace
from distir.executor.reference.numpy_namespace import NUMPY
from distir.ir.spec import lookup
from distir.ir.type import Int8, Int32, Int64, UInt8


class Case:
    """A table, an axis of it, and indices that count from either end of this."""

    def __init__(self, data: st.DataObject) -> None:
        self.shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
        self.axis = data.draw(st.integers(0, len(self.shape) - 1))
        self.rows = self.shape[self.axis]
        self.dtype = data.draw(st.sampled_from([Int64, Int32, Int8, UInt8]))
        least = 0 if self.dtype is UInt8 else -self.rows
        shape = data.draw(st.lists(st.integers(1, 4), max_size=2))
        count = math.prod(shape)
        numbers = data.draw(st.lists(st.integers(least, self.rows - 1), min_size=count, max_size=count))
        self.index = np.array(numbers, self.dtype.numpy).reshape(shape)
        self.rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        self.table = self.rng.standard_normal(self.shape)
        self.d = self.rng.standard_normal((*self.shape[: self.axis], *shape, *self.shape[self.axis + 1 :]))

    def slope(self) -> np.ndarray:
        """The gradient of the table from that of its rows, `d`."""
        total = np.zeros(self.shape)
        before = (slice(None),) * self.axis
        for at in np.ndindex(*self.index.shape):
            total[(*before, int(self.index[at]))] += self.d[(*before, *at)]
        return total


def on_torch(name: str, *arrays: np.ndarray, **attributes: Any) -> np.ndarray:
    xp = TorchNamespace()
    return np.asarray(implementation(lookup(name), xp)(*map(xp.asarray, arrays), **attributes))


def on_numpy(name: str, *arrays: np.ndarray, **attributes: Any) -> np.ndarray:
    rule = lookup(name).eval
    assert rule is not None
    return rule(NUMPY, *arrays, **attributes)


@pytest.mark.parametrize("compute", [on_numpy, on_torch])
@given(st.data())
def test_indices_count_from_either_end(compute: Callable[..., np.ndarray], data: st.DataObject) -> None:
    """Of a table in parts each gives its share of the sum; what follows `count` is padding."""
    c = Case(data)
    pads = [(0, data.draw(st.integers(0, 3)) if i == c.axis else 0) for i in range(len(c.shape))]
    table = np.pad(c.table, pads)
    rows = table.shape[c.axis]
    parts = data.draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0]))
    attrs: dict[str, Any] = {"axis": c.axis, "count": c.rows, "whole": parts == 1}
    picked, slopes = 0, []
    for k, piece in enumerate(np.split(table, parts, c.axis)):
        here = {**attrs, "start": k * rows // parts}
        picked = picked + compute("Gather", piece, c.index, **here)
        slopes.append(compute("GatherGrad", c.d, c.index, rows=rows // parts, **here))
    np.testing.assert_array_equal(picked, np.take(c.table, c.index.astype(int), c.axis))
    np.testing.assert_allclose(np.concatenate(slopes, c.axis), np.pad(c.slope(), pads), atol=1e-12)
