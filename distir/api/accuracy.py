"""The accuracy of predictions: measured training runs (`distir.api.cases`), each predicted by the simulator.

    for row in read_rows("cases.csv"):
        if row.setup:
            program = program_of(row)
            print(row.id, row.measured_seconds, predict(row, program).seconds)

A prediction has two halves. `program_of` builds what a row describes, and keeps it; `predict` prices it, and can be
called again with another cost model, to fit constants.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

from distir.api.cases import CLIP_NORM, Measurement, Perceptron, Setup, read_rows, reason_of, runtime_named
from distir.api.compilation import distribute, simulated
from distir.api.model import Model, Precision
from distir.api.scores import Case, Scores, scores
from distir.api.stage_cost import stage_cost
from distir.executor.cost_model import CostModel
from distir.executor.simulator.simulation import Simulation
from distir.hardware import among, host_cores, load_cluster
from distir.ir.device import Device
from distir.ir.errors import DistirError, UsageError
from distir.ir.function import Function
from distir.ir.pause import no_collection
from distir.models.decoder import Decoder, decoder
from distir.models.mlp import mlp
from distir.runtime.forked import can_fork, forked
from distir.transforms.differentiation.training import optimizer_named

GIB = 1 << 30
_PEAK = "peak of memory"
_RECENT = 2
"""Models and programs that are kept for further rows: those of a model come one after the other (`in_turn`)."""
_PROCESSES = 8
"""The most that predict rows side by side: programs of the largest models take a gigabyte of each."""


class Predicted(NamedTuple):
    """Predicted seconds of a step, and the peak of memory in bytes on the device that needs most: of what was measured
    (`Measurement.peak_of`)."""

    seconds: float
    peak_bytes: int


class Scored(NamedTuple):
    """A row and its prediction, or the reason why there is none; the seconds it took to build its program and to
    predict."""

    row: Measurement
    predicted: Predicted | None
    reason: str | None
    build_seconds: float = 0.0
    predict_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Seconds, and GiB of memory."""
        return {
            "id": self.row.id,
            "measured_step_s": self.row.measured_seconds,
            "predicted_step_s": self.predicted and self.predicted.seconds,
            "measured_peak_gib": self.row.measured_gib,
            "predicted_peak_gib": self.predicted and self.predicted.peak_bytes / GIB,
            "reason": self.reason,
        }


class Accuracy(NamedTuple):
    """Every row with its prediction, in the order of the file, and the scores of each source."""

    rows: list[Scored]
    sources: dict[str, Scores]

    def to_json(self) -> dict[str, Any]:
        """Errors as shares, times in seconds, memory in GiB."""
        return {
            "sources": {name: found._asdict() for name, found in self.sources.items()},
            "rows": [scored.to_json() for scored in self.rows],
        }


def accuracy(
    path: str | os.PathLike[str],
    sources: Collection[str] = (),
    on_row: Callable[[int, int], None] | None = None,
) -> Accuracy:
    """Predict the rows of a file of measured runs, and score the predictions; of these sources only, if any are given.

    Rows are predicted side by side, by a process for each core where the system forks processes. `on_row(k, n)` is
    called when one more of n is done, k before it. Raises UsageError for a file that cannot be read or has no rows (see
    `read_rows`), or an unknown source, WorkerError if one of the processes is ended from outside.
    """
    rows = read_rows(path)
    known = list(dict.fromkeys(row.source for row in rows))
    for name in sources:
        if name not in known:
            raise UsageError(f"{os.fspath(path)} has no rows of the source {name!r}", f"it has {', '.join(known)}")
    rows = [row for row in rows if not sources or row.source in sources]
    found: dict[Measurement, Scored] = {}
    for k, scored in enumerate(_scored(in_turn(rows))):
        found[scored.row] = scored
        if on_row is not None:
            on_row(k, len(rows))
    scored = [found[row] for row in rows]
    return Accuracy(scored, scores_of(scored))


def in_turn(rows: Iterable[Measurement]) -> list[Measurement]:
    """The rows of each model one after the other, the models in the order in which they occur."""
    by_model: dict[object, list[Measurement]] = {}
    for row in rows:
        key = row.setup and (row.setup.model, row.setup.precision, row.setup.optimizer)
        by_model.setdefault(key, []).append(row)
    return [row for same in by_model.values() for row in same]


def _scored(rows: Sequence[Measurement]) -> Iterator[Scored]:
    """Each row's prediction, as they are ready."""
    jobs = min(host_cores(), len(rows), _PROCESSES)
    if jobs == 1 or not can_fork():
        yield from map(score, rows)
        return
    with forked(jobs, "distir-accuracy", "the predictions") as pool:
        for future in as_completed([pool.submit(score, row) for row in rows]):
            yield future.result()


