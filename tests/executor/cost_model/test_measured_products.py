"""Single products in float32, plain and batched, as measured on GPUs, against the cost model of shipped devices."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster
from distir.ir.spec import lookup
from distir.ir.type import Float, Tensor

FILE = Path(__file__).parents[4] / "shared" / "accuracy" / "gemm_fp32_kernels.csv"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="no measurements: ../shared is absent")
MANY = 80
GPUS = {
    "NVIDIA A100 80GB PCIe": ("a100-pcie-80gb", 0.10),
    "NVIDIA A100-PCIE-40GB": ("a100-pcie-40gb", 0.10),
    "NVIDIA H100 80GB HBM3": ("h100-sxm", 0.13),
    "Tesla V100-PCIE-32GB": ("v100-pcie", 0.10),
}


def measured(gpu: str, op: str) -> list[tuple[list[tuple[int, ...]], float]]:
    """Shapes of both operands and of the result, and seconds, of some of the products."""
    with FILE.open() as file:
        reader = csv.DictReader(line for line in file if not line.startswith("#"))
        rows = [r for r in reader if r["device"] == gpu and r["op"] == op]
    found: list[tuple[list[tuple[int, ...]], float]] = []
    for r in rows[:: max(1, len(rows) // MANY)]:
        b, m, k, n = (int(r[x]) for x in "BMNK")  # the file's N is what is summed over
        lead = (b,) if op == "bmm" else ()
        found.append(([(*lead, m, k), (*lead, k, n), (*lead, m, n)], float(r["latency_ms"]) * 1e-3))
    return found


@pytest.mark.parametrize("op", ["linear", "bmm"])
@pytest.mark.parametrize("gpu", GPUS)
def test_products_take_as_long_as_measured(gpu: str, op: str, tmp_path: Path) -> None:
    device, most = GPUS[gpu]
    file = tmp_path / "one.toml"
    file.write_text(f'name = "one"\ndevice = "{device}"\nnode = "pcie4"\nnetwork = "infiniband-hdr"\n')
    topology = load_cluster(file)
    cost, spec = CostModel(topology), lookup("MatMul")
    errors: list[float] = []
    for shapes, seconds in measured(gpu, op):
        a, b, y = (Tensor(Float(), s) for s in shapes)
        errors.append(cost.compute(spec, {}, [a, b], [y], topology.devices[0]) / seconds - 1)
    assert len(errors) > 5
    assert sum(map(abs, errors)) / len(errors) <= most
    assert abs(sum(errors)) / len(errors) <= 0.06
