"""How a program is to be spread: the degrees, the microbatches, the schedule, and which devices stand together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from distir.ir.errors import UsageError

AXES = ("tp", "dp", "pp")
"""The axes of devices, in the default order: the first varies fastest, so that its groups stay inside a node."""

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """dp * tp * pp devices: replicas, tensor shards, pipeline stages. The batch is cut into `microbatches`.

    `schedule` is "1f1b" or "gpipe". `order` says how numbers of devices run through the axes, the fastest first.
    Raises UsageError for a degree below 1 or an order that is not one of the three axes.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is a whole number of at least 1, got {value!r}")
        object.__setattr__(self, "order", tuple(self.order))
        if sorted(self.order) != sorted(AXES):
            raise UsageError(f"an order names tp, dp and pp once each, got {','.join(self.order)}")

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.dp * self.tp * self.pp

    def arrange(self, devices: Sequence[T]) -> list[T]:
        """The first `size` devices, so that tp varies fastest, then dp, then pp: as the transform wants them.

        Raises UsageError if there are too few.
        """
        if len(devices) < self.size:
            raise UsageError(f"{self} needs {self.size} devices, got {len(devices)}")
        stride, step = {}, 1
        for axis in self.order:
            stride[axis] = step
            step *= getattr(self, axis)
        return [
            devices[p * stride["pp"] + d * stride["dp"] + t * stride["tp"]]
            for p in range(self.pp)
            for d in range(self.dp)
            for t in range(self.tp)
        ]

    def __str__(self) -> str:
        text = f"dp {self.dp} x tp {self.tp} x pp {self.pp}, {_count(self.microbatches, 'microbatch', 'es')}"
        if self.pp > 1:
            text += f", {self.schedule}"
        return text if self.order == AXES else f"{text}, order {','.join(self.order)}"

    def to_json(self) -> dict[str, Any]:
        """Its fields, and the number of devices."""
        return {**asdict(self), "order": list(self.order), "devices": self.size}


def _count(n: int, noun: str, plural: str) -> str:
    return f"{n} {noun}{plural if n > 1 else ''}"
