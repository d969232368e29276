"""Benchmark of training steps on one GPU: distir, distir compiled (`distir run --compile`), eager PyTorch with
autograd, torch.compile.

    python benchmarks/cuda.py [--model NAME ...] [--precision NAME ...] [--batch N ...] [--recompute NAME ...]

gpt2 is GPT-2 of 124M parameters with 1,024 tokens a sample, llama one of 1.1B (as TinyLlama) with 4,096, vit a ViT-B
of 224 x 224 pixels. All steps of a model have the same weights, data and AdamW (torch's fused kernel), and alternate
in one process: N runs of some steps each, timed by CUDA events; the median over runs is printed, with the losses of
the first steps, which should agree to the precision, and the most memory that torch's allocator has handed out. In
bf16 weights, optimizer and statistics are float32 and products bfloat16: PyTorch has that from `torch.autocast`.
PyTorch uses its fastest kernels: scaled_dot_product_attention and the fused AdamW.

Model FLOPs utilization is of the device's peak by its data sheet. On a GPU the figures are added to
benchmarks/results/cuda.json. Without a GPU nothing is measured; `--device cpu` tests the script itself and writes
nothing. Needs the `dev` extra.
"""

from __future__ import annotations

import copy
import gc
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laps import as_json, machine, parser, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cuda.json"
LEARNING_RATE = 1e-4
PADDED = 64
"""Of what sizes of weights are multiples, by padding, in the plans of distir."""
WARM_UP = 3
CHECKED = 3
COMPILED = "compiled"
EAGER, COMPILE = "eager PyTorch", "torch.compile"
DATA_SHEET = "nebius-h200"
"""The cluster whose peak FLOP/s, of the data sheet, utilization is of; those of an H100 (SXM) are the same."""
KEYS = ("model", "precision", "batch", "layers", "seq", "step", "device")
"""What is the same in two rows of one measurement."""
Step = Callable[[], Any]
"""Runs one training step; returns its loss."""


def gpt2(layers: int | None, seq: int | None) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers or 12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(config.vocab_size, (2, seq or 1024))}


def llama(layers: int | None, seq: int | None) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers or 22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return LlamaForCausalLM(config), {"input_ids": torch.randint(config.vocab_size, (2, seq or 4096))}


def vit(layers: int | None, seq: int | None) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_hidden_layers=layers or 12)
    config.num_labels = 1000
    return ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 224, 224)}


class Case(NamedTuple):
    """A model, and the batch it is measured with."""

    build: Callable[[int | None, int | None], tuple[Any, dict[str, Any]]]
    batch: int


CASES = {"gpt2": Case(gpt2, 8), "llama": Case(llama, 2), "vit": Case(vit, 128)}


class Work:
    """A model as a PyTorch module and as distir's training step, in a precision, with its data."""

    def __init__(self, name: str, precision: str, batch: int, args: Any, module: Any, example: Any) -> None:
        import torch

        import distir

        self.name, self.precision, self.batch = name, precision, batch
        self.device, self.module = torch.device(args.device), module
        optimizer = distir.AdamW(lr=LEARNING_RATE, weight_decay=0.01)
        self.model = distir.load(
            module,
            example,
            {"batch": batch},
            loss="cross-entropy",
            output="logits",
            optimizer=optimizer,
            precision=precision,
        )
        torch.manual_seed(0)
        ((key, x),) = example.items()
        shape = (batch, *x.shape[1:])
        many = module.config.vocab_size if key == "input_ids" else module.config.num_labels
        self.inputs = {key: torch.randint(many, shape) if key == "input_ids" else torch.randn(shape)}
        self.labels = torch.randint(many, shape if key == "input_ids" else shape[:1])

    def plan(self, recompute: str) -> Any:
        import distir

        return distir.Plan(recompute=recompute, pad_multiple=PADDED)


