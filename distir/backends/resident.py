"""How much memory a rank takes."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Growth:
    """The most memory this process has held since, over what it held then: of the device's if it computes on a GPU.

    On CPUs it is resident memory less mapped files, which are libraries, and known on Linux only.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin: dict[str, int] | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.held = torch.cuda.memory_allocated(device)
            return
        try:
            _CLEAR.write_text("5")  # the highest is from now on counted anew: proc(5)
            self.begin = _resident()
        except OSError:
            return

    def bytes(self) -> int | None:
        """None if nobody counts."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.held
        if self.begin is None:
            return None
        now = _resident()
        return now["VmHWM"] - self.begin["VmRSS"] - (now["RssFile"] - self.begin["RssFile"])


def _resident() -> dict[str, int]:
    """Bytes by the kernel's names: resident now, at the highest, and of mapped files."""
    rows = [line.split() for line in _STATUS.read_text().splitlines()]
    found = {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if row[0] in ("VmRSS:", "VmHWM:", "RssFile:")}
    if len(found) < 3:
        raise OSError(f"{_STATUS} does not tell")
    return found
