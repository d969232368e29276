"""Pausing the cyclic garbage collector while many live objects are created: it would traverse them repeatedly."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

_ENOUGH = 8_000_000
"""After so many objects made while paused a full collection runs: at most some hundred megabytes of garbage."""
_made = 0


@contextmanager
def no_collection(collect: bool = True) -> Generator[None]:
    """A context, or decorator, in which the cyclic garbage collector does not run.

    Objects made in it are moved to the oldest generation when it ends; else the next young collection would traverse
    all of them. With `collect`, a full collection may run then: not wanted where the process is about to end, as it
    takes seconds where millions of objects live.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            _settle(collect)
            gc.enable()


def _settle(collect: bool) -> None:
    """Move all objects to the oldest generation without traversing them; collect when enough have been made."""
    global _made
    _made += gc.get_count()[0]
    if collect and _made > _ENOUGH:
        _made = 0
        gc.collect()
    elif not gc.get_freeze_count():  # another's frozen objects would thaw
        gc.freeze()  # puts all generations aside, and
        gc.unfreeze()  # back as the oldest: neither walks the objects
