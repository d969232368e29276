"""Models built with FunctionMaker, of any size: by their sizes, or by a Hugging Face config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir.ir.later import later
from distir.models.configs import from_config
from distir.models.decoder import Decoder, decoder
from distir.models.gpt import gpt
from distir.models.mlp import mlp
from distir.models.named import named
from distir.models.recommender import Recommender, recommender
from distir.models.volumes import Volumes, volumes

if TYPE_CHECKING:
    from distir.models.proxies import proxy

__all__ = [
    "Decoder",
    "Recommender",
    "Volumes",
    "decoder",
    "from_config",
    "gpt",
    "mlp",
    "named",
    "proxy",
    "recommender",
    "volumes",
]

__getattr__ = later(__name__, {"proxy": "distir.models.proxies"})
