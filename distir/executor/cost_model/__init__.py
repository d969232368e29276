"""The cost model: seconds of ops and of communication, from the work of ops and the specs of devices and links."""

from distir.executor.cost_model.seconds import CostModel

__all__ = ["CostModel"]
