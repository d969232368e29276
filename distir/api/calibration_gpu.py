"""Training steps of one rank on a GPU, in this process: the seconds of their ops and of whole steps.

The seconds of an op are those of the device: it is kept busy until the host has issued the ops of a step, so that none
waits for its launch. Weights are random, and made on the device.
"""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from distir.api.compilation import distribute
from distir.api.data import Data
from distir.api.model import Model
from distir.backends.lowering.engine import TorchRank
from distir.backends.lowering.profile import Profiler
from distir.backends.tensors.clock import Clock
from distir.backends.tensors.torch_namespace import torch_dtype
from distir.executor.simulator.labels import COMPUTE
from distir.ir.function import Function, Op
from distir.ir.type import Tensor
from distir.transforms.plan import Plan
from distir.transforms.rank.as_run import as_run

_WARM = 2
_RECORDED = 5
"""Steps of which ops are timed."""
_AHEAD = 2.0
"""How many times as long as the host needs to issue a step, the device is kept busy before it."""
_EMPTY = 200
"""Pairs of timestamps with nothing between."""
_SMALL = 0.02
"""The standard deviation of random weights."""


class Measured(NamedTuple):
    """A program, and the least seconds of each of its ops that computes."""

    program: Function
    seconds: dict[Op, float]


def measured_ops(model: Model, plan: Plan, device: torch.device) -> Measured:
    """The least seconds of each op over some steps and their microbatches."""
    program = distribute(model, plan)
    profiler = Profiler(program, 0, device, Path("unused"), 0, _WARM + _RECORDED)
    rank = _loaded(model, program, device, profiler, graph=False)
    begin = host = 0.0
    for k in range(_WARM + _RECORDED):
        profiler.begin_step()
        if k >= _WARM:
            _keep_busy(_AHEAD * host, device)
        begin = time.perf_counter()
        rank.step()
        host = time.perf_counter() - begin if k < _WARM else host
        rank.synchronize()
        profiler.end_step(k)
    function, between = as_run(program), _between(device)
    ops = {
        (f.name, f"%{op.outputs[0].name}"): op for f in (*function.callees(), function) for op in f.ops if op.outputs
    }
    found: dict[Op, list[float]] = defaultdict(list)
    for entry, start, stop, about in profiler.slices:
        op = ops.get((entry.args.get("function", ""), entry.args.get("result", "")))
        if entry.category == COMPUTE and op is not None and about["step"] >= _WARM:
            found[op].append((stop - start) / 1e9)
    return Measured(function, {op: max(min(xs) - between, 1e-9) for op, xs in found.items()})


def measured_step(model: Model, plan: Plan, steps: int, device: torch.device, graph: bool = True) -> float:
    """The median seconds of a step. Without `graph` the host launches its kernels one by one."""
    rank = _loaded(model, distribute(model, plan), device, None, graph)
    clock = Clock(device)
    found: list[float] = []
    for _ in range(_WARM + 1 + steps):
        begin = clock.now()
        rank.step()
        end = clock.now()
        rank.synchronize()
        found.append(clock.between(begin, end) / 1e9)
    return median(found[_WARM + 1 :])


def _loaded(model: Model, program: Function, device: torch.device, profiler: Profiler | None, graph: bool) -> TorchRank:
    """A rank with random weights and data, and state of zeros."""
    rank = TorchRank(program, 0, device, profiler=profiler, graph=graph)
    data = Data(model.function)
    given = data.fixed() | data.step(0)
    arrays = {k: given[v] for k, v in enumerate(model.function.inputs) if v in given}
    rank.load({k: np.asarray(x) for k, x in arrays.items()})
    with torch.inference_mode():
        for k, v in enumerate(program.inputs):
            if k not in arrays and isinstance(t := v.type, Tensor):
                x = torch.zeros(t.shape, dtype=torch_dtype(t.dtype), device=device)
                weight = v.kind == "parameter" and x.is_floating_point()
                rank.values[k] = x.normal_(0.0, _SMALL) if weight else x
    return rank


def _keep_busy(seconds: float, device: torch.device) -> None:
    """Start a kernel that does nothing for about so long."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * 2e9))  # cycles, of about 2 GHz


def _between(device: torch.device) -> float:
    """The seconds between two timestamps that follow each other."""
    clock = Clock(device)
    _keep_busy(0.02, device)
    marks = [clock.now() for _ in range(_EMPTY)]
    if device.type == "cuda":
        torch.cuda.synchronize()
    return median([clock.between(a, b) for a, b in pairwise(marks)]) / 1e9
