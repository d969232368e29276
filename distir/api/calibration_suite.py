"""What `distir calibrate` measures: training steps, and the plans under which they are timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distir.api.calibration_runs import Training
from distir.transforms.plan import Plan

_SHORTEST = 2
"""The training steps that are measured again at the end, on a CPU, and their ops: the first of a suite, on two ranks at
most. Short ones differ most from minute to minute, with what else the host runs."""

_FEWEST, _SECONDS = 6, 1.2
"""On several ranks fewer steps are timed than on one if they take longer than so many seconds, but at least so many."""


class Suite(NamedTuple):
    """What is measured: training steps with a profile, products by dtype, ranks, sizes; `spread`: which of the training
    steps are timed on several ranks, too."""

    trainings: Sequence[Training]
    products: Training | None
    dtypes: Sequence[str]
    ranks: Sequence[int]
    sizes: Sequence[int]
    spread: Sequence[int] = (0, 1, 2)


_CPU = (
    Training("40,64,32,8", 64, "adamw", 300),
    Training("gpt:layers=2,hidden=48,heads=4,vocab=600,seq=24", 8, "adamw", 200, microbatches=(1, 2)),
    Training("gpt:layers=2,hidden=256,heads=4,vocab=3000,seq=128", 8, "adamw", 12),
    Training("gpt:layers=1,hidden=384,heads=6,vocab=4000,seq=160", 8, "sgd", 7),
    Training("48,96,192,384,768,1024,512,64", 128, "sgd", 30),
    # few rows: weights are read for little work; gradients as large are accumulated, and few caches hold both
    Training("1024,1024,1024,1024,1024,1024,1024,1024,1024", 32, "sgd", 12, microbatches=(1, 2)),
)
_SPREAD = 0, 1, 2, 5
"""On a CPU decoders that mostly compute, and a perceptron whose weights the ranks read from the memory they share."""
_CUDA = (  # short and long sequences, weights and activations that fit in the cache and such that do not
    Training("64,128,64,16", 64, "adamw", 60),
    Training("gpt:layers=2,hidden=128,heads=4,vocab=2000,seq=64", 8, "adamw", 40, microbatches=(1, 2)),
    Training("gpt:layers=2,hidden=512,heads=8,vocab=8000,seq=256", 8, "adamw", 20),
    Training("gpt:layers=2,hidden=512,heads=8,vocab=8000,seq=256", 8, "adamw", 20, "bf16"),
    Training("gpt:layers=1,hidden=768,heads=12,vocab=4000,seq=200", 32, "adamw", 10),
    Training("gpt:layers=1,hidden=768,heads=12,vocab=4000,seq=200", 96, "adamw", 10, "bf16"),
    Training("gpt:layers=1,hidden=1024,heads=16,vocab=48000,seq=1024", 4, "adamw", 10),
    Training("gpt:layers=1,hidden=1024,heads=16,vocab=48000,seq=1024", 12, "adamw", 10, "bf16"),
    Training("gpt:layers=1,hidden=4096,heads=32,vocab=32000,seq=1024", 4, "adamw", 10, "bf16"),
    Training("llama:layers=1,hidden=1024,heads=16,kv_heads=4,ffn=2816,vocab=32000,seq=2048", 2, "adamw", 10),
    Training("llama:layers=1,hidden=1024,heads=16,kv_heads=4,ffn=2816,vocab=32000,seq=1024", 8, "adamw", 10, "bf16"),
    Training(
        "llama:layers=1,hidden=2048,heads=32,kv_heads=4,ffn=5632,vocab=32000,seq=4096,separate=1",
        3,
        "adamw",
        10,
        "bf16",
    ),
    Training("256,1024,4096,8192,2048", 4096, "sgd", 10, microbatches=(1, 2)),
)
_WIDTHS = Training("32,64,128,256,512,1024", 128, "sgd", 5)
_WIDE = Training("512,1024,2048,4096,8192", 4096, "sgd", 5)
_SIZES = 1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 25
"""Of collectives and transfers, in bytes."""


def suite(device: str, count: int) -> Suite:
    """What to measure on a device of this kind, of which the machine has `count` (cores or GPUs)."""
    if device == "cuda":
        return Suite(_CUDA, _WIDE, ("f64", "bf16", "f16"), [n for n in (1, 2, 4, 8) if n <= count], _SIZES)
    ranks = [n for n in (1, 2, 4) if n <= max(2, 2 * count)]
    return Suite(_CPU, _WIDTHS, ("f64", "bf16"), ranks, _SIZES, _SPREAD)


def plans_of(ranks: int, small: bool) -> list[Plan]:
    """The plans that are timed on so many ranks, of a small program or a large one."""
    if ranks == 1:
        return [Plan(), Plan(microbatches=2)][: 2 if small else 1]
    found = [Plan(dp=ranks), Plan(tp=ranks), Plan(pp=ranks, microbatches=2 * ranks)]
    if ranks == 2:
        return [*found, Plan(pp=2)]
    half = ranks // 2
    return [*found, Plan(dp=half, tp=2), Plan(dp=half, pp=2, microbatches=2), Plan(tp=half, pp=2, microbatches=2)]


def timed(what: Suite, ranks: int) -> list[tuple[Training, list[Plan]]]:
    """The training steps that are timed on so many ranks, with their plans: not all of them on several."""
    every = range(len(what.trainings))
    chosen = every if ranks == 1 else [k for k in what.spread if k in every][0 if ranks == 2 else 1 :]
    return [(what.trainings[k], plans_of(ranks, k < 3)) for k in chosen]


def steps_on(ranks: int, t: Training, alone: float | None) -> int:
    """How many steps are timed on so many ranks. `alone`: seconds of a step on one, where they are known; in the worst
    case the ranks of a host take turns."""
    most = t.steps if ranks == 1 or alone is None else round(_SECONDS / (ranks * alone))
    return min(t.steps, max(_FEWEST, most))


def measured_again(what: Suite, device: str) -> Suite:
    """What is measured again: see `_SHORTEST`."""
    if device != "cpu":
        return what._replace(trainings=(), ranks=())
    return what._replace(trainings=what.trainings[:_SHORTEST], ranks=[n for n in what.ranks if n <= 2])


def split_programs(what: Suite) -> list[tuple[Training, Plan]]:
    """Programs on two ranks that have ops of their own: decoders, of those that are timed on several ranks."""
    decoders = [t for t, _ in timed(what, 2) if t.decodes]
    return [(t, plan) for t in decoders for plan in (Plan(tp=2), Plan(pp=2))]


def launched(what: Suite, device: str | None) -> Sequence[Training]:
    """The training steps that also are timed with kernels that the host launches one by one: on GPUs small ones."""
    return what.trainings[:2] if device == "cuda" else ()
