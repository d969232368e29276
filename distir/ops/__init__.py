"""All ops. Importing this registers them; it loads neither numpy nor torch."""

from distir.ops import (
    attention,
    collectives,
    comm,
    conv,
    dropout,
    elementwise,
    index,
    linear,
    loss,
    nn,
    optim,
    point_to_point,
    pooling,
    reduce,
    shape,
)

__all__ = [
    "attention",
    "collectives",
    "comm",
    "conv",
    "dropout",
    "elementwise",
    "index",
    "linear",
    "loss",
    "nn",
    "optim",
    "point_to_point",
    "pooling",
    "reduce",
    "shape",
]
