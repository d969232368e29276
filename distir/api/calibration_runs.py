"""The programs that `distir calibrate` runs, and what it reads of their runs: seconds of ops and of steps.

Of the steps of a run the median counts: the cores of a host do not always run alike (what runs beside, or on the other
thread of a core of a virtual machine, takes up to half of their speed), and users time steps as they come. Of repeated
ops the least counts: it says best how ops compare; what a step takes beyond it is in the factors fitted to steps.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from distir.api.compilation import distribute
from distir.api.data import Data
from distir.api.model import Model, load
from distir.api.running import run
from distir.api.timings import read_folder
from distir.executor.cost_model import CostModel
from distir.executor.cost_model.fitting import Sample
from distir.executor.cost_model.seconds import computed_in, work
from distir.executor.simulator.labels import COMPUTE, ISSUE, by_label
from distir.ir.function import Function, FunctionMaker, Op, Role
from distir.ir.topology import Topology
from distir.ir.type import DType, Tensor
from distir.runtime.options import RunOptions
from distir.transforms.plan import Plan

_PROFILED = 6
"""Steps of a profiled run: the first is warm-up, the others are recorded."""
_CLOCK = 0.2e-6
"""Seconds of an op's record that are those of reading the clock."""


_COST = CostModel(Topology())


class Training(NamedTuple):
    """A training step to measure: of a decoder by its sizes ("gpt:..."), or of a perceptron by its widths, with commas.

    `steps`: how many to run for the time of one. `microbatches`: in how many its ops are timed, each in turn; with more
    than one, its gradients are accumulated.
    """

    sizes: str
    batch: int
    optimizer: str
    steps: int
    precision: str = "fp32"
    microbatches: tuple[int, ...] = (1,)

    @property
    def decodes(self) -> bool:
        """Whether it is of a decoder."""
        return ":" in self.sizes

    def model(self, dtype: str = "f32") -> Model:
        """The model of the training step."""
        if self.decodes:
            settings = {"optimizer": self.optimizer, "precision": self.precision}
            return load(self.sizes, {"batch": self.batch}, loss="cross-entropy", **settings)
        widths = [int(n) for n in self.sizes.split(",")]
        return Model(perceptron(widths, self.batch, DType.all[dtype])).training("mse", self.optimizer)


def perceptron(widths: Sequence[int], batch: int, dtype: DType) -> Function:
    """A product, a bias and a Relu for each pair of widths; the last without Relu."""
    maker = FunctionMaker("perceptron")
    x = maker.add_input_value("x", Tensor(dtype, (batch, widths[0])), Role("data", 0))
    for k, (m, n) in enumerate(pairwise(widths)):
        weight = maker.add_input_value(f"w{k}", Tensor(dtype, (m, n)), Role("parameter"))
        bias = maker.add_input_value(f"b{k}", Tensor(dtype, (n,)), Role("parameter"))
        x = maker.add_op("Add", f"y{k}", [maker.add_op("MatMul", f"p{k}", [x, weight]), bias])
        if k < len(widths) - 2:
            x = maker.add_op("Relu", f"a{k}", [x])
    maker.set_outputs([x])
    return maker.finalize()


class TimedStep(NamedTuple):
    """A measured step: its program, its plan and the median seconds of those after the first.

    `launched`: the host has launched its kernels one by one, though they might be a CUDA graph.
    """

    program: Function
    plan: Plan
    seconds: float
    launched: bool = False


class Profiled(NamedTuple):
    """What a profiled run measured: ops, and the seconds in which a rank issues a collective, or a transfer."""

    samples: list[Sample]
    issues: list[float]
    sends: list[float]


def measure_step(model: Model, plan: Plan, steps: int, options: RunOptions, launched: bool = False) -> TimedStep:
    """Run some steps, without a profile. `launched`: see `TimedStep`."""
    if _alone(plan, options):
        from distir.backends.lowering.timing import time_step

        program = distribute(model, plan)
        seconds = time_step(program, drawn(model), steps, "cuda", not launched).seconds
        return TimedStep(program, plan, seconds, launched)
    done = run(model, plan, options, steps=steps + 1)
    if done.prediction is None:
        raise AssertionError("a run has a prediction")
    return TimedStep(done.prediction.program, plan, median(done.seconds[1:]))


def measure_ops(model: Model, plan: Plan, options: RunOptions) -> Profiled:
    """Run a few steps with a profile: the least seconds of each op of the program over steps and microbatches."""
    if _alone(plan, options):
        from distir.backends.lowering.timing import time_ops

        found = time_ops(distribute(model, plan), drawn(model), "cuda")
        return Profiled([sample(op, x) for op, x in found.items() if is_timed(op)], [], [])
    with tempfile.TemporaryDirectory(prefix="distir-") as folder:
        done = run(model, plan, options, steps=_PROFILED, profile=folder)
        _, measured = read_folder(Path(folder))
    if done.prediction is None:
        raise AssertionError("a run has a prediction")
    ops = by_label(done.prediction.simulation.program.function)
    times: dict[Op, list[float]] = defaultdict(list)
    issues: list[float] = []
    sends: list[float] = []
    for s in measured.slices:
        op = ops.get((s.args.get("function", ""), s.args.get("result", "")))
        if s.category == ISSUE:
            (sends if "side" in s.args else issues).append(s.seconds)
        elif s.category == COMPUTE and op is not None and is_timed(op):
            times[op].append(s.seconds)
    return Profiled([sample(op, max(min(xs) - _CLOCK, 1e-9)) for op, xs in times.items()], issues, sends)


def _alone(plan: Plan, options: RunOptions) -> bool:
    """Whether the run is of one rank on a GPU, which this process can be."""
    return options.device == "cuda" and plan.size == 1


def drawn(model: Model) -> dict[int, Any]:
    """Random data for the inputs that are neither weights nor state, by position."""
    data = Data(model.function)
    given = data.fixed() | data.step(0)
    return {k: given[v] for k, v in enumerate(model.function.inputs) if v in given}


def is_timed(op: Op) -> bool:
    """Whether the cost model gives an op a time that is its own."""
    return op.callee is None and bool(op.inputs) and not _COST.free(op.spec, op.attributes, [v.type for v in op.inputs])


def sample(op: Op, seconds: float) -> Sample:
    """The sample of an op that took so many seconds."""
    ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
    flops, size = work(op.spec, op.attributes, ins, outs)
    dtype = computed_in(ins, outs)
    name = "f32" if dtype is None else dtype.name
    return Sample(op.spec.timed_as, name, op.spec.kernel or "", flops, size, seconds)
