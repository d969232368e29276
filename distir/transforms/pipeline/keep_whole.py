"""Which weights stay whole from the forward to the backward pass, of those that are sharded over replicas (ZeRO 3).

PyTorch's FSDP2 gathers the weights of a wrapped block for each pass that uses them, but keeps what no block has (the
root: embedding, last norm, head), and torchtitan also keeps the last block, whose backward pass comes next (github
pytorch/pytorch, torch/distributed/fsdp/_fully_shard, `reshard_after_forward`; github pytorch/torchtitan,
parallelize_llama.py, `apply_fsdp`).
"""

from __future__ import annotations

from distir.ir.function import Function, Op, Value
from distir.transforms.pipeline.held import held
from distir.transforms.pipeline.phases import CELLS, FORWARD, FREE, phases, users, uses_of
from distir.transforms.pipeline.recompute import repeated_blocks

GATHERED_AGAIN = ("all", "blocks")
"""What backward passes gather again: all weights that are sharded, or those of repeated blocks but the last."""


def keep_whole(function: Function) -> tuple[Function, frozenset[Op]]:
    """The placed program, and the gathers of weights that repeated blocks, but for the last, do not use: they belong to
    the forward pass. Those that the backward pass does not need live until it comes to what used them."""
    blocks = repeated_blocks(function)
    inside = {op for block in blocks[:-1] for op in block}
    phase, used = phases(function), users(function)
    kept: list[Op] = []
    unneeded: dict[Value, Op] = {}
    for op in function.ops if blocks else ():
        if phase[op] != FREE or op.spec.comm is None or not op.spec.comm.gathers:
            continue
        uses = uses_of(op, used, phase)
        forward = [use for use in uses if phase[use] == FORWARD]
        if forward and inside.isdisjoint(forward) and all([phase[use] in CELLS for use in uses]):
            kept.append(op)
            if len(forward) == len(uses):
                unneeded[op.outputs[0]] = forward[0]
    return held(function, unneeded), frozenset(kept)
