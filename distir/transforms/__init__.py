"""Transforms: plain functions from Function to Function, one a file.

A training step goes through them in this order. `rewriting` fuses ops that models write out, and `differentiation` adds
the backward pass and the update; `rewriting.decompose` decomposes ops that cannot be split. `sharding` pads dims and
places the program on a mesh. `pipeline` cuts it into stages and phases and calls these in the order of a schedule.
`rank` projects the result to one rank, posts receives early, recomposes ops, and outlines what is compiled as a whole.
`passes` and `parallel3d` compose them.
"""

from distir.transforms.parallel3d import parallel_transform_3d
from distir.transforms.pipeline.schedule import PipeDreamScheduler
from distir.transforms.steady_state import steady_state_transform

__all__ = ["PipeDreamScheduler", "parallel_transform_3d", "steady_state_transform"]
