"""Rings of devices over gloo, on 2 and 4 ranks, equal the reference, and what they compute without devices."""

from __future__ import annotations

import numpy as np
import pytest

from distir.executor.reference.sequential import SequentialExecutor
from tests.backends.launching import run
from tests.ops.rings import RINGS

pytestmark = pytest.mark.usefixtures("preloaded")


@pytest.mark.parametrize("n", [2, 4])
def test_rings_run(n: int) -> None:
    for make in RINGS:
        program, source = make(n)
        rng = np.random.default_rng(1)
        arrays = [rng.integers(-4, 5, v.type.global_shape).astype(float) for v in program.inputs]  # type: ignore[union-attr]
        want = SequentialExecutor().compute(source, arrays)
        got = run(program, arrays, 2, timeout=300).outputs[-1]
        for k, x in enumerate(want):
            np.testing.assert_array_equal(got[k], x)
