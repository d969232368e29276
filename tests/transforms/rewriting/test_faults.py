"""Faults in every rewrite: each changes what is computed, and each is found by `verify` and `validate`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from distir.ir import Function
from distir.ir.errors import DistirError, IRTypeError, MismatchError
from tests.transforms.rewriting.faults import FAULTS, arrays_of, computed, differs

CASES = {id(case): case for case, _ in FAULTS.values()}


@functools.cache
def right(case: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Arrays for a case, and its results on them without a fault."""
    made = CASES[case].make()
    CASES[case].check(made)
    arrays = arrays_of(CASES[case], made)
    return arrays, computed(made, arrays)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, swap = FAULTS[fault]
    arrays, want = right(id(case))
    swap(monkeypatch)
    made = case.make()
    with pytest.raises((MismatchError, IRTypeError)):
        case.check(made)
    assert changes(made, arrays, want), "this is no fault: it changes no result"


def changes(made: Function, arrays: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> bool:
    """Whether its results change, or it cannot be evaluated."""
    try:
        with np.errstate(all="ignore"):
            return differs(computed(made, arrays), want)
    except (DistirError, AssertionError, TypeError, ValueError):
        return True


def test_every_rewrite_has_faults() -> None:
    counts = Counter(name.split(":")[0] for name in FAULTS)
    assert len(FAULTS) >= 50
    assert min(counts.values()) >= 3
