"""All ops. Importing this registers them; it loads neither numpy nor torch."""

from distir.ops import comm, elementwise, index, linear, loss, nn, optim, rank, reduce, shape

__all__ = ["comm", "elementwise", "index", "linear", "loss", "nn", "optim", "rank", "reduce", "shape"]
