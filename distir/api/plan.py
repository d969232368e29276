"""How a program is to be spread: the degrees, the microbatches, the schedule, and which devices stand together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from os import PathLike, fspath
from typing import Any

from distir.ir.errors import InfeasibleError, UsageError, counted
from distir.transforms.parallel3d import BUCKET_MB
from distir.transforms.schedule import Schedule
from distir.transforms.table import format_table
from distir.transforms.zero import STAGES

AXES = ("tp", "dp", "pp")
"""The axes of devices, in the default order: the first varies fastest, so that its groups stay inside a node."""
MOST = 1 << 20
"""The most devices of a plan: that many can be listed in a few seconds."""


@dataclass(frozen=True)
class Plan:
    """dp * tp * pp devices: replicas, tensor shards, pipeline stages. The batch is cut into `microbatches`.

    `schedule` is "1f1b", "gpipe", "interleaved" (with `chunks` stages a pipeline rank) or "distir2021"; or a table of
    one's own (`distir.transforms.schedule`), or the path of its file. `order` says how numbers of devices run through
    the axes, the fastest first. Without `overlap` a device does one thing at a time, and gradients are reduced when all
    microbatches are done. Gradients are reduced in buckets of `bucket_mb` MiB: 0 for one each, infinity for one in all.
    With `zero` 1, 2 or 3 replicas split the optimizer's state, also gradients, also parameters among them. Raises
    UsageError for a degree below 1 or an order that is not one of the three axes, InfeasibleError for more devices than
    can be listed.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    schedule: Schedule = "1f1b"
    order: tuple[str, ...] = AXES
    chunks: int = 1
    overlap: bool = True
    bucket_mb: float = BUCKET_MB
    zero: int = 0

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "microbatches", "chunks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is a whole number of at least 1, got {value!r}")
        if isinstance(self.bucket_mb, bool) or not self.bucket_mb >= 0:
            raise UsageError(f"bucket_mb is a number of at least 0, got {self.bucket_mb!r}")
        if isinstance(self.zero, bool) or self.zero not in STAGES:
            raise UsageError(f"zero is 0, 1, 2 or 3, got {self.zero!r}")
        if self.size > MOST:
            raise InfeasibleError(f"{self.size:,} devices are more than the {MOST:,} that distir plans for")
        object.__setattr__(self, "order", tuple(self.order))
        if sorted(self.order) != sorted(AXES):
            raise UsageError(f"an order names tp, dp and pp once each, got {','.join(self.order)}")

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.dp * self.tp * self.pp

    @property
    def _schedule(self) -> str:
        """A schedule's name or file; a table's rows, parted by semicolons."""
        if isinstance(self.schedule, str | PathLike):
            return fspath(self.schedule)
        if callable(self.schedule):
            return getattr(self.schedule, "__name__", type(self.schedule).__name__)
        return format_table(self.schedule).replace("\n", "; ")

    def __str__(self) -> str:
        text = f"dp {self.dp} x tp {self.tp} x pp {self.pp}, {counted(self.microbatches, 'microbatch', 'es')}"
        if self.pp > 1:
            text += f", {self._schedule}" + (f" with {self.chunks} chunks" if self.chunks > 1 else "")
        text += "" if self.order == AXES else f", order {','.join(self.order)}"
        text += f", ZeRO {self.zero}" if self.zero else ""
        if self.bucket_mb != BUCKET_MB:
            text += f", buckets of {self.bucket_mb:g} MiB"
        return text if self.overlap else f"{text}, no overlap"

    def to_json(self) -> dict[str, Any]:
        """Its fields, and the number of devices."""
        said = {"schedule": self._schedule, "order": list(self.order), "devices": self.size}
        if self.bucket_mb == float("inf"):  # which JSON has no number for
            said["bucket_mb"] = "inf"
        return {**asdict(self), **said}
