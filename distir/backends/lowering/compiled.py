"""Functions for torch.compile: those that `outline` cuts out of a rank's program."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import torch


def compiled(call: Callable[..., Any], source: str) -> Callable[..., Any]:
    """`call`, with that source, through torch.compile: compiled at the first call, and again for other strides."""
    file = call.__code__.co_filename
    # torch 2.11 wraps a function without source in one shared code object, which it compiles at most eight times
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    return torch.compile(call, dynamic=False)
