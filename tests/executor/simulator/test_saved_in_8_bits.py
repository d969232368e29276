"""What forward passes save under a runtime that saves what its products have quantized."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from distir.api.compilation import distribute
from distir.api.model import Model, load
from distir.executor.cost_model import CostModel
from distir.executor.simulator.categories import ACTIVATION
from distir.executor.simulator.saved_in_8_bits import least_share
from distir.executor.simulator.simulation import Simulator
from distir.hardware import load_cluster, load_runtime
from distir.ir.host_runtime import Runtime
from distir.transforms.plan import Plan

TE = load_runtime("megatron-core+fp8")
SEQUENCE, BATCH, HIDDEN, HEADS = 2048, 4, 4096, 32


@functools.cache
def model(layers: int) -> Model:
    sizes = f"layers={layers},hidden={HIDDEN},heads={HEADS},seq={SEQUENCE},batch={BATCH},vocab=51200"
    return load(f"gpt:{sizes}", loss="cross-entropy", optimizer="adamw", precision="bf16")


def saved(layers: int, plan: Plan, runtime: Runtime) -> int:
    """The most bytes of activations that the first device has between two phases, after one microbatch."""
    m = model(layers)
    topology = load_cluster("dgx-h100", None, plan.size)
    program = distribute(m, plan, topology.devices[: plan.size], check=False)
    simulation = Simulator(CostModel(topology, runtime=runtime)).interpret(program)
    curve = simulation.memory(next(iter(simulation.peak_memory))).curve
    return max([point.after[ACTIVATION] for point in curve])


def of_a_layer(plan: Plan, runtime: Runtime) -> float:
    """Bytes a layer, by sbh."""
    more = saved(4, plan, runtime) - saved(2, plan, runtime)
    return more / 2 / (SEQUENCE * BATCH * HIDDEN)


@pytest.mark.parametrize(
    ("plan", "saving"),
    [
        # two bytes become one: inputs of queries (1), and of products of the MLP (1 and 4); the output of attention,
        # which its gradient takes, has a copy in 8 bits for the product (-1)
        (Plan(), 5.0),
        (Plan(tp=4, sequence_parallel=True, recompute="gathers"), 5.0 / 4),
        # not split along the sequence, two inputs are whole on each device
        (Plan(tp=4), 2.0 + 3.0 / 4),
        # what is made again is quantized again; the input of a block is none of a product
        (Plan(recompute="full"), 0.0),
    ],
    ids=str,
)
def test_a_layer_saves_the_inputs_of_products_in_8_bits(plan: Plan, saving: float) -> None:
    plain = of_a_layer(plan, replace(TE, fp8_saved=False))
    assert plain - of_a_layer(plan, TE) == pytest.approx(saving, rel=1e-3, abs=1e-3)


def test_runtimes_that_save_16_bits() -> None:
    plain = of_a_layer(Plan(), load_runtime("megatron-core"))
    assert of_a_layer(Plan(), replace(TE, fp8_saved=False)) == plain
    assert of_a_layer(Plan(), TE) < plain
    assert of_a_layer(Plan(), load_runtime("torchtitan+fp8")) >= plain  # PyTorch quantizes again


def test_the_input_of_the_head_stays_in_16_bits() -> None:
    m, n = saved(1, Plan(), TE), saved(1, Plan(), replace(TE, fp8_saved=False))
    assert n - m == 5 * SEQUENCE * BATCH * HIDDEN


def test_a_bound_counts_half() -> None:
    assert least_share(TE) == 0.5
    assert least_share(load_runtime("megatron-core")) == least_share(None) == 1.0
