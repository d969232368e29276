"""Programs on a GPU. Marked `gpu`: they skip where there is none.

One rank under NCCL, and several that share the GPU over gloo, which goes through the host's memory; all compared with
the sequential program on numpy.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distir
from distir.api.data import Data
from distir.backends.lowering.engine import TorchRank, to_numpy, to_torch
from distir.backends.processes.preflight import out_of_memory
from distir.executor.reference.sequential import evaluate
from distir.ir.type import BFloat16, Bool, DType, Float16, Float32, Float64, Int64
from distir.transforms.rewriting.causal import causal, masks
from distir.transforms.rewriting.fuse import fuse
from tests.ops.samples import SAMPLES, Sample
from tests.ops.test_matrix import build, narrow

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
EXAMPLES = Path(__file__).parents[3] / "examples"
DEVICE = "cuda"
NEAR = {"f32": 2e-4, "f64": 1e-10, "bf16": 3e-2, "f16": 4e-3}
ON_GPU: dict[str, Any] = {"device": "cuda", "timeout": 120}
PLANS = [
    distir.Plan(dp=2),
    distir.Plan(tp=2, microbatches=2),
    distir.Plan(pp=2, microbatches=4),
    distir.Plan(dp=2, zero=3),
    distir.Plan(dp=2, pp=2, microbatches=4),
    distir.Plan(dp=2, tp=2),
]


def gpt(dtype: str | None = None, optimizer: str = "adamw", causal_mask: bool = False) -> distir.Model:
    """`causal_mask`: its attention knows that the mask is causal."""
    model = distir.load(EXAMPLES / "gpt2-tiny.onnx", {"batch": 8})
    if causal_mask:
        fused = fuse(model.function)
        model = replace(model, function=causal(fused, masks(fused)))
    model = model.training("cross-entropy", optimizer)
    return model if dtype is None else model.with_dtype(dtype)


@pytest.mark.parametrize("causal_mask", [False, True])
@pytest.mark.parametrize("dtype", [None, "float64", "bfloat16"])
def test_one_rank_under_nccl_is_the_sequential_program(dtype: str | None, causal_mask: bool) -> None:
    result = distir.run(
        gpt(dtype, causal_mask=causal_mask), distir.Plan(microbatches=2), steps=3, backend="nccl", check=True, **ON_GPU
    )
    assert result.check is not None
    assert result.check.ok
    assert all(0 < s < 60 for s in result.seconds)


def test_one_compiled_rank_is_the_sequential_program() -> None:
    result = distir.run(gpt("float64"), steps=3, backend="nccl", compiled=True, check=True, device="cuda")
    assert result.check is not None
    assert result.check.ok


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_ranks_that_share_a_gpu_are_the_sequential_program(plan: distir.Plan) -> None:
    result = distir.run(gpt("float64", "sgd"), plan, steps=2, backend="gloo", check=True, **ON_GPU)
    assert result.check is not None
    assert result.check.ok


def test_bfloat16_between_ranks() -> None:
    result = distir.run(gpt("bfloat16"), distir.Plan(dp=2, pp=2), steps=2, backend="gloo", check=True, **ON_GPU)
    assert result.check is not None
    assert result.check.ok


@pytest.mark.parametrize("dtype", [Float32, Float64, BFloat16, Float16], ids=repr)
@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{s.op}-{i}" for i, s in enumerate(SAMPLES)])
def test_every_op(sample: Sample, dtype: DType) -> None:
    """What numpy computes, for 16 bits in float64 from the same operands, within some roundings of the largest."""
    narrowed = narrow(sample, dtype)
    function = build(narrowed)
    op, arrays = function.ops[0], narrowed.arrays()
    wide = build(sample if dtype.size < 4 else narrowed).ops[0]
    operands = [np.asarray(x, v.type.dtype.numpy) for x, v in zip(arrays, wide.inputs, strict=True)]  # type: ignore[union-attr]
    want = evaluate(wide, operands, None)
    rank = TorchRank(function, 0, DEVICE)
    rank.load(dict(enumerate(arrays)))
    got = rank.step()
    near = NEAR[dtype.name]
    for k, x in enumerate(want if isinstance(want, tuple) else (want,)):
        y = to_numpy(got[k], op.outputs[k].type.dtype).astype(x.dtype)  # type: ignore[union-attr]
        scale = float(np.abs(x, where=np.isfinite(x), out=np.zeros(x.shape)).max(initial=1.0))
        np.testing.assert_allclose(y, np.asarray(x), rtol=near, atol=near * scale)


@pytest.mark.parametrize("causal_mask", [False, True])
def test_a_step_never_waits_for_its_device(causal_mask: bool) -> None:
    """Neither with the mask as an input nor where attention knows it, and so takes another kernel."""
    model = gpt("bfloat16", causal_mask=causal_mask)
    arrays = model.initial()
    data = Data(model.function, arrays)
    given = arrays | data.fixed() | data.step(0)
    rank = TorchRank(distir.distribute(model, distir.Plan(microbatches=2)), 0, "cuda")
    rank.load({k: given[v] for k, v in enumerate(model.function.inputs)})
    rank.step()  # the first loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        rank.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_buckets_between_ranks_that_share_a_gpu() -> None:
    """Gradients are computed straight into a buffer on the GPU, which goes through the host's memory."""
    plan = distir.Plan(dp=2, bucket_mb=0.01)
    result = distir.run(gpt("float64", "sgd"), plan, steps=2, backend="gloo", check=True, **ON_GPU)
    assert result.check is not None
    assert result.check.ok


def test_a_gpu_without_memory_is_reported_in_one_line() -> None:
    size = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(RuntimeError) as e:
        torch.empty(size, device="cuda")
    error = out_of_memory(e.value)
    assert error is not None
    assert "GPU 0 has a total capacity" in error.message


def test_a_profile_is_of_the_device(tmp_path: Path) -> None:
    """Slices from events: they lie in their step, and are together no longer than it."""
    plan = distir.Plan(microbatches=2)
    distir.run(gpt(), plan, steps=3, backend="nccl", profile=tmp_path, **ON_GPU)
    events = json.loads((tmp_path / "rank0.json").read_text())["traceEvents"]
    for step in [e for e in events if e.get("cat") == "step"]:
        ops = [e for e in events if e.get("cat") == "compute" and e["args"]["step"] == step["args"]["step"]]
        assert ops
        assert all(e["dur"] >= 0 and e["ts"] >= step["ts"] - 1 for e in ops)
        assert 0 < sum(e["dur"] for e in ops) <= step["dur"]
    assert distir.compare(tmp_path).ranks == 1


@pytest.mark.parametrize("dtype", [Float32, Float64, BFloat16, Int64, Bool], ids=repr)
def test_the_same_bits_come_back(dtype: DType) -> None:
    x = np.random.default_rng(0).integers(0, 2, (3, 4)).astype(dtype.numpy)
    assert np.array_equal(to_numpy(to_torch(x, dtype, torch.device("cuda")), dtype), x)
