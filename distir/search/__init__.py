"""The search for the plan of a model on a cluster: what fits, ranked by simulated step time."""

from distir.search.plan_table import PlanRow, PlanTable
from distir.search.planning import plan

__all__ = ["PlanRow", "PlanTable", "plan"]
