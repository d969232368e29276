"""Pausing the garbage collector while much is made and none of it garbage: it would walk it all again and again."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

_ENOUGH = 4_000_000
"""Objects made while paused before all are looked at: a few hundred megabytes, were they all garbage."""
_made = 0


@contextmanager
def no_collection() -> Generator[None]:
    """A context, or decorator, in which the cyclic garbage collector does not run.

    What was made in it counts as old when it ends: else the next collection, of what is young, would walk it all.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            _settle()
            gc.enable()


def _settle() -> None:
    """Make all objects old without looking at them; look at them when enough have come together."""
    global _made
    _made += gc.get_count()[0]
    if _made > _ENOUGH:
        _made = 0
        gc.collect()
    elif not gc.get_freeze_count():  # another's frozen objects would thaw
        gc.freeze()  # puts all generations aside, and
        gc.unfreeze()  # back as the oldest: neither walks the objects
