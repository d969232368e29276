"""Products in whole tiles and waves, against figures by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.ir.tiles import SIDES, Product, Tiles

PEAK = 1e12


def ideal(product: Product) -> float:
    return 2 * product.batch * product.m * product.n * product.k / PEAK


@pytest.mark.parametrize(
    ("product", "batched", "longer"),
    [
        (Product(1, 256, 256, 64), 32, 1),  # four tiles of 128 by 128, one a multiprocessor
        (Product(1, 257, 256, 64), 32, 288 / 257),  # 36 tiles of 32 by 64 in nine waves
        (Product(5, 128, 128, 64), 128, Fraction(8, 5)),  # five tiles in two waves, of which the last has one
        (Product(5, 128, 128, 64), 32, 1),  # 20 tiles of 64 by 64 in five
        (Product(8, 64, 128, 64), 128, 2),  # half of each tile is empty
        (Product(8, 64, 128, 64), 64, 1),
        (Product(1, 64, 64, 64), 128, 1),  # the least side is that of batched products alone
    ],
)
def test_tiles_and_waves_count_whole(product: Product, batched: int, longer: float) -> None:
    assert Tiles(4, batched=batched).seconds(product, PEAK) == pytest.approx(ideal(product) * longer)


def test_small_tiles_load_more_and_short_products_fill_pipelines() -> None:
    whole, narrow = Product(1, 128, 128, 96), Product(1, 32, 32, 96)
    one = Tiles(1, 0.5, edge=64.0)  # a tile of 128 by 128 loads a 64th of an element a FLOP: twice as long, as in 0.5
    assert one.seconds(whole, PEAK) == pytest.approx(2 * ideal(whole))
    assert one.seconds(narrow, PEAK) == pytest.approx(2 * ideal(narrow) * (1 + 4) / (1 + 1))
    deep = Tiles(1, depth=32.0)
    assert deep.seconds(whole, PEAK) == pytest.approx(ideal(whole) * 128 / 96)


@given(
    st.builds(Product, *[st.integers(1, 300)] * 4),
    st.builds(
        Tiles, st.integers(1, 200), st.floats(0.1, 1), st.floats(0, 100), st.floats(0, 50), st.sampled_from(SIDES)
    ),
)
def test_no_product_is_quicker_than_the_peak_or_than_a_part_of_it(product: Product, tiles: Tiles) -> None:
    seconds = tiles.seconds(product, PEAK)
    assert seconds >= ideal(product) * (1 - 1e-9)
    for more in (
        product._replace(m=product.m + 1),
        product._replace(n=product.n + 1),
        product._replace(k=product.k + 1),
    ):
        assert tiles.seconds(more, PEAK) >= seconds
