"""The speed of matrix products that a device computes in tiles, one wave of tiles after the other."""

from __future__ import annotations

import math
from typing import NamedTuple

SIDES = 128, 64, 32
"""The sides of tiles that libraries of products have kernels for."""


class Product(NamedTuple):
    """The sizes of a product on one device: `batch` products of (m, k) by (k, n)."""

    batch: int
    m: int
    n: int
    k: int


class Tiles(NamedTuple):
    """How a device of so many `multiprocessors` computes products.

    Each multiprocessor computes one tile of a by b elements of the result at a time. A tile takes the time of its
    2 a b k FLOP, of `depth` more steps of k to fill the pipeline of loads and to write the result, and loses time to
    loads from shared memory: (1 + `edge` (a + b) / (a b)) times as long. `efficiency` is the share of the peak that
    tiles of 128 by 128 reach. All tiles count whole, and so does each wave of one tile a multiprocessor. The quickest
    sides count; `batched` is the least side for products with matrices of their own for each one of a batch.

    Source: the quantisation into tiles and waves is that of NVIDIA's guide to matrix multiplication performance; how
    often a tile of a by b loads each element, (a + b) / (a b), that of any blocked product.
    """

    multiprocessors: int
    efficiency: float = 1.0
    edge: float = 0.0
    depth: float = 0.0
    batched: int = SIDES[-1]

    def seconds(self, product: Product, peak: float) -> float:
        """Of a product on a device of `peak` FLOP/s."""
        count, m, n, k = product
        least = self.batched if count > 1 else 0
        sides = [a for a in SIDES if a >= least]
        flops = peak * self.efficiency / self.multiprocessors * (1 + self.edge * 2 / SIDES[0])
        found = math.inf
        for a in sides:
            for b in sides:
                waves = -(-count * -(-m // a) * -(-n // b) // self.multiprocessors)
                tile = 2 * a * b * (k + self.depth) * (1 + self.edge * (a + b) / (a * b))
                found = min(found, waves * tile / flops)
        return found
