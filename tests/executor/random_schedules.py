"""Random scheduled programs on random topologies: bodies, calls for microbatches, sends, collectives, loose ops."""

from __future__ import annotations

import random
from typing import Any

from distir.executor.cost_model import CostModel
from distir.ir import Device, Function, FunctionMaker, Mesh, Role, Value
from distir.ir.errors import IRTypeError
from distir.ir.host_runtime import Runtime
from distir.ir.topology import Algorithm, DeviceSpec, Link, Regular, Topology
from distir.ir.type import NOW, REPLICATE, SUM, Float, Shard, Tensor, Tuple


def random_topology(rng: random.Random, devices: int) -> tuple[Topology, list[Device]]:
    """A regular cluster, one by hand with equal devices and links, or one where they differ."""
    kind = rng.choice(["regular", "equal", "different"])
    if kind == "regular":
        spec = DeviceSpec((("f32", 1e9),), 1e9, 1e-6, 1e9)
        per_node = rng.choice([2, 3, 4, 8])
        algorithms = rng.choice([(), (Algorithm("ring", 1e-6, 1e-6, 3e-6, 0.9), Algorithm("tree", 2e-6, 1e-6, 2e-6))])
        slows = rng.choice([0.0, 0.0, 0.15, 0.4])
        links = Link(1e9, 1e-6, 7e8, slows=slows), Link(1e8, 5e-6, slows=slows / 4)
        cluster = Regular(
            "test", "gpu", spec, -(-devices // per_node), per_node, *links, spec, Link(2e8, 1e-6), algorithms
        )
        t = Topology(cluster)
        return t, t.devices[:devices]
    t = Topology()
    speeds = [1e9, 2e9] if kind == "different" else [1e9]
    made = [t.add_device("gpu", rng.choice(speeds), rng.choice(speeds), 1e-6) for _ in range(devices)]
    gbps = [8.0, 3.0] if kind == "different" else [8.0]
    for i, a in enumerate(made):
        for b in made[:i]:
            t.set_link(a, b, rng.choice(gbps) * 1e8, 1e-6)
    return t, made


def random_runtime(rng: random.Random) -> Runtime | None:
    """A runtime whose hosts are slower or quicker than the devices; often none."""
    if rng.random() < 0.4:
        return None
    figures: dict[str, Any] = {}
    for name in ("op", "communication", "member", "call"):
        figures[name] = rng.choice([0.0, 1e-7, 3e-6, 2e-5])
    flags = "fuses", "multi_tensor", "waits", "scatters", "inline", "accumulates", "overlaps_products", "synchronous"
    for name in flags:
        figures[name] = rng.random() < 0.5
    figures |= {"passes": rng.choice([1.0, 1.7]), "skew": rng.choice([0.0, 0.3]), "transfer": rng.choice([None, 1e-6])}
    figures |= {"gap": rng.choice([0.0, 2e-6]), "logit_bytes": rng.choice([None, (38.0, 14.0)])}
    figures["score_block"] = rng.choice([1, 4])
    return Runtime("random", **figures)


class Slower(CostModel):
    """The same, but compute and what a host does take other seconds."""

    def compute_seconds(self, *args: Any) -> float:
        return 3 * super().compute_seconds(*args) + 1e-7

    def issue(self, *args: Any) -> float:
        return 2 * super().issue(*args)


def _random_type(rng: random.Random, mesh: Mesh) -> Tensor:
    while True:
        placements = [rng.choice([REPLICATE, REPLICATE, Shard(0), Shard(1), SUM]) for _ in mesh.axes]
        try:
            return Tensor.whole(Float(), (16 * rng.choice([1, 2]), 16), mesh, placements)
        except IRTypeError:
            continue


def _random_op(rng: random.Random, f: FunctionMaker, pool: list[Value]) -> None:
    """Try one op; add what it makes to the pool."""
    v = rng.choice(pool[-12:])
    try:
        kind = rng.randrange(10)
        if isinstance(v.type, Tuple):
            if kind < 5:
                got = f.emit("Unpack", v)
                pool += got if isinstance(got, tuple) else [got]
            else:
                pool.append(f.emit("Pack", *rng.sample(pool, min(len(pool), 2))))
            return
        alike = rng.choice([x for x in pool if x.type is v.type])
        if kind < 3:
            pool.append(_random_collective(rng, f, v))
        elif kind == 3:
            pool.append(f.emit("Transpose", v, perm=(1, 0)))
        elif kind == 4:
            pool.append(f.emit("Pack", *rng.sample(pool, min(len(pool), rng.randint(1, 3)))))
        elif kind == 5:
            pool.append(f.emit("Add", alike, v))
        elif kind == 6:
            pool.append(f.emit("MatMul", v, rng.choice(pool)))
        elif kind == 7:
            pool.append(f.emit("SGD", alike, v, lr=0.1))
        elif kind == 8 and f.name != "main":
            total = f.add_input_value("total", v.type.placed("mb", SUM, (0, NOW)))
            pool.append(f.emit("Accumulate", total, v))
        else:
            pool.append(f.emit("Relu", v))
    except IRTypeError:
        return


def _random_collective(rng: random.Random, f: FunctionMaker, v: Value) -> Value:
    """One that fits the value's placement along some axis; raises IRTypeError if that cannot be."""
    t: Any = v.type
    axis = rng.choice(t.mesh.axes)
    p = t.on(axis)
    if isinstance(p, Shard):
        name = rng.choice(["MPIAllgather", "MPIAlltoall", "MPIPermute"])
    else:
        name = "LocalSlice" if p is REPLICATE else rng.choice(["MPIAllreduce", "MPIReduceScatter", "MPIPermute"])
    dims = {} if name in ("MPIAllgather", "MPIAllreduce", "MPIPermute") else {"dim": rng.randrange(2)}
    return f.emit(name, v, axis=axis, **dims)


def random_program(seed: int) -> tuple[Function, Topology]:
    """Stages with bodies, called for microbatches, sends between them, and loose ops and collectives."""
    rng = random.Random(seed)
    stages = rng.randint(1, 3)
    axes = {"mb": 4, **rng.choice([{"dp": 2, "tp": 2}, {"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 4}, {}])}
    width = 1
    for n in list(axes.values())[1:]:
        width *= n
    topology, devices = random_topology(rng, stages * width + 1)
    if rng.random() < 0.3:
        rng.shuffle(devices)
    meshes = [Mesh(devices[s * width : (s + 1) * width], axes, f"stage{s}") for s in range(stages)]
    bodies: list[list[Function]] = []
    for mesh in meshes:
        mine: list[Function] = []
        for b in range(rng.randint(1, 3)):
            f = FunctionMaker(f"body{b}")
            pool = []
            for i in range(rng.randint(1, 4)):
                types = [_random_type(rng, mesh) for _ in range(rng.randint(1, 3))]
                pool.append(f.add_input_value(f"x{i}", Tuple(types) if rng.random() < 0.4 else types[0]))
            for _ in range(rng.randint(0, 30)):
                if mine and rng.random() < 0.1:
                    _random_call(rng, f, rng.choice(mine), pool, None)
                else:
                    _random_op(rng, f, pool)
            f.set_outputs(rng.sample(pool, rng.randint(1, min(5, len(pool)))))
            mine.append(f.finalize())
        bodies.append(mine)
    f = FunctionMaker("main")
    pools: list[list[Value]] = [[f.add_input_value("x", _random_type(rng, m), Role("parameter"))] for m in meshes]
    for _ in range(rng.choice([10, 20, 40, 60])):
        s = rng.randrange(stages)
        u = rng.random()
        if u < 0.6:
            _random_call(rng, f, rng.choice(bodies[s]), pools[s], rng.choice([None, rng.randrange(4)]))
        elif u < 0.8 and stages > 1:
            to = rng.choice([x for x in range(stages) if x != s])
            pools[to].append(f.emit("Send", rng.choice(pools[s][-8:]), to=meshes[to]))
        else:
            _random_op(rng, f, pools[s])
    if rng.random() < 0.4:
        _random_host(rng, f, meshes[0], pools[0], devices[-1])
    made = [v for op in f.ops for v in op.outputs]
    f.set_outputs(rng.sample(made, rng.randint(0, min(6, len(made)))))
    for v in f.finalize().outputs:
        alike = [x for x in f.inputs if x.type is v.type and x not in f.updates.values()]
        if alike and rng.random() < 0.8:
            f.updates[v] = rng.choice(alike)
    return f.finalize(), topology


def _random_host(rng: random.Random, f: FunctionMaker, mesh: Mesh, pool: list[Value], host: Device) -> None:
    x = f.add_input_value("host", Tensor(Float(), (16, 16), host), Role("data", 0))
    placements = [REPLICATE, *[rng.choice([REPLICATE, Shard(0)]) for _ in mesh.axes[1:]]]
    try:
        y = f.emit("MPIScatter", f.emit("Relu", x), to=mesh, placements=tuple(placements))
    except IRTypeError:
        y = f.emit("MPIBroadcast", x, to=mesh)
    f.emit("MPIGather", f.emit("Relu", y), to=host)
    pool.append(y)


def _random_call(rng: random.Random, f: FunctionMaker, body: Function, pool: list[Value], mb: int | None) -> None:
    """Call a body on values of the right types, made inputs where there are none."""
    operands = []
    for v in body.inputs:
        want = v.type if mb is None else v.type.at(mb)
        alike = [x for x in pool[-20:] if x.type is want]
        if not alike:
            if f.name != "main":
                return
            alike = [f.add_input_value("in", want, rng.choice([None, Role("parameter"), Role("state")]))]
            pool += alike
        operands.append(rng.choice(alike))
    attrs: dict[str, Any] = {} if mb is None else {"mb": mb}
    out = f.add_op("Call", None, operands, attrs, [body])
    pool += out if isinstance(out, tuple) else [out]
