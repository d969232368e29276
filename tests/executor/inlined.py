"""A simulator that does everything the long way: calls inlined, op by op, device by device. And random programs for it."""

from __future__ import annotations

import random
from typing import Any

from distir.executor.categories import CATEGORIES, Categories, leaves
from distir.executor.cost_model import CostModel
from distir.executor.device_classes import axis_groups, members
from distir.ir import Device, Function, FunctionMaker, Mesh, Op, Role, Value
from distir.ir.errors import IRTypeError
from distir.ir.spec import lookup
from distir.ir.topology import Algorithm, DeviceSpec, Link, Regular, Topology
from distir.ir.type import REPLICATE, SUM, Float, Shard, Tensor, Tuple, Type

NEVER = float("-inf")


def homes(t: Type, default: Device) -> list[Any]:
    if isinstance(t, Tuple):
        return list(dict.fromkeys(h for x in t.types for h in homes(x, default)))
    return [t.device or default]


class Inlined:
    """`events` are (op name, start, duration, device, stream); `clock` is by (device, stream)."""

    def __init__(self, function: Function, cost: CostModel, overlap: bool = True) -> None:
        self.cost, self.overlap = cost, overlap
        self.default = cost.topology.devices[0]
        self.clock: dict[tuple[Device, str], float] = {}
        self.events: list[tuple[str, float, float, str, str]] = []
        self.flat: list[tuple[Op, tuple[object, ...], tuple[object, ...]]] = []
        self.function = function
        start = {v: {d: NEVER for d in self.devices(v)} for v in function.inputs}
        self.names: dict[object, Value] = {}
        env = {v: (self.instance(v), t) for v, t in start.items()}
        self.inputs = {v: env[v][0] for v in function.inputs}
        self.run(function, env)
        self.outputs = [env[v][0] for v in function.outputs]

    def instance(self, v: Value) -> object:
        key = object()
        self.names[key] = v
        return key

    def devices(self, v: Value) -> list[Device]:
        return list(dict.fromkeys(d for h in homes(v.type, self.default) for d in members(h)))

    def timestamps(self) -> dict[Device, float]:
        out: dict[Device, float] = {}
        for (d, _), t in self.clock.items():
            out[d] = max(out.get(d, 0.0), t)
        return out

    def run(self, f: Function, env: dict[Value, Any]) -> None:
        for op in f.ops:
            if op.callee is not None:
                inner = {a: env[b] for a, b in zip(op.callee.inputs, op.inputs, strict=True)}
                self.run(op.callee, inner)
                for a, b in zip(op.outputs, op.callee.outputs, strict=True):
                    env[a] = inner[b]
                continue
            times: dict[Value, dict[Device, float]] = {v: {} for v in op.outputs}
            self.step(op, [env[v][1] for v in op.inputs], times)
            for v in op.outputs:
                env[v] = (self.instance(v), times[v])
            self.flat.append((op, tuple(env[v][0] for v in op.inputs), tuple(env[v][0] for v in op.outputs)))

    def step(self, op: Op, ins: list[dict[Device, float]], times: dict[Value, dict[Device, float]]) -> None:
        spec, attrs, cost = op.spec, op.attributes, self.cost
        tin, tout = [v.type for v in op.inputs], [v.type for v in op.outputs]
        if cost.free(spec, attrs, tin):
            for d in self.devices(op.outputs[0]):
                t = max((x[d] for x in ins if d in x), default=NEVER)
                self.events.append((spec.name, max(t, 0.0), 0.0, repr(d), "view"))
            for v in op.outputs:
                for d in self.devices(v):
                    times[v][d] = max((x[d] for x in ins if d in x), default=NEVER)
            return
        axis = cost.collective_axis(spec, attrs, tin)
        meets: list[tuple[float, list[tuple[Device, str]], list[Device], list[Device]]] = []
        if axis is not None:
            for g in axis_groups(tin[0].device, axis):
                seconds = cost.collective(spec, attrs, tin, tout, cost.topology.group(g))
                meets.append((seconds, [(d, axis) for d in g], list(g), list(g)))
        elif spec.name == "Send":
            for a, b in zip(members(tin[0].device), members(tout[0].device), strict=True):
                link = cost.topology.link(a, b)
                meets.append((cost.transfer(tin, link), [(a, "send"), (b, "recv")], [a], [b]))
        elif (outward := cost.fan(spec)) is not None:
            root, mesh = (tin[0].device, tout[0].device) if outward else (tout[0].device, tin[0].device)
            seconds = cost.between(spec, tin, tout, root, mesh)
            names = ("send", "recv") if outward else ("recv", "send")
            streams = [(root, names[0])] + [(d, names[1]) for d in mesh.devices if d is not root]
            ends = ([root], list(mesh.devices)) if outward else (list(mesh.devices), [root])
            meets.append((seconds, streams, *ends))
        else:
            for d in self.devices(op.outputs[0]):
                meets.append((cost.compute(spec, attrs, tin, tout, d), [(d, "compute")], [d], [d]))
        events = []
        for seconds, streams, sources, targets in meets:
            keys = list(dict.fromkeys((d, name if self.overlap else "compute") for d, name in streams))
            start = max(self.clock.get(k, 0.0) for k in keys)
            start = max([start, *(x[d] for x in ins for d in sources)])
            for k in keys:
                self.clock[k] = start + seconds
                events.append((spec.name, start, seconds, repr(k[0]), k[1]))
            for v in op.outputs:
                for d in targets:
                    times[v][d] = start + seconds
        order = {repr(d): i for i, d in enumerate(dict.fromkeys(d for v in (*op.inputs, *op.outputs) for d in self.devices(v)))}
        self.events += sorted(events, key=lambda e: order[e[3]])

    def peak(self, device: Device) -> tuple[int, list[int]]:
        """Most bytes live on a device, and bytes by category live at the end."""
        categories = Categories(self.function)
        on = {k: device in self.devices(v) for k, v in self.names.items()}
        steps = []
        for op, ins, outs in self.flat:
            makes = [k for k in outs if on[k]]
            uses = [k for k in ins if on[k]]
            if makes or (uses and not op.spec.alias):
                steps.append((op, uses, makes))
        last: dict[object, int] = {}
        for i, (_, uses, makes) in enumerate(steps):
            for k in (*uses, *makes):
                last[k] = i
        for k in self.outputs:
            last[k] = len(steps) + 1
        updated = set(self.function.updates.values())
        lies: dict[object, list[object]] = {}
        size: dict[object, tuple[int, int]] = {}
        outside: set[object] = set()
        live: dict[object, None] = {}

        def fresh(kind: int, n: int) -> object:
            b = object()
            size[b] = (kind, n)
            return b

        for v, k in self.inputs.items():
            if on[k]:
                lies[k] = [fresh(categories.of_input(v), t.bytes) for t in leaves(v.type)]
                live[k] = None
                last.setdefault(k, len(steps) + 1)
                if v not in updated:
                    outside.update(lies[k])

        def total() -> int:
            return sum(size[b][1] for b in {b for k in live for b in lies[k]} | outside)

        most = total()
        for i, (op, uses, makes) in enumerate(steps):
            self._lie(op, i, uses, makes, lies, live, outside, last, fresh, categories, size)
            live.update(dict.fromkeys(makes))
            most = max(most, total())
            for k in [k for k in live if last[k] == i]:
                del live[k]
        end = [0] * len(CATEGORIES)
        for b in {b for k in live for b in lies[k]} | outside:
            end[size[b][0]] += size[b][1]
        return most, end

    def _lie(self, op, i, uses, makes, lies, live, outside, last, fresh, categories, size) -> None:  # noqa: ANN001
        free = self.cost.free(op.spec, op.attributes, [v.type for v in op.inputs]) and op.inputs
        if free and op.spec is lookup("Pack"):
            lies[makes[0]] = [b for k in uses for b in lies[k]]
        elif free and op.spec is lookup("Unpack"):
            rest = list(lies[uses[0]])
            for k in makes:
                n = len(leaves(self.names[k].type))
                lies[k], rest = rest[:n], rest[n:]
        elif free:
            for k in makes:
                lies[k] = lies[uses[0]]
        else:
            spare: dict[int, list[object]] = {}
            for k in dict.fromkeys(uses[n] for n in op.spec.donates if n < len(uses)):
                if last[k] == i:
                    for b in lies[k]:
                        others = [o for o in live if o is not k and b in lies[o]]
                        if not others and b not in outside:
                            spare.setdefault(size[b][1], []).append(b)
            for k in makes:
                v = self.names[k]
                lies[k] = [
                    spare[t.bytes].pop(0) if spare.get(t.bytes) else fresh(categories.of(v, j, t), t.bytes)
                    for j, t in enumerate(leaves(v.type))
                ]


