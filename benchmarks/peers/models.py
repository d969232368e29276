"""The workload of all competitors: the model and its initial weights, the data of each step, the loss.

distir imports the same model from the ONNX file that examples/export.py writes; this module does not use distir.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[2]))
from examples import export

Sizes = dict[str, int]


class Work(NamedTuple):
    """The workload: `model` is "mlp" or "gpt2", `batch` the number of samples per step over all ranks."""

    model: str
    sizes: Sizes
    batch: int
    lr: float

    @property
    def exported(self) -> str:
        """The name of the model in examples/export.py."""
        return "mlp" if self.model == "mlp" else "gpt2-tiny"

    @property
    def ids_only(self) -> bool:
        """Whether its only inputs are tokens; it is causal without a mask."""
        return self.model == "gpt2"

    def data(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The inputs and targets of a step, for all ranks: two batches alternate, so that the loss decreases."""
        random = np.random.default_rng((0, step % 2))
        if self.model == "mlp":
            x, y = random.standard_normal((2, self.batch, self.sizes["width"]), np.float32)
            return x, y
        ids, labels = random.integers(0, self.sizes["vocab"], (2, self.batch, self.sizes["seq"]))
        return ids, labels


def data_of(work: Work, step: int, rank: int, world: int) -> list[Tensor]:
    """A rank's shard of the data of a step."""
    n = work.batch // world
    return [torch.from_numpy(x[rank * n : (rank + 1) * n]) for x in work.data(step)]


def model(work: Work, attention: str = "sdpa") -> nn.Module:
    """The model as PyTorch and transformers have it, with the weights that the ONNX file has.

    GPT-2 with attention "sdpa" is causal by itself, with "eager" by a mask; both are what transformers offers.
    """
    module, _ = export.build(work.exported, ids_only=work.ids_only, **work.sizes)
    if work.model == "mlp":
        return module.train()
    module.set_attn_implementation(attention)  # pyright: ignore[reportCallIssue]
    return GPT2(module).train()


class GPT2(nn.Module):
    """transformers' GPT-2, from ids to logits."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, ids: Tensor) -> Tensor:
        from transformers import GPT2LMHeadModel

        return GPT2LMHeadModel.forward(self.whole, ids).logits  # type: ignore[arg-type, return-value]


class MLPStage(nn.Module):
    """Some layers of the MLP; after each but the last of all a ReLU."""

    def __init__(self, layers: Sequence[nn.Module], last: bool) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(layers), last

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x)
            if not (self.last and k == len(self.layers) - 1):
                x = functional.relu(x)
        return x


class GPT2Stage(nn.Module):
    """Some layers of transformers' GPT-2, with the embeddings on the first stage and the head on the last.

    The head's weight is the token embedding. On another stage than that it is a copy, `tied`: the two are kept the
    same by adding up their gradients.
    """

    def __init__(self, whole: Any, layers: Sequence[nn.Module], first: bool, last: bool) -> None:
        super().__init__()
        gpt2 = whole.transformer
        self.layers = nn.ModuleList(layers)
        self.tokens, self.positions = (gpt2.wte, gpt2.wpe) if first else (None, None)
        self.norm, self.head = (gpt2.ln_f, whole.lm_head) if last else (None, None)

    @property
    def tied(self) -> nn.Parameter | None:
        """This stage's copy of the weight that the first and the last stage share."""
        owner = self.tokens or self.head
        return owner.weight if owner is not None else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            y = layer(x)
            x = y if isinstance(y, Tensor) else y[0]
        return self.head(self.norm(x)) if self.norm is not None and self.head is not None else x


def stages(work: Work, cut: Sequence[int], attention: str = "sdpa") -> list[nn.Module]:
    """The model as pipeline stages; `cut` are the layers of each."""
    module = model(work, attention)
    if work.model == "mlp":
        layers = list(module.layers)  # type: ignore[arg-type]
    else:
        whole: Any = module.whole
        layers = list(whole.transformer.h)
    if sum(cut) != len(layers):
        raise ValueError(f"{len(layers)} layers cannot be cut into {list(cut)}")
    found: list[nn.Module] = []
    for k, n in enumerate(cut):
        first, last = k == 0, k == len(cut) - 1
        mine, layers = layers[:n], layers[n:]
        found.append(MLPStage(mine, last) if work.model == "mlp" else GPT2Stage(module.whole, mine, first, last))
    return found


def loss_of(work: Work, outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error; of logits, the mean cross-entropy."""
    if work.model == "mlp":
        return functional.mse_loss(outputs, targets)
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
