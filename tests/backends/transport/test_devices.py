"""Programs on a device other than the CPU, as far as that can be tried without one.

Tensors on torch's "meta" device have no data. So whatever a rank makes on the CPU by mistake meets them and is refused,
and so is whatever looks at data, which on a GPU would wait for it.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import distir
from distir.api.data import Data
from distir.backends.lowering import attention_kernels as attention
from distir.backends.lowering.buckets import buffer
from distir.backends.lowering.engine import TorchRank
from distir.backends.lowering.torch_calls import trace
from distir.backends.tensors.staging import DeviceMemory, Staged
from distir.backends.tensors.torch_namespace import TorchNamespace
from distir.backends.transport import torch_distributed as comm
from distir.backends.transport.nccl import Nccl
from distir.backends.transport.transfers import Transfers
from distir.ir.function import FunctionMaker
from distir.ir.type import Float32, Tensor
from distir.transforms.differentiation.training import Optimizer
from tests.ops.samples import SAMPLES, Sample
from tests.ops.test_matrix import build

pytestmark = pytest.mark.usefixtures("_sgd")


@pytest.fixture
def _sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no fused SGD on its meta device."""
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **settings: None)


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{s.op}-{i}" for i, s in enumerate(SAMPLES)])
def test_every_op_stays_on_its_device(sample: Sample) -> None:
    rank = TorchRank(build(sample), 0, "meta")
    rank.load({k: np.zeros(o.shape, o.dtype.numpy) for k, o in enumerate(sample.operands)})
    assert {x.device.type for x in rank.step().values()} == {"meta"}


@pytest.fixture
def _as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device is taken for a GPU where kernels are chosen."""
    monkeypatch.setattr(attention, "_generation", lambda device: 8)


@pytest.mark.usefixtures("_as_a_gpu")
def test_kernels_are_tried_on_operands_as_they_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they refuse rows whose elements are not one after the other, or read beyond what there is."""
    seen: list[torch.Tensor] = []
    forward, backward = attention._FORWARD["efficient"], attention._BACKWARD["efficient"]
    monkeypatch.setitem(attention._FORWARD, "efficient", lambda *a: seen.extend(a[:4]) or forward(*a))
    monkeypatch.setitem(
        attention._BACKWARD, "efficient", lambda d, saved, *a: seen.extend((d, *saved)) or backward(d, saved, *a)
    )
    f = FunctionMaker("main")
    q, k, v, d = [f.add_input_value(name, Tensor(Float32, (2, 4, 64, 16))) for name in "qkvd"]
    mask = f.add_input_value("mask", Tensor(Float32, (64, 64)))
    y, lse = f.emit("Attention", q, k, v, mask, scale=0.25)
    f.set_outputs(f.emit("AttentionGrad", q, k, v, y, lse, d, mask, scale=0.25))
    for op in f.finalize().ops:
        assert trace(op, {"scale": 0.25}, TorchNamespace("meta")) is not None
    assert len(seen) == 10
    assert all(x.stride(-1) == 1 for x in seen)
    whole = [x for x in seen if x is not seen[3]]  # the mask is broadcast
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in whole)


@pytest.mark.usefixtures("_as_a_gpu")
def test_a_step_copies_and_waits_for_nothing() -> None:
    """Weights are renewed where they are; no number is brought from the host to be chosen."""
    model = distir.load(EXAMPLES / "gpt2-tiny.onnx", {"batch": 8}, loss="cross-entropy", dtype="bfloat16")
    source = TorchRank(distir.distribute(model, distir.Plan()), 0, "meta").source()
    assert "attention_backward(" in source
    assert "contiguous(" in source  # of the mask, however it may lie in memory
    assert "clone(" not in source
    assert source.count("embedding_dense_backward(") == 2  # which adds up in float32
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    chosen = [x for call in calls if ast.unparse(call.func) == "where" for x in call.args[1:]]
    assert chosen
    assert not [ast.unparse(x) for x in chosen if isinstance(x, ast.Constant | ast.UnaryOp)]


