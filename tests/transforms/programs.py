"""Programs to distribute, with data that differ in every sample, and the comparison with the sequential program."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distir.api.compilation import validate
from distir.api.named_dims import named_cuts, named_dims
from distir.executor.reference.sequential import SequentialExecutor, Tap
from distir.importer import import_from_onnx
from distir.ir import Device, Function, FunctionMaker, Op, Value, verify
from distir.ir.device import AxisNames
from distir.ir.type import Float64, Tensor
from distir.models.gpt import gpt
from distir.transforms import plan as plans_of
from distir.transforms.differentiation.training import SGD, AdamW, training_step
from distir.transforms.parallel3d import Distributed, distribute
from distir.transforms.rewriting.precision import with_dtype

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = 8
TOLERANCE = 1e-10
"""Tolerance of results, relative to the larger of 1 and the largest element."""
ADAMW, MOMENTUM, PLAIN = AdamW(0.01), SGD(0.1, momentum=0.9), SGD(0.1)


class Plan(NamedTuple):
    """Degrees of parallelism, microbatches, schedule, whether a host holds the inputs, and stages a pipeline rank."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    host: bool = False
    chunks: int = 1
    overlap: bool = True
    bucket_mb: float = 25.0
    zero: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    split: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    gathered_again: str = "all"
    pad_multiple: int = 1

    def __str__(self) -> str:
        host = "-host" if self.host else ""
        chunks = f"-{self.chunks}chunks" if self.chunks > 1 else ""
        overlap = "" if self.overlap else "-no_overlap"
        bucket = "" if self.bucket_mb == 25.0 else f"-bucket{self.bucket_mb:g}"
        zero = f"-zero{self.zero}" if self.zero else ""
        degrees = f"dp{self.dp}-tp{self.tp}-pp{self.pp}-mb{self.microbatches}"
        again = "" if self.recompute == "none" else f"-recompute_{self.recompute}"
        again += "" if self.gathered_again == "all" else f"-{self.gathered_again}_gathered_again"
        sequence = "-sequence" if self.sequence_parallel else ""
        padded = f"-padded{self.pad_multiple}" if self.pad_multiple > 1 else ""
        split = "".join([f"-{text}" for text in self.split])
        cut = "".join([f"-{name}" for name in self.cut])
        return f"{degrees}{split}{cut}-{self.schedule}{host}{chunks}{overlap}{bucket}{zero}{again}{sequence}{padded}"

    @property
    def devices(self) -> list[Device]:
        further = math.prod([plans_of.InputSplit.parse(text).size for text in self.split])
        return [Device("gpu", i) for i in range(self.dp * self.tp * self.pp * further + self.host)]

    @property
    def fits_batch(self) -> bool:
        return BATCH % (self.dp * self.microbatches) == 0

    @property
    def plan(self) -> plans_of.Plan:
        """The plan; with a host, devices are in the order with stages outermost."""
        fields = self._asdict()
        order = ("pp", "tp", "dp") if fields.pop("host") and not self.split else ()
        # DistIR (2021) knew no overlap, and counted the gradient of the loss to the forward pass
        old = {"overlap": False, "loss_gradient": "forward"} if self.schedule == "distir2021" else {}
        return plans_of.Plan(**{**fields, "order": order, **old})


class Program(NamedTuple):
    """A sequential program and an array for each of its inputs. It is run in float64, whatever its types are."""

    function: Function
    arrays: list[np.ndarray]
    forward: Function | None = None
    """The function that it was made from, before ops without a gradient rule were decomposed."""

    def results(self) -> list[np.ndarray]:
        """The results of the sequential program: the reference."""
        return SequentialExecutor().compute(in_float64(self.function), self.arrays)


def plans(schedules: Sequence[str] = ("1f1b",), hosts: Sequence[bool] = (False,), limit: int = 8) -> Iterator[Plan]:
    """Every plan of at most `limit` devices and 1, 2 or 4 microbatches whose batch divides."""
    degrees = range(1, limit + 1)
    for dp in degrees:
        for tp in degrees:
            for pp in degrees:
                for microbatches in (1, 2, 4):
                    for schedule in schedules:
                        for host in hosts:
                            plan = Plan(dp, tp, pp, microbatches, schedule, host)
                            if dp * tp * pp <= limit and plan.fits_batch:
                                yield plan


# ---- programs


@functools.cache
def gpt2_tiny(optimizer: SGD | AdamW = ADAMW) -> Program:
    """The training step of examples/gpt2-tiny.onnx; labels differ in every sample, some are ignored."""
    function, arrays = import_from_onnx(EXAMPLES / "gpt2-tiny.onnx", dims={"batch": BATCH})
    step = training_step(function, "cross-entropy", optimizer, gradients=True)
    rng = np.random.default_rng(0)
    given = {v.name: np.asarray(a) for v, a in arrays.items()}
    given["input_ids"] = rng.integers(0, 509, (BATCH, 16))
    given["attention_mask"] = np.triu(np.full((1, 1, 16, 16), -1e9), 1)
    given["position_ids"] = np.arange(16)[None]
    labels = rng.integers(0, 509, (BATCH, 16))
    labels[rng.random((BATCH, 16)) < np.linspace(0, 0.8, BATCH)[:, None]] = -100
    return filled(step, {**given, "labels": labels}, rng)


