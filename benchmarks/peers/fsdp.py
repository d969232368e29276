"""FSDP2: `fully_shard` on each layer and on the whole, so that parameters, gradients and optimizer state are sharded.

Settings: `fsdp`, keywords of `fully_shard`; `prefetch`, how many layers to gather ahead (0: what FSDP2 does by itself);
`implementation` of SGD; `attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from models import Work, loss_of, model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from turns import arguments, optimizer, run, start


def sharded(work: Work, settings: dict[str, Any], world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,))
    module: Any = model(work, settings.get("attention", "sdpa"))
    layers = list(module.layers if work.model == "mlp" else module.whole.transformer.h)
    for layer in layers:
        fully_shard(layer, mesh=mesh, **settings.get("fsdp", {}))
    fully_shard(module, mesh=mesh, **settings.get("fsdp", {}))
    ahead = settings.get("prefetch", 0)
    for k, layer in enumerate(layers) if ahead else ():
        layer.set_modules_to_forward_prefetch(layers[k + 1 : k + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, k - ahead) : k][::-1])
    return module


def main() -> None:
    work, settings = arguments()
    rank, world = start()
    module = sharded(work, settings, world)
    sgd = optimizer(list(module.parameters()), work, {"implementation": "loop"} | settings)  # DTensor has no fused one

    def step(batch: Sequence[Tensor]) -> Tensor:
        x, y = batch
        loss = loss_of(work, module(x), y)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        return loss.detach()

    run(work, step, rank, world)


if __name__ == "__main__":
    main()
