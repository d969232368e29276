"""After a step every replica has the same gradients, to the bit: each rank's own are compared, not what it reports."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.device import Device
from distir.ir.function import Function
from distir.models.gpt import gpt
from distir.transforms.differentiation.training import SGD, initial_state, training_step
from distir.transforms.parallel3d import parallel_transform_3d

ROOT = Path(__file__).parents[3]
BATCH = 16
RANKS = """
import json, os, sys
import numpy as np, torch
from torch._C._distributed_c10d import FileStore
from distir.backends.transport.torch_distributed import start_group
from distir.backends.lowering.engine import TorchRank
from tests.backends.processes.test_gradients import program, step

dp, folder, plan = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
torch.set_num_threads(1)
for rank in range(dp):
    if os.fork() == 0:
        break
else:
    sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(dp)))
store = FileStore(f"{folder}/store", dp)
start_group("gloo", rank, dp, torch.device("cpu"), store, 60.0)
function, arrays = step()
engine = TorchRank(program(dp, plan), rank)
engine.load(dict(enumerate(arrays)))
for _ in range(2):  # the second starts from weights that are the ranks' own
    outputs = engine.step()
trained = len(function.updates)
own = {str(k): x.contiguous().numpy() for k, x in outputs.items() if 0 < k <= trained}
np.savez(f"{folder}/rank{rank}.npz", **own)
os._exit(0)
"""


@functools.cache
def step() -> tuple[Function, list[np.ndarray]]:
    """A GPT's training step in float32 that gives its gradients, and arrays in which every sample is another."""
    function = training_step(gpt(2, 32, 4, 64, 8, BATCH), "cross-entropy", SGD(0.1), gradients=True)
    rng = np.random.default_rng(0)
    arrays: list[np.ndarray] = []
    for v in function.inputs:
        shape, dtype = v.type.global_shape, v.type.dtype.numpy  # type: ignore[union-attr]
        draw = rng.integers(0, 8 if v.name == "position_ids" else 64, shape) if dtype.kind == "i" else None
        arrays.append((rng.standard_normal(shape) * 0.3 if draw is None else draw).astype(dtype))
    assert not initial_state(function)
    return function, arrays


def program(dp: int, plan: dict[str, Any]) -> Function:
    function, _ = step()
    return parallel_transform_3d(function, dp, 1, 1, [Device("cpu", k) for k in range(dp)], 2, **plan)


@pytest.mark.parametrize(
    ("dp", "plan"), [(4, {}), (2, {"bucket_mb": 0}), (4, {"bucket_mb": 0.01}), (4, {"overlap": False})]
)
def test_gradients_are_bitwise_equal_on_all_replicas(dp: int, plan: dict[str, Any], tmp_path: Path):
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    line = [sys.executable, "-c", RANKS, str(dp), str(tmp_path), json.dumps(plan)]
    done = subprocess.run(line, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ranks = [dict(np.load(tmp_path / f"rank{r}.npz")) for r in range(dp)]
    function, arrays = step()
    assert len(ranks[0]) == len(function.updates) == sum(v.kind == "parameter" for v in function.inputs)
    for k, x in ranks[0].items():
        assert x.dtype == np.float32
        assert x.any()
        assert all(other[k].tobytes() == x.tobytes() for other in ranks[1:]), function.outputs[int(k)].name
    values = dict(enumerate(arrays))
    for _ in range(2):
        results = SequentialExecutor().compute(function, [values[i] for i in range(len(arrays))])
        values |= {
            function.inputs.index(function.updates[v]): y
            for v, y in zip(function.outputs, results, strict=True)
            if v in function.updates
        }
    for k, x in ranks[0].items():
        np.testing.assert_allclose(x, results[int(k)], rtol=1e-3, atol=1e-5)
