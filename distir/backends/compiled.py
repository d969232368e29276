"""Functions that torch.compile makes kernels of: what `outline` cuts out of a rank's program.

torch's own fused optimizers are left out, which work in place, and so is what communicates.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import torch

from distir.backends.optimizers import steps_together
from distir.backends.passing import passes
from distir.ir.function import Op
from distir.transforms.outline import Sort

_HERE = frozenset(("Accumulate", "LocalSlice"))
"""Communication ops of which a rank does its own part alone."""


def sort(op: Op) -> Sort:
    """How an op goes with those that are compiled together: see `outline`."""
    if op.callee is not None or (op.spec.comm is not None and op.spec.bundle is None):
        return "stays" if op.spec.name in _HERE or passes(op) else "moves"
    return "stays" if op.spec.bundle is not None or steps_together(op) else "joins"


def compiled(call: Callable[..., Any], source: str) -> Callable[..., Any]:
    """What runs as `call`, of that source, does. It is compiled when it is first called, and again where operands lie
    in another way.
    """
    file = call.__code__.co_filename
    # a function without source torch 2.11 puts into one of its own, and compiles no more than eight of these
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    return torch.compile(call, dynamic=False)
