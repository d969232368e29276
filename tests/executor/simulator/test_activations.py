"""What a layer of a transformer saves for its backward pass, against published closed forms.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), sections 4 and
5, for 16 bits, with dropout, and attention that is not fused. s: length of the sequence, b: sequences in a microbatch,
h: hidden size, a: heads, t: shards of tensor parallelism. None of these is written into the package: the bytes follow
from which values the backward ops use, and from their types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from distir.api.compilation import distribute
from distir.api.model import Model, load
from distir.executor.cost_model import CostModel
from distir.executor.simulator.categories import ACTIVATION, CATEGORIES, GRADIENT, PARAMETER
from distir.executor.simulator.memory import MemoryUse
from distir.executor.simulator.simulation import Simulation, Simulator
from distir.hardware import load_cluster
from distir.transforms.pipeline.recompute import _saving, saved_bytes
from distir.transforms.plan import Plan
from tests.transforms.pipeline.test_recompute import placed

SIZES = [(2048, 1, 12_288, 96), (2048, 4, 6144, 64), (1024, 2, 2048, 16), (2048, 1, 20_480, 128), (512, 3, 1024, 8)]
"""(s, b, h, a): GPT-3 with 175 billion parameters, Megatron's with 22 and 530 billion, and smaller ones."""
FORMS: dict[str, tuple[Plan, Callable[[float, int], float]]] = {
    "no parallelism": (Plan(), lambda x, t: 34 + 5 * x),
    "tensor": (Plan(tp=8), lambda x, t: 10 + 24 / t + 5 * x / t),
    "tensor, by two": (Plan(tp=2), lambda x, t: 10 + 24 / t + 5 * x / t),
    "tensor and sequence": (
        Plan(tp=8, sequence_parallel=True, recompute="gathers"),
        lambda x, t: (34 + 5 * x) / t,
    ),
    "tensor, sequence and context": (
        Plan(tp=4, sequence_parallel=True, split=("cp=2:*.1",), recompute="gathers"),  # type: ignore[arg-type]
        lambda x, t: (34 + 5 * x) / t / 2,
    ),
    "attention recomputed": (Plan(recompute="attention"), lambda x, t: 34),
    "tensor, attention recomputed": (Plan(tp=8, recompute="attention"), lambda x, t: 10 + 24 / t),
    "tensor and sequence, attention recomputed": (
        Plan(tp=8, sequence_parallel=True, recompute="attention"),
        lambda x, t: 34 / t,
    ),
    "all recomputed": (Plan(recompute="full"), lambda x, t: 2),
    "tensor, all recomputed": (Plan(tp=8, recompute="full"), lambda x, t: 2),
}
"""Bytes by sbh; x: as/h."""
CASES = [(form, SIZES[0]) for form in FORMS] + [(form, s) for form in ("no parallelism", "tensor") for s in SIZES[1:]]
CLOSE = 0.03


@functools.cache
def model(layers: int, s: int, b: int, h: int, a: int, precision: str = "fp16", dropout: float = 0.1) -> Model:
    more = f"dropout={dropout}" if dropout else "attention=unfused"
    text = f"gpt:layers={layers},hidden={h},heads={a},seq={s},batch={b},vocab=51200,{more}"
    return load(text, loss="cross-entropy", optimizer="adamw", precision=precision)


def simulated(m: Model, plan: Plan) -> Simulation:
    """Not validated: that takes longer than all the rest, and is tested elsewhere."""
    topology = load_cluster("dgx-a100", None, plan.size)
    program = distribute(m, plan, topology.devices[: plan.size], check=False)
    return Simulator(CostModel(topology)).interpret(program)


def memory(m: Model, plan: Plan) -> MemoryUse:
    """That of the first device."""
    simulation = simulated(m, plan)
    return simulation.memory(next(iter(simulation.peak_memory)))


def saved(m: Model, plan: Plan) -> int:
    """The most bytes of activations that the first device has between two phases."""
    return max(point.after[ACTIVATION] for point in memory(m, plan).curve)


@pytest.mark.parametrize(("form", "size"), CASES, ids=str)
def test_bytes_of_a_layer(form: str, size: tuple[int, int, int, int]) -> None:
    s, b, h, a = size
    plan, bytes_by_sbh = FORMS[form]
    fewer, more = [saved(model(layers, *size), plan) for layers in (3, 4)]
    want = s * b * h * bytes_by_sbh(a * s / h, plan.tp)
    assert more - fewer == pytest.approx(want, rel=CLOSE)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_two_microbatches_are_in_flight_on_the_first_of_two_stages(precision: str) -> None:
    """Each with the layers of its stage: section 4.2.3."""
    s, b, h, a = 1024, 2, 2048, 16
    plan = Plan(pp=2, microbatches=4, tp=2)
    by_layers = [saved(model(layers, s, 4 * b, h, a, precision), plan) for layers in (4, 6)]
    want = s * b * h * (10 + 24 / 2 + 5 * a * s / h / 2)
    assert by_layers[1] - by_layers[0] == pytest.approx(2 * want, rel=CLOSE)


def test_without_dropout_no_mask_is_saved() -> None:
    """Of 34 + 5 as/h two masks of sbh go, and of attention its mask and the probabilities after it."""
    s, b, h, a = size = 1024, 2, 2048, 16
    fewer, more = [saved(model(layers, *size, dropout=0.0), Plan()) for layers in (3, 4)]
    assert more - fewer == pytest.approx(s * b * h * (32 + 2 * a * s / h), rel=CLOSE)


def test_what_a_plan_saves_is_what_memory_shows() -> None:
    """The bytes by which recomputation chooses, and those of live memory, grow alike from layer to layer."""
    size = 1024, 2, 2048, 16
    for plan in (Plan(), Plan(tp=4), Plan(tp=4, sequence_parallel=True)):
        models = model(3, *size), model(4, *size)
        fewer, more = [saved_bytes(_saving(placed(m.function, plan)), ()) for m in models]
        assert more - fewer == pytest.approx(saved(models[1], plan) - saved(models[0], plan), rel=1e-3)


def test_activations_are_no_weights_and_no_gradients() -> None:
    """A weight in 16 bits counts with the weights; gradients count as such with one microbatch too."""
    m = model(3, 1024, 2, 2048, 16)
    parameters = sum(v.type.bytes for v in m.function.inputs if v.kind == "parameter")
    for plan in (Plan(), Plan(microbatches=2)):
        curve = memory(m, plan).curve
        most = [max(point.after[k] for point in curve) for k in range(len(CATEGORIES))]
        assert most[PARAMETER] == pytest.approx(1.5 * parameters, rel=0.01)
        assert most[GRADIENT] == pytest.approx(parameters, rel=0.01)
        assert curve[-1].after[ACTIVATION] == 0
