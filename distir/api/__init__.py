"""The Python API: compile a model under a plan, predict its cost, run it. The command line is built on it.

    model = load("gpt2.onnx", dims={"batch": 8}, loss="cross-entropy", optimizer="adamw")
    simulate(model, Plan(dp=2, pp=2, microbatches=4), "dgx-a100")
    run(model, Plan(dp=2, pp=2, microbatches=4), steps=5, check=True)

`compilation` composes the passes and predicts, `running` runs; the other modules serve these two. What a prediction
does not need is loaded when it is used.
"""

from typing import TYPE_CHECKING

from distir.api.compilation import distribute, simulate, validate
from distir.api.model import Model, load
from distir.api.prediction import Prediction
from distir.api.results import Summary
from distir.ir.later import later
from distir.runtime.options import RunOptions
from distir.transforms.plan import Plan

if TYPE_CHECKING:
    from distir.api.callbacks import RunCallbacks
    from distir.api.check import Check
    from distir.api.comparison import Comparison, compare
    from distir.api.data import Data
    from distir.api.explanation import Explanation, PlanDifference, diff, explain
    from distir.api.inspection import Inspection, inspect
    from distir.api.run_result import RunResult
    from distir.api.running import run

__all__ = [
    "Check",
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
    "Summary",
    "compare",
    "diff",
    "distribute",
    "explain",
    "inspect",
    "load",
    "run",
    "simulate",
    "validate",
]

_LATER = {
    "Check": "distir.api.check",
    "Comparison": "distir.api.comparison",
    "Data": "distir.api.data",
    "Explanation": "distir.api.explanation",
    "Inspection": "distir.api.inspection",
    "PlanDifference": "distir.api.explanation",
    "RunCallbacks": "distir.api.callbacks",
    "RunResult": "distir.api.run_result",
    "compare": "distir.api.comparison",
    "diff": "distir.api.explanation",
    "explain": "distir.api.explanation",
    "inspect": "distir.api.inspection",
    "run": "distir.api.running",
}

__getattr__ = later(__name__, _LATER)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
