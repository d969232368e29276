"""Memory of whole models, as Korthikanti et al. publish it, against what their programs take.

"Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), figure 1, with the models, sizes and
pipelines of its table 3. Activations are those of the first stage, which has the most microbatches in flight;
parameters, gradients and optimizer state those of a stage of layers alone, as the published figures count no
embedding. Pipelines get as few microbatches as fill them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from distir.executor.simulator.categories import ACTIVATION, GRADIENT, PARAMETER, STATE
from distir.transforms.plan import Plan
from tests.executor.cost_model.test_measured_collectives import SHARED, rows
from tests.executor.simulator.test_activations import model, simulated

FILE = "korthikanti_memory_gib.csv"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.exists(), reason="no published figures: ../shared is absent"),
]
CLOSE = 0.05
TP = 8


class Published(NamedTuple):
    """Layers, hidden size, heads, sequences of a microbatch, pipeline ranks and chunks of one."""

    layers: int
    hidden: int
    heads: int
    micro: int
    pp: int
    chunks: int


MODELS = {
    "megatron-22B": Published(48, 6144, 64, 4, 1, 1),
    "gpt3-175B": Published(96, 12_288, 96, 1, 8, 3),
    "turing-530B": Published(105, 20_480, 128, 1, 35, 3),
    "megatron-1T": Published(128, 25_600, 160, 1, 64, 1),
}
MODES = {
    "none(TP only)": Plan(tp=TP),
    "seqpar+selective": Plan(tp=TP, sequence_parallel=True, recompute="attention"),
}


def published(name: str, mode: str) -> float:
    """GiB."""
    (found,) = [float(row["paper_gib"]) for row in rows(FILE) if (row["model"], row["mode"]) == (name, mode)]
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_memory_is_as_published(name: str, mode: str) -> None:
    layers, hidden, heads, micro, pp, chunks = MODELS[name]
    count = pp if chunks == 1 else 2 * pp
    schedule = "1f1b" if chunks == 1 else "interleaved"
    plan = replace(MODES[mode], pp=pp, microbatches=count, schedule=schedule, chunks=chunks)
    simulation = simulated(model(layers, 2048, micro * count, hidden, heads), plan)
    devices = list(simulation.peak_memory)
    first, inner = (simulation.memory(devices[k * TP]).curve for k in (0, pp // 2))
    assert max(p.after[ACTIVATION] for p in first) / 2**30 == pytest.approx(published(name, mode), rel=CLOSE)
    kept = sum(max(p.after[k] for p in inner) for k in (PARAMETER, GRADIENT, STATE))
    assert kept / 2**30 == pytest.approx(published(name, "any"), rel=CLOSE)
