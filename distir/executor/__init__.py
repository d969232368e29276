"""Executors: the sequential reference, and the simulator that predicts seconds and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir.ir.later import later

if TYPE_CHECKING:
    from distir.executor.reference.sequential import SequentialExecutor
    from distir.executor.simulator.simulation import Simulation, Simulator
    from distir.ir.infer import infer_types

__all__ = ["SequentialExecutor", "Simulation", "Simulator", "infer_types"]

_HOMES = {
    "SequentialExecutor": "distir.executor.reference.sequential",
    "Simulation": "distir.executor.simulator.simulation",
    "Simulator": "distir.executor.simulator.simulation",
    "infer_types": "distir.ir.infer",
}

__getattr__ = later(__name__, _HOMES)
