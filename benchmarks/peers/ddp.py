"""DistributedDataParallel.

Settings: `ddp`, keywords of DistributedDataParallel (none: its defaults); `implementation` of SGD; `attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

from models import loss_of, model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from turns import arguments, optimizer, run, start


def main() -> None:
    work, settings = arguments()
    rank, world = start()
    module = DistributedDataParallel(model(work, settings.get("attention", "sdpa")), **settings.get("ddp", {}))
    sgd = optimizer(list(module.parameters()), work, settings)

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
