"""What PyTorch's caching allocator holds for streams that use it no more.

A free block belongs to the stream that it was allocated in (github pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp),
so the peak of what is reserved is the sum of the peaks of the streams' pools, whenever these were. FSDP2 has three (the
same, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py):

- the stream of compute: all that is not in the others, gathered weights too, since they are copied out of what was
  gathered;
- that of gathers: the cast shards, and what is gathered of them, at most for one group of weights and the next. The
  largest is that of what stays whole, the next a block: as many bytes as stay whole, the last block being among them;
- that of reductions: sharded gradients, of which there are none when the backward pass begins.
"""

from __future__ import annotations

from distir.executor.simulator.categories import GRADIENT, PARAMETER
from distir.executor.simulator.compile import CompiledProgram
from distir.executor.simulator.memory import MemoryUse, beside_logits
from distir.ir.function import Op


def in_pools(program: CompiledProgram, use: MemoryUse) -> int:
    """The bytes that the allocator holds in the end beyond a class's peak of tensors: in the pools of gathers and of
    reductions, and the hole that logits leave. 0 if the runtime has no such pools."""
    runtime, ops = program.cost.runtime, program.function.ops
    if runtime is None or not runtime.pools:
        return 0
    gathered, shards, before = 0.0, 0, use.start
    callees = dict.fromkeys([callee for point in use.curve if (callee := ops[point.op].callee) is not None])
    hole = max([beside_logits(op, runtime)[2] for callee in callees for op in callee.ops], default=0.0)
    for point in use.curve:
        callee = ops[point.op].callee
        if callee is not None:
            gathers = [op for op in callee.ops if op.spec.comm is not None and op.spec.comm.gathers]
            if gathers:
                gathered = max(gathered, (point.after[PARAMETER] - before[PARAMETER]) * (1 + _share(gathers[0])))
        shards, before = max(shards, point.after[GRADIENT]), point.after
    return round(gathered + hole) + max(0, shards - use.peak[GRADIENT])


def _share(gather: Op) -> float:
    """A device's share of what is gathered."""
    return gather.inputs[0].type.bytes / gather.outputs[0].type.bytes
