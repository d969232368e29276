"""Figures of a program: what every plan has alike."""

import pytest

import distir
from distir.api.figures import flops, parameters
from distir.ir.device import Device
from distir.models import gpt
from distir.transforms.differentiation.training import SGD, training_step
from distir.transforms.parallel3d import parallel_transform_3d


@pytest.mark.parametrize(("d", "h", "p", "microbatches"), [(2, 1, 1, 1), (1, 2, 1, 4), (1, 1, 2, 8), (2, 1, 2, 2)])
def test_a_plan_has_the_parameters_and_flops_of_its_model(d: int, h: int, p: int, microbatches: int):
    """Microbatches are no devices: each runs a part of the work. What plans add (sums of gradients, what tp computes
    on each of its devices) is small."""
    step = training_step(gpt(2, 64, 4, 64, 32, 16), "cross-entropy", SGD())
    program = parallel_transform_3d(step, d, h, p, [Device("cpu", i) for i in range(d * h * p)], microbatches)
    assert parameters(program) == parameters(step)
    assert flops(step) <= flops(program) <= 1.02 * flops(step)


@pytest.mark.parametrize(("precision", "expected"), [("bf16", {"bf16": "f32"}), ("fp16", {}), ("fp32", {})])
def test_a_prediction_names_the_dtypes_that_the_devices_have_no_peak_of(
    precision: str, expected: dict[str, str]
) -> None:
    model = distir.load("gpt:layers=1,hidden=64,heads=2,seq=16,vocab=64,batch=2").training(
        "cross-entropy", precision=precision
    )
    found = distir.simulate(model, cluster="dgx-v100", nodes=1)
    assert distir.explain(model, cluster="dgx-v100", nodes=1).to_json()["without_peak"] == expected
    assert found.without_peak == found.to_json()["without_peak"] == expected
    assert ("no peak of bf16: its products are predicted at the speed of f32" in str(found)) == bool(expected)
