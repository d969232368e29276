"""distir: a compiler for distributed deep learning that predicts what it runs.

`import distir` is quick: numpy, onnx, torch and networkx are loaded when a name that needs them is used.
"""

from typing import TYPE_CHECKING, Any

import distir.ops  # noqa: F401  (registers the ops)
from distir.ir import Device, Function, FunctionMaker, Mesh, Topology, cpprint, parse, pformat, same, verify

if TYPE_CHECKING:
    from distir.api import (
        Comparison,
        Data,
        Model,
        Plan,
        Prediction,
        RunResult,
        compare,
        distribute,
        load,
        run,
        simulate,
        validate,
    )
    from distir.executor.cost_model import CostModel
    from distir.transforms.training import SGD, AdamW

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdamW",
    "Comparison",
    "CostModel",
    "Data",
    "Device",
    "Function",
    "FunctionMaker",
    "Mesh",
    "Model",
    "Plan",
    "Prediction",
    "RunResult",
    "Topology",
    "compare",
    "cpprint",
    "distribute",
    "load",
    "parse",
    "pformat",
    "run",
    "same",
    "simulate",
    "validate",
    "verify",
]

_LATER = {
    **dict.fromkeys(
        (
            "Comparison",
            "Data",
            "Model",
            "Plan",
            "Prediction",
            "RunResult",
            "compare",
            "distribute",
            "load",
            "run",
            "simulate",
            "validate",
        ),
        "distir.api",
    ),
    "CostModel": "distir.executor.cost_model",
    "SGD": "distir.transforms.training",
    "AdamW": "distir.transforms.training",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _LATER:
        raise AttributeError(f"module 'distir' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
