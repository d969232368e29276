"""Compares the outputs of a program that was imported from a torch.nn.Module with the module's own.

`check` compares runs with the imported program: where the exporter, or the import, had left something out, both would
be wrong alike.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from distir.api.figures import flops
from distir.backends.lowering.engine import to_numpy
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.errors import ModelWarning
from distir.ir.function import Function, Value
from distir.ops.rules import shape_of, tensor
from distir.transforms.rewriting.fuse import fuse

if TYPE_CHECKING:
    from distir.backends.modules.module_export import ExportedModule

_FLOPS, _ELEMENTS = 3e9, 1e8
"""The most that the comparison may compute and hold: a second or so."""
_TOLERANCE = {"f64": 1e-5, "f32": 1e-3, "f16": 0.05, "bf16": 0.1}
"""By dtype the largest difference, relative to the largest number of an output: far above rounding. In float64 a module
may compute parts in float32."""


def compare_outputs(found: ExportedModule, function: Function, arrays: Mapping[Value, np.ndarray]) -> None:
    """Warns (ModelWarning) of an output for the example inputs that differs from the module's by more than rounding.

    Large programs are not compared, nor those whose outputs are random or that change buffers.
    """
    if found.example is None or not _is_small(function):
        return
    try:
        inputs, outputs = found.example()
    except Exception as e:  # of many kinds: an example may have valid shapes only
        text = f"{found.name} fails for the example inputs, so that what is imported was not compared with it: {e}"
        warnings.warn(ModelWarning(text.splitlines()[0]), stacklevel=2)
        return
    given = {v: arrays[v] if v in arrays else to_numpy(inputs[v.name], tensor(v).dtype) for v in function.inputs}
    with np.errstate(all="ignore"):
        results = SequentialExecutor().compute(fuse(function), given)
    for v, got, x in zip(function.outputs, results, outputs, strict=True):
        dtype = tensor(v).dtype
        if not dtype.floating:
            continue
        got, want = got.astype(np.float64), to_numpy(x, dtype).astype(np.float64)
        finite = np.isfinite(want)
        gap = float(np.max(np.where(finite, np.abs(got - want), 0.0), initial=0.0))
        scale = float(np.max(np.abs(want), initial=0.0, where=finite))
        if not gap <= _TOLERANCE[dtype.name] * scale:
            text = (
                f"{found.name}: for the example inputs %{v.name} differs from the module's own by {gap:.2g}, where it "
                f"is at most {scale:.2g}: torch's exporter, or distir, has left out or changed part of the module"
            )
            warnings.warn(ModelWarning(text), stacklevel=2)


def _is_small(function: Function) -> bool:
    """Whether the sequential program takes about a second at most."""
    values = [*function.inputs, *[v for op in function.ops for v in op.outputs]]
    return flops(function) < _FLOPS and sum([math.prod(shape_of(v)) for v in values]) < _ELEMENTS