def random_topology(rng: random.Random, devices: int) -> tuple[Topology, list[Device]]:
    """A regular cluster, one by hand with equal devices and links, or one where they differ."""
    kind = rng.choice(["regular", "equal", "different"])
    if kind == "regular":
        spec = DeviceSpec((("f32", 1e9),), 1e9, 1e-6, 1e9)
        per_node = rng.choice([2, 3, 4, 8])
        algorithms = rng.choice([(), (Algorithm("ring", 1e-6, 1e-6, 3e-6, 0.9), Algorithm("tree", 2e-6, 1e-6, 2e-6))])
        links = Link(1e9, 1e-6, 7e8), Link(1e8, 5e-6)
        cluster = Regular("test", "gpu", spec, -(-devices // per_node), per_node, *links, spec, Link(2e8, 1e-6), algorithms)
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


def _random_type(rng: random.Random, mesh: Mesh) -> Tensor:
    while True:
        placements = [rng.choice([REPLICATE, REPLICATE, Shard(0), Shard(1), SUM]) for _ in mesh.axes]
        try:
            return Tensor.whole(Float(), (16 * rng.choice([1, 2]), 16), mesh, placements)
        except IRTypeError:
            continue


_UNARY = ("Relu", "Neg", "Identity", "Transpose", "SGD")


def _random_op(rng: random.Random, f: FunctionMaker, pool: list[Value], timed: bool) -> None:
    """Try one op; add what it makes to the pool."""
    v = rng.choice(pool[-12:])
    try:
        kind = rng.randrange(8)
        tensor = isinstance(v.type, Tensor)
        if kind == 0 and tensor:
            axis = rng.choice(v.type.mesh.axes)
            name = rng.choice(["MPIAllreduce", "MPIAllgather", "MPIReduceScatter", "MPIAlltoall", "LocalSlice"])
            dims = {} if name in ("MPIAllreduce", "MPIAllgather") else {"dim": rng.randrange(2)}
            pool.append(f.emit(name, v, axis=axis, **dims))
        elif kind == 1 and tensor:
            pool.append(f.emit("Transpose", v, perm=(1, 0)))
        elif kind == 2:
            pool.append(f.emit("Pack", *rng.sample(pool, min(len(pool), rng.randint(1, 3)))))
        elif kind == 3 and isinstance(v.type, Tuple):
            got = f.emit("Unpack", v)
            pool += got if isinstance(got, tuple) else [got]
        elif kind == 4:
            alike = [x for x in pool if x.type is v.type]
            pool.append(f.emit("Accumulate" if rng.random() < 0.5 else "Add", rng.choice(alike), v))
        elif kind == 5 and tensor:
            pool.append(f.emit("MatMul", v, rng.choice(pool)))
        elif kind == 6 and tensor:
            alike = [x for x in pool if x.type is v.type]
            pool.append(f.emit("SGD", rng.choice(alike), v, lr=0.1))
        elif tensor:
            pool.append(f.emit("Relu", v))
    except IRTypeError:
        return


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
                    _random_op(rng, f, pool, True)
            f.set_outputs(rng.sample(pool, rng.randint(1, min(5, len(pool)))))
            mine.append(f.finalize())
        bodies.append(mine)
    f = FunctionMaker("main")
    pools: list[list[Value]] = [[f.add_input_value("x", _random_type(rng, m), Role("parameter"))] for m in meshes]
    for _ in range(rng.randint(5, 40)):
        s = rng.randrange(stages)
        u = rng.random()
        if u < 0.6:
            _random_call(rng, f, rng.choice(bodies[s]), pools[s], rng.choice([None, rng.randrange(4)]))
        elif u < 0.8 and stages > 1:
            to = rng.choice([x for x in range(stages) if x != s])
            pools[to].append(f.emit("Send", rng.choice(pools[s][-8:]), to=meshes[to]))
        else:
            _random_op(rng, f, pools[s], True)
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
