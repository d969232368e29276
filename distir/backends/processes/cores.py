"""Which cores of this host each rank runs on.

Left to the kernel, ranks move between cores, and two that compute at the same time may share one while another idles:
of small steps on more ranks than cores that is a third of the time, and most of what differs from step to step.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from distir.backends.processes.preflight import rank_threads
from distir.ir.topology import cores_of

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology"


def bind(rank: int, world: int) -> None:
    """Bind the calling thread, and those that it will start, to the cores of one of `world` ranks (see `cores_of`).

    The kernel chooses where ranks with several threads have more than there are cores, with DISTIR_BIND=0, and on a
    system that cannot bind.
    """
    if not hasattr(os, "sched_setaffinity") or os.environ.get("DISTIR_BIND") == "0":
        return
    cores, threads = _cores_in_order(), rank_threads()
    if threads == 1 or world * threads <= len(cores):
        own = cores_of(rank, world, len(cores))
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores[own.start : own.stop])


def _cores_in_order() -> list[int]:
    """The cores that this process may use; hardware threads of one core in a row."""

    def place(core: int) -> tuple[int, int, int]:
        folder = Path(_TOPOLOGY.format(core))
        try:
            package = int((folder / "physical_package_id").read_text())
            first = int(re.split("[-,]", (folder / "thread_siblings_list").read_text())[0])
        except (OSError, ValueError):
            return 0, core, core
        return package, first, core

    return sorted(os.sched_getaffinity(0), key=place)
