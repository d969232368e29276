"""All ops. Importing this registers them; it loads neither numpy nor torch."""

from distir.ops import (
    attention,
    collectives,
    comm,
    dropout,
    elementwise,
    index,
    linear,
    loss,
    nn,
    optim,
    point_to_point,
    reduce,
    shape,
    tables,
)

__all__ = [
    "attention",
    "collectives",
    "comm",
    "dropout",
    "elementwise",
    "index",
    "linear",
    "loss",
    "nn",
    "optim",
    "point_to_point",
    "reduce",
    "shape",
    "tables",
]
