"""Models built with FunctionMaker, of any size, without a file."""

from distir.models.gpt import gpt
from distir.models.mlp import mlp

__all__ = ["gpt", "mlp"]
