"""Executors: the sequential reference, and the simulator that predicts seconds and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
