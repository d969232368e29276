"""Benchmark of the overhead per op: a training step of an MLP of 64x64, one thread, float32.

    python benchmarks/lowering.py [--runs N] [--json [FILE]] [--layers N] [--width N] [--batch N]
                                  [--optimizer sgd|adamw]

Alternates, on the same weights and data: the generated Python (`distir show --python`), PyTorch's eager autograd with
`torch.optim` (the fastest of its settings counts), an interpreter that looks every value up in a dict, and torch.fx's
Interpreter on the step traced by `make_fx`. CPU microseconds per op: the median over runs of a step, divided by the
number of ops in the training step's program. Goal: the generated code takes at most 0.75 of eager autograd. All are
first checked to compute the same loss.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from laps import as_json, machine, parser, table
from torch.fx.experimental.proxy_tensor import make_fx

from distir.api import Plan
from distir.api.compilation import distribute
from distir.api.model import Model
from distir.backends.lowering.engine import TorchRank
from distir.backends.tensors.torch_namespace import TORCH
from distir.executor.reference.sequential import evaluate
from distir.ir.function import Function, FunctionMaker, Op, Role, Value
from distir.ir.type import Float32, Tensor
from distir.ops.rules import shape_of
from distir.transforms.differentiation.training import SGD, AdamW

Step = Callable[[], Any]
"""Runs one training step; returns the loss."""
OPTIMIZERS: dict[str, Any] = {"sgd": SGD(lr=1e-2), "adamw": AdamW(lr=1e-4)}
GOAL = 0.75
CALLS = 50


def mlp(layers: int, width: int, batch: int) -> Function:
    """Linear layers like torch's, x (batch, width) times a transposed weight plus a bias, with a Relu between them."""
    f = FunctionMaker("mlp")
    h = f.add_input_value("x", Tensor(Float32, (batch, width)), Role("data", 0))
    for k in range(layers):
        w = f.add_input_value(f"w{k}", Tensor(Float32, (width, width)), Role("parameter"))
        b = f.add_input_value(f"b{k}", Tensor(Float32, (width,)), Role("parameter"))
        h = f.emit("Add", f.emit("MatMul", h, f.emit("Transpose", w, perm=(1, 0))), b)
        if k < layers - 1:
            h = f.emit("Relu", h)
    f.set_outputs([h])
    return f.finalize()


def generated(model: Model, arrays: dict[Value, np.ndarray]) -> Step:
    """The generated Python, as `distir run` runs it."""
    engine = TorchRank(distribute(model, Plan()), 0)
    engine.load({k: arrays[v] for k, v in enumerate(model.function.inputs)})
    return lambda: engine.step()[0]


def eager(model: Model, arrays: dict[Value, np.ndarray], **settings: Any) -> Step:
    """torch.nn, autograd and torch.optim. `settings` are foreach= or fused=."""
    weights, x, z = _tensors(model, arrays)
    layers: list[torch.nn.Module] = []
    for w, b in zip(weights[::2], weights[1::2], strict=True):
        layers += [torch.nn.Linear(w.shape[1], w.shape[0]), torch.nn.ReLU()]
        layers[-2].load_state_dict({"weight": w, "bias": b})
    net = torch.nn.Sequential(*layers[:-1])
    kind = torch.optim.AdamW if isinstance(model.optimizer, AdamW) else torch.optim.SGD
    optimizer = kind(net.parameters(), **_hyperparameters(model.optimizer), **settings)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(net(x), z)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def interpreter(model: Model, arrays: dict[Value, np.ndarray]) -> Step:
    """Op by op, values in a dict and deleted at their last use."""
    f = model.function
    last = {v: op for op in f.ops for v in op.inputs}
    rows = [(_function(op), op.inputs, op.outputs, [v for v in dict.fromkeys(op.inputs) if last[v] is op])
            for op in f.ops]  # fmt: skip
    state = {v: torch.from_numpy(arrays[v].copy()) for v in f.inputs}
    results = set(f.outputs)

    def step() -> torch.Tensor:
        env = dict(state)
        with torch.inference_mode():
            for function, operands, outputs, dead in rows:
                y = function(*[env[v] for v in operands])
                for v, r in zip(outputs, y if len(outputs) > 1 else (y,), strict=True):
                    env[v] = r
                for v in dead:
                    if v not in results:
                        del env[v]
        state.update({old: env[new] for new, old in f.updates.items()})
        return env[f.outputs[0]]

    return step


def _function(op: Op) -> Callable[..., Any]:
    """The function that computes an op on tensors: torch's kernel if the op names one, else its `eval`."""
    if op.spec.torch is not None:
        function, attributes = getattr(torch, op.spec.torch), dict(op.attributes)
        return (lambda *xs: function(*xs, **attributes)) if attributes else function
    return lambda *xs: evaluate(op, xs, None, TORCH)