def distir_step(work: Work, recompute: str, compiled: bool) -> Step:
    """distir's step: one program, without autograd."""
    import distir
    from distir.backends.lowering.engine import TorchRank

    rank = TorchRank(distir.distribute(work.model, work.plan(recompute)), 0, work.device, compiled=compiled)
    arrays, given = work.model.initial(), work.inputs | {"labels": work.labels}
    inputs = work.model.function.inputs
    rank.load({k: given[v.name].numpy() if v.name in given else arrays[v] for k, v in enumerate(inputs)})
    return lambda: rank.step()[0]


def torch_step(work: Work, compiled: bool) -> Step:
    """PyTorch's step: autograd, with its fastest attention and AdamW."""
    import torch

    module = copy.deepcopy(work.module).to(work.device)
    module.set_attn_implementation("sdpa")
    inputs = {k: x.to(work.device) for k, x in work.inputs.items()}
    labels = work.labels.to(work.device).flatten()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    low = torch.autocast(work.device.type, torch.bfloat16, enabled=work.precision == "bf16")

    def loss_of() -> torch.Tensor:
        with low:
            return torch.nn.functional.cross_entropy(module(**inputs).logits.flatten(0, -2), labels)

    forward = torch.compile(loss_of) if compiled else loss_of

    def step() -> torch.Tensor:
        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class Measured:
    """A step and what was measured of it."""

    def __init__(self, work: Work, make: Callable[[], Step]) -> None:
        import torch

        self.device = work.device
        self.cuda = work.device.type == "cuda"
        before = self._allocated()
        self.step = make()
        losses = [self.step()]  # the first compiles
        self._allocated()
        losses += [self.step() for _ in range(CHECKED - 1)]
        self.losses = [round(float(x), 4) for x in losses]
        self.peak = torch.cuda.max_memory_allocated() - before if self.cuda else 0
        """The most bytes that the step has of the device's memory, with its state."""
        self.seconds(WARM_UP)
        self.times: list[float] = []

    def _allocated(self) -> int:
        """The bytes that are in use; the largest is counted from now on."""
        import torch

        if not self.cuda:
            return 0
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def seconds(self, steps: int) -> float:
        """The time of a step: the mean over consecutive steps."""
        import torch

        from distir.backends.tensors.clock import Clock

        clock = Clock(self.device)
        begin = clock.now()
        for _ in range(steps):
            self.step()
        end = clock.now()
        if self.cuda:
            torch.cuda.synchronize()
        return clock.between(begin, end) / steps / 1e9

    def kernels(self) -> list[list[Any]]:
        """Of one step the kernels: name, how often, microseconds in all, by falling time."""
        import torch

        with torch.profiler.profile() as found:
            self.step()
            if self.cuda:
                torch.cuda.synchronize()
        rows = [
            [e.key[:150], e.count, round(e.self_device_time_total if self.cuda else e.self_cpu_time_total, 1)]
            for e in found.key_averages()
            if not self.cuda or e.device_type.name == "CUDA"
        ]
        return sorted(rows, key=lambda row: -row[2])


def variants(work: Work, args: Any) -> dict[str, Callable[[], Step]]:
    """By name, what makes the steps that are compared."""
    found: dict[str, Callable[[], Step]] = {}
    for recompute in args.recompute:
        name = "distir" if recompute == "none" else f"distir, recompute {recompute}"
        found[name] = lambda r=recompute: distir_step(work, r, False)
    if not args.no_torch:
        found[EAGER] = lambda: torch_step(work, False)
    if not args.no_compile:
        found[f"distir {COMPILED}"] = lambda: distir_step(work, "none", True)
        if not args.no_torch:
            found[COMPILE] = lambda: torch_step(work, True)
    return found


