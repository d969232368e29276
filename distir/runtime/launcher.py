"""What started this process: torchrun or mpirun as one rank of several, or neither. Loads no torch."""

from __future__ import annotations

import os
from typing import NamedTuple

from distir.hardware import host_cores

TORCHRUN, MPIRUN = "torchrun", "mpirun"
_VARIABLES = (
    # launcher, and its variables: rank, ranks, rank on this host, ranks on this host
    (TORCHRUN, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    (
        MPIRUN,  # of Open MPI
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    (MPIRUN, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),  # of MPICH and Intel MPI
)


class Launched(NamedTuple):
    """The place of this process among those that a launcher has started; `here`: the number of them on this host."""

    by: str
    rank: int
    world: int
    local_rank: int
    here: int


def launched() -> Launched | None:
    """How torchrun or mpirun has started this process; None if neither has."""
    for by, names in _VARIABLES:
        rank, world, local_rank, here = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and world.isdecimal():
            local = int(local_rank) if local_rank.isdecimal() else int(rank)
            return Launched(by, int(rank), int(world), local, int(here) if here.isdecimal() else 1)
    return None


def this_rank() -> int:
    """The rank of this process, which prints and writes files if it is 0; 0 if no launcher has started it."""
    found = launched()
    return 0 if found is None else found.rank


def cores_of_ranks() -> int:
    """The number of this host's cores that ranks may use: under mpirun, which binds each to its own, those of all."""
    found, cores = launched(), host_cores()
    if found is None or found.by != MPIRUN:
        return cores
    return min(os.cpu_count() or 1, cores * found.here)
