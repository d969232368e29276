"""What is found about a Function is found once, and goes with it."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest

from distir.ir import Function, FunctionMaker
from distir.ir.cached import cached
from distir.ir.same import same


class Found:
    """A result that can be weakly referenced."""


def test_found_once_for_each_function_and_argument() -> None:
    calls: list[tuple[str, int]] = []

    @cached
    def find(function: Function, n: int, times: int = 1) -> Found:
        calls.append((function.name, n * times))
        return Found()

    f, g = FunctionMaker("f").finalize(), FunctionMaker("g").finalize()
    assert find(f, 1) is find(f, 1)
    assert find(f, 1) is not find(f, 2)
    assert find(f, 1) is not find(g, 1)
    assert find(f, 1, times=3) is find(f, 1, times=3)
    assert calls == [("f", 1), ("f", 2), ("g", 1), ("f", 3)]


def test_an_error_is_not_kept() -> None:
    tries: list[int] = []

    @cached
    def find(function: Function) -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not yet")
        return 7

    f = FunctionMaker("f").finalize()
    with pytest.raises(ValueError, match="not yet"):
        find(f)
    assert find(f) == 7


def test_goes_with_its_function() -> None:
    @cached
    def find(function: Function) -> tuple[Function, Found]:
        return function, Found()

    f = FunctionMaker("f").finalize()
    seen = weakref.ref(find(f)[1])
    del f
    gc.collect()
    assert seen() is None


def test_a_function_that_is_its_own_result_goes_without_a_collection() -> None:
    calls: list[int] = []

    @cached
    def find(function: Function) -> Function:
        calls.append(1)
        return function

    @cached
    def note(function: Function) -> Found:
        return Found()

    f = FunctionMaker("f").finalize()
    assert find(f) is find(f) is f
    assert calls == [1]
    seen = weakref.ref(note(f))
    gc.disable()
    try:
        del f
        assert seen() is None
    finally:
        gc.enable()


def test_what_is_found_stays_when_a_function_goes_to_another_process() -> None:
    @cached
    def find(function: Function) -> Found:
        return Found()

    f = FunctionMaker("f").finalize()
    find(f)
    assert same(pickle.loads(pickle.dumps(f)), f)
