"""Pausing the garbage collector while much is made and none of it garbage: it would walk it all again and again."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Generator[None]:
    """A context, or decorator, in which the cyclic garbage collector does not run."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
