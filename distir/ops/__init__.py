"""All ops. Importing this registers them; it loads neither numpy nor torch."""

from distir.ops import attention, comm, elementwise, index, linear, loss, nn, optim, rank, reduce, shape

__all__ = ["attention", "comm", "elementwise", "index", "linear", "loss", "nn", "optim", "rank", "reduce", "shape"]
