"""A rank's step as one CUDA graph: its kernels are launched at once, instead of one by one by the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Run = Callable[[dict[int, torch.Tensor]], dict[int, torch.Tensor]]
"""Runs a step on input values by position, which it may take out of the dict; returns outputs by position."""


class Captured(NamedTuple):
    """A captured step: it reads and updates `inputs`, by position, in place; `outputs` are written by each replay.

    `updates`: of outputs that are updates, the position of the input that each replaces.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Mapping[int, torch.Tensor]
    outputs: Mapping[int, torch.Tensor]
    updates: Mapping[int, int]

    def __call__(self, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run the step on `values`, which are then those of the next step; returns the outputs: updates are values of
        the next step, others new tensors.
        """
        for k, x in self.inputs.items():
            if values[k] is not x:
                x.copy_(values[k])
                values[k] = x
        self.graph.replay()
        return {k: self.inputs[self.updates[k]] if k in self.updates else x.clone() for k, x in self.outputs.items()}


def capture(run: Run, values: Mapping[int, torch.Tensor], updates: Mapping[int, int]) -> Captured | None:
    """The step as a graph that reads and updates the tensors `values`; None if it cannot be captured, as where the
    host must know what a kernel has computed. Nothing is computed. The step has run before, so that kernels are loaded.
    """
    graph = torch.cuda.CUDAGraph()
    given = dict(values)
    try:
        # other threads may copy data to the device meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = run(dict(given))
            _move(outputs, given, updates)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return Captured(graph, given, outputs, dict(updates))


def _move(outputs: Mapping[int, torch.Tensor], given: Mapping[int, torch.Tensor], updates: Mapping[int, int]) -> None:
    """Copy updates into the inputs that they replace, where they are not there already."""
    moved = {updates[k]: x for k, x in outputs.items() if k in updates and not _same(x, given[updates[k]])}
    inputs = {x.untyped_storage().data_ptr() for x in given.values()}
    # one that is an input itself, or a part of one, is read before that is overwritten
    rows = {k: x.clone() if x.untyped_storage().data_ptr() in inputs else x for k, x in moved.items()}
    for k, x in rows.items():
        given[k].copy_(x)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.stride()) == (b.data_ptr(), b.stride())
