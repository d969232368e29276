"""Figures of a program: what every plan has alike."""

import pytest

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
