"""Models built with FunctionMaker, of any size: by their sizes, or by a Hugging Face config.json."""

from distir.models.configs import from_config
from distir.models.decoder import Decoder, decoder
from distir.models.gpt import gpt
from distir.models.mlp import mlp
from distir.models.named import named
from distir.models.proxies import proxy
from distir.models.recommender import Recommender, recommender
from distir.models.volumes import Volumes, volumes

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