@pytest.mark.parametrize(
    ("name", "loss", "optimizer", "dtype"),
    [("gpt2-tiny", "cross-entropy", "adamw", "bfloat16"), ("mlp", "mse", distir.SGD(momentum=0.9), None)],
)
def test_a_step_never_waits_for_its_device(name: str, loss: str, optimizer: str | Optimizer, dtype: str | None) -> None:
    model = distir.load(EXAMPLES / f"{name}.onnx", {"batch": 8}, loss=loss, optimizer=optimizer, dtype=dtype)
    program = distir.distribute(model, distir.Plan(microbatches=2))
    arrays = model.initial()
    data = Data(model.function, arrays)
    given = arrays | data.fixed() | data.step(0)
    rank = TorchRank(program, 0, "meta")
    rank.load({k: given[v] for k, v in enumerate(model.function.inputs)})
    for _ in range(2):
        assert {x.device.type for x in rank.step().values()} == {"meta"}


def test_buckets_are_where_gradients_are_computed() -> None:
    """Also where all that is moved stands in the host's memory."""
    memory = Staged(torch.device("meta"))
    row = buffer([Tensor(Float32, (3, 4)), Tensor(Float32, (5,))], memory, persistent=False)()
    assert {x.device.type for x in row} == {"meta"}
    assert memory.empty((3,), torch.float32).device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.int16, torch.bfloat16])
def test_messages_are_of_types_that_nccl_moves(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """And each goes by itself: it is not known what the other side would put together."""
    posted: list[list[Any]] = []
    monkeypatch.setattr(dist, "P2POp", lambda *a: a)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: posted.append(ops) or [])
    t = Transfers(0, DeviceMemory(torch.device("cpu")), lambda ranks: Nccl(0, {(0, 1): None}))
    for number in range(2):
        t.send(torch.ones(2, 3, dtype=dtype), 1, number)
    t.post()
    assert [[op[1].dtype for op in ops] for ops in posted] == [[{torch.int16: torch.uint8}.get(dtype, dtype)]] * 2


@pytest.mark.parametrize(("backend", "met"), [("nccl", [(0, 2), (1, 2)]), ("gloo", [])])
def test_ranks_of_a_group_meet_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch, backend: str, met: list[tuple[int, ...]]
) -> None:
    """Under NCCL, which would else let each wait for all in the middle of a step. As rank 2."""
    seen: list[Any] = []
    monkeypatch.setattr(comm, "_groups", {})
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: tuple(ranks))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: seen.append(group))
    with FakeTensorMode():
        groups = [comm._new_group(ranks) for ranks in ([0, 2], [1, 2], [2], [0, 2])]
    assert groups == [(0, 2), (1, 2), (2,), (0, 2)]
    assert seen == met


@pytest.mark.parametrize(("backend", "met"), [("nccl", [("irecv", 0, (0, 2)), ("isend", 1, (2, 1))]), ("gloo", [])])
def test_two_ranks_meet_when_a_channel_is_made(monkeypatch: pytest.MonkeyPatch, backend: str, met: list[Any]) -> None:
    """By a first message, in the channel's direction: a connection of its own is made for these. As rank 2."""
    seen: list[Any] = []
    monkeypatch.setattr(comm, "_groups", {})
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: tuple(ranks))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "P2POp", lambda op, x, peer, group: (op.__name__, peer, group))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: seen.extend(ops) or [])
    with FakeTensorMode():
        groups = [comm._new_channel(ranks) for ranks in ([0, 2], [2, 1])]
    assert groups == [(0, 2), (2, 1)]
    assert seen == met


@pytest.mark.parametrize(
    ("backend", "done", "left"), [("nccl", True, 1), ("nccl", False, 0), ("gloo", True, 1), ("gloo", False, 1)]
)
def test_after_an_error_nccl_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, backend: str, done: bool, left: int
) -> None:
    seen: list[None] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append(None))
    comm.leave_group(done)
    assert len(seen) == left
