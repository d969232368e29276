"""Benchmark of predicting a model whose weights are 4.4 GB: a Llama-like of 1.1B parameters, on 64 devices.

    python benchmarks/large_file.py [--model FILE] [--layers N] [--batch N] [--seq N] [--runs N] [--json [FILE]]

Wall-clock seconds and the most resident memory, medians: of `distir simulate`, which never reads the weights, start-up
and all; and, alternating, of an interpreter that loads the same file with `onnx.load`, weights and all. Goals: 10 s and
600 MiB. Without `--model` a file is exported first, in a folder that is removed at the end: 22 layers x 2,048, 32
heads, 4 of keys and values, 5,632 hidden, 32,000 words, float32, weights in a file of their own. Needs the `dev` extra.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from laps import as_json, machine, parser, table

SIMULATE = "distir simulate"
LOAD = "python -c 'onnx.load(...)'"
GOALS = {"seconds": 10.0, "mib": 600.0}
PLAN = ["--dp", "8", "--tp", "4", "--pp", "2", "--microbatches", "16"]


def export(path: str, layers: int, seq: int) -> None:
    """Write a Llama-like with weights of zeros, which are not touched before they are written."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    class Logits(torch.nn.Module):
        def __init__(self, model: LlamaForCausalLM) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits = self.model(input_ids=input_ids, use_cache=False).logits
            assert logits is not None
            return logits

    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32000,
        "max_position_embeddings": max(seq, 2048),
        "attn_implementation": "eager",
    }
    config = LlamaConfig(**sizes)
    module = Logits(LlamaForCausalLM(config)).eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.data = torch.zeros(weight.shape)
    ids = torch.zeros((2, seq), dtype=torch.int64)
    shapes = {"input_ids": {0: torch.export.Dim("batch")}}
    program = torch.onnx.export(
        module,
        (),
        kwargs={"input_ids": ids},
        dynamo=True,
        dynamic_shapes=shapes,
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None
    program.save(path, external_data=True)


def measure(command: list[str]) -> dict[str, float]:
    """Wall-clock seconds of a command, and the most memory that was resident, in MiB."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}\n{output.read().decode()}")
    return {"seconds": time.perf_counter() - begin, "mib": usage.ru_maxrss / 1024}


def main() -> None:
    flags = parser(__doc__, 3)
    flags.add_argument("--model", type=Path, metavar="FILE")
    flags.add_argument("--layers", type=int, default=22, metavar="N")
    flags.add_argument("--batch", type=int, default=4096, metavar="N")
    flags.add_argument("--seq", type=int, default=512, metavar="N")
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model is None:  # in a process of its own, whose memory would count here
            model = Path(folder) / "llama.onnx"
            script = f"import large_file; large_file.export({str(model)!r}, {args.layers}, {args.seq})"
            subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent, capture_output=True)
        how = ["--dim", f"batch={args.batch}", "--loss", "cross-entropy", "--optimizer", "adamw", *PLAN]
        commands = {
            SIMULATE: [sys.executable, "-m", "distir", "simulate", str(model), "--cluster", "dgx-h100", *how],
            LOAD: [sys.executable, "-c", f"import onnx; onnx.load({str(model)!r})"],
        }
        runs = [{name: measure(command) for name, command in commands.items()} for _ in range(args.runs)]
        size = sum(file.stat().st_size for file in model.parent.iterdir() if file.name.startswith(model.name))
    found = {name: {unit: statistics.median(run[name][unit] for run in runs) for unit in GOALS} for name in commands}
    where, ratio = machine(), found[SIMULATE]["seconds"] / found[LOAD]["seconds"]
    if as_json(args.json, {"machine": where, "bytes": size, "found": found, "ratio": ratio, "goals": GOALS}):
        return
    print(f"{size / 1e9:.2f} GB, batch {args.batch:,}, 64 devices, medians of {args.runs}; {where}")
    rows = [[name, f"{x['seconds']:.2f}", f"{x['mib']:.0f}"] for name, x in found.items()]
    print(table(["", "seconds", "MiB"], [*rows, ["goal of distir simulate", "10.00", "600"]]))
    print(f"distir simulate takes {ratio:.2f} times as long as loading the file")


if __name__ == "__main__":
    main()
