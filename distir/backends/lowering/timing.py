"""Time the steps of one rank in this process: their ops, and whole steps.

On a GPU the seconds of an op are those of the device: it is kept busy until the host has issued the ops of a step, so
that none waits for its launch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from distir.backends.lowering.engine import TorchRank
from distir.backends.lowering.profile import Profiler
from distir.backends.tensors.clock import Clock
from distir.executor.simulator.labels import COMPUTE, by_label
from distir.ir.function import Function, Op
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


def time_ops(program: Function, arrays: Mapping[int, Any], device: str) -> dict[Op, float]:
    """The least seconds, over some steps and their microbatches, of each op of the program that computes.

    `arrays`: data, by position among the inputs; all else is random.
    """
    profiler = Profiler(program, 0, torch.device(device), Path(), 0, _WARM + _RECORDED)
    rank = TorchRank(program, 0, device, profiler=profiler)
    _load(rank, arrays)
    host = 0.0
    for k in range(_WARM + _RECORDED):
        profiler.begin_step()
        if k >= _WARM:
            _keep_busy(_AHEAD * host, rank.device)
        begin = time.perf_counter()
        rank.step()
        host = time.perf_counter() - begin if k < _WARM else host
        rank.synchronize()
        profiler.end_step(k)
    ops, between = by_label(as_run(program)), _between(rank.device)
    found: dict[Op, list[float]] = defaultdict(list)
    for entry, start, stop, about in profiler.slices:
        op = ops.get((entry.args.get("function", ""), entry.args.get("result", "")))
        if entry.category == COMPUTE and op is not None and about["step"] >= _WARM:
            found[op].append((stop - start) / 1e9)
    return {op: max(min(xs) - between, 1e-9) for op, xs in found.items()}


class StepTime(NamedTuple):
    """The median seconds of a step, and on a GPU the most bytes that it has of its memory, with its inputs."""

    seconds: float
    peak: int


def time_step(program: Function, arrays: Mapping[int, Any], steps: int, device: str, captures: bool = True) -> StepTime:
    """The time of a step. Without `captures` the host launches kernels one by one on a GPU, too."""
    cuda, before = device == "cuda", 0
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
    rank = TorchRank(program, 0, device)
    rank.captures = rank.captures and captures
    _load(rank, arrays)
    clock = Clock(rank.device)
    found: list[float] = []
    peak = 0
    for k in range(_WARM + 1 + steps):
        if cuda and k == 1:  # the first may try several kernels
            torch.cuda.reset_peak_memory_stats()
        begin = clock.now()
        rank.step()
        end = clock.now()
        rank.synchronize()
        found.append(clock.between(begin, end) / 1e9)
        if cuda and k == _WARM:  # a captured step allocates no more
            peak = torch.cuda.max_memory_allocated() - before
    return StepTime(median(found[_WARM + 1 :]), peak)


class DeviceOverheads(NamedTuple):
    """Bytes of the memory of a GPU that are none of a program's tensors: of the driver with what kernels it has loaded,
    and of the library of matrix products."""

    context: int
    workspace: int


def overheads() -> DeviceOverheads:
    """Those of the GPU, as it is now; the context includes what other processes use."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    stream = torch.cuda.Stream()  # has a workspace of its own
    with torch.cuda.stream(stream):
        x = torch.zeros(64, 64, device="cuda")
        y = x @ x
    torch.cuda.synchronize()
    del x, y
    free, total = torch.cuda.mem_get_info()
    return DeviceOverheads(total - free - torch.cuda.memory_reserved(), torch.cuda.memory_allocated() - before)


def _load(rank: TorchRank, arrays: Mapping[int, Any]) -> None:
    """Load arrays, and random weights, which are made on the device; state is zero."""
    rank.load(arrays)
    rank.reserve()
    with torch.inference_mode():
        for k, x in rank.values.items():
            if k not in arrays:
                weight = rank.program.inputs[k].kind == "parameter" and x.is_floating_point()
                x.normal_(0.0, _SMALL) if weight else x.zero_()


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
