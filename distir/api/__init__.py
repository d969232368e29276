"""The road from a model to a prediction or a run, for Python and for the command line.

    model = load("gpt2.onnx", dims={"batch": 8}, loss="cross-entropy", optimizer="adamw")
    simulate(model, Plan(dp=2, pp=2, microbatches=4), "dgx-a100")
    run(model, Plan(dp=2, pp=2, microbatches=4), steps=5, check=True)

`road` is where the passes are put together; the other modules hold what it needs.
"""

from distir.api.check import Check
from distir.api.compare import Comparison, compare
from distir.api.data import Data
from distir.api.model import Model, load
from distir.api.plan import Plan
from distir.api.results import Prediction, RunResult, Summary
from distir.api.road import distribute, run, simulate, validate

__all__ = [
    "Check",
    "Comparison",
    "Data",
    "Model",
    "Plan",
    "Prediction",
    "RunResult",
    "Summary",
    "compare",
    "distribute",
    "load",
    "run",
    "simulate",
    "validate",
]
