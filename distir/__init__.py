"""distir: a compiler for distributed deep learning that predicts what it runs.

`import distir` is quick: numpy, onnx, torch and networkx are loaded when a name that needs them is used.
"""

import os
import signal
import sys

INTERRUPTED = 130
"""The exit code of the command line after Ctrl-C."""


def end_interrupted(*_: object) -> None:
    """End this process as Ctrl-C does where nothing has begun yet."""
    os.write(2, b"distir: error: interrupted\n")
    os._exit(INTERRUPTED)


def _is_command() -> bool:
    """Whether this process is the command line, `distir` or `python -m distir`, which has just begun to import this."""
    line = sys.orig_argv
    module = line[line.index("-m") + 1 :][:1] if "-m" in line and sys.argv[:1] == ["-m"] else []
    return module == ["distir"] or os.path.basename((sys.argv or [""])[0]) == "distir"


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_interrupted)  # until `distir.cli.console` takes over

from typing import TYPE_CHECKING  # noqa: E402  (an interrupt while it is loaded is handled, too)

import distir.ops  # noqa: E402, F401  (registers the ops)
from distir.ir import (  # noqa: E402
    Device,
    Function,
    FunctionMaker,
    Mesh,
    Topology,
    cpprint,
    parse,
    pformat,
    same,
    verify,
)
from distir.ir.later import later  # noqa: E402

if TYPE_CHECKING:
    from distir.api import (
        Comparison,
        Data,
        Explanation,
        Inspection,
        Model,
        Plan,
        PlanDifference,
        Prediction,
        RunCallbacks,
        RunOptions,
        RunResult,
        compare,
        diff,
        distribute,
        explain,
        inspect,
        load,
        run,
        simulate,
        validate,
    )
    from distir.backends.processes.fork_server import preloaded
    from distir.executor.cost_model import CostModel
    from distir.search import PlanTable, plan
    from distir.transforms.differentiation.training import SGD, AdamW

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdamW",
    "Comparison",
    "CostModel",
    "Data",
    "Device",
    "Explanation",
    "Function",
    "FunctionMaker",
    "Inspection",
    "Mesh",
    "Model",
    "Plan",
    "PlanDifference",
    "PlanTable",
    "Prediction",
    "RunCallbacks",
    "RunOptions",
    "RunResult",
    "Topology",
    "compare",
    "cpprint",
    "diff",
    "distribute",
    "explain",
    "inspect",
    "load",
    "parse",
    "pformat",
    "plan",
    "preloaded",
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
            "Explanation",
            "Inspection",
            "Model",
            "Plan",
            "PlanDifference",
            "Prediction",
            "RunCallbacks",
            "RunOptions",
            "RunResult",
            "compare",
            "diff",
            "distribute",
            "explain",
            "inspect",
            "load",
            "run",
            "simulate",
            "validate",
        ),
        "distir.api",
    ),
    "CostModel": "distir.executor.cost_model",
    "PlanTable": "distir.search",
    "plan": "distir.search",
    "preloaded": "distir.backends.processes.fork_server",
    "SGD": "distir.transforms.differentiation.training",
    "AdamW": "distir.transforms.differentiation.training",
}


__getattr__ = later(__name__, _LATER)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
