"""Benchmark of a training step of GPT-2 (124M) in bfloat16 on one GPU: distir, distir compiled (`distir run
--compile`), eager PyTorch with autograd, torch.compile.

    python benchmarks/cuda.py [--runs N] [--steps N] [--batch N] [--seq N] [--layers N] [--width N] [--json]

All have the same weights, data, dtype and AdamW, and alternate in one process: N runs of some steps each, timed by CUDA
events; the median over runs is printed. The losses of the first steps are printed, too: they should agree to bfloat16's
precision. PyTorch uses its fastest kernels: causal scaled_dot_product_attention and the fused AdamW. On a GPU the
figures are written to benchmarks/results/cuda.json. Without a GPU nothing is measured; `--device cpu` tests the script
itself and writes nothing. Needs the `dev` extra.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laps import machine, parser, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cuda.json"
GOAL = {"eager": 1.0, "compile": 0.9}
"""The speed-up that one of distir's steps should reach."""
OURS = ("distir", "distir compiled")
LEARNING_RATE = 1e-4
WARM_UP = 3
CHECKED = 3
Step = Callable[[], Any]
"""Runs one training step; returns its loss."""


class Work:
    """The PyTorch model and its training data."""

    def __init__(self, args: Any) -> None:
        import torch

        sys.path.insert(0, str(ROOT))
        from examples.export import build

        self.sizes = {k: getattr(args, k) for k in ("layers", "width", "heads", "vocab", "seq")}
        self.device = torch.device(args.device)
        self.batch, self.dtype = args.batch, args.dtype
        self.module, _ = build("gpt2", batch=args.batch, ids_only=True, **self.sizes)
        torch.manual_seed(0)
        shape = (args.batch, args.seq)
        self.inputs = {"input_ids": torch.randint(self.sizes["vocab"], shape)}
        self.labels = torch.randint(self.sizes["vocab"], shape)


def distir_step(work: Work, compiled: bool) -> Step:
    """distir's step: one program, without autograd."""
    import distir
    from distir.backends.lowering.engine import TorchRank
    from examples.export import export

    with tempfile.TemporaryDirectory() as folder:
        path = export("gpt2", Path(folder, "gpt2.onnx"), ids_only=True, **work.sizes)
        optimizer = distir.AdamW(lr=LEARNING_RATE)
        model = distir.load(path, {"batch": work.batch}, loss="cross-entropy", optimizer=optimizer, dtype=work.dtype)
        arrays = model.initial()
    rank = TorchRank(distir.distribute(model, distir.Plan()), 0, work.device, compiled=compiled)
    given = {v.name: x.numpy() for v, x in _by_name(model.function, work)}
    rank.load({k: given.get(v.name, arrays.get(v)) for k, v in enumerate(model.function.inputs)})
    return lambda: rank.step()[0]


def _by_name(function: Any, work: Work) -> list[tuple[Any, Any]]:
    known = work.inputs | {"labels": work.labels}
    return [(v, known[v.name]) for v in function.inputs if v.name in known]


def torch_step(work: Work, compiled: bool) -> Step:
    """PyTorch's step: autograd, with its fastest attention and AdamW."""
    import copy

    import torch

    module = copy.deepcopy(work.module).to(work.device, getattr(torch, work.dtype))
    module.set_attn_implementation("sdpa")  # pyright: ignore[reportCallIssue]
    inputs = {k: x.to(work.device) for k, x in work.inputs.items()}
    labels = work.labels.to(work.device).flatten()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def loss_of() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(module(**inputs).flatten(0, -2), labels)

    forward = torch.compile(loss_of) if compiled else loss_of

    def step() -> torch.Tensor:
        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def seconds(work: Work, step: Step, steps: int) -> float:
    """The time of a step: the mean over consecutive steps."""
    from distir.backends.tensors.clock import Clock

    clock = Clock(work.device)
    begin = clock.now()
    for _ in range(steps):
        step()
    end = clock.now()
    if work.device.type == "cuda":
        import torch

        torch.cuda.synchronize()
    return clock.between(begin, end) / steps / 1e9


def measure(args: Any) -> dict[str, Any]:
    """All results of the benchmark."""
    import torch

    work = Work(args)
    steps = {"distir": distir_step(work, False), "eager": torch_step(work, False)}
    if not args.no_compile:
        steps |= {"distir compiled": distir_step(work, True), "compile": torch_step(work, True)}
    losses = {name: [round(float(step()), 4) for _ in range(CHECKED)] for name, step in steps.items()}
    for step in steps.values():
        seconds(work, step, WARM_UP)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.runs):
        for name, step in steps.items():
            times[name].append(seconds(work, step, args.steps))
    cuda = work.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else machine(),
        "torch": torch.__version__,
        "dtype": args.dtype,
        "sizes": work.sizes | {"batch": work.batch},
        "parameters": sum(p.numel() for p in work.module.parameters()),
        "losses": losses,
        "seconds": {name: statistics.median(row) for name, row in times.items()},
        "ratio": {
            ours: {
                name: statistics.median(a / b for a, b in zip(row, times[ours], strict=True))
                for name, row in times.items()
            }
            for ours in OURS
            if ours in times
        },
        "goal": GOAL,
    }


def main() -> None:
    flags = parser(__doc__, 7)
    for name, default in {"steps": 10, "batch": 8, "seq": 1024, "layers": 12, "width": 768, "heads": 12}.items():
        flags.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default: {default}")
    flags.add_argument("--vocab", type=int, default=50257, metavar="N", help="default: 50257")
    flags.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="default: cuda")
    flags.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default: bfloat16")
    flags.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    args = flags.parse_args()
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        missing = {"gpus": 0, "torch": torch.__version__, "measured": None}
        print(
            json.dumps(missing) if args.json else f"torch {torch.__version__} finds 0 GPUs here: nothing was measured"
        )
        return
    found = measure(args)
    if args.device == "cuda":
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    if args.json:
        print(json.dumps(found, indent=2))
        return
    rows = [
        (
            name,
            f"{s * 1e3:.2f} ms",
            *[f"{ratio[name]:.3f}" for ratio in found["ratio"].values()],
            " ".join(map(str, found["losses"][name])),
        )
        for name, s in found["seconds"].items()
    ]
    print(f"{found['device']}, torch {found['torch']}, {found['dtype']}, {found['parameters'] / 1e6:.1f}M parameters")
    print(table(("step", "time", *[f"by {ours}" for ours in found["ratio"]], "first losses"), rows))


if __name__ == "__main__":
    main()
