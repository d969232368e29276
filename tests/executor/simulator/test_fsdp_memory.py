"""Memory of a step under the runtime "torchtitan", against what PyTorch's own FSDP2 allocates in that step.

The model, its selective recomputation, its loss and FSDP2 run on fake tensors, on a process group that sends nothing,
and each allocation is noted with its stream. So PyTorch, not distir, says what lives when, and in which pool.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from distir.api.cases import FAMILIES
from distir.api.compilation import distribute
from distir.api.model import Model, Precision
from distir.executor.cost_model import CostModel
from distir.executor.simulator.overheads import MIB
from distir.executor.simulator.pools import in_pools
from distir.executor.simulator.simulation import Simulation, Simulator
from distir.hardware import load_cluster, load_runtime
from distir.models.decoder import Decoder, decoder
from distir.transforms.differentiation.training import optimizer_named
from distir.transforms.plan import Plan

LAYERS, HIDDEN, HEADS, KV, FFN, VOCAB, SEQ, BATCH, SIZE = 6, 1024, 8, 2, 3584, 32_000, 1024, 4, 128
"""BATCH: of a device. SIZE: of a head."""
CLOSE = 0.015
MM = torch.ops.aten.mm.default
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide, narrow = HEADS * SIZE, KV * SIZE
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.wq, self.wo = nn.Linear(HIDDEN, wide, bias=False), nn.Linear(wide, HIDDEN, bias=False)
        self.wk, self.wv = nn.Linear(HIDDEN, narrow, bias=False), nn.Linear(HIDDEN, narrow, bias=False)
        self.w1, self.w3 = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (w(h).view(BATCH, SEQ, -1, SIZE).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k, v = (y.repeat_interleave(HEADS // KV, 1) for y in (k, v))
        y = ATTENTION(q, k, v, 0.0, True)[0].transpose(1, 2).reshape(BATCH, SEQ, -1)
        x = x + self.wo(y)
        h = self.norm2(x)
        return x + self.w2(functional.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def by_op() -> Any:
    """torchtitan's policy: the results of attention, and of every second product, the first included."""
    count = Counter[bool]()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        count[ctx.is_recompute] += op == MM
        keep = op == ATTENTION or (op == MM and count[ctx.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Allocations(TorchDispatchMode):
    """Live bytes, and the peaks of all and of each stream's."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[int, int]] = {}
        """By number of a storage its bytes and its stream."""
        self.now, self.peaks = defaultdict[int, int](int), defaultdict[int, int](int)
        self.peak = 0
        self._numbers, self._known = itertools.count(), dict[int, int]()
        self._resize = torch.UntypedStorage.resize_

    def begin(self, number: int, size: int) -> None:
        stream = id(torch.cpu.current_stream())
        self.live[number] = size, stream
        self.now[stream] += size
        self.peaks[stream] = max(self.peaks[stream], self.now[stream])
        self.peak = max(self.peak, sum(self.now.values()))

    def end(self, number: int) -> None:
        size, stream = self.live.pop(number, (0, 0))
        self.now[stream] -= size

    def note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._known:
            number = self._known[key] = next(self._numbers)
            self.begin(number, storage.nbytes())
            weakref.finalize(storage, lambda: (self._known.pop(key, None), self.end(number)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, FakeTensor) and t.device.type != "meta":
                self.note(t.untyped_storage())
        return out

    def __enter__(self) -> Any:
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            before, number = storage.nbytes(), self._known.get(id(storage))
            done = self._resize(storage, size)
            if number is not None and before and not size:
                self.end(number)
            elif number is not None and size and not before:
                self.begin(number, size)
            return done

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*args)


@pytest.fixture
def replicas(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def measured(replicas: int) -> Allocations:
    """A step after the first, in which the optimizer has its state."""
    mesh = init_device_mesh("cpu", (replicas,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with FakeTensorMode():
        with torch.device("meta"):
            model = Llama()
        for k, layer in enumerate(model.layers):
            model.layers[k] = checkpoint_wrapper(layer, context_fn=by_op, preserve_rng_state=False)
        for k, layer in enumerate(model.layers):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=k < LAYERS - 1)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device="cpu")
        ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
        with Allocations() as found:
            weights = [p.to_local().detach() for p in model.parameters()]  # type: ignore[attr-defined]
            state = [torch.zeros_like(w) for w in weights for _ in range(2)]
            logits = model(ids)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
            del logits
            loss.backward()
            assert len(state) == 2 * len(weights)
    return found


def predicted(replicas: int, runtime: str) -> Simulation:
    figures = load_runtime(runtime)
    sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV, "ffn": FFN, "vocab": VOCAB, "seq": SEQ}
    given = {**FAMILIES["llama"], **sizes, "batch": BATCH * replicas, "separate": figures.separate}
    settings = optimizer_named("adamw", clip_norm=1.0)
    model = Model(decoder(Decoder(**given))).training("cross-entropy", settings, precision=Precision("bf16", "fp32"))
    plan = Plan(replicas, zero=3, recompute=figures.selective, gathered_again=figures.gathered_again)
    topology = load_cluster("grand-teton-h100-96gb", devices=replicas)
    program = distribute(model, plan, topology.devices[:replicas], check=False)
    return Simulator(CostModel(topology, runtime=figures)).interpret(program)


@pytest.mark.parametrize("replicas", [8, 64], indirect=True)
def test_memory_is_that_of_fsdp2(replicas: int) -> None:
    found = measured(replicas)
    simulation = predicted(replicas, "torchtitan")
    (device,) = simulation.program.classes.first
    use = simulation.memory(device)
    assert use.total == pytest.approx(found.peak, rel=CLOSE)
    assert len(found.peaks) == 3
    compute = max(found.peaks.values())
    assert compute == found.peak  # it has what is live at the peak
    hole = 2 * BATCH * SEQ * VOCAB
    pools = in_pools(simulation.program, use) - hole
    assert pools == pytest.approx(sum(found.peaks.values()) - compute, rel=0.05)
    assert use.total + pools == pytest.approx(sum(found.peaks.values()), rel=CLOSE)
    (reserved,) = set(simulation.reserved_memory.values())
    workspace = simulation.overheads(device).workspace
    assert reserved == use.total + pools + hole + workspace + 22 * MIB


def test_a_compiler_saves_only_what_is_needed() -> None:
    """Of the products of a block the last is in no backward op: eager mode keeps its result, 2 bytes a number."""
    eager, compiled = (predicted(8, name) for name in ("torchtitan", "torchtitan-compiled"))
    (device,) = eager.program.classes.first
    more = LAYERS * 2 * BATCH * SEQ * HIDDEN
    assert eager.memory(device).total - compiled.memory(device).total == more


def test_without_pools_of_its_own_the_allocator_holds_what_is_live() -> None:
    simulation = predicted(8, "torchtitan")
    (device,) = simulation.program.classes.first
    use = simulation.memory(device)
    program = Simulator(CostModel(simulation.program.cost.topology)).interpret(simulation.program.function).program
    assert in_pools(program, use) == 0