def fx(model: Model, arrays: dict[Value, np.ndarray]) -> Step:
    """torch.fx's Interpreter on the step, loss, gradients and update, as ATen ops. SGD only."""
    weights, x, z = _tensors(model, arrays)
    lr = _hyperparameters(model.optimizer)["lr"]

    def train(x: torch.Tensor, z: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        weights = tuple([w.detach().requires_grad_() for w in weights])
        h = x
        for k in range(0, len(weights), 2):
            h = torch.nn.functional.linear(torch.relu(h) if k else h, weights[k], weights[k + 1])
        loss = torch.nn.functional.mse_loss(h, z)
        gradients = torch.autograd.grad(loss, weights)
        return [loss, *[w.sub(g, alpha=lr) for w, g in zip(weights, gradients, strict=True)]]

    run = torch.fx.Interpreter(make_fx(train)(x, z, *weights)).run

    def step() -> torch.Tensor:
        with torch.inference_mode():
            loss, *weights[:] = run(x, z, *weights)
        return loss

    return step


def _tensors(model: Model, arrays: dict[Value, np.ndarray]) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    inputs = {v.name: torch.from_numpy(arrays[v].copy()) for v in model.function.inputs if v.kind != "state"}
    x, z = inputs.pop("x"), inputs.pop("target")
    return list(inputs.values()), x, z


def _hyperparameters(optimizer: Any) -> dict[str, Any]:
    """The optimizer's keywords for torch.optim."""
    return dict(optimizer.attributes)


def measure(steps: dict[str, Step], runs: int) -> dict[str, float]:
    """CPU seconds of one step, medians over runs, the competitors alternating."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(runs):
        for name, step in steps.items():
            begin = time.process_time()
            for _ in range(CALLS):
                step()
            times[name].append((time.process_time() - begin) / CALLS)
    return {name: statistics.median(found) for name, found in times.items()}


def check(steps: dict[str, Step], times: int = 5) -> None:
    """Raises SystemExit unless all have the same losses over a few steps."""
    losses = {name: [float(step()) for _ in range(times)] for name, step in steps.items()}
    first = next(iter(losses.values()))
    for name, found in losses.items():
        if not np.allclose(found, first, rtol=1e-4):
            raise SystemExit(f"{name} computes other losses: {found}, not {first}")


def main() -> None:
    flags = parser(__doc__, 15)
    flags.add_argument("--layers", type=int, default=8)
    flags.add_argument("--width", type=int, default=64)
    flags.add_argument("--batch", type=int, default=64)
    flags.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    args = flags.parse_args()
    torch.set_num_threads(1)
    model = Model(mlp(args.layers, args.width, args.batch)).training("mse", OPTIMIZERS[args.optimizer])
    arrays = model.initial()
    rng = np.random.default_rng(0)
    arrays |= {v: rng.standard_normal(shape_of(v), np.float32) for v in model.function.inputs if v not in arrays}
    steps = {
        "generated Python": generated(model, arrays),
        "eager autograd, foreach=False": eager(model, arrays, foreach=False),
        "eager autograd, foreach=True": eager(model, arrays, foreach=True),
        "eager autograd, fused=True": eager(model, arrays, fused=True),
        "interpreter with a dict": interpreter(model, arrays),
    }
    if args.optimizer == "sgd":
        steps["torch.fx's Interpreter"] = fx(model, arrays)
    check(steps)
    ops = len([op for op in model.function.ops if op.inputs])
    seconds = measure(steps, args.runs)
    report(args, seconds, ops)


def report(args: Any, seconds: dict[str, float], ops: int) -> None:
    best = min(s for name, s in seconds.items() if name.startswith("eager"))
    ratios = {name: s / best for name, s in seconds.items()}
    micro = {name: s / ops * 1e6 for name, s in seconds.items()}
    if as_json(args.json, {"machine": machine(), "ops": ops, "us_per_op": micro, "ratio": ratios}):
        return
    print(f"{args.layers} layers of {args.width}x{args.width}, batch {args.batch}, {args.optimizer}: {ops} ops a step")
    print(f"CPU time, median of {args.runs} alternating runs of {CALLS} steps; one thread,")
    print(f"torch {torch.__version__}, {machine()}")
    rows: Sequence[Sequence[str]] = [
        (name, f"{s * 1e6:.0f}", f"{s / ops * 1e6:.2f}", f"{ratios[name]:.2f}") for name, s in seconds.items()
    ]
    print(table(("", "us a step", "us an op", "to eager"), rows))
    ratio = ratios["generated Python"]
    outcome = "met" if ratio <= GOAL else "missed"
    print(f"generated Python: {ratio:.2f} of eager autograd; the goal is at most {GOAL}: {outcome}")


if __name__ == "__main__":
    main()
