"""All transports have the interface's methods, and for some ranks one is chosen."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest

from distir.backends.transport.gloo import Gloo
from distir.backends.transport.interface import Transport, choose
from distir.backends.transport.nccl import Nccl
from distir.backends.transport.shared_memory.shared import SharedMemory


@pytest.mark.parametrize("transport", [Gloo, Nccl, SharedMemory])
def test_transports_have_the_same_methods(transport: type[Transport]) -> None:
    names = [name for name, x in vars(Transport).items() if inspect.isfunction(x) and not name.startswith("_")]
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive", "close"} <= set(names)
    for name in names:
        assert inspect.signature(getattr(transport, name)) == inspect.signature(getattr(Transport, name)), name
    assert isinstance(inspect.getattr_static(transport, "grouped"), bool)


class Near(Gloo):
    """One that reaches only ranks below `end`."""

    def __init__(self, end: int) -> None:
        self.end = end

    def reaches(self, ranks: Sequence[int]) -> bool:
        return max(ranks) < self.end


def test_near_ranks_have_the_near_transport() -> None:
    near, general = Near(3), Gloo()
    assert choose(near, general, (0, 2)) is near
    assert choose(near, general, (2, 0, 1)) is near
    assert choose(near, general, (0, 3)) is general
    assert choose(near, general, (1,)) is general  # nothing to exchange
    assert choose(None, general, (0, 1)) is general
