"""The collector is paused, and what was made counts as old; garbage is still found."""

import gc
import weakref

import pytest

from distir.ir import pause
from distir.ir.pause import no_collection


class _Node:
    """Something that can be in a cycle."""

    def __init__(self) -> None:
        self.next: _Node | None = None


def test_runs_again_afterwards():
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_made_is_old():
    gc.collect()
    with no_collection():
        nodes = [_Node() for _ in range(5000)]
    assert len(gc.get_objects(generation=0)) < 1000
    assert sum(type(x) is _Node for x in gc.get_objects(generation=2)) >= len(nodes)


def test_cycles_made_inside_are_collected():
    with no_collection():
        a, b = _Node(), _Node()
        a.next, b.next = b, a
        seen = weakref.ref(a)
        del a, b
    gc.collect()
    assert seen() is None


def test_collects_when_enough_was_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pause, "_ENOUGH", 100)
    with no_collection():
        a = _Node()
        a.next = a
        seen = weakref.ref(a)
        del a
        nodes = [_Node() for _ in range(200)]
    assert seen() is None
    assert len(nodes) == 200


def test_collects_nothing_where_the_process_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pause, "_ENOUGH", 100)
    with no_collection(collect=False):
        a = _Node()
        a.next = a
        seen = weakref.ref(a)
        del a
        nodes = [_Node() for _ in range(200)]
    assert seen() is not None
    assert len(gc.get_objects(generation=0)) < 1000
    assert len(nodes) == 200


def test_leaves_what_another_froze():
    gc.freeze()
    try:
        with no_collection():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
