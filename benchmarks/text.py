"""Benchmark of printing, parsing, comparing and verifying programs of 5,000 and 20,000 ops, on a mesh and scheduled.

    python benchmarks/text.py [--runs N] [--json [FILE]]

CPU seconds, medians over the runs, and the growth from the small program to the large one (4 is linear). Goals: 6 s to
print and 1 s to parse 20,000 ops, and 10 µs per op to verify.
"""

from __future__ import annotations

import gc
import statistics
import time

from laps import as_json, machine, parser

from distir.ir import Device, Function, FunctionMaker, Mesh, Value, parse, pformat, same, verify
from distir.ir.type import REPLICATE, Float, Shard, Tensor, Tuple

SIZES = (5_000, 20_000)
GOALS = {"print": 6.0, "parse": 1.0, "verify": 20_000 * 10e-6}
MICROBATCHES, DP, TP = 512, 8, 4
BATCH, SEQUENCE, WIDTH = 65_536, 128, 768


def mesh(stage: int) -> Mesh:
    devices = [Device("gpu", stage * DP * TP + i) for i in range(DP * TP)]
    return Mesh(devices, {"mb": MICROBATCHES, "dp": DP, "tp": TP}, name=f"stage{stage}")


def whole(shape: tuple[int, ...], at: Mesh, *placements: Shard) -> Tensor:
    rest = (REPLICATE,) * (len(at.axes) - len(placements))
    return Tensor.whole(Float(), shape, at, (*placements, *rest))


def layers(name: str, at: Mesh, ops: int) -> Function:
    """Gated two-layer perceptrons with residuals, tensor parallel, of about `ops` ops; weights in a bundle."""
    f = FunctionMaker(name)
    x = f.add_input_value("x", whole((BATCH, SEQUENCE, WIDTH), at, Shard(0), Shard(0, MICROBATCHES)))
    up = Tensor.whole(Float(), (WIDTH, 4 * WIDTH), at, (REPLICATE, REPLICATE, Shard(1)))
    down = Tensor.whole(Float(), (4 * WIDTH, WIDTH), at, (REPLICATE, REPLICATE, Shard(0)))
    depth = ops // 8
    params = f.add_input_value("params", Tuple([up, down] * depth))
    names = [f"transformer.h.{k}.mlp.{w}.weight" for k in range(depth) for w in ("c_fc", "c_proj")]
    weights = f.add_op("Unpack", None, [params], output_names=names)
    residuals = []
    for w0, w1 in zip(weights[::2], weights[1::2], strict=True):
        h = f.emit("MatMul", x, w0)
        first = f.ops[-1]
        h = f.emit("Mul", h, f.emit("Tanh", h))
        h = f.emit("Reshape", h, shape=(-1, 4 * WIDTH))
        h = f.emit("MPIAllreduce", f.emit("MatMul", h, w1), axis="tp")
        h = f.emit("Reshape", h, shape=(BATCH, SEQUENCE, WIDTH))
        x = f.add_op("Add", "x", [x, h], of=first)
        residuals.append(h)
    f.add_op("Pack", "residuals", residuals)
    f.set_outputs([x, f.ops[-1].outputs[0]])
    return f.finalize()


def schedule(ops: int) -> Function:
    """Stages of 20 layers called for every microbatch: one line per call and per send, of about `ops` ops."""
    stages = [layers(f"fwd{s}", mesh(s), 160) for s in range(ops // (2 * MICROBATCHES))]
    f = FunctionMaker("main")
    params = [f.add_input_value("params", stage.inputs[1].type) for stage in stages]
    first = stages[0].inputs[0].type
    results: list[Value] = []
    for k in range(MICROBATCHES):
        x = f.add_input_value("x", first.at(k))
        for s, stage in enumerate(stages):
            if s:
                x = f.emit("Send", x, to=mesh(s))
            x = f.add_op("Call", None, [x, params[s]], {"mb": k}, [stage], ["x", "residuals"])[0]
        results.append(x)
    f.set_outputs([f.emit("MPIAllgather", *results, axis="mb")])
    return f.finalize()


def measure(f: Function) -> dict[str, float]:
    """CPU seconds of each."""
    gc.collect()
    laps = [time.process_time()]
    text = pformat(f)
    laps.append(time.process_time())
    g = parse(text)
    laps.append(time.process_time())
    alike = same(f, g)
    laps.append(time.process_time())
    verify(f)
    laps.append(time.process_time())
    if not alike:
        raise SystemExit("the program that was parsed is not the one that was printed")
    return {k: b - a for k, a, b in zip(("print", "parse", "same", "verify"), laps, laps[1:], strict=False)}


def main() -> None:
    flags = parser(__doc__, 5)
    args = flags.parse_args()
    result: dict[str, object] = {"machine": machine()}
    kinds = {"on a mesh": lambda n: layers("step", mesh(0), n), "a schedule": schedule}
    for kind, build in kinds.items():
        rows = []
        for n in SIZES:
            f = build(n)
            runs = [measure(f) for _ in range(args.runs)]
            rows.append({k: statistics.median(r[k] for r in runs) for k in runs[0]} | {"ops": len(f.ops)})
        result[kind] = rows
    if not as_json(args.json, result):
        print(table(result))


def table(result: dict) -> str:
    lines = [f"CPU seconds, {result.pop('machine')}"]
    for kind, (small, large) in result.items():
        growth = large["ops"] / small["ops"]
        lines.append(f"\n{kind:12}{small['ops']:>10,} ops{large['ops']:>10,} ops    growth    of the goal")
        for what in ("print", "parse", "same", "verify"):
            line = f"{what:12}{small[what]:14.3f}{large[what]:14.3f}{large[what] / small[what]:8.1f} x"
            share = f"{large[what] / GOALS[what]:14.0%}" if what in GOALS else ""
            lines.append(line + share)
        lines.append(f"{'':12}{'linear growth would be':>28}{growth:8.1f} x")
        lines.append(f"{'verify':12}{large['verify'] / large['ops'] * 1e6:25.2f} µs an op")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
