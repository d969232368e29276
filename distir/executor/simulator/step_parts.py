"""Where the time of a step goes: disjoint parts of it, for each class of devices, that add up to the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from distir.executor.cost_model.seconds import work
from distir.executor.simulator.busy import Labels, count
from distir.executor.simulator.intervals import NO_INTERVALS, Intervals, clipped, covering, length, merged
from distir.executor.simulator.labels import SEND, axis_text
from distir.executor.simulator.maxplus import OpPart
from distir.executor.simulator.simulation import Simulation
from distir.executor.simulator.work_kinds import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    RECOMPUTED,
    UPDATE,
    kinds_of_work,
    stages_of,
)
from distir.ir.function import Op
from distir.ir.pause import no_collection

IDEAL, BELOW_PEAK, RECOMPUTATION, OPTIMIZER = "ideal compute", "below peak", "recomputation", "optimizer"
WARM_UP, IMBALANCE, DEPENDENCY = "warm-up", "imbalance", "dependency"
COMPUTE_PARTS, BUBBLES = (IDEAL, BELOW_PEAK, RECOMPUTATION, OPTIMIZER), (WARM_UP, IMBALANCE, DEPENDENCY)
PASSES = frozenset([FORWARD, BACKWARD, RECOMPUTED, UPDATE, COMPUTE])
FAN = "host"
"""The label of transfers between one device and a mesh."""


class StageParts(NamedTuple):
    """The parts of a step on a class of devices, in seconds; they add up to the step.

    - "ideal compute": the FLOPs of matrix products, convolutions and attention at the device's peak, but for those that
      are recomputed;
    - "below peak": what these products take longer, and all other compute of the forward and backward passes;
    - "recomputation": compute that the backward pass repeats;
    - "optimizer": compute of the update;
    - `exposed`: communication while the device does not compute, by mesh axis, "send" between stages; where several
      are under way at once, each has an equal share;
    - bubble: "warm-up", while the pipeline fills or drains: before the class's first backward pass begins, or after its
      last forward pass ends (with one stage: before its first and after its last work); "imbalance", by how much the
      busiest class is busier, at most the rest of the bubble; "dependency", the rest: waiting for other stages or the
      host.
    """

    name: str
    devices: int
    compute: dict[str, float]
    exposed: dict[str, float]
    bubble: dict[str, float]

    @property
    def parts(self) -> dict[str, float]:
        """All of them, in this order."""
        return {**self.compute, **self.exposed, **self.bubble}


@no_collection()
def step_parts(simulation: Simulation) -> list[StageParts]:
    """The parts of a simulated step, for each class of devices, in order of devices."""
    left = count(simulation.run, _Labels(simulation).labels())
    classes, step = simulation.program.classes, simulation.seconds
    every = range(len(classes.sizes))
    busy = [{label: x for (k, label), x in left.busy.items() if k == c} for c in every]
    union = [merged(list(streams.values())) for streams in busy]
    most = max((length(u) for u in union), default=0.0)
    pipelined = len(stages_of(simulation.program.function)) > 1
    rows: list[StageParts] = []
    for c in every:
        compute = {part: left.compute.get((c, part), 0.0) for part in COMPUTE_PARTS}
        begin, end = _steady(busy[c], union[c], pipelined)
        inside = end - begin - length(clipped(union[c], begin, end))
        idle = step - length(union[c])
        imbalance = min(inside, most - length(union[c]))
        bubble = {WARM_UP: idle - inside, IMBALANCE: imbalance, DEPENDENCY: inside - imbalance}
        rows.append(StageParts(classes.label(c), classes.sizes[c], compute, _exposed(busy[c]), bubble))
    return rows


def _steady(streams: Mapping[str, Intervals], union: Intervals, pipelined: bool) -> tuple[float, float]:
    """From when to when the pipeline is full, for a class: an empty interval if it never is."""
    if not len(union):
        return 0.0, 0.0
    forward, backward, again = [streams.get(kind, NO_INTERVALS) for kind in (FORWARD, BACKWARD, RECOMPUTED)]
    if not pipelined or not len(forward) or not len(backward):
        return float(union[0, 0]), float(union[-1, 1])
    begin = min(float(x[0, 0]) for x in (again, backward) if len(x))
    return begin, max(begin, float(forward[-1, 1]))


def _exposed(busy: Mapping[str, Intervals]) -> dict[str, float]:
    """The seconds in which streams communicate while none computes, by label; divided where several do."""
    compute = [x for label, x in busy.items() if label in PASSES]
    labels = sorted(busy.keys() - PASSES)
    seconds, active = covering([*[busy[label] for label in labels], *compute])
    communicates, computes = active[: len(labels)], active[len(labels) :].any(axis=0)
    share = np.where(computes, 0.0, seconds) / np.maximum(communicates.sum(axis=0), 1)
    return dict(zip(labels, (communicates * share).sum(axis=1).tolist(), strict=True))


class _Labels:
    """Labels parts by what they are for."""

    def __init__(self, simulation: Simulation) -> None:
        self._program = simulation.program
        self._kinds = kinds_of_work(simulation.program.function)

    def labels(self) -> Labels:
        """As `count` takes them."""
        return Labels(self.kind, self.stream, self.compute)

    def kind(self, op: Op) -> str:
        """The kind of work of an op."""
        return self._kinds.get(op, COMPUTE)

    def stream(self, op: Op, part: OpPart) -> str:
        """The kind of work of compute; of communication the axes of a collective, SEND or FAN."""
        if not part.communicates:
            return self.kind(op)
        if op.spec.route == "axis":
            return axis_text(op.attributes["axis"])
        return SEND if op.spec.route == "send" else FAN

    def compute(self, op: Op, part: OpPart) -> list[tuple[str, float]]:
        """The part's seconds, by what they are for."""
        kind = self.kind(op)
        if kind == RECOMPUTED:
            return [(RECOMPUTATION, part.duration)]
        if kind == UPDATE:
            return [(OPTIMIZER, part.duration)]
        ideal = min(part.duration, self._at_peak(op, part))
        return [(IDEAL, ideal), (BELOW_PEAK, part.duration - ideal)]

    def _at_peak(self, op: Op, part: OpPart) -> float:
        """The seconds of a product's FLOPs at the device's peak; 0 for other ops."""
        if op.spec.kernel is None or op.spec.comm is not None:
            return 0.0
        ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
        cost = self._program.cost
        spec = cost.topology.spec(self._program.classes.first[part.classes[0]])
        return work(op.spec, op.attributes, ins, outs, cost.zigzag)[0] / cost.peak(op.spec, ins, outs, spec)
