"""Single kernels of PyTorch on one GPU in bfloat16: matrix products with their gradients, these in 8 bits, and
attention, against the predictions for the GPU by its shipped figures.

    python benchmarks/gpu_kernels.py --measure FILE    on a GPU: writes the seconds of each kernel
    python benchmarks/gpu_kernels.py [FILE]            on any machine: compares with the predictions; default: what was
                                                       measured on an H100, benchmarks/results/h100_kernels.json

Seconds are the median of three runs of some calls one after the other, with random operands.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from laps import as_json, parser, table

RESULTS = Path(__file__).parent / "results" / "h100_kernels.json"
ROWS = (512, 1024, 2048, 4096, 8192, 16384)
WEIGHTS = (
    *((1024, 1024), (1024, 4096), (1536, 12288), (2048, 2048), (2048, 8192), (3584, 8192), (4096, 1536), (4096, 4096)),
    *((4096, 14336), (8192, 1280), (8192, 3584), (8192, 8192), (8192, 28672), (12288, 4608), (12288, 6144)),
    (12288, 12288),
)
"""Inputs and outputs of layers, whole and split over devices."""
HEADS = ((32, 128), (32, 64), (16, 64), (12, 64))
FEW = 8, 12, 24
"""Heads of a device that has part of them."""
SEQUENCES = (256, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 8192
"""Of a batch of shorter sequences."""
LARGEST = 2.5e12
"""Multiply-adds of a product that is still measured."""
RUNTIMES = {"flash": "torch-eager", "cudnn": "megatron-core", "gemm": "torch-eager", "gemm8": "torch-eager+fp8"}
"""Runtimes with these kernels."""
PRODUCTS = {"gemm": "product", "gemm8": "product in 8 bits"}
Row = dict[str, Any]


def seconds_of(call: Callable[[], Any]) -> float:
    import torch

    from distir.backends.tensors.clock import Clock

    clock = Clock(torch.device("cuda"))
    for _ in range(3):
        call()

    def timed(count: int) -> float:
        begin = clock.now()
        for _ in range(count):
            call()
        end = clock.now()
        torch.cuda.synchronize()
        return clock.between(begin, end) / 1e9 / count

    count = max(3, min(50, int(0.02 / max(timed(1), 1e-6))))
    return statistics.median(timed(count) for _ in range(3))


def products_of_8_bits(m: int, depth: int, n: int) -> dict[str, float]:
    """Seconds of a product and its gradients: quantized operands, each with its depth innermost, results in bfloat16.
    As frameworks have it, only the product itself accumulates with the lower precision of tensor cores."""
    import torch

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)

    scale = torch.ones((), device="cuda")

    def seconds(rows: int, columns: int, depth: int, fast: bool) -> float:
        a, b = random(rows, depth), random(columns, depth).t()
        return seconds_of(
            lambda: torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=fast)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        )

    return {"fwd": seconds(m, n, depth, True), "dx": seconds(m, depth, n, False), "dw": seconds(n, depth, m, False)}


def measure() -> Iterator[Row]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

    for m in ROWS:
        for depth, n in WEIGHTS:
            if m * depth * n <= LARGEST:
                x, w, g = random(m, depth), random(n, depth), random(m, n)
                calls = {"fwd": lambda: x @ w.t(), "dx": lambda: g @ w, "dw": lambda: g.t() @ x}  # noqa: B023
                times = {key: seconds_of(call) for key, call in calls.items()}
                yield {"kind": "gemm", "m": m, "k": depth, "n": n, **times}
                if torch.cuda.get_device_capability() >= (8, 9):  # the first that has them
                    yield {"kind": "gemm8", "m": m, "k": depth, "n": n, **products_of_8_bits(m, depth, n)}
    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for batch, heads, s, size, causal in attentions():
        q, k, v = [random(batch, heads, s, size).requires_grad_() for _ in range(3)]
        slopes = random(batch, heads, s, size)
        for name, kernel in kernels.items():
            with sdpa_kernel(kernel):

                def attend() -> torch.Tensor:
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: B023

                forward, y = seconds_of(attend), attend()
                backward = seconds_of(
                    lambda: torch.autograd.grad(y, (q, k, v), slopes, retain_graph=True)  # noqa: B023
                )
            row: Row = {
                "kind": "attention",
                "kernel": name,
                "causal": causal,
                "b": batch,
                "h": heads,
                "s": s,
                "d": size,
            }
            yield row | {"fwd": forward, "bwd": backward}


def attentions() -> Iterator[tuple[int, int, int, int, bool]]:
    """Sequences, heads, tokens, width of a head and whether causal: batches of as many tokens, and single sequences of
    few heads."""
    for s in SEQUENCES:
        for heads, size in HEADS:
            yield max(1, TOKENS // s), heads, s, size, True
        for size in (128, 64):
            yield max(1, TOKENS // s), 32, s, size, False
            for heads in FEW if s >= 1024 else ():
                yield 1, heads, s, size, True


def compare(rows: list[Row], cluster: str) -> list[Row]:
    """Each kernel with its predicted seconds on a device of a cluster; of attention both ways together."""
    from distir import CostModel
    from distir.hardware import load_cluster, load_runtime
    from distir.ir.spec import lookup
    from distir.ir.type import BFloat16, Float32, Tensor

    topology = load_cluster(cluster)
    device = topology.spec(topology.devices[0])
    costs = {key: CostModel(topology, runtime=load_runtime(name)) for key, name in RUNTIMES.items()}
    found: list[Row] = []

    def add(name: str, flops: float, measured: float, predicted: float) -> None:
        error = predicted / measured - 1
        found.append({"name": name, "flops": flops, "measured": measured, "predicted": predicted, "error": error})

    for row in rows:
        if row["kind"] in PRODUCTS:
            x, w, y = [Tensor(BFloat16(), (row[a], row[b])) for a, b in ("mk", "kn", "mn")]
            flops = 2.0 * row["m"] * row["k"] * row["n"]
            predicted = costs[row["kind"]].compute_seconds(lookup("MatMul"), {}, [x, w], [y], device)
            for key in ("fwd", "dx", "dw"):
                add(PRODUCTS[row["kind"]], flops, row[key], predicted)
        else:
            q = Tensor(BFloat16(), (row["b"], row["h"], row["s"], row["d"]))
            sums = Tensor(Float32(), q.shape[:-1])
            causal = row.get("causal", True)
            attrs = {"causal": causal, "scale": row["d"] ** -0.5}
            cost, flops = costs[row["kernel"]], 14.0 * math.prod(q.shape) * row["s"] / (1 + causal)
            predicted = cost.compute_seconds(lookup("Attention"), attrs, [q, q, q], [q, sums], device)
            predicted += cost.compute_seconds(lookup("AttentionGrad"), attrs, [q, q, q, q, sums, q], [q, q, q], device)
            add(f"{row['kernel']} attention, {row['s']} tokens", flops, row["fwd"] + row["bwd"], predicted)
    return found


def shown(found: list[Row]) -> str:
    """Mean errors of products by their size, and of attention by kernel and tokens."""
    groups: dict[str, list[Row]] = {}
    for row in found:
        name = row["name"]
        if name in PRODUCTS.values():
            name = f"{name}, {10 ** math.floor(math.log10(row['flops'] / 1e9)):,} GFLOP and more"
        groups.setdefault(name, []).append(row)
    lines = [
        (
            name,
            str(len(rows)),
            f"{statistics.fmean(abs(row['error']) for row in rows):.1%}",
            f"{statistics.fmean(row['error'] for row in rows):+.1%}",
        )
        for name, rows in sorted(groups.items())
    ]
    head = "kernel", "measured", "mean error", "bias"
    means = [
        f"{name}: mean error {statistics.fmean(abs(row['error']) for row in found if row['name'] == name):.1%}"
        for name in PRODUCTS.values()
        if any(row["name"] == name for row in found)
    ]
    return "\n".join([table(head, lines), *means])


def main() -> None:
    flags = parser(__doc__, 1)
    flags.add_argument("file", nargs="?", type=Path, default=RESULTS, metavar="FILE")
    flags.add_argument("--cluster", default="dgx-h100", metavar="NAME", help="of such GPUs; default: dgx-h100")
    flags.add_argument("--measure", type=Path, metavar="FILE", help="measure, and write there")
    args = flags.parse_args()
    if args.measure is not None:
        import torch

        if not torch.cuda.is_available():
            flags.error("--measure needs a GPU, and there is none here")
        device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.measure.write_text(json.dumps(device | {"rows": list(measure())}) + "\n")
        return
    found = compare(json.loads(args.file.read_text())["rows"], args.cluster)
    if not as_json(args.json, found):
        print(shown(found))


if __name__ == "__main__":
    main()