@no_collection()  # each collection would go through all programs that are kept
def score(row: Measurement) -> Scored:
    """A row's prediction. A row that distir cannot express has a reason instead."""
    if row.setup is None:
        return Scored(row, None, row.reason)
    begin = time.perf_counter()
    try:
        program = program_of(row)
        built = time.perf_counter()
        predicted = predict(row, program)
    except DistirError as e:
        return Scored(row, None, reason_of(e))
    return Scored(row, predicted, None, built - begin, time.perf_counter() - built)


def program_of(row: Measurement) -> Function:
    """The distributed program of a row; rows of equal setups and runtimes share one. Raises DistirError if there can be
    none."""
    return _program(_setup_of(row), row.runtime)


def predict(row: Measurement, program: Function, cost: CostModel | None = None) -> Predicted:
    """The predicted step of a row whose program is built, by the cost model of its cluster or another one.

    Streams run beside each other, as on GPUs: whether reductions of gradients wait for the backward pass is in the
    program. The peak of memory does not depend on seconds: it is computed with the first prediction on a cluster.
    """
    setup = _setup_of(row)
    simulation = simulated(program, replace(setup.plan, overlap=True), cost or cost_of(row))
    key = _PEAK, row.peak_of, setup.cluster, row.runtime
    if key not in program.cache:
        program.cache[key] = max(_peaks(simulation, row.peak_of).values(), default=0)
    return Predicted(simulation.seconds, program.cache[key])


def _peaks(simulation: Simulation, of: str) -> Mapping[Device, int]:
    """The peak of each device's memory: of what is allocated, reserved or used."""
    if of == "used":
        return simulation.peak_memory
    return simulation.reserved_memory if of == "reserved" else simulation.allocated_memory


def cost_of(row: Measurement) -> CostModel:
    """The cost model of a row's cluster, with as many nodes as the row needs, and of the software that executed it.

    Raises UsageError if there is no such cluster or runtime.
    """
    setup = _setup_of(row)
    return _cost(setup.cluster, setup.plan.size, row.runtime)


def fits(scored: Scored) -> bool:
    """Whether the memory that is predicted for a row is there; True for one that is not predicted."""
    setup, predicted = scored.row.setup, scored.predicted
    return setup is None or predicted is None or predicted.peak_bytes <= _capacity(setup.cluster)


def scores_of(rows: Collection[Scored]) -> dict[str, Scores]:
    """The scores of each source, in the order in which they occur."""
    found: dict[str, list[Case]] = {scored.row.source: [] for scored in rows}
    for scored in rows:
        if (case := _case(scored)) is not None:
            found[scored.row.source].append(case)
    return {name: scores(cases) for name, cases in found.items()}


def _case(scored: Scored) -> Case | None:
    row, predicted = scored.row, scored.predicted
    if predicted is None or row.measured_seconds is None or row.setup is None:
        return None
    sizes = replace(row.setup.model, batch=1)
    if isinstance(sizes, Decoder):
        sizes = sizes.layers, sizes.hidden, sizes.heads, sizes.seq, sizes.vocab
    choice = sizes, row.setup.plan.size, row.setup.model.batch
    return Case(row.measured_seconds, predicted.seconds, sizes, choice, row.measured_gib, predicted.peak_bytes / GIB)


def _setup_of(row: Measurement) -> Setup:
    if row.setup is None:
        raise UsageError(f"{row.id} cannot be predicted: {row.reason}")
    return row.setup


@lru_cache(maxsize=_RECENT)
def _program(setup: Setup, runtime: str) -> Function:
    model = _model(setup.model, setup.precision, setup.optimizer)
    cost = _cost(setup.cluster, setup.plan.size, runtime)
    devices = cost.topology.devices[: setup.plan.size]
    return distribute(model, setup.plan, devices, cost=stage_cost(cost, setup.plan))


@cache
def _cost(cluster: str, devices: int, runtime: str) -> CostModel:
    topology = load_cluster(cluster, devices=devices)
    kind, per_node = topology.devices[0].kind, topology.regular and topology.regular.per_node
    return CostModel(topology, runtime=among(runtime_named(runtime, cluster), devices, kind, per_node))


@cache
def _capacity(cluster: str) -> float:
    """The bytes of memory of a device."""
    topology = load_cluster(cluster)
    return topology.spec(topology.devices[0]).capacity


@lru_cache(maxsize=_RECENT)
def _model(sizes: Decoder | Perceptron, precision: Precision, optimizer: str | None) -> Model:
    """The training step; of a perceptron its forward and backward pass."""
    if isinstance(sizes, Perceptron):
        return Model(mlp(sizes.layers, sizes.batch, sizes.hidden))
    settings = optimizer_named(optimizer or "sgd", clip_norm=CLIP_NORM)
    return Model(decoder(sizes)).training("cross-entropy", settings, precision=precision)
