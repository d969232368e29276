"""Fits recover the figures from which timings were made, exactly and with noise."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from distir.executor.cost_model.fitting import (
    ProductFit,
    Sample,
    errors,
    fit_products,
    fit_robust,
    fit_speed,
    fit_speeds,
    fit_transfer,
    huber,
    nearest,
    nonnegative,
)
from distir.ir.topology import OpSpeed

SIZES = [(64, 64, 64), (32, 256, 64), (256, 256, 256), (512, 64, 1024), (1024, 1024, 512), (8, 1024, 1024)]
PRODUCTS = OpSpeed(4e-6, 1e11, 2e10)


def products(speed: OpSpeed, noise: float = 0.0, repeats: int = 1) -> list[Sample]:
    rng = random.Random(0)
    work = [(2.0 * m * k * n, 4.0 * (m * k + k * n + m * n)) for m, k, n in SIZES * repeats]
    return [
        Sample("MatMul", "f32", "product", f, b, speed.seconds(f, b) * rng.uniform(1 - noise, 1 + noise))
        for f, b in work
    ]


def test_exact_timings_give_back_the_speed() -> None:
    found = fit_speed(products(PRODUCTS))
    assert found == pytest.approx(PRODUCTS, rel=1e-6)


def test_noisy_timings_give_nearly_the_speed() -> None:
    found = fit_speed(products(PRODUCTS, noise=0.05, repeats=20))
    assert found.launch == pytest.approx(PRODUCTS.launch, rel=0.1)
    assert found.flops == pytest.approx(PRODUCTS.flops, rel=0.1)


def test_disturbed_timings_are_left_out() -> None:
    samples = products(PRODUCTS, repeats=4)
    samples[3] = samples[3]._replace(seconds=samples[3].seconds * 20)
    assert fit_speed(samples) == pytest.approx(PRODUCTS, rel=1e-6)


def test_pointwise_ops_have_no_rate_of_flops() -> None:
    speed = OpSpeed(1e-6, math.inf, 5e9)
    samples = [Sample("Gelu", "f32", "", 8.0 * n, 8.0 * n, speed.seconds(0, 8.0 * n)) for n in (100, 10_000, 1_000_000)]
    assert fit_speed(samples) == pytest.approx(speed, rel=1e-6)


def test_products_have_a_half_size() -> None:
    fit = ProductFit(3e-6, 1e11, 5e6)
    sizes = [1e4, 1e6, 1e8, 1e10]
    samples = [Sample("MatMul", "f32", "product", f, 0.0, fit.seconds(f)) for f in sizes]
    assert fit_products(samples) == pytest.approx(fit, rel=1e-5)


def test_no_product_is_quicker_than_the_fastest() -> None:
    """Of sizes whose FLOPs grow as their bytes do, the seconds may all be due to bytes: larger products would take no
    time to speak of."""
    work = [(256.0 * n, 16.0 * n) for n in (1e3, 1e4, 1e5)]
    samples = [Sample("MatMul", "f32", "product", f, b, b / 1e9) for f, b in work]
    assert fit_speed([s._replace(kernel="") for s in samples]) == pytest.approx(OpSpeed(0.0, math.inf, 1e9))
    found = fit_speeds([*samples, *[s._replace(op="Add", kernel="") for s in samples]], fastest={"f32": 2e10})
    assert found["MatMul", "f32"].flops <= 2e10 * (1 + 1e-9)
    assert [found["MatMul", "f32"].seconds(s.flops, s.bytes) for s in samples] == pytest.approx(
        [b / 1e9 for _, b in work]
    )
    assert found["Add", "f32"].flops == math.inf


def test_slow_products_keep_their_rate() -> None:
    assert fit_speed(products(PRODUCTS), fastest=2e11) == pytest.approx(PRODUCTS, rel=1e-6)


def test_an_op_of_one_size_has_no_speed() -> None:
    one = [Sample("Neg", "f32", "", 1.0, 8.0, 1e-6)] * 5
    assert fit_speeds(one) == {}
    assert list(fit_speeds([*one, *products(PRODUCTS)])) == [("MatMul", "f32")]


def test_no_coefficient_is_negative() -> None:
    """The least squares would have a negative constant."""
    a, b = nonnegative([[1.0] * 3, [1.0, 2.0, 3.0]], [1.0, 3.0, 5.0])
    assert a == 0
    assert 1.2 < b < 1.7
    assert fit_robust([[0.0] * 3, [1.0, 2.0, 3.0]], [2.0, 4.0, 6.0]) == pytest.approx([0.0, 2.0])


def test_transfers() -> None:
    sizes = [1e3, 1e5, 1e7]
    assert fit_transfer(sizes, [9e-5 + n / 5e9 for n in sizes]) == pytest.approx((9e-5, 5e9))


def test_transfers_whose_seconds_do_not_grow_have_a_rate() -> None:
    latency, rate = fit_transfer([1e3, 1e4, 1e5], [3e-5, 2e-5, 1e-5])
    assert latency > 0
    assert rate == pytest.approx(1e10)


def test_errors() -> None:
    found = errors([1.1, 0.8], [1.0, 1.0])
    assert (found.mean, found.worst, found.count) == (pytest.approx(0.15), pytest.approx(0.2), 2)
    assert errors([], []).count == 0


def test_the_square_of_huber_is_twice_hubers_loss() -> None:
    near = 0.1
    for x in (0.0, 0.05, -0.1, 0.3, -2.0):
        loss = x * x / 2 if abs(x) <= near else near * (abs(x) - near / 2)
        assert huber(x, near) ** 2 == pytest.approx(2 * loss)
        assert math.copysign(1.0, huber(x, near)) == math.copysign(1.0, x)


def test_the_nearest_stays_within_limits() -> None:
    def f(x):
        seen.append(x)
        return [math.log(x[0] / 3), math.log(x[1] / 50)]

    seen: list[list[float]] = []
    assert nearest(f, [1.0, 10.0], [(0.1, 100.0), (0.1, 10.0)]) == pytest.approx([3.0, 10.0], rel=0.01)
    assert max([b for _, b in seen]) < 10.0 * (1 + 1e-9)
    assert nearest(f, [1.0, 1.0], [(0.1, 100.0), (0.1, 10.0)]) == pytest.approx([3.0, 10.0], rel=0.01)
    assert nearest(f, [1.0, 1.0], [(0.1, 2.0), (0.1, 100.0)]) == pytest.approx([2.0, 50.0], rel=0.01)


def test_the_nearest_in_a_narrow_valley() -> None:
    """Two numbers that nearly replace each other: one after the other they would hardly move."""

    def f(x):
        return [math.log(x[0] * x[1] / 20), 0.05 * math.log(x[0] / x[1] / 5), 0.3 * (x[2] - 2) ** 2]

    found = nearest(f, [1.0, 1.0, 1.0], [(1e-3, 1e3)] * 3)
    assert found[:2] == pytest.approx([10.0, 2.0], rel=0.02)
    assert found[2] == pytest.approx(2.0, rel=0.05)


def test_the_nearest_where_a_number_makes_no_difference() -> None:
    assert nearest(lambda x: [math.log(x[0] / 3)], [1.0, 5.0], [(0.1, 10.0)] * 2) == pytest.approx([3.0, 5.0], rel=0.01)


def test_a_search_ends_when_little_is_left_to_gain() -> None:
    """Of a large sum of squares that no number lowers: the first step to it gains a tenth, the next ones next to
    nothing. By default they are taken."""

    def search(little: float) -> tuple[int, float]:
        tried: list[float] = []

        def far(x: Sequence[float]) -> list[float]:
            tried.append(x[0])
            return [10.0, math.log(x[0] / 20) ** 3]

        (found,) = nearest(far, [1.0], [(0.1, 1000.0)], little)
        return len(tried), math.log(found / 20) ** 6

    (few, left), (most, least) = search(0.01), search(0.0)
    assert few < most
    assert least < left < 0.01 * 100