def measure(work: Work, args: Any) -> list[dict[str, Any]]:
    """A row for each step of a model."""
    import torch

    steps: dict[str, Measured] = {}
    for name, make in variants(work, args).items():
        try:
            steps[name] = Measured(work, make)
        except torch.OutOfMemoryError:
            print(f"{work.name}, {name}: left out, no memory beside the other steps", file=sys.stderr, flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    for _ in range(args.runs):
        for x in steps.values():
            x.times.append(x.seconds(args.steps))
    tokens = work.labels.numel() if "input_ids" in work.inputs else None
    ideal = ideal_seconds(work)
    cuda = work.device.type == "cuda"
    rows = [
        {
            "model": work.name,
            "precision": work.precision,
            "batch": work.batch,
            "layers": args.layers,
            "seq": args.seq,
            "step": name,
            "seconds": (s := statistics.median(x.times)),
            "spread": [min(x.times), max(x.times)],
            "rate": (tokens or work.batch) / s,
            "utilization": ideal / s if cuda else None,
            "peak_gib": x.peak / 2**30,
            "losses": x.losses,
            "device": torch.cuda.get_device_name() if cuda else machine(),
            "torch": torch.__version__,
        }
        for name, x in steps.items()
    ]
    if args.profile is not None:
        for row, x in zip(rows, steps.values(), strict=True):
            row["kernels"] = x.kernels()
    return rows


def ideal_seconds(work: Work) -> float:
    """The least seconds of a step: of the model's products and attention, of causal attention half, at the peak."""
    import distir

    found = distir.simulate(work.model, distir.Plan(), DATA_SHEET)
    return found.utilization * found.step_seconds


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of earlier runs, and those of this one in place of the same."""
    keys = [[row[k] for k in KEYS] for row in new]
    return [*[row for row in old if [row[k] for k in KEYS] not in keys], *new]


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [
        (
            f"{row['model']} {row['precision']}, batch {row['batch']}: {row['step']}",
            f"{row['seconds'] * 1e3:.2f} ms",
            f"{row['rate']:,.0f}/s",
            "" if row["utilization"] is None else f"{row['utilization']:.1%}",
            f"{row['peak_gib']:.2f} GiB",
            " ".join(map(str, row["losses"])),
        )
        for row in rows
    ]
    return table(("step", "time", "tokens or samples", "MFU", "memory", "first losses"), lines)


def main() -> None:
    flags = parser(__doc__, 7)
    flags.add_argument("--model", nargs="+", default=["gpt2"], choices=CASES, metavar="NAME", help="default: gpt2")
    flags.add_argument("--precision", nargs="+", default=["bf16"], choices=("bf16", "fp32"), help="default: bf16")
    flags.add_argument("--batch", nargs="+", type=int, metavar="N", help="default: 8 of gpt2, 2 of llama, 128 of vit")
    flags.add_argument("--recompute", nargs="+", default=["none"], metavar="NAME", help="of distir; default: none")
    flags.add_argument("--steps", type=int, default=10, metavar="N", help="in a run; default: 10")
    flags.add_argument("--layers", type=int, metavar="N", help="default: those of the model")
    flags.add_argument("--seq", type=int, metavar="N", help="tokens a sample; default: those of the model")
    flags.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="default: cuda")
    flags.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    flags.add_argument("--no-torch", action="store_true", help="leave PyTorch's own steps out")
    flags.add_argument("--profile", metavar="FILE", help="write the rows there, with the kernels of one step")
    args = flags.parse_args()
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        missing = {"gpus": 0, "torch": torch.__version__, "measured": None}
        if not as_json(args.json, missing):
            print(f"torch {torch.__version__} finds 0 GPUs here: nothing was measured")
        return
    rows: list[dict[str, Any]] = []
    for name in args.model:
        torch.manual_seed(0)
        module, example = CASES[name].build(args.layers, args.seq)
        module.eval()
        for precision in args.precision:
            for batch in args.batch or [CASES[name].batch]:
                rows += (made := measure(Work(name, precision, batch, args, module, example), args))
                if args.device == "cuda":
                    gc.collect()
                    torch.cuda.empty_cache()
                if args.json != "-":
                    print(shown(made), flush=True)
    if args.profile is not None:
        Path(args.profile).write_text(json.dumps(rows) + "\n")
    for row in rows:
        row.pop("kernels", None)
    if args.device == "cuda":
        old = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(merged(old, rows), indent=2) + "\n")
    as_json(args.json, rows)


if __name__ == "__main__":
    main()
