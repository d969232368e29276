"""The runtime of a program: what the host spends to issue ops to a device."""

from __future__ import annotations

from dataclasses import dataclass

_JOINING = (
    "fuses",
    "multi_tensor",
    "waits",
    "scatters",
    "inline",
    "stages_first",
    "accumulates",
    "overlaps_products",
    "synchronous",
    "ring_attention",
    "fp8",
    "fp8_gathers",
    "expands_keys",
)
"""What of a runtime says which ops run as one, in what order, and what they send."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The figures of a framework, on the host of each device. `op` to `call` are seconds.

    The host issues the ops of a device one after the other and runs ahead of it; a device waits for an op that is not
    issued yet. `op`: of a compute op; `communication`: of a collective or transfer, and `member` more for each further
    device that takes part; `call`: of each call of a function, such as a microbatch of a stage.

    `fuses`: chains of pointwise ops run as one op, without reading or writing what is between them. `multi_tensor`: ops
    of one kind that do not need each other, such as the updates of all weights, run as one op. `waits`: before it calls
    a function, the host waits until the transfers that the function needs have ended. `scatters`: devices that have the
    same value each send a part of it to the next stage, and gather the parts there.

    `passes`: how often an op that memory limits goes over operands and results of 16 bits: casts to float32 and back
    are ops of their own. `skew`: a collective takes 1 + skew times as long as alone, as devices do not begin it at the
    same time. `inline`: the host is the device, as on CPUs: while it issues an op it computes nothing. `transfer`: of a
    transfer between two devices, where that differs from `communication`; `transfer_by`: by the number of ranks, where
    they wait for each other on the cores of their host. `stages_first`: it numbers devices by stages first, so that
    those of one pipeline are neighbours, not those that share a weight. `threads`: how many threads issue products,
    such as one more for backward passes: each has a workspace on the device. `gathers_again`: what sequence
    parallelism all-gathers for products, and context parallelism for attention, it gathers again in the backward pass,
    and saves only the shard. `logit_bytes`: what the kernels of its cross-entropy read and write for each logit,
    forward and backward, where they are not one each way.
    `score_block`: how many matrices of masked scores its kernel of their softmax takes at once: if a device has not a
    multiple of it, casts to float32, scale, mask and softmax are kernels of their own. `gap`: seconds of the device
    beside the work of a compute op, for which a framework runs more than one kernel, each with a start of its own:
    copies into another layout, biases, views that are made whole. `even_stages`: published runs have as many layers in
    each stage, or one less in the first and the last, whatever else these have. `selective`: what its selective
    recomputation is (`Plan`), where attention is fused. `separate`: its decoders have products of their own for
    queries, keys, values and both halves of a gated MLP. `gathered_again`: which weights it gathers again for backward
    passes, if they are sharded.
    `reports`: the memory of its log (`Measurement.peak_of`). `pools`: its collectives have streams, and so pools of the
    allocator, of their own. `logit_memory`: bytes for each logit of 16 bits that its cross-entropy takes beside it,
    forward, and beside it and its gradient, backward; and of the hole that it leaves among the allocator's blocks.
    `graphs`: a rank alone replays its step as a CUDA graph, whose ops its host does not issue.
    `norm_bytes`: what the kernels of a root-mean-square norm of 16 bits read and write for each number, forward and
    backward, where they are not one each way. `attention`: the speed of its fused attention, as a share of that of
    FlashAttention-2; `cudnn`: it is cuDNN's. `early`: its libraries are of the device's first year. `accumulates`:
    products of gradients of weights add to the sum of microbatches themselves. `overlaps_products`: what a product
    gathers of other devices of its axis, or scatters to them, is sent in pieces while it computes on others.
    `synchronous`: collectives of what a microbatch has computed are waited for where they are issued; by default only
    where their results are needed. `zigzag`:
    devices that split the queries of causal attention have as many of the first as of the last, so the same work, in a
    kernel for the keys of each device.
    `ring_attention`: devices that split the sequence of queries send keys and values, and their gradients, around a
    ring while attention computes on what is there, in two streams. Several collectives beside one op share its time.
    `gradient_buffer`: gradients are summed over microbatches in a buffer that exists from the start of a step.
    `sharded_logit_bytes`, `sharded_logit_memory`: as `logit_bytes` and `logit_memory`, of logits that are split over
    devices along the classes. `gathers_once`: in a pipeline, weights that are sharded over replicas are gathered once a
    step, and their gradients reduced once, after the last backward pass. `bucket`: how many numbers a bucket of
    gradients has that are reduced together, at least, and for each replica. `expands_keys`: keys and values are
    written once for each head of queries that shares them, and their gradients summed up after; context parallelism
    sends them so, the gradients in float32.

    `fp8`: products of weights but the head's, and their gradients, take operands of 8 bits, to which those of 16 are
    quantized beside them, which moves `quantized_bytes` a number. `fp8_gathers`: what such a product gathers along a
    mesh axis is quantized before, and sent in 8 bits. `fp8_saved`: what it takes is saved in 8
    bits.
    """

    name: str
    op: float = 0.0
    communication: float = 0.0
    member: float = 0.0
    call: float = 0.0
    fuses: bool = False
    multi_tensor: bool = False
    waits: bool = False
    scatters: bool = False
    passes: float = 1.0
    skew: float = 0.0
    inline: bool = False
    transfer: float | None = None
    transfer_by: tuple[tuple[int, float], ...] = ()
    stages_first: bool = False
    threads: int = 1
    gathers_again: bool = False
    logit_bytes: tuple[float, float] | None = None
    score_block: int = 1
    gap: float = 0.0
    even_stages: bool = False
    selective: str = "selective"
    separate: bool = False
    gathered_again: str = "all"
    reports: str = "allocated"
    pools: bool = False
    graphs: bool = False
    logit_memory: tuple[float, float, float] | None = None
    norm_bytes: tuple[float, float] | None = None
    attention: float = 1.0
    cudnn: bool = False
    early: bool = False
    accumulates: bool = False
    overlaps_products: bool = False
    synchronous: bool = False
    ring_attention: bool = False
    zigzag: bool = False
    gradient_buffer: bool = False
    sharded_logit_bytes: tuple[float, float] | None = None
    sharded_logit_memory: tuple[float, float, float] | None = None
    gathers_once: bool = False
    bucket: tuple[float, float] | None = None
    expands_keys: bool = False
    fp8: bool = False
    fp8_gathers: bool = False
    fp8_saved: bool = False
    quantized_bytes: float = 4.0

    def bytes_of_logits(self, sharded: bool) -> tuple[float, float] | None:
        """What the kernels of its cross-entropy move for each logit, forward and backward; None if they are one each
        way. `sharded`: the logits are split along the classes."""
        return self.sharded_logit_bytes if sharded and self.sharded_logit_bytes else self.logit_bytes

    def memory_of_logits(self, sharded: bool) -> tuple[float, float, float] | None:
        """What its cross-entropy works in for each logit (`logit_memory`), likewise."""
        return self.sharded_logit_memory if sharded and self.sharded_logit_memory else self.logit_memory

    @property
    def joins(self) -> Runtime:
        """The same without name and figures: what says which ops run as one."""
        return Runtime("", **{name: getattr(self, name) for name in _JOINING})

    @property
    def issues(self) -> bool:
        """Whether ops wait for their host: it takes time, or computes and communicates in one order."""
        return self.inline or max(self.op, self.communication, self.member, self.call, self.transfer or 0.0) > 0