@functools.cache
def imported_mlp(optimizer: SGD | AdamW = MOMENTUM) -> Program:
    """The training step of examples/mlp.onnx under a squared error."""
    function, arrays = import_from_onnx(EXAMPLES / "mlp.onnx", dims={"batch": BATCH})
    step = training_step(function, "mse", optimizer, gradients=True)
    return filled(step, {v.name: np.asarray(a) for v, a in arrays.items()}, np.random.default_rng(1))


@functools.cache
def written_mlp(layers: int = 6, width: int = 16) -> Program:
    """An MLP with its own backward pass, without roles: its results are the loss and the gradients."""
    f = FunctionMaker("mlp")
    t = Tensor(Float64, (BATCH, width))
    x, z = f.add_input_value("x", t), f.add_input_value("z", t)
    weights = [f.add_input_value(f"w{i}", Tensor(Float64, (width, width))) for i in range(layers)]
    saved: list[tuple[Value, Value, Value]] = []
    a = x
    for i, w in enumerate(weights):
        y = f.add_op("Relu", f"y{i}", [f.add_op("MatMul", f"h{i}", [a, w])])
        saved.append((a, w, y))
        a = y
    f.add_op("Loss", "loss", [a, z], {"N": BATCH})
    d = f.add_op("LossGrad", "dloss", [a, z], {"N": BATCH})
    for a, w, y in reversed(saved):
        d = f.add_op("ReluGrad", "dy", [y, d])
        d, _ = f.add_op("MatMulGrad", None, [a, w, d], output_names=["dx", "dw"])
    return filled(f.finalize(), {}, np.random.default_rng(2))


@functools.cache
def small_gpt(
    layers: int = 2,
    width: int = 8,
    heads: int = 4,
    vocabulary: int = 16,
    sequence: int = 4,
    optimizer: SGD | AdamW = PLAIN,
    batch: int = BATCH,
) -> Program:
    """The training step of a GPT with fused QKV projections and tied embedding and head."""
    function = gpt(layers, width, heads, vocabulary, sequence, batch, Float64)
    step = training_step(function, "cross-entropy", optimizer, gradients=True)
    rng = np.random.default_rng(3)
    ids, labels = rng.integers(0, vocabulary, (2, batch, sequence))
    given = {"input_ids": ids, "labels": labels, "position_ids": np.arange(sequence)[None]}
    given["attention_mask"] = np.triu(np.full((1, 1, sequence, sequence), -1e9), 1)
    return filled(step, given, rng)


def filled(function: Function, given: dict[str, np.ndarray], rng: np.random.Generator) -> Program:
    """The program in float64, inputs that are not `given` by name random (states zero)."""
    function = with_dtype(function, Float64)
    arrays: list[np.ndarray] = []
    for v in function.inputs:
        t = v.type
        assert isinstance(t, Tensor)
        if v.name in given:
            x: Any = given[v.name]
        elif v.kind == "state":
            x = np.zeros(t.shape)
        else:
            x = rng.standard_normal(t.shape) * (0.5 if len(t.shape) > 1 else 0.2)
        assert np.shape(x) == t.shape, v
        arrays.append(np.asarray(x, t.dtype.numpy))
    return Program(function, arrays)


# ---- distributing and comparing


def distributed(program: Program, plan: Plan) -> Distributed:
    """The program distributed, verified, and validated against the source that was passed."""
    splits, cuts = named_dims(program.function, plan.plan.split), named_cuts(program.function, plan.plan)
    result = distribute(program.function, plan.plan, plan.devices, splits=splits, cuts=cuts)
    verify(result.placed)
    verify(result.program)
    validate(result.program, program.function)
    return result


def in_float64(function: Function) -> Function:
    """A function with narrower types widened: what it computes but for rounding."""
    types = [v.type for f in (function, *function.callees()) for v in f.producers()]
    narrow = any(isinstance(t, Tensor) and t.dtype.floating and t.dtype is not Float64 for t in types)
    return with_dtype(function, Float64) if narrow else function


def run(function: Function, program: Program, tap: Tap | None = None) -> list[np.ndarray]:
    """The results of a distributed form of the program on its arrays."""
    return SequentialExecutor(tap=tap).compute(in_float64(function), program.arrays)


def error(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """The largest max|a - b| / max(1, max|b|) of all results; infinite where a shape or a NaN differs."""
    errors = [0.0]
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape:
            return math.inf
        gap = float(np.max(np.abs(a - b), initial=0.0)) / max(1.0, float(np.max(np.abs(b), initial=0.0)))
        errors.append(math.inf if math.isnan(gap) else gap)
    return max(errors)


def check(program: Program, plan: Plan) -> Function:
    """Assert that the distributed program computes what the program does; returns it."""
    function = distributed(program, plan).program
    gap = error(run(function, program), program.results())
    assert gap <= TOLERANCE, f"{plan}: off by {gap}"
    return function


def collectives(function: Function, axis: AxisNames | None = None) -> Counter[str]:
    """The number of collectives of each kind in the distinct bodies of a program, along one axis, several or all."""
    ops = [op for f in (function, *function.callees()) for op in f.ops]
    return Counter(
        op.spec.name
        for op in ops
        if op.spec.comm is not None and "axis" in op.attributes and axis in (None, *_axes(op))
    )


def _axes(op: Op) -> tuple[AxisNames, ...]:
    """What a collective is along: each axis, and all of them."""
    axis = op.attributes["axis"]
    return (axis,) if isinstance(axis, str) else (*axis, axis)
