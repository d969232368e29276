"""torch.distributed.pipelining, with the model split by hand.

Settings: `schedule`, the name of its class; `microbatches`; `cut`, the layers of each stage, stage s on rank s modulo
the number of ranks; `outputs`: whether to join the outputs of microbatches, which training does not need;
`implementation` of SGD; `attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from models import GPT2Stage, loss_of, stages
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules
from turns import arguments, optimizer, run, start


def main() -> None:
    work, settings = arguments()
    rank, world = start()
    cut = settings["cut"]
    modules = stages(work, cut, settings.get("attention", "sdpa"))
    mine = range(rank, len(cut), world)
    parts = [PipelineStage(modules[s], s, len(cut), torch.device("cpu")) for s in mine]
    kind = getattr(schedules, settings["schedule"])
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    loss_fn = functools.partial(loss_of, work)
    schedule = kind(parts[0] if single else parts, settings["microbatches"], loss_fn=loss_fn)  # type: ignore[arg-type]
    own = [modules[s] for s in mine]
    sgd = optimizer([p for module in own for p in module.parameters()], work, settings)
    tied = [m.tied for m in own if isinstance(m, GPT2Stage) and m.tied is not None]
    joined = {} if settings.get("outputs", False) else {"return_outputs": False}

    def step(batch: Sequence[Tensor]) -> Tensor | None:
        x, y = batch
        losses: list[Tensor] = []
        inputs = (x,) if rank == 0 else ()
        given = {"target": y, "losses": losses} if len(cut) - 1 in mine else {}
        schedule.step(*inputs, **given, **joined)
        for weight in tied:
            dist.all_reduce(weight.grad)
        sgd.step()
        sgd.zero_grad()
        return torch.stack(losses).mean() if losses else None

    run(work, step, rank, 1)


if __name__ == "__main__":
    main()
