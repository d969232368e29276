"""A simulator that does everything the long way: calls inlined, op by op, device by device.

It shares with the real one the cost model and the categories of memory, and nothing else: no classes, no maps of calls,
no dependence left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from distir.executor.cost_model import CostModel
from distir.executor.cost_model.fusion import UNFUSED, Fused, fused
from distir.executor.simulator.beside import beside_compute
from distir.executor.simulator.beside_products import beside_products, is_of_a_microbatch
from distir.executor.simulator.categories import CATEGORIES, Categories, leaves
from distir.executor.simulator.labels import axis_text
from distir.executor.simulator.ring_attention import ring_attention
from distir.ir import Device, Function, Mesh, Op, Value
from distir.ir.communication import TRANSFERS
from distir.ir.device import AxisNames
from distir.ir.spec import lookup
from distir.ir.type import Tuple, Type

NEVER = float("-inf")


def homes(t: Type, default: Device) -> list[Any]:
    if isinstance(t, Tuple):
        return list(dict.fromkeys(h for x in t.types for h in homes(x, default)))
    return [t.device or default]


def members(home: Device | Mesh) -> tuple[Device, ...]:
    return home.devices if isinstance(home, Mesh) else (home,)


def axis_groups(mesh: Mesh, axis: AxisNames) -> list[list[Device]]:
    """The devices whose coordinates differ only along an axis, or along several."""
    along = mesh.positions(axis)
    groups: dict[tuple[int, ...], list[Device]] = {}
    for device, at in zip(mesh.devices, mesh.coords, strict=True):
        groups.setdefault(tuple([x for i, x in enumerate(at) if i not in along]), []).append(device)
    return list(groups.values())


def towards(name: str, home: Device | Mesh) -> str:
    """The name of the stream for transfers to or from a home."""
    return f"{name} {home.name if isinstance(home, Mesh) else home}"


def handed_on(f: Function, cost: CostModel) -> set[Op]:
    """The reductions to parts whose results, or views of them, no other op of the body takes."""
    found: set[Op] = set()
    for op in f.ops:
        if op.spec.name == "MPIReduceScatter":
            same = set(op.outputs)
            others = []
            for other in f.ops:
                if not same.isdisjoint(other.inputs):
                    if other.inputs and cost.free(other.spec, other.attributes, [v.type for v in other.inputs]):
                        same.update(other.outputs)
                    else:
                        others.append(other)
            if not others:
                found.add(op)
    return found


def turns(sizes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Bytes by category over time, without what differs from neither neighbour, or lies between two from which and to
    which all fall: of what is freed at the end of a call, a part may be freed by its last op."""
    found: list[tuple[int, ...]] = []
    for size in sizes:
        while len(found) > 1 and _falls(found[-2], found[-1]) and _falls(found[-1], size):
            found.pop()
        if not found or found[-1] != size:
            found.append(size)
    return found


