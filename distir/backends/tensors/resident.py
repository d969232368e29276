"""Measure the memory that a rank uses."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Growth:
    """The increase of this process's peak memory since the object was made; on a GPU of the device's memory.

    On CPUs it is resident memory without mapped files (libraries), measured on Linux only.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin: dict[str, int] | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.baseline = torch.cuda.memory_allocated(device)
            return
        try:
            _CLEAR.write_text("5")  # resets the peak, VmHWM: see proc(5)
            self.begin = _resident()
        except OSError:
            return

    def bytes(self) -> int | None:
        """The increase in bytes; None where not measurable."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.baseline
        if self.begin is None:
            return None
        now = _resident()
        return now["VmHWM"] - self.begin["VmRSS"] - (now["RssFile"] - self.begin["RssFile"])


def _resident() -> dict[str, int]:
    """Bytes by the kernel's names: VmRSS (resident), VmHWM (its peak) and RssFile (of it mapped files)."""
    rows = [line.split() for line in _STATUS.read_text().splitlines()]
    found = {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if row[0] in ("VmRSS:", "VmHWM:", "RssFile:")}
    if len(found) < 3:
        raise OSError(f"{_STATUS} lacks memory figures")
    return found
