"""The live tensors of a step, counted as torch makes and frees them, against what the simulator says."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import distir
from distir.api.data import Data
from distir.backends.lowering.engine import TorchRank
from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster
from distir.transforms.rank.as_run import as_run

GPT = "gpt:layers=3,hidden=256,heads=4,vocab=64,seq=256,batch=4"
LLAMA = "llama:layers=3,hidden=256,heads=16,kv_heads=2,ffn=128,vocab=64,seq=256,batch=4"
"""If its keys and values were expanded for all heads, its peaks would be 5 to 15 % larger."""


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that live, and the most there were."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = 0
        for t in held:
            self.count(t)

    def count(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        at, size = storage.data_ptr(), storage.nbytes()
        if size and at not in self.sizes:
            self.sizes[at] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.freed, at)

    def freed(self, at: int) -> None:
        self.live -= self.sizes.pop(at)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.count(t)
        return out


@pytest.mark.parametrize("plan", [{}, {"microbatches": 2}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize(
    ("sizes", "precision", "off"),
    [(GPT, "fp32", 0.001), (GPT, "bf16", 0.001), (LLAMA, "fp32", 0.03)],
    ids=["gpt", "gpt in bf16", "llama"],
)
def test_the_peak_is_as_predicted(sizes: str, precision: str, off: float, plan: dict[str, Any]) -> None:
    """Of a Llama, kernels for CPUs of norms and of attention in 16 bits need more while they run."""
    model = distir.load(sizes, loss="cross-entropy", optimizer="adamw", precision=precision)
    arrays = model.initial()
    given = [(arrays | Data(model.function, arrays).step(0))[v] for v in model.function.inputs]
    rank = TorchRank(distir.distribute(model, distir.Plan(**plan)), 0)
    rank.load(dict(enumerate(given)))
    rank.step()
    with Live(list(rank.values.values())) as live:
        rank.step()
    cluster = load_cluster("cpu-2core")
    devices = cluster.devices[:1]
    simulation = Simulator(CostModel(cluster)).interpret(as_run(distir.distribute(model, distir.Plan(**plan), devices)))
    predicted = simulation.memory(devices[0]).total
    assert live.peak == pytest.approx(predicted, rel=off)