def _falls(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(y <= x for x, y in zip(a, b, strict=True))


class Inlined:
    """`events` are (op name, start, duration, device, stream); `clock` is by (device, stream)."""

    def __init__(self, function: Function, cost: CostModel, overlap: bool = True) -> None:
        self.cost, self.overlap = cost, overlap
        self.default = cost.topology.devices[0]
        self.clock: dict[tuple[Device, str], float] = {}
        self.events: list[tuple[str, float, float, str, str]] = []
        self.lost: list[tuple[Device, float, float]] = []
        """Compute lost beside collectives: where, when, and how much."""
        self.flat: list[tuple[Op, tuple[object, ...], tuple[object, ...]]] = []
        self.several: set[int] = set()
        """Where in `flat` an op takes what a call is given as two operands: none is known to be the last."""
        self.repeated = {op.callee for op in function.ops if op.attributes.get("mb") is not None}
        self.bodies: list[list[tuple[int, list[object]]]] = []
        """Of each body where in `flat` the reductions are whose results it only hands on, and which operands die with
        each; and where it ends.
        """
        self.function = function
        runtime = cost.runtime
        self.waits = runtime is not None and runtime.issues and runtime.waits
        self.received: set[Value] = set()
        """What transfers give."""
        self.unwritten: set[Op] = set()
        """What hands on its one operand, made into another, within a kernel."""
        self.entered: set[Device] | None = None
        """In a function that is called: the hosts that have issued an op of it."""
        start = {v: dict.fromkeys(self.devices(v), NEVER) for v in function.inputs}
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
        waits = handed_on(f, self.cost)
        overlapped = beside_compute(f) if self.overlap else ()
        runtime = self.cost.runtime
        pieces = self.overlap and runtime is not None and runtime.overlaps_products
        products = beside_products(f) if pieces else {}
        if self.overlap and runtime is not None and runtime.ring_attention:
            products |= ring_attention(f)
        sent = {op: max(sum(v.type.bytes for v in x) for x in (op.inputs, op.outputs)) for op in products}
        beside = {
            op: (product, sent[op] / (sum(sent[x] for x in products if products[x] is product) or sent[op]))
            for op, product in products.items()
        }
        chains = fused(f, self.cost.runtime, f in self.repeated)
        for op, chained in chains.items():
            if chained.result and len(op.inputs) == 1 and op.inputs[0].type.bytes <= op.outputs[0].type.bytes:
                self.unwritten.add(op)
        begins: list[tuple[int, list[object]]] = []
        self.bodies.append(begins)
        for n, op in enumerate(f.ops):
            if op in waits:
                later = {v for other in f.ops[n + 1 :] for v in other.inputs} | set(f.outputs)
                begins.append((len(self.flat), [env[v][0] for v in op.inputs if v not in later]))
            if op.callee is not None:
                inner = {a: env[b] for a, b in zip(op.callee.inputs, op.inputs, strict=True)}
                before, self.entered = self.entered, set()
                for v in op.inputs if self.waits else ():
                    for d in self.devices(v) if v in self.received else ():
                        self.clock[d, self.host] = max(self.clock.get((d, self.host), 0.0), env[v][1][d])
                self.run(op.callee, inner)
                self.entered = before
                for a, b in zip(op.outputs, op.callee.outputs, strict=True):
                    env[a] = inner[b]
                continue
            times: dict[Value, dict[Device, float]] = {v: {} for v in op.outputs}
            self.step(op, [env[v][1] for v in op.inputs], times, chains.get(op, UNFUSED), beside.get(op))
            if op in products or (op in overlapped and not self.waited(op)):
                self.lose(op)
            if op.spec.route in TRANSFERS:
                self.received.update(op.outputs)
            for v in op.outputs:
                env[v] = (self.instance(v), times[v])
            if len({env[v][0] for v in op.inputs}) < len(set(op.inputs)):
                self.several.add(len(self.flat))
            self.flat.append((op, tuple(env[v][0] for v in op.inputs), tuple(env[v][0] for v in op.outputs)))
        begins.append((len(self.flat), []))

    def step(
        self,
        op: Op,
        ins: list[dict[Device, float]],
        times: dict[Value, dict[Device, float]],
        chained: Fused,
        beside: tuple[Op, float] | None,
    ) -> None:
        spec, attrs, cost = op.spec, op.attributes, self.cost
        tin: list[Any] = [v.type for v in op.inputs]
        tout: list[Any] = [v.type for v in op.outputs]
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
        computes = axis is None and spec.name != "Send" and cost.fan(spec) is None
        if axis is not None:
            for g in axis_groups(tin[0].device, axis):
                seconds = cost.collective(spec, attrs, tin, tout, cost.topology.group(g))
                if beside is not None:
                    product, share = beside
                    pin, pout = ([v.type for v in x] for x in (product.inputs, product.outputs))
                    least = min(cost.compute(product.spec, product.attributes, pin, pout, d) for d in g)
                    seconds = cost.exposed(seconds, len(g), least * share)
                meets.append((seconds, [(d, axis_text(axis)) for d in g], list(g), list(g)))
        elif spec.name == "Send":
            for a, b in zip(members(tin[0].device), members(tout[0].device), strict=True):
                link = cost.topology.link(a, b)
                ends = towards("send", tout[0].device), towards("recv", tin[0].device)
                meets.append((cost.transfer(tin, link), [(a, ends[0]), (b, ends[1])], [a], [b]))
        elif (outward := cost.fan(spec)) is not None:
            root, mesh = (tin[0].device, tout[0].device) if outward else (tout[0].device, tin[0].device)
            seconds = cost.between(spec, tin, tout, root, mesh)
            names = ("send", "recv") if outward else ("recv", "send")
            streams = [(root, names[0])] + [(d, names[1]) for d in mesh.devices if d is not root]
            ends = ([root], list(mesh.devices)) if outward else (list(mesh.devices), [root])
            meets.append((seconds, streams, *ends))
        else:
            for d in self.devices(op.outputs[0]):
                meets.append((cost.compute(spec, attrs, tin, tout, d, chained), [(d, "compute")], [d], [d]))
        events = []
        for seconds, streams, sources, targets in meets:
            keys = list(dict.fromkeys((d, name if self.overlap else "compute") for d, name in streams))
            also = [(d, "compute") for d, _ in keys] if axis is not None and self.waited(op) else []
            start = max(self.clock.get(k, 0.0) for k in (*keys, *also))
            start = max(
                [
                    start,
                    *(x[d] for x in ins for d in sources),
                    *self.issued(op, keys, chained, computes),
                ]
            )
            for k in keys:
                self.clock[k] = start + seconds
                events.append((spec.name, start, seconds, repr(k[0]), k[1]))
            for k in also:
                self.clock[k] = start + seconds
            for v in op.outputs:
                for d in targets:
                    times[v][d] = start + seconds
        order = {
            repr(d): i
            for i, d in enumerate(dict.fromkeys(d for v in (*op.inputs, *op.outputs) for d in self.devices(v)))
        }
        self.events += sorted(events, key=lambda e: order[e[3]])

    def waited(self, op: Op) -> bool:
        """Whether compute waits for a collective."""
        runtime = self.cost.runtime
        return runtime is not None and runtime.synchronous and is_of_a_microbatch(op.inputs[0])

    def lose(self, op: Op) -> None:
        """The compute that a collective takes from its devices."""
        tin: list[Any] = [v.type for v in op.inputs]
        axis = self.cost.collective_axis(op.spec, op.attributes, tin)
        for g in axis_groups(tin[0].device, axis) if axis is not None else ():
            group = self.cost.topology.group(g)
            seconds = self.cost.collective(op.spec, op.attributes, tin, [v.type for v in op.outputs], group)
            for d in g if (lost := self.cost.beside(seconds, group)) else ():
                self.clock[d, "compute"] = self.clock.get((d, "compute"), 0.0) + lost
                self.lost.append((d, self.clock[d, "compute"] - lost, lost))

    @property
    def host(self) -> str:
        """The stream on which ops are issued."""
        runtime = self.cost.runtime
        return "compute" if runtime is not None and runtime.inline else "host"

    def issued(self, op: Op, keys: list[tuple[Device, str]], chained: Fused, computes: bool) -> list[float]:
        """When the hosts of the devices have issued an op."""
        hosts = list(dict.fromkeys(d for d, _ in keys))
        more = self.cost.more_kernels(op.spec, [v.type for v in op.inputs])
        seconds = self.cost.issue(op.spec, len(hosts), chained, computes, more)
        if not seconds and self.host == "host":
            return []
        for d in hosts:
            more = 0.0
            if self.entered is not None and d not in self.entered:
                self.entered.add(d)
                more = self.cost.enter()
            self.clock[d, self.host] = self.clock.get((d, self.host), 0.0) + seconds + more
        return [self.clock[d, self.host] for d in hosts]

    def peak(self, device: Device) -> tuple[int, list[int]]:
        """Most bytes live on a device, and bytes by category live at the end."""
        curve = self.memory(device)
        return max(sum(size) for size in curve), list(curve[-1])

    def memory(self, device: Device) -> list[tuple[int, ...]]:
        """Bytes live on a device, by category: at the beginning, then with each op's results and after it."""
        categories = Categories(self.function)
        on = {k: device in self.devices(v) for k, v in self.names.items()}
        steps: list[Any] = []
        at: list[int] = []  # of each place in `flat`: how many steps come before it
        for n, (op, ins, outs) in enumerate(self.flat):
            makes = [k for k in outs if on[k]]
            uses = [k for k in ins if on[k]]
            at.append(len(steps))
            if makes or (uses and not op.spec.alias):
                steps.append((op, uses, makes, n in self.several))
        at.append(len(steps))
        last: dict[object, int] = {}
        for i, (_, uses, makes, _) in enumerate(steps):
            for k in (*uses, *makes):
                last[k] = i
        for k in self.outputs:
            last[k] = len(steps) + 1
        for body in self.bodies:
            here = [(n, values) for n, values in body[:-1] if at[n + 1] > at[n]]
            for (_, values), (n, _) in pairwise([*here, body[-1]]):
                last.update({k: max(last[k], at[n] - 1) for k in values})
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

        def total() -> tuple[int, ...]:
            found = [0] * len(CATEGORIES)
            for b in {b for k in live for b in lies[k]} | outside:
                found[size[b][0]] += size[b][1]
            return tuple(found)

        curve = [total()]
        for i, (op, uses, makes, several) in enumerate(steps):
            self._lie(op, i, uses, makes, several, lies, live, outside, last, fresh, categories, size)
            live.update(dict.fromkeys(makes))
            curve.append(total())
            for k in [k for k in live if last[k] == i]:
                del live[k]
            curve.append(total())
        return curve

    def _lie(self, op, i, uses, makes, several, lies, live, outside, last, fresh, categories, size) -> None:
        free = self.cost.free(op.spec, op.attributes, [v.type for v in op.inputs]) and op.inputs
        if free and op.spec is lookup("Pack"):
            lies[makes[0]] = [b for k in uses for b in lies[k]]
        elif free and op.spec is lookup("Unpack"):
            rest = list(lies[uses[0]])
            for k in makes:
                n = len(leaves(self.names[k].type))
                lies[k], rest = rest[:n], rest[n:]
        elif free or op in self.unwritten:
            for k in makes:
                lies[k] = lies[uses[0]]
        else:
            spare: dict[int, list[object]] = {}
            for k in dict.fromkeys(uses[n] for n in op.spec.donated(op.attributes, len(uses))):
                if last[k] == i and not several:
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
