"""Transforms: plain functions from Function to Function, one a file.

A training step goes through them in this order: `fuse` (with `rewrite` and `fuse_*`) puts one op for what models write
out in many; `grad` and `training` make the step; `decompose` takes apart what cannot be split; `pad` and `spread` (with
`microbatch`, `classes`, `seeds`, `place` and `shard`) place it on a mesh; `phases`, `stages`, `lift` and `bodies` cut
it; `schedule` (with `table`) and `pipeline` call the pieces; `project` keeps one rank's part. `parallel3d` composes
them. For the backends `ahead` posts receives early, `recompose` joins what was taken apart, `outline` cuts out what is
compiled as a whole.
"""

from distir.transforms.parallel3d import parallel_transform_3d
from distir.transforms.schedule import PipeDreamScheduler
from distir.transforms.steady_state import steady_state_transform

__all__ = ["PipeDreamScheduler", "parallel_transform_3d", "steady_state_transform"]
